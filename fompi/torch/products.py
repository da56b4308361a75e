"""Products on host memory by torch, in a program that has loaded it.

torch brings a BLAS library of its own, and products of half types that the processor computes as such. NumPy has none:
it would convert whole weights to float32 in each call, which takes several times as long.

    products.bound("matmul", [x, w], [y], ("bfloat16",) * 2, ("bfloat16",))  -> a kernel, or None: NumPy computes it

Sums inside of a product are float32 where the operands have a half type, and are rounded once, as in `backends.numpy`.
What is summed over several products in float32 stays there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from fompi.backends.base import Dtypes, Kernel
from fompi.backends.numpy import rows
from fompi.base.layout import HALF
from fompi.plans.kernels import find

Array = np.ndarray[Any, Any]

LEAST, LEAST_HALF = 1 << 22, 1 << 16
"""Multiplications. Making the tensors of torch for a smaller product takes longer than it gains."""

DTYPES = frozenset(("float32", "float64", "bfloat16", "float16"))


def bound(
    kernel: str, reads: Sequence[Array], writes: Sequence[Array], read_dtypes: Dtypes, write_dtypes: Dtypes
) -> Kernel | None:
    """The kernel `matmul`, `matmul_bias` or `gradient` on these arrays. None: torch gains nothing, or cannot do it."""
    dtype = read_dtypes[0]
    if dtype not in DTYPES or {*read_dtypes, *write_dtypes} != {dtype}:
        return None
    if not all(a.ndim <= 2 or a.flags.c_contiguous for a in (*reads, *writes)):
        return None  # as a matrix it would be a copy, of the data of now
    groups, whole = find(kernel).rows(reads), find(kernel).wholes(reads)
    if kernel == "gradient":
        if whole or len(groups[0]) > 1:
            return None
        pairs, other = [(rows(groups[0][0]).T, writes[0])], rows(groups[1][0])
    else:
        pairs, other = [(rows(a), rows(y)) for a, y in zip(groups[0], writes, strict=True)], whole[0]
    bias = whole[1:] if kernel == "matmul_bias" else ()
    if sum(len(a) for a, _ in pairs) * other.size < (LEAST_HALF if dtype in HALF else LEAST):
        return None
    if not all(map(_is_usable, (*(a for pair in pairs for a in pair), other, *bias))):
        return None
    try:
        with torch.inference_mode(False):  # another thread may run it, or the program after its inference
            w, b = _tensor(other, dtype), [_tensor(each, dtype) for each in bias]
            calls = [
                partial(torch.addmm, b[0], _tensor(a, dtype), w, out=_tensor(y, dtype))
                if b
                else partial(torch.mm, _tensor(a, dtype), w, out=_tensor(y, dtype))
                for a, y in pairs
            ]
    except (RuntimeError, TypeError, ValueError):  # torch does not take this memory
        return None
    return calls[0] if len(calls) == 1 else partial(_run, calls)


def _run(calls: Sequence[Kernel]) -> None:
    for call in calls:
        call()


def _is_usable(array: Array) -> bool:
    """torch takes no memory that must not be written, and no negative strides."""
    return array.flags.writeable and array.size > 0 and min(array.strides) >= 0


def _tensor(array: Array, dtype: str) -> torch.Tensor:
    if dtype != "bfloat16":
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
