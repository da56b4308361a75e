"""docs/results.md and the figures that it is written from."""

from __future__ import annotations

import json

import figures
import pytest
from claims import CLAIMS, Pick, condense, from_line, to_line


def row(what, *figures):
    fields = {"unit": "", "interval": None, "least": None, "most": None, "limit": None}
    return {"what": what, "figures": [{**fields, **figure} for figure in figures]}


def test_the_page_is_what_the_figures_say():
    assert figures.PAGE.read_text() == figures.page()
    assert len(figures.page().splitlines()) <= 335


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.suite)
def test_every_claim_has_its_figures(claim):
    """On both MPIs, one per line, each with the command, the date, the versions and the commit that made it."""
    for mpi in figures.NAMES:
        text = (figures.KEPT / f"{claim.suite}-{mpi}.json").read_text()
        lines = json.loads(text)
        assert [line["figure"] for line in lines] == [pick.label for pick in claim.picks]
        assert len(text.splitlines()) == len(lines) + 2
        assert all({"value", "command", "date", "mpi", "fompi", "commit"} <= line.keys() for line in lines)


def test_a_figure_of_one_row_keeps_its_interval():
    interval = {"low": 1.1, "high": 1.3, "confidence": 0.95}
    rows = [row("a, M=1", {"name": "unfused / fompi", "value": 1.2, "least": 1.0, "interval": interval}), row("b")]
    figure = condense(Pick("gain", "^a", "^unfused"), rows)
    assert (figure.value, figure.low, figure.high, figure.rows, figure.reached) == (1.2, 1.1, 1.3, 1, True)
    assert from_line(to_line(figure)) == figure
    assert condense(Pick("gain", "^c", ""), rows) is None


def test_a_figure_of_many_rows_has_their_mean_and_range():
    """It is reached if the worst of them is."""
    rows = [row(f"M={value}", {"name": "x", "value": value, "least": 0.9}) for value in (1.0, 4.0)]
    figure = condense(Pick("gain", "M=", "x"), rows)
    assert (figure.value, figure.low, figure.high, figure.rows, figure.reached) == (2.0, 1.0, 4.0, 2, True)
    rows.append(row("M=0.5", {"name": "x", "value": 0.5, "least": 0.9}))
    assert condense(Pick("gain", "M=", "x"), rows).reached is False


def test_a_missed_figure_is_bold():
    rows = [row("M=1", {"name": "x", "value": 0.5, "least": 0.9})]
    figure = condense(Pick("gain", "M=", "x"), rows)
    assert figures._cell(figure) == "**0.500**" and figures._asked([None, figure]) == "≥ 0.9"


def test_measuring_ends_where_a_claim_has_no_row():
    about = {"date": "2000-01-01T00:00", "mpi": {"library": "MPI", "version": "1"}, "versions": {}}
    with pytest.raises(SystemExit, match="no row matches"):
        figures.keep("adapt", "mpich", {"about": about, "rows": []}, "command", "commit")
