"""Records made by hand: what a replay repeats, what changes on another machine, what would help, and why."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from fompi.base.errors import LayoutError
from fompi.cli.main import main
from fompi.model.machine import Machine
from fompi.model.replay import Graph
from fompi.planner.advice import advise, latency_of
from fompi.traces.record import CALL, STEP, CallKind, RankRecord, load

NAN, MS = float("nan"), 1e-3
SUM = CallKind("all_reduce", "all_reduce", "world", (0, 1), 1 << 20, "float32", "float32 x[262144]")


def record(rank, rows, kinds=(SUM,), size=2, host="a"):
    """A rank with these rows (kind, number, begin, back, wait, end) in ms."""
    times = [(kind, -1, number, *(MS * each for each in when), 0.0) for kind, number, *when in rows]
    return RankRecord(rank, size, host, tuple(kinds), np.array(times, CALL))


def steps(rank, compute, steps=4, message=2.0, late=0.0, start=False, kinds=(SUM,), **options):
    """Steps of kernels, then a sum that takes `message` after the `late` last one has come; then 1 ms more."""
    rows, t = [], 0.0
    for number in range(steps):
        rows.append((STEP, number, t, t, t, t))
        begin, end = t + compute, t + max(compute, late) + message
        back = begin + 0.01 if start else begin
        rows.append((0, number, begin, back, NAN if start else begin, end))
        t = end + 1
    return record(rank, [*rows, (STEP, steps, t, t, t, t)], kinds, **options)


def hosts(records):
    return [rank.host for rank in records]


def first(records):
    return advise(Graph.of(records), hosts(records))[0]


def test_a_replay_repeats_the_record():
    graph = Graph.of([steps(0, 5, late=8), steps(1, 8, late=8)])
    assert graph.measured.step == pytest.approx(11 * MS) == graph.run().step
    assert graph.waited(graph.run()) == pytest.approx([(5 + 2) / 2 * MS])  # 5 ms on the one, 2 on the other


def test_to_write_a_record_is_in_no_step():
    """A mark ends a step, and the next one begins 3 ms later."""
    rows = [(STEP, 0, 0, 0, 0, 3), (0, 0, 4, 4, 4, 6), (STEP, 1, 7, 7, 7, 10), (STEP, 2, 11, 11, 11, 11)]
    graph = Graph.of([record(0, rows), record(1, rows)])
    assert graph.measured.steps == pytest.approx([4 * MS, 1 * MS]) == graph.run().steps


def test_calls_in_flight_share_the_link_and_nobody_waits_before_the_end_of_the_step():
    """As gradients of torch: no wait was seen. Two sums of 3 ms are over 7 ms after the first has begun."""
    rows = [(STEP, 0, 0, 0, 0, 0), (0, 0, 1, 1.1, NAN, 4), (0, 1, 2, 2.1, NAN, 7), (STEP, 1, 8, 8, 8, 8)]
    graph = Graph.of([record(0, rows), record(1, rows)])
    assert graph.run().step == pytest.approx(8 * MS)
    slower = replace(graph, service=2 * graph.service)
    assert slower.run().step == pytest.approx((1 + 12 + 1) * MS)


def test_another_thread_goes_on_while_a_call_waits():
    """The second call begins before the first one is over: the program was not held up."""
    rows = [(STEP, 0, 0, 0, 0, 0), (0, 0, 1, 1, 1, 6), (0, 1, 5, 5, 5, 8), (STEP, 1, 9, 9, 9, 9)]
    graph = Graph.of([record(0, rows), record(1, rows)])
    assert graph.run().step == pytest.approx(9 * MS)


def test_a_call_that_overtakes_another_goes_beside_it():
    """The first sum takes 9 ms; the second one, which comes later, is over before it, with 1 ms of kernels."""
    rows = [(STEP, 0, 0, 0, 0, 0), (0, 0, 0, 0.1, 9.5, 9), (0, 1, 5, 5, 5, 7), (STEP, 1, 10, 10, 10, 10)]
    ranks = [record(rank, rows) for rank in range(2)]
    for each in ranks:
        each.calls["inside"][2] = 1 * MS
    graph = Graph.of(ranks)
    assert graph.service == pytest.approx([9 * MS] * 2 + [2 * MS] * 2) and graph.run().step == pytest.approx(10 * MS)
    assert graph.inside == pytest.approx([1 * MS] * 4)  # they ran while both were in flight


def test_two_calls_awaited_at_once_are_not_counted_twice():
    rows = [(STEP, 0, 0, 0, 0, 0), (0, 0, 1, 1.1, 2, 5), (0, 1, 1.1, 1.1, 2, 6), (STEP, 1, 7, 7, 7, 7)]
    graph = Graph.of([record(rank, rows) for rank in range(2)])
    assert graph.waited(graph.measured) == pytest.approx([4 * MS]) == graph.waited(graph.run())


def test_the_root_of_a_broadcast_waits_for_nobody():
    early = [(STEP, 0, 0, 0, 0, 0), (0, 0, 1, 1, 1, 2), (STEP, 1, 10, 10, 10, 10)]
    late = [(STEP, 0, 0, 0, 0, 0), (0, 0, 6, 6, 6, 7), (STEP, 1, 10, 10, 10, 10)]
    graph = Graph.of([record(0, early), record(1, late)])
    assert graph.run().step == pytest.approx(10 * MS)


def test_hosts_with_clocks_of_their_own():
    """The second host started its clock much earlier: calls end at one time all the same."""
    away = steps(1, 5, host="b")
    shifted = away.calls.copy()
    for name in ("begin", "back", "wait", "end"):
        shifted[name] += 1e5
    graph = Graph.of([steps(0, 5), replace(away, calls=shifted)])
    assert graph.run().step == pytest.approx(8 * MS, rel=1e-6) == graph.measured.step


def test_another_machine_has_other_links():
    graph = Graph.of([steps(0, 5), steps(1, 5)])
    slow, fast = (graph.on(Machine.load(name)).run().step for name in ("gigabit", "h100-nvlink"))
    assert fast < 6.2 * MS < graph.measured.step < slow


def test_only_steps_that_all_ranks_have():
    """The oldest calls of a rank may be dropped; a run without steps counts as one."""
    short = replace(steps(0, 5), calls=steps(0, 5).calls[3:])
    assert len(Graph.of([short, steps(1, 5)]).measured.steps) == 2
    bare = [record(rank, [(0, 0, 1, 1, 1, 4), (0, 1, 6, 6, 6, 9)]) for rank in range(2)]
    assert Graph.of(bare).measured.steps == pytest.approx([8 * MS])
    with pytest.raises(LayoutError, match="has no call"):
        Graph.of([record(0, [(STEP, 0, 0, 0, 0, 0)]), steps(1, 5)])


# ------------------------------------------------------------------------------------------------------------ advice


def four(compute=(5, 5, 5, 5), names="aabb", **options):
    kind = replace(SUM, group=(0, 1, 2, 3))
    late = max(compute)
    return [steps(r, compute[r], late=late, size=4, host=names[r], kinds=(kind,), **options) for r in range(4)]


def test_a_late_rank_is_named_first():
    best = first(four((5, 9, 5, 5)))
    assert (
        best.is_fault and best.what == "rank 1 at the median speed" and best.seconds == pytest.approx(8 * MS, rel=0.1)
    )


def test_a_slow_host_is_named_first():
    names = advise(Graph.of(records := four((5, 5, 9, 9), "aabb")[:]), hosts(records))
    assert names[0].what.startswith(("host b", "rank"))
    more = [
        steps(r, 9 if r > 3 else 5, late=9, size=6, host="aabbcc"[r], kinds=(replace(SUM, group=(0, 1, 2, 3, 4, 5)),))
        for r in range(6)
    ]
    assert first(more).what == "host c at the median speed"


def test_a_slow_link_is_named_first():
    """Sums of pairs: one pair needs five times as long as the others."""
    pairs = [(0, 1), (2, 3), (4, 5)]
    ranks = []
    for r in range(6):
        kind = replace(SUM, channel="pairs", group=pairs[r // 2])
        ranks.append(steps(r, 5, message=10 if r > 3 else 2, size=6, host=str(r), kinds=(kind,)))
    best = first(ranks)
    assert not any("link of ranks" in each.what for each in advise(Graph.of(ranks[:4]), "0123"))  # of two, which one?
    assert best.is_fault and best.what == "the link of ranks 4, 5 as fast as others" and "5.0 times" in best.write


def test_own_kernels_need_no_advice(capsys, tmp_path):
    for each in (steps(0, 500), steps(1, 500)):
        each.save(tmp_path)
    assert main(["advise", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("nothing here helps: 100% of a step are your own kernels\n")


@pytest.mark.parametrize(
    ("kind", "words", "seconds"),
    [
        ({}, "links twice as fast", 7),
        ({}, "sums started", 7),  # behind the millisecond after it
        ({}, "product and sum in one call", 6.0),  # 2 ms of messages behind half of 5 ms of kernels
        ({}, "messages of int8", 6 + 2 * 1.0625 / 4 + 1e3 * (1 << 20) / 3e9),
        ({"operation": "all_gather", "moves": "all_gather"}, "gathers one layer ahead", 6),
        ({"operation": "all_gather", "moves": "all_gather"}, "gather and product in one call", 7.5),
    ],
)
def test_what_would_help(kind, words, seconds):
    known = replace(SUM, **kind)
    found = advise(Graph.of([steps(rank, 5, kinds=(known,)) for rank in range(2)]), "aa")
    assert {each.what: each.seconds for each in found}[words] == pytest.approx(seconds * MS, rel=0.01)


def test_advice_only_for_what_the_record_has():
    """No fused call beside a fused call, nothing started that is started, no larger buckets of a single sum."""
    fused = replace(SUM, operation="matmul_all_reduce")
    names = {each.what for each in advise(Graph.of([steps(r, 5, kinds=(fused,)) for r in range(2)]), "aa")}
    assert names == {"links twice as fast", "messages of int8", "outer steps"}
    started = {each.what for each in advise(Graph.of([steps(r, 5, start=True) for r in range(2)]), "aa")}
    assert not started & {"sums started", "product and sum in one call", "buckets twice as large"}


def test_larger_buckets_save_latency():
    """Small sums show a latency of 1 ms. Two sums that wait for each other become one."""
    small = replace(SUM, nbytes=8)
    rows = [(STEP, 0, 0, 0, 0, 0), (1, 0, 0.1, 0.1, 0.1, 1.1)]
    rows += [(0, 1, 2, 2.01, NAN, 4.5), (0, 2, 2.1, 2.11, NAN, 7.0), (STEP, 1, 8, 8, 8, 8)]
    found = advise(Graph.of([record(rank, rows, (SUM, small)) for rank in range(2)]), "aa")
    merged = {each.what: each.seconds for each in found}["buckets twice as large"]
    assert merged == pytest.approx((8 - 0.9) * MS)


def test_without_small_calls_the_smallest_ones_show_the_latency():
    """Sums of 16 KB that take 1 ms each, and one late broadcast of 8 bytes, which says nothing."""
    kinds = replace(SUM, nbytes=1 << 14), replace(SUM, operation="broadcast", moves="broadcast", nbytes=8)
    rows = [(STEP, 0, 0, 0, 0, 0), *[(0, n, 2 * n + 1, 2 * n + 1, 2 * n + 1, 2 * n + 2) for n in range(4)]]
    end = (STEP, 1, 30, 30, 30, 30)
    assert latency_of(Graph.of([record(r, [*rows, end], kinds[:1]) for r in range(2)])) == pytest.approx(1 * MS)
    late = (1, 9, 10, 10, 10, 25)
    assert latency_of(Graph.of([record(r, [*rows, late, end], kinds) for r in range(2)])) == pytest.approx(1 * MS)


def test_smaller_buckets_begin_earlier():
    """A sum of 4 ms behind 6 ms of kernels, and a latency of 1 ms. Half of its bytes go while half of them run."""
    small = replace(SUM, nbytes=8)
    rows = [(STEP, 0, 0, 0, 0, 0), (1, 0, 0, 0, 0, 1), (0, 1, 7, 7.01, NAN, 11), (STEP, 1, 12, 12, 12, 12)]
    graph = Graph.of([record(rank, rows, (SUM, small)) for rank in range(2)])
    found = {each.what: each.seconds for each in advise(graph, "aa")}
    assert found["buckets half as large"] == pytest.approx((12 - 1.5) * MS)


def pipeline(steps=2, microbatches=4):
    """GPipe on two ranks: all forwards of 1 ms, then all backwards of 2 ms. Messages take no time."""
    ahead, back = (0, 1), (1, 0)
    first = [(0, n, *[n + 1.0] * 4) for n in range(microbatches)]  # a send behind each forward
    first += [(1, n, *[4.0 if n == 0 else 7.0 + 2 * n] * 3, 7.0 + 2 * n) for n in range(microbatches)]
    second = [(0, n, *[-2.0 if n == 0 else n + 1.0] * 3, n + 1.0) for n in range(microbatches)]
    second += [(1, n, *[7.0 + 2 * n] * 4) for n in range(microbatches)]  # a send behind each backward
    records = []
    for rank, (own, words) in enumerate(((first, ("send", "recv")), (second, ("recv", "send")))):
        kinds = [
            CallKind(word, word, "world", group, 1 << 20) for word, group in zip(words, (ahead, back), strict=True)
        ]
        rows = [(STEP, step, *[15.0 * step - 2 * rank] * 4) for step in range(steps + 1)]
        for step in range(steps):
            rows += [(kind, 9 * step + n, *(15.0 * step + t for t in when)) for kind, n, *when in own]
        records.append(record(rank, rows, kinds, host=str(rank)))
    return records


def test_another_schedule_of_a_pipeline():
    """Two stages and four micro-batches of 3 ms: a bubble of 3 ms. Two stages on each rank halve it."""
    ranks = pipeline()
    graph = Graph.of(ranks)
    assert graph.measured.step == pytest.approx(15 * MS)
    found = {each.what: each for each in advise(graph, hosts(ranks))}
    assert found["pipeline: two stages on each rank"].seconds == pytest.approx(13.5 * MS)
    assert found["pipeline: zero bubble"].seconds == pytest.approx(13 * MS)


def test_ranks_that_exchange_are_no_pipeline():
    kinds = [
        [CallKind(word, word, "world", group, 1 << 20) for word, group in each]
        for each in ([("send", (0, 1)), ("recv", (1, 0))], [("send", (1, 0)), ("recv", (0, 1))])
    ]
    rows = [(STEP, 0, 0, 0, 0, 0), *[(k, n, *[n + 1 + 0.1 * k] * 3, n + 1.5) for n in range(4) for k in (0, 1)]]
    ranks = [record(rank, [*rows, (STEP, 1, 9, 9, 9, 9)], kinds[rank], host=str(rank)) for rank in range(2)]
    assert not any("pipeline" in each.what for each in advise(Graph.of(ranks), hosts(ranks)))


def test_parameters_gathered_twice_may_be_kept():
    kinds = (
        replace(SUM, operation="all_gather", moves="all_gather"),
        replace(SUM, operation="reduce_scatter", moves="reduce_scatter"),
    )
    rows = [(STEP, 0, 0, 0, 0, 0), (0, 0, 1, 1, 1, 2), (0, 1, 3, 3, 3, 4), (1, 2, 5, 5, 5, 6), (STEP, 1, 7, 7, 7, 7)]
    found = {each.what: each for each in advise(Graph.of([record(rank, rows, kinds) for rank in range(2)]), "aa")}
    assert found["parameters kept"].seconds == pytest.approx(6 * MS)


# ------------------------------------------------------------------------------------------------------- files, size


def test_files(tmp_path, capsys):
    for each in (steps(0, 5, late=8), steps(1, 8, late=8)):
        each.save(tmp_path)
    read = load(tmp_path)
    assert [rank.kinds for rank in read] == [(SUM,), (SUM,)] and (read[0].calls["number"][:2] == 0).all()
    assert main(["replay", str(tmp_path), "--machine", "gigabit"]) == 0
    out = capsys.readouterr().out
    assert (
        out.startswith("4 steps of 2 of 2 ranks: measured 11.000 ms, replayed ")
        and "all_reduce(float32 x[262144])" in out
    )
    (tmp_path / "rank-1.npz").write_bytes(b"no zip")
    assert main(["replay", str(tmp_path)]) == 2
    assert "rank-1.npz is no record of a rank" in capsys.readouterr().err
    assert main(["advise", str(tmp_path / "none")]) == 2
    assert "has no record: FOMPI_RECORD=" in capsys.readouterr().err


def test_many_ranks():
    """256 ranks with 500 calls each, of groups of eight and of all: some seconds at most."""
    size, ranks = 256, []
    for r in range(size):
        tp, everyone = tuple(range(r // 8 * 8, r // 8 * 8 + 8)), tuple(range(size))
        kinds = (replace(SUM, channel="tp", group=tp), replace(SUM, group=everyone))
        rows = [(n % 5 // 4, n, n + 0.01 * (r % 7), *[n + 0.01 * (r % 7)] * 2, n + 0.5) for n in range(500)]
        rows += [(STEP, n, *[100.0 * n - 0.2] * 4) for n in range(6)]
        ranks.append(record(r, rows, kinds, size=size))
    begun = time.process_time()
    graph = Graph.of(ranks)
    assert graph.run().step == pytest.approx(graph.measured.step, rel=1e-6)
    assert time.process_time() - begun < 20
