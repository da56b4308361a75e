"""The CUDA device over a fake runtime (tests/fakecuda.py): its memory, streams, threads and errors.

Each call of CUDA is checked against the signature in CuPy. Kernels run on the host.
"""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from device_calls import random

import fompi
from fompi.backends import cuda
from fompi.backends.cuda import library, memory
from fompi.tensors import dlpack
from fompi.tensors.dlpack import borrow

pytestmark = pytest.mark.one_mpi  # CuPy is in the environment of one MPI library only


# -------------------------------------------------------------------------------------------------------------- memory


def test_arrays_go_up_and_come_down(device):
    for dtype in ("float32", "int64", "float16", "complex128", "bool", ml_dtypes.bfloat16):
        for shape in ((), (0,), (3,), (2, 0, 4), (5, 3, 2)):
            x = random(*shape, dtype=dtype)
            y = device.array(x)
            assert (y.shape, y.dtype, y.nbytes) == (x.shape, x.dtype, x.nbytes) and y.ptr % memory.ALIGNMENT == 0
            np.testing.assert_array_equal(y.get(), x, strict=True)
    x = random(4, 6)
    y = device.array(x)
    np.testing.assert_array_equal(y[:, 1:3].get(), x[:, 1:3])
    np.testing.assert_array_equal(y.rows_first(1).get(), x.T)
    device.put(y[:, 2:4], 7)
    x[:, 2:4] = 7
    np.testing.assert_array_equal(y.get(), x)


def test_blocks_are_used_again(device):
    def count():
        return len(device.runtime.calls("malloc"))

    x = device.empty((1000,), "f4")
    ptr, small = x.ptr, count()
    others = [device.empty((1000,), "f4") for _ in range(100)]
    assert count() == small, "small blocks share a slab"
    assert len({a.ptr for a in (x, *others)}) == 101
    del x
    assert ptr in {a.ptr for a in [device.empty((1000,), "f4") for _ in range(500)]}
    large = device.empty((3 << 20,), "u1")
    ptr = large.ptr
    view = large[5:10]
    del large
    assert device.empty((3 << 20,), "u1").ptr != ptr, "the view keeps it"
    del view
    assert device.empty((3 << 20,), "u1").ptr == ptr
    assert device.pool.nbytes == device.runtime.used


def test_a_block_that_the_program_used_waits_for_its_stream(device):
    """A kernel of the program may still use it. It is free once an event in the program's stream is done."""
    x = device.empty((3 << 20,), "u1")
    ptr = x.ptr
    assert x.__cuda_array_interface__["data"][0] == ptr
    del x
    assert device.empty((3 << 20,), "u1").ptr != ptr
    queried = []
    device.query = lambda event: queried.append(event) or 600
    entry = device.entry()
    assert device.runtime.calls("eventRecord")[-1] == [entry.ptr, 0]
    assert device.empty((3 << 20,), "u1").ptr != ptr
    assert queried == [entry.ptr]
    device.query = device.runtime.eventQuery
    blocks = [device.empty((3 << 20,), "u1") for _ in range(4)]
    assert ptr in [block.ptr for block in blocks]


def test_page_locked_memory(device):
    x = device.pinned((3, 4), "f8")
    assert device.runtime.span(x.ctypes.data, x.nbytes) == "page-locked" and x.flags.c_contiguous
    at = x.ctypes.data
    rows = x[1:]
    del x
    assert device.pinned((3, 4), "f8").ctypes.data != at
    del rows
    assert at in [page.ctypes.data for page in [device.pinned((3, 4), "f8") for _ in range(3)]]
    assert device.pinned((0,), "f4").size == 0


def test_copies(device):
    x, stream = random(6, 8), device.stream("mine")
    a, b, page = device.array(x), device.empty((6, 8), "f4"), device.pinned((6, 8), "f4")
    device.copy(b, a)(stream)
    device.copy(page, b)(stream)
    np.testing.assert_array_equal(page, x)
    half = device.empty((6, 4), "f4")
    device.copy(half, a[:, ::2])(stream)
    device.copy(b[:, 1::2], half)(stream)
    np.testing.assert_array_equal(b.get()[:, 1::2], x[:, ::2])
    with pytest.raises(fompi.DeviceError, match="strided host memory"):
        device.copy(half, page[:, ::2])
    with pytest.raises(fompi.DeviceError, match="no work for a device"):
        device.copy(page, page)


def test_memory_between_processes(device, fakecuda):
    x = device.array(random(10, 4))
    handle = device.export(x[2:5])
    assert handle.isascii() and handle == handle.strip() and len(handle) < 256
    assert device.export(x[1:]).split()[0] == handle.split()[0]
    assert len(device.runtime.calls("ipcGetMemHandle")) == 1
    np.testing.assert_array_equal(device.open(handle, 48).view("f4").get(), x[2:5].get().ravel())
    assert not device.runtime.opened, "CUDA does not open what the same process has exported"
    other = fakecuda.CudaDevice(0, device.runtime, device.cupy, fakecuda.FakeLibrary)  # as in another process
    parts = [other.open(device.export(x[i : i + 1]), 16) for i in range(5)]
    assert len(device.runtime.calls("ipcOpenMemHandle")) == 1
    assert [part.ptr - parts[0].ptr for part in parts] == [16 * i for i in range(5)] and parts[0].ptr != x.ptr
    np.testing.assert_array_equal(parts[3].view("f4").get(), x[3].get())
    del parts
    assert len(device.runtime.opened) == 1, "for the next message"
    other.close()
    assert not device.runtime.opened


def test_memory_of_others_is_copied_before_another_process_opens_it(device, fakecuda):
    x = random(6, 4)
    array = borrow(fakecuda.as_cupy(device, x)).array
    for _ in range(2):
        opened = device.open(device.export(array[2:4]), 32).view("f4")
        np.testing.assert_array_equal(opened.get(), x[2:4].ravel())
        fakecuda.view(array)[...] += 1
        x += 1
    assert opened.ptr != array[2:4].ptr


def test_messages_in_parts_lend_nothing(device):
    """A part is given to MPI as the whole is: its memory does not count as lent, and no stream waits."""
    x = device.array(np.arange(8, dtype="u1"))
    part = device.memory(x)[2:6]
    interface = part.__cuda_array_interface__
    assert (part.ptr, part.nbytes, interface["stream"], x.memory.is_lent) == (x.ptr + 2, 4, None, False)


def test_out_of_memory(fakecuda):
    made = fakecuda.device(total=42 << 20)
    exported = made.empty((100,), "u1")
    made.export(exported)
    del exported
    blocks = [made.empty((4 << 20,), "u1") for _ in range(9)]
    with pytest.raises(fompi.DeviceError, match=f"{5 << 20} bytes were asked for, {4 << 20} of {42 << 20} are free"):
        made.empty((5 << 20,), "u1")
    ptr = blocks[0].ptr
    assert blocks[0].__cuda_array_interface__["data"][0] == ptr
    del blocks[:5]
    assert made.empty((20 << 20,), "u1").size == 20 << 20, "what nothing uses is given back first"
    assert made.runtime.calls("deviceSynchronize") and [ptr] in made.runtime.calls("free")
    assert made.runtime.used == 38 << 20, "what another process may have opened stays"


# ------------------------------------------------------------------------------------------------ the caller's streams


def test_entry_follows_the_current_streams(device):
    runtime, lib = device.runtime, device.library
    waits = len(runtime.calls("streamWaitEvent"))
    event = device.entry()
    assert runtime.calls("eventRecord")[-1] == [event.ptr, 0], "the default stream follows others: never taken as idle"
    lib.streams = [77]
    assert device.entry() is None, "an idle stream"
    runtime.busy.add(77)
    runtime.lives["stream"].update({77, 78})
    event = device.entry()
    assert runtime.calls("eventRecord")[-1] == [event.ptr, 77] and len(runtime.calls("streamWaitEvent")) == waits
    lib.streams = [77, 78]
    runtime.busy.add(78)
    event = device.entry()
    arrivals = device._arrivals.ptr
    assert [ptr for ptr, _ in runtime.calls("streamWaitEvent")[waits:]] == [arrivals, arrivals]
    assert runtime.calls("eventRecord")[-1] == [event.ptr, arrivals]
    lib.streams = []
    assert device.entry() is None
    assert device.arriving() == arrivals and device.entry() is not None and device.entry() is None
    seen = []
    thread = threading.Thread(target=lambda: seen.extend([device.entry(), device.entry()]))
    thread.start()
    thread.join()
    assert seen[0] is not None and seen[1] is None, "a tensor may arrive on one thread, and be used on another"
    seen.clear()
    del event
    runtime.lives["stream"] -= {77, 78}


def test_the_backend_waits_for_the_caller(device):
    device.runtime.lives["stream"].add(77)
    device.library.streams = [77]
    device.runtime.busy.add(77)
    backend = cuda.backend_of(device)
    before = len(device.runtime.calls("streamWaitEvent"))
    token = backend.enter()
    waits = device.runtime.calls("streamWaitEvent")[before:]
    assert waits == [[queue.stream.ptr, token.event.ptr] for queue in backend.queues.values()]
    device.runtime.lives["stream"].remove(77)
    del backend, token


# ---------------------------------------------------------------------------------------------------- threads and GPUs


def test_one_thread_sets_its_device_once(fakecuda):
    made = fakecuda.device(number=1, devices=2)
    y = made.empty((4, 4), "f4")
    enqueue = made.kernel("copy", [made.array(random(4, 4))], [y], ["float32"], ["float32"])
    seen = []

    def other():
        before = len(made.runtime.calls("setDevice"))
        for _ in range(5):
            enqueue(made.stream("mine"))
            made.stream("mine").record(made.event()).wait()
        seen.append(made.runtime.calls("setDevice")[before:])

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [[[1]]]
    assert made.runtime.pointerGetAttributes(y.ptr).device == 1


def test_a_new_thread_makes_no_context_on_another_gpu(fakecuda):
    """The first call of CUDA on a thread makes a context on its current GPU, which is number 0."""
    made = fakecuda.device(devices=2, number=1)
    stream, first = made.stream("mine"), made.event()
    stream.record(first)
    for work in (first.done, lambda: stream.record(first), lambda: stream.wait(first), made.departing):
        before = len(made.runtime.log)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        names = [name for name, *_ in made.runtime.log[before:]]
        assert names[:1] in ([], ["setDevice"]) and (names or work == made.departing), names


def test_the_current_stream_is_asked_for_by_the_number_of_the_gpu(device, monkeypatch):
    """The program may have made another GPU the current one."""
    asked = []
    streams = SimpleNamespace(get_current_stream=lambda number=-1: asked.append(number) or SimpleNamespace(ptr=5))
    monkeypatch.setattr(device, "cupy", SimpleNamespace(cuda=streams))
    of_torch = SimpleNamespace(
        is_initialized=lambda: True,
        current_stream=lambda number: asked.append(number) or SimpleNamespace(cuda_stream=6),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=of_torch))
    assert library.DeviceLibraries(device, None).current() == [5, 6] and asked == [device.number] * 2


def test_a_process_has_one_device_for_a_gpu(fakecuda, monkeypatch):
    from fompi.backends.cuda import cupy, driver

    made = {}

    def create(number, known_to_mpi=False, **options):
        return made.setdefault(number, fakecuda.device(number, devices=4, **options))

    monkeypatch.setattr(cupy, "CudaDevice", create)
    monkeypatch.setattr(driver, "visible_devices", lambda: 4)
    monkeypatch.setattr(cuda, "_devices", {})
    monkeypatch.setattr(cuda, "_chosen", {})
    monkeypatch.setattr(cuda, "local_rank", lambda: 6)
    first = fompi.Device("cuda")
    assert first.number == 2 and fompi.Device("cuda") is first and fompi.Device("cuda:2") is first
    assert fompi.Device("cuda:1") is made[1] and fompi.Device("cuda") is first
    with pytest.raises(fompi.DeviceError, match="exists: its options"):
        fompi.Device("cuda", tf32=True)
    monkeypatch.setattr(cuda, "_devices", {})
    monkeypatch.setattr(cuda, "_chosen", {})
    assert fompi.Device("cuda:3") is made[3] and fompi.Device("cuda").number == 3, "the first one is the rank's"


def test_why_cuda_does_not_start(fakecuda, monkeypatch):
    import cupy

    def message(number=0, **changes):
        runtime = fakecuda.Runtime()
        for name, value in changes.items():

            def answer(value=value):
                if isinstance(value, Exception):
                    raise value
                return value

            monkeypatch.setattr(runtime, name, answer)
        with pytest.raises((fompi.LaunchError, fompi.DeviceError)) as caught:
            fakecuda.CudaDevice(number, runtime, cupy, fakecuda.FakeLibrary)
        return str(caught.value)

    old, none = fakecuda.Error(35), fakecuda.Error(100)
    assert "no CUDA driver on this host" in message(getDeviceCount=old, driverGetVersion=0)
    text = message(getDeviceCount=old, driverGetVersion=12020, runtimeGetVersion=13000)
    assert "driver of this host is for CUDA 12.2, but CuPy is for CUDA 13.0" in text and "cupy-cuda12x" in text
    assert "CUDA_VISIBLE_DEVICES" in message(getDeviceCount=none)
    assert "CUDA_VISIBLE_DEVICES" in message(getDeviceCount=0)
    assert "no CUDA device 3: this process sees 1" in message(3)
    assert "CUDA does not start: CUDARuntimeError: cudaErrorUnknown" in message(getDeviceCount=fakecuda.Error(999))
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(fompi.LaunchError, match=r"needs CuPy .*\.\[cuda13\]"):
        fakecuda.CudaDevice()


# -------------------------------------------------------------------------------------------------------------- faults


def test_the_error_of_a_kernel_stays(device, fakecuda):
    x = fakecuda.as_cupy(device, random(4, 6))
    fompi.all_gather(x)
    device.runtime.fails("eventQuery", 1, 700)
    with pytest.raises(fompi.DeviceError, match=r"cudaErrorIllegalAddress.*cannot use the GPU.*launched by op 0, copy"):
        for _ in range(2):  # the first call may return before its kernel has failed
            fompi.all_gather(x)
    for again in (device.check, device.entry, lambda: device.array(random(3)), lambda: fompi.all_gather(x)):
        with pytest.raises(fompi.DeviceError, match="cudaErrorIllegalAddress"):
            again()
    assert fompi.all_gather(random(3)).shape == (3,)


CALLS = ("malloc", "hostAlloc", "memcpyAsync", "eventRecord", "streamWaitEvent", "eventQuery", "eventCreateWithFlags")


@pytest.mark.parametrize("status", [700, 2, 999])
@pytest.mark.parametrize("name", CALLS)
def test_any_call_may_fail(fakecuda, monkeypatch, name, status):
    """The n-th call of CUDA fails: a DeviceError. If the error is of one call, the next operation works."""
    x = random(4, 6)
    for number in range(1, 6):
        made = fakecuda.device()
        monkeypatch.setitem(dlpack.DEVICES, "cuda", lambda made=made: made)
        made.runtime.fails(name, number, status)
        try:
            for _ in range(3):
                given = made.array(x)
                y = fompi.all_gather_matmul(given, made.array(random(6, 5))).get()
                np.testing.assert_array_equal(y, x @ random(6, 5))
        except fompi.DeviceError as error:
            word = {700: "cudaErrorIllegalAddress", 2: "memory", 999: "cudaErrorUnknown"}[status]
            assert (word in str(error) and "cuda:0" in str(error)) or "page-locked" in str(error)
            broken = made.fault is not None
            assert broken == (status != 2 or name == "eventQuery")
            if not broken:
                np.testing.assert_array_equal(fompi.all_gather(made.array(x)).get(), x)
        else:
            assert name in made.runtime.failures or (name, status) in (("malloc", 2), ("hostAlloc", 2))
        made.fault = None


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("ipcOpenMemHandle", 217, "PeerAccessUnsupported.*FOMPI_PATH=staged"),
        ("ipcOpenMemHandle", 205, "FOMPI_PATH=staged"),
        ("ipcGetMemHandle", 801, "NotSupported.*FOMPI_PATH=staged"),
        ("eventQuery", 900, "CUDA graph is being captured"),
        ("streamQuery", 906, "CUDA graph is being captured"),
        ("eventRecord", 901, "CUDA graph is being captured"),
    ],
)
def test_calls_that_are_refused_leave_the_device_whole(device, name, status, words):
    event = device.stream("mine").record(device.event())
    device.library.streams = [77]
    calls = {
        "ipcOpenMemHandle": lambda: device.open(f"{'00' * 64} 0 100".encode(), 100),
        "ipcGetMemHandle": lambda: device.export(device.empty((100,), "u1")),
        "eventQuery": event.done,
        "streamQuery": device.entry,
        "eventRecord": lambda: device.array(random(3)),
    }
    device.runtime.fails(name, 1, status)
    with pytest.raises(fompi.DeviceError, match=words):
        calls[name]()
    assert device.fault is None
    device.library.streams = [0]
