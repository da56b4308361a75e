"""What happened when: events of one or all ranks, predicted by the simulator or measured by the executor.

`print(trace)` is a table; `trace.save("step.json")` writes Chrome's trace format, which Perfetto opens. What the
figures prove is said by `fompi.traces.proof`, how a trace looks by `fompi.timeline`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

KERNEL_LANES = ("compute", "merge")
"""The lanes of kernels, and that of sums and copies; the others are messages, but for one."""

AGREEMENT = "agreement"
"""The lane in which a call waits until all ranks have come to it."""


class Event(NamedTuple):
    """An op of `rank` from `start` to `end`, in seconds. For a message: from its posting to its completion.

    `waited`: so long it was posted and not under way, where that is known: in a prediction.
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
        """From when it is under way to its end."""
        return self.start + self.waited, self.end

    @property
    def is_compute(self) -> bool:
        return self.lane in KERNEL_LANES

    @property
    def is_message(self) -> bool:
        return not self.is_compute and self.lane != AGREEMENT


class Summary(NamedTuple):
    """One rank's call, in seconds. exposed = wall - compute; tail: from the last kernel to the end.

    Here compute is what the kernels took in this call, slowed or not; a Proof knows what they take alone.
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
        """The share of the communication that is hidden, 0 to 1 (1 where there was none)."""
        return self.hidden / self.communication if self.communication else 1.0


Interval = tuple[float, float]
Track = tuple[str, int]
"""A lane, and which of its tracks."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time, in intervals that neither touch nor overlap."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def intersection(a: list[Interval], b: list[Interval]) -> list[Interval]:
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
    """What is left of this time between the intervals of a `union`."""
    left, free = [], begin
    for start, stop in covered:
        if free < min(start, end):
            left.append((free, min(start, end)))
        free = max(free, stop)
    return [*left, (free, end)] if free < end else left


@dataclass(frozen=True)
class Trace:
    """The events of one call, or of several. `kind` says where they come from: "predicted" or "measured".

    `hosts`: the name of each rank's host, where it is known. `progress`: who moved the messages of a measured one while
    kernels ran (`fompi.engine.progress`).
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
        """Time in a message counts as communication from when it was posted, so waiting for a peer counts too."""
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
        """From the first start to the last end on any rank."""
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

    def compare(self, other: Trace) -> str:
        """Both, rank by rank: wall and exposed time, and the ratio of the wall times."""
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
        """The same events, on the clock that shows `clock(t)` when ours shows t (`fompi.traces.clocks`)."""
        return replace(self, events=tuple(e._replace(start=clock(e.start), end=clock(e.end)) for e in self.events))

    def chrome(self) -> dict[str, object]:
        """Chrome's trace format: a process per rank, its lanes as tracks (kernels first), microseconds.

        Boxes of one track must not overlap there. So a lane has as many tracks as it has messages that are posted at
        one time: "recv from 1", "recv from 1 (2)".
        """
        begin = min((e.start for e in self.events), default=0.0)
        tracks, placed = self._tracks()
        listed: list[dict[str, object]] = [
            {
                "name": e.name, "cat": "compute" if e.is_compute else "communication", "ph": "X",
                "pid": e.rank, "tid": tracks[e.rank][track], "ts": 1e6 * (e.start - begin),
                "dur": 1e6 * (e.end - e.start), "args": {"op": e.op, "nbytes": e.nbytes},
            }
            for e, track in placed
        ]  # fmt: skip

        def says(name: str, value: object, pid: int, **track: int) -> None:
            args = {"sort_index" if name.endswith("index") else "name": value}
            listed.append({"name": name, "ph": "M", "pid": pid, **track, "args": args})

        for rank, names in sorted(tracks.items()):
            host = f" ({self.hosts[rank]})" if rank < len(self.hosts) else ""
            says("process_name", f"rank {rank}{host}", rank)
            says("process_sort_index", rank, rank)
            for (lane, number), tid in names.items():
                says("thread_name", f"{lane} ({number + 1})" if number else lane, rank, tid=tid)
                says("thread_sort_index", tid, rank, tid=tid)
        return {
            "traceEvents": listed,
            "displayTimeUnit": "ms",
            "otherData": {"title": self.title, "kind": self.kind, "progress": self.progress},
        }

    def _tracks(self) -> tuple[dict[int, dict[Track, int]], list[tuple[Event, Track]]]:
        """The tracks of each rank with their places from top to bottom, and every event, by its start, with its own."""
        free: defaultdict[tuple[int, str], list[float]] = defaultdict(list)  # from when each track of a lane is free
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
        Path(path).write_text(json.dumps(self.chrome()))

    def to_json(self) -> str:
        """All of it, as text that `from_json` reads; times as they are, on this rank's clock."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Trace:
        data = json.loads(text)
        events = tuple(Event(*event) for event in data["events"])
        return Trace(data["kind"], data["title"], events, tuple(data["hosts"]), data["progress"])


def merge(traces: Sequence[Trace]) -> Trace:
    """One trace of the events of all, on one clock, by their start."""
    events = sorted((e for trace in traces for e in trace.events), key=lambda e: (e.start, e.rank, e.end))
    some = [trace for trace in traces if trace.events]
    kinds, titles = {trace.kind for trace in some}, dict.fromkeys(trace.title for trace in some)
    hosts = max((trace.hosts for trace in traces), key=len, default=())
    progress = " and ".join(sorted({trace.progress for trace in some if trace.progress}))
    return Trace(" and ".join(sorted(kinds)), ", ".join(titles), tuple(events), hosts, progress)
