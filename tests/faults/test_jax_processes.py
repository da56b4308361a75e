"""A JAX program of several processes: global arrays, and an end while programs run.

On both MPIs: the end. It needs a process of its own: jax.distributed must begin before JAX computes anything.
"""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax")

PROGRAM = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(cluster_detection_method="mpi4py")
import jax.numpy as jnp
from functools import partial
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import fompi.jax

spec, mesh = PartitionSpec("i"), Mesh(jax.devices(), ("i",))
mapped = partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
mine = np.random.default_rng(rank).standard_normal((2 * size, 3)).astype("float32")
x = jax.make_array_from_process_local_data(NamedSharding(mesh, spec), mine)
ahead, behind = (rank + 1) % size, (rank - 1) % size
lax, theirs, ours = jax.lax, {}, {}
theirs["psum"], ours["psum"] = lambda x: lax.psum(x, "i"), lambda x: fompi.jax.all_reduce(x, comm=world)
theirs["gather"] = lambda x: lax.all_gather(x, "i", tiled=True)
ours["gather"] = lambda x: fompi.jax.all_gather(x, comm=world)
theirs["scatter"] = lambda x: lax.psum_scatter(x, "i", tiled=True)
ours["scatter"] = lambda x: fompi.jax.reduce_scatter(x, comm=world)
theirs["exchange"] = lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True)
ours["exchange"] = lambda x: fompi.jax.all_to_all(x, comm=world)
theirs["permute"] = lambda x: lax.ppermute(x, "i", [(i, (i + 1) % size) for i in range(size)])
ours["permute"] = lambda x: fompi.jax.sendrecv(x, ahead, behind, comm=world)

def results(calls, x):
    def loss(x):
        ys = [mapped(calls[name])(x) for name in sorted(calls)]
        return sum(jnp.sin(y).sum() for y in ys), ys
    (_, ys), slope = jax.value_and_grad(loss, has_aux=True)(x)
    return [*ys, slope]

expected = jax.jit(partial(results, theirs))(x)
for jit in (jax.jit, fompi.jax.jit):
    for y, z in zip(jit(partial(results, ours))(x), expected, strict=True):
        np.testing.assert_allclose(y.addressable_shards[0].data, z.addressable_shards[0].data, rtol=1e-4, atol=1e-5)
total = sum(np.random.default_rng(r).standard_normal((2 * size, 3)).astype("float32") for r in range(size))
for jit in (jax.jit, fompi.jax.jit):  # programs that run without a wait between them
    program = jit(mapped(ours["psum"]))
    running = [program(k * x) for k in range(12)]
    for k, y in enumerate(running):
        np.testing.assert_allclose(y.addressable_shards[0].data, k * total, rtol=1e-4, atol=1e-5)
emit("EQUAL", rank, len(expected))
"""

END = """
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
import fompi.jax

program = fompi.jax.jit(lambda x: fompi.jax.all_reduce(x @ x @ x, comm=world))
x = jnp.ones((400, 400)) / 400
program(x).block_until_ready()
running = [program(x) for _ in range(6)]
emit("LEFT", rank)
"""


@pytest.mark.one_mpi
@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="JAX has jax.shard_map from 0.6 on")
def test_global_arrays_equal_those_of_lax(launch):
    """The same operations in `shard_map` over a mesh of two processes, and the gradient through them."""
    ended = launch(2, PROGRAM)
    assert ended.lines("EQUAL") == ["0 6", "1 6"], ended.output
    assert ended.finished.returncode == 0, ended.output


def test_an_end_while_programs_run(launch):
    """The rank waits for the programs that it has started, and then leaves."""
    ended = launch(2, END)
    ended.assert_clean()
    assert ended.lines("LEFT") == ["0", "1"]
