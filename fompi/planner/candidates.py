"""What there is to choose from: the schedules of a problem, in the cuts, windows and orders that may matter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import gcd
from typing import NamedTuple
from zlib import crc32

from fompi.base.layout import Sizes, Slices, cut, slices_in_words
from fompi.model.bound import call_seconds, native_nbytes, row_nbytes, rows_worked
from fompi.model.flow_shop import Groups, Job, announced, johnson, pieces
from fompi.model.machine import Machine
from fompi.plans.plan import IN_STEP, MOST_MESSAGES, Workspace
from fompi.plans.problems import Problem
from fompi.schedules.registry import REGISTERED, STRAIGHT, available, is_available, shares_of, to_one_peer

EVEN: tuple[Slices, ...] = (1, 2, 4, 8, 16)
UNEVEN: tuple[Slices, ...] = (
    (1, 2, 4),
    (1, 2, 3, 5, 8),
    (4, 2, 1),
    (8, 5, 3, 2, 1),
    (4, 4, 3, 2, 2, 1),
    (1, 2, 3, 3, 2, 1),
)
"""Small first: the first message leaves early. Small last: little is left to do after the last message."""

MOST_OPS, FEW_OPS = 20_000, 600
"""Of a rank: finer cuts are not considered; where a call waits for the choice, fewer are."""

CUTS_OF_USERS = (1, 4)
"""Of schedules that users register: each plan is proven first."""

MOST_TOGETHER = 64
"""With more ranks than this nobody sends to all others at once, only one after the other: walks of those in which
ranks do not do the same (a broadcast, sums by rate) would take minutes."""


def window_together(size: int) -> int | None:
    """Sends in flight where a rank has something for each other one, and nobody says how many."""
    return 1 if size > MOST_TOGETHER else None


CUT_IN_STEPS = ("sliced", "sliced_p2p")
"""Those that multiply one slice of every shard at a time: fewer calls than a piece for each rank."""

WINDOWS = (None, 1, 2, 4)
"""Sends of a rank in flight at once, that are tried; None: all of them."""


class Candidate(NamedTuple):
    """A schedule with its parameters."""

    schedule: str
    slices: Slices = 1
    window: int | None = None
    rows: tuple[int, ...] | None = None  # that each rank sums, of an all-reduce (None: as even as can be)
    order: tuple[tuple[int, ...], ...] = ()  # in which each rank sends to the others, if not that of the schedule

    def __str__(self) -> str:
        cut = "" if self.schedule in ("unfused", "unfused_p2p", "exchange") else f", {slices_in_words(self.slices)}"
        window = "" if self.window is None else f", window {self.window}"
        rows = "" if self.rows is None else ", sums by rate"
        order = f", peers in order {crc32(str(self.order).encode()) & 0xFF:02x}" if self.order else ""  # there are two
        return f"{self.schedule}{cut}{window}{rows}{order}"

    def anywhere(self, size: int) -> bool:
        """Whether a call of so many ranks can take it, which knows its problem, and of the rows only its own."""
        has_its_window = self.window is None or (self.schedule in STRAIGHT and self.window == window_together(size))
        return has_its_window and self.rows is None and not self.order


def is_its_own(problem: Problem, schedule: str, slices: Slices) -> bool:
    """Whether there is such a schedule, and no other candidate is the same.

    Between two ranks a ring is `direct`, and so is half each way round, in twice as many equal slices.
    """
    again = schedule == "ring" or (schedule == "bidirectional" and slices in EVEN[:-1])
    return is_available(problem, schedule) and not (again and problem.size == 2)


UNFUSED = (Candidate("unfused"), Candidate("unfused_p2p"), Candidate("unfused_p2p", window=1))


def candidates(problem: Problem, machine: Machine, most_ops: int = MOST_OPS) -> Iterator[Candidate]:
    """Every schedule that the problem has, in the cuts and windows that may matter."""
    names, size = available(problem), problem.size
    together = size <= MOST_TOGETHER
    walkable = together or problem.moves != "broadcast"
    unfused = (c for c in UNFUSED if c.schedule in names and (walkable or c.schedule == "unfused"))
    yield from (c for c in unfused if c.schedule == "unfused" or (together if c.window is None else size > 2))
    if size == 1:
        return
    if "exchange" in names and together:
        yield Candidate("exchange")
    computes = bool(problem.weights or problem.gradients)
    for name in CUT_IN_STEPS if computes else ():
        if name in names and (together or name == "sliced"):
            yield from (Candidate(name, n) for n in (2, 4, 8) if name == "sliced" or 3 * size * n <= most_ops)
    groups = [f"hierarchical({level.ranks})" for level in machine.levels]
    cuts = (*EVEN, *UNEVEN) if computes else EVEN
    for name in REGISTERED:
        if name in names:
            yield from (Candidate(name, n) for n in CUTS_OF_USERS if n == 1 or 3 * size * n <= min(most_ops, FEW_OPS))
    for name in ("direct", "ring", "bidirectional", *groups) if walkable else ():
        for slices in cuts:
            if not is_its_own(problem, name, slices) or to_one_peer(problem, name, slices) > MOST_MESSAGES:
                continue
            if 3 * size * len(shares_of(name, slices)) > most_ops and slices != 1:
                continue
            if name != "direct" or together:
                yield Candidate(name, slices)
            if name == "direct" and size > 2:
                in_step = problem.moves == "all_to_all" and not computes
                yield Candidate(IN_STEP, slices) if in_step else Candidate(name, slices, 1)


def paced(best: Candidate, size: int) -> Iterator[Candidate]:
    """The same with more or fewer sends in flight, where ranks send to several others."""
    if best.schedule in STRAIGHT and best not in UNFUSED and best.rows is None:
        windows = WINDOWS if size <= MOST_TOGETHER else WINDOWS[1:]
        yield from (best._replace(window=w) for w in windows if w != best.window and (w or 0) < size - 1)


EXACT_UNITS, MOST_PIECES = 16, 6


def exact_cuts(problem: Problem, sizes: Sizes, machine: Machine, most_ops: int = MOST_OPS) -> Iterator[Candidate]:
    """The best slices of all (`fompi.model.flow_shop`): between two ranks, and of every shard by the library.

    A sum multiplies a slice and sends it, and multiplies its own rows at the end. A gather is the same backwards. An
    all-reduce multiplies a slice of every shard, which crosses to be summed and crosses again when it is. The library
    sums or gathers a slice of every shard, behind the product of the next: by calls of their own, and in the groups in
    which one kernel would announce them.
    """
    size = problem.size
    if size == 1 or not (problem.weights or problem.gradients):
        return
    unit = max(rows_worked(problem, sizes, rank) for rank in range(size)) / size / EXACT_UNITS
    if unit < 1:
        return
    link, nbytes = machine.link(0, size - 1), unit * max(row_nbytes(problem))

    def product(n: int) -> float:
        return call_seconds(problem, machine, n * unit)

    def crossing(n: int) -> float:
        return link.seconds(n * nbytes)

    def collective(n: int) -> float:
        return machine.native(problem.moves, native_nbytes(problem, n * size * unit), size, behind=True, again=True)

    def slice_of_all(n: int) -> float:
        return call_seconds(problem, machine, n * size * unit, size)

    if problem.moves == "all_reduce":
        found = pieces(EXACT_UNITS, slice_of_all, lambda n: 2 * (size - 1) * crossing(n), 0.0, MOST_PIECES)
    else:
        found = pieces(EXACT_UNITS, product, crossing, product(EXACT_UNITS), MOST_PIECES)
    shares = _shares(problem, found)
    for name in ("direct", "ring") if 3 * size * len(found.sizes) <= most_ops else ():
        if is_its_own(problem, name, shares) and to_one_peer(problem, name, shares) <= MOST_MESSAGES:
            yield Candidate(name, shares, window_together(size) if name == "direct" else None)
    if not is_available(problem, "sliced"):
        return
    each_call = pieces(EXACT_UNITS, slice_of_all, collective, 0.0, MOST_PIECES)
    one_call = announced([slice_of_all(n + 1) for n in range(EXACT_UNITS)], collective)
    yield from dict.fromkeys(
        Candidate("sliced", _shares(problem, cut)) for cut in (each_call, one_call) if len(cut.sizes) > 1
    )


def _shares(problem: Problem, found: Groups) -> Slices:
    """As slices, in the order in which the problem takes them."""
    cut = found.sizes if problem.multiplies_first else found.sizes[::-1]
    each = gcd(*cut)
    return len(cut) if len(set(cut)) == 1 else tuple(n // each for n in cut)


ORDERED_SLICES, MOST_ORDERED = (1, 4), 16
"""With more ranks no order of peers is tried."""


def in_order(problem: Problem, sizes: Sizes, machine: Machine) -> Iterator[Candidate]:
    """Direct exchanges in which each rank takes the others by Johnson's rule, or those behind slow links first.

    Only where pieces or links differ, by more than a row.
    """
    size = problem.size
    if not 2 < size <= MOST_ORDERED or problem.moves == "broadcast":
        return
    if not machine.levels and machine.slowest(size) == 1.0 and _alike(sizes):
        return
    every = [[_jobs(problem, sizes, machine, rank, dest) for dest in _round(problem, rank)] for rank in range(size)]
    found = dict.fromkeys(
        tuple(tuple(_round(problem, rank)[i] for i in rule(jobs)) for rank, jobs in enumerate(every))
        for rule in (lambda jobs: johnson([job for job, _ in jobs]), _slowest_first)
    )
    found.pop(tuple(tuple(_round(problem, rank)) for rank in range(size)), None)
    for order, slices in product(found, ORDERED_SLICES):
        yield Candidate("direct", slices, None, None, order)
        yield Candidate("direct", slices, 1, None, order)


def _alike(sizes: Sizes) -> bool:
    """Whether no two pieces for other ranks differ by more than a row."""
    rows = [n for i, row in enumerate(sizes.pairs) for j, n in enumerate(row) if i != j] or sizes.rows
    return max(rows) - min(rows) <= 1


def _round(problem: Problem, rank: int) -> Sequence[int]:
    """The other ranks, in the order of the schedule."""
    way = -1 if problem.moves in ("reduce_scatter", "all_reduce") else 1
    return Workspace(rank, problem.size, 1).dests(way)


def _jobs(problem: Problem, sizes: Sizes, machine: Machine, rank: int, dest: int) -> tuple[Job, float]:
    """What `rank` makes for `dest`, and sends; or sends, and `dest` works on. And how slow the link is."""
    if sizes.pairs:
        rows = float(sizes.pairs[rank][dest])
    elif problem.moves == "all_gather":
        rows = float(sizes.rows[rank])
    elif problem.moves == "all_reduce":
        rows = sum(sizes.rows) / problem.size
    else:
        rows = float(sizes.rows[dest])
    link = machine.link(rank, dest)
    wire = link.seconds(rows * max(row_nbytes(problem)))
    computes = bool(problem.weights or problem.gradients) and rows
    kernel = call_seconds(problem, machine, rows) if computes else 0.0
    return Job(kernel, wire) if problem.multiplies_first else Job(wire, kernel), link.seconds(1 << 20)


def _slowest_first(jobs: Sequence[tuple[Job, float]]) -> list[int]:
    return sorted(range(len(jobs)), key=lambda i: -jobs[i][1])


RATED_SLICES, MOST_PIECES_RATED = (4, 16, 32, 64), 4096
"""Sums come back to the slow rank from its first slice on, until after its last: fine ones, if the plan stays small."""


def by_rate(problem: Problem, sizes: Sizes, machine: Machine) -> Iterator[Candidate]:
    """All-reduces in which a rank with a slow link sums fewer rows than others: who owns them is the plan's choice.

    As many sends in flight as a slice has: more fill the buffers of the slow link, and then all of them lose packets.
    """
    size, total = problem.size, sum(sizes.rows)
    rates = [machine.rate(rank) for rank in range(size)]
    if problem.moves != "all_reduce" or not 2 < size <= MOST_TOGETHER or min(rates) == max(rates) or not total:
        return
    rows = owned(total, rates)
    for slices in RATED_SLICES:
        if slices <= 16 or slices * size * size <= MOST_PIECES_RATED:
            yield Candidate("direct", slices, size - 1, rows)


def owned(total: int, rates: Sequence[float]) -> tuple[int, ...]:
    """Rows for each rank to sum, so that the slowest port of a direct all-reduce is done as early as can be.

    Of `total` rows a rank that owns n sends total - n to be summed and (size - 1) n summed ones, and receives as
    much: it takes (total + (size - 2) n) / rate.
    """
    size = len(rates)
    low, high = total / max(rates), (size - 1) * total / min(rates)
    for _ in range(60):
        seconds = (low + high) / 2
        if sum(max(0.0, seconds * rate - total) for rate in rates) / (size - 2) < total:
            low = seconds
        else:
            high = seconds
    shares = [round(1e6 * max(0.0, high * rate - total) / (size - 2) / total) for rate in rates]
    return tuple(cut(total, shares))


def candidates_without_machine(problem: Problem) -> Iterator[Candidate]:
    """Some of every kind, the same for all machines."""
    computes = bool(problem.weights or problem.gradients)
    for name, cuts in (
        ("unfused", (1,)),
        ("unfused_p2p", (1,)),
        ("exchange", (1,)),
        ("sliced", (4,) if computes else ()),
        ("direct", (1, 2, 4, 8) if problem.moves == "all_to_all" else (1, 2, 4)),
        ("ring", (1, 4)),
        (IN_STEP, (8, 32)),
        *((name, (1,)) for name in REGISTERED),
    ):
        yield from (Candidate(name, slices) for slices in cuts if is_its_own(problem, name, slices))
