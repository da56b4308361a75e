"""`order="ranks"`: the bits of one tree over the ranks, from all interfaces."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

import fompi
from fompi.backends.cuda.software import SoftwareDevice
from fompi.plans.tree import folded

pytestmark = pytest.mark.ranks(mpich=[1, 2, 4], openmpi=[3])


def term(rank, *shape, dtype="float32"):
    return np.random.default_rng([rank, *shape]).standard_normal(shape).astype(dtype)


def tree(size, *shape, dtype="float32"):
    return folded([term(r, *shape, dtype=dtype) for r in range(size)], np.add)


def schedules(world):
    groups = ["hierarchical(2)"] if world.size == 4 else []
    return ["auto", "direct", "unfused_p2p", "sliced_p2p", "exchange", *groups] if world.size > 1 else ["auto"]


@pytest.mark.parametrize("rows", [1, 7, 64, 20_000])
def test_all_reduce(world, rows):
    """All schedules, slices and ways to call, small and large."""
    x, wanted = term(world.rank, rows, 3), tree(world.size, rows, 3).tobytes()
    for schedule in schedules(world):
        for slices in (None,) if schedule in ("auto", "exchange") else (1, 2, (1, 3)):
            how = {"comm": world, "schedule": schedule, "slices": slices, "order": "ranks"}
            assert fompi.all_reduce(x, **how).tobytes() == wanted, (schedule, slices)
            assert fompi.all_reduce.start(x, **how).wait().tobytes() == wanted
            with fompi.all_reduce.bind(x, **how) as step:
                assert {step().tobytes() for _ in range(3)} == {wanted}
    over = x.copy()
    assert fompi.all_reduce(over, out=over, comm=world, order="ranks").tobytes() == wanted
    assert fompi.all_reduce(x, comm=world, order="ranks", effort="measure").tobytes() == wanted
    mean = fompi.all_reduce(x, op="mean", comm=world, order="ranks")
    assert mean.tobytes() == (tree(world.size, rows, 3) / np.float32(world.size)).tobytes()


def test_reduce_scatter_and_reduce(world):
    rows, size = 5 * world.size + 2, world.size
    x, wanted = term(world.rank, rows, 4), tree(size, rows, 4)
    ends = np.cumsum([0, *(rows // size + (r < rows % size) for r in range(size))])
    for schedule in schedules(world):
        if schedule != "exchange":
            y = fompi.reduce_scatter(x, comm=world, schedule=schedule, order="ranks")
            assert y.tobytes() == wanted[ends[world.rank] : ends[world.rank + 1]].tobytes(), schedule
    y = fompi.reduce(x, root=size - 1, comm=world, order="ranks")
    assert (y is None or y.size == 0) if world.rank < size - 1 else y.tobytes() == wanted.tobytes()


def test_products(world):
    """Each rank's product is exact, whatever the cut: the weights copy columns. So the order of the sum decides."""
    x, w = term(world.rank, 33, 3), np.eye(3, 4, dtype="f4")
    wanted = folded([term(r, 33, 3) @ w for r in range(world.size)], np.add)
    for schedule in schedules(world):
        assert fompi.matmul_all_reduce(x, w, comm=world, schedule=schedule, order="ranks").tobytes() == wanted.tobytes()


def test_tensors_of_a_device_and_of_frameworks(world):
    torch = pytest.importorskip("torch")
    x, wanted = term(world.rank, 50, 3), tree(world.size, 50, 3).tobytes()
    device = SoftwareDevice(seed=world.rank)
    assert fompi.all_reduce(device.array(x), comm=world, order="ranks").get().tobytes() == wanted
    device.check()
    t = torch.from_numpy(x.copy()).requires_grad_()
    y = fompi.all_reduce(t, comm=world, order="ranks")
    assert y.detach().numpy().tobytes() == wanted
    y.backward(torch.from_numpy(x))  # the sum of dy of all ranks, in the same order
    assert t.grad.numpy().tobytes() == wanted


def test_the_digest_does_not_depend_on_the_way(world, comm):
    """One digest for all ways to add; without an order there are several."""
    found = {"ranks": set(), "any": set()}
    x = term(world.rank, 999)
    for order, digests in found.items():
        for schedule in schedules(world):
            for slices in (None,) if schedule in ("auto", "exchange") else (1, 3):
                how = {"schedule": schedule, "slices": slices, "order": order}
                digests.add(hashlib.sha256(fompi.all_reduce(x, comm=world, **how).tobytes()).hexdigest())
    assert len(found["ranks"]) == 1 and comm.allgather(found["ranks"]) == [found["ranks"]] * world.size
    assert (len(found["any"]) > 1) == (world.size > 2)


def test_all_ranks_hear_of_an_order_that_differs(world):
    if world.size == 1:
        return
    with pytest.raises(fompi.MismatchError, match="order ranks"):
        fompi.all_reduce(np.ones(3), comm=world, order="ranks" if world.rank == 0 else "any")
    with pytest.raises(fompi.PlanError, match="its sums do not have the order 'ranks'"):
        fompi.all_reduce(np.ones(3), comm=world, order="ranks", schedule="ring")
