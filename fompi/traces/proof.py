"""Proof of overlap by wall time: the exposed time of one rank's call, and what its kernels waited for.

    exposed = wall time - compute time, measured alone

If the program did other work between the start of a call and the wait for it, this work counts like compute.

The union of intervals in a trace is no proof. A message can look hidden and still slow down the kernel that hides it.
And a measured message counts from its posting, even while no byte moves. So a `Proof` compares the wall time of the
call with compute measured alone. It also names the chunk and the rank that the kernels waited for.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fompi.base import tables
from fompi.base.errors import PlanError
from fompi.plans.dependencies import constraints
from fompi.plans.plan import Collective, Compute, Op, Plan, Recv, Send
from fompi.traces.trace import AGREEMENT, Event, Interval, Trace, intersection, length, union

NOT_OVERLAPPING = ("unfused", "unfused_p2p")
"""Schedules that do not overlap by design. They get no warning."""

WORTH_SECONDS, WORTH_SHARE = 1e-3, 0.1
"""A warning needs more than this many seconds, and more than this share of the wall time. Less is noise."""


class Wait(NamedTuple):
    """Time without a kernel, in seconds, and what the next kernel or the end of the call waited for.

    | `kind` | `what` | `peer` |
    |---|---|---|
    | "recv" | a chunk that `peer` sends | source |
    | "send" | a chunk that must be sent to `peer` first | dest |
    | "collective" | the name of a collective of the MPI library | None |
    | "agreement" | the ranks that had not called yet; the last of them | None |
    | "start" | empty: time between ops, in fompi itself or in a program that announces its inputs | None |
    """

    seconds: float
    kind: str
    what: str
    peer: int | None

    def __str__(self) -> str:
        reason = {
            "recv": f"for {self.what} from rank {self.peer}",
            "send": f"to send {self.what} to rank {self.peer}",
            "collective": f"for the library's {self.what}",
            "agreement": f"for {self.what}",
            "start": "between ops",
        }[self.kind]
        return f"{1e3 * self.seconds:.3f} ms {reason}"


@dataclass(frozen=True)
class Proof:
    """The times of one rank's call, in seconds.

    `wall` is the time from the first start to the last end. `compute_alone` is the time of this rank's kernels without
    messages. `messages_alone` is the time of its messages without kernels. Both are None if they were not measured.
    `kernels` is the time in which kernels ran in this call. `communication` is the time in which a message was posted
    and not done. `tail` is the time after the last kernel. `elsewhere` is the time that the program spent outside the
    call after it started it. `kernels_elsewhere` is the time of this call's kernels that ran during `elsewhere`.
    `waits` are sorted by time, the longest first. `progress` says what moved the messages while kernels ran.
    """

    title: str
    rank: int
    schedule: str
    wall: float
    kernels: float
    communication: float
    tail: float
    nbytes: int
    waits: tuple[Wait, ...]
    compute_alone: float | None = None
    messages_alone: float | None = None
    progress: str = ""
    elsewhere: float = 0.0
    kernels_elsewhere: float = 0.0

    @property
    def compute(self) -> float:
        """`compute_alone`, or `kernels` if it was not measured."""
        return self.kernels if self.compute_alone is None else self.compute_alone

    @property
    def slowdown(self) -> float:
        """Time of the kernels in this call, divided by their time alone."""
        return self.kernels / self.compute if self.compute else 1.0

    @property
    def exposed(self) -> float:
        """The wall time without `elsewhere`, minus the compute that did not run during `elsewhere`. At least 0."""
        attended = 1 - self.kernels_elsewhere / self.kernels if self.kernels else 1.0
        return max(0.0, self.wall - self.elsewhere - self.compute * attended)

    @property
    def messages(self) -> float:
        """`messages_alone`, or `communication` if it was not measured."""
        return self.communication if self.messages_alone is None else self.messages_alone

    @property
    def hidden(self) -> float:
        """`messages - exposed`, at least 0."""
        return max(0.0, self.messages - self.exposed)

    @property
    def idle(self) -> float:
        """The time without a kernel: the sum of `waits`."""
        return sum(wait.seconds for wait in self.waits)

    @property
    def possible(self) -> float:
        """The most that can be hidden: the shorter of `messages` and of `compute + elsewhere`."""
        return min(self.compute + self.elsewhere, self.messages)

    @property
    def warning(self) -> str | None:
        """A sentence if a requested overlap did not happen, else None. None too if there was little to hide.

        It needs `compute_alone` and `messages_alone`. From one call, a message that moves behind a kernel cannot be
        distinguished from a message that rests until the kernel is over.
        """
        worth = max(WORTH_SECONDS, WORTH_SHARE * self.wall)
        if (
            self.schedule in NOT_OVERLAPPING
            or self.compute_alone is None
            or self.messages_alone is None
            or self.possible < worth
        ):
            return None
        if self.exposed < worth or self.hidden >= self.possible / 2:
            return None
        slower = self.wall > self.compute + self.elsewhere + self.messages + worth
        verdict = "slower than without overlap" if slower else "no overlap"
        text = f"{self.title}: {verdict} on rank {self.rank}: the call took {1e3 * self.wall:.1f} ms"
        text += f", compute alone takes {1e3 * self.compute:.1f} ms, messages alone take {1e3 * self.messages:.1f} ms"
        if self.elsewhere:
            text += f", and the program did something else for {1e3 * self.elsewhere:.1f} ms"
        if self.kernels - self.compute > worth:
            text += f". The kernels took {self.slowdown:.2f} times as long as alone"
        if self.waits:
            text += f". The kernels waited {'; '.join(map(str, self.waits[:3]))}"
        return f"{text}. Progress: {self.progress}" if self.progress else text

    def _repr_html_(self) -> str:
        head, *lines = str(self).splitlines()
        figures = [line.split(maxsplit=2) for line in lines if re.match(r"  \w+ +[\d.]+", line)]
        rest = [line.strip() for line in lines if not re.match(r"  \w+ +[\d.]+", line)]
        return tables.html(head, tables.Table(["", "ms", ""], [[*row, ""][:3] for row in figures]), *rest)

    def __str__(self) -> str:
        if self.compute_alone is None:
            compute = "the kernels of this call; not measured alone"
        else:
            compute = f"alone; {self.slowdown:.2f} times as long in this call"
        alone = "" if self.messages_alone is None else f" (alone {1e3 * self.messages_alone:.3f})"
        formula = "wall - compute - elsewhere; time in both counts once" if self.elsewhere else "wall - compute"
        lines = [
            f"{self.title}, rank {self.rank}, in ms",
            f"  wall           {1e3 * self.wall:9.3f}",
            f"  compute        {1e3 * self.compute:9.3f}  {compute}",
            f"  communication  {1e3 * self.communication:9.3f}{alone}, {self.nbytes} bytes",
            f"  hidden         {1e3 * self.hidden:9.3f}",
            f"  exposed        {1e3 * self.exposed:9.3f}  = {formula}",
            f"  tail           {1e3 * self.tail:9.3f}  after the last kernel",
        ]
        if self.elsewhere:
            lines.append(f"  elsewhere      {1e3 * self.elsewhere:9.3f}  the program did something else")
        if self.progress:
            lines.append(f"  progress: {self.progress}")
        lines += [f"  waited {wait}" for wait in self.waits[:8]]
        if len(self.waits) > 8:
            rest = sum(wait.seconds for wait in self.waits[8:])
            lines.append(f"  waited {1e3 * rest:.3f} ms for {len(self.waits) - 8} other reasons")
        return "\n".join([*lines, f"  warning: {self.warning}"] if self.warning else lines)


class RankDependencies:
    """What each op of one rank's program may wait for. It is made once and used for every call.

    `needs` and `behind` are those of `fompi.plans.dependencies.Constraints`.
    """

    def __init__(self, plan: Plan, rank: int):
        self.rank, self.schedule = rank, plan.schedule
        self.ops: tuple[Op, ...] = plan.programs[rank].ops
        self.needs, self.behind, _ = constraints(self.ops, plan.pace)


def prove(
    trace: Trace,
    dependencies: RankDependencies,
    *,
    compute_alone: float | None = None,
    messages_alone: float | None = None,
    progress: str = "",
    elsewhere: Iterable[Interval] = (),
) -> Proof:
    """The Proof of one rank's call from its trace: `prove(trace, RankDependencies(plan, rank))`.

    The trace may be predicted or measured. `compute_alone` is the time of this rank's kernels without messages, in
    seconds. `messages_alone` is the time of its messages without kernels. `progress` says what moved the messages while
    kernels ran. `elsewhere` are the intervals in which the program did something else than wait in fompi.

    Raises PlanError if the trace has no event of this rank.
    """
    rank = dependencies.rank
    events = [e for e in trace.events if e.rank == rank]
    if not events:
        raise PlanError(f"the trace has no event of rank {rank}", rank)
    begin, end = min(e.start for e in events), max(e.end for e in events)
    agreements = [e for e in events if e.lane == AGREEMENT]
    away = intersection(union(elsewhere), [(begin, end)])
    agreed = max([begin, *(e.end for e in agreements)])
    gaps: list[Gap] = [(e.start, e.end, ("agreement", e.name, None)) for e in agreements]
    gaps += _gaps([e for e in events if e.lane != AGREEMENT], agreed, end, dependencies)
    waits = (Wait(stop - start - length(intersection([(start, stop)], away)), *reason) for start, stop, reason in gaps)
    busy = union((e.start, e.end) for e in events if e.is_compute)
    return Proof(
        title=trace.title,
        rank=rank,
        schedule=dependencies.schedule,
        wall=end - begin,
        kernels=length(busy),
        communication=length(union(e.moves for e in events if e.is_message)),
        tail=end - max((stop for _, stop in busy), default=begin),
        nbytes=sum(e.nbytes for e in events if e.is_message),
        waits=total(wait for wait in waits if wait.seconds > 0),
        compute_alone=compute_alone,
        messages_alone=messages_alone,
        progress=progress,
        elsewhere=length(away),
        kernels_elsewhere=length(intersection(busy, away)),
    )


class Overlap(NamedTuple):
    """The time in which `messages` moved while a kernel of the name `kernel` ran, in seconds."""

    seconds: float
    messages: str
    kernel: str

    def __str__(self) -> str:
        return f"{1e3 * self.seconds:.3f} ms of {self.messages} behind {self.kernel}"


def overlaps(trace: Trace, dependencies: RankDependencies) -> list[Overlap]:
    """Which messages one rank hides behind which kernels, in a predicted or measured trace. The longest comes first."""
    messages, kernels = defaultdict[str, list[Interval]](list), defaultdict[str, list[Interval]](list)
    for event in (e for e in trace.events if e.rank == dependencies.rank and e.op >= 0):
        op = dependencies.ops[event.op]
        if isinstance(op, Compute):
            kernels[op.kernel].append((event.start, event.end))
        else:
            kind, name, peer = _reason(op)
            labels = {"recv": f"messages from rank {peer}", "send": f"messages to rank {peer}"}
            messages[labels.get(kind, f"the library's {name}")].append(event.moves)
    pairs = [
        Overlap(length(intersection(union(moves), union(runs))), label, kernel)
        for label, moves in messages.items()
        for kernel, runs in kernels.items()
    ]
    return sorted((overlap for overlap in pairs if overlap.seconds > 0), key=lambda overlap: -overlap.seconds)


def total(waits: Iterable[Wait]) -> tuple[Wait, ...]:
    """One wait per reason, with the sum of its seconds. The longest comes first."""
    sums: defaultdict[tuple[str, str, int | None], float] = defaultdict(float)
    for seconds, *reason in waits:
        sums[tuple(reason)] += seconds  # type: ignore[index]
    return tuple(sorted((Wait(seconds, *reason) for reason, seconds in sums.items()), key=lambda w: -w.seconds))


Reason = tuple[str, str, int | None]
"""(kind, what, peer) of a Wait."""

Gap = tuple[float, float, Reason]
"""(start, end, reason) of an interval without a kernel."""


def _gaps(events: list[Event], begin: float, end: float, dependencies: RankDependencies) -> Iterator[Gap]:
    """The intervals without a kernel, each cut where its reason changes."""
    by_op = {e.op: e for e in events if e.op >= 0}  # packing before the call is not an op of the program
    kernels = sorted((e for e in events if e.is_compute), key=lambda e: e.start)
    free = begin
    for kernel in kernels:
        if kernel.start > free:
            yield from _waits_before(kernel.op, free, kernel.start, by_op, dependencies)
        free = max(free, kernel.end)
    if end > free:
        last = max(events, key=lambda e: e.end)
        yield from _waits_for(last.op, free, end, by_op, dependencies)


def _waits_before(
    op: int, begin: float, end: float, by_op: dict[int, Event], dependencies: RankDependencies
) -> Iterator[Gap]:
    """Why `op` started at `end` and not at `begin`: the op that released it last, then what that op had waited for."""
    while end > begin:
        cause, since = _released_by(op, by_op, dependencies)
        since = min(max(since, begin), end)
        if since < end:  # nothing held `op` back any more
            yield since, end, ("start", "", None)
        if since <= begin:
            return
        assert cause is not None
        began = min(max(by_op[cause].start, begin), since)
        if began < since:
            yield began, since, _reason(dependencies.ops[cause])
        op, end = cause, began


def _waits_for(
    op: int, begin: float, end: float, by_op: dict[int, Event], dependencies: RankDependencies
) -> Iterator[Gap]:
    """From `begin` to `end` the call waited for `op`, and before `op` started, for what `op` waited for."""
    began = min(max(by_op[op].start, begin), end)
    if began < end:
        yield began, end, _reason(dependencies.ops[op])
    yield from _waits_before(op, begin, began, by_op, dependencies)


def _released_by(op: int, by_op: dict[int, Event], dependencies: RankDependencies) -> tuple[int | None, float]:
    """The op that released `op` last, and when: by its end, or by its start if `op` only had to start after it."""
    if op < 0:
        return None, float("-inf")
    ends = [(by_op[i].end, i) for i in dependencies.needs[op]]
    behind = dependencies.behind[op]
    if behind >= 0:
        ends.append((by_op[behind].start, behind))
    when, cause = max(ends, default=(float("-inf"), None))
    return cause, when


def _reason(op: Op) -> Reason:
    if isinstance(op, Recv):
        return "recv", str(op.chunk), op.source
    if isinstance(op, Send):
        return "send", str(op.chunk), op.dest
    if isinstance(op, Collective):
        return "collective", op.name, None
    return "start", "", None
