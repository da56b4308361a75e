"""Operations in programs that JAX traces: `jax.jit`, `jax.vmap`, `jax.lax.scan`, and gradients inside of them.

    site, result = under_trace(apply, TracedCall(operation, arguments, comm, call_options, gradient))

Two primitives:

| primitive       | meaning                                | rules                                       |
|-----------------|----------------------------------------|---------------------------------------------|
| `fompi`         | the call of a site (`fompi.jax.sites`) | run, lowering, jvp, transposition, batching |
| `fompi_tangent` | its derivative, linear in the tangents | transposition: `fompi.ops.adjoints`         |
|                 |                                        | others: those of the calls in `_pushed`     |

Both have an ordered effect. So all calls of a program run in its order, also in loops, in functions that are called
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

from fompi.base.call_options import CallOptions
from fompi.base.errors import StateError, TensorError
from fompi.base.nested import flatten, unflatten
from fompi.jax import ffi, private
from fompi.jax.ffi import Target
from fompi.jax.sites import Apply, BoundSite, End, Half, Opaque, Site, Start, TracedCall, site_of
from fompi.ops.adjoints import Call
from fompi.ops.operation import Operation
from fompi.ops.operations import all_reduce
from fompi.plans.meaning import is_flat
from fompi.tensors import dlpack

CALL = jax.extend.core.Primitive("fompi")
TANGENT = jax.extend.core.Primitive("fompi_tangent")
CALL.multiple_results = TANGENT.multiple_results = True

COPY = jax.extend.core.Primitive("fompi_copy")
"""The identity on a gradient that all ranks have alike. Its dual is an all-reduce: the sum of all ranks."""


def under_trace(apply: Apply, call: TracedCall) -> tuple[Site, Any]:
    """The site of a call on tracers, and its result. Collective: the ranks trace alike. `apply` is for its backward."""
    site, tensors = traced(call)
    site.apply = apply
    return site, unflatten(site.nested, CALL.bind(*tensors, site=site))


def traced(call: TracedCall) -> tuple[Site, list[Any]]:
    """The site of a call on tracers, and its tensors."""
    ready()
    tensors: list[Any] = []
    try:
        tensors += map(_as_array, call.arguments.tensors)
    except TensorError as error:
        call.operation.refuse(error, call.comm)
    site = site_of(call._replace(arguments=call.arguments.with_tensors(tensors)))
    _finish_at_exit()
    return site, tensors


def _as_array(x: Any) -> Any:
    """x as an array of JAX. Raises TensorError for what is no array."""
    if isinstance(x, jax.Array):
        return x
    if not hasattr(x, "dtype"):
        raise TensorError(f"{type(x).__name__} is not a tensor: pass an array of JAX or NumPy")
    try:
        return jnp.asarray(x)
    except TypeError as error:
        raise TensorError(str(error)) from error


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

    def abstract(*avals: Any, site: Target, wanted: Any = None) -> Any:
        like = private.variation(avals)
        return [jax.core.ShapedArray(f.shape, np.dtype(f.dtype), **like) for f in site.results], {effect}

    CALL.def_effectful_abstract_eval(abstract)
    CALL.def_impl(_run)
    TANGENT.def_effectful_abstract_eval(abstract)
    TANGENT.def_impl(_pushed)

    def lower(ctx: Any, *operands: Any, site: Site) -> Any:
        return private.lower_ordered(ctx, operands, ffi.TARGET, effect, site, site=np.int64(site.number))

    private.register(CALL, jvp=_jvp, transpose=_transpose_call, batch=_batch, lower=lower)
    push = private.lowered(_pushed)
    private.register(TANGENT, jvp=_jvp_of_tangent, transpose=_transpose, batch=_batch_of_tangent, lower=push)


def _run(*tensors: Any, site: Site | Opaque) -> list[Any]:
    """Run a site on arrays, outside of a compiled program."""
    take: Any = site.comm.engine.arena.take if isinstance(site, Site) else np.empty
    results = [take(form.shape, dlpack.STORAGE[form.dtype]) for form in site.results]
    site([dlpack.borrow(jnp.asarray(t)).array for t in tensors], results)
    return [dlpack.lend(y, form.dtype, "jax") for y, form in zip(results, site.results, strict=True)]


# ----------------------------------------------------------------------------------------------------- gradients


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, site: Site) -> tuple[list[Any], list[Any]]:
    results = CALL.bind(*primals, site=site)
    wanted = tuple(not private.is_zero(t) for t in tangents)
    if isinstance(site, Half) and any(wanted):
        raise no_gradient(site.site.operation)
    if isinstance(site, Opaque) and any(wanted):
        raise TensorError(f"fompi.jax.{site.name} has no forward mode, and no grad of a grad, under jax.jit")
    if not any(wanted):
        return results, private.zeros([y.aval for y in results])
    call = call_of(site)
    if site.arguments.op == "prod":
        raise TensorError(f'fompi.{site.operation.name}: op="prod" has no gradient: use jax.lax.stop_gradient(x)')
    moving = [t for t, is_wanted in zip(tangents, wanted, strict=True) if is_wanted]
    kept = primals if call.keeps else ()
    return results, TANGENT.bind(*moving, *kept, site=site, wanted=wanted)


def no_gradient(operation: Operation[Any]) -> TensorError:
    """The error of a gradient of a call that was started."""
    name = f"fompi.jax.{operation.name}"
    return TensorError(f"{name}.start has no gradient: call {name}(...), or pass jax.lax.stop_gradient(x)")


def call_of(site: Site) -> Call:
    """The call of a site, for its backward."""
    share = shared if site.gradient == "replicated" else None
    call = Call(site.operation, site.arguments, site.comm, site.call_options, site.apply, share=share)
    call._extents, call._number, call.shape = site.extents, site.call, site.given[0].shape
    return call


def _transpose(cotangents: Sequence[Any], *inputs: Any, site: Site, wanted: tuple[bool, ...]) -> list[Any]:
    """The gradients of the tensors that moved. What was kept gets none."""
    kept = list(inputs[sum(wanted) :])
    grads = [None if private.is_zero(ct) else ct for ct in cotangents]
    gradients = call_of(site).backward(kept or [None] * len(wanted), grads, wanted)
    moved = [g for g, is_wanted in zip(gradients, wanted, strict=True) if is_wanted]
    return [*moved, *(None for _ in kept)]


def _transpose_call(cotangents: Sequence[Any], *inputs: Any, site: Site) -> list[Any]:
    """The dual of a call that is linear in some of its tensors: `jax.linear_transpose`."""
    if isinstance(site, Opaque) or site.arguments.op in ("max", "min", "prod"):
        name = site.name if isinstance(site, Opaque) else site.operation.name
        raise TensorError(f"fompi.jax.{name} is not linear here: it cannot be transposed")
    wanted = tuple(map(private.is_undefined, inputs))
    grads = [None if private.is_zero(ct) else ct for ct in cotangents]
    kept = [None if w else t for w, t in zip(wanted, inputs, strict=True)]
    gradients = call_of(site).backward(kept, grads, wanted)
    return [g if w else None for g, w in zip(gradients, wanted, strict=True)]


def shared(call: Call, dy: Any) -> Any:
    """dy, whose dual is an all-reduce (`Call.share`)."""
    if not isinstance(dy, jax.core.Tracer):
        return dy
    _copy_ready()
    return COPY.bind(dy, comm=call.comm, call_options=call.call_options, apply=call.apply)


@functools.cache
def _copy_ready() -> None:
    """Give the primitive its rules."""

    def transpose(ct: Any, _: Any, *, comm: Any, call_options: CallOptions, apply: Any) -> list[Any]:
        return [ct if private.is_zero(ct) else apply(all_reduce, (ct,), {}, comm, call_options, "", "replicated")]

    private.register_copy(COPY, transpose)


# -------------------------------------------------------------------------------------------------- forward mode


def _pushed(*tensors: Any, site: Site, wanted: tuple[bool, ...]) -> list[Any]:
    """The tangents of the results. A call is linear in x, and in its other tensors together: it is its own derivative.

    So a call of the same site with tangents in the place of tensors gives a term of the result. A bias belongs to the
    second term. Rows that arrive (x_full) do not depend on the other tensors.
    """
    a, count = site.arguments, sum(wanted)
    if a.op in ("max", "min"):
        raise TensorError(
            f'fompi.{site.operation.name}: op="{a.op}" has no forward mode (jax.jvp, jax.jacfwd, jax.hessian): '
            f"use the grad of a grad"
        )
    moving, kept = iter(tensors[:count]), tensors[count:]
    if not kept:
        return CALL.bind(*moving, site=site)
    dx, *others = (next(moving) if w else jnp.zeros_like(t) for w, t in zip(wanted, kept, strict=True))
    x, *rest = kept
    biases = range(len(a.weights), len(a.weights) + sum(b is not None for b in a.biases))
    terms: list[list[Any]] = []
    if wanted[0]:
        constant = [jnp.zeros_like(t) if i in biases else t for i, t in enumerate(rest)]
        terms.append(CALL.bind(dx, *constant, site=site))
    if any(wanted[1:]):
        results = CALL.bind(x, *others, site=site)
        names = flatten(site.nested)
        terms.append([jnp.zeros_like(y) if name == "x_full" else y for name, y in zip(names, results, strict=True)])
    return [sum(parts[1:], parts[0]) for parts in zip(*terms, strict=True)]


def _jvp_of_tangent(primals: Sequence[Any], tangents: Sequence[Any], *, site: Site, wanted: tuple[bool, ...]) -> Any:
    moving = [i for i, t in enumerate(tangents) if not private.is_zero(t)]

    def of_moving(*tensors: Any) -> list[Any]:
        new = dict(zip(moving, tensors, strict=True))
        return _pushed(*(new.get(i, t) for i, t in enumerate(primals)), site=site, wanted=wanted)

    if not moving:
        results = TANGENT.bind(*primals, site=site, wanted=wanted)
        return results, private.zeros([y.aval for y in results])
    return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])


def _batch_of_tangent(tensors: Sequence[Any], dims: Sequence[Any], *, site: Site, wanted: tuple[bool, ...]) -> Any:
    results = jax.vmap(functools.partial(_pushed, site=site, wanted=wanted), tuple(dims))(*tensors)
    return results, [0] * len(results)


# ----------------------------------------------------------------------------------------------------------- vmap


def _batch(tensors: Sequence[Any], dims: Sequence[Any], *, site: Site) -> tuple[list[Any], list[int]]:
    """One call for the whole batch if only x is batched, else one call after the other.

    A batch of x is one more dimension behind the rows. Only a product with a batched weight is no such call.
    """
    if isinstance(site, Opaque):
        raise TensorError(f"fompi.jax.{site.name} is not possible inside jax.vmap: call it outside")
    a, name = site.arguments, site.operation.name
    alone = dims[0] is not None and all(d is None for d in dims[1:])
    has_rows = name != "sendrecv" and not is_flat(name)
    at = count = len(site.given[0].shape)
    if not alone or (name == "reduce" and not count) or (has_rows and a.operands):
        return _one_by_one(tensors, dims, site)
    if has_rows:
        a = replace(a, dim=a.dim % count, split_dim=None if a.split_dim is None else a.split_dim % count)
        at = a.dim + 1 if a.weights else count
    arguments = a.with_tensors([jnp.moveaxis(tensors[0], dims[0], at), *tensors[1:]])
    batched = site_of(TracedCall(site.operation, arguments, site.comm, site.call_options, site.gradient))
    batched.apply = site.apply
    results = CALL.bind(*arguments.tensors, site=batched)
    return results, [at] * len(results)


def _one_by_one(tensors: Sequence[Any], dims: Sequence[Any], site: Site) -> tuple[list[Any], list[int]]:
    moving = [jnp.moveaxis(t, d, 0) for t, d in zip(tensors, dims, strict=True) if d is not None]

    def one(parts: Sequence[Any]) -> Any:
        rest = iter(parts)
        return CALL.bind(*(t if d is None else next(rest) for t, d in zip(tensors, dims, strict=True)), site=site)

    results = jax.lax.map(one, moving)
    return list(results), [0] * len(results)


# ------------------------------------------------------------------------------------------------------- in flight


class JaxPending:
    """An operation in flight. Under `jax.jit` too: the compiled program does other work meanwhile.

        pending = fompi.jax.all_reduce.start(x, comm=tp)
        a = pending.before(a)               # what uses a is computed after the start
        y, z = pending.wait(after=a @ b)    # the result, not before the product

    A compiled program runs what does not depend on each other in an order that XLA chooses. `before` and `after` are
    dependencies. They copy nothing. It has no gradient.
    """

    def __init__(self, handle: Any, site: BoundSite | None):
        self._handle, self._site = handle, site

    def before(self, tree: Any) -> Any:
        """`tree`, with arrays that are there after the start: what uses them is computed after it."""
        if self._site is None:
            return tree
        self._handle, tree = jax.lax.optimization_barrier((self._handle, tree))
        return tree

    def wait(self, after: Any = None) -> Any:
        """The result. With `after`: the result and `after`, and the wait begins when these arrays are computed."""
        if self._site is None:
            result = self._handle.wait()
            return result if after is None else (result, after)
        handle = self._handle
        if after is not None:
            handle, after = jax.lax.optimization_barrier((handle, after))
        result = unflatten(self._site.nested, CALL.bind(handle, site=End(self._site)))
        return result if after is None else (result, after)


jax.tree_util.register_pytree_node(
    JaxPending,
    lambda started: ((started._handle,), started._site),
    lambda site, children: JaxPending(children[0], site),
)


def start(call: TracedCall) -> JaxPending:
    """Start a call, on arrays or under a trace."""
    operation, arguments, comm, call_options, _ = call
    if not private.is_staged(arguments.tensors):
        if any(map(dlpack.is_tracer, arguments.tensors)):  # inside jax.grad
            operation.refuse(no_gradient(operation), comm)
        pending: Any = operation.begin(arguments, comm, call_options)
        pending.leave()
        return JaxPending(pending, None)
    site, tensors = traced(call)
    if not isinstance(site, BoundSite):
        raise TensorError(f"fompi.jax.{operation.name}.start is not possible under jax.jit: call it without start")
    (handle,) = CALL.bind(*tensors, site=Start(site))
    return JaxPending(handle, site)
