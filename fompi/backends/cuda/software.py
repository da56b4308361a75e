"""A device without hardware. It is strict where a real device is silent.

* Streams are threads. Every kernel and copy starts after a random delay with a fixed seed.
* Device memory is mapped twice: at `ptr`, where a host access ends in SIGSEGV as on a GPU, and at a shadow address that
  only kernels and copies use. New memory is full of NaN.
* Two accesses to the same bytes, one of them a write, that nothing orders are a RaceError, which names both operations
  (`fompi.backends.cuda.races`). It does not depend on how the threads happen to run.
* A kernel that announces its products raises a flag after each. The host knows a product once it has seen its flag.
* Other errors: memory that is used after it was freed, or freed while a stream uses it; an event that was never
  recorded; memory that is read before it is written; a copy from pageable memory. After a kernel has failed, the device
  refuses everything, as a GPU does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import random
import threading
import time
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np

from fompi.backends.base import Dtypes
from fompi.backends.cuda.computing import Computing
from fompi.backends.cuda.counters.signal import Signals
from fompi.backends.cuda.device import AnyArray, Array, Arrays, Enqueue, ProductCall
from fompi.backends.cuda.failures import OutOfMemory, nothing
from fompi.backends.cuda.races import HOST, Clocks, Place, Span, freed_in_use
from fompi.backends.cuda.staging import HostMark, Staging
from fompi.backends.numpy import Numpy
from fompi.base.errors import DeviceError, in_words
from fompi.plans.kernels import find
from fompi.tensors.device_array import DeviceArray, Interface, byte_bounds

DELAY_SECONDS = 1e-4
"""The longest delay before a kernel or copy. The third power of a random number makes most delays short."""

CAPACITY = 8 << 30

_PROT_NONE = 0  # `mmap` has no name for it
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


# ---------------------------------------------------------------------------------------------------- device memory


def _mapped(nbytes: int, protection: int, descriptor: int) -> int:
    address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise DeviceError(f"{nbytes} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}")
    return int(address)


class DeviceMemory(Span):
    """Memory of the device: a file in memory, mapped twice. Freed when its last array has died."""

    def __init__(self, device: SoftwareDevice, nbytes: int, path: str = ""):
        super().__init__(device, nbytes, "opened" if path else "device", written=bool(path))
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        if not path and nbytes > device.capacity - device.used:
            free = device.capacity - device.used
            text = f"{nbytes} bytes were asked for, {free} of {device.capacity} are free"
            raise OutOfMemory(f"the {device.name} is out of memory: {text}", free)
        try:
            self.descriptor = os.open(path, os.O_RDWR) if path else os.memfd_create("fompi device")
        except OSError as error:
            raise DeviceError(f"the memory of another process cannot be opened: {error}") from error
        if not path:
            os.ftruncate(self.descriptor, size)
        self.ptr = _mapped(size, _PROT_NONE, self.descriptor)
        self.shadow = _mapped(size, mmap.PROT_READ | mmap.PROT_WRITE, self.descriptor)
        if not path:
            ctypes.memset(self.shadow, 0xFF, nbytes)  # NaN in every float type
            device.used += nbytes
            device.most_nbytes = max(device.most_nbytes, device.used)
        self.size, self.is_own = size, not path

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def free(self) -> None:
        """Give the memory back. What uses it afterwards is an error, and so is a free while a stream may use it."""
        if self.freed:
            raise DeviceError(f"{self} is freed twice")
        clocks = self.device.clocks
        with clocks.lock:
            user = self.in_use(clocks) if self.device.checks else None
        if user is not None:
            raise freed_in_use(self, user)
        self._unmap()

    def _unmap(self) -> None:
        self.freed = True
        if self.is_own:
            self.device.used -= self.nbytes
        _libc.munmap(self.ptr, self.size)
        _libc.munmap(self.shadow, self.size)
        os.close(self.descriptor)

    def __del__(self) -> None:
        if self.freed or not self.shadow:
            return
        try:
            self.free()
        except DeviceError as error:  # the memory stays mapped, because a stream may use it
            self.device.reports.append(error)


def seen(array: AnyArray) -> Array:
    """The array as kernels see it. An MPI library that knows the device would see the same."""
    if not isinstance(array, DeviceArray):
        return array
    memory: Any = array.memory
    data = array.ptr - memory.ptr + memory.shadow, False
    shadow = np.asarray(Interface({**array.interface, "data": data}, memory))
    return shadow if shadow.dtype == array.dtype else shadow.view(array.dtype)  # dtypes of ml_dtypes


class SoftwareArray(Computing, DeviceArray):  # type: ignore[misc]
    """An array of the software device. NumPy's functions compute with it, in the caller's current stream.

    What they return, and what the program drops, is used again in the order of that stream, as in CuPy's pool.
    """

    __slots__ = ()
    __hash__ = DeviceArray.__hash__

    def _new(self, shape: tuple[int, ...], dtype: Any) -> SoftwareArray:
        made: SoftwareArray = self.device.empty(shape, dtype)
        return made

    def _run(self, name: str, work: Any, reads: Arrays, writes: Arrays) -> None:
        self.device.compute(name, work, reads, writes)


class StreamEvent(HostMark):
    """A mark in a stream. Once `done()` is True, the host knows all that the stream knew at the mark."""

    __slots__ = ("clock", "device", "reached")

    def __init__(self, device: SoftwareDevice):
        self.device = device
        self.reached: threading.Event | None = None
        self.clock: dict[str, int] = {}

    def done(self) -> bool:
        if self.reached is None:
            raise DeviceError("an event was polled that no stream has recorded")  # CUDA says that it is done
        self.device.check()
        if not self.reached.is_set():
            return False
        with self.device.clocks.lock:
            self.device.clocks.join(HOST, self.clock)
        return True


class Stream:
    """A thread that runs what is enqueued, in order."""

    def __init__(self, device: SoftwareDevice, name: str):
        self.device, self.name = device, name
        self.actor = f"stream {name} {next(device.numbers)}"
        self._random = random.Random(f"{device.seed} {name}")
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        arguments = self._queue, weakref.ref(device), self._random, device.delay
        threading.Thread(target=_run, args=arguments, name=f"fompi {self.actor}", daemon=True).start()

    def submit(self, what: str, places: Sequence[Place], work: Callable[[], object]) -> None:
        """Enqueue `work`, which touches these places."""
        device, clocks = self.device, self.device.clocks
        device.check()
        with clocks.lock:
            clocks.join(self.actor, clocks.of[HOST])  # what the host knows happened before the launch
            if device.checks:
                clocks.note(self.actor, f"{what} on stream {self.name}", places)
        name = self.name
        self._queue.put(lambda: device.run(work, name))

    def record(self, event: StreamEvent) -> StreamEvent:
        with self.device.clocks.lock:
            clocks = self.device.clocks
            clocks.tick(self.actor)
            event.clock = dict(clocks.of[self.actor])
        event.reached = threading.Event()
        self._queue.put(event.reached.set)
        return event

    def wait(self, event: StreamEvent) -> None:
        if event.reached is None:
            raise DeviceError(f"stream {self.name} waits for an event that no stream has recorded")  # CUDA: no error
        with self.device.clocks.lock:
            self.device.clocks.join(self.actor, event.clock)
        self._queue.put(event.reached.wait)  # type: ignore[arg-type]

    def __del__(self) -> None:
        self._queue.put(None)


def _pause(chance: random.Random, delay: float) -> None:
    if delay:
        time.sleep(chance.random() ** 3 * delay)


def _run(todo: Any, device: Any, chance: random.Random, delay: float) -> None:
    """The thread of a stream. It ends with the stream, and does not keep the device alive."""
    with np.errstate(all="ignore"):
        while (work := todo.get()) is not None:
            _pause(chance, delay)
            work()
            del work


# --------------------------------------------------------------------------------------- kernels that announce products


class SoftwareAnnouncer:
    """One kernel for several products, each of them in tiles of rows. After the last tile it raises a flag.

    For the checker each product is an actor. So a flag says nothing of the other products of the kernel. Once the host
    has seen a flag, it knows the tiles that were stored when the flag was raised.
    """

    def __init__(self, device: SoftwareDevice, products: Sequence[ProductCall]):
        self.device, self.name = device, products[0].name
        self.signals = Signals(device.pinned((len(products),), np.int32))
        self.tiles = [[*device.tiles(product)] for product in products]
        self.counters = [0] * len(products)
        self.known = [(0, dict[str, int]())] * len(products)  # the last epoch of each product, and what its flag says
        self._random = random.Random(f"{device.seed} {self.name}")

    def enqueue(self, stream: Stream) -> int:
        device, clocks, epoch = self.device, self.device.clocks, self.signals.next()
        device.check()
        actors = [f"{stream.actor} product {group}" for group in range(len(self.tiles))]
        with clocks.lock:
            clocks.join(stream.actor, clocks.of[HOST])
            before, ticks = dict(clocks.of[stream.actor]), []
            for group, (actor, tiles) in enumerate(zip(actors, self.tiles, strict=True)):
                clocks.join(actor, before)
                what = f"{self.name} {group} on stream {stream.name}"
                ticks.append([self._noted(actor, what, places) for _, places in tiles])
            for actor in actors:
                clocks.join(stream.actor, clocks.of[actor])

        def work() -> None:
            for group, (actor, tiles) in enumerate(zip(actors, self.tiles, strict=True)):
                _pause(self._random, device.delay)
                for (tile, _), tick in zip(tiles, ticks[group], strict=True):
                    tile()
                    self._stored(group, epoch, {**before, actor: tick})

        stream.submit(self.name, [], work)
        return epoch

    def _noted(self, actor: str, what: str, places: Sequence[Place]) -> int:
        clocks = self.device.clocks
        if self.device.checks:
            clocks.note(actor, what, places)
        return clocks.of[actor].get(actor, 0)

    def _stored(self, group: int, epoch: int, known: dict[str, int]) -> None:
        """A tile of a product is stored. The last one sets the counter back and raises the flag."""
        self.counters[group] += 1
        if self.counters[group] == len(self.tiles[group]):
            self.counters[group] = 0
            if self.known[group][0] != epoch:
                self.known[group] = epoch, known
            self.signals.flags[group] = epoch

    def is_raised(self, group: int, epoch: int) -> bool:
        if not self.signals.is_raised(group, epoch):
            return False
        with self.device.clocks.lock:
            self.device.clocks.join(HOST, self.known[group][1])
        return True


# -------------------------------------------------------------------------------------------------------- the device


class SoftwareDevice(Staging):
    """A device without hardware. With `check=True` every race is an error at the launch; without, it just happens.

        device = fompi.Device("software")
        x = device.array(np.ones((8, 4)))          # a copy on the device
        y = fompi.all_gather(x, comm=tp)           # a DeviceArray, too
        y.get()                                    # a copy on the host

    `seed` and `delay` (seconds) decide the delays. It has `capacity` bytes of memory. Other processes of the host can
    open its memory.
    """

    name = "software device"
    key = "software"
    processors = 0

    def __init__(self, seed: int = 0, delay: float = DELAY_SECONDS, check: bool = True, capacity: int = CAPACITY):
        super().__init__()
        self.capacity, self.used = capacity, 0
        self.most_nbytes = 0
        self.seed, self.delay, self.checks = seed, delay, check
        self.clocks, self.numbers = Clocks(), count()
        self._failed_on = ""  # the stream of the kernel that has failed
        self.reports: list[DeviceError] = []
        """What the checker found where it could raise no error: memory that was dropped while a stream used it."""
        self._host = Numpy()
        self._pinned: dict[int, Span] = {}
        self._addresses: list[int] = []  # of page-locked memory, sorted
        self._dropped: deque[Span] = deque()
        self._own = Stream(self, "own")  # for `array` and `get`
        self._default = Stream(self, "default")  # the current stream of a program that has chosen none
        self._left: StreamEvent | None = None  # the last mark in it
        self._current = threading.local()
        self.backend: Any = None

    def __repr__(self) -> str:
        return f"Device('software', seed={self.seed}, check={self.checks})"

    def is_known_to_mpi(self) -> bool:
        return False  # FOMPI_PATH=direct gives the MPI library the memory as kernels see it

    # -- errors
    def in_words_of_fault(self) -> str:
        return f"a kernel on the {self.name} has failed: {in_words(self.fault)}"

    def may_have_failed(self, lane: str) -> bool:
        return lane == self._failed_on

    def run(self, work: Callable[[], object], stream: str) -> None:
        if self.fault is None:
            try:
                work()
            except BaseException as error:
                self._failed_on, self.fault = stream, error

    # -- streams
    def stream(self, name: str, priority: int = 0) -> Stream:
        return Stream(self, name)

    def event(self) -> StreamEvent:
        return StreamEvent(self)

    @contextmanager
    def using(self, stream: Stream) -> Any:
        """Make `stream` the current one of this thread.

        Operations start after what is enqueued in it, and what is enqueued in it later comes after them.
        """
        before, self._current.stream = getattr(self._current, "stream", None), stream
        try:
            yield stream
        finally:
            self._current.stream = before

    def entry(self) -> StreamEvent | None:
        self.check_for_program()
        stream = getattr(self._current, "stream", None)
        if stream is not None:
            return cast(StreamEvent, stream.record(StreamEvent(self)))
        left = self._left
        return None if left is None or left.done() else left

    def leave(self, events: Sequence[StreamEvent]) -> None:
        chosen = getattr(self._current, "stream", None)
        stream = chosen or self._default
        for event in events:
            stream.wait(event)
        if chosen is None:
            self._left = stream.record(StreamEvent(self))

    def departing(self) -> int | None:
        return None  # no library can read this memory

    # -- memory
    def empty(self, shape: Sequence[int], dtype: Any) -> SoftwareArray:
        return SoftwareArray.of(DeviceMemory(self, prod(shape) * np.dtype(dtype).itemsize), shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: Any) -> DeviceArray:
        return self.array(np.zeros(shape, dtype))

    def pinned(self, shape: Sequence[int], dtype: Any) -> Array:
        dtype, nbytes = np.dtype(dtype), prod(shape) * np.dtype(dtype).itemsize
        base = np.full(max(nbytes, 1), 0xFF, np.uint8)
        span = Span(self, nbytes, "page-locked")
        span.ptr = span.shadow = base.ctypes.data
        with self.clocks.lock:
            self._settle()
            self._pinned[span.ptr] = span
            insort(self._addresses, span.ptr)
        weakref.finalize(base, self._dropped.append, span).atexit = False
        return np.ndarray(tuple(shape), dtype, base)

    def _settle(self) -> None:
        """Forget page-locked memory whose arrays have died. Not in a finalizer: it may run at any point of a thread."""
        while self._dropped:
            span = self._dropped.popleft()
            user = span.in_use(self.clocks) if self.checks else None
            if user is not None:
                self.reports.append(freed_in_use(span, user))
            del self._pinned[span.ptr]
            self._addresses.remove(span.ptr)

    def place(self, array: AnyArray, writes: bool) -> Place:
        """What the checker is told of an array of the device, or of page-locked memory."""
        if isinstance(array, DeviceArray):
            if array.device is not self:
                raise DeviceError(f"{array!r} belongs to another device")
            memory: Any = array.memory
            return memory, *array.extent, writes
        low, high = byte_bounds(array)
        with self.clocks.lock:
            at = bisect_right(self._addresses, low) - 1
            span = self._pinned[self._addresses[at]] if at >= 0 else None
        if span is None or high > span.ptr + max(span.nbytes, 1):
            raise DeviceError("a copy from or to pageable memory would wait for the device: use memory of pinned()")
        return span, low - span.ptr, high - span.ptr, writes

    # -- kernels
    def kernel(self, name: str, reads: Arrays, writes: Arrays, read_dtypes: Dtypes, write_dtypes: Dtypes) -> Enqueue:
        work = self._host.bind(name, [*map(seen, reads)], [*map(seen, writes)], read_dtypes, write_dtypes)
        return self._enqueue(name, work, reads, writes)

    def announced(self, products: Sequence[ProductCall], forced: bool, folder: Path | None) -> SoftwareAnnouncer | None:
        """Only if it is forced: it is slow, and nothing to measure."""
        if not forced or not all(array.size for product in products for array in (*product.reads, *product.writes)):
            return None
        return SoftwareAnnouncer(self, products)

    def needs_for_announced(self) -> str:
        return ""

    def tiles(self, product: ProductCall) -> Iterator[tuple[Callable[[], object], list[Place]]]:
        """A product in tiles: the work of each, and what it touches. Each run of rows is cut in two."""
        kernel, reads, of_reads = find(product.name), product.reads, product.read_dtypes
        (rows,), (of_rows,) = kernel.rows(reads), kernel.rows(of_reads)
        wholes, of_wholes = kernel.wholes(reads), kernel.wholes(of_reads)
        for x, of_x, y, of_y in zip(rows, of_rows, product.writes, product.write_dtypes, strict=True):
            half = len(y) // 2
            for part in (slice(0, half), slice(half, None)):
                if y[part].size:
                    operands, result = [x[part], *wholes], y[part]
                    work = self._host.bind(
                        product.name, [*map(seen, operands)], [seen(result)], [of_x, *of_wholes], [of_y]
                    )
                    yield work, [*(self.place(a, False) for a in operands), self.place(result, True)]

    def call(self, function: Callable[..., object], name: str, reads: Arrays, writes: Arrays) -> Enqueue:
        inside, outside = [*map(seen, reads)], [*map(seen, writes)]
        return self._enqueue(name, lambda: function(inside, outside), reads, writes)

    def copy(self, to: AnyArray, source: AnyArray) -> Enqueue:
        target, origin = seen(to), seen(source)

        def work() -> None:
            np.copyto(target, origin if origin.shape == target.shape else origin.reshape(target.shape))

        return self._enqueue("copy", work, [source], [to])

    def compute(self, name: str, work: Callable[..., object], reads: Arrays, writes: Arrays) -> None:
        """Run `work(reads, writes)` as a kernel of the caller's current stream."""
        self.check_for_program()
        self.for_caller(self.call(work, name, reads, writes), *reads, *writes)

    def for_numpy(self, array: DeviceArray) -> SoftwareArray:
        """The array as one that NumPy's functions take."""
        return array if isinstance(array, SoftwareArray) else SoftwareArray(array.memory, array._at)

    def array_of(self, x: SoftwareArray) -> DeviceArray:
        """Undoes `for_numpy`."""
        return x

    def meet(self) -> None:
        """A thread has one current stream."""

    def mark(self) -> StreamEvent:
        """A new mark in the caller's current stream."""
        stream = getattr(self._current, "stream", None) or self._default
        return cast(StreamEvent, stream.record(StreamEvent(self)))

    def for_caller(self, enqueue: Enqueue, *arrays: DeviceArray) -> None:
        """Give a kernel on these arrays to the caller's current stream."""
        chosen = getattr(self._current, "stream", None)
        stream = chosen or self._default
        enqueue(stream)
        for array in arrays:
            memory: Any = array.memory
            memory.owner = stream.actor
        if chosen is None:
            self._left = stream.record(StreamEvent(self))

    def _enqueue(
        self, name: str, work: Callable[[], object], reads: Sequence[AnyArray], writes: Sequence[AnyArray]
    ) -> Enqueue:
        accesses = [*((a, False) for a in reads), *((a, True) for a in writes)]
        places = [self.place(a, writes_it) for a, writes_it in accesses if a.size]
        return lambda stream: stream.submit(name, places, work)

    # -- messages
    def memory(self, array: DeviceArray) -> Array:
        return seen(array)

    def message(self, what: str, array: AnyArray, writes: bool) -> Callable[[], None]:
        if not self.checks:
            return nothing
        self.check()
        place, actor, clocks = self.place(array, writes), f"message {next(self.numbers)}", self.clocks
        with clocks.lock:
            clocks.join(actor, clocks.of[HOST])
            try:
                (access,) = clocks.note(actor, f"the message {what}", [place])
            except DeviceError:
                del clocks.of[actor]
                raise

        def done() -> None:
            with clocks.lock:  # the host knows of it from now on, as of an act of its own
                if access in place[0].accesses:  # not if it has no bytes
                    place[0].accesses.remove(access)
                access.actor, access.tick = HOST, clocks.tick(HOST)
                place[0].keep(clocks, access)
                del clocks.of[actor]

        return done

    def touch(self, what: str, array: AnyArray, writes: bool) -> None:
        if self.checks:
            with self.clocks.lock:
                self.clocks.note(HOST, what, [self.place(array, writes)])

    # -- between processes
    def mirror(self, array: DeviceArray) -> None:
        """All memory of the device can be opened."""

    def export(self, array: DeviceArray, mirrored: bool = False) -> bytes:
        memory: Any = array.memory
        offset = array.ptr - memory.ptr
        return f"{memory.path} {memory.number} {memory.nbytes} {offset}".encode()

    def open(self, handle: bytes, nbytes: int) -> DeviceArray:
        path, number, whole, offset = handle.split()
        key = path + b" " + number  # the number: another file may get the same descriptor
        memory = self.opened_once(key, lambda: DeviceMemory(self, int(whole), path.decode()))
        return SoftwareArray.of(memory, (nbytes,), np.uint8, int(offset))
