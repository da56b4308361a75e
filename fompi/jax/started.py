"""An operation in flight in a JAX program: what `fompi.jax.<operation>.start(...)` returns."""

from __future__ import annotations

from typing import Any

import jax

from fompi.base.call_options import CallOptions
from fompi.base.errors import TensorError
from fompi.base.nested import unflatten
from fompi.jax import private
from fompi.jax.primitive import CALL, no_gradient, traced
from fompi.jax.sites import BoundSite, End, Start
from fompi.ops.arguments import Arguments
from fompi.ops.operation import Operation
from fompi.tensors.dlpack import is_tracer


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


def start(operation: Operation[Any], arguments: Arguments, comm: Any, call_options: CallOptions) -> JaxPending:
    """Start a call, on arrays or under a trace."""
    if not private.is_staged(arguments.tensors):
        if any(map(is_tracer, arguments.tensors)):  # inside jax.grad
            operation.refuse(no_gradient(operation), comm)
        pending: Any = operation.begin(arguments, comm, call_options)
        pending.leave()
        return JaxPending(pending, None)
    site, tensors = traced(operation, arguments, comm, call_options)
    if not isinstance(site, BoundSite):
        raise TensorError(f"fompi.jax.{operation.name}.start is not possible under jax.jit: call it without start")
    (handle,) = CALL.bind(*tensors, site=Start(site))
    return JaxPending(handle, site)
