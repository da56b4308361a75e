"""Rows, blocks and symbols. Equal symbols mean equally many rows, in every call and on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fompi.base.errors import DtypeError, LayoutError
from fompi.base.layout import (
    AXES,
    ITEMSIZE,
    Extents,
    Shard,
    Sizes,
    Spec,
    accumulator,
    blocks,
    cut,
    in_common,
    itemsize,
    nbytes,
    offsets,
    split,
    symbol,
)

counts = st.integers(0, 9)
shares = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def all_sizes(draw):
    """A number of ranks, the rows of each owner, and the rows of each pair."""
    size = draw(st.integers(1, 6))
    rows = draw(st.lists(counts, min_size=size, max_size=size))
    pairs = draw(st.lists(st.lists(counts, min_size=size, max_size=size), min_size=size, max_size=size))
    return size, Sizes(rows=tuple(rows)), Sizes(pairs=tuple(map(tuple, pairs)))


@given(st.integers(0, 1000), st.integers(1, 20))
def test_split_is_as_even_as_possible(total, pieces):
    parts = split(total, pieces)
    assert len(parts) == pieces and sum(parts) == total
    assert max(parts) - min(parts) <= 1 and list(parts) == sorted(parts, reverse=True)


@given(st.integers(0, 1000), st.lists(st.integers(1, 50), min_size=1, max_size=12))
def test_cut_keeps_the_proportions(total, shares):
    rows = cut(total, shares)
    assert len(rows) == len(shares) and sum(rows) == total
    assert all(-1 < n - total * share / sum(shares) <= 1 for n, share in zip(rows, shares, strict=True))
    assert cut(total, (3,) * len(shares)) == list(split(total, len(shares)))


@given(st.lists(counts))
def test_offsets_are_the_starts_of_the_runs(runs):
    assert offsets(runs) == [sum(runs[:i]) for i in range(len(runs) + 1)]


def test_what_runs_have_in_common():
    """The same elements, cut from the one run and from the other one."""
    runs = [range(a, b) for a in range(5) for b in range(a, 6)]
    for run in runs:
        for other in runs:
            here, there = in_common((run.start, run.stop), (other.start, other.stop))
            assert [*run[here]] == [*other[there]] == sorted({*run} & {*other})


@given(all_sizes(), shares)
def test_equal_symbols_have_equally_many_rows(given_sizes, shares):
    """This holds for all ranks and buffers, so the rows of messages, sums and products match in every call."""
    size, by_owner, by_pair = given_sizes
    parts, rows_by_symbol = len(shares), {}
    for axis in AXES:
        if axis == "whole":
            continue
        sizes = by_pair if axis in ("send", "recv") else by_owner
        for rank in range(size):
            block_rows = sizes.extents(rank, shares).counts(axis)
            numbers = blocks(axis, rank, size, parts)
            assert len(block_rows) == len(numbers)
            for block, rows in zip(numbers, block_rows, strict=True):
                assert rows_by_symbol.setdefault(symbol(axis, rank, size, parts, block), rows) == rows


@given(all_sizes(), shares)
def test_rows_of_an_axis_add_up(given_sizes, shares):
    size, by_owner, by_pair = given_sizes
    for rank in range(size):
        owned, paired = by_owner.extents(rank, shares), by_pair.extents(rank, shares)
        assert sum(owned.counts("rows")) == sum(owned.counts("slices")) == sum(by_owner.rows)
        assert sum(owned.counts("own")) == by_owner.rows[rank]
        assert sum(owned.counts("copies")) == size * by_owner.rows[rank]
        assert sum(paired.counts("send")) == sum(by_pair.pairs[rank])
        assert sum(paired.counts("recv")) == sum(row[rank] for row in by_pair.pairs)


def test_rows_of_experts_by_example():
    """Rank 0 has two experts, rank 1 has one. Each run is cut into two slices, and all pairs have two runs."""
    sizes = Sizes.grouped([[[1, 2], [3]], [[4, 5], [6]]])
    assert sizes.pairs == ((3, 3), (9, 6)) and sizes.runs[0] == ((1, 2), (3, 0))
    extents = sizes.extents(1, (1, 1), (2, 1))
    assert extents.counts("send") == [2, 2, 3, 2, 3, 3, 0, 0]
    assert extents.counts("recv") == [2, 1, 0, 0, 3, 3, 0, 0]
    assert extents.counts("experts") == (1,) and [*blocks("experts", 1, 2, 4, 1)] == [0]
    assert (extents.by_peer("send"), extents.by_peer("recv")) == (((4, 5), (6,)), ((3,), (6,)))
    early = extents._replace(is_late=False)  # the rank that sends multiplies
    assert (early.by_peer("send"), early.by_peer("recv")) == (((4,), (6,)), ((3, 0), (6,)))


def test_each_axis_by_example():
    """Rank 1 of 3 ranks with 4, 3 and 0 rows, in 2 parts."""
    extents = Sizes(rows=(4, 3, 0)).extents(1, (1, 1))
    assert extents.counts("rows") == [2, 2, 2, 1, 0, 0]
    assert extents.counts("own") == [2, 1]
    assert extents.counts("copies") == [2, 1, 2, 1, 2, 1]
    assert extents.counts("slices") == [2, 2, 0, 2, 1, 0]
    pairs = Sizes(pairs=((1, 2, 3), (4, 5, 6), (7, 8, 9))).extents(1, (1, 1))
    assert (pairs.send, pairs.recv) == ((4, 5, 6), (2, 5, 8))
    assert pairs.counts("recv") == [1, 1, 3, 2, 4, 4]
    assert list(blocks("own", 1, 3, 2)) == [2, 3] and list(blocks("whole", 1, 3, 2)) == [0]
    assert symbol("slices", 1, 3, 2, 4) == symbol("rows", 0, 3, 2, 3) == ("rows", 1, 1)
    assert symbol("send", 1, 3, 2, 5) == symbol("recv", 2, 3, 2, 3) == ("pair", 1, 2, 1)


def test_a_whole_buffer_has_no_rows():
    with pytest.raises(LayoutError, match="a fixed shape"):
        Extents(0, 1, (1,)).counts("whole")


# ------------------------------------------------------------------------------------------------ dtypes, specs


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_itemsize_and_accumulator(dtype):
    assert nbytes((3, 2), dtype) == 6 * itemsize(dtype)
    assert accumulator(dtype) == ("float32" if dtype in ("float16", "bfloat16") else dtype)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(DtypeError, match="unknown dtype 'float8' \\(did you mean float64\\?\\); known: float64"):
        Spec((3,), "float8")


@pytest.mark.parametrize("shape", [(-1,), (3, 2.0), ("3",), (None,)])
def test_invalid_shapes_are_refused(shape):
    with pytest.raises(LayoutError, match="integers >= 0"):
        Spec(shape)


@pytest.mark.parametrize(("shape", "dim"), [((), 0), ((3,), 1), ((3, 4), -3)])
def test_shard_dimensions_that_do_not_exist_are_refused(shape, dim):
    with pytest.raises(LayoutError, match=rf"Shard\({dim}\) does not fit a tensor with {len(shape)} dimensions"):
        Spec(shape, "float32", Shard(dim))


def test_specs_are_values():
    assert Spec([3, 4]) == Spec((3, 4)) and hash(Spec([3, 4])) == hash(Spec((3, 4)))
