"""The sizes of models, and how long the operations of a layer take with and without overlap (`predicted_call`).

`tools/scale.py` adds up a training step of them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from fompi.base.layout import Spec
from fompi.model.lower_bound import call_seconds, most_rows_worked
from fompi.model.machine import Machine
from fompi.planner.explain import explain
from fompi.plans.meaning import MEANING
from fompi.plans.specs import from_specs

DTYPE = "int16"
"""Stands for bfloat16: two bytes per element. Products and sums of int16 are not widened, so no message has four bytes
per element."""

SIMULATED, MOST_OPS = 3, 2_000
"""How many candidates are simulated for an operation, besides those without overlap, and the most ops of a rank."""


class Transformer(NamedTuple):
    """The sizes of a transformer with causal attention. `hidden` is its width.

    Its MLP has `matrices` matrices of the shape (hidden, ffn): two, or three if it is gated. A sequence has `sequence`
    tokens. Attention has `heads` heads, and `kv_heads` for keys and values. `source` is the paper that gives the sizes.

    With `experts`, `ffn` is the width of one expert. A token goes to `top_k` of them, and to all of the `shared` ones.
    `tied`: the embedding is also the output layer.
    """

    layers: int
    hidden: int
    ffn: int
    matrices: int
    sequence: int
    source: str
    heads: int
    kv_heads: int
    vocabulary: int
    experts: int = 0
    top_k: int = 0
    shared: int = 0
    tied: bool = False

    @property
    def kv_width(self) -> int:
        """The columns of all keys. The values have as many."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def attention_weights(self) -> int:
        """The parameters of the four projections of a layer."""
        return 2 * self.hidden * (self.hidden + self.kv_width)

    @property
    def ffn_weights(self) -> int:
        """The parameters of an MLP, or of one expert."""
        return self.matrices * self.hidden * self.ffn

    @property
    def parameters(self) -> int:
        """All parameters, without biases."""
        mlps = self.experts + self.shared or 1
        layer = self.attention_weights + mlps * self.ffn_weights + self.hidden * (2 + self.experts)
        return self.layers * layer + (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def active(self) -> int:
        """The parameters that multiply a token."""
        mlps = self.top_k + self.shared or 1
        layer = self.attention_weights + mlps * self.ffn_weights + self.hidden * self.experts
        return self.layers * layer + self.vocabulary * self.hidden

    def attention(self, tokens: float) -> float:
        """The operations of the forward of attention in one layer, without the projections.

        A causal token attends to half of its sequence. The backward has two and a half times as many.
        """
        return 2.0 * tokens * self.sequence * self.hidden

    def step_flops(self, tokens: float) -> float:
        """The operations of forward and backward, without what is computed again: three times those of the forward.

        The backward of attention counts twice its forward here, as in published figures.
        """
        return 3 * (2.0 * tokens * self.active + self.layers * self.attention(tokens))


_LLAMA_3 = "Grattafiori et al. 2024 (Llama 3), table 3"

MODELS = {
    "gpt2-1.5b": Transformer(
        48, 1600, 6400, 2, 1024, "Radford et al. 2019: 48 layers, width 1600", 25, 25, 50257, tied=True
    ),
    "gpt3-175b": Transformer(96, 12288, 49152, 2, 2048, "Brown et al. 2020, table 2.1", 96, 96, 51200, tied=True),
    "llama-7b": Transformer(
        32, 4096, 11008, 3, 2048, "Touvron et al. 2023: 32 layers, width 4096, gated 11008", 32, 32, 32000
    ),
    "llama-1b": Transformer(
        16, 2048, 8192, 3, 8192, "Meta 2024 (Llama 3.2): 16 layers, width 2048, gated 8192", 32, 8, 128256, tied=True
    ),
    "llama-8b": Transformer(32, 4096, 14336, 3, 8192, _LLAMA_3, 32, 8, 128256),
    "llama-70b": Transformer(80, 8192, 28672, 3, 8192, _LLAMA_3, 64, 8, 128256),
    "llama-405b": Transformer(126, 16384, 53248, 3, 8192, _LLAMA_3, 128, 8, 128256),
    "mixtral-8x7b": Transformer(32, 4096, 14336, 3, 8192, "Jiang et al. 2024, table 1", 32, 8, 32000, 8, 2),
    "deepseek-moe-16b": Transformer(
        28, 2048, 1408, 3, 4096, "Dai et al. 2024 (first layer dense there)", 16, 16, 102400, 64, 6, 2
    ),
    "ul2-20b": Transformer(
        64, 4096, 16384, 3, 512, "Tay et al. 2022: 32 encoder and 32 decoder layers, width 4096, 16384", 16, 16, 32128
    ),
}


@lru_cache(maxsize=1024)
def predicted_call(operation: str, specs: tuple[Spec, ...], ranks: int, machine: Machine) -> tuple[float, float, str]:
    """Seconds of the best plan without overlap, seconds of the best plan, and its schedule."""
    at, sizes = from_specs(operation, specs, ranks)
    explanation = explain(at(0), sizes, machine, at, SIMULATED, MOST_OPS)
    problem, best = at(0), explanation.winner
    if problem.operation == problem.moves:  # a plain collective: there is no kernel to hide it behind
        return best.seconds, best.seconds, str(best.candidate)
    collective = _moved(problem.moves, problem.multiplies_first, specs)
    rows = most_rows_worked(problem, sizes)
    kernel = call_seconds(problem, machine, rows)
    unfused = min(explanation.unfused.seconds, kernel + predicted_call(problem.moves, (collective,), ranks, machine)[1])
    if best.seconds < unfused:
        return unfused, best.seconds, str(best.candidate)
    return unfused, unfused, "no overlap"


def _moved(moves: str, multiplied: bool, specs: tuple[Spec, ...]) -> Spec:
    """The global tensor that the collective of an operation moves: x, or the product."""
    x, *others = specs
    columns = others[0].shape[1] if multiplied else x.shape[1]
    return Spec((x.shape[0], columns), DTYPE, MEANING[moves].x)
