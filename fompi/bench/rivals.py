"""The rivals of the fused operations on mpi4py: blocking, pairwise without overlap, and slices, as fast as we can.

`NAME(operation, comm, x, w)` binds a call that computes `operation` on one rank's float32 arrays:

    all_gather_matmul      all_gather(x) @ w
    matmul_reduce_scatter  reduce_scatter(x @ w)
    matmul_all_reduce      all_reduce(x @ w)
    matmul_all_to_all      all_to_all(x @ w)

Rows divide evenly by ranks and slices. Buffers are made once. Rivals get what we give ourselves: receives posted before
anything is sent, messages in the permutations rank -> rank + d and paced, every add made when its piece arrives, and
our own helper, which tests messages while a kernel runs, as seldom as ours does, and rests where there are none.

Slices keep the rows in their standard places: slice j is the j-th part of every shard. One kernel call per slice on
rows that are first put side by side is faster than a call for each shard, which would pack w again and again. For an
all-reduce any runs of rows will do. Sums compute first, gathers communicate first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter, sleep
from typing import Any, NamedTuple

import numpy as np

from fompi.base.errors import LayoutError
from fompi.engine.progress import Helper, pause_between_polls
from fompi.mpi import launcher
from fompi.mpi.link import request_testsome

Array = np.ndarray[Any, Any]
OPERATIONS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all")
SPINS = 50
NAP_SECONDS = 2e-5


def result_rows(operation: str, size: int, rows: int) -> int:
    """Rows of the result of a rank whose x has `rows`."""
    if operation == "all_gather_matmul":
        return rows * size
    return rows // size if operation == "matmul_reduce_scatter" else rows


class Rival(NamedTuple):
    """A call bound to its arrays, and how to give back what it holds."""

    call: Callable[[], Any]
    close: Callable[[], None]


def cut_rows(operation: str, size: int, rows: int, slices: int) -> int:
    """Rows of a piece: of what one rank owns of one slice. Raises LayoutError where they do not come out even."""
    pieces = slices if operation == "all_gather_matmul" else slices * size
    each, rest = divmod(rows, pieces)
    if rest:
        raise LayoutError(f"{operation}: {rows} rows do not divide by {pieces}")
    return each


# --------------------------------------------------------------------------------------------------- what is in flight


class Messages:
    """Requests of one rank: receives at once, sends and collectives in turn, `window` of them in flight.

    `then` is called when a request is done. `kernel()` is a context in which a helper tests meanwhile.
    """

    def __init__(self, comm: Any, window: int):
        self.comm, self.window = comm.Dup(), window
        self.polls = self.computing = 0
        self.began = self.longest = 0.0
        self._testsome = request_testsome()
        self._requests: list[Any] = []
        self._thens: list[tuple[bool, Callable[[], object]]] = []  # whether it had a turn, and what follows
        self._queue: deque[tuple[Callable[[], Any], Callable[[], object]]] = deque()
        self._in_turn = 0
        self._lock = threading.RLock()  # what follows may send again
        self._helper = Helper(self, pause_between_polls("helper", launcher.cores_per_rank()))

    def receive(self, into: Array, source: int, tag: int, then: Callable[[], object]) -> None:
        with self._lock:
            self._requests.append(self.comm.Irecv(into, source, tag))
            self._thens.append((False, then))

    def send(self, array: Array, dest: int, tag: int) -> None:
        self.in_turn(lambda: self.comm.Isend(array, dest, tag))

    def in_turn(self, start: Callable[[], Any], then: Callable[[], object] = lambda: None) -> None:
        with self._lock:
            self._queue.append((start, then))
            self._fill()

    def locked(self, do: Callable[..., object], *arguments: Any) -> None:
        with self._lock:
            do(*arguments)

    @property
    def idle(self) -> bool:
        with self._lock:  # else the helper may be about to send, or to add
            return not self._requests and not self._queue

    rests = idle

    def receive_control(self) -> bool:
        """There is nobody who asks."""
        return False

    def progress(self, helping: bool = False) -> bool:
        """Test all; whether anything was done."""
        with self._lock:
            self.polls += 1
            done = self._testsome(self._requests) if self._requests else None
            if not done:
                return False
            ended = [self._thens[i] for i in done]
            gone = set(done)
            self._requests = [r for i, r in enumerate(self._requests) if i not in gone]
            self._thens = [t for i, t in enumerate(self._thens) if i not in gone]
            self._in_turn -= sum(had_turn for had_turn, _ in ended)
            self._fill()  # before the adds: the wire works meanwhile
            for _, then in ended:
                then()
            return True

    def wait(self, ready: Callable[[], bool]) -> None:
        """Progress until `ready()`; after a while with naps, since others may want the core."""
        idle = 0
        while not ready():
            idle = 0 if self.progress() else idle + 1
            if idle > SPINS:
                sleep(NAP_SECONDS)

    def finish(self) -> None:
        self.wait(lambda: self.idle)

    @contextmanager
    def kernel(self) -> Iterator[None]:
        self.computing, self.began = 1, perf_counter()
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
        while self._queue and self._in_turn < self.window:
            start, then = self._queue.popleft()
            self._requests.append(start())
            self._thens.append((True, then))
            self._in_turn += 1


class Sum:
    """y = the sum of `count` terms, in the order in which they come; `then` follows the last.

    The first two make y, so nothing is cleared or copied.
    """

    def __init__(self, y: Array, count: int, then: Callable[[], object] = lambda: None):
        self.y, self.left, self.then = y, count, then
        self.sum: Array | None = None

    def add(self, term: Array) -> None:
        self.left -= 1
        if self.sum is not None:
            np.add(self.sum, term, out=self.y)
            self.sum = self.y
        elif self.left:
            self.sum = term
        else:
            np.copyto(self.y, term)
        if not self.left:
            self.then()


# --------------------------------------------------------------------------------------------------------- the rivals


def blocking(operation: str, comm: Any, x: Array, w: Array) -> Rival:
    """The kernel and the library's blocking collective, one after the other."""
    comm = comm.Dup()
    y = np.empty((result_rows(operation, comm.size, len(x)), w.shape[1]), x.dtype)
    if operation == "all_gather_matmul":
        gathered = np.empty((len(y), x.shape[1]), x.dtype)

        def call() -> Array:
            comm.Allgather(x, gathered)
            return np.matmul(gathered, w, out=y)

    else:
        product = np.empty((len(x), w.shape[1]), x.dtype)
        collective = {
            "matmul_reduce_scatter": comm.Reduce_scatter_block,
            "matmul_all_reduce": comm.Allreduce,
            "matmul_all_to_all": comm.Alltoall,
        }[operation]

        def call() -> Array:
            np.matmul(x, w, out=product)
            collective(product, y)
            return y

    return Rival(call, comm.Free)


def native_slices(operation: str, comm: Any, x: Array, w: Array, slices: int, window: int = 2) -> Rival:
    """`slices` non-blocking collectives of the library, each while the kernel of another slice runs.

    All-gathers go one at a time: two would share the wire, and the first slice, for which all wait, come later.
    """
    cut = _Cut(operation, comm, x, w, slices, 1 if operation == "all_gather_matmul" else window)
    messages, dup = cut.messages, cut.messages.comm

    def exchange(j: int) -> None:
        product, run = cut.product[j], slice(j * cut.rows, (j + 1) * cut.rows)
        if operation == "matmul_reduce_scatter":
            messages.in_turn(lambda: dup.Ireduce_scatter_block(product, cut.y[run]))
        elif operation == "matmul_all_reduce":
            messages.in_turn(lambda: dup.Iallreduce(product, cut.y_slices[j]))
        else:
            each = cut.rows * cut.columns
            places = [(source * slices + j) * each for source in range(cut.size)]
            counts = [each] * cut.size
            messages.in_turn(lambda: dup.Ialltoallv([product, (counts, None)], [cut.y, (counts, places)]))

    def fetch(j: int) -> None:
        mine = x[j * cut.rows : (j + 1) * cut.rows]
        messages.in_turn(lambda: dup.Iallgather(mine, cut.gathered[j]), partial(cut.arrived, j, cut.size))

    if operation == "all_gather_matmul":
        return Rival(lambda: cut.gather(fetch), messages.close)
    return Rival(lambda: cut.scatter(lambda: None, exchange), messages.close)


def pairwise(operation: str, comm: Any, x: Array, w: Array, slices: int = 1, window: int = 2) -> Rival:
    """Messages in the permutations rank -> rank + d, one exchange per slice; with one slice nothing overlaps."""
    cut = _Cut(operation, comm, x, w, slices, window)
    messages, rank, size, rows = cut.messages, cut.rank, cut.size, cut.rows
    distances = range(1, size)
    if operation == "all_gather_matmul":

        def fetch(j: int) -> None:
            mine = x[j * rows : (j + 1) * rows]
            for d in distances:
                source = (rank - d) % size
                messages.receive(cut.gathered[j, source], source, j, partial(cut.arrived, j, 1))
            for d in distances:
                messages.send(mine, (rank + d) % size, j)
            messages.locked(np.copyto, cut.gathered[j, rank], mine)
            messages.locked(cut.arrived, j, 1)

        return Rival(lambda: cut.gather(fetch), messages.close)

    if operation == "matmul_all_to_all":

        def expect() -> None:
            for j in range(slices):
                for d in distances:
                    source = (rank - d) % size
                    messages.receive(cut.y_places[source, j], source, j, lambda: None)

        def deal(j: int) -> None:
            for d in distances:
                messages.send(cut.product[j, (rank + d) % size], (rank + d) % size, j)
            np.copyto(cut.y_places[rank, j], cut.product[j, rank])

        return Rival(lambda: cut.scatter(expect, deal), messages.close)

    inbox = np.empty((slices, size, rows, cut.columns), x.dtype)
    sums: list[Sum] = []
    all_reduce = operation == "matmul_all_reduce"

    def pass_on(j: int) -> None:
        for d in distances:
            messages.send(cut.y_parts[j, rank], (rank + d) % size, slices + j)

    def expect_terms() -> None:
        sums.clear()
        for j in range(slices):
            y = cut.y_parts[j, rank] if all_reduce else cut.y[j * rows : (j + 1) * rows]
            sums.append(Sum(y, size, partial(pass_on, j) if all_reduce else lambda: None))
            for d in distances:
                source = (rank - d) % size
                messages.receive(inbox[j, d], source, j, partial(sums[j].add, inbox[j, d]))
                if all_reduce:
                    messages.receive(cut.y_parts[j, source], source, slices + j, lambda: None)

    def send_terms(j: int) -> None:
        for d in distances:
            messages.send(cut.product[j, (rank + d) % size], (rank + d) % size, j)
        messages.locked(sums[j].add, cut.product[j, rank])

    return Rival(lambda: cut.scatter(expect_terms, send_terms), messages.close)


class _Cut:
    """x, products and result in slices of `rows` rows for each rank, the buffers for them, and the two loops."""

    def __init__(self, operation: str, comm: Any, x: Array, w: Array, slices: int, window: int):
        self.rank, self.size, self.slices = comm.Get_rank(), comm.Get_size(), slices
        self.x, self.w, self.columns = x, w, w.shape[1]
        gathers = operation == "all_gather_matmul"
        self.rows = cut_rows(operation, self.size, len(x), slices)
        self.messages = Messages(comm, window)
        self.y = np.empty((result_rows(operation, self.size, len(x)), self.columns), x.dtype)
        in_slices = (slices, self.size, self.rows)
        if gathers:
            self.gathered = np.empty((*in_slices, x.shape[1]), x.dtype)
            self.made = np.empty((self.size * self.rows, self.columns), x.dtype) if slices > 1 else self.y
        else:
            self.product = np.empty((*in_slices, self.columns), x.dtype)
        self.y_places = self.y.reshape(-1, slices, self.rows, self.columns)  # [owner, slice]
        self.x_slices: Array | None = None
        if operation == "matmul_all_reduce":  # its slices are runs of rows
            self.x_slices = x.reshape(slices, self.size * self.rows, -1)
            self.y_slices = self.y.reshape(slices, self.size * self.rows, -1)
            self.y_parts = self.y.reshape(*in_slices, -1)
        elif slices == 1:
            self.x_slices = x[None]
        else:
            self.packed = np.empty((self.size, self.rows, x.shape[1]), x.dtype)
        self.missing: list[int] = []

    def arrived(self, j: int, count: int) -> None:
        self.missing[j] -= count

    def gather(self, fetch: Callable[[int], None]) -> Array:
        """Communicate first: multiply slice j while j + 1 is on its way."""
        self.missing = [self.size] * self.slices
        for j in range(self.slices):
            fetch(j)
        for j in range(self.slices):
            self.messages.wait(lambda j=j: self.missing[j] == 0)  # type: ignore[misc]
            with self.messages.kernel():
                np.matmul(self.gathered[j].reshape(len(self.made), -1), self.w, out=self.made)
                if self.slices > 1:
                    self.y_places[:, j] = self.made.reshape(self.size, self.rows, -1)
        self.messages.finish()
        return self.y

    def scatter(self, expect: Callable[[], None], exchange: Callable[[int], None]) -> Array:
        """Compute first: slice j travels while the product of j + 1 is made."""
        expect()
        for j in range(self.slices):
            with self.messages.kernel():
                if self.x_slices is None:
                    np.copyto(self.packed, self.x.reshape(self.size, self.slices, self.rows, -1)[:, j])
                    x = self.packed.reshape(-1, self.x.shape[1])
                else:
                    x = self.x_slices[j]
                np.matmul(x, self.w, out=self.product[j].reshape(len(x), -1))
            exchange(j)
        self.messages.finish()
        return self.y
