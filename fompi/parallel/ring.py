"""Keys and values go round the ranks: the attention of the queries of one rank over the tokens of all.

    step 0: own block | step 1: that of rank - 1 | step 2: that of rank - 2 | ...     the next one travels meanwhile

Results are merged by their log-sum-exp, in the dtype of sums (ring attention, arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from fompi.backends.half import narrow, widen
from fompi.base.layout import accumulator
from fompi.engine.communicator import Communicator
from fompi.parallel.arrays import Array, arrived, transfer
from fompi.parallel.attention import Rule, attend, attend_backward, merge


@dataclass
class RingStep:
    """What the ring keeps. q, k, v and o have the storage of q's dtype."""

    q: Array
    k: Array
    v: Array
    o: Array
    lse: Array
    at: list[Array]  # the positions of the tokens of each rank
    reads: list[int]


@dataclass(frozen=True)
class AttentionRing:
    """The ranks round which keys and values of `dtype` go, with messages of the wire."""

    rule: Rule
    dtype: str
    comm: Communicator
    wire: str | None = None

    def _shift(self, array: Array, dtype: str) -> Any:
        """The array travels to the next rank, and that of the rank before comes."""
        rank, size = self.comm.rank, self.comm.size
        return transfer(array, (rank + 1) % size, (rank - 1) % size, dtype, self.comm, self.wire)

    def _circle(self, k: Array, v: Array, at: list[Array]) -> Iterator[tuple[int, Array, Array]]:
        """(source, keys, values) of each rank in turn, this one first. The next block travels while one is used.

        A block has all keys, and then all values, so that both are contiguous where they arrive.
        """
        comm, row_k, row_v = self.comm, k.shape[1:], v.shape[1:]
        block = np.concatenate([k.reshape(-1), v.reshape(-1)]) if comm.size > 1 else None
        for step in range(comm.size):
            source = (comm.rank - step) % comm.size
            travels = self._shift(block, self.dtype) if block is not None and step + 1 < comm.size else None
            if step:
                assert block is not None
                tokens, keys = len(at[source]), len(at[source]) * prod(row_k)
                k, v = block[:keys].reshape(tokens, *row_k), block[keys:].reshape(tokens, *row_v)
            yield source, k, v
            if travels is not None:
                block = arrived(travels)

    def run(self, q: Array, k: Array, v: Array, at: list[Array], reads: list[int]) -> tuple[Array, RingStep]:
        """(o, what the backward keeps): the results over the blocks of all ranks, merged in the dtype of sums."""
        dtype, here = self.dtype, at[self.comm.rank]
        mine, o, lse = widen(q, dtype), None, None
        for source, key, value in self._circle(k, v, at):
            part = attend(mine, widen(key, dtype), widen(value, dtype), reads, here, at[source], self.rule)
            if o is None or lse is None:
                o, lse = part
            else:
                merge(o, lse, *part)
        assert o is not None and lse is not None
        o = narrow(o, dtype)
        return o, RingStep(q, k, v, o, lse, at, reads)

    def backward(self, step: RingStep, do: Array) -> tuple[Array, Array, Array]:
        """(dq, dk, dv) in the dtype of sums. The gradients of a block travel with it, and each rank adds its own."""
        dtype, at = self.dtype, step.at
        q, o, do = (widen(a, dtype) for a in (step.q, step.o, do))
        dq, here, travels = np.zeros_like(q), at[self.comm.rank], None
        total, keys = np.empty(0, q.dtype), 0
        for source, key, value in self._circle(step.k, step.v, at):
            k, v = widen(key, dtype), widen(value, dtype)
            more, dk, dv = attend_backward(q, k, v, o, step.lse, do, step.reads, here, at[source], self.rule)
            dq += more
            keys = dk.size
            if travels is None:
                total = np.concatenate([dk.reshape(-1), dv.reshape(-1)])
            else:
                total = arrived(travels)
                total[:keys] += dk.reshape(-1)
                total[keys:] += dv.reshape(-1)
            travels = self._shift(total, accumulator(dtype)) if self.comm.size > 1 else None
        if travels is not None:
            total, keys = arrived(travels), step.k.size
        return dq, total[:keys].reshape(step.k.shape), total[keys:].reshape(step.v.shape)
