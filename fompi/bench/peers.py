"""The fused operations compared with their peers, on real GEMMs: mpirun -n 2 python -m fompi bench peers

Every rank multiplies M x K by K x N in float32, and M x N elements travel: the product, or the operand of an
all-gather. So the messages take the same time for every K (twice as long for an all-reduce), and the kernel's time is
proportional to K.

Peers run in one process, one after the other. Their threads sleep when they have nothing to do. Each peer is checked
before it is timed. A peer that cannot run is in the table with the reason.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from fompi.bench.cluster import TcpHosts
from fompi.bench.measure import Bench, Call, schedules
from fompi.bench.rivals import plain_mpi
from fompi.bench.rivals.gloo import Gloo
from fompi.bench.rivals.rival import OPERATIONS, Array
from fompi.bench.rivals.xla import Xla
from fompi.tuning.rounds import Figure, Row, geometric_mean, texts

M = 2048
KS, QUICK_KS = (512, 1024, 2048, 4096), (512,)
SLICES, QUICK_SLICES = (2, 4, 8), (2,)
FUSED = schedules({"direct": (1, 2, 4, 8, (1, 2, 4), (4, 2, 1))})
KERNEL, LINK = "kernel alone", "link"
UNFUSED_P2P, BLOCKING, PAIRWISE = "unfused, fompi P2P", "unfused, mpi4py blocking", "unfused, mpi4py P2P"
UNFUSED = (UNFUSED_P2P, BLOCKING, PAIRWISE)

MOST_SLOWER, LEAST_SLICED, LEAST_SLICED_CASE, LEAST_OTHERS = 1.02, 1.0, 0.97, 1.3
"""Targets: fompi / without overlap; slices / fompi as a mean of all rows, and in each row; other peers / fompi."""

BALANCED = (0.5, 2.0)
"""The range of T_m / T_c in which rows count against other peers. Elsewhere overlap can gain little."""

SWITCH_SECONDS = 1e-4
"""How often Python switches threads. Helpers of rivals poll while kernels run, and Python's 5 ms would delay them."""


@dataclass(frozen=True)
class PeerCase:
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


def cases(quick: bool) -> list[PeerCase]:
    """The grid of the suites `fused` and `peers`."""
    edge, ks = (M // 4, QUICK_KS) if quick else (M, KS)
    return [PeerCase(operation, edge, edge, k) for operation in OPERATIONS for k in ks]


def cases_of(shape: tuple[int, int, int], size: int) -> list[PeerCase]:
    """Every fused operation on the global shapes x[m, k] @ w[k, n].

    Sizes are rounded up to multiples of `size`, because the rivals need even shards.
    """
    m, k, n = (-(-total // size) * size for total in shape)
    rows = -(-m // size**2) * size  # each rank has own rows and sends some to each other
    return [
        PeerCase("all_gather_matmul", m, k, n // size),
        PeerCase("matmul_reduce_scatter", m, n, k // size),
        PeerCase("matmul_all_reduce", m, n, k // size),
        PeerCase("matmul_all_to_all", rows, n, k),
    ]


def kernel_of(case: PeerCase) -> Call:
    """The product of one rank, in one call."""
    m, inner, outer = case.product
    a, b = np.ones((m, inner), np.float32), np.ones((inner, outer), np.float32)
    return partial(np.matmul, a, b, out=np.empty((m, outer), np.float32))


def rows(bench: Bench) -> list[Row]:
    """A row for every operation and K, and a summary."""
    slices = QUICK_SLICES if bench.quick else SLICES
    with frameworks(bench.cluster, slices) as (peers, absent):
        measured_rows = [measured(bench, case, slices, peers, absent) for case in bench.each(cases(bench.quick))]
        return [*measured_rows, summary(bench, measured_rows)]


Peer = Callable[[str, Array, Array], Call]


@contextmanager
def frameworks(cluster: TcpHosts, slices: Sequence[int]) -> Iterator[tuple[dict[str, Peer], dict[str, str]]]:
    """The peers by name, and the reason for each peer that cannot run here. Collective."""
    comm = cluster.comm
    if cluster.shared:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    peers: dict[str, Peer] = {}
    absent: dict[str, str] = {}
    with ExitStack() as held:
        held.callback(sys.setswitchinterval, before)

        def start(name: str, module: str, make: Callable[[str], Any]) -> Any:
            """The result of `make(address)`. None if a rank fails.

            All ranks import the module before any rank connects. So no rank waits for one that cannot import it.
            """
            started: list[Any] = []
            place = cluster.rendezvous()
            reason = failure(comm, lambda: import_module(module)) or failure(comm, lambda: started.append(make(place)))
            if reason:
                absent[name] = reason
                return None
            held.callback(started[0].close)
            return started[0]

        if gloo := start("gloo", "torch", lambda place: Gloo(comm, place)):
            peers["gloo blocking"] = gloo.blocking
            peers.update({f"gloo, {s} slices": partial(gloo.slices, s) for s in slices})
        if xla := start("JAX", "jax", lambda place: Xla(comm, place)):
            peers |= {"JAX collectives": xla.collectives, "JAX ppermute ring": xla.ring}
        yield peers, absent


def failure(comm: Any, do: Callable[[], object]) -> str:
    """Why a rank cannot do this. Empty if all ranks can. Collective."""
    reason = ""
    try:
        do()
    except ModuleNotFoundError as error:
        reason = f"{error.name} is not installed"
    except Exception as error:  # a foreign library may raise anything: the table shows it
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return next(filter(None, texts(comm, reason)), "")


def without_fompi(bench: Bench, held: ExitStack, case: PeerCase, slices: Sequence[int]) -> dict[str, Call]:
    """The operation without overlap, and by mpi4py in slices, bound until `held` closes them."""
    mpi, operation = bench.mpi, case.operation
    x, w = case.operands(bench.comm.rank, bench.comm.size)
    return {
        **bench.by_schedules(held, operation, {UNFUSED_P2P: {"schedule": "unfused_p2p"}}, x=x, w=w),
        BLOCKING: plain_mpi.blocking(operation, mpi, x, w, held),
        PAIRWISE: plain_mpi.pairwise(operation, mpi, x, w, held),
        **{f"{s} slices, library": plain_mpi.library_slices(operation, mpi, x, w, held, s) for s in slices},
        **{f"{s} slices, P2P": plain_mpi.pairwise(operation, mpi, x, w, held, s) for s in slices},
    }


def measured(
    bench: Bench, case: PeerCase, slices: Sequence[int], peers: Mapping[str, Peer], absent: Mapping[str, str]
) -> Row:
    """Check the contestants, time them in rounds with the bare kernel and the bare link, and compare."""
    comm, cluster = bench.comm, bench.cluster
    x, w = case.operands(comm.rank, comm.size)
    with ExitStack() as held:
        calls = {
            **bench.by_schedules(held, case.operation, FUSED, x=x, w=w),
            **without_fompi(bench, held, case, slices),
            **{name: peer(case.operation, x, w) for name, peer in peers.items()},
        }
        errors = bench.checked(calls, case.reference(comm.rank, comm.size))
        calls[KERNEL] = kernel_of(case)
        if not cluster.shared:
            calls[LINK] = lambda: cluster.exchange(case.sent(comm.size))
        row = bench.row_of(str(case), bench.times(calls, monitor=cluster.monitor), absent=absent, errors=errors)
    return replace(
        row,
        base=row.best(UNFUSED),
        limits={"T_c": row.median(KERNEL)} | ({} if cluster.shared else {"link": row.median(LINK)}),
        figures=figures(bench, row, row.best(FUSED)),
        progress=progress_of(bench),
    )


def progress_of(bench: Bench) -> str:
    """How the messages of a row progressed, and how often others disturbed it, in words."""
    return f"{bench.progress}; slices of mpi4py: a helper that polls; {bench.cluster.runs()}"


def figures(bench: Bench, row: Row, best: str) -> list[Figure]:
    """The best schedule of fompi against the best of each kind of rival. Targets apply only between hosts."""
    others = [name for name in row.samples if name.startswith((BLOCKING, PAIRWISE, "gloo", "JAX"))]
    whole = [name for name in others if not name.startswith("gloo, ")]  # we did not slice their asynchronous calls
    sliced = [name for name in row.samples if name.endswith((" slices, library", " slices, P2P"))]
    unfused, balance = row.best(UNFUSED), balance_of(row)
    compared = [
        row.ratio(unfused, best, limit=None if balance is None else (1 + balance) / max(1, balance)),
        low_end(row.ratio(best, unfused), most=bench.asked(MOST_SLOWER)),
        row.ratio(row.best(sliced), best, least=bench.asked(LEAST_SLICED_CASE)),
        row.ratio(row.best(others), best),
        row.ratio(row.best(whole), best),
    ]
    return compared if balance is None else [*compared, Figure("T_m / T_c", balance)]


def balance_of(row: Row) -> float | None:
    """T_m / T_c. None if there is no link."""
    return row.median(LINK) / row.median(KERNEL) if LINK in row.samples else None


def low_end(slower: Figure, most: float | None) -> Figure:
    """The low end of the interval of a ratio that should not be much above 1."""
    assert slower.interval is not None
    return Figure(f"low end of {slower.name}", slower.interval.low, most=most)


def summary(bench: Bench, measured_rows: Sequence[Row]) -> Row:
    """Geometric means: for slices over all rows, for other peers over the balanced rows."""
    balanced = [row for row in measured_rows if BALANCED[0] <= (balance_of(row) or 1.0) <= BALANCED[1]]
    words = f"geometric mean of {len(balanced)} balanced rows"
    kinds = [("best slices / fompi, geometric mean", 2, measured_rows, LEAST_SLICED)]
    if balanced:
        kinds.append((f"best other peer, gloo in slices too / fompi, {words}", 3, balanced, LEAST_OTHERS))
        kinds.append((f"best other peer as it comes / fompi, {words}", 4, balanced, LEAST_OTHERS))
    means = [
        Figure(name, geometric_mean(row.figures[kind].value for row in rows), least=bench.asked(least))
        for name, kind, rows, least in kinds
    ]
    return Row("all rows", str(bench.cluster), figures=means)
