"""One rank's program at work: `Compiled` (made once), `Run` (one call in flight), `Executor` (bound to addresses).

The loop is the one of the design: start the next op of each lane, wait only for what it needs. What an op needs is
worked out once, by `plan.constraints`; a run counts down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from time import perf_counter
from typing import Any

import numpy as np

from fompi import dlpack
from fompi.agreement import agree
from fompi.backends.base import Backend
from fompi.backends.numpy import Numpy
from fompi.communicator import Communicator
from fompi.dlpack import Tensor
from fompi.engine import FAILED, MESSAGE_BITS, MOST_MESSAGES, Task
from fompi.errors import DtypeError, FompiError, PeerError, PlanError, ShapeError, StateError, TensorError
from fompi.layout import Extents, Sizes
from fompi.plan import Collective, Compute, Plan, Recv, Send, constraints, lane, messages, release
from fompi.trace import Event, Trace

Array = np.ndarray[Any, Any]
COMPUTE, SEND, RECV, NATIVE = range(4)
HEARD_SECONDS = 1.0
"""For the other ranks to hear of an error before they are sent anything wrong."""

_KINDS = {Compute: COMPUTE, Send: SEND, Recv: RECV, Collective: NATIVE}


class Compiled:
    """A program with everything worked out that does not depend on sizes or addresses."""

    def __init__(self, plan: Plan, rank: int):
        self.plan, self.program = plan, plan.programs[rank]
        ops = self.program.ops
        self.ops = ops
        self.kinds = [_KINDS[type(op)] for op in ops]
        self.lanes = [lane(op) for op in ops]
        self.peers = [peer for _, peer in self.lanes]
        self.numbers = messages(ops)
        if max(self.numbers, default=0) >= MOST_MESSAGES:
            raise PlanError(f"more than {MOST_MESSAGES} messages to one peer: take fewer slices")
        self.waits_for, self.on_start, self.on_done = release(constraints(ops, plan.window))
        self.first = [i for i, count in enumerate(self.waits_for) if count == 0]
        self.natives = self.kinds.count(NATIVE)
        self.buffers = {b.name: b for b in self.program.buffers}
        self.scratch = [b for b in self.program.buffers if b.role == "scratch"]
        self.outputs = [b for b in self.program.buffers if b.role == "output"]
        self.title = f"{plan.problem.operation} by {plan.schedule}"

    def readers(self, name: str) -> dict[int, list[int]]:
        """For each block of an input the ops that read it."""
        found: dict[int, list[int]] = {b: [] for b in self._blocks(name)}
        for i, op in enumerate(self.ops):
            for chunk in op.reads:
                if chunk.buffer == name:
                    for block in range(chunk.start, chunk.stop):
                        found[block].append(i)
        return found

    def last_writers(self, name: str) -> dict[int, int]:
        """For each block of an output the op that writes it last."""
        found: dict[int, int] = {}
        for i, op in enumerate(self.ops):
            for chunk in op.writes:
                if chunk.buffer == name:
                    found.update(dict.fromkeys(range(chunk.start, chunk.stop), i))
        return found

    def _blocks(self, name: str) -> range:
        buffer = self.buffers[name]
        return range(buffer.first, buffer.first + buffer.count)

    def resolve(
        self,
        arrays: Mapping[str, Array],
        extents: Extents,
        backend: Backend,
        native: Callable[..., Any] | None = None,
        kernels: Mapping[str, Callable[..., object]] | None = None,
    ) -> list[Any]:
        """What each op does, on these arrays: bytes to send or to fill (None: no rows), or a call."""
        buffers = self.buffers
        starts = {name: b.offsets(extents) for name, b in buffers.items() if b.axis != "whole"}
        flat: dict[str, Array] = {}
        actions: list[Any] = []
        for kind, op in zip(self.kinds, self.ops, strict=True):
            if kind in (SEND, RECV):
                chunk = op.chunk  # type: ignore[union-attr]
                name = chunk.buffer
                if name not in flat:
                    flat[name] = arrays[name].reshape(-1).view(np.uint8)
                offsets, buffer = starts[name], buffers[name]
                first, last = offsets[chunk.start - buffer.first], offsets[chunk.stop - buffer.first]
                width = buffer.row_nbytes
                actions.append(flat[name][first * width : last * width] if last > first else None)
                continue
            reads = [self._view(arrays, starts, c) for c in op.reads]
            writes = [self._view(arrays, starts, c) for c in op.writes]
            if kind == NATIVE:
                assert isinstance(op, Collective) and native is not None
                blocks = [
                    self._view(arrays, starts, c._replace(start=b, stop=b + 1))
                    for c in op.reads
                    for b in range(c.start, c.stop)
                ]
                root = self.plan.problem.root
                actions.append(native(op.name, reads, writes, root, [len(b) for b in blocks]))
            elif kernels and op.kernel in kernels:  # type: ignore[union-attr]
                actions.append(_call(kernels[op.kernel], reads, writes))  # type: ignore[union-attr]
            else:
                assert isinstance(op, Compute)
                dtypes = (
                    [buffers[c.buffer].dtype for c in op.reads],
                    [buffers[c.buffer].dtype for c in op.writes],
                )
                actions.append(backend.bind(op.kernel, reads, writes, *dtypes))
        return actions

    def _view(self, arrays: Mapping[str, Array], starts: Mapping[str, list[int]], chunk: Any) -> Array:
        name, start, stop = chunk
        if name not in starts:
            return arrays[name]
        offsets, first = starts[name], self.buffers[name].first
        return arrays[name][offsets[start - first] : offsets[stop - first]]


def _call(kernel: Callable[..., object], reads: Sequence[Array], writes: Sequence[Array]) -> Callable[[], object]:
    return lambda: kernel(reads, writes)


class Run(Task):
    """One call of a compiled program. After an error it goes on without kernels, so that every message is taken in."""

    def __init__(self, compiled: Compiled, comm: Communicator, stamp: int, slot: int, title: str):
        self.compiled, self.comm, self.stamp, self.title = compiled, comm, stamp, title
        self.tag = slot << MESSAGE_BITS
        self.waits = list(compiled.waits_for)
        self.left = len(compiled.ops)
        self.ready: list[int] = []
        self.begun = [0.0] * self.left
        self.ended = [0.0] * self.left
        self.actions: list[Any] = []
        self.unready: dict[tuple[str, int], list[int]] = {}
        self.natives_left = compiled.natives
        self.natives_held: list[int] = []
        self.takes_turns = False
        self.warned: set[int] = set()
        self.then: Callable[[], None] | None = None
        self.finished, self.error = False, None
        self.started = self.touched = 0.0

    def start(self, actions: list[Any], unready: Mapping[tuple[str, int], list[int]] | None = None) -> None:
        """Begin all that can begin. `unready`: parts of inputs that `ready()` will announce, and who reads them."""
        channel = self.comm.channel
        self.actions = actions
        self.started = self.touched = perf_counter()
        channel.begin(self.stamp, self)
        if self.stamp in channel.failures:
            self.error, fatal = channel.failures.pop(self.stamp)
            if fatal:
                self.abandon(self.error)
                return
        try:
            self._start(unready)
        except Exception as error:  # of MPI
            channel.fail(self, error)
            raise

    def _start(self, unready: Mapping[tuple[str, int], list[int]] | None) -> None:
        first = self.compiled.first
        if unready:
            self.unready = dict(unready)
            for ops in unready.values():
                for i in ops:
                    self.waits[i] += 1
            first = [i for i in first if self.waits[i] == 0]
        if self.takes_turns and not self.natives_left:
            self.comm.end_turn(self.stamp)
        self._begin(list(first))
        if self.left == 0:
            self._finish()

    def ready_part(self, name: str, block: int) -> None:
        free = []
        for i in self.unready.pop((name, block), ()):
            self.waits[i] -= 1
            if self.waits[i] == 0:
                free.append(i)
        self._begin(free)
        if self.left == 0 and not self.finished:
            self._finish()

    def _begin(self, queue: list[int]) -> None:
        """Start these ops, and all that they release by starting (or by being done at once)."""
        compiled, engine, link = self.compiled, self.comm.engine, self.comm.link
        kinds, peers, numbers, on_start, waits = (
            compiled.kinds, compiled.peers, compiled.numbers, compiled.on_start, self.waits,
        )  # fmt: skip
        at = 0
        while at < len(queue):
            i = queue[at]
            at += 1
            kind = kinds[i]
            if kind == COMPUTE:
                if not self.ready:
                    engine.kernels_ready(self)
                heappush(self.ready, i)
                continue
            if kind == NATIVE and not self._may_go_native(i):
                continue
            self.begun[i] = perf_counter()
            action = self.actions[i]
            if kind == NATIVE:
                engine.post(action(), self, i)
                self._native_begun()
            elif action is None:  # no rows: both ends know
                queue.extend(self._ended(i))
            elif kind == SEND:
                if self.error is not None:
                    self._warn(peers[i])
                engine.post(link.isend(action, peers[i], self.tag + numbers[i]), self, i)
            else:
                engine.post(link.irecv(action, peers[i], self.tag + numbers[i]), self, i)
            for j in on_start[i]:
                waits[j] -= 1
                if waits[j] == 0:
                    queue.append(j)

    def _ended(self, i: int) -> list[int]:
        """Op i is done: the ops that may start now."""
        self.ended[i] = self.touched = perf_counter()
        self.left -= 1
        waits, free = self.waits, []
        for j in self.compiled.on_done[i]:
            waits[j] -= 1
            if waits[j] == 0:
                free.append(j)
        return free

    def completed(self, key: int) -> None:
        if self.finished:  # abandoned
            return
        free = self._ended(key)
        if free:
            self._begin(free)
        if self.left == 0:
            self._finish()

    def work(self) -> None:
        i = heappop(self.ready)
        if not self.ready:
            self.comm.engine.kernels_done(self)
        self.begun[i] = perf_counter()
        if self.error is None:
            try:
                self.actions[i]()
            except BaseException as error:
                self._kernel_failed(i, error)
                if not isinstance(error, Exception):  # an interrupt ends more than this call
                    self.completed(i)
                    raise
        self.completed(i)

    def _finish(self) -> None:
        self.finished = True
        self.comm.channel.active.pop(self.stamp, None)
        then, self.then = self.then, None
        if then is not None:
            then()

    # -- the library's collectives: every rank must start them in one order, so unbound calls take turns, in theirs
    def _may_go_native(self, i: int) -> bool:
        if self.takes_turns and self.comm.turns[0] != self.stamp:
            self.natives_held.append(i)
            return False
        return True

    def _native_begun(self) -> None:
        self.natives_left -= 1
        if self.takes_turns and self.natives_left == 0:
            self.comm.end_turn(self.stamp)

    def take_turn(self) -> None:
        held, self.natives_held = self.natives_held, []
        self._begin(held)

    # -- errors
    def _kernel_failed(self, i: int, error: BaseException) -> None:
        """Tell the other ranks, then go on."""
        where = f"op {i}, {self.compiled.ops[i]}"
        error.add_note(f"fompi: on rank {self.comm.rank} in {self.title}, {where}")
        words = f"rank {self.comm.rank} failed in {self.title}, {where}: {type(error).__name__}: {error}"
        self.comm.channel.tell_all(FAILED, self.stamp, words, HEARD_SECONDS if self.natives_left else 0.0)
        self.warned.update(range(self.comm.size))
        self.poison(error)

    def _warn(self, peer: int) -> None:
        """What we send after an error is worthless, and peer may not know yet: the rank that failed told us first."""
        if peer not in self.warned and isinstance(self.error, PeerError):
            self.warned.add(peer)
            self.comm.channel.tell(peer, FAILED, self.stamp, str(self.error), self.error.origin)

    def poison(self, error: BaseException) -> bool:
        """From now on only messages, so that this call ends everywhere; then `error`."""
        self.error = self.error or error
        for name, block in list(self.unready):
            self.ready_part(name, block)
        return True

    def abandon(self, error: BaseException) -> None:
        if self.ready:
            self.ready.clear()
            self.comm.engine.kernels_done(self)
        self.error = self.error or error
        self._finish()
        self.comm.end_turn(self.stamp)

    def can_finish(self) -> bool:
        return not self.unready

    def waits_for(self) -> tuple[int, str] | None:
        for wanted in (RECV, SEND):
            for i, kind in enumerate(self.compiled.kinds):
                if kind == wanted and self.begun[i] and not self.ended[i]:
                    peer = self.compiled.peers[i]
                    verb = "to send" if kind == RECV else "to receive"
                    return peer, f"rank {peer} {verb} in {self.title}, op {i}, {self.compiled.ops[i]}"
        return None

    # -- afterwards
    def trace(self, extents: Extents) -> Trace:
        """What this rank did when, in this call."""
        compiled, rank = self.compiled, self.comm.rank
        offsets = {name: b.offsets(extents) for name, b in compiled.buffers.items()}
        events = []
        for i, op in enumerate(compiled.ops):
            name, peer = compiled.lanes[i]
            track = {"send": f"send to {peer}", "recv": f"recv from {peer}"}.get(name, name)
            nbytes = 0
            for chunk in op.writes if isinstance(op, Recv) else op.reads:
                buffer = compiled.buffers[chunk.buffer]
                rows = offsets[chunk.buffer]
                whole = buffer.axis == "whole"
                n = rows[-1] if whole else rows[chunk.stop - buffer.first] - rows[chunk.start - buffer.first]
                width = buffer.row_nbytes // max(1, buffer.row[0]) if whole and buffer.row else buffer.row_nbytes
                nbytes += n * width
            events.append(Event(rank, track, i, str(op), self.begun[i], self.ended[i], nbytes))
        return Trace("measured", self.title, tuple(events))


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
        plan: Plan,
        comm: Communicator,
        tensors: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        backend: Backend,
        kernels: Mapping[str, Callable[..., object]] | None = None,
    ):
        self.plan, self.comm, self.backend, self.kernels = plan, comm, backend, kernels
        self.compiled = Compiled(plan, comm.rank)
        self.closed = False
        self._instance, self._calls = comm.next_bound(), 0
        self._tensors, self._shapes = tensors, shapes
        self._like = tensors["x"].framework
        self._link = comm.link.duplicate() if self.compiled.natives else comm.link
        self._arrays = {name: t.array for name, t in tensors.items()}
        take, extents = comm.engine.arena.take, plan.extents(comm.rank)
        for buffer in (*self.compiled.scratch, *self.compiled.outputs):
            if buffer.name not in self._arrays:
                self._arrays[buffer.name] = take(buffer.shape(extents), backend.storage(buffer.dtype))
        self._readers: dict[str, dict[int, list[int]]] = {}
        self._writers: dict[str, dict[int, int]] = {}
        self._use(plan.sizes)
        self._run: Run | None = None

    def _use(self, sizes: Sizes) -> None:
        """Work out what every op does with these sizes."""
        self._sizes, self._extents = sizes, sizes.extents(self.comm.rank, self.plan.parts)
        native = self._link.collective
        self._actions = self.compiled.resolve(self._arrays, self._extents, self.backend, native, self.kernels)
        results = []
        for buffer in self.compiled.outputs:
            array = self._arrays[buffer.name]
            if buffer.axis != "whole":
                array = array[: sum(self._extents.counts(buffer.axis))]
                if buffer.name in self._shapes and sizes == self.plan.sizes:
                    array = array.reshape(self._shapes[buffer.name])
            results.append(dlpack.lend(array, buffer.dtype, self._tensors.get(buffer.name, self._tensors["x"])))
        self._results = tuple(results)
        given = [self._tensors[b.name].owner for b in self.compiled.outputs if b.name in self._tensors]
        self._written = [x for x in (*results, *given) if dlpack.framework_of(x) == "torch"]

    def _resize(self, counts: Any) -> None:
        pairs = bool(self.plan.sizes.pairs)
        try:
            sizes = (
                Sizes(pairs=tuple(tuple(map(int, row)) for row in counts))
                if pairs
                else Sizes(rows=tuple(map(int, counts)))
            )
        except (TypeError, ValueError) as error:
            raise ShapeError(
                f"counts are {'rows[source][dest]' if pairs else 'the rows of every rank'}: {error}"
            ) from None
        listed = sizes.pairs if pairs else (sizes.rows,)
        if (pairs and len(listed) != self.comm.size) or any(
            len(row) != self.comm.size or min(row) < 0 for row in listed
        ):
            raise ShapeError(
                f"counts need a number >= 0 for each of {self.comm.size} ranks{' twice over' if pairs else ''}"
            )
        if sizes == self._sizes:
            return
        extents = sizes.extents(self.comm.rank, self.plan.parts)
        for name, buffer in self.compiled.buffers.items():
            if buffer.axis != "whole" and buffer.shape(extents)[0] > len(self._arrays[name]):
                raise ShapeError(
                    f"{name} has room for {len(self._arrays[name])} rows, not for {buffer.shape(extents)[0]}"
                )
        self._use(sizes)

    # -- one call
    def __call__(self, counts: Any = None) -> Any:
        self.start(counts=counts)
        return self.wait()

    def start(self, *partial: str, counts: Any = None) -> Executor:
        """Begin a call. The inputs named in `partial` become ready part by part."""
        if self.closed or self.comm.closed:
            raise StateError(f"{self.compiled.title}: the executor is closed")
        if self._run is not None and not self._run.finished:
            raise StateError(f"{self.compiled.title} is in flight already: wait() before the next start()")
        if counts is not None:
            self._resize(counts)
        elif self._sizes != self.plan.sizes:
            self._use(self.plan.sizes)
        unready = {(name, block): ops for name in partial for block, ops in self._readers_of(name).items()}
        self._calls += 1
        stamp, slot = self.comm.bound_call(self._instance, self._calls)
        engine = self.comm.engine
        with engine.lock:
            self._run = run = Run(self.compiled, self.comm, stamp, slot, self._title)
            for tensor in self._written:
                dlpack.written(tensor)
            engine.last_call = run.title
            run.start(self._actions, unready)
        return self

    @property
    def _title(self) -> str:
        return f"{self.compiled.title} (bound {self._instance}, call {self._calls})"

    def ready(self, name: str, part: int) -> None:
        """Part `part` of the input `name` may be read from now on, in this call."""
        run, block = self._current(), self._block(name, part)
        with self.comm.engine.lock:
            run.ready_part(name, block)

    def arrived(self, name: str, part: int) -> bool:
        """Whether part `part` of the output `name` is there. Drives what is in flight."""
        if name not in self._writers:
            if name not in [b.name for b in self.compiled.outputs]:
                raise PlanError(f"{name!r} is no output of {self.compiled.title}")
            self._writers[name] = self.compiled.last_writers(name)
        run = self._current()
        writer = self._writers[name][self._block(name, part)]
        if not run.ended[writer]:
            self.comm.engine.progress()
        if run.error is not None:
            raise run.error
        return bool(run.ended[writer])

    def progress(self) -> bool:
        """Move what is in flight; whether this call is finished."""
        run = self._current()
        self.comm.engine.progress()
        return run.finished

    done = progress

    def wait(self, timeout: float | None = None) -> Any:
        """The result of this call: one tensor, or a tuple in the order of the plan's outputs.

        Raises the error that ended the call on this rank, PeerError if it began on another one, and TimeoutError
        after `timeout` seconds (the call goes on).
        """
        run = self._current()
        if run.unready and timeout is None:
            missing = ", ".join(sorted({f"{name}[{block}]" for name, block in run.unready}))
            raise StateError(f"wait() for {self.compiled.title}, but ready() was never called for {missing}")
        if not self.comm.engine.wait(run, self.comm.channel, timeout):
            raise TimeoutError(f"{self.compiled.title} is not finished after {timeout:g} s")
        if run.error is not None:
            raise run.error
        return self._results[0] if len(self._results) == 1 else self._results

    @property
    def trace(self) -> Trace:
        """What this rank did in the last call."""
        return self._current().trace(self._extents)

    def _current(self) -> Run:
        if self._run is None:
            raise StateError(f"{self.compiled.title} was not started")
        return self._run

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
        """Give scratch back. All ranks close an executor together if its plan has collectives of the library."""
        if not self.closed:
            self.closed = True
            self._arrays, self._actions = {}, []
            if self._link is not self.comm.link:
                self._link.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Executor({self._title} on {self.comm!r})"


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
    refusal: Exception | None = None
    borrowed: dict[str, Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        borrowed, shapes = _check(plan, communicator, tensors)
    except FompiError as error:
        refusal = error
    text = f"bind({plan.problem} by {plan.schedule}, {plan.parts} parts, window {plan.window}, {plan.sizes})"
    agree(communicator, text, refusal)
    return Executor(plan, communicator, borrowed, shapes, backend or Numpy(), kernels)


def _check(
    plan: Plan, comm: Communicator, tensors: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
    """The tensors as arrays of the shapes that the plan's buffers have, and the shapes that they came in."""
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
            shapes["y"] = tensor.array.shape
            tensor = replace(tensor, array=tensor.array.reshape(shape))
        borrowed[name] = tensor
    return borrowed, shapes
