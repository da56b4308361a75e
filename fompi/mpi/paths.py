"""How a message moves between two ranks whose tensors are on devices.

| path     | how                                                                                                   |
|----------|-------------------------------------------------------------------------------------------------------|
| `staged` | through page-locked memory of both hosts: the plan says when (`fompi.plans.staged`)                      |
| `direct` | the MPI library gets the addresses of the device (GPU-aware MPI)                                         |
| `ipc`    | both ranks are on one host: the receiver copies from the memory of the sender                            |

    sender      offer: where it lies ──▶            ◀── acknowledgement: it may be written again
    receiver            pull: a copy on a stream of its own, its event, then the acknowledgement

All ranks choose alike: the choice depends only on hosts, and on variables that are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np

from fompi.base.errors import DeviceError
from fompi.mpi.link import Link
from fompi.tensors.device_array import DeviceArray

STAGED, DIRECT, IPC = "staged", "direct", "ipc"

HANDLE_NBYTES = 256
"""The length of an offer: the name of the sender's memory, and where the data lies in it."""

NOTHING = b""
"""The offer of a rank whose call has failed: it has no data."""


def choose(wanted: str, same_host: bool, gpu_aware: bool) -> str:
    """The path between two ranks. `wanted` is FOMPI_PATH; where that path is not possible, the next best is taken."""
    if wanted == STAGED:
        return STAGED
    if same_host and wanted in ("auto", IPC):
        return IPC
    return DIRECT if gpu_aware or wanted == DIRECT else STAGED


class _PathMessage:
    """A Token that is a queue of its own: messages end in any order."""

    due = float("inf")

    @property
    def queue(self) -> Any:
        return self  # not an attribute: that would be a circle, and memory would wait for the garbage collector


class Offer(_PathMessage):
    """The Token of a send by ipc: `handle` names the memory. NOTHING: this rank has failed.

    It is done when the receiver has copied the data.
    """

    def __init__(self, link: Link, handle: bytes, peer: int, tag: int):
        self.begun = perf_counter()
        self._handle, self._answer = handle.ljust(HANDLE_NBYTES), np.empty(1, np.uint8)
        self._requests = [link.blocking.Irecv(self._answer, peer, tag), link.isend(self._handle, peer, tag)]

    def done(self) -> bool:
        self._requests = [request for request in self._requests if not request.Test()]
        if not self._requests:
            self.due = perf_counter()
        return not self._requests


class Pull(_PathMessage):
    """The Token of a receive by ipc to `data`. None: this rank has failed, and copies nothing.

    It is done when the data is there and the sender has been told.
    """

    def __init__(self, path: Paths, data: DeviceArray | None, peer: int, tag: int, what: str):
        self.begun = perf_counter()
        self._path, self._data, self._peer, self._tag, self._what = path, data, peer, tag, what
        self._handle = bytearray(HANDLE_NBYTES)
        self._offered = path.link.irecv(self._handle, peer, tag)
        self._source: DeviceArray | None = None
        self._event: Any = None
        self._answered: Any = None
        self._error: Exception | None = None

    def done(self) -> bool:
        if self._answered is None:
            try:
                if not self._copied():
                    return False
                if self._source is not None:  # the answer allows the sender to write to it
                    self._path.device.touch(f"the acknowledgement of {self._what}", self._source, True)
            except Exception as error:  # the sender must not wait for it
                self._error = error
            self._answered = self._path.link.blocking.Isend(np.zeros(1, np.uint8), self._peer, self._tag)
        if not self._answered.Test():
            return False
        self.due = perf_counter()
        if self._error is not None:
            raise self._error
        return True

    def _copied(self) -> bool:
        if self._event is None:
            if not self._offered.Test():
                return False
            handle = bytes(self._handle).rstrip()
            if self._data is None or handle == NOTHING:
                return True
            device = self._path.device
            self._source = device.open(handle, self._data.nbytes)
            device.copy(self._data, self._source)(self._path.stream)
            self._event = self._path.stream.record(device.event())
        return bool(self._event.done())


class Paths:
    """The paths of one communicator for one device. `path_of(a, b)` chooses; all pairs agree."""

    def __init__(self, device: Any, link: Link, path_of: Callable[[int, int], str]):
        self.device, self.link, self.path_of = device, link, path_of
        self.stream = device.stream("peers", -1)

    def handle(self, data: DeviceArray) -> bytes:
        """What the receiver must know to copy `data`, once its mirror is there. Raises the errors of the device."""
        handle: bytes = self.device.export(data, mirrored=True)
        if len(handle) > HANDLE_NBYTES:
            raise DeviceError(f"the handle of device memory has {len(handle)} bytes, at most {HANDLE_NBYTES} fit")
        return handle

    def is_staged(self, rank: int, peer: int) -> bool:
        return self.path_of(rank, peer) == STAGED

    def moves_by_ipc(self, peer: int) -> bool:
        return self.path_of(self.link.rank, peer) == IPC

    @cached_property
    def title(self) -> str:
        """The device and the paths in use, as a text that is equal on all ranks."""
        size = self.link.size
        used = {self.path_of(a, b) for a in range(size) for b in range(size) if a != b}
        return f"{self.device.name} with {' and '.join(sorted(used)) or 'no'} messages"
