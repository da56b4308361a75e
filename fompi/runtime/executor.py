"""Executor: a bound plan that can be called. `fompi.runtime.binding` makes it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from math import prod
from time import perf_counter
from types import MappingProxyType
from typing import Any

import numpy as np

from fompi.backends.base import Backend, Token
from fompi.base.errors import PlanError, StateError, WaitTimeout
from fompi.base.layout import Extents, Sizes, integer
from fompi.engine.communicator import Communicator
from fompi.engine.control import CALL_BITS, LAST_CALL
from fompi.engine.handshake import digest
from fompi.engine.in_flight import FINISHED
from fompi.plans.plan import MESSAGE_BITS
from fompi.runtime.baselines import ROUNDS, Baselines
from fompi.runtime.bound_plan import BoundMemory, BoundPlan
from fompi.runtime.compiled import Compiled
from fompi.runtime.given import Given
from fompi.runtime.lower import starts_of
from fompi.runtime.native_run import (
    IN_C_SECONDS,
    NO_KERNELS,
    STALL_SECONDS,
    InC,
    PythonKernels,
    Times,
    drive_in_c,
    finished_run,
    native_call,
    seconds_in_c,
    taken_over,
)
from fompi.runtime.program import Run, enter
from fompi.tensors import dlpack
from fompi.tensors.dlpack import Tensor, has_moved
from fompi.traces.drift import Drift
from fompi.traces.proof import Proof
from fompi.traces.trace import Trace


class Executor(BoundPlan):
    """A plan bound to a communicator and to memory: call it often.

        step()                          # the whole operation; returns its result
        step.start(); ...; step.wait()  # the same, with other work in between
        step.start("x"); step.ready("x", 0); step.part("y", 3); step.wait()

    `start("x")` starts a call before x is written. `ready("x", i)` says that the i-th block of x on this rank is
    written; blocks may become ready in any order. `part("y", i)` waits for the i-th block of the result, and
    `arrived("y", i)` is True once it is there.

        y = step(x=x, out=y); step.start(x=x, out=y)     # one call on other tensors

    Tensors of a call are passed by the names of `bind`, any of them. They must have the form of the bound ones: shape,
    dtype, device and strides. Nothing is copied and nothing is agreed: other ranks may pass other tensors, or none. The
    other tensors of the call are the bound ones. Do not write to an input before the call is finished. A result lies in
    the tensor that was given for it, else where it always lies. Raises ShapeError, DtypeError or TensorError for a
    tensor of another form, and PlanError for a name that the plan does not have. This call then fails on all ranks:
    the other ranks get a PeerError.

    Several executors may be in flight, and ranks may start them in different orders.

    `counts` gives one call fewer rows than the plan has: the rows of every rank, or rows[source][dest] for an
    all-to-all. `label` is a number or a text that says which call this is, for example the number of the step. Calls
    match by their order. So a rank that skips a call without labels gets the data of another step. Calls with different
    labels or counts never exchange data: all ranks raise MismatchError. (10 bits are compared. Numbers that differ by
    less than 1024 are always told apart.)
    """

    def __init__(
        self,
        compiled: Compiled,
        comm: Communicator,
        memory: BoundMemory,
        backend: Backend,
        kernels: Mapping[str, Callable[..., object]] | None = None,
    ):
        self.closed = False
        self._instance, self._calls = comm.next_bound(), 0
        self._first, self._slot = comm.bound_call(self._instance, 0)  # of calls without a mark
        super().__init__(compiled, comm, memory, backend, kernels)
        self._paths = None if backend.device is None else comm.paths(backend.device)
        self._is_uploaded = any(tensor.host is not None for tensor in memory.tensors.values())
        self._seconds: float | None = None  # the time of the last call on this rank
        self.drift: Drift | None = None  # compares calls with their prediction
        self._run: Run | InC | None = None  # None after a call that C has finished: `_in_c_at` is its
        self._call: Given | None = None  # the memory of the last call, if it had tensors of its own
        self._returned_at: float | None = None  # when `start` returned to the program
        self._baselines = Baselines(compiled, comm, backend, kernels)
        self._bound_bases: bytes | None = None  # where the bound buffers are, for calls in C
        self._placed: bytes | None = None  # where those of the last call in C were
        self._noted: tuple[list[Trace] | None, Extents] | None = None  # who wants the trace of the call in C
        self._in_c_at: tuple[int, int] | None = None  # the stamp and the slot of the last call in C

    # -- one call
    def __call__(self, counts: Any = None, label: int | str | None = None, out: Any = None, **tensors: Any) -> Any:
        """Run one call and return its result, as `wait` does."""
        is_bare = not tensors and out is None and label is None and counts is None
        if is_bare and not (self._seen and has_moved(self._seen)) and self._begins_in_c():
            return self._results_in_c() if self._run is None else self.wait()
        self._start((), counts, label, awaited=True, tensors=tensors if out is None else {**tensors, "y": out})
        return self.wait()

    @functools.cached_property
    def _in_c(self) -> Any:
        """This plan with all its rows, as a call in C. None: it must run in Python."""
        if self._is_uploaded or any(like.framework == "jax" for _, _, like in self._outputs):
            return None
        sized = self.compiled.sized(self.plan.extents(self.comm.rank))
        made = native_call(self.compiled, sized, self.comm, self.backend, self.kernels or ())
        if made is None:
            return None
        self._unplaced = made.unplaced
        self._sizes_in_c: Sizes | None = self.plan.sizes
        self._bound_bases = self._bases(self._arrays)
        return made.call

    def _begins_in_c(self, given: Given | None = None) -> bool:
        """Begin a call on the bound tensors, or on `given` memory, in C. False: nothing has begun."""
        comm = self.comm
        comm.check()
        if self._in_c is None or self._sizes is not self.plan.sizes or self.closed:
            return False
        if (run := self._run) is not None and not run.finished:
            return False
        with comm.engine.lock:
            self._calls += 1
            self._returned_at, self._call, self._in_parts = None, None, False
            if self._runs_in_c(self._first | self._calls & LAST_CALL, self._slot, given, True):
                return True
            self._calls -= 1
        return False

    def _runs_in_c(
        self,
        stamp: int,
        slot: int,
        given: Given | None,
        waits: bool,
        unready: Mapping[tuple[str, int], list[int]] | None = None,
        mark: tuple[int | str | None] | None = None,
    ) -> bool:
        """Begin a call in C, with the engine locked. If it is not finished there, it is `_run` now.

        False: it must run in Python. `unready`: as in `Run.start`. `mark`: its label.
        """
        call, comm = self._in_c, self.comm
        engine, channel = comm.engine, comm.channel
        bases = self._bound_bases if given is None else given.on.bases
        if call is None or bases is None:
            return False
        if unready and not all(unready.values()):  # C would not know that a block is not ready which no op reads
            return False
        self._noted = None
        if engine.report is not None or comm.recording is not None:
            self._noted = comm.recording, self._extents
        if self._sizes is not self._sizes_in_c:
            starts = starts_of(self.compiled.sized(self._extents))
            self._sizes_in_c = self._sizes if call.resize(starts, self._is_small, self._is_long) else None
        if channel.failures or channel.lost is not None or self._sizes_in_c is None:
            return False
        if bases is not self._placed:
            call.place(bases)
            self._placed = bases
        if given is not None or self._written:
            self._mark_written(given)
        comm.note_start(self.compiled.title, stamp)
        self._run, self._in_c_at, is_finished = None, (stamp, slot), False
        if mark is not None:
            channel.mark(stamp, mark[0], None if self._sizes is self.plan.sizes else self._sizes)
        seconds = IN_C_SECONDS if waits and engine.is_all_in_c else seconds_in_c(engine, waits, self._is_small)
        try:
            if unready:
                held = np.array([op for ops in unready.values() for op in ops], np.int32)
                is_finished = call.run(slot << MESSAGE_BITS, seconds, STALL_SECONDS, held) == FINISHED
            else:
                is_finished = call.run(slot << MESSAGE_BITS, seconds, STALL_SECONDS) == FINISHED
        finally:
            if not is_finished:
                self._flies(stamp, slot, given, waits, unready, mark is not None)
        if is_finished:
            channel.begun[stamp >> CALL_BITS] = stamp
            if self._noted is None and self.drift is None:
                self._seconds = call.moved_at - call.started
            else:
                self._arrived()
        return True

    def _flies(
        self,
        stamp: int,
        slot: int,
        given: Given | None,
        waits: bool,
        unready: Mapping[tuple[str, int], list[int]] | None,
        is_marked: bool,
    ) -> None:
        """The call in C goes on: it is a task now."""
        call, kernels = self._in_c, NO_KERNELS
        if call.has_kernels:
            follows = self.compiled.follows if self.compiled.asynchronous else None
            kernels = PythonKernels(self._actions if given is None else given.on.actions, follows)
        take_over = functools.partial(self._take_over, stamp, slot, given, is_marked)
        self._run = task = InC(call, self.comm, stamp, take_over, self._arrived, None, kernels)
        if unready:
            task.unready = dict(unready)
        task.awaited, task.is_long, task.forwards = waits, self._is_long, self.compiled.forwards
        task.moved()

    def _take_over(self, stamp: int, slot: int, given: Given | None, is_marked: bool) -> Run:
        """Python goes on with the call."""
        run, task = Run(self.compiled, self.comm, stamp, slot), self._run
        assert isinstance(task, InC)
        self._run, run.unready, run.marked = run, task.unready, is_marked
        run.held = None if given is None else given.owners
        if self._noted is not None:
            recording, extents = self._noted
            run.on_finish = functools.partial(self._note, recording, run, extents)
        actions = self._actions if given is None else given.on.actions
        return taken_over(self._in_c, run, actions, self._is_small, tokens=task.tokens)

    def _arrived(self) -> None:
        """C has finished the call."""
        self._run, call = None, self._in_c
        if self._noted is not None and self._in_c_at is not None:
            (recording, extents), recorder = self._noted, self.comm.engine.recorder
            if recording is None and recorder is not None:
                where = self.comm, self.compiled, extents
                recorder.note_in_c(where, 0, self._in_c_at[0], call, self._returned_at)
            else:
                run = Run(self.compiled, self.comm, *self._in_c_at)
                self._note(recording, finished_run(Times.of(call), run, self._actions), extents)
        self._seconds = call.moved_at - call.started
        if self.drift is not None and self.is_whole:
            self.drift.note(self._seconds)

    def _await(
        self, timeout: float | None = None, patient: bool = False, until: Callable[[Any], bool] | None = None
    ) -> bool:
        """Drive until the call has ended, or `until(what does it)`, whoever does it. False: not within `timeout`."""
        engine, channel = self.comm.engine, self.comm.channel
        end = None if timeout is None else perf_counter() + timeout
        if (
            isinstance(in_c := self._run, InC) and until is None
        ):  # the helper thread may end it, and write None, meanwhile
            drive_in_c(in_c)
        while (task := self._run) is not None:
            seconds = None if end is None else max(0.0, end - perf_counter())
            if not engine.wait(task, channel, seconds, patient, None if until is None else lambda: until(task)):
                return False
            if self._run is task:
                break
        return True

    def _results_in_c(self) -> Any:
        """The results of the last call, which C has finished."""
        given, results = self._call, self._results
        if given is not None:
            if given.outputs:
                results = self._results_given(given)
                given.forget_inputs()
            else:
                self._call = None
        return results[0] if len(results) == 1 else results

    def _mark_written(self, given: Given | None) -> None:
        """Tell torch which of its tensors a call writes."""
        if given is None:
            dlpack.mark_all_written(self._all_written)
        else:
            dlpack.mark_all_written([x for name, x in self._written if name not in given.outputs])
            for name in given.outputs:
                dlpack.mark_written(given.owners[name])

    def encoded_block(self, name: str, number: int) -> tuple[Any, int]:
        """What a block of a mirror with a wire contains, and how many elements those are."""
        buffer = self.compiled.buffers[name]
        at, starts = number - buffer.first, buffer.offsets(self._extents)
        rows = 1 if buffer.axis == "whole" else self._extents.counts(buffer.axis)[at]
        return self._arrays[name][starts[at] : starts[at + 1]], rows * prod(buffer.row)

    def moving(self, *names: str) -> Callable[[tuple[int, ...]], None]:
        """A function that runs one call in which these buffers lie at other addresses. It gets them in this order.

        They are contiguous memory of the host. When it returns or raises, nothing uses this memory any more.
        """
        overlay, nothing = self._overlay(names), MappingProxyType[str, Any]({})

        def run(addresses: tuple[int, ...]) -> None:
            try:
                given = Given(nothing, self._at(overlay, addresses), ())
                if self._begins_in_c(given):
                    if self._run is not None:
                        self.wait()
                    return
                self._start(awaited=True, given=given)
                self.wait()
            except BaseException as error:
                run = self._run
                if run is not None:
                    if not (run.finished or isinstance(error, Exception)):  # who interrupts does not wait for others
                        self.comm.channel.fail(run, StateError(f"{self.name} was interrupted"))
                    self._await(patient=True)
                    if isinstance(self._run, Run):
                        self._run.take_back()
                raise

        return run

    def start(
        self, *partial: str, counts: Any = None, label: int | str | None = None, out: Any = None, **tensors: Any
    ) -> Executor:
        """Start a call and return at once. The inputs named in `partial` become ready block by block."""
        self._start(partial, counts, label, tensors=tensors if out is None else {**tensors, "y": out})
        self._returned_at = perf_counter()
        if self._run is not None:  # else C has finished it
            self.comm.engine.wake_helper()
        return self

    def refuse(self, error: Exception) -> None:
        """Take part in the next call, which ends by an error on all ranks. Here `wait` raises `error`."""
        with suppress(type(error)):
            self._start(refusal=error)

    def _start(
        self,
        partial: tuple[str, ...] = (),
        counts: Any = None,
        label: int | str | None = None,
        awaited: bool = False,
        tensors: Mapping[str, Any] | None = None,
        given: Given | None = None,
        refusal: Exception | None = None,
    ) -> None:
        """Start a call. `tensors` are those of this call, or `given` is its memory. With a `refusal` it fails."""
        self._begin_to_start(partial, counts)
        if partial:
            partial = tuple(each for name in partial for each in self.compiled.named(name))
        if given is None and has_moved(self._seen):
            tensors = {**self._moved(), **(tensors or {})}
        if tensors:
            try:
                given = self._given(tensors, is_whole=not partial)
            except Exception as error:
                refusal = error  # the other ranks start the call
        self._call = given
        unready = {(name, block): ops for name in partial for block, ops in self._readers_of(name).items()}
        self._in_parts = bool(unready)
        self._calls += 1
        whole = self._sizes is self.plan.sizes
        mark = None if label is None and whole else self._mark(label, whole)
        stamp, slot = self.comm.bound_call(self._instance, self._calls, mark)
        if self._is_uploaded:
            for name in self._inputs:
                if name not in partial:
                    self._upload(self._mine, name)
        entry, failure, holds_all = (None, None, False) if self._paths is None else self._enter(given)
        with self.comm.engine.lock:
            marked = None if mark is None else (label,)
            if refusal is None and self._in_c and self._runs_in_c(stamp, slot, given, awaited, unready, marked):
                return
            self._run = run = Run(self.compiled, self.comm, stamp, slot)
            if mark is not None:
                run.marked = True
                self.comm.channel.mark(stamp, label, None if whole else self._sizes)
            if not unready:
                run.announcing = self._announcing if given is None else given.announcing
            run.awaited = awaited  # first: else the helper thread may take a kernel, and two threads share the core
            actions = self._equip(run, given)
            run.start(actions, unready, self._is_long, self._is_small, refusal or failure, entry, holds_all)
        if refusal is not None:
            self.comm.engine.wake_helper()  # the call ends without this program
            raise refusal

    def _begin_to_start(self, partial: tuple[str, ...], counts: Any) -> None:
        """Check that a call may start, end the one before, and take the rows of this one."""
        sizes = self.plan.sizes if counts is None else self._sizes_of(counts)
        self.check_start(partial)
        self._returned_at = None
        if (run := self._run) is not None and not run.finished:
            self._await(patient=True)
        if sizes is not self._sizes and sizes != self._sizes:
            self._use(sizes)

    def _enter(self, given: Given | None) -> tuple[Token | None, Exception | None, bool]:
        """A call on a device follows what the program has enqueued there: its token, or an error.

        True: kernels of the last call may still run.
        """
        holds_all = self._leave()
        failure = self._copy_given(given) if given is not None and given.copied else None
        entry, late = enter(self.comm.engine, self.backend)
        return entry, failure or late, holds_all

    def _equip(self, run: Run, given: Given | None) -> list[Any]:
        """Give a call in Python its memory, and who wants its trace. Returns what each op does."""
        run.paths = self._paths
        if self.comm.engine.report is not None or self.comm.recording is not None:
            run.on_finish = functools.partial(self._note, self.comm.recording, run, self._extents)
        if given is not None:
            run.held = given.owners
        self._mark_written(given)
        self.comm.note_start(self.compiled.title, run.stamp)
        return self._actions if given is None else given.on.actions

    @property
    def _mine(self) -> Mapping[str, Tensor]:
        """The tensors that are copied between the host and the device in the last call, by buffer, and others."""
        return self._tensors if self._call is None else {**self._tensors, **self._call.copied}

    def ready(self, name: str, part: int) -> None:
        """Part `part` of the input `name` is written: the call may read it from now on.

        On a device the caller's current stream may still write it: what reads the part follows what is enqueued there.
        """
        block, names, entry, failure = self._block(name, part), self.compiled.named(name), None, None
        self._current()  # there must be one
        for each in names if self._is_uploaded else ():
            self._upload(self._mine, each, block)
        if self._paths is not None:
            entry, failure = enter(self.comm.engine, self.backend, all_wait=False)
        with self.comm.engine.lock:
            if failure is not None:
                run = self._in_python()
                if run.error is None and not run.finished:
                    run.fail(failure, f"at ready({name!r}, {part})")
            for each in names:
                self._current().ready_part(each, block, entry)
        if not self._current().finished:
            self.comm.engine.wake_helper()  # the helper thread may sleep, because nothing was in flight

    def arrived(self, name: str, part: int) -> bool:
        """True once part `part` of the output `name` is there. Progresses everything in flight."""
        run, writer = self._current(), self._writer(name, part)
        if not run.has_ended(writer):
            self.comm.engine.progress_while_waiting()
            run = self._current()
        if run.error is not None:
            raise run.error
        return run.has_ended(writer)

    def part(self, name: str, part: int, timeout: float | None = None) -> Any:
        """Wait for part `part` of the output `name`, and return it: a view of the memory of the result.

        On a device, and for a result that is copied to the caller, it waits for the whole call. Raises what `wait`
        raises.
        """
        run, writer = self._current(), self._writer(name, part)
        is_there = None if self._paths is not None else lambda task: task.has_ended(writer)
        if is_there is None and run.unready:
            self.wait(timeout)  # it says what is not ready
        if not run.has_ended(writer) and not self._await(timeout, until=is_there):
            raise WaitTimeout(f"{name}[{part}] of {self.compiled.title} is not there after {timeout:g} s; it goes on")
        if (error := self._current().error) is not None:
            raise error
        if self._paths is not None:
            self.wait()
        at = [buffer.name for buffer in self.compiled.outputs].index(name)
        array, dtype, like = self._output(at)
        starts = self.compiled.buffers[name].offsets(self._extents)
        first = self._block(name, part) - self.compiled.buffers[name].first
        rows = array.reshape(-1) if self.plan.problem.flat else array
        return dlpack.lend(rows[starts[first] : starts[first + 1]], dtype, like)

    def _writer(self, name: str, part: int) -> int:
        """The op that writes part `part` of the output `name` last."""
        if name not in self._writers:
            if name not in [b.name for b in self.compiled.outputs]:
                raise PlanError(f"{name!r} is no output of {self.compiled.title}")
            self._writers[name] = self.compiled.last_writers(name)
        return self._writers[name].get(self._block(name, part), 0)  # a block that no op writes never has rows

    def progress(self) -> bool:
        """Progress everything in flight. Returns True once this call is finished."""
        self._current()
        self.comm.engine.progress_while_waiting()
        self._leave()
        return self._current().finished

    done = progress

    @property
    def finished(self) -> bool:
        """True once this call is finished. Progresses nothing."""
        self._leave()
        return self._current().finished

    def _leave(self) -> bool:
        """On a device: let the caller's current stream wait for the kernels of a finished call.

        True if some of them may still run.
        """
        run = self._run
        if not isinstance(run, Run) or not run.is_enqueued:
            return False
        self.backend.leave(run.in_flight())  # type: ignore[attr-defined]
        return run.is_enqueued

    def wait(self, timeout: float | None = None) -> Any:
        """The result of this call: one tensor, or a tuple in the order of the plan's outputs.

        On a device the kernels may still run. The caller's current stream waits for them.

        Raises the error that ended the call on this rank, PeerError if another rank failed first, and WaitTimeout
        after `timeout` seconds (the call goes on).
        """
        recorder, begun = self.comm.engine.recorder, self._run
        if recorder is not None and (begun is not None or self._in_c_at is not None):
            recorder.awaited(self.comm, self._in_c_at[0] if begun is None else begun.stamp)  # type: ignore[index]
        if self._run is None and self._in_c_at is not None:
            return self._results_in_c()
        first = self._current()
        can_miss = first.unready and first.error is None and timeout is None
        if can_miss and (missing := first.missing()):
            raise StateError(f"wait() for {self.compiled.title}, but ready() was never called for {', '.join(missing)}")
        if not self._await(timeout):
            raise WaitTimeout(f"{self.compiled.title} is not finished after {timeout:g} s; it goes on")
        if self._run is None:
            return self._results_in_c()
        run = self._in_python()
        if run.error is not None:
            if self._call is not None:
                self._forget(run)
            raise run.error
        if self._paths is None:
            self._note_time(run)
        else:
            with self.comm.engine.lock:
                if run.is_enqueued:  # its time is known when its kernels are done
                    run.then = functools.partial(self._note_time, run, self.is_whole)
                else:
                    self._note_time(run)
            self._leave()
        if self._is_uploaded:
            self._download(self._mine)
        if self._is_uploaded or any(like.framework == "jax" for _, _, like in self._outputs):
            self._results = self._lent()
        results = self._results
        if self._call is not None:
            if self._call.outputs:
                results = self._results_given(self._call)
            self._forget(run)
        return results[0] if len(results) == 1 else results

    def _output(self, at: int) -> tuple[Any, str, Tensor]:
        """The array, the dtype and the framework of an output of the last call."""
        array, dtype, like = self._outputs[at]
        name, given = self.compiled.outputs[at].name, self._call
        if given is None or name not in given.outputs or name in given.copied:
            return array, dtype, like
        tensor = dlpack.borrow(given.owners[name], name)
        return tensor.array.reshape(self._arrays[name].shape)[: len(array)].reshape(array.shape), dtype, tensor

    def _forget(self, run: Run) -> None:
        """Keep the tensors of a finished call no longer, but for its outputs: `part` shows them."""
        given = self._call
        if given is not None and run.finished and not run.is_enqueued:
            run.actions, run.held = self._actions, None
            if given.outputs:
                given.forget_inputs()
            else:
                self._call = None

    def _note(self, recording: list[Trace] | None, run: Run, extents: Extents) -> None:
        trace, report = functools.partial(run.trace, extents), self.comm.engine.report
        if recording is not None:
            recording.append(trace())
        if report is not None:
            outputs = {b.name: self._output(i)[0] for i, b in enumerate(self.compiled.outputs)}
            report.note(run, trace, extents, self.backend, self.kernels, self._returned_at, outputs=outputs)

    def _note_time(self, run: Run, is_whole: bool | None = None) -> None:
        """Note the time of a call. `is_whole` is what it was when the call ended, if that was earlier."""
        self._seconds = run.moved_at - run.started
        if self.drift is not None and (self.is_whole if is_whole is None else is_whole):
            self.drift.note(self._seconds)

    @property
    def seconds(self) -> float | None:
        """The time of the last call on this rank, until its kernels were done. Waits for them. None: no call."""
        if (run := self._run) is not None:
            run.settle()
        return self._seconds

    @seconds.setter
    def seconds(self, value: float | None) -> None:
        self._seconds = value

    def _mark(self, label: int | str | None, whole: bool) -> int:
        """A number for the label and the counts of a call, the same on ranks that pass the same.

        It contains the number of the call, because a call without rows moves no message that other ranks see.
        """
        number = 31 * self._calls if whole else 31 * self._calls + self._sizes_digest
        if label is None:
            return number
        known = integer(label)
        return number + (digest(str(label)) if known is None else known)

    def _current(self) -> Run | InC:
        """What does the last call."""
        found = self._run
        if found is None and self._in_c_at is not None and self._in_c is not None:
            run = Run(self.compiled, self.comm, *self._in_c_at)
            found = self._run = finished_run(Times.of(self._in_c), run, self._actions)
        if found is None:
            raise StateError(f"{self.compiled.title} was not started")
        return found

    def _in_python(self) -> Run:
        """What does the last call, in Python: if C does it, Python goes on with it."""
        task = self._current()
        if isinstance(task, InC):
            task.heir()
            task = self._current()
        assert isinstance(task, Run)
        return task

    def check_start(self, partial: Iterable[str] = ()) -> None:
        """Raise the error with which this rank would refuse `start(*partial)`."""
        if self.closed:
            raise StateError(f"{self.compiled.title}: the executor is closed")
        self.comm.check()
        if (run := self._run) is not None and not run.finished and run.error is None:
            raise StateError(f"{self.compiled.title} is already in flight: call wait() before the next start()")
        for name in partial:
            for each in self.compiled.named(name):
                self._readers_of(each)

    @property
    def announced(self) -> int:
        """How many products one kernel of the device computes and announces (FOMPI_COUNTERS). 0: none.

        Only a bound plan has such a kernel: it works on the addresses that it was made for.
        """
        return 0 if self._announcing is None else len(self._announcing.ops)

    # -- what the last call took
    @property
    def is_whole(self) -> bool:
        """True if the last call had all rows of the plan, and all its inputs from the start.

        Only the time of such a call can be compared with other calls.
        """
        return not self._in_parts and self._sizes == self.plan.sizes

    @property
    def failed_here(self) -> bool:
        """True if this rank has failed in the last call, whatever the type of its error."""
        return self._run is not None and self._in_python().failed_here

    @property
    def trace(self) -> Trace:
        """The Trace of the last call on this rank. On a device it waits for the kernels."""
        run = self._in_python()
        run.settle()
        return run.trace(self._extents)

    def compute_seconds(self, rounds: int = ROUNDS) -> float:
        """Measure this rank's kernels without messages, on fresh memory: the median of `rounds`, in seconds.

        Raises StateError for a plan with kernels of the user: they may change what the user's program holds.
        """
        return self._baselines.compute(self._extents, rounds)

    def messages_seconds(self, rounds: int = ROUNDS) -> float:
        """Measure the messages without kernels, on fresh memory: the median of `rounds`, in seconds. Collective."""
        return self._baselines.messages(self._extents, rounds)

    @property
    def proof(self) -> Proof:
        """How much of the last call was exposed, and why.

        It can warn of missing overlap only after `compute_seconds()` and `messages_seconds()` with the same rows.
        """
        return self._baselines.proof(self._in_python(), self._extents, self._returned_at)

    # -- the end
    def close(self) -> None:
        """Finish the call in flight and give scratch memory back.

        A call that waits for `ready()` is given up, on all ranks. Collective if the plan uses collectives of the MPI
        library. Raises DeviceError if a kernel on a device has failed after its call returned.
        """
        if not self.closed:
            self.closed = True
            if self._in_c_at is not None:
                self._current()  # it has the trace of a call that C has finished
            run = self._run
            if run is not None and not run.finished:
                if not run.can_finish():
                    error = StateError(f"{self.compiled.title} was closed before all its parts were ready")
                    self.comm.channel.fail(self._in_python(), error)
                self._await(patient=True)
            if (run := self._run) is not None:
                run.settle()
            self._call = None
            self._release()
            self.__dict__["_in_c"] = None
            if self.backend.device is not None:
                self.backend.device.tell()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:  # after an error the other ranks may never finish the call in flight
            self.close()

    @property
    def name(self) -> str:
        """A name that is the same on all ranks, and different for every bound operation."""
        return f"{self.compiled.title} (bound {self._instance})"

    def __repr__(self) -> str:
        return f"Executor({self.name} on {self.comm!r})"
