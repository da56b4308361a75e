"""python -m fompi.torch: run a program of torch.distributed, unedited, with the backend "fompi".

    mpirun -n 4 python -m fompi.torch train.py --epochs 3
    mpirun -n 4 python -m fompi.torch -m package.train

Whatever backend, address, rank and size the program names in `init_process_group` and `new_group`, its groups run on
fompi. RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are set as by torchrun. At the end rank 0 prints how much of
the communication was hidden (FOMPI_REPORT).
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch.distributed as dist

from fompi.mpi import launcher, transport, unedited

USAGE = "usage: mpirun -n N python -m fompi.torch (SCRIPT | -m MODULE) [ARGUMENT ...]"

IGNORED = ("backend", "init_method", "world_size", "rank", "store", "pg_options", "device_id")
"""What a program says about its backend, and how it meets: MPI knows better."""


def swap() -> None:
    """Let `init_process_group` and `new_group` of this process make groups of fompi."""
    initialise, make = dist.init_process_group, dist.new_group

    def init_process_group(backend: Any = None, init_method: Any = None, timeout: Any = None, **options: Any) -> Any:
        kept = {name: value for name, value in options.items() if name not in IGNORED}
        return initialise("fompi", "fompi://", timeout, **kept)

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *rest: Any, **options: Any) -> Any:
        kept = {name: value for name, value in options.items() if name not in IGNORED}
        return make(ranks, timeout, "fompi", None, *rest[1:3], **kept)

    swapped = {"init_process_group": (initialise, init_process_group), "new_group": (make, new_group)}
    for module in [m for name, m in sys.modules.items() if name.startswith("torch.distributed")]:
        for name, (old, new) in swapped.items():
            if getattr(module, name, None) is old:
                setattr(module, name, new)


def set_variables() -> None:
    """Set the variables of torchrun for this rank."""
    launch = launcher.detect()
    rank, size = transport.world()
    local = (launch.local_rank or 0, launch.local_size or 1) if size > 1 else (0, 1)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, map(str, (rank, size, *local)), strict=True))


def prepare() -> None:
    set_variables()
    swap()


if __name__ == "__main__":
    sys.exit(unedited.run(sys.argv[1:], USAGE, prepare))
