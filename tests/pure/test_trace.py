"""Traces: their times, overlap, tables, and the file that Perfetto opens."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fompi.traces.clocks import Clock
from fompi.traces.trace import Event, Trace, between, intersection, length, merge, union

intervals = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)).map(lambda i: (i[0], i[0] + i[1])), max_size=8)
lanes = st.sampled_from(["compute", "merge", "send to 1", "recv from 1", "collective"])
events = st.lists(
    st.builds(
        lambda rank, lane, start, count: Event(rank, lane, 0, "op", start, start + count, 8 * count),
        st.integers(0, 2), lanes, st.integers(0, 20), st.integers(0, 6),
    ),
    max_size=12,
)  # fmt: skip


def seconds_in(intervals):
    """The set of seconds that these intervals cover: {3, 4} for (3, 5)."""
    return {second for start, end in intervals for second in range(start, end)}


@given(intervals)
def test_union_covers_the_same_time_without_overlap(listed):
    merged = union(listed)
    assert seconds_in(merged) == seconds_in(listed)
    assert length(merged) == len(seconds_in(listed))
    assert all(a[1] < b[0] for a, b in pairwise(merged))


@given(intervals, intervals)
def test_intersection_is_the_common_time(a, b):
    both = intersection(union(a), union(b))
    assert seconds_in(both) == seconds_in(a) & seconds_in(b)
    assert length(both) == len(seconds_in(a) & seconds_in(b))


@given(intervals, st.integers(0, 20), st.integers(0, 20))
def test_between_is_the_time_that_is_not_covered(listed, begin, end):
    gaps = between(union(listed), begin, end)
    assert seconds_in(gaps) == seconds_in([(begin, end)]) - seconds_in(listed)
    assert all(start < stop for start, stop in gaps) and all(a[1] <= b[0] for a, b in pairwise(gaps))


@given(events)
def test_the_summary_counts_seconds(listed):
    """Compared with sets of seconds. The wall time begins when the first rank begins."""
    trace = Trace("measured", "", tuple(listed))
    for rank in trace.ranks:
        own = [e for e in listed if e.rank == rank]
        busy = seconds_in((e.start, e.end) for e in own if e.is_compute)
        moving = seconds_in((e.start, e.end) for e in own if not e.is_compute)
        begin, end = min(e.start for e in listed), max(e.end for e in own)
        s = trace.summary(rank)
        assert (s.wall, s.compute, s.communication) == (end - begin, len(busy), len(moving))
        assert s.exposed == end - begin - len(busy) and s.hidden == max(0, len(moving) - s.exposed)
        assert s.overlap == (s.hidden / len(moving) if moving else 1.0)
        assert s.tail == end - max((e.end for e in own if e.is_compute), default=begin)
        assert s.nbytes == sum(e.nbytes for e in own if not e.is_compute)


EVENTS = (
    Event(0, "recv from 1", 0, "y[1]<1", 10.000, 10.003, 24),
    Event(0, "compute", 1, "matmul(x[0], w[0]) -> y[0]", 10.000, 10.002, 48),
    Event(0, "compute", 2, "matmul(y[1], w[0]) -> y[1]", 10.003, 10.005, 48),
    Event(1, "send to 0", 0, "x[1]>0", 10.001, 10.003, 24),
)
TRACE = Trace("measured", "all_gather_matmul by ring", EVENTS, progress="helper")


def test_the_table():
    assert str(TRACE) == TRACE.table() == (
        "measured: all_gather_matmul by ring\n"
        "rank     wall  compute     comm   hidden  exposed     tail  overlap   (ms)\n"
        "   0    5.000    4.000    3.000    2.000    1.000    0.000    66.7%\n"
        "   1    3.000    0.000    2.000    0.000    3.000    3.000     0.0%"
    )  # fmt: skip
    assert TRACE.seconds == pytest.approx(0.005)


def test_a_table_of_two_traces():
    slower = Trace("predicted", "", tuple(e._replace(start=2 * e.start, end=2 * e.end) for e in EVENTS))
    assert TRACE.compare(slower) == (
        f"measured: {TRACE.title}; predicted: \n"
        "rank    measured wall predicted wall  ratio   exposed   exposed   (ms)\n"
        "   0            5.000         10.000   0.50     1.000     2.000\n"
        "   1            3.000          6.000   0.50     3.000     6.000"
    )


def test_a_trace_without_events():
    empty = Trace("measured", "nothing", ())
    assert empty.seconds == 0 and empty.ranks == [] and empty.summary(0).overlap == 1.0
    assert len(str(empty).splitlines()) == 2 and empty.chrome()["traceEvents"] == []
    assert "nan" in TRACE.compare(empty)


def test_the_file_for_perfetto(tmp_path):
    """One process per rank, one track per lane, one box per event. Times are microseconds from the first start."""
    TRACE.save(tmp_path / "step.json")
    data = json.loads((tmp_path / "step.json").read_text())
    boxes = [e for e in data["traceEvents"] if e["ph"] == "X"]
    named = [e for e in data["traceEvents"] if e["name"] == "process_name"]
    tracks = {(e["pid"], e["args"]["name"]): e["tid"] for e in data["traceEvents"] if e["name"] == "thread_name"}
    assert [(e["pid"], e["args"]["name"]) for e in named] == [(0, "rank 0"), (1, "rank 1")]
    assert len(boxes) == 4 and data["otherData"] == {"title": TRACE.title, "kind": "measured", "progress": "helper"}
    by_start = sorted(EVENTS, key=lambda e: e.start)
    assert [round(e["ts"]) for e in boxes] == [0, 0, 1000, 3000]
    assert [round(e["dur"]) for e in boxes] == [3000, 2000, 2000, 2000]
    assert [e["tid"] for e in boxes] == [tracks[e.rank, e.lane] for e in by_start]
    assert boxes[0]["args"] == {"op": 0, "nbytes": 24}


@given(events)
def test_no_two_lanes_share_a_track(listed):
    data = Trace("measured", "", tuple(listed)).chrome()["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in data if e["name"] == "thread_name"}
    assert len(tracks) == sum(e["name"] == "thread_name" for e in data)
    lanes = {(rank, name.partition(" (")[0]) for (rank, _), name in tracks.items()}
    assert lanes == {(e.rank, e.lane) for e in listed}
    assert {e["pid"] for e in data if e["name"] == "process_name"} == {e.rank for e in listed}


@given(events)
def test_boxes_of_a_track_do_not_overlap(listed):
    """Perfetto drops a box that overlaps another. No event is lost. A lane has no more tracks than events at once."""
    data = Trace("measured", "", tuple(listed)).chrome()["traceEvents"]
    boxes = [e for e in data if e["ph"] == "X"]
    assert len(boxes) == len(listed)
    for track in {(e["pid"], e["tid"]) for e in boxes}:
        inside = sorted((e["ts"], e["ts"] + e["dur"]) for e in boxes if (e["pid"], e["tid"]) == track)
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(inside))
    at_once = defaultdict(int)
    for e in listed:
        before = [o for o in listed if (o.rank, o.lane) == (e.rank, e.lane) and o.start <= e.start]
        together = sum(o.end > e.start or o.start == e.start for o in before)
        at_once[e.rank, e.lane] = max(at_once[e.rank, e.lane], together)
    assert sum(e["name"] == "thread_name" for e in data) <= sum(at_once.values())


def test_messages_that_are_posted_together_have_separate_tracks():
    posted = [Event(0, "recv from 1", i, f"y[{i}]", 0.0, 1.0 + i) for i in range(3)]
    listed = (*posted, Event(0, "send to 1", 3, "", 0.0, 1.0), Event(0, "recv from 1", 4, "", 1.5, 9.0))
    data = Trace("measured", "", listed).chrome()["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in data if e["name"] == "thread_name"}
    assert names == {0: "recv from 1", 1: "recv from 1 (2)", 2: "recv from 1 (3)", 3: "send to 1"}
    assert [(e["args"]["op"], e["tid"]) for e in data if e["ph"] == "X"] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 0)]


def test_tracks_are_in_order():
    """Ranks are sorted by number and show their hosts. Products are above sums, and sums above messages."""
    listed = [Event(r, lane, 0, "", 0.0, 1.0) for r in (1, 0) for lane in ("recv from 1", "merge", "compute")]
    data = Trace("measured", "", tuple(listed), ("a", "b")).chrome()["traceEvents"]
    named = {(e["pid"], e.get("tid"), e["name"]): e["args"] for e in data if e["ph"] == "M"}
    for rank, host in enumerate("ab"):
        assert named[rank, None, "process_name"] == {"name": f"rank {rank} ({host})"}
        assert named[rank, None, "process_sort_index"] == {"sort_index": rank}
        tids = [t for p, t, name in named if p == rank and name == "thread_name"]
        ordered = sorted(tids, key=lambda t: named[rank, t, "thread_sort_index"]["sort_index"])
        assert [named[rank, t, "thread_name"]["name"] for t in ordered] == ["compute", "merge", "recv from 1"]


@given(events)
def test_json_and_back(listed):
    trace = Trace("measured", "some call", tuple(listed), ("a", "b", "c"), "native")
    assert Trace.from_json(trace.to_json()) == trace


def test_ranks_on_one_clock():
    """Two ranks with different clocks. Shifted events have the same time, and a merged trace is sorted by start."""
    remote = Trace("measured", "t", (Event(1, "recv from 0", 0, "", 110.0, 112.0),), ("a", "b"))
    local = Trace("measured", "t", (Event(0, "send to 1", 0, "", 20.0, 21.0), Event(0, "compute", 1, "", 9.0, 9.5)))
    both = merge([local, remote.shifted(Clock(110.0, -90.0, -0.5, 0.0))])
    assert [(e.rank, e.start, e.end) for e in both.events] == [(0, 9.0, 9.5), (0, 20.0, 21.0), (1, 20.0, 21.0)]
    assert (both.kind, both.title, both.hosts, both.progress) == ("measured", "t", ("a", "b"), "")
    mixed = [replace(local, progress=mode) for mode in ("poll", "helper", "poll")]
    assert merge(mixed).progress == "helper and poll"
    assert merge([]) == Trace("", "", ())
