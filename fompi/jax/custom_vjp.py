"""Operations for JAX: `fompi.jax.all_gather_matmul(x, w)` is `fompi.all_gather_matmul` with a gradient.

On arrays, and in `jax.grad` and `jax.vjp` outside of `jax.jit`, it is a `custom_vjp` that calls the operation. On
tracers without values it is a primitive (`fompi.jax.primitive`). The backward of both is the adjoint of the operation
(`fompi.ops.adjoints`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from fompi.base.call_options import CallOptions
from fompi.base.errors import LayoutError
from fompi.base.nested import flatten
from fompi.jax import private
from fompi.jax.primitive import call_of, shared, start, under_trace
from fompi.jax.sites import TracedCall
from fompi.ops.adjoints import DIFFERENTIABLE, Call, arguments_of, check_convention
from fompi.ops.arguments import Arguments
from fompi.ops.operation import Operation
from fompi.tensors.dlpack import is_tracer

__all__ = list(DIFFERENTIABLE)


def _differentiable(operation: Operation[Any]) -> Any:
    """The operation as a function that JAX can differentiate."""

    @functools.wraps(operation)
    def call(*args: Any, gradient: str = "sum", **options: Any) -> Any:
        arguments, comm, call_options = operation.read(args, options)
        try:
            check_convention(f"fompi.jax.{operation.name}", gradient)
        except LayoutError as error:
            operation.refuse(error, comm)
        return run(operation, arguments, comm, call_options, gradient)

    call.start = lambda *args, **options: start(TracedCall(operation, *operation.read(args, options)))  # type: ignore[attr-defined]
    return call


def attached(call: Any, tensors: Sequence[Any]) -> Any:
    """The result of a call (`fompi.ops.adjoints.WithBackward`) on these tensors, with a gradient."""

    @jax.custom_vjp
    def of_tensors(*tensors: Any) -> Any:
        return call.forward(tensors)

    needs: list[bool] = []

    def forward(*primals: Any) -> Any:
        needs[:] = [p.perturbed for p in primals]
        tensors = [p.value for p in primals]
        result = _forward(call, tensors, needs) if call.twice else call.forward(tensors)
        return result, tensors if call.keeps else [None] * len(tensors)

    def backward(tensors: Sequence[Any], grads: Any) -> tuple[Any, ...]:
        gradients = flatten(grads)
        for i, g in enumerate(gradients):
            if isinstance(g, SymbolicZero):
                gradients[i] = None if call.twice else jnp.zeros(g.shape, g.dtype)
        return tuple(call.backward(tensors, gradients, needs))

    of_tensors.defvjp(forward, backward, symbolic_zeros=True)
    return of_tensors(*tensors)


def _forward(call: Call, tensors: Sequence[Any], needs: Sequence[bool]) -> Any:
    """The result of an operation, whose backward comes.

    In the grad of a grad, the tensors of the inner forward are tracers of the outer grad. Then the inner forward and
    backward are differentiated again.
    """
    inner = replace(call, needs=needs)
    if any(map(private.is_forward, tensors)):
        given = call.arguments.with_tensors(tensors)
        convention = "sum" if call.share is None else "replicated"
        made = TracedCall(call.operation, given, call.comm, call.call_options, convention)
        site, result = under_trace(_applied, made)
        inner = call_of(site)
    elif any(map(is_tracer, tensors)):
        result = attached(inner, tensors)
    else:
        result = inner.forward(tensors)
    call.take(inner)
    return result


def run(
    operation: Operation[Any], arguments: Arguments, comm: Any, call_options: CallOptions, gradient: str = "sum"
) -> Any:
    """The result of a call, which JAX can differentiate."""
    tensors = arguments.tensors
    if private.is_staged(tensors) or any(map(private.is_forward, tensors)):
        return under_trace(_applied, TracedCall(operation, arguments, comm, call_options, gradient))[1]
    share = shared if gradient == "replicated" else None
    return attached(Call(operation, arguments, comm, call_options, _applied, share=share), tensors)


def _applied(
    operation: Operation[Any],
    tensors: Sequence[Any],
    options: dict[str, Any],
    comm: Any,
    call_options: CallOptions,
    words: str = "",
    gradient: str = "sum",
) -> Any:
    """The result of an operation of the backward."""
    arguments = arguments_of(operation, tensors, options, words)
    if any(map(is_tracer, arguments.tensors)):
        return run(operation, arguments, comm, call_options, gradient)
    return operation.run(arguments, comm, call_options)


globals().update({name: _differentiable(operation) for name, operation in DIFFERENTIABLE.items()})
