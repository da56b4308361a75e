"""A plan bound to a communicator and to fixed addresses."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from fompi.backends.base import Backend
from fompi.backends.numpy import Numpy
from fompi.base.errors import DtypeError, PlanError, ShapeError, StateError, TensorError, WaitTimeout
from fompi.base.layout import Sizes
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree
from fompi.plans.kernels import find
from fompi.plans.plan import Collective, Plan, Send, cut_in_words
from fompi.runtime import baselines
from fompi.runtime.compiled import Compiled
from fompi.runtime.program import Run
from fompi.tensors import dlpack
from fompi.tensors.dlpack import Tensor
from fompi.traces.drift import Drift
from fompi.traces.proof import Needs, Proof, prove
from fompi.traces.trace import Trace


class Executor:
    """A plan bound to a communicator and to fixed addresses: call it often.

        step()                          # the whole operation; returns its result
        step.start(); ...; step.wait()  # the same, with something in between
        step.start("x"); step.ready("x", 0); step.arrived("y", 3); step.wait()

    `start("x")` begins with no part of x ready: `ready("x", i)` announces its i-th block on this rank, in any order.
    `arrived("y", i)` says whether the i-th block of a result is there. Several executors may be in flight, started in
    any order on different ranks. `counts` are other rows for one call, at most those of the plan: those of every
    rank, or rows[source][dest] for an all-to-all; all ranks give the same.
    """

    def __init__(
        self,
        compiled: Compiled,
        comm: Communicator,
        bound: _Bound,
        backend: Backend,
        kernels: Mapping[str, Callable[..., object]] | None = None,
    ):
        self.plan, self.compiled, self.comm = compiled.plan, compiled, comm
        self.backend, self.kernels = backend, kernels
        self.closed = False
        self._instance, self._calls = comm.next_bound(), 0
        self._tensors, self._shapes, self._arrays = bound
        self._link = comm.link.duplicate() if compiled.natives else comm.link
        self._readers: dict[str, dict[int, list[int]]] = {}
        self._writers: dict[str, dict[int, int]] = {}
        self._run: Run | None = None
        self._returned_at: float | None = None  # when `start` returned
        self.seconds: float | None = None
        self.drift: Drift | None = None  # whether calls take what was predicted
        self._needs: Needs | None = None
        self._alone: tuple[Any, float | None] = (None, None)  # measured by itself, with these extents
        self._bare: tuple[Any, float | None] = (None, None)
        self._use(self.plan.sizes)

    def _use(self, sizes: Sizes) -> None:
        """Work out what every op does with these sizes."""
        self._sizes, self._extents = sizes, self.plan.extents(self.comm.rank, sizes)
        sized, native = self.compiled.sized(self._extents), self._link.collective
        self._is_long = not self.compiled.asynchronous and self.compiled.is_long(sized)
        self._is_small = not self.kernels and self.compiled.is_small(sized)  # a kernel of the caller's may do anything
        self._actions = self.compiled.resolve(self._arrays, sized.starts, self.backend, native, self.kernels)
        self._outputs = []
        for buffer in self.compiled.outputs:
            array = self._arrays[buffer.name]
            if buffer.axis != "whole":
                array = array[: sum(self._extents.counts(buffer.axis))]
                if buffer.name in self._shapes and sizes == self.plan.sizes:
                    array = array.reshape(self._shapes[buffer.name])
            self._outputs.append((array, buffer.dtype, self._tensors.get(buffer.name, self._tensors["x"])))
        self._results = self._lent()
        given = [self._tensors[b.name].owner for b in self.compiled.outputs if b.name in self._tensors]
        self._written = [x for x in (*self._results, *given) if dlpack.framework_of(x) == "torch"]

    def _lent(self) -> tuple[Any, ...]:
        """The outputs as tensors. JAX arrays must not change at the next call, so they get memory of their own."""
        lent = []
        for array, dtype, like in self._outputs:
            if like.framework == "jax":
                own = self.comm.engine.arena.take(array.shape, array.dtype)
                own[...] = array
                array = own
            lent.append(dlpack.lend(array, dtype, like))
        return tuple(lent)

    def _resize(self, counts: Any) -> None:
        """Use other rows. What is wrong with them is wrong on all ranks: every rank looks at the counts of all."""
        most = self.plan.sizes
        form = "rows[source][dest]" if most.pairs else "the rows of every rank"
        try:
            table = [[operator.index(n) for n in row] for row in (counts if most.pairs else [counts])]
        except TypeError as error:
            raise ShapeError(f"counts are {form}: {error}") from None
        allowed = most.pairs or (most.rows,)
        if [len(row) for row in table] != [len(row) for row in allowed]:
            raise ShapeError(f"counts are {form}, for {self.comm.size} ranks, not {counts}")
        for row, limits in zip(table, allowed, strict=True):
            for rank, (n, limit) in enumerate(zip(row, limits, strict=True)):
                if not 0 <= n <= limit:
                    raise ShapeError(f"counts have {n} rows for rank {rank}, where the plan has room for 0 to {limit}")
        rows = tuple(map(tuple, table))
        sizes = Sizes(pairs=rows) if most.pairs else Sizes(rows[0])
        if sizes != self._sizes:
            self._use(sizes)

    # -- one call
    def __call__(self, counts: Any = None) -> Any:
        self._start((), counts, awaited=True)
        return self.wait()

    def start(self, *partial: str, counts: Any = None) -> Executor:
        """Begin a call; it goes on by itself. The inputs named in `partial` become ready part by part."""
        self._start(partial, counts)
        self._returned_at = perf_counter()
        self.comm.engine.assist()
        return self

    def _start(self, partial: tuple[str, ...], counts: Any, awaited: bool = False) -> None:
        self.check_start(partial)
        self._returned_at = None
        if self._run is not None and not self._run.finished:
            self.comm.engine.wait(self._run, self.comm.channel, patient=True)
        if counts is not None:
            self._resize(counts)
        elif self._sizes != self.plan.sizes:
            self._use(self.plan.sizes)
        unready = {(name, block): ops for name in partial for block, ops in self._readers_of(name).items()}
        self._in_parts = bool(unready)
        self._calls += 1
        stamp, slot = self.comm.bound_call(self._instance, self._calls)
        engine = self.comm.engine
        with engine.lock:
            self._run = run = Run(self.compiled, self.comm, stamp, slot)
            run.awaited = awaited  # before the helper can take a kernel: two would share the core
            if engine.report is not None:
                extents, backend, kernels = self._extents, self.backend, self.kernels
                run.then = lambda: engine.report.note(
                    run, run.trace(extents), extents, backend, kernels, returned_at=self._returned_at
                )
            for tensor in self._written:
                dlpack.written(tensor)
            self.comm.begins(self.compiled.title, stamp)
            run.start(self._actions, unready, self._is_long, self._is_small)

    def ready(self, name: str, part: int) -> None:
        """Part `part` of the input `name` may be read from now on, in this call."""
        run, block = self._current(), self._block(name, part)
        with self.comm.engine.lock:
            run.ready_part(name, block)
        if not run.finished:
            self.comm.engine.assist()  # it may have gone to sleep: nothing was in flight

    def arrived(self, name: str, part: int) -> bool:
        """Whether part `part` of the output `name` is there. Drives what is in flight."""
        if name not in self._writers:
            if name not in [b.name for b in self.compiled.outputs]:
                raise PlanError(f"{name!r} is no output of {self.compiled.title}")
            self._writers[name] = self.compiled.last_writers(name)
        run = self._current()
        writer = self._writers[name][self._block(name, part)]
        if not run.ended[writer]:
            self.comm.engine.ask()
        if run.error is not None:
            raise run.error
        return bool(run.ended[writer])

    def progress(self) -> bool:
        """Move what is in flight; whether this call is finished."""
        run = self._current()
        self.comm.engine.ask()
        return run.finished

    done = progress

    @property
    def finished(self) -> bool:
        """Whether this call is finished; moves nothing."""
        return self._current().finished

    def wait(self, timeout: float | None = None) -> Any:
        """The result of this call: one tensor, or a tuple in the order of the plan's outputs.

        Raises the error that ended the call on this rank, PeerError if it began on another one, and WaitTimeout
        after `timeout` seconds (the call goes on).
        """
        run = self._current()
        if run.unready and run.error is None and timeout is None:
            missing = ", ".join(sorted({f"{name}[{block}]" for name, block in run.unready}))
            raise StateError(f"wait() for {self.compiled.title}, but ready() was never called for {missing}")
        if not self.comm.engine.wait(run, self.comm.channel, timeout):
            raise WaitTimeout(f"{self.compiled.title} is not finished after {timeout:g} s; it goes on")
        if run.error is not None:
            raise run.error
        self.seconds = run.touched - run.started
        if self.drift is not None and self.is_whole:
            self.drift.note(self.seconds)
        if any(like.framework == "jax" for _, _, like in self._outputs):
            self._results = self._lent()
        return self._results[0] if len(self._results) == 1 else self._results

    @property
    def is_whole(self) -> bool:
        """Whether the last call had all rows of the plan, and its inputs from the start; else its time says little."""
        return not self._in_parts and self._sizes == self.plan.sizes

    @property
    def trace(self) -> Trace:
        """What this rank did in the last call."""
        return self._current().trace(self._extents)

    def compute_seconds(self, rounds: int = baselines.ROUNDS) -> float:
        """What this rank's kernels take alone, without messages, on memory of their own: the median of `rounds`."""
        take = self.comm.engine.arena.take
        found = baselines.compute_alone(self.compiled, self._extents, self.backend, take, self.kernels, rounds)
        self._alone = self._extents, found.seconds
        if self.comm.engine.report is not None:
            self.comm.engine.report.measured(self.compiled, self._extents, found.seconds)
        return found.seconds

    def messages_seconds(self, rounds: int = baselines.ROUNDS) -> float:
        """What the messages take without kernels, on memory of their own. Collective."""
        found = baselines.messages_alone(self.compiled, self.comm, self._extents, self.backend, rounds)
        self._bare = self._extents, found
        return found

    @property
    def proof(self) -> Proof:
        """How much of the last call was exposed, and why; judged if the two above were measured, for these sizes."""
        run = self._current()
        if not run.finished or run.error is not None:
            raise StateError(f"{self.compiled.title} has no finished call to judge")
        if self._needs is None:
            self._needs = Needs(self.plan, self.comm.rank)
        known = [seconds if extents == self._extents else None for extents, seconds in (self._alone, self._bare)]
        mode = self.comm.engine.progress_mode
        away = run.elsewhere(self._returned_at)
        return prove(
            self.trace, self._needs, compute_alone=known[0], messages_alone=known[1], progress=mode, elsewhere=away
        )

    def _current(self) -> Run:
        if self._run is None:
            raise StateError(f"{self.compiled.title} was not started")
        return self._run

    def check_start(self, partial: Iterable[str] = ()) -> None:
        """Raise what this rank would refuse a start for, `partial` inputs among it."""
        if self.closed:
            raise StateError(f"{self.compiled.title}: the executor is closed")
        self.comm.check()
        if self._run is not None and not self._run.finished and self._run.error is None:
            raise StateError(f"{self.compiled.title} is in flight already: wait() before the next start()")
        for name in partial:
            self._readers_of(name)

    def _block(self, name: str, part: int) -> int:
        buffer = self.compiled.buffers.get(name)
        if buffer is None or not 0 <= part < buffer.count:
            raise PlanError(f"{self.compiled.title} has no part {part} of {name!r} on rank {self.comm.rank}")
        return buffer.first + part

    def _readers_of(self, name: str) -> dict[int, list[int]]:
        if name not in self._readers:
            if name not in self.compiled.buffers or self.compiled.buffers[name].role != "input":
                raise PlanError(f"{name!r} is no input of {self.compiled.title}")
            self._readers[name] = self.compiled.readers(name)
        return self._readers[name]

    def close(self) -> None:
        """Give scratch back, after the call in flight. All ranks close an executor together if its plan has collectives
        of the library. A call that still waits for `ready()` is given up, on all ranks."""
        if not self.closed:
            self.closed = True
            run = self._run
            if run is not None and not run.finished:
                if run.unready:
                    self.comm.channel.fail(run, StateError(f"{run.title} was closed before all its parts were ready"))
                self.comm.engine.wait(run, self.comm.channel, patient=True)
            self._arrays, self._actions = {}, []
            if self._link is not self.comm.link:
                self._link.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:  # else nobody knows whether the others come to what is in flight
            self.close()

    @property
    def name(self) -> str:
        """The same on all ranks, and another one for every operation that was bound."""
        return f"{self.compiled.title} (bound {self._instance})"

    def __repr__(self) -> str:
        return f"Executor({self.name} on {self.comm!r})"


def bind(
    plan: Plan,
    *,
    comm: Any = None,
    out: Any = None,
    backend: Backend | None = None,
    kernels: Mapping[str, Callable[..., object]] | None = None,
    **tensors: Any,
) -> Executor:
    """An Executor of `plan` on these tensors, by the names of its buffers: `bind(plan, comm=tp, x=x, w=w, out=y)`.

    Collective: the ranks agree here, once, and later calls need no agreement. `out` is the output `y`; outputs that
    are not given are made, and every call writes them again. `kernels={"matmul": f}` replaces a kernel by
    `f(reads, writes)` on lists of arrays.
    """
    communicator = Communicator.of(comm)
    if out is not None:
        tensors["y"] = out
    backend = backend or Numpy()
    refusal: Exception | None = None
    try:  # all that may go wrong here goes wrong before the ranks agree
        for name in kernels or ():
            find(name)
        if kernels and backend.asynchronous:
            raise PlanError(f"kernels= are called on the host: the {backend.name} has its own")
        bound = _check(plan, communicator, tensors, backend)
        compiled = Compiled(plan, communicator.rank, backend.name if backend.asynchronous else "")
    except Exception as error:
        refusal = error
    text = f"bind({plan.problem} by {plan.schedule}, {cut_in_words(plan)}, window {plan.window}, {plan.sizes})"
    agree(communicator, text, refusal)
    return Executor(compiled, communicator, bound, backend, kernels)


class _Bound(NamedTuple):
    """The tensors given; the shape that a flat output is to have; every buffer as an array."""

    tensors: dict[str, Tensor]
    shapes: dict[str, tuple[int, ...]]
    arrays: dict[str, Any]


def _check(plan: Plan, comm: Communicator, tensors: Mapping[str, Any], backend: Backend) -> _Bound:
    """The tensors as arrays of the shapes that the plan's buffers have, and memory for all other buffers."""
    if plan.size != comm.size:
        raise PlanError(f"the plan is for {plan.size} ranks, {comm!r} has {comm.size}")
    program, extents = plan.programs[comm.rank], plan.extents(comm.rank)
    named = {b.name: b for b in program.buffers if b.role != "scratch"}
    if unknown := sorted(set(tensors) - set(named)):
        raise PlanError(f"{plan.problem.operation} has no tensor {unknown[0]!r}; it has {', '.join(named)}")
    if missing := [b.name for b in named.values() if b.role == "input" and b.name not in tensors]:
        raise PlanError(f"bind({plan.problem.operation}) needs {', '.join(missing)}")
    sent = {c.buffer for op in program.ops if isinstance(op, (Send, Collective)) for c in op.reads}
    borrowed, shapes = {}, {}
    for name, given in tensors.items():
        buffer, tensor = named[name], dlpack.borrow(given, name)
        shape = buffer.shape(extents)
        flat = plan.problem.flat and name in ("x", "y")
        if tensor.dtype != buffer.dtype:
            raise DtypeError(f"{name} is {tensor.dtype}, the plan has {buffer.dtype}")
        if tensor.array.shape != shape and not (flat and tensor.array.size == shape[0]):
            raise ShapeError(f"{name} has the shape {tensor.array.shape}, the plan has {shape} on rank {comm.rank}")
        dense = tensor.array.flags.c_contiguous
        if buffer.role == "output" and tensor.readonly:
            raise TensorError(f"{name} is read-only, and is to be written")
        if not dense and (buffer.role == "output" or name in sent or flat):
            raise TensorError(f"{name} is strided: give a contiguous one, or make the plan with packed=True for x")
        if flat:
            if name == "y" or "y" not in tensors:
                shapes["y"] = tensor.array.shape
            tensor = replace(tensor, array=tensor.array.reshape(shape))
        borrowed[name] = tensor
    for name, tensor in borrowed.items():
        for other in borrowed:
            if (
                named[name].role == "output"
                and other != name
                and np.may_share_memory(tensor.array, borrowed[other].array)
            ):
                raise TensorError(f"{name} shares memory with {other}")
    arrays = {name: tensor.array for name, tensor in borrowed.items()}
    for buffer in program.buffers:
        if buffer.name not in arrays:
            arrays[buffer.name] = comm.engine.arena.take(buffer.shape(extents), backend.storage(buffer.dtype))
    return _Bound(borrowed, shapes, arrays)
