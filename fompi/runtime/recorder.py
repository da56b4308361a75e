"""FOMPI_RECORD: the calls and the steps of this process, for `fompi replay` and `fompi advise`.

A call costs some microseconds: its times are those that the engine has anyway, and what it is was worked out at the
first call of its kind. The file is written when the program ends (`fompi.traces.record`).
"""

from __future__ import annotations

import os
import socket
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from math import nan
from time import perf_counter, time
from typing import Any, NamedTuple

import numpy as np

from fompi.base.layout import nbytes
from fompi.base.log import log
from fompi.engine.communicator import Communicator
from fompi.mpi.link import finalized
from fompi.mpi.transport import world
from fompi.runtime.alignment import read_clocks
from fompi.runtime.compiled import COMPUTE, RECV
from fompi.runtime.program import FinishedCall
from fompi.runtime.steps import Notes, Steps
from fompi.traces import clocks
from fompi.traces.record import CALL, MOST_CALLS, CallKind, RankRecord

MOST_OPEN = 1024
"""Of this many finished calls, the newest, it is noted when the program begins to wait for them."""

BEGIN, BACK, WAIT, END = 3, 4, 5, 6
"""The places of the times in a call."""


class KnownKind(NamedTuple):
    """A kind of calls, and what of its ops is added up: products, and (op, rank, bytes) of what it receives."""

    number: int
    kind: CallKind
    products: tuple[int, ...] = ()
    receives: tuple[tuple[int, int, int], ...] = ()


class Recorder(Notes):
    """The record of this process. `folder` gets rank-R.npz."""

    def __init__(self, folder: str):
        super().__init__()
        self.folder, self.process, (self.rank, self.size) = folder, os.getpid(), world()
        self.kinds: dict[Hashable, KnownKind] = {}
        self.heard: defaultdict[tuple[int, int], float] = defaultdict(float)  # seconds, by number of a kind, and rank
        self.calls: deque[list[Any]] = deque(maxlen=MOST_CALLS)
        self.numbers: Counter[Hashable] = Counter()  # of messages and calls of the library, on each channel
        self.open: dict[tuple[Any, int], list[Any]] = {}  # finished calls for which nobody has waited yet
        self.asked: dict[tuple[Any, int], float] = {}  # when the program began to wait for calls that are in flight
        self.marks: defaultdict[Steps, deque[float]] = defaultdict(lambda: deque(maxlen=MOST_CALLS))
        self.noted, self.marked = 0, Counter[Steps]()
        self.clocks: dict[int, float] = {}

    def note(self, call: FinishedCall) -> None:
        run = call.run
        if run.error is not None:
            return
        key = run.comm, run.compiled, call.extents
        known = self.kinds.get(key) or self._kind(key, call)
        begun, late, begins, ends = run.started, -1, run.begun, run.ended
        if call.agreed is not None:
            begun, _, last = call.agreed
            late = run.comm.link.world_ranks[last]
        for i, rank, _ in known.receives:
            self.heard[known.number, rank] += ends[i] - begins[i]
        inside = sum([ends[i] - begins[i] for i in known.products])
        back = begun if call.returned_at is None else call.returned_at
        self._add(run.comm, run.stamp, [known.number, late, run.stamp, begun, back, nan, run.moved_at, inside])

    def note_message(self, comm: Communicator, message: Any) -> None:
        ends, word = (comm.rank, message.peer), "send"
        if message.verb == "send":  # the peer does
            ends, word = ends[::-1], "recv"
        group = tuple(comm.link.world_ranks[end] for end in ends)
        kind = CallKind(word, word, f"{_label(comm)}, tag {message.tag}", group, message.nbytes)
        begun = message.begun
        self._add_kind(comm, message.stamp, kind, (begun, message.returned_at or begun, nan, message.ended))

    def timed(self, word: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` of the MPI library, which carries out the collective `word` of mpi4py, noted."""

        def call(comm: Any, *args: Any, **options: Any) -> Any:
            begun = perf_counter()
            made = function(comm, *args, **options)
            ended, own = perf_counter(), comm.communicator
            arrays = [arg[0] if isinstance(arg, list) else arg for arg in (*args, *options.values())]
            moved = max([int(getattr(array, "nbytes", 0)) for array in arrays], default=0)
            kind = CallKind(word, word.lower(), f"{_label(own)} of MPI", tuple(own.link.world_ranks), moved)
            self._add_kind(own, 0, kind, (begun, begun, nan, ended))
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
        known = self.kinds.setdefault(kind, KnownKind(len(self.kinds), kind))
        where = kind.moves, kind.channel, kind.group
        self.numbers[where] += 1
        self._add(comm, stamp, [known.number, -1, self.numbers[where], *times, 0.0])

    def _kind(self, key: Hashable, call: FinishedCall) -> KnownKind:
        """A new kind of calls."""
        compiled, members = call.run.compiled, tuple(call.run.comm.link.world_ranks)
        problem, (starts, shapes) = compiled.plan.problem, compiled.sized(call.extents)
        inputs = [buffer for buffer in compiled.program.buffers if buffer.is_input]
        texts = [f"{buffer.name}[{', '.join(map(str, shapes[buffer.name]))}]" for buffer in inputs]
        moving = sum(nbytes(shapes[buffer.name], buffer.dtype) for buffer in inputs if buffer.axis != "whole")
        how = f"{problem.dtype} {', '.join(texts)}", problem.wire, compiled.plan.schedule
        kind = CallKind(
            problem.operation, problem.moves, _label(call.run.comm), members, moving, problem.dtype, *how
        )  # fmt: skip
        receives, products = [], []
        for i, what in enumerate(compiled.kinds):
            if what == RECV:
                places = [place for place in compiled.places(i) if place.buffer in starts]
                moved = sum((starts[p.buffer][p.stop] - starts[p.buffer][p.start]) * p.width for p in places)
                receives.append((i, members[compiled.peers[i]], moved))
            elif what == COMPUTE and not compiled.merges[i]:
                products.append(i)
        known = self.kinds[key] = KnownKind(len(self.kinds), kind, tuple(products), tuple(receives))
        return known

    def mark(self, steps: Steps, tokens: float = 0.0, flops: float = 0.0) -> None:
        self.marks[steps].append(perf_counter())
        self.marked[steps] += 1

    def settle(self, comm: Communicator) -> None:
        if not comm.network or comm.link.world_ranks != [*range(self.size)] or finalized() or comm.channel.broken:
            return
        try:
            read_clocks(comm)
            self.clocks = {rank: clocks.fit(batches).offset for rank, batches in comm.clock_readings.items()}
        except Exception as error:  # a problem of the record must not end a program that has succeeded
            log.warning("rank %d has no common clock for its record: %s", self.rank, error)

    def finish(self) -> None:
        if os.getpid() != self.process:
            return
        calls = np.array([tuple(row) for row in self.calls], CALL)
        calls["wait"] = np.where(calls["back"] > calls["begin"], calls["wait"], calls["begin"])
        often, kinds = np.bincount(calls["kind"], minlength=len(self.kinds)), []
        for number, kind, _, receives in self.kinds.values():
            moved: Counter[int] = Counter()
            for _, rank, n in receives:
                moved[rank] += n
            heard = [(rank, self.heard[number, rank], float(n * often[number])) for rank, n in moved.items()]
            kinds.append(replace(kind, heard=tuple(heard)))
        own = self.steps  # without marks: those of the optimizer that has made most of them
        own = own if own in self.marks else max(self.marked, key=self.marked.__getitem__, default=own)
        marks = np.array(self.marks[own], float)
        counts = self.marked[own] - len(marks), self.noted - len(calls), time() - perf_counter()
        try:
            names = self.rank, self.size, socket.gethostname(), tuple(kinds)
            RankRecord(*names, calls, marks, *counts, self.clocks).save(self.folder)
        except OSError as error:
            log.warning("rank %d cannot write its record to %s: %s", self.rank, self.folder, error)


def _label(comm: Communicator) -> str:
    """The communicator in words, the same on all of its ranks."""
    return f"{comm.name} #{comm.number + 1}" if comm.number else comm.name
