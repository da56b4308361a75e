"""`fompi.jax` in programs that JAX compiles, on 1 to 4 ranks: jit, grad, vmap, scan, and the order of calls.

A compilation takes about half a second. So a test compiles one program with many calls.
"""

import gc
import random

import jax
import jax.numpy as jnp
import meanings
import numpy as np
import pytest
from meanings import BASIC, CASES

import fompi
import fompi.jax
from fompi.jax import ffi, private

TAKEN = [case for case in BASIC if not case.dim] + [case for case in CASES if str(case).endswith("-dim1-bias-direct-2")]


@pytest.fixture(scope="module", autouse=True)
def x64():
    """Without this setting JAX has no float64."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture(scope="module")
def tp(comm):
    return fompi.Communicator.of(comm)


def of_rank(rank, *shape, call=0):
    return np.random.default_rng([call, rank]).standard_normal(shape)


def of_all(tp, *shape, call=0):
    return np.stack([of_rank(rank, *shape, call=call) for rank in range(tp.size)])


def close(actual, expected, tolerance=1e-11):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------- results and gradients


def test_every_operation(tp):
    """One program with all operations and their gradients, with uneven rows, and none on some ranks."""
    known = [meanings.gradients(case, tp.size) for case in TAKEN]

    def program(tensors):
        answers = []
        for case, mine in zip(TAKEN, tensors, strict=True):
            ys, pull = jax.vjp(
                lambda *leaves, case=case: case.call(fompi.jax, tp.size, tp.rank, leaves, comm=tp), *mine
            )
            grads = [2 * (tp.rank + 2 + i) * y + (i + 1) for i, y in enumerate(ys)]  # of meanings.loss
            answers.append((ys, pull(type(ys)(grads))))
        return answers

    tensors = [[jnp.asarray(t) for t in given[tp.rank]] for given, _, _ in known]
    for case, (ys, dxs), (_, results, gradients) in zip(TAKEN, jax.jit(program)(tensors), known, strict=True):
        for y, expected in zip(ys, results[tp.rank], strict=True):
            np.testing.assert_allclose(y, expected, rtol=1e-11, atol=1e-11, err_msg=str(case))
        for dx, expected in zip(dxs, gradients[tp.rank], strict=True):
            np.testing.assert_allclose(dx, expected, rtol=1e-11, atol=1e-11, err_msg=str(case))


def test_conventions_and_second_derivatives(tp):
    """A loss of replicated values counts once per rank, or once. Also outside of jit."""
    x, v, w = (of_rank(tp.rank, *shape, call=i) for i, shape in enumerate([(2, 3), (3, 4), (4, 3)]))
    every = of_all(tp, 2, 3).sum(0)

    def conventions(x, v, w, eager=False):
        def gradients(name, *tensors):
            def loss(gradient, *tensors):
                y = getattr(fompi.jax, name)(*tensors, comm=tp, gradient=gradient)
                return (y**2).sum() / 2

            places = tuple(range(1, 1 + len(tensors)))
            return [jax.grad(loss, places)(gradient, *tensors) for gradient in ("sum", "replicated")]

        if eager:  # JAX compiles its parts one by one, which takes long
            return {"all_gather": gradients("all_gather", x)}
        return {
            "all_reduce": gradients("all_reduce", x),
            "all_gather": gradients("all_gather", x),
            "broadcast": gradients("broadcast", x),
            "matmul_all_reduce": gradients("matmul_all_reduce", v, w),
        }

    def second(x):
        return jax.grad(lambda x: jnp.sin(jax.grad(lambda x: (fompi.jax.all_reduce(x, comm=tp) ** 3).sum())(x)).sum())(
            x
        )

    compiled, expected = jax.jit(lambda *t: (conventions(*t), second(t[0])))(x, v, w)
    close(expected, tp.size * np.cos(3 * tp.size * every**2) * 6 * tp.size * every)
    for summed, once in compiled.values():
        for by_sum, by_one in zip(summed, once, strict=True):
            close(by_sum, tp.size * np.asarray(by_one))
    eager = conventions(*map(jnp.asarray, (x, v, w)), eager=True)
    close(jax.tree.leaves(eager["all_gather"]), jax.tree.leaves(compiled["all_gather"]))
    close(compiled["all_reduce"][1][0], every)
    close(compiled["all_gather"][1][0], x)
    with pytest.raises(fompi.LayoutError, match="gradient='mean' must be 'sum' or 'replicated'"):
        fompi.jax.all_reduce(x, gradient="mean", comm=tp)


def test_transformations(tp):
    """scan, fori_loop, cond, checkpoint, a function called twice, vmap of all kinds, and gradients through them."""
    x, w, many = of_rank(tp.rank, 2, 4), of_rank(tp.rank, 4, 3, call=1), of_rank(tp.rank, 3, 2, 4, call=2)
    xs, ws, manys = of_all(tp, 2, 4), of_all(tp, 4, 3, call=1), of_all(tp, 3, 2, 4, call=2)
    n = tp.size

    def mean(x):
        return fompi.jax.all_reduce(x, op="mean", comm=tp)

    def product(x, w):
        return fompi.jax.all_gather_matmul(x, w, comm=tp)

    twice = jax.jit(lambda x: mean(x) + 1)

    def program(x, w, many):
        scanned = jax.grad(lambda x: (jax.lax.scan(lambda c, _: (mean(c), None), x, length=3)[0] ** 2).sum())
        unrolled = jax.lax.scan(lambda c, one: (c, mean(one)), 0, many, unroll=3)[1]
        return (
            scanned(x),
            unrolled,
            jax.lax.fori_loop(0, 4, lambda i, c: mean(c) + i, x),
            jax.lax.cond(x[0, 0] == x[0, 0], mean, lambda x: x, x),
            jax.grad(jax.checkpoint(lambda x: (mean(jnp.sin(x)) ** 2).sum()))(x),
            (twice(x), twice(2 * x)),
            jax.vmap(lambda x: product(x, w))(many),
            jax.vmap(product, (0, None), 2)(many, w),
            jax.vmap(product)(many, jnp.stack([w, w + 1, w + 2])),
            jax.vmap(jax.grad(lambda x: jnp.sin(product(x, w)).sum()))(many),
            jax.vmap(lambda x: fompi.jax.all_to_all(x, counts=[2] + [0] * (n - 1), dim=-2, comm=tp))(many),
            jax.vmap(lambda x: fompi.jax.reduce(x, comm=tp), 1)(many),
            jax.vmap(lambda x: fompi.jax.sendrecv(x, (tp.rank + 1) % n, (tp.rank - 1) % n, comm=tp))(many),
        )

    results = jax.jit(program)(x, w, many)
    fulls = manys.transpose(1, 0, 2, 3).reshape(3, -1, 4)
    expected = [
        2 * xs.mean(0),
        manys.mean(0),
        xs.mean(0) + 6,
        xs.mean(0),
        2 * np.sin(xs).mean(0) * np.cos(x),
        (xs.mean(0) + 1, 2 * xs.mean(0) + 1),
        fulls @ w,
        np.moveaxis(fulls @ w, 0, 2),
        fulls @ np.stack([w, w + 1, w + 2]),
        sum(np.cos(many @ v) @ v.T for v in ws),
        manys.transpose(1, 0, 2, 3).reshape(3, -1, 4) if tp.rank == 0 else np.empty((3, 0, 4)),
        np.moveaxis(manys.sum(0), 1, 0) if tp.rank == 0 else np.empty((2, 0, 4)),
        manys[tp.rank - 1],
    ]
    for place, (actual, wanted) in enumerate(zip(results, expected, strict=True)):
        for y, z in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(y, z, rtol=1e-11, atol=1e-11, err_msg=str(place))
    close(jax.vmap(mean)(jnp.asarray(many)), manys.mean(0))  # outside of jit
    if hasattr(jax, "shard_map"):  # from 0.6 on
        mesh, spec = jax.sharding.Mesh(jax.devices()[:1], ("i",)), jax.sharding.PartitionSpec("i")
        mapped = jax.shard_map(mean, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        close(jax.jit(mapped)(x), xs.mean(0))


def test_dtypes_and_donated_buffers(tp):
    """Whole numbers are exact in every dtype, also where x is donated and the result may have its memory."""
    kinds = ["float64", "float32", "float16", "bfloat16", "complex64", "int64", "int32", "uint8"]

    def program(tensors):
        return [fompi.jax.all_reduce(x, comm=tp) for x in tensors], fompi.jax.all_gather(tensors[0] > 1, comm=tp)

    donating = jax.jit(program, donate_argnums=0)
    for _ in range(2):
        tensors = [jnp.arange(3).astype(kind) + tp.rank for kind in kinds]
        sums, gathered = donating(tensors)
        assert all(x.is_deleted() for x in tensors)
        for y, kind in zip(sums, kinds, strict=True):
            assert y.dtype == kind
            close(y.astype("complex128"), np.arange(3) * tp.size + sum(range(tp.size)), 0)
        assert gathered.dtype == bool and gathered.tolist() == [i + r > 1 for r in range(tp.size) for i in range(3)]


def test_start_and_wait(tp):
    """Other work between the two, in a compiled program and outside. It has no gradient."""
    x, a = of_rank(tp.rank, 2, 4), of_rank(tp.rank, 3, 3, call=1)

    def program(x, a):
        pending = fompi.jax.all_gather.start(x, comm=tp)
        second = fompi.jax.all_reduce.start(x, comm=tp)
        a = pending.before(a)
        y, product = pending.wait(after=a @ a)
        return y, product, second.wait()

    for call in (program, jax.jit(program)):
        for _ in range(2):
            y, product, z = call(jnp.asarray(x), jnp.asarray(a))
            close(y, of_all(tp, 2, 4).reshape(-1, 4)), close(product, a @ a), close(z, of_all(tp, 2, 4).sum(0))
    for transform, words in ((jax.grad, "has no gradient"), (jax.vmap, r"inside jax\.vmap")):
        with pytest.raises(fompi.TensorError, match=words):
            jax.jit(transform(lambda x: program(x, a)[0].sum()))(x)


# ----------------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("rounds", [40, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_order(tp, rounds):
    """Independent calls, shuffled: every value is right, and no rank waits for another one's call."""
    shuffled = random.Random(1)

    def program(xs, order):
        results = {i: fompi.jax.all_reduce(xs[i] * (i + 1), comm=tp) for i in order}
        return [results[i] for i in range(6)]

    orders = [shuffled.sample(range(6), 6) for _ in range(4)]
    programs = [jax.jit(lambda xs, order=order: program(xs, order)) for order in orders]
    for call in range(rounds):
        results = programs[shuffled.randrange(4)]([jnp.full(16, float(call + i + tp.rank)) for i in range(6)])
        for i, y in enumerate(results):
            close(y, np.full(16, (i + 1) * ((call + i) * tp.size + sum(range(tp.size)))))


# --------------------------------------------------------------------------------------------------------- life time


def test_sites_die_with_the_program(tp):
    """Memory goes back to the arena when the compiled function is freed."""
    gc.collect()
    sites, lent = len(ffi.SITES), tp.engine.arena.stats().lent_nbytes
    program = jax.jit(lambda x: fompi.jax.all_reduce(x, comm=tp))
    program(jnp.ones(1 << 12)).block_until_ready()
    assert len(ffi.SITES) == sites + 1 and tp.engine.arena.stats().lent_nbytes >= lent + (1 << 15)
    compiled = program.lower(jnp.ones(1 << 12)).compile()
    del program
    gc.collect()
    close(compiled(jnp.ones(1 << 12)), np.full(1 << 12, tp.size))  # it keeps its sites
    del compiled
    gc.collect()
    assert len(ffi.SITES) == sites and tp.engine.arena.stats().lent_nbytes == lent


# ------------------------------------------------------------------------------------------------------------ errors


def test_errors_while_tracing(tp):
    """They are those of the operation, on all ranks. Later calls work."""
    x = jnp.ones((2, 4))

    def traced(**options):
        return jax.eval_shape(lambda x: fompi.jax.all_gather(x, comm=tp, **options), x)

    with pytest.raises(fompi.ShapeError, match="no dimension dim=7"):
        traced(dim=7)
    with pytest.raises(fompi.TensorError, match=r"out= cannot be used under jax\.jit"):
        traced(out=np.ones((2 * tp.size, 4)))
    with pytest.raises(fompi.PlanError, match="measure"):
        traced(effort="measure")
    with pytest.raises(fompi.PlanError, match="no schedule 'nothing'"):
        traced(schedule="nothing")
    with pytest.raises(fompi.TensorError, match='op="prod" has no gradient'):
        jax.eval_shape(jax.grad(lambda x: fompi.jax.all_reduce(x, op="prod", comm=tp).sum()), x)
    for forward in (jax.hessian, jax.jacfwd):
        with pytest.raises(fompi.TensorError, match=r"no forward mode.*use the grad of a grad"):
            jax.jit(forward(lambda x: (fompi.jax.all_gather(x, comm=tp) ** 2).sum()))(x)
    if tp.size > 1:
        with pytest.raises(fompi.ShapeError if tp.rank == 0 else fompi.MismatchError, match="dim=7"):
            traced(dim=7 if tp.rank == 0 else 0)
        with pytest.raises(fompi.MismatchError, match=r"all_reduce.*under jax\.jit"):
            name = "all_gather" if tp.rank else "all_reduce"
            jax.eval_shape(lambda x: getattr(fompi.jax, name)(x, comm=tp), x)
    assert traced().shape == (2 * tp.size, 4)
    if tp.rank == 0:  # a message that this rank alone has traced
        jax.eval_shape(lambda x: fompi.jax.sendrecv(x, None, None, comm=tp), x)
    slope = jax.jit(jax.grad(lambda x: fompi.jax.all_gather(x, comm=tp).sum()))(x)  # its backward says which call it is
    np.testing.assert_array_equal(slope, np.full((2, 4), tp.size))


def test_errors_of_a_compiled_program(tp):
    """An error on the way is a JaxRuntimeError with the words of fompi. Later calls work."""
    if tp.size == 1:
        return
    ahead, behind = (tp.rank + 1) % tp.size, (tp.rank - 1) % tp.size
    call = jax.jit(lambda x: fompi.jax.sendrecv(x, ahead, behind, comm=tp))
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"ShapeError: recv on rank {tp.rank} .* from rank {behind}"):
        call(jnp.ones(2 + tp.rank)).block_until_ready()
    close(call(jnp.full(2, float(tp.rank))), np.full(2, behind))


def test_an_unknown_jaxlib_is_refused():
    """By its name and version. The version comes from the header of jaxlib."""
    text = "#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR 9\n"
    assert ffi.header_version(text) == (0, 9) and ffi.header_version("") == (-1, -1)
    with pytest.raises(fompi.StateError, match=r"jaxlib [\d.]+ has the FFI version 0\.9, which fompi does not know"):
        ffi.check_version((0, 9))


def test_private_names_of_jax_are_there():
    """If this fails: JAX has moved these names. Change `fompi/jax/private.py`, and add the version to CHECKED."""
    assert not private.missing(), f"jax {jax.__version__} has no {', '.join(private.missing())}"
