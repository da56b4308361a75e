"""An emulated accelerator: messages are real, kernels take modelled time and almost no CPU time.

    backend = Emulated(machine)
    step = fompi.bind(plan, comm=tp, x=x, w=w, backend=backend)

A kernel is enqueued on one of two streams: products on one, sums and copies on the other. It begins when its stream is
free and the kernels before it are done. It takes as long as the Machine says. In this way several hosts with one
device each can be measured on the few cores of one machine.

Kernels compute only the first `CORNER` elements of each row, as if the operands had no others. `corner(y)` is the
result of the same operation on `corner(x)` and `corner(w)`, and shows whether every block arrived at its place. The
rest of a result is undefined. Every output that is based on this backend must say "emulated accelerator".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter, sleep
from typing import Any

import numpy as np

from fompi.backends.base import Dtypes, Kernel
from fompi.backends.numpy import Arrays, Numpy
from fompi.base.errors import DeviceError
from fompi.model.machine import Machine
from fompi.plans import kernels
from fompi.plans.dependencies import lane_of

Array = np.ndarray[Any, Any]
CORNER = 4
"""Elements of each row that kernels compute: enough to tell blocks apart, too few to cost CPU time."""


def corner(a: Array, whole: bool = False) -> Array:
    """A view of the first elements of each row. For an operand that a kernel takes `whole`, only of the first rows."""
    if whole:
        return a[..., :CORNER, :CORNER] if a.ndim > 1 else a[:CORNER]
    return a[..., :CORNER] if a.ndim > 1 else a


class KernelQueue:
    """Runs kernels one after the other. `free` is when the last one is done, in seconds of perf_counter.

    `busy` is how many seconds all kernels have taken.
    """

    def __init__(self) -> None:
        self.free = self.busy = 0.0


def _nothing() -> None:
    pass


class QueuedKernel:
    """The Token of a kernel that runs on the stream `queue` from `begun` to `due`."""

    __slots__ = ("begun", "due", "queue")

    def __init__(self, queue: KernelQueue, begun: float, due: float):
        self.queue, self.begun, self.due = queue, begun, due

    def done(self) -> bool:
        return perf_counter() >= self.due


MANY_ROWS = 1024
"""The rows of kernels of a user, by which their speed on an unequal rank is known."""


class Emulated:
    """The backend. `machine.kernel(...)` gives the duration of each kernel, and `machine.speeds` that on a `rank`."""

    name = "emulated accelerator"
    device = None
    asynchronous = True

    def __init__(self, machine: Machine, rank: int | None = None):
        self.machine, self.rank = machine, rank
        self._host = Numpy()
        self.meanwhile: Callable[[], object] = _nothing  # called where the program waits for a kernel
        self._products, self._merges = KernelQueue(), KernelQueue()

    @property
    def busy(self) -> float:
        """How many seconds of products this device has had."""
        return self._products.busy

    def slowness(self, rows: float = MANY_ROWS) -> float:
        """How many times as long a kernel of `rows` rows takes on this rank."""
        return 1.0 if self.rank is None else self.machine.slowness(self.rank, rows)

    def empty(self, arena: Any, shape: Sequence[int], dtype: str, place: str = "", aligned: bool = True) -> Array:
        return self._host.empty(arena, shape, dtype, place, aligned)

    def bind(self, kernel: str, reads: Arrays, writes: Arrays, read_dtypes: Dtypes, write_dtypes: Dtypes) -> Kernel:
        if kernel in kernels.OF_WIRES:
            raise DeviceError("an emulated accelerator computes corners only, so its messages take no wire")
        count = len(reads) - kernels.find(kernel).whole
        read_corners = [corner(a, whole=i >= count) for i, a in enumerate(reads)]
        write_corners = [corner(a, whole=kernels.find(kernel).reduces) for a in writes]
        compute = self._host.bind(kernel, read_corners, write_corners, read_dtypes, write_dtypes)
        sizes = ([(a.shape, a.nbytes) for a in arrays] for arrays in (reads, writes))
        rows, cost = writes[0].shape[0] if writes and writes[0].ndim else 1, kernels.demand(kernel, *sizes)
        stream = self._merges if lane_of(kernel) == "merge" else self._products
        return self._on(stream, compute, lambda: self.slowness(rows) * self.seconds(*cost))

    def seconds(self, flops: float, *more: Any) -> float:
        """The time of a kernel that begins now. Its speed may change while its call is bound."""
        return self.machine.kernel(flops, *more)

    def bind_timed(self, compute: Callable[[], object], seconds: float) -> Callable[..., QueuedKernel]:
        """A kernel of the user, which takes these seconds. It runs on the host when it is enqueued."""
        return self._on(self._products, compute, lambda: self.slowness() * seconds)

    def spend(self, flops: float, nbytes: float = 0.0, compute: Callable[[], object] = _nothing) -> None:
        """Run a kernel of this cost on the stream of products, and wait for its end. `compute` runs in its time."""
        token = self._on(self._products, compute, lambda: self.slowness() * self.seconds(flops, nbytes))(())
        self.meanwhile()
        sleep(max(0.0, token.due - perf_counter()))

    def _on(
        self, stream: KernelQueue, compute: Callable[[], object], duration: Callable[[], float]
    ) -> Callable[..., QueuedKernel]:
        def enqueue(after: Sequence[QueuedKernel]) -> QueuedKernel:
            begun, seconds = max([perf_counter(), stream.free, *(token.due for token in after)]), duration()
            stream.free = begun + seconds
            stream.busy += seconds
            compute()
            return QueuedKernel(stream, begun, stream.free)

        return enqueue
