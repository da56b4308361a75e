"""Calls of the public operations on tensors of a device."""

from __future__ import annotations

import calls
import numpy as np


def random(*shape, dtype="float32"):
    """Small whole numbers: every order of a sum gives the same bits."""
    return np.random.default_rng(sum(shape)).integers(-4, 5, shape).astype(dtype)


def moved(make, x):
    """`x` as `make` makes it. What is no array stays as it is. A packed x keeps its gaps."""
    if isinstance(x, (list, tuple)):
        return type(x)(moved(make, each) for each in x)
    if not isinstance(x, np.ndarray):
        return x
    return make(x) if x.flags.c_contiguous or x.base is None else make(x.base)[..., 0]


def result_of(make, get, problem, given, sizes, comm, **options):
    """As `calls.call`: `make` makes the tensors of arrays of NumPy, and `get` arrays of the results."""
    positional, named = calls.arguments(problem, given, sizes, comm.rank)
    named = {key: value if key == "counts" else moved(make, value) for key, value in named.items()}
    result = calls.operation_of(problem)(*moved(make, positional), comm=comm, **named, **options)
    if problem.operation == "all_gather_matmul_many":
        result = get(result[0]), [get(y) for y in result[1]]
    else:
        result = tuple(map(get, result)) if isinstance(result, tuple) else get(result)
    return calls.by_name(problem, result)
