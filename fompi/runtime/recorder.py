"""FOMPI_RECORD: the calls and the steps of this process, for `fompi replay` and `fompi advise`.

A call costs some microseconds: its times are those that the engine has anyway, and what it is was worked out at the
first call of its kind. The file is written when the program ends (`fompi.traces.record`).
"""

from __future__ import annotations

import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from math import nan
from time import perf_counter
from typing import Any

import numpy as np

from fompi.base.layout import Extents, nbytes
from fompi.base.log import log
from fompi.engine.communicator import Communicator
from fompi.runtime.compiled import COMPUTE
from fompi.runtime.digest import Notes
from fompi.runtime.program import Run
from fompi.traces.record import CALL, MOST_CALLS, STEP, CallKind, RankRecord

MOST_OPEN = 1024
"""Of this many finished calls, the newest, it is noted when the program begins to wait for them."""

BEGIN, BACK, WAIT, END = 3, 4, 5, 6
"""The places of the times in a call."""


class Recorder(Notes):
    """The record of this process. Thread-safe: the engine is locked when it notes a call."""

    def __init__(self, folder: str):
        super().__init__(folder)
        self.kinds: dict[CallKind, int] = {}
        self.known: dict[Hashable, tuple[int, list[int]]] = {}  # the number of a kind, and its ops that are products
        self.calls: deque[list[Any]] = deque(maxlen=MOST_CALLS)
        self.numbers: Counter[Hashable] = Counter()  # of steps, messages and calls of the library, on each channel
        self.open: dict[tuple[Any, int], list[Any]] = {}  # finished calls for which nobody has waited yet
        self.asked: dict[tuple[Any, int], float] = {}  # when the program began to wait for calls that are in flight
        self.watched: type | None = None

    def note(self, run: Run, _: object, extents: Extents, *given: Any, outputs: object) -> None:
        """A call has finished on this rank."""
        if run.error is not None:
            return
        key, ranks = (run.comm, run.compiled, extents), run.comm.link.world_ranks
        kind, products = self.known.get(key) or self._kind(key, run, extents)
        begun, _, last = run.agreed or (run.started, 0.0, None)
        inside = sum([run.ended[i] - run.begun[i] for i in products])
        *_, returned_at = given
        times = begun, begun if returned_at is None else returned_at, nan, run.moved_at
        self._add(run.comm, run.stamp, [kind, -1 if last is None else ranks[last], run.stamp, *times, inside])

    def note_message(self, comm: Communicator, message: Any) -> None:
        """A message is through."""
        word, ends = "send", (comm.rank, message.peer)
        if message.verb == "send":  # the peer does
            word, ends = "recv", ends[::-1]
        group = tuple(comm.link.world_ranks[end] for end in ends)
        kind, begun = CallKind(word, word, f"{_label(comm)}, tag {message.tag}", group, message.nbytes), message.begun
        self._add_kind(comm, message.stamp, kind, (begun, message.returned_at or begun, nan, message.ended))

    def watch_library(self, comm: type, names: Mapping[str, str]) -> None:
        """From now on the collectives of `fompi.mpi.Comm` are noted if the MPI library carries them out."""
        for name, moves in names.items() if self.watched is None else ():
            for word in (name, f"I{name.lower()}"):
                setattr(comm, word, self._timed(word, moves, getattr(comm, word)))
        self.watched = comm

    def _timed(self, word: str, moves: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(comm: Any, *args: Any, **options: Any) -> Any:
            own = comm.communicator
            begun, before = perf_counter(), own.channel.in_library[0]
            made = method(comm, *args, **options)
            if own.channel.in_library[0] != before:
                arrays = [arg[0] if isinstance(arg, list) else arg for arg in (*args, *options.values())]
                moved = max([int(getattr(array, "nbytes", 0)) for array in arrays], default=0)
                kind = CallKind(word, moves, f"{_label(own)} of MPI", tuple(own.link.world_ranks), moved)
                self._add_kind(own, 0, kind, (begun, begun, nan, perf_counter()))
            return made

        return call

    def awaited(self, comm: Communicator, stamp: int) -> None:
        """The program waits for this call, or message, from now on."""
        row = self.open.pop((comm, stamp), None)
        if row is None:
            self.asked.setdefault((comm, stamp), perf_counter())
        else:
            row[WAIT] = perf_counter()
            row[BACK] = row[BACK] if row[BACK] > row[BEGIN] else row[END]  # it was over before `start` returned

    def _add(self, comm: Communicator, stamp: int, row: list[Any]) -> None:
        row[WAIT] = self.asked.pop((comm, stamp), nan)
        if row[WAIT] != row[WAIT]:
            self.open[comm, stamp] = row
            if len(self.open) > MOST_OPEN:
                del self.open[next(iter(self.open))]
        self.calls.append(row)

    def _add_kind(self, comm: Communicator, stamp: int, kind: CallKind, times: tuple[float, ...]) -> None:
        """Add a call that has no plan: a message, or a collective of the MPI library."""
        self.numbers[kind.channel, kind.group] += 1
        number = self.kinds.setdefault(kind, len(self.kinds))
        self._add(comm, stamp, [number, -1, self.numbers[kind.channel, kind.group], *times, 0.0])

    def _kind(self, key: Hashable, run: Run, extents: Extents) -> tuple[int, list[int]]:
        """A new kind of calls."""
        compiled, problem, shapes = run.compiled, run.compiled.plan.problem, run.compiled.sized(extents).shapes
        inputs = [buffer for buffer in compiled.program.buffers if buffer.is_input]
        texts = [f"{buffer.name}[{', '.join(map(str, shapes[buffer.name]))}]" for buffer in inputs]
        moving = sum(nbytes(shapes[buffer.name], buffer.dtype) for buffer in inputs if buffer.axis != "whole")
        where = _label(run.comm), tuple(run.comm.link.world_ranks), moving, problem.dtype
        how = f"{problem.dtype} {', '.join(texts)}", problem.wire, compiled.plan.schedule
        kind = CallKind(problem.operation, problem.moves, *where, *how)
        products = [i for i, what in enumerate(compiled.kinds) if what == COMPUTE and not compiled.merges[i]]
        self.known[key] = found = self.kinds.setdefault(kind, len(self.kinds)), products
        return found

    def mark(self, steps: object, *_: object) -> None:
        now = perf_counter()
        self.calls.append([STEP, id(steps), self.numbers[id(steps)], now, now, now, now, 0.0])
        self.numbers[id(steps)] += 1

    def finish(self) -> None:
        """The program has ended: write the file."""
        if os.getpid() != self.process:
            return
        owners = {id(steps): self.numbers[id(steps)] for steps in self.updates.values()}
        own = id(self.steps)  # without marks: those of the optimizer that has made most of them
        own = own if own in self.numbers else max(owners, key=owners.__getitem__, default=own)
        rows = [
            (*row[:1], -1, *row[2:]) if row[0] == STEP else tuple(row)
            for row in self.calls
            if row[0] != STEP or row[1] == own
        ]
        calls = np.array(rows, CALL)
        calls["wait"] = np.where(calls["back"] > calls["begin"], calls["wait"], calls["begin"])
        try:
            RankRecord(self.rank, self.size, socket.gethostname(), tuple(self.kinds), calls).save(self.folder)
        except OSError as error:
            log.warning("rank %d cannot write its record to %s: %s", self.rank, self.folder, error)


def _label(comm: Communicator) -> str:
    """The communicator in words, the same on all of its ranks."""
    return f"{comm.name} #{comm.number + 1}" if comm.number else comm.name
