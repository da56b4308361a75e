"""Progress by the helper thread while the program sleeps, computes, or waits."""

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
from fompi.ops.pending import Pending
from fompi.runtime.program import Run

SECONDS = 20
"""How long a test waits for an operation to finish."""


@pytest.fixture
def helped(world):
    """The Communicator of all ranks, in a process with a helper thread."""
    if world.engine.helper is None:
        pytest.skip(f"there is no helper thread: the mode is {world.engine.progress_mode}")
    return world


@pytest.fixture
def switching():
    """Make Python switch between threads often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def is_finished(operation):
    """True if the operation is finished. Makes no progress."""
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


def test_a_wait_gives_the_core_to_others(world):
    """A wait for a late rank uses only a part of the time of a core."""
    if world.size == 1:
        return
    x = np.ones(3)
    fompi.all_reduce(x, comm=world)
    world.link.comm.Barrier()
    begun, cpu_begun = time.monotonic(), time.process_time()
    if world.rank == world.size - 1:
        time.sleep(0.5)
    fompi.all_reduce(x, comm=world)
    waited, cpu_seconds = time.monotonic() - begun, time.process_time() - cpu_begun
    assert world.rank == world.size - 1 or cpu_seconds < 0.6 * waited


def finishes_during(operation, work):
    """Call `work()` until the operation is finished. False if it does not finish within `SECONDS`."""
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
    """The helper does the handshake, the messages and the sums."""
    x = np.full((helped.size, 30_000), helped.rank + 1.0)
    pending = fompi.all_reduce.start(x, comm=helped, schedule=schedule)
    assert finishes_during(pending, work), "the helper does not move it"
    assert (pending.result == sum(range(1, helped.size + 1))).all()


@pytest.mark.parametrize("work", [sleep, compute])
def test_a_bound_operation_ends_while_the_program_does_something_else(helped, work):
    x = np.empty(50_000)
    with fompi.bind(sum_plan(helped, 50_000), comm=helped, x=x) as step:
        for call in range(3):
            x[...] = call + helped.rank
            step.start()
            assert finishes_during(step, work), "the helper does not move it"
            assert (step.wait() == sum(range(helped.size)) + helped.size * call).all()


def blocks_by_rank(world):
    """A plan of an all-gather-matmul by ring, and the operands of this rank. Each block holds its rank's number."""
    specs = Spec((512 * world.size, 64), "float32", Shard(0)), Spec((64, 256 * world.size), "float32", Shard(1))
    plan = fompi.plan(fompi.all_gather_matmul, *specs, ranks=world.size, schedule="ring")
    return plan, np.full((512, 64), world.rank, np.float32), np.ones((64, 256), np.float32)


def move_during_a_kernel(comm, call, step, done):
    """Whether all blocks of others arrive before the kernel on the own block ends, on all ranks, in one of some calls.

    A busy machine may hold the helper up as long as one kernel takes.
    """
    for _ in range(8):
        call()
        arrived = [e.end for e in step.trace.events if e.lane.startswith("recv")]
        assert len(arrived) == comm.size - 1
        if not comm.link.comm.allreduce(max(arrived) >= done["own"]):
            return True
    return False


def test_messages_move_during_a_long_kernel(helped):
    """All other blocks have arrived before the kernel on the own block ends."""
    n, done = helped.size, {}
    if n == 1:
        pytest.skip("no messages")

    def matmul(reads, writes):
        if np.shares_memory(reads[0], x) or (reads[0] == helped.rank).all():
            helped.link.comm.Barrier()  # all ranks have begun
            time.sleep(0.4)
            done["own"] = time.perf_counter()
        np.matmul(*reads, out=writes[0])

    plan, x, w = blocks_by_rank(helped)
    with fompi.bind(plan, comm=helped, x=x, w=w, kernels={"matmul": matmul}) as step:
        assert move_during_a_kernel(helped, step, step, done), "no message moves while a kernel runs"
        y = step()
    np.testing.assert_array_equal(y[:, 0], 64.0 * np.arange(n).repeat(512))


def test_messages_move_during_products_of_a_call_that_no_thread_waits_for(helped, monkeypatch):
    """With two cores per rank one thread multiplies, another thread polls, and the program sleeps."""
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

        def call():
            helped.link.comm.Barrier()
            step.start()
            assert finishes_during(step, sleep), "the helper does not move it"
            return step.wait()

        assert move_during_a_kernel(helped, call, step, done), "no message moves while a kernel runs"
        y = call()
    assert threads == {"fompi compute"}
    np.testing.assert_array_equal(y[:, 0], 64.0 * np.arange(n).repeat(512))
    pending = fompi.all_gather_matmul.start(x, w, comm=helped)
    assert finishes_during(pending, sleep) and (np.asarray(pending.result) == y).all()


def test_the_program_runs_the_products_of_a_call_that_it_waits_for(helped, monkeypatch):
    """The helper never runs one, not even the first: it would share a core with the next product."""
    n, threads, start = helped.size, set(), Run.start

    def start_slowly(*args):
        start(*args)
        time.sleep(5e-3)  # in this time the helper reaches the engine's lock

    monkeypatch.setattr(Run, "start", start_slowly)

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


def test_the_share_that_the_library_moves_by_itself(world):
    """`measure_unaided` returns a share, or a reason why there is none. It is the same on all ranks."""
    begun = time.monotonic()
    with fompi.Communicator(name="probe") as other:
        native = progress.measure_unaided(other.link)
    assert time.monotonic() - begun < SECONDS
    if world.size == 1:
        assert native.skipped == "there is one rank"
    elif native.share is None:
        assert native.skipped.endswith("too short to measure") and native.seconds < progress.SHORTEST_SECONDS
    else:
        assert 0 <= native.share <= 1 and native.seconds >= progress.SHORTEST_SECONDS and not native.skipped
    assert len(set(world.link.comm.allgather(native))) == 1


# ------------------------------------------------------------------------------------------------------------ threads


def test_many_threads_make_progress_at_once(world, switching):
    """Operations start in one order. Four threads wait for them in other orders, while the helper works too."""
    rng, failed = Random(world.rank), []
    sums = [fompi.bind(sum_plan(world, 100 + i), comm=world, x=np.full(100 + i, float(i))) for i in range(4)]

    def drive(thread, waiting):
        try:
            thread_rng = Random(10 * world.rank + thread)
            thread_rng.shuffle(waiting)
            for i, pending in waiting:
                for _ in range(thread_rng.randrange(3)):
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
        rng.shuffle(started)
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


def test_a_finished_operation_is_recorded(helped, monkeypatch):
    """The trace is in the list before the operation is marked as finished, also if the helper finishes it."""
    note = Pending._note

    def note_slowly(*args):
        time.sleep(0.02)
        note(*args)

    monkeypatch.setattr(Pending, "_note", note_slowly)
    for _ in range(3):
        with helped.record() as traces:
            pending = fompi.all_reduce.start(np.ones(1000), comm=helped, schedule="ring")
            assert finishes_during(pending, lambda: time.sleep(1e-3))
            assert len(traces) == 1


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_kernel_that_fails_in_the_helper(helped, kind):
    """The wait raises the error. The helper sends it to the other ranks. The next call works."""
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
            while not step.finished and time.monotonic() < end:
                time.sleep(1e-3)
            if failing:
                with pytest.raises(kind if last else fompi.PeerError, match="a bad product"):
                    step.wait()
            else:
                assert finishes_during(step, sleep)
                assert (step.wait() == 3 * n).all()
    assert threads == {"fompi progress" if helped.engine.helper.worker is None else "fompi compute"}
    assert (fompi.all_reduce(np.ones(3), comm=helped) == n).all()


def test_an_interrupt_in_a_kernel(world):
    """The program that runs the kernel gets it, the other ranks get a PeerError. The communicator stays usable."""
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
