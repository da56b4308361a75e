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
from fompi.backends.cuda.cupy import NOT_READY
from fompi.backends.cuda.software import SoftwareDevice
from fompi.mpi.paths import IPC, STAGED
from fompi.schedules import registry
from fompi.tensors import dlpack

pytestmark = pytest.mark.one_mpi  # CuPy is in the environment of one MPI library only


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
@pytest.mark.parametrize(
    ("path", "name"), [((STAGED, IPC)[i % 2], name) for i, name in enumerate(calls.NAMES)], indirect=["path"]
)
def test_operations_have_the_bits_of_the_software_device(world, device, fakecuda, path, name, without_verification):
    """A third of the schedules over one path, those by IPC in bfloat16. The software device has every schedule."""
    dtype, turn = ("float32", 0) if path == STAGED else ("bfloat16", 1)
    problem = catalogue.problems(world.size, dtype)[name]
    software = SoftwareDevice(seed=world.rank, delay=0)

    def as_cupy(x):
        return fakecuda.as_cupy(device, x)

    schedules = registry.available(problem)
    for number, schedule in enumerate(schedules[turn::3] or schedules[:1]):
        sizes = calls.row_sizes(problem, ("uneven", "even")[number % 2], seed=number)
        mine = catalogue.inputs(problem, sizes, number)[world.rank]
        options = {"schedule": schedule, "slices": (1, (1, 2))[number % 2]}
        wanted = result_of(software.array, lambda y: y.get(), problem, mine, sizes, world, **options)
        got = result_of(as_cupy, fakecuda.of_cupy, problem, mine, sizes, world, **options)
        assert {key: a.tobytes() for key, a in got.items()} == {key: a.tobytes() for key, a in wanted.items()}, schedule
    software.check()
    assert not software.reports


def test_smaller_messages(world, device, fakecuda, path):
    """The kernels of wires have the bits of the host. More of them: `tests/local/test_cuda_kernels.py`."""
    x = np.random.default_rng(world.rank).standard_normal(333).astype("f4")
    for operation, wire in ((fompi.all_reduce, "int8"), (fompi.reduce_scatter, "fp8_e4m3"), (fompi.all_gather, "int4")):
        wanted = operation(x, wire=wire, comm=world)
        got = operation(fakecuda.as_cupy(device, x), wire=wire, comm=world)
        assert fakecuda.of_cupy(got).tobytes() == wanted.tobytes(), (operation, wire)
        del got


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


def test_parts_that_the_program_still_writes(world, device, fakecuda, path, monkeypatch):
    """Only the streams that read a part wait for the program's stream. So does a message of device memory.

    Events are used again.
    """
    runtime, library, late = device.runtime, device.library, set()
    plan = fompi.plan(
        fompi.all_gather, fompi.Spec((4 * world.size, 3), "float32", fompi.Shard(0)), ranks=world.size,
        schedule="direct", slices=2,
    )  # fmt: skip
    monkeypatch.setattr(device, "query", lambda event: NOT_READY if event in late else 0)
    runtime.lives["stream"].add(77)
    monkeypatch.setattr(library, "streams", [77])
    x = np.arange(12, dtype="f4").reshape(4, 3) + world.rank
    wanted = fompi.all_gather(x, comm=world).tobytes()
    with fompi.bind(plan, comm=world, x=fakecuda.as_cupy(device, x)) as step:
        made = len(runtime.lives["event"])
        for _ in range(5):
            step.start("x")
            runtime.busy.add(77)
            begun = len(runtime.log)
            for part in (1, 0):
                step.ready("x", part)
                late |= {event for event, stream in runtime.calls("eventRecord", begun) if stream == 77}
            names = {queue.stream.ptr: name for name, queue in step.backend.queues.items()}
            waits = {(names[stream], event) for stream, event in runtime.calls("streamWaitEvent", begun)}
            reading = {"merge", "download"} if path == STAGED and world.size > 1 else {"merge"}
            assert {name for name, event in waits if event in late} == reading and len(late) == 2
            assert {event for name, event in waits if name == "merge"} >= late, "the copy reads both parts"
            assert path == STAGED or world.size == 1 or not step.done()
            runtime.busy.clear()
            late.clear()
            assert fakecuda.of_cupy(step.wait()).tobytes() == wanted
        assert len(runtime.lives["event"]) - made <= 3 + 2 * (world.size - 1), "one for each thing in flight"
    own = fompi.Communicator(name="own")
    step = fompi.bind(plan, comm=own, x=fakecuda.as_cupy(device, x))
    runtime.busy.add(77)
    step.start("x").ready("x", 0)
    if world.rank == world.size - 1:
        runtime.fails("eventRecord", 1, 719)
    step.ready("x", 1)
    with pytest.raises((fompi.DeviceError, fompi.PeerError), match="cudaErrorLaunchFailure"):
        step.wait()
    device.fault = None
    assert fompi.all_reduce(np.ones(3), comm=own).tolist() == [world.size] * 3
    runtime.busy.clear()
    runtime.lives["stream"].remove(77)
    del step


def test_bind_launches_kernels_of_the_user(world, device, fakecuda):
    """Once, on arrays of CuPy full of zeros, not on those of the program. Its error is one of bind, on all ranks."""
    seen, last = [], world.rank == world.size - 1

    def matmul(reads, writes):
        a, b, c = map(fakecuda.view_of_cupy, (*reads, *writes))
        seen.append((a.shape, b.shape, c.shape, a.any() or b.any()))
        np.matmul(a, b, out=c)
        if last and "fails" in seen:
            raise ZeroDivisionError("boom")
        if last and "breaks" in seen:
            device.runtime.fails("eventQuery", 1, 700)

    specs = (
        fompi.Spec((2 * world.size, 3), "float32", fompi.Shard(0)),
        fompi.Spec((3, 4 * world.size), "float32", fompi.Shard(1)),
    )
    plan = fompi.plan(fompi.all_gather_matmul, *specs, ranks=world.size, schedule="direct")
    x, w = (fakecuda.as_cupy(device, np.ones(shape, "f4")) for shape in ((2, 3), (3, 4)))
    with fompi.bind(plan, comm=world, kernels={"matmul": matmul}, x=x, w=w) as step:
        assert seen == [((2, 3), (3, 4), (2, 4), False)]
        assert (fakecuda.of_cupy(step()) == 3).all() and len(seen) == 1 + world.size
    seen.append("fails")
    with pytest.raises((fompi.DeviceError, fompi.MismatchError), match=r"kernel 'matmul' of kernels= .*boom"):
        fompi.bind(plan, comm=world, kernels={"matmul": matmul}, x=x, w=w)
    assert (fakecuda.of_cupy(fompi.all_gather(x, comm=world)) == 1).all(), "the device is of use, and the ranks are"
    seen[:] = ["breaks"]
    with pytest.raises((fompi.DeviceError, fompi.MismatchError), match=r"kernel 'matmul' .*cudaErrorIllegalAddress"):
        fompi.bind(plan, comm=world, kernels={"matmul": matmul}, x=x, w=w)
    device.fault = None
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


def test_memory_that_cannot_be_exported(world, device, fakecuda, path):
    """By ipc it is an error on all ranks, and the communicator goes on."""
    own, x = fompi.Communicator(name="own"), fakecuda.as_cupy(device, np.ones((4, 6), "f4"))
    if world.rank == world.size - 1:
        device.runtime.fails("ipcGetMemHandle", 1, 2)
    if path == IPC and world.size > 1:
        with pytest.raises((fompi.DeviceError, fompi.PeerError), match="out of memory"):
            fompi.all_gather(x, comm=own)
    assert (fakecuda.of_cupy(fompi.all_gather(x, comm=own)) == 1).all()


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


@pytest.mark.skipif(MPI.COMM_WORLD.size > 2, reason="more ranks take longer and test nothing new")
def test_products_in_an_order_of_leaves(world, device, fakecuda):
    """A device has the bits of the host: of both it is the same chain."""
    order, k = fompi.Canonical(4), 24 // world.size
    x, w = (np.random.default_rng(i).standard_normal(shape).astype("f4") for i, shape in enumerate([(9, 24), (24, 5)]))
    own = slice(world.rank * k, (world.rank + 1) * k)
    given = [np.ascontiguousarray(a) for a in (x[:, own], w[own])]
    cupy = [fakecuda.as_cupy(device, a) for a in given]
    for operation in (fompi.matmul_all_reduce, fompi.matmul_reduce_scatter, fompi.all_gather_matmul):
        wanted = operation(*given, comm=world, order=order)
        assert fakecuda.of_cupy(operation(*cupy, comm=world, order=order)).tobytes() == wanted.tobytes()
    h = np.random.default_rng(7).standard_normal((9 * world.size, 3)).astype("f4")
    wanted = fompi.all_gather_weight_gradient(given[0], h, comm=world, order="ranks")
    got = fompi.all_gather_weight_gradient(cupy[0], fakecuda.as_cupy(device, h), comm=world, order="ranks")
    assert fakecuda.of_cupy(got).tobytes() == wanted.tobytes()
