"""What all devices do alike: copies of host memory, through page-locked memory, and memory of other processes."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from time import monotonic, sleep
from typing import Any

import numpy as np

from fompi.backends.cuda.device import WAIT_SECONDS, AnyArray, Array, Enqueue
from fompi.backends.cuda.failures import Failing
from fompi.backends.half import storage
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


MOST_CONSTANTS = 256
"""At most this many arrays of the host stay on the device: masks of tiles, and which head reads which."""


class Marked:
    """A Token: what a stream has to do up to a mark. Tokens of one `queue` are done in their order."""

    begun = due = 0.0

    def __init__(self, queue: object, event: Any):
        self.queue, self.event = queue, event

    def done(self) -> bool:
        """True once the stream has reached the mark. Raises the error of the device."""
        return bool(self.event.done())


class Fetched(Marked):
    """Numbers of a device on their way to the host, in the order of the caller's current stream."""

    def __init__(self, device: Any, target: Array, source: DeviceArray, event: Any):
        super().__init__(device.fetches, event)
        self._device, self._target, self._source = device, target, source

    def get(self) -> Array:
        """The numbers, once `done` was True."""
        self._device.touch("get()", self._target, False)
        return self._target.copy()


def kept(cache: OrderedDict[Any, Any], most: int, key: Hashable, make: Callable[[], Any]) -> Any:
    """What `cache` has for the key, made at first use. It has `most` at most: what was unused for longest goes."""
    made = cache.get(key)
    if made is None:
        made = cache[key] = make()
        if len(cache) > most:
            cache.popitem(last=False)
    cache.move_to_end(key)
    return made


class Staging(Failing):
    """The part of a `Device` that its own streams, memory and copies give. `_own` is a stream for copies that wait."""

    _own: Any
    empty: Callable[..., DeviceArray]
    pinned: Callable[..., Array]
    copy: Callable[[AnyArray, AnyArray], Enqueue]
    touch: Callable[[str, AnyArray, bool], None]
    entry: Callable[[], Any]
    event: Callable[[], Any]
    kernel: Callable[..., Enqueue]
    for_numpy: Callable[[DeviceArray], Any]
    array_of: Callable[[Any], DeviceArray]
    for_caller: Callable[..., None]
    mark: Callable[[], Any]

    def __init__(self) -> None:
        super().__init__()
        self._opened: OrderedDict[bytes, Any] = OrderedDict()
        self._constants: OrderedDict[Any, DeviceArray] = OrderedDict()
        self.fetches, self.mirrors = object(), object()  # queues of tokens: the engine polls the oldest one of each
        self._uploads: deque[tuple[Any, Array]] = deque()  # events, and the page-locked memory of copies in flight

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

    # -- for what NumPy's functions have no name, in the order of the caller's current stream
    def cast(self, x: Any, dtype: str, to: str) -> Any:
        """x, which holds `dtype`, rounded to the dtype `to`."""
        source, made = self.array_of(x), self.empty(x.shape, storage(to))
        self.for_caller(self.kernel("copy", [source], [made], [dtype], [to]), source, made)
        return self.for_numpy(made)

    def multiply(self, a: Any, b: Any, dtype: str, to: str) -> Any:
        """a @ b as an array of the dtype `to`. a and b hold `dtype`, and b is a matrix."""
        x, w, made = self.array_of(a), self.array_of(b), self.empty((*a.shape[:-1], b.shape[1]), storage(to))
        if made.size:
            self.for_caller(self.kernel("matmul", [x, w], [made], [dtype, dtype], [to]), x, w, made)
        return self.for_numpy(made)

    def constant(self, values: Array) -> Any:
        """An array of the host, which is copied once. Nobody may write the result."""
        key = values.dtype.str, values.shape, values.tobytes()
        return self.for_numpy(kept(self._constants, MOST_CONSTANTS, key, lambda: self.array(values)))

    def upload(self, values: Array, into: DeviceArray | None = None) -> Any:
        """A copy of an array of the host, in the order of the caller's current stream. Nothing waits for it here."""
        while self._uploads and self._uploads[0][0].done():
            self._uploads.popleft()
        made = self.empty(values.shape, values.dtype) if into is None else into
        if values.size:
            staging = self.pinned(values.shape, values.dtype)
            self.touch("upload()", staging, True)
            staging[...] = values
            self.for_caller(self.copy(made, staging), made)
            self._uploads.append((self.mark(), staging))
        return self.for_numpy(made)

    def fetch(self, x: Any) -> Fetched:
        """A copy of x on its way to page-locked memory. Nothing waits for it here."""
        source = self.array_of(x)
        target = self.pinned(x.shape, source.dtype)
        self.for_caller(self.copy(target, source), source)
        return Fetched(self, target, source, self.mark())

    def opened_once(self, key: bytes, make: Callable[[], Any]) -> Any:
        """Memory of another process, which `make` opens. It stays open for the next message, MOST_OPENED at most."""
        return kept(self._opened, MOST_OPENED, key, make)
