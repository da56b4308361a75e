"""fompi.reshard: the bits of NumPy on all frameworks, within the memory that was asked for."""

import time
import tracemalloc
from itertools import product
from math import prod
from random import Random

import numpy as np
import pytest
from boxes import PADDING, fused, held, sharding_of

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


def test_fused_weights_and_buckets_of_other_ranks(world):
    """From q, k and v in one matrix, and from ZeRO's padded buckets, to the ranks that serve, and back."""
    n, size = 6 * world.size, world.size
    x = np.arange(3 * n * 5.0).reshape(3 * n, 5)
    padded = -(-x.size // size) + 3
    runs = [min(padded, max(0, x.size - padded * rank)) for rank in range(size)]
    layouts = [
        fused(x.shape, 0, [[6] * size] * 3),
        fused(x.shape, 0, [[n, *[0] * (size - 1)], [6] * size, [*[0] * (size - 1), n]]),
        Boxes.flat(x.shape, runs, padded),
        Boxes.over(x.shape, (Shard(1), Replicate()), (2, 1), ranks=(size - 1, 0), size=size),
    ]
    for source, target in product(layouts, layouts):
        mine = held(x, source)[world.rank].reshape(source.arrays[world.rank])
        found = fompi.reshard(mine, source, target, comm=world, peak=500).reshape(-1)
        expected = held(x, target)[world.rank]
        assert np.array_equal(found, np.where(expected == PADDING, 0, expected))


def test_a_started_call_moves_while_the_program_computes(world):
    """As many rounds as the peak allows end without a wait. The others come in it."""
    if world.engine.helper is None:
        pytest.skip(f"there is no helper thread: the mode is {world.engine.progress_mode}")
    x, until = np.ones((60, 60 * world.size)), time.monotonic() + 20
    for peak, in_flight in ((None, 1), (x.nbytes // 2, 2)):
        with world.record() as traces:
            pending = fompi.reshard.start(x, Shard(0), Shard(1), comm=world, peak=peak)
            while len(traces) < in_flight and time.monotonic() < until:
                np.dot(x, x.T)
            assert len(traces) == in_flight
            world.barrier()
            y, rounds = pending.wait(), len(pending.plan.rounds)
        assert y.shape == (60 * world.size, 60) and y.all()
        assert len(traces) == rounds and (rounds == 1 if peak is None else rounds > 2)


def test_a_tensor_of_a_device(world, device):
    """It is copied to the host, and the result to the device. The checker of the device sees no race."""
    x = np.arange(7 * 12.0, dtype=np.float32).reshape(7, 12)
    y = fompi.reshard(device.array(np.array_split(x, world.size)[world.rank]), Shard(0), Shard(1), comm=world, peak=64)
    assert isinstance(y, fompi.DeviceArray)
    assert np.array_equal(y.get(), np.array_split(x, world.size, 1)[world.rank])


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
