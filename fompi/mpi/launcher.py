"""Which launcher started this process, and with how many ranks. Read from environment variables, without MPI.

A launcher that does not fit the MPI library starts N jobs of one rank each, without an error. But every launcher sets
variables that say how many ranks it started. `warning` compares them with the number of ranks that MPI has.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from fompi.mpi import environment

_LAUNCHER_NAMES = {
    "srun": "srun",
    "sbatch": "Slurm",
    "hydra": "the mpirun of MPICH",
    "intel": "the mpirun of Intel MPI",
    "openmpi": "the mpirun of Open MPI",
    "pmi": "a PMI launcher",
    "torchrun": "torchrun",
}
"""What messages call each launcher."""

_OWN_LAUNCHER = {"MPICH": "hydra", "MVAPICH": "hydra", "Intel MPI": "intel", "Open MPI": "openmpi"}
"""The launcher that is installed with each MPI library."""

_SRUN = {
    "MPICH": "`srun --mpi=pmi2`",
    "MVAPICH": "`srun --mpi=pmi2`",
    "Cray MPICH": "`srun --mpi=cray_shasta`",
    "Intel MPI": "`srun --mpi=pmi2` with I_MPI_PMI_LIBRARY set to Slurm's libpmi2.so",
    "Open MPI": "`srun --mpi=pmix`",
}
"""How Slurm must start each MPI library."""


@dataclass(frozen=True)
class Launch:
    """What the launcher says in its variables. None: it does not say.

    `launcher` is "srun", "sbatch" (in a Slurm job, but not started by srun), "hydra", "intel", "openmpi", "pmi"
    (another launcher that uses PMI), "torchrun" (or a launcher that sets the same variables) or "none". `size` is the
    number of processes of the whole job. For sbatch it is the number that was requested. `local_size` is the number of
    processes on this host.
    """

    launcher: str
    size: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    local_size: int | None = None


def detect(environ: Mapping[str, str] | None = None) -> Launch:
    """The innermost launcher: mpirun inside a Slurm job is mpirun, torchrun inside srun is torchrun.

    The order of the tests matters. Hydra and Open MPI start their daemons with srun, so their ranks also have the
    variables of the daemons' job step. `srun --mpi=pmi2` sets PMI_SIZE, but not Hydra's MPI_LOCALNRANKS.
    """
    environ = os.environ if environ is None else environ

    def number(name: str) -> int | None:
        return _number(environ.get(name))

    if "TORCHELASTIC_RUN_ID" in environ:
        return _torchrun(environ)
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return Launch(
            "openmpi",
            number("OMPI_COMM_WORLD_SIZE"),
            number("OMPI_COMM_WORLD_RANK"),
            number("OMPI_COMM_WORLD_LOCAL_RANK"),
            number("OMPI_COMM_WORLD_LOCAL_SIZE"),
        )
    if "PMI_SIZE" in environ and "MPI_LOCALNRANKS" in environ:
        return Launch(
            "intel" if "I_MPI_HYDRA_UUID" in environ else "hydra",
            number("PMI_SIZE"),
            number("PMI_RANK"),
            number("MPI_LOCALRANKID"),
            number("MPI_LOCALNRANKS"),
        )
    if "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ:
        return Launch(
            "srun",
            number("SLURM_STEP_NUM_TASKS"),
            number("SLURM_PROCID"),
            number("SLURM_LOCALID"),
            _tasks_on_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), number("SLURM_NODEID")),
        )
    if "PMI_SIZE" in environ:
        return Launch("pmi", number("PMI_SIZE"), number("PMI_RANK"))
    if "PMIX_RANK" in environ:  # prterun: only PMIx knows the size
        return Launch("openmpi", None, number("PMIX_RANK"))
    if "SLURM_JOB_ID" in environ and "SLURM_NTASKS" in environ:
        return Launch("sbatch", number("SLURM_NTASKS"))
    if {"WORLD_SIZE", "RANK", "LOCAL_RANK"} <= environ.keys():
        return _torchrun(environ)
    return Launch("none")


def warning(launch: Launch, mpi_size: int, library_name: str, mpirun: str | None = None) -> str | None:
    """One line with cause and fix if MPI has another number of ranks than the launcher started, else None.

    `library_name` is the loaded MPI library ("MPICH", "Open MPI", ...). `mpirun` is the path of its own launcher.
    """
    size = launch.size
    if size is None or size == mpi_size or (launch.launcher == "sbatch" and mpi_size > 1):
        return None
    fix = _fix(launch, library_name, mpirun)
    if launch.launcher == "sbatch":
        return f"Slurm allotted {_processes(size)}, but nothing started them: {fix}"
    cause = f"{_LAUNCHER_NAMES[launch.launcher]} started {_processes(size)}, but MPI has "
    if mpi_size > 1:
        return f"{cause}{mpi_size} ranks: variables of an outer launcher are still set, or these are several MPI jobs"
    return f"{cause}1 rank, because {_why(launch, library_name)}: {fix}"


def refusal(environ: Mapping[str, str], library_name: str, mpirun: str | None = None) -> str | None:
    """One line with cause and fix if MPI_Init would end the process, else None.

    MPICH without PMIx ends the process in MPI_Init if PMIX_NAMESPACE is set. The mpirun of Open MPI and
    `srun --mpi=pmix` set it. It stays set if MPICH's own mpirun runs inside one of them.
    """
    if library_name not in ("MPICH", "MVAPICH") or "PMIX_NAMESPACE" not in environ:
        return None
    if "PMI_SIZE" in environ:
        return f"{library_name} does not start while PMIX_NAMESPACE of an outer launcher is set: unset it before mpirun"
    launch = detect(environ)
    name = _LAUNCHER_NAMES.get(launch.launcher, "a PMIx launcher")
    return f"{name} cannot start {library_name} this way: {_fix(launch, library_name, mpirun)}"


def _why(launch: Launch, library_name: str) -> str:
    if launch.launcher == "torchrun":
        return "torchrun starts no MPI"
    if launch.launcher == _OWN_LAUNCHER.get(library_name):
        return f"Python loaded another {library_name}"
    return f"Python loaded {library_name}"


def _fix(launch: Launch, library_name: str, mpirun: str | None) -> str:
    own_srun = _SRUN.get(library_name, f"the `srun --mpi=...` that {library_name} was built for")
    own_mpirun = f"the mpirun of {library_name}" + (f", {mpirun}" if mpirun else "")
    if launch.launcher == "srun":
        return f"use {own_srun} (`srun --mpi=list` shows what this Slurm supports)"
    if launch.launcher == "sbatch":
        return f"put {own_srun} before python"
    if launch.launcher == "torchrun":
        return f"use {own_srun}, or {own_mpirun}"
    return f"use {own_mpirun}"


def _torchrun(environ: Mapping[str, str]) -> Launch:
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return Launch("torchrun", *(_number(environ.get(name)) for name in names))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _processes(count: int) -> str:
    return f"{count} processes" if count != 1 else "1 process"


def _tasks_on_node(tasks_per_node: str, node: int | None) -> int | None:
    """The tasks on one node, from Slurm's list for all nodes. "4(x2),3" means 4, 4, 3."""
    counts: list[int] = []
    for item in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node is not None and node < len(counts) else None


def cores() -> int:
    """The cores that all ranks of this host have together.

    If the launcher has bound each rank to its own cores, the launcher's own process still has all of them.
    """
    count = len(os.sched_getaffinity(0))
    with suppress(OSError):  # the parent has ended, or belongs to another user
        count = max(count, len(os.sched_getaffinity(os.getppid())))
    return count


def cores_per_rank() -> float:
    """`cores()` divided by the ranks on this host, at most the number of cores that this rank may use."""
    return min(len(os.sched_getaffinity(0)), cores() / (detect().local_size or 1))


_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def thread_note(environ: Mapping[str, str] | None = None) -> str | None:
    """What to set if BLAS would start a thread per core in every rank although ranks share the cores, else None."""
    environ, threads, share = os.environ if environ is None else environ, len(os.sched_getaffinity(0)), cores_per_rank()
    if threads <= max(1.0, share) or any(name in environ for name in _THREADS):
        return None
    return (
        f"BLAS may start {threads} threads in each rank, but a rank has {share:.3g} cores: "
        f"set OMP_NUM_THREADS={max(1, int(share))}"
    )


def timeout() -> float:
    """FOMPI_TIMEOUT: seconds that a wait may last without progress.

    Normal waits are shorter, for example for a rank that loads data or compiles.
    """
    return float(environment.value("FOMPI_TIMEOUT"))


def cores_beside_other_hosts() -> float:
    """The cores per rank where several emulated hosts share one machine's cores (tools/netlab.py), else infinity."""
    return float(os.environ.get("NETLAB_CORES_PER_RANK", "inf"))


def crowded() -> bool:
    """True if this host has at least as many ranks as cores. All its ranks get the same answer.

    Then a message between them is a copy by a core that could compute instead. False if the launcher does not say how
    many ranks this host has.
    """
    return (detect().local_size or 0) >= (os.cpu_count() or 1)
