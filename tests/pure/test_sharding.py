"""Shardings: every token is on one rank, the runs are even, and zigzag is equal work under a causal mask."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fompi.base.errors import LayoutError, ShapeError
from fompi.parallel.sequence import Sharding


@st.composite
def shardings(draw):
    ends = draw(st.none() | st.lists(st.integers(0, 40), max_size=4))
    length = draw(st.integers(0, 40))
    documents = None if ends is None else (0, *sorted(min(end, length) for end in ends), length)
    ring, ulysses = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    return Sharding(length, ring, ulysses, draw(st.sampled_from(("zigzag", "contiguous"))), documents)


@given(shardings())
def test_every_token_is_on_one_rank(sharding):
    parts = [sharding.indices(rank) for rank in range(sharding.ring * sharding.ulysses)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(sharding.length))
    assert sharding.rows == [len(part) for part in parts]
    for ring_rank in range(sharding.ring):
        together = parts[ring_rank * sharding.ulysses : (ring_rank + 1) * sharding.ulysses]
        assert sharding.ring_indices(ring_rank).tolist() == np.concatenate(together).tolist()
        assert max(map(len, together)) - min(map(len, together)) <= 1


@given(shardings())
def test_shards_are_the_rows_of_the_ranks(sharding):
    x = np.arange(3 * sharding.length).reshape(sharding.length, 3)
    for rank, rows in enumerate(sharding.rows):
        part = sharding.shard(x, rank)
        assert part.shape == (rows, 3) and np.array_equal(part, x[sharding.indices(rank)])


@given(st.integers(1, 4), st.integers(1, 6))
def test_zigzag_is_equal_work_under_a_causal_mask(ring, piece):
    """If the length divides: as many pairs of query and key on every rank, whichever rank the keys come from."""
    sharding = Sharding(2 * ring * piece, ring)
    at = [sharding.indices(rank) for rank in range(ring)]
    pairs = [sum(int((a[:, None] >= b).sum()) for b in at) for a in at]
    assert len(set(pairs)) == 1
    for a in range(ring):
        assert {int((at[a][:, None] >= at[b]).sum()) for b in range(ring) if b != a} <= {2 * piece * piece}


def test_zigzag_and_contiguous():
    assert [Sharding(8, 2).indices(r).tolist() for r in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [Sharding(7, 2, layout="contiguous").indices(r).tolist() for r in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6]]
    packed = Sharding(12, 2, cu_seqlens=[0, 4, 12])
    assert [packed.indices(r).tolist() for r in (0, 1)] == [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]
    both = Sharding(8, 2, 2)
    assert [both.indices(r).tolist() for r in range(4)] == [[0, 1], [6, 7], [2, 3], [4, 5]]
    assert both.rows == [2, 2, 2, 2] and Sharding(3, 4).rows == [1, 1, 1, 0]


def test_a_sharding_is_a_value():
    a, b = Sharding(8, 2, cu_seqlens=np.array([0, 3, 8])), Sharding(np.int64(8), 2, cu_seqlens=(0, 3, 8))
    assert a == b and hash(a) == hash(b) and a.cu_seqlens == (0, 3, 8)
    with pytest.raises(ValueError, match="read-only"):
        a.indices(0)[0] = 5
    with pytest.raises(AttributeError):
        a.length = 9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"length": -1}, "length=-1"),
        ({"length": 2.5}, "length=2.5"),
        ({"length": 8, "ring": 0}, "ring=0"),
        ({"length": 8, "ulysses": "2"}, "ulysses='2'"),
        ({"length": 8, "layout": "striped"}, "zigzag, contiguous"),
        ({"length": 8, "cu_seqlens": (0, 7)}, "end with 8"),
        ({"length": 8, "cu_seqlens": (0, 5, 3, 8)}, "never fall"),
    ],
)
def test_wrong_shardings(arguments, words):
    with pytest.raises(LayoutError, match=words):
        Sharding(**arguments)


def test_wrong_ranks_and_tensors():
    sharding = Sharding(8, 2, 2)
    for rank in (-1, 4):
        with pytest.raises(LayoutError, match="is not one of the 4 ranks"):
            sharding.indices(rank)
    for x in (np.ones(7), np.ones(())):
        with pytest.raises(ShapeError, match="8 tokens"):
            sharding.shard(x, 0)
