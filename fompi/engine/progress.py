"""Who moves messages while a rank computes: no MPI library can be trusted to do it by itself.

| mode     | while a kernel of ours runs, or the program does something else                              |
|----------|----------------------------------------------------------------------------------------------|
| `auto`   | `helper`, or `native` on a machine (FOMPI_MACHINE) that was measured to need no more         |
| `helper` | a thread sleeps and polls in turns, and makes sums whose pieces have come                    |
| `native` | the same, but seldom: for a library that moves messages by itself (`measure_native`)         |
| `poll`   | nobody: messages move between kernels, and when the program asks; always so where MPI lets   |
|          | only one thread call it                                                                      |

Where each rank has two cores, a second thread runs the products of calls that nobody waits for (`Worker`), and the
helper goes on polling. With one core the helper runs them itself.

The helper sleeps as long as others poll, and while only kernels that the program runs are in flight. With one core for
a rank it wakes seldom: each time it takes the core from the kernel for some 30 us. It then polls a few times in what
messages have lately taken, so that large ones on a slow link cost fewer polls. FOMPI_PROGRESS chooses the mode,
`python -m fompi info` shows it.
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

from fompi.base.errors import LaunchError

if TYPE_CHECKING:
    from fompi.mpi.link import Link

MODES = ("auto", "helper", "native", "poll")
HELPED = ("helper", "native")
"""Those with a helper."""

SCARCE_SECONDS, SPARE_SECONDS, SELDOM_SECONDS = 1e-3, 50e-6, 4e-3
"""Between two polls: with one core for a rank, with more, and where the library or the messages need no more."""

ENOUGH_SHARE = 0.9
"""Of a message: a library that moves so much of it by itself needs little help."""

POLLS_A_MESSAGE = 4
"""So often, from one message that the helper takes in to the next."""

POLLS_PER_WAKE = 3
"""Each time it wakes: Open MPI takes in with one poll what another one then finds."""

LINGER_SECONDS, REST_SECONDS = 0.05, 5e-3
"""For so long the helper stays awake when nothing is in flight. While only kernels are, it looks so often."""


SLICE_SECONDS = 1e-4
"""Of the core, that the helper asks for: the least that Linux grants."""

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274, "ppc64le": 355, "s390x": 345}
"""The number of the system call, by the processor."""

_SCHED_ATTR = struct.Struct("<IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period


def choose_mode(asked: str, thread_level: str, native_share: float = 0.0) -> str:
    """What FOMPI_PROGRESS=`asked` comes to, where MPI gave this thread level. Raises LaunchError for no mode.

    `native_share`: of a message, as it was measured to move by itself (`Machine.native_share`).
    """
    if asked not in MODES:
        raise LaunchError(f"FOMPI_PROGRESS={asked}: give one of {', '.join(MODES)}")
    if thread_level != "multiple":
        return "poll"  # the program may be inside MPI at any time
    if asked != "auto":
        return asked
    return "native" if native_share >= ENOUGH_SHARE else "helper"


class Pause(NamedTuple):
    """Seconds for which the helper sleeps between polls: so many at least, and at most."""

    least: float
    most: float

    def after(self, gap: float) -> float:
        """When messages come `gap` seconds apart."""
        return min(max(gap / POLLS_A_MESSAGE, self.least), self.most)

    def __str__(self) -> str:
        most = "" if self.most == self.least else f" to {1e3 * self.most:.4g}"
        return f"{1e3 * self.least:.4g}{most} ms"


def has_spare(cores: float) -> bool:
    """Whether a rank with so many cores has one for messages beside that for kernels."""
    return cores >= 2


def pause_between_polls(mode: str, cores: float) -> Pause:
    """Of the helper, where each rank has so many cores."""
    if mode == "native":
        return Pause(SELDOM_SECONDS, SELDOM_SECONDS)
    return Pause(SPARE_SECONDS, SPARE_SECONDS) if has_spare(cores) else Pause(SCARCE_SECONDS, SELDOM_SECONDS)


def ask_for_short_slices() -> bool:
    """Let this thread take the core at once when it wakes; False where the system knows no such wish.

    Else it waits for the slice of the kernel that runs, 3 ms and more. Since Linux 6.12 a thread with shorter slices
    need not. (sched_setattr(2); Documentation/scheduler/sched-eevdf.rst)
    """
    number = _SCHED_SETATTR.get(os.uname().machine)
    if number is None or not hasattr(os, "sched_getscheduler") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wish = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, 0, nice, 0, int(1e9 * SLICE_SECONDS), 0, 0)
    return not ctypes.CDLL(None).syscall(number, 0, ctypes.create_string_buffer(wish), 0)


class Worker:
    """A thread that runs one thing after the other, in the order in which they come."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread: Thread | None = None

    def run(self, task: Callable[[], object]) -> None:
        """Some time later; for one thread to call."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="fompi compute", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def _run(self) -> None:
        while True:
            with suppress(KeyboardInterrupt, SystemExit):  # of a kernel: raised where its call is waited for
                self._tasks.get()()


class Driven(Protocol):
    """What a helper needs of what it drives: of an engine."""

    polls: int
    """A number that changes whenever somebody polls."""

    computing: int
    """Kernels that run at this moment."""

    began: float
    """When the last of them began."""

    longest: float
    """Seconds of the longest kernel of a call that sends what it receives, since nothing was in flight; 0: none."""

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""

    @property
    def rests(self) -> bool:
        """Whether what is in flight gains nothing from a poll."""

    def progress(self, helping: bool = False) -> bool:
        """Move whatever can move; whether anything did."""

    def receive_control(self) -> bool:
        """Answer others, but move nothing."""


class Helper:
    """A thread that drives the engine while nobody else does, and sleeps between polls.

    With a `worker` it leaves products to that one.
    """

    def __init__(self, engine: Driven, pause: Pause, worker: Worker | None = None):
        self.engine, self.worker, self._moved = engine, worker, 0.0
        self.use(pause)
        self._awake = self._resting = self._stopped = False
        self._call, self._lock = Event(), Lock()
        self._thread: Thread | None = None

    def use(self, pause: Pause) -> None:
        self.pause, self.seconds = pause, pause.least

    def wake(self) -> None:
        """Something is in flight that others may have to move."""
        if self._awake or self._stopped:
            if self._resting:
                self._call.set()
            return
        with self._lock:
            self._awake = True
            if self._thread is None:
                self._thread = Thread(target=self._run, name="fompi progress", daemon=True)
                self._thread.start()
        self._call.set()

    def stop(self) -> None:
        """End the thread: MPI is about to be left."""
        self._stopped = True
        self._call.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        ask_for_short_slices()
        while not self._stopped:
            self._call.wait()
            self._call.clear()
            try:
                self._assist()
            except (KeyboardInterrupt, SystemExit):
                self._call.set()  # a kernel's, and the error of its call: raised where that is waited for, not here

    def _assist(self) -> None:
        """Poll until nothing has been in flight for a while."""
        engine, busy = self.engine, perf_counter()
        seen = engine.polls
        while not self._stopped:
            self._resting = True  # before we look: who begins something later sets the event
            if engine.rests:
                self._call.wait(REST_SECONDS)
                self._call.clear()
                if engine.computing:  # else MPI may be over
                    engine.receive_control()  # others may ask whether we are alive
            else:
                seconds = self.seconds
                if engine.longest:  # others wait for what is seen here: look in the middle of its kernels
                    seconds = min(seconds, max(self.pause.least, engine.longest / 2))
                left = engine.began + seconds - perf_counter()
                sleep(left if 0 < left < seconds else seconds)  # who began a kernel has polled before it
            self._resting = False
            if engine.idle and not engine.computing:
                if perf_counter() - busy > LINGER_SECONDS:
                    self._awake = False
                    if engine.idle:  # nothing began meanwhile, without waking us
                        return
                    self._awake = True
                engine.longest = 0.0
            else:
                busy = perf_counter()
                if engine.polls == seen and not engine.rests:  # nobody else does
                    self._look()
            seen = engine.polls

    def _look(self) -> None:
        moved = False
        for _ in range(POLLS_PER_WAKE):
            while self.engine.progress(helping=True) and not self._stopped:
                moved = True
        if moved:
            now = perf_counter()
            self.seconds, self._moved = self.pause.after(now - self._moved), now


# -------------------------------------------------------------------------------- does the library do it?

PROBE_NBYTES, PROBE_SECONDS, TELLING_SECONDS, LOST_SECONDS = 4 << 20, 0.03, 1e-3, 2.0
"""A message so large, or as takes so long; what is quicker tells nothing, and what takes longer is given up."""


class Native(NamedTuple):
    """The share of a message of `nbytes` that the library moves while the program stays out of it.

    `seconds` is what the message takes if all ranks poll. No share: `skipped` says why.
    """

    nbytes: int
    seconds: float
    share: float | None
    skipped: str | None = None


def native_share(polled: float, rest: float) -> float:
    """Of a message that takes `polled` seconds, and took `rest` after a silence that was long enough for all of it."""
    return min(1.0, max(0.0, 1.0 - rest / polled))


def measure_native(link: Link, rounds: int = 3) -> Native:
    """Each rank sends to the next one, and polls; then again, but sleeps before it polls. The slowest rank counts.

    Collective; takes some tenths of a second.
    """
    if link.size == 1:
        return Native(0, 0.0, None, "there is one rank")
    small, nbytes = PROBE_NBYTES // 16, PROBE_NBYTES
    buffers = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    seconds = 0.0
    for _ in range(2):  # the first time makes the connection
        seconds = _exchange(link, buffers, small)
    if seconds < LOST_SECONDS:
        nbytes = min(nbytes, max(small, int(small * PROBE_SECONDS / seconds)))
        seconds = _exchange(link, buffers, nbytes)
    if seconds >= LOST_SECONDS:
        return Native(nbytes, seconds, None, f"{nbytes >> 10} KiB to the next rank took more than {LOST_SECONDS:g} s")
    polled, shares = [], []
    for _ in range(rounds):
        polled.append(_exchange(link, buffers, nbytes))
        rest = _exchange(link, buffers, nbytes, silence=1.5 * polled[-1] + 1e-3)
        shares.append(native_share(polled[-1], rest))
    seconds = median(polled)
    if seconds < TELLING_SECONDS:
        return Native(nbytes, seconds, None, f"{nbytes >> 10} KiB take {1e3 * seconds:.2f} ms: too quick to tell")
    return Native(nbytes, seconds, median(shares))


def _exchange(link: Link, buffers: tuple[Any, Any], nbytes: int, silence: float = 0.0) -> float:
    """Seconds after the silence until the message of this rank has left and one has come; of the slowest rank."""
    _of_all_ranks(link, 0.0)  # begin together
    outgoing, incoming = buffers
    requests = [
        link.irecv(incoming[:nbytes], (link.rank - 1) % link.size, 0),
        link.isend(outgoing[:nbytes], (link.rank + 1) % link.size, 0),
    ]
    if silence:
        sleep(silence)
    begun = perf_counter()
    while not all([request.Test() for request in requests]):
        if perf_counter() - begun > LOST_SECONDS:
            link.given_up.append((requests, buffers))  # what comes late still has a place
            break
        os.sched_yield()
    return float(max(_of_all_ranks(link, perf_counter() - begun)))


def _of_all_ranks(link: Link, mine: float) -> Any:
    everyone = np.empty(link.size)
    link.comm.Allgather(np.array([mine]), everyone)
    return everyone
