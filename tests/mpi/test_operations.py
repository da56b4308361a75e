"""Every operation by every schedule, compared with its unfused meaning. Every rank knows the inputs of all ranks."""

from __future__ import annotations

from itertools import product

import calls
import catalogue
import numpy as np
import pytest

import fompi
from fompi.base.layout import FLOAT8, HALF, ITEMSIZE
from fompi.plans.plan import Collective, Compute, Recv, Send
from fompi.schedules import registry

pytestmark = [pytest.mark.ranks(mpich=[1, 2, 3, 8], openmpi=[4]), pytest.mark.usefixtures("verified_once")]

UP_TO_THREE = pytest.mark.ranks(mpich=[1, 2, 3])
"""Eight ranks show the steps of schedules. Values, dtypes and sizes are those of fewer."""


def assert_same(got, wanted, what):
    """All results are equal, bit for bit."""
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(got[name], array, err_msg=f"{name}, {what}", strict=True)


def variants(problem, turn=0, most=20):
    """About `most` pairs of schedule and slices, all of them if there are fewer. Each `turn` has different pairs."""
    every = [("auto", None), *product(registry.available(problem), (1, (1, 2)))]
    step = -(-len(every) // most)
    return every[turn % step :: step]


@pytest.mark.parametrize("name", calls.NAMES)
def test_every_schedule(world, name, request):
    """Each schedule with two of the five distributions of rows. The numbers are whole, so that sums are exact.

    More than three ranks share few cores. There each schedule has one distribution and one choice of slices.
    """
    most, count = 20, 2
    if world.size > 3:
        most, count = 10, 1
        request.getfixturevalue("without_verification")
    problem = catalogue.problems(world.size)[name]
    spreads = []
    for distribution in catalogue.ROWS:
        sizes = calls.row_sizes(problem, distribution)
        inputs = catalogue.inputs(problem, sizes, fill=catalogue.integers)
        spreads.append((distribution, sizes, inputs[world.rank], calls.expected(problem, inputs, sizes, world.rank)))
    for number, (schedule, slices) in enumerate(variants(problem, most=most)):
        for distribution, sizes, mine, wanted in (spreads[number % 5], spreads[(number + 2) % 5])[:count]:
            got = calls.call(problem, mine, sizes, world, schedule=schedule, slices=slices)
            assert_same(got, wanted, f"{schedule} {slices} {distribution}")


@UP_TO_THREE
@pytest.mark.parametrize("dtype", [dtype for dtype in ITEMSIZE if dtype not in FLOAT8])
def test_every_dtype_is_moved_and_added(world, dtype, without_verification):
    """Moved data is equal bit for bit. Sums of floats depend on their order, so they are compared with a tolerance."""
    tolerance = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 1e-6, "complex64": 1e-6}.get(dtype, 1e-15)
    for name, problem in catalogue.moves(world.size, dtype).items():
        sizes = calls.row_sizes(problem, "uneven")
        inputs = catalogue.inputs(problem, sizes)
        wanted = calls.expected(problem, catalogue.widened(inputs, dtype), sizes, world.rank)["y"]
        for schedule, slices in variants(problem, len(dtype), 4):
            got = calls.call(problem, inputs[world.rank], sizes, world, schedule=schedule, slices=slices)["y"]
            if name in catalogue.SUMS and ("float" in dtype or "complex" in dtype):
                np.testing.assert_allclose(catalogue.wide(got, dtype), wanted, rtol=2 * tolerance, atol=8 * tolerance)
            else:
                assert got.tobytes() == catalogue.rounded(wanted, dtype).tobytes(), (name, schedule, slices)


@UP_TO_THREE
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "int8", "complex64"])
def test_products_of_other_dtypes(world, dtype, without_verification):
    """Small whole numbers: products and sums are exact in the accumulator. Half types round the result once."""

    def small(random, shape, dtype):
        return catalogue.rounded(random.integers(-3, 4, shape).astype(float), dtype)

    listed = catalogue.problems(world.size, dtype)
    for number, name in enumerate(calls.NAMES):
        problem = listed.get(name)  # some have no such dtype: a mean of integers
        if problem is None or not (problem.weights or problem.gradients):
            continue
        sizes = calls.row_sizes(problem, "uneven", seed=number)
        inputs = catalogue.inputs(problem, sizes, number, small)
        exact = calls.expected(problem, catalogue.widened(inputs, dtype), sizes, world.rank)
        wanted = {key: catalogue.rounded(array, dtype) for key, array in exact.items()}
        for schedule, slices in variants(problem, number, 3 if world.size < 4 else 1):
            got = calls.call(problem, inputs[world.rank], sizes, world, schedule=schedule, slices=slices)
            assert_same(got, wanted, f"{name} {schedule} {slices}")


@UP_TO_THREE
@pytest.mark.parametrize("name", calls.NAMES)
def test_the_same_bits_in_every_run(world, name, request):
    """With random numbers, a different order of a sum gives different bits. The MPI library may sum in any order."""
    most = 4
    if world.size > 3:  # on few cores
        most = 2
        request.getfixturevalue("without_verification")
    problem = catalogue.problems(world.size)[name]
    sizes = calls.row_sizes(problem, "uneven")
    inputs = catalogue.inputs(problem, sizes)
    wanted = calls.expected(problem, inputs, sizes, world.rank)
    for schedule, slices in variants(problem, len(name), most):
        first, second = (
            calls.call(problem, inputs[world.rank], sizes, world, schedule=schedule, slices=slices) for _ in range(2)
        )
        for key, array in wanted.items():
            np.testing.assert_allclose(first[key], array, rtol=1e-12, atol=1e-12)
        if schedule not in ("unfused", "sliced"):
            assert_same(second, first, schedule)


@pytest.mark.parametrize(
    "dtype", ["float64", *(pytest.param(dtype, marks=UP_TO_THREE) for dtype in ("float32", *HALF))]
)
def test_all_reduce_has_the_same_bits_on_all_ranks(world, comm, dtype):
    for problem in (catalogue.problems(world.size, dtype)[n] for n in ("all_reduce", "matmul_all_reduce")):
        sizes = calls.row_sizes(problem, "even")
        inputs = catalogue.inputs(problem, sizes)
        for schedule, slices in variants(problem, len(dtype), 6):
            if schedule not in ("unfused", "sliced"):
                got = calls.call(problem, inputs[world.rank], sizes, world, schedule=schedule, slices=slices)["y"]
                assert len(set(comm.allgather(got.tobytes()))) == 1, schedule


@UP_TO_THREE
def test_large_tensors(world):
    """Messages of a megabyte in every schedule. The MPI library does not send them eagerly."""
    rows, size = 64, world.size
    everything = np.random.default_rng(1).integers(0, 100, (size, rows * size, 256)).astype(float)
    mine, total = everything[world.rank], everything.sum(0)
    own = slice(world.rank * rows, (world.rank + 1) * rows)
    for schedule in ("unfused", "sliced", "unfused_p2p", "sliced_p2p", "direct", "ring", "bidirectional"):
        options = {"comm": world, "schedule": schedule, "slices": 1 if schedule == "unfused" else 2}
        np.testing.assert_array_equal(fompi.all_reduce(mine, **options), total)
        np.testing.assert_array_equal(fompi.reduce_scatter(mine, **options), total[own])
        np.testing.assert_array_equal(fompi.all_gather(total[own], **options), total)


def test_a_schedule_of_a_user_on_a_strided_x(world, forgotten):
    @fompi.schedule("to everyone", "all_gather")
    def to_everyone(problem, work):
        for peer in range(work.size):
            shard = work["y"][peer * work.parts : (peer + 1) * work.parts]
            if peer == work.rank:
                yield Compute("copy", (work["x"][:],), (shard,))
            else:
                yield Recv(peer, shard)
                yield Send(peer, work["x"][:])

    whole = np.arange(24.0).reshape(4, 6)
    for x in (whole.T, whole[:, ::2], whole[::-1], whole):
        y = fompi.all_gather(x, comm=world, schedule="to everyone")
        np.testing.assert_array_equal(y, np.concatenate([x] * world.size))


@pytest.mark.parametrize("slices", [None, 3])
def test_a_schedule_of_a_user_by_the_library(world, forgotten, slices):
    @fompi.schedule("library", "all_gather", "reduce_scatter", "all_reduce")
    def library(problem, work):
        writes = [work["y"][:]]
        if problem.moves == "all_gather":
            writes = [work["y"][rank * work.parts : (rank + 1) * work.parts] for rank in range(work.size)]
        yield Collective(problem.moves, (work["x"][:],), tuple(writes))

    shard, whole = np.full((5, 2), world.rank + 1.0), np.arange(14.0 * world.size).reshape(-1, 2)
    for operation, x in (("all_gather", shard), ("reduce_scatter", whole), ("all_reduce", whole)):
        f = getattr(fompi, operation)
        y = f(x, comm=world, schedule="library", slices=slices)
        np.testing.assert_array_equal(y, f(x, comm=world, schedule="direct"))
