"""Calls that run in C, and how Python goes on with a call at any point (docs/inside/native.md).

C knows only the good case. A call that C does not finish soon is an `InC`, which the engine polls. One that makes no
progress for long, or in which MPI fails, becomes a `Run`: from then on everything is as if Python had begun it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fompi.backends.half import storage
from fompi.backends.numpy import Numpy
from fompi.engine.communicator import Communicator
from fompi.engine.engine import Engine
from fompi.engine.in_flight import EAGER_NBYTES, FINISHED, GOES_ON, HAS_KERNELS, STALLED
from fompi.engine.tasks import Task
from fompi.mpi.transport import start_mpi
from fompi.runtime.compiled import Compiled, Sized
from fompi.runtime.given import array_at
from fompi.runtime.lower import MOST_NBYTES, CallTable, table
from fompi.runtime.program import Run

if TYPE_CHECKING:
    from fompi.native._native import Call

UNDER_WAY = (GOES_ON, STALLED, HAS_KERNELS)
"""What `Call.run` returns if the call is in flight."""

IN_C_SECONDS, STALL_SECONDS = 5e-3, 2e-3
"""C drives a call for this long without a look at anything else, and this long without progress. Then it is in flight:
Python looks after deadlines, signals, control messages and other calls.
"""


def drive_in_c(task: Task) -> None:
    """The program waits for this task. If it is in C, and Python drives nothing else, C drives it for a while."""
    begun = perf_counter()
    if task.drive() is not None:
        task.comm.engine.waits.add(begun, perf_counter())  # type: ignore[attr-defined]


class Times(NamedTuple):
    """When a call in C began and ended, and when each of its ops did (`Call.times`). The first `front` ops agree."""

    started: float
    moved_at: float
    of_ops: bytes
    front: int = 0

    @classmethod
    def of(cls, call: Call, front: int = 0) -> Times:
        return cls(call.started, call.moved_at, call.times(), front)

    def agreement(self, rank: int) -> tuple[float, float, int] | None:
        """When the agreement of this rank began and ended, and which rank came last."""
        if self.front < 2:
            return None
        times = memoryview(self.of_ops).cast("d")
        ended = times[len(times) // 2 :]
        last = max(range(self.front // 2), key=ended.__getitem__)  # the receives, without its own, then as many sends
        return times[0], ended[self.front - 1], last + (last >= rank)


AT_ONCE_SECONDS = 2e-5
"""C drives a small call for this long though the program does not wait for it: to wake another thread takes longer."""

SOON_SECONDS = 8e-5
"""As AT_ONCE_SECONDS, if the program has waited for the last such call within this time: then it waits for this one,
too, as in `dist.recv`, where torch begins a call and waits for it in two steps.
"""


def seconds_in_c(engine: Engine, waits: bool, is_small: bool) -> float:
    """How long C drives a call that begins. 0: one round, because Python drives other calls, or the call is long."""
    if not engine.is_all_in_c:
        return 0.0
    if waits or not is_small:
        return IN_C_SECONDS if waits else 0.0
    return SOON_SECONDS if engine.waits_soon else AT_ONCE_SECONDS if engine.spins else 0.0


def _nothing() -> Any:
    """What is left of a call that is over."""


class PythonKernels(NamedTuple):
    """The kernels of a call in C that are Python's, by op of the call. The first op of the program is op `front`.

    On an asynchronous backend `follows` says which kernels each one follows.
    """

    actions: Mapping[int, Any] | Sequence[Any] = ()
    follows: Sequence[Sequence[int]] | None = None
    front: int = 0


NO_KERNELS = PythonKernels()


class InC(Task):
    """A call in flight that C carries out.

    If C cannot end it well, or Python must know more of it, Python goes on with it: `take_over()` returns the task that
    does. Then this one is finished, as it is when C has finished the call; before that, `arrived()` was called. `held`
    is the memory of the call.
    """

    def __init__(
        self,
        call: Call,
        comm: Communicator,
        stamp: int,
        take_over: Callable[[], Task],
        arrived: Callable[[], object],
        held: object = None,
        kernels: PythonKernels = NO_KERNELS,
    ):
        self.call, self.comm, self.stamp, self.held = call, comm, stamp, held
        self.unready: dict[tuple[str, int], list[int]] = {}  # as in `Run`
        self.tokens: dict[int, Any] = {}  # of kernels that were launched, by op of the program
        self._kernels = kernels
        self._take_over, self._arrived = take_over, arrived
        self._heir: Task | None = None
        self._left_at = perf_counter()  # when the program went on with other work; 0: it has waited since
        self._enter()
        comm.engine.in_c(self, comm.library)

    def _enter(self) -> None:
        """From now on this is what does the call."""
        self.comm.channel.begin(self.stamp, self)

    @property
    def moved_at(self) -> float:  # type: ignore[override]
        return self.call.moved_at

    @property
    def awaits_start(self) -> bool:  # type: ignore[override]
        heir = self.heir()
        return heir is not None and heir.awaits_start

    def has_ended(self, op: int) -> bool:
        """True once this op is done."""
        return self.call.has_ended(op)

    def drive(self) -> bool | None:
        engine = self.comm.engine
        with engine.lock:
            if self._left_at and not self.awaited:
                engine.waits_soon = perf_counter() - self._left_at < SOON_SECONDS
            self._left_at = 0.0
            if self.finished or engine.over or not engine.is_all_in_c:
                return None
            state = self.call.drive(IN_C_SECONDS, STALL_SECONDS)
            self._has_come_to(state)
        return state != STALLED

    def moved(self) -> None:
        """C has moved the call. Called with the engine's lock held."""
        self._has_come_to(self.call.state)

    def _has_come_to(self, state: int) -> None:
        while state == HAS_KERNELS and self._kernels.follows is not None:
            state = self._launch()
        if state == HAS_KERNELS:
            self.comm.engine.kernels_ready(self)
        elif state not in UNDER_WAY:
            self.ended()

    def _launch(self) -> int:
        """Launch a kernel on an asynchronous backend. Returns the state of the call."""
        op = self.call.take(False)
        if op < 0:
            return self.call.state
        actions, follows, front = self._kernels
        i = op - front
        try:
            token = actions[op]([self.tokens[j] for j in follows[i] if j in self.tokens])  # type: ignore[index]
        except Exception as error:
            heir: Any = self.heir()
            heir.launch_failed(i, error)
            return GOES_ON
        self.tokens[i] = token
        return self.call.launched(op, token.begun, token.due)

    def take(self, merges_only: bool) -> tuple[int, Callable[[], object]] | None:
        op = self.call.take(merges_only)
        if self.call.state != HAS_KERNELS:
            self.comm.engine.kernels_done(self)
        return None if op < 0 else (op, self._kernels.actions[op])

    def ran(self, key: int, begun: float, error: BaseException | None) -> None:
        heir = self.heir() if error is not None or self.finished else None
        if heir is not None:
            heir.ran(key, begun, error)
        elif not self.finished:
            self._has_come_to(self.call.ran(key, begun))

    def ready_part(self, name: str, block: int, entry: object = None) -> None:
        """The program has written block `block` of the input `name`: the ops that read it may start."""
        ops = self.unready.pop((name, block), None)
        if ops is not None:
            self.call.release(np.array(ops, np.int32))
            self.moved()

    def can_finish(self) -> bool:
        return not self.missing()

    def missing(self) -> list[str]:
        """The blocks of inputs for which only the program can call `ready`."""
        with self.comm.engine.lock:
            return sorted({f"{name}[{block}]" for name, block in self.unready})

    def ended(self) -> None:
        """C goes on no more. Called with the engine's lock held."""
        if self.call.state != FINISHED:
            self.heir()
            return
        self.comm.engine.not_in_c(self)
        self.comm.channel.active.pop(self.stamp, None)
        self._arrived()
        self._forget()
        self.finished = True  # last: a thread that waits for it reads what `arrived` has made

    def _forget(self) -> None:
        """What the call has used may go: tensors of the program, and who goes on with it, which know this task."""
        self._take_over = self._arrived = _nothing
        self._kernels, self.held = NO_KERNELS, None

    def heir(self) -> Task | None:
        """The task that goes on with the call in Python, from now on. None: C has finished it."""
        with self.comm.engine.lock:
            if not self.finished:
                self.comm.engine.not_in_c(self)
                self.comm.engine.kernels_done(self)
                self._heir = self._take_over()
                self._heir.awaited, self._heir.is_long = self.awaited, self.is_long
                self._forget()
                self.finished = True
                # For a moment nothing was in flight, so the helper may have gone to sleep.
                self.comm.engine.wake_helper()
            return self._heir

    def stalled(self) -> None:
        self.heir()

    def waits_for(self) -> tuple[int, str] | None:
        heir = self.heir()
        return None if heir is None else heir.waits_for()

    def poison(self, error: BaseException, sender: int) -> bool:
        heir = self.heir()
        return heir is not None and heir.poison(error, sender)

    def abandon(self, error: BaseException) -> None:
        heir = self.heir()
        if heir is not None:
            heir.abandon(error)

    def broke(self, error: Exception) -> None:
        self.comm.channel.fail(self, error)


def is_for_c(backend: Any) -> bool:
    """True if calls on this backend may run in C: its kernels are NumPy's, or take a time that is known."""
    return type(backend) is Numpy or hasattr(backend, "bind_timed")


class NativeCall(NamedTuple):
    """A program as a call in C. `unplaced`: the buffers that only kernels of Python use, which need no address."""

    call: Call
    unplaced: frozenset[str]


def native_call(
    compiled: Compiled, sized: Sized, comm: Communicator, backend: Any, kernels: Collection[str] = ()
) -> NativeCall | None:
    """The program with these rows as a call in C. None: it must run in Python. These `kernels` are Python's."""
    library = comm.library
    if library is None or comm.size == 1 or comm.urgency is not None or not is_for_c(backend):
        return None
    made = table(compiled, sized, comm.most_nbytes, kernels)
    return None if made is None else NativeCall(made_call(library, made, comm, compiled, sized), made.unplaced)


def made_call(library: Any, made: CallTable, comm: Communicator, compiled: Compiled, sized: Sized) -> Call:
    """The call of this table on `comm`."""
    call = called(library, made, comm, compiled.is_small(sized), compiled.is_long(sized), compiled.forwards)
    if made.blocks is not None:
        call.resizable(made.blocks.view(np.uint8), EAGER_NBYTES, min(comm.most_nbytes, MOST_NBYTES))
    return call


def called(
    library: Any, made: CallTable, comm: Communicator, is_small: bool, is_long: bool = False, forwards: bool = False
) -> Call:
    """The call of this table. `is_small`: sums run where they are released. `is_long`, `forwards`: as in `Task`."""
    from fompi.native._native import Call

    lists = *made.on_start, *made.on_done, made.blockers, made.first, made.nbytes
    how = is_small, comm.engine.spins, is_long, forwards
    return Call(library, made.ops.view(np.uint8), *lists, comm.link.comm.handle, *how)


def taken_over(
    call: Call,
    run: Run,
    actions: list[Any],
    is_small: bool,
    front: int = 0,
    beside: Task | None = None,
    tokens: Mapping[int, Any] = MappingProxyType({}),
    exported: Any = None,
) -> Run:
    """`run` goes on with the call where C has left it. The engine is locked. Raises the error of MPI, if it has failed.

    An op has begun if it has a time, and waits for nothing if its counter is zero: those that do neither can start.
    The first `front` ops are those of an agreement, which is over. `beside` owns their sends. Ops behind those of the
    program are not Python's. `tokens` are those of kernels that were launched. `exported`: what `call.export` has said.
    """
    MPI, channel, behind = start_mpi(), run.comm.channel, front + len(run.compiled.ops)
    blockers, times_of_ops, requests = call.export() if exported is None else exported
    code, times = call.error, Times(call.started, call.moved_at, times_of_ops, front)
    run.actions, run.is_small = actions, is_small
    run.blockers = np.frombuffer(blockers, np.int32)[front:behind].tolist()
    _take_times(run, times)
    channel.begin(run.stamp, run)
    for handle, op in requests:
        task = run if op >= front or beside is None else beside
        run.comm.engine.post(MPI.Request.fromhandle(handle), task, op - front)
    for i, token in tokens.items():
        if not run.ended[i]:
            run.tokens[i] = token
            run.comm.engine.launched(token, run, i)
    try:
        if code:
            raise MPI.Exception(code)
        run.start_ops([i for i, count in enumerate(run.blockers) if not count and not run.begun[i]])
    except Exception as error:  # MPI has failed
        channel.fail(run, error)
        raise
    if run.unfinished == 0 and not run.finished:
        run.finish()
    return run


def finished_run(times: Times, run: Run, actions: list[Any]) -> Run:
    """The `Run` of a call that C has finished: for its trace."""
    run.actions = actions
    _take_times(run, times)
    run.finished = True
    return run


def arrays_at(compiled: Compiled, shapes: Mapping[str, tuple[int, ...]], addresses: Iterable[int]) -> dict[str, Any]:
    """The buffers of a program as arrays, at the addresses that C has. They keep no memory alive."""
    buffers = zip(compiled.buffers.items(), addresses, strict=False)
    return {name: array_at(int(at), shapes[name], storage(buffer.dtype)) for (name, buffer), at in buffers}


def _take_times(run: Run, times: Times) -> None:
    behind = times.front + len(run.compiled.ops)
    run.begun, run.ended = np.frombuffer(times.of_ops, np.float64).reshape(2, -1)[:, times.front : behind].tolist()
    run.unfinished = run.ended.count(0.0)
    run.started, run.moved_at = times.started, times.moved_at
