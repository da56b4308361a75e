"""Gradients for PyTorch: an operation or a strategy on tensors that require grad is a node of autograd.

Programs do not call this file: `fompi.all_gather_matmul(x, w)` calls `differentiable` if a tensor requires grad, and a
strategy `attached`. The backward communicates too, so all ranks must run the same backward in the same order. With
`create_graph=True` the operations of the backward of an operation are nodes of autograd again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fompi.base.call_options import CallOptions
from fompi.base.errors import TensorError
from fompi.base.nested import flatten, unflatten
from fompi.ops.adjoints import Call, WithBackward, applied
from fompi.ops.arguments import Arguments
from fompi.ops.operation import Operation
from fompi.tensors import dlpack


def differentiable(operation: Operation, arguments: Arguments, comm: Any, call_options: CallOptions) -> Any:
    """The result of the operation, attached to the graph of its tensors."""
    tensors = arguments.tensors
    needs = [getattr(tensor, "requires_grad", False) for tensor in tensors]
    call = Call(operation, arguments, comm, call_options, applied, needs)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            call.refuse(f": {kind} together with a torch tensor that requires grad: make all of them torch tensors")
        if tensor.is_inference() and call.keeps:
            call.refuse(
                ": a tensor was made under torch.inference_mode, so no backward can read it: pass a clone of it"
            )
        if dlpack.in_forward_mode(tensor):
            call.refuse(": a tensor has a forward-mode tangent, but fompi has no forward mode: use torch.autograd.grad")
    try:
        return attached(call, tensors)
    except RuntimeError as error:
        if "functorch" not in str(error):
            raise
        call.refuse(
            " cannot run inside torch.func (grad, vjp, vmap, ...): use torch.autograd.grad and create_graph=True"
        )


def attached(call: WithBackward, tensors: Sequence[Any]) -> Any:
    """The result of a call, attached to the graph of these tensors."""
    results: list[Any] = []
    outputs = _Node.apply(call, results, *tensors)
    return unflatten(results[0], outputs)


class _Node(torch.autograd.Function):
    """One call in the graph. The forward appends its result to `results`, because autograd returns flat tuples only."""

    @staticmethod
    def forward(ctx: Any, call: WithBackward, results: list[Any], *tensors: Any) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(not call.twice)
        if call.keeps:
            ctx.save_for_backward(*tensors if call.twice else [t for t in tensors if isinstance(t, torch.Tensor)])
        result = call.forward(tensors)
        results.append(result)
        return tuple(flatten(result))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Grad mode is on under `create_graph=True`: then the operations of the adjoint join the graph."""
        call, needs = ctx.call, ctx.needs_input_grad[2:]
        if not call.twice and torch.is_grad_enabled():
            raise TensorError(f"{call.f} has no second derivative: leave out create_graph=True")
        tensors = ctx.saved_tensors or [None] * len(needs)  # raises if one was changed in place since the forward
        gradients = call.backward(tensors, [conjugate(g) for g in grads], needs)
        return None, None, *map(conjugate, gradients)


def conjugate(t: torch.Tensor | None) -> torch.Tensor | None:
    """The complex conjugate. torch defines gradients with conjugates, the adjoints are written without them."""
    return t if t is None or not t.is_complex() else t.conj().resolve_conj()
