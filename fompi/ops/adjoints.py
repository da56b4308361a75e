"""The backward of every operation, written as operations, once for all frameworks.

The gradient is the derivative of the sum of the losses of all ranks. If every rank computes the same loss from
replicated values, the loss counts once per rank: divide it by the number of ranks. If each rank computes the loss of
its own rows, as in tensor parallelism with sequence parallelism, do not divide.

`dy` is the gradient of y, `dx` of x, `dw` of w. The adjoint of a fused operation is a fused operation.

| y =                           | dx =                                          | dw =                              |
|-------------------------------|-----------------------------------------------|-----------------------------------|
| all_gather(x)                 | reduce_scatter(dy)                            |                                   |
| reduce_scatter(x)             | all_gather(dy)                                |                                   |
| all_reduce(x)                 | all_reduce(dy)                                |                                   |
| broadcast(x)                  | reduce(dy) on the root, 0 on other ranks      |                                   |
| reduce(x)                     | broadcast(dy)                                 |                                   |
| gather(x)                     | scatter(dy) with the rows of x                |                                   |
| scatter(x)                    | gather(dy) on the root, 0 on other ranks      |                                   |
| sendrecv(x, dest, source)     | sendrecv(dy, source, dest)                    |                                   |
| all_to_all(x)                 | all_to_all(dy) with the counts transposed     |                                   |
| all_to_all(x, split, concat)  | all_to_all(dy, concat, split), counts: rows   |                                   |
| all_gather_matmul(x, w)       | matmul_reduce_scatter(dy, w.T)                | all_gather_weight_gradient(x, dy) |
| matmul_reduce_scatter(x, w)   | both by all_gather_matmul_weight_gradient(dy, w.T, x): one gather                 |
| matmul_all_reduce(x, w)       | the same, on reduce_scatter(dy)               |                                   |
| matmul_all_to_all(x, w)       | both by all_to_all_matmul_weight_gradient(dy, w.T, x): one exchange               |
| all_to_all_matmul(x, w)       | matmul_all_to_all(dy, w.T), counts transposed | all_to_all_weight_gradient(x, dy) |
| matmul_all_to_all_columns     | all_to_all_columns_matmul(dy, w.T)            | x.T @ back                        |
| all_to_all_columns_matmul     | matmul_all_to_all_columns(dy, w.T)            | back.T @ dy                       |

`back` is all_to_all(dy or x), which gives all columns of the rows of this rank. Where dx needs it too, it travels once:
dx is then back @ w.T, without a message of its own.

A mean has 1/size of the gradient of the sum. The gradient of a maximum or minimum goes to the terms that are equal to
it, in equal parts. A product is refused.

The weight gradients have gradients too, so gradients of gradients are right, of any order. With `dg` of g:

| g =                              | dx =                           | dh =                     |
|----------------------------------|--------------------------------|--------------------------|
| all_gather_weight_gradient(x, h) | matmul_reduce_scatter(h, dg.T) | all_gather_matmul(x, dg) |
| all_to_all_weight_gradient(x, h) | matmul_all_to_all(h, dg.T)     | all_to_all_matmul(x, dg) |

The operations with a product and a weight gradient have the sum of the terms of both.

The grouped operations have the gradients of those without experts, as grouped operations. There w.T and dg.T are the
transposed matrices of the experts.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NoReturn, Protocol

from fompi.base.call_options import CallOptions
from fompi.base.errors import FompiError, LayoutError, StateError, TensorError
from fompi.base.layout import Extents, split
from fompi.engine.communicator import Communicator
from fompi.ops import operations
from fompi.ops.arguments import SUMS, Arguments, Peers
from fompi.ops.messages import sendrecv
from fompi.ops.operation import Operation
from fompi.ops.pending import Pending
from fompi.schedules.registry import can_carry_out


class WithBackward(Protocol):
    """A call as the adapter of a framework sees it: of an operation (`Call`), or of a strategy (`StrategyCall`)."""

    @property
    def keeps(self) -> bool:
        """True if the backward reads the tensors, which the framework keeps and passes to both methods."""

    @property
    def twice(self) -> bool:
        """True if the backward consists of operations: it has a derivative too, and takes None for zeros."""

    def forward(self, tensors: Sequence[Any]) -> Any:
        """The result for these tensors, nested."""

    def backward(self, tensors: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
        """The gradient of each tensor for which `needs` is True, from those of the tensors of the result."""


@dataclass
class Call:
    """A differentiable call of an operation (`WithBackward`). It keeps no tensor, only the rows of all ranks."""

    operation: Operation
    arguments: Arguments
    comm: Any
    call_options: CallOptions
    apply: Callable[..., Any]
    """Runs an operation of the backward, so that it can be differentiated again. It has the arguments of `applied`."""

    needs: Sequence[bool] = ()
    """For each tensor: is its gradient wanted? The ranks compare it."""

    share: Callable[[Call, Any], Any] | None = None
    """(call, dy) -> dy, whose gradient is the sum of those of all ranks, in the graph of a second derivative.

    Given for a loss that all ranks compute alike, and that counts once (`_replicated`).
    """

    _extents: Extents | None = None
    _number: int = -1
    shape: tuple[int, ...] = ()
    """That of x."""

    twice = True

    def __post_init__(self) -> None:
        if self.arguments.x is not ...:
            self.shape = tuple(getattr(self.arguments.x, "shape", ()))
        a = self.arguments = self.arguments.with_tensors([...] * len(self.arguments.tensors))
        if any(self.needs):
            biased = tuple(b is not None for b in a.biases)
            a.words += _wanted(len(a.weights), biased, len(a.operands), tuple(self.needs), " " * bool(a.words))
            a.words += " of a loss that counts once" * (self.share is not None)

    @property
    def keeps(self) -> bool:
        """True if the backward reads the tensors. Without weights only that of a maximum or minimum does."""
        a = self.arguments
        return bool(a.weights or a.operands) or a.op in ("max", "min")

    def forward(self, tensors: Sequence[Any]) -> Any:
        if self.arguments.out is not None:
            self.refuse(": out= cannot be used in a call that is differentiated")
        if self.arguments.op == "prod" and any(self.needs):
            self.refuse(': op="prod" has no gradient: pass x.detach(), or sum logarithms')
        pending: Pending = self.operation.begin(self.arguments.with_tensors(tensors), self.comm, self.call_options)
        result = pending.wait()
        self._extents, self._number = pending.extents, pending.number
        return result

    def take(self, other: Call) -> None:
        """Remember what the forward of `other` has learned. It was the forward of this call."""
        self._extents, self._number = other._extents, other._number

    def backward(self, tensors: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
        """The gradient of each tensor for which `needs` is True. `grads` are those of the results (None: zero)."""
        arguments = self.arguments.with_tensors(tensors)
        if all(g is None for g in grads):
            return [None] * len(tensors)
        try:
            if self.share is not None and self.operation.name in REPLICATED and grads[0] is not None:
                return _replicated(self, arguments, self.share(self, grads[0]), grads, needs)
            return ADJOINTS[self.operation.name](self, arguments, grads, needs)
        except FompiError as error:
            text = str(error)
            if "the backward of" not in text:
                error.args = (f"the backward of {self.operation.name}: {text}", *error.args[1:])
            raise

    def refuse(self, reason: str) -> NoReturn:
        """Raise a TensorError. The other ranks of this call raise a MismatchError instead of waiting for this rank."""
        error = TensorError(f"fompi.{self.operation.name}{reason}")
        self.operation.refuse(error, self.comm)
        raise error

    @property
    def extents(self) -> Extents:
        """The rows of all ranks in the forward."""
        if self._extents is None:
            raise StateError(f"fompi.{self.operation.name}: backward was called before forward")
        return self._extents

    def run(self, operation: Operation, *tensors: Any, **options: Any) -> Any:
        """Call an operation of the backward with the options of the forward.

        Its words name the forward. So the backward of one layer never meets the backward of another one.
        """
        if operation is sendrecv:
            return self.apply(operation, tensors, options, self.comm, self.call_options)
        if "dim" in operation.__signature__.parameters and "split_dim" not in options:
            options["dim"] = self.arguments.dim
        schedule = self.call_options.schedule
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        name = "all_to_all_columns" if "split_dim" in options else operation.name
        if not can_carry_out(schedule, name, Communicator.of(self.comm).size, dtype, options.get("op", "sum")):
            schedule = "auto"  # the schedule of the forward cannot carry out this operation
        number = f" (call {self._number})" if self._number >= 0 else ""
        words = f"in the backward of {self.operation.name}{number}"
        order = self.call_options.order
        if operation.name in SUMS and order != "any":  # each rank has one term of the gradient, whatever its leaves
            order = "ranks"
        how = self.call_options._replace(schedule=schedule, order=order)
        return self.apply(operation, tensors, options, self.comm, how, words)


def applied(
    operation: Operation,
    tensors: Sequence[Any],
    options: dict[str, Any],
    comm: Any,
    call_options: CallOptions,
    words: str = "",
) -> Any:
    """The result of an operation of a backward, on these tensors and its own options."""
    return operation.run(arguments_of(operation, tensors, options, words), comm, call_options)


def arguments_of(operation: Operation, tensors: Sequence[Any], options: dict[str, Any], words: str) -> Arguments:
    """The Arguments of such a call, whose words the ranks compare."""
    return replace(operation.read(tuple(tensors), options)[0], words=words)


CONVENTIONS = ("sum", "replicated")
"""The values of `gradient=`: the loss is the sum of the losses of all ranks, or one that all ranks compute alike."""


def check_convention(operation: str, gradient: Any) -> None:
    """Raise LayoutError if `gradient` is no convention."""
    if gradient not in CONVENTIONS:
        raise LayoutError(f"{operation}: gradient={gradient!r} must be 'sum' or 'replicated'")


REPLICATED = ("all_reduce", "all_gather", "broadcast", "matmul_all_reduce", "all_gather_matmul_many")
"""The operations whose (first) result is the same on all ranks."""


def _replicated(call: Call, a: Arguments, dy: Any, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    """The backward for a loss that all ranks compute alike, and that counts once: `gradient="replicated"`.

    There dy is the same on all ranks, and the backward need not sum it:

    | y =                     | dx =                   | dw =      |
    |-------------------------|------------------------|-----------|
    | all_reduce(x)           | dy                     |           |
    | all_gather(x)           | the rows of dy here    |           |
    | broadcast(x)            | dy on the root, else 0 |           |
    | matmul_all_reduce(x, w) | dy @ w.T               | x.T @ dy  |

    It sends messages only for a maximum or minimum, to find the terms that are equal to it.
    """
    name = call.operation.name
    if name == "all_reduce":
        return [_of_term(call, a, dy)]
    if name == "broadcast":
        return [dy if call.extents.rank == a.root else _zeros(dy)]
    if name == "all_gather":
        return [_mine(call, dy)]
    if name == "matmul_all_reduce":
        (w,) = a.weights
        dx = dy @ w.T if needs[0] else None
        dw = _rows(a.x).T @ _rows(dy) if needs[1] else None
        return [dx, dw, *_bias(a, dy)]
    rest = ADJOINTS[name](call, a, [None, *grads[1:]], needs)  # all_gather_matmul_many
    dx = _mine(call, dy) if needs[0] else None
    return [dx if rest[0] is None else rest[0] + dx, *rest[1:]]


def _mine(call: Call, dy: Any) -> Any:
    """The rows of dy that came from this rank."""
    rows, rank = call.extents.rows, call.extents.rank
    first = sum(rows[:rank])
    return dy[(slice(None),) * (call.arguments.dim % dy.ndim) + (slice(first, first + rows[rank]),)]


def _rows(x: Any) -> Any:
    """x as a matrix: all dimensions but the last one become one."""
    return x.reshape((prod(x.shape[:-1]), x.shape[-1]))


@functools.lru_cache(maxsize=256)
def _wanted(weights: int, biased: tuple[bool, ...], operands: int, needs: tuple[bool, ...], space: str) -> str:
    """In words, whose gradients are wanted, for a call with this many weights, biases and operands."""
    biases = [name for name, has in zip(_numbered("bias", len(biased)), biased, strict=True) if has]
    names = ["x", *_numbered("w", weights), *biases, *_numbered("h", operands)]
    wanted = [name for name, need in zip(names, needs, strict=True) if need]
    return f"{space}for the gradient of {' and '.join(wanted)}"


def _numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}{i}" for i in range(count)]


def _sum(terms: Sequence[Any]) -> Any:
    """The sum of the terms that are not None. None if there are none."""
    given = [t for t in terms if t is not None]
    return functools.reduce(operator.add, given) if given else None


def _all_gather(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    return [call.run(operations.reduce_scatter, grads[0], counts=call.extents.rows)]


def _reduce_scatter(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    return [_of_term(call, a, call.run(operations.all_gather, grads[0]))]


def _all_reduce(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    if a.op == "mean":
        return [call.run(operations.all_reduce, grads[0], op="mean")]
    return [_of_term(call, a, call.run(operations.all_reduce, grads[0]))]


def _reduce(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    dy = grads[0] if call.extents.rank == a.root else _filled(call.shape, grads[0])
    return [_of_term(call, a, call.run(operations.broadcast, dy, root=a.root))]


def _of_term(call: Call, a: Arguments, dy: Any) -> Any:
    """The gradient of this rank's term of a reduction, from the gradient of the reduction of all rows."""
    if a.op == "mean":
        return dy / call.extents.size
    if a.op in ("max", "min"):
        y = call.run(operations.all_reduce, a.x, op=a.op)
        chosen = ((a.x == y) | (a.x != a.x)) + _zeros(dy)  # NaN is the result where it occurs
        return dy * chosen / call.run(operations.all_reduce, chosen)
    return dy


def _broadcast(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    total = call.run(operations.reduce, grads[0], root=a.root)
    return [total if call.extents.rank == a.root else _filled(call.shape, total)]


def _gather(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    return [call.run(operations.scatter, grads[0], root=a.root, counts=call.extents.recv)]


def _scatter(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    dx = call.run(operations.gather, grads[0], root=a.root)
    return [dx if call.extents.rank == a.root else _filled(call.shape, dx)]


def _sendrecv(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    dest, source, tag, _ = a.peers or Peers()
    dx = call.run(sendrecv, grads[0], dest=source, source=dest, tag=tag)
    return [_filled(call.shape, dx) if dest is None else dx]


def _filled(shape: tuple[int, ...], empty: Any) -> Any:
    """Zeros that depend on the tensor `empty`, whose sum is 0. All ranks then run the backward of `empty`."""
    zero = empty.sum()
    if hasattr(zero, "expand"):
        return zero.expand(shape)
    return zero.__array_namespace__().broadcast_to(zero, shape)


def _zeros(like: Any) -> Any:
    """`0 * like`, in any framework, also for infinite values. All ranks then run the backward of `like`."""
    every = (like == like) | (like != like)
    if hasattr(like, "masked_fill"):
        return like.masked_fill(every, 0)
    namespace = like.__array_namespace__()
    return namespace.where(every, namespace.zeros_like(like), like)


def _all_to_all(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    if call.extents.recv:
        return [call.run(operations.all_to_all, grads[0], counts=call.extents.recv)]
    back = {"split_dim": a.dim, "concat_dim": a.split_dim}  # columns were split: they are joined, and rows are split
    return [call.run(operations.all_to_all, grads[0], counts=call.extents.rows, **back)]


def _bias(a: Arguments, d: Any) -> list[Any]:
    """The gradient of the bias as a list, empty for a call without bias."""
    return [_sum_rows(d)] if any(b is not None for b in a.biases) else []


def _sum_rows(d: Any) -> Any:
    """The sum over all dimensions but the last one."""
    return d.sum(tuple(range(d.ndim - 1)))


def _all_gather_matmul(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    (dy,), (w,) = grads, a.weights
    dx = call.run(operations.matmul_reduce_scatter, dy, w.T, counts=call.extents.rows) if needs[0] else None
    dw = call.run(operations.all_gather_weight_gradient, a.x, dy) if needs[1] else None
    return [dx, dw, *_bias(a, dy)]


def _all_gather_matmul_many(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    """x_full is a result, but it is not kept for the backward. The rows are gathered again, as for one weight."""
    rows, (dfull, *dys) = call.extents.rows, grads
    dx = None if dfull is None or not needs[0] else call.run(operations.reduce_scatter, dfull, counts=rows)
    dws: list[Any] = []
    dbs: list[Any] = []
    for i, (w, dy) in enumerate(zip(a.weights, dys, strict=True)):
        if dy is not None and needs[0]:
            term = call.run(operations.matmul_reduce_scatter, dy, w.T, counts=rows)
            dx = term if dx is None else dx + term
        needs_dw = dy is not None and needs[1 + i]
        dws.append(call.run(operations.all_gather_weight_gradient, a.x, dy) if needs_dw else None)
        if i < len(a.biases) and a.biases[i] is not None:
            dbs.append(None if dy is None else _sum_rows(dy))
    return [dx, *dws, *dbs]


def _gather_back(call: Call, a: Arguments, d: Any, needs: Sequence[bool]) -> list[Any]:
    """dx and dw, where `d` is this rank's shard of the gradient of x @ w."""
    (w,) = a.weights
    if needs[0] and needs[1]:
        return list(call.run(operations.all_gather_matmul_weight_gradient, d, w.T, a.x))
    if needs[0]:
        return [call.run(operations.all_gather_matmul, d, w.T), None]
    return [None, call.run(operations.all_gather_weight_gradient, d, a.x).T if needs[1] else None]


def _matmul_reduce_scatter(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    return [*_gather_back(call, a, grads[0], needs), *_bias(a, grads[0])]


def _matmul_all_reduce(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    d = call.run(operations.reduce_scatter, grads[0], counts=call.extents.rows)
    return [*_gather_back(call, a, d, needs), *_bias(a, d)]


def _collected(call: Call, x: Any) -> Any:
    """The rows of this rank of `x`, of which each rank has some columns: the columns of all ranks."""
    return call.run(operations.all_to_all, x, split_dim=0, concat_dim=-1, counts=call.extents.rows)


def _matmul_all_to_all_columns(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    (dy,), (w,), extents = grads, a.weights, call.extents
    if not needs[1] and not any(b is not None for b in a.biases):
        columns = split(w.shape[1], extents.size) if a.columns is None else a.columns
        return [call.run(operations.all_to_all_columns_matmul, dy, w.T, counts=extents.rows, columns=columns), None]
    back = _collected(call, dy)
    return [back @ w.T if needs[0] else None, _rows(a.x).T @ _rows(back) if needs[1] else None, *_bias(a, back)]


def _all_to_all_columns_matmul(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    (dy,), (w,), dx = grads, a.weights, None
    if needs[0]:
        columns = split(w.shape[0], call.extents.size) if a.columns is None else a.columns
        dx = call.run(operations.matmul_all_to_all_columns, dy, w.T, columns=columns)
    dw = _rows(_collected(call, a.x)).T @ _rows(dy) if needs[1] else None
    return [dx, dw, *_bias(a, dy)]


GROUPED: dict[str, Operation] = {
    "matmul_all_to_all": operations.grouped_matmul_all_to_all,
    "all_to_all_matmul": operations.all_to_all_grouped_matmul,
    "all_to_all_weight_gradient": operations.all_to_all_grouped_weight_gradient,
    "all_to_all_matmul_weight_gradient": operations.all_to_all_grouped_matmul_weight_gradient,
}
"""The operations for experts, by those without."""


def _exchanged(call: Call, a: Arguments, operation: Operation, axis: str, *tensors: Any) -> Any:
    """An exchange of the backward with the rows that the forward has sent, or received (`axis`), also for experts."""
    extents = call.extents
    if not extents.experts:
        return call.run(operation, *tensors, counts=getattr(extents, axis))
    how = {"counts": extents.by_peer(axis), "experts": sum(extents.experts)}
    return call.run(GROUPED[operation.name], *tensors, **how)


def _matmul_all_to_all(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    (w,) = a.weights
    back, dx, dw = _exchanged(call, a, operations.all_to_all_matmul_weight_gradient, "recv", grads[0], w.mT, a.x)
    return [dx, dw, *_bias(a, back)]


def _all_to_all_matmul(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    (dy,), (w,) = grads, a.weights
    dx = _exchanged(call, a, operations.matmul_all_to_all, "recv", dy, w.mT) if needs[0] else None
    dw = _exchanged(call, a, operations.all_to_all_weight_gradient, "send", a.x, dy) if needs[1] else None
    return [dx, dw, *_bias(a, dy)]


def _all_gather_weight_gradient(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    (dg,), (h,) = grads, a.operands
    dx = call.run(operations.matmul_reduce_scatter, h, dg.T, counts=call.extents.rows) if needs[0] else None
    dh = call.run(operations.all_gather_matmul, a.x, dg) if needs[1] else None
    return [dx, dh]


def _all_gather_matmul_weight_gradient(
    call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]
) -> list[Any]:
    (dy, dg), (w,), (h,), rows = grads, a.weights, a.operands, call.extents.rows
    dx = dw = dh = None
    if needs[0]:
        pairs = [(d, v) for d, v in ((dy, w.T), (h, dg)) if d is not None and v is not None]
        dx = _sum([call.run(operations.matmul_reduce_scatter, d, v, counts=rows) for d, v in pairs])
    if needs[1] and dy is not None:
        dw = call.run(operations.all_gather_weight_gradient, a.x, dy)
    if needs[2] and dg is not None:
        dh = call.run(operations.all_gather_matmul, a.x, dg.T)
    return [dx, dw, dh]


def _all_to_all_weight_gradient(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    (dg,), (h,) = grads, a.operands
    dx = _exchanged(call, a, operations.matmul_all_to_all, "recv", h, dg.mT) if needs[0] else None
    dh = _exchanged(call, a, operations.all_to_all_matmul, "send", a.x, dg) if needs[1] else None
    return [dx, dh]


def _all_to_all_matmul_weight_gradient(
    call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]
) -> list[Any]:
    (dback, dy, dg), (w,), (h,), extents = grads, a.weights, a.operands, call.extents
    dx = dw = dh = None
    if needs[0] and extents.experts:  # three exchanges: only an operation multiplies the rows of experts
        pairs = [(d, v) for d, v in ((dy, w.mT), (h, dg)) if d is not None and v is not None]
        terms = [_exchanged(call, a, operations.matmul_all_to_all, "recv", *pair) for pair in pairs]
        if dback is not None:
            terms.append(call.run(operations.all_to_all, dback, counts=[*map(sum, extents.by_peer("recv"))]))
        dx = _sum(terms)
    elif needs[0]:
        terms = [dback, None if dy is None else dy @ w.T, None if dg is None else h @ dg]
        dx = call.run(operations.all_to_all, _sum(terms), counts=extents.recv)
    if needs[1] and dy is not None:
        dw = _exchanged(call, a, operations.all_to_all_weight_gradient, "send", a.x, dy)
    if needs[2] and dg is not None:
        dh = _exchanged(call, a, operations.all_to_all_matmul, "send", a.x, dg.mT)
    return [dx, dw, dh]


ADJOINTS: dict[str, Callable[[Call, Arguments, Sequence[Any], Sequence[bool]], list[Any]]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "reduce": _reduce,
    "sendrecv": _sendrecv,
    "all_gather_matmul": _all_gather_matmul,
    "all_gather_matmul_many": _all_gather_matmul_many,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
    "matmul_all_reduce": _matmul_all_reduce,
    "matmul_all_to_all": _matmul_all_to_all,
    "all_to_all_matmul": _all_to_all_matmul,
    "all_gather_weight_gradient": _all_gather_weight_gradient,
    "all_gather_matmul_weight_gradient": _all_gather_matmul_weight_gradient,
    "all_to_all_weight_gradient": _all_to_all_weight_gradient,
    "all_to_all_matmul_weight_gradient": _all_to_all_matmul_weight_gradient,
    "matmul_all_to_all_columns": _matmul_all_to_all_columns,
    "all_to_all_columns_matmul": _all_to_all_columns_matmul,
    "grouped_matmul_all_to_all": _matmul_all_to_all,
    "all_to_all_grouped_matmul": _all_to_all_matmul,
    "all_to_all_grouped_weight_gradient": _all_to_all_weight_gradient,
    "all_to_all_grouped_matmul_weight_gradient": _all_to_all_matmul_weight_gradient,
}
"""(call, arguments, gradients of the results, which gradients are needed) -> the gradients of the tensors."""

DIFFERENTIABLE: dict[str, Operation] = {**operations.OPERATIONS, "sendrecv": sendrecv}
"""The operations that have a gradient, by name."""
