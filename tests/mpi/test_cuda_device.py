"""Operations on the CUDA device over a fake runtime: they give the bits of the software device.

Arrays of CuPy go in and come out. Kernels run on the host, and every call of CUDA is checked (tests/fakecuda.py).
"""

from __future__ import annotations

import gc

import calls
import catalogue
import numpy as np
import pytest
from device_calls import result_of
from mpi4py import MPI

import fompi
from fompi.backends.cuda.software import SoftwareDevice
from fompi.mpi.paths import IPC, STAGED
from fompi.ops import pending
from fompi.schedules import registry
from fompi.tensors import dlpack

pytestmark = pytest.mark.one_mpi  # CuPy is in the environment of one MPI library only


@pytest.fixture
def fakecuda():
    import fakecuda

    return fakecuda


@pytest.fixture(params=[STAGED, IPC])
def path(request, monkeypatch):
    monkeypatch.setenv("FOMPI_PATH", request.param)
    return request.param


@pytest.fixture
def device(fakecuda, monkeypatch, world, comm, path):
    made = fakecuda.device()
    monkeypatch.setitem(dlpack.DEVICES, "cuda", lambda: made)
    yield made
    world.engine.progress_while_waiting()  # it drops tokens of calls that have failed
    gc.collect()
    runtime = made.runtime
    comm.Barrier()  # another rank may have this memory open
    made.close()
    assert runtime.memory == {} and not runtime.opened and runtime.lives == {"event": set(), "stream": set()}


@pytest.mark.skipif(MPI.COMM_WORLD.size > 2, reason="more ranks take longer and test nothing new")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", calls.NAMES)
def test_operations_have_the_bits_of_the_software_device(world, device, fakecuda, name, dtype, monkeypatch):
    monkeypatch.setattr(pending, "VERIFIED_RANKS", 0)
    problem = catalogue.problems(world.size, dtype)[name]
    software = SoftwareDevice(seed=world.rank, delay=0)

    def as_cupy(x):
        return fakecuda.as_cupy(device, x)

    schedules = registry.available(problem)
    for number, schedule in enumerate(schedules if dtype == "float32" else schedules[:1]):
        sizes = calls.row_sizes(problem, ("uneven", "even")[number % 2], seed=number)
        mine = catalogue.inputs(problem, sizes, number)[world.rank]
        options = {"schedule": schedule, "slices": (1, (1, 2))[number % 2]}
        wanted = result_of(software.array, lambda y: y.get(), problem, mine, sizes, world, **options)
        got = result_of(as_cupy, fakecuda.of_cupy, problem, mine, sizes, world, **options)
        assert {key: a.tobytes() for key, a in got.items()} == {key: a.tobytes() for key, a in wanted.items()}, schedule
    software.check()
    assert not software.reports


def test_bound_plans(world, device, fakecuda, path):
    spec = (
        fompi.Spec((4 * world.size, 6), "float32", fompi.Shard(0)),
        fompi.Spec((6, 5 * world.size), "float32", fompi.Shard(1)),
    )
    x, w = np.random.default_rng(world.rank).standard_normal((4, 6)).astype("f4"), np.ones((6, 5), "f4")
    for schedule in ("direct", "ring"):
        plan = fompi.plan(fompi.all_gather_matmul, *spec, ranks=world.size, schedule=schedule)
        with fompi.bind(plan, comm=world, x=x, w=w) as step:
            wanted = step()
        with fompi.bind(plan, comm=world, x=fakecuda.as_cupy(device, x), w=fakecuda.as_cupy(device, w)) as step:
            step()
            mallocs = len(device.runtime.calls("malloc")) + len(device.runtime.calls("hostAlloc"))
            for _ in range(3):
                assert fakecuda.of_cupy(step()).tobytes() == wanted.tobytes()
            assert len(device.runtime.calls("malloc")) + len(device.runtime.calls("hostAlloc")) == mallocs
            assert ("_host" in str(step.plan.programs[world.rank].ops)) == (world.size > 1 and path == STAGED)
            del step


def test_products_that_are_announced(world, device, fakecuda, monkeypatch):
    """One launch of the kernel for all products of a call, with the bits of the host. No Triton: an error."""
    monkeypatch.setenv("FOMPI_COUNTERS", "1")
    size, driver = world.size, device.library.driver
    specs = (
        fompi.Spec((8 * size, 6 * size), "float32", fompi.Shard(1)),
        fompi.Spec((6 * size, 5), "float32", fompi.Shard(0)),
    )
    plan = fompi.plan(fompi.matmul_reduce_scatter, *specs, ranks=size, schedule="direct", slices=2)
    x, w = np.arange(48 * size, dtype="f4").reshape(8 * size, 6) % 5, np.ones((6, 5), "f4")
    with fompi.bind(plan, comm=world, x=x, w=w) as step:
        wanted, count = step(), len(step.compiled.announced)
    given = {"x": fakecuda.as_cupy(device, x), "w": fakecuda.as_cupy(device, w)}
    with fompi.bind(plan, comm=world, **given) as step:
        assert step.announced == (2 * size - 1 if size > 1 else 0) and count == 0, "none on the host"
        for call in range(1, 4):
            assert fakecuda.of_cupy(step()).tobytes() == wanted.tobytes()
            assert size == 1 or driver.launches[-1] == (call, step.announced)
    device.library.has_triton = False
    with pytest.raises(fompi.LaunchError, match="FOMPI_COUNTERS=1 cannot be done: Triton is missing: pip install"):
        fompi.bind(plan, comm=world, **given)
    del step, given


def test_a_kernel_that_fails_on_one_rank(world, device, fakecuda):
    """All ranks get an error, nothing hangs, and operations on the host go on."""
    own = fompi.Communicator(name="own")
    x = fakecuda.as_cupy(device, np.ones((4, 6), "f4"))
    fompi.all_gather(x, comm=own)
    if world.rank == world.size - 1:
        device.runtime.fails("eventQuery", 1, 700)
    with pytest.raises((fompi.DeviceError, fompi.PeerError, fompi.MismatchError), match="cudaErrorIllegalAddress"):
        fompi.matmul_all_reduce(x, fakecuda.as_cupy(device, np.ones((6, 5), "f4")), comm=own)
    assert fompi.all_reduce(np.ones(3), comm=own).tolist() == [world.size] * 3
    device.fault = None


@pytest.mark.parametrize("schedule", ["direct", "unfused"])
def test_memory_that_is_used_up(world, device, fakecuda, schedule):
    x, w = (fakecuda.as_cupy(device, np.ones(shape, "f4")) for shape in ((1, 1000), (1000, 800)))
    if world.rank == 0:
        device.runtime.total = device.runtime.used + 1000
    with pytest.raises((fompi.DeviceError, fompi.PeerError), match="out of memory"):
        fompi.all_gather_matmul(x, w, comm=world, schedule=schedule)
    device.runtime.total = 1 << 33
    assert (fakecuda.of_cupy(fompi.all_gather_matmul(x, w, comm=world, schedule=schedule)) == 1000).all()


def test_ranks_that_use_different_kinds_of_devices(world, device, fakecuda):
    if world.size > 1:
        x = np.ones((2, 3), "f4")
        given = fakecuda.as_cupy(device, x) if world.rank else SoftwareDevice(delay=0).array(x)
        with pytest.raises(fompi.MismatchError, match="software device"):
            fompi.all_gather(given, comm=world)
