"""The links between the ranks of a suite, without fompi and MPI: what plain TCP streams carry, and where peers meet."""

from __future__ import annotations

import socket

from cluster.tcp import TcpRing, address, listen

from fompi.bench.measure import BenchHosts
from fompi.tuning.rounds import texts


def ring(cluster: BenchHosts) -> TcpRing:
    """TCP streams round the ranks. Collective. Close it."""
    listener = listen()
    host, port = address(listener)
    places = [place.rpartition(":") for place in texts(cluster.comm, f"{host}:{port}")]
    return TcpRing(cluster.comm.Get_rank(), [(host, int(port)) for host, _, port in places], listener)


def rendezvous(cluster: BenchHosts) -> str:
    """A free address of rank 0, the same on all ranks. Collective."""
    host = "127.0.0.1" if cluster.shared else socket.gethostbyname(socket.gethostname())
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    return texts(cluster.comm, f"{host}:{port}")[0]
