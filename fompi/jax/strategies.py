"""A strategy of `fompi.parallel` as a function with a `custom_vjp`. Programs do not call this file: `f(x, w)` does.

On arrays the forward and the backward of the strategy run at once. In a program that JAX compiles, each is a call on
the host (`_Forward`, `_Backward`), in the order of all calls. There a trace runs the strategy once on drawn values, to
know the shapes of its results: all ranks trace alike. The operations of a strategy agree at each call, as outside of
jit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fompi.base.errors import LayoutError, StateError
from fompi.base.nested import flatten, unflatten
from fompi.jax import ffi, private
from fompi.jax.primitive import CALL, ready
from fompi.jax.sites import Opaque, form_of
from fompi.parallel.differentiable import Differentiable
from fompi.plans.problems import Form
from fompi.tensors import dlpack

MOST_KEPT = 256
"""At most this many forwards of one call may wait for their backward. Of more than that the oldest are forgotten."""


class _Kept:
    """What a forward keeps for its backward: JAX passes it on and does not look into it."""

    def __init__(self, saved: Any):
        self.saved = saved


jax.tree_util.register_pytree_node(_Kept, lambda kept: ((), kept), lambda kept, _: kept)


def differentiable(f: Differentiable, given: dict[str, Any]) -> Any:
    """f(**given), with a gradient. The backward computes all gradients, on all ranks alike."""
    traced = [name for name in given if name not in f.tensors and private.is_abstract(given[name])]
    if "cu_seqlens" in traced:
        raise LayoutError(f"fompi.jax.{f.__name__}: cu_seqlens= must be a Python value: use static_argnums of jax.jit")
    arguments = [given[name] for name in (*f.tensors, *traced)]  # traced: such as tokens, which have no gradient
    leaves = flatten(arguments)
    present = [t is not None for t in leaves]
    tensors = [t for t in leaves if t is not None]

    def forward(*tensors: Any) -> tuple[Any, Any]:
        rest = iter(tensors)
        nested = unflatten(arguments, [next(rest) if is_there else None for is_there in present])
        return f.forward(**{**given, **dict(zip((*f.tensors, *traced), nested, strict=True))})

    def backward(saved: Any, dy: Any) -> list[Any]:
        gradients = [*flatten(f.backward(saved, dy)), *(None for _ in traced)]
        return [g for g, is_there in zip(gradients, present, strict=True) if is_there]

    if private.is_staged(tensors):
        return _under_trace(f.__name__, forward, backward, [jnp.asarray(t) for t in tensors])

    def keeping(*tensors: Any) -> tuple[Any, _Kept]:
        y, saved = forward(*tensors)
        return y, _Kept(saved)

    run = jax.custom_vjp(lambda *tensors: forward(*tensors)[0])
    run.defvjp(keeping, lambda kept, dy: tuple(backward(kept.saved, dy)))
    return run(*tensors)


# ------------------------------------------------------------------------------------------------- compiled programs


def _under_trace(name: str, forward: Callable[..., Any], backward: Callable[..., Any], tensors: Sequence[Any]) -> Any:
    """The result of a strategy on tracers. Collective: the ranks trace alike."""
    ready()
    ffi.register()
    given = list(map(form_of, tensors))
    y, saved = forward(*itertools.starmap(_drawn, enumerate(given)))
    results = list(map(_form, flatten(y)))
    nested = unflatten(y, range(len(results)))

    def result(ys: Sequence[Any]) -> Any:
        return unflatten(nested, ys)

    def keeping(*tensors: Any) -> tuple[Any, tuple[Any, _Kept]]:
        site = _Forward(name, forward, given, results, keeps=True)
        *ys, handle = CALL.bind(*tensors, site=site)
        return result(ys), (handle, _Kept(site))

    def pull(kept: tuple[Any, _Kept], dy: Any) -> tuple[Any, ...]:
        handle, site = kept[0], kept[1].saved
        dys = [jnp.asarray(d) for d in flatten(dy)]
        has_gradient = [g is not None for g in backward(saved, result(list(map(_zeros, results))))]
        forms = [form for form, has in zip(given, has_gradient, strict=True) if has]
        grads = iter(CALL.bind(handle, *dys, site=_Backward(name, site, backward, nested, forms)))
        return tuple(next(grads) if has else None for has in has_gradient)

    run = jax.custom_vjp(lambda *tensors: result(CALL.bind(*tensors, site=_Forward(name, forward, given, results))))
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

    def __init__(
        self, name: str, forward: Callable[..., Any], given: list[Form], results: list[Form], keeps: bool = False
    ):
        super().__init__(name, given, [*results, Form((), "int32")] if keeps else results)
        self._forward, self._keeps = forward, keeps
        self._numbers = itertools.count()
        self._saved: dict[int, Any] = {}
        self._used: set[int] = set()

    def __call__(self, given: Sequence[Any], results: Sequence[Any]) -> None:
        for number in self._used:
            del self._saved[number]
        self._used.clear()
        y, saved = self._forward(*_lent(given, self.given))
        ys = flatten(y)
        for array, tensor in zip(results, ys, strict=False):
            np.copyto(array, dlpack.borrow(tensor).array)
        if self._keeps:
            number = next(self._numbers)
            self._saved[number] = saved
            self._saved.pop(number - MOST_KEPT, None)
            results[-1][...] = number

    def take(self, number: int) -> Any:
        """What a forward has kept."""
        if number not in self._saved:
            raise StateError(
                f"the backward of fompi.jax.{self.name}: its forward is forgotten. Under jax.jit at most {MOST_KEPT} "
                f"forwards of a call may wait for their backward"
            )
        self._used.add(number)
        return self._saved[number]


class _Backward(Opaque):
    """The backward of a strategy."""

    def __init__(self, name: str, forward: _Forward, backward: Callable[..., Any], nested: Any, grads: list[Form]):
        *ys, handle = forward.results
        super().__init__(f"the backward of {name}", [handle, *ys], grads)
        self._forward, self._backward, self._nested = forward, backward, nested

    def __call__(self, given: Sequence[Any], results: Sequence[Any]) -> None:
        handle, *dys = given
        lent = _lent(dys, self.given[1:])
        dy = unflatten(self._nested, lent)
        gradients = [g for g in self._backward(self._forward.take(int(handle)), dy) if g is not None]
        for array, gradient in zip(results, gradients, strict=True):
            np.copyto(array, dlpack.borrow(gradient).array)
