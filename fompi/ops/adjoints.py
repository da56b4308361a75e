"""The backward of every operation, as operations: written once for all frameworks.

The gradient is that of the sum of all ranks' losses. So a loss that every rank computes from replicated values counts
once per rank: divide it by the size. Where a loss is made of sharded rows, as in TP with sequence parallelism, there
is nothing to divide.

| y =                           | dx =                                          | dw =                              |
|-------------------------------|-----------------------------------------------|-----------------------------------|
| all_gather(x)                 | reduce_scatter(dy)                            |                                   |
| reduce_scatter(x)             | all_gather(dy)                                |                                   |
| all_reduce(x)                 | all_reduce(dy)                                |                                   |
| broadcast(x)                  | all_reduce(dy) at the root, else 0            |                                   |
| all_to_all(x)                 | all_to_all(dy), the counts turned round       |                                   |
| all_gather_matmul(x, w)       | matmul_reduce_scatter(dy, w.T)                | all_gather_weight_gradient(x, dy) |
| matmul_reduce_scatter(x, w)   | both by all_gather_matmul_weight_gradient(dy, w.T, x): one gather                 |
| matmul_all_reduce(x, w)       | the same, on reduce_scatter(dy)               |                                   |
| matmul_all_to_all(x, w)       | both by all_to_all_matmul_weight_gradient(dy, w.T, x): one exchange               |
| all_to_all_matmul(x, w)       | matmul_all_to_all(dy, w.T), turned round      | all_to_all_weight_gradient(x, dy) |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from fompi.base.errors import TensorError
from fompi.base.layout import HALF, Extents
from fompi.engine.communicator import Communicator
from fompi.ops import operations
from fompi.ops.arguments import Arguments
from fompi.ops.operation import CallOptions, Operation, Pending
from fompi.plans.problems import MEANING
from fompi.schedules.registry import can_move


@dataclass
class Call:
    """A differentiable call: `forward` runs it, `backward` gives the gradients of its tensors.

    It keeps no tensor: whoever runs it hands them in both times.
    """

    operation: Operation
    arguments: Arguments
    comm: Any
    call_options: CallOptions
    _extents: Extents | None = None

    def __post_init__(self) -> None:
        self.arguments = self.arguments.with_tensors([...] * len(self.arguments.tensors))

    @property
    def keeps(self) -> bool:
        """Whether the backward reads the tensors: that of what only moves or adds does not."""
        return bool(self.arguments.weights)

    def forward(self, tensors: Sequence[Any], gradient: bool) -> Any:
        if self.operation.name not in DUALS:
            self.refuse(" is a gradient itself and has none: pass detached tensors")
        if self.arguments.out is not None:
            self.refuse(": out= cannot be given where a gradient is wanted")
        arguments = replace(self.arguments.with_tensors(tensors), gradient=gradient)
        pending: Pending = self.operation.begin(arguments, self.comm, self.call_options)
        result = pending.wait()
        self._extents = pending.extents
        return result

    def backward(self, tensors: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
        """The gradients of `tensors` where `needs` says so, from those of the results (None: zero)."""
        arguments = self.arguments.with_tensors(tensors)
        if all(g is None for g in grads):
            return [None] * len(tensors)
        return DUALS[self.operation.name](self, arguments, grads, needs)

    def refuse(self, why: str) -> NoReturn:
        """Raise, and tell the other ranks, who would wait for us in this call."""
        error = TensorError(f"fompi.{self.operation.name}{why}")
        comm = Communicator.of(self.comm)
        Pending(
            self.operation.name, self.arguments, None, error, comm, self.call_options.schedule, self.call_options.slices
        )
        raise error

    @property
    def extents(self) -> Extents:
        """How many rows the ranks had in the forward."""
        assert self._extents is not None, "forward comes first"
        return self._extents

    def run(self, operation: Operation, *tensors: Any, **options: Any) -> Any:
        if operation.name not in ("all_reduce", "broadcast"):
            options["dim"] = self.arguments.dim
        schedule, slices, effort = self.call_options
        half = str(tensors[0].dtype).removeprefix("torch.") in HALF
        if not can_move(schedule, MEANING[operation.name].moves, Communicator.of(self.comm).size, half):
            schedule = "auto"  # that of the forward does not move what the backward moves
        return operation(*tensors, comm=self.comm, schedule=schedule, slices=slices, effort=effort, **options)


def _all_gather(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    return [call.run(operations.reduce_scatter, grads[0], counts=call.extents.rows)]


def _reduce_scatter(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    return [call.run(operations.all_gather, grads[0])]


def _all_reduce(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    return [call.run(operations.all_reduce, grads[0])]


def _broadcast(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    total = operations.all_reduce(grads[0], comm=call.comm)
    return [total if call.extents.rank == a.root else _zeros(total)]


def _zeros(like: Any) -> Any:
    """Zeros of its shape and dtype, in any framework, whatever it holds: 0 * inf is none."""
    nowhere = (like == like) & (like != like)
    return nowhere.astype(like.dtype) if hasattr(nowhere, "astype") else nowhere.to(like.dtype)


def _all_to_all(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    return [call.run(operations.all_to_all, grads[0], counts=call.extents.recv)]


def _bias(a: Arguments, d: Any) -> list[Any]:
    """The gradient of a bias, if there is one."""
    return [_columns(d)] if any(b is not None for b in a.biases) else []


def _columns(d: Any) -> Any:
    """The sum over everything but the columns."""
    return d.sum(tuple(range(d.ndim - 1)))


def _all_gather_matmul(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    (dy,), (w,) = grads, a.weights
    dx = call.run(operations.matmul_reduce_scatter, dy, w.T, counts=call.extents.rows) if needs[0] else None
    dw = call.run(operations.all_gather_weight_gradient, a.x, dy) if needs[1] else None
    return [dx, dw, *_bias(a, dy)]


def _all_gather_matmul_many(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    """x_full is a result, but not kept for the backward: the rows are gathered again, as for one weight."""
    rows, (dfull, *dys) = call.extents.rows, grads
    dx = None if dfull is None or not needs[0] else call.run(operations.reduce_scatter, dfull, counts=rows)
    dws: list[Any] = []
    dbs: list[Any] = []
    for i, (w, dy) in enumerate(zip(a.weights, dys, strict=True)):
        if dy is not None and needs[0]:
            term = call.run(operations.matmul_reduce_scatter, dy, w.T, counts=rows)
            dx = term if dx is None else dx + term
        wanted = dy is not None and needs[1 + i]
        dws.append(call.run(operations.all_gather_weight_gradient, a.x, dy) if wanted else None)
        if i < len(a.biases) and a.biases[i] is not None:
            dbs.append(None if dy is None else _columns(dy))
    return [dx, *dws, *dbs]


def _gather_back(call: Call, a: Arguments, d: Any, needs: Sequence[bool]) -> list[Any]:
    """dx and dw from the shard of the gradient that each rank has."""
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


def _matmul_all_to_all(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    (w,) = a.weights
    back, dx, dw = call.run(operations.all_to_all_matmul_weight_gradient, grads[0], w.T, a.x, counts=call.extents.recv)
    return [dx, dw, *_bias(a, back)]


def _all_to_all_matmul(call: Call, a: Arguments, grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
    (dy,), (w,), extents = grads, a.weights, call.extents
    dx = call.run(operations.matmul_all_to_all, dy, w.T, counts=extents.recv) if needs[0] else None
    dw = call.run(operations.all_to_all_weight_gradient, a.x, dy, counts=extents.send) if needs[1] else None
    return [dx, dw, *_bias(a, dy)]


DUALS: dict[str, Callable[[Call, Arguments, Sequence[Any], Sequence[bool]], list[Any]]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "all_gather_matmul": _all_gather_matmul,
    "all_gather_matmul_many": _all_gather_matmul_many,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
    "matmul_all_reduce": _matmul_all_reduce,
    "matmul_all_to_all": _matmul_all_to_all,
    "all_to_all_matmul": _all_to_all_matmul,
}


def flatten(result: Any) -> list[Any]:
    """The tensors of a result, which may be a tuple of tuples."""
    return [t for part in result for t in flatten(part)] if isinstance(result, tuple) else [result]


def unflatten(like: Any, tensors: list[Any]) -> Any:
    """`tensors`, taken from the front, in the form of `like`."""
    return tuple(unflatten(part, tensors) for part in like) if isinstance(like, tuple) else tensors.pop(0)
