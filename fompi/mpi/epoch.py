"""Processes that make a group without a launcher: they know each other by handles, and agree on one epoch.

    mine = handle()                                    # a string that others get by a store
    comm = join("run 7, epoch 3", handles, 30.0)       # the same list on all members: its order gives the ranks

A member tells each other one that it is here, under which name and which list. When all have, each says that it has
heard all. So either all members have the group, or those that live get an error. Everything goes by UCX, also in a
process whose own ranks use MPI. Connections stay from one epoch to the next; those of peers that are lost, or do not
answer, are closed.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import RLock
from time import perf_counter, sleep
from typing import NamedTuple

from fompi.base.errors import LaunchError, MismatchError, PeerError, WaitTimeout
from fompi.mpi.launcher import in_seconds
from fompi.mpi.ucx import MOST_RANKS, PAUSE_SECONDS, WORLD, Intracomm, UcxRequest, parts_of, variables

PREFIX = "fompi-1-"
"""How a handle begins: another number would be another form."""

_HANDLE = struct.Struct("<16sIH")  # id, process, bytes of the name of the host
_WORD = struct.Struct("<8sB16s16s16s16siQ")  # what a member says; see `Word`
_MAGIC = b"fompi-e1"

HERE, HEARD, REFUSED = range(3)
"""What a member says: it is here; it has heard all; it has given up the epoch, and why."""

MOST_HEARD = 1 << 14
"""At most this many words are kept of epochs that this process has not joined yet."""


class Handle(NamedTuple):
    """How others reach a process."""

    id: bytes
    process: int
    host: str
    address: bytes

    def __str__(self) -> str:
        host = self.host.encode()
        body = _HANDLE.pack(self.id, self.process, len(host)) + host + self.address
        return PREFIX + base64.urlsafe_b64encode(body + struct.pack("<I", zlib.crc32(body))).decode()

    @staticmethod
    def of(text: str) -> Handle:
        """The handle that was written as `text`. Raises LaunchError."""
        if not isinstance(text, str) or not text.startswith(PREFIX):
            other = isinstance(text, str) and text.startswith(PREFIX.split("-")[0])
            what = "of another version of fompi" if other else "no handle of fompi"
            raise LaunchError(f"{str(text)[:24]!r} is {what}: pass on what fompi.members.handle() returns")
        try:
            whole = base64.b64decode(text[len(PREFIX) :], b"-_", validate=True)
            body, (check,) = whole[:-4], struct.unpack("<I", whole[-4:])
            if zlib.crc32(body) != check:
                raise ValueError
            number, process, n = _HANDLE.unpack_from(body)
            host, address = body[_HANDLE.size : _HANDLE.size + n].decode(), body[_HANDLE.size + n :]
            parts_of(address)
        except (ValueError, IndexError, struct.error):
            raise LaunchError(f"the handle {text[:24]!r}... is not whole: it has {len(text)} characters") from None
        return Handle(number, process, host, address)

    @property
    def words(self) -> str:
        return f"process {self.process} of {self.host}"


class Word(NamedTuple):
    """What a member says to another. `there`: its number for the other one. `number`: the one that it proposes."""

    kind: int
    name: bytes
    members: bytes
    sender: bytes
    receiver: bytes
    there: int
    number: int
    text: str = ""

    def encoded(self) -> bytes:
        return _WORD.pack(_MAGIC, *self[:-1]) + self.text.encode()[:2048]

    @staticmethod
    def decoded(data: bytes) -> Word | None:
        """None: it is nothing that a member says."""
        if len(data) < _WORD.size or not data.startswith(_MAGIC):
            return None
        text = data[_WORD.size :].decode(errors="replace")
        return Word(*_WORD.unpack_from(data)[1:], text)  # type: ignore[call-arg]


class _Membership:
    """What this process knows of others."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.id = secrets.token_bytes(16)
        self.peers: dict[bytes, int] = {}  # the number of each peer, by its id
        self.unused: set[int] = set()  # lost peers, whose connections are closed once no group has them
        self.joining: list[int] = []
        self.heard: dict[tuple[bytes, bytes, int], Word] = {}  # by epoch, sender and kind

    def begin(self) -> None:
        WORLD.begin()
        if not WORLD.hosts:  # the ranks of this process use MPI, or there are none
            WORLD.connect(WORLD.address(), os.uname().nodename, 0)

    def peer(self, member: Handle) -> int:
        """The number of this member, to which it connects if it must."""
        if member.id == self.id:
            return WORLD.own
        known = self.peers.get(member.id)
        if known is not None and not WORLD.worker.error(known):
            return known
        if known is not None:
            self.unused.add(known)
        made = self.peers[member.id] = WORLD.connect(member.address, member.host, 0)
        return made

    def listen(self) -> None:
        """Note what others have said. What is not from a member, or for another process, is forgotten."""
        with self.lock:
            while (data := WORLD.worker.heard()) is not None:
                word = Word.decoded(data)
                if word is not None and word.receiver == self.id:
                    self.heard[word.name, word.sender, word.kind] = word
                    if len(self.heard) > MOST_HEARD:
                        del self.heard[next(iter(self.heard))]

    def sweep(self) -> None:
        """Throw away what comes for groups that are closed, and close the connections to peers that are lost.

        The others stay: their peers may be about to use them.
        """
        for number in WORLD.closed:
            WORLD.worker.discard(number)
        lost = {identity: peer for identity, peer in self.peers.items() if WORLD.worker.error(peer)}
        for identity, peer in lost.items():
            if peer not in self.joining:
                self.unused.add(self.peers.pop(identity))
        self.unused = {peer for peer in self.unused if peer in self.joining or not WORLD.worker.disconnect(peer)}


_HERE = _Membership()


def handle() -> str:
    """How others reach this process: the same string as long as it lives. It starts UCX."""
    _HERE.begin()
    return str(Handle(_HERE.id, os.getpid(), os.uname().nodename, WORLD.address()))


def forget(handles: Sequence[str]) -> None:
    """Connect anew to these processes the next time, once no group has them.

    A connection over a link that was cut is there again late: TCP waits as long again as the cut has taken.
    """
    with _HERE.lock:
        for text in handles:
            if (peer := _HERE.peers.pop(Handle.of(text).id, None)) is not None:
                _HERE.unused.add(peer)


def join(name: str, handles: Sequence[str], seconds: float, progress: Callable[[], object]) -> Intracomm:
    """The communicator of the processes with these handles, whose order gives the ranks. All of them call it.

    `name`: that of the epoch, which no other one has that these processes join. `progress()` is called while this one
    waits. Raises LaunchError for a handle that is none or is not its own, MismatchError if members have other lists,
    PeerError if one is lost or has given up, and WaitTimeout after `seconds`.
    """
    _HERE.begin()
    members = [Handle.of(text) for text in handles]
    ids = [member.id for member in members]
    if ids.count(_HERE.id) != 1 or len({*ids}) != len(ids):
        what = "is not in the list" if _HERE.id not in ids else "or another one is twice in the list"
        raise LaunchError(f"epoch {name}: the handle of this process {what} of {len(ids)} handles")
    if len(ids) > MOST_RANKS:
        raise LaunchError(f"epoch {name}: UCX connects {MOST_RANKS} processes at most here, not {len(ids)}")
    return _Joining(name, members).joined(seconds, progress)


class _Joining:
    """One epoch that this process joins."""

    def __init__(self, name: str, members: Sequence[Handle]):
        self.text, self.members, self.rank = name, members, [member.id for member in members].index(_HERE.id)
        self.name = hashlib.sha256(name.encode()).digest()[:16]
        self.digest = hashlib.sha256(b"".join(member.id for member in members)).digest()[:16]
        self.peers: dict[int, int] = {}  # by rank
        with _HERE.lock:
            self.number, WORLD.next_number = WORLD.next_number, WORLD.next_number + 1
        self.others = [rank for rank in range(len(members)) if rank != self.rank]

    def peer(self, rank: int) -> int:
        """The number of a member, to which this one connects at the first question."""
        if rank not in self.peers:
            with _HERE.lock:
                try:
                    self.peers[rank] = _HERE.peer(self.members[rank])
                except ConnectionError as error:
                    words = f"rank {rank} ({self.members[rank].words}) cannot be reached"
                    raise PeerError(f"epoch {self.text}: {words}: {error}. {variables()}", rank) from None
                _HERE.joining.append(self.peers[rank])
        return self.peers[rank]

    def joined(self, seconds: float, progress: Callable[[], object]) -> Intracomm:
        end, numbers = perf_counter() + seconds, {self.rank: self.number}
        try:
            for kind in (HERE, HEARD):
                for rank in self.others:
                    self.tell(rank, kind)
                for rank, word in self.words(kind, end, seconds, progress).items():
                    if word.members != self.digest:
                        raise MismatchError(
                            f"epoch {self.text}: rank {rank} ({self.members[rank].words}) joins it with other members"
                        )
                    numbers[rank] = word.number
                    WORLD.worker.known_as(self.peer(rank), word.there)
            number, ranks = max(numbers.values()), range(len(self.members))
            peers = [self.peer(rank) for rank in ranks]
            made = Intracomm.of(number, peers, [number * MOST_RANKS + rank for rank in ranks])
        except BaseException as error:
            for rank in self.others:
                with suppress(Exception):
                    self.tell(rank, REFUSED, str(error))
            raise
        finally:
            with _HERE.lock:
                for peer in self.peers.values():
                    _HERE.joining.remove(peer)
                _HERE.heard = {key: word for key, word in _HERE.heard.items() if key[0] != self.name}
        with _HERE.lock:
            _HERE.sweep()
        return made

    def tell(self, rank: int, kind: int, text: str = "") -> None:
        there = self.peer(rank)
        word = Word(kind, self.name, self.digest, _HERE.id, self.members[rank].id, there, self.number, text).encoded()
        UcxRequest(WORLD.worker.tell(there, word), word).Free()

    def words(self, kind: int, end: float, seconds: float, progress: Callable[[], object]) -> dict[int, Word]:
        """What all other members say, once they have."""
        found: dict[int, Word] = {}
        while len(found) < len(self.others):
            _HERE.listen()
            for rank in self.others:
                identity = self.members[rank].id
                if (word := _HERE.heard.get((self.name, identity, kind))) is not None:
                    found[rank] = word
                elif (refused := _HERE.heard.get((self.name, identity, REFUSED))) is not None:
                    raise PeerError(f"epoch {self.text}: rank {rank} has given it up: {refused.text}", rank)
                elif error := WORLD.worker.error(self.peer(rank)):
                    words = self.members[rank].words
                    raise PeerError(f"epoch {self.text}: rank {rank} ({words}) is lost: {error}", rank)
            if len(found) == len(self.others):
                break
            if perf_counter() > end:
                late = [f"rank {rank} ({self.members[rank].words})" for rank in self.others if rank not in found]
                raise WaitTimeout(
                    f"epoch {self.text}: rank {self.rank} waited {in_seconds(seconds)} for {', '.join(late)} to join it"
                )
            if not progress():
                sleep(PAUSE_SECONDS)
        return found
