"""Boxes and the plans between them: against NumPy, and with plans that are broken."""

from dataclasses import replace
from math import prod
from random import Random

import numpy as np
import pytest
from boxes import held, least_elements, sharding_of, views

import fompi
from fompi import LayoutError, PlanError, Replicate, Shard
from fompi.plans.boxes import Box, Boxes
from fompi.plans.resharding import balanced, resharding


def carry(plan, move, memory, into):
    boxes, targets = plan.source.of[move.source], plan.target.of[move.target]
    part = views(memory, boxes)[move.read][boxes[move.read].slices(move.box)]
    views(into, targets)[move.write][targets[move.write].slices(move.box)] = part


def test_random_pairs_have_the_bits_of_numpy_and_the_least_bytes():
    rng = Random(7)
    for _ in range(250):
        shape = tuple(rng.choice([0, 1, 2, 3, 5, 8, 12]) for _ in range(rng.randint(1, 3)))
        size, peak = rng.choice([1, 2, 3, 4, 6, 8]), rng.choice([None, 4, 16, 64, 200])
        source, target = sharding_of(rng, shape, size), sharding_of(rng, shape, size)
        plan = resharding(source, target, 4, peak)
        x = np.arange(prod(shape), dtype=np.int32).reshape(shape)
        here, expected = held(x, source), held(x, target)
        found = [np.full_like(memory, -7) for memory in expected]
        for moves in (plan.copies, *plan.rounds):
            nbytes = [0] * size
            for move in moves:
                carry(plan, move, here[move.source], found[move.target])
                for rank in (move.source, move.target):
                    nbytes[rank] += 4 * move.box.elements
            assert peak is None or moves is plan.copies or max(nbytes) <= peak
        for memory, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(memory, wanted)
        assert plan.nbytes == 4 * least_elements(source, target)


def test_replicas_send_equally_much_and_near_ones_first():
    source = Boxes.over((120, 4), (Replicate(), Shard(0)), (2, 2), size=6)
    target = Boxes.over((120, 4), Shard(1), 2, ranks=(4, 5), size=6)
    sent = [sum(row) for row in resharding(source, target, 4).pairs(resharding(source, target, 4).rounds[0])]
    assert sent == [480, 480, 480, 480, 0, 0]
    near = resharding(source, target, 4, costs=tuple((float(a < 2),) * 6 for a in range(6)))
    assert [sum(row) for row in near.pairs(near.rounds[0])] == [0, 0, 960, 960, 0, 0]


def test_owners_are_balanced_where_groups_overlap():
    found = balanced({(0,): 60, (0, 1): 60, (1, 2): 60, (2, 3): 60})
    sums = {rank: 0.0 for rank in range(4)}
    for owners, given in found.items():
        for owner, amount in zip(owners, given, strict=True):
            sums[owner] += amount
    assert all(abs(amount - 60) < 1 for amount in sums.values())


def test_padding_is_never_data():
    """Two buckets of 5 and 6 elements, padded for 4 ranks: what a rank has behind its elements is left alone."""
    for n in (5, 6):
        padded = Boxes.flat((n,), [2, 2, n - 4, 0], 2)
        plan = resharding(padded, Boxes.flat((n,), [n, 0, 0, 0], 8), 4)
        x = np.arange(1, n + 1, dtype=np.int32)
        here, found = held(x, padded), np.full(8, -9, np.int32)
        for move in (*plan.copies, *plan.rounds[0]):
            carry(plan, move, here[move.source], found)
        np.testing.assert_array_equal(found, [*x, *[-9] * (8 - n)])


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: Boxes((4,), ((Box((2,), (3,)),),)), "rank 0: the box .* is out of range"),
        (lambda: Boxes((4,), ((Box((0, 0), (3,)),),)), "is out of range"),
        (lambda: Boxes((4,), ((Box((-1,), (3,)),),)), "is out of range"),
        (lambda: Boxes((4,), ((Box((0,), (4,)),),), ((3,),)), "has no room for 4 elements"),
        (lambda: resharding(Boxes.flat((4,), [1, 2]), Boxes.flat((4,), [0, 4]), 4), "hole of the source"),
        (lambda: resharding(Boxes.flat((4,), [4]), Boxes.flat((5,), [5]), 4), "the target has the shape"),
        (lambda: resharding(Boxes.flat((4,), [4]), Boxes.flat((4,), [4]), 4, peak=3), "no room for one element"),
        (lambda: Boxes.over((4,), Shard(1), 2), "no Shard"),
        (lambda: Boxes.over((4,), Shard(0), (2, 2)), "takes 2 layouts"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(made, words):
    with pytest.raises(LayoutError, match=words):
        made()


def test_broken_plans_are_refused():
    plan = resharding(Boxes.over((6, 4), Shard(0), 3), Boxes.over((6, 4), Shard(1), 3), 4, peak=64)
    (first, *others), *rounds = plan.rounds
    moved = first._replace(write=1)
    read = first._replace(box=Box((5, 3), (1, 1)))
    for moves, words in (
        ([*others], "are not written"),
        ([first, first, *others], "written twice"),
        ([moved, *others], "no box of the target"),
        ([read, *others], "the source has no such element"),
    ):
        with pytest.raises(PlanError, match=words):
            replace(plan, rounds=(tuple(moves), *rounds)).verify()
    with pytest.raises(PlanError, match="more than peak=8"):
        replace(plan, peak=8).verify()


def test_the_plan_says_who_sends_what():
    text = str(resharding(Boxes.over((64, 64), Shard(0), 2), Boxes.over((64, 64), Shard(1), 2), 4, peak=4096))
    assert "8.0 KiB in messages, 8.0 KiB stay" in text and "4 rounds, at most 4.0 KiB" in text
    assert "rank 1: sends 4.0 KiB to 0; receives 4.0 KiB" in text


@pytest.mark.parametrize("peak", [8 << 20, 3 << 20])
def test_a_round_is_simulated_as_an_all_to_all(peak):
    """On a wire of 1 Gbit/s the rounds take at most 1.1 times as long as the bytes of a rank: both ways at once."""
    plan = resharding(Boxes.over((4096, 4096), Shard(0), 4), Boxes.over((4096, 4096), Shard(1), 4), 4, peak=peak)
    one_round = fompi.plan(fompi.all_to_all, fompi.Spec((4096,), "uint8", Shard(0)), ranks=4)
    seconds = sum(fompi.simulate(one_round, "gigabit", each).seconds for each in plan.sizes)
    assert seconds <= 1.1 * (12 << 20) / 125e6


def test_two_rounds_are_in_flight_within_the_peak():
    plan = resharding(Boxes.over((64, 64), Shard(0), 2), Boxes.over((64, 64), Shard(1), 2), 4, peak=4096)
    assert plan.last_before == [-1, -1, 0, 1] and plan.most_nbytes == 4096
    small = resharding(Boxes.flat((4,), [4, 0]), Boxes.flat((4,), [0, 4]), 4, peak=4)  # no room for two
    assert small.last_before == [-1, 0, 1, 2] and small.most_nbytes == 4
