"""Baselines, proofs of real calls, traces of all ranks on one clock, and the notes for FOMPI_REPORT."""

from __future__ import annotations

import json
from time import perf_counter, sleep

import numpy as np
import pytest

import emulated
import fompi
from emulated import Emulated
from fompi import Partial, Shard, Spec
from fompi.plans.plan import Compute
from fompi.runtime import alignment, baselines, report
from fompi.traces.trace import Trace, intersection, length, union

pytestmark = pytest.mark.ranks(mpich=[2], openmpi=[])

KERNEL_SECONDS = 0.004


@pytest.fixture
def step(world):
    """A bound all_gather_matmul whose kernels take a known time."""
    n = world.size
    x, w = Spec((4 * n, 8), "float32", Shard(0)), Spec((8, 2 * n), "float32", Shard(1))
    plan = fompi.plan(fompi.all_gather_matmul, x, w, ranks=n, schedule="direct")

    def matmul(reads, writes):
        sleep(KERNEL_SECONDS)
        np.matmul(*reads, out=writes[0])

    tensors = {"x": np.full((4, 8), world.rank + 1.0, np.float32), "w": np.ones((8, 2), np.float32)}
    with fompi.bind(plan, comm=world, kernels={"matmul": matmul}, **tensors) as bound:
        yield bound


@pytest.fixture
def noting(world):
    """A report that exists during a test."""
    world.engine.report = noted = report.Report("1")
    yield noted
    world.engine.report = None


@pytest.fixture
def own_noting(comm, noting):
    """A new communicator, and the report."""
    with fompi.Communicator(comm) as made:
        yield made, noting


def kernels_of(step):
    return sum(isinstance(op, Compute) and op.kernel == "matmul" for op in step.compiled.ops)


@pytest.fixture
def clock(monkeypatch):
    """clock(seconds): these pass on the clock of baselines and emulated kernels, on which nothing else takes time."""
    now = [100.0]

    def spend(seconds):
        now[0] += max(seconds, 1e-6)

    for module in (baselines, emulated):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
        monkeypatch.setattr(module, "sleep", spend)
    return spend


def test_compute_alone_and_messages_alone(world, step, clock, monkeypatch):
    """Kernels without messages, and messages without kernels. Neither changes the tensors of the step."""
    monkeypatch.setitem(globals(), "sleep", clock)
    result = step().copy()
    assert step.compute_seconds() == pytest.approx(kernels_of(step) * KERNEL_SECONDS)
    assert step.messages_seconds(rounds=2) == 0
    rows = np.repeat(np.arange(world.size) + 1.0, 4)[:, None]
    np.testing.assert_array_equal(result, 8 * rows * np.ones((1, 2)))
    np.testing.assert_array_equal(step._results[0], result)


def test_every_schedule_has_baselines(world):
    """Messages, collectives of the library, half types and sums are measured, on memory full of ones."""
    n = world.size
    for dtype in ("float32", "bfloat16"):
        for schedule in ("unfused", "sliced", "direct", "ring", "bidirectional"):
            if dtype == "bfloat16" and schedule in ("unfused", "sliced"):
                continue  # the library cannot sum half types
            x, w = Spec((4 * n, 8 * n), dtype, Shard(1)), Spec((8 * n, 3), dtype, Shard(0))
            plan = fompi.plan(fompi.matmul_reduce_scatter, x, w, ranks=n, schedule=schedule)
            stored = np.uint16 if dtype == "bfloat16" else np.float32
            if stored is np.uint16:
                ml_dtypes = pytest.importorskip("ml_dtypes")
                stored = ml_dtypes.bfloat16
            tensors = {"x": np.ones((4 * n, 8), stored), "w": np.ones((8, 3), stored)}
            with fompi.bind(plan, comm=world, **tensors) as bound:
                bound()
                assert bound.compute_seconds(rounds=1) > 0 and bound.messages_seconds(rounds=1) >= 0


def bound_on_an_accelerator(world):
    """Its kernels take 0.01 s for each rank."""
    n = world.size
    x, w = Spec((8 * n, 8), "float32", Shard(0)), Spec((8, 4 * n), "float32", Shard(1))
    plan = fompi.plan(fompi.all_gather_matmul, x, w, ranks=n, schedule="direct")
    machine = fompi.Machine("slow", 0.0, 1e9, 2 * 8 * 8 * 4 / 0.01, 1e12, 0.0)
    tensors = {"x": np.ones((8, 8), np.float32), "w": np.ones((8, 4), np.float32)}
    return fompi.bind(plan, comm=world, backend=Emulated(machine), **tensors)


def test_baselines_on_an_accelerator(world, clock):
    """Kernels are enqueued. Alone they take the time that the machine gives, and messages wait for none."""
    with bound_on_an_accelerator(world) as step:
        assert step.compute_seconds() == pytest.approx(0.01 * world.size, rel=1e-3)
        assert step.messages_seconds(rounds=9) == 0


def test_the_proof_on_an_accelerator(world):
    """Its kernels take the time that the machine gives."""
    with bound_on_an_accelerator(world) as step:
        step()
        assert 0.0099 * world.size <= step.proof.kernels <= step.proof.wall


def test_the_proof_of_a_call(world, step):
    """Wall time, compute and waits are consistent. The waits name ranks of this communicator."""
    with pytest.raises(fompi.StateError):
        _ = step.proof
    step()
    assert step.proof.compute_alone is None and step.proof.warning is None
    compute, messages = step.compute_seconds(), step.messages_seconds()
    step()
    proof = step.proof
    assert (proof.compute_alone, proof.messages_alone, proof.rank) == (compute, messages, world.rank)
    assert proof.exposed == max(0.0, proof.wall - compute)
    assert proof.idle == pytest.approx(proof.wall - proof.kernels, abs=1e-9)
    assert proof.kernels >= kernels_of(step) * KERNEL_SECONDS
    assert {w.peer for w in proof.waits} <= {None, *range(world.size)} - {world.rank}
    assert proof.progress == world.engine.progress_mode and "exposed" in str(proof)


@pytest.fixture
def reduced(own_noting):
    """A bound all-reduce on a communicator with a report."""
    comm, _ = own_noting
    x = np.ones((1 << 16, 4), np.float32)
    plan = fompi.plan("all_reduce", Spec(x.shape, "float32", Partial()), ranks=comm.size)
    with fompi.bind(plan, comm=comm, x=x) as bound:
        bound()
        yield bound


def test_work_between_start_and_wait_hides_messages(own_noting, reduced):
    """The exposed time of a started call is the time in wait(), not the time in flight."""
    comm, noting = own_noting
    if comm.engine.helper is None:
        pytest.skip("no helper thread: messages do not progress between start() and wait()")
    assert reduced.proof.elsewhere == 0.0
    for _ in range(8):  # a busy machine may hold the helper up for some time
        noting.operations.clear()
        pending = fompi.all_reduce.start(np.ones((1 << 15, 4), np.float32), comm=comm)
        reduced.start()
        sleep(0.3)
        pending.wait()
        reduced.wait()
        called = next(o for o in noting.operations.values() if o.extents == pending.extents).proof()
        proofs = reduced.proof, called
        assert all(proof.elsewhere <= proof.wall and proof.warning is None for proof in proofs)
        if not comm.link.comm.allreduce(any(proof.exposed >= 0.15 for proof in proofs)):
            return
    raise AssertionError("no message moves between start() and wait()")


def test_messages_without_progress_are_exposed(own_noting, reduced, monkeypatch):
    """Without a helper thread, messages do not progress while the program does other work.

    A program that calls done() all the time does no other work.
    """
    comm, _ = own_noting
    if comm.size == 1:
        return
    comm.engine.helper.stop_sharing()
    monkeypatch.setattr(comm.engine, "helper", None)
    reduced.start()
    sleep(0.1)
    reduced.wait()
    proof = reduced.proof
    assert proof.wall > proof.elsewhere > 0.09 and proof.exposed > 0
    shares = []
    for _ in range(20):  # another process may use the core between two calls of done()
        reduced.start()
        while not reduced.done():
            pass
        reduced.wait()
        shares.append(reduced.proof.elsewhere / reduced.proof.wall)
    assert min(shares) < 0.5


def test_kernels_of_another_call_hide_messages(own_noting, reduced):
    """While the program waits for another call, the kernels of that call count as other work. Its messages do not."""
    comm, _ = own_noting
    if comm.size == 1:
        return

    def matmul(reads, writes):
        sleep(0.05)
        np.matmul(*reads, out=writes[0])

    x, w = Spec((4 * comm.size, 8), "float32", Shard(0)), Spec((8, 2 * comm.size), "float32", Shard(1))
    plan = fompi.plan(fompi.all_gather_matmul, x, w, ranks=comm.size)
    tensors = {"x": np.ones((4, 8), np.float32), "w": np.ones((8, 2), np.float32)}
    with fompi.bind(plan, comm=comm, kernels={"matmul": matmul}, **tensors) as multiplied:
        reduced.start("x")
        multiplied()
        for part in range(reduced.compiled.buffers["x"].count):
            reduced.ready("x", part)
        reduced.wait()
        begin, end = min(e.start for e in reduced.trace.events), max(e.end for e in reduced.trace.events)
        kernels = union((e.start, e.end) for e in multiplied.trace.events if e.is_compute)
        beside = length(intersection(kernels, [(begin, end)]))
        assert beside >= 0.05 and reduced.proof.elsewhere >= 0.9 * beside


def test_a_late_rank_is_named(world, step):
    """All other ranks wait for the last rank, and their proofs name it."""
    late = world.size - 1
    if world.size == 1:
        pytest.skip("there is no other rank")
    step()
    world.link.comm.Barrier()
    if world.rank == late:
        sleep(0.15)
    step()
    if world.rank != late:
        longest = step.proof.waits[0]
        assert (longest.kind, longest.peer) == ("recv", late) and longest.seconds > 0.05
        assert f"from rank {late}" in str(longest)


@pytest.mark.parametrize("before", [1, 4])
def test_a_rank_that_comes_late_to_a_call_is_named(world, noting, before):
    """A call waits for all ranks in its handshake. This time is exposed, and the trace names the last rank.

    After a few calls C begins the next one, and Python goes on with it while it waits.
    """
    late = world.size - 1
    if world.size == 1:
        return
    for _ in range(before):
        fompi.all_reduce(np.ones(3), comm=world)
    noting.operations.clear()
    with world.record() as traces:
        if world.rank == late:
            sleep(0.5)
        fompi.all_reduce(np.ones(3), comm=world)
    summary = traces[0].summary(world.rank)
    (operation,) = noting.operations.values()
    if world.rank != late:
        assert summary.wall > 0.4 and summary.exposed > 0.4 and summary.communication < 0.4
        longest = max(operation.waits, key=lambda wait: wait.seconds)
        assert longest.kind == "agreement" and f"(rank {late} was last)" in str(longest)


@pytest.mark.parametrize("drift", [0.0, 2e-4])
def test_clocks_that_differ_are_aligned(world, step, monkeypatch, drift):
    """Other ranks have clocks with an offset and a drift. `gather_traces` converts all times to the clock of rank 0."""

    def shown_time(true):
        return true if world.rank == 0 else 1000.0 * world.rank + true * (1 + drift)

    monkeypatch.setattr(alignment, "perf_counter", lambda: shown_time(perf_counter()))
    with fompi.Communicator(world.link.comm) as own:  # without earlier readings of the clocks
        alignment.read_clocks(own)
        sleep(1.2)  # long enough to measure the drift
        step()
        true = step.trace
        whole = fompi.gather_traces(true.shifted(shown_time), own)
    every = world.link.comm.gather([(e.op, e.start, e.end) for e in true.events], 0)
    if world.rank == 0:
        for e in whole.events:
            (expected,) = [(start, end) for op, start, end in every[e.rank] if op == e.op]
            assert (e.start, e.end) == pytest.approx(expected, abs=2e-3)


def test_traces_of_all_ranks(world, step, tmp_path):
    """Rank 0 gets every event of every rank, with hosts. No message is received before its send began."""
    alignment.read_clocks(world)
    world.link.comm.Barrier()
    step()
    mine = step.trace
    whole = fompi.gather_traces(mine, world)
    if world.rank:
        assert whole is None
        return
    assert whole.ranks == list(range(world.size)) and len(whole.hosts) == world.size
    assert [e for e in whole.events if e.rank == 0] == sorted(mine.events, key=lambda e: (e.start, e.rank, e.end))
    begun = {(e.rank, int(e.lane.split()[-1])): e.start for e in whole.events if e.lane.startswith("send to")}
    for e in whole.events:
        if e.lane.startswith("recv from"):
            assert e.end >= begun[int(e.lane.split()[-1]), e.rank] - 0.02
    whole.save(tmp_path / "all.json")
    data = json.loads((tmp_path / "all.json").read_text())
    assert {e["pid"] for e in data["traceEvents"]} == set(range(world.size))


def test_several_traces_and_none(world):
    """A rank may give several traces, or none."""
    with world.record() as traces:
        for _ in range(3):
            fompi.all_reduce(np.ones(4), comm=world)
    whole = fompi.gather_traces(traces, world)
    assert (whole is None) == (world.rank > 0)
    empty = fompi.gather_traces([], world)
    assert world.rank or (empty == Trace("measured", "", (), whole.hosts) and whole.title.startswith("all_reduce by"))


def test_the_notes_of_bound_and_unbound_calls(world, step, noting):
    """Calls with different rows have separate entries, each with baselines.

    Kernels of the user run alone only in `compute_seconds`.
    """
    x = np.ones((4, 8))
    for _ in range(3):
        fompi.all_gather_matmul(x, np.eye(8), comm=world, schedule="ring")
    fompi.all_gather_matmul(x[:2], np.eye(8), comm=world, schedule="ring")
    for _ in range(2):
        step()
    noting.settle(world)
    assert [o.compute_alone is None for o in noting.operations.values()] == [False, False, True]
    assert step.compute_seconds() == max(o.compute_alone for o in noting.operations.values())
    records = sorted((o.record() for o in noting.operations.values()), key=lambda r: r["stamp"])
    assert [r["calls"] for r in records] == [3, 1, 2]
    assert [r["title"] for r in records] == ["all_gather_matmul by ring"] * 2 + ["all_gather_matmul by direct"]
    for r in records:
        assert r["messages_alone"] is not None and r["members"] == list(range(world.size)) and r["rank"] == world.rank
        assert 0 < r["p50"] <= r["p99"] and r["kernels"] > 0
        assert r["exposed"] == max(0.0, r["wall"] - r["compute"])
    assert all(r["compute_alone"] is not None for r in records)
    json.dumps(records)


def test_failed_calls_are_not_noted(world, noting):
    def fails(reads, writes):
        raise RuntimeError("as planned")

    plan = fompi.plan(fompi.all_gather_matmul, Spec((4 * world.size, 8), "float64", Shard(0)),
                      Spec((8, 2 * world.size), "float64", Shard(1)), ranks=world.size, schedule="direct")  # fmt: skip
    kernels = {"matmul": fails}
    with fompi.bind(plan, comm=world, kernels=kernels, x=np.ones((4, 8)), w=np.ones((8, 2))) as step:
        with pytest.raises((RuntimeError, fompi.PeerError)):
            step()
        assert not noting.operations


def test_more_rows_than_entries(world, noting, monkeypatch):
    """Beyond MOST_OPERATIONS, all further rows share one entry, without baselines."""
    monkeypatch.setattr(report, "MOST_OPERATIONS", 2)
    for rows in range(1, 6):
        fompi.all_gather(np.ones((rows, 2)), comm=world)
    noting.settle(world)
    operations = list(noting.operations.values())
    assert [o.calls for o in operations] == [1, 1, 3]
    assert [o.messages_alone is None for o in operations] == [False, False, True]
