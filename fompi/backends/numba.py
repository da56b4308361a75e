"""Kernels compiled by Numba: bfloat16, and messages that carry fewer bits. NumPy takes several passes for each.

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
from fompi.base.wires import RUN, WireFormat

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


# ------------------------------------------------------------------------------------- messages that carry fewer bits


@njit(inline="always", error_model="numpy")
def _nearest(x):
    """x rounded to an integer, ties to even. |x| < 2**22."""
    return (x + np.float32(12582912)) - np.float32(12582912)


@njit(inline="always", error_model="numpy")
def _fp8_of(x):
    bits = _as_bits(x)
    size = bits & np.uint32(0x7FFFFFFF)
    small = np.uint32(_nearest(_as_float(size if size < np.uint32(0x3C800000) else np.uint32(0)) * np.float32(512)))
    up = np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))
    normal = np.uint32(np.uint32(size + up) >> np.uint32(20)) - np.uint32(120 << 3)
    normal = np.uint32(min(normal, np.uint32(0x7E)))
    code = small if size < np.uint32(0x3C800000) else normal
    return np.uint8(((bits >> np.uint32(24)) & np.uint32(0x80)) | code)


@njit(inline="always", error_model="numpy")
def _of_fp8(code):
    magnitude = np.uint32(code) & np.uint32(0x7F)
    small = np.float32(code & np.uint8(7)) * np.float32(2.0**-9)
    normal = _as_float(np.uint32((magnitude + np.uint32(120 << 3)) << np.uint32(20)))
    size = normal if code & np.uint8(0x78) else small
    return _as_float(_as_bits(size) | (np.uint32(code & np.uint8(0x80)) << np.uint32(24)))


def _encode(bits: Any, top: Any, a: Any, scales: Any, codes: Any) -> None:
    """`bits` 8 and `top` 127 are int8, 448 fp8, `bits` 4 int4. What is behind the last element is 0 already."""
    least, most = np.int32(-7), np.int32(7)
    for r in range(scales.size):
        first, end = r * 64, min(r * 64 + 64, a.size)
        largest = np.uint32(0)
        for i in range(first, end):
            largest = max(largest, _as_bits(a[i]) & np.uint32(0x7FFFFFFF))
        held = np.uint32(min(largest, np.uint32(0x7F7FFFF8)))  # LARGEST
        scale = _as_float(np.uint32(0x7FC00000)) if largest >= np.uint32(0x7F800000) else _as_float(held) / top
        scales[r] = scale
        usable = scale > np.float32(0)
        if bits == 4:
            for i in range(first, end, 2):
                low = np.int32(_nearest(a[i] / scale)) if usable else np.int32(0)
                high = np.int32(_nearest(a[i + 1] / scale)) if usable and i + 1 < end else np.int32(0)
                low, high = min(max(low, least), most), min(max(high, least), most)
                codes[i // 2] = np.uint8((low & 15) | ((high & 15) << 4))
        elif not usable:
            for i in range(first, end):
                codes[i] = np.uint8(0)
        elif top == np.float32(127):
            for i in range(first, end):
                x = min(max(_nearest(a[i] / scale), np.float32(-127)), np.float32(127))
                codes[i] = np.uint8(np.int32(x))
        else:
            for i in range(first, end):
                codes[i] = _fp8_of(a[i] / scale)


def _decode(bits: Any, top: Any, scales: Any, codes: Any, b: Any, c: Any) -> None:
    """c = the elements, or the elements + b if b is not empty."""
    adds = b.size > 0
    for r in range(scales.size):
        first, end, scale = r * 64, min(r * 64 + 64, c.size), scales[r]
        if bits == 4:
            for i in range(first, end):
                pair = np.int32(codes[i // 2])
                code = pair >> 4 if i % 2 else pair & 15
                c[i] = np.float32(code - 16 if code > 7 else code) * scale + (b[i] if adds else np.float32(0))
        elif top == np.float32(127):
            if adds:
                for i in range(first, end):
                    c[i] = np.float32(np.int8(codes[i])) * scale + b[i]
            else:
                for i in range(first, end):
                    c[i] = np.float32(np.int8(codes[i])) * scale
        else:
            for i in range(first, end):
                x = _of_fp8(codes[i]) * scale
                c[i] = x + b[i] if adds else x


_encode_into, _decode_into = _compiled(_encode), _compiled(_decode)
_NO_ELEMENTS = np.empty(0, np.float32)


def encode(wire: WireFormat, a: Array, m: Array) -> None:
    """m = the float32 elements of `a` on a wire with scales."""
    runs = -(-a.size // RUN)
    m[4 * runs + a.size * wire.bits // 8 :] = 0
    _encode_into(wire.bits, np.float32(wire.top), a.reshape(-1), m[: 4 * runs].view(np.float32), m[4 * runs :])


def decode(wire: WireFormat, m: Array, c: Array, b: Array = _NO_ELEMENTS) -> None:
    """c = the elements of m, float32, or with `b` their sum with it. c may be b."""
    runs = -(-c.size // RUN)
    scales, top = m[: 4 * runs].view(np.float32), np.float32(wire.top)
    _decode_into(wire.bits, top, scales, m[4 * runs :], b.reshape(-1), c.reshape(-1))
