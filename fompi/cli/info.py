"""`fompi info`: where a program of fompi would run, on one screen, fit for a bug report.

`brief` is the same in ten lines. It is what `fompi` prints without a subcommand.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import platform
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import fompi
from fompi.base.errors import LaunchError, LayoutError
from fompi.cli.output import Table, show, show_json
from fompi.mpi import environment, launcher

EXAMPLE = "mpirun -n 4 {} info"

_PACKAGES = {
    "numpy": ("numpy",),
    "mpi4py": ("mpi4py",),
    "numba": ("numba",),
    "cupy": ("cupy", "cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x"),
    "torch": ("torch",),
    "jax": ("jax",),
}
"""The distributions that may install a package, by the package's name."""

_REMARKS = {
    "note": "note",
    "threads": "threads",
    "environment": "environment",
    "warning": "warning",
    "MPI": "mpi_error",
}
"""What is printed below the table: its heading, and its name among the facts."""

_YES_NO = {True: "yes", False: "no", None: "unknown"}


@dataclass(frozen=True)
class Process:
    """What each rank sends to the others. `cores` are the logical cores that it may run on."""

    pid: int
    host: str
    device: str
    cores: frozenset[int]

    _record = struct.Struct("<I256s256s512s")  # the same length on all ranks; the cores are a mask of 4,096 bits

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
    """The facts, as values that JSON can hold. Collective with MPI. Only "rank" and "launcher" differ between ranks.

    No package is imported to find its version. The driver of a GPU is asked without making a context. Missing MPI is
    no error: "mpi" is None and "mpi_error" says why.
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
        "ranks": rank_rows(processes),
        **crowding(processes),
        "threads": launcher.thread_note(),
        "progress": progress,
        "warning": warning,
        "environment": "; ".join(environment.sentences()) or None,
    }


def blocks(facts: dict[str, Any]) -> list[Table | str]:
    """What `info` prints: versions, MPI, one row per rank, and what to correct."""
    launcher = facts["launcher"]
    processes = "" if launcher["size"] is None else f" ({launcher['size']} processes)"
    lines = [(name, version or "not installed") for name, version in facts["versions"].items()]
    lines += [("", ""), *_mpi_lines(facts["mpi"])]
    lines += [("launcher", launcher["launcher"] + processes)]
    lines += [("cores", f"{facts['cores_per_rank']:.4g} per rank"), *_progress_lines(facts["progress"])]
    remarks = [f"{heading}: {facts[name]}" for heading, name in _REMARKS.items() if facts.get(name)]
    return [_keys_and_values(lines), _rank_table(facts["ranks"]), *remarks]


def text(facts: dict[str, Any]) -> str:
    """The blocks as plain text."""
    return "\n\n".join(map(str, blocks(facts)))


def brief_blocks(facts: dict[str, Any], program: str) -> list[str]:
    """What `fompi` prints without a subcommand: ten lines, what to correct, and the next command to try."""
    versions, ranks, launcher = facts["versions"], facts["ranks"], facts["launcher"]
    mpi = dict(_mpi_lines(facts["mpi"]))
    packages = {name: version for name, version in versions.items() if name not in ("fompi", "python")}
    hosts = len({row["host"] for row in ranks})
    devices = ", ".join(dict.fromkeys(row["device"] for row in ranks))
    progress = dict(_progress_lines(facts["progress"])).get("progress", "none")
    lines = [
        ("fompi", f"{versions['fompi']}, Python {versions['python']}"),
        ("packages", ", ".join(f"{name} {version}" for name, version in packages.items() if version)),
        ("missing", ", ".join(name for name, version in packages.items() if not version) or "nothing"),
        ("MPI", mpi["MPI"]),
        ("library", mpi.get("library", "none")),
        ("launcher", launcher["launcher"]),
        ("ranks", f"{_counted(len(ranks), 'rank')} on {_counted(hosts, 'host')}"),
        ("cores", f"{facts['cores_per_rank']:.4g} per rank"),
        ("device", devices),
        ("progress", progress),
    ]
    remarks = [f"{heading}: {facts[name]}" for heading, name in _REMARKS.items() if facts.get(name)]
    if facts["mpi"] is None:
        command, what = "plan all_gather_matmul 512x64 64x256 --ranks 4 --schedule ring", "a plan needs no MPI"
    else:
        count = 4 if facts["cores_per_rank"] * len(ranks) >= 4 else 2
        command, what = f"try 1024,1024,1024 --ranks {count}", "what overlap gains here for a shape of your own"
    return [_keys_and_values(lines), *remarks, f"next: {program} {command}    # {what}"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--expect", type=int, metavar="N", help="exit with status 1 unless this is one job of N ranks")


def run(options: argparse.Namespace) -> int:
    """Print the facts once. Who prints them exits with 1 if the launcher does not fit, or --expect another number.

    The others exit with 0, so that a launcher does not end the one that prints.
    """
    facts = collect()
    if not _prints(facts):
        return 0
    if options.json:
        show_json(facts)
    else:
        show(*blocks(facts))
    size = len(facts["ranks"])
    if options.expect not in (None, size):
        print(f"fompi: expected one job of {options.expect} ranks, this one has {size}", file=sys.stderr)
        return 1
    unfit = facts["warning"] or (facts["mpi_error"] and facts["launcher"]["launcher"] != "none")
    return 1 if unfit else 0


def brief(program: str) -> int:
    """Print the facts in short, once. `program` is how the command line was called."""
    facts = collect()
    if _prints(facts):
        show(*brief_blocks(facts, program))
    return 0


def _prints(facts: dict[str, Any]) -> bool:
    """True on rank 0. If the launcher started N jobs of one rank each: true for the process that it calls rank 0."""
    is_single = len(facts["ranks"]) == 1
    return facts["rank"] == 0 and not (is_single and facts["launcher"]["rank"])


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def rank_rows(processes: Sequence[Process]) -> list[dict[str, Any]]:
    """One row per rank. The local rank numbers the ranks of one host."""
    local_ranks = {process.host: itertools.count() for process in processes}
    return [
        {
            "rank": rank,
            "host": process.host,
            "local_rank": next(local_ranks[process.host]),
            "pid": process.pid,
            "cores": _ranges(process.cores),
            "device": process.device,
        }
        for rank, process in enumerate(processes)
    ]


def crowding(processes: Sequence[Process]) -> dict[str, Any]:
    """The cores per rank of the most crowded host. With fewer than one core per rank there is a note."""
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

    pause, native = progress["seconds_between_polls"], progress["native"]
    helper = "" if pause is None else f", a poll every {Pause(*pause)}"
    helper += ", another thread for products" if progress["worker"] else ""
    if native["share"] is None:
        share = f"not measured: {native['skipped']}"
    else:
        share = f"{native['share']:.0%} of {native['nbytes'] >> 10} KiB ({1e3 * native['seconds']:.3g} ms)"
        share += " move while all ranks stay out of MPI"
    return [("progress", f"{progress['mode'] or 'none'} ({progress['source']}){helper}"), ("native", share)]


def _mpi_lines(mpi: dict[str, Any] | None) -> list[tuple[str, str]]:
    if mpi is None:
        return [("MPI", "none")]
    return [
        ("MPI", f"{mpi['library']} {mpi['version']} (standard {mpi['standard']})"),
        ("library", mpi["path"] or "at an unknown path"),
        ("threads", f"{mpi['thread_provided']} ({mpi['thread_requested']} requested)"),
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
    """The GPU that belongs to this local rank. "cpu" if there is none."""
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
    """Numbers as ranges: 0-3,8."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def _keys_and_values(lines: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"{key:<10} {value}".rstrip() for key, value in lines)


def _rank_table(rows: Sequence[dict[str, Any]]) -> Table:
    names = {key: key.replace("_", " ") for key in rows[0]}
    cells = [[str(value) for value in row.values()] for row in rows]
    return Table([*names.values()], cells, right=[name for key, name in names.items() if isinstance(rows[0][key], int)])
