"""What a message between two ranks says of its tensor, and what it carries of it: the elements, or a block with a wire.

The header holds the dtype as it travels. With a wire that is <wire>/<dtype of the tensor>, so the receiver needs to
know neither. The data is then one block of bytes (`fompi.base.wires`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fompi.backends import wires
from fompi.backends.half import storage
from fompi.backends.numbers import contiguous, empty, for_numpy, place, stored
from fompi.base.wires import WIRES
from fompi.engine.communicator import Communicator
from fompi.tensors.dlpack import Tensor

Array = np.ndarray[Any, Any]

HEADER = struct.Struct("<iiq24s")
"""1 if refused, the number of dimensions, the bytes of the data or of the refusal, the dtype as it travels."""

SIZE = struct.Struct("<q")
"""Behind it: the size of each dimension."""


def header_of(dtype: str, shape: Sequence[int], nbytes: int) -> bytes:
    """The header of a message with a tensor."""
    return HEADER.pack(0, len(shape), nbytes, dtype.encode()) + b"".join(map(SIZE.pack, shape))


def shape_in(header: bytes | bytearray) -> tuple[int, ...]:
    """The shape that a header says."""
    return struct.unpack_from(f"<{HEADER.unpack_from(header)[1]}q", header, HEADER.size)


class Coded(NamedTuple):
    """A tensor as a message with a wire carries it: one block of bytes. `dtype` is <wire>/<dtype of the tensor>."""

    dtype: str
    shape: tuple[int, ...]
    array: Any
    device: Any = None

    @classmethod
    def of(cls, tensor: Tensor, wire: str) -> Coded:
        array = contiguous(for_numpy(tensor.array)).reshape(-1)
        block = empty((WIRES[wire].nbytes(array.size),), np.uint8, array)
        wires.bound(f"encode_{wire}", [array, block], [tensor.dtype, "uint8"])()
        return cls(f"{wire}/{tensor.dtype}", tensor.array.shape, stored(block), tensor.device)


def fits(known: tuple[str, tuple[int, ...]], out: Tensor) -> bool:
    """True if what travels as `known` has the dtype and the shape of `out`."""
    return (elements_of(known[0]), known[1]) == (out.dtype, out.array.shape)


def memory_for(comm: Communicator, dtype: str, shape: tuple[int, ...]) -> Array:
    """New memory for a message: an array of this shape, or the bytes of its block."""
    if "/" in dtype:
        shape, dtype = (WIRES[dtype.partition("/")[0]].nbytes(prod(shape)),), "uint8"
    array: Array = comm.engine.arena.take(shape, storage(dtype))
    return array


def decoded(comm: Communicator, array: Any, dtype: str, shape: tuple[int, ...]) -> tuple[Any, str]:
    """(the elements of what has arrived, their dtype). `array` is on the host, or where NumPy's functions compute."""
    if "/" not in dtype:
        return array, dtype
    wire, _, elements = dtype.partition("/")
    if place(array) is None:
        result = comm.engine.arena.take(shape, storage(elements))
    else:
        result = empty(shape, storage(elements), array)
    wires.bound(f"decode_{wire}", [array, result.reshape(-1)], ["uint8", elements])()
    return result, elements


def said_of(tensor: Tensor | Coded) -> tuple[str, bytes, int]:
    """What a message says of its tensor: (dtype, header, bytes)."""
    array = tensor.array
    shape = tensor.shape if type(tensor) is Coded else array.shape
    return tensor.dtype, header_of(tensor.dtype, shape, array.nbytes), array.nbytes


def elements_of(dtype: str) -> str:
    """The dtype of the tensor of a message."""
    return dtype.partition("/")[2] if "/" in dtype else dtype


class PlainMemory(NamedTuple):
    """Contiguous memory of the host at this address, and what a message says of it. `held` owns it.

    `borrow()` is its tensor, for Python, or None for a receive that has none.
    """

    dtype: str
    header: bytes
    nbytes: int
    address: int
    held: Any
    borrow: Callable[[], Tensor | Coded | None]
