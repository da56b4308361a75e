"""Checkpoints on disk: what is in a directory, and whether each byte is as it was written.

    checkpoint.json               which elements of which array are where, and the sums of all blocks of all files
    ID-0.safetensors, ...         the parts that each rank has written

The safetensors format: 8 bytes with the length of the header, a header of JSON, the elements.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from fompi.base.errors import LayoutError
from fompi.base.layout import itemsize
from fompi.plans.boxes import Box

Array = np.ndarray[Any, Any]

NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL", "int8": "I8",
    "int16": "I16", "int32": "I32", "int64": "I64", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
"""The dtypes of fompi, as the format names them."""

INDEX, BLOCK = "checkpoint.json", 1 << 20
"""The name of the file that makes a checkpoint, and the bytes of which each has a sum of its own."""


VALUES = (type(None), str, bool, int, float)
"""The values of JSON, and lists of them."""


def flattened(
    state: Any, prefix: str = "", read: Callable[[str, Any], Any] = lambda name, each: each
) -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings and lists, by names that are joined with dots. A list of values is one leaf.

    `read(name, each)` is what stands for an object of the state.
    """
    state = read(prefix, state)
    if isinstance(state, (list, tuple)) and all(isinstance(each, VALUES) for each in state):
        yield prefix, [*state]
    elif isinstance(state, (Mapping, list, tuple)):
        for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from flattened(value, f"{prefix}.{key}" if prefix else str(key), read)
    else:
        yield prefix, state


class Part(NamedTuple):
    """A box of an array, from byte `begin` of a file on. Row by row, if `strides` (in elements) are not given."""

    file: str
    begin: int
    box: Box
    strides: tuple[int, ...] = ()

    def rows(self, part: Box, itemsize: int) -> tuple[int, int]:
        """The bytes of the file with the rows of this part of the box."""
        row, (first, *_) = prod(self.box.shape[1:]) * itemsize, self.box.slices(part)
        if first is ...:  # an array without dimensions
            return self.begin, self.begin + itemsize
        return self.begin + first.start * row, self.begin + first.stop * row


class Stored(NamedTuple):
    """An array in files."""

    dtype: str
    shape: tuple[int, ...]
    parts: list[Part]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * itemsize(self.dtype)


@dataclass
class Checkpoint:
    """What is in a directory. `sums` are the length of each file and the sums of its blocks."""

    directory: Path
    arrays: dict[str, Stored] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    step: int | None = None
    ranks: int = 0
    sums: dict[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self.arrays.values())

    @property
    def has_sums(self) -> bool:
        return bool(self.sums)

    def know(self, names: Iterable[str]) -> None:
        """Enter what has another name in these files, of `names` that are asked for."""

    def mapped(self, file: str, runs: Iterable[tuple[int, int]]) -> mmap.mmap:
        """The memory of a file, of which these runs of bytes will be read, in order. Raises LayoutError by its name."""
        path = self.directory / file
        try:
            with path.open("rb") as opened:
                nbytes = os.fstat(opened.fileno()).st_size
                memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) if nbytes else None
        except OSError as error:
            raise LayoutError(f"{path}: {error.strerror or error}") from None
        expected, sums = self.sums.get(file, (nbytes, []))
        if nbytes != expected or memory is None:
            raise LayoutError(f"{path} has {nbytes} bytes, but {expected} were written: it was cut short")
        if self.id and header_of(memory, path).get("__metadata__", {}).get("fompi") != self.id:
            raise LayoutError(f"{path} is of another checkpoint than {INDEX}")
        for block in sorted({b for begin, end in runs for b in range(begin // BLOCK, -(-end // BLOCK))}):
            if sums and crc32(memory[block * BLOCK : (block + 1) * BLOCK]) != sums[block]:
                raise LayoutError(f"{path}: bytes from {block * BLOCK} on are not those that were written")
        return memory

    def elements(self, part: Part, box: Box, memory: mmap.mmap, dtype: Any) -> Array:
        """The elements of a box in that of a part, in the memory of its file."""
        strides = [n * np.dtype(dtype).itemsize for n in part.strides]
        return np.ndarray(part.box.shape, dtype, memory, part.begin, strides or None)[part.box.slices(box)]

    def check(self) -> None:
        """Read every byte. Raises LayoutError for the first file that is not as it was written."""
        for file in dict.fromkeys(part.file for stored in self.arrays.values() for part in stored.parts):
            self.mapped(file, [(0, self.sums.get(file, (0, []))[0])]).close()

    def text(self) -> str:
        """The content of checkpoint.json."""
        words = json.dumps({name: value for name, value in vars(self).items() if name != "directory"})
        return json.dumps({"fompi": 1, "sum": crc32(words.encode()), "checkpoint": words})


def header_of(memory: Any, path: Path) -> dict[str, Any]:
    """The header of a safetensors file. Raises LayoutError if it is none."""
    try:
        found = json.loads(memory[8 : 8 + int.from_bytes(memory[:8], "little")])
        return dict(found)
    except (ValueError, TypeError, RecursionError) as error:
        raise LayoutError(f"{path} is no safetensors file: {error}") from None


def header_bytes(arrays: Mapping[str, tuple[str, Sequence[int]]], id: str = "") -> tuple[bytes, list[int]]:
    """The header of a file of these arrays, name -> (dtype, shape), and where in the file each begins."""
    ends = [0, *accumulate(prod(shape) * itemsize(dtype) for dtype, shape in arrays.values())]
    header: dict[str, Any] = {"__metadata__": {"fompi": id}} if id else {"__metadata__": {"format": "pt"}}
    for (name, (dtype, shape)), begin, end in zip(arrays.items(), ends, ends[1:], strict=False):
        if dtype not in NAMES:
            raise LayoutError(f"{name!r} has the dtype {dtype}, which safetensors files do not have")
        header[name] = {"dtype": NAMES[dtype], "shape": [*shape], "data_offsets": [begin, end]}
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    return len(words).to_bytes(8, "little") + words, [8 + len(words) + begin for begin in ends]
