"""A strategy of `fompi.parallel` as one node of autograd. Programs do not call this file: `f(x, w)` does."""

from __future__ import annotations

from typing import Any

import torch

from fompi.base.errors import TensorError
from fompi.base.nested import flatten, unflatten
from fompi.parallel.differentiable import Differentiable


def differentiable(f: Differentiable, given: dict[str, Any]) -> Any:
    """f(**given), attached to the graph of its tensors. The backward computes all gradients, on all ranks alike."""
    leaves = flatten([given[name] for name in f.tensors])
    return _StrategyNode.apply(f, given, *leaves)


class _StrategyNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f: Differentiable, given: dict[str, Any], *leaves: Any) -> Any:
        nested = unflatten([given[name] for name in f.tensors], leaves)
        y, ctx.saved = f.forward(**{**given, **dict(zip(f.tensors, nested, strict=True))})
        ctx.f = f
        ctx.save_for_backward(*(t for t in leaves if isinstance(t, torch.Tensor)))
        return y

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise TensorError(f"{ctx.f} has no second derivative: leave out create_graph=True")
        _ = ctx.saved_tensors  # raises if a tensor was changed in place since the forward
        return None, None, *flatten(ctx.f.backward(ctx.saved, dys[0] if len(dys) == 1 else dys))
