"""The managed group of torchft: it connects the replica groups that are alive, anew when one of them comes or goes.

    from fompi.torch.torchft import ProcessGroupFompi

    manager = torchft.Manager(pg=ProcessGroupFompi(timedelta(seconds=30)), min_replica_size=1, ...)

Each rank of a replica group has one. Its members need no launcher (`fompi.members`). They get each other's handles by
the store that torchft names, or by its lighthouse. Inside a replica group the ranks may use MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from time import perf_counter
from typing import Any

from torch.distributed import DistBackendError, DistError, DistStoreError
from torchft.process_group import ProcessGroup, create_store_client

from fompi.base.errors import MismatchError, PeerError, WaitTimeout
from fompi.mpi.launcher import in_seconds
from fompi.torch import private
from fompi.torch.creation import Reconfigurable
from fompi.torch.work import Landed, Work


class ProcessGroupFompi(Reconfigurable, ProcessGroup):
    """A ProcessGroup of torchft on fompi, with all collectives of the backend "fompi".

    A Manager connects it: by `configure` in torchft 0.2, by torch's `reconfigure` in later ones. `abort` leaves the
    members, and the next quorum connects them again. `timeout`: how long it waits for the others to connect, and how
    long a call may make no progress.

    A sum ends without an error if members are lost: the Manager asks `errored` before it lets the optimizer act. So
    torchft's DistributedDataParallel goes on. Other calls raise DistBackendError.
    """

    remedy = "The next quorum of its Manager connects them"
    _error: BaseException | None = None

    def __init__(self, timeout: timedelta = timedelta(seconds=60)):
        super().__init__(0, 1, "torchft", None, timeout)

    def configure(
        self, store_addr: str, replica_id: str, rank: int, world_size: int, *_: object, **others: object
    ) -> None:
        """Leave the members of before, and connect those who meet at `store_addr`, where no others have met.

        If one does not come or is lost, `errored` says so, and the group has no members.
        """
        self._leave(f"the quorum {store_addr} took its place")
        end = perf_counter() + self._timeout.total_seconds()
        try:
            self._join(store_addr, self._exchanged(store_addr, rank, world_size), max(0.0, end - perf_counter()))
        except (MismatchError, PeerError, WaitTimeout, DistError) as error:
            self._fail(f"the quorum {store_addr} was not connected", error)

    def _exchanged(self, store_addr: str, rank: int, world_size: int) -> Sequence[str]:
        """The handles of all members."""
        store, keys = create_store_client(store_addr, self._timeout), [f"fompi/{each}" for each in range(world_size)]
        store.set(keys[rank], self.get_reconfigure_handle())
        try:
            store.wait(keys, self._timeout)
        except DistStoreError as error:
            late = [str(each) for each, key in enumerate(keys) if not store.check([key])]
            waited = f"waited {in_seconds(self._timeout.total_seconds())} for the handle of rank {', '.join(late)}"
            raise WaitTimeout(f"rank {rank} {waited}") from error
        return [store.get(key).decode() for key in keys]

    def _use(self, comm: Any) -> None:
        super()._use(comm)
        self._error = None

    def _fail(self, what: str, error: BaseException) -> None:
        """Leave the members, so that nothing is in flight any more when the next step begins."""
        self._leave(f"{what}: {error}")
        self._error = error

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        try:
            work = super().allreduce(tensors, opts, timeout)
        except DistBackendError:
            if self.errored() is None:
                raise
            return Landed(tensors)  # a sum before it has failed
        return ManagedSum(self, work) if isinstance(work, Work) else work

    def errored(self) -> BaseException | None:
        """The error that ended a sum, or the members of now. None: there is none."""
        return self._error or self.comm.channel.broken

    def getBackendName(self) -> str:
        return "torchft-fompi"


class ManagedSum(private.WORK):
    """A sum in flight. If it ends by an error, its group notes the error and has no members any more."""

    def __init__(self, group: ProcessGroupFompi, work: Work):
        super().__init__()
        self._group, self._comm, self._work = group, group.comm, work

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            self._work.wait(timeout)
        except DistBackendError as error:
            if self._group.comm is self._comm:
                self._group._fail("a sum has failed", error)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> Any:
        return self._work.get_future().then(lambda _: self.wait() and self._work.value)
