"""`order=Canonical(k)`: the bits of one tree over k leaves, on any number of ranks."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise

import numpy as np
import pytest

import fompi
from fompi import Canonical
from fompi.backends import chains
from fompi.base.layout import offsets, split
from fompi.plans.tree import folded

pytestmark = [pytest.mark.ranks(mpich=[1, 2, 3, 8], openmpi=[3]), pytest.mark.usefixtures("verified_once")]

LEAVES = 8
UP_TO_THREE = pytest.mark.ranks(mpich=[1, 2, 3])
"""What eight ranks say no more of: the sums and products of leaves say all of the tree."""


def leaf(i, *shape, dtype="float32"):
    return np.random.default_rng([i, *shape]).standard_normal(shape).astype(dtype)


def mine(world, leaves=LEAVES):
    ends = offsets(split(leaves, world.size))
    return range(ends[world.rank], ends[world.rank + 1])


def schedules(world, moves="all_reduce"):
    if world.size == 1:
        return ["auto"]
    names = ["auto", "direct", "unfused_p2p", "sliced_p2p"] + ["exchange"] * (moves == "all_reduce")
    aligned = world.size & (world.size - 1) == 0
    return [*names, *(["doubling"] if aligned and moves == "all_reduce" else []), *groups(world)]


def groups(world):
    return ["hierarchical(2)"] if world.size in (4, 8) else []


@pytest.mark.parametrize("rows", [1, 7, 20_000])
def test_sums_of_leaves(world, rows):
    x, wanted = [leaf(i, rows, 3) for i in mine(world)], folded([leaf(i, rows, 3) for i in range(LEAVES)], np.add)
    for schedule in schedules(world):
        for slices in (None,) if schedule in ("auto", "exchange", "doubling") else (1, 2, 4):
            how = {"comm": world, "schedule": schedule, "slices": slices, "order": Canonical(LEAVES)}
            assert fompi.all_reduce(x, **how).tobytes() == wanted.tobytes(), (schedule, slices)
    largest = fompi.all_reduce(x, op="max", comm=world, order="canonical(8)")
    assert largest.tobytes() == reduce(np.maximum, (leaf(i, rows, 3) for i in range(LEAVES))).tobytes()
    y = fompi.reduce(x, root=world.size - 1, comm=world, order=Canonical(LEAVES))
    assert world.rank < world.size - 1 or y.tobytes() == wanted.tobytes()


@UP_TO_THREE
@pytest.mark.parametrize("leaves", [8, 9, 13])
def test_sums_of_subtrees(world, leaves):
    """A rank that has one subtree may give its sum as a tensor, also where other ranks have several."""
    terms = Canonical(leaves).subtrees(world.size)[world.rank]
    x, ends = [leaf(i, 3 * world.size, 2) for i in mine(world, leaves)], offsets(terms)
    sums = [folded(x[a:b], np.add) for a, b in pairwise(ends)]
    how = {"comm": world, "order": Canonical(leaves)}
    for given in (sums, sums[0] if len(sums) == 1 else x):
        for operation in (fompi.all_reduce, fompi.reduce_scatter, fompi.reduce):
            got, wanted = (operation(each, **how) for each in (given, x))
            assert (got is None and wanted is None) or got.tobytes() == wanted.tobytes(), operation


@pytest.mark.parametrize("leaves", [8, 9, 11])
def test_reduce_scatter_of_leaves(world, leaves):
    rows, size = 5 * world.size + 2, world.size
    ends = offsets(split(rows, size))
    wanted = folded([leaf(i, rows, 4) for i in range(leaves)], np.add)[ends[world.rank] : ends[world.rank + 1]]
    for strided in (False, True):
        x = [leaf(i, rows, 4) for i in mine(world, leaves)]
        x = [np.asfortranarray(each) for each in x] if strided else x
        for schedule in [s for s in schedules(world, "reduce_scatter") if leaves == 8 or "hier" not in s]:
            y = fompi.reduce_scatter(x, comm=world, schedule=schedule, order=Canonical(leaves))
            assert y.tobytes() == wanted.tobytes(), (schedule, strided)


def whole(rows, k, n, dtype):
    x, w, bias = leaf(0, rows, k, dtype=dtype), leaf(1, k, n, dtype=dtype), leaf(2, n, dtype=dtype)
    pieces = [slice(i * k // LEAVES, (i + 1) * k // LEAVES) for i in range(LEAVES)]
    terms = []
    for i, piece in enumerate(pieces):
        y = np.empty((rows, n), dtype)
        chains.product(x[:, piece], w[piece], y, bias=bias if i == 0 else None)
        terms.append(y)
    return x, w, bias, folded(terms, np.add)


@pytest.mark.parametrize(
    ("rows", "n", "dtype"), [(64, 32, "float32"), pytest.param(37, 5, "float32", marks=UP_TO_THREE), (2, 3, "float64")]
)
def test_products_that_are_summed(world, rows, n, dtype):
    k = 6 * LEAVES
    x, w, bias, wanted = whole(rows, k, n, dtype)
    own = slice(mine(world).start * k // LEAVES, mine(world).stop * k // LEAVES)
    ends = offsets(split(rows, world.size))
    part = wanted[ends[world.rank] : ends[world.rank + 1]]
    how = {"bias": bias, "comm": world, "order": Canonical(LEAVES)}
    for schedule in schedules(world):
        for slices in (None,) if schedule in ("auto", "exchange", "doubling") else (1, 2, 4):
            more = {**how, "schedule": schedule, "slices": slices}
            y = fompi.matmul_all_reduce(x[:, own], w[own], **more)
            assert y.tobytes() == wanted.tobytes(), (schedule, slices)
            if schedule not in ("exchange", "doubling"):
                y = fompi.matmul_reduce_scatter(x[:, own], w[own], **more)
                assert y.tobytes() == part.tobytes(), (schedule, slices)


@UP_TO_THREE
def test_products_of_gathered_rows(world):
    """Rows and columns may be cut in any way: all that counts is the contraction."""
    rows, k, n = 6 * world.size + 1, 20, 16
    x, w, h = leaf(0, 50, k)[:rows], leaf(1, k, n), leaf(2, 50, n)[:rows]
    ends, columns = offsets(split(rows, world.size)), offsets(split(n, world.size))
    own, mine = slice(*ends[world.rank : world.rank + 2]), slice(*columns[world.rank : world.rank + 2])
    y, g = chains.product_of(x, w), chains.product_of(x.T, h)
    names = ["auto", "direct", "ring", "unfused_p2p", "unfused", "sliced"] if world.size > 1 else ["auto"]
    for schedule in names:
        how = {"comm": world, "schedule": schedule, "order": Canonical(LEAVES)}
        got = fompi.all_gather_matmul(x[own], w[:, mine], **how)
        assert got.tobytes() == np.ascontiguousarray(y[:, mine]).tobytes(), schedule
        dw = fompi.all_gather_weight_gradient(x[own], h[:, mine], **how)
        assert dw.tobytes() == np.ascontiguousarray(g[:, mine]).tobytes(), schedule


@UP_TO_THREE
def test_half_types(world):
    """Products of a half type are summed in float32, and rounded once."""
    torch = pytest.importorskip("torch")
    x, w, _, _ = whole(9, 6 * LEAVES, 5, "float32")
    x, w = torch.from_numpy(x).bfloat16(), torch.from_numpy(w).bfloat16()
    pieces = [slice(i * 6, (i + 1) * 6) for i in range(LEAVES)]
    terms = [chains.product_of(x.float().numpy()[:, p], w.float().numpy()[p]) for p in pieces]
    wanted = torch.from_numpy(folded(terms, np.add)).bfloat16()
    own = slice(mine(world).start * 6, mine(world).stop * 6)
    y = fompi.matmul_all_reduce(x[:, own], w[own], comm=world, order=Canonical(LEAVES))
    assert torch.equal(y, wanted)


@UP_TO_THREE
def test_gradients(world):
    """Of y = all_reduce(x @ w): dx = dy @ w.T and dw = x.T @ dy have the same bits on any number of ranks."""
    torch = pytest.importorskip("torch")
    k, rows = 6 * LEAVES, 11
    x, w, _, _ = whole(rows, k, 5, "float32")
    own = slice(mine(world).start * 6, mine(world).stop * 6)
    tx, tw = (torch.from_numpy(a.copy()).requires_grad_() for a in (x[:, own], w[own]))
    y = fompi.matmul_all_reduce(tx, tw, comm=world, order=Canonical(LEAVES))
    dy = leaf(3, rows, 5)
    y.backward(torch.from_numpy(dy / np.float32(world.size)))
    if world.size & (world.size - 1) == 0:  # then the sum of these over the ranks is dy, exactly
        assert tx.grad.numpy().tobytes() == chains.product_of(dy, w[own].T).tobytes()
        assert tw.grad.numpy().tobytes() == chains.product_of(x[:, own].T, dy).tobytes()


@UP_TO_THREE
def test_what_has_no_such_order(world):
    few = Canonical(world.size)
    if world.size > 1:
        with pytest.raises(fompi.PlanError, match=f"{world.size} ranks need as many leaves"):
            fompi.all_reduce([np.ones(3)], comm=world, order=Canonical(world.size - 1))
    with pytest.raises(fompi.PlanError, match="divide by the leaves"):
        fompi.all_reduce([np.ones(3)], op="mean", comm=world, order=few)
    with pytest.raises(fompi.ShapeError, match="has 1 leaves"):
        fompi.all_reduce([np.ones(3)] * 2, comm=world, order=few)
    with pytest.raises(fompi.ShapeError, match="does not divide"):
        fompi.matmul_all_reduce(np.ones((2, 7)), np.ones((7, 3)), comm=world, order=Canonical(4 * world.size))
    with pytest.raises(fompi.PlanError, match="must be one of"):
        fompi.all_reduce(np.ones(3), comm=world, order="ring")
    if world.size == 3:
        with pytest.raises(fompi.FompiError, match="give x as a list of its leaves"):
            fompi.all_reduce(np.ones(3), comm=world, order=Canonical(8))
