"""etcd as a store, by its JSON gateway and the standard library. etcd 3.4 and later have the gateway on their port."""

from __future__ import annotations

import json
import ssl
from collections.abc import Sequence
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from math import ceil
from typing import Any

from fompi.base.errors import LaunchError
from fompi.members.stores import SECONDS, Listing, MembersStore, Value, coded, decoded

AWAY, NO_LEASE, NO_TOKEN = (4, 14), 5, 16
"""Codes of errors: it cannot answer now; a lease has run out; whoever asks must say anew who it is."""


class EtcdStore(MembersStore):
    """A store in etcd, which is asked at one of `hosts`. Its times to live are whole seconds, from 2 on.

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

    def _connection(self, seconds: float) -> HTTPConnection:
        host, port = self._hosts[0]
        if self._context is None:
            return HTTPConnection(host, port, timeout=seconds)
        return HTTPSConnection(host, port, timeout=seconds, context=self._context)

    def _ask(self, path: str, body: dict[str, Any], wait: float = 0.0) -> Any:
        """The answer. With `wait`, to a watch: None, once there is an event, or after this time."""
        if self._user is not None and not self._token and path != "auth/authenticate":
            self._token = self._ask("auth/authenticate", {"name": self._user[0], "password": self._user[1]})["token"]
        headers = {"Authorization": self._token} if self._token else {}
        with closing(self._connection(wait or self.seconds / 2)) as http:
            try:
                http.request("POST", f"/v3/{path}", json.dumps(body), headers)
                answer = http.getresponse()
                if wait and answer.status == 200:
                    with suppress(TimeoutError):
                        while b'"events"' not in (line := answer.readline()):
                            if not line or b'"canceled"' in line:
                                raise ConnectionError("the watch has ended")
                    return None
                text = answer.read()
            except (OSError, HTTPException) as error:
                self._hosts = [*self._hosts[1:], self._hosts[0]]  # the next time another one
                raise error if isinstance(error, OSError) else ConnectionError(repr(error)) from error
        return self._checked(path, answer.status, text)

    def _checked(self, path: str, status: int, text: bytes) -> Any:
        """The answer. Raises ConnectionError for what may be better the next time, else LaunchError."""
        try:
            values = json.loads(text)
        except ValueError:
            what = f"is no etcd 3.4 or later: it answers /v3/{path} with {status} {text[:40]!r}"
            raise LaunchError(f"the store {self.address} {what}") from None
        if status == 200:
            return values
        words, code = str(values.get("message") or values.get("error")), values.get("code")
        if code == NO_TOKEN:
            self._token = ""
        if code == NO_LEASE:
            self._leases.clear()
        if code in (*AWAY, NO_LEASE) or (code == NO_TOKEN and self._user is not None):
            raise ConnectionError(words)
        remedy = ": write etcd://USER:PASSWORD@HOST:PORT" if "user name is empty" in words else ""
        raise LaunchError(f"the store {self.address} refuses {path}: {words}{remedy}")

    def _read(self, key: str) -> Value:
        return _value(self._ask("kv/range", {"key": coded(key.encode())}))

    def _write(self, key: str, new: Value, ttl: float | None, only_if: tuple[Value] | None) -> Value:
        name = coded(key.encode())
        write: dict[str, Any] = {"request_delete_range": {"key": name}}
        if new is not None:
            lease = "0" if ttl is None else self._lease(key, ceil(ttl))
            put = {"request_put": {"key": name, "value": coded(new), "lease": lease}}
            same = [_has_value(name, new), {"key": name, "target": "LEASE", "lease": lease}]
            write = {"request_txn": {"compare": same, "success": [], "failure": [put]}}
        compare = [] if only_if is None else [_has_value(name, only_if[0])]
        otherwise = [{"request_range": {"key": name}}]
        answer = self._ask("kv/txn", {"compare": compare, "success": [write], "failure": otherwise})
        return new if answer.get("succeeded") else _value(answer["responses"][0]["response_range"])

    def _lease(self, key: str, seconds: int) -> str:
        """The lease of a value that this process puts: that of before, if it still lives."""
        lease, known = self._leases.get(key, ("", 0))
        if known == seconds:
            kept = self._ask("lease/keepalive", {"ID": lease}).get("result", {})
            if int(kept.get("TTL", 0)) > 0:
                return lease
        self._leases[key] = self._ask("lease/grant", {"TTL": str(seconds)})["ID"], seconds
        return self._leases[key][0]

    def _watch(self, prefix: str, known: Listing | None, seconds: float) -> Listing:
        start = prefix.encode().rstrip(b"\xff")
        end = start[:-1] + bytes([start[-1] + 1]) if start else b"\0"  # the first key behind the prefix
        within = {"key": coded(start or b"\0"), "range_end": coded(end)}
        answer = self._ask("kv/range", within)
        pairs = [(decoded(each["key"]), decoded(each.get("value", ""))) for each in answer.get("kvs", ())]
        found = {(key or b"").decode(errors="replace"): value or b"" for key, value in pairs}
        if found == known and seconds > 0:
            revision = int(answer["header"]["revision"]) + 1
            self._ask("watch", {"create_request": {**within, "start_revision": str(revision)}}, wait=seconds)
        return found


def _value(ranged: Any) -> Value:
    """The value in the answer to a range of one key."""
    return decoded(ranged["kvs"][0].get("value", "")) if ranged.get("kvs") else None


def _has_value(name: str | None, value: Value) -> dict[str, Any]:
    """A condition of etcd: a key has this value, or none."""
    if value is None:
        return {"key": name, "target": "VERSION", "version": "0"}
    return {"key": name, "target": "VALUE", "value": coded(value)}
