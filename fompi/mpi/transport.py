"""Starts MPI, and reports facts of the loaded MPI library. The only file that imports mpi4py.

The facts are its name, version and path, its thread level, its largest tag, and whether it takes GPU memory.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter, sleep
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fompi.base.at_exit import at_exit, failure
from fompi.base.doors import DOORS
from fompi.base.errors import LaunchError
from fompi.base.layout import MOST_NBYTES
from fompi.mpi import environment, launcher, ucx
from fompi.mpi.ucx import UCX, WORLD, share_by

if TYPE_CHECKING:
    from fompi.mpi import pmi

_INSTALL = (
    "on a laptop `pip install mpi4py mpich`; on a cluster load the site's MPI module, "
    "or name its library in MPI4PY_LIBMPI, and `pip install mpi4py`"
)


EAGER_TCP_NBYTES = 4 << 20
"""Open MPI sends TCP messages of up to this many bytes at once. Exactly 4 MiB, a common size, is included."""

OPENMPI_TCP = {
    "OMPI_MCA_btl_tcp_flags": "send,inplace,need-ack,need-csum,hetero-rdma",
    "OMPI_MCA_btl_tcp_eager_limit": str(EAGER_TCP_NBYTES + 4096),  # the limit includes a header
}
"""Settings for Open MPI, used when fompi starts it. Variables that are already set are not changed.

By default Open MPI sends a large TCP message in one piece (`put`) after the receiver has answered. The answer queues
behind the receiver's own data, so two ranks that send to each other take turns (docs/inside/mpi.md). Without `put` this
still happens for messages above the eager limit. Such messages are therefore sent in several parts
(`message_limit_nbytes`).
"""


@dataclass(frozen=True)
class MpiLibrary:
    """The loaded MPI library. `path` is its file, `mpirun` the launcher installed with it; None if unknown."""

    name: str
    version: str
    standard: str
    description: str
    path: str | None
    mpirun: str | None


@dataclass(frozen=True)
class GpuAwareness:
    """Whether MPI takes GPU memory, and the source of this information."""

    aware: bool
    source: str


def start_mpi() -> Any:
    """The module `mpi4py.MPI`. Starts MPI if it is not running yet.

    Raises LaunchError if there is no MPI library, or if the launcher does not fit the library. The message says what
    to do.
    """
    MPI = load_mpi()
    if MPI.Is_initialized():
        return MPI
    launch, alone = launcher.detect(), environment.value("FOMPI_SINGLETONS") == "1"
    if MPI is UCX:
        _start_ucx()
    elif not alone and launcher.is_bridged(launch, _library(MPI).name, os.environ):
        seconds = launcher.timeout()
        _start_bridged(MPI, DOORS.store_of_torchrun(seconds), launch.rank or 0, launch.size or 1, seconds)
    else:
        _refuse_foreign_launcher(MPI)
        added = {name: value for name, value in OPENMPI_TCP.items() if name not in os.environ}
        os.environ.update(added)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "suspicious MPI execution", RuntimeWarning)  # a LaunchError says more
                MPI.Init_thread(getattr(MPI, f"THREAD_{_requested_thread_level().upper()}"))
        finally:
            for name in added:
                del os.environ[name]
        if _ends_here():
            at_exit(_finalize)
        if MPI.COMM_WORLD.Get_size() == 1:
            unlink_segments()
    return MPI


_CUT_OFF = threading.Event()
"""Set once another rank has ended by an error, without MPI_Finalize, for which MPI_Finalize would wait."""


def end_without_others() -> None:
    """Do not call MPI_Finalize at exit where fompi does so for processes that no launcher has started."""
    _CUT_OFF.set()


OBJECTION_SECONDS = 1.0
"""How long a process that cannot take part waits for rank 0, to tell it."""


def start_by_store(store: Callable[[], pmi.KeyValueStore], rank: int, size: int, seconds: float) -> None:
    """Start MPI in `size` processes that meet in `store()`, if no launcher has started it in them. Collective.

    Raises LaunchError if the loaded library cannot start this way or there is no such rank, and WaitTimeout if a
    process does not come within `seconds`.
    """
    MPI, launch = load_mpi(), launcher.detect()
    loaded = _library(MPI)
    is_rank = 0 <= rank < size
    if not MPI.Is_initialized() and is_rank and size > 1 and (MPI is UCX or _starts_by_ucx(loaded, size)):
        WORLD.start(rank, size, share_by(store(), rank, size, seconds))
        return
    if MPI.Is_initialized() or not launcher.must_meet(launch, size, os.environ, loaded.name):
        return
    refusal = launcher.store_refusal(size, loaded.name, loaded.mpirun)
    if not is_rank:
        refusal = f"there is no rank {rank} of {size}: " + (f"ranks are 0 to {size - 1}" if size > 0 else "give a size")
    if refusal:
        from fompi.mpi import pmi

        pmi.object_to(store(), refusal, min(seconds, OBJECTION_SECONDS))
        raise LaunchError(refusal)
    for name in [name for name in os.environ if name.startswith("PMI_")]:  # of the rank that this is a child of
        del os.environ[name]
    if size > 1:
        os.environ[launcher.MET] = str(os.getpid())
        _start_bridged(MPI, store(), rank, size, seconds)


def _starts_by_ucx(loaded: MpiLibrary, size: int) -> bool:
    """True if processes that have a store meet by UCX, because this MPI library cannot start them."""
    launch = launcher.detect()
    return (
        environment.value("FOMPI_CARRIER") == "auto"
        and launcher.must_meet(launch, size, os.environ, loaded.name)
        and bool(launcher.store_refusal(size, loaded.name))
        and ucx.is_here()
    )


def carrier_functions() -> tuple[int, ...] | None:
    """The addresses of the functions that calls in C use in place of those of MPI, once UCX has started."""
    return WORLD.worker.addresses if load_mpi() is UCX else None


def carrier_of(comm: Any) -> Any:
    """The module whose communicator this is: `mpi4py.MPI`, or what stands for it where UCX carries messages."""
    return UCX if isinstance(comm, ucx.Intracomm) else load_mpi()


def beside_ucx(comm: Any) -> Any:
    """`comm`; one of UCX gives way to that of mpi4py by whose launcher its ranks have met."""
    mpi4py = sys.modules.get("mpi4py.MPI")
    is_met = carrier_of(comm) is UCX and mpi4py is not None and mpi4py.Is_initialized()
    return mpi4py.COMM_WORLD if is_met and mpi4py is not None else comm


def start_alone() -> None:
    """Start what carries the messages of this process, if nothing has: UCX, with this process as its only rank.

    Whatever has started the process, its peers come by `fompi.mpi.epoch`.
    """
    mpi4py = sys.modules.get("mpi4py.MPI")
    if not (UCX.Is_initialized() or (mpi4py and mpi4py.Is_initialized()) or launcher.starts_mpi(os.environ)):
        WORLD.start(0, 1, lambda own: [own])
        _ALONE.append(True)


def is_alone() -> bool:
    """True if `start_alone` has started what carries the messages of this process."""
    return bool(_ALONE)


_ALONE: list[bool] = []


def by_carrier(comm: Any) -> Any:
    """`comm`, a communicator of mpi4py; with FOMPI_CARRIER=ucx, one of UCX for the same ranks. Collective then."""
    mpi4py = sys.modules.get("mpi4py.MPI")
    if load_mpi() is not UCX or mpi4py is None or not isinstance(comm, mpi4py.Intracomm):
        return comm
    if comm == mpi4py.COMM_WORLD:
        return UCX.COMM_WORLD
    key = _keyval(mpi4py)
    known = comm.Get_attr(key)
    if known is None:
        ranks = comm.Get_group().Translate_ranks(None, mpi4py.COMM_WORLD.Get_group())
        members = UCX.COMM_WORLD.Get_group().Incl(ranks)
        comm.Set_attr(key, known := UCX.COMM_WORLD.Create_group(members, zlib.crc32(str(ranks).encode())))
    return known


@cache
def _keyval(mpi4py: ModuleType) -> int:
    """The key under which a communicator of mpi4py keeps that of UCX, which ends with it."""
    return int(mpi4py.Comm.Create_keyval(delete_fn=lambda comm, key, value: value.Free()))


def library() -> MpiLibrary:
    """The MPI library that mpi4py loads. Does not start MPI."""
    return _library(load_mpi())


def other_libraries() -> list[str]:
    """The other files in this process whose names begin with "libmpi": those of another MPI, or of a part of it."""
    if load_mpi() is UCX:
        return []
    own = os.path.realpath(_library_path() or "")  # the linker may know it by a link
    return sorted(path for path in _mapped() if Path(path).name.startswith("libmpi") and path != own)


@cache
def functions() -> ctypes.CDLL:
    """The functions that mpi4py calls, and others of the same MPI library. Loads nothing.

    They are in the library that the module of mpi4py is linked to. If another one was loaded for the whole process
    before, as by LD_PRELOAD, the linker has given mpi4py that one: it says another version.
    """
    MPI = load_mpi()
    own, everywhere = ctypes.CDLL(MPI.__file__), ctypes.CDLL(None)
    said = MPI.Get_library_version().rstrip("\0\n ")
    return everywhere if _version_of(own) != said == _version_of(everywhere) else own


def _version_of(library: ctypes.CDLL) -> str | None:
    """What an MPI library says of itself. None if these are no functions of MPI."""
    if not hasattr(library, "PMPI_Get_library_version"):
        return None
    text = ctypes.create_string_buffer(1 << 14)  # MPI_MAX_LIBRARY_VERSION_STRING is 8192 at most
    library.PMPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
    return text.value.decode(errors="replace").rstrip("\n ")


def message_limit_nbytes() -> int:
    """The most bytes of one message to another host. With larger ones, two ranks of Open MPI would send in turns."""
    return EAGER_TCP_NBYTES if library().name == "Open MPI" else MOST_NBYTES


def world() -> tuple[int, int]:
    """(rank, size) of this process in MPI_COMM_WORLD."""
    comm = start_mpi().COMM_WORLD
    return comm.Get_rank(), comm.Get_size()


_SEGMENTS = ("/dev/shm/mpich_shm_", "/dev/shm/sm_segment.")
"""How the names of the shared memory of MPICH and of Open MPI begin."""


@cache
def unlink_segments() -> None:
    """Remove the names of the shared memory that MPI has mapped here. It runs once per process.

    The kernel then frees the memory when the last rank of the host has ended, in whatever way. With a name it would
    stay in /dev/shm after a rank is killed or the job is aborted. Open MPI also leaves it after a job of one process.
    The caller knows that all ranks of MPI_COMM_WORLD have started MPI: nobody opens these names any more. Processes
    that MPI_Comm_spawn starts have names of their own.
    """
    for path, inode in _mapped().items():
        with suppress(OSError):  # another rank has removed it
            if path.startswith(_SEGMENTS) and os.stat(path).st_ino == inode:
                os.unlink(path)


def _mapped() -> dict[str, int]:
    """The files that are mapped into this process, with their inodes. None without /proc."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
    return {path: int(inode) for inode, path in (line.split(maxsplit=5)[4:] for line in lines if "/" in line)}


def all_ranks_arrive(seconds: float) -> bool:
    """True if all ranks of MPI_COMM_WORLD call this function within `seconds`."""
    request, end = start_mpi().COMM_WORLD.Ibarrier(), perf_counter() + seconds
    while not request.Test():
        if perf_counter() > end:
            _ABANDONED.append((request, None))
            return False
        sleep(1e-3)
    return True


def thread_levels() -> tuple[str, str]:
    """The thread level that was requested and the one that MPI provides: single, funneled, serialized or multiple."""
    MPI = start_mpi()
    names = ("single", "funneled", "serialized", "multiple")
    provided = {getattr(MPI, f"THREAD_{name.upper()}"): name for name in names}[MPI.Query_thread()]
    return _requested_thread_level(), provided


def tag_upper_bound() -> int:
    """The largest tag of a message."""
    MPI = start_mpi()
    return int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB))


def gpu_awareness(choice: str = "auto") -> GpuAwareness:
    """Whether MPI takes GPU memory. `choice`, the value of FOMPI_GPU_AWARE, overrides what the library says.

    A library that wrongly says yes ends in a segmentation fault. A library that says no may still work.
    """
    environment.check("FOMPI_GPU_AWARE", choice)
    if choice in ("0", "1"):
        return GpuAwareness(choice == "1", f"FOMPI_GPU_AWARE={choice}")
    MPI = start_mpi()
    queries = [f"MPIX_Query_{kind}_support" for kind in ("cuda", "hip", "rocm")]
    known = [name for name in queries if hasattr(functions(), name)]
    for name in known:
        if functions()[name]():
            return GpuAwareness(True, name)
    kinds = ""
    if MPI is not UCX:
        info = MPI.COMM_WORLD.Get_info()
        kinds = info.Get("mpi_memory_alloc_kinds") or ""  # MPI 4.1
        info.Free()
    if any(kind in kinds for kind in ("cuda", "rocm", "level_zero")):
        return GpuAwareness(True, f"mpi_memory_alloc_kinds={kinds}")
    return GpuAwareness(False, known[0] if known else "the library does not say; FOMPI_GPU_AWARE=1 overrides")


def gather_records(record: bytes) -> list[bytes]:
    """The records of all ranks, in rank order, on every rank. Collective. All records have the same length."""
    comm = start_mpi().COMM_WORLD
    everything = bytearray(len(record) * comm.Get_size())
    comm.Allgather(record, everything)
    return [bytes(everything[at : at + len(record)]) for at in range(0, len(everything), len(record))]


_EXIT_TAG = 32749
"""A tag on MPI_COMM_WORLD that programs are unlikely to use. MPI guarantees tags up to 32767."""

_ABANDONED: list[object] = []
"""Abandoned requests and their memory. MPI may still write to it if a message arrives late."""

_COUNT = struct.Struct("<q")


def gather_at_exit(data: bytes, rank: int, seconds: float) -> dict[int, bytes]:
    """On rank 0: the data of all ranks that call this within `seconds`, by rank. On other ranks: an empty dict.

    It is used at the end of a program, where ranks may be missing. Each rank sends its number of bytes first, and the
    data when rank 0 answers.
    """
    MPI = start_mpi()
    gathered = {rank: data} if rank == 0 else {}
    if MPI.Is_finalized():
        return gathered
    comm, end = MPI.COMM_WORLD, perf_counter() + seconds

    def done(request: Any, memory: object, until: float) -> bool:
        while not request.Test():
            if perf_counter() > until:
                request.Cancel()
                _ABANDONED.append((request, memory))
                return False
            sleep(1e-3)
        return True

    if rank:
        header, answer = _COUNT.pack(len(data)), bytearray(1)
        comm.Isend(header, 0, _EXIT_TAG).Free()  # small enough to be sent at once
        if done(comm.Irecv(answer, 0, _EXIT_TAG), answer, end):
            done(comm.Isend(data, 0, _EXIT_TAG), data, end + seconds)
        return gathered
    while len(gathered) < comm.Get_size() and perf_counter() < end:
        status = MPI.Status()
        message = comm.Improbe(MPI.ANY_SOURCE, _EXIT_TAG, status)
        if message is None:
            sleep(1e-3)
            continue
        count, source = bytearray(_COUNT.size), status.Get_source()
        message.Recv(count)
        inbox = bytearray(*_COUNT.unpack(count))
        receiving = comm.Irecv(inbox, source, _EXIT_TAG)
        comm.Isend(b"!", source, _EXIT_TAG).Free()
        if done(receiving, inbox, end + seconds):
            gathered[source] = bytes(inbox)
    return gathered


def load_mpi() -> Any:
    """The module `mpi4py.MPI`, without starting MPI at import, or what stands for it where UCX carries messages."""
    return UCX if UCX.Is_initialized() or _is_by_ucx() else _load_mpi4py()


@cache
def _is_by_ucx() -> bool:
    """FOMPI_CARRIER says so; or it says nothing, and mpi4py is not installed, or torchrun cannot start this MPI."""
    carrier = environment.value("FOMPI_CARRIER")
    if carrier != "auto" or launcher.starts_mpi(os.environ):
        return carrier == "ucx"
    launch = launcher.detect()
    try:
        MPI = _load_mpi4py()
    except LaunchError as error:
        return isinstance(error.__cause__, ModuleNotFoundError) and ucx.is_here()
    alone = environment.value("FOMPI_SINGLETONS") == "1"
    return (
        launch.launcher == "torchrun"
        and not (alone or MPI.Is_initialized() or launcher.is_child(os.environ))
        and bool(launcher.store_refusal(launch.size or 1, MPI.get_vendor()[0]))
        and ucx.is_here()  # asked last: it loads a library, which MPI may have a version of
    )


def _start_ucx() -> None:
    """Connect the processes by UCX: those of torchrun by its store, those of a launcher of MPI by MPI."""
    launch, seconds = launcher.detect(), launcher.timeout()
    rank, size = launch.rank or 0, launch.size or 1
    if launch.launcher == "torchrun" and size > 1:
        store = DOORS.store_of_torchrun(seconds)
        _ABANDONED.append(store)  # this rank may serve it: the others read it a little later
        WORLD.start(rank, size, share_by(store, rank, size, seconds))
    elif launcher.starts_mpi(os.environ):
        MPI = _load_mpi4py()
        if not MPI.Is_initialized():
            _refuse_foreign_launcher(MPI)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "suspicious MPI execution", RuntimeWarning)  # a LaunchError says more
                MPI.Init_thread(MPI.THREAD_MULTIPLE)
        comm = MPI.COMM_WORLD
        WORLD.start(comm.Get_rank(), comm.Get_size(), comm.allgather)
    else:
        WORLD.start(0, 1, lambda own: [own])


@cache
def _load_mpi4py() -> ModuleType:
    """The module `mpi4py.MPI`. The launcher is checked before MPI starts."""
    try:
        import mpi4py

        rc = mpi4py.rc
        initialize, rc.initialize = rc.initialize, False
        if rc.finalize is None:  # None means: the same as rc.initialize
            rc.finalize = initialize
        finalize = rc.finalize
        if _ends_here():
            rc.finalize = False
        try:
            from mpi4py import MPI
        finally:
            rc.initialize, rc.finalize = initialize, finalize
    except (ImportError, RuntimeError) as error:
        cause = str(error).partition("\n")[0] or type(error).__name__
        raise LaunchError(f"there is no MPI ({cause}): {_INSTALL}") from error
    return MPI


def _ends_here() -> bool:
    """True if fompi ends MPI (`_start_bridged`, `_finalize`): if the processes may be connected by a store."""
    return launcher.detect().launcher in (*launcher.STARTS_NO_MPI, "store")


def _finalize() -> None:
    """End MPI, as mpi4py would: unless the program has, or has set `rc.finalize` to False."""
    import mpi4py

    MPI = load_mpi()
    if mpi4py.rc.finalize and not MPI.Is_finalized():
        MPI.Finalize()


def _requested_thread_level() -> str:
    if load_mpi() is UCX:
        return "multiple"
    import mpi4py

    return str(mpi4py.rc.thread_level) if mpi4py.rc.threads else "single"


def _start_bridged(MPI: ModuleType, store: pmi.KeyValueStore, rank: int, size: int, seconds: float) -> None:
    """Start MPI by `fompi.mpi.pmi`. A thread of this process answers MPI, so nothing may wait with the GIL.

    The functions of mpi4py that start and end MPI keep the GIL. They are called in C instead.
    """
    from fompi.mpi import pmi  # most launchers start MPI

    loaded = _library(MPI)
    job = pmi.meet(store, rank, size, pmi.node_of(os.environ), f"{loaded.name} {loaded.version}", seconds)
    bridge = pmi.connect(job, os.environ, seconds)
    level = getattr(MPI, f"THREAD_{_requested_thread_level().upper()}")
    code = functions().MPI_Init_thread(None, None, level, ctypes.byref(ctypes.c_int()))
    if code:
        raise LaunchError(
            f"MPI_Init of {loaded.name} failed with the error {code}: fompi has connected {size} processes"
        )
    bridge.initialised()
    for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
        comm.Set_errhandler(MPI.ERRORS_RETURN)  # as mpi4py does

    leaving, left = threading.Event(), threading.Event()

    def end() -> None:
        leaving.wait()
        try:
            functions().MPI_Finalize()
            bridge.finalised()
            pmi.leave(job)
        finally:
            left.set()

    def finalize() -> None:
        if failure() is not None or _CUT_OFF.is_set():
            return
        leaving.set()
        if not left.wait(seconds):
            print(f"fompi: rank {rank} ends: other ranks did not end within {seconds:g} s", file=sys.stderr)

    threading.Thread(target=end, name="fompi MPI_Finalize", daemon=True).start()  # at exit no thread can start
    MPI.Finalize = finalize  # type: ignore[attr-defined]
    at_exit(finalize)


def _refuse_foreign_launcher(MPI: ModuleType) -> None:
    """Raise LaunchError if MPI_Init would end the process. MPI's own message names no fix."""
    loaded = _library(MPI)
    reason = launcher.torchrun_refusal(os.environ, loaded.name, loaded.mpirun)
    if reason:
        raise LaunchError.everywhere(reason)
    reason = launcher.refusal(os.environ, loaded.name, loaded.mpirun)
    if reason and not hasattr(functions(), "PMIx_Init"):  # an MPICH with PMIx would start
        is_orphan = launcher.is_orphan(os.environ, loaded.name)
        raise LaunchError(reason) if is_orphan else LaunchError.everywhere(reason)


def load_mpi4py() -> Any:
    """The module `mpi4py.MPI`. Raises LaunchError where messages do not go by MPI."""
    if load_mpi() is UCX:
        raise LaunchError("this needs communicators of mpi4py, but UCX carries the messages here: FOMPI_CARRIER=mpi")
    return _load_mpi4py()


def _library(MPI: Any) -> MpiLibrary:
    if MPI is UCX:
        return MpiLibrary("UCX", ucx.version(), "", f"UCX {ucx.version()}", MPI.__file__, None)
    description = MPI.Get_library_version().rstrip("\0\n ")
    name, version = MPI.get_vendor()
    if "CRAY MPICH" in description.upper():  # based on MPICH, with its own launcher
        name = "Cray MPICH"
    standard = MPI.Get_version()
    path = _library_path()
    return MpiLibrary(name, _dotted(version), _dotted(standard), description, path, _mpirun_of(path))


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


class _SymbolInfo(ctypes.Structure):
    """The struct Dl_info of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _library_path() -> str | None:
    """The file of the loaded libmpi: the file that contains its functions."""
    info = _SymbolInfo()
    try:  # the PMPI_ name: a profiler may replace the MPI_ names
        address = ctypes.cast(functions().PMPI_Get_library_version, ctypes.c_void_p)
        found = ctypes.CDLL(None).dladdr(address, ctypes.byref(info))
    except AttributeError:
        return None
    return info.file.decode() if found and info.file else None


def _mpirun_of(path: str | None) -> str | None:
    """prefix/bin/mpirun for a library in prefix/lib. None on Debian, where it may belong to another library."""
    if path is None or Path(path).parent.name not in ("lib", "lib64"):
        return None
    mpirun = Path(path).parent.parent / "bin" / "mpirun"
    return str(mpirun) if mpirun.is_file() else None
