"""The checker of races: vector clocks (Fidge and Mattern, 1988), and what each operation has touched.

`Clocks` knows what happens before what: launches, `record`, `wait`, `done`, and messages. A `Span` is an allocation. It
holds the accesses to its bytes, and refuses one that conflicts with another one and is ordered by nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from fompi.base.errors import DeviceError, RaceError

HOST = "the host"


class Access:
    """`what` touched the bytes from `start` to `stop`, as act number `tick` of `actor`."""

    __slots__ = ("actor", "start", "stop", "tick", "what", "writes")

    def __init__(self, actor: str, tick: int, what: str, start: int, stop: int, writes: bool):
        self.actor, self.tick, self.what, self.start, self.stop, self.writes = actor, tick, what, start, stop, writes

    @property
    def verb(self) -> str:
        return "writes" if self.writes else "reads"


class Clocks:
    """A vector clock for each actor: the host, a stream, or a message in flight. It knows acts of the others."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.of: dict[str, dict[str, int]] = {HOST: {HOST: 0}}

    def join(self, actor: str, other: dict[str, int]) -> None:
        """`actor` knows from now on what `other` knew."""
        mine = self.of.setdefault(actor, {})
        for who, n in other.items():
            if n > mine.get(who, 0):
                mine[who] = n

    def tick(self, actor: str) -> int:
        """The number of the next act of `actor`."""
        mine = self.of.setdefault(actor, {})
        mine[actor] = mine.get(actor, 0) + 1
        return mine[actor]

    def note(self, actor: str, what: str, places: Sequence[Place]) -> list[Access]:
        """`actor` does `what`, which touches these places. All are checked before any is kept."""
        tick = self.tick(actor)
        accesses = [Access(actor, tick, what, start, stop, writes) for _, start, stop, writes in places]
        for (span, *_), access in zip(places, accesses, strict=True):
            span.check(self, access)
        for (span, *_), access in zip(places, accesses, strict=True):
            span.keep(self, access)
        return accesses

    def knows(self, actor: str, access: Access) -> bool:
        """True if `access` happens before what `actor` does next."""
        return access.actor == actor or self.of[actor].get(access.actor, 0) >= access.tick


class Span:
    """An allocation, and which operations have touched its bytes: those that later ones can still conflict with."""

    def __init__(self, device: Any, nbytes: int, kind: str, written: bool = False):
        self.device, self.nbytes, self.kind = device, nbytes, kind
        self.ptr = self.shadow = 0
        self.freed = self.is_lent = False
        self.accesses: list[Access] = []
        self.owner: str | None = None  # the stream in whose order its memory is used again. None: in that of the host
        self._written = written
        self.number = next(device.numbers)

    def __str__(self) -> str:
        return f"{self.kind} memory {self.number} ({self.nbytes} bytes)"

    def check(self, clocks: Clocks, access: Access) -> None:
        """Raise the error of an access that is not allowed."""
        if self.freed:
            raise DeviceError(f"{access.what} uses {self}, which was freed")
        for old in self.accesses:
            overlap = old.start < access.stop and access.start < old.stop
            if overlap and (old.writes or access.writes) and not clocks.knows(access.actor, old):
                raise RaceError(
                    f"{access.what} {access.verb} bytes {access.start} to {access.stop} of {self}, and {old.what} "
                    f"{old.verb} {old.start} to {old.stop}: nothing orders them. Wait for the event of the earlier one"
                )
        if not (self._written or access.writes or access.start == access.stop):
            raise DeviceError(f"{access.what} reads {self}, which nothing has written")

    def keep(self, clocks: Clocks, access: Access) -> None:
        """Note an access. It replaces those that can conflict with nothing that does not conflict with it."""
        if access.start < access.stop:

            def is_replaced(old: Access) -> bool:
                inside = access.start <= old.start and old.stop <= access.stop
                as_strong = access.writes or (old.actor == access.actor and not old.writes)
                return inside and as_strong and clocks.knows(access.actor, old)

            self.accesses = [*(old for old in self.accesses if not is_replaced(old)), access]
            self._written = self._written or access.writes

    def in_use(self, clocks: Clocks) -> Access | None:
        """An access of which neither the host nor `owner` knows whether it is done."""
        known = (HOST,) if self.owner is None else (HOST, self.owner)
        return next((a for a in self.accesses if not any(clocks.knows(actor, a) for actor in known)), None)


def freed_in_use(span: Span, user: Access) -> DeviceError:
    return DeviceError(f"{span} is freed, but the host does not know whether {user.what} is done")


Place = tuple[Span, int, int, bool]
"""A span, the first and the end of the bytes that are used, and whether they are written."""
