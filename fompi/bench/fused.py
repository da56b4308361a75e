"""The fused operations on real GEMMs against what physics allows: mpirun -n 2 python -m fompi bench fused

The settings are those of `fompi.bench.peers`. The limit of a row is

    bound = max(T_c + c_m, T_m)

T_c is the kernel alone in one call. T_m is the bare exchange. c_m is the CPU time of a rank in the bare exchange while
its wait sleeps. A rank has one core, so the kernel loses this time. The bound is computed in each round, and the median
of the rounds counts. The greater of the two medians would be less than any schedule can reach if a core changes its
speed during the run. The table also has the ratio of lower quartiles, which other users of the cores change less. A row
in which c_m is more than a tenth of T_m is void. A few rounds before the measurement choose the schedule of fompi.
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
from fompi.base.layout import slices_in_words
from fompi.bench.cluster import TcpHosts
from fompi.bench.collectives import DEFAULT, plan, progress
from fompi.bench.options import Options
from fompi.bench.peers import KS, QUICK_KS, M, PeerCase, kernel_of
from fompi.bench.rivals import plain_mpi
from fompi.bench.rivals.exchange import bare_exchange
from fompi.bench.rivals.rival import OPERATIONS, Rival
from fompi.planner.candidates import UNEVEN
from fompi.runtime.report import lower_quartile
from fompi.tuning.rounds import Contestant, Figure, Row, alternate, calls_of, checked, geometric_mean, relative_error

SLICES = (2, 4, 8)

CANDIDATES: dict[str, dict[str, Any]] = {
    f"fompi {schedule}, {slices_in_words(slices)}": {"schedule": schedule, "slices": slices}
    for schedule, cuts in {"direct": (1, 2, 4, 8, *UNEVEN), "ring": (1, 2, 4, 8)}.items()
    for slices in cuts
}
"""The schedules of fompi, by the names of contestants."""

KERNEL, BARE = "kernel alone", "bare exchange"
UNFUSED_P2P, BLOCKING, PAIRWISE = "unfused, fompi P2P", "unfused, mpi4py blocking", "unfused, mpi4py P2P"
UNFUSED = (UNFUSED_P2P, BLOCKING, PAIRWISE)

PILOT_ROUNDS = 5
"""Rounds in which the best candidate is chosen."""

PIECES = 4
"""Pieces of a shard in the bare exchange."""

LEAST_BOUND, LEAST_OVER_UNFUSED, MOST_SLOWER, LEAST_SLICED, LEAST_SLICED_CASE = 0.94, 1.55, 1.02, 1.0, 0.97
"""Targets: bound / time; without overlap / fompi in the headline row; fompi / without overlap; slices / fompi as a mean
of all rows, and in each row."""

MOST_CPU = 0.1
"""The most that c_m may be of T_m."""

MOST_ROUNDED = 0.5
"""The most relative error of a result whose messages had a wire. Two roundings of int4 may be off by a seventh each."""

LOWER_QUARTILES = ", lower quartiles"
"""Marks figures from lower quartiles. Medians compare different moments if others use the cores now and then."""


def rows(comm: Any, options: Options) -> list[Row]:
    edge, ks = (M // 4, QUICK_KS) if options.quick else (M, KS)
    cases = [PeerCase(operation, edge, edge, k) for operation in OPERATIONS for k in ks]
    with TcpHosts(comm.link.comm, options.quick) as cluster:
        measured_rows = [measured(comm, cluster, case, options.rounds) for case in options.progress.each(cases)]
        return [*measured_rows, summary(measured_rows, cluster)]


def measured(comm: Any, cluster: TcpHosts, case: PeerCase, rounds: int, has_slices: bool = True, wire: str = "") -> Row:
    """The best schedule of fompi, the default one, the operation without overlap, and in slices (`has_slices`).

    With a `wire` also the default schedule with messages of this form, under the name of the wire.
    """
    mpi, operation = comm.link.comm, case.operation
    x, w = case.operands(comm.rank, comm.size)
    error = partial(relative_error, reference=case.reference(comm.rank, comm.size))
    with ExitStack() as held:

        def bind(how: dict[str, Any]) -> Contestant:
            bound_plan = plan(operation, x, w, comm.size, **how)
            return Contestant(held.enter_context(fompi.bind(bound_plan, comm=comm, x=x, w=w)), error)

        def bind_rival(rival: Rival) -> Contestant:
            held.callback(rival.close)
            return Contestant(rival.call, error)

        candidates = {name: bind(how) for name, how in CANDIDATES.items() if is_available(operation, how)}
        even = [s for s in SLICES if has_slices and case.m // comm.size % s == 0]
        others = {
            DEFAULT: Contestant(partial(getattr(fompi, operation), x, w, comm=comm), error),
            UNFUSED_P2P: bind({"schedule": "unfused_p2p"}),
            BLOCKING: bind_rival(plain_mpi.blocking(operation, mpi, x, w)),
            PAIRWISE: bind_rival(plain_mpi.pairwise(operation, mpi, x, w)),
            **{f"{s} slices, native": bind_rival(plain_mpi.native_slices(operation, mpi, x, w, s)) for s in even},
            **{f"{s} slices, P2P": bind_rival(plain_mpi.pairwise(operation, mpi, x, w, s)) for s in even},
        }
        errors = checked(mpi, candidates | others)
        if wire:
            others[wire] = Contestant(partial(getattr(fompi, operation), x, w, comm=comm, wire=wire), error)
            errors |= checked(mpi, {wire: others[wire]}, MOST_ROUNDED)
        tried = calls_of(candidates) | {name: others[name].call for name in UNFUSED}
        pilot = alternate(mpi, tried, PILOT_ROUNDS, idle=cluster.idle, monitor=cluster.monitor)
        best, opponent = (min(names, key=lambda name: min(pilot[name])) for names in (candidates, UNFUSED))
        exchange = exchange_of(cluster.own, case, comm.size)
        yardsticks: dict[str, Callable[[], object]] = {KERNEL: kernel_of(case), BARE: exchange}
        calls = yardsticks | calls_of({best: candidates[best], **others})
        samples = alternate(mpi, calls, rounds, idle=cluster.idle, monitor=cluster.monitor)
        cpu = cpu_seconds(mpi, exchange, cluster.idle)
    return evaluated(
        comm, cluster, case, best, cpu, replace(Row(str(case), str(cluster), samples), errors=errors, opponent=opponent)
    )


def is_available(operation: str, how: dict[str, Any]) -> bool:
    return operation != "matmul_all_to_all" or how["schedule"] == "direct"


def evaluated(comm: Any, cluster: TcpHosts, case: PeerCase, best: str, cpu: float, row: Row) -> Row:
    """The row with its limits, figures and marks. `best` is fompi's best schedule, `cpu` is c_m."""
    t_c, t_m = row.median(KERNEL), row.median(BARE)
    bound = median(max(c + cpu, m) for c, m in zip(row.samples[KERNEL], row.samples[BARE], strict=True))
    slices = [name for name in row.samples if "slices," in name and name != best]
    unfused = row.best(UNFUSED)
    is_void = cpu > MOST_CPU * t_m
    slower = row.ratio(best, unfused)
    assert slower.interval is not None
    quartiles = {name: lower_quartile(samples) for name, samples in row.samples.items()}
    has_targets = not cluster.shared
    is_headline = has_targets and case.operation == "matmul_reduce_scatter" and case.k == 1024
    figures = [
        Figure("bound / time", bound / row.median(best), limit=1.0),
        row.ratio(unfused, best, least=LEAST_OVER_UNFUSED if is_headline else None, limit=(t_c + t_m) / bound),
        Figure(f"low end of {slower.name}", slower.interval.low, most=MOST_SLOWER if has_targets else None),
        Figure("c_m / T_m", cpu / t_m, most=MOST_CPU if has_targets else None),
        Figure(
            f"bound / time{LOWER_QUARTILES}",
            max(quartiles[KERNEL] + cpu, quartiles[BARE]) / quartiles[best],
            limit=1.0,
        ),
        replace(row.ratio(DEFAULT, best), name=f"{DEFAULT} / {best}"),
    ]
    if slices:
        figures.append(row.ratio(row.best(slices), best, least=LEAST_SLICED_CASE if has_targets else None))
        best_slices = min(quartiles[name] for name in slices)
        figures.append(Figure(f"best slices / fompi{LOWER_QUARTILES}", best_slices / quartiles[best]))
    return replace(
        row,
        base=best,
        limits={"T_c": t_c, "T_m": t_m, "bound": bound},
        figures=figures,
        marks=["void: the exchange costs too much CPU time"] if is_void and has_targets else [],
        progress=f"{progress(comm)}; slices of mpi4py: a helper that polls; {cluster.turns()}",
    )


def summary(measured_rows: list[Row], cluster: TcpHosts) -> Row:
    """Geometric means. Rows that are void do not count for the bound."""
    valid = [row for row in measured_rows if not row.marks]
    has_targets = not cluster.shared

    def mean(rows: list[Row], kind: int) -> float:
        return geometric_mean(row.figures[kind].value for row in rows)

    means = []
    if valid:
        what, least = f"geometric mean of {len(valid)} rows", LEAST_BOUND if has_targets else None
        means.append(Figure(f"bound / time, {what}", mean(valid, 0), least=least, limit=1.0))
        means.append(Figure(f"bound / time{LOWER_QUARTILES}, {what}", mean(valid, 4), limit=1.0))
    least = LEAST_SLICED if has_targets else None
    means.append(Figure("best slices / fompi, geometric mean", mean(measured_rows, 6), least=least))
    means.append(Figure(f"best slices / fompi{LOWER_QUARTILES}, geometric mean", mean(measured_rows, 7)))
    means.append(Figure(f"{DEFAULT} / the best of fompi, geometric mean", mean(measured_rows, 5)))
    return Row("all rows", str(cluster), figures=means)


def exchange_of(own: Any, case: PeerCase, size: int) -> Callable[[], object]:
    """The messages of the operation. An all-reduce moves its shards twice."""
    once = bare_exchange(own, case.m // size * case.n * 4, PIECES)
    if case.operation != "matmul_all_reduce":
        return once

    def twice() -> None:
        once()
        once()

    return twice


def cpu_seconds(mpi: Any, exchange: Callable[[], object], idle: float) -> float:
    """The CPU time of a rank in the bare exchange: the mean over the ranks."""
    spent: list[float] = []
    begun = [0.0]

    def before(name: str) -> None:
        begun[0] = process_time()

    def after(name: str, result: object) -> None:
        spent.append(process_time() - begun[0])

    alternate(mpi, {BARE: exchange}, 7, idle=idle, before=before, after=after)
    of_ranks = np.empty(mpi.Get_size())
    mpi.Allgather(np.array([median(spent)]), of_ranks)
    return float(of_ranks.mean())
