"""MPI as fompi sees it. The only file that imports mpi4py.

The facts of the library in memory: its name and place, thread level, tags, whether it takes GPU memory.
"""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from types import ModuleType
from typing import Any

from fompi.base.errors import LaunchError
from fompi.base.layout import MOST_NBYTES
from fompi.mpi import launcher

_INSTALL = (
    'on a laptop `pip install "fompi[mpich]"`; on a cluster load the site\'s MPI module, '
    "or name its library in MPI4PY_LIBMPI, and `pip install mpi4py`"
)


AT_ONCE_NBYTES = 4 << 20
"""Of a message; those of just 4 MiB, the commonest of that size, are among those that leave at once."""

OPENMPI_TCP = {
    "OMPI_MCA_btl_tcp_flags": "send,inplace,need-ack,need-csum,hetero-rdma",
    "OMPI_MCA_btl_tcp_eager_limit": str(AT_ONCE_NBYTES + 4096),  # with its header
}
"""What Open MPI is asked for when we start it, where the environment does not say otherwise.

By itself it sends what is large over TCP in one piece (`put`), once the other end has answered, and the answer waits
behind what that end sends: two ranks take turns (docs/mpi.md). Without `put` they still do, for the first 4 MB: so
what is larger leaves in several messages, see `most_at_once`.
"""


@dataclass(frozen=True)
class Library:
    """The MPI library in memory; its file and the launcher installed with it, where we can tell."""

    name: str
    version: str
    standard: str
    description: str
    path: str | None
    mpirun: str | None


@dataclass(frozen=True)
class GpuAwareness:
    """Whether MPI may be handed GPU memory, and who says so."""

    aware: bool
    source: str


def start_mpi() -> ModuleType:
    """The module `mpi4py.MPI`, with MPI started: by us, unless somebody did before.

    A `LaunchError` says why there is no MPI and how to get it, or which launcher this one needs.
    """
    MPI = _load_mpi()
    if not MPI.Is_initialized():
        _refuse_foreign_launcher(MPI)
        asked = {name: value for name, value in OPENMPI_TCP.items() if name not in os.environ}
        os.environ.update(asked)
        try:
            MPI.Init_thread(getattr(MPI, f"THREAD_{_requested_thread_level().upper()}"))
        finally:
            for name in asked:
                del os.environ[name]
    return MPI


def library() -> Library:
    """Which MPI this is. Does not start it."""
    return _library(_load_mpi())


def most_at_once() -> int:
    """Bytes that a message to another host should have at most, so that two that send to each other take no turns."""
    return AT_ONCE_NBYTES if library().name == "Open MPI" else MOST_NBYTES


def world() -> tuple[int, int]:
    """(rank, size) of this process among all that MPI started."""
    comm = start_mpi().COMM_WORLD
    return comm.Get_rank(), comm.Get_size()


def all_come(seconds: float) -> bool:
    """Whether all ranks that MPI started come here within so many seconds."""
    request, end = start_mpi().COMM_WORLD.Ibarrier(), perf_counter() + seconds
    while not request.Test():
        if perf_counter() > end:
            _GIVEN_UP.append((request, None))
            return False
        sleep(1e-3)
    return True


def thread_levels() -> tuple[str, str]:
    """The thread level asked for and the one MPI gave: single, funneled, serialized or multiple."""
    MPI = start_mpi()
    names = ("single", "funneled", "serialized", "multiple")
    provided = {getattr(MPI, f"THREAD_{name.upper()}"): name for name in names}[MPI.Query_thread()]
    return _requested_thread_level(), provided


def tag_upper_bound() -> int:
    """The largest tag that a message may carry."""
    MPI = start_mpi()
    return int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB))


def gpu_awareness(choice: str = "auto") -> GpuAwareness:
    """Whether MPI takes GPU memory. `choice`, the value of FOMPI_GPU_AWARE, overrules what the library says.

    A library that says yes and cannot ends in a segmentation fault; one that says no may still be able to.
    """
    if choice in ("0", "1"):
        return GpuAwareness(choice == "1", f"FOMPI_GPU_AWARE={choice}")
    if choice != "auto":
        raise LaunchError(f"FOMPI_GPU_AWARE={choice}: set it to auto, 0 or 1")
    MPI = start_mpi()
    symbols = ctypes.CDLL(MPI.__file__)  # a look-up here also searches the libmpi that it is linked to
    queries = [f"MPIX_Query_{kind}_support" for kind in ("cuda", "hip", "rocm")]
    known = [name for name in queries if hasattr(symbols, name)]
    for name in known:
        if symbols[name]():
            return GpuAwareness(True, name)
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""  # MPI 4.1
    info.Free()
    if any(kind in kinds for kind in ("cuda", "rocm", "level_zero")):
        return GpuAwareness(True, f"mpi_memory_alloc_kinds={kinds}")
    return GpuAwareness(False, known[0] if known else "the library does not say; FOMPI_GPU_AWARE=1 overrules")


def gather_records(record: bytes) -> list[bytes]:
    """Every rank's record, in the order of ranks, on every rank. Collective; all records have one length."""
    comm = start_mpi().COMM_WORLD
    everything = bytearray(len(record) * comm.Get_size())
    comm.Allgather(record, everything)
    return [bytes(everything[at : at + len(record)]) for at in range(0, len(everything), len(record))]


_LAST_WORDS_TAG = 32749
_GIVEN_UP: list[object] = []
"""Requests that nobody waits for any more, and their memory: what comes late still has a place."""

_COUNT = struct.Struct("<q")


def gather_last_words(words: bytes, rank: int, seconds: float) -> dict[int, bytes]:
    """On rank 0 the words of all ranks that come here within `seconds`, by rank; nothing on the others.

    For the end of a program: nobody waits for long for a rank that does not come. A rank says how much it has, and
    sends it once rank 0 asks for it.
    """
    MPI = start_mpi()
    found = {rank: words} if rank == 0 else {}
    if MPI.Is_finalized():
        return found
    comm, end = MPI.COMM_WORLD, perf_counter() + seconds

    def done(request: Any, memory: object, until: float) -> bool:
        while not request.Test():
            if perf_counter() > until:
                request.Cancel()
                _GIVEN_UP.append((request, memory))
                return False
            sleep(1e-3)
        return True

    if rank:
        header, nothing = _COUNT.pack(len(words)), bytearray(1)
        comm.Isend(header, 0, _LAST_WORDS_TAG).Free()  # so few bytes go by themselves
        if done(comm.Irecv(nothing, 0, _LAST_WORDS_TAG), nothing, end):
            done(comm.Isend(words, 0, _LAST_WORDS_TAG), words, end + seconds)
        return found
    while len(found) < comm.Get_size() and perf_counter() < end:
        status = MPI.Status()
        message = comm.Improbe(MPI.ANY_SOURCE, _LAST_WORDS_TAG, status)
        if message is None:
            sleep(1e-3)
            continue
        count, source = bytearray(_COUNT.size), status.Get_source()
        message.Recv(count)
        inbox = bytearray(*_COUNT.unpack(count))
        receiving = comm.Irecv(inbox, source, _LAST_WORDS_TAG)
        comm.Isend(b"!", source, _LAST_WORDS_TAG).Free()
        if done(receiving, inbox, end + seconds):
            found[source] = bytes(inbox)
    return found


def _load_mpi() -> ModuleType:
    """The module without its habit of starting MPI at import: first we look at the launcher."""
    try:
        import mpi4py

        rc = mpi4py.rc
        initialize, rc.initialize = rc.initialize, False
        if rc.finalize is None:  # "as initialize"
            rc.finalize = initialize
        try:
            from mpi4py import MPI
        finally:
            rc.initialize = initialize
    except (ImportError, RuntimeError) as error:
        cause = str(error).partition("\n")[0] or type(error).__name__
        raise LaunchError(f"there is no MPI ({cause}): {_INSTALL}") from error
    return MPI


def _requested_thread_level() -> str:
    import mpi4py

    return str(mpi4py.rc.thread_level) if mpi4py.rc.threads else "single"


def _refuse_foreign_launcher(MPI: ModuleType) -> None:
    """Raise where starting MPI would end the process, with a message that names no fix."""
    this = _library(MPI)
    reason = launcher.refusal(os.environ, this.name, this.mpirun)
    if reason and not hasattr(ctypes.CDLL(MPI.__file__), "PMIx_Init"):  # built with PMIx, MPICH would start
        raise LaunchError(reason)


def _library(MPI: ModuleType) -> Library:
    description = MPI.Get_library_version().rstrip("\0\n ")
    name, version = MPI.get_vendor()
    if "CRAY MPICH" in description.upper():  # a cousin of MPICH with a launcher of its own
        name = "Cray MPICH"
    standard = MPI.Get_version()
    path = _library_path(MPI)
    return Library(name, _dotted(version), _dotted(standard), description, path, _mpirun_of(path))


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


class _SymbolInfo(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _library_path(MPI: ModuleType) -> str | None:
    """The file of the libmpi in memory: the one that holds its functions."""
    info = _SymbolInfo()
    try:  # PMPI_: a profiler may have put itself in front of the MPI_ names
        address = ctypes.cast(ctypes.CDLL(MPI.__file__).PMPI_Get_library_version, ctypes.c_void_p)
        found = ctypes.CDLL(None).dladdr(address, ctypes.byref(info))
    except AttributeError:
        return None
    return info.file.decode() if found and info.file else None


def _mpirun_of(path: str | None) -> str | None:
    """prefix/bin/mpirun for a library in prefix/lib; not for Debian's, where it may be another library's."""
    if path is None or Path(path).parent.name not in ("lib", "lib64"):
        return None
    mpirun = Path(path).parent.parent / "bin" / "mpirun"
    return str(mpirun) if mpirun.is_file() else None
