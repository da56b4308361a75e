"""Shares for ranks that are not equally fast: their time beside equal shares, and beside the sum of all speeds.

    python -m fompi.lab run --hosts 4 --cores 0.4,0.2,0.2,0.1 -- python -m fompi bench tools/suites/unequal.py

Hosts of 2 : 1 : 1 : 0.5, which share two cores here. Each row is a part of a model:

| row                   | what is dealt                                                                    |
|-----------------------|----------------------------------------------------------------------------------|
| `MLP`                 | the columns of `ColumnParallelLinear` and `RowParallelLinear`                    |
| `attention`           | the heads of `ParallelAttention`                                                 |
| `decode`, `prefill`   | heads, columns and vocabulary of a decoder, as in the suite `decode`             |
| `DDP`                 | rows of `DistributedDataParallel`                                                |
| `ZeRO`                | rows of `ZeroDataParallel`, and the state of the optimizer                       |
| `pipeline`            | layers of `fompi.torch.Pipeline`                                                 |

First each rank computes all of it alone, while the others do the same: t seconds on rank r. No shares are faster than
1 / sum(1 / t): the bound. The shares are those that fit these times (`fompi.planner.shares.deal`). Then `equal` and
`balanced` run in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

import fompi
from decode import Decoder
from fompi.base.layout import offsets
from fompi.bench.measure import Bench, Call
from fompi.engine.communicator import Communicator
from fompi.parallel.data import SGD
from fompi.parallel.shares import dealt
from fompi.planner.shares import Phase, deal
from fompi.torch import DistributedDataParallel, Pipeline, ZeroDataParallel, nn
from fompi.tuning.rounds import Figure, Row, meet, of_all_ranks
from training import Block, Gpt

EQUAL, BALANCED = "equal", "balanced"
MOST_OVER_BOUND, LEAST_GAIN = 1.05, 1.3

ALONE_SECONDS, QUICK_SECONDS = 1.0, 0.05
"""For how long a rank computes everything alone, again and again: longer than a core with a quota may pause."""

MICROBATCHES = 8


class Trained(NamedTuple):
    """Blocks that are trained: smaller ones, as a backward takes twice the time, on a tenth of a core."""

    width: int
    columns: int
    rows: int
    piped: int  # rows of the pipeline

    def blocks(self, count: int) -> list[Any]:
        torch.manual_seed(1)
        return [Block(self.width, self.columns) for _ in range(count)]


class Sizes(NamedTuple):
    """Of all rows."""

    width: int
    heads: int
    columns: int
    rows: int
    layers: int
    decoder: Gpt
    trained: Trained


FULL = Sizes(1024, 32, 4096, 512, 16, Gpt(4, 1024, 32, 16_000, 1, 256), Trained(256, 1024, 2048, 256))
QUICK = Sizes(32, 8, 64, 16, 5, Gpt(2, 32, 8, 96, 1, 8), Trained(32, 64, 16, 16))

Shares = Mapping[str, Sequence[int]]


class Part(NamedTuple):
    """`make(comm, shares)` is a call on all ranks, by equal shares without these. `units`: what is dealt, how many."""

    name: str
    units: Mapping[str, int]
    make: Callable[[Any, Shares | None], Call]


def rows(bench: Bench) -> list[Row]:
    torch.manual_seed(0)
    sizes = QUICK if bench.quick else FULL
    parts = [
        Part("MLP", {"columns": sizes.columns}, partial(_mlp, sizes)),
        Part("attention", {"heads": sizes.heads}, partial(_attention, sizes)),
        Part("decode, one token", _of_decoder(sizes), partial(_decode, sizes, 1)),
        Part("prefill", _of_decoder(sizes), partial(_decode, sizes, sizes.decoder.length)),
        Part("DDP", {"rows": sizes.trained.rows}, partial(_data_parallel, sizes.trained, False)),
        Part("ZeRO", {"rows": sizes.trained.rows}, partial(_data_parallel, sizes.trained, True)),
        Part("pipeline", {"layers": sizes.layers}, partial(_pipeline, sizes)),
    ]
    with fompi.Communicator(bench.mpi.Split(bench.comm.rank, 0)) as alone:
        return [measured(bench, alone, part) for part in bench.each(parts, lambda part: part.name)]


def measured(bench: Bench, alone: Communicator, part: Part) -> Row:
    """Both shares in turns, and the bound."""
    whole = part.make(alone, None)
    whole()
    meet(bench.mpi)
    own = _mean_seconds(whole, QUICK_SECONDS if bench.quick else ALONE_SECONDS)
    every = [float(t) for t in of_all_ranks(bench.mpi, np.array([own]))[:, 0]]
    bound, ranks = 1 / sum(1 / t for t in every), range(len(every))
    shares: dict[str, list[int]] = {}
    for kind, total in part.units.items():
        phase = Phase((kind,), (total,), tuple(((0.0, (t / total,)),) for t in every), (0.0,))
        found = deal(phase, ranks) or []
        shares[kind] = [n for (n,) in found]
    calls = {EQUAL: part.make(bench.comm, None), BALANCED: part.make(bench.comm, shares)}
    row = bench.row(f"{part.name}: {shares}", calls, base=EQUAL, limits={"the sum of speeds": bound})
    over = Figure(f"{BALANCED} / the sum of speeds", row.median(BALANCED) / bound, most=bench.asked(MOST_OVER_BOUND))
    return replace(row, figures=[over, row.ratio(EQUAL, BALANCED, least=bench.asked(LEAST_GAIN))])


def _mean_seconds(call: Call, least: float) -> float:
    begun, count = perf_counter(), 0
    while (taken := perf_counter() - begun) < least or not count:
        call()
        count += 1
    return taken / count


def _of_decoder(sizes: Sizes) -> dict[str, int]:
    return {"heads": sizes.decoder.heads, "columns": sizes.columns, "vocabulary": sizes.decoder.vocabulary}


def _rows_of(comm: Communicator, count: int, shares: Any = None) -> slice:
    ends = offsets(dealt(shares, "rows", count, comm.size))
    return slice(ends[comm.rank], ends[comm.rank + 1])


def _mlp(sizes: Sizes, comm: Communicator, shares: Shares | None) -> Call:
    up = nn.ColumnParallelLinear(sizes.width, sizes.columns, activation="gelu", comm=comm, shares=shares)
    down = nn.RowParallelLinear(sizes.columns, sizes.width, comm=comm, shares=shares)
    x = torch.ones(sizes.rows, sizes.width)[_rows_of(comm, sizes.rows)]

    def call() -> Any:
        with torch.no_grad():
            return down(up(x))

    return call


def _attention(sizes: Sizes, comm: Communicator, shares: Shares | None) -> Call:
    attention = nn.ParallelAttention(sizes.width, sizes.heads, causal=True, comm=comm, shares=shares)
    x = torch.ones(sizes.rows, sizes.width)[_rows_of(comm, sizes.rows)]

    def call() -> Any:
        with torch.no_grad():
            return attention(x)

    return call


def _decode(sizes: Sizes, tokens: int, comm: Communicator, shares: Shares | None) -> Call:
    decoder = Decoder(comm, sizes.decoder, sizes.columns, shares)

    def summed(t: Any, waits: bool = True) -> Any:
        if waits:
            fompi.all_reduce(t, out=t, comm=comm)
            return None
        return fompi.all_reduce.start(t, out=t, comm=comm).wait

    begin = sizes.decoder.length if tokens == 1 else 0

    def call() -> Any:
        with torch.no_grad():
            return decoder.run(summed, begin, begin + tokens, min(2, tokens))

    return call


def _data_parallel(sizes: Trained, zero: bool, comm: Communicator, shares: Shares | None) -> Call:
    module = torch.nn.Sequential(*sizes.blocks(1))
    x = torch.ones(sizes.rows, sizes.width)[_rows_of(comm, sizes.rows, shares)]
    model: Any
    if zero:
        both = None if shares is None else {"rows": shares["rows"], "state": shares["rows"]}
        model = ZeroDataParallel(module, comm, optimizer=SGD(1e-3), zero=2, shares=both)
    else:
        model = DistributedDataParallel(module, comm, shares=shares)

    def call() -> None:
        model(x).square().sum().backward()
        if zero:
            model.step()

    return call


def _pipeline(sizes: Sizes, comm: Communicator, shares: Shares | None) -> Call:
    count, size = sizes.layers, comm.size
    how = {"layers": dealt(shares, "layers", count, size)}
    each, width = max(1, sizes.trained.piped // MICROBATCHES), sizes.trained.width
    pipe = Pipeline(
        sizes.trained.blocks(count), comm=comm, microbatches=MICROBATCHES, activations=(each, width),
        loss=torch.nn.functional.mse_loss, shares=how,
    )  # fmt: skip
    x = [torch.ones(each, width)] * MICROBATCHES
    return lambda: pipe.step(x if comm.rank == 0 else None, x if comm.rank == size - 1 else None)
