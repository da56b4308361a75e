"""What is in flight in this process, and who drives it.

One Engine for all communicators: any call that waits drives every operation that was started, so ranks may start and
wait in different orders. A Task is something in flight (a run of a plan, an agreement before it): it has requests,
kernels that a thread runs, and kernels that a device runs by itself. Kernels run outside the engine's lock, so that a
helper thread (`fompi.engine.progress`) moves messages meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Sequence
from functools import partial
from threading import RLock
from time import perf_counter, sleep
from typing import Any

from fompi.backends.base import Token
from fompi.base.errors import PeerError, WaitTimeout
from fompi.engine.progress import POLLS_PER_WAKE, Helper
from fompi.engine.tasks import InParts, Peers, Recent, Task
from fompi.mpi.link import Link
from fompi.plans.plan import MESSAGE_BITS
from fompi.traces.trace import Interval, between, union


def slots(link: Link) -> int:
    """How many calls in flight have tags of their own."""
    return 1 << min(link.tag_bits - MESSAGE_BITS - 1, 18)


EAGER_NBYTES = 4096
"""A message of so many bytes is copied by any MPI when it is sent: a look at it when it was sent saves a poll."""

SPINS, YIELDS = 20, 280
"""So often a wait polls at once, then after it has offered the core to others; after that it sleeps between polls.

Twenty are what a small message takes on one host. More would rob ranks that share the core without knowing, as those of
two containers do: they move messages too.
"""

SPIN_SECONDS = 1e-4
"""A program that asks so soon again whether something is done does nothing else."""

ERROR_SECONDS = 0.5
"""How long a call with an error is waited for, if other ranks may come to it late."""


class Engine:
    """Every request of every task, tested together. Thread-safe; whoever waits drives all."""

    def __init__(
        self,
        testsome: Callable[[list[Any]], list[int] | None],
        timeout: float,
        spins: int,
        progress_mode: str = "poll",
        helper: Callable[[Engine], Helper] | None = None,
    ):
        self.timeout, self.spins, self.progress_mode = timeout, spins, progress_mode
        self.lock = RLock()
        self.channels: list[Any] = []  # control channels (`fompi.engine.control`) register themselves
        self.waiting: list[tuple[Task, Peers]] = []  # innermost last
        self.last_began: tuple[str, Any, int] | None = None  # what, the communicator, the stamp
        self.arena: Any = None  # where outputs and scratch come from
        self.report: Any = None  # where finished calls are noted (`fompi.runtime.report`), if somebody wants that
        self.machine: Any = None  # that of all ranks, if FOMPI_MACHINE names one
        self.polls = 0
        self.waits = Recent(SPIN_SECONDS)  # when the program waited for whatever, or asked again and again
        self.kernels = Recent()  # when threads ran one
        self.computing = 0  # kernels that threads run at this moment
        self.began = 0.0  # when the last of them began
        self.longest = 0.0  # seconds of one of a call that forwards, since nothing was in flight
        self.helper = helper(self) if helper is not None else None
        self._testsome = testsome
        self._waits_since = 0.0
        self._requests: list[Any] = []
        self._owners: list[tuple[Task, int]] = []
        self._ready: list[Task] = []
        self._launched: list[tuple[Token, Task, int]] = []

    @property
    def last_call(self) -> str:
        """The last call that began here, in words: they are made only when somebody asks."""
        if self.last_began is None:
            return "none yet"
        what, comm, stamp = self.last_began
        return f"{what} ({comm.call_name(stamp)})"

    def post(self, request: Any, task: Task, key: int) -> None:
        """Call `task.completed(key)` once `request` is done."""
        self._requests.append(request)
        self._owners.append((task, key))

    def sent(self, request: Any, nbytes: int, task: Task, key: int) -> bool:
        """Whether a send is done by now, as small ones are that leave at once; else as `post`."""
        if nbytes <= EAGER_NBYTES and request.Test():
            return True
        self.post(request, task, key)
        return False

    def post_all(self, requests: Sequence[Any], task: Task, key: int) -> None:
        """Call `task.completed(key)` once all of them are done."""
        owner = InParts(task, len(requests))
        for request in requests:
            self.post(request, owner, key)

    def kernels_ready(self, task: Task) -> None:
        if task not in self._ready:
            self._ready.append(task)

    def kernels_done(self, task: Task) -> None:
        self._ready.remove(task)

    def launched(self, token: Token, task: Task, key: int) -> None:
        """Call `task.completed(key)` once a device has run this kernel."""
        self._launched.append((token, task, key))

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        return not (self._requests or self._ready or self._launched)

    @property
    def rests(self) -> bool:
        """Whether what is in flight gains nothing from a poll: there are only kernels, and the program runs them."""
        return not (self._requests or self._launched or (self._ready and not self.attended))

    @property
    def attended(self) -> bool:
        """Whether a thread of the program is at it, which runs kernels itself."""
        return self.computing > 0 or bool(self.waiting) or any(task.awaited for task in self._ready)

    def assist(self) -> None:
        """Others must move what is in flight: the caller goes on with work of its own, or with a long kernel."""
        if self.helper is not None:
            self.helper.wake()

    def progress(self, helping: bool = False) -> bool:
        """Move whatever can move: take in what has arrived, then run one kernel. False: nothing did.

        The kernel runs without the lock. `helping`: only a sum or a copy, if a thread of the program is at the rest;
        if none is, but the helper has a worker, that one runs the product.
        """
        worker = self.helper.worker if helping and self.helper is not None else None
        with self.lock:
            moved = self.poll()
            taken = self._take(helping and (worker is not None or self.attended)) if self._ready else None
            handed = taken is None and worker is not None and not self.attended
            if handed:
                taken = self._take(merges_only=False)
            if taken is None:
                return moved
            self.computing += 1
        if handed and worker is not None:
            worker.run(partial(self._work, *taken))
            return True
        task, key, kernel = taken
        if task.is_long and self._requests:
            self.poll_thoroughly()
            self.assist()
        self._run(task, key, kernel)
        return True

    def poll_thoroughly(self) -> None:
        """Take in all that has come, however many polls the library needs: the next may be long in coming."""
        with self.lock:
            for _ in range(POLLS_PER_WAKE - 1):  # besides the one before
                while self.poll():
                    pass

    def ask(self) -> None:
        """As `progress`, for a program that wants to know whether something is done: that is waiting too."""
        begun = perf_counter()
        self.progress()
        self.waits.add(begun, perf_counter())

    def _work(self, task: Task, key: int, kernel: Callable[[], object]) -> None:
        """In the thread of the worker."""
        try:
            self._run(task, key, kernel)
        finally:
            self.assist()  # it may rest while only this kernel is in flight

    def _run(self, task: Task, key: int, kernel: Callable[[], object]) -> None:
        """Run a kernel that was taken, without the lock."""
        error = None
        self.began = begun = perf_counter()
        try:
            kernel()
        except BaseException as raised:
            error = raised
        with self.lock:
            self.computing -= 1
            ended = perf_counter()
            if task.forwards:
                self.longest = max(self.longest, ended - begun)
            self.kernels.add(begun, ended)
            try:
                task.ran(key, begun, error)
            except Exception as raised:
                task.broke(raised)
        if error is not None and not isinstance(error, Exception):  # an interrupt ends more than this call
            raise error

    def _take(self, merges_only: bool) -> tuple[Task, int, Callable[[], object]] | None:
        for task in self._ready:
            taken = task.take(merges_only)
            if taken is not None:
                return task, *taken
        return None

    def poll(self) -> bool:
        """Take in what has arrived; now and then, what the other ranks say. False: nothing had."""
        self.polls += 1
        moved = self.polls % 64 == 0 and self.receive_control()
        if self._launched:
            moved |= self._finish_launched()
        requests, owners = self._requests, self._owners
        if not requests:
            return moved
        if len(requests) == 1:  # one is cheaper to ask than a list of one
            done = [0] if requests[0].Test() else None
        else:
            done = self._testsome(requests)
        if not done:
            return moved
        if len(done) == len(requests):
            self._requests, self._owners = [], []
            self._complete(owners)
            return True
        completed = [owners[i] for i in done]
        for i in sorted(done, reverse=True) if len(done) > 1 else done:
            last, owner = requests.pop(), owners.pop()
            if i < len(requests):
                requests[i], owners[i] = last, owner
        self._complete(completed)
        return True

    def _finish_launched(self) -> bool:
        done = [(task, key) for token, task, key in self._launched if token.done()]
        if done:
            self._launched = [one for one in self._launched if (one[1], one[2]) not in done]
            self._complete(done)
        return bool(done)

    @staticmethod
    def _complete(owners: Sequence[tuple[Task, int]]) -> None:
        for task, key in owners:
            try:
                task.completed(key)
            except Exception as error:
                task.broke(error)

    def receive_control(self) -> bool:
        """Take in the control messages that have come. False: none had."""
        with self.lock:
            return any([channel.receive() for channel in list(self.channels)])

    def wait(self, task: Task, channel: Peers, seconds: float | None = None, patient: bool = False) -> bool:
        """Drive everything until `task` is finished; False if `seconds` pass before.

        After `timeout` seconds without a move of `task` it is abandoned: its error says who waits for whom. Unless we
        are `patient`, a task with an error is not waited for for long: other ranks may come to it late.
        """
        begun = perf_counter()
        limit = None if seconds is None else begun + seconds
        idle = rounds = 0
        if not self.waiting:
            self._waits_since = begun
        self.waiting.append((task, channel))
        try:
            while not task.finished:
                rounds += 1
                if self.progress():
                    idle = 0
                else:
                    idle += 1
                    if idle > self.spins:
                        self._rest(idle - self.spins)
                if idle > self.spins + YIELDS or rounds % 256 == 0:  # others may move while this task does not
                    self._check(task, channel, begun)
                    if task.error is not None and not patient and perf_counter() - task.failed > ERROR_SECONDS:
                        break
                if limit is not None and not task.finished and perf_counter() > limit:
                    return False
        finally:
            self.waiting.remove((task, channel))
            task.awaited = False
            if not self.waiting:
                self.waits.add(self._waits_since, perf_counter())
        return True

    def elsewhere(self, begin: float, end: float, own: Container[float]) -> list[Interval]:
        """When, of this time, the program did something else than wait. Kernels are, but those that began at `own`."""
        waits = self.waits.within(begin, end)
        if self.waiting:
            waits.append((self._waits_since, perf_counter()))
        others = [kernel for kernel in self.kernels.within(begin, end) if kernel[0] not in own]
        return union([*between(union(waits), begin, end), *others])

    def departure(self, world_ranks: Sequence[int]) -> PeerError | None:
        """What to say to who waits for all of these to make a communicator, if one of them has left."""
        for channel in self.channels:
            for rank, words in list(channel.departed.items()):
                if channel.link.world_ranks[rank] in world_ranks:
                    wait = f"rank {channel.link.rank} waits for all ranks to come to the creation of a communicator"
                    return PeerError(f"{wait}, but {words}", rank)
        return None

    def _rest(self, times: int) -> None:
        """Leave the core to others: first for a moment, then for longer, but not beyond the end of a kernel."""
        if times <= YIELDS:
            os.sched_yield()
            return
        pause = min(times - YIELDS, 10) * 30e-6
        if self._launched:
            pause = min(pause, min(token.due for token, _, _ in self._launched) - perf_counter())
        if pause > 0:
            sleep(pause)

    def _check(self, task: Task, channel: Peers, begun: float) -> None:
        """End the wait that began at `begun` for a rank that has left, or after the deadline."""
        self.receive_control()
        if task.finished:
            return
        silent = perf_counter() - max(task.touched, begun)
        if channel.departed and silent > 0.2:
            awaited = task.waits_for()
            missing = channel.missing(task.begins, awaited)
            if missing is not None and not self.progress():  # what came before its last words may be here by now
                if task.finished:
                    return
                words = f"rank {channel.link.rank} waits for {awaited[1]}, but {channel.departed[missing]}"  # type: ignore[index]
                channel.fail(task, PeerError(words, missing))
                return
        if silent > self.timeout and not channel.asking and not self.computing:  # else it may be its kernel that runs
            moved, words = task.touched, channel.explain(task)
            if not task.finished and task.touched == moved:  # also not while we asked
                channel.fail(task, WaitTimeout(words))
