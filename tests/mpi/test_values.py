"""Values that must be the same by every schedule and on every MPI library, and arguments of every kind."""

from __future__ import annotations

import inspect
import warnings

import numpy as np
import pytest

import fompi
from fompi.base.layout import FLOAT8, NATIVE_SUMS
from fompi.plans.problems import Form, problem
from fompi.schedules import registry

pytestmark = pytest.mark.ranks(mpich=[1, 2], openmpi=[3])


def schedules(name, comm, dtype, shape=(0, 3)):
    return registry.available(problem(name, comm.size, Form(shape, dtype)))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "int64", "uint64"])
def test_integers_wrap_in_every_schedule(world, dtype):
    """Open MPI saturates 8- and 16-bit integers. So no plan lets it sum them."""
    x = np.full((world.size, 3), np.iinfo(dtype).max - world.rank, dtype)
    wanted = np.zeros_like(x)
    for rank in range(world.size):
        wanted += np.iinfo(dtype).max - rank  # wraps
    for schedule in ("auto", *schedules("all_reduce", world, dtype)):
        assert np.array_equal(fompi.all_reduce(x, comm=world, schedule=schedule), wanted), schedule
    for schedule in ("auto", *schedules("reduce_scatter", world, dtype)):
        assert np.array_equal(fompi.reduce_scatter(x, comm=world, schedule=schedule), wanted[:1]), schedule
    assert ("unfused" in schedules("all_reduce", world, dtype)) == (dtype in NATIVE_SUMS)


@pytest.mark.parametrize("char", "qQlL")
def test_integers_of_64_bits_have_two_types_in_c(world, char):
    for schedule in schedules("all_reduce", world, "int64"):
        assert fompi.all_reduce(np.ones(3, char), comm=world, schedule=schedule).tolist() == [world.size] * 3


def unaligned(array):
    """A copy of `array` that begins at an odd address."""
    memory = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    memory[...] = array
    assert not memory.flags.aligned and memory.flags.c_contiguous
    return memory


@pytest.mark.parametrize("schedule", ["auto", "ring", "unfused"])
def test_memory_that_is_not_aligned(world, schedule):
    x, w, how = np.arange(6.0).reshape(2, 3) + world.rank, np.arange(6.0).reshape(3, 2), {"schedule": schedule}
    full = np.concatenate([np.arange(6.0).reshape(2, 3) + rank for rank in range(world.size)])
    assert np.array_equal(fompi.all_gather(unaligned(x), comm=world, **how), full)
    assert np.array_equal(fompi.all_gather_matmul(unaligned(x), unaligned(w), comm=world, **how), full @ w)
    out = unaligned(np.zeros((2, 3)))
    assert fompi.all_reduce(unaligned(x), out=out, comm=world, **how) is out
    assert np.array_equal(out, full.reshape(world.size, 2, 3).sum(0))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_is_moved(world, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = (np.arange(2 * world.size, dtype=np.uint8) + 16 * world.rank).view(getattr(ml_dtypes, dtype)).reshape(-1, 1)
    every = [(np.arange(2 * world.size, dtype=np.uint8) + 16 * rank) for rank in range(world.size)]
    for schedule in ("auto", "ring", "unfused"):
        y = fompi.all_gather(x, comm=world, schedule=schedule)
        assert y.dtype == x.dtype and np.array_equal(y.view(np.uint8).ravel(), np.concatenate(every))
    mine = [part[2 * world.rank : 2 * world.rank + 2] for part in every]
    assert np.array_equal(fompi.all_to_all(x, comm=world).view(np.uint8).ravel(), np.concatenate(mine))
    assert fompi.broadcast(x, comm=world).tobytes() == every[0].tobytes()
    for operation, tensors in ((fompi.all_reduce, (x,)), (fompi.all_gather_matmul, (x, x[:1]))):
        with pytest.raises(fompi.DtypeError, match=dtype):
            operation(*tensors, comm=world)


def test_overflow_is_silent(world):
    """IEEE 754 results, whatever the program does with warnings and NumPy's error state."""
    if world.size == 1:
        return
    x = np.array([-np.inf if world.rank else np.inf, 1e308, np.nan])
    half = np.full(30000, 6e4, np.float16)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        for schedule in schedules("all_reduce", world, "float64"):
            y = fompi.all_reduce(x, comm=world, schedule=schedule)
            assert np.isnan(y[0]) and np.isposinf(y[1]) and np.isnan(y[2]), schedule
        for schedule in schedules("all_reduce", world, "float16"):
            assert np.isposinf(fompi.all_reduce(half, comm=world, schedule=schedule)).all(), schedule
        for schedule in ("direct", "ring", "unfused", "unfused_p2p"):
            x, w = np.full((4, 1), 1e200), np.full((1, 1), 1e200)
            y = fompi.matmul_reduce_scatter(x, w, comm=world, schedule=schedule)
            assert np.isposinf(y).all(), schedule


def test_in_place(world):
    x = np.arange(6.0).reshape(2, 3) + world.rank
    wanted = sum(np.arange(6.0).reshape(2, 3) + rank for rank in range(world.size))
    for schedule in schedules("all_reduce", world, "float64"):
        y = x.copy()
        assert fompi.all_reduce(y, out=y, comm=world, schedule=schedule) is y and np.array_equal(y, wanted)
    y = np.full((2, 3), float(world.rank))
    assert fompi.broadcast(y, root=world.size - 1, out=y, comm=world) is y and (y == world.size - 1).all()
    with pytest.raises(fompi.TensorError, match="shares memory"):
        fompi.all_reduce(y[:1], out=y.reshape(-1)[1:4].reshape(1, 3), comm=world)


def test_counts_of_a_pending(world):
    sent = [(world.rank + dest) % 3 for dest in range(world.size)]
    pending = fompi.all_to_all.start(np.ones((sum(sent), 2)), counts=sent, comm=world)
    assert len(pending.wait()) == sum(pending.counts)
    assert pending.counts == tuple((source + world.rank) % 3 for source in range(world.size))
    pending = fompi.all_gather.start(np.ones((world.rank, 2)), comm=world)
    pending.wait()
    assert pending.counts == tuple(range(world.size))


def test_integers_of_every_kind(world):
    x = np.arange(12.0).reshape(3, 4)
    for one in (1, np.int64(1), np.uint8(1), np.array(1), True):
        assert fompi.all_gather(x, dim=one, comm=world).shape == (3, 4 * world.size)
        assert fompi.all_gather(x, slices=one, comm=world).shape == (3 * world.size, 4)
        assert fompi.broadcast(x, root=one if world.size > 1 else 0, comm=world).shape == x.shape
        with fompi.Mesh(world.link.comm, dp=one, tp=np.int32(world.size)) as mesh:
            assert mesh["tp"].size == world.size
        spec = fompi.Spec((np.int64(4), 3), "float32", fompi.Shard(0))
        assert spec == fompi.Spec((4, 3), "float32", fompi.Shard(0))
        assert fompi.plan("all_gather", spec, ranks=one, window=one).size == 1
    for wrong in (1.0, "1", None):
        with pytest.raises(fompi.ShapeError, match="no dimension"):
            fompi.all_gather(x, comm=world, dim=wrong)
        with pytest.raises(fompi.PlanError, match="integer"):
            fompi.all_gather(x, comm=world, slices=wrong or 1.5)
        with pytest.raises(fompi.LayoutError, match="integer"):
            fompi.broadcast(x, root=wrong, comm=world)


def test_signatures():
    """`help` and IDEs read them."""
    read = inspect.signature(fompi.matmul_reduce_scatter)
    own = ["x", "w", "bias", "dim", "counts", "out"]
    common = ["comm", "schedule", "slices", "effort", "wire", "certify", "order"]
    assert list(read.parameters) == own + common
    assert read.parameters["schedule"].default == "auto" and read.return_annotation is not fompi.ops.arguments.Arguments
