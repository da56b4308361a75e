"""Who started this process, and how many of its kind: read off the environment, before and without MPI.

A wrong launcher gives N MPI jobs of one rank each, silently. The launcher says in variables what it meant;
`warning` compares that with what MPI became.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from fompi.base.errors import LaunchError

# What a launcher is called in a sentence.
_STARTERS = {
    "srun": "srun",
    "sbatch": "Slurm",
    "hydra": "the mpirun of MPICH",
    "intel": "the mpirun of Intel MPI",
    "openmpi": "the mpirun of Open MPI",
    "pmi": "a PMI launcher",
    "torchrun": "torchrun",
}

# The launcher that comes with a library, and what the library needs of Slurm.
_OWN_LAUNCHER = {"MPICH": "hydra", "MVAPICH": "hydra", "Intel MPI": "intel", "Open MPI": "openmpi"}
_SRUN = {
    "MPICH": "`srun --mpi=pmi2`",
    "MVAPICH": "`srun --mpi=pmi2`",
    "Cray MPICH": "`srun --mpi=cray_shasta`",
    "Intel MPI": "`srun --mpi=pmi2` with I_MPI_PMI_LIBRARY set to Slurm's libpmi2.so",
    "Open MPI": "`srun --mpi=pmix`",
}


@dataclass(frozen=True)
class Launch:
    """What the launcher meant; None is what it does not say.

    `launcher` is srun, sbatch (in a Slurm job, but not started by srun), hydra, intel, openmpi, pmi (another
    one that speaks PMI), torchrun (or one that sets its variables) or none. `size` counts the processes of
    the whole job, for sbatch those that it asked for; `local_size` counts those on this host.
    """

    launcher: str
    size: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    local_size: int | None = None


def detect(environ: Mapping[str, str] | None = None) -> Launch:
    """The innermost launcher: mpirun inside a Slurm job is mpirun, torchrun inside srun is torchrun.

    The order matters. Hydra and Open MPI start their daemons with srun, so that their ranks also carry the
    variables of the daemons' step; `srun --mpi=pmi2` sets PMI_SIZE, but not Hydra's MPI_LOCALNRANKS.
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
    if "PMIX_RANK" in environ:  # prterun: the size is known to PMIx only
        return Launch("openmpi", None, number("PMIX_RANK"))
    if "SLURM_JOB_ID" in environ and "SLURM_NTASKS" in environ:
        return Launch("sbatch", number("SLURM_NTASKS"))
    if {"WORLD_SIZE", "RANK", "LOCAL_RANK"} <= environ.keys():
        return _torchrun(environ)
    return Launch("none")


def warning(launch: Launch, mpi_size: int, library_name: str, mpirun: str | None = None) -> str | None:
    """One line with cause and fix where MPI did not become the job that the launcher meant, else None.

    `library_name` is the MPI library in memory ("MPICH", "Open MPI", ...), `mpirun` its own launcher's path.
    """
    size = launch.size
    if size is None or size == mpi_size or (launch.launcher == "sbatch" and mpi_size > 1):
        return None
    fix = _fix(launch, library_name, mpirun)
    if launch.launcher == "sbatch":
        return f"Slurm allotted {_processes(size)}, but nothing started them: {fix}"
    cause = f"{_STARTERS[launch.launcher]} started {_processes(size)}, but MPI has "
    if mpi_size > 1:
        return f"{cause}{mpi_size} ranks: an outer launcher left its variables, or these are several MPI jobs"
    return f"{cause}1 rank, because {_why(launch, library_name)}: {fix}"


def refusal(environ: Mapping[str, str], library_name: str, mpirun: str | None = None) -> str | None:
    """The same line where MPI must not even be started, else None.

    An MPICH that was built without PMIx ends the process in MPI_Init when it sees PMIX_NAMESPACE, which the
    mpirun of Open MPI and `srun --mpi=pmix` set, even if its own mpirun runs inside of those.
    """
    if library_name not in ("MPICH", "MVAPICH") or "PMIX_NAMESPACE" not in environ:
        return None
    if "PMI_SIZE" in environ:
        cause = f"{library_name} does not start where an outer launcher left PMIX_NAMESPACE"
        return f"{cause}: unset it before mpirun"
    launch = detect(environ)
    starter = _STARTERS.get(launch.launcher, "a PMIx launcher")
    return f"{starter} cannot start {library_name} this way: {_fix(launch, library_name, mpirun)}"


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
        return f"use {own_srun} (`srun --mpi=list` shows what this Slurm has)"
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
    """Slurm's list of tasks per node, such as "4(x2),3" for 4, 4, 3, at one node."""
    counts: list[int] = []
    for item in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node is not None and node < len(counts) else None


def cores() -> int:
    """Cores for all ranks of this host together: of the launcher above us too, if it bound each rank to its own."""
    found = len(os.sched_getaffinity(0))
    with suppress(OSError):  # the parent is another user's, or has ended
        found = max(found, len(os.sched_getaffinity(os.getppid())))
    return found


def cores_per_rank() -> float:
    """Those cores, shared by as many ranks as the launcher started on this host; no more than this rank may run on."""
    return min(len(os.sched_getaffinity(0)), cores() / (detect().local_size or 1))


_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def thread_note(environ: Mapping[str, str] | None = None) -> str | None:
    """What to set where BLAS would start, in every rank, a thread for each core that the ranks share."""
    environ, threads, share = os.environ if environ is None else environ, len(os.sched_getaffinity(0)), cores_per_rank()
    if threads <= max(1.0, share) or any(name in environ for name in _THREADS):
        return None
    return (
        f"BLAS may start {threads} threads in each rank, and a rank has {share:.3g} cores: "
        f"set OMP_NUM_THREADS={max(1, int(share))}"
    )


DEFAULT_TIMEOUT = 300.0


def timeout() -> float:
    """FOMPI_TIMEOUT: the seconds after which a wait is given up. Raises LaunchError for what is none."""
    text = os.environ.get("FOMPI_TIMEOUT", str(DEFAULT_TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise LaunchError(f"FOMPI_TIMEOUT={text}: give a number of seconds above 0")
    return seconds


def cores_beside_other_hosts() -> float:
    """What `cores_per_rank` is where hosts share cores without knowing, as those of tools/netlab.py; else infinite."""
    return float(os.environ.get("NETLAB_CORES_PER_RANK", "inf"))


def crowded() -> bool:
    """Whether the ranks of this host leave no core of it to spare: all of them come to the same answer.

    A message between them is then a copy by a core that could compute. False where the launcher does not say.
    """
    return (detect().local_size or 0) >= (os.cpu_count() or 1)
