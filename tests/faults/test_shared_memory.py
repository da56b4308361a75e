"""No job leaves shared memory behind. MPI itself removes it at a normal end only."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SEGMENTS = """
def segments():
    for line in open("/proc/self/maps"):
        path = line.split(maxsplit=5)[-1].removesuffix("\\n").removesuffix(" (deleted)")
        if path.startswith(("/dev/shm/mpich_shm_", "/dev/shm/sm_segment.")):
            yield path
"""

ENDS = {
    "a killed rank": "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)",
    "an error": "if rank == 1: raise ValueError('had enough')",
    "all ranks killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "an abort": "from mpi4py import MPI\nif rank == 1: MPI.COMM_WORLD.Abort(3)",
    "a normal end": "sys.exit()",
}


@pytest.mark.parametrize("how", ENDS)
def test_no_memory_is_left(launch, how):
    code = f"{SEGMENTS}\nfor path in segments(): emit('SEGMENT', path)\n{ENDS[how]}\ntime.sleep(30)"
    finished = launch(3, f"fompi.all_reduce(np.ones(3), comm=world)\n{code}").finished
    mapped = {line.removeprefix("SEGMENT ") for line in finished.stdout.splitlines() if line.startswith("SEGMENT ")}
    assert mapped and not finished.timed_out and not finished.left_behind, finished.output
    assert not mapped & set(finished.memory_left), finished.memory_left
    assert (finished.returncode == 0) == (how == "a normal end"), finished.output


def test_a_communicator_of_some_ranks(launch):
    """The names stay until all ranks have arrived: a rank of another communicator may still be starting MPI."""
    code = """
from mpi4py import MPI
comm = MPI.COMM_WORLD
half = fompi.Communicator(comm.Split(comm.rank % 2))
comm.Barrier()
for path in set(segments()): emit("HALF", os.path.exists(path))
comm.Barrier()
world = fompi.Communicator()
comm.Barrier()
for path in set(segments()): emit("WORLD", os.path.exists(path))
"""
    ended = launch(2, SEGMENTS + code, world=False)
    ended.assert_clean()
    assert set(ended.lines("HALF")) == {"True"} and set(ended.lines("WORLD")) == {"False"}, ended.output


@pytest.mark.parametrize("how", ["a communicator", "a refusal", "a refusal after MPI_Init", "killed"])
def test_a_job_of_one_process(how):
    """It is started without mpirun. The first Communicator refuses it if a launcher says that there are more."""
    make = """
try:
    fompi.Communicator()
    print("made")
except fompi.LaunchError:
    print("refused")
    if "mpi4py.MPI" not in sys.modules: raise
for path in segments(): print("SEGMENT", path, flush=True)
"""
    first = "from mpi4py import MPI\n" if how.endswith("MPI_Init") else ""
    last = "os.kill(os.getpid(), 9)" if how == "killed" else ""
    ours = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_JOB_ID": "7"} if "refusal" in how else {}
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM", "PMI", "OMPI_COMM"))}
    code = f"import os, sys\n{first}import fompi\n{SEGMENTS}{make}{last}"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**inherited, **ours}, capture_output=True, text=True, timeout=50
    )
    mapped = {line.removeprefix("SEGMENT ") for line in done.stdout.splitlines() if line.startswith("SEGMENT ")}
    assert mapped and ("refused" in done.stdout) == ("refusal" in how), done.stdout + done.stderr
    assert not [path for path in mapped if os.path.exists(path)]
