"""The groups of tiles, the orders in which a product stores them, and the flags: exact on random shapes."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fompi.backends.cuda import signal
from fompi.backends.cuda.signal import Signals, Tiling, by_destination, by_owner, by_tile, inverse, received
from fompi.base.errors import DeviceError, LayoutError, StateError


def compositions(total, parts):
    if parts == 0:
        return [()] if total == 0 else []
    return [(n, *rest) for n in range(1, total + 1) for rest in compositions(total - n, parts - 1)]


# -------------------------------------------------------------------------------------------------------------- waves


def test_waves_by_example():
    """Eight columns of tiles and six processors: one row of tiles needs two waves, three rows need four."""
    assert [signal.waves(n, 6) for n in (0, 1, 6, 7, 24)] == [0, 1, 1, 2, 4]
    assert signal.cost((8, 8, 8), 6) == 6 and signal.cost((24,), 6) == 4
    assert signal.row_groups(6, 8, 6, 2) == (3, 3)
    assert signal.tiles_of((1, 2, 1), 20, 6) == (6, 12, 2)
    with pytest.raises(LayoutError, match="groups of \\(1, 2\\) waves are not the 4 waves"):
        signal.tiles_of((1, 2), 20, 6)
    with pytest.raises(LayoutError, match="2 rows of tiles cannot be cut into 3 groups"):
        signal.row_groups(2, 8, 6, 3)


@given(st.integers(1, 9), st.integers(1, 7), st.integers(1, 12), st.integers(1, 5))
def test_row_groups_are_the_best_of_all(down, across, processors, groups):
    if groups > down:
        return
    sizes = signal.row_groups(down, across, processors, groups)

    def judged(cut):
        return signal.cost([n * across for n in cut], processors), max(cut)

    assert sum(sizes) == down and len(sizes) == groups
    assert judged(sizes) == min(map(judged, compositions(down, groups)))


@given(st.integers(1, 40), st.integers(1, 9), st.lists(st.integers(0, 9), min_size=41, max_size=41))
def test_the_best_waves_of_all(tiles, processors, seconds):
    """`seconds[n]` is the time to send n tiles."""
    count = signal.waves(tiles, processors)
    if count > 8:
        return
    best = signal.best_waves(tiles, processors, 3.0, seconds.__getitem__)

    def ends(cut):
        computed = sent = 0
        for n in cut:
            computed += 3 * n
            sent = max(computed, sent) + seconds[min(n * processors, tiles)]
        return sent

    assert signal.tiles_of(best.sizes, tiles, processors)[-1] >= 1 and best.seconds == ends(best.sizes)
    assert best.seconds == min(ends(cut) for k in range(1, count + 1) for cut in compositions(count, k))


# ------------------------------------------------------------------------------------------------------------- orders


@st.composite
def tilings(draw, most_owners=1):
    owners = draw(st.integers(1, most_owners))
    rows, columns = owners * draw(st.integers(0, 12)), draw(st.integers(0, 20))
    high, broad = owners * draw(st.integers(1, 4)), draw(st.integers(1, 6))
    tiling = Tiling(rows, columns, high, broad, owners, draw(st.integers(1, 4)))
    cuts = draw(st.sets(st.integers(1, max(tiling.tiles - 1, 1)), max_size=4)) if tiling.tiles > 1 else ()
    ends = [0, *sorted(cuts), tiling.tiles]
    return tiling, tuple(b - a for a, b in pairwise(ends) if tiling.tiles)


def stored(order, matrix):
    """What the kernel writes, by the definition of a tiling: tile by tile, as they start. NaN where nothing lies."""
    tiling, high = order.tiling, order.high
    out = np.full((len(order.place), high, tiling.broad), np.nan)
    written = np.zeros(len(order.place), int)
    of_shard = -(-tiling.shard // high)
    for tile in tiling.launched:
        m, n = divmod(int(tile), tiling.across)
        for owner, k in product(range(tiling.owners), range(tiling.share)):
            i = m * tiling.share + k  # in the shard
            if i // high >= of_shard:
                continue
            slot = order.place[(owner * of_shard + i // high) * tiling.across + n]
            written[slot] += i % high == 0
            if i < tiling.shard:
                row = matrix[owner * tiling.shard + i, n * tiling.broad :][: tiling.broad]
                out[slot, i % high, : len(row)] = row
    assert (written == 1).all()
    return out


def restored(pieces, index, shape):
    """As `gather` of kernels.py does it."""
    _, high, broad = pieces.shape
    across = -(-shape[1] // broad)
    out = np.full(shape, np.nan)
    for p, slot in enumerate(index):
        i, j = p // across * high, p % across * broad
        part = out[i : i + high, j : j + broad]
        part[...] = pieces[slot][: part.shape[0], : part.shape[1]]
    return out


def check(order, ranks, rows_of):
    """An order is a permutation, its groups and runs are complete and in one piece, and every rank gets its rows."""
    tiling = order.tiling
    count = len(order.place)
    assert sorted(order.place) == [*range(count)] and order.place.dtype == np.int32
    assert (inverse(order.place)[order.place] == np.arange(count)).all()
    assert (order.place[inverse(order.place)] == np.arange(count)).all()
    assert sorted(tiling.launched) == [*range(tiling.tiles)]
    assert (np.bincount(order.group, minlength=len(order.need)) == order.need).all()
    assert (np.diff(order.group) >= 0).all()

    matrix = np.arange(1.0, 1 + tiling.rows * tiling.columns).reshape(tiling.rows, tiling.columns)
    out = stored(order, matrix)
    runs = [order.run(g, r) for g in range(len(order.need)) for r in range(ranks)]
    assert [slot for run in runs for slot in run] == [*range(count)]
    ready = set()
    for g in range(len(order.need)):  # the elements of the tiles that have started until the end of the group
        tiles = tiling.launched[order.group <= g]
        for tile in tiles:
            m, n = divmod(int(tile), tiling.across)
            rows = [s * tiling.shard + i for s in range(tiling.owners)
                    for i in range(m * tiling.share, min((m + 1) * tiling.share, tiling.shard))]  # fmt: skip
            ready |= {matrix[i, j] for i in rows for j in range(tiling.columns)[n * tiling.broad :][: tiling.broad]}
        sent = out[: order.run(g, ranks - 1).stop]
        assert set(sent[~np.isnan(sent)]) == ready
    for r in range(ranks):
        arrived = [out[order.run(g, r).start : order.run(g, r).stop] for g in range(len(order.need))]
        pieces = np.concatenate([np.zeros((0, order.high, tiling.broad)), *arrived])
        mine = matrix[rows_of(r)]
        np.testing.assert_array_equal(restored(pieces, received(order, r), mine.shape), mine)


@given(tilings())
def test_an_order_by_tile(drawn):
    tiling, sizes = drawn
    check(by_tile(tiling, sizes), 1, lambda r: slice(None))


@given(tilings(most_owners=4))
def test_an_order_by_owner_restores_the_owner_of_every_row(drawn):
    tiling, sizes = drawn
    order = by_owner(tiling, sizes)
    check(order, tiling.owners, lambda r: slice(r * tiling.shard, (r + 1) * tiling.shard))
    assert (order.counts == order.counts[:, :1]).all()  # equally much for every rank, as a reduce-scatter needs it


@given(tilings(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_an_order_by_destination_with_unequal_counts(drawn, ranks, chance):
    tiling, sizes = drawn
    to = np.array([chance.randrange(ranks) ** 2 % ranks for _ in range(tiling.rows)], int)
    check(by_destination(tiling, sizes, to, ranks), ranks, lambda r: np.flatnonzero(to == r))


def test_a_band_starts_tiles_that_share_operands():
    """Three rows of four tiles, in bands of two rows."""
    assert Tiling(6, 8, 2, 2, band=2).launched.tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 9, 10, 11]


def test_what_does_not_fit_is_refused():
    tiling = Tiling(6, 8, 2, 2)
    for make, words in (
        (lambda: Tiling(6, 8, 4, 2, owners=4), "4 owners do not divide 6 rows and tiles of 4 rows"),
        (lambda: Tiling(8, 8, 2, 2, owners=4), "4 owners do not divide 8 rows and tiles of 2 rows"),
        (lambda: Tiling(8, 8, 0, 2), "at least 1"),
        (lambda: by_tile(tiling, (6, 5)), "groups of \\(6, 5\\) tiles are not the 12 tiles"),
        (lambda: by_tile(tiling, (12, 0)), "groups of"),
        (lambda: by_tile(Tiling(8, 8, 4, 2, owners=2), (8,)), "one owner of all rows"),
        (lambda: by_destination(tiling, (12,), [0, 1, 2, 0, 1, 3], 3), "each of 6 rows needs one destination below 3"),
        (lambda: by_destination(tiling, (12,), [0], 3), "each of 6 rows"),
    ):
        with pytest.raises(LayoutError, match=words):
            make()


# ------------------------------------------------------------------------------------------------------------ signals


@given(st.integers(1, 5), st.lists(st.randoms(use_true_random=False), min_size=1, max_size=4))
def test_flags_are_seen_once_in_every_call(groups, calls):
    signals = Signals(np.full(groups, 77, np.int32))
    for number, chance in enumerate(calls, 1):
        assert signals.begin() == number and not [*signals.new()]
        left = [*range(groups)]
        chance.shuffle(left)
        while left:
            raised = [left.pop() for _ in range(chance.randint(1, len(left)))]
            with pytest.raises(StateError, match="has not announced its groups"):
                signals.begin()
            signals.flags[raised] = number
            assert [*signals.new()] == sorted(raised) and not [*signals.new()]
        assert signals.all_seen


def test_epochs_begin_again_after_the_last_one():
    signals = Signals(np.zeros(2, np.int32))
    signals.epoch = signal.MOST_EPOCHS - 1
    signals.flags[...] = signals.epoch
    for epoch in (signal.MOST_EPOCHS, 1, 2):
        assert signals.begin() == epoch and not [*signals.new()]
        signals.flags[...] = epoch
        assert [*signals.new()] == [0, 1]


def test_a_flag_that_no_kernel_of_this_call_wrote_is_an_error():
    signals = Signals(np.zeros(2, np.int32))
    signals.begin()
    signals.flags[1] = 5
    with pytest.raises(DeviceError, match="the flag of group 1 is 5 in call 1"):
        [*signals.new()]
