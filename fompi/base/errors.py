"""The exceptions and warnings of fompi.

Each exception is a `FompiError` and also the closest builtin exception, so that `except ValueError` works too.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable


def text_of(error: BaseException) -> str:
    """The text of an error, also of one whose `str()` raises."""
    try:
        return str(error)
    except Exception:
        return "(this error has no text)"


def in_words(error: BaseException) -> str:
    """The type and the text of an error."""
    return f"{type(error).__name__}: {text_of(error)}"


def meant(name: object, known: Iterable[str], form: str = " (did you mean {}?)") -> str:
    """`form` with the one of the `known` names that is nearest to what a user wrote. "" if none is near."""
    from difflib import get_close_matches

    names, word = {each.lower(): each for each in known}, str(name).lower()
    near = get_close_matches(word, names, 1) or [each for each in names if len(word) > 2 and each.startswith(word)]
    return form.format(names[near[0]]) if near else ""


def quoted(name: object, known: Iterable[str]) -> str:
    """A name that is unknown, for an error, and the known one that was meant."""
    return f"{name!r}{meant(name, known)}"


def warn(sentence: str, category: type[Warning] = UserWarning) -> None:
    """A warning without a line of source code: what it says is not mended there."""
    warnings.warn_explicit(sentence, category, "<fompi>", 0, "fompi")


def of_signature(name: str, error: TypeError) -> TypeError:
    """An ArgumentError if `error` says that a call of `name` does not fit its signature. Else `error` itself."""
    if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # a line of the function raised it
        return error
    function, _, words = text_of(error).partition("(")
    outer = function.rpartition(".")[0]
    if outer and not outer.endswith("<locals>"):  # of a method Python counts self
        words = re.sub(r"(takes|but) (\d+)", lambda found: f"{found[1]} {int(found[2]) - 1}", words)
    return ArgumentError(f"{name}({words}")


class FompiError(Exception):
    """The base class of all errors of fompi."""


class LayoutError(FompiError, ValueError):
    """A layout, a mesh or a partition of rows is not valid."""


class ShapeError(FompiError, ValueError):
    """The operation does not accept this shape or this number of dimensions."""


class DtypeError(FompiError, TypeError):
    """The operation does not accept this dtype."""


class TensorError(FompiError, TypeError):
    """An object cannot be used as a tensor: wrong device or strides, read-only memory, or a consumed capsule."""


class ArgumentError(FompiError, TypeError):
    """A call has an argument that the function does not know, or lacks one."""


class PackageError(FompiError, ImportError):
    """A package that is not installed with fompi is needed here. The message has the line of pip."""


class PlanError(FompiError, ValueError):
    """A plan is wrong or cannot be made. `rank`, `op` (its number in the program) and `chunk` say where."""

    def __init__(self, message: str, rank: int | None = None, op: int | None = None, chunk: str | None = None):
        super().__init__(message)
        self.rank, self.op, self.chunk = rank, op, chunk


class MismatchError(FompiError, ValueError):
    """The ranks called different operations, or the same operation with arguments that do not match."""


class StateError(FompiError, RuntimeError):
    """A call came at the wrong time: an executor was started twice, or a communicator was used after `close()`."""


class LaunchError(FompiError, RuntimeError):
    """MPI is missing, or the program was not started in the way that the call needs."""

    of_all_ranks = False
    """True if each process of the job raises it: then the first one prints it."""

    @classmethod
    def everywhere(cls, message: str) -> LaunchError:
        """The error that each process of the job raises."""
        error = cls(message)
        error.of_all_ranks = True
        return error


class PeerError(FompiError, RuntimeError):
    """Another rank failed in an operation of this rank. `origin` is the number of the failed rank."""

    world_origin: int | None = None
    """The failed rank in MPI_COMM_WORLD, if it has ended a section of calls (`fompi.parallel.section`)."""

    def __init__(self, message: str, origin: int):
        super().__init__(message)
        self.origin = origin


class DeviceError(FompiError, RuntimeError):
    """A device refused a call, a kernel on it failed, or the program used its memory in a way that is not allowed."""


class RaceError(DeviceError):
    """Two operations of a device use the same memory, one of them writes, and nothing orders them."""


class OverlapWarning(UserWarning):
    """A requested overlap did not happen: the call took about as long as without overlap."""


class DriftWarning(UserWarning):
    """The time of a bound operation no longer matches the prediction for its plan: links, hosts or kernels changed."""


class WaitTimeout(FompiError, TimeoutError):
    """A wait reached its deadline. The message says which rank waits for which, up to the rank that causes it."""
