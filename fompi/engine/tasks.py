"""What the engine drives: a Task has requests, and kernels that a thread or a device runs."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from fompi.traces.trace import Interval

HANDSHAKE, DESCRIPTION, CONFIRMATION = 0, 1, 2
"""The rounds of an agreement."""

CONTROL = 1
"""Its tag; that of a handshake is 0, and those of payload begin at 1 << MESSAGE_BITS."""


ANYONE = -1
"""The rank that is waited for, when all are: in a collective of the library."""


class Task:
    """Something in flight. The engine calls `completed(key)` for each of its requests and kernels that are done."""

    finished = False
    error: BaseException | None = None
    touched = 0.0  # when it last moved, on the clock of perf_counter
    failed = 0.0  # when it got its error
    begins = False  # what it waits for is that others begin the same
    awaited = False  # the program is about to wait for it, and runs its kernels
    is_long = False  # somebody must move messages while its kernels run
    forwards = False  # it sends what it receives, or sums of it: others wait until that has been seen here

    def completed(self, key: int) -> None:
        raise NotImplementedError

    def take(self, merges_only: bool) -> tuple[int, Callable[[], object]] | None:
        """A kernel that can run, and its key; None: there is none of these. It is the caller's from now on."""
        return None

    def ran(self, key: int, begun: float, error: BaseException | None) -> None:
        """The kernel `key`, taken and begun at that time, has run, or failed."""

    def waits_for(self) -> tuple[int, str] | None:
        """The rank of the communicator whose message is missing, and which message; None: nobody's."""
        return None

    def take_turn(self) -> None:
        """The library's collectives may be used now (`Communicator.turns`)."""

    def can_finish(self) -> bool:
        """False if it waits for this rank's program, not for others."""
        return True

    def poison(self, error: BaseException, sender: int) -> bool:
        """`sender` says that this call failed: go on without kernels, then raise `error`. False: tell me later."""
        return False

    def acknowledged(self, rank: int) -> None:
        """This rank knows now that the call failed."""

    def abandon(self, error: BaseException) -> None:
        """End with `error` at once, whatever is still in flight."""
        self.error, self.finished = self.error or error, True

    def broke(self, error: Exception) -> None:
        """MPI, or we, failed in the middle of it."""
        self.abandon(error)


class InParts(Task):
    """What moves in several messages: `completed(key)` of `task` comes once all of them are done."""

    def __init__(self, task: Task, parts: int):
        self.task, self.missing = task, parts

    def completed(self, key: int) -> None:
        self.missing -= 1
        if not self.missing:
            self.task.completed(key)

    def broke(self, error: Exception) -> None:
        self.task.broke(error)


class Recent:
    """The last 4096 intervals, to tell what a program did that had started something. Its memory does not grow.

    One that begins within `joined` seconds of the end of the last goes on with that.
    """

    def __init__(self, joined: float = -1.0):
        self._times, self._at, self.joined = array("d", bytes(8 * 2 * 4096)), 0, joined

    def add(self, begin: float, end: float) -> None:
        times, at = self._times, self._at
        if begin - times[at + 1] <= self.joined:
            times[at + 1] = end
            return
        self._at = at = (at + 2) % len(times)
        times[at], times[at + 1] = begin, end

    def within(self, begin: float, end: float) -> list[Interval]:
        """Those that reach into this time."""
        pairs = np.array(self._times).reshape(-1, 2)
        return [(start, stop) for start, stop in pairs[(pairs[:, 0] < end) & (pairs[:, 1] > begin)].tolist()]


class Peers(Protocol):
    """What the engine asks of a control channel (`fompi.engine.control.Channel`)."""

    name: str
    link: Any
    departed: dict[int, str]
    asking: bool

    def receive(self) -> bool:
        """Take in the control messages that have come. False: none had."""

    def missing(self, begins: bool, awaited: tuple[int, str] | None) -> int | None:
        """The rank that is awaited and has left."""

    def fail(self, task: Task, error: Exception) -> None:
        """End `task` with `error` on all ranks."""

    def explain(self, task: Task) -> str:
        """Which rank waits for which."""
