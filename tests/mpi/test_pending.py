"""Operations in flight: started, polled and waited for in any order, from many threads."""

from __future__ import annotations

import gc
import sys
import threading
import time
from random import Random

import numpy as np
import pytest
from mpi4py import MPI

import fompi

pytestmark = pytest.mark.ranks(mpich=[2], openmpi=[3])

SCHEDULES = ("auto", "unfused", "ring", "sliced", "direct", "bidirectional")


def test_start_and_wait(world):
    pending = fompi.all_reduce.start(np.ones(5), comm=world)
    y = pending.wait()
    np.testing.assert_array_equal(y, np.full(5, float(world.size)), strict=True)
    assert pending.done() and pending.wait() is not None
    np.testing.assert_array_equal(pending.result, y)


def test_then_runs_once_although_nobody_waits(world):
    """In the helper thread, or in a thread that waits for something else. Messages have it, too."""
    seen, after, before = [], (world.rank + 1) % world.size, (world.rank - 1) % world.size
    pendings = [
        fompi.all_reduce.start(np.ones(5), comm=world),
        fompi.sendrecv.start(np.ones(3), after, before, comm=world),
    ]
    for pending in pendings:
        pending.then(lambda pending=pending: seen.append(pending.result.sum()))
    end = time.monotonic() + 10
    while len(seen) < 2 and time.monotonic() < end:
        time.sleep(1e-3)
    world.barrier()
    assert sorted(seen) == sorted([5 * world.size, 3]) and not world.engine.watched
    pendings[0].then(lambda: seen.append("late"))  # it is finished already
    while "late" not in seen and time.monotonic() < end:
        time.sleep(1e-3)
    assert seen[2:] == ["late"]


def test_done_progresses_the_operation(world):
    """Without wait(), calls of done() finish it."""
    pending = fompi.all_gather_matmul.start(np.full((2, 3), float(world.rank)), np.eye(3), comm=world)
    while not pending.done():
        pass
    np.testing.assert_array_equal(pending.result[:, 0], np.arange(world.size).repeat(2))


def test_one_wait_progresses_all_operations(world):
    first, *others = [fompi.all_reduce.start(np.full(4, float(i)), comm=world) for i in range(6)]
    others[-1].wait()
    for i, pending in enumerate((first, *others)):
        pending.wait()
        assert (pending.result == i * world.size).all()


def test_wait_with_a_timeout(world, comm):
    """The operation goes on after a wait that has timed out."""
    if world.rank == 0 and world.size > 1:
        pending = fompi.all_reduce.start(np.ones(3), comm=world)
        with pytest.raises(TimeoutError, match=r"all_reduce is not finished after 0\.05 s"):
            pending.wait(timeout=0.05)
        with pytest.raises(fompi.FompiError, match="in flight"):
            _ = pending.result
        comm.Barrier()
    else:
        comm.Barrier()
        pending = fompi.all_reduce.start(np.ones(3), comm=world)
    assert (pending.wait(timeout=20) == world.size).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_in_flight_waited_for_in_any_order(world, schedule):
    """All ranks start in the same order. Each waits in its own order. Some calls use the library's collectives."""
    draw = Random(world.rank)
    pending = []
    for i in range(24):
        options = {"schedule": schedule, "slices": 2 if schedule == "sliced" else None, "comm": world}
        x = np.full((world.size, 2), float(i))
        operation = (fompi.all_reduce, fompi.all_gather, fompi.reduce_scatter, fompi.broadcast)[i % 4]
        pending.append((i, operation.start(x, **options)))
        if draw.random() < 0.2:
            pending[draw.randrange(len(pending))][1].done()
    draw.shuffle(pending)
    for i, operation in pending:
        y = operation.wait()
        assert (y == i * (world.size if i % 2 == 0 else 1)).all(), i
        assert len(y) == (world.size, world.size**2, 1, world.size)[i % 4]


def test_the_library_s_collectives_start_in_one_order(world):
    """Handshakes may end in any order. Sums of equal shape are mixed up if ranks start them in different orders."""
    draw = Random(world.rank)
    for repeat in range(20):
        pending = []
        for i in range(8):
            pending.append(fompi.all_reduce.start(np.full(3, float(i)), comm=world, schedule="unfused"))
            for _ in range(draw.randrange(3)):
                world.engine.progress()
        for i in draw.sample(range(8), 8):
            assert (pending[i].wait() == i * world.size).all(), repeat


def test_the_input_may_be_used_again_when_done(world):
    x = np.ones(1000)
    for i in range(10):
        x[...] = i
        pending = fompi.all_gather.start(x, comm=world)
        y = pending.wait()
        x[...] = np.nan
        assert (y == i).all()


def test_the_trace_of_an_operation(world):
    pending = fompi.all_gather_matmul.start(np.ones((2, 3)), np.eye(3), comm=world, schedule="ring")
    pending.wait()
    names = [event.name for event in pending.trace.events]
    assert sum(name.startswith("matmul(") for name in names) == world.size
    assert sum(event.lane.startswith("send to") for event in pending.trace.events) == world.size - 1
    assert "call" in pending.trace.title and "world" in pending.trace.title


def test_record_collects_the_traces(world):
    with world.record() as traces:
        fompi.all_reduce(np.ones(3), comm=world)
        pending = [fompi.all_gather.start(np.ones(3), comm=world) for _ in range(2)]
        for operation in pending:
            operation.wait()
    fompi.all_reduce(np.ones(3), comm=world)
    assert sorted(trace.title.split()[0] for trace in traces) == ["all_gather", "all_gather", "all_reduce"]


def test_a_pending_that_the_program_drops(world):
    """The operation goes on, and its memory is given back."""
    gc.collect()
    before = world.engine.arena.lent_nbytes
    for _ in range(10):
        fompi.all_reduce.start(np.ones(1000), comm=world)
    gc.collect()
    assert (fompi.all_reduce(np.ones(1000), comm=world) == world.size).all()
    while world.channel.active:
        world.engine.progress()
    gc.collect()
    assert world.engine.arena.lent_nbytes <= before


def test_threads_on_communicators_of_their_own(world):
    """Each thread has its own communicator and program. Each thread that waits progresses the calls of all."""
    communicators = [world.split(0, world.rank, f"thread {i}") for i in range(4)]
    failed = []

    def program(i):
        try:
            draw = Random(i)
            for call in range(15):
                n = draw.randrange(1, 50)
                x = np.full((n, 3), float(world.rank + i + call))
                y = fompi.all_reduce(x, comm=communicators[i], schedule=SCHEDULES[(i + call) % 3])
                assert (y == sum(range(world.size)) + world.size * (i + call)).all()
                z = fompi.all_gather_matmul(x, np.eye(3), comm=communicators[i])
                np.testing.assert_array_equal(z[::n, 0], np.arange(world.size) + i + call)
        except BaseException as error:
            failed.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    threads = [threading.Thread(target=program, args=(i,)) for i in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    for communicator in communicators:
        communicator.close()
    assert not failed, failed[0]


def test_the_table_of_programs_in_several_threads(monkeypatch):
    """Threads call operations of more kinds than the table holds."""
    monkeypatch.setattr(fompi.ops.pending, "MOST_PLANS", 4)
    before, failed = sys.getswitchinterval(), []

    def program(alone, columns):
        try:
            for n in columns:
                x = np.ones((2, n))
                assert (fompi.all_gather(x, comm=alone, schedule="ring") == x).all()
                assert len(alone.plans) <= 4
        except BaseException as error:
            failed.append(error)

    with fompi.Communicator(MPI.COMM_SELF, "alone") as alone:
        threads = [threading.Thread(target=program, args=(alone, range(i, 400, 4))) for i in range(1, 5)]
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(before)
    assert not failed, failed[0]


def test_start_and_wait_on_different_threads(world):
    """Autograd and XLA wait on threads of their own."""
    results = {}
    pending = {i: fompi.all_reduce.start(np.full(3, float(i)), comm=world) for i in range(6)}
    threads = [threading.Thread(target=lambda i=i: results.update({i: pending[i].wait()})) for i in pending]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((results[i] == i * world.size).all() for i in range(6))


def test_bound_operations_on_threads(world):
    """Three executors of one communicator, each on its own thread, in any order."""
    spec = fompi.Spec((40,), "float64", fompi.Partial())
    plan = fompi.plan(fompi.all_reduce, spec, ranks=world.size, schedule="ring")
    inputs = [np.empty(40) for _ in range(3)]
    steps = [fompi.bind(plan, comm=world, x=x) for x in inputs]
    failed = []

    def program(i):
        try:
            for call in range(20):
                inputs[i][...] = i + call + world.rank
                assert (steps[i]() == sum(range(world.size)) + world.size * (i + call)).all()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=program, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for step in steps:
        step.close()
    assert not failed, failed[0]


def test_no_timeout_after_a_long_computation(world, monkeypatch):
    """The deadline counts from the beginning of the wait, not from the start of the operation."""
    monkeypatch.setattr(world.engine, "timeout", 1.5)
    pending = fompi.all_reduce.start(np.ones(3), comm=world) if world.rank == 0 else None
    time.sleep(1.6 if world.rank == 0 else 1.7)
    if pending is None:
        pending = fompi.all_reduce.start(np.ones(3), comm=world)
    assert (pending.wait() == world.size).all()


def test_bind_and_split_with_a_collective_in_flight(world):
    """Some ranks have already started the library's collective when they bind or split, and some have not."""
    draw = Random(world.rank)
    x, w = np.full((64, 64), float(world.rank)), np.ones((64, 64))
    total = 64.0 * sum(range(world.size))
    made = fompi.plan(
        fompi.all_reduce, fompi.Spec((8,), "float64", fompi.Partial()), ranks=world.size, schedule="unfused"
    )
    for _ in range(8):
        pending = fompi.matmul_all_reduce.start(x, w, schedule="unfused", comm=world)
        while draw.random() < 0.5 and world.turns:
            pending.done()
        with fompi.bind(made, comm=world, x=np.ones(8)) as step:
            assert (step() == world.size).all()
        with world.split(0) as again:
            assert again.size == world.size
        assert (pending.wait() == total).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_a_result(world, schedule, dim):
    """The rows of each rank, in any order. All are views of the result, which is there in the end."""
    n, rank = world.size, world.rank

    def x(source):
        shape = (source + 1, 3) if dim == 0 else (3, source + 1)
        return np.arange(3 * source + 3, dtype=float).reshape(shape) + 10 * source

    pending = fompi.all_gather.start(x(rank), dim=dim, comm=world, schedule="auto" if n == 1 else schedule)
    order = [*range(n)]
    Random(rank).shuffle(order)
    parts = {source: pending.part(source) for source in order}
    whole = pending.wait()
    for source, part in parts.items():
        np.testing.assert_array_equal(part, x(source), strict=True)
        assert np.shares_memory(part, whole) or not part.size
        np.testing.assert_array_equal(pending.part(source), part)


def test_parts_of_an_exchange_and_of_a_product(world):
    n, rank = world.size, world.rank
    counts = [(rank + dest) % 3 for dest in range(n)]
    x = np.repeat(np.arange(n) + 100.0 * rank, counts)[:, None]
    pending = fompi.all_to_all.start(x, counts=counts, comm=world)
    for source in range(n):
        expected = np.full(((source + rank) % 3, 1), rank + 100.0 * source)
        np.testing.assert_array_equal(pending.part(source), expected, strict=True)
    pending.wait()
    product = fompi.all_gather_matmul.start(np.full((2, 3), rank, np.float32), np.ones((3, 4), np.float32), comm=world)
    for source in reversed(range(n)):
        np.testing.assert_array_equal(product.part(source), np.full((2, 4), 3.0 * source, np.float32), strict=True)
    product.wait()


def test_parts_that_there_are_not(world):
    pending = fompi.all_reduce.start(np.ones(3), comm=world)
    with pytest.raises(fompi.StateError, match="no rows of single ranks"):
        pending.part(0)
    pending.wait()
    pending = fompi.all_gather.start(np.ones((1, 1)), comm=world)
    with pytest.raises(fompi.LayoutError, match="not one of the"):
        pending.part(world.size)
    pending.wait()


def test_a_part_of_a_call_that_one_rank_refuses(world):
    if world.size == 1:
        return
    x, counts = np.ones((world.size, 1)), [1] * (world.size + (world.rank == 0))
    if world.rank == 0:
        with pytest.raises(fompi.LayoutError):
            fompi.all_to_all.start(x, counts=counts, comm=world)
    else:
        with pytest.raises(fompi.MismatchError):
            fompi.all_to_all.start(x, counts=counts, comm=world).part(0)
