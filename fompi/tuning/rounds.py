"""How times are taken and compared: contestants in rounds, medians, paired intervals, and rows that hold them.

Rounds are interleaved (A B C, B C A, C A B, ...). So what disturbs the machine for a while disturbs all contestants
alike. Ratios are made within a round. A contestant with a wrong result is not timed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter, sleep
from typing import Any, NamedTuple

import numpy as np

from fompi.base.errors import FompiError, WaitTimeout
from fompi.engine.communicator import Communicator
from fompi.mpi import launcher
from fompi.ops.operations import broadcast

UNITS = {"us": 1e6, "ms": 1e3}
"""How many of each unit are in a second."""

TOLERANCE = 1e-5
"""The largest allowed error of a product in float32 against float64, relative to its largest element."""


class WrongResult(FompiError, ArithmeticError):
    """The result of a contestant differs from the reference."""


class Interval(NamedTuple):
    """The median lies between `low` and `high` with probability `level`."""

    low: float
    high: float
    level: float

    def __str__(self) -> str:
        return f"{self.low:.3f} to {self.high:.3f}" + (f" ({self.level:.0%})" if self.level < 0.95 else "")


@dataclass(frozen=True)
class Figure:
    """A number that summarises a row, and its targets: `least` and `most`. `limit` is what is physically possible."""

    name: str
    value: float
    unit: str = ""
    interval: Interval | None = None
    least: float | None = None
    most: float | None = None
    limit: float | None = None

    @property
    def reached(self) -> bool | None:
        """True if the value meets its targets. None if it has none."""
        if self.least is None and self.most is None:
            return None
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)


@dataclass(frozen=True)
class Row:
    """One setting: the times of each contestant, one per round, in seconds. Each is the time of the slowest rank.

    `base` is the contestant with which the table compares the others. `opponent` is the one without overlap that
    was chosen before these rounds: chosen by them, the best of several is lucky. `limits` are named times that no
    contestant can beat. `predicted` are the times of contestants by a model. `absent` says why a contestant did not
    run. `errors` are the relative errors of the results, from before the timing. `progress` says how messages
    progressed. `marks` must be shown with every figure of the row.
    """

    what: str
    setup: str
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    base: str | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)
    figures: Sequence[Figure] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    progress: str = ""
    marks: Sequence[str] = ()
    opponent: str | None = None

    def median(self, name: str) -> float:
        return statistics.median(self.samples[name])

    def best(self, names: Iterable[str]) -> str:
        """The name of the contestant with the least median, among `names`."""
        return best_of({name: self.samples[name] for name in names if name in self.samples})

    def ratio(self, slow: str, fast: str, **targets: float | None) -> Figure:
        """How many times as fast `fast` is as `slow`, with the paired interval. `targets`: least, most, limit."""
        return ratio(f"{slow} / {fast}", self.samples[slow], self.samples[fast], **targets)

    @property
    def reached(self) -> bool | None:
        """True if every figure meets its targets. None if no figure has any."""
        verdicts = [figure.reached for figure in self.figures if figure.reached is not None]
        return all(verdicts) if verdicts else None


# ------------------------------------------------------------------------------------------------------ statistics


def median_interval(samples: Sequence[float], level: float = 0.95) -> Interval:
    """The interval of the median by the sign test. Its ends are two of the samples. It holds for any distribution.

    Fewer than six samples have no interval of 95 %. Then the interval is their range, and its `level` is lower. Raises
    ValueError if there are no samples.
    """
    ordered, n = sorted(samples), len(samples)
    if not n:
        raise ValueError("there are no samples, so there is no interval")
    tail = 0.0  # the probability that fewer than k of n samples are on one side of the median
    k, probability = 0, 0.5**n
    while k < n // 2 and 2 * (tail + probability) <= 1 - level:
        tail += probability
        k += 1
        probability = math.comb(n, k) * 0.5**n
    if k == 0:
        k, tail = 1, 0.5**n
    return Interval(ordered[k - 1], ordered[n - k], max(0.0, 1 - 2 * tail))


def best_of(samples: Mapping[str, Sequence[float]]) -> str:
    """The name of the contestant with the least median."""
    return min(samples, key=lambda name: statistics.median(samples[name]))


def ratio(name: str, slow: Sequence[float], fast: Sequence[float], **targets: float | None) -> Figure:
    """The median of the ratios within each round, and its interval. Machines drift between rounds, not within one."""
    paired = [a / b for a, b in zip(slow, fast, strict=True)]
    return Figure(name, statistics.median(paired), "", median_interval(paired), **targets)


def difference(name: str, slow: Sequence[float], fast: Sequence[float], **targets: float | None) -> Figure:
    """The median of the differences within each round in microseconds, and its interval."""
    us = UNITS["us"]
    paired = [us * (a - b) for a, b in zip(slow, fast, strict=True)]
    return Figure(name, statistics.median(paired), "us", median_interval(paired), **targets)


# --------------------------------------------------------------------------------------------------------- the loop


def seconds_of(call: Callable[[], object]) -> float:
    """The seconds of one call on this rank."""
    begun = perf_counter()
    call()
    return perf_counter() - begun


def relative_error(result: Any, reference: np.ndarray) -> float:
    """The largest difference, divided by the largest element of the reference. Infinite if the shapes differ."""
    result = np.asarray(result)
    if result.shape != reference.shape:
        return math.inf
    if not reference.size:
        return 0.0
    largest = float(np.max(np.abs(reference)))
    return float(np.max(np.abs(result - reference))) / (largest or 1.0)


def checked(
    comm: Any, calls: Mapping[str, Callable[[], Any]], error: Callable[[Any], float], tolerance: float = TOLERANCE
) -> dict[str, float]:
    """Call each contestant once, and return `error(result)`: the largest of all ranks. Collective over `comm` (mpi4py).

    Raises WrongResult on all ranks if an error is larger than `tolerance`.
    """
    errors = {}
    for name, call in calls.items():
        errors[name] = float(np.max(of_all_ranks(comm, np.array([error(call())]))))
        if not errors[name] <= tolerance:  # NaN is wrong too
            raise WrongResult(f"{name} is wrong: relative error {errors[name]:.2g}, at most {tolerance:g} allowed")
    return errors


def alternate(
    comm: Any,
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    calls: int = 1,
    warmup: int = 2,
    idle: float = 0.0,
    before: Callable[[str], object] | None = None,
    after: Callable[[str, Any], object] | None = None,
    timed: Callable[[Callable[[], float]], float] | None = None,
) -> dict[str, list[float]]:
    """The seconds per call of each contestant, one for each round, of the slowest rank.

    Collective over `comm` (mpi4py). A run is `calls` calls of one contestant. All ranks start it together after `idle`
    seconds of silence. So all runs have the same conditions: after silence, connections have lost their TCP window,
    and token buckets are full.

    `warmup` runs of each contestant come first and do not count. They make plans, memory and connections. The calls of
    `before(name)` and `after(name, result)` around each run are not timed. `timed(run)` may call a run more than once.
    It returns the seconds that count.
    """

    def run(name: str) -> float:
        call = contestants[name]
        if before is not None:
            before(name)
        sleep(idle)
        meet(comm)
        begun = perf_counter()
        for _ in range(calls):
            result = call()
        taken = (perf_counter() - begun) / calls
        if after is not None:
            after(name, result)
        return taken

    seconds = np.zeros((len(contestants), warmup + rounds))
    names = list(contestants)
    for i in range(warmup + rounds):
        for place in range(len(names)):
            k = (i + place) % len(names)
            seconds[k, i] = run(names[k]) if timed is None or i < warmup else timed(partial(run, names[k]))
    seconds = seconds[:, warmup:].copy()
    slowest = of_all_ranks(comm, seconds).max(axis=0)
    return dict(zip(contestants, slowest.tolist(), strict=True))


def meet(comm: Any) -> None:
    """A barrier for measurements, over `comm` (mpi4py). Raises WaitTimeout after FOMPI_TIMEOUT seconds.

    A rank that waits sleeps, so that it leaves the cores to ranks that still work. The second barrier lets all ranks go
    on at the same time.
    """
    request, seconds = comm.Ibarrier(), launcher.timeout()
    end = perf_counter() + seconds
    while not request.Test():
        if perf_counter() > end:
            raise WaitTimeout(f"not all ranks reached a measurement within {seconds:g} s (FOMPI_TIMEOUT)")
        sleep(5e-5)
    comm.Barrier()


def texts(comm: Any, own_text: str) -> list[str]:
    """A text of every rank, on every rank, cut after 512 bytes. Collective over `comm` (mpi4py)."""
    sent = np.frombuffer(own_text.encode()[:512].ljust(512, b"\0"), np.uint8)
    rows = of_all_ranks(comm, sent)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]


def text_of_rank_0(comm: Communicator, text: str) -> str:
    """The text of rank 0, on all ranks. Collective."""
    own = np.frombuffer(text.encode(), np.uint8)
    nbytes = int(np.asarray(broadcast(np.array([own.size]), comm=comm))[0])
    return bytes(np.asarray(broadcast(own if comm.rank == 0 else np.zeros(nbytes, np.uint8), comm=comm))).decode()


def of_all_ranks(comm: Any, own: np.ndarray) -> np.ndarray:
    """An array of the arrays of all ranks, on every rank. They have the same shape. Collective over `comm` (mpi4py)."""
    everything = np.empty((comm.Get_size(), *own.shape), own.dtype)
    comm.Allgather(own, everything)
    return everything
