"""The messages of one communicator: bytes to a peer, bytes from a peer, and the MPI library's own collectives.

Every operation is non-blocking and returns a request. `fompi.engine.in_flight` tests the requests. A Link duplicates
the communicator that it is made from, so messages of fompi never match messages of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from time import perf_counter, sleep
from typing import Any

import numpy as np

from fompi.base.errors import LaunchError, PeerError, StateError, WaitTimeout
from fompi.mpi.launcher import in_seconds
from fompi.mpi.transport import by_carrier, carrier_of, start_mpi, unlink_segments
from fompi.mpi.ucx import MOST_RANKS, UCX, Intracomm, UcxCollective, UcxError, UcxRequest

Array = np.ndarray[Any, Any]


PAUSE_SECONDS = 1e-4
"""Between two tests of a request that makes a communicator."""


class Link:
    """`isend(uint8, dest, tag)`, `issend`, `irecv(uint8, source, tag)`, and `collective(...)`.

    `comm` is the MPI communicator. It belongs to the Link from now on. `blocking` is a second communicator of the same
    ranks, for blocking collectives. All ranks must start the collectives of one communicator in the same order. On
    `comm` the collectives of calls in flight may start before or after a blocking one.
    """

    def __init__(self, comm: Any, blocking: Any = None):
        self.carrier = MPI = carrier_of(comm)
        # The duplicate of a `fompi.mpi.Comm` is one, too. Here the collectives of MPI are meant.
        self.comm: Any = MPI.Intracomm(comm)
        self.blocking: Any = None if blocking is None else MPI.Intracomm(blocking)
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        world = MPI.COMM_WORLD or comm  # a process that has joined an epoch may have no world of this carrier
        self.world_size = world.Get_size()
        self.tag_bits = (int(world.Get_attr(MPI.TAG_UB)) + 1).bit_length() - 1
        self.isend: Callable[[Any, int, int], Any] = self.comm.Isend
        self.issend: Callable[[Any, int, int], Any] = self.comm.Issend  # done when the receiver has posted its receive
        self.irecv: Callable[[Any, int, int], Any] = self.comm.Irecv
        self.improbe: Callable[[int, int], Any] = self.comm.Improbe
        self.any_source: int = MPI.ANY_SOURCE
        self.error: type[Exception] = MPI.Exception
        self.given_up: list[Any] = []  # abandoned requests and their memory: MPI may still write to it

    @property
    def is_of_process(self) -> bool:
        """False in a process whose ranks use MPI, for an epoch that it has joined: those messages go by UCX."""
        return self.carrier is start_mpi()

    @property
    def is_of_epoch(self) -> bool:
        """True if its ranks have joined an epoch (`fompi.mpi.epoch`), or are some of those that have."""
        return self.carrier is UCX and self.world_ranks[0] >= MOST_RANKS

    @property
    def hosts(self) -> Sequence[str]:
        """The host of each rank, where the carrier knows it. MPI does not."""
        return self.comm.hosts if self.carrier is UCX else ()

    @cached_property
    def world_ranks(self) -> list[int]:
        """For each rank of this Link: its rank in MPI_COMM_WORLD."""
        return world_ranks(self.comm)

    def split(self, color: int, key: int) -> Link:
        """A Link of the ranks with the same `color`, in the order of `key`. Collective, without a deadline."""
        return _with_blocking(_made(lambda: self.blocking.Split(color, key)))

    def duplicate(self) -> Link:
        """Another Link of the same ranks, without `blocking`. Collective, without a deadline."""
        return Link(_duplicated(self.blocking))

    def collective(
        self, name: str, reads: Sequence[Array], writes: Sequence[Array], root: int, rows: Sequence[int]
    ) -> Callable[[], Any]:
        """A function that starts the MPI library's collective `name` on contiguous rows, and returns its request.

        `reads` are the chunks that the op reads, all in one buffer, and `writes` the chunks that it writes. `rows` is
        the number of rows of each block that is read (a reduce-scatter leaves as many blocks on each rank). Only sums
        use the dtype; all others move bytes. Keep the function until the request is done: it holds the arrays, which
        the request of mpi4py does not do for some collectives.
        """
        if name in ("all_reduce", "reduce_scatter"):
            summand, result = _numbers(self.carrier, reads[0]), _numbers(self.carrier, writes[0])
            if name == "all_reduce":
                return lambda: self.comm.Iallreduce(summand, result)
            width, blocks = reads[0].size // max(1, sum(rows)), len(rows) // self.size
            counts = [width * sum(rows[rank * blocks :][:blocks]) for rank in range(self.size)]
            return lambda: self.comm.Ireduce_scatter(summand, result, counts)
        if name == "broadcast":
            data = _bytes((reads or writes)[0])
            return lambda: self.comm.Ibcast(data, root)
        if name == "all_gather":
            own, gathered = _bytes(reads[0]), _buffer_of(self.carrier, writes)
            return _holding((reads, writes), lambda: self.comm.Iallgatherv(own, gathered))
        outgoing, incoming = _buffer_of(self.carrier, reads), _buffer_of(self.carrier, writes)
        return _holding((reads, writes), lambda: self.comm.Ialltoallv(outgoing, incoming))

    def lost(self) -> Sequence[tuple[int, str]]:
        """The ranks that the carrier has lost since it was last asked, and why. MPI ends the job instead."""
        find: Callable[[], Sequence[tuple[int, str]]] | None = getattr(self.comm, "lost", None)
        return () if find is None else find()

    def sender(self, tag: int) -> int | None:
        """A rank whose message with this tag has arrived, and that no posted receive takes. None: there is none."""
        MPI = self.carrier
        status = MPI.Status()
        return int(status.Get_source()) if self.comm.Iprobe(MPI.ANY_SOURCE, tag, status) else None

    def several_hosts(self) -> bool:
        """True if the ranks are on several hosts. Collective, and the same on all ranks."""
        host = _made(lambda: self.blocking.Split_type(self.carrier.COMM_TYPE_SHARED))
        several: bool = host.Get_size() < self.size
        host.Free()
        return several

    def close(self, is_clean: bool = True) -> None:
        """Free both MPI communicators, if they are clean on all ranks. Collective; it does not wait for the others.

        If a call was abandoned on some rank, its messages may still come. MPI gives the number of a freed communicator
        to the next one, which would receive them. So they are freed when all ranks have closed them (`free_closed`),
        and stay if one of them was not clean.
        """
        if self.blocking is None:
            self.comm.Free()
            return
        if self.carrier is UCX:  # it never gives a number again
            for request in self._abandoned():
                request.Cancel()
            self.comm.Free()
            self.blocking.Free()
            _UNCLEAN.append(self)
        else:
            worst = np.array([not is_clean], np.int32)
            request = self.blocking.Iallreduce(self.carrier.IN_PLACE, worst, self.carrier.MAX)
            _CLOSED.append((self, request, worst))
        free_closed()

    def _abandoned(self) -> list[Any]:
        """The requests that were given up. Messages that came later have none."""
        return [each[0] for each in self.given_up if isinstance(each, tuple) and hasattr(each[0], "Cancel")]

    def may_forget(self) -> bool:
        """True if nothing is in flight to the memory of what was given up, on a Link that is closed."""
        return self.carrier is UCX and all([request.Test() for request in self._abandoned()])


_CLOSED: list[tuple[Link, Any, Array]] = []
"""Links that this rank has closed, and the question whether all ranks have, and were clean."""

_UNCLEAN: list[Link] = []
"""Links that are closed, and whose memory may still be written to. Those of MPI are never freed."""


def free_closed() -> bool:
    """Free the Links that all ranks have closed by now. Called when communicators are made and closed, and at exit.

    True: some are left.
    """
    for closed in list(_CLOSED):
        link, request, worst = closed
        if request.Test():
            _CLOSED.remove(closed)
            if worst[0]:
                _UNCLEAN.append(link)
            else:
                link.comm.Free()
                link.blocking.Free()
    _UNCLEAN[:] = [link for link in _UNCLEAN if not link.may_forget()]
    return bool(_CLOSED)


def _with_blocking(comm: Any) -> Link:
    """A Link with a second communicator for blocking collectives. Collective, without a deadline."""
    try:
        return Link(comm, _duplicated(comm))
    except StateError:
        comm.Free()
        raise


def _duplicated(comm: Any) -> Any:
    """A duplicate of an MPI communicator. Collective, without a deadline.

    A blocking MPI_Comm_dup may spin until all ranks have come, on a core that one of them needs.
    """
    duplicate, request = _made(comm.Idup)
    while not _made(request.Test):
        _check(comm)
        sleep(PAUSE_SECONDS)
    return duplicate


def _check(comm: Any) -> None:
    """Raise PeerError if the carrier has lost a rank. MPI ends the job instead."""
    if isinstance(comm, Intracomm):
        comm.check()


def _made(make: Callable[[], Any]) -> Any:
    """What `make` makes, from MPI communicators. Raises StateError if MPI has none left; MPICH has 2048."""
    try:
        return make()
    except (start_mpi().Exception, UcxError) as error:
        reason = str(error).splitlines()[-1]
        raise StateError(
            f"MPI makes no more communicators ({reason}). Close what is not needed any more: Communicator.close(), "
            "Mesh.close(), close() of bound operations, destroy_process_group() of torch; or use `with`"
        ) from error


ARRIVED_TAG = 32748
"""A tag on the communicator of the program, which MPI guarantees. Nothing is sent before a deadline."""

ANSWER_SECONDS = 1.0
"""How long a rank waits for answers before it raises a WaitTimeout. A rank inside fompi answers within milliseconds."""

NO_ANSWER = (
    "it computes outside fompi, is stopped or dead, or cannot be reached. Check that its process runs, and that the "
    "link to its host is up. A larger FOMPI_TIMEOUT waits longer"
)


def connect(
    comm: Any,
    timeout: float,
    progress: Callable[[], bool],
    find_departed: Callable[[list[int], Callable[[], str]], PeerError | None],
    what: Callable[[], str],
) -> Link:
    """A Link of the ranks of `comm`. Collective.

    While this rank waits for the others it calls `progress()`. It also calls `find_departed(world ranks, what)`,
    which returns an error if one of these ranks has ended. Raises that error, or WaitTimeout after `timeout` seconds.
    It names the ranks that have not come, and what they should call.

    The first Link of all ranks removes the names of MPI's shared memory.
    """
    duplicate, request = _made(comm.Idup)
    members, here = world_ranks(comm), {comm.Get_rank()}
    begun, end = perf_counter(), perf_counter() + timeout
    while not _made(request.Test):
        if progress():
            continue
        sleep(PAUSE_SECONDS)
        _check(comm)
        error = find_departed(members, what) if perf_counter() - begun > 0.2 else None
        if error is not None:
            raise error
        _hear(comm, here)
        if perf_counter() > end:
            if perf_counter() - begun > timeout + ANSWER_SECONDS:
                raise WaitTimeout(_missing(comm, here, timeout, what()))
            for rank in range(comm.Get_size()):
                if rank != comm.Get_rank():
                    _tell(comm, rank, is_question=True)
            end = begun + timeout + ANSWER_SECONDS
    world = carrier_of(comm).COMM_WORLD
    if world is not None and sorted(members) == list(range(world.Get_size())):  # all ranks have arrived here
        unlink_segments()
    return _with_blocking(duplicate)


def _tell(comm: Any, rank: int, is_question: bool) -> None:
    """Tell a rank that this one has come. A question: has that rank?"""
    comm.Isend(bytes([is_question]), rank, ARRIVED_TAG).Free()  # small enough to be sent at once


def _hear(comm: Any, here: set[int]) -> None:
    """Note the ranks that say that they have come, and answer them."""
    MPI = carrier_of(comm)
    status, word = MPI.Status(), bytearray(1)
    while (message := comm.Improbe(MPI.ANY_SOURCE, ARRIVED_TAG, status)) is not None:
        message.Recv(word)
        here.add(status.Get_source())
        if word[0]:
            _tell(comm, status.Get_source(), is_question=False)


def _missing(comm: Any, here: set[int], timeout: float, what: str) -> str:
    """The text of the error."""
    late = [rank for rank in range(comm.Get_size()) if rank not in here]
    ranks = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
    why = f"{ranks} {'do' if len(late) > 1 else 'does'} not answer: {NO_ANSWER}"
    if not late:
        ranks, why = "the others", "all ranks have come, but some of them have given up"
    return (
        f"no progress for {in_seconds(timeout)}: rank {comm.Get_rank()} waits for {ranks} to start "
        f"{what}, the first call; root cause: {why}"
    )


def of_members(ranks: Sequence[int], tag: int, within: Any = None) -> Any:
    """An MPI communicator of these ranks of `within`, or of MPI_COMM_WORLD. Only they call it, without a deadline."""
    comm = start_mpi().COMM_WORLD if within is None else within
    world = comm.Get_group()
    group = world.Incl(list(ranks))
    try:
        return _made(lambda: comm.Create_group(group, tag))
    finally:
        group.Free()
        world.Free()


def world_ranks(comm: Any) -> list[int]:
    """For each rank of `comm`: its rank in MPI_COMM_WORLD. Those of an epoch have numbers that no other one has."""
    if isinstance(comm, Intracomm):
        return [*comm.world_ranks]
    group, world = comm.Get_group(), start_mpi().COMM_WORLD.Get_group()
    numbers = list(group.Translate_ranks(None, world))
    group.Free()
    world.Free()
    return numbers


def request_testsome() -> Callable[[list[Any]], list[int] | None]:
    """The function that tests a list of requests: it returns the indices of those that are done now."""
    testsome: Callable[[list[Any]], list[int] | None] = start_mpi().Request.Testsome
    return testsome


def request_testsome_of_both(requests: list[Any]) -> list[int] | None:
    """The same in a process whose ranks use MPI, and that has joined an epoch, whose messages go by UCX."""
    found: list[int] = []
    for is_ucx, testsome in ((True, UcxRequest.Testsome), (False, request_testsome())):
        places = [i for i, request in enumerate(requests) if isinstance(request, (UcxRequest, UcxCollective)) == is_ucx]
        found += [places[i] for i in (testsome([requests[i] for i in places]) or ())] if places else []
    return found


def abort(status: int) -> None:
    """End all ranks that MPI started, at once, with the exit status `status`."""
    start_mpi().COMM_WORLD.Abort(status)


ENDED = "the program has called MPI.Finalize(): no call of fompi is possible after it"


def finalized() -> bool:
    """True after MPI_Finalize."""
    return bool(start_mpi().Is_finalized())


def mpi_communicator(comm: Any) -> Any:
    """`comm` if it is a communicator of mpi4py; MPI.COMM_WORLD for None. Raises LaunchError for anything else.

    Raises StateError after MPI_Finalize: MPI would end the process.
    """
    MPI = start_mpi()
    if MPI.Is_finalized():
        raise StateError(ENDED)
    if comm is None:
        return MPI.COMM_WORLD
    comm = by_carrier(comm)
    if not isinstance(comm, (MPI.Intracomm, Intracomm)) or comm == MPI.COMM_NULL:
        raise LaunchError(
            f"comm= takes a fompi.Communicator, an axis of a fompi.Mesh, an MPI.Comm, or a ProcessGroup or DeviceMesh "
            f"of torch, not {comm!r}"
        )
    return comm


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _numbers(MPI: Any, array: Array) -> list[Any]:
    """The buffer argument of a sum. The type goes by size, and the memory as bytes, which need not be aligned."""
    return [_bytes(array), array.size, getattr(MPI, _TYPES[array.dtype.name])]


_TYPES = {
    "float64": "DOUBLE", "float32": "FLOAT", "complex128": "C_DOUBLE_COMPLEX", "complex64": "C_FLOAT_COMPLEX",
    "int64": "INT64_T", "int32": "INT32_T", "uint64": "UINT64_T", "uint32": "UINT32_T",
}  # fmt: skip
"""The MPI types of the dtypes in `layout.NATIVE_SUMS`."""


def _holding(arrays: object, start: Callable[[], Any]) -> Callable[[], Any]:
    """`start` as a function that keeps `arrays` alive. MPI gets only addresses, which keep nothing alive."""

    def start_and_hold(held: object = arrays) -> Any:
        return start()

    return start_and_hold


def _buffer_of(MPI: Any, runs: Sequence[Array]) -> list[Any]:
    """The buffer argument of MPI's v-collectives: memory, counts, displacements, type. The memory spans all runs."""
    begins, counts = [a.ctypes.data for a in runs], [a.nbytes for a in runs]
    filled = [(begin, begin + n) for begin, n in zip(begins, counts, strict=True) if n]
    base, end = min((b for b, _ in filled), default=0), max((e for _, e in filled), default=0)
    displacements = [begin - base if n else 0 for begin, n in zip(begins, counts, strict=True)]
    memory = MPI.buffer.fromaddress(base, end - base) if filled else bytearray()
    return [memory, counts, displacements, MPI.BYTE]


@cache
def _keyval(kind: str, carrier: Any) -> int:
    """The key of MPI's attribute cache for values of this kind. MPI calls `delete` when a communicator is freed.

    MPI_Finalize frees MPI_COMM_SELF first (MPI 4.1, section 11.2.4).
    """

    def delete(comm: Any, keyval: int, value: Any) -> None:
        if kind == "communicator":
            value.close()
        elif kind == "process":
            value.farewell()
            value.after_finalize(ENDED)

    return int(carrier.Comm.Create_keyval(delete_fn=delete))


def attached(comm: Any, kind: str = "communicator") -> Any:
    """The value that `attach` has stored on this MPI communicator, or None."""
    return comm.Get_attr(_keyval(kind, carrier_of(comm)))


def attach(comm: Any, value: object, kind: str = "communicator") -> None:
    """Store `value` on this MPI communicator. A value of kind "communicator" is closed when `comm` is freed."""
    comm.Set_attr(_keyval(kind, carrier_of(comm)), value)


def attached_to_process(make: Callable[[], Any]) -> Any:
    """The one value of this process. It is made at the first call, and stored on MPI_COMM_SELF."""
    comm_self = start_mpi().COMM_SELF
    value = attached(comm_self, "process")
    if value is None:
        value = make()
        attach(comm_self, value, "process")
    return value
