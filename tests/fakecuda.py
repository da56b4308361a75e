"""CUDA on host memory: a runtime, a cuBLAS and a driver that check every call, for tests of the CUDA device.

Every call is compared with the signature that CuPy documents. Kernels run at once. Addresses must lie in memory that
was allocated and is not freed, of the right kind. `runtime.fails("malloc", 3, 2)` makes a later call fail.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import mmap
import os
import re
import threading
from bisect import bisect_right, insort
from contextlib import nullcontext
from functools import partial
from itertools import count
from math import prod
from types import SimpleNamespace
from typing import NamedTuple

import cupy
import numpy as np

from fompi.backends import chains
from fompi.backends.cuda.computing import Computing
from fompi.backends.cuda.counters.announced import GROUP_NUMBERS, GROUP_POINTERS, KernelForm
from fompi.backends.cuda.counters.signal import WORDS
from fompi.backends.cuda.cupy import CudaDevice
from fompi.backends.cuda.library import DeviceLibraries
from fompi.backends.half import narrow, storage, widen
from fompi.backends.numpy import Numpy

REAL = cupy.cuda.runtime
INTEGERS = ("intptr_t", "size_t", "int", "unsigned", "MemoryKind")
DEVICE, HOST = "device", "page-locked"


class Error(REAL.CUDARuntimeError):
    """The error that the runtime of CuPy raises. Its class name is the same."""


Error.__name__ = "CUDARuntimeError"


class Runtime:
    """`cupy.cuda.runtime` without a GPU."""

    CUDARuntimeError = Error

    def __init__(self, devices=1, total=1 << 33):
        self.devices, self.total = devices, total
        self.log, self.memory, self.addresses, self.failures = [], {}, [], {}
        self.numbers, self.thread = count(0x1000), threading.local()
        self.busy = set()  # streams that still have to do something
        self.files, self.opened, self.lives, self.sticky = {}, {}, {"event": set(), "stream": set()}, 0

    def fails(self, name, number, status):
        """The `number`-th call of `name` from now on fails with this status of CUDA."""
        self.failures[name] = [number, status]

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        real = getattr(REAL, name)  # AttributeError: CuPy has no such function
        work = getattr(type(self), "_" + name).__get__(self)
        signature = re.match(rf"{name}\((.*?)\)", real.__doc__)
        parameters = [p for p in signature.group(1).split(", ") if p]
        least = sum("=" not in p for p in parameters)
        is_query = name.endswith("Query")

        def call(*arguments):
            assert least <= len(arguments) <= len(parameters), f"{name}{arguments}: CuPy has {real.__doc__}"
            for parameter, value in zip(parameters, arguments, strict=False):
                kind = parameter.split()[0]
                if kind in INTEGERS:
                    assert type(value) is int, f"{name}: {parameter} is {value!r}"
                if kind == "bytes":
                    assert type(value) is bytes, f"{name}: {parameter} is {value!r}"
            self.log.append((name, *arguments))
            status = self.sticky or self._failure(name)
            if status and name not in ("getDevice", "CUDARuntimeError"):
                if is_query:
                    return status
                raise Error(status)
            return work(*arguments)

        call.__name__ = name
        self.__dict__[name] = call
        return call

    def _failure(self, name):
        failure = self.failures.get(name)
        if failure is None:
            return 0
        failure[0] -= 1
        if failure[0]:
            return 0
        del self.failures[name]
        return failure[1]

    def calls(self, name, begun=0):
        """The arguments of each call of a function, from entry number `begun` of the log on."""
        return [arguments for called, *arguments in self.log[begun:] if called == name]

    # -- devices
    def _getDeviceCount(self):
        return self.devices

    def _getDevice(self):
        return getattr(self.thread, "device", 0)

    def _setDevice(self, device):
        if not 0 <= device < self.devices:
            raise Error(101)
        self.thread.device = device

    def _deviceSynchronize(self):
        self.busy.clear()

    def _deviceGetAttribute(self, attribute, device):
        return {16: 4, 75: 9, 76: 0, 97: 232448}[attribute]

    def _getDeviceProperties(self, device):
        return {"name": b"a fake GPU"}

    def _runtimeGetVersion(self):
        return 13000

    def _driverGetVersion(self):
        return 13000

    # -- memory
    @property
    def used(self):
        blocks = [*self.memory.items()]  # the helper thread may allocate now
        return sum(n for ptr, (_, n, kind, _) in blocks if kind == DEVICE and ptr not in self.opened)

    def _allocate(self, nbytes, kind):
        """A file in memory, so that another process can open it."""
        if kind == DEVICE and self.used + nbytes > self.total:
            raise Error(2)
        file = os.memfd_create("fakecuda")
        os.ftruncate(file, nbytes)
        return self._map(file, nbytes, kind, fill=True)

    def _map(self, file, nbytes, kind, fill=False):
        block = (ctypes.c_uint8 * nbytes).from_buffer(mmap.mmap(file, nbytes))
        ptr = ctypes.addressof(block)
        if fill:
            ctypes.memset(ptr, 0xFF, nbytes)  # NaN
        self.memory[ptr] = block, nbytes, kind, self._getDevice()
        self.files[ptr] = file
        insort(self.addresses, ptr)
        return ptr

    def _forget(self, ptr, kind):
        assert self.memory[ptr][2] == kind
        self.addresses.remove(ptr)
        os.close(self.files.pop(ptr))
        del self.memory[ptr]  # last: from now on another thread may get the address

    def _base(self, ptr):
        """The address of the allocation in which `ptr` may be."""
        addresses = [*self.addresses]  # other threads change them
        at = bisect_right(addresses, ptr) - 1
        assert at >= 0, f"{ptr:#x} is no memory of CUDA"
        return addresses[at]

    def span(self, ptr, nbytes):
        """The kind of memory from `ptr` on. AssertionError if this many bytes were not allocated there."""
        base = self._base(ptr)
        _, size, kind, _ = self.memory[base]
        assert base <= ptr and ptr + nbytes <= base + size, f"{nbytes} bytes at {ptr:#x} leave an allocation of {size}"
        return kind

    def _malloc(self, size):
        return self._allocate(size, DEVICE)

    def _free(self, ptr):
        self.thread.has_context = True
        if ptr:
            self._forget(ptr, DEVICE)

    def _hostAlloc(self, size, flags):
        return self._allocate(size, HOST)

    def _freeHost(self, ptr):
        self._forget(ptr, HOST)

    def _memGetInfo(self):
        return self.total - self.used, self.total

    def _memcpyAsync(self, to, source, nbytes, kind, stream):
        kinds = {1: (DEVICE, HOST), 2: (HOST, DEVICE), 3: (DEVICE, DEVICE)}[kind]
        assert (self.span(to, nbytes), self.span(source, nbytes)) == kinds
        assert stream == 0 or stream in self.lives["stream"]
        ctypes.memmove(to, source, nbytes)

    def _memsetAsync(self, ptr, value, nbytes, stream):
        assert self.span(ptr, nbytes) == DEVICE and stream in self.lives["stream"]
        ctypes.memset(ptr, value, nbytes)

    def _pointerGetAttributes(self, ptr):
        self.span(ptr, 1)
        return REAL.PointerAttributes(self.memory[self._base(ptr)][3], ptr, 0, 2)

    def _ipcGetMemHandle(self, ptr):
        numbers = (os.getpid(), self.files[ptr], self.memory[ptr][1])
        return b"".join(n.to_bytes(8, "little") for n in numbers).ljust(64, b"\x20")  # a real one may end in spaces

    def _ipcOpenMemHandle(self, handle, flags=1):
        assert handle not in self.opened.values(), "CUDA opens a handle once in a process"
        process, file, nbytes = (int.from_bytes(handle[at : at + 8], "little") for at in (0, 8, 16))
        ptr = self._map(os.open(f"/proc/{process}/fd/{file}", os.O_RDWR), nbytes, DEVICE)
        self.opened[ptr] = handle
        return ptr

    def _ipcCloseMemHandle(self, ptr):
        del self.opened[ptr]
        self._forget(ptr, DEVICE)

    # -- streams and events
    def _made(self, kind):
        number = next(self.numbers)
        self.lives[kind].add(number)
        return number

    def _eventCreateWithFlags(self, flags):
        assert flags == 2
        return self._made("event")

    def _eventDestroy(self, event):
        self.lives["event"].remove(event)

    def _eventRecord(self, event, stream):
        assert event in self.lives["event"] and (stream < 3 or stream in self.lives["stream"])

    def _eventQuery(self, event):
        return 0

    def _streamCreateWithPriority(self, flags, priority):
        assert flags == 1 and priority in (0, -1)
        return self._made("stream")

    def _streamDestroy(self, stream):
        self.lives["stream"].remove(stream)

    def _streamQuery(self, stream):
        return 600 if stream in self.busy else 0

    def _streamWaitEvent(self, stream, event, flags=0):
        assert event in self.lives["event"]


GEMM = (
    "intptr_t handle, int transa, int transb, int m, int n, int k, size_t alpha, size_t A, int Atype, int lda, "
    "size_t B, int Btype, int ldb, size_t beta, size_t C, int Ctype, int ldc, int computeType, int algo"
)
"""The parameters of gemmEx in CuPy. Its module of cuBLAS cannot be imported without a library: see the tests."""

DTYPES = {0: "float32", 1: "float64", 2: "float16", 4: "complex64", 5: "complex128", 14: "bfloat16"}


DTYPES_OF = {name: code for code, name in DTYPES.items()}


class Cublas:
    """cuBLAS on host memory, with the operands in the order in which NumPy would have them."""

    def __init__(self, runtime):
        self.runtime, self.calls, self.handles, self.fault = runtime, [], set(), None

    def create(self):
        self.handles.add(7)
        return 7

    def destroy(self, handle):
        self.handles.remove(handle)

    def setMathMode(self, handle, mode):
        assert handle in self.handles and mode == 16

    def gemmEx(self, *arguments):
        assert len(arguments) == len(GEMM.split(", ")) and all(type(value) is int for value in arguments)
        assert self.runtime.thread.has_context, "the thread has no context of CUDA"
        self.calls.append(arguments)
        handle, ta, tb, m, n, k, alpha, a, of_a, lda, b, of_b, ldb, beta, c, of_c, ldc, compute, algo = arguments
        assert handle in self.handles and algo == -1 and min(m, n) > 0 and k >= 0
        assert compute in ((70,) if of_a in (1, 5) else (68, 77))
        assert lda >= max(1, k if ta else m) and ldb >= max(1, n if tb else k) and ldc >= m
        scale = {1: "f8", 4: "c8", 5: "c16"}.get(of_a, "f4")
        one, factor = (np.ndarray(1, scale, (ctypes.c_uint8 * 16).from_address(p))[0] for p in (alpha, beta))
        assert one == 1 and factor in (0, 1)
        right, left = self._view(a, of_a, k, m, lda, ta), self._view(b, of_b, n, k, ldb, tb)
        with np.errstate(all="ignore"):
            product = np.matmul(widen(left, DTYPES[of_b]), widen(right, DTYPES[of_a]))
        target = self._view(c, of_c, n, m, ldc, 0)
        if factor:
            product = widen(target, DTYPES[of_c]) + product
        target[...] = narrow(product, DTYPES[of_c])

    def _view(self, ptr, code, rows, columns, stride, is_transposed):
        if is_transposed:
            return self._view(ptr, code, columns, rows, stride, 0).T
        dtype = storage(DTYPES[code])
        if not rows * columns:
            return np.zeros((rows, columns), dtype)
        nbytes = ((rows - 1) * stride + columns) * dtype.itemsize
        assert self.runtime.span(ptr, nbytes) == DEVICE
        memory = (ctypes.c_uint8 * nbytes).from_address(ptr)
        return np.ndarray((rows, columns), dtype, memory, strides=(stride * dtype.itemsize, dtype.itemsize))


class Code(NamedTuple):
    """What Triton would have compiled."""

    code: bytes
    function: str
    shared: int
    scratch: int


class Driver:
    """The driver of CUDA for kernels that announce their products. Each launch computes them at once, and raises flags.

    `leaves_out` is a product whose flag is never raised. `fails` is a status of CUDA: the next launch only sets it.
    """

    def __init__(self, runtime):
        self.runtime, self.forms, self.loaded, self.allowed, self.launches = runtime, [], set(), {}, []
        self.leaves_out, self.fails = -1, 0

    def __getattribute__(self, name):
        found = object.__getattribute__(self, name)
        real = getattr(cupy.cuda.driver, name, None)
        if real is None:
            return found
        parameters = re.match(rf"{name}\((.*?)\)", real.__doc__).group(1).split(", ")
        kinds = {"bytes": bytes, "str": str}

        def call(*arguments):
            assert len(arguments) == len(parameters), f"{name}{arguments}: CuPy has {real.__doc__}"
            for parameter, value in zip(parameters, arguments, strict=True):
                wanted = kinds.get(parameter.split()[0], int)
                assert type(value) is wanted, f"{name}: {parameter} is {value!r}"
            assert self.runtime.thread.has_context, "the thread has no context of CUDA"
            return found(*arguments)

        return call

    def moduleLoadData(self, image):
        self.forms.append(KernelForm(*json.loads(image)))
        self.loaded.add(len(self.forms))
        return len(self.forms)

    def moduleUnload(self, module):
        self.loaded.remove(module)

    def moduleGetFunction(self, module, name):
        assert name == "multiply_groups"
        return 100 + module

    def funcSetAttribute(self, function, attribute, value):
        assert attribute == 8
        self.allowed[function] = value

    def launchKernel(self, function, *rest):
        *grid, a, b, c, shared, stream, at, extra = rest
        assert grid[1:] == [1, 1] and [a, b, c] == [256, 1, 1] and shared == self.allowed[function] and extra == 0
        assert stream in self.runtime.lives["stream"]
        form = self.forms[function - 101]
        names = (*GROUP_POINTERS, *GROUP_NUMBERS, "scratch", "scratch")
        addresses = np.ndarray(len(names), np.uint64, (ctypes.c_uint8 * (8 * len(names))).from_address(at))
        values = [
            int(
                (ctypes.c_uint64 if name in (*GROUP_POINTERS, "scratch") else ctypes.c_int32).from_address(int(p)).value
            )
            for name, p in zip(names, addresses, strict=True)
        ]
        assert values[-2:] == [0, 0]
        if self.fails:
            self.runtime.sticky, self.fails = self.fails, 0
            return
        tiles, w, need, count, flag, epoch, columns, depth, x_row, w_row, y_row = values[:-2]
        high, broad, _ = form.tile
        table = self._array(tiles, (grid[0], len(WORDS)), np.int64)
        groups = int(table[:, 5].max()) + 1
        need, count = (self._array(p, (groups,), np.int32) for p in (need, count))
        flags = self._array(flag, (groups,), np.int32, HOST)
        self.launches.append((epoch, groups))
        shape = (columns, depth) if form.transposed else (depth, columns)
        weight = self._matrix(w, *shape, w_row, form.w)
        weight = widen(weight.T if form.transposed else weight, form.w)
        for x, y, bias, rows, n, group in table.tolist():
            assert 0 < rows <= high and n * broad < columns
            at = slice(n * broad, min(columns, (n + 1) * broad))
            product = widen(self._matrix(x, rows, depth, x_row, form.x), form.x) @ weight[:, at]
            if bias:
                product += widen(self._matrix(bias, 1, columns, columns, form.bias), form.bias)[:, at]
            self._matrix(y, rows, columns, y_row, form.y)[:, at] = narrow(product, form.y)
            count[group] += 1
            if count[group] == need[group]:
                count[group] = 0
                if group != self.leaves_out:
                    flags[group] = epoch

    def _array(self, ptr, shape, dtype, kind=DEVICE):
        nbytes = prod(shape) * np.dtype(dtype).itemsize
        assert self.runtime.span(ptr, nbytes) == kind
        return np.ndarray(shape, dtype, (ctypes.c_uint8 * nbytes).from_address(ptr))

    def _matrix(self, ptr, rows, columns, stride, dtype):
        kind = storage(dtype)
        flat = self._array(ptr, ((rows - 1) * stride + columns,), kind)
        return np.ndarray((rows, columns), kind, flat, strides=(stride * kind.itemsize, kind.itemsize))


class _At:
    def __init__(self, interface):
        self.__array_interface__ = interface


def view(array):
    """A DeviceArray as one of NumPy: its memory is that of the host."""
    return np.asarray(_At(array.interface))


class FakeLibrary(DeviceLibraries):
    """Elementwise kernels by NumPy, at the time of the launch. Products by `Cublas`, announced ones by `Driver`."""

    has_triton = True

    def __init__(self, device):
        super().__init__(device, Cublas(device.runtime), Driver(device.runtime))
        self.streams, self.used = [0], []

    def current(self):
        return self.streams

    def using(self, stream):
        self.used.append(stream.ptr)
        return nullcontext()

    def _compiled(self, form, capability, stages):
        assert (capability, stages) == (90, 4)
        return Code(json.dumps(form).encode(), "multiply_groups", 98304, 2)

    def elementwise(self, name, reads, writes, read_dtypes, write_dtypes):
        runtime = self.device.runtime
        for array in (*reads, *writes):
            low, high = array.extent
            assert not array.size or runtime.span(array.memory.ptr + low, high - low) == DEVICE
        work = Numpy().bind(name, [*map(view, reads)], [*map(view, writes)], read_dtypes, write_dtypes)

        def launch(stream):
            assert runtime.thread.has_context, "the thread has no context of CUDA"
            work()

        return [launch]

    def chain(self, x, w, y, dtype, leaves, bias, adds):
        def view(matrix):
            ptr, *shape = matrix
            return self._cublas._view(ptr, DTYPES_OF[dtype], *shape)

        def launch(stream):
            assert self.device.runtime.thread.has_context, "the thread has no context of CUDA"
            begin = None
            if bias:
                begin = self._cublas._view(bias, DTYPES_OF[dtype], 1, y.columns, y.columns, False)[0]
            chains.product(view(x), view(w), view(y), leaves, begin, adds)

        return launch


def device(number=0, **options):
    """A CudaDevice on a new fake runtime, with the real `cupy.ndarray`."""
    runtime = Runtime(**{k: options.pop(k) for k in [*options] if k in inspect.signature(Runtime).parameters})
    made = CudaDevice(number, runtime, None, FakeLibrary, **options)
    made.cupy = SimpleNamespace(ndarray=partial(FakeArray.on, runtime), cuda=cupy.cuda)
    return made


class FakeArray(Computing, cupy.ndarray):
    """An array of CuPy with which NumPy's functions compute on the host. It takes what the real one would take."""

    __hash__ = object.__hash__

    @classmethod
    def on(cls, runtime, shape, dtype, pointer, strides=None):
        made = cls(shape, dtype, pointer, strides)
        assert runtime.span(made.data.ptr, 0 if not made.size else 1) == DEVICE
        made.runtime = runtime
        return made

    @property
    def _at(self):
        return view_of_cupy(self)

    def _on(self, at):
        memory = self.data.mem
        offset = at.__array_interface__["data"][0] - memory.ptr
        return FakeArray.on(self.runtime, at.shape, at.dtype, cupy.cuda.MemoryPointer(memory, offset), at.strides)

    def _new(self, shape, dtype):
        runtime, dtype = self.runtime, np.dtype(dtype)
        nbytes = max(prod(shape) * dtype.itemsize, 1)
        ptr = runtime._allocate(nbytes, DEVICE)  # CuPy has memory of its own
        memory = cupy.cuda.UnownedMemory(ptr, nbytes, Pooled(runtime, ptr), 0)
        return FakeArray.on(runtime, shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    def _run(self, name, work, reads, writes):
        for array in (*reads, *writes):
            assert not array.size or self.runtime.span(array.data.ptr, 1) == DEVICE
        self.runtime.log.append(("numpy", name))
        work([array._at for array in reads], [array._at for array in writes])

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        assert isinstance(getattr(cupy, ufunc.__name__, None), (cupy.ufunc, type(cupy.matmul))), f"CuPy has no {ufunc}"
        assert method in ("__call__", "at") and {*options} <= {"out", "dtype", "casting"}, (ufunc, method, options)
        return super().__array_ufunc__(ufunc, method, *inputs, **options)

    def __array_function__(self, function, types, args, options):
        inspect.signature(getattr(cupy, function.__name__)).bind(*args, **options)  # TypeError: CuPy takes others
        return super().__array_function__(function, types, args, options)

    def _evaluate(self, name, function, args, options):
        if getattr(function, "__objclass__", None) is np.ndarray:  # a method
            method = getattr(cupy.ndarray, function.__name__)
            if takes := re.search(rf"{function.__name__}\((.*?)\)", method.__doc__ or ""):
                known = [parameter.split("=")[0].strip() for parameter in takes.group(1).split(",")]
                assert {*options} <= {*known}, f"CuPy's {name} takes {known}"
        return super()._evaluate(name, function, args, options)


class Pooled:
    """A block of CuPy's pool: no call of CUDA gives it back."""

    def __init__(self, runtime, ptr):
        self.runtime, self.ptr = runtime, ptr

    def __del__(self):
        self.runtime._forget(self.ptr, DEVICE)


def as_cupy(made, x):
    """A copy of `x` in memory that is not fompi's, as an array of CuPy."""
    runtime = made.runtime
    ptr = runtime.malloc(max(x.nbytes, 1))
    ctypes.memmove(ptr, np.ascontiguousarray(x).ctypes.data, x.nbytes)
    owner = cupy.cuda.UnownedMemory(ptr, x.nbytes, Owner(runtime, ptr), made.number)
    return FakeArray.on(runtime, x.shape, x.dtype, cupy.cuda.MemoryPointer(owner, 0))


class Owner:
    """Frees memory with the last array on it."""

    def __init__(self, runtime, ptr):
        self.runtime, self.ptr = runtime, ptr

    def __del__(self):
        self.runtime.free(self.ptr)


def of_cupy(x):
    """The elements of an array of CuPy, as an array of NumPy."""
    return view_of_cupy(x).copy()


def view_of_cupy(x):
    """An array of CuPy as one of NumPy, on the same memory."""
    is_named = x.dtype.kind in "biufc"  # NumPy has this dtype
    interface = {
        "version": 3,
        "data": (x.data.ptr, False),
        "typestr": x.dtype.str if is_named else f"<u{x.dtype.itemsize}",
        "shape": x.shape,
        "strides": x.strides,
    }
    array = np.asarray(_At(interface))
    return array if is_named else array.view(x.dtype)
