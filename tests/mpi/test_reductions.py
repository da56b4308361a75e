"""Reductions other than sums, and operations with a root: values, shapes on every rank, `out`, refusals, gradients."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fompi
from fompi.base.errors import DtypeError, LayoutError, MismatchError, ShapeError, TensorError
from fompi.schedules import registry

pytestmark = pytest.mark.ranks(mpich=[1, 2], openmpi=[3])

COMBINE = {"max": np.maximum, "min": np.minimum, "prod": np.multiply}


def term(rank, shape, dtype):
    return np.random.default_rng(rank).integers(-3, 4, shape).astype(dtype)


def schedules(world, op, dtype="float32"):
    names = [*registry.SCHEDULES, f"hierarchical({world.size // 2})"]
    return [name for name in names if registry.can_move(name, "all_reduce", world.size, dtype, op)]


@pytest.mark.parametrize("dtype", ["float64", "float16", "int16", "uint8", "bool", ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("op", COMBINE)
def test_values_by_every_schedule(world, op, dtype):
    terms = [np.abs(term(rank, (5, 2), "int8")).astype(dtype) for rank in range(world.size)]
    if dtype == "bool" and op == "prod":
        with pytest.raises(DtypeError, match=r"bool cannot be multiplied.*any.*all"):
            fompi.all_reduce(terms[0], op=op, comm=world)
        return
    wanted = terms[0]
    for other in terms[1:]:
        wanted = COMBINE[op](wanted, other)
    if dtype == "bool":
        np.testing.assert_array_equal(wanted, (np.any if op == "max" else np.all)(terms, axis=0))
    for schedule in ("auto", *schedules(world, op)):
        got = fompi.all_reduce(terms[world.rank], op=op, schedule=schedule, comm=world)
        np.testing.assert_array_equal(got, wanted, strict=True)


@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("count", [0, 7, 40_001])
def test_over_x_and_not(world, count, dtype):
    """Some ranks let the result be written over x, others do not: the messages are the same, and so are the bits."""
    x = np.random.default_rng(world.rank).standard_normal(count).astype(dtype)
    for op in ("sum", "mean", "max"):
        for schedule in ("auto", *schedules(world, op, np.dtype(dtype).name)):
            wanted = fompi.all_reduce(x, op=op, schedule=schedule, comm=world)
            for is_over_x in (True, world.rank == 0) * 2:  # C knows the later ones
                mine = x.copy()
                out = mine if is_over_x else None
                y = fompi.all_reduce(mine, op=op, schedule=schedule, out=out, comm=world)
                assert (y is mine) == is_over_x and y.tobytes() == wanted.tobytes()
                assert is_over_x or mine.tobytes() == x.tobytes()


def test_nan_is_the_largest_and_the_smallest(world):
    x = np.array([1.0, np.nan if world.rank == 0 else 2.0, np.nan if world.rank == world.size - 1 else -1.0])
    for op in ("max", "min"):
        for schedule in schedules(world, op):
            y = fompi.all_reduce(x, op=op, schedule=schedule, comm=world)
            assert y[0] == 1 and np.isnan(y[1:]).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16], ids=str)
def test_a_mean_is_rounded_once(world, comm, dtype):
    """The same bits on all ranks."""
    terms = [(np.random.default_rng(r).integers(-99, 100, 50) / 8).astype(dtype) for r in range(world.size)]
    wanted = (sum(t.astype("float32") for t in terms) / np.float32(world.size)).astype(dtype)
    for schedule in ("auto", *schedules(world, "mean")):
        y = fompi.all_reduce(terms[world.rank], op="mean", schedule=schedule, comm=world)
        np.testing.assert_array_equal(y, wanted, strict=True)
        rows = fompi.reduce_scatter(terms[world.rank], op="mean", comm=world)
        np.testing.assert_array_equal(np.concatenate(comm.allgather(rows)), wanted)


def test_shapes_with_a_root(world):
    """The root has the result, the other ranks have a tensor without rows."""
    rank, size, root = world.rank, world.size, world.size - 1
    for shape in ((), (0,), (3, 2)):
        y = fompi.reduce(np.ones(shape), root=root, comm=world)
        assert y.shape == (shape if rank == root else (0, *shape[1:])) and (y == size).all()
    x = np.full((2, rank + 1), float(rank))
    y = fompi.gather(x, root=root, dim=1, comm=world)
    wanted = np.concatenate([np.full((2, r + 1), float(r)) for r in range(size)], 1)
    np.testing.assert_array_equal(y, wanted if rank == root else wanted[:, :0])
    whole = np.arange(14.0).reshape(7, 2)
    y = fompi.scatter(whole if rank == root else np.empty((0, 2)), root=root, comm=world)
    np.testing.assert_array_equal(y, np.array_split(whole, size)[rank])
    counts = [7 if r == 0 else 0 for r in range(size)]
    y = fompi.scatter(whole, root=root, counts=counts if rank == root else None, comm=world)
    np.testing.assert_array_equal(y, whole if rank == 0 else whole[:0])


def test_out_with_a_root(world):
    rank = world.rank
    x = np.full((3, 2), rank + 1.0)
    out = x if rank == 0 else np.empty((0, 2))
    assert fompi.reduce(x, comm=world, out=out) is out and (out == sum(range(1, world.size + 1))).all()
    out = np.empty((3 * world.size, 2) if rank == 0 else (0, 2))
    assert fompi.gather(np.ones((3, 2)), comm=world, out=out) is out and (out == 1).all()
    out = np.empty((1, 2))
    assert fompi.scatter(np.ones((world.size, 2)), comm=world, out=out) is out and (out == 1).all()
    with pytest.raises((ShapeError, MismatchError)):
        fompi.reduce(x, comm=world, out=np.empty((4, 2)))


def test_refusals(world):
    with pytest.raises(LayoutError, match=r"op='median' \(did you mean mean\?\) must be one of sum, max"):
        fompi.all_reduce(np.ones(3), op="median", comm=world)
    with pytest.raises(DtypeError, match="the mean of int64 is not an integer"):
        fompi.reduce(np.ones(3, int), op="mean", comm=world)
    with pytest.raises(DtypeError, match="complex128 has no order"):
        fompi.reduce_scatter(np.ones(3, complex), op="max", comm=world)
    for name in ("gather", "scatter", "reduce"):
        with pytest.raises(LayoutError, match=f"{name}: root={world.size} must be a rank"):
            getattr(fompi, name)(np.ones(3), root=world.size, comm=world)
    if world.size > 1:
        with pytest.raises(MismatchError, match="max"):
            fompi.all_reduce(np.ones(3), op="max" if world.rank else "min", comm=world)
        with pytest.raises(MismatchError, match="root 1"):
            fompi.gather(np.ones(3), root=min(world.rank, 1), comm=world)
        with pytest.raises(fompi.PlanError, match="the MPI library only sums"):
            fompi.all_reduce(np.ones(3), op="max", schedule="unfused", comm=world)


def test_ties_share_the_gradient(world):
    """As torch.amax does. NaN is the result where it occurs."""
    torch = pytest.importorskip("torch")
    x = torch.tensor([1.0, float(world.rank), float("nan") if world.rank == 0 else 3.0], requires_grad=True)
    (dx,) = torch.autograd.grad(fompi.all_reduce(x, op="max", comm=world)[:3].sum() / world.size, x)
    assert dx.tolist() == pytest.approx([1 / world.size, float(world.rank == world.size - 1), float(world.rank == 0)])
    with pytest.raises(TensorError, match='op="prod" has no gradient'):
        fompi.all_reduce(x, op="prod", comm=world)
    assert fompi.all_reduce(x.detach(), op="prod", comm=world)[0] == 1
