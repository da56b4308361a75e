"""Runs of kernels that others disturb are repeated: what makes the figures of a shared machine comparable.

A disturbance of the cores that lasts a fraction of a second does not disturb all contestants alike. A `NoiseMonitor`
detects it with small products. Then a run waits, and is repeated if it was disturbed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import sleep
from typing import Any, NamedTuple

import numpy as np

from fompi.bench.measure import Bench
from fompi.mpi import launcher
from fompi.tuning.rounds import of_all_ranks, seconds_of

PROBE, PROBES, FIRST_PROBES = 384, 3, 20
"""A probe multiplies two matrices of PROBE x PROBE elements PROBES times, and takes the least time.

FIRST_PROBES probes at the start find the usual time.
"""

DISTURBED = 1.1
"""A run is disturbed if a probe takes more than this many times its usual time."""

TRIES = 4
"""A disturbed run is run at most this many times."""

WAITS, WAIT_SECONDS = 4, 0.03
"""While a probe is slow, a run waits WAIT_SECONDS and probes again, on average at most WAITS times.

Most disturbances last less than a third of a second.
"""


def watched(bench: Bench) -> tuple[Bench, Callable[[], str]]:
    """The benchmark, whose disturbed runs are repeated; and how many were since the last call, in words. Collective."""
    if bench.quick:
        return bench, lambda: "quick: no run was repeated"
    monitor = NoiseMonitor.of(bench.cluster.comm)
    if monitor is None:
        return bench, lambda: "ranks share cores"
    return replace(bench, timed=monitor.measure), lambda: str(monitor.count())


class Runs(NamedTuple):
    """How many runs were timed, how many were repeated, and how many of the results that count are disturbed."""

    timed: int
    repeated: int
    disturbed: int

    def __str__(self) -> str:
        repeated = f"{self.repeated} were repeated because others used the cores"
        return f"{self.timed} run{'s' * (self.timed != 1)}: {repeated}, {self.disturbed} stayed disturbed"


class NoiseMonitor:
    """Detects whether others use the cores: each rank times a small product before and after a run.

    A run waits while the probe of the slowest rank takes more than DISTURBED times its usual time. A run that was
    disturbed is repeated, at most TRIES times. The number of repetitions is at most the number of runs (or TRIES, if
    that is more). Then the try with the fastest probes counts. The times of the run itself do not matter for this.

    Collective over `comm` (mpi4py).
    """

    def __init__(self, comm: Any):
        self.comm = comm
        self._products = [np.ones((PROBE, PROBE), np.float32) for _ in range(3)]
        self._probe_seconds: list[float] = []
        self._turns = self._repeated = self._waited = self._disturbed = 0
        for _ in range(FIRST_PROBES):
            self.probe()

    @staticmethod
    def of(comm: Any) -> NoiseMonitor | None:
        """A monitor, or None if ranks share a core: then each rank always disturbs the others. Collective."""
        cores = min(launcher.cores_per_rank(), launcher.cores_beside_other_hosts())
        return NoiseMonitor(comm) if of_all_ranks(comm, np.array([cores])).min() >= 1 else None

    def probe(self) -> float:
        """The time of a probe now, divided by its usual time: the lower decile of all probes of this rank."""
        a, b, c = self._products
        seconds = [seconds_of(lambda: np.matmul(a, b, out=c)) for _ in range(PROBES)]
        self._probe_seconds.append(min(seconds))
        return min(seconds) / float(np.quantile(self._probe_seconds, 0.1))

    def wait_until_quiet(self) -> float:
        """Wait until no rank is disturbed, or until the waits are used up. Returns the last probe of this rank."""
        while True:
            slowdown = self.probe()
            slowest = float(of_all_ranks(self.comm, np.array([slowdown])).max())
            if slowest <= DISTURBED or self._waited >= WAITS * max(self._turns, TRIES):
                return slowdown
            self._waited += 1
            sleep(WAIT_SECONDS)

    def repeat_disturbed(self, run: Callable[[], tuple[float, float]]) -> float:
        """The value of the least disturbed try of `run`, which returns (the slowest probe of this rank, value)."""
        self._turns += 1
        tries: list[tuple[float, float]] = []
        most = max(self._turns, TRIES)
        while not tries or (min(tries)[0] > DISTURBED and len(tries) < TRIES and self._repeated < most):
            self._repeated += bool(tries)
            slowdown, value = run()
            tries.append((float(of_all_ranks(self.comm, np.array([slowdown])).max()), value))
        self._disturbed += min(tries)[0] > DISTURBED
        return min(tries)[1]

    def measure(self, function: Callable[[], float]) -> float:
        """The value of `function()` in a run that is not disturbed. It must return the same on all ranks."""

        def run() -> tuple[float, float]:
            before, value = self.wait_until_quiet(), function()
            return max(before, self.probe()), value

        return self.repeat_disturbed(run)

    def count(self) -> Runs:
        """The runs since the last count."""
        runs = Runs(self._turns, self._repeated, self._disturbed)
        self._turns = self._repeated = self._waited = self._disturbed = 0
        return runs
