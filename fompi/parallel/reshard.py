"""Another sharding of an array, in a run: `fompi.reshard`. The plan is `fompi.plans.resharding`.

Each round is one all-to-all: what a rank sends is packed, and what has arrived is written to its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import update_wrapper
from typing import Any

import numpy as np

from fompi.backends.numbers import fetch, place, upload
from fompi.base.errors import LayoutError, ShapeError, StateError
from fompi.base.layout import Layout, Partial, Replicate, Shard, offsets
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import digest
from fompi.ops.operations import all_to_all
from fompi.parallel.arrays import Array, array_of, borrow_any, enter, lent, read, start, unrounded
from fompi.parallel.section import in_section
from fompi.plans.boxes import Box, Boxes
from fompi.plans.resharding import Move, Resharding, resharding
from fompi.tensors.dlpack import Tensor


class Startable:
    """A function whose call is `start(...).wait()`, with these options."""

    def __init__(self, start: Callable[..., Any], **of_call: Any):
        self.start, self.of_call = start, of_call
        update_wrapper(self, start)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.start(*args, **self.of_call | options).wait()

    def __repr__(self) -> str:
        return f"fompi.{self.start.__name__}"


@Startable
@in_section("reshard")
def reshard(
    x: Any, source: Layout | Boxes, target: Layout | Boxes, *, comm: Any = None, peak: int | None = None
) -> Moving:
    """y = the part of this rank in the sharding `target` of the array that is sharded as `source`

        y = fompi.reshard(x, Shard(0), Shard(1), comm=comm)                  # a transpose: rows become columns
        y = fompi.reshard(x, Boxes.over((n, k), Shard(0), 8), Boxes.over((n, k), Shard(0), 2, size=8), comm=comm)
        pending = fompi.reshard.start(x, source, target, comm=comm)          # y = pending.wait(), later

    `source` and `target` are Shard(dim), Replicate() or `fompi.Boxes`, the same on all ranks. With Shard(dim) as the
    source ranks may have different numbers of rows; as the target they are as even as possible. x is the array of this
    rank, an empty one where it has nothing. y has the framework and dtype of x. Any dtype, bit by bit. Of elements that
    several ranks have, the nearest ones send, equally much; nothing is sent twice, and nothing that is here already.

    `peak` is how many bytes a rank may need beside x and y; then messages come in rounds, two of them in flight. None:
    one round. A started call has `peak` bytes in flight, and the others in `wait`; do not write to x before.
    Collective, also `wait`.
    Raises LayoutError if the source lacks what the target needs, ShapeError if x is not what the source says.
    """

    def check(group: Communicator) -> tuple[str, int, Tensor]:
        tensor, rows = borrow_any(x, "x"), 0
        shape = tensor.array.shape
        if isinstance(source, Shard):
            if not -len(shape) <= source.dim < len(shape):
                raise ShapeError(f"x has the shape {shape}, which has no dimension for {source}")
            rows = shape[source.dim]
        elif isinstance(source, Boxes) and source.size == group.size and shape != source.arrays[group.rank]:
            raise ShapeError(f"x has the shape {shape}, but the source gives it {source.arrays[group.rank]}")
        words = (f"{digest(repr(each)):x}" if isinstance(each, Boxes) else str(each) for each in (source, target))
        return f"{' to '.join(words)}, {tensor.dtype}, {peak=}", rows, tensor

    group, tensor, rows = enter("reshard", comm, check)
    held = _as_boxes(source, tensor.array.shape, group.size, rows)
    wanted = _as_boxes(target, held.shape, group.size)
    plan = resharding(held, wanted, tensor.array.itemsize, peak, costs_of(group))
    array = tensor.array if place(tensor.array) is None else read(fetch(tensor.array), group)
    out = np.zeros(wanted.arrays[group.rank], array.dtype)
    moving = Moving(plan, views(array, held.of[group.rank]), views(out, wanted.of[group.rank]), out.dtype, group)
    moving.result = lambda: lent(upload(out, tensor.array), tensor)
    return moving


def _as_boxes(sharding: Any, shape: tuple[int, ...], size: int, rows: Any = None) -> Boxes:
    """`sharding` of an array of this global shape. `rows`: those of each rank, and `shape` is that of one of them."""
    if isinstance(sharding, Boxes) and sharding.size == size:
        return sharding
    if isinstance(sharding, Boxes):
        raise LayoutError(f"the boxes are of {sharding.size} ranks, but the communicator has {size}")
    if not isinstance(sharding, (Shard, Replicate)):
        hint = ": sum it first, with reduce_scatter or all_reduce" if isinstance(sharding, Partial) else ""
        raise LayoutError(f"{sharding!r} must be Shard(dim), Replicate() or fompi.Boxes{hint}")
    if rows is None or isinstance(sharding, Replicate):
        return Boxes.over(shape, sharding, size)
    dim = sharding.dim % len(shape)
    return Boxes.sharded((*shape[:dim], sum(rows), *shape[dim + 1 :]), dim, rows)


def costs_of(comm: Communicator) -> tuple[tuple[float, ...], ...] | None:
    """The seconds of each link, as the machine or the hosts say. None: all are equal."""
    ranks = range(comm.size)
    if comm.machine is not None:
        return tuple(tuple(comm.machine.link(a, b).seconds(1 << 20) if a != b else 0.0 for b in ranks) for a in ranks)
    hosts = [comm.engine.hosts.get(world, 0) for world in comm.link.world_ranks]
    return tuple(tuple(float(a != b) for b in hosts) for a in hosts) if comm.network else None


class Moving:
    """The rounds of a plan on this rank, between the arrays of its boxes. The first ones are in flight."""

    def __init__(
        self, plan: Resharding, source: Sequence[Array], target: Sequence[Array], dtype: Any, comm: Communicator
    ):
        self.plan, self.comm, self._source, self._target = plan, unrounded(comm), source, target
        self.result: Callable[[], Any] | None = lambda: target
        self._rounds = self._run(dtype)
        next(self._rounds, None)
        for move in plan.copies:
            if move.source == comm.rank:
                self._into(move)[...] = self._from(move)

    @in_section("reshard")
    def wait(self) -> Any:
        """The array of this rank, once it is whole. Collective."""
        if self.result is None:
            raise StateError("this reshard has been waited for")
        for _ in self._rounds:
            pass
        result, self.result = self.result, None
        return result()

    def _run(self, dtype: np.dtype[Any]) -> Iterator[None]:
        """Run the rounds. Yields when as many are in flight as the peak of the plan allows, and then at each end."""
        flying, ended = deque[Any](), 0
        for number, last in enumerate(self.plan.last_before):
            for _ in range(ended, last + 1):
                yield
                self._arrive(dtype, *flying.popleft())
                ended += 1
            flying.append(self._leave(dtype, self.plan.rounds[number]))
        while flying:
            yield
            self._arrive(dtype, *flying.popleft())

    def _leave(self, dtype: np.dtype[Any], moves: Sequence[Move]) -> tuple[Any, list[Move]]:
        """Start a round. Returns its call, and what arrives by it."""
        rank, bits = self.comm.rank, np.dtype(f"u{min(dtype.itemsize, 8)}")  # which every transport carries as they are
        leaving = sorted((m for m in moves if m.source == rank), key=lambda move: move.target)
        nbytes = self.plan.pairs(leaving)[rank]
        packed, at = np.empty(sum(nbytes) // dtype.itemsize, dtype), 0
        for move in leaving:
            packed[at : (at := at + move.box.elements)].reshape(move.box.shape)[...] = self._from(move)
        counts = [n // bits.itemsize for n in nbytes]
        pending = start(all_to_all, packed.view(bits), counts=counts, dtype=bits.name, comm=self.comm)
        return pending, sorted((m for m in moves if m.target == rank), key=lambda move: move.source)

    def _arrive(self, dtype: np.dtype[Any], pending: Any, coming: Sequence[Move]) -> None:
        """End a round."""
        arrived, at = array_of(pending.wait()).view(dtype), 0
        for move in coming:
            self._into(move)[...] = arrived[at : (at := at + move.box.elements)].reshape(move.box.shape)

    def _from(self, move: Move) -> Array:
        return self._source[move.read][self.plan.source.of[move.source][move.read].slices(move.box)]

    def _into(self, move: Move) -> Array:
        return self._target[move.write][self.plan.target.of[move.target][move.write].slices(move.box)]


def views(array: Array, boxes: Sequence[Box]) -> list[Array]:
    """The elements of each box in the array of a rank (`Boxes`)."""
    if len(boxes) == 1 and array.shape == boxes[0].shape:
        return [array]
    ends, flat = offsets(box.elements for box in boxes), array.reshape(-1)
    return [flat[a:b].reshape(box.shape) for a, b, box in zip(ends, ends[1:], boxes, strict=False)]
