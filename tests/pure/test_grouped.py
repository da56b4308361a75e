"""Rows that go to experts: every plan is proven, run with data, and a plan with an error is found."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from plan_texts import programs_from_json, with_program
from reference import reference
from twin import twin

import fompi
from fompi import LayoutError, PlanError, Replicate, ShapeError, Shard, Spec
from fompi.backends.numpy import Numpy
from fompi.base.layout import Sizes, split
from fompi.plans.kernels import GROUPED
from fompi.plans.plan import Compute, Send
from fompi.plans.problems import Form, Problem, problem
from fompi.plans.staged import for_device
from fompi.schedules.registry import available, write


def problems(size, experts, dtype="float64"):
    """Every operation whose rows may go to experts, with one dimension between rows and columns in some."""

    def form(*shape):
        return Form(shape, dtype)

    x, x3, w = form(0, 3), form(0, 2, 3), form(9, 3, 4)
    how = {"experts": split(experts, size)}
    both = {"operands": [form(0, 5)], "flipped": True, "keep": True}
    return [
        problem("all_to_all_grouped_matmul", size, x3, [w], packed=True, **how),
        problem("grouped_matmul_all_to_all", size, x, [w], **how),
        problem("all_to_all_grouped_weight_gradient", size, x3, operands=[form(0, 2, 5)], **how),
        problem("all_to_all_grouped_matmul_weight_gradient", size, x, [w], **both, **how),
    ]


def sizes_of(wanted, seed):
    """Random rows, many runs without any."""
    random, size = Random(seed), wanted.size
    first, ranks = wanted.multiplies_first, range(size)
    numbers = [[wanted.experts[source if first else dest] for dest in ranks] for source in ranks]
    return Sizes.grouped([[random.choice((0, 0, 1, 3)) for _ in range(n)] for n in row] for row in numbers)


def inputs_of(plan, sizes, seed):
    """Small whole numbers: their sums are exact."""
    random, given = np.random.default_rng(seed), []
    for program in plan.programs:
        shapes = {b.name: b.shape(plan.extents(program.rank, sizes)) for b in program.buffers if b.role == "input"}
        given.append({name: random.integers(-9, 10, shape).astype(float) for name, shape in shapes.items()})
    return given


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_every_plan_is_right(size):
    """Some ranks have more experts than others, some have none. Slices end inside of runs."""
    for seed, experts in enumerate({max(1, size - 1), size + 1, 2 * size}):
        for wanted in problems(size, experts):
            for schedule in available(wanted):
                plan = write(wanted, schedule, 1 if schedule == "unfused" else 3)
                fompi.verify(plan)
                if size > 3 and schedule != "direct":
                    continue
                sizes = sizes_of(wanted, seed)
                given = inputs_of(plan, sizes, seed)
                results = twin(plan, given, Numpy(), sizes=sizes, seed=seed)
                for got, expected in zip(results, reference(wanted, given, sizes, np), strict=True):
                    assert got.keys() == expected.keys()
                    for name in got:
                        np.testing.assert_array_equal(got[name], expected[name], str(plan.problem))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_half_types_and_devices(dtype):
    """The host widens the weights of all experts once, a device does not. Gradients are rounded once."""
    for wanted in problems(3, 4, dtype):
        plan = write(wanted, "direct", 2)
        for made in (plan, fompi.staged(plan), for_device(plan)):
            fompi.verify(made)
        wide = [
            [b.name for b in p.buffers if b.name == "w_wide"] for p in (plan.programs[0], for_device(plan).programs[0])
        ]
        assert wide == [["w_wide"] * (dtype == "float16" and bool(wanted.weights)), []]


def test_joint_schedules_need_experts_on_every_rank():
    for experts, has_all in ((4, True), (2, False)):
        wanted = problems(3, experts)[1]
        assert ("sliced" in available(wanted)) == ("pairwise" in available(wanted)) == has_all
    with pytest.raises(PlanError, match="a rank without experts takes no part"):
        write(wanted, "unfused")


def test_a_user_schedule_knows_no_experts():
    wanted = problems(2, 2)[0]
    fompi.schedule("sends nothing", "all_to_all")(lambda problem, work: iter(()))
    try:
        assert "sends nothing" not in available(wanted)
        with pytest.raises(PlanError, match="it does not know experts"):
            write(wanted, "sends nothing")
    finally:
        from fompi.schedules import registry

        del registry.SCHEDULES["sends nothing"], registry.REGISTERED["sends nothing"]


def test_one_message_for_all_experts():
    """64 experts on 8 ranks: a rank sends as many messages as without experts."""
    wanted = problem(
        "all_to_all_grouped_matmul", 8, Form((0, 3), "float32"), [Form((8, 3, 4), "float32")], experts=(8,) * 8
    )
    for slices in (1, 4):
        ops = write(wanted, "direct", slices).programs[3].ops
        assert len([op for op in ops if isinstance(op, Send)]) == 7 * slices
        assert len([op for op in ops if isinstance(op, Compute)]) == 1 + 7 * slices


def planted(program):
    """The programs with one error: experts, runs or gradients that are exchanged, and ops that are left out."""
    for i, op in enumerate(program.ops):
        others = []
        if isinstance(op, Compute) and op.kernel in GROUPED:
            *rows, last = op.reads
            if op.kernel == "matmul_grouped" and last.start + 1 < program.buffer(last.buffer).count:
                moved = last._replace(start=last.start + 1, stop=last.stop + 1)
                others.append(replace(op, reads=(*rows, moved)))
                others.append(replace(op, reads=(*rows, last._replace(stop=last.stop + 1))))
            if len(op.writes) > 1:
                others.append(replace(op, writes=op.writes[::-1]))
            if op.kernel.startswith("gradient") and len(rows) > 2:
                others.append(replace(op, reads=(*op.reads[1::-1], *op.reads[2:])))
        yield replace(program, ops=program.ops[:i] + program.ops[i + 1 :])
        for other in others:
            yield replace(program, ops=(*program.ops[:i], other, *program.ops[i + 1 :]))


def test_planted_errors_are_found():
    count = 0
    for wanted in problems(2, 5):
        for slices in (1, 2):
            plan = write(wanted, "direct", slices)
            for program in planted(plan.programs[0]):
                with pytest.raises(PlanError):
                    fompi.verify(with_program(plan, program))
                count += 1
    assert count > 60


SPECS = Spec((64, 12), "float32", Shard(0)), Spec((6, 12, 24), "float32", Shard(0))


def test_plans_of_global_tensors():
    """Rows are spread evenly over the experts. JSON keeps all."""
    plan = fompi.plan(fompi.all_to_all_grouped_matmul, *SPECS, ranks=4, slices=2)
    assert plan.problem.experts == (2, 2, 1, 1) and plan.parts == 4
    assert plan.sizes.runs[0] == ((3, 3), (3, 3), (2, 0), (2, 0)) and plan.sizes.pairs[0] == (6, 6, 2, 2)
    fields, rest = programs_from_json(plan.to_json())
    assert rest["programs"] == tuple(plan.programs) and rest["sizes"] == plan.sizes
    assert tuple(fields["experts"]) == plan.problem.experts
    back = fompi.plan(fompi.grouped_matmul_all_to_all, Spec((60, 12), "float32", Shard(0)), SPECS[1], ranks=8)
    assert back.problem.experts == (1,) * 6 + (0, 0)
    assert [*map(sum, back.sizes.pairs)] == [10] * 6 + [0] * 2
    h = Spec((64, 24), "float32", Shard(0))
    gradient = fompi.plan(fompi.all_to_all_grouped_weight_gradient, SPECS[0], h, ranks=4, experts=6)
    assert [p.buffer("g").count for p in gradient.programs] == [2, 2, 1, 1]
    for made in (plan, back, gradient):
        fompi.verify(made)
        assert fompi.simulate(made, "gigabit").seconds > 0


def test_the_planner_hides_the_exchange():
    explanation = fompi.explain(
        "all_to_all_grouped_matmul",
        Spec((65536, 1024), "float32", Shard(0)),
        Spec((16, 1024, 4096), "float32", Shard(0)),
        ranks=4,
        machine="gigabit",
    )
    assert explanation.winner.seconds < explanation.unfused.seconds
    assert "experts 4, 4, 4, 4" in str(explanation)
    fompi.verify(explanation.plan)


def test_what_is_refused():
    with pytest.raises(LayoutError, match="takes tensors with the layouts"):
        fompi.plan("all_to_all_grouped_matmul", SPECS[0], Spec((6, 12, 24), "float32", Replicate()), ranks=2)
    with pytest.raises(LayoutError, match="all_gather_matmul takes no experts="):
        problem("all_gather_matmul", 2, Form((0, 4), "int32"), [Form((1, 4, 4), "int32")], experts=(1, 1))
    with pytest.raises(LayoutError, match="only rows that go to experts take counts="):
        fompi.plan("all_to_all", SPECS[0], ranks=2, counts=[[32, 32]])
    with pytest.raises(ShapeError, match="x has 64 rows, but counts= have 12"):
        fompi.plan("all_to_all_grouped_matmul", *SPECS, ranks=2, counts=[[(1, 1, 1)] * 2] * 2)
    with pytest.raises(LayoutError, match="experts have no bias"):
        fompi.plan("all_to_all_grouped_matmul", *SPECS, ranks=2, bias=True)
    with pytest.raises(ShapeError, match="w needs the shape"):
        problem("all_to_all_grouped_matmul", 2, Form((0, 4), "int32"), [Form((4, 4), "int32")], experts=(1, 1))
    plan = fompi.plan("all_to_all_grouped_matmul", *SPECS, ranks=2)
    with pytest.raises(LayoutError, match="must have 3 runs for each pair"):
        fompi.simulate(plan, "gigabit", Sizes(pairs=((1, 1), (1, 1))))
    assert isinstance(plan.problem, Problem)
