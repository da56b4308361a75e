"""Run a program of others as `python PROGRAM` would: `python -m fompi.torch PROGRAM`, `python -m fompi.mpi PROGRAM`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import sleep

from fompi.mpi import environment, launcher


def run(arguments: Sequence[str], usage: str, prepare: Callable[[], object]) -> int:
    """Run `SCRIPT [ARGUMENT ...]` or `-m MODULE [ARGUMENT ...]` after `prepare()`. Returns the exit status.

    At the end rank 0 prints in three lines how much of the communication was hidden (FOMPI_REPORT=short).
    """
    is_module = arguments[:1] == ["-m"]
    program, given = arguments[is_module : is_module + 1], arguments[is_module + 1 :]
    problem = ""
    if not program or (program[0].startswith("-") and not is_module):
        problem = usage
    elif not is_module and not Path(program[0]).exists():
        problem = f"fompi: there is no program {program[0]}"
    if problem:
        if launcher.detect().rank:
            sleep(1)  # a launcher may end the job before rank 0 has spoken
        else:
            print(problem, file=sys.stderr)
        return 2
    environment.preset("FOMPI_REPORT", "short")
    prepare()
    sys.argv = [program[0], *given]
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")
    return 0
