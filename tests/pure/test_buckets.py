"""The cut of parameters into buckets: exact, printable, with a small last bucket."""

from __future__ import annotations

from itertools import accumulate, pairwise, product
from math import inf, isnan, nan
from random import Random

import pytest

from fompi.base.errors import LayoutError
from fompi.model.machine import Machine
from fompi.parallel.buckets import LAST_SHARE, Buckets, buckets, clip_factor, cut_by_bytes

MACHINE = Machine.load("gigabit")


def cuts(n):
    for ends in product((False, True), repeat=n - 1):
        edges = [0, *(i + 1 for i, end in enumerate(ends) if end), n]
        yield [b - a for a, b in pairwise(edges)]


def exposed(counts, sizes, seconds, ranks):
    """max over k of (sums of the buckets 0 to k) - (backward of the buckets 0 to k - 1): the formula, not the walk."""
    edges = [0, *accumulate(counts)]
    parts = [slice(a, b) for a, b in pairwise(edges)]
    sums = [sum(sizes[part]) * (1 + 1 / ranks) for part in parts]
    sums = [MACHINE.library("reduce_scatter", n, ranks) if n else 0.0 for n in sums]
    backward = [sum(seconds[part]) for part in parts]
    return max(sum(sums[: k + 1]) - sum(backward[:k]) for k in range(len(counts)))


@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_all_cuts(seed):
    draw = Random(seed)
    n, ranks = draw.randint(1, 8), draw.choice([2, 3, 8])
    sizes = [draw.choice([0, 10**3, 10**5, 4 * 10**6]) for _ in range(n)]
    seconds = [draw.choice([0.0, 1e-4, 1e-2, 0.05]) for _ in range(n)]
    found = buckets(sizes, seconds, MACHINE, ranks=ranks)
    assert sum(found.counts) == n and sum(found.nbytes) == sum(sizes)
    assert found.exposed == pytest.approx(exposed(found.counts, sizes, seconds, ranks), abs=1e-12)
    best = min(exposed(cut, sizes, seconds, ranks) for cut in cuts(n))
    assert found.exposed == pytest.approx(best, abs=1e-12)


def test_the_last_bucket_is_small():
    """32 equal layers whose sums take 0.9 of their backward: about one layer is exposed, not a bucket of eight."""
    nbytes = 4e6
    layer = MACHINE.library("reduce_scatter", nbytes * 1.125, 8) / 0.9
    found = buckets([nbytes] * 32, [layer] * 32, MACHINE, ranks=8)
    assert found.counts[0] == 1 and found.exposed < 1.01 * layer
    assert exposed([8] * 4, [nbytes] * 32, [layer] * 32, 8) > 6 * layer


def test_it_is_printed():
    found = Buckets((1, 2), (8.0, 24.0), (0.001, 0.002), (0.0005, 0.0015))
    assert found.seconds == pytest.approx(0.004) and found.exposed == pytest.approx(0.001)
    assert str(found).splitlines() == [
        "2 buckets of 3 parameters: backward 3.000 ms, sums 2.000 ms, exposed 1.000 ms, 50.0% hidden",
        "bucket  parameters          bytes     ready    leaves      done   (ms, the backward begins at 0)",
        "     1           2             24     2.000     2.000     3.500",
        "     0           1              8     3.000     3.500     4.000",
    ]


def test_nothing_and_wrong_arguments():
    assert buckets([], [], "gigabit").counts == ()
    for sizes, seconds in [([1], []), ([-1], [1]), ([1], [float("nan")])]:
        with pytest.raises(LayoutError, match="at least 0"):
            buckets(sizes, seconds, MACHINE)


def test_clip_factor():
    assert [clip_factor(norm, 2.0) for norm in (0.0, 1.0)] == [1.0, 1.0]
    assert clip_factor(8.0, 2.0) * 8.0 == pytest.approx(2.0) and clip_factor(inf, 2.0) == 0.0
    assert isnan(clip_factor(nan, 2.0)), "torch makes the gradients NaN, too"


@pytest.mark.parametrize("seed", range(20))
def test_cut_by_bytes(seed):
    draw = Random(seed)
    sizes = [draw.choice([0, 1, 10, 100, 1000]) for _ in range(draw.randint(1, 60))]
    most = draw.choice([1, 64, 500, 10**6])
    counts = cut_by_bytes(sizes, most)
    edges = [0, *accumulate(counts)]
    totals = [sum(sizes[a:b]) for a, b in pairwise(edges)]
    assert edges[-1] == len(sizes) and min(counts) >= 1
    assert all(total <= most or count == 1 or total == max(sizes) for total, count in zip(totals, counts, strict=True))
    biggest = max(max(sizes), most // LAST_SHARE, 1)
    assert totals[0] <= biggest, "the last bucket of the backward is small"
