"""The traceback of an error of fompi ends at the line of the program that called fompi."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from types import TracebackType

from fompi.base.errors import FompiError
from fompi.mpi import environment

_OTHERS = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)
"""How the files begin that do not belong to the program: those of fompi, of Python and of installed packages."""


def fold(error: BaseException | None) -> int:
    """Cut off the frames behind the last one of the program, of this error and of its causes. Returns how many.

    Errors of others keep theirs: who has written a kernel wants to see it. FOMPI_DEBUG=1 keeps all frames.
    """
    if environment.value("FOMPI_DEBUG") == "1":
        return 0
    count, seen = 0, set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, FompiError):
            count += _cut(error.__traceback__)
        error = error.__cause__ or error.__context__
    return count


def _cut(trace: TracebackType | None) -> int:
    last, behind = None, 0
    while trace is not None:
        behind += 1
        if not trace.tb_frame.f_code.co_filename.startswith(_OTHERS):
            last, behind = trace, 0
        trace = trace.tb_next
    if last is None:
        return 0
    last.tb_next = None
    return behind
