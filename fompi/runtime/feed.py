"""Blocks of the result of one executor flow into the input of another one: the engine runs what lies between.

first.start()                # y
second.start()               # second.feed("x", first, "y", kernel): kernel(y[i], x[i]) as soon as y[i] is written
z = second.wait()
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from fompi.base.errors import PlanError, StateError
from fompi.base.layout import Extents, Sizes
from fompi.engine.control import Channel
from fompi.engine.engine import Engine
from fompi.engine.tasks import Task
from fompi.runtime.compiled import Compiled
from fompi.runtime.program import Run

Kernel = Callable[[Any, Any], object]
"""kernel(y, x): read a block of a result, and write the block of an input."""


def _copy(y: Any, x: Any) -> None:
    np.copyto(x, y)


class FedCall(NamedTuple):
    """One call of an executor that is fed, or that feeds another one: its rows on this rank, and its arrays."""

    run: Run
    extents: Extents
    arrays: Mapping[str, Any]


class Feed:
    """Block i of the input `name` of `into` is made of block i of the result `output` of `source`, by `kernel`.

    `ranks` are those whose blocks are compared. Raises PlanError if the rows of a block have different forms, and there
    is no kernel.
    """

    def __init__(
        self, into: Compiled, name: str, source: Compiled, output: str, kernel: Kernel | None, ranks: Sequence[int]
    ):
        self.into, self.source, self.ranks, self.kernel = into, source, ranks, kernel or _copy
        self.input, self.result = mine, theirs = into.buffers[name], source.buffers[output]
        if kernel is None and (mine.row, mine.dtype) != (theirs.row, theirs.dtype):
            raise PlanError(
                f"feed: {name} and {output} have different rows, {mine.row} and {theirs.row}: give a kernel"
            )
        self.last: Run | None = None  # the call of `source` that has fed the last call of `into`
        self._fitting: tuple[Sizes, Sizes] | None = None  # the last rows of both for which the blocks fit

    def check_rows(self, into: Sizes, source: Sizes) -> None:
        """Raise PlanError if the blocks of calls with these rows differ on one of `ranks`. It needs no message."""
        if self._fitting == (into, source):
            return
        for rank in self.ranks:
            mine = self.input.offsets(self.into.plan.extents(rank, into))
            theirs = self.result.offsets(self.source.plan.extents(rank, source))
            if mine != theirs:
                raise PlanError(
                    f"feed: the blocks of {self.input.name} and {self.result.name} have different rows on rank {rank}: "
                    f"they begin at {[mine, theirs]}. Both plans need the same rows, slices and counts",
                    rank,
                )
        self._fitting = into, source

    def of_call(self, engine: Engine, into: FedCall, source: FedCall) -> Feeding:
        """What feeds the call `into` from the call `source`."""
        name, output = self.input.name, self.result.name
        starts, writers = self.input.offsets(into.extents), self.source.last_writers(output)
        runs = [slice(a, b) for a, b in pairwise(starts)]
        arrays = [(source.arrays[output][at], into.arrays[name][at]) for at in runs]
        blocks = range(self.input.first, self.input.first + self.input.count)
        ops = [writers.get(self.result.first + i, 0) for i in range(len(blocks))]  # one without a writer has no rows
        self.last = source.run
        return Feeding(engine, source.run, into.run, name, ops, blocks, arrays, self.kernel)


class Feeding(Task):
    """One call of a feed. Its kernels are those of the blocks that `source` has written, for the call `into`.

    `writers[i]` is the op of `source` that writes block i last. `blocks[i]` is the number of the input's block, and
    `arrays[i]` are the block of the result and that of the input.
    """

    def __init__(
        self,
        engine: Engine,
        source: Run,
        into: Run,
        name: str,
        writers: Sequence[int],
        blocks: Sequence[int],
        arrays: Sequence[tuple[Any, Any]],
        kernel: Kernel,
    ):
        self.engine, self.source, self.into, self.name = engine, source, into, name
        self.blocks, self.arrays, self.kernel = blocks, arrays, kernel
        self.left, self.running = len(blocks), 0  # blocks that are not filled, and kernels that run now
        self.is_stopped = False
        self.written: deque[int] = deque()  # blocks whose kernel may run
        self.by_writer: dict[int, list[int]] = {}
        for i, writer in enumerate(writers):
            self.by_writer.setdefault(writer, []).append(i)

    def begin(self) -> None:
        """Take the blocks that are written, and hear of the others. The engine's lock is held."""
        self.source.listeners = (*self.source.listeners, self.ended)
        for writer in list(self.by_writer):
            if self.source.ended[writer]:
                self.ended(writer)
        if self.source.finished and self.by_writer:  # it was abandoned
            self.ended(-1)
        self._end_if_done()

    def ended(self, op: int) -> None:
        """Op `op` of the source is done. -1: the source was abandoned."""
        self.moved_at = perf_counter()
        found = self.by_writer.pop(op, ())
        error = self.source.error
        if error is not None or op < 0:
            self._fail(error or StateError(f"{self.source.title} was abandoned"), "what feeds it has failed")
        elif found:
            if not self.written:
                self.engine.kernels_ready(self)
            self.written.extend(found)

    def take(self, merges_only: bool) -> tuple[int, Callable[[], object]] | None:
        if merges_only or not self.written:
            return None
        i = self.written.popleft()
        if not self.written:
            self.engine.kernels_done(self)
        self.running += 1
        return i, partial(self.kernel, *self.arrays[i])

    def ran(self, key: int, begun: float, error: BaseException | None) -> None:
        self.left, self.running, self.moved_at = self.left - 1, self.running - 1, perf_counter()
        if error is not None:
            self._fail(error, f"the kernel that feeds {self.name}[{self.blocks[key]}]")
        elif not self.into.finished:
            self.into.ready_part(self.name, self.blocks[key])
        self._end_if_done()

    def can_finish(self) -> bool:
        return self.source.finished or self.source.can_finish()

    def waits_for(self) -> tuple[int, str] | None:
        return None if self.source.finished else self.source.waits_for()

    def abandon(self, error: BaseException) -> None:
        self.error = self.error or error
        self._fail(error, "what feeds it was abandoned")
        self.running = 0
        self._end_if_done()

    def stop(self) -> None:
        """Run no more kernels. The engine's lock is held."""
        if self.written:
            self.written.clear()
            self.engine.kernels_done(self)
        self.by_writer.clear()
        self.is_stopped = True
        self._end_if_done()

    def _end_if_done(self) -> None:
        """Once no kernel uses the arrays any more, both executors may start their next calls."""
        if not self.running and (self.is_stopped or not self.left):
            self.finished = True
            self.into.fed = {name: task for name, task in self.into.fed.items() if task is not self}

    def _fail(self, error: BaseException, where: str) -> None:
        """The call that is fed fails on all ranks. Its messages still move."""
        self.stop()
        if self.into.error is None and not self.into.finished:
            self.into.fail(error, where)


class Feedings:
    """The feedings of an executor's last call: `into` fill its inputs, `readers` read its result."""

    def __init__(self) -> None:
        self.into: list[Feeding] = []
        self.readers: list[Feeding] = []

    def end(self, engine: Engine, channel: Channel) -> None:
        """Wait until none of them uses the memory any more. Raises an error of those that read the result."""
        into, readers, self.into, self.readers = self.into, self.readers, [], []
        if into:
            with engine.lock:
                for feeding in into:
                    feeding.stop()  # the call that it fed is finished
        for feeding in (*into, *readers):
            engine.wait(feeding, channel, patient=True)
        for feeding in readers:
            if feeding.error is not None:
                raise feeding.error
