"""The fused operations of `fompi bench fused` against what physics allows, and more rivals: pairwise, and in slices.

mpirun -n 2 python -m fompi bench tools/suites/fused.py

The limit of a row is

    bound = max(T_c + c_m, T_m)

T_c is the kernel alone in one call. T_m is the bare exchange. c_m is the CPU time of a rank in the bare exchange while
its wait sleeps. A rank has one core, so the kernel loses this time. The bound is computed in each round, and the median
of the rounds counts. The greater of the two medians would be less than any schedule can reach if a core changes its
speed during the run. The table also has the ratio of lower quartiles, which other users of the cores change less. A row
in which c_m is more than a tenth of T_m is void. A few rounds before the measurement choose the schedule of fompi.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from time import process_time
from typing import Any

import numpy as np
from bench.fused import grid

from exchange import bare_exchange
from fompi.bench import fused
from fompi.bench.fused import KERNEL, FusedCase, unfused_of
from fompi.bench.measure import DEFAULT, Bench, Call
from fompi.runtime.report import lower_quartile
from fompi.tuning.rounds import Figure, Row, of_all_ranks
from means import geometric_mean, repeated
from noise import watched
from plain_mpi import without_fompi

MOST_SLOWER = 1.02
"""The target for fompi / without overlap."""

BARE = "bare exchange"

PIECES = 4
"""Pieces of a shard in the bare exchange."""

LEAST_BOUND, LEAST_OVER_UNFUSED = 0.94, 1.55
"""Targets: bound / time; without overlap / fompi in the headline row."""

MOST_CPU = 0.1
"""The most that c_m may be of T_m."""

LOWER_QUARTILES = ", lower quartiles"
"""Marks figures from lower quartiles. Medians compare different moments if others use the cores now and then."""

SLICES = (2, 4, 8)

LEAST_SLICED, LEAST_SLICED_CASE = 1.0, 0.97
"""Targets for slices / fompi: as a mean of all rows, and in each row."""

HELPER = "slices of mpi4py: a helper that polls"


def rows(bench: Bench) -> list[Row]:
    bench, runs = watched(bench)
    rows = (measured(bench, case) for case in bench.each(grid(bench.quick)))
    made = [replace(row, progress=f"{row.progress}; {runs()}") for row in rows]
    return [*made, summary(bench, made)] if made else []


def measured(bench: Bench, case: FusedCase) -> Row:
    even = [slices for slices in SLICES if case.m // bench.comm.size % slices == 0]
    exchange = exchange_of(bench.cluster.own, case, bench.comm.size)
    row = fused.measured(bench, case, rivals=partial(without_fompi, slices=even), beside={BARE: exchange})
    return with_slices(bench, evaluated(bench, case, cpu_seconds(bench, exchange), row))


def evaluated(bench: Bench, case: FusedCase, cpu: float, row: Row) -> Row:
    """The row with its limits, figures and marks. `cpu` is c_m."""
    best = row.base
    assert best is not None
    t_c, t_m, asked = row.median(KERNEL), row.median(BARE), bench.asked
    bound = median(max(c + cpu, m) for c, m in zip(row.samples[KERNEL], row.samples[BARE], strict=True))
    unfused = row.best(unfused_of(row.samples))
    quartiles = {name: lower_quartile(samples) for name, samples in row.samples.items()}
    soonest = max(quartiles[KERNEL] + cpu, quartiles[BARE])
    is_headline = case.operation == "matmul_reduce_scatter" and case.k == 1024
    least = asked(LEAST_OVER_UNFUSED) if is_headline else None
    figures = [
        Figure("bound / time", bound / row.median(best), limit=1.0),
        row.ratio(unfused, best, least=least, limit=(t_c + t_m) / bound),
        low_end(row.ratio(best, unfused), most=asked(MOST_SLOWER)),
        Figure("c_m / T_m", cpu / t_m, most=asked(MOST_CPU)),
        Figure(f"bound / time{LOWER_QUARTILES}", soonest / quartiles[best], limit=1.0),
        row.ratio(DEFAULT, best),
    ]
    is_void = not bench.cluster.shared and cpu > MOST_CPU * t_m
    return replace(
        row,
        limits={"T_c": t_c, "T_m": t_m, "bound": bound},
        figures=figures,
        marks=["void: the exchange costs too much CPU time"] * is_void,
    )


def exchange_of(own: Any, case: FusedCase, size: int) -> Call:
    """The messages of the operation. An all-reduce moves its shards twice."""
    once = bare_exchange(own, case.m // size * case.n * 4, PIECES)
    return partial(repeated, once, 2) if case.operation == "matmul_all_reduce" else once


def cpu_seconds(bench: Bench, exchange: Call) -> float:
    """The CPU time of a rank in the bare exchange: the mean over the ranks."""
    spent: list[float] = []

    def timed() -> None:
        begun = process_time()
        exchange()
        spent.append(process_time() - begun)

    bench.times({BARE: timed}, 7)
    return float(of_all_ranks(bench.mpi, np.array([median(spent)])).mean())


def low_end(slower: Figure, most: float | None) -> Figure:
    """The low end of the interval of a ratio that should not be much above 1."""
    assert slower.interval is not None
    return Figure(f"low end of {slower.name}", slower.interval.low, most=most)


def with_slices(bench: Bench, row: Row) -> Row:
    """The row of `fused.measured` with what it gains over the best slices of mpi4py."""
    assert row.base is not None
    slices = [name for name in row.samples if "slices," in name and name != row.base]
    quartiles = {name: lower_quartile(row.samples[name]) for name in (*slices, row.base)}
    best_slices = min(quartiles[name] for name in slices)
    figures = [
        row.ratio(row.best(slices), row.base, least=bench.asked(LEAST_SLICED_CASE)),
        Figure(f"best slices / fompi{LOWER_QUARTILES}", best_slices / quartiles[row.base]),
    ]
    return replace(row, figures=[*row.figures, *figures], progress=f"{row.progress}; {HELPER}")


def of_bound(bench: Bench, measured_rows: list[Row]) -> Row:
    """Geometric means. Rows that are void do not count for the bound."""
    valid = [row for row in measured_rows if not row.marks]

    def mean(name: str, rows: list[Row], kind: int, **targets: Any) -> Figure:
        return Figure(name, geometric_mean(row.figures[kind].value for row in rows), **targets)

    means = []
    if valid:
        what = f"geometric mean of {len(valid)} rows"
        means.append(mean(f"bound / time, {what}", valid, 0, least=bench.asked(LEAST_BOUND), limit=1.0))
        means.append(mean(f"bound / time{LOWER_QUARTILES}, {what}", valid, 4, limit=1.0))
    means.append(mean(f"{DEFAULT} / the best of fompi, geometric mean", measured_rows, 5))
    return Row("all rows", str(bench.cluster), figures=means)


def summary(bench: Bench, made: Sequence[Row]) -> Row:
    """Geometric means."""
    whole = of_bound(bench, [*made])
    sliced, quartiles = (geometric_mean(row.figures[kind].value for row in made) for kind in (-2, -1))
    figures = [
        Figure("best slices / fompi, geometric mean", sliced, least=bench.asked(LEAST_SLICED)),
        Figure(f"best slices / fompi{LOWER_QUARTILES}, geometric mean", quartiles),
    ]
    return replace(whole, figures=[*whole.figures, *figures])
