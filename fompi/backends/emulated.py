"""An accelerator that takes the time of one and none of the CPU: messages are real, kernels are modelled.

    backend = Emulated(machine)
    step = fompi.bind(plan, comm=tp, x=x, w=w, backend=backend)

A kernel is enqueued on one of two streams, products on one and sums and copies on the other. It begins when it has been
enqueued, its stream is free and the kernels that it follows are done, and takes as long as the Machine says. So
several hosts that would compute on devices of their own can be measured on the few cores of one machine.

Kernels work for real on the first `CORNER` elements of each row, as if operands had no others: `corner(y)` is what the
same operation makes of `corner(x)` and `corner(w)`, and shows whether every block came to its place; the rest of a
result is whatever was there. Whatever is printed from here must say "emulated accelerator".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from fompi.backends.numpy import Numpy
from fompi.model.machine import Machine
from fompi.plans import kernels
from fompi.plans.dependencies import MERGES

Array = np.ndarray[Any, Any]
CORNER = 4


def corner(a: Array, whole: bool = False) -> Array:
    """The first elements of each row; of an operand that is taken `whole` also the first rows."""
    if whole:
        return a[:CORNER, :CORNER] if a.ndim == 2 else a[:CORNER]
    return a[..., :CORNER] if a.ndim > 1 else a


class Stream:
    """Kernels one after the other. `free`: when the last of them is done."""

    def __init__(self) -> None:
        self.free = 0.0


class Enqueued:
    """A kernel on a stream, from `begun` to `due`."""

    __slots__ = ("begun", "due")

    def __init__(self, begun: float, due: float):
        self.begun, self.due = begun, due

    def done(self) -> bool:
        return perf_counter() >= self.due


class Emulated:
    """The Backend. `machine.kernel(...)` is how long a kernel takes."""

    name = "emulated accelerator"
    asynchronous = True

    def __init__(self, machine: Machine):
        self.machine = machine
        self._host = Numpy()
        self._products, self._merges = Stream(), Stream()

    def storage(self, dtype: str) -> np.dtype[Any]:
        return self._host.storage(dtype)

    def poisoned(self, shape: Sequence[int], dtype: str) -> Array:
        return self._host.poisoned(shape, dtype)

    def bind(
        self,
        kernel: str,
        reads: Sequence[Array],
        writes: Sequence[Array],
        read_dtypes: Sequence[str],
        write_dtypes: Sequence[str],
    ) -> Callable[..., Enqueued]:
        count = len(reads) - kernels.find(kernel).whole
        seen = [corner(a, whole=i >= count) for i, a in enumerate(reads)]
        made = [corner(a, whole=kernels.find(kernel).reduces) for a in writes]
        work = self._host.bind(kernel, seen, made, read_dtypes, write_dtypes)
        taken = ([(a.shape, a.nbytes) for a in arrays] for arrays in (reads, writes))
        seconds = self.machine.kernel(*kernels.demand(kernel, *taken))
        stream = self._merges if kernel in MERGES else self._products

        def enqueue(after: Sequence[Enqueued]) -> Enqueued:
            begun = max([perf_counter(), stream.free, *(token.due for token in after)])
            stream.free = begun + seconds
            work()
            return Enqueued(begun, stream.free)

        return enqueue
