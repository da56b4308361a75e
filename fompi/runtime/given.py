"""The tensors of one call of a bound plan: what they must be like, and the memory of the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import addressof, c_char
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fompi.base.errors import DtypeError, ShapeError, TensorError
from fompi.runtime.compiled import Compiled
from fompi.runtime.dispatch import Announcing
from fompi.tensors.dlpack import Tensor

MOST_KNOWN = 256
"""How many calls on other memory an executor remembers for each choice of buffers."""


class TensorForm(NamedTuple):
    """What the tensor of a call must be like: as the bound one, or as the memory that bind took.

    `storage` is the dtype of its array, `dtype` the logical one. `strides` is None for a contiguous tensor. `at` is the
    shape that the plan gives the array. In a flat problem it is another one. `plain` is the dtype of an array of NumPy
    whose address is taken at once. None: there is none.
    """

    plain: np.dtype[Any] | None
    shape: tuple[int, ...]
    storage: np.dtype[Any]
    dtype: str
    strides: tuple[int, ...] | None
    is_output: bool
    on_host: bool
    at: tuple[int, ...]

    def check(self, name: str, tensor: Tensor, device: Any) -> None:
        """Raise ShapeError, DtypeError or TensorError for a tensor of another form. `device` is that of the kernels."""
        array = tensor.array
        if (tensor.device is None) != self.on_host:
            where = f"the {(tensor.device or device).name}"
            places = ("the host", where) if tensor.device is None else (where, "the host")
            raise TensorError(f"{name} is on {places[0]}, but it was bound on {places[1]}")
        if tensor.dtype != self.dtype:
            raise DtypeError(f"{name} is {tensor.dtype}, but it was bound as {self.dtype}: bind another plan")
        if array.shape != self.shape:
            raise ShapeError(f"{name} has the shape {array.shape}, but was bound with {self.shape}: bind another plan")
        if not (array.flags.c_contiguous if self.strides is None else array.strides == self.strides):
            wanted = "contiguous" if self.strides is None else f"bound with {self.strides}"
            raise TensorError(f"{name} has the strides {array.strides}, but it must be {wanted}: copy it")
        if self.is_output and tensor.readonly:
            raise TensorError(f"{name} is an output, but its memory is read-only")


class On(NamedTuple):
    """The memory of a call: every buffer of the program as an array, and what each op does with them.

    `is_shared`: several calls have it. Then its arrays do not keep the tensors of the program alive. `bases`: the
    addresses of all buffers, for a call in C, if they are plain memory of the host.
    """

    arrays: dict[str, Any]
    actions: list[Any]
    is_shared: bool = False
    bases: bytes | None = None


class Given:
    """The tensors of one call, by buffer, as the program passed them, and the memory of the call.

    `outputs`: the results among them, in the order of the plan. `copied`: those whose elements are copied to other
    memory of a device before the call, or from there after it. `announcing`: the products that one kernel announces.
    """

    __slots__ = ("announcing", "copied", "on", "outputs", "owners")

    def __init__(
        self,
        owners: Mapping[str, Any],
        on: On,
        outputs: tuple[str, ...],
        copied: Mapping[str, Tensor] | None = None,
        announcing: Announcing | None = None,
    ):
        self.owners, self.on, self.outputs, self.copied = owners, on, outputs, copied or {}
        self.announcing = announcing

    def forget_inputs(self) -> None:
        """Keep the memory of the outputs only."""
        self.owners = {name: self.owners[name] for name in self.outputs}
        if not self.on.is_shared:
            self.on = On({name: self.on.arrays[name] for name in self.outputs}, [])


class Overlay:
    """What changes in a call if these buffers are other memory than the bound one.

    `forms` are theirs, and `outputs` the outputs among them. `ops` use the buffers. The pairs in `apart` must not share
    memory. `known` has the memory of calls by the addresses of the buffers: the same few tensors, or the same places of
    an allocator, are given again and again.
    """

    def __init__(self, compiled: Compiled, names: Sequence[str], forms: Sequence[TensorForm]):
        roles = {b.name: b.role for b in compiled.program.buffers if b.role != "scratch"}
        pairs = {frozenset((a, b)) for a in names for b in roles if a != b and "output" in (roles[a], roles[b])}
        self.names = names
        self.ops, self.apart = compiled.users(names), [(a, b) for a, b in map(sorted, pairs)]
        self.forms, self.outputs = forms, tuple(buffer.name for buffer in compiled.outputs if buffer.name in names)
        self.known: dict[tuple[int, ...], On] = {}

    def arrays_at(self, addresses: Sequence[int]) -> dict[str, Any]:
        """These buffers as contiguous arrays at these addresses of the host (`array_at`)."""
        buffers = zip(self.names, self.forms, addresses, strict=True)
        return {name: array_at(address, form.at, form.storage) for name, form, address in buffers}

    def remember(self, addresses: tuple[int, ...], on: On) -> None:
        if len(self.known) >= MOST_KNOWN:
            self.known.clear()
        self.known[addresses] = on


def array_at(address: int, shape: tuple[int, ...], storage: np.dtype[Any]) -> Any:
    """A contiguous array at this address of the host. It keeps no memory alive."""
    nbytes = prod(shape) * storage.itemsize
    data: Any = (c_char * nbytes).from_address(address) if nbytes else None
    return np.ndarray(shape, storage, data)


def address_of(array: Any) -> int:
    """The address of a contiguous array on the host. 0: it has no elements."""
    if not array.size:
        return 0
    if array.flags.writeable and array.dtype.isbuiltin == 1:
        return addressof(c_char.from_buffer(array))  # takes a fifth of the time of the next line
    address: int = array.__array_interface__["data"][0]
    return address
