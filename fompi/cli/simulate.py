"""`fompi simulate`: the predicted trace of a plan, or with `step` a step of a whole model."""

from __future__ import annotations

import argparse

import fompi
from fompi.base.tables import Table
from fompi.cli import plan
from fompi.cli.output import UsageError, is_pretty, show_json, show_parts
from fompi.planner.layers import MODELS, PARALLEL, LayerStep, step
from fompi.traces.trace import Trace

EXAMPLE = "{} simulate all_gather_matmul 4096x4096 4096x14336 --ranks 8 --dtype bfloat16"

TIMES = ("wall", "compute", "communication", "hidden", "exposed", "tail")
"""The times of a rank (`fompi.traces.trace.Summary`)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plan.add_problem_arguments(parser, "step")
    plan.add_schedule_arguments(parser)
    plan.add_machine_argument(parser)
    parser.add_argument("--save", metavar="FILE", help="the trace as Chrome JSON, for Perfetto")
    parser.add_argument("--model", default="llama-7b", help=f"of a step: {', '.join(MODELS)}")
    parser.add_argument(
        "--parallel",
        default="tp",
        help=f"of a step: {', '.join(PARALLEL)} (all at once, pipelines and long sequences: fompi layout)",
    )
    parser.add_argument("--tokens", type=int, default=2048, help="of a step, on each rank (2048)")
    parser.add_argument(
        "--json", action="store_true", help="the times of each rank, or of the parts of a step, as JSON"
    )


def run(options: argparse.Namespace) -> int:
    if options.operation == "step":
        return _step(options)
    machine = plan.machine_of(options)
    trace = fompi.simulate(plan.plan_of(options, machine), machine)
    if options.json:
        show_json(_values(trace))
    elif is_pretty():
        show_parts([f"{trace.kind}: {trace.title} (ms)", _table(trace)])
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


def _table(trace: Trace) -> Table:
    rows = []
    for rank in trace.ranks:
        summary = trace.summary(rank)
        times = (f"{1e3 * getattr(summary, name):.3f}" for name in TIMES)
        rows.append([str(rank), *times, f"{summary.overlap:.1%}"])
    columns = ("rank", *TIMES, "overlap")
    return Table(columns, rows, right=columns)


def _step(options: argparse.Namespace) -> int:
    how = options.schedule, options.slices, options.window, options.dtype, options.wire, options.order
    if options.shapes or how != ("auto", None, None, "float32", None, "any") or options.verify or options.save:
        raise UsageError("simulate step takes --model, --parallel, --ranks, --machine, --tokens and --json only")
    predicted = step(options.model, options.parallel, options.ranks, plan.machine_of(options), options.tokens)
    if options.json:
        show_json(_step_values(predicted))
    else:
        show_parts(predicted.lines)
    return 0


def _step_values(predicted: LayerStep) -> dict[str, object]:
    return {
        "title": predicted.title,
        "layers": predicted.layers,
        "seconds": {"unfused": predicted.unfused, "fused": predicted.fused},
        "parts": [part._asdict() for part in predicted.parts],
    }
