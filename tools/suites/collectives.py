"""Plain collectives against the link and the MPI library's own.

    mpirun -n 4 python -m fompi bench tools/suites/collectives.py

| operation        | x on each rank | result on each rank | bytes that each rank sends  |
|------------------|----------------|---------------------|-----------------------------|
| `all_gather`     | total / N      | total               | (N - 1) / N of total        |
| `reduce_scatter` | total          | total / N           | (N - 1) / N of total        |
| `all_to_all`     | total          | total               | (N - 1) / N of total        |
| `all_reduce`     | total          | total               | twice (N - 1) / N of total  |

On a device (`--device`) a row has the collective, bound and as a user calls it, MPI's own through host memory, and the
copies that the path needs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

import fompi
from fompi.bench.fused import of_mpi
from fompi.bench.measure import DEFAULT, Bench, Call, HostPlace
from fompi.schedules.registry import can_move
from fompi.tuning.rounds import Row
from links import ring

OPERATIONS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")

MIB = 1 << 20

COLUMNS = 256
"""Columns of every tensor, in float32."""

LEAST_OF_LINK, LEAST_OF_LINK_ALL_REDUCE, LEAST_OF_LIBRARY = 0.95, 0.92, 0.97
"""Targets: link / fompi, the same for an all-reduce, and the library's own / fompi."""

BOUND, THROUGH_HOST, COPIES = "fompi, bound", "MPI through host memory", "copies alone"
"""The contestants on a device, besides the default schedule."""

CANDIDATES: dict[str, dict[str, Any]] = {
    "fompi direct": {"schedule": "direct"},
    "fompi direct, window 1": {"schedule": "direct", "window": 1},
    "fompi direct, 4 slices, window 1": {"schedule": "direct", "slices": 4, "window": 1},
    "fompi direct, 4 slices, window 2": {"schedule": "direct", "slices": 4, "window": 2},
    "fompi direct, 8 slices, window 2": {"schedule": "direct", "slices": 8, "window": 2},
    "fompi direct, 16 slices, window 2": {"schedule": "direct", "slices": 16, "window": 2},
    "fompi pairwise": {"schedule": "pairwise"},
    "fompi pairwise, 4 slices": {"schedule": "pairwise", "slices": 4},
    "fompi pairwise, 8 slices": {"schedule": "pairwise", "slices": 8},
    "fompi pairwise, 16 slices": {"schedule": "pairwise", "slices": 16},
    "fompi ring, 4 slices": {"schedule": "ring", "slices": 4},
}


def totals_of(place: HostPlace) -> tuple[int, ...]:
    """The bytes of the global tensor, row by row."""
    if place.is_software:
        return (MIB,)
    return (4 * MIB, 16 * MIB, 64 * MIB) if place.device is None else (4 * MIB, 64 * MIB, 256 * MIB)


def rows(bench: Bench) -> list[Row]:
    return _rows(bench, measured)


def rows_on_device(bench: Bench) -> list[Row]:
    return _rows(bench, on_device)


def _rows(bench: Bench, measure: Callable[..., Row]) -> list[Row]:
    totals = totals_of(bench.place)[: 1 if bench.quick else None]
    return bench.rows(
        {_title(*case): partial(measure, operation=case[0], total=case[1]) for case in product(OPERATIONS, totals)}
    )


def _title(operation: str, total: int) -> str:
    return f"{operation} of {total // MIB} MiB"


def sent(operation: str, total: int, size: int) -> int:
    """The bytes that each rank sends, and receives."""
    return total * (size - 1) // size * (2 if operation == "all_reduce" else 1)


def measured(bench: Bench, operation: str, total: int) -> Row:
    size, cluster = bench.comm.size, bench.cluster
    x, reference = problem_of(operation, total, bench.comm.rank, size)
    able = {name: how for name, how in CANDIDATES.items() if can_move(how["schedule"], operation, size)}
    with ExitStack() as held:
        calls: dict[str, Call] = {
            "library": library_call(operation, bench.mpi, x, reference.shape),
            **bench.by_schedules(held, operation, able, x=x),
            DEFAULT: partial(getattr(fompi, operation), x, comm=bench.comm),
        }
        errors = bench.checked(calls, reference)
        if not cluster.shared:
            calls["link"] = partial(held.enter_context(ring(cluster)).exchange, sent(operation, total, size))
        row = bench.row(_title(operation, total), calls, base="library", errors=errors)
    best = row.best(CANDIDATES)
    if cluster.shared:
        return replace(row, figures=[row.ratio("library", best)])
    of_link = LEAST_OF_LINK_ALL_REDUCE if operation == "all_reduce" else LEAST_OF_LINK
    figures = [
        row.ratio("link", best, least=of_link, limit=1.0),
        row.ratio("library", best, least=LEAST_OF_LIBRARY),
        row.ratio("library", DEFAULT, least=LEAST_OF_LIBRARY),
    ]
    return replace(row, limits={"link": row.median("link")}, figures=figures)


def on_device(bench: Bench, operation: str, total: int) -> Row:
    """A collective on a device, besides MPI's own on copies in host memory. Its limit is the copies alone."""
    place, call = bench.place, getattr(fompi, operation)
    x, reference = problem_of(operation, total, bench.comm.rank, bench.comm.size)
    there, exchange = place.array(x), library_call(operation, bench.mpi, x, reference.shape)

    def through_host() -> Any:
        x[...] = place.read(there)
        return place.array(exchange())

    with call.bind(there, comm=bench.comm) as step:
        calls = {BOUND: step, DEFAULT: partial(call, there, comm=bench.comm), THROUGH_HOST: through_host}
        timed = {name: place.finished(call) for name, call in calls.items()}
        errors = bench.checked(timed, reference)
        timed[COPIES] = place.finished(copies(bench, sent(operation, total, bench.comm.size)))
        row = bench.row(_title(operation, total), timed, base=THROUGH_HOST, errors=errors)
    figures = [row.ratio(COPIES, BOUND, limit=1.0), row.ratio(THROUGH_HOST, BOUND), row.ratio(THROUGH_HOST, DEFAULT)]
    return replace(row, limits={COPIES: row.median(COPIES)}, figures=figures)


def copies(bench: Bench, nbytes: int) -> Callable[[], None]:
    """The copies that no path avoids: what a rank receives arrives by one copy on the device.

    A staged message needs two on its way, down and up.
    """
    comm, backend, number = bench.comm, bench.place.backend, max(1, nbytes // 4)
    source, target = (bench.place.array(np.ones(number, np.float32)) for _ in range(2))
    paths, peers = comm.paths(bench.place.device), [peer for peer in range(comm.size) if peer != comm.rank]
    if not any(paths.is_staged(comm.rank, peer) for peer in peers):
        return lambda: backend.copy((target, source))
    host = backend.empty(comm.engine.arena, (number,), "float32", "host")
    down = backend.bind("download", [source], [host], ["float32"], ["float32"])
    up = backend.bind("upload", [host], [target], ["float32"], ["float32"])

    def staged() -> None:
        backend.leave([up([down([])])])

    return staged


def problem_of(operation: str, total: int, rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """x of this rank, and its correct result. The values are whole numbers, so sums are exact in any order."""
    length = total // (4 * COLUMNS) // size  # rows of a shard
    rows = length if operation == "all_gather" else length * size
    own = slice(rank * length, (rank + 1) * length)

    def x_of(source: int) -> np.ndarray:
        generator = np.random.default_rng([source, rows])
        return generator.integers(0, 100, (rows, COLUMNS), dtype=np.int32).astype(np.float32)

    x = x_of(rank)
    if operation == "all_gather":
        return x, np.concatenate([x_of(source) for source in range(size)])
    if operation == "all_to_all":
        return x, np.concatenate([x_of(source)[own] for source in range(size)])
    summed = x.astype(float)
    for source in range(size):
        if source != rank:
            summed += x_of(source)
    return x, summed if operation == "all_reduce" else summed[own]


def library_call(operation: str, comm: Any, x: np.ndarray, shape: tuple[int, ...]) -> Callable[[], np.ndarray]:
    """The MPI library's own blocking call."""
    y, collective = np.empty(shape, x.dtype), of_mpi(comm, operation)

    def call() -> np.ndarray:
        collective(x, y)
        return y

    return call
