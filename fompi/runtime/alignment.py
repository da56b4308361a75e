"""The traces of all ranks on one clock: the clock of rank 0."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from time import perf_counter
from typing import Any

from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree
from fompi.engine.tasks import Task
from fompi.plans.plan import MESSAGE_BITS
from fompi.traces.clocks import Sample, fit
from fompi.traces.trace import Trace, merge

PINGS = 20
"""Questions to each rank in one reading of its clock. The answer with the shortest round trip counts."""

_TIME, _COUNT = struct.Struct("<d"), struct.Struct("<q")


class _ClockMessage(Task):
    """One message in flight, for which this rank waits."""

    def __init__(self, peer: int, verb: str):
        self.peer, self.verb = peer, verb
        self.moved_at = perf_counter()

    def completed(self, key: int) -> None:
        self.finished = True

    def waits_for(self) -> tuple[int, str]:
        return self.peer, f"rank {self.peer} {self.verb} while traces are gathered"


class _Messenger:
    """Sends and receives bytes, one message at a time, with a tag that no other call in flight uses."""

    def __init__(self, comm: Communicator):
        self.comm = comm
        _, slot = comm.bound_call(comm.next_bound(), 1)
        self.tag = slot << MESSAGE_BITS

    def send(self, message: bytes, dest: int) -> None:
        with self.comm.engine.lock:
            request = self.comm.link.isend(message, dest, self.tag)
        self._wait(request, _ClockMessage(dest, "to receive"))

    def recv(self, nbytes: int, source: int) -> bytes:
        inbox = bytearray(nbytes)
        with self.comm.engine.lock:
            request = self.comm.link.irecv(inbox, source, self.tag)
        self._wait(request, _ClockMessage(source, "to send"))
        return bytes(inbox)

    def _wait(self, request: Any, task: _ClockMessage) -> None:
        engine = self.comm.engine
        with engine.lock:
            engine.post(request, task, 0)
        engine.wait(task, self.comm.channel)
        if task.error is not None:
            raise task.error

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks on rank 0. An empty list on the other ranks."""
        if self.comm.rank:
            encoded = text.encode()
            self.send(_COUNT.pack(len(encoded)), 0)
            self.send(encoded, 0)
            return []
        texts = [text]
        for rank in range(1, self.comm.size):
            (count,) = _COUNT.unpack(self.recv(_COUNT.size, rank))
            texts.append(self.recv(count, rank).decode())
        return texts


def read_clocks(comm: Any = None) -> None:
    """Compare the clock of every rank with the clock of rank 0, for the next `gather_traces`. Collective.

    `gather_traces` does this too. Call it before a long run as well: two readings show how fast the clocks drift.
    """
    communicator = Communicator.of(comm)
    agree(communicator, "read_clocks")
    _read(communicator, _Messenger(communicator))


def _read(comm: Communicator, messenger: _Messenger) -> None:
    """Rank 0 asks one rank after the other for its time."""
    if comm.rank:
        for _ in range(PINGS):
            messenger.recv(1, 0)
            messenger.send(_TIME.pack(perf_counter()), 0)
        return
    for rank in range(1, comm.size):
        batch = []
        for _ in range(PINGS):
            sent = perf_counter()
            messenger.send(b"?", rank)
            (remote,) = _TIME.unpack(messenger.recv(_TIME.size, rank))
            batch.append(Sample(sent, remote, perf_counter()))
        comm.clock_readings.setdefault(rank, []).append(batch)


def gather_traces(traces: Trace | Iterable[Trace], comm: Any = None) -> Trace | None:
    """One Trace of all ranks, on the clock of rank 0. Rank 0 gets it, the other ranks get None. Collective.

        with comm.record() as traces:
            y = fompi.all_reduce(x, comm=comm)
        trace = fompi.gather_traces(traces, comm)
        if trace is not None:
            trace.save("all.json")  # opens in Perfetto

    `traces` is one Trace of this rank, or several. `comm` is a Communicator, an axis of a Mesh, an MPI.Comm, or None
    for all ranks. Clocks drift: before a long run, also call `fompi.runtime.alignment.read_clocks(comm)`.
    """
    communicator = Communicator.of(comm)
    mine = merge([traces] if isinstance(traces, Trace) else list(traces))
    agree(communicator, "gather_traces")
    messenger = _Messenger(communicator)
    _read(communicator, messenger)
    hosts = messenger.gather(socket.gethostname())
    texts = messenger.gather(mine.to_json())
    if communicator.rank:
        return None
    clocks = {rank: fit(batches) for rank, batches in communicator.clock_readings.items()}
    gathered = [mine, *(Trace.from_json(texts[rank]).shifted(clocks[rank]) for rank in range(1, communicator.size))]
    whole = merge(gathered)
    return Trace("measured", whole.title, whole.events, tuple(hosts), whole.progress)
