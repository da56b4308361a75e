"""The sum over the ranks, a residual and an RMS norm as one function, for layers whose rows all ranks have.

    y, r = all_reduce_rmsnorm(x, r, weight, comm=tp)        # x: a term on each rank, as x @ w of a row-parallel layer

    sum of the first half   |####|                          the rows are cut in halves: the norm of one half runs while
    norm of it                   |##|                       the sum of the other moves, and with `sharded` its result
    sum of the second half       |####|                     leaves meanwhile
    norm of it                         |##|

Source: TokenWeave (arXiv 2505.11329); the norm behind the sum is also the last stage of FlashOverlap (2504.19519).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from fompi.backends.numbers import contiguous, narrow, widen
from fompi.base.errors import LayoutError, ShapeError
from fompi.base.layout import accumulator, number, offsets, split
from fompi.engine.communicator import Communicator
from fompi.ops.operations import all_gather, all_reduce, reduce_scatter
from fompi.parallel.arrays import (
    Array,
    Kept,
    admit,
    arrived,
    begin,
    borrow,
    borrow_gradient,
    check_leaves,
    enter,
    give,
    held_alike,
    lent,
    memory,
    over_losses,
    start,
    start_sum,
    unrounded,
    zeros,
)
from fompi.parallel.differentiable import Differentiable, Gradients
from fompi.tensors.dlpack import Tensor

LEAST_NBYTES = 256 << 10
"""A smaller sum is not cut in halves: the latency of a second one costs more than a norm."""


def _all_reduce_rmsnorm(
    x: Any, residual: Any, weight: Any, *, eps: float = 1e-6, comm: Any = None, sharded: bool = False
) -> tuple[tuple[Any, Any], Kept]:
    """r = residual + all_reduce(x); y = r / sqrt(mean(r**2, the last dimension) + eps) * weight

    x: (rows, ..., n), Partial: each rank has a term. residual and r: (rows, ..., n), the same on all ranks, or with
    `sharded` the rows of this rank, Shard(0), as even as possible. weight: (n,), the same on all ranks. y: (rows, ...,
    n), Replicate. With `sharded` each row is normed by one rank, and the residual never travels.

    An `order` is that of the sum: "ranks", or `Canonical(k)` where each rank has one subtree of the leaves. Then y and
    r have the same bits on any number of ranks. Gradients are those of the sum of the losses of all ranks, so with any
    order they are summed in that of the ranks. That of the weight is summed over them, in float32.
    Raises ShapeError, DtypeError or LayoutError on all ranks, or MismatchError if only other ranks refuse.
    """

    def check(comm: Communicator) -> tuple[str, tuple[Tensor, Tensor, Tensor, list[int]]]:
        tx = borrow(x, "x")
        tr, tw = borrow(residual, "residual", tx), borrow(weight, "weight", tx, 1)
        if tx.array.ndim < 2 or tx.array.shape[-1:] != tw.array.shape:
            raise ShapeError(f"x {tx.array.shape} and weight {tw.array.shape}: they must be (rows, ..., n) and (n,)")
        rows = split(len(tx.array), comm.size) if sharded else [len(tx.array)] * comm.size
        wanted = (rows[comm.rank], *tx.array.shape[1:])
        if tr.array.shape != wanted:
            raise ShapeError(f"residual has the shape {tr.array.shape}: with {sharded=} it must be {wanted}")
        if (number(eps) or -1) < 0:
            raise LayoutError(f"eps={eps!r} must be a number > 0")
        check_leaves(comm, 0, True)
        return f"of all_reduce_rmsnorm, x {tx.array.shape}, {eps=}, {sharded=}", (tx, tr, tw, list(rows))

    group, text, (tx, tr, tw, rows) = admit(reduce_scatter if sharded else all_reduce, comm, check)
    dtype, wide, scale = tx.dtype, accumulator(tx.dtype), widen(tw.array, tx.dtype)
    r = memory(group, tr.array.shape, wide, tr.array)
    inverse = memory(group, (*r.shape[:-1], 1), wide, tr.array)

    def norm(at: slice, total: Array) -> Array:
        """y of these rows of the residual."""
        np.add(widen(tr.array[at], dtype), widen(total, dtype), out=r[at])
        inverse[at] = 1 / np.sqrt(np.mean(np.square(r[at]), -1, keepdims=True) + r.dtype.type(eps))
        return narrow(r[at] * inverse[at] * scale, dtype)

    moves = _Halves(group, rows, tx.array.shape, tx.array.nbytes, sharded, dtype)
    y = moves.there_and_back(tx.array, norm, text)
    saved = Kept(
        tx, tx.array.shape, residual=tr, weight=tw, comm=group, sharded=sharded, counts=rows, r=r, inverse=inverse
    )
    return (lent(y, tx), give(r, tr)), saved


class _Halves:
    """Sums of rows, something that each rank does to the rows that it gets, and gathers: half by half."""

    def __init__(
        self, comm: Communicator, rows: Sequence[int], shape: tuple[int, ...], nbytes: int, sharded: bool, dtype: str
    ):
        self.comm, self.sharded, self.shape, self.dtype = comm, sharded, shape, dtype
        self.count = 2 if nbytes >= LEAST_NBYTES and comm.size > 1 else 1
        self.cuts = [offsets(split(n, self.count)) for n in rows]  # of the rows of each rank
        self.first = offsets(rows) if sharded else [0] * len(rows)  # where they begin among all

    def rows_of(self, half: int, rank: int) -> slice:
        """Which rows of all a rank has in this half."""
        a, b = self.cuts[rank][half : half + 2]
        return slice(self.first[rank] + a, self.first[rank] + b)

    def own(self, half: int) -> slice:
        """Those of this rank among its own."""
        return slice(*self.cuts[self.comm.rank][half : half + 2])

    def sum_of(self, x: Array, half: int, begins: Any) -> Any:
        """The sum of the rows of this half: all of them, or those that this rank keeps. `begins` starts it."""
        if not self.sharded:
            return begins(all_reduce, contiguous(x[self.own(half)]), dtype=self.dtype, **held_alike(self.comm))
        runs = [self.rows_of(half, rank) for rank in range(self.comm.size)]
        packed = np.concatenate([x[run] for run in runs]) if self.count > 1 else x
        counts = [run.stop - run.start for run in runs]
        return begins(reduce_scatter, packed, counts=counts, dtype=self.dtype, comm=self.comm)

    def there_and_back(self, x: Array, work: Any, text: str | None = None) -> Array:
        """work(own rows, their sum), gathered: of all rows. With a `text` the ranks begin here, and compare it."""
        result, gathers = memory(self.comm, self.shape, x.dtype, x), []
        pending = self.sum_of(x, 0, start if text is None else lambda f, *args, **how: begin(f, text, *args, **how))
        for half in range(self.count):
            total = arrived(pending)
            if half + 1 < self.count:
                pending = self.sum_of(x, half + 1, start)
            made = work(self.own(half), total)
            if self.sharded:
                gathers.append(start(all_gather, made, dtype=self.dtype, comm=self.comm))
            else:
                result[self.own(half)] = made
        for half, gather in enumerate(gathers):
            self.put(result, half, arrived(gather))
        return result

    def put(self, result: Array, half: int, gathered: Array) -> None:
        """The rows of a gather, which lie rank by rank, at their places."""
        ends = offsets([run.stop - run.start for run in (self.rows_of(half, r) for r in range(self.comm.size))])
        for rank, (a, b) in enumerate(pairwise(ends)):
            result[self.rows_of(half, rank)] = gathered[a:b]


def _backward(saved: Kept, given: Any) -> Gradients:
    """g = dr + the gradient of the norm; dx: its sum over the ranks, or gathered; that of the residual is g itself."""
    group, dtype, wide = saved.comm, saved.dtype, accumulator(saved.dtype)
    shape = saved.x.array.shape

    def check(comm: Communicator) -> tuple[str, int, tuple[Array, Array]]:
        dy, dr = given
        return "", 0, (saved.gradient(dy), borrow_gradient(dr, dtype, saved.residual.array.shape, saved.x))

    dy, dr = enter("the backward of all_reduce_rmsnorm", group, check)[1]
    scale, g = widen(saved.weight.array, dtype), np.empty_like(saved.r)
    dweight = zeros(group, scale.shape, wide, scale)

    def back(at: slice, d: Array) -> Array:
        """The gradient of r of these rows, where d is that of y."""
        d, unit = widen(d, dtype), saved.r[at] * saved.inverse[at]
        dweight[...] += (d * unit).reshape(-1, len(scale)).sum(0)
        inner = d * scale
        inner -= unit * np.mean(inner * unit, -1, keepdims=True)
        g[at] = inner * saved.inverse[at] + widen(dr[at], dtype)
        return narrow(g[at], dtype)

    summing = over_losses(group)
    moves = _Halves(summing, saved.counts, shape, saved.x.array.nbytes, saved.sharded, dtype)
    if saved.sharded:
        dx = moves.there_and_back(dy, back)
    else:
        sums = []
        for half in range(moves.count):  # the sum of one half moves while the other one is computed
            at = moves.own(half)
            sums.append(start_sum(back(at, dy[at]), dtype, summing))
        dx = memory(group, shape, dy.dtype, dy)
        for half, pending in enumerate(sums):
            dx[moves.own(half)] = arrived(pending)
    total = arrived(start_sum(dweight, wide, unrounded(summing)))
    return lent(dx, saved.x), give(g, saved.residual), give(total, saved.weight)


all_reduce_rmsnorm = Differentiable(
    _all_reduce_rmsnorm, _backward, tensors=("x", "residual", "weight"), inputs=2, takes=("wire", "order")
)
