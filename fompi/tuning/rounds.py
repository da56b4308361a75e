"""How times are taken and compared: contestants in turns, medians, paired intervals, and rows that hold them.

Rounds are interleaved (A B C, B C A, C A B, ...), so that whatever disturbs the machine disturbs all alike, and ratios
are made within a round. A contestant whose result is wrong is not timed. What disturbs cores for parts of a second does
not disturb all alike: with `Calm` a turn waits for others, and is taken again, where small products tell of them.
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
from fompi.mpi import launcher

UNITS = {"us": 1e6, "ms": 1e3}
"""In a second."""

PROBE, PROBES, FIRST_PROBES, CALM, TRIES = 384, 3, 20, 1.1, 4
WAITS, WAIT_SECONDS = 4, 0.03

TOLERANCE = 1e-5
"""Of the largest element, for products in float32 against float64."""


class WrongResult(FompiError, ArithmeticError):
    """A contestant that computes something else than what was asked."""


class Interval(NamedTuple):
    """Where the median lies with probability `level`."""

    low: float
    high: float
    level: float

    def __str__(self) -> str:
        return f"{self.low:.3f} to {self.high:.3f}" + (f" ({self.level:.0%})" if self.level < 0.95 else "")


@dataclass(frozen=True)
class Figure:
    """A number that stands for a row: what it is to be at least or at most, and what physics allows."""

    name: str
    value: float
    unit: str = ""
    interval: Interval | None = None
    least: float | None = None
    most: float | None = None
    limit: float | None = None

    @property
    def reached(self) -> bool | None:
        """Whether it is as good as asked; None if nothing was asked."""
        if self.least is None and self.most is None:
            return None
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)


@dataclass(frozen=True)
class Row:
    """One setting and all who ran in it: seconds of each contestant, round by round, the slowest rank's.

    `base` is the contestant with which the table compares the others. `limits` are times, by name, that nothing can
    beat; `predicted` is what a model says of contestants. `absent` says why a contestant did not run, `errors` how far
    from the reference each was before it was timed, `progress` how messages progressed, `marks` what must be said with
    any of these figures.
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

    def median(self, name: str) -> float:
        return statistics.median(self.samples[name])

    def best(self, names: Iterable[str]) -> str:
        """Who of these is the fastest by its median."""
        return best_of({name: self.samples[name] for name in names if name in self.samples})

    def ratio(self, slow: str, fast: str, **asked: float | None) -> Figure:
        """How many times faster `fast` is than `slow`, with the paired interval; `asked`: least, most, limit."""
        return ratio(f"{slow} / {fast}", self.samples[slow], self.samples[fast], **asked)

    @property
    def reached(self) -> bool | None:
        """Whether every figure of which something was asked is as good as asked."""
        verdicts = [figure.reached for figure in self.figures if figure.reached is not None]
        return all(verdicts) if verdicts else None


# ------------------------------------------------------------------------------------------------------ statistics


def median_interval(samples: Sequence[float], level: float = 0.95) -> Interval:
    """Where the median lies, by the sign test: two of the samples, whatever their distribution.

    Below six samples there is no interval of 95 %: then it is their range, and `level` what that is worth.
    """
    ordered, n = sorted(samples), len(samples)
    if not n:
        raise ValueError("no samples, no interval")
    beyond = 0.0  # the chance that fewer than k of n samples fall on one side of the median
    k, chance = 0, 0.5**n
    while k < n // 2 and 2 * (beyond + chance) <= 1 - level:
        beyond += chance
        k += 1
        chance = math.comb(n, k) * 0.5**n
    if k == 0:
        k, beyond = 1, 0.5**n
    return Interval(ordered[k - 1], ordered[n - k], max(0.0, 1 - 2 * beyond))


def best_of(samples: Mapping[str, Sequence[float]]) -> str:
    """The contestant with the least median."""
    return min(samples, key=lambda name: statistics.median(samples[name]))


def over_best(samples: Mapping[str, Sequence[float]], chosen: str) -> float:
    """How many times as long as the best it takes: the median over the rounds, each against the best of all others."""
    ratios = []
    for i, seconds in enumerate(samples[chosen]):
        others = {name: [*each[:i], *each[i + 1 :]] or each for name, each in samples.items()}
        ratios.append(seconds / samples[best_of(others)][i])
    return statistics.median(ratios)


def ratio(name: str, slow: Sequence[float], fast: Sequence[float], **asked: float | None) -> Figure:
    """The ratio of the medians, with the interval of the median of the ratios of each round."""
    paired = [a / b for a, b in zip(slow, fast, strict=True)]
    value = statistics.median(slow) / statistics.median(fast)
    return Figure(name, value, "", median_interval(paired), **asked)


def difference(name: str, slow: Sequence[float], fast: Sequence[float], **asked: float | None) -> Figure:
    """How much longer `slow` takes, in microseconds: of the medians, with the interval of each round's difference."""
    us = UNITS["us"]
    apart = us * (statistics.median(slow) - statistics.median(fast))
    paired = [us * (a - b) for a, b in zip(slow, fast, strict=True)]
    return Figure(name, apart, "us", median_interval(paired), **asked)


def median_figure(name: str, seconds: Sequence[float], unit: str = "us", **asked: float | None) -> Figure:
    """The median in microseconds or milliseconds (`unit`), with its interval."""
    times = [UNITS[unit] * s for s in seconds]
    return Figure(name, statistics.median(times), unit, median_interval(times), **asked)


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


# --------------------------------------------------------------------------------------------------------- the loop


class Contestant(NamedTuple):
    """What is timed; `error(result)` tells how far a result is from the reference on this rank."""

    call: Callable[[], Any]
    error: Callable[[Any], float] | None = None


def relative_error(result: Any, reference: np.ndarray) -> float:
    """The largest difference, in units of the largest element; infinite if the shapes differ."""
    result = np.asarray(result)
    if result.shape != reference.shape:
        return math.inf
    if not reference.size:
        return 0.0
    largest = float(np.max(np.abs(reference)))
    return float(np.max(np.abs(result - reference))) / (largest or 1.0)


def checked(comm: Any, contestants: Mapping[str, Contestant], tolerance: float = TOLERANCE) -> dict[str, float]:
    """Call each once: its error, the largest of all ranks. Raises WrongResult, on all ranks, for a wrong one."""
    errors = {}
    for name, contestant in contestants.items():
        result = contestant.call()
        if contestant.error is not None:
            mine = np.array([contestant.error(result)])
            errors[name] = float(np.max(of_all_ranks(comm, mine)))
            if not errors[name] <= tolerance:  # a NaN is wrong too
                raise WrongResult(f"{name} is wrong: relative error {errors[name]:.2g}, at most {tolerance:g} allowed")
    return errors


class Calm:
    """Whether others use the cores: by a small product of each rank before a turn and after it, against its usual time.

    While the slowest takes more than CALM times that, a turn waits, WAITS times in the mean; one that was disturbed is
    taken again, TRIES times at most, and not more turns again than there are (or TRIES); then the one counts in which
    the products were disturbed least. What the turn itself took has no say in it. Collective over `comm`.
    """

    def __init__(self, comm: Any):
        self.comm = comm
        self._products = [np.ones((PROBE, PROBE), np.float32) for _ in range(3)]
        self._taken: list[float] = []
        self._turns = self._repeated = self._waited = self._disturbed = 0
        for _ in range(FIRST_PROBES):
            self.probe()

    @staticmethod
    def of(comm: Any) -> Calm | None:
        """None if ranks share a core: each is disturbed by the others then, whatever it does. Collective."""
        cores = min(launcher.cores_per_rank(), launcher.cores_beside_other_hosts())
        return Calm(comm) if of_all_ranks(comm, np.array([cores])).min() >= 1 else None

    def probe(self) -> float:
        """How many times as long as usual a product takes now, the best of some: usual is the lower decile of all."""
        a, b, c = self._products
        seconds = []
        for _ in range(PROBES):
            begun = perf_counter()
            np.matmul(a, b, out=c)
            seconds.append(perf_counter() - begun)
        self._taken.append(min(seconds))
        return min(seconds) / float(np.quantile(self._taken, 0.1))

    def awaited(self) -> float:
        """How much this rank is disturbed, once others rest on all ranks, or there has been enough waiting."""
        while True:
            disturbed = self.probe()
            slowest = float(of_all_ranks(self.comm, np.array([disturbed])).max())
            if slowest <= CALM or self._waited >= WAITS * max(self._turns, TRIES):
                return disturbed
            self._waited += 1
            sleep(WAIT_SECONDS)

    def least_disturbed(self, turn: Callable[[], tuple[float, float]]) -> float:
        """The seconds of `turn`, which returns how much this rank was disturbed, and seconds."""
        self._turns += 1
        tries: list[tuple[float, float]] = []
        most = max(self._turns, TRIES)
        while not tries or (min(tries)[0] > CALM and len(tries) < TRIES and self._repeated < most):
            self._repeated += bool(tries)
            disturbed, seconds = turn()
            tries.append((float(of_all_ranks(self.comm, np.array([disturbed])).max()), seconds))
        self._disturbed += min(tries)[0] > CALM
        return min(tries)[1]

    def undisturbed(self, measured: Callable[[], float]) -> float:
        """What `measured` says in a turn; it is the same on all ranks."""

        def turn() -> tuple[float, float]:
            before, value = self.awaited(), measured()
            return max(before, self.probe()), value

        return self.least_disturbed(turn)

    def told(self) -> str:
        """How it went since this was last asked, in words."""
        turns, repeated, disturbed = self._turns, self._repeated, self._disturbed
        self._turns = self._repeated = self._waited = self._disturbed = 0
        words = f"{turns} turns, {repeated} repeated because others used the cores"
        return f"{words}, as they did in {disturbed} of those that count"


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
    calm: Calm | None = None,
) -> dict[str, list[float]]:
    """Seconds a call of each contestant, round by round: those of the slowest rank. Collective over `comm` of mpi4py.

    Each turn begins together after `idle` seconds of silence (connections lose their window, token buckets fill: all
    begin alike), and is `calls` calls long. `warmup` turns before all that make plans, memory and connections.
    `before(name)` and `after(name, result)` each turn are not timed. With `calm`, turns that others disturb are
    repeated.
    """

    def turn(name: str) -> tuple[float, float]:
        call, disturbed = contestants[name], 0.0
        if before is not None:
            before(name)
        sleep(idle)
        if calm is not None:
            disturbed = calm.awaited()
        meet(comm)
        begun = perf_counter()
        for _ in range(calls):
            result = call()
        taken = (perf_counter() - begun) / calls
        if calm is not None:
            disturbed = max(disturbed, calm.probe())
        if after is not None:
            after(name, result)
        return disturbed, taken

    seconds = np.zeros((len(contestants), warmup + rounds))
    names = list(contestants)
    for i in range(warmup + rounds):
        for place in range(len(names)):
            k = (i + place) % len(names)
            if calm is None or i < warmup:
                _, seconds[k, i] = turn(names[k])
            else:
                seconds[k, i] = calm.least_disturbed(partial(turn, names[k]))
    seconds = seconds[:, warmup:].copy()
    slowest = of_all_ranks(comm, seconds).max(axis=0)
    return dict(zip(contestants, slowest.tolist(), strict=True))


def meet(comm: Any) -> None:
    """A barrier that leaves the cores to those who still work; the second one lets all go together."""
    request, seconds = comm.Ibarrier(), launcher.timeout()
    end = perf_counter() + seconds
    while not request.Test():
        if perf_counter() > end:
            raise WaitTimeout(f"not all ranks came to a measurement within {seconds:g} s (FOMPI_TIMEOUT)")
        sleep(5e-5)
    comm.Barrier()


def texts(comm: Any, mine: str) -> list[str]:
    """A short text of every rank, on every rank. Collective."""
    sent = np.frombuffer(mine.encode()[:512].ljust(512, b"\0"), np.uint8)
    rows = of_all_ranks(comm, sent)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]


def of_all_ranks(comm: Any, mine: np.ndarray) -> np.ndarray:
    everything = np.empty((comm.Get_size(), *mine.shape), mine.dtype)
    comm.Allgather(mine, everything)
    return everything
