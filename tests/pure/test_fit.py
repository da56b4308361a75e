"""Fits: the numbers of an invented machine are found again from the times that it would take."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fompi.model import fit
from fompi.model.fit import Topology
from fompi.model.machine import Level, Machine


def speeds(topology: Topology, by_level: list[float], spread: float = 0.0) -> dict[tuple[int, int], float]:
    draw, size = random.Random(3), len(topology.rates)
    return {
        (a, b): by_level[topology.number(a, b)]
        * min(topology.rates[a], topology.rates[b])
        * draw.uniform(1 - spread, 1 + spread)
        for a in range(size)
        for b in range(a + 1, size)
    }


@pytest.mark.parametrize("spread", [0.0, 0.06])
@pytest.mark.parametrize(
    ("groups", "size", "slow"),
    [
        ((), 2, {}),
        ((), 4, {}),
        ((), 4, {2: 0.25}),
        ((), 5, {0: 0.5}),
        ((2,), 4, {}),
        ((4,), 8, {}),
        ((2,), 8, {}),
        ((4,), 8, {5: 0.25}),
        ((2, 4), 8, {}),
        ((3,), 6, {}),
    ],
)
def test_groups_and_slow_ranks(groups, size, slow, spread):
    true = Topology(groups, tuple(slow.get(rank, 1.0) for rank in range(size)))
    fitted = fit.find_topology(size, speeds(true, [1e9, 1e8, 1e7], spread))
    assert fitted.groups == groups
    assert fitted.rates == pytest.approx(true.rates, rel=2.5 * spread + 1e-9)


@pytest.mark.parametrize(
    ("groups", "slow", "number", "peers"),
    [
        ((), {}, 0, {0: (3, 1), 1: (0, 2), 2: (1, 3), 3: (2, 0)}),
        ((), {2: 0.25}, 0, {0: (3, 1), 1: (0, 3), 3: (1, 0)}),
        ((), {0: 0.25, 1: 0.5, 2: 0.25}, 0, {0: (3, 1), 1: (0, 2), 2: (1, 3), 3: (2, 0)}),
        ((2,), {}, 0, {0: (1, 1), 1: (0, 0), 2: (3, 3), 3: (2, 2)}),
        ((2,), {2: 0.25}, 0, {0: (1, 1), 1: (0, 0)}),
        ((2,), {2: 0.25}, 1, {0: (2, 2), 1: (3, 3), 2: (0, 0), 3: (1, 1)}),
    ],
)
def test_rings_that_measure_a_level(groups, slow, number, peers):
    """A slow rank takes no part if enough other ranks remain. Else the link would look as slow as the rank."""
    topology = Topology(groups, tuple(slow.get(rank, 1.0) for rank in range(4)))
    assert fit.exchange_rings(topology, number) == peers


def test_slow_ranks_take_no_part_if_enough_ranks_remain():
    """Two ranks of a group are needed to see whether the group shares its link."""
    one_slow = Topology((4,), tuple(0.25 if rank == 5 else 1.0 for rank in range(8)))
    peers = fit.exchange_rings(one_slow, 1)
    assert peers == {r: ((r + 4) % 8, (r + 4) % 8) for r in (0, 2, 3, 4, 6, 7)} and fit.most_in_group(peers, 4) == 3
    three_slow = one_slow._replace(rates=(1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 1.0))
    assert fit.most_in_group(fit.exchange_rings(three_slow, 1), 4) == 4
    nested = Topology((2, 4), (1.0,) * 7 + (0.5,))
    assert fit.exchange_rings(nested, 1) == {r: (r ^ 2, r ^ 2) for r in (0, 1, 2, 3)} | {4: (6, 6), 6: (4, 4)}


def test_a_slower_link_never_takes_negative_time():
    """A curve may begin below the latency. The rest counts as 0, not as less."""
    curve = ((0.0, 1e-4), (1e6, 1e-2))
    machine = replace(Machine.load("gigabit"), latency=1e-3, curve=curve)
    speeds = {(0, 1): fit.speed_of(machine, 0, 1) / 2}
    now = fit.refitted(machine, 2, speeds)
    assert now.curve[0][1] == pytest.approx(1e-3) and now.link(0, 1).busy(1e6) == pytest.approx(18e-3)


def test_similar_links_are_no_groups():
    """Slightly faster links inside of groups do not make a level."""
    true = Topology((2,), (1.0,) * 4)
    assert fit.find_topology(4, speeds(true, [1.2e9, 1e9])) == Topology((), (1.0,) * 4)


def test_some_pairs_are_enough():
    true = Topology((8,), (1.0,) * 32)
    known = speeds(true, [1e9, 1e8])
    steps = {pair: speed for pair, speed in known.items() if pair[1] - pair[0] in (1, 2, 4, 8, 16)}
    assert fit.find_topology(32, steps).groups == (8,)


def test_a_single_rank_and_two():
    assert fit.find_topology(1, {}) == Topology((), (1.0,))
    assert fit.find_topology(2, {(0, 1): 5.0}) == Topology((), (1.0, 1.0))


def test_curves_do_not_fall():
    assert fit.curve([(4, 2.0), (1, 1.0), (16, 1.5), (64, 3.0)]) == ((1, 1.0), (4, 2.0), (16, 2.0), (64, 3.0))


def test_a_burst_is_not_counted_as_speed():
    """A link of 100 bytes per second that passes a burst of 50 bytes."""
    samples = [(n, 1.0 + max(0, n - 50) / 100) for n in (10, 100, 1000)]
    curve = dict(fit.sustained(samples, 1.0))
    assert curve == pytest.approx({0: 1.0, 10: 1.1, 100: 2.0, 1000: 11.0})
    assert fit.burst([*samples, (4000, 40.5)], 1.0) == pytest.approx(0.5)


@pytest.mark.parametrize("disturbed", [(1.1, 2.0, 2.0), (1.1, 4.0, 3.0), (1.1, 2.0, 2.1)])
def test_no_link_is_infinitely_fast(disturbed):
    """The second largest message was delayed. The largest one still takes time beyond it."""
    *_, (a, y), (b, z) = fit.sustained(list(zip((10, 100, 400), disturbed, strict=True)), 1.0)
    assert z - y >= (b - a) * (disturbed[-1] - 1.0) / b / fit.MOST_SPEEDUP * (1 - 1e-9)
    assert Level(1, 1.0, 1.0, False, fit.sustained([(10, 1.1), (100, 2.0), (400, 2.0)], 1.0)).fastest < 1e3


@pytest.mark.parametrize(
    "seconds",
    [
        (2.0, 3.0, 5.0),  # a link at its rate
        (1.5, 3.0, 5.0),  # one size is fast
        (3.5, 5.5, 9.5),  # small messages are slower
    ],
)
def test_no_burst(seconds):
    samples = list(zip((100, 200, 400), seconds, strict=True))
    assert fit.burst(samples, 1.0) == 0.0


@pytest.mark.parametrize("curve", [((1024.0, 1e-5),), ((1024.0, 1e-5), (1048576.0, 1e-5))])
def test_a_level_curve_has_a_speed(curve):
    """A curve with one point, or the same time for all sizes. Shared memory may look like this."""
    machine = replace(Machine.load("laptop"), curve=curve)
    pairs = {(0, 1): fit.speed_of(machine, 0, 1)}
    assert 0 < pairs[0, 1] < float("inf")
    assert fit.refitted(machine, 2, pairs) == machine


def test_a_machine_is_refitted():
    """One host has a third of its bandwidth, and the link between groups half of it."""
    levels = (Level(2, 1e-5, 1e7, True, ((0.0, 1e-5), (1e6, 0.10001))),)
    machine = Machine("m", 1e-5, 1e8, 1e10, 1e9, 1e-6, levels=levels, collectives={"all_gather": ((1e6, 0.01),)})
    now = replace(machine, rates=(1.0, 1.0, 1 / 3, 1.0), levels=(levels[0]._replace(bandwidth=5e6, curve=()),))
    pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    fitted = fit.refitted(machine, 4, {pair: fit.speed_of(now, *pair) for pair in pairs})
    assert fitted.rates == pytest.approx(now.rates, rel=0.01)
    assert fitted.levels[0].bandwidth == pytest.approx(5e6, rel=0.01)
    assert fitted.levels[0].curve[1] == pytest.approx((1e6, 0.20001), rel=0.01)
    assert fitted.collectives["all_gather"] == ((1e6, pytest.approx(0.06, rel=0.01)),)  # 1/3 of 1/2 of the speed
    again = fit.refitted(fitted, 4, {pair: fit.speed_of(now, *pair) for pair in pairs})
    assert again.collectives["all_gather"][0] == pytest.approx((1e6, 0.06), rel=0.01)
    healed = fit.refitted(again, 4, {pair: fit.speed_of(machine, *pair) for pair in pairs})
    assert (healed.rates, healed.collectives["all_gather"][0]) == ((), pytest.approx((1e6, 0.01), rel=0.01))
    same = fit.refitted(machine, 4, {pair: 0.95 * fit.speed_of(machine, *pair) for pair in pairs})
    assert (same.rates, same.levels, same.bandwidth) == ((), machine.levels, machine.bandwidth)


def test_collectives_of_the_library_follow_the_only_link():
    """Two ranks: their link has a third of its speed, so no rank is slower than the other."""
    machine = Machine("m", 1e-5, 1e8, 1e10, 1e9, 1e-6, collectives={"all_reduce": ((1e6, 0.01),)})
    fitted = fit.refitted(machine, 2, {(0, 1): fit.speed_of(machine, 0, 1) / 3})
    assert (fitted.rates, fitted.collectives["all_reduce"][0]) == ((), pytest.approx((1e6, 0.03)))


def test_a_machine_on_slower_cores():
    """The work of a core takes twice as long. Links and the library's collectives do not change."""
    machine = replace(
        Machine.load("gigabit"),
        pack_rate=1e9,
        cpu_message=1e-6,
        cpu_byte=1e-9,
        collectives={"all_gather": ((1.0, 1.0),)},
    )
    slow = fit.slowed(machine, 2.0)
    assert slow.kernel(1e6, 1e6, 1e6) == pytest.approx(2 * machine.kernel(1e6, 1e6, 1e6))
    assert (slow.cpu_message, slow.cpu_byte) == (2e-6, 2e-9)
    assert (slow.innermost, slow.collectives) == (machine.innermost, machine.collectives)
    assert fit.slowed(slow, 0.5) == machine
    packs_nothing = Machine.load("gigabit")
    assert fit.slowed(packs_nothing, 0.5).pack_rate == packs_nothing.pack_rate


@pytest.mark.parametrize("packing", [1e9, 1e10])
def test_products(packing):
    shapes = [(1024, 1024, 1024), (256, 1024, 1024), (64, 1024, 1024), (128, 1024, 2048)]
    both = [4.0 * (m * k + k * n) for m, k, n in shapes]
    timed = [
        (*fit.product(m, k, n), 2.0 * m * k * n / 5e10 + nbytes / packing)
        for (m, k, n), nbytes in zip(shapes, both, strict=True)
    ]
    assert fit.product_rates(timed) == pytest.approx((5e10, packing))
    machine = replace(Machine.load("gigabit"), flops_rate=5e10, pack_rate=packing)
    for shape, (_, _, seconds) in zip(shapes, timed, strict=True):
        assert fit.product_seconds(machine, *shape) == pytest.approx(machine.overhead + seconds)


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        ({}, 1),  # two ranks: there is only one peer
        ({1: 1.0, 2: 2.0, 4: 4.1}, 1),
        ({1: 1.0, 2: 1.0, 4: 2.0}, 2),
        ({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.2}, 8),
        ({1: 1.0, 2: 1.6, 4: 1.2}, 4),  # noise
    ],
)
def test_ports(taken, expected):
    assert fit.ports(taken) == expected


def test_packing_that_costs_nothing():
    """By noise, packing may seem to save time. It then counts as free."""
    timed = [(1e9, 4e6, 1.0), (1e8, 4e6, 0.09)]
    flops_rate, pack_rate = fit.product_rates(timed)
    assert pack_rate == 1e300 and 1e9 <= flops_rate <= 1.2e9


def test_ranks_with_the_same_speed_have_the_same_curve():
    """Noise of 10 % makes no difference, a core with a quota does, and so does one that is slow with many rows only."""
    seconds = [[1.0, 4.0], [1.1, 4.2], [2.0, 8.2], [1.05, 8.0]]
    first, second, third, fourth = fit.speeds((1, 64), seconds)
    assert first == second == ((1.0, pytest.approx(1.05)), (64.0, pytest.approx(4.1)))
    assert third == ((1.0, 2.0), (64.0, 8.2)) and fourth == ((1.0, 1.05), (64.0, 8.0))
    machine = replace(Machine.load("laptop"), speeds=fit.speeds((1, 64), seconds))
    slower = fit.slowed(machine, 2.0)
    assert slower.speeds[0][0][1] == 2 * machine.speeds[0][0][1]
