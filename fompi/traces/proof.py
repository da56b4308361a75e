"""What overlap is worth, proven by the wall clock: exposed time is the wall time minus the compute time measured alone.

Of a call that was started, and waited for later, what the program did between counts as compute too.

The union of intervals in a trace is no proof: a message may look hidden while it slows the kernel it hides behind, and
a message counts from its posting, whether or not anything moves. A `Proof` says how much of one rank's call was not
compute, and why: which chunk of which rank the kernels waited for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fompi.base.errors import PlanError
from fompi.plans.dependencies import constraints
from fompi.plans.plan import Collective, Compute, Op, Plan, Recv, Send
from fompi.traces.trace import AGREEMENT, Event, Interval, Trace, intersection, length, union

NOT_OVERLAPPING = ("unfused", "unfused_p2p")
"""The schedules of which nobody asks that they overlap."""

WORTH_SECONDS, WORTH_SHARE = 1e-3, 0.1
"""What is shorter than this, or than this share of the wall time, is not worth a warning."""


class Wait(NamedTuple):
    """Time in which no kernel ran, and what the next one (or the end) waited for.

    `what` is a chunk that came from `peer` ("recv") or had to leave to it ("send"), or the name of a collective of
    the library ("collective"), or who came last to a call ("agreement"); "start" is time between ops: of fompi
    itself, or of a program that announces its inputs.
    """

    seconds: float
    kind: str
    what: str
    peer: int | None

    def __str__(self) -> str:
        reason = {
            "recv": f"for {self.what} from rank {self.peer}",
            "send": f"for {self.what} to leave to rank {self.peer}",
            "collective": f"for the library's {self.what}",
            "agreement": f"for {self.what}",
            "start": "between ops",
        }[self.kind]
        return f"{1e3 * self.seconds:.3f} ms {reason}"


@dataclass(frozen=True)
class Proof:
    """One rank's call, in seconds.

    `compute_alone` is the time of this rank's kernels without messages. `messages_alone` is the time of its messages
    without kernels. Both are None where they were not measured. `kernels` is the time in which kernels ran in this
    call. `communication` is the time in which a message was posted and not done. `tail` is the time after the last
    kernel. `elsewhere` is the time the program spent outside the call after it started it. `kernels_elsewhere` is the
    time of the kernels that ran meanwhile.
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
        """Measured alone; if it was not, what the kernels took in this call."""
        return self.kernels if self.compute_alone is None else self.compute_alone

    @property
    def slowdown(self) -> float:
        """How much longer the kernels took than alone: 1.1 for a tenth."""
        return self.kernels / self.compute if self.compute else 1.0

    @property
    def exposed(self) -> float:
        """What the call took beyond its compute, and beyond what the program did meanwhile."""
        attended = 1 - self.kernels_elsewhere / self.kernels if self.kernels else 1.0
        return max(0.0, self.wall - self.elsewhere - self.compute * attended)

    @property
    def messages(self) -> float:
        """What the messages take: alone, if that was measured."""
        return self.communication if self.messages_alone is None else self.messages_alone

    @property
    def hidden(self) -> float:
        return max(0.0, self.messages - self.exposed)

    @property
    def idle(self) -> float:
        """The time in which no kernel ran."""
        return sum(wait.seconds for wait in self.waits)

    @property
    def possible(self) -> float:
        """What can be hidden at all: the shorter of both."""
        return min(self.compute + self.elsewhere, self.messages)

    @property
    def warning(self) -> str | None:
        """What to say where an overlap that was asked for did not happen; None where it did, or where none can be.

        Judged only where compute and messages were both measured alone: in one call by itself, a message that moves
        behind a kernel cannot be told from one that rests until the kernel is over.
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
        verdict = "slower than one after the other" if slower else "no overlap"
        text = f"{self.title}: {verdict} on rank {self.rank}: {1e3 * self.wall:.1f} ms, where"
        text += f" compute alone takes {1e3 * self.compute:.1f} and the messages alone {1e3 * self.messages:.1f} ms"
        if self.elsewhere:
            text += f", and the program did something else for {1e3 * self.elsewhere:.1f} ms"
        reasons = [str(wait) for wait in self.waits[:3]]
        if self.kernels - self.compute > worth:
            reasons.insert(0, f"the kernels took {self.slowdown:.2f} times as long as alone")
        text += f". {'; '.join(reasons)}" if reasons else ""
        return f"{text}. Progress: {self.progress}" if self.progress else text

    def __str__(self) -> str:
        alone = "in this call" if self.compute_alone is None else "alone"
        bare = "" if self.messages_alone is None else f" (alone {1e3 * self.messages_alone:.3f})"
        beyond = "compute - elsewhere, less what is both" if self.elsewhere else "compute"
        lines = [
            f"{self.title}, rank {self.rank}, in ms",
            f"  wall           {1e3 * self.wall:9.3f}",
            f"  compute        {1e3 * self.compute:9.3f}  {alone}; the kernels took {self.slowdown:.2f} times that",
            f"  communication  {1e3 * self.communication:9.3f}{bare}, {self.nbytes} bytes",
            f"  hidden         {1e3 * self.hidden:9.3f}",
            f"  exposed        {1e3 * self.exposed:9.3f}  = wall - {beyond}",
            f"  tail           {1e3 * self.tail:9.3f}  after the last kernel",
        ]
        if self.elsewhere:
            lines.append(f"  elsewhere      {1e3 * self.elsewhere:9.3f}  the program did something else")
        if self.progress:
            lines.append(f"  progress: {self.progress}")
        lines += [f"  waited {wait}" for wait in self.waits[:8]]
        if len(self.waits) > 8:
            rest = sum(wait.seconds for wait in self.waits[8:])
            lines.append(f"  waited {1e3 * rest:.3f} ms for {len(self.waits) - 8} more")
        return "\n".join([*lines, f"  warning: {self.warning}"] if self.warning else lines)


class Needs:
    """What each op of one rank's program may wait for. Made once, used for every call."""

    def __init__(self, plan: Plan, rank: int):
        self.rank, self.schedule = rank, plan.schedule
        self.ops: tuple[Op, ...] = plan.programs[rank].ops
        self.needs, self.behind, _ = constraints(self.ops, plan.pace)


def prove(
    trace: Trace,
    needs: Needs,
    *,
    compute_alone: float | None = None,
    messages_alone: float | None = None,
    progress: str = "",
    elsewhere: Iterable[Interval] = (),
) -> Proof:
    """The Proof of one rank's call from its trace, predicted or measured: `prove(trace, Needs(plan, rank))`.

    `compute_alone` is the time of that rank's kernels without messages, `messages_alone` that of its messages without
    kernels. `progress` says how messages progressed. `elsewhere` are the intervals in which the program did something
    else than wait in fompi.
    """
    rank = needs.rank
    events = [e for e in trace.events if e.rank == rank]
    if not events:
        raise PlanError(f"the trace has no event of rank {rank}", rank)
    begin, end = min(e.start for e in events), max(e.end for e in events)
    came = [e for e in events if e.lane == AGREEMENT]
    gone = intersection(union(elsewhere), [(begin, end)])
    all_here = max([begin, *(e.end for e in came)])
    gaps: list[Gap] = [(e.start, e.end, ("agreement", e.name, None)) for e in came]
    gaps += _gaps([e for e in events if e.lane != AGREEMENT], all_here, end, needs)
    waits = (Wait(stop - start - length(intersection([(start, stop)], gone)), *why) for start, stop, why in gaps)
    busy = union((e.start, e.end) for e in events if e.is_compute)
    return Proof(
        title=trace.title,
        rank=rank,
        schedule=needs.schedule,
        wall=end - begin,
        kernels=length(busy),
        communication=length(union(e.moves for e in events if e.is_message)),
        tail=end - max((stop for _, stop in busy), default=begin),
        nbytes=sum(e.nbytes for e in events if e.is_message),
        waits=total(wait for wait in waits if wait.seconds > 0),
        compute_alone=compute_alone,
        messages_alone=messages_alone,
        progress=progress,
        elsewhere=length(gone),
        kernels_elsewhere=length(intersection(busy, gone)),
    )


class Cover(NamedTuple):
    """So long messages of this kind were under way while a kernel of this name ran."""

    seconds: float
    messages: str
    kernel: str

    def __str__(self) -> str:
        return f"{1e3 * self.seconds:.3f} ms of {self.messages} behind {self.kernel}"


def covers(trace: Trace, needs: Needs) -> list[Cover]:
    """What is hidden behind what on one rank, predicted or measured; the longest first."""
    messages, kernels = defaultdict[str, list[Interval]](list), defaultdict[str, list[Interval]](list)
    for event in (e for e in trace.events if e.rank == needs.rank and e.op >= 0):
        op = needs.ops[event.op]
        if isinstance(op, Compute):
            kernels[op.kernel].append((event.start, event.end))
        else:
            kind, name, peer = _reason(op)
            what = {"recv": f"what comes from rank {peer}", "send": f"what goes to rank {peer}"}
            messages[what.get(kind, f"the library's {name}")].append(event.moves)
    found = [
        Cover(length(intersection(union(moves), union(runs))), what, kernel)
        for what, moves in messages.items()
        for kernel, runs in kernels.items()
    ]
    return sorted((cover for cover in found if cover.seconds > 0), key=lambda cover: -cover.seconds)


def total(waits: Iterable[Wait]) -> tuple[Wait, ...]:
    """The same waits, those for the same thing added up; the longest first."""
    sums: defaultdict[tuple[str, str, int | None], float] = defaultdict(float)
    for seconds, *reason in waits:
        sums[tuple(reason)] += seconds  # type: ignore[index]
    return tuple(sorted((Wait(seconds, *reason) for reason, seconds in sums.items()), key=lambda w: -w.seconds))


Why = tuple[str, str, int | None]
Gap = tuple[float, float, Why]


def _gaps(events: list[Event], begin: float, end: float, needs: Needs) -> Iterator[Gap]:
    """When no kernel ran, and why, as a Wait says it."""
    by_op = {e.op: e for e in events if e.op >= 0}  # what fompi packs before a call is no op of the program
    kernels = sorted((e for e in events if e.is_compute), key=lambda e: e.start)
    free = begin
    for kernel in kernels:
        if kernel.start > free:
            yield from _reasons(kernel.op, free, kernel.start, by_op, needs)
        free = max(free, kernel.end)
    if end > free:
        last = max(events, key=lambda e: e.end)
        yield from _message(last.op, free, end, by_op, needs)


def _reasons(op: int, begin: float, end: float, by_op: dict[int, Event], needs: Needs) -> Iterator[Gap]:
    """Why `op`, begun at `end`, did not begin at `begin`: what it needed last, and what that had waited for before."""
    while end > begin:
        cause, since = _released_by(op, by_op, needs)
        since = min(max(since, begin), end)
        if since < end:  # it could have begun
            yield since, end, ("start", "", None)
        if since <= begin:
            return
        assert cause is not None
        began = min(max(by_op[cause].start, begin), since)
        if began < since:
            yield began, since, _reason(needs.ops[cause])
        op, end = cause, began


def _message(op: int, begin: float, end: float, by_op: dict[int, Event], needs: Needs) -> Iterator[Gap]:
    """From `begin` to `end` all waited for `op`, and, before it began, for what it waited for."""
    began = min(max(by_op[op].start, begin), end)
    if began < end:
        yield began, end, _reason(needs.ops[op])
    yield from _reasons(op, begin, began, by_op, needs)


def _released_by(op: int, by_op: dict[int, Event], needs: Needs) -> tuple[int | None, float]:
    """The op whose end (or start, if `op` only had to start behind it) let `op` start, and when."""
    if op < 0:
        return None, float("-inf")
    ends = [(by_op[i].end, i) for i in needs.needs[op]]
    behind = needs.behind[op]
    if behind >= 0:
        ends.append((by_op[behind].start, behind))
    when, cause = max(ends, default=(float("-inf"), None))
    return cause, when


def _reason(op: Op) -> Why:
    if isinstance(op, Recv):
        return "recv", str(op.chunk), op.source
    if isinstance(op, Send):
        return "send", str(op.chunk), op.dest
    if isinstance(op, Collective):
        return "collective", op.name, None
    return "start", "", None
