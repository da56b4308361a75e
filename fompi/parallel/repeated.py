"""A call that a wrapper makes in every step: bound if it is small.

mean = repeated(all_reduce, nbytes, flat, op="mean", out=flat, comm=comm)  # collective
mean.start(x=flat)
...
mean.wait()
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Self

from fompi.engine.communicator import Communicator
from fompi.ops.bound_call import BoundCall
from fompi.ops.operation import Operation
from fompi.ops.pending import Pending

MOST_BOUND_NBYTES = 1 << 20
"""A bound call keeps its memory. One of more bytes takes memory, and agrees, each time: that costs it little."""


def repeated(operation: Operation[Any], nbytes: int, x: Any, *, comm: Communicator, **options: Any) -> Any:
    """The call `operation(x, comm=comm, **options)`, of which all ranks know that it has `nbytes`. Collective.

    `start(x=...)` begins one call, `wait()` returns its result, and `refuse(error)` takes part in it with an error.
    """
    if nbytes <= MOST_BOUND_NBYTES:
        bound: BoundCall = operation.bind(x, comm=comm, **options)
        return bound
    return Unbound(operation, comm, options)


class Unbound:
    """What a BoundCall does, by unbound calls."""

    def __init__(self, operation: Operation[Any], comm: Communicator, options: dict[str, Any]):
        self._operation, self._comm, self._options = operation, comm, options
        self._pending: Pending | None = None
        self._error: Exception | None = None

    def start(self, *, x: Any) -> Self:
        self._pending, self._error = None, None
        self._pending = self._operation.start(x, comm=self._comm, **self._options)
        return self

    def refuse(self, error: Exception) -> None:
        if self._pending is None:
            self._error = error
            with suppress(type(error)):
                self._operation.refuse(error, self._comm)

    def close(self) -> None:
        """It has no memory."""

    def done(self) -> bool:
        return self._pending is None or self._pending.done()

    def wait(self) -> Any:
        """The result of the call. The wrapper keeps it no longer than it needs it."""
        pending, self._pending = self._pending, None
        if self._error is not None:
            raise self._error
        return None if pending is None else pending.wait()
