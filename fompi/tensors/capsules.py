"""DLPack's capsules: their structures, and how a tensor becomes one (https://github.com/dmlc/dlpack)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from fompi.base.errors import TensorError
from fompi.base.layout import CARRIERS, FLOAT8

CODES: dict[str, tuple[int, int]] = {  # name -> DLPack's type code, bits
    **{f"int{bits}": (0, bits) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (1, bits) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (2, bits) for bits in (16, 32, 64)},
    "bfloat16": (4, 16),
    **{f"complex{bits}": (5, bits) for bits in (64, 128)},
    "bool": (6, 8),
    **{name: (code, 8) for code, name in enumerate(FLOAT8, start=7)},
}
NAMES = {code: name for name, code in CODES.items()}


class _DLTensor(ctypes.Structure):
    """DLTensor of dlpack.h (https://github.com/dmlc/dlpack)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # in elements; null means C-contiguous
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor: the form before DLPack 1.0."""

    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))
    major, flags = 0, 0


class _ManagedVersioned(ctypes.Structure):
    """DLManagedTensorVersioned: the form since DLPack 1.0."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


READ_ONLY = 1
"""The bit of `flags` that forbids writing."""

_FORMS = (
    (b"dltensor_versioned", b"used_dltensor_versioned", _ManagedVersioned),
    (b"dltensor", b"used_dltensor", _Managed),
)
"""For each kind of capsule: its name, its name once it is consumed, and the struct that it contains."""

DEVICE_NAMES = {2: "cuda", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm", 13: "cuda (managed)", 14: "oneapi"}
CUDA = (2, 13)
"""DLPack's device types of memory that CUDA's kernels use: of a GPU, or managed."""

HOST = (1, 3, 11)
"""DLPack's device types of host memory: ordinary, page-locked for CUDA, page-locked for ROCm."""

Capsule = type(np.empty(0).__array_struct__)  # before Python 3.13 the class has no public name
_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


def _c_function(name: str, result: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, ctypes.py_object, ctypes.c_char_p)((name, ctypes.pythonapi))


_capsule_is = _c_function("PyCapsule_IsValid", ctypes.c_int)
_capsule_pointer = _c_function("PyCapsule_GetPointer", ctypes.c_void_p)
rename = _c_function("PyCapsule_SetName", ctypes.c_int)


class Export:
    """An exported tensor. NumPy makes an array of it. The deleter runs when the last view of that array has died."""

    __slots__ = ("__array_interface__", "_address", "_delete")

    def __init__(self, interface: dict[str, Any], managed: Any):
        self._address = ctypes.addressof(managed)
        self._delete: Callable[[int], None] | None = _Deleter(managed.deleter) if managed.deleter else None
        self.__array_interface__ = interface

    def __del__(self) -> None:
        if self._delete is not None:
            self._delete(self._address)


def opened(capsule: Any, name: str) -> tuple[Any, bytes]:
    """The struct in a capsule, and the name that the capsule gets once it is consumed."""
    for fresh_name, used_name, form in _FORMS:
        if _capsule_is(capsule, fresh_name):
            return form.from_address(_capsule_pointer(capsule, fresh_name)), used_name
    raise TensorError(f"{name} exported {capsule!r}: a capsule can be consumed only once; export the tensor again")


def export(x: Any, max_version: tuple[int, int] | None = (1, 0), **options: Any) -> Any:
    """`x.__dlpack__(max_version=max_version, **options)`, without the version if the producer is older than DLPack 1.0.

    With `stream`, the producer of a tensor on a GPU lets that stream wait for what still writes it.
    """
    if max_version:
        try:
            return x.__dlpack__(max_version=max_version, **options)
        except TypeError:
            pass
    return x.__dlpack__(**options)


def lent(array: np.ndarray, dtype: str, max_version: Any, device: tuple[int, int] | None = None) -> Any:
    """A capsule of memory that `array` shows, with this logical dtype, on this device. None: on the host.

    NumPy makes it, because its deleter is written in C: it is safe on any thread and at exit.
    """
    capsule = export(array, max_version)
    if device is not None or dtype in CARRIERS:
        tensor = opened(capsule, "a lent array")[0].tensor
        tensor.code, tensor.bits = CODES[dtype]
        if device is not None:
            tensor.device_type, tensor.device_id = device
    return capsule


def code_on_host(x: Any) -> tuple[int, int, int] | None:
    """DLPack's type code, bits and lanes of a tensor in memory of the host. None: it is on a device."""
    if x.__dlpack_device__()[0] not in HOST:
        return None
    capsule = export(x)
    tensor = opened(capsule, "the buffer")[0].tensor
    return tensor.code, tensor.bits, tensor.lanes
