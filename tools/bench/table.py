"""Rows of a suite as JSON and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from fompi.cli.info import collect
from fompi.runtime.report import percentile
from fompi.tuning.rounds import UNITS, Figure, Row


def about(command: str) -> dict[str, Any]:
    """Where and with which versions the rows were measured. Collective."""
    facts = collect()
    kept = {key: facts[key] for key in ("versions", "mpi", "ranks", "cores_per_rank")}
    return {"command": command, "date": datetime.now(UTC).isoformat(timespec="seconds"), **kept}


def to_json(rows: Iterable[Row], facts: Mapping[str, Any]) -> str:
    return json.dumps({"about": dict(facts), "rows": [_plain(row) for row in rows]}, indent=1)


def _plain(row: Row) -> dict[str, Any]:
    plain = asdict(row)
    plain["seconds"] = {
        name: {"median": row.median(name), "p99": percentile(s, 0.99), "least": min(s), "most": max(s)}
        for name, s in row.samples.items()
    }
    plain["figures"] = [
        {**asdict(figure), "interval": figure.interval and figure.interval._asdict(), "reached": figure.reached}
        for figure in row.figures
    ]
    plain["reached"] = row.reached
    return plain


# --------------------------------------------------------------------------------------------------------- Markdown


def markdown(rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
    """All figures with their targets in one table, then the times of each row."""
    mpi = facts["mpi"]["library"] + " " + facts["mpi"]["version"] if facts["mpi"] else "no MPI"
    cores = f"{facts['cores_per_rank']:.4g} core{'s' * (facts['cores_per_rank'] != 1)} per rank"
    lines = [f"`{facts['command']}`", f"{mpi}, {cores}, {facts['date']}", ""]
    lines += _figures(rows)
    for row in rows:
        if row.samples or row.absent:
            lines += ["", *_times(row)]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> Iterator[str]:
    yield _line(head)
    yield _line(["---"] * len(head))
    yield from map(_line, body)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _figures(rows: Iterable[Row]) -> Iterator[str]:
    body = [[row.what, *_figure(figure), ", ".join(row.marks)] for row in rows for figure in row.figures]
    if body:
        yield from _table(["what", "figure", "value", "95 % interval", "to reach", "limit", "reached", ""], body)


def _figure(figure: Figure) -> list[str]:
    bounds = [("≥", figure.least), ("≤", figure.most)]
    target = " ".join(f"{sign} {bound:.4g}" for sign, bound in bounds if bound is not None)
    return [
        figure.name,
        f"{figure.value:.3f}{' ' * bool(figure.unit)}{figure.unit}",
        str(figure.interval or ""),
        target,
        "" if figure.limit is None else f"{figure.limit:.4g}",
        {None: "", True: "yes", False: "**no**"}[figure.reached],
    ]


def _times(row: Row) -> Iterator[str]:
    rounds = max(map(len, row.samples.values()), default=0)
    title = [row.what, row.setup, f"{rounds} rounds" * bool(rounds), *row.marks, row.progress]
    yield "**" + ", ".join(filter(None, title)) + "**"
    yield ""
    unit = "us" if all(row.median(name) < 1e-3 for name in row.samples) else "ms"
    scale = UNITS[unit]
    head = ["", f"median {unit}", "range", "p99"] + ([f"{row.base} / it"] if row.base else [])
    head += ["predicted / it"] if row.predicted else []
    body = []
    for name in sorted(row.samples, key=row.median):
        times = [scale * s for s in row.samples[name]]
        cells = [
            name,
            f"{scale * row.median(name):.2f}",
            f"{min(times):.2f} to {max(times):.2f}",
            f"{percentile(times, 0.99):.2f}",
        ]
        if row.base:
            against = row.ratio(row.base, name)
            cells.append(f"{against.value:.3f} ({against.interval})")
        if row.predicted:
            predicted = row.predicted.get(name)
            cells.append("" if predicted is None else f"{predicted / row.median(name):.3f}")
        body.append(cells)
    body += [
        [f"limit: {name}", f"{scale * seconds:.2f}"] + [""] * (len(head) - 2) for name, seconds in row.limits.items()
    ]
    body += [[f"{name}: {reason}"] + [""] * (len(head) - 1) for name, reason in row.absent.items()]
    yield from _table(head, body)
