"""The event walk: the ops of a plan on simulated time, on the ranks that are simulated.

A rank runs one product and one sum or copy at a time. On a device the host enqueues them one by one: at once
what waits for kernels only, and what waits for a message when that is there. Messages are in `fompi.model.network`.
`Walk` is refined by the digital twin of the tests (`tests/twin.py`), which adds data and random durations.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Mapping
from functools import partial
from itertools import count
from math import ceil, inf
from types import MappingProxyType

from fompi.base import layout
from fompi.base.errors import LayoutError, PlanError
from fompi.base.layout import Sizes
from fompi.model.machine import Machine
from fompi.model.network import EventQueue, Message, Network
from fompi.plans import kernels
from fompi.plans.dependencies import (
    KERNEL_LANES,
    Constraints,
    Frontier,
    announced,
    constraints,
    lane,
    message_numbers,
    track,
)
from fompi.plans.plan import Chunk, Collective, Compute, Op, Plan, Program, Recv, Send
from fompi.traces.trace import Event

Call = tuple[int, int]
"""An op of a plan: (rank, number of the op in the rank's program)."""


def check_sizes(plan: Plan, sizes: Sizes) -> None:
    """Raise LayoutError unless `sizes` fit: one number of rows per rank, for an all-to-all one per pair of ranks."""
    if len(sizes.pairs or sizes.rows) != plan.size:
        raise LayoutError(f"sizes for {len(sizes.pairs or sizes.rows)} ranks, but the plan has {plan.size}")
    by_pair = plan.problem.moves == "all_to_all"
    if bool(sizes.pairs) != by_pair or any(len(row) != plan.size for row in sizes.pairs):
        wanted = f"pairs of {plan.size} x {plan.size} ranks" if by_pair else "rows of each rank"
        raise LayoutError(f"{plan.problem.operation} takes Sizes with the {wanted}, not {sizes}")
    runs = [run for row in sizes.runs for run in row]
    if (by_pair and bool(runs) != bool(plan.problem.experts)) or {*map(len, runs)} - {plan.problem.runs}:
        raise LayoutError(
            f"{plan.problem.operation}: {sizes} must have {plan.problem.runs} runs for each pair of ranks"
        )
    if min((n for row in sizes.pairs or (sizes.rows,) for n in row), default=0) < 0:
        raise LayoutError(f"{sizes}: rows must be 0 or more")


class Walk:
    """The simulation of the first `step` ranks of a plan. They represent all ranks (see `simulate`).

    `known` are constraints of programs that were computed before, by rank. `announces`: one kernel computes the
    products that a device can announce (`announced`).
    """

    def __init__(
        self,
        plan: Plan,
        sizes: Sizes,
        machine: Machine,
        step: int,
        known: Mapping[int, Constraints] = MappingProxyType({}),
        announces: bool = False,
    ):
        check_sizes(plan, sizes)
        self.plan, self.machine, self.step, self.programs = plan, machine, step, plan.programs[:step]
        self.extents = [plan.extents(rank, sizes) for rank in range(step)]
        self.offsets = [
            {b.name: b.offsets(e) for b in p.buffers} for p, e in zip(self.programs, self.extents, strict=True)
        ]
        found = [known.get(p.rank) or constraints(p.ops, plan.pace) for p in self.programs]
        self.frontiers = [*map(Frontier, found)]
        self.announced = [
            announced(p, each.needs) if announces else () for p, each in zip(self.programs, found, strict=True)
        ]
        self.computed = [(0.0, 0.0)] * step  # by the one kernel: elements and operations
        self.gathered = [0] * step  # of these products: how many may start, if their kernel has not begun
        self.numbers = [message_numbers(p.ops) for p in self.programs]
        self.queue = EventQueue()
        self.at = self.queue.at
        self.network = Network(machine, step, self.queue)
        self.released: deque[Call] = deque()  # ops that may start now
        self.start: dict[Call, float] = {}  # -1 after the end
        self.moving: dict[Call, float] = {}  # since when a message moves
        self.posted: dict[tuple[int, int, int], Call] = {}  # one end of a message: (source, dest, number)
        self.ready: list[dict[str, list[int]]] = [{name: [] for name in KERNEL_LANES} for _ in self.programs]
        self.running: list[set[str]] = [set() for _ in self.programs]
        self.owed = [0.0] * step  # seconds that messages and sums have taken from the product that runs
        self.computes_since = [0.0] * step
        self.unseen: list[list[int]] = [[] for _ in self.programs]  # arrived messages that the next poll sees
        self.collectives: deque[tuple[str, int, list[Call]]] = deque()  # all ranks have called: (name, bytes, calls)
        self.collective_runs, self.collective_ended = False, -inf
        self.collective_calls: defaultdict[int, list[Call]] = defaultdict(list)  # by the number of the collective
        self.collective_numbers = [count() for _ in self.programs]
        self.events: list[Event] = []
        self.host = [0.0] * step  # on a device: when the host has enqueued the last kernel
        self.released_by: dict[Call, tuple[float, str]] = {}  # on a device: when the last need ended, and its lane

    # -- for the twin to override
    def jitter(self) -> float:
        return 1.0

    def message_begins(self, source: Call, dest: Call) -> None: ...
    def message_ends(self, source: Call, dest: Call) -> None: ...
    def kernel_ends(self, rank: int, op: Compute) -> None: ...
    def collective_ends(self, calls: list[Call]) -> None: ...

    # -- ops
    def run(self) -> list[Event]:
        """All events, in the order of their ends. Raises PlanError if an op never completes."""
        self.released.extend((rank, i) for rank, frontier in enumerate(self.frontiers) for i in frontier.begin())
        self.begin_released()
        self.queue.run(self.begin_released)
        for rank, program in enumerate(self.programs):
            for i, op in enumerate(program.ops):
                if (rank, i) not in self.start or self.start[rank, i] >= 0:
                    raise PlanError(
                        f"rank {rank} never completes op {i}, {op}", rank, i, str((*op.reads, *op.writes)[0])
                    )
        return self.events

    def begin_released(self) -> None:
        while self.released:
            self.begin(*self.released.popleft())

    def begin(self, rank: int, i: int) -> None:
        if i in self.announced[rank]:
            self.gathered[rank] += 1
            if self.gathered[rank] == len(self.announced[rank]):  # one launch for all of them
                begins = max(self.queue.now, self.on_device(rank, i) if self.machine.launch else 0.0)
                for each in self.announced[rank]:
                    self.at(begins, partial(self.begin_now, rank, each))
            return
        begins = self.on_device(rank, i) if self.machine.launch else 0.0
        if begins > self.queue.now:
            self.at(begins, partial(self.begin_now, rank, i))
        else:
            self.begin_now(rank, i)

    def on_device(self, rank: int, i: int) -> float:
        """When the host has enqueued this kernel and the stream may run it, or the host may start this message."""
        op, machine = self.programs[rank].ops[i], self.machine
        ended, name = self.released_by.get((rank, i), (0.0, ""))
        is_behind_kernel = name in KERNEL_LANES
        if not isinstance(op, Compute):
            return ended + machine.poll if is_behind_kernel else 0.0
        self.host[rank] = max(self.host[rank], 0.0 if is_behind_kernel else ended) + machine.launch
        between = machine.event if is_behind_kernel and name != lane(op)[0] else 0.0
        return max(self.host[rank], ended + between)

    def begin_now(self, rank: int, i: int) -> None:
        op = self.programs[rank].ops[i]
        self.start[rank, i] = self.queue.now
        if isinstance(op, Compute):
            heapq.heappush(self.ready[rank][lane(op)[0]], i)
            self.at(self.queue.now, partial(self.next_kernels, rank))
        elif isinstance(op, Collective):
            self.join_collective(rank, i, op)
        else:
            self.post(rank, i, op)
        self.released.extend((rank, free) for free in self.frontiers[rank].started(i))

    def done(self, rank: int, i: int) -> None:
        op = self.programs[rank].ops[i]
        begun, self.start[rank, i] = self.start[rank, i], -1.0
        size = sum(self.nbytes(rank, c) for c in (op.writes if isinstance(op, Recv) else op.reads))
        waited = self.moving.pop((rank, i), begun) - begun
        self.events.append(Event(rank, track(op), i, str(op), begun, self.queue.now, size, waited))
        freed = [(rank, free) for free in self.frontiers[rank].done(i)]
        if self.machine.launch:
            self.released_by |= dict.fromkeys(freed, (self.queue.now, lane(op)[0]))
        self.released.extend(freed)

    # -- kernels
    def next_kernels(self, rank: int) -> None:
        """Start the next sum or copy, and the next product. On one core, a sum takes its time from the product."""
        ready, running, one_core = self.ready[rank], self.running[rank], self.machine.lanes == 1
        for name in KERNEL_LANES[1:]:
            if ready[name] and name not in running:
                seconds = self.run_kernel(rank, name)
                if one_core and "compute" in running:
                    self.owed[rank] += seconds
        if ready["compute"] and "compute" not in running and not (one_core and "merge" in running):
            self.run_kernel(rank, "compute")

    def run_kernel(self, rank: int, name: str) -> float:
        """Start the next kernel of this lane. Returns its seconds without delays."""
        self.running[rank].add(name)
        i = heapq.heappop(self.ready[rank][name])
        op = self.programs[rank].ops[i]
        assert isinstance(op, Compute)
        self.start[rank, i] = self.queue.now
        if name == "compute":
            self.computes_since[rank] = self.queue.now

        def finish() -> None:
            if name == "compute" and self.owed[rank]:
                owed, self.owed[rank] = self.owed[rank], 0.0
                self.at(self.queue.now + owed, finish)
                return
            self.running[rank].discard(name)
            self.kernel_ends(rank, op)
            self.done(rank, i)
            self.poll(rank)
            self.begin_released()  # a released kernel may be the next one
            self.next_kernels(rank)

        operands = ([(self.shape(rank, c), self.nbytes(rank, c)) for c in chunks] for chunks in (op.reads, op.writes))
        if name in ("download", "upload"):
            seconds = self.machine.copy(self.nbytes(rank, op.reads[0])) * self.jitter()
        elif (own := self.plan.kernel(op.kernel)) is not None:
            seconds = own.seconds_of(op) * self.jitter()
        elif i in self.announced[rank]:
            seconds = self.announced_seconds(rank, i, kernels.demand(op.kernel, *operands)) * self.jitter()
        else:
            seconds = self.machine.kernel(*kernels.demand(op.kernel, *operands)) * self.jitter()
        self.at(self.queue.now + seconds, finish)
        return seconds

    def announced_seconds(self, rank: int, i: int, demand: kernels.Demand) -> float:
        """Seconds of a product of the one kernel. The first one bears its call, the last one its last wave."""
        machine, ops = self.machine, self.announced[rank]
        seconds = machine.announcing.kernel(*demand) + machine.overhead * (i == ops[0])
        self.computed[rank] = self.computed[rank][0] + demand.elements, self.computed[rank][1] + demand.flops
        return seconds + (machine.last_wave(*self.computed[rank]) if i == ops[-1] else 0.0)

    # -- messages
    def post(self, rank: int, i: int, op: Send | Recv) -> None:
        """Post one end of a message. The message is sent when both ends are posted."""
        source, dest = (rank, op.dest) if isinstance(op, Send) else (op.source, rank)
        source, dest = source % self.step, (dest - source + source % self.step) % self.plan.size  # the representatives
        key = (source, dest, self.numbers[rank][i])
        if key not in self.posted:
            self.posted[key] = (rank, i)
            return
        other = self.posted.pop(key)
        send, recv = ((rank, i), other) if isinstance(op, Send) else (other, (rank, i))
        nbytes = self.nbytes(source, self.op(send).reads[0])
        begins, arrives = partial(self.message_moves, send, recv), partial(self.message_arrives, send, recv, nbytes)
        self.network.send(Message((source, dest), nbytes, begins, arrives))

    def message_moves(self, send: Call, recv: Call) -> float:
        jitter = self.jitter()
        self.moving[send] = self.moving[recv] = self.queue.now
        self.message_begins(send, recv)
        return jitter

    def message_arrives(self, send: Call, recv: Call, nbytes: int) -> None:
        self.message_ends(send, recv)
        for rank, i in (send, recv):
            self.complete(rank, i, 1, nbytes)

    def complete(self, rank: int, i: int, messages: int, nbytes: float, at_once: bool = False) -> None:
        """The messages of an op have arrived. The op is done at the next poll of the rank, or at once.

        A product that runs on the same core pays for these messages.
        """
        machine = self.machine
        if machine.lanes == 1 and "compute" in self.running[rank]:
            self.owed[rank] += messages * machine.cpu_message + nbytes * machine.cpu_byte
            if machine.poll and not at_once:
                polls = ceil((self.queue.now - self.computes_since[rank]) / machine.poll)
                self.unseen[rank].append(i)
                self.at(self.computes_since[rank] + polls * machine.poll, partial(self.poll, rank))
                return
        self.done(rank, i)

    def poll(self, rank: int) -> None:
        """The rank sees what has arrived since its last poll. It polls while a product runs, and at its end."""
        arrived, self.unseen[rank] = self.unseen[rank], []
        for i in arrived:
            self.done(rank, i)

    # -- collectives of the MPI library: one after the other, all ranks together
    def join_collective(self, rank: int, i: int, op: Collective) -> None:
        number = next(self.collective_numbers[rank])
        self.collective_calls[number].append((rank, i))
        if len(self.collective_calls[number]) < self.step:
            return
        calls = sorted(self.collective_calls.pop(number))
        most = max(
            sum(self.nbytes(r, c) for c in (*o.reads, *o.writes))
            for r, o in ((r, self.programs[r].ops[j]) for r, j in calls)
        )
        self.collectives.append((op.name, most, calls))
        self.next_collective()

    def next_collective(self) -> None:
        if self.collectives and not self.collective_runs:
            self.collective_runs = True  # kernels that begin at this moment begin first
            self.at(self.queue.now, lambda: self.at(self.queue.now, self.run_collective))

    def run_collective(self) -> None:
        name, most, calls = self.collectives.popleft()
        self.moving.update(dict.fromkeys(calls, self.queue.now))
        behind = any("compute" in running for running in self.running)
        again = self.collective_ended == self.queue.now
        polled = behind and bool(self.machine.sampled(name, self.plan.size, True))  # this curve includes the polls

        def finish() -> None:
            self.collective_runs, self.collective_ended = False, self.queue.now
            self.collective_ends(calls)
            for rank, i in calls:
                op = self.programs[rank].ops[i]
                if "compute" in self.running[rank]:
                    self.owed[rank] += self.machine.library_sums(name, most, self.plan.size)
                moved = sum(self.nbytes(rank, c) for c in (*op.reads, *op.writes))
                self.complete(rank, i, 2 * (self.plan.size - 1), moved, at_once=polled)
            self.next_collective()

        seconds = self.machine.library(name, most, self.plan.size, behind, again)
        self.at(self.queue.now + seconds * self.jitter(), finish)

    # -- sizes
    def op(self, call: Call) -> Op:
        return self.programs[call[0]].ops[call[1]]

    def shape(self, rank: int, chunk: Chunk) -> tuple[int, ...]:
        buffer = self.programs[rank].buffer(chunk.buffer)
        if buffer.axis == "whole" and not buffer.wire:
            return buffer.row
        first, last = rows_of(self.programs[rank], self.offsets[rank], chunk)
        return buffer.shape_of(last - first)

    def nbytes(self, rank: int, chunk: Chunk) -> int:
        return layout.nbytes(self.shape(rank, chunk), self.programs[rank].buffer(chunk.buffer).dtype)


def rows_of(program: Program, offsets: dict[str, list[int]], chunk: Chunk) -> tuple[int, int]:
    """The first row of a chunk in its buffer, and the row after its last one."""
    first = program.buffer(chunk.buffer).first
    starts = offsets[chunk.buffer]
    return starts[chunk.start - first], starts[chunk.stop - first]
