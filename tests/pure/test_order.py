"""Sums in the order of a tree over the ranks: the plans have it, the proof keeps it, and the bits follow from it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import catalogue
import numpy as np
import pytest

import fompi
from fompi.backends.half import narrow, widen
from fompi.backends.numpy import Numpy
from fompi.base.errors import PlanError
from fompi.base.layout import Sizes
from fompi.model.machine import Machine
from fompi.model.twin import twin
from fompi.planner.choose import choose_schedule
from fompi.planner.explain import explain
from fompi.plans.plan import Compute, Program, Programs, Recv
from fompi.plans.problems import in_order
from fompi.plans.tree import folded
from fompi.plans.verify import verify
from fompi.schedules import registry

SUMS = sorted(name for name, each in catalogue.problems(2).items() if each.sums)


def written(name, size, schedule, slices=1, dtype="float32", order="ranks", sizes=None):
    return registry.write(in_order(catalogue.problems(size, dtype)[name], order), schedule, slices, sizes)


def schedules(name, size, dtype="float32"):
    ordered = in_order(catalogue.problems(size, dtype)[name], "ranks")
    groups = ["hierarchical(2)"] if size == 8 and ordered.moves in registry.HIERARCHICAL_MOVES else []
    return [*registry.available(ordered), *groups]


def test_the_tree():
    def text(n):
        return folded([str(i) for i in range(n)], lambda a, b: f"({a}+{b})")

    assert [text(n) for n in (1, 2, 3, 4)] == ["0", "(0+1)", "((0+1)+2)", "((0+1)+(2+3))"]
    assert text(7) == "(((0+1)+(2+3))+((4+5)+6))"
    for first, inner in ((4, 2), (8, 4), (24, 8)):  # runs of 2**i leaves are nodes
        leaves = [str(i) for i in range(first + inner)]
        runs = [folded(leaves[at : at + inner], lambda a, b: f"({a}+{b})") for at in range(0, len(leaves), inner)]
        assert folded(runs, lambda a, b: f"({a}+{b})") == text(len(leaves))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", SUMS)
def test_every_schedule_has_the_bits_of_the_tree(name, size, dtype):
    """For even and uneven rows and all slices. A product copies columns of x, so it is exact, however it is cut."""

    def fill(random, shape, dtype):
        weight = len(shape) == 2 and shape[0] in (2, 3) and shape[1] in (2, 4)
        return narrow(np.eye(*shape, dtype="f4") if weight else random.standard_normal(shape).astype("f4"), dtype)

    distinct = set()
    for distribution, (number, schedule) in zip(
        ("even", "uneven", "few", "lonely") * 3, enumerate(schedules(name, size, dtype)), strict=False
    ):
        problem = in_order(catalogue.problems(size, dtype)[name], "ranks")
        sizes = catalogue.sizes(problem, distribution)
        given = catalogue.inputs(problem, sizes, fill=fill)
        plan = registry.write(problem, schedule, (1, 2, (1, 2))[number % 3], sizes)
        verify(plan)
        terms = [widen(of["x"], dtype) for of in given]
        if problem.weights:
            terms = [x @ widen(of["w"], dtype) for x, of in zip(terms, given, strict=True)]
            terms[0] = terms[0] + (widen(given[0]["bias"], dtype) if problem.weights[0].bias else 0)
        whole = folded(terms, {"max": np.maximum, "min": np.minimum, "prod": np.multiply}.get(problem.op, np.add))
        wanted = narrow(whole / np.float32(size) if problem.op == "mean" else whole, dtype)
        ends = np.cumsum([0, *sizes.rows])
        for rank, got in enumerate(twin(plan, given, Numpy(), sizes=sizes, seed=number)):
            here = slice(ends[rank], ends[rank + 1]) if problem.moves == "reduce_scatter" else slice(None)
            (y,) = got.values()
            assert y.tobytes() == np.ascontiguousarray(wanted[here]).tobytes(), (schedule, distribution)
        distinct.add(schedule)
    assert len(distinct) >= 2 or size == 1


def test_without_an_order_schedules_differ():
    """So the test above shows something."""
    problem, sizes, found = catalogue.problems(4, "float32")["all_reduce"], Sizes((8,) * 4), set()
    given = catalogue.inputs(problem, sizes, fill=lambda random, shape, dtype: random.standard_normal(shape, "f4"))
    for schedule in ("direct", "exchange", "doubling"):
        (y,) = twin(registry.write(problem, schedule, 1, sizes), given, Numpy(), sizes=sizes)[0].values()
        found.add(y.tobytes())
    assert len(found) > 1


# ------------------------------------------------------------------------------------------------ spoiled plans


@cache
def plans():
    return [
        written(name, size, schedule, slices)
        for size in (3, 4, 5, 8)
        for name in SUMS
        for schedule in schedules(name, size)
        for slices in (1, 2)
    ]


def other_way_round(random, program):
    """The two terms of an addition change places."""
    at = random.choice([i for i, op in enumerate(program.ops) if isinstance(op, Compute) and adds(op)])
    op, half = program.ops[at], len(program.ops[at].reads) // 2
    return exchanged(program, {at: replace(op, reads=(*op.reads[half:], *op.reads[:half]))})


def leaves_moved(random, program):
    """What two ranks send changes places."""
    arriving = [i for i, op in enumerate(program.ops) if isinstance(op, Recv) and "inbox" in op.chunk.buffer]
    one, other = random.sample(arriving, 2)
    a, b = program.ops[one], program.ops[other]
    return exchanged(program, {one: replace(a, chunk=b.chunk), other: replace(b, chunk=a.chunk)})


def begun_elsewhere(random, program):
    """((a + b) + c) becomes (a + (b + c))."""
    sums = {op.writes[0]: i for i, op in enumerate(program.ops) if isinstance(op, Compute) and adds(op)}
    pairs = [(i, sums[op.reads[0]]) for op, i in [(program.ops[i], i) for i in sums.values()] if op.reads[0] in sums]
    outer, inner = random.choice([pair for pair in pairs if pair[0] > pair[1]])
    (ab, c), (a, b) = program.ops[outer].reads, program.ops[inner].reads
    changed = replace(program.ops[inner], reads=(b, c)), replace(program.ops[outer], reads=(a, ab))
    return exchanged(program, {inner: changed[0], outer: changed[1]})


def adds(op):
    return op.kernel in ("add", "max", "min", "prod") or op.kernel.startswith("mean")


def exchanged(program, ops):
    return replace(program, ops=tuple(ops.get(i, op) for i, op in enumerate(program.ops)))


def test_no_spoiled_plan_is_accepted():
    """The same terms, added otherwise: 1,000 plans, of which the proof without an order accepts most."""
    random, spoiled, words, without = Random(1), 0, set(), 0
    while spoiled < 1000:
        plan, spoil = random.choice(plans()), random.choice((other_way_round, leaves_moved, begun_elsewhere))
        rank = random.randrange(plan.size)
        try:
            program: Program = spoil(random, plan.programs[rank])
        except (IndexError, ValueError):  # there is nothing to spoil in this way
            continue
        if program == plan.programs[rank]:
            continue
        changed = replace(
            plan,
            programs=Programs(plan.size, lambda r, p=plan, at=rank, new=program: new if r == at else p.programs[r]),
        )
        with pytest.raises(PlanError) as error:
            verify(changed)
        words.add(" but the order 'ranks' is (" in str(error.value))
        spoiled += 1
        if spoiled % 10 == 0:
            try:
                verify(replace(changed, problem=replace(plan.problem, order="")))
                without += 1
            except PlanError:
                pass
    assert True in words and without > 30


# ---------------------------------------------------------------------------------------------- choice and words


@pytest.mark.parametrize("name", SUMS)
def test_the_choice_has_the_order(name):
    for size in (2, 3, 4, 8):
        ordered = in_order(catalogue.problems(size, "float32")[name], "ranks")
        for rows in (None, 64, 1 << 12, 1 << 21):
            for network in (False, True):
                schedule, slices = choose_schedule(ordered, rows, network)
                assert registry.is_available(ordered, schedule)
                verify(registry.write(ordered, schedule, slices))
        found = explain(ordered, Sizes((64,) * size), Machine.load("gigabit"))
        assert all(registry.is_available(ordered, judged.candidate.schedule) for judged in found.judged)


def test_words():
    x = fompi.Spec((8, 3), "float32", fompi.Partial())
    with pytest.raises(
        PlanError,
        match="no schedule 'ring' for reduce_scatter: its sums do not have the order 'ranks'; choose auto, unf",
    ):
        fompi.plan("reduce_scatter", x, ranks=4, schedule="ring", order="ranks")
    with pytest.raises(PlanError, match="order='tree' must be one of 'any', 'ranks'"):
        fompi.plan("reduce_scatter", x, ranks=4, order="tree")
    with pytest.raises(PlanError, match="messages with the wire int8 have no order yet"):
        fompi.plan("reduce_scatter", x, ranks=4, wire="int8", order="ranks")
    made = fompi.plan("all_reduce", x, ranks=4, order="ranks", schedule="direct")
    assert "order ranks" in str(made.problem) and made.problem.order == "ranks"
    gathered = fompi.plan("all_gather", fompi.Spec((8, 3), "float32", fompi.Shard(0)), ranks=4, order="ranks")
    assert not gathered.problem.order  # it sums nothing
    with pytest.raises(PlanError, match="sums over rows, piece by piece, which has no order yet"):
        in_order(catalogue.problems(4)["all_gather_weight_gradient"], "ranks")
