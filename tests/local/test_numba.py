"""The kernels that Numba compiles give the same bits as NumPy."""

import numpy as np
import pytest

from fompi.backends import numpy as backend
from fompi.backends import wires
from fompi.base.wires import WIRES

ELEMENTS = backend.LARGE + 3


def bfloat16(seed):
    """Numbers of all magnitudes, with infinities and a NaN."""
    rng = np.random.default_rng(seed)
    wide = (rng.standard_normal(ELEMENTS) * 10 ** rng.uniform(-38, 38, ELEMENTS)).astype(np.float32)
    wide[:4] = np.inf, -np.inf, np.nan, 0
    return backend.narrow(wide, "bfloat16")


@pytest.fixture(autouse=True)
def no_kernels_in_c(monkeypatch):
    """They would be taken before those of Numba, and before those of NumPy."""
    monkeypatch.setattr(wires.in_c, "run", None)


@pytest.fixture
def numpy_only(monkeypatch):
    """A function that switches Numba off."""

    def switch_off():
        monkeypatch.setattr(backend, "numba", lambda: None)

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
    assert backend.numba() is not None
    arrays = [bfloat16(seed) for seed in (1, 2)]
    operands = [
        (a if d == "bfloat16" else backend.widen(a, "bfloat16"), d) for a, d in zip(arrays, dtypes, strict=True)
    ]
    compiled = results(operands)
    numpy_only()
    for actual, expected in zip(compiled, results(operands), strict=True):
        assert np.array_equal(actual, expected, equal_nan=actual.dtype == np.float32)


@pytest.mark.parametrize("wire", [wire for wire in WIRES if WIRES[wire].top])
def test_messages_that_carry_fewer_bits_have_the_same_bits(wire, monkeypatch):
    """Runs of all magnitudes, of zeros, with a NaN or an infinity, and a last one that is short."""
    monkeypatch.setattr(wires.in_c, "of_wire", lambda *_: None)
    for count in (ELEMENTS, ELEMENTS + 62, 1 << 18):
        rng = np.random.default_rng(count)
        a = rng.standard_normal(count).astype(np.float32)
        a *= np.repeat(2.0 ** rng.integers(-30, 20, count // 64 + 1), 64)[:count].astype(np.float32)
        a[:300:100], a[1000:1100], a[5000] = (np.nan, np.inf, -0.0), 0, 1e-42
        a[2000:9000:1000] = np.finfo(np.float32).max * (1 - 2.0**-24 * np.arange(7))
        b, sent = rng.standard_normal(count).astype(np.float32), np.empty(WIRES[wire].nbytes(count), np.uint8)
        wires.run(f"encode_{wire}", [a, sent], ["float32", "uint8"])
        m = np.full_like(sent, 0xAA)
        encode = wires.bound(f"encode_{wire}", [a, m], ["float32", "uint8"])
        assert encode.func is not wires.run
        encode()
        np.testing.assert_array_equal(m, sent)
        for name, reads in ((f"decode_{wire}", [sent]), (f"decode_add_{wire}", [sent, b])):
            got, wanted = np.empty_like(a), np.empty_like(a)
            dtypes = ["uint8"] + ["float32"] * len(reads)
            wires.run(name, [*reads, wanted], dtypes)
            wires.bound(name, [*reads, got], dtypes)()
            np.testing.assert_array_equal(got, wanted)
