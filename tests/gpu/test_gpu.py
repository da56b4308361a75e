"""Operations on a GPU: arrays of CuPy go in and come out, and have the values that the host computes.

`make test-gpu` runs this with several ranks on one GPU, over staged and ipc messages. Inputs are small integers: every
order of a sum gives the same value.
"""

from __future__ import annotations

from importlib import import_module

import calls
import catalogue
import numpy as np
import pytest
import strategy_calls
from device_calls import result_of

import fompi
from fompi.base.layout import Sizes
from fompi.ops import pending
from fompi.schedules import registry

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="session")
def cupy(world):
    cupy = import_module("cupy")
    cupy.cuda.Device(fompi.Device("cuda").number).use()
    return cupy


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", calls.NAMES)
def test_operations_have_the_values_of_the_host(world, cupy, name, dtype, monkeypatch):
    monkeypatch.setattr(pending, "VERIFIED_RANKS", 0)
    problem = catalogue.problems(world.size, dtype)[name]
    for number, schedule in enumerate(registry.available(problem)):
        sizes = calls.row_sizes(problem, ("uneven", "even")[number % 2], seed=number)
        mine = catalogue.inputs(problem, sizes, number, catalogue.integers)[world.rank]
        options = {"schedule": schedule, "slices": (1, (1, 2))[number % 2]}
        wanted = calls.call(problem, mine, sizes, world, **options)
        got = result_of(cupy.asarray, lambda y: y.get(), problem, mine, sizes, world, **options)
        assert got.keys() == wanted.keys()
        for key, array in wanted.items():
            np.testing.assert_array_equal(got[key], array, err_msg=f"{schedule} {key}")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["matmul_reduce_scatter", "matmul_all_reduce bias", "matmul_all_to_all"])
def test_products_that_one_kernel_announces(world, cupy, name, dtype, monkeypatch):
    """Whole numbers, and new ones at every call: an early message would carry those of the call before."""
    missing = fompi.Device("cuda").needs_for_announced()
    if missing:
        pytest.skip(missing)
    monkeypatch.setenv("FOMPI_COUNTERS", "1")
    problem, size = catalogue.problems(world.size, dtype)[name], world.size
    sizes = Sizes(pairs=((300,) * size,) * size) if problem.moves == "all_to_all" else Sizes((300,) * size)

    def small(random, shape, dtype):
        return random.integers(-3, 4, shape).astype(dtype)

    for schedule in registry.available(problem):
        plan = registry.write(problem, schedule, (1, 2, 1), sizes)
        given = catalogue.inputs(problem, sizes, 0, small)[world.rank]
        tensors = {key: cupy.asarray(x) for key, x in given.items()}
        with fompi.bind(plan, comm=world, **tensors) as step, fompi.bind(plan, comm=world, **given) as on_host:
            assert step.announced or schedule != "direct" or size == 1
            for call in range(20):
                for key, x in catalogue.inputs(problem, sizes, call, small)[world.rank].items():
                    given[key][...] = x
                    tensors[key].set(x)
                np.testing.assert_array_equal(step().get(), on_host(), err_msg=f"{schedule}, call {call}")


def test_a_call_follows_the_stream_of_the_program(world, cupy):
    """The program writes x in a stream of its own right before each call, and reads y right after it."""
    plan = fompi.plan(
        fompi.all_gather, fompi.Spec((64 * world.size, 4096), "float32", fompi.Shard(0)), ranks=world.size
    )
    stream, x = cupy.cuda.Stream(non_blocking=True), cupy.zeros((64, 4096), "f4")
    cupy.cuda.Device().synchronize()
    with stream, fompi.bind(plan, comm=world, x=x) as step:
        for number in range(50):
            x.fill(number)
            assert (fompi.all_gather(x, comm=world) == number).all()
            x.fill(number + 100)
            assert (step() == number + 100).all()


def test_kernels_of_the_user(world, cupy):
    def matmul(reads, writes):
        cupy.matmul(reads[0], reads[1], out=writes[0])

    plan = fompi.plan(
        fompi.all_gather_matmul,
        fompi.Spec((16 * world.size, 32), "float32", fompi.Shard(0)),
        fompi.Spec((32, 8 * world.size), "float32", fompi.Shard(1)),
        ranks=world.size,
    )
    x, w = cupy.ones((16, 32), "f4"), cupy.ones((32, 8), "f4")
    with fompi.bind(plan, comm=world, kernels={"matmul": matmul}, x=x, w=w) as step:
        assert (step() == 32).all()


def test_memory_of_other_libraries(world, cupy):
    """A block that CuPy has cut out of a larger one goes to another process, too."""
    blocks = [cupy.full((100, 10), world.rank * 10 + i, "f4") for i in range(5)]
    for number, block in enumerate(blocks):
        y = fompi.all_gather(block[20:40], comm=world)
        assert y[::20, 0].get().tolist() == [rank * 10 + number for rank in range(world.size)]


def compare(name, wanted, got):
    """Products of cuBLAS are rounded in another order: 1e-4 of the largest number, and the steps of half types."""
    within = 0.05 if any(word in name for word in ("half", "int8", "data 1", "data 3", "swiglu")) else 1e-4
    for a, b in zip(wanted, got, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, name
        if a.size:
            assert np.abs(a - b).max() <= within * max(1.0, np.abs(a).max()), name


@pytest.mark.parametrize("name", [*strategy_calls.calls(fompi.Communicator())])
def test_strategies_have_the_values_of_the_host(world, cupy, name):
    wanted = strategy_calls.calls(world)[name](np.asarray, np.asarray)
    calls = strategy_calls.calls(world, fompi.Device("cuda"))
    for _ in range(2):
        compare(name, wanted, calls[name](cupy.asarray, lambda x: x.get()))


@pytest.mark.parametrize("name", [n for n in strategy_calls.calls(fompi.Communicator()) if "pipeline" not in n])
def test_strategies_on_tensors_of_torch(world, cupy, name):
    """In a stream of torch that CuPy does not know. The attention is torch's kernel for GPUs."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no GPU here")
    torch.cuda.set_device(fompi.Device("cuda").number)

    def up(x):
        if x.dtype == strategy_calls.HALF:
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).cuda()
        return torch.from_numpy(x).cuda()

    def down(x):
        return (x.float() if x.dtype == torch.bfloat16 else x).cpu().numpy()

    def as_numbers(arrays):
        return [np.asarray(a, np.float64) for a in arrays]

    wanted = strategy_calls.calls(world)[name](np.asarray, np.asarray)
    if "half" in name or name in ("data 1", "data 3", "column of all rows, swiglu"):
        pytest.skip("the gradients of these calls are drawn in the dtype of NumPy")
    with torch.cuda.stream(torch.cuda.Stream()):
        compare(name, wanted, as_numbers(strategy_calls.calls(world)[name](up, down)))
