"""Training with `order=Canonical(8)`: losses and parameters have the bits of one rank, on any number of ranks."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

import fompi
from fompi import Canonical
from fompi.backends.cuda.software import SoftwareDevice
from fompi.base.layout import offsets, split
from fompi.parallel.data import SGD, AdamW, DataParallel
from fompi.parallel.tensor import (
    all_reduce_rmsnorm,
    column_parallel_linear,
    row_parallel_linear,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)

pytestmark = [pytest.mark.ranks(mpich=[3, 4, 8], openmpi=[3]), pytest.mark.usefixtures("verified_once")]

NO_EIGHT = pytest.mark.ranks(mpich=[3, 4])
"""Where a cell differs by what each rank computes alone: eight ranks share two cores, and take some of the cells."""

LEAVES = 8
ORDER = Canonical(LEAVES)


@pytest.fixture(scope="module")
def alone(world):
    """A communicator of this rank only."""
    return world.split(world.rank, 0, "alone")


def run_of(comm, total=LEAVES):
    ends = [end * total // LEAVES for end in offsets(split(LEAVES, comm.size))]
    return slice(ends[comm.rank], ends[comm.rank + 1])


def data_parallel(comm, zero, clip, optimizer, steps=range(8), load=None, save=None):
    """(losses of all leaves, norms, parameters)"""
    start = np.random.default_rng(0)
    shapes = {"a": (17, 9), "b": (9,), "c": (9, 21)}
    params = {name: start.standard_normal(shape).astype("f4") for name, shape in shapes.items()}
    mine, losses, norms = range(LEAVES)[run_of(comm)], np.zeros(LEAVES * steps.stop), []
    with DataParallel(params, optimizer=optimizer, comm=comm, zero=zero, bucket_nbytes=700, order=ORDER) as dp:
        if load:
            fompi.load(load, {"model": dp}, comm=comm)

        def micro_batch(step, leaf):
            x = np.random.default_rng([step, leaf]).standard_normal((5, 17)).astype("f4")
            a, b, c = (np.array(dp[name]) for name in "abc")
            h = x @ a + b
            y = np.maximum(h, 0) @ c
            losses[step * LEAVES + leaf] = (y * y).sum()
            dh = ((y / 5) @ c.T) * (h > 0)
            for name, gradient in (("c", np.maximum(h, 0).T @ (y / 5)), ("b", dh.sum(0)), ("a", x.T @ dh)):
                dp.ready(name, gradient)

        for step in steps:
            for leaf in mine:
                if leaf == mine[-1]:
                    micro_batch(step, leaf)
                else:
                    with dp.no_sync():
                        micro_batch(step, leaf)
            norms.append(dp.step(clip=clip))
        if save:
            fompi.save(save, {"model": dp}, comm=comm)
        state = dp.state_dict()["parameters"]
    losses = fompi.all_reduce(losses[LEAVES * steps.start :], comm=comm)  # each loss is on one rank
    return [losses.tobytes(), np.array(norms).tobytes(), *(state[name].tobytes() for name in shapes)]


@pytest.mark.parametrize(
    ("zero", "clip"),
    [
        (0, None),
        (3, 1.0),
        *(pytest.param(*cell, marks=NO_EIGHT) for cell in ((0, 1.0), (1, None), (2, 1.0), (3, None))),
    ],
)
def test_data_parallel(world, alone, zero, clip):
    if zero == 3 and LEAVES % world.size:
        with pytest.raises(fompi.LayoutError, match="all ranks must have as many"):
            data_parallel(world, zero, clip, SGD(1e-2))
        return
    optimizer = AdamW(1e-2) if clip else SGD(1e-3, momentum=0.9)
    assert data_parallel(world, zero, clip, optimizer) == data_parallel(alone, 0, clip, optimizer)


@NO_EIGHT
@pytest.mark.parametrize("zero", [1, 2])
def test_a_resumed_training(world, alone, folder, zero):
    """Saved after three steps, it goes on with the bits of one that was never stopped: on fewer ranks, and on one."""
    optimizer, before, after = AdamW(1e-2), range(3), range(3, 6)
    expected = data_parallel(alone, 0, 1.0, optimizer, range(6))
    data_parallel(world, zero, 1.0, optimizer, before, save=folder)
    world.barrier()
    with world.split(int(world.rank == world.size - 1)) as fewer:
        for comm, other in ((fewer, 0), (fewer, 3 - zero), (alone, zero), (world, 2)):
            losses, norms, *parameters = data_parallel(comm, other, 1.0, optimizer, after, load=folder)
            assert losses == expected[0][-len(losses) :] and norms == expected[1][-len(norms) :]
            assert parameters == expected[2:]


def test_without_an_order_the_bits_differ(world, alone):
    """So the test above shows something."""

    def of(comm):
        x = np.random.default_rng(1).standard_normal((LEAVES, 500)).astype("f4")
        mine = x[run_of(comm)].sum(0)
        return fompi.all_reduce(mine, comm=comm).tobytes(), fompi.all_reduce([*x[run_of(comm)]], comm=comm, order=ORDER)

    (a, one), (b, other) = of(world), of(alone)
    assert a != b and one.tobytes() == other.tobytes()


def mlp(comm, sequence_parallel, activation, dtype, steps=8):
    """(losses, gradients of x, parameters): y = row(column(x)), a tensor-parallel MLP."""
    start, n, h, rows = np.random.default_rng(0), 24, 9 * LEAVES, 29
    scale, halves = np.dtype(dtype).type(0.2), 2 if activation == "swiglu" else 1
    shapes = ((n, halves, h), (halves, h), (h, n), (n,))
    whole = [start.standard_normal(shape).astype(dtype) * scale for shape in shapes]
    own = run_of(comm, h)
    w1, b1 = whole[0][..., own].reshape(n, -1).copy(), whole[1][:, own].reshape(-1).copy()
    w2, b2 = whole[2][own].copy(), whole[3]
    ends = offsets(split(rows, comm.size))
    here = slice(*ends[comm.rank : comm.rank + 2]) if sequence_parallel else slice(None)
    how, losses = {"comm": comm, "sequence_parallel": sequence_parallel, "order": ORDER}, []
    gradients: list[bytes] = []  # of x
    for step in range(steps):
        random = np.random.default_rng([step, 5])
        x, target = (random.standard_normal((rows, n)).astype(dtype) for _ in "xt")
        a, first = column_parallel_linear.forward(x[here], w1, b1, activation=activation, **how)
        y, second = row_parallel_linear.forward(a, w2, b2, **how)
        error = fompi.all_gather(y, comm=comm) - target if sequence_parallel else y - target
        losses.append((error**2).sum())
        d = error[here] / np.dtype(dtype).type(rows)
        if not sequence_parallel:
            d = d / np.dtype(dtype).type(comm.size)  # gradients are those of the sum of the losses of all ranks
        da, dw2, db2 = row_parallel_linear.backward(second, d)
        dx, dw1, db1 = column_parallel_linear.backward(first, da)
        gathered = (
            fompi.all_gather(dx, comm=comm) if sequence_parallel else fompi.all_reduce(dx, comm=comm, order=ORDER)
        )
        gradients.append(gathered.tobytes())
        for p, g in ((w1, dw1), (b1, db1), (w2, dw2), (b2, db2)):
            p -= np.dtype(dtype).type(0.1) * g
    columns = (*w1.reshape(n * halves, -1), *b1.reshape(halves, -1), *w2.T)  # of all features of h
    parts = [fompi.all_gather(p.copy(), comm=comm) for p in columns]
    return [np.array(losses).tobytes(), *gradients, *(p.tobytes() for p in (*parts, b2))]


@pytest.mark.parametrize(
    ("sequence_parallel", "activation"),
    [
        *((True, "swiglu"), (False, "relu")),
        *(pytest.param(True, name, marks=NO_EIGHT) for name in ("none", "gelu")),
        *(pytest.param(False, name, marks=NO_EIGHT) for name in ("silu", "swiglu")),
    ],
)
def test_tensor_parallel_mlp(world, alone, sequence_parallel, activation):
    dtype = "float64" if activation == "silu" else "float32"
    if world.size == 3 and not sequence_parallel:
        with pytest.raises(fompi.PlanError, match="is no power of two"):
            mlp(world, sequence_parallel, activation, dtype)
        return
    assert mlp(world, sequence_parallel, activation, dtype) == mlp(alone, True, activation, dtype)


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("rows", [7, 300])
def test_sum_and_norm(world, alone, rows, sharded):
    leaves = np.random.default_rng(0).standard_normal((LEAVES, rows, 256)).astype("f4")
    residual, weight = (
        np.random.default_rng(i).standard_normal(s).astype("f4") for i, s in ((1, (rows, 256)), (2, 256))
    )

    def tree(terms):
        half = len(terms) // 2
        return tree(terms[:half]) + tree(terms[half:]) if half else terms[0]

    def of(comm):
        ends = offsets(split(rows, comm.size))
        own = slice(*ends[comm.rank : comm.rank + 2]) if sharded else slice(None)
        x, how = tree(leaves[run_of(comm)]), {"comm": comm, "order": ORDER, "sharded": sharded}
        y, r = all_reduce_rmsnorm(x, residual[own].copy(), weight, **how)
        return y.tobytes(), (fompi.all_gather(r, comm=comm) if sharded else r).tobytes()

    if world.size == 3:
        with pytest.raises(fompi.PlanError, match="is no power of two"):
            of(world)
        return
    assert of(world) == of(alone)


def language_model(comm, steps=10):
    """(losses, parameters) of an embedding, a layer to the vocabulary, and the loss of it."""
    start, n, vocabulary, rows = np.random.default_rng(0), 6, 5 * LEAVES, 23
    table, w = (start.standard_normal(shape).astype("f4") for shape in ((vocabulary, n), (n, vocabulary)))
    own, how, losses = run_of(comm, vocabulary), {"comm": comm, "order": ORDER}, []
    table, w = table[own].copy(), w[:, own].copy()
    for step in range(steps):
        tokens, targets = np.random.default_rng([step, 9]).integers(0, vocabulary, (2, rows))
        targets[3] = -100
        x, first = vocab_parallel_embedding.forward(tokens, table, sequence_parallel=False, **how)
        z, second = column_parallel_linear.forward(x, w, sequence_parallel=False, **how)
        loss, third = vocab_parallel_cross_entropy.forward(z, targets, label_smoothing=0.1, **how)
        losses.append(loss.tobytes())
        (dz,) = vocab_parallel_cross_entropy.backward(third, np.full(rows, 1 / comm.size, "f4"))
        dx, dw, _ = column_parallel_linear.backward(second, dz)
        (dtable,) = vocab_parallel_embedding.backward(first, dx)
        table -= np.float32(0.1) * dtable
        w -= np.float32(0.1) * dw
    return [*losses, *(fompi.all_gather(np.ascontiguousarray(p), comm=comm).tobytes() for p in (table, w.T))]


def test_the_loss_of_a_vocabulary(world, alone):
    if world.size == 3:
        with pytest.raises(fompi.PlanError, match="is no power of two"):
            language_model(world)
        return
    assert language_model(world) == language_model(alone)


def test_words(world):
    x, w = np.ones((4, 6), "f4"), np.ones((6, 6 * len(range(LEAVES)[run_of(world)])), "f4")
    with pytest.raises(fompi.ShapeError, match="equal parts of its 3 features"):  # of each half
        column_parallel_linear(x, w[:, :6], activation="swiglu", comm=world, order=Canonical(2 * world.size))
    with pytest.raises(fompi.ShapeError, match="2 does not divide"):
        column_parallel_linear(x, np.ones((6, 3), "f4"), comm=world, order=Canonical(2 * world.size))
    with pytest.raises(fompi.PlanError, match="must be one of 'any', 'ranks'"):
        row_parallel_linear(x, np.ones((6, 3), "f4"), comm=world, order="tree")


OF_TORCH = pytest.mark.skipif(
    fompi.Communicator().size > 4, reason="eight ranks would load torch for seconds; its modules call what is above"
)


@OF_TORCH
def test_modules_of_torch(world, alone):
    """A model of modules, trained by ZeroDataParallel over micro-batches or by AdamW on tensor-parallel layers."""
    torch = pytest.importorskip("torch")
    from fompi.torch import ZeroDataParallel, nn

    def tensor_parallel(comm):
        torch.manual_seed(0)
        how = {"comm": comm, "order": ORDER, "sequence_parallel": False}
        model = torch.nn.Sequential(
            nn.ColumnParallelLinear(12, 4 * LEAVES, activation="relu", **how),
            nn.RowParallelLinear(4 * LEAVES, 12, **how),
        )
        optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False), []
        for step in range(5):
            x = torch.from_numpy(np.random.default_rng(step).standard_normal((9, 12)).astype("f4"))
            loss = ((model(x) - x) ** 2).sum()
            (loss / comm.size).backward()
            losses += [loss.item(), nn.clip_grad_norm_(model, 1.0).item()]
            optimizer.step()
            optimizer.zero_grad()
        state = nn.full_state_dict(model)
        return [losses, *(state[name].numpy().tobytes() for name in sorted(state))]

    def micro_batches(comm):
        torch.manual_seed(0)
        module, mine = torch.nn.Linear(7, 5), range(LEAVES)[run_of(comm)]
        with closing(ZeroDataParallel(module, comm, optimizer=SGD(1e-2), zero=1, order=ORDER)) as model:
            for step in range(5):
                for leaf in mine:
                    x = torch.from_numpy(np.random.default_rng([step, leaf]).standard_normal((3, 7)).astype("f4"))
                    if leaf == mine[-1]:
                        (model(x) ** 2).sum().backward()
                    else:
                        with model.no_sync():
                            (model(x) ** 2).sum().backward()
                model.step(clip=1.0)
            return [p.detach().numpy().tobytes() for p in module.parameters()]

    assert micro_batches(world) == micro_batches(alone)
    if world.size != 3:
        assert tensor_parallel(world) == tensor_parallel(alone)


@OF_TORCH
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_of_torch(world, alone, kind):
    """Their leaves are rows: the gradients of what all ranks hold have the bits of one rank."""
    torch = pytest.importorskip("torch")
    from fompi.torch import nn

    rows = np.random.default_rng(0).standard_normal((4 * LEAVES, 3, 10))

    def gradients(comm, order, dtype=torch.float32):
        torch.manual_seed(0)
        norm = getattr(nn, kind)(10, comm=comm, order=order, dtype=dtype)
        x = torch.from_numpy(rows[run_of(comm, len(rows))].copy()).to(dtype)
        (norm(x) * x.sin()).sum().backward()
        return [p.grad for p in norm.parameters()]

    def bits(tensors):
        return [t.float().numpy().tobytes() for t in tensors]

    whole = getattr(torch.nn, kind)(10, 1e-5 if kind == "LayerNorm" else 1e-6)
    x = torch.from_numpy(rows).float()
    (whole(x) * x.sin()).sum().backward()
    for order in (ORDER, "ranks", "any"):
        for p, gradient in zip(whole.parameters(), gradients(world, order), strict=True):
            assert torch.allclose(p.grad, gradient, atol=1e-5), order
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert bits(gradients(world, ORDER, dtype)) == bits(gradients(alone, ORDER, dtype))
    with pytest.raises(fompi.ShapeError, match=r"leaves, which do not divide 7 rows"):
        getattr(nn, kind)(10, comm=alone, order=ORDER)(torch.ones(7, 10))


@NO_EIGHT
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_layers_on_a_device_have_the_bits_of_the_host(world, sequence_parallel, activation):
    if world.size == 3 and not sequence_parallel:
        return
    how, own = {"comm": world, "sequence_parallel": sequence_parallel, "order": ORDER}, run_of(world, 2 * LEAVES)
    random, device = np.random.default_rng(0), SoftwareDevice(seed=world.rank)
    n, halves = 2 * LEAVES, 2 if activation == "swiglu" else 1
    shapes = ((8, 6), (6, halves, n), (halves, n), (n, 6), 6)
    x, w1, b1, w2, b2 = (random.standard_normal(s).astype("f4") for s in shapes)
    given = [x, w1[..., own].reshape(6, -1), b1[:, own].reshape(-1), np.ascontiguousarray(w2[own]), b2]

    def step(x, w1, b1, w2, b2):
        a, first = column_parallel_linear.forward(x, w1, b1, activation=activation, **how)
        y, second = row_parallel_linear.forward(a, w2, b2, **how)
        da, *gradients = row_parallel_linear.backward(second, y)
        return [y, *column_parallel_linear.backward(first, da), *gradients]

    results = step(*map(device.array, given))
    assert [r.get().tobytes() for r in results] == [r.tobytes() for r in step(*given)]
    device.check()
