"""Small things that several suites use: repeated calls, wires, and figures that are medians or means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from fompi.bench.measure import Call
from fompi.engine.communicator import Communicator
from fompi.tuning.rounds import UNITS, Figure, median_interval


def repeated(call: Call, times: int) -> None:
    for _ in range(times):
        call()


def with_wires(comm: Communicator, wires: Iterable[str | None]) -> dict[str, Communicator]:
    """The communicator with each wire, by its name. None: messages of float32 as they are."""
    return {wire or "float32": comm.using(wire=wire) for wire in wires}


def median_figure(name: str, seconds: Sequence[float], unit: str = "us", **targets: float | None) -> Figure:
    """The median in microseconds ("us") or milliseconds ("ms"), with its interval."""
    times = [UNITS[unit] * s for s in seconds]
    return Figure(name, statistics.median(times), unit, median_interval(times), **targets)


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))
