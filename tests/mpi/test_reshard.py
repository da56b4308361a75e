"""fompi.reshard: the bits of NumPy on all frameworks, within the memory that was asked for."""

import tracemalloc
from math import prod
from random import Random

import numpy as np
import pytest
from boxes import held, sharding_of

import fompi
from fompi import Box, Boxes, LayoutError, MismatchError, Partial, Replicate, ShapeError, Shard

pytestmark = pytest.mark.ranks(mpich=[3, 4], openmpi=[2])


def test_random_pairs(world):
    rng = Random(3)
    for number in range(60):
        shape = tuple(rng.choice([0, 1, 3, 5, 8, 12]) for _ in range(rng.randint(1, 3)))
        source, target = (sharding_of(rng, shape, world.size) for _ in range(2))
        dtype = rng.choice(["float64", "int16", "complex128", "bool", "float32"])
        x = np.random.default_rng(number).integers(0, 2**16, shape).astype(dtype)
        mine = held(x, source)[world.rank].reshape(source.arrays[world.rank])
        y = fompi.reshard(mine, source, target, comm=world, peak=rng.choice([None, 64, 1000]))
        expected, found = held(x, target)[world.rank], y.reshape(-1)
        is_data = held(np.full(shape, 1, np.int8), target)[world.rank] == 1
        np.testing.assert_array_equal(found[is_data].view(np.uint8), expected[is_data].view(np.uint8))
        assert not found[~is_data].any() and y.shape == target.arrays[world.rank]


def test_layouts_of_uneven_rows(world):
    x = np.arange(7 * 5.0).reshape(7, 5)
    counts = [7 - world.size + 1] + [1] * (world.size - 1)
    ends = np.cumsum([0, *counts])
    columns = fompi.reshard(x[ends[world.rank] : ends[world.rank + 1]], Shard(0), Shard(-1), comm=world)
    assert np.array_equal(columns, np.array_split(x, world.size, 1)[world.rank])
    assert np.array_equal(fompi.reshard(columns, Shard(1), Replicate(), comm=world), x)
    assert np.array_equal(
        fompi.reshard(x, Replicate(), Shard(0), comm=world), np.array_split(x, world.size)[world.rank]
    )


def test_a_mesh_of_another_size_and_a_started_call(world):
    shape = (64, 8)
    train = Boxes.over(shape, Shard(0), world.size)
    serve = Boxes.over(shape, (Shard(1), Replicate()), (2, 1), size=world.size)
    x = np.arange(prod(shape), dtype=np.float32).reshape(shape)
    pending = fompi.reshard.start(np.array_split(x, world.size)[world.rank], train, serve, comm=world)
    total = fompi.all_reduce(np.ones(3), comm=world)
    y = pending.wait()
    assert total[0] == world.size
    assert np.array_equal(y, np.array_split(x, 2, 1)[world.rank]) if world.rank < 2 else y.size == 0
    with pytest.raises(fompi.StateError, match="has been waited for"):
        pending.wait()


def test_torch_and_jax(world):
    torch = pytest.importorskip("torch")
    x = torch.arange(24.0).reshape(6, 4).bfloat16()
    y = fompi.reshard(x.tensor_split(world.size)[world.rank], Shard(0), Shard(1), comm=world)
    assert y.dtype == torch.bfloat16 and torch.equal(y, x.tensor_split(world.size, 1)[world.rank])
    jax = pytest.importorskip("jax")
    z = jax.numpy.asarray(np.arange(24, dtype=np.float32).reshape(6, 4))
    back = fompi.reshard(jax.numpy.array_split(z, world.size)[world.rank], Shard(0), Replicate(), comm=world)
    assert isinstance(back, jax.Array) and (back == z).all()


@pytest.mark.parametrize("peak", [1 << 18, 1 << 20])
def test_the_peak_of_memory_is_what_was_asked_for(world, peak):
    n = 1024
    x = np.ones((n // world.size, n), np.float64)
    for _ in range(2):  # the first call makes what all others use
        tracemalloc.start()
        y = fompi.reshard(x, Shard(0), Shard(1), comm=world, peak=peak)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert y.sum() == y.size and most - y.nbytes <= peak + (1 << 16)


def test_errors_reach_all_ranks(world):
    x = np.zeros((4, 4))
    with pytest.raises(LayoutError, match="sum it first"):
        fompi.reshard(x, Partial(), Shard(0), comm=world)
    with pytest.raises(ShapeError, match="x has the shape"):
        fompi.reshard(x, Boxes.over((4, 4), Shard(0), world.size), Shard(0), comm=world)
    with pytest.raises(LayoutError, match="hole"):
        fompi.reshard(
            x[: world.rank == 0],
            Boxes((2, 4), ((Box((0, 0), (1, 4)),), *[()] * (world.size - 1)), ((1, 4), *[(0, 4)] * (world.size - 1))),
            Shard(1),
            comm=world,
        )
    with pytest.raises((MismatchError, fompi.PeerError)):
        fompi.reshard(x, Shard(world.rank % 2), Shard(0), comm=world)
    assert fompi.all_reduce(np.ones(1), comm=world)[0] == world.size
