"""The engine and its helper thread, tested with fake requests and without MPI."""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import NamedTuple

import pytest

from fompi.base.errors import LaunchError, PeerError
from fompi.engine import engine as engines
from fompi.engine import progress
from fompi.engine.engine import SPINS, YIELDS, Engine
from fompi.engine.progress import POLLS_PER_WAKE, Helper, Pause, Worker, choose_mode, pause_between_polls, unaided_share
from fompi.engine.tasks import Task


class Kernels(Task):
    """A task of kernels. It hands out merges first, and is finished when all kernels have run."""

    def __init__(self, engine, products=(), merges=()):
        self.engine, self.products, self.merges = engine, list(products), list(merges)
        self.unfinished = len(self.products) + len(self.merges)
        self.threads = set()  # the names of the threads that ran its kernels

    def start(self):
        with self.engine.lock:
            self.engine.kernels_ready(self)
        self.engine.wake_helper()

    def take(self, merges_only):
        kernels = self.merges or ([] if merges_only else self.products)
        if not kernels:
            return None
        kernel = kernels.pop(0)
        if not self.products and not self.merges:
            self.engine.kernels_done(self)
        return id(kernel), kernel

    def ran(self, key, begun, error):
        self.threads.add(threading.current_thread().name)
        self.error = self.error or error
        self.unfinished -= 1
        self.finished = self.unfinished == 0


class Request(NamedTuple):
    """A fake MPI request. It is done if its name is in `arrived`."""

    name: object
    engine: Engine

    def Test(self):
        return bool(self.engine._testsome([self]))


class Arrivals(Task):
    """A task of messages with these names."""

    def __init__(self, engine, names):
        self.missing = set(names)
        for name in names:
            engine.post(Request(name, engine), self, name)

    def completed(self, key):
        self.missing.remove(key)
        self.finished = not self.missing


@pytest.fixture
def arrived():
    """The names of the requests that are done."""
    return set()


@pytest.fixture
def engine(arrived):
    def testsome(requests):
        return [i for i, request in enumerate(requests) if request.name in arrived]

    pause = Pause(1e-4, 2e-3)
    made = Engine(testsome, timeout=5.0, spins=0, progress_mode="helper", helper=lambda engine: Helper(engine, pause))
    yield made
    made.helper.stop()


@pytest.fixture
def helpers():
    """A function that counts the helper threads of this test."""
    before = set(threading.enumerate())
    return lambda: sum(thread.name == "fompi progress" for thread in set(threading.enumerate()) - before)


def soon(condition, seconds=20.0):
    """Wait for `condition()`. False if it does not hold within `seconds`."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(1e-3)
    return condition()


# ------------------------------------------------------------------------------------------------------------- modes


def test_modes():
    assert choose_mode("auto", "multiple") == "helper"
    for mode in ("helper", "library", "poll"):
        assert choose_mode(mode, "multiple") == mode
    assert choose_mode("auto", "multiple", unaided_share=0.95) == "library"
    assert choose_mode("auto", "multiple", unaided_share=0.6) == choose_mode("helper", "multiple", 0.95) == "helper"
    assert choose_mode("auto", "serialized", unaided_share=0.95) == "poll"
    for level in ("single", "funneled", "serialized"):
        assert {choose_mode(mode, level) for mode in ("auto", "helper", "library", "poll")} == {"poll"}
    with pytest.raises(LaunchError, match="FOMPI_PROGRESS=spin: give one of auto, helper, library, poll"):
        choose_mode("spin", "serialized")


def test_the_helper_polls_rarely_if_cores_are_scarce_or_the_library_needs_no_help():
    spare, scarce, native = (pause_between_polls(*case) for case in (("helper", 2), ("helper", 1), ("library", 1)))
    assert pause_between_polls("helper", 4) == spare and pause_between_polls("helper", 0.25) == scarce
    assert pause_between_polls("library", 4) == native
    assert spare.least == spare.most < scarce.least < scarce.most == native.least == native.most
    assert [str(pause) for pause in (spare, scarce, native)] == ["0.05 ms", "1 to 4 ms", "4 ms"]


def test_the_pause_follows_the_time_between_messages():
    pause = Pause(1e-3, 4e-3)
    assert [pause.after(gap) for gap in (0, 1e-3, 4e-3, 8e-3, 16e-3, 1.0)] == [1e-3, 1e-3, 1e-3, 2e-3, 4e-3, 4e-3]


def test_short_slices_change_nothing_else(monkeypatch):
    """The thread keeps its nice value and its policy. On an unknown processor the system call is not made."""
    results = []

    def request_slices():
        before = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
        results.append(progress.request_short_slices())
        assert (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)) == before
        monkeypatch.setattr(progress, "_SCHED_SETATTR", {})
        results.append(progress.request_short_slices())

    thread = threading.Thread(target=request_slices)
    thread.start()
    thread.join()
    assert len(results) == 2 and results[1] is False


@pytest.mark.parametrize(
    ("polled", "rest", "share"), [(0.02, 0.0, 1.0), (0.02, 0.02, 0.0), (0.02, 0.005, 0.75), (0.02, 0.03, 0.0)]
)
def test_the_share_that_a_library_moves_by_itself(polled, rest, share):
    assert unaided_share(polled, rest) == pytest.approx(share)


# ------------------------------------------------------------------------------------------------------------- helper


def test_messages_and_kernels_move_without_the_program(engine, arrived):
    messages, kernels = Arrivals(engine, ["a", "b"]), Kernels(engine, products=[lambda: None] * 3)
    kernels.start()
    assert soon(lambda: kernels.finished) and kernels.threads == {"fompi progress"}
    arrived.update("ab")
    assert soon(lambda: messages.finished) and engine.idle


def test_during_a_kernel_the_helper_moves_messages_and_runs_sums(engine, arrived):
    """It leaves products to the program, which runs a kernel."""
    others = Kernels(engine, products=[lambda: None], merges=[lambda: None] * 2)
    messages = Arrivals(engine, ["a"])
    result = {}

    def long():
        others.start()
        arrived.add("a")
        result["moved"] = soon(lambda: others.unfinished == 1 and messages.finished)
        time.sleep(0.02)
        result["products left"] = len(others.products)

    own = Kernels(engine, products=[long])
    with engine.lock:
        engine.kernels_ready(own)
        engine._ready.sort(key=lambda task: task is not own)
    engine.progress()
    assert result == {"moved": True, "products left": 1} and own.threads == {threading.current_thread().name}
    assert soon(lambda: others.finished)


def test_the_helper_runs_no_products_of_a_call_that_the_program_is_about_to_wait_for(engine):
    """It runs only the sums of that call."""
    task = Kernels(engine, products=[lambda: None] * 2, merges=[lambda: None])
    task.awaited = True
    messages = Arrivals(engine, ["never"])
    task.start()
    assert soon(lambda: not task.merges)
    time.sleep(0.02)
    assert len(task.products) == 2 and not messages.finished
    engine.wait(task, Departed(set(), None))
    assert task.threads == {threading.current_thread().name, "fompi progress"} and not task.awaited


def test_a_wait_spins_then_yields_the_core_then_sleeps(monkeypatch):
    """Other ranks may share the core, and they must move messages too."""

    class Late(Task):
        polls = 0

        def take(self, merges_only):
            self.polls += 1
            self.finished = self.polls == 500

    waiting, yields, sleeps = Late(), [], []
    made = Engine(lambda requests: None, timeout=5.0, spins=SPINS)
    made.kernels_ready(waiting)
    monkeypatch.setattr(engines.os, "sched_yield", lambda: yields.append(waiting.polls))
    monkeypatch.setattr(engines, "sleep", sleeps.append)
    made.wait(waiting, Departed(set(), None))
    assert yields == list(range(SPINS + 1, SPINS + YIELDS + 1)) and SPINS < 50
    assert len(sleeps) == 500 - SPINS - YIELDS and sleeps == sorted(sleeps) and sleeps[-1] < 1e-3


def test_the_helper_rests_while_another_thread_polls(engine):
    """So it does not compete for the lock with a program that polls."""
    messages = Arrivals(engine, ["never"])
    engine.helper.use(Pause(0.02, 0.02))
    engine.wake_helper()

    def rests():
        before, own_polls = engine.polls, 100
        for _ in range(own_polls):
            engine.progress()
            time.sleep(1e-3)
        return engine.polls - before - own_polls <= 0.2 * own_polls

    assert soon(rests) and not messages.finished  # a busy machine may hold the program up


def test_the_helper_polls_less_often_if_messages_are_far_apart(engine, arrived):
    def message(name, gap):
        task = Arrivals(engine, [name])
        time.sleep(gap)
        arrived.add(name)
        assert soon(lambda: task.finished)

    engine.helper.use(Pause(1e-4, 2e-2))  # long beside what a busy machine takes to wake a thread
    engine.wake_helper()
    others = Arrivals(engine, ["never"])  # keeps the engine busy; only the time between arrivals counts
    message("late", 0.1)
    assert soon(lambda: engine.helper.seconds == engine.helper.pause.most)
    names = itertools.count()

    def polls_more_often():  # on a busy machine, messages without a gap may be far apart, too
        message(next(names), 0.0)
        return engine.helper.seconds < engine.helper.pause.most

    assert soon(polls_more_often)
    assert not others.finished


TRIES = 8
"""A busy machine may hold a thread up as long as a kernel of these tests takes. It does not do so every time."""


def test_the_helper_polls_in_the_middle_of_kernels_of_a_call_that_forwards(engine, arrived):
    """Such a call sends what it receives, so other ranks wait for it. Other calls are polled after the kernel."""
    engine.helper.use(Pause(1e-3, 0.045))

    def polls(forwards, turn):
        engine.helper.seconds = 0.045
        finished, task, message = [], Kernels(engine), Arrivals(engine, [(forwards, turn)])

        def kernel():
            arrived.add((forwards, turn))
            time.sleep(0.03)
            finished.append(message.finished)

        task.products, task.unfinished = [lambda: time.sleep(0.02), lambda: time.sleep(0.02), kernel], 3
        task.is_long, task.forwards = True, forwards
        with engine.lock:
            engine.kernels_ready(task)
        while not task.finished:
            engine.progress()
        engine.progress()
        time.sleep(0.1)
        return finished == [True]

    for forwards in (False, True):
        assert any(polls(forwards, turn) == forwards for turn in range(TRIES)), forwards


def test_the_pause_begins_with_the_kernel(engine, arrived):
    """There is a poll just before each kernel. In a kernel slightly longer than the pause there is one more poll."""
    engine.helper.use(Pause(0.02, 0.02))

    def polls(turn):
        finished, task, message = [], Kernels(engine), Arrivals(engine, [turn])

        def kernel():
            arrived.add(turn)
            time.sleep(0.027)
            finished.append(message.finished)

        task.products, task.unfinished, task.is_long = [lambda: time.sleep(0.01), kernel], 2, True
        with engine.lock:
            engine.kernels_ready(task)
        while not task.finished:
            engine.progress()
        engine.progress()
        return finished == [True]

    assert any(map(polls, range(TRIES)))


def test_the_helper_rests_while_the_program_runs_kernels_and_no_message_is_in_flight(engine, monkeypatch):
    monkeypatch.setattr(progress, "REST_SECONDS", 10.0)
    polls, task = [], Kernels(engine)

    def long():
        before = engine.polls
        time.sleep(0.2)
        polls.append(engine.polls - before)

    def sends():
        task.messages = Arrivals(engine, ["never"])

    task.products, task.unfinished, task.is_long = [engine.wake_helper, long, sends, long], 4, True
    with engine.lock:
        engine.kernels_ready(task)
    while not task.finished:
        engine.progress()
    assert polls[0] <= 1 < polls[1]


def test_before_a_long_kernel_the_engine_polls_several_times(engine, arrived, monkeypatch):
    """In Open MPI one poll receives data, and a later poll reports it."""
    monkeypatch.setattr(engine, "helper", None)
    polls = []

    def testsome(requests):
        polls.append(engine.polls)
        return [i for i, request in enumerate(requests) if request.name in arrived and len(polls) >= POLLS_PER_WAKE]

    engine._testsome = testsome
    message, task = Arrivals(engine, ["a"]), Kernels(engine, products=[lambda: finished.append(message.finished)])
    task.is_long, finished = True, []
    arrived.add("a")
    with engine.lock:
        engine.kernels_ready(task)
    engine.progress()
    assert finished == [True]


def test_the_helper_sleeps_when_nothing_is_in_flight_and_wakes_again(helpers, engine, monkeypatch):
    monkeypatch.setattr(progress, "LINGER_SECONDS", 1e-3)
    for _ in range(20):
        kernels = Kernels(engine, products=[lambda: None])
        kernels.start()
        assert soon(lambda kernels=kernels: kernels.finished)
        time.sleep(3e-3)
    assert soon(lambda: not engine.helper._awake)
    before = engine.polls
    time.sleep(0.02)
    assert engine.polls == before
    assert helpers() == 1


def test_many_threads_wake_one_helper(helpers, engine):
    """Eight threads wake the helper at the same time. There is still one helper thread."""
    gate = threading.Barrier(8)

    def begin():
        gate.wait()
        engine.wake_helper()

    Arrivals(engine, ["never"])
    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert helpers() == 1


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_kernel_that_raises_in_the_helper(engine, kind):
    """The task keeps the error, for the thread that waits for it. The helper goes on."""

    def bad():
        raise kind("a bad kernel")

    failing = Kernels(engine, products=[bad])
    failing.start()
    assert soon(lambda: failing.finished) and isinstance(failing.error, kind)
    next_task = Kernels(engine, products=[lambda: None])
    next_task.start()
    assert soon(lambda: next_task.finished) and next_task.error is None


def test_the_worker_runs_the_products_of_a_call_that_no_thread_waits_for(engine, arrived):
    """It runs them one after the other. Messages and sums move at the same time. The task keeps an error."""
    engine.helper.worker = Worker()
    messages, others = Arrivals(engine, ["a"]), Kernels(engine, merges=[lambda: None] * 2)
    result = []

    def long():
        others.start()
        arrived.add("a")
        result.append(soon(lambda: messages.finished and others.finished))
        result.append(engine.computing)

    def bad():
        raise KeyboardInterrupt("a bad kernel")

    task = Kernels(engine, products=[long, bad, lambda: None])
    task.start()
    assert soon(lambda: task.finished) and result == [True, 1]
    assert task.threads == {"fompi compute"} and others.threads == {"fompi progress"}
    assert isinstance(task.error, KeyboardInterrupt) and engine.idle and not engine.computing


def test_the_worker_leaves_products_to_a_program_that_waits(engine):
    engine.helper.worker = Worker()
    task = Kernels(engine, products=[lambda: time.sleep(1e-3)] * 20, merges=[lambda: None])
    task.start()
    assert soon(lambda: task.threads >= {"fompi compute"})
    engine.wait(task, Departed(set(), None))
    assert task.finished and threading.current_thread().name in task.threads and len(task.products) == 0


def test_the_helper_stops(helpers, engine):
    Arrivals(engine, ["never"])
    engine.wake_helper()
    assert soon(lambda: engine.polls > 3)
    engine.helper.stop()
    before = engine.polls
    engine.wake_helper()
    time.sleep(0.01)
    assert engine.polls == before
    assert helpers() == 0


# ------------------------------------------------------------------------------------------------------------- engine


def test_kernels_run_outside_the_lock(engine):
    """Another thread can poll, and start calls, while a kernel runs."""
    entered, leave = threading.Event(), threading.Event()

    def long():
        entered.set()
        assert leave.wait(5)

    task = Kernels(engine, products=[long])
    with engine.lock:
        engine.kernels_ready(task)
    thread = threading.Thread(target=engine.progress)
    thread.start()
    assert entered.wait(5) and engine.computing == 1
    assert engine.lock.acquire(timeout=1)
    engine.lock.release()
    leave.set()
    thread.join()
    assert task.finished and engine.computing == 0


def test_an_interrupt_in_a_kernel_is_raised_in_the_thread_that_runs_it(engine):
    """The task keeps it too. The engine goes on."""

    def bad():
        raise KeyboardInterrupt

    task = Kernels(engine, products=[bad, lambda: None])
    with engine.lock:
        engine.kernels_ready(task)
    with pytest.raises(KeyboardInterrupt):
        engine.progress()
    assert isinstance(task.error, KeyboardInterrupt) and engine.computing == 0
    assert engine.progress() and task.finished


class Departed:
    """The channel of a rank whose peer has ended. The peer's last message arrives with its goodbye, if it sent one."""

    asking, timeout, lost = False, None, None

    def __init__(self, arrived, request):
        self.departed, self.stopped, self.begun = {}, {}, time.perf_counter()
        self.arrived, self.request, self.failed = arrived, request, None

    def receive(self):
        if time.perf_counter() - self.begun > 0.3:
            self.departed = {1: "rank 1 has ended"}
            self.arrived.add(self.request)
        return False

    def absent_peer(self, awaits_start, awaited):
        return 1, self.departed[1]

    def fail(self, task, error):
        self.failed = error
        task.abandon(error)


@pytest.mark.parametrize("sent", [True, False])
def test_a_message_that_a_rank_sent_before_it_ended_is_received(engine, arrived, sent):
    channel, task = Departed(arrived, 7 if sent else 8), Arrivals(engine, [7])
    task.waits_for = lambda: (1, "rank 1 to send")
    channel.link = type("Link", (), {"rank": 0})
    engine.channels.append(channel)
    engine.wait(task, channel)
    assert (channel.failed is None) == sent and (sent or "rank 1 has ended" in str(channel.failed))


class Left:
    """A control channel whose rank 1 has left."""

    name, timeout, asking, lost = "left", None, False, None
    departed, stopped = {1: "rank 1 has ended"}, {}

    class link:
        rank = 0

    def __init__(self, engine):
        self.engine = engine

    def absent_peer(self, awaits_start, awaited):
        return awaited and (1, "rank 1 has ended")

    def fail(self, task, error):
        task.abandon(error)


def test_a_rank_leaves_while_several_watched_calls_wait_for_it(engine, monkeypatch):
    """To end one of them the engine makes progress, where it looks at the others."""

    class Waits(Task):
        def waits_for(self):
            return 1, "rank 1 to send"

    monkeypatch.setattr(engines, "DEPARTED_SECONDS", 0.0)
    monkeypatch.setattr(engines, "WATCH_POLLS", 1)
    calls, ended = [Waits() for _ in range(3)], []
    for call in calls:
        engine.watch(lambda call=call: call, Left(engine), lambda call=call: ended.append(call))
    for _ in range(5):
        engine.progress()
    assert ended == calls and all(isinstance(call.error, PeerError) for call in calls)


def test_a_poll_that_ends_a_watched_call_tells_so(engine, arrived):
    """Nobody may poll soon after it: the helper rests while nothing is in flight."""
    engine.helper.stop()
    task, ended = Arrivals(engine, [3]), []
    engine.watch(lambda: task, Left(engine), lambda: ended.append(task.finished))
    engine.progress()
    assert not ended
    arrived.add(3)
    engine.progress()
    assert ended == [True] and not engine.watched


def test_before_a_long_kernel_there_are_a_few_polls(monkeypatch):
    """Also if each one moves something; and the last ones have moved nothing."""
    engine = Engine(lambda requests: None, 10.0, 0)
    for moves, wanted in ((lambda n: True, 32), (lambda n: n < 7, 8), (lambda n: False, 2), (lambda n: n % 2 == 0, 3)):
        polls = []
        monkeypatch.setattr(engine, "poll", lambda moves=moves, polls=polls: polls.append(0) or moves(len(polls)))
        engine.poll_thoroughly()
        assert len(polls) == wanted
