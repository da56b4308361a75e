"""The kernels of attention=: blocks of queries and keys, a function of the user, and torch's attention."""

import numpy as np
import pytest

from fompi.base.errors import ArgumentError, ShapeError, TensorError
from fompi.parallel.attention import Rule, attend, attend_backward
from fompi.parallel.local import LocalAttention, blocks, check_kernel
from fompi.parallel.sequence import Sharding
from fompi.tensors import dlpack

RULES = [Rule(), Rule(causal=True), Rule(scale=0.3), Rule(cu_seqlens=(0, 4, 4, 9, 23)), Rule(True, 1.5, (0, 1, 23))]
LAYOUTS = [Sharding(23, ring=3, layout=layout) for layout in ("contiguous", "zigzag")]


def drawn(*shape, dtype="float32", seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("sharding", LAYOUTS, ids=lambda sharding: sharding.layout)
def test_blocks_have_each_pair_that_sees_each_other_once(rule, sharding):
    for q_rank in range(3):
        for k_rank in range(3):
            q_at, k_at = sharding.indices(q_rank), sharding.indices(k_rank)
            seen = np.zeros((len(q_at), len(k_at)), int)
            for queries, keys, mask in blocks(rule, q_at, k_at):
                part = seen[queries, keys]
                part += np.tri(*part.shape, dtype=int) if isinstance(mask, str) else 1 if mask is None else mask
            assert (seen == rule.mask(q_at, k_at)).all()
    assert len([*blocks(Rule(True), np.arange(9), np.arange(9))]) == 1, "one block, which the kernel knows as causal"
    assert not [*blocks(Rule(), np.arange(0), np.arange(3))]


def plain(q, k, v, mask):
    """A kernel as a user may write it."""
    group = q.shape[1] // k.shape[1]
    s = np.einsum("qhd,khd->hqk", q, np.repeat(k, group, 1)) / np.sqrt(q.shape[2])
    if mask is not None:
        s = np.where(np.tri(len(q), len(k), dtype=bool) if isinstance(mask, str) else mask, s, -np.inf)
    top = np.maximum(s.max(2), -1e30)
    e = np.exp(s - top[..., None])
    total = e.sum(2)
    o = np.einsum("hqk,khd->qhd", e / np.where(total == 0, 1, total)[..., None], np.repeat(v, group, 1))
    with np.errstate(divide="ignore"):
        return o, (top + np.log(total)).T


def compare(rule, kernel, like, dtype, reads, within, e=3):
    heads = max(reads, default=0) + 1
    sharding = LAYOUTS[1]
    q_at, k_at = sharding.indices(0), sharding.indices(1)
    tensors = drawn(len(q_at), len(reads), 3), drawn(len(k_at), heads, 3, seed=1), drawn(len(k_at), heads, e, seed=2)
    storage = [a.astype(dtype) for a in tensors]
    wide = [a.astype("float64") for a in storage]
    local = LocalAttention(rule, dtype, dlpack.borrow(like), kernel)
    for at in ((q_at, k_at), (q_at, q_at)) if len(q_at) == len(k_at) else ((q_at, k_at),):
        o, lse = attend(*wide, reads, *at, rule)
        got = local.attend(*storage, reads, *at)
        np.testing.assert_allclose(got[0], o, atol=within)
        np.testing.assert_allclose(got[1], lse, atol=within)
        do = drawn(*o.shape, seed=3).astype(dtype)
        wanted = attend_backward(wide, (o, lse, do.astype("float64")), reads, *at, rule)
        results = o.astype(dtype), lse.astype(got[1].dtype), do
        for mine, theirs in zip(local.backward(tuple(storage), results, reads, *at), wanted, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=10 * within)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("reads", [(0, 0, 1, 1), (0, 1, 1), (0, 1, 2), ()], ids=str)
def test_a_kernel_of_the_user(rule, reads):
    compare(rule, plain, np.zeros(1, "f8"), "float64", reads, 1e-12, e=5)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("reads", [(0, 0, 1, 1), (0, 1, 1), (0, 1, 2)], ids=str)
@pytest.mark.parametrize(("dtype", "within"), [("float64", 1e-12), ("float32", 1e-5), ("float16", 5e-3)])
def test_the_kernel_of_torch(rule, reads, dtype, within):
    torch = pytest.importorskip("torch")
    compare(rule, None, torch.zeros(1, dtype=getattr(torch, dtype)), dtype, reads, within)


def test_wrong_kernels():
    with pytest.raises(ArgumentError, match=r"attention=3 must be a function"):
        check_kernel(3)
    at, q = np.arange(4), drawn(4, 2, 3)
    for kernel, error, words in (
        (lambda q, k, v, mask: q, TensorError, r"must return \(o, lse\), not ndarray"),
        (lambda q, k, v, mask: (q, q), ShapeError, r"lse of attention= has the shape \(4, 2, 3\): it must be \(4, 2\)"),
        (lambda q, k, v, mask: (q, None), TensorError, "lse of attention= has type NoneType"),
    ):
        local = LocalAttention(Rule(), "float32", dlpack.borrow(q), kernel)
        with pytest.raises(error, match=words):
            local.attend(q, q, q, (0, 1), at, at)
