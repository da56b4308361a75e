"""Gradients for PyTorch: a fompi operation on tensors that require grad is a node of autograd.

Nothing needs to be called here: `fompi.all_gather_matmul(x, w)` comes to `differentiable` by itself. The backward is
the fused dual (`fompi.duals`). All ranks must run the same backward, in the same order, as they do the same forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fompi.duals import Call, flatten, unflatten
from fompi.ops import Arguments, Operation


def differentiable(operation: Operation, arguments: Arguments, comm: Any, schedule: str, slices: int | None) -> Any:
    """The result of the operation, attached to the graph of its tensors."""
    call = Call(operation, arguments, comm, schedule, slices)
    shape: list[Any] = []
    outputs = _Fused.apply(call, shape, *arguments.tensors)
    return unflatten(shape[0], list(outputs))


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, shape: list[Any], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        result = call.forward([t.detach() for t in tensors])
        shape.append(result)
        return tuple(flatten(result))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        tensors = [t.detach() for t in ctx.saved_tensors]
        needs = ctx.needs_input_grad[2:]
        found = ctx.call.backward(tensors, grads, needs)
        return None, None, *found
