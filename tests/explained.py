"""A small operation for tests of what chooses: its explanation, operands and result."""

from __future__ import annotations

import numpy as np

import fompi
from fompi import Shard, Spec


def whole(shape, *seed):
    """Whole numbers, so that sums and products are exact."""
    return np.random.default_rng(seed).integers(0, 10, shape).astype(np.float64)


def scatter(own, rows=24, machine="gigabit", k=8):
    """matmul_reduce_scatter: the explanation, x and w of this rank, and its result."""
    size, n = own.size, 6
    x = Spec((rows, k * size), "float64", Shard(1))
    w = Spec((k * size, n), "float64", Shard(0))
    explained = fompi.explain(fompi.matmul_reduce_scatter, x, w, ranks=size, machine=machine)
    xs, ws = ([whole(shape, i, r) for r in range(size)] for i, shape in enumerate(((rows, k), (k, n))))
    total = sum(a @ b for a, b in zip(xs, ws, strict=True))
    own_rows = explained.sizes.rows
    first = sum(own_rows[: own.rank])
    return explained, xs[own.rank], ws[own.rank], total[first : first + own_rows[own.rank]]
