"""How times are taken and compared: statistics, and the loop of runs, in one process."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import noise
from fompi.tuning import rounds
from fompi.tuning.rounds import (
    Figure,
    Row,
    WrongResult,
    alternate,
    best_of,
    checked,
    median_interval,
    ratio,
    relative_error,
    texts,
)
from means import geometric_mean
from noise import TRIES, NoiseMonitor
from planner import over_best


class Alone:
    """The communicator of a single rank."""

    def Get_size(self):
        return 1

    def Ibarrier(self):
        return self

    def Test(self):
        return True

    def Barrier(self):
        pass

    def Allgather(self, own, everything):
        everything[0] = own


class Two(Alone):
    """The communicator of two ranks. The other rank always has twice the values of this rank."""

    def Get_size(self):
        return 2

    def Allgather(self, own, everything):
        everything[0], everything[1] = own, 2 * own


# ------------------------------------------------------------------------------------------------------ statistics


@pytest.mark.parametrize(("n", "place"), [(6, 1), (8, 1), (9, 2), (15, 4), (20, 6), (50, 18), (100, 40)])
def test_the_interval_is_that_of_published_tables(n, place):
    """Tables of the sign test name these two order statistics for 95 %."""
    interval = median_interval([*range(n, 0, -1)])
    assert (interval.low, interval.high) == (place, n + 1 - place) and 0.95 <= interval.level < 1


@pytest.mark.parametrize("n", range(1, 6))
def test_the_interval_of_few_samples_is_their_range(n):
    """Its text contains its lower level."""
    interval = median_interval([*range(n)])
    assert (interval.low, interval.high) == (0, n - 1)
    assert interval.level == pytest.approx(1 - 2 * 0.5**n) and interval.level < 0.95
    assert f"({interval.level:.0%})" in str(interval)


def test_the_median_is_in_the_interval_as_often_as_the_level_says():
    """For a skewed distribution with a known median."""
    draw = np.random.default_rng(1)
    inside = 0
    for _ in range(1000):
        low, high, level = median_interval(draw.exponential(size=15).tolist())
        inside += low <= math.log(2) <= high
    assert inside / 1000 == pytest.approx(level, abs=0.025)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=40))
def test_the_median_is_in_its_interval(samples):
    interval = median_interval(samples)
    assert interval.low <= statistics.median(samples) <= interval.high


def test_no_samples():
    with pytest.raises(ValueError, match="there are no samples"):
        median_interval([])


def test_the_interval_of_a_ratio_comes_from_pairs():
    """Rounds that are slow for both contestants do not widen it."""
    disturbed = [1.0, 5.0, 1.0, 3.0, 1.0, 9.0, 1.0]
    figure = ratio("a / b", [2 * s for s in disturbed], disturbed, least=1.9, limit=2.0)
    assert figure.value == 2 and figure.interval[:2] == (2, 2) and figure.reached and figure.limit == 2
    with pytest.raises(ValueError):
        ratio("a / b", [1.0], [1.0, 2.0])


def test_over_best():
    """Each round is compared with the contestant that is the best in all other rounds."""
    slow, fast = [2.0, 2.2, 2.4], [1.0, 1.1, 1.2]
    assert over_best({"slow": slow, "fast": fast}, "slow") == pytest.approx(2.0)
    assert over_best({"slow": slow, "fast": fast}, "fast") == 1.0
    assert over_best({"only": [3.0]}, "only") == 1.0
    assert over_best({"a": [1.0] * 4 + [9.0], "b": [1.5] * 4 + [0.1]}, "a") == 1.0


def test_over_best_is_fair_among_equal_contestants():
    """Nine contestants differ only by chance. The least median of all is less than the others by luck."""
    draw = np.random.default_rng(11)
    naive, fair = [], []
    for _ in range(300):
        samples = {str(i): list(draw.lognormal(0.0, 0.03, 7)) for i in range(9)}
        naive.append(statistics.median(samples["0"]) / statistics.median(samples[best_of(samples)]))
        fair.append(over_best(samples, "0"))
    assert statistics.fmean(naive) > 1.012 and abs(statistics.fmean(fair) - 1) < 0.004


def test_geometric_mean():
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1) and geometric_mean([3.0]) == pytest.approx(3)


@pytest.mark.parametrize(
    ("targets", "reached"),
    [({}, None), ({"least": 1.0}, True), ({"least": 1.1}, False), ({"most": 1.0}, True), ({"most": 0.9}, False),
     ({"least": 0.9, "most": 1.1}, True), ({"least": 0.9, "most": 0.95}, False)],
)  # fmt: skip
def test_targets_of_figures_and_rows(targets, reached):
    figure = Figure("", 1.0, **targets)
    assert figure.reached is reached and Row("", "", figures=[figure]).reached is reached
    assert Row("", "", figures=[figure, Figure("", 0.0, least=1.0)]).reached is False
    assert Figure("", math.nan, **targets).reached in (None, False)


# -------------------------------------------------------------------------------------------------------- the loop


@pytest.fixture
def spend(monkeypatch):
    """spend(seconds): these pass on the clock of the measurements, and not in the test."""
    clock = [100.0]

    def spend(seconds):
        clock[0] += seconds

    monkeypatch.setattr(rounds, "perf_counter", lambda: clock[0])
    return spend


def test_each_round_starts_with_another_contestant():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ABC"}
    measured = alternate(Alone(), calls, 3, calls=2, warmup=1)
    assert "".join(order) == "AABBCC" + "BBCCAA" + "CCAABB" + "AABBCC"  # the first round warms up
    assert measured.keys() == calls.keys() and all(len(s) == 3 and min(s) > 0 for s in measured.values())


def test_calls_before_and_after_a_run_are_not_timed(spend):
    seen = []
    measured = alternate(
        Alone(),
        {"a": lambda: spend(1.0) or len(seen)},
        2,
        calls=3,
        before=lambda name: seen.append(name) or spend(20.0),
        after=lambda name, result: seen.append(result) or spend(20.0),
    )
    assert seen == ["a", 1, "a", 3, "a", 5, "a", 7] and measured["a"] == [1.0, 1.0]


def test_a_time_is_per_call_and_of_the_slowest_rank(spend):
    for comm, seconds in ((Alone(), 0.5), (Two(), 1.0)):
        assert alternate(comm, {"nap": lambda: spend(0.5)}, 3, calls=2)["nap"] == [seconds] * 3


def monitor_with(monkeypatch, probes):
    """A monitor whose probes have these values: one before and one after each run."""
    monkeypatch.setattr(noise, "FIRST_PROBES", 0)
    monitor = NoiseMonitor(Alone())
    values = iter(probes)
    monkeypatch.setattr(monitor, "probe", lambda: next(values))
    return monitor


def test_a_disturbed_run_is_repeated(monkeypatch, spend):
    """The least disturbed try counts, not the fastest one. There are at most TRIES tries."""
    naps = iter([3.0, 1.0, 2.0])
    monitor = monitor_with(monkeypatch, [1.0, 1.5, 1.0, 1.4, 1.0, 1.1])
    measured = alternate(Alone(), {"a": lambda: spend(next(naps))}, 1, warmup=0, timed=monitor.measure)
    assert measured["a"] == [2.0]
    assert str(monitor.count()) == "1 run: 2 were repeated because others used the cores, 0 stayed disturbed"


def test_a_single_measurement_is_repeated_too(monkeypatch):
    """Even the first one after a count is repeated, until it is quiet or has had TRIES tries."""
    monitor = monitor_with(monkeypatch, [1.0, 1.6, 1.0, 1.5, 1.0, 1.4, 1.0, 1.0])
    values = iter([1.2, 1.3, 1.4, 1.0])
    assert monitor.measure(lambda: next(values)) == 1.0 and monitor.count() == (1, 3, 0)
    monitor = monitor_with(monkeypatch, iter(lambda: 1.6, 0))
    assert monitor.measure(lambda: 1.1) == 1.1 and monitor.count().repeated == TRIES - 1


def test_a_run_waits_until_others_rest(monkeypatch):
    """Then it need not be repeated. If others never rest, the waits are limited."""
    monkeypatch.setattr(noise, "WAIT_SECONDS", 0.001)
    monitor = monitor_with(monkeypatch, [1.3, 1.2, 1.0, 1.0])
    assert monitor.measure(lambda: 1.1) == 1.1 and monitor.count() == (1, 0, 0)
    monitor, probes = monitor_with(monkeypatch, iter(lambda: 1.3, 0)), []
    monkeypatch.setattr(monitor, "probe", lambda: probes.append(1) or 1.3)
    alternate(Alone(), {"a": lambda: None}, 50, warmup=0, timed=monitor.measure)
    assert len(probes) <= 2 * 2 * 50 + noise.WAITS * (50 + TRIES)


def test_the_number_of_repeated_runs_is_limited(monkeypatch):
    """If others never rest, there are at most twice as many runs. `count` then starts at 0 again."""
    monitor = monitor_with(monkeypatch, iter(lambda: 1.6, 0))
    calls = []
    alternate(
        Alone(), {"a": lambda: calls.append(1), "b": lambda: calls.append(1)}, 10, warmup=1, timed=monitor.measure
    )
    assert 2 + 20 < len(calls) <= 2 + 40 + TRIES
    assert monitor.count().disturbed == 20 and monitor.count().timed == 0


def test_a_probe_is_slow_beside_its_usual_time(monkeypatch, spend):
    """Of its products the fastest counts: one that is disturbed does not matter."""
    seconds = [0.001]
    monkeypatch.setattr(noise.np, "matmul", lambda *operands, out: spend(seconds[0]))
    monitor = NoiseMonitor(Alone())
    assert monitor.probe() == pytest.approx(1.0)
    seconds[0] = 0.0015
    assert monitor.probe() == pytest.approx(1.5)
    several = iter([0.0015, 0.001, 0.0015])
    monkeypatch.setattr(noise.np, "matmul", lambda *operands, out: spend(next(several)))
    assert monitor.probe() == pytest.approx(1.0)


def test_a_probe_is_a_product():
    """On the clock of the machine: no more is known of it."""
    assert 0 < NoiseMonitor(Alone()).probe() < math.inf


def test_a_wrong_result_is_not_timed():
    right, wrong = np.arange(4.0), np.array([0.0, 1.0, 2.0, 3.1])

    def errors(comm, **results):
        return checked(comm, {name: lambda y=y: y for name, y in results.items()}, lambda y: relative_error(y, right))

    assert errors(Alone(), a=right) == {"a": 0}
    for result in (wrong, right[:3], np.full(4, np.nan)):
        with pytest.raises(WrongResult, match="b is wrong"):
            errors(Alone(), a=right, b=result)
    nearly = right * (1 + 7e-6)
    assert errors(Alone(), a=nearly)["a"] == pytest.approx(7e-6)
    with pytest.raises(WrongResult):  # on the other rank
        errors(Two(), a=nearly)


def test_errors_are_relative_to_the_largest():
    assert relative_error(np.zeros((0, 3)), np.zeros((0, 3))) == 0
    assert relative_error(np.zeros(2), np.zeros(2)) == 0
    assert relative_error(np.array([99.0, 1.0]), np.array([100.0, 1.0])) == pytest.approx(0.01)


def test_texts_of_all_ranks():
    assert texts(Alone(), "Zürich") == ["Zürich"]
    assert len(texts(Alone(), "x" * 1000)[0]) == 512
