"""Activations of linear layers, and their derivatives: none, relu, gelu (by erf), silu, swiglu.

`swiglu` halves the features: silu(first half) * second half.
"""

from __future__ import annotations

from math import erf as erf_of_number
from math import factorial, pi, sqrt
from typing import Any

import numpy as np

from fompi.backends.numbers import constant, contiguous, place
from fompi.base.errors import PlanError, ShapeError, quoted

Array = np.ndarray[Any, Any]

ACTIVATIONS = ("none", "relu", "gelu", "silu", "swiglu")


def check_activation(activation: str, features: int = 0, what: str = "") -> None:
    """Raise PlanError for one that is not known, and ShapeError if it cannot halve the features of `what`."""
    if activation not in ACTIVATIONS:
        raise PlanError(f"activation={quoted(activation, ACTIVATIONS)} must be one of {', '.join(ACTIVATIONS)}")
    if activation == "swiglu" and features % 2:
        raise ShapeError(f"swiglu halves the features: {what} has {features} columns, an odd number")


def activate(z: Array, activation: str) -> Array:
    """The activation of z, feature by feature."""
    if activation == "relu":
        return np.maximum(z, 0)
    if activation == "gelu":
        return z * normal(z)
    if activation == "silu":
        return z * _sigmoid(z)
    if activation == "swiglu":
        gate, up = np.split(z, 2, -1)
        return gate * _sigmoid(gate) * up
    return z


def activate_backward(z: Array, dy: Array, activation: str) -> Array:
    """The gradient of z, where dy is that of `activate(z, activation)`."""
    if activation == "relu":
        return np.where(z > 0, dy, dy.dtype.type(0))
    if activation == "gelu":
        return dy * (normal(z) + z * np.exp(-z * z / 2) * z.dtype.type(1 / sqrt(2 * pi)))
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


def normal(z: Array) -> Array:
    """The distribution function of the standard normal distribution. In float32 within 3e-7 (5e-6 of it from -6 on)."""
    if z.dtype == np.float64:
        return 0.5 + 0.5 * erf(z * sqrt(0.5))
    flat = contiguous(z.astype(np.float32, copy=False)).reshape(-1)
    y = np.empty_like(flat)
    step = BLOCK if place(flat) is None else max(flat.size, 1)
    for start in range(0, flat.size, step):
        _normal_float32(flat[start : start + step], y[start : start + step])
    return y.reshape(z.shape).astype(z.dtype, copy=False)


BLOCK = 1 << 14
"""Elements that stay in a core's cache while the passes of `normal` go over them."""

ERFC = (
    *(0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807),
    *(-0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223),
)
"""erfc(x) = t exp(p(t) - x x) with t = 1 / (1 + x / 2), x >= 0, within 1.2e-7 of it in relative terms.

A Chebyshev fit: W. H. Press et al., Numerical Recipes, section 6.2. The coefficients of p, the highest first.
"""


def _normal_float32(z: Array, y: Array) -> None:
    """y = normal(z): erfc(|z| / sqrt(2)) / 2 is the tail on one side."""
    x = np.abs(z)
    x *= np.float32(sqrt(0.5))
    t = x * np.float32(0.5)
    t += np.float32(1)
    np.reciprocal(t, out=t)
    np.multiply(t, np.float32(ERFC[0]), out=y)
    for term in ERFC[1:-1]:
        y += np.float32(term)
        y *= t
    y += np.float32(ERFC[-1])
    x *= x
    y -= x
    np.exp(y, out=y)
    y *= t
    y *= np.float32(0.5)
    np.copyto(y, np.float32(1) - y, where=z > 0)


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
    table = constant(_TAYLOR, size)
    y = table[-1][cell]
    for terms in table[-2::-1]:
        y = y * h + terms[cell]
    return np.where(np.isnan(x), x, np.copysign(y, x)).astype(x.dtype)
