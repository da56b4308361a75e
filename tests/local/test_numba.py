"""The kernels that Numba compiles give the same bits as NumPy."""

import numpy as np
import pytest

from fompi.backends import numpy as backend

ELEMENTS = backend.LARGE + 3


def bfloat16(seed):
    """Numbers of all magnitudes, with infinities and a NaN."""
    rng = np.random.default_rng(seed)
    wide = (rng.standard_normal(ELEMENTS) * 10 ** rng.uniform(-38, 38, ELEMENTS)).astype(np.float32)
    wide[:4] = np.inf, -np.inf, np.nan, 0
    return backend.narrow(wide, "bfloat16")


@pytest.fixture
def numpy_only(monkeypatch):
    """A function that switches Numba off."""

    def switch_off():
        monkeypatch.setattr(backend, "_numba", lambda: None)

    return switch_off


def results(operands):
    """The results of `add` and `copy` on two (array, dtype), into both dtypes, and of sums in place."""
    (a, a_dtype), (b, b_dtype) = operands
    written = []
    for dtype in ("bfloat16", "float32"):
        c = np.empty(ELEMENTS, backend.storage(dtype))
        backend.Numpy().bind("add", [a, b], [c], [a_dtype, b_dtype], [dtype])()
        copied = np.empty_like(c)
        backend.Numpy().bind("copy", [a], [copied], [a_dtype], [dtype])()
        written += [c, copied]
    first, second = a.copy(), b.copy()
    backend.Numpy().bind("add", [first[:], b], [first[:]], [a_dtype, b_dtype], [a_dtype])()
    backend.Numpy().bind("add", [a, second[:]], [second[:]], [a_dtype, b_dtype], [b_dtype])()
    return [*written, first, second]


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")])
def test_the_same_bits(dtypes, numpy_only):
    assert backend._numba() is not None
    arrays = [bfloat16(seed) for seed in (1, 2)]
    operands = [
        (a if d == "bfloat16" else backend.widen(a, "bfloat16"), d) for a, d in zip(arrays, dtypes, strict=True)
    ]
    compiled = results(operands)
    numpy_only()
    for actual, expected in zip(compiled, results(operands), strict=True):
        assert np.array_equal(actual, expected, equal_nan=actual.dtype == np.float32)
