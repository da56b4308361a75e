"""One operation in flight: the agreement of the ranks, then the run of this rank's program, then the result.

    Pending
      -> Agreement   all ranks call the same operation; their rows   (`fompi.engine.handshake`)
      -> Compiled    this rank's program, from the communicator's cache
      -> Run         messages and kernels                            (`fompi.runtime.program`)
      -> result      tensors of the caller's framework

No result is written before all ranks agree.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from threading import Lock
from time import perf_counter
from typing import Any, Self

import numpy as np

from fompi.backends.cuda import backend_of
from fompi.backends.cuda.failures import OutOfMemory
from fompi.backends.numpy import Numpy
from fompi.base.doors import DOORS
from fompi.base.errors import DeviceError, LayoutError, PlanError, ShapeError, StateError, WaitTimeout
from fompi.base.layout import Extents, Slices, integer
from fompi.base.log import log
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import Agreement, agree
from fompi.engine.tasks import DONE, CallInFlight
from fompi.ops.arguments import Arguments, LocalCall
from fompi.ops.decide import common_of, in_words, schedule_of, signature_of
from fompi.ops.ticket import CountsTicket, Ticket, TicketInC, form_of, keep
from fompi.planner.choose import decode_rows, encode_rows, is_even, window_of_call
from fompi.plans.over_x import over_x
from fompi.plans.plan import MOST_MESSAGES, Plan
from fompi.plans.problems import Problem
from fompi.plans.rows import extents_of
from fompi.plans.staged import for_device
from fompi.plans.verify import verify
from fompi.runtime.compiled import Compiled
from fompi.runtime.native_run import Times, drive_in_c, finished_run, is_for_c
from fompi.runtime.needs import out_of_memory
from fompi.runtime.program import Run, enter
from fompi.schedules.registry import REGISTERED, SCHEDULES, available, messages_per_peer, write
from fompi.tensors import dlpack
from fompi.traces.trace import AGREEMENT, Event, Trace

Array = np.ndarray[Any, Any]

MOST_PLANS = 256
"""A communicator keeps the programs of this many kinds of calls. One that was not used for long makes room."""

VERIFIED_RANKS = 8
"""Plans for at most this many ranks are verified at first use. Verification takes longer with more ranks.

Plans for more ranks are only verified by the tests, except those of schedules that a user has registered.
"""

_COPYING = Lock()
"""Held while a result is copied over x. Of several threads that wait for one call, all return after the copy."""


def program_of(comm: Communicator, local: LocalCall, schedule: str, slices: Slices | None) -> Compiled:
    """This rank's program, from the cache of the communicator. At first use it is written and the plan is verified.

    Raises PlanError if the schedule cannot carry out this call.
    """
    # The generator is part of the key, because a user may register another schedule under the same name.
    where = _device_name(comm, local.device)
    in_place = local.in_place and local.device is None and comm.size > 1  # a trace of one rank has a copy
    key = (local.problem, schedule, SCHEDULES.get(schedule), slices, local.packed, where, in_place)
    program: Compiled | None = comm.plans.get(key)
    if program is None:
        if messages_per_peer(local.problem, schedule, slices or 1) > MOST_MESSAGES:  # before a long program is written
            raise PlanError(f"{schedule} would send more than {MOST_MESSAGES} messages to one peer: use fewer slices")
        plan = _plan_of(comm, local, schedule, slices)
        is_verified = comm.size <= VERIFIED_RANKS or schedule in REGISTERED
        if is_verified:
            verify(plan)
        written = _compiled_over_x(plan, comm.rank, where, is_verified) if in_place else None
        program = written or Compiled(plan, comm.rank, where)
        with comm.engine.lock:
            keep(comm.plans, MOST_PLANS, key, program)
        log.debug("%s: rank %d planned %s by %s", comm.name, comm.rank, plan.problem, plan.schedule)
    program.used = True
    return program


def _compiled_over_x(plan: Plan, rank: int, where: str, is_verified: bool) -> Compiled | None:
    """This rank's program whose result is written over x. None: it needs memory of its own for it."""
    with suppress(PlanError):
        plan = over_x(plan)
        if is_verified:
            verify(plan)
        return Compiled(plan, rank, where)
    return None


def _device_name(comm: Communicator, device: Any) -> str:
    """The name of the device on which the kernels of a call are enqueued. Empty: they run on the host."""
    if device is not None:
        return comm.paths(device).title
    return comm.backend.name if comm.backend is not None and comm.backend.asynchronous else ""


def _plan_of(comm: Communicator, local: LocalCall, schedule: str, slices: Slices | None) -> Plan:
    problem = replace(local.problem, packed=local.packed)
    window = window_of_call(problem, schedule, slices or 1, comm.network, comm.machine is not None)
    plan, device = write(problem, schedule, slices or 1, window=window), local.device
    return plan if device is None else for_device(plan, comm.paths(device).is_staged)


def _other_plans(problem: Problem) -> Iterator[tuple[str, int, Plan]]:
    for schedule in available(problem):
        for slices in (1, 2, 4, 8, 16):
            with suppress(PlanError):  # a schedule that refuses these slices
                if messages_per_peer(problem, schedule, slices) <= MOST_MESSAGES:
                    yield schedule, slices, write(problem, schedule, slices)


DOORS.other_plans = _other_plans


class Pending(CallInFlight):
    """An operation in flight, made by `operation.start(...)`.

        y = pending.wait()  # waits for the result
        pending.done()      # True once it is finished; progresses everything in flight
        pending.result      # the result of a finished operation
        pending.counts      # how many rows came from each rank

    On a device it is finished once its messages are done and its kernels are enqueued. The current stream of the thread
    that takes the result waits for them.

    Any thread may wait for it. The operation goes on if the program drops the Pending, with a ResourceWarning: nobody
    would see its error.
    """

    _backend: Any = Numpy()
    _entry: Any = None  # on a device: the token of what the program had enqueued before the call
    _ticket: Ticket | None = None  # by which C has begun it
    _times: Times | None = None  # when its ops ran in C
    _form: Hashable = None  # under which it is remembered once it is finished
    task: Any = None
    """What does the call now: C, the agreement, then the run. The run drops the agreement."""

    def __init__(
        self,
        name: str,
        arguments: Arguments,
        local: LocalCall,
        comm: Communicator,
        schedule: str = "auto",
        slices: Slices | None = None,
    ):
        """What the call is. It has not begun."""
        self._arguments, self._local, self._comm = arguments, local, comm
        self._schedule, self._slices = schedule, slices
        self._name = name
        self._stamp = 0
        self._outputs: dict[str, Array] = {}
        self._handshake: tuple[float, float, int] | None = None  # when it began and ended, and which rank was last
        self._run: Run | None = None
        self._returned_at: float | None = None  # when `start` returned to the program
        self.agreed: Agreement | None = None  # the agreement, once all ranks have agreed
        self.extents: Extents | None = None

    def begin(self, waits: bool = False) -> Self:
        """Begin the call. It may be finished then. `waits`: the program waits for it."""
        form = form_of(self._comm, self._local, self._arguments, self._schedule, self._slices)
        ticket = None if form is None else self._comm.tickets.get(form)
        if ticket is None or not self._begin_in_c(ticket, waits):
            self._begin()
            self._form = form if ticket is None else None
        elif self._arguments.known is not None:
            ticket.learn(self._arguments, self._local)
        return self

    def _begin(self) -> None:
        """Begin the call in Python."""
        comm, local = self._comm, self._local
        engine, moves = comm.engine, local.problem.moves
        if local.device is not None:
            self._backend = backend_of(local.device)
            self._entry, failure = enter(engine, self._backend)
            if failure is not None:
                agree(comm, self._name, failure)
        elif comm.backend is not None:
            self._backend = comm.backend
        with engine.lock:
            self._stamp, _ = comm.next_call()
            comm.note_start(self._name, self._stamp)
            if comm.size == 1:
                self._launch([sum(local.rows) if moves == "all_to_all" else local.rows[0]], runs=local.runs)
                return
            comm.turns.append(self._stamp)
            self.task = agreement = self.agreement()
            agreement.start()

    def _begin_in_c(self, ticket: Ticket, waits: bool) -> bool:
        """Begin the call in C. False: nothing has begun."""
        comm, out = self._comm, self._local.out
        ticket.work_out()
        try:
            arrays = self.memory(ticket.program, ticket.sized.shapes, ticket.kept)
        except Exception:  # the call fails in Python, where the other ranks hear of it
            return False
        places = ticket.places(arrays)
        if places is None:
            return False
        addresses, strided = places
        with comm.engine.lock:
            self._ticket, self.extents, note = ticket, ticket.extents, None
            if not waits or comm.recording is not None or comm.engine.report is not comm.engine.recorder:
                note = functools.partial(self._ended_in_c, comm.recording)
            task = ticket.begin(addresses, (arrays, None), lambda: self, waits, note, strided)
            if task is None:
                self._ticket = self.extents = None
                return False
            self._stamp = ticket.last_stamp
            if self.task is None:  # else Python goes on with it already
                self.task = task
        if out is not None:
            dlpack.mark_written(out.owner)
        return True

    def take_over(self, flight: TicketInC) -> Any:
        """Python goes on with this call, which C has begun: the task that does so."""
        ticket = flight.ticket
        self._stamp, self._returned_at = flight.stamp, self._returned_at or flight.returned_at
        self._backend = ticket.backend  # the communicator may have another one meanwhile
        if not flight.has_agreed:
            self.task = agreement = self.agreement()
            flight.agree(agreement)
            return self.task
        self._handshake = Times.of(flight.call, ticket.front).agreement(self._comm.rank)
        self.extents, self._outputs = flight.memory.extents, flight.outputs | self._outputs
        self.task = self._run = run = self._run_of(ticket.program)
        self._note_at_its_end(run)
        flight.go_on(run)
        return run

    def agreement(self) -> Agreement:
        """The agreement of this call, which has its number already."""
        comm, local = self._comm, self._local
        moves = local.problem.moves
        rows, expects, equal_totals, signature, hint = (0,) * comm.size, -1, moves != "all_to_all", 0, 0
        if comm.machine is not None or (comm.network and not equal_totals):
            signature = signature_of(local.problem)
            hint = 0 if equal_totals else encode_rows(local.rows, comm.rank)
        if moves in ("all_gather", "all_to_all"):
            rows, expects = local.rows, local.expects
        form = comm, local, self._schedule, self._slices, self._arguments.words
        agreement = Agreement(
            *(comm, self._stamp, common_of(*form), lambda: in_words(*form), rows, expects, signature, hint)
        )
        agreement.equal_totals, agreement.arriving = equal_totals, self._arguments.arriving
        if local.runs:
            agreement.runs = local.runs
        agreement.then = self._agreed
        return agreement

    def _agreed(self, agreement: Any) -> None:
        if agreement.error is None:
            self.agreed = agreement
            self._handshake = agreement.begun, agreement.moved_at, agreement.last
            try:
                self._launch(agreement.rows, agreement.same_signature, agreement.hints, agreement.arrived)
            except Exception as error:
                if self._run is None:
                    self._comm.channel.fail(agreement, error)
                    agreement.error = error
        if self._run is None:
            self._comm.end_turn(self._stamp)

    def _launch(
        self,
        incoming: Sequence[int],
        same_problem: bool = True,
        hints: Sequence[int] = (),
        runs: Sequence[Sequence[int]] = (),
    ) -> None:
        """All ranks agree: choose a plan, take memory for the results, and start.

        `incoming[source]` is how many rows come from each rank. `same_problem`: all ranks have the same problem.
        `hints[source]` is the size of what each rank sends in an all-to-all (`choose.encode_rows`). `runs[source]` are
        the rows of each run, where rows go to experts.
        """
        comm, local, problem = self._comm, self._local, self._local.problem
        if problem.moves == "all_to_all":
            total, even = decode_rows(hints) if same_problem else (None, False)
        else:
            rows = incoming if problem.moves == "all_gather" else local.rows
            total, even = sum(rows), bool(problem.columns) and is_even(rows) and is_even(problem.columns)
        program, refusal = self._program(problem, total, same_problem, even)
        shares = program.plan.shares
        extents = extents_of(problem, comm.rank, shares, local.rows, incoming, local.runs, runs)
        self.extents = extents
        sized = program.sized(extents)
        try:
            memory = self.memory(program, sized.shapes)
            actions = program.resolve(memory, sized.starts, self._backend, comm.link.collective)
        except Exception as error:  # the other ranks have started the call: its messages must move, whatever they carry
            refusal, actions = refusal or error, program.drain(sized, comm.link.collective)
        self.task = self._run = run = self._run_of(program)
        if self.agreed is not None:
            run.sent, run.carried = self.agreed.sent, self.agreed.carried
        if local.out is not None:
            dlpack.mark_written(local.out.owner)
        run.takes_turns = comm.size > 1
        if local.device is not None:
            run.paths = comm.paths(local.device)
        self._note_at_its_end(run)
        is_long = not program.asynchronous and program.is_long(sized)
        run.start(actions, None, is_long, program.is_small(sized), refusal, self._entry)

    def _run_of(self, program: Compiled) -> Run:
        """The run of this call. It has not begun."""
        return Run(program, self._comm, self._stamp, self._comm.slot(self._stamp))

    def _note_at_its_end(self, run: Run) -> None:
        comm = self._comm
        if comm.recording is not None or comm.engine.report is not None:
            run.on_finish = functools.partial(self._note, comm.recording, run)

    def _note(self, recording: list[Trace] | None, run: Run) -> None:
        if recording is not None:
            recording.append(self._traced(run))
        if self._comm.engine.report is not None:
            report, trace, run.agreed = self._comm.engine.report, functools.partial(self._traced, run), self._handshake
            returned_at = self._returned_at or (run.moved_at if isinstance(self, Started) else None)
            report.note(run, trace, self.extents, self._backend, None, returned_at, outputs=self._outputs)

    def _ended_in_c(self, recording: list[Trace] | None, stamp: int, call: Any, returned_at: float | None) -> None:
        """C has finished the call."""
        comm, ticket, self._stamp = self._comm, self._ticket, stamp
        assert ticket is not None
        self._times = Times.of(call, ticket.front)
        if recording is None and comm.engine.recorder is not None:
            where, returned_at = (comm, ticket.program, ticket.extents), self._returned_at or returned_at
            comm.engine.recorder.note_in_c(where, ticket.front, stamp, call, returned_at)
        elif recording is not None or comm.engine.report is not None:
            self._note(recording, self._traced_in_c(self._times))

    def _program(
        self, problem: Problem, total: int | None, same_problem: bool, even: bool
    ) -> tuple[Compiled, Exception | None]:
        """This rank's program by the schedule of the call. "auto" chooses one for `total` rows.

        `even`: all ranks send equal shards in an all-to-all. An error comes with the program, because the other ranks
        have started the call: its messages must move.
        """
        how = schedule_of(self._comm, problem, total, even, same_problem, self._schedule, self._slices)
        try:
            return program_of(self._comm, self._local, *how), None
        except Exception as error:
            name = _device_name(self._comm, self._local.device)
            return Compiled(_plan_of(self._comm, self._local, *how), self._comm.rank, name), error

    def memory(
        self, program: Compiled, shapes: Mapping[str, tuple[int, ...]], kept: Container[str] = ()
    ) -> dict[str, Array]:
        """Every buffer of the program but `kept` ones as an array: the caller's memory, or memory of the arena."""
        local, arena = self._local, self._comm.engine.arena
        out = None if local.in_place else local.out
        arrays, aligned = {**local.arrays}, local.like.framework == "jax"  # JAX copies memory that is not aligned
        for buffer in program.program.buffers:
            if buffer.name in kept:
                continue
            shape = shapes[buffer.name]
            given = arrays.get(buffer.name)
            if given is None and buffer.role == "output" and out is not None and buffer.name in ("y", "g"):
                given = out.array.reshape(shape) if out.array.size == prod(shape) else out.array
            if given is not None and given.shape != shape:
                raise ShapeError(f"{self._name}: {buffer.name} has {len(given)} rows, but {shape[0]} rows arrive here")
            if given is None:
                try:
                    given = self._backend.empty(arena, shape, buffer.dtype, buffer.place, aligned)
                except OutOfMemory as error:
                    raise self._out_of_memory(error, program, arrays) from error
            arrays[buffer.name] = given
            if buffer.role == "output":
                self._outputs[buffer.name] = given
        return arrays

    def _out_of_memory(self, error: OutOfMemory, program: Compiled, arrays: dict[str, Any]) -> DeviceError:
        """The error, with what this call needs and which plan would fit. `arrays` exist already."""
        local, staged = self._local, self._comm.paths(self._backend.device).is_staged
        assert self.extents is not None
        given = {*local.arrays, *("y", "g")} if local.out is not None and not local.in_place else {*local.arrays}
        problem = replace(local.problem, packed=local.packed)
        self._outputs.clear()  # as `arrays`: the traceback of the error keeps them
        return out_of_memory(error, program.plan, problem, self.extents, given, arrays, staged)

    @property
    def number(self) -> int:
        """The number of the call on its communicator, the same on all ranks."""
        return self._stamp

    def at_once(self) -> Any:
        """The result of a call that the program makes and waits for in one step."""
        y, known = self._results(self._compiled) if self.task is DONE else self.wait(), self._arguments.known
        is_for_ticket = self._comm.library is not None and is_for_c(self._backend)
        if known is not None and known.counts is not None and is_for_ticket and known.key not in self._comm.tickets:
            self._remember(known.key, CountsTicket)
        return y

    # -- for the caller
    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the result. Raises the error of the call, and WaitTimeout after `timeout` seconds (it goes on)."""
        if self._ticket is not None:
            drive_in_c(self.task)
        if not self._await(timeout):
            raise WaitTimeout(f"fompi.{self._name} is not finished after {timeout:g} s; it goes on")
        return self.result

    def _await(self, timeout: float | None, until: Callable[[], Callable[[], bool] | None] = lambda: None) -> bool:
        """Drive what does the call until it is finished, or `until()()`. False: not within `timeout`."""
        engine, channel, self._is_unread = self._comm.engine, self._comm.channel, False
        if engine.recorder is not None:
            engine.recorder.awaited(self._comm, self._stamp)
        end = None if timeout is None else perf_counter() + timeout
        task = None
        while task is not self.task:  # in C, then the agreement, then the run
            task = self.task
            seconds = None if end is None else max(0.0, end - perf_counter())
            if not engine.wait(task, channel, seconds, until=until()):
                return False
        return True

    def part(self, rank: int, timeout: float | None = None) -> Any:
        """The rows of the result that come from `rank`, as soon as they are there: a view of the result.

        For operations whose result is the rows of all ranks: all-gathers and all-to-alls, also of a product. The parts
        may be taken in any order; those of ranks before this one arrive first: rank - 1, rank - 2, ... On a device this
        waits for the whole result. Raises StateError for other operations, and what `wait` raises.
        """
        local, comm = self._local, self._comm
        if local.problem.moves not in ("all_gather", "all_to_all") or local.problem.flat:
            raise StateError(f"the result of fompi.{self._name} has no rows of single ranks: call wait()")
        if integer(rank) is None or not 0 <= rank < comm.size:
            raise LayoutError(f"fompi.{self._name}: {rank!r} is not one of the {comm.size} ranks")
        if not self._await(timeout, lambda: self._has_come(rank)):
            raise WaitTimeout(f"the rows of rank {rank} in fompi.{self._name} are not here after {timeout:g} s")
        task = self.task
        if task.finished or task.error is not None:
            array = dlpack.borrow(self.result, "the result").array
        else:
            array = dlpack.rows_at(self._outputs["y"], local.dim, local.split)
        assert self.extents is not None
        rows = self.extents.by_peer("recv") or self.extents.rows
        rows = tuple(map(sum, rows)) if local.problem.experts else rows
        first = sum(rows[:rank])
        where = (slice(None),) * local.dim + (slice(first, first + rows[rank]),)
        return dlpack.lend(array[where], self._compiled.buffers["y"].dtype, local.like)

    def _has_come(self, rank: int) -> Callable[[], bool] | None:
        """Whether the rows of `rank` are in the result. None: only the end of the call tells."""
        run, local, task = self._run, self._local, self.task
        if (run is None and self._ticket is None) or local.device is not None or len(self._compiled.outputs) != 1:
            return None
        parts, last = self._compiled.plan.parts, self._compiled.last_writers("y")
        writers = {last[block] for block in range(rank * parts, (rank + 1) * parts) if block in last}
        if run is not None:
            return lambda: all(run.ended[i] for i in writers)
        if not isinstance(task, TicketInC):
            return None
        front = task.ticket.front
        return lambda: all(task.has_ended(front + i) for i in writers)

    @property
    def _compiled(self) -> Compiled:
        """The program of a call whose ranks have agreed."""
        if self._run is not None:
            return self._run.compiled
        assert self._ticket is not None
        return self._ticket.program

    @property
    def result(self) -> Any:
        """The result of a finished operation. Raises its error, and StateError while it is in flight."""
        task, self._is_unread = self.task, False
        if task.error is not None:
            raise task.error
        if not task.finished:
            raise StateError(f"fompi.{self._name} is in flight: call wait() or done() first")
        run = self._run
        if run is not None and run.is_enqueued:
            self._backend.leave(run.in_flight())
        if self._form is not None:
            form, self._form = self._form, None
            self._remember(form, Ticket)
        return self._results(self._compiled)

    def _remember(self, form: Hashable, kind: type[Ticket]) -> None:
        """Leave a ticket of this finished call, if the headers have decided it alone."""
        comm, local, arguments, run = self._comm, self._local, self._arguments, self._run
        if self.agreed is None or run is None or self.extents is None or not self.agreed.has_one_round:
            return
        given = arguments, local, self.agreed, run.compiled, self.extents, self._backend
        ticket = kind(self._name, comm, *given)
        ticket.enter(form)
        if arguments.known is not None:
            ticket.learn(arguments, local)

    def _results(self, program: Compiled) -> Any:
        """The results in their memory, in the form that the operation gives them."""
        local, dim = self._local, self._local.dim
        if local.out is not None:
            if local.in_place:
                with _COPYING:
                    target, y = local.out.array.reshape(-1), self._outputs.pop("y", None)
                    if y is not None:
                        np.copyto(target, y) if local.out.device is None else self._backend.copy((target, y))
            if local.out.host is not None:
                np.copyto(local.out.host, local.out.array.get())
            return self._arguments.out
        outputs = {}
        for buffer in program.outputs:
            array = self._outputs[buffer.name]
            if local.problem.flat:
                array = array.reshape(local.problem.result_shape(local.shape, self._comm.rank))
            elif (dim or local.split >= 0) and buffer.axis not in ("whole", "experts"):
                array = dlpack.rows_at(array, dim, local.split)
            outputs[buffer.name] = dlpack.lend(array, buffer.dtype, local.like)
        return self._arguments.result(outputs)

    @property
    def counts(self) -> tuple[Any, ...]:
        """How many rows came from each rank, in a finished all-gather or all-to-all. Else the rows of each rank.

        Where rows go to experts, it is a list of numbers for each rank: the rows of each expert.
        """
        if self.extents is None or not self.task.finished:
            raise StateError(f"fompi.{self._name} is not finished: there are no counts yet")
        return self.extents.by_peer("recv") or self.extents.rows

    @property
    def trace(self) -> Trace:
        """The Trace of a finished operation on this rank. On a device it waits for the kernels."""
        if self._run is None and self._times is not None:
            self._run = self._traced_in_c(self._times)
        if self._run is None or not self._run.finished:
            raise StateError(f"fompi.{self._name} is not finished: there is no trace yet")
        self._run.settle()
        return self._traced(self._run)

    def _traced_in_c(self, times: Times) -> Run:
        """The run of this call, which C has finished."""
        self._handshake = times.agreement(self._comm.rank) or self._handshake
        return finished_run(times, self._run_of(self._compiled), [])

    def _traced(self, run: Run) -> Trace:
        assert self.extents is not None
        trace, rank, before = run.trace(self.extents), self._comm.rank, []
        if self._local.packing is not None:
            begun, ended = self._local.packing
            before.append(Event(rank, "compute", -1, "pack(x)", begun, ended, self._local.arrays["x"].nbytes))
        if self._handshake is not None:
            begun, ended, last = self._handshake
            before.append(Event(rank, AGREEMENT, -1, f"all ranks (rank {last} was last)", begun, ended))
        return replace(trace, events=(*before, *trace.events))


class Started(Pending):
    """What `operation.start(...)` returns: a Pending that warns if nobody asks for its result."""

    def leave(self) -> None:
        """The program goes on with other work: the operation must progress by itself."""
        self._returned_at, self._is_unread = perf_counter(), True
        if not self.task.finished:
            self._comm.engine.wake_helper()

    def __del__(self) -> None:
        if self._is_unread:
            warnings.warn(f"fompi.{self._name}.start: nobody waited for the result", ResourceWarning, 2, source=self)
