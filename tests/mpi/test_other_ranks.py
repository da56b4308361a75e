"""Other ranks and layouts in a run: what goes on has the numbers of what was there before."""

import copy

import numpy as np
import pytest
import torch
from mpi4py import MPI

import fompi
from fompi.base.errors import LayoutError, MismatchError
from fompi.parallel.data import AdamW, DataParallel
from fompi.torch import nn
from fompi.torch.nn import full_state_dict

pytestmark = [pytest.mark.ranks(mpich=[4], openmpi=[4]), pytest.mark.usefixtures("float64")]

X = np.random.default_rng(1).standard_normal((12, 6))


@pytest.fixture
def two(world):
    """Ranks 0 and 1; None on the others."""
    part = MPI.COMM_WORLD.Split(0 if world.rank < 2 else MPI.UNDEFINED, world.rank)
    if part == MPI.COMM_NULL:
        yield None
        return
    with fompi.Communicator(part) as comm:
        yield comm
    part.Free()


def decoder(comm):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        nn.ColumnParallelLinear(6, 10, comm=comm), torch.nn.GELU(), nn.RowParallelLinear(10, 6, comm=comm)
    )


def step_of(model, optimizer, x):
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_a_model_of_four_ranks_goes_to_two_and_comes_back(world, two):
    """With AdamW's state: the losses are those of a model that never moved."""
    with fompi.Communicator(MPI.COMM_SELF) as alone:
        whole = decoder(alone)
        reference = torch.optim.AdamW(whole.parameters(), lr=0.1)
        expected = [step_of(whole, reference, torch.tensor(X)) for _ in range(4)]
    model = decoder(world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    mine = torch.tensor(X[world.rank * 3 :][:3])
    found = [fompi.all_reduce(np.array([step_of(model, optimizer, mine)]), comm=world)[0]]
    before = full_state_dict(model)
    nn.reshard(model, two, optimizer=optimizer, over=world)
    if two is None:
        assert all(p.is_meta for p in model.parameters())
        found += [0.0]
    else:
        assert all(torch.equal(value, before[name]) for name, value in full_state_dict(model).items())
        mine = torch.tensor(X[two.rank * 6 :][:6])
        found += [fompi.all_reduce(np.array([step_of(model, optimizer, mine)]), comm=two)[0]]
    nn.reshard(model, world, optimizer=optimizer, over=world)
    mine = torch.tensor(X[world.rank * 3 :][:3])
    found += [fompi.all_reduce(np.array([step_of(model, optimizer, mine)]), comm=world)[0] for _ in range(2)]
    for at, value in enumerate(found):
        if value:
            assert value == pytest.approx(expected[at], rel=1e-9), at
    with pytest.raises((LayoutError, MismatchError)):
        nn.reshard(model, world, shares=[10, 1, 0, 0], over=world)


@pytest.mark.parametrize("to", [0, 1, 2, 3])
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_data_parallelism_goes_on_with_another_zero_and_on_two_ranks(world, two, zero, to):
    params = {"a": np.linspace(-1, 1, 7), "b": np.linspace(0, 1, 10).reshape(5, 2)}
    gradient = {name: p * 0.5 + 0.1 for name, p in params.items()}

    def steps(dp, count):
        for _ in range(count):
            for name, g in gradient.items():
                dp.ready(name, g.copy())
            dp.step()

    def numbers(dp):
        return {name: np.array(p) for name, p in dp.state_dict()["parameters"].items()}

    with fompi.Communicator(MPI.COMM_SELF) as alone:
        dp = DataParallel(copy.deepcopy(params), optimizer=AdamW(0.1), comm=alone)
        steps(dp, 3)
        expected = numbers(dp)
        dp.close()
    dp = DataParallel(copy.deepcopy(params), optimizer=AdamW(0.1), comm=world, zero=zero)
    steps(dp, 1)
    dp.reshard(zero=to)
    assert dp.zero == to
    steps(dp, 1)
    dp.reshard(two)
    assert dp.closed == (two is None)
    if two is not None:
        steps(dp, 1)
        for name, value in numbers(dp).items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-12)
        dp.close()


def test_a_state_goes_to_other_layouts_without_files(world, two):
    """What four ranks have trained, two serve, in other parts and as arrays of their own."""
    model = decoder(world)
    served = {} if two is None else {"model": decoder(two)}
    if two is not None:
        for p in served["model"].parameters():
            p.data.zero_()
    fompi.reshard_state({"model": model}, served, comm=world)
    known = full_state_dict(model)
    if two is not None:
        assert all(torch.equal(value, known[name]) for name, value in full_state_dict(served["model"]).items())
    with pytest.raises(LayoutError, match="other"):
        fompi.reshard_state({"model": model}, {"other": torch.zeros(3)}, comm=world)


class Layer(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def test_layers_of_a_pipeline_go_to_other_ranks(world):
    """With AdamW's state, also to ranks that had none before."""

    def loss(y, target):
        return (y - target).square().sum()

    x, target = torch.tensor(X).view(3, 4, 6), torch.zeros(3, 4, 6)
    layers = [Layer(seed) for seed in range(5)]
    whole = torch.nn.Sequential(*copy.deepcopy(layers))
    reference = torch.optim.AdamW(whole.parameters(), lr=0.05)
    expected = [step_of(whole, reference, torch.tensor(X)) for _ in range(3)]
    optimizer = torch.optim.AdamW([p for layer in layers for p in layer.parameters()], lr=0.05)
    how = {"microbatches": 3, "activations": (4, 6), "dtype": "float64", "loss": loss}
    found = []
    pipe = fompi.torch.Pipeline(layers, comm=world, shares=[2, 1, 1, 1], **how)
    for shares in ([2, 1, 1, 1], [1, 1, 0, 3], [0, 2, 2, 1]):
        if found:
            pipe.reshard(shares, optimizer)
        losses = pipe.step(list(x) if world.rank == 0 else None, list(target) if world.rank == 3 else None)
        optimizer.step()
        optimizer.zero_grad()
        mine = sum((float(each) for each in losses or []), 0.0)
        found.append(fompi.all_reduce(np.array([mine]), comm=world)[0])
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    with pytest.raises((LayoutError, MismatchError)):
        pipe.reshard([5, 1, 0, 0], optimizer)
    pipe.close()
