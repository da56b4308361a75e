"""Where a benchmark runs: which ranks share a host, and what others do on its cores."""

from __future__ import annotations

import math
import socket
from functools import cached_property
from typing import Any, Self

from fompi.tuning.rounds import NoiseMonitor, Runs, texts

IDLE_SECONDS = 0.05
"""Silence between two calls over a network. Token buckets are full again by then, and queues are empty."""


class BenchHosts:
    """The hosts of the ranks of `comm` (mpi4py). Collective.

    `totals` counts the runs in which kernels ran, as far as `runs` was called. A `quick` benchmark repeats no run.
    `patience` is that of the `NoiseMonitor`, from one call of `runs` to the next.
    """

    def __init__(self, comm: Any, quick: bool = False, patience: float = math.inf):
        self.quick, self.patience = quick, patience
        self.comm, self.size = comm, comm.Get_size()
        self.own = comm.Dup()  # for messages that do not belong to fompi
        self.hosts = texts(comm, socket.gethostname())
        self.totals = Runs(0, 0, 0)

    @property
    def shared(self) -> bool:
        """True if all ranks are on one host. Then messages are copies by its cores, and there is no link."""
        return len(set(self.hosts)) == 1

    @property
    def idle(self) -> float:
        """Seconds of silence before each call."""
        return 0.0 if self.shared else IDLE_SECONDS

    @cached_property
    def monitor(self) -> NoiseMonitor | None:
        """Detects other users of the cores while kernels are timed. Collective at first.

        None if ranks share cores, or if the benchmark is quick.
        """
        return None if self.quick else NoiseMonitor.of(self.comm, self.patience)

    def runs(self) -> str:
        """In words: how often others disturbed the runs since the last call. Adds to `totals`."""
        if self.monitor is None:
            return "quick: no run was repeated" if self.quick else "ranks share cores"
        runs = self.monitor.count()
        self.totals = Runs(*map(sum, zip(self.totals, runs, strict=True)))
        return str(runs)

    def __str__(self) -> str:
        where = "shared memory: no link" if self.shared else f"{len(set(self.hosts))} hosts"
        return f"{self.size} rank{'s' * (self.size > 1)}, {where}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.own.Free()
