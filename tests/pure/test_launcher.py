"""Which launcher started this process, tested with the environment variables that each launcher sets."""

from __future__ import annotations

import os

import pytest

from fompi.mpi.launcher import Launch, cores_per_rank, crowded, detect, refusal, thread_note, warning

BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),2",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "7",
    "SLURM_LOCALID": "1",
}
# mpirun starts one daemon per node with srun. The ranks see the variables of the daemons' job step.
DAEMON = STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}
PMI = {"PMI_FD": "9", "PMI_SIZE": "8", "PMI_RANK": "5"}
HYDRA = PMI | {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
HYDRA_PORT = {k: v for k, v in HYDRA.items() if k != "PMI_FD"} | {"PMI_PORT": "host:4000", "PMI_ID": "5"}
INTEL = HYDRA | {"I_MPI_HYDRA_UUID": "5b160000", "HYDRA_BSTRAP_NODE_ID": "0"}
OPENMPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "5",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}
TORCHRUN = {
    "WORLD_SIZE": "8",
    "RANK": "5",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "none",
}
LIKE_TORCHRUN = {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1"}  # set by deepspeed and accelerate


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Launch("none")),
        ({"HOME": "/home/me", "PATH": "/bin"}, Launch("none")),
        (STEP, Launch("srun", 8, 7, 1, 2)),
        (STEP | PMI, Launch("srun", 8, 7, 1, 2)),  # srun --mpi=pmi2
        (STEP | {"PMIX_RANK": "7"}, Launch("srun", 8, 7, 1, 2)),  # srun --mpi=pmix
        (BATCH, Launch("sbatch", 8)),
        (BATCH | HYDRA, Launch("hydra", 8, 5, 1, 4)),  # mpirun inside sbatch
        (DAEMON | HYDRA, Launch("hydra", 8, 5, 1, 4)),
        (DAEMON | INTEL, Launch("intel", 8, 5, 1, 4)),
        (DAEMON | OPENMPI, Launch("openmpi", 8, 5, 1, 4)),
        (HYDRA, Launch("hydra", 8, 5, 1, 4)),
        (HYDRA_PORT, Launch("hydra", 8, 5, 1, 4)),
        (INTEL, Launch("intel", 8, 5, 1, 4)),
        (OPENMPI, Launch("openmpi", 8, 5, 1, 4)),
        ({"PMIX_RANK": "5", "PMIX_NAMESPACE": "prterun-host-1@1"}, Launch("openmpi", None, 5)),
        (PMI, Launch("pmi", 8, 5)),
        (TORCHRUN, Launch("torchrun", 8, 5, 1, 4)),
        (STEP | TORCHRUN, Launch("torchrun", 8, 5, 1, 4)),  # srun starts one torchrun per node
        (LIKE_TORCHRUN, Launch("torchrun", 8, 5, 1)),
        (OPENMPI | LIKE_TORCHRUN, Launch("openmpi", 8, 5, 1, 4)),  # set by hand, for torch
        (STEP | LIKE_TORCHRUN, Launch("srun", 8, 7, 1, 2)),
    ],
)
def test_detect(environ, expected):
    assert detect(environ) == expected


def test_detect_reads_the_environment_by_default(monkeypatch):
    for name, value in OPENMPI.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert detect() == Launch("openmpi", 8, 5, 1, 4)


@pytest.mark.parametrize("text", ["", "many", "-1", "8.0", "٨"])
def test_a_variable_that_is_not_a_number_is_ignored(text):
    assert detect(OPENMPI | {"OMPI_COMM_WORLD_SIZE": text}) == Launch("openmpi", None, 5, 1, 4)


@pytest.mark.parametrize(
    ("tasks", "node", "expected"),
    [("4", "0", 4), ("4(x3)", "2", 4), ("4(x2),3", "2", 3), ("4", "1", None), ("4,x", "0", None)],
)
def test_tasks_of_a_slurm_node(tasks, node, expected):
    environ = STEP | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}
    assert detect(environ).local_size == expected


STARTED = "started 8 processes, but MPI has 1 rank, because"


@pytest.mark.parametrize(
    ("environ", "library", "expected"),
    [
        (
            STEP,
            "MPICH",
            f"srun {STARTED} Python loaded MPICH:"
            " use `srun --mpi=pmi2` (`srun --mpi=list` shows what this Slurm supports)",
        ),
        (
            STEP | PMI,
            "Open MPI",
            f"srun {STARTED} Python loaded Open MPI:"
            " use `srun --mpi=pmix` (`srun --mpi=list` shows what this Slurm supports)",
        ),
        (
            STEP,
            "Intel MPI",
            f"srun {STARTED} Python loaded Intel MPI: use `srun --mpi=pmi2` with I_MPI_PMI_LIBRARY set to"
            " Slurm's libpmi2.so (`srun --mpi=list` shows what this Slurm supports)",
        ),
        (
            STEP,
            "Some MPI",
            f"srun {STARTED} Python loaded Some MPI: use the `srun --mpi=...` that Some MPI was built for"
            " (`srun --mpi=list` shows what this Slurm supports)",
        ),
        (
            BATCH,
            "MPICH",
            "Slurm allotted 8 processes, but nothing started them: put `srun --mpi=pmi2` before python",
        ),
        (
            TORCHRUN,
            "Open MPI",
            f"torchrun {STARTED} torchrun starts no MPI:"
            " use `srun --mpi=pmix`, or the mpirun of Open MPI, /env/bin/mpirun",
        ),
        (
            HYDRA,
            "Open MPI",
            f"the mpirun of MPICH {STARTED} Python loaded Open MPI: use the mpirun of Open MPI, /env/bin/mpirun",
        ),
        (
            OPENMPI,
            "MPICH",
            f"the mpirun of Open MPI {STARTED} Python loaded MPICH: use the mpirun of MPICH, /env/bin/mpirun",
        ),
        (
            OPENMPI,
            "Open MPI",
            f"the mpirun of Open MPI {STARTED} Python loaded another Open MPI:"
            " use the mpirun of Open MPI, /env/bin/mpirun",
        ),
    ],
)
def test_a_job_of_one_rank_gets_cause_and_fix_in_one_line(environ, library, expected):
    assert warning(detect(environ), 1, library, "/env/bin/mpirun") == expected


@pytest.mark.parametrize("environ", [STEP, BATCH, HYDRA, HYDRA_PORT, PMI, INTEL, OPENMPI, TORCHRUN])
@pytest.mark.parametrize("library", ["MPICH", "MVAPICH", "Cray MPICH", "Intel MPI", "Open MPI", "Some MPI"])
def test_every_launcher_and_library(environ, library):
    launched = detect(environ)
    line = warning(launched, 1, library)
    assert line is not None
    assert "8 processes" in line
    assert "srun" in line or f"the mpirun of {library}" in line
    assert "\n" not in line
    assert warning(launched, 8, library) is None


NESTED = "MPICH does not start while PMIX_NAMESPACE of an outer launcher is set: unset it before mpirun"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            OPENMPI,
            "the mpirun of Open MPI cannot start MPICH this way: use the mpirun of MPICH, /env/bin/mpirun",
        ),
        (
            STEP | {"PMIX_RANK": "7", "PMIX_NAMESPACE": "slurm.pmix.7.0"},
            "srun cannot start MPICH this way:"
            " use `srun --mpi=pmi2` (`srun --mpi=list` shows what this Slurm supports)",
        ),
        (
            {"PMIX_NAMESPACE": "x"},
            "a PMIx launcher cannot start MPICH this way: use the mpirun of MPICH, /env/bin/mpirun",
        ),
        (OPENMPI | HYDRA, NESTED),
        (STEP | HYDRA | {"PMIX_NAMESPACE": "slurm.pmix.7.0"}, NESTED),
    ],
)
def test_mpich_is_refused_if_it_would_end_the_process(environ, expected):
    assert refusal(environ, "MPICH", "/env/bin/mpirun") == expected
    assert refusal(environ, "Open MPI") is None


@pytest.mark.parametrize("environ", [{}, STEP, STEP | PMI, BATCH, HYDRA, INTEL, TORCHRUN])
def test_mpich_may_start_without_pmix(environ):
    assert refusal(environ, "MPICH") is None


def test_mpi_has_another_size_than_the_launcher_says():
    assert warning(detect(OPENMPI), 3, "Open MPI") == (
        "the mpirun of Open MPI started 8 processes, but MPI has 3 ranks:"
        " variables of an outer launcher are still set, or these are several MPI jobs"
    )
    assert warning(detect(BATCH), 4, "MPICH") is None  # an unknown launcher inside sbatch


@pytest.mark.parametrize("environ", [{}, {"PMIX_RANK": "0"}, OPENMPI | {"OMPI_COMM_WORLD_SIZE": "1"}])
def test_no_warning(environ):
    assert warning(detect(environ), 1, "MPICH") is None


@pytest.mark.parametrize(
    ("own", "parent", "ranks", "cores"),
    [
        (2, 2, 1, 2.0),
        (2, 2, 4, 0.5),  # all ranks share the cores
        (1, 8, 8, 1.0),  # each rank is bound to its own core; the launcher is not bound
        (1, 8, 1, 1.0),  # the rank is bound to one core, so it cannot use the other cores
        (4, 8, 2, 4.0),
    ],
)
def test_cores_per_rank(monkeypatch, own, parent, ranks, cores):
    affinity = {0: range(own), os.getppid(): range(parent)}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(affinity[process]))
    monkeypatch.setattr(os, "environ", {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks)})
    assert cores_per_rank() == cores


@pytest.mark.parametrize(("cores", "local", "expected"), [(2, 2, True), (2, 8, True), (4, 2, False)])
def test_a_host_without_a_spare_core(monkeypatch, cores, local, expected):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "environ", {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": str(local)})
    assert crowded() is expected
    monkeypatch.setattr(os, "environ", {})
    assert not crowded(), "no launcher says how many ranks this host has"


@pytest.mark.parametrize(
    ("cores", "ranks", "environ", "expected"),
    [
        (2, 4, {}, "OMP_NUM_THREADS=1"),
        (16, 4, {}, "OMP_NUM_THREADS=4"),
        (16, 1, {}, None),
        (1, 4, {}, None),  # each rank is bound to one core, and BLAS starts one thread
        (2, 4, {"OMP_NUM_THREADS": "2"}, None),  # the user has chosen
        (2, 4, {"OPENBLAS_NUM_THREADS": "1"}, None),
    ],
)
def test_more_blas_threads_than_cores_per_rank(monkeypatch, cores, ranks, environ, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    launched = {"OMPI_COMM_WORLD_SIZE": str(ranks), "OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks)}
    monkeypatch.setattr(os, "environ", launched)
    note = thread_note(environ)
    assert (note is None) == (expected is None) and (expected is None or expected in note)
