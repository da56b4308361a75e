"""Small scheduling problems with exact answers: the best way to cut work into pieces.

A piece is computed and then sent, or received and then used. So it passes two machines, one after the other. Each
machine works on one piece at a time: a flow shop. `makespan` is the time of a given order.

    first    | a    | b  | c        |
    second          | a        | b    |   | c |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Job(NamedTuple):
    """One piece: its seconds on the first machine, and then on the second."""

    first: float
    second: float


def makespan(jobs: Sequence[Job]) -> float:
    """Seconds until all jobs have passed both machines, in this order."""
    first = second = 0.0
    for job in jobs:
        first += job.first
        second = max(first, second) + job.second
    return max(first, second)


class Groups(NamedTuple):
    """The number of units in each group, in order, and the seconds until everything is done."""

    sizes: tuple[int, ...]
    seconds: float


def announced(done: Sequence[float], send: Callable[[int], float]) -> Groups:
    """The best groups in which a running kernel announces its units.

    Unit i is done at `done[i]`. Sending a group of n units takes `send(n)` seconds. The kernel does not stop. A group
    is sent when its last unit is done and the previous group has left. With t[j] for the time after unit j - 1 is sent:

        t[j] = min over i < j of  max(done[j - 1], t[i]) + send(j - i)

    This is exact, in O(units^2). There are 2^(units - 1) partitions (the recurrence is that of arXiv 2504.19519).
    """
    return announced_units(done, lambda i, j: send(j - i))


def announced_units(done: Sequence[float], send: Callable[[int, int], float]) -> Groups:
    """`announced` for units that differ: sending units i to j - 1 takes `send(i, j)` seconds."""
    best: list[tuple[float, int]] = [(0.0, 0)]
    for j in range(1, len(done) + 1):
        ready = done[j - 1]
        best.append(min((max(ready, best[i][0]) + send(i, j), i) for i in range(j)))
    return Groups(_cuts(lambda j: best[j][1], len(done)), best[-1][0])


def pieces(
    units: int, first: Callable[[int], float], second: Callable[[int], float], rest: float = 0.0, most: int = 8
) -> Groups:
    """The best cut of `units` into at most `most` pieces.

    A piece of n units takes `first(n)` seconds on the first machine, then `second(n)` on the second. After all pieces
    the first machine works for `rest` more seconds. The answer is exact. The times at which both machines are free
    after unit j depend on the cut before it. So for each unit and each number of pieces, all pairs of times that no
    other pair beats are kept.

    Raises ValueError if `most` is less than 1.
    """
    if most < 1:
        raise ValueError(f"most={most} must be 1 or more")
    Pairs = list[tuple[float, float, int, int]]  # (first free, second free, last cut, index of the pair at that cut)
    kept: list[list[Pairs]] = [[[(0.0, 0.0, 0, 0)]] + [[] for _ in range(units)]]
    best: tuple[float, int, int] | None = None
    for count in range(1, min(most, units) + 1):
        before = kept[-1]
        now: list[Pairs] = [[] for _ in range(units + 1)]
        for j in range(count, units + 1):
            candidates: Pairs = []
            for i in range(count - 1, j):
                a, b = first(j - i), second(j - i)
                candidates += [(f + a, max(f + a, s) + b, i, at) for at, (f, s, _, _) in enumerate(before[i])]
            now[j] = _undominated(candidates)
        kept.append(now)
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
        _, _, i, at = kept[count][j][at]
        sizes.append(j - i)
        j, count = i, count - 1
    return Groups(tuple(reversed(sizes)), seconds)


def _undominated(candidates: list[tuple[float, float, int, int]]) -> list[tuple[float, float, int, int]]:
    """The candidates that no other one beats on both machines (a Pareto front)."""
    kept: list[tuple[float, float, int, int]] = []
    for candidate in sorted(candidates):
        if not kept or candidate[1] < kept[-1][1]:
            kept.append(candidate)
    return kept


def _cuts(before: Callable[[int], int], units: int) -> tuple[int, ...]:
    """The sizes of the groups, if the group that ends at unit j begins at unit `before(j)`."""
    sizes: list[int] = []
    while units:
        sizes.append(units - before(units))
        units = before(units)
    return tuple(reversed(sizes))
