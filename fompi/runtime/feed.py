"""Blocks of the result of one executor flow into the input of another one: the engine runs what lies between.

first.start()                # y
second.start()               # second.feed("x", first, "y", kernel): kernel(y[i], x[i]) as soon as y[i] is written
z = second.wait()
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from fompi.base.errors import PlanError, StateError
from fompi.base.layout import Sizes
from fompi.engine.engine import Engine
from fompi.engine.tasks import Task
from fompi.plans.plan import Buffer, Plan
from fompi.runtime.program import Run

Kernel = Callable[[Any, Any], object]
"""kernel(y, x): read a block of a result, and write the block of an input."""


def copy(y: Any, x: Any) -> None:
    np.copyto(x, y)


Side = tuple[Plan, Buffer, Sizes]
"""The input that is fed, or the result that feeds it: its plan, its buffer, and the rows of a call."""


def check_rows(into: Side, source: Side, ranks: Iterable[int]) -> None:
    """Raise PlanError if their blocks have different rows on one of `ranks`. No message is needed for that."""
    for rank in ranks:
        starts = [buffer.offsets(plan.extents(rank, sizes)) for plan, buffer, sizes in (into, source)]
        if starts[0] != starts[1]:
            name, output = into[1].name, source[1].name
            raise PlanError(
                f"feed: the blocks of {name} and {output} have different rows on rank {rank}: they begin at {starts}. "
                "Both plans need the same rows, slices and counts",
                rank,
            )


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
