"""Is a schedule that another system wrote right? Judge its file; with --run run it as a plan, under mpirun.

It finds a message that nobody takes, threads that wait for each other in a circle, two threads at one chunk, a chunk
that is read before it is written, a term that is missing or there twice. Of a right one it says what a rank sends, how
many messages follow each other, how many a connection must hold, and the time on a --machine. Of the actions of a
pipeline (CSV): work that is missing or there twice, a deadlock, and messages that are missing, too early, too late, or
in another order than they are taken; if it is right, how long ranks are idle.

| file              | what it has                                                                            |
|-------------------|----------------------------------------------------------------------------------------|
| `algorithm.py`    | what a schedule of MSCCL is: threads of steps on each rank, a queue for each connection |
| `msccl.py`        | reads its XML                                                                           |
| `proof.py`        | whether it ends, whether two threads touch a chunk at once, and what the result holds   |
| `translate.py`    | the same as a Plan, which is verified once more, simulated, and run                     |
| `action_files.py` | the CSV of `torch.distributed.pipelining`, and what is proven of it                     |
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fompi
import msccl
from action_files import FileVerdict, judge, lists_actions
from algorithm import ScheduleError
from fompi.base import file_checks
from fompi.base.errors import FompiError, LayoutError, PlanError
from fompi.cli import plan
from fompi.cli.main import Parser
from fompi.cli.output import first_rank_only, show_json
from fompi.model.machine import Machine
from fompi.schedules.registry import write
from proof import check
from translate import plan_of

LEAST_SENT = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}
"""The least that a rank must send on average, as a share of the whole tensor (Patarasuk and Yuan, 2009)."""


class Checked(NamedTuple):
    """What was found in a file: `what` it holds, why that is wrong (empty: it is right), and more, in words.

    `values` are for JSON. `run` is what --run has found.
    """

    file: str
    what: str
    reasons: Sequence[str]
    values: dict[str, Any]
    words: Sequence[str] = ()
    run: str = ""

    @property
    def is_right(self) -> bool:
        return not self.reasons and "wrong" not in self.run

    def __str__(self) -> str:
        verdict = "wrong" if self.reasons else "right"
        more = self.reasons or [*self.words, *filter(None, [self.run])]
        return "\n".join([f"{self.file}: {verdict}: {self.what}", *(f"  {line}" for line in more)])


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 if a schedule is wrong, 2 for an error, which is one line. Rank 0 prints."""
    with first_rank_only():
        try:
            return _run(_parser().parse_args(arguments))
        except (FompiError, OSError, MemoryError) as error:
            print(f"check: {error or type(error).__name__}", file=sys.stderr)
            return 2


def _parser() -> Parser:
    parser = Parser(
        prog="python tools/check",
        description=(
            "Is a schedule that another system wrote right? Exit status 1: one of them is not.\n"
            "FILE: the XML of MSCCL, as RCCL and msccl-tools have it, or the CSV of torch.distributed.pipelining."
        ),
        epilog="for example: python tools/check allreduce_ring.xml --machine h100-nvlink --nbytes 1000000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", metavar="FILE")
    plan.add_machine_argument(parser)
    parser.add_argument("--nbytes", type=int, default=1 << 20, help="of the whole tensor, for times and --run (1 MiB)")
    parser.add_argument("--run", action="store_true", help="run it, for mpirun with its number of ranks")
    parser.add_argument("--json", action="store_true", help="what was found, as JSON")
    return parser


def _run(options: argparse.Namespace) -> int:
    machine = plan.machine_of(options)
    if not 1 <= options.nbytes <= 1 << 40:
        raise PlanError(f"--nbytes {options.nbytes} must be from 1 to 2**40")
    found = [_checked(file, machine, options.nbytes, options.run) for file in options.files]
    if options.json:
        show_json([each.values for each in found])
    else:
        print("\n".join(map(str, found)))
    return int(not all(each.is_right for each in found))


def _checked(file: str, machine: Machine, nbytes: int, runs: bool) -> Checked:
    path = Path(file)
    try:
        if not path.is_file():
            raise ScheduleError("no such file")
        content = file_checks.read(path)
        text = file_checks.decoded(content)
        return _actions(file, text, runs) if lists_actions(text) else _schedule(file, content, machine, nbytes, runs)
    except (ScheduleError, LayoutError, PlanError, OSError) as error:
        words = str(error)
        raise ScheduleError(words if words.startswith(file) else f"{file}: {words}") from None


def _on_ranks(file: str, ranks: int, equal: Callable[[fompi.Communicator], bool]) -> str:
    """What --run has found: `equal(comm)` runs it, and says whether the result of this rank is right. Collective."""
    import numpy as np

    with fompi.Communicator() as comm:
        if comm.size != ranks:
            raise ScheduleError(f"{file} is for {ranks} ranks: run it with mpirun -n {ranks}, not {comm.size}")
        every = np.asarray(fompi.all_gather(np.array([equal(comm)]), comm=comm))
        return "run: right" if every.all() else f"run: wrong on the ranks {np.flatnonzero(~every).tolist()}"


# ------------------------------------------------------------------------------------------------- schedules of MSCCL


def _schedule(file: str, content: bytes, machine: Machine, nbytes: int, runs: bool) -> Checked:
    """A schedule. There is no time on a machine if no plan has its form."""
    algorithm = msccl.read(content)
    verdict, size = check(algorithm), algorithm.ranks
    what = f"{algorithm.collective} of {size} ranks in {algorithm.chunks} chunks"
    values: dict[str, Any] = {
        "file": file, "right": verdict.is_right, "reasons": list(verdict.reasons), "collective": algorithm.collective,
        "ranks": size, "chunks": algorithm.chunks, "in_place": algorithm.in_place,
    }  # fmt: skip
    if not verdict.is_right:
        return Checked(file, what, verdict.reasons, values)
    sent, least = max(verdict.moved) / algorithm.chunks, LEAST_SENT[algorithm.collective](size)
    words = [
        f"a rank sends up to {sent:.3g} of the tensor (at least {least:.3g}); {verdict.depth} messages one after the "
        f"other; a connection holds {verdict.slots} at a time"
    ]
    seconds, ran = None, ""
    try:
        made = plan_of(algorithm, verdict, max(1, nbytes // 4 // size), (), "float32")
        fompi.verify(made)
    except ScheduleError:
        if runs:
            raise
    else:
        seconds, ran = fompi.simulate(made, machine).seconds, _run_plan(file, made) if runs else ""
        words.append(f"{1e3 * seconds:.4g} ms for {nbytes} bytes on {machine.name}, as a plan that is verified")
    values |= {"sent": sent, "least": least, "depth": verdict.depth, "slots": verdict.slots}
    values |= {"seconds": seconds, "run": ran}
    return Checked(file, what + ", in place" * algorithm.in_place, (), values, words, ran)


def _run_plan(file: str, made: fompi.Plan) -> str:
    """Run it, and a schedule of fompi beside it, on whole numbers: then the order of a sum makes no difference."""
    import numpy as np

    def equal(comm: fompi.Communicator) -> bool:
        shape = made.programs[comm.rank].buffer("x").shape(made.extents(comm.rank))
        x, results = np.random.default_rng(comm.rank).integers(-9, 9, shape).astype(np.float32), []
        for each in (made, write(made.problem, "direct", 1, made.sizes)):
            with fompi.bind(each, comm=comm, x=x) as step:
                results.append(np.asarray(step()).tobytes())
        return results[0] == results[1]

    return _on_ranks(file, made.size, equal)


# ------------------------------------------------------------------------------ actions of torch.distributed.pipelining


def _actions(file: str, text: str, runs: bool) -> Checked:
    """The actions of a pipeline (`action_files.py`)."""
    verdict = judge(text)
    what = f"a pipeline of {verdict.ranks} ranks, {verdict.stages} stages and {verdict.microbatches} micro-batches"
    ran = _run_actions(file, verdict) if runs and verdict.is_right else ""
    values = {"file": file, "right": verdict.is_right, **verdict._asdict(), "run": ran}
    del values["rows"]
    if not verdict.is_right:
        return Checked(file, what, verdict.reasons, values)
    listed = f", with its {verdict.messages} messages" if verdict.messages else ", without messages"
    words = [
        f"{verdict.span:g} units where F, I and W take 1 and B takes 2, and messages nothing: ranks are idle for "
        f"{verdict.idle:.1%} of it; a rank holds up to {verdict.alive} micro-batches"
    ]
    return Checked(file, what + listed, (), values, words, ran)


def _run_actions(file: str, verdict: FileVerdict) -> str:
    """Run it as a pipeline of products of small whole numbers, whose gradients are known. Collective."""
    import numpy as np

    from fompi.model.pipeline import stages_of
    from fompi.parallel.actions import actions, placement_in
    from fompi.parallel.pipeline import Pipeline

    class Product:
        """y = x @ w"""

        def __init__(self, stage: int):
            self.w = np.random.default_rng(stage).integers(-1, 2, (3, 3)).astype(np.float64)
            self.gradient = np.zeros_like(self.w)

        def forward(self, x: Any) -> tuple[Any, Any]:
            return x @ self.w, np.array(x)

        def backward(self, x: Any, dy: Any) -> Any:
            self.backward_weight((x, np.array(dy)))
            return dy @ self.w.T

        def backward_input(self, x: Any, dy: Any) -> tuple[Any, Any]:
            return dy @ self.w.T, (x, np.array(dy))

        def backward_weight(self, rest: tuple[Any, Any]) -> None:
            self.gradient += rest[0].T @ rest[1]

    def loss(y: Any, target: Any) -> tuple[float, Any]:
        return float((y * target).sum()), np.array(target)

    xs, targets = (
        [np.random.default_rng([i, k]).integers(-2, 3, (2, 3)).astype(np.float64) for i in range(verdict.microbatches)]
        for k in (0, 1)
    )

    def equal(comm: fompi.Communicator) -> bool:
        chunks = verdict.stages // verdict.ranks
        steps = actions([[*row] for row in verdict.rows], verdict.ranks, verdict.microbatches, chunks)
        mine = stages_of(comm.rank, comm.size, chunks, placement_in(steps, chunks))
        stages = {stage: Product(stage) for stage in mine}
        how: dict[str, Any] = {"microbatches": verdict.microbatches, "activations": (2, 3), "dtype": "float64"}
        with Pipeline([*stages.values()], comm=comm, schedule=steps, loss=loss, **how) as pipe:
            pipe.step(xs, targets)
        whole = [Product(stage) for stage in range(verdict.stages)]
        for x, target in zip(xs, targets, strict=True):
            saved = []
            for each in whole:
                x, before = each.forward(x)
                saved.append(before)
            d = target
            for each, before in zip(reversed(whole), reversed(saved), strict=True):
                d = each.backward(before, d)
        return all(np.array_equal(product.gradient, whole[stage].gradient) for stage, product in stages.items())

    return _on_ranks(file, verdict.ranks, equal)
