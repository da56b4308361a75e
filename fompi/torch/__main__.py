"""python -m fompi.torch: run a program of torch.distributed, unedited, with the backend "fompi".

    mpirun -n 4 python -m fompi.torch train.py --epochs 3
    mpirun -n 4 python -m fompi.torch -m package.train

Whatever backend, address, rank and size the program names in `init_process_group` and `new_group`, its groups run on
fompi. RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are set as by torchrun. At the end rank 0 prints how much of
the communication was hidden (FOMPI_REPORT).
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from time import sleep
from typing import Any

import torch.distributed as dist

from fompi.mpi import environment, launcher, transport

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


def main(arguments: Sequence[str]) -> int:
    is_module = arguments[:1] == ["-m"]
    program, given = arguments[is_module : is_module + 1], arguments[is_module + 1 :]
    problem = ""
    if not program or (program[0].startswith("-") and not is_module):
        problem = USAGE
    elif not is_module and not Path(program[0]).exists():
        problem = f"fompi: there is no program {program[0]}"
    if problem:
        if launcher.detect().rank:
            sleep(1)  # a launcher may end the job before rank 0 has spoken
        else:
            print(problem, file=sys.stderr)
        return 2
    environment.preset("FOMPI_REPORT", "1")
    set_variables()
    swap()
    sys.argv = [program[0], *given]
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
