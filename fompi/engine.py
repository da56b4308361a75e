"""What is in flight in this process, and who drives it.

One Engine for all communicators: any call that waits drives every operation that was started, so ranks may start and
wait in different orders. A Task is something with requests in flight (a run of a plan, an agreement before it); a
Channel carries the control messages of one communicator: a failed rank's last words, and who waits for whom.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from threading import RLock
from time import perf_counter, sleep
from typing import Any

from fompi.errors import PeerError, WaitTimeout
from fompi.link import Link

HANDSHAKE, DESCRIPTION, CONFIRMATION = 0, 1, 2
"""The rounds of an agreement."""

CONTROL = 1
"""Its tag; that of a handshake is 0, and those of payload begin at 1 << MESSAGE_BITS."""

MESSAGE_BITS = 12
"""A call has this many tags (as a power of two), the last two of them for its agreement."""

MOST_MESSAGES = (1 << MESSAGE_BITS) - 2
"""A call may send so many to one peer."""


def slots(link: Link) -> int:
    """How many calls in flight have tags of their own."""
    return 1 << min(link.tag_bits - MESSAGE_BITS - 1, 18)


ANYONE = -1
"""The rank that is waited for, when all are: in a collective of the library."""


class Task:
    """Something in flight. The engine calls `completed(key)` for each of its requests, and `work()` while `ready`."""

    finished = False
    error: BaseException | None = None
    touched = 0.0  # when it last moved, on the clock of perf_counter
    failed = 0.0  # when it got its error
    begins = False  # what it waits for is that others begin the same

    def completed(self, key: int) -> None:
        raise NotImplementedError

    def work(self) -> None:
        """Run one kernel that can run."""

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

    def heard(self, rank: int) -> None:
        """This rank knows now that the call failed."""

    def abandon(self, error: BaseException) -> None:
        """End with `error` at once, whatever is still in flight."""
        self.error, self.finished = self.error or error, True

    def broke(self, error: Exception) -> None:
        """MPI, or we, failed in the middle of it."""
        self.abandon(error)


class Engine:
    """Every request of every task, tested together. Thread-safe; whoever waits drives all."""

    def __init__(self, testsome: Callable[[list[Any]], list[int] | None], timeout: float, spins: int):
        self.timeout, self.spins = timeout, spins
        self.lock = RLock()
        self.channels: list[Channel] = []
        self.waiting: list[tuple[Task, Channel]] = []  # innermost last
        self.last_began: tuple[str, Any, int] | None = None  # what, the communicator, the stamp
        self._testsome = testsome
        self.arena: Any = None  # where outputs and scratch come from
        self._requests: list[Any] = []
        self._owners: list[tuple[Task, int]] = []
        self._ready: list[Task] = []
        self._polls = 0

    @property
    def last_call(self) -> str:
        """The last call that began here, in words: they are made only when somebody asks."""
        if self.last_began is None:
            return "none yet"
        what, comm, stamp = self.last_began
        return f"{what} ({comm.call_name(stamp)})"

    def post(self, request: Any, task: Task, key: int) -> None:
        """Call `task.completed(key)` once `request` is done."""
        self._requests.append(request)
        self._owners.append((task, key))

    def kernels_ready(self, task: Task) -> None:
        if task not in self._ready:
            self._ready.append(task)

    def kernels_done(self, task: Task) -> None:
        self._ready.remove(task)

    def progress(self) -> bool:
        """Move whatever can move: take in what has arrived, then run one kernel. False: nothing did."""
        with self.lock:
            moved = self.poll()
            if self._ready:
                task = self._ready[0]
                try:
                    task.work()
                except Exception as error:
                    task.broke(error)
                moved = True
            return moved

    def poll(self) -> bool:
        """Take in what has arrived; now and then, what the other ranks say. False: nothing had."""
        self._polls += 1
        heard = self._polls % 64 == 0 and self.hear()
        if not self._requests:
            return heard
        done = self._testsome(self._requests)
        if not done:
            return heard
        owners = [self._owners[i] for i in done]
        for i in sorted(done, reverse=True) if len(done) > 1 else done:
            last, owner = self._requests.pop(), self._owners.pop()
            if i < len(self._requests):
                self._requests[i], self._owners[i] = last, owner
        for task, key in owners:
            try:
                task.completed(key)
            except Exception as error:
                task.broke(error)
        return True

    def hear(self) -> bool:
        """Take in the control messages that have come. False: none had."""
        with self.lock:
            return any([channel.hear() for channel in list(self.channels)])

    def wait(self, task: Task, channel: Channel, seconds: float | None = None, patient: bool = False) -> bool:
        """Drive everything until `task` is finished; False if `seconds` pass before.

        After `timeout` seconds without a move of `task` it is abandoned: its error says who waits for whom. Unless we
        are `patient`, a task with an error is not waited for for long: other ranks may come to it late.
        """
        begun = perf_counter()
        limit = None if seconds is None else begun + seconds
        idle = rounds = 0
        self.waiting.append((task, channel))
        try:
            while not task.finished:
                rounds += 1
                if self.progress():
                    idle = 0
                else:
                    idle += 1
                    if idle > self.spins:
                        self._rest(idle - self.spins)
                if idle > self.spins or rounds % 256 == 0:  # others may move while this task does not
                    self._check(task, channel, begun)
                    if task.error is not None and not patient and perf_counter() - task.failed > ERROR_SECONDS:
                        break
                if limit is not None and not task.finished and perf_counter() > limit:
                    return False
        finally:
            self.waiting.remove((task, channel))
        return True

    def left(self, world_ranks: Sequence[int]) -> PeerError | None:
        """What to say to who waits for all of these to make a communicator, if one of them has left."""
        for channel in self.channels:
            for rank, words in channel.left.items():
                if channel.link.world_ranks[rank] in world_ranks:
                    wait = f"rank {channel.link.rank} waits for all ranks to come to the creation of a communicator"
                    return PeerError(f"{wait}, but {words}", rank)
        return None

    @staticmethod
    def _rest(times: int) -> None:
        """Leave the core to others: first for a moment, then for longer."""
        if times < 100:
            os.sched_yield()
        else:
            sleep(min(times - 99, 10) * 30e-6)

    def _check(self, task: Task, channel: Channel, begun: float) -> None:
        """End the wait that began at `begun` for a rank that has left, or after the deadline."""
        self.hear()
        if task.finished:
            return
        silent = perf_counter() - max(task.touched, begun)
        if channel.left and silent > 0.2:
            awaited = task.waits_for()
            missing = channel.missing(task.begins, awaited)
            if missing is not None:
                words = f"rank {channel.link.rank} waits for {awaited[1]}, but {channel.left[missing]}"  # type: ignore[index]
                channel.fail(task, PeerError(words, missing))
                return
        if silent > self.timeout and not channel.asking:
            moved, words = task.touched, channel.explain(task)
            if not task.finished and task.touched == moved:  # also not while we asked
                channel.fail(task, WaitTimeout(words))


# ---------------------------------------------------------------------------------------------- the control channel


def _series(stamp: int) -> int:
    """Calls of one series begin in the order of their stamps: all unbound ones, or those of one bound operation."""
    return stamp >> 24 if stamp >> 62 else 0


FAILED, HEARD, FATAL, LEFT, GONE, DYING, ASK, ANSWER = range(8)
_HEADER = struct.Struct("<iqiiI")  # kind, stamp, sender, whose words these are, how many bytes
_NBYTES = 2048
ANSWER_SECONDS, ERROR_SECONDS = 1.0, 0.5
_SILENT = "it computes outside fompi, is stopped, or is dead"


class _Sent(Task):
    """Control messages on their way; nobody waits for them."""

    def completed(self, key: int) -> None: ...


class Channel:
    """The control messages of one communicator. `failures` and `left` are what the others said.

    A rank that has `left` begins no call any more; once it is `gone` it does not finish one either.
    """

    def __init__(self, link: Link, engine: Engine, name: str):
        self.link, self.engine, self.name = link, engine, name
        self.active: dict[int, Task] = {}  # stamp -> the task of that call
        self.begun: dict[int, int] = {}  # series of calls -> the stamp of the newest that began here
        self.failures: dict[int, tuple[PeerError, bool]] = {}  # stamp -> error, fatal: before its task was there
        self.left: dict[int, str] = {}
        self.gone: set[int] = set()
        self.dying: set[int] = set()
        self.broken: BaseException | None = None  # why a call was given up with messages under way
        self.asking = False
        self._answers: dict[int, tuple[int, str]] = {}
        self._inbox = bytearray(_NBYTES)
        self._sent = _Sent()
        engine.channels.append(self)

    def tell(self, dest: int, kind: int, stamp: int, text: str = "", origin: int | None = None) -> None:
        """Send words of ours, or pass on those of rank `origin`."""
        words, own = text.encode()[: _NBYTES - _HEADER.size], self.link.rank
        message = _HEADER.pack(kind, stamp, own, own if origin is None else origin, len(words)) + words
        self.engine.post(self.link.isend(message, dest, CONTROL), self._sent, 0)

    def tell_all(self, kind: int, stamp: int, text: str = "") -> None:
        with self.engine.lock:
            for peer in range(self.link.size):  # they listen until all are gone
                if peer != self.link.rank:
                    self.tell(peer, kind, stamp, text)

    def begin(self, stamp: int, task: Task) -> None:
        """`task` does the call `stamp` from now on."""
        self.active[stamp] = task
        self.begun[_series(stamp)] = stamp

    def hear(self) -> bool:
        """Take in all that has come. A probe: MPICH over UCX never completes a receive from any source."""
        heard = False
        while self.link.size > 1 and (message := self.link.improbe(self.link.any_source, CONTROL)) is not None:
            message.Recv(self._inbox)
            self._take_in()
            heard = True
        return heard

    def _take_in(self) -> None:
        kind, stamp, sender, origin, count = _HEADER.unpack_from(self._inbox)
        text = bytes(self._inbox[_HEADER.size : _HEADER.size + count]).decode(errors="replace")
        if kind in (FAILED, FATAL):
            task, error = self.active.get(stamp), PeerError(text, origin)
            if kind == FATAL:
                self.broken = self.broken or error
            if task is not None and kind == FATAL:
                task.abandon(error)
            elif not task.poison(error, sender) if task is not None else stamp > self.begun.get(_series(stamp), 0):
                self.failures[stamp] = (error, kind == FATAL)  # the call has not begun here
            if kind == FAILED:
                self.tell(sender, HEARD, stamp)
        elif kind == HEARD:
            if stamp in self.active:
                self.active[stamp].heard(sender)
        elif kind == LEFT:
            self.left[origin] = text
        elif kind == GONE:
            self.gone.add(origin)
        elif kind == DYING:
            self.dying.add(origin)
        elif kind == ASK:
            self.tell(origin, ANSWER, *self._state())
        else:
            self._answers[origin] = (stamp, text)

    def _state(self) -> tuple[int, str]:
        """The world rank that this rank waits for (-1: nobody), and what for, in words."""
        if not self.engine.waiting:
            return -1, f"does not wait in fompi; its last call was {self.engine.last_call}"
        task, channel = self.engine.waiting[-1]
        awaited = task.waits_for()
        if awaited is None:
            return -1, "works in fompi"
        if awaited[0] == ANYONE:
            return ANYONE, f"waits for {awaited[1]}"
        awaited_rank = channel.link.world_ranks[awaited[0]]
        where = "" if channel is self else f" (on {channel.name}, where that is world rank {awaited_rank})"
        return awaited_rank, awaited[1] + where

    def fail(self, task: Task, error: Exception) -> None:
        """End `task` with `error` here and on all other ranks: it cannot go on."""
        with self.engine.lock:
            stamp = getattr(task, "stamp", None)
            if stamp is not None:
                self.broken = self.broken or error
                self.tell_all(FATAL, stamp, f"rank {self.link.rank} gave up: {error}")
            task.abandon(error)

    def missing(self, begins: bool, awaited: tuple[int, str] | None) -> int | None:
        """The rank that is awaited and will not come, as it has left."""
        absent = self.left if begins else self.gone
        if awaited is None:
            return None
        if awaited[0] == ANYONE:
            return min(absent, default=None)
        return awaited[0] if awaited[0] in absent else None

    def explain(self, task: Task) -> str:
        """Who waits for whom, from this rank back to the one at the root."""
        self.asking = True
        try:
            awaited = task.waits_for()
            seconds = self.engine.timeout
            if awaited is None:
                return f"rank {self.link.rank} made no progress for {seconds:g} s (FOMPI_TIMEOUT)"
            self._answers.clear()
            self.tell_all(ASK, 0)
            end = perf_counter() + ANSWER_SECONDS
            expected = self.link.size - 1 - len(self.left)
            while perf_counter() < end and len(self._answers) < expected:
                if not self.engine.progress() and not self.engine.hear():
                    sleep(1e-3)
            chain = self._all(awaited[1]) if awaited[0] == ANYONE else self._chain(*awaited)
            return f"after {seconds:g} s (FOMPI_TIMEOUT): " + "; ".join(chain)
        finally:
            self.asking = False

    def _all(self, what: str) -> Sequence[str]:
        """Who of all has not come to what all must come to."""
        first = f"rank {self.link.rank} waits for {what}"
        for rank in range(self.link.size):
            awaited, words = self._answers.get(rank, (ANYONE, "does not answer: " + _SILENT))
            if rank != self.link.rank and words != f"waits for {what}":
                if awaited == ANYONE:
                    return [first, self.left.get(rank, f"rank {rank} at the root {words}")]
                return [first, f"rank {rank} waits for {words}"]
        return [first, "all of them wait for it: the library does not move"]

    def _chain(self, peer: int, what: str) -> Sequence[str]:
        links, seen = [f"rank {self.link.rank} waits for {what}"], {self.link.rank}
        while True:
            if peer in self.left:
                return [*links, self.left[peer]]
            if peer in seen:
                return [*links, f"and so on from rank {peer}: a circle"]
            seen.add(peer)
            if peer not in self._answers:
                return [*links, f"rank {peer} at the root does not answer: {_SILENT}"]
            awaited, words = self._answers[peer]
            if awaited < 0:
                return [*links, f"rank {peer} at the root {words}"]
            links.append(f"rank {peer} waits for {words}")
            if awaited not in self.link.world_ranks:
                return [*links, f"which has no part in {self.name}"]
            peer = self.link.world_ranks.index(awaited)

    def can_finish(self) -> bool:
        """Whether something is in flight here that may end without new calls of this rank."""
        for task in self.active.values():
            if task.can_finish() and self.missing(task.begins, task.waits_for()) is None:
                return True
        return False

    def close(self) -> None:
        """Stop listening."""
        with self.engine.lock:
            if self in self.engine.channels:
                self.engine.channels.remove(self)
