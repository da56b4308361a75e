"""One call of a compiled program, in flight.

The loop is the one of the design: start the next op of each lane, wait only for what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from time import perf_counter
from typing import Any

from fompi.backends.base import Token
from fompi.base.errors import PeerError, StateError
from fompi.base.layout import Extents, nbytes
from fompi.engine.communicator import Communicator
from fompi.engine.control import FAILED
from fompi.engine.engine import EAGER_NBYTES
from fompi.engine.tasks import ANYONE, Task
from fompi.plans.dependencies import track
from fompi.plans.plan import MESSAGE_BITS
from fompi.runtime.compiled import COMPUTE, NATIVE, RECV, SEND, Compiled
from fompi.traces.trace import Event, Interval, Trace


def _nothing() -> None:
    """In place of a kernel, once the call has failed."""


class Run(Task):
    """One call of a compiled program. After an error it goes on without kernels, so that every message is taken in."""

    # What few calls need stands here, and is replaced, not changed: making a Run is part of what a small call costs.
    tokens: dict[int, Token] = {}  # noqa: RUF012
    unready: dict[tuple[str, int], list[int]] = {}  # noqa: RUF012
    is_small = False
    natives_held: Sequence[int] = ()
    takes_turns = False
    told: frozenset[int] = frozenset()  # the ranks that we told of our error
    aware: frozenset[int] = frozenset()  # those that know
    held: Sequence[int] = ()  # what would take something worthless to others
    then: Callable[[], None] | None = None
    started = 0.0

    def __init__(self, compiled: Compiled, comm: Communicator, stamp: int, slot: int):
        self.compiled, self.comm, self.stamp = compiled, comm, stamp
        self.tag = slot << MESSAGE_BITS
        self.waits = list(compiled.waits_for)
        self.left = len(compiled.ops)
        self.ready: list[int] = []
        self.ready_merges: list[int] = []
        self.begun = [0.0] * self.left
        self.ended = [0.0] * self.left
        self.actions: list[Any] = []
        self.natives_left, self.forwards = compiled.natives, compiled.forwards
        if compiled.asynchronous:
            self.tokens = {}

    @property
    def title(self) -> str:
        return f"{self.compiled.title} ({self.comm.call_name(self.stamp)})"

    def start(
        self,
        actions: list[Any],
        unready: Mapping[tuple[str, int], list[int]] | None = None,
        is_long: bool = False,
        is_small: bool = False,
    ) -> None:
        """Begin all that can begin. `unready`: parts of inputs that `ready()` will announce, and who reads them.

        `is_long`: somebody must move messages while kernels run. `is_small`: sums and copies are done at once.
        """
        channel = self.comm.channel
        self.actions, self.is_small = actions, is_small
        self.started = self.touched = perf_counter()
        channel.begin(self.stamp, self)
        if self.stamp in channel.failures:
            self.error, fatal = channel.failures.pop(self.stamp)
            self.failed = perf_counter()
            if fatal:
                self.abandon(self.error)
                return
        try:
            self._start(unready)
        except Exception as error:  # of MPI
            channel.fail(self, error)
            raise
        self.is_long = is_long and self.comm.size > 1
        if self.is_long:
            self.comm.engine.assist()  # now that there is something in flight: a helper without work goes to sleep

    def _start(self, unready: Mapping[tuple[str, int], list[int]] | None) -> None:
        first = self.compiled.first
        if unready:
            self.unready = dict(unready)
            for ops in unready.values():
                for i in ops:
                    self.waits[i] += 1
            first = [i for i in first if self.waits[i] == 0]
        if self.takes_turns and not self.natives_left:
            self.comm.end_turn(self.stamp)
        self._begin(list(first))
        if self.left == 0:
            self._finish()

    def ready_part(self, name: str, block: int) -> None:
        free = []
        for i in self.unready.pop((name, block), ()):
            self.waits[i] -= 1
            if self.waits[i] == 0:
                free.append(i)
        self._begin(free)
        if self.left == 0 and not self.finished:
            self._finish()

    def _begin(self, queue: list[int]) -> None:
        """Start these ops, and all that they release by starting (or by being done at once)."""
        compiled, engine, link = self.compiled, self.comm.engine, self.comm.link
        kinds, peers, numbers, on_start, waits = (
            compiled.kinds, compiled.peers, compiled.numbers, compiled.on_start, self.waits,
        )  # fmt: skip
        if compiled.asynchronous:  # kernels first: to enqueue one takes less than to begin a message
            queue.sort(key=lambda i: kinds[i] != COMPUTE)
        at = 0
        while at < len(queue):
            i = queue[at]
            at += 1
            kind = kinds[i]
            if kind == COMPUTE:
                if compiled.asynchronous:
                    self._enqueue(i, queue)
                    continue
                if self.is_small and compiled.merges[i]:
                    queue.extend(self._merge(i))
                    continue
                if not (self.ready or self.ready_merges):
                    engine.kernels_ready(self)
                heappush(self.ready_merges if compiled.merges[i] else self.ready, i)
                continue
            if kind == NATIVE and not self._may_go_native(i):
                continue
            action = self.actions[i]
            if self.error is not None and action is not None and self._hold(i):
                continue
            self.begun[i] = perf_counter()
            if kind == NATIVE:
                engine.post(action(), self, i)
                self._native_begun()
            elif action is None:  # no rows: both ends know
                queue.extend(self._ended(i))
            elif kind == SEND:
                send = link.issend if compiled.is_paced and action.nbytes > EAGER_NBYTES else link.isend
                if action.nbytes > self.comm.most_nbytes:
                    self._post_parts(send, i)
                elif engine.sent(send(action, peers[i], self.tag + numbers[i]), action.nbytes, self, i):
                    queue.extend(self._ended(i))
            elif action.nbytes > self.comm.most_nbytes:
                self._post_parts(link.irecv, i)
            else:
                engine.post(link.irecv(action, peers[i], self.tag + numbers[i]), self, i)
            for j in on_start[i]:
                waits[j] -= 1
                if waits[j] == 0:
                    queue.append(j)

    def _post_parts(self, call: Callable[[Any, int, int], Any], i: int) -> None:
        """Send or receive what is too large for one message: both ends know, and those of one tag keep their order."""
        data, most, peer = self.actions[i], self.comm.most_nbytes, self.compiled.peers[i]
        tag = self.tag + self.compiled.numbers[i]
        parts = [data[at : at + most] for at in range(0, data.nbytes, most)]
        self.comm.engine.post_all([call(part, peer, tag) for part in parts], self, i)

    def _ended(self, i: int) -> list[int]:
        """Op i is done: the ops that may start now."""
        self.ended[i] = self.touched = perf_counter()
        self.left -= 1
        waits, free = self.waits, []
        for j in self.compiled.on_done[i]:
            waits[j] -= 1
            if waits[j] == 0:
                free.append(j)
        return free

    def completed(self, key: int) -> None:
        if self.finished:  # abandoned
            return
        free = self._ended(key)
        if key in self.tokens:
            token = self.tokens.pop(key)
            self.begun[key], self.ended[key] = token.begun, token.due
        if free:
            self._begin(free)
        if self.left == 0:
            self._finish()

    def take(self, merges_only: bool) -> tuple[int, Callable[[], object]] | None:
        """The next kernel: sums and copies first, since others wait for them, then in the order of the program."""
        if self.ready_merges:
            i = heappop(self.ready_merges)
        elif self.ready and not merges_only:
            i = heappop(self.ready)
        else:
            return None
        if not (self.ready or self.ready_merges):
            self.comm.engine.kernels_done(self)
        return i, self.actions[i] if self.error is None else _nothing

    def ran(self, key: int, begun: float, error: BaseException | None) -> None:
        self.begun[key] = begun
        if error is not None and not self.finished:
            self._kernel_failed(key, error)
        self.completed(key)

    def _merge(self, i: int) -> list[int]:
        """Do a small sum or copy here and now; the ops that may start then."""
        self.begun[i] = perf_counter()
        if self.error is None:
            try:
                self.actions[i]()
            except Exception as error:
                self._kernel_failed(i, error)
        return self._ended(i)

    def _enqueue(self, i: int, queue: list[int]) -> None:
        """Hand a kernel to the device, behind those that it follows; kernels that follow it may be enqueued now."""
        self.begun[i] = perf_counter()
        if self.error is None:
            try:
                token = self.actions[i]([self.tokens[j] for j in self.compiled.follows[i] if j in self.tokens])
            except Exception as error:
                self._kernel_failed(i, error)
            else:
                self.tokens[i] = token
                self.comm.engine.launched(token, self, i)
        for j in self.compiled.on_start[i]:
            self.waits[j] -= 1
            if self.waits[j] == 0:
                queue.append(j)
        if self.error is not None:
            queue.extend(self._ended(i))

    def _finish(self) -> None:
        self.comm.channel.active.pop(self.stamp, None)
        then, self.then = self.then, None
        try:
            if then is not None and not self.left:  # else it was given up
                then()
        finally:
            self.finished = True  # last: a thread that waits for it looks for what `then` has noted

    # -- the library's collectives: every rank must start them in one order, so unbound calls take turns, in theirs
    def _may_go_native(self, i: int) -> bool:
        if self.takes_turns and self.comm.turns[0] != self.stamp:
            self.natives_held = (*self.natives_held, i)
            return False
        return True

    def _native_begun(self) -> None:
        self.natives_left -= 1
        if self.takes_turns and self.natives_left == 0:
            self.comm.end_turn(self.stamp)

    def take_turn(self) -> None:
        held, self.natives_held = self.natives_held, ()
        self._begin(list(held))

    # -- errors
    def _kernel_failed(self, i: int, error: BaseException) -> None:
        """Tell the other ranks, then go on."""
        where = f"op {i}, {self.compiled.ops[i]}"
        error.add_note(f"fompi: on rank {self.comm.rank} in {self.title}, {where}")
        words = f"rank {self.comm.rank} failed in {self.title}, {where}: {type(error).__name__}: {error}"
        self.comm.channel.send_all(FAILED, self.stamp, words)
        self.told = frozenset(range(self.comm.size))
        self.poison(error, self.comm.rank)

    def poison(self, error: BaseException, sender: int) -> bool:
        """From now on only messages, so that this call ends everywhere; then `error`."""
        self.aware |= {sender}
        if self.error is None:
            self.error, self.failed = error, perf_counter()
        for name, block in list(self.unready):
            self.ready_part(name, block)
        return True

    def _hold(self, i: int) -> bool:
        """Hold op i back until who gets something worthless from it knows that. The rank that failed tells all."""
        kind, error = self.compiled.kinds[i], self.error
        if kind == SEND:
            ignorant = {self.compiled.peers[i]} - self.aware
        elif kind == NATIVE and not isinstance(error, PeerError):
            ignorant = set(range(self.comm.size)) - self.aware
        else:
            return False
        if isinstance(error, PeerError):
            for peer in ignorant - self.told:
                self.comm.channel.send(peer, FAILED, self.stamp, str(error), error.origin)
            self.told |= ignorant
        if ignorant:
            self.held = (*self.held, i)
        return bool(ignorant)

    def acknowledged(self, rank: int) -> None:
        self.aware |= {rank}
        held, self.held = self.held, ()
        self._begin(list(held))
        if self.left == 0 and not self.finished:
            self._finish()

    def abandon(self, error: BaseException) -> None:
        if self.ready or self.ready_merges:
            self.ready.clear()
            self.ready_merges.clear()
            self.comm.engine.kernels_done(self)
        self.unready = {}
        self.error = self.error or error
        self._finish()
        self.comm.end_turn(self.stamp)

    def broke(self, error: Exception) -> None:
        self.comm.channel.fail(self, error)

    def can_finish(self) -> bool:
        return not self.unready

    def waits_for(self) -> tuple[int, str] | None:
        for wanted in (RECV, SEND):
            for i, kind in enumerate(self.compiled.kinds):
                if kind == wanted and self.begun[i] and not self.ended[i]:
                    peer = self.compiled.peers[i]
                    verb = "to send" if kind == RECV else "to receive"
                    return peer, f"rank {peer} {verb} in {self.title}, op {i}, {self.compiled.ops[i]}"
        for i, kind in enumerate(self.compiled.kinds):
            if kind == NATIVE and self.begun[i] and not self.ended[i]:
                return ANYONE, f"all ranks to come to {self.title}, op {i}, {self.compiled.ops[i]}"
        return None

    # -- afterwards
    def elsewhere(self, returned_at: float | None) -> list[Interval]:
        """When the program did something else, since it had `returned_at` this call to itself (None: it stayed)."""
        return [] if returned_at is None else self.comm.engine.elsewhere(returned_at, self.touched, set(self.begun))

    def trace(self, extents: Extents) -> Trace:
        """What this rank did when, in this call. Raises StateError unless all of it was done."""
        if self.left:
            raise StateError(f"{self.title} is not finished: there is no trace yet")
        compiled, rank = self.compiled, self.comm.rank
        starts, shapes = compiled.sized(extents)
        events = []
        for i, op in enumerate(compiled.ops):
            moved = 0
            for place in compiled.places(i):
                buffer, start, stop, width = place
                rows = starts[buffer][stop] - starts[buffer][start] if buffer in starts else None
                dtype = compiled.buffers[buffer].dtype
                moved += nbytes(shapes[buffer], dtype) if rows is None else rows * width
            events.append(Event(rank, track(op), i, str(op), self.begun[i], self.ended[i], moved))
        return Trace("measured", self.title, tuple(events), progress=self.comm.engine.progress_mode)
