"""Where the rows of a tensor are: layouts over ranks, blocks of rows, and how many rows each block has in a call.

A partition has `size` shards (one owner each) and every shard `parts` blocks. Blocks are numbered owner by owner:
block `owner * parts + part`. Plans speak of blocks only; `Extents` says how many rows they have: `shares` are the
sizes of the parts of a shard in proportion, (1, 1) for two equal ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple

from fompi.base.errors import DtypeError, LayoutError

ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "bool": 1, "complex64": 8, "complex128": 16,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip
HALF = ("float16", "bfloat16")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
MOST_NBYTES = 1 << 63


def itemsize(dtype: str) -> int:
    if dtype not in ITEMSIZE:
        raise DtypeError(f"unknown dtype {dtype!r}; known: {', '.join(ITEMSIZE)}")
    return ITEMSIZE[dtype]


def accumulator(dtype: str) -> str:
    """The dtype in which sums of `dtype` are kept: float32 for half types, so that they round once."""
    return "float32" if dtype in HALF else dtype


@dataclass(frozen=True)
class Shard:
    """Rank r holds the r-th piece along dimension `dim`; -1 is the last one."""

    dim: int = 0


@dataclass(frozen=True)
class Replicate:
    """Every rank holds all of it."""


@dataclass(frozen=True)
class Partial:
    """Every rank holds a term of full shape; the tensor is their sum."""

    op: str = "sum"


Layout = Shard | Replicate | Partial


@dataclass(frozen=True)
class Spec:
    """A global tensor without its data: shape over all ranks, dtype name, layout."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: Layout = Replicate()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        itemsize(self.dtype)
        if any(not isinstance(n, int) or n < 0 for n in self.shape):
            raise LayoutError(f"a shape is made of whole numbers >= 0, not {self.shape}")
        if nbytes(self.shape, self.dtype) >= MOST_NBYTES:
            raise LayoutError(f"no memory holds a tensor of shape {self.shape} in {self.dtype}")
        object.__setattr__(self, "layout", self.resolved(self.layout))

    def resolved(self, layout: Layout) -> Layout:
        """`layout`, its dimension counted from the first. Raises LayoutError where this tensor has none."""
        if not isinstance(layout, Shard):
            return layout
        if not -len(self.shape) <= layout.dim < len(self.shape):
            raise LayoutError(f"Shard({layout.dim}) of a tensor with {len(self.shape)} dimensions")
        return Shard(layout.dim % len(self.shape))


Slices = int | Sequence[int]
"""Into what a shard is cut: a number of equal parts, or their sizes in proportion."""


def slices_in_words(slices: Slices) -> str:
    """'1 slice', '4 slices', 'slices 1:2:4'."""
    if isinstance(slices, int):
        return f"{slices} slice{'s' * (slices != 1)}"
    return f"slices {':'.join(map(str, slices))}"


def split(total: int, pieces: int) -> tuple[int, ...]:
    """`total` rows in `pieces` runs as even as can be, the longer ones first: split(7, 3) == (3, 2, 2)."""
    each, rest = divmod(total, pieces)
    return (each + 1,) * rest + (each,) * (pieces - rest)


def cut(total: int, shares: Sequence[int]) -> list[int]:
    """`total` rows in the proportions of `shares`, what is left to the first: cut(10, (1, 3)) == [3, 7]."""
    whole = sum(shares)
    rows = [total * share // whole for share in shares]
    for i in range(total - sum(rows)):
        rows[i] += 1
    return rows


def offsets(counts: Iterable[int]) -> list[int]:
    """Where each run begins, and where the last one ends: offsets((3, 2)) == [0, 3, 5]."""
    return list(accumulate(counts, initial=0))


Symbol = tuple[str | int, ...]
"""The length of a block, unevaluated: two blocks of equal symbol have equally many rows in every call."""

AXES = ("rows", "own", "copies", "slices", "send", "recv", "whole")
"""What the blocks of a buffer are, on `rank`:

| axis     | block b                             | rows of                                              |
|----------|-------------------------------------|------------------------------------------------------|
| `rows`   | owner b // parts, part b % parts    | that block of the partition                          |
| `own`    | the blocks of `rows` that are ours  | the same (numbered as in `rows`)                     |
| `copies` | copy b // parts, part b % parts     | our own block `part`, `size` times                   |
| `slices` | part b // size, owner b % size      | as `rows`, part by part                              |
| `send`   | dest b // parts, part b % parts     | what we send to dest                                 |
| `recv`   | source b // parts, part b % parts   | what source sends to us                              |
| `whole`  | one block                           | all of the buffer, whose shape does not change       |
"""


def symbol(axis: str, rank: int, size: int, parts: int, block: int) -> Symbol:
    if axis in ("rows", "own"):
        return ("rows", *divmod(block, parts))
    if axis == "copies":
        return ("rows", rank, block % parts)
    if axis == "slices":
        return ("rows", block % size, block // size)
    if axis == "send":
        return ("pair", rank, *divmod(block, parts))
    if axis == "recv":
        return ("pair", block // parts, rank, block % parts)
    return ("whole",)


def blocks(axis: str, rank: int, size: int, parts: int) -> range:
    """The numbers of the blocks that a buffer of this axis has on `rank`."""
    if axis == "whole":
        return range(1)
    if axis == "own":
        return range(rank * parts, (rank + 1) * parts)
    return range(size * parts)


class Extents(NamedTuple):
    """Rows of every block in one call, as `rank` sees them: `rows[owner]`, `send[dest]`, `recv[source]`."""

    rank: int
    size: int
    shares: tuple[int, ...]
    rows: tuple[int, ...] = ()
    send: tuple[int, ...] = ()
    recv: tuple[int, ...] = ()

    def counts(self, axis: str) -> Sequence[int]:
        """Rows of the blocks of a buffer of this axis, in the order of the blocks."""
        if axis in ("send", "recv", "rows"):  # the common ones first: this is part of what a small call costs
            counts: Sequence[int] = getattr(self, axis)
            return counts if len(self.shares) == 1 else [n for c in counts for n in cut(c, self.shares)]
        if axis == "own":
            return cut(self.rows[self.rank], self.shares)
        if axis == "copies":
            return cut(self.rows[self.rank], self.shares) * self.size
        if axis == "slices":
            each = [cut(n, self.shares) for n in self.rows]
            return [each[owner][part] for part in range(len(self.shares)) for owner in range(self.size)]
        raise LayoutError(f"a buffer of the axis {axis!r} has a shape of its own, not rows that change")


class Sizes(NamedTuple):
    """Rows on all ranks in one call: `rows[owner]`, or `pairs[source][dest]` for an all-to-all."""

    rows: tuple[int, ...] = ()
    pairs: tuple[tuple[int, ...], ...] = ()

    def extents(self, rank: int, shares: tuple[int, ...]) -> Extents:
        if self.pairs:
            received = tuple(row[rank] for row in self.pairs)
            return Extents(rank, len(self.pairs), shares, send=self.pairs[rank], recv=received)
        return Extents(rank, len(self.rows), shares, rows=self.rows)


def nbytes(shape: Iterable[int], dtype: str) -> int:
    return prod(shape) * itemsize(dtype)
