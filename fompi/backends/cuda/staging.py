"""What all devices do alike: copies of host memory, through page-locked memory, and memory of other processes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import numpy as np

from fompi.backends.cuda.device import WAIT_SECONDS, AnyArray, Array, Enqueue
from fompi.backends.cuda.failures import Failing
from fompi.base.errors import DeviceError
from fompi.tensors.device_array import DeviceArray

POLL_SECONDS = 1e-5

MOST_OPENED = 64
"""So much memory of other processes stays open. What was unused for longest is closed first."""


class HostMark:
    """An event of a device that the host can wait for."""

    __slots__ = ()
    device: Any
    done: Callable[[], bool]

    def wait(self) -> None:
        """Wait until the stream has reached it. Raises DeviceError if the device fails, or after WAIT_SECONDS."""
        end = monotonic() + WAIT_SECONDS
        while not self.done():
            if monotonic() > end:
                raise DeviceError(f"{self.device!r} has not finished a copy or a kernel after {WAIT_SECONDS:g} s")
            sleep(POLL_SECONDS)


class Staging(Failing):
    """The part of a `Device` that its own streams, memory and copies give. `_own` is a stream for copies that wait."""

    _own: Any
    empty: Callable[..., DeviceArray]
    pinned: Callable[..., Array]
    copy: Callable[[AnyArray, AnyArray], Enqueue]
    touch: Callable[[str, AnyArray, bool], None]
    entry: Callable[[], Any]
    event: Callable[[], Any]

    def __init__(self) -> None:
        super().__init__()
        self._opened: OrderedDict[bytes, Any] = OrderedDict()

    def use(self) -> None:
        """Make this the current device of the calling thread, where devices have one."""

    def array(self, x: Any) -> DeviceArray:
        source = np.asarray(x)
        made = self.empty(source.shape, source.dtype)
        self.put(made, source)
        return made

    def put(self, array: DeviceArray, x: Any) -> None:
        staging = self.pinned(array.shape, array.dtype)
        self.touch("put()", staging, True)
        staging[...] = x
        self._copied(array, staging)

    def get(self, array: DeviceArray) -> Array:
        staging = self.pinned(array.shape, array.dtype)
        self._copied(staging, array)
        self.touch("get()", staging, False)
        return staging.copy()

    def _copied(self, to: AnyArray, source: AnyArray) -> None:
        """Copy what the caller's current stream has written, and wait."""
        entry = self.entry()
        if entry is not None:
            self._own.wait(entry)
        self.run_once(self.copy(to, source))

    def run_once(self, enqueue: Enqueue) -> None:
        """Run a kernel now, and wait for it. After an error, too: what it has enqueued uses its arrays."""
        self.use()
        try:
            enqueue(self._own)
        finally:
            self._own.record(self.event()).wait()

    def opened_once(self, key: bytes, make: Callable[[], Any]) -> Any:
        """Memory of another process, which `make` opens. It stays open for the next message, MOST_OPENED at most."""
        memory = self._opened.get(key)
        if memory is None:
            memory = self._opened[key] = make()
            if len(self._opened) > MOST_OPENED:
                self._opened.popitem(last=False)
        self._opened.move_to_end(key)
        return memory
