"""Random shardings, and what they hold, computed with NumPy."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from random import Random

import numpy as np

from fompi import Replicate, Shard
from fompi.plans.boxes import Box, Boxes, row_major

PADDING = -7


def counts_of(rng: Random, total: int, size: int) -> list[int]:
    return [b - a for a, b in pairwise([0, *sorted(rng.randint(0, total) for _ in range(size - 1)), total])]


def sharding_of(rng: Random, shape: tuple[int, ...], size: int) -> Boxes:
    """Even, uneven, replicated, flat, padded, of a mesh, on some of the ranks, or columns in turns."""
    kind = rng.choice(["over", "sharded", "flat", "padded", "mesh", "some", "turns"])
    dim = rng.randrange(len(shape))
    layout = rng.choice([Shard(dim), Replicate()])
    if kind == "over":
        return Boxes.over(shape, layout, size)
    if kind == "sharded":
        return Boxes.sharded(shape, dim, counts_of(rng, shape[dim], size))
    if kind in ("flat", "padded"):
        counts = counts_of(rng, prod(shape), size)
        return Boxes.flat(shape, counts, max(counts) + rng.randint(0, 3) if kind == "padded" else None)
    if kind == "mesh":
        mesh = rng.choice([(a, size // a) for a in range(1, size + 1) if size % a == 0])
        return Boxes.over(shape, (layout, rng.choice([Shard(-1), Shard(0), Replicate()])), mesh)
    if kind == "some":
        count = rng.randint(1, size)
        return Boxes.over(shape, layout, count, rng.sample(range(size), count), size)
    of, arrays = [], []
    for rank in range(size):
        places = range(rank, shape[dim], size)
        local = tuple(len(places) if i == dim else n for i, n in enumerate(shape))
        strides, lengths = row_major(local), tuple(1 if i == dim else n for i, n in enumerate(shape))
        of.append(tuple(Box(tuple(place if i == dim else 0 for i in range(len(shape))), lengths, at * strides[dim],
                            strides) for at, place in enumerate(places)))  # fmt: skip
        arrays.append(local)
    return Boxes(shape, tuple(of), tuple(arrays))


def view(memory: np.ndarray, box: Box) -> np.ndarray:
    """The elements of a box in a flat array."""
    nbytes = memory.itemsize
    return np.ndarray(box.shape, memory.dtype, memory, box.at * nbytes, [stride * nbytes for stride in box.strides])


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(*box.region, strict=True))


def held(x: np.ndarray, boxes: Boxes) -> list[np.ndarray]:
    """The flat array of each rank. What no box names is PADDING."""
    found = []
    for shape, of in zip(boxes.arrays, boxes.of, strict=True):
        memory = np.full(prod(shape), PADDING, x.dtype)
        for box in of:
            view(memory, box)[...] = x[index(box)]
        found.append(memory)
    return found


def least_elements(source: Boxes, target: Boxes) -> int:
    """What ranks need and have not: no plan sends less."""
    missing = 0
    for here, wanted in zip(source.of, target.of, strict=True):
        has = np.zeros(source.shape, bool)
        for box in here:
            has[index(box)] = True
        missing += sum(int((~has[index(box)]).sum()) for box in wanted)
    return missing
