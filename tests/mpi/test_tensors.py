"""Tensors of operations: any number of dimensions, dim=, out=, strides, weights as views, odd sizes."""

from __future__ import annotations

import calls
import ml_dtypes
import numpy as np
import pytest

import fompi
from fompi.base.layout import split

pytestmark = pytest.mark.ranks(mpich=[1, 2, 3], openmpi=[])

DTYPES = ["float64", "float32", "float16", ml_dtypes.bfloat16, "int32", "uint8", "complex128"]


def whole(seed, shape, dtype="float64"):
    """Small whole numbers: sums and products of a few are exact in every dtype."""
    return np.random.default_rng(seed).integers(0, 4, shape).astype(dtype)


def shards(world, shape, dim, dtype="float64", seed=0):
    """A tensor for every rank. Rank r has r % 3 more rows along `dim` than `shape`."""
    given = []
    for rank in range(world.size):
        rows = list(shape)
        rows[dim] += rank % 3
        given.append(whole([seed, rank], rows, dtype))
    return given


def one_per_rank(world, shape, dtype="float64", seed=0):
    return [whole([seed, rank], shape, dtype) for rank in range(world.size)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((2,), 0), ((2, 3), 0), ((3, 2), 1), ((3, 2), -1), ((2, 3, 4), 0), ((3, 1, 4), 1), ((2, 3, 0), -1)],
)
def test_all_gather(world, shape, dim, dtype):
    """y = concatenate([x of rank 0, x of rank 1, ...], dim)"""
    x = shards(world, shape, dim, dtype)
    y = fompi.all_gather(x[world.rank], dim=dim, comm=world)
    np.testing.assert_array_equal(y, np.concatenate(x, dim), strict=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "dim"), [((7,), 0), ((5, 3), 0), ((3, 10), 1), ((2, 9, 4), 1), ((2, 3, 8), -1), ((0, 3), 0), ((1, 2), 0)]
)
def test_reduce_scatter(world, shape, dim, dtype):
    """y = sum(x of all ranks)[rows of this rank], with even rows, and with all rows on the last rank."""
    x = one_per_rank(world, shape, dtype)
    total = sum(x[1:], x[0])
    rows = shape[dim]
    for counts in (None, [0] * (world.size - 1) + [rows]):
        y = fompi.reduce_scatter(x[world.rank], dim=dim, counts=counts, comm=world)
        ends = np.cumsum(counts or split(rows, world.size))
        np.testing.assert_array_equal(y, np.split(total, ends[:-1], dim)[world.rank], strict=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (5,), (3, 2), (2, 0, 3), (2, 3, 5)])
def test_all_reduce_and_broadcast_of_any_shape(world, shape, dtype):
    """y = sum(x of all ranks); y = x of rank `root`"""
    x = one_per_rank(world, shape, dtype)
    total = np.asarray(sum(x[1:], x[0]))
    for schedule in ("auto", "ring"):
        y = fompi.all_reduce(x[world.rank], comm=world, schedule=schedule)
        np.testing.assert_array_equal(y, total, strict=True)
        for root in {0, world.size - 1}:
            y = fompi.broadcast(x[world.rank], root=root, comm=world, schedule=schedule)
            np.testing.assert_array_equal(y, x[root], strict=True)


@pytest.mark.parametrize(("shape", "dim"), [((), 0), ((3,), 0), ((3, 2), 0), ((3,), 1)])
def test_all_to_all(world, shape, dim):
    """y = concatenate([rows of rank 0 for this rank, ...], dim), with different counts on every rank."""
    sizes = np.random.default_rng(5).integers(0, 4, (world.size, world.size))
    shape = list(shape)
    x = []
    for rank, counts in enumerate(sizes):
        x.append(whole(rank, [*shape[:dim], counts.sum(), *shape[dim:]]))
    pieces = [np.split(x[r], np.cumsum(sizes[r])[:-1], dim)[world.rank] for r in range(world.size)]
    y = fompi.all_to_all(x[world.rank], dim=dim, counts=sizes[world.rank], comm=world)
    np.testing.assert_array_equal(y, np.concatenate(pieces, dim), strict=True)


@pytest.mark.parametrize(("split_dim", "concat_dim"), [(1, 0), (0, 1), (-1, 1), (1, -1)])
def test_all_to_all_of_two_dimensions(world, split_dim, concat_dim):
    """y = concatenate([part of rank 0 for this rank, ...], concat_dim): uneven in both dimensions, and back."""
    x = []
    for r in range(world.size):
        shape = [5, 6, 7]
        shape[concat_dim] = r % 3  # the first rank has nothing
        x.append(whole(r, shape))
    counts = [x[0].shape[split_dim] - world.size + 1, *(1,) * (world.size - 1)]
    pieces = [np.split(a, np.cumsum(counts)[:-1], split_dim)[world.rank] for a in x]
    how = {"split_dim": split_dim, "concat_dim": concat_dim, "counts": counts, "comm": world}
    pending = fompi.all_to_all.start(x[world.rank], **how)
    np.testing.assert_array_equal(pending.part(world.size - 1), pieces[-1])
    y = pending.wait()
    np.testing.assert_array_equal(y, np.concatenate(pieces, concat_dim), strict=True)
    assert pending.counts == tuple(a.shape[concat_dim] for a in x)
    assert sum(event.name.startswith("pack(") for event in pending.trace.events) == world.size
    back = {"split_dim": concat_dim, "concat_dim": split_dim, "counts": pending.counts, "comm": world}
    np.testing.assert_array_equal(fompi.all_to_all(y, **back), x[world.rank], strict=True)


def test_all_to_all_of_two_dimensions_as_other_calls(world):
    """Two equal dimensions are `dim`. `out` is written. All ranks give the same counts."""
    x = whole(world.rank, (world.size, 3))
    y = fompi.all_to_all(x, split_dim=-2, concat_dim=0, comm=world)
    np.testing.assert_array_equal(y, fompi.all_to_all(x, comm=world))
    how = {"split_dim": 1, "concat_dim": 0, "comm": world}
    counts = [3] + [0] * (world.size - 1)
    out = np.empty((world.size**2, counts[world.rank]))
    assert fompi.all_to_all(x, counts=counts, out=out, **how) is out
    if world.rank == 0:
        np.testing.assert_array_equal(out, np.concatenate([whole(r, x.shape) for r in range(world.size)]))
    if world.size > 1:
        with pytest.raises(fompi.MismatchError, match="columns"):
            fompi.all_to_all(x, counts=counts if world.rank else counts[::-1], **how)
    with pytest.raises(fompi.LayoutError, match="both split_dim and concat_dim"):
        fompi.all_to_all(x, split_dim=1, comm=world)


def test_all_to_all_of_equal_parts(world):
    x = np.arange(2 * world.size) + 100 * world.rank
    y = fompi.all_to_all(x, comm=world)
    np.testing.assert_array_equal(y.reshape(-1, 2)[:, 0], 100 * np.arange(world.size) + 2 * world.rank)


def test_fused_operations_along_another_dim(world):
    """The batch is the first dimension, and rows are the second one, as in attention."""
    rank, k, n = world.rank, 3, 5
    x, w, b = shards(world, (2, 1, k), 1), one_per_rank(world, (k, n), seed=1), one_per_rank(world, (n,), seed=2)
    full = np.concatenate(x, 1)
    y = fompi.all_gather_matmul(x[rank], w[rank], bias=b[rank], dim=1, comm=world)
    np.testing.assert_array_equal(y, full @ w[rank] + b[rank], strict=True)

    kept, (first, second) = fompi.all_gather_matmul_many(
        x[rank], (w[rank], w[rank][:, :2]), biases=(b[rank], None), dim=1, comm=world
    )
    np.testing.assert_array_equal(kept, full, strict=True)
    np.testing.assert_array_equal(first, y, strict=True)
    np.testing.assert_array_equal(second, full @ w[rank][:, :2], strict=True)

    h = whole(rank, (2, full.shape[1], 4))
    g = fompi.all_gather_weight_gradient(x[rank], h, dim=1, comm=world)
    np.testing.assert_array_equal(g, np.einsum("btk,btn->kn", full, h), strict=True)

    y, g = fompi.all_gather_matmul_weight_gradient(x[rank], w[rank], h, dim=1, comm=world)
    np.testing.assert_array_equal(y, full @ w[rank], strict=True)
    np.testing.assert_array_equal(g, np.einsum("btk,btn->kn", h, full), strict=True)

    z = one_per_rank(world, (2, 6, k), seed=3)
    total = sum(a @ v for a, v in zip(z, w, strict=True))
    ends = np.cumsum(split(6, world.size))[:-1]
    y = fompi.matmul_reduce_scatter(z[rank], w[rank], bias=b[0], dim=1, comm=world)
    np.testing.assert_array_equal(y, np.split(total, ends, 1)[rank] + b[0], strict=True)
    y = fompi.matmul_all_reduce(z[rank], w[rank], bias=b[0], dim=1, comm=world)
    np.testing.assert_array_equal(y, total + b[0], strict=True)
    y = fompi.matmul_all_to_all(z[rank], w[rank], bias=b[rank], dim=1, comm=world)
    parts = [np.split(a @ v + c, ends, 1)[rank] for a, v, c in zip(z, w, b, strict=True)]
    np.testing.assert_array_equal(y, np.concatenate(parts, 1), strict=True)
    arrived = np.concatenate([np.split(a, ends, 1)[rank] for a in z], 1)
    y = fompi.all_to_all_matmul(z[rank], w[rank], bias=b[rank], dim=1, comm=world)
    np.testing.assert_array_equal(y, arrived @ w[rank] + b[rank], strict=True)


def transposed(a):
    return np.ascontiguousarray(a.T).T


def every_other_column(a):
    return calls.with_gaps(a)


def backwards(a):
    return np.ascontiguousarray(a[::-1, ::-1])[::-1, ::-1]


@pytest.mark.parametrize("view", [transposed, every_other_column, backwards])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64"])
def test_weights_with_any_strides(world, view, dtype):
    x, w = one_per_rank(world, (4, 3), dtype), view(whole(world.rank, (3, 5), dtype))
    assert not w.flags.c_contiguous
    y = fompi.all_gather_matmul(x[world.rank], w, comm=world)
    np.testing.assert_array_equal(y, np.concatenate(x) @ w, strict=True)
    total = sum(a @ whole(rank, (3, 5), dtype) for rank, a in enumerate(x))
    np.testing.assert_array_equal(fompi.matmul_all_reduce(x[world.rank], w, comm=world), total, strict=True)


@pytest.mark.parametrize("view", [transposed, every_other_column, backwards])
@pytest.mark.parametrize("schedule", ["auto", "ring", "unfused"])
def test_strided_inputs_are_packed_and_the_trace_shows_it(world, view, schedule):
    rank = world.rank
    x = one_per_rank(world, (world.size + 2, 4))
    strided = view(x[rank])
    options = {"comm": world, "schedule": schedule}
    for operation, wanted in (
        (fompi.all_gather, np.concatenate(x)),
        (fompi.reduce_scatter, np.split(sum(x), np.cumsum(split(world.size + 2, world.size))[:-1])[rank]),
        (fompi.all_reduce, sum(x)),
        (fompi.broadcast, x[0]),
    ):
        pending = operation.start(strided, **options)
        np.testing.assert_array_equal(pending.wait(), wanted, strict=True)
        if operation is not fompi.broadcast or rank == 0:  # only the root's x is read
            assert any(event.name.startswith("pack(") for event in pending.trace.events), operation
        dense = operation.start(x[rank], **options)
        np.testing.assert_array_equal(dense.wait(), wanted, strict=True)
        assert not any(event.name.startswith("pack(") for event in dense.trace.events)


def test_a_strided_x_is_multiplied_without_packing(world):
    x = one_per_rank(world, (world.size, 2, 3))
    for strided in (
        every_other_column(x[world.rank]),
        np.ascontiguousarray(x[world.rank].swapaxes(0, 1)).swapaxes(0, 1),
    ):
        pending = fompi.matmul_all_reduce.start(strided, np.eye(3), comm=world)
        np.testing.assert_array_equal(pending.wait(), sum(x))
        assert not any("pack" in event.name for event in pending.trace.events)


def test_only_some_ranks_have_a_strided_input(world):
    """Each rank packs its own input. The plans of the other ranks stay the same."""
    x = one_per_rank(world, (3, 4))
    mine = transposed(x[world.rank]) if world.rank % 2 else x[world.rank]
    np.testing.assert_array_equal(fompi.all_gather(mine, comm=world), np.concatenate(x))
    np.testing.assert_array_equal(fompi.all_reduce(mine, comm=world), sum(x))


def test_read_only_inputs(world):
    x = whole(world.rank, (4, 3))
    x.flags.writeable = False
    total = sum(whole(rank, (4, 3)) for rank in range(world.size))
    np.testing.assert_array_equal(fompi.all_reduce(x, comm=world), total)
    assert fompi.all_gather(x, comm=world).flags.writeable


def test_out_is_filled_and_returned(world):
    rank, size = world.rank, world.size
    x, w = one_per_rank(world, (size, 3)), one_per_rank(world, (3, 2), seed=1)
    full, total = np.concatenate(x), sum(x)
    products = sum(a @ v for a, v in zip(x, w, strict=True))
    counts = split(size, size)
    arrived = np.stack([a[rank] for a in x])
    h = whole(0, (size * size, 2))
    cases = [
        (fompi.all_gather, (x[rank],), {}, full),
        (fompi.reduce_scatter, (x[rank],), {"counts": counts}, total[[rank]]),
        (fompi.all_reduce, (x[rank],), {}, total),
        (fompi.all_to_all, (x[rank],), {}, arrived),
        (fompi.broadcast, (x[rank],), {}, x[0]),
        (fompi.all_gather_matmul, (x[rank], w[rank]), {}, full @ w[rank]),
        (fompi.matmul_reduce_scatter, (x[rank], w[rank]), {}, products[[rank]]),
        (fompi.matmul_all_reduce, (x[rank], w[rank]), {}, products),
        (fompi.matmul_all_to_all, (x[rank], w[rank]), {}, np.stack([(a @ v)[rank] for a, v in zip(x, w, strict=True)])),
        (fompi.all_to_all_matmul, (x[rank], w[rank]), {}, arrived @ w[rank]),
        (fompi.all_gather_weight_gradient, (x[rank], h), {}, full.T @ h),
        (fompi.all_to_all_weight_gradient, (x[rank], h[:size]), {}, arrived.T @ h[:size]),
    ]
    for operation, given, options, wanted in cases:
        out = np.full(wanted.shape, 99.0)
        assert operation(*given, **options, out=out, comm=world) is out
        np.testing.assert_array_equal(out, wanted, err_msg=operation.name)


def test_out_along_another_dim(world):
    """Rows of the second dimension are contiguous if the batch is 1."""
    x = one_per_rank(world, (1, 2, 3))
    out = np.empty((1, 2 * world.size, 3))
    assert fompi.all_gather(x[world.rank], dim=1, out=out, comm=world) is out
    np.testing.assert_array_equal(out, np.concatenate(x, 1))


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_sums_of_half_types_round_once(world, dtype):
    """256 on one rank and 1 on the others: with rounding after each addition the ones would be lost."""
    x = np.full((3, 4), 256.0 if world.rank == 0 else 1.0).astype(dtype)
    exact = np.array(256.0 + (world.size - 1)).astype(dtype)
    for schedule in ("auto", "ring", "direct"):
        y = fompi.all_reduce(x, comm=world, schedule=schedule)
        assert y.dtype == np.dtype(dtype) and (y == exact).all()


def test_results_have_memory_of_their_own(world):
    """A result is not overwritten by later calls while the program holds it."""
    results = [fompi.all_reduce(np.full(100, float(i)), comm=world) for i in range(20)]
    for i, y in enumerate(results):
        assert (y == i * world.size).all()
    large = fompi.all_reduce(np.ones(4096), comm=world)
    assert large.ctypes.data % 64 == 0
