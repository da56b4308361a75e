"""Task: something in flight that the engine drives. It has requests, and kernels that a thread or a device runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import Context
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np

from fompi.base.errors import PeerError
from fompi.mpi.link import Link

HANDSHAKE, DESCRIPTION, CONFIRMATION = 0, 1, 2
"""The rounds of an agreement (`fompi.engine.handshake`)."""

CONTROL = 1
"""The tag of control messages. The tag of a handshake is 0. Tags of payload begin at 1 << MESSAGE_BITS."""

ANYONE = -1
"""Stands for the awaited rank if a task waits for all ranks, in a collective of the MPI library."""


QUIET = Context()
"""Kernels run in this context, or in a copy of it. Overflow and NaN follow IEEE 754 there, without warnings or errors.

NumPy keeps its error state in the context. So `np.seterr` and `-W error` of the program do not reach the kernels.
"""
QUIET.run(np.seterr, all="ignore")


class Task:
    """Something in flight. The engine calls `completed(key)` for each of its requests and kernels that is done."""

    finished = False
    error: BaseException | None = None
    moved_at = 0.0  # when it last made progress, in seconds of perf_counter
    failed_at = 0.0  # when it got its error
    awaits_start = False  # True: it waits until other ranks start the same call
    awaited = False  # True: the program is about to wait for it, and will run its kernels
    is_long = False  # True: messages must progress while its kernels run
    forwards = False  # True: it sends what it receives, or sums of it, so other ranks wait until this rank has polled
    is_enqueued = False  # True: it is finished for the program, but a device still runs its kernels

    @property
    def belongs_to(self) -> Task:
        """The call that owns the requests of this task."""
        return self

    def completed(self, key: int) -> None:
        """The request or kernel `key` is done."""
        raise NotImplementedError

    def drive(self) -> bool | None:
        """Let C go on with it for a while, if it is in C and Python drives nothing else.

        True: it has moved. False: nothing has moved for a while. None: it is not in C.
        """
        return None

    def posted(self, key: int) -> None:
        """The message `key`, which has waited for its turn, begins (`fompi.engine.port`)."""

    def take(self, merges_only: bool) -> tuple[int, Callable[[], object]] | None:
        """Hand out a kernel that can run, and its key. The caller must run it. None: there is no such kernel.

        `merges_only`: hand out only sums and copies.
        """
        return None

    def ran(self, key: int, begun: float, error: BaseException | None) -> None:
        """The kernel `key` has run, or has raised `error`. It began at `begun`."""

    def waits_for(self) -> tuple[int, str] | None:
        """The rank of the communicator whose message is missing, and a description of that message. None: no rank."""
        return None

    def stalled(self) -> None:
        """A wait for this task has seen no progress for a while."""

    def take_turn(self) -> None:
        """This call may now start the MPI library's collectives (`Communicator.turns`)."""

    def can_finish(self) -> bool:
        """False if it waits for the program of this rank, so that it cannot finish without it."""
        return True

    def poison(self, error: BaseException, sender: int) -> bool:
        """Rank `sender` reports that this call failed: run no more kernels, and end with `error`.

        False: this task cannot do so. The error is kept for the task that follows it in the same call.
        """
        return False

    def acknowledged(self, rank: int) -> None:
        """Rank `rank` has confirmed that it knows of the error of this call."""

    def settle(self) -> None:
        """Wait for the kernels that a device still runs for this finished call."""

    def blame(self, key: int) -> None:
        """A device has failed, and the kernel `key` was the oldest in its queue."""

    def abandon(self, error: BaseException) -> None:
        """End with `error` at once, even with messages still in flight."""
        self.error, self.finished = self.error or error, True

    def broke(self, error: Exception) -> None:
        """MPI, or fompi itself, has raised `error` while this task was driven."""
        self.abandon(error)


DONE = Task()
"""Stands for a task that was finished when it began: C has carried it out at once."""

DONE.finished = True


class Listener(Protocol):
    """What a wait needs of the control channel of its communicator (`fompi.engine.control.Channel`)."""

    link: Link
    name: str
    timeout: float | None
    asking: bool
    departed: dict[int, str]
    stopped: dict[int, tuple[str, str]]
    lost: PeerError | None

    def fail(self, task: Task, error: Exception) -> None: ...

    def absent_peer(self, awaits_start: bool, awaited: tuple[int, str] | None) -> tuple[int, str] | None: ...

    def explain(self, task: Task) -> str: ...


class Watch(NamedTuple):
    """A call whose end somebody wants to hear of: `then()` runs once, soon after `task()` is finished.

    `task()` is what does the call now. `begun` is when it began.
    """

    task: Callable[[], Task]
    channel: Listener
    then: Callable[[], object]
    begun: float


class CallInFlight:
    """What the program holds of a call on `_comm`. `task` is what does the call now, in C or in Python."""

    task: Any
    _comm: Any
    _is_unread = False  # True: nobody has asked for it yet, and should

    def done(self) -> bool:
        """True once it is finished. Progresses everything in flight."""
        self._is_unread = False
        if not self.task.finished:
            self._comm.engine.progress_while_waiting()
        return bool(self.task.finished)

    def then(self, callback: Callable[[], object]) -> None:
        """Call `callback()` once it is finished, in a thread that drives fompi. It must not raise."""
        self._is_unread = False
        self._comm.engine.watch(lambda: self.task, self._comm.channel, callback)

    def leave(self) -> None:
        """The program goes on with other work: the call must progress by itself."""
        self._comm.engine.wake_helper()


class Sent(Task):
    """Owns the requests of small messages that are being sent, from memory of `held`. No thread waits for them."""

    def __init__(self, held: object = None):
        self.held = held

    def completed(self, key: int) -> None: ...


class MessageParts(Task):
    """A message that is sent in several parts. It calls `completed(key)` of `task` once all parts are done.

    Each of `starts` starts a part and returns its request, which goes to `post`.
    """

    def __init__(self, task: Task, starts: Iterator[Callable[[], Any]], missing: int, post: Callable[[Any], object]):
        self.task, self.starts, self.missing, self.post = task, starts, missing, post

    def start(self) -> None:
        """Start the next part, if there is one."""
        start = next(self.starts, None)
        if start is not None:
            self.post(start())

    @property
    def belongs_to(self) -> Task:
        return self.task

    def completed(self, key: int) -> None:
        self.missing -= 1
        if not self.missing:
            self.task.completed(key)
        else:
            self.task.moved_at = perf_counter()
            self.start()

    def broke(self, error: Exception) -> None:
        self.task.broke(error)
