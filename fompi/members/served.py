"""A store in one process, and how others ask it.

    with Server("127.0.0.1", 7777): ...                  # `fompi members serve --port 7777`
    ServedStore("127.0.0.1", 7777).put("h1", "here")     # in another process

A connection is one question: the store sends 32 random bytes, the member 32 others and the question, the store the
answer. Question and answer have a code (HMAC) by the token of both (FOMPI_MEMBERS_TOKEN), which is never sent, over
these bytes and the text: so neither end takes what another one says, or says again. The text is JSON, not encrypted.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from hashlib import sha256
from math import inf
from socketserver import BaseRequestHandler, ThreadingTCPServer
from time import monotonic
from typing import Any

from fompi.base.errors import ArgumentError, FompiError, LaunchError, in_words
from fompi.base.log import log
from fompi.members.stores import SECONDS, Listing, MembersStore, Value, coded, decoded
from fompi.mpi import environment

GREETING = b"fompi-m1"
CHALLENGE_NBYTES, HEAD = 32, struct.Struct("!I32s")  # the bytes of a text, and its code
MOST_KEYS, STORE_NBYTES, QUESTION_NBYTES, ANSWER_NBYTES = 1 << 14, 1 << 25, 1 << 22, 1 << 26
"""What a store takes: so many values, so many bytes of them; and the longest question and answer."""

STRANGER_SECONDS, MOST_STRANGERS, MOST_CONNECTIONS = 5.0, 64, 1024
"""What who has not shown the token may take: so much time, so many connections. And how many connections are open."""

WATCH_SECONDS = 10.0
"""A watch is asked for again after this time, so that a server does not wait for clients that are gone."""


class LocalStore(MembersStore):
    """A store in the memory of this process."""

    def __init__(self) -> None:
        super().__init__("in memory")
        self._kept: dict[str, tuple[bytes, float]] = {}  # the value, and when it goes
        self._changed = threading.Condition()

    def _forget(self) -> None:
        """Take away what has run out."""
        now = monotonic()
        self._kept = {key: kept for key, kept in self._kept.items() if kept[1] > now}

    def _read(self, key: str) -> Value:
        with self._changed:
            self._forget()
            return self._kept.get(key, (None, inf))[0]

    def _write(self, key: str, new: Value, ttl: float | None, only_if: tuple[Value] | None) -> Value:
        with self._changed:
            found = self._read(key)
            if only_if is not None and found not in only_if:
                return found
            if found is not None and new is None:
                del self._kept[key]
            if new is not None:
                nbytes = len(new) + sum(len(value) for other, (value, _) in self._kept.items() if other != key)
                if nbytes > STORE_NBYTES or (found is None and len(self._kept) >= MOST_KEYS):
                    raise ArgumentError(f"the store is full: {len(self._kept)} values, {nbytes} bytes with {key!r}")
                self._kept[key] = new, inf if ttl is None else monotonic() + ttl
            if new != found:
                self._changed.notify_all()
            return new

    def _watch(self, prefix: str, known: Listing | None, seconds: float) -> Listing:
        return self.changed(prefix, lambda found: found == known, seconds)

    def changed(self, prefix: str, is_known: Callable[[Listing], bool], seconds: float) -> Listing:
        """The listing, once it is not known, or after `seconds`."""
        end = monotonic() + seconds
        with self._changed:
            while True:
                self._forget()
                found = {key: value for key, (value, _) in self._kept.items() if key.startswith(prefix)}
                if not is_known(found) or monotonic() >= end:
                    return found
                next_end = min((gone for _, gone in self._kept.values()), default=inf)
                self._changed.wait(max(0.0, min(end, next_end) - monotonic()))


def _digest(listing: Listing | None) -> str:
    return "" if listing is None else sha256(repr(sorted(listing.items())).encode()).hexdigest()


def _receive(stream: socket.socket, nbytes: int, end: float) -> bytes:
    """So many bytes, until `end`."""
    data = bytearray()
    while len(data) < nbytes:
        if (left := end - monotonic()) <= 0:
            raise TimeoutError("timed out")
        stream.settimeout(left)
        if not (piece := stream.recv(nbytes - len(data))):
            raise ConnectionError("the other end has closed the connection")
        data += piece
    return bytes(data)


def _frame(token: str, context: bytes, values: Any) -> bytes:
    text = json.dumps(values).encode()
    return HEAD.pack(len(text), hmac.digest(token.encode(), context + text, "sha256")) + text


def _heard(stream: socket.socket, token: str, context: bytes, most_nbytes: int, end: float) -> Any:
    """What the other end says. Raises LaunchError if it does not have the token."""
    nbytes, code = HEAD.unpack(_receive(stream, HEAD.size, end))
    if nbytes > most_nbytes:
        raise LaunchError(f"the other end is no store of fompi, nor a member: it sends {nbytes} bytes")
    text = _receive(stream, nbytes, end)
    if not hmac.compare_digest(code, hmac.digest(token.encode(), context + text, "sha256")):
        raise LaunchError("the other end has another FOMPI_MEMBERS_TOKEN")
    return json.loads(text)


class Server(ThreadingTCPServer):
    """A store for other processes, at `address`, until `close()`. Threads serve it.

    Whoever asks must have the token. Others are refused, and named in the log. Raises LaunchError without a token, and
    OSError if the address cannot be used.
    """

    allow_reuse_address, daemon_threads, block_on_close, request_queue_size = True, True, False, 128

    def __init__(self, host: str = "127.0.0.1", port: int = 0):
        self._token, self._store, self._lock = _token(), LocalStore(), threading.Lock()
        self._open = self._strangers = 0
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), BaseRequestHandler)
        self.address = _address(host, self.server_address[1])
        threading.Thread(target=self.serve_forever, args=(0.1,), name="fompi store", daemon=True).start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer one question, in a thread of its own."""
        with self._lock:
            if self._strangers >= MOST_STRANGERS or self._open >= MOST_CONNECTIONS:
                return
            self._strangers, self._open = self._strangers + 1, self._open + 1
        try:
            question, context = self._asked(request, client_address)
            try:
                answer = {"value": self._answer(**question)}
            except (FompiError, ValueError, TypeError, AttributeError, LookupError) as error:
                answer = {"error": in_words(error)}
            request.settimeout(STRANGER_SECONDS)
            request.sendall(_frame(self._token, b"store" + context, answer))
        except (LaunchError, OSError):  # a stranger, or a member that has gone
            pass
        finally:
            with self._lock:
                self._open -= 1

    def _asked(self, stream: socket.socket, who: Any) -> tuple[Any, bytes]:
        """The question of who has the token, and what the code of the answer is made with."""
        challenge, end = secrets.token_bytes(CHALLENGE_NBYTES), monotonic() + STRANGER_SECONDS
        try:
            stream.sendall(GREETING + challenge)
            context = challenge + _receive(stream, CHALLENGE_NBYTES, end)
            try:
                return _heard(stream, self._token, b"member" + context, QUESTION_NBYTES, end), context
            except LaunchError as error:  # the code of this answer says it to a member with another token
                stream.sendall(_frame(self._token, b"store" + context, {"error": str(error)}))
                raise
        except (LaunchError, TimeoutError) as error:
            log.warning("the store %s refuses %s:%s: %s", self.address, *who[:2], error)
            raise
        finally:
            with self._lock:
                self._strangers -= 1

    def _answer(self, what: str, key: str, known: str = "", seconds: float = 0.0, **write: Any) -> Any:
        if what == "read":
            return coded(self._store.get(key))
        if what == "watch":
            found = self._store.changed(key, lambda found: _digest(found) == known, min(seconds, WATCH_SECONDS))
            return {name: coded(value) for name, value in found.items()}
        new, ttl, only_if = decoded(write["new"]), write["ttl"], write["only_if"]
        if only_if is not None:
            return coded(self._store.compare_set(key, decoded(only_if[0]), new, ttl))
        self._store.put(key, new or b"", ttl)
        return coded(new)

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def __exit__(self, *error: object) -> None:
        self.close()


def _token() -> str:
    """FOMPI_MEMBERS_TOKEN. Raises LaunchError if it is not set, or too short."""
    environment.check("FOMPI_MEMBERS_TOKEN")
    if not (token := environment.value("FOMPI_MEMBERS_TOKEN")):
        make = "python -c 'import secrets; print(secrets.token_urlsafe())'"
        raise LaunchError(f"FOMPI_MEMBERS_TOKEN is not set: set it for all members to what `{make}` prints")
    return token


def _address(host: str, port: int) -> str:
    return f"fompi://{f'[{host}]' if ':' in host else host}:{port}"


class ServedStore(MembersStore):
    """The store of a `Server`. With `serve` this process becomes the server if there is none at this address."""

    def __init__(self, host: str, port: int, seconds: float = SECONDS, serve: bool = False):
        super().__init__(_address(host, port), seconds)
        self._place, self._token, self._serves = (host, port), _token(), serve

    def _ask(self, more: float = 0.0, **question: Any) -> Any:
        try:
            stream = socket.create_connection(self._place, self.seconds / 2)
        except ConnectionRefusedError:
            if self._serves:
                self.server = Server(*self._place)  # OSError: another one was faster
            raise
        end = monotonic() + self.seconds + more
        with stream:
            if _receive(stream, len(GREETING), end) != GREETING:
                raise LaunchError(f"what listens at {self.address} is no store of fompi")
            own = secrets.token_bytes(CHALLENGE_NBYTES)
            context = _receive(stream, CHALLENGE_NBYTES, end) + own
            stream.sendall(own + _frame(self._token, b"member" + context, question))
            try:
                answer = _heard(stream, self._token, b"store" + context, ANSWER_NBYTES, end)
            except LaunchError as error:
                raise LaunchError(f"the store {self.address}: {error}") from None
        if "error" in answer:
            raise ArgumentError(f"the store {self.address}: {answer['error']}")
        return answer["value"]

    def _read(self, key: str) -> Value:
        return decoded(self._ask(what="read", key=key))

    def _write(self, key: str, new: Value, ttl: float | None, only_if: tuple[Value] | None) -> Value:
        before = None if only_if is None else [coded(only_if[0])]
        return decoded(self._ask(what="write", key=key, new=coded(new), ttl=ttl, only_if=before))

    def _watch(self, prefix: str, known: Listing | None, seconds: float) -> Listing:
        seconds = min(seconds, WATCH_SECONDS)
        answer = self._ask(seconds, what="watch", key=prefix, known=_digest(known), seconds=seconds)
        return {key: decoded(value) or b"" for key, value in answer.items()}
