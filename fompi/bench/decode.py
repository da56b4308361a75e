"""A decoder on all ranks, tokens a second by backend: mpirun -n 2 python -m fompi bench decode

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
from typing import Any, NamedTuple

import numpy as np

import fompi
from fompi.base.layout import split
from fompi.bench.measure import Bench, Call, Calls
from fompi.bench.training import beside_torch
from fompi.engine.communicator import Communicator
from fompi.mpi.transport import start_mpi
from fompi.parallel.tensor import all_reduce_rmsnorm
from fompi.tuning.rounds import Figure, Row, median_figure

GLOO, OURS, LIBRARY = "gloo", "fompi", "MPI"

Waits = Callable[[], object]

Sum = Callable[..., Waits | None]
"""Sums a tensor over the ranks, in place."""


class Size(NamedTuple):
    """The decoder, and the tokens of its prompt."""

    layers: int
    hidden: int
    inner: int
    heads: int
    vocabulary: int
    prompt: int


FULL = Size(12, 1024, 2816, 16, 32_000, 512)
"""0.2 billion parameters."""

QUICK = Size(2, 64, 128, 4, 256, 32)

WITHIN_MPI, LEAST_DECODE, LEAST_PREFILL = 0.95, 1.35, 1.2
"""Asked for: MPI / fompi and gloo / fompi of a token, and gloo / fompi of a prompt between hosts."""


def rows(bench: Bench) -> list[Row]:
    with beside_torch(bench, "decode") as (beside, distributed):
        import torch

        with torch.inference_mode():
            decoder = Decoder(torch, bench.comm, QUICK if bench.quick else FULL)
            sums = {
                GLOO: partial(_summed, distributed, None),
                OURS: partial(_summed, distributed, distributed.new_group(backend="fompi")),
                LIBRARY: partial(_by_library, bench.mpi),
            }
            return beside.rows(
                {
                    "decode, one token": partial(one_token, decoder=decoder, sums=sums),
                    "prefill": partial(prompt, decoder=decoder, sums=sums),
                    "sum, residual and norm": partial(sum_and_norm, size=decoder.size),
                }
            )


def sum_and_norm(bench: Bench, size: Size) -> Row:
    comm, tokens = bench.comm, 4 * size.prompt
    x = np.random.default_rng(comm.rank).standard_normal((tokens, size.hidden), np.float32)
    residual, weight = np.ones_like(x), np.ones(size.hidden, np.float32)
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
    what = f"sum, residual and norm of {tokens} x {size.hidden}"
    row = replace(bench, moves="").row(what, calls, base="fompi, sharded")
    return replace(row, figures=[row.ratio("by hand", name) for name in names])


def _summed(distributed: Any, group: Any, t: Any, waits: bool = True) -> Waits | None:
    """Sum `t` over the ranks, in place. Without `waits`: what waits for it."""
    work = distributed.all_reduce(t, group=group, async_op=not waits)
    return None if waits else work.wait


def _by_library(mpi: Any, t: Any, waits: bool = True) -> Waits | None:
    in_place, array = start_mpi().IN_PLACE, t.numpy()
    if waits:
        mpi.Allreduce(in_place, array)
        return None
    wait: Waits = mpi.Iallreduce(in_place, array).Wait
    return wait


class Decoder:
    """The heads, columns and part of the vocabulary of this rank."""

    def __init__(self, torch: Any, comm: Communicator, size: Size):
        self.torch, self.size, self.head = torch, size, size.hidden // size.heads
        share = lambda count: count // comm.size + (comm.rank < count % comm.size)  # noqa: E731
        heads, inner = share(size.heads), share(size.inner)
        generator = torch.Generator().manual_seed(comm.rank)

        def weights(rows: int, columns: int) -> Any:
            return torch.randn(rows, columns, generator=generator) / max(1, columns) ** 0.5

        width = heads * self.head
        self.layers = [
            {
                "qkv": weights(3 * width, size.hidden), "o": weights(size.hidden, width),
                "gate": weights(2 * inner, size.hidden), "down": weights(size.hidden, inner),
                "cache": torch.zeros(2, heads, size.prompt + 1, self.head),
            }
            for _ in range(size.layers)
        ]  # fmt: skip
        self.output = weights(share(size.vocabulary), size.hidden)
        self.x = torch.randn(size.prompt + 1, size.hidden, generator=torch.Generator().manual_seed(-1))

    def attention(self, layer: Any, x: Any, at: int) -> Any:
        functional, until = self.torch.nn.functional, at + len(x)
        x = functional.rms_norm(x, x.shape[-1:])
        q, k, v = functional.linear(x, layer["qkv"]).unflatten(-1, (3, -1, self.head)).permute(1, 2, 0, 3)
        layer["cache"][0, :, at:until], layer["cache"][1, :, at:until] = k, v
        k, v = layer["cache"][:, :, :until]
        sees = self.torch.ones(len(x), until, dtype=self.torch.bool).tril(at) if len(x) > 1 else None
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        return functional.linear(y.transpose(0, 1).flatten(1), layer["o"])

    def mlp(self, layer: Any, x: Any, at: int) -> Any:
        functional = self.torch.nn.functional
        gate, up = functional.linear(functional.rms_norm(x, x.shape[-1:]), layer["gate"]).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, layer["down"])

    def run(self, summed: Sum, begin: int, end: int, halves: int) -> Any:
        """The logits behind the tokens from `begin` to `end`, in so many parts."""
        parts = list(self.x[begin:end].chunk(halves))
        starts = [begin + sum(map(len, parts[:i])) for i in range(len(parts))]
        flying: list[tuple[Any, Waits | None]] = [(None, None)] * len(parts)

        def arrive(i: int) -> None:
            y, wait = flying[i]
            if wait is not None:
                wait()
            if y is not None:
                parts[i] = parts[i] + y

        for layer in self.layers:
            for term in (self.attention, self.mlp):
                for i in range(len(parts)):
                    arrive(i)
                    y = term(layer, parts[i], starts[i])
                    flying[i] = y, summed(y, waits=len(parts) == 1)
        for i in range(len(parts)):
            arrive(i)
        return self.torch.nn.functional.linear(parts[-1][-1:], self.output)


def _row(bench: Bench, what: str, calls: Calls) -> Row:
    results = {name: call() for name, call in calls.items()}
    for name, result in results.items():
        bench.compare(name, [result], [results[GLOO]])
    return bench.row(what, calls, base=OURS)


def one_token(bench: Bench, decoder: Decoder, sums: Mapping[str, Sum]) -> Row:
    at = decoder.size.prompt
    decoder.run(sums[OURS], 0, at, 1)
    row = _row(bench, "decode, one token", {name: partial(decoder.run, f, at, at + 1, 1) for name, f in sums.items()})
    figures = [
        row.ratio(LIBRARY, OURS, least=WITHIN_MPI),
        row.ratio(GLOO, OURS, least=LEAST_DECODE),
        *(median_figure(f"{name}: a token", row.samples[name], "ms") for name in sums),
    ]
    return replace(row, figures=figures)


def prompt(bench: Bench, decoder: Decoder, sums: Mapping[str, Sum]) -> Row:
    count = decoder.size.prompt
    calls = {
        f"{name}{' in halves' * (halves > 1)}": partial(decoder.run, each, 0, count, halves)
        for name, each in sums.items()
        for halves in (1, 2)
    }
    row = _row(bench, f"prefill, {count} tokens", calls)
    best, halves = row.best(name for name in calls if name.startswith(GLOO)), f"{OURS} in halves"
    rates = [Figure(f"{name}: tokens a second", count / row.median(name)) for name in (best, halves)]
    ratios = [row.ratio(best, halves, least=bench.asked(LEAST_PREFILL)), row.ratio(OURS, halves)]
    return replace(row, figures=[*ratios, *rates])
