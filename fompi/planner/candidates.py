"""The candidates of a problem: its schedules, with the slices and windows that are worth comparing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, gcd, prod
from typing import NamedTuple

from fompi.base.layout import Sizes, Slices, slices_in_words
from fompi.model.flow_shop import Groups, announced, pieces
from fompi.model.lower_bound import call_seconds, library_nbytes, most_rows_worked, row_nbytes
from fompi.model.machine import Machine
from fompi.planner.shares import Phase, deal
from fompi.plans.plan import MOST_MESSAGES, PAIRWISE
from fompi.plans.problems import Problem
from fompi.schedules.registry import (
    DIRECT_FAMILY,
    REGISTERED,
    WHOLE,
    available,
    is_available,
    messages_per_peer,
    shares_of,
)

EVEN: tuple[Slices, ...] = (1, 2, 4, 8, 16)
"""Numbers of equal slices."""

UNEVEN: tuple[Slices, ...] = (
    (1, 2, 4),
    (1, 2, 3, 5, 8),
    (4, 2, 1),
    (8, 5, 3, 2, 1),
    (4, 4, 3, 2, 2, 1),
    (1, 2, 3, 3, 2, 1),
)
"""Relative sizes of unequal slices.

If the first slice is small, the first message leaves early. If the last slice is small, little work remains after the
last message.
"""

MOST_OPS, FEW_OPS = 20_000, 600
"""A candidate with more ops per rank than MOST_OPS is left out. While a call waits for the choice, FEW_OPS holds."""

USER_SLICES = (1, 4)
"""Slices of schedules that users register. There are few, because each plan is verified first."""

MOST_PEERS_AT_ONCE = 64
"""With more ranks than this, no rank sends to all other ranks at once, only to one after the other.

If the ranks do not all do the same (a broadcast, rows by rate), it would take minutes to simulate such plans.
"""


def direct_window(size: int) -> int | None:
    """The window of direct messages between `size` ranks if nobody chooses one. None: no limit."""
    return 1 if size > MOST_PEERS_AT_ONCE else None


SLICE_OF_ALL_SHARDS = ("sliced", "sliced_p2p")
"""Schedules that multiply one slice of all shards in one kernel call. They need fewer calls than one for each rank."""

WINDOWS = (None, 1, 2, 4)
"""The windows that are compared. A window is the number of sends of a rank in flight at once. None: no limit."""


class Candidate(NamedTuple):
    """A schedule with its parameters."""

    schedule: str
    slices: Slices = 1
    window: int | None = None
    rows: tuple[int, ...] | None = None  # how many rows each rank sums in an all-reduce; None: as even as possible
    announced: bool = False  # one kernel of a device computes the products, and announces them while it runs

    def __str__(self) -> str:
        cut = "" if self.schedule in ("unfused", "unfused_p2p", *WHOLE) else f", {slices_in_words(self.slices)}"
        window = "" if self.window is None else f", window {self.window}"
        rows = "" if self.rows is None else ", rows by rate"
        return f"{self.schedule}{cut}{window}{rows}{', announced' * self.announced}"

    def fits_call(self, size: int) -> bool:
        """True if a call of `size` ranks can take this candidate. A bound plan can take every candidate.

        A rank in a call knows the problem, but only its own rows. So a call has even rows, and the window of its
        schedule. Its tensors may lie elsewhere each time, so no kernel announces its products.
        """
        default_window = self.schedule in DIRECT_FAMILY and self.window == direct_window(size)
        is_usual = self.rows is None and not self.announced
        return (self.window is None or default_window) and is_usual


def is_distinct(problem: Problem, schedule: str, slices: Slices) -> bool:
    """True if the problem has this schedule, and no other candidate is the same.

    Between two ranks `ring` is the same as `direct`. There `bidirectional` is the same as `direct` with twice as many
    equal slices.
    """
    repeated = schedule == "ring" or (schedule == "bidirectional" and slices in EVEN[:-1])
    return is_available(problem, schedule) and not (repeated and problem.size == 2)


UNFUSED = (Candidate("unfused"), Candidate("unfused_p2p"), Candidate("unfused_p2p", window=1))
"""The candidates without overlap."""


def candidates(problem: Problem, machine: Machine, most_ops: int = MOST_OPS) -> Iterator[Candidate]:
    """Every schedule of the problem, with the slices and windows from the lists above."""
    names, size = available(problem), problem.size
    at_once = size <= MOST_PEERS_AT_ONCE
    can_simulate = at_once or problem.moves != "broadcast"
    unfused = (c for c in UNFUSED if c.schedule in names and (can_simulate or c.schedule == "unfused"))
    yield from (c for c in unfused if c.schedule == "unfused" or (at_once if c.window is None else size > 2))
    if size == 1:
        return
    if "exchange" in names and at_once:
        yield Candidate("exchange")
    if "doubling" in names and size > 2:
        yield Candidate("doubling")
    computes = bool(problem.weights or problem.gradients)
    for name in SLICE_OF_ALL_SHARDS if computes else ():
        if name in names and (at_once or name == "sliced"):
            yield from (Candidate(name, n) for n in (2, 4, 8) if name == "sliced" or 3 * size * n <= most_ops)
    groups = [f"hierarchical({level.ranks})" for level in machine.levels]
    cuts = (*EVEN, *UNEVEN) if computes else EVEN
    for name in REGISTERED:
        if name in names:
            yield from (Candidate(name, n) for n in USER_SLICES if n == 1 or 3 * size * n <= min(most_ops, FEW_OPS))
    for name in ("direct", "ring", "bidirectional", *groups) if can_simulate else ():
        for slices in cuts:
            if not is_distinct(problem, name, slices) or messages_per_peer(problem, name, slices) > MOST_MESSAGES:
                continue
            if 3 * size * len(shares_of(name, slices)) > most_ops and slices != 1:
                continue
            if name != "direct" or at_once:
                yield Candidate(name, slices)
            if name == "direct" and size > 2:
                pairwise = problem.exchanges and not computes
                yield Candidate(PAIRWISE, slices) if pairwise else Candidate(name, slices, 1)


def announcing(problem: Problem, sizes: Sizes, machine: Machine, listed: Sequence[Candidate]) -> Iterator[Candidate]:
    """Those of the candidates in which one kernel of a device can announce its products, announced.

    On two ranks there is one more: with the best groups of one kernel (`fompi.model.flow_shop.announced`).
    """
    if not machine.announced or problem.size == 1 or not (problem.multiplies_first and problem.weights):
        return
    shard = most_rows_worked(problem, sizes) / problem.size
    yield from (c._replace(announced=True) for c in listed if c not in UNFUSED and c.schedule not in WHOLE)
    if problem.size > 2 or problem.moves == "all_reduce" or shard < EXACT_UNITS:
        return
    unit, link = shard / EXACT_UNITS, machine.link(0, 1)
    done = [machine.poll + call_seconds(problem, machine.announcing, (n + 1) * unit) for n in range(EXACT_UNITS)]
    best = announced(done, lambda n: link.seconds(n * unit * max(row_nbytes(problem))))
    rows = best.sizes
    slices: Slices = len(rows) if len({*rows}) == 1 else tuple(n // gcd(*rows) for n in rows)
    yield Candidate("direct", slices, announced=True)


def other_windows(best: Candidate, size: int) -> Iterator[Candidate]:
    """The candidate `best` with other windows, if its ranks send to several others."""
    if best.schedule in DIRECT_FAMILY and best not in UNFUSED and best.rows is None:
        windows = WINDOWS if size <= MOST_PEERS_AT_ONCE else WINDOWS[1:]
        yield from (best._replace(window=w) for w in windows if w != best.window and (w or 0) < size - 1)


EXACT_UNITS, MOST_PIECES = 16, 6
"""`exact_cuts` divides a shard into this many units, and cuts it into at most this many pieces.

The time of the exact search grows quickly with both.
"""


def exact_cuts(problem: Problem, sizes: Sizes, machine: Machine, most_ops: int = MOST_OPS) -> Iterator[Candidate]:
    """Candidates whose slices are the exact answer of a small scheduling problem (`fompi.model.flow_shop`).

    `direct` and `ring` get the slices that are the best between two ranks. A reduce-scatter multiplies a slice and then
    sends it; it multiplies its own rows at the end. An all-gather is the reverse. An all-reduce multiplies a slice of
    every shard. Its terms cross the link to be summed, and the sums cross the link again.

    `sliced` gets two cuts, by the curves of the library's collectives behind kernels. In one cut each slice is a kernel
    call of its own. In the other one a single kernel would announce the slices while it runs.

    On a machine that computes in waves there are the same candidates with slices of whole waves.
    """
    if problem.size == 1 or not (problem.weights or problem.gradients):
        return
    shard = most_rows_worked(problem, sizes) / problem.size
    if shard < EXACT_UNITS:
        return
    found = dict.fromkeys(_exact_cuts(problem, machine, shard, shard / EXACT_UNITS, most_ops))
    elements = prod(problem.row[:-1]) * max((weight.columns for weight in problem.weights), default=0)  # in a row
    rows = machine.wave // elements if elements else 0
    if rows and 1 < ceil(shard / rows) <= EXACT_UNITS:
        found |= dict.fromkeys(_exact_cuts(problem, machine, ceil(shard), rows, most_ops))
    yield from found


def _exact_cuts(problem: Problem, machine: Machine, shard: float, unit: float, most_ops: int) -> Iterator[Candidate]:
    """The exact cuts of `shard` rows, in units of `unit` rows. The last unit may have fewer rows."""
    size, units = problem.size, ceil(shard / unit)
    link, nbytes = machine.link(0, size - 1), unit * max(row_nbytes(problem))

    def slices_of(groups: Groups) -> Slices:
        """The groups as slices, in the order in which the problem takes them."""
        rest = round(units * unit - shard)
        rows = [n * round(unit) for n in groups.sizes] if rest else [*groups.sizes]
        rows[-1] -= rest
        rows = rows if problem.multiplies_first else rows[::-1]
        return len(rows) if len(set(rows)) == 1 else tuple(n // gcd(*rows) for n in rows)

    def product(n: int) -> float:
        return call_seconds(problem, machine, n * unit)

    def crossing(n: int) -> float:
        return link.seconds(n * nbytes)

    def collective(n: int) -> float:
        return machine.library(problem.moves, library_nbytes(problem, n * size * unit), size, behind=True, again=True)

    def slice_of_all(n: int) -> float:
        return call_seconds(problem, machine, n * size * unit, size)

    if problem.moves == "all_reduce":
        best = pieces(units, slice_of_all, lambda n: 2 * (size - 1) * crossing(n), 0.0, MOST_PIECES)
    else:
        best = pieces(units, product, crossing, product(units), MOST_PIECES)
    slices = slices_of(best)
    for name in ("direct", "ring") if 3 * size * len(best.sizes) <= most_ops else ():
        if is_distinct(problem, name, slices) and messages_per_peer(problem, name, slices) <= MOST_MESSAGES:
            yield Candidate(name, slices, direct_window(size) if name == "direct" else None)
    if not is_available(problem, "sliced"):
        return
    call_per_slice = pieces(units, slice_of_all, collective, 0.0, MOST_PIECES)
    single_call = announced([slice_of_all(n + 1) for n in range(units)], collective)
    yield from (Candidate("sliced", slices_of(cut)) for cut in (call_per_slice, single_call) if len(cut.sizes) > 1)


RATED_SLICES, MOST_RATED_PIECES = (4, 16, 32, 64), 4096
"""The slices of all-reduces with rows by rate. More than 16 slices only if a plan has at most MOST_RATED_PIECES pieces.

The slow rank receives sums from its first slice until after its last slice. So fine slices are good, as long as the
plan stays small. Pieces are slices times the square of the number of ranks.
"""


def all_reduces_by_rate(problem: Problem, sizes: Sizes, machine: Machine) -> Iterator[Candidate]:
    """All-reduces in which ranks with slow links sum fewer rows than others.

    The plan of an all-reduce decides which rank owns a row. A rank has at most as many sends in flight as a slice has.
    More sends fill the buffers of the slow link, and then all streams lose packets.
    """
    size, total = problem.size, sum(sizes.rows)
    rates = [machine.rate(rank) for rank in range(size)]
    if problem.moves != "all_reduce" or not 2 < size <= MOST_PEERS_AT_ONCE or min(rates) == max(rates) or not total:
        return
    rows = rows_by_rate(total, rates)
    for slices in RATED_SLICES:
        if slices <= 16 or slices * size * size <= MOST_RATED_PIECES:
            yield Candidate("direct", slices, size - 1, rows)


def rows_by_rate(total: int, rates: Sequence[float]) -> tuple[int, ...]:
    """How many of `total` rows each rank should sum, so that the slowest port of a direct all-reduce ends earliest.

    `rates` are the shares of its bandwidth that each rank has; there are at least three ranks. A rank that owns n rows
    sends total - n rows to be summed, and (size - 1) n sums. It receives as many. So its port takes
    (total + (size - 2) n) / rate.
    """
    lines = tuple(((total / rate, ((len(rates) - 2) / rate,)),) for rate in rates)
    dealt = deal(Phase(("rows",), (total,), lines, (0.0,)), range(len(rates)))
    return tuple(rows for (rows,) in dealt or [])


def candidates_without_machine(problem: Problem) -> Iterator[Candidate]:
    """Some candidates of every kind. They are the same for all machines."""
    computes = bool(problem.weights or problem.gradients)
    for name, cuts in (
        ("unfused", (1,)),
        ("unfused_p2p", (1,)),
        ("exchange", (1,)),
        ("doubling", (1,) if problem.size > 2 else ()),
        ("sliced", (4,) if computes else ()),
        ("direct", (1, 2, 4, 8) if problem.exchanges else (1, 2, 4)),
        ("ring", (1, 4)),
        (PAIRWISE, (8, 32)),
        *((name, (1,)) for name in REGISTERED),
    ):
        yield from (Candidate(name, slices) for slices in cuts if is_distinct(problem, name, slices))
