"""The text of the report, which rank 0 makes from the notes of all ranks."""

from __future__ import annotations

from time import perf_counter, sleep
from typing import NamedTuple

import pytest

import fompi
from fompi.base.errors import LaunchError
from fompi.base.layout import Partial, Shard, Spec
from fompi.engine.engine import Engine
from fompi.engine.intervals import RecentIntervals
from fompi.ops.operations import plan
from fompi.runtime.report import Report, called, percentile, why_not_overlapped
from fompi.runtime.report_text import MOST_LINES, full_text, overlap_warnings, short_text, text
from fompi.runtime.steps import Steps
from fompi.traces.trace import intersection, length


def noted(rank, **fields):
    known = {
        "title": "all_gather_matmul by direct", "call": "all_gather_matmul(float32 x[6, 8], w[8, 4])",
        "communicator": "tp", "number": 0, "members": [0, 2], "stamp": 7, "rank": rank, "calls": 12, "flops": 384,
        "p50": 0.2, "p99": 0.25,
        "wall": 0.2, "kernels": 0.11, "compute_alone": 0.1, "compute": 0.1, "slowdown": 1.1, "communication": 0.15,
        "messages_alone": 0.1, "hidden": 0.0, "exposed": 0.1 + 0.01 * rank, "tail": 0.001, "idle": 0.09, "nbytes": 4096,
        "elsewhere": 0.0,
        "warning": f"no overlap on rank {rank}", "waits": [[0.08, "80.000 ms for x[1] from rank 1"]],
    }  # fmt: skip
    return {**known, **fields}


REPORT = {
    "mpi": "MPICH 5.0.2",
    "size": 3,
    "progress": "helper",
    "ranks": [
        {"rank": 0, "host": "a", "operations": [noted(0), noted(0, stamp=9, title="all_reduce by ring", waits=[])]},
        {"rank": 2, "host": "b", "operations": [noted(1, compute_alone=None, messages_alone=None, warning=None)]},
    ],
}


def test_the_text():
    """Totals, a verdict, the largest exposures, and a line for each operation: that of the most exposed rank."""
    name = "all_gather_matmul(float32 x[6, 8], w[8, 4])"
    assert text(REPORT) == (
        "fompi report: 3 ranks, MPICH 5.0.2, progress: helper\n"
        "missing: the notes of rank 1\n"
        "total: 24 calls, 4.80 s on rank 0, which has the most exposed time: kernels 2.40 s, exposed 2.40 s, "
        "hidden 0 ms, messages alone 2.40 s\n"
        "verdict: 50% of the time in fompi is exposed. What would help: FOMPI_RECORD=run/, then `fompi advise run/`\n"
        f"exposed 1: 1.32 s in {name} by direct on tp: rank 1 waited 80.000 ms for x[1] from rank 1\n"
        "\n"
        "  calls   total ms    p50 ms   compute  messages    hidden   exposed  operation\n"
        f"     12   2400.000   200.000   100.000         -     0.000   110.000  {name} by direct on tp\n"
        f"     12   2400.000   200.000   100.000   100.000     0.000   100.000  {name} by ring on tp"
    )


def test_shares_that_do_not_fit():
    """Two ranks with the same products, one of which needs three times as long: a quarter of them is its share."""

    def report(seconds, flops=384):
        operations = [noted(0, kernels=0.11), noted(1, kernels=seconds, flops=flops)]
        return {**REPORT, "size": 2, "ranks": [{"rank": r, "operations": [o]} for r, o in enumerate(operations)]}

    said = (
        "shares: products took 3.96 s on rank 1. With shares that fit all would need 1.98 s, 2.00 times as fast: "
        "fompi.balance(comm, sizes), and rebalance"
    )
    assert said in text(report(0.33)).splitlines() and said in full_text(report(0.33)).splitlines()
    for fits in (report(0.11), report(0.11, 350), report(0.33, None), {**report(0.33), "size": 3}):
        assert "shares" not in text(fits)


def one(**fields):
    """A report of one operation on one rank."""
    return {**REPORT, "ranks": [{"rank": 0, "operations": [noted(0, **fields)]}]}


def marked(**fields):
    """A report of two communicators, with steps of 2 calls of the first and 1 of the second."""
    steps = {"count": 4, "total": 4.0, "p50": 0.9, "p99": 1.5, "tokens": 4000.0, "flops": 0.0, "calls": [8, 4]}
    operations = [noted(0), noted(0, communicator="dp", exposed=0.15, flops=None)]
    rank = {"rank": 0, "host": "a", "operations": operations, "steps": {**steps, **fields}}
    return {**REPORT, "size": 1, "flops_rate": 1e4, "ranks": [rank]}


def test_steps():
    """What one takes, how fast it is, and where its exposed time is. Without marks: the latter, of the whole job."""
    assert text(marked()).splitlines()[2:4] == [
        "steps: 4, 900 ms each (p99 1.50 s), 1,000 tokens/s, 7.68e-07 GFLOP/s a rank (8% of the 1e-05 of the machine)",
        "a step has 600 ms in fompi, 350 ms exposed (35%): tp 200 ms, dp 150 ms; 3 ms after the last kernels",
    ]
    assert "1,000 tokens/s, 2 GFLOP/s a rank (" in text(marked(flops=8e9))
    assert short_text(marked()).splitlines()[1].startswith("steps: 4, ")
    assert full_text(marked()).splitlines()[2].startswith("a step has 600 ms in fompi, ")
    report = marked()
    report["ranks"][0]["steps"] = None
    assert text(report).splitlines()[2] == "exposed by communicator: dp 1.80 s, tp 1.20 s"


def test_the_marks_of_steps():
    """Calls before the first mark are not in a step. Those of an operation that comes later are."""
    steps = Steps()
    for now, calls, tokens in ((1.0, {"a": 5}, 7.0), (3.0, {"a": 7}, 10.0), (6.0, {"a": 9, "b": 3}, 20.0)):
        steps.mark(now, calls, tokens)
    assert (steps.count, steps.total, [*steps.seconds], steps.tokens) == (2, 5.0, [2.0, 3.0], 30.0)
    assert [steps.calls(name) for name in "abc"] == [4, 3, 0]


@pytest.mark.parametrize(
    "wrong", [{"tokens": -1}, {"tokens": "many"}, {"flops": float("nan")}, {"tokens": float("inf")}]
)
def test_a_mark_with_a_wrong_number(wrong):
    with pytest.raises(fompi.ArgumentError, match=rf"mark_step: {next(iter(wrong))}=.* must be a number"):
        fompi.mark_step(**wrong)


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({"exposed": 0.004}, "communication is hidden: 2% of the time in fompi is exposed"),
        ({}, "50% of the time in fompi is exposed. What would help: FOMPI_RECORD=run/, then `fompi advise run/`"),
    ],
)
def test_verdicts(fields, verdict):
    line = next(line for line in text(one(**fields)).splitlines() if line.startswith("verdict: "))
    assert verdict in line


def test_the_largest_exposures_have_reasons():
    """The reason is named only if the exposed time is more than noise."""
    why = "unfused does not overlap: it was asked for"
    report = one(not_overlapped=why)
    assert f"on tp: {why}; rank 0 waited 80.000 ms for x[1] from rank 1\n" in text(report)
    assert full_text(report).endswith(f"\n  not overlapped: {why}")
    assert "exposed 1:" not in text(one(exposed=0.001, warning=None))


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"exposed": 0.004}, "nothing: communication is hidden: 2% of the time in fompi is exposed"),
        ({}, "FOMPI_RECORD=run/, then `fompi advise run/`"),
    ],
)
def test_three_lines(fields, advice):
    head, missing, hidden, help = short_text(one(**fields)).splitlines()
    assert head.endswith("; 12 calls, 2.40 s on rank 0") and missing == "missing: the notes of rank 1, 2"
    assert hidden.startswith("hidden: 0 ms of ") and " calls of all_gather_matmul(float32 x[6, 8], w[8, 4])" in hidden
    assert help == f"what would help: {advice} (FOMPI_REPORT=1 shows the calls)"


def test_without_calls():
    assert short_text({**REPORT, "ranks": []}).endswith("no operation was called")


def test_communicators_of_one_name_are_told_apart():
    operations = [
        noted(0),
        noted(0, number=1),
        noted(0, members=[1, 3], communicator="dp"),
        noted(0, communicator="dp"),
    ]
    shown = text({**REPORT, "ranks": [{"rank": 0, "operations": operations}]})
    labels = {line.partition(" by direct on ")[2] for line in shown.partition("  operation\n")[2].splitlines()}
    assert labels == {"tp", "tp #2", "dp of ranks 0, 2", "dp of ranks 1, 3"}


def test_a_long_report_fits_on_a_screen():
    operations = [noted(0, stamp=stamp, exposed=0.1 / (1 + stamp)) for stamp in range(40)]
    lines = text({**REPORT, "ranks": [{"rank": 0, "operations": operations}]}).splitlines()
    assert len(lines) <= 24 and lines[-1].endswith(" exposed (FOMPI_REPORT=full shows all)")
    assert f" {40 - MOST_LINES} more operations, " in lines[-1]


def test_a_call_has_its_sizes():
    x, w = Spec((8, 4), "float32", Shard(0)), Spec((4, 6), "float32", Shard(1))
    made = plan("all_gather_matmul", x, w, ranks=2)
    assert called(made, made.extents(1), 1) == "all_gather_matmul(float32 x[4, 4], w[4, 3])"
    assert called(made, None, 1) == "all_gather_matmul(float32[:, 4], w[4, 3])"
    made = plan("reduce", Spec((8,), "int64", Partial("max")), ranks=2, root=1)
    assert called(made, made.extents(0), 0) == "reduce(int64 x[8], root 1, max)"


class Ranks(NamedTuple):
    """The facts of a communicator that decide."""

    size: int = 2
    crowded: bool = False
    machine: object = None


@pytest.mark.parametrize(
    ("comm", "schedule", "why"),
    [
        (Ranks(), "direct", None),
        (Ranks(), "unfused", "unfused does not overlap: it was asked for"),
        (
            Ranks(crowded=True),
            "unfused_p2p",
            "unfused_p2p does not overlap: asked for, or chosen because this host has",
        ),
        (Ranks(machine="one"), "unfused_p2p", "unfused_p2p does not overlap: the best on the machine of FOMPI_MACHINE"),
        (Ranks(size=1), "direct", "one rank has no messages"),
    ],
)
def test_why_a_call_does_not_overlap(comm, schedule, why):
    x, w = Spec((8, 4), "float32", Shard(0)), Spec((4, 6), "float32", Shard(1))
    found = why_not_overlapped(comm, plan("all_gather_matmul", x, w, ranks=comm.size, schedule=schedule))
    assert found is None if why is None else found.startswith(why)
    alone = plan("all_reduce", Spec((8,), "float32", Partial()), ranks=2)
    assert why_not_overlapped(Ranks(), alone).startswith("no product to hide behind: ")


def test_the_full_text():
    """A block for each operation. The text says what was not measured, and which ranks are missing."""
    columns = (
        "rank       p50       p99   compute    slower  messages     alone    hidden   exposed      tail   "
        "(medians in ms)\n"
    )
    assert full_text(REPORT) == (
        "fompi report: 3 ranks, MPICH 5.0.2, progress: helper\n"
        "missing: the notes of rank 1\n"
        "\n"
        "all_gather_matmul(float32 x[6, 8], w[8, 4]) by direct on tp, 12 calls\n"
        f"{columns}"
        "   0   200.000   250.000   100.000      1.10   150.000   100.000     0.000   100.000     1.000\n"
        "   1   200.000   250.000   100.000      1.10   150.000         -     0.000   110.000     1.000   "
        "no compute baseline\n"
        "  rank 0 waited 80.000 ms for x[1] from rank 1\n"
        "  rank 1 waited 80.000 ms for x[1] from rank 1\n"
        "\n"
        "all_gather_matmul(float32 x[6, 8], w[8, 4]) by ring on tp, 12 calls\n"
        f"{columns}"
        "   0   200.000   250.000   100.000      1.10   150.000   100.000     0.000   100.000     1.000"
    )


def test_the_text_of_a_call_with_other_work_between_start_and_wait():
    report = one(compute_alone=None, elsewhere=0.15, waits=[])
    assert full_text(report).splitlines()[-1].endswith("    1.000   no compute baseline   150.000 ms elsewhere")


def test_one_warning_for_an_operation():
    """It is the warning of the rank with the most exposed time."""
    assert overlap_warnings(REPORT) == ["no overlap on rank 0"] * 2
    worse = {**REPORT, "ranks": [{"rank": r, "operations": [noted(r)]} for r in range(3)]}
    assert overlap_warnings(worse) == ["no overlap on rank 2"]


@pytest.mark.parametrize(("count", "share", "expected"), [(1, 0.99, 0), (101, 0.5, 50), (101, 0.99, 99), (4, 0.5, 1.5)])
def test_percentiles(count, share, expected):
    assert percentile(range(count), share) == pytest.approx(expected)


def test_a_file_that_cannot_be_written_is_an_error_at_the_start():
    with pytest.raises(LaunchError, match=r"FOMPI_REPORT=/nowhere/report\.json: give .* a \.json file in a folder"):
        Report("/nowhere/report.json")


def test_the_text_warns_of_too_many_threads():
    assert "\nwarning: set OMP_NUM_THREADS=1\n" in text({**REPORT, "threads": "set OMP_NUM_THREADS=1"})


def test_recent_intervals():
    recent = RecentIntervals()
    for i in range(5000):
        recent.add(i, i + 0.5)
    assert sorted(recent.within(0, 9999)) == [(i, i + 0.5) for i in range(5000 - 4096, 5000)]
    assert recent.within(4000.5, 4002.1) == [(4001, 4001.5), (4002, 4002.5)]
    joined = RecentIntervals(join_within=0.1)
    for begin, end in ((1.0, 1.1), (1.15, 1.2), (1.31, 1.4)):
        joined.add(begin, end)
    assert joined.within(0, 2) == [(1.0, 1.2), (1.31, 1.4)]


def test_the_time_in_which_the_program_does_other_work():
    """The program waits from 2 to 3 and from 5 to 9. Meanwhile a kernel of this call runs, and one of another call."""
    engine = Engine(lambda requests: None, 1.0, 0)
    for waited in ((2.0, 3.0), (5.0, 9.0)):
        engine.waits.add(*waited)
    engine.kernels.add(5.5, 6.0)
    engine.kernels.add(7.0, 8.0)
    assert engine.elsewhere(1.0, 10.0, own={5.5}) == [(1.0, 2.0), (3.0, 5.0), (7.0, 8.0), (9.0, 10.0)]
    assert engine.elsewhere(1.0, 4.0, own=()) == [(1.0, 2.0), (3.0, 4.0)]


def test_a_program_that_polls_all_the_time_does_no_other_work():
    """In one of ten tries: another process may take the core for so long that it looks like other work."""

    def is_told_apart():
        engine, begin = Engine(lambda requests: None, 1.0, 0), perf_counter()
        while perf_counter() < begin + 0.02:
            engine.progress_while_waiting()
        engine.progress_while_waiting()
        polled_until = perf_counter()
        sleep(0.02)
        away = engine.elsewhere(begin + 0.001, polled_until + 0.02, own=())
        return length(intersection(away, [(begin + 0.001, polled_until)])) < 0.01 and length(away) > 0.01

    assert any(is_told_apart() for _ in range(10))
