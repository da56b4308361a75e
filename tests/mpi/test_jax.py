"""JAX arrays, and fompi.jax in jax.grad and jax.vjp: results, gradients, memory, and errors in other transforms."""

import jax
import jax.numpy as jnp
import meanings
import numpy as np
import pytest
import torch
from meanings import BASIC, CASES

import fompi
import fompi.jax

FLOATS = ["float64", "float32", "float16", "bfloat16"]
INTEGERS = ["int64", "int32", "uint8"]
TAKEN = [case for case in CASES if not case.options or str(case).endswith("-bias-ring")]
"""Most schedules are left out: the backward is the same for all frameworks, and test_torch has all of them."""
ADDING = ("reduce", "reduce_scatter", "all_reduce", "matmul_reduce_scatter", "matmul_all_reduce")
pytestmark = [pytest.mark.ranks(mpich=[2], openmpi=[]), pytest.mark.usefixtures("x64")]


def random_tensor(tp, *shape, call=0):
    """Random numbers, different on every rank and in every call."""
    return jnp.asarray(np.random.default_rng([call, tp.rank]).standard_normal(shape))


def close(actual, expected):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=1e-11, atol=1e-11)


# ----------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("case", TAKEN, ids=str)
def test_results_and_gradients(tp, case):
    """They equal those of the definition, for every tensor, with uneven rows, and no rows on some ranks."""
    given, results, gradients = meanings.gradients(case, tp.size)
    mine = [jnp.asarray(t) for t in given[tp.rank]]
    actual, pull = jax.vjp(lambda *leaves: case.call(fompi.jax, tp.size, tp.rank, leaves, comm=tp), *mine)
    assert all(isinstance(y, jax.Array) for y in actual)
    for y, expected in zip(actual, results[tp.rank], strict=True):
        close(y, expected)
    # The gradient of meanings.loss, written out, because JAX would compile every operation for every shape.
    grads = [jnp.asarray(2 * (tp.rank + 2 + i) * np.asarray(y) + (i + 1)) for i, y in enumerate(actual)]
    for leaf, expected in zip(pull(grads), gradients[tp.rank], strict=True):
        assert isinstance(leaf, jax.Array) and leaf.dtype == expected.numpy().dtype
        close(leaf, expected)


def test_grad_of_some_arguments(tp):
    """jax.grad for x, for a weight, for a bias equals the definition, and computes only what is needed."""
    case = next(case for case in CASES if str(case) == "all_gather_matmul-dim1-bias-direct-2")
    given, _, gradients = meanings.gradients(case, tp.size)
    mine = [jnp.asarray(t) for t in given[tp.rank]]

    def loss(*leaves):
        (y,) = case.call(fompi.jax, tp.size, tp.rank, leaves, comm=tp)
        return (coefficients * y).sum()

    (y,) = case.call(fompi.jax, tp.size, tp.rank, mine, comm=tp)
    coefficients = 2 * (tp.rank + 2) * np.asarray(y) + 1  # gives the same gradient as meanings.loss
    moved = [["matmul_reduce_scatter"], ["all_gather_weight_gradient"], []]
    for i, operations in enumerate(moved):
        with tp.record() as traces:
            actual = jax.grad(loss, argnums=i)(*mine)
        close(actual, gradients[tp.rank][i])
        assert [trace.title.partition(" ")[0] for trace in traces] == ["all_gather_matmul", *operations]


def test_no_gradient_is_computed_for_unused_results(tp):
    x, w = random_tensor(tp, 2, 4), random_tensor(tp, 4, 3)

    def loss(x, w):
        _, (y, _) = fompi.jax.all_gather_matmul_many(x, [w, w], comm=tp)
        return y.sum()

    with tp.record() as traces:
        dw = jax.grad(loss, argnums=1)(x, w)
    assert [trace.title.partition(" ")[0] for trace in traces] == [
        "all_gather_matmul_many",
        "all_gather_weight_gradient",
    ]
    close(dw, np.repeat(np.asarray(fompi.all_gather(x, comm=tp)).sum(0)[:, None], 3, axis=1))


def test_a_vjp_may_be_called_twice(tp):
    x, w = random_tensor(tp, 2, 4), random_tensor(tp, 4, 3)
    y, pull = jax.vjp(lambda x, w: fompi.jax.all_gather_matmul(x, w, comm=tp), x, w)
    for a, b in zip(pull(y), pull(y), strict=True):
        assert (a == b).all()


def test_gradients_in_half_precision(tp):
    case = next(case for case in BASIC if case.operation == "matmul_reduce_scatter")
    given, _, gradients = meanings.gradients(case, tp.size)
    for dtype in ("bfloat16", "float16"):
        mine = [jnp.asarray(t, dtype) for t in given[tp.rank]]
        (y,), pull = jax.vjp(lambda *leaves: case.call(fompi.jax, tp.size, tp.rank, leaves, comm=tp), *mine)
        grads = [jnp.asarray(2 * (tp.rank + 2) * np.asarray(y, np.float64) + 1, dtype)]
        scale = max(float(g.abs().max()) for of_rank in gradients for g in of_rank)
        for leaf, expected in zip(pull(grads), gradients[tp.rank], strict=True):
            assert leaf.dtype == dtype
            off = np.abs(np.asarray(leaf, np.float64) - expected.numpy()).max(initial=0)
            assert off <= 20 * float(jnp.finfo(dtype).eps) * scale


def test_gradients_of_complex_numbers(tp):
    """They equal what JAX computes for the unfused meaning."""
    x, w = (
        random_tensor(tp, 2, 4) + 1j * random_tensor(tp, 2, 4, call=1),
        random_tensor(tp, 4, 3) + 1j * random_tensor(tp, 4, 3, call=1),
    )
    full = fompi.all_gather(x, comm=tp)
    y, pull = jax.vjp(lambda w: fompi.jax.all_gather_matmul(x, w, comm=tp), w)
    _, expected = jax.vjp(lambda w: full @ w, w)
    close(*pull(y), *expected(y))


# ---------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool"])
def test_dtypes(tp, dtype):
    """Results have the dtype of x, and exact values: whole numbers are not rounded. The operations take turns."""
    for case in BASIC if dtype in ("bfloat16", "int64") else BASIC[[*FLOATS, *INTEGERS, "bool"].index(dtype) % 3 :: 3]:
        given = meanings.tensors(case, tp.size, meanings.small_integers)
        if dtype == "bool":
            if case.operation in ADDING or case.weights:
                continue
            given = [[t % 2 for t in mine] for mine in given]
        expected = meanings.expected(case, [[torch.from_numpy(t) for t in mine] for mine in given])[tp.rank]
        mine = [jnp.asarray(t.astype(jnp.dtype(dtype))) for t in given[tp.rank]]
        for namespace in (fompi, fompi.jax):
            actual = case.call(namespace, tp.size, tp.rank, mine, comm=tp)
            for y, exact in zip(actual, expected, strict=True):
                assert isinstance(y, jax.Array) and y.dtype == dtype and y.shape == exact.shape
                assert (np.asarray(y).astype(np.int64) == exact.numpy()).all(), case


def test_results_are_memory_of_the_arena(tp, no_collection):
    """A result is not copied. Its memory goes back to the arena when the array is freed."""
    arena, x = tp.engine.arena, jnp.asarray(np.ones(1 << 14))
    before = arena.lent_nbytes
    y = fompi.all_gather(x, comm=tp)
    assert y.unsafe_buffer_pointer() % 64 == 0
    assert arena.lent_nbytes >= before + y.nbytes
    del y
    assert arena.lent_nbytes == before


def test_arrays_never_change(tp):
    """Fifty calls with all results alive: no memory is used twice, and every vjp keeps its own residuals."""
    kept = []
    for call in range(50):
        x, w = random_tensor(tp, 2, 4, call=call), random_tensor(tp, 4, 3, call=call)
        y, pull = jax.vjp(lambda x, w: fompi.jax.all_gather_matmul(x, w, comm=tp), x, w)
        kept.append((x, w, y, np.array(y), pull))
    assert len({y.unsafe_buffer_pointer() for _, _, y, _, _ in kept}) == 50
    for x, w, y, then, pull in kept:
        assert (np.asarray(y) == then).all()
        dx, dw = pull(y)
        every = fompi.all_gather(np.asarray(x), comm=tp)
        close(dw, every.T @ then)
        close(dx, fompi.matmul_reduce_scatter(then, np.asarray(w).T, counts=[2] * tp.size, comm=tp))


def test_out_is_filled_in_place(tp):
    """A JAX array cannot be out=. A NumPy array can, for any x."""
    x = random_tensor(tp, 2, 4)
    out = np.zeros((2 * tp.size, 4))
    assert fompi.all_gather(x, out=out, comm=tp) is out
    assert (out == np.asarray(fompi.all_gather(x, comm=tp))).all()
    with pytest.raises(fompi.TensorError, match="out= is read-only"):
        fompi.all_gather(x, out=jnp.zeros((2 * tp.size, 4)), comm=tp)


# -------------------------------------------------------------------------------------------------------- refusals


TRANSFORMS = {
    "jit": lambda call, x: jax.jit(call)(x),
    "grad": lambda call, x: jax.grad(lambda x: call(x).sum())(x),
    "vmap": lambda call, x: jax.vmap(call)(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_tracers_are_refused_on_all_ranks(tp, name):
    """`fompi.all_gather` takes no tracer. The error names fompi.jax. Later calls work, also inside jax.grad."""
    x = random_tensor(tp, 2, 4)
    with pytest.raises(fompi.TensorError, match=r"x is a JAX tracer.*Use fompi\.jax\.<operation>"):
        TRANSFORMS[name](lambda x: fompi.all_gather(x, comm=tp), x)
    close(jax.grad(lambda x: fompi.jax.all_gather(x, comm=tp).sum())(x), tp.size * jnp.ones_like(x))


def test_one_rank_under_jit_raises_on_all_ranks(tp):
    """Under jit the ranks agree when they trace, and not in a call: the two never meet."""
    if tp.size == 1:
        return

    def call(x):
        return fompi.jax.all_gather(x, comm=tp)

    x, origin = random_tensor(tp, 2, 4), tp.size - 1
    with pytest.raises(fompi.MismatchError, match=r"all_gather.*under jax\.jit"):
        jax.jit(call)(x) if tp.rank == origin else call(x)
    assert call(x).shape == (2 * tp.size, 4)


def test_out_is_refused_on_all_ranks(tp):
    """A differentiable call writes only its results."""
    out = np.zeros((2 * tp.size, 4))
    with pytest.raises(fompi.TensorError, match="out= cannot be used in a call that is differentiated"):
        fompi.jax.all_gather(random_tensor(tp, 2, 4), out=out, comm=tp)
    assert not out.any() and fompi.jax.all_gather(random_tensor(tp, 2, 4), comm=tp).shape == out.shape


def test_forward_mode_of_a_maximum_raises_an_error(tp):
    """For a jvp, a jvp of a grad, and jax.hessian, which is one. The message names the way that works."""
    x = random_tensor(tp, 2, 4)

    def loss(x):
        return (fompi.jax.all_reduce(x, op="max", comm=tp) ** 2).sum()

    for call in (
        lambda: jax.jvp(loss, (x,), (x,)),
        lambda: jax.jvp(jax.grad(loss), (x,), (x,)),
        lambda: jax.hessian(loss)(x),
    ):
        with pytest.raises(fompi.TensorError, match=r"no forward mode.*use the grad of a grad"):
            call()
        assert fompi.all_reduce(np.ones(1), comm=tp) == tp.size


# ----------------------------------------------------------------------------------------- gradients of gradients


@pytest.mark.parametrize("case", [case for case in BASIC if not case.dim][::3], ids=str)
def test_second_derivatives(tp, case):
    """A product of the Hessian with a vector equals that of one process, for every tensor of an operation.

    Every third one: the backward is the same for all frameworks, and test_torch_derivatives has all of them.
    """
    given = meanings.tensors(case, tp.size, meanings.normal)
    every = [[torch.from_numpy(t).requires_grad_() for t in mine] for mine in given]
    losses = [meanings.loss(rank, mine) for rank, mine in enumerate(meanings.expected(case, every))]
    _, second = meanings.derivatives(losses, every, 2)
    mine = [jnp.asarray(t) for t in given[tp.rank]]
    places = tuple(range(len(mine)))

    def loss(*leaves):
        return meanings.loss(tp.rank, case.call(fompi.jax, tp.size, tp.rank, leaves, comm=tp))

    def along(*leaves):
        gradients = jax.grad(loss, places)(*leaves)
        return sum((g * meanings.direction(g.shape, 1)).sum() for g in gradients)

    for actual, expected in zip(jax.grad(along, places)(*mine), second[tp.rank], strict=True):
        close(actual, expected)


def test_inner_and_outer_gradients_of_different_tensors(tp):
    """The inner gradient is for x, the outer one for w."""
    x, w = random_tensor(tp, 2, 4), random_tensor(tp, 4, 3)

    def inner(x, w):
        return jnp.square(fompi.jax.all_gather_matmul(x, w, comm=tp)).sum()

    actual = jax.grad(lambda w: jnp.square(jax.grad(inner)(x, w)).sum())(w)
    xs, ws = (torch.from_numpy(np.asarray(fompi.all_gather(t[None], comm=tp)).copy()) for t in (x, w))
    xs.requires_grad_(), ws.requires_grad_()
    total = sum((xs.reshape(-1, 4) @ u).square().sum() for u in ws)
    (gradient,) = torch.autograd.grad(total, xs, create_graph=True)
    close(actual, torch.autograd.grad(gradient.square().sum(), ws)[0][tp.rank])


def test_a_gradient_of_other_tensors_on_one_rank(tp):
    """The forward raises on all ranks."""
    if tp.size == 1:
        return
    x, w = random_tensor(tp, 2, 4), random_tensor(tp, 4, 3)

    def loss(x, w):
        return fompi.jax.all_gather_matmul(x, w, comm=tp).sum()

    for places in (0, 1):
        with pytest.raises(fompi.MismatchError, match="for the gradient of x and w"):
            jax.grad(loss, places if tp.rank == 0 else (0, 1))(x, w)
    with pytest.raises(fompi.MismatchError, match="for the gradient of x"):
        jax.grad(loss)(x, w) if tp.rank else loss(x, w)
    close(fompi.all_reduce(jnp.ones(1), comm=tp), [tp.size])
