"""Attention of some queries over some keys, tile by tile, with what it takes to merge it with other keys.

    s[i, h, j] = scale * q[i, h] @ k[j, g]     where query i may see key j, else -infinity; g: the key head that h reads
    o[i, h]    = sum(softmax(s[i, h])[j] * v[j, g] for all j)
    lse[i, h]  = log(sum(exp(s[i, h, j]) for all j))

The result of two sets of keys is `merge` of both results. Queries and keys have positions in the whole sequence, so any
part of it may be on any rank. Arrays are float32 or float64, and sums have that dtype. Nothing communicates here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import Any

import numpy as np

from fompi.backends.numbers import constant, contiguous, filled
from fompi.base.errors import LayoutError
from fompi.base.layout import integer, number

Array = np.ndarray[Any, Any]

QUERIES, KEYS = 128, 256
"""The most queries and keys of a tile."""


def check_documents(cu_seqlens: Any, length: int | None) -> tuple[int, ...] | None:
    """`cu_seqlens` as integers: where each packed document begins, and the end. Raises LayoutError if it is wrong.

    `length` is the number of tokens, None if it is not known yet.
    """
    if cu_seqlens is None:
        return None
    try:
        ends = tuple(index(n) for n in cu_seqlens)
    except TypeError as error:
        raise LayoutError(f"cu_seqlens={cu_seqlens!r}: {error}") from None
    falls = any(b < a for a, b in pairwise(ends))
    if len(ends) < 2 or ends[0] != 0 or falls or length not in (None, ends[-1]):
        end = "" if length is None else f", and end with {length}, the number of tokens"
        raise LayoutError(f"cu_seqlens={list(ends)} must begin with 0 and never fall{end}")
    return ends


def check_heads(heads: int, kv_heads: int) -> None:
    """Raise LayoutError if the query heads cannot be dealt out to the key/value heads."""
    if integer(heads) is None or integer(kv_heads) is None:
        raise LayoutError(f"heads={heads!r} and kv_heads={kv_heads!r} must be integers")
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise LayoutError(f"{heads} query heads cannot be dealt out to {kv_heads} key/value heads: choose a multiple")


@dataclass(frozen=True)
class Rule:
    """Which query sees which key, by their positions in the whole sequence, and how scores are scaled."""

    causal: bool = False
    scale: float | None = None
    cu_seqlens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.scale is not None:
            scale = number(self.scale)
            if scale is None:
                raise LayoutError(f"scale={self.scale!r} must be None or a finite number")
            object.__setattr__(self, "scale", scale)

    def scale_of(self, head_dim: int) -> float:
        return max(head_dim, 1) ** -0.5 if self.scale is None else self.scale

    def documents(self, at: Array) -> Array:
        """The number of the document of each position."""
        if self.cu_seqlens is None:
            return np.zeros(len(at), np.intp)
        return np.searchsorted(np.asarray(self.cu_seqlens), at, side="right")

    def mask(self, q_at: Array, k_at: Array) -> Array:
        """Which of these queries sees which of these keys."""
        mask: Array = self.documents(q_at)[:, None] == self.documents(k_at)[None]
        if self.causal:
            mask &= q_at[:, None] >= k_at[None]
        return mask

    def tiles(self, q_at: Array, k_at: Array) -> Iterator[tuple[slice, list[tuple[slice, Array | None]]]]:
        """Runs of queries, each with the runs of keys that it sees. With a mask if it does not see all of them."""
        k_runs = list(runs_of(k_at, KEYS))
        for queries in runs_of(q_at, QUERIES):
            seen = []
            for keys in k_runs:
                mask = self.mask(q_at[queries], k_at[keys])
                if mask.any():
                    seen.append((keys, None if mask.all() else mask))
            yield queries, seen


def runs_of(at: Array, most: int) -> Iterator[slice]:
    """Runs of at most `most` tokens. They are cut where positions jump, unless they would be short: such runs are often
    seen by all queries of a tile, or by none.
    """
    jumps, begin = np.flatnonzero(np.diff(at) != 1) + 1, 0
    while begin < len(at):
        end = min(begin + most, len(at))
        inside = jumps[(jumps >= begin + most // 4) & (jumps > begin) & (jumps < end)]
        end = int(inside[0]) if len(inside) else end
        yield slice(begin, end)
        begin = end


def attend(
    q: Array, k: Array, v: Array, reads: Sequence[int], q_at: Array, k_at: Array, rule: Rule
) -> tuple[Array, Array]:
    """(o, lse) of q: (queries, heads, d) over k: (keys, kv heads, d) and v: (keys, kv heads, e).

    `reads[h]` is the key head that query head h reads. A query that sees no key has o = 0 and lse = -infinity.
    """
    o = filled((*q.shape[:2], v.shape[2]), q.dtype, 0, q)
    lse = filled(q.shape[:2], q.dtype, -np.inf, q)
    if not q.shape[1]:
        return o, lse
    scale = rule.scale_of(q.shape[2])
    for queries, seen in rule.tiles(q_at, k_at):
        mine = _heads_first(q[queries]) * q.dtype.type(scale)
        top = filled(mine.shape[:2], q.dtype, -np.inf, q)
        total, sums = np.zeros_like(top), filled((*top.shape, v.shape[2]), q.dtype, 0, q)
        for keys, mask in seen:
            s = _masked(mine @ _heads_first(_read(k[keys], reads)).swapaxes(1, 2), mask)
            new = np.maximum(top, s.max(2))
            base = _finite(new)
            e, shrunk = np.exp(s - base[..., None]), np.exp(top - base)
            total = total * shrunk + e.sum(2)
            sums = sums * shrunk[..., None] + e @ _heads_first(_read(v[keys], reads))
            top = new
        o[queries] = (sums / np.where(total == 0, 1, total)[..., None]).swapaxes(0, 1)
        with np.errstate(divide="ignore"):
            lse[queries] = (_finite(top) + np.log(total)).T
    return o, lse


def merge(o: Array, lse: Array, more: Array, more_lse: Array) -> None:
    """(o, lse) becomes the attention over its keys and those of (more, more_lse)."""
    new = np.logaddexp(lse, more_lse)
    base = _finite(new)
    o *= np.exp(lse - base)[..., None]
    o += more * np.exp(more_lse - base)[..., None]
    lse[...] = new


Three = tuple[Array, Array, Array]


def attend_backward(qkv: Three, results: Three, reads: Sequence[int], q_at: Array, k_at: Array, rule: Rule) -> Three:
    """(dq, dk, dv): what these keys add to the gradients. `results` are o, lse and do, over all keys."""
    (q, k, v), (o, lse, do) = qkv, results
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    if not q.shape[1]:
        return dq, dk, dv
    scale = q.dtype.type(rule.scale_of(q.shape[2]))
    delta = (do * o).sum(2)
    for queries, seen in rule.tiles(q_at, k_at):
        mine, dmine = _heads_first(q[queries]), _heads_first(do[queries])
        base, minus = _finite(lse[queries]).T[..., None], delta[queries].T[..., None]
        sums = np.zeros_like(mine)
        for keys, mask in seen:
            key, value = _heads_first(_read(k[keys], reads)), _heads_first(_read(v[keys], reads))
            p = np.exp(_masked(mine @ key.swapaxes(1, 2) * scale, mask) - base)
            ds = p * (dmine @ value.swapaxes(1, 2) - minus) * scale
            sums += ds @ key
            dkey, dvalue = ds.swapaxes(1, 2) @ mine, p.swapaxes(1, 2) @ dmine
            for head, read in enumerate(reads):
                dk[keys, read] += dkey[head]
                dv[keys, read] += dvalue[head]
        dq[queries] = sums.swapaxes(0, 1)
    return dq, dk, dv


def _heads_first(x: Array) -> Array:
    """(tokens, heads, d) as (heads, tokens, d), contiguous: products of strided arrays are slow."""
    return contiguous(x.swapaxes(0, 1))


def _read(x: Array, reads: Sequence[int]) -> Array:
    """x[:, reads]"""
    if list(reads) == [*range(x.shape[1])]:
        return x
    return x[:, constant(np.asarray(reads, np.intp), x)]


def _masked(s: Array, mask: Array | None) -> Array:
    return s if mask is None else np.where(constant(mask, s), s, s.dtype.type(-np.inf))


def _finite(x: Array) -> Array:
    """x, with 0 in place of -infinity."""
    return np.where(x == -np.inf, x.dtype.type(0), x)
