"""The times of `fompi.simulate` for a ring of many ranks with unequal sizes, for all ranks at once, op by op.

In such a plan every rank does the same, relative to its own rank, and sends to the same neighbour. The program of rank
0 describes all: rank r does op i on the blocks whose owners are r ranks further on. No two messages share a port. So
each time is the maximum of some earlier times, plus a duration. One pass over the ops gives the same times as the event
walk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from operator import add, lt, sub

from fompi.base import layout
from fompi.base.layout import Sizes
from fompi.model.machine import Machine
from fompi.plans import kernels
from fompi.plans.dependencies import constraints, lane, track
from fompi.plans.plan import Chunk, Compute, Op, Plan, Program, Recv, Send
from fompi.traces.trace import Event, Trace

Times = list[float]
"""One time per rank, in seconds."""

Blocks = Sequence[tuple[int, int]]
"""(owner, part) of each block. Owners are relative to a rank."""

Step = tuple[str, int]
"""An event that happens once on every rank: ("begins", op), ("ends", kernel), ("leaves", message), ("comes", message).

Kernels are numbered by their op, and messages from 0 on. "leaves" is the end of a send, "comes" the end of a receive.
"""


def rotated(plan: Plan, sizes: Sizes, machine: Machine) -> Trace | None:
    """The Trace of the rank that ends last. None if the ranks do not do the same, or if their messages share ports."""
    if not (_is_rotated(plan) and _is_apart(plan, machine)):
        return None
    rotation = _Rotation(plan, sizes, machine)
    try:
        ends = rotation.ends()
    except CycleError:
        return None
    if ends is None:
        return None
    last = ends.index(max(ends))
    title = f"{plan.problem} by {plan.schedule} on {machine.name}; rank {last} of {plan.size}, the last to end"
    return Trace("predicted", title, tuple(rotation.events(last)))


def _is_rotated(plan: Plan) -> bool:
    """True if all ranks do what rank 0 does, with owners of blocks shifted by the rank. It checks a sample of ranks."""
    size, first = plan.size, plan.programs[0]
    if any(buffer.axis in ("send", "recv") for buffer in first.buffers):
        return False
    return all(_relative(plan.programs[rank]) == _relative(first) for rank in {1 % size, size // 2, size - 1})


def _relative(program: Program) -> list[object]:
    """What a program does, with peers and owners relative to its rank."""
    steps: list[object] = [(b.name, b.axis, b.row, b.dtype) for b in program.buffers]
    for op in program.ops:
        name, peer = lane(op)
        what = (peer - program.rank) % program.size if isinstance(op, (Send, Recv)) else getattr(op, "kernel", None)
        chunks = [(c.buffer, sorted(_blocks(program, c))) for c in (*op.reads, *op.writes)]
        steps.append((name, what, chunks))
    return steps


def _blocks(program: Program, chunk: Chunk) -> Iterator[tuple[int, int]]:
    """(owner, part) of the blocks of a chunk, with owners relative to the rank. A "whole" buffer has no blocks."""
    buffer = program.buffer(chunk.buffer)
    if buffer.axis != "whole":
        for block in range(chunk.start, chunk.stop):
            _, owner, part = buffer.symbol(program.rank, program.size, program.parts, block)
            yield (int(owner) - program.rank) % program.size, int(part)


def _is_apart(plan: Plan, machine: Machine) -> bool:
    """True if each rank sends to one peer only, on a link of its own, and messages take no time from kernels."""
    lanes = {lane(op) for op in plan.programs[0].ops}
    names = Counter(name for name, _ in lanes)
    if names["download"] or names["upload"]:  # they have lanes of their own
        return False
    if names["collective"] or names["send"] != 1 or names["recv"] != 1 or any(lv.shared for lv in machine.levels):
        return False
    costs = machine.cpu_message or machine.cpu_byte or machine.poll
    return machine.lanes > 1 or not names["compute"] or not (names["merge"] or costs)


class _Rotation:
    """The times of all ranks. The ops are those of rank 0, and lists of times are indexed by rank."""

    def __init__(self, plan: Plan, sizes: Sizes, machine: Machine):
        self.plan, self.machine, self.size = plan, machine, plan.size
        self.program, self.ops = plan.programs[0], plan.programs[0].ops
        self.rows = [layout.cut(n, plan.shares) for n in sizes.rows]
        self.sends, self.recvs = ([i for i, op in enumerate(self.ops) if isinstance(op, k)] for k in (Send, Recv))
        self.dest = lane(self.ops[self.sends[0]])[1]
        self.links = [machine.link(rank, (rank + self.dest) % self.size) for rank in range(self.size)]
        self.latency = [link.level.latency for link in self.links]
        self.bursts = [link.level.burst for link in self.links]
        numbers = {key: i for i, key in enumerate(dict.fromkeys((link.level, link.rate) for link in self.links))}
        self.kinds = [numbers[link.level, link.rate] for link in self.links]
        self.amounts: dict[object, Times] = {}
        self.busy: dict[tuple[int, float], float] = {}

    # -- order
    @cached_property
    def done(self) -> dict[int, Step]:
        """The step that ends each op."""
        return {
            **{i: ("ends", i) for i in range(len(self.ops))},
            **{i: ("leaves", k) for k, i in enumerate(self.sends)},
            **{i: ("comes", k) for k, i in enumerate(self.recvs)},
        }

    @cached_property
    def after(self) -> dict[Step, list[Step]]:
        """For each step, the steps that must come first. Order in a lane counts as well as data."""
        needs, behind, _ = constraints(self.ops, self.plan.pace)
        after: dict[Step, list[Step]] = {}
        queued: dict[tuple[str, int], Step] = {}
        for i, op in enumerate(self.ops):
            after["begins", i] = [self.done[j] for j in needs[i]]
            if behind[i] >= 0:
                after["begins", i].append(("begins", behind[i]))
            if isinstance(op, Compute):
                after["ends", i] = [("begins", i)]
                if lane(op) in queued:
                    after["ends", i].append(queued[lane(op)])
                queued[lane(op)] = ("ends", i)
        for k, (send, recv) in enumerate(zip(self.sends, self.recvs, strict=True)):
            after["leaves", k] = [("begins", send), ("begins", recv)]
            if k:
                after["leaves", k].append(("leaves", k - 1))
            after["comes", k] = [("leaves", k)]
        return after

    # -- times
    def ends(self, note: Callable[[Step, Times, Times], object] = lambda step, begins, ends: None) -> Times | None:
        """When each rank is done. None if kernels or messages would not keep the order of the program.

        `note(step, begins, ends)` is called for each step but "comes", with the times of all ranks.
        """
        uses = Counter(step for steps in self.after.values() for step in steps)
        at: dict[Step, Times] = {}
        lanes: dict[object, tuple[Times, Times]] = {}  # (since, free): ready before `since` overtakes
        ends = start = credit = [0.0] * self.size
        for step in self.order:
            kind, number = step
            after = [at[earlier] for earlier in self.after[step]]
            if kind == "begins":
                at[step] = list(map(max, *after)) if len(after) > 1 else after[0] if after else start
            elif kind == "comes":
                at[step] = self._rotate(after[0], -self.dest)
            else:
                if kind == "leaves":
                    key, op = "link", self.ops[self.sends[number]]
                    ready = list(map(max, after[0], self._rotate(after[1], self.dest)))
                else:
                    key, op, ready = lane(self.ops[number])[0], self.ops[number], after[0]
                since, free = lanes.get(key, (ready, ready))
                if any(map(lt, ready, since)):  # it would overtake an op that is earlier in the program
                    return None
                begins = list(map(max, ready, free))
                seconds = self._seconds(op)
                if kind == "leaves" and any(self.bursts):
                    silent = map(sub, begins, free) if key in lanes else self.bursts
                    credit = list(map(min, self.bursts, map(add, credit, silent)))
                    passed = list(map(min, credit, seconds))
                    credit, seconds = list(map(sub, credit, passed)), list(map(sub, seconds, passed))
                until = list(map(add, begins, seconds))
                if kind == "ends":  # kernels that are ready while the lane is busy begin in order of the program
                    ready = [r if r > f else s for r, f, s in zip(ready, free, since, strict=True)]
                lanes[key] = ready, until
                at[step] = list(map(add, until, self.latency)) if kind == "leaves" else until
                note(step, begins, at[step])
            if kind == "begins":
                note(step, at[step], at[step])
            elif step not in uses:
                ends = list(map(max, ends, at[step]))
            for earlier in self.after[step]:
                uses[earlier] -= 1
                if not uses[earlier]:
                    del at[earlier]
        return ends

    @cached_property
    def order(self) -> tuple[Step, ...]:
        """All steps, each after the steps that must come first. Raises CycleError if the plan cannot finish."""
        return tuple(TopologicalSorter(self.after).static_order())

    def _rotate(self, times: Times, by: int) -> Times:
        """For each rank, the time of the rank `by` further on."""
        by %= self.size
        return times[by:] + times[:by]

    # -- durations
    def _seconds(self, op: Op) -> Times:
        """The seconds of a kernel, or of a message, on each rank."""
        chunks = op.reads if isinstance(op, Send) else (*op.reads, *op.writes)
        blocks = [list(_blocks(self.program, chunk)) for chunk in chunks]
        first = next((owner for each in blocks for owner, _ in each), 0)
        relative = [[((owner - first) % self.size, part) for owner, part in each] for each in blocks]
        key = getattr(op, "kernel", ""), str([(c.buffer, each) for c, each in zip(chunks, relative, strict=True)])
        if (
            key not in self.amounts
        ):  # most ops are like an earlier op with other owners, so the first owner is the index
            self.amounts[key] = [self._amount(op, chunks, relative, owner) for owner in range(self.size)]
        amounts = self._rotate(self.amounts[key], first)
        return list(map(self._busy, self.kinds, amounts)) if isinstance(op, Send) else amounts

    def _amount(self, op: Op, chunks: Sequence[Chunk], blocks: Sequence[Blocks], owner: int) -> float:
        """The seconds of a kernel, or the bytes of a message, if its first block belongs to `owner`."""
        each = dict(zip(chunks, blocks, strict=True))

        def operand(chunk: Chunk) -> kernels.Operand:
            return self._shape(chunk, each[chunk], owner), self._nbytes(chunk, each[chunk], owner)

        if not isinstance(op, Compute):
            return operand(chunks[0])[1]
        return self.machine.kernel(*kernels.demand(op.kernel, [*map(operand, op.reads)], [*map(operand, op.writes)]))

    def _shape(self, chunk: Chunk, blocks: Blocks, owner: int) -> tuple[int, ...]:
        buffer = self.program.buffer(chunk.buffer)
        if buffer.axis == "whole":
            return buffer.row
        rows = (self.rows[(owner + further) % self.size][part] for further, part in blocks)
        return buffer.shape_of(sum(map(buffer.counted, rows)))

    def _nbytes(self, chunk: Chunk, blocks: Blocks, owner: int) -> int:
        return layout.nbytes(self._shape(chunk, blocks, owner), self.program.buffer(chunk.buffer).dtype)

    def _busy(self, kind: int, nbytes: float) -> float:
        """The seconds for which a message occupies a link of this kind."""
        if (kind, nbytes) not in self.busy:
            self.busy[kind, nbytes] = self.links[self.kinds.index(kind)].busy(nbytes)
        return self.busy[kind, nbytes]

    # -- the trace of one rank
    def events(self, rank: int) -> Iterator[Event]:
        times: dict[Step, tuple[float, float]] = {}
        source = (rank - self.dest) % self.size

        def note(step: Step, begins: Times, ends: Times) -> None:
            kind, number = step
            times[step] = begins[rank], ends[rank]
            if kind == "leaves":
                times["comes", number] = begins[source], ends[source]

        self.ends(note)
        program = self.plan.programs[rank]
        for i, op in enumerate(program.ops):
            begun, end = times[self.done[i]]
            posted = times["begins", i][0] if isinstance(op, (Send, Recv)) else begun
            moved = op.writes if isinstance(op, Recv) else op.reads
            nbytes = sum(self._nbytes(c, list(_blocks(program, c)), rank) for c in moved)
            yield Event(rank, track(op), i, str(op), posted, end, nbytes, begun - posted)
