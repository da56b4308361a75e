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
    for step in (first, second, other, unlike):
        step.close()
