"""Work: one call of a ProcessGroup in flight.

    Work
      -> Pending, Transfer, FromAnyone   the operations of fompi that carry out the call
      -> finish(*results)                copies what did not go straight to the tensors of the program
      -> a future                        only if somebody asks for it
      -> Order                           the streams of a GPU (`streams`)

Whoever finds that the operations are finished ends the work: a thread that waits, or the helper of the engine. No
thread polls for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import RLock
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist

from fompi.base.errors import MismatchError, PeerError, StateError, WaitTimeout
from fompi.engine.communicator import Communicator
from fompi.ops import messages
from fompi.parallel.interleave import give_way
from fompi.torch import private, streams


def in_words_of_torch(error: BaseException, what: str) -> BaseException:
    """The error as torch's programs expect it: a DistBackendError if the group cannot go on, else the error itself."""
    if not isinstance(error, (WaitTimeout, PeerError, StateError)):
        return error
    verb = "Timed out waiting" if isinstance(error, WaitTimeout) else "Failed"
    said = dist.DistBackendError(f"fompi: {what}: {verb}: {error}")
    said.__cause__ = error
    return said


_HELD: dict[Work | Landed, None] = {}
"""Works that torch may still wait for, while it keeps their C++ half alone. Without its Python half, a work never ends.

A torch before 2.8 keeps none. Later ones do not keep what Python code hands to C++: `DistributedDataParallel.join` does
so with the sum of one number.
"""

MOST_HELD = 1024
"""At most this many ended works are held for programs that do not wait. What ended first is dropped."""

SMALL = 64
"""A work on tensors of at most this many numbers may be held for nothing: it does not take much memory."""

_WAITED: deque[Work | Landed] = deque(maxlen=16)
"""The last small works that were waited for: after its wait, C++ asks for the future of such a work."""


def _hold(work: Work | Landed) -> None:
    _HELD[work] = None
    if len(_HELD) > MOST_HELD:
        for old in [each for each in list(_HELD) if each._ended][: len(_HELD) - MOST_HELD]:
            _HELD.pop(old, None)


def _is_small(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(t, torch.Tensor) and t.numel() <= SMALL for t in value)


class Work(private.WORK):
    """The call `what` on a group. `value` is what its future holds, the tensors that the call writes.

    On a GPU it is finished once its messages are done and its kernels are enqueued: `wait` lets the current stream of
    the caller wait for them.
    """

    def __init__(
        self,
        what: str,
        comm: Communicator,
        pendings: Sequence[Any],
        finish: Callable[..., object] | None = None,
        value: Any = None,
        order: streams.Order = streams.HOST,
    ):
        super().__init__()
        self.what, self.value, self._order = what, value, order
        self._comm, self._pendings, self._finish = comm, list(pendings), finish
        self._lock = RLock()
        self._ended = self._watched = False
        self._error: BaseException | None = None
        self._future: Future | None = None
        self.find_source: Callable[[], int] | None = None
        self.limit: timedelta | None = None  # what a wait for this call lasts at most, if the program gave a time-out
        self._unfinished = len(self._pendings)
        if not private.KEEPS_WORK:
            _hold(self)

    def watch(self) -> None:
        """From now on the work ends without a wait."""
        if _is_small(self.value):
            _hold(self)
        with self._lock:
            if self._watched or self._ended:
                return
            self._watched = True
        for pending in list(self._pendings):
            pending.then(self._one_is_finished)

    def _one_is_finished(self) -> None:
        with self._lock:
            self._unfinished -= 1
            last = not self._unfinished
        if last:
            self.end()

    def end(self) -> None:
        """All operations are finished: write what is left to write, and fulfil the future. Only the first call acts."""
        with self._lock:
            if self._ended:
                return
            try:
                with torch.no_grad(), self._order.writing() as kept:
                    kept += [*self._pendings], self.value
                    results = [pending.result for pending in self._pendings]
                    kept += results
                    if self._finish is not None:
                        self._finish(*results)
            except Exception as error:
                self._error = in_words_of_torch(error, self.what)
            self._ended, self._finish = True, None
            self._pendings.clear()
            future = self._future
        if future is not None:
            self._fulfil(future)
            _HELD.pop(self, None)

    def _fulfil(self, future: Future) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        else:
            with self._order.inside():
                future.set_result(self.value)

    # -- as torch calls it
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Drive fompi until the call is finished. Raises its error, and DistBackendError after `timeout` or `limit`."""
        give_way()
        timeout = timeout or self.limit
        seconds = timeout.total_seconds() if timeout else 0.0
        limit = perf_counter() + seconds if seconds > 0 else None
        for pending in list(self._pendings):
            try:
                pending.wait(None if limit is None else max(0.0, limit - perf_counter()))
            except WaitTimeout as error:
                if not pending.done():
                    raise in_words_of_torch(error, self.what) from error
            except MismatchError:  # the ranks may be out of step: nobody may come to the other calls
                break
            except Exception:  # it is the error of the call: `end` notes it
                continue
        self.end()
        if self in _HELD:
            _HELD.pop(self, None)
            if _is_small(self.value):
                _WAITED.append(self)
        if self._error is not None:
            raise self._error
        self._order.follow()
        return True

    def is_completed(self) -> bool:
        if not self._ended and all([pending.done() for pending in list(self._pendings)]):
            self.end()
        return self._ended and self._order.is_done()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Any:
        return self.value

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future:
        """A future that is fulfilled when the call is finished. Without a helper thread this waits for the call."""
        with self._lock:
            made = self._future is None
            if made:
                self._future = Future(self)
            future, ended = self._future, self._ended
        assert future is not None
        if made and ended:
            self._fulfil(future)
            _HELD.pop(self, None)
        elif made:
            self.watch()
            if self._comm.engine.helper is None:
                with suppress(Exception):  # the future has it
                    self.wait()
        return future

    def source_rank(self) -> int:
        """The rank that sent, in the group."""
        if self.find_source is None:
            raise StateError(f"{self.what}: only a receive from any rank has a source rank")
        return self.find_source()

    _source_rank = source_rank


class Landed(private.WORK):
    """A finished call. `value` is what its future holds. `is_async`: torch may go on to wait for its C++ half alone."""

    _ended, what = True, "a finished call"

    def __init__(self, value: Any, is_async: bool = False):
        super().__init__()
        self.value = value
        if is_async and (not private.KEEPS_WORK or _is_small(value)):
            _hold(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self in _HELD:
            _HELD.pop(self, None)
            _WAITED.append(self)
        return True

    def is_completed(self) -> bool:
        return True

    is_success = is_completed

    def exception(self) -> None:
        return None

    def result(self) -> Any:
        return self.value

    def synchronize(self) -> None: ...

    def get_future(self) -> Any:
        _HELD.pop(self, None)
        future: Any = torch.futures.Future()
        future.set_result(self.value)
        return future


class Future(torch.futures.Future):
    """A future of torch whose wait drives fompi: the thread that waits may be the helper, in a callback."""

    def __init__(self, work: Work):
        super().__init__(devices=work._order.devices)
        self._work = work

    def wait(self) -> Any:
        with suppress(Exception):  # the future raises it
            self._work.wait()
        return super().wait()


class FromAnyone:
    """A receive from the rank whose message with this tag comes first. Used as a `Pending`.

    It looks for the message when it is asked: messages of other tags and ranks do not wait for it.
    """

    def __init__(self, comm: Communicator, tag: int, receive: Callable[[int], Any]):
        self._comm, self._tag, self._receive = comm, tag, receive
        self._begun = perf_counter()
        self._pending: Any = None
        self.source = -1

    def _found(self) -> bool:
        with self._comm.engine.lock:
            if self._pending is None and (source := messages.sender(self._comm, self._tag)) is not None:
                self.source, self._pending = source, self._receive(source)
        return self._pending is not None

    def done(self) -> bool:
        self._comm.engine.progress_while_waiting()
        return self._found() and self._pending.done()

    def wait(self, timeout: float | None = None) -> Any:
        begun = perf_counter()
        most = self._comm.channel.timeout or self._comm.engine.timeout
        while not self._found():
            self._comm.check()
            waited = perf_counter() - begun
            if waited > (most if timeout is None else timeout):
                raise WaitTimeout(f"no rank has sent a message with tag {self._tag} for {waited:.3g} s")
            if not self._comm.engine.progress():
                sleep(1e-4)
        left = None if timeout is None else max(0.0, timeout - (perf_counter() - begun))
        return self._pending.wait(left)

    def then(self, callback: Callable[[], object]) -> None:
        with suppress(Exception):
            self.wait()
        callback()

    @property
    def result(self) -> Any:
        if self._pending is None:
            raise StateError("no message has arrived yet")
        return self._pending.result
