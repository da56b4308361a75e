"""The MPI library: how the process was started, what the library can do, and the messages of one communicator.

| file | what it holds |
|---|---|
| `launcher` | which launcher started this process, with how many ranks and cores, read from environment variables |
| `environment` | the environment variables of fompi: defaults, values that are taken, names that are misspelt |
| `transport` | starts MPI; facts of the MPI library; only it imports mpi4py, but for a measurement of `lab` |
| `pmi` | starts MPI under torchrun: answers PMI-1 from a store |
| `ucx` | stands for mpi4py where UCX carries the messages |
| `epoch` | processes that make a group by handles, without a launcher |
| `unedited` | runs a program of others: `python -m fompi.torch`, `python -m fompi.mpi` |
| `link` | the messages of one communicator: sends, receives and collectives that return requests |

May import `base`, `plans`, `traces`, `model`, `tensors` and `backends`, never `schedules` or `planner`. Whether a
request is done is tested in `fompi.engine.in_flight`.
"""

from typing import Any

from fompi.base.doors import DOORS


def __getattr__(name: str) -> Any:
    """Import `Comm` at its first use: it loads mpi4py."""
    if name == "Comm":
        return DOORS.comm()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
