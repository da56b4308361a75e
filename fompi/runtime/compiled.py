"""One rank's program, compiled once for all calls: everything that depends neither on rows nor on addresses.

`fompi.plans.dependencies` says what each op waits for. Here this becomes counts that a call
(`fompi.runtime.dispatch`) counts down.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fompi.backends.base import Backend
from fompi.backends.cuda.device import ProductCall
from fompi.backends.half import storage
from fompi.backends.numpy import Numpy
from fompi.base.errors import PlanError
from fompi.base.layout import Extents, offsets
from fompi.plans import kernels
from fompi.plans.dependencies import (
    KERNEL_LANES,
    announced,
    constraints,
    device_constraints,
    lane,
    message_numbers,
    release,
)
from fompi.plans.plan import MOST_MESSAGES, Chunk, Collective, Compute, Plan, Recv, Send, UserKernel, parts_in_words
from fompi.plans.staged import is_mirror

Array = np.ndarray[Any, Any]

COMPUTE, SEND, RECV, COLLECTIVE = range(4)
"""The kinds of ops. COLLECTIVE is a collective of the MPI library."""

LONG_FLOPS, LONG_NBYTES = 4e6, 4e6
"""A kernel is long above this many floating-point operations, or above this many bytes that it reads.

It may take longer than messages should wait without progress.
"""

SMALL_NBYTES = 16 << 10
"""If x has at most this many bytes, a sum or a copy of a part of x takes less time than handing it to a thread."""

_KINDS = {Compute: COMPUTE, Send: SEND, Recv: RECV, Collective: COLLECTIVE}


class Place(NamedTuple):
    """A chunk by blocks `start` to `stop`, counted from the first block of its buffer on this rank.

    `width` is the size of a row in bytes.
    """

    buffer: str
    start: int
    stop: int
    width: int


class Sized(NamedTuple):
    """What depends on the rows of a call.

    `starts` has for each buffer the first row of each block, and at the end the number of all rows. `shapes` has the
    shape of each buffer. A buffer without blocks (a weight) is only in `shapes`.
    """

    starts: dict[str, list[int]]
    shapes: dict[str, tuple[int, ...]]


class NativeStart:
    """The start of a collective of the library, and the arrays that it reads and writes. It returns the request."""

    __slots__ = ("reads", "start", "writes")

    def __init__(self, start: Callable[[], Any], reads: Sequence[Array], writes: Sequence[Array]):
        self.start, self.reads, self.writes = start, reads, writes


class Compiled:
    """The program of `rank` in `plan`, for any rows.

    `device` is the name of the device on which kernels are enqueued. Empty: kernels run on the host. `by_caller`: those
    that the plan declares are functions of the program, which run in its thread. `announces`: one kernel of the device
    may compute several products and announce each of them.
    Raises PlanError if the program sends too many messages to one peer.
    """

    def __init__(self, plan: Plan, rank: int, device: str = "", by_caller: bool = False, announces: bool = True):
        self.plan, self.program, self.asynchronous = plan, plan.programs[rank], bool(device)
        self.is_paced = plan.is_paced
        ops = self.program.ops
        self.ops = ops
        self.kinds = [_KINDS[type(op)] for op in ops]
        self.lanes = [lane(op) for op in ops]
        self.peers = [peer for _, peer in self.lanes]
        self.numbers = message_numbers(ops)
        if max(self.numbers, default=0) >= MOST_MESSAGES:
            raise PlanError(f"{plan.schedule} sends more than {MOST_MESSAGES} messages to one peer: use fewer slices")
        limits = constraints(ops, plan.pace)
        self.announced: tuple[int, ...] = ()  # the products that one kernel of a device may announce
        if device:
            self.announced = announced(self.program, limits.needs) if announces else ()
            limits = device_constraints(ops, limits)
        self.follows = limits.follows
        self.multiplies = ("compute", 0) in self.lanes
        self.merges = [name in KERNEL_LANES[1:] for name, _ in self.lanes]
        self.forwards = any(
            self.kinds[j] == RECV or self.merges[j]
            for i, needs in enumerate(limits.needs)
            if self.kinds[i] == SEND
            for j in needs
        )  # True if this rank sends on what it has received, or sums of that
        self.blockers, self.on_start, self.on_done = release(limits)
        self.first = [i for i, count in enumerate(self.blockers) if count == 0]
        self.collectives = self.kinds.count(COLLECTIVE)
        self.buffers = {b.name: b for b in self.program.buffers}
        self._forms = [(b.name, b.axis, b.row) for b in self.program.buffers if b.axis != "whole" and not b.wire]
        self._wired = [b for b in self.program.buffers if b.wire]
        self._whole = {b.name: b.row for b in self.program.buffers if b.axis == "whole" and not b.wire}
        own = {kernel.name for kernel in plan.kernels} if by_caller else ()
        self.by_caller = {i for i, op in enumerate(ops) if isinstance(op, Compute) and op.kernel in own}
        self.is_opaque = bool(plan.kernels)  # it has kernels of the user, which may take any time
        self._xs = [b for b in self.program.buffers if b.is_input and b.axis != "whole" and b.name[0] == "x"]
        self._x_row_nbytes = sum(buffer.row_nbytes for buffer in self._xs)  # several only where columns are split
        self.outputs = [b for b in self.program.buffers if b.is_output]
        cut = f", {parts_in_words(plan)}" if plan.parts > 1 else ""
        where = f" on {'an' if device[0] in 'aeiou' else 'a'} {device}" if device else ""
        self.title = f"{plan.problem.operation} by {plan.schedule}{cut}{where}"
        self._reads = [[self._place(c) for c in op.reads] for op in ops]
        self._writes = [[self._place(c) for c in op.writes] for op in ops]
        self._dtypes = [
            ([self.buffers[c.buffer].dtype for c in op.reads], [self.buffers[c.buffer].dtype for c in op.writes])
            for op in ops
        ]
        self.moves = [
            isinstance(op, Compute) and op.kernel in kernels.MOVES and len({*reads, *writes}) == 1
            for op, (reads, writes) in zip(ops, self._dtypes, strict=True)
        ]  # True for kernels without arithmetic
        self._moved = [
            (*reads, *writes)[0] if kind in (SEND, RECV) else None
            for kind, reads, writes in zip(self.kinds, self._reads, self._writes, strict=True)
        ]
        self.used = False  # True if an unbound call ran it since the cache has looked
        self._sized: tuple[Extents, Sized] | None = None
        self._long: tuple[Sized, bool] | None = None

    def _place(self, chunk: Chunk) -> Place:
        buffer = self.buffers[chunk.buffer]
        return Place(chunk.buffer, chunk.start - buffer.first, chunk.stop - buffer.first, buffer.row_nbytes)

    def places(self, i: int) -> list[Place]:
        """The chunks that op `i` moves or works on: those it writes for a receive, else those it reads."""
        return self._writes[i] if self.kinds[i] == RECV else self._reads[i]

    def operands(self, i: int) -> tuple[list[Place], list[Place]]:
        """The chunks that op `i` reads, and those that it writes."""
        return self._reads[i], self._writes[i]

    def dtypes(self, i: int) -> tuple[list[str], list[str]]:
        """The dtypes of these chunks."""
        return self._dtypes[i]

    def is_message(self, i: int) -> bool:
        """True if op `i` sends or receives, or is a collective of the MPI library."""
        return self.kinds[i] != COMPUTE

    def moves_device_memory(self, i: int) -> bool:
        """True if op `i` is a message that does not go through a mirror in host memory."""
        moved = self._moved[i]
        return moved is not None and not is_mirror(self.buffers[moved.buffer])

    def sized(self, extents: Extents) -> Sized:
        """The `Sized` for these rows. The result of the last call is cached."""
        if self._sized is None or self._sized[0] != extents:
            by_axis: dict[str, list[int]] = {}
            starts, shapes = {}, dict(self._whole)
            for name, axis, row in self._forms:
                begins = by_axis.get(axis)
                if begins is None:
                    begins = by_axis[axis] = offsets(extents.counts(axis))
                starts[name] = begins
                shapes[name] = (begins[-1], *row)
            for buffer in self._wired:
                starts[buffer.name] = begins = buffer.offsets(extents)
                shapes[buffer.name] = (begins[-1],)
            self._sized = extents, Sized(starts, shapes)
        return self._sized[1]

    def is_long(self, sized: Sized) -> bool:
        """True if some kernel is so long that messages must progress while it runs."""
        if self.is_opaque:
            return True
        if not self.multiplies and 2 * self._x_nbytes(sized) <= LONG_NBYTES:
            return False  # a sum reads at most twice the bytes of x: a fast answer where rows change at every call
        if self._long is None or self._long[0] is not sized:
            self._long = sized, any(self._is_long(sized, i) for i in range(len(self.ops)) if self.kinds[i] == COMPUTE)
        return self._long[1]

    def is_small(self, sized: Sized) -> bool:
        """True if sums and copies are so short that they should run at once, in the thread that releases them."""
        return not self.multiplies and not self.is_opaque and self._x_nbytes(sized) <= SMALL_NBYTES

    def _x_nbytes(self, sized: Sized) -> int:
        return self._x_row_nbytes * sized.starts[self._xs[0].name][-1] if self._xs else 0

    def _is_long(self, sized: Sized, i: int) -> bool:
        shapes = self._shapes(sized, i)
        moved = sum(p.width * s[0] for p, s in zip(self._reads[i], shapes[0], strict=True) if p.buffer in sized.starts)
        return moved > LONG_NBYTES or kernels.cost(self._kernel(i), *shapes) > LONG_FLOPS

    def flops(self, sized: Sized) -> int:
        """The floating-point operations of the products of this rank. Kernels of the user count for none."""
        products = [] if self.is_opaque else [i for i, lane in enumerate(self.lanes) if lane == ("compute", 0)]
        return sum(kernels.cost(self._kernel(i), *self._shapes(sized, i)) for i in products)

    def _kernel(self, i: int) -> str:
        op = self.ops[i]
        assert isinstance(op, Compute)
        return op.kernel

    def _shapes(self, sized: Sized, i: int) -> list[list[tuple[int, ...]]]:
        """Those of what a kernel reads, and of what it writes."""
        return [[_shape(sized, place) for place in places] for places in (self._reads[i], self._writes[i])]

    def named(self, name: str) -> list[str]:
        """The buffers that the user's program means by `name`: of a tensor that the plan cuts, all pieces."""
        problem = self.plan.problem
        if problem.columns and name in problem.whole_shapes:
            return [f"{name}{rank}" for rank in range(problem.size)]
        return [name]

    def readers(self, name: str) -> dict[int, list[int]]:
        """The ops that read each block of the input `name`."""
        buffer = self.buffers[name]
        ops: dict[int, list[int]] = {b: [] for b in range(buffer.first, buffer.first + buffer.count)}
        for i, op in enumerate(self.ops):
            for chunk in op.reads:
                if chunk.buffer == name:
                    for block in range(chunk.start, chunk.stop):
                        ops[block].append(i)
        return ops

    def last_writers(self, name: str) -> dict[int, int]:
        """The op that writes each block of the output `name` last."""
        ops: dict[int, int] = {}
        for i, op in enumerate(self.ops):
            for chunk in op.writes:
                if chunk.buffer == name:
                    ops.update(dict.fromkeys(range(chunk.start, chunk.stop), i))
        return ops

    def users(self, buffers: Collection[str]) -> list[int]:
        """The ops that read or write one of these buffers."""
        return [i for i in range(len(self.ops)) if not self.touched([i]).isdisjoint(buffers)]

    def touched(self, ops: Iterable[int]) -> set[str]:
        """The buffers that these ops read or write."""
        return {place.buffer for i in ops for place in (*self._reads[i], *self._writes[i])}

    def resolve(
        self,
        arrays: Mapping[str, Array],
        starts: Mapping[str, list[int]],
        backend: Backend,
        collective: Callable[..., Any] | None = None,
        kernels: Mapping[str, Callable[..., object]] | None = None,
        only: Sequence[int] | None = None,
    ) -> list[Any]:
        """What each op does with these arrays, in program order. `only`: the same for these ops.

        A send or receive has the bytes that it moves, or None if it has no rows. A kernel or a collective of the
        library has a call. `collective` makes the call of one (`Link.collective`). `kernels` replaces kernels
        by name: each is called with the lists of arrays that it reads and writes. A kernel that the plan declares
        gets the arguments of its op first.
        """
        flat: dict[str, Array] = {}
        actions: list[Any] = []
        for i in range(len(self.ops)) if only is None else only:
            moved = self._moved[i]
            if moved is not None:
                name, start, stop, width = moved
                if name in starts:
                    first, last = starts[name][start] * width, starts[name][stop] * width
                else:  # a buffer without blocks is sent whole
                    first, last = 0, arrays[name].nbytes
                if first == last:
                    actions.append(None)
                    continue
                data = flat.get(name)
                if data is None:
                    data = flat[name] = arrays[name].reshape(-1).view(np.uint8)
                actions.append(data[first:last])
                continue
            reads, writes = self._operands(arrays, starts, i)
            op = self.ops[i]
            if isinstance(op, Collective):
                assert collective is not None
                rows = [
                    starts[name][block + 1] - starts[name][block]
                    for name, start, stop, _ in self._reads[i]
                    for block in range(start, stop)
                ]
                start = collective(op.name, reads, writes, self.plan.problem.root, rows)
                actions.append(NativeStart(start, reads, writes))
            elif isinstance(op, Compute):
                own = self.plan.kernel(op.kernel) if self.is_opaque else None
                if own is not None and kernels:
                    actions.append(_bind_own(own, op, kernels[own.name], reads, writes, backend))
                elif kernels and op.kernel in kernels:
                    actions.append(_bind_function(kernels[op.kernel], op, reads, writes, backend))
                else:
                    actions.append(backend.bind(op.kernel, reads, writes, *self._dtypes[i]))
        return actions

    def examples(
        self, names: Collection[str], arrays: Mapping[str, Array], starts: Mapping[str, list[int]]
    ) -> list[tuple[str, list[Array], list[Array]]]:
        """The kernels `names` with what they read and write: the smallest op for each choice of dtypes, dimensions."""
        found: dict[Any, tuple[int, tuple[str, list[Array], list[Array]]]] = {}
        for i, op in enumerate(self.ops):
            if isinstance(op, Compute) and op.kernel in names:
                reads, writes = self._operands(arrays, starts, i)
                every = (*reads, *writes)
                kind = op.kernel, len(reads), *((a.dtype, a.ndim) for a in every)
                nbytes = sum(a.nbytes for a in every)
                if all(a.size for a in every) and (kind not in found or nbytes < found[kind][0]):
                    found[kind] = nbytes, (op.kernel, reads, writes)
        return [example for _, example in found.values()]

    def products(self, arrays: Mapping[str, Array], starts: Mapping[str, list[int]]) -> list[ProductCall]:
        """The products that one kernel may announce, on these arrays."""
        kernels = [(self.program.ops[i].kernel, i) for i in self.announced]  # type: ignore[union-attr]
        return [ProductCall(name, *self._operands(arrays, starts, i), *self._dtypes[i]) for name, i in kernels]

    def _operands(
        self, arrays: Mapping[str, Array], starts: Mapping[str, list[int]], i: int
    ) -> tuple[list[Array], list[Array]]:
        """What op `i` reads and writes."""
        reads, writes = ([_view(arrays, starts, p) for p in places] for places in (self._reads[i], self._writes[i]))
        return reads, writes

    def drain(self, sized: Sized, collective: Callable[..., Any]) -> list[Any]:
        """What each op does if this rank cannot do the call: messages of the right sizes, without meaning.

        All of them share the memory of the largest one, because nobody reads them. The library's collectives need
        arrays of the right shapes.
        """
        if self.collectives:
            arrays = {name: np.zeros(s, storage(self.buffers[name].dtype)) for name, s in sized.shapes.items()}
            return self.resolve(arrays, sized.starts, Numpy(), collective)  # no kernel runs: the arrays are on the host
        sizes = [0 if moved is None else _nbytes(sized, moved) for moved in self._moved]
        sent, received = np.zeros(max(sizes, default=0), np.uint8), np.empty(max(sizes, default=0), np.uint8)
        return [(sent if self.kinds[i] == SEND else received)[:n] if n else None for i, n in enumerate(sizes)]


def _bind_own(
    kernel: UserKernel,
    op: Compute,
    function: Callable[..., object],
    reads: Sequence[Array],
    writes: Sequence[Array],
    backend: Backend,
) -> Callable[..., Any]:
    """The call of a kernel that the plan declares, on the host, on a device, or on one that is emulated."""
    function = partial(function, op.args)
    if (bind_timed := getattr(backend, "bind_timed", None)) is not None:
        timed: Callable[..., Any] = bind_timed(partial(function, reads, writes), kernel.seconds_of(op))
        return timed
    return _bind_function(function, op, reads, writes, backend)


def _bind_function(
    function: Callable[..., object], op: Compute, reads: Sequence[Array], writes: Sequence[Array], backend: Any
) -> Callable[..., Any]:
    """The call of a kernel of the user, on the host or on a device."""
    if backend.device is not None:
        bound: Callable[..., Any] = backend.bind_user(function, op.kernel, reads, writes)
        return bound
    return partial(function, reads, writes)


def _nbytes(sized: Sized, place: Place) -> int:
    name, start, stop, width = place
    starts = sized.starts.get(name)
    return width if starts is None else (starts[stop] - starts[start]) * width


def _shape(sized: Sized, place: Place) -> tuple[int, ...]:
    shape, starts = sized.shapes[place.buffer], sized.starts.get(place.buffer)
    return shape if starts is None else (starts[place.stop] - starts[place.start], *shape[1:])


def _view(arrays: Mapping[str, Array], starts: Mapping[str, list[int]], place: Place) -> Array:
    name, start, stop, _ = place
    if name not in starts:
        return arrays[name]
    return arrays[name][starts[name][start] : starts[name][stop]]
