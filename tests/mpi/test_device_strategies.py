"""Strategies on the memory of a device give the bits that they give on the host, forward and backward.

The software device has its checker on: a missing wait, a message that leaves early, or memory that is freed early is an
error. The fake CUDA checks every call against those of CuPy.
"""

from __future__ import annotations

import gc
import time
import traceback

import numpy as np
import pytest
import strategy_calls

import fompi
from fompi.backends.cuda.memory import SLAB_NBYTES
from fompi.backends.cuda.software import SoftwareDevice
from fompi.backends.cuda.staging import HostMark
from fompi.mpi.paths import DIRECT, IPC, STAGED
from fompi.parallel.data import AdamW, DataParallel
from fompi.tensors import dlpack

pytestmark = pytest.mark.ranks(mpich=[1, 2, 3], openmpi=[])

PATHS = (STAGED, DIRECT, IPC)
NAMES = (*strategy_calls.calls(fompi.Communicator()),)


def compare(name, wanted, got):
    assert [a.shape for a in wanted] == [a.shape for a in got], name
    assert [a.tobytes() for a in wanted] == [a.tobytes() for a in got], name


def close(device, world, comm):
    """Give all memory back. The helper thread holds for a moment what it has driven."""
    for turn in range(50):
        world.engine.progress_while_waiting()
        time.sleep(0.02)
        gc.collect()
        if turn > 2 and all(nbytes >= SLAB_NBYTES for _, nbytes, *_ in device.runtime.memory.values()):
            break  # the arrays of the program are gone
    comm.Barrier()
    device.close()
    gc.collect()


@pytest.mark.parametrize("name", NAMES if fompi.Communicator().size < 3 else NAMES[::2])
def test_strategies_have_the_bits_of_the_host(world, monkeypatch, name):
    monkeypatch.setenv("FOMPI_PATH", PATHS[NAMES.index(name) % len(PATHS)])
    device = SoftwareDevice(seed=world.rank)
    wanted = strategy_calls.calls(world)[name](np.asarray, np.asarray)
    compare(name, wanted, strategy_calls.calls(world, device)[name](device.array, lambda x: x.get()))
    world.engine.progress_while_waiting()
    gc.collect()
    device.check()
    assert not device.reports


@pytest.mark.skipif(fompi.Communicator().size != 2, reason="other sizes take longer and test nothing new")
def test_without_the_checker(world):
    """Random delays, and nobody looks: the results are right all the same."""
    wanted = {name: call(np.asarray, np.asarray) for name, call in strategy_calls.calls(world).items()}
    names = [*wanted]
    for seed in range(10):
        device = SoftwareDevice(seed=100 * seed + world.rank, check=False)
        for name in names[seed::10]:
            compare(name, wanted[name], strategy_calls.calls(world, device)[name](device.array, lambda x: x.get()))


@pytest.mark.one_mpi
@pytest.mark.skipif(fompi.Communicator().size != 2, reason="other sizes take longer and test nothing new")
@pytest.mark.parametrize("name", NAMES)
def test_strategies_on_the_fake_cuda(world, comm, fakecuda, monkeypatch, name):
    """Arrays of CuPy go in and come out, and every function of NumPy has arguments that CuPy takes."""
    monkeypatch.setenv("FOMPI_PATH", (STAGED, IPC)[NAMES.index(name) % 2])
    device = fakecuda.device()
    monkeypatch.setitem(dlpack.DEVICES, "cuda", lambda: device)
    wanted = strategy_calls.calls(world)[name](np.asarray, np.asarray)

    def up(x):
        return fakecuda.as_cupy(device, x)

    compare(name, wanted, strategy_calls.calls(world, device)[name](up, fakecuda.of_cupy))
    close(device, world, comm)
    assert device.runtime.lives == {"event": set(), "stream": set()}
    assert device.runtime.memory == {}


@pytest.mark.skipif(fompi.Communicator().size != 2, reason="the numbers are those of two ranks")
def test_memory_of_data_parallelism(world, monkeypatch):
    """Between steps the device has what `nbytes` says. An error of memory names what would fit, on all ranks."""
    monkeypatch.setenv("FOMPI_PATH", IPC)
    count = (1 << 18) + 64  # the calls of so large buckets are not bound, so they keep nothing
    own, pause = fompi.Communicator(name="own"), world.engine.progress_while_waiting

    def trained(device, zero, bucket_nbytes, steps=2):
        gradient = device.array(np.ones(count, "f4"))
        params = {f"p{i}": device.array(np.ones(count, "f4")) for i in range(4)}
        dp = DataParallel(params, optimizer=AdamW(1e-3), comm=own, zero=zero, bucket_nbytes=bucket_nbytes)
        for _ in range(steps):
            for name in params:
                dp[name]
                dp.release(name)
            for name in reversed(params):
                if zero == 3:
                    dp[name]
                dp.ready(name, gradient)
                dp.release(name)
            dp.step(clip=1.0)
        return dp

    for zero in (0, 1, 2, 3):
        device = SoftwareDevice(seed=world.rank)
        dp = trained(device, zero, 8 * count)
        for name in ("p0", "p1", "p2", "p3"):
            dp[name]
            dp.release(name)
        device.array(np.zeros(1))  # it waits for the device
        for _ in range(100):
            pause()
        gc.collect()
        more = device.used - sum(dp.nbytes.values())  # with zero=3 the bucket that was gathered ahead
        assert 0 <= more <= (8 * count if zero == 3 else 0) and device.used <= device.most_nbytes, zero
        dp.close()
    n = 4 * 4 * count
    for zero, capacity, bucket, words in (
        (0, 4.5 * n, n, "zero=2 keeps .* bytes less. zero=3 keeps .* bytes less"),
        (2, 4.05 * n, n, r"the largest bucket has 2097664 bytes, and bucket_nbytes=\d+ would fit. zero=3 keeps"),
    ):
        device = SoftwareDevice(seed=world.rank, capacity=int(capacity))
        with pytest.raises((fompi.DeviceError, fompi.MismatchError), match=words):
            trained(device, zero, bucket)
    own.close()


WAITING = (
    "malloc",
    "free",
    "hostAlloc",
    "freeHost",
    "deviceSynchronize",
    "streamCreateWithPriority",
    "ipcOpenMemHandle",
)
"""What CUDA does only after it has waited, or what takes long."""


@pytest.mark.one_mpi
@pytest.mark.skipif(fompi.Communicator().size != 2, reason="other sizes take longer and test nothing new")
@pytest.mark.parametrize("path", [STAGED, IPC])
def test_no_host_wait_in_a_step(world, comm, fakecuda, monkeypatch, path):
    """After some steps nothing is allocated, and nobody waits for the device: there are polls only."""
    monkeypatch.setenv("FOMPI_PATH", path)
    device = fakecuda.device()
    monkeypatch.setitem(dlpack.DEVICES, "cuda", lambda: device)
    waits, wait = [], HostMark.wait

    def noted(mark):
        waits.append([f"{frame.name}:{frame.lineno}" for frame in traceback.extract_stack(limit=7)])
        wait(mark)

    monkeypatch.setattr(HostMark, "wait", noted)
    inputs = {}

    def up(x):  # the tensors of the program exist before the step
        key = x.dtype.str, x.shape, x.tobytes()
        if key not in inputs:
            inputs[key] = fakecuda.as_cupy(device, x)
        return inputs[key]

    def down(x):
        return np.zeros(x.shape, x.dtype)

    def check(name, step):
        for _ in range(4):
            step()
        begun = len(device.runtime.log)
        waits.clear()
        step()
        # free(0) is the first call of a thread, which may be the helper in the middle of a step
        called = {entry[0] for entry in device.runtime.log[begun:] if entry[:2] != ("free", 0)}
        assert not waits and not called & {*WAITING}, (name, called, waits)
        assert world.size == 1 or "eventQuery" in called or "of all rows" in name, "beside the polls"

    calls = strategy_calls.calls(world, device)
    for name in NAMES[path == IPC :: 2]:
        if not name.startswith(("data", "pipeline")):
            check(name, lambda call=calls[name]: call(up, down))
    for zero in range(4):
        with strategy_calls.data_parallel(world, up, zero=zero) as (dp, step):
            check(f"zero={zero}", step)
    for schedule in ("1f1b", "zb-h1"):
        with strategy_calls.pipeline(world, up, device, schedule=schedule) as (pipe, step):
            check(schedule, step)
    del dp, pipe, step, calls
    inputs.clear()
    close(device, world, comm)


FAULTY = ("row", "ring", "experts", "data 1", "pipeline")


@pytest.mark.one_mpi
@pytest.mark.skipif(fompi.Communicator().size != 2, reason="more ranks take longer and test nothing new")
@pytest.mark.parametrize("name", FAULTY)
def test_errors_of_cuda_at_each_call(world, comm, fakecuda, monkeypatch, name):
    """One of the calls of CUDA fails on one rank: a typed error on all ranks, and all memory comes back."""
    statuses, draw = {700: "IllegalAddress", 2: "memory", 999: "Unknown"}, np.random.default_rng(8)
    monkeypatch.setenv("FOMPI_PATH", IPC if FAULTY.index(name) % 2 else STAGED)
    names: list[str] = []
    for case in range(3):
        device, own = fakecuda.device(), fompi.Communicator(name=f"{name} {case}")
        monkeypatch.setitem(dlpack.DEVICES, "cuda", lambda device=device: device)
        call = strategy_calls.calls(own, device)[name]
        status, failed, words = [*statuses][(case + FAULTY.index(name)) % len(statuses)], False, ""
        begun, begun_at = len(device.runtime.log), time.perf_counter()
        if case:
            at = int(draw.integers(len(names)))
            if world.rank == world.size - 1:
                device.runtime.fails(names[at], names[: at + 1].count(names[at]), status)
        try:
            call(lambda x, device=device: fakecuda.as_cupy(device, x), fakecuda.of_cupy)
            own.barrier()  # a rank that had done its part hears of the error in its next call
        except fompi.FompiError as error:
            failed, words = True, str(error)
            assert not isinstance(error, fompi.WaitTimeout), words
        assert time.perf_counter() - begun_at < world.engine.timeout, f"something waited for its deadline: {words}"
        struck = comm.bcast(bool(case) and not device.runtime.failures, world.size - 1)
        every = comm.allgather(failed)
        assert not any(every) or struck, (name, case, words)
        if not case:
            names = [
                entry[0]
                for entry in device.runtime.log[begun:]
                if entry[0] not in ("numpy", "getDevice", "free", "malloc", "eventQuery")
            ]
            names = comm.bcast(names, world.size - 1)
        elif struck and any(every):
            assert all(every), (name, case, names[at], status, every)
        comm.Barrier()
        for _ in range(100):  # messages of calls that have failed may be in flight
            world.engine.progress_while_waiting()
        device.runtime.failures.clear()
        device.runtime.sticky, device.fault = 0, None
        del call, own
        close(device, world, comm)
        assert device.runtime.memory == {}, (name, case)
