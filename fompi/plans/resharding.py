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
from functools import cached_property, lru_cache
from itertools import chain, islice
from math import ceil
from typing import Any, NamedTuple

from fompi.base.errors import LayoutError, PlanError
from fompi.base.layout import Sizes
from fompi.plans.boxes import Box, Boxes, Shape, common, head, without
from fompi.plans.plan import format_nbytes

PASSES = 12
"""How often the owners of replicated elements are balanced. Each pass ends nearer to the least possible maximum."""


class Move(NamedTuple):
    """`box` goes from box number `read` of rank `source` to box number `write` of rank `target`."""

    source: int
    target: int
    read: int
    write: int
    box: Box


@dataclass(frozen=True)
class Resharding:
    """How the elements of an array get from their places in `source` to those in `target`.

    First each rank copies what it has itself. Then come the rounds. In a round a rank sends and receives at most
    `peak` bytes together. If they do not fit into one round, each has half of that, and two of them are in flight.
    """

    source: Boxes
    target: Boxes
    itemsize: int
    peak: int | None
    copies: tuple[Move, ...]
    rounds: tuple[tuple[Move, ...], ...]

    def pairs(self, moves: Iterable[Move]) -> list[list[int]]:
        """The bytes that each rank sends to each rank: `pairs[source][target]`."""
        table = [[0] * self.source.size for _ in range(self.source.size)]
        for move in moves:
            table[move.source][move.target] += move.box.elements * self.itemsize
        return table

    @property
    def nbytes(self) -> int:
        """The bytes of all messages."""
        return sum(map(sum, self.pairs(chain(*self.rounds))))

    @property
    def sizes(self) -> list[Sizes]:
        """The rounds as all-to-alls of bytes, for `fompi.simulate`."""
        return [Sizes(pairs=tuple(map(tuple, self.pairs(moves)))) for moves in self.rounds]

    @cached_property
    def last_before(self) -> list[int]:
        """For each round the last one that must have ended when it begins, so that no rank needs more than `peak`.

        -1: none. With rounds of half the peak that is the one before the last: two are in flight.
        """
        ended, found = -1, list[int]()
        for number in range(len(self.rounds)):
            while self.peak is not None and ended + 1 < number and self._together(ended, number) > self.peak:
                ended += 1
            found.append(ended)
        return found

    @property
    def most_nbytes(self) -> int:
        """The most bytes that a rank sends and receives in the rounds that are in flight together."""
        return max((self._together(ended, number) for number, ended in enumerate(self.last_before)), default=0)

    def _together(self, ended: int, number: int) -> int:
        """The same of the rounds behind `ended`, up to this one."""
        return max(map(sum, zip(*self._beside[ended + 1 : number + 1], strict=True)))

    @cached_property
    def _beside(self) -> list[list[int]]:
        """The bytes that each rank sends and receives, round by round."""
        tables = map(self.pairs, self.rounds)
        return [[sum(out) + sum(into) for out, into in zip(t, zip(*t, strict=True), strict=True)] for t in tables]

    def verify(self) -> None:
        """Raise PlanError if an element of the target is not written once, from its place in the source."""
        written = defaultdict[tuple[int, int], list[Box]](list)
        for source, target, read, write, box in chain(self.copies, *self.rounds):
            words = f"rank {source} to rank {target}, {box}"
            if not _has(self.source.of[source], read, box):
                raise PlanError(f"{words}: the source has no such element there", source)
            if not _has(self.target.of[target], write, box):
                raise PlanError(f"{words}: it would be written where no box of the target has it", target)
            written[target, write].append(box)
        for rank, boxes in enumerate(self.target.of):
            for number, box in enumerate(boxes):
                for one, other in overlaps(written[rank, number]):
                    raise PlanError(f"rank {rank}: the elements {common(one, other)} are written twice", rank)
                if missing := box.elements - sum(each.elements for each in written[rank, number]):
                    raise PlanError(f"rank {rank}: {missing} elements of {box} are not written", rank)
        if self.peak is not None and self.most_nbytes > self.peak:
            raise PlanError(f"rounds in flight need {self.most_nbytes} bytes on a rank, more than peak={self.peak}")

    def __str__(self) -> str:
        pairs, kept = self.pairs(chain(*self.rounds)), sum(map(sum, self.pairs(self.copies)))
        lines = [
            f"array of the shape {self.source.shape} on {self.source.size} ranks: {format_nbytes(self.nbytes)} in "
            f"messages, {format_nbytes(kept)} stay where they are",
            f"{len(self.rounds)} round{'s' * (len(self.rounds) != 1)}, at most {format_nbytes(self.most_nbytes)} on a "
            "rank beside both shards",
        ]
        for rank, row in enumerate(pairs):
            sent = ", ".join(f"{format_nbytes(n)} to {dest}" for dest, n in enumerate(row) if n)
            into = format_nbytes(sum(column[rank] for column in pairs))
            lines.append(f"  rank {rank}: sends {sent or 'nothing'}; receives {into}")
        return "\n".join(lines)


def _has(boxes: Sequence[Box], number: int, part: Box) -> bool:
    return number < len(boxes) and common(boxes[number], part) == part


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
        there, here = (f"{boxes.shape} on {boxes.size} ranks" for boxes in (target, source))
        raise LayoutError(f"the target has the shape {there}, but the source has {here}")
    if peak is not None and peak < itemsize:
        raise LayoutError(f"peak={peak!r} has no room for one element, {itemsize} bytes")
    copies, wanted = list[Move](), defaultdict[Shape, list[tuple[Any, Box]]](list)
    for rank, boxes in enumerate(target.of):
        for number, box in enumerate(boxes):
            for part, owners in cells(box, source):
                if not owners:
                    raise LayoutError(f"rank {rank} needs {part}, a hole of the source: no rank has it")
                if rank in owners:
                    copies.append(Move(rank, rank, _number(source, rank, part), number, part))
                else:
                    seconds = {owner: costs[owner][rank] if costs else 0.0 for owner in owners}
                    nearest = tuple(owner for owner in owners if seconds[owner] <= min(seconds.values()))
                    wanted[nearest].append(((rank, number), part))
    moves = [Move(owner, rank, _number(source, owner, part), number, part)
             for owner, (rank, number), part in dealt(wanted)]  # fmt: skip
    most = None if peak is None else peak // itemsize
    rounds = _in_rounds(moves, source.size, most)
    if most is not None and len(rounds) > 1:  # one is packed while another one travels
        rounds = _in_rounds(moves, source.size, max(1, most // 2))
    made = Resharding(source, target, itemsize, peak, tuple(copies), rounds)
    made.verify()
    return made


@lru_cache(maxsize=256)
def _owners(boxes: Boxes) -> list[tuple[Box, Shape, bool]]:
    """Each box, the ranks that have it, and whether it has elements in common with another one."""
    owners_of = defaultdict[Box, dict[int, None]](dict)
    for rank, of in enumerate(boxes.of):
        for box in of:
            owners_of[box][rank] = None
    shared = {box for pair in overlaps([*owners_of]) for box in pair}
    return [(box, tuple(ranks), box in shared) for box, ranks in owners_of.items()]


def cells(box: Box, boxes: Boxes) -> list[tuple[Box, Shape]]:
    """`box` in pieces that have the same owners throughout: (piece, the ranks that have it)."""
    known, left = list[tuple[Box, Shape]](), [(box, Shape())] if box.elements else []
    for other, ranks, is_shared in _owners(boxes):
        if common(box, other) is not None:
            pieces, left = left, []
            for piece, owners in pieces:
                both = common(piece, other)
                if both is None:
                    left.append((piece, owners))
                else:
                    (left if is_shared else known).append((both, tuple(dict.fromkeys((*owners, *ranks)))))
                    left += [(rest, owners) for rest in without(piece, both)]
    return known + left


def overlaps(boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """The pairs that have elements in common. In the order of the dimension in which most boxes differ."""
    dims = range(len(boxes[0].shape) if boxes else 0)
    dim = max(dims, key=lambda i: len({box.offset[i] for box in boxes}), default=0)
    ordered = sorted(boxes, key=lambda box: box.offset[dim:])
    for i, one in enumerate(ordered):
        for other in islice(ordered, i + 1, None):
            if other.offset[dim:] and other.offset[dim] >= one.end[dim]:
                break
            if common(one, other) is not None:
                yield one, other


def _number(boxes: Boxes, rank: int, part: Box) -> int:
    """The first box of this rank that has this part."""
    return next(number for number, box in enumerate(boxes.of[rank]) if common(box, part) == part)


def dealt(wanted: Mapping[Shape, Sequence[tuple[Any, Box]]]) -> Iterator[tuple[int, Any, Box]]:
    """(owner, who, box), from (who, box) by all their owners: boxes are cut, so that owners give equally much."""
    quotas = balanced({owners: sum(box.elements for _, box in of) for owners, of in wanted.items()})
    for owners, of in wanted.items():
        left = [ceil(n) for n in quotas[owners]]
        rest, at = [*of][::-1], 0
        while rest:
            who, box = rest.pop()
            while left[at] < 1 and at + 1 < len(owners):
                at += 1
            piece = head(box, left[at]) if at + 1 < len(owners) else box
            rest += [(who, other) for other in without(box, piece)[::-1]]
            left[at] -= piece.elements
            yield owners[at], who, piece


def balanced(amounts: Mapping[Shape, int]) -> dict[Shape, list[float]]:
    """How much each of these owners gives of an amount that all of them have, so that their sums differ least.

    Each amount in turn is poured over its owners as water over vessels, given all others. The sum of the squares falls
    with each step, and has one minimum: there the greatest sum is the least possible, too.
    """
    sums: defaultdict[int, float] = defaultdict(float)
    found = {owners: [0.0] * len(owners) for owners in amounts}
    for _ in range(PASSES if any(len(owners) > 1 for owners in amounts) else 1):
        for owners in sorted(amounts, key=len):
            levels = [sums[owner] - given for owner, given in zip(owners, found[owners], strict=True)]
            lowest = sorted(levels)
            for count in range(len(lowest), 0, -1):  # how many vessels the water reaches
                level = (sum(lowest[:count]) + amounts[owners]) / count
                if level >= lowest[count - 1]:
                    break
            found[owners] = [max(0.0, level - each) for each in levels]
            sums |= {owner: max(level, each) for owner, each in zip(owners, levels, strict=True)}
    return found


def _in_rounds(moves: Sequence[Move], size: int, most: int | None) -> tuple[tuple[Move, ...], ...]:
    """The moves, cut where a rank would hold more than `most` elements in a round. Each goes into the first that fits.

    In the order of the distance to the receiver: so all ranks take part in each round. A rank that sends and receives
    has room for both in each, as much as its sums say: else it would first do the one, and then the other.
    """
    ordered = sorted(moves, key=lambda move: ((move.target - move.source) % size, move.source))
    if most is None:
        return (tuple(ordered),) if ordered else ()
    sums = [[0, 0] for _ in range(size)]  # elements that a rank sends, and that it receives
    for move in moves:
        sums[move.source][0] += move.box.elements
        sums[move.target][1] += move.box.elements
    limits = [[max(1, most * each // max(1, sum(both))) for each in both] for both in sums]
    rounds: list[list[Move]] = []
    held: list[list[list[int]]] = []  # elements, by round and rank

    def room(move: Move, at: int) -> int:
        ends = (move.source, 0), (move.target, 1)
        return min(min(limits[rank][way] - held[at][rank][way], most - sum(held[at][rank])) for rank, way in ends)

    first = defaultdict[Any, int](int)  # the rounds before have no room for this pair
    rest = ordered[::-1]
    while rest:
        move = rest.pop()
        pair, at = move[:2], first[move[:2]]
        while at < len(rounds) and room(move, at) <= 0:
            at += 1
        first[pair] = at
        if at == len(rounds):
            rounds.append([])
            held.append([[0, 0] for _ in range(size)])
        piece = head(move.box, room(move, at))
        rest += [move._replace(box=other) for other in without(move.box, piece)[::-1]]
        rounds[at].append(move._replace(box=piece))
        held[at][move.source][0] += piece.elements
        held[at][move.target][1] += piece.elements
    return tuple(map(tuple, rounds))
