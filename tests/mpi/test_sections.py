"""A strategy that fails in the middle of anything on one rank ends on all ranks, soon, and the next call is in step."""

import time
import warnings

import numpy as np
import pytest
from failing import Injected, Stages
from mpi4py import MPI
from strategies import drawn, runs, uneven

import fompi
from fompi.base.layout import split
from fompi.parallel.expert import combine, dispatch, experts, moe, route
from fompi.parallel.sequence import Sharding, ring_attention, ulysses_attention, usp_attention
from fompi.parallel.tensor import (
    attention,
    column_parallel_linear,
    heads_of,
    row_parallel_linear,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)

SOON = 3.0
"""All ranks have their error within so many seconds; FOMPI_TIMEOUT is 20."""


def forth_and_back(f, *args, **options):
    """A call of a strategy and its backward."""

    def call():
        y, saved = f.forward(*args, **options)
        gradients = f.backward(saved, np.ones_like(y))
        return [y, *(g for g in gradients if g is not None)]

    return call


def tokens(world, f, axes, times, **options):
    """An attention whose tokens are spread over the ranks."""
    sharding = Sharding(length=3 * world.size + 1, **axes)
    qkv = [times * drawn(sharding.length, heads, 4, seed=i) for i, heads in enumerate((4, 2, 2))]
    mine = [t[sharding.indices(world.rank)] for t in qkv]
    return forth_and_back(f, *mine, sharding, causal=True, **options)


def routed(comm, times):
    """The four steps of a layer of experts."""
    x, router, w1, w2 = times * drawn(4, 3, seed=comm.rank), drawn(3, 5), drawn(5, 3, 2), drawn(5, 2, 3)
    mine = runs(split(5, comm.size))[comm.rank]

    def call():
        r, gate = route.forward(x, router, k=2, comm=comm)
        rows, sent = dispatch.forward(x, r)
        z, computed = experts.forward(rows, w1[mine], w2[mine], r)
        y, back = combine.forward(z, r)
        dz, dweights = combine.backward(back, np.ones_like(y))
        drows, *dws = experts.backward(computed, dz)
        return [y, *dws, *dispatch.backward(sent, drows), *route.backward(gate, dweights)]

    return call


def strategies(world, mesh, times=1.0):
    """name -> a call with its backward, on all ranks of `world`. Inputs are multiplied by `times`."""
    size, rank = world.size, world.rank
    rows = uneven(size)
    x, w = times * drawn(sum(rows), 4), drawn(4, 2 * size)
    own, columns = runs(rows)[rank], runs([2] * size)[rank]
    shards = [w[:, columns], drawn(2 * size, 4)[columns]]
    mine, keys = heads_of(rank, size, 4, 2)
    heads, kv = ([4 * h + i for h in part for i in range(4)] for part in (mine, keys))
    wq, wk, wo = drawn(4, 16), drawn(4, 8), drawn(16, 4)
    vocabulary = runs(split(7, size))[rank]
    table, numbers = drawn(7, 3)[vocabulary], np.arange(sum(rows)) % 7
    ep = runs(split(5, size))[rank]
    weights = drawn(3, 5), drawn(5, 3, 2)[ep], drawn(5, 2, 3)[ep]
    in_heads = {"heads": 4, "kv_heads": 2, "comm": world}
    return {
        "column": forth_and_back(column_parallel_linear, x[own], shards[0], activation="silu", comm=world),
        "row": forth_and_back(row_parallel_linear, drawn(sum(rows), 2), shards[1], comm=world, counts=rows),
        "attention": forth_and_back(attention, x[own], wq[:, heads], wk[:, kv], wk[:, kv], wo[heads], **in_heads),
        "embedding": forth_and_back(vocab_parallel_embedding, numbers, table, comm=world),
        "cross entropy": forth_and_back(
            vocab_parallel_cross_entropy, times * drawn(sum(rows), 7)[:, vocabulary], numbers, comm=world
        ),
        "ring": tokens(world, ring_attention, {"ring": size}, times, comm=world),
        "ulysses": tokens(world, ulysses_attention, {"ulysses": size}, times, comm=world),
        "usp": tokens(world, usp_attention, mesh.axes, times, ring=mesh["ring"], ulysses=mesh["ulysses"]),
        "moe": forth_and_back(moe, times * drawn(4, 3, seed=rank), *weights, k=2, microbatches=2, comm=world),
        "route": routed(world, times),
    }


NAMES = ("column", "row", "attention", "embedding", "cross entropy", "ring", "ulysses", "usp", "moe", "route")


@pytest.fixture(scope="module")
def mesh():
    size = MPI.COMM_WORLD.size
    with fompi.Mesh(ring=size // 2, ulysses=2) if size % 2 == 0 else fompi.Mesh(ring=size, ulysses=1) as made:
        yield made


@pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="there is no other rank")
@pytest.mark.parametrize("name", NAMES)
def test_an_error_at_any_stage(world, comm, mesh, name):
    """The rank that fails has its own error, the others a PeerError: in the strategy, or in their next call."""
    call = strategies(world, mesh)[name]
    expected = call()
    with Stages() as stages:
        call()
    count, axes = comm.bcast(stages.count), [mesh["ulysses"], mesh["ring"]] if name == "usp" else [world]
    draw = np.random.default_rng(5)
    for _ in range(12):
        failing, at = int(draw.integers(world.size)), int(draw.integers(count))
        begun, error = time.perf_counter(), None
        try:
            with Stages(at if world.rank == failing else None) as stages:
                call()
            if world.rank != failing or stages.count <= at:
                for axis in axes:
                    axis.barrier()
        except (Injected, fompi.FompiError) as raised:
            error = raised
        assert fompi.all_reduce(np.ones(3), comm=world).tolist() == [world.size] * 3
        where = failing, at, error
        assert time.perf_counter() - begun < SOON, where
        has_failed = comm.bcast(stages.count > at, failing)
        if world.rank == failing and has_failed:
            assert isinstance(error, Injected), where
        elif has_failed and (error is not None or axes == [world]):
            assert isinstance(error, fompi.FompiError) and "Injected: in " in str(error), where
        else:
            assert error is None, where
        for a, b in zip(call(), expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_errors_of_numpy_do_not_reach_a_strategy(world, mesh, name):
    """Finite numbers whose exponentials are too small or too large: by IEEE 754, as in operations."""
    call = strategies(world, mesh, 300.0)[name]
    expected = call()
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        for a, b in zip(call(), expected, strict=True):
            np.testing.assert_array_equal(a, b)
