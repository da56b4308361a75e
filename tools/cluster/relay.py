"""Distance: a process that passes the frames of links on, later, and not all of them.

      a host, or a group of hosts              the switch
    ---- inner TAP ---> waits, may be lost ---> outer TAP ----      half of a round trip
    ---- inner TAP <--------- at once --------- outer TAP ----

A frame between two hosts leaves one of them and so waits once. The kernel shapes both devices as it shapes other links.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import select
import signal
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import NoReturn

from cluster.namespaces import ENDINGS, exit_with
from cluster.values import Distance, Refused

TUN = "/dev/net/tun"
SET_INTERFACE, SET_OFFLOAD = 0x400454CA, 0x400454D0  # TUNSETIFF, TUNSETOFFLOAD
TAP, NO_INFORMATION, OFFLOAD_HEADER = 0x0002, 0x1000, 0x4000  # flags of TUNSETIFF
CHECKSUMS, SUPERPACKETS = 0x01, 0x02 | 0x04 | 0x08  # TCP's of IPv4, of IPv6, and with ECN
MOST_BYTES = 70_000  # of a superpacket and its headers
ROUND_SECONDS, ROUNDS = 2e-4, 5  # under load, a round serves what comes in this time; after a pause, some are at once
MOST_FRAMES = 64  # of a device in a round


class Relay:
    """The links with a distance, by the names of their outer devices, and the process that carries their frames."""

    def __init__(self) -> None:
        self._links: dict[str, tuple[int, int]] = {}  # descriptors of the inner and the outer device
        # The seconds of one way and the loss of each link, at most 512 links. It is shared with the process.
        self._settings = memoryview(mmap.mmap(-1, 2 * 512 * 8)).cast("d")

    def make(self, inner: str, outer: str, loss: float | None) -> None:
        """Make the two devices of a link. It has no latency and loses nothing until `change`."""
        self._links[outer] = (tap(inner), tap(outer))
        self._split(outer, bool(loss))

    def change(self, outer: str, distance: Distance) -> None:
        """Give a link another distance. A part that is None stays."""
        at = 2 * list(self._links).index(outer)
        if distance.latency is not None:
            self._settings[at] = distance.latency / 2
        if distance.loss is not None:
            self._settings[at + 1] = distance.loss
            self._split(outer, bool(distance.loss))

    def _split(self, outer: str, splits: bool) -> None:
        """Let the kernel pass up to 64 KiB of a TCP stream on at once, or only frames, so that single ones are lost."""
        for device in self._links[outer]:
            fcntl.ioctl(device, SET_OFFLOAD, CHECKSUMS if splits else CHECKSUMS | SUPERPACKETS)

    def start(self) -> None:
        """Start the process, if there is a link. It ends with the cluster."""
        if self._links and not os.fork():
            exit_with(lambda: carry([*self._links.values()], self._settings))


def tap(name: str) -> int:
    """Make a TAP device in this network namespace. Returns its descriptor."""
    try:
        device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        flags = TAP | NO_INFORMATION | OFFLOAD_HEADER
        fcntl.ioctl(device, SET_INTERFACE, struct.pack("16sH22x", name.encode(), flags))
    except OSError as error:
        raise Refused(
            f"links with a latency need {TUN} ({error.strerror}): load the module tun; who is not root needs the "
            "permission to open it"
        ) from None
    return device


def carry(links: Sequence[tuple[int, int]], settings: memoryview[float]) -> NoReturn:
    """Carry the frames of all links for ever. Each link has the same sequence of losses in every run."""
    for ending in ENDINGS:
        signal.signal(ending, signal.SIG_IGN)  # links exist as long as the cluster
    with suppress(OSError):  # like a card's interrupts; only root may
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    late: list[deque[tuple[float, bytes]]] = [deque() for _ in links]
    chances = [random.Random(number) for number in range(len(links))]
    leaving = {inner: number for number, (inner, _) in enumerate(links)}
    arriving = {outer: inner for inner, outer in links}
    start = 0.0  # the earliest time of the next round
    while True:
        start = max(start + ROUND_SECONDS, monotonic() - ROUNDS * ROUND_SECONDS)
        sleep(max(0.0, start - monotonic()))
        due = [queue[0][0] for queue in late if queue]
        pause = max(0.0, min(due) - monotonic()) if due else None
        for device in select.select([*leaving, *arriving], [], [], pause)[0]:
            if device in arriving:
                for frame in frames(device):
                    send(arriving[device], frame)
            else:
                number = leaving[device]
                at, loss = monotonic() + settings[2 * number], settings[2 * number + 1]
                late[number].extend((at, frame) for frame in frames(device) if chances[number].random() >= loss)
        now = monotonic()
        for queue, (_, outer) in zip(late, links, strict=True):
            while queue and queue[0][0] <= now:
                send(outer, queue.popleft()[1])


def frames(device: int) -> Iterator[bytes]:
    """The frames that wait in a device, at most those of a round."""
    with suppress(BlockingIOError):
        for _ in range(MOST_FRAMES):
            yield os.read(device, MOST_BYTES)


def send(device: int, frame: bytes) -> None:
    try:
        os.write(device, frame)
    except OSError:
        return  # the link is cut: the frame is lost
