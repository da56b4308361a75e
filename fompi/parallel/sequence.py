"""Sequences that are spread over the ranks: attention by all-to-all (Ulysses), round a ring, and both together.

    sharding = Sharding(length=4096, ring=comm.size)
    q, k, v = (sharding.shard(t, comm.rank) for t in (q, k, v))       # (tokens of this rank, heads, head_dim)
    o = ring_attention(q, k, v, sharding, comm=comm, causal=True)

| function | what travels | what it hides behind |
|---|---|---|
| `ulysses_attention` | all tokens of some heads: before, and back | the attention of the slice of queries before |
| `ring_attention` | keys and values, from rank to rank | the attention over the keys and values that are here |
| `usp_attention` | both: Ulysses on one axis of a mesh, the ring on the other | |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fompi.backends.numbers import widen
from fompi.base.errors import LayoutError, ShapeError
from fompi.base.layout import accumulator
from fompi.engine.communicator import Communicator
from fompi.parallel.arrays import Array, Kept, borrow, enter_axes, give, lent, zeros
from fompi.parallel.attention import Rule, check_heads
from fompi.parallel.differentiable import Differentiable, Gradients
from fompi.parallel.heads import Deal, Returns, ToHeads, return_all
from fompi.parallel.local import LocalAttention, check_kernel
from fompi.parallel.ring import AttentionRing
from fompi.parallel.sharding import LAYOUTS, Sharding, check_ranks, check_sharding, check_tokens, in_few_words
from fompi.parallel.shares import dealt
from fompi.parallel.ulysses import Tokens, UlyssesSlice, one_after_another

__all__ = ["LAYOUTS", "Sharding", "ring_attention", "ulysses_attention", "usp_attention"]

# ------------------------------------------------------------------------------------------ what all three share


Check = tuple[str, int, Kept]


def _check(
    tensors: Sequence[Any],
    sharding: Any,
    rank: int,
    size: int,
    causal: bool,
    scale: float | None,
    attention: Any,
    shares: Any = None,
) -> Check:
    """The tensors of this rank, checked, and a text that must be the same on all ranks. `size` ranks share heads."""
    q, k, v = tensors
    tq = borrow(q, "q", None, 3)
    borrowed = tq, borrow(k, "k", tq, 3), borrow(v, "v", tq, 3)
    for name, tensor in zip("qkv", borrowed, strict=True):
        check_tokens(name, tensor, sharding, rank)
    check_kernel(attention)
    (_, heads, d), (_, kv_heads, dk), (_, v_heads, e) = (tensor.array.shape for tensor in borrowed)
    check_heads(heads, kv_heads)
    if (kv_heads, d) != (v_heads, dk):
        raise ShapeError(
            f"q, k, v {[tensor.array.shape for tensor in borrowed]}: they must be (tokens, heads, d), "
            "(tokens, key/value heads, d), (tokens, key/value heads, e)"
        )
    text = f"{in_few_words(sharding)}, {tq.dtype}, {heads} and {kv_heads} heads, d={d}, e={e}, {causal=}, {scale=}"
    dealt_heads = None if shares is None else dealt(shares, "heads", heads, size)
    text += "" if dealt_heads is None else f", shares={[*dealt_heads]}"
    local = LocalAttention(Rule(bool(causal), scale, sharding.cu_seqlens), tq.dtype, tq, attention)
    return text, 0, Kept(tq, (len(tq.array), heads, e), tensors=borrowed, local=local, heads=dealt_heads)


def _enter(name: str, comm: Any, tensors: Sequence[Any], sharding: Sharding, *how: Any) -> Kept:
    """What a strategy on one communicator keeps, once all ranks have begun it."""

    def check(comm: Communicator) -> Check:
        check_ranks(sharding, comm.size)
        return _check(tensors, sharding, comm.rank, comm.size, *how)

    comms, saved = enter_axes([(name, comm)], check)
    saved.comms = comms
    return saved


def _enter_backward(name: str, saved: Kept, do: Any) -> Array:
    """The gradient of the result as an array, once all ranks have begun this backward."""
    axes = [(f"the backward of {name}", comm) for comm in saved.comms]
    return enter_axes(axes, lambda _: ("", 0, saved.gradient(do)))[1]


def _reads(heads: int, kv_heads: int) -> list[int]:
    return [head // (heads // kv_heads) for head in range(heads)]


def _give(gradients: Sequence[Array], saved: Kept) -> Gradients:
    return tuple(give(gradient, tensor) for gradient, tensor in zip(gradients, saved.tensors, strict=True))


# ----------------------------------------------------------------------------------------------------------- ring


def _ring_attention(
    q: Any,
    k: Any,
    v: Any,
    sharding: Sharding,
    *,
    comm: Any = None,
    causal: bool = False,
    scale: float | None = None,
    attention: Any = None,
) -> tuple[Any, Kept]:
    """o = softmax(scale * q @ all keys.T) @ all values

    q: (tokens of this rank, heads, d). k: (tokens of this rank, key/value heads, d). v: (tokens of this rank, key/value
    heads, e). o: (tokens of this rank, heads, e). `sharding` says which tokens those are, for as many ranks as `comm`
    has. With `causal` a token sees the tokens up to itself. Packed documents of the sharding do not see each other.
    `scale` is d ** -0.5 by default.

    `attention`: the kernel of a rank, (q, k, v, mask) -> (o, lse) (`fompi.parallel.local`). By default it is that of
    torch for tensors of torch, else NumPy's functions.

    Keys and values go round the ranks; results are merged in float32, or float64 for such tensors. With a wire,
    keys and values are rounded alike at each step, their gradients once at each step.
    Raises LayoutError, ShapeError or DtypeError on all ranks, or MismatchError if only other ranks refuse.
    """
    saved = _enter("ring_attention", comm, (q, k, v), sharding, causal, scale, attention)
    (group,) = saved.comms
    q, k, v = (tensor.array for tensor in saved.tensors)
    at = [sharding.indices(rank) for rank in range(group.size)]
    saved.ring = AttentionRing(saved.local, group, at, _reads(q.shape[1], k.shape[1]))
    o = saved.ring.run(q, k, v)
    return lent(o.copy(), saved.x), saved  # the backward needs o as it is


def _ring_backward(saved: Kept, do: Any) -> Gradients:
    array = _enter_backward("ring_attention", saved, do)
    return _give(saved.ring.backward(array), saved)


# -------------------------------------------------------------------------------------------------------- Ulysses


def _ulysses_attention(
    q: Any,
    k: Any,
    v: Any,
    sharding: Sharding,
    *,
    comm: Any = None,
    causal: bool = False,
    scale: float | None = None,
    attention: Any = None,
    shares: Any = None,
) -> tuple[Any, Kept]:
    """o = softmax(scale * q @ all keys.T) @ all values

    The arguments are those of `ring_attention`. An all-to-all gives each rank all tokens of some heads, as even as
    possible. The attention begins with the tokens that are there. The results of a rank's queries leave as soon as they
    have seen all keys, those of this rank last.
    If messages are long, the heads of a rank are cut into slices, one after the other (`heads.Deal.slices`).
    A key/value head is on every rank that has one of its query heads. `shares`: how many query heads each rank computes
    (`fompi.parallel.shares`), without these as many as the others; how many tokens it has is said by the sharding.
    Raises LayoutError, ShapeError or DtypeError on all ranks, or MismatchError if only other ranks refuse.
    """
    saved = _enter("ulysses_attention", comm, (q, k, v), sharding, causal, scale, attention, shares)
    (group,) = saved.comms
    arrays = [tensor.array for tensor in saved.tensors]
    (_, heads, d), (_, kv_heads, e) = arrays[0].shape, arrays[2].shape
    deal = Deal(heads, kv_heads, group, shares=saved.heads)
    nbytes = max(sharding.rows) * (d + (d + e) * kv_heads // heads) * arrays[0].itemsize
    tokens, result = Tokens.of(sharding, group.rank), zeros(group, saved.shape, accumulator(saved.dtype), arrays[0])
    saved.slices = [UlyssesSlice(part, tokens, saved.local) for part in deal.slices(nbytes)]
    for returns in one_after_another(
        saved.slices,
        lambda part: part.fetch(*arrays),
        lambda part, arriving, then: part.forward(arriving, result, then),
    ):
        returns.add()
    return give(result, saved.x), saved


def _ulysses_backward(saved: Kept, do: Any) -> Gradients:
    array = _enter_backward("ulysses_attention", saved, do)
    group, (tq, tk, tv) = saved.comms[0], (tensor.array for tensor in saved.tensors)
    all_q = zeros(group, tq.shape, accumulator(saved.dtype), tq)
    all_kv = zeros(group, (*tk.shape[:2], tk.shape[2] + tv.shape[2]), accumulator(saved.dtype), tq)
    for keys, queries in one_after_another(
        saved.slices,
        lambda part: part.fetch_gradient(array),
        lambda part, arriving, then: part.backward(arriving, (all_kv, all_q), then),
    ):
        keys.add()
        queries.add()
    return _give((all_q, all_kv[..., : tk.shape[2]], all_kv[..., tk.shape[2] :]), saved)


# ----------------------------------------------------------------------------------------------------------- both


def _usp_attention(
    q: Any,
    k: Any,
    v: Any,
    sharding: Sharding,
    *,
    ring: Any = None,
    ulysses: Any = None,
    causal: bool = False,
    scale: float | None = None,
    attention: Any = None,
    shares: Any = None,
) -> tuple[Any, Kept]:
    """o = softmax(scale * q @ all keys.T) @ all values

    The tensors and `attention` are those of `ring_attention`. `ring` and `ulysses` are the axes of a mesh:
    Mesh(ring=..., ulysses=...). The ranks of one place in the ring exchange tokens for heads, and each head goes round
    the ring. `shares` are those of `ulysses_attention`, of the ranks of one place in the ring.
    Raises LayoutError, ShapeError or DtypeError on all ranks, or MismatchError if only other ranks refuse.
    """

    def check(_: Communicator) -> Check:
        check_sharding(sharding)
        around, across = Communicator.of(ring), Communicator.of(ulysses)
        if (around.size, across.size) != (sharding.ring, sharding.ulysses):
            raise LayoutError(
                f"the sharding has ring={sharding.ring} and ulysses={sharding.ulysses}, but the axes of the mesh have "
                f"{around.size} and {across.size} ranks"
            )
        rank = around.rank * across.size + across.rank
        return _check((q, k, v), sharding, rank, across.size, causal, scale, attention, shares)

    comms, saved = enter_axes([("usp_attention, ulysses=", ulysses), ("usp_attention, ring=", ring)], check)
    saved.comms = across, around = comms
    dtype, (q, k, v) = saved.dtype, (tensor.array for tensor in saved.tensors)
    deal = Deal(q.shape[1], k.shape[1], across, shares=saved.heads)
    rows = [len(sharding.indices(around.rank * across.size + rank)) for rank in range(across.size)]
    queries, keys = deal.queries, deal.keys
    full_q, full_k, full_v = ToHeads([(q, queries), (k, keys), (v, keys)], rows, dtype, across).whole()
    at = [sharding.ring_indices(rank) for rank in range(around.size)]
    saved.ring = AttentionRing(saved.local, around, at, deal.reads)
    o = saved.ring.run(full_q, full_k, full_v)
    result = zeros(across, saved.shape, accumulator(dtype), o)
    return_all(widen(o, dtype), Returns(rows, queries, result, dtype, across))
    saved.deal, saved.rows = deal, rows
    return give(result, saved.x), saved


def _usp_backward(saved: Kept, do: Any) -> Gradients:
    array = _enter_backward("usp_attention", saved, do)
    deal, rows, dtype, across, (tq, tk, tv) = saved.deal, saved.rows, saved.dtype, saved.comms[0], saved.tensors
    wide = accumulator(dtype)
    queries, keys = deal.queries, deal.keys
    (do,) = ToHeads([(array, queries)], rows, dtype, across).whole()
    full_dq, dk, dv = saved.ring.backward(do)
    dq = zeros(across, tq.array.shape, wide, full_dq)
    dkv = zeros(across, (*tk.array.shape[:2], tk.array.shape[2] + tv.array.shape[2]), wide, dk)
    return_all(full_dq, Returns(rows, queries, dq, dtype, across))
    sent = wide if deal.overlaps else dtype
    return_all(np.concatenate([dk, dv], 2), Returns(rows, keys, dkv, sent, across))
    return _give((dq, dkv[..., : tk.array.shape[2]], dkv[..., tk.array.shape[2] :]), saved)


ring_attention = Differentiable(_ring_attention, _ring_backward, tensors=("q", "k", "v"), inputs=3)
ulysses_attention = Differentiable(_ulysses_attention, _ulysses_backward, tensors=("q", "k", "v"), inputs=3)
usp_attention = Differentiable(_usp_attention, _usp_backward, tensors=("q", "k", "v"), inputs=3)
