"""A pipeline as a plan: `plan(schedule, ...)` returns a `fompi.Plan`, without MPI and without data.

The kernels are those of the user (`fompi.plans.plan.UserKernel`): forward, backward, backward_input, backward_weight,
each with the arguments <stage, micro-batch>. `forward_backward` is two of these calls side by side. What travels has
slots of its declared shape:

| buffer  | what it holds                                              | in use until                                 |
|---------|------------------------------------------------------------|----------------------------------------------|
| `aS_k`  | the input of stage S, for one of the micro-batches         | the backward of its weights is done, or it   |
|         |                                                            | is sent to the rank of stage S               |
| `dS_k`  | the gradient of the output of stage S                      | the same                                     |
| `sS_k`  | nothing: it stands for what the forward has saved          | its backward, or backward_input, is done     |
| `rS_k`  | nothing: it stands for what backward_input leaves          | its backward_weight is done                  |
| `gS`    | nothing: it stands for the gradients of the parameters, or | the end, where it has a term per micro-batch |
|         | in an evaluation for what the stage has computed           |                                              |

A receive is posted as soon as its slot is free. `SPARE` slots beyond those that the actions need make it early.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from fompi.base.errors import ShapeError
from fompi.base.layout import MOST_NBYTES, integer, itemsize, nbytes
from fompi.base.wires import wire_of
from fompi.model.pipeline import rank_of, stages_of
from fompi.parallel.actions import BOTH, KINDS, Action, Actions, Both, Step, actions, parts, placement_in
from fompi.parallel.stages import KEPT, Passed, StageWriter, name_of, passes, plan_of, seconds_of
from fompi.plans.encoded import encoded
from fompi.plans.kernels import Value, opaque, total
from fompi.plans.plan import Chunk, Compute, Plan, Program, UserKernel, Workspace
from fompi.plans.problems import OwnProblem

KERNELS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight", "E": "evaluate"}
"""The name of the kernel for each kind of action. E is a forward that keeps nothing for a backward."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PipelineProblem(OwnProblem):
    """Every micro-batch goes forward and backward through all stages, and adds to the gradients of each one once.

    The operation "evaluation" goes forward only, and keeps nothing for a backward: what stages compute is the result.
    `activations[s]` is the shape of what stage s hands on. `split` are the (stage, micro-batch) whose backward has two
    parts. `placement` says which stages a rank has (`fompi.model.pipeline.PLACEMENTS`). `wire` is the form in which
    messages carry what is handed on.
    """

    microbatches: int
    activations: tuple[Shape, ...]
    split: tuple[tuple[int, int], ...] = ()
    placement: str = "loop"
    wire: str = field(default="", kw_only=True)  # type: ignore[misc]

    @property
    def is_evaluation(self) -> bool:
        return self.operation == "evaluation"

    @property
    def stages(self) -> int:
        return len(self.activations) + 1

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, in order."""
        return stages_of(rank, self.size, self.stages // self.size, self.placement)

    def rank_of(self, stage: int) -> int:
        """The rank that has a stage."""
        return rank_of(stage, self.size, self.placement)

    def workspace(self, rank: int, parts: int) -> Workspace:
        work = Workspace(rank, self.size, parts)
        for stage in self.stages_of(rank):
            work.add(f"g{stage}", "output", "whole", (0,), self.dtype)
        return work

    def after(self, rank: int, parts: int) -> dict[tuple[str, int], Value]:
        return {(f"g{stage}", 0): self._gradients[stage] for stage in self.stages_of(rank)}

    @cached_property
    def _gradients(self) -> dict[int, Value]:
        """The terms of the gradients of each stage: one for each micro-batch, as one process would make it."""
        found: defaultdict[int, list[Value]] = defaultdict(list)
        split, last, forward = set(self.split), self.stages - 1, KERNELS["E" if self.is_evaluation else "F"]
        for i in range(self.microbatches):
            inputs: list[Value] = [()]  # of each stage
            saved: list[Value] = []
            for s in range(self.stages):
                operands = [inputs[s]] if s else []
                results = [(opaque(forward, (s, i), operands, k),) for k in range(1 if s == last else 2)]
                saved.append(results[-1])
                inputs.append(results[0])
                if self.is_evaluation:
                    found[s].append(saved[s])
            if self.is_evaluation:
                continue
            gradient: Value = ()  # of the output of the stage
            for s in reversed(range(self.stages)):
                travelled = [gradient] * (s < last) + [inputs[s]] * (s > 0)
                name = "backward_input" if (s, i) in split else "backward"
                both = [(opaque(name, (s, i), [*travelled, saved[s]], k),) for k in range(2 if s else 1)]
                weights: Value = both[-1]
                if (s, i) in split:
                    weights = (opaque("backward_weight", (s, i), [*travelled, both[-1]], 0),)
                found[s].append(weights)
                gradient = both[0]
        return {stage: total(*values) for stage, values in found.items()}

    def __str__(self) -> str:
        shapes = {*self.activations}
        passed = f" of {[*shapes][0]}" if len(shapes) == 1 else ""  # noqa: RUF015
        wire = f", wire {self.wire}" if self.wire else ""
        return f"{self.operation}({self.dtype}, {self.stages} stages, {self.microbatches} micro-batches{passed}{wire})"


def plan(
    schedule: str | Sequence[Sequence[Step | str]],
    *,
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    activations: Sequence[Any],
    dtype: str = "float32",
    seconds: Mapping[str, float | Sequence[float]] | None = None,
    wire: str | None = None,
) -> Plan:
    """plan("1f1b", ranks=4, microbatches=8, activations=(16, 64)): who computes, sends and receives what.

    `schedule` is as for `actions`, or what that returns. `activations[s]` is the shape of what stage s hands on, for
    all stages but the last; one shape is that of all stages. `seconds` are those of the actions F, B, I and W, for all
    stages or for each one. They are needed to simulate the plan. B is I + W, if these two are given. A forward and a
    backward side by side take as long as both, or as "OVERLAP_F_B" says, by the stage of the forward. `wire` is the
    form in which messages carry what is handed on (`fompi.base.wires`). Raises PlanError for actions that are wrong,
    and ShapeError or DtypeError for what is passed on.
    """
    listed = actions(schedule, ranks, microbatches, chunks)
    shapes = _shapes(activations, ranks * chunks)
    split = tuple(sorted((a.stage, a.microbatch) for steps in listed for a in parts(steps) if a.kind == "I"))
    where = placement_in(listed, chunks)
    problem = PipelineProblem("pipeline", ranks, dtype, microbatches, shapes, split, where, wire=wire_of(wire, dtype))
    return _plan(problem, listed, name_of(schedule), seconds or {})


def evaluation(
    *,
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    activations: Sequence[Any],
    dtype: str = "float32",
    seconds: Mapping[str, float | Sequence[float]] | None = None,
    wire: str | None = None,
    placement: str = "loop",
) -> Plan:
    """Who computes, sends and receives what if all micro-batches only go forward. The options are those of `plan`.

    rank 0 | 0 1 2 3 |           several stages of a rank: as many micro-batches as ranks go through one of them,
    rank 1 |   0 1 2 3 |         then through the next. In a V each goes on as soon as it can.
    """
    listed: Actions = [
        [
            Action(stage, "E", i)
            for first in range(0, microbatches, ranks)
            for stage in stages_of(rank, ranks, chunks, placement)
            for i in range(first, min(first + ranks, microbatches))
        ]
        for rank in range(ranks)
    ]
    if placement == "v":
        listed = [[*sorted(parts(a), key=lambda a: (a.stage + a.microbatch, -a.stage))] for a in listed]
    shapes = _shapes(activations, ranks * chunks)
    problem = PipelineProblem(
        "evaluation", ranks, dtype, microbatches, shapes, placement=placement, wire=wire_of(wire, dtype)
    )
    return _plan(problem, listed, "in order", seconds or {})


def _plan(problem: PipelineProblem, listed: Actions, name: str, seconds: Mapping[str, float | Sequence[float]]) -> Plan:
    stages = problem.stages
    itemsize(problem.dtype)  # raises DtypeError for an unknown one
    if max((nbytes(shape, problem.dtype) for shape in problem.activations), default=0) >= MOST_NBYTES:
        raise ShapeError(
            f"activations of the shapes {problem.activations} in {problem.dtype} are too large for any memory"
        )
    used = {action.kind for steps in listed for action in parts(steps)}
    pairs = sorted({step.backward.kind for steps in listed for step in steps if isinstance(step, Both)})
    own = {k: UserKernel(name, _seconds(k, seconds, stages)) for k, name in KERNELS.items() if k in used}
    both = (UserKernel(_beside(k), _seconds(BOTH, seconds, stages), (own["F"], own[k])) for k in pairs)
    plan = plan_of(problem, name, (*own.values(), *both), partial(_Writer, problem, listed))
    return encoded(plan, 1) if problem.wire else plan


def _beside(kind: str) -> str:
    """The name of the kernel of a forward with a backward of this kind."""
    return f"{KERNELS['F']}_{KERNELS[kind]}"


def _shapes(activations: Sequence[Any], stages: int) -> tuple[Shape, ...]:
    """The shapes of what stages hand on, one for each stage but the last."""
    try:
        listed = [*activations]
        if all(integer(n) is not None for n in listed) and listed:
            listed = [listed] * (stages - 1)
        if len(listed) == stages:  # the last one hands nothing on
            del listed[-1]
        shapes = tuple(tuple(integer(n) for n in shape) for shape in listed)
    except TypeError as error:
        raise ShapeError(f"activations must be shapes, one for each stage but the last, not {activations!r}") from error
    if len(shapes) != stages - 1:
        raise ShapeError(f"activations has {len(shapes)} shapes, but {stages} stages hand on {stages - 1}")
    for stage, shape in enumerate(shapes):
        if any(n is None or n < 0 for n in shape):
            raise ShapeError(f"activations[{stage}]={listed[stage]!r} must be a shape of integers >= 0")
    return shapes  # type: ignore[return-value]


def _seconds(kind: str, seconds: Mapping[str, float | Sequence[float]], stages: int) -> tuple[float, ...]:
    """The seconds of a kind of action, for all stages (one entry) or for each stage. Empty: they are not known."""
    found = seconds_of(seconds, "F" if kind == "E" else kind, (*KINDS, BOTH), stages, "stages")
    if kind != "B" or found or not {"I", "W"} <= {*seconds}:
        return found
    both = [_seconds(part, seconds, stages) for part in "IW"]
    return tuple(sum(part[k % len(part)] for part in both) for k in range(max(map(len, both))))


class _Writer(StageWriter):
    """Writes the program of one rank: a call for each action, or for two that run side by side."""

    problem: PipelineProblem

    def __init__(self, problem: PipelineProblem, listed: Actions, rank: int, counts: Mapping[str, int]):
        super().__init__(problem, listed, rank, problem.workspace(rank, 1), counts)
        self.kept: dict[tuple[str, int, int], Chunk] = {}  # what a forward or the first part of a backward leaves
        self.begun: set[int] = set()  # the stages whose gradients have their first term

    def program(self) -> Program:
        for step in self.steps:
            self._write(parts([step]))
        return self.work.program(self.ops)

    def slots_of(self, passed: Passed) -> list[Chunk]:
        return [self._slot(*passed[:2])]

    def _slot(self, kind: str, stage: int) -> Chunk:
        shape = (0,) if kind in KEPT else self.problem.activations[stage - (kind == "a")]
        return self.slots.take(f"{kind}{stage}", shape)

    def _keep(self, kind: str, stage: int, i: int) -> Chunk:
        """A slot that stands for what the action keeps for another one."""
        self.kept[kind, stage, i] = slot = self._slot(kind, stage)
        return slot

    def _write(self, actions: Sequence[Action]) -> None:
        """One action, or two that run side by side."""
        calls = [self._call(action) for action in actions]
        op = calls[0]
        if len(calls) > 1:
            counts = len(op.reads), len(op.writes)
            reads, writes, args = (sum((getattr(c, n) for c in calls), ()) for n in ("reads", "writes", "args"))
            op = Compute(_beside(actions[1].kind), reads, writes, (*args, *counts))
        self.ops.append(op)
        for action, call in zip(actions, calls, strict=True):
            self.hand_on(action, [*call.writes[:1]])
        for action in actions:
            self._drop_read(action)

    def _call(self, action: Action) -> Compute:
        """The call of an action. What it reads has arrived, and what it writes has slots."""
        stage, kind, i = action
        first, last = stage == 0, stage == self.problem.stages - 1
        reads: list[Chunk] = []
        if kind not in "FE" and not last:
            reads += self.arrive(("d", stage, i))
        if not first:
            reads += self.arrive(("a", stage, i))
        if kind in "BI":
            reads.append(self.kept["s", stage, i])
        writes = [] if (passed := passes(action, self.problem.stages)) is None else self.slots_of(passed)
        if kind in "FI":
            writes.append(self._keep("s" if kind == "F" else "r", stage, i))
        else:
            if kind == "W":
                reads.append(self.kept["r", stage, i])
            sum_so_far = self.work[f"g{stage}"][:]
            if stage in self.begun:
                reads.append(sum_so_far)
            self.begun.add(stage)
            writes.append(sum_so_far)
        return Compute(KERNELS[kind], tuple(reads), tuple(writes), (stage, i))

    def _drop_read(self, action: Action) -> None:
        """The slots that the action was the last one to read."""
        stage, kind, i = action
        if kind in "BI":
            self.drop(self.kept.pop(("s", stage, i)))
        if kind == "W":
            self.drop(self.kept.pop(("r", stage, i)))
        if kind in "BWE":
            self.drop(*self.held.pop(("d", stage, i), ()), *self.held.pop(("a", stage, i), ()))
