"""Products on the host whose bits depend on nothing but their operands.

    s = bias[j]; for p in range(k): s = fma(x[i, p], w[p, j], s); y[i, j] = s

Each element is one chain of fused multiply-adds, whatever the other rows and columns of the call, the tiles, the
threads and the processor (`native/chain.h`). With several leaves k is cut into as many equal parts, each a chain of its
own. They are added in the tree of `fompi.plans.tree`; the first begins with the bias. The elements are float32 or
float64.

Without a C compiler NumPy computes the same bits, slowly.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fompi.plans.tree import folded

try:
    from fompi.native import _native
except ImportError:  # there was no compiler
    _native = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

Array = np.ndarray[Any, Any]

LEAST_OF_THREAD = 1 << 22
"""The fewest multiply-adds for which a further thread pays."""

_MEMORY = threading.local()


def product(x: Array, w: Array, y: Array, leaves: int = 1, bias: Array | None = None, adds: bool = False) -> None:
    """y = x @ w (+ bias), or y += x @ w if it `adds`: the chains go on from y. The columns of y are contiguous."""
    if _native is None:
        y[...] = _by_numpy(x, w, leaves, y if adds else bias)
        return
    (m, k), n = x.shape, w.shape[1]
    threads = max(min(_threads(), m * n * k // LEAST_OF_THREAD, max(m, n) // 64), 1)
    cuts = [max(m, n) * i // threads for i in range(threads + 1)]

    def part(i: int) -> None:
        mine = slice(cuts[i], cuts[i + 1])
        if n < m:
            _in_c(x[mine], w, y[mine], leaves, bias, adds)
        else:
            _in_c(x, w[:, mine], y[:, mine], leaves, None if bias is None else bias[mine], adds)

    others: list[Future[None]] = [_pool(threads - 1).submit(part, i) for i in range(1, threads)]
    part(0)
    for other in others:
        other.result()


def product_of(x: Array, w: Array, leaves: int = 1, bias: Array | None = None) -> Array:
    """x @ w (+ bias) as a new array. x may have several dimensions of rows."""
    rows = x.reshape(-1, x.shape[-1])
    y = np.empty((len(rows), w.shape[1]), x.dtype)
    product(rows, w, y, leaves, bias)
    return y.reshape(*x.shape[:-1], w.shape[1])


def sum_of_rows(x: Array) -> Array:
    """x.sum(0) of a matrix, one row after the other."""
    y = np.empty((1, x.shape[1]), x.dtype)
    product(np.ones((1, len(x)), x.dtype), x, y)
    return y[0]


def _in_c(x: Array, w: Array, y: Array, leaves: int, bias: Array | None, adds: bool) -> None:
    assert _native is not None
    (m, k), n, item, is_wide = x.shape, w.shape[1], x.itemsize, x.dtype == np.float64
    sizes = (m, n, k, leaves)
    begins = 0 if bias is None else np.ascontiguousarray(bias).ctypes.data
    scratch = _scratch(_native.product_scratch(is_wide, sizes))
    of_x, of_w = ((a.ctypes.data, a.strides[0] // item, a.strides[1] // item) for a in (x, w))
    _native.product(is_wide, adds, sizes, of_x, of_w, begins, (y.ctypes.data, y.strides[0] // item), scratch)


def _scratch(nbytes: int) -> int:
    """The address of this many bytes that this thread keeps."""
    held = getattr(_MEMORY, "held", None)
    if held is None or held.nbytes < nbytes + 64:
        held = _MEMORY.held = np.empty(nbytes + 64, np.uint8)
    address: int = held.ctypes.data
    return address + -address % 64


def _threads() -> int:
    """As many as a BLAS library takes: OMP_NUM_THREADS, or the processors of this process."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(given) if given.isdecimal() and int(given) else len(os.sched_getaffinity(0))


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(workers, "fompi-chain")


# ------------------------------------------------------------------------------------------------ without a compiler


def _by_numpy(x: Array, w: Array, leaves: int, begin: Array | None) -> Array:
    length, parts = x.shape[1] // leaves, []
    for leaf in range(leaves):
        s = np.zeros((len(x), w.shape[1]), x.dtype)
        if leaf == 0 and begin is not None:
            s[...] = begin
        for p in range(leaf * length, (leaf + 1) * length):
            s = fma(x[:, p, None], w[p], s)
        parts.append(s)
    return folded(parts, np.add)


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c, rounded once.

    Source: Boldo, Melquiond, Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd (IEEE
    Transactions on Computers 57, 2008).
    """
    plain: Array = a * b + c
    with np.errstate(all="ignore"):
        if plain.dtype == np.float32:
            exact = np.multiply(a, b, dtype=np.float64)
            rounded: Array = _odd_sum(exact, c.astype(np.float64)).astype(np.float32)
        else:
            high, low = _two_product(a, b)
            t, low = _two_sum(c, low)
            v, rest = _two_sum(high, t)
            rounded = v + _odd_sum(low, rest)
        return np.where(np.isfinite(plain) & np.isfinite(rounded), rounded, plain)


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    s = a + b
    of_b = s - a
    return s, (a - (s - of_b)) + (b - of_b)


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    p = a * b
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    return p, a2 * b2 - (((p - a1 * b1) - a2 * b1) - a1 * b2)


def _halves(a: Array) -> tuple[Array, Array]:
    c = a * np.float64((1 << 27) + 1)
    high = c - (c - a)
    return high, a - high


def _odd_sum(a: Array, b: Array) -> Array:
    """a + b, where a sum that is not exact is rounded to the neighbour whose last bit is 1."""
    s, error = _two_sum(a, b)
    is_even = s.view(np.int64) & 1 == 0
    return np.where((error != 0) & is_even, np.nextafter(s, np.copysign(np.inf, error)), s)
