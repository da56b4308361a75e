"""Rivals in JAX on the CPU: XLA's collectives over gloo, and a ring of `ppermute`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from fompi.base.errors import StateError
from fompi.bench.fused import Array

AXIS = "ranks"


class Xla:
    """One JAX process with one CPU device per rank. The processes meet at `address`, a port of rank 0.

    Raises ImportError if JAX is not installed. Raises StateError if JAX has computed before: its devices are then
    fixed.
    """

    def __init__(self, comm: Any, address: str):
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        # One thread, like the kernels of all contestants. JAX reads this when it makes its first device.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
        import jax
        from jax._src import xla_bridge

        if xla_bridge.backends_are_initialized():
            raise StateError("JAX has made its devices already: its processes cannot meet any more")
        self.jax = jax
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, self.size, self.rank)
        self.mesh = jax.sharding.Mesh(np.array(jax.devices()), (AXIS,))

    def close(self) -> None:
        self.jax.distributed.shutdown()

    def collectives(self, operation: str, x: Array, w: Array) -> Callable[[], Array]:
        """XLA's collective and the product, jitted together. XLA chooses their order."""
        lax = self.jax.lax

        def program(x: Any, w: Any) -> Any:
            if operation == "all_gather_matmul":
                return lax.all_gather(x, AXIS, tiled=True) @ w
            if operation == "matmul_reduce_scatter":
                return lax.psum_scatter(x @ w, AXIS, tiled=True)
            if operation == "matmul_all_reduce":
                return lax.psum(x @ w, AXIS)
            return lax.all_to_all(x @ w, AXIS, 0, 0, tiled=True)

        return self._bound(program, x, w)

    def ring(self, operation: str, x: Array, w: Array) -> Callable[[], Array]:
        """A collective matmul: a `ppermute` between the products of blocks (Wang et al., ASPLOS 2023)."""
        return self._bound(_ring(self.jax, operation, self.size), x, w)

    def _bound(self, program: Callable[[Any, Any], Any], x: Array, w: Array) -> Callable[[], Array]:
        jax = self.jax
        spec = jax.sharding.PartitionSpec(AXIS)
        # check_vma=False: the result of a psum is the same on all ranks, and still counts as one shard of each rank
        mapped = jax.shard_map(program, mesh=self.mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
        jitted = jax.jit(mapped)
        sharding = jax.sharding.NamedSharding(self.mesh, spec)

        def sharded(shard: Array) -> Any:
            local = jax.device_put(shard, jax.local_devices()[0])
            shape = (self.size * shard.shape[0], *shard.shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding, [local])

        operands = sharded(x), sharded(w)

        def call() -> Array:
            return np.asarray(jitted(*operands).addressable_data(0))  # waits for the result, without a copy

        return call


def _ring(jax: Any, operation: str, size: int) -> Callable[[Any, Any], Any]:
    lax, jnp = jax.lax, jax.numpy

    def shift(value: Any, by: int) -> Any:
        return lax.ppermute(value, AXIS, [(rank, (rank + by) % size) for rank in range(size)])

    def block(x: Any, owner: Any) -> Any:
        rows = x.shape[0] // size
        return lax.dynamic_slice_in_dim(x, owner % size * rows, rows)

    def placed(y: Any, value: Any, owner: Any) -> Any:
        return lax.dynamic_update_slice_in_dim(y, value, owner % size * value.shape[0], 0)

    def whole(value: Any) -> Any:
        return jnp.empty((size * value.shape[0], value.shape[1]), value.dtype)

    def reduce_scatter(x: Any, w: Any) -> Any:
        rank = lax.axis_index(AXIS)
        total = block(x, rank - 1) @ w
        for step in range(1, size):  # invariant: here is the sum so far of block rank - step; it moves on
            total = shift(total, 1) + block(x, rank - 1 - step) @ w
        return total

    def all_gather_matmul(x: Any, w: Any) -> Any:
        rank, at_hand, y = lax.axis_index(AXIS), x, None
        for step in range(size):
            arriving = shift(at_hand, 1) if step < size - 1 else None
            product = at_hand @ w
            y = placed(whole(product) if y is None else y, product, rank - step)
            at_hand = arriving
        return y

    def matmul_all_reduce(x: Any, w: Any) -> Any:
        rank, at_hand = lax.axis_index(AXIS), reduce_scatter(x, w)
        y = placed(whole(at_hand), at_hand, rank)
        for step in range(1, size):
            at_hand = shift(at_hand, 1)
            y = placed(y, at_hand, rank - step)
        return y

    def matmul_all_to_all(x: Any, w: Any) -> Any:
        rank = lax.axis_index(AXIS)
        products = [block(x, rank + d) @ w for d in range(size)]
        y = placed(whole(products[0]), products[0], rank)
        for d in range(1, size):
            y = placed(y, shift(products[d], d), rank - d)
        return y

    programs = (all_gather_matmul, matmul_all_reduce, matmul_all_to_all)
    return {"matmul_reduce_scatter": reduce_scatter, **{p.__name__: p for p in programs}}[operation]
