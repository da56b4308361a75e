"""What the terminal shows of an error that nobody catches: one sentence below the line of the program, once per job.

`install` sets the hook when fompi is imported. From the first communicator on, `fompi.engine.faults` does more: it also
tells the other ranks.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from pathlib import Path
from time import sleep
from types import TracebackType
from typing import Any

from fompi.base.errors import FompiError
from fompi.mpi import environment, launcher

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_OWN = str(Path(__file__).parents[1])
_OTHERS = (
    _OWN,
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)
"""How the files begin that do not belong to the program: those of fompi, of Python and of installed packages."""

_CARETS = re.compile(r"^[ \t]*[~^][~^ \t]*\n", re.MULTILINE)
"""A line of a traceback that only marks a part of the line above."""

DEFER_SECONDS = 1.0
"""How long a rank delays its traceback if another rank should print one. That rank normally ends the job first."""


def called() -> str:
    """What the program has called, of fompi: "fompi.all_reduce", "Mesh". For errors: it walks through all frames."""
    frame, names = sys._getframe(1), list[str]()
    while frame is not None and frame.f_code.co_filename.startswith(_OTHERS):
        if frame.f_code.co_filename.startswith(_OWN):
            operation = getattr(frame.f_locals.get("self"), "__wrapped__", None)
            name = frame.f_code.co_qualname.partition(".<locals>")[0].removesuffix(".__init__")
            names.append(name if operation is None else f"fompi.{operation.__name__}")
        elif frame.f_code.co_name == "init_process_group":  # torch calls what makes its first group
            names.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    public = [name for name in names if not name.rpartition(".")[2].startswith("_")]
    return [*names, *public, "fompi"][-2] if names else "fompi"


def install() -> None:
    """Show what nobody catches, before there is a communicator. Called by `import fompi`."""
    before = sys.excepthook

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        launch = launcher.detect()
        rank, size = launch.rank or 0, launch.size or 1
        if not is_ours(error) or error is _SHOWN:  # a hook that was set later has called this one
            before(kind, error, trace)
        elif size == 1 or (not (getattr(error, "of_all_ranks", False) and rank) and _is_first_here(error)):
            show(error, before, rank, size)
            sleep(DEFER_SECONDS * (size > 1))  # until then, the others of this host keep silent
        else:
            sleep(DEFER_SECONDS)  # a launcher that sees this rank end may end the one that speaks

    uncaught.before = before  # type: ignore[attr-defined]
    sys.excepthook = uncaught


def hook_of_program() -> Hook:
    """The hook that prints tracebacks in this program, below that of `install`."""
    hook: Hook = getattr(sys.excepthook, "before", sys.excepthook)
    return hook


_ENDED: list[Any] = []
"""The socket that this process keeps."""


def _is_first_here(error: BaseException) -> bool:
    """True in one of the processes of this host that a launcher has started and that end by the same error.

    There may be no MPI by which they could agree. It is the one that has taken the name of an abstract socket. On a
    system without them each is the first.
    """
    import socket

    words = hashlib.sha256(repr(error).encode()).hexdigest()
    with suppress(OSError):
        _ENDED.append(socket.socket(socket.AF_UNIX))
        try:
            _ENDED[-1].bind(f"\0fompi-{os.getuid()}-{os.getppid()}-{words}")
        except OSError as refused:
            return refused.errno != errno.EADDRINUSE
    return True


_SHOWN: BaseException | None = None
"""The error that `show` prints."""


def show(error: BaseException, hook: Hook, rank: int, size: int) -> None:
    """Print who ends by which error, and its traceback, by `hook` if the program has one of its own."""
    global _SHOWN
    _SHOWN = error
    error.__traceback__ = _from_program(error.__traceback__)
    folded = fold(error)
    left_out = f" (FOMPI_DEBUG=1 shows {folded} more frame{'s' * (folded > 1)}, inside of fompi)" if folded else ""
    who = f"rank {rank} of {size} on {os.uname().nodename}" if size > 1 else "the program"
    if size > 1 or folded:
        end = "was interrupted" if isinstance(error, KeyboardInterrupt) else "ends by an error"
        print(f"fompi: {who} {end}{left_out}:", file=sys.stderr)
    if hook is sys.__excepthook__ and (folded or isinstance(error, FompiError)):
        with redirect_stderr(io.StringIO()) as text:  # what Python would print, "did you mean" and notes too
            hook(type(error), error, error.__traceback__)
        print(_CARETS.sub("", text.getvalue()), end="", file=sys.stderr)
    else:
        hook(type(error), error, error.__traceback__)
    with suppress(OSError, ValueError):
        sys.stderr.flush()


def is_ours(error: BaseException) -> bool:
    """True if fompi has raised it on purpose: it is about the call, and the frames below the call help nobody."""
    if isinstance(error, FompiError):
        return True
    *_, last = traceback.walk_tb(error.__traceback__) if error.__traceback__ else (None,)
    code = last[0].f_code if last else None
    return code is not None and code.co_name == "__getattr__" and code.co_filename.startswith(_OWN)


def fold(error: BaseException | None) -> int:
    """Cut off the frames behind the last one of the program, of this error and of its causes. Returns how many.

    A cause without a frame of the program is cut off too: the error quotes it. Errors of others keep their frames: who
    has written a kernel wants to see them. FOMPI_DEBUG=1 keeps all frames.
    """
    if environment.value("FOMPI_DEBUG") == "1":
        return 0
    count, seen = 0, set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if is_ours(error) or isinstance(error, KeyboardInterrupt):
            count += _cut(error)
            if cause is not None and not isinstance(cause, FompiError) and not _is_of_program(cause):
                count += sum(1 for _ in traceback.walk_tb(cause.__traceback__))
                error.__cause__ = None  # which hides the context, too
        error = cause
    return count


def _from_program(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of `python -m`, which has run the program."""
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename.startswith(("<frozen runpy>", _OWN)):
        first = first.tb_next
    return first or trace


def _cut(error: BaseException) -> int:
    trace, last, behind = error.__traceback__, None, 0
    while trace is not None:
        behind += 1
        if not trace.tb_frame.f_code.co_filename.startswith(_OTHERS):
            last, behind = trace, 0
        trace = trace.tb_next
    if last is None:
        return 0
    last.tb_next = None
    return behind


def _is_of_program(error: BaseException) -> bool:
    return any(not frame.f_code.co_filename.startswith(_OTHERS) for frame, _ in traceback.walk_tb(error.__traceback__))
