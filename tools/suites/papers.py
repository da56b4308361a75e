"""The papers' settings, on emulated accelerators with real messages.

    mpirun -n 4 python -m fompi bench tools/suites/papers.py

Every rank multiplies M x K by K x N, and M x N elements travel. The time of the bare exchange, T_m, is measured. The
emulated accelerator then gets such a speed that the product takes T_c = T_m / ratio:

| T_m / T_c | what it stands for                                                                          |
|-----------|---------------------------------------------------------------------------------------------|
| 0.56      | the MLP of CommFuse (arXiv 2604.24013): 43.8 ms of communication and 78.5 of computation    |
| 1         | balanced: the most that overlap can give, a factor of two                                   |
| 2         | bound by communication: the kernel can be hidden completely                                 |

All contestants run on the same emulated accelerator. It computes the first elements of each row for real. Their values
are new in every round, and every result is checked. `exposed` is the time beyond the kernel alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

import fompi
from emulated import CORNER, Emulated, corner
from exchange import bare_exchange
from fompi.base.layout import offsets, split
from fompi.bench.fused import FusedCase
from fompi.bench.measure import Bench, Call, plan, schedules
from fompi.model.machine import Machine
from fompi.mpi.transport import library
from fompi.tuning.rounds import Figure, Row, WrongResult, best_of

Array = np.ndarray[Any, Any]
M, K, N = 2048, 1024, 4096
OPERATIONS = ("matmul_reduce_scatter", "all_gather_matmul")

RATIOS = (0.56, 1.0, 2.0)
"""T_m / T_c."""

PIECES = (1, 4, 8)
"""Pieces of a shard in the bare exchange. The best of these is T_m."""

CANDIDATES = schedules({"direct": (1, 4, 8, 16), "ring": (1, 4, 8, 16)})
UNFUSED: dict[str, dict[str, Any]] = {
    "unfused, library": {"schedule": "unfused"},
    "unfused, P2P": {"schedule": "unfused_p2p"},
    "unfused, P2P paced": {"schedule": "unfused_p2p", "window": 1},
    "unfused, P2P in 8 slices": {"schedule": "unfused_p2p", "slices": 8, "window": 1},
}
SLICED: dict[str, dict[str, Any]] = {
    f"{slices} slices, {kind}": {"schedule": schedule, "slices": slices}
    for kind, schedule in (("library", "sliced"), ("P2P", "sliced_p2p"))
    for slices in (2, 4, 8)
}
KERNEL, BARE = "kernel alone", "bare exchange"

PILOT_ROUNDS = 5
"""Rounds in which the best candidate is chosen."""

MOST_EXPOSED = {"MPICH": 0.002, "Open MPI": 0.005}
"""Targets for exposed / communication. The paper reports 0.2 %."""


def operands(case: FusedCase, rank: int, size: int) -> tuple[Array, Array]:
    """x and w of a rank. Their corners hold whole numbers: those of x new ones for each call (`x_corner`)."""
    x, w = (np.zeros(shape, np.float32) for shape in case.shapes(size))
    corner(w, whole=True)[...] = weight(rank)
    return x, w


def weight(rank: int) -> Array:
    """The corner of w on a rank."""
    return np.arange(1.0, CORNER**2 + 1, dtype=np.float32).reshape(CORNER, CORNER) + rank


def x_corner(case: FusedCase, rank: int, size: int, call: int) -> Array:
    """The corner of x on a rank, in this call."""
    rows = case.shapes(size)[0][0]
    return np.random.default_rng([rank, call]).integers(0, 100, (rows, CORNER)).astype(np.float32)


def expected(case: FusedCase, rank: int, size: int, call: int) -> Array:
    """The corner of the correct result of a rank."""
    corners = [x_corner(case, source, size, call) for source in range(size)]
    if case.gathers:
        return np.concatenate(corners) @ weight(rank)
    own = slice(*offsets(split(case.m, size))[rank : rank + 2])
    return sum((x[own] @ weight(source) for source, x in enumerate(corners)), np.zeros((), np.float32))


def rows(bench: Bench) -> list[Row]:
    made: list[Row] = []
    for operation in OPERATIONS[: 1 if bench.quick else None]:
        case = FusedCase(operation, M, N, K)
        exchange = best_exchange(bench, case)
        for ratio in bench.each(RATIOS, partial(_title, case)):
            made.append(measured(bench, case, exchange, ratio))
    return made


def _title(case: FusedCase, ratio: float) -> str:
    return f"{case.operation}, T_m / T_c = {ratio:g}"


def best_exchange(bench: Bench, case: FusedCase) -> Call:
    """The messages of the operation without its kernels, in the number of pieces that is fastest with this MPI."""
    shard = case.m // bench.comm.size * case.n * 4
    exchanges = {
        f"{pieces} {to}": bare_exchange(bench.cluster.own, shard, pieces, round_the_ring=to == "next")
        for pieces in PIECES
        for to in ("each", "next")
    }
    return exchanges[best_of(bench.times(exchanges, 3))]


def measured(bench: Bench, case: FusedCase, exchange: Call, ratio: float) -> Row:
    rank, size, number, calls = bench.comm.rank, bench.comm.size, [0], dict[str, Call]()
    x, w = operands(case, rank, size)

    def renew(name: str) -> None:
        number[0] += 1
        corner(x)[...] = x_corner(case, rank, size, number[0])

    def check(name: str, result: Any) -> None:
        if name in calls and not np.array_equal(corner(result), expected(case, rank, size, number[0])):
            raise WrongResult(f"{name} is wrong on rank {rank} in call {number[0]}")

    def timed(t_m: float, schedules: Mapping[str, Mapping[str, Any]], rounds: int = 0) -> dict[str, list[float]]:
        machine = Machine("emulated accelerator", 0.0, 1.0, 2 * case.m * case.k * case.n * ratio / t_m, 1e12, 5e-6)
        with ExitStack() as held:
            alone = held.enter_context(bench.comm.split(rank, name="one rank"))
            yardsticks = {KERNEL: kernel_alone(alone, case, machine, held), BARE: exchange}
            calls.clear()
            for name, how in schedules.items():
                made = plan(case.operation, x, w, size, **how)
                calls[name] = bench.bound(held, made, x=x, w=w, backend=Emulated(machine))
            return bench.times(yardsticks | calls, rounds, before=renew, after=check)

    pilot = bench.times({BARE: exchange}, PILOT_ROUNDS)
    pilot = timed(median(pilot[BARE]), CANDIDATES, PILOT_ROUNDS)
    best = min(CANDIDATES, key=lambda name: median(pilot[name]))
    contestants = {best: CANDIDATES[best], **UNFUSED, **SLICED}
    # The calls before an exchange change its time. So T_m is measured between these very calls.
    pilot = timed(median(pilot[BARE]), contestants, PILOT_ROUNDS)
    return evaluated(bench, case, ratio, best, timed(median(pilot[BARE]), contestants))


def evaluated(bench: Bench, case: FusedCase, ratio: float, best: str, samples: dict[str, list[float]]) -> Row:
    """The row with its limits and figures. `best` is fompi's best schedule."""
    row = bench.row_of(_title(case, ratio), samples, base=best, marks=["emulated accelerator"])
    t_c, t_m, asked = row.median(KERNEL), row.median(BARE), bench.asked
    unfused, sliced, limit = row.best(UNFUSED), row.best(SLICED), (t_c + t_m) / max(t_c, t_m)
    if ratio < 1:
        exposed = median((t - c) / t_m for t, c in zip(samples[best], samples[KERNEL], strict=True))
        most = MOST_EXPOSED.get(library().name, 0.005)
        figures = [
            Figure("exposed / communication", exposed, most=asked(most)),
            row.ratio(unfused, best, least=asked(1.55), limit=limit),
            row.ratio(sliced, best, least=asked(1.055)),
        ]
    elif ratio == 1:
        figures = [row.ratio(unfused, best, least=asked(1.93), limit=limit), row.ratio(sliced, best)]
    else:
        figures = [row.ratio(best, BARE, most=asked(1.04), limit=1.0), row.ratio(unfused, best, limit=limit)]
        figures.append(row.ratio(sliced, best))
    words = f"{bench.progress} (kernels are enqueued: the caller polls)"
    return replace(row, limits={"T_c": t_c, "T_m": t_m}, figures=figures, progress=words)


def kernel_alone(alone: fompi.Communicator, case: FusedCase, machine: Machine, held: ExitStack) -> Call:
    """The product of a rank in one call, on a communicator of one rank."""
    m, inner, outer = case.product
    x, w = np.zeros((m, inner), np.float32), np.zeros((inner, outer), np.float32)
    step = fompi.bind(plan("all_gather_matmul", x, w, 1), comm=alone, x=x, w=w, backend=Emulated(machine))
    made: Call = held.enter_context(step)
    return made
