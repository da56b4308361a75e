"""What a rival of the fused operations is, and how it cuts rows into slices.

A rival binds a call that computes one operation on the float32 arrays of one rank:

    all_gather_matmul      all_gather(x) @ w
    matmul_reduce_scatter  reduce_scatter(x @ w)
    matmul_all_reduce      all_reduce(x @ w)
    matmul_all_to_all      all_to_all(x @ w)

Rows must divide by the number of ranks and of slices. Slices keep the rows in their standard places: slice j is the
j-th part of every shard. An all-reduce may use any run of rows as a slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fompi.base.errors import LayoutError

Array = np.ndarray[Any, Any]
OPERATIONS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all")


class Rival(NamedTuple):
    """A call bound to its arrays, and the function that releases what the call holds."""

    call: Callable[[], Any]
    close: Callable[[], None]


def result_rows(operation: str, size: int, rows: int) -> int:
    """The rows of a rank's result, if the rank's x has `rows`."""
    if operation == "all_gather_matmul":
        return rows * size
    return rows // size if operation == "matmul_reduce_scatter" else rows


def piece_rows(operation: str, size: int, rows: int, slices: int) -> int:
    """The rows of a piece: the part of one slice that one rank owns. Raises LayoutError if rows are left over."""
    pieces = slices if operation == "all_gather_matmul" else slices * size
    count, rest = divmod(rows, pieces)
    if rest:
        raise LayoutError(f"{operation}: {rows} rows do not divide by {pieces}")
    return count
