"""Random shardings, and what they hold, computed with NumPy."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from random import Random

import numpy as np

from fompi import Replicate, Shard
from fompi.plans.boxes import Box, Boxes

PADDING = -7


def counts_of(rng: Random, total: int, size: int) -> list[int]:
    return [b - a for a, b in pairwise([0, *sorted(rng.randint(0, total) for _ in range(size - 1)), total])]


def sharding_of(rng: Random, shape: tuple[int, ...], size: int) -> Boxes:
    """Even, uneven, replicated, flat, padded, of a mesh, on some of the ranks, columns in turns, or fused."""
    kind = rng.choice(["over", "sharded", "flat", "padded", "mesh", "some", "turns", "fused"])
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
    if kind == "fused":
        return fused(shape, dim, [counts_of(rng, n, size) for n in counts_of(rng, shape[dim], 3)])
    lengths = tuple(1 if i == dim else n for i, n in enumerate(shape))
    columns = [Box(tuple(place if i == dim else 0 for i in range(len(shape))), lengths) for place in range(shape[dim])]
    return Boxes(shape, tuple(tuple(columns[rank::size]) for rank in range(size)))


def fused(shape: tuple[int, ...], dim: int, counts: list[list[int]]) -> Boxes:
    """Several parts of a dimension, as q, k and v: of part i rank r has the next `counts[i][r]`."""
    begin, of = 0, [list[Box]() for _ in counts[0]]
    for part in counts:
        for rank, n in enumerate(part):
            offset = tuple(begin if i == dim else 0 for i in range(len(shape)))
            of[rank].append(Box(offset, tuple(n if i == dim else m for i, m in enumerate(shape))))
            begin += n
    return Boxes(shape, tuple(map(tuple, of)))


def views(memory: np.ndarray, boxes: tuple[Box, ...]) -> list[np.ndarray]:
    """The elements of each box in a flat array."""
    ends = np.cumsum([0, *(prod(box.shape) for box in boxes)])
    return [memory[a:b].reshape(box.shape) for a, b, box in zip(ends, ends[1:], boxes, strict=False)]


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))


def held(x: np.ndarray, boxes: Boxes) -> list[np.ndarray]:
    """The flat array of each rank. What no box names is PADDING."""
    found = []
    for shape, of in zip(boxes.arrays, boxes.of, strict=True):
        memory = np.full(prod(shape), PADDING, x.dtype)
        for view, box in zip(views(memory, of), of, strict=True):
            view[...] = x[index(box)]
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
