"""Figures, targets and verdicts of the suites, on made-up samples."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

import fused as sliced_fused
import papers
import peers
import plain_mpi
import planner
from fompi.bench import trial
from fompi.bench.fused import FusedCase
from fompi.bench.measure import DEFAULT, Bench
from fompi.cli.output import unwritable
from fompi.model.machine import Level, Machine
from fompi.tuning.rounds import Row

COMM = SimpleNamespace(engine=SimpleNamespace(progress_mode="helper"), rank=0, size=2)


class Hosts:
    """The part of a Cluster that figures and verdicts use."""

    def __init__(self, shared=False):
        self.shared = shared

    def runs(self):
        return "7 runs"


def bench(shared=False):
    return Bench(COMM, Hosts(shared), 7)


def samples(**seconds):
    """Seven rounds of each, without noise."""
    return {name.replace("_", " "): [each] * 7 for name, each in seconds.items()}


def fused_row(best=1.06, unfused=1.9, sliced=1.2, cpu=0.02, shared=False, k=512):
    named = samples(**{peers.KERNEL: 1.0, sliced_fused.BARE: 0.9, DEFAULT: 1.1, "fompi direct, 2 slices": best})
    named |= dict.fromkeys(plain_mpi.UNFUSED, [unfused] * 7)
    named |= {f"{n} slices, {way}": [sliced] * 7 for n in sliced_fused.SLICES for way in ("library", "P2P")}
    case = FusedCase("matmul_reduce_scatter", 2048, 2048, k)
    row = Row(str(case), "two hosts", named, "fompi direct, 2 slices")
    row = sliced_fused.evaluated(bench(shared), case, cpu, row)
    return sliced_fused.with_slices(bench(shared), row)


@pytest.mark.parametrize(
    ("seconds", "missed"),
    [
        ({}, []),
        ({"best": 2.0, "sliced": 2.0}, ["low end"]),  # a twentieth slower than without overlap
        ({"sliced": 1.02}, ["4 slices|slices"]),
        ({"cpu": 0.1}, ["c_m / T_m"]),
        ({"k": 1024, "best": 1.3, "sliced": 1.4}, ["unfused"]),
        ({"best": 9.0, "cpu": 0.5, "shared": True}, []),  # without links there are no targets
    ],
)
def test_fused(seconds, missed):
    """`missed`: parts of the names of the figures that miss their targets."""
    row = fused_row(**seconds)
    names = [figure.name for figure in row.figures if figure.reached is False]
    assert len(names) == len(missed) and all(
        any(word in name for word in words.split("|")) for name, words in zip(names, missed, strict=True)
    )
    assert bool(row.marks) == ("cpu" in seconds and not seconds.get("shared"))
    assert row.reached is (None if seconds.get("shared") else not missed)


def test_void_rows_of_fused_do_not_count():
    good, void = fused_row(best=1.05), fused_row(best=2.0, cpu=0.5, sliced=2.5)
    figures = {figure.name: figure for figure in sliced_fused.summary(bench(), [good, void]).figures}
    bound = figures["bound / time, geometric mean of 1 rows"]
    assert bound.value == pytest.approx(1.02 / 1.05) and bound.reached
    assert figures["best slices / fompi, geometric mean"].reached
    assert not sliced_fused.summary(bench(), [fused_row(best=1.2)]).reached


@pytest.mark.parametrize(
    ("ratio", "best", "reached"),
    [
        (0.56, 1.0, True),
        (0.56, 1.01, False),
        (1.0, 1.03, True),
        (1.0, 1.05, False),
        (2.0, 2.06, True),
        (2.0, 2.1, False),
    ],
)  # fmt: skip
def test_papers(ratio, best, reached):
    """T_c is 1 and T_m is `ratio`. The targets: exposed time, without overlap / fompi, and fompi / bare exchange."""
    named = samples(**{papers.KERNEL: 1.0, papers.BARE: ratio, "fompi ring, 4 slices": best})
    named |= dict.fromkeys(papers.UNFUSED, [1 + ratio] * 7) | dict.fromkeys(papers.SLICED, [1.08 * best] * 7)
    setting = FusedCase("all_gather_matmul", papers.M, papers.N, papers.K)
    row = papers.evaluated(bench(), setting, ratio, "fompi ring, 4 slices", named)
    assert row.reached is reached and row.marks == ["emulated accelerator"]
    assert papers.evaluated(bench(True), setting, ratio, "fompi ring, 4 slices", named).reached is None


@pytest.mark.parametrize(
    ("best", "sliced", "others", "is_missed"),
    [(1.0, 1.0, 1.4, False), (1.0, 0.96, 1.4, True), (1.0, 1.0, 1.2, True), (1.55, 1.6, 2.1, True)],
)
def test_peers(best, sliced, others, is_missed):
    """The targets: slices in each row, other peers as a mean of the balanced rows, never slower than unfused."""
    named = samples(**{peers.KERNEL: 1.0, peers.LINK: 0.8, "unfused, mpi4py blocking": 1.5, "unfused, mpi4py P2P": 1.5})
    named |= samples(**{"unfused, fompi P2P": 1.5, "2 slices, library": sliced, "gloo blocking": others})
    named |= dict.fromkeys(peers.FUSED, [best] * 7)
    row = Row("a row", "", named)
    row = Row("a row", "", named, figures=peers.figures(bench(), row, row.best(peers.FUSED)))
    figures = [*row.figures, *peers.summary(bench(), [row]).figures]
    names = [figure.name for figure in figures if figure.reached is False]
    assert bool(names) == is_missed, names


@pytest.mark.parametrize(
    ("best", "verdict", "words"),
    [
        (1.0, "gain", "overlap gains 1.90x in 1 of 1 operations with the best schedule"),
        (1.9, "nothing", "nothing gained: the gain is less than the spread."),
        (2.5, "slower", "nothing gained (slower): the gain is less than the spread."),
    ],
)
def test_the_verdict_of_a_trial(best, verdict, words, monkeypatch):
    """A gain, nothing and a loss are named. The table has a line for each way to run the operation."""
    for cores in ("cores_per_rank", "cores_beside_other_hosts"):
        monkeypatch.setattr(trial.launcher, cores, lambda: 2.0)
    found = trial.Trial.of((8, 8, 8), 2, Hosts(), [fused_row(best=best)])
    assert [outcome.verdict for outcome in found.outcomes] == [verdict]
    assert found.verdict.startswith(words) and not found.warnings
    assert [cells[0].strip().partition(" (")[0] for cells in found._rows()] == [
        "without overlap",
        "default schedule",
        "best schedule",
        "perfect overlap of the same",
    ]
    assert found.values()["verdict"] == found.verdict


@pytest.mark.parametrize(
    ("seconds", "shared", "words"),
    [
        (
            0.5,
            False,
            "; int8 gains 2.00x more in 1 of 1 operations, and results are off by at most 0.4% of the largest.",
        ),
        (1.0, False, "; int8 gains nothing."),
        (1.5, True, "; int8 gains nothing (slower): encoding costs more than copies in memory."),
    ],
)
def test_the_verdict_on_smaller_messages(seconds, shared, words):
    """They are compared with the faster one of the default and the best schedule."""
    row = fused_row(best=1.0, shared=shared)
    row = replace(row, samples=row.samples | {"int8": [seconds] * 7}, errors={"int8": 0.004})
    found = trial.Trial.of((8, 8, 8), 2, Hosts(shared), [row], wire="int8")
    assert found.verdict.endswith(words), found.verdict
    assert [*found._rows()][-1][0] == "messages in int8"
    assert found.values()["outcomes"][0]["wire"]["gain"] == pytest.approx(1 / seconds)


@pytest.mark.parametrize(
    ("kernel", "unfused", "circumstance", "reason"),
    [
        (0.3e-3, 0.9e-3, "", "the operation takes less than 1 ms"),
        (0.97, 1.0, "crowded", "the kernel takes over 95% of the time without overlap, so there is little to hide"),
        (0.02, 1.0, "crowded", "the kernel takes under 5% of the time without overlap, so it can hide little"),
        (0.6, 1.0, "crowded", "crowded"),
        (0.6, 1.0, "", "the gain is less than the spread"),
    ],
)
def test_the_reason_why_nothing_is_gained(kernel, unfused, circumstance, reason):
    assert trial._reason(kernel, unfused, circumstance).startswith(reason)


def test_a_trial_warns_of_others_on_the_cores(monkeypatch):
    hosts = Hosts()
    assert not trial.Trial.of((8, 8, 8), 2, hosts, [fused_row()]).warnings
    assert not trial.Trial.of((8, 8, 8), 2, hosts, [fused_row()], (0.1, 2)).warnings
    (warning,) = trial.Trial.of((8, 8, 8), 2, hosts, [fused_row()], (1.2, 2)).warnings
    assert warning == "others used 1.2 of 2 cores: try again when the machine is idle"  # ranks that share cores too
    assert "8: measured as the next multiple of 3" in trial.Trial.of((8, 9, 9), 3, Hosts(), [fused_row()]).warnings[0]


def test_the_interval_of_few_rounds_has_its_level(monkeypatch):
    for cores in ("cores_per_rank", "cores_beside_other_hosts"):
        monkeypatch.setattr(trial.launcher, cores, lambda: 2.0)
    row = fused_row(best=1.0)
    few = replace(row, samples={name: each[:3] for name, each in row.samples.items()})
    gains = [[cells[3] for cells in trial.Trial.of((8, 8, 8), 2, Hosts(), [each])._rows()][2] for each in (row, few)]
    assert gains == ["1.90x (1.90 to 1.90)", "1.90x (1.90 to 1.90, 75%)"]


def measured(chosen: float, **others: float) -> planner._Measured:
    """The chosen plan `direct` and others in the first rounds. The finalists take the same time in the final rounds."""
    ran = samples(direct=chosen, **others)
    predicted, errors = dict.fromkeys(ran, 1.1), dict.fromkeys(ran, 0.0)
    first = Row("a row, first rounds", "", ran, "direct", predicted=predicted, errors=errors)
    return planner._Measured(first, Row("a row", "", {name: ran[name] for name in planner._finalists(first)}, "direct"))


def test_the_chosen_plan_is_compared_with_the_best_and_with_unfused():
    both = measured(1.0, unfused=1.5, ring=0.9)
    values = {figure.name: figure for figure in planner._compared(both, dict.fromkeys(both.first.samples, 1.0))}
    assert values["predicted / measured, direct"].value == pytest.approx(1.1)
    assert values["predicted / measured, unfused, at this row's kernel speed"].value == pytest.approx(1 / 1.5)
    assert values["chosen / best (ring)"].value == pytest.approx(1 / 0.9)
    assert values["low end of chosen / unfused"].reached
    slow = measured(1.6, unfused=1.5, ring=0.9)
    assert planner._compared(slow, dict.fromkeys(slow.first.samples, 1.0))[-1].reached is False


@pytest.mark.parametrize(
    ("others", "finalists"),
    [
        ({"ring": 1.2, "unfused": 1.1}, ["direct"]),
        ({"ring": 1.04, "unfused": 1.1, "sliced": 1.03}, ["direct", "sliced", "ring"]),
        (
            {"a": 0.8, "b": 0.9, "c": 0.7, "d": 0.85, "e": 0.95, "unfused": 1.02, "unfused p2p": 1.3},
            ["direct", "c", "a", "d", "b", "unfused"],
        ),
    ],
)
def test_plans_that_may_be_the_best_are_finalists(others, finalists):
    assert list(measured(1.0, **others).final.samples) == finalists


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("/no/such/folder/rows.json", "No such file"),
        ("-", None),
        (None, None),
    ],
)
def test_a_file_is_checked_before_anything_is_measured(file, words):
    refusal = unwritable(0, file)
    assert (refusal is None) == (words is None)
    if words is not None:
        assert isinstance(refusal, OSError) and words in str(refusal)


def test_the_bound_of_shaped_links(monkeypatch):
    """The links have the rates that netlab shapes, not the calibrated ones. Without netlab nothing changes."""
    found = replace(Machine.load("gigabit"), curve=((0.0, 1e-4), (1e6, 1.0)), levels=(Level(2, 1e-4, 1e6, False),))
    assert planner.shaped(found, 4) == found
    monkeypatch.setenv("NETLAB_PAYLOAD", "200,200,100,200;10")
    links = planner.shaped(found, 4)
    assert (links.bandwidth, links.curve, links.rates) == (200.0, (), (1.0, 1.0, 0.5, 1.0))
    assert links.levels == (Level(2, 1e-4, 10.0, True),)
    assert planner.shaped(found, 8) == found  # two ranks on a host
    monkeypatch.setenv("NETLAB_PAYLOAD", "200,200")
    assert planner.shaped(found, 2).levels == found.levels and not planner.shaped(found, 2).rates
