"""The arguments of one call on one rank: they are checked, and rows become the first dimension.

Nothing here communicates. Errors that other ranks must see too are raised here and travel with the handshake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from fompi.backends.cuda import backend_of
from fompi.backends.numpy import COMBINES
from fompi.base.call_options import DEFAULTS, CallOptions
from fompi.base.errors import DtypeError, LayoutError, ShapeError, TensorError
from fompi.base.layout import as_integer, integer, offsets
from fompi.engine.handshake import VALUE_BITS
from fompi.plans import problems
from fompi.plans.kernels import REDUCTIONS
from fompi.plans.meaning import MEANING, VARIANTS, is_flat
from fompi.plans.problems import Form, Problem
from fompi.plans.rows import columns_of, counts_of, experts_of, mine_of, runs_of
from fompi.plans.tree import Canonical, folded
from fompi.runtime.default_device import default_device, upload
from fompi.tensors import dlpack
from fompi.tensors.dlpack import Tensor

Array = np.ndarray[Any, Any]

MOST_ROWS = (1 << VALUE_BITS) - 1
"""The most rows that x may have on one rank. A number of rows has VALUE_BITS bits in the handshake."""


SUMS = ("all_reduce", "reduce_scatter", "reduce")
"""The operations whose x may be a list of leaves."""


class Peers(NamedTuple):
    """Who takes part in a message: the ranks that this rank sends to and receives from (None: no rank), and its tag.

    The result is a tensor of the framework of `like`.
    """

    dest: Any = None
    source: Any = None
    tag: Any = 0
    like: Any = None


@dataclass
class Arguments:
    """The arguments of an operation, with the names of `fompi.plans.problems`. Nothing is checked yet."""

    x: Any
    weights: Sequence[Any] = ()
    biases: Sequence[Any] = ()  # a bias or None for each weight
    operands: Sequence[Any] = ()  # h of a weight gradient
    dim: int = 0
    split_dim: int | None = None  # the dimension that an all-to-all splits (None: dim)
    counts: Sequence[Any] | None = None  # the rows for each rank; where rows go to experts: a list for each rank
    columns: Sequence[int] | None = None  # how many columns each rank has, where columns travel
    experts: int | None = None  # of all ranks, where rows go to experts; None: as many on every rank
    root: int = 0
    op: str = "sum"
    peers: Peers | None = None
    out: Any = None
    flipped: bool = False  # the weight gradient is h.T @ rows, not rows.T @ h
    keep: bool = False  # the rows that arrive are a result too
    expects: int = -1  # how many rows must arrive here, if no operand and no out= says it; -1: any number
    arriving: Sequence[int] | None = None  # how many rows must arrive from each rank of an exchange; None: `expects`
    known: Any = None  # the call as its key says it, by which it is found without being read (`fompi.ops.keys`)
    words: str = ""  # what the ranks compare besides: whose gradients are wanted, in which backward, at which step
    result: Callable[[dict[str, Any]], Any] = field(default=lambda outputs: outputs["y"])  # from outputs by name

    @property
    def tensors(self) -> list[Any]:
        """x, the weights, the biases that are not None, and the operands."""
        return [self.x, *self.weights, *(b for b in self.biases if b is not None), *self.operands]

    def with_tensors(self, tensors: Sequence[Any]) -> Arguments:
        """This call on other tensors, given in the order of the property `tensors`."""
        rest = iter(tensors)
        return replace(
            self,
            x=next(rest),
            weights=[next(rest) for _ in self.weights],
            biases=[None if b is None else next(rest) for b in self.biases],
            operands=[next(rest) for _ in self.operands],
        )


def names_of(problem: Problem, arguments: Arguments) -> list[str]:
    """The names that the plan has for `arguments.tensors`, in their order."""
    return [
        "x",
        *(problem.name("w", i) for i in range(len(arguments.weights))),
        *(problem.name("bias", i) for i, bias in enumerate(arguments.biases) if bias is not None),
        *(problem.name("h", i) for i in range(len(arguments.operands))),
    ]


class LocalCall(NamedTuple):
    """One rank's part of a call, checked."""

    problem: Problem
    packed: bool  # x is strided and must be packed before it is sent
    arrays: dict[str, Array]  # the inputs by name, rows first
    like: Tensor  # x: the results are tensors of its framework
    shape: tuple[int, ...]  # of x as it was given
    dim: int  # the dimension of the rows, >= 0
    split: int  # the dimension whose columns an all-to-all splits; -1: it splits the rows
    rows: tuple[int, ...]  # `mine` of `fompi.plans.rows`
    expects: int  # how many rows must arrive here, because an operand or out= has this many; -1: any number
    out: Tensor | None
    in_place: bool  # out is x: the result is written over it (`plans.over_x`)
    device: Any  # whose memory the tensors have; None: the host
    packing: tuple[float, float] | None  # when x was packed before the call began, in seconds of perf_counter
    runs: Sequence[Sequence[int]] = ()  # where rows go to experts: the rows of each run, for each rank


class Borrowed(NamedTuple):
    """The tensors of a call, as the program passed them. Where x is a list of `leaves`, `x` is like each of them."""

    x: Tensor
    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    operands: Sequence[Tensor]
    out: Tensor | None
    leaves: Sequence[Tensor]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """The weights, the biases that are not None, and the operands, with what messages call them."""
        for kind, tensors in (("w", self.weights), ("bias", self.biases), ("h", self.operands)):
            for i, tensor in enumerate(tensors):
                if tensor is not None:
                    yield problems.argument(kind, i, len(tensors)), tensor


Place = tuple[int, int, tuple[int, ...], tuple[float, float] | None]
"""Where x has its rows: the dimension, that whose columns an all-to-all splits (-1: none), and its columns.

Then when x was made contiguous, if it was.
"""


def localise(
    operation: str, arguments: Arguments, rank: int, size: int, call_options: CallOptions = DEFAULTS
) -> LocalCall:
    """Check the tensors of this rank, and make rows their first dimension.

    Raises TensorError, DtypeError, ShapeError, LayoutError or PlanError.
    """
    order = call_options.order if call_options.order == "any" else problems.order_of(call_options.order)
    tensors = _borrow(operation, arguments, rank, size, order)
    x, weights, _, operands, out, leaves = tensors
    shape, meaning = x.array.shape, MEANING[operation]
    experts: tuple[int, ...] = ()
    if meaning.grouped:
        experts = experts_of(operation, arguments.experts, [w.array.shape for w in weights], rank, size)
    dim, split, columns, packing = _rows_first(operation, arguments, tensors, rank, size)
    if split >= 0:
        operation = "all_to_all_columns"
    problem = _problem(operation, arguments, tensors, columns, experts, size)
    if call_options.wire is not None:
        problem = problems.on_wire(problem, call_options.wire)
    if order != "any":
        problem = problems.in_order(problem, order, rank)
    if operation == "scatter" and rank != problem.root:
        x.array = x.array[:0]
    rows, runs = _rows(problem, arguments, len(x.array), rank)
    packed = not (problem.multiplies_first or problem.deals_x or leaves or x.array.flags.c_contiguous)
    arrays = _inputs(problem, tensors, dim, rank) if weights or operands or leaves else {"x": x.array}
    if columns or (problem.is_split and weights):
        arrays = problem.cut(arrays, rank)
    expects = len(operands[0].array) if operands else arguments.expects
    in_place = False
    if out is not None:
        is_possible = problem.flat and not leaves and out.array.flags.c_contiguous
        in_place = is_possible and dlpack.same_memory(_given(x), _given(out))
        for name, tensor in () if in_place else (*(("x", leaf) for leaf in leaves or (x,)), *tensors.named()):
            if dlpack.overlap(_given(out), _given(tensor)):
                raise TensorError(f"{operation}: out= shares memory with {name}")
        expects = _check_out(problem, out, shape, dim, split, rank, rows, expects)
    where = (out, in_place, x.device, packing)
    return LocalCall(problem, packed, arrays, x, shape, dim, split, rows, expects, *where, runs)


def _borrow(operation: str, arguments: Arguments, rank: int, size: int, order: str) -> Borrowed:
    """The tensors of the call. Raises if they are not all on the host, or all on one device."""
    borrow = dlpack.borrow if default_device() is None else upload
    leaves = () if order == "any" else _leaves(operation, arguments, rank, size, order, borrow)
    x = replace(leaves[0]) if leaves else borrow(arguments.x, "x")
    if arguments.out is None and not (arguments.weights or arguments.operands):
        return Borrowed(x, (), (), (), None, leaves)
    weights = [borrow(w, "w") for w in arguments.weights]
    biases = [None if b is None else borrow(b, "bias") for b in arguments.biases]
    operands = [borrow(h, "h") for h in arguments.operands]
    out, device = None if arguments.out is None else borrow(arguments.out, "out"), x.device
    tensors = Borrowed(x, weights, biases, operands, out, leaves)
    if any([t is not None and t.device is not device for t in (*weights, *biases, *operands, out)]):
        raise _on_two_devices(operation, tensors)
    return tensors


def _rows_first(operation: str, arguments: Arguments, tensors: Borrowed, rank: int, size: int) -> Place:
    """Make rows the first dimension of x and of the operands. A flat x gets one dimension."""
    x, weights, _, operands, *_ = tensors
    if not weights and is_flat(operation):
        packing = None
        if not x.array.flags.c_contiguous:
            begun = perf_counter()
            x.array = np.ascontiguousarray(x.array) if x.device is None else backend_of(x.device).packed(x.array)
            packing = (begun, perf_counter())
        x.array = x.array.reshape(-1)
        return 0, -1, (), packing
    if MEANING[operation].deals:
        columns = columns_of(operation, arguments.columns, x.array.shape, weights[0].array.shape, rank, size)
        return 0, -1, columns, None
    dim, split = _dimension(operation, arguments.dim, x.array, bool(weights or operands)), -1
    if arguments.split_dim is not None:
        split = _dimension(operation, arguments.split_dim, x.array, False, "split_dim")
    if split not in (-1, dim):  # never for a product
        parts = x.array.shape[split]
        columns = counts_of("all_to_all_columns", arguments.counts, parts, size, "what split_dim has")
        x.array = dlpack.rows_first(x.array, dim, split)
        return dim, split, columns, None
    for tensor in (x, *operands) if dim else ():
        tensor.array = dlpack.rows_first(tensor.array, dim)
    return dim, -1, (), None


def _problem(
    operation: str,
    arguments: Arguments,
    tensors: Borrowed,
    columns: tuple[int, ...],
    experts: tuple[int, ...],
    size: int,
) -> Problem:
    """The operation on tensors of these forms."""
    x, weights, biases, operands, *_ = tensors
    form, root = _form(x), arguments.root
    if columns and weights and MEANING[operation].family == "gather":  # x has only the columns of this rank
        form = Form((*form.shape[:-1], sum(columns)), form.dtype)
    make = problems.known_problem if type(arguments.op) is str else problems.problem  # which refuses it
    return make(
        operation,
        size,
        form,
        tuple([_form(w) for w in weights]) if weights else (),
        tuple([None if b is None else _form(b) for b in biases]) if biases else (),
        tuple([_form(h) for h in operands]) if operands else (),
        flipped=arguments.flipped,
        keep=arguments.keep,
        root=root if type(root) is int else as_integer(root, f"{operation}: root"),
        op=arguments.op,
        columns=columns,
        experts=experts,
    )


def _rows(
    problem: Problem, arguments: Arguments, total: int, rank: int
) -> tuple[tuple[int, ...], Sequence[Sequence[int]]]:
    """The rows of this rank (`mine` of `fompi.plans.rows`), and where they go to experts: the rows of each run."""
    runs: Sequence[Sequence[int]] = ()
    counts = None if problem.deals_x else arguments.counts
    if problem.experts:
        runs = runs_of(problem, total, counts, rank)
        counts = [sum(run) for run in runs]
    if total > MOST_ROWS:
        raise LayoutError(
            f"{problem.operation}: x has {total} rows, at most {MOST_ROWS} are possible on a rank: give x wider rows"
        )
    return mine_of(problem, total, counts, rank), runs


def _inputs(problem: Problem, tensors: Borrowed, dim: int, rank: int) -> dict[str, Array]:
    """The inputs by name. Of a sum whose terms are subtrees: the sums of their leaves."""
    x, weights, biases, operands, _, leaves = tensors
    arrays = _terms(problem, x, leaves, dim, rank) if leaves else {"x": x.array}
    for kind, given in (("w", weights), ("bias", biases), ("h", operands)):
        for i, tensor in enumerate(given):
            if tensor is not None:
                arrays[problem.name(kind, i)] = tensor.array
    return arrays


def _leaves(
    operation: str, arguments: Arguments, rank: int, size: int, order: str, borrow: Callable[..., Tensor]
) -> list[Tensor]:
    """The leaves of a sum that this rank has, or the sums of its subtrees. Empty: x is a tensor, or has no leaves."""
    canonical, x = Canonical.of(order), arguments.x
    if canonical is None or operation not in SUMS:
        return []
    subtrees = canonical.subtrees(size)
    count, terms = canonical.counts(size)[rank], subtrees[rank]
    if not isinstance(x, (list, tuple)):
        if len(terms) > 1:
            why = f"rank {rank} has {count} leaves, which are {len(terms)} subtrees: give x as a list of its leaves"
            raise ShapeError(f"{operation}: order={order}: {why}")
        if max(map(len, subtrees)) == 1:
            return []
        x = [x]
    leaves = [borrow(leaf, f"x[{i}]") for i, leaf in enumerate(x)]
    if len(leaves) not in (count, len(terms)):
        raise ShapeError(f"{operation}: order={order}: rank {rank} of {size} has {count} leaves, not {len(leaves)}")
    for i, leaf in enumerate(leaves):
        if leaf.array.shape != leaves[0].array.shape or leaf.dtype != leaves[0].dtype:
            raise ShapeError(
                f"{operation}: x[{i}] is {leaf.dtype} {leaf.array.shape}, but x[0] is {leaves[0].dtype} "
                f"{leaves[0].array.shape}: leaves must be alike"
            )
        if leaf.device is not None:
            why = "leaves on a device are added there: give x, their sum, where each rank has one subtree"
            raise TensorError(f"{operation}: order={order}: {why}")
    return leaves


def _terms(problem: Problem, x: Tensor, leaves: Sequence[Tensor], dim: int, rank: int) -> dict[str, Array]:
    """The inputs of a sum whose terms are subtrees, added from these leaves."""
    combine, arrays, terms = COMBINES[REDUCTIONS[problem.op]], {}, problem.terms[rank]
    sizes = (1,) * len(leaves) if len(leaves) == len(terms) else terms
    ends = offsets(sizes)
    for j, n in enumerate(sizes):
        mine = [dlpack.rows_first(leaf.array, dim).reshape(x.array.shape) for leaf in leaves[ends[j] : ends[j + 1]]]
        term = folded(mine, combine) if n > 1 else np.ascontiguousarray(mine[0])
        arrays[f"x{j}" if problem.is_split else "x"] = term
    return arrays


def _given(tensor: Tensor) -> Any:
    """The memory that the caller gave, of which `array` may be a copy on a device."""
    return tensor.array if tensor.host is None else tensor.host


def _on_two_devices(operation: str, tensors: Borrowed) -> TensorError:
    x, others = tensors.x, (*tensors.named(), ("out=", tensors.out))
    name, other = next((name, t) for name, t in others if t is not None and t.device is not x.device)
    where = [f"the {t.device.name}" if t.device is not None else "the host" for t in (x, other)]
    if where[0] == where[1]:
        where[1] = f"another {other.device.name}"
    return TensorError(f"{operation}: x is on {where[0]}, but {name} is on {where[1]}")


def _form(tensor: Tensor) -> Form:
    return Form(tensor.array.shape, tensor.dtype)


def _dimension(operation: str, dim: int, x: Array, multiplied: bool, name: str = "dim") -> int:
    count = x.ndim
    if (type(dim) is not int and integer(dim) is None) or not -count <= dim < count:
        raise ShapeError(f"{operation}: x with the shape {x.shape} has no dimension {name}={dim!r}")
    dim = int(dim) % count
    if multiplied and dim == count - 1 > 0:  # x of one dimension: see `problems.problem`
        other = f", or call fompi.{VARIANTS[operation][0]}" if operation in VARIANTS else ""
        raise ShapeError(
            f"{operation}: dim={dim} is the last dimension of x, which the product sums over: choose another dim{other}"
        )
    return dim


def _check_out(
    problem: Problem,
    out: Tensor,
    shape: tuple[int, ...],
    dim: int,
    split: int,
    rank: int,
    rows: tuple[int, ...],
    expects: int,
) -> int:
    """Raise if `out` cannot hold the result. Returns how many rows must arrive here for `out` to fit, -1 for any.

    Only the other ranks know how many rows arrive in a gather or an all-to-all, so the handshake compares the numbers.
    """
    if out.readonly:
        raise TensorError(f"{problem.operation}: out= is read-only")
    if not out.array.flags.c_contiguous:
        raise TensorError(f"{problem.operation}: out= is strided; give a contiguous tensor")
    if out.dtype != problem.dtype:
        raise DtypeError(f"{problem.operation}: out= is {out.dtype}, the result is {problem.dtype}")
    if problem.columns and len(out.array.shape) != len(shape):
        raise ShapeError(f"{problem.operation}: out= has the shape {out.array.shape}, but x has {shape}")
    array = dlpack.rows_first(out.array, dim, split) if dim or problem.columns else out.array
    if not array.flags.c_contiguous or (dim and any(n != 1 for n in out.array.shape[:dim])):
        raise TensorError(f"{problem.operation}: out= cannot be used with dim={dim}: its rows are not contiguous")
    if problem.flat:
        wanted = problem.result_shape(shape, rank)
        if array.shape != wanted:
            raise ShapeError(f"{problem.operation}: out= has the shape {array.shape}, the result has {wanted}")
        return expects
    if problem.gradients:
        wanted = (*problem.experts[rank : rank + 1], *problem.gradient_shape(0))
        if array.shape != wanted:
            raise ShapeError(f"{problem.operation}: out= has the shape {array.shape}, the result has {wanted}")
        return expects
    row = problem.result_row(rank)
    if array.ndim != 1 + len(row) or array.shape[1:] != row:
        raise ShapeError(f"{problem.operation}: out= has rows of the shape {array.shape[1:]}, the result has {row}")
    if problem.moves in ("all_gather", "all_to_all"):
        return len(array)
    known = sum(rows) if problem.moves == "all_reduce" else rows[rank]
    if len(array) != known:
        raise ShapeError(f"{problem.operation}: out= has {len(array)} rows, the result has {known}")
    return expects
