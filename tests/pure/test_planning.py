"""`fompi.plan` on Specs alone: what it makes, and what it says of tensors, ranks and schedules that cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from catalogue import everyone, problem_of, specs_of

import fompi
from fompi import (
    DtypeError,
    LayoutError,
    Partial,
    PlanError,
    Replicate,
    ShapeError,
    Shard,
    Spec,
)
from fompi.backends.numpy import Numpy
from fompi.model.machine import Machine
from fompi.model.twin import twin
from fompi.ops.operations import OPERATIONS
from fompi.planner import choose
from fompi.plans import problems
from fompi.plans.plan import Compute, Recv, Send
from fompi.plans.problems import MEANING, Form, problem
from fompi.schedules import registry

ROWS, COLUMNS, ALL, TERM = Shard(0), Shard(1), Replicate(), Partial()


@pytest.mark.parametrize("operation", MEANING)
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_every_operation_is_planned(operation, ranks):
    """By its name or itself; rows and columns spread as evenly as can be; by every schedule."""
    for schedule in ("auto", *registry.available(problem_of(operation, ranks))):
        plan = fompi.plan(OPERATIONS[operation], *specs_of(operation), ranks=ranks, schedule=schedule)
        fompi.verify(plan)
        assert plan == fompi.plan(operation, *specs_of(operation), ranks=ranks, schedule=schedule)
        assert plan.size == ranks and (schedule == "auto" or plan.schedule == schedule)
        assert sum(plan.sizes.rows) + sum(map(sum, plan.sizes.pairs)) == (72 if plan.problem.flat else 12)
        assert fompi.simulate(plan, fompi.Machine.load("laptop")).seconds >= 0


def test_operations_and_meanings_are_the_same_list():
    assert set(OPERATIONS) == set(MEANING)


def test_the_example_of_the_readme():
    x, w = Spec((4096, 4096), "bfloat16", ROWS), Spec((4096, 14336), "bfloat16", COLUMNS)
    plan = fompi.plan(fompi.all_gather_matmul, x, w, ranks=8)
    fompi.verify(plan)
    assert plan.problem.product_row(0) == (14336 // 8,) and plan.sizes.rows == (512,) * 8
    assert plan.parts == 1  # 4 MiB a shard


def test_uneven_rows_and_columns():
    plan = fompi.plan("matmul_reduce_scatter", *specs_of("matmul_reduce_scatter", rows=7, k=8), ranks=3)
    assert plan.sizes.rows == (3, 2, 2)
    assert [p.buffer("w").row for p in plan.programs] == [(3, 9), (3, 9), (2, 9)]
    pairs = fompi.plan("all_to_all", Spec((7, 2), "int8", ROWS), ranks=2).sizes.pairs
    assert pairs == ((2, 2), (2, 1))


def test_what_is_planned_by_options():
    x = Spec((6, 2), "float64", ALL)
    plan = fompi.plan(fompi.broadcast, x, ranks=3, root=2, packed=True, window=1, schedule="ring", slices=2)
    assert (plan.problem.root, plan.problem.packed, plan.window, plan.parts) == (2, True, 1, 2)
    kept = fompi.plan("all_gather_matmul_many", *specs_of("all_gather_matmul"), ranks=2).problem
    assert kept.keep and kept.kept == "x_full"
    back = fompi.plan("all_to_all_matmul_weight_gradient", *specs_of("all_to_all_matmul_weight_gradient"), ranks=2)
    assert back.problem.keep and back.problem.gradients[0].flipped
    assert not fompi.plan("all_gather_weight_gradient", *specs_of("all_gather_weight_gradient"), ranks=2).problem.keep


# ------------------------------------------------------------------------------------------------ what cannot be


def refused(kind, text, *args, **options):
    with pytest.raises(kind) as caught:
        fompi.plan(*args, **{"ranks": 2, **options})
    assert text in str(caught.value)


X = Spec((12, 6), "float32", ROWS)


@pytest.mark.parametrize("ranks", [0, -1, 2.0, None, "2"])
def test_numbers_of_ranks(ranks):
    refused(LayoutError, f"ranks={ranks!r}", fompi.all_gather, X, ranks=ranks)


def test_operations_that_are_not_there():
    refused(LayoutError, "no operation 'gather'; there are all_gather, broadcast, reduce_scatter", "gather", X)


@pytest.mark.parametrize("operation", MEANING)
def test_schedules_that_are_not_there(operation):
    """The message lists those that are, for this operation."""
    names = ", ".join(registry.available(problem_of(operation, 2)))
    text = f"no schedule 'tree' for {operation}; take auto, {names}"
    refused(PlanError, text, operation, *specs_of(operation), schedule="tree")


# ------------------------------------------------------------------------------------------------ schedules of users


def test_a_schedule_of_a_user(forgotten):
    assert fompi.schedule("everyone", "all_gather")(everyone) is everyone
    for ranks, slices in product((1, 2, 5, 9), (1, (1, 2))):
        plan = fompi.plan(fompi.all_gather, X, ranks=ranks, schedule="everyone", slices=slices)
        inputs = [{"x": np.full((rows, *X.shape[1:]), rank, X.dtype)} for rank, rows in enumerate(plan.sizes.rows)]
        for outputs in twin(plan, inputs, Numpy()):
            np.testing.assert_array_equal(outputs["y"], np.concatenate([given["x"] for given in inputs]))
    assert "everyone" in registry.available(problem_of("all_gather", 2))
    terms = Spec((12, 6), "float32", TERM)
    refused(PlanError, "no schedule 'everyone' for all_reduce", fompi.all_reduce, terms, schedule="everyone")


@pytest.mark.parametrize(
    ("lacking", "text"),
    [(Compute, "rank 0"), (Send, "rank 1"), (Recv, "rank 0")],
    ids=["no copy", "no send", "no receive"],
)
def test_a_schedule_of_a_user_that_is_wrong(forgotten, lacking, text):
    """On any number of ranks: also where our own plans are taken as proven."""

    def wrong(problem, work):
        skipped = False
        for op in everyone(problem, work):
            if work.rank == 0 and isinstance(op, lacking) and not skipped:
                skipped = True
                continue
            yield op

    fompi.schedule("wrong", "all_gather")(wrong)
    for ranks in (2, 12):
        with pytest.raises(PlanError, match=text):
            fompi.plan(fompi.all_gather, X, ranks=ranks, schedule="wrong")


@pytest.mark.parametrize(
    ("yielded", "text"),
    [
        (lambda work: work["z"], "no buffer 'z'; there are x, y"),
        (lambda work: "send", "op 0: a schedule yields no 'send'"),
    ],
    ids=["no such buffer", "no op"],
)
def test_a_schedule_of_a_user_that_makes_no_plan(forgotten, yielded, text):
    fompi.schedule("wrong", "all_gather")(lambda problem, work: iter([yielded(work)]))
    with pytest.raises(PlanError, match=text):
        fompi.plan(fompi.all_gather, X, ranks=3, schedule="wrong")


def test_a_schedule_of_a_user_is_registered_again(forgotten):
    """As a cell of a notebook is run again."""
    fompi.schedule("mine", "all_gather")(lambda problem, work: iter(()))
    fompi.schedule("mine", "all_gather")(everyone)
    assert fompi.plan(fompi.all_gather, X, ranks=2, schedule="mine").programs[0].ops


@pytest.mark.parametrize(
    ("name", "moves"),
    [("ring", ["all_gather"]), ("", ["all_gather"]), ("auto", ["all_gather"]), ("mine(3)", ["all_gather"]),
     ("mine", []), ("mine", ["all_gather", "barrier"])],
)  # fmt: skip
def test_schedules_that_cannot_be_registered(forgotten, name, moves):
    with pytest.raises(PlanError, match=r"cannot be registered|name some of"):
        fompi.schedule(name, *moves)


def test_schedules_that_an_operation_does_not_have():
    refused(PlanError, "no schedule 'ring' for all_to_all; take auto, unfused", fompi.all_to_all, X, schedule="ring")
    refused(PlanError, "no schedule 'exchange' for all_gather", fompi.all_gather, X, schedule="exchange")
    half = Spec((6,), "float16", TERM)
    refused(PlanError, "take auto, unfused_p2p, sliced_p2p, direct, ring", fompi.all_reduce, half, schedule="unfused")
    with pytest.raises(PlanError, match="all_gather has no schedule 'auto'"):
        registry.write(problem("all_gather", 2, Form((3,), "int8")), "auto")


@pytest.mark.parametrize("slices", [0, -2, 1.5, (), (1, 0), (2, -1), "2", ("a",), ((1, 2),)])
def test_slices_that_are_none(slices):
    refused(PlanError, f"slices={slices!r}: give a number >= 1, or the sizes", fompi.all_gather, X, slices=slices)


def test_windows_that_are_none():
    refused(PlanError, "window=0: at least one message", fompi.all_gather, X, window=0)


def test_gathers_of_the_library_before_products_go_one_after_the_other():
    """All that are under way end together; those that follow a product are held back by it."""
    gathered = fompi.plan("all_gather_matmul", *specs_of("all_gather_matmul"), ranks=2, schedule="sliced", slices=3)
    assert gathered.window == 1
    assert plan_window("all_gather_matmul", window=2) == 2
    assert plan_window("matmul_reduce_scatter") is plan_window("all_gather") is None

    fast = fompi.Machine("fast kernels", 0.0, 1e6, 1e15, 1e15, 0.0)
    gathers = [e for e in fompi.simulate(gathered, fast).events if e.lane == "collective" and e.rank == 0]
    starts, ends = [e.start for e in gathers], [e.end for e in gathers]
    assert starts[1:] == ends[:-1] and ends == sorted(set(ends))


def plan_window(operation, **options):
    return fompi.plan(operation, *specs_of(operation), ranks=2, schedule="sliced", slices=3, **options).window


def test_unequal_slices():
    plan = fompi.plan(fompi.all_gather, Spec((30, 2), "float32", Shard(0)), ranks=2, schedule="ring", slices=[1, 2, 2])
    assert plan.shares == (1, 2, 2)
    assert plan.extents(0).counts("rows") == [3, 6, 6, 3, 6, 6]
    assert str(plan).startswith("all_gather(float32[:, 2]) by ring: 2 ranks, 3 parts 1:2:2, scratch")
    both_ways = fompi.plan(fompi.all_gather, X, ranks=2, schedule="bidirectional", slices=(1, 2))
    assert both_ways.shares == (1, 1, 2, 2)


@pytest.mark.parametrize("root", [-1, 2, 7])
def test_roots(root):
    refused(LayoutError, f"root {root} is none of the ranks 0 to 1", "broadcast", Spec((6,), "float32", ALL), root=root)


@pytest.mark.parametrize("operation", MEANING)
def test_layouts_of_every_tensor(operation):
    """Another layout of any of its tensors; the message has those that the operation takes."""
    right = specs_of(operation)
    for i, spec in enumerate(right):
        for wrong in (ROWS, COLUMNS, ALL, TERM):
            if wrong != spec.layout:
                specs = [*right[:i], Spec(spec.shape, spec.dtype, wrong), *right[i + 1 :]]
                refused(LayoutError, f"{operation} takes tensors with the layouts [", operation, *specs)


@pytest.mark.parametrize("operation", MEANING)
def test_numbers_of_tensors(operation):
    refused(LayoutError, f"{operation} takes x", operation)
    if not operation.endswith("_many"):
        refused(LayoutError, f"{operation} takes x", operation, *specs_of(operation), Spec((6, 9), "float32", COLUMNS))
    if len(specs_of(operation)) > 1:
        refused(LayoutError, f"{operation} takes x, ", operation, specs_of(operation)[0])


@pytest.mark.parametrize("tensor", [(12, 6), "x", None, 3])
def test_what_is_no_spec(tensor):
    refused(LayoutError, f"fompi.Spec for each tensor, not on {tensor!r}", fompi.all_gather, tensor)


@pytest.mark.parametrize("operation", [name for name in MEANING if MEANING[name].weight is not None])
@pytest.mark.parametrize("shape", [(7, 9), (5, 9), (6,), (6, 9, 1)])
def test_weights_that_do_not_fit(operation, shape):
    """As a whole: 7 rows on 2 ranks would look like 6 on the last of them."""
    specs = specs_of(operation)
    last = Shard(-1) if specs[1].layout == COLUMNS else specs[1].layout
    specs[1] = Spec(shape, "float32", last if len(shape) > 1 else ALL)
    kind = LayoutError if len(shape) == 1 and last != ALL else ShapeError
    with pytest.raises(kind):
        fompi.plan(operation, *specs, ranks=2)


@pytest.mark.parametrize("operation", [name for name in MEANING if MEANING[name].operand is not None])
@pytest.mark.parametrize("shape", [(11, 9), (12, 2, 9)])
def test_operands_that_do_not_fit(operation, shape):
    specs = specs_of(operation)
    specs[-1] = Spec(shape, "float32", Shard(-1) if specs[-1].layout == COLUMNS else specs[-1].layout)
    with pytest.raises(ShapeError):
        fompi.plan(operation, *specs, ranks=2)


def test_dtypes():
    w = Spec((6, 9), "float64", COLUMNS)
    refused(DtypeError, "x is float32, but another operand is float64", fompi.all_gather_matmul, X, w)
    for operation in ("reduce_scatter", "all_reduce"):
        refused(DtypeError, "a sum of bool has no meaning", operation, Spec((6, 2), "bool", TERM))


def test_ranks_of_tensors():
    line = Spec((12,), "float32", ROWS)
    refused(ShapeError, "x needs rows and columns", fompi.all_gather_matmul, line, Spec((6, 9), "float32", COLUMNS))
    assert fompi.plan(fompi.all_reduce, Spec((), "float32", TERM), ranks=3).sizes.rows == (1, 0, 0)


@pytest.mark.parametrize(
    ("forms", "text"),
    [
        ({"x": Form((), "float32")}, "x has no dimension whose rows could be spread"),
        ({"x": Form((4, 3), "float32"), "weights": [Form((2, 5), "float32")]}, "w needs the shape (3, n), not (2, 5)"),
        (
            {"x": Form((4, 3), "float32"), "weights": [Form((3, 5), "float32")], "biases": [Form((3,), "float32")]},
            "the bias of w (3, 5) needs the shape (5,), not (3,)",
        ),
        (
            {
                "x": Form((4, 2, 3), "float32"),
                "weights": [Form((3, 5), "float32")],
                "operands": [Form((4, 3, 5), "float32")],
            },
            "rows of x (2, 3) and of h (3, 5) differ in more than their columns",
        ),
    ],
)
def test_local_tensors_that_do_not_fit(forms, text):
    with pytest.raises(ShapeError) as caught:
        problem("all_gather_matmul", 2, **forms)
    assert text in str(caught.value)


@pytest.mark.parametrize("weights, biases", [(0, 0), (1, 2)])
def test_weights_and_biases_that_do_not_go_together(weights, biases):
    x, w, b = Form((0, 3), "float32"), Form((3, 4), "float32"), Form((4,), "float32")
    with pytest.raises(ShapeError, match=f"was given {weights} weights and {biases} biases"):
        problems.problem("all_gather_matmul_many", 2, x, [w] * weights, [b] * biases, keep=True)


def test_what_is_no_plan_and_no_schedule():
    x = Spec((8, 4), "float32", Shard(0))
    with pytest.raises(PlanError, match="schedule=None"):
        fompi.plan("all_gather", x, ranks=2, schedule=None)
    with pytest.raises(PlanError, match=r"takes a fompi\.Plan"):
        fompi.verify("plan")
    plan = fompi.plan("all_gather", x, ranks=2)
    assert fompi.simulate(plan, "laptop").seconds == fompi.simulate(plan, fompi.Machine.load("laptop")).seconds


def test_what_was_chosen_before_a_schedule_came_is_forgotten(forgotten):
    problem, machine = problem_of("all_gather", 4), Machine.load("gigabit")
    choose.choose(problem, 1 << 20, machine=machine)
    assert choose._by_model.cache_info().currsize
    fompi.schedule("everyone", "all_gather")(everyone)
    assert not choose._by_model.cache_info().currsize


def test_schedules_are_told_apart_by_what_they_do(forgotten):
    """Not by where they are written; what is kept of a choice holds for these."""

    def written(text):
        names = {}
        exec(compile(text, "anywhere", "exec"), names)
        registry.SCHEDULES.pop("mine", None)
        fompi.schedule("mine", "all_gather")(names["f"])
        return registry.fingerprint()

    assert registry.fingerprint() == ""
    first = written("def f(problem, work):\n    yield [n for n in range(3)]")
    assert first == written("\n\ndef f(problem, work):\n    yield [n for n in range(3)]")
    assert first != written("def f(problem, work):\n    yield [n for n in range(4)]")
    assert first != written("def f(problem, work):\n    yield [n in {'a', 'b', 'c', ('d', 'e')} for n in range(3)]")
    registry.REGISTERED["mine"] = ("all_gather", "broadcast")
    assert len({first, registry.fingerprint(), written("def f(problem, work):\n    yield work.size")}) == 3


HASHED = """
import fompi
from fompi.schedules import registry

@fompi.schedule("mine", "all_gather")
def mine(problem, work):
    if problem.moves in {"all_gather", "broadcast", "all_reduce"}:
        yield from ()

print(registry.fingerprint())
"""


def test_schedules_are_told_apart_alike_in_every_process():
    """Whatever Python makes of the order of a set."""
    said = set()
    for seed in range(4):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        said.add(
            subprocess.run([sys.executable, "-c", HASHED], env=environment, capture_output=True, check=True).stdout
        )
    assert len(said) == 1 and said != {b"\n"}
