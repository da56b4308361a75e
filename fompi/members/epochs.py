"""A Communicator of processes that know each other by handles: an epoch."""

from __future__ import annotations

from collections.abc import Sequence

from fompi.engine.communicator import Communicator, engine_of_process
from fompi.mpi import epoch, launcher, transport
from fompi.mpi.link import request_testsome_of_both
from fompi.mpi.transport import load_mpi
from fompi.mpi.ucx import UCX


def handle() -> str:
    """How other processes reach this one: a string for a store, the same as long as this process lives.

        store.set(name, fompi.members.handle())

    It starts UCX, and nothing else if MPI carries the messages of this process. Raises LaunchError if there is no UCX.
    """
    transport.start_alone()
    return epoch.handle()


def join(name: object, handles: Sequence[str], timeout: float | None = None) -> Communicator:
    """The Communicator of the processes with these handles. All of them call it, and no others.

        comm = fompi.members.join("run 7, epoch 3", handles)      # the rank of a process is the place of its handle
        try:
            fompi.all_reduce(x, comm=comm)
        except fompi.PeerError:                                   # a member is lost: the others go on without it
            comm.abort("a member is lost")
            comm = fompi.members.join("run 7, epoch 4", [h for h in handles if h != lost])

    `name`: any text or number that no other epoch of these processes has. `timeout`: how long it waits for the others,
    in seconds; None: FOMPI_TIMEOUT. Messages go by UCX, with all operations of fompi, also in a process whose own ranks
    use MPI.

    Raises LaunchError for a string that is no handle, or if the own one is not in the list; MismatchError if a member
    joins it with another list; PeerError if one is lost or gives up; WaitTimeout if one does not come. Nothing is left
    of it then, and the members may join another one.
    """
    transport.start_alone()
    engine, seconds = engine_of_process(), launcher.timeout() if timeout is None else timeout
    if load_mpi() is not UCX:
        engine.test_with(request_testsome_of_both)
    made = epoch.join(str(name), list(handles), seconds, engine.progress)
    try:
        comm = Communicator(made, f"epoch {name}", seconds=seconds)
    finally:
        made.Free()
    comm.channel.timeout = None
    return comm
