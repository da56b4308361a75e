"""The port as a value: which message leaves next, on a modelled link, with receivers that wait for other messages."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from random import Random
from typing import NamedTuple

import pytest

from fompi.engine import port as ports
from fompi.engine.port import (
    HOLD_SECONDS,
    LEAST_PAUSE,
    LEAST_WINDOW,
    MOST_PAUSE,
    PART_NBYTES,
    PATIENCE,
    QUIET_SECONDS,
    STARVE_SECONDS,
    Port,
    Queued,
    part_nbytes,
)
from fompi.engine.tasks import Task

STEP = 1e-3  # the modelled time between two polls, and the time of a part on the link


class Part(NamedTuple):
    nbytes: int


class Offer(NamedTuple):
    """A message that is offered at `time`. Its receiver takes it once the message `after` is through."""

    time: float
    name: str
    urgency: int
    parts: int
    after: str | None = None
    stream: str | None = None


class Call(Task):
    """The owner of a message: it notes what the port tells it."""

    def __init__(self):
        self.posted_at = self.completed_at = None
        self.now = 0.0

    def posted(self, key):
        assert self.posted_at is None
        self.posted_at = self.now

    def completed(self, key):
        self.completed_at = self.now


def queued(offer, task):
    parts = deque(Part(PART_NBYTES) for _ in range(offer.parts))
    return Queued(offer.urgency, offer.stream or offer.name, parts, lambda part: offer.name, task, 0)


def run(port, offers, seconds=3.0):
    """The tasks by name, and what has left when, as (time, name). The link carries one part at each step."""
    offers, log, now, flying = deque(sorted(offers)), [], 0.0, []
    tasks, receivers = {offer.name: Call() for offer in offers}, {offer.name: offer.after for offer in offers}
    while now < seconds and (offers or flying or port.held):
        while offers and offers[0].time <= now:
            offer = offers.popleft()
            port.add(queued(offer, tasks[offer.name]), now)
        for task in tasks.values():
            task.now = now
        while (message := port.next(now)) is not None:
            name = message.begin()
            log.append((now, name, message.urgency))
            flying.append((name, message))
        now += STEP
        ready = [f for f in flying if receivers[f[0]] is None or tasks[receivers[f[0]]].completed_at is not None]
        if ready:
            flying.remove(ready[0])
            tasks[ready[0][0]].now = now
            port.done(ready[0][1], now)
            if not ready[0][1].parts and not ready[0][1].flying:
                tasks[ready[0][0]].completed(0)
    return tasks, log


def test_an_urgent_message_leaves_at_once_and_whole():
    tasks, log = run(Port(), [Offer(0, "late", 1, 20), Offer(0.005, "urgent", 0, 4)])
    at = next(time for time, name, _ in log if name == "urgent")
    assert at == pytest.approx(0.005) and [name for time, name, _ in log if time == at][:4] == ["urgent"] * 4
    # at most the window of the other is before it on the link
    assert tasks["urgent"].completed_at - at <= (4 + 2 * LEAST_WINDOW / PART_NBYTES + 1) * STEP
    assert tasks["late"].completed_at > tasks["urgent"].completed_at


def test_the_most_urgent_goes_first_and_then_the_first():
    offers = [Offer(0, "tp", 0, 9), Offer(0.001, "dp", 2, 2), Offer(0.002, "pp", 1, 2), Offer(0.003, "dp again", 2, 2)]
    _, log = run(Port(), offers)
    assert [name for _, name, _ in log] == [*["tp"] * 9, "pp", "pp", "dp", "dp", "dp again", "dp again"]


def test_the_window_is_small_beside_urgent_messages():
    """A slow poll may find the whole window through. It grows only once nothing urgent has moved for a while."""
    port, now, sizes = Port(), 0.0, []
    port.add(queued(Offer(0, "tp", 0, 1), Call()), now)
    urgent = port.next(now)
    urgent.begin()
    port.add(queued(Offer(0, "dp", 1, 200), Call()), now)
    port.done(urgent, now)
    while port.held:
        messages = []
        while (message := port.next(now)) is not None:
            message.begin()
            messages.append(message)
        now += 0.01
        for message in messages:
            port.done(message, now)
        sizes.append((now, port.window))
    assert all(window == LEAST_WINDOW for now, window in sizes if now < HOLD_SECONDS)
    assert sizes[-1][1] > 8 * LEAST_WINDOW


def test_it_conserves_work():
    """Without anything more urgent the link is never idle, and the window grows when polls are rare."""
    tasks, _ = run(Port(), [Offer(0, "dp", 1, 50)])
    assert tasks["dp"].completed_at == pytest.approx(50 * STEP, abs=2 * STEP)
    port, call, now, polls = Port(), Call(), 0.0, 0
    port.add(message := queued(Offer(0, "dp", 1, 500), call), now)
    while port.held:
        left = 0
        while port.next(now):
            message.begin()
            left += 1
        now, polls = now + STEP, polls + 1
        for _ in range(left):  # the link is fast: all of it is through when the next poll comes
            port.done(message, now)
    assert polls < 20 and port.window > 16 * LEAST_WINDOW
    port.add(queued(Offer(0, "more", 1, 3), call), now)
    port.next(now)
    port.add(queued(Offer(0, "tp", 0, 1), call), now)
    assert port.window == LEAST_WINDOW


def pauses(port, slow, urgent, now=1.0):
    """The pauses between parts of a message that take `slow` times a step, with an urgent message in between or not."""
    found = []
    for i, times in enumerate(slow):
        port.add(queued(Offer(0, f"dp {i}", 1, 1), Call()), now)
        begun = now
        while (message := port.next(now)) is None:
            now += STEP / 10
        found.append(now - begun)
        message.begin()
        now += times * STEP
        if urgent:  # it is through at once: MPI has given it to the kernel
            port.add(queued(Offer(0, f"tp {i}", 0, 1), Call()), now)
            (other := port.next(now)).begin()
            port.done(other, now)
        port.done(message, now)
    return found


def test_slow_parts_beside_urgent_messages_pause():
    """Longer each time, up to a limit. One that is not slow ends it. Without urgent messages there is no pause."""
    first, *found = pauses(Port(), [1, 9, 9, 9, 9, 9, 9, 9, 9, 9, 1, 1], urgent=True)
    longest = min(MOST_PAUSE, HOLD_SECONDS)  # by then the urgent ones have not moved for a while
    wanted = [max(QUIET_SECONDS, each) for each in (0.0, *(min(LEAST_PAUSE * 2**i, longest) for i in range(9)), 0.0)]
    assert first == 0 and found == pytest.approx(wanted, abs=STEP / 5)
    assert pauses(Port(), [1, *[9] * 10], urgent=False) == [0.0] * 11


def test_a_link_that_is_slower_from_now_on_is_no_busy_one():
    """In the end: what was fast is forgotten."""
    assert pauses(Port(), [1, *[9] * 500], urgent=True)[-50:] == pytest.approx([QUIET_SECONDS] * 50, abs=STEP / 5)


CROSSED = [Offer(0, "urgent", 0, 3, after="held"), Offer(0, "held", 1, 3)]
"""The receiver of the urgent message first waits for the held one."""

IN_A_QUEUE = [Offer(0, "first", 1, 30, after="second"), Offer(0, "second", 1, 3)]
"""The receiver of the first message takes it after the second one, which has the same urgency."""

BUSY = [Offer(0.002 * i, f"urgent {i}", 0, 2) for i in range(1000)]
"""Urgent messages keep the link busy all the time."""


def check(make):
    """Every message gets through in time, whatever its receiver waits for, and in the order of its stream."""
    tasks, _ = run(make(), CROSSED)
    assert tasks["urgent"].completed_at is not None and tasks["urgent"].completed_at < 2 * HOLD_SECONDS
    tasks, log = run(make(), IN_A_QUEUE)
    assert tasks["first"].completed_at is not None and tasks["first"].completed_at < 3 * HOLD_SECONDS
    tasks, log = run(make(), [*BUSY, Offer(0.01, "dp", 1, 3), Offer(0.01, "dp again", 2, 3)])
    for name in ("dp", "dp again"):
        left = [time for time, each, _ in log if each == name]
        assert len(left) == 3 and left[0] - 0.01 < 1.1 * STARVE_SECONDS
        assert all(0.9 * STARVE_SECONDS < b - a < 1.1 * STARVE_SECONDS for a, b in pairwise(left)), left
    for seed in range(40):
        streams, offers = scenario(Random(seed))
        tasks, log = run(make(), offers)
        assert all(task.completed_at is not None for task in tasks.values()), (seed, offers)
        for names in streams:
            order = [name for _, name, _ in log if name in names]
            assert order == sorted(order, key=names.index), (seed, order)


def scenario(draw):
    """The names in each stream in their order, and all offers. Receivers take the messages in an order of their own.

    This order follows the streams, so a port that posts everything at once never blocks.
    """
    counts = [draw.randint(1, 3) for _ in range(4)]
    streams = [[f"{stream}.{i}" for i in range(count)] for stream, count in enumerate(counts)]
    merged = [stream for stream, count in enumerate(counts) for _ in range(count)]
    draw.shuffle(merged)
    taken, offers = [], []
    urgencies = [draw.randrange(3) for _ in streams]
    for stream in merged:
        name = streams[stream][sum(other.startswith(f"{stream}.") for other in taken)]
        after = draw.choice([None, *taken])
        time = stream / 100 + int(name[-1]) / 300 if draw.random() < 0.5 else int(name[-1]) / 300
        time = max([time, *(o.time + 1e-6 for o in offers if o.stream == str(stream))])
        offers.append(Offer(time, name, urgencies[stream], draw.randint(1, 5), after, str(stream)))
        taken.append(name)
    return streams, offers


def test_every_message_gets_through():
    check(Port)


class NeverReleases(Port):
    """Mutant: what waits, waits until everything more urgent is through."""

    def next(self, now):
        return super().next(min(now, self._frozen())) if self._flying else super().next(now)

    def _frozen(self):
        return max(message.moved_at for message in self._flying)


class NeverOverdue(Port):
    """Mutant: without the part that each urgency sends once in a while."""

    def next(self, now):
        self._left_at = dict.fromkeys(self._queues, now)
        return super().next(now)


class SendsOnToALateReceiver(Port):
    """Mutant: a message whose receiver is late sends on, and fills the window."""

    def _able(self, queue, now):
        return iter(queue)


class MixesStreams(Port):
    """Mutant: messages of one stream overtake each other."""

    def _able(self, queue, now):
        return iter([message for message in queue if ports._moves(message, now) or not message.flying][::-1])


class WithoutWindow(Port):
    """Mutant: everything leaves at once."""

    def _has_room(self, message, now):
        return True


@pytest.mark.parametrize("mutant", [NeverReleases, NeverOverdue, SendsOnToALateReceiver, MixesStreams])
def test_mutants_are_found(mutant):
    with pytest.raises(AssertionError):
        check(mutant)


def test_a_port_without_a_window_is_found(monkeypatch):
    monkeypatch.setattr(f"{__name__}.Port", WithoutWindow)
    with pytest.raises(AssertionError):
        test_an_urgent_message_leaves_at_once_and_whole()


@pytest.mark.parametrize("seconds", [0.01, 0.08])
def test_a_slow_link_is_no_late_receiver(seconds):
    """All parts of an urgent message are through at once, later than HOLD_SECONDS: until then it holds others back."""
    port, parts = Port(), 4
    for begun in (1.0, 2.0):  # the first one shows how fast the link is
        port.add(queued(Offer(0, f"tp {begun}", 0, parts), Call()), begun)
        port.add(queued(Offer(0, f"dp {begun}", 1, 1), Call()), begun)
        urgent = [message for _ in range(parts) if (message := port.next(begun)) and message.begin()]
        assert len(urgent) == parts
        patience = HOLD_SECONDS if begun == 1.0 else min(max(HOLD_SECONDS, PATIENCE * parts * seconds), STARVE_SECONDS)
        assert port.next(begun + 0.99 * patience) is None
        (late := port.next(begun + 1.01 * patience)).begin()
        for message in urgent:
            port.done(message, begun + parts * seconds)
        port.done(late, begun + parts * seconds)


def test_an_abandoned_call_leaves_nothing():
    """Its parts never leave, and what it has in flight holds nothing back."""
    port, urgent, dp, other = Port(), Call(), Call(), Call()
    for offer, task in ((Offer(0, "tp", 0, 2), urgent), (Offer(0, "dp", 1, 2), dp), (Offer(0, "pp", 2, 1), other)):
        port.add(queued(offer, task), 0.0)
    flying = [message for _ in range(2) if (message := port.next(0.0)) and message.begin()]
    assert [message.task for message in flying] == [urgent, urgent] and port.next(0.0) is None and port.held == 2
    port.forget(dp)
    assert port.held == 1 and port.next(0.0) is None
    port.forget(urgent)
    assert port.next(2 * QUIET_SECONDS).task is other and port.held == 0
    port.done(flying[0], 0.0)  # a late completion of a part of the abandoned call
    assert port.held == 0


def test_the_size_of_parts_follows_the_bandwidth():
    assert part_nbytes(1, 0.0) == part_nbytes(1, 1e6) == PART_NBYTES
    assert part_nbytes(2, 1e10) == 10_000_000 and part_nbytes(0, 1e10) == 160_000_000
