"""`fompi balance`: shares of a model for ranks that are not equally fast: equal, balanced, one rank alone."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import fompi
from fompi.cli import layout, plan
from fompi.cli.output import check_picture, show_json, show_parts
from fompi.planner.balance import TASKS, TRAINED
from fompi.planner.layers import MODELS

EXAMPLE = "{} balance --machine laptops --model llama-1b"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="llama-1b", help=f"{', '.join(MODELS)} (llama-1b)")
    plan.add_machine_argument(parser)
    parser.add_argument("--ranks", type=int, help="(as many as the machine says)")
    parser.add_argument("--task", default="decode", help=f"{', '.join(TASKS)} (decode)")
    parser.add_argument("--batch", type=int, metavar="N", help=f"sequences (1; of a step of training {TRAINED})")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and activations (bfloat16)")
    parser.add_argument("--zero", type=int, default=1, metavar="N", help="ZeRO stage of training: 0, 1, 2, 3 (1)")
    parser.add_argument("--plot", metavar="FILE", help="a step by equal and balanced shares and alone, as .svg")
    parser.add_argument("--json", action="store_true", help="the shares as JSON, times in seconds")
    layout.add_size_arguments(parser)


def run(options: argparse.Namespace) -> int:
    if options.plot:
        check_picture(options.plot)  # before the work
    how = {name: getattr(options, name) for name in ("task", "batch", "dtype", "zero")}
    found = fompi.balance(plan.machine_of(options), layout.model_of(options), options.ranks, **how)
    if options.json:
        derived = {"best": asdict(found.best), "counts": found.counts, "verdict": found.verdict}
        show_json(asdict(found) | derived)
    else:
        show_parts(found.parts)
    if options.plot:
        Path(options.plot).write_text(found.plot())
    return 0
