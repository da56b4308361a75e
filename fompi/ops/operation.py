"""One call of an operation: what its callers see, and what is in flight.

An `Operation` is a public function with `start`. A `Pending` takes what one rank was given
(`fompi.ops.arguments`) to the other ranks, to a cached plan, a run, and back to a tensor of the caller's framework.
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
from fompi.planner.choose import choose, decode_rows, encode_rows, window_of_call
from fompi.plans.plan import MOST_MESSAGES
from fompi.plans.problems import Problem
from fompi.plans.verify import verify
from fompi.runtime.compiled import Compiled
from fompi.runtime.program import Run
from fompi.schedules.registry import REGISTERED, SCHEDULES, as_slices, to_one_peer, write
from fompi.tensors import dlpack
from fompi.traces.trace import AGREEMENT, Event, Trace

Array = np.ndarray[Any, Any]

VERIFIED_RANKS = 8
"""Plans for so many ranks are verified when they are first used here; larger ones are proven by the tests alone."""


class CallOptions(NamedTuple):
    """What a call asks for; effort="measure": where it asks for nothing, what is the fastest, tried at first use."""

    schedule: str = "auto"
    slices: Slices | None = None
    effort: str = "plan"


def compiled(comm: Communicator, local: LocalCall, schedule: str, slices: Slices | None) -> Compiled:
    """The program of this rank, verified with the whole plan when it is first needed. Raises PlanError for none."""
    key = (local.problem, schedule, SCHEDULES.get(schedule), slices, local.packed)  # a user's may be another one now
    found: Compiled | None = comm.plans.get(key)
    if found is None:
        if to_one_peer(local.problem, schedule, slices or 1) > MOST_MESSAGES:  # before so many are written
            raise PlanError(f"{schedule} would send more than {MOST_MESSAGES} messages to one peer: take fewer slices")
        problem = replace(local.problem, packed=local.packed)
        window = window_of_call(problem, schedule, slices or 1, comm.network, comm.machine is not None)
        plan = write(problem, schedule, slices or 1, window=window)
        if comm.size <= VERIFIED_RANKS or schedule in REGISTERED:
            verify(plan)
        found = comm.plans[key] = Compiled(plan, comm.rank)
    return found


@dataclass
class Hooks:
    """What rooms further down do for a call. They register themselves: this file imports neither."""

    differentiable: Callable[..., Any]
    """(operation, arguments, comm, call_options) -> the result, attached to autograd (`fompi.torch`)."""

    measure: Callable[..., tuple[str, Slices]]
    """(operation, arguments, local, comm) -> the fastest schedule and slices (`fompi.tuning.autotune`)."""


def _unregistered(*args: Any) -> Any:
    raise StateError("import fompi, not a part of it: the rooms that this call needs are not loaded")


HOOKS = Hooks(_unregistered, _unregistered)


class Operation:
    """A public operation: `op(x, ...)` waits, `op.start(x, ...)` returns a Pending, `fompi.plan(op, ...)` its plan."""

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
        """What a call with these arguments is about."""
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
        """Begin, and return at once; it goes on by itself. The tensors may be used again when the Pending is done."""
        pending = self.begin(self._arguments(*args, **options), comm, CallOptions(schedule, slices, effort))
        pending.assist()
        return pending

    def begin(self, arguments: Arguments, comm: Any, call_options: CallOptions) -> Pending:
        """Start a call whose tensors must carry no gradient."""
        refusal = None
        if _wants_gradient(arguments):
            refusal = TensorError(
                f"fompi.{self.name}.start has no gradient: call fompi.{self.name}(...) for a tensor that requires "
                "grad, or pass x.detach()"
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
                raise PlanError(f"effort={effort!r}: take 'plan' or 'measure'")
            if slices is not None:
                slices = as_slices(slices)
            if effort == "measure" and (schedule, slices) != ("auto", None):
                raise PlanError('effort="measure" chooses schedule and slices: leave both out, or effort')
            if (schedule, slices) != ("auto", None):  # where "auto" takes what cannot be cut so fine: direct
                compiled(communicator, local, "direct" if schedule == "auto" else schedule, slices)
        except Exception as error:  # the other ranks must not wait for us
            local, refusal = None, error
        asks = (schedule, slices) != ("auto", None) or local is None or communicator.size == 1
        if effort == "measure" and not asks:
            schedule, slices = HOOKS.measure(self, arguments, local, communicator)
        return Pending(self.name, arguments, local, refusal, communicator, schedule, slices)

    def __repr__(self) -> str:
        return f"fompi.{self.name}"


def _wants_gradient(arguments: Arguments) -> bool:
    return "torch" in sys.modules and any(map(dlpack.requires_grad, arguments.tensors))


# ----------------------------------------------------------------------------------------------------- in flight


class Pending:
    """An operation in flight. `done()` drives it; `wait()` returns its result; `result` is that of a finished one."""

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
        self._came: tuple[float, float, int] | None = None  # the ranks: from when, until when, and the last of them
        self._run: Run | None = None
        self._returned_at: float | None = None  # when `start` returned
        self._task: Task  # the agreement, then the run: then nothing of ours knows the agreement, nor it us
        self.extents: Extents | None = None
        engine = comm.engine
        with engine.lock:
            self._stamp, self._slot = comm.next_call()
            comm.begins(name, self._stamp)
            if comm.size == 1 and refusal is None:
                self._launch([sum(local.rows) if local.problem.moves == "all_to_all" else local.rows[0]])  # type: ignore[union-attr]
                return
            number, rows, expects, alike, signature, hint = 0, (0,) * comm.size, -1, True, 0, 0
            if local is not None:
                number, alike = self._common(local), local.problem.moves != "all_to_all"
                if comm.machine is not None or (comm.network and not alike):
                    signature, hint = _signature_of(local.problem), 0 if alike else encode_rows(local.rows, comm.rank)
                if local.problem.moves in ("all_gather", "all_to_all"):
                    rows, expects = local.rows, local.expects
            comm.turns.append(self._stamp)
            self._task = agreement = Agreement(
                comm, self._stamp, number, self._signature, rows, expects, refusal, alike, signature, hint
            )
            agreement.then = self._agreed
            agreement.start()
        if refusal is not None:
            engine.wait(agreement, comm.channel)
            raise refusal

    def _common(self, local: LocalCall) -> int:
        """What all ranks must agree on, as a number."""
        number = _digest((local.problem.common, self._schedule, self._slices, self._arguments.gradient))
        if local.problem.moves in ("all_gather", "all_to_all"):
            return number
        return number ^ digest(str(local.shape if local.problem.flat else local.rows))  # may differ at every call

    def _signature(self) -> str:
        """The call in words."""
        local = self._local
        if local is None:
            return self._name
        moves = local.problem.moves
        rows = "" if moves in ("all_gather", "all_to_all") else f" with rows {list(local.rows)}"
        if local.problem.flat:
            rows = f" with the shape {local.shape}"
        how = "" if (self._schedule, self._slices) == ("auto", None) else f" by {self._schedule}, slices {self._slices}"
        return f"{local.problem}{rows}{how}{' for a gradient' if self._arguments.gradient else ''}"

    def _agreed(self, agreement: Any) -> None:
        if agreement.error is None:
            self._came = agreement.begun, agreement.touched, agreement.last
            try:
                self._launch(agreement.rows, agreement.same_signature, agreement.hints)
            except Exception as error:
                if self._run is None:
                    self._comm.channel.fail(agreement, error)
                    agreement.error = error
        if self._run is None:
            self._comm.end_turn(self._stamp)

    def _launch(self, arrived: Sequence[int], alike: bool = True, hints: Sequence[int] = ()) -> None:
        """All ranks are here and agree: take a plan, memory for results, and start. `alike`: on the same problem.

        `hints`: by each rank, of what it sends in an all-to-all (`choose.encode_rows`).
        """
        comm, local = self._comm, self._local
        assert local is not None
        problem = local.problem
        if problem.moves == "all_to_all":
            sizes, (total, even) = None, decode_rows(hints) if alike else (None, False)
        else:
            sizes = Sizes(tuple(arrived) if problem.moves == "all_gather" else local.rows)
            total, even = sum(sizes.rows), False
        program = self._compiled(problem, total, alike, even)
        shares = program.plan.shares
        if sizes is None:
            extents = Extents(comm.rank, comm.size, shares, (), local.rows, tuple(arrived))
        else:
            extents = sizes.extents(comm.rank, shares)
        self.extents = extents
        sized = program.sized(extents)
        memory = self._memory(program, sized.shapes)
        actions = program.resolve(memory, sized.starts, _BACKEND, comm.link.collective)
        self._task = self._run = run = Run(program, comm, self._stamp, self._slot)
        if local.out is not None:
            dlpack.written(local.out.owner)
        run.takes_turns = comm.size > 1
        if comm.recording is not None or comm.engine.report is not None:
            run.then = functools.partial(self._note, comm.recording, run)
        run.start(actions, None, program.is_long(sized), program.is_small(sized))

    def _note(self, recording: list[Trace] | None, run: Run) -> None:
        if recording is not None:
            recording.append(self._traced(run))
        if self._comm.engine.report is not None:
            self._comm.engine.report.note(run, self._traced(run), self.extents, _BACKEND, returned_at=self._returned_at)

    def _compiled(self, problem: Problem, total: int | None, alike: bool, even: bool) -> Compiled:
        """The program of this rank, by the schedule that was asked for, or that suits `total` rows (`even`: shards)."""
        assert self._local is not None
        schedule, slices = self._schedule, self._slices
        if schedule == "auto":
            machine = self._comm.machine if alike else None  # else the ranks might choose differently
            schedule, cut = choose(problem, total, self._comm.network, machine, self._comm.crowded, even)
            if slices is None:
                slices = cut
            elif to_one_peer(problem, schedule, slices) > MOST_MESSAGES:
                schedule = "direct"
        return compiled(self._comm, self._local, schedule, slices)

    def _memory(self, program: Compiled, shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
        """Every buffer of the program as an array."""
        local, take = self._local, self._comm.engine.arena.take
        assert local is not None
        arrays, aligned = dict(local.arrays), local.like.framework == "jax"  # which borrows nothing else
        for buffer in program.program.buffers:
            shape = shapes[buffer.name]
            given = arrays.get(buffer.name)
            if given is None and buffer.role == "output" and local.out is not None and buffer.name in ("y", "g"):
                given = local.out.array.reshape(shape) if local.out.array.size == _size(shape) else local.out.array
            if given is not None and given.shape != shape:
                raise ShapeError(f"{self._name}: {buffer.name} has {len(given)} rows, but {shape[0]} arrive here")
            if given is None:
                given = take(shape, _BACKEND.storage(buffer.dtype), aligned)
            arrays[buffer.name] = given
            if buffer.role == "output":
                self._outputs[buffer.name] = given
        return arrays

    def assist(self) -> None:
        """Have it go on by itself: the program leaves it."""
        self._returned_at = perf_counter()
        self._comm.engine.assist()

    # -- what the caller sees
    def done(self) -> bool:
        """Whether it is finished; moves it if it is not."""
        if not self._task.finished:
            self._comm.engine.ask()
        return self._task.finished

    def wait(self, timeout: float | None = None) -> Any:
        """The result. Raises what went wrong, and WaitTimeout after `timeout` seconds (the operation goes on)."""
        engine, channel = self._comm.engine, self._comm.channel
        end = None if timeout is None else perf_counter() + timeout
        for _ in ("agreement", "run"):
            left = None if end is None else max(0.0, end - perf_counter())
            if not engine.wait(self._task, channel, left):
                raise WaitTimeout(f"fompi.{self._name} is not finished after {timeout:g} s; it goes on")
        return self.result

    @property
    def result(self) -> Any:
        """The tensor, or tensors, of a finished operation."""
        task = self._task
        if task.error is not None:
            raise task.error
        if not task.finished:
            raise StateError(f"fompi.{self._name} is in flight: wait() for it, or ask done()")
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
        """What this rank did when; of a finished operation."""
        if self._run is None or not self._run.finished:
            raise StateError(f"fompi.{self._name} is not finished: there is no trace yet")
        return self._traced(self._run)

    def _traced(self, run: Run) -> Trace:
        assert self._local is not None and self.extents is not None
        trace, rank, before = run.trace(self.extents), self._comm.rank, []
        if self._local.packing is not None:
            begun, ended = self._local.packing
            before.append(Event(rank, "compute", -1, "pack(x)", begun, ended, self._local.arrays["x"].nbytes))
        if self._came is not None:
            begun, ended, last = self._came
            before.append(Event(rank, AGREEMENT, -1, f"all ranks, of which rank {last} came last", begun, ended))
        return replace(trace, events=(*before, *trace.events))


@functools.lru_cache(maxsize=1024)
def _digest(agreed: tuple[object, ...]) -> int:
    return digest(str(agreed))


@functools.lru_cache(maxsize=1024)
def _signature_of(problem: Problem) -> int:
    return digest(str(problem)) & (1 << SIGNATURE_BITS) - 1


def _size(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


_BACKEND = Numpy()
