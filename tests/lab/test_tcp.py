"""Plain TCP streams between ranks, over loopback."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster import tcp

pytestmark = pytest.mark.one_mpi


def ring(size, program):
    """Run program(rank, wire) on every rank of a ring, each in a thread. Returns their results."""
    listeners = [tcp.listen("127.0.0.1") for _ in range(size)]
    addresses = [tcp.address(listener) for listener in listeners]

    def run(rank):
        with tcp.TcpRing(rank, addresses, listeners[rank], timeout=5) as own:
            return program(rank, own)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("nbytes", [0, 1, tcp.PIECE, 3 * tcp.PIECE + 5])
def test_all_ranks_at_once_several_times(size, nbytes):
    times = ring(size, lambda rank, own: [own.exchange(nbytes) for _ in range(3)])
    assert len(times) == size and all(0 < seconds < 5 for some in times for seconds in some)


def test_the_congestion_control_is_known_after_closing_too():
    known = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    assert [closed.congestion for closed in ring(2, lambda rank, own: own)] == [known, known]


def test_one_rank_after_the_other():
    def program(rank, own):
        if rank:
            own.receive(1_000_000)
        seconds = own.send(1_000_000)
        if not rank:
            own.receive(1_000_000)
        return seconds

    assert all(0 < seconds < 5 for seconds in ring(3, program))


def test_a_closed_stream_is_an_error():
    def program(rank, own):
        if rank == 0:
            return None
        with pytest.raises(ConnectionError):
            own.receive(1000)

    ring(2, program)
