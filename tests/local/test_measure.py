"""Statistics of the benchmarks, their loop in one process, and what becomes of their rows."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fompi.bench import measure, table
from fompi.tuning.rounds import (
    TRIES,
    Calm,
    Contestant,
    Figure,
    Row,
    WrongResult,
    alternate,
    best_of,
    checked,
    geometric_mean,
    median_interval,
    over_best,
    ratio,
    relative_error,
    texts,
)

ROOT = Path(__file__).resolve().parents[2]
FACTS = {
    "command": "python -m fompi bench none",
    "date": "2026-01-01",
    "mpi": {"library": "Some MPI", "version": "1.0"},
    "versions": {},
    "ranks": [],
    "cores_per_rank": 1.0,
}


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

    def Allgather(self, mine, everything):
        everything[0] = mine


class Two(Alone):
    """Two ranks, of which the other one always has twice of what we have."""

    def Get_size(self):
        return 2

    def Allgather(self, mine, everything):
        everything[0], everything[1] = mine, 2 * mine


# ------------------------------------------------------------------------------------------------------ statistics


@pytest.mark.parametrize(("n", "place"), [(6, 1), (8, 1), (9, 2), (15, 4), (20, 6), (50, 18), (100, 40)])
def test_the_interval_of_the_tables(n, place):
    """The two order statistics that tables of the sign test name for 95 %."""
    interval = median_interval([*range(n, 0, -1)])
    assert (interval.low, interval.high) == (place, n + 1 - place) and 0.95 <= interval.level < 1


@pytest.mark.parametrize("n", range(1, 6))
def test_few_samples_have_their_range_and_say_so(n):
    interval = median_interval([*range(n)])
    assert (interval.low, interval.high) == (0, n - 1)
    assert interval.level == pytest.approx(1 - 2 * 0.5**n) and interval.level < 0.95
    assert f"({interval.level:.0%})" in str(interval)


def test_the_interval_covers_as_often_as_it_says():
    """Of a skewed distribution, whose median is known."""
    draw = np.random.default_rng(1)
    inside = 0
    for _ in range(1000):
        low, high, level = median_interval(draw.exponential(size=15).tolist())
        inside += low <= math.log(2) <= high
    assert inside / 1000 == pytest.approx(level, abs=0.025)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=40))
def test_the_median_lies_in_its_interval(samples):
    interval = median_interval(samples)
    assert interval.low <= statistics.median(samples) <= interval.high


def test_no_samples():
    with pytest.raises(ValueError, match="no samples"):
        median_interval([])


def test_a_ratio_is_of_medians_its_interval_of_pairs():
    """Rounds that are slow for both do not widen it."""
    disturbed = [1.0, 5.0, 1.0, 3.0, 1.0, 9.0, 1.0]
    found = ratio("a / b", [2 * s for s in disturbed], disturbed, least=1.9, limit=2.0)
    assert found.value == 2 and found.interval[:2] == (2, 2) and found.reached and found.limit == 2
    with pytest.raises(ValueError):
        ratio("a / b", [1.0], [1.0, 2.0])


def test_how_far_from_the_best():
    """Each round is held against the best of all other rounds: nobody is the best by the luck of that round."""
    slow, fast = [2.0, 2.2, 2.4], [1.0, 1.1, 1.2]
    assert over_best({"slow": slow, "fast": fast}, "slow") == pytest.approx(2.0)
    assert over_best({"slow": slow, "fast": fast}, "fast") == 1.0
    assert over_best({"only": [3.0]}, "only") == 1.0
    assert over_best({"a": [1.0] * 4 + [9.0], "b": [1.5] * 4 + [0.1]}, "a") == 1.0


def test_among_equals_the_best_is_not_better():
    """Nine that differ by chance alone: the least median is ahead of each by luck, which does not count."""
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
    ("asked", "reached"),
    [({}, None), ({"least": 1.0}, True), ({"least": 1.1}, False), ({"most": 1.0}, True), ({"most": 0.9}, False),
     ({"least": 0.9, "most": 1.1}, True), ({"least": 0.9, "most": 0.95}, False)],
)  # fmt: skip
def test_what_is_reached(asked, reached):
    figure = Figure("", 1.0, **asked)
    assert figure.reached is reached and Row("", "", figures=[figure]).reached is reached
    assert Row("", "", figures=[figure, Figure("", 0.0, least=1.0)]).reached is False
    assert Figure("", math.nan, **asked).reached in (None, False)


# -------------------------------------------------------------------------------------------------------- the loop


def test_rounds_are_interleaved_and_their_start_goes_round():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ABC"}
    measured = alternate(Alone(), calls, 3, calls=2, warmup=1)
    assert "".join(order) == "AABBCC" + "BBCCAA" + "CCAABB" + "AABBCC"  # the first of them warms up
    assert measured.keys() == calls.keys() and all(len(s) == 3 and min(s) > 0 for s in measured.values())


def test_what_stands_before_and_after_a_turn_is_not_timed():
    seen = []
    measured = alternate(
        Alone(),
        {"a": lambda: len(seen)},
        2,
        calls=3,
        before=lambda name: seen.append(name) or time.sleep(0.02),
        after=lambda name, result: seen.append(result) or time.sleep(0.02),
    )
    assert seen == ["a", 1, "a", 3, "a", 5, "a", 7] and max(measured["a"]) < 0.01


def test_the_time_is_that_of_a_call_on_the_slowest_rank():
    seconds = {"nap": lambda: time.sleep(0.01)}
    mine, slowest = (min(alternate(comm, seconds, 3, calls=2)["nap"]) for comm in (Alone(), Two()))
    assert 0.01 <= mine < 0.019 and 0.02 <= slowest < 0.038


def quiet_calm(monkeypatch, disturbed):
    """A Calm whose products take as long as `disturbed` says: the first 20 are usual, then two for each turn."""
    calm = Calm(Alone())
    told = iter(disturbed)
    monkeypatch.setattr(calm, "probe", lambda: next(told))
    return calm


def test_a_turn_that_others_disturb_is_taken_again(monkeypatch):
    """The one counts that was disturbed least, whatever it took itself; no turn more often than TRIES."""
    took = iter([0.03, 0.01, 0.02])
    calm = quiet_calm(monkeypatch, [1.0, 1.5, 1.0, 1.4, 1.0, 1.1])
    measured = alternate(Alone(), {"a": lambda: time.sleep(next(took))}, 1, warmup=0, calm=calm)
    assert measured["a"][0] == pytest.approx(0.02, rel=0.4)
    assert calm.told().startswith("1 turns, 2 repeated because others used the cores, as they did in 0 ")


def test_a_figure_counts_that_was_measured_while_others_rested(monkeypatch):
    """Of the speed of the cores before a row as of its turns; the first of a row may be repeated too."""
    calm = quiet_calm(monkeypatch, [1.0, 1.6, 1.0, 1.5, 1.0, 1.4, 1.0, 1.0])
    said = iter([1.2, 1.3, 1.4, 1.0])
    assert calm.undisturbed(lambda: next(said)) == 1.0 and calm.told().startswith("1 turns, 3 repeated")
    calm = quiet_calm(monkeypatch, iter(lambda: 1.6, 0))
    assert calm.undisturbed(lambda: 1.1) == 1.1 and f"{TRIES - 1} repeated" in calm.told()


def test_a_turn_waits_until_others_rest(monkeypatch):
    """On any rank: then it need not be taken again. Who never rests is not waited for long."""
    monkeypatch.setattr(measure, "WAIT_SECONDS", 0.001)
    calm = quiet_calm(monkeypatch, [1.3, 1.2, 1.0, 1.0])
    assert calm.undisturbed(lambda: 1.1) == 1.1 and calm.told().startswith("1 turns, 0 repeated")
    calm, probes = quiet_calm(monkeypatch, iter(lambda: 1.3, 0)), []
    monkeypatch.setattr(calm, "probe", lambda: probes.append(1) or 1.3)
    alternate(Alone(), {"a": lambda: None}, 50, warmup=0, calm=calm)
    assert len(probes) <= 2 * 2 * 50 + measure.WAITS * (50 + TRIES)


def test_turns_are_not_repeated_for_ever(monkeypatch):
    """Where others never rest, there are at most twice as many turns; what is told starts anew."""
    calm = quiet_calm(monkeypatch, iter(lambda: 1.6, 0))
    count = []
    alternate(Alone(), {"a": lambda: count.append(1), "b": lambda: count.append(1)}, 10, warmup=1, calm=calm)
    assert 2 + 20 < len(count) <= 2 + 40 + TRIES
    assert "as they did in 20 of those that count" in calm.told() and calm.told().startswith("0 turns")


def test_a_core_by_itself_is_calm():
    calm = Calm(Alone())
    assert min(calm.probe() for _ in range(10)) < 1.5


def test_a_wrong_result_is_not_timed():
    right, wrong = np.arange(4.0), np.array([0.0, 1.0, 2.0, 3.1])

    def contestant(result):
        return Contestant(lambda: result, lambda y: relative_error(y, right))

    assert checked(Alone(), {"a": contestant(right), "unchecked": Contestant(lambda: None)}) == {"a": 0}
    for result in (wrong, right[:3], np.full(4, np.nan)):
        with pytest.raises(WrongResult, match="b is wrong"):
            checked(Alone(), {"a": contestant(right), "b": contestant(result)})
    nearly = right * (1 + 7e-6)
    assert checked(Alone(), {"a": contestant(nearly)})["a"] == pytest.approx(7e-6)
    with pytest.raises(WrongResult):  # on the other rank
        checked(Two(), {"a": contestant(nearly)})


def test_errors_are_relative_to_the_largest():
    assert relative_error(np.zeros((0, 3)), np.zeros((0, 3))) == 0
    assert relative_error(np.zeros(2), np.zeros(2)) == 0
    assert relative_error(np.array([99.0, 1.0]), np.array([100.0, 1.0])) == pytest.approx(0.01)


def test_texts_of_all_ranks():
    assert texts(Alone(), "Zürich") == ["Zürich"]
    assert len(texts(Alone(), "x" * 1000)[0]) == 512


# ------------------------------------------------------------------------------------------------------- the table


@pytest.fixture
def rows():
    samples = {"native": [0.2, 0.21, 0.22], "fompi | direct": [0.1, 0.1, 0.1]}
    row = Row(
        "all_gather",
        "2 ranks",
        samples,
        "native",
        {"wire": 0.09},
        {"fompi | direct": 0.11},
        absent={"other": "not installed"},
        errors={"native": 1e-7},
        progress="polling",
        marks=("emulated accelerator",),
    )
    reached = row.ratio("native", "fompi | direct", least=2.0, limit=2.5)
    missed = Figure("exposed", 0.5, "%", most=0.2)
    return [
        Row(**{**row.__dict__, "figures": (reached, missed)}),
        Row("all rows", "", figures=[Figure("mean", 1.0)]),
    ]


def test_json_holds_every_sample(rows):
    read = json.loads(table.to_json(rows, FACTS))
    assert read["about"] == FACTS
    first, last = read["rows"]
    assert first["samples"] == {name: list(s) for name, s in rows[0].samples.items()}
    assert first["seconds"]["native"] == {"median": 0.21, "p99": pytest.approx(0.2198), "least": 0.2, "most": 0.22}
    assert [figure["reached"] for figure in first["figures"]] == [True, False] and first["reached"] is False
    assert first["figures"][0]["interval"]["low"] == pytest.approx(2) and last["reached"] is None
    assert first["marks"] == ["emulated accelerator"] and first["absent"] == {"other": "not installed"}


def test_markdown_says_all(rows):
    text = table.markdown(rows, FACTS)
    figures, times = text.split("\n\n", 2)[1:]
    assert "| 2.100 | 2.000 to 2.200 (75%) | ≥ 2 | 2.5 | yes | emulated accelerator |" in figures
    assert "| 0.500 % |  | ≤ 0.2 |  | **no** |" in figures and "| all rows | mean | 1.000 |" in figures
    assert times.startswith("**all_gather, 2 ranks, 3 rounds, emulated accelerator, polling**")
    body = [line for line in times.splitlines() if line.startswith("|")]
    assert body[2].startswith("| fompi \\| direct | 100.00 | 100.00 to 100.00 | 100.00 | 2.100")  # the fastest first
    assert body[0].endswith(" | predicted / it |") and body[2].endswith(" | 1.100 |") and body[3].endswith(" |  |")
    assert "| limit: wire | 90.00 |" in times and "| other: not installed |" in times
    assert len({line.replace("\\|", "").count("|") for line in body}) == 1, "as many cells in every line"


@pytest.mark.parametrize(("name", "begins"), [("rows.png", b"\x89PNG"), ("rows.svg", b"<?xml")])
def test_a_plot(rows, tmp_path, name, begins):
    table.plot(rows, tmp_path / name)
    drawn = (tmp_path / name).read_bytes()
    assert drawn.startswith(begins) and len(drawn) > 5000


def test_a_plot_without_matplotlib_is_refused_before_measuring(tmp_path):
    """By a path on which it cannot be found."""
    code = "import sys; sys.modules['matplotlib'] = None; from fompi.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "bench", "collectives", "--plot", str(tmp_path / "x.png")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == 2 and 'pip install "fompi[plot]"' in done.stderr and "Traceback" not in done.stderr
