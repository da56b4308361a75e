"""One call of an operation, from the caller's tensors to the result.

    Operation.__call__ or .start
      -> Arguments, LocalCall   this rank's tensors, checked                    (`fompi.ops.arguments`)
      -> Agreement              all ranks call the same operation; their rows   (`fompi.engine.handshake`)
      -> Compiled               this rank's program, from the communicator's cache
      -> Run                    messages and kernels                            (`fompi.runtime.program`)
      -> result                 tensors of the caller's framework

No data is sent before all ranks agree.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from fompi.backends.numpy import Numpy
from fompi.base.errors import PlanError, ShapeError, StateError, TensorError, WaitTimeout
from fompi.base.layout import Extents, Sizes, Slices
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import SIGNATURE_BITS, Agreement, digest
from fompi.engine.tasks import Task
from fompi.ops.arguments import Arguments, LocalCall, localise
from fompi.planner.choose import choose_schedule, decode_rows, encode_rows, window_of_call
from fompi.plans.plan import MOST_MESSAGES
from fompi.plans.problems import Problem
from fompi.plans.verify import verify
from fompi.runtime.compiled import Compiled
from fompi.runtime.program import Run
from fompi.schedules.registry import REGISTERED, SCHEDULES, as_slices, messages_per_peer, write
from fompi.tensors import dlpack
from fompi.traces.trace import AGREEMENT, Event, Trace

Array = np.ndarray[Any, Any]

VERIFIED_RANKS = 8
"""Plans for at most this many ranks are verified at first use. Verification takes longer with more ranks.

Plans for more ranks are only verified by the tests, except those of schedules that a user has registered.
"""


class CallOptions(NamedTuple):
    """How a call is carried out: the arguments `schedule`, `slices` and `effort` of every operation."""

    schedule: str = "auto"
    slices: Slices | None = None
    effort: str = "plan"


def program_of(comm: Communicator, local: LocalCall, schedule: str, slices: Slices | None) -> Compiled:
    """This rank's program, from the cache of the communicator. At first use it is written and the plan is verified.

    Raises PlanError if the schedule cannot carry out this call.
    """
    # The generator is part of the key, because a user may register another schedule under the same name.
    key = (local.problem, schedule, SCHEDULES.get(schedule), slices, local.packed)
    program: Compiled | None = comm.plans.get(key)
    if program is None:
        if messages_per_peer(local.problem, schedule, slices or 1) > MOST_MESSAGES:  # before a long program is written
            raise PlanError(f"{schedule} would send more than {MOST_MESSAGES} messages to one peer: use fewer slices")
        problem = replace(local.problem, packed=local.packed)
        window = window_of_call(problem, schedule, slices or 1, comm.network, comm.machine is not None)
        plan = write(problem, schedule, slices or 1, window=window)
        if comm.size <= VERIFIED_RANKS or schedule in REGISTERED:
            verify(plan)
        program = comm.plans[key] = Compiled(plan, comm.rank)
    return program


@dataclass
class Hooks:
    """Functions of rooms that this room must not import. `import fompi` fills them in."""

    differentiable: Callable[..., Any]
    """(operation, arguments, comm, call_options) -> the result, attached to autograd (`fompi.torch`)."""

    measure: Callable[..., tuple[str, Slices]]
    """(operation, arguments, local, comm) -> the fastest schedule and slices (`fompi.tuning.autotune`)."""


def _unregistered(*args: Any) -> Any:
    raise StateError("this call needs parts of fompi that are not loaded: run `import fompi` first")


HOOKS = Hooks(_unregistered, _unregistered)


class Operation:
    """A public operation, for example `fompi.all_gather`.

        y = operation(x, ...)              # waits for the result
        pending = operation.start(x, ...)  # returns a Pending at once
        plan = fompi.plan(operation, ...)  # the Plan of a call, without MPI and data

    All ranks of the communicator must call it.
    """

    def __init__(self, arguments: Callable[..., Arguments]):
        functools.update_wrapper(self, arguments)
        self.name = arguments.__name__
        self._arguments = arguments

    def __call__(
        self,
        *args: Any,
        comm: Any = None,
        schedule: str = "auto",
        slices: Slices | None = None,
        effort: str = "plan",
        **options: Any,
    ) -> Any:
        arguments = self._arguments(*args, **options)
        if _wants_gradient(arguments):
            return HOOKS.differentiable(self, arguments, comm, CallOptions(schedule, slices, effort))
        return self._begin(arguments, comm, (schedule, slices, effort)).wait()

    def arguments(self, *args: Any, **options: Any) -> Arguments:
        """The Arguments of a call, before they are checked."""
        return self._arguments(*args, **options)

    def start(
        self,
        *args: Any,
        comm: Any = None,
        schedule: str = "auto",
        slices: Slices | None = None,
        effort: str = "plan",
        **options: Any,
    ) -> Pending:
        """Start the operation and return at once. It progresses while the program does other work.

        The tensors must not be written before the Pending is done. Raises TensorError for a tensor that requires
        grad.
        """
        pending = self.begin(self._arguments(*args, **options), comm, CallOptions(schedule, slices, effort))
        pending.leave()
        return pending

    def begin(self, arguments: Arguments, comm: Any, call_options: CallOptions) -> Pending:
        """Start a call that records no gradient. Its tensors must not require grad."""
        refusal = None
        if _wants_gradient(arguments):
            refusal = TensorError(
                f"fompi.{self.name}.start has no gradient: call fompi.{self.name}(...) if a tensor requires grad, "
                "or pass x.detach()"
            )
        return self._begin(arguments, comm, call_options, refusal)

    def _begin(
        self,
        arguments: Arguments,
        comm: Any,
        call_options: tuple[str, Slices | None, str],
        refusal: Exception | None = None,
    ) -> Pending:
        communicator, local = Communicator.of(comm), None
        schedule, slices, effort = call_options
        try:
            if refusal is not None:
                raise refusal
            local = localise(self.name, arguments, communicator.rank, communicator.size)
            if effort not in ("plan", "measure"):
                raise PlanError(f"effort={effort!r}: effort must be 'plan' or 'measure'")
            if slices is not None:
                slices = as_slices(slices)
            if effort == "measure" and (schedule, slices) != ("auto", None):
                raise PlanError(
                    'effort="measure" chooses schedule and slices itself: leave both out, or leave out effort'
                )
            if (schedule, slices) != ("auto", None):  # "auto" uses direct if no other schedule can have such slices
                program_of(communicator, local, "direct" if schedule == "auto" else schedule, slices)
        except Exception as error:  # this rank still takes part in the handshake, so that the other ranks do not wait
            local, refusal = None, error
        nothing_to_choose = (schedule, slices) != ("auto", None) or local is None or communicator.size == 1
        if effort == "measure" and not nothing_to_choose:
            schedule, slices = HOOKS.measure(self, arguments, local, communicator)
        return Pending(self.name, arguments, local, refusal, communicator, schedule, slices)

    def __repr__(self) -> str:
        return f"fompi.{self.name}"


def _wants_gradient(arguments: Arguments) -> bool:
    return "torch" in sys.modules and any(map(dlpack.requires_grad, arguments.tensors))


# ----------------------------------------------------------------------------------------------------- in flight


class Pending:
    """An operation in flight, made by `operation.start(...)`.

        y = pending.wait()  # waits for the result
        pending.done()      # True once it is finished; progresses everything in flight
        pending.result      # the result of a finished operation

    Any thread may wait for it. The operation goes on if the program drops the Pending.
    """

    def __init__(
        self,
        name: str,
        arguments: Arguments,
        local: LocalCall | None,
        refusal: Exception | None,
        comm: Any,
        schedule: str,
        slices: Slices | None,
    ):
        self._arguments, self._local, self._comm = arguments, local, comm
        self._schedule, self._slices = schedule, slices
        self._name = name
        self._outputs: dict[str, Array] = {}
        self._handshake: tuple[float, float, int] | None = None  # when it began and ended, and which rank was last
        self._run: Run | None = None
        self._returned_at: float | None = None  # when `start` returned to the program
        self._task: Task  # the agreement, then the run; this drops the agreement, which refers to this Pending
        self.extents: Extents | None = None
        engine = comm.engine
        with engine.lock:
            self._stamp, self._slot = comm.next_call()
            comm.note_start(name, self._stamp)
            if comm.size == 1 and refusal is None:
                self._launch([sum(local.rows) if local.problem.moves == "all_to_all" else local.rows[0]])  # type: ignore[union-attr]
                return
            number, rows, expects, equal_totals, signature, hint = 0, (0,) * comm.size, -1, True, 0, 0
            if local is not None:
                number, equal_totals = self._common(local), local.problem.moves != "all_to_all"
                if comm.machine is not None or (comm.network and not equal_totals):
                    signature = _signature_of(local.problem)
                    hint = 0 if equal_totals else encode_rows(local.rows, comm.rank)
                if local.problem.moves in ("all_gather", "all_to_all"):
                    rows, expects = local.rows, local.expects
            comm.turns.append(self._stamp)
            self._task = agreement = Agreement(
                comm, self._stamp, number, self._describe, rows, expects, refusal, equal_totals, signature, hint
            )
            agreement.then = self._agreed
            agreement.start()
        if refusal is not None:
            engine.wait(agreement, comm.channel)
            raise refusal

    def _common(self, local: LocalCall) -> int:
        """A digest of everything that must be the same on all ranks."""
        number = _digest((local.problem.common, self._schedule, self._slices, self._arguments.gradient))
        if local.problem.moves in ("all_gather", "all_to_all"):
            return number
        # Not part of the cached digest: these may change at every call.
        return number ^ digest(str(local.shape if local.problem.flat else local.rows))

    def _describe(self) -> str:
        """The call as text, for error messages."""
        local = self._local
        if local is None:
            return self._name
        moves = local.problem.moves
        rows = "" if moves in ("all_gather", "all_to_all") else f" with rows {list(local.rows)}"
        if local.problem.flat:
            rows = f" with the shape {local.shape}"
        options = ""
        if (self._schedule, self._slices) != ("auto", None):
            options = f" by {self._schedule}, slices {self._slices}"
        return f"{local.problem}{rows}{options}{' for a gradient' if self._arguments.gradient else ''}"

    def _agreed(self, agreement: Any) -> None:
        if agreement.error is None:
            self._handshake = agreement.begun, agreement.moved_at, agreement.last
            try:
                self._launch(agreement.rows, agreement.same_signature, agreement.hints)
            except Exception as error:
                if self._run is None:
                    self._comm.channel.fail(agreement, error)
                    agreement.error = error
        if self._run is None:
            self._comm.end_turn(self._stamp)

    def _launch(self, incoming: Sequence[int], same_problem: bool = True, hints: Sequence[int] = ()) -> None:
        """All ranks agree: choose a plan, take memory for the results, and start.

        `incoming[source]` is how many rows come from each rank. `same_problem`: all ranks have the same problem.
        `hints[source]` is the size of what each rank sends in an all-to-all (`choose.encode_rows`).
        """
        comm, local = self._comm, self._local
        assert local is not None
        problem = local.problem
        if problem.moves == "all_to_all":
            sizes, (total, even) = None, decode_rows(hints) if same_problem else (None, False)
        else:
            sizes = Sizes(tuple(incoming) if problem.moves == "all_gather" else local.rows)
            total, even = sum(sizes.rows), False
        program = self._program(problem, total, same_problem, even)
        shares = program.plan.shares
        if sizes is None:
            extents = Extents(comm.rank, comm.size, shares, (), local.rows, tuple(incoming))
        else:
            extents = sizes.extents(comm.rank, shares)
        self.extents = extents
        sized = program.sized(extents)
        memory = self._memory(program, sized.shapes)
        actions = program.resolve(memory, sized.starts, _BACKEND, comm.link.collective)
        self._task = self._run = run = Run(program, comm, self._stamp, self._slot)
        if local.out is not None:
            dlpack.mark_written(local.out.owner)
        run.takes_turns = comm.size > 1
        if comm.recording is not None or comm.engine.report is not None:
            run.on_finish = functools.partial(self._note, comm.recording, run)
        run.start(actions, None, program.is_long(sized), program.is_small(sized))

    def _note(self, recording: list[Trace] | None, run: Run) -> None:
        if recording is not None:
            recording.append(self._traced(run))
        if self._comm.engine.report is not None:
            self._comm.engine.report.note(run, self._traced(run), self.extents, _BACKEND, returned_at=self._returned_at)

    def _program(self, problem: Problem, total: int | None, same_problem: bool, even: bool) -> Compiled:
        """This rank's program by the schedule of the call. "auto" chooses one for `total` rows.

        `even`: all ranks send equal shards in an all-to-all.
        """
        assert self._local is not None
        schedule, slices = self._schedule, self._slices
        if schedule == "auto":
            machine = self._comm.machine if same_problem else None  # for different problems the choices could differ
            schedule, best_slices = choose_schedule(
                problem, total, self._comm.network, machine, self._comm.crowded, even
            )
            if slices is None:
                slices = best_slices
            elif messages_per_peer(problem, schedule, slices) > MOST_MESSAGES:
                schedule = "direct"
        return program_of(self._comm, self._local, schedule, slices)

    def _memory(self, program: Compiled, shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
        """Every buffer of the program as an array: the caller's memory, or memory of the arena."""
        local, take = self._local, self._comm.engine.arena.take
        assert local is not None
        arrays, aligned = dict(local.arrays), local.like.framework == "jax"  # JAX copies memory that is not aligned
        for buffer in program.program.buffers:
            shape = shapes[buffer.name]
            given = arrays.get(buffer.name)
            if given is None and buffer.role == "output" and local.out is not None and buffer.name in ("y", "g"):
                given = local.out.array.reshape(shape) if local.out.array.size == _size(shape) else local.out.array
            if given is not None and given.shape != shape:
                raise ShapeError(f"{self._name}: {buffer.name} has {len(given)} rows, but {shape[0]} rows arrive here")
            if given is None:
                given = take(shape, _BACKEND.storage(buffer.dtype), aligned)
            arrays[buffer.name] = given
            if buffer.role == "output":
                self._outputs[buffer.name] = given
        return arrays

    def leave(self) -> None:
        """The program goes on with other work: the operation must progress by itself."""
        self._returned_at = perf_counter()
        self._comm.engine.wake_helper()

    # -- for the caller
    def done(self) -> bool:
        """True once the operation is finished. Progresses everything in flight."""
        if not self._task.finished:
            self._comm.engine.progress_while_waiting()
        return self._task.finished

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the result. Raises the error of the call, and WaitTimeout after `timeout` seconds (it goes on)."""
        engine, channel = self._comm.engine, self._comm.channel
        end = None if timeout is None else perf_counter() + timeout
        for _ in ("agreement", "run"):
            seconds = None if end is None else max(0.0, end - perf_counter())
            if not engine.wait(self._task, channel, seconds):
                raise WaitTimeout(f"fompi.{self._name} is not finished after {timeout:g} s; it goes on")
        return self.result

    @property
    def result(self) -> Any:
        """The result of a finished operation. Raises its error, and StateError while it is in flight."""
        task = self._task
        if task.error is not None:
            raise task.error
        if not task.finished:
            raise StateError(f"fompi.{self._name} is in flight: call wait() or done() first")
        local, dim, run = self._local, self._arguments.dim, self._run
        assert local is not None and run is not None
        if local.out is not None:
            return self._arguments.out
        outputs = {}
        for buffer in run.compiled.outputs:
            array = self._outputs[buffer.name]
            if local.problem.flat:
                array = array.reshape(local.shape)
            elif dim and buffer.axis != "whole":
                array = np.moveaxis(array, 0, dim)
            outputs[buffer.name] = dlpack.lend(array, buffer.dtype, local.like)
        return self._arguments.result(outputs)

    @property
    def trace(self) -> Trace:
        """The Trace of a finished operation on this rank."""
        if self._run is None or not self._run.finished:
            raise StateError(f"fompi.{self._name} is not finished: there is no trace yet")
        return self._traced(self._run)

    def _traced(self, run: Run) -> Trace:
        assert self._local is not None and self.extents is not None
        trace, rank, before = run.trace(self.extents), self._comm.rank, []
        if self._local.packing is not None:
            begun, ended = self._local.packing
            before.append(Event(rank, "compute", -1, "pack(x)", begun, ended, self._local.arrays["x"].nbytes))
        if self._handshake is not None:
            begun, ended, last = self._handshake
            before.append(Event(rank, AGREEMENT, -1, f"all ranks (rank {last} was last)", begun, ended))
        return replace(trace, events=(*before, *trace.events))


@functools.lru_cache(maxsize=1024)
def _digest(values: tuple[object, ...]) -> int:
    return digest(str(values))


@functools.lru_cache(maxsize=1024)
def _signature_of(problem: Problem) -> int:
    return digest(str(problem)) & (1 << SIGNATURE_BITS) - 1


def _size(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


_BACKEND = Numpy()
