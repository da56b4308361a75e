"""JAX: the public operations with gradients for `jax.grad`. The only room that imports jax."""

from fompi.jax.custom_vjp import *  # noqa: F403
