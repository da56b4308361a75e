"""The event walk over all ranks of a plan.

`simulate(plan, machine)` predicts the Trace; `twin(plan, inputs, backend)` runs the plan with data in this process,
in an interleaving of its own for every seed: the digital twin, which needs no MPI.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from fompi import kernels, layout
from fompi.errors import LayoutError, PlanError
from fompi.layout import Sizes
from fompi.machine import Machine
from fompi.plan import (
    Chunk,
    Collective,
    Compute,
    Frontier,
    Op,
    Plan,
    Program,
    Recv,
    Send,
    constraints,
    lane,
    messages,
)
from fompi.trace import Event, Trace


def simulate(plan: Plan, machine: Machine, sizes: Sizes | None = None) -> Trace:
    """The Trace that `machine` would measure for `plan` with these sizes (None: those it was made for)."""
    walk = _Walk(plan, sizes or plan.sizes, machine)
    events = walk.run()
    return Trace("predicted", f"{plan.problem} by {plan.schedule} on {machine.name}", tuple(events))


class _Walk:
    """Time moves from event to event. A rank runs one kernel at a time, sends one message and receives one."""

    def __init__(self, plan: Plan, sizes: Sizes, machine: Machine):
        if len(sizes.pairs or sizes.rows) != plan.size:
            raise LayoutError(f"sizes for {len(sizes.pairs or sizes.rows)} ranks, but the plan has {plan.size}")
        self.plan, self.machine, self.programs = plan, machine, plan.programs
        self.extents = [plan.extents(rank, sizes) for rank in range(plan.size)]
        self.offsets = [
            {b.name: b.offsets(e) for b in p.buffers} for p, e in zip(self.programs, self.extents, strict=True)
        ]
        self.frontiers = [Frontier(constraints(p.ops, plan.window)) for p in self.programs]
        self.numbers = [messages(p.ops) for p in self.programs]
        self.posted: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.released: deque[tuple[int, int]] = deque()
        self.kernels_ready: list[list[int]] = [[] for _ in self.programs]
        self.computing = [False] * plan.size
        self.outgoing: list[list[tuple[int, tuple[int, int]]]] = [[] for _ in self.programs]
        self.woken = [-1.0] * plan.size
        self.port_free: defaultdict[tuple[str, int], float] = defaultdict(float)
        self.collective: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self.collectives_passed = [count() for _ in self.programs]
        self.start: dict[tuple[int, int], float] = {}
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.order = count()
        self.now = 0.0
        self.events: list[Event] = []

    # -- to be refined by the twin
    def jitter(self) -> float:
        return 1.0

    def message_begins(self, source: tuple[int, int], dest: tuple[int, int]) -> None: ...
    def message_ends(self, source: tuple[int, int], dest: tuple[int, int]) -> None: ...
    def kernel_ends(self, rank: int, op: Compute) -> None: ...
    def collective_ends(self, calls: list[tuple[int, int]]) -> None: ...

    # -- the walk
    def run(self) -> list[Event]:
        self.released.extend((rank, i) for rank, frontier in enumerate(self.frontiers) for i in frontier.begin())
        self.begin_released()
        while self.queue:
            self.now, _, action = heapq.heappop(self.queue)
            action()
            self.begin_released()
        for rank, program in enumerate(self.programs):
            for i, op in enumerate(program.ops):
                if (rank, i) not in self.start or self.start[rank, i] >= 0:
                    raise PlanError(
                        f"rank {rank} never completes op {i}, {op}", rank, i, str((*op.reads, *op.writes)[0])
                    )
        return self.events

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (time, next(self.order), action))

    def begin_released(self) -> None:
        while self.released:
            self.begin(*self.released.popleft())

    def begin(self, rank: int, i: int) -> None:
        op = self.programs[rank].ops[i]
        self.start[rank, i] = self.now
        if isinstance(op, Compute):
            heapq.heappush(self.kernels_ready[rank], i)
            self.at(self.now, lambda: self.next_kernel(rank))
        elif isinstance(op, Collective):
            self.join_collective(rank, i, op)
        else:
            self.post(rank, i, op)
        self.released.extend((rank, free) for free in self.frontiers[rank].started(i))

    def done(self, rank: int, i: int) -> None:
        op = self.programs[rank].ops[i]
        begun, self.start[rank, i] = self.start[rank, i], -1.0
        name, peer = lane(op)
        track = {"send": f"send to {peer}", "recv": f"recv from {peer}"}.get(name, name)
        size = sum(self.nbytes(rank, c) for c in (op.writes if isinstance(op, Recv) else op.reads))
        self.events.append(Event(rank, track, i, str(op), begun, self.now, size))
        self.released.extend((rank, free) for free in self.frontiers[rank].done(i))

    def next_kernel(self, rank: int) -> None:
        if self.computing[rank] or not self.kernels_ready[rank]:
            return
        self.computing[rank] = True
        i = heapq.heappop(self.kernels_ready[rank])
        op = self.programs[rank].ops[i]
        assert isinstance(op, Compute)
        self.start[rank, i] = self.now

        def finish() -> None:
            self.computing[rank] = False
            self.kernel_ends(rank, op)
            self.done(rank, i)
            self.begin_released()  # among them kernels that come before others
            self.next_kernel(rank)

        reads, writes = [self.shape(rank, c) for c in op.reads], [self.shape(rank, c) for c in op.writes]
        touched = sum(self.nbytes(rank, c) for c in (*op.reads, *op.writes))
        seconds = self.machine.kernel(kernels.cost(op.kernel, reads, writes), touched)
        self.at(self.now + seconds * self.jitter(), finish)

    def post(self, rank: int, i: int, op: Send | Recv) -> None:
        source, dest = (rank, op.dest) if isinstance(op, Send) else (op.source, rank)
        key = (source, dest, self.numbers[rank][i])
        if key not in self.posted:
            self.posted[key] = (rank, i)
            return
        other = self.posted.pop(key)
        s, d = ((rank, i), other) if isinstance(op, Send) else (other, (rank, i))
        heapq.heappush(self.outgoing[source], (s[1], d))
        self.at(self.now, lambda: self.next_message(source))

    def next_message(self, source: int) -> None:
        """Messages that both ends wait for leave in the order of the program, when both ends of the link are free."""
        queue = self.outgoing[source]
        while queue:
            i, (dest, _) = queue[0]
            free = max(self.port_free["out", source], self.port_free["in", dest])
            if free > self.now:
                if self.woken[source] != free:
                    self.woken[source] = free
                    self.at(free, lambda: self.next_message(source))
                return
            self.transfer((source, i), heapq.heappop(queue)[1])

    def transfer(self, s: tuple[int, int], d: tuple[int, int]) -> None:
        op = self.programs[s[0]].ops[s[1]]
        seconds = self.machine.message(self.nbytes(s[0], op.reads[0])) * self.jitter()
        free = self.now + max(0.0, seconds - self.machine.latency)
        self.port_free["out", s[0]] = self.port_free["in", d[0]] = free

        def finish() -> None:
            self.message_ends(s, d)
            self.done(*s)
            self.done(*d)

        self.message_begins(s, d)
        self.at(self.now + seconds, finish)

    def join_collective(self, rank: int, i: int, op: Collective) -> None:
        k = next(self.collectives_passed[rank])
        self.collective[k].append((rank, i))
        if len(self.collective[k]) < self.plan.size:
            return
        calls = sorted(self.collective.pop(k))
        peers = max(1, self.plan.size - 1)
        most = max(
            sum(self.nbytes(r, c) for c in (*o.reads, *o.writes))
            for r, o in ((r, self.programs[r].ops[j]) for r, j in calls)
        )
        start = max(self.now, self.port_free["collective", 0])
        end = start + (self.machine.latency * peers + most / self.machine.bandwidth) * self.jitter()
        self.port_free["collective", 0] = end

        def finish() -> None:
            self.collective_ends(calls)
            for call in calls:
                self.done(*call)

        self.at(end, finish)

    def shape(self, rank: int, chunk: Chunk) -> tuple[int, ...]:
        buffer = self.programs[rank].buffer(chunk.buffer)
        if buffer.axis == "whole":
            return buffer.row
        first, last = rows_of(self.programs[rank], self.offsets[rank], chunk)
        return (last - first, *buffer.row)

    def nbytes(self, rank: int, chunk: Chunk) -> int:
        return layout.nbytes(self.shape(rank, chunk), self.programs[rank].buffer(chunk.buffer).dtype)


def rows_of(program: Program, offsets: dict[str, list[int]], chunk: Chunk) -> tuple[int, int]:
    """The first row of a chunk in its buffer, and the one behind its last."""
    first = program.buffer(chunk.buffer).first
    starts = offsets[chunk.buffer]
    return starts[chunk.start - first], starts[chunk.stop - first]


# ------------------------------------------------------------------------------------------------ the digital twin


def twin(
    plan: Plan, inputs: Sequence[dict[str, Any]], backend: Any, *, sizes: Sizes | None = None, seed: int = 0
) -> list[dict[str, Any]]:
    """The outputs of all ranks: the plan, run with data in this process, in the interleaving number `seed`.

    Scratch and outputs begin as NaN (or as the largest integer). A message is read from its source either when it
    begins or when it ends, by chance: a plan whose result depends on that is wrong.
    """
    return _Twin(plan, sizes or plan.sizes, inputs, backend, seed).outputs()


class _Twin(_Walk):
    def __init__(self, plan: Plan, sizes: Sizes, inputs: Sequence[dict[str, Any]], backend: Any, seed: int):
        super().__init__(plan, sizes, Machine("chance", 0.0, 1.0, 1.0, 1.0, 1.0))
        self.random, self.backend = random.Random(seed), backend
        self.memory = []
        for program, extents, given in zip(self.programs, self.extents, inputs, strict=True):
            made = {b.name: backend.poisoned(b.shape(extents), b.dtype) for b in program.buffers if b.role != "input"}
            self.memory.append({**given, **made})
        self.early: dict[tuple[int, int], Any] = {}

    def outputs(self) -> list[dict[str, Any]]:
        self.run()
        return [
            {b.name: memory[b.name] for b in program.buffers if b.role == "output"}
            for program, memory in zip(self.programs, self.memory, strict=True)
        ]

    def jitter(self) -> float:
        return self.random.expovariate(1.0)

    def view(self, rank: int, chunk: Chunk) -> Any:
        array = self.memory[rank][chunk.buffer]
        if self.programs[rank].buffer(chunk.buffer).axis == "whole":
            return array
        first, last = rows_of(self.programs[rank], self.offsets[rank], chunk)
        return array[first:last]

    def message_begins(self, source: tuple[int, int], dest: tuple[int, int]) -> None:
        if self.random.random() < 0.5:
            self.early[source] = self.view(source[0], self._op(source).reads[0]).copy()

    def message_ends(self, source: tuple[int, int], dest: tuple[int, int]) -> None:
        sent = self.early.pop(source) if source in self.early else self.view(source[0], self._op(source).reads[0])
        self.view(dest[0], self._op(dest).writes[0])[...] = sent

    def kernel_ends(self, rank: int, op: Compute) -> None:
        program = self.programs[rank]
        dtypes = [program.buffer(c.buffer).dtype for c in (*op.reads, *op.writes)]
        reads, writes = [self.view(rank, c) for c in op.reads], [self.view(rank, c) for c in op.writes]
        self.backend.bind(op.kernel, reads, writes, dtypes[: len(reads)], dtypes[len(reads) :])()

    def collective_ends(self, calls: list[tuple[int, int]]) -> None:
        ops = [self._op(call) for call in calls]
        read = [[self.view(rank, c).copy() for c in op.reads] for rank, op in enumerate(ops)]
        name = ops[0].name  # type: ignore[union-attr]
        for rank, op in enumerate(ops):
            targets = [self.view(rank, c) for c in op.writes]
            if name == "all_gather":
                pieces = [chunks[0] for chunks in read]
            elif name == "all_to_all":
                pieces = [chunks[rank] for chunks in read]
            elif name == "broadcast":
                pieces = [chunks[0] for chunks in read if chunks] if targets else []
            else:
                summed = sum((chunks[0] for chunks in read[1:]), read[0][0])
                if name == "reduce_scatter":
                    rows = [self.shape(r, o.writes[0])[0] for r, o in enumerate(ops)]
                    summed = summed[sum(rows[:rank]) : sum(rows[: rank + 1])]
                pieces = [summed]
            for target, piece in zip(targets, pieces, strict=True):
                target[...] = piece

    def _op(self, at: tuple[int, int]) -> Op:
        return self.programs[at[0]].ops[at[1]]
