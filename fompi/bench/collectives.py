"""Plain collectives against the wire and the MPI library's own: mpirun -n 4 python -m fompi bench collectives

| operation        | x on each rank | result on each rank | bytes that each rank sends  |
|------------------|----------------|---------------------|-----------------------------|
| `all_gather`     | total / N      | total               | (N - 1) / N of total        |
| `reduce_scatter` | total          | total / N           | (N - 1) / N of total        |
| `all_to_all`     | total          | total               | (N - 1) / N of total        |
| `all_reduce`     | total          | total               | twice (N - 1) / N of total  |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import fompi
from fompi.base.layout import Shard, Spec
from fompi.bench.cluster import TcpHosts
from fompi.bench.options import Options
from fompi.plans.meaning import layouts
from fompi.schedules.registry import can_move
from fompi.tuning.rounds import Contestant, Row, alternate, calls_of, checked, relative_error

OPERATIONS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
MIB = 1 << 20

TOTALS, QUICK_TOTALS = (4 * MIB, 16 * MIB, 64 * MIB), (4 * MIB,)
"""Bytes of the global tensor."""

COLUMNS = 256
"""Columns of every tensor, in float32."""

LEAST_OF_WIRE, LEAST_OF_WIRE_ALL_REDUCE, LEAST_OF_NATIVE = 0.95, 0.92, 0.97
"""Targets: wire / fompi, the same for an all-reduce, and the library's own / fompi."""

DEFAULT = "fompi, default schedule"
"""The contestant that is called as a user calls it: without binding, without naming a schedule."""

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


def rows(comm: Any, options: Options) -> list[Row]:
    totals = QUICK_TOTALS if options.quick else TOTALS
    with TcpHosts(comm.link.comm) as cluster:
        cases = [(name, total) for name in OPERATIONS for total in totals]
        shown = options.each(cases, lambda case: _title(*case))
        return [measured(comm, cluster, *case, options.rounds) for case in shown]


def _title(operation: str, total: int) -> str:
    return f"{operation} of {total // MIB} MiB"


def measured(comm: Any, cluster: TcpHosts, operation: str, total: int, rounds: int) -> Row:
    size = comm.size
    x, reference = problem_of(operation, total, comm.rank, size)
    error = partial(relative_error, reference=reference)
    contestants = {"native": Contestant(native(operation, comm.link.comm, x, reference.shape), error)}
    with ExitStack() as bound:
        for name, how in CANDIDATES.items():
            if can_move(how["schedule"], operation, size):
                step = bound.enter_context(fompi.bind(plan(operation, x, size, **how), comm=comm, x=x))
                contestants[name] = Contestant(step, error)
        contestants[DEFAULT] = Contestant(partial(getattr(fompi, operation), x, comm=comm), error)
        errors = checked(comm.link.comm, contestants)
        calls = calls_of(contestants)
        if not cluster.shared:
            sent = total * (size - 1) // size * (2 if operation == "all_reduce" else 1)
            calls["wire"] = lambda: cluster.exchange(sent)
        samples = alternate(comm.link.comm, calls, rounds, idle=cluster.idle)
    row = Row(_title(operation, total), str(cluster), samples, "native", errors=errors)
    best = row.best(CANDIDATES)
    if cluster.shared:
        return replace(row, figures=[row.ratio("native", best)], progress=progress(comm))
    of_wire = LEAST_OF_WIRE_ALL_REDUCE if operation == "all_reduce" else LEAST_OF_WIRE
    return replace(
        row,
        limits={"wire": row.median("wire")},
        figures=[
            row.ratio("wire", best, least=of_wire, limit=1.0),
            row.ratio("native", best, least=LEAST_OF_NATIVE),
            row.ratio("native", DEFAULT, least=LEAST_OF_NATIVE),
        ],
        progress=progress(comm),
    )


def progress(comm: Any) -> str:
    """How fompi's messages progress here, in words."""
    return f"progress of fompi: {comm.engine.progress_mode}"


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


def native(operation: str, comm: Any, x: np.ndarray, shape: tuple[int, ...]) -> Callable[[], np.ndarray]:
    """The MPI library's own blocking call."""
    y = np.empty(shape, x.dtype)
    collective = {
        "all_gather": comm.Allgather,
        "reduce_scatter": comm.Reduce_scatter_block,
        "all_to_all": comm.Alltoall,
        "all_reduce": comm.Allreduce,
    }[operation]

    def call() -> np.ndarray:
        collective(x, y)
        return y

    return call


def plan(operation: str, *tensors: Any, **how: Any) -> fompi.Plan:
    """plan(operation, x, ..., size): a plan for these shards. Every rank's shards have the same shapes."""
    *operands, size = tensors
    return fompi.plan(operation, *specs(operation, size, *operands), ranks=size, **how)


def specs(operation: str, size: int, *tensors: np.ndarray) -> Iterator[Spec]:
    """The global tensors of these shards. Every rank's shards have the same shapes."""
    for tensor, layout in zip(tensors, layouts(operation, len(tensors)), strict=True):
        shape = list(tensor.shape)
        if isinstance(layout, Shard):
            shape[layout.dim] *= size
        yield Spec(tuple(shape), str(tensor.dtype), layout)
