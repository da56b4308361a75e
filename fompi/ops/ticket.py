"""An unbound call that was made before, as one call in C: the agreement, then the plan that followed from it.

All that a call decides follows from the headers of all ranks, and from what this rank has checked of its own tensors.
So the second call of a form keeps, as a `Ticket`, what came out. From the third one on C exchanges the headers, sees
that they are those of the last time, and carries out the plan. If they differ, if a rank is late or an error comes, the
call becomes a `Pending` as if Python had begun it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from fompi.backends.numpy import Numpy
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import HEADER_NBYTES, Agreement
from fompi.engine.native import engine as native_engine
from fompi.engine.tasks import HANDSHAKE, Sent
from fompi.ops.arguments import Arguments, LocalCall
from fompi.plans.plan import MESSAGE_BITS
from fompi.runtime.compiled import Compiled, Sized
from fompi.runtime.given import address_of
from fompi.runtime.lower import table, with_agreement
from fompi.runtime.native_run import FINISHED, IN_C_SECONDS, STALL_SECONDS, made_call, taken_over
from fompi.runtime.program import Run
from fompi.schedules.registry import SCHEDULES
from fompi.tensors import dlpack

if TYPE_CHECKING:
    from fompi.ops.pending import Pending

Array = np.ndarray[Any, Any]

MOST_TICKETS = 256
"""The forms of calls that a communicator remembers."""


def form_of(comm: Communicator, local: LocalCall, arguments: Arguments) -> Hashable | None:
    """What two calls have in common whose agreement has the same headers. None: such a call never runs in C."""
    if comm.size == 1 or local.device is not None or local.runs or local.packing is not None or arguments.words:
        return None
    if comm.backend is not None or comm.urgency is not None or native_engine().library is None:
        return None
    if arguments.counts is not None or arguments.arriving is not None:  # they are others at every call
        return None
    where = "new" if local.out is None else "over x" if local.in_place else "out"
    return local.problem, local.packed, local.shape, local.dim, local.split, local.rows, local.expects, where


class Ticket:
    """A call in C of one form on one communicator. `headers`: those to the ranks, from them, and what is expected."""

    def __init__(self, form: Hashable, pending: Pending, agreement: Agreement, program: Compiled, sized: Sized):
        self.form = form
        comm, local = pending._comm, pending._local
        self.comm, self.program, self.sized, self.extents = comm, program, sized, pending.extents
        self.schedule, self.generator = program.plan.schedule, SCHEDULES.get(program.plan.schedule)
        self.is_small = program.is_small(sized)
        plan = table(program, sized, comm.most_nbytes)
        assert plan is not None
        whole, self.front = with_agreement(plan, comm.rank, comm.size, HEADER_NBYTES, HANDSHAKE)
        self.call = made_call(native_engine().library, whole, comm, self.is_small)
        self.names = plan.buffers
        self.bases = np.zeros(len(whole.buffers), np.uint64)
        expected = np.frombuffer(agreement.headers_in, np.int64).reshape(comm.size, -1)
        self._headers = np.stack([np.frombuffer(b"".join(agreement.headers()), np.int64).reshape(expected.shape)] * 3)
        self._headers[1:] = expected
        self._keeps = [
            b for b in program.program.buffers
            if b.role == "scratch" or (b.role == "output" and local.in_place)
        ]  # fmt: skip
        kept = {buffer.name for buffer in self._keeps}
        self._given = [(at, name) for at, name in enumerate(self.names) if name not in kept]  # memory of each call
        self._renew()

    def _renew(self) -> None:
        """Take memory of its own: a call that Python goes on with keeps the memory that it had."""
        arena = self.comm.engine.arena
        self._headers = self._headers.copy()
        self.kept = {b.name: Numpy().empty(arena, self.sized.shapes[b.name], b.dtype) for b in self._keeps}
        for name, array in self.kept.items():
            self.bases[self.names.index(name)] = address_of(array)
        self.bases[-3:] = [part.ctypes.data for part in self._headers]

    def run(self, pending: Pending) -> bool:
        """Run the call that `pending` describes in C. If it is not finished there, `pending` goes on with it.

        False: nothing has begun, because other calls are in flight, or somebody wants its trace.
        """
        comm, local = self.comm, pending._local
        engine, channel = comm.engine, comm.channel
        try:
            arrays = pending.memory(self.program, self.sized.shapes, self.kept)
        except Exception:  # the call fails in Python, where the other ranks hear of it
            return False
        if (
            not all(array.flags.c_contiguous for array in arrays.values())
            or SCHEDULES.get(self.schedule) is not self.generator
        ):
            return False
        with engine.lock:
            if not engine.idle or channel.failures or channel.lost is not None or comm.turns:
                return False
            if engine.report is not None or comm.recording is not None:
                return False
            stamp, slot = pending._stamp, pending._slot = comm.next_call()
            comm.note_start(pending._name, stamp)
            self._headers[:, :, 0] = stamp
            for at, name in self._given:
                self.bases[at] = address_of(arrays[name])
            self.call.place(self.bases)
            if local.out is not None:
                dlpack.mark_written(local.out.owner)
            is_finished = False
            try:
                is_finished = self.call.run(slot << MESSAGE_BITS, IN_C_SECONDS, STALL_SECONDS) == FINISHED
            finally:
                if not is_finished:
                    self._hand_over(pending, arrays)
            channel.begun[0] = stamp
        pending.extents = self.extents
        return True

    def _hand_over(self, pending: Pending, arrays: dict[str, Array]) -> None:
        """Python goes on: with the agreement, or with the plan if the ranks have agreed."""
        comm, program, front = self.comm, self.program, self.front
        headers, times = self._headers, np.frombuffer(self.call.times(), np.float64)
        self._renew()
        if times[len(times) // 2 + front - 1]:
            run = Run(program, comm, pending._stamp, pending._slot)
            pending._task = pending._run = run
            run.held, pending.extents = headers, self.extents
            actions = program.resolve(arrays, self.sized.starts, Numpy(), comm.link.collective)
            taken_over(self.call, run, actions, self.is_small, front, Sent())
            return
        agreement = pending.agreement()
        pending._task = agreement
        comm.turns.append(pending._stamp)
        if self.call.disagrees:  # as where rows change at every call
            comm.tickets[self.form] = False
        code, (_, _, requests) = self.call.error, self.call.export()
        peers = [peer for peer in range(comm.size) if peer != comm.rank]
        agreement.go_on(headers[1], [(handle, peers[op] if op < len(peers) else -1) for handle, op in requests], code)


def remember(pending: Pending, form: Hashable) -> None:
    """Note a call that is finished. At the second one of its form it gets a ticket, if C can carry it out."""
    tickets, seen = pending._comm.tickets, pending._comm.seen
    number = hash(form)
    if number not in seen:
        _make_room(seen)
        seen[number] = None
    else:
        _make_room(tickets)
        tickets[form] = _ticket_of(pending, form) or False


def _make_room(entries: dict[Any, Any]) -> None:
    while len(entries) >= MOST_TICKETS:
        del entries[next(iter(entries))]


def _ticket_of(pending: Pending, form: Hashable) -> Ticket | None:
    """The ticket of a finished call. None: C does not know some op of its plan, or its agreement had two rounds."""
    agreement, run, extents = pending.agreed, pending._run, pending.extents
    if agreement is None or run is None or extents is None or not agreement.has_one_round:
        return None
    program, arrays = run.compiled, pending._local.arrays.values()
    sized = program.sized(extents)
    if program.is_long(sized) or len(program.outputs) != 1 or not all(array.flags.c_contiguous for array in arrays):
        return None
    if table(program, sized, pending._comm.most_nbytes) is None:
        return None
    return Ticket(form, pending, agreement, program, sized)
