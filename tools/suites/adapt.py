"""A link that drops to a third during a run.

    python -m fompi.lab run --hosts 4 -- python -m fompi bench tools/suites/adapt.py

The machine is calibrated. Each operation is bound with adapt=True and called for a while. Then the link of the second
host drops. The suite counts the calls until the ranks change their plan, and compares the new plan with a fresh one: a
plan for the machine that is calibrated again from nothing. It needs `fompi.lab`, which lets a program change
links.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import fompi
from collectives import MIB, problem_of
from fompi.base.errors import StateError
from fompi.bench.measure import Bench
from fompi.tuning.calibrate import calibrate
from fompi.tuning.rounds import Figure, Row, meet
from means import repeated
from planner import explained_for

OPERATIONS = {"all_gather": 17, "reduce_scatter": 20, "all_reduce": 22}
"""How many calls there are before the link drops. They differ because ranks compare times after every eighth call."""

TOTAL, QUICK_TOTAL = 8 * MIB, 2 * MIB

SETTLING_CALLS = 17
"""Calls after the first change of plan, before the plan is timed: two more comparisons may change it again."""

MOST_CALLS, GIVE_UP_CALLS = 20, 60
"""Calls until the plan changes: the target, and when the suite stops waiting."""

DROP, MOST_OVER_FRESH = 3, 1.10
"""The link's rate is divided by this. The target for adapted / fresh."""


def rows(bench: Bench) -> list[Row]:
    if "NETLAB_CONTROL" not in os.environ:
        raise StateError("bench adapt changes links: start it with python -m fompi.lab (docs/howto/lab.md)")
    total = QUICK_TOTAL if bench.quick else TOTAL
    return bench.rows({operation: partial(_measured, operation=operation, total=total) for operation in OPERATIONS})


def _measured(bench: Bench, operation: str, total: int) -> Row:
    comm, machine = bench.comm, calibrate(bench.comm)
    full = int(os.environ["NETLAB_RATES"].split(",")[1]) // 10**6
    x, reference = problem_of(operation, total, comm.rank, comm.size)
    with fompi.bind(explained_for(machine, operation, comm.size, x), comm=comm, x=x, adapt=True) as step:
        repeated(step, OPERATIONS[operation])
        first = step.changes[-1]
        _set_rate(comm, full // DROP)
        calls = 0
        while calls < GIVE_UP_CALLS and step.changes[-1] is first:
            step()
            calls += 1
        repeated(step, SETTLING_CALLS)
        now = explained_for(calibrate(comm), operation, comm.size, x)
        with fompi.bind(now, comm=comm, x=x) as fresh:
            contestants = {"adapted": step, "fresh plan": fresh}
            errors, before = bench.checked(contestants, reference), len(step.changes)
            what = f"{operation} of {total // MIB} MiB, a link drops to a third"
            row = bench.row(what, contestants, base="fresh plan", errors=errors)
        last, refits = step.changes[-1], len(step.changes) - before
    _set_rate(comm, full)
    marks = [f"from {first.candidate} to {last.candidate}, fresh: {now.winner.candidate}"]
    if refits:
        marks.append(f"adapted measured the links again in {refits} of the rounds, which is part of its time")
    figures = [
        Figure("calls until the plan changes", calls, most=MOST_CALLS),
        row.ratio("adapted", "fresh plan", most=MOST_OVER_FRESH, limit=1.0),
    ]
    return replace(row, figures=figures, marks=marks)


def _set_rate(comm: Any, mbit: int) -> None:
    """Set the rate of rank 1's host, and let all ranks wait for it."""
    if comm.rank == 0:
        with open(os.environ["NETLAB_CONTROL"], "w") as control:
            print(f"h1 {mbit}mbit", file=control)
    meet(comm.link.comm)
