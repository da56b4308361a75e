"""Operations in programs that JAX traces: `jax.jit`, `jax.vmap`, `jax.lax.scan`, and gradients inside of them.

    results = under_trace(operation, arguments, comm, call_options, gradient)

Two primitives:

| primitive       | meaning                                                    | rules                              |
|-----------------|------------------------------------------------------------|------------------------------------|
| `fompi`         | the call of a site (`fompi.jax.sites`)                     | run, lowering, jvp, batching       |
| `fompi_tangent` | its derivative, linear in the tangents; it is never run    | transposition: `fompi.ops.adjoints` |

The first has an ordered effect. So all calls of a program run in its order, also in loops, in functions that are called
twice, and in programs that run one after the other. JAX never drops such a call, used or not. So all ranks make the
same calls.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from fompi.base.errors import StateError, TensorError
from fompi.jax import ffi, private
from fompi.jax.replicated import ReplicatedCall
from fompi.jax.sites import Form, Half, Site, filled, site_of
from fompi.ops.adjoints import Call
from fompi.ops.arguments import Arguments
from fompi.ops.operation import CallOptions, Operation
from fompi.plans.problems import is_flat
from fompi.tensors import dlpack

CALL = jax.extend.core.Primitive("fompi")
TANGENT = jax.extend.core.Primitive("fompi_tangent")
CALL.multiple_results = TANGENT.multiple_results = True


def under_trace(
    operation: Operation[Any], arguments: Arguments, comm: Any, call_options: CallOptions, gradient: str
) -> Any:
    """The result of a call on tracers. Collective: the ranks trace alike."""
    site, tensors = traced(operation, arguments, comm, call_options, gradient)
    return filled(site.nested, CALL.bind(*tensors, site=site))


def traced(
    operation: Operation[Any], arguments: Arguments, comm: Any, call_options: CallOptions, gradient: str = "sum"
) -> tuple[Site, list[Any]]:
    """The site of a call on tracers, and its tensors."""
    ready()
    tensors = [t if isinstance(t, jax.Array) else jnp.asarray(t) for t in arguments.tensors]
    site = site_of(operation, arguments.with_tensors(tensors), comm, call_options, gradient)
    _finish_at_exit()
    return site, tensors


@functools.cache
def _finish_at_exit() -> None:
    """At exit wait for compiled programs that still run. It is called before MPI ends: that was registered first."""
    atexit.register(jax.effects_barrier)


@functools.cache
def ready() -> None:
    """Give the primitives their rules. Raises StateError if this version of JAX lacks a name that they need."""
    absent = private.missing()
    if absent:
        raise StateError(
            f"fompi under jax.jit: jax {jax.__version__} has no {absent[0]}. fompi was checked on jax "
            f"{', '.join(private.CHECKED)}: install it, or call fompi.jax outside of jax.jit"
        )
    effect = private.ordered_effect("fompi")
    CALL.def_effectful_abstract_eval(lambda *avals, site: (_avals(site.results), {effect}))
    CALL.def_impl(_run)
    TANGENT.def_abstract_eval(lambda *avals, site, wanted: _avals(site.results))
    TANGENT.def_impl(_no_forward_mode)

    def lower(ctx: Any, *operands: Any, site: Site) -> Any:
        return private.lower_ordered(ctx, operands, ffi.TARGET, effect, site, site=np.int64(site.number))

    private.register(CALL, jvp=_jvp, batch=_batch, lower=lower)
    private.register(
        TANGENT, jvp=_no_forward_mode, transpose=_transpose, batch=_no_forward_mode, lower=_no_forward_mode
    )


def _avals(forms: Sequence[Form]) -> list[Any]:
    return [jax.core.ShapedArray(form.shape, np.dtype(form.dtype)) for form in forms]


def _run(*tensors: Any, site: Site) -> list[Any]:
    """Run a site on arrays, outside of a compiled program."""
    arena = site.comm.engine.arena
    results = [arena.take(form.shape, dlpack.STORAGE[form.dtype]) for form in site.results]
    site([dlpack.borrow(jnp.asarray(t)).array for t in tensors], results)
    return [dlpack.lend(y, form.dtype, "jax") for y, form in zip(results, site.results, strict=True)]


# ----------------------------------------------------------------------------------------------------- gradients


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, site: Site) -> tuple[list[Any], list[Any]]:
    results = CALL.bind(*primals, site=site)
    wanted = tuple(not private.is_zero(t) for t in tangents)
    if isinstance(site, Half) and any(wanted):
        name = f"fompi.jax.{site.operation.name}"
        raise TensorError(f"{name}.start has no gradient: call {name}(...), or pass jax.lax.stop_gradient(x)")
    if not any(wanted):
        return results, private.zeros(_avals(site.results))
    call = call_of(site)
    if site.arguments.op == "prod":
        raise TensorError(f'fompi.{site.operation.name}: op="prod" has no gradient: use jax.lax.stop_gradient(x)')
    moving = [t for t, is_wanted in zip(tangents, wanted, strict=True) if is_wanted]
    kept = primals if call.keeps else ()
    return results, TANGENT.bind(*moving, *kept, site=site, wanted=wanted)


def call_of(site: Site) -> Call:
    """The call of a site, for its backward."""
    kind = ReplicatedCall if site.gradient == "replicated" else Call
    call = kind(site.operation, site.arguments, site.comm, site.call_options, _apply)
    call._extents, call._number, call.shape = site.extents, site.call, site.given[0].shape
    return call


def _transpose(cotangents: Sequence[Any], *inputs: Any, site: Site, wanted: tuple[bool, ...]) -> list[Any]:
    """The gradients of the tensors that moved. What was kept gets none."""
    kept = list(inputs[sum(wanted) :])
    grads = [None if private.is_zero(ct) else ct for ct in cotangents]
    gradients = call_of(site).backward(kept or [None] * len(wanted), grads, wanted)
    moved = [g for g, is_wanted in zip(gradients, wanted, strict=True) if is_wanted]
    return [*moved, *(None for _ in kept)]


def _apply(operation: Operation[Any], arguments: Arguments, comm: Any, call_options: CallOptions) -> Any:
    """The result of an operation of the backward."""
    from fompi.jax.custom_vjp import run

    return run(operation, arguments, comm, call_options)


def _no_forward_mode(*_: Any, site: Site, **__: Any) -> Any:
    raise TensorError(
        f"fompi.{site.operation.name} has no forward mode (jax.jvp, jax.jacfwd, jax.hessian): use the grad of a grad"
    )


# ----------------------------------------------------------------------------------------------------------- vmap


def _batch(tensors: Sequence[Any], dims: Sequence[Any], *, site: Site) -> tuple[list[Any], list[int]]:
    """One call for the whole batch if only x is batched, else one call after the other.

    A batch of x is one more dimension behind the rows. Only a product with a batched weight is no such call.
    """
    if isinstance(site, Half):
        raise TensorError(f"fompi.jax.{site.operation.name}.start is not possible inside jax.vmap: call it outside")
    a, name = site.arguments, site.operation.name
    alone = dims[0] is not None and all(d is None for d in dims[1:])
    flat = name == "sendrecv" or is_flat(name)
    if not alone or (name == "reduce" and not site.given[0].shape):
        return _one_by_one(tensors, dims, site)
    if flat:
        at = len(site.given[0].shape)
        x = jnp.moveaxis(tensors[0], dims[0], at)
        arguments = a.with_tensors([x, *tensors[1:]])
    elif a.operands:
        return _one_by_one(tensors, dims, site)
    else:
        dim = a.dim % len(site.given[0].shape)
        at = dim + 1
        x = jnp.moveaxis(tensors[0], dims[0], at)
        arguments = replace(a.with_tensors([x, *tensors[1:]]), dim=dim)
    batched = site_of(site.operation, arguments, site.comm, site.call_options, site.gradient)
    results = CALL.bind(*arguments.tensors, site=batched)
    return results, [at] * len(results)


def _one_by_one(tensors: Sequence[Any], dims: Sequence[Any], site: Site) -> tuple[list[Any], list[int]]:
    moving = [jnp.moveaxis(t, d, 0) for t, d in zip(tensors, dims, strict=True) if d is not None]

    def one(parts: Sequence[Any]) -> Any:
        rest = iter(parts)
        return CALL.bind(*(t if d is None else next(rest) for t, d in zip(tensors, dims, strict=True)), site=site)

    results = jax.lax.map(one, moving)
    return list(results), [0] * len(results)
