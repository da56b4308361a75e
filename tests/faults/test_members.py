"""Processes that find each other by a store: one comes late, one is killed and started again, the store is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from time import monotonic

import pytest

from fompi.members import Server, open_store
from fompi.members.membership import DOOR, IN, Epoch, Spoken, View

pytestmark = pytest.mark.one_mpi

TOKEN = "0123456789abcdef0123456789abcdef"

MEMBER = textwrap.dedent("""
    import sys, time
    import numpy as np
    import fompi
    from fompi.members import Membership, open_store

    name, address = sys.argv[1:]
    store = open_store(address)
    comm, step, state, ends = None, 0, np.zeros(5), False
    with Membership(store, name, least=2, ttl=1.5) as membership:
        while not ends:
            if comm is None:
                comm = membership.join(timeout=60)
                names = " ".join(name for name, _ in membership.epoch.members)
                print(f"epoch {membership.epoch.number}: {names}", flush=True)
            try:
                here = fompi.all_gather(np.array([step, membership.changed]), comm=comm).reshape(-1, 2)
                if here[:, 0].min() < here[:, 0].max():
                    state = fompi.broadcast(state, root=int(here[:, 0].argmax()), comm=comm)
                    step = int(here[:, 0].max())
                if here[:, 1].any():
                    comm = None
                    continue
                wish = np.array([comm.rank + 1, store.get("end") is not None, step])
                total, ends, steps = fompi.all_reduce(wish, comm=comm)
            except (fompi.PeerError, fompi.WaitTimeout) as error:
                print(f"{type(error).__name__}: {error}", flush=True)
                comm = None
                continue
            assert total == comm.size * (comm.size + 1) // 2 and steps == comm.size * step
            state, step = state + 1, step + 1
            assert (state == step).all()
            time.sleep(0.02)
        comm.close()
    print(f"ends after step {step}", flush=True)
""")


class Members:
    """Processes, by their names, and what the store says of them."""

    def __init__(self, folder, address):
        self.folder, self.store, self.processes = folder, open_store(address), {}
        (folder / "member.py").write_text(MEMBER)

    def start(self, name):
        command = [sys.executable, self.folder / "member.py", name, self.store.address]
        with open(self.folder / f"{name}.txt", "a") as out:
            self.processes[name] = subprocess.Popen(command, stdout=out, stderr=out)

    def await_epoch(self, names, after=0):
        """The number of the epoch that all these members are in, and no other one."""
        known, end = None, monotonic() + 60
        while monotonic() < end:
            known = self.store.watch("fompi/", known, end - monotonic())
            view = View.of(known, "fompi")
            there = {name for name, said in view.alive.items() if said.state == IN}
            if [name for name, _ in view.epoch.members] == names and there == {*names} and view.epoch.number > after:
                return view.epoch.number
        raise AssertionError(self.said())

    def said(self):
        return "\n".join(f"{path.stem}: {path.read_text()}" for path in sorted(self.folder.glob("*.txt")))


@pytest.fixture
def members(tmp_path, monkeypatch):
    monkeypatch.setenv("FOMPI_MEMBERS_TOKEN", TOKEN)
    for name in [name for name in os.environ if name.startswith(("PMI", "OMPI", "PRTE"))]:
        monkeypatch.delenv(name)
    with Server() as server:
        made = Members(tmp_path, server.address)
        made.server = server
        yield made
        for process in made.processes.values():
            process.kill()
            process.wait()


@pytest.mark.timeout(170)
def test_members_come_and_go(members):
    """Each has right sums in each epoch. The store is started again in between, with nothing in it."""
    members.start("b")
    members.start("c")
    first = members.await_epoch(["b", "c"])
    members.start("a")  # late, and the lowest
    second = members.await_epoch(["a", "b", "c"], first)
    members.processes["b"].kill()
    third = members.await_epoch(["a", "c"], second)
    members.start("b")
    fourth = members.await_epoch(["a", "b", "c"], third)

    members.server.close()
    members.server = Server(port=members.server.server_address[1])
    members.processes["a"].kill()
    fifth = members.await_epoch(["b", "c"], fourth)
    members.start("a")
    members.await_epoch(["a", "b", "c"], fifth)
    members.store.put("end", "now")
    for name in "abc":
        assert members.processes[name].wait(40) == 0, members.said()
    said = {name: (members.folder / f"{name}.txt").read_text() for name in "abc"}
    assert len({text.splitlines()[-1] for text in said.values()}) == 1, members.said()
    assert "ends after step" in said["a"] and "Traceback" not in members.said()
    epochs = [line for line in said["c"].splitlines() if line.startswith("epoch")]
    assert len({*epochs}) == len(epochs) and said["c"].count("PeerError") >= 2, members.said()
    assert members.store.watch("fompi/members/") == {}
    members.server.close()


ALONE = textwrap.dedent("""
    import fompi
    from fompi.members import Membership, epochs
    from fompi.members.membership import AWAY, DOOR, IN, Presence
    from fompi.members.served import LocalStore

    def refused(kind, call):
        try:
            call()
        except kind as error:
            return print(f"{kind.__name__}: {error}", flush=True)
        raise SystemExit("no error")

    store = LocalStore()
    other = fompi.members.handle().replace("fompi-1-", "fompi-2-")
    with Membership(store, "a", ttl=0.5) as membership:
        comm = membership.join(timeout=20)
        assert (comm.rank, comm.size, membership.epoch.number, membership.changed) == (0, 1, 1, False)
        busy = Presence(store, "fompi", "b", fompi.members.handle(), 60)
        busy.say(IN)
        refused(fompi.WaitTimeout, lambda: membership.join(timeout=1))
        assert comm.closed
        busy.leave()

        def lost(*epoch):
            epochs.join = met
            raise fompi.PeerError("rank 1 is lost", 1)

        met, epochs.join, before = epochs.join, lost, membership.epoch.number
        assert membership.join(timeout=10).size == 1 and membership.epoch.number == before + 2  # not that one again
        Presence(store, "fompi", "c", other, 60).say(DOOR)  # of another version: no member
        assert membership.join(timeout=20).size == 1 and not membership.changed
        membership.least = 3
        refused(fompi.WaitTimeout, lambda: membership.join(timeout=1))
        Presence(store, "fompi", "a", other, 60)
        refused(fompi.StateError, lambda: membership.join(timeout=20))
    print([*store.watch("fompi/members/")])
""")


def test_who_is_awaited_is_named(tmp_path):
    """A member that is in an epoch and does not come; too few; another process with the same name."""
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    first, second, third, left = done.stdout.splitlines()
    assert first.startswith("WaitTimeout: a waited 1 s for the epoch after 1 of 'fompi', of at least 1 members: "), (
        first
    )
    assert "a waits for it, but b did not come" in first, first
    assert "of at least 3 members: a waits for it, but others did not come" in second, second
    assert third == "StateError: another process has the name 'a' in the group 'fompi'", third
    assert left == "['fompi/members/a', 'fompi/members/c']"


def test_a_member_that_is_slow_or_has_other_ranks():
    """Others may go on without a slow one, and do not ask for it until it comes. Ranks are those of the last epoch."""
    last = Epoch(3, "m", (("a", "A"), ("b", "B"), ("c", "C")))
    alive = {"a": Spoken("A", 3, DOOR), "b": Spoken("B", 3, DOOR), "c": Spoken("C", 3, IN)}
    view = View(last, alive)
    assert view.has_ended() and view.following(1) is None
    following = view.following(2, is_patient=False)
    assert following is not None and following.members == (("a", "A"), ("b", "B")) and following.number == 4
    now = {"a": Spoken("A", 4, IN), "b": Spoken("B", 4, IN), "c": Spoken("C", 3, IN)}
    assert not View(following, now).differs_from(following) and not View(following, now).has_ended()
    assert View(following, now | {"c": Spoken("C", 3, DOOR)}).differs_from(following)
    assert View(last, now | {"c": Spoken("C", 3, IN)}).first() == ("a", 1)
    two = {"a": Spoken("A A2", 0, DOOR), "b": Spoken("B", 3, DOOR), "c": Spoken("C", 3, DOOR)}
    assert View(last, two).first() == ("b", 1)
    found = View(last, two).following(1)
    assert found is None  # a does not know the last number yet
    found = View(last, two | {"a": Spoken("A A2", 3, DOOR)}).following(1)
    assert found is not None and [name for name, _ in found.members] == ["b", "c"]
