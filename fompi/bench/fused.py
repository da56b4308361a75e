"""The fused operations on real GEMMs, with overlap and without: what `fompi try` and the benchmarks measure.

Every rank multiplies M x K by K x N in float32, and M x N elements travel: the product, or the operand of an
all-gather. So the messages take the same time for every K (twice as long for an all-reduce), and the kernel's time is
proportional to K. A few rounds before the measurement choose the schedule of fompi.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

import fompi
from fompi.bench.measure import DEFAULT, Bench, Call, Calls, schedules
from fompi.planner.candidates import UNEVEN
from fompi.tuning.rounds import Row

Array = np.ndarray[Any, Any]
OPERATIONS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all")

KERNEL = "kernel alone"
UNFUSED = UNFUSED_P2P, BLOCKING = "unfused, fompi P2P", "unfused, mpi4py blocking"

CANDIDATES = schedules({"direct": (1, 2, 4, 8, *UNEVEN), "ring": (1, 2, 4, 8)})
"""The schedules of fompi, by the names of contestants."""

PILOT_ROUNDS = 5
"""Rounds in which the best candidate is chosen."""

MOST_ROUNDED = 0.5
"""The most relative error of a result whose messages had a wire. Two roundings of int4 may be off by a seventh each."""


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


# ----------------------------------------------------------------------------------------------------------- the rows


Rivals = Callable[[Bench, ExitStack, FusedCase], Mapping[str, Call]]
"""The contestants besides fompi, bound until the stack closes them. The names of those without overlap begin so."""


def measured(
    bench: Bench,
    case: FusedCase,
    wire: str = "",
    rivals: Rivals = without_overlap,
    beside: Calls = MappingProxyType({}),
) -> Row:
    """The best schedule of fompi, the default one, and rivals. `beside` them: calls that have no result.

    With a `wire` also the default schedule with messages of this form, under the name of the wire.
    """
    comm, timed = bench.comm, bench.timed
    x, w = case.operands(comm.rank, comm.size)
    reference = case.reference(comm.rank, comm.size)
    operation = partial(getattr(fompi, case.operation), x, w)
    default = partial(operation, comm=comm)
    with ExitStack() as held:
        able = {name: how for name, how in CANDIDATES.items() if is_available(case.operation, how)}
        candidates = bench.by_schedules(held, case.operation, able, x=x, w=w)
        others: dict[str, Call] = {DEFAULT: default, **rivals(bench, held, case)}
        errors = bench.checked(candidates | others, reference)
        if wire:
            others[wire] = partial(operation, comm=comm.using(wire=wire))
            errors |= bench.checked({wire: others[wire]}, reference, MOST_ROUNDED)
        unfused = {name: others[name] for name in unfused_of(others)}
        pilot = bench.times(candidates | unfused, PILOT_ROUNDS, timed=timed)
        best, opponent = (min(names, key=lambda name: min(pilot[name])) for names in (candidates, unfused))
        calls = {KERNEL: kernel_of(case), **beside, best: candidates[best], **others}
        row = bench.row_of(str(case), bench.times(calls, timed=timed), base=best, errors=errors, opponent=opponent)
    return replace(row, figures=[row.ratio(row.best(unfused_of(row.samples)), best), row.ratio(DEFAULT, best)])


def unfused_of(names: Iterable[str]) -> list[str]:
    """Those of the contestants that do not overlap."""
    return [name for name in names if name.startswith("unfused")]


def is_available(operation: str, how: dict[str, Any]) -> bool:
    return operation != "matmul_all_to_all" or how["schedule"] == "direct"
