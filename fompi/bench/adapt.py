"""A link that drops to a third during a run: python tools/netlab.py run --hosts 4 -- python -m fompi bench adapt

The machine is calibrated, each operation is bound with adapt=True and called for a while; then the link of the second
host drops. Counted are the calls until the ranks go over to another machine, and compared is a fresh plan: the machine
calibrated again, from nothing. Needs the control of `tools/netlab.py`, by which a program changes links.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import fompi
from fompi.base.errors import StateError
from fompi.bench.cluster import Cluster
from fompi.bench.collectives import MIB, given, progress
from fompi.bench.options import Options
from fompi.bench.planner import explained_for
from fompi.tuning.calibrate import calibrate
from fompi.tuning.rounds import Contestant, Figure, Row, alternate, checked, meet, relative_error

OPERATIONS = {"all_gather": 17, "reduce_scatter": 20, "all_reduce": 22}
"""And how many calls there are before the link drops: the ranks compare their times after every eighth."""

TOTAL, QUICK_TOTAL = 8 * MIB, 2 * MIB
SETTLED, MOST_CALLS, GIVEN_UP = 17, 20, 60
DROP, MOST_OVER_FRESH = 3, 1.10


def rows(comm: Any, options: Options) -> list[Row]:
    if "NETLAB_CONTROL" not in os.environ:
        raise StateError("bench adapt changes links: start it by tools/netlab.py (docs/lab.md)")
    total = QUICK_TOTAL if options.quick else TOTAL
    with Cluster(comm.link.comm) as cluster:
        return [_measured(comm, cluster, operation, total, options.rounds) for operation in OPERATIONS]


def _measured(comm: Any, cluster: Cluster, operation: str, total: int, rounds: int) -> Row:
    mpi, machine = comm.link.comm, calibrate(comm)
    full = int(os.environ["NETLAB_RATES"].split(",")[1]) // 10**6
    x, reference = given(operation, total, comm.rank, comm.size)
    error = partial(relative_error, reference=reference)
    with fompi.bind(explained_for(machine, operation, comm.size, x), comm=comm, x=x, adapt=True) as step:
        for _ in range(OPERATIONS[operation]):
            step()
        first = step.changes[-1]
        _set_rate(comm, full // DROP)
        calls = 0
        while calls < GIVEN_UP and step.changes[-1] is first:
            step()
            calls += 1
        for _ in range(SETTLED):  # what it settles on
            step()
        now = explained_for(calibrate(comm), operation, comm.size, x)
        with fompi.bind(now, comm=comm, x=x) as fresh:
            contestants = {"adapted": Contestant(step, error), "fresh plan": Contestant(fresh, error)}
            errors, looked = checked(mpi, contestants), len(step.changes)
            samples = alternate(mpi, {name: c.call for name, c in contestants.items()}, rounds, idle=cluster.idle)
        last, looks = step.changes[-1], len(step.changes) - looked
    _set_rate(comm, full)
    marks = [f"from {first.candidate} to {last.candidate}, fresh: {now.winner.candidate}"]
    if looks:
        marks.append(f"adapted looked at the links again in {looks} of the rounds, which counts")
    row = Row(f"{operation} of {total // MIB} MiB, a link drops to a third", str(cluster), samples, errors=errors)
    return replace(
        row,
        base="fresh plan",
        figures=[
            Figure("calls until they plan again", calls, most=MOST_CALLS),
            row.ratio("adapted", "fresh plan", most=MOST_OVER_FRESH, limit=1.0),
        ],
        marks=marks,
        progress=progress(comm),
    )


def _set_rate(comm: Any, mbit: int) -> None:
    """Of the host of rank 1, and wait until it is so."""
    if comm.rank == 0:
        with open(os.environ["NETLAB_CONTROL"], "w") as control:
            print(f"h1 {mbit}mbit", file=control)
    meet(comm.link.comm)
