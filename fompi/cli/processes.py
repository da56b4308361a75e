"""The processes of a job: which cores and which GPU each has, and what is wrong with those of all ranks."""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from fompi.mpi import launcher

UUID_TAIL = 8
"""This many digits of a GPU's UUID are shown."""


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


def _until_null(padded: bytes) -> str:
    return padded.partition(b"\0")[0].decode(errors="replace")


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _ranges(cores: Iterable[int]) -> str:
    """Numbers as ranges: 0-3,8."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def this_process(local_rank: int) -> Process:
    count = os.cpu_count() or 1
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(count)
    device, uuid, gpus = gpu_of(local_rank, _driver())
    return Process(
        os.getpid(),
        socket.gethostname(),
        device,
        frozenset(cores),
        uuid,
        gpus,
        count,
        launcher.cores_per_rank(),
    )


def _driver() -> Any:
    """The driver of NVIDIA's GPUs. None if there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def gpu_of(local_rank: int, cuda: Any) -> tuple[str, str, int]:
    """The GPU that belongs to this local rank, its UUID, and how many the process sees. "cpu", "" and 0 without any.

    `cuda` is the driver. None: there is none.
    """
    count, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(128)
    if cuda is None or cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        return "cpu", "", 0
    ordinal = local_rank % count.value
    if cuda.cuDeviceGet(ctypes.byref(device), ordinal):
        return f"cuda:{ordinal}", "", count.value
    named = "" if cuda.cuDeviceGetName(name, len(name), device) else f" {_until_null(name.value)}"
    uuid = ctypes.create_string_buffer(16)
    # The second version tells the slices of a GPU (MIG) apart. Old drivers lack it.
    ask = getattr(cuda, "cuDeviceGetUuid_v2", None) or getattr(cuda, "cuDeviceGetUuid", None)
    known = ask is not None and not ask(uuid, device)
    return f"cuda:{ordinal}{named}", uuid.raw.hex() if known else "", count.value


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
        yield f"{count} ranks share {counted(cores, 'core')} on {host}: {slow}{more}"
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
