"""The fused operations compared with their peers, on real GEMMs.

    mpirun -n 2 python -m fompi bench tools/suites/peers.py

The grid is that of `fompi.bench.fused`. Peers run in one process, one after the other. Their threads sleep when they
have nothing to do. Each peer is checked before it is timed. A peer that cannot run is in the table with the reason.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from bench.fused import grid

from fompi.bench.fused import (
    BLOCKING,
    KERNEL,
    Array,
    FusedCase,
    kernel_of,
)
from fompi.bench.measure import Bench, BenchHosts, Call, schedules
from fompi.tuning.rounds import Figure, Row, texts
from fused import HELPER, LEAST_SLICED, LEAST_SLICED_CASE, MOST_SLOWER, low_end
from links import rendezvous, ring
from means import geometric_mean
from noise import watched
from plain_mpi import PAIRWISE, UNFUSED, without_fompi
from xla import Xla

SLICES, QUICK_SLICES = (2, 4, 8), (2,)
FUSED = schedules({"direct": (1, 2, 4, 8, (1, 2, 4), (4, 2, 1))})
LINK = "link"

LEAST_OTHERS = 1.3
"""The target for other peers / fompi."""

BALANCED = (0.5, 2.0)
"""The range of T_m / T_c in which rows count against other peers. Elsewhere overlap can gain little."""

SWITCH_SECONDS = 1e-4
"""How often Python switches threads. Helpers of rivals poll while kernels run, and Python's 5 ms would delay them."""


def rows(bench: Bench) -> list[Row]:
    """A row for every operation and K, and a summary."""
    slices = QUICK_SLICES if bench.quick else SLICES
    bench, runs = watched(bench)
    with frameworks(bench.cluster, slices) as (peers, absent):
        made = (measured(bench, case, slices, peers, absent) for case in bench.each(grid(bench.quick)))
        measured_rows = [replace(row, progress=f"{row.progress}; {runs()}") for row in made]
        return [*measured_rows, summary(bench, measured_rows)] if measured_rows else []


Peer = Callable[[str, Array, Array], Call]


@contextmanager
def frameworks(cluster: BenchHosts, slices: Sequence[int]) -> Iterator[tuple[dict[str, Peer], dict[str, str]]]:
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
            place = rendezvous(cluster)
            reason = failure(comm, lambda: import_module(module)) or failure(comm, lambda: started.append(make(place)))
            if reason:
                absent[name] = reason
                return None
            held.callback(started[0].close)
            return started[0]

        if gloo := start("gloo", "gloo", lambda place: import_module("gloo").Gloo(comm, place)):
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


def measured(
    bench: Bench, case: FusedCase, slices: Sequence[int], peers: Mapping[str, Peer], absent: Mapping[str, str]
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
            calls[LINK] = partial(held.enter_context(ring(cluster)).exchange, case.sent(comm.size))
        row = bench.row_of(str(case), bench.times(calls, timed=bench.timed), absent=absent, errors=errors)
    return replace(
        row,
        base=row.best(UNFUSED),
        limits={"T_c": row.median(KERNEL)} | ({} if cluster.shared else {"link": row.median(LINK)}),
        figures=figures(bench, row, row.best(FUSED)),
        progress=f"{bench.progress}; {HELPER}",
    )


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
