"""What a call costs above one of the MPI library: `mpirun -n 2 python -m fompi bench overhead`.

Rounds of each call alternate with rounds of the same messages without fompi. Nothing here overlaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

import fompi
from fompi.bench.measure import Bench, Call, Calls, plan
from fompi.tuning.rounds import Figure, Row, difference

CALLS, QUICK_CALLS = 300, 60
"""Calls per round."""

WARMUP = 1
"""Rounds that do not count."""

NBYTES = 1024
"""Bytes of the all-reduce."""

BUCKETS, BUCKET_NBYTES = 10, 16 << 10
"""Sums that are in flight together, as in a step of data parallelism."""


LIBRARY, BOUND, UNBOUND = "the library", "fompi bound", "fompi"


def rows(bench: Bench) -> list[Row]:
    return bench.rows({"all-reduce of 1 KiB": all_reduce, "the buckets of a step": buckets})


def times_of(bench: Bench, contestants: Calls, calls: int) -> dict[str, list[float]]:
    return bench.times(contestants, calls=calls, warmup=WARMUP, idle=0.0)


def row_of(bench: Bench, what: str, samples: Mapping[str, Sequence[float]], base: str, *figures: Figure) -> Row:
    size = bench.comm.size
    marks = () if size == 2 else ("the targets are for 2 ranks",)
    return Row(what, f"{size} ranks", samples, base, figures=figures, progress="progress by polling", marks=marks)


def calls_of(bench: Bench) -> int:
    return QUICK_CALLS if bench.quick else CALLS


def all_reduce(bench: Bench) -> Row:
    comm, x, y = bench.comm, np.ones(NBYTES // 4, np.float32), np.empty(NBYTES // 4, np.float32)
    with fompi.bind(plan("all_reduce", x, comm.size), comm=comm, x=x, out=y) as bound:
        contestants: dict[str, Call] = {
            LIBRARY: partial(bench.mpi.Allreduce, x, y),
            BOUND: bound,
            UNBOUND: partial(fompi.all_reduce, x, comm=comm),
        }
        seconds = times_of(bench, contestants, calls_of(bench))
    return row_of(
        bench,
        "all-reduce of 1 KiB",
        seconds,
        LIBRARY,
        difference("bound, above the library's", seconds[BOUND], seconds[LIBRARY], most=15),
        difference("unbound, above the library's", seconds[UNBOUND], seconds[LIBRARY], most=60),
    )


def buckets(bench: Bench) -> Row:
    """Several small sums in flight: each agrees (as buckets of a step did once), or all are bound."""
    comm, flat = bench.comm, [np.ones(BUCKET_NBYTES // 4, np.float32) for _ in range(BUCKETS)]
    pairs = [(x, np.empty_like(x)) for x in flat]
    steps = [fompi.all_reduce.bind(x, out=y, comm=comm) for x, y in pairs]

    def bound() -> None:
        for step in steps:
            step.start()
        for step in steps:
            step.wait()

    def unbound() -> None:
        for pending in [fompi.all_reduce.start(x, out=y, comm=comm) for x, y in pairs]:
            pending.wait()

    def library() -> None:
        for request in [bench.mpi.Iallreduce(x, y) for x, y in pairs]:
            request.Wait()

    seconds = times_of(bench, {LIBRARY: library, BOUND: bound, UNBOUND: unbound}, calls_of(bench) // 10)
    for step in steps:
        step.close()
    return row_of(bench, f"{BUCKETS} all-reduces of {BUCKET_NBYTES >> 10} KiB in flight", seconds, LIBRARY)
