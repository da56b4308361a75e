"""Every error that fompi raises: a `FompiError` and, for `except` clauses that know nothing of fompi, a builtin."""

from __future__ import annotations


class FompiError(Exception):
    """The root of all errors of fompi."""


class LayoutError(FompiError, ValueError):
    """A layout, a mesh or a partition of rows that cannot be."""


class ShapeError(FompiError, ValueError):
    """A shape, or a number of dimensions, that the operation cannot take."""


class DtypeError(FompiError, TypeError):
    """A dtype that the operation cannot take."""


class TensorError(FompiError, TypeError):
    """An object that cannot be used as a tensor here: its device, strides, read-only memory, consumed capsule."""


class PlanError(FompiError, ValueError):
    """A plan that is wrong. `rank`, `op` (its number in the program) and `chunk` say where."""

    def __init__(self, message: str, rank: int | None = None, op: int | None = None, chunk: str | None = None):
        super().__init__(message)
        self.rank, self.op, self.chunk = rank, op, chunk


class MismatchError(FompiError, ValueError):
    """The ranks of a communicator called different operations, or the same one with arguments that do not fit."""


class StateError(FompiError, RuntimeError):
    """A call at the wrong time: an executor started twice, a communicator used after `close()`."""


class LaunchError(FompiError, RuntimeError):
    """There is no MPI, or the program was not started as the call needs."""


class PeerError(FompiError, RuntimeError):
    """Another rank failed in an operation that this rank takes part in. `origin` is that rank."""

    def __init__(self, message: str, origin: int):
        super().__init__(message)
        self.origin = origin


class OverlapWarning(UserWarning):
    """An overlap that was asked for did not happen: the call took about as long as without."""


class DriftWarning(UserWarning):
    """A bound operation takes another time than its plan was chosen for: links, hosts or kernels have changed."""


class WaitTimeout(FompiError, TimeoutError):
    """A wait reached its deadline. The message names who waits for whom, back to the rank at the root."""
