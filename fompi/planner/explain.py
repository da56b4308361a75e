"""Which schedule is the best for a problem on a machine, and why.

`explain` lists the candidates, ranks them by closed forms, walks through the best few event by event, and says what
each hides, what stays exposed and for which chunk, and how far from the lower bound it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from fompi.base.layout import Sizes
from fompi.model.bound import Bound, bound
from fompi.model.machine import Machine
from fompi.model.simulate import representatives
from fompi.planner.candidates import MOST_OPS, UNFUSED, Candidate, by_rate, candidates, exact_cuts, in_order, paced
from fompi.planner.estimate import estimate
from fompi.plans.plan import Plan
from fompi.plans.problems import Problem
from fompi.plans.verify import flaw
from fompi.schedules.registry import REGISTERED, shares_of, write
from fompi.traces.proof import Cover, Needs, Proof, covers, prove
from fompi.traces.timeline import timeline, timelines
from fompi.traces.trace import Trace

WALKED = 6
"""So many candidates are walked through, beside those without overlap."""

MOST_EVENTS = 20_000
"""Where nobody waits for the answer, further candidates are walked through until so many events have passed."""

FAR = 1.5
"""So near are closed forms to walks, where it matters."""

COVERS = 3
"""So many of what is hidden behind what are told of the winner."""

RINGS, ALIKE = ("ring", "bidirectional"), 0.005
"""Times that differ by less are the same to a model; what it does not know (losses, polls) grows with the slices."""


class Judged(NamedTuple):
    """A candidate, what a closed form makes of it, and its proof by the walk: of the rank that ends last."""

    candidate: Candidate
    estimate: float
    proof: Proof | None = None
    trace: Trace | None = None

    @property
    def seconds(self) -> float:
        return self.estimate if self.trace is None else self.trace.seconds

    def __repr__(self) -> str:
        return f"Judged({self.candidate}, {'~' if self.trace is None else ''}{1e3 * self.seconds:.3f} ms)"


@dataclass(frozen=True)
class Explanation:
    """Every candidate for a problem, the best first: those that were walked through, then those that were not."""

    problem: Problem
    sizes: Sizes
    machine: Machine
    bound: Bound
    judged: tuple[Judged, ...]
    refused: tuple[tuple[Candidate, str], ...] = ()
    at: Callable[[int], Problem] | None = field(default=None, compare=False)

    @property
    def winner(self) -> Judged:
        return self.judged[0]

    def has(self, candidate: Candidate) -> bool:
        """Whether it is among those that were judged."""
        return any(one.candidate == candidate for one in self.judged)

    @property
    def gap(self) -> float:
        """How much longer than the lower bound the winner takes: 0.05 for a twentieth."""
        return self.winner.seconds / self.bound.seconds - 1 if self.bound.seconds else 0.0

    @property
    def plan(self) -> Plan:
        """That of the winner."""
        return self.plan_of(self.winner.candidate)

    def plan_of(self, candidate: Candidate) -> Plan:
        """That of any candidate."""
        return _plan(self.problem, self.sizes, candidate, self.at)

    @property
    def covers(self) -> list[tuple[int, Cover]]:
        """What the winner hides behind what, on the rank that ends last, and which that is (`traces.proof.covers`)."""
        proof, trace = self.winner.proof, self.winner.trace
        if proof is None or trace is None:
            return []
        return [(proof.rank, cover) for cover in covers(trace, Needs(self.plan, proof.rank))]

    def timeline(self, width: int = 100) -> str:
        """That of the winner, as text (`fompi.timeline`)."""
        assert self.winner.trace is not None
        return timeline(self.winner.trace, width)

    @property
    def unfused(self) -> Judged:
        """The best candidate without overlap."""
        return next(one for one in self.judged if one.candidate in UNFUSED)

    def plot(self) -> str:
        """Timelines of the best without overlap and of the winner, as SVG (`fompi.timelines`)."""
        shown = {str(one.candidate): one.trace for one in (self.unfused, self.winner) if one.trace is not None}
        return timelines(shown)

    def __repr__(self) -> str:
        return f"Explanation({self.problem} on {self.machine.name}, {len(self.judged)} candidates, {self.winner!r})"

    def __str__(self) -> str:
        return self.text()

    def text(self, most: int | None = None) -> str:
        """The table of the `most` best candidates (None: all), then what is said of the best one."""
        head = f"{self.problem}, {self.problem.size} rank{'s' * (self.problem.size > 1)}, on {self.machine.name}"
        rows: list[tuple[str, ...]] = [("candidate", "ms", "bound/it", "compute", "hidden", "exposed", "why")]
        for one in self.judged[:most]:
            share = f"{self.bound.seconds / one.seconds:.3f}" if one.seconds else ""
            if one.proof is None:
                rows.append((str(one.candidate), f"~{1e3 * one.seconds:.3f}", share, "", "", "", "by a closed form"))
                continue
            proof = one.proof
            times = (f"{1e3 * s:.3f}" for s in (proof.kernels, proof.hidden, proof.exposed))
            why = str(proof.waits[0]) if proof.waits else ""
            rows.append((str(one.candidate), f"{1e3 * one.seconds:.3f}", share, *times, why))
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        lines = [head]
        for row in rows:
            numbers = [cell.rjust(width) for cell, width in zip(row[1:6], widths[1:], strict=True)]
            lines.append("  ".join([row[0].ljust(widths[0]), *numbers, row[6]]).rstrip())
        if most is not None and most < len(self.judged):
            lines.append(f"... and {len(self.judged) - most} more")
        lines += [f"{candidate}: refused: {why}" for candidate, why in self.refused]
        lines.append(f"lower bound {1e3 * self.bound.seconds:.3f} ms: {self.bound.what}")
        best = f"best: {self.winner.candidate}, {100 * max(0.0, self.gap):.1f} % above the bound"
        gain = self.unfused.seconds / self.winner.seconds if self.winner.seconds else 1.0
        lines.append(f"{best}, {gain:.2f}x over {self.unfused.candidate}")
        lines += [f"hidden on rank {rank}: {cover}" for rank, cover in self.covers[:COVERS]]
        if self.machine.natives and self.machine.natives_ranks not in (0, self.problem.size):
            measured = f"{self.machine.natives_ranks} ranks, not on {self.problem.size}"
            lines.append(f"the library's collectives were measured on {measured}: a formula takes their place")
        return "\n".join(lines)


def explain(
    problem: Problem,
    sizes: Sizes,
    machine: Machine,
    at: Callable[[int], Problem] | None = None,
    walked: int = WALKED,
    most_ops: int = MOST_OPS,
    hurried: bool = False,
    events: int = 0,
) -> Explanation:
    """All candidates; the `walked` best by the closed forms, and those without overlap, by the event walk; then
    further ones, the best first, until walks had so many `events`.

    `hurried`, where a call waits: only what a call can take (no window, no rows by rate, no order of peers), and no
    walk of those that by the closed form take much longer than another one does by the walk.
    `at(rank)` is the problem of each rank where they differ in columns that do not travel; else all have `problem`.
    """
    least = bound(problem, sizes, machine, at)
    listed = list(
        dict.fromkeys([*candidates(problem, machine, most_ops), *exact_cuts(problem, sizes, machine, most_ops)])
    )
    listed += [*by_rate(problem, sizes, machine), *in_order(problem, sizes, machine)]
    if hurried:
        listed = [one for one in listed if one.anywhere(problem.size)]
    flaws = {c: flaw(partial(_plan, problem, sizes, c, at)) for c in listed if c.schedule in REGISTERED}
    refused = tuple((c, f"{type(wrong).__name__}: {wrong}") for c, wrong in flaws.items() if wrong is not None)
    usable = [c for c in listed if flaws.get(c) is None]
    found = [Judged(c, max(least.seconds, estimate(problem, sizes, machine, c))) for c in usable]
    found.sort(key=_seconds)
    told_apart = [one for one in found if one.candidate.rows is None and not one.candidate.order]  # by closed forms
    chosen = [one for one in told_apart if one.candidate not in UNFUSED][:walked]
    chosen += [one for one in found if one not in told_apart or one.candidate in UNFUSED]
    by_walk: list[Judged] = []
    for one in sorted(chosen, key=_seconds) if hurried else chosen:
        if not (hurried and by_walk and one.seconds > FAR * min(map(_seconds, by_walk))):
            by_walk.append(_judge(problem, sizes, machine, at, one))
    for one in found:
        if sum(len(done.trace.events) for done in by_walk if done.trace is not None) >= events:
            break
        if one not in chosen:
            by_walk.append(_judge(problem, sizes, machine, at, one))
    by_walk = _best_first(by_walk, problem, machine)
    if not hurried and by_walk:
        for other in paced(by_walk[0].candidate, problem.size):
            if all(one.candidate != other for one in by_walk):
                by_walk.append(_judge(problem, sizes, machine, at, Judged(other, by_walk[0].estimate)))
        by_walk = _best_first(by_walk, problem, machine)
    done = {one.candidate for one in by_walk}
    others = [one for one in found if one.candidate not in done]
    return Explanation(problem, sizes, machine, least, (*by_walk, *others), refused, at)


def _plan(problem: Problem, sizes: Sizes, candidate: Candidate, at: Callable[[int], Problem] | None) -> Plan:
    schedule, slices, window, rows, order = candidate
    return write(problem, schedule, slices, sizes if rows is None else Sizes(rows), window, at, order)


def _seconds(one: Judged) -> float:
    return one.seconds


def _best_first(walked: Iterable[Judged], problem: Problem, machine: Machine) -> list[Judged]:
    """By their times. Of a plain collective with a slow rank a ring comes before all that is no quicker, the one of
    fewest slices: one stream in and one out keep the slow port busy, and no two meet there.
    """
    quickest_first = sorted(walked, key=_seconds)
    if not quickest_first or not machine.rates or problem.weights or problem.gradients:
        return quickest_first
    best = quickest_first[0]
    if best.candidate.schedule in ("direct", *RINGS):
        alike = [one for one in quickest_first if one.seconds <= (1 + ALIKE) * best.seconds]
        rings = [one for one in alike if one.candidate.schedule in RINGS]
        best = min(rings, key=lambda one: len(shares_of(*one.candidate[:2])), default=best)
    return sorted(quickest_first, key=lambda one: one is not best)


def _judge(
    problem: Problem, sizes: Sizes, machine: Machine, at: Callable[[int], Problem] | None, one: Judged
) -> Judged:
    plan = _plan(problem, sizes, one.candidate, at)
    trace = representatives(plan, machine)
    last = max(trace.events, key=lambda event: event.end, default=None)
    proof = prove(trace, Needs(plan, last.rank)) if last is not None else None
    return one._replace(proof=proof, trace=trace)
