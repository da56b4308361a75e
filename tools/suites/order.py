"""What the order of sums costs.

    mpirun -n 4 python -m fompi bench tools/suites/order.py

| row                   | compares                                                                                  |
|-----------------------|-------------------------------------------------------------------------------------------|
| `all_reduce`, ...     | the sum of the planner's choice, in the order of ranks, and of 2 N leaves on N ranks      |
| `product m x k x n`   | a product of this rank by the BLAS library, as chains, and as chains of 8 parts           |
| `matmul_all_reduce`   | a product with its sum: any order, that of ranks, and of 2 N leaves                       |

Targets: a sum in the order of ranks takes at most 10 % longer from 1 MiB on, with the links as the limit; chains take
at most 25 % longer than BLAS. Products run in one thread (OMP_NUM_THREADS=1), or in as many as BLAS has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

import fompi
from fompi.backends import chains
from fompi.bench.measure import Bench, Calls
from fompi.tuning.rounds import Row

MIB = 1 << 20

MOST_OF_SUM, MOST_OF_PRODUCT = 1.10, 1.25

SUMS = [(name, nbytes) for name in ("all_reduce", "reduce_scatter") for nbytes in (MIB, 4 * MIB, 16 * MIB)]

PRODUCTS = ((1, 4096, 1024), (64, 1024, 1024), (512, 1024, 1024), (2048, 1024, 4096), (512, 4096, 1024))

QUICK_PRODUCTS = ((33, 64, 40),)

ANY, RANKS, LEAVES = "any", "ranks", "leaves"


def rows(bench: Bench) -> list[Row]:
    products = QUICK_PRODUCTS if bench.quick else PRODUCTS
    makers: dict[str, Callable[[Bench], Row]] = {}
    for name, nbytes in SUMS[::3] if bench.quick else SUMS:
        title = f"{name} of {nbytes // MIB} MiB"
        makers[title] = partial(_sum, title=title, operation=name, nbytes=nbytes)
    for shape, dtype in product(products, ("float32", "float64")):
        title = f"product {'x'.join(map(str, shape))} {dtype}"
        makers[title] = partial(_product, title=title, shape=shape, dtype=dtype)
    return bench.rows({**makers, "matmul_all_reduce": _fused})


def _drawn(bench: Bench, m: int, k: int, n: int, dtype: str = "float32") -> Iterator[Any]:
    """x and w of a product."""
    random = np.random.default_rng(bench.comm.rank)
    return (random.standard_normal(shape, np.float32).astype(dtype) for shape in ((m, k), (k, n)))


def _in_orders(bench: Bench, title: str, call: Callable[..., Any], most: float | None = None) -> Row:
    orders = {ANY: "any", RANKS: "ranks", LEAVES: str(fompi.Canonical(2 * bench.comm.size))}
    calls = {name: partial(call, comm=bench.comm, order=order) for name, order in orders.items()}
    row = bench.row(title, calls, base=ANY)
    return replace(row, figures=[row.ratio(RANKS, ANY, most=most), row.ratio(LEAVES, ANY, most=most)])


def _sum(bench: Bench, title: str, operation: str, nbytes: int) -> Row:
    x = np.random.default_rng(bench.comm.rank).standard_normal((nbytes // 1024, 256), np.float32)
    return _in_orders(bench, title, partial(getattr(fompi, operation), x), bench.asked(MOST_OF_SUM))


def _product(bench: Bench, title: str, shape: tuple[int, int, int], dtype: str) -> Row:
    x, w = _drawn(bench, *shape, dtype)
    y = np.empty((len(x), w.shape[1]), dtype)
    calls: Calls = {
        "BLAS": partial(np.matmul, x, w, out=y),
        "chains": partial(chains.product, x, w, y),
        "8 leaves": partial(chains.product, x, w, y, 8),
    }
    row = bench.row_of(title, bench.times(calls, idle=0.0), base="BLAS", progress="")
    most = None if bench.quick else MOST_OF_PRODUCT
    return replace(row, figures=[row.ratio(each, "BLAS", most=most) for each in ("chains", "8 leaves")])


def _fused(bench: Bench) -> Row:
    shape = QUICK_PRODUCTS[0] if bench.quick else (1024, 1024, 1024)
    title = f"matmul_all_reduce {'x'.join(map(str, shape))}"
    return _in_orders(bench, title, partial(fompi.matmul_all_reduce, *_drawn(bench, *shape)))
