"""A small operation for the tests of the planner and of autotuning: its explanation, operands and result."""

from __future__ import annotations

import numpy as np

import fompi
from fompi import Shard, Spec


def whole(shape, *seed):
    """A random array of small integers as float64, so that sums and products are exact."""
    return np.random.default_rng(seed).integers(0, 10, shape).astype(np.float64)


def scatter(own, rows=24, machine="gigabit", k=8):
    """The explanation of a matmul_reduce_scatter on the communicator `own`, and x, w and y of this rank."""
    size, n = own.size, 6
    x = Spec((rows, k * size), "float64", Shard(1))
    w = Spec((k * size, n), "float64", Shard(0))
    explanation = fompi.explain(fompi.matmul_reduce_scatter, x, w, ranks=size, machine=machine)
    xs, ws = ([whole(shape, i, r) for r in range(size)] for i, shape in enumerate(((rows, k), (k, n))))
    total = sum(a @ b for a, b in zip(xs, ws, strict=True))
    own_rows = explanation.sizes.rows
    first = sum(own_rows[: own.rank])
    return explanation, xs[own.rank], ws[own.rank], total[first : first + own_rows[own.rank]]
