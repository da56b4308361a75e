"""An embedding and a cross-entropy whose vocabulary is spread over the ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fompi.backends.numbers import filled, narrow, ordered_product, place, widen
from fompi.base.differences import detail
from fompi.base.errors import LayoutError, ShapeError
from fompi.base.layout import accumulator, integer, number
from fompi.engine.communicator import Communicator
from fompi.ops.operations import all_gather, all_reduce, reduce_scatter
from fompi.parallel.arrays import (
    Array,
    Kept,
    arrived,
    as_rows,
    borrow,
    borrow_integers,
    call,
    check_leaves,
    enter,
    enter_backward,
    give,
    lent,
    over_losses,
    start_sum,
    zeros,
)
from fompi.parallel.differentiable import Differentiable, Gradients
from fompi.plans.rows import counts_of
from fompi.tensors.dlpack import Tensor


def _vocab_parallel_embedding(
    tokens: Any, table: Any, *, comm: Any = None, sequence_parallel: bool = True, counts: Sequence[int] | None = None
) -> tuple[Any, Kept]:
    """y = reduce_scatter(all rows of the table [tokens], counts)

    tokens: (all rows, ...), integers, the same on all ranks. table: (rows of this rank, n): each rank has a part of the
    vocabulary, in the order of the ranks, of any size. y: (rows of this rank, ..., n), Shard(0). `counts` is the number
    of rows that each rank keeps, by default as even as possible. With `sequence_parallel=False` y has all rows.
    An `order` is that of the sums of gradients over the ranks. The forward adds zeros to one row: all numbers of ranks
    have the same bits.

    Only the table has a gradient. Raises LayoutError for tokens that are not in the vocabulary. On a device, where the
    host does not read tokens, y is NaN for them.
    """

    def check(comm: Communicator) -> tuple[str, int, tuple[Array, Tensor, list[int]]]:
        tt = borrow(table, "table", None, 2)
        numbers = borrow_integers(tokens, "tokens", tt)
        if not numbers.ndim:
            raise ShapeError("tokens has no dimension: it must be (rows, ...)")
        if counts is not None and not sequence_parallel:
            raise LayoutError("counts= is for sequence_parallel=True: without it, every rank keeps all rows")
        check_leaves(comm, 0, False)
        rows = len(numbers)
        kept = list(counts_of("vocab_parallel_embedding", counts, rows, comm.size, "the rows"))
        text = f"{tt.dtype}, {_checksum('tokens', numbers)}, n={tt.array.shape[1]}, rows {kept}"
        text += f", {sequence_parallel=}"
        return text, len(tt.array), (numbers, tt, kept)

    group, (numbers, tt, kept), parts = enter("vocab_parallel_embedding", comm, check)
    total, table = sum(parts), tt.array
    if place(table) is None:
        _check_vocabulary("token", numbers, total, group)
    local, ours = _ours(numbers, parts, group.rank)
    if len(table):
        y = np.where(ours[..., None], table[local], table.dtype.type(0))
    else:
        y = zeros(group, (*numbers.shape, table.shape[1]), table.dtype, table)
    if place(table) is not None and group.rank == 0:
        wrong = (numbers < 0) | (numbers >= total)
        y = np.where(wrong[..., None], narrow(filled((1,), accumulator(tt.dtype), np.nan, table), tt.dtype), y)
    if sequence_parallel:
        y = call(reduce_scatter, y, counts=kept, dtype=tt.dtype, comm=group.using(order="any"))
    else:
        y = arrived(start_sum(y, tt.dtype, group.using(order="any")))
    saved = Kept(tt, y.shape, local=local, ours=ours, comm=group, sequence_parallel=sequence_parallel)
    return lent(y, tt), saved


def _ours(numbers: Array, parts: Sequence[int], rank: int) -> tuple[Array, Array]:
    """The number of each entry in the part of this rank, 0 for the entries of other ranks; which ones are its own."""
    local = numbers.astype(np.int64) - sum(parts[:rank])
    ours = (local >= 0) & (local < parts[rank])
    return np.where(ours, local, np.int64(0)), ours


def _embedding_backward(saved: Kept, dy: Any) -> Gradients:
    given = enter_backward("vocab_parallel_embedding", saved, dy)
    if saved.sequence_parallel:
        full = call(all_gather, given, **saved.keywords)
    else:
        full = arrived(start_sum(given, saved.dtype, over_losses(saved.comm)))
    wide = widen(full, saved.dtype)
    gradient = zeros(saved.comm, saved.x.array.shape, wide.dtype, wide)
    if len(gradient):
        np.add.at(gradient, saved.local, np.where(saved.ours[..., None], wide, wide.dtype.type(0)))
    return (give(gradient, saved.x),)


def _checksum(name: str, numbers: Array) -> str:
    """The shape of integers, and a checksum: the same on all ranks, in any integer dtype. The host reads no device."""
    if place(numbers) is not None:
        return f"{name} {numbers.shape} on a device"
    checksum = zlib.crc32(np.ascontiguousarray(numbers, np.int64).data)
    return f"{name} {numbers.shape}{detail(f'the {name}', '', checksum)}"


def _check_vocabulary(what: str, numbers: Array, total: int, comm: Communicator) -> None:
    """Raise LayoutError for a token that is not in the vocabulary. The other ranks raise too."""
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < total:
        wrong = int(numbers.min() if numbers.min() < 0 else numbers.max())
        error = LayoutError(f"{what} {wrong} is not in the vocabulary, which has {total} entries on all ranks together")
        all_reduce.refuse(error, comm)


def _vocab_parallel_cross_entropy(
    logits: Any, targets: Any, *, comm: Any = None, label_smoothing: float = 0.0, ignore_index: int = -100
) -> tuple[Any, Kept]:
    """losses = -log(softmax(all logits of a row))[target], for each row; 0 where target == ignore_index

    logits: (all rows, ..., vocabulary of this rank), Shard(-1). targets: (all rows, ...), integers, the same on all
    ranks. losses: (all rows, ...), Replicate; float32 for half types. `label_smoothing` and `ignore_index` are as in
    torch with reduction="none": a row that is ignored has no gradient. For a mean, divide by the rows that count.
    With order=Canonical(k) sums have k leaves of the vocabulary of all ranks. There is no wire: all travels as it is.

    Gradients are those of the sum of the losses of all ranks. A loss that all ranks compute alike counts once per rank:
    divide it by `comm.size`. Raises LayoutError for targets that are not in the vocabulary. On a device, where the host
    does not read targets, the loss of such a row is NaN.
    """

    def check(comm: Communicator) -> tuple[str, int, tuple[Tensor, Array, int]]:
        tl = borrow(logits, "logits")
        numbers = borrow_integers(targets, "targets", tl)
        if tl.array.ndim < 2 or tl.array.shape[:-1] != numbers.shape:
            raise ShapeError(
                f"logits {tl.array.shape} need targets of the shape {tl.array.shape[:-1]}, not {numbers.shape}"
            )
        smoothing = number(label_smoothing)
        if smoothing is None or not 0 <= smoothing <= 1:
            raise LayoutError(f"label_smoothing={label_smoothing!r} must be a number from 0 to 1")
        if integer(ignore_index) is None:
            raise LayoutError(f"ignore_index={ignore_index!r} must be an integer")
        leaves = check_leaves(comm, tl.array.shape[-1], True)
        text = f"{tl.dtype}, {_checksum('targets', numbers)}, {label_smoothing=}, {ignore_index=}"
        return text, tl.array.shape[-1], (tl, numbers, leaves)

    group, (tl, numbers, leaves), parts = enter("vocab_parallel_cross_entropy", comm, check)
    vocabulary, dtype = sum(parts), accumulator(tl.dtype)
    numbers = numbers.reshape(-1)
    kept = numbers != ignore_index
    if place(tl.array) is None:
        _check_vocabulary("target", numbers[kept], vocabulary, group)
    z = as_rows(widen(tl.array, tl.dtype))
    top = z.max(1) if z.shape[1] else filled(len(z), z.dtype, -np.inf, z)
    top = call(all_gather, top[None], dtype=dtype, comm=group).max(0)
    z = z - top[:, None]
    e = np.exp(z)
    local, ours = _ours(numbers, parts, group.rank)
    ours = ours & kept
    terms = zeros(group, (3, len(z)), dtype, z)
    terms[0] = _sum_of_features(e, leaves)
    if z.shape[1]:
        terms[1] = np.where(ours, np.take_along_axis(z, local[:, None], 1)[:, 0], z.dtype.type(0))
    if label_smoothing:
        terms[2] = _sum_of_features(z, leaves)
    total, chosen, sums = arrived(start_sum(terms, dtype, group))
    losses = np.log(total) - (1 - label_smoothing) * chosen - label_smoothing / max(vocabulary, 1) * sums
    losses = np.where(kept, losses, losses.dtype.type(0))
    if place(z) is not None:
        losses = np.where(kept & ((numbers < 0) | (numbers >= vocabulary)), losses.dtype.type(np.nan), losses)
    shape = tl.array.shape[:-1]
    of_row = {"probabilities": e / total[:, None], "local": local, "ours": ours, "kept": kept}
    saved = Kept(tl, shape, dtype, **of_row, smoothing=label_smoothing, vocabulary=vocabulary, comm=group)
    return lent(losses.astype(dtype, copy=False).reshape(shape), tl, dtype), saved


def _sum_of_features(a: Array, leaves: int) -> Array:
    """a.sum(1) of a matrix; with leaves in their order."""
    if not leaves:
        return a.sum(1)
    return ordered_product(a, filled((a.shape[1], 1), a.dtype, 1, a), a.dtype.name, leaves)[:, 0]


def _cross_entropy_backward(saved: Kept, dlosses: Any) -> Gradients:
    given = enter_backward("vocab_parallel_cross_entropy", saved, dlosses)
    summed = arrived(start_sum(given, saved.dtype, over_losses(saved.comm))).reshape(-1, 1)
    d = saved.probabilities - saved.probabilities.dtype.type(saved.smoothing / max(saved.vocabulary, 1))
    if d.shape[1]:
        at = saved.local[:, None]
        chosen = np.take_along_axis(d, at, 1)
        np.put_along_axis(d, at, np.where(saved.ours[:, None], chosen - d.dtype.type(1 - saved.smoothing), chosen), 1)
    d *= summed
    d = np.where(saved.kept[:, None], d, d.dtype.type(0))
    return (give(d.reshape(saved.x.array.shape), saved.x),)


vocab_parallel_embedding = Differentiable(
    _vocab_parallel_embedding, _embedding_backward, tensors=("table",), inputs=0, takes=("wire", "order")
)
vocab_parallel_cross_entropy = Differentiable(
    _vocab_parallel_cross_entropy, _cross_entropy_backward, tensors=("logits",), inputs=1, takes=("order",)
)
