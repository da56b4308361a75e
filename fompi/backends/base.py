"""The protocol of a backend: what the executor needs from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Arrays = Sequence[Any]
Dtypes = Sequence[str]
"""The operands or the results of a kernel, and their logical dtypes."""

Kernel = Callable[..., Any]
"""A kernel bound to its operands. `kernel()` runs it.

On an asynchronous backend `kernel(after)` enqueues it and returns its Token. `after` holds the tokens of the kernels
that must run before it.
"""


class Token(Protocol):
    """A kernel that a device has enqueued.

    `begun` and `due` are when it starts and when it will be done, in seconds of perf_counter, as the backend estimates
    (infinity: it does not know yet). Tokens with the same `queue` are done in the order in which they were enqueued.
    """

    begun: float
    due: float

    @property
    def queue(self) -> Any: ...

    def done(self) -> bool:
        """True once the kernel has run. Raises the error of the kernel, or of its device."""


class Backend(Protocol):
    """Runs kernels on arrays of one kind of memory."""

    name: str
    device: Any
    """The device whose memory it works on (`fompi.backends.cuda.device`). None: the host."""
    asynchronous: bool
    """True if kernels are enqueued. They then run in the order of the queue, without a thread of the host."""

    def empty(self, arena: Any, shape: Sequence[int], dtype: str, place: str = "", aligned: bool = True) -> Any:
        """A new array for elements of the logical dtype `dtype`.

        Host memory comes from `arena` (`fompi.tensors.arena`). `place` is that of the `plan.Buffer`.
        """

    def bind(self, kernel: str, reads: Arrays, writes: Arrays, read_dtypes: Dtypes, write_dtypes: Dtypes) -> Kernel:
        """The kernel named `kernel`, bound to these arrays."""
