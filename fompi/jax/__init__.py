"""JAX: `fompi.jax.<operation>` is the operation `fompi.<operation>` with a gradient for `jax.grad` and `jax.vjp`.

    h = fompi.jax.all_gather_matmul(x, w, comm=tp)
    y = fompi.jax.row_parallel_linear(h, w2, comm=tp)          # a strategy of fompi.parallel

- `custom_vjp`: the operations.
- `parallel`: the names of the strategies.
- `strategies`: a strategy of `fompi.parallel`, which calls it by itself.

This room may import the package jax, and all rooms from `base` to `parallel`. Only this room and `bench` import jax.
"""

from fompi.jax.custom_vjp import *  # noqa: F403
from fompi.jax.parallel import *  # noqa: F403
