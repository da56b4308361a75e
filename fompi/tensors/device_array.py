"""DeviceArray: an array in the memory of a device. It has a shape and an address. The host cannot read its elements."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from typing import Any, Protocol, Self

import numpy as np


class Allocation(Protocol):
    """An allocation of a device. It is freed when the last array on it has died."""

    device: Any
    ptr: int
    nbytes: int
    is_lent: bool
    """True once another library knows the address."""


class ForeignMemory:
    """Memory of another library, which `owner` keeps alive. `mirror` is a copy of it, where a device needs one."""

    __slots__ = ("__weakref__", "device", "is_lent", "mirror", "nbytes", "owner", "ptr")

    def __init__(self, device: Any, ptr: int, nbytes: int, owner: object):
        self.device, self.ptr, self.nbytes, self.owner = device, ptr, nbytes, owner
        self.mirror: Any = None
        self.is_lent = True


class Interface:
    """An address and a shape, of which NumPy makes an array. The array keeps `owner` alive."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, interface: dict[str, Any], owner: object = None):
        self.__array_interface__, self.owner = interface, owner


def _of(name: str) -> Any:
    return property(lambda array: getattr(array._at, name), doc=f"`{name}`, as NumPy has it.")


def byte_bounds(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """The address of the first byte of `array`, and the end of the last one."""
    interface = array.__array_interface__
    low = high = interface["data"][0]
    if array.size:
        reach = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
        low, high = low + sum(min(0, r) for r in reach), high + sum(max(0, r) for r in reach) + array.itemsize
    return low, high


class DeviceArray:
    """An array of a device: `a[2:5]`, `a.reshape(-1)`, `a.view(dtype)`, `a.get()`; shapes and dtypes as in NumPy.

    `a.get()` is a NumPy copy. `a.ptr` is the address. Slices and views share the memory, and keep it alive. The host
    cannot read the elements: `np.asarray(a)` is a TypeError.
    """

    __slots__ = ("__weakref__", "_at", "memory")
    __array_ufunc__ = None  # NumPy's functions refuse it, and operators with NumPy arrays too
    __iter__ = None

    def __init__(self, memory: Allocation, at: np.ndarray[Any, Any]):
        self.memory, self._at = memory, at  # `at` has the address of the device: nobody may read its elements

    def _on(self, at: np.ndarray[Any, Any]) -> Self:
        """Another view of the same memory."""
        return type(self)(self.memory, at)

    @classmethod
    def of(cls, memory: Allocation, shape: Sequence[int], dtype: Any, offset: int = 0) -> Self:
        """An array in C order, `offset` bytes behind the begin of `memory`."""
        dtype = np.dtype(dtype)
        block = (ctypes.c_uint8 * (prod(shape) * dtype.itemsize)).from_address(memory.ptr + offset)
        return cls(memory, np.ndarray(tuple(shape), dtype, block))

    shape, dtype, ndim, size, nbytes, itemsize, strides, flags = map(
        _of, ("shape", "dtype", "ndim", "size", "nbytes", "itemsize", "strides", "flags")
    )

    @classmethod
    def foreign(cls, device: Any, at: np.ndarray[Any, Any], owner: object) -> Self:
        """An array on memory of another library. `at` has its address and shape."""
        low, high = byte_bounds(at)
        return cls(ForeignMemory(device, low, high - low, owner), at)

    @property
    def device(self) -> Any:
        return self.memory.device

    @property
    def ptr(self) -> int:
        return int(self._at.__array_interface__["data"][0])

    @property
    def extent(self) -> tuple[int, int]:
        """The bytes of its memory that it spans: first and end. Another array may share those between its elements."""
        low, high = byte_bounds(self._at)
        return low - self.memory.ptr, high - self.memory.ptr

    def __len__(self) -> int:
        return len(self._at)

    def __getitem__(self, key: Any) -> Self:
        keys = key if isinstance(key, tuple) else (key,)
        return self._on(self._at[keys if Ellipsis in keys else (*keys, ...)])  # never an element

    def reshape(self, *shape: Any) -> Self:
        """The elements in another shape, without a copy. Raises ValueError where NumPy would copy."""
        at = self._at.view()
        if not at.flags.c_contiguous and at.size:
            raise ValueError("reshape() of a strided device array would copy it")
        return self._on(at.reshape(*shape))

    def view(self, dtype: Any) -> Self:
        return self._on(self._at.view(dtype))

    def rows_first(self, dim: int) -> Self:
        """The dimension `dim` becomes the first one. `dim=0` changes nothing."""
        return self._on(np.moveaxis(self._at, dim, 0))

    def rows_at(self, dim: int) -> Self:
        """The first dimension becomes dimension `dim`: undoes `rows_first`."""
        return self._on(np.moveaxis(self._at, 0, dim))

    def broadcast_to(self, shape: Sequence[int]) -> Self:
        """The elements, repeated for each row of `shape`, without a copy."""
        return self._on(np.broadcast_to(self._at, tuple(shape)))

    def overlaps(self, other: Any) -> bool:
        """True if both may share memory."""
        return isinstance(other, DeviceArray) and np.may_share_memory(self._at, other._at)

    def same_memory(self, other: Any) -> bool:
        """True if both have the same elements in the same order."""
        return isinstance(other, DeviceArray) and (self.ptr, self.nbytes) == (other.ptr, other.nbytes)

    def get(self) -> np.ndarray[Any, Any]:
        """A copy in host memory. Waits for the device."""
        copy: np.ndarray[Any, Any] = self.device.get(self)
        return copy

    @property
    def interface(self) -> dict[str, Any]:
        """The memory in the form of NumPy's `__array_interface__`."""
        return dict(self._at.__array_interface__)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        self.memory.is_lent = True
        return {**self.interface, "version": 3, "stream": self.device.departing()}

    def __array__(self, *args: Any, **keywords: Any) -> Any:
        raise TypeError("the host cannot read the memory of a device: call get() for a copy")

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype}{list(self.shape)} on the {self.device.name})"
