"""The Backend on a device: products, sums, and both directions of copies have a stream each. Events order them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from fompi.backends.base import Arrays, Dtypes, Kernel
from fompi.backends.cuda.device import AnyArray, Device, Enqueue, ProductCall
from fompi.backends.cuda.failures import OutOfMemory
from fompi.backends.half import storage
from fompi.base.errors import DeviceError, in_words
from fompi.plans.dependencies import lane_of
from fompi.tensors.device_array import DeviceArray

STREAMS = {"compute": 0, "merge": -1, "download": -1, "upload": -1}
"""The streams by lane, and their priorities: other ranks wait for all but products."""


class Queue:
    """A stream with what the engine must know of it: `ended` is when its last kernel was seen to be done."""

    __slots__ = ("ended", "stream")

    def __init__(self, stream: Any):
        self.stream, self.ended = stream, 0.0


class Enqueued:
    """The Token of a kernel on a stream. `due` is when it was seen to be done; infinity before that."""

    __slots__ = ("begun", "due", "event", "queue")

    def __init__(self, queue: Queue, event: Any):
        self.queue, self.event, self.begun, self.due = queue, event, perf_counter(), float("inf")

    def done(self) -> bool:
        if not self.event.done():
            return False
        return self.seen()

    def seen(self) -> bool:
        """Note that it is done."""
        now = perf_counter()
        self.begun, self.due = max(self.begun, self.queue.ended), now  # a stream runs one kernel after the other
        self.queue.ended = now
        return True


class AnnouncedProduct(Enqueued):
    """The Token of one product of a kernel that raises flags. `event` is the end of the whole kernel.

    Kernels that need this product must be enqueued after `done()`: then no stream has to wait for `event`.
    """

    __slots__ = ("is_raised",)

    def __init__(self, queue: Queue, event: Any, is_raised: Callable[[], bool]):
        super().__init__(queue, event)
        self.is_raised = is_raised

    def done(self) -> bool:
        if self.is_raised():
            return self.seen()
        if self.event.done() and not self.is_raised():  # a kernel that has failed raises the error here
            raise DeviceError("a kernel that announces its products has ended, and did not raise the flag of one")
        return False


class OnDevice:
    """The Backend. Everything that costs time is done in `bind`: a call only enqueues."""

    asynchronous = True

    def __init__(self, device: Device):
        self.device, self.name = device, device.name
        self._kept: deque[tuple[Any, Any]] = deque()  # events, and the arrays of copies that are in flight
        self.queues = {name: Queue(device.stream(name, priority)) for name, priority in STREAMS.items()}

    def empty(self, arena: Any, shape: Sequence[int], dtype: str, place: str = "", aligned: bool = True) -> Any:
        make = self.device.pinned if place == "host" else self.device.empty
        return make(tuple(shape), storage(dtype))

    def enter(self) -> Enqueued | None:
        """Let all streams wait for what the caller's current stream has enqueued. Returns its token, or None."""
        entry = self.entry()
        if entry is None:
            return None
        for queue in self.queues.values():
            queue.stream.wait(entry.event)
        return entry

    def entry(self) -> Enqueued | None:
        """The token of what the caller's current stream has enqueued. None: all of that is done."""
        while self._kept and self._kept[0][0].done():
            self._kept.popleft()
        event = self.device.entry()
        return None if event is None else Enqueued(Queue(None), event)

    def leave(self, tokens: Sequence[Enqueued]) -> None:
        """Let the caller's current stream wait for these kernels, in the order of their launches."""
        last = {id(token.queue): token.event for token in tokens}  # a stream runs in order
        if last:
            self.device.leave([*last.values()])

    def copy(self, *pairs: tuple[AnyArray, AnyArray]) -> None:
        """Copy to each first array from the second one, in the order of the caller's current stream."""
        self.enter()
        stream = self.queues["merge"].stream
        for to, source in pairs:
            self.device.copy(to, source)(stream)
        event = stream.record(self.device.event())
        self._kept.append((event, pairs))
        self.device.leave([event])

    def packed(self, array: DeviceArray) -> DeviceArray:
        """A contiguous copy of a strided array, in the order of the caller's current stream."""
        packed = self.device.empty(array.shape, array.dtype)
        self.copy((packed, array))
        return packed

    def joined(self, arrays: Sequence[DeviceArray]) -> DeviceArray:
        """The elements of all arrays, one array behind the other, in C order. It is ordered as `packed`."""
        joined = self.device.empty((sum(array.size for array in arrays),), arrays[0].dtype)
        begin, pairs = 0, []
        for array in arrays:
            pairs.append((joined[begin : (begin := begin + array.size)].reshape(array.shape), array))
        self.copy(*pairs)
        return joined

    def filled(self, shape: Sequence[int], dtype: str, value: int, place: str = "") -> Any:
        """A new array full of `value`."""
        values = np.full(shape, value, storage(dtype))
        if place != "host":
            return self.device.array(values)
        array = self.device.pinned(tuple(shape), values.dtype)
        self.device.touch("fill", array, True)
        array[...] = values
        return array

    def bind(self, kernel: str, reads: Arrays, writes: Arrays, read_dtypes: Dtypes, write_dtypes: Dtypes) -> Kernel:
        if kernel in ("download", "upload"):
            return self._enqueuer(kernel, self.device.copy(writes[0], reads[0]))
        work = self.device.kernel(kernel, reads, writes, read_dtypes, write_dtypes)
        return self._enqueuer(kernel, work)

    def bind_announced(
        self, products: Sequence[ProductCall], forced: bool = True, folder: Path | None = None
    ) -> Callable[[Sequence[Enqueued]], list[Enqueued]] | None:
        """One kernel for all of these products (`Device.announced`): a function that launches it. None: there is none.

        It returns a token for each product. That of the last one is the end of the kernel, as of any other.
        """
        made = self.device.announced(products, forced, folder)
        if made is None:
            return None
        queue, event, spare = self.queues["compute"], self.device.event(), self.device.event()
        stream = queue.stream

        def launch(after: Sequence[Enqueued]) -> list[Enqueued]:
            nonlocal event, spare
            event, spare = spare, event
            for token in after:
                if token.queue is not queue:
                    stream.wait(token.event)
            epoch = made.enqueue(stream)
            stream.record(event)
            flags = (partial(made.is_raised, group, epoch) for group in range(len(products) - 1))
            return [*(AnnouncedProduct(queue, event, is_raised) for is_raised in flags), Enqueued(queue, event)]

        return launch

    def bind_user(self, function: Callable[..., object], kernel: str, reads: Arrays, writes: Arrays) -> Kernel:
        """As `bind`, for a kernel of the user: `function(reads, writes)`."""
        return self._enqueuer(kernel, self.device.call(function, kernel, reads, writes))

    def by_caller(self) -> ByCaller:
        """This backend, where kernels of the user run in the program's thread and enqueue in its current stream."""
        return ByCaller(self)

    def launch_once(self, function: Callable[..., object], kernel: str, reads: Arrays, writes: Arrays) -> None:
        """Launch a kernel of the user on scratch arrays like these, and wait: its code is compiled and loaded now.

        In a step a load would take the lock of the context, and stop the copies of other streams. Without memory for
        the arrays nothing is launched. Raises DeviceError with the name of the kernel.
        """
        device = self.device
        try:
            inside, outside = ([device.zeros(a.shape, a.dtype) for a in arrays] for arrays in (reads, writes))
        except OutOfMemory:
            return
        try:
            device.run_once(device.call(function, kernel, inside, outside))
        except Exception as error:
            device.told()
            words = f"the kernel {kernel!r} of kernels= has failed when bind launched it once: {in_words(error)}"
            raise DeviceError(words) from error

    def _enqueuer(self, kernel: str, enqueue: Enqueue) -> Kernel:
        queue, event, spare = self.queues[lane_of(kernel)], self.device.event(), self.device.event()
        stream = queue.stream

        def launch(after: Sequence[Enqueued]) -> Enqueued:
            nonlocal event, spare
            event, spare = spare, event  # the kernel of the last call may still be in flight
            for token in after:
                if token.queue is not queue:
                    stream.wait(token.event)
            enqueue(stream)
            return Enqueued(queue, stream.record(event))

        return launch


class ByCaller:
    """A Backend whose kernels of the user are functions of the program: they enqueue in the caller's current stream.

    `Dispatch` runs them in the thread that has started the call. All else is that of the backend of the device.
    """

    asynchronous = is_by_caller = True

    def __init__(self, backend: OnDevice):
        self._backend, self._queue = backend, Queue(None)
        self.device, self.name = backend.device, backend.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def bind_user(self, function: Callable[..., object], kernel: str, reads: Arrays, writes: Arrays) -> Kernel:
        """`function(reads, writes)` on DeviceArrays, between what it follows and a mark in the caller's stream."""
        device, queue = self.device, self._queue

        def launch(after: Sequence[Enqueued]) -> Enqueued:
            events = [token.event for token in after if token.queue is not queue]
            if events:
                device.leave(events)
            function(reads, writes)
            device.meet()
            return Enqueued(queue, device.mark())

        return launch
