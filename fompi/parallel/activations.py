"""Activations of linear layers, and their derivatives: none, relu, gelu (by erf), silu, swiglu.

`swiglu` halves the features: silu(first half) * second half.
"""

from __future__ import annotations

from math import erf as erf_of_number
from math import factorial, pi, sqrt
from typing import Any

import numpy as np

from fompi.parallel.local import Work, local_kernel

Array = np.ndarray[Any, Any]

ACTIVATIONS = ("none", "relu", "gelu", "silu", "swiglu")


def _activate_work(z: Array, activation: str) -> Work:
    features = z.shape[-1] // 2 if activation == "swiglu" else z.shape[-1]
    return Work(0, 2 * z.nbytes, [((*z.shape[:-1], features), z.dtype)])


@local_kernel(_activate_work)
def activate(z: Array, activation: str) -> Array:
    """The activation of z, feature by feature."""
    if activation == "relu":
        return np.maximum(z, 0)
    if activation == "gelu":
        return z * _normal(z)
    if activation == "silu":
        return z * _sigmoid(z)
    if activation == "swiglu":
        gate, up = np.split(z, 2, -1)
        return gate * _sigmoid(gate) * up
    return z


@local_kernel(lambda z, dy, activation: Work(0, 2 * z.nbytes + dy.nbytes, [(z.shape, z.dtype)]))
def activate_backward(z: Array, dy: Array, activation: str) -> Array:
    """The gradient of z, where dy is that of `activate(z, activation)`."""
    if activation == "relu":
        return np.where(z > 0, dy, np.zeros((), dy.dtype))
    if activation == "gelu":
        return dy * (_normal(z) + z * np.exp(-z * z / 2) * z.dtype.type(1 / sqrt(2 * pi)))
    if activation == "silu":
        return dy * _silu_slope(z)
    if activation == "swiglu":
        gate, up = np.split(z, 2, -1)
        return np.concatenate([dy * up * _silu_slope(gate), dy * gate * _sigmoid(gate)], -1)
    return dy


def _sigmoid(z: Array) -> Array:
    """1 / (1 + exp(-z)), without overflow."""
    e = np.exp(-np.abs(z))
    return np.where(z >= 0, 1, e) / (1 + e)


def _silu_slope(z: Array) -> Array:
    s = _sigmoid(z)
    return s * (1 + z * (1 - s))


def _normal(z: Array) -> Array:
    """The distribution function of the standard normal distribution."""
    half = z.dtype.type(0.5)
    return half + half * erf(z * z.dtype.type(sqrt(0.5)))


CELLS, LAST, TERMS = 32, 6, 9
"""Cells per unit, the point from which erf is 1 in float64, and the terms of the Taylor series of a cell."""


def _taylor() -> Array:
    """The coefficients of erf around the middle of each cell. The n-th derivative has a Hermite polynomial."""
    x = (np.arange(CELLS * LAST) + 0.5) / CELLS
    terms = [np.array([erf_of_number(point) for point in x])]
    slope, hermite, before = 2 / sqrt(pi) * np.exp(-x * x), np.ones_like(x), np.zeros_like(x)
    for n in range(1, TERMS):
        terms.append((-1) ** (n - 1) * slope * hermite / factorial(n))
        hermite, before = 2 * x * hermite - 2 * (n - 1) * before, hermite
    return np.stack(terms)


_TAYLOR = _taylor()


def erf(x: Array) -> Array:
    """The error function, within 1e-15. NumPy has none."""
    size = np.minimum(np.nan_to_num(np.abs(x).astype(np.float64)), LAST)
    cell = np.minimum((size * CELLS).astype(np.intp), CELLS * LAST - 1)
    h = size - (cell + 0.5) / CELLS
    y = _TAYLOR[-1][cell]
    for terms in _TAYLOR[-2::-1]:
        y = y * h + terms[cell]
    return np.where(np.isnan(x), x, np.copysign(y, x)).astype(x.dtype)
