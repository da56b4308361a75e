"""A kernel of the user that Numba has compiled, in the place of one of a plan."""

import numpy as np
import pytest

import fompi
from fompi import Shard, Spec


def test_a_kernel_that_numba_compiled():
    """The product of a gather, on one rank: compiled loops give NumPy's numbers, and the trace has them."""
    numba = pytest.importorskip("numba")

    @numba.njit
    def product(a, b, y):
        for i in range(a.shape[0]):
            for j in range(b.shape[1]):
                y[i, j] = 0.0
                for k in range(a.shape[1]):
                    y[i, j] += a[i, k] * b[k, j]

    def matmul(reads, writes):
        product(*reads, *writes)

    x, w = (np.random.default_rng(seed).standard_normal((5, 5)) for seed in (0, 1))
    specs = [Spec((5, 5), "float64", Shard(dim)) for dim in (0, 1)]
    plan = fompi.plan(fompi.all_gather_matmul, *specs, ranks=1)
    with fompi.Communicator() as comm, fompi.bind(plan, comm=comm, x=x, w=w, kernels={"matmul": matmul}) as step:
        np.testing.assert_allclose(step(), x @ w, rtol=1e-12)
        assert any("matmul" in event.name for event in step.trace.events)
