"""Attention by all-to-all (Ulysses, arXiv 2309.14509), for a slice of the heads.

Each rank gets the tokens of all ranks for some heads, and the results go back. The heads of a rank are cut into slices:
the tokens of the next slice travel behind the attention of this one, and so do the results of the slice before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fompi.backends.numbers import narrow
from fompi.base.layout import accumulator, offsets
from fompi.parallel.arrays import Array, memory, zeros
from fompi.parallel.attention import merge
from fompi.parallel.heads import Deal, Returns, ToHeads
from fompi.parallel.local import LocalAttention
from fompi.parallel.sharding import Sharding


@dataclass(frozen=True)
class Tokens:
    """The tokens of all ranks, in the order in which they arrive on this one: its own ones, and then the others."""

    rows: list[int]  # of each rank
    sources: list[int]  # the ranks in this order
    runs: list[slice]  # where the tokens of each of `sources` are
    at: Array  # their positions

    @staticmethod
    def of(sharding: Sharding, rank: int) -> Tokens:
        rows = sharding.rows
        sources = [(rank - d) % len(rows) for d in range(len(rows))]
        runs = [slice(a, b) for a, b in pairwise(offsets(rows[source] for source in sources))]
        return Tokens(rows, sources, runs, np.concatenate([sharding.indices(source) for source in sources]))


class UlyssesSlice:
    """The attention of all tokens in the heads of `deal`. It keeps what its backward needs, in the dtype of q."""

    def __init__(self, deal: Deal, tokens: Tokens, local: LocalAttention):
        self.deal, self.tokens, self.local, self.dtype = deal, tokens, local, local.dtype

    # -- forward
    def fetch(self, q: Array, k: Array, v: Array) -> ToHeads:
        """The tokens of all ranks, on their way."""
        deal = self.deal
        arrays = [(q, deal.queries), (k, deal.keys), (v, deal.keys)]
        return ToHeads(arrays, self.tokens.rows, self.dtype, deal.comm)

    def forward(self, arriving: ToHeads, result: Array, then: Callable[[bool], None]) -> Returns:
        """The results, on their way to `result`. `then` is told whether all tokens are here.

        The attention begins with the tokens that are there. The results of a rank's queries leave as soon as they have
        seen all keys, those of this rank last.
        """
        deal, tokens, dtype = self.deal, self.tokens, self.dtype
        comm, runs, at = deal.comm, tokens.runs, tokens.at
        (x, queries), (y, keys), (z, _) = arriving.arrays
        count, heads, kv_heads = runs[-1].stop, len(queries[comm.rank]), len(keys[comm.rank])
        self.q = memory(comm, (count, heads, x.shape[2]), x.dtype, x)
        self.k, self.v = (memory(comm, (count, kv_heads, a.shape[2]), a.dtype, a) for a in (y, z))
        o = memory(comm, (count, heads, z.shape[2]), accumulator(dtype), z)
        self.lse = lse = memory(comm, o.shape[:2], o.dtype, o)
        returns = Returns(tokens.rows, queries, result, dtype, comm)

        def partial(of: slice, over: slice) -> tuple[Array, Array]:
            return self.local.attend(self.q[of], self.k[over], self.v[over], deal.reads, at[of], at[over])

        def more(of: slice, over: slice) -> None:
            merge(o[of], lse[of], *partial(of, over))

        last = len(runs) - 1
        for number, (source, run) in enumerate(zip(tokens.sources, runs, strict=True)):
            self.q[run], self.k[run], self.v[run] = arriving.of(source)
            then(number == last or arriving.pending.done())
            o[run], lse[run] = partial(run, slice(0, run.stop))
            if 0 < number < last:
                then(arriving.pending.done())
                more(slice(0, run.start), run)
        for source, run in reversed([*zip(tokens.sources, runs, strict=True)]):  # the last source has seen all keys
            if run is not runs[last]:
                more(run, runs[last])
            returns.send(source, o[run])
        arriving.pending.wait()
        self.o = narrow(o, dtype)
        return returns

    # -- backward
    def fetch_gradient(self, do: Array) -> ToHeads:
        """The gradients of the results, on their way to the ranks of the heads."""
        return ToHeads([(do, self.deal.queries)], self.tokens.rows, self.dtype, self.deal.comm)

    def backward(
        self, arriving: ToHeads, into: tuple[Array, Array], then: Callable[[bool], None]
    ) -> tuple[Returns, Returns]:
        """The gradients, on their way to `into`: those of the keys with the values, and those of the queries.

        Keys of other ranks have their gradients first, and leave; then the queries of other ranks; the own ones last.
        """
        deal, tokens, dtype = self.deal, self.tokens, self.dtype
        comm, runs, at, wide = deal.comm, tokens.runs, tokens.at, accumulator(dtype)
        q, k, v, o = self.q, self.k, self.v, self.o
        given, width = memory(comm, o.shape, o.dtype, o), k.shape[2]
        dq = zeros(comm, q.shape, wide, q)
        dkv = zeros(comm, (*k.shape[:2], width + v.shape[2]), wide, q)
        sent = wide if deal.shares else dtype  # what is summed later travels in the dtype of sums
        keys = Returns(tokens.rows, deal.keys, into[0], sent, comm)
        queries = Returns(tokens.rows, deal.queries, into[1], dtype, comm)

        def add(of: slice, over: slice) -> None:
            results = o[of], self.lse[of], given[of]
            gradients = self.local.backward((q[of], k[over], v[over]), results, deal.reads, at[of], at[over])
            for sum_so_far, gradient in zip(
                (dq[of], dkv[over, :, :width], dkv[over, :, width:]), gradients, strict=True
            ):
                sum_so_far += gradient

        here, others, last = runs[0], slice(runs[0].stop, len(q)), len(runs) - 1
        for number, (source, run) in enumerate(zip(tokens.sources, runs, strict=True)):
            (given[run],) = arriving.of(source)
            then(number == last or arriving.pending.done())
            if number < last:
                add(run, others)
        for source, run in zip(tokens.sources[1:], runs[1:], strict=True):
            add(runs[last], run)
            keys.send(source, dkv[run])
        for source, run in zip(tokens.sources[1:], runs[1:], strict=True):
            add(run, here)
            queries.send(source, dq[run])
        add(here, here)
        keys.send(comm.rank, dkv[here])
        queries.send(comm.rank, dq[here])
        arriving.pending.wait()
        return keys, queries


def one_after_another(
    slices: Sequence[UlyssesSlice], fetch: Callable[[UlyssesSlice], Any], run: Callable[..., Any]
) -> list[Any]:
    """[run(slice, fetch(slice), then) for slice in slices]: the next slice is fetched at the first then(True)."""
    fetched, results = [fetch(slices[0])], list[Any]()

    def then(is_here: bool) -> None:
        if is_here and len(results) + 1 == len(fetched) < len(slices):
            fetched.append(fetch(slices[len(fetched)]))

    for each in slices:
        results.append(run(each, fetched[len(results)], then))
    return results
