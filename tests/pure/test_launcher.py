"""Which launcher started this process, tested with the environment variables that each launcher sets."""

from __future__ import annotations

import os

import pytest

from fompi.mpi import launcher
from fompi.mpi.launcher import (
    LaunchVariables,
    batch_note,
    cores_per_rank,
    crowded,
    detect,
    kill_note,
    plugin,
    refusal,
    thread_note,
    torchrun_refusal,
    warning,
)

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
PALS = {"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4", "PALS_APID": "x", "PMI_SIZE": "8"}
JSRUN = {
    f"JSM_NAMESPACE_{name}": n for name, n in zip(("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"), "8514", strict=True)
}
MVAPICH = {
    f"MV2_COMM_WORLD_{name}": n for name, n in zip(("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"), "8514", strict=True)
}
FLUX = {"FLUX_JOB_SIZE": "8", "FLUX_TASK_RANK": "5", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2"}
LIKE_TORCHRUN = {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1"}  # set by deepspeed and accelerate


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, LaunchVariables("none")),
        ({"HOME": "/home/me", "PATH": "/bin"}, LaunchVariables("none")),
        (STEP, LaunchVariables("srun", 8, 7, 1, 2)),
        (STEP | PMI, LaunchVariables("srun", 8, 7, 1, 2)),  # srun --mpi=pmi2
        (STEP | {"PMIX_RANK": "7"}, LaunchVariables("srun", 8, 7, 1, 2)),  # srun --mpi=pmix
        (BATCH, LaunchVariables("sbatch", 8)),
        (BATCH | HYDRA, LaunchVariables("hydra", 8, 5, 1, 4)),  # mpirun inside sbatch
        (DAEMON | HYDRA, LaunchVariables("hydra", 8, 5, 1, 4)),
        (DAEMON | INTEL, LaunchVariables("intel", 8, 5, 1, 4)),
        (DAEMON | OPENMPI, LaunchVariables("openmpi", 8, 5, 1, 4)),
        (HYDRA, LaunchVariables("hydra", 8, 5, 1, 4)),
        (HYDRA_PORT, LaunchVariables("hydra", 8, 5, 1, 4)),
        (INTEL, LaunchVariables("intel", 8, 5, 1, 4)),
        (OPENMPI, LaunchVariables("openmpi", 8, 5, 1, 4)),
        ({"PMIX_RANK": "5", "PMIX_NAMESPACE": "prterun-host-1@1"}, LaunchVariables("openmpi", None, 5)),
        (PMI, LaunchVariables("pmi", 8, 5)),
        (PALS, LaunchVariables("pals", 8, 5, 1, 4)),
        (STEP | PALS, LaunchVariables("srun", 8, 7, 1, 2)),  # srun --mpi=cray_shasta
        (JSRUN, LaunchVariables("jsrun", 8, 5, 1, 4)),
        (MVAPICH, LaunchVariables("mvapich", 8, 5, 1, 4)),
        (FLUX | PMI, LaunchVariables("flux", 8, 5, 1, 4)),
        (FLUX | {"FLUX_JOB_NNODES": "3"}, LaunchVariables("flux", 8, 5, 1)),  # some nodes have more ranks than others
        (STEP | FLUX, LaunchVariables("flux", 8, 5, 1, 4)),  # Flux inside a job of Slurm
        (TORCHRUN, LaunchVariables("torchrun", 8, 5, 1, 4)),
        (STEP | TORCHRUN, LaunchVariables("torchrun", 8, 5, 1, 4)),  # srun starts one torchrun per node
        (LIKE_TORCHRUN, LaunchVariables("torch", 8, 5, 1)),
        (OPENMPI | LIKE_TORCHRUN, LaunchVariables("openmpi", 8, 5, 1, 4)),  # set by hand, for torch
        (STEP | LIKE_TORCHRUN, LaunchVariables("srun", 8, 7, 1, 2)),
    ],
)
def test_detect(environ, expected):
    assert detect(environ) == expected


def test_detect_reads_the_environment_by_default(monkeypatch):
    for name, value in OPENMPI.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert detect() == LaunchVariables("openmpi", 8, 5, 1, 4)


@pytest.mark.parametrize("text", ["", "many", "-1", "8.0", "٨"])
def test_a_variable_that_is_not_a_number_is_ignored(text):
    assert detect(OPENMPI | {"OMPI_COMM_WORLD_SIZE": text}) == LaunchVariables("openmpi", None, 5, 1, 4)


@pytest.mark.parametrize(
    ("tasks", "node", "expected"),
    [("4", "0", 4), ("4(x3)", "2", 4), ("4(x2),3", "2", 3), ("4", "1", None), ("4,x", "0", None)],
)
def test_tasks_of_a_slurm_node(tasks, node, expected):
    environ = STEP | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}
    assert detect(environ).local_size == expected


PMIX = {"PMIX_RANK": "7", "PMIX_NAMESPACE": "slurm.pmix.7.0"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (STEP, "none"),
        (STEP | PMI, "pmi2"),
        (STEP | PMIX, "pmix"),
        (STEP | PALS, "cray_shasta"),
        (STEP | HYDRA, None),  # mpirun started it
        (BATCH, None),
        (OPENMPI, None),
        ({}, None),
    ],
)
def test_the_plugin_of_slurm(environ, expected):
    assert plugin(environ) == expected


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"PBS_NODEFILE": "nodes"}, ["a PBS job", "by mpirun", "`mpirun -n 3 python ...` starts 3 ranks"]),
        ({"PBS_NODEFILE": "/no/such/file"}, ["`mpirun -n N python ...` starts N ranks"]),
        ({"LSB_DJOB_NUMPROC": "16"}, ["an LSF job", "`mpirun -n 16 python ...`"]),
        ({"NSLOTS": "8", "PE_HOSTFILE": "/x"}, ["a Grid Engine job", "`mpirun -n 8 python ...`"]),
        ({"FLUX_ENCLOSING_ID": "f1", "SLURM_JOB_ID": "7"}, ["a Flux job", "`flux run -n N python ...`"]),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, ["a Slurm job", "by srun", "`srun -n 2 python ...`"]),
        ({"LSB_DJOB_NUMPROC": "1"}, None),  # one slot, one rank
        ({"NSLOTS": "8"}, None),
        ({"PBS_NODEFILE": "nodes"} | HYDRA, None),
        ({}, None),
    ],
)
def test_a_batch_job_in_which_nothing_was_started(environ, words, tmp_path):
    (tmp_path / "nodes").write_text("n1\nn1\nn2\n")
    if environ.get("PBS_NODEFILE") == "nodes":
        environ = environ | {"PBS_NODEFILE": str(tmp_path / "nodes")}
    note = batch_note(environ)
    assert (note is None) == (words is None)
    for word in words or ():
        assert word in note


def test_a_killed_rank_under_srun():
    note = kill_note(detect(STEP), "MPICH", STEP)
    assert "set SLURM_KILL_BAD_EXIT=1 before srun" in note
    assert kill_note(detect(STEP), "MPICH", STEP | {"SLURM_KILL_BAD_EXIT": "0"}) == note
    assert kill_note(detect(STEP), "MPICH", STEP | {"SLURM_KILL_BAD_EXIT": "1"}) is None
    assert kill_note(detect(STEP), "Open MPI", STEP) is None
    assert kill_note(detect(HYDRA), "MPICH", HYDRA) is None
    assert kill_note(LaunchVariables("srun", 1, 0, 0, 1), "MPICH", STEP) is None


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
            f"torchrun {STARTED} it starts no Open MPI:"
            " write `/env/bin/mpirun -n 8 python -m fompi.torch ...`, or `srun -n 8 --mpi=pmix` before python",
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


@pytest.mark.parametrize(
    "environ", [STEP, BATCH, HYDRA, HYDRA_PORT, PMI, INTEL, OPENMPI, TORCHRUN, PALS, JSRUN, MVAPICH, FLUX]
)
@pytest.mark.parametrize("library", ["MPICH", "MVAPICH", "Cray MPICH", "Intel MPI", "Open MPI", "Some MPI"])
def test_every_launcher_and_library(environ, library):
    launched = detect(environ)
    line = warning(launched, 1, library)
    assert line is not None
    assert "8 processes" in line
    assert "srun" in line or f"the mpirun of {library}" in line
    assert "\n" not in line
    assert warning(launched, 8, library) is None


NESTED = (
    "MPICH does not start while PMIX_NAMESPACE of an outer launcher is set: unset it before mpirun, or set "
    "MPIR_CVAR_PMI_VERSION=1"
)


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


@pytest.mark.parametrize("outer", [{"PMIX_NAMESPACE": "slurm.pmix.7.0"}, {"PMI_FD": "9"}])
def test_torchrun_inside_a_rank_is_refused(outer):
    """It has started several processes there. A single one takes the place of the rank."""
    expected = (
        "torchrun, inside a rank of another launcher, starts no MPI: write `mpirun -n 8 python -m fompi.torch ...`, or "
    )
    assert torchrun_refusal(STEP | TORCHRUN | outer, "MPICH").startswith(expected)
    assert torchrun_refusal(STEP | TORCHRUN | outer | {"LOCAL_WORLD_SIZE": "1"}, "MPICH") is None
    store = {"MASTER_ADDR": "n1", "MASTER_PORT": "7"}  # fompi connects the processes
    assert torchrun_refusal(STEP | TORCHRUN | outer | store, "MPICH") is None
    assert torchrun_refusal(STEP | TORCHRUN | outer | store, "Open MPI").startswith(expected)
    assert torchrun_refusal(STEP | TORCHRUN, "MPICH") is None and torchrun_refusal(STEP | outer, "MPICH") is None


@pytest.mark.parametrize(
    "environ",
    [{}, STEP, STEP | PMI, BATCH, HYDRA, INTEL, TORCHRUN, STEP | PMI | PMIX | {"MPIR_CVAR_PMI_VERSION": "1"}],
)
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


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_CPUS_ON_NODE": "8"}, 4.0),
        ({"SLURM_CPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "2"}, 2.0),
        ({"SLURM_CPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "2"}, 1.0),  # --overcommit
        ({"SLURM_CPUS_ON_NODE": "128", "SLURM_CPUS_PER_TASK": "64"}, 8.0),  # Slurm counts more cores than there are
    ],
)
def test_cores_per_rank_under_srun(monkeypatch, variables, expected):
    """Two ranks on a machine of 16 cores that binds no rank. slurmstepd may use all cores, too."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr(os, "environ", STEP | variables)
    assert cores_per_rank() == expected


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
        (2, 4, {"OMP_NUM_THREADS": "1"}, None),
        (2, 4, {"OMP_NUM_THREADS": "2"}, "(OMP_NUM_THREADS=2 is set), but a rank has 0.5 cores: set OMP_NUM_THREADS=1"),
        (16, 4, {"OMP_NUM_THREADS": "4"}, None),
        (16, 4, {"OMP_NUM_THREADS": "8,2"}, "set OMP_NUM_THREADS=4"),
        (2, 4, {"OPENBLAS_NUM_THREADS": "1"}, None),
        (2, 4, {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "8"}, None),  # OpenBLAS reads its own variable first
        (2, 4, {"MKL_NUM_THREADS": "8", "OMP_NUM_THREADS": "1"}, "set MKL_NUM_THREADS=1"),
        (4, 4, {"OMP_NUM_THREADS": "many"}, "set OMP_NUM_THREADS=1"),  # not a number, so no limit
    ],
)
def test_more_blas_threads_than_cores_per_rank(monkeypatch, cores, ranks, environ, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    launched = {"OMPI_COMM_WORLD_SIZE": str(ranks), "OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks)}
    monkeypatch.setattr(os, "environ", launched)
    note = thread_note(environ)
    assert (note is None) == (expected is None) and (expected is None or expected in note)


HYDRA_RANK = {"PMI_SIZE": "1", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
TORCHRUN_RANK = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, True),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"}, True),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, True),
        (HYDRA_RANK, True),  # one rank that has started workers
        ({**HYDRA_RANK, "PMI_SIZE": "2", "PMI_FD": "100000"}, True),  # a child of a rank
        ({**HYDRA_RANK, "PMI_SIZE": "2"}, False),
        ({**HYDRA_RANK, "PMI_SIZE": "4"}, False),  # refused: torch and MPI number the ranks differently
        (TORCHRUN_RANK, False),  # by the store of torchrun
        ({**TORCHRUN_RANK, launcher.CONNECTED: launcher.process_of(TORCHRUN_RANK), "PMI_FD": "100000"}, True),
    ],
)
def test_processes_that_fompi_connects(environ, expected):
    assert launcher.must_meet(launcher.detect(environ), 2, environ, "MPICH") == expected


def test_a_process_that_met_others():
    """Its place is what `pmi.connect` has set, whatever started the process above it."""
    met = {**TORCHRUN_RANK, **HYDRA_RANK, "PMI_SIZE": "3", launcher.MET: "7"}
    assert launcher.detect(met) == launcher.LaunchVariables("store", 3, 0, 0, 1)
    assert not launcher.starts_mpi(met) and launcher.starts_mpi(HYDRA_RANK) and not launcher.starts_mpi({})
