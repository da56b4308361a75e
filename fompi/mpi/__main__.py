"""python -m fompi.mpi: run a program of mpi4py, unedited, with the collectives of fompi.

    mpirun -n 4 python -m fompi.mpi solve.py --size 512
    mpirun -n 4 python -m fompi.mpi -m package.solve

`MPI.COMM_WORLD` is a `fompi.mpi.Comm` in that program, and so is every communicator that it makes of it. At the end
rank 0 prints how much of the communication was hidden (FOMPI_REPORT).
"""

from __future__ import annotations

import sys
from typing import Any

from fompi.base.doors import DOORS
from fompi.mpi import unedited
from fompi.mpi.transport import start_mpi

USAGE = "usage: mpirun -n N python -m fompi.mpi (SCRIPT | -m MODULE) [ARGUMENT ...]"


def swap() -> None:
    """Let `MPI.COMM_WORLD` of this process be one of fompi."""
    MPI: Any = start_mpi()
    MPI.COMM_WORLD = DOORS.comm()(MPI.COMM_WORLD)


if __name__ == "__main__":
    sys.exit(unedited.run(sys.argv[1:], USAGE, swap))
