"""Gradients for JAX: `fompi.jax.all_gather_matmul(x, w)` is `fompi.all_gather_matmul` with a `custom_vjp`.

It works in `jax.grad` and `jax.vjp`, outside of `jax.jit`. The backward is the adjoint of the operation
(`fompi.ops.adjoints`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from fompi.base.layout import Slices
from fompi.ops import operations
from fompi.ops.adjoints import ADJOINTS, Call, flatten
from fompi.ops.operation import CallOptions, Operation
from fompi.tensors.dlpack import is_tracer

__all__ = list(ADJOINTS)


def _differentiable(operation: Operation) -> Any:
    """The operation as a function that JAX can differentiate."""

    @functools.wraps(operation)
    def call(
        *args: Any,
        comm: Any = None,
        schedule: str = "auto",
        slices: Slices | None = None,
        effort: str = "plan",
        **options: Any,
    ) -> Any:
        arguments = operation.arguments(*args, **options)
        state = Call(operation, arguments, comm, CallOptions(schedule, slices, effort))

        @jax.custom_vjp
        def run(*tensors: jax.Array) -> Any:
            return state.forward(tensors, gradient=False)

        needs: list[bool] = []

        def forward(*primals: Any) -> Any:
            needs[:] = [p.perturbed for p in primals]
            tensors = [p.value for p in primals]
            return state.forward(tensors, gradient=True), tensors if state.keeps else [None] * len(tensors)

        def backward(tensors: Sequence[jax.Array], grads: Any) -> tuple[Any, ...]:
            gradients = [None if isinstance(g, SymbolicZero) else g for g in flatten(grads)]
            if any(map(is_tracer, gradients)):
                state.refuse(": its gradient cannot be differentiated again, and cannot run under jax.jit")
            return tuple(state.backward(tensors, gradients, needs))

        run.defvjp(forward, backward, symbolic_zeros=True)
        return run(*arguments.tensors)

    return call


globals().update({name: _differentiable(getattr(operations, name)) for name in __all__})
