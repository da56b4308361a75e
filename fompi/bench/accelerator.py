"""An emulated accelerator for all calls of a rank, whose speed a benchmark chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from fompi.backends.emulated import Emulated
from fompi.bench.cluster import TcpHosts
from fompi.bench.collectives import progress
from fompi.bench.kernels import emulated
from fompi.engine.communicator import Communicator
from fompi.model.machine import Machine
from fompi.parallel.turns import give_way
from fompi.tuning.rounds import Row

Array = np.ndarray[Any, Any]

INSTANT = Machine("no time", 0.0, 1.0, 1e30, 1e30, 0.0)

PILOT_ROUNDS = 3
"""Rounds by which a benchmark chooses the speed of its accelerator."""


class Accelerator(Emulated):
    """The emulated accelerator of this rank, for all calls on `comms`. `serial`: a kernel waits for all messages."""

    def __init__(self, comms: Iterable[Communicator]):
        super().__init__(INSTANT)
        self.meanwhile = give_way  # the host is free while a kernel runs
        self.comms, self.serial, self.flops = [*comms], False, 0.0

    def use(self, flops_rate: float, serial: bool = False) -> None:
        self.machine = replace(INSTANT, flops_rate=flops_rate)
        self.serial = serial

    def spend(self, flops: float, nbytes: float = 0.0, compute: Callable[[], object] = lambda: None) -> None:
        self.flops += flops
        if self.serial:
            for comm in self.comms:
                while busy := [task for task in [*comm.channel.active.values()] if not task.finished]:
                    comm.engine.wait(busy[0], comm.channel)
        super().spend(flops, nbytes, compute)

    def bind(self, kernel: str, reads: Any, writes: Any, read_dtypes: Any, write_dtypes: Any) -> Any:
        if kernel.startswith(("matmul", "gradient")):
            rows, columns = reads[0].shape[0], reads[1].shape[-1]
            self.flops += 2.0 * rows * columns * reads[0].shape[-1]
        return super().bind(kernel, reads, writes, read_dtypes, write_dtypes)

    @contextmanager
    def on(self) -> Iterator[None]:
        for comm in self.comms:
            comm.backend = self
        try:
            with emulated(self):
                yield
        finally:
            for comm in self.comms:
                comm.backend = None


def emulated_row(comm: Communicator, cluster: TcpHosts, what: str, samples: Any, **more: Any) -> Row:
    """A row of kernels on an emulated accelerator, with real messages."""
    return Row(what, str(cluster), samples, progress=progress(comm), marks=["emulated accelerator"], **more)
