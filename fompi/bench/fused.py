"""The fused operations on real GEMMs against what physics allows: mpirun -n 2 python -m fompi bench fused

The settings are those of `fompi.bench.peers`. A row's limit is

    bound = max(T_c + c_m, T_m)

where T_c is the kernel alone in one call, T_m the bare exchange, and c_m the CPU time that the bare exchange costs a
rank while its wait sleeps: with one core for a rank, it is taken from the kernel. The bound is that of each round, then
the median: where a core changes its speed now and then, the greater of two medians is less than any schedule could
reach. Beside it stands the ratio of lower quartiles, which others' use of the cores changes less. A row in which c_m is
more than a tenth of T_m is void. Which of our schedules runs is decided by some rounds before those that count.

`like` measures one shape in the same way, for a user's own: python -m fompi bench --like M,K,N
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from time import process_time
from typing import Any

import numpy as np

import fompi
from fompi.base.errors import ShapeError
from fompi.base.layout import slices_in_words
from fompi.bench import rivals
from fompi.bench.cluster import Cluster
from fompi.bench.collectives import CALLED, plan, progress
from fompi.bench.exchange import bare_exchange
from fompi.bench.options import Options
from fompi.bench.peers import KS, QUICK_KS, Case, M, kernel_of
from fompi.bench.rivals import OPERATIONS
from fompi.planner.candidates import UNEVEN
from fompi.runtime.report import quiet
from fompi.tuning.rounds import Contestant, Figure, Row, alternate, checked, geometric_mean, relative_error

SLICES = (2, 4, 8)
OURS: dict[str, dict[str, Any]] = {
    f"fompi {schedule}, {slices_in_words(slices)}": {"schedule": schedule, "slices": slices}
    for schedule, cuts in {"direct": (1, 2, 4, 8, *UNEVEN), "ring": (1, 2, 4, 8)}.items()
    for slices in cuts
}
KERNEL, BARE = "kernel alone", "bare exchange"
UNFUSED_P2P, BLOCKING, PAIRWISE = "unfused, fompi P2P", "unfused, mpi4py blocking", "unfused, mpi4py P2P"
UNFUSED = (UNFUSED_P2P, BLOCKING, PAIRWISE)
PILOT_ROUNDS, PIECES = 5, 4
LEAST_BOUND, LEAST_OVER_UNFUSED, MOST_SLOWER, LEAST_SLICED, LEAST_SLICED_CASE = 0.94, 1.55, 1.02, 1.0, 0.97
MOST_CPU = 0.1

IN_QUIET = ", lower quartiles"
"""Where others use the cores now and then, medians compare their moments: that of the kernel and that of the rest."""


def rows(comm: Any, options: Options) -> list[Row]:
    edge, ks = (M // 2, QUICK_KS) if options.quick else (M, KS)
    with Cluster(comm.link.comm) as cluster:
        found = [
            measured(comm, cluster, Case(operation, edge, edge, k), options.rounds)
            for operation in OPERATIONS
            for k in ks
        ]
        return [*found, summary(found, cluster)]


def like(comm: Any, m: int, k: int, n: int, options: Options) -> list[Row]:
    """Every fused operation on the global shapes x[m, k] @ w[k, n], over the ranks that there are.

    Up to the next multiples of their number; slices are among the rivals where they are even.
    """
    size = comm.size
    if min(m, k, n) < 1:
        raise ShapeError(f"M={m}, K={k}, N={n}: each must be 1 or more")
    m, k, n = (-(-total // size) * size for total in (m, k, n))  # rivals know even shards only
    cases = [
        Case("all_gather_matmul", m, k, n // size),
        Case("matmul_reduce_scatter", m, n, k // size),
        Case("matmul_all_reduce", m, n, k // size),
        Case("matmul_all_to_all", -(-m // size**2) * size, n, k),  # every rank has its rows, and deals them to all
    ]
    with Cluster(comm.link.comm) as cluster:
        return [measured(comm, cluster, case, options.rounds) for case in cases]


def in_words(row: Row) -> str:
    """The time without overlap and with it, and whether that is a gain; then the same of a call that says nothing."""
    operation = row.what.partition(",")[0]
    assert row.base is not None
    unfused = row.best(UNFUSED)
    gain = row.ratio(unfused, row.base)
    times = f"{1e3 * row.median(unfused):.2f} ms without overlap, {1e3 * row.median(row.base):.2f} with ({row.base})"
    called = row.ratio(unfused, CALLED)
    return (
        f"{operation:22} {times}: {_verdict(gain)}; at most {row.figures[1].limit:.2f}x\n"
        f"{'':22} called without a word, {1e3 * row.median(CALLED):.2f} ms: {_verdict(called)}"
    )


def _verdict(gain: Figure) -> str:
    assert gain.interval is not None
    verdict = f"{gain.value:.2f}x ({gain.interval})"
    if gain.interval.low > 1:
        return verdict
    return ("nothing gained: " if gain.interval.high >= 1 else "slower: ") + verdict


def measured(comm: Any, cluster: Cluster, case: Case, rounds: int) -> Row:
    mpi, operation = comm.link.comm, case.operation
    x, w = case.operands(comm.rank, comm.size)
    error = partial(relative_error, reference=case.reference(comm.rank, comm.size))
    with ExitStack() as held:

        def bind(how: dict[str, Any]) -> Contestant:
            made = plan(operation, x, w, comm.size, **how)
            return Contestant(held.enter_context(fompi.bind(made, comm=comm, x=x, w=w)), error)

        def rival(made: rivals.Rival) -> Contestant:
            held.callback(made.close)
            return Contestant(made.call, error)

        ours = {name: bind(how) for name, how in OURS.items() if available(operation, how)}
        even = [s for s in SLICES if case.m // comm.size % s == 0]
        others = {
            CALLED: Contestant(partial(getattr(fompi, operation), x, w, comm=comm), error),
            UNFUSED_P2P: bind({"schedule": "unfused_p2p"}),
            BLOCKING: rival(rivals.blocking(operation, mpi, x, w)),
            PAIRWISE: rival(rivals.pairwise(operation, mpi, x, w)),
            **{f"{s} slices, native": rival(rivals.native_slices(operation, mpi, x, w, s)) for s in even},
            **{f"{s} slices, P2P": rival(rivals.pairwise(operation, mpi, x, w, s)) for s in even},
        }
        errors = checked(mpi, ours | others)
        tried = alternate(
            mpi, {name: c.call for name, c in ours.items()}, PILOT_ROUNDS, idle=cluster.idle, calm=cluster.calm
        )
        best = min(tried, key=lambda name: min(tried[name]))  # too few for a median
        exchange = exchange_of(cluster.own, case, comm.size)
        yardsticks: dict[str, Callable[[], object]] = {KERNEL: kernel_of(case), BARE: exchange}
        calls = yardsticks | {best: ours[best].call} | {name: c.call for name, c in others.items()}
        samples = alternate(mpi, calls, rounds, idle=cluster.idle, calm=cluster.calm)
        cpu = cpu_seconds(mpi, exchange, cluster.idle)
    return judged(comm, cluster, case, best, cpu, replace(Row(str(case), str(cluster), samples), errors=errors))


def available(operation: str, how: dict[str, Any]) -> bool:
    return operation != "matmul_all_to_all" or how["schedule"] == "direct"


def judged(comm: Any, cluster: Cluster, case: Case, best: str, cpu: float, row: Row) -> Row:
    t_c, t_m = row.median(KERNEL), row.median(BARE)
    bound = median(max(c + cpu, m) for c, m in zip(row.samples[KERNEL], row.samples[BARE], strict=True))
    cuts = [name for name in row.samples if "slices," in name and name != best]
    unfused = row.best(UNFUSED)
    void = cpu > MOST_CPU * t_m
    slower = row.ratio(best, unfused)
    assert slower.interval is not None
    least = {name: quiet(samples) for name, samples in row.samples.items()}
    asked = not cluster.shared
    headline = asked and case.operation == "matmul_reduce_scatter" and case.k == 1024
    figures = [
        Figure("bound / time", bound / row.median(best), limit=1.0),
        row.ratio(unfused, best, least=LEAST_OVER_UNFUSED if headline else None, limit=(t_c + t_m) / bound),
        Figure(f"low end of {slower.name}", slower.interval.low, most=MOST_SLOWER if asked else None),
        Figure("c_m / T_m", cpu / t_m, most=MOST_CPU if asked else None),
        Figure(f"bound / time{IN_QUIET}", max(least[KERNEL] + cpu, least[BARE]) / least[best], limit=1.0),
        replace(row.ratio(CALLED, best), name=f"{CALLED} / {best}"),
    ]
    if cuts:
        figures.append(row.ratio(row.best(cuts), best, least=LEAST_SLICED_CASE if asked else None))
        figures.append(Figure(f"best slices / fompi{IN_QUIET}", min(least[name] for name in cuts) / least[best]))
    return replace(
        row,
        base=best,
        limits={"T_c": t_c, "T_m": t_m, "bound": bound},
        figures=figures,
        marks=["void: the exchange costs too much CPU time"] if void and asked else [],
        progress=f"{progress(comm)}; slices of mpi4py: a helper that polls; {cluster.told()}",
    )


def summary(found: list[Row], cluster: Cluster) -> Row:
    counted = [row for row in found if not row.marks]
    asked = not cluster.shared

    def mean(rows: list[Row], kind: int) -> float:
        return geometric_mean(row.figures[kind].value for row in rows)

    means = []
    if counted:
        what, least = f"geometric mean of {len(counted)} rows", LEAST_BOUND if asked else None
        means.append(Figure(f"bound / time, {what}", mean(counted, 0), least=least, limit=1.0))
        means.append(Figure(f"bound / time{IN_QUIET}, {what}", mean(counted, 4), limit=1.0))
    least = LEAST_SLICED if asked else None
    means.append(Figure("best slices / fompi, geometric mean", mean(found, 6), least=least))
    means.append(Figure(f"best slices / fompi{IN_QUIET}, geometric mean", mean(found, 7)))
    means.append(Figure(f"{CALLED} / the best of fompi, geometric mean", mean(found, 5)))
    return Row("all rows", str(cluster), figures=means)


def exchange_of(own: Any, case: Case, size: int) -> Callable[[], object]:
    """The messages of the operation; an all-reduce moves its shards twice."""
    once = bare_exchange(own, case.m // size * case.n * 4, PIECES)
    if case.operation != "matmul_all_reduce":
        return once

    def twice() -> None:
        once()
        once()

    return twice


def cpu_seconds(mpi: Any, exchange: Callable[[], object], idle: float) -> float:
    """CPU time of a rank in the bare exchange, the mean of the ranks."""
    spent: list[float] = []
    begun = [0.0]

    def before(name: str) -> None:
        begun[0] = process_time()

    def after(name: str, result: object) -> None:
        spent.append(process_time() - begun[0])

    alternate(mpi, {BARE: exchange}, 7, idle=idle, before=before, after=after)
    everyone = np.empty(mpi.Get_size())
    mpi.Allgather(np.array([median(spent)]), everyone)
    return float(everyone.mean())
