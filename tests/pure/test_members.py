"""Members that find the next epoch by a store: what they say, what is proposed, and what a store may lose."""

from __future__ import annotations

import json
import random
from itertools import combinations, count

import pytest

import fompi
from fompi.members.membership import AWAY, DOOR, IN, Epoch, Presence, Spoken, View
from fompi.members.served import LocalStore
from fompi.mpi.epoch import Handle

NUMBERS = count(1)


def handle():
    number = next(NUMBERS)
    return str(Handle(number.to_bytes(16, "little"), number, "h1", b"\1\7\0address"))


class Forgetful(LocalStore):
    """A store that can lose what it has. It notes each proposal that was taken."""

    def __init__(self):
        super().__init__()
        self.proposals = []

    def lose(self, key=None):
        self._kept = {} if key is None else {other: kept for other, kept in self._kept.items() if other != key}

    def _write(self, key, new, ttl, only_if):
        before = self._read(key)
        done = super()._write(key, new, ttl, only_if)
        if key == "g/epoch" and done == new != before:
            self.proposals.append(Epoch(*json.loads(new)))
        return done


class Walker:
    """A member that does one thing at a time. Its listing may be an old one."""

    def __init__(self, store, name):
        self.store, self.name, self.listing = store, name, {}
        self.presence = Presence(store, "g", name, handle(), 1e6)

    def look(self):
        self.listing = self.store.watch("g/")

    def wait(self):
        self.presence.say(DOOR)

    def beat(self):
        self.presence.say()

    def leave(self):
        self.presence.say(AWAY)

    def propose(self):
        self.presence.propose(self.listing, 1, True)

    def enter(self, state=IN):
        if (epoch := self.presence.due(View.of(self.listing, "g"))) is not None and self.presence._said.state == DOOR:
            self.presence.say(state, epoch.number)

    def fail(self):
        self.enter(DOOR)


STEPS = ("look", "wait", "propose", "enter", "look", "propose", "wait", "look", "propose", "beat", "fail", "leave")


@pytest.mark.parametrize("seed", range(20))
def test_no_two_epochs_with_a_common_member_have_the_same_number(seed):
    """Members act in any order, on old listings. They die and come again; the store loses one value, or all."""
    choose, store = random.Random(seed), Forgetful()
    members = [Walker(store, name) for name in "abc"]
    for _ in range(1000):
        at, event = choose.randrange(3), choose.random()
        if event < 0.008:
            store.lose()
        elif event < 0.014:
            store.lose(f"g/members/{'abc'[at]}")
        elif event < 0.02:
            members[at] = Walker(store, "abc"[at])
        else:
            getattr(members[at], choose.choice(STEPS))()
    epochs = [epoch for epoch in store.proposals if epoch.members]
    assert len(epochs) > 3
    for one, other in combinations(epochs, 2):
        common = {*map(tuple, one.members)} & {*map(tuple, other.members)}
        assert one.number != other.number or not common, (one, other)


def test_who_is_in_the_next_epoch():
    """Nobody proposes while somebody is in an epoch, or about to enter the last one. Who is away is not waited for."""
    store = Forgetful()
    a, b, c = (Walker(store, name) for name in "abc")

    def following(least=1):
        return View.of(store.watch("g/"), "g").following(least)

    b.wait()
    assert following(least=2) is None and [name for name, _ in following().members] == ["b"]
    a.wait()
    for each in (b, a, c):  # the first proposal lists nobody; b is not the lowest at the door, c is not there
        each.look()
        each.propose()
        each.look()
        each.propose()
    (root, epoch) = store.proposals
    assert root.members == [] and epoch.number == 1 and [name for name, _ in epoch.members] == ["a", "b"]
    c.wait()
    a.look(), a.enter()
    view = View.of(store.watch("g/"), "g")
    assert view.awaited() == ["a", "b", "c"] and following() is None and view.differs_from(view.epoch)
    c.look(), c.propose()  # it learns the number
    b.look(), b.fail()
    view = View.of(store.watch("g/"), "g")
    assert view.waiting() == ["b", "c"] and view.awaited() == ["a"] and following() is None
    a.wait()
    assert [name for name, _ in following().members] == ["a", "b", "c"] and following().number == 2
    b.leave()
    assert [name for name, _ in following().members] == ["a", "c"]


def test_what_changes_an_epoch():
    a, b, other = (handle() for _ in range(3))
    epoch = Epoch(3, "mark", (("a", a), ("b", b)))
    entered, entering, door = Spoken(a, 3, IN), Spoken(b, 2, DOOR), Spoken(other, 0, DOOR)
    assert not View(epoch, {"a": entered, "b": entering}).differs_from(epoch)
    assert not View(Epoch(0, "root", ()), {"a": entered, "b": entering}).differs_from(epoch)
    for alive in (
        {"a": entered},
        {"a": entered, "b": entering._replace(state=AWAY)},
        {"a": entered, "b": Spoken(other, 0, AWAY)},
        {"a": entered, "b": entering, "c": door},
        {"a": entered, "b": entering, "c": door._replace(state=IN, known=5)},  # of an epoch of its own
    ):
        assert View(epoch, alive).differs_from(epoch), alive
    for c in (door._replace(state=AWAY), door._replace(state=IN, known=2)):  # a slow one comes to the door by itself
        assert not View(epoch, {"a": entered, "b": entering, "c": c}).differs_from(epoch)


def test_what_strangers_put_into_the_store():
    store, own = LocalStore(), handle()
    store.put("g/members/a", json.dumps(Spoken(own, 0, DOOR)))
    bad = [b"\xff", "[]", "5", '{"a": 1}', f'["{own[:-4]}", 0, "door"]', f'["{own}", null, "door"]', '["x", 0, "door"]']
    for at, text in enumerate(bad):
        store.put(f"g/members/bad{at}", text)
    store.put("g/epoch", "[1, 2]")
    view = View.of(store.watch("g/"), "g")
    assert {*view.alive} == {"a"} and view.epoch == Epoch()


def test_a_name_that_another_process_takes():
    store = LocalStore()
    old = Walker(store, "a")
    new = Walker(store, "a")
    with pytest.raises(fompi.StateError, match="another process has the name 'a' in the group 'g'"):
        old.beat()
    new.beat()
    new.presence.leave()
    new.beat()
    assert store.watch("g/members/") == {}
