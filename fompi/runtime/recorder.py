"""FOMPI_RECORD: the calls and the steps of this process, for `fompi replay` and `fompi advise`.

A call costs some microseconds: its times are those that the engine has anyway, and what it is was worked out at the
first call of its kind. The file is written when the program ends (`fompi.traces.record`).
"""

from __future__ import annotations

import os
import socket
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping
from math import nan
from time import perf_counter
from typing import Any

import numpy as np

from fompi.base.layout import nbytes
from fompi.base.log import log
from fompi.engine.communicator import Communicator
from fompi.mpi.transport import world
from fompi.runtime.compiled import COMPUTE
from fompi.runtime.program import FinishedCall
from fompi.runtime.steps import Notes, Steps
from fompi.traces.record import CALL, MOST_CALLS, CallKind, RankRecord

MOST_OPEN = 1024
"""Of this many finished calls, the newest, it is noted when the program begins to wait for them."""

BEGIN, BACK, WAIT, END = 3, 4, 5, 6
"""The places of the times in a call."""


class Recorder(Notes):
    """The record of this process. `folder` gets rank-R.npz."""

    def __init__(self, folder: str):
        super().__init__()
        self.folder, self.process, (self.rank, self.size) = folder, os.getpid(), world()
        self.kinds: dict[CallKind, int] = {}
        self.known: dict[Hashable, tuple[int, list[int]]] = {}  # the number of a kind, and its ops that are products
        self.calls: deque[list[Any]] = deque(maxlen=MOST_CALLS)
        self.numbers: Counter[Hashable] = Counter()  # of messages and calls of the library, on each channel
        self.open: dict[tuple[Any, int], list[Any]] = {}  # finished calls for which nobody has waited yet
        self.asked: dict[tuple[Any, int], float] = {}  # when the program began to wait for calls that are in flight
        self.marks: defaultdict[Steps, deque[float]] = defaultdict(lambda: deque(maxlen=MOST_CALLS))
        self.noted, self.marked, self.watches = 0, Counter[Steps](), False

    def note(self, call: FinishedCall) -> None:
        run = call.run
        if run.error is not None:
            return
        key = run.comm, run.compiled, call.extents
        kind, products = self.known.get(key) or self._kind(key, call)
        begun, late = run.started, -1
        if call.agreed is not None:
            begun, _, last = call.agreed
            late = run.comm.link.world_ranks[last]
        inside = sum([run.ended[i] - run.begun[i] for i in products])
        back = begun if call.returned_at is None else call.returned_at
        self._add(run.comm, run.stamp, [kind, late, run.stamp, begun, back, nan, run.moved_at, inside])

    def note_message(self, comm: Communicator, message: Any) -> None:
        word, ends = "send", (comm.rank, message.peer)
        if message.verb == "send":  # the peer does
            word, ends = "recv", ends[::-1]
        group = tuple(comm.link.world_ranks[end] for end in ends)
        kind, begun = CallKind(word, word, f"{_label(comm)}, tag {message.tag}", group, message.nbytes), message.begun
        self._add_kind(comm, message.stamp, kind, (begun, message.returned_at or begun, nan, message.ended))

    def watch_library(self, comm: type, names: Mapping[str, str]) -> None:
        for name, moves in names.items() if not self.watches else ():
            for word in (name, f"I{name.lower()}"):
                setattr(comm, word, self._timed(word, moves, getattr(comm, word)))
        self.watches = True

    def _timed(self, word: str, moves: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A collective of `fompi.mpi.Comm`, noted if it is the MPI library that carries it out."""

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
        self.noted += 1

    def _add_kind(self, comm: Communicator, stamp: int, kind: CallKind, times: tuple[float, ...]) -> None:
        """Add a call that has no plan: a message, or a collective of the MPI library."""
        where = kind.channel, kind.group
        self.numbers[where] += 1
        number = self.kinds.setdefault(kind, len(self.kinds))
        self._add(comm, stamp, [number, -1, self.numbers[where], *times, 0.0])

    def _kind(self, key: Hashable, call: FinishedCall) -> tuple[int, list[int]]:
        """A new kind of calls."""
        compiled, comm, plan = call.run.compiled, call.run.comm, call.run.compiled.plan
        problem, shapes = plan.problem, compiled.sized(call.extents).shapes
        inputs = [buffer for buffer in compiled.program.buffers if buffer.is_input]
        texts = [f"{buffer.name}[{', '.join(map(str, shapes[buffer.name]))}]" for buffer in inputs]
        moving = sum(nbytes(shapes[buffer.name], buffer.dtype) for buffer in inputs if buffer.axis != "whole")
        where = _label(comm), tuple(comm.link.world_ranks), moving, problem.dtype
        how = f"{problem.dtype} {', '.join(texts)}", problem.wire, plan.schedule
        kind = CallKind(problem.operation, problem.moves, *where, *how)
        products = [i for i, what in enumerate(compiled.kinds) if what == COMPUTE and not compiled.merges[i]]
        self.known[key] = found = self.kinds.setdefault(kind, len(self.kinds)), products
        return found

    def mark(self, steps: Steps, tokens: float = 0.0, flops: float = 0.0) -> None:
        self.marks[steps].append(perf_counter())
        self.marked[steps] += 1

    def finish(self) -> None:
        if os.getpid() != self.process:
            return
        calls = np.array([tuple(row) for row in self.calls], CALL)
        calls["wait"] = np.where(calls["back"] > calls["begin"], calls["wait"], calls["begin"])
        own = self.steps  # without marks: those of the optimizer that has made most of them
        own = own if own in self.marks else max(self.marked, key=self.marked.__getitem__, default=own)
        marks, names = np.array(self.marks[own], float), (self.rank, self.size, socket.gethostname())
        counts = self.marked[own] - len(marks), self.noted - len(calls)
        try:
            RankRecord(*names, tuple(self.kinds), calls, marks, *counts).save(self.folder)
        except OSError as error:
            log.warning("rank %d cannot write its record to %s: %s", self.rank, self.folder, error)


def _label(comm: Communicator) -> str:
    """The communicator in words, the same on all of its ranks."""
    return f"{comm.name} #{comm.number + 1}" if comm.number else comm.name
