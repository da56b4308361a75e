"""Which launcher started this process, and with how many ranks. Read from environment variables, without MPI.

A launcher that does not fit the MPI library starts N jobs of one rank each, without an error. But every launcher sets
variables that say how many ranks it started. `warning` compares them with the number of ranks that MPI has.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from fompi.mpi import environment

_LAUNCHER_NAMES = {
    "srun": "srun",
    "sbatch": "Slurm",
    "hydra": "the mpirun of MPICH",
    "intel": "the mpirun of Intel MPI",
    "openmpi": "the mpirun of Open MPI",
    "mvapich": "the mpirun of MVAPICH",
    "pals": "the mpiexec of PALS",
    "jsrun": "jsrun",
    "flux": "flux run",
    "pmi": "a PMI launcher",
    "torchrun": "torchrun",
    "torch": "a launcher like torchrun",
    "store": "a program that starts its own processes",
}
"""What messages call each launcher."""

_OWN_LAUNCHER = {"MPICH": "hydra", "MVAPICH": "hydra", "Intel MPI": "intel", "Open MPI": "openmpi"}
"""The launcher that is installed with each MPI library."""

PLUGINS = {"MPICH": "pmi2", "MVAPICH": "pmi2", "Intel MPI": "pmi2", "Cray MPICH": "cray_shasta", "Open MPI": "pmix"}
"""The option --mpi of srun for each MPI library."""


@dataclass(frozen=True)
class LaunchVariables:
    """What the launcher says in its variables. None: it does not say.

    `launcher` is a name of `MARKS`: "sbatch" is a Slurm job in which srun has started nothing, "pmi" any other launcher
    that uses PMI, "torch" any that sets the variables of torchrun. It is "none" without a launcher. `size` is the
    number of processes of the whole job. For sbatch it is the number that was requested. `local_size` is the number of
    processes on this host.
    """

    launcher: str
    size: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    local_size: int | None = None


class LauncherMark(NamedTuple):
    """A launcher, the variables that only it sets, and those in which it says size, rank, local rank and local size."""

    launcher: str
    needs: tuple[str, ...]
    size: str = ""
    rank: str = ""
    local_rank: str = ""
    local_size: str = ""


_TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_HYDRA = ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PALS = ("PMI_SIZE", "PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")

_OMPI, _MV2, _JSM = (
    tuple(f"{prefix}_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"))
    for prefix in ("OMPI_COMM_WORLD", "MV2_COMM_WORLD", "JSM_NAMESPACE")
)

MET = "PMI_PROCESS_OF_FOMPI"
"""A variable that `transport.start_by_store` sets in processes that met in a store, where no launcher started MPI."""

MARKS = (
    LauncherMark("store", (MET,), *_HYDRA),
    LauncherMark("torchrun", ("TORCHELASTIC_RUN_ID",), *_TORCHRUN),
    LauncherMark("openmpi", ("OMPI_COMM_WORLD_SIZE",), *_OMPI),
    LauncherMark("intel", ("PMI_SIZE", "MPI_LOCALNRANKS", "I_MPI_HYDRA_UUID"), *_HYDRA),
    LauncherMark("hydra", ("PMI_SIZE", "MPI_LOCALNRANKS"), *_HYDRA),
    LauncherMark("mvapich", ("MV2_COMM_WORLD_SIZE",), *_MV2),
    LauncherMark("jsrun", ("JSM_NAMESPACE_SIZE",), *_JSM),
    LauncherMark("flux", ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"), "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
    LauncherMark(
        "srun", ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"
    ),
    LauncherMark("pals", ("PALS_RANKID",), *_PALS),
    LauncherMark("pmi", ("PMI_SIZE",), "PMI_SIZE", "PMI_RANK"),
    LauncherMark("openmpi", ("PMIX_RANK",), "", "PMIX_RANK"),  # prterun: only PMIx knows the size
    LauncherMark("sbatch", ("SLURM_JOB_ID", "SLURM_NTASKS"), "SLURM_NTASKS"),
    LauncherMark("torch", ("WORLD_SIZE", "RANK", "LOCAL_RANK"), *_TORCHRUN),
)
"""The launchers, innermost first: mpirun inside a Slurm job is mpirun, torchrun inside srun is torchrun.

The order matters. Hydra and Open MPI start their daemons with srun, so their ranks also have the variables of the
daemons' job step. `srun --mpi=pmi2` sets PMI_SIZE, but not Hydra's MPI_LOCALNRANKS. PALS sets PMI_SIZE, too.
`srun --mpi=cray_shasta` and Flux set the variables of PALS.
"""


def detect(environ: Mapping[str, str] | None = None) -> LaunchVariables:
    """The innermost launcher of `MARKS`, and what it says. Without any: the launcher "none"."""
    environ = os.environ if environ is None else environ
    for mark in MARKS:
        if all(name in environ for name in mark.needs):
            launch = LaunchVariables(mark.launcher, *(_number(environ.get(name)) for name in mark[2:]))
            if mark.launcher == "srun":
                tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
                launch = replace(launch, local_size=_tasks_on_node(tasks, _number(environ.get("SLURM_NODEID"))))
            elif mark.launcher == "flux" and launch.size:
                nodes = _number(environ.get("FLUX_JOB_NNODES"))
                launch = replace(
                    launch, local_size=launch.size // nodes if nodes and launch.size % nodes == 0 else None
                )
            return launch
    return LaunchVariables("none")


def plugin(environ: Mapping[str, str] | None = None) -> str | None:
    """The plug-in of Slurm that started this process: pmi2, pmix, cray_shasta or none. None: srun did not start it."""
    environ = os.environ if environ is None else environ
    if detect(environ).launcher != "srun":
        return None
    if "PALS_APID" in environ:
        return "cray_shasta"
    if environ.get("PMIX_NAMESPACE", "").startswith("slurm.pmix"):
        return "pmix"
    return "pmi2" if "PMI_FD" in environ else "none"


class BatchSystem(NamedTuple):
    """A batch system with its article, the variables that its jobs have, and what says how many processes it allotted.

    `slots` is a variable with a number, or with the name of a file that has a line per slot. `start` starts {n} ranks.
    """

    name: str
    needs: tuple[str, ...]
    slots: str
    start: str = "mpirun -n {n}"


BATCHES = (
    BatchSystem("a Flux", ("FLUX_ENCLOSING_ID",), "", "flux run -n {n}"),
    BatchSystem("a Slurm", ("SLURM_JOB_ID",), "SLURM_JOB_NUM_NODES", "srun -n {n}"),
    BatchSystem("a PBS", ("PBS_NODEFILE",), "PBS_NODEFILE"),
    BatchSystem("an LSF", ("LSB_DJOB_NUMPROC",), "LSB_DJOB_NUMPROC"),
    BatchSystem("a Grid Engine", ("NSLOTS", "PE_HOSTFILE"), "NSLOTS"),
)
"""The batch systems, innermost first: Flux runs inside jobs of the others."""


def batch_note(environ: Mapping[str, str] | None = None) -> str | None:
    """What to write if this process is inside a job of several slots, but no launcher started it, else None."""
    environ = os.environ if environ is None else environ
    if detect(environ).launcher != "none":
        return None
    for batch in BATCHES:
        if all(name in environ for name in batch.needs):
            slots = _slots(environ.get(batch.slots, ""))
            if slots == 1:
                return None
            start = batch.start.format(n=slots or "N")
            return (
                f"you are inside {batch.name} job, but python was not started by {start.split(' -n')[0]}, so it is "
                f"one rank: `{start} python ...` starts {slots or 'N'} ranks"
            )
    return None


def _slots(text: str) -> int | None:
    if text.startswith("/"):
        with suppress(OSError):
            return len(Path(text).read_text().split())
    return _number(text)


def kill_note(launch: LaunchVariables, library_name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """What to set if a rank that is killed would leave the others waiting, else None. It does with MPICH under srun."""
    environ = os.environ if environ is None else environ
    if launch.launcher != "srun" or library_name == "Open MPI" or launch.size in (None, 1):
        return None
    if environ.get("SLURM_KILL_BAD_EXIT", "0") not in ("", "0"):
        return None
    return (
        "a rank that is killed leaves the others waiting until FOMPI_TIMEOUT: "
        "set SLURM_KILL_BAD_EXIT=1 before srun (nothing to do if srun has -K, which a rank cannot see)"
    )


def warning(launch: LaunchVariables, mpi_size: int, library_name: str, mpirun: str | None = None) -> str | None:
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


def is_orphan(environ: Mapping[str, str], library_name: str) -> bool:
    """True in a child of a rank that has the variables of the launcher, but not its connection."""
    return library_name != "Open MPI" and _is_closed(environ.get("PMI_FD"))


def refusal(environ: Mapping[str, str], library_name: str, mpirun: str | None = None) -> str | None:
    """One line with cause and fix if MPI_Init would end the process, else None.

    MPICH without PMIx ends the process in MPI_Init if PMIX_NAMESPACE is set. The mpirun of Open MPI and
    `srun --mpi=pmix` set it. It stays set if MPICH's own mpirun, or a job script, runs inside one of them.
    """
    if is_orphan(environ, library_name):
        alone = " FOMPI_SINGLETONS=1" if is_child(environ) else ""  # the variables of torchrun are still set, too
        return (
            "this process is a child of a rank: the connection to the launcher is closed here, but its variables are "
            f"still set. Start the child with `env -u PMI_FD -u PMI_RANK -u PMI_SIZE{alone}` to make it a job of one "
            "rank"
        )
    if library_name not in ("MPICH", "MVAPICH") or "PMIX_NAMESPACE" not in environ:
        return None
    if "PMI_SIZE" in environ:
        if environ.get("MPIR_CVAR_PMI_VERSION") == "1":  # MPICH looks for PMI-1 only
            return None
        return (
            f"{library_name} does not start while PMIX_NAMESPACE of an outer launcher is set: unset it before mpirun, "
            "or set MPIR_CVAR_PMI_VERSION=1"
        )
    launch = detect(environ)
    name = _LAUNCHER_NAMES.get(launch.launcher, "a PMIx launcher")
    return f"{name} cannot start {library_name} this way: {_fix(launch, library_name, mpirun)}"


BRIDGED = ("MPICH", "MVAPICH", "Intel MPI")
"""The MPI libraries that speak PMI-1, so that `fompi.mpi.pmi` can start them."""

CONNECTED = "PMI_CONNECTED_BY_FOMPI"
"""A variable that `fompi.mpi.pmi` sets to `process_of(environ)`. Child processes inherit it."""


def process_of(environ: Mapping[str, str]) -> str:
    """Which process of which job of torchrun this is. A torchrun that runs inside another one has another port."""
    return " ".join(environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))


def is_child(environ: Mapping[str, str]) -> bool:
    """True if `fompi.mpi.pmi` has connected the process of torchrun that this one is a child of."""
    return environ.get(CONNECTED) == process_of(environ)


def is_bridged(launch: LaunchVariables, library_name: str, environ: Mapping[str, str]) -> bool:
    """True if fompi connects the processes to each other, because their launcher, torchrun, starts no MPI.

    False for a child of such a process, which has the variables of both, and for a job of one process.
    """
    has_store = bool(environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"))
    is_whole = launch.launcher == "torchrun" and launch.size not in (None, 1) and has_store
    return is_whole and library_name in BRIDGED and not is_child(environ)


STARTS_NO_MPI = ("none", "torch", "torchrun", "sbatch")
"""Launchers that start processes, or nothing, but no MPI."""


def starts_mpi(environ: Mapping[str, str]) -> bool:
    """True if a launcher starts MPI in this process."""
    return detect(environ).launcher not in (*STARTS_NO_MPI, "store") and not is_orphan(environ, "")


def must_meet(launch: LaunchVariables, size: int, environ: Mapping[str, str], library_name: str) -> bool:
    """True if fompi must connect `size` processes that have a store: whatever started them did not start MPI in them.

    They may be children of one rank, such as the workers of an inference engine.
    """
    return (
        launch.launcher in STARTS_NO_MPI or (launch.size == 1 and size > 1) or is_orphan(environ, library_name)
    ) and not (launch.launcher == "torchrun" and size == launch.size and is_bridged(launch, library_name, environ))


def store_refusal(size: int, library_name: str, mpirun: str | None = None) -> str:
    """One line with cause and fix if processes that have only a store cannot start this MPI library, else ""."""
    if library_name in BRIDGED or size == 1:
        return ""
    return (
        f"{library_name} starts under its own launcher only, not from an address or a store of torch: write "
        f"`{mpirun or 'mpirun'} -n {size} python -m fompi.torch ...`, or install MPICH (`pip install mpich`), which "
        "fompi can start from them"
    )


def torchrun_refusal(environ: Mapping[str, str], library_name: str, mpirun: str | None = None) -> str | None:
    """One line with cause and fix if this process is one of several that torchrun started inside a rank, else None.

    They have the variables of that rank. With Open MPI several processes would be the same rank. A library that is
    bridged does not read these variables.
    """
    launch = detect(environ)
    if launch.launcher != "torchrun" or launch.local_size == 1 or is_bridged(launch, library_name, environ):
        return None
    if is_child(environ) or ("PMIX_NAMESPACE" not in environ and "PMI_FD" not in environ):
        return None
    return f"torchrun, inside a rank of another launcher, starts no MPI: {_fix(launch, library_name, mpirun)}"


def _why(launch: LaunchVariables, library_name: str) -> str:
    if launch.launcher == "torchrun" and library_name in BRIDGED:
        return (
            "MPI was started before fompi could connect them, or MASTER_ADDR is not set (let fompi start MPI: call "
            "fompi.Communicator() before `from mpi4py import MPI`)"
        )
    if launch.launcher in ("torchrun", "torch"):
        return f"it starts no {library_name}"
    if launch.launcher == _OWN_LAUNCHER.get(library_name):
        return f"Python loaded another {library_name}"
    return f"Python loaded {library_name}"


def _fix(launch: LaunchVariables, library_name: str, mpirun: str | None) -> str:
    own_srun = f"`srun --mpi={PLUGINS.get(library_name, '...')}`"
    if library_name not in PLUGINS:
        own_srun = f"the {own_srun} that {library_name} was built for"
    elif library_name == "Intel MPI":
        own_srun += " with I_MPI_PMI_LIBRARY set to Slurm's libpmi2.so"
    own_mpirun = f"the mpirun of {library_name}" + (f", {mpirun}" if mpirun else "")
    if launch.launcher == "srun":
        return f"use {own_srun} (`srun --mpi=list` shows what this Slurm supports)"
    if launch.launcher == "sbatch":
        return f"put {own_srun} before python"
    if launch.launcher in ("torchrun", "torch"):
        count = launch.size or "N"
        own_srun = own_srun.replace("`srun", f"`srun -n {count}")
        return f"write `{mpirun or 'mpirun'} -n {count} python -m fompi.torch ...`, or {own_srun} before python"
    return f"use {own_mpirun}"


def _is_closed(descriptor: str | None) -> bool:
    """True if this is the number of a file descriptor that is not open."""
    if not descriptor or not descriptor.isdigit():
        return False
    try:
        os.fstat(int(descriptor))
    except OSError:
        return True
    return False


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


def cores(environ: Mapping[str, str] | None = None) -> int:
    """The cores that all ranks of this host have together.

    If the launcher has bound each rank to its own cores, the launcher's own process still has all of them. Slurm's does
    not: slurmstepd has the cores of the node. So under srun its variables say how many cores the job has here.
    """
    environ = os.environ if environ is None else environ
    count, launch = len(os.sched_getaffinity(0)), detect(environ)
    if launch.launcher == "srun":
        on_node, per_task = (_number(environ.get(name)) for name in ("SLURM_CPUS_ON_NODE", "SLURM_CPUS_PER_TASK"))
        asked = (launch.local_size or 1) * per_task if per_task else on_node or count
        return min(asked, on_node or asked, os.cpu_count() or asked)
    with suppress(OSError):  # the parent has ended, or belongs to another user
        count = max(count, len(os.sched_getaffinity(os.getppid())))
    return count


def cores_per_rank() -> float:
    """`cores()` divided by the ranks on this host, at most the number of cores that this rank may use."""
    return min(len(os.sched_getaffinity(0)), cores() / (detect().local_size or 1))


def thread_note(environ: Mapping[str, str] | None = None) -> str | None:
    """What to set if BLAS may start more threads in each rank than the rank has cores, else None."""
    environ, share = os.environ if environ is None else environ, cores_per_rank()
    variable, threads = _blas_threads(environ)
    if threads <= max(1.0, share):
        return None
    why = f"{variable}={threads} is set" if variable else "no variable limits it"
    return (
        f"BLAS may start {threads} threads in each rank ({why}), but a rank has {share:.3g} "
        f"core{'s' * (share != 1)}: set {variable or 'OMP_NUM_THREADS'}={max(1, int(share))}"
    )


def _blas_threads(environ: Mapping[str, str]) -> tuple[str, int]:
    """The variable that says how many threads BLAS starts, and how many. ("", cores) if none does.

    OpenBLAS and MKL read OMP_NUM_THREADS only if their own variable is not set. A list is for nested threads.
    """
    said = {
        name: number
        for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
        if (number := _number(environ.get(name, "").partition(",")[0].strip()))
    }
    own = {name: number for name, number in said.items() if name != "OMP_NUM_THREADS"} or said
    return max(own.items(), key=lambda item: item[1]) if own else ("", len(os.sched_getaffinity(0)))


def timeout() -> float:
    """FOMPI_TIMEOUT: seconds that a wait may last without progress.

    Normal waits are shorter, for example for a rank that loads data or compiles.
    """
    return float(environment.value("FOMPI_TIMEOUT"))


def in_seconds(seconds: float) -> str:
    """A deadline in words. If it is not that of FOMPI_TIMEOUT, the program has given it."""
    return f"{seconds:g} s" + " (FOMPI_TIMEOUT)" * (seconds == timeout())


def cores_beside_other_hosts() -> float:
    """The cores per rank where several emulated hosts share one machine's cores (`fompi.lab`), else infinity."""
    return float(os.environ.get("NETLAB_CORES_PER_RANK", "inf"))


def crowded() -> bool:
    """True if this host has at least as many ranks as cores. All its ranks get the same answer.

    Then a message between them is a copy by a core that could compute instead. False if the launcher does not say how
    many ranks this host has.
    """
    return (detect().local_size or 0) >= (os.cpu_count() or 1)
