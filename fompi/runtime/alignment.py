"""The traces of all ranks on one clock, that of rank 0."""

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
_TIME, _COUNT = struct.Struct("<d"), struct.Struct("<q")


class _Message(Task):
    """One message that is waited for."""

    def __init__(self, peer: int, verb: str):
        self.peer, self.verb = peer, verb
        self.touched = perf_counter()

    def completed(self, key: int) -> None:
        self.finished = True

    def waits_for(self) -> tuple[int, str]:
        return self.peer, f"rank {self.peer} {self.verb} while traces are gathered"


class _Line:
    """Bytes to and from the ranks of a communicator, one message after the other, under tags of its own."""

    def __init__(self, comm: Communicator):
        self.comm = comm
        _, slot = comm.bound_call(comm.next_bound(), 1)
        self.tag = slot << MESSAGE_BITS

    def send(self, message: bytes, dest: int) -> None:
        with self.comm.engine.lock:
            request = self.comm.link.isend(message, dest, self.tag)
        self._wait(request, _Message(dest, "to receive"))

    def recv(self, nbytes: int, source: int) -> bytes:
        inbox = bytearray(nbytes)
        with self.comm.engine.lock:
            request = self.comm.link.irecv(inbox, source, self.tag)
        self._wait(request, _Message(source, "to send"))
        return bytes(inbox)

    def _wait(self, request: Any, task: _Message) -> None:
        engine = self.comm.engine
        with engine.lock:
            engine.post(request, task, 0)
        engine.wait(task, self.comm.channel)
        if task.error is not None:
            raise task.error

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, on rank 0; nothing on the others."""
        if self.comm.rank:
            words = text.encode()
            self.send(_COUNT.pack(len(words)), 0)
            self.send(words, 0)
            return []
        texts = [text]
        for rank in range(1, self.comm.size):
            (count,) = _COUNT.unpack(self.recv(_COUNT.size, rank))
            texts.append(self.recv(count, rank).decode())
        return texts


def read_clocks(comm: Any = None) -> None:
    """Compare the clocks of all ranks with that of rank 0, for the next `gather_traces`. Collective.

    `gather_traces` does it too; before a long run it is worth a call, since drift shows between two readings.
    """
    communicator = Communicator.of(comm)
    agree(communicator, "read_clocks")
    _read(communicator, _Line(communicator))


def _read(comm: Communicator, line: _Line) -> None:
    """Rank 0 asks one rank after the other."""
    if comm.rank:
        for _ in range(PINGS):
            line.recv(1, 0)
            line.send(_TIME.pack(perf_counter()), 0)
        return
    for rank in range(1, comm.size):
        batch = []
        for _ in range(PINGS):
            sent = perf_counter()
            line.send(b"?", rank)
            (remote,) = _TIME.unpack(line.recv(_TIME.size, rank))
            batch.append(Sample(sent, remote, perf_counter()))
        comm.clock_readings.setdefault(rank, []).append(batch)


def gather_traces(traces: Trace | Iterable[Trace], comm: Any = None) -> Trace | None:
    """One Trace of all ranks, on the clock of rank 0: there; None on the other ranks. Collective.

    fompi.read_clocks(comm)                              # before a long run: worth it where clocks drift
    with comm.record() as traces: ...
    trace = fompi.gather_traces(traces, comm)
    if trace is not None: trace.save("all.json")         # opens in Perfetto
    """
    communicator = Communicator.of(comm)
    mine = merge([traces] if isinstance(traces, Trace) else list(traces))
    agree(communicator, "gather_traces")
    line = _Line(communicator)
    _read(communicator, line)
    hosts = line.gather(socket.gethostname())
    texts = line.gather(mine.to_json())
    if communicator.rank:
        return None
    clocks = {rank: fit(batches) for rank, batches in communicator.clock_readings.items()}
    gathered = [mine, *(Trace.from_json(texts[rank]).shifted(clocks[rank]) for rank in range(1, communicator.size))]
    whole = merge(gathered)
    return Trace("measured", whole.title, whole.events, tuple(hosts), whole.progress)
