"""Exact shares of units for ranks that are not equally fast: small problems with integers, without model and machine.

- `deal`: units of one or more kinds, so that the slowest rank is done first: by bisection on the time.
- `cut_layers`, `cut_by_slowest`: contiguous runs of layers: by dynamic programming.
- `deal_in_memory`: several phases whose units share the memory of a rank: by a mixed-integer program (SciPy).
- `deal_in_rounds`: layers of which some are read again from disks: the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import product
from math import inf
from typing import NamedTuple

from fompi.base.errors import PackageError

PRECISION, GAP, SOLVER_SECONDS = 1e-11, 1e-5, 5.0
"""The relative error of a bisection; that of a mixed-integer program, and the most seconds that it takes."""

Counts = tuple[int, ...]
"""The units of each kind on one rank; or the layers of each rank."""

Line = tuple[float, tuple[float, ...]]
"""Seconds without units, and seconds for a unit of each kind."""


class Phase(NamedTuple):
    """What the ranks compute between two meetings: `totals` units of each kind, the coarsest kind first.

    With counts s a rank r takes max(a + sum(b * s) for a, b in lines[r]) seconds, or none if it has no unit. A step has
    `repeats` such phases. `stored` are the bytes that a unit of each kind takes, in all repeats together.
    """

    names: tuple[str, ...]
    totals: Counts
    lines: tuple[tuple[Line, ...], ...]
    stored: tuple[float, ...]
    repeats: int = 1

    def seconds(self, rank: int, counts: Counts) -> float:
        """Seconds of a rank with these counts, in all repeats."""
        return self.repeats * _at(self.lines[rank], counts) if any(counts) else 0.0

    def slowest(self, dealt: Sequence[Counts]) -> float:
        """Seconds of all repeats, until all ranks are done."""
        return max(self.seconds(rank, counts) for rank, counts in enumerate(dealt))

    def nbytes(self, counts: Counts) -> float:
        """The bytes of these counts."""
        return sum(each * n for each, n in zip(self.stored, counts, strict=True))


def _at(lines: Sequence[Line], counts: Counts) -> float:
    return max(a + sum(b * n for b, n in zip(slopes, counts, strict=True)) for a, slopes in lines)


# ------------------------------------------------------------------------------------------------- by bisection


def deal(phase: Phase, ranks: Sequence[int], room: Sequence[float] = ()) -> list[Counts] | None:
    """The counts of each rank that take the least time. Only `ranks` get units, of `room[rank]` bytes at most.

    None: there is no room for some units.
    """
    limits = [-1.0 if r not in ranks else room[r] if room else inf for r in range(len(phase.lines))]
    low, high = 0.0, 2 * max(_at(phase.lines[rank], phase.totals) for rank in ranks)
    found = _within(phase, limits, high)
    while found and high - low > PRECISION * high:
        middle = (low + high) / 2
        better = _within(phase, limits, middle)
        low, high, found = (middle, high, found) if better is None else (low, middle, better)
    if found is None or len(phase.totals) > 1:
        return found
    # Each rank gets all that it does in less than the least time. The first ranks get what remains.
    counts = [_most(phase, rank, (), limit, low) for rank, limit in enumerate(limits)]
    rest = phase.totals[0] - sum(counts)
    for rank, limit in enumerate(limits):
        more = max(0, min(rest, _most(phase, rank, (), limit, high) - counts[rank]))
        counts[rank], rest = counts[rank] + more, rest - more
    return [(n,) for n in counts]


def _most(phase: Phase, rank: int, coarse: Counts, room: float, seconds: float) -> int:
    """How many units of the finest kind a rank has room and time for, beside coarse ones. -1: not even for these."""
    if room < 0:
        return 0
    most: float = phase.totals[-1]
    for limit, slopes in ((room, phase.stored), *phase.lines[rank]):
        left = room if slopes is phase.stored else seconds - limit
        for each, n in zip(slopes, coarse, strict=False):
            left -= each * n
        if left < 0:
            return -1 if any(coarse) else 0
        if slopes[-1] and left < most * slopes[-1]:
            most = left // slopes[-1]
    return int(most)


def _within(phase: Phase, limits: Sequence[float], seconds: float) -> list[Counts] | None:
    """Counts with which every rank is done in this time, or None: of one kind as many as possible.

    A limit below 0: the rank gets nothing. From rank to rank: for all coarse units so far, the most of the finest kind.
    """
    *coarse, finest = phase.totals
    if not coarse:  # the same, at once
        units = [_most(phase, rank, (), limit, seconds) for rank, limit in enumerate(limits)]
        return [(n,) for n in units] if sum(units) >= finest else None
    states: dict[Counts, tuple[int, tuple[Counts, ...]]] = {(0,) * len(coarse): (0, ())}
    for rank, limit in enumerate(limits):
        tried = product(*(range(total + 1 if limit >= 0 else 1) for total in coarse))
        options = [(own, n) for own in tried if (n := _most(phase, rank, own, limit, seconds)) >= 0]
        following: dict[Counts, tuple[int, tuple[Counts, ...]]] = {}
        for done, (fine, before) in states.items():
            for own, n in options:
                after = tuple(a + b for a, b in zip(done, own, strict=True))
                fits = all(a <= total for a, total in zip(after, coarse, strict=True))
                if fits and fine + n > following.get(after, (-1, ()))[0]:
                    following[after] = fine + n, (*before, (*own, n))
        states = following
    fine, found = states.get(tuple(coarse), (-1, ()))
    if fine < finest:
        return None
    dealt: list[Counts] = [*found]
    rest = fine - finest
    for rank, (*few, n) in reversed([*enumerate(found)]):  # what is too much, from the last rank on
        dealt[rank], rest = (*few, n - min(rest, n)), rest - min(rest, n)
    return dealt


# ------------------------------------------------------------------------------------------------- layers

Stage = Callable[[int, int, int], float]
"""stage(rank, first, end): the seconds of a run of layers. inf: it does not fit."""

Runs = tuple[float, Counts]
"""Seconds, and the layers of each rank. (inf, ()): it is not possible."""


def cut_layers(count: int, size: int, stage: Stage, limit: float = inf) -> Runs:
    """The least sum of stages, and the layers of each rank: contiguous runs on two ranks at least.

    No stage takes more than `limit`. From rank to rank: for each number of layers so far, the best runs.
    """
    best: list[Runs] = [(0.0, ()), *[(inf, ())] * count]
    for rank in range(size):
        following = [(seconds, (*runs, 0)) for seconds, runs in best]
        for first, (seconds, runs) in enumerate(best):
            for end in range(first + 1, count + (first > 0)) if seconds < inf else ():
                if seconds < following[end][0] and (taken := stage(rank, first, end)) <= limit:
                    following[end] = min(following[end], (seconds + taken, (*runs, end - first)))
        best = following
    return best[count] if best[count][0] < inf else (inf, ())


def cut_by_slowest(count: int, size: int, stage: Stage) -> Runs:
    """The same with the fastest slowest stage. Of such cuts it is the one with the least sum."""
    runs = [(first, end) for end in range(1, count + 1) for first in range(end)]
    limits = sorted({stage(rank, *run) for rank in range(size) for run in runs} - {inf})
    fewest = bisect_left(limits, True, key=lambda limit: bool(cut_layers(count, size, stage, limit)[1]))
    return cut_layers(count, size, stage, limits[fewest]) if fewest < len(limits) else (inf, ())


# ------------------------------------------------------------------------------------------------- with integers


def deal_in_memory(phases: Sequence[Phase], ranks: Sequence[int], room: Sequence[float]) -> list[list[Counts]] | None:
    """For each phase the counts of each rank, with the least time in `room[rank]` bytes. None: they do not fit.

    The variables are the seconds of the phases, relative to those of one rank, and the counts.
    """
    kinds = [(p, kind) for p, phase in enumerate(phases) for kind in range(len(phase.totals))]
    place = {key: len(phases) + i for i, key in enumerate(product(ranks, kinds))}
    program = _Program(len(phases) + len(place), len(phases))
    unit = sum(phase.repeats * min(_at(phase.lines[rank], phase.totals) for rank in ranks) for phase in phases)
    for p, kind in kinds:
        total, mine = phases[p].totals[kind], [place[rank, (p, kind)] for rank in ranks]
        program.require(dict.fromkeys(mine, 1.0), total, total)
    for rank, (p, phase) in product(ranks, enumerate(phases)):
        program.costs[p] = 1.0
        for a, slopes in phase.lines[rank]:
            row = {place[rank, (p, kind)]: -b * phase.repeats / unit for kind, b in enumerate(slopes)}
            program.require({p: 1.0, **row}, a * phase.repeats / unit)
    for rank in ranks:
        row = {place[rank, key]: phases[key[0]].stored[key[1]] / max(room[rank], 1.0) for key in kinds}
        program.require(row, most=min(1.0, room[rank]))
    if (found := program.solved()) is None:
        return None
    counts = {key: round(found[i]) for key, i in place.items()}
    return [
        [tuple(counts.get((rank, (p, kind)), 0) for kind in range(len(phase.totals))) for rank in range(len(room))]
        for p, phase in enumerate(phases)
    ]


class Ring(NamedTuple):
    """Layers that go round the ranks in rounds, some of which a rank reads from its disk each time.

    By rank: the seconds of a layer and of the output layer, those in which a layer is read from the disk (inf: it has
    none), and the bytes that it may use. `layer` and `table` are the bytes of a layer, and of the vocabulary. `hop` are
    the seconds from rank to rank.
    """

    seconds: Sequence[float]
    outputs: Sequence[float]
    reads: Sequence[float]
    room: Sequence[float]
    layer: float
    table: float
    hop: float


def deal_in_rounds(ring: Ring, count: int, rounds: int) -> Runs:
    """The least seconds of a token, and the layers of each rank, a multiple of `rounds`. Two ranks or more, if given.

    The ranks compute one after the other. Meanwhile each reads the layers that it does not keep, and has room for those
    of one round. So a token takes the sum of the kernels, or the time of the slowest disk, whichever is longer.
    """
    size, each = len(ring.seconds), count // rounds
    layers, kept, used, last = (range(1 + i * size, 1 + (i + 1) * size) for i in range(4))  # the layers of one round
    unit = max(ring.seconds) * count + max(ring.outputs)
    program = _Program(1 + 4 * size, 1)
    program.costs[0] = 1.0
    for row, least, most in ((layers, each, each), (last, 1, 1), (used, min(2, size), size)):
        program.require(dict.fromkeys(row, 1.0), least, most)
    kernels = {0: 1.0}
    for n, m, u, o, *(seconds, output, read, room) in zip(layers, kept, used, last, *ring[:4], strict=True):
        kernels |= {n: -rounds * seconds / unit, o: -output / unit, u: -rounds * ring.hop * (size > 1) / unit}
        program.require({u: 1.0}, most=1)
        program.require({u: each, n: -1.0}, 0)
        program.require({n: 1.0, u: -1.0}, 0)  # who takes part has a layer
        program.require({u: 1.0, o: -1.0}, 0)
        program.require({n: rounds, m: -1.0}, 0, inf if read < inf else 0)
        if read < inf:
            program.require({0: 1.0, n: -rounds * read / unit, m: read / unit}, 0)
        share = ring.layer / room
        program.require({m: share * (1 - 1 / rounds), n: share, o: ring.table / room}, most=1)
    program.require(kernels, 0)
    found = program.solved()
    return (inf, ()) if found is None else (found[0] * unit, tuple(round(found[n]) * rounds for n in layers))


class _Program:
    """A mixed-integer program: the least costs @ x with least <= row @ x <= most, x >= 0, integers from `first` on."""

    def __init__(self, size: int, first: int):
        self.costs = [0.0] * size
        self._integers, self._rows = (
            [int(i >= first) for i in range(size)],
            list[tuple[dict[int, float], float, float]](),
        )

    def require(self, row: dict[int, float], least: float = -inf, most: float = inf) -> None:
        """One more inequality."""
        self._rows.append((row, least, most))

    def solved(self) -> list[float] | None:
        """The best x, or None. Raises PackageError without SciPy."""
        try:
            from scipy.optimize import LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError:
            raise PackageError("shares that memory decides need SciPy, which is missing: pip install scipy") from None
        entries = [(value, i, at) for i, (row, _, _) in enumerate(self._rows) for at, value in row.items()]
        values, rows, columns = zip(*entries, strict=True)
        matrix = csr_array((values, (rows, columns)), shape=(len(self._rows), len(self.costs)))
        limits = LinearConstraint(matrix, [least for _, least, _ in self._rows], [most for _, _, most in self._rows])
        how = {"mip_rel_gap": GAP, "time_limit": SOLVER_SECONDS}
        result = milp(self.costs, integrality=self._integers, constraints=limits, options=how)
        return None if result.x is None else [*map(float, result.x)]
