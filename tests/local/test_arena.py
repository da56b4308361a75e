"""The arena: no block is lent twice while a view of it is alive, and every block is returned."""

from __future__ import annotations

import doctest
import gc
import random
import threading

import jax.dlpack
import numpy as np
import pytest
import torch

from fompi.base.errors import DtypeError
from fompi.tensors import arena as module
from fompi.tensors.arena import ALIGNMENT, Arena, block_nbytes

MIB = 2**20


def address(array):
    return array.__array_interface__["data"][0]


def test_doctest():
    assert doctest.testmod(module).failed == 0


def test_at_most_a_fifth_of_a_block_is_unused():
    for nbytes in [*range(1, 5000), *(2**k + d for k in range(13, 40) for d in (-1, 0, 1))]:
        block = block_nbytes(nbytes)
        assert block >= nbytes and block % ALIGNMENT == 0 and block_nbytes(block) == block, nbytes
        assert block - nbytes < max(ALIGNMENT, block / 5), nbytes


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (0, 4), (7, 1, 9), (1000, 33)])
@pytest.mark.parametrize("dtype", ["bool", "uint16", "float16", "float32", "float64", "complex128"])
def test_take_is_an_aligned_empty(shape, dtype):
    array, expected = Arena(MIB).take(shape, dtype), np.empty(shape, dtype)
    assert type(array) is np.ndarray and array.flags.carray
    assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
    assert address(array) % ALIGNMENT == 0
    array[...] = 1
    assert (array == 1).all()


def test_shapes_of_numpy_integers():
    assert Arena(MIB).take((np.int64(3), np.int32(2)), np.float32).shape == (3, 2)


def test_arrays_that_cannot_be_taken():
    arena = Arena(MIB)
    with pytest.raises(DtypeError, match="Python objects"):
        arena.take((3,), object)
    with pytest.raises(ValueError, match="negative"):
        arena.take((-3,), "float32")
    assert arena.lent_nbytes == 0


def test_a_returned_block_is_used_again():
    arena = Arena(MIB)
    array = arena.take((100, 10), "float32")
    first = address(array)
    second = arena.take((100, 10), "float32")
    assert address(second) != first
    del array
    assert first == address(arena.take((10, 100), "int32"))


VIEWS = {
    "slice": lambda a: a[3:5],
    "element": lambda a: a[2:3, 2:3],
    "transpose": lambda a: a.T,
    "reshape": lambda a: a.reshape(-1),
    "dtype": lambda a: a.view(np.uint8),
    "chain": lambda a: a[1:].T[2:].view(np.uint32)[::-1],
    "diagonal": lambda a: np.diagonal(a),
    "broadcast": lambda a: np.broadcast_to(a, (3, *a.shape)),
    "memoryview": memoryview,
    "frombuffer": lambda a: np.frombuffer(a, np.uint8),
    "from_dlpack": np.from_dlpack,
    "capsule": lambda a: a.__dlpack__(),
    "torch": lambda a: torch.from_numpy(a)[2:],
    "jax": lambda a: jax.dlpack.from_dlpack(a),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_keeps_the_block(view):
    arena = Arena(MIB)
    array = arena.take((8, 8), "float32")
    lent, block = arena.lent_nbytes, address(array)
    viewer = VIEWS[view](array)
    del array
    gc.collect()
    assert arena.lent_nbytes == lent
    assert address(arena.take((8, 8), "float32")) != block
    del viewer
    gc.collect()
    assert arena.lent_nbytes == 0
    arrays = [arena.take((8, 8), "float32") for _ in range(2)]
    assert block in [address(array) for array in arrays]


def test_stats_count_whole_blocks():
    arena = Arena(MIB)
    a, b = arena.take((1000,), "uint8"), arena.take((5000,), "uint8")
    assert (arena.lent_nbytes, arena.free_nbytes) == (1024 + 5120, 0)
    del a
    assert (arena.lent_nbytes, arena.free_nbytes) == (5120, 1024)
    assert arena.lent_nbytes + arena.free_nbytes == 1024 + 5120
    del b


def test_free_blocks_stay_below_the_limit():
    arena = Arena(10 * 1024)
    arrays = [arena.take((1024,), "uint8") for _ in range(100)]
    assert arena.lent_nbytes == 100 * 1024
    arrays.clear()
    assert (arena.lent_nbytes, arena.free_nbytes) == (0, 10 * 1024)


def test_blocks_of_the_least_recently_used_size_are_dropped_first():
    arena = Arena(8 * 1024)
    old = [arena.take((1024,), "uint8") for _ in range(8)]
    old.clear()
    new = arena.take((2048,), "uint8")
    block = address(new)
    del new
    assert arena.free_nbytes == 8 * 1024
    assert address(arena.take((2048,), "uint8")) == block


def test_a_block_above_the_limit_is_not_kept_and_drops_no_other_block():
    arena = Arena(8 * 1024)
    arena.take((1024,), "uint8")
    arena.take((MIB,), "uint8")
    assert arena.free_nbytes == 1024


def test_an_array_outlives_its_arena():
    array = Arena(MIB).take((1000,), "float64")
    gc.collect()
    array[:] = 3
    assert array.sum() == 3000


def test_a_block_that_is_returned_while_the_lock_is_held_is_not_lost():
    arena = Arena(MIB)
    array = arena.take((1024,), "uint8")
    with arena._settling:  # as if the garbage collector ran while this thread holds the lock
        del array
        assert arena.lent_nbytes == 0
    assert arena.free_nbytes == 1024


def test_the_garbage_collector_may_run_at_any_allocation():
    arena, threshold = Arena(MIB), gc.get_threshold()

    class Node:
        pass

    gc.set_threshold(1)
    try:
        for n in range(2000):
            node = Node()
            node.itself, node.array = node, arena.take((n % 50, 7), "float32")
    finally:
        gc.set_threshold(*threshold)
    del node
    gc.collect()
    assert arena.lent_nbytes == 0


def churn(arena, seed, steps):
    """Take and drop arrays at random. If two arrays shared memory, one of them would have a wrong fill value."""
    rng, held = random.Random(seed), []
    for step in range(steps):
        array = arena.take((rng.randrange(400),), "int64")
        array[:] = seed * steps + step
        held.append((array[::-1], seed * steps + step))
        if len(held) > 20:
            view, fill = held.pop(rng.randrange(len(held)))
            assert (view == fill).all()
    assert all((view == fill).all() for view, fill in held)


def test_no_two_live_arrays_share_memory():
    arena = Arena(50_000)
    churn(arena, 1, 5000)
    assert arena.lent_nbytes == 0 and arena.free_nbytes <= 50_000


def test_threads():
    arena, failures = Arena(50_000), []

    def work(seed):
        try:
            churn(arena, seed, 2000)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert arena.lent_nbytes == 0 and arena.free_nbytes <= 50_000


def test_small_arrays_are_not_leased():
    arena = Arena(1 << 20, small_nbytes=100)
    for shape, dtype in (((5, 5), "float32"), ((0,), "float64"), ((3, 4), "uint16"), ((), "int64")):
        array = arena.take(shape, dtype)
        assert array.shape == shape and array.dtype == dtype and array.ctypes.data % 64 == 0
        array[...] = 7
    assert arena.lent_nbytes + arena.free_nbytes == 0
    kept = arena.take((26,), "float32")
    assert arena.lent_nbytes == 128
    del kept
    assert (arena.lent_nbytes, arena.free_nbytes) == (0, 128)
