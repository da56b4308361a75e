"""References for the strategies: definitions on whole tensors in long double, and slopes by finite differences."""

from itertools import pairwise

import numpy as np
import pytest

import fompi

STEP = np.longdouble(1e-6)


def drawn(*shape, seed=0):
    """Random numbers, the same on all ranks."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def uneven(size, kind="uneven"):
    """Rows of each rank: none on rank 1, or as many on all."""
    return cycled({"uneven": [3, 0, 4, 1], "even": [2], "none": [0]}[kind], size)


def cycled(values, size):
    """The first `size` of the values, again and again."""
    return [values[i % len(values)] for i in range(size)]


def runs(counts):
    """The slices of consecutive runs of such lengths."""
    ends = np.cumsum([0, *counts]).tolist()
    return [slice(a, b) for a, b in pairwise(ends)]


def slopes(loss, tensors):
    """The derivative of loss(*tensors) by each element of each tensor. The error is about 1e-12."""
    wide = [np.asarray(t, np.longdouble) for t in tensors]
    found = []
    for i, tensor in enumerate(wide):
        gradient = np.zeros(tensor.shape)
        for place in np.ndindex(tensor.shape):
            ends = []
            for step in (STEP, -STEP):
                moved = list(wide)
                moved[i] = tensor.copy()
                moved[i][place] += step
                ends.append(loss(*moved))
            gradient[place] = (ends[0] - ends[1]) / (2 * STEP)
        found.append(gradient)
    return found


def close(actual, expected, within=1e-10):
    """Equal within `within` of the largest number."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == np.shape(expected), (actual.shape, np.shape(expected))
    if actual.size:
        error = np.abs(actual - expected).max()
        assert error <= within * max(1, np.abs(expected).max()), error


def softmax_attention(q, k, v, causal=False, scale=None, cu_seqlens=None):
    """(tokens, heads, d) by its definition, the tokens in order. Fewer key heads: consecutive query heads share one."""
    group, tokens = q.shape[1] // k.shape[1], np.arange(len(q))
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    s = np.einsum("ihd,jhd->hij", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    hidden = np.zeros((len(q), len(q)), bool)
    if causal:
        hidden |= tokens[:, None] < tokens
    if cu_seqlens is not None:
        document = np.searchsorted(cu_seqlens, tokens, side="right")
        hidden |= document[:, None] != document
    e = np.where(hidden, 0, np.exp(s - s.max(2, keepdims=True, initial=-1e9)))
    return np.einsum("hij,jhd->ihd", e / e.sum(2, keepdims=True), v)


def same_bits(a, b):
    return all(
        (x is None and y is None) or np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(a, b, strict=True)
    )


def refused(world, rank, error, call, words=""):
    """All ranks raise: `rank` the error (None: all of them), the others a MismatchError that quotes it."""
    expected = error if rank in (None, world.rank) else fompi.MismatchError
    with pytest.raises(expected, match=words):
        call()
    assert fompi.all_reduce(np.ones(1), comm=world)[0] == world.size  # the communicator still works
