"""python -m fompi.torch: run a program of torch.distributed, unedited, with the backend "fompi".

    mpirun -n 4 python -m fompi.torch train.py --epochs 3
    mpirun -n 4 python -m fompi.torch -m package.train
    python -m fompi.torch serve.py                      # the program starts its processes itself

Whatever backend, address, rank and size the program names in `init_process_group` and `new_group`, its groups run on
fompi. RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are set as by torchrun. At the end rank 0 prints how much of
the communication was hidden (FOMPI_REPORT).

Processes that the program starts itself (`torch.multiprocessing`, an inference engine) run on fompi too: they meet at
the address that they give.
"""

from __future__ import annotations

import os
import sys

from fompi.mpi import launcher, transport, unedited
from fompi.torch.swap import swap

USAGE = "usage: mpirun -n N python -m fompi.torch (SCRIPT | -m MODULE) [ARGUMENT ...]"


def set_variables() -> None:
    """Set the variables of torchrun for this rank. Without a launcher it is alone, and starts MPI when it needs it."""
    launch = launcher.detect()
    if not launcher.starts_mpi(os.environ) and "RANK" in os.environ:
        return
    rank, size = transport.world() if launcher.starts_mpi(os.environ) else (0, 1)
    local = (launch.local_rank or 0, launch.local_size or 1) if size > 1 else (0, 1)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, map(str, (rank, size, *local)), strict=True))


def prepare() -> None:
    set_variables()
    swap()


if __name__ == "__main__":
    sys.exit(unedited.run(sys.argv[1:], USAGE, prepare))
