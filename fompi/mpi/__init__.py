"""The MPI library: how the process was started, what the library can do, and the messages of one communicator."""

from typing import Any

from fompi.base.doors import DOORS


def __getattr__(name: str) -> Any:
    """Import `Comm` at its first use: it loads mpi4py."""
    if name == "Comm":
        return DOORS.comm()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
