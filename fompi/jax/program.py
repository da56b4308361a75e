"""`fompi.jax.jit`: `jax.jit` for programs with calls of fompi that are short and run often.

The calls of a program run in its order on every rank. This is necessary: a call waits for the other ranks, so two ranks
whose first calls differ would wait for each other for ever. XLA gives no such order. It schedules calls that do not
depend on each other by the sizes of arrays, and ranks with uneven rows then have different schedules. So the calls have
an ordered effect of JAX, which is a token that each call takes and returns, also in loops and in functions that are
called twice.

Under `jax.jit` this token is an argument and a result of the whole program. JAX starts such a program in Python, which
takes about 0.2 ms. Between programs no token is necessary, because XLA runs the programs of one thread on the CPU one
after the other. So `fompi.jax.jit` makes the token inside of the program. JAX sees a program without effects, and
starts it in C++.

XLA orders programs on a mesh of several processes only among themselves. A program that calls fompi there, and one that
calls it on a single device, may run at the same time. That is right, but it needs two threads of XLA: on a single core
wait for one before the other, or use `jax.jit`.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import numpy as np

from fompi.jax import private
from fompi.jax.primitive import ready

PROGRAM = jax.extend.core.Primitive("fompi_program")
"""A program without effects. Its calls of fompi have a token of their own.

JAX drops it if no result is used. So it has results, and it is a whole program of JAX, which returns all of them.
"""

PROGRAM.multiple_results = True


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """jax.jit(function, **options), for a function that calls `fompi.jax`

    The values are those of `jax.jit`. A program starts as fast as one without calls of fompi, which takes some
    microseconds instead of about 0.2 ms. `options` are those of `jax.jit`. Without `function` it returns a decorator.

    Inside another trace (`jax.jit`, `jax.grad`, `jax.vmap` of the result) it is `jax.jit`. So it is if the function
    returns no array, or has other effects too, such as `jax.debug.print`.
    """
    if function is None:
        return functools.partial(jit, **options)
    _ready()
    is_outside = private.outside_of_traces()
    plain, fast = jax.jit(function, **options), jax.jit(_with_own_token(function), **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return (fast if is_outside() else plain)(*args, **kwargs)
        except ValueError as error:  # so JAX raises an error of a program that it starts in C++
            if str(error).startswith("INTERNAL: "):
                raise jax.errors.JaxRuntimeError(str(error)) from None
            raise

    def clear_cache() -> None:
        fast.clear_cache()
        plain.clear_cache()

    for name in ("lower", "trace", "eval_shape"):
        setattr(call, name, getattr(fast, name))
    call.clear_cache = clear_cache  # type: ignore[attr-defined]
    return call


def _with_own_token(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose trace has no effect of fompi."""

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_tensor = [isinstance(leaf, jax.core.Tracer) for leaf in leaves]  # the others are static
        result_tree: Any = None

        def of_tensors(*tensors: Any) -> list[Any]:
            nonlocal result_tree
            rest = iter(tensors)
            args, kwargs = tree.unflatten(next(rest) if t else leaf for t, leaf in zip(is_tensor, leaves, strict=True))
            results, result_tree = jax.tree.flatten(function(*args, **kwargs))
            return results

        tensors = [leaf for leaf, t in zip(leaves, is_tensor, strict=True) if t]
        jaxpr = jax.make_jaxpr(of_tensors)(*tensors)
        body, operands = functools.partial(_run, jaxpr.jaxpr), (*jaxpr.consts, *tensors)
        if jaxpr.effects == {_ready()} and jaxpr.out_avals:
            _finish_at_exit()
            results = PROGRAM.bind(*operands, body=body, results=tuple(jaxpr.out_avals))
        else:
            results = body(*operands)
        return result_tree.unflatten(results)

    return traced


def _run(jaxpr: Any, *operands: Any) -> Sequence[Any]:
    """The results of a traced function."""
    count = len(jaxpr.constvars)
    results: Sequence[Any] = jax.core.eval_jaxpr(jaxpr, operands[:count], *operands[count:])
    return results


@functools.cache
def _ready() -> Any:
    """Give the primitive its rules. Returns the effect of a call."""
    ready()
    effect = private.ordered_effect("fompi")
    PROGRAM.def_abstract_eval(lambda *avals, body, results: results)
    private.lower_with_own_token(PROGRAM, effect)
    return effect


@functools.cache
def _finish_at_exit() -> None:
    """At exit wait for the programs that this thread has started. It is called before MPI ends."""
    one = np.ones(1, np.float32)
    last = jax.jit(lambda x: x + 1).lower(one).compile()  # XLA runs it after all other programs of this thread
    atexit.register(lambda: last(one).block_until_ready())
