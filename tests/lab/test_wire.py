"""The yardstick by itself, over loopback."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fompi.bench.rivals import wire


def ring(size, program):
    """program(rank, wire) on every rank of a ring, each in a thread; what they return."""
    listeners = [wire.listen("127.0.0.1") for _ in range(size)]
    addresses = [wire.address(listener) for listener in listeners]

    def run(rank):
        with wire.Wire(rank, addresses, listeners[rank], timeout=5) as own:
            return program(rank, own)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("nbytes", [0, 1, wire.PIECE, 3 * wire.PIECE + 5])
def test_all_at_once_again_and_again(size, nbytes):
    times = ring(size, lambda rank, own: [own.exchange(nbytes) for _ in range(3)])
    assert len(times) == size and all(0 < seconds < 5 for some in times for seconds in some)


def test_it_knows_how_tcp_finds_its_rate_when_it_is_closed_too():
    known = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    assert [closed.congestion for closed in ring(2, lambda rank, own: own)] == [known, known]


def test_in_turn():
    def program(rank, own):
        if rank:
            own.receive(1_000_000)
        seconds = own.send(1_000_000)
        if not rank:
            own.receive(1_000_000)
        return seconds

    assert all(0 < seconds < 5 for seconds in ring(3, program))


def test_a_peer_that_leaves_is_an_error():
    def program(rank, own):
        if rank == 0:
            return None
        with pytest.raises(ConnectionError):
            own.receive(1000)

    ring(2, program)
