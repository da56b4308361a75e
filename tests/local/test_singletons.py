"""A launcher that does not belong to the MPI library starts N jobs of one rank. The first Communicator refuses that."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SUM = "import numpy as np, fompi; print(fompi.all_reduce(np.ones(1), comm=fompi.Communicator()))"

LAUNCHERS = {
    "sbatch": ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, "Slurm allotted 4 processes, but nothing started them"),
    "srun": (
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_JOB_ID": "7"},
        "srun started 4 processes, but MPI has 1 rank",
    ),
    "torchrun": (
        {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"},
        "torchrun starts no MPI",
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
    allowed = run(SUM, {**variables, "FOMPI_SINGLETONS": "1"})
    assert allowed.returncode == 0 and allowed.stdout.strip() == "[1.]", allowed.stderr


def test_one_process_needs_no_launcher():
    for variables in ({}, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}):
        done = run(SUM, variables)
        assert done.returncode == 0 and done.stdout.strip() == "[1.]", done.stderr


@pytest.mark.parametrize("module", ["fompi.plan", "fompi.explain", "fompi.all_gather", "fompi.bind", "fompi.simulate"])
def test_no_module_has_the_path_of_a_function(module):
    done = run(f"import {module}", {})
    assert done.returncode and "ModuleNotFoundError" in done.stderr
