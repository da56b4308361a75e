"""Tensors in and out without a copy: borrow a framework's tensor as a NumPy array, lend a NumPy array as a tensor.

    tensor ──borrow──▶ Tensor(array, dtype, ...)       the array is a view of the tensor's memory
    array ───lend────▶ tensor of the same framework    the tensor keeps the array and its arena block alive

Tensors of NumPy are read directly. NumPy reads the capsules of PyTorch. All others, JAX included, are read through
DLPack's capsules. NumPy has no bfloat16 and no 8-bit floats. An array here holds their bits in unsigned integers of the
same size, and the logical dtype is kept as a string with the array. A framework is imported only when a tensor of it
comes in or is requested.

A tensor on a GPU becomes a DeviceArray on the same memory. Its producer must order what it still writes before a stream
that fompi gives it; a consumer gives fompi its stream. `DEVICES` says which device has the memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from fompi.base.errors import DtypeError, FompiError, TensorError
from fompi.base.layout import CARRIERS
from fompi.tensors.capsules import (
    CODES,
    CUDA,
    DEVICE_NAMES,
    HOST,
    NAMES,
    READ_ONLY,
    Capsule,
    Export,
    export,
    lent,
    opened,
    rename,
)
from fompi.tensors.device_array import DeviceArray, Interface

# ── dtypes ──────────────────────────────────────────────────────────────────────────────────────────────────

STORAGE: dict[str, np.dtype] = {name: np.dtype(CARRIERS.get(name, name)) for name in CODES}
"""Logical dtype -> dtype of the array that holds it: uint16 for bfloat16, uint8 for float8, else the same dtype."""


@lru_cache(maxsize=256)
def _numpy_name(dtype: np.dtype) -> str | None:
    """The logical dtype of an array of NumPy, ml_dtypes or JAX. None if fompi does not support it."""
    known = dtype.isnative and dtype.name in STORAGE
    return dtype.name if known and dtype.itemsize == STORAGE[dtype.name].itemsize else None


@lru_cache(maxsize=256)
def _torch_name(dtype: Any) -> str | None:
    """The logical dtype of a torch tensor. None if fompi does not support it."""
    name = str(dtype).removeprefix("torch.")
    return name if name in STORAGE else None


DEVICES: dict[str, Callable[[], Any]] = {}
"""The device of this process by kind ("cuda"), for tensors of other libraries. `fompi.backends.cuda` fills it."""

# ── borrow ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, eq=False)
class Tensor:
    """A framework's tensor, borrowed as a NumPy array on the same memory."""

    array: Any  # has the shape and strides of the tensor, and the dtype STORAGE[dtype]; a DeviceArray on a device
    dtype: str  # the logical dtype: "float32", "bfloat16", ...
    framework: str  # "numpy", "torch", "jax", "cupy", "numba", "device" for a DeviceArray, or "dlpack" for any other
    readonly: bool
    owner: object  # the tensor itself
    host: np.ndarray | None = None  # the memory of the tensor, if `array` is a copy of it on a device
    at: int = 0  # where torch had its memory when it was borrowed; see `moved`

    @property
    def device(self) -> Any:
        """The device whose memory `array` has. None: the host."""
        return self.array.device if isinstance(self.array, DeviceArray) else None


def borrow(x: Any, name: str = "x") -> Tensor:
    """The memory of `x` as an array, never a copy. The result, and every view of its array, keep `x` alive.

    `x` is a tensor of NumPy, PyTorch, JAX, CuPy or Numba, or any object with `__dlpack__` or
    `__cuda_array_interface__`. On the host the array is one of NumPy, on a GPU a DeviceArray. Error messages call it
    `name`. Raises TensorError for objects without such memory, for torch tensors that require grad, for JAX tracers,
    and for memory of a GPU that is not the one of this process. Raises DtypeError for dtypes that fompi does not
    support.
    """
    family = _family(type(x))
    if family == "numpy":
        array = x if type(x) is np.ndarray else x.view(np.ndarray)
        dtype = _known(array.dtype, name)
        storage = STORAGE[dtype]
        if array.dtype is not storage:  # bits in unsigned integers, or `long long` of 64 bits
            array = array.view(storage)
        return Tensor(array, dtype, "numpy", not array.flags.writeable, x)
    if family == "torch":
        return _borrow_torch(x, name)
    if family == "device":
        dtype = _known(x.dtype, name)
        return Tensor(x if x.dtype == STORAGE[dtype] else x.view(STORAGE[dtype]), dtype, "device", False, x)
    if family == "cupy":
        return _borrow_cupy(x, name)
    if family == "tracer":
        raise TensorError(
            f"{name} is a JAX tracer: `fompi.<operation>` cannot run under jax.jit or inside jax.grad. "
            "Use fompi.jax.<operation>. The strategies of fompi.parallel work in jax.grad, outside of jit and vmap."
        )
    if not _exports(x):
        if hasattr(x, "__cuda_array_interface__"):
            return _borrow_cuda_interface(x, name, family)
        raise _not_a_tensor(x, name)
    if family == "jax":
        if x.is_deleted():
            raise TensorError(f"{name} is a JAX array that has been deleted or donated")
        _known(x.dtype, name)
    return _borrow_capsule(x, name, family)


def overlap(a: Any, b: Any) -> bool:
    """True if two arrays, on the host or on a device, may share memory."""
    if isinstance(a, DeviceArray) or isinstance(b, DeviceArray):
        return isinstance(a, DeviceArray) and a.overlaps(b)
    return bool(np.may_share_memory(a, b))


def same_memory(a: Any, b: Any) -> bool:
    """True if two arrays have the same elements in the same order."""
    if isinstance(a, DeviceArray):
        return a.same_memory(b)
    return bool(not isinstance(b, DeviceArray) and a.ctypes.data == b.ctypes.data and a.nbytes == b.nbytes)


def rows_first(array: Any, dim: int, columns: int = -1) -> Any:
    """A view of `array` whose first dimension is `dim`, and whose second one is `columns` (-1: any)."""
    if columns >= 0:
        array, dim = rows_first(array, columns), dim + (dim < columns)
    return array.rows_first(dim) if isinstance(array, DeviceArray) else np.moveaxis(array, dim, 0)


def rows_at(array: Any, dim: int, columns: int = -1) -> Any:
    """A view of `array` whose first dimension becomes dimension `dim`: undoes `rows_first`."""
    if columns >= 0:
        return rows_at(rows_at(array, dim + (dim < columns)), columns)
    return array.rows_at(dim) if isinstance(array, DeviceArray) else np.moveaxis(array, 0, dim)


def device_of(x: Any) -> Any:
    """The device whose memory `x` has. None: the host, or not a tensor."""
    if isinstance(x, DeviceArray):
        return x.device
    family = _family(type(x))
    if family == "torch":
        is_on_gpu = bool(x.is_cuda)
    elif family in ("jax", "dlpack") and hasattr(x, "__dlpack_device__") and not isinstance(x, np.ndarray):
        is_on_gpu = x.__dlpack_device__()[0] in CUDA
    else:
        is_on_gpu = family in ("cupy", "numba") or (family == "dlpack" and hasattr(x, "__cuda_array_interface__"))
    return DEVICES["cuda"]() if is_on_gpu and "cuda" in DEVICES else None


def is_tracer(x: Any) -> bool:
    """True if `x` represents a JAX array inside jit, grad or vmap. It has a shape but no memory."""
    return _family(type(x)) == "tracer"


def requires_grad(x: Any) -> bool:
    """True if `x` is a torch tensor that requires grad. Always False under torch.no_grad."""
    return _family(type(x)) == "torch" and x.requires_grad and sys.modules["torch"].is_grad_enabled()


def mark_written(x: Any) -> None:
    """Tell torch that fompi writes to `x`. A backward pass that has saved `x` then raises an error."""
    mark_all_written(versioned([x]))


def versioned(tensors: Iterable[Any]) -> list[Any]:
    """Those of which torch counts how often they are written."""
    return [x for x in tensors if _family(type(x)) == "torch" and not x.is_inference()]


def mark_all_written(tensors: Sequence[Any]) -> None:
    """`mark_written` for tensors that `versioned` has returned."""
    if tensors:
        sys.modules["torch"].autograd.graph.increment_version(tensors)


class TensorPlace(NamedTuple):
    """Where a tensor of torch was, its shape, and the order of its elements: methods, and what they returned."""

    name: str
    x: Any
    seen: Sequence[tuple[Callable[[], Any], Any]]


def places(tensors: Mapping[str, Any]) -> Sequence[TensorPlace]:
    """Where the tensors of torch are now, for `moved`. Those of other frameworks stay where they are."""
    of_torch = [(name, x) for name, x in tensors.items() if _family(type(x)) == "torch"]
    asked = [(name, x, (x.data_ptr, x.size, x.is_contiguous)) for name, x in of_torch]
    return [TensorPlace(name, x, [(method, method()) for method in methods]) for name, x, methods in asked]


def has_moved(seen: Sequence[tuple[Callable[[], Any], Any]]) -> bool:
    """True if a tensor of these places has moved. One call per method, because a bound call asks each time."""
    for method, value in seen:  # noqa: SIM110 (a generator takes three times as long)
        if method() != value:
            return True
    return False


def moved(known: Sequence[TensorPlace]) -> dict[str, Any]:
    """The tensors that are elsewhere now, by name, or have another shape or order of elements.

    torch gives a tensor other memory in place, and frees the memory before: `resize_`, `set_`, `share_memory_` (also
    where a tensor goes through a queue of `torch.multiprocessing`), and FSDP by `untyped_storage().resize_`.
    """
    return {place.name: place.x for place in known if has_moved(place.seen)}


_FAMILIES = {  # (package, class) -> family
    ("numpy", "MaskedArray"): "dlpack",  # refused by _exports: its memory does not contain the mask
    ("numpy", "ndarray"): "numpy",
    ("torch", "Tensor"): "torch",
    ("jax", "Tracer"): "tracer",
    ("jax", "ArrayImpl"): "jax",
    ("jaxlib", "ArrayImpl"): "jax",
    ("cupy", "ndarray"): "cupy",
    ("numba", "DeviceNDArray"): "numba",
    ("fompi", "DeviceArray"): "device",
}


def _family_of_class(cls: type) -> str:
    """The framework that a class belongs to. The names of its base classes show it, without an import."""
    for base in cls.__mro__:
        family = _FAMILIES.get((str(base.__module__).partition(".")[0], base.__name__))
        if family:
            return family
    return "dlpack"


_family: Callable[[type], str] = lru_cache(maxsize=256)(_family_of_class)


def _exports(x: Any) -> bool:
    """True if `x` can be read through DLPack: it exports a capsule, or it is one."""
    return type(x) is Capsule or (hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray))


def _borrow_torch(x: Any, name: str) -> Tensor:
    dtype = _torch_name(x.dtype)
    if dtype is None:
        raise _unknown_dtype(name, x.dtype)
    torch = sys.modules["torch"]
    if x.requires_grad and torch.is_grad_enabled():
        raise TensorError(f"{name} requires grad, but its memory carries no gradient: pass {name}.detach()")
    if in_forward_mode(x):
        raise TensorError(f"{name} has a forward-mode tangent, but its memory carries none")
    if x.is_cuda:
        return replace(_borrow_capsule(x.detach() if x.requires_grad else x, name, "torch"), owner=x, at=x.data_ptr())
    if x.layout is torch.strided and x.numel() and not _has_memory(x):
        raise TensorError(f"{name} has no memory: its storage was freed or cut, as by untyped_storage().resize_(0)")
    try:
        carrier = CARRIERS.get(dtype)
        array = _array_of_torch(torch, x.view(getattr(torch, carrier)) if carrier else x)
    except (BufferError, RuntimeError, TypeError) as error:  # a tensor of an accelerator, or a sparse or traced one
        if x.device.type != "cpu":
            raise TensorError(f"{name} is on {x.device}, but fompi works on host memory and CUDA devices") from None
        if x.layout is not torch.strided:
            raise TensorError(f"{name} has the layout {x.layout}, not rows in memory: pass {name}.to_dense()") from None
        if x.is_nested:
            raise TensorError(
                f"{name} is a nested tensor, not rows in memory: pass {name}.to_padded_tensor(0)"
            ) from None
        raise TensorError(f"{name} has no plain memory that can be borrowed: {error}") from error
    return Tensor(array, dtype, "torch", False, x, None, x.data_ptr())


def _borrow_cupy(x: Any, name: str) -> Tensor:
    """An array of CuPy. What still writes it is in CuPy's current stream, which the device follows at each call."""
    dtype = _known(x.dtype, name)
    device = _device(name, x.data.device_id)
    return Tensor(on_device(x, device), dtype, "cupy", False, x)


def on_device(x: Any, device: Any) -> DeviceArray:
    """An array of CuPy as one of fompi, on the same memory of `device`."""
    interface = _interface(x.data.ptr, False, STORAGE[_known(x.dtype, "x")], x.shape, x.strides)
    return DeviceArray.foreign(device, np.asarray(Interface(interface)), x)


def _borrow_cuda_interface(x: Any, name: str, framework: str) -> Tensor:
    """Any object with `__cuda_array_interface__`: an array of Numba, for example."""
    interface = dict(x.__cuda_array_interface__)
    dtype = _numpy_name(np.dtype(interface["typestr"]))
    if dtype is None:
        raise _unknown_dtype(name, interface["typestr"])
    if interface.get("mask") is not None:
        raise TensorError(f"{name} has a mask, which its memory does not contain")
    device, (ptr, readonly) = _device(name), interface["data"]
    if ptr:
        _check_number(name, device, device.number_of(ptr))
    stream = interface.pop("stream", None)
    if stream == 0:
        raise TensorError(f"{name} gives the stream 0 in __cuda_array_interface__, which may be two streams: 1 or 2")
    if stream is not None:
        device.arrived(stream)
    at = np.asarray(Interface({**interface, "version": 3}))
    return Tensor(DeviceArray.foreign(device, at, x), dtype, framework, readonly, x)


def _interface(ptr: int, readonly: bool, storage: np.dtype, shape: Any, strides: Any) -> dict[str, Any]:
    """The value of `__array_interface__`, with strides in bytes (None: in C order)."""
    return {"version": 3, "data": (ptr, readonly), "typestr": storage.str, "shape": shape, "strides": strides}


def _device(name: str, number: int | None = None) -> Any:
    """The CUDA device of this process. Raises TensorError if `number`, that of a tensor, is another one."""
    if "cuda" not in DEVICES:
        raise _on_device(name, 2, number or 0)
    try:
        device = DEVICES["cuda"]()
    except FompiError as error:
        raise TensorError(f"{name} is on cuda:{number or 0}, but {error}") from error
    if number is not None:
        _check_number(name, device, number)
    return device


def _check_number(name: str, device: Any, number: int) -> None:
    if number != device.number:
        raise TensorError(
            f"{name} is on cuda:{number}, but this rank uses cuda:{device.number}: make that one the current device "
            "before tensors are made (torch.cuda.set_device, cupy.cuda.Device(n).use)"
        )


def in_forward_mode(x: Any) -> bool:
    """True if the torch tensor `x` has a tangent (`torch.autograd.forward_ad`)."""
    forward_ad = sys.modules["torch"].autograd.forward_ad
    level = getattr(forward_ad, "_current_level", 0)  # -1: no tensor has one; saves the call
    return level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def _has_memory(x: Any) -> bool:
    """False if the storage of a tensor of torch ends before its last element. True if it has no storage at all."""
    try:
        if not x.storage_offset() and x.untyped_storage().nbytes() >= x.nbytes:
            return True
        last = sum([(n - 1) * abs(stride) for n, stride in zip(x.shape, x.stride(), strict=True)])
        return bool(x.untyped_storage().nbytes() >= (x.storage_offset() + last + 1) * x.element_size())
    except (RuntimeError, NotImplementedError):
        return True


def _array_of_torch(torch: Any, x: Any) -> Any:
    """A NumPy array on the memory of `x`. Not by `x.numpy()`: that makes the storage of `x` unresizable for ever."""
    export = getattr(torch._C, "_to_dlpack_versioned", None)  # what `x.__dlpack__` calls; older ones have none
    if export is None:
        return x.detach().numpy()
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(f"{type(x).__name__} keeps no memory of its own")
    if x.is_conj() or x.is_neg():
        raise TypeError("it is a view with a conjugate or negative bit: call resolve_conj() or resolve_neg()")
    return np.from_dlpack(_Exported(export(x)))


class _Exported:
    """A capsule as an object with `__dlpack__`, which NumPy wants."""

    __slots__ = ("capsule",)

    def __init__(self, capsule: Any):
        self.capsule = capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.capsule


def _known(dtype: Any, name: str) -> str:
    """The logical dtype of an array of NumPy, or one that has such dtypes."""
    known = _numpy_name(dtype)
    if known is None:
        raise _unknown_dtype(name, dtype)
    return known


def _unknown_dtype(name: str, dtype: object) -> DtypeError:
    return DtypeError(f"{name} has dtype {dtype}; fompi supports, in native byte order: {', '.join(CODES)}")


def _not_a_tensor(x: Any, name: str) -> TensorError:
    if isinstance(x, np.ndarray):
        remedy = f"pass {name}.filled()"
    elif isinstance(x, (list, tuple, int, float, complex, np.generic)):
        remedy = f"pass np.asarray({name})"
    elif method := next((method for method in ("toarray", "todense", "to_numpy") if hasattr(x, method)), None):
        remedy = f"pass {name}.{method}()"  # sparse matrices of SciPy and of JAX, tables of pandas
    else:
        remedy = "pass a tensor of NumPy, PyTorch, JAX, or an object that exports DLPack"
    return TensorError(f"{name} has type {type(x).__name__}, which is not a tensor: {remedy}")


def _borrow_capsule(x: Any, name: str, framework: str) -> Tensor:
    capsule = x if type(x) is Capsule else _capsule_of(x, name)
    managed, used_name = opened(capsule, name)
    if managed.major > 1:
        raise TensorError(f"{name} was exported in the format of DLPack {managed.major}; fompi reads versions up to 1")
    tensor, device = managed.tensor, None
    if tensor.device_type in CUDA:
        device = _device(name, tensor.device_id)
        if capsule is x:
            device.arrived(1)  # nobody has told its producer of a stream: it is the default one
    elif tensor.device_type not in HOST:
        raise _on_device(name, tensor.device_type, tensor.device_id)
    dtype = NAMES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise _unknown_dtype(name, f"{tensor.code}:{tensor.bits}x{tensor.lanes} (DLPack's code:bits x lanes)")
    storage = STORAGE[dtype]
    readonly = framework == "jax" or bool(managed.flags & READ_ONLY)
    shape, strides = tensor.shape[: tensor.ndim], tensor.strides and tensor.strides[: tensor.ndim]
    in_bytes = tuple(stride * storage.itemsize for stride in strides) if strides else None
    interface = _interface((tensor.data or 0) + tensor.byte_offset, readonly, storage, tuple(shape), in_bytes)
    rename(capsule, used_name)  # consumed: from now on Export must call the deleter
    array: Any = np.asarray(Export(interface, managed))
    return Tensor(array if device is None else DeviceArray.foreign(device, array, x), dtype, framework, readonly, x)


def _capsule_of(x: Any, name: str) -> Any:
    try:
        device_type, device_id = x.__dlpack_device__()
        if device_type in HOST:
            return export(x)
        if device_type in CUDA:  # on this thread: torch orders the work of the thread's current stream
            return export(x, stream=_device(name, device_id).arriving())
    except FompiError:
        raise
    except Exception as error:
        raise TensorError(f"{name} cannot be exported by its framework: {error}") from error
    raise _on_device(name, int(device_type), device_id)


def _on_device(name: str, device_type: int, device_id: int) -> TensorError:
    device = DEVICE_NAMES.get(device_type, f"DLPack device {device_type}")
    return TensorError(f"{name} is on {device}:{device_id}, but fompi works on host memory and CUDA devices")


# ── lend ────────────────────────────────────────────────────────────────────────────────────────────────────


def lend(array: Any, dtype: str, like: Tensor | str) -> Any:
    """`array` as a tensor of the framework of `like`, on the same memory. The tensor keeps the memory alive.

    `dtype` is the logical dtype; `array` has the dtype `STORAGE[dtype]`. An array is copied if the framework cannot
    represent it. For torch this is read-only memory, or a negative stride. For JAX it is every array that is not
    writable, C-contiguous and aligned to 64 bytes. A DeviceArray is copied if the tensor `like` was on the host.
    """
    if array.dtype != STORAGE[dtype]:
        raise DtypeError(f"{dtype} needs an array of dtype {STORAGE[dtype]}, not {array.dtype}")
    framework = like if isinstance(like, str) else like.framework
    if isinstance(array, DeviceArray):
        if framework == "device":
            return _as_ml_dtypes(array, dtype)
        if isinstance(like, Tensor) and like.host is None:
            return _lend_on_device(array, dtype, framework)
        array = array.get()
    if framework == "numpy":
        return _as_ml_dtypes(array, dtype)
    if framework == "torch":
        if not array.flags.writeable or min(array.strides, default=0) < 0:
            array = array.copy()
        tensor = _module("torch").from_numpy(array)
        return tensor.view(getattr(_module("torch"), dtype)) if dtype in CARRIERS else tensor
    if framework == "jax":
        tensor = _module("jax.dlpack").from_dlpack(Lent(array if array.flags.carray else array.copy(), dtype))
        if tensor.dtype.name != dtype:
            raise DtypeError(f"JAX turned {dtype} into {tensor.dtype}: set jax_enable_x64")
        return tensor
    if framework == "dlpack":
        return Lent(array, dtype)
    raise TensorError(f"host memory cannot become a tensor of {framework}")


def _as_ml_dtypes(array: Any, dtype: str) -> Any:
    """An array whose dtype NumPy does not have, as one of the package ml_dtypes."""
    return array.view(getattr(_module("ml_dtypes"), dtype)) if dtype in CARRIERS else array


def _lend_on_device(array: DeviceArray, dtype: str, framework: str) -> Any:
    """`array` as a tensor of `framework` on the same memory of the GPU."""
    if framework == "cupy":
        array.memory.is_lent = True
        return array.device.as_cupy(array, getattr(_module("ml_dtypes"), dtype) if dtype in CARRIERS else None)
    if framework == "torch":
        return _module("torch").from_dlpack(LentOnDevice(array, dtype))
    if framework == "jax":
        return _module("jax.dlpack").from_dlpack(LentOnDevice(array, dtype))
    if framework == "numba":
        return _module("numba.cuda").as_cuda_array(array)
    return LentOnDevice(array, dtype)


class Lent:
    """An array of fompi for any consumer of DLPack: `torch.from_dlpack(lent)`, `cupy.from_dlpack(lent)`, ..."""

    __slots__ = ("__weakref__", "array", "dtype")

    def __init__(self, array: np.ndarray, dtype: str):
        self.array = array
        self.dtype = dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule of the array. `stream` has no meaning on the host, but some consumers pass it."""
        if dl_device not in (None, self.__dlpack_device__()):
            raise BufferError(f"this tensor is on device {self.__dlpack_device__()}, not {dl_device}")
        return lent(self.array.copy() if copy else self.array, self.dtype, max_version)

    def __repr__(self) -> str:
        return f"Lent({self.dtype}{list(self.array.shape)})"


class LentOnDevice:
    """An array of fompi on a GPU, for any consumer of DLPack.

    A consumer gives its stream. The stream then waits for what fompi has enqueued.
    """

    __slots__ = ("__weakref__", "array", "dtype")

    def __init__(self, array: DeviceArray, dtype: str):
        self.array, self.dtype = array, dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.array.device.number

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule of the array. `stream`: the consumer's; None or 1 is the default stream, -1 asks for no order."""
        if dl_device not in (None, self.__dlpack_device__()) or copy:
            raise BufferError(f"this tensor is on device {self.__dlpack_device__()}, and is lent only as it is")
        if stream == 0:
            raise BufferError("stream=0 may be two streams of CUDA: pass 1 or 2")
        if stream != -1:
            self.array.device.lend_to(1 if stream is None else int(stream))
        memory: Any = self.array.memory
        memory.is_lent = True
        return lent(
            np.asarray(Interface(self.array.interface, memory)), self.dtype, max_version, self.__dlpack_device__()
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.array.__cuda_array_interface__

    def __repr__(self) -> str:
        return f"LentOnDevice({self.dtype}{list(self.array.shape)})"


def _module(name: str) -> ModuleType:
    """The module `name`. It is loaded already if a tensor of that framework came in."""
    return sys.modules.get(name) or import_module(name)
