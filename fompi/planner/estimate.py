"""How long a candidate takes, roughly, by closed forms: good for telling which are worth a walk."""

from __future__ import annotations

from collections.abc import Sequence

from fompi.base.layout import Sizes
from fompi.model.bound import call_seconds, native_nbytes, row_nbytes, rows_worked
from fompi.model.machine import Level, Link, Machine
from fompi.planner.candidates import Candidate
from fompi.plans.plan import IN_STEP, group_of
from fompi.plans.problems import Problem
from fompi.schedules.registry import shares_of, window_of


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
        return whole + machine.native(problem.moves, native_nbytes(problem, rows), size)
    if schedule == "sliced":
        calls = sum(call_seconds(problem, machine, piece * size, size) for piece in pieces)
        nbytes = [native_nbytes(problem, piece * size) for piece in pieces]
        each = [machine.native(problem.moves, n, size, again=len(pieces) > 1) for n in nbytes]
        calls += sum(machine.native_sums(problem.moves, n, size) for n in nbytes[:-1])
        return max(calls + each[-1], call_seconds(problem, machine, pieces[0] * size, size) + sum(each))
    if schedule == "exchange":
        return whole + wire.seconds(candidate, [rows])
    messages = wire.seconds(candidate, pieces) * (2 if problem.moves == "all_reduce" else 1)
    sums = 0.0
    if problem.moves in ("reduce_scatter", "all_reduce"):
        sums = 3 * (size - 1) * rows / size * wire.row / machine.memory_rate
        sums += (size - 1) * len(pieces) * machine.overhead
    if schedule == "unfused_p2p":
        return whole + messages + sums
    if schedule == "sliced_p2p":
        first, last = (call_seconds(problem, machine, pieces[i] * size, size) for i in (0, -1))
        calls = sum(call_seconds(problem, machine, piece * size, size) for piece in pieces)
    else:
        first, last = (call_seconds(problem, machine, pieces[i]) for i in (0, -1))
        calls = (size - 1) * sum(call_seconds(problem, machine, piece) for piece in pieces)
        calls += call_seconds(problem, machine, rows / size)
    if machine.lanes == 2:
        messages = max(messages, sums)  # beside kernels, but one after the other
    else:
        count = 2 * (size - 1) * len(pieces) * (2 if problem.moves == "all_reduce" else 1)
        calls += sums + count * (machine.cpu_message + rows / size / len(pieces) * wire.row * machine.cpu_byte)
    if problem.moves == "all_reduce":
        calls += wire.seconds(candidate, pieces[-1:]) * 2
        return max(calls, first * size + messages)
    if problem.multiplies_first:
        return max(calls, first + messages)
    if problem.moves == "reduce_scatter":  # a sum is all that a core has to do
        last = sums * shares[-1] / sum(shares)
    return max(calls, messages + last)


class _Wire:
    """What messages take, in seconds of the busiest port."""

    def __init__(self, problem: Problem, machine: Machine):
        self.problem, self.machine = problem, machine
        self.size, self.row = problem.size, max(row_nbytes(problem))
        self.slowest = machine.slowest(problem.size)

    def seconds(self, candidate: Candidate, pieces: Sequence[float]) -> float:
        """Each piece of every shard once through the busiest port of each level; the slowest level counts."""
        schedule, found = candidate.schedule, []
        inside = self.size
        for level in reversed(self.machine.levels):  # from the outermost
            if self.size > level.ranks:
                found.append(self._at(level, self._crossing(schedule, level), pieces, candidate))
                inside = min(inside, level.ranks)
        alone = inside == self.size or schedule in ("ring", "bidirectional")
        count: float = self.size - 1 if alone else inside
        window = window_of(self.problem, schedule, len(pieces)) if schedule == IN_STEP else candidate.window
        at_once = {"ring": 1, "bidirectional": 2}.get(schedule, window or self.size)
        count /= min(self.machine.ports, at_once, max(1, count))
        found.append(self._at(self.machine.innermost, count, pieces, candidate))
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
