"""Where the rows of a tensor are: layouts over ranks, blocks of rows, and the number of rows of each block in a call.

A partition divides the rows into `size` shards, one per owner. Each shard has `parts` blocks. Block `part` of an owner
has the number `owner * parts + part`.

A plan names blocks but no rows. `Extents` holds the number of rows of each block. `shares` are the relative sizes of
the parts of a shard: (1, 1) for two equal parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite, prod
from operator import index
from typing import Any, NamedTuple

from fompi.base.errors import DtypeError, LayoutError, quoted

FLOAT8 = tuple(
    f"float8_{kind}" for kind in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
)
ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "bool": 1, "complex64": 8, "complex128": 16,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    **dict.fromkeys(FLOAT8, 1),
}  # fmt: skip
HALF = ("float16", "bfloat16")
CARRIERS = {"bfloat16": "uint16", **dict.fromkeys(FLOAT8, "uint8")}
"""NumPy lacks these dtypes. Their bits are held in arrays of these unsigned integers."""

MOVED_ONLY = ("bool", *FLOAT8)
"""The dtypes that have no sums and products. They can be gathered, exchanged and broadcast."""

NATIVE_SUMS = ("float64", "float32", "complex64", "complex128", "int32", "int64", "uint32", "uint64")
"""The dtypes that every MPI library sums as NumPy does.

Half types would be rounded at every step. Open MPI saturates 8- and 16-bit integers: there 100 + 100 is 127.
"""
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
MOST_NBYTES = 1 << 63
"""Bytes: a tensor must be smaller than this. Sizes then fit into a signed 64-bit integer."""


def integer(value: Any) -> int | None:
    """`value` as an int, if it is an integer of Python, NumPy or any other kind. Else None."""
    try:
        return index(value)
    except TypeError:
        return None


def number(value: Any) -> float | None:
    """`value` as a float, if it is one finite real number of any kind, and no text. Else None."""
    try:
        found = float("nan") if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if isfinite(found) else None


def as_integer(value: Any, name: str) -> int:
    """`value` as an int. Raises LayoutError if it is no integer."""
    number = integer(value)
    if number is None:
        raise LayoutError(f"{name}={value!r} must be an integer")
    return number


def itemsize(dtype: str) -> int:
    if dtype not in ITEMSIZE:
        raise DtypeError(f"unknown dtype {quoted(dtype, ITEMSIZE)}; known: {', '.join(ITEMSIZE)}")
    return ITEMSIZE[dtype]


def dtype_name(dtype: Any) -> str:
    """The name of a dtype of NumPy, PyTorch or JAX, or `dtype` if it is a name. Raises DtypeError."""
    if isinstance(dtype, str) and dtype in ITEMSIZE:
        return dtype
    names = getattr(dtype, "name", None), getattr(dtype, "__name__", None), str(dtype).removeprefix("torch.")
    found: str = next((name for name in names if name in ITEMSIZE), str(dtype))
    itemsize(found)  # it raises if there is no such dtype
    return found


def accumulator(dtype: str) -> str:
    """The dtype of sums of `dtype`. It is float32 for half types, so that a result is rounded only once."""
    return "float32" if dtype in HALF else dtype


@dataclass(frozen=True)
class Shard:
    """Rank r holds the r-th piece along dimension `dim`; -1 is the last dimension."""

    dim: int = 0


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole tensor."""


@dataclass(frozen=True)
class Partial:
    """Every rank holds one term of the full shape. The tensor is the sum of all terms."""

    op: str = "sum"


Layout = Shard | Replicate | Partial


@dataclass(frozen=True)
class Spec:
    """A global tensor without data: its shape over all ranks, its dtype, its layout.

    The dtype is a name, such as "float32", or a dtype of NumPy, PyTorch or JAX. `spec.dtype` is the name.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: Layout = Replicate()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        try:
            object.__setattr__(self, "shape", tuple(map(index, self.shape)))
        except TypeError:
            raise LayoutError(f"a shape must consist of integers >= 0, not {self.shape!r}") from None
        if any(n < 0 for n in self.shape):
            raise LayoutError(f"a shape must consist of integers >= 0, not {self.shape}")
        if nbytes(self.shape, self.dtype) >= MOST_NBYTES:
            raise LayoutError(f"a tensor of shape {self.shape} in {self.dtype} is too large for any memory")
        object.__setattr__(self, "layout", self.resolved(self.layout))

    def resolved(self, layout: Layout) -> Layout:
        """`layout` with a dimension >= 0. Raises LayoutError if this tensor does not have the dimension."""
        if not isinstance(layout, Shard):
            return layout
        if not -len(self.shape) <= layout.dim < len(self.shape):
            raise LayoutError(f"Shard({layout.dim}) does not fit a tensor with {len(self.shape)} dimensions")
        return Shard(layout.dim % len(self.shape))


Slices = int | Sequence[int]
"""How a shard is cut: the number of equal slices, or the relative sizes of the slices."""


def slices_in_words(slices: Slices) -> str:
    """'1 slice', '4 slices', 'slices 1:2:4'."""
    if isinstance(slices, int):
        return f"{slices} slice{'s' * (slices != 1)}"
    return f"slices {':'.join(map(str, slices))}"


def split(total: int, pieces: int) -> tuple[int, ...]:
    """`total` rows in `pieces` runs whose lengths differ by at most 1, longer runs first: split(7, 3) == (3, 2, 2)."""
    shorter, rest = total // pieces, total % pieces  # not divmod: a size that torch.compile leaves open has none
    return (shorter + 1,) * rest + (shorter,) * (pieces - rest)


def cut(total: int, shares: Sequence[int]) -> list[int]:
    """`total` rows in proportion to `shares`. Rows that remain go to the first runs: cut(10, (1, 3)) == [3, 7]."""
    all_shares = sum(shares)
    rows = [total * share // all_shares for share in shares]
    for i in range(total - sum(rows)):
        rows[i] += 1
    return rows


def offsets(counts: Iterable[int]) -> list[int]:
    """The first row of each run, and the end of the last run: offsets((3, 2)) == [0, 3, 5]."""
    return list(accumulate(counts, initial=0))


def in_common(run: Sequence[int], other: Sequence[int]) -> tuple[slice, slice]:
    """What two runs of elements, (begin, end) each, have in common: a slice of the one, and of the other.

    in_common((2, 6), (4, 9)) == (slice(2, 4), slice(0, 2))
    """
    low = max(run[0], other[0])
    high = max(low, min(run[1], other[1]))
    return slice(low - run[0], high - run[0]), slice(low - other[0], high - other[0])


Symbol = tuple[str | int, ...]
"""A name for the number of rows of a block. Two blocks with equal symbols have equally many rows in every call."""

AXES = ("rows", "own", "copies", "slices", "send", "recv", "experts", "whole")
"""The axis of a buffer says what its blocks are. For a buffer of `rank`:

| axis     | block b is                           | its rows are                                             |
|----------|--------------------------------------|----------------------------------------------------------|
| `rows`   | part b % parts of owner b // parts   | the rows of this block of the partition                  |
| `own`    | a block of `rows` that `rank` owns   | the same; the number is the one in `rows`                |
| `copies` | part b % parts of copy b // parts    | the rows of this part of `rank`; there are `size` copies |
| `slices` | part b // size of owner b % size     | the rows of this block of the partition                  |
| `send`   | part b % parts for dest b // parts   | rows that `rank` sends to dest                           |
| `recv`   | part b % parts of source b // parts  | rows that source sends to `rank`                         |
| `experts`| expert b of `rank`                   | one row: the matrix of this expert                       |
| `whole`  | the only block                       | the whole buffer, whose shape is fixed                   |

A pair has `parts` blocks. Where rows go to experts, the pair has a run of rows for each expert of the rank that
multiplies. Each run is cut into slices: part e * slices + i is slice i of expert e.
"""


def symbol(axis: str, rank: int, size: int, parts: int, block: int) -> Symbol:
    """The symbol of a block of a buffer with this axis on `rank`."""
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
    return ("expert",) if axis == "experts" else ("whole",)


def blocks(axis: str, rank: int, size: int, parts: int, experts: int = 0) -> range:
    """The block numbers of a buffer with this axis on `rank`, which has this many experts."""
    if axis == "whole":
        return range(1)
    if axis == "experts":
        return range(experts)
    if axis == "own":
        return range(rank * parts, (rank + 1) * parts)
    return range(size * parts)


class Extents(NamedTuple):
    """The rows of one call, as `rank` needs them: `rows[owner]`, or `send[dest]` and `recv[source]`.

    Where rows go to experts, rank r has `experts[r]` of them. Then `send` and `recv` have a number for each run of each
    pair: as many runs for every pair as a rank has experts at most. `is_late`: the rank that receives rows multiplies.
    """

    rank: int
    size: int
    shares: tuple[int, ...]
    rows: tuple[int, ...] = ()
    send: tuple[int, ...] = ()
    recv: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    is_late: bool = True

    def counts(self, axis: str) -> Sequence[int]:
        """The rows of each block of a buffer with this axis, in the order of the blocks."""
        if axis in ("send", "recv", "rows"):  # the common axes first: a small call spends time here
            counts: Sequence[int] = getattr(self, axis)
            return counts if len(self.shares) == 1 else [n for c in counts for n in cut(c, self.shares)]
        if axis == "own":
            return cut(self.rows[self.rank], self.shares)
        if axis == "copies":
            return cut(self.rows[self.rank], self.shares) * self.size
        if axis == "slices":
            blocks_of = [cut(n, self.shares) for n in self.rows]
            return [blocks_of[owner][part] for part in range(len(self.shares)) for owner in range(self.size)]
        if axis == "experts":
            return (1,) * sum(self.experts[self.rank : self.rank + 1])
        raise LayoutError(f"a buffer of the axis {axis!r} has a fixed shape, not rows")

    def by_peer(self, axis: str) -> tuple[Any, ...]:
        """The rows for or from each rank: a number, or where rows go to experts a number for each of them.

        `axis` is send or recv.
        """
        counts: tuple[int, ...] = getattr(self, axis)
        if not self.experts:
            return counts
        runs = len(counts) // self.size
        mine = (axis == "recv") == self.is_late  # this rank multiplies them
        return tuple(counts[r * runs :][: self.experts[self.rank if mine else r]] for r in range(self.size))


class Sizes(NamedTuple):
    """The rows of all ranks in one call: `rows[owner]`, or `pairs[source][dest]` for an all-to-all.

    Where rows go to experts, `runs[source][dest]` has a number for each expert. `grouped` makes both from these.
    """

    rows: tuple[int, ...] = ()
    pairs: tuple[tuple[int, ...], ...] = ()
    runs: tuple[tuple[tuple[int, ...], ...], ...] = ()

    @classmethod
    def grouped(cls, runs: Iterable[Iterable[Iterable[int]]]) -> Sizes:
        """The Sizes with these `runs`. Shorter ones are filled up with 0."""
        table = [[tuple(run) for run in row] for row in runs]
        most = max(len(run) for row in table for run in row)
        filled = tuple(tuple(run + (0,) * (most - len(run)) for run in row) for row in table)
        return cls(pairs=tuple(tuple(map(sum, row)) for row in filled), runs=filled)

    def extents(
        self, rank: int, shares: tuple[int, ...], experts: tuple[int, ...] = (), is_late: bool = True
    ) -> Extents:
        if self.runs:
            send = tuple(n for run in self.runs[rank] for n in run)
            recv = tuple(n for row in self.runs for n in row[rank])
            return Extents(rank, len(self.pairs), shares, (), send, recv, experts, is_late)
        if self.pairs:
            received = tuple(row[rank] for row in self.pairs)
            return Extents(rank, len(self.pairs), shares, send=self.pairs[rank], recv=received)
        return Extents(rank, len(self.rows), shares, rows=self.rows)


def nbytes(shape: Iterable[int], dtype: str) -> int:
    return prod(shape) * itemsize(dtype)
