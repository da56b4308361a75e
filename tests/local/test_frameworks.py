"""torch and JAX on one rank: gradients equal finite differences, and transforms without a gradient raise an error."""

from __future__ import annotations

import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import meanings
import ml_dtypes
import numpy as np
import pytest
import torch
from meanings import CASES
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fompi
import fompi.jax
from fompi.ops.operations import OPERATIONS
from fompi.tensors.dlpack import Lent

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(scope="module")
def tp():
    return fompi.Communicator.of(None)


def random_tensor(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


# ------------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_finite_differences(tp, case, dtype):
    """torch.autograd.gradcheck for every tensor, with real and with complex numbers. Complex ones have no order."""
    if dtype.is_complex and case.options.get("op") in ("max", "min"):
        pytest.skip("no such reduction")
    shapes = [t.shape for t in meanings.tensors(case, 1, meanings.normal)[0]]
    leaves = [random_tensor(*shape, dtype=dtype).requires_grad_() for shape in shapes]
    assert torch.autograd.gradcheck(lambda *given: tuple(case.call(fompi, 1, 0, given, comm=tp)), leaves)


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (2, 0), (0, 0)])
@pytest.mark.parametrize("case", [c for c in CASES if any(c.biased) and not c.options], ids=str)
def test_gradients_of_empty_tensors(tp, case, rows, columns):
    """Without rows, or with weights without columns, gradients are zeros of the right shapes."""
    shapes = [(rows, 4), *[(4, columns)] * len(case.weights), *[(columns,)] * sum(case.biased)]

    def call(namespace, *tensors):
        x, weights, biases = case.operands(tensors)
        operation = getattr(namespace, case.operation)
        if case.operation.endswith("_many"):
            return operation(x, weights, biases=biases, comm=tp)[1][0]
        return operation(x, *weights, bias=biases[0], comm=tp)

    y, pull = jax.vjp(lambda *tensors: call(fompi.jax, *tensors), *[jnp.ones(shape) for shape in shapes])
    leaves = [torch.ones(shape, requires_grad=True) for shape in shapes]
    by_torch = torch.autograd.grad(call(fompi, *leaves).sum(), leaves, materialize_grads=True)
    for grads in (pull(y), by_torch):
        assert [tuple(g.shape) for g in grads] == shapes
        assert rows or not any(np.asarray(g).any() for g in grads)


def test_a_tensor_that_is_used_twice(tp):
    """Its gradients are added, also with hooks and views."""
    x, w = random_tensor(2, 4).requires_grad_(), random_tensor(4, 4).requires_grad_()
    seen = []
    y = fompi.all_gather_matmul(x, w, comm=tp)
    y.register_hook(lambda g: seen.append(g.clone()))
    z = fompi.matmul_reduce_scatter(y, w.T, comm=tp)
    (z * x).sum().backward()
    u, v = x.detach().requires_grad_(), w.detach().requires_grad_()
    ((u @ v @ v.T) * u).sum().backward()
    assert torch.allclose(x.grad, u.grad) and torch.allclose(w.grad, v.grad)
    assert len(seen) == 1 and torch.allclose(seen[0], x.detach() @ w.detach())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(tp, reentrant):
    """The forward runs twice, the gradient is the same."""
    x, w = random_tensor(2, 4).requires_grad_(), random_tensor(4, 3).requires_grad_()

    def layer(x):
        return torch.tanh(fompi.all_gather_matmul(x, w, comm=tp))

    wanted = torch.autograd.grad(layer(x).sum(), (x, w))
    checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad, wanted[0]) and torch.equal(w.grad, wanted[1])


def test_backward_on_threads(tp):
    """Several threads share one communicator. Each has its own graph."""
    gradients = {}

    def work(seed):
        x, w = (seed * random_tensor(2, 4)).requires_grad_(), random_tensor(4, 3).requires_grad_()
        for _ in range(20):
            w.grad = None
            fompi.all_gather_matmul(x, w, comm=tp).sum().backward()
        gradients[seed] = w.grad

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.allclose(gradients[seed], seed * gradients[1]) for seed in range(1, 5))


# --------------------------------------------------------------------------------------- the framework of a result


def test_the_result_is_a_tensor_of_the_framework_of_x(tp):
    x, w = np.ones((2, 3)), np.full((3, 2), 2.0)
    forms = {"numpy": np.asarray, "torch": torch.from_numpy, "jax": jnp.asarray, "dlpack": lambda a: Lent(a, "float64")}
    kinds = {"numpy": np.ndarray, "torch": torch.Tensor, "jax": jax.Array, "dlpack": Lent}
    for framework, form in forms.items():
        for other in forms.values():
            y = fompi.all_gather_matmul(form(x), other(w), comm=tp)
            assert isinstance(y, kinds[framework])
            assert (np.asarray(getattr(y, "array", y)) == 6).all()
    half = fompi.all_gather(np.ones(3, ml_dtypes.bfloat16), comm=tp)
    assert type(half) is np.ndarray and half.dtype == ml_dtypes.bfloat16
    parameter = fompi.all_gather(torch.nn.Parameter(torch.ones(3)), comm=tp)
    assert type(parameter) is torch.Tensor and parameter.requires_grad


def test_fompi_jax_takes_arrays_of_other_frameworks(tp):
    y = fompi.jax.all_gather_matmul(np.ones((2, 3)), np.ones((3, 2)), comm=tp)
    assert (np.asarray(y) == 3).all()
    assert fompi.jax.all_reduce.__doc__ == fompi.all_reduce.__doc__
    assert set(fompi.jax.custom_vjp.__all__) == {*OPERATIONS, "sendrecv"} > {case.operation for case in CASES}


# ------------------------------------------------------------------------------------ transforms without a gradient


def test_transforms_of_torch_raise_an_error(tp):
    """None of them returns a result with a missing derivative."""
    x, w = random_tensor(2, 3), random_tensor(3, 2)

    def product(w):
        return fompi.all_gather_matmul(x, w, comm=tp).sum()

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.hessian, torch.vmap):
        with pytest.raises(fompi.TensorError):
            transform(product)(w.expand(4, 3, 2) if transform is torch.vmap else w)
    with pytest.raises(fompi.TensorError):
        torch.func.jvp(product, (w,), (w,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(w, w)
        with pytest.raises(fompi.TensorError, match="forward-mode tangent"):
            product(dual)
        with pytest.raises(fompi.TensorError, match="forward-mode tangent"):
            product(forward_ad.make_dual(w.requires_grad_(), w.detach()))


def test_transforms_of_jax(tp):
    """tests/mpi/test_jax_jit.py has jit, and the forward mode of every operation."""
    x = jnp.ones((2, 3))

    def total(x):
        return (fompi.jax.all_reduce(x, comm=tp) ** 2).sum()

    assert (jax.grad(total)(x) == 2).all()
    assert (jax.jacfwd(total)(x) == 2).all() and jax.jvp(total, (x,), (x,))[1] == 12
    assert (jax.hessian(total)(x).reshape(6, 6) == 2 * jnp.eye(6)).all()
    assert (jax.jacrev(jax.grad(total))(x).reshape(6, 6) == 2 * jnp.eye(6)).all()
    assert jax.vmap(total)(x).tolist() == [3, 3] and jax.make_jaxpr(total)(x).eqns


def test_start_has_no_gradient(tp):
    x = random_tensor(2, 3).requires_grad_()
    with pytest.raises(fompi.TensorError, match=r"start has no gradient|pass x\.detach\(\)"):
        fompi.all_gather.start(x, comm=tp)
    assert torch.equal(fompi.all_gather.start(x.detach(), comm=tp).wait(), x)


# ----------------------------------------------------------------------------------------------------------- imports

PLANNING = """
import sys
import fompi
from fompi import Replicate, Shard, Spec

plan = fompi.plan(fompi.all_gather_matmul, Spec((64, 8), "bfloat16", Shard(0)), Spec((8, 12), "bfloat16", Shard(1)),
                  ranks=4, schedule="ring", slices=2)
fompi.verify(plan)
assert len(str(plan).splitlines()) > 10
print(fompi.simulate(plan, fompi.Machine.load("laptop")))
foreign = {"mpi4py", "torch", "jax", "jaxlib", "cupy", "numba", "ml_dtypes", "scipy", "tqdm", "matplotlib"}
loaded = foreign & {name.partition(".")[0] for name in sys.modules}
assert not loaded, loaded
"""


def test_planning_loads_no_mpi_and_no_framework():
    """A new process imports fompi, and plans, prints, verifies and simulates an operation."""
    done = subprocess.run([sys.executable, "-c", PLANNING], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("predicted: all_gather_matmul")
