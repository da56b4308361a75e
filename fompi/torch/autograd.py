"""Gradients for PyTorch: an operation on tensors that require grad is a node of autograd.

Programs do not call this file: `fompi.all_gather_matmul(x, w)` calls `differentiable` if a tensor requires grad. The
backward is the adjoint of the operation (`fompi.ops.adjoints`). It communicates too, so all ranks must run the same
backward in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fompi.ops.adjoints import Call, flatten, unflatten
from fompi.ops.arguments import Arguments
from fompi.ops.operation import CallOptions, Operation


def differentiable(operation: Operation, arguments: Arguments, comm: Any, call_options: CallOptions) -> Any:
    """The result of the operation, attached to the graph of its tensors."""
    call = Call(operation, arguments, comm, call_options)
    for tensor in arguments.tensors:
        if not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            call.refuse(f": {kind} beside a torch tensor that requires grad: make all of them torch tensors")
    results: list[Any] = []
    outputs = _Node.apply(call, results, *arguments.tensors)
    return unflatten(results[0], list(outputs))


class _Node(torch.autograd.Function):
    """One call in the graph. The forward appends its result to `results`, because autograd returns flat tuples only."""

    @staticmethod
    def forward(ctx: Any, call: Call, results: list[Any], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(tensors if call.keeps else ()))
        result = call.forward([t.detach() for t in tensors], gradient=True)
        results.append(result)
        return tuple(flatten(result))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        tensors = [t.detach() for t in ctx.saved_tensors] or [None] * len(needs)
        gradients = ctx.call.backward(tensors, [_conjugate(g) for g in grads], needs)
        return None, None, *map(_conjugate, gradients)


def _conjugate(t: torch.Tensor | None) -> torch.Tensor | None:
    """The complex conjugate. torch defines gradients with conjugates, the adjoints are written without them."""
    return None if t is None else t.conj().resolve_conj()
