"""A JAX layer whose weights are spread over the ranks. Its loss and gradients are those of the full layer.

    mpirun -n 2 python examples/jax_layer.py

Each rank holds some rows of x, some columns of w1, and the rows of w2 that belong to them. The operations of
`fompi.jax` work in `jax.grad` and `jax.vjp`, also under `jax.jit`. The backward pass is fused too. Any number of ranks
works.
"""

import jax
import jax.numpy as jnp
import numpy as np

import fompi

jax.config.update("jax_platforms", "cpu")  # fompi works on host memory


def loss(x, w1, w2, comm):
    """The loss of this rank's rows. Gradients are those of the sum of the losses of all ranks."""
    h = fompi.jax.all_gather_matmul(x, w1, comm=comm)
    y = fompi.jax.matmul_reduce_scatter(jnp.maximum(h, 0), w2, comm=comm)
    return jnp.square(y).sum()


def full_loss(x, w1, w2):
    """The same in one process."""
    return jnp.square(jnp.maximum(x @ w1, 0) @ w2).sum()


def shards(x, w1, w2, comm):
    """This rank's part of each: the ranks split rows or columns as evenly as possible, in their order."""
    return [jnp.array_split(array, comm.size, axis)[comm.rank] for array, axis in ((x, 0), (w1, 1), (w2, 0))]


comm = fompi.Communicator()
random = np.random.default_rng(0)  # every rank draws the same numbers
full = [jnp.asarray(random.standard_normal(shape, np.float32)) for shape in ((24, 16), (16, 32), (32, 8))]
full_value, full_gradients = jax.value_and_grad(full_loss, argnums=(0, 1, 2))(*full)

value, gradients = jax.value_and_grad(loss, argnums=(0, 1, 2))(*shards(*full, comm), comm)

total = fompi.all_reduce(value, comm=comm)
pairs = zip([total, *gradients], [full_value, *shards(*full_gradients, comm)], strict=True)
equal = all(np.allclose(a, b, rtol=1e-3, atol=1e-2) for a, b in pairs)
everywhere = bool(fompi.all_gather(np.array([equal]), comm=comm).all())
if comm.rank == 0:
    print(f"rank 0 of {comm.size}: gradients {', '.join(str(gradient.shape) for gradient in gradients)}")
    print(f"the loss and the gradients of x, w1 and w2 are those of the full layer: {everywhere}")

# Output on 2 ranks:
# rank 0 of 2: gradients (12, 16), (16, 16), (16, 8)
# the loss and the gradients of x, w1 and w2 are those of the full layer: True
