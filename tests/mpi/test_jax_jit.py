"""`fompi.jax` in programs that JAX compiles, on 1 to 4 ranks: jit, grad, vmap, scan, and the order of calls.

A compilation takes about half a second. So a test compiles one program with many calls.
"""

import functools
import gc
import itertools
import random
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import meanings
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from meanings import BASIC, CASES
from mpi4py import MPI

import fompi
import fompi.jax
from fompi.jax import ffi, private, sites

TAKEN = [case for case in BASIC if case.dim != 1]
TAKEN += [case for case in CASES if str(case).endswith("-dim1-bias-direct-2")]
pytestmark = [pytest.mark.ranks(mpich=[2], openmpi=[]), pytest.mark.usefixtures("x64")]


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
                if name == "matmul_all_reduce":
                    y = fompi.jax.matmul_all_reduce(*tensors[:2], bias=tensors[2], comm=tp, gradient=gradient)
                elif name == "all_gather_matmul_many":
                    y, _ = fompi.jax.all_gather_matmul_many(*tensors, comm=tp, gradient=gradient)
                else:
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
            "matmul_all_reduce": gradients("matmul_all_reduce", v, w, w[0] - w[0] + 1),
            "all_gather_matmul_many": gradients("all_gather_matmul_many", x, [w[:3]]),
            "reduce": gradients("reduce", x),  # not replicated: the loss of the root counts once in any case
            "reduce_scatter": gradients("reduce_scatter", jnp.concatenate([x] * tp.size)),
        }

    def second(x):
        return jax.grad(lambda x: jnp.sin(jax.grad(lambda x: (fompi.jax.all_reduce(x, comm=tp) ** 3).sum())(x)).sum())(
            x
        )

    compiled, expected = jax.jit(lambda *t: (conventions(*t), second(t[0])))(x, v, w)
    close(expected, tp.size * np.cos(3 * tp.size * every**2) * 6 * tp.size * every)
    (*dxs, bias), (*once, bias_once) = compiled["matmul_all_reduce"]
    compiled["matmul_all_reduce"] = dxs, once
    close(sum(fompi.all_gather(np.asarray(bias)[None], comm=tp)), tp.size * np.asarray(bias_once))
    for name, (summed, once) in compiled.items():
        times = 1 if name in ("reduce", "reduce_scatter") else tp.size
        for by_sum, by_one in zip(jax.tree.leaves(summed), jax.tree.leaves(once), strict=True):
            close(by_sum, times * np.asarray(by_one))
    eager = conventions(*map(jnp.asarray, (x, v, w)), eager=True)
    close(jax.tree.leaves(eager["all_gather"]), jax.tree.leaves(compiled["all_gather"]))
    close(compiled["all_reduce"][1][0], every)
    close(compiled["all_gather"][1][0], x)
    with pytest.raises(fompi.LayoutError, match="gradient='mean' must be 'sum' or 'replicated'"):
        fompi.jax.all_reduce(x, gradient="mean", comm=tp)


def test_second_derivatives_of_a_loss_that_counts_once(tp):
    """They are those of the loss as a function of the tensors of all ranks. Also outside of jit."""
    n, once = tp.size, {"gradient": "replicated", "comm": tp}
    calls = {
        "sum": lambda x: fompi.jax.all_reduce(x, **once),
        "max": lambda x: fompi.jax.all_reduce(x, op="max", **once),
        "all_gather": lambda x: fompi.jax.all_gather(x, **once),
        "broadcast": lambda x: fompi.jax.broadcast(x, root=n - 1, **once),
        "matmul_all_reduce": lambda x, w: fompi.jax.matmul_all_reduce(x, w, **once),
        "x_full": lambda x: fompi.jax.all_gather_matmul_many(x, [jnp.ones((3, 1))], **once)[0],
    }
    meaning = {
        "sum": lambda x: x.sum(0),
        "max": lambda x: x.max(0),
        "all_gather": lambda x: x.reshape(-1, 3),
        "broadcast": lambda x: x[-1],
        "matmul_all_reduce": lambda x, w: (x @ w).sum(0),
        "x_full": lambda x: x.reshape(-1, 3),
    }
    shapes = {name: [(2, 3), (3, 4)][: 1 + (name == "matmul_all_reduce")] for name in calls}
    xs = {name: [of_all(tp, *shape, call=i) for i, shape in enumerate(each)] for name, each in shapes.items()}
    vs = jax.tree.map(lambda x: np.sin(5 * x), xs)
    mine, directions = jax.tree.map(lambda x: jnp.asarray(x[tp.rank]), (xs, vs))

    def loss(call, tensors):
        y = call(*tensors)
        return (y**3 * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum()

    def second(name, tensors, v):
        def slope(tensors):
            gradients = jax.grad(functools.partial(loss, calls[name]))(tensors)
            return sum(jnp.vdot(g, d) for g, d in zip(gradients, v, strict=True))

        return jax.grad(slope)(tensors)

    def expected(name):
        gradient = jax.grad(functools.partial(loss, meaning[name]))
        return jax.jvp(gradient, (xs[name],), (vs[name],))[1]

    results = jax.jit(lambda mine, v: {name: second(name, mine[name], v[name]) for name in calls})(mine, directions)
    wanted = jax.jit(lambda: {name: expected(name) for name in calls})()
    for name in calls:
        for actual, right in zip(results[name], wanted[name], strict=True):
            np.testing.assert_allclose(actual, right[tp.rank], rtol=1e-11, atol=1e-11, err_msg=name)

    def slope(x):  # 3 * total**2
        return jax.grad(lambda x: (calls["sum"](x) ** 3).sum())(x)

    x, ones = mine["sum"][0], jnp.ones((2, 3))  # few kinds of steps: outside of jit JAX compiles each of them
    close(jax.grad(lambda x: slope(x).sum())(x), 6 * n * xs["sum"][0].sum(0))
    close(jax.grad(lambda x: jax.jvp(slope, (x,), (ones,))[1].sum())(x), np.full((2, 3), 6 * n**2))


def test_forward_mode_is_the_adjoint_of_the_gradient(tp):
    """For random vectors u and v: the sum over the ranks of u * (J v) is that of (u J) * v. For all operations."""
    weight_gradients = {
        "all_gather_weight_gradient": [(2, 3), (2 * tp.size, 4)],
        "all_gather_matmul_weight_gradient": [(2, 3), (3, 4), (2 * tp.size, 2)],
        "all_to_all_weight_gradient": [(tp.size, 3), (tp.size, 2)],
        "all_to_all_matmul_weight_gradient": [(tp.size, 3), (3, 4), (tp.size, 2)],
    }
    calls = [
        (
            lambda *leaves, case=case: case.call(fompi.jax, tp.size, tp.rank, leaves, comm=tp),
            meanings.gradients(case, tp.size)[0][tp.rank],
        )
        for case in TAKEN
    ]
    calls += [
        (lambda *leaves, name=name: getattr(fompi.jax, name)(*leaves, comm=tp), [of_rank(tp.rank, *s) for s in shapes])
        for name, shapes in weight_gradients.items()
    ]

    def dot(a, b):
        return sum((x * y).sum() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))

    def program(tensors):
        answers = []
        for (call, _), mine in zip(calls, tensors, strict=True):
            v = [jnp.cos(7 * t) for t in mine]
            ys, pushed = jax.jvp(call, tuple(mine), tuple(v))
            u = jax.tree.map(lambda y: jnp.sin(3 * y), ys)
            answers.append((dot(u, pushed), dot(jax.vjp(call, *mine)[1](u), v)))
        return jnp.array(answers)

    answers = jax.jit(program)([[jnp.asarray(t) for t in mine] for _, mine in calls])
    forward, backward = fompi.all_reduce(np.array(answers), comm=tp).T
    np.testing.assert_allclose(forward, backward, rtol=1e-10, atol=1e-10)
    assert np.count_nonzero(np.abs(forward) > 1e-3) > len(calls) // 2


def test_forward_mode_of_higher_order(tp):
    """jacfwd, hessian, linearize, and a jvp of a jvp: in a compiled program and outside, where JAX can."""
    x, v = of_rank(tp.rank, 3), of_rank(tp.rank, 3, call=1)
    total, moved = of_all(tp, 3).sum(0), of_all(tp, 3, call=1).sum(0)

    def summed(x):
        return fompi.jax.all_reduce(x, comm=tp)

    def program(x, v):
        def pushed(x):
            return jax.jvp(lambda x: jnp.sin(summed(x)), (x,), (v,))[1]

        return (
            jax.hessian(lambda x: jnp.sin(summed(x)).sum())(x),
            jax.jacfwd(summed)(x),
            pushed(x),
            jax.jvp(pushed, (x,), (v,))[1],
            jax.grad(lambda x: pushed(x).sum())(x),
        )

    hessian, jacobian, first, second, slope = jax.jit(program)(x, v)
    close(hessian, np.diag(-np.sin(total)) * tp.size**2), close(jacobian, np.eye(3) * tp.size)
    close(first, np.cos(total) * moved), close(second, -np.sin(total) * moved**2)
    close(slope, -np.sin(total) * moved * tp.size)
    close(
        jax.jvp(jax.grad(lambda x: (summed(x) ** 2).sum()), (jnp.asarray(x),), (jnp.asarray(v),))[1],
        2 * tp.size * moved,
    )
    y, push = jax.linearize(jax.jit(lambda x: jnp.sin(summed(x))), jnp.asarray(x))
    close(y, np.sin(total)), close(push(jnp.asarray(v)), np.cos(total) * moved)


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
            jax.vmap(lambda x: fompi.jax.matmul_all_to_all_columns(x, w, columns=[3] + [0] * (n - 1), comm=tp))(many),
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
        np.concatenate([mine @ v for mine, v in zip(manys, ws, strict=True)], 1)[..., : 0 if tp.rank else 3],
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


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="JAX has jax.shard_map from 0.6 on")
def test_axes_of_shard_map(tp):
    """With check_vma=True results vary as the tensors do: gradients and loops work. Tensors that differ are refused."""
    mesh, spec, whole = jax.sharding.Mesh(jax.devices()[:1], ("i",)), *map(jax.sharding.PartitionSpec, ("i", None))
    x, w, total = of_rank(tp.rank, 2, 4), of_rank(0, 4, 3), of_all(tp, 2, 4).sum(0)

    def summed(x):
        return fompi.jax.all_reduce(x, comm=tp)

    def program(x):
        y, _ = jax.lax.scan(lambda c, _: (fompi.jax.all_reduce(c, op="mean", comm=tp), None), x, length=2)
        started = fompi.jax.all_reduce.start(x, comm=tp).wait()
        return y, jax.grad(lambda x: (summed(x) ** 2).sum())(x), jax.jvp(summed, (x,), (x,))[1] + 0 * started

    y, slope, pushed = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec))(x)
    close(y, total / tp.size), close(slope, 2 * tp.size * total), close(pushed, total)
    product = functools.partial(fompi.jax.all_gather_matmul, comm=tp)
    with pytest.raises(fompi.TensorError, match=r"vary over different axes of the mesh: \['i'\], \[\]"):
        jax.eval_shape(jax.shard_map(product, mesh=mesh, in_specs=(spec, whole), out_specs=spec), x, w)


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
    for transform, words in ((jax.grad, r"all_gather\.start has no gradient"), (jax.vmap, r"inside jax\.vmap")):
        for jit in (jax.jit, lambda f: f):
            with pytest.raises(fompi.TensorError, match=words):
                jit(transform(lambda x: program(x, a)[0].sum()))(jnp.asarray(x))


def test_constants_of_a_program(tp):
    """A call on arrays alone belongs to the program that JAX traces. Outside of one it runs at once."""
    x, w = jnp.asarray(of_rank(tp.rank, 2, 3)), jnp.asarray(of_rank(0, 3, 2))
    total, before = of_all(tp, 2, 3).sum(0), len(ffi.SITES)

    def program(y):
        summed = fompi.jax.all_reduce(x, comm=tp) + fompi.jax.all_reduce(np.asarray(x), comm=tp)
        started = fompi.jax.all_reduce.start(x, comm=tp).wait()
        return y * summed, y * started, fompi.jax.column_parallel_linear(x, w, comm=tp) + 0 * y

    for kind in (jax.jit, fompi.jax.jit):
        summed, started, product = kind(program)(2.0)
        close(summed, 4 * total), close(started, 2 * total), close(product, of_all(tp, 2, 3).reshape(-1, 3) @ w)
    assert len(ffi.SITES) > before
    close(jax.jit(jax.grad(lambda y: (y * fompi.jax.all_reduce(x, comm=tp)).sum()))(2.0), total.sum())
    sites = len(ffi.SITES)
    close(jax.grad(lambda y: (y * fompi.jax.all_reduce(x, comm=tp)).sum())(2.0), total.sum())
    assert len(ffi.SITES) <= sites


# ----------------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("rounds", [24, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_order(tp, rounds):
    """Independent calls, shuffled: every value is right, and no rank waits for another one's call.

    The ranks compute their tensors from arrays of other sizes, so XLA may schedule them in another order. Some programs
    make the token of the order themselves. Up to 4 programs run without a wait between them, also one twice.
    """
    shuffled = random.Random(1)

    def program(xs, order):
        sizes = [100 * (1 + (i + tp.rank) % 6) for i in range(6)]
        tensors = [xs[i] * (i + 1) + 0 * jnp.outer(jnp.arange(n), xs[i][:1]).sum() for i, n in enumerate(sizes)]
        results = {i: fompi.jax.all_reduce(tensors[i], comm=tp) for i in order}
        return [results[i] for i in range(6)]

    orders = [shuffled.sample(range(6), 6) for _ in range(4)]
    kinds = [jax.jit, jax.jit, fompi.jax.jit, fompi.jax.jit]
    programs = [kind(lambda xs, order=order: program(xs, order)) for kind, order in zip(kinds, orders, strict=True)]
    for call in range(0, rounds, 4):
        inputs = [[jnp.full(16, float(call + j + i + tp.rank)) for i in range(6)] for j in range(4)]
        running = [programs[shuffled.randrange(4)](xs) for xs in inputs]
        for j, results in enumerate(running):
            for i, y in enumerate(results):
                close(y, np.full(16, (i + 1) * ((call + j + i) * tp.size + sum(range(tp.size)))))


def test_a_program_with_a_token_of_its_own(tp):
    """`fompi.jax.jit` has the values of `jax.jit`, and JAX starts its program without a token."""
    x, many = jnp.asarray(of_rank(tp.rank, 2, 3)), of_rank(tp.rank, 2, 2, 3, call=1)
    total, totals = of_all(tp, 2, 3).sum(0), of_all(tp, 2, 2, 3, call=1).sum(0)

    @fompi.jax.jit
    def inner(x):
        return fompi.jax.all_reduce(x, comm=tp)

    def loop(x, times, *, scale, words):
        assert words == "static"
        y = inner(jnp.sin(inner(x)))  # one site that is called twice
        z = jax.lax.scan(lambda c, _: (fompi.jax.all_reduce(c, op="mean", comm=tp), None), x, length=times)[0]
        slope = jax.grad(lambda x: (inner(x) ** 2).sum())(x)
        return {"y": scale * y, "z": (z, slope, None), "three": 3}

    call = fompi.jax.jit(loop, static_argnums=1, static_argnames="words")
    for _ in range(2):
        result = call(x, 3, scale=2.0, words="static")
        close(result["y"], 2 * tp.size * np.sin(total)), close(result["z"][0], total / tp.size)
        close(result["z"][1], 2 * tp.size * total)
        assert result["z"][2] is None and int(result["three"]) == 3
    assert "!stablehlo.token" not in inner.lower(x).as_text().split("@main")[1].split("{\n")[0]
    assert "!stablehlo.token" in inner.lower(x).as_text()
    donating = fompi.jax.jit(lambda x: fompi.jax.all_reduce(x, comm=tp), donate_argnums=0)
    for _ in range(2):
        given = x + 0
        close(donating(given), total)
        assert given.is_deleted()
    close(jax.vmap(inner)(many), totals)  # a trace around it
    close(jax.grad(lambda x: inner(x).sum())(x), np.full((2, 3), tp.size))
    printing = fompi.jax.jit(lambda x: (jax.debug.print("", ordered=True), fompi.jax.all_reduce(x, comm=tp))[1])
    close(printing(x), total)


def test_a_call_without_used_results_runs(tp, monkeypatch):
    """In a program that returns nothing, and in one whose result a program around it does not use."""
    ran, run, x = [], sites.BoundSite.run, jnp.ones(3)
    monkeypatch.setattr(sites.BoundSite, "run", lambda site, *memory: (ran.append(site), run(site, *memory)))

    def summed(x):
        return fompi.jax.all_reduce(x, comm=tp)

    def nothing(x):
        summed(x)

    inner, silent = fompi.jax.jit(summed), fompi.jax.jit(nothing)
    programs = [
        silent,
        jax.jit(lambda x: (inner(x), silent(x), x)[2]),
        fompi.jax.jit(lambda x: (inner(x), silent(x), x)[2]),
        jax.grad(lambda x: (inner(x), silent(x), x.sum())[2]),
    ]
    for program, times in zip(programs, (1, 2, 2, 2), strict=True):
        for _ in range(2):
            ran.clear()
            jax.block_until_ready(program(x))
            jax.effects_barrier()
            assert len(ran) == times


# --------------------------------------------------------------------------------------------------------- life time


def collect():
    gc.collect()
    ffi.release()  # as the next trace does


@pytest.mark.parametrize("jit", [jax.jit, fompi.jax.jit], ids=["jax", "fompi"])
def test_a_program_that_is_dropped_while_it_runs(tp, jit):
    """Its sites live until it has ended."""
    collect()
    before, x = len(ffi.SITES), jnp.ones((600, 600))
    program = jit(lambda x: fompi.jax.all_reduce((x @ x @ x @ x)[0, :3] / 600**3, comm=tp))
    y = program(x)
    del program
    collect()
    close(y, np.full(3, tp.size))
    deadline = time.monotonic() + 10  # a thread of XLA frees them
    while len(ffi.SITES) > before and time.monotonic() < deadline:
        collect()
    assert len(ffi.SITES) == before


@pytest.mark.parametrize("jit", [jax.jit, fompi.jax.jit], ids=["jax", "fompi"])
def test_sites_die_with_the_program(tp, jit):
    """Memory goes back to the arena when the compiled function is freed."""
    collect()
    sites, lent = len(ffi.SITES), tp.engine.arena.lent_nbytes
    program = jit(lambda x: fompi.jax.all_reduce(x, comm=tp))
    for _ in range(3):
        close(program(jnp.ones(1 << 12)), np.full(1 << 12, tp.size))
        collect()
    assert len(ffi.SITES) == sites + 1 and tp.engine.arena.lent_nbytes >= lent + (1 << 15)
    compiled = program.lower(jnp.ones(1 << 12)).compile()
    del program
    collect()
    close(compiled(jnp.ones(1 << 12)), np.full(1 << 12, tp.size))  # it keeps its sites
    del compiled
    collect()
    assert len(ffi.SITES) == sites and tp.engine.arena.lent_nbytes == lent


def test_clear_cache_frees_the_sites(tp):
    """Those of the program, and those that it has inside of other traces."""
    collect()
    before, x = len(ffi.SITES), jnp.ones(3)
    program = fompi.jax.jit(lambda x: fompi.jax.all_reduce(x, comm=tp))
    close(program(x), np.full(3, tp.size)), close(jax.vmap(program)(x), np.full(3, tp.size))
    collect()
    assert len(ffi.SITES) > before + 1
    program.clear_cache()
    collect()
    assert len(ffi.SITES) == before
    close(program(x), np.full(3, tp.size))


def test_the_cache_on_disk_holds_no_call_of_another_run(tp, tmp_path, monkeypatch):
    """Two runs whose calls have the same numbers share a compiled program. Each calls its own operation."""
    monkeypatch.setattr(sites, "_NUMBERS", itertools.count(10**9))
    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    x, entries = jnp.full(3, tp.rank + 1.0), []
    try:
        for op, expected in (("sum", tp.size * (tp.size + 1) / 2), ("max", tp.size)):
            monkeypatch.setattr(sites, "_NUMBERS", itertools.count(10**9))
            program = jax.jit(lambda x, op=op: fompi.jax.all_reduce(x, op=op, comm=tp))
            close(program(x), np.full(3, expected))
            entries.append(sorted(path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")))
            del program
            collect()
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert entries[0] and entries[0] == entries[1]  # the second run found the program of the first one


def test_a_schedule_that_is_measured(tp):
    """When JAX traces the call: the program has the fastest schedule, forward and backward."""
    x, w = jnp.arange(6.0).reshape(2, 3) + tp.rank, jnp.ones((3, 2)) * (1 + tp.rank)

    def loss(x, w, **how):
        return (fompi.jax.all_gather_matmul(x, w, comm=tp, **how) ** 2).sum()

    expected = jax.value_and_grad(loss, (0, 1))(x, w)
    for got in (jax.jit(jax.value_and_grad(functools.partial(loss, effort="measure"), (0, 1)))(x, w) for _ in range(2)):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, expected)


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
    with pytest.raises(fompi.PlanError, match="effort must be 'plan' or 'measure'"):
        traced(effort="much")
    with pytest.raises(fompi.ShapeError, match="no dimension dim=7"):
        traced(effort="measure", dim=7)
    with pytest.raises(fompi.PlanError, match="no schedule 'nothing'"):
        traced(schedule="nothing")
    with pytest.raises(fompi.DtypeError, match=r"key<fry>: pass jax\.random\.key_data"):
        jax.eval_shape(lambda k: fompi.jax.all_gather(k, comm=tp), jax.random.split(jax.random.key(0)))
    with pytest.raises(fompi.DtypeError, match="a tensor has dtype int4; fompi supports: int8"):
        jax.eval_shape(lambda x: fompi.jax.all_gather(x, comm=tp), x.astype("int4"))
    with pytest.raises(fompi.TensorError if tp.rank == 0 else fompi.MismatchError, match="dict is not a tensor"):
        jax.eval_shape(lambda x: fompi.jax.all_reduce(x if tp.rank else {"x": x}, comm=tp), x)
    with pytest.raises(fompi.TensorError, match='op="prod" has no gradient'):
        jax.eval_shape(jax.grad(lambda x: fompi.jax.all_reduce(x, op="prod", comm=tp).sum()), x)
    for forward in (jax.hessian, jax.jacfwd):
        with pytest.raises(fompi.TensorError, match=r'op="max" has no forward mode.*use the grad of a grad'):
            jax.jit(forward(lambda x: (fompi.jax.all_reduce(x, op="max", comm=tp) ** 2).sum()))(x)
    if tp.size > 1:
        with pytest.raises(fompi.ShapeError if tp.rank == 0 else fompi.MismatchError, match="dim=7"):
            traced(dim=7 if tp.rank == 0 else 0)
        with pytest.raises(fompi.MismatchError, match=r"all_reduce.*under jax\.jit"):
            name = "all_gather" if tp.rank else "all_reduce"
            jax.eval_shape(lambda x: getattr(fompi.jax, name)(x, comm=tp), x)
        convention = "sum" if tp.rank else "replicated"
        mixed = jax.grad(lambda x: fompi.jax.all_gather(x, comm=tp, gradient=convention).sum())
        with pytest.raises(fompi.MismatchError, match="gradient=replicated"):
            jax.eval_shape(mixed, x)
        with pytest.raises(fompi.MismatchError, match="of a loss that counts once"):
            mixed(x)
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


def test_errors_of_a_program_that_jax_starts_in_cpp(tp, comm):
    """They have the same type as others."""
    own = fompi.Communicator(comm, "own")
    call = fompi.jax.jit(lambda x: fompi.jax.all_reduce(x, comm=own))
    close(call(jnp.ones(2)), np.full(2, tp.size))
    own.close()
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="StateError: the communicator 'own' is closed"):
            call(jnp.ones(2)).block_until_ready()


def test_calls_run_on_the_memory_of_xla(tp, monkeypatch):
    """No tensor is copied, but those whose rows are not their first dimension."""
    copied = []
    monkeypatch.setattr(sites, "array_at", lambda address, form: (copied.append(form), ffi.array_at(address, form))[1])
    x, w = of_rank(tp.rank, 3, 4), of_rank(0, 4, 2, call=1)

    def program(x, w):
        y = fompi.jax.all_gather_matmul(x, w, comm=tp, schedule="direct")
        return y, fompi.jax.all_reduce(2 * x, comm=tp, schedule="direct"), fompi.jax.all_gather(x, dim=1, comm=tp)

    call = fompi.jax.jit(program)
    for _ in range(3):
        y, total, gathered = call(jnp.asarray(x), jnp.asarray(w))
        close(y, of_all(tp, 3, 4).reshape(-1, 4) @ w), close(total, 2 * of_all(tp, 3, 4).sum(0))
        close(gathered, np.concatenate(list(of_all(tp, 3, 4)), 1))
    assert [form.shape for form in copied] == 3 * [(3, 4), (3, 4 * tp.size)]


def test_a_call_that_is_given_up_uses_no_memory_of_xla(tp, comm):
    """Rank 0 calls alone, and its wait expires. MPI then holds none of its receives."""
    if tp.size == 1:
        return
    own = fompi.Communicator(comm, "own")
    call = jax.jit(lambda x: fompi.jax.all_gather(x, comm=own, schedule="direct"))
    x = jnp.full(3, float(tp.rank))
    close(call(x), np.repeat(np.arange(float(tp.size)), 3))
    step = ffi.SITES[max(ffi.SITES)].step
    own.channel.timeout = 0.3
    if tp.rank == 0:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"WaitTimeout: .* rank 0 waits"):
            call(x).block_until_ready()
        given_up = step._run.given_up
        assert len(given_up) >= tp.size - 1 and all(request == MPI.REQUEST_NULL for request, _ in given_up)
        with pytest.raises(jax.errors.JaxRuntimeError, match="WaitTimeout"):  # the communicator is of no more use
            call(x).block_until_ready()
    comm.Barrier()


def test_several_devices_in_one_process_are_refused(tp):
    """A process is one rank, so a program may run on one of its devices only."""
    context = SimpleNamespace(axis_context=SimpleNamespace(num_devices=2))
    with pytest.raises(fompi.TensorError, match="runs on 2 devices of 1 processes, but each process is one rank"):
        private.check_devices(context)
    private.check_devices(SimpleNamespace(axis_context=SimpleNamespace(num_devices=1)))


def test_an_unknown_jaxlib_is_refused():
    """By its name and version. The version comes from the header of jaxlib."""
    text = "#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR 9\n"
    assert ffi.header_version(text) == (0, 9) and ffi.header_version("") == (-1, -1)
    with pytest.raises(fompi.StateError, match=r"jaxlib [\d.]+ has the FFI version 0\.9, which fompi does not know"):
        ffi.check_version((0, 9))


def test_private_names_of_jax_are_there():
    """If this fails: JAX has moved these names. Change `fompi/jax/private.py`, and add the version to CHECKED."""
    assert not private.missing(), f"jax {jax.__version__} has no {', '.join(private.missing())}"


def test_the_machine_chooses_the_schedule(comm):
    """That of FOMPI_MACHINE, as in a call outside of jit."""
    x = jnp.ones((64 * comm.size, 256), jnp.float32)
    chosen = []
    for machine in (None, fompi.Machine.load("gigabit")):
        with fompi.Communicator(comm) as own:  # what one has made for a call is for its first machine
            own.machine = machine
            with own.record() as traces:
                fompi.jax.all_reduce(x, comm=own)
            before = set(ffi.SITES)
            jax.jit(lambda x: fompi.jax.all_reduce(x, comm=own))(x).block_until_ready()
            (number,) = set(ffi.SITES) - before
            plan = ffi.SITES[number].step.plan
            chosen.append((plan.schedule, plan.shares))
            assert f" by {plan.schedule}" in traces[-1].title
    assert comm.size == 1 or chosen[0] != chosen[1]
