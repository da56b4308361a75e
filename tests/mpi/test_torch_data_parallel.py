"""fompi.torch.DistributedDataParallel: an unedited training loop does what one process does with the whole batch."""

import contextlib

import pytest
import torch

import fompi
from fompi.parallel.data import SGD
from fompi.torch import DistributedDataParallel, ZeroDataParallel, nn

SMALL = {"bucket_nbytes": 64}  # many buckets
pytestmark = [pytest.mark.ranks(mpich=[4], openmpi=[]), pytest.mark.usefixtures("float64")]


class Branches(torch.nn.Module):
    """Layers of which a call uses some."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 5) for _ in range(4)])

    def forward(self, x, used=(0, 1, 2, 3)):
        for i in used:
            x = torch.tanh(self.layers[i](x))
        return x


def made(kind=Branches, seed=0):
    torch.manual_seed(seed)
    return kind()


def batch(comm, rows=None):
    """(the whole batch, the rows of this rank): 12 rows, or `rows` of each rank."""
    sizes = [12 // comm.size] * comm.size if rows is None else rows[: comm.size]
    x = torch.linspace(-2, 2, 5 * sum(sizes)).view(-1, 5).sin()
    return x, x.split(sizes)[comm.rank]


def close(actual, expected, within=1e-12):
    assert actual.shape == expected.shape
    assert torch.allclose(actual, expected, rtol=within, atol=within), (actual - expected).abs().max()


def close_gradients(module, whole):
    for p, q in zip(module.parameters(), whole.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            close(p.grad, q.grad)


def alike(module, comm):
    """All ranks have the same bits."""
    for p in module.parameters():
        every = fompi.all_gather(p.detach().reshape(1, -1), comm=comm)
        assert all(torch.equal(one, every[0]) for one in every)


@pytest.mark.parametrize("options", [{}, SMALL], ids=["one bucket", "many buckets"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_training(world, options, set_to_none):
    """Five steps of AdamW with clipping. The ranks begin with different parameters: rank 0 gives its own."""
    whole, model = made(), DistributedDataParallel(made(seed=world.rank), world, **options)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (whole, model)]
    x, mine = batch(world)
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        whole(x).square().mean().backward()
        model(mine).square().mean().backward()
        close_gradients(model, whole)
        for m, optimizer in zip((whole, model), optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            optimizer.step()
    for p, q in zip(model.module.parameters(), whole.parameters(), strict=True):
        close(p.detach(), q.detach(), 1e-9)
    alike(model, world)
    assert model.module.state_dict().keys() == whole.state_dict().keys()
    assert model.state_dict().keys() == {f"module.{name}" for name in whole.state_dict()}
    model.close()


def test_uneven_rows_and_accumulation(world):
    """Two micro-batches inside no_sync, one outside. Then two backward passes, each with its sums."""
    rows = [3, 0, 5, 1, 0, 2, 1, 4][: world.size]
    whole, model = made(), DistributedDataParallel(made(), world, **SMALL)
    x, mine = batch(world, rows)
    for _ in range(2):  # gradients stay from the first to the second
        whole(x).square().sum().backward()
        with model.no_sync():
            model(mine[:1]).square().sum().mul(world.size).backward()
            model(mine[1:2]).square().sum().mul(world.size).backward()
        model(mine[2:]).square().sum().mul(world.size).backward()
        close_gradients(model, whole)
    model.zero_grad()
    whole.zero_grad()
    for used in ((0, 1), (1, 2)):
        whole(x, used).square().sum().backward()
        model(mine, used).square().sum().mul(world.size).backward()
    close_gradients(model, whole)
    model.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_are_added_in_float32(world, dtype):
    """Over micro-batches and ranks. A gradient that the program has written in between counts as written."""
    model = DistributedDataParallel(torch.nn.Linear(1, 2, bias=False, dtype=dtype), world)
    weight, large = model.module.weight, 2.0 ** (8 if dtype == torch.bfloat16 else 11)  # large + 1 is no such number

    def backward(value, synced=False):
        with contextlib.nullcontext() if synced else model.no_sync():
            model(torch.full((1, 1), value, dtype=dtype)).sum().backward()

    def expect(value):
        assert torch.equal(weight.grad, torch.full((2, 1), value, dtype=dtype)), (weight.grad, value)

    for set_to_none in (True, False):
        for value in (large, 1.0, 1.0, 1.0):
            backward(value)
        expect(large)  # what autograd has added up
        backward(1.0, synced=True)
        expect(large + 4)
        backward(4.0)
        backward(float(world.rank), synced=True)  # the mean is rounded once
        expect(large + 8 + (world.size - 1) / 2)
        backward(1.0)
        weight.grad.mul_(0.5)  # clipped by the program
        half = float(weight.grad[0])
        backward(0.0, synced=True)
        expect(half)
        model.zero_grad(set_to_none=set_to_none)
    model.close()


def test_hooks_of_the_program_on_gradients_of_half_types(world):
    """As with float32: hooks made before and after wrapping, on gradients, and on p.grad once it is added."""
    found = []

    def halve(parameter):
        parameter.grad.mul_(0.5)

    for dtype in (torch.float32, torch.bfloat16):
        layer = torch.nn.Linear(4, 1, bias=False, dtype=dtype)
        layer.weight.register_hook(lambda g: g * 2)
        layer.weight.register_post_accumulate_grad_hook(halve)
        model = DistributedDataParallel(layer, world)
        handle = layer.weight.register_hook(lambda g: g * torch.tensor([1, 0, 3, 0], dtype=g.dtype))
        gradients = []
        for value in (1.0, 2.0):  # the second is added to the first
            with model.no_sync():
                model(torch.full((1, 4), value, dtype=dtype)).sum().backward()
            model(torch.full((1, 4), value, dtype=dtype)).sum().backward()
            gradients.append(layer.weight.grad.float().clone())
        handle.remove()
        torch.autograd.grad(model(torch.ones(1, 4, dtype=dtype)).sum(), layer.weight)  # adds nothing
        model(torch.zeros(1, 4, dtype=dtype)).sum().backward()
        gradients.append(layer.weight.grad.float().clone())
        model.close()
        found.append(gradients)
    assert all(map(torch.equal, *found)), found
    assert found[0][0].tolist() == [[1.5, 0, 4.5, 0]]


@pytest.mark.parametrize("options", [{}, SMALL], ids=["one bucket", "many buckets"])
def test_unused_parameters(world, options):
    """On rank 0 only, on all ranks, and in a backward after no_sync. Each rank may use others."""
    whole, model = made(), DistributedDataParallel(made(), world, **options)
    x, mine = batch(world)
    parts = x.split(12 // world.size)

    def backward(used_on):
        for rank, part in enumerate(parts):
            (whole(part, used_on(rank)).square().mean() / world.size).backward()
        model(mine, used_on(world.rank)).square().mean().backward()
        close_gradients(model, whole)

    backward(lambda rank: (0, 2) if rank == 0 else (0, 1, 2))  # 3 on no rank, 1 on none if there is one rank
    assert model.module.layers[3].weight.grad is None
    model.zero_grad()
    whole.zero_grad()
    backward(lambda rank: (rank % 4,))
    backward(lambda rank: (3, 0))
    model.zero_grad()
    whole.zero_grad()
    with model.no_sync():
        model(mine, (1,)).square().mean().backward()
    whole(x, (1,)).square().mean().backward()
    backward(lambda rank: (2,))  # the gradient of layer 1 was not averaged yet
    model.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, SMALL], ids=["one bucket", "many buckets"])
def test_smaller_messages(world, options, dtype):
    """Gradients are near the mean, alike on all ranks, also if ranks use different layers, and after an error."""
    whole = made().to(dtype)
    model = DistributedDataParallel(made().to(dtype), world, wire="int8", feedback=True, **options)
    x, mine = (t.to(dtype) for t in batch(world))
    parts = x.split(12 // world.size)

    def backward(used_on):
        model.zero_grad()
        whole.zero_grad()
        for rank, part in enumerate(parts):
            (whole(part, used_on(rank)).square().mean() / world.size).backward()
        model(mine, used_on(world.rank)).square().mean().backward()
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                assert (p.grad - q.grad).norm() <= 0.05 * q.grad.norm() + 2e-3, (p.grad, q.grad)
                every = fompi.all_gather(p.grad.reshape(1, -1), comm=world)
                assert all(torch.equal(one, every[0]) for one in every)

    for _ in range(3):
        backward(lambda _: (0, 1, 2, 3))
    backward(lambda rank: (0, 2) if rank == 0 else (0, 1, 2))
    backward(lambda rank: (rank % 4,))
    last = world.rank == world.size - 1
    with pytest.raises(IndexError if last else (fompi.PeerError, fompi.MismatchError)):
        model(mine, (9,) if last else (0,)).sum().backward()
    backward(lambda _: (0, 1, 2, 3))
    model.close()


def test_feedback_of_gradients(world):
    """The same gradient again and again: with feedback the mean of the means is much nearer."""

    class Product(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(300, dtype=torch.float32))

        def forward(self):
            return (self.w * gradient).sum()

    gradient = torch.randn(300, generator=torch.Generator().manual_seed(world.rank), dtype=torch.float32)
    exact, off = fompi.all_reduce(gradient, op="mean", comm=world), []
    for feedback in (False, True):
        model, total = DistributedDataParallel(Product(), world, wire="int4", feedback=feedback), torch.zeros(300)
        for _ in range(32):
            model.zero_grad()
            model().backward()
            total += model.module.w.grad
        off.append(float((total / 32 - exact).norm()))
        model.close()
    assert off[1] < 0.6 * off[0], off


def test_frozen_tied_and_mixed(world):
    """A frozen parameter, one that two layers share, and two dtypes; float32 is averaged in float32."""

    class Mixed(Branches):
        def __init__(self):
            super().__init__()
            self.layers[1].weight = self.layers[0].weight
            self.layers[2].weight.requires_grad_(False)
            self.layers[3].float()

        def forward(self, x):
            return self.layers[3](super().forward(x, (0, 1, 2)).float())

    whole, model = made(Mixed), DistributedDataParallel(made(Mixed), world, **SMALL)
    x, mine = batch(world)
    whole(x).square().mean().backward()
    model(mine).square().mean().backward()
    assert model.module.layers[2].weight.grad is None and model.module.layers[3].weight.grad.dtype == torch.float32
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        if q.grad is not None:
            close(p.grad.double(), q.grad.double(), 1e-6)
    model.close()


def test_buffers(world):
    """Rank 0 gives its buffers at first, and in each forward of training. float, integer and bool buffers."""

    def with_norm():
        norm = torch.nn.BatchNorm1d(5)
        norm.register_buffer("flags", torch.tensor([True, False]))
        return torch.nn.Sequential(torch.nn.Linear(5, 5), norm)

    model = made(with_norm, seed=world.rank)
    model[1].running_mean.fill_(world.rank)
    model[1].flags[:] = world.rank == 0
    model = DistributedDataParallel(model, world)
    assert model.module[1].running_mean.eq(0).all() and model.module[1].flags.all()
    for _ in range(2):
        model(torch.randn(4, 5))
    mean = model.module[1].running_mean
    own, first = mean.clone(), fompi.broadcast(mean, comm=world)
    assert world.rank == 0 or not torch.equal(own, first)
    for _ in range(1 + world.rank):
        model.eval()(torch.randn(4, 5))  # no messages: ranks may evaluate as they like
    assert torch.equal(mean, own)
    with torch.no_grad():
        batch_mean = model.module[0](x := torch.randn(4, 5)).mean(0)
    model.train()(x)
    assert model.module[1].num_batches_tracked == 3
    close(mean, 0.9 * first + 0.1 * batch_mean)
    model.close()


def test_sharded_modules_in_data_parallel(world):
    """dp x tp on 4 ranks: each pair of ranks has the model in parts."""
    if world.size != 4:
        pytest.skip("a mesh of 4 ranks")
    mesh = fompi.Mesh(dp=2, tp=2)
    tp = mesh["tp"]
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 5))
    torch.manual_seed(0)
    parts = torch.nn.Sequential(
        nn.ColumnParallelLinear(5, 7, activation="gelu", comm=tp),
        torch.nn.Identity(),
        nn.RowParallelLinear(7, 5, comm=tp),
    )
    model = DistributedDataParallel(parts, mesh["dp"], **SMALL)
    x, mine = batch(world)
    for _ in range(3):
        model.zero_grad()
        whole.zero_grad()
        whole(x).square().sum().backward()
        model(mine).square().sum().mul(2).backward()
        close(nn.clip_grad_norm_(model, 1.0), torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0))
        with torch.no_grad():
            for parameter in (*whole.parameters(), *model.parameters()):
                parameter.sub_(0.1 * parameter.grad)
    state = nn.full_state_dict(model.module)
    for name, value in whole.state_dict().items():
        close(state[name], value)
    model.close()
    mesh.close()


@pytest.mark.parametrize(("zero", "overlap"), [(0, False), (1, False), (2, False), (1, True)])
def test_zero(world, zero, overlap):
    """Accumulation, clipping, a layer that rank 0 does not use, and one that no rank uses."""
    whole = made()
    how = {"optimizer": SGD(0.1), "zero": zero, "overlap": overlap, **SMALL}
    model = ZeroDataParallel(made(seed=world.rank), world, **how)
    x, mine = batch(world)
    parts = x.split(12 // world.size)
    for used_by_others in ((0, 1, 2), (0, 2), (0, 1, 2)):
        for rank, part in enumerate(parts):
            (whole(part, (0, 2) if rank == 0 else used_by_others).square().sum() / world.size).backward()
        used = (0, 2) if world.rank == 0 else used_by_others
        with model.no_sync():
            model(mine[:1], used).square().sum().backward()
        model(mine[1:], used).square().sum().backward()
        assert all(p.grad is None for p in model.parameters())
        norm = model.step(clip=1.0)
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)), rel=1e-10)
        with torch.no_grad():
            for q in whole.parameters():
                if q.grad is not None:
                    q.sub_(0.1 * q.grad)
        if not overlap:  # else the next forward shows that the parameters have arrived
            for p, q in zip(model.parameters(), whole.parameters(), strict=True):
                close(p.detach(), q.detach(), 1e-10)
        whole.zero_grad()
    for value, q in zip(model.module.state_dict().values(), whole.parameters(), strict=True):
        close(value, q.detach(), 1e-10)
    alike(model, world)
    model.close()
    model(mine).sum().backward()  # the module stays
    assert all(p.grad is not None for p in model.parameters())


def test_wrong_modules(world):
    wrong = world.rank == world.size - 1
    for module, error in (
        (torch.nn.Tanh(), fompi.ShapeError),
        (torch.nn.Linear(2, 2, device="meta"), fompi.TensorError),
        (torch.nn.LazyLinear(2), fompi.ShapeError),
        (None, fompi.TensorError),
    ):
        with pytest.raises(error):
            DistributedDataParallel(module, world)
        with pytest.raises(error if wrong else fompi.MismatchError):
            DistributedDataParallel(module if wrong else made(), world)
        with pytest.raises(error if wrong else fompi.MismatchError):
            ZeroDataParallel(module if wrong else made(), world, optimizer=SGD(0.1))
    with pytest.raises(fompi.LayoutError):
        DistributedDataParallel(made(), world, bucket_nbytes=0)
    with pytest.raises(fompi.DtypeError, match="float64 is sent as it is"):
        DistributedDataParallel(made(), world, wire="int8")
    with pytest.raises(fompi.LayoutError, match="needs a wire"):
        DistributedDataParallel(made(), world, feedback=True)
    if world.size > 1:
        with pytest.raises(fompi.MismatchError, match="wire='int"):
            DistributedDataParallel(made().float(), world, wire="int4" if wrong else "int8")
    with pytest.raises(fompi.LayoutError, match="zero=3"):
        ZeroDataParallel(made(), world, optimizer=SGD(0.1), zero=3)
    if world.size > 1:
        frozen, buffered = torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.BatchNorm1d(2, affine=False)
        frozen.weight.requires_grad_(True)
        buffered.weight = torch.nn.Parameter(torch.ones(2))
        for module, words in (
            (torch.nn.Linear(2, 3), r"'weight': float64 \(2, 2\) on rank.*float64 \(3, 2\) on rank"),
            (torch.nn.Linear(2, 2).float(), r"'weight': float64 \(2, 2\) on rank.*float32 \(2, 2\) on rank"),
            (torch.nn.Linear(2, 2, bias=False), r"'bias': float64 \(2,\) on rank.*missing on rank"),
            (frozen, r"'bias': float64 \(2,\) on rank.*float64 \(2,\), frozen on rank"),
            (buffered, "buffer 'running_mean': missing on rank.*float64"),
        ):
            with pytest.raises(fompi.MismatchError, match=words):
                DistributedDataParallel(module if wrong else torch.nn.Linear(2, 2), world)


def test_after_an_error(world):
    """A sparse gradient on one rank is an error on all. After it, and after an error of the user, training goes on."""

    def with_table():
        return torch.nn.ModuleDict({"table": torch.nn.Embedding(4, 5), "rest": Branches()})

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = with_table()

        def forward(self, tokens):
            return self.parts["rest"](self.parts["table"](tokens))

    whole, model = made(Model), DistributedDataParallel(made(Model), world, **SMALL)
    tokens, wrong = torch.tensor([0, 3, 1]), world.rank == 0
    model.module.parts["table"].sparse = wrong
    with pytest.raises(fompi.TensorError if wrong else fompi.PeerError, match=r"sparse|rank 0"):
        model(tokens).square().sum().backward()
    model.module.parts["table"].sparse = False
    model.zero_grad()

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            raise ArithmeticError("of the user")

    y = model.module.parts["rest"](Failing.apply(model.module.parts["table"](tokens)))
    with pytest.raises(ArithmeticError):
        y.square().sum().backward()
    model.zero_grad()
    whole(tokens).square().sum().backward()
    model(tokens).square().sum().backward()
    close_gradients(model, whole)
    model.close()
