"""What fompi needs from a device: streams, events, memory that only the device reads, and kernels on it.

    event = stream.record(device.event())      the mark is reached once the stream has done all that came before
    stream.wait(event)                          what comes later in this stream waits for the mark
    enqueue = device.kernel("matmul", ...)      made once; `enqueue(stream)` gives the kernel to a stream

Any thread may enqueue and poll. Nothing here depends on the current stream of a thread, except `Device.entry`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from fompi.backends.base import Dtypes
from fompi.tensors.device_array import DeviceArray

Array = np.ndarray[Any, Any]
AnyArray = Array | DeviceArray
Arrays = Sequence[DeviceArray]

WAIT_SECONDS = 300.0
"""The deadline of what waits for a device: `array`, `get`, `export`, and the first launch of a kernel of the user."""

Enqueue = Callable[[Any], None]
"""`enqueue(stream)`: give a kernel or a copy to a stream. It raises the errors of the device."""


class ProductCall(NamedTuple):
    """One product of an announced kernel: the arguments of `Device.kernel`."""

    name: str
    reads: Sequence[Any]
    writes: Sequence[Any]
    read_dtypes: Sequence[str]
    write_dtypes: Sequence[str]


class Device(Protocol):
    """A device. Its arrays are DeviceArrays; page-locked host memory is a NumPy array."""

    name: str
    key: str
    """Part of the key of a plan: one text on all ranks that have this kind of device."""
    most_nbytes: int
    """The most memory that fompi has used at a time: its high-water mark."""
    backend: Any
    """The Backend on this device, once it was asked for (`fompi.backends.cuda.backend_of`)."""

    @property
    def processors(self) -> int:
        """How many of its processors compute a tile of a product at once. 0: not known."""

    def told(self) -> None:
        """The program gets the error of this device, if it has one, from what has failed."""

    def is_known_to_mpi(self) -> bool:
        """True if the MPI library takes addresses of this device. The same on all ranks."""

    def stream(self, name: str, priority: int = 0) -> Any:
        """A new stream, which runs what is enqueued in order. A lower number is a higher priority.

        `record(event)` puts a mark behind all that is enqueued, and returns it. What is enqueued after `wait(event)`
        runs after the mark of another stream.
        """

    def event(self) -> Any:
        """A new event, which no stream has recorded yet.

        `done()` is True once the stream has reached it. DeviceError if the device has failed: it never waits for ever.
        """

    def entry(self) -> Any:
        """An event in the caller's current stream, behind what writes its tensors. None: all of that is done."""

    def leave(self, events: Sequence[Any]) -> None:
        """Let the caller's current stream wait for these events: behind them its results are there."""

    def departing(self) -> int | None:
        """The address of a stream in which all that fompi has enqueued is done. None: that is done already."""

    def empty(self, shape: Sequence[int], dtype: Any) -> DeviceArray:
        """New memory of the device."""

    def zeros(self, shape: Sequence[int], dtype: Any) -> DeviceArray:
        """New memory of the device, full of zeros. Waits for it."""

    def pinned(self, shape: Sequence[int], dtype: Any) -> Array:
        """New page-locked host memory: only such memory is copied while kernels run."""

    def kernel(self, name: str, reads: Arrays, writes: Arrays, read_dtypes: Dtypes, write_dtypes: Dtypes) -> Enqueue:
        """The kernel `name` of `fompi.plans.kernels` on these arrays."""

    def announced(self, products: Sequence[ProductCall], forced: bool, folder: Path | None) -> Any:
        """One kernel for all of these products. They have the same weight. None: a kernel for each is better.

        It raises a flag in page-locked memory after each product. `enqueue(stream)` returns the epoch of a launch.
        `is_raised(group, epoch)` is True once that launch has written all of product number `group`: what the host
        enqueues or sends afterwards finds it. What it has enqueued before does not wait for it.

        `forced`: the device need not show that the one kernel ends earlier. What it has measured is kept in `folder`.
        """

    def needs_for_announced(self) -> str:
        """What is missing for `announced`, in words. Empty: nothing."""

    def call(self, function: Callable[..., object], name: str, reads: Arrays, writes: Arrays) -> Enqueue:
        """A kernel of the user: `function(reads, writes)`, on arrays as the user's framework takes them."""

    # -- what the caller computes with (`fompi.backends.numbers`), in the order of its current stream
    def for_numpy(self, array: DeviceArray) -> Any:
        """The array as one that NumPy's functions take."""

    def array_of(self, x: Any) -> DeviceArray:
        """Undoes `for_numpy`."""

    def meet(self) -> None:
        """The caller's current streams of all libraries wait for each other."""

    def mark(self) -> Any:
        """A new event in the caller's current stream."""

    def for_caller(self, enqueue: Enqueue, *arrays: DeviceArray) -> None:
        """Give a kernel on these arrays to the caller's current stream."""

    def cast(self, x: Any, dtype: str, to: str) -> Any:
        """x, which holds `dtype`, rounded to the dtype `to`."""

    def multiply(self, a: Any, b: Any, dtype: str, to: str) -> Any:
        """a @ b as an array of the dtype `to`. a and b hold `dtype`, and b is a matrix."""

    def constant(self, values: Array) -> Any:
        """An array of the host, which is copied once and kept. The first call waits. Nobody may write the result."""

    def upload(self, values: Array, into: DeviceArray | None = None) -> Any:
        """A copy of an array of the host, in new memory or in that of `into`. Nothing waits for it here."""

    def fetch(self, x: Any) -> Any:
        """A copy of x on its way to the host: `done()`, then `get()`. Nothing waits for it here."""

    def copy(self, to: AnyArray, source: AnyArray) -> Enqueue:
        """A copy between arrays of equally many bytes in C order: of this device, or page-locked."""

    def run_once(self, enqueue: Enqueue) -> None:
        """Run a kernel now, on a stream of its own, and wait for it."""

    def array(self, x: Any) -> DeviceArray:
        """A copy of host memory on the device. Waits for it."""

    def put(self, array: DeviceArray, x: Any) -> None:
        """Copy host memory over `array`. Waits for it."""

    def get(self, array: DeviceArray) -> Array:
        """A copy of `array` in host memory. Waits for it."""

    def memory(self, array: DeviceArray) -> Any:
        """What a GPU-aware MPI is given for a contiguous array of bytes."""

    def message(self, what: str, array: AnyArray, writes: bool) -> Callable[[], None]:
        """Note that a message begins to read or write `array`. The result is called when the message is done.

        Raises RaceError if a kernel or copy may still use it.
        """

    def touch(self, what: str, array: AnyArray, writes: bool) -> None:
        """Note that the host reads or writes `array`, or allows others to. Raises RaceError as `message` does."""

    def mirror(self, array: DeviceArray) -> Any:
        """Copy `array` to memory that other processes can open, if its own they cannot. Nothing waits for it here.

        Returns the Token of the copy; None: there is nothing to copy. Once it is done, `export` with `mirrored=True`.
        """

    def export(self, array: DeviceArray, mirrored: bool = False) -> bytes:
        """A handle with which another process of this host opens the memory of `array`. May wait for `mirror`."""

    def open(self, handle: bytes, nbytes: int) -> DeviceArray:
        """The `nbytes` bytes that another process has exported. Its memory may be kept open for the next handle."""
