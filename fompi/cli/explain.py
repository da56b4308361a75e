"""`fompi explain`: every candidate schedule for a problem on a machine, and why the best one is the best."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import fompi
from fompi.cli import plan
from fompi.cli.output import check_picture, show_json, show_parts
from fompi.planner.explain import SHOWN_TIMES, Explanation, Judged

EXAMPLE = "{} explain all_gather_matmul 4096x4096 4096x14336 --ranks 8 --dtype bfloat16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plan.add_problem_arguments(parser)
    plan.add_machine_argument(parser)
    parser.add_argument(
        "--top", type=int, metavar="N", help=f"only the best N times ({SHOWN_TIMES}; with --json all candidates)"
    )
    parser.add_argument("--schedule", metavar="A,B", help="compare only these schedules, and those without overlap")
    parser.add_argument("--timeline", action="store_true", help="the timeline of the best one, as text")
    parser.add_argument(
        "--plot", metavar="FILE", help="timelines of the best one and of the best without overlap, as .svg"
    )
    parser.add_argument("--json", action="store_true", help="the candidates as JSON")


def run(options: argparse.Namespace) -> int:
    if options.plot:
        check_picture(options.plot)  # before the work
    if options.top is not None and options.top < 1:
        raise fompi.PlanError(f"--top {options.top}: show one candidate at least")
    machine = plan.machine_of(options)
    how = {"ranks": options.ranks, "machine": machine, "wire": options.wire, "order": options.order}
    schedules = tuple(name for name in (options.schedule or "").split(",") if name)
    explanation = fompi.explain(options.operation, *plan.specs_of(options), **how, schedules=schedules)
    if options.json:
        show_json(_values(explanation, options.top))
    else:
        show_parts(explanation.parts(options.top or SHOWN_TIMES))
    if options.timeline and not options.json:
        print(explanation.timeline())
    if options.plot:
        Path(options.plot).write_text(explanation.plot())
    return 0


def _candidate(judged: Judged) -> dict[str, Any]:
    """Times in seconds. `compute` and what follows are None for a candidate that is estimated, not simulated."""
    values: dict[str, Any] = {"candidate": str(judged.candidate), "seconds": judged.seconds}
    if (proof := judged.proof) is None:
        return values | dict.fromkeys(("compute", "hidden", "exposed", "why"))
    why = str(proof.waits[0]) if proof.waits else None
    return values | {"compute": proof.kernels, "hidden": proof.hidden, "exposed": proof.exposed, "why": why}


def _values(explanation: Explanation, most: int | None) -> dict[str, Any]:
    return {
        "problem": str(explanation.problem),
        "ranks": explanation.problem.size,
        "machine": explanation.machine.name,
        "lower_bound": {"seconds": explanation.lower_bound.seconds, "what": explanation.lower_bound.what},
        "candidates": [_candidate(judged) for judged in explanation.judged[:most]],
        "refused": {str(candidate): why for candidate, why in explanation.refused},
        "best": str(explanation.winner.candidate),
        "unfused": str(explanation.unfused.candidate),
        "gain": explanation.unfused.seconds / explanation.winner.seconds if explanation.winner.seconds else 1.0,
    }
