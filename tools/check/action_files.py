"""The CSV files of `torch.distributed.pipelining`: one line for each rank, and what is proven of them.

    0F0,0SEND_F0,0F1,...          a line: actions (`fompi.parallel.actions`), and if the file has them, messages
    1RECV_F0,1F0,1B0,1SEND_B0     3SEND_F0: stage 3 sends its output of micro-batch 0; 4RECV_F0: stage 4 takes it
    2UNSHARD,2F0,2RESHARD         the parameters of a stage are gathered, and given up (FSDP)

A right file has exactly the work of its micro-batches, and no rank waits for ever. Where it lists messages, each value
that another rank needs is sent once, after it was computed, and taken once, before it is used; and two ranks send in
the order in which they take: PyTorch's messages have no tags. Where it lists shards, a stage has its parameters when it
computes. A cell that is none of these is an error, not a guess.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from reprlib import repr as shown
from typing import NamedTuple

from fompi.base.errors import PlanError
from fompi.parallel.actions import Action, Step, alive, check, needs, parts, read_actions, times

_CELL = re.compile(r"(\d{1,9})(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)(\d{0,9})")

MOST_RANKS, MOST_CELLS = 1 << 12, 1 << 20
"""Of a file: its proof walks over all ranks again and again."""


class Beside(NamedTuple):
    """What a file lists besides the actions: a message, or what happens to the parameters of a stage."""

    stage: int
    verb: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.verb}{self.microbatch if self.microbatch >= 0 else ''}"


Cell = Step | Beside


class FileVerdict(NamedTuple):
    """`reasons` say what is wrong: empty if the file is right. `span` is in units: F, I and W take 1, B takes 2."""

    reasons: tuple[str, ...]
    ranks: int
    stages: int
    microbatches: int
    messages: int
    span: float = 0.0
    idle: float = 0.0
    alive: int = 0
    rows: tuple[tuple[str, ...], ...] = ()

    @property
    def is_right(self) -> bool:
        return not self.reasons


def lists_actions(text: str) -> bool:
    """True if the text looks like such a file."""
    return re.match(r'\s*"?,*\(?\d+(F|B|I|W|SEND|RECV|UNSHARD|RESHARD|REDUCE)', text) is not None


def judge(text: str) -> FileVerdict:
    """What is proven of a file. Raises PlanError for a cell that is not known."""
    lines = text.strip().splitlines()
    if len(lines) > MOST_RANKS or text.count(",") > MOST_CELLS:
        raise PlanError(f"it has more than {MOST_RANKS} ranks or {MOST_CELLS} cells: too many to be proven")
    rows = [[*_cells(rank, line)] for rank, line in enumerate(lines)]
    steps: list[list[Step]] = [[cell for cell in row if not isinstance(cell, Beside)] for row in rows]
    actions = [action for row in steps for action in parts(row)]
    ranks, stages = len(rows), 1 + max((a.stage for a in actions), default=-1)
    microbatches = 1 + max((a.microbatch for a in actions), default=-1)
    messages = sum(isinstance(cell, Beside) and "SEND" in cell.verb for row in rows for cell in row)
    form = ranks, stages, microbatches, messages
    if not actions or stages % ranks:
        return FileVerdict((f"{stages} stages cannot be divided among {ranks} ranks",), *form)
    try:
        check(steps, ranks, microbatches, stages // ranks)
    except PlanError as error:
        return FileVerdict((str(error),), *form)
    reasons = tuple([*_messages(rows), *_shards(rows)][:5])
    if reasons:
        return FileVerdict(reasons, *form)
    ends = times(steps)
    span = max(ends.ends.values())
    work = sum({"F": 1.0, "B": 2.0}.get(a.kind, 1.0) for a in actions)
    held = max(alive(row)[0] for row in steps)
    texts = tuple(tuple(map(str, row)) for row in steps)
    return FileVerdict((), *form, span, 1 - work / (ranks * span), held, texts)


def _cells(rank: int, line: str) -> Iterator[Cell]:
    for number, given in enumerate(line.split(",")):
        text = given.strip().strip('"')
        found = _CELL.fullmatch(text)
        if found is not None:
            yield Beside(int(found[1]), found[2], int(found[3] or -1))
        elif text:
            steps = list[Step]()
            with suppress(PlanError):
                steps = [*read_actions(rank, [text])]
            if not steps:
                raise PlanError(f"line {rank + 1}, cell {number + 1}: {shown(text)} is not known")
            yield from steps


class Value(NamedTuple):
    """A value that an action needs of another rank: the output of a stage ("F"), or the gradient of its input ("B")."""

    kind: str
    stage: int
    microbatch: int
    maker: Action
    user: Action

    @property
    def send(self) -> Beside:
        return Beside(self.stage, f"SEND_{self.kind}", self.microbatch)

    @property
    def recv(self) -> Beside:
        return Beside(self.user.stage, f"RECV_{self.kind}", self.microbatch)


class _File:
    """Where everything is in a file: (rank, number of the cell)."""

    def __init__(self, rows: Sequence[Sequence[Cell]]):
        self.rows = rows
        self.actions: dict[Action, tuple[int, int]] = {}
        self.messages: defaultdict[Beside, list[tuple[int, int]]] = defaultdict(list)
        for rank, row in enumerate(rows):
            for at, cell in enumerate(row):
                if not isinstance(cell, Beside):
                    self.actions |= dict.fromkeys(parts([cell]), (rank, at))
                elif cell.verb[:4] in ("SEND", "RECV"):
                    self.messages[cell].append((rank, at))
        self.owner = {action.stage: rank for action, (rank, _) in self.actions.items()}
        self.values = [*self._values()]
        self.users: defaultdict[Action, list[Value]] = defaultdict(list)
        for value in self.values:
            self.users[value.user].append(value)

    def _values(self) -> Iterator[Value]:
        makers = {("F" if a.kind == "F" else "B", a.stage, a.microbatch): a for a in self.actions if a.kind != "W"}
        for user, (rank, _) in self.actions.items():
            for stage, what, i in needs(user, len(self.owner)):
                kind = "F" if what == "y" else "B"
                if self.owner[stage] != rank:
                    yield Value(kind, stage, i, makers[kind, stage, i], user)

    def pair(self, message: Beside) -> tuple[int, int]:
        """(source, dest) of a message, as ranks. -1: there is no such stage."""
        forth = (message.verb[:4] == "SEND") == (message.verb[-1] == "F")
        here, other = self.owner.get(message.stage, -1), self.owner.get(message.stage + (1 if forth else -1), -1)
        return (here, other) if message.verb[:4] == "SEND" else (other, here)


def _messages(rows: Sequence[Sequence[Cell]]) -> Iterator[str]:
    """What is wrong with the messages, if the file has any."""
    file = _File(rows)
    if not file.messages:
        return
    reasons = [reason for value in file.values for reason in _ends(file, value)]
    needed = {message for value in file.values for message in (value.send, value.recv)}
    reasons += [f"rank {places[0][0]}: nobody needs {m}" for m, places in file.messages.items() if m not in needed]
    yield from reasons
    if not reasons:
        yield from _queues(file)
        yield from _walk(file)


def _ends(file: _File, value: Value) -> Iterator[str]:
    """What is wrong with the message of a value."""
    (source, made), (dest, used) = file.actions[value.maker], file.actions[value.user]
    for message, rank in ((value.send, source), (value.recv, dest)):
        places = file.messages.get(message, [])
        if len(places) != 1:
            count = "missing" if not places else "there more than once"
            yield f"rank {rank}: {message} is {count}, but rank {dest} needs it for {value.user}"
        elif places[0][0] != rank:
            yield f"rank {places[0][0]}: {message} belongs to rank {rank}"
        elif message.verb.startswith("SEND") and places[0][1] < made:
            yield f"rank {rank}: {message} comes before {value.maker}, which makes what it sends"
        elif message.verb.startswith("RECV") and places[0][1] > used:
            yield f"rank {rank}: {message} comes after {value.user}, which uses what it takes"


def _queues(file: _File) -> Iterator[str]:
    """Two ranks that send in another order than they take: messages have no tags."""
    taken = {value.send: value.recv for value in file.values}
    sends, recvs = (
        sorted((m for m in file.messages if m.verb.startswith(verb)), key=lambda m: file.messages[m][0])
        for verb in ("SEND", "RECV")
    )
    queues: defaultdict[tuple[int, int], tuple[list[Beside], list[Beside]]] = defaultdict(lambda: ([], []))
    for at, each in enumerate((sends, recvs)):
        for message in each:
            queues[file.pair(message)][at].append(message)
    for pair in sorted(queues):
        for out, into in zip(*queues[pair], strict=True):
            if taken[out] != into:
                yield f"rank {pair[0]} sends {out} to rank {pair[1]} when that takes {into}: messages have no tags"
                break


def _walk(file: _File) -> Iterator[str]:
    """Ranks that wait for ever: an action waits until what it needs was sent."""
    at, sent, moved = [0] * len(file.rows), set[Beside](), True
    while moved:
        moved = False
        for rank, row in enumerate(file.rows):
            while at[rank] < len(row):
                cell = row[at[rank]]
                actions = [] if isinstance(cell, Beside) else parts([cell])
                if any(value.send not in sent for action in actions for value in file.users.get(action, [])):
                    break
                if isinstance(cell, Beside):
                    sent.add(cell)
                at[rank] += 1
                moved = True
    stuck = [f"rank {r} waits in {row[at[r]]}" for r, row in enumerate(file.rows) if at[r] < len(row)]
    if stuck:
        yield f"it never ends: {'; '.join(stuck)}, for messages that are sent later"


def _shards(rows: Sequence[Sequence[Cell]]) -> Iterator[str]:
    """A stage that computes without its parameters, if the file says when they are gathered."""
    if not any("UNSHARD" in str(cell) for row in rows for cell in row):
        return
    for rank, row in enumerate(rows):
        here: set[int] = set()
        for cell in row:
            if isinstance(cell, Beside):
                if cell.verb == "UNSHARD":
                    here.add(cell.stage)
                elif cell.verb == "RESHARD":
                    here.discard(cell.stage)
            else:
                for action in parts([cell]):
                    if action.stage not in here:
                        yield f"rank {rank}: {action} comes while the parameters of stage {action.stage} are not there"
