"""The kernels that strategies run themselves, beside those of operations: attention, products, sums.

    o, lse = attend.on(comm, q, k, v, ...)      # on the accelerator of comm

An accelerator is real only where `comm.backend` is None: then the kernel runs on the host. An emulated one
(`fompi.backends.emulated`) takes the time of its machine, and gives results whose numbers are undefined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Work(NamedTuple):
    """What a call costs, and the form of its results: (shape, dtype) for each."""

    flops: float
    nbytes: float
    results: Sequence[tuple[tuple[int, ...], Any]]


class LocalKernel:
    """function(*arrays), with the `Work` of such a call."""

    def __init__(self, function: Callable[..., Any], work: Callable[..., Work]):
        functools.update_wrapper(self, function)
        self.function, self.work = function, work

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def on(self, comm: Any, *args: Any) -> Any:
        """The call on the accelerator of `comm`. It waits for the result."""
        emulated = getattr(comm.backend, "spend", None)
        if emulated is None:
            return self.function(*args)
        work, results = self.work(*args), list[Array]()
        emulated(work.flops, work.nbytes, lambda: results.extend(np.zeros(*form) for form in work.results))
        return tuple(results) if len(results) > 1 else results[0] if results else None


def local_kernel(work: Callable[..., Work]) -> Callable[[Callable[..., Any]], LocalKernel]:
    """Decorates a function as a `LocalKernel`."""
    return lambda function: LocalKernel(function, work)


def _product_work(a: Array, b: Array) -> Work:
    rows = a.size // max(a.shape[-1], 1)
    nbytes = a.nbytes + b.nbytes + rows * b.shape[-1] * a.itemsize
    return Work(2.0 * rows * a.shape[-1] * b.shape[-1], nbytes, [((*a.shape[:-1], b.shape[-1]), a.dtype)])


@local_kernel(_product_work)
def product(a: Array, b: Array) -> Array:
    """a @ b, where b is a matrix."""
    return a @ b


@local_kernel(lambda into, other: Work(0, 2 * into.nbytes + other.nbytes, ()))
def add(into: Array, other: Array) -> None:
    """into += other"""
    into += other
