"""How members find the next epoch by a store, and meet in it.

    with fompi.members.Membership("etcd://h1:2379", name="h1", least=2) as membership:
        comm = membership.join(timeout=30)

Each member says in the store how it is reached, and what it does: it waits at the door of the next epoch, is in one,
or is away. It says so again and again, else it counts as gone. When nobody is in an epoch any more, the one with the
lowest name at the door proposes the next epoch: a number, and all that wait, in the order of their names. It does so by
compare and set, from the proposal of before. So all see one proposal, and who comes later waits for the next.

No two epochs with a common member have the same number, also if the store loses all that it had (a `Server` does when
it is started again). Each member says the highest number that it knows: of a proposal, or from another member at the
door. When all at the door say the same, the next number is one more. So no number above the one that a member has said,
plus one, has listed it. A member whose words are gone from the store says one more than before.
"""

from __future__ import annotations

import json
import secrets
import ssl
from collections.abc import Callable
from contextlib import suppress
from math import inf
from threading import Condition, Event, RLock, Thread
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from fompi.base import errors
from fompi.base.doors import DOORS
from fompi.base.errors import ArgumentError, FompiError, LaunchError, PeerError, StateError, WaitTimeout
from fompi.base.layout import number
from fompi.base.log import log
from fompi.engine.communicator import Communicator, engine_of_process
from fompi.members import epochs
from fompi.members.epoch_log import EpochLog
from fompi.members.etcd import EtcdStore
from fompi.members.served import ServedStore
from fompi.members.stores import SECONDS, Listing, MembersStore, TorchStore
from fompi.mpi import launcher
from fompi.mpi.epoch import Handle, forget
from fompi.mpi.link import ANSWER_SECONDS

TTL_SECONDS, MEET_SECONDS, PAUSE_SECONDS, SLICE_SECONDS = 5.0, 15.0, 0.02, 1.0
"""How long a member counts as alive that says nothing; how long members try to meet in an epoch; between two looks;
after which time the other ranks of a member hear that it still waits."""

PORTS = {"fompi": 7777, "etcd": 2379, "etcds": 2379, "tcp": 29500}
OF_TORCH = ("set", "get", "check", "compare_set", "add")

DOOR, IN, AWAY = "door", "in", "away"
"""What a member does."""


def open_store(address: Any, seconds: float = SECONDS, serve: bool = False, ca: str | None = None) -> MembersStore:
    """The store at this address: what members of epochs share.

        open_store("fompi://h1:7777")                # that of `fompi members serve`, or of another member
        open_store("etcd://user:password@h1:2379")   # etcd 3.4 or later; h1:2379,h2:2379; etcds:// is https
        open_store("tcp://h1:29500")                 # a TCPStore of torch; also an object: any store of torch

    A store that does not answer is asked again for `seconds`. `serve`: this process serves the store of `fompi://` if
    nobody does. `ca`: a file of certificates for `etcds://`; None: those of the system. Raises ArgumentError for
    another address, and LaunchError for `fompi://` without FOMPI_MEMBERS_TOKEN.
    """
    if isinstance(address, MembersStore):
        return address
    if not isinstance(address, str):
        if lacks := [name for name in OF_TORCH if not hasattr(address, name)]:
            raise ArgumentError(f"{type(address).__name__} is no address or store: it has no {', '.join(lacks)}")
        return TorchStore(lambda: address, type(address).__name__, seconds)
    scheme, _, rest = address.partition("://")
    user, _, places = rest.rpartition("@")
    try:
        split = [urlsplit(f"//{place}") for place in places.split(",")]
        hosts = [(each.hostname or "", each.port or PORTS[scheme]) for each in split if scheme in PORTS]
    except ValueError:
        hosts = []
    if not hosts or not all(name for name, _ in hosts) or (len(hosts) > 1 and not scheme.startswith("etcd")):
        shown = f"{scheme}://{places}" if rest else scheme
        raise ArgumentError(f"{shown!r} is no address of a store: give fompi://, etcd://, etcds:// or tcp://HOST:PORT")
    host, port = hosts[0]
    if scheme == "fompi":
        return ServedStore(host, port, seconds, serve)
    if scheme == "tcp":
        return TorchStore(lambda: DOORS.tcp_store(host, port, seconds), address, seconds)
    name, _, password = user.partition(":")
    context = ssl.create_default_context(cafile=ca) if scheme == "etcds" else None
    return EtcdStore(hosts, (unquote(name), unquote(password)) if user else None, context, seconds)


class Spoken(NamedTuple):
    """What a member says. `known`: the highest number that it knows. No epoch above `known` + 1 has listed it."""

    handle: str
    known: int
    state: str


class Epoch(NamedTuple):
    """A number, and names with handles: the order gives the ranks. `mark`: no other proposal has it."""

    number: int = 0
    mark: str = ""
    members: tuple[tuple[str, str], ...] = ()


class View(NamedTuple):
    """What the store says of a group: the last proposal, and the members that are alive."""

    epoch: Epoch
    alive: dict[str, Spoken]

    @staticmethod
    def of(listing: Listing, group: str) -> View:
        """Who says nothing that can be read, or has no handle of this version of fompi, is no member."""
        alive, epoch, prefix = {}, Epoch(), f"{group}/members/"
        for key, data in listing.items():
            try:
                if key == f"{group}/epoch":
                    number, mark, members = json.loads(data)
                    epoch = Epoch(int(number), str(mark), tuple((str(name), str(handle)) for name, handle in members))
                elif key.startswith(prefix):
                    handle, known, state = json.loads(data)
                    [Handle.of(text) for text in handle.split()]
                    alive[key.removeprefix(prefix)] = Spoken(handle, int(known), str(state))
            except (ValueError, TypeError, LaunchError) as error:
                log.debug("%s says nothing of a member: %s", key, error)
        return View(epoch, alive)

    def waiting(self) -> list[str]:
        return sorted(name for name, said in self.alive.items() if said.state == DOOR)

    def newest(self) -> int:
        """The highest number that is known at the door."""
        return max(self.epoch.number, *(self.alive[name].known for name in self.waiting()), 0)

    def awaited(self) -> list[str]:
        """Those that are in an epoch, or do not know the highest number yet: the last epoch may list them."""
        behind = [name for name in self.waiting() if self.alive[name].known < self.newest()]
        return sorted(behind + [name for name, said in self.alive.items() if said.state == IN])

    def first(self) -> tuple[str, int]:
        """The one with as many ranks as all must have, and how many: of the last epoch, if one lives, else of all."""
        here = [(name, said.handle) for name, said in sorted(self.alive.items()) if said.state != AWAY]
        name, handle = next((member for member in [*self.epoch.members, *here] if member in here), ("", ""))
        return name, len(handle.split())

    def has_ended(self) -> bool:
        """True if a member of the last epoch is at the door: so the others cannot go on in it."""
        return any((name, self.alive[name].handle) in self.epoch.members for name in self.waiting())

    def following(self, least: int, is_patient: bool = True) -> Epoch | None:
        """The next epoch, if it may be proposed. Not patient: without those that are still in the last one."""
        names = [name for name in self.waiting() if len(self.alive[name].handle.split()) == self.first()[1]]
        awaited = [name for name in self.awaited() if is_patient or name in names]
        if awaited or len(names) < max(1, least):
            return None
        return Epoch(self.newest() + 1, secrets.token_hex(8), tuple((name, self.alive[name].handle) for name in names))

    def differs_from(self, epoch: Epoch) -> bool:
        """True if a member of `epoch` is lost or away, or others are here: at the door, or in an epoch of their own.

        One that is still in an earlier epoch, because it is slow, comes to the door by itself.
        """
        here = {(name, said.handle): said for name, said in self.alive.items() if said.state != AWAY}
        slow = {key for key, said in here.items() if said.state == IN and said.known < epoch.number}
        return {*here} - slow | slow & {*epoch.members} != {*epoch.members}


class Presence:
    """One member in the store: what it says there, and proposes. It sends no messages."""

    def __init__(self, store: MembersStore, group: str, name: str, handle: str, ttl: float):
        self.store, self.group, self.name, self.handle, self.ttl = store, group, name, handle, ttl
        self.lost = -ttl  # when its words were found to be gone
        self._key, self._lock = f"{group}/members/{name}", RLock()
        self._said, self._has_left = Spoken(handle, 0, AWAY), False
        store.put(self._key, json.dumps(self._said), ttl)  # its own former self is no member any more

    def say(self, state: str = "", known: int = 0) -> None:
        """Say what it does, and which epoch it has seen. Raises StateError if another process has its name now."""
        with self._lock:
            before: Spoken | None = self._said
            said = Spoken(self.handle, max(known, self._said.known), state or self._said.state)
            while not self._has_left:
                self._said = said  # also if the store does not answer: it is said the next time
                old = None if before is None else json.dumps(before)
                found = self.store.compare_set(self._key, old, json.dumps(said), self.ttl)
                if found == json.dumps(said).encode():
                    return
                before = None if found is None else Spoken(*json.loads(found))
                if before is None:  # an epoch that it has not seen may have listed it
                    said, self.lost = said._replace(known=said.known + 1), monotonic()
                elif before.handle != self.handle:
                    raise StateError(f"another process has the name {self.name!r} in the group {self.group!r}")

    def leave(self) -> None:
        with self._lock:
            self._has_left = True
            self.store.compare_set(self._key, json.dumps(self._said), None)

    def due(self, view: View) -> Epoch | None:
        """The last epoch, if this one is to enter it."""
        is_due = view.epoch.number > self._said.known and (self.name, self.handle) in view.epoch.members
        return view.epoch if is_due else None

    def propose(self, listing: Listing, least: int, is_patient: bool) -> None:
        """Propose the next epoch, if it is the turn of this member, and nobody has since `listing`."""
        place, view = f"{self.group}/epoch", View.of(listing, self.group)
        following = view.following(least, is_patient)
        if self._said.state == DOOR and view.newest() > self._said.known and self.due(view) is None:
            self.say(known=view.newest())
        if place not in listing:  # the first one lists nobody: so each proposal has one before it, with a mark
            self.store.compare_set(place, None, json.dumps(Epoch(mark=secrets.token_hex(8))))
        elif following is not None and following.members[0] == (self.name, self.handle):
            self.store.compare_set(place, listing[place], json.dumps(following))


class Membership:
    """This process as a member of a group that has one epoch after the other.

        with fompi.members.Membership(store, name="h1", least=2) as membership:
            comm = membership.join(timeout=30)
            while step < steps:
                try:
                    fompi.all_reduce(x, comm=comm)
                except (fompi.PeerError, fompi.WaitTimeout):               # a member is lost
                    comm = membership.join()                               # the others, and those that have come

    `store`: an address or a store (`fompi.members.open_store`). `name`: another one for each member; a process that is
    started again takes its old one. `least`: so many members make an epoch. `group`: members of several groups may
    share a store. `ttl`: a member that says nothing for so many seconds is not in the next epoch; a thread says
    that this one is alive. `epoch`: the number and the members of the last `join()`; None before.

    `wait`: seconds after which the others go on without a member that is alive, but slow: half of them in a call on the
    epoch's Communicator, half of them in `join()`. None: the deadline of calls, and as long as it lives.
    `alone`: after the first epoch fewer than `least` members make one, too. `log`: a file to which `note` writes.

    Raises LaunchError if there is no UCX, or the store refuses this process; WaitTimeout if the store does not answer.
    """

    rank, size = 0, 1
    """Of this process among those of the member, which may be several (`fompi.islands.join`)."""

    def __init__(
        self,
        store: Any,
        name: str,
        least: int = 1,
        group: str = "fompi",
        ttl: float = TTL_SECONDS,
        *,
        wait: float | None = None,
        alone: bool = False,
        log: str | None = None,
    ):
        if wait is not None and not (number(wait) or 0) > 0:
            raise ArgumentError(f"wait={wait!r} must be a number of seconds above 0, or None")
        self.name, self.group, self.least, self.wait, self.alone = str(name), group, least, wait, alone
        self.epoch: Epoch | None = None
        self._comm: Communicator | None = None
        self._given = store
        self._store: MembersStore | None = None
        self._presence: Presence | None = None  # of the first rank
        self._news, self._closing = Condition(), Event()
        self._heard: tuple[Listing, View] = {}, View(Epoch(), {})
        self._heard_at = monotonic()
        self._error: BaseException | None = None
        self._away = self._missed = ""  # of the store, of the last epoch: what an error says besides
        self.number, self._door = 0, 0.0  # of the last epoch; since when others are awaited for the next one
        self.log: EpochLog | None = None
        handles = " ".join(self.of_all(epochs.handle()))
        self._by_first_rank(lambda: self._open(handles, ttl, log))

    def _open(self, handles: str, ttl: float, log: str | None) -> None:
        self.log = EpochLog(log, self.name) if log is not None else None
        self._store = open_store(self._given)
        self._presence = Presence(self._store, self.group, self.name, handles, ttl)
        self._thread = Thread(target=self._run, args=[self._presence], name=f"fompi member {self.name}", daemon=True)
        self._thread.start()

    def _run(self, presence: Presence) -> None:
        """Say that this member is alive, and listen."""
        while not self._closing.is_set() and self._error is None:
            try:
                presence.say()
                end = monotonic() + presence.ttl / 3
                while (left := end - monotonic()) > 0 and not self._closing.is_set():
                    self._listen(presence, left)
            except WaitTimeout as error:  # the members go on without the store
                self._away = f"; {error}"
                log.warning("%s: %s", self.name, error)
            except Exception as error:
                self._error = error

    def _listen(self, presence: Presence, seconds: float) -> None:
        listing = presence.store.watch(f"{self.group}/", self._heard[0], seconds)
        with self._news:
            if monotonic() > self._heard_at + presence.ttl:  # the store was away: others hear it no sooner
                self._door = monotonic()
            self._heard, self._away, self._heard_at = (listing, View.of(listing, self.group)), "", monotonic()
            self._news.notify_all()

    def _by_first_rank(self, act: Callable[[], Any]) -> Any:
        """`act()` on the first rank of this member. All its ranks have the result, or raise the error."""
        if self.size == 1:
            return act()
        result, error = None, None
        try:
            result = act() if self.rank == 0 else None
        except Exception as refusal:
            error = refusal
        words = None if error is None else (type(error).__name__, str(error))
        told, words = json.loads(self.of_all(json.dumps([result, words]))[0])
        if words is not None:
            raise error or getattr(errors, words[0], LaunchError)(words[1])
        return told

    def of_all(self, text: str) -> list[str]:
        """What each rank of this member says."""
        return [text]

    def on_any_rank(self, found: object) -> bool:
        """True if a rank of this member has found something. All its ranks call it."""
        return any(self.of_all("x" if found else ""))

    @property
    def names(self) -> list[str]:
        """Of the members of the last epoch, in the order of their ranks."""
        return [] if self.epoch is None else [name for name, _ in self.epoch.members]

    def note(self, kind: str, **what: Any) -> None:
        """Write a line to the log, if there is one (`fompi.members.epoch_log`)."""
        if self.log is not None:
            self.log.write({"kind": kind, "epoch": self.number, **what})

    @property
    def changed(self) -> bool:
        """True if the next epoch would have other members: one is lost or has left, or another one waits at the door.

        Members may see that at different times. They agree on it by a sum, before a step:

            if fompi.all_reduce(np.array([membership.changed], np.int32), comm=comm)[0]:
                comm = membership.join()

        Of a member of several ranks only the first one sees it.
        """
        if self.epoch is None or self._presence is None or self._is_settling():
            return False
        return self._error is not None or self._heard[1].differs_from(self.epoch)

    def _is_settling(self) -> bool:
        """True for one time to live after the store has lost what it had: all members say anew that they are here."""
        presence = self._presence
        return presence is not None and monotonic() - presence.lost < presence.ttl

    def join(self, timeout: float | None = None) -> Communicator:
        """The Communicator of the next epoch, which this member enters with all that wait for it as well.

        It aborts the one of before, if that is not closed. If members do not meet, because one dies at that moment,
        they try it again without that one. `timeout`: seconds; None: FOMPI_TIMEOUT.

        Raises WaitTimeout, which names those who were awaited; StateError if another process has taken the name;
        MismatchError if the members have different versions of fompi, or this one has another number of ranks.
        """
        seconds = launcher.timeout() if timeout is None else timeout
        self._door = monotonic()
        end = self._door + seconds
        self._abort("goes to the next epoch")
        try:
            while True:
                try:
                    found = self._by_first_rank(lambda: self._next(end, seconds))
                    if found is None:
                        continue
                    epoch = Epoch(found[0], found[1], tuple((name, handle) for name, handle in found[2]))
                    comm = self._met(epoch, end)
                    if not self.on_any_rank(comm is None) and comm is not None:
                        self._by_first_rank(lambda: self._say(IN))
                        return comm
                    self._abort("does not meet all")
                except WaitTimeout:  # of the store, or of this call
                    self._abort("cannot reach the store")
                    if self._by_first_rank(lambda: monotonic() > end):
                        raise
        except BaseException:
            self._abort("has given up")
            with suppress(FompiError):
                self._say(AWAY)
            raise

    def _say(self, state: str) -> None:
        if self._presence is not None:
            self._presence.say(state, self.number)

    def _next(self, end: float, seconds: float) -> Epoch | None:
        """The epoch that this member is to enter. None: not yet, which its other ranks should hear."""
        assert self._presence is not None
        self._presence.say(DOOR, self.number)  # one that it could not enter is over, too
        engine, seen, patience = engine_of_process(), None, inf if self.wait is None else self.wait / 2
        pause = inf if self.size == 1 else monotonic() + SLICE_SECONDS
        least = 1 if self.alone and self.epoch is not None else self.least
        while monotonic() < pause:
            if self._error is not None:
                raise self._error
            if monotonic() > self._heard_at + self._presence.ttl:  # the thread listens where a link was cut
                self._listen(self._presence, 0.0)
            listing, view = heard = self._heard
            if (epoch := self._presence.due(view)) is not None:
                return epoch
            first, size = view.first()
            if size not in (0, self.size):
                raise errors.MismatchError(f"{self.name!r} has {self.size} ranks, but {first!r} has {size}")
            if not view.has_ended():
                self._door = monotonic()
            is_patient = monotonic() < self._door + patience
            if (heard is not seen or not is_patient) and not self._is_settling():
                seen = heard
                self._presence.propose(listing, least, is_patient)
            if monotonic() > end:
                late = ", ".join(view.awaited()) or "others"
                raise WaitTimeout(
                    f"{self.name} waited {launcher.in_seconds(seconds)} for the epoch after {view.epoch.number} of "
                    f"{self.group!r}, of at least {self.least} members: {', '.join(view.waiting()) or 'nobody'} waits "
                    f"for it, but {late} did not come{self._missed}{self._away}"
                )
            if not engine.progress():
                with self._news:
                    if self._heard is heard:
                        self._news.wait(PAUSE_SECONDS)
        return None

    def _met(self, epoch: Epoch, end: float) -> Communicator | None:
        """The Communicator of `epoch`. None: a member did not come, or is lost."""
        rank, self.number = self.rank, epoch.number
        name = f"{epoch.number} of {self.group} ({epoch.mark})" + f", rank {rank} of each" * (self.size > 1)
        handles = self._handles_in(epoch)
        try:
            self._comm = epochs.join(name, handles, max(0.0, min(MEET_SECONDS, end - monotonic())))
        except (PeerError, WaitTimeout) as error:
            log.info("%s: %s", self.name, error)
            self._missed = f"; {error}"
            return None
        if len(epoch.members) < self.least and rank == 0:
            log.warning("%s goes on with %d of at least %d", self.name, len(epoch.members), self.least)
        forget([handle for handle in self._handles_in(self.epoch) if handle not in handles])
        self.epoch, self._missed = epoch, ""
        if self.wait is not None:
            self._comm.channel.timeout = max(self.wait / 4, self.wait / 2 - ANSWER_SECONDS)
        return self._comm

    def _handles_in(self, epoch: Epoch | None) -> list[str]:
        """How this rank reaches those of the members that it speaks with."""
        return [] if epoch is None else [handle.split()[self.rank] for _, handle in epoch.members]

    def _abort(self, why: str) -> None:
        if self._comm is not None:
            self._comm.abort(f"{self.name} {why}")
            handles = self._handles_in(self.epoch)
            forget([handles[rank] for rank in self._comm.channel.silent])
        self._comm = None

    def leave(self) -> None:
        """Leave the epoch. The others go on without this member, until it calls `join()` again."""
        self._abort("has left the epoch")
        with suppress(WaitTimeout):  # the store is away: it is said when it is back
            self._say(AWAY)

    def close(self) -> None:
        """Leave the group, and the epoch if it is not closed: the others go on without this member."""
        if not self._closing.is_set():
            self._closing.set()
            self._abort("leaves the group")
            if self._presence is not None and self._store is not None:
                with suppress(FompiError):
                    self._presence.leave()
                self._thread.join(self._presence.ttl)  # it may ask a store that is away
                if self._store is not self._given:
                    self._store.close()

    def __enter__(self) -> Membership:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
