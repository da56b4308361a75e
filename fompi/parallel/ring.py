"""Keys and values go round the ranks: the attention of the queries of one rank over the tokens of all.

    step 0: own block | step 1: that of rank - 1 | step 2: that of rank - 2 | ...     the next one travels meanwhile

Results are merged by their log-sum-exp, in the dtype of sums (ring attention, arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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

    def _shift(self, dtype: str, *arrays: Array) -> list[Any]:
        """The arrays travel to the next rank, each in a message, and those of the rank before come."""
        rank, size = self.comm.rank, self.comm.size
        return [transfer(a, (rank + 1) % size, (rank - 1) % size, dtype, self.comm, self.wire) for a in arrays]

    def _circle(self, k: Array, v: Array) -> Iterator[tuple[int, Array, Array]]:
        """(source, keys, values) of each rank in turn, this one first. The next ones travel while these are used."""
        comm = self.comm
        for step in range(comm.size):
            travels = self._shift(self.dtype, k, v) if step + 1 < comm.size else None
            yield (comm.rank - step) % comm.size, k, v
            if travels is not None:
                k, v = map(arrived, travels)

    def run(self, q: Array, k: Array, v: Array, at: list[Array], reads: list[int]) -> tuple[Array, RingStep]:
        """(o, what the backward keeps): the results over the blocks of all ranks, merged in the dtype of sums."""
        dtype, here = self.dtype, at[self.comm.rank]
        mine, o, lse = widen(q, dtype), None, None
        for source, key, value in self._circle(k, v):
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
        for source, key, value in self._circle(step.k, step.v):
            k, v = widen(key, dtype), widen(value, dtype)
            more, *grown = attend_backward(q, k, v, o, step.lse, do, step.reads, here, at[source], self.rule)
            dq += more
            total = grown
            if travels is not None:
                total = [arrived(travel) for travel in travels]
                for whole, part in zip(total, grown, strict=True):
                    whole += part
            travels = self._shift(accumulator(dtype), *total) if self.comm.size > 1 else None
        dk, dv = total if travels is None else map(arrived, travels)
        return dq, dk, dv
