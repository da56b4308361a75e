"""`fompi check`: is a schedule that another system wrote right? With --run it is run as a plan, under mpirun."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import fompi
from fompi.base import file_checks
from fompi.base.errors import LayoutError
from fompi.cli import check_actions, plan
from fompi.cli.check_actions import CheckedActions
from fompi.cli.output import show_json
from fompi.foreign import msccl
from fompi.foreign.algorithm import Algorithm, ScheduleError
from fompi.foreign.proof import Judgement, check
from fompi.foreign.translate import plan_of
from fompi.model.machine import Machine
from fompi.parallel.action_files import lists_actions

EXAMPLE = "{} check allreduce_ring.xml --machine h100-nvlink --nbytes 1000000"

LEAST_SENT = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}
"""The least that a rank must send on average, as a share of the whole tensor (Patarasuk and Yuan, 2009)."""


class Checked(NamedTuple):
    """A file, and what was found."""

    file: str
    algorithm: Algorithm
    verdict: Judgement
    seconds: float | None  # on a machine; None: it is wrong, or no plan has its form
    run: str  # what --run has found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = "the XML of MSCCL, as RCCL and msccl-tools have it, or the CSV of torch.distributed.pipelining"
    parser.add_argument("files", nargs="+", metavar="FILE", help=words)
    plan.add_machine_argument(parser)
    parser.add_argument("--nbytes", type=int, default=1 << 20, help="of the whole tensor, for times and --run (1 MiB)")
    parser.add_argument("--run", action="store_true", help="run it, for mpirun with its number of ranks")
    parser.add_argument("--json", action="store_true", help="what was found, as JSON")


def run(options: argparse.Namespace) -> int:
    """Exit status 1 if a schedule is wrong."""
    machine = plan.machine_of(options)
    if not 1 <= options.nbytes <= 1 << 40:
        raise fompi.PlanError(f"--nbytes {options.nbytes} must be from 1 to 2**40")
    found = [_checked(file, machine, options.nbytes, options.run) for file in options.files]
    if options.json:
        show_json([each.values() if isinstance(each, CheckedActions) else _values(each) for each in found])
    else:
        texts = (
            each.text() if isinstance(each, CheckedActions) else _text(each, machine, options.nbytes) for each in found
        )
        print("\n".join(texts))
    return int(not all(each.verdict.is_right and "wrong" not in each.run for each in found))


def _checked(file: str, machine: Machine, nbytes: int, runs: bool) -> Checked | CheckedActions:
    path = Path(file)
    try:
        if not path.is_file():
            raise ScheduleError("no such file")
        content = file_checks.read(path)
        if lists_actions(text := file_checks.decoded(content)):
            return check_actions.checked(file, text, runs)
        algorithm = msccl.read(content)
        verdict = check(algorithm)
    except (ScheduleError, LayoutError, OSError) as error:
        words = str(error)
        raise ScheduleError(words if words.startswith(file) else f"{file}: {words}") from None
    if not verdict.is_right:
        return Checked(file, algorithm, verdict, None, "")
    rows = max(1, nbytes // 4 // algorithm.ranks)
    try:
        made = plan_of(algorithm, verdict.order, rows, (), "float32")
        fompi.verify(made)
    except ScheduleError as error:
        if runs:
            raise ScheduleError(f"{file}: {error}") from None
        return Checked(file, algorithm, verdict, None, "")
    return Checked(file, algorithm, verdict, fompi.simulate(made, machine).seconds, _run(file, made) if runs else "")


def _run(file: str, made: fompi.Plan) -> str:
    """Run it on whole numbers, so that the order of a sum makes no difference. Collective."""
    import numpy as np

    from fompi.plans.conditions import reference

    with fompi.Communicator() as comm:
        if comm.size != made.size:
            raise ScheduleError(f"{file} is for {made.size} ranks: run it with mpirun -n {made.size}, not {comm.size}")
        extents = [made.extents(rank) for rank in range(made.size)]
        given = [
            {"x": np.random.default_rng(rank).integers(-9, 9, program.buffer("x").shape(e)).astype(np.float32)}
            for rank, (program, e) in enumerate(zip(made.programs, extents, strict=True))
        ]
        wanted = reference(made.problem, given, made.sizes, np)[comm.rank]
        with fompi.bind(made, comm=comm, **given[comm.rank]) as step:
            y = np.asarray(step())
        equal = y.tobytes() == np.ascontiguousarray(next(iter(wanted.values()))).tobytes()
        every = np.asarray(fompi.all_gather(np.array([equal]), comm=comm))
        return "run: right" if every.all() else f"run: wrong on the ranks {np.flatnonzero(~every).tolist()}"


def _text(found: Checked, machine: Machine, nbytes: int) -> str:
    algorithm, verdict = found.algorithm, found.verdict
    what = f"{algorithm.collective} of {algorithm.ranks} ranks in {algorithm.chunks} chunks"
    if not verdict.is_right:
        return "\n".join([f"{found.file}: wrong: {what}", *(f"  {reason}" for reason in verdict.reasons)])
    sent, least = _sent(found)
    lines = [
        f"{found.file}: right: {what}{', in place' * algorithm.in_place}",
        f"  a rank sends up to {sent:.3g} of the tensor (at least {least:.3g}); {verdict.depth} messages one after the "
        f"other; a connection holds {verdict.slots} at a time",
    ]
    if found.seconds is not None:
        lines.append(f"  {1e3 * found.seconds:.4g} ms for {nbytes} bytes on {machine.name}, as a plan that is verified")
    return "\n".join([*lines, *[f"  {found.run}"] * bool(found.run)])


def _sent(found: Checked) -> tuple[float, float]:
    """How much of the whole tensor a rank sends at most, and how much it must send on average."""
    algorithm = found.algorithm
    return max(found.verdict.moved) / algorithm.chunks, LEAST_SENT[algorithm.collective](algorithm.ranks)


def _values(found: Checked) -> dict[str, Any]:
    algorithm, verdict = found.algorithm, found.verdict
    values: dict[str, Any] = {
        "file": found.file,
        "right": verdict.is_right,
        "reasons": list(verdict.reasons),
        "collective": algorithm.collective,
        "ranks": algorithm.ranks,
        "chunks": algorithm.chunks,
        "in_place": algorithm.in_place,
    }
    if verdict.is_right:
        sent, least = _sent(found)
        values |= {"sent": sent, "least": least, "depth": verdict.depth, "slots": verdict.slots}
        values |= {"seconds": found.seconds, "run": found.run}
    return values
