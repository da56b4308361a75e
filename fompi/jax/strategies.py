"""The strategies of `fompi.parallel` for JAX: `fompi.jax.column_parallel_linear` in `jax.grad` and `jax.vjp`.

They are the functions of `fompi.parallel`, which call `differentiable` on tracers.

On arrays the forward and the backward of the strategy run at once. In a program that JAX compiles, each is a call on
the host (`_Forward`, `_Backward`), in the order of all calls. There a trace runs the strategy once on drawn values, to
know the shapes of its results: all ranks trace alike. The operations of a strategy agree at each call, as outside of
jit.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fompi.base.errors import LayoutError
from fompi.base.nested import flatten, unflatten
from fompi.jax import ffi, private
from fompi.jax.custom_vjp import attached
from fompi.jax.primitive import CALL, ready
from fompi.jax.sites import Opaque, form_of
from fompi.parallel.differentiable import Differentiable, Forwards, StrategyCall
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
from fompi.plans.problems import Form
from fompi.tensors import dlpack

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


def differentiable(f: Differentiable, given: dict[str, Any]) -> Any:
    """f(**given), with a gradient. The backward computes all gradients, on all ranks alike."""
    traced = [name for name in given if name not in f.tensors and private.is_abstract(given[name])]
    if "cu_seqlens" in traced:
        raise LayoutError(f"fompi.jax.{f.__name__}: cu_seqlens= must be a Python value: use static_argnums of jax.jit")
    call = StrategyCall(f, given, traced)  # traced: such as tokens, which have no gradient
    tensors = [t for t in flatten([given[name] for name in (*f.tensors, *traced)]) if t is not None]
    return (_under_trace if private.is_staged(tensors) else attached)(call, tensors)


# ------------------------------------------------------------------------------------------------- compiled programs


class _Kept:
    """The site of a forward, for its backward: JAX passes it on and does not look into it."""

    def __init__(self, site: _Forward):
        self.site = site


jax.tree_util.register_pytree_node(_Kept, lambda kept: ((), kept), lambda kept, _: kept)


def _under_trace(call: StrategyCall, tensors: Sequence[Any]) -> Any:
    """The result of a strategy on tracers. Collective: the ranks trace alike."""
    ready()
    ffi.register()
    tensors = list(map(jnp.asarray, tensors))
    given = list(map(form_of, tensors))
    tried = copy.copy(call)
    y = tried.forward(list(itertools.starmap(_drawn, enumerate(given))))
    results = list(map(_form, flatten(y)))

    def keeping(*tensors: Any) -> tuple[Any, tuple[Any, _Kept]]:
        site = _Forward(call, given, results, keeps=True)
        *ys, handle = CALL.bind(*tensors, site=site)
        return unflatten(y, ys), (handle, _Kept(site))

    def pull(kept: tuple[Any, _Kept], dy: Any) -> tuple[Any, ...]:
        handle, site = kept[0], kept[1].site
        dys = [jnp.asarray(d) for d in flatten(dy)]
        has_gradient = [g is not None for g in tried.backward((), list(map(_zeros, results)), ())]
        forms = [form for form, has in zip(given, has_gradient, strict=True) if has]
        grads = iter(CALL.bind(handle, *dys, site=_Backward(site, forms)))
        return tuple(next(grads) if has else None for has in has_gradient)

    run = jax.custom_vjp(lambda *tensors: unflatten(y, CALL.bind(*tensors, site=_Forward(call, given, results))))
    run.defvjp(keeping, pull)
    return run(*tensors)


def _drawn(seed: int, form: Form) -> Any:
    """A random tensor: a router that is all zeros would send the rows of all ranks to the same experts."""
    dtype = np.dtype(form.dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        return _zeros(form)
    values = np.random.default_rng(seed).standard_normal(form.shape, np.float32).astype(dtype)
    return dlpack.lend(values.view(dlpack.STORAGE[form.dtype]), form.dtype, "jax")


def _zeros(form: Form) -> Any:
    return dlpack.lend(np.zeros(form.shape, dlpack.STORAGE[form.dtype]), form.dtype, "jax")


def _form(tensor: Any) -> Form:
    borrowed = dlpack.borrow(tensor)
    return Form(tuple(borrowed.array.shape), borrowed.dtype)


def _lent(arrays: Sequence[Any], forms: Sequence[Form]) -> list[Any]:
    """Copies of arrays that XLA owns, as tensors."""
    return [dlpack.Lent(array.copy(), form.dtype) for array, form in zip(arrays, forms, strict=True)]


class _Forward(Opaque):
    """The forward of a strategy. With `keeps` its last result is a number, with which the backward finds what it kept.

    JAX may take a forward out of a loop, and call its backward several times. So what was kept is forgotten when the
    next forward begins after a backward.
    """

    def __init__(self, call: StrategyCall, given: list[Form], results: list[Form], keeps: bool = False):
        super().__init__(call.f.__name__, given, [*results, Form((), "int32")] if keeps else results)
        self._call, self._keeps = call, keeps
        self.forwards, self.used = Forwards(f"fompi.jax.{self.name}"), set[int]()

    def __call__(self, given: Sequence[Any], results: Sequence[Any]) -> None:
        while self.used:
            self.forwards.forget(self.used.pop())
        call = copy.copy(self._call)
        ys = flatten(call.forward(_lent(given, self.given)))
        for array, tensor in zip(results, ys, strict=False):
            np.copyto(array, dlpack.borrow(tensor).array)
        if self._keeps:
            results[-1][...] = self.forwards.put(call)


class _Backward(Opaque):
    """The backward of a strategy."""

    def __init__(self, forward: _Forward, grads: list[Form]):
        *ys, handle = forward.results
        super().__init__(f"the backward of {forward.name}", [handle, *ys], grads)
        self._forward = forward

    def __call__(self, given: Sequence[Any], results: Sequence[Any]) -> None:
        handle, *dys = given
        call = self._forward.forwards.take(int(handle))
        self._forward.used.add(int(handle))
        gradients = call.backward((), _lent(dys, self.given[1:]), ())
        for array, gradient in zip(results, (g for g in gradients if g is not None), strict=True):
            np.copyto(array, dlpack.borrow(gradient).array)
