"""Small problems of scheduling that have exact answers: the order of pieces, and into which groups to cut.

A piece is worked on and then sent (a sum), or received and then worked on (a gather): two machines, one after the
other, each for one piece at a time. `makespan` says how long a given order takes.

    first    | a    | b  | c        |
    second          | a        | b    |   | c |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Job(NamedTuple):
    """A piece: seconds on the first machine, then on the second."""

    first: float
    second: float


def makespan(jobs: Sequence[Job]) -> float:
    """Seconds until all jobs, in this order, are through both machines."""
    first = second = 0.0
    for job in jobs:
        first += job.first
        second = max(first, second) + job.second
    return max(first, second)


def johnson(jobs: Sequence[Job]) -> list[int]:
    """The order of least makespan: `makespan([jobs[i] for i in johnson(jobs)])`.

    Those that are shorter on the first machine go first, the shortest of them ahead; the others follow, the one that is
    shortest on the second machine last (Johnson, 1954). So a piece of our own, which is not sent, is made last, and one
    that need not be received is used first.
    """
    ahead = sorted((i for i, job in enumerate(jobs) if job.first <= job.second), key=lambda i: jobs[i].first)
    behind = sorted((i for i, job in enumerate(jobs) if job.first > job.second), key=lambda i: -jobs[i].second)
    return ahead + behind


class Groups(NamedTuple):
    """`sizes` of the groups into which units are cut, in order, and the seconds that all of it takes."""

    sizes: tuple[int, ...]
    seconds: float


def announced(done: Sequence[float], send: Callable[[int], float]) -> Groups:
    """Into which groups a kernel should announce its units: unit i is done at `done[i]`, n of them take `send(n)`.

    One kernel runs through; a group is sent once its last unit is done and the group before has left:

        t[j] = min over i < j of  max(done[j - 1], t[i]) + send(j - i)

    Exact in O(units^2), where a search over all partitions has 2^(units - 1) (the recurrence of arXiv 2504.19519).
    """
    best: list[tuple[float, int]] = [(0.0, 0)]
    for j in range(1, len(done) + 1):
        ready = done[j - 1]
        best.append(min((max(ready, best[i][0]) + send(j - i), i) for i in range(j)))
    return Groups(_cuts(lambda j: best[j][1], len(done)), best[-1][0])


def pieces(
    units: int,
    first: Callable[[int], float],
    second: Callable[[int], float],
    rest: float = 0.0,
    most: int = 8,
) -> Groups:
    """Into which pieces to cut `units` for two machines, where a piece of n takes `first(n)`, then `second(n)`.

    `rest` is what the first machine does afterwards, for none of them. Exact among all cuts into at most `most`:
    after the pieces that end at unit j the first machine is free at a time that depends on how it was cut, so for each
    number of pieces all times that no other beats are kept. Raises ValueError for no piece at all.
    """
    if most < 1:
        raise ValueError(f"most={most}: at least one piece")
    Front = list[tuple[float, float, int, int]]  # (first free, second free, cut, place in the front there)
    fronts: list[list[Front]] = [[[(0.0, 0.0, 0, 0)]] + [[] for _ in range(units)]]
    best: tuple[float, int, int] | None = None
    for count in range(1, min(most, units) + 1):
        before = fronts[-1]
        now: list[Front] = [[] for _ in range(units + 1)]
        for j in range(count, units + 1):
            found: Front = []
            for i in range(count - 1, j):
                a, b = first(j - i), second(j - i)
                found += [(f + a, max(f + a, s) + b, i, at) for at, (f, s, _, _) in enumerate(before[i])]
            now[j] = _undominated(found)
        fronts.append(now)
        for at, (f, s, _, _) in enumerate(now[units]):
            seconds = max(f + rest, s)
            if best is None or seconds < best[0]:
                best = (seconds, count, at)
    if best is None:
        return Groups((), rest)
    seconds, count, at = best
    sizes: list[int] = []
    j = units
    while count:
        _, _, i, at = fronts[count][j][at]
        sizes.append(j - i)
        j, count = i, count - 1
    return Groups(tuple(reversed(sizes)), seconds)


def _undominated(found: list[tuple[float, float, int, int]]) -> list[tuple[float, float, int, int]]:
    kept: list[tuple[float, float, int, int]] = []
    for one in sorted(found):
        if not kept or one[1] < kept[-1][1]:
            kept.append(one)
    return kept


def _cuts(before: Callable[[int], int], units: int) -> tuple[int, ...]:
    sizes: list[int] = []
    while units:
        sizes.append(units - before(units))
        units = before(units)
    return tuple(reversed(sizes))
