"""Checkpoints on disk: what is in a directory, and whether each byte is as it was written.

    checkpoint.json               which elements of which array are where, and the sums of all blocks of all files
    ID-0.safetensors, ...         the parts that each rank has written

The safetensors format: 8 bytes with the length of the header, a header of JSON, the elements. A folder as the Hugging
Face hub has it is read too: it has no sums, and each array is one part.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from fompi.base.errors import LayoutError
from fompi.base.layout import itemsize
from fompi.plans.boxes import Box, whole

NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL", "int8": "I8",
    "int16": "I16", "int32": "I32", "int64": "I64", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
"""The dtypes of fompi, as the format names them."""

INDEX, BLOCK = "checkpoint.json", 1 << 20
"""The name of the file that makes a checkpoint, and the bytes of which each has a sum of its own."""


class Part(NamedTuple):
    """A box of an array, row by row from byte `begin` of a file on."""

    file: str
    begin: int
    box: Box

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


def open_checkpoint(directory: Any) -> Checkpoint:
    """What is in a directory of ours, or of the Hugging Face hub. Raises LayoutError if it is none, or broken."""
    path = Path(directory)
    try:
        if (path / INDEX).exists():
            return _opened(path, (path / INDEX).read_text())
        files = sorted(path.glob("*.safetensors"))
        next(path.iterdir(), None)  # glob hides a directory that cannot be read
    except (OSError, UnicodeDecodeError) as error:
        raise LayoutError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not files:
        raise LayoutError(f"{path} has no {INDEX} and no *.safetensors: no checkpoint was ever finished there")
    found, dtypes = Checkpoint(path), {name: dtype for dtype, name in NAMES.items()}
    for file in files:
        memory = found.mapped(file.name, [])
        header, begin = header_of(memory, file), 8 + int.from_bytes(memory[:8], "little")
        header.pop("__metadata__", None)
        if begin + max((entry["data_offsets"][1] for entry in header.values()), default=0) != len(memory):
            raise LayoutError(f"{file} has {len(memory)} bytes, and not those of its header: it was cut short")
        for name, entry in header.items():
            if entry["dtype"] not in dtypes:
                raise LayoutError(f"{file}: {name!r} has the unknown dtype {entry['dtype']}")
            shape = tuple(entry["shape"])
            part = Part(file.name, begin + entry["data_offsets"][0], whole(shape))
            found.arrays[name] = Stored(dtypes[entry["dtype"]], shape, [part])
    return found


def _opened(path: Path, text: str) -> Checkpoint:
    try:
        outer = json.loads(text)
        found = json.loads(outer["checkpoint"])
        if outer["sum"] != crc32(outer["checkpoint"].encode()):
            raise ValueError("its sum is not that of what is in it")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LayoutError(f"{path / INDEX} is not as it was written: {error}") from None
    arrays = {
        name: Stored(dtype, tuple(shape), [Part(f, at, Box(tuple(offset), tuple(n))) for f, at, (offset, n) in parts])
        for name, (dtype, shape, parts) in found.pop("arrays").items()
    }
    return Checkpoint(path, arrays, **found)
