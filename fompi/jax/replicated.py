"""The gradients of `gradient="replicated"` in JAX: of a loss that all ranks compute alike and that counts once."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.extend.core

from fompi.base.call_options import CallOptions
from fompi.jax import private
from fompi.ops import adjoints
from fompi.ops.arguments import Arguments
from fompi.ops.operations import all_reduce

COPY = jax.extend.core.Primitive("fompi_copy")
"""The identity on a gradient that all ranks have alike. Its dual is an all-reduce: the sum of all ranks."""


class JaxReplicatedCall(adjoints.ReplicatedCall):
    """A call for `gradient="replicated"`."""

    def shared(self, dy: Any) -> Any:
        """dy, whose dual is an all-reduce."""
        if not isinstance(dy, jax.core.Tracer):
            return dy
        _ready()
        return COPY.bind(dy, comm=self.comm, call_options=self.call_options, apply=self.apply)


@functools.cache
def _ready() -> None:
    """Give the primitive its rules."""

    def transpose(ct: Any, _: Any, *, comm: Any, call_options: CallOptions, apply: Any) -> list[Any]:
        return [ct if private.is_zero(ct) else apply(all_reduce, Arguments(ct), comm, call_options, "replicated")]

    private.register_copy(COPY, transpose)
