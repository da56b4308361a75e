"""Products whose columns are dealt: bound plans, gradients, and calls that are refused. The values of all schedules are
in test_operations.py, the gradients in torch and JAX in their own files."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from strategies import close, slopes

import fompi
from fompi import Replicate, Shard, Spec
from fompi.base.layout import offsets, split

pytestmark = pytest.mark.ranks(mpich=[2], openmpi=[])

K, N = 6, 7


def drawn(*shape, seed=0):
    """Small whole numbers, the same on all ranks. Their sums and products are exact."""
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(float)


def piece(counts, rank):
    """The piece of `rank`."""
    return slice(*list(pairwise(offsets(counts)))[rank])


def test_a_bound_plan_takes_the_whole_weight(world):
    """Also in a call on other tensors, and in an x that becomes ready in parts."""
    size, rank = world.size, world.rank
    x, w, v = drawn(12, K), drawn(K, N), drawn(N, 3)
    rows, columns = (piece(split(n, size), rank) for n in (12, N))
    specs = Spec((12, K), "float64", Shard(0)), Spec((K, N), "float64", Replicate())
    plan = fompi.plan(fompi.matmul_all_to_all_columns, *specs, ranks=size, slices=2)
    with fompi.bind(plan, comm=world, x=x[rows].copy(), w=w.copy()) as project:
        np.testing.assert_array_equal(project(), (x @ w)[:, columns])
        np.testing.assert_array_equal(project(x=2 * x[rows], w=3 * w), 6 * (x @ w)[:, columns])
        project.start("x")
        for part in range(2):
            project.ready("x", part)
        y = project.wait().copy()
        with pytest.raises(fompi.ShapeError, match="w has the shape"):
            fompi.bind(plan, comm=world, x=x[rows].copy(), w=drawn(K, N + 1))
    specs = Spec((12, N), "float64", Shard(1)), Spec((N, 3), "float64", Replicate())
    plan = fompi.plan(fompi.all_to_all_columns_matmul, *specs, ranks=size, bias=True)
    with fompi.bind(plan, comm=world, x=y, w=v, bias=np.ones(3)) as back:
        np.testing.assert_array_equal(back(), (x @ w @ v + 1)[rows])


def test_started_and_out(world):
    """`part` gives the rows of one rank. Ranks have different numbers of rows, some have none."""
    size, rank = world.size, world.rank
    rows = tuple(r % 3 for r in range(size))
    x, w = drawn(sum(rows), 2, K), drawn(K, N)
    expected = (x @ w)[..., piece(split(N, size), rank)]
    pending = fompi.matmul_all_to_all_columns.start(x[piece(rows, rank)], w, comm=world)
    for source in range(size):
        np.testing.assert_array_equal(pending.part(source, timeout=20), expected[piece(rows, source)])
    y = pending.wait()
    out = np.zeros((rows[rank], 2, 3))
    z = fompi.all_to_all_columns_matmul(y, drawn(N, 3), counts=rows, out=out, comm=world)
    np.testing.assert_array_equal(out, (x @ w @ drawn(N, 3))[piece(rows, rank)])
    assert z is out


@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)])
def test_gradients_of_some_tensors(world, wanted):
    """They are those of the product and the all-to-all. Other gradients are sent otherwise."""
    rows, columns = [1 + r for r in range(world.size)], [0, *split(N, world.size - 1)] if world.size > 1 else [N]
    x, w, v = (torch.from_numpy(drawn(*s)) for s in ((rows[world.rank], K), (K, N), (N, 3)))

    def gradients(fused):
        leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate((x, w))]
        others = [t.clone().requires_grad_(i in wanted) for i, t in enumerate((x, v))]
        if fused:
            y = fompi.matmul_all_to_all_columns(*leaves, columns=columns, comm=world)
            u = y.detach().requires_grad_(0 in wanted)
            z = fompi.all_to_all_columns_matmul(u, others[1], columns=columns, counts=rows, comm=world)
        else:
            y = fompi.all_to_all(leaves[0] @ leaves[1], split_dim=1, concat_dim=0, counts=columns, comm=world)
            u = y.detach().requires_grad_(0 in wanted)
            z = fompi.all_to_all(u, split_dim=0, concat_dim=1, counts=rows, comm=world) @ others[1]
        (y * y).sum().backward()
        (z * z).sum().backward()
        return [y, z, *(t.grad for t in (*leaves, u, others[1]) if t.grad is not None)]

    found = gradients(True)
    assert len(found) == 2 + 2 * len(wanted)
    for actual, expected in zip(found, gradients(False), strict=True):
        np.testing.assert_array_equal(actual.detach(), expected.detach())


def test_gradients_are_finite_differences(world):
    """Of the loss of all ranks, through both products: uneven rows and columns, none on some rank."""
    size, rank = world.size, world.rank
    rows, columns = [r % 3 for r in range(size)], [0, *split(N, size - 1)] if size > 1 else [N]
    x, w, v, c = drawn(sum(rows), 3), drawn(3, N), drawn(N, 2), drawn(sum(rows), N)
    leaves = [torch.from_numpy(t).requires_grad_() for t in (x[piece(rows, rank)].copy(), w, v)]
    y = fompi.matmul_all_to_all_columns(*leaves[:2], columns=columns, comm=world)
    z = fompi.all_to_all_columns_matmul(y, leaves[2], columns=columns, counts=rows, comm=world)
    ((z * z).sum() + (y * y * torch.from_numpy(c[:, piece(columns, rank)])).sum()).backward()
    expected = slopes(lambda x, w, v: ((x @ w @ v) ** 2).sum() + ((x @ w) ** 2 * c).sum(), (x, w, v))
    close(leaves[0].grad, expected[0][piece(rows, rank)])
    for leaf, slope in zip(leaves[1:], expected[1:], strict=True):  # each rank has the term of its rows
        close(fompi.all_reduce(leaf.grad, comm=world), slope)


def test_calls_that_are_refused(world):
    """The error has the same type on all ranks. Nothing is written."""
    x, w, size = np.ones((3, K)), np.ones((K, N)), world.size
    deal, collect = fompi.matmul_all_to_all_columns, fompi.all_to_all_columns_matmul
    mine, v = np.ones((3, split(N, size)[world.rank])), np.ones((N, 2))
    for call, kind, words in (
        (lambda: deal(x, w, columns=[N + 1] * size, comm=world), fompi.LayoutError, "columns="),
        (lambda: deal(x, w, counts=[3] * size, comm=world), fompi.ArgumentError, "no argument 'counts'"),
        (lambda: fompi.matmul_all_to_all(x, w, dim=-1, comm=world), fompi.ShapeError, "matmul_all_to_all_columns"),
        (lambda: fompi.all_to_all_matmul(x, w, dim=1, comm=world), fompi.ShapeError, "all_to_all_columns_matmul"),
        (lambda: fompi.matmul_all_to_all(x, w, columns=[1], comm=world), fompi.ArgumentError, "_to_all_columns$"),
        (lambda: fompi.all_to_all_matmul(x, w, experts=2, comm=world), fompi.ArgumentError, "all_to_all_grouped_mat"),
        (lambda: fompi.matmul_all_to_all(x, np.ones((2, K, N)), comm=world), fompi.ShapeError, "fompi.grouped_matmul"),
        (lambda: deal(x, np.ones((K + 1, N)), comm=world), fompi.ShapeError, "w needs the shape"),
        (lambda: deal(x, np.ones(K), comm=world), fompi.ShapeError, "two dimensions"),
        (lambda: deal(np.ones(K), w, comm=world), fompi.ShapeError, rf"x has the shape \({K},\)"),
        (lambda: deal(x, w, schedule="ring", comm=world), fompi.PlanError, "ring"),
        (lambda: collect(np.ones((3, N + 1)), v, comm=world), fompi.ShapeError, "columns"),
        (lambda: collect(mine, v, counts=[5] * size, comm=world), fompi.LayoutError, "counts="),
        (lambda: collect(mine, v, out=np.ones((4, 2)), comm=world), fompi.ShapeError, "out="),
        (lambda: fompi.all_gather_matmul(x, w, dim=-1, comm=world), fompi.ShapeError, "last dimension"),
    ):
        with pytest.raises(kind, match=words):
            call()


def test_columns_that_differ_between_ranks(world):
    if world.size == 1:
        return
    columns = [N, *[0] * (world.size - 1)] if world.rank else [0, N, *[0] * (world.size - 2)]
    with pytest.raises(fompi.MismatchError, match="columns"):
        fompi.matmul_all_to_all_columns(np.ones((2, K)), np.ones((K, N)), columns=columns, comm=world)
