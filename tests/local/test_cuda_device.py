"""The CUDA device over a fake runtime (tests/fakecuda.py): real arrays of CuPy, no GPU.

Each call of CUDA is checked against the signature in CuPy. Kernels run on the host. At the end of a test all memory,
events and streams have been given back.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import subprocess
import sys
import threading
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import fompi
from fompi.backends import cuda
from fompi.backends.cuda import library, memory
from fompi.backends.cuda.products import matrix
from fompi.backends.numpy import Numpy
from fompi.tensors import dlpack
from fompi.tensors.device_array import DeviceArray
from fompi.tensors.dlpack import LentOnDevice, borrow, lend

pytestmark = pytest.mark.one_mpi  # CuPy is in the environment of one MPI library only


@pytest.fixture
def fakecuda():
    import fakecuda

    return fakecuda


@pytest.fixture
def device(fakecuda, monkeypatch):
    made = fakecuda.device(devices=2)
    monkeypatch.setitem(dlpack.DEVICES, "cuda", lambda: made)
    yield made
    fompi.Communicator.of(None).engine.progress_while_waiting()  # it drops tokens of calls that have failed
    gc.collect()
    runtime = made.runtime
    made.close()
    assert runtime.memory == {} and runtime.lives == {"event": set(), "stream": set()} and not runtime.opened
    assert not made.library._cublas.handles


def random(*shape, dtype="float32"):
    return np.random.default_rng(sum(shape)).integers(-4, 5, shape).astype(dtype)


# ------------------------------------------------------------------------------------------------------------- memory


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


# ------------------------------------------------------------------------------------------------ kernels and streams


def launch(device, name, reads, writes, read_dtypes, write_dtypes):
    stream = device.stream("mine")
    device.kernel(name, reads, writes, read_dtypes, write_dtypes)(stream)


PRODUCTS = {
    "matmul": lambda x, w, b, h, g: ("matmul", [x, w], 1),
    "matmul of two runs": lambda x, w, b, h, g: ("matmul", [x[:2], x[3:], w], 2),
    "matmul_bias": lambda x, w, b, h, g: ("matmul_bias", [x, w, b], 1),
    "matmul_bias of two runs": lambda x, w, b, h, g: ("matmul_bias", [x[:1], x[2:], w, b], 2),
    "no rows": lambda x, w, b, h, g: ("matmul_bias", [x[:0], x[2:], w, b], 2),
    "no columns": lambda x, w, b, h, g: ("matmul_bias", [x[:, :0], w[:0], b], 1),
    "matmul_add": lambda x, w, b, h, g: ("matmul_add", [x, h, w], 1),
    "matmul_add of two runs": lambda x, w, b, h, g: ("matmul_add", [x[:1], x[2:], h[:1], h[2:], w], 2),
    "gradient": lambda x, w, b, h, g: ("gradient", [x, h], 1),
    "gradient of two runs": lambda x, w, b, h, g: ("gradient", [x[:2], x[3:], h[:2], h[3:]], 1),
    "gradient of no rows": lambda x, w, b, h, g: ("gradient", [x[:0], h[:0]], 1),
    "gradient_add": lambda x, w, b, h, g: ("gradient_add", [x, h, g], 1),
    "gradient_add of two runs": lambda x, w, b, h, g: ("gradient_add", [x[:2], x[3:], h[:2], h[3:], g], 1),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "complex64", "complex128"])
def test_products_have_the_bits_of_the_host(device, dtype):
    host, storage = Numpy(), Numpy().storage(dtype)

    def made(*shape):
        values = np.random.default_rng(sum(shape)).standard_normal(shape).astype("f4")
        if dtype == "bfloat16":
            return values.astype(ml_dtypes.bfloat16).view(storage)
        return values.astype(storage)

    for name, order in itertools.product(PRODUCTS, ("C", "F")):
        arrays = [np.asarray(made(*shape), order=order) for shape in ((5, 6), (6, 4), (4,), (5, 4), (6, 4))]
        kernel, reads, results = PRODUCTS[name](*arrays)
        lengths = [len(x) for x in reads[:results]] if kernel.startswith("matmul") else [6]
        wanted = [np.zeros((n, 4), storage) for n in lengths]
        host.bind(kernel, reads, wanted, [dtype] * len(reads), [dtype] * len(wanted))()
        for transposed in (False, True):
            writes = [device.array(np.zeros((4, n), storage)).rows_first(1) for n in lengths]
            if not transposed:
                writes = [device.array(np.zeros((n, 4), storage)) for n in lengths]
            lent = [device.array(np.ascontiguousarray(x.T)).rows_first(1) if order == "F" and x.ndim == 2
                    else device.array(x) for x in reads]  # fmt: skip
            launch(device, kernel, lent, writes, [dtype] * len(lent), [dtype] * len(writes))
            for y, array in zip(writes, wanted, strict=True):
                if order == "C" and not transposed:
                    assert y.get().tobytes() == array.tobytes(), name
                got, right = (a.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else a for a in (y.get(), array))
                kind = np.promote_types(got.dtype, "f4") if dtype != "bfloat16" else "f4"
                np.testing.assert_allclose(got.astype(kind), right.astype(kind), rtol=1e-2, atol=1e-2, err_msg=name)


def test_a_sum_in_place_and_operands_that_cublas_cannot_address(device):
    a, h, g = random(5, 6), random(5, 4), random(6, 4)
    total = device.array(g)
    launch(device, "gradient_add", [device.array(a), device.array(h), total], [total], ["float32"] * 3, ["float32"])
    np.testing.assert_array_equal(total.get(), g + a.T @ h)
    x, w = random(3, 4, 12), random(6, 5)
    strided = device.array(x)[:, ::2, ::2]
    assert matrix(strided) is None
    y = device.empty((3, 2, 5), "f4")
    launch(device, "matmul", [strided, device.array(w)], [y], ["float32"] * 2, ["float32"])
    np.testing.assert_array_equal(y.get(), x[:, ::2, ::2] @ w)
    y = device.array(np.zeros((3, 10), "f4"))[:, ::2]
    launch(device, "matmul", [device.array(random(3, 6)), device.array(w)], [y], ["float32"] * 2, ["float32"])
    np.testing.assert_array_equal(y.get(), random(3, 6) @ w)


def products(device):
    """The calls of cuBLAS without the small products that load its kernels."""
    return [call for call in device.library._cublas.calls if call[3:6] != (library.LOADED_SIZE,) * 3]


def test_kernels_are_loaded_when_a_plan_is_bound(device, fakecuda):
    """cuBLAS has run a small product of every kind before the first step, and once only."""
    plan = fompi.plan(
        fompi.all_gather_matmul, fompi.Spec((4, 6), "float32", fompi.Shard(0)),
        fompi.Spec((6, 5), "float32", fompi.Shard(1)), ranks=1
    )  # fmt: skip
    calls = device.library._cublas.calls
    x, w = fakecuda.as_cupy(device, random(4, 6)), fakecuda.as_cupy(device, random(6, 5))
    with fompi.bind(plan, x=x, w=w) as step:
        assert [call[3:6] for call in calls] == [(library.LOADED_SIZE,) * 3]
        for _ in range(2):
            step()
        assert len(calls) == 3
    with fompi.bind(plan, x=x, w=w):
        assert len(calls) == 3
    a = device.array(random(6, 4, dtype="f2"))
    launch(device, "matmul", [a, a.rows_first(1)], [device.empty((6, 6), "f2")], ["float16"] * 2, ["float16"])
    assert [call[8] for call in calls[3:]] == [2, 2] and len(products(device)) == 3, "another kind"


def test_the_calls_of_cublas(device):
    """float32 is exact unless tf32 is asked for. Half types are summed in float32; a sum of several calls stays so."""
    x, w = device.array(random(5, 6)), device.array(random(6, 4))
    y = device.empty((5, 4), "f4")
    launch(device, "matmul", [x, w], [y], ["float32"] * 2, ["float32"])
    device.tf32 = True
    launch(device, "matmul", [x, w], [y], ["float32"] * 2, ["float32"])
    calls = products(device)
    assert [call[17] for call in calls] == [68, 77]
    assert calls[0][3:6] == (4, 5, 6) and calls[0][7] == w.ptr and calls[0][10] == x.ptr and calls[0][14] == y.ptr
    a, h = device.array(random(5, 6, dtype="f2")), device.array(random(5, 4, dtype="f2"))
    g = device.empty((6, 4), "f2")
    launch(device, "gradient", [a[:2], a[2:], h[:2], h[2:]], [g], ["float16"] * 4, ["float16"])
    calls = products(device)
    assert [(call[8], call[15]) for call in calls[2:]] == [(2, 0), (2, 0)], "float16 operands, a float32 sum"
    assert device.library.used, "cuBLAS runs in the current stream of CuPy"
    with pytest.raises(fompi.DtypeError, match="cuBLAS has no product of int64"):
        device.kernel("matmul", [x.view("i8"), w.view("i8")], [y], ["int64"] * 2, ["int64"])


def test_kernels_of_the_user_get_arrays_of_cupy(device, fakecuda):
    import cupy

    x, y = device.array(random(3, 4)), device.array(random(3, 4))

    def double(reads, writes):
        assert type(reads[0]) is cupy.ndarray and reads[0].data.ptr == x[1:].ptr and writes[0].shape == (2, 4)
        fakecuda.view(y)[1:] = 2 * fakecuda.view(x)[1:]

    device.call(double, "double", [x[1:]], [y[1:]])(device.stream("mine"))
    np.testing.assert_array_equal(y.get()[1:], 2 * x.get()[1:])

    def fails(reads, writes):
        raise ZeroDivisionError("boom")

    with pytest.raises(ZeroDivisionError):
        device.call(fails, "fails", [], [y])(device.stream("mine"))


def test_launches_of_compiled_kernels(device, monkeypatch):
    """The arguments lie in memory as `cuLaunchKernel` takes them; the stream is the raw one."""
    import ctypes

    calls = []

    class Driver:
        @staticmethod
        def launchKernel(*arguments):
            assert len(arguments) == 11 and all(type(a) is int for a in arguments)
            addresses = (ctypes.c_void_p * 3).from_address(arguments[9])
            struct = (ctypes.c_int64 * 22).from_address(addresses[0])
            calls.append((arguments[0], arguments[1:8], arguments[8], arguments[10], struct[0],
                          *((ctypes.c_uint64).from_address(a).value for a in addresses[1:])))  # fmt: skip

    functions, loads = {}, []

    class RawModule:
        def __init__(self, code, options, backend):
            assert "KERNEL" in code and options == ("-std=c++17", "-DPART=0") and backend == "nvrtc"

        def get_function(self, name):
            loads.append(name)
            return SimpleNamespace(kernel=SimpleNamespace(ptr=functions.setdefault(name, 100 + len(functions))))

    real = library.Library(device, driver=Driver)
    monkeypatch.setattr(device, "cupy", SimpleNamespace(RawModule=RawModule))
    a, c = device.empty((70, 6), "f4"), device.empty((70, 6), "f2")
    stream = device.stream("mine")
    steps = real.elementwise("copy", [a[:, :5]], [c[:, :5]], ["float32"], ["float16"])
    before = [*loads]
    for step in steps:
        step(stream)
    assert [*functions] == ["cast_f16_f32"] and loads == before, "a launch loads nothing"
    assert calls == [(100, (2, 1, 1, 256, 1, 1, 0), stream.ptr, 0, 350, c.ptr, a.ptr)]


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


# ------------------------------------------------------------------------------------------- the caller's streams


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


# ---------------------------------------------------------------------------------------------------- foreign tensors


class Producer:
    """A tensor of a library that exports DLPack. It notes the stream and the thread of each export."""

    def __init__(self, array, dtype="float32", versioned=True, device=(2, 0)):
        self.lent, self.versioned, self.device, self.exports = LentOnDevice(array, dtype), versioned, device, []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **keywords):
        if not self.versioned and "max_version" in keywords:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.exports.append((keywords["stream"], threading.get_ident()))
        return self.lent.__dlpack__(stream=-1, max_version=keywords.get("max_version"))


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_tensors_by_dlpack(device, versioned, dtype):
    array = device.array(np.arange(12, dtype=dlpack.STORAGE[dtype]).reshape(3, 4))
    x = Producer(array, dtype, versioned)
    tensor = borrow(x)
    assert x.exports == [(device._arrivals.ptr, threading.get_ident())]
    assert (tensor.dtype, tensor.array.ptr, tensor.array.shape) == (dtype, array.ptr, (3, 4))
    assert tensor.device is device and device.entry() is not None
    np.testing.assert_array_equal(tensor.array.get(), array.get())
    result = lend(tensor.array, dtype, tensor)
    assert isinstance(result, LentOnDevice) and result.__dlpack_device__() == (2, 0)
    again = borrow(result)
    assert (again.dtype, again.array.ptr) == (dtype, array.ptr)
    kept = array.memory
    ptr = array.ptr
    del array, x, tensor, result
    gc.collect()
    assert again.array.get().size == 12 and kept.ptr == ptr
    count = sys.getrefcount(kept)
    del again
    gc.collect()
    assert sys.getrefcount(kept) < count, "the capsule's deleter has run"


def test_a_consumer_waits_for_what_fompi_has_enqueued(device):
    lent, backend = LentOnDevice(device.array(random(3)), "float32"), cuda.backend_of(device)
    runtime, queues = device.runtime, [*backend.queues.values()]

    def waits(**keywords):
        before = len(runtime.calls("streamWaitEvent"))
        lent.__dlpack__(**keywords)
        return [ptr for ptr, _ in runtime.calls("streamWaitEvent")[before:]]

    assert waits(stream=5) == []  # all is done
    runtime.busy.update({queues[0].stream.ptr, queues[2].stream.ptr})
    assert waits(stream=5) == [5, 5] and waits(stream=None) == [1, 1] and waits(stream=2) == [2, 2]
    assert waits() == [1, 1] and waits(stream=-1) == []
    with pytest.raises(BufferError, match="stream=0"):
        lent.__dlpack__(stream=0)
    with pytest.raises(BufferError, match="only as it is"):
        lent.__dlpack__(dl_device=(1, 0))
    runtime.busy.clear()
    del backend, queues


def test_arrays_of_cupy(device, fakecuda):
    for dtype in ("float32", "int8", "complex64", ml_dtypes.bfloat16):
        x = random(4, 6, dtype=dtype)
        given = fakecuda.as_cupy(device, x)
        tensor = borrow(given[:, ::2])
        assert tensor.framework == "cupy" and tensor.device is device and tensor.dtype == np.dtype(dtype).name
        assert tensor.array.ptr == given.data.ptr and tensor.array.strides == (6 * x.itemsize, 2 * x.itemsize)
        result = lend(tensor.array[1:], tensor.dtype, tensor)
        assert type(result) is type(given) and result.dtype == x.dtype
        assert result.data.ptr == given[1:].data.ptr and result.strides == given[:, ::2].strides
        del given, tensor
        gc.collect()
        device.runtime.span(result.data.ptr, 1)  # kept alive
        del result


class Interface:
    """An object with `__cuda_array_interface__` alone, as the arrays of Numba."""

    def __init__(self, array, **changes):
        self.array, self.changes = array, changes

    @property
    def __cuda_array_interface__(self):
        return {**self.array.interface, "version": 3, **self.changes}


def test_arrays_by_the_cuda_array_interface(device):
    array = device.array(random(4, 6))
    tensor = borrow(Interface(array[1:], stream=None))
    assert tensor.array.ptr == array[1:].ptr and tensor.device is device
    np.testing.assert_array_equal(tensor.array.get(), array[1:].get())
    before = len(device.runtime.calls("eventRecord"))
    borrow(Interface(array, stream=2))
    assert [stream for _, stream in device.runtime.calls("eventRecord")[before:]] == [2]
    assert device.entry() is not None
    with pytest.raises(fompi.TensorError, match="stream 0"):
        borrow(Interface(array, stream=0))
    with pytest.raises(fompi.TensorError, match="mask"):
        borrow(Interface(array, mask=array))
    with pytest.raises(fompi.DtypeError):
        borrow(Interface(array, typestr="<V4"))
    result = lend(tensor.array, "float32", tensor)
    assert result.__cuda_array_interface__["data"][0] == array[1:].ptr


def test_tensors_of_torch_jax_and_numba(device, monkeypatch):
    """Stand-ins with the names of the classes. The real libraries here have no CUDA."""

    assert import_module("torch"), "a tensor of torch is there only if torch is loaded"
    array = device.array(random(4, 6))
    consumed = []

    def from_dlpack(lent):
        assert lent.__dlpack_device__() == (2, 0)
        consumed.append(lent.__dlpack__(stream=5, max_version=(1, 0)))
        return "tensor"

    modules = {
        "torch": SimpleNamespace(from_dlpack=from_dlpack),
        "jax.dlpack": SimpleNamespace(from_dlpack=from_dlpack),
        "numba.cuda": SimpleNamespace(as_cuda_array=lambda x: x.__cuda_array_interface__),
    }
    monkeypatch.setattr(dlpack, "_module", modules.__getitem__)
    options = {"dtype": "torch.float32", "requires_grad": False, "is_cuda": True, "is_deleted": lambda self: False}
    for module, name in (("torch", "Tensor"), ("jaxlib._jax", "ArrayImpl")):
        kind = type(name, (Producer,), {"__module__": module, **options})
        x = kind(array)
        if module != "torch":
            x.dtype = np.dtype("float32")
        tensor = borrow(x)
        assert tensor.framework in module
        assert dlpack.device_of(x) is device and tensor.owner is x
        assert x.exports == [(device._arrivals.ptr, threading.get_ident())]
        assert lend(tensor.array, "float32", tensor) == "tensor"
    numba = type("DeviceNDArray", (Interface,), {"__module__": "numba.cuda.cudadrv.devicearray"})
    tensor = borrow(numba(array, stream=None))
    assert tensor.framework == "numba" and dlpack.device_of(numba(array)) is device
    assert lend(tensor.array, "float32", tensor)["data"][0] == array.ptr
    assert len(consumed) == 2
    consumed.clear()
    del x


def test_a_tensor_of_another_gpu_is_refused(device, fakecuda):
    other = fakecuda.device(number=1, devices=2)
    x = fakecuda.as_cupy(other, random(3))
    with pytest.raises(fompi.TensorError, match="x is on cuda:1, but this rank uses cuda:0: make that one the current"):
        fompi.all_gather(x)
    with pytest.raises(fompi.TensorError, match="cuda:1"):
        borrow(Producer(device.array(random(3)), device=(2, 1)))
    device.runtime._setDevice(1)
    far = DeviceArray.of(SimpleNamespace(ptr=device.runtime.malloc(12), device=device), (3,), "f4")
    device.runtime._setDevice(0)
    with pytest.raises(fompi.TensorError, match="cuda:1"):
        borrow(Interface(far))
    device.runtime.free(far.ptr)
    with pytest.raises(fompi.TensorError, match="on rocm:0, but fompi works on host memory and CUDA"):
        borrow(Producer(device.array(random(3)), device=(10, 0)))


# -------------------------------------------------------------------------------------------------------- operations


def test_operations_give_the_kind_that_they_take(device, fakecuda):
    x, w = random(4, 6), random(6, 5)
    y = fompi.all_gather_matmul(fakecuda.as_cupy(device, x), fakecuda.as_cupy(device, w))
    np.testing.assert_array_equal(fakecuda.of_cupy(y), x @ w)
    out = fakecuda.as_cupy(device, np.zeros((4, 6), "f4"))
    assert fompi.all_reduce(fakecuda.as_cupy(device, x), out=out) is out
    np.testing.assert_array_equal(fakecuda.of_cupy(out), x)
    lent = fompi.all_gather(Producer(device.array(x)))
    np.testing.assert_array_equal(borrow(lent).array.get(), x)
    with pytest.raises(fompi.TensorError, match="on the CUDA device, but another operand is on the host"):
        fompi.all_gather_matmul(fakecuda.as_cupy(device, x), w)


def test_bound_plans_take_foreign_arrays(device, fakecuda):
    plan = fompi.plan(
        fompi.all_gather_matmul, fompi.Spec((4, 6), "float32", fompi.Shard(0)),
        fompi.Spec((6, 5), "float32", fompi.Shard(1)), ranks=1
    )  # fmt: skip
    x, w = random(4, 6), random(6, 5)
    given = fakecuda.as_cupy(device, x)
    with fompi.bind(plan, x=given, w=fakecuda.as_cupy(device, w)) as step:
        before = len(device.runtime.calls("malloc")), len(device.runtime.calls("eventCreateWithFlags"))
        for _ in range(3):
            y = step()
            np.testing.assert_array_equal(fakecuda.of_cupy(y), x @ w)
            x += 1
            fakecuda.view(borrow(given).array)[...] += 1
        assert len(device.runtime.calls("malloc")) == before[0], "a step allocates nothing"
        assert len(device.runtime.calls("eventCreateWithFlags")) <= before[1] + 1


# ------------------------------------------------------------------------------------------------------------- faults


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
    device.fault = None


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


def test_without_a_gpu_the_public_name_says_so(device):
    with pytest.raises(fompi.LaunchError, match="no CUDA driver on this host"):
        fompi.Device("cuda")
    with pytest.raises(fompi.DeviceError, match="'cuda:NUMBER'"):
        fompi.Device("cuda:x")
    array = device.array(random(3))
    dlpack.DEVICES["cuda"] = lambda: fompi.Device("cuda")
    with pytest.raises(fompi.TensorError, match="x is on cuda:0, but there is no CUDA driver on this host"):
        fompi.all_gather(Producer(array))


def test_cublas_that_is_missing(device):
    lib = library.Library(device)
    with pytest.raises(fompi.DeviceError, match=r"cuBLAS is missing: .*\[ctk\]"):
        _ = lib.handle


SIGNATURES = """
from cupy_backends.cuda.libs import cublas

print(cublas.gemmEx.__doc__, cublas.create.__doc__, cublas.destroy.__doc__, cublas.setMathMode.__doc__, sep="\\n")
print(cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_COMPUTE_32F_FAST_TF32, cublas.CUBLAS_COMPUTE_64F)
print(cublas.CUBLAS_GEMM_DEFAULT, cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_T)
"""


def test_the_fake_cublas_has_the_signatures_of_cupy(fakecuda, tmp_path):
    """CuPy's module of cuBLAS loads with a library that has all its symbols and does nothing."""
    (module,) = Path(find_spec("cupy_backends").origin).parent.glob("cuda/libs/cublas*.so")
    listed = subprocess.run(["nm", "-D", "--undefined-only", module], capture_output=True, text=True, check=True).stdout
    symbols = {name: version for name, version in re.findall(r"U (cublas\w+)@(\S+)", listed)}
    for stub in {*symbols.values()} | {name.replace("cublas", "cublasLt") for name in symbols.values()}:
        code = "".join(f"int {name}(void) {{ return 0; }}" for name, version in symbols.items() if version == stub)
        (tmp_path / "stub.c").write_text(code + "int unused;")
        (tmp_path / "stub.map").write_text(f"{stub} {{ global: *; }};")
        flags = ["-shared", "-fPIC", f"-Wl,-soname,{stub}", "-Wl,--version-script=stub.map", "-o", stub]
        subprocess.run(["gcc", *flags, "stub.c"], cwd=tmp_path, check=True)
    done = subprocess.run(
        [sys.executable, "-c", SIGNATURES], env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        f"gemmEx({fakecuda.GEMM})", "create() -> intptr_t", "destroy(intptr_t handle)",
        "setMathMode(intptr_t handle, int mode)", "68 77 70", "-1 0 1"
    ], done.stderr  # fmt: skip


def test_a_process_has_one_device_for_a_gpu(fakecuda, monkeypatch):
    from fompi.backends.cuda import cupy as module

    made = {}

    def create(number, known_to_mpi=False, **options):
        return made.setdefault(number, fakecuda.device(number, devices=4, **options))

    monkeypatch.setattr(module, "CudaDevice", create)
    monkeypatch.setattr(module, "visible_devices", lambda: 4)
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
    assert library.Library(device, None).current() == [5, 6] and asked == [device.number] * 2


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


def test_messages_in_parts_lend_nothing(device):
    """A part is given to MPI as the whole is: its memory does not count as lent, and no stream waits."""
    x = device.array(np.arange(8, dtype="u1"))
    part = device.memory(x)[2:6]
    interface = part.__cuda_array_interface__
    assert (part.ptr, part.nbytes, interface["stream"], x.memory.is_lent) == (x.ptr + 2, 4, None, False)


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


def test_the_current_stream_of_cupy_is_ours_during_a_product(device, monkeypatch):
    """CuPy sends each call of cuBLAS to its current stream of the thread."""
    order = []

    class Stream:
        @staticmethod
        def from_external(stream):
            order.append(stream.__cuda_stream__())
            return nullcontext()

    monkeypatch.setattr(device, "cupy", SimpleNamespace(cuda=SimpleNamespace(Stream=Stream)))
    real = library.Library(device, device.library._cublas)
    a, c = matrix(device.array(random(3, 3))), matrix(device.empty((3, 3), "f4"))
    stream = device.stream("mine")
    enqueue = real.gemm(a, a, c, "float32", "float32", False)
    order.clear()  # the small product that loads the kernel
    enqueue(stream)
    enqueue(stream)
    assert order == [(0, stream.ptr)], "made once for a stream"
    real.close()
