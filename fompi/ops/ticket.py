"""An unbound call that was made before, as one call in C: the agreement, then the plan that followed from it.

All that a call decides follows from the headers of all ranks, and from what this rank has checked of its own tensors.
So the second call of a form keeps, as a `Ticket`, what came out. From the third one on C exchanges the headers, sees
that they are those of the last time, and carries out the plan. If they differ, if a rank fails or is long silent, the
call goes on as a `Pending`, as if Python had begun it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from fompi.base.errors import WaitTimeout
from fompi.base.layout import Slices
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import HEADER_NBYTES, Agreement, carried, packet_nbytes, presumption
from fompi.engine.in_flight import FINISHED
from fompi.engine.native import engine as native_engine
from fompi.engine.tasks import HANDSHAKE, Sent, Task
from fompi.ops.arguments import Arguments, LocalCall
from fompi.plans.plan import MESSAGE_BITS
from fompi.runtime.compiled import Compiled, Sized
from fompi.runtime.given import address_of
from fompi.runtime.lower import Headers, table, with_agreement
from fompi.runtime.native_run import (
    NO_KERNELS,
    STALL_SECONDS,
    InC,
    PythonKernels,
    Times,
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

if TYPE_CHECKING:
    from fompi.ops.pending import Pending

Array = np.ndarray[Any, Any]

MOST_TICKETS = 256
"""The forms of calls that a communicator remembers."""

MOST_IN_FLIGHT = 16
"""The calls of one form that may be in flight in C. Others run in Python."""

DONE = Task()
"""The task of a call that C has finished."""

DONE.finished = True


def form_of(
    comm: Communicator, local: LocalCall, arguments: Arguments, schedule: str = "auto", slices: Slices | None = None
) -> Hashable | None:
    """What two calls have in common whose agreement has the same headers. None: such a call never runs in C."""
    if comm.size == 1 or local.device is not None or local.runs or local.packing is not None:
        return None
    counts = arguments.counts
    if counts is not None and local.problem.moves == "all_to_all" and len({*counts}) > 1:
        return None  # they are others at every call
    if comm.urgency is not None or native_engine().library is None:
        return None
    if comm.backend is not None and (local.in_place or not is_for_c(comm.backend)):
        return None
    where = "new" if local.out is None else "over x" if local.in_place else "out"
    arriving = None if arguments.arriving is None else tuple(arguments.arriving)
    compared = local.rows, local.expects, arriving, arguments.words
    return local.problem, local.packed, local.shape, local.dim, local.split, *compared, where, schedule, slices


class Memory:
    """What a call in C works on besides the tensors of the program. Each call in flight has one of its own."""

    def __init__(self, ticket: Ticket):
        comm, library = ticket.comm, native_engine().library
        self.call = made_call(library, ticket.table, comm, ticket.program, ticket.sized)
        self.headers = np.zeros((3, comm.size, packet_nbytes(comm.size)), np.uint8)
        self.fields = self.headers.view(np.int64)[:, :, : HEADER_NBYTES // 8]
        self.fields[:] = ticket.own_headers, ticket.headers, ticket.headers
        self.bases = np.zeros(len(ticket.table.buffers), np.uint64)
        shapes, arena = ticket.sized.shapes, comm.engine.arena
        self.kept = {b.name: ticket.backend.empty(arena, shapes[b.name], b.dtype) for b in ticket.kept}
        for name, array in self.kept.items():
            self.bases[ticket.names.index(name)] = address_of(array)
        self.bases[-3:] = [part.ctypes.data for part in self.headers]
        self.call.place(self.bases)
        self.call.form(np.array([*ticket.given.values()], np.int32), len(self.headers), packet_nbytes(comm.size))


class Ticket:
    """A call of one form on one communicator, in C. `given`: the buffers whose memory is another one at each call."""

    def __init__(self, form: Hashable, pending: Pending, agreement: Agreement, program: Compiled, sized: Sized):
        self.form, self.name = form, pending._name
        comm, local = pending._comm, pending._local
        self.comm, self.program, self.sized, self.extents = comm, program, sized, pending.extents
        self.schedule, self.generator = program.plan.schedule, SCHEDULES.get(program.plan.schedule)
        self.schedules = len(SCHEDULES)
        self.backend = pending._backend  # that of the communicator may be another one now
        self._chosen = None if self.backend is type(pending)._backend else self.backend
        self.is_small, self.in_place = program.is_small(sized), local.in_place
        plan = table(program, sized, comm.most_nbytes)
        assert plan is not None
        over_x = local.in_place and not program.plan.problem.over_x  # at the end
        in_place = over_x and "y" in plan.buffers
        self.headers, own = np.array(agreement.headers_in), b"".join(agreement.headers())
        self.own_headers = np.frombuffer(own, np.int64).reshape(self.headers.shape).copy()
        carries = self.is_small and program.plan.problem.moves != "all_to_all"  # else headers differ between receivers
        self.presumed = presumption(self.headers.tolist()) if carries else 0
        headers = Headers(HEADER_NBYTES, packet_nbytes(comm.size), HANDSHAKE, self.presumed)
        self.table, self.front, self.carries = with_agreement(plan, comm.rank, comm.size, headers, in_place)
        self.own_headers[:, -1] = self.carries
        self.names, self.unplaced = plan.buffers, plan.unplaced - ({"x", "y"} if in_place else set())
        self.kernels = plan.in_python
        self.is_long = program.is_long(sized)
        self.kept = [
            b for b in program.program.buffers
            if b.role == "scratch" or (b.role == "output" and over_x)
        ]  # fmt: skip
        kept = {buffer.name for buffer in self.kept}
        self.given = {name: at for at, name in enumerate(self.names) if name not in kept}
        self.last_stamp, self.is_dropped = 0, False
        self._free: list[Memory] = []
        self._in_flight = 0

    def begin(
        self,
        addresses: tuple[int, ...],
        held: object,
        describe: Callable[[], Pending],
        waits: bool,
        note: Callable[[Times], object] | None = None,
        arrays: Mapping[str, Array] | None = None,
    ) -> Any:
        """Begin a call on memory at these addresses, those of `given`. None: it is finished. Else its task in C.

        False: nothing has begun, and it must run in Python. If Python goes on with a call that has begun, it does so as
        the Pending that `describe()` returns. `held` is kept until the call is finished. `note` gets the times of one
        that C has finished, for its trace. `arrays`: the buffers of `given`, for kernels that Python runs.
        """
        comm = self.comm
        engine, channel = comm.engine, comm.channel
        if self.is_dropped or comm.backend is not self._chosen or comm.urgency is not None:
            return False
        if len(SCHEDULES) != self.schedules or SCHEDULES.get(self.schedule) is not self.generator:
            return False  # "auto" may choose another one now
        with engine.lock:
            if note is None and (engine.report is not None or comm.recording is not None):
                return False
            if channel.failures or channel.lost is not None:
                return False
            memory = self._free.pop() if self._free else None
            if memory is None:
                if self._in_flight >= MOST_IN_FLIGHT:
                    return False
                try:
                    memory = Memory(self)
                except MemoryError:
                    return False
            call = memory.call
            stamp, slot = self.last_stamp, _ = comm.next_call()
            comm.note_start(self.name, stamp)
            seconds = seconds_in_c(engine, waits, self.is_small)
            is_finished = False
            try:
                is_finished = call.run_on(slot << MESSAGE_BITS, seconds, STALL_SECONDS, stamp, addresses) == FINISHED
            finally:
                if not is_finished:
                    memory.bases[[*self.given.values()]] = addresses
                    task = self._flies(memory, stamp, slot, describe, held, note, arrays or {})
                    task.awaited = waits
                    task.moved()
            if is_finished:
                channel.begun[0] = stamp
                if note is not None:
                    note(Times.of(call, self.front))
                self._free.append(memory)
                return None
            return task

    def _flies(
        self,
        memory: Memory,
        stamp: int,
        slot: int,
        describe: Callable[[], Pending],
        held: object,
        note: Callable[[Times], object] | None,
        given: Mapping[str, Array],
    ) -> InC:
        """The task of a call that is in flight from now on."""
        comm = self.comm
        self._in_flight += 1
        comm.turns.append(stamp)

        def arrived() -> None:
            if note is not None:
                note(Times.of(memory.call, self.front))
            comm.end_turn(stamp)
            self._in_flight -= 1
            self._free.append(memory)

        def take_over() -> Task:
            self._in_flight -= 1
            task.pending = describe()
            task.pending._backend = self.backend  # the communicator may have another one meanwhile
            return self._hand_over(memory, stamp, slot, task.pending, held, task.tokens, given)

        kernels = NO_KERNELS
        if self.kernels:
            arrays = {**arrays_at(self.program, self.sized.shapes, memory.bases), **given}
            made = self.program.resolve(arrays, self.sized.starts, self.backend, only=self.kernels)
            actions = {self.front + op: action for op, action in zip(self.kernels, made, strict=True)}
            kernels = PythonKernels(actions, self.program.follows if self.program.asynchronous else None, self.front)
        task = InC(memory.call, comm, stamp, take_over, arrived, held, kernels)
        task.is_long, task.forwards = self.is_long, self.program.forwards
        return task

    def _hand_over(
        self,
        memory: Memory,
        stamp: int,
        slot: int,
        pending: Pending,
        held: object,
        tokens: Mapping[int, Any],
        given: Mapping[str, Array],
    ) -> Task:
        """Python goes on: with the agreement, or with the plan if the ranks have agreed."""
        comm, program, front, call = self.comm, self.program, self.front, memory.call
        pending._stamp, pending._slot = stamp, slot
        exported = call.export()  # first: the thread of C moves the call until then
        times, inbox = np.frombuffer(exported[1], np.float64), memory.headers[1].reshape(-1)
        if times[len(times) // 2 + front - 1]:
            arrays = {**arrays_at(program, self.sized.shapes, memory.bases), **given}
            run = Run(program, comm, stamp, slot)
            run.held, pending.extents = (memory, held), self.extents
            run.carried = carried(inbox, memory.fields[1, :, -1].tolist(), self.presumed)
            if comm.recording is not None or comm.engine.report is not None:
                run.on_finish = functools.partial(pending._note, comm.recording, run)
            pending._outputs = {b.name: arrays[b.name] for b in program.outputs} | pending._outputs
            pending._task = pending._run = run
            pending._has_memory = True
            actions = program.resolve(arrays, self.sized.starts, self.backend, comm.link.collective)
            taken_over(call, run, actions, self.is_small, front, Sent(memory), tokens, exported)
            comm.end_turn(stamp)
            return run
        agreement = pending.agreement()
        pending._task = agreement
        _, arrived, expected = memory.fields[:, :, 1]  # the digests
        if call.disagrees and (arrived == expected).all():  # as where rows change at every call
            comm.tickets[self.form], self.is_dropped = False, True
        code, begun, (_, _, requests) = call.error, call.started, exported
        peers = [peer for peer in range(comm.size) if peer != comm.rank]
        there = [(handle, peers[op] if op < len(peers) else -1) for handle, op in requests]
        agreement.go_on(inbox, self.carries, there, code, begun)
        return pending._task

    def run(self, pending: Pending, waits: bool) -> bool:
        """Begin the call that `pending` describes in C. If it is not finished there, it goes on as its task.

        False: nothing has begun.
        """
        try:
            arrays = pending.memory(self.program, self.sized.shapes, [b.name for b in self.kept])
        except Exception:  # the call fails in Python, where the other ranks hear of it
            return False
        given = [arrays[name] for name in self.given]
        placed = [name not in self.unplaced for name in self.given]
        if not all(array.flags.c_contiguous for array, is_placed in zip(given, placed, strict=True) if is_placed):
            return False
        addresses = tuple([address_of(a) if is_placed else 0 for a, is_placed in zip(given, placed, strict=True)])
        out = pending._local.out
        with self.comm.engine.lock:
            pending._ticket, pending.extents, note = self, self.extents, None
            if self.comm.recording is not None or self.comm.engine.report is not None:
                note = functools.partial(pending._note_in_c, self.comm.recording)
            elif not waits:
                note = functools.partial(setattr, pending, "_times")
            begun = self.begin(addresses, given, lambda: pending, waits, note, arrays)
            if begun is False:
                return False
            pending._stamp = self.last_stamp
            if pending._task is None:  # else Python goes on with it already
                pending._task = begun or DONE
        if out is not None:
            dlpack.mark_written(out.owner)
        return True


class Flying:
    """A call of a `Front` that is in flight, used as a Pending. `value` is its result, if C finishes it."""

    def __init__(self, task: InC, value: Any):
        self.comm, self.task, self.value = task.comm, task, value

    @property
    def pending(self) -> Any:
        """What goes on with the call. None: C does."""
        return self.task.pending

    @property
    def _current(self) -> Task:
        return self.task if self.pending is None else self.pending._task

    def done(self) -> bool:
        """True once the call is finished. Progresses everything in flight."""
        if not self._current.finished:
            self.comm.engine.progress_while_waiting()
        return self._current.finished

    def wait(self, timeout: float | None = None) -> Any:
        """The result. Raises the error of the call, and WaitTimeout after `timeout` seconds (it goes on)."""
        begun = perf_counter()
        drive_in_c(self.task)
        if not self.comm.engine.wait(self.task, self.comm.channel, timeout):
            raise WaitTimeout(f"a call of {self.comm.name} is not finished after {timeout:g} s; it goes on")
        if self.pending is not None:
            self.pending.wait(None if timeout is None else max(0.0, timeout - (perf_counter() - begun)))
        return self.result

    def then(self, callback: Callable[[], object]) -> None:
        """Call `callback()` once it is finished, in a thread that drives fompi. It must not raise."""
        self.comm.engine.watch(lambda: self._current, self.comm.channel, callback)

    def leave(self) -> None:
        """The program goes on with other work: the call must progress by itself."""
        self.comm.engine.wake_helper()

    @property
    def result(self) -> Any:
        """The result of a finished call. Raises its error."""
        if self.pending is None:
            return self.value
        result = self.pending.result
        return self.value if self.pending._has_memory else result


def remember(pending: Pending, form: Hashable) -> None:
    """Note a call that is finished. At the second one of its form it gets a ticket, if C can carry it out.

    At a later one, if the headers have not decided the second one alone.
    """
    comm, number = pending._comm, hash(form)
    with comm.engine.lock:  # several threads may wait for calls
        if number not in comm.seen:
            _make_room(comm.seen)
            comm.seen[number] = None
        elif pending.agreed is not None and pending.agreed.has_one_round:
            _make_room(comm.tickets)
            comm.tickets[form] = _ticket_of(pending, form) or False


def _make_room(entries: dict[Any, Any]) -> None:
    while len(entries) >= MOST_TICKETS:
        del entries[next(iter(entries))]


def _ticket_of(pending: Pending, form: Hashable) -> Ticket | None:
    """The ticket of a finished call. None: C does not know some op of its plan."""
    agreement, run, extents = pending.agreed, pending._run, pending.extents
    if agreement is None or run is None or extents is None:
        return None
    program = run.compiled
    sized = program.sized(extents)
    if program.is_opaque or len(program.outputs) != 1:
        return None
    made = table(program, sized, pending._comm.most_nbytes)
    if made is None:
        return None
    placed = (array for name, array in pending._local.arrays.items() if name not in made.unplaced)
    if not all(array.flags.c_contiguous for array in placed):
        return None
    return Ticket(form, pending, agreement, program, sized)
