"""`fompi simulate`: the predicted trace of a plan."""

from __future__ import annotations

import argparse

import fompi
from fompi.cli import plan
from fompi.cli.output import show_json
from fompi.traces.trace import Trace

EXAMPLE = "{} simulate all_gather_matmul 4096x4096 4096x14336 --ranks 8 --dtype bfloat16"

TIMES = ("wall", "compute", "communication", "hidden", "exposed", "tail")
"""The times of a rank (`fompi.traces.trace.Summary`)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plan.add_problem_arguments(parser)
    plan.add_schedule_arguments(parser)
    plan.add_machine_argument(parser)
    parser.add_argument("--save", metavar="FILE", help="the trace as Chrome JSON, for Perfetto")
    parser.add_argument("--json", action="store_true", help="the times of each rank, as JSON")


def run(options: argparse.Namespace) -> int:
    machine = plan.machine_of(options)
    trace = fompi.simulate(plan.plan_of(options, machine), machine)
    if options.json:
        show_json(_values(trace))
    else:
        print(trace)
    if options.save:
        trace.save(options.save)
    return 0


def _values(trace: Trace) -> dict[str, object]:
    ranks = []
    for rank in trace.ranks:
        summary = trace.summary(rank)
        seconds = {name: getattr(summary, name) for name in TIMES}
        ranks.append({"rank": rank, "seconds": seconds, "overlap": summary.overlap, "nbytes": summary.nbytes})
    return {"kind": trace.kind, "title": trace.title, "seconds": trace.seconds, "ranks": ranks}
