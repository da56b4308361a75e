"""Plain TCP streams between the ranks, as fast as the link allows. Network figures are compared with them.

    listener = tcp.listen()
    addresses = comm.allgather(tcp.address(listener))  # anything that carries (host, port) from rank to rank
    with tcp.TcpRing(rank, addresses, listener) as ring:
        seconds = ring.exchange(8_000_000)  # to the next rank, while as much arrives from the previous one

The ranks form a ring of persistent connections.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Sequence
from time import perf_counter, sleep
from typing import Self

PIECE = 1 << 18
"""Bytes per system call: large enough to be cheap, small enough that both directions of a stream move."""

ACKNOWLEDGEMENT = b"\x06"


def listen(host: str = "", port: int = 0) -> socket.socket:
    """A listener for a TcpRing, which closes it when the ring is complete."""
    return socket.create_server((host, port), backlog=1)


def address(listener: socket.socket) -> tuple[str, int]:
    """Where the other ranks reach this listener. The host is a name if it listens on all interfaces."""
    host, port = listener.getsockname()[:2]
    return (socket.gethostname() if host == "0.0.0.0" else host), port


class TcpRing:
    """This rank's two streams: one to the next rank of the ring, one from the previous.

    `congestion` is the congestion control of this host's TCP. It is "" if the system has no such option.
    """

    def __init__(
        self, rank: int, addresses: Sequence[tuple[str, int]], listener: socket.socket, timeout: float = 60.0
    ) -> None:
        deadline = perf_counter() + timeout
        self._next = _connect(addresses[(rank + 1) % len(addresses)], deadline)
        listener.settimeout(max(deadline - perf_counter(), 0.001))
        self._previous, _ = listener.accept()
        listener.close()
        for stream in (self._next, self._previous):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.settimeout(timeout)
        self._timeout = timeout
        self._outgoing = memoryview(bytearray(PIECE))
        self._incoming = memoryview(bytearray(PIECE))
        self.congestion = _congestion(self._next)

    def send(self, nbytes: int) -> float:
        """Send to the next rank, which calls `receive`. Returns the seconds until it has acknowledged all bytes."""
        start = perf_counter()
        for rest in range(nbytes, 0, -PIECE):
            self._next.sendall(self._outgoing[:rest])
        if self._next.recv(1) != ACKNOWLEDGEMENT:
            raise ConnectionError("the next rank of the ring closed its stream")
        return perf_counter() - start

    def receive(self, nbytes: int) -> None:
        """Receive what the previous rank sends with `send`."""
        rest = nbytes
        while rest:
            rest -= self._take(rest)
        self._previous.sendall(ACKNOWLEDGEMENT)

    def exchange(self, nbytes: int) -> float:
        """Every rank sends to the next and receives from the previous one at the same time.

        Returns the seconds until both are done on this rank. The ranks should enter together: the time also counts if
        the previous rank is late.
        """
        to_send = to_receive = nbytes
        start = perf_counter()
        self._next.setblocking(False)
        self._previous.setblocking(False)
        with selectors.DefaultSelector() as ready:
            ready.register(self._next, selectors.EVENT_WRITE)
            ready.register(self._previous, selectors.EVENT_READ)
            while to_send or to_receive:
                events = ready.select(self._timeout)
                if not events:
                    raise TimeoutError(f"{to_send} bytes were not sent and {to_receive} did not come")
                for key, _ in events:
                    if key.fileobj is self._next:
                        to_send -= self._next.send(self._outgoing[:to_send])
                        if not to_send:
                            ready.unregister(self._next)
                    else:
                        to_receive -= self._take(to_receive)
                        if not to_receive:
                            ready.unregister(self._previous)
        seconds = perf_counter() - start
        self._next.settimeout(self._timeout)
        self._previous.settimeout(self._timeout)
        return seconds

    def _take(self, most: int) -> int:
        """Receive the bytes that have arrived, at most `most`."""
        count = self._previous.recv_into(self._incoming[:most])
        if not count:
            raise ConnectionError("the previous rank of the ring closed its stream")
        return count

    def close(self) -> None:
        self._next.close()
        self._previous.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _congestion(stream: socket.socket) -> str:
    option = getattr(socket, "TCP_CONGESTION", None)
    return "" if option is None else stream.getsockopt(socket.IPPROTO_TCP, option, 16).rstrip(b"\0").decode()


def _connect(place: tuple[str, int], deadline: float) -> socket.socket:
    """Connect. The next rank may not listen yet, so a refused connection is tried again until the deadline."""
    while True:
        try:
            return socket.create_connection(place, timeout=max(deadline - perf_counter(), 0.001))
        except ConnectionRefusedError:
            if perf_counter() > deadline:
                raise
            sleep(0.01)
