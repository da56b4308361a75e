"""The actions of a pipeline: which micro-batch a rank works on when. Pure Python, no arrays and no MPI.

    actions("1f1b", ranks=2, microbatches=2)[0]      # [0F0, 0F1, 0B0, 0B1]

An action is a stage, a kind and a micro-batch. The kinds are those of PyTorch:

| kind | what it does                                                         |
|------|----------------------------------------------------------------------|
| F    | forward                                                              |
| B    | backward: the gradients of the input and of the parameters           |
| I    | the first part of a backward: the gradient of the input              |
| W    | the second part of a backward: the gradients of the parameters       |

A forward and the backward of another micro-batch may be one action, `Both`: messages of one travel behind the other.

Rank r has the stages r, r + ranks, r + 2 ranks, ... (`chunks` of them). In a V it has r and 2 ranks - 1 - r, so that
the first and the last stage are on one rank (`fompi.model.pipeline.PLACEMENTS`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from reprlib import repr as shown
from typing import Any, NamedTuple

from fompi.base.errors import LayoutError, PlanError, quoted
from fompi.base.file_checks import decoded, read
from fompi.base.layout import integer
from fompi.model.pipeline import SCHEDULES as SCHEDULES
from fompi.model.pipeline import has_chunks, placement_of, rank_of, stages_of

KINDS = "FBIW"

_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
BOTH = "OVERLAP_F_B"
"""The kind of a forward and a backward side by side, as PyTorch calls it."""

_BOTH = re.compile(rf"\(([^();]+);([^();]+)\){BOTH}")

_LEFT_OUT = re.compile(r"\d*(SEND|RECV)_[FB]\d*|\d*(UNSHARD|RESHARD|REDUCE_GRAD)\d*")
"""What PyTorch's files list besides the actions: messages, which follow from the actions, and the shards of FSDP."""


class Action(NamedTuple):
    """What a rank does at one step: a kind of work for one stage and one micro-batch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Both(NamedTuple):
    """A forward and a backward (B or I) side by side. It begins when both can, and ends when both have ended."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward}){BOTH}"


Step = Action | Both

Actions = list[list[Step]]
"""For each rank its actions, in their order."""


def parts(steps: Iterable[Step]) -> list[Action]:
    """The actions, those of `Both` one by one."""
    return [action for step in steps for action in (step if isinstance(step, Both) else (step,))]


def actions(
    schedule: str | Sequence[Sequence[Step | str]],
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    overlap_f_b: bool = False,
) -> Actions:
    """For each rank its actions: actions("1f1b", 2, 1) == [[0F0, 0B0], [1F0, 1B0]]

    With `overlap_f_b` a forward and the backward of another micro-batch that follows it are one action. Of `SCHEDULES`
    eager-1f1b, interleaved and dualpipev leave room for it; the first two do one more forward ahead then, as Megatron.

    `schedule` is one of `SCHEDULES`, or actions of your own: these or their texts for each rank, a CSV file of
    PyTorch (one line per rank): open, its text, or its path if that ends with .csv. Whether its stages lie in a loop or
    in a V is seen from the actions. Raises PlanError, with the rank and the action, if they deadlock or if one
    is missing.
    """
    for name, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if (integer(value) or 0) < 1:
            raise PlanError(f"{name}={value!r} must be an integer >= 1")
    if isinstance(schedule, str) and schedule in SCHEDULES:
        if not has_chunks(schedule, chunks):
            held = "two stages" if placement_of(schedule) == "v" else "one stage"
            other = "interleaved" if chunks > 1 else "zb-h1"
            raise PlanError(f"{schedule} has {held} per rank; for {chunks} per rank take {other!r}")
        if overlap_f_b and schedule not in _OVERLAPPING:
            raise PlanError(f"overlap_f_b is for {', '.join(_OVERLAPPING)}: {schedule} leaves no room for it")
        form = ranks, microbatches, chunks
        if overlap_f_b:
            apart = [schedule == "dualpipev" and rank == ranks - 1 for rank in range(ranks)]
            listed = [[*_side_by_side(_OVERLAPPING[schedule], apart[rank], rank, *form)] for rank in range(ranks)]
        else:
            listed = [[*_ACTIONS[schedule](rank, *form)] for rank in range(ranks)]
    elif overlap_f_b:
        raise PlanError("actions of your own list what runs side by side: '(0F1;1B0)OVERLAP_F_B'")
    else:
        listed = _own(schedule)
    check(listed, ranks, microbatches, chunks)
    return listed


def placement_in(listed: Sequence[Sequence[Step]], chunks: int) -> str:
    """Where the stages of these actions lie: "v" if they are there and not in a loop, else "loop"."""
    ranks = len(listed)
    every = [{action.stage for action in parts(steps)} for steps in listed]
    if sum(map(len, every)) < ranks * chunks:  # some are missing, maybe very many
        return "loop"
    in_v = [{*stages_of(rank, ranks, chunks, "v")} for rank in range(ranks)]
    return "v" if every == in_v and ranks > 1 and chunks > 1 else "loop"


# ------------------------------------------------------------------------------------------------ the known ones


def _gpipe(r: int, p: int, m: int, v: int) -> list[Action]:
    return [Action(r, kind, i) for kind in "FB" for i in range(m)]


def _alternating(forwards: list[Action], first: int, backwards: Iterable[list[Action]]) -> list[Action]:
    """The `first` forwards, then one forward and what comes after it alternately. At the end there are no forwards."""
    actions = forwards[:first]
    for i, behind in enumerate(backwards, first):
        actions += [*forwards[i : i + 1], *behind]
    return actions


def _one_forward_one_backward(r: int, p: int, m: int, v: int, ahead: int = 1, more: int = 0) -> list[Action]:
    """Each rank does `ahead` times the forwards that the stages behind it need, then one backward after each one."""
    first, forwards = min(m, ahead * (p - 1 - r) + more), [Action(r, "F", i) for i in range(m)]
    return _alternating(forwards, first, ([Action(r, "B", i)] for i in range(m)))


def _zero_bubble(r: int, p: int, m: int, v: int, ahead: int = 1) -> list[Action]:
    """As 1F1B, but the gradients of parameters come `ahead * r` micro-batches later, and fill the bubble at the end."""
    first, late = min(m, ahead * (p - 1 - r)), ahead * r
    forwards, weights = ([Action(r, kind, i) for i in range(m)] for kind in "FW")
    backwards = [[Action(r, "I", i), *([weights[i - late]] if i >= late else [])] for i in range(m)]
    return _alternating(forwards, first, backwards) + weights[max(0, m - late) :]


def _interleaved(r: int, p: int, m: int, v: int, more: int = 0) -> list[Action]:
    """The micro-batches in groups of p. A rank does a group at its first stage, then at its second stage, and so on.

    The backwards visit the stages in the opposite order. The last group may be smaller: its missing micro-batches are
    left out of the actions of full groups, which cannot make them deadlock.
    """
    groups = [range(start, start + p) for start in range(0, m, p)]
    forwards = [Action(c * p + r, "F", i) for group in groups for c in range(v) for i in group]
    backwards = [[Action(c * p + r, "B", i)] for group in groups for c in reversed(range(v)) for i in group]
    actions = _alternating(forwards, min(len(forwards), 2 * (p - 1 - r) + (v - 1) * p + more), backwards)
    return [action for action in actions if action.microbatch < m]


class _Counted:
    """The actions of a rank with two stages, written by their kinds: "F0" is the next forward of its first stage."""

    def __init__(self, rank: int, ranks: int):
        self.stages, self.actions = (rank, 2 * ranks - 1 - rank), list[Action]()
        self.done: dict[str, int] = {}  # of each kind: how many

    def add(self, words: str, times: int = 1) -> None:
        for word in times * words.split():
            number = self.done.get(word, 0)
            self.actions.append(Action(self.stages[int(word[1])], word[0], number))
            self.done[word] = number + 1
            if word[0] == "B":  # both parts
                self.done[f"I{word[1]}"] = self.done[f"W{word[1]}"] = number + 1
            elif word[0] == "I":
                self.done[f"B{word[1]}"] = number + 1

    def add_weights(self) -> None:
        """The gradients of parameters that are left, in the order of their inputs."""
        waiting = [a for a in self.actions if a.kind == "I"]
        there = {(a.stage, a.microbatch) for a in self.actions if a.kind == "W"}
        self.actions += [a._replace(kind="W") for a in waiting if (a.stage, a.microbatch) not in there]

    def kept(self, microbatches: int) -> list[Action]:
        """Without the micro-batches that are not there: the others cannot deadlock."""
        return [action for action in self.actions if action.microbatch < microbatches]


def _zero_bubble_v(r: int, p: int, m: int, v: int) -> list[Action]:
    """Forwards go down and up the V; then F, I and W of both stages alternately; the last W fill the end."""
    n, made = max(m, 2 * p - 1), _Counted(r, p)
    made.add("F0", 2 * (p - r) - 1)
    made.add("F1 F0", r)
    made.add("F1 I1 W1", p - r)
    left = n - made.done["F0"]
    made.add("F0 I0 W0 F1 I1 W1", left)
    made.add("I0 W0 F1 I1 W1", n - made.done["F1"])
    made.add("I0 I1", r)
    made.add("I0 W0", p - r)
    for word in ("W1", "W0"):
        made.add(word, n - made.done[word])
    return made.kept(m)


def _dual_pipe_v(r: int, p: int, m: int, v: int) -> list[Action]:
    """A forward of one stage with a backward of the other: F0 B1, then F1 B0. W fill the begin and the end."""
    n, made = max(m, 2 * p), _Counted(r, p)
    made.add("F0", 2 * (p - r - 1))
    made.add("F0 F1", r + 1)
    made.add("I1 W1 F1", p - r - 1)
    made.add("F0 B1 F1 B0", n - 2 * p + r + 1)
    made.add("B1 F1 B0", p - r - 1)
    whole = r + 1  # backwards of both parts among the last 2 (r + 1)
    ends = ["B1", "B0"] * (r + 1)
    made.add(" ".join(word if i < whole else f"I{word[1]}" for i, word in enumerate(ends)))
    waiting = [a for a in made.actions if a.kind == "I" and a._replace(kind="W") not in made.actions]
    for _ in range(p - r - 1):
        if waiting:
            made.actions.append(waiting.pop(0)._replace(kind="W"))
        made.add("I0")
        waiting.append(made.actions[-1])
    made.add_weights()
    return made.kept(m)


_ACTIONS: dict[str, Callable[..., list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "eager-1f1b": partial(_one_forward_one_backward, ahead=2),
    "interleaved": _interleaved,
    "zb-h1": _zero_bubble,
    "zb-h2": partial(_zero_bubble, ahead=2),
    "zbv": _zero_bubble_v,
    "dualpipev": _dual_pipe_v,
}
_OVERLAPPING: dict[str, Callable[..., list[Action]]] = {
    "eager-1f1b": partial(_one_forward_one_backward, ahead=2, more=1),
    "interleaved": partial(_interleaved, more=1),
    "dualpipev": _dual_pipe_v,
}
"""Those with `overlap_f_b`."""


def _side_by_side(write: Callable[..., list[Action]], apart: bool, r: int, p: int, m: int, v: int) -> Iterator[Step]:
    """Each forward and the B of another micro-batch that follows it become one action; if `apart`, not the first ones.

    The actions are written for enough micro-batches that no pair is cut short; those that are not there are left out.
    """
    n = max(m, 2 * p)
    before: Action | None = None
    for action in [*write(r, p, n, v), None]:
        joins = before and action and before.kind + action.kind == "FB" and before.microbatch != action.microbatch
        joins, apart = joins and not apart, apart and not joins
        there = [a for a in (before, action if joins else None) if a is not None and a.microbatch < m]
        if there:
            yield Both(*there) if len(there) == 2 else there[0]
        before = None if joins else action


# ------------------------------------------------------------------------------------------------ those of users


def _own(schedule: object) -> Actions:
    """The actions that a user gives."""
    if hasattr(schedule, "read"):
        schedule = schedule.read()
    if isinstance(schedule, str):
        if schedule.endswith(".csv") and "\n" not in schedule:
            try:
                schedule = decoded(read(Path(schedule)))
            except (OSError, LayoutError) as error:
                raise PlanError(f"the actions {schedule!r} cannot be read: {error}") from error
        elif not _ACTION.search(schedule):
            raise PlanError(
                f"unknown schedule {quoted(schedule, SCHEDULES)}; known: {', '.join(SCHEDULES)}, or actions of your own"
            )
        schedule = [line.split(",") for line in schedule.strip().splitlines()]
    listed: list[Any] = [*schedule] if isinstance(schedule, Iterable) else [None]
    if any(isinstance(actions, str) or not isinstance(actions, Iterable) for actions in listed):
        raise PlanError(f"actions are a list for each rank, such as [['0F0', '0B0']], not {schedule!r}")
    return [[*read_actions(rank, actions)] for rank, actions in enumerate(listed)]


def read_actions(rank: int, actions: Iterable[object]) -> Iterable[Step]:
    """The actions of a rank, given as they are or as texts. Raises PlanError for another text."""
    for number, given in enumerate(actions):
        if isinstance(given, Step):
            yield given
            continue
        text = "" if given is None else str(given).strip().strip('"')
        both = _BOTH.fullmatch(text)
        if both is not None:
            steps = [*read_actions(rank, both.groups())]
            if len(steps) != 2:  # one of them is left out
                raise PlanError(f"rank {rank}: {text!r} is not two actions", rank, number, text)
            yield Both(*parts(steps))
            continue
        if not text or _LEFT_OUT.fullmatch(text):  # PyTorch writes an empty cell for a step without an action
            continue
        found = _ACTION.fullmatch(text)
        if found is None:
            raise PlanError(f"rank {rank}: {shown(text)} is not an action, such as 2F0", rank, number, text)
        yield Action(int(found[1]), found[2], int(found[3]))


# --------------------------------------------------------------------------------------------- are they right


def check(listed: Sequence[Sequence[Step]], ranks: int, microbatches: int, chunks: int = 1) -> None:
    """Raise PlanError if the actions deadlock, or if they are not exactly the work of these micro-batches."""
    if len(listed) != ranks:
        raise PlanError(f"there are actions for {len(listed)} ranks, but there are {ranks}")
    stages, where = ranks * chunks, placement_in(listed, chunks)
    for rank, steps in enumerate(listed):
        seen: set[Action] = set()
        for step in steps:
            if isinstance(step, Both) and (step.forward.kind != "F" or step.backward.kind not in ("B", "I")):
                raise PlanError(f"rank {rank}: {step} is not a forward and a backward", rank, None, str(step))
        for number, action in enumerate(parts(steps)):
            stage, kind, i = action
            why = ""
            if kind not in KINDS or not (0 <= stage < stages and 0 <= i < microbatches):
                why = f"there are {stages} stages, {microbatches} micro-batches, and the kinds F, B, I and W"
            elif rank_of(stage, ranks, where) != rank:
                why = f"stage {stage} belongs to rank {rank_of(stage, ranks, where)}"
            elif action in seen:
                why = "it is there twice"
            elif (kind == "B" and seen & {Action(stage, "I", i), Action(stage, "W", i)}) or (
                kind in "IW" and Action(stage, "B", i) in seen
            ):
                why = "B is I and W together: a micro-batch has B, or I and W"
            if why:
                raise PlanError(f"rank {rank}, action {number}, {action}: {why}", rank, number, str(action))
            seen.add(action)
        # Of a file there may be very many stages. The first one that is missing ends this.
        for stage in range(rank, stages, ranks) if where == "loop" else stages_of(rank, ranks, chunks, where):
            for i in range(microbatches):
                split = Action(stage, "I", i) in seen or Action(stage, "W", i) in seen
                for kind in "FIW" if split else "FB":
                    if Action(stage, kind, i) not in seen:
                        missing = Action(stage, kind, i)
                        raise PlanError(f"rank {rank}: {missing} is missing", rank, None, str(missing))
    times(listed)


def needs(action: Action, stages: int) -> list[tuple[int, str, int]]:
    """What must be there before the action: the output "y" of a stage, the gradient "d" of its input, or "i" for W."""
    stage, kind, i = action
    if kind == "F":
        return [(stage - 1, "y", i)] if stage else []
    if kind == "W":
        return [(stage, "i", i)]
    return [(stage, "y", i), *([(stage + 1, "d", i)] if stage + 1 < stages else [])]


def gives(action: Action) -> list[tuple[int, str, int]]:
    """What the action makes, by the names of `needs`."""
    stage, kind, i = action
    return {"F": [(stage, "y", i)], "B": [(stage, "d", i)], "I": [(stage, "d", i), (stage, "i", i)], "W": []}[kind]


# ------------------------------------------------------------------------------------------------ the time it takes


class ActionTimes(NamedTuple):
    """When each action begins and ends, in seconds.

    `begins` and `ends` start at 0, when the first action of the pipeline begins.
    """

    begins: dict[Action, float]
    ends: dict[Action, float]

    def span(self, steps: Sequence[Step]) -> float:
        """The seconds from the begin of the first to the end of the last of these actions: those of one rank."""
        actions = parts(steps)
        return self.ends[actions[-1]] - self.begins[actions[0]] if actions else 0.0


def times(
    listed: Sequence[Sequence[Step]], seconds: Mapping[str, float] | None = None, message: float = 0.0
) -> ActionTimes:
    """The event walk: every rank does its actions in order, each as soon as what it needs is there.

    `seconds` are those of F, B, I and W (by default 1, 2, 1 and 1). Two side by side take as long as both, or those of
    "OVERLAP_F_B". A message to another rank takes `message` seconds, while actions go on. Any number of them may move
    at once. Raises PlanError for actions that deadlock.
    """
    seconds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, **(seconds or {})}
    ranks, stages = len(listed), 1 + max((a.stage for steps in listed for a in parts(steps)), default=0)
    owner = _owners(listed)
    made: dict[tuple[int, str, int], float] = {}
    found = ActionTimes({}, {})
    at, now, waiting, moved = [0] * ranks, [0.0] * ranks, set(range(ranks)), True
    while moved:
        moved = False
        for rank in sorted(waiting):
            while at[rank] < len(listed[rank]):
                actions = parts([listed[rank][at[rank]]])
                wanted = [each for action in actions for each in needs(action, stages)]
                if not all(each in made for each in wanted):
                    break
                arrivals = (made[n] + (message if owner[n[0]] != rank else 0.0) for n in wanted)
                begun, takes = max([now[rank], *arrivals]), sum(seconds[action.kind] for action in actions)
                now[rank] = begun + (takes if len(actions) == 1 else seconds.get(BOTH, takes))
                for action in actions:
                    found.begins[action], found.ends[action] = begun, now[rank]
                    made.update((each, now[rank]) for each in gives(action))
                at[rank] += 1
                moved = True
            else:
                waiting.discard(rank)
    if waiting:
        rank = min(waiting)
        raise _deadlock(listed, at, made, rank, stages)
    return found


def _owners(listed: Sequence[Sequence[Step]]) -> dict[int, int]:
    """The rank of each stage."""
    return {action.stage: rank for rank, steps in enumerate(listed) for action in parts(steps)}


def _deadlock(
    listed: Sequence[Sequence[Step]],
    at: Sequence[int],
    made: Mapping[tuple[int, str, int], float],
    rank: int,
    stages: int,
) -> PlanError:
    """The error of actions in which `rank` waits for ever: whom it waits for, until a rank comes twice."""
    first, words, seen, owner = rank, [], set(), _owners(listed)
    while rank not in seen and at[rank] < len(listed[rank]):
        seen.add(rank)
        step = listed[rank][at[rank]]
        missing = next(each for action in parts([step]) for each in needs(action, stages) if each not in made)
        what = {"y": "the forward", "d": "the backward", "i": "the I"}[missing[1]]
        other = owner[missing[0]]
        words.append(f"{step} of rank {rank} waits for {what} of micro-batch {missing[2]} at stage {missing[0]}")
        if other == rank:
            words[-1] += ", which comes later on the same rank" if type(step) is Action else ", on the same rank"
            break
        rank = other
    stuck = listed[first][at[first]]
    return PlanError(f"the actions deadlock: {'; '.join(words)}", first, at[first], str(stuck))


def alive(steps: Sequence[Step]) -> tuple[int, int]:
    """The most micro-batches of a rank that are between F and its B or I, and the most between I and W."""
    activations = pending = most = most_pending = 0
    for _, kind, _ in parts(steps):
        activations += (kind == "F") - (kind in "BI")
        most = max(most, activations + (kind in "BI"))  # they are in use until the action is over
        pending += kind == "I"
        most_pending = max(most_pending, pending)
        pending -= kind == "W"
    return most, most_pending
