"""What the executor asks of a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Kernel = Callable[..., Any]
"""A kernel bound to its operands: `kernel()` runs it, or, of an asynchronous backend, `kernel(after)` enqueues it and
returns its Token; `after` are the tokens of kernels that it must follow."""


class Token(Protocol):
    """A kernel on its way on a device.

    `begun` and `due`: when it starts and will be done, on the clock of perf_counter, as far as the backend knows.
    """

    begun: float
    due: float

    def done(self) -> bool: ...


class Backend(Protocol):
    name: str
    asynchronous: bool
    """Kernels are enqueued, and run in the order of the queue, by themselves."""

    def storage(self, dtype: str) -> Any:
        """The array dtype in which elements of this dtype are kept."""
        ...

    def poisoned(self, shape: Sequence[int], dtype: str) -> Any:
        """A fresh array full of NaN, or of the largest integer: what is read by mistake shows."""
        ...

    def bind(
        self,
        kernel: str,
        reads: Sequence[Any],
        writes: Sequence[Any],
        read_dtypes: Sequence[str],
        write_dtypes: Sequence[str],
    ) -> Kernel:
        """The call that does `kernel` on these arrays."""
        ...
