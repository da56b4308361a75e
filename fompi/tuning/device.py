"""What the kernels, copies and messages of a device cost: the fields of a Machine for tensors on it.

Kernels follow each other in one stream of the device, and the host waits for the last one. So a time is that of the
device, or of the launches if these take longer: both are in the machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np

from fompi.backends.cuda import backend_of
from fompi.backends.cuda.device import ProductCall
from fompi.base.errors import WaitTimeout
from fompi.engine.communicator import Communicator
from fompi.model import fit
from fompi.model.machine import NO_PACKING, TILE, Level, Machine
from fompi.mpi.paths import STAGED
from fompi.ops.messages import sendrecv
from fompi.tuning.rounds import meet, of_all_ranks

REPEATED, ROUNDS = 50, 7
"""This many small kernels are timed together, in this many rounds. The median counts."""

PAUSE_SECONDS = 1e-5
"""Between two polls for a message."""

PRODUCTS = (
    (4096, 4096, 4096), (1024, 4096, 4096), (256, 4096, 4096), (4096, 1024, 4096), (4096, 4096, 1024),
    (2048, 2048, 2048),
)  # fmt: skip
"""The shapes (m, k, n) of the products on a GPU."""

SOFTWARE_PRODUCTS = ((256, 256, 256), (64, 256, 256), (256, 64, 256), (128, 128, 128))

ANNOUNCED, SOFTWARE_ANNOUNCED = (8, 1024, 4096, 4096), (4, 64, 64, 64)
"""Products of one kernel that announces them: how many, and their shape (m, k, n)."""

LARGE_NBYTES, SOFTWARE_LARGE_NBYTES = 64 << 20, 4 << 20
"""Of a copy to the host, and of each operand of a sum."""

MESSAGES, SOFTWARE_MESSAGES = (1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20), (1 << 10, 64 << 10, 1 << 20)
"""Bytes of the messages between two devices."""


Ring = dict[int, tuple[int, int]]
"""rank -> (source, dest)"""


class DeviceMeter:
    """Measures a device of each rank, all at once. All methods are collective.

    `proceed` is called on all ranks before each measurement. It may raise an error, on all of them.
    """

    def __init__(self, device: Any, comm: Communicator, proceed: Callable[[], None] = lambda: None):
        self.device, self.comm, self.mpi, self.proceed = device, comm, comm.link.comm, proceed
        self._stream, self._other = device.stream("costs"), device.stream("costs beside them")
        self._events = [device.event() for _ in range(2)]
        self._is_software = device.key == "software"

    @property
    def title(self) -> str:
        """The device and its paths, in words."""
        return self.comm.paths(self.device).title if self.comm.size > 1 else str(self.device.name)

    def staged(self, groups: Sequence[int]) -> int:
        """`Machine.staged`: the largest group of consecutive ranks inside which no message goes through host memory."""
        paths, ranks = self.comm.paths(self.device), range(self.comm.size)
        if not any(paths.is_staged(a, b) for a in ranks for b in ranks if a != b):
            return 0
        inside = (n for n in reversed(groups) if not any(paths.is_staged(a, a // n * n) for a in ranks if a % n))
        return next(inside, 1)

    def slowdown(self, machine: Machine) -> float:
        """The time of some products now, divided by their time on `machine`."""
        beside = machine.launch + machine.poll
        return median(
            self._product(*shape) / (fit.product_seconds(machine, *shape) + beside) for shape in self._shapes[:3]
        )

    def kernels(self) -> dict[str, Any]:
        """The costs of kernels, launches, events, polls and copies, as the fields of a Machine."""
        small = [self.device.array(np.ones(256, np.float32)) for _ in range(3)]
        add = self.device.kernel("add", small[:2], small[2:], ["float32"] * 2, ["float32"])
        launch = self._slowest(lambda: self._launches(add))
        alone = self._slowest(lambda: self._seconds(lambda: [add(self._stream) for _ in range(REPEATED)]) / REPEATED)
        across = self._slowest(lambda: self._seconds(lambda: self._hops(add)) / REPEATED)
        idle = self._slowest(lambda: self._seconds(lambda: None))
        nbytes = SOFTWARE_LARGE_NBYTES if self._is_software else LARGE_NBYTES
        large = [self.device.array(np.ones(nbytes // 4, np.float32)) for _ in range(2)]
        page = self.device.pinned((nbytes // 4,), np.float32)
        total = self.device.kernel("add", large, large[:1], ["float32"] * 2, ["float32"])
        summed = self._slowest(lambda: self._seconds(lambda: total(self._stream)))
        down = self.device.copy(page, large[0])
        copied = self._slowest(lambda: self._seconds(lambda: down(self._stream)))
        overhead = max(alone - launch, 1e-7)
        timed = [(fit.product(*shape)[0], 0.0, max(1e-9, self._product(*shape) - idle)) for shape in self._shapes]
        flops_rate, _ = fit.product_rates(timed)
        beside = launch + overhead + max(0.0, idle - launch)
        return {
            "launch": launch,
            "event": max(0.0, across - alone),
            "poll": max(0.0, idle - launch),
            "overhead": overhead,
            "memory_rate": 3 * nbytes / max(1e-9, summed - idle),
            "copy_rate": nbytes / max(1e-9, copied - idle),
            "flops_rate": flops_rate,
            "pack_rate": NO_PACKING,
            "wave": self.device.processors * TILE,
            "lanes": 2,  # messages take no time of its kernels
            "announced": self._announced(flops_rate, beside),
        }

    def _announced(self, flops_rate: float, beside: float) -> float:
        """`Machine.announced`. `beside` are the seconds of the host and of a call. 0: a rank cannot do it."""
        count, m, k, n = SOFTWARE_ANNOUNCED if self._is_software else ANNOUNCED
        w = self.device.array(np.ones((k, n), np.float32))
        pairs = [
            (self.device.array(np.ones((m, k), np.float32)), self.device.empty((m, n), "float32")) for _ in range(count)
        ]
        products = [ProductCall("matmul", [x, w], [y], ["float32"] * 2, ["float32"]) for x, y in pairs]
        made: Any = None if self.device.needs_for_announced() else self.device.announced(products, True, None)
        if of_all_ranks(self.mpi, np.array([made is None], float)).any():
            return 0.0
        seconds = self._slowest(lambda: self._seconds(lambda: made.enqueue(self._stream))) - beside
        return min(1.0, 2.0 * count * m * k * n / max(1e-9, seconds) / flops_rate)

    def staged_below(self, ring: Ring, level: Level) -> int:
        """The largest message that is faster through host memory than by this level, of those that were measured."""
        paths = self.comm.paths(self.device)
        usual, paths.path_of = paths.path_of, lambda a, b: STAGED
        try:
            through_host = self._samples(ring)
        finally:
            paths.path_of = usual
        slower = [n for (n, seconds), (_, other) in zip(through_host, level.curve, strict=False) if seconds >= other]
        return int(max((n for n, _ in through_host if n < min(slower, default=inf)), default=0))

    def _samples(self, ring: Ring) -> list[tuple[float, float]]:
        """(bytes, seconds) of messages of several sizes."""
        points = []
        for nbytes in SOFTWARE_MESSAGES if self._is_software else MESSAGES:
            x = self.device.array(np.ones(nbytes, np.uint8))
            points.append((float(nbytes), self._slowest(partial(self._message, x, ring))))
        return points

    def level(self, ring: Ring, level: Level) -> Level:
        """The link of messages between the devices of this ring of ranks, all at once."""
        points = self._samples(ring)
        latency = points[0][1]
        curve = fit.sustained(points, latency)
        return level._replace(latency=latency, bandwidth=fit.bandwidth(curve), curve=curve, burst=0.0)

    @property
    def _shapes(self) -> Sequence[tuple[int, int, int]]:
        return SOFTWARE_PRODUCTS if self._is_software else PRODUCTS

    def _slowest(self, measure: Callable[[], float]) -> float:
        """The median of some rounds, of the slowest rank in each."""
        self.proceed()
        taken = []
        for _ in range(ROUNDS + 1):  # the first one warms up
            meet(self.mpi)
            taken.append(measure())
        slowest = of_all_ranks(self.mpi, np.array(taken[1:])).max(axis=0)
        return float(median(slowest.tolist()))

    def _seconds(self, enqueue: Callable[[], object]) -> float:
        """From the call until the host sees that all of it is done."""
        begun = perf_counter()
        enqueue()
        self._wait(self._stream.record(self._events[0]))
        return perf_counter() - begun

    def _wait(self, event: Any, moves: bool = False) -> None:
        """Wait for the event. `moves`: messages must move until then."""
        end = perf_counter() + self.comm.engine.timeout
        while not event.done():
            if moves and self.comm.engine.progress():
                continue
            sleep(PAUSE_SECONDS) if moves else os.sched_yield()
            if perf_counter() > end:
                raise WaitTimeout(f"a kernel on {self.device!r} is not done after {self.comm.engine.timeout:g} s")

    def _launches(self, work: Any) -> float:
        """Seconds of the host for one launch."""
        begun = perf_counter()
        for _ in range(REPEATED):
            work(self._stream)
        seconds = perf_counter() - begun
        self._wait(self._stream.record(self._events[0]))
        return seconds / REPEATED

    def _hops(self, work: Any) -> None:
        """Kernels that follow each other in two streams, alternately."""
        streams = self._stream, self._other
        for i in range(REPEATED):
            here, there = streams[i % 2], streams[1 - i % 2]
            work(here)
            there.wait(here.record(self._events[i % 2]))

    def _product(self, m: int, k: int, n: int) -> float:
        x, w, y = (self.device.array(np.ones(shape, np.float32)) for shape in ((m, k), (k, n), (m, n)))
        work = self.device.kernel("matmul", [x, w], [y], ["float32"] * 2, ["float32"])
        return self._slowest(lambda: self._seconds(lambda: work(self._stream)))

    def _message(self, x: Any, ring: Ring) -> float:
        """Seconds of a message to the next rank of the ring, until the one from the rank before is on the device."""
        if self.comm.rank not in ring:
            return 0.0
        source, dest = ring[self.comm.rank]
        begun = perf_counter()
        sendrecv(x, dest, source, comm=self.comm)
        token = backend_of(self.device).entry()
        if token is not None:
            self._wait(token, moves=True)
        return perf_counter() - begun
