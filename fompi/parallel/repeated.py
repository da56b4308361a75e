"""A call that a wrapper makes in every step: bound if it is small.

mean = repeated(all_reduce, nbytes, flat, op="mean", out=flat, comm=comm)  # collective
mean.start(x=flat)
...
mean.wait()
"""

from __future__ import annotations

from typing import Any, Self

from fompi.engine.communicator import Communicator
from fompi.engine.handshake import Agreement, begin_agreement
from fompi.ops.bound_call import BoundCall
from fompi.ops.operation import Operation
from fompi.ops.pending import Pending

MOST_BOUND_NBYTES = 1 << 20
"""A bound call keeps its memory. One of more bytes takes memory, and agrees, each time: that costs it little."""


def repeated(operation: Operation[Any], nbytes: int, x: Any, *, comm: Communicator, **options: Any) -> Any:
    """The call `operation(x, comm=comm, **options)`, of which all ranks know that it has `nbytes`. Collective.

    `start(x=...)` begins one call, `wait()` returns its result, and `refuse(error)` takes part in it with an error.
    """
    if is_bound(nbytes):
        bound: BoundCall = operation.bind(x, comm=comm, **options)
        return bound
    return Unbound(operation, comm, options)


def is_bound(nbytes: int) -> bool:
    """True if such a call is bound. Then it keeps the memory of its messages."""
    return nbytes <= MOST_BOUND_NBYTES


class Unbound:
    """What a BoundCall does, by unbound calls."""

    _call: Pending | Agreement | Exception | None = None
    """The last call: in flight, refused by this rank, or its error at the start. None: its result was taken."""

    def __init__(self, operation: Operation[Any], comm: Communicator, options: dict[str, Any]):
        self._operation, self._comm, self._options = operation, comm, options

    def start(self, *, x: Any) -> Self:
        self._call = None
        try:
            self._call = self._operation.start(x, comm=self._comm, **self._options)
        except Exception as error:  # this rank has taken part in the call by refusing it
            self._call = error
            raise
        return self

    def refuse(self, error: Exception) -> None:
        self._call = begin_agreement(self._comm, self._operation.name, error)
        self._comm.engine.wake_helper()  # the call ends without this program

    def close(self) -> None:
        """It has no memory."""

    def done(self) -> bool:
        return not isinstance(self._call, Pending) or self._call.done()

    def wait(self) -> Any:
        """The result of the call, which is not kept. An error is raised each time."""
        call = self._call
        if isinstance(call, Exception):
            raise call
        if isinstance(call, Agreement):
            return call.values()  # it raises the error
        result, self._call = None if call is None else call.wait(), None
        return result
