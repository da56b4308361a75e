"""Products as chains of fused multiply-adds: their bits are those of exact arithmetic, rounded once per step."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from fompi.backends import chains
from fompi.plans.tree import folded

DTYPES = ("float32", "float64")

SHAPES = [(1, 8, 1, 1), (1, 8, 1, 8), (13, 24, 33, 8), (100, 40, 70, 4), (97, 200, 1030, 5), (200, 512, 40, 2),
          (3, 0, 4, 1), (0, 4, 4, 1), (4, 4, 0, 1), (5, 7, 600, 7), (30, 21, 65, 3), (73, 300, 5, 1),
          (1, 450, 129, 2), (1, 17, 40, 1), (4, 48, 257, 8), (20, 80, 1024, 8)]  # fmt: skip


def operands(m, k, n, dtype, seed=0):
    random = np.random.default_rng([seed, m, k, n])
    return tuple(random.standard_normal(shape).astype(dtype) for shape in ((m, k), (k, n), (n,)))


def exactly(a, b, c, dtype):
    """a * b + c of rational numbers, rounded once: Python rounds a fraction to the nearest float64."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if dtype == "float64":
        return np.float64(float(exact))
    near = np.float32(float(exact))
    around = [near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))]
    return min(around, key=lambda f: (abs(Fraction(float(f)) - exact), f.view(np.uint32) & 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fma_rounds_once(dtype):
    random, count = np.random.default_rng(1), 3000
    a, b, c = ((random.standard_normal(count) * 2.0 ** random.integers(-20, 20, count)).astype(dtype) for _ in "abc")
    near = -a * b * (1 + random.integers(-3, 3, count).astype(dtype) * np.finfo(dtype).eps)
    c = np.where(random.random(count) < 0.5, near, c).astype(dtype)  # in half of them nearly all of it cancels
    wanted = np.array([exactly(*each, dtype) for each in zip(a, b, c, strict=True)])
    assert chains.fma(a, b, c).tobytes() == wanted.tobytes()
    assert (chains.fma(a, b, c) != a * b + c).any()
    special = np.array([np.inf, -np.inf, np.nan, 3e38], dtype)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(chains.fma(special, special, special), special * special + special)


IN_TURNS = [(*shape, DTYPES[number % 2]) for number, shape in enumerate(SHAPES)]


@pytest.mark.parametrize(("m", "k", "n", "leaves", "dtype"), IN_TURNS)
def test_in_c_it_is_the_chain_of_numpy(m, k, n, leaves, dtype):
    """All layouts of the operands, all cuts of rows and columns."""
    x, w, bias = operands(m, k, n, dtype)
    for begin in (None, bias):
        wanted = chains._by_numpy(x, w, leaves, begin)
        for each in (x, np.asfortranarray(x)):
            for weight in (w, np.asfortranarray(w)):
                wide = np.full((m, n + 3), np.nan, dtype)
                chains.product(each, weight, wide[:, :n], leaves, begin)
                assert np.ascontiguousarray(wide[:, :n]).tobytes() == wanted.tobytes()
        for rows, columns in ((slice(0, m // 2), slice(n // 3, n)), (slice(m // 3, m), slice(0, 1))):
            y = np.empty(wanted[rows, columns].shape, dtype)
            chains.product(x[rows], w[:, columns], y, leaves, None if begin is None else begin[columns])
            assert y.tobytes() == np.ascontiguousarray(wanted[rows, columns]).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain_goes_on_where_it_has_stopped(dtype):
    x, w, _ = operands(30, 50, 20, dtype)
    whole, y = chains.product_of(x, w), chains.product_of(x[:, :17], w[:17])
    chains.product(x[:, 17:], w[17:], y, adds=True)
    assert y.tobytes() == whole.tobytes()
    assert chains.sum_of_rows(x).tobytes() == np.add.accumulate(x)[-1].tobytes()


def test_leaves_are_added_in_the_tree():
    x, w, _ = operands(9, 36, 11, "float32")
    pieces = [slice(i * 6, (i + 1) * 6) for i in range(6)]
    parts = [chains.product_of(x[:, piece], w[piece]) for piece in pieces]
    assert chains.product_of(x, w, leaves=6).tobytes() == folded(parts, np.add).tobytes()
    assert chains.product_of(x, w, leaves=6).tobytes() != chains.product_of(x, w).tobytes()


def test_threads_change_nothing(monkeypatch):
    for m, k, n in ((700, 256, 90), (60, 512, 900)):
        x, w, bias = operands(m, k, n, "float32")
        results = set()
        for threads in ("1", "3"):
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
            y = np.empty((m, n), "float32")
            chains.product(x, w, y, 4, bias)
            results.add(y.tobytes())
        assert len(results) == 1


def test_without_a_compiler_numpy_has_the_same_bits(monkeypatch):
    x, w, bias = operands(11, 12, 7, "float64")
    wanted, y = np.empty((11, 7)), np.empty((11, 7))
    chains.product(x, w, wanted, 4, bias)
    monkeypatch.setattr(chains, "_native", None)
    chains.product(x, w, y, 4, bias)
    assert y.tobytes() == wanted.tobytes()
