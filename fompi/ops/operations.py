"""The public operations. The docstring of each one opens with its meaning as code.

In that code, `xs[r]` is x of rank r, `rank` and `size` are those of this rank, `split(x, counts, dim)` cuts x into
pieces, `empty(x, dim)` has no rows, `matrix(x)` has all dimensions but the last as one, and the other names are NumPy's
or those of operations. A test runs it (tests/mpi/test_docstrings.py).

What all operations have in common:

- The rows of a tensor are its entries along `dim`, by default 0. Rows are distributed over the ranks of `comm`.
- `comm` is a Communicator, an axis of a Mesh, an MPI.Comm, or None for all ranks.
- `schedule` and `slices` say how the operation is carried out (`fompi.schedules`). "auto" chooses.
- `order="ranks"` adds the terms of the ranks in one fixed binary tree, whatever the schedule, the slices, the MPI
  library and the size of the call. "any" is the order of the schedule. A product itself may be rounded in another way
  if it is cut in another way.
- `out` is a contiguous tensor for the result, which is then returned. In `all_reduce` and `broadcast` it may be x,
  which is overwritten while the call is in flight then. If the call fails after it has begun, x is undefined.
- The result is a tensor of the framework of x: NumPy, PyTorch, JAX, or an object with `__dlpack__`.
- A call waits for the result. `pending = fompi.all_gather.start(x)` does not wait.
- All ranks must call the operations of one communicator in the same order, with arguments that match. If they do not,
  all of them raise MismatchError. Calls that are equal cannot be told apart: two threads that make equal calls may swap
  their results. Give each thread a communicator of its own.
- Arguments that one rank refuses raise TensorError, DtypeError, ShapeError, LayoutError or PlanError on that rank, and
  MismatchError on the others. Nothing has been sent then, and `out` is not written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

from fompi.base.call_options import CallKeywords
from fompi.base.errors import LayoutError
from fompi.base.layout import Slices, Spec
from fompi.model.machine import Machine
from fompi.ops.arguments import Arguments
from fompi.ops.operation import Operation
from fompi.planner.choose import plan_for
from fompi.planner.explain import MOST_EVENTS, Explanation
from fompi.planner.explain import explain as explained
from fompi.plans.plan import Plan
from fompi.plans.specs import from_specs
from fompi.plans.verify import verify
from fompi.schedules.registry import REGISTERED

__all__ = [
    "all_gather", "reduce_scatter", "all_reduce", "reduce", "gather", "scatter", "all_to_all", "broadcast",
    "all_gather_matmul", "all_gather_matmul_many", "all_gather_weight_gradient",
    "all_gather_matmul_weight_gradient", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all",
    "all_to_all_matmul", "all_to_all_weight_gradient", "all_to_all_matmul_weight_gradient",
    "matmul_all_to_all_columns", "all_to_all_columns_matmul", "grouped_matmul_all_to_all",
    "all_to_all_grouped_matmul", "all_to_all_grouped_weight_gradient",
    "all_to_all_grouped_matmul_weight_gradient", "plan", "explain",
]  # fmt: skip


@Operation
def all_gather(x: Any, *, dim: int = 0, out: Any = None, **how: Unpack[CallKeywords]) -> Arguments:
    """y = concatenate(xs, dim)

    x has the rows of this rank, Shard(dim). y has the rows of all ranks, Replicate. Any dtype.

    Gradients are those of the sum of the losses of all ranks. A loss that all ranks compute alike, from y, counts once
    per rank: divide it by `comm.size`.
    Ranks may have different numbers of rows, or none, and other numbers at every call.
    Raises ShapeError if x has no dimension `dim`.
    """
    return Arguments(x, dim=dim, out=out)


@Operation
def reduce_scatter(
    x: Any,
    *,
    op: str = "sum",
    dim: int = 0,
    counts: Sequence[int] | None = None,
    out: Any = None,
    **how: Unpack[CallKeywords],
) -> Arguments:
    """y = split(sum(xs), counts, dim)[rank]

    x has all rows on every rank, Partial. y has the rows of this rank, Shard(dim). Any dtype but bool.

    `op` is "sum", "max", "min", "prod" or "mean", as in `all_reduce`. `counts` is the number of rows that each rank
    keeps, the same list on all ranks. By default it is as even as possible. Half types are summed in float32 and
    rounded once.
    Raises LayoutError for `counts` that do not add up to the rows of x, and DtypeError for bool.
    """
    return Arguments(x, op=op, dim=dim, counts=counts, out=out)


@Operation
def all_reduce(x: Any, *, op: str = "sum", out: Any = None, **how: Unpack[CallKeywords]) -> Arguments:
    """y = sum(xs)

    x has any shape, the same on all ranks, Partial. y has the shape of x, Replicate. Any dtype but bool.

    `op` is "sum", "max", "min", "prod" or "mean". A mean is the sum divided by the number of ranks; integers have none.
    Maximum and minimum are NaN where a rank has NaN. For bool they are any and all. Complex numbers have neither. Their
    gradient goes to the elements that are equal to the result, in equal parts. A product has no gradient.

    Gradients are those of the sum of the losses of all ranks. A loss that all ranks compute alike, from y, counts once
    per rank: divide it by `comm.size`. For gradients of replicated parameters: `fompi.sum_replicated`.
    All ranks get the same bits in every run, unless the MPI library sums (schedules "unfused" and "sliced"). Half
    types are summed in float32 and rounded once.
    Raises DtypeError for a dtype that has no such reduction, and LayoutError for another `op`.
    """
    return Arguments(x, op=op, out=out)


@Operation
def reduce(x: Any, *, root: int = 0, op: str = "sum", out: Any = None, **how: Unpack[CallKeywords]) -> Arguments:
    """y = sum(xs) if rank == root else empty(x, 0)

    x has any shape, the same on all ranks, Partial. On the root y has the shape of x. On the other ranks y has no rows:
    its shape is `(0, *x.shape[1:])`. dtypes and `op` are those of `all_reduce`.

    `out` must have the shape of y, so on the root only it may be x.
    Raises DtypeError for a dtype that has no such reduction, and LayoutError for another `op` or `root`.
    """
    return Arguments(x, op=op, root=root, out=out)


@Operation
def gather(x: Any, *, root: int = 0, dim: int = 0, out: Any = None, **how: Unpack[CallKeywords]) -> Arguments:
    """y = concatenate(xs, dim) if rank == root else empty(x, dim)

    x has the rows of this rank, Shard(dim). On the root y has the rows of all ranks, on the other ranks none. Any
    dtype.

    Ranks may have different numbers of rows, or none, and other numbers at every call.
    Raises ShapeError if x has no dimension `dim`, and LayoutError if `root` is not a rank.
    """
    return Arguments(x, root=root, dim=dim, out=out)


@Operation
def scatter(
    x: Any,
    *,
    root: int = 0,
    dim: int = 0,
    counts: Sequence[int] | None = None,
    out: Any = None,
    **how: Unpack[CallKeywords],
) -> Arguments:
    """y = split(xs[root], counts, dim)[rank]

    x has the rows for rank 0, then those for rank 1, and so on, on the root. On the other ranks x gives only the dtype
    and the shape of a row: it may be empty. y has the rows of this rank, Shard(dim). Any dtype.

    `counts` is the number of rows for each rank. By default it is as even as possible. Only that of the root is read.
    Raises LayoutError for `counts` that do not add up to the rows of x, and if `root` is not a rank.
    """
    return Arguments(x, root=root, dim=dim, counts=counts, out=out)


@Operation
def all_to_all(
    x: Any,
    *,
    dim: int = 0,
    split_dim: int | None = None,
    concat_dim: int | None = None,
    counts: Sequence[int] | None = None,
    out: Any = None,
    **how: Unpack[CallKeywords],
) -> Arguments:
    """y = concatenate([split(xs[r], counts_of[r], split_dim)[rank] for r in range(size)], concat_dim)

    `split_dim` is the dimension of x that is split into parts, one for each rank. `dim` is a word for both.
    `counts_of[r]` is `counts` of rank r.

    - The same dimension for both: x has the rows for rank 0, then those for rank 1, and so on, Shard(dim). y has the
      rows that arrive here, Shard(dim). `counts` is the number of rows for each rank. It may differ between ranks and
      between calls; the ranks exchange it before the rows.
    - Two dimensions: x is Shard(concat_dim), y is Shard(split_dim). For example the heads of some tokens become the
      tokens of some heads (Ulysses, arXiv 2309.14509). `counts` says how much of `split_dim` each rank gets, the same
      list on all ranks. Ranks may have different sizes of `concat_dim`. What a rank gets is packed before it is sent.

    By default `counts` is as even as possible. Any dtype.
    Raises LayoutError for `counts` that do not add up, and ShapeError if x has no such dimensions.
    """
    if (split_dim is None) != (concat_dim is None) or (dim != 0 and split_dim is not None):
        raise LayoutError("all_to_all takes dim, or both split_dim and concat_dim")
    return Arguments(x, dim=dim if concat_dim is None else concat_dim, split_dim=split_dim, counts=counts, out=out)


@Operation
def broadcast(x: Any, *, root: int = 0, out: Any = None, **how: Unpack[CallKeywords]) -> Arguments:
    """y = xs[root]

    x has any shape and dtype, the same on all ranks; only x of the root is read. y has the shape of x, Replicate.

    Gradients are those of the sum of the losses of all ranks. A loss that all ranks compute alike, from y, counts once
    per rank: divide it by `comm.size`.
    Raises LayoutError if `root` is not a rank.
    """
    return Arguments(x, root=root, out=out)


@Operation
def all_gather_matmul(
    x: Any, w: Any, *, bias: Any = None, dim: int = 0, out: Any = None, **how: Unpack[CallKeywords]
) -> Arguments:
    """y = all_gather(x, dim) @ w + bias

    x: (rows of this rank, ..., k), Shard(dim). w: (k, n), the columns of this rank, Shard(-1). bias: (n,) or None.
    y: (rows of all ranks, ..., n), Shard(-1). Any dtype but bool, the same for all tensors.

    The rows of this rank are multiplied first, while the other rows arrive (CommFuse, arXiv 2604.24013).
    Raises ShapeError for shapes that do not fit and for `dim` = -1, and DtypeError for different dtypes.
    """
    return Arguments(x, [w], [bias], dim=dim, out=out)


@Operation
def all_gather_matmul_many(
    x: Any, ws: Iterable[Any], *, biases: Iterable[Any] | None = None, dim: int = 0, **how: Unpack[CallKeywords]
) -> Arguments:
    """x_full = all_gather(x, dim); return x_full, tuple(x_full @ w + b for w, b in zip(ws, biases))

    x: (rows of this rank, ..., k), Shard(dim). Each w: (k, n), Shard(-1); the n may differ. Each bias: (n,) or None.
    x_full: (rows of all ranks, ..., k), Replicate. Each product: (rows of all ranks, ..., n), Shard(-1). Any dtype but
    bool, the same for all tensors.

    One gather serves several weights, for example those of queries, keys and values.
    Raises ShapeError for shapes that do not fit, and DtypeError for different dtypes.
    """
    weights = list(ws)
    count = len(weights)

    def result(outputs: dict[str, Any]) -> Any:
        names = ["y"] if count == 1 else [f"y{i}" for i in range(count)]
        return outputs["x_full"], tuple(outputs[name] for name in names)

    return Arguments(x, weights, list(biases or ()), dim=dim, keep=True, result=result)


@Operation
def all_gather_weight_gradient(
    x: Any, h: Any, *, dim: int = 0, out: Any = None, **how: Unpack[CallKeywords]
) -> Arguments:
    """g = matrix(all_gather(x, dim)).T @ matrix(h)

    x: (rows of this rank, ..., k), Shard(dim). h: (rows of all ranks, ..., n), Shard(-1). g: (k, n), Shard(-1). Any
    dtype but bool, the same for all tensors.

    It is the gradient of the weight of `all_gather_matmul`, where h is the gradient of y.
    Raises ShapeError on all ranks if h does not have as many rows as all ranks together.
    """
    return Arguments(x, operands=[h], dim=dim, out=out, result=_gradient)


@Operation
def all_gather_matmul_weight_gradient(
    d: Any, w: Any, h: Any, *, dim: int = 0, **how: Unpack[CallKeywords]
) -> Arguments:
    """full = all_gather(d, dim); return full @ w, matrix(h).T @ matrix(full)

    d: (rows of this rank, ..., n), Shard(dim). w: (n, k), Shard(-1). h: (rows of all ranks, ..., k), Shard(-1).
    Results: (rows of all ranks, ..., k), Shard(-1), and (k, n), Shard(0). Any dtype but bool, the same for all tensors.

    It is the backward of `matmul_reduce_scatter(x, v)` with one gather: d is the gradient of y, w is v.T, h is x. The
    results are the gradients of x and v.
    Raises ShapeError on all ranks if h does not have as many rows as all ranks together.
    """
    return Arguments(d, [w], operands=[h], dim=dim, flipped=True, result=lambda outputs: (outputs["y"], outputs["g"]))


@Operation
def matmul_reduce_scatter(
    x: Any,
    w: Any,
    *,
    bias: Any = None,
    dim: int = 0,
    counts: Sequence[int] | None = None,
    out: Any = None,
    **how: Unpack[CallKeywords],
) -> Arguments:
    """y = reduce_scatter(x @ w, dim, counts) + bias

    x: (all rows, ..., k), the columns of this rank, Shard(-1). w: (k, n), the rows of this rank, Shard(0). bias: (n,)
    or None. y: (rows of this rank, ..., n), Shard(dim). Any dtype but bool, the same for all tensors.

    `counts` is the number of rows that each rank keeps, the same list on all ranks. By default it is as even as
    possible. The product of the rows of this rank is made last, so no message follows it (CommFuse, arXiv 2604.24013).
    Raises ShapeError for shapes that do not fit, DtypeError for different dtypes, and LayoutError for wrong `counts`.
    """
    return Arguments(x, [w], [bias], dim=dim, counts=counts, out=out)


@Operation
def matmul_all_reduce(
    x: Any, w: Any, *, bias: Any = None, dim: int = 0, out: Any = None, **how: Unpack[CallKeywords]
) -> Arguments:
    """y = all_reduce(x @ w) + bias

    x: (rows, ..., k), the columns of this rank, Shard(-1). w: (k, n), the rows of this rank, Shard(0). bias: (n,), the
    same on all ranks, or None. y: (rows, ..., n), Replicate. Any dtype but bool, the same for all tensors.

    The product is cut along `dim`. Of a batch (1, rows, k), which has one row there, nothing overlaps: give dim=1.

    Gradients are those of the sum of the losses of all ranks. A loss that all ranks compute alike, from y, counts once
    per rank: divide it by `comm.size`. The gradient of the bias has one term per rank: `fompi.sum_replicated`.
    The bias is added once. All ranks get the same bits, unless the MPI library sums.
    Raises ShapeError for shapes that do not fit, and DtypeError for different dtypes.
    """
    return Arguments(x, [w], [bias], dim=dim, out=out)


@Operation
def matmul_all_to_all(
    x: Any,
    w: Any,
    *,
    bias: Any = None,
    dim: int = 0,
    counts: Sequence[int] | None = None,
    out: Any = None,
    **how: Unpack[CallKeywords],
) -> Arguments:
    """y = all_to_all(x @ w + bias, dim, counts)

    x: (rows for rank 0, for rank 1, ...; ..., k), Shard(dim). w: (k, n), a different one on each rank. bias: (n,) or
    None. y: (rows that arrive here, ..., n), Shard(dim). Any dtype but bool, the same for all tensors.

    It is the combine step of a mixture of experts with one expert on each rank. `counts` is the number of rows for each
    rank, by default as even as possible.
    Raises ShapeError for shapes that do not fit, DtypeError for different dtypes, and LayoutError for wrong `counts`.
    """
    return Arguments(x, [w], [bias], dim=dim, counts=counts, out=out)


@Operation
def all_to_all_matmul(
    x: Any,
    w: Any,
    *,
    bias: Any = None,
    dim: int = 0,
    counts: Sequence[int] | None = None,
    out: Any = None,
    **how: Unpack[CallKeywords],
) -> Arguments:
    """y = all_to_all(x, dim, counts) @ w + bias

    x: (rows for rank 0, for rank 1, ...; ..., k), Shard(dim). w: (k, n), a different one on each rank. bias: (n,) or
    None. y: (rows that arrive here, ..., n), Shard(dim). Any dtype but bool, the same for all tensors.

    It is the dispatch step of a mixture of experts with one expert on each rank, and the product of the expert.
    `counts` is the number of rows for each rank, by default as even as possible.
    Raises ShapeError for shapes that do not fit, DtypeError for different dtypes, and LayoutError for wrong `counts`.
    """
    return Arguments(x, [w], [bias], dim=dim, counts=counts, out=out)


@Operation
def all_to_all_weight_gradient(
    x: Any,
    h: Any,
    *,
    dim: int = 0,
    counts: Sequence[int] | None = None,
    out: Any = None,
    **how: Unpack[CallKeywords],
) -> Arguments:
    """g = matrix(all_to_all(x, dim, counts)).T @ matrix(h)

    x: (rows for rank 0, for rank 1, ...; ..., k), Shard(dim). h: (rows that arrive here, ..., n), Shard(dim).
    g: (k, n), a different one on each rank. Any dtype but bool, the same for all tensors.

    It is the gradient of the weight of `all_to_all_matmul`, where h is the gradient of y.
    Raises ShapeError if h does not have as many rows as arrive here.
    """
    return Arguments(x, operands=[h], dim=dim, counts=counts, out=out, result=_gradient)


@Operation
def all_to_all_matmul_weight_gradient(
    d: Any, w: Any, h: Any, *, dim: int = 0, counts: Sequence[int] | None = None, **how: Unpack[CallKeywords]
) -> Arguments:
    """back = all_to_all(d, dim, counts); return back, back @ w, matrix(h).T @ matrix(back)

    d: (rows for rank 0, for rank 1, ...; ..., n), Shard(dim). w: (n, k), a different one on each rank. h: (rows that
    arrive here, ..., k), Shard(dim). Results: (rows that arrive here, ..., n), (rows that arrive here, ..., k), and
    (k, n). Any dtype but bool, the same for all tensors.

    It is the backward of `matmul_all_to_all(x, v)` with one exchange: d is the gradient of y, w is v.T, h is x. The
    results are the gradients of x @ v, x and v.
    Raises ShapeError if h does not have as many rows as arrive here.
    """
    return Arguments(d, [w], operands=[h], dim=dim, counts=counts, flipped=True, keep=True, result=_three)


@Operation
def matmul_all_to_all_columns(
    x: Any,
    w: Any,
    *,
    bias: Any = None,
    columns: Sequence[int] | None = None,
    out: Any = None,
    **how: Unpack[CallKeywords],
) -> Arguments:
    """y = all_to_all(x @ w + bias, split_dim=-1, concat_dim=0, counts=columns)

    x: (rows of this rank, ..., k), Shard(0). w: (k, n), the same on all ranks. bias: (n,) or None. y: (rows of all
    ranks, ..., columns of this rank), Shard(-1). Any dtype but bool, the same for all tensors.

    The columns of the product are dealt to the ranks. `columns` is how many each rank gets, the same list on all ranks.
    By default it is as even as possible. Ranks may have different numbers of rows. It is a projection before the
    attention of Ulysses (arXiv 2309.14509): the columns of one rank travel while those of the next one are computed.
    Raises ShapeError for shapes that do not fit, DtypeError for different dtypes, and LayoutError for wrong `columns`.
    """
    return Arguments(x, [w], [bias], columns=columns, out=out)


@Operation
def all_to_all_columns_matmul(
    x: Any,
    w: Any,
    *,
    bias: Any = None,
    counts: Sequence[int] | None = None,
    columns: Sequence[int] | None = None,
    out: Any = None,
    **how: Unpack[CallKeywords],
) -> Arguments:
    """y = all_to_all(x, split_dim=0, concat_dim=-1, counts=counts) @ w + bias

    x: (rows of all ranks, ..., columns of this rank), Shard(-1). w: (columns of all ranks, n), the same on all ranks.
    bias: (n,) or None. y: (rows of this rank, ..., n), Shard(0). Any dtype but bool, the same for all tensors.

    The rows go back to their owners, and their columns come together: the reverse of `matmul_all_to_all_columns`.
    `counts` is the number of rows for each rank, `columns` the number of columns that each rank has, the same lists on
    all ranks. By default they are as even as possible. It is the projection behind the attention of Ulysses (arXiv
    2309.14509). The product of the own columns is computed while the others arrive; their products are added in
    float32 for half types.
    Raises ShapeError for shapes that do not fit, DtypeError for different dtypes, and LayoutError for wrong `counts` or
    `columns`.
    """
    return Arguments(x, [w], [bias], counts=counts, columns=columns, out=out)


@Operation
def grouped_matmul_all_to_all(
    x: Any,
    w: Any,
    *,
    dim: int = 0,
    counts: Sequence[Any] | None = None,
    experts: int | None = None,
    out: Any = None,
    **how: Unpack[CallKeywords],
) -> Arguments:
    """y = all_to_all(grouped_matmul(x, w, counts, dim), dim, [sum(runs) for runs in counts])

    `grouped_matmul` multiplies each run of rows with the matrix of its expert.
    x: (rows for rank 0, for rank 1, ...; ..., k), Shard(dim): the rows for a rank stand expert by expert, of the
    experts of this rank. w: (experts of this rank, k, n), Shard(0). y: (rows that arrive here, ..., n), Shard(dim):
    rank by rank, in it expert by expert of that rank. Any dtype but bool, the same for both tensors.

    It is the combine step of a mixture of experts. `counts[dest][expert]` is the number of rows that each expert of
    this rank has for rank `dest`, by default as even as possible. Counts may be 0. `experts` is the number of experts
    of all ranks, as even as possible; by default all ranks have as many. There is no bias: add it to the rows.
    Raises ShapeError for shapes that do not fit, DtypeError for different dtypes, and LayoutError for wrong `counts`.
    """
    return Arguments(x, [w], dim=dim, counts=counts, experts=experts, out=out)


@Operation
def all_to_all_grouped_matmul(
    x: Any,
    w: Any,
    *,
    dim: int = 0,
    counts: Sequence[Any] | None = None,
    experts: int | None = None,
    out: Any = None,
    **how: Unpack[CallKeywords],
) -> Arguments:
    """y = grouped_matmul(all_to_all(x, dim, [sum(runs) for runs in counts]), w, arrived, dim)

    `grouped_matmul` multiplies each run of rows with the matrix of its expert, `arrived[source][expert]` rows.
    x: (rows for rank 0, for rank 1, ...; ..., k), Shard(dim): the rows for a rank stand expert by expert, of the
    experts of that rank. w: (experts of this rank, k, n), Shard(0). y: (rows that arrive here, ..., n), Shard(dim):
    rank by rank, in it expert by expert of this rank. Any dtype but bool, the same for both tensors.

    It is the dispatch step of a mixture of experts, with the product of the experts. `counts[dest][expert]` is the
    number of rows for each expert of rank `dest`, by default as even as possible. Counts may be 0.
    `pending.counts[source][expert]` says how many rows have arrived. `experts` is the number of experts of all ranks,
    as even as possible; by default all ranks have as many. There is no bias: add it to the rows.
    Raises ShapeError for shapes that do not fit, DtypeError for different dtypes, and LayoutError for wrong `counts`.
    """
    return Arguments(x, [w], dim=dim, counts=counts, experts=experts, out=out)


@Operation
def all_to_all_grouped_weight_gradient(
    x: Any,
    h: Any,
    *,
    experts: int,
    dim: int = 0,
    counts: Sequence[Any] | None = None,
    out: Any = None,
    **how: Unpack[CallKeywords],
) -> Arguments:
    """g = grouped_gradient(all_to_all(x, dim, [sum(runs) for runs in counts]), h, arrived, dim)

    `grouped_gradient` is matrix(x).T @ matrix(h) of the rows of each expert, `arrived[source][expert]` rows.
    x and `counts` are those of `all_to_all_grouped_matmul`, h is the gradient of its y: (rows that arrive here, ...,
    n), Shard(dim). g: (experts of this rank, k, n), Shard(0), the gradient of its weight. `experts` is the number of
    experts of all ranks. Any dtype but bool, the same for both tensors.
    Raises ShapeError if h does not have as many rows as arrive here.
    """
    return Arguments(x, operands=[h], dim=dim, counts=counts, experts=experts, out=out, result=_gradient)


@Operation
def all_to_all_grouped_matmul_weight_gradient(
    d: Any,
    w: Any,
    h: Any,
    *,
    dim: int = 0,
    counts: Sequence[Any] | None = None,
    experts: int | None = None,
    **how: Unpack[CallKeywords],
) -> Arguments:
    """b = all_to_all(d, dim, sums); return b, grouped_matmul(b, w, arrived), grouped_gradient(h, b, arrived)

    `sums` are the rows for each rank; the others are those of `all_to_all_grouped_weight_gradient`.
    d: (rows for rank 0, for rank 1, ...; ..., n), Shard(dim), in it expert by expert. w: (experts of this rank, n, k),
    Shard(0). h: (rows that arrive here, ..., k), Shard(dim). Results: (rows that arrive here, ..., n), (rows that
    arrive here, ..., k), and (experts of this rank, k, n). Any dtype but bool, the same for all tensors.

    It is the backward of `grouped_matmul_all_to_all(x, v)` with one exchange: d is the gradient of y, w is
    v.transpose(0, 2, 1), h is x. The results are the gradients of the products, of x and of v.
    Raises ShapeError if h does not have as many rows as arrive here.
    """
    rows: dict[str, Any] = {"dim": dim, "counts": counts, "experts": experts}
    return Arguments(d, [w], operands=[h], flipped=True, keep=True, result=_three, **rows)


def _gradient(outputs: dict[str, Any]) -> Any:
    return outputs["g"]


def _three(outputs: dict[str, Any]) -> Any:
    return outputs["x_full"], outputs["y"], outputs["g"]


OPERATIONS = {op.name: op for op in list(globals().values()) if isinstance(op, Operation)}
"""All operations by name."""


def plan(
    operation: Operation | str,
    *specs: Spec,
    ranks: int,
    schedule: str = "auto",
    slices: Slices | None = None,
    window: int | None = None,
    machine: Machine | str | None = None,
    **details: Any,
) -> Plan:
    """The Plan of an operation on global tensors, without MPI and data.

        x, w = Spec((64, 8), "float32", Shard(0)), Spec((8, 12), "float32", Shard(1))
        plan = fompi.plan(fompi.all_gather_matmul, x, w, ranks=4)
        print(plan)  # one column per rank

    `specs` are the global tensors: x, then the weights, then h of a weight gradient. Rows and columns are distributed
    as evenly as possible over `ranks` ranks. `schedule` and `slices` are those of a call. The layout of x says how an
    operation reduces: `Partial("max")`.

    - `window` limits how many sends, or collectives of the MPI library, a rank has in flight.
    - `machine` is a Machine, its name or its file. With it, "auto" chooses the best schedule for that machine.

    The `details`:

    - `bias=True` gives each weight a bias.
    - `root` is the root of a broadcast, gather, scatter or reduce.
    - `packed=True` is for an x that will be strided when the plan runs.
    - `split_dim` is the dimension that an all-to-all splits. In the plan it is the second dimension of x.
    - `experts` is the number of experts of all ranks, for an `all_to_all_grouped_weight_gradient`. Of the other grouped
      operations the weight says it: it has the layout Shard(0) and the shape (experts, k, n).
    - `counts[source][dest][expert]` are the rows that go to each expert. By default they are as even as possible.
    - `wire` is the form in which messages carry elements, as in a call. `plan.roundings` is how often a term of the
      result is rounded at most.
    - `order="ranks"` is the order of sums, as in a call: the plan is proven to add in that tree.

    Raises LayoutError, ShapeError, DtypeError or PlanError.
    """
    at, sizes = from_specs(_name(operation), specs, ranks, **details)
    made = plan_for(at(0), sizes, schedule, slices, window, at, None if machine is None else Machine.of(machine))
    if made.schedule in REGISTERED:
        verify(made)
    return made


def explain(
    operation: Operation | str,
    *specs: Spec,
    ranks: int,
    machine: Machine | str,
    schedules: Sequence[str] = (),
    **details: Any,
) -> Explanation:
    """Which schedule is the best on a machine, and why, without MPI and data.

        explanation = fompi.explain("all_gather_matmul", x, w, ranks=8, machine="h100-nvlink")
        print(explanation)           # every candidate, with its predicted time
        plan = explanation.plan      # the plan of the best one

    For every candidate it shows the time, and how far this is from the lower bound. The best candidates are simulated
    op by op. For these it also shows what is hidden, what stays exposed, and which chunk is waited for.

    `specs`, `ranks` and the `details` are those of `fompi.plan`. `machine` is a Machine, its name or its file.
    `schedules` are the only ones that are compared, besides those without overlap. Raises the same errors as
    `fompi.plan`.
    """
    at, sizes = from_specs(_name(operation), specs, ranks, **details)
    return explained(at(0), sizes, Machine.of(machine), at, events=MOST_EVENTS, schedules=schedules)


def _name(operation: Operation | str) -> str:
    return operation.name if isinstance(operation, Operation) else operation
