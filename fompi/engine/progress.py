"""The helper thread: it moves messages while a rank computes. MPI libraries do not do this reliably by themselves.

FOMPI_PROGRESS chooses the mode, and `python -m fompi info` shows it:

| mode     | while a kernel runs, or the program does something else                                      |
|----------|----------------------------------------------------------------------------------------------|
| `auto`   | `helper`, or `library` on a machine (FOMPI_MACHINE) that was measured to need no more        |
| `helper` | a thread polls, sleeps between polls, and computes sums whose operands have arrived          |
| `library` | the same, but with few polls: for a library that moves messages by itself (`measure_unaided`) |
| `poll`   | messages do not move: they move only between kernels, and while the program waits or asks.   |
|          | If MPI allows only one thread to call it, this is always the mode                            |

If each rank has two cores, a second thread (`Worker`) runs the products of calls that the program does not wait for,
and the helper goes on polling. With one core the helper runs them.

The helper sleeps while another thread polls, and while the only work in flight is kernels that the program runs. With
one core per rank it polls rarely, because each poll takes the core from the kernel for about 30 us. The time between
two polls follows the recent time between messages, so large messages on a slow link cost fewer polls.

Calls that C carries out are polled by a thread of C instead, which needs no GIL (docs/inside/native.md). While there
are no others, the helper rests.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from statistics import median
from threading import Event, Lock, Thread
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from fompi.mpi import environment

if TYPE_CHECKING:
    from fompi.mpi.link import Link

HELPED = ("helper", "library")
"""The modes with a helper thread."""

SCARCE_SECONDS, SPARE_SECONDS, RARE_SECONDS = 1e-3, 50e-6, 4e-3
"""Seconds between two polls of the helper.

With one core per rank it is SCARCE_SECONDS: a poll costs the kernel 30 us, so 3 %. With more cores it is SPARE_SECONDS.
RARE_SECONDS is for a library that moves messages by itself, and the most if messages arrive rarely.
"""

ENOUGH_SHARE = 0.9
"""A library that moves at least this share of a message by itself needs few polls."""

POLLS_PER_MESSAGE = 4
"""The helper polls this many times in the average interval between two messages."""

POLLS_PER_WAKE = 3
"""The helper polls this often each time it wakes. In Open MPI one poll receives data that the next poll reports."""

TURN_SECONDS, PAUSE_SECONDS = 1e-3, 1e-4
"""While messages keep arriving, the helper pauses after each turn. Else a thread that waits for the engine's lock might
never get it: Python's locks are not fair.
"""

LINGER_SECONDS = 0.05
"""How long the helper stays awake after the last operation has finished."""

REST_SECONDS = 20e-3
"""How often the helper receives control messages while only kernels of the program are in flight."""

SLICE_SECONDS = 1e-4
"""The time slice that the helper requests from the scheduler, in seconds: the least that Linux grants."""

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274, "ppc64le": 355, "s390x": 345}
"""The number of the system call sched_setattr on each processor type."""

_SCHED_ATTR = struct.Struct("<IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period


def choose_mode(choice: str, thread_level: str, unaided_share: float = 0.0) -> str:
    """The mode for FOMPI_PROGRESS=`choice` at this thread level of MPI. Raises LaunchError for an unknown mode.

    `unaided_share` is the share of a message that the library moves by itself (`Machine.unaided_share`).
    """
    environment.check("FOMPI_PROGRESS", choice)
    if thread_level != "multiple":
        return "poll"  # the program may be inside MPI at any time, so no second thread may call it
    if choice != "auto":
        return choice
    return "library" if unaided_share >= ENOUGH_SHARE else "helper"


class Pause(NamedTuple):
    """How long the helper thread sleeps between two polls: the least and the most, in seconds."""

    least: float
    most: float

    def after(self, gap: float) -> float:
        """How long it sleeps if messages arrive `gap` seconds apart."""
        return min(max(gap / POLLS_PER_MESSAGE, self.least), self.most)

    def in_c(self) -> Pause:
        """How long the thread of C sleeps. It needs no GIL, so a wake takes half as long."""
        return Pause(max(self.least / 5, SPARE_SECONDS), max(self.most / 4, SPARE_SECONDS))

    def __str__(self) -> str:
        most = "" if self.most == self.least else f" to {1e3 * self.most:.4g}"
        return f"{1e3 * self.least:.4g}{most} ms"


def has_spare(cores: float) -> bool:
    """True if a rank with `cores` cores has one core for messages and one for kernels."""
    return cores >= 2


def pause_between_polls(mode: str, cores: float) -> Pause:
    """How long the helper sleeps between two polls if each rank has `cores` cores."""
    if mode == "library":
        return Pause(RARE_SECONDS, RARE_SECONDS)
    return Pause(SPARE_SECONDS, SPARE_SECONDS) if has_spare(cores) else Pause(SCARCE_SECONDS, RARE_SECONDS)


def request_short_slices() -> bool:
    """Request short time slices, so that this thread gets the core at once when it wakes. False: not supported.

    By default it waits until the slice of the running kernel has ended, 3 ms or more. Since Linux 6.12 a thread with
    shorter slices does not wait. (sched_setattr(2); Documentation/scheduler/sched-eevdf.rst)
    """
    number = _SCHED_SETATTR.get(os.uname().machine)
    if number is None or not hasattr(os, "sched_getscheduler") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    request = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, 0, nice, 0, int(1e9 * SLICE_SECONDS), 0, 0)
    return not ctypes.CDLL(None).syscall(number, 0, ctypes.create_string_buffer(request), 0)


class Worker:
    """A thread that runs functions one after the other, in the order of `run` calls."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread: Thread | None = None

    def run(self, task: Callable[[], object]) -> None:
        """Run `task` in the thread, later. Only one thread may call this."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="fompi compute", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def _run(self) -> None:
        while True:
            with suppress(KeyboardInterrupt, SystemExit):  # a kernel raised it; the wait for its call raises it again
                self._tasks.get()()


class Driven(Protocol):
    """What a helper needs from the engine that it drives."""

    polls: int
    """How many polls there were, by any thread."""

    computing: int
    """How many kernels run at this moment."""

    kernel_began: float
    """When the last kernel began, in seconds of perf_counter."""

    longest_forwarding: float
    """The longest kernel of a call that sends what it receives, in seconds. 0: none since the engine was last idle."""

    @property
    def idle(self) -> bool:
        """True if nothing is in flight."""

    @property
    def needs_no_poll(self) -> bool:
        """True if a poll can move nothing of what is in flight."""

    def progress(self, helping: bool = False) -> bool:
        """Poll, then run one kernel. False: nothing was done."""

    def receive_control(self) -> bool:
        """Answer control messages, and move nothing else."""


class Helper:
    """A thread that drives the engine while no other thread does, and sleeps between polls.

    If there is a `worker`, products run in that thread.
    """

    def __init__(self, engine: Driven, pause: Pause, worker: Worker | None = None):
        self.engine, self.worker, self._moved_at = engine, worker, 0.0
        self.library: Any = None  # whose thread polls the calls that are in C
        self.use(pause)
        self._awake = self._resting = self._stopped = False
        self._wake_up, self._lock = Event(), Lock()
        self._thread: Thread | None = None

    def use(self, pause: Pause) -> None:
        """Sleep between polls as `pause` says."""
        self.pause, self.seconds = pause, pause.least
        if self.library is not None:
            self.library.help(*pause.in_c())

    def share(self, library: Any) -> None:
        """Let a thread of C poll the calls that are in C, as this one does (`fompi.native._native.Library`)."""
        if self.library is None and not self._stopped and library.help(*self.pause.in_c()):
            self.library = library

    def stop_sharing(self) -> None:
        """End the thread of C, until the next call in C."""
        library, self.library = self.library, None
        if library is not None:
            library.stop()

    def wake(self, must_poll: bool = True) -> None:
        """Something is in flight. `must_poll`: the helper may have to move it."""
        if self._awake or self._stopped:
            if self._resting and must_poll:
                self._wake_up.set()
                if self.library is not None:
                    self.library.wake()
            return
        with self._lock:
            self._awake = True
            if self._thread is None:
                self._thread = Thread(target=self._run, name="fompi progress", daemon=True)
                self._thread.start()
        self._wake_up.set()

    def stop(self) -> None:
        """End the thread, before MPI_Finalize."""
        self._stopped = True
        self._wake_up.set()
        self.stop_sharing()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        request_short_slices()
        while not self._stopped:
            self._wake_up.wait()
            self._wake_up.clear()
            try:
                self._drive()
            except (KeyboardInterrupt, SystemExit):
                self._wake_up.set()  # a kernel raised it; the wait for its call raises it again, so go on here

    def _drive(self) -> None:
        """Poll until nothing has been in flight for `LINGER_SECONDS`."""
        engine, busy_at = self.engine, perf_counter()
        seen_polls = engine.polls
        while not self._stopped:
            self._resting = True  # set before `needs_no_poll` is read: a call that begins later then wakes this thread
            if engine.needs_no_poll:
                self._rest()
            else:
                seconds = self.seconds
                if engine.longest_forwarding:  # other ranks wait for the next message: poll in the middle of a kernel
                    seconds = min(seconds, max(self.pause.least, engine.longest_forwarding / 2))
                remaining = engine.kernel_began + seconds - perf_counter()  # there was a poll just before the kernel
                sleep(remaining if 0 < remaining < seconds else seconds)
            self._resting = False
            if engine.idle and not engine.computing:
                if perf_counter() - busy_at > LINGER_SECONDS:
                    self._awake = False
                    if engine.idle:  # no call has begun since, while `_awake` kept `wake` from setting the event
                        return
                    self._awake = True
                engine.longest_forwarding = 0.0
            else:
                busy_at = perf_counter()
                if engine.polls == seen_polls and not engine.needs_no_poll:  # no other thread polls
                    self._poll()
            seen_polls = engine.polls

    def _rest(self) -> None:
        """Wait until there is something to poll, or something that C leaves to Python."""
        engine = self.engine
        if self.library is None:
            self._wake_up.wait(REST_SECONDS)
        else:
            self.library.rest(REST_SECONDS)
        self._wake_up.clear()
        if engine.computing:  # if nothing is computing, MPI may be finalized
            engine.receive_control()  # other ranks may ask whether this rank is alive
        if self.library is not None and not engine.idle:
            engine.progress(helping=True)

    def _poll(self) -> None:
        """Make progress, and adapt the time until the next poll to the time between messages."""
        moved, since = False, perf_counter()
        for _ in range(POLLS_PER_WAKE):
            while self.engine.progress(helping=True) and not self._stopped:
                moved = True
                if perf_counter() - since > TURN_SECONDS:  # the program may wait for the engine's lock
                    sleep(PAUSE_SECONDS)
                    since = perf_counter()
        if moved:
            now = perf_counter()
            self.seconds, self._moved_at = self.pause.after(now - self._moved_at), now


# ------------------------------------------------------- measured: how much of a message the library moves by itself

PROBE_NBYTES, PROBE_SECONDS = 4 << 20, 0.03
"""The measured message has 4 MiB, or fewer bytes on a slow link: as many as take 30 ms."""

SHORTEST_SECONDS = 1e-3
"""A message that takes less time than this gives no result: it is too short to measure."""

LOST_SECONDS = 2.0
"""A message that takes longer than this is abandoned."""


class UnaidedShare(NamedTuple):
    """The share of a message of `nbytes` that the library moves while the program does not call it.

    `seconds` is the time of the message if all ranks poll. If `share` is None, `skipped` says why.
    """

    nbytes: int
    seconds: float
    share: float | None
    skipped: str | None = None


def unaided_share(polled: float, rest: float) -> float:
    """The share for a message that takes `polled` seconds with polls.

    `rest` is the time that it still took after a sleep that was long enough for the whole message.
    """
    return min(1.0, max(0.0, 1.0 - rest / polled))


def measure_unaided(link: Link, rounds: int = 3) -> UnaidedShare:
    """Measure how much of a message the library moves while the program sleeps. The slowest rank counts.

    Each rank sends to the next rank and polls. Then it sends again, sleeps, and polls after that. Collective. Takes a
    few tenths of a second.
    """
    if link.size == 1:
        return UnaidedShare(0, 0.0, None, "there is one rank")
    small, nbytes = PROBE_NBYTES // 16, PROBE_NBYTES
    buffers = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    seconds = 0.0
    for _ in range(2):  # the first exchange opens the connection
        seconds = _exchange(link, buffers, small)
    if seconds < LOST_SECONDS:
        nbytes = min(nbytes, max(small, int(small * PROBE_SECONDS / seconds)))
        seconds = _exchange(link, buffers, nbytes)
    if seconds >= LOST_SECONDS:
        return UnaidedShare(
            nbytes, seconds, None, f"{nbytes >> 10} KiB to the next rank took more than {LOST_SECONDS:g} s"
        )
    polled, shares = [], []
    for _ in range(rounds):
        polled.append(_exchange(link, buffers, nbytes))
        rest = _exchange(link, buffers, nbytes, pause=1.5 * polled[-1] + 1e-3)
        shares.append(unaided_share(polled[-1], rest))
    seconds = median(polled)
    if seconds < SHORTEST_SECONDS:
        return UnaidedShare(
            nbytes, seconds, None, f"{nbytes >> 10} KiB take {1e3 * seconds:.2f} ms: too short to measure"
        )
    return UnaidedShare(nbytes, seconds, median(shares))


def _exchange(link: Link, buffers: tuple[Any, Any], nbytes: int, pause: float = 0.0) -> float:
    """Send to the next rank, receive from the previous one, and sleep for `pause` before the first poll.

    Returns the seconds from the end of the pause until both messages are done, on the slowest rank.
    """
    _gather_times(link, 0.0)  # all ranks begin together
    outgoing, incoming = buffers
    requests = [
        link.irecv(incoming[:nbytes], (link.rank - 1) % link.size, 0),
        link.isend(outgoing[:nbytes], (link.rank + 1) % link.size, 0),
    ]
    if pause:
        sleep(pause)
    begun = perf_counter()
    while not all([request.Test() for request in requests]):
        if perf_counter() - begun > LOST_SECONDS:
            link.given_up.append((requests, buffers))  # the memory must stay: MPI may still write to it
            break
        os.sched_yield()
    return float(max(_gather_times(link, perf_counter() - begun)))


def _gather_times(link: Link, seconds: float) -> Any:
    """The `seconds` of all ranks. Collective."""
    times = np.empty(link.size)
    link.comm.Allgather(np.array([seconds]), times)
    return times
