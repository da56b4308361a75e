"""Prints a digest of the bits of each kernel in C: the same on every processor.

A NaN that arithmetic makes has another sign on ARM than on x86, so no operation here makes one.
"""

from __future__ import annotations

import hashlib
import platform
import sys

import numpy as np

from fompi.backends import chains
from fompi.native import _native

COUNT = 1000
HALVES = {"BFLOAT16": np.uint16, "FLOAT16": np.float16}
INTEGERS = [f"{sign}INT{bits}" for sign in ("U", "") for bits in (8, 16, 32, 64)]
NUMBERS = ["FLOAT32", "FLOAT64", "COMPLEX64", "COMPLEX128"]
WIRES = ["BFLOAT16", "FLOAT16", "INT8", "FP8", "INT4"]


def number(name: str) -> int:
    return getattr(_native, name)


def operands(dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    wide = rng.standard_normal((2, COUNT)).astype(np.float32)
    if dtype == "BFLOAT16":
        return [*(wide.view(np.uint32) >> 16).astype(np.uint16)]
    if dtype in INTEGERS:
        return [*rng.integers(0, 256, (2, COUNT * 8), np.uint8).view(dtype.lower())[:, :COUNT].copy()]
    return [*(wide * (1 + 1j) if "COMPLEX" in dtype else wide).astype(dtype.lower())]


def show(name: str, result: np.ndarray) -> None:
    print(name, hashlib.sha256(result.tobytes()).hexdigest()[:16])


def sums() -> None:
    for dtype in [*NUMBERS, *HALVES, *INTEGERS]:
        a, b = operands(dtype)
        for kernel in ("ADD", "PROD", "MEAN", "MAX", "MIN"):
            c = np.zeros_like(a)
            try:
                _native.kernel(number(kernel), number(dtype), 3, 0, *(x.ctypes.data for x in (a, b, c)), COUNT)
            except ValueError:
                continue  # C has no such kernel
            show(f"{kernel} {dtype}", c)


def wires() -> None:
    wide, x = number("FLOAT32"), operands("FLOAT32")[0]
    for name in WIRES:
        wire = number(f"WIRE_{name}")
        message, back, added = (np.zeros(4 * COUNT, np.uint8) for _ in range(3))
        at = {"x": x.ctypes.data, "m": message.ctypes.data, "y": back.ctypes.data, "z": added.ctypes.data}
        _native.kernel(number("ENCODE"), wire, 1, wide | wide << 4, at["x"], at["x"], at["m"], COUNT)
        _native.kernel(number("DECODE"), wire, 1, wide << 8, at["m"], at["m"], at["y"], COUNT)
        _native.kernel(number("DECODE_ADD"), wire, 1, wide << 4 | wide << 8, at["m"], at["x"], at["z"], COUNT)
        for kernel, result in (("ENCODE", message), ("DECODE", back), ("DECODE_ADD", added)):
            show(f"{kernel} {name}", result)


def products() -> None:
    rng = np.random.default_rng(11)
    for dtype in (np.float32, np.float64):
        for m, n, k in ((1, 70, 33), (4, 64, 96), (5, 17, 1), (40, 100, 64)):
            for leaves in (1, 2) if k % 2 == 0 else (1,):
                x, w, y = rng.standard_normal((m, k)), rng.standard_normal((k, n)), np.zeros((m, n), dtype)
                chains.product(x.astype(dtype), w.astype(dtype), y, leaves)
                show(f"product {np.dtype(dtype)} {m} {n} {k} {leaves}", y)


if __name__ == "__main__":
    print(platform.machine(), file=sys.stderr)
    sums()
    wires()
    products()
