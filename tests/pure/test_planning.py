"""`fompi.plan` on Specs: the plans that it makes, and its errors for invalid tensors, ranks and schedules."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from catalogue import options_of, problem_of, send_to_all, specs_of
from twin import twin

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
from fompi.ops.operations import OPERATIONS
from fompi.planner import choose
from fompi.planner.choose import choose_schedule
from fompi.plans import problems
from fompi.plans.meaning import MEANING
from fompi.plans.plan import Compute, Recv, Send
from fompi.plans.problems import Form, problem
from fompi.schedules import registry

ROWS, COLUMNS, ALL, TERM = Shard(0), Shard(1), Replicate(), Partial()


@pytest.mark.parametrize("operation", MEANING)
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_every_operation_is_planned(operation, ranks):
    """An operation is given as a name or as itself. Rows and columns are distributed evenly. All schedules work."""
    for schedule in ("auto", *registry.available(problem_of(operation, ranks))):
        how = {"ranks": ranks, "schedule": schedule, **options_of(operation)}
        plan = fompi.plan(OPERATIONS.get(operation, operation), *specs_of(operation), **how)
        fompi.verify(plan)
        assert plan == fompi.plan(operation, *specs_of(operation), **how)
        assert plan.size == ranks and (schedule == "auto" or plan.schedule == schedule)
        assert sum(plan.sizes.rows) + sum(map(sum, plan.sizes.pairs)) == (72 if plan.problem.flat else 12)
        assert fompi.simulate(plan, fompi.Machine.load("laptop")).seconds >= 0


def test_every_operation_has_a_meaning():
    assert set(MEANING) - set(OPERATIONS) == {"all_to_all_columns"}  # fompi.all_to_all with two dimensions


def test_a_plan_for_large_tensors():
    x, w = Spec((4096, 4096), "bfloat16", ROWS), Spec((4096, 14336), "bfloat16", COLUMNS)
    plan = fompi.plan(fompi.all_gather_matmul, x, w, ranks=8)
    fompi.verify(plan)
    assert plan.problem.product_row(0) == (14336 // 8,) and plan.sizes.rows == (512,) * 8
    assert plan.parts == 1  # a shard has 4 MiB


def test_uneven_rows_and_columns():
    plan = fompi.plan("matmul_reduce_scatter", *specs_of("matmul_reduce_scatter", rows=7, k=8), ranks=3)
    assert plan.sizes.rows == (3, 2, 2)
    assert [p.buffer("w").row for p in plan.programs] == [(3, 9), (3, 9), (2, 9)]
    pairs = fompi.plan("all_to_all", Spec((7, 2), "int8", ROWS), ranks=2).sizes.pairs
    assert pairs == ((2, 2), (2, 1))


def test_options_of_a_plan():
    x = Spec((6, 2), "float64", ALL)
    plan = fompi.plan(fompi.broadcast, x, ranks=3, root=2, packed=True, window=1, schedule="ring", slices=2)
    assert (plan.problem.root, plan.problem.packed, plan.window, plan.parts) == (2, True, 1, 2)
    many = fompi.plan("all_gather_matmul_many", *specs_of("all_gather_matmul"), ranks=2).problem
    assert many.keep and many.kept == "x_full"
    backward = fompi.plan("all_to_all_matmul_weight_gradient", *specs_of("all_to_all_matmul_weight_gradient"), ranks=2)
    assert backward.problem.keep and backward.problem.gradients[0].flipped
    assert not fompi.plan("all_gather_weight_gradient", *specs_of("all_gather_weight_gradient"), ranks=2).problem.keep


# ------------------------------------------------------------------------------------------------ errors


def assert_refused(kind, text, *args, **options):
    """Planning raises this kind of error, with this text in its message."""
    with pytest.raises(kind) as caught:
        fompi.plan(*args, **{"ranks": 2, **options})
    assert text in str(caught.value)


X = Spec((12, 6), "float32", ROWS)


@pytest.mark.parametrize("ranks", [0, -1, 2.0, None, "2"])
def test_invalid_numbers_of_ranks(ranks):
    assert_refused(LayoutError, f"ranks={ranks!r}", fompi.all_gather, X, ranks=ranks)


def test_unknown_operations():
    assert_refused(LayoutError, "unknown operation 'scan'; known: all_gather, broadcast, reduce_scatter", "scan", X)


@pytest.mark.parametrize("operation", MEANING)
def test_unknown_schedules(operation):
    """The message lists the schedules of this operation."""
    names = ", ".join(registry.available(problem_of(operation, 2)))
    text = f"no schedule 'tree' for {operation}; choose auto, {names}"
    assert_refused(PlanError, text, operation, *specs_of(operation), schedule="tree", **options_of(operation))


# ------------------------------------------------------------------------------------------------ schedules of users


def test_a_schedule_of_a_user(forgotten):
    assert fompi.schedule("send_to_all", "all_gather")(send_to_all) is send_to_all
    for ranks, slices in product((1, 2, 5, 9), (1, (1, 2))):
        plan = fompi.plan(fompi.all_gather, X, ranks=ranks, schedule="send_to_all", slices=slices)
        inputs = [{"x": np.full((rows, *X.shape[1:]), rank, X.dtype)} for rank, rows in enumerate(plan.sizes.rows)]
        for outputs in twin(plan, inputs, Numpy()):
            np.testing.assert_array_equal(outputs["y"], np.concatenate([given["x"] for given in inputs]))
    assert "send_to_all" in registry.available(problem_of("all_gather", 2))
    terms = Spec((12, 6), "float32", TERM)
    assert_refused(
        PlanError, "no schedule 'send_to_all' for all_reduce", fompi.all_reduce, terms, schedule="send_to_all"
    )


def test_a_schedule_of_a_user_gets_a_strided_x_packed(forgotten):
    """It need not know: what it sends lies in rows. The packing is in the plan."""
    fompi.schedule("send_to_all", "all_gather")(send_to_all)
    for ranks, slices in product((1, 2, 3), (1, (1, 2))):
        plan = fompi.plan(fompi.all_gather, X, ranks=ranks, schedule="send_to_all", slices=slices, packed=True)
        fompi.verify(plan)
        for program in plan.programs:
            ops = [op for op in program.ops if isinstance(op, (Compute, Send)) and op.reads[0].buffer == "x"]
            assert ops and all(isinstance(op, Compute) and op.kernel == "pack" for op in ops)


@pytest.mark.parametrize(
    ("lacking", "text"),
    [(Compute, "rank 0"), (Send, "rank 1"), (Recv, "rank 0")],
    ids=["no copy", "no send", "no receive"],
)
def test_a_wrong_schedule_of_a_user_is_refused(forgotten, lacking, text):
    """Such plans are verified on any number of ranks, also where plans of built-in schedules are not."""

    def wrong(problem, work):
        skipped = False
        for op in send_to_all(problem, work):
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
        (lambda work: work["z"], "unknown buffer 'z'; known: x, y"),
        (lambda work: "send", "op 0: a schedule must yield Send, Recv, Compute or Collective, not 'send'"),
    ],
    ids=["no such buffer", "no op"],
)
def test_a_schedule_of_a_user_that_cannot_make_a_plan_is_refused(forgotten, yielded, text):
    fompi.schedule("wrong", "all_gather")(lambda problem, work: iter([yielded(work)]))
    with pytest.raises(PlanError, match=text):
        fompi.plan(fompi.all_gather, X, ranks=3, schedule="wrong")


def test_a_second_registration_replaces_the_first(forgotten):
    """This happens if a cell of a notebook is run again."""
    fompi.schedule("mine", "all_gather")(lambda problem, work: iter(()))
    fompi.schedule("mine", "all_gather")(send_to_all)
    assert fompi.plan(fompi.all_gather, X, ranks=2, schedule="mine").programs[0].ops


@pytest.mark.parametrize(
    ("name", "moves"),
    [("ring", ["all_gather"]), ("", ["all_gather"]), ("auto", ["all_gather"]), ("mine(3)", ["all_gather"]),
     ("mine", []), ("mine", ["all_gather", "barrier"])],
)  # fmt: skip
def test_invalid_registrations_are_refused(forgotten, name, moves):
    with pytest.raises(PlanError, match=r"cannot register|choose one or more of"):
        fompi.schedule(name, *moves)


def test_schedules_that_an_operation_lacks():
    assert_refused(
        PlanError, "no schedule 'ring' for all_to_all; choose auto, unfused", fompi.all_to_all, X, schedule="ring"
    )
    assert_refused(PlanError, "no schedule 'exchange' for all_gather", fompi.all_gather, X, schedule="exchange")
    half = Spec((6,), "float16", TERM)
    assert_refused(
        PlanError, "choose auto, unfused_p2p, sliced_p2p, direct, ring", fompi.all_reduce, half, schedule="unfused"
    )
    with pytest.raises(PlanError, match="all_gather has no schedule 'auto'"):
        registry.write(problem("all_gather", 2, Form((3,), "int8")), "auto")


@pytest.mark.parametrize("slices", [0, -2, 1.5, (), (1, 0), (2, -1), "2", ("a",), ((1, 2),)])
def test_invalid_slices(slices):
    assert_refused(PlanError, f"slices={slices!r} must be an integer >= 1, or the", fompi.all_gather, X, slices=slices)


def test_invalid_windows():
    assert_refused(PlanError, "window=0 must be an integer >= 1", fompi.all_gather, X, window=0)


def test_native_gathers_before_products_run_one_after_another():
    """Collectives in flight end together, so this lets products start earlier. Others have no window."""
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


def test_slices_of_different_sizes():
    plan = fompi.plan(fompi.all_gather, Spec((30, 2), "float32", Shard(0)), ranks=2, schedule="ring", slices=[1, 2, 2])
    assert plan.shares == (1, 2, 2)
    assert plan.extents(0).counts("rows") == [3, 6, 6, 3, 6, 6]
    assert str(plan).startswith("all_gather(float32[:, 2]) by ring: 2 ranks, 3 parts 1:2:2, scratch")
    bidirectional = fompi.plan(fompi.all_gather, X, ranks=2, schedule="bidirectional", slices=(1, 2))
    assert bidirectional.shares == (1, 1, 2, 2)


@pytest.mark.parametrize("root", [-1, 2, 7])
def test_invalid_roots(root):
    assert_refused(
        LayoutError, f"root={root} must be a rank from 0 to 1", "broadcast", Spec((6,), "float32", ALL), root=root
    )


@pytest.mark.parametrize("operation", MEANING)
def test_wrong_layouts_are_refused(operation):
    """One tensor of the operation has another layout. The message lists the right layouts."""
    right = specs_of(operation)
    for i, spec in enumerate(right):
        for wrong in (ROWS, COLUMNS, ALL, TERM):
            if wrong != spec.layout:
                specs = [*right[:i], Spec(spec.shape, spec.dtype, wrong), *right[i + 1 :]]
                assert_refused(LayoutError, f"{operation} takes tensors with the layouts [", operation, *specs)


@pytest.mark.parametrize("operation", MEANING)
def test_wrong_numbers_of_tensors(operation):
    assert_refused(LayoutError, f"{operation} takes x", operation)
    if not operation.endswith("_many"):
        assert_refused(
            LayoutError, f"{operation} takes x", operation, *specs_of(operation), Spec((6, 9), "float32", COLUMNS)
        )
    if len(specs_of(operation)) > 1:
        assert_refused(LayoutError, f"{operation} takes x, ", operation, specs_of(operation)[0])


@pytest.mark.parametrize("tensor", [(12, 6), "x", None, 3])
def test_tensors_that_are_not_specs(tensor):
    assert_refused(LayoutError, f"fompi.Spec for each tensor, not from {tensor!r}", fompi.all_gather, tensor)


@pytest.mark.parametrize("operation", [name for name in MEANING if MEANING[name].weight and not MEANING[name].grouped])
@pytest.mark.parametrize("shape", [(7, 9), (5, 9), (6,), (6, 9, 1)])
def test_weights_of_a_wrong_shape(operation, shape):
    """The global shapes are checked: on 2 ranks, the pieces of 7 and of 6 rows are equal on the last rank."""
    specs = specs_of(operation)
    last = Shard(-1) if specs[1].layout == COLUMNS else specs[1].layout
    specs[1] = Spec(shape, "float32", last if len(shape) > 1 else ALL)
    kind = LayoutError if len(shape) == 1 and last != ALL else ShapeError
    with pytest.raises(kind):
        fompi.plan(operation, *specs, ranks=2)


@pytest.mark.parametrize("operation", [name for name in MEANING if MEANING[name].operand is not None])
@pytest.mark.parametrize("shape", [(11, 9), (12, 2, 9)])
def test_operands_of_a_wrong_shape(operation, shape):
    specs = specs_of(operation)
    specs[-1] = Spec(shape, "float32", Shard(-1) if specs[-1].layout == COLUMNS else specs[-1].layout)
    with pytest.raises(ShapeError):
        fompi.plan(operation, *specs, ranks=2, **options_of(operation))


def test_wrong_dtypes():
    w = Spec((6, 9), "float64", COLUMNS)
    assert_refused(DtypeError, "x is float32, but w is float64; convert", fompi.all_gather_matmul, X, w)
    several = X, Spec((6, 9), "float32", COLUMNS), w
    assert_refused(DtypeError, "x is float32, but ws[1] is float64; convert", fompi.all_gather_matmul_many, *several)
    for operation in ("reduce_scatter", "all_reduce"):
        assert_refused(DtypeError, "bool cannot be summed", operation, Spec((6, 2), "bool", TERM))


def test_number_of_dimensions():
    vector = Spec((12,), "float32", ROWS)
    assert_refused(
        ShapeError,
        "x has the shape (12,), but needs two dimensions or more",
        fompi.all_gather_matmul,
        vector,
        Spec((6, 9), "float32", COLUMNS),
    )
    assert fompi.plan(fompi.all_reduce, Spec((), "float32", TERM), ranks=3).sizes.rows == (1, 0, 0)


@pytest.mark.parametrize(
    ("forms", "text"),
    [
        ({"x": Form((), "float32")}, "x has no dimensions, so it has no rows to distribute"),
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
            "rows of x (2, 3) and of h (3, 5) may differ only in the last dimension",
        ),
    ],
)
def test_local_tensors_of_a_wrong_shape(forms, text):
    with pytest.raises(ShapeError) as caught:
        problem("all_gather_matmul", 2, **forms)
    assert text in str(caught.value)


@pytest.mark.parametrize("weights, biases", [(0, 0), (1, 2)])
def test_numbers_of_weights_and_biases_that_do_not_match(weights, biases):
    x, w, b = Form((0, 3), "float32"), Form((3, 4), "float32"), Form((4,), "float32")
    with pytest.raises(ShapeError, match=f"does not take {weights} weights and {biases} biases"):
        problems.problem("all_gather_matmul_many", 2, x, [w] * weights, [b] * biases, keep=True)


def test_arguments_of_a_wrong_type():
    x = Spec((8, 4), "float32", Shard(0))
    with pytest.raises(PlanError, match="schedule=None must be a name"):
        fompi.plan("all_gather", x, ranks=2, schedule=None)
    with pytest.raises(PlanError, match=r"takes a fompi\.Plan"):
        fompi.verify("plan")
    plan = fompi.plan("all_gather", x, ranks=2)
    assert fompi.simulate(plan, "laptop").seconds == fompi.simulate(plan, fompi.Machine.load("laptop")).seconds


def test_a_registration_clears_the_cache_of_choices(forgotten):
    problem, machine = problem_of("all_gather", 4), Machine.load("gigabit")
    choose_schedule(problem, 1 << 20, machine=machine)
    assert choose._by_model.cache_info().currsize
    fompi.schedule("send_to_all", "all_gather")(send_to_all)
    assert not choose._by_model.cache_info().currsize


def test_the_fingerprint_depends_on_the_code_of_a_schedule(forgotten):
    """It does not depend on the place of the code in a file. It is part of the key of stored choices."""

    def fingerprint(text):
        names = {}
        exec(compile(text, "anywhere", "exec"), names)
        registry.SCHEDULES.pop("mine", None)
        fompi.schedule("mine", "all_gather")(names["f"])
        return registry.fingerprint()

    assert registry.fingerprint() == ""
    first = fingerprint("def f(problem, work):\n    yield [n for n in range(3)]")
    assert first == fingerprint("\n\ndef f(problem, work):\n    yield [n for n in range(3)]")
    assert first != fingerprint("def f(problem, work):\n    yield [n for n in range(4)]")
    assert first != fingerprint("def f(problem, work):\n    yield [n in {'a', 'b', 'c', ('d', 'e')} for n in range(3)]")
    registry.REGISTERED["mine"] = ("all_gather", "broadcast")
    assert len({first, registry.fingerprint(), fingerprint("def f(problem, work):\n    yield work.size")}) == 3


HASHED = """
import fompi
from fompi.schedules import registry

@fompi.schedule("mine", "all_gather")
def mine(problem, work):
    if problem.moves in {"all_gather", "broadcast", "all_reduce"}:
        yield from ()

print(registry.fingerprint())
"""


def test_the_fingerprint_is_the_same_in_every_process():
    """It does not depend on the order of a set, which differs between processes."""
    printed = set()
    for seed in range(4):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        printed.add(
            subprocess.run([sys.executable, "-c", HASHED], env=environment, capture_output=True, check=True).stdout
        )
    assert len(printed) == 1 and printed != {b"\n"}
