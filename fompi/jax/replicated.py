"""The gradients of `gradient="replicated"`: those of a loss that all ranks compute alike and that counts once.

`fompi.ops.adjoints` has the gradients of the sum of the losses of all ranks. They differ only where the result of an
operation is replicated. There the gradient dy is the same on all ranks, and the backward needs no message:

| y =                     | dx =                   | dw =      |
|-------------------------|------------------------|-----------|
| all_reduce(x)           | dy                     |           |
| all_gather(x)           | the rows of dy here    |           |
| broadcast(x)            | dy on the root, else 0 |           |
| matmul_all_reduce(x, w) | dy @ w.T               | x.T @ dy  |
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from fompi.base.errors import LayoutError
from fompi.jax import private
from fompi.ops.adjoints import Call, _of_term
from fompi.ops.arguments import Arguments
from fompi.ops.operation import CallOptions
from fompi.ops.operations import all_reduce

COPY = jax.extend.core.Primitive("fompi_copy")
"""The identity on a gradient that all ranks have alike. Its dual is an all-reduce: the sum of all ranks."""

CONVENTIONS = ("sum", "replicated")


def check(operation: str, gradient: Any) -> None:
    """Raise LayoutError if `gradient` is no convention."""
    if gradient not in CONVENTIONS:
        raise LayoutError(f"fompi.jax.{operation}: gradient={gradient!r} must be 'sum' or 'replicated'")


def _copied(call: Call, dy: Any) -> Any:
    """dy, whose dual is an all-reduce."""
    if not isinstance(dy, jax.core.Tracer):
        return dy
    _ready()
    return COPY.bind(dy, comm=call.comm, call_options=call.call_options)


@functools.cache
def _ready() -> None:
    """Give the primitive its rules."""

    def transpose(ct: Any, _: Any, *, comm: Any, call_options: CallOptions) -> list[Any]:
        from fompi.jax.custom_vjp import run

        return [ct if private.is_zero(ct) else run(all_reduce, Arguments(ct), comm, call_options, "replicated")]

    private.register_copy(COPY, transpose)


class ReplicatedCall(Call):
    """A call whose replicated result has a loss that counts once."""

    def backward(self, tensors: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
        name, a, extents = self.operation.name, self.arguments.with_tensors(tensors), self.extents
        if all(g is None for g in grads):
            return [None] * len(tensors)
        dy = grads[0]
        if name == "all_reduce":
            return [_of_term(self, a, _copied(self, dy))]
        if name == "broadcast":
            return [dy if extents.rank == a.root else jnp.zeros_like(dy)]
        if name == "all_gather":
            return [self._mine(dy)]
        if name == "matmul_all_reduce":
            (w,) = a.weights
            dx = dy @ w.T if needs[0] else None
            dw = jnp.einsum("...k,...n->kn", a.x, dy) if needs[1] else None
            return [dx, dw, *([dy.sum(tuple(range(dy.ndim - 1)))] if a.biases[0] is not None else [])]
        if name == "all_gather_matmul_many" and dy is not None:
            rest = super().backward(tensors, [None, *grads[1:]], needs)
            dx = self._mine(dy) if needs[0] else None
            return [dx if rest[0] is None else rest[0] + dx, *rest[1:]]
        return super().backward(tensors, grads, needs)

    def _mine(self, dy: Any) -> Any:
        """The rows of dy that came from this rank."""
        rows, rank = self.extents.rows, self.extents.rank
        first = sum(rows[:rank])
        return dy[(slice(None),) * (self.arguments.dim % dy.ndim) + (slice(first, first + rows[rank]),)]
