"""Half types on host memory: how they are stored, widened and rounded."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from fompi.base.layout import CARRIERS

Array = np.ndarray[Any, Any]


@cache
def storage(dtype: str) -> np.dtype[Any]:
    """The dtype of the arrays that hold elements of the logical dtype `dtype`."""
    return np.dtype(CARRIERS.get(dtype, dtype))


def widen(a: Array, dtype: str) -> Array:
    """`a` as float32 if `dtype` is a half type, else `a` itself."""
    if dtype == "bfloat16":
        return (a.astype(np.uint32) << 16).view(np.float32)
    return a.astype(np.float32) if dtype == "float16" else a


def narrow(a: Array, dtype: str) -> Array:
    """`a` in the storage dtype of `dtype`, rounded to the nearest even."""
    if dtype != "bfloat16":
        return a.astype(storage(dtype), copy=False)
    bits = np.asarray(a, np.float32, order="C").view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FC0), rounded)  # a NaN must not round to infinity
