"""Traces as text and as SVG. The SVG is compared with tests/golden/timeline.svg."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fompi.traces.timeline import timeline, timelines
from fompi.traces.trace import Event, Trace

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "timeline.svg"

SERIAL = Trace(
    "measured",
    "all_gather_matmul by unfused",
    (
        Event(0, "recv from 1", 0, "y[1]<1", 10.000, 10.004, 24),
        Event(0, "compute", 1, "matmul(x[0], w[0]) -> y[0]", 10.004, 10.007, 48),
        Event(0, "merge", 2, "add(y[0], y[1]) -> y[0]", 10.007, 10.008, 48),
        Event(1, "send to 0", 0, "x[1]>0", 10.000, 10.004, 24),
    ),
    ("a", "b<c"),
)
OVERLAPPED = Trace(
    "measured",
    "all_gather_matmul by direct",
    (
        Event(0, "recv from 1", 0, "y[1]<1", 5.000, 5.004, 24),
        Event(0, "compute", 1, "matmul(x[0], w[0]) -> y[0]", 5.000, 5.003, 48),
        Event(0, "merge", 2, "add(y[0], y[1]) -> y[0]", 5.004, 5.005, 48),
        Event(1, "send to 0", 0, "x[1]>0", 5.001, 5.004, 24),
    ),
)


def test_as_text():
    assert timeline(SERIAL, width=16) == (
        "measured: all_gather_matmul by unfused, 8.000 ms  (# compute, + adds and copies, = messages)\n"
        "rank 0   compute  |        ######++|\n"
        "         messages |========        |\n"
        "rank 1   compute  |                |\n"
        "         messages |========        |"
    )


@given(st.lists(st.tuples(st.sampled_from(["compute", "merge", "recv from 1"]), st.integers(0, 9), st.integers(1, 9))))
def test_a_column_shows_what_ran(listed):
    """With one column per second, a column has a mark if something ran in this second, and only then."""
    events = tuple(Event(0, lane, 0, "", float(t), float(t + n)) for lane, t, n in listed)
    begin, end = min((e.start for e in events), default=0.0), max((e.end for e in events), default=0.0)
    width = int(end - begin) or 1
    text = timeline(Trace("measured", "", events), width).splitlines()[1:]
    for line, lanes in zip(text, (("compute", "merge"), ("recv from 1",)), strict=False):
        cells = line.split("|")[1]
        for i, cell in enumerate(cells):
            second = begin + i + 0.5
            assert (cell != " ") == any(e.start < second < e.end and e.lane in lanes for e in events)


def test_as_a_picture():
    """The SVG does not change. After an intended change, FOMPI_GOLDEN=write writes the golden file again."""
    drawn = timelines({"without overlap": SERIAL, "with overlap": OVERLAPPED})
    if os.environ.get("FOMPI_GOLDEN") == "write":
        GOLDEN.write_text(drawn)
    assert drawn == GOLDEN.read_text()


def test_the_picture_is_to_scale():
    """Both traces have the same axis. The trace of 5 ms ends at the tick of 5 ms."""
    root = ElementTree.fromstring(timelines({"a": SERIAL, "b": OVERLAPPED}))
    space = "{http://www.w3.org/2000/svg}"
    ends = [float(line.get("x1")) for line in root.iter(f"{space}line") if line.get("stroke") == "#c0392b"]
    texts = {text.text: float(text.get("x")) for text in root.iter(f"{space}text")}
    assert ends == [texts["8"], texts["5"]] and ends[0] - texts["0"] == 800
    assert "a: 8.0 ms" in texts and "b: 5.0 ms" in texts and "rank 1 (b<c), compute" in texts


@given(st.integers(0, 5), st.floats(1e-9, 1e5))
def test_any_length_is_drawn(count, seconds):
    events = tuple(Event(i, "compute", 0, "", i * seconds, (i + 1) * seconds) for i in range(count))
    root = ElementTree.fromstring(timelines({"a": Trace("measured", "", events)}))
    assert float(root.get("height")) > 0
    ticks = [line for line in root.iter("{http://www.w3.org/2000/svg}line") if line.get("stroke") == "#555"]
    assert 2 <= len(ticks) <= 13
