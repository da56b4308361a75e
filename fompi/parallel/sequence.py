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
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fompi.backends.half import narrow, widen
from fompi.base.errors import LayoutError, ShapeError
from fompi.base.layout import accumulator, offsets
from fompi.base.wires import wire_of
from fompi.engine.communicator import Communicator
from fompi.parallel.arrays import (
    Array,
    arrived,
    arrived_from,
    borrow,
    borrow_gradient,
    enter,
    give,
    in_words,
)
from fompi.parallel.attention import Rule, attend, attend_backward, check_heads, merge
from fompi.parallel.differentiable import Differentiable, Gradients
from fompi.parallel.heads import Deal, Returns, ToHeads, query_heads, return_all
from fompi.parallel.ring import AttentionRing
from fompi.parallel.section import has_ended
from fompi.parallel.sharding import LAYOUTS, Sharding, check_ranks, check_sharding, check_tokens, in_few_words
from fompi.tensors import dlpack
from fompi.tensors.dlpack import Tensor

__all__ = ["LAYOUTS", "Sharding", "ring_attention", "ulysses_attention", "usp_attention"]

# ------------------------------------------------------------------------------------------ what all three share


@dataclass
class Saved:
    """What the backward needs: the tensors, and what each step keeps, in the dtype of q."""

    tensors: tuple[Tensor, Tensor, Tensor]
    rule: Rule
    shape: tuple[int, ...]
    comms: tuple[Communicator, ...]
    wire: str | None = None
    steps: Any = None

    @property
    def dtype(self) -> str:
        return self.tensors[0].dtype


def _check(
    q: Any, k: Any, v: Any, sharding: Any, rank: int, causal: bool, scale: float | None, wire: str | None
) -> tuple[str, int, Saved]:
    """The tensors of this rank, checked, and a text that must be the same on all ranks."""
    tq, tk = borrow(q, "q", None, 3), borrow(k, "k", None, 3)
    tensors = tq, tk, borrow(v, "v", None, 3)
    for name, tensor in zip("qkv", tensors, strict=True):
        if tensor.dtype != tq.dtype:
            borrow(tensor.owner, name, tq)
        check_tokens(name, tensor, sharding, rank)
    (_, heads, d), (_, kv_heads, dk), (_, v_heads, e) = (tensor.array.shape for tensor in tensors)
    check_heads(heads, kv_heads)
    if (kv_heads, d) != (v_heads, dk):
        raise ShapeError(
            f"q {tq.array.shape}, k {tk.array.shape}, v {tensors[2].array.shape}: they must be (tokens, heads, d), "
            "(tokens, key/value heads, d), (tokens, key/value heads, e)"
        )
    text = f"{in_few_words(sharding)}, {tq.dtype}, {heads} and {kv_heads} heads, d={d}, e={e}, {causal=}, {scale=}"
    wire_of(wire, tq.dtype)
    text += in_words(wire)
    saved = Saved(tensors, Rule(bool(causal), scale, sharding.cu_seqlens), (len(tq.array), heads, e), (), wire)
    return text, 0, saved


def _enter_backward(name: str, saved: Saved, do: Any) -> Array:
    """The gradient of the result as an array, once all ranks have begun this backward."""
    refusal: Exception | None = None
    array: Array = np.empty(0)

    def check(comm: Communicator) -> tuple[str, int, Array]:
        if refusal is not None:
            raise refusal
        return "", 0, borrow_gradient(do, saved.dtype, saved.shape)

    for comm in saved.comms:
        try:
            array = enter(f"the backward of {name}", comm, check)[1]
        except Exception as error:
            refusal = refusal or error
            if has_ended(error):  # all ranks hear of it by themselves
                break
    if refusal is not None:
        raise refusal
    return array


def _reads(heads: int, kv_heads: int) -> list[int]:
    return [head // (heads // kv_heads) for head in range(heads)]


def _give(gradients: Sequence[Array], saved: Saved) -> Gradients:
    return tuple(give(gradient, tensor) for gradient, tensor in zip(gradients, saved.tensors, strict=True))


# ----------------------------------------------------------------------------------------------------------- ring


def _ring(
    q: Any,
    k: Any,
    v: Any,
    sharding: Sharding,
    *,
    comm: Any = None,
    causal: bool = False,
    scale: float | None = None,
    wire: str | None = None,
) -> tuple[Any, Saved]:
    """o = softmax(scale * q @ all keys.T) @ all values

    q: (tokens of this rank, heads, d). k: (tokens of this rank, key/value heads, d). v: (tokens of this rank, key/value
    heads, e). o: (tokens of this rank, heads, e). `sharding` says which tokens those are, for as many ranks as `comm`
    has. With `causal` a token sees the tokens up to itself. Packed documents of the sharding do not see each other.
    `scale` is d ** -0.5 by default.

    Keys and values go round the ranks; results are merged in float32, or float64 for such tensors. `wire` is the form
    in which messages carry elements, forward and backward (`fompi.base.wires`): keys and values are rounded alike at
    each step, their gradients once at each step.
    Raises LayoutError, ShapeError or DtypeError on all ranks, or MismatchError if only other ranks refuse.
    """

    def check(comm: Communicator) -> tuple[str, int, Saved]:
        check_ranks(sharding, comm.size)
        return _check(q, k, v, sharding, comm.rank, causal, scale, wire)

    group, saved, _ = enter("ring_attention", comm, check)
    saved.comms = (group,)
    q, k, v = (tensor.array for tensor in saved.tensors)
    at = [sharding.indices(rank) for rank in range(group.size)]
    reads = _reads(q.shape[1], k.shape[1])
    o, saved.steps = AttentionRing(saved.rule, saved.dtype, group, wire).run(q, k, v, at, reads)
    return dlpack.lend(o.copy(), saved.dtype, saved.tensors[0]), saved  # the backward needs o as it is


def _ring_backward(saved: Saved, do: Any) -> Gradients:
    array = _enter_backward("ring_attention", saved, do)
    ring = AttentionRing(saved.rule, saved.dtype, saved.comms[0], saved.wire)
    return _give(ring.backward(saved.steps, array), saved)


# -------------------------------------------------------------------------------------------------------- Ulysses


@dataclass
class UlyssesStep:
    """What Ulysses keeps: the heads of this rank, in the order of `sources`. Arrays have the storage of q's dtype."""

    deal: Deal
    rows: list[int]
    sources: list[int]  # this rank, and then the others in the order in which their tokens arrive
    runs: list[slice]  # where the tokens of each of `sources` are
    at: Array  # the positions of the tokens
    q: Array
    k: Array
    v: Array
    o: Array
    lse: Array


def _ulysses(
    q: Any,
    k: Any,
    v: Any,
    sharding: Sharding,
    *,
    comm: Any = None,
    causal: bool = False,
    scale: float | None = None,
    wire: str | None = None,
) -> tuple[Any, Saved]:
    """o = softmax(scale * q @ all keys.T) @ all values

    q: (tokens of this rank, heads, d). k: (tokens of this rank, key/value heads, d). v: (tokens of this rank, key/value
    heads, e). o: (tokens of this rank, heads, e). `sharding` says which tokens those are, for as many ranks as `comm`
    has. With `causal` a token sees the tokens up to itself. Packed documents of the sharding do not see each other.
    `scale` is d ** -0.5 by default.

    An all-to-all gives each rank all tokens of some heads, as even as possible. The attention begins with the tokens
    that are there. The results of a rank's queries leave as soon as they have seen all keys, those of this rank last.
    A key/value head is on every rank that has one of its query heads. `wire` is the form in which messages carry
    elements, forward and backward (`fompi.base.wires`).
    Raises LayoutError, ShapeError or DtypeError on all ranks, or MismatchError if only other ranks refuse.
    """

    def check(comm: Communicator) -> tuple[str, int, Saved]:
        check_ranks(sharding, comm.size)
        return _check(q, k, v, sharding, comm.rank, causal, scale, wire)

    group, saved, _ = enter("ulysses_attention", comm, check)
    saved.comms = (group,)
    dtype, rank, (q, k, v) = saved.dtype, group.rank, (tensor.array for tensor in saved.tensors)
    deal, rows = Deal(q.shape[1], k.shape[1], group, wire), sharding.rows
    queries, keys, reads = deal.queries, deal.keys, deal.reads
    to_heads = ToHeads([(q, queries), (k, keys), (v, keys)], rows, dtype, group, wire)

    sources = [(rank - d) % group.size for d in range(group.size)]
    ends = offsets(rows[source] for source in sources)
    runs = [slice(a, b) for a, b in pairwise(ends)]
    heads, kv_heads = len(queries[rank]), len(keys[rank])
    at = np.concatenate([sharding.indices(source) for source in sources])
    full_q = np.empty((ends[-1], heads, q.shape[2]), q.dtype)
    full_k, full_v = (np.empty((ends[-1], kv_heads, x.shape[2]), q.dtype) for x in (k, v))
    o = np.empty((ends[-1], heads, v.shape[2]), accumulator(dtype))
    lse = np.empty(o.shape[:2], o.dtype)
    result = np.zeros(saved.shape, o.dtype)
    returns = Returns(rows, queries, result, dtype, group, wire)

    def partial(of: slice, over: slice) -> tuple[Array, Array]:
        q, k, v = (widen(x, dtype) for x in (full_q[of], full_k[over], full_v[over]))
        return attend(q, k, v, reads, at[of], at[over], saved.rule)

    def more(of: slice, over: slice) -> None:
        merge(o[of], lse[of], *partial(of, over))

    for number, (source, run) in enumerate(zip(sources, runs, strict=True)):
        full_q[run], full_k[run], full_v[run] = to_heads.of(source)
        o[run], lse[run] = partial(run, slice(0, run.stop))
        if 0 < number < len(sources) - 1:
            more(slice(0, run.start), run)
    last = runs[-1]
    for source, run in reversed([*zip(sources, runs, strict=True)]):  # the last source has seen all keys
        if run is not last:
            more(run, last)
        returns.send(source, o[run])
    to_heads.pending.wait()
    saved.steps = UlyssesStep(deal, rows, sources, runs, at, full_q, full_k, full_v, narrow(o, dtype), lse)
    returns.add()
    return give(result, saved.tensors[0]), saved


def _ulysses_backward(saved: Saved, do: Any) -> Gradients:
    """Keys of other ranks have their gradients first, and leave; then the queries of other ranks; the own ones last."""
    array = _enter_backward("ulysses_attention", saved, do)
    step, dtype, group, (tq, tk, _) = saved.steps, saved.dtype, saved.comms[0], saved.tensors
    deal, rows, wide, runs = step.deal, step.rows, accumulator(saved.dtype), step.runs
    pending = query_heads(array, deal, dtype)
    q, k, v, o = (widen(a, dtype) for a in (step.q, step.k, step.v, step.o))
    given = np.empty_like(o)
    width = k.shape[2]
    dq, dkv = np.zeros_like(q), np.zeros((*k.shape[:2], width + v.shape[2]), q.dtype)
    own = deal.queries[group.rank]
    given[runs[0]] = widen(array[:, own.start : own.stop], dtype)
    sent = wide if deal.shares else dtype  # what is summed later travels in the dtype of sums
    all_q = np.zeros(tq.array.shape, wide)
    all_kv = np.zeros((*tk.array.shape[:2], dkv.shape[2]), wide)
    queries = Returns(rows, deal.queries, all_q, dtype, group, saved.wire)
    keys = Returns(rows, deal.keys, all_kv, sent, group, saved.wire)

    def add(of: slice, over: slice) -> None:
        gradients = attend_backward(q[of], k[over], v[over], o[of], step.lse[of], given[of],
            deal.reads, step.at[of], step.at[over], saved.rule,
        )  # fmt: skip
        for into, gradient in zip((dq[of], dkv[over, :, :width], dkv[over, :, width:]), gradients, strict=True):
            into += gradient

    here, others = runs[0], slice(runs[0].stop, len(q))
    last = len(runs) - 1
    for number, (source, run) in enumerate(zip(step.sources, runs, strict=True)):
        if number:
            given[run] = widen(arrived_from(pending, source), dtype)
        if number < last:
            add(run, others)
    for source, run in zip(step.sources[1:], runs[1:], strict=True):
        add(runs[last], run)
        keys.send(source, dkv[run])
    for source, run in zip(step.sources[1:], runs[1:], strict=True):
        add(run, here)
        queries.send(source, dq[run])
    add(here, here)
    keys.send(group.rank, dkv[here])
    queries.send(group.rank, dq[here])
    pending.wait()
    keys.add()
    queries.add()
    return _give((all_q, all_kv[..., :width], all_kv[..., width:]), saved)


# ----------------------------------------------------------------------------------------------------------- both


def _usp(
    q: Any,
    k: Any,
    v: Any,
    sharding: Sharding,
    *,
    ring: Any = None,
    ulysses: Any = None,
    causal: bool = False,
    scale: float | None = None,
    wire: str | None = None,
) -> tuple[Any, Saved]:
    """o = softmax(scale * q @ all keys.T) @ all values

    The tensors are those of `ring_attention`. `ring` and `ulysses` are the axes of a mesh: Mesh(ring=..., ulysses=...).
    The ranks of one place in the ring exchange tokens for heads, and each head goes round the ring. `wire` is as there.
    Raises LayoutError, ShapeError or DtypeError on all ranks, or MismatchError if only other ranks refuse.
    """
    refusal: Exception | None = None
    saved: Saved | None = None
    axes: list[Communicator] = []

    def check(comm: Communicator) -> tuple[str, int, Saved]:
        if refusal is not None:
            raise refusal
        check_sharding(sharding)
        around, across = Communicator.of(ring), Communicator.of(ulysses)
        if (around.size, across.size) != (sharding.ring, sharding.ulysses):
            raise LayoutError(
                f"the sharding has ring={sharding.ring} and ulysses={sharding.ulysses}, but the axes of the mesh have "
                f"{around.size} and {across.size} ranks"
            )
        return _check(q, k, v, sharding, around.rank * across.size + across.rank, causal, scale, wire)

    for name, axis in (("ulysses", ulysses), ("ring", ring)):
        try:  # a refusal of one rank reaches the ranks of its row, and by them all others
            group, saved, _ = enter(f"usp_attention, {name}=", axis, check)
            axes.append(group)
        except Exception as error:
            refusal = refusal or error
            if has_ended(error):  # all ranks hear of it by themselves
                break
    if refusal is not None or saved is None:
        raise refusal  # type: ignore[misc]
    saved.comms = across, around = (axes[0], axes[1])
    dtype, (q, k, v) = saved.dtype, (tensor.array for tensor in saved.tensors)
    deal = Deal(q.shape[1], k.shape[1], across, wire)
    rows = [len(sharding.indices(around.rank * across.size + rank)) for rank in range(across.size)]
    queries, keys = deal.queries, deal.keys
    to_heads = ToHeads([(q, queries), (k, keys), (v, keys)], rows, dtype, across, wire)
    parts = [to_heads.of(rank) for rank in range(across.size)]
    full_q, full_k, full_v = (np.concatenate(of_all) for of_all in zip(*parts, strict=True))
    to_heads.pending.wait()
    at = [sharding.ring_indices(rank) for rank in range(around.size)]
    o, step = AttentionRing(saved.rule, dtype, around, wire).run(full_q, full_k, full_v, at, deal.reads)
    result = np.zeros(saved.shape, accumulator(dtype))
    return_all(widen(o, dtype), Returns(rows, queries, result, dtype, across, wire))
    saved.steps = step, deal, rows
    return give(result, saved.tensors[0]), saved


def _usp_backward(saved: Saved, do: Any) -> Gradients:
    array = _enter_backward("usp_attention", saved, do)
    (step, deal, rows), dtype, (across, around), (tq, tk, tv) = saved.steps, saved.dtype, saved.comms, saved.tensors
    wide = accumulator(dtype)
    queries, keys = deal.queries, deal.keys
    do = arrived(query_heads(array, deal, dtype))
    full_dq, dk, dv = AttentionRing(saved.rule, dtype, around, saved.wire).backward(step, do)
    dq = np.zeros(tq.array.shape, wide)
    dkv = np.zeros((*tk.array.shape[:2], tk.array.shape[2] + tv.array.shape[2]), wide)
    return_all(full_dq, Returns(rows, queries, dq, dtype, across, saved.wire))
    sent = wide if deal.shares else dtype
    return_all(np.concatenate([dk, dv], 2), Returns(rows, keys, dkv, sent, across, saved.wire))
    return _give((dq, dkv[..., : tk.array.shape[2]], dkv[..., tk.array.shape[2] :]), saved)


ring_attention = Differentiable(_ring, _ring_backward, tensors=("q", "k", "v"), inputs=3, name="ring_attention")
ulysses_attention = Differentiable(
    _ulysses, _ulysses_backward, tensors=("q", "k", "v"), inputs=3, name="ulysses_attention"
)
usp_attention = Differentiable(_usp, _usp_backward, tensors=("q", "k", "v"), inputs=3, name="usp_attention")
