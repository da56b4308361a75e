"""The facts that `fompi info` prints: versions, MPI, launcher, and the processes of the job."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

import fompi
from fompi.base.errors import LaunchError, LayoutError
from fompi.cli.processes import Process, binding, cores_per_rank, crowding_notes, gpu_notes, rank_rows, this_process
from fompi.mpi import environment, launcher, paths

_PACKAGES = {
    "numpy": ("numpy",),
    "mpi4py": ("mpi4py",),
    "numba": ("numba",),
    "cupy": ("cupy", "cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x"),
    "torch": ("torch",),
    "jax": ("jax",),
}
"""The distributions that may install a package, by the package's name."""


def collect() -> dict[str, Any]:
    """The facts, as values that JSON can hold. Collective with MPI. Only "rank" and "launcher" differ between ranks.

    No package is imported to find its version. The driver of a GPU is asked without making a context. Missing MPI is
    no error: "mpi" is None and "mpi_error" says why.
    """
    launched = launcher.detect()
    rank, processes = 0, [this_process(launched.local_rank or 0)]
    mpi, mpi_error, warning, progress, engine = None, None, None, None, None
    try:
        from fompi.mpi import transport

        rank, size = transport.world()
        mpi = _mpi_facts()
        warning = launcher.warning(launched, size, mpi["library"], mpi["mpirun"])
        processes = [Process.unpack(record) for record in transport.gather_records(processes[0].pack())]
        progress, engine = _progress_facts(), _engine_in_words()
    except LaunchError as error:
        mpi_error = str(error)
    versions = {name: _version(distributions) for name, distributions in _PACKAGES.items()}
    kill = launcher.kill_note(launched, mpi["library"]) if mpi is not None and len(processes) > 1 else None
    notes = [launcher.batch_note(), kill, *crowding_notes(processes), *gpu_notes(processes)]
    return {
        "versions": {"fompi": fompi.__version__, "python": platform.python_version(), **versions},
        "mpi": mpi,
        "mpi_error": mpi_error,
        "launcher": {**asdict(launched), "plugin": launcher.plugin()},
        "rank": rank,
        "ranks": rank_rows(processes),
        "cores_per_rank": cores_per_rank(processes),
        "binding": binding(processes),
        "gpus_per_rank": sorted({process.gpus for process in processes}),
        "notes": [note for note in notes if note is not None],
        "threads": launcher.thread_note(),
        "progress": progress,
        "engine": engine,
        "paths": _paths(processes, mpi),
        "counters": _counters(processes),
        "warning": warning,
        "environment": "; ".join(environment.sentences()) or None,
    }


def _paths(processes: Sequence[Process], mpi: dict[str, Any] | None) -> str | None:
    """How messages between devices move. None if no rank has a device, and no variable asks for one."""
    asked = environment.value("FOMPI_DEVICE") != "auto" or environment.value("FOMPI_PATH") != "auto"
    if mpi is None or not (asked or any(process.device != "cpu" for process in processes)):
        return None
    wanted, aware = environment.value("FOMPI_PATH"), bool(mpi["gpu_aware"])
    within, between = (paths.choose(wanted, same_host, aware) for same_host in (True, False))
    return f"between devices of a host by {within}, of two hosts by {between} (FOMPI_PATH={wanted})"


def _counters(processes: Sequence[Process]) -> str | None:
    """Whether one kernel computes and announces several products. None if nobody asks for it, and no rank has a GPU."""
    choice = environment.value("FOMPI_COUNTERS")
    if not (environment.is_set("FOMPI_COUNTERS") or any(process.device != "cpu" for process in processes)):
        return None
    version = _version(("triton", "pytorch-triton"))
    triton = f"Triton {version}" if version else "Triton is not installed"
    when = {"0": "never", "1": "wherever it can", "auto": "where it was measured to be faster"}[choice]
    return f"one kernel announces several products of a bound plan {when} (FOMPI_COUNTERS={choice}, {triton})"


def _mpi_facts() -> dict[str, Any]:
    from fompi.mpi import transport, ucx

    library = transport.library()
    requested, provided = transport.thread_levels()
    try:
        environment.check("FOMPI_GPU_AWARE")
        gpu = transport.gpu_awareness(environment.value("FOMPI_GPU_AWARE"))
        gpu_aware, gpu_source = gpu.aware, gpu.source
    except LaunchError as error:  # the value is none of auto, 0, 1
        gpu_aware, gpu_source = None, str(error)
    return {
        "library": library.name,
        "version": library.version,
        "standard": library.standard,
        "description": library.description,
        "path": library.path,
        "other_libraries": transport.other_libraries(),
        "networks": [] if library.standard else ucx.networks(),
        "mpirun": library.mpirun,
        "thread_requested": requested,
        "thread_provided": provided,
        "gpu_aware": gpu_aware,
        "gpu_aware_source": gpu_source,
        "tag_upper_bound": transport.tag_upper_bound(),
    }


def _progress_facts() -> dict[str, Any]:
    """What moves messages while a rank computes, and how much the MPI library moves without help. Collective."""
    from fompi.engine import communicator, progress
    from fompi.mpi import link

    source = f"FOMPI_PROGRESS={environment.value('FOMPI_PROGRESS')}"
    mode: str | None
    try:
        environment.check("FOMPI_PROGRESS")
        mode = communicator.progress_mode(communicator.machine_of_environment())
    except (LaunchError, LayoutError) as error:
        mode, source = None, str(error)
    pause = progress.pause_between_polls(mode, launcher.cores_per_rank()) if mode in progress.HELPED else None
    unaided = progress.measure_unaided(link.Link(link.mpi_communicator(None)))
    return {
        "mode": mode,
        "source": source,
        "seconds_between_polls": pause,
        "worker": pause is not None and progress.has_spare(launcher.cores_per_rank()),
        "unaided": unaided._asdict(),
    }


def _engine_in_words() -> str:
    """What carries out calls."""
    from fompi.engine import native

    return str(native.engine())


def _version(distributions: Sequence[str]) -> str | None:
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None
