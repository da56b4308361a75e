"""A strategy of `fompi.parallel` as a function with a `custom_vjp`. Programs do not call this file: `f(x, w)` does.

It works in `jax.grad` and `jax.vjp`, outside of `jax.jit`.
"""

from __future__ import annotations

from typing import Any

import jax

from fompi.parallel.differentiable import Differentiable, flatten, unflatten


class _Kept:
    """What a forward keeps for its backward: JAX passes it on and does not look into it."""

    def __init__(self, saved: Any):
        self.saved = saved


jax.tree_util.register_pytree_node(_Kept, lambda kept: ((), kept), lambda kept, _: kept)


def differentiable(f: Differentiable, given: dict[str, Any]) -> Any:
    """f(**given), with a gradient. The backward computes all gradients, on all ranks alike."""
    arguments = [given[name] for name in f.tensors]
    leaves = flatten(arguments)
    present = [t is not None for t in leaves]

    def forward(*tensors: Any) -> tuple[Any, _Kept]:
        rest = iter(tensors)
        nested = unflatten(arguments, [next(rest) if is_there else None for is_there in present])
        y, saved = f.forward(**{**given, **dict(zip(f.tensors, nested, strict=True))})
        return y, _Kept(saved)

    def backward(kept: _Kept, dy: Any) -> tuple[Any, ...]:
        gradients = flatten(f.backward(kept.saved, dy))
        return tuple(g for g, is_there in zip(gradients, present, strict=True) if is_there)

    run = jax.custom_vjp(lambda *tensors: forward(*tensors)[0])
    run.defvjp(forward, backward)
    return run(*(t for t in leaves if t is not None))
