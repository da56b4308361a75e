"""JAX: `fompi.jax.<operation>` is `fompi.<operation>` for `jax.jit`, `jax.grad` and `jax.vmap`.

    h = fompi.jax.all_gather_matmul(x, w, comm=tp)
    y = fompi.jax.row_parallel_linear(h, w2, comm=tp)          # a strategy of fompi.parallel

- `custom_vjp`: the operations, on arrays.
- `program`: `fompi.jax.jit`. `mpi4jax`: the names of mpi4jax, for programs that were written for it.
- `primitive`: the operations on tracers, for `jax.jit` and `jax.vmap`, also in flight.
- `sites`: a call at one place of a compiled program; `ffi`: how the program calls it.
- `private`: the names of JAX that no document promises.
- `strategies`: a strategy of `fompi.parallel`, on arrays and on tracers. The strategy calls it by itself.

This room may import the package jax, and all rooms from `base` to `parallel`. Only this room imports jax.
"""

from fompi.base.extras import need

need("jax")

from fompi.jax.custom_vjp import *  # noqa: E402, F403
from fompi.jax.program import jit as jit  # noqa: E402
from fompi.jax.strategies import *  # noqa: E402, F403
