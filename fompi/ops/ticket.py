"""An unbound call that was made before, as one call in C: the agreement, then the plan that followed from it.

All that a call decides follows from the headers of all ranks, and from what this rank has checked of its own tensors.
So the first call of a form leaves a `Ticket`. From the second one on C exchanges the headers, sees that they are those
of the last time, and carries out the plan. If they differ, if a rank fails or is long silent, Python goes on with the
call, as if it had begun it.

    task = ticket.begin(...)  # DONE: C has finished the call. A TicketInC: it goes on. None: nothing has begun
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from math import prod
from operator import itemgetter
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fompi.base.errors import WaitTimeout
from fompi.base.layout import CARRIERS, ITEMSIZE, Extents, Slices
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import HEADER_NBYTES, VALUE_BITS, Agreement, carried, packet_nbytes, presumption
from fompi.engine.in_flight import FINISHED, HAS_KERNELS
from fompi.engine.tasks import DONE, HANDSHAKE, CallInFlight, Sent, Task
from fompi.ops.arguments import MOST_ROWS, Arguments, LocalCall, names_of
from fompi.planner.choose import encode_rows
from fompi.plans.plan import MESSAGE_BITS
from fompi.plans.rows import extents_of
from fompi.runtime.compiled import Compiled
from fompi.runtime.given import MOST_KNOWN, address_of
from fompi.runtime.lower import Agreed, Headers, starts_of, table, with_agreement
from fompi.runtime.native_run import (
    IN_C_SECONDS,
    NO_KERNELS,
    STALL_SECONDS,
    InC,
    PythonKernels,
    arrays_at,
    drive_in_c,
    is_for_c,
    made_call,
    seconds_in_c,
    taken_over,
)
from fompi.runtime.program import Run
from fompi.schedules.registry import SCHEDULES
from fompi.tensors import dlpack

Array = np.ndarray[Any, Any]

MOST_TICKETS = 512
"""A communicator finds tickets by this many forms and keys of calls. One that was not used for long makes room."""

MOST_IN_FLIGHT = 16
"""The calls of one form that may be in flight in C. Others run in Python."""

Note = Callable[[int, Any, float | None], object]

NOTHING: Mapping[str, Any] = MappingProxyType({})


def form_of(
    comm: Communicator, local: LocalCall, arguments: Arguments, schedule: str = "auto", slices: Slices | None = None
) -> Hashable | None:
    """What two calls have in common whose agreement has the same headers. None: such a call never runs in C."""
    if comm.size == 1 or local.device is not None or local.runs or local.packing is not None:
        return None
    counts = arguments.counts
    if counts is not None and local.problem.moves == "all_to_all" and len({*counts}) > 1:
        return None  # they are others at every call
    if comm.urgency is not None or comm.library is None:
        return None
    if comm.backend is not None and (local.in_place or not is_for_c(comm.backend)):
        return None
    where = "new" if local.out is None else "over x" if local.in_place else "out"
    arriving = None if arguments.arriving is None else tuple(arguments.arriving)
    compared = local.rows, local.expects, arriving, arguments.words
    place = local.shape, local.dim, local.split, local.like.framework, where
    return local.problem, local.packed, *place, *compared, schedule, slices


def keep(cache: dict[Any, Any], most: int, key: Hashable, value: Any) -> None:
    """Enter a value into a cache. The oldest one that was not `used` since it was looked at last makes room.

    The engine is locked: other threads begin calls, too.
    """
    while len(cache) >= most:
        oldest = next(iter(cache))
        candidate = cache.pop(oldest)
        if candidate.used:
            candidate.used = False
            cache[oldest] = candidate
    cache[key] = value


class KnownCall(NamedTuple):
    """A call as far as its key goes: its tensors, and `out`, are at these addresses."""

    key: Hashable
    tensors: tuple[Any, ...]
    addresses: tuple[int, ...]
    out: Any
    out_at: int
    counts: tuple[int, ...] | None = None  # of an all-to-all: they are not in the key, nor are the rows of x


class Lowered(NamedTuple):
    """A ticket as C needs it. `kernels`: the ops of the program that Python runs; `unplaced`: their own buffers.

    `headers`: those that this rank sends, and those that must arrive.
    """

    agreed: Agreed
    presumed: int
    headers: tuple[Array, Array]
    kernels: list[int]
    unplaced: frozenset[str]


class Memory:
    """What a call in C works on besides the tensors of the program. Each call in flight has one of its own."""

    def __init__(self, ticket: Ticket, made: Lowered):
        comm, table, packet = ticket.comm, made.agreed.table, packet_nbytes(ticket.comm.size)
        self.call = made_call(comm.library, table, comm, ticket.program, ticket.sized)
        self.headers = np.zeros((3, comm.size, packet), np.uint8)
        self.fields = self.headers.view(np.int64)[:, :, : HEADER_NBYTES // 8]
        own, expected = made.headers
        self.fields[:] = own, expected, expected
        self.bases = np.zeros(len(table.buffers), np.uint64)
        shapes, arena, buffers = ticket.sized.shapes, comm.engine.arena, ticket.program.buffers
        names = [*buffers]
        self.kept = {name: ticket.backend.empty(arena, shapes[name], buffers[name].dtype) for name in ticket.kept}
        for name, array in self.kept.items():
            self.bases[names.index(name)] = address_of(array)
        self.bases[-3:] = [part.ctypes.data for part in self.headers]
        self.call.place(self.bases)
        self.call.form(np.array([*ticket.given.values()], np.int32), len(self.headers), packet)
        self.kernels: dict[tuple[int, ...], PythonKernels] = {}  # by the addresses of the other buffers
        self.sized, self.extents, self.is_sized = ticket.sized, ticket.extents, True
        self.counts: Sequence[int] = ()  # of a call whose rows differ
        self.addresses: tuple[int, ...] = ()  # of its buffers, with that of its result


class Ticket:
    """What the ranks have decided about a call of one form on one communicator. With it C makes such a call again.

    The tensors of a call are `tensors` by name, in their order, then the result.
    """

    used = False  # True if a call was made by it since the cache has looked
    is_dropped = False  # True: calls of its form run in Python
    is_worked_out = False
    last_stamp = 0
    rows_differ = False
    _ends: Callable[..., bool]  # goes on with a call whose rows differ. True: C has finished it

    def __init__(
        self,
        name: str,
        comm: Communicator,
        arguments: Arguments,
        local: LocalCall,
        agreement: Agreement,
        program: Compiled,
        extents: Extents,
        backend: Any,
    ):
        self.name, self.comm, self.program, self.extents, self.backend = name, comm, program, extents, backend
        self._chosen = backend if comm.backend is backend else None  # that of the communicator, which may change
        self.in_place, self.over_x = local.in_place, local.in_place and not program.plan.problem.over_x
        self.schedule, self.schedules = program.plan.schedule, len(SCHEDULES)
        self.generator = SCHEDULES.get(self.schedule)
        self.tensors = names_of(local.problem, arguments)
        self.result = program.outputs[0].name if program.outputs else ""
        is_kept = ("scratch", "output") if self.over_x else ("scratch",)  # a result that is copied to x at the end
        self.kept = [buffer.name for buffer in program.program.buffers if buffer.role in is_kept]
        self.given = {name: at for at, name in enumerate(program.buffers) if name not in self.kept}
        self._shape, self._framework = local.shape, local.like.framework
        self._headers = b"".join(agreement.headers()), agreement.headers_in
        self._free: list[Memory] = []
        self._in_flight = 0

    def work_out(self) -> None:
        """What follows, at the second call of a form: many calls are not made again.

        The attributes are plain ones: each costs a call less than a property would.
        """
        if self.is_worked_out:
            return
        program, names = self.program, (*self.tensors, self.result)
        self.sized = sized = program.sized(self.extents)
        self.is_small = program.is_small(sized)
        self.lowered = self._lowered()
        self.front = 0 if self.lowered is None else self.lowered.agreed.front  # so many ops of a call agree, first
        shapes, buffers = sized.shapes, program.buffers
        *self._nbytes, self._y_nbytes = (
            prod(shapes[name]) * ITEMSIZE[buffers[name].dtype] if name in shapes else 0 for name in names
        )
        if len(program.outputs) == 1 and {*names} >= self.given.keys():  # else no call finds it by a key
            self.make = self._maker()
            places = [0 if name == self.result and self.in_place else names.index(name) for name in self.given]
            self._in_order = (lambda addresses: (addresses[places[0]],)) if len(places) == 1 else itemgetter(*places)
        self.is_worked_out = True

    def _lowered(self) -> Lowered | None:
        """None: C does not know some op of the plan."""
        program, comm = self.program, self.comm
        plan = None if program.is_opaque or len(program.outputs) != 1 else table(program, self.sized, comm.most_nbytes)
        if plan is None:
            self.is_dropped = True
            return None
        in_place = self.over_x and "y" in plan.buffers
        own, expected = (np.frombuffer(each, np.int64).reshape(comm.size, -1).copy() for each in self._headers)
        carries = self.is_small and program.plan.problem.moves != "all_to_all"  # else headers differ between receivers
        presumed = presumption(expected.tolist()) if carries else 0
        headers = Headers(HEADER_NBYTES, packet_nbytes(comm.size), HANDSHAKE, presumed, self.rows_differ)
        agreed = with_agreement(plan, comm.rank, comm.size, headers, in_place)
        own[:, -1] = agreed.carries
        unplaced = plan.unplaced - ({"x", "y"} if in_place else set())
        return Lowered(agreed, presumed, (own, expected), plan.in_python, unplaced)

    def _maker(self) -> Callable[[], Any]:
        """What makes the memory of a new result, as a tensor of the framework of x."""
        problem, shapes = self.program.plan.problem, self.sized.shapes
        shape = problem.result_shape(self._shape, self.comm.rank) if problem.flat else shapes[self.result]
        dtype, framework, arena = self.program.buffers[self.result].dtype, self._framework, self.comm.engine.arena
        storage, is_small = dlpack.STORAGE[dtype], prod(shape) * ITEMSIZE[dtype] <= arena.small_nbytes
        if framework == "torch" and is_small:
            torch = sys.modules["torch"]
            empty, kind = torch.empty, getattr(torch, dtype)
            return lambda: empty(shape, dtype=kind)
        if framework == "numpy" and dtype not in CARRIERS:
            if is_small:
                return lambda: np.empty(shape, storage)
            return lambda: arena.take(shape, storage)
        return lambda: dlpack.lend(arena.take(shape, storage), dtype, framework)

    # -- calls by a key of their arguments (`fompi.ops.keys`): contiguous tensors of the host, and a new result or out=
    def enter(self, form: Hashable) -> None:
        """Let calls of this form, or with this key, find the ticket."""
        with self.comm.engine.lock:  # several threads may wait for calls
            keep(self.comm.tickets, MOST_TICKETS, form, self)

    def learn(self, arguments: Arguments, local: LocalCall) -> None:
        """Let calls like this one find the ticket by their key, if it says all that they need."""
        if arguments.known.counts is None and self._is_said_by(arguments.known, arguments, local):
            self.enter(arguments.known.key)

    def _is_said_by(self, known: KnownCall, arguments: Arguments, local: LocalCall) -> bool:
        """True if the addresses of the tensors are all that such a call needs.

        Then it works on these very tensors, and the result is all that it returns.
        """
        given, tensors = arguments.tensors, known.tensors
        if len(given) != len(tensors) or not all(a is b for a, b in zip(given, tensors, strict=True)):
            return False
        if local.dim or local.split >= 0 or local.packed or len(self.program.outputs) != 1:
            return False
        is_result = local.out is not None or arguments.result({self.result: self}) is self
        if not is_result or not {*self.tensors, self.result} >= self.given.keys():
            return False
        for name, tensor in zip(self.tensors, given, strict=True):
            array, mine = local.arrays.get(name), dlpack.borrow(tensor, name).array
            if name in self.given and (
                array is None or array.size != mine.size or address_of(array) != address_of(mine)
            ):
                return False
        return True

    def run(self, call: KnownCall, describe: Callable[[], Any]) -> tuple[Any, Any]:
        """Begin a call for which the program waits. Returns what `begin` does, and the result."""
        if not self.is_worked_out:
            self.work_out()
        (_, tensors, addresses, y, y_at, _), is_new = call, call.out is None
        if is_new:
            try:
                y = self.make()
            except Exception:  # the call fails in Python, where the other ranks hear of it
                return None, None
            y_at = address_of(y) if type(y) is np.ndarray else y.data_ptr()
        task = self.begin_at(addresses, y_at, (tensors, y), describe, True, is_new)
        if not is_new and task is not None:
            dlpack.mark_written(y)
        return task, y

    def begin_at(
        self,
        addresses: tuple[int, ...],
        y_at: int,
        held: tuple[Any, Any],
        describe: Callable[[], Any],
        waits: bool,
        is_new: bool = False,
    ) -> Any:
        """Begin a call on tensors at these addresses, with the result at `y_at`. As `begin`.

        `held` are the tensors and the result. `is_new`: its memory is new. Else it must share none with a tensor.
        """
        if not (is_new or self.in_place):
            end = y_at + self._y_nbytes
            for at, n in zip(addresses, self._nbytes):  # noqa: B905  # as many, and `strict` costs as much as the comparison
                if at < end and y_at < at + n:
                    return None
        return self.begin(self._in_order((*addresses, y_at)), held, describe, waits)

    # -- all calls
    def places(self, arrays: Mapping[str, Array]) -> tuple[tuple[int, ...], dict[str, Array]] | None:
        """The addresses of these arrays as `begin` takes them, and those that are strided. None: C needs one of these.

        0 stands for the address of an array that only kernels of Python use.
        """
        if self.lowered is None:
            return None
        strided = {name: arrays[name] for name in self.given if not arrays[name].flags.c_contiguous}
        if not strided.keys() <= self.lowered.unplaced:
            return None
        return tuple([0 if name in strided else address_of(arrays[name]) for name in self.given]), strided

    def begin(
        self,
        addresses: tuple[int, ...],
        held: Any,
        describe: Callable[[], Any],
        waits: bool,
        note: Note | None = None,
        strided: Mapping[str, Array] = NOTHING,
    ) -> Any:
        """Begin a call on memory at these addresses, those of `given`.

        DONE: C has finished it. A TicketInC: it goes on. None: nothing has begun, and Python must do the call.

        `held` is the memory of the call, kept until it is finished; the last of it is its result. If Python goes on
        with the call, it does so as what `describe()` returns: its `take_over(flight)` is the task from then on.
        `note` gets the number of a call that C has finished, the `Call`, which has its times, and when the program went
        on (None: it waited). Without a `note`, FOMPI_RECORD has one. `strided`: see `places`.
        """
        comm = self.comm
        engine, channel = comm.engine, comm.channel
        if self.is_dropped or comm.backend is not self._chosen or comm.urgency is not None:
            return None
        if len(SCHEDULES) != self.schedules or SCHEDULES.get(self.schedule) is not self.generator:
            return None  # "auto" may choose another one now
        with engine.lock:
            if note is None and (comm.recording is not None or engine.report is not engine.recorder):
                return None
            if channel.failures or channel.lost is not None or channel.owed is not None:
                return None
            memory = self._free.pop() if self._free else self._memory()
            if memory is None:
                return None
            if note is None and engine.recorder is not None:
                note = partial(self._record, memory)
            self.used, call = True, memory.call
            stamp, slot = self.last_stamp, _ = comm.next_call()
            comm.note_start(self.name, stamp)
            seconds = seconds_in_c(engine, waits, self.is_small)
            is_finished = False
            try:
                state = call.run_on(slot << MESSAGE_BITS, seconds, STALL_SECONDS, stamp, addresses)
                is_finished = state == FINISHED or (self.rows_differ and self._ends(memory, state, addresses, held))
            finally:
                if not is_finished:
                    self._in_flight += 1
                    memory.bases[[*self.given.values()]] = memory.addresses or addresses
                    kernels = self._kernels(memory, addresses, strided)
                    flight = TicketInC(self, memory, stamp, kernels, describe, held, note, strided)
                    flight.awaited, flight.forwards = waits, self.program.forwards
                    flight.is_long = self.program.is_long(memory.sized)
                    flight.returned_at = None if waits else perf_counter()
                    flight.moved()
                    if not memory.is_sized:
                        flight.heir()
            if is_finished:
                channel.begun[0] = stamp
                if note is not None:
                    note(stamp, call, None if waits else call.moved_at)
                self._free.append(memory)
                return DONE
            return flight

    def _record(self, memory: Memory, stamp: int, call: Any, returned_at: float | None) -> None:
        where = self.comm, self.program, memory.extents
        self.comm.engine.recorder.note_in_c(where, self.front, stamp, call, returned_at)

    def _memory(self) -> Memory | None:
        """Memory for one more call in flight. None: C does not know the plan, or there is none."""
        if self._in_flight >= MOST_IN_FLIGHT or self.lowered is None:
            return None
        try:
            return Memory(self, self.lowered)
        except MemoryError:
            return None

    def _kernels(self, memory: Memory, addresses: tuple[int, ...], strided: Mapping[str, Array]) -> PythonKernels:
        """What Python runs in a call on this memory. It is kept: the same few tensors are given again and again."""
        assert self.lowered is not None
        if not (ops := self.lowered.kernels):
            return NO_KERNELS
        kernels = None if strided else memory.kernels.get(addresses)
        if kernels is None:
            arrays, front = self.arrays(memory, strided), self.front
            actions = self.program.resolve(arrays, self.sized.starts, self.backend, only=ops)
            follows = self.program.follows if self.program.asynchronous else None
            kernels = PythonKernels(
                {front + op: action for op, action in zip(ops, actions, strict=True)}, follows, front
            )
            if not strided:
                if len(memory.kernels) >= MOST_KNOWN:
                    memory.kernels.clear()
                memory.kernels[addresses] = kernels
        return kernels

    def arrays(self, memory: Memory, strided: Mapping[str, Array]) -> dict[str, Array]:
        """The buffers of a call. They keep no memory alive."""
        return {**arrays_at(self.program, memory.sized.shapes, memory.bases), **strided}

    def left(self, memory: Memory | None = None) -> None:
        """C has left a call in flight. If it has finished it, another one may have this memory."""
        self._in_flight -= 1
        if memory is not None:
            self._free.append(memory)


class CountsTicket(Ticket):
    """Of an all-to-all whose counts differ. C compares all but the rows, which then say what Python must allocate."""

    rows_differ = True

    def _lowered(self) -> Lowered | None:
        made = super()._lowered()
        if made is None or made.kernels or self.kept or made.headers[1][:, 3].max() >= 0 or {*self.given} != {"x", "y"}:
            self.is_dropped = True
            return None
        own, self._hint = made.headers[0], int(made.headers[0][0, 2]) >> VALUE_BITS
        own[:, 4:6] = 0  # no digests of rows
        return made

    def run(self, call: KnownCall, describe: Callable[[], Any]) -> tuple[Any, Any]:
        comm, counts, held = self.comm, call.counts or (), [call.tensors, None]
        with comm.engine.lock:
            self.work_out()
            memory = self._free.pop() if self._free else self._memory()
            if memory is None or len(counts) != comm.size:
                return None, None
            self._free.append(memory)  # the one that `begin` takes
            if hint := self._hint:
                hint += encode_rows(counts, comm.rank) - encode_rows(self.extents.send, comm.rank)
            memory.fields[0, :, 2] = words = [hint << VALUE_BITS | n for n in counts]
            memory.fields[1, comm.rank, 2], memory.counts = words[comm.rank], counts
            return self.begin(self._in_order((*call.addresses, 0)), held, describe, True), held[-1]

    def _ends(self, memory: Memory, state: int, addresses: tuple[int, ...], held: Any) -> bool:
        comm, program, memory.is_sized = self.comm, self.program, False
        if state != HAS_KERNELS:
            return False
        rows = (memory.fields[1, :, 2] & MOST_ROWS).tolist()
        memory.extents = extents_of(program.plan.problem, comm.rank, program.plan.shares, memory.counts, rows)
        memory.sized = sized = program.sized(memory.extents)
        dtype = program.buffers["y"].dtype
        y = comm.engine.arena.take(sized.shapes["y"], dlpack.STORAGE[dtype])
        held[-1], at = dlpack.lend(y, dtype, self._framework), address_of(y)
        memory.addresses = tuple([n or at for n in addresses])
        how = program.is_small(sized), program.is_long(sized)
        state = memory.call.sized(starts_of(sized), *how, memory.addresses, IN_C_SECONDS, STALL_SECONDS)
        memory.is_sized = state != HAS_KERNELS
        return state == FINISHED


class TicketInC(InC, CallInFlight):
    """A call of a ticket that C carries out, in flight. Used as a Pending: `value` is its result, if it has one.

    `pending` is what goes on with the call in Python. None: C does.
    """

    pending: Any = None
    has_agreed = False  # True: Python goes on with the plan, in the memory of this call
    returned_at: float | None = None  # when the program went on with other work. None: it waits

    def __init__(
        self,
        ticket: Ticket,
        memory: Memory,
        stamp: int,
        kernels: PythonKernels,
        describe: Callable[[], Any],
        held: Any,
        note: Note | None,
        strided: Mapping[str, Array],
    ):
        self.ticket, self.value, self._comm = ticket, held[-1], ticket.comm
        self.memory, self._strided, self._describe, self._note = memory, strided, describe, note
        ticket.comm.turns.append(stamp)
        super().__init__(memory.call, ticket.comm, stamp, self._taken_over, self._landed, held, kernels)

    def _landed(self) -> None:
        if self._note is not None:
            self._note(self.stamp, self.call, self.returned_at)
        self.comm.end_turn(self.stamp)
        self.ticket.left(self.memory)

    def _taken_over(self) -> Task:
        self.ticket.left()
        self.pending = self._describe()
        self._exported = self.call.export()  # first: the thread of C moves the call until then
        times = np.frombuffer(self._exported[1], np.float64)
        self.has_agreed = bool(times[len(times) // 2 + self.ticket.front - 1])
        task: Task = self.pending.take_over(self)
        return task

    def _forget(self) -> None:
        super()._forget()
        del self.memory, self._strided, self._describe, self._note

    @property
    def outputs(self) -> dict[str, Array]:
        """The results in their memory, while Python takes over."""
        arrays = self.ticket.arrays(self.memory, self._strided)
        return {buffer.name: arrays[buffer.name] for buffer in self.ticket.program.outputs}

    def go_on(self, run: Run) -> None:
        """`run` goes on with the plan: the ranks have agreed."""
        ticket, memory = self.ticket, self.memory
        assert ticket.lowered is not None
        arrays, presumed = ticket.arrays(memory, self._strided), ticket.lowered.presumed
        run.held = memory, self.held
        run.carried = carried(memory.headers[1].reshape(-1), memory.fields[1, :, -1].tolist(), presumed)
        actions = ticket.program.resolve(arrays, memory.sized.starts, ticket.backend, self.comm.link.collective)
        beside, is_small = Sent(memory), ticket.program.is_small(memory.sized)
        taken_over(self.call, run, actions, is_small, ticket.front, beside, self.tokens, self._exported)
        self.comm.end_turn(self.stamp)

    def agree(self, agreement: Agreement) -> None:
        """`agreement` goes on with what the headers of some ranks say."""
        ticket, memory, comm = self.ticket, self.memory, self.comm
        assert ticket.lowered is not None
        _, arrived, expected = memory.fields[:, :, 1]  # the digests
        if self.call.disagrees and (arrived == expected).all():  # as where rows change at every call
            ticket.is_dropped = True
        peers = [peer for peer in range(comm.size) if peer != comm.rank]
        requests = [(handle, peers[op] if op < len(peers) else -1) for handle, op in self._exported[2]]
        carries = ticket.lowered.agreed.carries
        agreement.go_on(memory.headers[1].reshape(-1), carries, requests, self.call.error, self.call.started)

    # -- for the caller
    @property
    def task(self) -> Task:
        return self if self.pending is None else self.pending.task

    def wait(self, timeout: float | None = None) -> Any:
        """The result. Raises the error of the call, and WaitTimeout after `timeout` seconds (it goes on)."""
        begun, engine = perf_counter(), self.comm.engine
        if engine.recorder is not None and self.returned_at is not None:
            engine.recorder.awaited(self.comm, self.stamp)
        drive_in_c(self)
        if not engine.wait(self, self.comm.channel, timeout):
            raise WaitTimeout(f"a call of {self.comm.name} is not finished after {timeout:g} s; it goes on")
        if self.pending is not None:
            self.pending.wait(None if timeout is None else max(0.0, timeout - (perf_counter() - begun)))
        return self.result

    @property
    def result(self) -> Any:
        """The result of a finished call. Raises its error."""
        if self.pending is None:
            return self.value
        result = self.pending.result
        return self.value if self.has_agreed else result
