"""Messages between two ranks: `fompi.send`, `fompi.recv` and `fompi.sendrecv`. No other rank takes part.

A message is a header and the data. The header holds dtype and shape, so the receiver needs to know neither. A small
message has its data in the header. MPI keeps the order of messages with one tag between two ranks. So a receiver reads
the headers of one sender and tag one after the other.

Each tag of the program has two tags of MPI, for headers and for data. They are below those of the payload of plans.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from time import perf_counter
from typing import Any

import numpy as np

from fompi.backends.half import storage
from fompi.backends.numbers import filled, for_numpy, stored
from fompi.base.call_options import DEFAULTS, CallOptions
from fompi.base.errors import (
    DtypeError,
    LayoutError,
    MismatchError,
    ShapeError,
    StateError,
    TensorError,
    WaitTimeout,
    in_words,
)
from fompi.base.layout import Extents, integer
from fompi.base.wires import wire_of
from fompi.engine.communicator import Carrier, Communicator
from fompi.engine.in_flight import EAGER_NBYTES
from fompi.engine.tasks import DONE, CallInFlight, Task
from fompi.mpi.transport import start_mpi
from fompi.ops.arguments import Arguments, Peers
from fompi.ops.message_forms import (
    HEADER,
    SIZE,
    Coded,
    PlainMemory,
    decoded,
    elements_of,
    fits,
    header_of,
    memory_for,
    said_of,
    shape_in,
)
from fompi.ops.messages_in_c import MessageForm, form_of, may_be_in_c
from fompi.ops.operation import Operation, communicator_of
from fompi.plans.plan import MESSAGE_BITS
from fompi.runtime.given import address_of
from fompi.runtime.native_run import drive_in_c
from fompi.tensors import dlpack
from fompi.tensors.dlpack import Tensor
from fompi.traces.trace import Event, Trace

Array = np.ndarray[Any, Any]

MOST_TAG = (1 << MESSAGE_BITS - 1) - 2
"""The largest tag of a message: tag t has the tags 2 t + 2 and 2 t + 3 of MPI. Strategies use this one."""

FETCHED = 2
"""The key of the copy from a device. Those of the header and of the data are False and True."""

_NUMPY = dlpack.borrow(np.empty(0))


class Mail:
    """The messages of one communicator: how many there were, and the receives whose header has not arrived."""

    def __init__(self) -> None:
        self.number = 0
        self.of_strategies: defaultdict[tuple[str, int], int] = defaultdict(int)  # (verb of the peer, peer) -> how many
        self.expected: defaultdict[tuple[int, int], deque[Any]] = defaultdict(deque)  # Receiving, or a call in C
        self.last: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}  # (source, tag) -> dtype and shape
        self.forms: dict[Any, MessageForm] = {}  # messages that C knows
        self.leaving: defaultdict[tuple[int, int], deque[Sending]] = defaultdict(deque)  # they wait for a device

    def next(self, verb: str, peer: int, tag: int) -> int:
        """Note a message that begins. Returns its stamp: a negative number, which no call has."""
        self.number += 1
        if tag == MOST_TAG:
            self.of_strategies[verb, peer] += 1
        return -self.number

    def opened(self, peer: int, tag: int) -> None:
        """The header of the first expected message is read: the next one is awaited."""
        queue = self.expected[peer, tag]
        queue.popleft()
        if queue:
            queue[0].await_header()
        else:
            del self.expected[peer, tag]

    def with_rank(self, peer: int) -> tuple[int, int]:
        """How many messages of strategies were sent to this rank, and how many were awaited from it."""
        return self.of_strategies["receive", peer], self.of_strategies["send", peer]


class _Message(Task):
    """One message in flight, at one of its two ends."""

    verb = ""
    awaits_start = True

    def __init__(self, comm: Communicator, peer: int, tag: int):
        self.comm, self.peer, self.tag = comm, peer, tag
        self.missing, self.nbytes = 0, 0
        self.begun = self.ended = 0.0
        self.then: Callable[[], object] | None = None  # called when the message is through
        self.held: object = None  # memory that C has used for it
        self.stamp = 0

    def _begin(self, name: str) -> None:
        self.moved_at = self.begun = perf_counter()
        self.stamp = mail_of(self.comm).next(self.verb, self.peer, self.tag)
        self.comm.channel.active[self.stamp] = self
        self.comm.note_start(name, self.stamp)

    def _post(self, call: Callable[[Any, int, int], Any], data: Any, is_data: bool) -> None:
        comm, tag = self.comm, 2 * self.tag + 2 + is_data
        most = comm.most_nbytes if is_data else len(data)
        view = memoryview(data)
        parts = [view[at : at + most] for at in range(0, len(view), most)]
        comm.engine.post_all([functools.partial(call, part, self.peer, tag) for part in parts], self, is_data)

    def _finish(self) -> None:
        self.comm.channel.active.pop(self.stamp, None)
        self.ended, self.finished = perf_counter(), True
        if self.then is not None and self.error is None:
            self.then()

    @property
    def event(self) -> Event:
        return _event(self.comm, self.verb, self.peer, self.tag, self.begun, self.ended, self.nbytes)

    def take_over(self, stamp: int, call: Any, held: object) -> Any:
        """Go on with the message where C has left it. Returns what `call.export` says."""
        self.stamp, self.begun, self.moved_at, self.held = stamp, call.started, call.moved_at, held
        self.comm.channel.active[stamp] = self
        return call.export()

    def _post_from_c(self, call: Any, requests: Sequence[tuple[int, int]], key: int) -> None:
        """Await the requests that C has left. Raises the error of MPI, if it has failed."""
        MPI = start_mpi()
        for handle, _ in requests:
            self.comm.engine.post(MPI.Request.fromhandle(handle), self, key)
        if call.error:
            raise MPI.Exception(call.error)

    def abandon(self, error: BaseException) -> None:
        if not self.finished:
            self.error = self.error or error
            self.comm.link.given_up += [*self.comm.engine.give_up(self), self.held]
            self._finish()

    def broke(self, error: Exception) -> None:
        self.comm.channel.fail(self, error)

    def stalled(self) -> None:
        if self.comm.channel.broken is not None:
            self.abandon(self.comm.channel.broken)

    def waits_for(self) -> tuple[int, str] | None:
        return self.peer, f"rank {self.peer} to {self.verb} the message with tag {self.tag} of rank {self.comm.rank}"


def _event(comm: Communicator, verb: str, peer: int, tag: int, begun: float, ended: float, nbytes: int) -> Event:
    """A message in a trace. `verb` is what the peer does."""
    sends = verb == "receive"
    lane, name = (f"send to {peer}", f"x>{peer}") if sends else (f"recv from {peer}", f"y<{peer}")
    return Event(comm.rank, lane, -1, f"{name} tag {tag}", begun, ended, nbytes)


def mail_of(comm: Communicator) -> Mail:
    """The messages of this communicator."""
    if comm.mail is None:
        comm.mail = Mail()
    mail: Mail = comm.mail
    return mail


class Sending(_Message):
    """Sends `tensor`, or why there is none."""

    verb = "receive"
    is_held = False  # True: its data waits for its turn (`fompi.engine.port`), or for a device
    fetched: Any = None  # its data on its way from a device (`Device.fetch`)
    _is_fetched = True

    def __init__(
        self, comm: Communicator, dest: int, tag: int, tensor: Tensor | Coded | None, refusal: Exception | None
    ):
        super().__init__(comm, dest, tag)
        if tensor is None or refusal is not None:
            self._refuse(refusal or TensorError("no tensor"))
            return
        array: Any = tensor.array
        shape = tensor.shape if type(tensor) is Coded else array.shape
        self.nbytes = array.nbytes
        self.header = header_of(tensor.dtype, shape, array.nbytes)
        if tensor.device is None:
            self._take(array)
        else:
            tensor.device.meet()
            self.fetched, self._is_fetched = tensor.device.fetch(array), False

    def _take(self, array: Array) -> None:
        """The data is here."""
        self.data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if len(self.header) + self.nbytes <= EAGER_NBYTES:
            self.header, self.data = self.header + self.data.tobytes(), self.data[:0]

    def _refuse(self, error: BaseException) -> None:
        """The peer gets the reason in place of the data."""
        words = in_words(error).encode()[: EAGER_NBYTES - HEADER.size]
        self.header, self.data = HEADER.pack(1, 0, len(words), b"") + words, np.empty(0, np.uint8)

    def start(self) -> None:
        """Messages with one tag leave in their order: those of the host too, behind one that waits for a device."""
        self._begin("send")
        leaving = mail_of(self.comm).leaving
        if self.fetched is None and (self.peer, self.tag) not in leaving:
            self._leave()
            return
        self.is_held = True
        leaving[self.peer, self.tag].append(self)
        if self.fetched is not None:
            self.comm.engine.launched(self.fetched, self, FETCHED)

    def ran(self, key: int, begun: float, error: BaseException | None) -> None:
        """The device has failed."""
        if error is not None:
            self.error = self.error or error
            self._refuse(error)
        self._arrived()

    def _arrived(self) -> None:
        """The data has come from the device: it leaves, and so do those that wait behind it."""
        self._is_fetched, self.moved_at = True, perf_counter()
        leaving = mail_of(self.comm).leaving
        queue = leaving[self.peer, self.tag]
        while queue and queue[0]._is_fetched:
            queue.popleft()._leave()
        if not queue:
            del leaving[self.peer, self.tag]

    def _leave(self) -> None:
        self.is_held = False
        if self.fetched is not None and self.error is None:
            self._take(self.fetched.get())
        isend, self.missing = self.comm.link.isend, 1 + bool(self.data.size)
        self._post(isend, self.header, False)
        if self.data.size and self.comm.urgency is not None:
            self.is_held = True
            self.comm.send_in_turn(isend, self.data, self.peer, 2 * self.tag + 3, self, True)
        elif self.data.size:
            self._post(isend, self.data, True)

    def take_over(self, stamp: int, call: Any, held: object) -> None:
        _, _, requests = super().take_over(stamp, call, held)
        self.missing = len(requests)
        self._post_from_c(call, requests, 0)
        if not requests:
            self._finish()

    def posted(self, key: int) -> None:
        self.is_held = False

    def waits_for(self) -> tuple[int, str] | None:
        return None if self.is_held else super().waits_for()

    def completed(self, key: int) -> None:
        if key == FETCHED:
            self._arrived()
            return
        self.moved_at = perf_counter()
        self.missing -= 1
        if not self.missing and not self.finished:
            self._finish()


class Receiving(_Message):
    """Receives an array into new memory, or into that of `out` if it fits."""

    verb = "send"

    def __init__(self, comm: Communicator, source: int, tag: int, out: Tensor | None):
        super().__init__(comm, source, tag)
        self.out, self.dtype, self.inbox = out, "", bytearray(EAGER_NBYTES)
        self.shape: tuple[int, ...] = ()
        self.array: Any = None

    def start(self) -> None:
        self._begin("recv")
        queue = self.comm.mail.expected[self.peer, self.tag]
        queue.append(self)
        if len(queue) == 1:
            self.await_header()

    def await_header(self) -> None:
        """It is the first of those that are expected from its rank."""
        self._post(self.comm.link.irecv, self.inbox, False)

    def take_over(self, stamp: int, call: Any, held: Any) -> None:
        """`held` is the packet, whose header has not been read, or the data, which is on its way to `array`."""
        _, times, requests = super().take_over(stamp, call, held)
        packet, array = held
        self.inbox = packet.packet
        begun, ended = np.frombuffer(times, np.float64).reshape(2, -1)
        if begun[-1]:  # the data
            self.array, self.nbytes, self.awaits_start = array, array.nbytes, False
            self.comm.mail.opened(self.peer, self.tag)
            self._post_from_c(call, requests, 1)
            if ended[-1]:  # since somebody has asked
                self._finish()
            return
        self.comm.mail.expected[self.peer, self.tag][0] = self
        self._post_from_c(call, requests, 0)
        if ended[0]:
            self.completed(0)

    def completed(self, key: int) -> None:
        self.moved_at = perf_counter()
        if self.finished:
            return
        if key:  # the data
            self._finish()
            return
        data = self._open()
        if data is not None:
            self.awaits_start = False
            self._post(self.comm.link.irecv, data, True)
        self.comm.mail.opened(self.peer, self.tag)
        if data is None:
            self._finish()

    def _open(self) -> Any:
        """Read the header. Returns the memory for the data, None if it has arrived with the header."""
        refused, ndim, nbytes, dtype = HEADER.unpack_from(self.inbox)
        at = HEADER.size + ndim * SIZE.size
        if refused:
            words = bytes(self.inbox[at : at + nbytes]).decode(errors="replace")
            self.error = MismatchError(f"{self._what()}: rank {self.peer} refuses to send it: {words}")
            return None
        self.shape = shape_in(self.inbox)
        self.dtype = dtype.rstrip(b"\0").decode()
        self.comm.mail.last[self.peer, self.tag] = self.dtype, self.shape
        self.array, self.nbytes = self._memory(), nbytes
        flat = memoryview(self.array.reshape(-1).view(np.uint8))
        if at + nbytes <= EAGER_NBYTES:
            flat[:] = self.inbox[at : at + nbytes]
            return None
        return flat

    def _memory(self) -> Array:
        out = self.out
        if out is not None:
            form = elements_of(self.dtype), self.shape
            if (out.dtype, out.array.shape) != form:
                kind = ShapeError if out.array.shape != self.shape else DtypeError
                given = f"out= is {out.dtype} {out.array.shape}"
                self.error = kind(f"{self._what()}: {given}, but rank {self.peer} sends {form[0]} {self.shape}")
            elif out.device is None and out.array.flags.c_contiguous and self.dtype == out.dtype:
                return out.array
        return memory_for(self.comm, self.dtype, self.shape)

    def _what(self) -> str:
        return f"recv on rank {self.comm.rank} of the message with tag {self.tag} from rank {self.peer}"

    def result(self, like: Tensor) -> Any:
        """The array as a tensor of the framework of `like`, or `out`."""
        return _result(self.comm, (self.array, self.dtype, self.shape), self.out, like)


def _result(comm: Communicator, received: tuple[Array, str, tuple[int, ...]], out: Tensor | None, like: Tensor) -> Any:
    """What has been received as a tensor. On a device it is there in the order of the caller's current stream."""
    array, wired, shape = received
    device = (out or like).device
    array, dtype = decoded(comm, array if device is None else device.upload(array), wired, shape)
    if device is not None:
        device.meet()
    if out is None:
        return dlpack.lend(stored(array), dtype, like)
    dlpack.mark_written(out.owner)
    if array is not out.array:
        for_numpy(out.array)[...] = array
    return out.owner


class Delivered(Task):
    """A message that C has carried out."""

    finished = True

    def __init__(self, event: Callable[[], Event], stamp: int):
        self._event, self.stamp = event, stamp

    @property
    def event(self) -> Event:
        return self._event()


AHEAD = object()
"""Stands for a receive in C among those that are expected."""


class Transfer(CallInFlight):
    """A `send`, `recv` or `sendrecv` in flight, made by `.start(...)`. It is used as a `Pending`."""

    _refusal: Exception | None = None
    _out: Tensor | None = None
    _sending: Any = None  # Sending, or a call in C, then Delivered
    _receiving: Any = None  # Receiving, or the same
    _received: tuple[Any, str, tuple[int, ...]] = (None, "", ())  # to which C receives: the array, and what it holds
    _owner: Any = None  # the tensor of the program that has its memory, if no array has

    def __init__(
        self,
        name: str,
        arguments: Arguments,
        comm: Any,
        wire: str | None,
        refusal: Exception | None,
        waits: bool = False,
    ):
        communicator, wrong = communicator_of(comm)
        self._name, self._comm, self._peers = name, communicator, arguments.peers or Peers()
        self._x: Tensor | None = None
        self._sent: Tensor | Coded | None = None  # x as it travels
        self._like = _NUMPY
        dest, source, tag = _checked(name, self._peers, communicator)
        refusal = wrong or refusal
        try:
            if refusal is None:
                self._take(arguments, wire if dest is not None else None)
        except Exception as error:
            refusal = error
        self._refusal = refusal
        with communicator.engine.lock:
            communicator.hear()
            begun: list[Any] = []
            if dest is not None and not self._sends_in_c(dest, tag):
                self._sending = Sending(communicator, dest, tag, self._sent, refusal)
                begun.append(self._sending)
            # What Python sends begins below. So C must not wait for what the other rank sends likewise.
            if source is not None and not self._receives_in_c(source, tag, waits and not begun):
                self._receiving = Receiving(communicator, source, tag, None if refusal else self._out)
                begun.append(self._receiving)
            for task in begun:
                if (communicator.recording is not None or communicator.engine.recorder is not None) and not refusal:
                    task.then = functools.partial(self._note, communicator.recording, task)
                task.start()
        self.number = -communicator.mail.number if communicator.mail else 0
        self.extents = Extents(communicator.rank, communicator.size, (1,))

    @classmethod
    def in_c(cls, comm: Communicator, sends: bool, peer: int, tag: int, plain: PlainMemory) -> Transfer | None:
        """A `send` of this memory, or a `recv` to it, in C. None: nothing has begun."""
        comm.check()
        if not 0 <= peer < comm.size:
            return None
        made = cls.__new__(cls)
        made._name, made._comm = "send" if sends else "recv", comm
        made._like, made._owner = _NUMPY, None if sends else plain.held
        with comm.engine.lock:
            comm.hear()
            begins = made._begins_in_c(sends, peer, tag, plain)
        return made if begins else None

    @property
    def is_through(self) -> bool:
        """True once its messages are through, without an error. Progresses nothing."""
        return all(task.finished and task.error is None for task in self._tasks)

    def _take(self, arguments: Arguments, wire: str | None) -> None:
        """Borrow the tensors of the call."""
        if self._name != "recv":
            self._x = self._sent = self._like = x = dlpack.borrow(arguments.x)
            if wire is not None and (known := wire_of(wire, x.dtype)):
                self._sent = Coded.of(x, known)
        elif arguments.peers is not None and arguments.peers.like is not None:
            self._like = dlpack.borrow(arguments.peers.like, "like")
        if arguments.out is not None:
            self._out = dlpack.borrow(arguments.out, "out")
            if self._out.readonly:
                raise TensorError(f"{self._name}: out= is read-only")
            if self._x is not None and dlpack.overlap(self._x.array, self._out.array):
                raise TensorError(f"{self._name}: out= shares memory with x")

    def _sends_in_c(self, dest: int, tag: int) -> bool:
        """Send in C. False: nothing has begun."""
        x, mail = self._sent, self._comm.mail
        if mail is not None and (dest, tag) in mail.leaving:
            return False
        if self._refusal is not None or x is None or x.device is not None or not x.array.flags.c_contiguous:
            return False
        plain = PlainMemory(*said_of(x), address_of(x.array), x.array, lambda: x)
        return self._begins_in_c(True, dest, tag, plain)

    def _receives_in_c(self, source: int, tag: int, waits: bool) -> bool:
        """Receive in C. False: nothing has begun."""
        comm, out = self._comm, self._out
        if self._refusal is not None:
            return False
        known = mail_of(comm).last.get((source, tag))
        is_direct = out is not None and (known is None or known[0] == out.dtype or not fits(known, out))
        if is_direct:
            if out.device is not None or not out.array.flags.c_contiguous:  # type: ignore[union-attr]
                return False
            known = out.dtype, out.array.shape  # type: ignore[union-attr]
        if known is None:
            return False
        dtype, shape = known
        try:
            array = out.array if is_direct else memory_for(comm, dtype, shape)  # type: ignore[union-attr]
        except MemoryError:
            return False
        header = header_of(dtype, shape, array.nbytes)
        plain = PlainMemory(dtype, header, array.nbytes, address_of(array), array, lambda: out)
        if not self._begins_in_c(False, source, tag, plain, waits):
            return False
        self._received = array, dtype, shape
        return True

    def _begins_in_c(self, sends: bool, peer: int, tag: int, plain: PlainMemory, waits: bool = False) -> bool:
        """Send or receive this memory in C. The engine is locked. False: nothing has begun."""
        dtype, header, nbytes, address, held, borrow = plain
        comm, mail = self._comm, mail_of(self._comm)
        if not may_be_in_c(comm, peer, nbytes) or (not sends and mail.expected.get((peer, tag))):
            return False
        form = form_of(comm, mail.forms, sends, peer, tag, header, nbytes)
        verb, name = ("receive", "send") if sends else ("send", "recv")
        stamp = mail.next(verb, peer, tag)
        comm.note_start(name, stamp)
        begun = perf_counter()

        def arrived(call: Any = None) -> None:
            ended = perf_counter() if call is None else call.moved_at
            self._set(sends, Delivered(lambda: _event(comm, verb, peer, tag, begun, ended, nbytes), stamp))
            if comm.engine.recorder is not None:
                comm.engine.recorder.note_message(comm, stamp, (verb, peer, tag, nbytes), begun, ended)
            if not sends:
                mail.opened(peer, tag)

        def take_over(packet: Any) -> Task:
            tensor: Any = borrow()
            message: Any = Sending(comm, peer, tag, tensor, None) if sends else Receiving(comm, peer, tag, tensor)
            self._set(sends, message)
            if comm.engine.recorder is not None:
                message.then = functools.partial(self._note, None, message)
            if not sends:
                message.dtype, message.shape = dtype, shape_in(header)
            try:
                message.take_over(stamp, packet.call, (packet, held))
            except Exception as error:  # MPI has failed
                comm.channel.fail(message, error)
            return message

        if not sends:
            mail.expected[peer, tag].append(AHEAD)
        self._set(sends, None)
        task = form.begin(stamp, address, held, take_over, arrived, waits)
        if task is DONE:
            arrived()
        elif (self._sending if sends else self._receiving) is None:  # else it has ended, or Python goes on with it
            self._set(sends, task)
        return True

    def _set(self, sends: bool, task: Any) -> None:
        """What carries out this message now."""
        if sends:
            self._sending = task
        else:
            self._receiving = task

    @property
    def _tasks(self) -> list[Any]:
        return [task for task in (self._receiving, self._sending) if task is not None]

    @property
    def task(self) -> Any:
        """The message that is not through yet. DONE: both are."""
        return next((task for task in self._tasks if not task.finished), DONE)

    def _note(self, recording: list[Trace] | None, through: _Message) -> None:
        """Note a message, and record the call once both of its messages are through."""
        if self._comm.engine.recorder is not None:
            what = through.verb, through.peer, through.tag, through.nbytes
            self._comm.engine.recorder.note_message(self._comm, through.stamp, what, through.begun, through.ended)
        if recording is not None and all(task.finished and task.error is None for task in self._tasks):
            recording.append(self._traced())

    def _traced(self) -> Trace:
        events = tuple(task.event for task in self._tasks)
        return Trace("measured", self._name, events, progress=self._comm.engine.progress_mode)

    @property
    def trace(self) -> Trace:
        """The Trace of a finished call on this rank."""
        if not self._tasks or not all(task.finished for task in self._tasks):
            raise StateError(f"fompi.{self._name} has moved no message: there is no trace")
        return self._traced()

    def give_up(self) -> None:
        """End a `recv` whose message nobody will send: cancel it. The communicator may be closed then."""
        kept: list[Any] = self._comm.link.given_up
        with self._comm.engine.lock:
            before = len(kept)
            for task in self._tasks:
                task.abandon(StateError(f"fompi.{self._name} was given up"))
            requests = [each[0] for each in kept[before:] if isinstance(each, tuple) and hasattr(each[0], "Cancel")]
            for request in requests:
                request.Cancel()
            if all([request.Test() for request in requests]):
                del kept[before:]

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the result. Raises the error of the call, and WaitTimeout after `timeout` seconds (it goes on)."""
        end = None if timeout is None else perf_counter() + timeout
        for each in self._tasks if self._comm.engine.recorder is not None else ():
            self._comm.engine.recorder.awaited(self._comm, each.stamp)
        while not (task := self.task).finished:
            drive_in_c(task)
            seconds = None if end is None else max(0.0, end - perf_counter())
            if not self._comm.engine.wait(task, self._comm.channel, seconds):
                raise WaitTimeout(f"fompi.{self._name} is not finished after {timeout:g} s; it goes on")
        return self.result

    @property
    def result(self) -> Any:
        """The result of a finished call. Raises its error, and StateError while it is in flight."""
        tasks = self._tasks
        if not all(task.finished for task in tasks):
            raise StateError(f"fompi.{self._name} is in flight: call wait() or done() first")
        for error in (self._refusal, *(task.error for task in tasks)):
            if error is not None:
                raise error
        if isinstance(self._receiving, Delivered):
            if self._owner is not None:
                return self._owner
            return _result(self._comm, self._received, self._out, self._like)
        if self._receiving is not None:
            return self._receiving.result(self._like)
        return _zeros_like(self._x) if self._name == "sendrecv" and self._x is not None else None


def catch_up(comm: Communicator, peer: int, sent: int, received: int, refusal: Exception) -> None:
    """Rank `peer` has sent and awaited this many messages of strategies: await and refuse those missing here."""
    with comm.engine.lock:
        mine_sent, mine_received = comm.begun_with(peer)[1:]
        for _ in range(received - mine_sent):
            Sending(comm, peer, MOST_TAG, None, refusal).start()
        for _ in range(sent - mine_received):
            Receiving(comm, peer, MOST_TAG, None).start()


def sender(comm: Communicator, tag: int) -> int | None:
    """A rank whose message with this tag has arrived, and that no receive waits for. None: there is no such rank."""
    return comm.link.sender(2 * tag + 2)


def _zeros_like(x: Tensor) -> Any:
    zeros = filled(x.array.shape, storage(x.dtype), 0, for_numpy(x.array))
    if x.device is not None:
        x.device.meet()
    return dlpack.lend(stored(zeros), x.dtype, x)


FORMS = {"send": "send(x, dest, tag)", "recv": "recv(source, tag)", "sendrecv": "sendrecv(x, dest, source, tag)"}
"""How the calls are written, for errors."""


def _checked(name: str, peers: Peers, comm: Communicator) -> tuple[int | None, int | None, int]:
    """The ranks and the tag as integers. Raises LayoutError on this rank only: no other rank is known to wait."""
    comm.check()
    ranks: list[int | None] = []
    for word, rank in (("dest", peers.dest), ("source", peers.source)):
        number = integer(rank)
        if rank is not None and (number is None or not 0 <= number < comm.size):
            form = "" if number is not None else f": write fompi.{FORMS[name]}"
            raise LayoutError(f"{name}: {word}={rank!r:.60} must be a rank from 0 to {comm.size - 1}{form}")
        ranks.append(number)
    tag = integer(peers.tag)
    if tag is None or not 0 <= tag <= MOST_TAG:
        raise LayoutError(f"{name}: tag={peers.tag!r} must be an integer from 0 to {MOST_TAG}")
    return ranks[0], ranks[1], tag


class Messenger(Operation[Any]):
    """A public operation of two ranks. It has neither a plan nor an agreement of all ranks."""

    def __init__(self, arguments: Callable[..., Arguments]):
        functools.update_wrapper(self, arguments)
        self.name, self._arguments = arguments.__name__, arguments
        own = signature(arguments)
        if self.name != "recv":
            wire = Parameter("wire", Parameter.KEYWORD_ONLY, default=None, annotation="str | None")
            own = own.replace(parameters=[*own.parameters.values(), wire])
        self.__signature__, self._keywords = own, own.parameters.keys()

    def read(self, args: tuple[Any, ...], options: Any) -> tuple[Arguments, Any, CallOptions]:
        if type(options.get("comm")) is Carrier:
            options = self.with_carried(args, options)
        comm = options.pop("comm", None)
        how = CallOptions(wire=options.pop("wire")) if "wire" in options and self.name != "recv" else DEFAULTS
        return self._own(args, options), comm, how

    def refuse(self, error: Exception, comm: Any) -> None:
        raise error

    def begin(self, arguments: Arguments, comm: Any, call_options: CallOptions) -> Any:
        return self._transfer(arguments, comm, call_options)

    def _finished(self, arguments: Arguments, comm: Any, call_options: CallOptions) -> Any:
        return self._transfer(arguments, comm, call_options, waits=True).wait()

    def _transfer(self, arguments: Arguments, comm: Any, call_options: CallOptions, waits: bool = False) -> Transfer:
        refusal = None
        if dlpack.requires_grad(arguments.x):
            instead = "call fompi.sendrecv(...)" if self.name == "sendrecv" else "use fompi.sendrecv"
            refusal = TensorError(f"fompi.{self.name} has no gradient here: {instead}, or pass x.detach()")
        return Transfer(self.name, arguments, comm, call_options.wire, refusal, waits)

    def is_differentiable(self, arguments: Arguments) -> bool:
        return self.name == "sendrecv" and super().is_differentiable(arguments)


@Messenger
def send(x: Any, dest: int, tag: int = 0, *, comm: Any = None) -> Arguments:
    """comm.send(x, dest, tag)  # as in mpi4py

    x has any shape and dtype. It may be strided. Only this rank and `dest` take part, and rank `dest` calls
    `fompi.recv(source, tag)`. Messages with one tag between two ranks arrive in the order in which they were sent.

    `wire` is the form in which the message carries the elements (`fompi.base.wires`). The receiver reads it from the
    message.

    Returns None once x may be written again. That may be after `dest` has received it: use `send.start` or `sendrecv`
    where two ranks send to each other.
    A tensor that is refused here is a MismatchError of `fompi.recv` on `dest`. It has no gradient: use `sendrecv`.
    Raises LayoutError if `dest` is not a rank or `tag` is not from 0 to 2046, and WaitTimeout after FOMPI_TIMEOUT.
    """
    return Arguments(x, peers=Peers(dest, None, tag))


@Messenger
def recv(source: int, tag: int = 0, *, like: Any = None, out: Any = None, comm: Any = None) -> Arguments:
    """y = comm.recv(source, tag)

    y has the shape and the dtype of the tensor that rank `source` sends with `fompi.send(x, dest, tag)`. It is a
    tensor of the framework and the device of `like`, by default a NumPy array. With `out`, y is written there, and
    `out` is returned.

    Raises LayoutError if `source` is not a rank or `tag` is not from 0 to 2046, MismatchError if the sender refuses its
    tensor, ShapeError or DtypeError if `out` is another one than was sent, and WaitTimeout after FOMPI_TIMEOUT.
    """
    return Arguments(None, out=out, peers=Peers(None, source, tag, like))


@Messenger
def sendrecv(
    x: Any, dest: int | None, source: int | None, tag: int = 0, *, out: Any = None, comm: Any = None
) -> Arguments:
    """comm.send(x, dest, tag); y = zeros_like(x) if source is None else comm.recv(source, tag)

    Both at once, so that a ring of ranks does not wait for itself. x has any shape and dtype. y has those of the tensor
    that rank `source` sends, and the framework of x. None is no rank: the ends of a line have one neighbour only.
    `wire` is the form in which the message of this rank carries the elements (`fompi.base.wires`).

    It has a gradient: the backward is `sendrecv(dy, source, dest)`, with the same wire. All ranks of a ring or line
    must run it.
    Raises the errors of `send` and `recv`.
    """
    return Arguments(x, out=out, peers=Peers(dest, source, tag))
