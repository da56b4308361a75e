"""One communicator's messages: bytes to a peer, bytes from a peer, and the library's own collectives.

Everything is non-blocking and returns a request; the engine tests them. A Link is a duplicate of the communicator it
was made from, so no message of ours meets one of the program's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from time import perf_counter, sleep
from typing import Any

import numpy as np

from fompi.base.errors import LaunchError, PeerError, WaitTimeout
from fompi.mpi.transport import start_mpi

Array = np.ndarray[Any, Any]


class Link:
    """`isend(uint8, dest, tag)`, `issend`, `irecv(uint8, source, tag)`, and `collective(...)`.

    `comm` is the MPI communicator, and from now on belongs to the Link; `blocking` one more of the same ranks, for the
    collectives that wait for all of them: those of calls in flight, on `comm`, may begin before or after.
    """

    def __init__(self, comm: Any, blocking: Any = None):
        MPI = start_mpi()
        self.comm, self.blocking = comm, blocking
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.world_size = MPI.COMM_WORLD.Get_size()
        self.tag_bits = (int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)) + 1).bit_length() - 1
        self.isend: Callable[[Any, int, int], Any] = self.comm.Isend
        self.issend: Callable[[Any, int, int], Any] = self.comm.Issend  # done once the other end takes it
        self.irecv: Callable[[Any, int, int], Any] = self.comm.Irecv
        self.improbe: Callable[[int, int], Any] = self.comm.Improbe
        self.any_source: int = MPI.ANY_SOURCE
        self.given_up: list[object] = []  # requests that nobody waits for any more, and their memory

    @cached_property
    def world_ranks(self) -> list[int]:
        """The numbers of our members among all ranks that MPI started."""
        return world_ranks(self.comm)

    def split(self, color: int, key: int) -> Link:
        """The ranks with our color. Collective, and without a deadline."""
        return _of_two(self.blocking.Split(color, key))

    def duplicate(self) -> Link:
        """Another Link of the same ranks, without `blocking`. Collective, and without a deadline."""
        return Link(self.blocking.Dup())

    def collective(
        self, name: str, reads: Sequence[Array], writes: Sequence[Array], root: int, rows: Sequence[int]
    ) -> Callable[[], Any]:
        """The call that starts the library's own `name` on runs of contiguous rows; it returns a request.

        `reads` and `writes` are the chunks of the op, each side in one buffer; `rows` are those of each block that
        is read (a reduce-scatter leaves one block to each rank). Only sums look at the dtype. Keep the call until the
        request is done: it holds the arrays, which mpi4py's request does not for some of the collectives.
        """
        if name in ("all_reduce", "reduce_scatter"):
            given, result = reads[0].reshape(-1), writes[0].reshape(-1)
            if name == "all_reduce":
                return lambda: self.comm.Iallreduce(given, result)
            each = [n * (given.size // max(1, sum(rows))) for n in rows]
            return lambda: self.comm.Ireduce_scatter(given, result, each)
        if name == "broadcast":
            everything = _bytes((reads or writes)[0])
            return lambda: self.comm.Ibcast(everything, root)
        if name == "all_gather":
            mine, gathered = _bytes(reads[0]), _placed(writes)
            return _holding((reads, writes), lambda: self.comm.Iallgatherv(mine, gathered))
        dealt, arrived = _placed(reads), _placed(writes)
        return _holding((reads, writes), lambda: self.comm.Ialltoallv(dealt, arrived))

    def several_hosts(self) -> bool:
        """Whether the ranks share no memory. Collective, and the same on all ranks."""
        near = self.blocking.Split_type(start_mpi().COMM_TYPE_SHARED)
        alone: bool = near.Get_size() < self.size
        near.Free()
        return alone

    def close(self) -> None:
        for comm in (self.comm, self.blocking):
            if comm is not None:
                comm.Free()


def _of_two(comm: Any) -> Link:
    """A Link with a communicator for what blocks. Collective, and without a deadline."""
    return Link(comm, comm.Dup())


def connect(
    comm: Any, timeout: float, progress: Callable[[], bool], left: Callable[[list[int]], PeerError | None]
) -> Link:
    """A Link of the ranks of `comm`. Collective.

    While the others are on their way `progress()` is called, and `left(world ranks)`, which tells if one never comes.
    """
    duplicate, request = comm.Idup()
    members = world_ranks(comm)
    begun = perf_counter()
    while not request.Test():
        if progress():
            continue
        sleep(1e-4)
        waited = perf_counter() - begun
        error = left(members) if waited > 0.2 else None
        if error is not None:
            raise error
        if waited > timeout:
            raise WaitTimeout(
                f"rank {comm.Get_rank()} of {comm.Get_size()} waited {timeout:g} s (FOMPI_TIMEOUT) for all ranks "
                "to come to the creation of a communicator"
            )
    return _of_two(duplicate)


def world_ranks(comm: Any) -> list[int]:
    """The numbers of the members of `comm` among all ranks that MPI started."""
    group, world = comm.Get_group(), start_mpi().COMM_WORLD.Get_group()
    numbers = list(group.Translate_ranks(None, world))
    group.Free()
    world.Free()
    return numbers


def request_testsome() -> Callable[[list[Any]], list[int] | None]:
    """Test a list of requests: the indices of those that are done now."""
    testsome: Callable[[list[Any]], list[int] | None] = start_mpi().Request.Testsome
    return testsome


def abort(status: int) -> None:
    """End all ranks that MPI started, now."""
    start_mpi().COMM_WORLD.Abort(status)


def finalized() -> bool:
    return bool(start_mpi().Is_finalized())


def mpi_communicator(comm: Any) -> Any:
    """`comm` if it is one of mpi4py's (None: all ranks). Raises LaunchError for anything else."""
    MPI = start_mpi()
    if comm is None:
        return MPI.COMM_WORLD
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise LaunchError(f"comm= takes a fompi.Communicator, an axis of a fompi.Mesh or an MPI.Comm, not {comm!r}")
    return comm


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _holding(arrays: object, start: Callable[[], Any]) -> Callable[[], Any]:
    """`start`, keeping `arrays` for as long as it lives: a memory given by its address keeps nothing."""

    def started(held: object = arrays) -> Any:
        return start()

    return started


def _placed(runs: Sequence[Array]) -> list[Any]:
    """What the v-collectives take: memory, counts, displacements, type. The memory spans all runs."""
    MPI = start_mpi()
    begins, counts = [a.ctypes.data for a in runs], [a.nbytes for a in runs]
    filled = [(begin, begin + n) for begin, n in zip(begins, counts, strict=True) if n]
    base, end = min((b for b, _ in filled), default=0), max((e for _, e in filled), default=0)
    places = [begin - base if n else 0 for begin, n in zip(begins, counts, strict=True)]
    memory = MPI.buffer.fromaddress(base, end - base) if filled else bytearray()
    return [memory, counts, places, MPI.BYTE]


@cache
def _keyval(kind: str) -> int:
    def delete(comm: Any, keyval: int, value: Any) -> None:
        if kind == "communicator":
            value.close()

    return int(start_mpi().Comm.Create_keyval(delete_fn=delete))


def attached(comm: Any, kind: str = "communicator") -> Any:
    """What `attach` hung on this MPI communicator, or None."""
    return comm.Get_attr(_keyval(kind))


def attach(comm: Any, value: object, kind: str = "communicator") -> None:
    """Hang `value` on this MPI communicator; as a communicator of ours, it is closed when that one is freed."""
    comm.Set_attr(_keyval(kind), value)


def attached_to_process(make: Callable[[], Any]) -> Any:
    """The one value of this process, hung on MPI's communicator of one rank; made when first asked for."""
    own = start_mpi().COMM_SELF
    value = attached(own, "process")
    if value is None:
        value = make()
        attach(own, value, "process")
    return value
