"""Every operation by every schedule, against its unfused meaning. Inputs of all ranks are known on each."""

from __future__ import annotations

from itertools import product

import calls
import catalogue
import numpy as np
import pytest

import fompi
from fompi.base.layout import HALF, ITEMSIZE
from fompi.ops import operation
from fompi.schedules import registry


def assert_same(got, wanted, what):
    """To the last bit."""
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(got[name], array, err_msg=f"{name}, {what}", strict=True)


@pytest.fixture
def proven_before(monkeypatch):
    """These plans have been proven, in `tests/pure`; to prove each again on each rank would take most of the time."""
    monkeypatch.setattr(operation, "VERIFIED_RANKS", 0)


def variants(problem, turn=0, most=20):
    """Schedules and slices, all of them, or about `most`: others at another `turn`."""
    every = [("auto", None), *product(registry.available(problem), (1, (1, 2)))]
    step = -(-len(every) // most)
    return every[turn % step :: step]


@pytest.mark.parametrize("name", calls.NAMES)
def test_every_schedule(world, name, request):
    """Rows spread in two of five ways each. The numbers are whole, so that sums are exact.

    On many ranks, which take turns on few cores: one way each, and each schedule in one cut.
    """
    most = 20
    if world.size > 4:
        most = 10
        request.getfixturevalue("proven_before")
    problem = catalogue.problems(world.size)[name]
    spreads = []
    for how in catalogue.ROWS:
        sizes = calls.spread(problem, how)
        inputs = catalogue.inputs(problem, sizes, fill=catalogue.whole)
        spreads.append((how, sizes, inputs[world.rank], calls.meant(problem, inputs, sizes, world.rank)))
    for number, (schedule, slices) in enumerate(variants(problem, most=most)):
        for how, sizes, mine, wanted in (spreads[number % 5], spreads[(number + 2) % 5])[: 1 if world.size > 4 else 2]:
            got = calls.call(problem, mine, sizes, world, schedule=schedule, slices=slices)
            assert_same(got, wanted, f"{schedule} {slices} {how}")


def without_overflow(random, shape, dtype):
    """As the catalogue draws, but the sum of eight fits: Open MPI's sums of small integers do not wrap as NumPy's."""
    drawn = catalogue.drawn(random, shape, dtype)
    return drawn // 8 if dtype.startswith(("int", "uint")) else drawn


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_every_dtype_is_moved_and_added(world, dtype, proven_before):
    """Moves to the last bit. Sums of floats depend on their order: all ranks have the same, close to the exact one."""
    one = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 1e-6, "complex64": 1e-6}.get(dtype, 1e-15)
    for name, problem in catalogue.moves(world.size, dtype).items():
        sizes = calls.spread(problem, "uneven")
        inputs = catalogue.inputs(problem, sizes, fill=without_overflow)
        wanted = calls.meant(problem, catalogue.widened(inputs, dtype), sizes, world.rank)["y"]
        for schedule, slices in variants(problem, len(dtype), 4):
            got = calls.call(problem, inputs[world.rank], sizes, world, schedule=schedule, slices=slices)["y"]
            if name in catalogue.SUMS and ("float" in dtype or "complex" in dtype):
                np.testing.assert_allclose(catalogue.wide(got, dtype), wanted, rtol=2 * one, atol=8 * one)
            else:
                assert got.tobytes() == catalogue.rounded(wanted, dtype).tobytes(), (name, schedule, slices)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "int8", "complex64"])
def test_products_of_other_dtypes(world, dtype, proven_before):
    """Small whole numbers: products and sums are exact in the accumulator, and rounded once for half types."""

    def small(random, shape, dtype):
        return catalogue.rounded(random.integers(-3, 4, shape).astype(float), dtype)

    listed = catalogue.problems(world.size, dtype)
    for number, name in enumerate(calls.NAMES):
        problem = listed[name]
        if not (problem.weights or problem.gradients):
            continue
        sizes = calls.spread(problem, "uneven", seed=number)
        inputs = catalogue.inputs(problem, sizes, number, small)
        exact = calls.meant(problem, catalogue.widened(inputs, dtype), sizes, world.rank)
        wanted = {key: catalogue.rounded(array, dtype) for key, array in exact.items()}
        for schedule, slices in variants(problem, number, 3):
            got = calls.call(problem, inputs[world.rank], sizes, world, schedule=schedule, slices=slices)
            assert_same(got, wanted, f"{name} {schedule} {slices}")


@pytest.mark.parametrize("name", calls.NAMES)
def test_the_same_bits_in_every_run(world, name):
    """Random numbers: another order of a sum would show. Of the library's own collectives nothing is promised."""
    problem = catalogue.problems(world.size)[name]
    sizes = calls.spread(problem, "uneven")
    inputs = catalogue.inputs(problem, sizes)
    wanted = calls.meant(problem, inputs, sizes, world.rank)
    for schedule, slices in variants(problem, len(name), 6):
        first, second = (
            calls.call(problem, inputs[world.rank], sizes, world, schedule=schedule, slices=slices) for _ in range(2)
        )
        for key, array in wanted.items():
            np.testing.assert_allclose(first[key], array, rtol=1e-12, atol=1e-12)
        if schedule not in ("unfused", "sliced"):
            assert_same(second, first, schedule)


@pytest.mark.parametrize("dtype", ["float64", "float32", *HALF])
def test_all_reduce_has_the_same_bits_on_all_ranks(world, comm, dtype):
    for problem in (catalogue.problems(world.size, dtype)[n] for n in ("all_reduce", "matmul_all_reduce")):
        sizes = calls.spread(problem, "even")
        inputs = catalogue.inputs(problem, sizes)
        for schedule, slices in variants(problem, len(dtype), 6):
            if schedule not in ("unfused", "sliced"):
                got = calls.call(problem, inputs[world.rank], sizes, world, schedule=schedule, slices=slices)["y"]
                assert len(set(comm.allgather(got.tobytes()))) == 1, schedule


def test_large_tensors(world):
    """Messages of a megabyte, which the MPI library does not send eagerly, in every schedule."""
    rows, size = 64, world.size
    everything = np.random.default_rng(1).integers(0, 100, (size, rows * size, 256)).astype(float)
    mine, total = everything[world.rank], everything.sum(0)
    own = slice(world.rank * rows, (world.rank + 1) * rows)
    for schedule in ("unfused", "sliced", "unfused_p2p", "sliced_p2p", "direct", "ring", "bidirectional"):
        options = {"comm": world, "schedule": schedule, "slices": 1 if schedule == "unfused" else 2}
        np.testing.assert_array_equal(fompi.all_reduce(mine, **options), total)
        np.testing.assert_array_equal(fompi.reduce_scatter(mine, **options), total[own])
        np.testing.assert_array_equal(fompi.all_gather(total[own], **options), total)
