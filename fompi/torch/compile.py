"""torch.compile: a call of an operation or a strategy is a node of its graph. All else that communicates is left alone.

Programs do not call this file. An operation calls `traced` where the compiler reads it, a strategy `traced_strategy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from fompi.base.call_options import fitting
from fompi.engine.communicator import Communicator
from fompi.ops.adjoints import CONVENTIONS
from fompi.ops.arguments import SUMS
from fompi.ops.messages import Transfer
from fompi.ops.operation import Operation
from fompi.ops.pending import Pending
from fompi.parallel import interleave
from fompi.parallel.differentiable import Differentiable
from fompi.runtime.executor import Executor
from fompi.torch import private
from fompi.torch.operators import (
    INTEGERS,
    NEEDED,
    OPERATORS,
    PUBLIC,
    TENSORS,
    as_sizes,
    filled,
    name_of,
    name_order,
    positional,
    required,
    wanted,
)
from fompi.torch.strategy_operators import GROUPED, of_call
from fompi.tuning.adaptive import Adaptive

HIDDEN: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (Operation, ("start",)),
    (Pending, ("done", "wait")),
    (Transfer, ("done", "wait")),
    (Communicator, ("agree", "barrier")),
    (Executor, ("__call__", "start", "wait")),
    (Adaptive, ("__call__", "start", "wait")),
    (interleave, ("run_interleaved",)),
)
"""What communicates, and a compiled function may call. torch.compile reads neither them nor what they
call: a call is a graph break.
"""

CALLS = {name: operator.call for name, operator in OPERATORS.items()}
EXCHANGES = [
    name for name, operator in OPERATORS.items() if operator.moves == "all_to_all" and "root" not in operator.own
]
KEYWORDS = {name: [*operator.operation.__signature__.parameters] for name, operator in OPERATORS.items()}
POSITIONAL = {name: positional(operator.operation) for name, operator in OPERATORS.items()}
REQUIRED = {name: required(operator.operation) for name, operator in OPERATORS.items()}


def _eager(
    operation: Operation[Any], args: tuple[Any, ...], options: dict[str, Any], gradient: str | None, arriving: Any
) -> Any:
    if gradient is None:
        return operation(*args, **options)
    return PUBLIC[operation.name](*args, gradient=gradient, arriving=arriving, **options)


def _outside(reason: str) -> Callable[..., Any]:
    """A call that is a graph break."""
    hidden: Callable[..., Any] = torch.compiler.disable(_eager, reason=f"fompi communicates: {reason}")
    return hidden


def _strategy(f: Differentiable, args: Sequence[Any], options: dict[str, Any]) -> Any:
    return f(*args, **options)


OUTSIDE_STRATEGY: dict[str, Callable[..., Any]] = {
    reason: torch.compiler.disable(_strategy, reason=f"fompi communicates: {why}")
    for reason, why in {
        "unknown": "only the other ranks know the rows that come; fompi.parallel.expert.moe is a node",
        "wrong": "these arguments are refused",
        "tensor": "all tensors must be torch tensors",
        "value": "an option is a tensor: pass a Python value",
        "old": "torch before 2.12 cannot read a fompi.Communicator",
    }.items()
}
"""The calls of strategies that are graph breaks, by the reason that the compiler reports."""


def traced_strategy(f: Differentiable, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """What a call of a strategy is in the graph. The compiler reads this function."""
    if not private.COMPILES_OBJECTS:
        return OUTSIDE_STRATEGY["old"](f, args, options)
    result, reason = of_call(f, args, options)
    return result if reason is None else OUTSIDE_STRATEGY[reason](f, args, options)


OUTSIDE = {
    "unknown": _outside("the compiler cannot know what fompi.send and fompi.recv bring; fompi.sendrecv is a node"),
    "out": _outside("out= is written by the call; leave it out"),
    "counts": _outside(
        "only the other ranks know how many rows the counts= of an all-to-all bring; leave counts= out if all are "
        "equal, or use fompi.torch.<operation>(..., counts=..., arriving=[the rows from each rank])"
    ),
    "experts": _outside("rows that go to experts take no gradient='replicated' and no arriving="),
    "value": _outside("an option is a tensor: pass a Python value"),
    "tensor": _outside("all tensors must be torch tensors"),
    "old": _outside(
        "torch before 2.12 cannot read a fompi.Communicator: use fompi.torch.<operation>(..., comm=a group of torch)"
    ),
    "comm": _outside("comm= must be a fompi.Communicator: use fompi.torch.communicator(group)"),
    "certify": _outside("the error of certify=True is a number of the program"),
    "wrong": _outside("these arguments are refused"),
}
"""The calls that the compiler does not take into its graph, by the reason that it reports."""


def traced(
    operation: Operation[Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
    gradient: str | None = None,
    arriving: Any = None,
) -> Any:
    """What `fompi.<operation>(*args, **options)` is in the graph; with a gradient: `fompi.torch.<operation>`.

    The compiler reads this function.
    """
    name, given = operation.name, dict(options)
    if name in GROUPED and private.COMPILES_OBJECTS and gradient in (None, "sum") and arriving is None:
        result, reason = of_call(GROUPED[name], args, options)
        return result if reason is None else OUTSIDE[reason](operation, args, options, gradient, arriving)
    reason = why_outside(name, args, given, gradient, arriving)
    if reason is not None:
        return OUTSIDE[reason](operation, args, options, gradient, arriving)
    gradient = "sum" if gradient is None else gradient
    given["words"] = wanted(given, gradient)
    result = CALLS[name](gradient=gradient, arriving=None if arriving is None else list(arriving), **given)
    return (result[0], tuple(result[1])) if name == "all_gather_matmul_many" else result


@private.run_by_the_compiler
def carried_by(comm: Communicator, name: str, dtype: torch.dtype, op: str) -> tuple[tuple[str, Any], ...]:
    """The keywords of a call that its communicator carries, for tensors of this dtype."""
    how = fitting(comm.how, torch.empty(0, dtype=dtype), op)
    return tuple((key, str(value) if key == "order" else value) for key, value in how.items() if key in KEYWORDS[name])


def why_outside(
    name: str, args: tuple[Any, ...], given: dict[str, Any], gradient: str | None, arriving: Any
) -> str | None:
    """Make `given`, the keywords of a call, the arguments of its operator. If it cannot be one: a key of OUTSIDE."""
    if name not in CALLS:
        return "experts" if name in GROUPED else "unknown"
    if gradient is not None and gradient not in CONVENTIONS:
        return "wrong"
    if len(args) > len(POSITIONAL[name]):
        return "wrong"
    given.update(zip(POSITIONAL[name], args, strict=False))
    if any([key not in given for key in REQUIRED[name]]) or any([key not in KEYWORDS[name] for key in given]):
        return "wrong"
    if given.pop("out", None) is not None:
        return "out"
    if given.pop("certify", False):
        return "certify"
    comm = given.pop("comm", None)
    if gradient is not None and isinstance(comm, DeviceMesh):
        if comm.ndim != 1:
            return "wrong"
        comm = comm.get_group()
    if gradient is not None and isinstance(comm, torch.distributed.ProcessGroup):
        comm = comm.group_name
    if comm is not None and not isinstance(comm, Communicator) and (gradient is None or not isinstance(comm, str)):
        return "comm"
    if isinstance(comm, Communicator) and not private.COMPILES_OBJECTS:
        return "old"
    x = given.get("x")
    x = x[0] if isinstance(x, (list, tuple)) and len(x) > 0 else x
    if isinstance(comm, Communicator) and isinstance(x, torch.Tensor):
        for key, value in carried_by(comm, name, x.dtype, given.get("op", "sum")):
            given.setdefault(key, value)
    given["comm"] = name_of(comm)
    if name == "all_gather_matmul_many":
        given["ws"], biases = list(given["ws"]), list(given.get("biases") or ())
        if len(biases) > len(given["ws"]):
            return "wrong"
        given["biases"] = filled(given["ws"], biases)
    name_order(given)
    if not isinstance(given.get("order", "any"), str):
        return "wrong"
    if name in SUMS and isinstance(given["x"], (list, tuple)):
        if len(given["x"]) == 0 or not given.get("order", "any").startswith("canonical("):
            return "wrong"
        given["leaves"], given["x"] = list(given["x"]), given["x"][0]
    for key in (*TENSORS, "leaves"):
        tensors = given.get(key)
        for t in tensors if isinstance(tensors, list) else [tensors]:
            if t is not None and not isinstance(t, torch.Tensor):
                return "tensor"
    for key in INTEGERS:
        value = given.get(key)
        if key in given and not isinstance(value, int) and (value is not None or key in NEEDED):
            return "wrong"
    if given.get("columns") is not None:
        given["columns"] = list(given["columns"])
    if given.get("counts") is not None:
        if name in EXCHANGES and arriving is None and given.get("split_dim") is None:
            return "counts"
        given["counts"] = list(given["counts"])
    if given.get("op") == "prod" and torch.is_grad_enabled() and given["x"].requires_grad:
        return "wrong"
    if given.get("slices") is not None:
        given["slices"] = as_sizes(given["slices"])
    if any([t.requires_grad for t in given.get("leaves") or []]):
        return "wrong"
    return None


for _owner, _names in HIDDEN:
    for _name in _names:
        setattr(_owner, _name, torch.compiler.disable(getattr(_owner, _name), reason="fompi communicates"))
