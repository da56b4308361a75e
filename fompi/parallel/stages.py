"""What the plans of a pipeline and of a whole step share: slots, what stages hand on, and the writer of a program."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from fompi.base.errors import PlanError
from fompi.base.layout import Sizes, number
from fompi.parallel.actions import SCHEDULES, Action, Actions, Step, parts
from fompi.plans.plan import Chunk, Op, Plan, Program, Programs, Recv, Send, UserKernel, Workspace

SPARE = 2
"""Slots for messages beyond those that the actions need: one may arrive, and one may leave, while others are in use."""

KEPT = "sr"
"""The first letters of the kinds of slots that stay on their rank: they need no spare ones."""

Passed = tuple[str, int, int]
"""What actions hand to others: ("a", stage, micro-batch) is the input of a stage, "d" the gradient of its output."""


class Slots:
    """Buffers of a program that are used again for what travels or is kept for a while: slots, of several kinds.

    Of each kind as many as `counts` says, and `SPARE` for messages. Without an entry as many as needed, which `most`
    has afterwards.
    """

    def __init__(self, work: Workspace, dtype: str, counts: Mapping[str, int]):
        self.work, self.dtype = work, dtype
        self.most = {kind: count + SPARE * (kind[0] not in KEPT) for kind, count in counts.items()}
        self._free = {kind: deque(range(count)) for kind, count in self.most.items()}
        self._kinds: dict[str, tuple[str, int]] = {}  # of each buffer: its kind and number

    def take(self, kind: str, shape: tuple[int, ...], dtype: str | None = None) -> Chunk:
        """A free slot: the one that has been free for the longest time. Those of a kind have one dtype."""
        free = self._free.setdefault(kind, deque())
        if not free:
            number = self.most.get(kind, 0)
            self.most[kind] = number + 1
            free.append(number)
        number = free.popleft()
        buffer = self.work.scratch(f"{kind}_{number}", "whole", shape, dtype or self.dtype)
        self._kinds[buffer.name] = kind, number
        return buffer[:]

    def drop(self, chunk: Chunk) -> None:
        """The slot is free again."""
        kind, number = self._kinds[chunk.buffer]
        self._free[kind].append(number)


def passes(action: Action, stages: int) -> Passed | None:
    """What the action hands on to another stage."""
    stage, kind, i = action
    if kind in "FE" and stage + 1 < stages:
        return ("a", stage + 1, i)
    return ("d", stage - 1, i) if kind in "BI" and stage else None


class StageWriter:
    """Writes the program of one rank, which has some stages of a pipeline.

    `place` is that of the rank among those of the pipeline: `listed[place]` is what it does. What another stage hands
    on is received before it is needed, in the order in which its source sends. `counts`: how many slots there are.
    """

    def __init__(self, problem: Any, listed: Actions, place: int, work: Workspace, counts: Mapping[str, int]):
        self.problem, self.steps, self.place, self.work = problem, listed[place], place, work
        self.slots = Slots(work, problem.dtype, counts)
        self.ops: list[Op] = []
        self.held: dict[Passed, list[Chunk]] = {}
        own = {action.stage for action in parts(self.steps)}
        others = {s + step for s in own for step in (-1, 1) if 0 <= s + step < problem.stages}
        sources = {problem.rank_of(s) for s in others} - {place}
        self.arriving = {source: deque(self._sent(listed[source])) for source in sources}

    def program(self) -> Program:
        raise NotImplementedError

    def rank_at(self, place: int) -> int:
        """The rank at another place of this pipeline."""
        return place

    def slots_of(self, passed: Passed) -> list[Chunk]:
        """Free slots for what another rank hands on."""
        raise NotImplementedError

    def drop(self, *chunks: Chunk) -> None:
        """These slots are free again."""
        for chunk in chunks:
            self.slots.drop(chunk)

    def _sent(self, steps: Sequence[Step]) -> list[Passed]:
        """What a rank with these steps hands on to this one, in the order in which it is made."""
        passed = [passes(action, self.problem.stages) for action in parts(steps)]
        return [each for each in passed if each is not None and self.problem.rank_of(each[1]) == self.place]

    def arrive(self, wanted: Passed) -> list[Chunk]:
        """The slots of what another stage has handed on. It is received first, if it comes from another rank."""
        kind, stage, _ = wanted
        source = self.problem.rank_of(stage + (1 if kind == "d" else -1))
        while wanted not in self.held:
            came = self.arriving[source].popleft()
            self.held[came] = self.slots_of(came)
            self.ops += [Recv(self.rank_at(source), slot) for slot in self.held[came]]
        return self.held[wanted]

    def hand_on(self, action: Action, made: list[Chunk]) -> None:
        """What the action has made for another stage goes there, here or on another rank."""
        passed = passes(action, self.problem.stages)
        if passed is None:
            return
        dest = self.problem.rank_of(passed[1])
        if dest == self.place:
            self.held[passed] = made
        else:
            self.ops += [Send(self.rank_at(dest), slot) for slot in made]
            self.drop(*made)


def name_of(schedule: object) -> str:
    """The name of a plan whose actions are those of `schedule`."""
    return schedule if isinstance(schedule, str) and schedule in SCHEDULES else "own actions"


def plan_of(
    problem: Any, name: str, kernels: tuple[UserKernel, ...], writer: Callable[[int, Mapping[str, int]], StageWriter]
) -> Plan:
    """The plan whose programs `writer(rank, counts)` writes: twice, because the first time tells how many slots."""

    def write(rank: int) -> Program:
        needed = writer(rank, {})
        needed.program()
        return writer(rank, needed.slots.most).program()

    size = problem.size
    sizes = Sizes(rows=(0,) * size)
    return Plan(problem, name, (1,), sizes, Programs(size, write), kernels=kernels, in_order=True)


def seconds_of(
    seconds: Mapping[str, float | Sequence[float]], kind: str, known: Collection[str], count: int, what: str
) -> tuple[float, ...]:
    """The seconds of a kind of work: one number, or one for each of the `count` stages or layers (`what`).

    Empty: they are not known. `known` are the kinds that there are. Raises PlanError.
    """
    if not isinstance(seconds, Mapping) or not {*seconds} <= {*known}:
        raise PlanError(f"seconds={seconds!r} must map {', '.join(known)} to their seconds")
    given = seconds.get(kind)
    if given is None:
        return ()
    found = tuple(map(number, given if isinstance(given, Sequence) and not isinstance(given, str) else [given]))
    if len(found) not in (1, count) or any(s is None or s < 0 for s in found):
        raise PlanError(f"seconds[{kind!r}]={given!r} must be a number >= 0, or one for each of the {count} {what}")
    return found  # type: ignore[return-value]
