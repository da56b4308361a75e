"""The fused operations as `fompi bench fused` has them, beside more rivals on mpi4py: pairwise, and in slices.

mpirun -n 2 python -m fompi bench tools/suites/fused.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fompi.bench import fused
from fompi.bench.fused import LOWER_QUARTILES, FusedCase, grid
from fompi.bench.measure import Bench
from fompi.runtime.report import lower_quartile
from fompi.tuning.rounds import Figure, Row, geometric_mean
from noise import watched
from plain_mpi import without_fompi

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
    return with_slices(bench, fused.measured(bench, case, rivals=partial(without_fompi, slices=even)))


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


def summary(bench: Bench, made: Sequence[Row]) -> Row:
    """Geometric means."""
    whole = fused.summary(bench, [*made])
    sliced, quartiles = (geometric_mean(row.figures[kind].value for row in made) for kind in (-2, -1))
    figures = [
        Figure("best slices / fompi, geometric mean", sliced, least=bench.asked(LEAST_SLICED)),
        Figure(f"best slices / fompi{LOWER_QUARTILES}, geometric mean", quartiles),
    ]
    return replace(whole, figures=[*whole.figures, *figures])
