"""Where members find each other: values by keys, which several processes share.

store.put("h1", b"here", ttl=5)                      # it goes after 5 s, unless it is put again
store.get("h1")                                      # b"here", or None
store.compare_set("turn", None, b"h1")               # set it if there is none: the value that is there then
store.watch("h", known={}, seconds=30)               # {"h1": b"here"}, as soon as there is something
"""

from __future__ import annotations

import base64
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from math import inf
from threading import RLock
from time import monotonic, sleep
from typing import Any, TypeVar

from fompi.base.errors import ArgumentError, WaitTimeout

SECONDS, PAUSE_SECONDS = 10.0, 0.1
"""How long a store that does not answer is asked again, and how long to wait before."""

KEY_NBYTES, VALUE_NBYTES = 512, 3 << 17
"""The largest key and value: a question to etcd may have 1.5 MB, which may be a value three times."""

Value = bytes | None
Listing = dict[str, bytes]
Answer = TypeVar("Answer")


def coded(value: Value) -> str | None:
    """base64, for JSON."""
    return None if value is None else base64.b64encode(value).decode()


def decoded(text: str | None) -> Value:
    """What `coded` was given. Raises ValueError."""
    return None if text is None else base64.b64decode(text, validate=True)


class MembersStore(ABC):
    """Values by keys that several processes share. Threads may use it at the same time.

    A key is text of up to 512 bytes, a value bytes or text of up to 384 KiB. All verbs raise WaitTimeout if the store
    does not answer for `seconds`, LaunchError if it refuses this process, and ArgumentError for what it does not take.
    A subclass has `_read`, `_write` and `_watch`, which raise an OSError if the store is away.
    """

    server: Any = None
    """What this process serves for others."""

    def __init__(self, address: str, seconds: float = SECONDS):
        self.address, self.seconds = address, seconds

    def put(self, key: str, value: bytes | str, ttl: float | None = None) -> None:
        """Set the value, whatever there is. With `ttl` it goes after so many seconds, unless it is put again."""
        self._persist(partial(self._write, *_entry(key, value, ttl), None))

    def get(self, key: str) -> Value:
        """The value, or None."""
        return self._persist(partial(self._read, _entry(key, None, None)[0]))

    def compare_set(self, key: str, old: Value | str, new: Value | str, ttl: float | None = None) -> Value:
        """Set the value to `new` if it is `old`. Returns the one that is there then. None: that there is none.

        A call that is repeated because its answer was lost returns `new` as well, if nobody has changed it meanwhile.
        """
        only_if = (_entry(key, old, None)[1],)
        return self._persist(partial(self._write, *_entry(key, new, ttl), only_if))

    def watch(self, prefix: str, known: Listing | None = None, seconds: float = 0.0) -> Listing:
        """The values of all keys that begin with `prefix`: as soon as they are not `known`, or after `seconds`."""
        end = monotonic() + seconds
        while True:
            left = max(0.0, end - monotonic())
            found = self._persist(partial(self._watch, prefix, known, left), left)
            if found != known or monotonic() >= end:
                return found

    def close(self) -> None:
        """End what this process serves for others. There are no connections that stay."""
        if self.server is not None:
            self.server.close()

    def _persist(self, ask: Callable[[], Answer], more: float = 0.0) -> Answer:
        """`ask()`, again and again while the store is away, for `seconds` and `more`."""
        end = monotonic() + self.seconds + more
        while True:
            try:
                return ask()
            except OSError as error:
                if monotonic() + PAUSE_SECONDS > end:
                    why = str(error) or type(error).__name__
                    what = f"the store {self.address} does not answer for {self.seconds:g} s"
                    raise WaitTimeout(f"{what}: {why}") from error
            sleep(PAUSE_SECONDS)

    @abstractmethod
    def _read(self, key: str) -> Value: ...

    @abstractmethod
    def _write(self, key: str, new: Value, ttl: float | None, only_if: tuple[Value] | None) -> Value:
        """Set it, if `only_if` is None or has the value that is there. Returns the value that is there then."""

    @abstractmethod
    def _watch(self, prefix: str, known: Listing | None, seconds: float) -> Listing:
        """The listing, once it is not `known`. It may return before, and does after `seconds`."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _entry(key: str, value: Value | str, ttl: float | None) -> tuple[str, Value, float | None]:
    """Key, value and time to live as a store keeps them. Raises ArgumentError."""
    if not isinstance(key, str) or not 0 < len(key.encode()) <= KEY_NBYTES:
        raise ArgumentError(f"the key {str(key)[:40]!r} must be a text of 1 to {KEY_NBYTES} bytes")
    data = value.encode() if isinstance(value, str) else value
    if not isinstance(data, bytes | None) or len(data or b"") > VALUE_NBYTES:
        raise ArgumentError(f"the value of {key!r} must be bytes or text of up to {VALUE_NBYTES} bytes")
    if ttl is not None and not (isinstance(ttl, int | float) and 0 < ttl < inf):
        raise ArgumentError(f"ttl={ttl!r} must be a number of seconds above 0, or None")
    return key, data, ttl


class TorchStore(MembersStore):
    """A store of torch, of which `set`, `get`, `check`, `compare_set` and `add` are used. `connect()` returns it.

    It knows no time to live: each value has a stamp, another one whenever it is put. A reader that has seen a stamp for
    longer than the time to live takes the value as gone, so no clocks of two machines are compared. Keys cannot be
    listed: they are numbered, and the numbers are counted.
    """

    PREFIX, COUNT = "fompi/members", "fompi/members/count"

    def __init__(self, connect: Callable[[], Any], address: str, seconds: float = SECONDS):
        super().__init__(address, seconds)
        self._connect, self._store, self._lock = connect, None, RLock()
        self._names: dict[int, str] = {}  # the keys, by their numbers
        self._seen: dict[str, tuple[str, float]] = {}  # the last stamp of each key, and when it was seen first

    def _ask(self, method: str, *arguments: Any) -> Any:
        with self._lock:
            try:
                self._store = self._store or self._connect()
                return getattr(self._store, method)(*arguments)
            except RuntimeError as error:  # torch's errors of connections are RuntimeErrors
                self._store, self._names, self._seen = None, {}, {}
                raise ConnectionError(str(error).partition("\n")[0]) from error

    def _found(self, key: str) -> tuple[str, Value]:
        """What the store has, and the value in it, unless that is gone."""
        place = f"{self.PREFIX}/at/{key}"
        if not self._ask("check", [place]):
            return "", None
        raw = self._ask("get", place).decode()
        stamp, ttl, text = raw.split(" ")
        with self._lock:
            if self._seen.get(key, ("",))[0] != stamp:
                self._seen[key] = stamp, monotonic()
            is_gone = float(ttl) > 0 and monotonic() - self._seen[key][1] > float(ttl)
        return raw, None if is_gone or text == "-" else decoded(text)

    def _read(self, key: str) -> Value:
        return self._found(key)[1]

    def _write(self, key: str, new: Value, ttl: float | None, only_if: tuple[Value] | None) -> Value:
        place, text = f"{self.PREFIX}/at/{key}", "-" if new is None else coded(new)
        raw = f"{secrets.token_hex(8)} {ttl or 0} {text}"
        if only_if is None:
            self._ask("set", place, raw)
        while only_if is not None:
            before, found = self._found(key)
            if found not in only_if:
                return found
            if self._ask("compare_set", place, before, raw).decode() == raw:
                break
        if key not in self._keys():
            self._ask("set", f"{self.PREFIX}/name/{self._ask('add', self.COUNT, 1)}", key)
        return new

    def _keys(self) -> set[str]:
        """All keys that were ever set."""
        count = int(self._ask("get", self.COUNT)) if self._ask("check", [self.COUNT]) else 0
        with self._lock:
            for number in {*range(1, count + 1)} - {*self._names}:
                if self._ask("check", [place := f"{self.PREFIX}/name/{number}"]):
                    self._names[number] = self._ask("get", place).decode()
            return {*self._names.values()}

    def _watch(self, prefix: str, known: Listing | None, seconds: float) -> Listing:
        keys = [key for key in self._keys() if key.startswith(prefix)]
        found = {key: value for key in keys if (value := self._found(key)[1]) is not None}
        if found == known:
            sleep(min(seconds, PAUSE_SECONDS * (1 + len(keys) / 20)))
        return found
