"""docs/reference/schedules.md: its table has the buffers that plans have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from catalogue import options_of, specs_of

import fompi
from fompi.base.layout import Spec
from fompi.plans.meaning import MEANING, layouts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "schedules.md"
TENSORS = {"all_gather_matmul_many": 3}


def rows():
    table = PAGE.read_text().partition("| operation | x |")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        yield name.strip("`"), cells


def _each(cell):
    """ "w0, w1 whole" as "w0 whole w1 whole"."""
    return re.sub(r"(\w+), (\w+) (\w+)", r"\1 \3 \2 \3", cell) if re.match(r"\w+, \w+ \w+$", cell) else cell


def plan_of(name, bias=False):
    found = next(n for n in (TENSORS.get(name, 1), 2, 3) if _has(name, n))
    specs = specs_of(name) if name not in TENSORS else [Spec((8, 8), "float32", of) for of in layouts(name, found)]
    return fompi.plan(name, *specs, ranks=2, bias=bias, schedule="direct", **options_of(name))


def _has(name, count):
    try:
        return bool(layouts(name, count))
    except fompi.FompiError:
        return False


def test_every_operation_is_there():
    assert {name for name, _ in rows()} == set(MEANING)


@pytest.mark.parametrize("name", MEANING)
def test_the_buffers_of_an_operation(name):
    cells = next(cells for other, cells in rows() if other == name)
    listed = dict(pair for cell in cells for pair in re.findall(r"(\w+) (\w+)", _each(cell)))
    buffers = [buffer for buffer in plan_of(name).programs[0].buffers if buffer.role != "scratch"]
    assert {buffer.name: buffer.axis for buffer in buffers} == listed


def test_a_bias_is_a_buffer():
    biases = [b.name for b in plan_of("all_gather_matmul_many", bias=True).programs[0].buffers if "bias" in b.name]
    assert biases == ["bias0", "bias1"]


def test_sizes_that_a_schedule_does_not_support(forgotten):
    """The call says why, and `explain` lists the schedule as refused."""

    @fompi.schedule("halves", "all_gather")
    def halves(problem, work):
        raise fompi.PlanError(f"halves needs two ranks, not {work.size}")
        yield

    spec = Spec((6, 2), "float32", fompi.Shard(0))
    with pytest.raises(fompi.PlanError, match="halves needs two ranks, not 3"):
        fompi.plan("all_gather", spec, ranks=3, schedule="halves")
    assert "halves needs two ranks, not 3" in str(fompi.explain("all_gather", spec, ranks=3, machine="gigabit"))
    only = fompi.explain("all_gather", spec, ranks=3, machine="gigabit", schedules=("ring",))
    assert {judged.candidate.schedule for judged in only.judged} == {"ring", "unfused", "unfused_p2p"}
    with pytest.raises(fompi.PlanError, match=r"rings is no candidate here \(did you mean ring\?\); the candid"):
        fompi.explain("all_gather", spec, ranks=3, machine="gigabit", schedules=("rings",))
