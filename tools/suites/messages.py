"""Requests in flight for the rivals on mpi4py, and sums of what arrives.

The rivals get what fompi gives itself. Receives are posted before anything is sent. Messages are paced. Every addition
is made when its piece arrives. fompi's own helper thread tests the messages while a kernel runs: as rarely as it does
for fompi, and not at all while there are no messages.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, sleep
from typing import Any

import numpy as np

from fompi.bench.fused import Array
from fompi.engine.progress import Helper, pause_between_polls
from fompi.mpi import launcher
from fompi.mpi.link import request_testsome

SPINS = 50
"""After this many polls without a result, a wait sleeps between polls. Other ranks may need the core."""

NAP_SECONDS = 2e-5
"""How long it sleeps. A nap is short compared with the latency of a message."""


class Requests:
    """Requests of one rank. Receives start at once. Sends and collectives are queued, at most `window` in flight.

    `then` is called when a request is done. `kernel()` is a context in which a helper thread tests the requests.
    """

    def __init__(self, comm: Any, window: int):
        self.comm, self.window = comm.Dup(), window
        self.polls = self.computing = 0
        self.kernel_began = self.longest_forwarding = 0.0
        self._testsome = request_testsome()
        self._requests: list[Any] = []
        self._thens: list[tuple[bool, Callable[[], object]]] = []  # True if the request counts for the window
        self._waiting: deque[tuple[Callable[[], Any], Callable[[], object]]] = deque()
        self._in_flight = 0
        self._lock = threading.RLock()  # reentrant: `then` may send again
        self._helper = Helper(self, pause_between_polls("helper", launcher.cores_per_rank()))

    def receive(self, into: Array, source: int, tag: int, then: Callable[[], object]) -> None:
        with self._lock:
            self._requests.append(self.comm.Irecv(into, source, tag))
            self._thens.append((False, then))

    def send(self, array: Array, dest: int, tag: int) -> None:
        self.queue(lambda: self.comm.Isend(array, dest, tag))

    def queue(self, start: Callable[[], Any], then: Callable[[], object] = lambda: None) -> None:
        """Queue a request. `start` makes it as soon as the window allows."""
        with self._lock:
            self._waiting.append((start, then))
            self._fill()

    def locked(self, do: Callable[..., object], *arguments: Any) -> None:
        """Call `do` while the helper can change nothing."""
        with self._lock:
            do(*arguments)

    @property
    def idle(self) -> bool:
        with self._lock:  # without the lock the helper may be between a receive and its addition
            return not self._requests and not self._waiting

    needs_no_poll = idle

    def receive_control(self) -> bool:
        """The helper also serves control messages. A rival has none."""
        return False

    def progress(self, helping: bool = False) -> bool:
        """Test all requests. True if one was done."""
        with self._lock:
            self.polls += 1
            done = self._testsome(self._requests) if self._requests else None
            if not done:
                return False
            ended = [self._thens[i] for i in done]
            indices = set(done)
            self._requests = [request for i, request in enumerate(self._requests) if i not in indices]
            self._thens = [then for i, then in enumerate(self._thens) if i not in indices]
            self._in_flight -= sum(counts for counts, _ in ended)
            self._fill()  # before the additions, so that the link has work during them
            for _, then in ended:
                then()
            return True

    def wait(self, ready: Callable[[], bool]) -> None:
        """Progress until `ready()`."""
        idle = 0
        while not ready():
            idle = 0 if self.progress() else idle + 1
            if idle > SPINS:
                sleep(NAP_SECONDS)

    def finish(self) -> None:
        self.wait(lambda: self.idle)

    @contextmanager
    def kernel(self) -> Iterator[None]:
        self.computing, self.kernel_began = 1, perf_counter()
        if not self.idle:
            self._helper.wake()
        try:
            yield
        finally:
            self.computing = 0

    def close(self) -> None:
        self._helper.stop()
        self.comm.Free()

    def _fill(self) -> None:
        while self._waiting and self._in_flight < self.window:
            start, then = self._waiting.popleft()
            self._requests.append(start())
            self._thens.append((True, then))
            self._in_flight += 1


class Sum:
    """y = the sum of `count` terms, in the order in which they arrive. `then` is called after the last one.

    The first two terms make y, so nothing is cleared or copied.
    """

    def __init__(self, y: Array, count: int, then: Callable[[], object] = lambda: None):
        self.y, self.missing, self.then = y, count, then
        self.sum: Array | None = None

    def add(self, term: Array) -> None:
        self.missing -= 1
        if self.sum is not None:
            np.add(self.sum, term, out=self.y)
            self.sum = self.y
        elif self.missing:
            self.sum = term
        else:
            np.copyto(self.y, term)
        if not self.missing:
            self.then()
