"""The port: which message of this rank leaves next, if axes of a mesh share the links (`Mesh(priority=...)`).

`Port` is a value, without MPI, lock or clock. `fompi.engine.in_flight` drives it, and tells it the time.

Urgency 0 is the most urgent. These are the rules:

1. Messages of urgency 0 leave at once. The others leave in parts.
2. A part waits while a more urgent message moves, and QUIET_SECONDS longer, because the next one often follows. The
   most urgent goes first, then the one that came first.
3. At most `window` bytes of the others are in flight: an urgent message waits for no more than these on the link.
4. A message moves if one of its parts has left or arrived in the last `HOLD_SECONDS`. Otherwise it probably waits for
   its receiver. Then it holds no other message back, and sends no further part until its receiver has taken the last.
   All parts of an urgent message leave at once, and MPI may complete them together: so it has `PATIENCE` times as long
   as its bytes have taken on this link at best, if that is more.
5. A part that takes much longer than others did shows that the link is busy with what this rank does not see: urgent
   bytes that MPI has handed to the kernel, or those of other ranks. If urgent messages have moved just now, the others
   pause, longer each time (as a scavenger does, LEDBAT, RFC 6817), until urgent ones have not moved for a while.
6. Each urgency sends at least one part per `STARVE_SECONDS`, even if more urgent ones move all the time.

No wait is for ever, because of 4 and 6: a receiver that first waits for a held message gets it. An MPI library cannot
say whether bytes move or a receiver is late, so 4 needs a time. In it a link of 170 Mbit/s carries 1 MiB.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

from fompi.engine.tasks import Task

HOLD_SECONDS = 0.05
"""A message without progress holds back others for this long."""

QUIET_SECONDS = 0.01
"""After a more urgent message others wait this long for the next one.

A longer time delays urgent messages less, and leaves gaps between them unused. With tensor and data parallelism on a
full link (the row "data beside tensor parallelism" of the suite `parallel`) 10 ms has the shortest step; from 20 ms on
nothing is delayed.
"""

PATIENCE = 2.0
"""An urgent message holds back others for this many times what its bytes in flight take at best."""

STARVE_SECONDS = 0.5
"""An urgency is held back for this long, if more urgent messages move all the time."""

PART_NBYTES, PART_SECONDS = 64 << 10, 1e-3
"""Messages are cut into parts of this size, or of what a link carries in 1 ms if FOMPI_MACHINE says more."""

URGENT_PARTS = 16
"""Messages of urgency 0 have parts of this many times the size. They show whether a long message moves."""

LEAST_WINDOW, MOST_WINDOW = PART_NBYTES, 128 * PART_NBYTES
"""The window doubles if all of it was through when a poll came, because then the link was idle.

It is the least again once a message of urgency 0 finds others on the link, which it has to wait for.
"""

GROW_SECONDS = 5e-3
"""The window does not grow if the last part took longer, unless nothing more urgent has moved for a while.

An urgent message would wait as long.
"""


SLOW, DRIFT = 3.0, 1.01
"""A part is slow if it takes this many times as long as the fastest one. That time grows by a part of each part's."""

LEAST_PAUSE, MOST_PAUSE = 5e-3, 0.2
"""The pause after a slow part, in seconds. It doubles with each slow part."""


def part_nbytes(urgency: int, bandwidth: float) -> int:
    """The most bytes of a part of a message. Both ends of the message must cut it at the same places.

    `bandwidth` is that of the links in bytes per second, or 0 if it is not known.
    """
    nbytes = max(PART_NBYTES, int(bandwidth * PART_SECONDS))
    return nbytes if urgency else URGENT_PARTS * nbytes


class Flight(NamedTuple):
    """A part in flight."""

    nbytes: int
    left_at: float
    ahead: int  # bytes that were in flight when it had left, this part included: as urgent ones, or as the others


class Queued(Task):
    """A message that leaves in parts: `task.posted(key)` when the first leaves, `task.completed(key)` after the last.

    `start(part)` starts to send a part. Messages with one `stream` leave one after the other.
    """

    def __init__(
        self, urgency: int, stream: Hashable, parts: deque[Any], start: Callable[[Any], Any], task: Task, key: int
    ):
        self.urgency, self.stream, self.parts, self.start = urgency, stream, parts, start
        self.task, self.key = task, key
        self.flying: deque[Flight] = deque()  # the parts in flight
        self.moved_at = 0.0  # when it was offered, or a part has left or arrived
        self.port: Port | None = None  # where it waits
        self.is_posted = False

    @property
    def belongs_to(self) -> Task:
        return self.task.belongs_to

    def begin(self) -> Any:
        """Send the next part. Returns the request."""
        if not self.is_posted:
            self.is_posted = True
            self.task.posted(self.key)
        return self.start(self.parts.popleft())

    def completed(self, key: int) -> None:
        """One part is through."""
        now = self.task.moved_at = perf_counter()
        if self.port is not None:
            self.port.done(self, now)
        if not self.parts and not self.flying:
            self.task.completed(self.key)

    def broke(self, error: Exception) -> None:
        self.task.broke(error)


class Port:
    """The messages of this rank that have an urgency. `held` is how many of them have parts that have not left."""

    def __init__(self) -> None:
        self.held = 0
        self.window = LEAST_WINDOW
        self._queues: dict[int, list[Queued]] = {}  # by urgency, in their order: messages with parts to send
        self._flying: list[Queued] = []  # messages with parts in flight
        self._left_at: dict[int, float] = {}  # by urgency: when a part has left
        self._moved_at: dict[int, float] = {}  # by urgency: when a part has left or arrived
        self._fastest = inf  # seconds per byte of the fastest part, of those that are not of urgency 0
        self._pace = inf  # the same of those of urgency 0
        self._pause, self._resume_at = LEAST_PAUSE, 0.0

    def add(self, message: Queued, now: float) -> None:
        """`message` wants to leave."""
        message.port, message.moved_at = self, now
        if message.urgency not in self._queues:
            self._queues = dict(sorted({**self._queues, message.urgency: []}.items()))
        self._queues[message.urgency].append(message)
        self.held += 1
        if not message.urgency and self._in_window(now):
            self.window = LEAST_WINDOW

    def next(self, now: float) -> Queued | None:
        """The message whose next part leaves now: the caller must send it. None: no part may leave yet."""
        for urgency, queue in self._queues.items():
            message = next(self._able(queue, now), None)
            if message is None:
                continue
            overdue = now - max(self._left_at.get(urgency, 0.0), message.moved_at) > STARVE_SECONDS
            pauses = now < self._resume_at and not self._is_alone(urgency, now)
            may_leave = not pauses and self._has_room(message, now) and not self._is_held(urgency, now)
            if not urgency or overdue or may_leave:
                self._leave(message, now)
                return message
        return None

    def done(self, message: Queued, now: float) -> None:
        """A part of `message` is through."""
        if message not in self._flying:  # it was forgotten
            return
        urgency = message.urgency
        part = message.flying.popleft()
        message.moved_at = self._moved_at[urgency] = now
        if not message.flying:
            self._flying.remove(message)
        if not urgency:
            self._pace = min(DRIFT * self._pace, (now - part.left_at) / max(part.ahead, 1))
            return
        is_alone = self._is_alone(urgency, now)
        self._note(part, now, is_alone)
        was_idle = not self._in_window(now) and (is_alone or now - part.left_at <= GROW_SECONDS)
        if was_idle and self._queues[urgency] and not self._is_held(urgency, now):
            self.window = min(2 * self.window, MOST_WINDOW)

    def _note(self, part: Flight, now: float, is_alone: bool) -> None:
        """Pause if `part` was slow, unless nothing more urgent has moved for a while."""
        seconds = (now - part.left_at) / max(part.ahead, 1)
        self._fastest = min(DRIFT * self._fastest, seconds)
        if is_alone or seconds <= SLOW * self._fastest:
            self._pause, self._resume_at = LEAST_PAUSE, 0.0
        else:
            self._resume_at = now + self._pause
            self._pause, self.window = min(2 * self._pause, MOST_PAUSE), LEAST_WINDOW

    def forget(self, task: Task) -> None:
        """Parts of the messages of `task` that have not left never leave, and those in flight hold nothing back."""
        for urgency, queue in self._queues.items():
            self._queues[urgency] = [message for message in queue if message.belongs_to is not task]
        self._flying = [message for message in self._flying if message.belongs_to is not task]
        self.held = sum(map(len, self._queues.values()))

    def _leave(self, message: Queued, now: float) -> None:
        """Note that the first part of `message` leaves."""
        urgency = message.urgency
        if not message.flying:
            self._flying.append(message)
        nbytes = message.parts[0].nbytes
        message.flying.append(Flight(nbytes, now, nbytes + (self._in_window(now) if urgency else self._urgent())))
        message.moved_at = self._left_at[urgency] = self._moved_at[urgency] = now
        if len(message.parts) == 1:
            self._queues[urgency].remove(message)
            self.held -= 1

    def _able(self, queue: list[Queued], now: float) -> Iterator[Queued]:
        """The messages of one urgency that wait neither for their receiver nor for another one in their stream."""
        streams = set()
        for message in queue:
            if message.stream not in streams and (not message.urgency or _moves(message, now) or not message.flying):
                yield message
            streams.add(message.stream)

    def _is_held(self, urgency: int, now: float) -> bool:
        """True while a more urgent message moves, and shortly after."""
        if any(now - at <= QUIET_SECONDS for level, at in self._moved_at.items() if level < urgency):
            return True
        return any(
            message.urgency < urgency and now - self._moved_at[message.urgency] <= self._patience(message)
            for message in self._flying
        )

    def _is_alone(self, urgency: int, now: float) -> bool:
        """True if nothing more urgent has moved for a while."""
        return all(now - at > HOLD_SECONDS for level, at in self._moved_at.items() if level < urgency)

    def _patience(self, message: Queued) -> float:
        """How long the message holds back others although nothing of it moves."""
        if message.urgency or self._pace == inf:
            return HOLD_SECONDS
        return min(max(HOLD_SECONDS, PATIENCE * self._pace * self._urgent()), STARVE_SECONDS)

    def _urgent(self) -> int:
        """The bytes in flight of urgency 0."""
        return sum(part.nbytes for message in self._flying if not message.urgency for part in message.flying)

    def _in_window(self, now: float) -> int:
        """The bytes in flight of messages that move and are not of urgency 0."""
        moving = (message for message in self._flying if message.urgency and _moves(message, now))
        return sum(part.nbytes for message in moving for part in message.flying)

    def _has_room(self, message: Queued, now: float) -> bool:
        flying = self._in_window(now)
        return not flying or flying + message.parts[0].nbytes <= self.window


def _moves(message: Queued, now: float) -> bool:
    """False if nothing of it has left or arrived for a while: it may wait for its receiver."""
    return now - message.moved_at <= HOLD_SECONDS
