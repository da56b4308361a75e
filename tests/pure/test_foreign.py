"""Traces of others as records: Chakra's execution traces and Kineto's JSON, small ones made here."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
import traces
from traces import attribute, encoded, field

from fompi.cli.main import main
from fompi.model.replay import Graph
from fompi.traces.record import CALL, STEP, CallKind, RankRecord

SUM = CallKind("all_reduce", "all_reduce", "world", (0, 1), 1 << 20, "float32", "float32 x[262144]")


def node(number, name, kind, begin, duration, *attributes):
    """A node of Chakra with times in microseconds."""
    times = field(6, begin) + field(7, duration)
    return field(1, number) + field(2, name) + field(3, kind) + times + b"".join(attributes)


def chakra(path, *nodes):
    messages = [field(1, "0.0.4"), *nodes]
    path.write_bytes(b"".join(encoded(len(message)) + message for message in messages))


def test_an_execution_trace_of_chakra(tmp_path):
    """Kernels of 5 ms, a sum of 3 ms of which 1 ms is behind them. Operators of the host do not count."""
    for rank in range(2):
        sums = [attribute("comm_type", 0), attribute("comm_size", 4096), attribute("pg_name", "0")]
        chakra(
            tmp_path / f"model.{rank}.et",
            node(1, "aten::mm", 4, 0, 9000, field(10, field(1, "is_cpu_op") + field(27, 1))),
            node(2, "gemm", 4, 1000, 5000),
            node(3, "ncclAllReduce", 7, 5000, 3000, *sums),
            node(4, "gemm", 4, 8000, 2000),
            node(5, "ncclAllReduce", 7, 10000, 1000, *sums),
        )
    ranks = traces.read(tmp_path)
    assert [rank.rank for rank in ranks] == [0, 1] and ranks[0].kinds[0].group == (0, 1)
    assert ranks[0].kinds[0].moves == "all_reduce" and ranks[0].kinds[0].nbytes == 4096
    assert ranks[0].calls["wait"] == pytest.approx([6e-3, 10e-3])
    graph = Graph.of(ranks)
    assert graph.waited(graph.run()) == pytest.approx([2e-3 + 1e-3])


def test_messages_of_chakra_have_two_ends(tmp_path):
    ends = [attribute("comm_src", 0), attribute("comm_dst", 1), attribute("comm_tag", 7), attribute("comm_size", 8)]
    chakra(tmp_path / "a.0.et", node(1, "send", 5, 0, 10, *ends))
    chakra(tmp_path / "a.1.et", node(1, "recv", 6, 0, 30, *ends))
    graph = Graph.of(traces.read(tmp_path))
    assert [kind.moves for kind in graph.kinds] == ["send", "recv"] and graph.kinds[0].group == (0, 1)
    assert len(graph.members) == 2  # one call


def kineto(path, rank, device, zipped=False):
    def event(name, cat, begin, duration, **args):
        return {"ph": "X", "name": name, "cat": cat, "ts": begin, "dur": duration, "args": args}

    group = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Group size": 2}
    comm = {"Collective name": "_allgather_base", "dtype": "BFloat16", "In msg nelems": 1 << 20, **group}
    kind = "kernel" if device else "cpu_op"
    events = [{"ph": "M", "name": "process_name", "args": {}}]
    for step in range(3):
        t = 10000 * step
        events += [event(f"ProfilerStep#{step}", "user_annotation", t, 10000)]
        events += [event("gemm", kind, t + 1000, 5000), event("ncclDevKernel_AllGather", kind, t + 6000, 2000, **comm)]
        events += [event("aten::mm", "cpu_op", t, 9000)] * device
    text = json.dumps({"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(text) if zipped else text)


@pytest.mark.parametrize("device", [True, False])
def test_a_trace_of_kineto(tmp_path, device, capsys):
    kineto(tmp_path / "one.pt.trace.json", 0, device)
    kineto(tmp_path / "two.pt.trace.json.gz", 1, device, zipped=True)
    assert traces.main([str(tmp_path), str(tmp_path / "run")]) == 0
    assert main(["advise", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("3 steps of 2 of 2 ranks: measured 10.000 ms, replayed 10.000 ms (+0.0%)")
    assert "gathers one layer ahead" in out
    kind = traces.read(tmp_path)[0].kinds[0]
    assert (kind.moves, kind.nbytes, kind.dtype, kind.group) == ("all_gather", 2 << 20, "bfloat16", (0, 1))


def test_a_record_as_chakra_and_back(tmp_path):
    rows = [(STEP, 0, 0, 0, 0, 0), (0, 0, 1, 1.1, np.nan, 4), (0, 1, 6, 6, 6, 8), (STEP, 1, 9, 9, 9, 9)]
    times = [(kind, -1, number, *(1e-3 * each for each in when), 0.0) for kind, number, *when in rows]
    records = [RankRecord(rank, 2, "a", (SUM,), np.array(times, CALL)) for rank in range(2)]
    traces.to_chakra(records, tmp_path)
    graph, again = Graph.of(records), Graph.of(traces.read(tmp_path))
    assert [(kind.moves, kind.group, kind.nbytes) for kind in again.kinds] == [("all_reduce", (0, 1), 1 << 20)]
    assert traces.main(["--perfetto", str(tmp_path / "run"), str(tmp_path / "both.json")]) == 2
    for each in records:
        each.save(tmp_path / "run")
    assert traces.main(["--perfetto", str(tmp_path / "run"), str(tmp_path / "both.json"), "--machine", "gigabit"]) == 0
    assert "rank 3 (replayed)" in (text := (tmp_path / "both.json").read_text()) and "kernels" in text
    assert again.service == pytest.approx(graph.service) and len(again.members) == len(graph.members) == 3


def test_what_is_no_trace(tmp_path, capsys):
    assert traces.main([str(tmp_path), str(tmp_path / "run")]) == 2
    (tmp_path / "bad.0.et").write_bytes(b"\xff")
    assert traces.main([str(tmp_path), str(tmp_path / "run")]) == 2
    assert "has no trace" in (said := capsys.readouterr().err) and "bad.0.et is no trace" in said
