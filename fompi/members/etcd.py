"""etcd as a store, by its JSON gateway and the standard library. etcd 3.4 and later have the gateway on their port."""

from __future__ import annotations

import json
import ssl
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from math import ceil
from time import monotonic
from typing import Any

from fompi.base.errors import LaunchError
from fompi.members.stores import SECONDS, Connecting, Listing, bytes_of_text, text_of_bytes

AWAY, NO_LEASE, NO_TOKEN = (4, 8, 14), 5, 16
"""Codes of errors: it cannot answer now; a lease has run out; whoever asks must say anew who it is."""


class EtcdStore(Connecting):
    """A store in etcd. Its times to live are whole seconds, from 2 on.

    A time to live is a lease of etcd. A value that is put again as it is keeps its lease, and is not written again: the
    history of etcd does not grow.
    """

    def __init__(
        self,
        hosts: Sequence[tuple[str, int]],
        user: tuple[str, str] | None = None,
        context: ssl.SSLContext | None = None,
        seconds: float = SECONDS,
    ):
        scheme = "etcd" if context is None else "etcds"
        super().__init__(f"{scheme}://{','.join(f'{host}:{port}' for host, port in hosts)}", seconds)
        self._hosts, self._user, self._context = list(hosts), user, context
        self._token = ""
        self._leases: dict[str, tuple[str, int]] = {}  # of each key that this process has put: its lease and time

    def _connect(self) -> HTTPConnection:
        with self._lock:
            self._hosts.append(self._hosts.pop(0))  # the next time another one
            host, port = self._hosts[-1]
        patience = self.seconds / 2
        made = (
            HTTPConnection(host, port, patience)
            if self._context is None
            else HTTPSConnection(host, port, timeout=patience, context=self._context)
        )
        made.connect()
        return made

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        with self._connection() as http:
            answer = self._send(http, path, body)
            text = self._received(answer.read)
        return self._checked(path, answer.status, text)

    def _send(self, http: HTTPConnection, path: str, body: dict[str, Any]) -> Any:
        if self._user is not None and not self._token and path != "auth/authenticate":
            name, password = self._user
            self._token = self._ask("auth/authenticate", {"name": name, "password": password})["token"]
        headers = {"Authorization": self._token} if self._token else {}

        def ask() -> Any:
            http.request("POST", f"/v3/{path}", json.dumps(body), headers)
            return http.getresponse()

        return self._received(ask)

    @staticmethod
    def _received(receive: Any) -> Any:
        try:
            return receive()
        except (HTTPException, ValueError, AttributeError) as error:  # another thread may have closed the connection
            raise ConnectionError(f"{type(error).__name__} {error}") from error

    def _checked(self, path: str, status: int, text: bytes) -> Any:
        """The answer. Raises ConnectionError for what may be better the next time, and LaunchError."""
        try:
            values = json.loads(text.splitlines()[0])
        except (ValueError, IndexError):
            raise LaunchError(
                f"the store {self.address} is no etcd 3.4 or later: it answers /v3/{path} with {status} {text[:40]!r}"
            ) from None
        if status == 200:
            return values
        words, code = values.get("message") or values.get("error"), values.get("code")
        if code == NO_TOKEN:
            self._token = ""
        if code == NO_LEASE:
            self._leases.clear()
        if code in (*AWAY, NO_LEASE) or (code == NO_TOKEN and self._user is not None):
            raise ConnectionError(f"{words}")
        remedy = ": write etcd://USER:PASSWORD@HOST:PORT" if "user name is empty" in str(words) else ""
        raise LaunchError(f"the store {self.address} refuses {path}: {words}{remedy}")

    def _read(self, key: str) -> bytes | None:
        return _value(self._ask("kv/range", {"key": _coded(key)}))

    def _write(
        self, key: str, new: bytes | None, ttl: float | None, only_if: tuple[bytes | None] | None
    ) -> bytes | None:
        name = _coded(key)
        write: dict[str, Any]
        if new is None:
            write = {"request_delete_range": {"key": name}}
        else:
            lease = "0" if ttl is None else self._lease(key, ceil(ttl))
            put = {"request_put": {"key": name, "value": text_of_bytes(new), "lease": lease}}
            same = [_has_value(name, new), {"key": name, "target": "LEASE", "lease": lease}]
            write = {"request_txn": {"compare": same, "success": [], "failure": [put]}}
        asked = {
            "compare": [] if only_if is None else [_has_value(name, only_if[0])],
            "success": [write],
            "failure": [{"request_range": {"key": name}}],
        }
        answer = self._ask("kv/txn", asked)
        return new if answer.get("succeeded") else _value(answer["responses"][0]["response_range"])

    def _lease(self, key: str, seconds: int) -> str:
        """The lease of a value that this process puts. That of before lives on, if it still lives."""
        lease, known = self._leases.get(key, ("", 0))
        if known == seconds:
            kept = self._ask("lease/keepalive", {"ID": lease}).get("result", {})
            if int(kept.get("TTL", 0)) > 0:
                return lease
        lease = self._ask("lease/grant", {"TTL": str(seconds)})["ID"]
        self._leases[key] = lease, seconds
        return lease

    def _watch(self, prefix: str, known: Listing | None, seconds: float) -> Listing:
        within = {"key": _coded(prefix or "\0"), "range_end": text_of_bytes(_after(prefix.encode()))}
        answer = self._ask("kv/range", within)
        found = {_text(each["key"]): bytes_of_text(each.get("value", "")) or b"" for each in answer.get("kvs", ())}
        if found == known and seconds > 0:
            self._await_event({**within, "start_revision": str(int(answer["header"]["revision"]) + 1)}, seconds)
        return found

    def _await_event(self, within: dict[str, Any], seconds: float) -> None:
        """Return when something has been written there, or after `seconds`."""
        end = monotonic() + seconds
        with self._connection() as http:
            answer = self._send(http, "watch", {"create_request": within})
            try:
                while (left := end - monotonic()) > 0:
                    http.sock.settimeout(left)
                    try:
                        line = self._received(answer.readline)
                    except TimeoutError:
                        return
                    result = self._checked("watch", answer.status, line or b"{}").get("result", {})
                    if result.get("events"):
                        return
                    if result.get("canceled") or not line:
                        raise ConnectionError(result.get("cancel_reason", "the watch has ended"))
            finally:
                http.close()  # it connects again when it is used


def _coded(key: str) -> str | None:
    return text_of_bytes(key.encode())


def _text(coded: str) -> str:
    return (bytes_of_text(coded) or b"").decode(errors="replace")


def _value(ranged: Any) -> bytes | None:
    """The value in the answer to a range of one key."""
    return bytes_of_text(ranged["kvs"][0].get("value", "")) if ranged.get("kvs") else None


def _has_value(name: str | None, value: bytes | None) -> dict[str, Any]:
    """A condition of etcd: a key has this value, or none."""
    if value is None:
        return {"key": name, "target": "VERSION", "version": "0"}
    return {"key": name, "target": "VALUE", "value": text_of_bytes(value)}


def _after(prefix: bytes) -> bytes:
    """The first key behind all that begin with `prefix`."""
    rest = prefix.rstrip(b"\xff")
    return rest[:-1] + bytes([rest[-1] + 1]) if rest else b"\0"
