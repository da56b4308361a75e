"""Rows that go to experts: every rank has a weight for each of its experts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

import fompi
from emulated import Emulated
from fompi import Replicate, Shard, Spec
from fompi.base.layout import offsets, split
from fompi.plans.problems import Form, problem
from fompi.schedules.registry import available

pytestmark = pytest.mark.ranks(mpich=[2], openmpi=[])

K, N = 3, 4
EXPERTS = {"even": lambda size: 2 * size, "uneven": lambda size: 2 * size + 1, "few": lambda size: max(1, size - 1)}
"""The experts of all ranks. few: the last rank has none."""


class Case:
    """Rows of every rank for every expert. `late`: the rank that receives rows multiplies them."""

    def __init__(self, size, experts, late, rows="random", dtype="float64"):
        self.size, self.mine, self.late = size, split(experts, size), late
        self.total, random = experts, np.random.default_rng(experts)
        first = offsets(self.mine)

        def count(expert):
            return {"none": 0, "one": 3 * (expert == experts - 1)}.get(rows, int(random.integers(0, 4)))

        def run(owner):
            return [count(first[owner] + e) for e in range(self.mine[owner])]

        ranks = range(size)
        self.runs = [[run(dest if late else source) for dest in ranks] for source in ranks]
        self.xs = [random.integers(-5, 6, (sum(map(sum, self.runs[r])), K)).astype(dtype) for r in ranks]
        self.ws = [random.integers(-5, 6, (self.mine[r], K, N)).astype(dtype) for r in ranks]

    def pieces(self, x, source):
        """x of `source` by destination and run."""
        ends = iter(pairwise(offsets(n for run in self.runs[source] for n in run)))
        return [[x[slice(*next(ends))] for _ in run] for run in self.runs[source]]

    def expected(self, xs, ws, join=np.concatenate):
        """y of every rank."""
        sent = [self.pieces(x, source) for source, x in enumerate(xs)]
        results = []
        for dest in range(self.size):
            products = [
                x @ ws[dest if self.late else source][e]
                for source in range(self.size)
                for e, x in enumerate(sent[source][dest])
            ]
            results.append(join([xs[dest][:0] @ ws[0][0], *products]))
        return results

    def arguments(self, rank):
        return {"counts": self.runs[rank], "experts": self.total}


@pytest.mark.parametrize("rows", ["random", "none", "one"])
@pytest.mark.parametrize("experts", EXPERTS)
def test_values_and_counts(world, experts, rows):
    """An expert may get no rows, or all of them, and a rank may have no experts."""
    rank, number = world.rank, EXPERTS[experts](world.size)
    for late, operation in ((True, fompi.all_to_all_grouped_matmul), (False, fompi.grouped_matmul_all_to_all)):
        case = Case(world.size, number, late, rows, "float32")
        y = operation.start(case.xs[rank], case.ws[rank], **case.arguments(rank), comm=world)
        np.testing.assert_array_equal(y.wait(), case.expected(case.xs, case.ws)[rank])
        assert [*map(list, y.counts)] == [row[rank] for row in case.runs]


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_schedules(world, dtype):
    """Every schedule, with slices that end inside of runs. `out` and a strided x are those of other products."""
    rank, form = world.rank, lambda *shape: Form(shape, dtype)
    case = Case(world.size, 2 * world.size + 1, True, dtype=dtype)
    wanted = case.expected(*([a.astype(float) for a in arrays] for arrays in (case.xs, case.ws)))[rank]
    known = problem("all_to_all_grouped_matmul", world.size, form(0, K), [form(1, K, N)], experts=case.mine)
    x = np.asfortranarray(case.xs[rank])
    for schedule in available(known):
        out = np.empty(wanted.shape, dtype)
        how = {"schedule": schedule, "slices": 1 if schedule == "unfused" else 2}
        fompi.all_to_all_grouped_matmul(x, case.ws[rank], **case.arguments(rank), **how, out=out, comm=world)
        np.testing.assert_array_equal(out, wanted.astype(dtype))


def test_even_counts_and_other_dimensions(world):
    """Without counts the rows are spread evenly. The rows may be another dimension than the first."""
    size, rank = world.size, world.rank
    x, w = np.ones((2, 6 * size, K)), np.full((2, K, N), rank + 1.0)
    y = fompi.all_to_all_grouped_matmul.start(x, w, dim=1, comm=world)
    np.testing.assert_array_equal(y.wait(), np.full((2, 6 * size, N), 3.0 * (rank + 1)))
    assert y.counts == ((3, 3),) * size
    assert y.part(size - 1).shape == (2, 6, N)


def test_weight_gradients(world):
    """One for each expert. One without rows has zeros."""
    rank = world.rank
    case = Case(world.size, 2 * world.size + 1, True, "one")
    hs = [np.ones((sum(sum(row[r]) for row in case.runs), N)) for r in range(world.size)]
    g = fompi.all_to_all_grouped_weight_gradient(case.xs[rank], hs[rank], **case.arguments(rank), comm=world)
    wanted = np.zeros((case.mine[rank], K, N))
    for source, x in enumerate(case.xs):
        for e, rows in enumerate(case.pieces(x, source)[rank]):
            wanted[e] += rows.sum(0)[:, None]
    np.testing.assert_array_equal(g, wanted)


def through(world, case, back, x, w, v):
    """Dispatch with the first product, and the second product with the combine."""
    rank = world.rank
    h = fompi.all_to_all_grouped_matmul(x, w, **case.arguments(rank), comm=world)
    return fompi.grouped_matmul_all_to_all(h * h, v, **back.arguments(rank), comm=world)


def both_ways(size, experts):
    """A case, and the case in which the rows go back."""
    case, back = Case(size, experts, True), Case(size, experts, False)
    back.runs = [[case.runs[source][rank] for source in range(size)] for rank in range(size)]
    back.ws = [w.swapaxes(1, 2) / 8 for w in case.ws]
    return case, back


@pytest.mark.parametrize("experts", ["uneven", "few"])
def test_gradients_in_torch(world, experts):
    """They are those of the same function without ranks, and so are those of the gradients."""
    rank, size = world.rank, world.size
    case, back = both_ways(size, EXPERTS[experts](size))
    leaves = [[torch.tensor(a[r] / 5, requires_grad=True) for r in range(size)] for a in (case.xs, case.ws, back.ws)]
    hs = case.expected(*leaves[:2], join=torch.cat)
    ys = back.expected([h * h for h in hs], leaves[2], join=torch.cat)
    mine = [of[rank].detach().clone().requires_grad_() for of in leaves]
    y = through(world, case, back, *mine)
    np.testing.assert_allclose(y.detach(), ys[rank].detach(), atol=1e-12)
    losses = [sum((y**3).sum() for y in ys), (y**3).sum()]
    for _ in range(2):
        flat = [t for of in leaves for t in of]
        found = torch.autograd.grad(losses[1], mine, create_graph=True)
        wanted = torch.autograd.grad(losses[0], flat, create_graph=True, materialize_grads=True)
        for i, g in enumerate(found):
            np.testing.assert_allclose(g.detach(), wanted[i * size + rank].detach(), atol=1e-9)
        losses = [sum((g * g).sum() for g in wanted), sum((g * g).sum() for g in found)]


@pytest.mark.one_mpi
def test_gradients_in_jax(world):
    """With and without jit."""
    jax = pytest.importorskip("jax")
    if world.size != 2:
        pytest.skip("compiling takes seconds: two ranks show it")
    rank, size = world.rank, world.size
    case, back = both_ways(size, size + 1)
    leaves = [[torch.tensor(a[r] / 5, requires_grad=True) for r in range(size)] for a in (case.xs, case.ws, back.ws)]
    ys = back.expected([h * h for h in case.expected(*leaves[:2], join=torch.cat)], leaves[2], join=torch.cat)
    wanted = torch.autograd.grad(sum((y * y).sum() for y in ys), [of[rank] for of in leaves], materialize_grads=True)

    def loss(x, w, v):
        h = fompi.jax.all_to_all_grouped_matmul(x, w, **case.arguments(rank), comm=world)
        y = fompi.jax.grouped_matmul_all_to_all(h * h, v, **back.arguments(rank), comm=world)
        return (y * y).sum()

    with jax.enable_x64():
        tensors = [jax.numpy.asarray(of[rank].detach().numpy()) for of in leaves]
        gradient = jax.grad(loss, (0, 1, 2))
        for function in (gradient, jax.jit(gradient)):
            for g, expected in zip(function(*tensors), wanted, strict=True):
                np.testing.assert_allclose(np.asarray(g), expected, atol=1e-9)


def test_bound_plan_with_other_counts(world):
    """A call may have fewer rows for an expert than the plan, without another agreement."""
    size, rank = world.size, world.rank
    specs = Spec((12 * size, K), "float64", Shard(0)), Spec((2 * size, K, N), "float64", Shard(0))
    plan = fompi.plan(fompi.all_to_all_grouped_matmul, *specs, ranks=size, slices=2)
    fompi.verify(plan)
    x, w = np.ones((12, K)), np.arange(1.0, 3.0)[:, None, None] * np.ones((2, K, N))
    counts = [[(1, 0)] * size] * size
    most = [row[rank] for row in plan.sizes.runs]
    with fompi.bind(plan, comm=world, x=x, w=w) as step:
        np.testing.assert_array_equal(step()[:, 0], np.repeat([3.0, 6.0] * size, [n for run in most for n in run]))
        np.testing.assert_array_equal(step(counts=counts), np.full((size, N), 3.0))
        for wrong, words in (
            ([[(1, 0, 0)] * size] * size, r"counts must be rows\[source\]\[dest\]\[expert\]"),
            ([[(99, 0)] * size] * size, "99 rows for an expert"),
        ):
            with pytest.raises(fompi.ShapeError, match=words):
                step(counts=wrong)


def test_other_backends(world, device):
    """A device runs a product for each run, an emulated one takes the time of the kernel."""
    size, rank = world.size, world.rank
    case = Case(size, 2 * size, True, dtype="float16")
    wanted = case.expected(*([a.astype(float) for a in arrays] for arrays in (case.xs, case.ws)))[rank]
    x, w = device.array(case.xs[rank]), device.array(case.ws[rank])
    y = fompi.all_to_all_grouped_matmul(x, w, **case.arguments(rank), comm=world, schedule="direct", slices=3)
    np.testing.assert_array_equal(y.get(), wanted)
    specs = Spec((4 * size, K), "float64", Shard(0)), Spec((2 * size, K, N), "float64", Shard(0))
    plan = fompi.plan(fompi.all_to_all_grouped_matmul, *specs, ranks=size)
    x, w = np.ones((4, K)), np.full((2, K, N), 2.0)
    with fompi.bind(plan, comm=world, x=x, w=w, backend=Emulated(fompi.Machine.load("gigabit"))) as step:
        y = step()
        np.testing.assert_array_equal(y, np.full(y.shape, 6.0))


WRONG = {
    "negative": lambda a: {"counts": [[-1, *run[1:]] for run in a["counts"]]},
    "sum": lambda a: {"counts": [[n + 1 for n in run] for run in a["counts"]]},
    "shape": lambda a: {"counts": [sum(run) for run in a["counts"]]},
    "ranks": lambda a: {"counts": [*a["counts"], [0, 0]]},
    "w": lambda a: {"w": a["w"][:1]},
    "flat w": lambda a: {"w": a["w"][0]},
    "bias": lambda a: {"bias": np.ones(N)},
    "experts": lambda a: {"experts": a["experts"] + 1},
    "no experts": lambda a: {"experts": 0},
    "dim": lambda a: {"dim": -1},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_refusals(world, wrong):
    """What one rank refuses is an error on all ranks, and the next call works."""
    rank = world.rank
    case = Case(world.size, 2 * world.size, True)
    given = {"x": case.xs[rank], "w": case.ws[rank], **case.arguments(rank), "comm": world}
    bad = {**given, **WRONG[wrong](given)} if rank == world.size - 1 else given
    own = (
        (fompi.LayoutError, fompi.ShapeError, fompi.ArgumentError) if rank == world.size - 1 else (fompi.MismatchError,)
    )
    with pytest.raises(own):
        fompi.all_to_all_grouped_matmul(**bad)
    np.testing.assert_array_equal(fompi.all_to_all_grouped_matmul(**given), case.expected(case.xs, case.ws)[rank])


def test_ranks_that_mean_other_numbers_of_experts(world):
    """Without experts= each rank takes its own number for that of all. The ranks compare it."""
    if world.size == 1:
        pytest.skip("one rank agrees with itself")
    case = Case(world.size, 2 * world.size + 1, False)
    with pytest.raises((fompi.MismatchError, fompi.LayoutError)):
        fompi.grouped_matmul_all_to_all(
            case.xs[world.rank], case.ws[world.rank], counts=case.runs[world.rank], comm=world
        )


def test_other_operations_take_no_experts(world):
    specs = Spec((4, K), "float64", Shard(0)), Spec((2, K, N), "float64", Replicate())
    with pytest.raises(fompi.LayoutError, match="takes tensors with the layouts"):
        fompi.plan(fompi.all_to_all_grouped_matmul, *specs, ranks=2)
    with pytest.raises(fompi.ShapeError, match="w needs the shape"):
        fompi.all_gather_matmul(np.ones((2, K)), np.ones((2, K, N)), comm=world)
