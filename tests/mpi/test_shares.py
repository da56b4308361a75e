"""shares=: uneven and zero shares give the numbers of one process, and wrong ones are refused on all ranks."""

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from mpi4py import MPI
from whole_model import TARGET, TOKENS, Parts, Whole, close, full_gradients, rows, same_bits, share_scale

import fompi
from fompi.base.errors import LayoutError, MismatchError
from fompi.parallel.data import AdamW, DataParallel
from fompi.parallel.pipeline import Pipeline
from fompi.parallel.shares import dealt, weights
from fompi.planner.layers import Transformer
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


# ------------------------------------------------------------------------------------------------- data parallelism

ROWS, STATE = [5, 2, 0], [1, 0, 3]
X, Y = np.linspace(-1, 1, 7 * 4).reshape(7, 4), np.linspace(0, 1, 7 * 3).reshape(7, 3)


def trained(comm, counts, leaves=False, **options):
    """Three steps of AdamW on the mean square of all rows; rank r has counts[r] of them. (state, bytes)"""
    first = sum(counts[: comm.rank])
    mine = slice(first, first + counts[comm.rank])
    params = {"w": np.linspace(-1, 1, 12).reshape(4, 3), "b": np.zeros(3)}
    with DataParallel(params, optimizer=AdamW(0.1), comm=comm, bucket_nbytes=64, **options) as dp:
        for _ in range(3):
            rows_of_leaves = [slice(i, i + 1) for i in range(7)][mine] if leaves else [mine]
            for rows_of in rows_of_leaves:
                d = 2 * (X[rows_of] @ dp["w"] + dp["b"] - Y[rows_of]) / max(1, len(X[rows_of]))
                with dp.no_sync() if rows_of != rows_of_leaves[-1] else nullcontext():
                    dp.ready("b", d.sum(0))
                    dp.ready("w", X[rows_of].T @ d)
            dp.step(clip=0.5)
        return dp.state_dict(), dp.nbytes


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_mean_is_that_over_all_rows(world, zero):
    """Rows by one vector, state by another one. The state that is saved is that of one process."""
    with fompi.Communicator(MPI.COMM_SELF) as alone:
        expected, _ = trained(alone, [7], zero=zero)
    found, nbytes = trained(world, ROWS, zero=zero, shares={"rows": ROWS, "state": STATE})
    for name, value in expected["parameters"].items():
        assert np.allclose(found["parameters"][name], value, rtol=1e-12)
        for key, kept in expected["optimizer"][name].items():
            assert np.allclose(found["optimizer"][name][key], kept, rtol=1e-12)
    if zero:  # 15 numbers, twice
        assert abs(nbytes["optimizer"] - 16 * 15 * STATE[world.rank] / 4) <= 32
    list_only, _ = trained(world, ROWS, zero=zero, shares=ROWS)
    assert np.allclose(list_only["parameters"]["w"], expected["parameters"]["w"], rtol=1e-12)


def test_leaves_by_shares_of_rows_keep_their_bits(world):
    how = {"order": fompi.Canonical(7), "leaves": True, "zero": 2}
    with fompi.Communicator(MPI.COMM_SELF) as alone:
        expected, _ = trained(alone, [7], **how)
    found, _ = trained(world, [4, 2, 1], shares={"rows": [4, 2, 1], "state": STATE}, **how)
    for name, value in expected["parameters"].items():
        assert np.array_equal(found["parameters"][name], value)


def test_wrong_shares_of_rows(world):
    for shares in ([1, 2], [0, 0, 0], [1, -1, 1], {"heads": [1, 1, 1]}, [1, 1, 1 + world.rank]):
        with pytest.raises((LayoutError, MismatchError)):
            trained(world, ROWS, shares=shares)
        with pytest.raises((LayoutError, MismatchError)):
            fompi.torch.DistributedDataParallel(torch.nn.Linear(4, 3), world, shares=shares)


@pytest.mark.parametrize("wire", [None, "float16"])
def test_torch_averages_over_all_rows(world, wire):
    torch.manual_seed(5)
    whole, mine = torch.nn.Linear(4, 3).float(), slice(sum(ROWS[: world.rank]), sum(ROWS[: world.rank + 1]))
    x, y = torch.tensor(X).float(), torch.tensor(Y).float()
    model = fompi.torch.DistributedDataParallel(copy.deepcopy(whole), world, shares=ROWS, wire=wire)
    for _ in range(2):  # the second gradient is added to the first one
        (whole(x) - y).square().mean().backward()
        with model.no_sync():
            pass
        output = model(x[mine])
        ((output - y[mine]).square().mean() if ROWS[world.rank] else output.sum()).backward()
    for a, b in zip(whole.parameters(), model.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=2e-3 if wire else 1e-5)
    model.close()


# ------------------------------------------------------------------------------------------------------- layers


class Tanh:
    """y = tanh(x @ w), as a stage whose backward has two parts, or one."""

    def __init__(self, w):
        self.w, self.dw = w, np.zeros_like(w)

    def forward(self, x):
        y = np.tanh(x @ self.w)
        return y, (x, y)

    def backward_input(self, saved, dy):
        x, y = saved
        dh = dy * (1 - y * y)
        return dh @ self.w.T, (x, dh)

    def backward_weight(self, rest):
        x, dh = rest
        self.dw += x.T @ dh


@pytest.mark.parametrize(("schedule", "shares"), [("1f1b", [3, 0, 2]), ("zb-h1", [1, 4, 0]), ("1f1b", [0, 0, 5])])
def test_a_pipeline_has_runs_of_layers(world, schedule, shares):
    weights = [np.random.default_rng(i).standard_normal((3, 3)) for i in range(5)]
    inputs, targets = ([np.random.default_rng(i).standard_normal((2, 3)) for i in range(k, k + 3)] for k in (9, 19))
    first = sum(shares[: world.rank])

    def loss(y, target):
        return 0.5 * ((y - target) ** 2).sum(), y - target

    found = []
    with fompi.Communicator(MPI.COMM_SELF) as alone:
        for comm, how in ((alone, [5]), (world, shares)):
            layers = [Tanh(w) for w in weights]
            named = {"microbatches": 3, "schedule": schedule, "activations": (2, 3), "dtype": "float64"}
            with Pipeline(layers, comm=comm, loss=loss, shares=how, **named) as pipe:
                losses = pipe.step(inputs if comm.rank == 0 else None, targets if comm.rank + 1 == comm.size else None)
                found.append((losses, pipe.input_gradients, [layer.dw for layer in layers]))
    (losses, gradients, dws), (ours, input_gradients, mine) = found
    assert ours is None or np.allclose(ours, losses)
    assert input_gradients is None or np.allclose(input_gradients, gradients)
    for i in range(first, first + shares[world.rank]):
        assert np.allclose(mine[i], dws[i], rtol=1e-12)


def test_a_pipeline_of_modules(world):
    torch.manual_seed(2)
    modules = [torch.nn.Linear(3, 3) for _ in range(5)]
    x, target = torch.linspace(-1, 1, 12).view(2, 2, 3), torch.linspace(0, 1, 12).view(2, 2, 3)
    whole = torch.nn.Sequential(*copy.deepcopy(modules))
    expected = [torch.nn.functional.mse_loss(whole(a), b) for a, b in zip(x, target, strict=True)]
    sum(expected).backward()
    shares = [2, 0, 3]
    how = {"microbatches": 2, "activations": (2, 3), "dtype": "float64", "loss": torch.nn.functional.mse_loss}
    with fompi.torch.Pipeline(modules, comm=world, shares={"layers": shares}, **how) as pipe:
        losses = pipe.step(list(x) if world.rank == 0 else None, list(target) if world.rank == 2 else None)
        outputs = pipe.forward(list(x) if world.rank == 0 else None)
    if world.rank == 2:
        assert torch.allclose(torch.stack(losses), torch.stack(expected).detach())
        assert torch.allclose(torch.stack(outputs), whole(x).detach())
    first = sum(shares[: world.rank])
    for i in range(first, first + shares[world.rank]):
        assert torch.allclose(modules[i].weight.grad, whole[i].weight.grad)
    for wrong in ([2, 0, 4], [2, 3], [2 - world.rank, 0, 3 + world.rank]):
        with pytest.raises((LayoutError, MismatchError)):
            fompi.torch.Pipeline(modules, comm=world, shares=wrong, **how)


# ------------------------------------------------------------------------------------------------- other shares


def test_modules_get_other_shares(world):
    """A step, other shares, a step: the numbers of one process. Weights keep their bits, and momentum moves."""
    torch.manual_seed(0)
    whole, model = Whole(), parts(world, None)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (whole, model)]
    mine = rows(world)
    for step in range(3):
        if step:
            before = full_state_dict(model)
            nn.rebalance(model.embedding, {"vocabulary": [0, 4, 7]} if step == 1 else [3, 3, 5], optimizers[1])
            nn.rebalance(model.attention, [0, 2, 1], optimizers[1])
            nn.rebalance(model.mlp, SHARES if step == 1 else [0, 10, 0], optimizers[1])
            nn.rebalance(model.glu, [7, 0, 0], optimizers[1])
            nn.rebalance(model.moe, [5, 0, 0] if step == 1 else SHARES, optimizers[1])
            same_bits(full_state_dict(model), before)
        (whole(TOKENS) - TARGET).square().sum().backward()
        (model(TOKENS) - TARGET[mine]).square().sum().backward()
        share_scale(model, world)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(model.mlp[0].weight) == [0, 10, 0][world.rank] and "shares=[7, 0, 0]" in str(model.glu)
    for name, value in full_state_dict(model).items():
        close(value, whole.state_dict()[name])
    for wrong in ([7, 0, 1], [7, 0], [7 - world.rank, world.rank, 0]):
        with pytest.raises((LayoutError, MismatchError)):
            nn.rebalance(model.glu, wrong)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_data_parallelism_gets_other_shares(world, zero):
    """Between steps, with the parameters and the state of one process."""
    found = []
    with fompi.Communicator(MPI.COMM_SELF) as alone:
        for comm, dealt_rows in ((alone, ([7], [7], [7])), (world, (ROWS, [1, 1, 5], [0, 7, 0]))):
            torch.manual_seed(1)
            module = torch.nn.Linear(4, 3)
            model = fompi.torch.ZeroDataParallel(module, comm, optimizer=AdamW(0.1), zero=zero)
            plain = fompi.torch.DistributedDataParallel(copy.deepcopy(module), comm)
            for counts in dealt_rows:
                shares = {"rows": counts, "state": [*reversed(counts)]}
                model.rebalance(shares)
                plain.rebalance(counts)
                first = sum(counts[: comm.rank])
                x, y = (torch.tensor(a[first : first + counts[comm.rank]]) for a in (X, Y))
                for of in (model, plain):
                    square = (of(x) - y).square()
                    (square.mean() if len(x) else square.sum()).backward()
                model.step()
            found.append([*module.parameters(), *(p.grad for p in plain.parameters())])
            with pytest.raises((LayoutError, MismatchError)):
                model.rebalance([1] * (comm.size + 1))
            with pytest.raises((LayoutError, MismatchError)):
                plain.rebalance([1] * (comm.size + 1))
            model.close()
            plain.close()
    for expected, actual in zip(*found, strict=True):
        assert torch.allclose(expected, actual, rtol=1e-10)


def test_dealt():
    assert dealt([2, 1, 0], "columns", 12, 3) == (8, 4, 0) and dealt(None, "columns", 7, 3) == (3, 2, 2)
    assert weights([2, 1, 1], "rows", 3) == (0.5, 0.25, 0.25)
    found = fompi.balance("laptops", "llama-1b")
    assert dealt(found, "columns", 8192, 4) == found.counts["columns"]
    assert np.isclose(sum(weights({"rows": [3, 2, 2]}, "rows", 3)), 1)


@pytest.mark.timeout(120)
def test_balance_measures_the_ranks_of_a_communicator(world):
    sizes = Transformer(2, 64, 96, 3, 64, "made up", 8, 8, 101)
    found = fompi.balance(world, sizes)
    assert len(found.counts["heads"]) == world.size and sum(found.counts["columns"]) == 96
    texts = fompi.all_gather(np.frombuffer(str(found).encode().ljust(4096), np.uint8)[None], comm=world)
    assert (texts == texts[0]).all()
    with pytest.raises(MismatchError, match="prefill"):
        fompi.balance(world, sizes, task="prefill" if world.rank else "decode")
