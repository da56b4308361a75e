"""A pipeline whose stages are modules: autograd is their backward.

pipe = fompi.torch.Pipeline([stage], comm=mesh["pp"], microbatches=4, activations=(16, 64), loss=loss)
losses = pipe.step(inputs, targets)           # p.grad has the sum over the micro-batches
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fompi.base.errors import TensorError
from fompi.parallel import pipeline


class Pipeline(pipeline.Pipeline):
    """losses = [loss(modules[-1](... modules[0](x)), t) for x, t in zip(inputs, targets)], and p.grad of their sum

    `modules` are those of this rank, each from one tensor to one tensor: module rank, then module rank + ranks, and so
    on. `loss(y, target)` is a tensor with one element; `step` returns it, detached. The gradients of the parameters are
    added to `p.grad`, one micro-batch after the other, in the order of the schedule. Hooks run in each of them: give
    `microbatches` to `ZeroDataParallel` too.

    The other options are those of `fompi.parallel.pipeline.Pipeline`. The zero-bubble schedules need stages whose
    backward has two parts, so they raise PlanError. A module that does not return a tensor is a TensorError.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        *,
        comm: Any = None,
        loss: Callable[[torch.Tensor, Any], torch.Tensor],
        **options: Any,
    ):
        def loss_and_gradient(y: torch.Tensor, target: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
            with torch.enable_grad():
                leaf = y.detach().requires_grad_()
                value = _tensor(loss(leaf, target), "the loss")
            (gradient,) = torch.autograd.grad(value, leaf)
            return value.detach(), gradient

        made = [Stage(module) for module in modules]
        given = loss_and_gradient if callable(loss) else loss
        super().__init__(made, comm=comm, loss=given, framework="torch", **options)


class Stage:
    """A module as a stage of a pipeline."""

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """(y, the graph). Kernels may run in another thread, where the grad mode of the program does not hold."""
        with torch.enable_grad():
            leaf = x.detach()
            if leaf.is_floating_point():
                leaf.requires_grad_()
            y = _tensor(self.module(leaf), f"the forward of {type(self.module).__name__}")
        return y.detach(), (leaf, y)

    def backward(self, saved: tuple[torch.Tensor, torch.Tensor], dy: torch.Tensor) -> torch.Tensor | None:
        """The gradient of x. Those of the parameters are added to p.grad."""
        x, y = saved
        if y.requires_grad:
            torch.autograd.backward(y, dy)
        return x.grad


def _tensor(result: Any, who: str) -> torch.Tensor:
    if not isinstance(result, torch.Tensor):
        raise TensorError(f"{who} must be a tensor, not {type(result).__name__}")
    return result
