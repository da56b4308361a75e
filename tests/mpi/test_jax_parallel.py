"""fompi.jax has the strategies: jax.grad gives the gradients of their own backward, which other tests compare."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import close, drawn

import fompi
import fompi.jax
from fompi.base.layout import split
from fompi.parallel.expert import experts_of
from fompi.parallel.sequence import Sharding
from fompi.parallel.tensor import heads_of

TOKENS = np.array([0, 4, 2, 2, 1])
pytestmark = [pytest.mark.ranks(mpich=[2], openmpi=[]), pytest.mark.usefixtures("x64")]


@pytest.fixture(scope="module")
def alone(world):
    """A communicator of this rank only."""
    with world.split(world.rank) as one:
        yield one


def sequence(comm, **options):
    """q, k, v of this rank, and the other arguments."""
    sharding = Sharding(7, **options)
    return [sharding.shard(drawn(7, n, 4, seed=i), comm.rank) for i, n in enumerate((4, 2, 2))], sharding


def call(name, comm, alone):
    """(the function of the tensors that have gradients, the tensors)."""
    f, mine, rank, size = getattr(fompi.jax, name), split(7, comm.size)[comm.rank], comm.rank, comm.size
    n = split(6, size)[rank]
    if name == "column_parallel_linear":
        return lambda *t: f(*t, activation="gelu", comm=comm), [drawn(mine, 3), drawn(3, n), drawn(n)]
    if name == "row_parallel_linear":
        return lambda *t: f(*t, comm=comm), [drawn(7, n), drawn(n, 3), drawn(3)]
    if name == "all_reduce_rmsnorm":
        return lambda *t: f(*t, comm=comm), [drawn(7, 3, seed=rank), drawn(7, 3), drawn(3)]
    if name == "attention":
        q, kv = (4 * len(part) for part in heads_of(rank, size, 3, 1))
        weights = [drawn(mine, 5), drawn(5, q), drawn(5, kv), drawn(5, kv, seed=1), drawn(q, 5)]
        return lambda *t: f(*t, heads=3, kv_heads=1, causal=True, comm=comm), weights
    if name == "vocab_parallel_embedding":
        return lambda table: f(TOKENS, table, comm=comm), [drawn(n, 3)]
    if name == "vocab_parallel_cross_entropy":
        return lambda logits: f(logits, TOKENS, comm=comm), [drawn(5, n)]
    if name == "moe":
        here = len(experts_of(rank, size, 5))
        weights = [drawn(mine, 3), drawn(3, 5), drawn(here, 3, 4), drawn(here, 4, 3)]
        return lambda *t: f(*t, k=2, comm=comm), weights
    if name == "usp_attention":
        tensors, sharding = sequence(comm, ring=size)
        return lambda *t: f(*t, sharding, ring=comm, ulysses=alone, causal=True), tensors
    tensors, sharding = sequence(comm, **{name.partition("_")[0]: size})
    return lambda *t: f(*t, sharding, comm=comm, causal=True), tensors


def squares(results):
    """The loss: the sum of the squares of all results."""
    return sum((y**2).sum() for y in jax.tree.leaves(results))


@pytest.mark.parametrize("name", fompi.jax.strategies.__all__)
def test_gradients(world, alone, name, monkeypatch):
    of, tensors = call(name, world, alone)
    kept = []
    f = getattr(fompi.jax, name)
    monkeypatch.setattr(f, "forward", lambda *a, _f=f.forward, **k: kept.append(_f(*a, **k)) or kept[-1])
    y = of(*tensors)
    _, saved = kept[-1]
    expected = f.backward(saved, jax.tree.map(lambda y: 2 * y, y))
    leaves = [jnp.asarray(t) for t in tensors]
    gradients = jax.grad(lambda leaves: squares(of(*leaves)))(leaves)
    for actual, right in zip(gradients, [g for g in expected if g is not None], strict=True):
        assert isinstance(actual, jax.Array) and actual.dtype == "float64"
        close(actual, right, 1e-13)


def test_under_jit(world, alone):
    """All strategies in one compiled program: results and gradients as outside of it, also in a loop."""
    calls = {name: call(name, world, alone) for name in fompi.jax.strategies.__all__}
    leaves = {name: [jnp.asarray(t) for t in tensors] for name, (_, tensors) in calls.items()}

    def program(leaves):
        return {
            name: jax.value_and_grad(lambda mine, of=of: squares(of(*mine)))(leaves[name])
            for name, (of, _) in calls.items()
        }

    expected = program(leaves)
    for jit in (jax.jit, fompi.jax.jit):
        compiled = jit(program)
        for _ in range(2):
            results = compiled(leaves)
        assert jax.tree.structure(results) == jax.tree.structure(expected)
        for actual, right in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(actual, right, rtol=1e-12, atol=1e-12)
    of, tensors = calls["row_parallel_linear"]

    def repeated(x, w, bias, tokens):
        def step(total, _):
            return total + (of(x, w, bias) ** 2).sum() + fompi.jax.vocab_parallel_embedding(
                tokens, w, comm=world
            ).sum(), None

        return jax.lax.scan(step, 0.0, None, length=3)[0]

    args = [*map(jnp.asarray, tensors), jnp.asarray(TOKENS % len(drawn(6, 3)))]
    slope = jax.jit(jax.grad(repeated))(*args)
    np.testing.assert_allclose(
        slope, 3 * np.asarray(jax.grad(lambda x: (of(x, *args[1:3]) ** 2).sum())(args[0])), rtol=1e-12
    )


def test_a_trace_sends_rows_to_all_experts(world, monkeypatch):
    """It runs a strategy on drawn values. With equal ones a single expert would have the rows of all ranks."""
    kept, f, count = [], fompi.jax.moe, 4 * world.size
    monkeypatch.setattr(f, "forward", lambda *a, _f=f.forward, **k: kept.append(_f(*a, **k)) or kept[-1])
    here = len(experts_of(world.rank, world.size, count))
    tensors = [drawn(64, 8), drawn(8, count), drawn(here, 8, 4), drawn(here, 4, 8)]
    for kind in ("float32", "bfloat16"):
        jax.eval_shape(lambda *t: f(*t, k=1, comm=world), *(jnp.asarray(t, kind) for t in tensors))
        rows = kept[-1][1].tokens_per_expert
        assert rows.sum() == 64 * world.size and rows.max() < 40 * world.size


def test_what_is_refused_under_jit(world):
    """A sentence says it. Later calls work."""
    x, w = jnp.ones((4, 3)), jnp.ones((3, 2))

    def linear(x):
        return fompi.jax.row_parallel_linear(x, w, sequence_parallel=False, comm=world)

    for transform, words in ((jax.vmap, r"inside jax\.vmap"), (jax.hessian, "no grad of a grad")):
        with pytest.raises(fompi.TensorError, match=words):
            jax.jit(transform(lambda x: linear(jnp.atleast_2d(x)).sum()))(x)
    of, tensors = call("attention", world, world)
    packed = functools.partial(fompi.jax.attention, heads=3, kv_heads=1, causal=True, comm=world)
    with pytest.raises(fompi.LayoutError, match=r"cu_seqlens= must be a Python value.*static_argnums"):
        jax.jit(lambda ends, *t: packed(*t, cu_seqlens=ends))(jnp.array([0, 4, 7]), *tensors)
    compiled = jax.jit(lambda ends, *t: packed(*t, cu_seqlens=ends), static_argnums=0)
    close(compiled((0, 7), *tensors), of(*tensors), 1e-13)
    assert jax.jit(linear)(x).shape == (4, 2)
