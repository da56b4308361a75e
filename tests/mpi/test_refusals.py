"""Wrong input: all ranks raise a typed error before data moves, outputs keep their values, and later calls work."""

from __future__ import annotations

import numpy as np
import pytest

import fompi
from emulated import Emulated
from fompi.parallel.data import SGD, DataParallel
from fompi.parallel.sharding import Sharding
from fompi.plans.plan import Compute
from fompi.schedules import registry
from fompi.tuning import autotune

pytestmark = pytest.mark.ranks(mpich=[1, 2, 3], openmpi=[])

UNTOUCHED = 99.0


@pytest.fixture(autouse=True)
def later_calls_work(world):
    """After every test the communicator works as before, and nothing is left in flight."""
    requests = len(world.engine._requests)
    yield
    for schedule in ("auto", "ring", "unfused"):
        y = fompi.all_gather(np.full((2, 3), float(world.rank)), comm=world, schedule=schedule)
        np.testing.assert_array_equal(y[::2, 0], np.arange(world.size))
    assert not world.channel.active and not world.turns and not world.channel.failures
    world.engine.progress()
    assert len(world.engine._requests) <= requests


@pytest.fixture
def last(world):
    """True on the one rank that does something different."""
    return world.rank == world.size - 1


def read_only(array):
    array.flags.writeable = False
    return array


def expect_mismatch(call, *words):
    """`call` raises a MismatchError that says what each rank has called."""
    with pytest.raises(fompi.MismatchError) as caught:
        call()
    for word in ("the ranks disagree in call", "of world", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (np.ones((2, 3)), np.ones((2, 4)), ["[:, 3]", "[:, 4]"]),
        (np.ones((2, 3)), np.ones((2, 3, 1)), ["[:, 3]", "[:, 3, 1]"]),
        (np.ones((2, 3)), np.ones((2, 3), np.float32), ["float64", "float32"]),
        (np.ones((2, 3), np.int32), np.ones((2, 3), np.float32), ["int32", "float32"]),
    ],
)
def test_tensors_differ(world, last, mine, theirs, words):
    if world.size == 1:
        return
    x = theirs if last else mine
    for operation in (fompi.all_gather, fompi.reduce_scatter, fompi.all_to_all):
        expect_mismatch(lambda: operation(x, comm=world), operation.name, *words)  # noqa: B023
    for operation in (fompi.all_reduce, fompi.broadcast):
        expect_mismatch(lambda: operation(x, comm=world), operation.name)  # noqa: B023


def test_shapes_of_equal_size_differ(world, last):
    if world.size > 1:
        x = np.ones((3, 2) if last else (2, 3))
        for operation in (fompi.all_reduce, fompi.broadcast):
            expect_mismatch(lambda: operation(x, comm=world), "(3, 2)", "(2, 3)")  # noqa: B023


def test_rows_of_a_replicated_dimension_differ(world, last):
    if world.size > 1:
        x = np.ones((5 if last else 4, 3))
        expect_mismatch(lambda: fompi.reduce_scatter(x, comm=world), "rows [")
        expect_mismatch(lambda: fompi.matmul_reduce_scatter(x, np.eye(3), comm=world), "rows [")
        expect_mismatch(lambda: fompi.matmul_all_reduce(x, np.eye(3), comm=world), "rows [")


def test_counts_differ(world, last):
    if world.size > 1:
        first, end = [4] + [0] * (world.size - 1), [0] * (world.size - 1) + [4]
        counts = end if last else first
        expect_mismatch(lambda: fompi.reduce_scatter(np.ones((4, 3)), counts=counts, comm=world), "rows [4")


def test_operations_differ(world, last):
    """The ranks call two operations in different orders. The call after these agrees again."""
    if world.size == 1:
        return
    x = np.ones((2, 3))
    calls = [fompi.all_gather, fompi.all_reduce]
    for operation in reversed(calls) if last else calls:
        expect_mismatch(lambda: operation(x, comm=world), "all_gather", "all_reduce")  # noqa: B023
    expect_mismatch(
        lambda: fompi.all_gather(x, comm=world) if last else fompi.all_gather_matmul(x, np.eye(3), comm=world),
        f"rank {world.size - 1} calls all_gather(",
    )


def test_schedules_roots_and_biases_differ(world, last):
    if world.size == 1:
        return
    x, w, b = np.ones((2, 3)), np.eye(3), np.ones(3)
    expect_mismatch(lambda: fompi.all_reduce(x, comm=world, schedule="ring" if last else "direct"), "ring", "direct")
    expect_mismatch(lambda: fompi.all_reduce(x, comm=world, slices=2 if last else [1, 2]), "slices 2", "slices (1, 2)")
    expect_mismatch(lambda: fompi.broadcast(x, root=int(last), comm=world), "root 0", "root 1")
    expect_mismatch(lambda: fompi.matmul_all_reduce(x, w, bias=b if last else None, comm=world), "+ b")


def test_three_groups_of_ranks_differ(world):
    """The message names the ranks of each group."""
    if world.size >= 3:
        x = np.ones((2, 3 + world.rank % 3))
        third = "rank 2 calls" if world.size < 6 else "ranks 2, 5 call"
        expect_mismatch(lambda: fompi.all_gather(x, comm=world), "[:, 3]", "[:, 4]", third)


def test_one_rank_binds_and_the_others_call(world, last):
    if world.size > 1:
        plan = fompi.plan(fompi.all_reduce, fompi.Spec((3,), "float64", fompi.Partial()), ranks=world.size)
        x = np.ones(3)
        expect_mismatch(
            lambda: fompi.bind(plan, comm=world, x=x) if last else fompi.all_reduce(x, comm=world), "calls bind("
        )


# --------------------------------------------------------------------------------- one rank refuses its arguments

X, W = np.ones((4, 3)), np.ones((3, 2))
WRONG = [
    (fompi.all_gather, ([[1.0, 2.0]],), {}, fompi.TensorError),
    (fompi.all_gather, (np.ones((2, 3), object),), {}, fompi.DtypeError),
    (fompi.all_gather, (np.float64(1.0),), {}, fompi.TensorError),
    (fompi.all_gather, (np.array(1.0),), {}, fompi.ShapeError),
    (fompi.all_gather, (X.astype(">f8"),), {}, fompi.DtypeError),
    (fompi.all_gather, (X,), {"dim": 2}, fompi.ShapeError),
    (fompi.all_gather, (X,), {"dim": None}, fompi.ShapeError),
    (fompi.all_gather, (X,), {"schedule": "fastest"}, fompi.PlanError),
    (fompi.all_gather, (X,), {"schedule": "exchange"}, fompi.PlanError),
    (fompi.all_gather, (X,), {"schedule": "ring", "slices": 0}, fompi.PlanError),
    (fompi.all_gather, (X,), {"slices": -1}, fompi.PlanError),
    (fompi.all_gather, (X,), {"slices": 2.5}, fompi.PlanError),
    (fompi.all_gather, (X,), {"slices": "many"}, fompi.PlanError),
    (fompi.all_gather, (X,), {"effort": "lots"}, fompi.PlanError),
    (fompi.all_reduce, (X.astype(np.float16),), {"schedule": "unfused"}, fompi.PlanError),
    (fompi.all_reduce, (X > 0,), {}, fompi.DtypeError),
    (fompi.broadcast, (X,), {"root": 99}, fompi.LayoutError),
    (fompi.broadcast, (X,), {"root": -1}, fompi.LayoutError),
    (fompi.reduce_scatter, (X,), {"counts": [1]}, fompi.LayoutError),
    (fompi.reduce_scatter, (X,), {"counts": "many"}, fompi.LayoutError),
    (fompi.all_to_all, (X,), {"counts": [-1, 5]}, fompi.LayoutError),
    (fompi.all_gather_matmul, (X, np.ones((4, 2))), {}, fompi.ShapeError),
    (fompi.all_gather_matmul, (X, np.ones(3)), {}, fompi.ShapeError),
    (fompi.all_gather_matmul, (X, W.astype(np.float32)), {}, fompi.DtypeError),
    (fompi.all_gather_matmul, (X, W), {"bias": np.ones(3)}, fompi.ShapeError),
    (fompi.all_gather_matmul, (X, W), {"dim": 1}, fompi.ShapeError),
    (fompi.all_gather_matmul, (np.ones(3), W), {}, fompi.ShapeError),
    (fompi.matmul_reduce_scatter, (X, None), {}, fompi.TensorError),
    (fompi.all_gather_weight_gradient, (X, np.ones((4, 1, 2))), {}, fompi.ShapeError),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_one_rank_refuses_its_arguments(world, last, case):
    """That rank raises its error, and the others quote it. The same arguments on all ranks raise the same error."""
    operation, args, options, error = WRONG[case]
    with pytest.raises(error):
        operation(*args, **options, comm=world)
    if world.size > 1:
        with pytest.raises(error if last else fompi.MismatchError) as caught:
            if last:
                operation(*args, **options, comm=world)
            else:
                fompi.all_gather(X, comm=world)
        if not last:
            assert f"rank {world.size - 1} refuses {error.__name__}: " in str(caught.value)


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_one_rank_refuses_its_arguments_while_others_measure(world, last, case, monkeypatch):
    """The other ranks are in the handshake before a measurement. The refusal ends their call."""
    monkeypatch.setenv("FOMPI_CACHE", "0")
    operation, args, options, error = WRONG[case]
    with pytest.raises(error if last or world.size == 1 else fompi.MismatchError):
        if last:
            operation(*args, **{"effort": "measure", **options}, comm=world)
        else:
            fompi.all_gather(X, comm=world, effort="measure")


@pytest.mark.parametrize("options", [{"schedule": "ring"}, {"slices": 2}])
def test_measuring_with_a_schedule_or_slices(world, options):
    with pytest.raises(fompi.PlanError, match="chooses schedule and slices"):
        fompi.all_gather(X, comm=world, effort="measure", **options)


def test_rank_0_fails_to_list_candidates(world, last, monkeypatch):
    """All ranks quote the error of rank 0."""
    monkeypatch.setenv("FOMPI_CACHE", "0")

    def fails(*arguments):
        raise fompi.PlanError("no candidates")

    monkeypatch.setattr(autotune, "candidates", fails)
    if world.size > 1:
        with pytest.raises((fompi.PlanError, fompi.MismatchError), match="no candidates"):
            fompi.all_gather(np.ones((2, 5)), comm=world, effort="measure")


def test_plans_that_cannot_be_carried_out(world, last, monkeypatch):
    """They are refused before data moves, on one rank or on all ranks."""
    monkeypatch.setattr(registry, "SCHEDULES", dict(registry.SCHEDULES))
    monkeypatch.setattr(registry, "REGISTERED", dict(registry.REGISTERED))

    @fompi.schedule("nobody sends", "all_gather")
    def nobody_sends(problem, work):
        yield Compute("copy", (work["x"][:],), (work["y"][work.rank * work.parts : (work.rank + 1) * work.parts],))

    x = np.ones((3, 5))
    for operation, options in (
        (fompi.all_gather, {"schedule": "nobody sends"}),
        (fompi.all_gather, {"slices": 4095}),
        (fompi.all_reduce, {"schedule": "direct", "slices": 3000}),
    ):
        for on_all_ranks in (False, True) if world.size > 1 else ():
            with pytest.raises(fompi.PlanError if last or on_all_ranks else fompi.MismatchError):
                operation(x, comm=world, **(options if last or on_all_ranks else {}))


def test_slices_may_be_any_whole_numbers(world):
    x = np.ones((4, 3))
    for slices in (2, np.int64(2), [1, 2], np.array([1, 2])):
        assert fompi.all_gather(x, comm=world, slices=slices).shape == (4 * world.size, 3)


def test_kernels_that_cannot_be_replaced(world):
    plan = fompi.plan(fompi.all_reduce, fompi.Spec((3,), "float64", fompi.Partial()), ranks=world.size)
    x, machine = np.ones(3), fompi.Machine.load("laptop")
    with pytest.raises(fompi.PlanError, match="unknown kernel 'matmull'"):
        fompi.bind(plan, comm=world, x=x, kernels={"matmull": print})
    with pytest.raises(fompi.PlanError, match="'add': 3}: give a function"):
        fompi.bind(plan, comm=world, x=x, kernels={"add": 3})
    with pytest.raises(fompi.PlanError, match="emulated accelerator has its own"):
        fompi.bind(plan, comm=world, x=x, kernels={"add": print}, backend=Emulated(machine))


def wrong_outs(world):
    """(operation, arguments, a correct out=, a wrong out=, its error)"""
    n = world.size
    x, right = np.ones((n, 3)), np.full((n * n, 3), UNTOUCHED)
    wrong = [
        (read_only(right.copy()), fompi.TensorError),
        (np.full((n * n, 6), UNTOUCHED)[:, ::2], fompi.TensorError),
        (right.astype(np.float32), fompi.DtypeError),
        (np.full((n * n, 4), UNTOUCHED), fompi.ShapeError),
        (np.full((n * n, 3, 1), UNTOUCHED), fompi.ShapeError),
        (np.full((n * n + 1, 3), UNTOUCHED), fompi.ShapeError),
        ([1.0], fompi.TensorError),
    ]
    yield from ((fompi.all_gather, (x,), right, out, error) for out, error in wrong)
    own = np.full((1, 3), UNTOUCHED)
    yield fompi.reduce_scatter, (x,), own, np.full((2, 3), UNTOUCHED), fompi.ShapeError
    yield fompi.matmul_reduce_scatter, (x, np.eye(3)), own, np.full((0, 3), UNTOUCHED), fompi.ShapeError
    same = np.full((n, 3), UNTOUCHED)
    for operation in (fompi.all_reduce, fompi.broadcast, fompi.all_to_all):
        yield operation, (x,), same, np.full((n + 1, 3), UNTOUCHED), fompi.ShapeError
    yield fompi.matmul_all_reduce, (x, np.eye(3)), same, np.full((n + 1, 3), UNTOUCHED), fompi.ShapeError
    yield fompi.all_to_all_matmul, (x, np.eye(3)), same, np.full((n + 2, 3), UNTOUCHED), fompi.ShapeError
    yield fompi.matmul_all_to_all, (x, np.eye(3)), same, np.full((n + 2, 3), UNTOUCHED), fompi.ShapeError
    h, g = np.ones((n * n, 2)), np.full((3, 2), UNTOUCHED)
    yield fompi.all_gather_weight_gradient, (x, h), g, np.full((2, 3), UNTOUCHED), fompi.ShapeError


def test_out_that_cannot_be_written(world, last):
    """First on one rank, then on all ranks. No out= is written."""
    for operation, args, right, wrong, error in wrong_outs(world):
        for on_all_ranks in (False, True):
            out = wrong if last or on_all_ranks else right
            with pytest.raises(error if last or on_all_ranks else (fompi.MismatchError, error)):
                operation(*args, out=out, comm=world)
            for _ in range(20):
                world.engine.progress()
            assert (right == UNTOUCHED).all() and (isinstance(wrong, list) or (wrong == UNTOUCHED).all()), operation


def test_out_that_is_also_an_input(world):
    x = np.ones((world.size, 3))
    with pytest.raises(fompi.TensorError, match="shares memory"):
        fompi.all_to_all(x, out=x, comm=world)
    w = np.ones((3, 3))
    with pytest.raises(fompi.TensorError, match="shares memory"):
        fompi.matmul_reduce_scatter(np.ones((3 * world.size, 3)), w, out=w, comm=world)


def test_rows_that_do_not_match_what_arrives(world, last):
    """One rank has an operand with too many rows. This shows only when the counts of all ranks are known."""
    x, n = np.ones((2, 3)), 2 * world.size
    rows = n + 1 if last else n
    for operation, args in (
        (fompi.all_gather_weight_gradient, (np.ones((rows, 2)),)),
        (fompi.all_gather_matmul_weight_gradient, (np.ones((3, 4)), np.ones((rows, 2)))),
    ):
        with pytest.raises(
            fompi.ShapeError, match=f"rank {world.size - 1} has an operand" if world.size > 1 else "rows"
        ):
            operation(x, *args, comm=world)
    x, rows = np.ones((world.size, 3)), world.size + last
    for operation, args in (
        (fompi.all_to_all_weight_gradient, (np.ones((rows, 2)),)),
        (fompi.all_to_all_matmul_weight_gradient, (np.ones((3, 4)), np.ones((rows, 2)))),
    ):
        with pytest.raises(
            fompi.ShapeError if last else fompi.MismatchError, match=f"{world.size} rows arrive here|arrive"
        ):
            operation(x, *args, comm=world)


def test_a_started_operation_fails_in_wait(world, last):
    """On the ranks with correct arguments `start` returns, `done` becomes True, and `wait` raises the error."""
    if world.size == 1:
        return
    if last:
        with pytest.raises(fompi.PlanError):
            fompi.all_gather.start(X, comm=world, schedule="fastest")
    else:
        pending = fompi.all_gather.start(X, comm=world)
        while not pending.done():
            pass
        for _ in range(2):
            with pytest.raises(fompi.MismatchError, match="refuses PlanError"):
                pending.wait()


def test_a_mismatch_beside_other_operations_in_flight(world, last):
    """It ends only its own call."""
    if world.size == 1:
        return
    pending = []
    for i in range(9):
        options = {"schedule": ("auto", "unfused")[i % 2], "comm": world}
        pending.append(fompi.all_reduce.start(np.full(3 + (last and i % 3 == 0), float(i)), **options))
    for i in reversed(range(9)):
        if i % 3 == 0:
            with pytest.raises(fompi.MismatchError, match=rf"\({4 if last else 3},\)"):
                pending[i].wait()
        else:
            assert (pending[i].wait() == i * world.size).all()


def test_a_consumed_capsule(world, last):
    """One rank passes a DLPack capsule that NumPy has already consumed."""
    capsule = np.ones(3).__dlpack__()
    np.from_dlpack(_Exporter(capsule))
    with pytest.raises(fompi.TensorError if last else fompi.MismatchError):
        fompi.all_gather(capsule if last else np.ones(3), comm=world)


class _Exporter:
    """An object that exports this capsule."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **_):
        return self.capsule

    def __dlpack_device__(self):
        return 1, 0


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda: fompi.all_gather(X, shedule="ring"), fompi.ArgumentError),
        (lambda: fompi.all_gather(), fompi.ArgumentError),
        (lambda: fompi.all_gather(X, X), fompi.ArgumentError),
        (lambda: fompi.all_gather_matmul_many(X, 3), TypeError),
        (lambda: fompi.all_gather_matmul_many(X, [W], biases=4), TypeError),
        (lambda: fompi.all_gather.start(X, shedule="ring"), fompi.ArgumentError),
        (lambda: fompi.all_gather(X, schedule=None), fompi.PlanError),
        (lambda: fompi.all_gather(X, comm="tp"), fompi.LaunchError),
    ],
)
def test_arguments_that_cannot_even_be_read(world, last, wrong, error):
    """All ranks get an error at once, and the next call is in step."""
    with pytest.raises(error if last else fompi.MismatchError) as caught:
        wrong() if last else fompi.all_gather(X)
    if not last:
        assert f"refuses {error.__name__}: " in str(caught.value)
    with pytest.raises(error):
        wrong()
    assert np.array_equal(fompi.all_gather(X), np.concatenate([X] * world.size))


def test_a_communicator_without_its_name(world, last):
    """The ranks meet on it, also those that have written its name, and the error says what to write."""
    with world.split(0) as other:
        with pytest.raises(TypeError if last else fompi.MismatchError, match="write comm="):
            fompi.all_gather(X, other) if last else fompi.all_gather(X, comm=other)
        assert len(fompi.all_gather(X, comm=other)) == world.size * len(X)


def test_none_and_generators_are_weights_too(world):
    for options in ({}, {"biases": None}, {"biases": (b for b in (None, np.ones(2)))}):
        full, (y, z) = fompi.all_gather_matmul_many(X, (w for w in (W, W)), comm=world, **options)
        assert np.array_equal(y, full @ W) and np.array_equal(
            z, full @ W + ("biases" in options and bool(options["biases"]))
        )


def test_dimensions_differ(world, last):
    """The shapes of a square x do not show it."""
    x = np.ones((4, 4))
    if world.size > 1:
        for operation in (fompi.all_gather, fompi.reduce_scatter, fompi.all_to_all):
            expect_mismatch(lambda: operation(x, dim=1 if last else 0, comm=world), "dim=1")  # noqa: B023
    assert fompi.all_gather(x, dim=-1 if last else 1, comm=world).shape == (4, 4 * world.size)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"w": np.ones((3, 5))}, ["parameter 'w': float64 (3, 4) on rank", "float64 (3, 5) on rank"]),
        ({"w": np.ones((3, 4), np.float32)}, ["parameter 'w': float64 (3, 4) on rank", "float32 (3, 4) on rank"]),
        ({"w": np.full((3, 4), 2.0)}, ["parameter 'w': float64 (3, 4), contents differ between rank"]),
        ({"c": np.ones(2)}, ["parameter 'c': missing on rank"]),
    ],
)
def test_parameters_that_differ_are_named(world, last, parts, words):
    params = {"v": np.ones(3), "w": np.ones((3, 4))} | (parts if last else {})
    if world.size > 1:
        expect_mismatch(lambda: DataParallel(params, optimizer=SGD(0.1), comm=world), *words)


def test_a_long_list_of_parameters_that_differ(world, last):
    """It needs larger messages than other errors."""
    params = {f"layer{i}": np.full(2, (i * 7919 + last) % 1000.0) for i in range(3000)}
    if world.size > 1:
        expect_mismatch(lambda: DataParallel(params, optimizer=SGD(0.1), comm=world), "'layer0'", "and 2992 more")


def test_an_agreement_shows_no_digest(world, last):
    """Not even of what has no short text."""
    sharding = Sharding(12, ring=world.size, cu_seqlens=(0, 8 if last else 4, 12))
    x = sharding.shard(np.ones((12, 2)), world.rank)
    if world.size > 1:
        expect_mismatch(lambda: sharding.unshard(x, world), "cu_seqlens: (0, 4, 12) on rank", "(0, 8, 12) on rank")
