"""`fompi layout`: the best sizes of data, tensor, pipeline, expert and context parallelism for a model, on paper."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fompi
from fompi.cli import plan
from fompi.cli.output import UsageError, check_picture, show_json, show_parts
from fompi.model.pipeline import SCHEDULES
from fompi.planner.layers import MODELS, Transformer
from fompi.planner.layout import BATCH_TOKENS, FREE, TOP, Layouts
from fompi.planner.step import AXES, RECOMPUTE, Predicted

EXAMPLE = "{} layout --model llama-8b --ranks 64 --machine h100-ndr"

BETWEEN = re.compile(r"([0-9.]*[0-9])([kmg])bit(?:,([0-9.]*[0-9])ms)?")

BITS = {"k": 1e3, "m": 1e6, "g": 1e9}

GOODPUT = 1448 / 1514
"""The share of TCP payload in a full Ethernet frame: the rate of a link counts whole frames."""

SIZES = {
    "layers": "layers",
    "hidden": "the width",
    "ffn": "the width of the MLP, or of an expert",
    "matrices": "of the MLP: 2, or 3 if it is gated",
    "heads": "heads of attention",
    "kv_heads": "heads of keys and values",
    "vocabulary": "tokens of the vocabulary",
    "experts": "experts of a layer",
    "top_k": "experts of a token",
    "shared": "experts of all tokens",
    "sequence": "tokens of a sequence",
}
"""The sizes of a model that can be given, and what they are."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="llama-8b", help=f"{', '.join(MODELS)} (llama-8b)")
    parser.add_argument("--ranks", type=int, help="with --islands: of an island (1)")
    plan.add_machine_argument(parser)
    tokens = f"of all ranks: {BATCH_TOKENS >> 20} Mi tokens"
    parser.add_argument("--global-batch", dest="batch", type=int, metavar="N", help=f"sequences of a step ({tokens})")
    parser.add_argument("--top", type=int, default=TOP, metavar="N", help=f"how many layouts are shown ({TOP})")
    plan.add_wire_argument(parser)
    parser.add_argument("--json", action="store_true", help="the layouts as JSON, times in seconds")
    outer = parser.add_argument_group("outer steps", "what differs with islands: --wire is that between them")
    outer.add_argument("--islands", type=int, metavar="N", help="the smallest period that hides their messages")
    outer.add_argument("--between", type=_between, metavar="50mbit,80ms", help="their link (that of the machine)")
    outer.add_argument("--seconds", type=float, metavar="S", help="of an inner step (those of the best layout)")
    outer.add_argument("--picture", metavar="FILE", help="one period beside a step of DDP, as .svg")
    add_size_arguments(parser)
    fixed = parser.add_argument_group("what is given", "parts of a layout that are not chosen")
    for axis in AXES:
        fixed.add_argument(_option(axis), type=int, metavar="N")
    fixed.add_argument("--microbatch", type=int, metavar="N", help="sequences of a micro-batch")
    fixed.add_argument("--schedule", help=f"of the pipeline: {', '.join(SCHEDULES)}")
    fixed.add_argument("--chunks", type=int, metavar="N", help="stages of a rank, of interleaved")
    fixed.add_argument("--zero", type=int, metavar="N", help="ZeRO stage: 0, 1, 2, 3")
    fixed.add_argument("--recompute", help=f"in the backward: {', '.join(RECOMPUTE)}")


def run(options: argparse.Namespace) -> int:
    fixed = {name: value for name in FREE if (value := getattr(options, name)) is not None}
    if options.islands is not None:
        return _outer(options, fixed)
    if options.between is not None or options.seconds is not None or options.picture:
        raise UsageError("--between, --seconds and --picture are for --islands")
    if options.ranks is None:
        raise UsageError("the following arguments are required: --ranks")
    machine = plan.machine_of(options)
    how = {"batch": options.batch, "top": options.top, "wire": options.wire}
    found = fompi.layouts(model_of(options), options.ranks, machine, **how, **fixed)
    if options.json:
        show_json(_values(found))
    else:
        show_parts(found.parts)
    return 0


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of a model of the user's own, for `model_of`."""
    own = parser.add_argument_group("a model of your own", "sizes that replace those of --model")
    for name, what in SIZES.items():
        own.add_argument(_option(name), type=int, metavar="N", help=what)


def _outer(options: argparse.Namespace, fixed: dict[str, Any]) -> int:
    if options.picture:
        check_picture(options.picture)  # before the work
    names = "islands", "ranks", "between", "seconds", "wire", "batch"
    fixed |= {name: value for name in names if (value := getattr(options, name)) is not None}
    found = fompi.outer_period(plan.machine_of(options), model_of(options), **fixed)
    if options.json:
        show_json(asdict(found))
    else:
        show_parts(found.parts)
    if options.picture:
        Path(options.picture).write_text(found.best[0].picture())
    return 0


def _between(text: str) -> tuple[float, float]:
    """The bytes per second that a TCP stream carries, and the seconds of a round trip."""
    found = BETWEEN.fullmatch(text.strip().lower())
    if not found:
        raise argparse.ArgumentTypeError(f"'{text}' is not a rate: write it as 50mbit,80ms")
    return float(found[1]) * BITS[found[2]] / 8 * GOODPUT, float(found[3] or 0.0) / 1e3


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def model_of(options: argparse.Namespace) -> str | Transformer:
    """The name of a model, or its sizes with those that are given in their place."""
    given = {name: value for name in SIZES if (value := getattr(options, name)) is not None}
    if not given or options.model not in MODELS:
        return str(options.model)
    return MODELS[options.model]._replace(**given)


def _values(found: Layouts) -> dict[str, Any]:
    return {
        "title": found.title,
        "tried": found.tried,
        "left_out": found.left_out,
        "warning": found.warning.removeprefix("; warning: "),
        "layouts": [_layout_values(each) for each in found.best],
    }


def _layout_values(made: Predicted) -> dict[str, Any]:
    """Times in seconds, memory in bytes, rates per second; `flops_rate` is that of a rank."""
    return {
        **made.layout._asdict(),
        "seconds": made.seconds,
        **{name: value for name, value in vars(made).items() if name != "layout"},
        "memory": {**made.memory._asdict(), "total": made.memory.total},
    }
