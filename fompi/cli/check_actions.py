"""`fompi check` of the CSV files of `torch.distributed.pipelining` (`fompi.parallel.action_files`)."""

from __future__ import annotations

from typing import Any, NamedTuple

from fompi.base.errors import PlanError
from fompi.foreign.algorithm import ScheduleError
from fompi.parallel.action_files import FileVerdict, judge


class CheckedActions(NamedTuple):
    """A file, and what was found."""

    file: str
    verdict: FileVerdict
    run: str  # what --run has found

    @property
    def is_right(self) -> bool:
        return self.verdict.is_right and "wrong" not in self.run

    def text(self) -> str:
        verdict = self.verdict
        of = f"a pipeline of {verdict.ranks} ranks, {verdict.stages} stages and {verdict.microbatches} micro-batches"
        if not verdict.is_right:
            return "\n".join([f"{self.file}: wrong: {of}", *(f"  {reason}" for reason in verdict.reasons)])
        listed = f", with its {verdict.messages} messages" if verdict.messages else ", without messages"
        lines = [
            f"{self.file}: right: {of}{listed}",
            f"  {verdict.span:g} units where F, I and W take 1 and B takes 2, and messages nothing: ranks are idle for "
            f"{verdict.idle:.1%} of it; a rank holds up to {verdict.alive} micro-batches",
        ]
        return "\n".join([*lines, *[f"  {self.run}"] * bool(self.run)])

    def values(self) -> dict[str, Any]:
        values = {"file": self.file, "right": self.verdict.is_right, **self.verdict._asdict(), "run": self.run}
        del values["rows"]
        return values


def checked(file: str, text: str, runs: bool) -> CheckedActions:
    """Raises ScheduleError for what is not known, and for a --run that is not possible."""
    try:
        verdict = judge(text)
    except PlanError as error:
        raise ScheduleError(f"{file}: {error}") from None
    return CheckedActions(file, verdict, _run(file, verdict) if runs and verdict.is_right else "")


def _run(file: str, verdict: FileVerdict) -> str:
    """Run it as a pipeline of products of small whole numbers, whose gradients are known. Collective."""
    import numpy as np

    import fompi
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
    with fompi.Communicator() as comm:
        if comm.size != verdict.ranks:
            why = f"run it with mpirun -n {verdict.ranks}, not {comm.size}"
            raise ScheduleError(f"{file} is for {verdict.ranks} ranks: {why}")
        chunks = verdict.stages // verdict.ranks
        steps = actions([[*row] for row in verdict.rows], verdict.ranks, verdict.microbatches, chunks)
        mine = stages_of(comm.rank, comm.size, chunks, placement_in(steps, chunks))
        stages = {stage: Product(stage) for stage in mine}
        how: dict[str, Any] = {"microbatches": verdict.microbatches, "activations": (2, 3), "dtype": "float64"}
        pipe = Pipeline([*stages.values()], comm=comm, schedule=steps, loss=loss, **how)
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
        equal = all(np.array_equal(product.gradient, whole[stage].gradient) for stage, product in stages.items())
        every = np.asarray(fompi.all_gather(np.array([equal]), comm=comm))
        pipe.close()
        return "run: right" if every.all() else f"run: wrong on the ranks {np.flatnonzero(~every).tolist()}"
