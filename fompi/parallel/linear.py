"""Linear layers whose weights are spread over the ranks, by columns or by rows. Rows travel behind the products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fompi.backends.numbers import contiguous, filled, narrow, ordered_product, ordered_sum, wide_product, widen
from fompi.base.errors import LayoutError, ShapeError
from fompi.base.layout import accumulator
from fompi.engine.communicator import Communicator
from fompi.ops import operations as ops
from fompi.parallel.activations import activate, activate_backward, check_activation
from fompi.parallel.arrays import (
    Array,
    Kept,
    admit,
    arrived,
    as_rows,
    begin,
    borrow,
    call,
    check_leaves,
    enter,
    enter_backward,
    give,
    held_alike,
    lent,
    over_losses,
    start,
    start_sum,
    unrounded,
)
from fompi.parallel.differentiable import Differentiable, Gradients
from fompi.plans.rows import counts_of
from fompi.tensors.dlpack import Tensor


def _column_parallel_linear(
    x: Any, w: Any, bias: Any = None, *, activation: str = "none", comm: Any = None, sequence_parallel: bool = True
) -> tuple[Any, Kept]:
    """y = activation(all_gather(x) @ w + bias)

    x: (rows of this rank, ..., k), Shard(0). w: (k, n of this rank), Shard(-1). bias: (n of this rank,) or None.
    y: (all rows, ..., n of this rank), Shard(-1). activation: "none", "relu", "gelu" (by erf), "silu", or "swiglu":
    silu(first half) * second half of the n features of this rank, so y has n / 2.

    With `sequence_parallel=False` x is (all rows, ..., k), Replicate. Nothing is sent then: the gradient of x is that
    of this rank's copy. The sum over the ranks is that of `all_reduce`, or of the `row_parallel_linear` that made x.
    With order=Canonical(k), k leaves of the features of all ranks, y and all gradients have the same bits on any number
    of ranks. With swiglu a leaf has a part of the first half, and the same part of the second.
    Raises ShapeError, DtypeError or PlanError on all ranks, or MismatchError if only other ranks refuse.
    """

    def check(comm: Communicator) -> tuple[str, Kept]:
        saved = _borrowed(x, w, bias, sequence_parallel=sequence_parallel, activation=activation, counts=())
        features, halves = saved.w.array.shape[1], 2 if activation == "swiglu" else 1
        saved.leaves = check_leaves(comm, features // halves, not sequence_parallel)
        check_activation(activation, features, "w")
        return f"of column_parallel_linear, {activation}", saved

    if sequence_parallel:
        group, text, saved = admit(ops.all_gather_matmul, comm, check)
        how = {"bias": _array(saved.bias), "dtype": saved.dtype, "comm": group}
        pending = begin(ops.all_gather_matmul, text, saved.x.array, saved.w.array, **how)
        z, saved.counts = arrived(pending), pending.counts
    else:  # nothing is sent, so the ranks agree here

        def check_all(comm: Communicator) -> tuple[str, int, Kept]:
            text, saved = check(comm)
            text += f", {saved.dtype}, x {saved.x.array.shape}, bias={saved.bias is not None}"
            return text, 0, saved

        group, saved, _ = enter("column_parallel_linear", comm, check_all)
        if not saved.leaves:
            wide = wide_product(saved.x.array, saved.w.array, saved.dtype)
            z = narrow(wide if saved.bias is None else wide + widen(saved.bias.array, saved.dtype), saved.dtype)
        else:
            z = narrow(ordered_product(saved.x.array, saved.w.array, saved.dtype, 1, _array(saved.bias)), saved.dtype)
    saved.comm, y = group, z
    if activation != "none":
        saved.z = z
        y = narrow(activate(widen(z, saved.dtype), activation), saved.dtype)
    saved.shape = y.shape
    return lent(y, saved.x), saved


def _column_dz(saved: Kept, dy: Any) -> Array:
    """The gradient of z, in the dtype of x."""
    given = enter_backward("column_parallel_linear", saved, dy)
    if saved.activation == "none":
        return given
    dz = activate_backward(widen(saved.z, saved.dtype), widen(given, saved.dtype), saved.activation)
    return narrow(dz, saved.dtype)


def _column_backward(saved: Kept, dy: Any) -> Gradients:
    dz, options = _column_dz(saved, dy), saved.keywords
    if not saved.sequence_parallel:
        return _local_dx(saved, dz), *_local_dw(saved, dz)
    dw = start(ops.all_gather_weight_gradient, saved.x.array, dz, **options)  # one travels while the other multiplies
    dx = start(ops.matmul_reduce_scatter, *_leaf_by_leaf(saved, dz), counts=saved.counts, **options)
    db = _sum_rows(saved, dz)
    return lent(arrived(dx), saved.x), lent(arrived(dw), saved.w), db


def _column_backward_input(saved: Kept, dy: Any) -> tuple[Gradients, Any]:
    dz = _column_dz(saved, dy)
    if not saved.sequence_parallel:
        return (_local_dx(saved, dz),), (saved, dz)
    dx = call(ops.matmul_reduce_scatter, *_leaf_by_leaf(saved, dz), counts=saved.counts, **saved.keywords)
    return (lent(dx, saved.x),), (saved, dz)


def _column_backward_weight(rest: tuple[Kept, Array]) -> Gradients:
    saved, dz = rest
    if not saved.sequence_parallel:
        return _local_dw(saved, dz)
    dw = call(ops.all_gather_weight_gradient, saved.x.array, dz, **saved.keywords)
    return lent(dw, saved.w), _sum_rows(saved, dz)


def _local_dx(saved: Kept, dz: Array) -> Any:
    return give(_product(*_leaf_by_leaf(saved, dz), saved.dtype, saved.leaves), saved.x)


def _leaf_by_leaf(saved: Kept, dz: Array) -> tuple[Array, Array]:
    """The gradient of z and w.T, whose product is that of x. Leaves of swiglu lie side by side: (gate, up), ..."""
    w = saved.w.array
    if not saved.leaves or saved.activation != "swiglu":
        return dz, w.T

    def leaves(a: Array) -> Array:
        parts = a.reshape(*a.shape[:-1], 2, saved.leaves, a.shape[-1] // (2 * saved.leaves))
        return contiguous(np.swapaxes(parts, -3, -2)).reshape(a.shape)

    return leaves(dz), leaves(w).T


def _local_dw(saved: Kept, dz: Array) -> Gradients:
    x, d = as_rows(saved.x.array), as_rows(dz)
    return give(_product(x.T, d, saved.dtype, min(saved.leaves, 1)), saved.w), _sum_rows(saved, dz)


def _row_parallel_linear(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    comm: Any = None,
    sequence_parallel: bool = True,
    counts: Sequence[int] | None = None,
) -> tuple[Any, Kept]:
    """y = reduce_scatter(x @ w, counts) + bias

    x: (all rows, ..., k of this rank), Shard(-1). w: (k of this rank, n), Shard(0). bias: (n,), the same on all ranks,
    or None; its gradient is summed over the ranks. y: (rows of this rank, ..., n), Shard(0). `counts` is the number of
    rows that each rank keeps, by default as even as possible.

    With `sequence_parallel=False` y = all_reduce(x @ w) + bias has all rows, Replicate. With a wire the gradient of the
    bias travels as it is. An `order` is as for `column_parallel_linear`.
    Raises ShapeError, DtypeError or LayoutError on all ranks, or MismatchError if only other ranks refuse.
    """

    operation = ops.matmul_reduce_scatter if sequence_parallel else ops.matmul_all_reduce

    def check(comm: Communicator) -> tuple[str, Kept]:
        saved = _borrowed(x, w, bias, sequence_parallel=sequence_parallel)
        saved.leaves = check_leaves(comm, len(saved.w.array), False)
        if counts is not None and not sequence_parallel:
            raise LayoutError("counts= is for sequence_parallel=True: without it, every rank keeps all rows")
        saved.counts = [*counts_of("row_parallel_linear", counts, len(saved.x.array), comm.size, "the rows")]
        return "of row_parallel_linear", saved

    group, text, saved = admit(operation, comm, check)
    how = {"comm": group, "counts": saved.counts} if sequence_parallel else held_alike(group)
    how |= {"bias": _array(saved.bias), "dtype": saved.dtype}
    y = arrived(begin(operation, text, saved.x.array, saved.w.array, **how))
    saved.comm, saved.shape = group, y.shape
    return lent(y, saved.x), saved


def _row_dy(saved: Kept, dy: Any) -> Array:
    """The gradient of the rows of this rank."""
    given = enter_backward("row_parallel_linear", saved, dy)
    if saved.sequence_parallel:
        return given
    comm = over_losses(saved.comm)
    return call(ops.reduce_scatter, given, counts=saved.counts, dtype=saved.dtype, comm=comm)


def _row_backward(saved: Kept, dy: Any) -> Gradients:
    d, options = _row_dy(saved, dy), saved.keywords
    db = _start_shared_sum(saved, d)
    dx, dw = call(ops.all_gather_matmul_weight_gradient, d, saved.w.array.T, saved.x.array, **options)
    return lent(dx, saved.x), lent(dw, saved.w), _shared_sum(saved, db, d)


def _row_backward_input(saved: Kept, dy: Any) -> tuple[Gradients, Any]:
    d = _row_dy(saved, dy)
    dx = call(ops.all_gather_matmul, d, saved.w.array.T, **saved.keywords)
    return (lent(dx, saved.x),), (saved, d)


def _row_backward_weight(rest: tuple[Kept, Array]) -> Gradients:
    saved, d = rest
    db = _start_shared_sum(saved, d)
    dw = call(ops.all_gather_weight_gradient, d, saved.x.array, **saved.keywords)
    return lent(contiguous(dw.T), saved.w), _shared_sum(saved, db, d)


def _start_shared_sum(saved: Kept, d: Array) -> Any:
    """The sum over all rows of all ranks, in flight: the gradient of a bias that all ranks hold.

    In an order of leaves it begins later: while d is gathered for the product, it is not gathered again.
    """
    if saved.bias is None or saved.leaves:
        return None
    comm = unrounded(over_losses(saved.comm))
    return start_sum(as_rows(widen(d, saved.dtype)).sum(0), accumulator(saved.dtype), comm)


def _shared_sum(saved: Kept, pending: Any, d: Array) -> Any:
    if saved.bias is None:
        return None
    if not saved.leaves:
        return give(arrived(pending), saved.bias)
    shape = (sum(saved.counts), *d.shape[1:-1], 1)
    ones = narrow(filled(shape, accumulator(saved.dtype), 1, d), saved.dtype)
    db = call(ops.all_gather_weight_gradient, d, ones, **saved.keywords)  # row after row, whoever has it
    return lent(db.reshape(-1), saved.bias)


def _sum_rows(saved: Kept, d: Array) -> Any:
    if saved.bias is None:
        return None
    rows = as_rows(widen(d, saved.dtype))
    return give(ordered_sum(rows) if saved.leaves else rows.sum(0), saved.bias)


def _product(a: Array, b: Array, dtype: str, leaves: int) -> Array:
    """a @ b in the dtype of sums; with leaves in their order."""
    return ordered_product(a, b, dtype, leaves) if leaves else wide_product(a, b, dtype)


def _array(tensor: Tensor | None) -> Array | None:
    return None if tensor is None else tensor.array


def _borrowed(x: Any, w: Any, bias: Any, **more: Any) -> Kept:
    """The tensors of a linear layer, checked."""
    tx = borrow(x, "x")
    tw = borrow(w, "w", tx, 2)
    if tx.array.ndim < 2 or tx.array.shape[-1] != len(tw.array):
        raise ShapeError(f"x {tx.array.shape} @ w {tw.array.shape}: the last dimension of x must be the first of w")
    tb = None if bias is None else borrow(bias, "bias", tx, 1)
    if tb is not None and len(tb.array) != tw.array.shape[1]:
        raise ShapeError(f"bias has {len(tb.array)} features, but w has {tw.array.shape[1]}")
    return Kept(tx, w=tw, bias=tb, **more)


column_parallel_linear = Differentiable(
    _column_parallel_linear,
    _column_backward,
    tensors=("x", "w", "bias"),
    inputs=1,
    backward_input=_column_backward_input,
    backward_weight=_column_backward_weight,
    takes=("wire", "order"),
)
row_parallel_linear = Differentiable(
    _row_parallel_linear,
    _row_backward,
    tensors=("x", "w", "bias"),
    inputs=1,
    backward_input=_row_backward_input,
    backward_weight=_row_backward_weight,
    takes=("wire", "order"),
)
