"""Which schedule is the best for a problem on a machine, and why.

`explain` lists the candidates, ranks them by closed forms, walks through the best few event by event, and says what
each hides, what stays exposed and for which chunk, and how far from the lower bound it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import NamedTuple

from fompi.bound import Bound, bound, call_seconds, row_nbytes, rows_worked
from fompi.exact import pieces
from fompi.layout import Sizes, Slices, cut, slices_in_words
from fompi.machine import Level, Link, Machine
from fompi.plan import Plan, group_of
from fompi.problems import Problem
from fompi.proof import Needs, Proof, prove
from fompi.schedules import REGISTERED, available, is_available, shares_of, write
from fompi.simulate import representatives
from fompi.timeline import timeline, timelines
from fompi.trace import Trace
from fompi.verify import verify

EVEN: tuple[Slices, ...] = (1, 2, 4, 8, 16)
UNEVEN: tuple[Slices, ...] = ((1, 2, 4), (1, 2, 3, 5, 8), (4, 2, 1), (8, 5, 3, 2, 1), (1, 2, 3, 3, 2, 1))
"""Small first: the first message leaves early. Small last: little is left to do after the last message."""

WALKED = 6
"""So many candidates are walked through, beside those without overlap."""

FAR = 1.5
"""So near are closed forms to walks, where it matters."""

MOST_OPS, FEW_OPS = 20_000, 600
"""Of a rank: finer cuts are not considered; where a call waits for the choice, fewer are."""

MOST_TOGETHER = 64
"""With more ranks than this nobody sends to all others at once: only one after the other."""


class Candidate(NamedTuple):
    """A schedule with its parameters."""

    schedule: str
    slices: Slices = 1
    window: int | None = None
    rows: tuple[int, ...] | None = None  # that each rank sums, of an all-reduce (None: as even as can be)

    def __str__(self) -> str:
        cut = "" if self.schedule in ("unfused", "unfused_p2p", "exchange") else f", {slices_in_words(self.slices)}"
        window = "" if self.window is None else f", window {self.window}"
        return f"{self.schedule}{cut}{window}{'' if self.rows is None else ', sums by rate'}"


UNFUSED = (Candidate("unfused"), Candidate("unfused_p2p"), Candidate("unfused_p2p", window=1))


class Judged(NamedTuple):
    """A candidate, what a closed form makes of it, and its proof by the walk: of the rank that ends last."""

    candidate: Candidate
    estimate: float
    proof: Proof | None = None
    trace: Trace | None = None

    @property
    def seconds(self) -> float:
        return self.estimate if self.trace is None else self.trace.seconds


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

    def __str__(self) -> str:
        head = f"{self.problem}, {self.problem.size} rank{'s' * (self.problem.size > 1)}, on {self.machine.name}"
        rows: list[tuple[str, ...]] = [("candidate", "ms", "bound/it", "compute", "hidden", "exposed", "why")]
        for one in self.judged:
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
        lines += [f"{candidate}: refused: {why}" for candidate, why in self.refused]
        lines.append(f"lower bound {1e3 * self.bound.seconds:.3f} ms: {self.bound.what}")
        best = f"best: {self.winner.candidate}, {100 * max(0.0, self.gap):.1f} % above the bound"
        gain = self.unfused.seconds / self.winner.seconds if self.winner.seconds else 1.0
        lines.append(f"{best}, {gain:.2f}x over {self.unfused.candidate}")
        return "\n".join(lines)


def explain(
    problem: Problem,
    sizes: Sizes,
    machine: Machine,
    at: Callable[[int], Problem] | None = None,
    walked: int = WALKED,
    most_ops: int = MOST_OPS,
    hurried: bool = False,
) -> Explanation:
    """All candidates; the `walked` best by the closed forms, and those without overlap, by the event walk.

    `hurried`, where a call waits: only what a call can take (no window, no rows by rate), and no walk of those that by
    the closed form take much longer than another one does by the walk.
    `at(rank)` is the problem of each rank where they differ in columns that do not travel; else all have `problem`.
    """
    least = bound(problem, sizes, machine)
    listed = list(
        dict.fromkeys([*candidates(problem, machine, most_ops), *exact_cuts(problem, sizes, machine, most_ops)])
    )
    listed += by_rate(problem, sizes, machine)
    if hurried:
        listed = [one for one in listed if one.window is None and one.rows is None]
    refused = [(c, why) for c in listed if c.schedule in REGISTERED and (why := _flaw(problem, sizes, c, at))]
    wrong = {c for c, _ in refused}
    found = [Judged(c, max(least.seconds, estimate(problem, sizes, machine, c))) for c in listed if c not in wrong]
    found.sort(key=_seconds)
    chosen = [one for one in found if one.candidate not in UNFUSED and one.candidate.rows is None][:walked]
    chosen += [one for one in found if one.candidate.rows is not None]
    chosen += [one for one in found if one.candidate in UNFUSED]
    by_walk: list[Judged] = []
    for one in sorted(chosen, key=_seconds) if hurried else chosen:
        if not (hurried and by_walk and one.seconds > FAR * min(map(_seconds, by_walk))):
            by_walk.append(_judge(problem, sizes, machine, at, one))
    by_walk.sort(key=_seconds)
    done = {one.candidate for one in by_walk}
    others = [one for one in found if one.candidate not in done]
    return Explanation(problem, sizes, machine, least, (*by_walk, *others), tuple(refused), at)


def _plan(problem: Problem, sizes: Sizes, candidate: Candidate, at: Callable[[int], Problem] | None) -> Plan:
    schedule, slices, window, rows = candidate
    return write(problem, schedule, slices, sizes if rows is None else Sizes(rows), window, at)


def _flaw(problem: Problem, sizes: Sizes, candidate: Candidate, at: Callable[[int], Problem] | None) -> str | None:
    """What is wrong with a schedule of a user; ours are proven by the tests."""
    try:
        verify(_plan(problem, sizes, candidate, at))
    except Exception as error:  # it may raise what it likes
        return f"{type(error).__name__}: {error}"
    return None


def _seconds(one: Judged) -> float:
    return one.seconds


def _judge(
    problem: Problem, sizes: Sizes, machine: Machine, at: Callable[[int], Problem] | None, one: Judged
) -> Judged:
    plan = _plan(problem, sizes, one.candidate, at)
    trace = representatives(plan, machine)
    last = max(trace.events, key=lambda event: event.end, default=None)
    proof = prove(trace, Needs(plan, last.rank)) if last is not None else None
    return one._replace(proof=proof, trace=trace)


# ------------------------------------------------------------------------------------------------- what there is


def candidates(problem: Problem, machine: Machine, most_ops: int = MOST_OPS) -> Iterator[Candidate]:
    """Every schedule that the problem has, in the cuts and windows that may matter."""
    names, size = available(problem), problem.size
    together = size <= MOST_TOGETHER
    unfused = (c for c in UNFUSED if c.schedule in names)
    yield from (c for c in unfused if c.schedule == "unfused" or (together if c.window is None else size > 2))
    if size == 1:
        return
    if "exchange" in names:
        yield Candidate("exchange")
    computes = bool(problem.weights or problem.gradients)
    if computes and "sliced" in names:
        yield from (Candidate("sliced", slices) for slices in (2, 4, 8))
    groups = [f"hierarchical({level.ranks})" for level in machine.levels]
    cuts = (*EVEN, *UNEVEN) if computes else EVEN
    yield from (Candidate(name) for name in REGISTERED if name in names)
    for name in ("direct", "ring", "bidirectional", *groups):
        if not is_available(problem, name):
            continue
        for slices in cuts:
            if 3 * size * len(shares_of(name, slices)) > most_ops and slices != 1:
                continue
            if name != "direct" or together:
                yield Candidate(name, slices)
            if name == "direct" and size > 2:
                yield Candidate(name, slices, 1)


EXACT_UNITS, MOST_PIECES = 16, 6


def exact_cuts(problem: Problem, sizes: Sizes, machine: Machine, most_ops: int = MOST_OPS) -> Iterator[Candidate]:
    """The slices that are the best of all (`fompi.exact`) between two ranks, each with the mean of all shards.

    A sum multiplies a slice and sends it, and multiplies its own rows at the end. A gather is the same backwards.
    """
    size = problem.size
    if size == 1 or not (problem.weights or problem.gradients) or problem.moves == "all_reduce":
        return
    unit = max(rows_worked(problem, sizes, rank) for rank in range(size)) / size / EXACT_UNITS
    if unit < 1:
        return
    link, nbytes = machine.link(0, size - 1), unit * max(row_nbytes(problem))
    found = pieces(
        EXACT_UNITS,
        lambda n: call_seconds(problem, machine, n * unit),
        lambda n: link.seconds(n * nbytes),
        call_seconds(problem, machine, EXACT_UNITS * unit),
        MOST_PIECES,
    )
    cut = found.sizes if problem.multiplies_first else found.sizes[::-1]
    each = gcd(*cut)
    shares: Slices = tuple(n // each for n in cut)
    if len(set(cut)) == 1:
        shares = len(cut)
    if 3 * size * len(cut) <= most_ops:
        yield from (Candidate(name, shares) for name in ("direct", "ring") if is_available(problem, name))


RATED_SLICES = (4, 16)


def by_rate(problem: Problem, sizes: Sizes, machine: Machine) -> Iterator[Candidate]:
    """All-reduces in which a rank with a slow link sums fewer rows than others: who owns them is the plan's choice."""
    size, total = problem.size, sum(sizes.rows)
    rates = [machine.rate(rank) for rank in range(size)]
    if problem.moves != "all_reduce" or size < 3 or min(rates) == max(rates):
        return
    rows = owned(total, rates)
    yield from (Candidate("direct", slices, None, rows) for slices in RATED_SLICES)


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
    shares = [round(1e6 * max(0.0, high * rate - total) / (size - 2) / max(1, total)) for rate in rates]
    return tuple(cut(total, shares))


def candidates_without_machine(problem: Problem) -> Iterator[Candidate]:
    """Some of every kind, the same for all machines."""
    names, computes = available(problem), bool(problem.weights or problem.gradients)
    for name, cuts in (
        ("unfused", (1,)),
        ("unfused_p2p", (1,)),
        ("exchange", (1,)),
        ("sliced", (4,) if computes else ()),
        ("direct", (1, 2, 4)),
        ("ring", (1, 4)),
    ):
        yield from (Candidate(name, slices) for slices in cuts if name in names)


# ------------------------------------------------------------------------------------------------- closed forms


def estimate(problem: Problem, sizes: Sizes, machine: Machine, candidate: Candidate) -> float:
    """Seconds, roughly: what is slower, kernels or messages, and the first or last piece that nothing can hide.

    For shards alike on all ranks (of the mean size); only good for telling which candidates are worth a walk.
    """
    size, schedule = problem.size, candidate.schedule
    rows = max(rows_worked(problem, sizes, rank) for rank in range(size))
    shares = shares_of(schedule, candidate.slices)
    pieces = [rows / size * share / sum(shares) for share in shares]
    wire = _Wire(problem, machine)
    whole = call_seconds(problem, machine, rows)
    if size == 1:
        return whole
    if schedule == "unfused":
        return whole + machine.native(problem.moves, rows * wire.row * (1 + 1 / size), size)
    if schedule == "sliced":
        calls = sum(call_seconds(problem, machine, piece * size) for piece in pieces)
        each = [machine.native(problem.moves, piece * size * wire.row * (1 + 1 / size), size) for piece in pieces]
        return max(calls + each[-1], call_seconds(problem, machine, pieces[0] * size) + sum(each))
    if schedule == "exchange":
        return whole + machine.latency + (size - 1) * rows * wire.row / machine.bandwidth
    messages = wire.seconds(candidate, pieces) * (2 if problem.moves == "all_reduce" else 1)
    sums = 0.0
    if problem.moves in ("reduce_scatter", "all_reduce"):
        sums = 3 * (size - 1) * rows / size * wire.row / machine.memory_rate
        sums += (size - 1) * len(pieces) * machine.overhead
    if schedule == "unfused_p2p":
        return whole + messages + sums
    first, last = (call_seconds(problem, machine, pieces[i]) for i in (0, -1))
    calls = (size - 1) * sum(call_seconds(problem, machine, piece) for piece in pieces)
    calls += call_seconds(problem, machine, rows / size)
    if machine.lanes == 1:
        count = 2 * (size - 1) * len(pieces) * (2 if problem.moves == "all_reduce" else 1)
        calls += sums + count * (machine.cpu_message + rows / size / len(pieces) * wire.row * machine.cpu_byte)
    if problem.moves == "all_reduce":
        calls += wire.seconds(candidate, pieces[-1:]) * 2
        return max(calls, first * size + messages)
    if problem.multiplies_first:
        return max(calls, first + messages)
    return max(calls, messages + last)


class _Wire:
    """What messages take, in seconds of the busiest port."""

    def __init__(self, problem: Problem, machine: Machine):
        self.size, self.row, self.machine = problem.size, max(row_nbytes(problem)), machine
        self.slowest = min((machine.rate(rank) for rank in range(problem.size)), default=1.0)

    def seconds(self, candidate: Candidate, pieces: Sequence[float]) -> float:
        """Each piece of every shard once through the busiest port of each level; the slowest level counts."""
        schedule, found = candidate.schedule, []
        inside = self.size
        for level in reversed(self.machine.levels):  # from the outermost
            if self.size > level.ranks:
                found.append(self._at(level, self._crossing(schedule, level), pieces, candidate))
                inside = min(inside, level.ranks)
        alone = inside == self.size or schedule in ("ring", "bidirectional")
        found.append(self._at(self.machine.innermost, self.size - 1 if alone else inside, pieces, candidate))
        return max(found)

    def _crossing(self, schedule: str, level: Level) -> float:
        """How many shards leave through one port of this level."""
        others = self.size - level.ranks
        if schedule in ("ring", "bidirectional"):
            return self.size - 1
        if group_of(schedule) == level.ranks:
            return others if level.shared else others / level.ranks
        return others * (level.ranks if level.shared else 1)

    def _at(self, level: Level, count: float, pieces: Sequence[float], candidate: Candidate) -> float:
        """A shard is passed on, or the next one sent, only once this one has come."""
        link = Link(level, (), self.slowest)
        busy = [link.busy(piece * self.row) for piece in pieces]
        each = sum(busy)
        if candidate.window == 1:
            each += level.latency * len(pieces)
        elif candidate.schedule in ("ring", "bidirectional"):
            each = max(each, level.latency + max(busy))
        return level.latency + count * each
