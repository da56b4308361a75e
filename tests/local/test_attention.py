"""Attention in tiles and its merge, against the definition in float64 and finite differences."""

from itertools import pairwise
from math import erf as erf_of_number
from math import erfc, sqrt

import numpy as np
import pytest

from fompi.base.errors import LayoutError
from fompi.parallel import activations, attention
from fompi.parallel.activations import ACTIVATIONS, activate, activate_backward, erf
from fompi.parallel.attention import Rule, attend, attend_backward, check_documents, check_heads, merge


@pytest.fixture(params=[(128, 256), (3, 5)], ids=["one tile", "many tiles"])
def tiles(request, monkeypatch):
    monkeypatch.setattr(attention, "QUERIES", request.param[0])
    monkeypatch.setattr(attention, "KEYS", request.param[1])


def drawn(shape, dtype=np.float64, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def defined(q, k, v, reads, q_at, k_at, rule):
    """The definition, number by number, in long double."""
    q, k, v = (a.astype(np.longdouble) for a in (q, k, v))
    o, lse = np.zeros((*q.shape[:2], v.shape[2]), np.longdouble), np.full(q.shape[:2], -np.inf, np.longdouble)
    ends = rule.cu_seqlens or (0, 10**9)
    scale = q.shape[2] ** -0.5 if rule.scale is None else rule.scale
    for i in range(len(q)):
        for h, g in enumerate(reads):
            keys = [
                j
                for j in range(len(k))
                if not (rule.causal and k_at[j] > q_at[i])
                and any(a <= q_at[i] < b and a <= k_at[j] < b for a, b in pairwise(ends))
            ]
            if keys:
                weights = np.exp(k[keys, g] @ q[i, h] * np.longdouble(scale))
                o[i, h], lse[i, h] = weights @ v[keys, g] / weights.sum(), np.log(weights.sum())
    return o, lse


RULES = [Rule(), Rule(causal=True), Rule(scale=0.3), Rule(cu_seqlens=(0, 4, 4, 9, 17)), Rule(True, 1.5, (0, 1, 17))]
HEADS = [(0, 0, 1, 1), (0,), (0, 1, 2), ()]


def case(reads, dtype=np.float64, queries=13, keys=17, e=4):
    """Queries and keys at positions out of order."""
    heads = max(reads, default=0) + 1
    q, k, v = (drawn(shape, dtype) for shape in ((queries, len(reads), 3), (keys, heads, 3), (keys, heads, e)))
    random = np.random.default_rng(5)
    return q, k, v, random.permutation(17)[:queries], random.permutation(17)[:keys]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("reads", HEADS, ids=str)
def test_attention_is_its_definition(tiles, rule, reads):
    q, k, v, q_at, k_at = case(reads)
    o, lse = attend(q, k, v, reads, q_at, k_at, rule)
    expected, expected_lse = defined(q, k, v, reads, q_at, k_at, rule)
    assert np.abs(o - expected).max(initial=0) < 1e-14
    assert np.array_equal(np.isneginf(lse), np.isneginf(expected_lse))
    assert np.allclose(np.exp(lse), np.exp(expected_lse), rtol=1e-13, atol=0)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("reads", HEADS[:3], ids=str)
def test_two_sets_of_keys_merge(tiles, rule, reads):
    """Also in float32: the error stays that of a float32 softmax."""
    for dtype, within in ((np.float64, 1e-14), (np.float32, 2e-6)):
        q, k, v, q_at, k_at = case(reads, dtype)
        o, lse = attend(q, k[:0], v[:0], reads, q_at, k_at[:0], rule)
        assert not o.any() and np.isneginf(lse).all()
        for part in (slice(0, 5), slice(5, 6), slice(6, 17)):
            merge(o, lse, *attend(q, k[part], v[part], reads, q_at, k_at[part], rule))
        assert o.dtype == dtype
        assert np.abs(o - defined(q, k, v, reads, q_at, k_at, rule)[0]).max() < within


def test_large_scores_do_not_overflow(tiles):
    q, k, v, q_at, k_at = case((0, 0), np.float32)
    o, lse = attend(q * 1e4, k, v, (0, 0), q_at, k_at, Rule())
    assert np.isfinite(o).all() and np.isfinite(lse).all() and lse.max() > 1e3


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("reads", HEADS, ids=str)
def test_gradients_are_finite_differences(tiles, rule, reads):
    q, k, v, q_at, k_at = case(reads)
    o, lse = attend(q, k, v, reads, q_at, k_at, rule)
    do = drawn(o.shape, seed=1)
    gradients = attend_backward((q, k, v), (o, lse, do), reads, q_at, k_at, rule)
    for i, (x, gradient) in enumerate(zip((q, k, v), gradients, strict=True)):
        assert gradient.shape == x.shape
        for place in list(np.ndindex(x.shape))[i::13]:
            losses = []
            for step in (1e-5, -1e-5):
                moved = [a.copy() for a in (q, k, v)]
                moved[i][place] += step
                losses.append((attend(*moved, reads, q_at, k_at, rule)[0] * do).sum())
            assert gradient[place] == pytest.approx((losses[0] - losses[1]) / 2e-5, abs=1e-8)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gradients_of_sets_of_keys_add_up(tiles, rule):
    reads = (0, 0, 1, 1)
    q, k, v, q_at, k_at = case(reads)
    o, lse = attend(q, k, v, reads, q_at, k_at, rule)
    do = drawn(o.shape, seed=1)
    whole = attend_backward((q, k, v), (o, lse, do), reads, q_at, k_at, rule)
    parts = [
        attend_backward((q, k[part], v[part]), (o, lse, do), reads, q_at, k_at[part], rule)
        for part in (slice(0, 5), slice(5, 17))
    ]
    assert np.allclose(whole[0], parts[0][0] + parts[1][0], atol=1e-13)
    for i in (1, 2):
        assert np.allclose(whole[i], np.concatenate([part[i] for part in parts]), atol=1e-13)


def test_no_queries_and_no_keys():
    empty, at = np.zeros((0, 2, 3)), np.arange(0)
    o, lse = attend(empty, empty, empty, (0, 1), at, at, Rule(causal=True))
    assert (o.shape, lse.shape) == ((0, 2, 3), (0, 2))
    assert [g.shape for g in attend_backward((empty,) * 3, (o, lse, o), (0, 1), at, at, Rule())] == [(0, 2, 3)] * 3


@pytest.mark.parametrize("wrong", [(1, 5), (0, 4), (0, 3, 2, 5), (5,), (), 7, ("a", "b")])
def test_documents_must_cover_the_tokens(wrong):
    with pytest.raises(LayoutError, match="cu_seqlens"):
        check_documents(wrong, 5)
    assert check_documents(np.array([0, 2, 2, 5]), 5) == (0, 2, 2, 5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 3), (3, 4), (0, 1), (4, 0)])
def test_heads_that_cannot_be_dealt_out(heads, kv_heads):
    with pytest.raises(LayoutError, match="dealt out"):
        check_heads(heads, kv_heads)


@pytest.mark.parametrize(("heads", "kv_heads"), [("4", 2), (4, 2.0), (None, 1)])
def test_heads_that_are_no_integers(heads, kv_heads):
    with pytest.raises(LayoutError, match="must be integers"):
        check_heads(heads, kv_heads)
    check_heads(np.int64(4), 2)


# ----------------------------------------------------------------------------------------------------- activations


def test_erf_is_that_of_the_c_library():
    x = np.concatenate([np.linspace(-7, 7, 9999), [0.0, np.inf, -np.inf, 1e-8]])
    assert np.abs(erf(x) - [erf_of_number(n) for n in x]).max() < 1e-15
    assert np.isnan(erf(np.array([np.nan])))[0] and erf(x.astype(np.float32)).dtype == np.float32


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_their_gradients(activation):
    z = np.concatenate([drawn((4, 6)) * 3, [[-800.0, 800.0, -30.0, 30.0, -1e-3, 1e-3]]])
    dy = drawn(activate(z, activation).shape, seed=1)
    gradient = activate_backward(z, dy, activation)
    for place in np.ndindex(z.shape):
        losses = []
        for step in (1e-5, -1e-5):
            moved = z.copy()
            moved[place] += step
            losses.append(activate(moved, activation)[place[0]])
        slope = ((losses[0] - losses[1]) / 2e-5 * dy[place[0]]).sum()
        assert gradient[place] == pytest.approx(slope, rel=1e-6, abs=1e-7)
    assert activate(z.astype(np.float32), activation).dtype == gradient.astype(np.float32).dtype == np.float32
    assert activate_backward(z.astype(np.float32), dy.astype(np.float32), activation).dtype == np.float32


def test_activations_are_those_of_torch():
    torch = pytest.importorskip("torch")
    z = drawn((5, 6))
    for name in ("relu", "gelu", "silu"):
        expected = getattr(torch.nn.functional, name)(torch.from_numpy(z)).numpy()
        assert np.abs(activate(z, name) - expected).max() < 1e-15


def test_the_normal_distribution():
    """In float64 as `math.erf` has it, in float32 and half types within their rounding, also far from 0."""
    z = np.concatenate([np.linspace(-6, 9, 3001), [0.0, -0.0, np.inf, -np.inf, 1e-30, -300.0, 300.0]])
    exact = np.array([0.5 * erfc(-x / sqrt(2)) for x in z])
    np.testing.assert_allclose(activations.normal(z), exact, atol=1e-15)
    single = activations.normal(z.astype(np.float32).reshape(2, -1)).reshape(-1)
    expected = np.array([0.5 * erfc(-float(x) / sqrt(2)) for x in z.astype(np.float32)])
    np.testing.assert_allclose(single, expected, rtol=6e-6, atol=1e-38)
    assert np.abs(single - expected).max() < 3e-7 and single.dtype == np.float32
    half = z.astype(np.float16)
    assert activations.normal(half).dtype == np.float16 and np.isnan(activations.normal(np.float32([np.nan]))[0])
    assert activations.normal(np.ones((0, 3), np.float32)).shape == (0, 3)
