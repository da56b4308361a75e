"""What the order of sums costs: mpirun -n 4 python -m fompi bench order

| row                   | compares                                                                                  |
|-----------------------|-------------------------------------------------------------------------------------------|
| `all_reduce`, ...     | the sum of the planner's choice, in the order of ranks, and of 2 N leaves on N ranks      |
| `product m x k x n`   | a product of this rank by the BLAS library, as chains, and as chains of 8 parts           |
| `matmul_all_reduce`   | a product with its sum: any order, that of ranks, and of 2 N leaves                       |

Targets: a sum in the order of ranks takes at most 10 % longer from 1 MiB on, with the links as the limit; chains take
at most 25 % longer than BLAS. Products run in one thread (OMP_NUM_THREADS=1), or in as many as BLAS has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import fompi
from fompi.backends import chains
from fompi.bench.cluster import TcpHosts
from fompi.bench.collectives import MIB, progress
from fompi.bench.options import Options
from fompi.engine.communicator import Communicator
from fompi.tuning.rounds import Row, alternate

MOST_OF_SUM, MOST_OF_PRODUCT = 1.10, 1.25

SUMS = [(name, nbytes) for name in ("all_reduce", "reduce_scatter") for nbytes in (MIB, 4 * MIB, 16 * MIB)]

PRODUCTS = ((1, 4096, 1024), (64, 1024, 1024), (512, 1024, 1024), (2048, 1024, 4096), (512, 4096, 1024))

QUICK_PRODUCTS = ((33, 64, 40),)

ANY, RANKS, LEAVES = "any", "ranks", "leaves"


def rows(comm: Communicator, options: Options) -> list[Row]:
    makers: dict[str, Callable[..., Row]] = {
        **{_title(*case): partial(_sum, *case) for case in (SUMS[::3] if options.quick else SUMS)},
        **{
            f"product {m}x{k}x{n} {dtype}": partial(_product, m, k, n, dtype)
            for m, k, n in (QUICK_PRODUCTS if options.quick else PRODUCTS)
            for dtype in ("float32", "float64")
        },
        "matmul_all_reduce": _fused,
    }
    with TcpHosts(comm.link.comm, options.quick) as cluster:
        return [makers[name](name, comm, cluster, options) for name in options.each([*makers])]


def _title(operation: str, nbytes: int) -> str:
    return f"{operation} of {nbytes // MIB} MiB"


def _in_orders(comm: Communicator, call: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    orders = {ANY: "any", RANKS: "ranks", LEAVES: str(fompi.Canonical(2 * comm.size))}
    return {name: partial(call, comm=comm, order=order) for name, order in orders.items()}


def _sum(operation: str, nbytes: int, name: str, comm: Communicator, cluster: TcpHosts, options: Options) -> Row:
    x = np.random.default_rng(comm.rank).standard_normal((nbytes // 1024, 256), np.float32)
    calls = _in_orders(comm, partial(getattr(fompi, operation), x))
    samples = alternate(comm.link.comm, calls, options.rounds, idle=cluster.idle)
    row = Row(name, str(cluster), samples, base=ANY, progress=progress(comm))
    most = None if cluster.shared else MOST_OF_SUM
    return replace(row, figures=[row.ratio(RANKS, ANY, most=most), row.ratio(LEAVES, ANY, most=most)])


def _product(
    m: int, k: int, n: int, dtype: str, name: str, comm: Communicator, cluster: TcpHosts, options: Options
) -> Row:
    random = np.random.default_rng(comm.rank)
    x, w = (random.standard_normal(shape).astype(dtype) for shape in ((m, k), (k, n)))
    y = np.empty((m, n), dtype)
    calls: dict[str, Callable[[], object]] = {
        "BLAS": partial(np.matmul, x, w, out=y),
        "chains": partial(chains.product, x, w, y),
        "8 leaves": partial(chains.product, x, w, y, 8),
    }
    row = Row(name, str(cluster), alternate(comm.link.comm, calls, options.rounds), base="BLAS")
    most = None if options.quick else MOST_OF_PRODUCT
    return replace(row, figures=[row.ratio(each, "BLAS", most=most) for each in ("chains", "8 leaves")])


def _fused(name: str, comm: Communicator, cluster: TcpHosts, options: Options) -> Row:
    m, k, n = QUICK_PRODUCTS[0] if options.quick else (1024, 1024, 1024)
    random = np.random.default_rng(comm.rank)
    x, w = (random.standard_normal(shape, np.float32) for shape in ((m, k), (k, n)))
    samples = alternate(
        comm.link.comm, _in_orders(comm, partial(fompi.matmul_all_reduce, x, w)), options.rounds, idle=cluster.idle
    )
    row = Row(f"{name} {m}x{k}x{n}", str(cluster), samples, base=ANY, progress=progress(comm))
    return replace(row, figures=[row.ratio(RANKS, ANY), row.ratio(LEAVES, ANY)])
