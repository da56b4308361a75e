"""Predicted times of whole training steps, on paper: what overlap would gain on a machine that you do not have.

    python tools/scale.py --model llama-7b --parallel tp --ranks 16 --machine h100-ndr

It makes the figures of docs/inside/scale.md. Pipelines, long sequences and several kinds of parallelism at once:
`fompi layout`.

A layer is a list of fompi's operations and of kernels between them. Each operation is predicted alone
(`fompi.explain`): no operation hides behind another one. The time without overlap is the kernel in one call, and the
best plan of the collective before or after it. A step is the forward and the backward of all layers. It leaves out
embeddings, the loss, norms and the optimizer. Elements have two bytes, attention is dense and causal, nothing is
recomputed.

| `--parallel` | what is sharded                           | operations of a layer                                    |
|--------------|-------------------------------------------|----------------------------------------------------------|
| `tp`         | tokens and columns (TP with SP, Megatron) | all-gather + GEMM, GEMM + reduce-scatter, their adjoints |
| `dp`         | tokens; gradients are summed              | an all-reduce behind the backward of the layer before    |
| `ep`         | tokens and experts, one expert per rank   | all-to-all + GEMM, GEMM + all-to-all, their adjoints     |
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fompi.base import tables
from fompi.base.errors import FompiError, LayoutError, quoted
from fompi.base.layout import Partial, Replicate, Shard, Spec
from fompi.model.machine import Machine
from fompi.planner.layers import DTYPE, MODELS, Transformer, predicted_call

MOST_COUNT = 1 << 30
"""The most ranks, and the most tokens of a rank."""


class LayerPart(NamedTuple):
    """One operation or kernel of a layer: its seconds without and with overlap, and its schedule."""

    what: str
    unfused: float
    fused: float
    schedule: str = ""


class LayerStep(NamedTuple):
    """All parts of a layer, and the time of a step with `layers` layers, in seconds."""

    title: str
    layers: int
    parts: tuple[LayerPart, ...]

    @property
    def unfused(self) -> float:
        return self.layers * sum(part.unfused for part in self.parts)

    @property
    def fused(self) -> float:
        return self.layers * sum(part.fused for part in self.parts)

    @property
    def lines(self) -> list[str | tables.Table]:
        """The title, a row for each part, and the step in one line."""
        rows = [
            (each.what, *(f"{1e3 * s:.3f}" for s in (each.unfused, each.fused)), each.schedule) for each in self.parts
        ]
        heads = "part", "unfused ms", "fused ms", "schedule"
        ratio = self.unfused / self.fused if self.fused else 1.0
        times = f"{1e3 * self.unfused:.1f} ms per step without overlap, {1e3 * self.fused:.1f} ms with overlap"
        total = f"{self.layers} layers: {times}, {ratio:.2f}x (simulated)"
        return [self.title, tables.Table(heads, rows, heads[1:3]), total]

    def __str__(self) -> str:
        return tables.text(*self.lines)


def step(model: str, parallel: str, ranks: int, machine: Machine, tokens: int) -> LayerStep:
    """The Step of a model in MODELS with `tokens` tokens per rank, forward and backward.

    A group of tensor parallelism works on `tokens * ranks` tokens together. Raises LayoutError for an unknown model or
    parallelism, and for numbers out of range.
    """
    if model not in MODELS:
        raise LayoutError(f"no model {quoted(model, MODELS)}; choose {', '.join(MODELS)}")
    if parallel not in PARALLEL:
        raise LayoutError(f"no parallelism {quoted(parallel, PARALLEL)}; choose {', '.join(PARALLEL)}")
    if not (1 <= ranks <= MOST_COUNT and 1 <= tokens <= MOST_COUNT):
        raise LayoutError(f"ranks={ranks}, tokens={tokens}: both must be from 1 to {MOST_COUNT}")
    sizes = MODELS[model]
    if sizes.experts:
        raise LayoutError(f"{model} has {sizes.experts} experts: see `fompi layout`, which predicts whole steps of it")
    title = f"{model}, {parallel} over {ranks} ranks, {tokens} tokens per rank, on {machine.name}, two-byte elements"
    return LayerStep(title, sizes.layers, tuple(PARALLEL[parallel](sizes, ranks, machine, tokens)))


def _operation(what: str, operation: str, specs: tuple[Spec, ...], ranks: int, machine: Machine) -> LayerPart:
    unfused, fused, schedule = predicted_call(operation, specs, ranks, machine)
    return LayerPart(f"{what}: {operation}", unfused, fused, schedule)


def _kernel(what: str, machine: Machine, flops: float, nbytes: float) -> LayerPart:
    seconds = machine.kernel(flops, nbytes)
    return LayerPart(what, seconds, seconds)


def _attention(model: Transformer, machine: Machine, tokens: float, share: int) -> Iterator[LayerPart]:
    """The products of attention without the projections: half of all pairs of tokens, because it is causal.

    The backward has two and a half times as many operations as the forward. `share` ranks share the work.
    """
    flops, nbytes = model.attention(tokens) / share, 8.0 * tokens * model.hidden / share
    yield _kernel("attention, forward", machine, flops, nbytes)
    yield _kernel("attention, backward", machine, 2.5 * flops, 2 * nbytes)


def _tensor(model: Transformer, ranks: int, machine: Machine, tokens: int) -> Iterator[LayerPart]:
    """Tensor parallelism with sequence parallelism: weights are sharded by columns or rows, tokens between them."""
    rows, h, f = tokens * ranks, model.hidden, model.ffn
    wide = {"qkv": h + 2 * model.kv_width, "up": (model.matrices - 1) * f}
    back = {"out": h, "down": f}
    for name, n in wide.items():  # x[rows, h] @ w[h, n]
        x, w, y = _spec(rows, h, Shard(0)), _spec(h, n, Shard(1)), _spec(rows, n, Shard(1))
        yield _operation(name, "all_gather_matmul", (x, w), ranks, machine)
        yield _operation(f"{name}, dx", "matmul_reduce_scatter", (y, _spec(n, h, Shard(0))), ranks, machine)
        yield _operation(f"{name}, dw", "all_gather_weight_gradient", (x, y), ranks, machine)
    for name, n in back.items():  # x[rows, n] @ w[n, h]
        x, w, d = _spec(rows, n, Shard(1)), _spec(n, h, Shard(0)), _spec(rows, h, Shard(0))
        yield _operation(name, "matmul_reduce_scatter", (x, w), ranks, machine)
        operands = (d, _spec(h, n, Shard(1)), x)
        yield _operation(f"{name}, dx and dw", "all_gather_matmul_weight_gradient", operands, ranks, machine)
    yield from _attention(model, machine, rows, ranks)


def _data(model: Transformer, ranks: int, machine: Machine, tokens: int) -> Iterator[LayerPart]:
    """Data parallelism: the sum of a layer's gradients is hidden behind the backward of the layer before it."""
    weights = model.attention_weights + model.ffn_weights
    products = 2.0 * tokens * weights
    yield _kernel("products, forward", machine, products, 2.0 * weights)
    yield from _attention(model, machine, tokens, 1)
    backward = _kernel("products, backward", machine, 2 * products, 4.0 * weights)
    yield backward
    if ranks == 1:
        return
    unfused, messages, schedule = predicted_call("all_reduce", (_spec(weights, 1, Partial()),), ranks, machine)
    behind = backward.fused + 2.5 * model.attention(tokens) / machine.flops_rate
    sums = 0.0
    if machine.lanes == 1:  # sums run on the core of the kernels, so they cannot be hidden
        sums = 6.0 * weights * (ranks - 1) / ranks / machine.memory_rate
    hidden = min(messages - sums, behind)
    exposed = messages - hidden + hidden / model.layers  # nothing is hidden for the first layer: its backward is last
    yield LayerPart("sum of the gradients: all_reduce", unfused, exposed, schedule)


def _experts(model: Transformer, ranks: int, machine: Machine, tokens: int) -> Iterator[LayerPart]:
    """Expert parallelism: each token goes to one expert, evenly. Attention runs on the rank's own tokens."""
    rows, h, f = tokens * ranks, model.hidden, model.ffn
    wide = (model.matrices - 1) * f
    x, y = _spec(rows, h, Shard(0)), _spec(rows, f, Shard(0))
    up, down = _spec(h, wide, Replicate()), _spec(f, h, Replicate())
    hidden = _spec(rows, wide, Shard(0))
    yield _operation("dispatch", "all_to_all_matmul", (x, up), ranks, machine)
    yield _operation("combine", "matmul_all_to_all", (y, down), ranks, machine)
    yield _operation("dispatch, dx", "matmul_all_to_all", (hidden, _spec(wide, h, Replicate())), ranks, machine)
    yield _operation("dispatch, dw", "all_to_all_weight_gradient", (x, hidden), ranks, machine)
    operands = (x, _spec(h, f, Replicate()), y)
    yield _operation("combine, dx and dw", "all_to_all_matmul_weight_gradient", operands, ranks, machine)
    weights = model.attention_weights
    attention = 2.0 * tokens * weights
    yield _kernel("attention projections", machine, attention, 2.0 * weights)
    yield _kernel("attention projections, backward", machine, 2 * attention, 4.0 * weights)
    yield from _attention(model, machine, tokens, 1)


def _spec(rows: int, columns: int, layout: object) -> Spec:
    return Spec((rows, columns), DTYPE, layout)  # type: ignore[arg-type]


PARALLEL: dict[str, Callable[[Transformer, int, Machine, int], Iterator[LayerPart]]] = {
    "tp": _tensor,
    "dp": _data,
    "ep": _experts,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A training step of a whole model, with and without overlap.")
    parser.add_argument("--model", default="llama-7b", help=f"{', '.join(MODELS)} (llama-7b)")
    parser.add_argument("--parallel", default="tp", help=f"{', '.join(PARALLEL)} (tp)")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--machine", default="h100-ndr", help="a preset, or a JSON file (h100-ndr)")
    parser.add_argument("--tokens", type=int, default=2048, help="on each rank (2048)")
    options = parser.parse_args(arguments)
    try:
        machine = Machine.load(options.machine)
        print(step(options.model, options.parallel, options.ranks, machine, options.tokens))
    except FompiError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
