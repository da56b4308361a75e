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

import fompi
from fompi.base.layout import slices_in_words
from fompi.bench.cluster import TcpHosts
from fompi.bench.collectives import plan, progress
from fompi.bench.options import Options
from fompi.bench.rivals import plain_mpi
from fompi.bench.rivals.gloo import Gloo
from fompi.bench.rivals.rival import OPERATIONS, Array, Rival
from fompi.bench.rivals.xla import Mpi4jax, Xla
from fompi.tuning.rounds import (
    Contestant,
    Figure,
    Row,
    alternate,
    calls_of,
    checked,
    geometric_mean,
    relative_error,
    texts,
)

M = N = 2048
KS, QUICK_KS = (512, 1024, 2048, 4096), (512,)
SLICES, QUICK_SLICES = (2, 4, 8), (2,)
FUSED: dict[str, dict[str, Any]] = {
    f"fompi direct, {slices_in_words(slices)}": {"schedule": "direct", "slices": slices}
    for slices in (1, 2, 4, 8, (1, 2, 4), (4, 2, 1))
}
KERNEL, WIRE, UNFUSED_P2P = "kernel alone", "wire", "fompi unfused_p2p"
NATIVE, PAIRWISE = "native slices", "P2P slices"
UNFUSED = ("mpi4py blocking", "mpi4py P2P", UNFUSED_P2P)

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
        shapes = [(self.m, self.k), (self.k, self.n)]
        if self.operation == "all_gather_matmul":
            shapes = [(self.m // size, self.n), (self.n, self.k)]
        x, w = (generator.standard_normal(shape, np.float32) for shape in shapes)
        return x, w

    def reference(self, rank: int, size: int) -> Array:
        """The result of a rank, in float64."""
        x, w = (operand.astype(float) for operand in self.operands(rank, size))
        if self.operation == "all_gather_matmul":
            return np.concatenate([self.operands(source, size)[0] for source in range(size)]).astype(float) @ w
        rows = self.m // size
        own = slice(None) if self.operation == "matmul_all_reduce" else slice(rank * rows, (rank + 1) * rows)
        terms = []
        for source in range(size):
            x, w = (operand.astype(float) for operand in self.operands(source, size))
            terms.append(x[own] @ w)
        return np.concatenate(terms) if self.operation == "matmul_all_to_all" else sum(terms[1:], terms[0])

    def sent(self, size: int) -> int:
        """Bytes that each rank sends."""
        return self.m * self.n * 4 * (size - 1) // size * (2 if self.operation == "matmul_all_reduce" else 1)


def rows(comm: Any, options: Options) -> list[Row]:
    """A row for every operation and K, and a summary."""
    edge, ks, slices = (M, KS, SLICES) if not options.quick else (M // 4, QUICK_KS, QUICK_SLICES)
    with TcpHosts(comm.link.comm, options.quick) as cluster, frameworks(cluster, slices) as (peers, absent):
        measured_rows = []
        for case in options.progress.each([PeerCase(operation, edge, edge, k) for operation in OPERATIONS for k in ks]):
            with ExitStack() as held:
                contestants = contestants_of(comm, peers, case, slices, held)
                measured_rows.append(measured(comm, cluster, case, contestants, absent, options.rounds))
        return [*measured_rows, summary(measured_rows, cluster)]


Peer = Callable[[str, Array, Array], Rival]


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
        if mpi4jax := start("mpi4jax", "mpi4jax", lambda place: Mpi4jax(comm)):
            peers["mpi4jax"] = mpi4jax.collectives
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


def contestants_of(
    comm: Any, peers: Mapping[str, Peer], case: PeerCase, slices: Sequence[int], held: ExitStack
) -> dict[str, Contestant]:
    """All contestants bound to their arrays. `held` closes them."""
    mpi, operation = comm.link.comm, case.operation
    x, w = case.operands(comm.rank, comm.size)
    error = partial(relative_error, reference=case.reference(comm.rank, comm.size))
    calls: dict[str, Callable[[], Any]] = {}
    for name, how in {**FUSED, UNFUSED_P2P: {"schedule": "unfused_p2p"}}.items():
        calls[name] = held.enter_context(fompi.bind(plan(operation, x, w, comm.size, **how), comm=comm, x=x, w=w))
    bound = {
        "mpi4py blocking": plain_mpi.blocking(operation, mpi, x, w),
        "mpi4py P2P": plain_mpi.pairwise(operation, mpi, x, w),
        **{f"{NATIVE} {s}": plain_mpi.native_slices(operation, mpi, x, w, s) for s in slices},
        **{f"{PAIRWISE} {s}": plain_mpi.pairwise(operation, mpi, x, w, s) for s in slices},
        **{name: peer(operation, x, w) for name, peer in peers.items()},
    }
    for name, rival in bound.items():
        held.callback(rival.close)
        calls[name] = rival.call
    return {name: Contestant(call, error) for name, call in calls.items()}


def kernel_of(case: PeerCase) -> Callable[[], object]:
    """The product of one rank, in one call."""
    inner, outer = (case.n, case.k) if case.operation == "all_gather_matmul" else (case.k, case.n)
    a, b = np.ones((case.m, inner), np.float32), np.ones((inner, outer), np.float32)
    return partial(np.matmul, a, b, out=np.empty((case.m, outer), np.float32))


def measured(
    comm: Any,
    cluster: TcpHosts,
    case: PeerCase,
    contestants: Mapping[str, Contestant],
    absent: Mapping[str, str],
    rounds: int,
) -> Row:
    """Check the contestants, time them in turns with the bare kernel and the bare wire, and compare."""
    errors = checked(comm.link.comm, contestants)
    calls = calls_of(contestants)
    calls[KERNEL] = kernel_of(case)
    if not cluster.shared:
        calls[WIRE] = lambda: cluster.exchange(case.sent(comm.size))
    samples = alternate(comm.link.comm, calls, rounds, idle=cluster.idle, monitor=cluster.monitor)
    row = Row(str(case), str(cluster), samples)
    best = row.best(FUSED)
    limits = {"T_c": row.median(KERNEL)} | ({} if cluster.shared else {"wire": row.median(WIRE)})
    return replace(
        row,
        base=row.best(UNFUSED),
        limits=limits,
        figures=figures(row, best, has_targets=not cluster.shared),
        absent=absent,
        errors=errors,
        progress=f"{progress(comm)}; slices of mpi4py: a helper that polls; {cluster.turns()}",
    )


def figures(row: Row, best: str, has_targets: bool) -> list[Figure]:
    """The best schedule of fompi against the best of each kind of rival. Targets apply only if there is a wire."""
    unfused = row.best(UNFUSED)
    sliced = row.best(name for name in row.samples if name.startswith((NATIVE, PAIRWISE)))
    other, whole = row.best(others(row)), row.best(name for name in others(row) if not is_sliced(name))
    slower = row.ratio(best, unfused)
    assert slower.interval is not None
    t_c, t_m = row.median(KERNEL), row.median(WIRE) if has_targets else 0.0
    compared = [
        row.ratio(unfused, best, limit=(t_c + t_m) / max(t_c, t_m) if has_targets else None),
        Figure(f"low end of {slower.name}", slower.interval.low, most=MOST_SLOWER if has_targets else None),
        row.ratio(sliced, best, least=LEAST_SLICED_CASE if has_targets else None),
        row.ratio(other, best),
        row.ratio(whole, best),
    ]
    if has_targets:
        compared.append(Figure("T_m / T_c", row.median(WIRE) / row.median(KERNEL)))
    return compared


def others(row: Row) -> list[str]:
    """Peers that fompi did not write."""
    return [name for name in row.samples if name.startswith(("mpi4py", "gloo", "JAX", "mpi4jax"))]


def is_sliced(name: str) -> bool:
    """True if we sliced the peer's asynchronous calls, so that they overlap."""
    return name.startswith("gloo, ")


def summary(measured_rows: Sequence[Row], cluster: TcpHosts) -> Row:
    """Geometric means: for slices over all rows, for other peers over the balanced rows."""
    sliced = [row.figures[2].value for row in measured_rows]
    balanced = [
        row.figures
        for row in measured_rows
        if cluster.shared or BALANCED[0] <= row.median(WIRE) / row.median(KERNEL) <= BALANCED[1]
    ]
    has_targets = not cluster.shared
    least = LEAST_SLICED if has_targets else None
    means = [Figure("best slices / fompi, geometric mean", geometric_mean(sliced), least=least)]
    if balanced:
        rows = f"geometric mean of {len(balanced)} balanced rows"
        least = LEAST_OTHERS if has_targets else None
        for kind, name in ((3, "best other peer, gloo in slices too"), (4, "best other peer as it comes")):
            value = geometric_mean(figures[kind].value for figures in balanced)
            means.append(Figure(f"{name} / fompi, {rows}", value, least=least))
    return Row("all rows", str(cluster), figures=means)
