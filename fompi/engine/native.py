"""The functions of MPI for calls in C, those that mpi4py calls, and whether calls run in C at all."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any, NamedTuple

from fompi.backends import in_c
from fompi.base.errors import LaunchError
from fompi.engine.engine import NAP_SECONDS, YIELDS
from fompi.engine.progress import LINGER_SECONDS, POLLS_PER_MESSAGE, POLLS_PER_WAKE
from fompi.mpi import environment, launcher
from fompi.mpi.transport import carrier_functions, functions, start_mpi

FUNCTIONS = ("MPI_Isend", "MPI_Issend", "MPI_Irecv", "MPI_Test", "MPI_Testsome")

REQUEST_NBYTES = (4, 8)
"""The sizes of MPI_Request that are known: an int of MPICH, a pointer of Open MPI and of the standard ABI."""


PACE = (YIELDS, POLLS_PER_WAKE, POLLS_PER_MESSAGE, NAP_SECONDS, LINGER_SECONDS)
"""How C waits and polls: as the engine of Python does."""


NO_C = "fompi was installed without a C compiler: install one, then fompi again"


class NativeSupport(NamedTuple):
    """`library`: what a call in C needs (`fompi.native._native.Library`), or None. `why` says in words why not."""

    library: Any
    why: str

    def __str__(self) -> str:
        return "C, and Python where C does not go on" if self.library is not None else f"Python: {self.why}"


@cache
def engine() -> NativeSupport:
    """What carries out calls in this process. FOMPI_ENGINE chooses. MPI has started."""
    if environment.value("FOMPI_ENGINE") == "python":
        return NativeSupport(None, "FOMPI_ENGINE=python")
    if environment.value("FOMPI_DIGEST"):
        return NativeSupport(None, "FOMPI_DIGEST reads each result in Python")
    return _found()


def refusal() -> LaunchError | None:
    """The error if FOMPI_ENGINE=native and calls cannot run in C. MPI has started."""
    if engine().library is not None or environment.value("FOMPI_ENGINE") != "native":
        return None
    return LaunchError(f"FOMPI_ENGINE=native, but {engine().why}")


def say_if_missing() -> None:
    """With FOMPI_DEBUG=1, one line on standard error if there is no part in C. Of several ranks the first prints it."""
    if in_c.run is None and environment.value("FOMPI_DEBUG") == "1" and not launcher.detect().rank:
        print(f"fompi: calls run in Python: {NO_C}", file=sys.stderr)


def _found() -> NativeSupport:
    try:
        from fompi.native._native import Library
    except ImportError:
        return NativeSupport(None, NO_C)
    MPI = start_mpi()
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        return NativeSupport(None, "MPI allows only its main thread to call it")
    nbytes = MPI._sizeof(MPI.Request)
    if nbytes not in REQUEST_NBYTES:
        return NativeSupport(None, f"this MPI has requests of {nbytes} bytes")
    own = carrier_functions()
    isend, issend, irecv, test, testsome = own or (_address(name, functions()) for name in FUNCTIONS)
    if isend and issend and irecv and test and testsome:
        return NativeSupport(Library(isend, issend, irecv, test, testsome, MPI.BYTE.handle, nbytes, PACE), "")
    return NativeSupport(None, "the functions of the MPI library that mpi4py has loaded were not found")


def _address(name: str, mpi: ctypes.CDLL) -> int | None:
    """The address of the function of MPI that mpi4py calls by this name. `mpi` has the functions of its library.

    It is found as the linker finds it for mpi4py: in what the whole process has loaded, as by LD_PRELOAD, then in the
    MPI library, whatever the names of its files are. So a preloaded profiler sees the calls of C too.
    """
    everywhere, beneath = ctypes.CDLL(None), f"P{name}"  # what a profiler calls: it must be in the same MPI library
    found = _symbol(everywhere, name) if _symbol(everywhere, beneath) == _symbol(mpi, beneath) else None
    return found or _symbol(mpi, name)


def _symbol(library: ctypes.CDLL, name: str) -> int | None:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value if hasattr(library, name) else None
