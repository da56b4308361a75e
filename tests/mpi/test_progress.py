"""Who moves messages when nobody calls fompi: the helper thread, beside a program that sleeps, computes, or waits."""

from __future__ import annotations

import sys
import threading
import time
from random import Random

import numpy as np
import pytest

import fompi
from fompi import Partial, Shard, Spec
from fompi.engine import progress
from fompi.ops.operation import Pending
from fompi.runtime.program import Run

SECONDS = 20


@pytest.fixture
def helped(world):
    """A communicator in a process that has a helper thread."""
    if world.engine.helper is None:
        pytest.skip(f"nobody moves messages here: {world.engine.progress_mode}")
    return world


@pytest.fixture
def switching():
    """Threads that take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def is_finished(operation):
    """Without moving it."""
    try:
        _ = operation.result if hasattr(operation, "result") else operation.proof
    except fompi.StateError:
        return False
    return True


def sleep():
    time.sleep(0.01)


def compute():
    a = np.ones((200, 200))
    for _ in range(5):
        a = a @ a / 200


def test_who_waits_leaves_the_core_to_others(world):
    """For a rank that comes late: a wait takes a part of the time of a core, not all of it."""
    if world.size == 1:
        return
    x = np.ones(3)
    fompi.all_reduce(x, comm=world)
    world.link.comm.Barrier()
    begun, spent = time.monotonic(), time.process_time()
    if world.rank == world.size - 1:
        time.sleep(0.5)
    fompi.all_reduce(x, comm=world)
    waited, spent = time.monotonic() - begun, time.process_time() - spent
    assert world.rank == world.size - 1 or spent < 0.6 * waited


def comes_to_an_end(operation, work):
    end = time.monotonic() + SECONDS
    while not is_finished(operation) and time.monotonic() < end:
        work()
    return is_finished(operation)


def sum_plan(world, elements, schedule="ring"):
    return fompi.plan(
        fompi.all_reduce, Spec((elements,), "float64", Partial()), ranks=world.size, schedule=schedule, slices=2
    )


@pytest.mark.parametrize("work", [sleep, compute])
@pytest.mark.parametrize("schedule", ["ring", "direct", "unfused"])
def test_an_operation_ends_while_the_program_does_something_else(helped, schedule, work):
    """Agreement, messages and sums: all of it happens behind the program's back."""
    x = np.full((helped.size, 30_000), helped.rank + 1.0)
    pending = fompi.all_reduce.start(x, comm=helped, schedule=schedule)
    assert comes_to_an_end(pending, work), "only the program moves it"
    assert (pending.result == sum(range(1, helped.size + 1))).all()


@pytest.mark.parametrize("work", [sleep, compute])
def test_a_bound_operation_too(helped, work):
    x = np.empty(50_000)
    with fompi.bind(sum_plan(helped, 50_000), comm=helped, x=x) as step:
        for call in range(3):
            x[...] = call + helped.rank
            step.start()
            assert comes_to_an_end(step, work), "only the program moves it"
            assert (step.wait() == sum(range(helped.size)) + helped.size * call).all()


def blocks_by_rank(world):
    """A ring that gathers and multiplies, and operands of a rank; each block holds the number of its rank."""
    specs = Spec((512 * world.size, 64), "float32", Shard(0)), Spec((64, 256 * world.size), "float32", Shard(1))
    plan = fompi.plan(fompi.all_gather_matmul, *specs, ranks=world.size, schedule="ring")
    return plan, np.full((512, 64), world.rank, np.float32), np.ones((64, 256), np.float32)


def test_messages_move_behind_a_long_kernel(helped):
    """The block of the next rank is there before our own is multiplied, which takes all of the program's time."""
    n, done = helped.size, {}
    if n == 1:
        pytest.skip("no messages")

    def matmul(reads, writes):
        if np.shares_memory(reads[0], x) or (reads[0] == helped.rank).all():
            helped.link.comm.Barrier()  # all have begun
            time.sleep(0.4)
            done["own"] = time.perf_counter()
        np.matmul(*reads, out=writes[0])

    plan, x, w = blocks_by_rank(helped)
    with fompi.bind(plan, comm=helped, x=x, w=w, kernels={"matmul": matmul}) as step:
        y = step()
        arrived = [e.end for e in step.trace.events if e.lane.startswith("recv")]
        assert len(arrived) == n - 1 and max(arrived) < done["own"], "messages rest while a kernel runs"
    np.testing.assert_array_equal(y[:, 0], 64.0 * np.arange(n).repeat(512))


def test_messages_move_behind_the_products_of_a_call_that_nobody_waits_for(helped, monkeypatch):
    """As where each rank has two cores: one thread multiplies, the other one polls, and the program sleeps."""
    monkeypatch.setattr(helped.engine.helper, "worker", progress.Worker())
    n, threads, done = helped.size, set(), {}

    def matmul(reads, writes):
        threads.add(threading.current_thread().name)
        if (reads[0] == helped.rank).all():
            time.sleep(0.4)
            done["own"] = time.perf_counter()
        np.matmul(*reads, out=writes[0])

    plan, x, w = blocks_by_rank(helped)
    with fompi.bind(plan, comm=helped, x=x, w=w, kernels={"matmul": matmul}) as step:
        helped.link.comm.Barrier()
        step.start()
        assert comes_to_an_end(step, sleep), "only the program moves it"
        y = step.wait()
        arrived = [e.end for e in step.trace.events if e.lane.startswith("recv")]
        assert len(arrived) == n - 1 and all(end < done["own"] for end in arrived), "messages rest while a kernel runs"
    assert threads == {"fompi compute"}
    np.testing.assert_array_equal(y[:, 0], 64.0 * np.arange(n).repeat(512))
    pending = fompi.all_gather_matmul.start(x, w, comm=helped)
    assert comes_to_an_end(pending, sleep) and (np.asarray(pending.result) == y).all()


def test_the_program_runs_the_products_of_a_call_that_it_waits_for(helped, monkeypatch):
    """Never the helper, which would share a core with the next product, even if it comes first."""
    n, threads, begin = helped.size, set(), Run.start

    def slowly(*args):
        begin(*args)
        time.sleep(5e-3)  # the helper stands at the engine's lock by now

    monkeypatch.setattr(Run, "start", slowly)

    def matmul(reads, writes):
        threads.add(threading.current_thread().name)
        np.matmul(*reads, out=writes[0])

    specs = Spec((512 * n, 64), "float32", Shard(0)), Spec((64, 128 * n), "float32", Shard(1))
    plan = fompi.plan(fompi.all_gather_matmul, *specs, ranks=n, schedule="direct", slices=2)
    x, w = np.ones((512, 64), np.float32), np.ones((64, 128), np.float32)
    with fompi.bind(plan, comm=helped, x=x, w=w, kernels={"matmul": matmul}) as step:
        for _ in range(20):
            step()
    assert threads == {threading.current_thread().name}


def test_what_the_library_moves_by_itself(world):
    """A share, or why there is none, and the same on all ranks; soon."""
    begun = time.monotonic()
    with fompi.Communicator(name="probe") as other:
        native = progress.measure_native(other.link)
    assert time.monotonic() - begun < 5
    if world.size == 1:
        assert native.skipped == "there is one rank"
    elif native.share is None:
        assert native.skipped.endswith("too quick to tell") and native.seconds < progress.TELLING_SECONDS
    else:
        assert 0 <= native.share <= 1 and native.seconds >= progress.TELLING_SECONDS and not native.skipped
    assert len(set(world.link.comm.allgather(native))) == 1


# ------------------------------------------------------------------------------------------------------------ threads


def test_many_threads_drive_at_once(world, switching):
    """Started in one order; waited for, and asked, on any of four threads, while the helper works too."""
    draw, failed = Random(world.rank), []
    sums = [fompi.bind(sum_plan(world, 100 + i), comm=world, x=np.full(100 + i, float(i))) for i in range(4)]

    def drive(thread, waiting):
        try:
            mine = Random(10 * world.rank + thread)
            mine.shuffle(waiting)
            for i, pending in waiting:
                for _ in range(mine.randrange(3)):
                    pending.done()
                assert (pending.wait() == i * world.size).all(), i
            for call in range(3):
                assert (sums[thread]() == thread * world.size).all(), call
        except BaseException as error:
            failed.append(error)

    for _ in range(4):
        started = []
        for i in range(24):
            schedule = ("auto", "unfused", "ring", "direct")[i % 4]
            started.append((i, fompi.all_reduce.start(np.full(5 + 50 * i, float(i)), comm=world, schedule=schedule)))
        draw.shuffle(started)
        threads = [threading.Thread(target=drive, args=(t, started[t::4])) for t in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed[0]
    for step in sums:
        step.close()


def test_one_operation_waited_for_by_many_threads(world, switching):
    for repeat in range(5):
        pending, results = fompi.all_reduce.start(np.full(1000, float(repeat)), comm=world, schedule="ring"), []
        threads = [threading.Thread(target=lambda p=pending, r=results: r.append(p.wait())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 4 and all((y == repeat * world.size).all() for y in results)


def test_what_is_finished_is_recorded(helped, monkeypatch):
    """Whoever finishes a call, its trace is there for who sees that it is finished."""
    note = Pending._note

    def slow(*args):
        time.sleep(0.02)
        note(*args)

    monkeypatch.setattr(Pending, "_note", slow)
    for _ in range(3):
        with helped.record() as traces:
            pending = fompi.all_reduce.start(np.ones(1000), comm=helped, schedule="ring")
            assert comes_to_an_end(pending, lambda: time.sleep(1e-3))
            assert len(traces) == 1


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_kernel_that_fails_behind_the_program_s_back(helped, kind):
    """The error is kept for who waits; the others are told by the helper as well; the next call goes on."""
    last, failing, threads = helped.rank == helped.size - 1, False, set()

    def matmul(reads, writes):
        threads.add(threading.current_thread().name)
        if failing and last:
            raise kind("a bad product")
        np.matmul(*reads, out=writes[0])

    n = helped.size
    specs = Spec((4 * n, 3 * n), "float64", Shard(1)), Spec((3 * n, 2), "float64", Shard(0))
    plan = fompi.plan(fompi.matmul_all_reduce, *specs, ranks=n, schedule="ring")
    tensors = {"x": np.ones((4 * n, 3)), "w": np.ones((3, 2))}
    with fompi.bind(plan, comm=helped, kernels={"matmul": matmul}, **tensors) as step:
        for call in range(4):
            failing = call % 2 == 1
            step.start()
            end = time.monotonic() + SECONDS
            while step._run.left and time.monotonic() < end:
                time.sleep(1e-3)
            if failing:
                with pytest.raises(kind if last else fompi.PeerError, match="a bad product"):
                    step.wait()
            else:
                assert comes_to_an_end(step, sleep)
                assert (step.wait() == 3 * n).all()
    assert threads == {"fompi progress" if helped.engine.helper.worker is None else "fompi compute"}
    assert (fompi.all_reduce(np.ones(3), comm=helped) == n).all()


def test_an_interrupt_in_a_kernel(world):
    """It reaches the program that runs the kernel; the others get a PeerError, and the communicator goes on."""
    last = world.rank == world.size - 1

    def add(reads, writes):
        if last:
            raise KeyboardInterrupt("in the middle")
        np.add(*reads, out=writes[0])

    if world.size == 1:
        pytest.skip("no sums")
    with fompi.bind(sum_plan(world, 60), comm=world, x=np.ones(60), kernels={"add": add}) as step:
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt if last else fompi.PeerError, match="in the middle"):
                step()
    assert (fompi.all_reduce(np.ones(3), comm=world) == world.size).all()
