"""A whole training step as one plan (`fompi.parallel.step`) whose layers are modules: autograd is their backward.

how = {"optimizer": AdamW(1e-3), "loss": loss, "microbatches": 4, "shape": (rows, features)}
with fompi.torch.TrainingStep(make, layers=8, mesh={"dp": 2, "tp": 2}, **how) as step:
    losses = step(inputs, targets)
    step.write_back()                            # into the parameters of the modules
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fompi.base.errors import TensorError
from fompi.parallel import step
from fompi.parallel.step import Gradients

DTYPES = (torch.float16, torch.float32, torch.float64)

Arrays = Sequence[Any]


class TrainingStep(step.TrainingStep):
    """losses = loss of all modules; parameters -= the update of the sum of their gradients over all micro-batches

    `make(l)` is module l on this rank of tp, without communication: `module(x)` is its term of y = x + sum over tp with
    `module.residual`, or of the sum alone. `module.kind` says what else it is (`fompi.parallel.step`), and
    `module.stay = True` that its parameters stay gathered:

    - "attention": `qkv(x)`, `attention(list of these, of all rows in order)` and `output(o)`, all of tensors.
    - "embedding": `module(inputs)`, of any inputs.
    - "head": `module(y, targets)` is the loss. Without a head, `loss(y, targets)` is.

    Tensors are in host memory, and parameters of one dtype, which `dtype=` names (float32 if it is left out). While the
    step is open, a rank keeps a part of them; those of the modules are what the last step computed with. The other
    options and errors are those of `fompi.parallel.step.TrainingStep`.
    """

    def __init__(self, make: Callable[[int], torch.nn.Module], *, loss: Any = None, **options: Any):
        self.modules: dict[int, torch.nn.Module] = {}
        """The modules of this rank."""

        def layer(number: int) -> Any:
            module = self.modules[number] = make(number)
            return LayerOfModule(module)

        super().__init__(layer, loss=None if loss is None else _loss(loss), **options)

    def write_back(self) -> None:
        """Copy the parameters to the modules, whole on each rank that computes with them. Collective."""
        for number, arrays in self.gathered().items():
            for p, array in zip(self.modules[number].parameters(), arrays, strict=True):
                p.data = torch.from_numpy(array)


class Recorded(NamedTuple):
    """A call with its graph."""

    leaves: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]


def _leaf(x: Any) -> torch.Tensor:
    tensor = (x if isinstance(x, torch.Tensor) else torch.from_numpy(x)).detach()
    return tensor.requires_grad_(tensor.is_floating_point())


def _pull(recorded: Recorded, gradients: Arrays, also: Sequence[torch.Tensor] = ()) -> list[Any]:
    """The gradients of the leaves and of these parameters. None: no output that has a gradient depends on it."""
    pairs = [(y, g) for y, g in zip(recorded.outputs, gradients, strict=True) if y.requires_grad and g is not None]
    given = [g if isinstance(g, torch.Tensor) else torch.from_numpy(g) for _, g in pairs]
    wanted = [*recorded.leaves, *also]
    found = pairs and torch.autograd.grad([y for y, _ in pairs], wanted, given, allow_unused=True)
    return [*found] or [None] * len(wanted)


def _loss(loss: Callable[[torch.Tensor, Any], torch.Tensor]) -> Callable[[Any, Any], tuple[Any, Any]]:
    def value_and_gradient(y: Any, target: Any) -> tuple[Any, Any]:
        leaf = _leaf(y)
        with torch.enable_grad():
            value = loss(leaf, target)
        return value.item(), torch.autograd.grad(value, leaf)[0].numpy()

    return value_and_gradient


class LayerOfModule:
    """A module as a layer of any kind. Its parameters become views of what the step has gathered."""

    def __init__(self, module: torch.nn.Module):
        self.module, self.tensors = module, [*module.parameters()]
        for name, p in module.named_parameters():
            if p.device.type != "cpu" or not p.requires_grad or p.dtype not in DTYPES:
                text = f"is {p.dtype} on {p.device}" + (" without a gradient" if not p.requires_grad else "")
                raise TensorError(f"the parameter {name} {text}: a step has float16, 32 or 64 in host memory, trained")
        self.parameters = [p.detach().numpy() for p in self.tensors]
        self.kind, self.stay = getattr(module, "kind", "rows"), getattr(module, "stay", False)
        self.residual = getattr(module, "residual", False)

    def call(self, function: Callable[..., Any], weights: Arrays, *inputs: Any) -> tuple[torch.Tensor, Recorded]:
        """function(*inputs) with these weights. Inputs that are no arrays of the step are passed on as they are."""
        for p, w in zip(self.tensors, weights, strict=True):
            if p.data_ptr() != w.ctypes.data:
                p.data = torch.from_numpy(w)
        first, *rest = inputs
        with torch.enable_grad():
            y = function(first, *rest)
        is_leaf = isinstance(first, torch.Tensor) and first.requires_grad and self.kind != "embedding"
        leaves = [first] if is_leaf else []
        return y, Recorded(leaves, [y])

    def gradients(self, weights: Arrays, recorded: Recorded, *given: Any) -> tuple[Any, Gradients]:
        """(that of the input, those of the weights)."""
        found = [None if g is None else g.numpy() for g in _pull(recorded, given, self.tensors)]
        count = len(recorded.leaves)
        return found[0] if count else None, found[count:]

    def forward(self, weights: Arrays, x: Any) -> tuple[Any, Recorded]:
        y, recorded = self.call(self.module, weights, x if self.kind == "embedding" else _leaf(x))
        return y.detach().numpy(), recorded

    def backward(self, weights: Arrays, saved: Any, *dy: Any) -> Any:
        """Of a head, autograd has had all gradients at once: those of the parameters have waited as they are."""
        if self.kind == "head":
            return saved
        dx, gradients = self.gradients(weights, saved, *dy)
        return gradients if self.kind == "embedding" else (dx, gradients)

    def qkv(self, weights: Arrays, x: Any) -> tuple[torch.Tensor, Recorded]:
        return self.call(self.module.qkv, weights, _leaf(x))

    def attention(self, qkv: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Recorded]:
        leaves = [_leaf(each) for each in qkv]
        with torch.enable_grad():
            outputs = [*self.module.attention(leaves)]
        return outputs, Recorded(leaves, outputs)

    def output(self, weights: Arrays, o: torch.Tensor) -> tuple[Any, Recorded]:
        y, recorded = self.call(self.module.output, weights, _leaf(o))
        return y.detach().numpy(), recorded

    def attention_backward(self, saved: Recorded, do: Arrays) -> Sequence[torch.Tensor]:
        return _pull(saved, do)

    output_backward = qkv_backward = gradients

    def loss(self, weights: Arrays, y: Any, targets: Any) -> tuple[Any, Any, Gradients]:
        value, recorded = self.call(self.module, weights, _leaf(y), targets)
        dy, gradients = self.gradients(weights, recorded, torch.ones_like(value))
        return value.item(), dy, gradients
