"""Which part of a global array each rank has: boxes. Pure arithmetic on offsets and lengths.

Boxes describe rows, columns, tiles of a mesh, replicas, runs of a flat bucket, and arrays with padding: what no box
names is padding, and is never data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple

from fompi.base.errors import LayoutError
from fompi.base.layout import Layout, Replicate, Shard, offsets, split

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A part of an array: its first element, and its length in each dimension."""

    offset: Shape
    shape: Shape

    @property
    def end(self) -> Shape:
        return tuple(a + n for a, n in zip(self.offset, self.shape, strict=True))

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def slices(self, part: Box) -> tuple[Any, ...]:
        """Where `part` is in an array that has the elements of this box. An index that always gives an array."""
        places = zip(part.offset, part.shape, self.offset, strict=True)
        return *(slice(a - first, a - first + n) for a, n, first in places), ...

    def __str__(self) -> str:
        return f"[{', '.join(f'{a}:{b}' for a, b in zip(self.offset, self.end, strict=True))}]"


@dataclass(frozen=True)
class Boxes:
    """For each rank the boxes that it has of a global array of this shape: `of[rank]`. A sharding, as a value.

    The array of a rank is its box. If it has several boxes, or is to have padding, the array is flat: the boxes lie one
    behind the other in it, and padding behind them; `arrays[rank]` is its shape. Two ranks may have the same elements,
    and a rank may have none. Raises LayoutError if a box is out of range, or an array has no room for its boxes.
    """

    shape: Shape
    of: tuple[tuple[Box, ...], ...]
    arrays: tuple[Shape, ...] = ()

    def __post_init__(self) -> None:
        usual = tuple(boxes[0].shape if len(boxes) == 1 else (sum(b.elements for b in boxes),) for boxes in self.of)
        object.__setattr__(self, "arrays", self.arrays or usual)
        if len(self.arrays) != len(self.of):
            raise LayoutError(f"there are boxes of {len(self.of)} ranks, but arrays of {len(self.arrays)}")
        for rank, boxes in enumerate(self.of):
            for box in boxes:
                fits = len(box.offset) == len(box.shape) == len(self.shape) and min((0, *box.offset, *box.shape)) >= 0
                if not fits or any(end > n for end, n in zip(box.end, self.shape, strict=True)):
                    raise LayoutError(f"rank {rank}: the box {tuple(box)} is out of range of an array {self.shape}")
            if (n := prod(usual[rank])) > prod(self.arrays[rank]):
                raise LayoutError(f"rank {rank}: its array {self.arrays[rank]} has no room for {n} elements")

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
            takes = f"a mesh {lengths} takes {len(lengths)} layouts and {prod(lengths)} different ranks of {count}"
            raise LayoutError(f"{takes}, not {each} and {named}")
        places = dict(zip(named, product(*map(range, lengths)), strict=True))
        none = Box((0,) * len(shape), (0,) * len(shape))
        tiles = (_tile(shape, each, lengths, places[rank]) if rank in places else none for rank in range(count))
        return cls(tuple(shape), tuple((tile,) for tile in tiles))

    @classmethod
    def sharded(cls, shape: Sequence[int], dim: int, counts: Sequence[int]) -> Boxes:
        """Rank r has the next `counts[r]` rows of dimension `dim`."""
        runs = zip(offsets(counts), counts, strict=False)
        of = ((Box(_with(dim, a, [0] * len(shape)), _with(dim, n, shape)),) for a, n in runs)
        return cls(tuple(shape), tuple(of))

    @classmethod
    def flat(cls, shape: Sequence[int], counts: Sequence[int], padded: int | None = None) -> Boxes:
        """Rank r has the next `counts[r]` elements of the flattened array, in a flat array.

        With `padded` all arrays have this many elements, and what is left of them is padding.
        """
        of = tuple(tuple(run(tuple(shape), a, b)) for a, b in pairwise(offsets(counts)))
        return cls(tuple(shape), of, tuple((n if padded is None else padded,) for n in counts))


def _with(dim: int, n: int, shape: Sequence[int]) -> Shape:
    return (*shape[:dim], n, *shape[dim + 1 :])


def _tile(shape: Sequence[int], layouts: Sequence[Layout], mesh: Sequence[int], place: Sequence[int]) -> Box:
    """What a rank at this place of the mesh has."""
    low, lengths = [0] * len(shape), [*shape]
    for layout, pieces, piece in zip(layouts, mesh, place, strict=True):
        if isinstance(layout, Shard) and -len(shape) <= layout.dim < len(shape):
            counts = split(lengths[layout.dim], pieces)
            low[layout.dim] += sum(counts[:piece])
            lengths[layout.dim] = counts[piece]
        elif not isinstance(layout, Replicate):
            raise LayoutError(f"{layout} is no Shard(dim) of an array of the shape {tuple(shape)}, and no Replicate()")
    return Box(tuple(low), tuple(lengths))


# ------------------------------------------------------------------------------------------------------- arithmetic


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole array."""
    return Box((0,) * len(shape), tuple(shape))


def between(low: Sequence[int], high: Sequence[int]) -> Box:
    return Box(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))


def common(one: Box, other: Box) -> Box | None:
    """What two boxes have in common. None: nothing."""
    both = between([*map(max, one.offset, other.offset)], [*map(min, one.end, other.end)])
    return both if min(both.shape, default=1) > 0 else None


def without(box: Box, hole: Box) -> list[Box]:
    """What is left of `box` without a part of it, as boxes in the order of its rows."""
    low, high, before, behind = box.offset, box.end, list[Box](), list[Box]()
    for i, (a, b) in enumerate(zip(hole.offset, hole.end, strict=True)):
        if low[i] < a:
            before.append(between(low, _with(i, a, high)))
        if b < high[i]:
            behind.append(between(_with(i, b, low), high))
        low, high = _with(i, a, low), _with(i, b, high)
    return before + behind[::-1]


def head(box: Box, most: int) -> Box:
    """The longest run of the rows of `box` from its first element on that is a box of at most `most` elements."""
    lengths = list(box.shape)
    for i, n in enumerate(box.shape):
        inner = prod(box.shape[i + 1 :])
        lengths[i] = min(n, max(1, most // inner))
        if most >= inner:
            break
    return Box(box.offset, tuple(lengths))


def run(shape: Shape, begin: int, end: int) -> Iterator[Box]:
    """The elements `begin` to `end` of a flattened array, as boxes that lie one behind the other."""
    while begin < end:
        low = [begin // prod(shape[i + 1 :]) % n for i, n in enumerate(shape)]
        lengths = [1] * len(shape)
        for i in reversed(range(len(shape))):  # as many dimensions as begin here and are whole
            lengths[i] = min(shape[i] - low[i], (end - begin) // prod(shape[i + 1 :]))
            if low[i] or lengths[i] < shape[i]:
                lengths[i] = max(1, lengths[i])
                break
        yield (box := Box(tuple(low), tuple(lengths)))
        begin += box.elements
