"""The control messages of one communicator: a failed rank's last words, and who waits for whom."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from time import perf_counter, sleep

from fompi.base.errors import PeerError
from fompi.engine.engine import Engine
from fompi.engine.tasks import ANYONE, CONTROL, Task
from fompi.mpi.link import Link


def _series(stamp: int) -> int:
    """Calls of one series begin in the order of their stamps: all unbound ones, or those of one bound operation."""
    return stamp >> 24 if stamp >> 62 else 0


FAILED, ACKNOWLEDGED, FATAL, LEFT, GONE, DYING, ASK, ANSWER = range(8)
_HEADER = struct.Struct("<iqiiI")  # kind, stamp, sender, whose words these are, how many bytes
_NBYTES = 2048
ANSWER_SECONDS = 1.0
_SILENT = (
    "it computes outside fompi, is stopped or dead, or cannot be reached: is its process alive, and the link to its "
    "host up? A larger FOMPI_TIMEOUT waits longer"
)


class _Sent(Task):
    """Control messages on their way; nobody waits for them."""

    def completed(self, key: int) -> None: ...


class Channel:
    """The control messages of one communicator. `failures` and `departed` are what the others said.

    A rank that has `departed` begins no call any more; once it is `gone` it does not finish one either.
    """

    def __init__(self, link: Link, engine: Engine, name: str):
        self.link, self.engine, self.name = link, engine, name
        self.active: dict[int, Task] = {}  # stamp -> the task of that call
        self.begun: dict[int, int] = {}  # series of calls -> the stamp of the newest that began here
        self.failures: dict[int, tuple[PeerError, bool]] = {}  # stamp -> error, fatal: before its task was there
        self.departed: dict[int, str] = {}
        self.gone: set[int] = set()
        self.dying: set[int] = set()
        self.broken: BaseException | None = None  # why a call was given up with messages under way
        self.asking = False
        self._answers: dict[int, tuple[int, str]] = {}
        self._inbox = bytearray(_NBYTES)
        self._sent = _Sent()
        engine.channels.append(self)

    def send(self, dest: int, kind: int, stamp: int, text: str = "", origin: int | None = None) -> None:
        """Send words of ours, or pass on those of rank `origin`."""
        words, own = text.encode()[: _NBYTES - _HEADER.size], self.link.rank
        message = _HEADER.pack(kind, stamp, own, own if origin is None else origin, len(words)) + words
        self.engine.post(self.link.isend(message, dest, CONTROL), self._sent, 0)

    def send_all(self, kind: int, stamp: int, text: str = "") -> None:
        with self.engine.lock:
            for peer in range(self.link.size):  # they listen until all are gone
                if peer != self.link.rank:
                    self.send(peer, kind, stamp, text)

    def begin(self, stamp: int, task: Task) -> None:
        """`task` does the call `stamp` from now on."""
        self.active[stamp] = task
        self.begun[_series(stamp)] = stamp

    def receive(self) -> bool:
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
                self.send(sender, ACKNOWLEDGED, stamp)
        elif kind == ACKNOWLEDGED:
            if stamp in self.active:
                self.active[stamp].acknowledged(sender)
        elif kind == LEFT:
            self.departed[origin] = text
        elif kind == GONE:
            self.gone.add(origin)
        elif kind == DYING:
            self.dying.add(origin)
        elif kind == ASK:
            self.send(origin, ANSWER, *self._state())
        else:
            self._answers[origin] = (stamp, text)

    def _state(self) -> tuple[int, str]:
        """The world rank that this rank waits for (-1: nobody), and what for, in words."""
        innermost = self.engine.waiting[-1:]  # in one step: other threads begin and end waits
        if not innermost:
            return -1, f"does not wait in fompi; its last call was {self.engine.last_call}"
        ((task, channel),) = innermost
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
                self.send_all(FATAL, stamp, f"rank {self.link.rank} gave up: {error}")
            task.abandon(error)

    def missing(self, begins: bool, awaited: tuple[int, str] | None) -> int | None:
        """The rank that is awaited and will not come, as it has left."""
        absent = self.departed if begins else self.gone
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
            self.send_all(ASK, 0)
            end = perf_counter() + ANSWER_SECONDS
            expected = self.link.size - 1 - len(self.departed)
            while perf_counter() < end and len(self._answers) < expected:
                if not self.engine.progress() and not self.engine.receive_control():
                    sleep(1e-3)
            chain = self._all(awaited[1]) if awaited[0] == ANYONE else self._chain(*awaited)
            return f"after {seconds:g} s (FOMPI_TIMEOUT): " + "; ".join(chain)
        finally:
            self.asking = False

    def _all(self, what: str) -> Sequence[str]:
        """Who of all has not come to what all must come to."""
        first = f"rank {self.link.rank} waits for {what}"
        for rank in range(self.link.size):
            if rank == self.link.rank:
                continue
            if rank in self.departed:
                return [first, self.departed[rank]]
            if rank not in self._answers:
                return [first, self._silence(rank)]
            awaited, words = self._answers[rank]
            if words != f"waits for {what}":
                return [first, f"rank {rank} at the root {words}" if awaited < 0 else f"rank {rank} waits for {words}"]
        return [first, "all of them wait for it: the library does not move"]

    def _silence(self, rank: int) -> str:
        """That this rank does not answer, and which others do not either."""
        others = set(range(self.link.size)) - {self.link.rank, rank} - self._answers.keys() - self.departed.keys()
        too = f" (nor does rank {', '.join(map(str, sorted(others)))})" if others else ""
        return f"rank {rank} at the root does not answer{too}: {_SILENT}"

    def _chain(self, peer: int, what: str) -> Sequence[str]:
        links, seen = [f"rank {self.link.rank} waits for {what}"], {self.link.rank}
        while True:
            if peer in self.departed:
                return [*links, self.departed[peer]]
            if peer in seen:
                return [*links, f"and so on from rank {peer}: a circle"]
            seen.add(peer)
            if peer not in self._answers:
                return [*links, self._silence(peer)]
            awaited, words = self._answers[peer]
            if awaited < 0:
                return [*links, f"rank {peer} at the root {words}"]
            links.append(f"rank {peer} waits for {words}")
            if awaited not in self.link.world_ranks:
                return [*links, f"which has no part in {self.name}"]
            peer = self.link.world_ranks.index(awaited)

    def missed(self) -> list[int]:
        """Those who have not said that they are gone, by their numbers among all ranks that MPI started."""
        others = set(range(self.link.size)) - {self.link.rank} - self.gone
        return [self.link.world_ranks[rank] for rank in sorted(others)]

    def can_finish(self) -> bool:
        """Whether something is in flight here that may end without new calls of this rank."""
        with self.engine.lock:
            return any(
                task.can_finish() and self.missing(task.begins, task.waits_for()) is None
                for task in self.active.values()
            )

    def close(self) -> None:
        """Stop listening."""
        with self.engine.lock:
            if self in self.engine.channels:
                self.engine.channels.remove(self)
