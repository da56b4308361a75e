"""Kernels on host memory with NumPy and its BLAS library. Products are torch's where the program has loaded it.

NumPy has no bfloat16, so its bits are stored in uint16. Both half types are widened to float32 for every kernel. The
result is rounded once, to the nearest even. Sums of them run in C where there is a compiler: NumPy takes 7 ns per
element, compiled code 0.2 ns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from fompi.backends import chains, in_c, wires
from fompi.backends.base import Dtypes, Kernel
from fompi.backends.half import narrow, storage, widen
from fompi.base.doors import DOORS
from fompi.base.layout import HALF
from fompi.plans.dependencies import divisor
from fompi.plans.kernels import MOVES, OF_WIRES, find
from fompi.plans.kernels import chains as leaves_of

Array = np.ndarray[Any, Any]
Arrays = Sequence[Array]


COMBINES = {"add": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
"""The kernels that combine two terms of a reduction. Maximum and minimum are NaN where a term is NaN."""


PRODUCTS = frozenset(("matmul", "matmul_bias", "gradient"))
"""The kernels that torch may compute, where the program has loaded it."""


def rows(a: Array) -> Array:
    """`a` as a matrix: all dimensions but the last become one."""
    return a if a.ndim == 2 else a.reshape(prod(a.shape[:-1]), a.shape[-1])


class Numpy:
    """The backend. It is synchronous: `kernel()` returns when the kernel has run."""

    name = "numpy"
    device = None
    asynchronous = False

    def empty(self, arena: Any, shape: Sequence[int], dtype: str, place: str = "", aligned: bool = True) -> Array:
        array: Array = arena.take(tuple(shape), storage(dtype), aligned)
        return array

    def bind(self, kernel: str, reads: Arrays, writes: Arrays, read_dtypes: Dtypes, write_dtypes: Dtypes) -> Kernel:
        if kernel in PRODUCTS and "torch" in sys.modules:
            made: Kernel | None = DOORS.products(kernel, reads, writes, read_dtypes, write_dtypes)
            if made is not None:
                return made
        dtypes = {*read_dtypes, *write_dtypes}
        moves = kernel in MOVES and len(dtypes) == 1
        plain = moves or dtypes.isdisjoint(HALF)
        if plain and len(writes) == 1:  # the most frequent kernels, bound directly to NumPy's functions
            if kernel in COMBINES:
                return partial(COMBINES[kernel], reads[0], reads[1], out=writes[0])
            if moves and len(reads) == 1:
                return partial(np.copyto, writes[0], reads[0])
            if kernel == "matmul" and len(reads) == 2 and (reads[0].ndim == 2 or reads[0].flags.c_contiguous):
                # `rows` returns views here, so every call reads the current data
                return partial(np.matmul, rows(reads[0]), reads[1], rows(writes[0]))
        if not plain and (compiled := in_c.bound(kernel, reads, writes, (read_dtypes, write_dtypes))) is not None:
            return compiled
        if kernel in OF_WIRES:
            return wires.bound(kernel, [*reads, *writes], [*read_dtypes, *write_dtypes])
        count, leaves = divisor(kernel), leaves_of(kernel)
        if leaves:
            compute: Callable[..., None] = partial(_chain, leaves, find(kernel).reduces)
        else:
            compute = _KERNELS[kernel] if count is None else partial(_mean, count)
        if plain:
            return partial(compute, find(kernel).rows(reads), find(kernel).wholes(reads), writes)
        return partial(_half, compute, kernel, reads, writes, read_dtypes, write_dtypes)


def _half(
    compute: Callable[..., None], kernel: str, reads: Arrays, writes: Arrays, read_dtypes: Dtypes, write_dtypes: Dtypes
) -> None:
    """Run `compute` in float32 on widened operands, then round the results that have a half type."""
    wide = [widen(a, d) for a, d in zip(reads, read_dtypes, strict=True)]
    results = [np.empty(a.shape, np.float32) if d in HALF else a for a, d in zip(writes, write_dtypes, strict=True)]
    compute(find(kernel).rows(wide), find(kernel).wholes(wide), results)
    for a, result, dtype in zip(writes, results, write_dtypes, strict=True):
        if result is not a:
            a[...] = narrow(result, dtype)


Groups = Sequence[Sequence[Array]]
"""Operands that are split into chunks of rows: one sequence of chunks per operand."""


def _copy(groups: Groups, whole: Arrays, writes: Arrays) -> None:
    for a, c in zip(groups[0], writes, strict=True):
        c[...] = a


def _combine(function: np.ufunc, groups: Groups, whole: Arrays, writes: Arrays) -> None:
    for a, b, c in zip(*groups, writes, strict=True):
        function(a, b, out=c)


def _mean(count: int, groups: Groups, whole: Arrays, writes: Arrays) -> None:
    for a, b, c in zip(*groups, writes, strict=True):
        np.add(a, b, out=c)
        for part in (c.real, c.imag) if c.dtype.kind == "c" else (c,):
            np.divide(part, part.dtype.type(count), out=part)


def _matmul(groups: Groups, whole: Arrays, writes: Arrays) -> None:
    for a, y in zip(groups[0], writes, strict=True):
        np.matmul(rows(a), whole[0], out=rows(y))
        if len(whole) == 2:
            y += whole[1]


def _matmul_add(groups: Groups, whole: Arrays, writes: Arrays) -> None:
    for a, c, y in zip(*groups, writes, strict=True):
        np.add(rows(c), rows(a) @ whole[0], out=rows(y))


def _gradient(groups: Groups, whole: Arrays, writes: Arrays) -> None:
    g, add = writes[0], bool(whole)
    if add and whole[0] is not g:
        g[...] = whole[0]
    for a, h in zip(*groups, strict=True):
        left = rows(a).T
        if add:
            g += left @ rows(h)
        else:
            np.matmul(left, rows(h), out=g)
        add = True


def _chain(leaves: int, is_gradient: bool, groups: Groups, whole: Arrays, writes: Arrays) -> None:
    if writes[0].dtype.kind != "f":  # sums of integers are exact
        (_gradient if is_gradient else _matmul)(groups, whole, writes)
    elif is_gradient:
        for i, (a, h) in enumerate(zip(*groups, strict=True)):
            chains.product(rows(a).T, rows(h), writes[0], adds=i > 0)
    else:
        for x, y in zip(groups[0], writes, strict=True):
            chains.product(rows(x), whole[0], rows(y), leaves, whole[1] if whole[1:] else None)


def _matmul_grouped(groups: Groups, whole: Arrays, writes: Arrays) -> None:
    for x, w, y in zip(groups[0], whole[0], writes, strict=True):
        np.matmul(rows(x), w, out=rows(y))


def _gradient_grouped(groups: Groups, whole: Arrays, writes: Arrays) -> None:
    in_place = bool(whole) and np.may_share_memory(whole[0], writes[0])
    for i, (a, h, g) in enumerate(zip(*groups, writes[0], strict=True)):
        _gradient([[a], [h]], [g] if in_place else [sums[i] for sums in whole], [g])


_KERNELS: dict[str, Callable[[Groups, Arrays, Arrays], None]] = {
    **dict.fromkeys(MOVES, _copy),
    **{name: partial(_combine, function) for name, function in COMBINES.items()},
    "matmul": _matmul,
    "matmul_bias": _matmul,
    "matmul_add": _matmul_add,
    "gradient": _gradient,
    "gradient_add": _gradient,
    "matmul_grouped": _matmul_grouped,
    "gradient_grouped": _gradient_grouped,
    "gradient_grouped_add": _gradient_grouped,
}
"""Each kernel of `fompi.plans.kernels` as a function of its chunked operands, its whole operands and its results."""
