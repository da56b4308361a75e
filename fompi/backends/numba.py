"""bfloat16 kernels compiled by Numba. NumPy has no bfloat16: it needs eight passes for what these do in one.

The NumPy backend loads this file for large arrays if Numba is installed. The results have the same bits: sums are in
float32, rounded to the nearest even. Compiled code is cached on disk, so only the first run on a machine compiles. One
rank of each host writes there. If a file cannot be read or written, only the time of the first call changes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numba import njit, types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic, overload

from fompi.base import kept

Array = np.ndarray[Any, Any]


@intrinsic
def _as_float(typing: Any, bits: Any) -> Any:
    """The float32 with these 32 bits."""
    return types.float32(types.uint32), lambda context, builder, signature, args: builder.bitcast(
        args[0], context.get_value_type(types.float32)
    )


@intrinsic
def _as_bits(typing: Any, value: Any) -> Any:
    """The 32 bits of this float32."""
    return types.uint32(types.float32), lambda context, builder, signature, args: builder.bitcast(
        args[0], context.get_value_type(types.uint32)
    )


def _wide(x):
    """A bfloat16 (in uint16) or a float32, as float32."""


@overload(_wide, inline="always")
def _wide_of(x):
    if x == types.uint16:
        return lambda x: _as_float(np.uint32(np.uint32(x) << np.uint32(16)))
    return lambda x: x


def _put(c, i, value):
    """c[i] = value, rounded if c holds bfloat16."""


@overload(_put, inline="always")
def _put_in(c, i, value):
    if c.dtype != types.uint16:

        def plain(c, i, value):
            c[i] = value

        return plain

    def rounded(c, i, value):
        bits = _as_bits(value)
        up = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        c[i] = np.uint16(0x7FC0) if is_nan else np.uint16(np.uint32(bits + up) >> np.uint32(16))

    return rounded


class _Cache(FunctionCache):
    """Numba's cache on disk. A full disk or a damaged file is no error."""

    def load_overload(self, signature: Any, context: Any) -> Any:
        with suppress(Exception):
            return super().load_overload(signature, context)
        return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        if kept.keeps_compiled_code:
            with suppress(OSError):
                super().save_overload(signature, compiled)


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    compiled = njit(error_model="numpy", nogil=True)(function)
    with suppress(RuntimeError):  # there is no writable folder for compiled code
        compiled._cache = _Cache(function)
    return compiled


def _add(a: Any, b: Any, c: Any) -> None:
    for i in range(a.size):
        _put(c, i, _wide(a[i]) + _wide(b[i]))


def _accumulate(c: Any, b: Any) -> None:
    for i in range(c.size):  # separate from `_add`: with two arrays the compiler can rule out more overlaps
        _put(c, i, _wide(c[i]) + _wide(b[i]))


def _copy(a: Any, c: Any) -> None:
    for i in range(a.size):
        _put(c, i, _wide(a[i]))


_add_into, _accumulate_into, _copy_into = _compiled(_add), _compiled(_accumulate), _compiled(_copy)


def add(a: Array, b: Array, c: Array) -> None:
    """c = a + b on contiguous arrays. Each is float32, or bfloat16 stored in uint16. c may be a or b."""
    for summed, other in ((a, b), (b, a)):
        if summed.ctypes.data == c.ctypes.data:
            _accumulate_into(c.reshape(-1), other.reshape(-1))
            return
    _add_into(a.reshape(-1), b.reshape(-1), c.reshape(-1))


def copy(a: Array, c: Array) -> None:
    """c = a, widened or rounded. The arrays are as in `add`."""
    _copy_into(a.reshape(-1), c.reshape(-1))
