"""How the ranks of `torch.distributed` find each other: by MPI. There is no MASTER_ADDR, and no connection at first.

Under torchrun it is the other way round: MPI starts by the store of torchrun (`of_torchrun`, `fompi.mpi.pmi`). So it is
in processes that the program has started, which bring a store (`own_connection`).

torch asks a Store for little: mostly nothing. Rank 0 listens. The other ranks get its address by a broadcast, and
connect when something is asked of the store.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import numpy as np
import torch.distributed as dist

from fompi.base.errors import LaunchError
from fompi.engine.communicator import Communicator
from fompi.mpi import environment, launcher
from fompi.ops.operations import broadcast

ADDRESS_NBYTES = 256

_KEPT: list[Any] = []
"""The store in use. The C++ half of a store does not keep its Python half alive."""

_SERVED: list[Any] = []
"""Stores by which MPI has started. One of them may be the server, which all ranks need until they end."""

_ASKED = (
    *("set", "get", "add", "append", "compare_set", "check", "delete_key", "num_keys", "wait", "multi_get"),
    *("multi_set", "queue_push", "queue_pop", "queue_len", "list_keys"),
)
_OLD_NAMES = {"getNumKeys": "num_keys", "deleteKey": "delete_key"}


class Store(dist.Store):
    """A TCPStore on rank 0, to which this rank connects at the first question. Creating it is collective."""

    def __init__(self, comm: Communicator, timeout: timedelta):
        super().__init__()
        self._timeout, self._connection = timeout, None
        address = np.zeros(ADDRESS_NBYTES, np.uint8)
        if comm.rank == 0:
            self._connection = dist.TCPStore("0.0.0.0", 0, None, True, timeout, wait_for_workers=False)
            words = f"{socket.gethostname()} {self._connection.port}".encode()
            address[: len(words)] = np.frombuffer(words, np.uint8)
        host, port = bytes(broadcast(address, comm=comm)).rstrip(b"\0").decode().split()
        self._address = "localhost" if host == socket.gethostname() else host, int(port)

    def _connected(self) -> Any:
        if self._connection is None:
            self._connection = dist.TCPStore(*self._address, None, False, self._timeout, wait_for_workers=False)
        return self._connection

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self._connection is not None:
            self._connection.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        return True


def _forward(method: str) -> Any:
    def ask(self: Store, *args: Any, **options: Any) -> Any:
        return getattr(self._connected(), method)(*args, **options)

    return ask


for _name in _ASKED:
    setattr(Store, _name, _forward(_name))
for _name, _new in _OLD_NAMES.items():
    setattr(Store, _name, _forward(_new))


def seconds_to_start(timeout: timedelta) -> float:
    """How long ranks are awaited by a call with this time-out, to which torch adds its own default, half an hour.

    If FOMPI_TIMEOUT is set, or the program gives no time-out, the shorter time counts.
    """
    given, own = timeout.total_seconds(), launcher.timeout()
    is_given = timeout != dist.default_pg_timeout and not environment.is_set("FOMPI_TIMEOUT")
    return given if is_given else min(given, own)


def meet(url: str, timeout: timedelta = timedelta(minutes=30), **options: Any) -> Iterator[tuple[Any, int, int]]:
    """The handler of `init_method="fompi://"`: yields the store, the rank and the number of ranks, from MPI.

    Raises LaunchError if the program gave another rank or number of ranks.
    """
    comm = Communicator(None, "torch store", seconds=seconds_to_start(timeout))
    given, refusal = parse_qs(urlparse(url).query), None
    for word, actual in (("rank", comm.rank), ("world_size", comm.size)):
        for value in given.get(word, ()):
            if int(value) not in (-1, actual):
                refusal = LaunchError(f"init_process_group: {word}={value}, but MPI says {actual}. Leave {word} out")
    comm.agree("init_process_group", refusal)
    store = Store(comm, timeout)
    comm.close()
    _KEPT[:] = [store]
    yield store, comm.rank, comm.size


def own_connection(store: Any) -> Any:
    """A connection of its own to what `store` keeps: MPI asks it while the program waits for `store`.

    `store` lives as long as this process.
    """
    _SERVED.append(store)
    with suppress(AttributeError, RuntimeError):  # before torch 2.8; a store that is written in Python
        return store.clone()
    return store


def of_torchrun(seconds: float) -> Any:
    """The store of the processes that torchrun has started. Raises LaunchError if there is none within `seconds`.

    The agent of torchrun serves it, or rank 0, as in torch's own `env://`.
    """
    host, port, limit = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""), timedelta(seconds=seconds)
    is_server = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(host, int(port), None, is_server, limit, wait_for_workers=False, multi_tenant=True)
    except (ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise LaunchError(f"the store of torchrun at {host}:{port} cannot be reached: {reason}") from error
    return dist.PrefixStore("fompi", store)


def at_tcp(host: str, port: int, seconds: float) -> Any:
    """The TCPStore that listens there. Raises OSError or RuntimeError if there is none."""
    socket.create_connection((host, port), seconds / 2).close()  # the constructor waits and writes for longer
    return dist.TCPStore(host, port, None, False, timedelta(seconds=seconds / 2), wait_for_workers=False)
