"""`fompi plan`: the grid of ranks of a plan. Also the arguments that describe a problem, for other subcommands."""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fompi
from fompi.base.errors import FompiError, in_words
from fompi.base.layout import Spec
from fompi.base.wires import WIRES
from fompi.engine.communicator import machine_of_environment
from fompi.model.machine import PRESETS
from fompi.plans import meaning
from fompi.plans.plan import grid
from fompi.plans.problems import order_of
from fompi.schedules.registry import SCHEDULES

EXAMPLE = "{} plan all_gather_matmul 4096x4096 4096x14336 --ranks 8 --dtype bfloat16"

DEFAULT_MACHINE = "gigabit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_problem_arguments(parser)
    add_schedule_arguments(parser)
    parser.add_argument("--machine", help="auto is what is best there: a preset, or a JSON file")
    parser.add_argument(
        "--all", action="store_true", help="all ranks and ops, also if there are many or they are alike"
    )
    parser.add_argument("--json", action="store_true", help="the plan as JSON")


def run(options: argparse.Namespace) -> int:
    plan = plan_of(options, named_machine(options))
    print(plan.to_json() if options.json else grid(plan, is_whole=options.all))
    return 0


# ---------------------------------------------------------------------------------------- also for other subcommands


def add_problem_arguments(parser: argparse.ArgumentParser) -> None:
    """OPERATION, SHAPE ..., --ranks, --dtype, --wire and --order."""
    names = sorted(meaning.MEANING)
    parser.add_argument("operation", choices=names, metavar="OPERATION", help=", ".join(names))
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help="global shapes, x first: 4096x4096; or M,K,N")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--dtype", default="float32", help="(float32)")
    add_wire_argument(parser)
    parser.add_argument(
        "--order", type=_order, default="any", help="in which sums add: any, ranks, or 'canonical(8)' (any)"
    )
    parser.add_argument(
        "--load", action="append", default=[], metavar="FILE", help="a Python file that registers schedules of yours"
    )


def _order(text: str) -> str:
    try:
        return order_of(text)
    except fompi.PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_schedule_arguments(parser: argparse.ArgumentParser) -> None:
    """--schedule, --slices, --window, --staged and --verify."""
    parser.add_argument("--schedule", default="auto", help=f"auto, {', '.join(SCHEDULES)}, hierarchical(RANKS)")
    parser.add_argument("--slices", metavar="N | A,B,...", help="equal slices, or their sizes in proportion: 1,2,4")
    parser.add_argument("--window", type=int, help="sends of a rank that are in flight (the schedule's own number)")
    parser.add_argument("--staged", action="store_true", help="for a device: all messages through host memory")
    parser.add_argument("--verify", action="store_true", help="verify the plan first")


def named_machine(options: argparse.Namespace) -> fompi.Machine | None:
    """The machine that --machine names, else the one that FOMPI_MACHINE names. None if neither is given."""
    return machine_of_environment() if options.machine is None else fompi.Machine.load(options.machine)


def add_wire_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wire", help=f"what messages carry: {', '.join(WIRES)} (elements as they are)")


def add_machine_argument(parser: argparse.ArgumentParser) -> None:
    """--machine, where a machine is always needed."""
    default = f"what FOMPI_MACHINE says, or {DEFAULT_MACHINE}"
    parser.add_argument("--machine", help=f"a JSON file, or one of {', '.join(PRESETS)}; {default}")


def machine_of(options: argparse.Namespace) -> fompi.Machine:
    """The machine that is named, else the default one."""
    return named_machine(options) or fompi.Machine.load(DEFAULT_MACHINE)


def run_file(file: str, what: str) -> Mapping[str, Any]:
    """The names that a Python file of the user defines. Its `__name__` is "fompi.loaded", not "__main__".

    What it imports is looked for in its own folder first, as in that of a script. Raises FompiError, which begins with
    `what`, if the file is not there, or cannot be run.
    """
    sys.path.insert(0, str(Path(file).resolve().parent))
    try:
        return runpy.run_path(file, run_name="fompi.loaded")
    except OSError as error:
        raise FompiError(f"{what} {file}: {error.strerror}") from error
    except Exception as error:
        trace = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        line = f", line {trace[-1].lineno}" if trace else ""
        raise FompiError(f"{what} {file}{line}: {in_words(error)}") from error


def specs_of(options: argparse.Namespace) -> list[Spec]:
    """The global tensors of the problem. Files of --load, which register schedules, have run then."""
    for file in options.load:
        run_file(file, "--load")
    shapes = [_shape(text) for text in options.shapes]
    wanted = meaning.MEANING[options.operation]
    if "," in "".join(options.shapes[:1]) and len(shapes) == 1 and len(shapes[0]) == 3:  # M,K,N of a product
        (m, k, n), has_w, has_h = shapes[0], wanted.weight is not None, wanted.operand is not None
        shapes = [(m, k), *[(k, n)] * has_w, *[(m, n)] * has_h] if has_w or has_h else shapes
    layouts = meaning.layouts(options.operation, len(shapes))
    return [Spec(shape, options.dtype, layout) for shape, layout in zip(shapes, layouts, strict=True)]


def plan_of(options: argparse.Namespace, machine: fompi.Machine | None) -> fompi.Plan:
    """The plan. With --verify it is verified, and one line on standard error says so."""
    plan = fompi.plan(
        options.operation,
        *specs_of(options),
        ranks=options.ranks,
        **{name: getattr(options, name) for name in ("wire", "order")},
        schedule=options.schedule,
        slices=None if options.slices is None else _slices(options.slices),
        window=options.window,
        machine=machine,
    )
    if options.staged:
        plan = fompi.staged(plan)
    if options.verify:
        fompi.verify(plan)
        print(f"verified: {plan.size} ranks, {sum(len(p.ops) for p in plan.programs)} ops", file=sys.stderr)
    return plan


def _slices(text: str) -> int | tuple[int, ...]:
    try:
        shares = tuple(int(part) for part in text.replace(":", ",").split(","))
    except ValueError:
        raise fompi.PlanError(
            f"--slices takes a number, or sizes in proportion, for example 1,2,4, not {text!r}"
        ) from None
    return shares if len(shares) > 1 else shares[0]


def product_of(words: Sequence[str]) -> tuple[int, int, int]:
    """M, K, N of a product x[M, K] @ w[K, N], from M,K,N or from the two shapes. Raises ShapeError."""
    sizes = [n for word in words for n in _shape(word, least=1)]
    if len(words) == 2 and len(sizes) == 4 and sizes[1] == sizes[2]:
        del sizes[2]
    elif len(words) != 1 or len(sizes) != 3:
        given = f"not {' '.join(words)!r}; or the two shapes, 4096x1024 1024x4096"
        raise fompi.ShapeError(f"a shape is M,K,N, for example 4096,4096,4096, {given}")
    return sizes[0], sizes[1], sizes[2]


def _shape(text: str, least: int = 0) -> tuple[int, ...]:
    try:
        sizes = tuple(int(n) for n in text.replace(",", "x").split("x"))
    except ValueError:
        raise fompi.ShapeError(f"{text!r} is not a shape like 4096x1024") from None
    if min(sizes) < least:
        raise fompi.ShapeError(f"{text!r}: each size must be an integer >= {least}, as in 4096x1024")
    return sizes
