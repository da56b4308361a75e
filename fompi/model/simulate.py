"""The event walk over the ranks of a plan.

`simulate(plan, machine)` predicts the Trace, `predict` how long it takes.

Where ranks do the same as those `step` further on (`symmetry`), the first `step` of them stand for all: a message
to a rank beyond them is the one that its like gets.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from math import ceil, inf, lcm
from types import MappingProxyType

from fompi.base import layout
from fompi.base.errors import LayoutError, PlanError
from fompi.base.layout import Sizes
from fompi.model.machine import Link, Machine
from fompi.model.rotation import rotated
from fompi.plans import kernels
from fompi.plans.dependencies import Constraints, Frontier, constraints, lane, messages, track
from fompi.plans.plan import Chunk, Collective, Compute, Op, Plan, Program, Recv, Send
from fompi.traces.trace import Event, Trace


def simulate(plan: Plan, machine: Machine | str, sizes: Sizes | None = None) -> Trace:
    """The Trace that `machine` (or the name, or the file, of one) would measure for `plan` with these sizes.

    Without sizes: with those that the plan was made for.
    """
    machine = Machine.of(machine)
    if plan.size > MOST_RANKS:
        return representatives(plan, machine, sizes)
    events = Walk(plan, sizes or plan.sizes, machine, plan.size).run()
    return Trace("predicted", f"{plan.problem} by {plan.schedule} on {machine.name}", tuple(events))


FEW_RANKS, MOST_RANKS = 16, 64
"""More ranks than the first are not walked one by one where there is another way to know how long they take; a trace of
more than the second shows those that stand for all."""


def representatives(plan: Plan, machine: Machine, sizes: Sizes | None = None) -> Trace:
    """The same for the ranks that stand for all, where some do: as long, and quicker to come by.

    Many ranks that differ by one row are taken to have the greater number, if that makes them alike.
    """
    sizes = sizes or plan.sizes
    known: dict[int, Constraints] = {}
    step = symmetry(plan, sizes, machine, known)
    if step > FEW_RANKS:
        if (found := rotated(plan, sizes, machine)) is not None:
            return found
        alike = Sizes((max(sizes.rows, default=0),) * plan.size)
        if sizes.rows and max(sizes.rows) == min(sizes.rows) + 1 and symmetry(plan, alike, machine) < step:
            return representatives(plan, machine, alike)
    title = f"{plan.problem} by {plan.schedule} on {machine.name}"
    some = "" if step == plan.size else f"; ranks 0 to {step - 1} of {plan.size}, the others do the same"
    return Trace("predicted", title + some, tuple(Walk(plan, sizes, machine, step, known).run()))


def predict(plan: Plan, machine: Machine, sizes: Sizes | None = None) -> float:
    """The seconds that `simulate` predicts."""
    return representatives(plan, machine, sizes).seconds


SYMMETRIC = (
    "unfused",
    "sliced",
    "unfused_p2p",
    "sliced_p2p",
    "direct",
    "pairwise",
    "ring",
    "bidirectional",
    "hierarchical",
)
"""The schedules by which ranks on equal links do the same, each from where it is: no root, no order of the ranks."""


def check_sizes(plan: Plan, sizes: Sizes) -> None:
    """Raise LayoutError unless these are rows of as many ranks as the plan has, of an all-to-all those for each."""
    if len(sizes.pairs or sizes.rows) != plan.size:
        raise LayoutError(f"sizes for {len(sizes.pairs or sizes.rows)} ranks, but the plan has {plan.size}")
    dealt = plan.problem.moves == "all_to_all"
    if bool(sizes.pairs) != dealt or any(len(row) != plan.size for row in sizes.pairs):
        wanted = f"pairs of {plan.size} x {plan.size} ranks" if dealt else "rows of each rank"
        raise LayoutError(f"{plan.problem.operation} takes Sizes with the {wanted}, not {sizes}")
    if min((n for row in sizes.pairs or (sizes.rows,) for n in row), default=0) < 0:
        raise LayoutError(f"{sizes}: rows are 0 or more")


def symmetry(plan: Plan, sizes: Sizes, machine: Machine, known: dict[int, Constraints] | None = None) -> int:
    """The least `step` such that each rank does what the one `step` further on does; if there is none, all of them.

    What the ranks that were looked at need is put into `known`.
    """
    check_sizes(plan, sizes)
    size = plan.size
    if plan.order or plan.schedule.partition("(")[0] not in SYMMETRIC or plan.problem.operation == "broadcast":
        return size
    step = lcm(max((level.ranks for level in machine.levels if level.ranks < size), default=1), plan.group)
    counts = sizes.pairs or sizes.rows
    if size % step or step == size or len(set(map(machine.rate, range(size)))) > 1:
        return size
    if sizes.pairs:
        alike = all(row[-step:] + row[:-step] == counts[(r + step) % size] for r, row in enumerate(sizes.pairs))
    else:
        alike = all(n == sizes.rows[(r + step) % size] for r, n in enumerate(sizes.rows))
    if not alike:
        return size
    pairs = {(rank, (rank + step) % size) for rank in (0, step - 1, size - 1)}
    known = {} if known is None else known
    return step if all(_alike(plan, *pair, known) for pair in pairs) else size


def _alike(plan: Plan, one: int, other: int, known: dict[int, Constraints]) -> bool:
    """Whether two ranks do the same at the same time, with peers as far away as they are from each other.

    Of many ranks some may have a column more than others: that is taken for nothing.
    """
    first, second = plan.programs[one], plan.programs[other]
    a, b = first.ops, second.ops
    shift = other - one
    for rank in {one, other} - known.keys():
        known[rank] = constraints(plan.programs[rank].ops, plan.pace)
    return (
        len(a) == len(b)
        and (plan.size > FEW_RANKS or [x.row for x in first.buffers] == [y.row for y in second.buffers])
        and known[one] == known[other]
        and all(
            type(p) is type(q)
            and (lane(p)[0] in ("compute", "merge", "collective") or (lane(p)[1] + shift) % plan.size == lane(q)[1])
            and getattr(p, "kernel", "") == getattr(q, "kernel", "")
            for p, q in zip(a, b, strict=True)
        )
    )


Port = tuple[str, int, int]


class _Flow:
    """A message under way: `left` seconds at full rate, of which it has `share` since `since`."""

    __slots__ = ("dest", "latency", "left", "pair", "ports", "share", "since", "source", "turn")

    def __init__(self, pair: tuple[int, int], source: tuple[int, int], dest: tuple[int, int], ports: Sequence[Port]):
        self.pair, self.source, self.dest, self.ports = pair, source, dest, ports
        self.left = self.latency = self.share = self.since = 0.0
        self.turn = 0


class Walk:
    """Time moves from event to event. A rank runs one kernel at a time and one sum beside it; messages share ports."""

    def __init__(
        self,
        plan: Plan,
        sizes: Sizes,
        machine: Machine,
        step: int,
        known: Mapping[int, Constraints] = MappingProxyType({}),
    ):
        check_sizes(plan, sizes)
        self.plan, self.machine, self.step, self.programs = plan, machine, step, plan.programs[:step]
        self.extents = [plan.extents(rank, sizes) for rank in range(step)]
        self.offsets = [
            {b.name: b.offsets(e) for b in p.buffers} for p, e in zip(self.programs, self.extents, strict=True)
        ]
        needed = (known.get(p.rank) or constraints(p.ops, plan.pace) for p in self.programs)
        self.frontiers = [Frontier(each) for each in needed]
        self.numbers = [messages(p.ops) for p in self.programs]
        self.posted: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.released: deque[tuple[int, int]] = deque()
        self.ready: list[dict[str, list[int]]] = [{"compute": [], "merge": []} for _ in self.programs]
        self.running: list[set[str]] = [set() for _ in self.programs]
        self.owed = [0.0] * step  # seconds that messages and sums have taken from the kernel that runs
        self.computes_since = [0.0] * step
        self.unseen: list[list[int]] = [[] for _ in self.programs]  # what has come while a kernel runs
        self.outgoing: defaultdict[tuple[int, int], deque[tuple[int, tuple[int, int]]]] = defaultdict(deque)
        self.links: dict[tuple[int, int], tuple[Link, list[Port]]] = {}
        self.under_way: set[tuple[int, int]] = set()
        self.flows: defaultdict[Port, dict[_Flow, None]] = defaultdict(dict)
        self.changed: set[Port] = set()
        self.beginning: list[tuple[_Flow, float]] = []  # messages of this moment, and the bursts of their links
        self.credit: dict[Port, tuple[float, float]] = {}  # what a port passes at once, and since when it is silent
        self.collectives: deque[tuple[str, int, list[tuple[int, int]]]] = deque()
        self.collective_runs, self.collective_ended = False, -inf
        self.collective: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self.collectives_passed = [count() for _ in self.programs]
        self.start: dict[tuple[int, int], float] = {}
        self.moving: dict[tuple[int, int], float] = {}  # since when a message is under way
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
            heapq.heappush(self.ready[rank][lane(op)[0]], i)
            self.at(self.now, lambda: self.next_kernels(rank))
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
        self.events.append(Event(rank, track(op), i, str(op), begun, self.now, size, waited))
        self.released.extend((rank, free) for free in self.frontiers[rank].done(i))

    def next_kernels(self, rank: int) -> None:
        """Sums and copies go first. On a core that both share, one beside a kernel takes its time from the kernel."""
        ready, running, alone = self.ready[rank], self.running[rank], self.machine.lanes == 1
        if ready["merge"] and "merge" not in running:
            seconds = self.run_kernel(rank, "merge")
            if alone and "compute" in running:
                self.owed[rank] += seconds
        if ready["compute"] and "compute" not in running and not (alone and "merge" in running):
            self.run_kernel(rank, "compute")

    def run_kernel(self, rank: int, name: str) -> float:
        """The next one of this lane; how long it takes by itself."""
        self.running[rank].add(name)
        i = heapq.heappop(self.ready[rank][name])
        op = self.programs[rank].ops[i]
        assert isinstance(op, Compute)
        self.start[rank, i] = self.now
        if name == "compute":
            self.computes_since[rank] = self.now

        def finish() -> None:
            if name == "compute" and self.owed[rank]:
                owed, self.owed[rank] = self.owed[rank], 0.0
                self.at(self.now + owed, finish)
                return
            self.running[rank].discard(name)
            self.kernel_ends(rank, op)
            self.done(rank, i)
            self.look(rank)
            self.begin_released()  # among them kernels that come before others
            self.next_kernels(rank)

        taken = ([(self.shape(rank, c), self.nbytes(rank, c)) for c in chunks] for chunks in (op.reads, op.writes))
        demand = kernels.demand(op.kernel, *taken)
        seconds = self.machine.kernel(*demand) * self.jitter()
        self.at(self.now + seconds, finish)
        return seconds

    def post(self, rank: int, i: int, op: Send | Recv) -> None:
        source, dest = (rank, op.dest) if isinstance(op, Send) else (op.source, rank)
        source, dest = source % self.step, (dest - source + source % self.step) % self.plan.size  # of its like
        key = (source, dest, self.numbers[rank][i])
        if key not in self.posted:
            self.posted[key] = (rank, i)
            return
        other = self.posted.pop(key)
        s, d = ((rank, i), other) if isinstance(op, Send) else (other, (rank, i))
        pair = (source, dest)
        self.outgoing[pair].append((s[1], d))
        self.at(self.now, lambda: self.next_message(pair))

    def next_message(self, pair: tuple[int, int]) -> None:
        """Those for one peer leave one after the other, as both ends come to wait for them."""
        if pair in self.under_way or not self.outgoing[pair]:
            return
        self.under_way.add(pair)
        i, d = self.outgoing[pair].popleft()
        s = (pair[0], i)
        if pair not in self.links:
            link = self.machine.link(*pair)
            self.links[pair] = link, [self.port(*port) for port in link.ports]
        link, ports = self.links[pair]
        jitter = self.jitter()
        flow = _Flow(pair, s, d, ports)
        flow.left = link.busy(self.nbytes(s[0], self._op(s).reads[0])) * jitter
        if link.level.burst:
            self.beginning.append((flow, link.level.burst))
        flow.latency = link.level.latency * jitter
        self.moving[s] = self.moving[d] = self.now
        self.message_begins(s, d)
        for port in flow.ports:
            self.flows[port][flow] = None
        flow.since = self.now
        self.share(flow.ports)

    def pass_at_once(self) -> None:
        """What of the messages that begin now passes at once: the less, the less silent their ports were before.

        They have equal shares of what a port holds, as they have of its rate (progressive filling).
        """
        bursts = {port: burst for flow, burst in self.beginning for port in flow.ports}
        waiting = [flow for flow, _ in self.beginning]
        new, held = set(waiting), {}
        for port, burst in bursts.items():
            left, silent = self.credit.get(port, (burst, self.now))
            held[port] = min(burst, left + self.now - silent) if new.issuperset(self.flows[port]) else left
        while waiting := [flow for flow in waiting if flow.left > 0 and all(held[port] > 0 for port in flow.ports)]:
            crowd = Counter(port for flow in waiting for port in flow.ports)
            shares = {port: held[port] / flows for port, flows in crowd.items()}
            each = min(*shares.values(), *(flow.left for flow in waiting))
            for flow in waiting:
                flow.left -= each
            for port, share in shares.items():
                held[port] = (share - each) * crowd[port]
        self.credit.update((port, (left, self.now)) for port, left in held.items())
        self.beginning = []

    def port(self, way: str, number: int, end: int) -> Port:
        """That of the rank, or group, which stands for this one."""
        shared = number >= 0 and self.machine.levels[number].shared
        return way, number, end % (-(-self.step // self.machine.levels[number].ranks) if shared else self.step)

    def capacity(self, port: Port) -> int:
        """So many messages go through at full rate: of a rank's own ports there may be several."""
        return self.machine.ports if port[1] < 0 else 1

    def share(self, ports: Sequence[Port]) -> None:
        """What goes through these ports gets other shares, once all that begins or ends at this moment has done so."""
        if not self.changed:
            self.at(self.now, self.settle)
        self.changed.update(ports)

    def settle(self) -> None:
        """Messages at one port have equal shares of it, and go as fast as the fullest of their ports lets them, but no
        faster than one by itself."""
        self.pass_at_once()
        ports, self.changed = sorted(self.changed), set()
        for flow in dict.fromkeys(flow for port in ports for flow in self.flows[port]):
            share = min(1.0, *(self.capacity(port) / len(self.flows[port]) for port in flow.ports))
            if share != flow.share:
                flow.left = max(0.0, flow.left - (self.now - flow.since) * flow.share)
                flow.share, flow.since, flow.turn = share, self.now, flow.turn + 1
                self.at(self.now + flow.left / share, partial(self.drained, flow, flow.turn))

    def drained(self, flow: _Flow, turn: int) -> None:
        """The last byte has left, unless the message has got another share since."""
        if flow.turn != turn:
            return
        for port in flow.ports:
            del self.flows[port][flow]
            if port in self.credit:
                self.credit[port] = self.credit[port][0], self.now
        self.under_way.discard(flow.pair)
        self.share(flow.ports)
        self.next_message(flow.pair)
        self.at(self.now + flow.latency, partial(self.arrived, flow))

    def arrived(self, flow: _Flow) -> None:
        self.message_ends(flow.source, flow.dest)
        nbytes = self.nbytes(flow.source[0], self._op(flow.source).reads[0])
        for rank, i in (flow.source, flow.dest):
            self.seen(rank, i, 1, nbytes)

    def seen(self, rank: int, i: int, messages: int, nbytes: float, at_once: bool = False) -> None:
        """A kernel that runs on the same core pays for them, and the rank sees it at its next look, or at once."""
        machine = self.machine
        if machine.lanes == 1 and "compute" in self.running[rank]:
            self.owed[rank] += messages * machine.cpu_message + nbytes * machine.cpu_byte
            if machine.poll and not at_once:
                looks = ceil((self.now - self.computes_since[rank]) / machine.poll)
                self.unseen[rank].append(i)
                self.at(self.computes_since[rank] + looks * machine.poll, partial(self.look, rank))
                return
        self.done(rank, i)

    def look(self, rank: int) -> None:
        """So long after a kernel has begun, or at its end: what has come meanwhile."""
        arrived, self.unseen[rank] = self.unseen[rank], []
        for i in arrived:
            self.done(rank, i)

    def join_collective(self, rank: int, i: int, op: Collective) -> None:
        k = next(self.collectives_passed[rank])
        self.collective[k].append((rank, i))
        if len(self.collective[k]) < self.step:
            return
        calls = sorted(self.collective.pop(k))
        most = max(
            sum(self.nbytes(r, c) for c in (*o.reads, *o.writes))
            for r, o in ((r, self.programs[r].ops[j]) for r, j in calls)
        )
        self.collectives.append((op.name, most, calls))
        self.next_collective()

    def next_collective(self) -> None:
        """They go one after the other, all ranks together."""
        if self.collectives and not self.collective_runs:
            self.collective_runs = True
            self.at(self.now, lambda: self.at(self.now, self.run_collective))  # after kernels that begin at this moment

    def run_collective(self) -> None:
        name, most, calls = self.collectives.popleft()
        self.moving.update(dict.fromkeys(calls, self.now))
        behind = any("compute" in running for running in self.running)
        again = self.collective_ended == self.now
        measured = behind and bool(self.machine.sampled(name, self.plan.size, True))  # with the polls

        def finish() -> None:
            self.collective_runs, self.collective_ended = False, self.now
            self.collective_ends(calls)
            for rank, i in calls:
                op = self.programs[rank].ops[i]
                if "compute" in self.running[rank]:
                    self.owed[rank] += self.machine.native_sums(name, most, self.plan.size)
                moved = sum(self.nbytes(rank, c) for c in (*op.reads, *op.writes))
                self.seen(rank, i, 2 * (self.plan.size - 1), moved, at_once=measured)
            self.next_collective()

        seconds = self.machine.native(name, most, self.plan.size, behind, again)
        self.at(self.now + seconds * self.jitter(), finish)

    def _op(self, at: tuple[int, int]) -> Op:
        return self.programs[at[0]].ops[at[1]]

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
