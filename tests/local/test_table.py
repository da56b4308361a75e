"""The rows of a benchmark as JSON and Markdown."""

from __future__ import annotations

import json

import pytest
from bench import table

from fompi.tuning.rounds import Figure, Row

FACTS = {
    "command": "python -m fompi bench none",
    "date": "2026-01-01",
    "mpi": {"library": "Some MPI", "version": "1.0"},
    "versions": {},
    "ranks": [],
    "cores_per_rank": 1.0,
}


@pytest.fixture
def rows():
    samples = {"library": [0.2, 0.21, 0.22], "fompi | direct": [0.1, 0.1, 0.1]}
    row = Row(
        "all_gather",
        "2 ranks",
        samples,
        "library",
        {"link": 0.09},
        {"fompi | direct": 0.11},
        absent={"other": "not installed"},
        errors={"library": 1e-7},
        progress="polling",
        marks=("emulated accelerator",),
    )
    reached = row.ratio("library", "fompi | direct", least=2.0, limit=2.5)
    missed = Figure("exposed", 0.5, "%", most=0.2)
    return [
        Row(**{**row.__dict__, "figures": (reached, missed)}),
        Row("all rows", "", figures=[Figure("mean", 1.0)]),
    ]


def test_json_contains_every_sample(rows):
    read = json.loads(table.to_json(rows, FACTS))
    assert read["about"] == FACTS
    first, last = read["rows"]
    assert first["samples"] == {name: list(s) for name, s in rows[0].samples.items()}
    assert first["seconds"]["library"] == {"median": 0.21, "p99": pytest.approx(0.2198), "least": 0.2, "most": 0.22}
    assert [figure["reached"] for figure in first["figures"]] == [True, False] and first["reached"] is False
    assert first["figures"][0]["interval"]["low"] == pytest.approx(2) and last["reached"] is None
    assert first["marks"] == ["emulated accelerator"] and first["absent"] == {"other": "not installed"}


def test_markdown(rows):
    text = table.markdown(rows, FACTS)
    figures, times = text.split("\n\n", 2)[1:]
    assert "| 2.100 | 2.000 to 2.200 (75%) | ≥ 2 | 2.5 | yes | emulated accelerator |" in figures
    assert "| 0.500 % |  | ≤ 0.2 |  | **no** |" in figures and "| all rows | mean | 1.000 |" in figures
    assert times.startswith("**all_gather, 2 ranks, 3 rounds, emulated accelerator, polling**")
    body = [line for line in times.splitlines() if line.startswith("|")]
    assert body[2].startswith("| fompi \\| direct | 100.00 | 100.00 to 100.00 | 100.00 | 2.100")  # fastest first
    assert body[0].endswith(" | predicted / it |") and body[2].endswith(" | 1.100 |") and body[3].endswith(" |  |")
    assert "| limit: link | 90.00 |" in times and "| other: not installed |" in times
    assert len({line.replace("\\|", "").count("|") for line in body}) == 1, "all lines have the same number of cells"
