"""Control messages of one communicator: a rank reports a failure or its end, or asks which rank waits for which."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from time import perf_counter, sleep
from typing import Any, NamedTuple

from fompi.base.errors import FompiError, MismatchError, PeerError, text_of
from fompi.base.layout import Sizes, integer
from fompi.engine.engine import Engine
from fompi.engine.tasks import ANYONE, CONTROL, Listener, Sent, Task
from fompi.mpi.link import ANSWER_SECONDS, NO_ANSWER, Link

CALL_BITS = 24
"""The bits of the stamp of a bound call that count the calls of its operation."""

LAST_CALL = (1 << CALL_BITS) - 1


def _series(stamp: int) -> int:
    """The series of a call: all unbound calls, or all calls of one bound operation. Its stamps increase with time."""
    return stamp >> CALL_BITS if stamp >> 62 else 0


FAILED, ACKNOWLEDGED, FATAL, LEFT, GONE, DYING, ASK, ANSWER, COMPARE, DIFFERS, STOPPED, ENDED, FELL = range(13)
"""The kinds of control messages.

| kind           | the sender                                                                             |
|----------------|----------------------------------------------------------------------------------------|
| `FAILED`       | a kernel of this call has failed; the messages of the call still move                  |
| `ACKNOWLEDGED` | has received `FAILED`                                                                  |
| `FATAL`        | has abandoned this call; its messages do not move any more                             |
| `LEFT`         | exits normally: it starts no new call                                                  |
| `GONE`         | exits normally: it also finishes no call any more                                      |
| `DYING`        | exits because of an error, and will print its traceback                                |
| `ASK`          | asks which rank the receiver waits for                                                 |
| `ANSWER`       | answers `ASK`; the stamp field holds the world rank that it waits for                  |
| `COMPARE`      | waits for the receiver in this bound call; the text says its label and its counts      |
| `DIFFERS`      | has abandoned this call, because ranks have called it with other labels or counts      |
| `STOPPED`      | has ended the work in the text by an error: it starts no new call that belongs to it   |
| `ENDED`        | has ended the section of calls with this key, or answers: counts in `Ended`            |
| `FELL`         | ends because of the error in the text: it finishes no call, and waits for nobody       |
"""

_HEADER = struct.Struct("<iqiiI")  # kind, stamp, sender, the rank that wrote the text, bytes of the text

_NBYTES = 2048
"""The size of a control message. A longer text is cut off."""

MOST_MARKS = 128
"""At most this many labels and counts are remembered. Calls before them are not compared."""

ORDINAL_BITS = 20
"""The key of a section: its first call, and in the low bits which one it is of shared sections before that call."""


class Ended(NamedTuple):
    """How far a rank has come in a section of calls (`fompi.parallel.section`), as it tells one other rank.

    `calls`: its last call. `sent` and `received`: the messages of strategies that it has begun to send to that rank, or
    to receive from it. `words` say why it has ended the section, and `origin` is the world rank of the first error.
    Without words it has not.
    """

    calls: int
    sent: int
    received: int
    origin: int = -1
    words: str = ""

    def encoded(self) -> str:
        return f"{self.calls} {self.sent} {self.received} {self.origin}\n{self.words}"

    @staticmethod
    def decoded(text: str) -> Ended:
        counts, _, words = text.partition("\n")
        calls, sent, received, origin = map(int, counts.split())
        return Ended(calls, sent, received, origin, words)


class Channel:
    """The control messages of one communicator.

    A rank that has `departed` starts no new call. A rank that is `gone` does not finish a call either.
    """

    def __init__(self, link: Link, engine: Engine, name: str):
        self.link, self.engine, self.name = link, engine, name
        self.timeout: float | None = None  # seconds without progress after which a call fails; None: FOMPI_TIMEOUT
        self.active: dict[int, Task] = {}  # stamp -> the task of that call
        self.begun: dict[int, int] = {}  # series of calls -> the stamp of the last call that began on this rank
        self.failures: dict[int, tuple[FompiError, bool]] = {}  # stamp -> (error, fatal), before the call began here
        self.departed: dict[int, str] = {}  # rank -> what it said when it left
        self.silent: set[int] = set()  # ranks that have not answered at a deadline
        self.in_library = [0]  # how many collectives of `fompi.mpi.Comm` the MPI library has begun here
        self.left_at: dict[int, int] = {}  # rank -> the same there, when it left
        self.gone: set[int] = set()
        self.fallen: set[int] = set()  # ranks that are gone by an error, which their parent reports
        self.is_left = False  # True once this rank has left a `with` block by an error; others may have closed
        self.dying: set[int] = set()
        self.stopped: dict[int, tuple[str, str]] = {}  # rank -> the work that it has stopped, and why
        self.section: Any = None  # the section of calls that this rank is in (`fompi.parallel.section`)
        self.ended: dict[int, dict[int, Ended]] = {}  # key of a section -> rank -> how far that rank has come
        self.lost: PeerError | None = None  # another rank has ended that section: waits end with this error
        self.left: Any = None  # the section that this rank has left last
        self.ending: Any = None  # the section that has ended by an error, until the counts of all ranks are here
        self.owed: Any = None  # the section that another rank has ended after this one had left it: an error is due
        self.comm: Any = None  # the Communicator
        self.shared = -1, 0  # how many shared sections this rank has begun since this call
        self.broken: BaseException | None = None  # why a call was abandoned with messages in flight
        self.asking = False  # True while `explain` waits for answers
        self.marks: dict[int, tuple[Any, Sizes | None]] = {}  # stamp -> label and counts, of the last marked calls
        self.forgets_marks = False  # True once `marks` was full
        self._answers: dict[int, tuple[int, str]] = {}
        self._inbox = bytearray(_NBYTES)
        self._sent = Sent()
        engine.channels.append(self)

    def send(self, dest: int, kind: int, stamp: int, text: str = "", origin: int | None = None) -> None:
        """Send a control message. `origin` is the rank that wrote `text`, if it is not this rank."""
        encoded, rank = text.encode()[: _NBYTES - _HEADER.size], self.link.rank
        message = _HEADER.pack(kind, stamp, rank, rank if origin is None else origin, len(encoded)) + encoded
        try:
            request = self.link.isend(message, dest, CONTROL)
        except self.link.error:  # some networks notice that the process is gone
            self.gone.add(dest)
        else:
            self.engine.post(request, self._sent, 0)

    def send_all(self, kind: int, stamp: int, text: str = "") -> None:
        """Send a control message to all other ranks. Ranks that have departed still receive until all are gone."""
        with self.engine.lock:
            for peer in range(self.link.size):
                if peer != self.link.rank:
                    self.send(peer, kind, stamp, text)

    def leave(self) -> None:
        """Tell the other ranks that this one starts no new call."""
        words = f"rank {self.link.rank} has ended; its last call was {self.engine.last_call}"
        self.send_all(LEFT, self.in_library[0], words)

    def go(self) -> None:
        """Tell them that it finishes none any more, either."""
        self.send_all(GONE, 0)

    def begin(self, stamp: int, task: Task) -> None:
        """From now on `task` does the call `stamp`."""
        self.active[stamp] = task
        self.begun[_series(stamp)] = stamp

    def receive(self) -> bool:
        """Take in all control messages that have arrived. False: none had.

        It probes, because MPICH over UCX never completes a posted receive from any source.
        """
        received = False
        for rank, why in self.link.lost():
            self.departed.setdefault(rank, f"rank {rank} is lost: {why}")
            self.gone.add(rank)
            self.fallen.add(rank)
            received = True
        while self.link.size > 1 and (message := self.link.improbe(self.link.any_source, CONTROL)) is not None:
            message.Recv(self._inbox)
            self._handle()
            received = True
        return received

    def _handle(self) -> None:
        """Act on the message in the inbox."""
        kind, stamp, sender, origin, count = _HEADER.unpack_from(self._inbox)
        text = bytes(self._inbox[_HEADER.size : _HEADER.size + count]).decode(errors="replace")
        if kind in (FAILED, FATAL, DIFFERS):
            task = self.active.get(stamp)
            error = MismatchError(text) if kind == DIFFERS else PeerError(text, origin)
            if kind != FAILED:
                self.broken = self.broken or error
            if task is not None and kind != FAILED:
                task.abandon(error)
            elif not task.poison(error, sender) if task is not None else stamp > self.begun.get(_series(stamp), 0):
                self.failures[stamp] = (error, kind != FAILED)  # the call has not begun on this rank
            if kind == FAILED:
                self.send(sender, ACKNOWLEDGED, stamp)
        elif kind == COMPARE:
            self._compare(stamp, sender, text)
        elif kind == ACKNOWLEDGED:
            if stamp in self.active:
                self.active[stamp].acknowledged(sender)
        elif kind in (LEFT, FELL):
            self.departed[origin], self.left_at[origin] = text, stamp
            if kind == FELL:
                self.gone.add(origin)
                self.fallen.add(origin)
        elif kind in (GONE, DYING):
            (self.gone if kind == GONE else self.dying).add(origin)
        elif kind == STOPPED:
            work, _, why = text.partition("\n")
            self.stopped[origin] = work, why
        elif kind == ENDED:
            self._note_end(stamp, sender, Ended.decoded(text))
        elif kind == ASK:
            self.send(origin, ANSWER, *self._answer())
        else:
            self._answers[origin] = (stamp, text)

    def _note_end(self, key: int, sender: int, ended: Ended) -> None:
        """Rank `sender` has ended a section by an error, or says how far it has come. Ranks not yet in it answer."""
        self.ended.setdefault(key, {})[sender] = ended
        for section in (self.section, self.left):
            if section is not None and section.keys.get(self) == key:
                section.look()
                break
        else:
            if ended.words:
                calls, sent, received = self.comm.begun_with(sender)
                first = -1 if key % (1 << ORDINAL_BITS) else key >> ORDINAL_BITS
                self.send(sender, ENDED, key, Ended(max(calls, first), sent, received).encoded())
        if self.ending is not None:
            self.ending.settle(self)

    def mark(self, stamp: int, label: Any, sizes: Sizes | None = None) -> None:
        """Note the label and the counts of a call that begins."""
        self.marks[stamp] = label, sizes
        if len(self.marks) > MOST_MARKS:
            self.forget_marks()

    def forget_marks(self) -> None:
        """Forget the older half of the labels and counts."""
        self.marks = dict(list(self.marks.items())[len(self.marks) // 2 :])
        self.forgets_marks = True

    def compare(self, stamp: int, peer: int) -> None:
        """Ask `peer`, for which the bound call `stamp` waits, to compare its label and its counts."""
        with self.engine.lock:
            self.send(peer, COMPARE, stamp, self._mark_in_words(stamp))

    def _mark_in_words(self, stamp: int) -> str:
        label, sizes = self.marks.get(stamp, (None, None))
        words = [] if label is None else [f"label={str(label) if integer(label) is None else integer(label)!r}"]
        if sizes is not None:
            words.append(f"counts {[list(row) for row in sizes.pairs] or list(sizes.rows)}")
        return ", ".join(words) or "neither label nor counts"

    def _compare(self, stamp: int, sender: int, theirs: str) -> None:
        """Rank `sender` waits for this rank in a bound call. End it on all ranks if their labels or counts differ."""
        own = self._mark_in_words(stamp)
        unknown = self.forgets_marks and stamp not in self.marks
        if stamp > self.begun.get(_series(stamp), 0) or own == theirs or unknown:
            return
        rank, call, operation = self.link.rank, stamp & LAST_CALL, stamp >> CALL_BITS & (1 << 38) - 1
        error = MismatchError(
            f"the ranks disagree in call {call} of bound operation {operation} of {self.name}: "
            f"rank {sender} calls it with {theirs}, rank {rank} with {own}"
        )
        self.broken = self.broken or error
        self.send_all(DIFFERS, stamp, str(error))
        for other, task in list(self.active.items()):
            if _series(other) == _series(stamp):  # this rank may be one call ahead
                task.abandon(error)

    def _answer(self) -> tuple[int, str]:
        """The world rank that this rank waits for, and what for, in words. -1: it waits for no single rank."""
        innermost = self.engine.waiting[-1:]  # one operation, since other threads begin and end waits
        if not innermost:
            if self.engine.expired is not None:
                expired_at, where, what = self.engine.expired
                if perf_counter() - expired_at < 2 * ANSWER_SECONDS:  # ranks in a circle give up at about the same time
                    return self._awaited(where, what)
            return -1, f"does not wait in fompi; its last call was {self.engine.last_call}"
        ((task, channel),) = innermost
        awaited = task.waits_for()
        if awaited is None:
            return -1, "works in fompi"
        return self._awaited(channel, awaited)

    def _awaited(self, channel: Listener, awaited: tuple[int, str]) -> tuple[int, str]:
        """The answer of a rank that waits for `awaited` on `channel`."""
        if awaited[0] == ANYONE:
            return ANYONE, f"waits for {awaited[1]}"
        awaited_rank = channel.link.world_ranks[awaited[0]]
        where = "" if channel is self else f" (on {channel.name}, where that is world rank {awaited_rank})"
        return awaited_rank, awaited[1] + where

    def fail(self, task: Task, error: Exception) -> None:
        """End `task` with `error`, here and on all other ranks. The communicator cannot be used any more."""
        with self.engine.lock:
            stamp = getattr(task, "stamp", None)
            if stamp is not None:
                self.broken = self.broken or error
                self.send_all(FATAL, stamp, f"rank {self.link.rank} abandoned the call: {text_of(error)}")
            task.abandon(error)

    def absent_peer(self, awaits_start: bool, awaited: tuple[int, str] | None) -> tuple[int, str] | None:
        """The awaited rank, if it has left and will not send what is awaited, and why."""
        with self.engine.lock:  # the helper thread receives control messages, too
            left = self.departed if awaits_start else self.gone
            absent = {rank: self.departed.get(rank, f"rank {rank} is gone") for rank in left}
            if awaits_start:
                absent |= {rank: why for rank, (work, why) in self.stopped.items() if work in self.engine.works}
        if awaited is None or not absent:
            return None
        rank = min(absent) if awaited[0] == ANYONE else awaited[0]
        return (rank, absent[rank]) if rank in absent else None

    def absent_from(self, name: str, number: int) -> PeerError | None:
        """An error if a rank has left before the collective `number` of the MPI library, `name`, which waits for it."""
        self.engine.receive_control()
        for rank, last in list(self.left_at.items()):
            if last < number:
                words = f"rank {self.link.rank} waits for rank {rank} to start {name} of the MPI library"
                return PeerError(f"{words}, but {self.departed[rank]}", rank)
        return None

    def explain(self, task: Task) -> str:
        """Which rank waits for which, from this rank to the root cause. Asks all other ranks."""
        self.asking = True
        try:
            awaited = task.waits_for()
            limit = f"{self.engine.timeout:g} s (FOMPI_TIMEOUT)" if self.timeout is None else f"{self.timeout:g} s"
            if awaited is None:
                return f"rank {self.link.rank} made no progress for {limit}"
            end = perf_counter() + min(ANSWER_SECONDS, self.timeout or ANSWER_SECONDS)
            self.engine.expired = end, self, awaited
            self._answers.clear()
            self.send_all(ASK, 0)
            expected = self.link.size - 1 - len(self.departed)
            while perf_counter() < end and len(self._answers) < expected:
                if not self.engine.progress() and not self.engine.receive_control():
                    sleep(1e-3)
            self.silent = {*range(self.link.size)} - {self.link.rank} - self._answers.keys() - self.departed.keys()
            chain = self._first_absent(awaited[1]) if awaited[0] == ANYONE else self._chain(*awaited)
            return f"no progress for {limit}: " + "; ".join(chain)
        finally:
            self.asking = False

    def _first_absent(self, what: str) -> Sequence[str]:
        """The first rank that has not started `what`. All ranks must start it."""
        first = f"rank {self.link.rank} waits for {what}"
        for rank in range(self.link.size):
            if rank == self.link.rank:
                continue
            if rank in self.departed:
                return [first, self.departed[rank]]
            if rank not in self._answers:
                return [first, self._no_answer(rank)]
            awaited, words = self._answers[rank]
            if words != f"waits for {what}":
                return [first, f"root cause: rank {rank} {words}" if awaited < 0 else f"rank {rank} waits for {words}"]
        return [first, "all ranks wait for it: the MPI library makes no progress"]

    def _no_answer(self, rank: int) -> str:
        """That this rank does not answer, and which other ranks do not answer either."""
        others = self.silent - {rank}
        also = f" (nor does rank {', '.join(map(str, sorted(others)))})" if others else ""
        return f"root cause: rank {rank} does not answer{also}: {NO_ANSWER}"

    def _chain(self, peer: int, what: str) -> Sequence[str]:
        """Follow the answers from rank to rank."""
        links, seen = [f"rank {self.link.rank} waits for {what}"], {self.link.rank}
        while True:
            if peer in self.departed:
                return [*links, self.departed[peer]]
            if peer in seen:
                return [*links, f"rank {peer} is in this chain already: these ranks wait for each other in a circle"]
            seen.add(peer)
            if peer not in self._answers:
                return [*links, self._no_answer(peer)]
            awaited, words = self._answers[peer]
            if awaited < 0:
                return [*links, f"root cause: rank {peer} {words}"]
            links.append(f"rank {peer} waits for {words}")
            if awaited not in self.link.world_ranks:
                return [*links, f"world rank {awaited} is not in {self.name}"]
            peer = self.link.world_ranks.index(awaited)

    def not_gone(self) -> list[int]:
        """The world ranks of all other ranks that have not said that they are gone."""
        others = set(range(self.link.size)) - {self.link.rank} - self.gone
        return [self.link.world_ranks[rank] for rank in sorted(others)]

    def can_finish(self) -> bool:
        """True if a call is in flight here that can finish without a new call of this rank."""
        with self.engine.lock:
            return any(
                task.can_finish() and self.absent_peer(task.awaits_start, task.waits_for()) is None
                for task in self.active.values()
            )

    def close(self) -> None:
        """Receive no more control messages."""
        with self.engine.lock:
            if self in self.engine.channels:
                self.engine.channels.remove(self)
