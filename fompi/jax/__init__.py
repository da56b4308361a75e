"""Gradients for JAX: `fompi.jax.all_gather_matmul(x, w)` is `fompi.all_gather_matmul` with a `custom_vjp`.

For `jax.grad` and `jax.vjp` outside of `jax.jit`. The backward is the fused dual (`fompi.duals`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from fompi import ops
from fompi.duals import _DUALS, Call, flatten
from fompi.ops import Operation

__all__ = list(_DUALS)


def _differentiable(operation: Operation) -> Any:
    @functools.wraps(operation)
    def call(*args: Any, comm: Any = None, schedule: str = "auto", slices: int | None = None, **options: Any) -> Any:
        arguments = operation.arguments(*args, **options)
        state = Call(operation, arguments, comm, schedule, slices)

        @jax.custom_vjp
        def run(*tensors: jax.Array) -> Any:
            return state.forward(tensors)

        def forward(*tensors: jax.Array) -> Any:
            return state.forward(tensors), tensors

        def backward(tensors: Sequence[jax.Array], grads: Any) -> tuple[Any, ...]:
            return tuple(state.backward(tensors, flatten(grads), [True] * len(tensors)))

        run.defvjp(forward, backward)
        return run(*arguments.tensors)

    return call


globals().update({name: _differentiable(getattr(ops, name)) for name in __all__})
