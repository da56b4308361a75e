"""fompi reads and writes tensors of NumPy, PyTorch and JAX in place: memory is shared, not copied.

    mpirun -n 2 python examples/dlpack_exchange.py

A result is a tensor of the framework of x. The other tensors of a call may be of any framework. Two cases are copied:
fompi packs a strided x before it sends it, and JAX takes over only aligned, contiguous memory. Any number of ranks
works, and the output is the same.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch

import fompi
from fompi import Shard, Spec

jax.config.update("jax_platforms", "cpu")  # fompi works on host memory
comm = fompi.Communicator()


def show(what, is_true):
    """Print on rank 0 whether this is true on all ranks."""
    everywhere = fompi.all_gather(np.array([is_true]), comm=comm).all()
    if comm.rank == 0:
        print(f"{what}: {everywhere}")


# NumPy in, PyTorch out: the messages arrive in the memory of the tensor.
out = torch.zeros(4 * comm.size, 3)
view = out.numpy()  # the same memory
fompi.all_gather(np.full((4, 3), comm.rank, np.float32), comm=comm, out=out)
show("a NumPy view of the PyTorch tensor shows the gathered rows", (view[::4, 0] == np.arange(comm.size)).all())

# PyTorch in: every call of a bound plan reads the memory of the tensor.
x = torch.ones(4, 3)
plan = fompi.plan(fompi.all_gather, Spec((4 * comm.size, 3), "float32", Shard(0)), ranks=comm.size)
with fompi.bind(plan, comm=comm, x=x) as step:
    step()
    x += 1
    y = step()
    show("the second call gathers the changed PyTorch tensor", isinstance(y, torch.Tensor) and bool((y == 2).all()))

# JAX and NumPy in, JAX out: the other frameworks take the result over through DLPack.
y = fompi.all_gather_matmul(jnp.ones((4, 3)), np.ones((3, 2), np.float32), comm=comm)
addresses = {y.unsafe_buffer_pointer(), np.from_dlpack(y).ctypes.data, torch.from_dlpack(y).data_ptr()}
show("the JAX result has the same address in NumPy and PyTorch", isinstance(y, jax.Array) and len(addresses) == 1)

# Output on 2 ranks:
# a NumPy view of the PyTorch tensor shows the gathered rows: True
# the second call gathers the changed PyTorch tensor: True
# the JAX result has the same address in NumPy and PyTorch: True
