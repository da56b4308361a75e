"""Which part of a global array each rank has: boxes. Pure arithmetic on offsets and lengths.

A box is a part of the array, and says where the rank has it in its memory. So one value describes rows, columns, tiles
of a mesh, replicas, runs of a flat bucket, and arrays with padding: what no box names is padding, and is never data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from math import prod
from typing import NamedTuple

from fompi.base.errors import LayoutError
from fompi.base.layout import Layout, Replicate, Shard, as_integer, offsets, split

Shape = tuple[int, ...]
Region = tuple[Shape, Shape]
"""A part of an array: its first element, and the end in each dimension."""


class Box(NamedTuple):
    """A part of a global array, and where a rank has it.

    Element i of the box is element `offset + i` of the array, and element `at + sum(strides * i)` of the memory of the
    rank. Without strides the boxes of a rank lie one behind the other, each in the order of its rows.
    """

    offset: Shape
    shape: Shape
    at: int = 0
    strides: Shape = ()

    @property
    def region(self) -> Region:
        return self.offset, tuple(a + n for a, n in zip(self.offset, self.shape, strict=True))

    @property
    def end(self) -> int:
        """The end in memory."""
        return 1 + self.at + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))

    def part(self, region: Region) -> Box:
        """The part of this box that is `region` of the global array."""
        low, high = region
        steps = zip(low, self.offset, self.strides, strict=True)
        shape = tuple(b - a for a, b in zip(low, high, strict=True))
        return Box(low, shape, self.at + sum((a - b) * stride for a, b, stride in steps), self.strides)

    def __str__(self) -> str:
        return f"[{', '.join(f'{a}:{b}' for a, b in zip(*self.region, strict=True))}]"


@dataclass(frozen=True)
class Boxes:
    """For each rank the boxes that it has of a global array of this shape: `of[rank]`. A sharding, as a value.

    `arrays[rank]` is the shape of the array of the rank, in whose memory the boxes are; by default it is flat, without
    padding. Two ranks may have the same elements, and a rank may have none. Raises LayoutError if a box is no part of
    the global array, is not inside of the array of its rank, or shares memory with another box.
    """

    shape: Shape
    of: tuple[tuple[Box, ...], ...]
    arrays: tuple[Shape, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(as_integer(n, "a length") for n in self.shape))
        placed = tuple(tuple(self._placed(boxes)) for boxes in self.of)
        flat = tuple((sum(prod(box.shape) for box in boxes),) for boxes in placed)
        object.__setattr__(self, "of", placed)
        object.__setattr__(self, "arrays", tuple(map(tuple, self.arrays)) or flat)
        if len(self.arrays) != len(placed):
            raise LayoutError(f"there are boxes of {len(placed)} ranks, but arrays of {len(self.arrays)}")
        for rank, boxes in enumerate(placed):
            self._check(rank, boxes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.of)

    @classmethod
    def over(
        cls,
        shape: Sequence[int],
        layouts: Layout | Sequence[Layout],
        mesh: int | Sequence[int],
        ranks: Sequence[int] | None = None,
        size: int | None = None,
    ) -> Boxes:
        """A layout for each dimension of a mesh of ranks: Shard(dim) or Replicate()

        `mesh` are the lengths of its dimensions. `ranks` are its ranks, the last dimension first to change; by default
        0, 1, ... . A communicator of `size` ranks may have more, which then have nothing. Pieces of a Shard are as even
        as possible; a dimension that is cut twice is cut again in each piece.
        """
        lengths = (mesh,) if isinstance(mesh, int) else tuple(mesh)
        each = (layouts,) if isinstance(layouts, Layout) else tuple(layouts)
        named = tuple(range(prod(lengths)) if ranks is None else ranks)
        count = max(named, default=-1) + 1 if size is None else size
        if len(each) != len(lengths) or len({*named}) != prod(lengths) or not {*named} <= {*range(count)}:
            raise LayoutError(
                f"a mesh {lengths} takes {len(lengths)} layouts and {prod(lengths)} different ranks of {count}, not "
                f"{each} and {named}"
            )
        regions = [_tile(tuple(shape), each, lengths, place) for place in product(*map(range, lengths))]
        found = dict(zip(named, regions, strict=True))
        none = (0,) * len(shape), (0,) * len(shape)
        return cls.of_regions(shape, [found.get(rank, none) for rank in range(count)])

    @classmethod
    def sharded(cls, shape: Sequence[int], dim: int, counts: Sequence[int]) -> Boxes:
        """Rank r has the next `counts[r]` rows of dimension `dim`."""
        ends, last = offsets(counts), [*shape]
        regions = []
        for first, last[dim] in pairwise(ends):
            regions.append((tuple(first if i == dim else 0 for i in range(len(last))), tuple(last)))
        return cls.of_regions(shape, regions)

    @classmethod
    def flat(cls, shape: Sequence[int], counts: Sequence[int], padded: int | None = None) -> Boxes:
        """Rank r has the next `counts[r]` elements of the flattened array, in a flat array.

        With `padded` all arrays have this many elements, and what is left of them is padding.
        """
        of = tuple(tuple(run(tuple(shape), a, b)) for a, b in pairwise(offsets(counts)))
        return cls(tuple(shape), of, () if padded is None else ((padded,),) * len(of))

    @classmethod
    def of_regions(cls, shape: Sequence[int], regions: Sequence[Region]) -> Boxes:
        """The array of rank r is `regions[r]`."""
        arrays = [tuple(b - a for a, b in zip(low, high, strict=True)) for low, high in regions]
        of = [(Box(low, n, 0, row_major(n)),) for (low, _), n in zip(regions, arrays, strict=True)]
        return cls(tuple(shape), tuple(of), tuple(arrays))

    def _placed(self, boxes: Iterable[Box]) -> Iterator[Box]:
        """With strides, and without boxes of no elements."""
        at = 0
        for offset, shape, begin, strides in boxes:
            if not len(offset) == len(shape) == len(self.shape):
                raise LayoutError(f"{offset}, {shape} is no box of an array with {len(self.shape)} dimensions")
            if prod(shape):
                is_free = len(strides) != len(shape)
                yield Box(tuple(offset), tuple(shape), at if is_free else begin, strides or row_major(shape))
                at += prod(shape)

    def _check(self, rank: int, boxes: Sequence[Box]) -> None:
        for box in boxes:
            whole = (0,) * len(self.shape), self.shape
            if common(box.region, whole) != box.region:
                raise LayoutError(f"rank {rank}: {box} is out of range of an array of the shape {self.shape}")
            if min((box.at, *box.strides)) < 0 or box.end > prod(self.arrays[rank]):
                where = f"elements {box.at} to {box.end} of its array of the shape {self.arrays[rank]}"
                raise LayoutError(f"rank {rank}: {box} is out of range of its memory: {where}")
            inner = 1  # what the smaller strides can reach
            for stride, n in sorted((s, n) for s, n in zip(box.strides, box.shape, strict=True) if n > 1):
                if stride < inner:
                    raise LayoutError(f"rank {rank}: {box} has two elements at one place: strides {box.strides}")
                inner += (n - 1) * stride
        for one, other in combinations(boxes, 2):
            if one.at < other.end and other.at < one.end and _meet(one, other):
                raise LayoutError(f"rank {rank}: {one} and {other} double: both have an element at one place in memory")

    def __str__(self) -> str:
        lines = [f"{self.shape} on {self.size} ranks"]
        for rank, boxes in enumerate(self.of):
            words = ", ".join(map(str, boxes[:4])) + (f" and {len(boxes) - 4} more" if len(boxes) > 4 else "")
            lines.append(f"  rank {rank}: {words or 'nothing'}")
        return "\n".join(lines)


def _tile(shape: Shape, layouts: Sequence[Layout], mesh: Sequence[int], place: Sequence[int]) -> Region:
    """What a rank at this place of the mesh has."""
    low, high = [0] * len(shape), [*shape]
    for layout, pieces, piece in zip(layouts, mesh, place, strict=True):
        if isinstance(layout, Replicate):
            continue
        if not isinstance(layout, Shard) or not -len(shape) <= layout.dim < len(shape):
            raise LayoutError(f"{layout} is no Shard(dim) of an array of the shape {shape}, and no Replicate()")
        first, ends = low[layout.dim], offsets(split(high[layout.dim] - low[layout.dim], pieces))
        low[layout.dim], high[layout.dim] = first + ends[piece], first + ends[piece + 1]
    return tuple(low), tuple(high)


# ------------------------------------------------------------------------------------------------------- arithmetic


def row_major(shape: Sequence[int]) -> Shape:
    """The strides of an array of this shape, in elements."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def volume(region: Region) -> int:
    return prod(b - a for a, b in zip(*region, strict=True))


def common(one: Region, other: Region) -> Region | None:
    """What two regions have in common. None: nothing."""
    low, high = tuple(map(max, one[0], other[0])), tuple(map(min, one[1], other[1]))
    return (low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None


def without(region: Region, hole: Region) -> list[Region]:
    """What is left of `region` without a part of it, as regions in the order of its rows."""
    (low, high), before, behind = region, list[Region](), list[Region]()
    for i, (a, b) in enumerate(zip(*hole, strict=True)):
        if low[i] < a:
            before.append((low, (*high[:i], a, *high[i + 1 :])))
        if b < high[i]:
            behind.append(((*low[:i], b, *low[i + 1 :]), high))
        low, high = (*low[:i], a, *low[i + 1 :]), (*high[:i], b, *high[i + 1 :])
    return before + behind[::-1]


def head(region: Region, most: int) -> Region:
    """The longest run of the rows of `region` from its first element on that is a region of at most `most` elements."""
    low, high = region
    end = list(high)
    for i in range(len(low)):
        inner = prod(b - a for a, b in zip(low[i + 1 :], high[i + 1 :], strict=True))
        end[i] = min(high[i], low[i] + max(1, most // inner))
        if most >= inner:
            break
    return low, tuple(end)


def run(shape: Shape, begin: int, end: int) -> Iterator[Box]:
    """The elements `begin` to `end` of a flattened array, as boxes that lie one behind the other."""
    while begin < end:
        low, rest = [], begin
        for stride, n in zip(row_major(shape), shape, strict=True):
            low.append(rest // stride % n)
            rest %= stride
        high = list(low)
        for i in reversed(range(len(shape))):  # the outermost dimension that begins here
            inner = prod(shape[i + 1 :])
            rows = min(shape[i] - low[i], (end - begin) // inner)
            if any(low[i + 1 :]) or rows < 1:
                break
            high = [*(a + 1 for a in low[:i]), low[i] + rows, *shape[i + 1 :]]
        lengths = tuple(b - a for a, b in zip(low, high, strict=True))
        yield Box(tuple(low), lengths)
        begin += prod(lengths)


def part_of(boxes: Sequence[Box], shape: Shape, begin: int, end: int) -> tuple[Box, ...]:
    """The boxes of the elements `begin` to `end` of a flattened array of this shape that has these boxes."""
    strides, found = row_major(shape), []
    for piece, box in product(run(shape, begin, end), boxes):
        first = tuple(box.at // stride % n for stride, n in zip(strides, shape, strict=True))
        both = common((first, Box(first, box.shape).region[1]), piece.region)
        if both is not None:
            offset = tuple(a + i - b for a, i, b in zip(box.offset, both[0], first, strict=True))
            at = sum(i * stride for i, stride in zip(both[0], strides, strict=True)) - begin
            found.append(Box(offset, tuple(b - a for a, b in zip(*both, strict=True)), at, strides))
    return tuple(found)


def _meet(one: Box, other: Box) -> bool:
    """True if two boxes of one rank have an element at one place in memory."""
    reach: dict[int, list[int]] = {}
    for box, sign in ((one, 1), (other, -1)):
        for stride, n in zip(box.strides, box.shape, strict=True):
            reach.setdefault(stride, [0, 0])[sign < 0] += n - 1
    steps = [(stride, -behind, ahead) for stride, (ahead, behind) in sorted(reach.items(), reverse=True) if stride]
    return _reaches(other.at - one.at, steps)


def _reaches(distance: int, steps: Sequence[tuple[int, int, int]]) -> bool:
    """True if `distance` is a sum of multiples of strides: (stride, least multiple, greatest multiple)."""
    if not steps:
        return distance == 0
    (stride, low, high), *rest = steps
    most, least = sum(s * b for s, _, b in rest), sum(s * a for s, a, _ in rest)
    first, last = max(low, -((most - distance) // stride)), min(high, (distance - least) // stride)
    return any(_reaches(distance - k * stride, rest) for k in range(first, last + 1))
