"""Who moves messages: the engine and its helper thread on requests that are made up, without MPI."""

from __future__ import annotations

import os
import threading
import time
from typing import NamedTuple

import pytest

from fompi.base.errors import LaunchError
from fompi.engine import engine as engines
from fompi.engine import progress
from fompi.engine.engine import SPINS, YIELDS, Engine
from fompi.engine.progress import POLLS_PER_WAKE, Helper, Pause, Worker, choose_mode, native_share, pause_between_polls
from fompi.engine.tasks import Task


class Kernels(Task):
    """A task of kernels, merges first; it is finished when all of them have run."""

    def __init__(self, engine, products=(), merges=()):
        self.engine, self.products, self.merges = engine, list(products), list(merges)
        self.left = len(self.products) + len(self.merges)
        self.seen, self.threads = [], set()

    def start(self):
        with self.engine.lock:
            self.engine.kernels_ready(self)
        self.engine.assist()

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
        self.left -= 1
        self.finished = self.left == 0


class Request(NamedTuple):
    """A name that stands for a request of MPI."""

    name: object
    engine: Engine

    def Test(self):
        return bool(self.engine._testsome([self]))


class Arrivals(Task):
    """A task of messages."""

    def __init__(self, engine, requests):
        self.left = set(requests)
        for request in requests:
            engine.post(Request(request, engine), self, request)

    def completed(self, key):
        self.left.remove(key)
        self.finished = not self.left


@pytest.fixture
def arrived():
    """The requests that are done."""
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
    """How many helper threads there are beside those of other tests in this process."""
    before = set(threading.enumerate())
    return lambda: sum(thread.name == "fompi progress" for thread in set(threading.enumerate()) - before)


def soon(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(1e-3)
    return condition()


# ------------------------------------------------------------------------------------------------------------- modes


def test_modes():
    assert choose_mode("auto", "multiple") == "helper"
    for mode in ("helper", "native", "poll"):
        assert choose_mode(mode, "multiple") == mode
    assert choose_mode("auto", "multiple", native_share=0.95) == "native"
    assert choose_mode("auto", "multiple", native_share=0.6) == choose_mode("helper", "multiple", 0.95) == "helper"
    assert choose_mode("auto", "serialized", native_share=0.95) == "poll"
    for level in ("single", "funneled", "serialized"):
        assert {choose_mode(mode, level) for mode in progress.MODES} == {"poll"}
    with pytest.raises(LaunchError, match="FOMPI_PROGRESS=spin: give one of auto, helper, native, poll"):
        choose_mode("spin", "serialized")


def test_the_helper_wakes_seldom_where_cores_are_scarce_or_the_library_needs_none():
    spare, scarce, native = (pause_between_polls(*of) for of in (("helper", 2), ("helper", 1), ("native", 1)))
    assert pause_between_polls("helper", 4) == spare and pause_between_polls("helper", 0.25) == scarce
    assert pause_between_polls("native", 4) == native
    assert spare.least == spare.most < scarce.least < scarce.most == native.least == native.most
    assert [str(pause) for pause in (spare, scarce, native)] == ["0.05 ms", "1 to 4 ms", "4 ms"]


def test_between_large_messages_the_helper_wakes_a_few_times():
    pause = Pause(1e-3, 4e-3)
    assert [pause.after(gap) for gap in (0, 1e-3, 4e-3, 8e-3, 16e-3, 1.0)] == [1e-3, 1e-3, 1e-3, 2e-3, 4e-3, 4e-3]


def test_short_slices_change_nothing_else(monkeypatch):
    """Of a thread: neither how nice it is nor its policy. Where the call is not known it is not made."""
    found = []

    def ask():
        before = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
        found.append(progress.ask_for_short_slices())
        assert (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)) == before
        monkeypatch.setattr(progress, "_SCHED_SETATTR", {})
        found.append(progress.ask_for_short_slices())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert len(found) == 2 and found[1] is False


@pytest.mark.parametrize(
    ("polled", "rest", "share"), [(0.02, 0.0, 1.0), (0.02, 0.02, 0.0), (0.02, 0.005, 0.75), (0.02, 0.03, 0.0)]
)
def test_the_share_that_a_library_moves(polled, rest, share):
    assert native_share(polled, rest) == pytest.approx(share)


# ------------------------------------------------------------------------------------------------------------- helper


def test_messages_and_kernels_move_without_the_program(engine, arrived):
    messages, kernels = Arrivals(engine, ["a", "b"]), Kernels(engine, products=[lambda: None] * 3)
    kernels.start()
    assert soon(lambda: kernels.finished) and kernels.threads == {"fompi progress"}
    arrived.update("ab")
    assert soon(lambda: messages.finished) and engine.idle


def test_during_a_kernel_only_sums_and_messages(engine, arrived):
    """The program computes; the helper takes in what comes and makes sums, and leaves products to the program."""
    others = Kernels(engine, products=[lambda: None], merges=[lambda: None] * 2)
    messages = Arrivals(engine, ["a"])
    seen = {}

    def long():
        others.start()
        arrived.add("a")
        seen["moved"] = soon(lambda: others.left == 1 and messages.finished)
        time.sleep(0.02)
        seen["products left"] = len(others.products)

    mine = Kernels(engine, products=[long])
    with engine.lock:
        engine.kernels_ready(mine)
        engine._ready.sort(key=lambda task: task is not mine)
    engine.progress()
    assert seen == {"moved": True, "products left": 1} and mine.threads == {threading.current_thread().name}
    assert soon(lambda: others.finished)


def test_products_of_a_call_that_the_program_is_about_to_wait_for(engine):
    """The helper leaves them to the program, and makes the sums."""
    task = Kernels(engine, products=[lambda: None] * 2, merges=[lambda: None])
    task.awaited = True
    messages = Arrivals(engine, ["never"])
    task.start()
    assert soon(lambda: not task.merges)
    time.sleep(0.02)
    assert len(task.products) == 2 and not messages.finished
    engine.wait(task, Departed(set(), None))
    assert task.threads == {threading.current_thread().name, "fompi progress"} and not task.awaited


def test_a_wait_soon_offers_the_core_to_others_then_sleeps(monkeypatch):
    """Ranks that share a core without knowing move messages too."""

    class Late(Task):
        polls = 0

        def take(self, merges_only):
            self.polls += 1
            self.finished = self.polls == 500

    waiting, offers, naps = Late(), [], []
    made = Engine(lambda requests: None, timeout=5.0, spins=SPINS)
    made.kernels_ready(waiting)
    monkeypatch.setattr(engines.os, "sched_yield", lambda: offers.append(waiting.polls))
    monkeypatch.setattr(engines, "sleep", naps.append)
    made.wait(waiting, Departed(set(), None))
    assert offers == list(range(SPINS + 1, SPINS + YIELDS + 1)) and SPINS < 50
    assert len(naps) == 500 - SPINS - YIELDS and naps == sorted(naps) and naps[-1] < 1e-3


def test_it_rests_while_others_poll(engine):
    """A program that polls by itself finds no competitor at the lock."""
    busy = Arrivals(engine, ["never"])
    engine.helper.use(Pause(0.02, 0.02))
    engine.assist()
    ours, end = 0, time.monotonic() + 0.3
    before = engine.polls
    while time.monotonic() < end:
        engine.progress()
        ours += 1
        time.sleep(1e-3)
    assert engine.polls - before - ours <= 0.2 * ours and not busy.finished


def test_it_polls_less_often_between_messages_that_are_far_apart(engine, arrived):
    def message(name, gap):
        begun = Arrivals(engine, [name])
        time.sleep(gap)
        arrived.add(name)
        assert soon(lambda: begun.finished)

    engine.assist()
    others = Arrivals(engine, ["never"])  # what was in flight before does not matter: this is a gap
    message("late", 0.05)
    assert soon(lambda: engine.helper.seconds == engine.helper.pause.most)
    for name in range(5):
        message(name, 0.0)
    assert soon(lambda: engine.helper.seconds < engine.helper.pause.most)
    assert not others.finished


def test_it_looks_in_the_middle_of_kernels_where_others_wait_for_what_comes(engine, arrived):
    """A call that sends what it receives; another one can wait for a message until its kernel is over."""
    engine.helper.use(Pause(1e-3, 0.045))
    for forwards in (False, True):
        engine.helper.seconds = 0.045
        seen, task, message = [], Kernels(engine), Arrivals(engine, [forwards])

        def kernel(name=forwards, message=message, seen=seen):
            arrived.add(name)
            time.sleep(0.03)
            seen.append(message.finished)

        task.products, task.left = [lambda: time.sleep(0.02), lambda: time.sleep(0.02), kernel], 3
        task.is_long, task.forwards = True, forwards
        with engine.lock:
            engine.kernels_ready(task)
        while not task.finished:
            engine.progress()
        assert seen == [forwards]
        engine.progress()
        time.sleep(0.1)


def test_it_looks_so_long_after_a_kernel_has_begun(engine, arrived):
    """Whoever began it has polled before: a kernel that takes little longer than the pause is looked at once in it."""
    engine.helper.use(Pause(0.02, 0.02))
    seen, task, message = [], Kernels(engine), Arrivals(engine, ["a"])

    def kernel():
        arrived.add("a")
        time.sleep(0.027)
        seen.append(message.finished)

    task.products, task.left, task.is_long = [lambda: time.sleep(0.01), kernel], 2, True
    with engine.lock:
        engine.kernels_ready(task)
    while not task.finished:
        engine.progress()
    assert seen == [True]


def test_it_rests_while_the_program_runs_kernels_and_no_message_is_in_flight(engine, monkeypatch):
    monkeypatch.setattr(progress, "REST_SECONDS", 10.0)
    polls, task = [], Kernels(engine)

    def long():
        before = engine.polls
        time.sleep(0.05)
        polls.append(engine.polls - before)

    def sends():
        task.messages = Arrivals(engine, ["never"])

    task.products, task.left, task.is_long = [engine.assist, long, sends, long], 4, True
    with engine.lock:
        engine.kernels_ready(task)
    while not task.finished:
        engine.progress()
    assert polls[0] <= 1 < polls[1]


def test_before_a_long_kernel_it_looks_as_often_as_the_library_needs(engine, arrived, monkeypatch):
    """Open MPI takes in with one poll what another one then finds; a helper that sees one is content with it."""
    monkeypatch.setattr(engine, "helper", None)
    polls = []

    def found(requests):
        polls.append(engine.polls)
        return [i for i, request in enumerate(requests) if request.name in arrived and len(polls) >= POLLS_PER_WAKE]

    engine._testsome = found
    message, task = Arrivals(engine, ["a"]), Kernels(engine, products=[lambda: seen.append(message.finished)])
    task.is_long, seen = True, []
    arrived.add("a")
    with engine.lock:
        engine.kernels_ready(task)
    engine.progress()
    assert seen == [True]


def test_it_sleeps_when_nothing_is_in_flight_and_wakes_again(helpers, engine, monkeypatch):
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
    """However many begin at once, there is one helper."""
    gate = threading.Barrier(8)

    def begin():
        gate.wait()
        engine.assist()

    Arrivals(engine, ["never"])
    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert helpers() == 1


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_kernel_that_raises_in_the_helper(engine, kind):
    """The error is that of the task, raised where somebody waits for it; the helper goes on."""

    def bad():
        raise kind("a bad kernel")

    sick = Kernels(engine, products=[bad])
    sick.start()
    assert soon(lambda: sick.finished) and isinstance(sick.error, kind)
    well = Kernels(engine, products=[lambda: None])
    well.start()
    assert soon(lambda: well.finished) and well.error is None


def test_a_second_thread_runs_the_products_of_a_call_that_nobody_waits_for(engine, arrived):
    """One after the other; messages and sums move meanwhile, and an error is that of the task."""
    engine.helper.worker = Worker()
    messages, others = Arrivals(engine, ["a"]), Kernels(engine, merges=[lambda: None] * 2)
    seen = []

    def long():
        others.start()
        arrived.add("a")
        seen.append(soon(lambda: messages.finished and others.finished))
        seen.append(engine.computing)

    def bad():
        raise KeyboardInterrupt("a bad kernel")

    task = Kernels(engine, products=[long, bad, lambda: None])
    task.start()
    assert soon(lambda: task.finished) and seen == [True, 1]
    assert task.threads == {"fompi compute"} and others.threads == {"fompi progress"}
    assert isinstance(task.error, KeyboardInterrupt) and engine.idle and not engine.computing


def test_the_second_thread_leaves_products_to_a_program_that_waits(engine):
    engine.helper.worker = Worker()
    task = Kernels(engine, products=[lambda: time.sleep(1e-3)] * 20, merges=[lambda: None])
    task.start()
    assert soon(lambda: task.threads >= {"fompi compute"})
    engine.wait(task, Departed(set(), None))
    assert task.finished and threading.current_thread().name in task.threads and len(task.products) == 0


def test_it_stops(helpers, engine):
    Arrivals(engine, ["never"])
    engine.assist()
    assert soon(lambda: engine.polls > 3)
    engine.helper.stop()
    before = engine.polls
    engine.assist()
    time.sleep(0.01)
    assert engine.polls == before
    assert helpers() == 0


# ------------------------------------------------------------------------------------------------------------- engine


def test_kernels_run_outside_the_lock(engine):
    """Another thread may poll, and start things, while a kernel runs."""
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


def test_an_interrupt_in_a_kernel_reaches_who_runs_it(engine):
    """The task has it too, and the engine goes on."""

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
    """The channel of a rank whose peer has ended; what it sent before arrived with its last words, or did not."""

    asking = False

    def __init__(self, arrived, request):
        self.departed, self.begun = {}, time.perf_counter()
        self.arrived, self.request, self.failed = arrived, request, None

    def receive(self):
        if time.perf_counter() - self.begun > 0.3:
            self.departed = {1: "rank 1 has ended"}
            self.arrived.add(self.request)
        return False

    def missing(self, begins, awaited):
        return 1

    def fail(self, task, error):
        self.failed = error
        task.abandon(error)


@pytest.mark.parametrize("there", [True, False])
def test_what_a_rank_sent_before_it_ended_counts(engine, arrived, there):
    channel, task = Departed(arrived, 7 if there else 8), Arrivals(engine, [7])
    task.waits_for = lambda: (1, "rank 1 to send")
    channel.link = type("Link", (), {"rank": 0})
    engine.channels.append(channel)
    engine.wait(task, channel)
    assert (channel.failed is None) == there and (there or "rank 1 has ended" in str(channel.failed))
