"""The layers of a step that is one plan (`step.TrainingStep`): what each kind of them computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fompi.base.errors import PlanError
from fompi.parallel.arrays import Array
from fompi.parallel.step_problem import KINDS, LayerForm

Gradients = Sequence[Array | None]
"""Of each of the weights, None for one that a kernel does not read. One that no kernel of any rank reads in a step is
left alone: the optimizer does not see it."""


class Layer(Protocol):
    """y = x + sum of the terms of all ranks of tp, for each row on its own; without `residual` the sum alone.

    `weights` are as `parameters`, with the numbers of this step. A layer without tensor parallelism is one term. Every
    layer may have `stay = True`: then its parameters stay on this rank between steps, and are gathered anew as soon as
    they are updated, instead of at the next use.
    """

    parameters: Sequence[Array]
    residual: bool

    def forward(self, weights: Sequence[Array], x: Array) -> tuple[Array, Any]:
        """(the term of this rank, what the backward needs)."""

    def backward(self, weights: Sequence[Array], saved: Any, dy: Array) -> tuple[Array, Gradients]:
        """(the term of the gradient of x, the gradients of the weights). The first layer may have None of x."""


class AttentionLayer(Protocol):
    """A layer whose rows mix: y = x + sum over tp of output(attention(qkv(x))), with the heads of this rank of tp.

    `qkv` and `output` get some rows at a time, and `attention` what `qkv` has returned for all rows of the micro-batch:
    those of all ranks of tp, in order. What they return stays on this rank, and is of any form.
    """

    kind: str = "attention"
    parameters: Sequence[Array]
    residual: bool

    def qkv(self, weights: Sequence[Array], x: Array) -> tuple[Any, Any]:
        """(what attention needs of these rows, what the backward needs)."""

    def attention(self, qkv: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        """(one output for each entry of qkv, what the backward needs)."""

    def output(self, weights: Sequence[Array], o: Any) -> tuple[Array, Any]:
        """(the term of this rank, what the backward needs)."""

    def output_backward(self, weights: Sequence[Array], saved: Any, dy: Array) -> tuple[Any, Gradients]:
        """(the gradient of o, those of the weights)."""

    def attention_backward(self, saved: Any, do: Sequence[Any]) -> Sequence[Any]:
        """The gradient of each entry of qkv."""

    def qkv_backward(self, weights: Sequence[Array], saved: Any, dqkv: Any) -> tuple[Array, Gradients]:
        """(the term of the gradient of x, the gradients of the weights)."""


class EmbeddingLayer(Protocol):
    """x = forward(inputs): the first layer, with the same parameters on all ranks of tp. Inputs are of any form."""

    kind: str = "embedding"
    parameters: Sequence[Array]

    def forward(self, weights: Sequence[Array], inputs: Any) -> tuple[Array, Any]:
        """(x, what the backward needs), for the rows of this rank."""

    def backward(self, weights: Sequence[Array], saved: Any, dx: Array) -> Gradients:
        """The gradients of the weights."""


class HeadLayer(Protocol):
    """value = loss of the rows of this rank: the last layer, with the same parameters on all ranks of tp."""

    kind: str = "head"
    parameters: Sequence[Array]

    def loss(self, weights: Sequence[Array], y: Array, targets: Any) -> tuple[Any, Array, Any]:
        """(value, the gradient of y, what the backward needs)."""

    def backward(self, weights: Sequence[Array], saved: Any) -> Gradients:
        """The gradients of the weights. It runs later, when the pipeline runs empty."""


def form_of(number: int, layer: Any) -> LayerForm:
    """What a plan needs to know of a layer. Raises PlanError if it is none, or of an unknown kind."""
    kind = getattr(layer, "kind", "rows")
    if kind not in KINDS:
        raise PlanError(f"layer {number} is of the kind {kind!r}, which is none of {', '.join(KINDS)}")
    if not hasattr(layer, "parameters"):
        raise PlanError(f"make({number}) has returned {layer!r}, which is no layer: it has no `parameters`")
    sizes = [w.size for w in layer.parameters]
    return LayerForm(sum(sizes), kind, bool(getattr(layer, "stay", False)), len(sizes))
