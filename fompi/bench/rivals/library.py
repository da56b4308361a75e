"""The MPI library's own collectives, and the fused operations by them: the product and the collective in turn.

    all_gather_matmul      all_gather(x) @ w
    matmul_reduce_scatter  reduce_scatter(x @ w)
    matmul_all_reduce      all_reduce(x @ w)
    matmul_all_to_all      all_to_all(x @ w)

Rows of a rank must divide by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
OPERATIONS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all")


def of_mpi(comm: Any, collective: str) -> Callable[[Array, Array], object]:
    """The MPI library's own blocking call, from one array to another."""
    calls: dict[str, Callable[[Array, Array], object]] = {
        "all_gather": comm.Allgather,
        "reduce_scatter": comm.Reduce_scatter_block,
        "all_to_all": comm.Alltoall,
        "all_reduce": comm.Allreduce,
    }
    return calls[collective]


def result_rows(operation: str, size: int, rows: int) -> int:
    """The rows of a rank's result, if the rank's x has `rows`."""
    if operation == "all_gather_matmul":
        return rows * size
    return rows // size if operation == "matmul_reduce_scatter" else rows


def blocking(operation: str, comm: Any, x: Array, w: Array) -> Callable[[], Array]:
    """The product and the library's blocking collective, one after the other. Buffers are made once."""
    collective = of_mpi(comm, operation.removeprefix("matmul_").removesuffix("_matmul"))
    y = np.empty((result_rows(operation, comm.Get_size(), len(x)), w.shape[1]), x.dtype)
    gathers = operation == "all_gather_matmul"
    between = np.empty((len(y), x.shape[1]) if gathers else (len(x), w.shape[1]), x.dtype)

    def call() -> Array:
        if gathers:
            collective(x, between)
            np.matmul(between, w, out=y)
        else:
            np.matmul(x, w, out=between)
            collective(between, y)
        return y

    return call
