"""The names of mpi4jax, on 1 to 4 ranks: values as NumPy has them, in a compiled program and outside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import fompi
import fompi.jax
import fompi.jax.mpi4jax as mpi4jax

pytestmark = pytest.mark.ranks(mpich=[2], openmpi=[])

FOLDS = {
    "SUM": np.sum, "MAX": np.max, "MIN": np.min, "PROD": np.prod,
    "BAND": np.bitwise_and.reduce, "BOR": np.bitwise_or.reduce, "BXOR": np.bitwise_xor.reduce,
    "LAND": np.all, "LOR": np.any, "LXOR": lambda a, axis: np.logical_xor.reduce(a != 0, axis=axis),
}  # fmt: skip


def of_rank(rank):
    return np.arange(6, dtype=np.int32).reshape(2, 3) % (rank + 2)


def test_every_name(world):
    rank, size, comm = world.rank, world.size, world.link.comm
    xs = np.stack([of_rank(r) for r in range(size)])
    root, ahead, behind = size - 1, (rank + 1) % size, (rank - 1) % size
    status = MPI.Status()

    def program(x, many):
        if rank == 0 and size > 1:
            mpi4jax.send(2 * x, size - 1, tag=3, comm=comm)
        answers = {
            "allreduce": [mpi4jax.allreduce(x, getattr(MPI, name), comm=comm) for name in FOLDS],
            "bool": mpi4jax.allreduce(x > 0, MPI.LOR, comm=comm),
            "allgather": mpi4jax.allgather(x, comm=comm),
            "alltoall": mpi4jax.alltoall(many, comm=comm),
            "bcast": mpi4jax.bcast(x, root, comm=comm),
            "gather": mpi4jax.gather(x, root, comm=comm),
            "scatter": mpi4jax.scatter(many if rank == root else x, root, comm=comm),
            "reduce": mpi4jax.reduce(x, MPI.SUM, root, comm=comm),
            "scan": mpi4jax.scan(x, MPI.SUM, comm=comm),
            "sendrecv": mpi4jax.sendrecv(x, x, behind, ahead, comm=comm, status=status),
        }
        if rank == size - 1 and size > 1:
            answers["recv"] = mpi4jax.recv(x, 0, tag=3, comm=comm)
        return answers

    def many_of(r):
        return 10 * r + np.arange(size * 6, dtype=np.int32).reshape(size, 2, 3)

    expected = {
        "allreduce": [fold(xs, axis=0) for fold in FOLDS.values()],
        "bool": (xs > 0).any(0),
        "allgather": xs,
        "alltoall": np.stack([many_of(r)[rank] for r in range(size)]),
        "bcast": xs[root],
        "gather": xs if rank == root else xs[rank],
        "scatter": many_of(root)[rank],
        "reduce": xs.sum(0) if rank == root else xs[rank],
        "scan": xs[: rank + 1].sum(0),
        "sendrecv": xs[behind],
        "recv": 2 * xs[0],
    }
    x, many = jnp.asarray(of_rank(rank)), jnp.asarray(many_of(rank))
    for call in (program, jax.jit(program)):
        answers = call(x, many)
        assert answers.keys() == expected.keys() - ({"recv"} if rank < size - 1 or size == 1 else set())
        for name, answer in answers.items():
            for y, z in zip(jax.tree.leaves(answer), jax.tree.leaves(expected[name]), strict=True):
                np.testing.assert_array_equal(y, z, err_msg=name)
        assert status.Get_source() == behind
    mpi4jax.barrier(comm=comm)
    assert not mpi4jax.has_cuda_support() and not mpi4jax.has_sycl_support()


def test_transposes(world):
    """The dual of a sum is the identity, and its dual is the sum again. The dual of a gather is a scattered sum."""
    x, total = jnp.ones(3) * (world.rank + 1), np.full(3, sum(range(1, world.size + 1)))

    def summed(x):
        return mpi4jax.allreduce(x, MPI.SUM, comm=world)

    def dual(y):
        return jax.linear_transpose(summed, x)(y)[0]

    def program(x):
        (twice,) = jax.linear_transpose(dual, x)(x)
        (scattered,) = jax.linear_transpose(lambda x: fompi.jax.all_gather(x, comm=world), x)(
            jnp.concatenate([x] * world.size)
        )
        slope = jax.grad(lambda x: (summed(x) ** 2).sum())(x)
        return dual(x), twice, scattered, slope

    for call in (program, jax.jit(program)):
        once, twice, scattered, slope = call(x)
        np.testing.assert_array_equal(once, x), np.testing.assert_array_equal(twice, total)
        np.testing.assert_array_equal(scattered, total), np.testing.assert_array_equal(slope, 2 * total)
    with pytest.raises(fompi.TensorError, match="is not linear here"):
        jax.linear_transpose(jax.jit(lambda x: fompi.jax.all_reduce(x, op="max", comm=world)), x)(x)


def test_what_is_refused(world):
    x = jnp.ones(2)
    with pytest.raises(fompi.LayoutError, match=r"is not one of MPI\.SUM"):
        mpi4jax.allreduce(x, MPI.MAXLOC, comm=world)
    with pytest.raises(fompi.LayoutError, match="source= must be a rank"):
        mpi4jax.recv(x, MPI.ANY_SOURCE, comm=world)
    with pytest.raises(fompi.LayoutError, match="recvtag=2 must be sendtag=1"):
        mpi4jax.sendrecv(x, x, 0, 0, sendtag=1, recvtag=2, comm=world)
    with pytest.raises(fompi.ShapeError, match="must be alike"):
        mpi4jax.sendrecv(x, x[:1], 0, 0, comm=world)
    with pytest.raises(fompi.ShapeError, match=r"must have shape \(nproc, ...\)"):
        mpi4jax.alltoall(jnp.ones(world.size + 1), comm=world)
