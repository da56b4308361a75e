"""Keys and values go round the ranks: the attention of the queries of one rank over the tokens of all.

    step 0: own block | step 1: that of rank - 1 | step 2: that of rank - 2 | ...     the next one travels meanwhile

Results are merged by their log-sum-exp, in the dtype of sums (ring attention, arXiv 2310.01889).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import numpy as np

from fompi.backends.numbers import filled, narrow
from fompi.base.layout import accumulator
from fompi.engine.communicator import Communicator
from fompi.parallel.arrays import Array, arrived, transfer
from fompi.parallel.attention import merge
from fompi.parallel.heads import parts_of
from fompi.parallel.local import LocalAttention


class AttentionRing:
    """The ranks round which keys and values go, in messages. `at`: the positions of the tokens of each rank.

    It keeps what its backward needs, with the storage of q's dtype.
    """

    def __init__(self, local: LocalAttention, comm: Communicator, at: list[Array], reads: list[int]):
        self.local, self.comm, self.at, self.reads, self.dtype = local, comm, at, reads, local.dtype

    def _shift(self, dtype: str, *arrays: Array) -> list[Any]:
        """The arrays travel to the next rank, each in a message, and those of the rank before come."""
        rank, size = self.comm.rank, self.comm.size
        return [transfer(a, (rank + 1) % size, (rank - 1) % size, dtype, self.comm) for a in arrays]

    def _circle(self, k: Array, v: Array) -> Iterator[tuple[int, Array, Array]]:
        """(source, keys, values) of each rank in turn, this one first. The next ones travel while these are used."""
        comm = self.comm
        for step in range(comm.size):
            travels = self._shift(self.dtype, k, v) if step + 1 < comm.size else None
            yield (comm.rank - step) % comm.size, k, v
            if travels is not None:
                k, v = map(arrived, travels)

    def run(self, q: Array, k: Array, v: Array) -> Array:
        """The results over the blocks of all ranks, merged in the dtype of sums."""
        self.q, self.k, self.v, at = q, k, v, self.at
        here = at[self.comm.rank]
        o, lse = None, None
        for source, key, value in self._circle(k, v):
            part = self.local.attend(q, key, value, self.reads, here, at[source])
            if o is None or lse is None:
                o, lse = part
            else:
                merge(o, lse, *part)
        assert o is not None and lse is not None
        self.o: Array = narrow(o, self.dtype)
        self.lse: Array = lse
        return self.o

    def backward(self, do: Array) -> tuple[Array, Array, Array]:
        """(dq, dk, dv) in the dtype of sums. The gradients of a block travel with it, and each rank adds its own.

        At the last step they travel home, behind nothing but each other: if they are long, slice by slice of the heads.
        """
        dtype, at, size = self.dtype, self.at, self.comm.size
        q, o, here, heads = self.q, self.o, at[self.comm.rank], self.k.shape[1]
        dq = filled(q.shape, accumulator(dtype), 0, q)
        parts = parts_of(heads, max(map(len, at)) * self.k.shape[2] * dq.itemsize * heads)
        travelling: list[list[Any]] = []  # of each part: the sums of the keys and of the values
        for number, (source, key, value) in enumerate(self._circle(self.k, self.v)):
            came, travelling = travelling, []
            sums: list[Array] = []
            for kv in parts if number == size - 1 else [slice(0, heads)]:
                mine = slice(bisect_left(self.reads, kv.start), bisect_left(self.reads, kv.stop))
                reads = [read - kv.start for read in self.reads[mine]]
                qkv, results = (q[:, mine], key[:, kv], value[:, kv]), (o[:, mine], self.lse[:, mine], do[:, mine])
                more, *grown = self.local.backward(qkv, results, reads, here, at[source])
                dq[:, mine] += more
                sums = sums or [arrived(each) for of_part in came for each in of_part]
                for part, whole in zip(grown, sums, strict=False):
                    part += whole[:, kv]
                travelling.append(self._shift(accumulator(dtype), *grown) if size > 1 else grown)
        home = [[arrived(each) for each in part] for part in travelling] if size > 1 else travelling
        dk, dv = (np.concatenate(of_parts, 1) for of_parts in zip(*home, strict=True))
        return dq, dk, dv
