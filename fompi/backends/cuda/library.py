"""What needs more of CuPy than its runtime: cuBLAS, compiled kernels, and the current streams of the caller."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import numpy as np

from fompi.backends.base import Dtypes
from fompi.backends.cuda.counters.announced import MOST_STAGES, STAGE_NBYTES, WARPS, KernelForm
from fompi.backends.cuda.device import Array, Arrays, Enqueue
from fompi.backends.cuda.products import TYPES, Matrix
from fompi.backends.half import storage
from fompi.base.errors import DeviceError, in_words

COMPUTE_32F, COMPUTE_32F_TF32, COMPUTE_64F = 68, 77, 70
SCALES = {"float64": "f8", "complex64": "c8", "complex128": "c16"}
"""The types of the two factors of a product. All others have float32."""

NO_REDUCED_PRECISION = 16
"""CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: half types are summed up in float32 everywhere."""

MOST_COUNT = (1 << 31) - 1

CAPABILITY_MAJOR, CAPABILITY_MINOR, SHARED_NBYTES = 75, 76, 97
"""Attributes of a device: its compute capability, and the most shared memory of a block."""

MOST_DYNAMIC_SHARED = 8
"""The attribute of a function: how much shared memory it may use."""

LOADED_SIZE = 16
"""The rows and columns of the product with which cuBLAS loads its kernels."""


class DeviceLibraries:
    """The libraries of one device. Tests give another one, which computes on the host."""

    def __init__(self, device: Any, cublas: Any = None, driver: Any = None):
        self.device, self._cublas, self._driver = device, cublas, driver
        self._lock = threading.Lock()  # a handle of cuBLAS belongs to one thread at a time
        self._factors: dict[tuple[str, int], Array] = {}
        self._functions: dict[str, int] = {}
        self._announcers: dict[KernelForm, tuple[int, int, int]] = {}  # the function, its shared memory, its scratch
        self._modules: list[int] = []  # the code of these functions
        self._parts: dict[int, Any] = {}  # of `kernels.cu`
        self._handle = 0
        self._loaded: set[tuple[object, ...]] = set()  # the kinds of products that cuBLAS has loaded

    def current(self) -> list[int]:
        """The current streams of the calling thread, by address: that of CuPy, and that of torch if it uses CUDA."""
        number = self.device.number  # the program may have made another GPU the current one
        found = [self.device.cupy.cuda.get_current_stream(number).ptr]
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            found.append(torch.cuda.current_stream(number).cuda_stream)
        return found

    def using(self, stream: Any) -> Any:
        """A context in which `stream` is the current stream of CuPy on this thread."""
        if stream.of_cupy is None:
            cuda = self.device.cupy.cuda
            make = getattr(cuda.Stream, "from_external", None)  # since CuPy 14
            stream.of_cupy = cuda.ExternalStream(stream.ptr) if make is None else make(_StreamAddress(stream.ptr))
        return stream.of_cupy

    # -- products
    @property
    def handle(self) -> int:
        with self._lock:
            if not self._handle:
                self._handle = self._created()
            return self._handle

    def _created(self) -> int:
        if self._cublas is None:
            try:
                self._cublas = import_module("cupy_backends.cuda.libs.cublas")
            except Exception as error:
                raise DeviceError(
                    f"cuBLAS is missing: load the CUDA module of the site, or pip install '{wheel()}[ctk]' ({error})"
                ) from error
        self.device.use()
        handle = self.device.ask(self._cublas.create)
        self.device.ask(self._cublas.setMathMode, handle, NO_REDUCED_PRECISION)
        return int(handle)

    def gemm(self, a: Matrix, b: Matrix, c: Matrix, dtype: str, result: str, adds: bool) -> Enqueue:
        """c = a @ b, or c += a @ b if it `adds`. a and b have `dtype`, c has `result`."""
        if c.is_transposed:
            a, b, c = b.T, a.T, c.T
        for n in (c.rows, c.columns, a.columns, a.stride, b.stride, c.stride):
            if n > MOST_COUNT:
                raise DeviceError(f"cuBLAS takes sizes up to {MOST_COUNT}, not {n}: use more slices, or more ranks")
        one, factor = self._factor(dtype, 1), self._factor(dtype, int(adds))
        compute = COMPUTE_64F if dtype in ("float64", "complex128") else COMPUTE_32F
        if self.device.tf32 and dtype == "float32":
            compute = COMPUTE_32F_TF32
        # cuBLAS has columns where NumPy has rows: it computes c.T = b.T @ a.T.
        arguments = (
            self.handle, int(b.is_transposed), int(a.is_transposed), c.columns, c.rows, a.columns,
            one.ctypes.data, b.ptr, TYPES[dtype], b.stride, a.ptr, TYPES[dtype], a.stride,
            factor.ctypes.data, c.ptr, TYPES[result], c.stride, compute, -1,
        )  # fmt: skip
        multiply, lock, using = self._cublas.gemmEx, self._lock, self.using

        def enqueue(stream: Any) -> None:
            with lock, using(stream):  # each call of CuPy sends the handle to its current stream
                multiply(*arguments)

        self._load((dtype, result, a.is_transposed, b.is_transposed), dtype, result)
        return enqueue

    def _load(self, kind: tuple[object, ...], dtype: str, result: str) -> None:
        """Run a small product of this kind once: cuBLAS loads its kernels at their first launch.

        A load takes the lock of the context, and would stop the copies of other streams in the middle of a step.
        """
        if kind in self._loaded:
            return
        self._loaded.add(kind)  # first: the small product is made by `gemm`, too
        device, shape = self.device, (LOADED_SIZE, LOADED_SIZE)
        a, b = (Matrix(0, *shape, LOADED_SIZE, bool(is_transposed)) for is_transposed in kind[2:])
        operands = [device.empty(shape, storage(of)) for of in (dtype, dtype, result)]
        a, b = a._replace(ptr=operands[0].ptr), b._replace(ptr=operands[1].ptr)
        device.run_once(self.gemm(a, b, Matrix(operands[2].ptr, *shape, LOADED_SIZE, False), dtype, result, False))

    def _factor(self, dtype: str, value: int) -> Array:
        """0 or 1 in host memory, where cuBLAS reads it. It lives as long as the handle."""
        key = SCALES.get(dtype, "f4"), value
        return self._factors.setdefault(key, np.full(1, value, key[0]))

    # -- other kernels
    def _part(self, part: int) -> Any:
        """A part of `kernels.cu`. CuPy compiles it at its first use and keeps the code on disk."""
        if part not in self._parts:
            kernels = import_module("fompi.backends.cuda.kernels")
            options = ("-std=c++17", f"-DPART={part}")
            self._parts[part] = self.device.cupy.RawModule(code=kernels.source(), options=options, backend="nvrtc")
        return self._parts[part]

    def _function(self, name: str) -> int:
        known = self._functions.get(name)
        if known is not None:
            return known
        self.device.use()
        try:
            part = self._part(import_module("fompi.backends.cuda.kernels").part_of(name))
            return self._functions.setdefault(name, int(part.get_function(name).kernel.ptr))
        except Exception as error:
            raise DeviceError(
                f"the kernel {name!r} does not compile: {in_words(error)}. NVRTC comes with the CUDA module of the "
                f"site, or with pip install '{wheel()}[ctk]'"
            ) from error

    def elementwise(
        self, name: str, reads: Arrays, writes: Arrays, read_dtypes: Dtypes, write_dtypes: Dtypes
    ) -> list[Enqueue]:
        """The kernel `name` of `fompi.backends.cuda.kernels` on these arrays."""
        kernels = import_module("fompi.backends.cuda.kernels")
        return [self.launch(each) for each in kernels.launches(name, reads, writes, read_dtypes, write_dtypes)]

    def chain(self, x: Matrix, w: Matrix, y: Matrix, dtype: str, leaves: int, bias: int, adds: bool) -> Enqueue:
        """The product in a fixed order of `fompi.backends.cuda.kernels`."""
        kernels = import_module("fompi.backends.cuda.kernels")
        return self.launch(kernels.chain(x, w, y, dtype, leaves, bias, adds))

    @property
    def driver(self) -> Any:
        return self._driver if self._driver is not None else self.device.cupy.cuda.driver

    def launch(self, launch: Any) -> Enqueue:
        """A Launch of `fompi.backends.cuda.kernels`. Its arguments are laid out once."""
        return self._launch(self._function(launch.function), launch.grid, launch.block, launch.args)

    def _launch(
        self, function: int, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared: int = 0
    ) -> Enqueue:
        """An argument that is an array without dimensions may be changed between launches."""
        values = [*map(_argument, args)]
        addresses = np.array([value.ctypes.data for value in values], np.uint64)
        grid, block = ((*map(int, size), 1, 1)[:3] for size in (grid, block))
        call, shared, at = self.driver.launchKernel, int(shared), addresses.ctypes.data

        def enqueue(stream: Any, keep: Any = (values, addresses)) -> None:
            call(function, *grid, *block, shared, stream.ptr, at, 0)

        return enqueue

    # -- products that are announced
    @property
    def has_triton(self) -> bool:
        return find_spec("triton") is not None

    def announced(self, form: KernelForm, tiles: int, args: Sequence[Any]) -> Enqueue:
        """The kernel of `fompi.backends.cuda.counters` on this many tiles. It is compiled when it is needed first."""
        if form not in self._announcers:
            self._announcers[form] = self._announcer(form)
        function, shared, scratch = self._announcers[form]
        return self._launch(function, (tiles,), (32 * WARPS,), (*args, *[0] * scratch), shared)

    def _announcer(self, form: KernelForm) -> tuple[int, int, int]:
        major, minor, most = map(self.device.attribute, (CAPABILITY_MAJOR, CAPABILITY_MINOR, SHARED_NBYTES))
        made = self._compiled(form, 10 * major + minor, max(1, min(MOST_STAGES, most // STAGE_NBYTES)))
        self.device.use()
        self._modules.append(int(self.driver.moduleLoadData(made.code)))
        function = int(self.driver.moduleGetFunction(self._modules[-1], made.function))
        self.driver.funcSetAttribute(function, MOST_DYNAMIC_SHARED, made.shared)
        return function, made.shared, made.scratch

    def _compiled(self, form: KernelForm, capability: int, stages: int) -> Any:
        return import_module("fompi.backends.cuda.counters.triton").compiled_groups(form, capability, stages)

    def close(self) -> None:
        if self._handle:
            self._cublas.destroy(self._handle)
            self._handle = 0
        while self._modules:
            self.driver.moduleUnload(self._modules.pop())


class _StreamAddress:
    """A stream as CuPy's `Stream.from_external` takes it. It does not keep the Stream alive."""

    def __init__(self, ptr: int):
        self.ptr = ptr

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr


def _argument(value: Any) -> Array:
    """An argument of a kernel in memory, where CUDA reads it. An integer is a pointer."""
    if isinstance(value, np.ndarray):
        return value
    return np.array(value, np.uint64) if isinstance(value, int) else np.array(value)


def wheel() -> str:
    """The name of the wheel of CuPy that is installed."""
    for name in ("cupy-cuda13x", "cupy-cuda12x"):
        with suppress(Exception):
            metadata.version(name)
            return name
    return "cupy-cuda13x"
