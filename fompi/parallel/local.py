"""The attention of a rank over keys that it has: by NumPy's functions, by torch, or by a function of the user.

    def attention(q, k, v, mask):                   # a kernel of yours, for attention= of the strategies
        return o, lse

q: (queries, heads, d). k: (keys, key/value heads, d), v: (keys, key/value heads, e). Query head h reads the key head
h // (heads // key/value heads). They are tensors of the framework that the strategy was called with. `mask` is None if
every query sees every key, "causal" if there are as many queries as keys and query i sees the keys up to i, else
booleans (queries, keys). o = softmax(q @ k.T / sqrt(d)) @ v: (queries, heads, e), lse: (queries, heads), the log of the
sum of the exponentials. A query that sees no key has o = 0 and lse = -infinity.

The gradient is computed by NumPy's functions, unless the kernel has a method

    attention.backward(q, k, v, o, lse, do, mask) -> (dq, dk, dv)

where o, lse and do are those over all keys, of which these may be some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import Any

import numpy as np

from fompi.backends.numbers import constant, filled, narrow, place, widen
from fompi.base.doors import DOORS
from fompi.base.errors import ArgumentError, ShapeError, TensorError
from fompi.base.layout import accumulator
from fompi.parallel.arrays import Array, borrow_any, lent
from fompi.parallel.attention import Rule, Three, attend, attend_backward, merge
from fompi.tensors.dlpack import Tensor

Block = tuple[slice, slice, Any]
"""Some queries, some keys, and the mask of `attention=`."""


def check_kernel(attention: Any) -> None:
    """Raise ArgumentError if `attention=` is no function."""
    if attention is not None and not callable(attention):
        raise ArgumentError(f"attention={attention!r} must be a function (q, k, v, mask) -> (o, lse)")


def blocks(rule: Rule, q_at: Array, k_at: Array) -> Iterator[Block]:
    """All pairs of queries and keys that see each other, in few blocks. Positions are those of the host."""
    if not len(q_at) or not len(k_at):
        return
    if not rule.causal and rule.cu_seqlens is None:
        yield slice(0, len(q_at)), slice(0, len(k_at)), None
        return
    if _is_diagonal(rule, q_at, k_at):
        yield slice(0, len(q_at)), slice(0, len(k_at)), "causal"
        return
    k_runs = [*_runs(rule, k_at)]
    for queries in _runs(rule, q_at):
        whole = slice(0, 0)  # the keys behind each other that all of these queries see
        for keys in k_runs:
            mask = rule.mask(q_at[queries], k_at[keys])
            if mask.all():
                if whole.stop != keys.start:
                    yield from [(queries, whole, None)] if whole.stop > whole.start else []
                    whole = slice(keys.start, keys.start)
                whole = slice(whole.start, keys.stop)
            elif mask.any():
                is_causal = _is_diagonal(rule, q_at[queries], k_at[keys])
                yield queries, keys, "causal" if is_causal else mask
        if whole.stop > whole.start:
            yield queries, whole, None


def _is_diagonal(rule: Rule, q_at: Array, k_at: Array) -> bool:
    """True if query i sees just the keys up to i."""
    if not rule.causal or len(q_at) != len(k_at) or (rule.documents(q_at) != rule.documents(q_at[:1])).any():
        return False
    return bool((q_at == k_at).all() and (np.diff(q_at) > 0).all())


def _runs(rule: Rule, at: Array) -> Iterator[slice]:
    """Tokens that follow each other, and are of the same document."""
    cuts = (np.diff(at) != 1) | (np.diff(rule.documents(at)) != 0)
    return (slice(a, b) for a, b in pairwise([0, *(np.flatnonzero(cuts) + 1).tolist(), len(at)]))


@dataclass(frozen=True)
class LocalAttention:
    """The attention by `kernel`; None: that of the framework. q, k and v hold `dtype`, o and lse the dtype of sums."""

    rule: Rule
    dtype: str
    like: Tensor
    kernel: Callable[..., Any] | None = None

    def _kernel(self, q: Array, v: Array) -> Any:
        """The kernel to call. None: NumPy's functions."""
        if self.kernel is not None or self.like.framework != "torch" or self.like.host is not None:
            return self.kernel  # torch has no kernel for host tensors that FOMPI_DEVICE has put on a device
        return DOORS.attention_of_torch(self.dtype, place(q) is not None, q.shape[2] == v.shape[2])

    def attend(
        self, q: Array, k: Array, v: Array, reads: Sequence[int], q_at: Array, k_at: Array
    ) -> tuple[Array, Array]:
        """(o, lse), as `fompi.parallel.attention.attend`."""
        kernel = self._kernel(q, v)
        if kernel is None:
            q, k, v = (widen(a, self.dtype) for a in (q, k, v))
            return attend(q, k, v, reads, q_at, k_at, self.rule)
        wide = accumulator(self.dtype)
        o, lse = filled((*q.shape[:2], v.shape[2]), wide, 0, q), filled(q.shape[:2], wide, -np.inf, q)
        if not q.shape[1]:
            return o, lse
        q, k, v = self._scaled(q), *self._read(reads, k, v)
        for queries, keys, mask in blocks(self.rule, q_at, k_at):
            result = kernel(*map(self._lent, (q[queries], k[keys], v[keys])), self._mask(mask))
            if not isinstance(result, tuple) or len(result) != 2:
                raise TensorError(f"attention= must return (o, lse), not {type(result).__name__}")
            into = o[queries], lse[queries]
            merge(*into, *map(self._taken, ("o", "lse"), result, into))
        return o, lse

    def backward(self, qkv: Three, results: Three, reads: Sequence[int], q_at: Array, k_at: Array) -> Three:
        """(dq, dk, dv) in the dtype of sums, as `fompi.parallel.attention.attend_backward`."""
        (q, k, v), (o, lse, do) = qkv, results
        kernel = self._kernel(q, v)
        if kernel is None or not hasattr(kernel, "backward"):
            q, k, v, o, do = (widen(a, self.dtype) for a in (q, k, v, o, do))
            return attend_backward((q, k, v), (o, lse, do), reads, q_at, k_at, self.rule)
        wide = accumulator(self.dtype)
        dq, dk, dv = (filled(a.shape, wide, 0, a) for a in (q, k, v))
        if not q.shape[1]:
            return dq, dk, dv
        scaled, factor = self._scaled(q), self._factor(q)
        all_k, all_v = self._read(reads, k, v)
        for queries, keys, mask in blocks(self.rule, q_at, k_at):
            given = scaled[queries], all_k[keys], all_v[keys], o[queries]
            result = kernel.backward(
                *map(self._lent, given), lent(lse[queries], self.like, wide), self._lent(do[queries]), self._mask(mask)
            )
            forms = (dq[queries], all_k[keys], all_v[keys])
            more = [*map(self._taken, ("dq", "dk", "dv"), result, forms)]
            dq[queries] += more[0] if factor == 1 else more[0] * dq.dtype.type(factor)
            for into, part in ((dk, more[1]), (dv, more[2])):
                self._add_heads(into[keys], part, reads)
        return dq, dk, dv

    # -- what the kernel gets, and gives
    def _factor(self, q: Array) -> float:
        """The kernel divides scores by sqrt(d): what is left of the scale."""
        return 1.0 if self.rule.scale is None else self.rule.scale_of(q.shape[2]) * sqrt(max(q.shape[2], 1))

    def _scaled(self, q: Array) -> Array:
        factor = self._factor(q)
        if factor == 1:
            return q
        wide = widen(q, self.dtype)
        return narrow(wide * wide.dtype.type(factor), self.dtype)

    def _read(self, reads: Sequence[int], *arrays: Array) -> list[Array]:
        """The key heads as the kernel reads them: as they are, if query heads share them evenly, else one for each."""
        group = len(reads) // max(arrays[0].shape[1], 1)
        if group and [*reads] == [head for head in range(arrays[0].shape[1]) for _ in range(group)]:
            return [*arrays]
        index = constant(np.asarray(reads, np.intp), arrays[0])
        return [a[:, index] for a in arrays]

    def _add_heads(self, into: Array, part: Array, reads: Sequence[int]) -> None:
        if part.shape == into.shape:
            into += part
            return
        for head, read in enumerate(reads):
            into[:, read] += part[:, head]

    def _lent(self, a: Array) -> Any:
        return lent(a, self.like)

    def _mask(self, mask: Any) -> Any:
        if not isinstance(mask, np.ndarray):
            return mask
        array = constant(mask, self.like.array)
        return lent(array, self.like, "bool")

    def _taken(self, name: str, x: Any, form: Array) -> Array:
        """What the kernel has returned, in the dtype of sums."""
        tensor = borrow_any(x.detach() if hasattr(x, "detach") else x, f"{name} of attention=")
        if tensor.array.shape != form.shape:
            raise ShapeError(f"{name} of attention= has the shape {tensor.array.shape}: it must be {form.shape}")
        wide = widen(tensor.array, tensor.dtype)
        return wide.astype(accumulator(self.dtype), copy=False)
