"""Where members find each other: values by keys, which several processes share.

    store.put("h1", b"here", ttl=5)                      # it goes after 5 s, unless it is put again
    store.get("h1")                                      # b"here", or None
    store.compare_set("turn", None, b"h1")               # set it if there is none: the value that is there then
    store.watch("h", known={}, seconds=30)               # {"h1": b"here"}, as soon as there is something

Four stores do this: one in the memory of a process (`LocalStore`), the same one behind a socket (`served.py`), a store
of torch, and etcd. A store that does not answer is asked again, for some seconds.
"""

from __future__ import annotations

import base64
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from socket import SHUT_RDWR
from threading import Condition, RLock
from time import monotonic, sleep
from typing import Any, TypeVar

from fompi.base.doors import DOORS
from fompi.base.errors import ArgumentError, StateError, WaitTimeout

SECONDS, PAUSE_SECONDS = 10.0, 0.1
"""How long a store that does not answer is asked again, and how long to wait before."""

KEY_NBYTES, VALUE_NBYTES, MOST_KEYS, STORE_NBYTES = 512, 1 << 20, 1 << 16, 1 << 25
"""The largest key and value; how many values, and bytes of values, a store in the memory of a process takes."""

Listing = dict[str, bytes]
Answer = TypeVar("Answer")


def text_of_bytes(value: bytes | None) -> str | None:
    """base64, for JSON."""
    return None if value is None else base64.b64encode(value).decode()


def bytes_of_text(text: str | None) -> bytes | None:
    """What `text_of_bytes` was given. Raises ValueError."""
    return None if text is None else base64.b64decode(text, validate=True)


class MembersStore(ABC):
    """Values by keys that several processes share. Threads may use it at the same time.

    A key is text of up to 512 bytes, a value bytes or text of up to 1 MiB. A subclass has `_read`, `_write` and
    `_watch`, which raise an OSError if the store is away. All verbs raise WaitTimeout if it stays away for `seconds`, LaunchError
    if it refuses this process, and ArgumentError for a key or value that it does not take.
    """

    def __init__(self, address: str, seconds: float = SECONDS):
        self.address, self.seconds, self.closed = address, seconds, False

    def put(self, key: str, value: bytes | str, ttl: float | None = None) -> None:
        """Set the value, whatever there is. With `ttl` it goes after so many seconds, unless it is put again."""
        self.persist(lambda: self._write(*_entry(key, value, ttl), None))

    def get(self, key: str) -> bytes | None:
        """The value, or None."""
        return self.persist(lambda: self._read(key))

    def compare_set(
        self, key: str, old: bytes | str | None, new: bytes | str | None, ttl: float | None = None
    ) -> bytes | None:
        """Set the value to `new` if it is `old`. Returns the one that is there then. None: that there is none.

        A call that is repeated because its answer was lost returns `new` as well, if nobody has changed it meanwhile.
        """
        _, before, _ = _entry(key, old, None)
        return self.persist(lambda: self._write(*_entry(key, new, ttl), (before,)))

    def watch(self, prefix: str, known: Listing | None = None, seconds: float = 0.0) -> Listing:
        """The values of all keys that begin with `prefix`: as soon as they are not `known`, or after `seconds`."""
        end = monotonic() + seconds
        while True:
            left = max(0.0, end - monotonic())
            found = self.persist(partial(self._watch, prefix, known, left), left)
            if found != known or monotonic() >= end:
                return found

    def close(self) -> None:
        """Give up the connections. Calls in other threads end with a StateError."""
        self.closed = True

    def persist(self, ask: Callable[[], Answer], more: float = 0.0) -> Answer:
        """`ask()`, again and again while the store is away, for `seconds` and `more`."""
        end = monotonic() + self.seconds + more
        while not self.closed:
            try:
                return ask()
            except WaitTimeout:
                raise
            except OSError as error:
                if monotonic() + PAUSE_SECONDS > end and not self.closed:
                    why = f"{error}".strip() or type(error).__name__
                    raise WaitTimeout(
                        f"the store {self.address} has not answered for {self.seconds:g} s: {why}"
                    ) from error
                sleep(PAUSE_SECONDS)
        raise StateError(f"the store {self.address} is closed")

    @abstractmethod
    def _read(self, key: str) -> bytes | None: ...

    @abstractmethod
    def _write(
        self, key: str, new: bytes | None, ttl: float | None, only_if: tuple[bytes | None] | None
    ) -> bytes | None:
        """Set it, if `only_if` is None or has the value that is there. Returns the value that is there then."""

    @abstractmethod
    def _watch(self, prefix: str, known: Listing | None, seconds: float) -> Listing:
        """The listing, once it is not `known`. It may return before, and does after `seconds`."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"


def _entry(key: str, value: bytes | str | None, ttl: float | None) -> tuple[str, bytes | None, float | None]:
    """Key, value and time to live as a store keeps them. Raises ArgumentError."""
    if not isinstance(key, str) or not 0 < len(key.encode()) <= KEY_NBYTES:
        raise ArgumentError(f"the key {str(key)[:40]!r} must be a text of 1 to {KEY_NBYTES} bytes")
    data = value.encode() if isinstance(value, str) else value
    if not isinstance(data, bytes | None) or len(data or b"") > VALUE_NBYTES:
        raise ArgumentError(f"the value of {key!r} must be bytes or text of up to {VALUE_NBYTES} bytes")
    if ttl is not None and not (isinstance(ttl, int | float) and 0 < ttl < inf):
        raise ArgumentError(f"ttl={ttl!r} must be a number of seconds above 0, or None")
    return key, data, ttl


class LocalStore(MembersStore):
    """A store in the memory of this process, for its threads. `served.Server` gives it to others."""

    def __init__(self) -> None:
        super().__init__("in memory")
        self._kept: dict[str, tuple[bytes, float]] = {}  # the value, and when it goes
        self._changed = Condition()

    def _read(self, key: str) -> bytes | None:
        with self._changed:
            value, end = self._kept.get(key, (None, inf))
            return value if end > monotonic() else None

    def _write(
        self, key: str, new: bytes | None, ttl: float | None, only_if: tuple[bytes | None] | None
    ) -> bytes | None:
        with self._changed:
            found = self._read(key)
            if only_if is not None and found not in only_if:
                return found
            self._forget()
            others = {other: kept for other, kept in self._kept.items() if other != key}
            if new is not None:
                nbytes = len(new) + sum(len(value) for value, _ in others.values())
                if nbytes > STORE_NBYTES or len(others) >= MOST_KEYS:
                    raise ArgumentError(f"the store is full: it has {len(others)} other values, and {nbytes} bytes")
                others[key] = new, inf if ttl is None else monotonic() + ttl
            self._kept = others
            if new != found:
                self._changed.notify_all()
            return new

    def _watch(self, prefix: str, known: Listing | None, seconds: float) -> Listing:
        end = monotonic() + seconds
        with self._changed:
            while True:
                self._forget()
                found = {key: value for key, (value, _) in self._kept.items() if key.startswith(prefix)}
                if found != known or monotonic() >= end:
                    return found
                next_end = min((gone for _, gone in self._kept.values()), default=inf)
                self._changed.wait(max(0.0, min(end, next_end) - monotonic()))

    def _forget(self) -> None:
        """Take away what has run out."""
        now = monotonic()
        for key in [key for key, (_, end) in self._kept.items() if end <= now]:
            del self._kept[key]


class TorchStore(MembersStore):
    """A store of torch. It knows no time to live, and its keys cannot be listed, so both are made here.

    Each value has a stamp, which is another one whenever it is put. A reader that has seen the same stamp for longer
    than the time to live takes the value as gone: no clocks of two machines are compared. Keys are numbered, and the
    numbers are counted.
    """

    PREFIX, COUNT = "fompi/members", "fompi/members/count"

    def __init__(self, connect: Callable[[], Any], address: str, seconds: float = SECONDS):
        super().__init__(address, seconds)
        self._connect, self._store = connect, None
        self._lock = RLock()
        self._names: dict[int, str] = {}  # the keys, by their numbers
        self._seen: dict[str, tuple[str, float]] = {}  # the last stamp of each key, and when it was seen first

    def _ask(self, method: str, *arguments: Any) -> Any:
        with self._lock:
            try:
                if self._store is None:
                    self._store = self._connect()
                return getattr(self._store, method)(*arguments)
            except RuntimeError as error:  # torch's errors of connections are RuntimeErrors
                self._store, self._names, self._seen = None, {}, {}
                raise ConnectionError(f"{error}".partition("\n")[0]) from error

    def _found(self, key: str, is_there: bool = False) -> tuple[str, bytes | None]:
        """What the store has, and the value in it, unless that is gone."""
        place = f"{self.PREFIX}/at/{key}"
        if not is_there and not self._ask("check", [place]):
            return "", None
        raw = self._ask("get", place).decode()
        stamp, ttl, text = raw.split(" ")
        with self._lock:
            if self._seen.get(key, ("",))[0] != stamp:
                self._seen[key] = stamp, monotonic()
            is_gone = float(ttl) > 0 and monotonic() - self._seen[key][1] > float(ttl)
        return raw, None if is_gone or text == "-" else bytes_of_text(text)

    def _read(self, key: str) -> bytes | None:
        return self._found(key)[1]

    def _write(
        self, key: str, new: bytes | None, ttl: float | None, only_if: tuple[bytes | None] | None
    ) -> bytes | None:
        place, written = f"{self.PREFIX}/at/{key}", "-" if new is None else text_of_bytes(new)
        raw = f"{secrets.token_hex(8)} {ttl or 0} {written}"
        if only_if is None:
            self._ask("set", place, raw)
        else:
            while True:
                before, found = self._found(key)
                if found not in only_if:
                    return found
                if self._ask("compare_set", place, before, raw).decode() == raw:
                    break
        if key not in self._listed():
            self._ask("set", f"{self.PREFIX}/name/{self._ask('add', self.COUNT, 1)}", key)
        return new

    def _listed(self) -> set[str]:
        """All keys that were ever set."""
        count = int(self._ask("get", self.COUNT)) if self._ask("check", [self.COUNT]) else 0
        with self._lock:
            for number in range(1, count + 1):
                place = f"{self.PREFIX}/name/{number}"
                if number not in self._names and self._ask("check", [place]):
                    self._names[number] = self._ask("get", place).decode()
            return {*self._names.values()}

    def _watch(self, prefix: str, known: Listing | None, seconds: float) -> Listing:
        keys = [key for key in self._listed() if key.startswith(prefix)]
        found = {key: value for key in keys if (value := self._found(key, True)[1]) is not None}
        if found == known:
            sleep(min(seconds, PAUSE_SECONDS + len(keys) * PAUSE_SECONDS / 20))
        return found


def of_torch(store: Any, seconds: float = SECONDS) -> TorchStore:
    """A store object of torch, or what has its methods `set`, `get`, `check`, `compare_set` and `add`."""
    lacks = [name for name in ("set", "get", "check", "compare_set", "add") if not hasattr(store, name)]
    if lacks:
        raise ArgumentError(
            f"{type(store).__name__} is no store: it has no {', '.join(lacks)}. Give an address (tcp://, etcd:// or "
            "fompi://), or a store of torch"
        )
    return TorchStore(lambda: store, type(store).__name__, seconds)


def at_tcp(host: str, port: int, seconds: float = SECONDS) -> TorchStore:
    """The TCPStore of torch that listens there."""
    return TorchStore(lambda: DOORS.tcp_store(host, port, seconds), f"tcp://{host}:{port}", seconds)


class Connecting(MembersStore):
    """A store that is reached by connections. A call takes one that nobody uses, or makes one."""

    def __init__(self, address: str, seconds: float = SECONDS):
        super().__init__(address, seconds)
        self._lock = RLock()
        self._all: set[Any] = set()
        self._idle: list[Any] = []

    @abstractmethod
    def _connect(self) -> Any:
        """A new connection, with its socket in `sock`, and `close()`."""

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """A connection for one question. It is closed if that fails, with those that nobody uses: they are as old."""
        with self._lock:
            used = self._idle.pop() if self._idle else None
        if used is None:
            used = self._connect()
            with self._lock:
                self._all.add(used)
        try:
            yield used
        except BaseException:
            self._drop([used, *self._idle])
            raise
        with self._lock:
            self._idle.append(used)
        if self.closed:
            self.close()

    def _drop(self, connections: list[Any]) -> None:
        with self._lock:
            self._all.difference_update(connections)
            self._idle = [each for each in self._idle if each not in connections]
        for each in connections:
            with suppress(OSError, AttributeError):  # another thread may wait in it; it has no socket yet
                each.sock.shutdown(SHUT_RDWR)
            with suppress(OSError):
                each.close()

    def close(self) -> None:
        super().close()
        self._drop([*self._all])
