"""How the rows of a fused operation are cut into slices, for the rivals.

Rows must divide by the number of ranks and of slices. Slices keep the rows in their standard places: slice j is the
j-th part of every shard. An all-reduce may use any run of rows as a slice.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fompi.base.errors import LayoutError
from fompi.bench.fused import Array, result_rows


def piece_rows(operation: str, size: int, rows: int, slices: int) -> int:
    """The rows of a piece: the part of one slice that one rank owns. Raises LayoutError if rows are left over."""
    pieces = slices if operation == "all_gather_matmul" else slices * size
    count, rest = divmod(rows, pieces)
    if rest:
        raise LayoutError(f"{operation}: {rows} rows do not divide by {pieces}")
    return count


class Sliced:
    """One operation on the arrays of a rank: its buffers, in slices of `rows` rows for each rank, and its kernels.

    A sum or an exchange of `product[j]` follows `multiply(j)`. A gather of `own(j)` to `gathered[j]` comes before
    `multiply_gathered(j)`. `matmul(a, b, out=c)` is the kernel.
    """

    def __init__(
        self, operation: str, size: int, x: Array, w: Array, slices: int, matmul: Callable[..., object] = np.matmul
    ):
        self.size, self.slices, self.x, self.w, self.matmul = size, slices, x, w, matmul
        self.columns, self.rows = w.shape[1], piece_rows(operation, size, len(x), slices)
        self.y = np.empty((result_rows(operation, size, len(x)), self.columns), x.dtype)
        shape = (slices, size, self.rows)
        if operation == "all_gather_matmul":
            self.gathered = np.empty((*shape, x.shape[1]), x.dtype)
            self.slice_product = np.empty((size * self.rows, self.columns), x.dtype) if slices > 1 else self.y
        else:
            self.product = np.empty((*shape, self.columns), x.dtype)
        self.y_places = self.y.reshape(-1, slices, self.rows, self.columns)  # [owner, slice]
        self.x_slices: Array | None = None
        if operation == "matmul_all_reduce":  # its slices are runs of rows
            self.x_slices = x.reshape(slices, size * self.rows, -1)
            self.y_slices = self.y.reshape(slices, size * self.rows, -1)
            self.y_parts = self.y.reshape(*shape, -1)
        elif slices == 1:
            self.x_slices = x[None]
        else:
            self.packed = np.empty((size, self.rows, x.shape[1]), x.dtype)

    def own(self, j: int) -> Array:
        """The rows of slice j that this rank has."""
        return self.x[self.run(j)]

    def run(self, j: int) -> slice:
        """Slice j of rows that are one shard."""
        return slice(j * self.rows, (j + 1) * self.rows)

    def multiply_gathered(self, j: int) -> None:
        self.matmul(self.gathered[j].reshape(len(self.slice_product), -1), self.w, out=self.slice_product)
        if self.slices > 1:
            self.y_places[:, j] = self.slice_product.reshape(self.size, self.rows, -1)

    def multiply(self, j: int) -> None:
        if self.x_slices is None:
            np.copyto(self.packed, self.x.reshape(self.size, self.slices, self.rows, -1)[:, j])
            x = self.packed.reshape(-1, self.x.shape[1])
        else:
            x = self.x_slices[j]
        self.matmul(x, self.w, out=self.product[j].reshape(len(x), -1))
