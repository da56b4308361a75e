"""The fused operations on real GEMMs, with overlap and without: mpirun -n 2 python -m fompi bench fused

The rows are those of `fompi try`, for a grid of shapes (`fompi.bench.fused`).

With `--device` a row has a bound operation by several schedules, unfused, its product alone and its messages alone. The
limit is max(product, messages), the median of what each round allows.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

import fompi
from fompi.bench.fused import OPERATIONS, FusedCase, cases_of, measured
from fompi.bench.measure import Bench
from fompi.cli.output import UsageError
from fompi.tuning.rounds import Row, best_of, ratio

M = 2048
KS, QUICK_KS = (512, 1024, 2048, 4096), (512,)

SHAPE, QUICK_SHAPE, SOFTWARE_SHAPE = (8192, 8192, 8192), (2048, 2048, 2048), (64, 64, 64)
"""M, K, N of the whole product on a device."""

ON_DEVICE: dict[str, dict[str, Any]] = {
    "ring": {"schedule": "ring"},
    "direct": {"schedule": "direct"},
    "direct, 2 slices": {"schedule": "direct", "slices": 2},
}

DEVICE_UNFUSED, PRODUCT, MESSAGES = "unfused", "product alone", "messages alone"

LIMIT = f"max({PRODUCT}, {MESSAGES})"

DEVICE_PILOT_ROUNDS = 3


def grid(quick: bool) -> list[FusedCase]:
    """Each operation with each K."""
    edge, ks = (M // 4, QUICK_KS) if quick else (M, KS)
    return [FusedCase(operation, edge, edge, k) for operation in OPERATIONS for k in ks]


def rows(bench: Bench) -> list[Row]:
    return [measured(bench, case) for case in bench.each(grid(bench.quick))]


# ---------------------------------------------------------------------------------------------------- on a device


def rows_on_device(bench: Bench) -> list[Row]:
    shape = shape_on_device(bench)
    made = cases_of(shape, bench.comm.size)[:2]
    return bench.rows({case.operation: partial(on_device, case=case, shape=shape) for case in made})


def shape_on_device(bench: Bench) -> tuple[int, int, int]:
    """M, K and N. Raises UsageError if the ranks do not divide them."""
    fits = SOFTWARE_SHAPE if bench.place.is_software else QUICK_SHAPE if bench.quick else SHAPE
    m, k, n = shape = bench.like or fits
    if any(length % bench.comm.size for length in shape):
        raise UsageError(f"bench --device: {bench.comm.size} ranks must divide M, K and N, not {m},{k},{n}")
    return shape


def on_device(bench: Bench, case: FusedCase, shape: tuple[int, int, int]) -> Row:
    """The row of one operation, whose product as a whole has this shape."""
    comm, place, backend = bench.comm, bench.place, bench.place.backend
    x, w = case.operands(comm.rank, comm.size)
    m, inner, outer = case.product
    reference = getattr(fompi, case.operation)(x, w, comm=comm, schedule="unfused")
    moved = place.array(x if case.gathers else np.ones((m, outer), np.float32))
    a, b = (place.array(np.ones(each, np.float32)) for each in ((m, inner), (inner, outer)))
    launch = backend.bind("matmul", [a, b], [place.device.empty((m, outer), np.float32)], ["float32"] * 2, ["float32"])
    with ExitStack() as held:
        how = {**ON_DEVICE, DEVICE_UNFUSED: {"schedule": "unfused"}}
        steps = bench.by_schedules(held, case.operation, how, x=place.array(x), w=place.array(w))
        collective, direct = "all_gather" if case.gathers else "reduce_scatter", {MESSAGES: {"schedule": "direct"}}
        alone = {
            PRODUCT: lambda: backend.leave([launch([])]),
            **bench.by_schedules(held, collective, direct, x=moved),
        }
        calls = {name: place.finished(call) for name, call in (steps | alone).items()}
        errors = bench.checked({name: calls[name] for name in steps}, reference)
        best = best_of(bench.times({name: calls[name] for name in ON_DEVICE}, DEVICE_PILOT_ROUNDS))
        what = f"{case.operation} {','.join(map(str, shape))} float32"
        row = bench.row(what, calls, base=DEVICE_UNFUSED, errors=errors)
    limits = [max(pair) for pair in zip(row.samples[PRODUCT], row.samples[MESSAGES], strict=True)]
    figures = [
        ratio(f"{best} / {LIMIT}", row.samples[best], limits, limit=1.0),
        row.ratio(DEVICE_UNFUSED, best),
    ]
    return replace(row, limits={LIMIT: median(limits)}, figures=figures)
