"""One call of a compiled program, in flight: how it begins, takes turns, fails, and what its trace says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

from fompi.backends.base import Token
from fompi.base.errors import PeerError, StateError, in_words
from fompi.base.layout import Extents, nbytes
from fompi.engine.control import FAILED
from fompi.engine.engine import Engine
from fompi.engine.tasks import ANYONE, Sent
from fompi.plans.dependencies import track
from fompi.plans.plan import MESSAGE_BITS
from fompi.runtime.compiled import COLLECTIVE, RECV, SEND
from fompi.runtime.dispatch import Dispatch
from fompi.traces.trace import Event, Interval, Trace

TAKE_BACK_SECONDS = 1.0
"""How long a call that was abandoned waits for its sends, if the memory goes away."""

COMPARE_SECONDS = 1.0
"""How often a call that waits compares its label and its counts with the awaited rank, which may not have begun yet."""


def enter(engine: Engine, backend: Any, all_wait: bool = True) -> tuple[Token | None, Exception | None]:
    """The token of what the program has enqueued on a device, or the error of the device.

    `all_wait`: all streams wait for it (`OnDevice.enter`). The error is that of the call: the other ranks must hear of
    it. Memory and events of kernels that are done go back.
    """
    engine.poll_kernels()
    try:
        return backend.enter() if all_wait else backend.entry(), None
    except Exception as error:
        return None, error


class Run(Dispatch):
    """One call of a compiled program on one rank."""

    # As in Dispatch: rebound, never mutated.
    takes_turns = False  # True for unbound calls
    held_collectives: Sequence[int] = ()  # collectives of the library that wait for the turn of this call
    held_ops: Sequence[int] = ()  # ops that would give other ranks worthless data before they know of the error
    notified: frozenset[int] = frozenset()  # the ranks to which this rank has sent its error
    informed: frozenset[int] = frozenset()  # the ranks that are known to know of an error
    marked = False  # True for a bound call with a label or counts
    awaits_token = False  # True until the previous rank is known to have the same mark
    given_up: Sequence[tuple[Any, int]] = ()  # requests of an abandoned call, with their ops
    held: object = None  # tensors of the program whose memory this call uses
    failed_here = False  # True if the error came from this rank, whatever its type
    compared = 0.0  # when this call last compared its mark with that of another rank
    started = 0.0  # when the call began, in seconds of perf_counter

    @property
    def title(self) -> str:
        return f"{self.compiled.title} ({self.comm.call_name(self.stamp)})"

    # -- the beginning
    def start(
        self,
        actions: list[Any],
        unready: Mapping[tuple[str, int], list[int]] | None = None,
        is_long: bool = False,
        is_small: bool = False,
        refusal: Exception | None = None,
        entry: Token | None = None,
        holds_all: bool = False,
    ) -> None:
        """Start all ops that can start. `actions` is what each op does (`Compiled.resolve`).

        `unready` maps the blocks of inputs that `ready_part` will announce to the ops that read them.
        `is_long`: messages must progress while the kernels of this call run.
        `is_small`: sums and copies run at once, in the thread that releases them.
        `refusal`: this rank cannot do the call, although all ranks have agreed to it. Its messages still move.
        `entry`: messages of device memory wait for it. Kernels do not: their streams wait.
        `holds_all`: messages of mirrors wait for it, too, because kernels of the last call may still use them.
        """
        channel = self.comm.channel
        self.actions, self.is_small = actions, is_small
        self.started = self.moved_at = perf_counter()
        channel.begin(self.stamp, self)
        if self.stamp in channel.failures:
            self.error, fatal = channel.failures.pop(self.stamp)
            self.failed_at = perf_counter()
            if fatal:
                self.abandon(self.error)
                return
        if refusal is not None and self.error is None:
            self.fail(refusal, "before its first op")
        try:
            self._start_first(unready, entry, holds_all)
        except Exception as error:  # MPI has failed
            channel.fail(self, error)
            raise
        self.is_long = is_long and self.comm.size > 1
        if self.is_long:
            self.comm.engine.wake_helper()  # after the first ops have started: without work the helper goes to sleep

    def _start_first(
        self, unready: Mapping[tuple[str, int], list[int]] | None, entry: Token | None, holds_all: bool
    ) -> None:
        first, compiled = self.compiled.first, self.compiled
        if entry is not None:
            held = compiled.is_message if holds_all else compiled.moves_device_memory
            self.hold(entry, [i for i in first if held(i)])
        if unready:
            self.unready = dict(unready)
            for ops in unready.values():
                for i in ops:
                    self.blockers[i] += 1
        if unready or entry is not None:
            first = [i for i in first if self.blockers[i] == 0]
        if self.takes_turns and not self.collectives_left:
            self.comm.end_turn(self.stamp)
        if self.marked and self.collectives_left and self.comm.size > 1:
            self._exchange_tokens()
        self.start_ops(list(first))
        if self.unfinished == 0:
            self.finish()
        elif self.paths is not None:
            self.end_for_program()

    # -- turns: all ranks must start the library's collectives in one order, so unbound calls start theirs in call order
    def has_turn(self, i: int) -> bool:
        if (self.takes_turns and self.comm.turns[0] != self.stamp) or self.awaits_token:
            self.held_collectives = (*self.held_collectives, i)
            return False
        return True

    def collective_started(self) -> None:
        self.collectives_left -= 1
        if self.takes_turns and self.collectives_left == 0:
            self.comm.end_turn(self.stamp)

    def take_turn(self) -> None:
        held, self.held_collectives = self.held_collectives, ()
        self.start_ops(list(held))

    def entered(self, key: int) -> None:
        held = self.held_entry.pop(key)
        for i in held:
            self.blockers[i] -= 1
        self.go_on([i for i in held if self.blockers[i] == 0])

    # -- marks: the collectives of the library have no tags. So a marked call sends a token round the ring before them
    def _exchange_tokens(self) -> None:
        rank, size, link, engine = self.comm.rank, self.comm.size, self.comm.link, self.comm.engine
        self.awaits_token, tag = True, self.tag + (1 << MESSAGE_BITS) - 1
        engine.post(link.irecv(bytearray(), (rank - 1) % size, tag), self, -1)
        engine.post(link.isend(b"", (rank + 1) % size, tag), Sent(), 0)

    def token_arrived(self) -> None:
        self.awaits_token = False
        self.take_turn()

    def stalled(self) -> None:
        now, awaited = perf_counter(), self.waits_for()
        if self.stamp >> 62 and awaited is not None and now - self.compared > COMPARE_SECONDS:
            self.compared = now
            peers = range(self.comm.size) if awaited[0] == ANYONE else awaited[:1]
            for peer in set(peers) - {self.comm.rank}:
                self.comm.channel.compare(self.stamp, peer)

    # -- errors
    def kernel_failed(self, i: int, error: BaseException) -> None:
        self.fail(error, "in what the program had enqueued" if i < 0 else f"op {i}, {self.compiled.ops[i]}")
        if self.paths is not None:
            self.paths.device.told()

    def kernel_failed_late(self, i: int, error: BaseException) -> None:
        """The other ranks need not know: all messages of this call have moved. They hear of it in the next call."""
        where = "what the program had enqueued" if i < 0 else f"op {i}, {self.compiled.ops[i]}"
        error.add_note(f"fompi: on rank {self.comm.rank} in {self.title}, {where}, after the call had returned")
        self.error, self.failed_at = error, perf_counter()

    def blame(self, i: int) -> None:
        if self.paths is not None and i in self.tokens:
            op = f"op {i}, {self.compiled.ops[i]}, of {self.title}"
            self.paths.device.blame(self.compiled.lanes[i][0], op)

    def fail(self, error: BaseException, where: str) -> None:
        """Send the error of this rank to all other ranks, then go on without kernels."""
        if not any(note.startswith("fompi: ") for note in getattr(error, "__notes__", ())):  # it may end several calls
            error.add_note(f"fompi: on rank {self.comm.rank} in {self.title}, {where}")
        text = f"rank {self.comm.rank} failed in {self.title}, {where}: {in_words(error)}"
        self.comm.channel.send_all(FAILED, self.stamp, text)
        self.notified, self.failed_here = frozenset(range(self.comm.size)), True
        self.poison(error, self.comm.rank)

    def poison(self, error: BaseException, sender: int) -> bool:
        """`sender` knows that this call failed. Run no kernel from now on, and raise `error` at the end.

        The messages of the call still move, so that the call ends on every rank.
        """
        self.informed |= {sender}
        if self.error is None:
            self.error, self.failed_at = error, perf_counter()
        for name, block in list(self.unready):
            self.ready_part(name, block)
        return True

    def is_held(self, i: int) -> bool:
        """True until all ranks that get worthless data from op `i` know of the error.

        The rank that failed has sent its error to all ranks. Every other rank passes the error on before it sends data.
        """
        kind, error = self.compiled.kinds[i], self.error
        if kind == SEND:
            uninformed = {self.compiled.peers[i]} - self.informed
        elif kind == COLLECTIVE and self.failed_here:
            uninformed = set(range(self.comm.size)) - self.informed
        else:
            return False
        if isinstance(error, PeerError) and not self.failed_here:
            for peer in uninformed - self.notified:
                self.comm.channel.send(peer, FAILED, self.stamp, str(error), error.origin)
            self.notified |= uninformed
        if uninformed:
            self.held_ops = (*self.held_ops, i)
        return bool(uninformed)

    def acknowledged(self, rank: int) -> None:
        self.informed |= {rank}
        held, self.held_ops = self.held_ops, ()
        self.start_ops(list(held))
        if self.unfinished == 0 and not self.finished:
            self.finish()

    def abandon(self, error: BaseException) -> None:
        if self.ready or self.ready_merges:
            self.ready.clear()
            self.ready_merges.clear()
            self.comm.engine.kernels_done(self)
        self.unready = {}
        self.error = self.error or error
        self.given_up = (*self.given_up, *self.comm.engine.give_up(self))
        self.comm.link.given_up += [*self.given_up, self.actions, self.held]
        self.finish()
        self.comm.end_turn(self.stamp)

    def broke(self, error: Exception) -> None:
        self.comm.channel.fail(self, error)

    def take_back(self) -> None:
        """Cancel the receives of an abandoned call, and wait for its sends, so that MPI uses their memory no more.

        A message that has begun ends in a moment, if its other end lives. After `TAKE_BACK_SECONDS` this gives up: what
        is left has no other end.
        """
        left, until = [*self.given_up], perf_counter() + TAKE_BACK_SECONDS
        with suppress(Exception), self.comm.engine.lock:  # MPI may be the reason why the call was abandoned
            for request, i in left:
                if self.compiled.kinds[i] == RECV:
                    request.Cancel()
            while left and perf_counter() < until:
                left = [(request, i) for request, i in left if not request.Test()]

    # -- what a wait reports
    def can_finish(self) -> bool:
        return not self.missing()

    def missing(self) -> list[str]:
        """The blocks of inputs for which only the program can call `ready`."""
        with self.comm.engine.lock:
            return sorted({f"{name}[{block}]" for name, block in self.unready})

    def waits_for(self) -> tuple[int, str] | None:
        for wanted in (RECV, SEND):
            for i, kind in enumerate(self.compiled.kinds):
                if kind == wanted and self.begun[i] and not self.ended[i]:
                    peer = self.compiled.peers[i]
                    verb = "to send" if kind == RECV else "to receive"
                    return peer, f"rank {peer} {verb} in {self.title}, op {i}, {self.compiled.ops[i]}"
        if self.awaits_token:
            return (self.comm.rank - 1) % self.comm.size, f"all ranks to start {self.title}"
        for i, kind in enumerate(self.compiled.kinds):
            if kind == COLLECTIVE and self.begun[i] and not self.ended[i]:
                return ANYONE, f"all ranks to start {self.title}, op {i}, {self.compiled.ops[i]}"
        return None

    # -- after the call
    def elsewhere(self, returned_at: float | None) -> list[Interval]:
        """When the program did something else than wait for this call.

        `returned_at` is when `start()` returned to the program. None: the program called and waited in one step.
        """
        return [] if returned_at is None else self.comm.engine.elsewhere(returned_at, self.moved_at, set(self.begun))

    def trace(self, extents: Extents) -> Trace:
        """When each op ran on this rank, and how many bytes it moved. Raises StateError for an unfinished call."""
        if self.unfinished:
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
