"""Blocks of one executor flow into another one: `second.feed("x", first, "y", kernel)`."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import fompi
from fompi import Shard, Spec
from fompi.base.layout import split

ROWS, K, N = 10, 3, 8


def bound(world, slices=2, out=K):
    """gather + product, and product + reduce-scatter, on numbers of this rank; the weights of all ranks."""
    size, rank = world.size, world.rank
    random = np.random.default_rng(3)
    w1, w2 = random.integers(-3, 4, (K, size * N)).astype(float), random.integers(-3, 4, (size * N, out)).astype(float)
    own = slice(rank * N, (rank + 1) * N)
    x = np.zeros((split(ROWS, size)[rank], K))
    dtype = "float64"
    up = fompi.plan(
        "all_gather_matmul", Spec((ROWS, K), dtype, Shard(0)), Spec((K, size * N), dtype, Shard(1)), ranks=size,
        schedule="direct", slices=slices,
    )  # fmt: skip
    down = fompi.plan(
        "matmul_reduce_scatter", Spec((ROWS, size * N), dtype, Shard(1)), Spec((size * N, out), dtype, Shard(0)),
        ranks=size, schedule="direct", slices=slices,
    )  # fmt: skip
    first = fompi.bind(up, comm=world, x=x, w=w1[:, own].copy())
    second = fompi.bind(down, comm=world, x=np.zeros((ROWS, N)), w=w2[own].copy())
    return x, w1, w2, first, second


def relu(y, x):
    np.maximum(y, 0, out=x)


@pytest.mark.parametrize("kernel", [relu, None])
@pytest.mark.parametrize("late", [False, True])
def test_a_chain(world, kernel, late):
    """Several calls, with the program between the starts or not. Each call has the numbers of its own source."""
    x, w1, w2, first, second = bound(world)
    second.feed("x", first, "y", kernel)
    rows = split(ROWS, world.size)
    own = slice(sum(rows[: world.rank]), sum(rows[: world.rank + 1]))
    for call in range(4):
        whole = np.random.default_rng([7, call]).integers(-4, 5, (ROWS, K)).astype(float)
        x[...] = whole[own]
        first.start()
        if late:
            first.wait()
        second.start()
        h = whole @ w1
        np.testing.assert_array_equal(second.wait(), ((np.maximum(h, 0) if kernel else h) @ w2)[own])
    second.close()
    first.close()


def test_errors(world):
    """A kernel that raises is an error of the second call on all ranks. A source must be started for each call."""
    *_, first, second = bound(world)
    fails = world.rank == world.size - 1

    def bad(y, x):
        if fails:
            raise ArithmeticError("of the kernel")

    second.feed("x", first, "y", bad)
    with pytest.raises(fompi.StateError, match="which feeds x, first"):
        second.start()
    for _ in range(2):  # the second one shows that both go on
        first.start()
        second.start()
        with pytest.raises(ArithmeticError if fails else fompi.PeerError, match="of the kernel"):
            second.wait()
        first.wait()
    with pytest.raises(fompi.StateError, match="which feeds x, first"):
        second.start()
    second.close()
    first.close()


def test_a_source_that_fails(world):
    """Its error is that of the call that it feeds, on all ranks."""
    *_, first, second = bound(world)
    fails = world.rank == 0

    def bad(reads, writes):
        raise ArithmeticError("of the source")

    first.close()
    plan, arrays = first.plan, first._tensors
    kernels = {"matmul": bad} if fails else {}
    first = fompi.bind(plan, comm=world, kernels=kernels, **{name: arrays[name].owner for name in ("x", "w")})
    second.feed("x", first, "y", relu)
    first.start()
    second.start()
    with pytest.raises(ArithmeticError if fails else fompi.PeerError, match="of the source"):
        second.wait()
    heard = contextlib.suppress(fompi.PeerError)  # another rank may have finished before it hears of the error
    with pytest.raises(ArithmeticError) if fails else heard:
        first.wait()
    second.close()
    first.close()


def test_what_does_not_fit(world):
    *_, first, second = bound(world)
    *_, other, unlike = bound(world, slices=1, out=2)
    with pytest.raises(fompi.PlanError, match="different rows"):
        second.feed("x", other, "y", relu)
    with pytest.raises(fompi.PlanError, match="give a kernel"):
        first.feed("w", second)
    with pytest.raises(fompi.PlanError, match="no input"):
        second.feed("z", first)
    with pytest.raises(fompi.PlanError, match="no output"):
        second.feed("x", first, "z")
    second.start().wait()  # no refused feed is left
    for step in (first, second, other, unlike):
        step.close()


def test_rows_that_differ_on_some_ranks_only(world):
    """All ranks refuse: those whose own rows fit would wait for the others."""
    size, rank = world.size, world.rank

    def own(rows):
        return np.zeros((split(rows, size)[rank], K))

    def result(rows):
        specs = Spec((rows, 2 * size), "float64", Shard(1)), Spec((2 * size, K), "float64", Shard(0))
        plan = fompi.plan(fompi.matmul_reduce_scatter, *specs, ranks=size, schedule="direct")
        return fompi.bind(plan, comm=world, x=np.ones((rows, 2)), w=np.ones((2, K)))

    specs = Spec((ROWS, K), "float64", Shard(0)), Spec((K, size), "float64", Shard(1))
    plan = fompi.plan(fompi.all_gather_matmul, *specs, ranks=size, schedule="direct")
    second = fompi.bind(plan, comm=world, x=own(ROWS), w=np.ones((K, 1)))
    first, other = result(ROWS), result(ROWS + 1)
    with pytest.raises(fompi.PlanError, match=f"different rows on rank {ROWS % size}"):
        second.feed("x", other, "y")
    second.feed("x", first, "y")
    fewer = [*split(ROWS, size)]
    fewer[-1] -= 1
    first.start(counts=fewer)
    with pytest.raises(fompi.PlanError, match=f"different rows on rank {size - 1}"):
        second.start()
    second.start(counts=fewer)
    assert (second.wait() == 2 * size * K).all()
    for step in (first, second, other):
        step.close()


def test_counts(world):
    """Both calls have the same rows: those of this call, not those of the last one."""
    x, w1, w2, first, second = bound(world)
    second.feed("x", first, "y", relu)
    most = split(ROWS, world.size)
    for call, rows in enumerate([[n - 1 for n in most], most, [n - 1 for n in most]]):
        own = slice(sum(rows[: world.rank]), sum(rows[: world.rank + 1]))
        whole = np.random.default_rng([9, call]).integers(-4, 5, (sum(rows), K)).astype(float)
        x[: rows[world.rank]] = whole[own]
        counts, others = (None, [n - 1 for n in most]) if rows == most else (rows, None)
        first.start(counts=counts)
        with pytest.raises(fompi.PlanError, match="different rows"):
            second.start(counts=others)
        second.start(counts=counts)
        np.testing.assert_array_equal(second.wait(), (np.maximum(whole @ w1, 0) @ w2)[own])
    second.close()
    first.close()


def give(first):
    for part in range(first.compiled.buffers["x"].count):
        first.ready("x", part)


def test_a_start_while_the_result_is_read(world):
    x, w1, w2, first, second = bound(world)
    second.feed("x", first, "y", relu)
    first.start("x")
    second.start()
    with pytest.raises(fompi.StateError, match="already in flight"):
        first.start("x")
    give(first)
    second.wait()
    assert second._feedings.into[0].moved_at >= second._run.started and not second._run.fed
    first.wait()
    first.start("x")
    second.start()
    second._feedings.into[0].abandon(fompi.WaitTimeout("too late"))
    with pytest.raises((fompi.WaitTimeout, fompi.PeerError), match="too late"):
        second.wait()
    give(first)
    first.wait()
    with pytest.raises(fompi.WaitTimeout, match="too late"):
        first.start()
    x[...] = 1
    first.start()
    second.start()
    own = slice(sum(split(ROWS, world.size)[: world.rank]), sum(split(ROWS, world.size)[: world.rank + 1]))
    np.testing.assert_array_equal(second.wait(), (np.maximum(np.ones((ROWS, K)) @ w1, 0) @ w2)[own])
    second.close()
    first.close()


def test_the_end_of_the_communicator(comm):
    """A call that is fed can finish by itself, unless its source waits for the program."""
    own = fompi.Communicator(comm)
    *_, first, second = bound(own)
    second.feed("x", first, "y", relu)
    first.start("x")
    second.start()
    assert not second._run.can_finish()
    give(first)
    assert second._run.can_finish()
    second.wait()
    first.wait()
    first.start()
    second.start()
    own.close()
    assert second._run.finished and second._run.error is None


def test_an_error_of_another_communicator(world):
    """A kernel may raise a PeerError. It is an error of this rank: the others hear of it before they have the sum."""
    specs = Spec((6, 2 * world.size), "float64", Shard(1)), Spec((2 * world.size, 3), "float64", Shard(0))
    plan = fompi.plan(fompi.matmul_all_reduce, *specs, ranks=world.size, schedule="unfused")

    def bad(reads, writes):
        if world.rank == world.size - 1:
            raise fompi.PeerError("of another communicator", 0)

    step = fompi.bind(plan, comm=world, x=np.ones((6, 2)), w=np.ones((2, 3)), kernels={"matmul": bad})
    for _ in range(20):
        with pytest.raises(fompi.PeerError, match="of another communicator"):
            step()
        assert step.failed_here == (world.rank == world.size - 1)
        if step.failed_here:
            assert step._run.informed == {*range(world.size)}
    step.close()
