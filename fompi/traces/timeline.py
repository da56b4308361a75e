"""Draws traces, as text for a terminal or as SVG for a page. Each rank has a row of kernels and a row of messages.

print(timeline(trace))
Path("step.svg").write_text(timelines({"without overlap": a, "with overlap": b}))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

from fompi.base.doors import DOORS
from fompi.traces.trace import Event, Interval, Trace, intersection, length, union

_COLOURS = {"compute": "#3b6ea8", "add": "#7fb3d5", "message": "#e08e45"}
_LABELS = {"compute": "compute", "add": "adds and copies", "message": "messages"}


def _kind(event: Event) -> str:
    if not event.is_compute:
        return "message" if event.is_message else "nothing"
    return "compute" if event.lane == "compute" else "add"


def _rows(trace: Trace, rank: int) -> dict[str, list[Interval]]:
    """For each kind of event, the intervals in which such events ran. Intervals of one kind do not overlap."""
    events = [e for e in trace.events if e.rank == rank]
    return {kind: union(e.moves for e in events if _kind(e) == kind) for kind in _COLOURS}


def _span(trace: Trace) -> tuple[float, float]:
    return min((e.start for e in trace.events), default=0.0), max((e.end for e in trace.events), default=0.0)


# --------------------------------------------------------------------------------------------------------- as text


def timeline(trace: Trace, width: int = 100) -> str:
    """The trace as text, with `width` columns of time. # is a product, + an add or a copy, = a message in flight."""
    begin, end = _span(trace)
    lines = [f"{trace.kind}: {trace.title}, {1e3 * trace.seconds:.3f} ms  (# compute, + adds and copies, = messages)"]
    for rank in trace.ranks:
        rows = _rows(trace, rank)
        kernels = _cells({"#": rows["compute"], "+": rows["add"]}, begin, end, width)
        messages = _cells({"=": rows["message"]}, begin, end, width)
        lines += [f"rank {rank:<3} compute  |{kernels}|", f"         messages |{messages}|"]
    return "\n".join(lines)


def _cells(kinds: Mapping[str, list[Interval]], begin: float, end: float, width: int) -> str:
    """One character per column: the kind that took most of its time. A column that is idle for half of it is blank."""
    column = (end - begin) / width or 1.0
    cells = []
    for i in range(width):
        cell = [(begin + i * column, begin + (i + 1) * column)]
        shares = {mark: length(intersection(intervals, cell)) for mark, intervals in kinds.items()}
        mark = max(shares, key=lambda mark: shares[mark])
        cells.append(mark if sum(shares.values()) > column / 2 else " ")
    return "".join(cells)


# --------------------------------------------------------------------------------------------------------- as SVG

_LEFT, _WIDTH, _ROW, _GAP, _HEAD, _AXIS = 150, 800, 14, 8, 28, 26


def timelines(named: Mapping[str, Trace]) -> str:
    """The text of an SVG file: these traces one below the other, on one time axis in ms. The keys are the titles."""
    longest = max((trace.seconds for trace in named.values()), default=0.0) or 1e-3
    scale = _WIDTH / longest
    body: list[str] = []
    y = 10
    for name, trace in named.items():
        begin, _ = _span(trace)
        suffix = ", emulated accelerator" if "emulated accelerator" in trace.title else ""
        heading = f"{escape(name)}: {1e3 * trace.seconds:.1f} ms{suffix}"
        body.append(f'<text x="{_LEFT}" y="{y + 14}" font-weight="bold">{heading}</text>')
        y += _HEAD
        for rank in trace.ranks:
            rows = _rows(trace, rank)
            host = f" ({escape(trace.hosts[rank])})" if rank < len(trace.hosts) else ""
            body.append(f'<text x="{_LEFT - 8}" y="{y + 11}" text-anchor="end">rank {rank}{host}, compute</text>')
            body.append(f'<text x="{_LEFT - 8}" y="{y + _ROW + 12}" text-anchor="end">messages</text>')
            body.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{2 * _ROW + 1}" fill="#f2f2f2"/>')
            for kind, intervals in rows.items():
                top = y + (_ROW + 1 if kind == "message" else 0)
                body += _boxes(intervals, begin, scale, top, kind)
            y += 2 * _ROW + 1 + _GAP
        stop = _LEFT + trace.seconds * scale
        top = y - len(trace.ranks) * (2 * _ROW + 1 + _GAP)
        body.append(f'<line x1="{stop:.2f}" x2="{stop:.2f}" y1="{top - 4}" y2="{y - 4}" stroke="#c0392b"/>')
    body += _axis(longest, scale, y)
    y += _AXIS
    for i, (kind, colour) in enumerate(_COLOURS.items()):
        x = _LEFT + 160 * i
        body.append(f'<rect x="{x}" y="{y + 4}" width="12" height="12" fill="{colour}"/>')
        body.append(f'<text x="{x + 18}" y="{y + 14}">{_LABELS[kind]}</text>')
    size = f'width="{_LEFT + _WIDTH + 30}" height="{y + 26}" viewBox="0 0 {_LEFT + _WIDTH + 30} {y + 26}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>"]) + "\n"


DOORS.picture = timelines


def _boxes(intervals: Iterable[Interval], begin: float, scale: float, top: float, kind: str) -> list[str]:
    """One box per interval. Boxes less than half a pixel apart become one, so the file of a long trace stays small."""
    merged: list[list[float]] = []
    for start, end in intervals:
        left, right = _LEFT + (start - begin) * scale, _LEFT + (end - begin) * scale
        if merged and left - merged[-1][1] < 0.5:
            merged[-1][1] = right
        else:
            merged.append([left, right])
    return [
        f'<rect x="{left:.2f}" y="{top}" width="{max(0.3, right - left):.2f}" height="{_ROW}" fill="{_COLOURS[kind]}"/>'
        for left, right in merged
    ]


def _axis(longest: float, scale: float, y: float) -> list[str]:
    """The time axis, with 5 to 11 ticks at round numbers of ms."""
    step = next(
        s * 10.0**e for e in range(-300, 300) for s in (1, 2, 5) if longest * 1e3 / (s * 10.0**e) <= 10
    )  # in ms
    lines = [f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y}" y2="{y}" stroke="#555"/>']
    for i in range(int(longest * 1e3 / step + 1e-9) + 1):
        x = _LEFT + i * step * scale / 1e3
        lines.append(f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{y}" y2="{y + 4}" stroke="#555"/>')
        lines.append(f'<text x="{x:.2f}" y="{y + 16}" text-anchor="middle">{i * step:g}</text>')
    lines.append(f'<text x="{_LEFT + _WIDTH + 8}" y="{y + 4}">ms</text>')
    return lines
