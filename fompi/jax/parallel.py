"""The strategies of `fompi.parallel` for JAX: `fompi.jax.column_parallel_linear` in `jax.grad` and `jax.vjp`.

They are the functions of `fompi.parallel`, which `fompi.jax.strategies` differentiates.
"""

from fompi.parallel.expert import moe
from fompi.parallel.sequence import ring_attention, ulysses_attention, usp_attention
from fompi.parallel.tensor import (
    all_reduce_rmsnorm,
    attention,
    column_parallel_linear,
    row_parallel_linear,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)

__all__ = [
    "all_reduce_rmsnorm",
    "attention",
    "column_parallel_linear",
    "moe",
    "ring_attention",
    "row_parallel_linear",
    "ulysses_attention",
    "usp_attention",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
]
