"""A pipeline as a plan: `plan(schedule, ...)` returns a `fompi.Plan`, without MPI and without data.

The kernels are those of the user (`fompi.plans.plan.UserKernel`): forward, backward, backward_input, backward_weight,
each with the arguments <stage, micro-batch>. `forward_backward` is two of these calls side by side. What travels has
slots of its declared shape:

| buffer  | what it holds                                              | in use until                                 |
|---------|------------------------------------------------------------|----------------------------------------------|
| `aS_k`  | the input of stage S, for one of the micro-batches         | the backward of its weights is done          |
| `oS_k`  | the output of stage S, on its way to another rank          | it is sent                                   |
| `dS_k`  | the gradient of the output of stage S                      | the backward of its weights is done          |
| `eS_k`  | the gradient of the input of stage S, on its way           | it is sent                                   |
| `sS_k`  | nothing: it stands for what the forward has saved          | its backward, or backward_input, is done     |
| `rS_k`  | nothing: it stands for what backward_input leaves          | its backward_weight is done                  |
| `gS`    | nothing: it stands for the gradients of the parameters, or | the end, where it has a term per micro-batch |
|         | in an evaluation for what the stage has computed           |                                              |

A receive is posted as soon as its slot is free. `SPARE` slots beyond those that the order needs make it early.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fompi.base.errors import PlanError, ShapeError
from fompi.base.layout import MOST_NBYTES, Sizes, integer, itemsize, nbytes, number
from fompi.base.wires import wire_of
from fompi.model.pipeline import rank_of, stages_of
from fompi.parallel.orders import BOTH, SCHEDULES, Action, Both, Orders, Step, order, parts, placement_in
from fompi.parallel.slots import Slots
from fompi.plans.encoded import encoded
from fompi.plans.kernels import Value, opaque, total
from fompi.plans.plan import Chunk, Compute, Op, Plan, Program, Programs, Recv, Send, UserKernel, Workspace
from fompi.plans.problems import OwnProblem

SPARE = 2
"""Slots for messages beyond those that the order needs: one may arrive, and one may leave, while others are in use."""

KERNELS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight", "E": "evaluate"}
"""The name of the kernel for each kind of action. E is a forward that keeps nothing for a backward."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PipelineProblem(OwnProblem):
    """Every micro-batch goes forward and backward through all stages, and adds to the gradients of each one once.

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
    def stages(self) -> int:
        return len(self.activations) + 1

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, in order."""
        return stages_of(rank, self.size, self.stages // self.size, self.placement)

    def rank_of(self, stage: int) -> int:
        """The rank that has a stage."""
        return rank_of(stage, self.size, self.placement)

    def workspace(self, rank: int, parts: int, order: Sequence[int] = ()) -> Workspace:
        work = Workspace(rank, self.size, parts, order)
        for stage in self.stages_of(rank):
            work.add(f"g{stage}", "output", "whole", (0,), self.dtype)
        return work

    def after(self, rank: int, parts: int) -> dict[tuple[str, int], Value]:
        return {(f"g{stage}", 0): self._gradients[stage] for stage in self.stages_of(rank)}

    @cached_property
    def _gradients(self) -> dict[int, Value]:
        """The terms of the gradients of each stage: one for each micro-batch, as one process would make it."""
        found: defaultdict[int, list[Value]] = defaultdict(list)
        split, last = set(self.split), self.stages - 1
        for i in range(self.microbatches):
            inputs: list[Value] = [()]  # of each stage
            saved: list[Value] = []
            for s in range(self.stages):
                operands = [inputs[s]] if s else []
                results = [(opaque("forward", (s, i), operands, k),) for k in range(1 if s == last else 2)]
                saved.append(results[-1])
                inputs.append(results[0])
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


class EvaluationProblem(PipelineProblem):
    """Every micro-batch goes forward through all stages, and nothing is kept for a backward."""

    @cached_property
    def _gradients(self) -> dict[int, Value]:
        found: defaultdict[int, list[Value]] = defaultdict(list)
        for i in range(self.microbatches):
            operands: list[Value] = []
            for s in range(self.stages):
                y, computed = ((opaque("evaluate", (s, i), operands, k),) for k in range(2))
                found[s].append(y if s == self.stages - 1 else computed)
                operands = [y]
        return {stage: total(*values) for stage, values in found.items()}


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

    `schedule` is as for `order`, or what it returns. `activations[s]` is the shape of what stage s hands on, for all
    stages but the last; one shape is that of all stages. `seconds` are those of the actions F, B, I and W, for all
    stages or for each one. They are needed to simulate the plan. B is I + W, if these two are given. A forward and a
    backward side by side take as long as both, or as "OVERLAP_F_B" says, by the stage of the forward. `wire` is the
    form in which messages carry what is handed on (`fompi.base.wires`). Raises PlanError for an order that is wrong,
    and ShapeError or DtypeError for what is passed on.
    """
    listed = order(schedule, ranks, microbatches, chunks)
    shapes = _shapes(activations, ranks * chunks)
    split = tuple(sorted((a.stage, a.microbatch) for steps in listed for a in parts(steps) if a.kind == "I"))
    name = schedule if isinstance(schedule, str) and schedule in SCHEDULES else "own order"
    where = placement_in(listed, chunks)
    problem = PipelineProblem("pipeline", ranks, dtype, microbatches, shapes, split, where, wire=wire_of(wire, dtype))
    return _plan(problem, listed, name, seconds or {})


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
    listed: Orders = [
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
    given = {"E": (seconds or {})["F"]} if "F" in (seconds or {}) else {}
    shapes = _shapes(activations, ranks * chunks)
    problem = EvaluationProblem(
        "evaluation", ranks, dtype, microbatches, shapes, placement=placement, wire=wire_of(wire, dtype)
    )
    return _plan(problem, listed, "in order", given)


def _plan(problem: PipelineProblem, listed: Orders, name: str, seconds: Mapping[str, float | Sequence[float]]) -> Plan:
    ranks, stages = problem.size, problem.stages
    itemsize(problem.dtype)  # raises DtypeError for an unknown one
    if max((nbytes(shape, problem.dtype) for shape in problem.activations), default=0) >= MOST_NBYTES:
        raise ShapeError(
            f"activations of the shapes {problem.activations} in {problem.dtype} are too large for any memory"
        )
    messages = _messages(listed, problem)
    used = {action.kind for steps in listed for action in parts(steps)}
    pairs = sorted({step.backward.kind for steps in listed for step in steps if isinstance(step, Both)})
    own = {k: UserKernel(name, _seconds(k, seconds, stages)) for k, name in KERNELS.items() if k in used}
    both = (UserKernel(_beside(k), _seconds(BOTH, seconds, stages), (own["F"], own[k])) for k in pairs)
    kernels = (*own.values(), *both)

    def write(rank: int) -> Program:
        needed = _Writer(problem, listed[rank], rank, messages, {})
        needed.program()
        return _Writer(problem, listed[rank], rank, messages, needed.slots.most).program()

    sizes, programs = Sizes(rows=(0,) * ranks), Programs(ranks, write)
    plan = Plan(problem, name, (1,), sizes, programs, kernels=kernels, in_order=True)
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
    if not isinstance(seconds, Mapping):
        raise PlanError(f"seconds={seconds!r} must map the actions F, B, I and W to their seconds")
    if unknown := {*seconds} - {*KERNELS, BOTH}:
        raise PlanError(f"seconds has {sorted(unknown)}, but the actions are F, B, I, W and {BOTH}")
    given = seconds.get(kind)
    if given is None:
        if kind == "B" and {"I", "W"} <= {*seconds}:
            both = [_seconds(part, seconds, stages) for part in "IW"]
            count = max(map(len, both))
            return tuple(sum(part[k % len(part)] for part in both) for k in range(count))
        return ()
    found = tuple(map(number, given if isinstance(given, Sequence) and not isinstance(given, str) else [given]))
    if len(found) not in (1, stages) or any(s is None or s < 0 for s in found):
        raise PlanError(f"seconds[{kind!r}]={given!r} must be a number >= 0, or one for each of the {stages} stages")
    return found  # type: ignore[return-value]


Passed = tuple[str, int, int]
"""What actions hand to others: ("a", stage, micro-batch) is the input of a stage, "d" the gradient of its output."""


def _passes(action: Action, stages: int) -> Passed | None:
    """What the action hands on to another stage."""
    stage, kind, i = action
    if kind in "FE" and stage + 1 < stages:
        return ("a", stage + 1, i)
    return ("d", stage - 1, i) if kind in "BI" and stage else None


def _messages(orders: Orders, problem: PipelineProblem) -> dict[tuple[int, int], list[Passed]]:
    """What travels from a rank to another one, in the order in which it is made."""
    found: defaultdict[tuple[int, int], list[Passed]] = defaultdict(list)
    for rank, steps in enumerate(orders):
        for action in parts(steps):
            passed = _passes(action, problem.stages)
            if passed is not None and (dest := problem.rank_of(passed[1])) != rank:
                found[rank, dest].append(passed)
    return found


class _Writer:
    """Writes the program of one rank.

    A message is received in the order in which its source sends, and before the action that needs it. `counts` is the
    number of slots of each kind (`Slots`).
    """

    def __init__(
        self,
        problem: PipelineProblem,
        steps: Sequence[Step],
        rank: int,
        messages: Mapping[tuple[int, int], Sequence[Passed]],
        counts: Mapping[str, int],
    ):
        self.problem, self.steps, self.rank = problem, steps, rank
        self.arriving = {source: deque(sent) for (source, dest), sent in messages.items() if dest == rank}
        self.work = problem.workspace(rank, 1)
        many = {kind: count + SPARE * (kind[0] not in "sr") for kind, count in counts.items()}
        self.slots = Slots(self.work, problem.dtype, many)
        self.held: dict[Passed, Chunk] = {}
        self.begun: set[int] = set()  # the stages whose gradients have their first term
        self.ops: list[Op] = []

    def program(self) -> Program:
        for step in self.steps:
            self._write(parts([step]))
        return self.work.program(self.ops)

    def _shape(self, kind: str, stage: int) -> Shape:
        if kind in "sr":
            return (0,)
        return self.problem.activations[stage - (kind in "ae")]

    def _take(self, kind: str, stage: int, i: int) -> Chunk:
        """A free slot for this value."""
        self.held[kind, stage, i] = slot = self.slots.take(f"{kind}{stage}", self._shape(kind, stage))
        return slot

    def _drop(self, kind: str, stage: int, i: int) -> None:
        self.slots.drop(self.held.pop((kind, stage, i)))

    def _arrive(self, wanted: Passed) -> Chunk:
        """The slot of a value that another action has made. It is received first, if it comes from another rank."""
        kind, stage, _ = wanted
        source = self.problem.rank_of(stage + (1 if kind == "d" else -1))
        while wanted not in self.held:
            arrived = self.arriving[source].popleft()
            self.ops.append(Recv(source, self._take(*arrived)))
        return self.held[wanted]

    def _hand_on(self, action: Action) -> Chunk:
        """The slot for what the action hands on to a stage here or on another rank."""
        passed = _passes(action, self.problem.stages)
        assert passed is not None
        if self.problem.rank_of(passed[1]) == self.rank:
            return self._take(*passed)
        return self._take("o" if action.kind in "FE" else "e", action.stage, action.microbatch)

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
            passed = _passes(action, self.problem.stages)
            if passed is not None and (dest := self.problem.rank_of(passed[1])) != self.rank:
                self.ops.append(Send(dest, call.writes[0]))
                self._drop("o" if action.kind in "FE" else "e", action.stage, action.microbatch)
        for action in actions:
            self._drop_read(action)

    def _call(self, action: Action) -> Compute:
        """The call of an action. What it reads has arrived, and what it writes has slots."""
        stage, kind, i = action
        first, last = stage == 0, stage == self.problem.stages - 1
        reads: list[Chunk] = []
        if kind not in "FE" and not last:
            reads.append(self._arrive(("d", stage, i)))
        if not first:
            reads.append(self._arrive(("a", stage, i)))
        if kind in "BI":
            reads.append(self.held["s", stage, i])
        writes = []
        if _passes(action, self.problem.stages) is not None:
            writes.append(self._hand_on(action))
        if kind == "F":
            writes.append(self._take("s", stage, i))
        elif kind == "I":
            writes.append(self._take("r", stage, i))
        else:
            if kind == "W":
                reads.append(self.held["r", stage, i])
            sum_so_far = self.work[f"g{stage}"][:]
            if stage in self.begun:
                reads.append(sum_so_far)
            self.begun.add(stage)
            writes.append(sum_so_far)
        return Compute(KERNELS[kind], tuple(reads), tuple(writes), (stage, i))

    def _drop_read(self, action: Action) -> None:
        """The slots that the action was the last one to read."""
        stage, kind, i = action
        first, last = stage == 0, stage == self.problem.stages - 1
        if kind in "BI":
            self._drop("s", stage, i)
        if kind in "BW":
            for name in ["d"] * (not last) + ["a"] * (not first) + ["r"] * (kind == "W"):
                self._drop(name, stage, i)
        if kind == "E" and not first:
            self._drop("a", stage, i)
