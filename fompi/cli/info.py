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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from math import inf
from typing import Any, NamedTuple

import fompi
from fompi.base.errors import LaunchError, LayoutError
from fompi.cli.output import Table, UsageError, show, show_json
from fompi.mpi import environment, launcher, paths

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
    "note": "notes",
    "threads": "threads",
    "environment": "environment",
    "warning": "warning",
    "MPI": "mpi_error",
}
"""What is printed below the table: its heading, and its name among the facts, which is a text or a list of texts."""

UUID_TAIL = 8
"""This many digits of a GPU's UUID are shown."""

MOST_HOSTS = 4
"""With more hosts than this, they are counted instead of named."""

_YES_NO = {True: "yes", False: "no", None: "unknown"}


@dataclass(frozen=True)
class Process:
    """What each rank sends to the others. `cores` are the logical cores that it may run on, of `host_cores`.

    `share` is how many cores it has by the variables of the launcher. `uuid` is that of its GPU, as 32 digits, and
    `gpus` how many GPUs it sees.
    """

    pid: int
    host: str
    device: str
    cores: frozenset[int]
    uuid: str = ""
    gpus: int = 0
    host_cores: int = 0
    share: float = inf

    # The same length on all ranks; the cores are a mask of 4,096 bits.
    _record = struct.Struct("<I256s256s512s32sIId")

    def pack(self) -> bytes:
        mask = sum(1 << core for core in self.cores if core < 4096).to_bytes(512, "little")
        texts = self.host.encode(), self.device.encode(), mask, self.uuid.encode()
        return self._record.pack(self.pid, *texts, self.gpus, self.host_cores, self.share)

    @classmethod
    def unpack(cls, record: bytes) -> Process:
        pid, host, device, mask, uuid, *numbers = cls._record.unpack(record)
        bits = int.from_bytes(mask, "little")
        cores = frozenset(core for core in range(bits.bit_length()) if bits >> core & 1)
        return cls(pid, _until_null(host), _until_null(device), cores, _until_null(uuid), *numbers)


class Gpu(NamedTuple):
    """The GPU of a local rank, and how many the process sees. "cpu" and 0 without any."""

    device: str = "cpu"
    uuid: str = ""
    gpus: int = 0


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


def blocks(facts: dict[str, Any]) -> list[Table | str]:
    """What `info` prints: versions, MPI, one row per rank, and what to correct."""
    launcher = facts["launcher"]
    processes = "" if launcher["size"] is None else f" ({launcher['size']} processes)"
    lines = [(name, version or "not installed") for name, version in facts["versions"].items()]
    lines += [("", ""), *_mpi_lines(facts["mpi"])]
    plugin = f", --mpi={launcher['plugin']}" if launcher.get("plugin") else ""
    lines += [("launcher", launcher["launcher"] + processes + plugin)]
    lines += [("ranks", _ranks_of_hosts([row["host"] for row in facts["ranks"]]))]
    lines += [("cores", f"{facts['cores_per_rank']:.4g} per rank, {_of_hosts(facts['binding'])}")]
    if facts.get("paths"):
        lines += [("messages", facts["paths"])]
    if facts.get("counters"):
        lines += [("products", facts["counters"])]
    if any(facts["gpus_per_rank"]):
        lines += [("GPUs", f"each rank sees {' or '.join(map(str, facts['gpus_per_rank']))}")]
    lines += _progress_lines(facts["progress"])
    return [_keys_and_values(lines), _rank_table(facts["ranks"]), *remarks(facts)]


def remarks(facts: dict[str, Any]) -> list[str]:
    """What to correct, one sentence each, with its heading: "threads: BLAS may start ..."."""
    lines = []
    for heading, name in _REMARKS.items():
        found = facts.get(name) or []
        lines += [f"{heading}: {each}" for each in ([found] if isinstance(found, str) else found)]
    return lines


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
    if facts["mpi"] is None:
        command, what = "plan all_gather_matmul 512x64 64x256 --ranks 4 --schedule ring", "a plan needs no MPI"
    else:
        count = 4 if facts["cores_per_rank"] * len(ranks) >= 4 else 2
        command, what = f"try 1024,1024,1024 --ranks {count}", "what overlap gains here for a shape of your own"
    return [_keys_and_values(lines), *remarks(facts), f"next: {program} {command}    # {what}"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--expect", type=int, metavar="N", help="exit with status 1 unless this is one job of N ranks")
    parser.add_argument("--doctor", action="store_true", help="measure the job, and list what is wrong, with remedies")
    parser.add_argument("--seconds", type=float, metavar="S", help="the time for the measurements of --doctor (60)")


def run(options: argparse.Namespace) -> int:
    """Print the facts once. Who prints them exits with 1 if the launcher does not fit, or --expect another number.

    The others exit with 0, so that a launcher does not end the one that prints.
    """
    if options.seconds is not None and not (options.doctor and options.seconds > 0):
        raise UsageError(f"info: --seconds {options.seconds:g}: give a number above 0, with --doctor")
    if options.doctor:
        if options.expect is not None:
            raise UsageError("info: give --expect or --doctor")
        from fompi.cli import doctor

        return doctor.run(doctor.SECONDS if options.seconds is None else options.seconds, options.json)
    facts = collect()
    if not prints(facts):
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
    if prints(facts):
        show(*brief_blocks(facts, program))
    return 0


def prints(facts: dict[str, Any]) -> bool:
    """True on rank 0. If the launcher started N jobs of one rank each: true for the process that it calls rank 0."""
    is_single = len(facts["ranks"]) == 1
    return facts["rank"] == 0 and not (is_single and facts["launcher"]["rank"])


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def rank_rows(processes: Sequence[Process]) -> list[dict[str, Any]]:
    """One row per rank. The local rank numbers the ranks of one host. `gpu` is the end of the UUID, if any has one."""
    local_ranks = {process.host: itertools.count() for process in processes}
    has_gpus = any(process.uuid for process in processes)
    return [
        {
            "rank": rank,
            "host": process.host,
            "local_rank": next(local_ranks[process.host]),
            "pid": process.pid,
            "cores": _ranges(process.cores),
            "device": process.device,
            **({"gpu": process.uuid[-UUID_TAIL:]} if has_gpus else {}),
        }
        for rank, process in enumerate(processes)
    ]


def by_host(processes: Sequence[Process]) -> dict[str, dict[int, Process]]:
    """The ranks of each host, with their processes."""
    hosts: dict[str, dict[int, Process]] = {}
    for rank, process in enumerate(processes):
        hosts.setdefault(process.host, {})[rank] = process
    return hosts


def _union(ranks: Mapping[int, Process]) -> frozenset[int]:
    return frozenset().union(*(process.cores for process in ranks.values()))


def cores_per_rank(processes: Sequence[Process]) -> float:
    """The cores per rank of the most crowded host.

    Without binding the ranks may run on more cores than the job has. Then the variables of the launcher count. They
    also count where each process is a job of one rank, so that it does not know the others of its host.
    """
    shared = (len(_union(ranks)) / len(ranks) for ranks in by_host(processes).values())
    return min(*shared, *(process.share for process in processes), launcher.cores_beside_other_hosts())


def binding(processes: Sequence[Process]) -> dict[str, str]:
    """For each host: "own cores", "unbound" (any core of the job), or "shared cores" (bound, but to the same cores)."""
    return {host: _binding(ranks) for host, ranks in by_host(processes).items()}


def _binding(ranks: Mapping[int, Process]) -> str:
    masks = [process.cores for process in ranks.values()]
    union, host_cores = _union(ranks), next(iter(ranks.values())).host_cores
    if len(set(masks)) == 1 and len(union) >= (host_cores or len(masks)):
        return "unbound"
    if sum(map(len, masks)) == len(union):
        return "own cores"
    return "unbound" if len(set(masks)) == 1 and len(union) >= len(masks) else "shared cores"


def crowding_notes(processes: Sequence[Process]) -> Iterator[str]:
    """A note on the host with the fewest cores per rank, if it is fewer than one. Notes on ranks on the same cores."""
    hosts = by_host(processes)
    counts = {host: (len(_union(ranks)), len(ranks)) for host, ranks in hosts.items()}
    host, (cores, count) = min(counts.items(), key=lambda item: item[1][0] / item[1][1])
    slow = "a rank that waits takes time from one that computes"
    least = min(processes, key=lambda process: process.share)
    if cores < count:
        spare = next(iter(hosts[host].values())).host_cores - cores
        more = (
            f". {host} has {spare} more: ask for more cores per rank, or bind no ranks"
            if spare > 0
            else ". Start fewer ranks"
        )
        yield f"{count} ranks share {_counted(cores, 'core')} on {host}: {slow}{more}"
    elif least.share < 1:
        yield f"a rank has {least.share:.2g} cores on {least.host}, as the launcher says: {slow}"
    for host, ranks in hosts.items():
        if _binding(ranks) == "shared cores" and counts[host][0] >= counts[host][1]:
            first, second = next((a, b) for a, b in itertools.combinations(ranks, 2) if ranks[a].cores & ranks[b].cores)
            yield (
                f"ranks {first} and {second} are bound to the same cores on {host}: give each rank its own "
                "(`srun --cpu-bind=cores`, `mpirun --bind-to core`)"
            )


def gpu_notes(processes: Sequence[Process]) -> Iterator[str]:
    """Notes on GPUs that several ranks share, and on GPUs that ranks hide from each other."""
    for host, ranks in by_host(processes).items():
        of_gpu: dict[str, list[Process]] = {}
        for process in ranks.values():
            if process.uuid:
                of_gpu.setdefault(process.uuid, []).append(process)
        for uuid, sharing in of_gpu.items():
            if len(sharing) > 1:
                device = sharing[0].device.split()[0]
                yield f"{len(sharing)} ranks share {device} ({uuid[-UUID_TAIL:]}) on {host}: start one rank per GPU"
        if len(of_gpu) > 1 and all(process.gpus == 1 for process in ranks.values() if process.uuid):
            yield (
                f"each rank on {host} sees only its own GPU: --gpus-per-task hides the GPUs of the neighbours, "
                "and CUDA IPC between them fails. Use --gpus-per-node"
            )


def _ranks_of_hosts(hosts: Sequence[str]) -> str:
    """How many ranks each host has: "4 on n1, 3 on n2", "8 on each of 100 hosts"."""
    counts = Counter(hosts)
    if len(counts) > MOST_HOSTS:
        of_count = Counter(counts.values())
        return ", ".join(f"{count} on each of {_counted(many, 'host')}" for count, many in of_count.items())
    return ", ".join(f"{count} on {host}" for host, count in counts.items())


def _of_hosts(words: Mapping[str, str]) -> str:
    """One word if it is the same on all hosts, else the hosts of each word."""
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    hosts_of: dict[str, list[str]] = {}
    for host, word in words.items():
        hosts_of.setdefault(word, []).append(host)
    return "; ".join(f"{word} on {_several(hosts)}" for word, hosts in hosts_of.items())


def _several(hosts: Sequence[str]) -> str:
    return ", ".join(hosts) if len(hosts) <= MOST_HOSTS else f"{', '.join(hosts[:MOST_HOSTS])}, ..."


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
    count = os.cpu_count() or 1
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(count)
    gpu = gpu_of(local_rank, _driver())
    return Process(
        os.getpid(),
        socket.gethostname(),
        gpu.device,
        frozenset(cores),
        gpu.uuid,
        gpu.gpus,
        count,
        launcher.cores_per_rank(),
    )


def _driver() -> Any:
    """The driver of NVIDIA's GPUs. None if there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def gpu_of(local_rank: int, cuda: Any) -> Gpu:
    """The GPU that belongs to this local rank, by the driver `cuda` (None: there is no driver)."""
    count, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(128)
    if cuda is None or cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        return Gpu()
    ordinal = local_rank % count.value
    if cuda.cuDeviceGet(ctypes.byref(device), ordinal):
        return Gpu(f"cuda:{ordinal}", "", count.value)
    named = "" if cuda.cuDeviceGetName(name, len(name), device) else f" {_until_null(name.value)}"
    uuid = ctypes.create_string_buffer(16)
    # The second version tells the slices of a GPU (MIG) apart. Old drivers lack it.
    ask = getattr(cuda, "cuDeviceGetUuid_v2", None) or getattr(cuda, "cuDeviceGetUuid", None)
    known = ask is not None and not ask(uuid, device)
    return Gpu(f"cuda:{ordinal}{named}", uuid.raw.hex() if known else "", count.value)


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
