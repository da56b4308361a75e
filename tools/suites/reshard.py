"""Arrays that go to another layout, beside the wire and beside what programs of mpi4py do.

    python -m fompi.lab run --hosts 4 --rate 1gbit -- python -m fompi bench reshard --rounds 5
    python -m fompi.lab run --hosts 4 --rate 1gbit -- python -m fompi bench reshard --row "rows to columns"

An array of float32 of 256 MiB on all ranks together, in turns:

| contestant  | what it is                                                                                         |
|-------------|----------------------------------------------------------------------------------------------------|
| `fompi`     | `fompi.reshard`, within a peak of a quarter of the shard                                             |
| `Alltoallw` | one MPI_Alltoallw of subarray types, as mpi4py-fft transposes                                      |
| `Alltoallv` | blocks are packed, one MPI_Alltoallv, blocks are unpacked, as heat's resplit                       |

The wire takes the most bytes that enter or leave a rank over what TCP carries on a link of 1 Gbit/s.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

import fompi
from fompi import Box, Boxes
from fompi.bench.measure import Bench
from fompi.plans.boxes import common
from fompi.tuning.rounds import Figure, Row

OURS, TYPES, PACKED = "fompi", "Alltoallw", "Alltoallv"
MOST_OVER_WIRE, LEAST_GAIN = 1.1, 1.4
"""Asked: the time over that of the bytes on the wire, and the gain over the other two."""

SIDE, QUICK_SIDE = 8192, 64

GOODPUT = 1e9 / 8 * 1448 / 1514
"""Bytes per second that TCP carries on a link of 1 Gbit/s."""


def rows(bench: Bench) -> list[Row]:
    side, ranks = QUICK_SIDE if bench.quick else SIDE, bench.comm.size
    even = [side // ranks] * ranks
    uneven = [side // 2, *[side // 2 // (ranks - 1)] * (ranks - 1)]
    uneven[-1] += side - sum(uneven)
    counts = {"rows to columns": even, "rows to uneven columns": uneven}
    makers = {name: partial(_measured, name=name, side=side, counts=(even, each)) for name, each in counts.items()}
    return bench.rows(makers)


def _measured(bench: Bench, name: str, *, side: int, counts: Any) -> Row:
    comm, rank = bench.mpi, bench.comm.rank
    source, target = (Boxes.sharded((side, side), dim, each) for dim, each in enumerate(counts))
    here, there = source.of[rank][0], target.of[rank][0]
    x = np.random.default_rng(rank).random(here.shape, np.float32)
    peak = max(1 << 16, x.nbytes // 4)
    found: dict[str, np.ndarray[Any, Any]] = {}

    def ours() -> None:
        found[OURS] = fompi.reshard(x, source, target, comm=bench.comm, peak=peak)

    def by_types() -> None:
        found[TYPES] = y = np.empty(there.shape, np.float32)
        sends = [_type(here, _met(here, of[0])) for of in target.of]
        takes = [_type(there, _met(there, of[0])) for of in source.of]
        ones, zeros = [1] * comm.size, [0] * comm.size
        comm.Alltoallw([x, ones, zeros, sends], [y, ones, zeros, takes])
        for each in (*sends, *takes):
            each.Free()

    def packed() -> None:
        found[PACKED] = y = np.empty(there.shape, np.float32)
        out = [_met(here, of[0]) for of in target.of]
        into = [_met(there, of[0]) for of in source.of]
        sent = np.concatenate([x[here.slices(box)].ravel() for box in out])
        got = np.empty(sum(box.elements for box in into), np.float32)
        comm.Alltoallv([sent, [box.elements for box in out]], [got, [box.elements for box in into]])
        ends = [0, *accumulate(box.elements for box in into)]
        for box, (begin, end) in zip(into, pairwise(ends), strict=True):
            y[there.slices(box)] = got[begin:end].reshape(box.shape)

    row = bench.row(name, {OURS: ours, TYPES: by_types, PACKED: packed}, base=OURS)
    assert all(np.array_equal(found[OURS], each) for each in found.values())
    moved = [[_met(a, b).elements * 4 for (b,) in target.of] for (a,) in source.of]
    most = max(sum(ways) - ways[r] for r in range(comm.size) for ways in (moved[r], [each[r] for each in moved]))
    over, gain = (None, None) if bench.quick else (MOST_OVER_WIRE, LEAST_GAIN)
    wire = Figure("fompi / the wire", float(np.median(row.samples[OURS])) * GOODPUT / most, most=over)
    return replace(row, figures=[wire, row.ratio(TYPES, OURS, least=gain), row.ratio(PACKED, OURS, least=gain)])


def _met(rows: Box, columns: Box) -> Box:
    """What both have: rows meet all columns."""
    found = common(rows, columns)
    assert found is not None
    return found


def _type(whole: Box, part: Box) -> MPI.Datatype:
    starts = [a - b for a, b in zip(part.offset, whole.offset, strict=True)]
    made = MPI.FLOAT.Create_subarray(list(whole.shape), list(part.shape), starts)
    return made.Commit()
