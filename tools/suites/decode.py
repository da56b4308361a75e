"""A decoder on all ranks, tokens a second by backend.

    mpirun -n 2 python -m fompi bench tools/suites/decode.py

A decoder of random weights, split as `examples/generate.py` splits one: two sums over the ranks in each layer.

| contestant        | what sums                                                                                    |
|-------------------|----------------------------------------------------------------------------------------------|
| `gloo`            | `all_reduce` of torch.distributed on a group of gloo                                         |
| `fompi`           | the same on a group of the backend "fompi"                                                   |
| `MPI`             | the all-reduce of the MPI library, by mpi4py                                                 |
| `... in halves`   | the prompt in two halves: the sum of one (async_op=True) behind the products of the other     |

The first row is a token behind a context, the second a prompt. All contestants compute the same, and it is compared.

The third row is one sum with the residual and the RMS norm behind it, for four prompts: by hand, by
`fompi.parallel.tensor.all_reduce_rmsnorm`, and by that with the residual spread over the ranks (`sharded`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

import fompi
from c10d import beside_torch, compare
from fompi.base.layout import split
from fompi.bench.measure import Bench, Call, Calls
from fompi.engine.communicator import Communicator
from fompi.mpi.transport import start_mpi
from fompi.parallel.shares import dealt
from fompi.parallel.tensor import all_reduce_rmsnorm
from fompi.tuning.rounds import Figure, Row
from means import median_figure
from training import Block, Gpt

GLOO, OURS, LIBRARY = "gloo", "fompi", "MPI"

Waits = Callable[[], object]

Sum = Callable[..., Waits | None]
"""Sums a tensor over the ranks, in place."""


FULL, INNER = Gpt(12, 1024, 16, 32_000, 1, 512), 4224
"""0.2 billion parameters, with INNER columns in an MLP. A sequence is as long as its prompt."""

QUICK, QUICK_INNER = Gpt(2, 64, 4, 256, 1, 32), 128

WITHIN_MPI, LEAST_DECODE, LEAST_PREFILL = 0.95, 1.35, 1.2
"""Asked for: MPI / fompi and gloo / fompi of a token, and gloo / fompi of a prompt between hosts."""


def rows(bench: Bench) -> list[Row]:
    with beside_torch(bench) as (beside, group), torch.inference_mode():
        decoder = Decoder(bench.comm, *(QUICK, QUICK_INNER) if bench.quick else (FULL, INNER))
        sums = {GLOO: partial(_summed, None), OURS: partial(_summed, group), LIBRARY: partial(_by_library, bench.mpi)}
        return beside.rows(
            {
                "decode, one token": partial(one_token, decoder=decoder, sums=sums),
                "prefill": partial(prompt, decoder=decoder, sums=sums),
                "sum, residual and norm": partial(sum_and_norm, size=decoder.size),
            }
        )


def sum_and_norm(bench: Bench, size: Gpt) -> Row:
    comm, tokens = bench.comm, 4 * size.length
    x = np.random.default_rng(comm.rank).standard_normal((tokens, size.width), np.float32)
    residual, weight = np.ones_like(x), np.ones(size.width, np.float32)
    mine = residual[: split(tokens, comm.size)[comm.rank]]

    def by_hand() -> Any:
        r = residual + fompi.all_reduce(x, comm=comm)
        return r / np.sqrt(np.mean(np.square(r), -1, keepdims=True) + 1e-6) * weight

    ours = partial(all_reduce_rmsnorm.forward, x, weight=weight, comm=comm)
    calls: dict[str, Call] = {
        "by hand": by_hand,
        "fompi": partial(ours, residual=residual),
        "fompi, sharded": partial(ours, residual=mine, sharded=True),
    }
    wanted, (_, *names) = by_hand(), calls
    for name in names:
        np.testing.assert_allclose(calls[name]()[0][0], wanted, rtol=1e-4, atol=1e-4)
    what = f"sum, residual and norm of {tokens} x {size.width}"
    row = replace(bench, moves="").row(what, calls, base="fompi, sharded")
    return replace(row, figures=[row.ratio("by hand", name) for name in names])


def _summed(group: Any, t: Any, waits: bool = True) -> Waits | None:
    """Sum `t` over the ranks, in place. Without `waits`: what waits for it."""
    work = torch.distributed.all_reduce(t, group=group, async_op=not waits)
    return None if waits else work.wait


def _by_library(mpi: Any, t: Any, waits: bool = True) -> Waits | None:
    in_place, array = start_mpi().IN_PLACE, t.numpy()
    if waits:
        mpi.Allreduce(in_place, array)
        return None
    wait: Waits = mpi.Iallreduce(in_place, array).Wait
    return wait


class Decoder:
    """The heads, columns and part of the vocabulary of this rank. `shares`: those of unequal ranks."""

    def __init__(self, comm: Communicator, size: Gpt, inner: int, shares: Mapping[str, Any] | None = None):
        def share(kind: str, count: int) -> int:
            return dealt(shares, kind, count, comm.size)[comm.rank]

        self.size, head_dim, heads = size, size.width // size.heads, share("heads", size.heads)
        torch.manual_seed(comm.rank)
        blocks = [Block(size.width, share("columns", inner), heads, head_dim) for _ in range(size.layers)]
        self.layers = [(block, torch.zeros(2, heads, size.length + 1, head_dim)) for block in blocks]
        self.output = torch.nn.Linear(size.width, share("vocabulary", size.vocabulary), bias=False)
        self.x = torch.randn(size.length + 1, size.width, generator=torch.Generator().manual_seed(-1))

    def run(self, summed: Sum, begin: int, end: int, halves: int) -> Any:
        """The logits behind the tokens from `begin` to `end`, in `halves` parts."""
        parts = list(self.x[begin:end].chunk(halves))
        starts = [begin + sum(map(len, parts[:i])) for i in range(len(parts))]
        flying: list[tuple[Any, Waits | None]] = [(None, None)] * len(parts)

        def arrive(i: int) -> Any:
            y, wait = flying[i]
            if wait is not None:
                wait()
            if y is not None:
                parts[i] = parts[i] + y
            return parts[i]

        for block, cache in self.layers:
            for attends in (True, False):
                for i, start in enumerate(starts):
                    y = block.attention(arrive(i), cache, start) if attends else block.mlp(arrive(i))
                    flying[i] = y, summed(y, waits=len(parts) == 1)
        return self.output([arrive(i) for i in range(len(parts))][-1][-1:])


def _row(bench: Bench, what: str, calls: Calls) -> Row:
    results = {name: call() for name, call in calls.items()}
    for name, result in results.items():
        compare(bench, name, [result], [results[GLOO]])
    return bench.row(what, calls, base=OURS)


def one_token(bench: Bench, decoder: Decoder, sums: Mapping[str, Sum]) -> Row:
    at = decoder.size.length
    decoder.run(sums[OURS], 0, at, 1)
    row = _row(bench, "decode, one token", {name: partial(decoder.run, f, at, at + 1, 1) for name, f in sums.items()})
    figures = [
        row.ratio(LIBRARY, OURS, least=WITHIN_MPI),
        row.ratio(GLOO, OURS, least=LEAST_DECODE),
        *(median_figure(f"{name}: a token", row.samples[name], "ms") for name in sums),
    ]
    return replace(row, figures=figures)


def prompt(bench: Bench, decoder: Decoder, sums: Mapping[str, Sum]) -> Row:
    count = decoder.size.length
    calls = {
        f"{name}{' in halves' * (halves > 1)}": partial(decoder.run, each, 0, count, halves)
        for name, each in sums.items()
        for halves in (1, 2)
    }
    row = _row(bench, f"prefill, {count} tokens", calls)
    halves = f"{OURS} in halves"
    rates = [Figure(f"{name}: tokens a second", count / row.median(name)) for name in (GLOO, halves)]
    ratios = [row.ratio(GLOO, halves, least=bench.asked(LEAST_PREFILL))]  # no program on gloo has halves
    ratios += [row.ratio(f"{GLOO} in halves", halves), row.ratio(OURS, halves)]
    return replace(row, figures=[*ratios, *rates])
