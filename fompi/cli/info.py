"""`python -m fompi info`: where a program of fompi would run, on one screen, fit for a bug report."""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import platform
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import fompi
from fompi.base.errors import LaunchError, LayoutError
from fompi.mpi import launcher

# The distributions that may bring a package, by the package's name.
_PACKAGES = {
    "numpy": ("numpy",),
    "mpi4py": ("mpi4py",),
    "numba": ("numba",),
    "cupy": ("cupy", "cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x"),
    "torch": ("torch",),
    "jax": ("jax",),
}

_REMARKS = {"note": "note", "threads": "threads", "warning": "warning", "MPI": "mpi_error"}
_YES_NO = {True: "yes", False: "no", None: "unknown"}


@dataclass(frozen=True)
class Process:
    """What a rank tells the others of itself. `cores` are the logical cores that it may run on."""

    pid: int
    host: str
    device: str
    cores: frozenset[int]

    _record = struct.Struct("<I256s256s512s")  # one length for all ranks; the cores are a mask of 4,096 bits

    def pack(self) -> bytes:
        mask = sum(1 << core for core in self.cores if core < 4096).to_bytes(512, "little")
        return self._record.pack(self.pid, self.host.encode(), self.device.encode(), mask)

    @classmethod
    def unpack(cls, record: bytes) -> Process:
        pid, host, device, mask = cls._record.unpack(record)
        bits = int.from_bytes(mask, "little")
        cores = frozenset(core for core in range(bits.bit_length()) if bits >> core & 1)
        return cls(pid, _until_null(host), _until_null(device), cores)


def collect() -> dict[str, Any]:
    """The facts, as values that JSON can hold. Collective where there is MPI; "rank" and "launcher" differ.

    No package is imported to learn its version, a GPU's driver is asked without making a context, and the
    lack of MPI is a fact like any other.
    """
    launched = launcher.detect()
    rank, processes = 0, [_this_process(launched.local_rank or 0)]
    mpi, mpi_error, warning, progress = None, None, None, None
    try:
        from fompi.mpi import transport

        rank, size = transport.world()
        mpi = _mpi_facts()
        warning = launcher.warning(launched, size, mpi["library"], mpi["mpirun"])
        processes = [Process.unpack(record) for record in transport.gather_records(processes[0].pack())]
        progress = _progress_facts()
    except LaunchError as error:
        mpi_error = str(error)
    versions = {name: _version(distributions) for name, distributions in _PACKAGES.items()}
    return {
        "versions": {"fompi": fompi.__version__, "python": platform.python_version(), **versions},
        "mpi": mpi,
        "mpi_error": mpi_error,
        "launcher": asdict(launched),
        "rank": rank,
        "ranks": table(processes),
        **crowding(processes),
        "threads": launcher.thread_note(),
        "progress": progress,
        "warning": warning,
    }


def text(facts: dict[str, Any]) -> str:
    """The facts for people: versions, MPI, one row per rank, and what to mend."""
    launcher = facts["launcher"]
    meant = "" if launcher["size"] is None else f" ({launcher['size']} processes)"
    lines = [(name, version or "not installed") for name, version in facts["versions"].items()]
    lines += [("", ""), *_mpi_lines(facts["mpi"])]
    lines += [("launcher", launcher["launcher"] + meant)]
    lines += [("cores", f"{facts['cores_per_rank']:.4g} per rank"), *_progress_lines(facts["progress"])]
    blocks = ["\n".join(f"{name:<10} {value}".rstrip() for name, value in lines), _aligned(facts["ranks"])]
    blocks += [f"{kind}: {facts[key]}" for kind, key in _REMARKS.items() if facts.get(key)]
    return "\n\n".join(blocks)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the facts once: on rank 0, or of N jobs of one rank on the process that the launcher calls 0."""
    parser = argparse.ArgumentParser("python -m fompi info", description="where a program of fompi would run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    arguments = parser.parse_args(argv)
    facts = collect()
    alone = len(facts["ranks"]) == 1
    if facts["rank"] == 0 and not (alone and facts["launcher"]["rank"]):
        print(json.dumps(facts, indent=2) if arguments.json else text(facts), flush=True)
    return 0


def table(processes: Sequence[Process]) -> list[dict[str, Any]]:
    """One row per rank. The local rank is the rank's place among those of its host."""
    place = {process.host: itertools.count() for process in processes}
    return [
        {
            "rank": rank,
            "host": process.host,
            "local_rank": next(place[process.host]),
            "pid": process.pid,
            "cores": _ranges(process.cores),
            "device": process.device,
        }
        for rank, process in enumerate(processes)
    ]


def crowding(processes: Sequence[Process]) -> dict[str, Any]:
    """The cores per rank of the most crowded host, and a note where they are fewer than one."""
    hosts: dict[str, list[frozenset[int]]] = {}
    for process in processes:
        hosts.setdefault(process.host, []).append(process.cores)
    counts = {host: (len(frozenset().union(*masks)), len(masks)) for host, masks in hosts.items()}
    host, (cores, ranks) = min(counts.items(), key=lambda item: item[1][0] / item[1][1])
    share = f"{ranks} ranks share {cores} {'core' if cores == 1 else 'cores'} on {host}"
    note = f"{share}: a rank that waits takes time from one that computes"
    return {
        "cores_per_rank": min(cores / ranks, launcher.cores_beside_other_hosts()),
        "note": note if cores < ranks else None,
    }


def _mpi_facts() -> dict[str, Any]:
    from fompi.mpi import transport

    library = transport.library()
    requested, provided = transport.thread_levels()
    try:
        gpu = transport.gpu_awareness(os.environ.get("FOMPI_GPU_AWARE", "auto"))
        gpu_aware, gpu_source = gpu.aware, gpu.source
    except LaunchError as error:  # a value that is none of auto, 0, 1
        gpu_aware, gpu_source = None, str(error)
    return {
        "library": library.name,
        "version": library.version,
        "standard": library.standard,
        "description": library.description,
        "path": library.path,
        "mpirun": library.mpirun,
        "thread_requested": requested,
        "thread_provided": provided,
        "gpu_aware": gpu_aware,
        "gpu_aware_source": gpu_source,
        "tag_upper_bound": transport.tag_upper_bound(),
    }


def _progress_facts() -> dict[str, Any]:
    """Who moves messages while a rank computes, and what the library moves by itself. Collective."""
    from fompi.engine import communicator, progress
    from fompi.mpi import link

    source = f"FOMPI_PROGRESS={os.environ.get('FOMPI_PROGRESS', 'auto')}"
    mode: str | None
    try:
        mode = communicator.progress_mode(communicator.machine_of_environment())
    except (LaunchError, LayoutError) as error:
        mode, source = None, str(error)
    pause = progress.pause_between_polls(mode, launcher.cores_per_rank()) if mode in progress.HELPED else None
    native = progress.measure_native(link.Link(link.mpi_communicator(None)))
    return {
        "mode": mode,
        "source": source,
        "seconds_between_polls": pause,
        "worker": pause is not None and progress.has_spare(launcher.cores_per_rank()),
        "native": native._asdict(),
    }


def _progress_lines(progress: dict[str, Any] | None) -> list[tuple[str, str]]:
    if progress is None:
        return []
    from fompi.engine.progress import Pause

    polls, native = progress["seconds_between_polls"], progress["native"]
    often = "" if polls is None else f", a poll every {Pause(*polls)}"
    often += ", another thread for products" if progress["worker"] else ""
    if native["share"] is None:
        moved = f"not measured: {native['skipped']}"
    else:
        moved = f"{native['share']:.0%} of {native['nbytes'] >> 10} KiB ({1e3 * native['seconds']:.3g} ms)"
        moved += " move while all ranks stay out of MPI"
    return [("progress", f"{progress['mode'] or 'none'} ({progress['source']}){often}"), ("native", moved)]


def _mpi_lines(mpi: dict[str, Any] | None) -> list[tuple[str, str]]:
    if mpi is None:
        return [("MPI", "none")]
    return [
        ("MPI", f"{mpi['library']} {mpi['version']} (standard {mpi['standard']})"),
        ("library", mpi["path"] or "of unknown path"),
        ("threads", f"{mpi['thread_provided']} ({mpi['thread_requested']} asked for)"),
        ("GPU-aware", f"{_YES_NO[mpi['gpu_aware']]} ({mpi['gpu_aware_source']})"),
        ("tags", f"up to {mpi['tag_upper_bound']}"),
    ]


def _version(distributions: Sequence[str]) -> str | None:
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _this_process(local_rank: int) -> Process:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return Process(os.getpid(), socket.gethostname(), _device(local_rank), frozenset(cores))


def _device(local_rank: int) -> str:
    """The GPU this rank would take, as they are dealt out by local rank; "cpu" where there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "cpu"
    count, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(128)
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        return "cpu"
    ordinal = local_rank % count.value
    if cuda.cuDeviceGet(ctypes.byref(device), ordinal) or cuda.cuDeviceGetName(name, len(name), device):
        return f"cuda:{ordinal}"
    return f"cuda:{ordinal} {_until_null(name.value)}"


def _until_null(padded: bytes) -> str:
    return padded.partition(b"\0")[0].decode(errors="replace")


def _ranges(cores: Iterable[int]) -> str:
    """Sorted numbers as runs: 0-3,8."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def _aligned(rows: Sequence[dict[str, Any]]) -> str:
    """Rows under their keys, columns as wide as they need, numbers to the right."""
    columns = []
    for name, first in rows[0].items():
        cells = [name.replace("_", " "), *(str(row[name]) for row in rows)]
        width = max(map(len, cells))
        columns.append([cell.rjust(width) if isinstance(first, int) else cell.ljust(width) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))
