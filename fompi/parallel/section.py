"""A section: calls that belong together, because a strategy or a wrapper makes them. Its ranks end it together.

    with Section("ring_attention") as section:
        section.begin(comm)                  # all ranks of comm have begun it: the calls on comm from now on are its
        ...

If a rank ends it by an error, in the middle of anything, the others get a PeerError in the call for which they wait, or
in their next one. Then they make up what is missing, so that the next call is in step on all ranks:

    rank 0: call 7, call 8, call 9   |          |                     the ranks tell each other how many calls
    rank 1: call 7, MemoryError      |  counts  |  refuses 8 and 9    and messages they have begun
    rank 2: call 7, call 8           |          |  refuses 9
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter, sleep
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import numpy as np

from fompi.base.errors import PeerError, in_words, of_signature
from fompi.engine.communicator import Communicator
from fompi.engine.control import ENDED, ORDINAL_BITS, Channel, Ended
from fompi.engine.engine import LATE_SECONDS, Engine
from fompi.engine.handshake import Agreement
from fompi.ops import messages

P = ParamSpec("P")
R = TypeVar("R")


class _Open(threading.local):
    """The innermost section of this thread."""

    section: Section | None = None


_OPEN = _Open()


class Section:
    """Calls that belong together. Its kernels follow IEEE 754 without warnings or errors, as those of operations do.

    Several threads may be in a shared one. The sections inside of it are in no order, so they end together with it.
    What else is inside of it is of the program, with its own error state. No agreement begins it: a communicator is in
    it from the first call there on (`begin`). If it ends by an error before, the ranks of all communicators hear of it.
    If it is `told`, a rank that had done its part hears of an error in its next call. Else its strategy tells it.
    """

    def __init__(self, name: str, shared: bool = False, told: bool = True):
        self.name, self.shared, self._told = name, shared, told
        self.begun: dict[Channel, tuple[Communicator, int]] = {}  # with which call it began on each communicator
        self.keys: dict[Channel, int] = {}  # by which the ranks know it there
        self.error: BaseException | None = None  # by which it has ended
        self._around: Section | None = None  # of this thread
        self._outside: list[Any] = []  # the sections around it on these communicators
        self._is_left = False  # True once this rank has done its part
        self._quiet: AbstractContextManager[None] = nullcontext() if shared else np.errstate(all="ignore")

    def __enter__(self) -> Section:
        self._around, _OPEN.section = _OPEN.section, self
        self._ends_with: Section | None = None
        if self._around is not None:
            self._ends_with = self._around if self._around.shared else self._around._ends_with
        self._quiet.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._quiet.__exit__(kind, error, trace)
        _OPEN.section = self._around
        self._is_left = True
        for (channel, (comm, _)), outside in zip(self.begun.items(), self._outside, strict=True):
            with comm.engine.lock:
                channel.section, channel.lost, channel.left = outside, None, self
        if error is not None:
            self.whole.end_by(error)
            for channel, (comm, _) in self.begun.items():
                self._wait(comm, channel, LATE_SECONDS)
        else:
            self.look()

    @property
    def whole(self) -> Section:
        """What ends with this section: a shared one around it, or else itself."""
        return self._ends_with or self

    def begin(self, comm: Communicator, call: int | None = None) -> None:
        """All ranks of `comm` have begun it, and those around it, with the call of this number; None: the last call."""
        if self._around is not None:
            self._around.begin(comm, call)
        channel, first = comm.channel, comm.calls if call is None else call
        if comm.size == 1 or channel in self.begun or self._ends_with is not None:
            return
        with comm.engine.lock:
            self.begun[channel] = comm, first
            key = self.keys.setdefault(channel, (first << ORDINAL_BITS) + self.shared)
            self._outside.append(channel.section)
            channel.section = self
            channel.ended = {at: known for at, known in channel.ended.items() if at >= key}
            self.look()

    def begin_shared(self, engine: Engine) -> None:
        """All ranks that do the same work begin it. How many they have begun since the last call tells which one it is.

        Nobody waits for anybody. Inside of another one nothing happens: it ends with that.
        """
        for channel in engine.channels if self._ends_with is None else ():
            calls, count = channel.comm.calls, channel.shared[1] + 1 if channel.shared[0] == channel.comm.calls else 1
            channel.shared = calls, count
            self.keys[channel] = (calls + 1 << ORDINAL_BITS) + count

    # -- the end by an error
    def look(self) -> None:
        """If another rank has ended it by an error, so does this one: its wait ends, or else its next call."""
        if self.error is not None:
            return
        for channel, (comm, _) in self.begun.items():
            for known in [known for known in channel.ended.get(self.keys[channel], {}).values() if known.words]:
                around = self._around
                if not self._is_left:
                    for other in self.begun:
                        other.lost = _error_of(known, comm)
                elif around is not None and around.keys.get(channel) == self.keys[channel]:
                    around.look()  # both have begun with the same call: it is the one around that has ended
                else:
                    self._end_late(_error_of(known, comm))
                return

    def _end_late(self, error: PeerError) -> None:
        """This rank had done its part. Its next call ends with the error, or the one in flight, if that is refused."""
        error.add_note("fompi: this rank had done its part")
        for channel in self.begun if self._told else ():
            channel.owed = self
        self.end_by(error)

    def ends_late(self) -> bool:
        """True if another rank has ended it by an error, after this one had done its part. Waits for late words."""
        until = perf_counter() + LATE_SECONDS
        for comm, _ in self.begun.values():
            while self.error is None and perf_counter() < until:
                if not comm.engine.progress() and not comm.engine.receive_control():
                    sleep(1e-4)
        return self.error is not None

    def pay(self) -> BaseException | None:
        """The error that this rank has not seen yet. Now it has."""
        for channel in self.begun:
            channel.owed = None
        return None if self.error is None else without_frames(self.error)  # who raises it gives it frames

    @contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """What this thread does belongs to the section, too."""
        outside, _OPEN.section = _OPEN.section, self
        try:
            yield
        finally:
            _OPEN.section = outside

    def end_by(self, error: BaseException) -> None:
        """Tell the other ranks how far this one has come, and begin to bring the calls of all ranks in step.

        Where the first agreement has ended by the error, all ranks raise it, in the same call. So nobody needs to be
        told. Of a later one they do: they may wait for something else than this call.
        """
        if self.error is not None:
            return
        self.error = without_frames(error)
        for channel in self.begun if self.shared and not self._is_left else ():  # other threads wait there
            channel.lost = channel.lost or PeerError(f"{self.name} was ended by {in_words(error)}", -1)
        for channel, key in self.keys.items():
            comm, first = channel.comm, self.begun[channel][1] if channel in self.begun else -1
            is_known = getattr(error, "raised_by_all", None) is channel and comm.calls == first and not self.shared
            if comm.size == 1 or comm.closed or channel.broken is not None or is_known:
                continue
            words, origin = str(error), getattr(error, "world_origin", None)
            if origin is None:
                where = f" (call {first} of {comm.name})" if first >= 0 else f", before its first call of {comm.name}"
                words = f"rank {comm.rank} failed in {self.name}{where}: {in_words(error)}"
                origin = comm.link.world_ranks[comm.rank]
            with comm.engine.lock:
                for peer in range(comm.size):
                    if peer != comm.rank:
                        calls, sent, received = comm.begun_with(peer)
                        ended = Ended(calls, sent, received, origin, words)
                        channel.send(peer, ENDED, key, ended.encoded())
                channel.ending = self
                self.settle(channel)

    def settle(self, channel: Channel) -> None:
        """Once the counts of all ranks are here: refuse what they have begun, without waiting for its end."""
        comm, known = channel.comm, channel.ended.get(self.keys[channel], {})
        if len(known) < comm.size - 1:
            return
        assert self.error is not None
        refusal = PeerError(f"{self.name} was ended on rank {comm.rank} by {in_words(self.error)}", comm.rank)
        refusal.world_origin = comm.link.world_ranks[comm.rank]
        with comm.engine.lock:
            channel.ending = None
            while comm.calls < max(ended.calls for ended in known.values()):
                comm.calls += 1
                agreement = Agreement(comm, comm.calls, 0, lambda: self.name, (0,) * comm.size)
                agreement.refusal = refusal
                agreement.start()
            for peer, ended in known.items():
                messages.catch_up(comm, peer, ended.sent, ended.received, refusal)
        comm.engine.wake_helper()  # these calls end while the program does something else

    def before_call(self, comm: Communicator) -> None:
        """A call begins on `comm`, on which the end of this section is not complete."""
        self._wait(comm, comm.channel, comm.engine.timeout)
        if comm.channel.ending is self:
            comm.channel.ending, comm.channel.broken = None, comm.channel.broken or self.error

    def _wait(self, comm: Communicator, channel: Channel, seconds: float) -> None:
        """Wait until the counts of all ranks are here."""
        engine, until = comm.engine, perf_counter() + seconds
        while channel.ending is self and channel.broken is None and not channel.departed and perf_counter() < until:
            if not engine.progress() and not engine.receive_control():
                sleep(1e-4)


def without_frames(error: BaseException) -> BaseException:
    """The error without its traceback: the frames of that keep the tensors of the program."""
    try:
        return copy.copy(error)
    except Exception:
        return PeerError(in_words(error), -1)


def _error_of(known: Ended, comm: Communicator) -> PeerError:
    """The error with which a rank of `comm` has ended a section."""
    ranks = comm.link.world_ranks
    error = PeerError(known.words, ranks.index(known.origin) if known.origin in ranks else -1)
    error.world_origin = known.origin
    return error


def begin(comm: Communicator, call: int | None = None) -> None:
    """The innermost section of this thread begins on `comm` (`Section.begin`). Without a section nothing happens."""
    if _OPEN.section is not None:
        _OPEN.section.begin(comm, call)


def in_section(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function, each call of which is a section."""

    def decorate(f: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(f)
        def run(*args: P.args, **options: P.kwargs) -> R:
            with Section(name):
                try:
                    return f(*args, **options)
                except TypeError as error:
                    raise of_signature(name, error) from error.__cause__

        return run

    return decorate


def has_ended(error: BaseException) -> bool:
    """True if the reason of `error` is the end of a section on another rank: then all its ranks hear of it."""
    return getattr(error, "world_origin", None) is not None
