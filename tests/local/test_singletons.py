"""A launcher that does not belong to the MPI library starts N jobs of one rank. The first Communicator refuses that."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SUM = "import numpy as np, fompi; print(fompi.all_reduce(np.ones(1), comm=fompi.Communicator()))"
ENDS = """
from mpi4py import MPI
key = MPI.Comm.Create_keyval(delete_fn=lambda *_: print("MPI_Finalize", flush=True))
MPI.COMM_SELF.Set_attr(key, 1)
"""
"""MPI_Finalize deletes the attributes of MPI_COMM_SELF first."""

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
INSIDE = "torchrun, inside a rank of another launcher, starts no MPI: write `"
FOREIGN = {
    "torchrun in srun --mpi=pmi2": ({**TORCHRUN, "PMI_FD": "97", "PMI_SIZE": "1", "PMI_RANK": "0"}, INSIDE),
    "torchrun in srun --mpi=pmix": ({**TORCHRUN, "PMIX_NAMESPACE": "slurm.pmix.1.0", "PMIX_RANK": "0"}, INSIDE),
    "the mpirun of Open MPI": (
        {"PMIX_NAMESPACE": "prterun-1@1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"},
        "the mpirun of Open MPI cannot start MPICH this way: use the mpirun of MPICH, ",
    ),
}
"""Launchers with which MPI_Init would end the process. All variables are those of rank 0."""

LAUNCHERS = {
    "sbatch": ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, "Slurm allotted 4 processes, but nothing started them"),
    "srun": (
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},
        "srun started 4 processes, but MPI has 1 rank",
    ),
    "torchrun": (
        TORCHRUN,
        "or MASTER_ADDR is not set (let fompi start MPI",
    ),
}


def run(code, variables):
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM", "PMI", "OMPI_COMM"))}
    environment = {**inherited, **variables}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_lonely_processes_are_refused(launcher):
    variables, words = LAUNCHERS[launcher]
    done = run(SUM, variables)
    assert done.returncode and "LaunchError" in done.stderr and words in done.stderr, done.stderr
    assert "FOMPI_SINGLETONS=1" in done.stderr and not done.stdout
    if launcher == "srun":  # all of them know it, and rank 0 says it
        silent = run(SUM, {**variables, "SLURM_PROCID": "2"})
        assert silent.returncode and not silent.stderr and not silent.stdout
    code, ends = (SUM + ENDS, ["[1.]", "MPI_Finalize"]) if launcher == "torchrun" else (SUM, ["[1.]"])
    allowed = run(code, {**variables, "FOMPI_SINGLETONS": "1"})
    assert allowed.returncode == 0 and allowed.stdout.splitlines() == ends, allowed.stderr


@pytest.mark.parametrize("launcher", FOREIGN)
def test_a_launcher_with_which_mpi_would_not_start(launcher):
    """One sentence, on the last line, before MPI starts."""
    variables, words = FOREIGN[launcher]
    done = run(SUM, variables)
    last = done.stderr.rstrip().splitlines()[-1]
    assert done.returncode and last.startswith(f"fompi.base.errors.LaunchError: {words}"), done.stderr
    assert "bin/mpirun" in last
    assert ("mpirun -n 4 python" in last and "srun -n 4 --mpi=pmi2" in last) == ("torchrun" in launcher)


def test_one_process_needs_no_launcher():
    for variables in ({}, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}):
        done = run(SUM, variables)
        assert done.returncode == 0 and done.stdout.strip() == "[1.]", done.stderr


@pytest.mark.parametrize("module", ["fompi.plan", "fompi.explain", "fompi.all_gather", "fompi.bind", "fompi.simulate"])
def test_no_module_has_the_path_of_a_function(module):
    done = run(f"import {module}", {})
    assert done.returncode and "ModuleNotFoundError" in done.stderr
