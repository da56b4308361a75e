"""What is in flight in this process: requests, kernels on devices, and tasks with kernels that can run.

`InFlight.poll` is where requests are tested.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import RLock
from time import perf_counter
from typing import Any

from fompi.backends.base import Token
from fompi.engine.port import Port, Queued
from fompi.engine.tasks import MessageParts, Sent, Task, Watch
from fompi.native.numbers import number

EAGER_NBYTES = 4096
"""Every MPI copies a message of up to this many bytes when it is sent. Testing its request right then saves a poll."""

MOST_PARTS = 64
"""At most this many parts of a message are sent or received at a time: each one makes every poll longer."""

CONTROL_POLLS = 64
"""Control messages are rare, so they are received only at every 64th poll."""

STATES = ("FINISHED", "GOES_ON", "STALLED", "FAILED", "DISAGREES", "HAS_KERNELS")
FINISHED, GOES_ON, STALLED, FAILED, DISAGREES, HAS_KERNELS = map(number, STATES)
"""The state of a call in C. The last: it has kernels for Python, and goes on."""

MOVED, ENDED, READY = map(number, ("MOVED", "HAS_ENDED", "HAS_READY"))
"""What a poll of all calls in C says: it has moved something, some call has ended, some has kernels for Python."""

BLAME_SECONDS = 1.0
"""A thread that finds a failed device waits this long for the engine, to learn which operation was the reason."""


class InFlight:
    """Everything in flight, of all tasks. Its methods are called with `lock` held."""

    def __init__(self, testsome: Callable[[list[Any]], list[int] | None]):
        self.lock = RLock()
        self.channels: list[Any] = []  # control channels (`fompi.engine.control`) add themselves
        self.port = Port()  # the sends of axes with priorities
        self.polls = 0
        self._testsome = testsome
        self.watched: list[Watch] = []
        self._requests: list[Any] = []
        self._owners: list[tuple[Task, int]] = []  # for each request: its task and its key
        self._in_c: list[Any] = []  # calls that C carries out (`fompi.runtime.native_run.InC`)
        self._library: Any = None  # which polls them
        self._ready: list[Task] = []  # tasks with kernels that can run
        self._launched: dict[
            Any, deque[tuple[Token, Task, int]]
        ] = {}  # kernels that a device has not finished, by queue

    def test_with(self, testsome: Callable[[list[Any]], list[int] | None]) -> None:
        """From now on `testsome` tests all requests."""
        self._testsome = testsome

    def post(self, request: Any, task: Task, key: int) -> None:
        """Call `task.completed(key)` once `request` is done."""
        self._requests.append(request)
        self._owners.append((task, key))

    @property
    def is_telling(self) -> bool:
        """True if small messages for which no thread waits are still on their way."""
        return any(type(task) is Sent for task, _ in self._owners)

    def post_send(self, request: Any, nbytes: int, task: Task, key: int) -> bool:
        """True if a send is done already, as small sends usually are. If not, this is the same as `post`."""
        if nbytes <= EAGER_NBYTES and request.Test():
            return True
        self.post(request, task, key)
        return False

    def post_all(self, starts: Sequence[Callable[[], Any]], task: Task, key: int) -> None:
        """Call `task.completed(key)` once all requests are done that `starts` return. Few are in flight at a time."""
        owner = MessageParts(task, iter(starts), len(starts), lambda request: self.post(request, owner, key))
        for _ in starts[:MOST_PARTS]:
            owner.start()

    def offer(self, message: Queued) -> None:
        """Send `message` in its turn: at once, if nothing more urgent is on its way."""
        self.port.add(message, perf_counter())
        self.send_held(message)

    def send_held(self, offered: Queued | None = None) -> None:
        """Send all parts of messages whose turn it is. Raises an error of `offered`."""
        while (message := self.port.next(perf_counter())) is not None:
            try:
                self.post(message.begin(), message, 0)
            except Exception as error:
                if message is offered:
                    raise
                message.broke(error)

    def give_up(self, task: Task) -> list[tuple[Any, int]]:
        """Test the requests of an abandoned task no more, and return them, each with its key.

        Who keeps them keeps their memory alive.

        What waits for its turn is never sent.
        """
        self.port.forget(task)
        flights = list(zip(self._requests, self._owners, strict=True))
        own = [(request, key) for request, (owner, key) in flights if owner.belongs_to is task]
        kept = [(request, owner) for request, owner in flights if owner[0].belongs_to is not task]
        self._requests, self._owners = [request for request, _ in kept], [owner for _, owner in kept]
        self.send_held()  # what these messages have held back
        return own

    def launched(self, token: Token, task: Task, key: int) -> None:
        """Call `task.completed(key)` once a device has run the kernel of `token`, or `task.ran` with its error."""
        queue = self._launched.get(token.queue)
        if queue is None:
            queue = self._launched[token.queue] = deque()
        queue.append((token, task, key))

    def blame(self) -> None:
        """A device has failed: tell it which operations have launched the oldest kernels in flight."""
        if self.lock.acquire(timeout=BLAME_SECONDS):  # the caller may hold other locks
            try:
                for queue in self._launched.values():
                    _, task, key = queue[0]
                    task.blame(key)
            finally:
                self.lock.release()

    def poll_kernels(self) -> None:
        """Call `completed` for the kernels that devices have run."""
        if self._launched:
            with self.lock:
                self._finish_launched()

    def settle(self) -> None:
        """Wait for all kernels of calls that are finished for the program."""
        while (task := self._enqueued_task()) is not None:
            task.settle()

    def _enqueued_task(self) -> Task | None:
        with self.lock:
            launched = (task for queue in self._launched.values() for _, task, _ in queue)
            return next((task for task in launched if task.is_enqueued), None)

    def in_c(self, task: Any, library: Any) -> None:
        """Call `task.moved()` when C has ended its call, well or not, or when it has kernels for Python."""
        self._in_c.append(task)
        self._library = library

    def not_in_c(self, task: Any) -> None:
        """This call is finished, or Python goes on with it."""
        self._in_c.remove(task)
        if not self._in_c:
            self._library.news = 0  # nobody is left whom it concerns

    def kernels_ready(self, task: Task) -> None:
        """`task` has kernels that can run: `task.take` hands them out."""
        if task not in self._ready:
            self._ready.append(task)

    def kernels_done(self, task: Task) -> None:
        """`task` has handed out all kernels that can run."""
        if task in self._ready:
            self._ready.remove(task)

    @property
    def idle(self) -> bool:
        """True if nothing is in flight."""
        return not (self._requests or self._in_c or self._ready or self._launched or self.watched)

    def poll(self) -> bool:
        """Test all requests, and call `completed` for those that are done. False: none was done."""
        self.polls += 1
        if self.port.held:
            self.send_held()
        moved = self.polls % CONTROL_POLLS == 0 and self.receive_control()
        if self._launched:
            moved |= self._finish_launched()
        if self._in_c:
            moved |= self._poll_c()
        requests, owners = self._requests, self._owners
        if not requests:
            return moved
        try:
            if len(requests) == 1:  # one request is cheaper to test than a list of one
                done = [0] if requests[0].Test() else None
            else:
                done = self._testsome(requests)
        except Exception as error:  # of MPI, which does not say whose message it is
            awaited = {task.belongs_to.waits_for() for task, _ in owners} - {None}
            error.add_note(f"fompi: this rank waits for {awaited or 'its sends'}")
            raise
        if not done:
            return moved
        if len(done) == len(requests):
            self._requests, self._owners = [], []
            self._complete(owners)
            return True
        completed = [owners[i] for i in done]
        for i in sorted(done, reverse=True) if len(done) > 1 else done:  # the last request moves to the free place
            last, owner = requests.pop(), owners.pop()
            if i < len(requests):
                requests[i], owners[i] = last, owner
        self._complete(completed)
        return True

    def _poll_c(self) -> bool:
        """One round of each call in C."""
        said: int = self._library.poll()
        if said > MOVED:
            for task in [*self._in_c]:
                try:
                    task.moved()
                except Exception as error:
                    task.broke(error)
        return said & (MOVED | ENDED) != 0

    def _finish_launched(self) -> bool:
        """Poll the oldest kernel of each queue: a queue runs in order."""
        done, failed = [], []
        for name, queue in list(self._launched.items()):
            while queue:
                token, task, key = queue[0]
                try:
                    if not token.done():
                        break
                    done.append((task, key))
                except Exception as error:
                    failed.append((task, key, token.begun, error))
                queue.popleft()
            if not queue:
                del self._launched[name]
        self._complete(done)
        for task, key, begun, reason in failed:
            try:
                task.ran(key, begun, reason)
            except Exception as raised:
                task.broke(raised)
        return bool(done or failed)

    @staticmethod
    def _complete(owners: Sequence[tuple[Task, int]]) -> None:
        for task, key in owners:
            try:
                task.completed(key)
            except Exception as error:
                task.broke(error)

    def receive_control(self) -> bool:
        """Take in the control messages that have arrived, on all communicators. False: none had."""
        with self.lock:
            return any([channel.receive() for channel in list(self.channels)])

    def _take_kernel(self, merges_only: bool) -> tuple[Task, int, Callable[[], object]] | None:
        """A kernel that can run, with its task and its key. The caller must run it."""
        for task in [*self._ready]:
            taken = task.take(merges_only)
            if taken is not None:
                return task, *taken
        return None
