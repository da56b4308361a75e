"""The functions of MPI for calls in C, in the library that mpi4py has loaded, and whether calls run in C at all."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fompi.base.errors import LaunchError
from fompi.mpi import environment
from fompi.mpi.transport import start_mpi

FUNCTIONS = ("MPI_Isend", "MPI_Issend", "MPI_Irecv", "MPI_Test", "MPI_Testsome")

REQUEST_NBYTES = (4, 8)
"""The sizes of MPI_Request that are known: an int of MPICH, a pointer of Open MPI and of the standard ABI."""

NAMES = ("libmpi.so", "libmpi_abi.so", "libmpich.so", "libmpi.")
"""How the files of MPI libraries begin."""


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


def _found() -> NativeSupport:
    try:
        from fompi.native._native import Library
    except ImportError:
        return NativeSupport(None, "fompi was installed without a C compiler: install one, then fompi again")
    MPI = start_mpi()
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        return NativeSupport(None, "MPI allows only its main thread to call it")
    nbytes = MPI._sizeof(MPI.Request)
    if nbytes not in REQUEST_NBYTES:
        return NativeSupport(None, f"this MPI has requests of {nbytes} bytes")
    for loaded in _mpi_libraries():
        if all(hasattr(loaded, name) for name in FUNCTIONS):
            isend, issend, irecv, test, testsome = (
                ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0 for name in FUNCTIONS
            )
            return NativeSupport(Library(isend, issend, irecv, test, testsome, MPI.BYTE.handle, nbytes), "")
    return NativeSupport(None, "the functions of the MPI library that mpi4py has loaded were not found")


def _mpi_libraries() -> list[ctypes.CDLL]:
    """The MPI libraries that are in the memory of this process: one, if all is well. Nothing is loaded."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = dict.fromkeys(line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    found = [path for path in paths if Path(path).name.startswith(NAMES)]
    return [ctypes.CDLL(path) for path in found] if len(found) == 1 else []
