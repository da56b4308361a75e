"""Tensor parallelism with sequence parallelism: linear layers, attention, and a vocabulary spread over the ranks.

    h = column_parallel_linear(x, w1, b1, activation="gelu", comm=tp)     # gathers the rows while it multiplies
    y = row_parallel_linear(h, w2, b2, comm=tp)                           # sends products while it multiplies

The features of weights are spread over the ranks, and the rows of x and y are too, unless `sequence_parallel=False`.
Gradients are those of the sum of the losses of all ranks. A parameter that several ranks hold (the bias of a
row-parallel layer, a shared key head) gets the sum over its holders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from fompi.backends.numbers import contiguous, narrow, wide_product, widen
from fompi.base.errors import ShapeError
from fompi.base.layout import accumulator, offsets
from fompi.engine.communicator import Communicator
from fompi.ops import operations as ops
from fompi.parallel.arrays import (
    Array,
    Kept,
    add,
    arrived,
    borrow,
    call,
    enter,
    enter_backward,
    lent,
    memory,
    start,
    start_sum,
    transfer,
    unrounded,
    zeros,
)
from fompi.parallel.attention import Rule, check_documents
from fompi.parallel.differentiable import Differentiable, Gradients
from fompi.parallel.heads import heads_of, held_heads
from fompi.parallel.linear import column_parallel_linear, row_parallel_linear
from fompi.parallel.local import LocalAttention, check_kernel
from fompi.parallel.norm import all_reduce_rmsnorm
from fompi.parallel.vocabulary import vocab_parallel_cross_entropy, vocab_parallel_embedding

__all__ = [
    "all_reduce_rmsnorm", "attention", "column_parallel_linear", "heads_of", "row_parallel_linear",
    "vocab_parallel_cross_entropy", "vocab_parallel_embedding",
]  # fmt: skip


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
    attention: Any = None,
    shares: Any = None,
) -> tuple[Any, Kept]:
    """q, k, v = all_gather(x) @ wq, wk, wv; y = reduce_scatter(softmax(scale * q @ k.T) @ v @ wo)

    x: (rows of this rank, ..., n), the tokens in order, Shard(0); dimensions between are a batch. wq: (n, heads of this
    rank * d), wk and wv: (n, key/value heads of this rank * d), wo: (heads of this rank * d, n). `heads_of` says which
    heads a rank has. y: (rows of this rank, ..., n), Shard(0).

    `scale` is d ** -0.5 by default. `cu_seqlens`: where packed sequences begin, and the end. With `query_split` scores,
    softmax, values and output projection are computed for the queries of one rank after the other, those of this rank
    last. A result leaves for its rank while the next one is computed (CommFuse, arXiv 2604.24013). The gradients of a
    key/value head that several ranks hold are summed over them. `attention`: the kernel of a rank, (q, k, v, mask) ->
    (o, lse) (`fompi.parallel.local`); dimensions of a batch are heads there. With a wire the sums over
    those who hold a head travel as they are. `shares`: how many heads each rank has (`fompi.parallel.shares`).
    Raises LayoutError, ShapeError or DtypeError on all ranks, or MismatchError if only other ranks refuse.
    """

    def check(comm: Communicator) -> tuple[str, int, Kept]:
        tx = borrow(x, "x")
        weights = tuple(borrow(w, name, tx, 2) for w, name in ((wq, "wq"), (wk, "wk"), (wv, "wv"), (wo, "wo")))
        held = held_heads(comm.size, heads, kv_heads, shares)
        mine, keys = held[comm.rank]
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
        check_kernel(attention)
        rule = Rule(causal, scale, check_documents(cu_seqlens, None))
        text = f"{tx.dtype}, x (rows, {tx.array.shape[1:]}), n={out}, {heads=}, {kv_heads=}, {causal=}, {scale=}, "
        text += f"{query_split=}, cu_seqlens={rule.cu_seqlens}"
        text += f", {d} numbers a head" if all(own for own, _ in held) else ""
        text += "" if shares is None else f", shares={[len(own) for own, _ in held]}"
        local = LocalAttention(rule, tx.dtype, tx, attention)
        saved = Kept(tx, weights=weights, kv_heads=kv_heads, head_dim=d, local=local, held=held)
        return text, len(tx.array), saved

    group, saved, counts = enter("attention", comm, check)
    if not all(own for own, _ in saved.held):  # a rank without heads does not know how long they are
        saved.head_dim = max(enter("attention: the length of a head", group, lambda _: ("", saved.head_dim, None))[2])
    tx, weights, local, d = saved.x, saved.weights, saved.local, saved.head_dim
    if local.rule.cu_seqlens is not None:
        check_documents(local.rule.cu_seqlens, sum(counts))
    dtype, (mine, keys) = tx.dtype, saved.held[group.rank]
    total, between, batch = sum(counts), tx.array.shape[1:-1], prod(tx.array.shape[1:-1])
    arrays = [w.array for w in weights]
    _, projected = call(ops.all_gather_matmul_many, tx.array, arrays[:3], dtype=dtype, comm=group)
    q, k, v = (a.reshape(total, batch * len(have), d) for a, have in zip(projected, (mine, keys, keys), strict=True))
    reads = [b * len(keys) + h // (heads // kv_heads) - keys.start for b in range(batch) for h in mine]
    at = np.arange(total)
    o, lse = np.empty_like(q), memory(group, q.shape[:2], accumulator(dtype), q)

    def attend_to(begin: int, end: int) -> Array:
        """The results of the heads of this rank for these queries: (queries, ..., heads of this rank * d)."""
        rows = slice(begin, end)
        part, lse[rows] = local.attend(q[rows], k, v, reads, at[rows], at)
        o[rows] = narrow(part, dtype)
        return o[rows].reshape(end - begin, *between, len(mine) * d)

    if query_split:
        y = _rows_of_owners(attend_to, arrays[3], counts, dtype, group)
    else:
        y = call(ops.matmul_reduce_scatter, attend_to(0, total), arrays[3], counts=counts, dtype=dtype, comm=group)
    saved.comm, saved.counts, saved.shape, saved.reads = group, counts, y.shape, reads
    saved.q, saved.k, saved.v, saved.o, saved.lse = q, k, v, o, lse
    return lent(y, tx), saved


def _rows_of_owners(
    attend_to: Callable[[int, int], Array], wo: Array, counts: Sequence[int], dtype: str, comm: Communicator
) -> Array:
    """reduce_scatter(attend_to(all queries) @ wo): for the queries of one rank after the other, those of this one last.

    A result leaves for its rank while the next one is computed.
    """
    rank, size, first = comm.rank, comm.size, offsets(counts)
    arrive: list[Any] = []
    for distance in range(1, size + 1):
        owner, source = (rank + distance) % size, (rank - distance) % size
        term = wide_product(attend_to(first[owner], first[owner + 1]), wo, dtype)
        if owner != rank:
            there, here = owner if counts[owner] else None, source if counts[rank] else None
            arrive.append(transfer(term, there, here, accumulator(dtype), comm))
    for pending in arrive:
        other = arrived(pending)
        if counts[rank]:
            add(term, other)
    return narrow(term, dtype)


def _attention_inner(saved: Kept, do: Array) -> Array:
    """The gradient of the projections, side by side, where `do` is that of the heads' results."""
    dtype, total = saved.dtype, len(saved.q)
    q, k, v, o, at = saved.q, saved.k, saved.v, saved.o, np.arange(total)
    results = o, saved.lse, do.reshape(o.shape)
    gradients = saved.local.backward((q, k, v), results, saved.reads, at, at)
    between = saved.x.array.shape[1:-1]
    widths = [w.array.shape[1] for w in saved.weights[:3]]
    flat = [g.reshape(total, *between, width) for g, width in zip(gradients, widths, strict=True)]
    return narrow(np.concatenate(flat, -1), dtype)


def _heads_result(saved: Kept) -> Array:
    """o as (all rows, ..., heads of this rank * d)."""
    return saved.o.reshape(len(saved.o), *saved.x.array.shape[1:-1], saved.weights[0].array.shape[1])


def _attention_backward(saved: Kept, dy: Any) -> Gradients:
    d = enter_backward("attention", saved, dy)
    options = saved.keywords
    do, dwo = call(ops.all_gather_matmul_weight_gradient, d, saved.weights[3].array.T, _heads_result(saved), **options)
    inner = _attention_inner(saved, do)
    dw = start(ops.all_gather_weight_gradient, saved.x.array, inner, **options)  # both travel at once
    dx = start(ops.matmul_reduce_scatter, inner, _projections(saved).T, counts=saved.counts, **options)
    dws = _weight_gradients(saved, arrived(dw))
    return lent(arrived(dx), saved.x), *dws, lent(dwo, saved.weights[3])


def _attention_backward_input(saved: Kept, dy: Any) -> tuple[Gradients, Any]:
    d = enter_backward("attention", saved, dy)
    options = saved.keywords
    inner = _attention_inner(saved, call(ops.all_gather_matmul, d, saved.weights[3].array.T, **options))
    dx = call(ops.matmul_reduce_scatter, inner, _projections(saved).T, counts=saved.counts, **options)
    return (lent(dx, saved.x),), (saved, d, inner)


def _attention_backward_weight(rest: tuple[Kept, Array, Array]) -> Gradients:
    saved, d, inner = rest
    options = saved.keywords
    dwo = start(ops.all_gather_weight_gradient, d, _heads_result(saved), **options)
    dw = call(ops.all_gather_weight_gradient, saved.x.array, inner, **options)
    dws = _weight_gradients(saved, dw)
    return *dws, lent(contiguous(arrived(dwo).T), saved.weights[3])


def _projections(saved: Kept) -> Array:
    return np.concatenate([w.array for w in saved.weights[:3]], 1)


def _weight_gradients(saved: Kept, dw: Array) -> Gradients:
    """The gradients of wq, wk and wv, which `dw` has side by side. Shared heads are summed over their holders."""
    d, dtype = saved.head_dim, saved.dtype
    ends = list(accumulate(w.array.shape[1] for w in saved.weights[:3]))
    dwq, dwk, dwv = np.split(dw, ends[:2], 1)
    held = [keys for _, keys in saved.held]
    shared = [head for head in range(saved.kv_heads) if sum(head in keys for keys in held) > 1]
    if shared:
        keys, n = held[saved.comm.rank], len(dw)
        terms = zeros(saved.comm, (2, len(shared), n, d), accumulator(dtype), dw)
        ours = [
            (i, slice((head - keys.start) * d, (head - keys.start + 1) * d))
            for i, head in enumerate(shared)
            if head in keys
        ]
        for i, columns in ours:
            terms[0, i], terms[1, i] = widen(dwk[:, columns], dtype), widen(dwv[:, columns], dtype)
        sums = arrived(start_sum(terms, accumulator(dtype), unrounded(saved.comm)))
        dwk, dwv = dwk.copy(), dwv.copy()
        for i, columns in ours:
            dwk[:, columns], dwv[:, columns] = narrow(sums[0, i], dtype), narrow(sums[1, i], dtype)
    gradients = zip((dwq, dwk, dwv), saved.weights[:3], strict=True)
    return tuple(lent(contiguous(g), w) for g, w in gradients)


attention = Differentiable(
    _attention,
    _attention_backward,
    tensors=("x", "wq", "wk", "wv", "wo"),
    inputs=1,
    backward_input=_attention_backward_input,
    backward_weight=_attention_backward_weight,
)
