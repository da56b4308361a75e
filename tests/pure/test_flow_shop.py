"""The exact answers of the flow shop, compared with all possibilities. They must be equal, not only close."""

from __future__ import annotations

from itertools import accumulate, product
from random import Random

import pytest

from fompi.model.flow_shop import Job, announced, makespan, pieces

SECONDS = range(0, 12)
"""Integers, so that sums are exact in any order."""


def compositions(total):
    """All ordered ways to write `total` as a sum of integers of at least 1."""
    for cuts in product((False, True), repeat=max(total - 1, 0)):
        sizes = [1] if total else []
        for cut in cuts:
            if cut:
                sizes.append(1)
            else:
                sizes[-1] += 1
        yield tuple(sizes)


def test_the_makespan_by_example():
    """first  |aaa|b|cc|        second      |aa|bbb|c|"""
    assert makespan([Job(3, 2), Job(1, 3), Job(2, 1)]) == 9
    assert makespan([Job(3, 0)]) == 3 and makespan([]) == 0
    assert makespan([Job(1, 0), Job(5, 0)]) == 6


@pytest.mark.parametrize("seed", range(40))
def test_groups_of_a_kernel_that_announces_them(seed):
    """Messages have any cost. A larger message may even be cheaper."""
    draw = Random(seed)
    for _ in range(30):
        units = draw.randint(0, 9)
        done = list(accumulate(draw.choice(SECONDS) for _ in range(units)))
        cost = [0, *(draw.choice(SECONDS) for _ in range(units))]

        def seconds(sizes, done=done, cost=cost):
            end = free = 0
            for size in sizes:
                end += size
                free = max(done[end - 1], free) + cost[size]
            return free

        best = announced(done, cost.__getitem__)
        assert sum(best.sizes) == units and best.seconds == seconds(best.sizes)
        assert best.seconds == min(map(seconds, compositions(units)))


@pytest.mark.parametrize("seed", range(40))
def test_pieces_for_two_machines(seed):
    draw = Random(seed)
    for _ in range(20):
        units, most, rest = draw.randint(0, 8), draw.randint(1, 8), draw.choice(SECONDS)
        first, second = ([0, *(draw.choice(SECONDS) for _ in range(units))] for _ in range(2))

        def seconds(sizes, first=first, second=second, rest=rest):
            jobs = [Job(first[size], second[size]) for size in sizes]
            return max(makespan(jobs), sum(job.first for job in jobs) + rest)

        best = pieces(units, first.__getitem__, second.__getitem__, rest, most)
        assert sum(best.sizes) == units and len(best.sizes) <= most and best.seconds == seconds(best.sizes)
        assert best.seconds == min(seconds(sizes) for sizes in compositions(units) if len(sizes) <= most)


def test_pieces_grow_if_messages_are_slower():
    """A piece of n units is computed in 1 + n and sent in 3 n. So the first piece is small, and pieces grow."""
    sizes, seconds = pieces(24, lambda n: 1 + n, lambda n: 3 * n)
    assert sizes == tuple(sorted(sizes)) and sizes[0] == 1 and seconds == 2 + 72
