"""What measured times say of a machine: values in, values out. `fompi.calibrate` takes the times."""

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
"""Bytes per second between two ranks, each pair of them by itself."""

APART, ENOUGH, PRICE = 1.5, 0.08, 0.04
"""A level is so many times slower than what it holds. Links that fit to e^ENOUGH are alike; a level gains e^PRICE."""

PAIR_NBYTES = 256 << 10, 768 << 10
"""Of the two messages by which pairs are compared: what buffers swallow at once is in both, not in the difference."""

ALIKE = 1.25
"""What differs by no more is the same, measured twice."""

FULL = 0.85
"""A rank with this share of the best speed has all of it: two measurements differ by as much."""


class Topology(NamedTuple):
    """`groups` of consecutive ranks, the innermost first; the share of its speed that each rank has."""

    groups: tuple[int, ...]
    rates: tuple[float, ...]

    def number(self, source: int, dest: int) -> int:
        """The level between two ranks: 0 inside of the smallest groups, then by the groups that they do not share."""
        return sum(source // ranks != dest // ranks for ranks in self.groups)


def shift(found: Topology, number: int) -> dict[int, tuple[int, int]]:
    """From whom and to whom ranks exchange, all at once, to measure the link of a level: rings, from group to group.

    Slow ranks would be what it measures: they sit out, where at least two of a group are left, to share its link.
    """
    size = len(found.rates)
    step, whole = [*(1, *found.groups), size][number : number + 2]
    ways: dict[int, tuple[int, int]] = {}
    for first in (rank for rank in range(size) if rank % whole < step):
        ring = [r for r in range(first, first - first % whole + whole, step) if found.rates[r] == 1.0]
        if len(ring) > 1:
            ways |= {r: (ring[i - 1], ring[(i + 1) % len(ring)]) for i, r in enumerate(ring)}
    return ways if crowd(ways, step) >= min(2, step) else shift(found._replace(rates=(1.0,) * size), number)


def crowd(ranks: Iterable[int], group: int) -> int:
    """How many of these ranks are in one group of so many consecutive ones, at most."""
    return max(Counter(rank // group for rank in ranks).values(), default=0)


def topology(size: int, speeds: Pairs) -> Topology:
    """The groups, nested and even, and the rates that say best how fast each pair is; no groups where none are needed.

    A pair is as fast as its level, times the rate of its slower end.
    """
    best = Topology((), _rates(size, speeds, Topology((), ())))
    least = _misfit(speeds, best)
    if least <= ENOUGH:
        return best
    for groups in _chains(size):
        found = Topology(groups, ())
        by_level = _by_level(speeds, found)
        if len(by_level) != len(groups) + 1:
            continue
        if any(by_level[i] < APART * by_level[i + 1] for i in range(len(groups))):
            continue
        found = Topology(groups, _rates(size, speeds, found))
        misfit = _misfit(speeds, found) + PRICE * len(groups)
        if misfit < least:
            best, least = found, misfit
    return best


def _chains(size: int) -> Iterator[tuple[int, ...]]:
    divisors = [d for d in range(2, size) if size % d == 0]
    for inner in divisors:
        yield (inner,)
        yield from ((inner, outer) for outer in divisors if outer > inner and outer % inner == 0)


def _by_level(speeds: Pairs, found: Topology) -> dict[int, float]:
    """The fastest pair of each level."""
    fastest: dict[int, float] = {}
    for pair, speed in speeds.items():
        number = found.number(*pair)
        fastest[number] = max(speed, fastest.get(number, 0.0))
    return fastest


def _rates(size: int, speeds: Pairs, found: Topology) -> tuple[float, ...]:
    """The best that each rank does, of what its level does."""
    fastest, rates = _by_level(speeds, found), [0.0] * size
    for pair, speed in speeds.items():
        for rank in pair:
            rates[rank] = max(rates[rank], speed / fastest[found.number(*pair)])
    return tuple(1.0 if rate >= FULL or rate == 0 else rate for rate in rates)


def _misfit(speeds: Pairs, found: Topology) -> float:
    """How far off a pair is, on average, as a logarithm."""
    levels: dict[int, list[float]] = {}
    for (a, b), speed in speeds.items():
        each = log(speed / min(found.rates[a], found.rates[b]))
        levels.setdefault(found.number(a, b), []).append(each)
    middles = {number: median(values) for number, values in levels.items()}
    return fmean(abs(v - middles[number]) for number, values in levels.items() for v in values) if levels else 0.0


def refitted(machine: Machine, size: int, speeds: Pairs) -> Machine:
    """The machine with the levels and rates that its links have now: it knew them when they did other `speeds`.

    A level is as fast as the best of its pairs, a rank as the best that it does; collectives of the library go by the
    slowest pair.
    """
    if not speeds:
        return machine
    found = Topology(tuple(level.ranks for level in machine.levels if level.ranks < size), ())
    whole = replace(machine, rates=())
    shares = {pair: speed / speed_of(whole, *pair) for pair, speed in speeds.items()}
    fastest = _by_level(shares, found)
    rates = _rates(size, shares, found)
    levels = tuple(
        _quicker(level, fastest.get(i, 1.0)) if level.ranks < size else level
        for i, level in enumerate(machine.levels, 1)
    )
    inner = _quicker(machine.innermost, fastest.get(0, 1.0))
    rates = rates if min(rates) < 1 else ()
    now = replace(machine, bandwidth=inner.bandwidth, curve=inner.curve, levels=levels, rates=rates)
    slower = min(speed_of(machine, *pair) for pair in speeds) / min(speed_of(now, *pair) for pair in speeds)
    return replace(
        now,
        natives={name: _stretched(points, slower) for name, points in machine.natives.items()},
        natives_behind={name: _stretched(points, slower) for name, points in machine.natives_behind.items()},
    )


def at_speed(machine: Machine, slower: float) -> Machine:
    """The machine while all that its cores do takes so many times as long: a core may be shared with others."""
    packs = machine.pack_rate < NO_PACKING
    return replace(
        machine,
        flops_rate=machine.flops_rate / slower,
        memory_rate=machine.memory_rate / slower,
        pack_rate=machine.pack_rate / slower if packs else NO_PACKING,
        overhead=machine.overhead * slower,
        cpu_message=machine.cpu_message * slower,
        cpu_byte=machine.cpu_byte * slower,
    )


def speed_of(machine: Machine, source: int, dest: int) -> float:
    """What the machine says of a pair as `topology` takes it. Bytes take a nanosecond at least: curves may be level."""
    link, (small, large) = machine.link(source, dest), PAIR_NBYTES
    return (large - small) / max(1e-9, link.busy(large) - link.busy(small))


def _quicker(level: Level, factor: float) -> Level:
    """The same link with another bandwidth; what differs by little does not differ."""
    if abs(log(factor)) < log(1 / FULL):
        return level
    points = tuple((n, level.latency + max(0.0, s - level.latency) / factor) for n, s in level.curve)
    return level._replace(bandwidth=level.bandwidth * factor, curve=points)


def _stretched(points: Points, slower: float) -> Points:
    return tuple((n, s * slower) for n, s in points)


def curve(samples: Sequence[tuple[float, float]]) -> Points:
    """(bytes, seconds) as points that grow: what is quicker than something smaller was measured badly."""
    ordered = sorted(samples)
    seconds = list(accumulate((s for _, s in ordered), max))
    return tuple((float(n), s) for (n, _), s in zip(ordered, seconds, strict=True))


TOO_GOOD = 2.0


def sustained(samples: Sequence[tuple[float, float]], latency: float) -> Points:
    """The curve of a link that is busy: no size moves faster than what the two largest ones differ by.

    After silence a link may swallow what its buffers hold at once; in the middle of a collective they are full. No
    link is TOO_GOOD times as fast between the two as on the way to the largest: then one of them was disturbed.
    """
    ordered = sorted(samples)
    (a, y), (b, z) = ordered[-2:]
    each = max((z - y) / (b - a), (z - latency) / b / TOO_GOOD, 0.0)
    *points, (_, y), (_, z) = curve([(0.0, latency), *((n, max(s, latency + n * each)) for n, s in ordered)])
    return (*points, (a, y), (b, max(z, y + (b - a) * each)))


def burst(samples: Sequence[tuple[float, float]], latency: float) -> float:
    """What a link passes at once after silence, in seconds of its rate: as much of each of the three largest messages.

    Nothing, if it is not the same of all three: then a message of some size is quick, whatever was before it.
    """
    *_, (a, y), (b, z) = ordered = sorted(samples)
    each = (z - y) / (b - a)
    saved = [n * each - (seconds - latency) for n, seconds in ordered[-3:]]
    return min(saved) if min(saved) > 0 and max(saved) <= ALIKE * min(saved) else 0.0


NO_SLOWER = 1.25
"""By so much, messages to several others may take longer than one by itself, if each has a port."""


def ports(taken: Mapping[int, float]) -> int:
    """How many ports a rank has, by the seconds that messages of one size to so many others take at once."""
    return max((count for count, seconds in taken.items() if seconds <= NO_SLOWER * taken[1]), default=1)


class Product(NamedTuple):
    """A product that was timed: its operations, the bytes that it multiplies, and the seconds above the overhead."""

    flops: float
    packed: float
    seconds: float


def product(m: int, k: int, n: int, seconds: float) -> Product:
    """One of (m, k) and (k, n) in float32."""
    return Product(2.0 * m * k * n, 4.0 * k * (m + n), seconds)


def product_rates(timed: Sequence[Product]) -> tuple[float, float]:
    """Operations and packed bytes per second: the least squares of relative errors, neither rate below nothing."""
    a = [p.flops / p.seconds for p in timed]  # per_flop * a + per_byte * b should be 1
    b = [p.packed / p.seconds for p in timed]
    aa, ab, bb = (sum(map(mul, *both)) for both in ((a, a), (a, b), (b, b)))
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        per_flop = (sum(a) * bb - sum(b) * ab) / determinant
        per_byte = (sum(b) * aa - sum(a) * ab) / determinant
        if per_flop > 0 and per_byte > 0:
            return 1 / per_flop, 1 / per_byte
    return aa / sum(a), NO_PACKING


def product_seconds(machine: Machine, m: int, k: int, n: int) -> float:
    """What the machine says of one call in float32."""
    one = product(m, k, n, 0.0)
    return machine.kernel(one.flops, 4.0 * m * (k + n), one.packed)
