"""The approximate time of a candidate, by a formula. It tells which candidates are worth a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fompi.base.layout import Sizes, itemsize
from fompi.model.lower_bound import call_seconds, library_nbytes, most_rows_worked, row_nbytes
from fompi.model.machine import Level, LinkModel, Machine
from fompi.planner.candidates import Candidate
from fompi.plans.plan import PAIRWISE, group_size
from fompi.plans.problems import Problem
from fompi.schedules.doubling import steps_of
from fompi.schedules.registry import default_window, shares_of


def estimate(problem: Problem, sizes: Sizes, machine: Machine, candidate: Candidate) -> float:
    """The approximate time of a candidate, in seconds. All shards count as if they had the mean size.

    It is the time of the kernels or of the messages, whichever is longer, plus the first or last piece, which nothing
    can hide.
    """
    size, schedule = problem.size, candidate.schedule
    each = machine.announcing if candidate.announced else machine  # for one of several products
    rows = most_rows_worked(problem, sizes)
    shares = shares_of(schedule, candidate.slices)
    pieces = [rows / size * share / sum(shares) for share in shares]
    links = _Links(problem, machine)
    whole = call_seconds(problem, machine, rows)
    if size == 1:
        return whole
    if schedule == "unfused":
        return whole + machine.library(problem.moves, library_nbytes(problem, rows), size)
    if schedule == "sliced":
        calls = sum(call_seconds(problem, each, piece * size, size) for piece in pieces)
        nbytes = [library_nbytes(problem, piece * size) for piece in pieces]
        collectives = [machine.library(problem.moves, n, size, again=len(pieces) > 1) for n in nbytes]
        calls += sum(machine.library_sums(problem.moves, n, size) for n in nbytes[:-1])
        first = call_seconds(problem, each, pieces[0] * size, size)
        return max(calls + collectives[-1], first + sum(collectives))
    if schedule == "exchange":
        return whole + links.seconds(candidate, [rows])
    if schedule == "doubling":
        return whole + links.doubling_seconds(candidate, rows)
    messages = links.seconds(candidate, pieces) * (2 if problem.moves == "all_reduce" else 1)
    sums = 0.0
    if problem.sums:
        term = prod(problem.sent_row) * itemsize(problem.accumulator) if problem.wire else links.row
        sums = 3 * (size - 1) * rows / size * term / machine.memory_rate
        sums += (size - 1) * len(pieces) * machine.overhead
    if schedule == "unfused_p2p":
        return whole + messages + sums
    if schedule == "sliced_p2p":
        first, last = (call_seconds(problem, each, pieces[i] * size, size) for i in (0, -1))
        calls = sum(call_seconds(problem, each, piece * size, size) for piece in pieces)
    else:
        first, last = (call_seconds(problem, each, pieces[i]) for i in (0, -1))
        calls = (size - 1) * sum(call_seconds(problem, each, piece) for piece in pieces)
        calls += call_seconds(problem, each, rows / size)
    if machine.lanes == 2:
        messages = max(messages, sums)  # sums run at the same time as kernels and messages, one sum after the other
    else:
        message_ends = 2 * (size - 1) * len(pieces) * (2 if problem.moves == "all_reduce" else 1)
        calls += sums + message_ends * (machine.cpu_message + rows / size / len(pieces) * links.row * machine.cpu_byte)
    if problem.moves == "all_reduce":
        calls += links.seconds(candidate, pieces[-1:]) * 2
        return max(calls, first * size + messages)
    if problem.multiplies_first:
        return max(calls, first + messages)
    if problem.sums:  # without a product, only sums remain after the last message
        last = sums * shares[-1] / sum(shares)
    return max(calls, messages + last)


class _Links:
    """The time of the messages of a candidate: the time of the busiest port, in seconds."""

    def __init__(self, problem: Problem, machine: Machine):
        self.problem, self.machine = problem, machine
        self.size, self.row = problem.size, max(row_nbytes(problem))
        self.slowest = machine.slowest(problem.size)

    def seconds(self, candidate: Candidate, pieces: Sequence[float]) -> float:
        """Each piece of every shard passes the busiest port of each level once. The slowest level counts."""
        schedule, by_level = candidate.schedule, []
        inside = self.size
        for level in reversed(self.machine.levels):  # from the outermost
            if self.size > level.ranks:
                by_level.append(self._at(level, self._crossing(schedule, level), pieces, candidate))
                inside = min(inside, level.ranks)
        all_pass = inside == self.size or schedule in ("ring", "bidirectional")
        count: float = self.size - 1 if all_pass else inside
        window = default_window(self.problem, schedule, len(pieces)) if schedule == PAIRWISE else candidate.window
        at_once = {"ring": 1, "bidirectional": 2}.get(schedule, window or self.size)
        count /= min(self.machine.ports, at_once, max(1, count))
        by_level.append(self._at(self.machine.innermost, count, pieces, candidate))
        return max(by_level)

    def doubling_seconds(self, candidate: Candidate, rows: float) -> float:
        """One message of everything in each step of `doubling`. In step k it goes to a rank 2**k further."""
        seconds = 0.0
        for step in range(steps_of(self.size)):
            outer = (level for level in reversed(self.machine.levels) if level.ranks < 2 << step)
            level = next(outer, self.machine.innermost)
            count = level.ranks if level.shared and level is not self.machine.innermost else 1
            seconds += self._at(level, count, [rows], candidate)
        return seconds

    def _crossing(self, schedule: str, level: Level) -> float:
        """The number of shards that leave through one port of this level."""
        outside = self.size - level.ranks
        if schedule in ("ring", "bidirectional"):
            return self.size - 1
        if group_size(schedule) == level.ranks:
            return outside if level.shared else outside / level.ranks
        return outside * (level.ranks if level.shared else 1)

    def _at(self, level: Level, count: float, pieces: Sequence[float], candidate: Candidate) -> float:
        """Seconds for `count` shards one after the other through a port of this level.

        In a ring a shard is passed on only after it has arrived. With a window of 1 the next send starts only after
        the last one has arrived.
        """
        link = LinkModel(level, (), self.slowest)
        busy = [link.busy(piece * self.row) for piece in pieces]
        shard = sum(busy)
        if candidate.window == 1:
            shard += level.latency * len(pieces)
        elif candidate.schedule in ("ring", "bidirectional"):
            shard = max(shard, level.latency + max(busy))
        return level.latency + count * shard
