"""The rows of experts: how they travel to the ranks of their experts and back, and what the experts compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from fompi.backends.numbers import counting, empty, fetch, upload
from fompi.base.errors import LayoutError, ShapeError
from fompi.base.layout import offsets
from fompi.engine.communicator import Communicator
from fompi.ops.operations import all_to_all
from fompi.parallel.activations import activate, activate_backward, check_activation
from fompi.parallel.arrays import Array, arrived, borrow, gathered, read, start, transfer
from fompi.parallel.choices import Choice
from fompi.tensors.dlpack import Tensor

# --------------------------------------------------------------------------------------------------- the experts


def grouped(rows: Array, counts: Sequence[int], w: Array) -> Array:
    """rows @ w[e] for each run of rows: the first counts[0] rows for expert 0, and so on."""
    out = empty((len(rows), w.shape[2]), rows.dtype, rows)
    for e, (a, b) in enumerate(pairwise(offsets(counts))):
        np.matmul(rows[a:b], w[e], out=out[a:b])
    return out


def grouped_gradient(rows: Array, counts: Sequence[int], d: Array, into: Array) -> None:
    """into[e] += rows.T @ d for each run of rows."""
    for e, (a, b) in enumerate(pairwise(offsets(counts))):
        into[e] += rows[a:b].T @ d[a:b]


@dataclass
class Batch:
    """Rows that experts have computed, expert by expert."""

    rows: Array
    counts: list[int]
    z: Array  # rows @ w1

    @classmethod
    def forward(cls, rows: Array, counts: Any, w1: Array, w2: Array, activation: str) -> tuple[Batch, Array]:
        """The batch, and activation(rows @ w1) @ w2."""
        numbers = [int(n) for n in counts]
        batch = cls(rows, numbers, grouped(rows, numbers, w1))
        return batch, grouped(activate(batch.z, activation), numbers, w2)

    def backward(self, d: Array, w1: Array, w2: Array, activation: str) -> tuple[Array, Array]:
        """The gradients of the rows and of z."""
        dh = grouped(d, self.counts, w2.swapaxes(1, 2))
        dz = activate_backward(self.z, dh, activation)
        return grouped(dz, self.counts, w1.swapaxes(1, 2)), dz

    def add_weight_gradients(self, d: Array, dz: Array, activation: str, dw1: Array, dw2: Array) -> None:
        grouped_gradient(self.rows, self.counts, dz, dw1)
        grouped_gradient(activate(self.z, activation), self.counts, d, dw2)


def check_experts(
    w1: Any, w2: Any, x: Tensor, held: Sequence[int], activation: str, comm: Communicator
) -> tuple[Tensor, Tensor]:
    """The matrices of the experts of this rank. `held`: how many experts each rank has."""
    t1, t2 = borrow(w1, "w1", x, 3), borrow(w2, "w2", x, 3)
    for name, tensor in (("w1", t1), ("w2", t2)):
        if len(tensor.array) != held[comm.rank]:
            raise LayoutError(
                f"{name} has {len(tensor.array)} experts, but {sum(held)} experts on {comm.size} ranks are dealt out "
                f"as {[*held]}: rank {comm.rank} has {held[comm.rank]}"
            )
    check_widths("w1", "w2", t1.array.shape[1:], t2.array.shape[1:], x, activation)
    return t1, t2


def check_widths(first: str, second: str, a: tuple[int, ...], b: tuple[int, ...], x: Tensor, activation: str) -> None:
    check_activation(activation, a[1], first)
    if a[0] != x.array.shape[1]:
        raise ShapeError(f"{first} has {a[0]} rows, but x has {x.array.shape[1]} features: they must be equal")
    features = a[1] // 2 if activation == "swiglu" else a[1]
    if b[0] != features:
        raise ShapeError(f"{second} has {b[0]} rows, but {first} with {activation} gives {features} features")


# -------------------------------------------------------------------------------------------------- the exchange


class Exchange:
    """The chosen rows of one micro-batch, expert by expert: which of them travel, and which rows arrive for them.

    With `apart`, the rows for experts of this rank do not travel. `announce` is collective: the ranks exchange the
    counts. Of a device the host sees nothing but these.
    """

    def __init__(self, choice: Choice, rows: range, comm: Communicator, apart: bool):
        self.experts, self.k, self.held = choice.probabilities.shape[1], choice.experts.shape[1], choice.held
        self.comm, self.rows, self.apart, self.is_settled = comm, rows, apart, False
        self.run = slice(rows.start, rows.stop)
        kept, experts = choice.kept[self.run], choice.experts[self.run]
        key = np.where(kept, experts, np.int64(self.experts)).reshape(-1)  # dropped ones come last
        self._order, self._kept = np.argsort(key, kind="stable"), kept
        self._edges = fetch(np.searchsorted(key[self._order], counting(self.experts + 1, key)))

    def announce(self) -> None:
        """Wait until the host knows how many rows each expert gets, and tell the other ranks."""
        edges, order, like = read(self._edges, self.comm), self._order, self._order
        rank, ends = self.comm.rank, offsets(self.held)
        mine = slice(ends[rank], ends[rank + 1])
        self.total, self.chosen = int(edges[-1]), np.diff(edges)
        self.token, self.slot = order[: self.total] // self.k + self.rows.start, order[: self.total] % self.k
        self.places = np.empty_like(order)
        self.places[order] = counting(len(order), like)
        self.places = self.places.reshape(-1, self.k)  # of each choice among the rows expert by expert
        self.first = [int(edges[e]) for e in ends]  # where the rows of each rank begin
        own = slice(*self.first[rank:][:2]) if self.apart else slice(0, 0)
        self.here, sent = own, self.chosen.copy()
        self.own = self.chosen[mine] if self.apart else np.zeros(self.held[rank], np.int64)
        if self.apart:
            sent[mine] = 0
        self.send = [int(sent[a:b].sum()) for a, b in pairwise(ends)]
        self._table = start(all_to_all, sent[:, None], counts=[*self.held], dtype=str(sent.dtype), comm=self.comm)

    def away(self, values: Array) -> Array:
        """Those of the rows that travel."""
        if self.here.start == self.here.stop:
            return values
        return np.concatenate([values[: self.here.start], values[self.here.stop :]])

    @property
    def sources(self) -> list[int]:
        """The other ranks, in the order in which their rows arrive."""
        return [(self.comm.rank - d) % self.comm.size for d in range(1, self.comm.size)]

    def settle(self) -> None:
        """Wait for the counts of the rows that arrive, the first time."""
        if self.is_settled:
            return
        self.is_settled = True
        self.table = table = arrived(self._table).reshape(self.comm.size, len(self.own))
        self.receive = [int(n) for n in table.sum(1)]
        self.counts = [int(n) for n in table.sum(0)]
        expert = np.repeat(np.tile(np.arange(len(self.own)), self.comm.size), table.reshape(-1))
        self.order = upload(np.argsort(expert, kind="stable"), self._order)  # from the order of arrival

    def go(self, values: Array, dtype: str) -> Any:
        """Send the values of rows that travel to their experts: to one rank after the other."""
        return start(all_to_all, values, counts=self.send, schedule="pairwise", dtype=dtype, comm=self.comm)

    def came(self, pending: Any) -> Array:
        """The values that have arrived, expert by expert."""
        return arrived(pending)[self.order]

    def go_back(self, values: Array, dtype: str) -> Any:
        """Send values, which stand expert by expert, to where their rows came from."""
        home = np.empty_like(values)
        home[self.order] = values
        return start(all_to_all, home, counts=self.receive, dtype=dtype, comm=self.comm)

    def answer(self, source: int, values: Array, dtype: str) -> Any:
        """Send the values of the rows that came from `source` back, and receive those of the opposite rank.

        `source` is d ranks before this one, and the opposite rank is d ranks behind it. Returns what `answered` takes.
        """
        behind = (2 * self.comm.rank - source) % self.comm.size
        there, here = source if self.receive[source] else None, behind if self.send[behind] else None
        return behind, transfer(values, there, here, dtype, self.comm)

    def answered(self, answer: Any, into: Array) -> None:
        """Wait for such values, and write them to the rows of `into` that they belong to."""
        behind, pending = answer
        values = arrived(pending)
        if self.send[behind]:
            into[self.first[behind] : self.first[behind + 1]] = values

    def add(self, values: Array, y: Array, weights: Array | None = None) -> None:
        """Add the values of all rows to the rows of y that they belong to, slot by slot: in a fixed order.

        With `weights`, those of all rows of y by slot, y[token] += weights[token, slot] * values.
        """
        if not self.total:
            return
        is_whole = self.total == self.places.size
        for slot in range(self.k):
            at = self.places[:, slot]
            terms = gathered(self.comm, values, at if is_whole else np.minimum(at, self.total - 1))
            if weights is not None:
                terms *= weights[self.run, slot][:, None]
            y[self.run] += terms if is_whole else np.where(self._kept[:, slot][:, None], terms, terms.dtype.type(0))


def halves(counts: Array) -> list[tuple[Array, Array]]:
    """The rows of each expert in two halves: for each half its rows and its counts."""
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first = (counts + 1) // 2
    is_first = within < np.repeat(first, counts)
    return [(np.flatnonzero(is_first), first), (np.flatnonzero(~is_first), counts - first)]


def alternate(parts: Sequence[Iterator[None]]) -> None:
    """Run the generators alternately, step by step: what one has sent travels while the others compute."""
    for _ in zip_longest(*parts):
        pass
