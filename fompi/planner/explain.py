"""Which schedule is the best for a problem on a machine, and why.

`explain` estimates all candidates by a formula, simulates the best of them event by event, and sorts them by time. An
`Explanation` says for each one what is hidden, what is exposed, and which chunk the kernels waited for the longest. It
compares the best one with the lower bound and with the best one without overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

from fompi.base import tables
from fompi.base.errors import PlanError, meant
from fompi.base.layout import Sizes
from fompi.model.lower_bound import LowerBound, lower_bound
from fompi.model.machine import Machine
from fompi.model.simulate import representatives
from fompi.planner.candidates import (
    MOST_OPS,
    UNFUSED,
    Candidate,
    all_reduces_by_rate,
    announcing,
    candidates,
    exact_cuts,
    other_windows,
)
from fompi.planner.estimate import estimate
from fompi.plans.meaning import ROOTED
from fompi.plans.plan import Plan
from fompi.plans.problems import Problem, without_wire
from fompi.plans.staged import staged
from fompi.plans.verify import flaw
from fompi.schedules.registry import REGISTERED, roundings, shares_of, write
from fompi.traces.proof import Overlap, Proof, RankDependencies, overlaps, prove
from fompi.traces.timeline import timeline, timelines
from fompi.traces.trace import Trace

LEAST_GAIN = 1.05
"""A wire that makes the best plan less than this many times as fast gains nothing: its results are not exact."""

SIMULATED = 6
"""How many of the best candidates by estimate are simulated, besides those without overlap."""

MOST_EVENTS = 20_000
"""If no call waits for the answer, further candidates are simulated until their traces have this many events."""

CALL_RANKS = 32
"""While a call waits, a candidate is simulated on this many ranks at most."""

ESTIMATE_FACTOR = 1.5
"""The estimate of a candidate that may be the best is within this factor of its simulated time.

While a call waits, a candidate whose estimate is further behind the best simulated time is not simulated.
"""

SHOWN_TIMES = 10
"""How many times the text lists. Candidates with the same time share a line."""

SHOWN_OVERLAPS = 3
"""How many overlaps of the best candidate the text lists."""

COLUMNS = ("candidate", "ms", "bound/time", "compute", "hidden", "exposed", "why")
"""The heads of the table."""

RINGS, ALIKE = ("ring", "bidirectional"), 0.005
"""Predicted times that differ by at most this share count as equal.

Losses and polls, which the model does not know, grow with the number of slices.
"""


class Judged(NamedTuple):
    """A candidate and its estimated time. If it was simulated: its trace, and the proof of the rank that ends last."""

    candidate: Candidate
    estimate: float
    proof: Proof | None = None
    trace: Trace | None = None

    @property
    def seconds(self) -> float:
        """The simulated time, else the estimate."""
        return self.estimate if self.trace is None else self.trace.seconds

    @property
    def shown(self) -> str:
        """The time in ms as it is printed. A ~ marks an estimate."""
        return f"{'~' if self.trace is None else ''}{1e3 * self.seconds:.3f}"

    def __repr__(self) -> str:
        return f"Judged({self.candidate}, {self.shown} ms)"


@dataclass(frozen=True)
class Explanation:
    """All candidates for a problem on a machine: `judged`, the best first. The simulated ones come before the others.

    `lower_bound` is that of the time. `without_wire` is the best candidate if messages carried elements as they are
    (None: they do). `refused` are schedules of users that are wrong here, and why. `at(rank)` is the
    problem of each rank, if the problems differ in columns that are not sent.
    """

    problem: Problem
    sizes: Sizes
    machine: Machine
    lower_bound: LowerBound
    judged: tuple[Judged, ...]
    refused: tuple[tuple[Candidate, str], ...] = ()
    at: Callable[[int], Problem] | None = field(default=None, compare=False)
    without_wire: Judged | None = None

    @property
    def winner(self) -> Judged:
        """The best candidate."""
        return self.judged[0]

    def has(self, candidate: Candidate) -> bool:
        """True if this candidate is in `judged`."""
        return any(judged.candidate == candidate for judged in self.judged)

    @property
    def gap(self) -> float:
        """By which share the winner takes longer than the lower bound. 0.05 is 5 %."""
        return self.winner.seconds / self.lower_bound.seconds - 1 if self.lower_bound.seconds else 0.0

    @property
    def plan(self) -> Plan:
        """The Plan of the winner."""
        return self.plan_of(self.winner.candidate)

    def plan_of(self, candidate: Candidate) -> Plan:
        """The Plan of a candidate."""
        return _as_run(_plan(self.problem, self.sizes, candidate, self.at), self.machine)

    @property
    def overlaps(self) -> list[tuple[int, Overlap]]:
        """What the winner hides behind what, with the number of the rank that ends last (`traces.proof.overlaps`)."""
        proof, trace = self.winner.proof, self.winner.trace
        if proof is None or trace is None:
            return []
        return [(proof.rank, overlap) for overlap in overlaps(trace, RankDependencies(self.plan, proof.rank))]

    def timeline(self, width: int = 100) -> str:
        """The timeline of the winner, as text (`fompi.timeline`)."""
        assert self.winner.trace is not None
        return timeline(self.winner.trace, width)

    @property
    def unfused(self) -> Judged:
        """The best candidate without overlap."""
        return next(judged for judged in self.judged if judged.candidate in UNFUSED)

    def plot(self) -> str:
        """Timelines of the best candidate without overlap and of the winner, as SVG (`fompi.timelines`)."""
        pair = (self.unfused, self.winner)
        return timelines({str(judged.candidate): judged.trace for judged in pair if judged.trace is not None})

    def __repr__(self) -> str:
        return f"Explanation({self.problem} on {self.machine.name}, {len(self.judged)} candidates, {self.winner!r})"

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return tables.html(*self.parts())

    def text(self, most: int | None = SHOWN_TIMES) -> str:
        """The verdict, a table of the `most` best times (None: all), then what the best candidate hides."""
        return tables.text(*self.parts(most))

    def parts(self, most: int | None = SHOWN_TIMES) -> list[str | tables.Table]:
        """The lines and the table of `text`."""
        return [*self.verdict(), tables.Table(COLUMNS, self.rows(most), COLUMNS[1:-1]), *self.remarks(most)]

    def verdict(self) -> list[str]:
        """The lines above the table: the problem, the best candidate, the lower bound."""
        head = f"{self.problem}, {self.problem.size} rank{'s' * (self.problem.size > 1)}, on {self.machine.name}"
        best, unfused = self.winner, self.unfused
        gain = f"{unfused.seconds / best.seconds if best.seconds else 1.0:.2f}x as fast as {unfused.candidate}"
        if best.candidate in UNFUSED:
            gain = "no candidate with overlap is faster"
        fastest = min((judged for judged in self.judged if judged.trace is not None), key=_seconds, default=best)
        if fastest.shown != best.shown:
            terms = roundings(self.problem, fastest.candidate.schedule)
            why = f"rounds a term up to {terms} times" if self.problem.wire else "has more streams at the slow port"
            gain += f"; {fastest.candidate} takes {1e3 * fastest.seconds:.3f} ms, but {why}"
        above = f"{100 * max(0.0, self.gap):.1f} % above the bound"
        return [
            head,
            f"best: {best.candidate}, {1e3 * best.seconds:.3f} ms, {above}, {gain}",
            f"lower bound {1e3 * self.lower_bound.seconds:.3f} ms: {self.lower_bound.what}",
            *self._gain_of_wire(),
        ]

    def _gain_of_wire(self) -> list[str]:
        if self.without_wire is None:
            return []
        plain, wire = self.without_wire, self.problem.wire
        gain = plain.seconds / self.winner.seconds if self.winner.seconds else 1.0
        words = f"{wire} is {gain:.2f}x as fast" if gain >= LEAST_GAIN else f"{wire} gains nothing here ({gain:.2f}x)"
        times = roundings(self.problem, self.winner.candidate.schedule)
        often = f"a term is rounded {times} time{'s' * (times > 1)} at most"
        return [f"without a wire {plain.candidate}, {1e3 * plain.seconds:.3f} ms: {words}; {often}"]

    def rows(self, most: int | None = SHOWN_TIMES) -> list[tuple[str, ...]]:
        """The cells of the table, below COLUMNS. Times are in ms; a ~ marks an estimate."""
        return [self._row(alike) for alike in self._by_time()[:most]]

    def remarks(self, most: int | None = SHOWN_TIMES) -> list[str]:
        """The lines below the table."""
        lines = []
        if left := sum(map(len, self._by_time()[most:] if most is not None else ())):
            lines.append(f"... and {left} more candidate{'s' * (left > 1)}")
        lines += [f"{candidate}: refused: {why}" for candidate, why in self.refused]
        lines += [f"hidden on rank {rank}: {overlap}" for rank, overlap in self.overlaps[:SHOWN_OVERLAPS]]
        if self.machine.collectives and self.machine.collectives_ranks not in (0, self.problem.size):
            measured = f"{self.machine.collectives_ranks} ranks, not on {self.problem.size}"
            lines.append(f"the library's collectives were measured on {measured}: a formula gives their times here")
        return lines

    def _by_time(self) -> list[list[Judged]]:
        """The candidates, those with the same printed time together, the best first. Schedules of users are apart."""

        def line(judged: Judged) -> tuple[str, str]:
            schedule = judged.candidate.schedule
            return judged.shown, schedule if schedule in REGISTERED else ""

        return [list(alike) for _, alike in groupby(self.judged, line)]

    def _row(self, alike: list[Judged]) -> tuple[str, ...]:
        first, proof = alike[0], alike[0].proof
        share = f"{self.lower_bound.seconds / first.seconds:.3f}" if first.seconds else ""
        more = [f"{len(alike) - 1} more with the same time"] * (len(alike) > 1)
        times, why = ["", "", ""], ["estimated, not simulated"]
        if proof is not None:
            times = [f"{1e3 * seconds:.3f}" for seconds in (proof.kernels, proof.hidden, proof.exposed)]
            why = [*map(str, proof.waits[:1])]
        return (str(first.candidate), first.shown, share, *times, "; ".join([*why, *more]))


def explain(
    problem: Problem,
    sizes: Sizes,
    machine: Machine,
    at: Callable[[int], Problem] | None = None,
    simulated: int = SIMULATED,
    most_ops: int = MOST_OPS,
    for_call: bool = False,
    events: int = 0,
    schedules: Sequence[str] = (),
) -> Explanation:
    """All candidates for `problem` on `machine`, the best first.

    These are simulated: the `simulated` best by estimate; the candidates without overlap; the candidates with rows by
    rate, which the formula does not distinguish; then more, the best by estimate first, until the
    traces have `events` events. If the best one is direct, it is simulated with other windows too.

    `for_call` is for a call that waits for the choice. Then only candidates that a call can take are listed, none is
    simulated whose estimate is far behind, and no other windows are simulated.

    `at(rank)` is the problem of each rank, if the problems differ in columns that are not sent. `schedules` are the
    only ones that are compared, besides those without overlap. Raises PlanError if one of them is no candidate.
    """
    least = lower_bound(problem, sizes, machine, at)
    listed = list(
        dict.fromkeys([*candidates(problem, machine, most_ops), *exact_cuts(problem, sizes, machine, most_ops)])
    )
    listed += all_reduces_by_rate(problem, sizes, machine)
    listed += dict.fromkeys(announcing(problem, sizes, machine, listed))
    if for_call:
        listed = [candidate for candidate in listed if candidate.fits_call(problem.size)]
    if schedules:
        names = sorted({candidate.schedule for candidate in listed})
        if missing := [name for name in schedules if name not in names]:
            raise PlanError(
                f"{missing[0]} is no candidate here{meant(missing[0], names)}; the candidates are {', '.join(names)}"
            )
        listed = [candidate for candidate in listed if candidate.schedule in schedules or candidate in UNFUSED]
    flaws = {c: flaw(partial(_plan, problem, sizes, c, at)) for c in listed if c.schedule in REGISTERED}
    refused = tuple((c, f"{type(error).__name__}: {error}") for c, error in flaws.items() if error is not None)
    usable = [c for c in listed if flaws.get(c) is None]
    estimated = [Judged(c, max(least.seconds, estimate(problem, sizes, machine, c))) for c in usable]
    estimated.sort(key=_seconds)
    selected = [judged for judged in estimated if not _is_always_simulated(judged.candidate)][:simulated]
    selected += [judged for judged in estimated if _is_always_simulated(judged.candidate)]
    done: list[Judged] = []
    for judged in sorted(selected, key=_seconds) if for_call else selected:
        if not (for_call and done and judged.seconds > ESTIMATE_FACTOR * min(map(_seconds, done))):
            done.append((_scaled if for_call else _simulated)(problem, sizes, machine, at, judged))
    for judged in estimated:
        if sum(len(other.trace.events) for other in done if other.trace is not None) >= events:
            break
        if judged not in selected:
            done.append(_simulated(problem, sizes, machine, at, judged))
    done = _best_first(done, problem, machine)
    if not for_call and done:
        for candidate in other_windows(done[0].candidate, problem.size):
            if all(judged.candidate != candidate for judged in done):
                done.append(_simulated(problem, sizes, machine, at, Judged(candidate, done[0].estimate)))
        done = _best_first(done, problem, machine)
    known = {judged.candidate for judged in done}
    others = [judged for judged in estimated if judged.candidate not in known]
    plain = None
    if problem.wire and not for_call:
        without = None if at is None else lambda rank: without_wire(at(rank))
        plain = explain(without_wire(problem), sizes, machine, without, simulated, most_ops, events=events).winner
    return Explanation(problem, sizes, machine, least, (*done, *others), refused, at, plain)


def _is_always_simulated(candidate: Candidate) -> bool:
    """True for candidates without overlap, and for those that the formula does not distinguish."""
    return candidate in UNFUSED or candidate.rows is not None


def _plan(problem: Problem, sizes: Sizes, candidate: Candidate, at: Callable[[int], Problem] | None) -> Plan:
    schedule, slices, window, rows, _ = candidate
    return write(problem, schedule, slices, sizes if rows is None else Sizes(rows), window, at)


def _as_run(plan: Plan, machine: Machine) -> Plan:
    """The plan as ranks with devices run it, where messages go through host memory."""
    has_staged = machine.staged or machine.staged_below
    return staged(plan, machine.is_staged, machine.staged_below) if has_staged else plan


def _seconds(judged: Judged) -> float:
    return judged.seconds


def _best_first(simulated: Iterable[Judged], problem: Problem, machine: Machine) -> list[Judged]:
    """Sorted by time, with one exception: for a plain collective with a slow rank, a ring may come first.

    If `direct` or a ring is the fastest, the ring with the fewest slices among those that are about as fast comes
    first. One stream in and one stream out keep the slow port busy, and no two streams meet there. With a wire, the one
    with the fewest roundings comes first among those that are about as fast.
    """
    fastest_first = sorted(simulated, key=_seconds)
    if fastest_first and problem.wire:
        alike = [judged for judged in fastest_first if judged.seconds <= LEAST_GAIN * fastest_first[0].seconds]
        best = min(alike, key=lambda judged: roundings(problem, judged.candidate.schedule))
        return sorted(fastest_first, key=lambda judged: judged is not best)
    if not fastest_first or not machine.rates or problem.weights or problem.gradients:
        return fastest_first
    best = fastest_first[0]
    if best.candidate.schedule in ("direct", *RINGS):
        alike = [judged for judged in fastest_first if judged.seconds <= (1 + ALIKE) * best.seconds]
        rings = [judged for judged in alike if judged.candidate.schedule in RINGS]
        best = min(rings, key=lambda judged: len(shares_of(*judged.candidate[:2])), default=best)
    return sorted(fastest_first, key=lambda judged: judged is not best)


def _scaled(
    problem: Problem, sizes: Sizes, machine: Machine, at: Callable[[int], Problem] | None, judged: Judged
) -> Judged:
    """A candidate simulated on the first CALL_RANKS ranks, with the time that the formula adds for the others.

    It is simulated on all ranks if they are fewer, or differ, if groups of ranks are as large, or if the library moves
    the rows.
    """
    rows, few = sizes.rows[:CALL_RANKS], CALL_RANKS
    dealt = problem.columns or problem.experts or problem.order or problem.operation in ROOTED
    differ = len({*sizes.rows}) > 1 or dealt
    wide = any(few < 2 * level.ranks < 2 * problem.size for level in machine.levels)
    by_library = judged.candidate.schedule in ("unfused", "sliced")
    if by_library or problem.size <= few or problem.size % few or differ or wide or not rows:
        return _simulated(problem, sizes, machine, at, judged)
    part, its = replace(problem, size=few), Sizes(rows)
    known = _simulated(part, its, machine, None, judged)
    seconds = known.seconds * judged.estimate / estimate(part, its, machine, judged.candidate)
    return judged._replace(estimate=seconds)


def _simulated(
    problem: Problem, sizes: Sizes, machine: Machine, at: Callable[[int], Problem] | None, judged: Judged
) -> Judged:
    plan = _as_run(_plan(problem, sizes, judged.candidate, at), machine)
    trace = representatives(plan, machine, announces=judged.candidate.announced)
    last = max(trace.events, key=lambda event: event.end, default=None)
    proof = prove(trace, RankDependencies(plan, last.rank)) if last is not None else None
    return judged._replace(proof=proof, trace=trace)
