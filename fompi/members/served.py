"""A store in one process, and the line by which others speak to it.

    with Server("127.0.0.1", 7777): ...                  # `fompi members serve --port 7777`
    ServedStore("127.0.0.1", 7777).put("h1", "here")     # in another process

Both ends have a token (FOMPI_MEMBERS_TOKEN), which is never sent. They begin with 32 random bytes each. The token and
these bytes give the key of the connection, and each message has a code by that key and its number: so neither end
accepts what another one says, or says again. Messages are JSON. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import threading
from contextlib import suppress
from math import inf
from time import monotonic, sleep
from typing import Any

from fompi.base.errors import ArgumentError, FompiError, LaunchError, in_words
from fompi.base.log import log
from fompi.members.stores import (
    PAUSE_SECONDS,
    SECONDS,
    STORE_NBYTES,
    Connecting,
    Listing,
    LocalStore,
    bytes_of_text,
    text_of_bytes,
)
from fompi.mpi import environment

GREETING, CHALLENGE_NBYTES = b"fompi-m1", 32
HEAD = struct.Struct("!I32s")  # bytes of the message, and its code

STRANGER_SECONDS, STRANGER_NBYTES, MOST_STRANGERS, MOST_CONNECTIONS = 5.0, 256, 64, 1024
"""What who has not shown the token may take: so much time, such messages, so many connections. And those of all."""

MOST_NBYTES = 4 * STORE_NBYTES
WATCH_SECONDS = 10.0
"""A watch is asked for again after this time: so a server does not wait for clients that are gone."""

TOKEN_REMEDY = (
    "set it to the same secret for all members, for example that of `python -c 'import secrets; "
    "print(secrets.token_urlsafe(32))'`"
)


def token_of_environment() -> str:
    """FOMPI_MEMBERS_TOKEN. Raises LaunchError if it is not set, or too short."""
    environment.check("FOMPI_MEMBERS_TOKEN")
    token = environment.value("FOMPI_MEMBERS_TOKEN")
    if not token:
        raise LaunchError(f"FOMPI_MEMBERS_TOKEN is not set: {TOKEN_REMEDY}")
    return token


def address_of(host: str, port: int) -> str:
    return f"fompi://{f'[{host}]' if ':' in host else host}:{port}"


class StoreLine:
    """A connection between a store and a member."""

    def __init__(self, sock: socket.socket, token: str, is_server: bool, end: float):
        """Exchange greetings, until `end`. Raises LaunchError if the other end is no such store or member."""
        self.sock, self._end = sock, end
        own = secrets.token_bytes(CHALLENGE_NBYTES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.sendall(GREETING + own)
        if self._receive(len(GREETING)) != GREETING:
            raise LaunchError("the other end does not speak as a store of fompi and its members do")
        other = self._receive(CHALLENGE_NBYTES)
        both = own + other if is_server else other + own
        self._key = hmac.digest(token.encode(), GREETING + both, "sha256")
        self._names = (b"store", b"member") if is_server else (b"member", b"store")
        self._counts = [0, 0]

    def say(self, values: Any) -> None:
        body = json.dumps(values).encode()
        self.sock.sendall(HEAD.pack(len(body), self._code(0, body)) + body)

    def hear(self, end: float, most_nbytes: int = MOST_NBYTES) -> Any:
        """The next message, until `end`. Raises LaunchError if it is not from who has the token."""
        self._end = end
        nbytes, code = HEAD.unpack(self._receive(HEAD.size))
        if nbytes > most_nbytes:
            raise LaunchError(f"a message of {nbytes} bytes is too large")
        body = self._receive(nbytes)
        if not hmac.compare_digest(code, self._code(1, body)):
            raise LaunchError("the other end has another FOMPI_MEMBERS_TOKEN")
        return json.loads(body)

    def _code(self, way: int, body: bytes) -> bytes:
        self._counts[way] += 1
        return hmac.digest(self._key, self._names[way] + struct.pack("!Q", self._counts[way]) + body, "sha256")

    def _receive(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            left = self._end - monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            self.sock.settimeout(None if left == inf else left)
            piece = self.sock.recv(min(nbytes - len(data), 1 << 20))
            if not piece:
                raise ConnectionError("the other end has closed the connection")
            data += piece
        return bytes(data)

    def close(self) -> None:
        self.sock.close()


class Server:
    """A store for other processes, at `address`, until it is closed. Threads serve it.

    Whoever connects must have the token (None: FOMPI_MEMBERS_TOKEN). Others are refused, and named in the log. Raises
    LaunchError without a token, and OSError if the address cannot be used.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, token: str | None = None):
        self._token = token or token_of_environment()
        self._store = LocalStore()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self.host, self.port = host, self._listener.getsockname()[1]
        self.address = address_of(host, self.port)
        self._lock = threading.Lock()
        self._streams: set[socket.socket] = set()
        self._strangers = 0
        self._closed = False
        threading.Thread(target=self._accept, name="fompi store", daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                stream, (host, port, *_) = self._listener.accept()
            except OSError:  # it is closed, or there are too many files
                sleep(PAUSE_SECONDS)
                continue
            with self._lock:
                is_full = self._strangers >= MOST_STRANGERS or len(self._streams) >= MOST_CONNECTIONS
                if is_full or self._closed:
                    stream.close()
                    continue
                self._streams.add(stream)
                self._strangers += 1
            who = f"{host}:{port}"
            threading.Thread(target=self._serve, args=(stream, who), name="fompi store", daemon=True).start()

    def _serve(self, stream: socket.socket, who: str) -> None:
        try:
            line = self._introduced(stream, who)
            while line is not None:
                request = line.hear(inf)
                try:
                    answer = self._answer(request)
                except (FompiError, ValueError, TypeError, KeyError) as error:
                    answer = {"error": in_words(error)}
                line.say(answer)
        except (OSError, ValueError):  # it has gone
            pass
        except LaunchError as error:
            log.warning("the store %s refuses %s: %s", self.address, who, error)
        finally:
            with self._lock:
                self._streams.discard(stream)
            stream.close()

    def _introduced(self, stream: socket.socket, who: str) -> StoreLine | None:
        """The line to a member that has shown that it has the token. None: it has not."""
        line, end = None, monotonic() + STRANGER_SECONDS
        try:
            line = StoreLine(stream, self._token, True, end)
            line.hear(end, STRANGER_NBYTES)
            line.say({"value": None})
            stream.settimeout(None)
            return line
        except (LaunchError, OSError, ValueError) as error:
            if not self._closed:
                log.warning("the store %s refuses %s: %s", self.address, who, error)
            with suppress(OSError):
                if line is not None:
                    line.say({"error": "refused"})  # its code says that the tokens differ
        finally:
            with self._lock:
                self._strangers -= 1
        return None

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        what, key = request["what"], request["key"]
        if what == "read":
            return {"value": text_of_bytes(self._store.get(key))}
        if what == "write":
            new, ttl, only_if = bytes_of_text(request["new"]), request["ttl"], request["only_if"]
            if only_if is not None:
                return {"value": text_of_bytes(self._store.compare_set(key, bytes_of_text(only_if[0]), new, ttl))}
            if new is not None:
                self._store.put(key, new, ttl)
            return {"value": text_of_bytes(new)}
        if what == "watch":
            known, seconds = _listing(request["known"]), min(float(request["seconds"]), WATCH_SECONDS)
            found = self._store.watch(key, known, seconds)
            return {"value": {each: text_of_bytes(value) for each, value in found.items()}}
        raise ArgumentError(f"a store cannot {str(what)[:40]!r}")

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            streams = [*self._streams]
        for stream in streams:
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _listing(values: Any) -> Listing | None:
    return None if values is None else {key: bytes_of_text(text) or b"" for key, text in values.items()}


class ServedStore(Connecting):
    """The store of a `Server`. With `serve` this process becomes the server if there is none at this address."""

    def __init__(self, host: str, port: int, seconds: float = SECONDS, serve: bool = False):
        super().__init__(address_of(host, port), seconds)
        self._host, self._port, self._token = host, port, token_of_environment()
        self._serves = serve
        self._server: Server | None = None

    def _connect(self) -> StoreLine:
        try:
            stream = socket.create_connection((self._host, self._port), self.seconds / 2)
        except ConnectionRefusedError:
            if self._serves:
                self._server = Server(self._host, self._port, self._token)  # OSError: another one was faster
            raise
        try:
            end = monotonic() + self.seconds / 2
            line = StoreLine(stream, self._token, False, end)
            line.say({"what": "hello"})
            line.hear(end, STRANGER_NBYTES)
        except LaunchError as error:
            stream.close()
            raise LaunchError(f"the store {self.address}: {error}") from None
        except BaseException:
            stream.close()
            raise
        return line

    def _ask(self, more: float = 0.0, **request: Any) -> Any:
        with self._connection() as line:
            line.say(request)
            answer = line.hear(monotonic() + self.seconds + more)
        if "error" in answer:
            raise ArgumentError(f"the store {self.address}: {answer['error']}")
        return answer["value"]

    def _read(self, key: str) -> bytes | None:
        return bytes_of_text(self._ask(what="read", key=key))

    def _write(
        self, key: str, new: bytes | None, ttl: float | None, only_if: tuple[bytes | None] | None
    ) -> bytes | None:
        before = None if only_if is None else [text_of_bytes(only_if[0])]
        return bytes_of_text(self._ask(what="write", key=key, new=text_of_bytes(new), ttl=ttl, only_if=before))

    def _watch(self, prefix: str, known: Listing | None, seconds: float) -> Listing:
        sent = None if known is None else {key: text_of_bytes(value) for key, value in known.items()}
        seconds = min(seconds, WATCH_SECONDS)
        return _listing(self._ask(seconds, what="watch", key=prefix, known=sent, seconds=seconds)) or {}

    def close(self) -> None:
        super().close()
        if self._server is not None:
            self._server.close()
