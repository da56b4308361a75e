"""Calls in C over a stand-in for MPI in C: how often the progress thread polls and sleeps, who gets the lock.

Rounds, sleeps and calls of the stand-in are counted: a busy machine makes these tests slow, not wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from threading import Thread
from time import perf_counter, sleep

import numpy as np
import pytest

from fompi.engine.in_flight import FAILED, FINISHED, GOES_ON, HAS_KERNELS
from fompi.engine.native import PACE
from fompi.runtime.lower import CHECK, IN_PYTHON, OP

native = pytest.importorskip("fompi.native._native", reason="fompi was installed without a C compiler")

HERE = Path(__file__).resolve().parent
SEND, RECV, KERNEL = range(3)
ADD, FLOAT32 = 1, 1
MARK = 100
MOST_ROUNDS, POLLS_PER_WAKE, PART_NBYTES = 32, 3, 16384


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The stand-in as a library."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "these tests need a C compiler"
    made = tmp_path_factory.mktemp("stand_in") / "stand_in.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", HERE / "stand_in.c", "-o", made], check=True, timeout=60)
    return ctypes.CDLL(str(made))


class StandIn:
    """The stand-in, with the variables of stand_in.c as attributes."""

    def __init__(self, compiled):
        names = ("isend", "isend", "irecv", "test", "testsome")
        addresses = [ctypes.cast(getattr(compiled, name), ctypes.c_void_p).value for name in names]
        self.library = native.Library(*addresses, 7, 8, PACE)
        longs, ints = ("nanoseconds", "tests", "tests_at_mark"), ("done_below", "failure", "holds", "held")
        kinds = dict.fromkeys(longs, ctypes.c_long) | dict.fromkeys(ints, ctypes.c_int)
        self.__dict__["fields"] = {name: kind.in_dll(compiled, name) for name, kind in kinds.items()}
        for name in kinds:
            setattr(self, name, 0)

    def __getattr__(self, name):
        return self.fields[name].value

    def __setattr__(self, name, value):
        if name in self.__dict__.get("fields", ()):
            self.fields[name].value = value
        else:
            self.__dict__[name] = value

    def call(self, *ops, dones=None, nbytes=(64,), spins=0, is_long=False, is_placed=True):
        """A call of ops, each a dict of fields. Op i frees `dones[i]` at its end. Buffers have these `nbytes`."""
        table = np.zeros(len(ops), OP)
        for op, fields in zip(table, ops, strict=True):
            op["divisor"] = 1
            for name, value in fields.items():
                op[name] = value
        dones = dones or [[]] * len(ops)
        blockers = np.zeros(len(ops), np.int32)
        for each in dones:
            blockers[each] += 1
        starts = np.zeros(len(ops) + 1, np.int32), np.zeros(0, np.int32)
        at = np.cumsum([0, *map(len, dones)]).astype(np.int32), np.array([i for each in dones for i in each], np.int32)
        first, sizes = np.flatnonzero(blockers == 0).astype(np.int32), np.array(nbytes, np.int64)
        how = 0, False, spins, is_long, False
        call = native.Call(self.library, table.view(np.uint8), *starts, *at, blockers, first, sizes, *how)
        if is_placed:
            memory = [np.ones(each, np.uint8) for each in nbytes]
            KEPT.append(memory)
            call.place(np.array([array.ctypes.data for array in memory], np.uint64))
        return call


KEPT: list[object] = []
MESSAGE = {"kind": RECV, "count": 64}


@pytest.fixture
def mpi(compiled):
    made = StandIn(compiled)
    yield made
    made.nanoseconds = 0
    made.library.stop()
    KEPT.clear()


@pytest.fixture
def thread(mpi):
    """A function that says how often the progress thread of `mpi` has slept or waited."""
    before = {*os.listdir("/proc/self/task")}
    assert mpi.library.help(2e-4, 1e-3)
    (number,) = {*os.listdir("/proc/self/task")} - before

    def sleeps():
        lines = Path(f"/proc/self/task/{number}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("voluntary"))

    return sleeps


@pytest.fixture
def often():
    """Threads of Python take turns at once: these tests are not about the GIL."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def soon(condition, seconds=20.0):
    until = perf_counter() + seconds
    while perf_counter() < until:
        if condition():
            return True
        sleep(1e-3)
    return False


# ------------------------------------------------------------------------------------------------ the progress thread


@pytest.mark.parametrize(
    ("calls", "nanoseconds", "nbytes"),
    [(8, 2_000, 64), (1, 20_000, 64), (40, 1_000, 64), (2, 20_000, 4 << 20)],
)
def test_the_thread_sleeps_while_nothing_arrives(mpi, thread, calls, nanoseconds, nbytes):
    """Rounds that take long repeat no more often than messages have parts, and in all that time at most once each."""
    mpi.nanoseconds = nanoseconds
    flying = [mpi.call({"kind": RECV, "count": nbytes}, nbytes=[nbytes]) for _ in range(calls)]
    assert {call.run(0, 0.0, 1.0) for call in flying} == {GOES_ON}
    slept, tested = thread(), mpi.tests
    assert soon(lambda: mpi.tests - tested > calls * (1000 + 2 * calls * nbytes // PART_NBYTES))
    rounds = (mpi.tests - tested) / calls
    parts = calls * nbytes // PART_NBYTES
    assert rounds <= 1.5 * POLLS_PER_WAKE * (thread() - slept + 2) + parts
    assert [call.state for call in flying] == [GOES_ON] * calls


def test_the_thread_rests_while_another_one_polls_or_nothing_is_in_flight(mpi, thread):
    """It is woken by a call that goes on without a driver."""
    driven, left = mpi.call(MESSAGE), mpi.call(MESSAGE)
    assert left.run(0, 0.0, 1.0) == GOES_ON
    driver = Thread(target=lambda: driven.run(0, 20.0, 20.0))
    driver.start()
    sleep(0.2)
    slept, tested = thread(), mpi.tests
    sleep(0.5)
    assert thread() - slept <= 2 and mpi.tests > tested
    slept, mpi.done_below = thread(), 1
    driver.join()
    assert driven.state == FINISHED and soon(lambda: left.state == FINISHED)
    sleep(0.2)
    assert thread() - slept <= 15
    mpi.done_below = 0
    assert left.run(0, 0.0, 1.0) == GOES_ON
    mpi.done_below = 1
    assert soon(lambda: left.state == FINISHED)


def test_rounds_that_move_something_repeat_a_few_times(mpi, thread):
    call = mpi.call(*[MESSAGE] * 4000, dones=[[i + 1] for i in range(3999)] + [[]])
    assert call.run(0, 0.0, 1.0) == GOES_ON
    mpi.done_below, slept, tested = 1, thread(), mpi.tests
    assert soon(lambda: call.state == FINISHED)
    assert mpi.tests - tested <= 1.5 * MOST_ROUNDS * (thread() - slept + 2)


def test_before_a_kernel_of_python_there_are_a_few_rounds(mpi):
    """As long as messages end one after the other, `take` polled on."""
    long = mpi.call({"kind": IN_PYTHON}, is_long=True)
    chain = mpi.call(*[MESSAGE] * 4000, dones=[[i + 1] for i in range(3999)] + [[]])
    assert long.run(0, 0.0, 1.0) == HAS_KERNELS and chain.run(0, 0.0, 1.0) == GOES_ON
    mpi.done_below, tested = 1, mpi.tests
    assert long.take(False) == 0
    assert 1 < mpi.tests - tested <= MOST_ROUNDS
    assert long.ran(0, 1.0) == FINISHED


# ------------------------------------------------------------------------------------------------ the lock


def rounds_until_it_has_the_lock(mpi):
    """How often the thread that polls has tested a message between another one's question for the lock and its turn."""
    mpi.holds = 1
    assert soon(lambda: mpi.held)  # in a function of MPI, with the lock
    tested, asked, numbers = mpi.tests, mpi.call(MESSAGE), []
    asker = Thread(target=lambda: (numbers.append(threading.get_native_id()), asked.run(MARK, 0.0, 1.0)))
    asker.start()

    def is_asleep():
        return numbers and " S " in Path(f"/proc/self/task/{numbers[0]}/stat").read_text()

    assert soon(lambda: is_asleep() and not sleep(5e-3) and is_asleep())
    mpi.holds = 0
    asker.join()
    asked.export()
    return mpi.tests_at_mark - tested


def test_a_thread_that_waits_for_a_call_hands_the_lock_over(mpi):
    """At once: not after as many rounds as another core takes to wake the other thread."""
    call = mpi.call(MESSAGE)
    call.run(0, 0.0, 1.0)
    driver = Thread(target=call.drive, args=(40.0, 40.0))
    driver.start()
    try:
        assert [rounds_until_it_has_the_lock(mpi) for _ in range(10)] == [0] * 10
    finally:
        mpi.holds, mpi.done_below = 0, 1
        driver.join()


def test_a_thread_whose_messages_move_hands_the_lock_over(mpi):
    """It waits for a call, and each poll moves something: no round is idle."""
    mpi.nanoseconds = 2_000
    call = mpi.call(*[MESSAGE] * 20_000, dones=[[i + 1] for i in range(19_999)] + [[]])
    call.run(0, 0.0, 1.0)
    mpi.done_below = 1
    driver = Thread(target=call.drive, args=(40.0, 40.0))
    driver.start()
    try:
        assert rounds_until_it_has_the_lock(mpi) <= 1
    finally:
        mpi.holds = mpi.nanoseconds = 0
        driver.join()


def test_the_progress_thread_hands_the_lock_over(mpi, thread):
    call = mpi.call(MESSAGE)
    call.run(0, 0.0, 1.0)
    assert [rounds_until_it_has_the_lock(mpi) for _ in range(10)] == [0] * 10


ASKS = {
    "state": lambda mpi, call: call.state,
    "times": lambda mpi, call: call.times(),
    "unfinished": lambda mpi, call: call.unfinished,
    "release": lambda mpi, call: call.release(np.array([1], np.int32)),
    "watch": lambda mpi, call: setattr(mpi.library, "is_watched", 1),
    "news": lambda mpi, call: mpi.library.news,
    "wake": lambda mpi, call: mpi.library.wake(),
}


@pytest.mark.parametrize("name", ASKS)
def test_nobody_waits_for_the_gil_with_the_lock(mpi, thread, compiled, name):
    """While another thread keeps the GIL, as in a function of another extension, the progress thread polls on."""
    call = mpi.call(MESSAGE, MESSAGE)
    call.run(50, 0.0, 1.0, np.array([1], np.int32))
    mpi.holds = 1
    assert soon(lambda: mpi.held)
    asker = Thread(target=ASKS[name], args=(mpi, call))
    asker.start()
    sleep(0.02)  # it has let go of the GIL, and waits for the lock
    tested = mpi.tests
    ctypes.PyDLL(compiled._name).go_on(300)
    assert mpi.tests - tested > 20
    asker.join(10.0)
    assert not asker.is_alive()


def test_many_threads_ask_and_wait(mpi, thread, often):
    """Nobody is left waiting, whoever hands the lock to whom."""
    mpi.nanoseconds = 2_000
    calls = [mpi.call(*[MESSAGE] * 50, dones=[[i + 1] for i in range(49)] + [[]]) for _ in range(3)]
    done, counts = threading.Event(), [0] * 2

    def drive(call):
        for turn in range(5):
            state = call.run(turn, 0.002, 10.0)
            while state != FINISHED:
                state = call.drive(0.002, 10.0)

    def ask(k):
        while not done.is_set():
            counts[k] += sum(call.state != FAILED for call in calls)
            mpi.library.poll()
            sleep(1e-4)

    mpi.done_below = 9
    drivers = [Thread(target=drive, args=(call,), daemon=True) for call in calls]
    askers = [Thread(target=ask, args=(k,), daemon=True) for k in range(2)]
    for each in drivers + askers:
        each.start()
    for each in drivers:
        each.join(30.0)
    done.set()
    for each in askers:
        each.join(30.0)
    assert not any(each.is_alive() for each in drivers + askers) and all(counts)
    assert [call.unfinished for call in calls] == [0] * 3


# ------------------------------------------------------------------------------------------------ what Python is told


@pytest.fixture
def rests(mpi):
    """A function that begins to rest in another thread, and one that waits for its end."""
    sleeper = Thread(target=mpi.library.rest, args=(40.0,))

    def has_ended():
        sleeper.join(10.0)
        return not sleeper.is_alive()

    yield sleeper.start, has_ended
    mpi.library.wake()
    sleeper.join()


@pytest.mark.parametrize("rests_before", [False, True])
def test_rest_ends_if_a_call_has_ended_in_a_wait_for_another_one(mpi, rests, rests_before):
    other, own = mpi.call(MESSAGE), mpi.call(MESSAGE)
    mpi.library.is_watched = 1
    assert other.run(0, 0.0, 1.0) == GOES_ON == own.run(5, 0.0, 1.0)
    if rests_before:
        rests[0]()
        sleep(0.05)
    mpi.done_below = 1
    assert own.drive(20.0, 20.0) == GOES_ON  # there are news
    assert other.state == FINISHED and mpi.library.news == 2
    mpi.done_below = 6
    assert own.drive(20.0, 20.0) == FINISHED
    if not rests_before:
        rests[0]()
    assert rests[1]() and mpi.library.poll() == 2


def test_rest_ends_if_somebody_watches_what_has_ended(mpi, rests):
    calls = mpi.call(MESSAGE), mpi.call(MESSAGE)
    assert [call.run(5 * i, 0.0, 1.0) for i, call in enumerate(calls)] == [GOES_ON] * 2
    mpi.done_below = 1
    assert calls[1].drive(20.0, 20.0) == GOES_ON and calls[0].state == FINISHED
    rests[0]()
    sleep(0.05)
    mpi.library.is_watched = 1
    assert rests[1]()


def test_rest_ends_if_a_kernel_can_run_that_nobody_runs(mpi, rests):
    """As long as Python runs another one, it will look itself."""
    calls = mpi.call({"kind": IN_PYTHON}), mpi.call(MESSAGE, {"kind": IN_PYTHON}, dones=[[1], []]), mpi.call(MESSAGE)
    assert [call.run(5 * i, 0.0, 1.0) for i, call in enumerate(calls)] == [HAS_KERNELS, GOES_ON, GOES_ON]
    assert calls[0].take(False) == 0
    mpi.library.poll()
    mpi.done_below = 6
    assert calls[2].drive(20.0, 20.0) == GOES_ON and mpi.library.news == 4
    begun = perf_counter()
    mpi.library.rest(0.05)
    assert perf_counter() - begun > 0.049
    assert calls[0].ran(0, 1.0) == FINISHED
    rests[0]()
    assert rests[1]()


# ------------------------------------------------------------------------------------------------ what stays


COUNT = 1 << 24
SUM = {
    "kind": KERNEL, "kernel": ADD, "dtype": FLOAT32, "count": COUNT, "buffers": (1, 1, 2),
}  # fmt: skip


def with_a_kernel_that_runs(mpi):
    """A call whose long sum has begun in the progress thread, beside a message that is not done; and its memory."""
    x, y = np.ones(COUNT, np.float32), np.zeros(COUNT, np.float32)
    call = mpi.call(MESSAGE, SUM, MESSAGE, dones=[[1], [], []], nbytes=(64, x.nbytes, y.nbytes), is_placed=False)
    memory = np.zeros(64, np.uint8)
    KEPT.append((memory, x, y))
    call.place(np.array([a.ctypes.data for a in (memory, x, y)], np.uint64))
    call.run(0, 0.0, 1.0)
    mpi.done_below = 1
    assert soon(lambda: np.frombuffer(call.times())[1])
    return call, y


def test_a_call_that_has_failed_goes_when_its_kernel_has_run(mpi, thread):
    call, y = with_a_kernel_that_runs(mpi)
    mpi.failure = 15
    mpi.library.poll()
    has_failed = call.state == FAILED
    del call
    assert y[-1] == 2 or not has_failed


def test_export_waits_for_a_kernel_without_the_gil(mpi, thread):
    ticks, ended = [], threading.Event()

    def tick():
        while not ended.is_set():
            ticks.append(perf_counter())
            sleep(1e-4)

    ticker = Thread(target=tick)
    ticker.start()
    for _ in range(10):
        mpi.done_below = 0
        call, y = with_a_kernel_that_runs(mpi)
        begun = perf_counter()
        _, times, _ = call.export()
        waited = perf_counter()
        assert y[-1] == 2 and np.frombuffer(times)[4]
        if sum(begun + 1e-3 < tick < waited - 1e-3 for tick in ticks):
            break
    else:
        raise AssertionError("no other thread of Python ran while `export` waited")
    ended.set()
    ticker.join()


def test_what_python_has_taken_is_given_back_at_the_end(mpi, thread):
    """While the thread asks whether a kernel runs: the sanitizer for threads sees whether both hold the lock."""
    kernel = {"kind": IN_PYTHON}
    for turn in range(20):
        call, ready = mpi.call(kernel, MESSAGE), mpi.call(MESSAGE, kernel, dones=[[1], []])
        assert call.run(0, 0.0, 1.0) == HAS_KERNELS and ready.run(0, 0.0, 1.0) == GOES_ON
        assert call.take(False) == 0 and call.take(False) == -1
        mpi.done_below = 1
        assert soon(lambda: mpi.library.news & 4)
        sleep(1e-3)
        mpi.done_below = 0
        if turn % 2:
            call.export()
        del call
        mpi.done_below = 1
        assert soon(lambda ready=ready: ready.take(False) == 1) and ready.ran(1, 1.0) == FINISHED
        mpi.done_below = 0
        with pytest.raises(IndexError, match="no such kernel"):
            ready.ran(1, 1.0)
        mpi.library.poll()


def test_kernels_are_launched_while_another_thread_waits(mpi):
    """A wait sleeps no longer than until the next kernel is due, and reads the list of those with the lock."""
    call = mpi.call(*[{"kind": IN_PYTHON}] * 50, MESSAGE)
    assert call.run(0, 0.0, 1.0) == HAS_KERNELS
    assert [call.take(False) for _ in range(50)] == [*range(50)]
    driver = Thread(target=call.drive, args=(20.0, 20.0))
    driver.start()
    for i in range(50):
        call.launched(i, perf_counter(), perf_counter() + 1e-3 * (7 * i % 20))
        sleep(5e-4)
    assert soon(lambda: call.unfinished == 1)
    mpi.done_below = 1
    driver.join()
    assert call.state == FINISHED


def test_a_call_without_memory_is_refused(mpi):
    """Address 0 is none, in `run` and in `run_on`. What has no bytes needs none."""
    call = mpi.call(MESSAGE, is_placed=False)
    with pytest.raises(ValueError, match="buffer 0 has no address"):
        call.run(0, 0.0, 1.0)
    call.form(np.array([0], np.int32), 0, 8)
    with pytest.raises(ValueError, match="buffer 0 has no address"):
        call.run_on(0, 0.0, 1.0, 0, (0,))
    stamped = mpi.call({"kind": RECV}, is_placed=False)
    stamped.form(np.zeros(0, np.int32), 1, 8)
    with pytest.raises(ValueError, match="buffer 0 has no address"):
        stamped.run_on(0, 0.0, 1.0, 1, ())
    equal = mpi.call({"kind": CHECK, "count": 64, "buffers": (0, 1, 0)}, nbytes=(64, 64), is_placed=False)
    memory = np.zeros(64, np.uint8)
    equal.place(np.array([memory.ctypes.data, 0], np.uint64))
    with pytest.raises(ValueError, match="buffer 1 has no address"):
        equal.run(0, 0.0, 1.0)
    equal.place(np.array([memory.ctypes.data] * 2, np.uint64))
    assert equal.run(0, 0.0, 1.0) == FINISHED
    empty = mpi.call({"kind": RECV}, {"kind": IN_PYTHON}, is_placed=False)
    assert empty.run(0, 0.0, 1.0) == HAS_KERNELS and empty.take(False) == 1 and empty.ran(1, 1.0) == FINISHED


def test_memory_does_not_change_under_a_call(mpi):
    call = mpi.call(MESSAGE)
    assert call.run(0, 0.0, 1.0) == GOES_ON
    with pytest.raises(RuntimeError, match="not finished"):
        call.place(np.zeros(1, np.uint64))


def test_two_threads_stop_the_thread(mpi):
    for _ in range(50):
        assert mpi.library.help(1e-5, 1e-5) and mpi.library.has_thread
        others = [Thread(target=mpi.library.stop) for _ in range(3)]
        for other in others:
            other.start()
        mpi.library.stop()
        assert not mpi.library.has_thread
        for other in others:
            other.join(20.0)
        assert not any(other.is_alive() for other in others)


def test_a_thread_that_begins_while_another_ends(mpi):
    """`help` says there is a thread: then there is one afterwards."""
    for _ in range(50):
        mpi.library.help(1e-5, 1e-5)
        stopper = Thread(target=mpi.library.stop)
        stopper.start()
        while mpi.library.has_thread and stopper.is_alive():
            pass
        assert mpi.library.help(1e-5, 1e-5)
        stopper.join()
        assert mpi.library.has_thread
        mpi.library.stop()


def test_an_exported_call_starts_nothing(mpi):
    """Python goes on with it: what it holds back is no business of C any more."""
    call = mpi.call(MESSAGE, MESSAGE)
    assert call.run(MARK, 0.0, 1.0, np.array([0, 1], np.int32)) == GOES_ON
    call.release(np.array([0], np.int32))
    mpi.tests_at_mark = -1
    assert len(call.export()[2]) == 1
    with pytest.raises(IndexError, match="no such op"):
        call.release(np.array([1], np.int32))
    assert mpi.tests_at_mark == -1


def test_a_call_that_is_driven_is_refused(mpi):
    """Another thread writes its counters meanwhile: nothing of them is read."""
    call = mpi.call(*[MESSAGE] * 50, dones=[[i + 1] for i in range(49)] + [[]])
    mpi.nanoseconds, mpi.holds = 2_000, 1
    driver = Thread(target=call.run, args=(0, 20.0, 20.0))
    driver.start()
    assert soon(lambda: mpi.held)
    mpi.holds, mpi.done_below = 0, 1
    while driver.is_alive():
        with contextlib.suppress(RuntimeError, ValueError):  # the latter once it is finished
            call.place(np.zeros(0, np.uint64))
    driver.join()
    assert call.state == FINISHED


def test_the_bytes_of_a_wire_fit_into_their_number(mpi):
    encode = {"kind": KERNEL, "kernel": 6, "flags": 1, "count": 2**59 - 1, "buffers": (0, 0, 0)}
    with pytest.raises(ValueError, match="does not stay inside"):
        mpi.call(encode)
