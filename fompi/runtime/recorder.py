"""FOMPI_RECORD: the calls and the steps of this process, for `fompi replay` and `fompi advise`.

The times of a call are those that the engine has anyway, and what it is was worked out at the first call of its kind.
The file is written when the program ends, and after 1, 2, 4, ... steps (`fompi.traces.record`).
"""

from __future__ import annotations

import os
import socket
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import replace
from math import nan
from time import perf_counter
from typing import Any

import numpy as np

from fompi.base.layout import Extents, nbytes
from fompi.base.log import log
from fompi.engine.communicator import Communicator
from fompi.runtime.compiled import COMPUTE, Compiled
from fompi.runtime.digest import Notes
from fompi.runtime.native_run import Times
from fompi.runtime.program import Run
from fompi.traces.record import CALL, MOST_CALLS, STEP, CallKind, RankRecord

MOST_OPEN = MOST_KINDS = 1024
"""Of this many finished calls, the newest, it is noted when the program begins to wait for them. Beyond this many kinds
of calls, a kind is for all calls of about one size.
"""

WAIT, END = 5, 6
"""The places of these times in a call."""

Where = tuple[Communicator, Compiled, Extents]


class Recorder(Notes):
    """The record of this process. Thread-safe: the engine is locked when it notes a call."""

    def __init__(self, folder: str):
        super().__init__(folder)
        self.kinds: dict[CallKind, int] = {}
        self.known: dict[Hashable, tuple[int, list[int]]] = {}  # the number of a kind, and its ops that are products
        self.plain: dict[Hashable, tuple[int, Hashable]] = {}  # the number of a kind without a plan, and its channel
        self.calls: deque[list[Any]] = deque(maxlen=MOST_CALLS)
        self.owners: dict[int, int] = {}  # those that end steps, by their id, and their numbers
        self.numbers: Counter[Hashable] = Counter()  # of steps, messages and calls of the library, on each channel
        self.open: dict[tuple[Any, int], list[Any]] = {}  # finished calls for which nobody has waited yet
        self.asked: dict[tuple[Any, int], float] = {}  # when the program began to wait for calls that are in flight

    def note(self, run: Run, _: object, extents: Extents, *given: Any, outputs: object) -> None:
        """A call has finished on this rank."""
        if run.error is not None:
            return
        where = run.comm, run.compiled, extents
        kind, products = self.known.get(where) or self._kind(where)
        begun, _, last = run.agreed or (run.started, 0.0, None)
        inside = sum([run.ended[i] - run.begun[i] for i in products])
        *_, returned_at = given
        back, wait = (begun, begun) if returned_at is None else (returned_at, nan)
        late = -1 if last is None else run.comm.link.world_ranks[last]
        self._add(run.comm, run.stamp, [kind, late, run.stamp, begun, back, wait, run.moved_at, inside])

    def note_in_c(self, where: Where, front: int, stamp: int, call: Any, returned_at: float | None) -> None:
        """The `Call` is finished in C, which takes microseconds: so does this. Its first `front` ops agree.

        `returned_at`: when the program went on. None: it waited.
        """
        comm, (kind, products) = where[0], self.known.get(where) or self._kind(where)
        begun, late, inside = call.started, -1, 0.0
        if front > 1:
            last = 1 - comm.rank if comm.size == 2 else Times.of(call, front).agreement(comm.rank)[2]  # type: ignore[index]
            late = comm.link.world_ranks[last]
        if products:
            of_ops = np.frombuffer(call.times(), np.float64).reshape(2, -1)[:, front:]
            inside = float((of_ops[1] - of_ops[0])[products].sum())
        back, wait = (begun, begun) if returned_at is None else (returned_at, nan)
        self._add(comm, stamp, [kind, late, stamp, begun, back, wait, call.moved_at, inside])

    def note_message(
        self, comm: Communicator, stamp: int, message: tuple[Any, ...], begun: float, ended: float
    ) -> None:
        """A message is through: the verb of its peer, the peer, the tag and the bytes."""
        key = comm, message
        if key not in self.plain:
            verb, peer, tag, moved = message
            word, ends = ("recv", (peer, comm.rank)) if verb == "send" else ("send", (comm.rank, peer))
            group = tuple(comm.link.world_ranks[end] for end in ends)
            kind = CallKind(word, word, f"{comm.name} #{comm.number + 1}, tag {tag}", group, moved)
            self.plain[key] = self._number(kind), (kind.channel, kind.group)
        self._add_plain(comm, stamp, key, (begun, begun, nan, ended))

    def note_library(self, comm: Communicator, word: str, moves: str, args: Any, begun: float) -> None:
        """The MPI library has carried out the collective `word` of mpi4py, which began at `begun`."""
        ended = perf_counter()
        arrays = [arg[0] if isinstance(arg, list) else arg for arg in args]
        moved = max([int(getattr(array, "nbytes", 0)) for array in arrays], default=0)
        key = comm.number, comm.name, word, moved
        if key not in self.plain:
            where = f"{comm.name} #{comm.number + 1} of MPI", tuple(comm.link.world_ranks)
            self.plain[key] = self._number(CallKind(word, moves, *where, moved)), where
        self._add_plain(comm, 0, key, (begun, begun, begun, ended))

    def awaited(self, comm: Communicator, stamp: int) -> None:
        """The program waits for this call, or message, from now on."""
        row = self.open.pop((comm, stamp), None)
        if row is None:
            self.asked.setdefault((comm, stamp), perf_counter())
            if len(self.asked) > MOST_OPEN:  # calls that were over, and awaited before
                del self.asked[next(iter(self.asked))]
        else:
            row[WAIT] = perf_counter()

    def _add(self, comm: Communicator, stamp: int, row: list[Any]) -> None:
        if row[WAIT] != row[WAIT]:
            row[WAIT] = self.asked.pop((comm, stamp), nan)
            if row[WAIT] != row[WAIT]:
                self.open[comm, stamp] = row
                if len(self.open) > MOST_OPEN:
                    del self.open[next(iter(self.open))]
        self.calls.append(row)

    def _add_plain(self, comm: Communicator, stamp: int, key: Hashable, times: tuple[float, ...]) -> None:
        """Add a call that has no plan: a message, or a collective of the MPI library."""
        number, channel = self.plain[key]
        self.numbers[channel] += 1
        self._add(comm, stamp, [number, -1, self.numbers[channel], *times, 0.0])

    def _number(self, kind: CallKind) -> int:
        if len(self.plain) >= MOST_KINDS:
            self.plain.clear()
        if kind not in self.kinds and len(self.kinds) >= MOST_KINDS:  # rows change at every call
            kind = replace(kind, shapes="", nbytes=1 << kind.nbytes.bit_length())
        return self.kinds.setdefault(kind, len(self.kinds))

    def _kind(self, where: Where) -> tuple[int, list[int]]:
        """A new kind of calls: its number, and its ops that are products."""
        comm, compiled, extents = where
        problem, shapes = compiled.plan.problem, compiled.sized(extents).shapes
        inputs = [buffer for buffer in compiled.program.buffers if buffer.is_input]
        texts = [f"{buffer.name}[{', '.join(map(str, shapes[buffer.name]))}]" for buffer in inputs]
        moving = sum(nbytes(shapes[buffer.name], buffer.dtype) for buffer in inputs if buffer.axis != "whole")
        base = f"{comm.name} #{comm.number + 1}", tuple(comm.link.world_ranks), moving, problem.dtype
        kind = CallKind(problem.operation, problem.moves, *base, f"{problem.dtype} {', '.join(texts)}", problem.wire)
        products = [i for i, what in enumerate(compiled.kinds) if what == COMPUTE and not compiled.merges[i]]
        if len(self.known) >= MOST_KINDS:
            self.known.clear()
        self.known[where] = found = self._number(kind), products
        return found

    def mark(self, *marked: object) -> None:
        now, owner = perf_counter(), self.owners.setdefault(id(marked[0]), len(self.owners))
        self.calls.append(row := [STEP, owner, self.numbers[owner], now, now, now, now, 0.0])
        self.numbers[owner] += 1
        if self.numbers[owner].bit_count() == 1:  # after 1, 2, 4, ... steps: a program may be killed
            self.finish()
            row[END] = perf_counter()  # the next step begins now

    def finish(self) -> None:
        """The program has ended, or may not come to its end: write the file."""
        if os.getpid() != self.process:
            return
        most = max(self.owners.values(), key=self.numbers.__getitem__, default=0)  # the optimizer with most steps
        own = self.owners.get(id(self.steps), most)
        calls = np.array([tuple(row) for row in list(self.calls) if row[0] != STEP or row[1] == own], CALL)
        try:
            RankRecord(self.rank, self.size, socket.gethostname(), tuple(self.kinds), calls).save(self.folder)
        except OSError as error:
            log.warning("rank %d cannot write its record to %s: %s", self.rank, self.folder, error)
