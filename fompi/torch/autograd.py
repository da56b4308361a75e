"""Gradients for PyTorch: a fompi operation on tensors that require grad is a node of autograd.

Nothing needs to be called here: `fompi.all_gather_matmul(x, w)` comes to `differentiable` by itself. The backward is
the fused dual (`fompi.ops.adjoints`). All ranks must run the same backward, in the same order, as they do the same
forward.
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
            call.refuse(f": {type(tensor).__name__} beside a torch tensor that requires grad; make it one of torch too")
    shape: list[Any] = []
    outputs = _Fused.apply(call, shape, *arguments.tensors)
    return unflatten(shape[0], list(outputs))


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, shape: list[Any], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(tensors if call.keeps else ()))
        result = call.forward([t.detach() for t in tensors], gradient=True)
        shape.append(result)
        return tuple(flatten(result))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        tensors = [t.detach() for t in ctx.saved_tensors] or [None] * len(needs)
        found = ctx.call.backward(tensors, [_conjugate(g) for g in grads], needs)
        return None, None, *map(_conjugate, found)


def _conjugate(t: torch.Tensor | None) -> torch.Tensor | None:
    """torch's gradient is the conjugate of the transpose's product; a tensor of real numbers stays as it is."""
    return None if t is None else t.conj().resolve_conj()
