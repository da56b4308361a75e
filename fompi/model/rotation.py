"""The walk of `fompi.simulate` for a ring of many ranks with unequal sizes: all ranks at once, op by op.

Where every rank does the same from where it is, to the same neighbour, the program of rank 0 stands for all: rank r
does op i on the blocks that are r owners further on. Then no two messages share a port, and every time is the latest of
some others and a duration: one pass over the ops, with the times of all ranks in a list, gives what the events give.
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
"""Of all ranks."""

Blocks = Sequence[tuple[int, int]]
"""(owner, part), owners counted from some rank on."""

Step = tuple[str, int]
"""("begins", op), ("ends", kernel), ("leaves", message) or ("comes", message): what happens once on every rank."""


def rotated(plan: Plan, sizes: Sizes, machine: Machine) -> Trace | None:
    """The Trace of the rank that ends last; None where the ranks do not do the same, or get into each other's way."""
    if not (_is_rotated(plan) and _is_apart(plan, machine)):
        return None
    walk = _Rotation(plan, sizes, machine)
    try:
        ends = walk.ends()
    except CycleError:
        return None
    if ends is None:
        return None
    last = ends.index(max(ends))
    title = f"{plan.problem} by {plan.schedule} on {machine.name}; rank {last} of {plan.size}, which ends last"
    return Trace("predicted", title, tuple(walk.events(last)))


def _is_rotated(plan: Plan) -> bool:
    """Whether all ranks do what rank 0 does, one owner further on for each: looked at for some."""
    size, first = plan.size, plan.programs[0]
    if any(buffer.axis in ("send", "recv") for buffer in first.buffers):
        return False
    return all(_from(plan.programs[rank]) == _from(first) for rank in {1 % size, size // 2, size - 1})


def _from(program: Program) -> list[object]:
    """What a program does, seen from its rank."""
    found: list[object] = [(b.name, b.axis, b.row, b.dtype) for b in program.buffers]
    for op in program.ops:
        name, peer = lane(op)
        what = (peer - program.rank) % program.size if isinstance(op, (Send, Recv)) else getattr(op, "kernel", None)
        chunks = [(c.buffer, sorted(_blocks(program, c))) for c in (*op.reads, *op.writes)]
        found.append((name, what, chunks))
    return found


def _blocks(program: Program, chunk: Chunk) -> Iterator[tuple[int, int]]:
    """(owner, part) of the blocks of a chunk, owners counted from the rank on; nothing of a whole buffer."""
    buffer = program.buffer(chunk.buffer)
    if buffer.axis != "whole":
        for block in range(chunk.start, chunk.stop):
            _, owner, part = buffer.symbol(program.rank, program.size, program.parts, block)
            yield (int(owner) - program.rank) % program.size, int(part)


def _is_apart(plan: Plan, machine: Machine) -> bool:
    """Whether each rank sends to one other only, by a link of its own, and messages take no time from kernels."""
    lanes = {lane(op) for op in plan.programs[0].ops}
    names = Counter(name for name, _ in lanes)
    if names["collective"] or names["send"] != 1 or names["recv"] != 1 or any(lv.shared for lv in machine.levels):
        return False
    costs = machine.cpu_message or machine.cpu_byte or machine.poll
    return machine.lanes > 1 or not names["compute"] or not (names["merge"] or costs)


class _Rotation:
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
        self.known: dict[object, Times] = {}
        self.busy: dict[tuple[int, float], float] = {}

    # -- what happens after what
    @cached_property
    def done(self) -> dict[int, Step]:
        """With what each op is done."""
        return {
            **{i: ("ends", i) for i in range(len(self.ops))},
            **{i: ("leaves", k) for k, i in enumerate(self.sends)},
            **{i: ("comes", k) for k, i in enumerate(self.recvs)},
        }

    @cached_property
    def after(self) -> dict[Step, list[Step]]:
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

    # -- when
    def ends(self, note: Callable[[Step, Times, Times], object] = lambda step, begins, ends: None) -> Times | None:
        """When each rank is done. None: kernels or messages would not keep to the order of the program.

        `note` is told when each step begins and ends.
        """
        left = Counter(step for steps in self.after.values() for step in steps)
        at: dict[Step, Times] = {}
        lanes: dict[object, tuple[Times, Times]] = {}  # since when it has been busy, and until when
        ends = start = credit = [0.0] * self.size
        for step in self.order:
            kind, number = step
            after = [at[earlier] for earlier in self.after[step]]
            if kind == "begins":
                at[step] = list(map(max, *after)) if len(after) > 1 else after[0] if after else start
            elif kind == "comes":
                at[step] = self._turned(after[0], -self.dest)
            else:
                if kind == "leaves":
                    key, op = "link", self.ops[self.sends[number]]
                    ready = list(map(max, after[0], self._turned(after[1], self.dest)))
                else:
                    key, op, ready = lane(self.ops[number])[0], self.ops[number], after[0]
                since, free = lanes.get(key, (ready, ready))
                if any(map(lt, ready, since)):  # it would have gone before one that was waited for
                    return None
                begins = list(map(max, ready, free))
                seconds = self._seconds(op)
                if kind == "leaves" and any(self.bursts):
                    silent = map(sub, begins, free) if key in lanes else self.bursts
                    credit = list(map(min, self.bursts, map(add, credit, silent)))
                    passed = list(map(min, credit, seconds))
                    credit, seconds = list(map(sub, credit, passed)), list(map(sub, seconds, passed))
                until = list(map(add, begins, seconds))
                if (
                    kind == "ends"
                ):  # a kernel goes before later ones that are ready with it, a message before later ones
                    ready = [r if r > f else s for r, f, s in zip(ready, free, since, strict=True)]
                lanes[key] = ready, until
                at[step] = list(map(add, until, self.latency)) if kind == "leaves" else until
                note(step, begins, at[step])
            if kind == "begins":
                note(step, at[step], at[step])
            elif step not in left:
                ends = list(map(max, ends, at[step]))
            for earlier in self.after[step]:
                left[earlier] -= 1
                if not left[earlier]:
                    del at[earlier]
        return ends

    @cached_property
    def order(self) -> tuple[Step, ...]:
        return tuple(TopologicalSorter(self.after).static_order())

    def _turned(self, times: Times, by: int) -> Times:
        """For each rank the time of the one that is `by` ranks further on."""
        by %= self.size
        return times[by:] + times[:by]

    # -- how long
    def _seconds(self, op: Op) -> Times:
        """A kernel on each rank, or a message of each rank."""
        chunks = op.reads if isinstance(op, Send) else (*op.reads, *op.writes)
        blocks = [list(_blocks(self.program, chunk)) for chunk in chunks]
        first = next((owner for each in blocks for owner, _ in each), 0)
        relative = [[((owner - first) % self.size, part) for owner, part in each] for each in blocks]
        key = getattr(op, "kernel", ""), str([(c.buffer, each) for c, each in zip(chunks, relative, strict=True)])
        if key not in self.known:  # by the first owner: most ops are those of another step, some owners further on
            self.known[key] = [self._of(op, chunks, relative, owner) for owner in range(self.size)]
        found = self._turned(self.known[key], first)
        return list(map(self._busy, self.kinds, found)) if isinstance(op, Send) else found

    def _of(self, op: Op, chunks: Sequence[Chunk], blocks: Sequence[Blocks], owner: int) -> float:
        """The seconds of a kernel, or the bytes of a message, if its first block is of this owner."""
        each = dict(zip(chunks, blocks, strict=True))

        def taken(chunk: Chunk) -> kernels.Taken:
            return self._shape(chunk, each[chunk], owner), self._nbytes(chunk, each[chunk], owner)

        if not isinstance(op, Compute):
            return taken(chunks[0])[1]
        return self.machine.kernel(*kernels.demand(op.kernel, [*map(taken, op.reads)], [*map(taken, op.writes)]))

    def _shape(self, chunk: Chunk, blocks: Blocks, owner: int) -> tuple[int, ...]:
        buffer = self.program.buffer(chunk.buffer)
        if buffer.axis == "whole":
            return buffer.row
        return (sum(self.rows[(owner + further) % self.size][part] for further, part in blocks), *buffer.row)

    def _nbytes(self, chunk: Chunk, blocks: Blocks, owner: int) -> int:
        return layout.nbytes(self._shape(chunk, blocks, owner), self.program.buffer(chunk.buffer).dtype)

    def _busy(self, kind: int, nbytes: float) -> float:
        if (kind, nbytes) not in self.busy:
            self.busy[kind, nbytes] = self.links[self.kinds.index(kind)].busy(nbytes)
        return self.busy[kind, nbytes]

    # -- what one rank does
    def events(self, rank: int) -> Iterator[Event]:
        noted: dict[Step, tuple[float, float]] = {}
        source = (rank - self.dest) % self.size

        def note(step: Step, begins: Times, ends: Times) -> None:
            kind, number = step
            noted[step] = begins[rank], ends[rank]
            if kind == "leaves":
                noted["comes", number] = begins[source], ends[source]

        self.ends(note)
        program = self.plan.programs[rank]
        for i, op in enumerate(program.ops):
            begun, end = noted[self.done[i]]
            posted = noted["begins", i][0] if isinstance(op, (Send, Recv)) else begun
            moved = op.writes if isinstance(op, Recv) else op.reads
            nbytes = sum(self._nbytes(c, list(_blocks(program, c)), rank) for c in moved)
            yield Event(rank, track(op), i, str(op), posted, end, nbytes, begun - posted)
