"""A pipeline whose stages are modules: autograd is their backward.

pipe = fompi.torch.Pipeline([stage], comm=mesh["pp"], microbatches=4, activations=(16, 64), loss=loss)
losses = pipe.step(inputs, targets)           # p.grad has the sum over the micro-batches
ys = pipe.forward(inputs)                     # an evaluation
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fompi.base.errors import LayoutError, ShapeError, TensorError
from fompi.base.layout import offsets
from fompi.engine.handshake import agree
from fompi.parallel import pipeline, section
from fompi.parallel.shares import dealt
from fompi.tensors import dlpack
from fompi.torch.reshard import Travelling, on_device, travel


class Pipeline(pipeline.Pipeline):
    """losses = [loss(modules[-1](... modules[0](x)), t) for x, t in zip(inputs, targets)], and p.grad of their sum

    `modules` are those of this rank, each from one tensor to one tensor: module rank, then module rank + ranks, and so
    on. `loss(y, target)` is a tensor with one element; `step` returns it, detached. The gradients of the parameters are
    added to `p.grad`, one micro-batch after the other, in the order of the schedule. Hooks run in each of them: give
    `microbatches` to `ZeroDataParallel` too.

    autograd differentiates the whole loss: also the parameters of the loss itself, terms of it that do not depend on y,
    targets that require grad, and inputs that do (at the end of the step; `input_gradients` has them, too). The first
    stage saves the products of the gradient of an input that does not require one: `input_gradients` has None for it.
    Under `torch.no_grad()` a step computes losses only, on all ranks. `forward` is for evaluations: no gradients, no
    loss.

    With `shares` the modules are all layers of the model, and this rank has a run of them.

    Modules whose parameters are on a GPU make a pipeline of that device. A module without parameters needs `device=`.

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
        def value_and_graph(y: torch.Tensor, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.set_grad_enabled(self._has_gradients):
                value = _tensor(loss(y, target), "the loss")
            if value.numel() != 1:
                raise ShapeError(f"the loss has the shape {tuple(value.shape)}: it must have one element")
            return value.detach(), value

        self._has_gradients = True
        self._layers = [*modules] if options.get("shares") is not None else []
        self._carrier, self._made_with = comm, {"loss": loss, **options}
        parameter = next((p for module in modules for p in getattr(module, "parameters", list)()), None)
        if parameter is not None:
            options.setdefault("device", dlpack.device_of(parameter))
        made = [Stage(module, self) for module in modules]
        given = value_and_graph if callable(loss) else loss
        super().__init__(made, comm=comm, loss=given, framework="torch", **options)

    def step(self, inputs: Sequence[Any] | None = None, targets: Sequence[Any] | None = None) -> list[Any] | None:
        self._has_gradients = torch.is_grad_enabled()
        return super().step(inputs, targets)

    step.__doc__ = pipeline.Pipeline.step.__doc__

    @section.in_section("reshard")
    def reshard(self, shares: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Layers go to other ranks, from the next step on: their parameters, buffers and what `optimizer` keeps.

        For a pipeline with `shares`. `optimizer` has the parameters of all layers, on all ranks: of those that a rank
        does not run it keeps nothing. Collective, between two steps. Raises the errors of the constructor on all ranks;
        nothing has changed then. Without `shares` make another pipeline, and let `fompi.reshard_state` fill its stages.
        """
        runs, error = list[range](), None
        in_it = {id(p) for group in (optimizer.param_groups if optimizer is not None else ()) for p in group["params"]}
        try:
            if not self._layers:
                raise LayoutError(
                    "this pipeline has no shares=: make one with other stages. fompi.reshard_state fills it"
                )
            for given in (self._made_with["shares"], shares):
                ends = offsets(dealt(given, "layers", len(self._layers), self.comm.size))
                runs.append(range(*ends[self.comm.rank :][:2]))
            if optimizer is not None and any(id(p) not in in_it for i in runs[1] for p in self._layers[i].parameters()):
                raise LayoutError("optimizer= must have the parameters of all layers, on all ranks")
        except Exception as refusal:
            error = refusal
        agree(self.comm, "reshard of a pipeline", error)
        section.begin(self.comm)
        named, (before, after) = dict[str, Travelling](), runs
        for i, module in enumerate(self._layers):
            for name, t in (*module.named_parameters(), *module.named_buffers()):
                named[f"{i}.{name}"] = Travelling(t, i in before, i in after and i not in before)
        found = travel(named, optimizer, self.comm)
        for name, (t, is_here, _, _) in named.items():
            if name in found:
                t.detach().copy_(found[name][0])
                if optimizer is not None and found[name][1]:
                    optimizer.state[t] = {key: on_device(value, t.device) for key, value in found[name][1].items()}
            elif is_here and int(name.partition(".")[0]) not in after:
                t.grad = None
                if optimizer is not None:
                    optimizer.state.pop(t, None)
        self.close()
        Pipeline.__init__(self, self._layers, comm=self._carrier, **self._made_with | {"shares": shares})

    def _pull_inputs(self) -> None:
        if self.input_gradients is not None and not self._has_gradients:
            self.input_gradients = [None] * self.microbatches
        elif self.input_gradients is not None:
            wanted = [(x, g) for x, g in zip(self._inputs, self.input_gradients, strict=True) if _requires_grad(x)]
            torch.autograd.backward([x for x, _ in wanted], [g for _, g in wanted])

    def _joined(self, layers: Sequence[Any]) -> Stage:
        return Stage(torch.nn.Sequential(*[stage.module for stage in layers]), self)

    @property
    def first(self) -> Stage | None:
        """The first stage of the pipeline, if this rank has it."""
        return self._by_number.get(0)

    @property
    def last(self) -> Stage | None:
        """The last stage, if this rank has it."""
        return self._by_number.get(self.problem.stages - 1)

    @property
    def _mode(self) -> str:  # type: ignore[override]
        return "" if self._has_gradients else " without gradients"


class Stage:
    """A module as a stage of `pipe`."""

    def __init__(self, module: torch.nn.Module, pipe: Pipeline):
        self.module, self.pipe = module, pipe

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """(y, the graph). Kernels may run in another thread, where the grad mode of the program does not hold."""
        with torch.set_grad_enabled(self.pipe._has_gradients):
            leaf = x.detach()
            if leaf.is_floating_point():
                leaf.requires_grad_(x.requires_grad or self is not self.pipe.first)
            y = self._of_module(leaf)
        return y, (leaf, y)

    def evaluate(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self._of_module(x)

    def backward(self, saved: tuple[torch.Tensor, torch.Tensor], dy: torch.Tensor) -> torch.Tensor | None:
        """The gradient of x, None for an input that requires none. Those of the parameters are added to p.grad.

        Behind the last stage dy is the loss: it may depend on more than y, and need not depend on y.
        """
        x, y = saved
        root, gradient = (dy, None) if self is self.pipe.last else (y, dy)
        if root.requires_grad:
            torch.autograd.backward(root, gradient)
        return torch.zeros_like(x) if x.grad is None and x.requires_grad else x.grad

    def _of_module(self, x: torch.Tensor) -> torch.Tensor:
        return _tensor(self.module(x), f"the forward of {type(self.module).__name__}")


def _requires_grad(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _tensor(result: Any, who: str) -> torch.Tensor:
    if not isinstance(result, torch.Tensor):
        raise TensorError(f"{who} must be a tensor, not {type(result).__name__}")
    return result
