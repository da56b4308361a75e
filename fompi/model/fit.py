"""Fits the numbers of a machine to measured times. `fompi.tuning.calibrate` measures them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import log
from operator import mul
from statistics import fmean, median
from typing import NamedTuple

from fompi.base.file_checks import Points
from fompi.model.machine import NO_PACKING, Level, Machine

Pairs = Mapping[tuple[int, int], float]
"""Bytes per second between two ranks, measured one pair at a time."""

LEVEL_RATIO, GOOD_MISFIT, LEVEL_PENALTY = 1.5, 0.08, 0.04
"""Links of a level must be at least LEVEL_RATIO times slower than links of the level inside it.

A misfit is the mean absolute error of the logarithm of the speed. If the misfit without levels is at most GOOD_MISFIT
(8 %), no levels are tried: two measurements of one link differ by as much. Each level must reduce the misfit by
LEVEL_PENALTY.
"""

PAIR_NBYTES = 256 << 10, 768 << 10
"""The sizes of the two messages whose difference is the speed of a pair.

Buffers take in the first bytes of a message at once. Both messages contain these bytes, so the difference does not.
"""

BURST_RATIO = 1.25
"""Three estimates of a burst may differ by this factor. This is the noise of two measurements."""

FULL_RATE = 0.85
"""A rank with at least this share of the best speed counts as equally fast. This is the noise of two measurements."""


class Topology(NamedTuple):
    """The sizes of nested groups of consecutive ranks, the innermost first, and the rate of each rank (1: full)."""

    groups: tuple[int, ...]
    rates: tuple[float, ...]

    def number(self, source: int, dest: int) -> int:
        """The level between two ranks: the number of groups that they do not share, from the innermost on."""
        return sum(source // ranks != dest // ranks for ranks in self.groups)


def exchange_rings(topology: Topology, number: int) -> dict[int, tuple[int, int]]:
    """(source, dest) of each rank that takes part, to measure the links of a level with all messages at once.

    The messages go around rings, from group to group. Slow ranks take no part if at least two ranks of a group remain:
    else the link would look as slow as they are. Two ranks of a group show whether the group shares its link.
    """
    size = len(topology.rates)
    step, whole = [*(1, *topology.groups), size][number : number + 2]
    peers: dict[int, tuple[int, int]] = {}
    for first in (rank for rank in range(size) if rank % whole < step):
        ring = [r for r in range(first, first - first % whole + whole, step) if topology.rates[r] == 1.0]
        if len(ring) > 1:
            peers |= {r: (ring[i - 1], ring[(i + 1) % len(ring)]) for i, r in enumerate(ring)}
    if most_in_group(peers, step) >= min(2, step):
        return peers
    return exchange_rings(topology._replace(rates=(1.0,) * size), number)


def most_in_group(ranks: Iterable[int], group: int) -> int:
    """The largest number of these ranks that are in the same group of `group` consecutive ranks."""
    return max(Counter(rank // group for rank in ranks).values(), default=0)


def find_topology(size: int, speeds: Pairs) -> Topology:
    """The nested groups of equal sizes, and the rates of ranks, that explain the measured speeds best.

    By this model the speed of a pair is the speed of its level, times the rate of its slower end. There are no groups
    if the speeds do not need any.
    """
    best = Topology((), _rates(size, speeds, Topology((), ())))
    least = _misfit(speeds, best)
    if least <= GOOD_MISFIT:
        return best
    for groups in _nested_groups(size):
        candidate = Topology(groups, ())
        by_level = _fastest_by_level(speeds, candidate)
        if len(by_level) != len(groups) + 1:
            continue
        if any(by_level[i] < LEVEL_RATIO * by_level[i + 1] for i in range(len(groups))):
            continue
        candidate = Topology(groups, _rates(size, speeds, candidate))
        misfit = _misfit(speeds, candidate) + LEVEL_PENALTY * len(groups)
        if misfit < least:
            best, least = candidate, misfit
    return best


def _nested_groups(size: int) -> Iterator[tuple[int, ...]]:
    """All ways to divide `size` ranks into one or two levels of equal groups."""
    divisors = [d for d in range(2, size) if size % d == 0]
    for inner in divisors:
        yield (inner,)
        yield from ((inner, outer) for outer in divisors if outer > inner and outer % inner == 0)


def _fastest_by_level(speeds: Pairs, topology: Topology) -> dict[int, float]:
    """The speed of the fastest pair of each level."""
    fastest: dict[int, float] = {}
    for pair, speed in speeds.items():
        number = topology.number(*pair)
        fastest[number] = max(speed, fastest.get(number, 0.0))
    return fastest


def _rates(size: int, speeds: Pairs, topology: Topology) -> tuple[float, ...]:
    """For each rank the best speed of its pairs, as a share of the speed of their level."""
    fastest, rates = _fastest_by_level(speeds, topology), [0.0] * size
    for pair, speed in speeds.items():
        for rank in pair:
            rates[rank] = max(rates[rank], speed / fastest[topology.number(*pair)])
    return tuple(1.0 if rate >= FULL_RATE or rate == 0 else rate for rate in rates)


def _misfit(speeds: Pairs, topology: Topology) -> float:
    """The mean absolute error of the logarithm of the speed of a pair."""
    levels: dict[int, list[float]] = {}
    for (a, b), speed in speeds.items():
        level_speed = log(speed / min(topology.rates[a], topology.rates[b]))
        levels.setdefault(topology.number(a, b), []).append(level_speed)
    middles = {number: median(values) for number, values in levels.items()}
    return fmean(abs(v - middles[number]) for number, values in levels.items() for v in values) if levels else 0.0


def refitted(machine: Machine, size: int, speeds: Pairs) -> Machine:
    """The machine with new bandwidths and rates, after its links have changed to `speeds`.

    The groups stay. A level is as fast as the best of its pairs, and a rank as fast as its best pair. The curves of the
    library's collectives are stretched by as much as the slowest pair has become slower.
    """
    if not speeds:
        return machine
    topology = Topology(tuple(level.ranks for level in machine.levels if level.ranks < size), ())
    whole = replace(machine, rates=())
    shares = {pair: speed / speed_of(whole, *pair) for pair, speed in speeds.items()}
    fastest = _fastest_by_level(shares, topology)
    rates = _rates(size, shares, topology)
    levels = tuple(
        _scaled(level, fastest.get(i, 1.0)) if level.ranks < size else level
        for i, level in enumerate(machine.levels, 1)
    )
    inner = _scaled(machine.innermost, fastest.get(0, 1.0))
    rates = rates if min(rates) < 1 else ()
    now = machine.with_links(inner, levels, rates=rates)
    slower = min(speed_of(machine, *pair) for pair in speeds) / min(speed_of(now, *pair) for pair in speeds)
    return replace(
        now,
        collectives={name: _stretched(points, slower) for name, points in machine.collectives.items()},
        collectives_behind={name: _stretched(points, slower) for name, points in machine.collectives_behind.items()},
    )


def slowed(machine: Machine, slower: float) -> Machine:
    """The machine with cores that take `slower` times as long, for example because other programs use them too."""
    packs = machine.pack_rate < NO_PACKING
    return replace(
        machine,
        flops_rate=machine.flops_rate / slower,
        memory_rate=machine.memory_rate / slower,
        pack_rate=machine.pack_rate / slower if packs else NO_PACKING,
        overhead=machine.overhead * slower,
        cpu_message=machine.cpu_message * slower,
        cpu_byte=machine.cpu_byte * slower,
        speeds=tuple(each if isinstance(each, float) else _stretched(each, slower) for each in machine.speeds),
    )


def speed_of(machine: Machine, source: int, dest: int) -> float:
    """The speed of a pair on `machine`, as it is measured for `find_topology`: by the difference of two messages.

    The difference is at least a nanosecond, because a curve may be level.
    """
    link, (small, large) = machine.link(source, dest), PAIR_NBYTES
    return (large - small) / max(1e-9, link.busy(large) - link.busy(small))


def _scaled(level: Level, factor: float) -> Level:
    """`level` with `factor` times its bandwidth. Small differences are noise, and change nothing."""
    if abs(log(factor)) < log(1 / FULL_RATE):
        return level
    points = tuple((n, level.latency + max(0.0, s - level.latency) / factor) for n, s in level.curve)
    return level._replace(bandwidth=level.bandwidth * factor, curve=points)


def _stretched(points: Points, slower: float) -> Points:
    """A curve with `slower` times as many seconds."""
    return tuple((n, s * slower) for n, s in points)


def curve(samples: Sequence[tuple[float, float]]) -> Points:
    """The samples (bytes, seconds) as a curve that does not fall. A time below that of a smaller message is raised."""
    ordered = sorted(samples)
    seconds = list(accumulate((s for _, s in ordered), max))
    return tuple((float(n), s) for (n, _), s in zip(ordered, seconds, strict=True))


MOST_SPEEDUP = 2.0
"""A link is at most this many times as fast between the two largest messages as over all bytes of the largest.

A greater ratio means that one of the two measurements was disturbed.
"""


def sustained(samples: Sequence[tuple[float, float]], latency: float) -> Points:
    """The curve of a busy link: no message is faster than the rate between the two largest ones.

    After a silence the buffers of a link take in some bytes at once. In the middle of a collective they are full.
    """
    ordered = sorted(samples)
    (a, y), (b, z) = ordered[-2:]
    per_byte = max((z - y) / (b - a), (z - latency) / b / MOST_SPEEDUP, 0.0)
    *points, (_, y), (_, z) = curve([(0.0, latency), *((n, max(s, latency + n * per_byte)) for n, s in ordered)])
    return (*points, (a, y), (b, max(z, y + (b - a) * per_byte)))


def bandwidth(points: Points) -> float:
    """Bytes per second between the two largest messages of a curve."""
    (a, y), (b, z) = points[-2:]
    return (b - a) / (z - y) if z > y else b / max(z, 1e-9)


def burst(samples: Sequence[tuple[float, float]], latency: float) -> float:
    """The burst of a link, in seconds of its rate: the time that each of the three largest messages saves by it.

    It is 0 if they save different times. Then messages of some size are fast for another reason.
    """
    *_, (a, y), (b, z) = ordered = sorted(samples)
    per_byte = (z - y) / (b - a)
    saved = [n * per_byte - (seconds - latency) for n, seconds in ordered[-3:]]
    return min(saved) if min(saved) > 0 and max(saved) <= BURST_RATIO * min(saved) else 0.0


PORT_TOLERANCE = 1.25
"""Messages to several peers may take this many times as long as one message, if each has its own port."""


def ports(taken: Mapping[int, float]) -> int:
    """The number of ports of a rank. `taken[n]` are the seconds of n messages of one size to n peers at once."""
    return max((count for count, seconds in taken.items() if seconds <= PORT_TOLERANCE * taken[1]), default=1)


def product(m: int, k: int, n: int) -> tuple[float, float]:
    """The operations of the product of (m, k) and (k, n) in float32, and the bytes of its operands."""
    return 2.0 * m * k * n, 4.0 * k * (m + n)


def product_rates(timed: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Operations per second, and packed bytes per second, by least squares of relative errors.

    `timed` are products: (operations, packed bytes, seconds without the overhead of a call). If a rate would be
    negative, packing counts as free.
    """
    a = [flops / seconds for flops, _, seconds in timed]  # per_flop * a + per_byte * b should be 1
    b = [packed / seconds for _, packed, seconds in timed]
    aa, ab, bb = (sum(map(mul, *both)) for both in ((a, a), (a, b), (b, b)))
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        per_flop = (sum(a) * bb - sum(b) * ab) / determinant
        per_byte = (sum(b) * aa - sum(a) * ab) / determinant
        if per_flop > 0 and per_byte > 0:
            return 1 / per_flop, 1 / per_byte
    return aa / sum(a), NO_PACKING


def speeds(rows: Sequence[int], seconds: Sequence[Sequence[float]]) -> tuple[Points, ...]:
    """`Machine.speeds`: the curve of each rank, from its seconds of products with so many rows.

    Ranks whose times differ by no more than noise have the same curve, the mean of theirs.
    """
    groups: list[list[int]] = []
    for rank in sorted(range(len(seconds)), key=lambda rank: sum(map(log, seconds[rank]))):
        first = seconds[groups[-1][0]] if groups else ()
        is_alike = groups and all(max(a, b) * FULL_RATE <= min(a, b) for a, b in zip(first, seconds[rank], strict=True))
        groups = [*groups[:-1], [*groups[-1], rank]] if is_alike else [*groups, [rank]]
    means = [[fmean(seconds[rank][i] for rank in group) for i in range(len(rows))] for group in groups]
    of = {
        rank: curve([*zip(rows, each, strict=True)])
        for group, each in zip(groups, means, strict=True)
        for rank in group
    }
    return tuple(of[rank] for rank in range(len(seconds)))


def product_seconds(machine: Machine, m: int, k: int, n: int) -> float:
    """The seconds of one product of (m, k) and (k, n) in float32 on `machine`."""
    flops, packed = product(m, k, n)
    return machine.kernel(flops, 4.0 * m * (k + n), packed)
