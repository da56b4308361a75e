"""Traces: the events of one rank or of all ranks, predicted by the simulator or measured by the executor.

`print(trace)` prints a table of times. `trace.save("step.json")` writes Chrome's trace format, which Perfetto opens.
`fompi.traces.proof` says what overlap gained. `fompi.traces.timeline` draws a trace.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from fompi.base.doors import DOORS
from fompi.plans.dependencies import KERNEL_LANES

AGREEMENT = "agreement"
"""The lane in which an unbound call waits until all ranks have called it."""


class Event(NamedTuple):
    """Op number `op` of `rank`, from `start` to `end` in seconds. A message starts when it is posted.

    `waited` is the time from posting the message until it moves. Only predictions know it. It is 0 in measured traces.
    `op` is -1 if the event is not an op of the plan.
    """

    rank: int
    lane: str
    op: int
    name: str
    start: float
    end: float
    nbytes: int = 0
    waited: float = 0.0

    @property
    def moves(self) -> tuple[float, float]:
        """The interval in which the message moves. For a kernel: the interval in which it runs."""
        return self.start + self.waited, self.end

    @property
    def is_compute(self) -> bool:
        return self.lane in KERNEL_LANES

    @property
    def is_message(self) -> bool:
        return not self.is_compute and self.lane != AGREEMENT


class Summary(NamedTuple):
    """The times of one rank's call, in seconds. `tail` is the time after the last kernel.

        exposed = wall - compute
        hidden = communication - exposed      (at least 0)

    `compute` is the time in which kernels ran in this call. Messages may have slowed them down. A `Proof` also has the
    time of the kernels alone.
    """

    wall: float
    compute: float
    communication: float
    tail: float
    nbytes: int

    @property
    def exposed(self) -> float:
        return self.wall - self.compute

    @property
    def hidden(self) -> float:
        return max(0.0, self.communication - self.exposed)

    @property
    def overlap(self) -> float:
        """The share of the communication that is hidden, from 0 to 1. It is 1 if there was no communication."""
        return self.hidden / self.communication if self.communication else 1.0


Interval = tuple[float, float]
Track = tuple[str, int]
"""The name of a lane, and the number of a track in this lane."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Intervals that cover the same time, sorted, and neither touch nor overlap."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """The sum of the lengths. Overlaps count twice: use `union` first."""
    return sum(end - start for start, end in intervals)


def intersection(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The time that is in both lists. Each list must be a `union`."""
    both, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            both.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return both


def between(covered: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    """The time from `begin` to `end` that is not in `covered`, which must be a `union`."""
    gaps, free = [], begin
    for start, stop in covered:
        if free < min(start, end):
            gaps.append((free, min(start, end)))
        free = max(free, stop)
    return [*gaps, (free, end)] if free < end else gaps


@dataclass(frozen=True)
class Trace:
    """The events of one call or of several calls. `kind` is "predicted" or "measured".

    `hosts` is the name of each rank's host, if it is known. `progress` says what moved the messages of a measured trace
    while kernels ran (see `fompi.engine.progress`).
    """

    kind: str
    title: str
    events: tuple[Event, ...]
    hosts: tuple[str, ...] = ()
    progress: str = ""

    @property
    def ranks(self) -> list[int]:
        return sorted({e.rank for e in self.events})

    def summary(self, rank: int) -> Summary:
        """The times of one rank. A measured message counts from its posting, so waiting for a peer counts too."""
        events = [e for e in self.events if e.rank == rank]
        if not events:
            return Summary(0, 0, 0, 0, 0)
        begin, end = min(e.start for e in self.events), max(e.end for e in events)
        busy = union((e.start, e.end) for e in events if e.is_compute)
        return Summary(
            wall=end - begin,
            compute=length(busy),
            communication=length(union(e.moves for e in events if e.is_message)),
            tail=end - max((stop for _, stop in busy), default=begin),
            nbytes=sum(e.nbytes for e in events if e.is_message),
        )

    @property
    def seconds(self) -> float:
        """The time from the first start to the last end of all events, on any rank."""
        return max((e.end for e in self.events), default=0.0) - min((e.start for e in self.events), default=0.0)

    def table(self) -> str:
        head = f"{self.kind}: {self.title}"
        lines = [head, "rank     wall  compute     comm   hidden  exposed     tail  overlap   (ms)"]
        for rank in self.ranks:
            s = self.summary(rank)
            times = (s.wall, s.compute, s.communication, s.hidden, s.exposed, s.tail)
            cells = "".join(f"{1e3 * seconds:9.3f}" for seconds in times)
            lines.append(f"{rank:>4}{cells}{s.overlap:9.1%}")
        return "\n".join(lines)

    __str__ = table

    def _repr_html_(self) -> str:
        return DOORS.picture({self.title: self})

    def compare(self, other: Trace) -> str:
        """A table of this trace and another one, rank by rank: wall times, their ratio, and exposed times."""
        lines = [f"{self.kind}: {self.title}; {other.kind}: {other.title}"]
        lines += [f"rank   {self.kind:>9} wall {other.kind:>9} wall  ratio   exposed   exposed   (ms)"]
        for rank in self.ranks:
            a, b = self.summary(rank), other.summary(rank)
            ratio = a.wall / b.wall if b.wall else float("nan")
            lines.append(
                f"{rank:>4} {1e3 * a.wall:16.3f} {1e3 * b.wall:14.3f} {ratio:6.2f} {1e3 * a.exposed:9.3f}"
                f" {1e3 * b.exposed:9.3f}"
            )
        return "\n".join(lines)

    def shifted(self, clock: Callable[[float], float]) -> Trace:
        """This trace on another clock: an event at time t is at `clock(t)` there (see `fompi.traces.clocks`)."""
        return replace(self, events=tuple(e._replace(start=clock(e.start), end=clock(e.end)) for e in self.events))

    def chrome(self) -> dict[str, object]:
        """Chrome's trace format. A rank is a process. Its lanes are tracks, kernels first. Times are in microseconds.

        Boxes of one track must not overlap. So a lane has as many tracks as it has messages that are posted at the same
        time: "recv from 1", "recv from 1 (2)".
        """
        begin = min((e.start for e in self.events), default=0.0)
        tracks, placed = self._tracks()
        entries: list[dict[str, object]] = [
            {
                "name": e.name, "cat": "compute" if e.is_compute else "communication", "ph": "X",
                "pid": e.rank, "tid": tracks[e.rank][track], "ts": 1e6 * (e.start - begin),
                "dur": 1e6 * (e.end - e.start), "args": {"op": e.op, "nbytes": e.nbytes},
            }
            for e, track in placed
        ]  # fmt: skip

        def add_metadata(name: str, value: object, pid: int, **track: int) -> None:
            args = {"sort_index" if name.endswith("index") else "name": value}
            entries.append({"name": name, "ph": "M", "pid": pid, **track, "args": args})

        for rank, names in sorted(tracks.items()):
            host = f" ({self.hosts[rank]})" if rank < len(self.hosts) else ""
            add_metadata("process_name", f"rank {rank}{host}", rank)
            add_metadata("process_sort_index", rank, rank)
            for (lane, number), tid in names.items():
                add_metadata("thread_name", f"{lane} ({number + 1})" if number else lane, rank, tid=tid)
                add_metadata("thread_sort_index", tid, rank, tid=tid)
        return {
            "traceEvents": entries,
            "displayTimeUnit": "ms",
            "otherData": {"title": self.title, "kind": self.kind, "progress": self.progress},
        }

    def _tracks(self) -> tuple[dict[int, dict[Track, int]], list[tuple[Event, Track]]]:
        """The position of each track on its rank, from the top; and all events by their start, each with its track."""
        free: defaultdict[tuple[int, str], list[float]] = defaultdict(list)  # when each track of a lane is free
        placed = []
        for e in sorted(self.events, key=lambda e: e.start):
            ends = free[e.rank, e.lane]
            number = next((i for i, end in enumerate(ends) if end <= e.start), len(ends))
            ends[number : number + 1] = [e.end]
            placed.append((e, (e.lane, number)))
        lanes = sorted(free, key=lambda key: (*KERNEL_LANES, key[1]).index(key[1]))  # kernels first
        tracks: defaultdict[int, dict[Track, int]] = defaultdict(dict)
        for rank, lane in lanes:
            for number in range(len(free[rank, lane])):
                tracks[rank][lane, number] = len(tracks[rank])
        return tracks, placed

    def save(self, path: str | Path) -> None:
        """Write the trace as a file that Perfetto and Chrome open."""
        Path(path).write_text(json.dumps(self.chrome()))

    def to_json(self) -> str:
        """The trace as text that `from_json` reads. The times stay on the clock of this rank."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Trace:
        data = json.loads(text)
        events = tuple(Event(*event) for event in data["events"])
        return Trace(data["kind"], data["title"], events, tuple(data["hosts"]), data["progress"])


def merge(traces: Sequence[Trace]) -> Trace:
    """One trace with the events of all traces, sorted by start. The clocks must agree."""
    events = sorted((e for trace in traces for e in trace.events), key=lambda e: (e.start, e.rank, e.end))
    filled = [trace for trace in traces if trace.events]
    kinds, titles = {trace.kind for trace in filled}, dict.fromkeys(trace.title for trace in filled)
    hosts = max((trace.hosts for trace in traces), key=len, default=())
    progress = " and ".join(sorted({trace.progress for trace in filled if trace.progress}))
    return Trace(" and ".join(sorted(kinds)), ", ".join(titles), tuple(events), hosts, progress)
