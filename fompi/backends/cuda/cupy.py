"""A GPU of NVIDIA, by CuPy.

* Streams and events are raw: `cupy.cuda.runtime` gets their addresses. Any thread may enqueue and poll. The current
  stream of CuPy is used only to follow what the caller has enqueued (`CudaDevice.entry`), and around calls of cuBLAS,
  which CuPy sends to that stream.
* Memory comes from cudaMalloc, not from CuPy's pool, so that another process can open it. It is kept and used again
  (`Pool`).
* An event that is polled gives 0 (done), 600 (not yet), or an error. The error of a kernel stays: the device refuses
  everything after it, because CUDA does.
* Products are computed by cuBLAS, on one handle, but for those in a fixed order. These and all other kernels are those
  of `fompi.backends.cuda.kernels`.

CUDA says what it means of several GPUs by the current device of a thread: `use` sets it where a call needs it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from fompi.backends.base import Dtypes
from fompi.backends.cuda.counters import announced
from fompi.backends.cuda.counters.announced import CudaAnnouncer
from fompi.backends.cuda.device import AnyArray, Array, Arrays, Enqueue, ProductCall
from fompi.backends.cuda.driver import device_count, load_cupy
from fompi.backends.cuda.failures import OutOfMemory, nothing
from fompi.backends.cuda.library import DeviceLibraries
from fompi.backends.cuda.memory import OUT_OF_MEMORY, Lease, Opened, Pool, Slab
from fompi.backends.cuda.products import product
from fompi.backends.cuda.staging import HostMark, Marked, Staging
from fompi.base.errors import DeviceError, FompiError, in_words, warn
from fompi.tensors import dlpack
from fompi.tensors.device_array import DeviceArray

SUCCESS, NOT_READY = 0, 600

CAPTURING = range(900, 909)
"""The errors of a call that CUDA refuses while a CUDA graph is captured."""

HARMLESS = {
    *(1, OUT_OF_MEMORY, 9, 98, 101, 200, 201, 205, 209, 217, 218, 221, 222, 400),
    *(500, 701, 704, 705, 711, 712, 800, 801, *CAPTURING),
}
"""CUDA errors of a call that was refused. After any other error the context is of no more use.

They are wrong arguments, memory that cannot be opened, GPUs that cannot read each other, and code for another GPU.
"""

DISABLE_TIMING, NON_BLOCKING, PORTABLE = 2, 1, 1
TO_DEVICE, TO_HOST, WITHIN_DEVICE = 1, 2, 3

LEGACY = 1
"""The address of CUDA's legacy default stream, also in DLPack. CuPy writes 0."""


# ---------------------------------------------------------------------------------------------- streams and events


class StreamEvent(HostMark):
    """A mark in a stream. CUDA events are used again, because to make one takes some microseconds."""

    __slots__ = ("device", "ptr")

    def __init__(self, device: CudaDevice):
        self.device = device
        try:
            self.ptr = device.free_events.pop()
        except IndexError:
            device.use()
            self.ptr = device.ask(device.runtime.eventCreateWithFlags, DISABLE_TIMING)

    def done(self) -> bool:
        device = self.device
        if device.fault is not None:
            device.check()
        device.begin()
        status = device.query(self.ptr)
        if status == SUCCESS:
            return True
        if status != NOT_READY:
            raise device.reported(status)
        return False

    def __del__(self) -> None:
        if hasattr(self, "ptr"):
            self.device.free_events.append(self.ptr)


class CallersStream:
    """The program's current stream of CuPy, for kernels that fompi gives to it."""

    __slots__ = ("name", "of_cupy", "ptr")

    def __init__(self, ptr: int):
        self.name, self.ptr = "the caller's", ptr
        self.of_cupy: Any = None


class Stream:
    """A queue of the device. It never waits for CUDA's default stream."""

    __slots__ = ("_record", "_wait", "device", "name", "of_cupy", "ptr")

    def __init__(self, device: CudaDevice, name: str, priority: int):
        self.device, self.name = device, name
        self.of_cupy: Any = None  # the same stream as CuPy has it, once it was needed
        device.use()
        self.ptr = device.ask(device.runtime.streamCreateWithPriority, NON_BLOCKING, priority)
        device.streams.add(self.ptr)
        self._record, self._wait = device.runtime.eventRecord, device.runtime.streamWaitEvent

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr

    def record(self, event: StreamEvent) -> StreamEvent:
        self.device.begin()
        try:
            self._record(event.ptr, self.ptr)
        except Exception as error:
            raise self.device.failure(error, f"record on stream {self.name}") from error
        return event

    def wait(self, event: StreamEvent) -> None:
        self.device.begin()
        try:
            self._wait(self.ptr, event.ptr)
        except Exception as error:
            raise self.device.failure(error, f"wait on stream {self.name}") from error

    def __del__(self) -> None:
        if hasattr(self, "ptr"):
            self.device.dropped_streams.append(self.ptr)


# ------------------------------------------------------------------------------------------------------- the device


class CudaDevice(Staging):
    """The GPU `number` of this process.

        device = fompi.Device("cuda", number=0)
        x = device.array(np.ones((8, 4)))     # a copy on the device
        fompi.all_gather(cupy.ones((8, 4)))   # arrays of CuPy, torch, JAX and Numba are taken as they are

    `tf32=True` lets products of float32 round their operands to 10 bits. Memory of results is used again after the
    program has dropped it. The next call of fompi waits for what is enqueued in the current stream until then. So a
    program that uses a result in another stream must wait for that stream before it drops the result.

    Raises LaunchError if there is no CuPy, driver or GPU, and DeviceError if there is no GPU `number`.
    """

    name = "CUDA device"  # without the number: ranks compare it
    key = "cuda"

    def __init__(
        self,
        number: int = 0,
        runtime: Any = None,
        cupy: Any = None,
        library: Callable[[CudaDevice], DeviceLibraries] = DeviceLibraries,
        tf32: bool = False,
        known_to_mpi: bool = False,
    ):
        super().__init__()
        self.cupy = load_cupy() if cupy is None else cupy
        self.runtime = self.cupy.cuda.runtime if runtime is None else runtime
        self.number, self.tf32, self._known_to_mpi = number, tf32, known_to_mpi
        self.count = device_count(self.runtime)
        if not 0 <= number < self.count:
            raise DeviceError(f"there is no CUDA device {number}: this process sees {self.count}, numbered from 0")
        self.backend: Any = None
        self.query = self.runtime.eventQuery
        self.free_events: deque[int] = deque()
        self.streams: set[int] = set()
        self.dropped_streams: deque[int] = deque()
        self.dropped_opened: deque[int] = deque()
        self._thread = threading.local()  # `seen`: how many arrivals the entries of the thread have followed
        self._arrived = 0
        self._computes = False  # True once a strategy has computed with CuPy
        self._callers: dict[int, CallersStream] = {}
        self.use()
        runtime = self.runtime
        self.pool = Pool(self, self._malloc, runtime.free)
        self.pages = Pool(self, lambda nbytes: int(runtime.hostAlloc(nbytes, PORTABLE)), runtime.freeHost)
        self.library = library(self)
        self._own = Stream(self, "own", 0)  # for `array`, `get` and `export`
        self._arrivals = Stream(self, "arrivals", -1)  # waits for the producers of tensors
        self._departures: Stream | None = None  # waits for fompi, for consumers that wait for a stream
        self._exported: dict[bytes, Slab] = {}
        self._opening = threading.Lock()

    def __repr__(self) -> str:
        return f"Device('cuda:{self.number}')"

    def is_known_to_mpi(self) -> bool:
        return self._known_to_mpi

    @property
    def most_nbytes(self) -> int:
        return self.pool.most_nbytes

    def use(self) -> None:
        """Make this the current device of the calling thread, with a context: launches by the driver need one."""
        thread, runtime = self._thread, self.runtime
        if not hasattr(thread, "seen"):
            self.ask(runtime.setDevice, self.number)
            self.ask(runtime.free, 0)  # before CUDA 12 setDevice makes no context
            thread.seen = 0
        elif runtime.getDevice() != self.number:  # the program has changed it
            self.ask(runtime.setDevice, self.number)

    def begin(self) -> None:
        """Let a new thread use this device: its first call of CUDA makes a context on the current one, which is 0."""
        if not hasattr(self._thread, "seen"):
            self.use()

    def close(self) -> None:
        """Give everything back to CUDA. No tensor of fompi may be in use."""
        self.use()
        self.backend = None  # it keeps the arrays of its last copies
        self._opened.clear()
        self._constants.clear()
        self._uploads.clear()
        self._close_dropped()
        self.pool.release(exported=True)
        self.pages.release()
        self.library.close()
        for ptr in self.streams:
            self.runtime.streamDestroy(ptr)
        self.streams.clear()
        while self.free_events:
            self.runtime.eventDestroy(self.free_events.popleft())

    # -- errors
    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of CUDA. Its error becomes a DeviceError."""
        try:
            return function(*arguments)
        except Exception as error:
            raise self.failure(error, getattr(function, "__name__", "a call")) from error

    def broken(self, status: int) -> DeviceError:
        """Note that CUDA has given the error `status` for what ran on the device. Returns the error to raise."""
        if self.fault is None:
            self.fault = (
                f"a kernel on {self!r} has failed: {self.in_words(status)}. The process cannot use the GPU any more. "
                "Run the program with compute-sanitizer to find the kernel"
            )
        return self.failed()

    def reported(self, status: int) -> DeviceError:
        """The error to raise for what CUDA says of an event or a stream."""
        if status in CAPTURING:  # the device has not failed
            return DeviceError(f"{self!r} cannot be asked: {self.in_words(status)}. {CAPTURED}")
        return self.broken(status)

    def failure(self, error: BaseException, what: str) -> BaseException:
        """The DeviceError for what a call of CUDA has raised."""
        if isinstance(error, FompiError):
            return error
        status = getattr(error, "status", None)
        is_cuda = type(error).__name__ in ("CUDARuntimeError", "CUDADriverError")
        if is_cuda and status == OUT_OF_MEMORY:
            return self.out_of_memory(0, None)
        if is_cuda and status not in HARMLESS:
            return self.broken(int(status))  # type: ignore[arg-type]
        if is_cuda and status in CAPTURING:
            remedy = CAPTURED
        elif what.startswith("ipc"):
            remedy = "FOMPI_PATH=staged sends through the memory of the host"
        elif is_cuda and status == 400:
            remedy = "Another thread may have changed its current CUDA device"
        else:
            remedy = ""
        return DeviceError(f"{what} on {self!r} was refused: {in_words(error)}" + (f". {remedy}" if remedy else ""))

    def in_words(self, status: int) -> str:
        return str(self.runtime.CUDARuntimeError(status))

    def out_of_memory(self, nbytes: int, pool: Pool | None) -> DeviceError:
        if pool is not None and pool is self.pages:
            return DeviceError(f"the host has no more page-locked memory: {nbytes} bytes were asked for")
        try:
            free, total = self.runtime.memGetInfo()
        except Exception as error:
            return DeviceError(f"{self!r} is out of memory, and does not say how much is free: {in_words(error)}")
        asked = f"{nbytes} bytes were asked for, " if nbytes else ""
        return OutOfMemory(
            f"{self!r} is out of memory: {asked}{free} of {total} are free, and fompi has {self.pool.nbytes}. Use "
            "smaller tensors or more ranks; fewer calls in flight need fewer buffers; CuPy and torch keep memory that "
            "`free_all_blocks()` and `empty_cache()` give back",
            free,
        )

    # -- streams
    def stream(self, name: str, priority: int = 0) -> Stream:
        while self.dropped_streams:
            ptr = self.dropped_streams.popleft()
            if ptr in self.streams:
                self.streams.remove(ptr)
                self.ask(self.runtime.streamDestroy, ptr)
        return Stream(self, name, priority)

    def event(self) -> StreamEvent:
        return StreamEvent(self)

    def entry(self) -> StreamEvent | None:
        """An event behind what the caller's current streams have to do. None: nothing.

        Blocks of memory that the program has dropped are free once it is done.
        """
        self.check_for_program()
        blocks = self.pool.lent()  # before the event
        try:
            event = self._entry()
        except BaseException:
            self.pool.put_back(blocks)
            raise
        if blocks:
            self.pool.await_lent(blocks, event)
        return event

    def _entry(self) -> StreamEvent | None:
        self.use()
        thread, arrived = self._thread, self._arrived
        busy = [ptr for ptr in dict.fromkeys(self.library.current()) if self._is_busy(ptr)]
        if thread.seen == arrived and len(busy) < 2:
            return self._mark(busy[0]) if busy else None
        for ptr in busy:
            self._arrivals.wait(self._mark(ptr))
        thread.seen = arrived
        return self._arrivals.record(StreamEvent(self))

    def _is_busy(self, ptr: int) -> bool:
        """False if the stream has nothing to do. The default stream follows others, so it always counts as busy."""
        if ptr in (0, LEGACY):
            return True
        status = self.runtime.streamQuery(ptr)
        if status not in (SUCCESS, NOT_READY):
            raise self.reported(status)
        return bool(status == NOT_READY)

    def _mark(self, ptr: int) -> StreamEvent:
        """A new event in a stream that is not fompi's."""
        self.use()  # for the default stream, whose address is the same on all devices
        event = StreamEvent(self)
        self.ask(self.runtime.eventRecord, event.ptr, ptr)
        return event

    def arriving(self) -> int:
        """The address of a stream in which a producer of a tensor waits. The next `entry` of each thread follows it."""
        self._arrived += 1
        return int(self._arrivals.ptr)

    def arrived(self, ptr: int) -> None:
        """A tensor is written by what the stream at `ptr` has to do. The next `entry` of each thread follows it."""
        self.check()
        self._arrivals.wait(self._mark(ptr))
        self._arrived += 1

    def lend_to(self, ptr: int) -> None:
        """Let the stream at `ptr`, of a consumer, wait for what fompi has enqueued."""
        self.check()
        events = [stream.record(StreamEvent(self)) for stream in self._busy_streams()]
        if self._computes:  # a strategy has enqueued kernels of CuPy
            events += [self._mark(of) for of in {*self.library.current()} - {ptr} if self._is_busy(of)]
        self._await(ptr, events)

    def leave(self, events: Sequence[StreamEvent]) -> None:
        for ptr in dict.fromkeys(self.library.current()):
            self._await(ptr, events)

    def departing(self) -> int | None:
        busy = self._busy_streams()
        if not busy:
            return None
        if self._departures is None:
            self._departures = Stream(self, "departures", -1)
        for stream in busy:
            self._departures.wait(stream.record(StreamEvent(self)))
        return int(self._departures.ptr)

    def meet(self) -> None:
        """The caller's current streams wait for each other, and for the producers of tensors that have come.

        So CuPy may compute with tensors of torch and JAX, and they with its results.
        """
        self._computes = True
        thread = self._thread
        if getattr(thread, "seen", -1) == self._arrived and len({*self.library.current()}) < 2:
            return
        event = self._entry()
        if event is not None:
            self.leave([event])

    def mark(self) -> StreamEvent:
        """A new mark in the caller's current stream of CuPy."""
        return self._mark(self.library.current()[0])

    def for_caller(self, enqueue: Enqueue, *arrays: DeviceArray) -> None:
        """Give a kernel on these arrays to the caller's current stream of CuPy."""
        ptr = self.library.current()[0]
        stream = self._callers.get(ptr)
        if stream is None:
            stream = self._callers[ptr] = CallersStream(ptr)
        enqueue(stream)

    def _busy_streams(self) -> list[Stream]:
        self.begin()
        queues = () if self.backend is None else self.backend.queues.values()
        return [queue.stream for queue in queues if self._is_busy(queue.stream.ptr)]

    def _await(self, ptr: int, events: Sequence[StreamEvent]) -> None:
        """Let the stream at `ptr` wait for these events."""
        self.use()  # for the default stream, whose address is the same on all devices
        for event in events:
            self.ask(self.runtime.streamWaitEvent, ptr, event.ptr)

    def number_of(self, ptr: int) -> int:
        """The number of the device whose memory is at `ptr`."""
        return int(self.ask(self.runtime.pointerGetAttributes, ptr).device)

    # -- memory
    def _malloc(self, nbytes: int) -> int:
        self.check()
        self.use()
        return int(self.runtime.malloc(nbytes))

    def empty(self, shape: Sequence[int], dtype: Any) -> DeviceArray:
        return DeviceArray.of(self.pool.take(prod(shape) * np.dtype(dtype).itemsize), shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: Any) -> DeviceArray:
        made, clear = self.empty(shape, dtype), self.runtime.memsetAsync
        self.run_once(self._in_order("memset", [lambda stream: clear(made.ptr, 0, made.nbytes, stream.ptr)], made))
        return made

    def pinned(self, shape: Sequence[int], dtype: Any) -> Array:
        dtype = np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        self.use()
        page = self.pages.take(nbytes)
        page.__array_interface__ = {"version": 3, "data": (page.ptr, False), "typestr": "|u1", "shape": (nbytes,)}
        return np.ndarray(tuple(shape), dtype, np.asarray(page))

    # -- kernels
    def kernel(self, name: str, reads: Arrays, writes: Arrays, read_dtypes: Dtypes, write_dtypes: Dtypes) -> Enqueue:
        self._check_place(*reads, *writes)
        if name.startswith(("matmul", "gradient")):
            made = product(self, name, reads, writes, read_dtypes, write_dtypes)
            return self._in_order(name, made.steps, (reads, writes, made.keep))
        steps = self.library.elementwise(name, reads, writes, read_dtypes, write_dtypes)
        return self._in_order(name, steps, (reads, writes))

    def announced(self, products: Sequence[ProductCall], forced: bool, folder: Path | None) -> CudaAnnouncer | None:
        """As in the protocol. A kernel that does not compile is a warning: each product then is a call of cuBLAS."""
        self._check_place(*(a for product in products for a in (*product.reads, *product.writes)))
        if not self.library.has_triton or (found := announced.layout(products, self.tf32)) is None:
            return None
        if not forced and announced.flops(found) < announced.LEAST_FLOPS:
            return None
        try:
            made = CudaAnnouncer(self, products, found)
            if not forced and not announced.is_faster(self, products, found, folder):
                return None
        except OutOfMemory:
            return None
        except Exception as error:
            self.check()
            warn(f"products are not announced, because the kernel fails: {in_words(error)}")
            return None
        keep = products, made.tables, made.signals  # without `made`: nothing here may wait for the garbage collector
        made.launch = self._in_order(products[0].name, [made.launch], keep)
        return made

    def needs_for_announced(self) -> str:
        return "" if self.library.has_triton else "Triton is missing: pip install '.[triton]'"

    def attribute(self, number: int) -> int:
        """An attribute of CUDA's table of them."""
        return int(self.ask(self.runtime.deviceGetAttribute, number, self.number))

    @property
    def processors(self) -> int:
        """How many of its processors compute a tile of a product at once."""
        return self.attribute(16)

    def card(self) -> str:
        """The GPU and its driver, as the key of what was measured."""
        name = self.ask(self.runtime.getDeviceProperties, self.number)["name"].decode()
        return f"{name}, CUDA {self.runtime.driverGetVersion()}"

    def call(self, function: Callable[..., object], name: str, reads: Arrays, writes: Arrays) -> Enqueue:
        """As in the protocol. The function gets arrays of CuPy, and the stream is CuPy's current one."""
        self._check_place(*reads, *writes)
        inside, outside = [*map(self.as_cupy, reads)], [*map(self.as_cupy, writes)]
        using = self.library.using

        def enqueue(stream: Stream) -> None:
            with using(stream):
                function(inside, outside)

        return self._in_order(name, [enqueue], (reads, writes))

    def as_cupy(self, array: DeviceArray, dtype: Any = None) -> Any:
        """The array as one of CuPy, on the same memory."""
        cupy, memory = self.cupy, array.memory
        owner = cupy.cuda.UnownedMemory(memory.ptr, memory.nbytes, memory, self.number)
        pointer = cupy.cuda.MemoryPointer(owner, array.ptr - memory.ptr)
        return cupy.ndarray(array.shape, array.dtype if dtype is None else dtype, pointer, array.strides)

    def for_numpy(self, array: DeviceArray) -> Any:
        """The array as one of CuPy, for NumPy's functions. Kernels of the program use it."""
        memory: Any = array.memory
        memory.is_lent = True
        return self.as_cupy(array)

    def array_of(self, x: Any) -> DeviceArray:
        """Undoes `for_numpy`."""
        return x if isinstance(x, DeviceArray) else dlpack.on_device(x, self)

    def copy(self, to: AnyArray, source: AnyArray) -> Enqueue:
        self._check_place(*(a for a in (to, source) if isinstance(a, DeviceArray)))
        return self._in_order("copy", self._copy(to, source), (to, source))

    def _copy(self, to: AnyArray, source: AnyArray) -> list[Enqueue]:
        if not source.flags.c_contiguous:
            packed = self._scratch(source)
            return [*self._strided(packed, source), *self._copy(to, packed)]
        if not to.flags.c_contiguous:
            packed = self._scratch(to)
            return [*self._copy(packed, source), *self._strided(to, packed)]
        kind = {(True, False): TO_DEVICE, (False, True): TO_HOST, (True, True): WITHIN_DEVICE}.get(
            (isinstance(to, DeviceArray), isinstance(source, DeviceArray))
        )
        if kind is None:
            raise DeviceError("a copy within host memory is no work for a device")
        target, origin, nbytes, copy = address(to), address(source), to.nbytes, self.runtime.memcpyAsync

        def enqueue(stream: Stream, keep: Any = (to, source)) -> None:
            copy(target, origin, nbytes, kind, stream.ptr)

        return [enqueue] if nbytes else []

    def _scratch(self, like: AnyArray) -> DeviceArray:
        if not isinstance(like, DeviceArray):
            raise DeviceError("a copy from or to strided host memory would wait for the device: pack it first")
        return self.empty(like.shape, like.dtype)

    def _strided(self, to: AnyArray, source: AnyArray) -> list[Enqueue]:
        return self.library.elementwise("copy", [source], [to], [source.dtype.name], [to.dtype.name])  # type: ignore[list-item]

    def _in_order(self, name: str, steps: Sequence[Enqueue], keep: Any) -> Enqueue:
        """One Enqueue of all steps. `keep` must live as long as it."""
        only = steps[0] if len(steps) == 1 else None

        def enqueue(stream: Stream) -> None:
            if self.fault is not None:
                self.check()
            self.use()
            try:
                if only is not None:
                    only(stream)
                else:
                    for step in steps:
                        step(stream)
            except Exception as error:
                if isinstance(error, FompiError) or not hasattr(error, "status"):
                    raise  # of a kernel of the user
                raise self.failure(error, f"{name} on stream {stream.name}") from (keep and error)

        return enqueue

    def _check_place(self, *arrays: DeviceArray) -> None:
        for array in arrays:
            if array.device is not self:
                raise DeviceError(f"{array!r} belongs to another device than {self!r}")

    # -- messages
    def memory(self, array: DeviceArray) -> DeviceArray:
        return _ForMessages(array.memory, array._at)  # mpi4py takes what has `__cuda_array_interface__`

    def message(self, what: str, array: AnyArray, writes: bool) -> Callable[[], None]:
        return nothing

    def touch(self, what: str, array: AnyArray, writes: bool) -> None:
        pass

    # -- between processes
    def mirror(self, array: DeviceArray) -> Marked | None:
        """Memory of another library is copied: its allocation may have no handle, or may go away."""
        memory: Any = array.memory
        if isinstance(memory, Lease):
            return None
        if memory.mirror is None:
            memory.mirror = self.empty((memory.nbytes,), np.uint8)
        low, high = array.extent
        self.use()
        self.copy(memory.mirror[low:high], DeviceArray.of(memory, (high - low,), np.uint8, low))(self._own)
        return Marked(self.mirrors, self._own.record(StreamEvent(self)))

    def export(self, array: DeviceArray, mirrored: bool = False) -> bytes:
        """The mirror of memory of another library lives as long as that memory."""
        memory: Any = array.memory
        if not isinstance(memory, Lease):
            if not mirrored:
                self.mirror(array).event.wait()  # type: ignore[union-attr]
            low, high = array.extent
            array = memory.mirror[low:high]
            memory = array.memory
        slab = memory.slab
        if slab.handle is None:
            self.use()
            slab.handle = self.ask(self.runtime.ipcGetMemHandle, slab.ptr)
            self._exported[slab.handle] = slab
        # Text, because a message has a fixed length and is padded.
        return f"{slab.handle.hex()} {array.ptr - slab.ptr} {slab.nbytes}".encode()

    def open(self, handle: bytes, nbytes: int) -> DeviceArray:
        name, offset, whole = handle.split()
        key = bytes.fromhex(name.decode())
        with self._opening:
            self._close_dropped()
            slab = self._exported.get(key)  # CUDA does not open what the same process has exported
            if slab is not None:
                return DeviceArray.of(Opened(self, slab.ptr, slab.nbytes, None), (nbytes,), np.uint8, int(offset))
            memory = self.opened_once(key, lambda: self._opened_by(key, int(whole)))
        return DeviceArray.of(memory, (nbytes,), np.uint8, int(offset))

    def _opened_by(self, key: bytes, nbytes: int) -> Opened:
        self.use()
        return Opened(self, self.ask(self.runtime.ipcOpenMemHandle, key), nbytes, self.dropped_opened)

    def _close_dropped(self) -> None:
        while self.dropped_opened:
            self.ask(self.runtime.ipcCloseMemHandle, self.dropped_opened.popleft())


class _ForMessages(DeviceArray):
    """An array whose kernels are done: nobody needs to wait for a stream."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> _ForMessages:
        return _ForMessages(self.memory, self._at[key])  # a large message goes in parts

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.interface, "version": 3, "stream": None}


CAPTURED = "A CUDA graph is being captured: wait for the calls of fompi before, and call it again afterwards"


def address(array: AnyArray) -> int:
    """The address of the first element."""
    return array.ptr if isinstance(array, DeviceArray) else int(array.__array_interface__["data"][0])
