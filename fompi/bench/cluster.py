"""Where a benchmark runs: which ranks share a host, and the wire between hosts as the limit of every figure."""

from __future__ import annotations

import socket
from functools import cached_property
from typing import Any, Self

from fompi.bench.wire import Wire, address, listen
from fompi.tuning.rounds import Calm, texts

IDLE_SECONDS = 0.05
"""Between calls over a network: what a link may send at once has come back, and no queue is left."""


class Cluster:
    """The hosts of the ranks of `comm` (mpi4py) and, where they differ, plain TCP streams between them. Collective."""

    def __init__(self, comm: Any):
        self.comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()
        self.own = comm.Dup()  # for messages that are none of fompi's
        self.hosts = texts(comm, socket.gethostname())
        self.wire: Wire | None = None
        if not self.shared:
            listener = listen()
            host, port = address(listener)
            places = [place.rpartition(":") for place in texts(comm, f"{host}:{port}")]
            self.wire = Wire(self.rank, [(host, int(port)) for host, _, port in places], listener)

    @property
    def shared(self) -> bool:
        """Whether all ranks are on one host: then messages are copies by its cores, and there is no wire."""
        return len(set(self.hosts)) == 1

    @property
    def idle(self) -> float:
        """Seconds of silence before each call."""
        return 0.0 if self.shared else IDLE_SECONDS

    @property
    def progress(self) -> str:
        return "shared memory: no wire" if self.shared else "wire: plain TCP streams round the ring of ranks"

    @cached_property
    def calm(self) -> Calm | None:
        """For turns in which kernels run. Collective when first asked for."""
        return Calm.of(self.comm)

    def told(self) -> str:
        """How the turns went since this was last asked."""
        return "ranks share cores" if self.calm is None else self.calm.told()

    def __str__(self) -> str:
        where = "shared memory: no wire"
        if self.wire is not None:
            where = f"{len(set(self.hosts))} hosts, TCP {self.wire.congestion}".rstrip()
        return f"{self.size} rank{'s' * (self.size > 1)}, {where}"

    def exchange(self, nbytes: int) -> float:
        """Each rank sends so much to the next one: seconds on this rank."""
        if self.wire is None:
            raise ValueError("there is no wire between ranks on one host")
        return self.wire.exchange(nbytes)

    @property
    def host(self) -> str:
        """This rank's address for the others: that of the interface that GLOO_SOCKET_IFNAME names, or of its name."""
        return "127.0.0.1" if self.shared else socket.gethostbyname(socket.gethostname())

    def rendezvous(self) -> str:
        """An address of rank 0 that nobody listens at yet, told to all. Collective."""
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        return texts(self.comm, f"{self.host}:{port}")[0]

    def close(self) -> None:
        if self.wire is not None:
            self.wire.close()
        self.own.Free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
