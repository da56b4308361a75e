"""Tokens for heads, and back: each rank gets all tokens of some heads, and their results return to their tokens.

It is the all-to-all of Ulysses (arXiv 2309.14509), rank by rank: what has arrived is used, what is done leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import prod
from typing import Any

import numpy as np

from fompi.backends.numbers import narrow, widen
from fompi.base.layout import offsets, split
from fompi.engine.communicator import Communicator
from fompi.ops.operations import all_to_all
from fompi.parallel.arrays import Array, arrived, arrived_from, memory, start, transfer
from fompi.parallel.attention import check_heads
from fompi.parallel.shares import dealt

LEAST_NBYTES = 1 << 18
"""A message to one rank is not cut into smaller ones than this."""

MOST_SLICES = 4


def parts_of(heads: int, nbytes: int) -> list[slice]:
    """The parts of `heads` heads, of `nbytes` in all: each part travels in a message of its own."""
    ends = offsets(split(heads, max(1, min(heads, MOST_SLICES, nbytes // LEAST_NBYTES))))
    return [slice(a, b) for a, b in pairwise(ends)]


def held_heads(size: int, heads: int, kv_heads: int, shares: Any = None) -> list[tuple[range, range]]:
    """For each rank (its query heads, the key/value heads that they read)

    Query heads are dealt out by `shares`, without these as evenly as possible. A key/value head is on every rank that
    has one of its query heads. Raises LayoutError if `heads` is not a multiple of `kv_heads`, and for wrong shares.
    """
    check_heads(heads, kv_heads)
    runs, group = [range(a, b) for a, b in pairwise(offsets(dealt(shares, "heads", heads, size)))], heads // kv_heads
    return [(run, range(run[0] // group, run[-1] // group + 1) if run else range(0)) for run in runs]


def heads_of(rank: int, size: int, heads: int, kv_heads: int, shares: Any = None) -> tuple[range, range]:
    """`held_heads` of a rank."""
    return held_heads(size, heads, kv_heads, shares)[rank]


@dataclass(frozen=True)
class Deal:
    """Which rank has which heads: of all of them, or of slice number `part` of `parts`."""

    heads: int
    kv_heads: int
    comm: Communicator
    part: int = 0
    parts: int = 1
    shares: Any = None

    def slices(self, nbytes: int) -> list[Deal]:
        """All heads, in slices of whole key/value heads of each rank. `nbytes`: a query head of one message."""
        parts = len(parts_of(max(map(len, self.keys)), nbytes * max(map(len, self.queries))))
        return [replace(self, part=part, parts=parts) for part in range(parts)]

    @property
    def queries(self) -> list[range]:
        """The query heads of each rank."""
        group, found = self.heads // self.kv_heads, []
        for (mine, _), keys in zip(self._whole, self.keys, strict=True):
            first, end = max(mine.start, keys.start * group), min(mine.stop, keys.stop * group)
            found.append(range(first, max(first, end)))
        return found

    @property
    def keys(self) -> list[range]:
        """The key/value heads that the query heads of each rank read."""
        found = []
        for _, keys in self._whole:
            ends = offsets(split(len(keys), self.parts))
            found.append(keys[ends[self.part] : ends[self.part + 1]])
        return found

    @property
    def _whole(self) -> list[tuple[range, range]]:
        return held_heads(self.comm.size, self.heads, self.kv_heads, self.shares)

    @property
    def reads(self) -> list[int]:
        """Which of the key/value heads of this rank each of its query heads reads."""
        group, keys = self.heads // self.kv_heads, self.keys[self.comm.rank]
        return [head // group - keys.start for head in self.queries[self.comm.rank]]

    @property
    def overlaps(self) -> bool:
        """True if several ranks have the same key/value head. Their gradients are then summed."""
        return sum(map(len, self.keys)) > len({head for keys in self.keys for head in keys})


class ToHeads:
    """Each rank gets its heads of arrays (tokens of this rank, all heads, width), in one message from each rank.

    Each array comes with the heads of all ranks, which may have some in common. `rows`: the tokens of each rank. The
    next rank gets its heads first.
    """

    def __init__(
        self, arrays: Sequence[tuple[Array, list[range]]], rows: Sequence[int], dtype: str, comm: Communicator
    ):
        self.arrays, self.rows, self.comm = arrays, rows, comm
        parts = [self._heads_of(rank) if rank != comm.rank else [] for rank in range(comm.size)]
        counts = [sum(part.size for part in of_rank) for of_rank in parts]
        packed, first = memory(comm, (sum(counts),), arrays[0][0].dtype, arrays[0][0]), 0
        for part in chain.from_iterable(parts):
            packed[first : first + part.size].reshape(part.shape)[...] = part
            first += part.size
        self.pending = start(all_to_all, packed, counts=counts, schedule="pairwise", dtype=dtype, comm=comm)

    def _heads_of(self, rank: int) -> list[Array]:
        return [x[:, heads[rank].start : heads[rank].stop] for x, heads in self.arrays]

    def whole(self) -> list[Array]:
        """The heads of this rank of the tokens of all ranks, once they are there."""
        found = [self.of(source) for source in range(self.comm.size)]
        self.pending.wait()
        return [np.concatenate(of_all) for of_all in zip(*found, strict=True)]

    def of(self, source: int) -> list[Array]:
        """The heads of this rank of the tokens of `source`, as soon as they are there."""
        if source == self.comm.rank:
            return self._heads_of(source)
        flat, first, found = arrived_from(self.pending, source), 0, []
        for x, heads in self.arrays:
            shape = self.rows[source], len(heads[self.comm.rank]), x.shape[2]
            found.append(flat[first : first + prod(shape)].reshape(shape))
            first += prod(shape)
        return found


class Returns:
    """Arrays that go back to the ranks of their tokens, one by one, and are added up there.

    `rows`: the tokens of each rank. `heads`: the heads that each rank has computed. `into`: (tokens of this rank, all
    heads, width), in the dtype of sums. Arrays travel in `dtype`.
    """

    def __init__(self, rows: Sequence[int], heads: list[range], into: Array, dtype: str, comm: Communicator):
        self.rows, self.heads, self.into, self.dtype, self.comm = rows, heads, into, dtype, comm
        self.arrays: dict[int, Any] = {}  # by the rank that has computed them: what is here, or in flight

    def send(self, owner: int, array: Array) -> None:
        """`array` leaves for rank `owner`, which is d ranks ahead. That of the rank d ranks behind comes."""
        rank, size = self.comm.rank, self.comm.size
        if owner == rank:
            self.arrays[rank] = array
            return
        source = (2 * rank - owner) % size
        there = owner if self._travels(rank, owner) else None
        here = source if self._travels(source, rank) else None
        pending = transfer(narrow(array, self.dtype).reshape(-1), there, here, self.dtype, self.comm)
        self.arrays[source] = pending, here is not None

    def _travels(self, source: int, owner: int) -> bool:
        """True if rank `source` has numbers for rank `owner`: both must decide alike whether there is a message."""
        return bool(self.rows[owner] and len(self.heads[source]) and self.into.shape[2])

    def add(self) -> None:
        """Wait for all of them, and add them up in the order of the ranks."""
        for source, run in enumerate(self.heads):
            if source == self.comm.rank:
                self.into[:, run.start : run.stop] += self.arrays[source]
                continue
            pending, comes = self.arrays[source]
            array = widen(arrived(pending), self.dtype)
            if comes:
                self.into[:, run.start : run.stop] += array.reshape(len(self.into), len(run), self.into.shape[2])


def return_all(array: Array, returns: Returns) -> None:
    """Send the tokens of all ranks, which are in order, to their ranks, and add up what comes."""
    ends, rank, size = offsets(returns.rows), returns.comm.rank, returns.comm.size
    for owner in ((rank + d) % size for d in range(size)):
        returns.send(owner, array[ends[owner] : ends[owner + 1]])
    returns.add()
