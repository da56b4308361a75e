"""shares=: uneven and zero shares give the numbers of one process, and wrong ones are refused on all ranks."""

import numpy as np
import pytest
import torch
from mpi4py import MPI
from whole_model import TARGET, TOKENS, Parts, Whole, close, full_gradients, rows, same_bits, share_scale

import fompi
from fompi.base.errors import LayoutError, MismatchError
from fompi.parallel.shares import dealt, weights
from fompi.torch import nn
from fompi.torch.nn import full_state_dict, load_full_state_dict

pytestmark = [pytest.mark.ranks(mpich=[3], openmpi=[]), pytest.mark.usefixtures("float64")]

SHARES = {"heads": [2, 1, 0], "columns": [3, 1, 1], "experts": [1, 0, 4], "vocabulary": [0, 4, 7]}


def parts(comm, shares, seed=0):
    torch.manual_seed(seed)
    glu = shares and shares | {"columns": [0, 5, 2]}
    return Parts(comm, shares=shares, glu=glu)


def test_a_model_of_uneven_shares_is_that_of_one_process(world):
    torch.manual_seed(0)
    whole, model = Whole(), parts(world, SHARES)
    same_bits(full_state_dict(model), whole.state_dict())
    assert len(model.embedding.weight) == SHARES["vocabulary"][world.rank]
    assert len(model.glu[0].weight) == 2 * [0, 5, 2][world.rank] and len(model.mlp[0].weight) == [6, 2, 2][world.rank]
    assert "shares=[1, 0, 4]" in str(model)
    expected, y, mine = whole(TOKENS), model(TOKENS), rows(world)
    close(y.detach(), expected[mine].detach())
    (expected - TARGET).square().sum().backward()
    (y - TARGET[mine]).square().sum().backward()
    share_scale(model, world)
    gradients = full_gradients(model)
    for name, parameter in whole.named_parameters():
        close(gradients[name], parameter.grad)


def test_a_checkpoint_does_not_depend_on_shares(world):
    saved, other = parts(world, SHARES), parts(world, None, seed=1)
    load_full_state_dict(other, full_state_dict(saved))
    same_bits(full_state_dict(other), full_state_dict(saved))


WRONG = {
    "sum": ([3, 2, 2], "add up to 7, but there are 12"),
    "length": ([6, 6], "are 2 numbers of columns, but there are 3 ranks"),
    "negative": ([13, -1, 0], "must be integers >= 0"),
    "fraction": ([6, 5.5, 0.5], "must be integers >= 0"),
    "nothing": ([0, 0, 0], "add up to 0"),
    "kind": ({"heads": [4, 4, 4]}, "has no columns, but heads"),
    "name": ({"colums": [4, 4, 4]}, "did you mean columns"),
    "text": ("auto", "must be what fompi.balance returns"),
}


@pytest.mark.parametrize("why", WRONG)
def test_wrong_shares_are_refused_on_all_ranks(world, why):
    shares, said = WRONG[why]
    with pytest.raises(LayoutError, match=said):
        nn.ColumnParallelLinear(6, 12, comm=world, shares=shares)
    with pytest.raises(fompi.FompiError, match=said if world.rank == 1 else "rank 1"):
        nn.ColumnParallelLinear(6, 12, comm=world, shares=shares if world.rank == 1 else None)


def test_other_shares_on_other_ranks(world):
    shares = [1, 1, 1] if world.rank else [2, 1, 0]
    calls = {
        "linear": lambda: nn.RowParallelLinear(6, 4, comm=world, shares=shares),
        "attention": lambda: nn.ParallelAttention(6, 3, comm=world, shares=shares),
        "experts": lambda: nn.MoE(4, 4, 3, 1, comm=world, shares=shares),
        "vocabulary": lambda: nn.VocabParallelEmbedding(3, 4, comm=world, shares=shares),
    }
    for call in calls.values():
        with pytest.raises(MismatchError, match=r"2, 1, 0|4, 2, 0"):
            call()


def test_an_order_of_leaves_keeps_its_bits(world):
    """Shares whose borders are leaves: the bits of one process. A border inside of a leaf is refused."""
    x, found = torch.linspace(-1, 1, 6 * 8).view(6, 8), []
    with fompi.Communicator(MPI.COMM_SELF) as alone:
        for comm, shares in ((alone, None), (world, [4, 3, 1]), (world, [8, 4, 4])):
            torch.manual_seed(3)
            how = {"comm": comm, "order": fompi.Canonical(8), "shares": shares}
            up, down = nn.ColumnParallelLinear(8, 16, activation="gelu", **how), nn.RowParallelLinear(16, 8, **how)
            y = down(up(x.chunk(comm.size)[comm.rank].clone().requires_grad_()))
            y.square().sum().backward()
            gradients = {f"{i}.{name}": g for i, m in enumerate((up, down)) for name, g in full_gradients(m).items()}
            found.append({"y": fompi.all_gather(y.detach(), comm=comm), **gradients})
        same_bits(found[0], found[1])
        same_bits(found[0], found[2])
    with pytest.raises(fompi.PlanError, match="cut a leaf"):
        nn.ColumnParallelLinear(8, 16, comm=world, order=fompi.Canonical(8), shares=[7, 5, 4])


def test_dealt():
    assert dealt([2, 1, 0], "columns", 12, 3) == (8, 4, 0) and dealt(None, "columns", 7, 3) == (3, 2, 2)
    assert weights([2, 1, 1], "rows", 3) == (0.5, 0.25, 0.25)
    found = fompi.balance("laptops", "llama-1b")
    assert dealt(found, "columns", 8192, 4) == found.counts["columns"]
    assert np.isclose(sum(weights({"rows": [3, 2, 2]}, "rows", 3)), 1)
