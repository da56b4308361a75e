"""Strategies with smaller messages: results and gradients stay near the exact ones, in whole and in parts."""

from __future__ import annotations

import numpy as np
import pytest
from strategies import drawn, refused, runs, same_bits

import fompi
from fompi.base.errors import DtypeError
from fompi.base.layout import split
from fompi.parallel.expert import combine, dispatch, experts_of, moe, route
from fompi.parallel.sequence import Sharding, ring_attention, ulysses_attention, usp_attention
from fompi.parallel.tensor import (
    attention,
    column_parallel_linear,
    heads_of,
    row_parallel_linear,
    vocab_parallel_embedding,
)

pytestmark = pytest.mark.ranks(mpich=[3, 4], openmpi=[])

NEAR = {"float16": 0.002, "int8": 0.03, "fp8_e4m3": 0.12}
"""How far from the exact numbers, by their norm, results and gradients may be. There are one to three roundings."""


def numbers(*shape, seed=0):
    return drawn(*shape, seed=seed).astype(np.float32)


def distances(exact, rounded):
    """How far each tensor is from the exact one, by its norm."""
    pairs = [(a, b) for a, b in zip(exact, rounded, strict=True) if a is not None]
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    return [float(np.linalg.norm(a - b) / max(np.linalg.norm(a), 1e-30)) for a, b in pairs]


def check(f, world, *given, **options):
    y, saved = f.forward(*given, **options)
    dy = numbers(*y.shape, seed=9)
    exact = [y, *f.backward(saved, dy)]
    for wire, near in NEAR.items():
        y, saved = f.forward(*given, wire=wire, **options)
        rounded = [y, *f.backward(saved, dy)]
        off = distances(exact, rounded)
        assert max(off) <= near, (f, wire, off)
        assert fompi.all_reduce(np.array([max(off)]), op="max", comm=world)[0] > 0, f"{f}: no message is in {wire}"
        assert same_bits([y], [f.forward(*given, wire=wire, **options)[0]])
        dxs, rest = f.backward_input(saved, dy)
        assert max(distances(exact, [y, *dxs, *f.backward_weight(rest)])) <= near
    wide = [t.astype(np.float64) if getattr(t, "dtype", None) == np.float32 else t for t in given]
    refused(world, None, DtypeError, lambda: f.forward(*wide, wire="int8", **options), "float64 is sent as it is")


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_linear(world, sequence_parallel):
    counts = [10 + rank % 2 for rank in range(world.size)]
    x, w, mine = numbers(sum(counts), 24), numbers(24, 16), runs(counts)[world.rank]
    features, inner = (runs(split(n, world.size))[world.rank] for n in (16, 24))
    if sequence_parallel:
        check(column_parallel_linear, world, x[mine], w[:, features], comm=world, activation="gelu")
        options = {"counts": counts}
    else:
        options = {"sequence_parallel": False}
    check(row_parallel_linear, world, x[:, inner], w[inner], numbers(16), comm=world, **options)


@pytest.mark.parametrize("query_split", [True, False])
def test_attention(world, query_split):
    heads, kv_heads, d, n = 4, 2, 8, 24
    mine, keys = heads_of(world.rank, world.size, heads, kv_heads)
    x = numbers(7, n, seed=world.rank)
    wq, wo = numbers(n, heads * d) / 5, numbers(heads * d, n) / 5
    wk, wv = numbers(n, kv_heads * d, seed=1) / 5, numbers(n, kv_heads * d, seed=2) / 5
    q, kv = slice(mine.start * d, mine.stop * d), slice(keys.start * d, keys.stop * d)
    weights = wq[:, q], wk[:, kv], wv[:, kv], wo[q]
    options = {"heads": heads, "kv_heads": kv_heads, "causal": True, "query_split": query_split}
    check(attention, world, x, *weights, comm=world, **options)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_embedding(world, sequence_parallel):
    """Its backward has no part for inputs."""
    rows = split(11, world.size)
    table = numbers(11, 64)[runs(rows)[world.rank]]
    tokens = np.random.default_rng(1).integers(0, 11, (9, 2))
    check(vocab_parallel_embedding, world, tokens, table, comm=world, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("f", [ring_attention, ulysses_attention, usp_attention], ids=repr)
def test_sequences(world, f):
    comms = {"comm": world}
    ring, ulysses = (world.size, 1) if f is ring_attention else (1, world.size)
    if f is usp_attention:
        ring, ulysses = (2, world.size // 2) if world.size % 2 == 0 else (world.size, 1)
        mesh = fompi.Mesh(world, ring=ring, ulysses=ulysses)
        comms = {"ring": mesh["ring"], "ulysses": mesh["ulysses"]}
    sharding = Sharding(37, ring, ulysses)
    q, k, v = (sharding.shard(numbers(37, 4 if i == 0 else 2, 16, seed=i), world.rank) for i in range(3))
    check(f, world, q, k, v, sharding, causal=True, **comms)
    if f is usp_attention:
        mesh.close()


def layer(world, experts=5, h=16, f=8, n=12):
    mine = experts_of(world.rank, world.size, experts)
    w1, w2 = numbers(experts, h, f)[mine.start : mine.stop] / 4, numbers(experts, f, n)[mine.start : mine.stop] / 4
    return numbers(13, h, seed=world.rank), numbers(h, experts, seed=5), w1, w2


@pytest.mark.parametrize("microbatches", [1, 2])
def test_experts(world, microbatches):
    check(moe, world, *layer(world), k=2, comm=world, microbatches=microbatches)


def test_experts_in_parts(world):
    x, router, *_ = layer(world)
    results = []
    for wire in (None, "int8"):
        r = route(x, router, k=2, comm=world, wire=wire)
        rows, saved = dispatch.forward(x, r)
        y, kept = combine.forward(rows, r)
        dy = numbers(*y.shape, seed=9)
        results.append([rows, y, *dispatch.backward(saved, rows), *combine.backward(kept, dy)])
    off = distances(*results)
    assert 0 < max(off) <= NEAR["int8"], off
    refused(world, None, DtypeError, lambda: route(x, router, k=2, comm=world, wire="int3"), "known are")


def test_another_wire_on_one_rank(world):
    x, w = numbers(4, 8), numbers(8, 8)
    wire = "int8" if world.rank else "fp8_e4m3"
    sharding = Sharding(8, world.size, 1)
    q = sharding.shard(numbers(8, 2, 4), world.rank)
    for call in (
        lambda: column_parallel_linear(x, w, comm=world, wire=wire),
        lambda: column_parallel_linear(x, w, comm=world, wire=wire, sequence_parallel=False),
        lambda: ring_attention(q, q, q, sharding, comm=world, wire=wire),
        lambda: moe(*layer(world), k=2, comm=world, wire=wire),
    ):
        refused(world, None, fompi.MismatchError, call)
