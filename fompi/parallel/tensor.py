"""Tensor parallelism with sequence parallelism: linear layers, attention, and a vocabulary spread over the ranks.

    h = column_parallel_linear(x, w1, b1, activation="gelu", comm=tp)     # gathers the rows while it multiplies
    y = row_parallel_linear(h, w2, b2, comm=tp)                           # sends products while it multiplies

The features of weights are spread over the ranks, and the rows of x and y are too, unless `sequence_parallel=False`.
Gradients are those of the sum of the losses of all ranks. A parameter that several ranks hold (the bias of a
row-parallel layer, a shared key head) gets the sum over its holders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from fompi.backends.numpy import narrow, widen
from fompi.base.errors import LayoutError, PlanError, ShapeError
from fompi.base.layout import accumulator, offsets, split
from fompi.engine.communicator import Communicator
from fompi.ops.operations import (
    all_gather,
    all_gather_matmul,
    all_gather_matmul_many,
    all_gather_matmul_weight_gradient,
    all_gather_weight_gradient,
    all_reduce,
    matmul_all_reduce,
    matmul_reduce_scatter,
    reduce_scatter,
)
from fompi.parallel.activations import ACTIVATIONS, activate, activate_backward
from fompi.parallel.arrays import (
    Array,
    admit,
    arrived,
    begin,
    borrow,
    borrow_gradient,
    borrow_integers,
    call,
    check_counts,
    enter,
    give,
    start,
    transfer,
)
from fompi.parallel.attention import Rule, attend, attend_backward, check_documents, check_heads
from fompi.parallel.differentiable import Differentiable, Gradients
from fompi.parallel.local import add, product
from fompi.tensors import dlpack
from fompi.tensors.dlpack import Tensor

# ------------------------------------------------------------------------------------------------- linear layers


@dataclass
class Linear:
    """What the backward of a linear layer needs."""

    x: Tensor
    w: Tensor
    bias: Tensor | None
    comm: Communicator
    sequence_parallel: bool
    counts: Sequence[int]  # the rows of each rank
    shape: tuple[int, ...]  # of y
    activation: str = "none"
    z: Array | None = None  # y before the activation

    @property
    def dtype(self) -> str:
        return self.x.dtype


def _column(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    activation: str = "none",
    comm: Any = None,
    sequence_parallel: bool = True,
) -> tuple[Any, Linear]:
    """y = activation(all_gather(x) @ w + bias)

    x: (rows of this rank, ..., k), Shard(0). w: (k, n of this rank), Shard(-1). bias: (n of this rank,) or None.
    y: (all rows, ..., n of this rank), Shard(-1). activation: "none", "relu", "gelu" (by erf), "silu", or "swiglu":
    silu(first half) * second half of the n features of this rank, so y has n / 2.

    With `sequence_parallel=False` x is (all rows, ..., k), Replicate. Nothing is sent then: the gradient of x is that
    of this rank's copy. The sum over the ranks is that of `all_reduce`, or of the `row_parallel_linear` that made x.
    Raises ShapeError, DtypeError or PlanError on all ranks, or MismatchError if only other ranks refuse.
    """

    def check(comm: Communicator) -> tuple[str, tuple[Tensor, Tensor, Tensor | None]]:
        tensors = _linear_tensors(x, w, bias)
        if activation not in ACTIVATIONS:
            raise PlanError(f"activation={activation!r} must be one of {', '.join(ACTIVATIONS)}")
        if activation == "swiglu" and tensors[1].array.shape[1] % 2:
            raise ShapeError(f"swiglu halves the features: w has {tensors[1].array.shape[1]} columns, an odd number")
        return f"of column_parallel_linear, {activation}", tensors

    counts: Sequence[int] = ()
    if sequence_parallel:
        group, text, (tx, tw, tb) = admit(all_gather_matmul, comm, check)
        added = None if tb is None else tb.array
        pending = begin(all_gather_matmul, text, tx.array, tw.array, bias=added, dtype=tx.dtype, comm=group)
        z, dtype, counts = arrived(pending), tx.dtype, pending.counts
    else:  # nothing is sent, so the ranks agree here

        def check_all(comm: Communicator) -> tuple[str, int, tuple[Tensor, Tensor, Tensor | None]]:
            text, tensors = check(comm)
            return f"{text}, {tensors[0].dtype}, x {tensors[0].array.shape}, bias={tensors[2] is not None}", 0, tensors

        group, (tx, tw, tb), _ = enter("column_parallel_linear", comm, check_all)
        dtype = tx.dtype
        wide = product.on(group, widen(tx.array, dtype), widen(tw.array, dtype))
        z = narrow(wide if tb is None else wide + widen(tb.array, dtype), dtype)
    saved = Linear(tx, tw, tb, group, sequence_parallel, counts, z.shape, activation)
    if activation == "none":
        return dlpack.lend(z, dtype, tx), saved
    saved.z = z
    y = narrow(activate.on(group, widen(z, dtype), activation), dtype)
    saved.shape = y.shape
    return dlpack.lend(y, dtype, tx), saved


def _column_dz(saved: Linear, dy: Any) -> Array:
    """The gradient of z, in the dtype of x."""
    given = _enter_backward("column_parallel_linear", saved, dy)
    if saved.z is None:
        return given
    dz = activate_backward.on(saved.comm, widen(saved.z, saved.dtype), widen(given, saved.dtype), saved.activation)
    return narrow(dz, saved.dtype)


def _column_backward(saved: Linear, dy: Any) -> Gradients:
    dz, options = _column_dz(saved, dy), _options(saved)
    if not saved.sequence_parallel:
        return _local_dx(saved, dz), *_local_dw(saved, dz)
    dw = start(all_gather_weight_gradient, saved.x.array, dz, **options)  # one travels while the other multiplies
    dx = start(matmul_reduce_scatter, dz, saved.w.array.T, counts=saved.counts, **options)
    db = _sum_rows(dz, saved.dtype, saved.bias)
    return _lent(arrived(dx), saved.x), _lent(arrived(dw), saved.w), db


def _column_backward_input(saved: Linear, dy: Any) -> tuple[Gradients, Any]:
    dz = _column_dz(saved, dy)
    if not saved.sequence_parallel:
        return (_local_dx(saved, dz),), (saved, dz)
    dx = call(matmul_reduce_scatter, dz, saved.w.array.T, counts=saved.counts, **_options(saved))
    return (_lent(dx, saved.x),), (saved, dz)


def _column_backward_weight(rest: tuple[Linear, Array]) -> Gradients:
    saved, dz = rest
    if not saved.sequence_parallel:
        return _local_dw(saved, dz)
    dw = call(all_gather_weight_gradient, saved.x.array, dz, **_options(saved))
    return _lent(dw, saved.w), _sum_rows(dz, saved.dtype, saved.bias)


def _local_dx(saved: Linear, dz: Array) -> Any:
    return give(product.on(saved.comm, widen(dz, saved.dtype), widen(saved.w.array, saved.dtype).T), saved.x)


def _local_dw(saved: Linear, dz: Array) -> Gradients:
    x, d = (_rows(widen(a, saved.dtype)) for a in (saved.x.array, dz))
    return give(product.on(saved.comm, x.T, d), saved.w), _sum_rows(dz, saved.dtype, saved.bias)


def _row(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    comm: Any = None,
    sequence_parallel: bool = True,
    counts: Sequence[int] | None = None,
) -> tuple[Any, Linear]:
    """y = reduce_scatter(x @ w, counts) + bias

    x: (all rows, ..., k of this rank), Shard(-1). w: (k of this rank, n), Shard(0). bias: (n,), the same on all ranks,
    or None; its gradient is summed over the ranks. y: (rows of this rank, ..., n), Shard(0). `counts` is the number of
    rows that each rank keeps, by default as even as possible.

    With `sequence_parallel=False` y = all_reduce(x @ w) + bias has all rows, Replicate.
    Raises ShapeError, DtypeError or LayoutError on all ranks, or MismatchError if only other ranks refuse.
    """

    operation = matmul_reduce_scatter if sequence_parallel else matmul_all_reduce

    def check(comm: Communicator) -> tuple[str, tuple[Any, ...]]:
        tensors = _linear_tensors(x, w, bias)
        rows = len(tensors[0].array)
        if counts is not None and not sequence_parallel:
            raise LayoutError("counts= is for sequence_parallel=True: without it, every rank keeps all rows")
        kept = list(split(rows, comm.size)) if counts is None else check_counts(counts, rows, comm.size)
        return "of row_parallel_linear", (*tensors, kept)

    group, text, (tx, tw, tb, kept) = admit(operation, comm, check)
    options: dict[str, Any] = {"bias": None if tb is None else tb.array, "dtype": tx.dtype, "comm": group}
    if sequence_parallel:
        options["counts"] = kept
    y = arrived(begin(operation, text, tx.array, tw.array, **options))
    return dlpack.lend(y, tx.dtype, tx), Linear(tx, tw, tb, group, sequence_parallel, kept, y.shape)


def _row_dy(saved: Linear, dy: Any) -> Array:
    """The gradient of the rows of this rank."""
    given = _enter_backward("row_parallel_linear", saved, dy)
    if saved.sequence_parallel:
        return given
    scattered: Array = call(reduce_scatter, given, counts=saved.counts, **_options(saved))
    return scattered


def _row_backward(saved: Linear, dy: Any) -> Gradients:
    d, options = _row_dy(saved, dy), _options(saved)
    db = _start_shared_sum(saved, d)
    dx, dw = call(all_gather_matmul_weight_gradient, d, saved.w.array.T, saved.x.array, **options)
    return _lent(dx, saved.x), _lent(dw, saved.w), _shared_sum(saved, db)


def _row_backward_input(saved: Linear, dy: Any) -> tuple[Gradients, Any]:
    d = _row_dy(saved, dy)
    dx = call(all_gather_matmul, d, saved.w.array.T, **_options(saved))
    return (_lent(dx, saved.x),), (saved, d)


def _row_backward_weight(rest: tuple[Linear, Array]) -> Gradients:
    saved, d = rest
    db = _start_shared_sum(saved, d)
    dw = call(all_gather_weight_gradient, d, saved.x.array, **_options(saved))
    return _lent(np.ascontiguousarray(dw.T), saved.w), _shared_sum(saved, db)


def _start_shared_sum(saved: Linear, d: Array) -> Any:
    """The sum over all rows of all ranks, in flight: the gradient of a bias that all ranks hold."""
    if saved.bias is None:
        return None
    return start(all_reduce, _rows(widen(d, saved.dtype)).sum(0), dtype=accumulator(saved.dtype), comm=saved.comm)


def _shared_sum(saved: Linear, pending: Any) -> Any:
    return None if saved.bias is None else give(arrived(pending), saved.bias)


def _linear_tensors(x: Any, w: Any, bias: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    tx = borrow(x, "x")
    tw = borrow(w, "w", tx, 2)
    if tx.array.ndim < 2 or tx.array.shape[-1] != len(tw.array):
        raise ShapeError(f"x {tx.array.shape} @ w {tw.array.shape}: the last dimension of x must be the first of w")
    tb = None if bias is None else borrow(bias, "bias", tx, 1)
    if tb is not None and len(tb.array) != tw.array.shape[1]:
        raise ShapeError(f"bias has {len(tb.array)} features, but w has {tw.array.shape[1]}")
    return tx, tw, tb


def _enter_backward(name: str, saved: Any, dy: Any) -> Array:
    """dy as an array, once all ranks have begun this backward."""

    def check(comm: Communicator) -> tuple[str, int, Array]:
        return "", 0, borrow_gradient(dy, saved.dtype, saved.shape)

    array: Array = enter(f"the backward of {name}", saved.comm, check)[1]
    return array


def _options(saved: Any) -> dict[str, Any]:
    """The keywords of an operation of the backward."""
    return {"dtype": saved.dtype, "comm": saved.comm}


def _sum_rows(d: Array, dtype: str, bias: Tensor | None) -> Any:
    return None if bias is None else give(_rows(widen(d, dtype)).sum(0), bias)


def _rows(a: Array) -> Array:
    return a.reshape(prod(a.shape[:-1]), a.shape[-1])


def _lent(array: Array, like: Tensor) -> Any:
    """An array in the dtype of `like`, as a tensor of its framework."""
    return dlpack.lend(array, like.dtype, like)


column_parallel_linear = Differentiable(
    _column,
    _column_backward,
    tensors=("x", "w", "bias"),
    inputs=1,
    backward_input=_column_backward_input,
    backward_weight=_column_backward_weight,
    name="column_parallel_linear",
)
row_parallel_linear = Differentiable(
    _row,
    _row_backward,
    tensors=("x", "w", "bias"),
    inputs=1,
    backward_input=_row_backward_input,
    backward_weight=_row_backward_weight,
    name="row_parallel_linear",
)

# ----------------------------------------------------------------------------------------------------- attention


def heads_of(rank: int, size: int, heads: int, kv_heads: int) -> tuple[range, range]:
    """(the query heads of a rank, the key/value heads that they read)

    Query heads are dealt out as evenly as possible. A key/value head is on every rank that has one of its query heads.
    Raises LayoutError if `heads` is not a multiple of `kv_heads`.
    """
    check_heads(heads, kv_heads)
    first = offsets(split(heads, size))
    mine, group = range(first[rank], first[rank + 1]), heads // kv_heads
    return mine, range(mine[0] // group, mine[-1] // group + 1) if mine else range(0)


@dataclass
class Heads:
    """What the backward of attention needs: q, k, v and o have the dtype of x."""

    x: Tensor
    weights: tuple[Tensor, ...]
    comm: Communicator
    counts: Sequence[int]
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    rule: Rule
    reads: list[int]
    q: Array
    k: Array
    v: Array
    o: Array
    lse: Array
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return self.x.dtype


def _attention(
    x: Any,
    wq: Any,
    wk: Any,
    wv: Any,
    wo: Any,
    *,
    heads: int,
    kv_heads: int,
    comm: Any = None,
    causal: bool = False,
    scale: float | None = None,
    cu_seqlens: Any = None,
    query_split: bool = True,
) -> tuple[Any, Heads]:
    """q, k, v = all_gather(x) @ wq, wk, wv; y = reduce_scatter(softmax(scale * q @ k.T) @ v @ wo)

    x: (rows of this rank, ..., n), the tokens in order, Shard(0); dimensions between are a batch. wq: (n, heads of this
    rank * d), wk and wv: (n, key/value heads of this rank * d), wo: (heads of this rank * d, n). `heads_of` says which
    heads a rank has. y: (rows of this rank, ..., n), Shard(0).

    `scale` is d ** -0.5 by default. `cu_seqlens`: where packed sequences begin, and the end. With `query_split` scores,
    softmax, values and output projection are computed for the queries of one rank after the other, those of this rank
    last. A result leaves for its rank while the next one is computed (CommFuse, arXiv 2604.24013). The gradients of a
    key/value head that several ranks hold are summed over them.
    Raises LayoutError, ShapeError or DtypeError on all ranks, or MismatchError if only other ranks refuse.
    """

    def check(comm: Communicator) -> tuple[str, int, tuple[Tensor, tuple[Tensor, ...], int, Any]]:
        tx = borrow(x, "x")
        weights = tuple(borrow(w, name, tx, 2) for w, name in ((wq, "wq"), (wk, "wk"), (wv, "wv"), (wo, "wo")))
        mine, keys = heads_of(comm.rank, comm.size, heads, kv_heads)
        d = weights[0].array.shape[1] // max(len(mine), 1)
        if tx.array.ndim < 2:
            raise ShapeError(f"x has the shape {tx.array.shape}: it must be (rows, ..., features)")
        n, k, out = tx.array.shape[-1], len(keys) * d, weights[3].array.shape[1]
        wanted = [(n, len(mine) * d), (n, k), (n, k), (len(mine) * d, out)]
        for tensor, shape, name in zip(weights, wanted, ("wq", "wk", "wv", "wo"), strict=True):
            if tensor.array.shape != shape:
                raise ShapeError(
                    f"{name} has the shape {tensor.array.shape}, but rank {comm.rank} has {len(mine)} of {heads} query "
                    f"heads and {len(keys)} of {kv_heads} key/value heads: with heads of {d} numbers it must be {shape}"
                )
        documents = check_documents(cu_seqlens, None)
        text = f"{tx.dtype}, x (rows, {tx.array.shape[1:]}), n={out}, {heads=}, {kv_heads=}, {causal=}, {scale=}, "
        text += f"{query_split=}, cu_seqlens={documents}"
        text += f", {d} numbers a head" if heads >= comm.size else ""
        return text, len(tx.array), (tx, weights, d, documents)

    group, (tx, weights, d, documents), counts = enter("attention", comm, check)
    if heads < group.size:  # a rank without heads does not know how long they are
        d = max(enter("attention: the length of a head", group, lambda _: ("", d, None))[2])
    if documents is not None:
        check_documents(documents, sum(counts))
    rank, size, dtype = group.rank, group.size, tx.dtype
    mine, keys = heads_of(rank, size, heads, kv_heads)
    total, between, batch = sum(counts), tx.array.shape[1:-1], prod(tx.array.shape[1:-1])
    arrays = [w.array for w in weights]
    _, projected = call(all_gather_matmul_many, tx.array, arrays[:3], dtype=dtype, comm=group)
    q, k, v = (a.reshape(total, batch * len(have), d) for a, have in zip(projected, (mine, keys, keys), strict=True))
    reads = [b * len(keys) + h // (heads // kv_heads) - keys.start for b in range(batch) for h in mine]
    rule, at = Rule(causal, scale, documents), np.arange(total)
    wide_k, wide_v = widen(k, dtype), widen(v, dtype)
    o, lse = np.empty_like(q), np.empty(q.shape[:2], accumulator(dtype))

    def attend_to(begin: int, end: int) -> Array:
        """The results of the heads of this rank for these queries: (queries, ..., heads of this rank * d)."""
        rows = slice(begin, end)
        part, lse[rows] = attend.on(group, widen(q[rows], dtype), wide_k, wide_v, reads, at[rows], at, rule)
        o[rows] = narrow(part, dtype)
        return o[rows].reshape(end - begin, *between, len(mine) * d)

    if query_split:
        wo_wide, first = widen(arrays[3], dtype), offsets(counts)
        arrive: list[Any] = []
        for distance in range(1, size + 1):  # the queries of the next rank first, those of this rank last
            owner, source = (rank + distance) % size, (rank - distance) % size
            term = product.on(group, widen(attend_to(first[owner], first[owner + 1]), dtype), wo_wide)
            if owner != rank:
                there, here = owner if counts[owner] else None, source if counts[rank] else None
                arrive.append(transfer(term, there, here, accumulator(dtype), group))
        for pending in arrive:
            other = arrived(pending)
            if counts[rank]:
                add.on(group, term, other)
        y = narrow(term, dtype)
    else:
        y = call(matmul_reduce_scatter, attend_to(0, total), arrays[3], counts=counts, dtype=dtype, comm=group)
    shape = y.shape
    saved = Heads(
        tx, weights, group, counts, heads, kv_heads, d, batch, rule, reads, q, k, v, o, lse, shape
    )  # fmt: skip
    return _lent(y, tx), saved


def _attention_inner(saved: Heads, do: Array) -> Array:
    """The gradient of the projections, one beside the other, where `do` is that of the heads' results."""
    dtype, total = saved.dtype, len(saved.q)
    q, k, v, o = (widen(a, dtype) for a in (saved.q, saved.k, saved.v, saved.o))
    at = np.arange(total)
    gradients = attend_backward.on(
        saved.comm, q, k, v, o, saved.lse, widen(do.reshape(o.shape), dtype), saved.reads, at, at, saved.rule
    )
    between = saved.x.array.shape[1:-1]
    widths = [w.array.shape[1] for w in saved.weights[:3]]
    flat = [g.reshape(total, *between, width) for g, width in zip(gradients, widths, strict=True)]
    return narrow(np.concatenate(flat, -1), dtype)


def _heads_result(saved: Heads) -> Array:
    """o as (all rows, ..., heads of this rank * d)."""
    return saved.o.reshape(len(saved.o), *saved.x.array.shape[1:-1], saved.weights[0].array.shape[1])


def _attention_backward(saved: Heads, dy: Any) -> Gradients:
    d = _enter_backward("attention", saved, dy)
    options = _options(saved)
    do, dwo = call(all_gather_matmul_weight_gradient, d, saved.weights[3].array.T, _heads_result(saved), **options)
    inner = _attention_inner(saved, do)
    dw = start(all_gather_weight_gradient, saved.x.array, inner, **options)  # both travel at once
    dx = start(matmul_reduce_scatter, inner, _projections(saved).T, counts=saved.counts, **options)
    dws = _weight_gradients(saved, arrived(dw))
    return _lent(arrived(dx), saved.x), *dws, _lent(dwo, saved.weights[3])


def _attention_backward_input(saved: Heads, dy: Any) -> tuple[Gradients, Any]:
    d = _enter_backward("attention", saved, dy)
    options = _options(saved)
    inner = _attention_inner(saved, call(all_gather_matmul, d, saved.weights[3].array.T, **options))
    dx = call(matmul_reduce_scatter, inner, _projections(saved).T, counts=saved.counts, **options)
    return (_lent(dx, saved.x),), (saved, d, inner)


def _attention_backward_weight(rest: tuple[Heads, Array, Array]) -> Gradients:
    saved, d, inner = rest
    options = _options(saved)
    dwo = start(all_gather_weight_gradient, d, _heads_result(saved), **options)
    dw = call(all_gather_weight_gradient, saved.x.array, inner, **options)
    dws = _weight_gradients(saved, dw)
    return *dws, _lent(np.ascontiguousarray(arrived(dwo).T), saved.weights[3])


def _projections(saved: Heads) -> Array:
    return np.concatenate([w.array for w in saved.weights[:3]], 1)


def _weight_gradients(saved: Heads, dw: Array) -> Gradients:
    """The gradients of wq, wk and wv, which `dw` has side by side. Shared heads are summed over their holders."""
    size, d, dtype = saved.comm.size, saved.head_dim, saved.dtype
    ends = list(accumulate(w.array.shape[1] for w in saved.weights[:3]))
    dwq, dwk, dwv = np.split(dw, ends[:2], 1)
    held = [heads_of(rank, size, saved.heads, saved.kv_heads)[1] for rank in range(size)]
    shared = [head for head in range(saved.kv_heads) if sum(head in keys for keys in held) > 1]
    if shared:
        keys, n = held[saved.comm.rank], len(dw)
        terms = np.zeros((2, len(shared), n, d), accumulator(dtype))
        ours = [
            (i, slice((head - keys.start) * d, (head - keys.start + 1) * d))
            for i, head in enumerate(shared)
            if head in keys
        ]
        for i, columns in ours:
            terms[0, i], terms[1, i] = widen(dwk[:, columns], dtype), widen(dwv[:, columns], dtype)
        sums = call(all_reduce, terms, dtype=accumulator(dtype), comm=saved.comm)
        dwk, dwv = dwk.copy(), dwv.copy()
        for i, columns in ours:
            dwk[:, columns], dwv[:, columns] = narrow(sums[0, i], dtype), narrow(sums[1, i], dtype)
    gradients = zip((dwq, dwk, dwv), saved.weights[:3], strict=True)
    return tuple(_lent(np.ascontiguousarray(g), w) for g, w in gradients)


attention = Differentiable(
    _attention,
    _attention_backward,
    tensors=("x", "wq", "wk", "wv", "wo"),
    inputs=1,
    backward_input=_attention_backward_input,
    backward_weight=_attention_backward_weight,
    name="attention",
)

# ---------------------------------------------------------------------------------------------------- vocabulary


@dataclass
class Embedding:
    """What the backward of an embedding needs."""

    table: Tensor
    local: Array  # of each token of this rank's part of the vocabulary: its row
    ours: Array  # which tokens those are
    rows: int
    comm: Communicator
    sequence_parallel: bool
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return self.table.dtype


def _embedding(
    tokens: Any,
    table: Any,
    *,
    comm: Any = None,
    sequence_parallel: bool = True,
    counts: Sequence[int] | None = None,
) -> tuple[Any, Embedding]:
    """y = reduce_scatter(all rows of the table [tokens], counts)

    tokens: (all rows, ...), integers, the same on all ranks. table: (rows of this rank, n): each rank has a part of the
    vocabulary, in the order of the ranks, of any size. y: (rows of this rank, ..., n), Shard(0). `counts` is the number
    of rows that each rank keeps, by default as even as possible. With `sequence_parallel=False` y has all rows.

    Only the table has a gradient. Raises LayoutError for tokens that are not in the vocabulary.
    """

    def check(comm: Communicator) -> tuple[str, int, tuple[Array, Tensor, list[int]]]:
        numbers, tt = borrow_integers(tokens, "tokens"), borrow(table, "table", None, 2)
        if not numbers.ndim:
            raise ShapeError("tokens has no dimension: it must be (rows, ...)")
        if counts is not None and not sequence_parallel:
            raise LayoutError("counts= is for sequence_parallel=True: without it, every rank keeps all rows")
        rows = len(numbers)
        kept = list(split(rows, comm.size)) if counts is None else check_counts(counts, rows, comm.size)
        text = f"{tt.dtype}, tokens {numbers.shape}, n={tt.array.shape[1]}, rows {kept}, {sequence_parallel=}"
        return text, len(tt.array), (numbers, tt, kept)

    group, (numbers, tt, kept), parts = enter("vocab_parallel_embedding", comm, check)
    _check_vocabulary("token", numbers, sum(parts), group)
    local = numbers.astype(np.int64) - sum(parts[: group.rank])
    ours = (local >= 0) & (local < len(tt.array))
    y = np.zeros((*numbers.shape, tt.array.shape[1]), tt.array.dtype)
    y[ours] = tt.array[local[ours]]
    if sequence_parallel:
        y = call(reduce_scatter, y, counts=kept, dtype=tt.dtype, comm=group)
    else:
        y = call(all_reduce, y, dtype=tt.dtype, comm=group)
    return _lent(y, tt), Embedding(tt, local[ours], ours, len(numbers), group, sequence_parallel, y.shape)


def _embedding_backward(saved: Embedding, dy: Any) -> Gradients:
    given = _enter_backward("vocab_parallel_embedding", saved, dy)
    full = call(all_gather if saved.sequence_parallel else all_reduce, given, **_options(saved))
    gradient = np.zeros(saved.table.array.shape, accumulator(saved.dtype))
    np.add.at(gradient, saved.local, widen(full[saved.ours], saved.dtype))
    return (give(gradient, saved.table),)


def _check_vocabulary(what: str, numbers: Array, total: int, comm: Communicator) -> None:
    """Raise LayoutError for a token that is not in the vocabulary. The other ranks raise too."""
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < total:
        wrong = int(numbers.min() if numbers.min() < 0 else numbers.max())
        error = LayoutError(f"{what} {wrong} is not in the vocabulary, which has {total} entries on all ranks together")
        all_reduce.refuse(error, comm)


@dataclass
class CrossEntropy:
    """What the backward of the cross-entropy needs: the probabilities of this rank's part of the vocabulary."""

    logits: Tensor
    probabilities: Array
    ours: Array
    local: Array
    smoothing: float
    vocabulary: int
    comm: Communicator
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return accumulator(self.logits.dtype)


def _cross_entropy(
    logits: Any, targets: Any, *, comm: Any = None, label_smoothing: float = 0.0
) -> tuple[Any, CrossEntropy]:
    """losses = -log(softmax(all logits of a row))[target], for each row

    logits: (all rows, ..., vocabulary of this rank), Shard(-1). targets: (all rows, ...), integers, the same on all
    ranks. losses: (all rows, ...), Replicate; float32 for half types. `label_smoothing` is as in torch.

    Gradients are those of the sum of the losses of all ranks. A loss that all ranks compute alike counts once per rank:
    divide it by `comm.size`. Raises LayoutError for targets that are not in the vocabulary.
    """

    def check(comm: Communicator) -> tuple[str, int, tuple[Tensor, Array]]:
        tl, numbers = borrow(logits, "logits"), borrow_integers(targets, "targets")
        if tl.array.ndim < 2 or tl.array.shape[:-1] != numbers.shape:
            raise ShapeError(
                f"logits {tl.array.shape} need targets of the shape {tl.array.shape[:-1]}, not {numbers.shape}"
            )
        if not 0 <= label_smoothing <= 1:
            raise LayoutError(f"label_smoothing={label_smoothing} must be from 0 to 1")
        return f"{tl.dtype}, {numbers.shape}, {label_smoothing=}", tl.array.shape[-1], (tl, numbers)

    group, (tl, numbers), parts = enter("vocab_parallel_cross_entropy", comm, check)
    vocabulary, dtype = sum(parts), accumulator(tl.dtype)
    _check_vocabulary("target", numbers, vocabulary, group)
    z = _rows(widen(tl.array, tl.dtype))
    top = call(all_gather, z.max(1, initial=-np.inf)[None], dtype=dtype, comm=group).max(0)
    z = z - top[:, None]
    e = np.exp(z)
    local = numbers.reshape(-1).astype(np.int64) - sum(parts[: group.rank])
    ours = np.flatnonzero((local >= 0) & (local < z.shape[1]))
    terms = np.zeros((3, len(z)), dtype)
    terms[0], terms[1, ours] = e.sum(1), z[ours, local[ours]]
    if label_smoothing:
        terms[2] = z.sum(1)
    total, chosen, sums = call(all_reduce, terms, dtype=dtype, comm=group)
    losses = np.log(total) - (1 - label_smoothing) * chosen - label_smoothing / max(vocabulary, 1) * sums
    saved = CrossEntropy(
        tl, e / total[:, None], ours, local[ours], label_smoothing, vocabulary, group, numbers.shape
    )  # fmt: skip
    return dlpack.lend(losses.astype(dtype, copy=False).reshape(numbers.shape), dtype, tl), saved


def _cross_entropy_backward(saved: CrossEntropy, dlosses: Any) -> Gradients:
    given = _enter_backward("vocab_parallel_cross_entropy", saved, dlosses)
    summed = call(all_reduce, given, **_options(saved)).reshape(-1, 1)
    d = saved.probabilities - saved.probabilities.dtype.type(saved.smoothing / max(saved.vocabulary, 1))
    d[saved.ours, saved.local] -= 1 - saved.smoothing
    return (give((d * summed).reshape(saved.logits.array.shape), saved.logits),)


vocab_parallel_embedding = Differentiable(
    _embedding, _embedding_backward, tensors=("table",), inputs=0, name="vocab_parallel_embedding"
)
vocab_parallel_cross_entropy = Differentiable(
    _cross_entropy, _cross_entropy_backward, tensors=("logits",), inputs=1, name="vocab_parallel_cross_entropy"
)
