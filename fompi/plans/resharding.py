"""Another sharding of an array, as a plan: which rank sends which boxes to which one, in rounds.

A round is one all-to-all of the elements that its moves name, so its messages have the plan, the proof and the
simulation of any other call (`verify`, `simulate`). What is new here is which element goes where. That is a value of
its own, with a proof of its own: blocks of a `Plan` are rows of buffers that every rank has alike, and boxes are not.

The proof: each element of each box of the target is written once, from a box of the source that has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import ceil, prod
from typing import Any, NamedTuple

from fompi.base.errors import LayoutError, PlanError
from fompi.plans.boxes import Box, Boxes, Region, Shape, common, head, volume, without
from fompi.plans.plan import format_nbytes

PASSES = 12
"""How often the owners of replicated elements are balanced. Each pass ends nearer to the least possible maximum."""


class Move(NamedTuple):
    """Elements that `target` takes from `source`, and where they are in the memory of each."""

    source: int
    target: int
    read: Box
    write: Box

    @property
    def elements(self) -> int:
        return prod(self.read.shape)

    def part(self, region: Region) -> Move:
        return Move(self.source, self.target, self.read.part(region), self.write.part(region))


@dataclass(frozen=True)
class Resharding:
    """How the elements of an array get from their places in `source` to those in `target`.

    First each rank copies what it has itself. Then come the rounds. In a round a rank sends and receives at most
    `peak` bytes together.
    """

    source: Boxes
    target: Boxes
    itemsize: int
    peak: int | None
    copies: tuple[Move, ...]
    rounds: tuple[tuple[Move, ...], ...]

    def pairs(self, moves: Iterable[Move]) -> tuple[tuple[int, ...], ...]:
        """The elements that each rank sends to each rank: `pairs[source][target]`."""
        table = [[0] * self.source.size for _ in range(self.source.size)]
        for move in moves:
            table[move.source][move.target] += move.elements
        return tuple(map(tuple, table))

    @property
    def nbytes(self) -> int:
        """The bytes of all messages."""
        return self.itemsize * sum(move.elements for moves in self.rounds for move in moves)

    def verify(self) -> None:
        """Raise PlanError if an element of the target is not written once, from its place in the source."""
        written = defaultdict[tuple[int, Box], list[Region]](list)
        for move in (*self.copies, *(move for moves in self.rounds for move in moves)):
            region, words = move.write.region, f"rank {move.source} to rank {move.target}, {move.write}"
            if move.read.region != region or _holder(self.source, move.source, move.read) is None:
                raise PlanError(f"{words}: the source has no such element at this place", move.source)
            box = _holder(self.target, move.target, move.write)
            if box is None:
                raise PlanError(f"{words}: it would be written where no box of the target has it", move.target)
            written[move.target, box].append(region)
        for rank, boxes in enumerate(self.target.of):
            for box in boxes:
                _check_once(rank, box, written[rank, box])
        for number, moves in enumerate(self.rounds):
            most = max(self._held(moves), default=0)
            if self.peak is not None and most > self.peak:
                raise PlanError(f"round {number} needs {most} bytes on a rank, more than peak={self.peak}")

    def _held(self, moves: Iterable[Move]) -> list[int]:
        """The bytes that each rank packs and receives in a round."""
        pairs = self.pairs(moves)
        return [
            self.itemsize * (sum(out) + sum(into)) for out, into in zip(pairs, zip(*pairs, strict=True), strict=True)
        ]

    def __str__(self) -> str:
        pairs = self.pairs(move for moves in self.rounds for move in moves)
        kept = self.itemsize * sum(move.elements for move in self.copies)
        most = max((max(self._held(moves)) for moves in self.rounds), default=0)
        lines = [
            f"array of the shape {self.source.shape}, {self.itemsize} bytes each, on {self.source.size} ranks: "
            f"{format_nbytes(self.nbytes)} in messages, {format_nbytes(kept)} stay where they are",
            f"{len(self.rounds)} round{'s' * (len(self.rounds) != 1)}, at most {format_nbytes(most)} on a rank beside "
            "both shards",
        ]
        for rank, row in enumerate(pairs):
            sent = [f"{format_nbytes(n * self.itemsize)} to {dest}" for dest, n in enumerate(row) if n]
            into = format_nbytes(self.itemsize * sum(column[rank] for column in pairs))
            more = f" and to {len(sent) - 6} more" if len(sent) > 6 else ""
            lines.append(f"  rank {rank}: sends {', '.join(sent[:6]) or 'nothing'}{more}; receives {into}")
        return "\n".join(lines)


def _holder(boxes: Boxes, rank: int, part: Box) -> Box | None:
    """The box of this rank of which this is a part."""
    return next((b for b in boxes.of[rank] if common(b.region, part.region) == part.region
                 and b.part(part.region) == part), None)  # fmt: skip


def _check_once(rank: int, box: Box, written: Sequence[Region]) -> None:
    found = sum(map(volume, written))
    for one, other in combinations(sorted(written), 2) if len(written) > 1 else ():
        if common(one, other) is not None:
            raise PlanError(f"rank {rank}, {box}: the elements {common(one, other)} are written twice", rank)
    if found != prod(box.shape):
        raise PlanError(f"rank {rank}, {box}: {prod(box.shape) - found} elements are not written", rank)


# ---------------------------------------------------------------------------------------------------- how it is made


@lru_cache(maxsize=256)
def resharding(
    source: Boxes,
    target: Boxes,
    itemsize: int,
    peak: int | None = None,
    costs: Sequence[Sequence[float]] | None = None,
) -> Resharding:
    """The plan from `source` to `target`, verified

    Each rank keeps what it has, and receives everything else once: no plan has fewer bytes. `costs[source][target]`
    are the seconds of a link: of several owners the nearest ones send, in equal parts as far as possible. Rounds
    have at most `peak` bytes on a rank. Raises LayoutError if the source has not all that the target needs, and for a
    `peak` below one element.
    """
    if (source.shape, source.size) != (target.shape, target.size):
        there, here = f"{target.shape} on {target.size} ranks", f"{source.shape} on {source.size} ranks"
        raise LayoutError(f"the target has the shape {there}, but the source has {here}")
    if peak is not None and peak < itemsize:
        raise LayoutError(f"peak={peak!r} has no room for one element, {itemsize} bytes")
    copies, wanted = list[Move](), defaultdict[Shape, list[tuple[int, Region, Box]]](list)
    held = _held_regions(source)
    for rank, boxes in enumerate(target.of):
        for box in boxes:
            for region, owners in cells(box.region, held):
                if not owners:
                    raise LayoutError(f"rank {rank} needs {box.part(region)}, a hole of the source: no rank has it")
                if rank in owners:
                    copies.append(Move(rank, rank, _read(source, rank, region), box.part(region)))
                else:
                    wanted[_nearest(owners, rank, costs)].append((rank, region, box))
    moves = [Move(owner, rank, _read(source, owner, region), box.part(region))
             for owner, rank, region, box in dealt(wanted)]  # fmt: skip
    rounds = _in_rounds(moves, source.size, None if peak is None else peak // itemsize)
    made = Resharding(source, target, itemsize, peak, tuple(copies), rounds)
    made.verify()
    return made


def _held_regions(boxes: Boxes) -> list[tuple[Region, Shape]]:
    """Each region that is held, and the ranks that have it."""
    held: dict[Region, Shape] = {}
    for rank, of in enumerate(boxes.of):
        for region in dict.fromkeys(box.region for box in of):
            held[region] = (*held.get(region, ()), rank)
    return [*held.items()]


def held_cells(boxes: Boxes) -> list[tuple[Region, Shape]]:
    """The whole array in pieces that have the same owners throughout. A hole has none."""
    return cells(((0,) * len(boxes.shape), boxes.shape), _held_regions(boxes)) if prod(boxes.shape) else []


def cells(region: Region, held: Sequence[tuple[Region, Shape]]) -> list[tuple[Region, Shape]]:
    """`region` in pieces that have the same owners throughout: (piece, its owners)."""
    found: list[tuple[Region, Shape]] = [(region, ())]
    for other, ranks in held:
        if common(region, other) is None:
            continue
        pieces, found = found, []
        for piece, owners in pieces:
            both = common(piece, other)
            if both is None:
                found.append((piece, owners))
            else:
                found += [(both, tuple(dict.fromkeys(owners + ranks))), *((r, owners) for r in without(piece, both))]
    return found


def _read(source: Boxes, rank: int, region: Region) -> Box:
    return next(box for box in source.of[rank] if common(box.region, region) == region).part(region)


def _nearest(owners: Shape, rank: int, costs: Sequence[Sequence[float]] | None) -> Shape:
    """The owners with the best link to this rank."""
    if costs is None:
        return owners
    least = min(costs[owner][rank] for owner in owners)
    return tuple(owner for owner in owners if costs[owner][rank] <= least)


def dealt(wanted: Mapping[Shape, Sequence[tuple[Any, Region, Any]]]) -> Iterator[tuple[int, Any, Region, Any]]:
    """(owner, who, region, what) from (who, region, what) by owners: all of several ones is cut, to equal sums."""
    amounts = {owners: sum(volume(region) for _, region, _ in of) for owners, of in wanted.items()}
    quotas = balanced(amounts)
    for owners, of in wanted.items():
        left = [ceil(n) for n in quotas[owners]]
        rest, at = [*of][::-1], 0
        while rest:
            who, region, what = rest.pop()
            while left[at] < 1 and at + 1 < len(owners):
                at += 1
            piece = head(region, left[at]) if at + 1 < len(owners) else region
            rest += [(who, other, what) for other in without(region, piece)[::-1]]
            left[at] -= volume(piece)
            yield owners[at], who, piece, what


def balanced(amounts: Mapping[Shape, int]) -> dict[Shape, list[float]]:
    """How much each of these owners gives of an amount that all of them have, so that their sums differ least.

    Each amount in turn is poured over its owners as water over vessels, given all others. The sum of the squares falls
    with each step, and has one minimum: there the greatest sum is the least possible, too.
    """
    sums: defaultdict[int, float] = defaultdict(float)
    found = {owners: [0.0] * len(owners) for owners in amounts}
    for number in range(PASSES if any(len(owners) > 1 for owners in amounts) else 1):
        for owners in sorted(amounts, key=len) if number == 0 else amounts:
            for owner, given in zip(owners, found[owners], strict=True):
                sums[owner] -= given
            found[owners] = _poured([sums[owner] for owner in owners], amounts[owners])
            for owner, given in zip(owners, found[owners], strict=True):
                sums[owner] += given
    return found


def _poured(levels: Sequence[float], amount: float) -> list[float]:
    """How much of `amount` flows into each vessel that is filled up to these levels."""
    lowest = sorted(levels)
    for count in range(len(lowest), 0, -1):
        level = (sum(lowest[:count]) + amount) / count
        if level >= lowest[count - 1]:
            break
    return [max(0.0, level - each) for each in levels]


def _in_rounds(moves: Sequence[Move], size: int, most: int | None) -> tuple[tuple[Move, ...], ...]:
    """The moves, cut where a rank would hold more than `most` elements in a round. Each goes into the first that fits.

    In the order of the distance to the receiver: so all ranks take part in each round.
    """
    ordered = sorted(moves, key=lambda move: ((move.target - move.source) % size, move.source))
    if most is None:
        return (tuple(ordered),) if ordered else ()
    rounds: list[list[Move]] = []
    held: list[list[int]] = []  # elements, by round and rank
    first: dict[tuple[int, int], int] = {}  # the rounds before have no room for this pair
    for each in ordered:
        rest = [each]
        while rest:
            move = rest.pop()
            pair = move.source, move.target
            at = first.get(pair, 0)
            while at < len(rounds) and max(held[at][rank] for rank in pair) >= most:
                at += 1
            first[pair] = at
            if at == len(rounds):
                rounds.append([])
                held.append([0] * size)
            piece = head(move.read.region, most - max(held[at][rank] for rank in pair))
            rest += [move.part(other) for other in without(move.read.region, piece)[::-1]]
            rounds[at].append(move.part(piece))
            for rank in pair:
                held[at][rank] += volume(piece)
    return tuple(map(tuple, rounds))
