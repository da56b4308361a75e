"""The grid of fused operations on real GEMMs, and how they run without overlap: what several suites share.

Every rank multiplies M x K by K x N in float32, and M x N elements travel: the product, or the operand of an
all-gather. So the messages take the same time for every K (twice as long for an all-reduce), and the kernel's time is
proportional to K.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np

from fompi.bench.measure import Bench, Call
from fompi.bench.rivals import OPERATIONS, Array, blocking
from fompi.tuning.rounds import Figure

M = 2048
KS, QUICK_KS = (512, 1024, 2048, 4096), (512,)
KERNEL = "kernel alone"
UNFUSED = UNFUSED_P2P, BLOCKING = "unfused, fompi P2P", "unfused, mpi4py blocking"

MOST_SLOWER = 1.02
"""The target for fompi / without overlap."""


@dataclass(frozen=True)
class FusedCase:
    """One operation and the size of its kernel on every rank: M x K x N."""

    operation: str
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.operation}, M={self.m} N={self.n} K={self.k}"

    def operands(self, rank: int, size: int) -> tuple[Array, Array]:
        """x and w of a rank."""
        generator = np.random.default_rng([rank, self.k])
        x, w = (generator.standard_normal(shape, np.float32) for shape in self.shapes(size))
        return x, w

    @property
    def gathers(self) -> bool:
        return self.operation == "all_gather_matmul"

    def shapes(self, size: int) -> list[tuple[int, int]]:
        """Those of x and w of a rank."""
        m, inner, outer = self.product
        return [(m // size if self.gathers else m, inner), (inner, outer)]

    def reference(self, rank: int, size: int) -> Array:
        """The result of a rank, in float64."""
        operands = [[t.astype(float) for t in self.operands(source, size)] for source in range(size)]
        if self.gathers:
            return np.concatenate([x for x, _ in operands]) @ operands[rank][1]
        rows = self.m // size
        own = slice(None) if self.operation == "matmul_all_reduce" else slice(rank * rows, (rank + 1) * rows)
        terms = [x[own] @ w for x, w in operands]
        return np.concatenate(terms) if self.operation == "matmul_all_to_all" else sum(terms[1:], terms[0])

    @property
    def product(self) -> tuple[int, int, int]:
        """The sizes of the product of a rank: rows, the inner dimension, columns."""
        inner, outer = (self.n, self.k) if self.gathers else (self.k, self.n)
        return self.m, inner, outer

    def sent(self, size: int) -> int:
        """Bytes that each rank sends."""
        return self.m * self.n * 4 * (size - 1) // size * (2 if self.operation == "matmul_all_reduce" else 1)


def grid(quick: bool) -> list[FusedCase]:
    """Each operation with each K."""
    edge, ks = (M // 4, QUICK_KS) if quick else (M, KS)
    return [FusedCase(operation, edge, edge, k) for operation in OPERATIONS for k in ks]


def cases_of(shape: tuple[int, int, int], size: int) -> list[FusedCase]:
    """Every fused operation on the global shapes x[m, k] @ w[k, n].

    Sizes are rounded up to multiples of `size`, because the rivals need even shards.
    """
    m, k, n = (-(-total // size) * size for total in shape)
    rows = -(-m // size**2) * size  # each rank has own rows and sends some to each other
    return [
        FusedCase("all_gather_matmul", m, k, n // size),
        FusedCase("matmul_reduce_scatter", m, n, k // size),
        FusedCase("matmul_all_reduce", m, n, k // size),
        FusedCase("matmul_all_to_all", rows, n, k),
    ]


def kernel_of(case: FusedCase) -> Call:
    """The product of one rank, in one call."""
    m, inner, outer = case.product
    a, b = np.ones((m, inner), np.float32), np.ones((inner, outer), np.float32)
    return partial(np.matmul, a, b, out=np.empty((m, outer), np.float32))


def without_overlap(bench: Bench, held: ExitStack, case: FusedCase) -> dict[str, Call]:
    """The operation without overlap: by messages of fompi, bound until `held` closes it, and by the MPI library."""
    x, w = case.operands(bench.comm.rank, bench.comm.size)
    return {
        **bench.by_schedules(held, case.operation, {UNFUSED_P2P: {"schedule": "unfused_p2p"}}, x=x, w=w),
        BLOCKING: blocking(case.operation, bench.cluster.own, x, w),
    }


def low_end(slower: Figure, most: float | None) -> Figure:
    """The low end of the interval of a ratio that should not be much above 1."""
    assert slower.interval is not None
    return Figure(f"low end of {slower.name}", slower.interval.low, most=most)
