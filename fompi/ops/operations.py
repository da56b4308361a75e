"""The public operations: a call is a problem, a cached plan, a run, and a tensor of the caller's framework.

Rows are those of the dimension `dim` (0 unless said), spread over the ranks of `comm`. A tensor comes back in the
framework that x came in. `comm` is a Communicator, an axis of a Mesh, an MPI.Comm, or None for all ranks. All of
them take `schedule` and `slices` (`fompi.schedules`); "auto" chooses.

Each can be called, which waits, or started: `pending = fompi.all_gather.start(x)`. All ranks start the operations of
one communicator in the same order; if they do not, all of them get a MismatchError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fompi.base.layout import Slices, Spec
from fompi.model.machine import Machine
from fompi.ops.arguments import Arguments
from fompi.ops.operation import Operation
from fompi.planner.choose import plan_for
from fompi.planner.explain import MOST_EVENTS, Explanation
from fompi.planner.explain import explain as explained
from fompi.plans import problems
from fompi.plans.plan import Plan
from fompi.plans.verify import verify
from fompi.schedules.registry import REGISTERED


@Operation
def all_gather(x: Any, *, dim: int = 0, out: Any = None) -> Arguments:
    """y = concatenate([x of rank 0, x of rank 1, ...], dim)

    Shard(dim) -> Replicate. x (rows of this rank, ...); the ranks may have different numbers of rows, and others at
    every call. Any dtype.
    """
    return Arguments(x, dim=dim, out=out)


@Operation
def reduce_scatter(x: Any, *, dim: int = 0, counts: Sequence[int] | None = None, out: Any = None) -> Arguments:
    """y = sum(x of all ranks)[rows of this rank]

    Partial -> Shard(dim). x has all rows on every rank; `counts` are the rows that each rank keeps (None: as even as
    can be). Half types are summed in float32 and rounded once.
    """
    return Arguments(x, dim=dim, counts=counts, out=out)


@Operation
def all_reduce(x: Any, *, out: Any = None) -> Arguments:
    """y = sum(x of all ranks)

    Partial -> Replicate, any shape. The same bits on all ranks, and in every run.
    """
    return Arguments(x, out=out)


@Operation
def all_to_all(x: Any, *, dim: int = 0, counts: Sequence[int] | None = None, out: Any = None) -> Arguments:
    """y = concatenate([rows that rank 0 has for us, rows that rank 1 has for us, ...], dim)

    Shard -> Shard. x holds the rows for rank 0, for rank 1, ...; `counts` says how many (None: as even as can be). They
    may be other ones at every call and on every rank; what arrives is known by agreement.
    """
    return Arguments(x, dim=dim, counts=counts, out=out)


@Operation
def broadcast(x: Any, *, root: int = 0, out: Any = None) -> Arguments:
    """y = x of rank `root`

    Every rank gives an x of the same shape and dtype; only that of the root is read.
    """
    return Arguments(x, root=root, out=out)


@Operation
def all_gather_matmul(x: Any, w: Any, *, bias: Any = None, dim: int = 0, out: Any = None) -> Arguments:
    """y = all_gather(x, dim) @ w + bias

    x (rows of this rank, ..., k) Shard(dim), w (k, n) with our columns; y (all rows, ..., n). The product of our own
    rows is made first, while the others arrive. (CommFuse, arXiv 2604.24013.)
    """
    return Arguments(x, [w], [bias], dim=dim, out=out)


@Operation
def all_gather_matmul_many(x: Any, ws: Sequence[Any], *, biases: Sequence[Any] = (), dim: int = 0) -> Arguments:
    """x_full = all_gather(x, dim); return x_full, tuple(x_full @ w + b for w, b in zip(ws, biases))

    One gather for several weights, for example those of queries, keys and values.
    """
    count = len(ws)

    def result(outputs: dict[str, Any]) -> Any:
        names = ["y"] if count == 1 else [f"y{i}" for i in range(count)]
        return outputs["x_full"], tuple(outputs[name] for name in names)

    return Arguments(x, list(ws), list(biases), dim=dim, keep=True, result=result)


@Operation
def all_gather_weight_gradient(x: Any, h: Any, *, dim: int = 0, out: Any = None) -> Arguments:
    """g = all_gather(x, dim).T @ h, summed over all rows

    x (rows of this rank, ..., k), h (all rows, ..., n); g (k, n): the gradient of the weight of `all_gather_matmul`.
    """
    return Arguments(x, operands=[h], dim=dim, out=out, result=lambda outputs: outputs["g"])


@Operation
def all_gather_matmul_weight_gradient(d: Any, w: Any, h: Any, *, dim: int = 0) -> Arguments:
    """full = all_gather(d, dim); return full @ w, h.T @ full

    The backward of `matmul_reduce_scatter` with one gather: d (rows of this rank, ..., n), w (n, k), h (all rows, ...,
    k); the gradients (all rows, ..., k) of its x and (k, n) of its w.
    """
    return Arguments(d, [w], operands=[h], dim=dim, flipped=True, result=lambda outputs: (outputs["y"], outputs["g"]))


@Operation
def matmul_reduce_scatter(
    x: Any, w: Any, *, bias: Any = None, dim: int = 0, counts: Sequence[int] | None = None, out: Any = None
) -> Arguments:
    """y = reduce_scatter(x @ w, dim, counts) + bias

    x (all rows, ..., k) with our columns, w (k, n) with our rows; y (rows of this rank, ..., n). The product of our own
    rows is made last, so that nothing is sent after it. (CommFuse, arXiv 2604.24013.)
    """
    return Arguments(x, [w], [bias], dim=dim, counts=counts, out=out)


@Operation
def matmul_all_reduce(x: Any, w: Any, *, bias: Any = None, dim: int = 0, out: Any = None) -> Arguments:
    """y = all_reduce(x @ w) + bias

    x (rows, ..., k) with our columns, w (k, n) with our rows; y (rows, ..., n) on every rank. A bias, the same on
    all ranks, is added once.
    """
    return Arguments(x, [w], [bias], dim=dim, out=out)


@Operation
def matmul_all_to_all(
    x: Any, w: Any, *, bias: Any = None, dim: int = 0, counts: Sequence[int] | None = None, out: Any = None
) -> Arguments:
    """y = all_to_all(x @ w + bias, dim, counts)

    x (rows for rank 0, for rank 1, ...; ..., k), w (k, n) of this rank: the combine of a mixture of experts.
    """
    return Arguments(x, [w], [bias], dim=dim, counts=counts, out=out)


@Operation
def all_to_all_matmul(
    x: Any, w: Any, *, bias: Any = None, dim: int = 0, counts: Sequence[int] | None = None, out: Any = None
) -> Arguments:
    """y = all_to_all(x, dim, counts) @ w + bias

    x (rows for rank 0, for rank 1, ...; ..., k), w (k, n) of this rank: dispatch to an expert, and its product.
    """
    return Arguments(x, [w], [bias], dim=dim, counts=counts, out=out)


@Operation
def all_to_all_weight_gradient(
    x: Any, h: Any, *, dim: int = 0, counts: Sequence[int] | None = None, out: Any = None
) -> Arguments:
    """g = all_to_all(x, dim, counts).T @ h, summed over all rows

    The gradient of the weight of `all_to_all_matmul`; h has the rows that arrive here.
    """
    return Arguments(x, operands=[h], dim=dim, counts=counts, out=out, result=lambda outputs: outputs["g"])


@Operation
def all_to_all_matmul_weight_gradient(
    d: Any, w: Any, h: Any, *, dim: int = 0, counts: Sequence[int] | None = None
) -> Arguments:
    """back = all_to_all(d, dim, counts); return back, back @ w, h.T @ back

    The backward of `matmul_all_to_all` with one exchange; h has the rows that arrive here.
    """
    return Arguments(
        d,
        [w],
        operands=[h],
        dim=dim,
        counts=counts,
        flipped=True,
        keep=True,
        result=lambda outputs: (outputs["x_full"], outputs["y"], outputs["g"]),
    )


OPERATIONS = {op.name: op for op in list(globals().values()) if isinstance(op, Operation)}


def plan(
    operation: Operation | str,
    *specs: Spec,
    ranks: int,
    schedule: str = "auto",
    slices: Slices | None = None,
    window: int | None = None,
    bias: bool = False,
    root: int = 0,
    packed: bool = False,
    machine: Machine | str | None = None,
) -> Plan:
    """The Plan of an operation on global tensors, x first: no MPI, no data.

    `ranks` how many; `schedule` and `slices` as for the operations; `window` bounds the sends that a rank has in
    flight, or the library's collectives; `bias=True` adds one to each weight; `root` is that of a broadcast;
    `packed=True` is for an x that will come strided; `machine` (or its name, or file): "auto" is what is best there.
    Rows and columns are spread as evenly as can be. Raises LayoutError, ShapeError, DtypeError or PlanError.
    """
    name = _name(operation)
    at, sizes = problems.from_specs(name, specs, ranks, bias=bias, root=root, packed=packed)
    made = plan_for(at(0), sizes, schedule, slices, window, at, None if machine is None else Machine.of(machine))
    if made.schedule in REGISTERED:
        verify(made)
    return made


def explain(
    operation: Operation | str,
    *specs: Spec,
    ranks: int,
    machine: Machine | str,
    bias: bool = False,
    root: int = 0,
    packed: bool = False,
) -> Explanation:
    """Which schedule is the best on `machine` (or the name, or the file, of one), and why: no MPI, no data.

    print(fompi.explain("all_gather_matmul", x, w, ranks=8, machine="h100-nvlink"))

    shows every candidate: its time and how far it is from the lower bound and, of the best, which were walked
    through, what it hides, what stays exposed and for which chunk; `.plan` is that of the winner. The specs are those
    of `fompi.plan`. Raises what that raises.
    """
    at, sizes = problems.from_specs(_name(operation), specs, ranks, bias=bias, root=root, packed=packed)
    return explained(at(0), sizes, Machine.of(machine), at, events=MOST_EVENTS)


def _name(operation: Operation | str) -> str:
    return operation.name if isinstance(operation, Operation) else operation
