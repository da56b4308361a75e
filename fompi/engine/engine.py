"""The engine: runs kernels between polls, and waits with a deadline.

One Engine drives all communicators of a process. A thread that waits for one operation drives every operation, so ranks
may start and wait in different orders. Kernels run without the engine's lock, so the helper thread
(`fompi.engine.progress`) can move messages while a kernel runs.

    InFlight.poll      tests the requests (`fompi.engine.in_flight`)
    Engine.progress    polls, then runs one kernel
    Engine.wait        makes progress until a task is finished, another rank has left, or the deadline has passed
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from functools import partial
from threading import RLock, local
from time import perf_counter, sleep
from typing import Any

from fompi.base.errors import PeerError, StateError, WaitTimeout
from fompi.engine.in_flight import InFlight
from fompi.engine.intervals import RecentIntervals
from fompi.engine.progress import POLLS_PER_WAKE, Helper
from fompi.engine.tasks import QUIET, Listener, Task, Watch
from fompi.traces.trace import Interval, between, union

SPINS, YIELDS, NAP_SECONDS = 20, 280, 3e-5
"""A wait polls 20 times without a pause, then 280 times with a yield of the core in between, then with sleeps.

The k-th sleep is of k naps, and at most of 10.

A small message on one host arrives within about 20 polls. More polls would take the core from ranks that share it
without knowing this, such as the ranks of two containers. Those ranks move messages too.
"""

TURN_SECONDS = 3e-5
"""A wait leaves the lock to other threads for this long, after C has driven a call without progress."""

MOST_ROUNDS = 32
"""The engine polls at most this often before a long kernel, if each poll moves something."""

JOIN_SECONDS = 1e-4
"""If a program asks twice within 0.1 ms whether a call is done, it did nothing else in between. It was waiting."""

LATE_SECONDS = 0.5
"""How long a wait for a failed call lasts if other ranks have not started the call yet."""

STALLED_SECONDS = 0.1
"""After this long without progress, a bound call compares its label and its counts with those of the awaited rank."""

WATCH_POLLS = 64
"""After this many polls the deadlines of the calls are tested that nobody waits for."""

DEPARTED_SECONDS = 0.2
"""If an awaited rank has left, a wait goes on until there is no progress for this long: messages may still arrive."""


FORKED = (
    "this process was forked from a rank, and must not call fompi: it would speak in the name of that rank. "
    "Start processes with `spawn` or `forkserver`, or fork before the first Communicator"
)


class Around(local):
    """What this thread is in the middle of."""

    kernels = 0  # a kernel of the user may call operations, and wait for them
    looks_at_watched = False  # to end a watched call this thread makes progress, which looks at watched calls


class Engine(InFlight):
    """Drives every task of this process. Thread-safe."""

    def __init__(
        self,
        testsome: Callable[[list[Any]], list[int] | None],
        timeout: float,
        spins: int,
        progress_mode: str = "poll",
        helper: Callable[[Engine], Helper] | None = None,
    ):
        super().__init__(testsome)
        self.timeout, self.spins, self.progress_mode = timeout, spins, progress_mode
        self.over = ""  # in words why this process must not call fompi any more
        self.gate: Callable[[Any], None] | None = None  # called with the communicator before each call begins
        self.arena: Any = None  # the memory of results and scratch (`fompi.tensors.arena`)
        self.hosts: dict[int, int] = {}  # the host of each rank of MPI_COMM_WORLD, as a digest of its name
        self.report: Any = None  # notes finished calls, if FOMPI_REPORT is set (`fompi.runtime.report`)
        self.recorder: Any = None  # the same object, if FOMPI_RECORD is set (`fompi.runtime.recorder`)
        self.machine: Any = None  # the machine of all ranks, if FOMPI_MACHINE is set
        self.last_began: tuple[str, Any, int] | None = None  # the last call: its name, its communicator, its stamp
        self.expired: tuple[float, Listener, tuple[int, str]] | None = None  # the last wait that has expired
        self.works: list[str] = []  # what this process does together with others (`Communicator.joint`)
        # Kernels. `progress.Driven` describes what the helper reads.
        self.computing = 0
        self.around = Around()
        self.kernel_began = 0.0
        self.longest_forwarding = 0.0
        self.kernels = RecentIntervals()  # when threads have run kernels
        # Waits.
        self.waiting: list[tuple[Task, Listener]] = []  # all waits of all threads, innermost last
        self.waits = RecentIntervals(JOIN_SECONDS)  # when the program has waited, for any call
        self._waiting_since = 0.0
        self.waits_soon = False  # the program waited at once for the last small call in C that it had only started
        self.helper = helper(self) if helper is not None else None

    @property
    def last_call(self) -> str:
        """The last call that began on this rank, in words."""
        if self.last_began is None:
            return "none yet"
        name, comm, stamp = self.last_began
        return f"{name} ({comm.call_name(stamp)})"

    # ------------------------------------------------------------------------------------------- progress and kernels

    @property
    def needs_no_poll(self) -> bool:
        """True if a poll can move nothing: only kernels are in flight, and a thread runs them."""
        ready = self._ready and not self.has_kernel_thread
        polled_in_c = self._library is not None and self._library.has_thread  # a thread of C moves the calls there
        in_c = (self._in_c or self.watched) and not polled_in_c
        return not (self._requests or in_c or self._launched or ready)

    @property
    def is_all_in_c(self) -> bool:
        """True if Python drives nothing of what is in flight."""
        return not (self._requests or self._ready or self._launched)

    @property
    def has_kernel_thread(self) -> bool:
        """True if a thread runs kernels: one computes now, or the program waits or is about to wait."""
        return self.computing > 0 or bool(self.waiting) or any(task.awaited for task in self._ready)

    def wake_helper(self) -> None:
        """The helper must move what is in flight: the caller goes on with other work, or with a long kernel."""
        if self.helper is not None:
            self.helper.wake(not self.needs_no_poll)

    def in_c(self, task: Any, library: Any) -> None:
        super().in_c(task, library)
        if self.helper is not None and self.helper.library is None:
            self.helper.share(library)

    def progress(self, helping: bool = False) -> bool:
        """Poll, then run one kernel. False: nothing was done and there was no kernel.

        `helping` is True in the helper thread. While another thread runs kernels, the helper runs only sums and copies.
        Otherwise it gives a product to its worker thread, or runs it if there is no worker.
        """
        if self.watched:
            self._tell()
        worker = self.helper.worker if helping and self.helper is not None else None
        with self.lock:
            moved = self.poll()
            taken = None
            if self._ready:
                taken = self._take_kernel(helping and (worker is not None or self.has_kernel_thread))
            for_worker = taken is None and worker is not None and not self.has_kernel_thread
            if for_worker:
                taken = self._take_kernel(merges_only=False)
            if taken is not None:
                self.computing += 1
        if moved and self.watched:  # the helper may rest now
            self._tell()
        if taken is None:
            return moved
        if for_worker and worker is not None:
            worker.run(partial(self._run_in_worker, *taken))
            return True
        task, key, kernel = taken
        if task.is_long and (self._requests or self._in_c):
            if self._requests:
                self.poll_thoroughly()
            self.wake_helper()
        self._run(task, key, kernel)
        return True

    def watch(self, task: Callable[[], Task], channel: Listener, then: Callable[[], object]) -> None:
        """Call `then()` once `task()` is finished: soon, without the lock, in a thread that drives the engine.

        The call then has a deadline although nobody waits for it. `then` must not raise.
        """
        with self.lock:
            self.watched.append(Watch(task, channel, then, perf_counter()))
            if self._library is not None:
                self._library.is_watched = 1
        self.wake_helper()

    def _tell(self) -> None:
        """Call `then()` of the watched calls that are finished."""
        with self.lock:
            finished = [watch for watch in self.watched if watch.task().finished]
            self.watched = [watch for watch in self.watched if watch not in finished]
            if self._library is not None:
                self._library.is_watched = len(self.watched)
        for watch in finished:
            watch.then()
        if self.polls % WATCH_POLLS == 0 and not self.around.looks_at_watched:
            self.around.looks_at_watched = True
            try:
                for watch in self.watched:
                    self._end_if_lost(watch.task(), watch.channel, watch.begun)
            finally:
                self.around.looks_at_watched = False

    def poll_thoroughly(self) -> None:
        """Poll until nothing arrives any more: during the next kernel there may be no poll for a long time."""
        silent = 1  # `progress` has polled once before
        with self.lock:
            for _ in range(MOST_ROUNDS):
                silent += not self.poll()
                if silent == POLLS_PER_WAKE:
                    return

    def progress_while_waiting(self) -> None:
        """`progress()` for a program that asks whether a call is done. This time counts as waiting."""
        begun = perf_counter()
        self.progress()
        self.waits.add(begun, perf_counter())

    def _run_in_worker(self, task: Task, key: int, kernel: Callable[[], object]) -> None:
        """Runs in the worker thread."""
        try:
            self._run(task, key, kernel)
        finally:
            self.wake_helper()  # the helper may rest while only this kernel is in flight

    def _run(self, task: Task, key: int, kernel: Callable[[], object]) -> None:
        """Run a kernel that was taken, without the lock. This is where kernels run."""
        error = None
        self.kernel_began = begun = perf_counter()
        self.around.kernels += 1
        try:
            QUIET.copy().run(kernel)
        except BaseException as raised:
            error = raised
        self.around.kernels -= 1
        with self.lock:
            self.computing -= 1
            ended = perf_counter()
            if task.forwards:
                self.longest_forwarding = max(self.longest_forwarding, ended - begun)
            self.kernels.add(begun, ended)
            try:
                task.ran(key, begun, error)
            except Exception as raised:
                task.broke(raised)
        if error is not None and not isinstance(error, Exception):  # an interrupt ends more than this call
            raise error

    def after_fork(self) -> None:
        """In a forked child: refuse to drive anything. The requests belong to the parent."""

        def refuse(*args: Any, **options: Any) -> Any:
            raise StateError(FORKED)

        self.after_finalize(FORKED)
        self.helper, self.lock = None, RLock()  # another thread may have held the lock
        self.progress = self.wait = self.receive_control = refuse  # type: ignore[method-assign]

    def farewell(self) -> None:
        """The program calls MPI_Finalize, which waits for the other ranks: they must not wait for this one."""
        with suppress(Exception):
            for channel in self.channels:
                channel.leave()
                channel.go()
            self.poll_thoroughly()

    def after_finalize(self, why: str) -> None:
        """MPI ends. Calls are refused from now on, because MPI would end the process."""

        def refuse(comm: Any) -> None:
            raise StateError(why)

        self.over, self.gate = why, refuse

    # ----------------------------------------------------------------------------------------------------------- waits

    def wait(
        self,
        task: Task,
        channel: Listener,
        seconds: float | None = None,
        patient: bool = False,
        until: Callable[[], bool] | None = None,
    ) -> bool:
        """Drive everything until `task` is finished, or `until()`. False: neither is so after `seconds`.

        `task` is ended with an error if a rank that it waits for has left, or after `timeout` seconds without progress
        of `task`. That error says which rank waits for which. If `task` has failed, other ranks may start the call
        late. Then the wait ends after `LATE_SECONDS`, unless it is `patient`.
        """
        begun = perf_counter()
        limit = None if seconds is None else begun + seconds
        idle = rounds = 0
        if not self.waiting:
            self._waiting_since = begun
        self.waiting.append((task, channel))
        try:
            while not task.finished and (until is None or not until()):
                rounds += 1
                in_c = task.drive() if until is None else None
                if in_c:
                    idle = 0
                    if not task.finished:
                        self.progress()  # C may have left it for news of other calls
                elif self.progress():
                    idle = 0
                elif in_c is None:
                    idle += 1
                    if idle > self.spins:
                        self._pause(idle - self.spins)
                else:  # C has paused already, but with the lock, and Python's locks are not fair
                    idle = self.spins + YIELDS + 1
                    sleep(TURN_SECONDS)
                if idle > self.spins + YIELDS or rounds % 256 == 0:  # other tasks may progress while this one does not
                    self._end_if_lost(task, channel, begun)
                    if channel.lost is not None and not patient:
                        raise channel.lost
                    if task.error is not None and not patient and perf_counter() - task.failed_at > LATE_SECONDS:
                        break
                if limit is not None and not task.finished and perf_counter() > limit:
                    return False
        finally:
            self.waiting.remove((task, channel))
            task.awaited = False
            if self.watched:
                self._tell()
            if not self.waiting:
                self.waits.add(self._waiting_since, perf_counter())
        return True

    def _pause(self, times: int) -> None:
        """Give the core to other threads: yield it at first, later sleep. Do not sleep past the end of a kernel."""
        if times <= YIELDS:
            os.sched_yield()
            return
        pause = min(times - YIELDS, 10) * NAP_SECONDS
        if self._launched:
            with self.lock:  # the helper thread polls kernels, too
                dues = [queue[0][0].due for queue in self._launched.values()]
            pause = min([pause, *(due - perf_counter() for due in dues)])
        if pause > 0:
            sleep(pause)

    def _end_if_lost(self, task: Task, channel: Listener, begun: float) -> None:
        """End `task` with an error if an awaited rank has left, or after the deadline. The wait began at `begun`."""
        self.receive_control()
        if task.finished:
            return
        silent = perf_counter() - max(task.moved_at, begun)
        if silent > STALLED_SECONDS:
            task.stalled()
            if task.finished:  # C has given it back: another task goes on with the call
                return
        if (channel.departed or channel.stopped) and silent > DEPARTED_SECONDS:
            awaited = task.waits_for()
            absent = channel.absent_peer(task.awaits_start, awaited)
            if absent is not None and not self.progress():  # what it sent before it left may have arrived by now
                if task.finished:
                    return
                what = awaited[1]  # type: ignore[index]
                text = f"rank {channel.link.rank} waits for {what}, but {absent[1]}"
                channel.fail(task, PeerError(text, absent[0]))
                return
        if (
            silent > (channel.timeout or self.timeout) and not channel.asking and self.computing == self.around.kernels
        ):  # a running kernel may be the reason
            moved_at, text = task.moved_at, channel.explain(task)
            if not task.finished and task.moved_at == moved_at:  # no progress during `explain` either
                channel.fail(task, WaitTimeout(text))

    def departure(self, world_ranks: Sequence[int], what: Callable[[], str]) -> PeerError | None:
        """An error if one of these ranks has left, so that they can never start `what()` together."""
        for channel in self.channels:
            for rank, words in list(channel.departed.items()):
                if channel.link.world_ranks[rank] in world_ranks:
                    text = f"rank {channel.link.rank} waits for rank {rank} to start {what()}, but {words}"
                    return PeerError(text, rank)
        return None

    def elsewhere(self, begin: float, end: float, own: Container[float]) -> list[Interval]:
        """When, between `begin` and `end`, the program did something else than wait for a call.

        Kernels of other calls count as something else. `own` holds the times at which kernels of this call began.
        """
        waits = self.waits.within(begin, end)
        if self.waiting:
            waits.append((self._waiting_since, perf_counter()))
        others = [kernel for kernel in self.kernels.within(begin, end) if kernel[0] not in own]
        return union([*between(union(waits), begin, end), *others])
