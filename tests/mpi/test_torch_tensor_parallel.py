"""torch's own tensor parallelism and FSDP2 on fompi: the plans of torch, with fused operations under them."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import fompi.torch
from fompi.torch import fully_sharded, private
from fompi.torch.process_group import Group
from fompi.torch.work import Landed, Work

D = torch.float64
pytestmark = [pytest.mark.ranks(mpich=[2], openmpi=[]), pytest.mark.usefixtures("group")]


@pytest.fixture
def mesh(size):
    return init_device_mesh("cpu", (size,))


@pytest.fixture
def installed():
    with fompi.torch.install():
        yield


@pytest.fixture
def unfused(monkeypatch):
    """The collectives that torch called, by name."""
    calls, start = Counter(), Group._start

    def counted(self, operation, *args, **options):
        calls[operation.name] += 1
        return start(self, operation, *args, **options)

    monkeypatch.setattr(Group, "_start", counted)
    return calls


class Since:
    """What has run since this object was made."""

    def __init__(self):
        self.before = fompi.torch.fused_calls()

    @property
    def ran(self):
        return dict(Counter(fompi.torch.fused_calls().ran) - Counter(self.before.ran))

    @property
    def as_torch(self):
        return dict(Counter(fompi.torch.fused_calls().as_torch) - Counter(self.before.as_torch))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [D, torch.bfloat16], ids=str)
def test_shares_of_unequal_ranks(mesh, bias, dtype):
    """The numbers of one process, by fused operations or by torch, and whole parameters to save."""
    torch.manual_seed(4)
    whole = nn.Sequential(nn.Linear(6, 12, bias=bias, dtype=dtype), nn.Linear(12, 6, bias=bias, dtype=dtype))
    shares, x = {"heads": [1, 1], "columns": [9, 3]}, torch.linspace(-1, 1, 30).view(5, 6).to(dtype)
    models = [copy.deepcopy(whole) for _ in range(2)]
    for model, given in zip(models, (shares, [3, 1]), strict=True):
        with fompi.torch.install(shares=given):
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    y = whole(x)
    y.square().sum().backward()
    for model in models:
        assert len(model[0].weight) == [9, 3][dist.get_rank()] == model[1].weight.shape[1]
        z = model(x)
        z.square().sum().backward()
        within = 1e-12 if dtype == D else 0.05
        assert torch.allclose(z, y, rtol=within, atol=within)
        grads = [model[0].weight.grad, whole[0].weight.grad.split([9, 3])[dist.get_rank()]]
        assert torch.allclose(*grads, rtol=within, atol=4 * within)
        full = fompi.torch.nn.full_state_dict(model)
        assert torch.equal(full["0.weight"], whole[0].weight) and torch.equal(full["1.weight"], whole[1].weight)
        if bias:
            assert torch.allclose(model[1].bias.grad, whole[1].bias.grad, rtol=within, atol=within)
    if dtype == D and bias:  # rows are sharded
        part = {"0": ColwiseParallel(), "1": RowwiseParallel(output_layouts=Shard(0))}
        with fompi.torch.install(shares=[3, 1]):
            model = parallelize_module(copy.deepcopy(whole), mesh, part)
        sharded = model(x.repeat(2, 1))
        sharded.square().sum().backward()
        assert torch.allclose(sharded, y.repeat(2, 1).chunk(2)[dist.get_rank()])
        assert torch.allclose(model[1].bias.grad, 2 * whole[1].bias.grad)
    for wrong in ([3, 2], [1, 1, 1], {"rows": [1, 1]}, [1, 1 + dist.get_rank()]):
        with pytest.raises((fompi.LayoutError, fompi.MismatchError)), fompi.torch.install(shares=wrong):
            parallelize_module(copy.deepcopy(whole), mesh, {"0": ColwiseParallel()})


class Block(nn.Module):
    def __init__(self, bias, n=6):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(n), nn.Linear(n, 24, bias=bias), nn.Linear(24, n, bias=bias)

    def forward(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(48, 48, bias=bias) for _ in range(4))

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = (w(x).view(batch, tokens, -1, 2).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, tokens, -1))


def blocks(bias=True, count=2):
    torch.manual_seed(5)
    return nn.Sequential(*[Block(bias) for _ in range(count)]).to(D)


def attention(bias=True):
    torch.manual_seed(5)
    return nn.Sequential(nn.LayerNorm(48), Attention(bias)).to(D)


def plan_of_blocks(dim, count=2, colwise=ColwiseParallel, rowwise=RowwiseParallel):
    """Sequence parallel along `dim`, or with replicated activations (None)."""
    plan = {}
    for i in range(count):
        rows = {} if dim is None else {"input_layouts": Shard(dim)}
        plan[f"{i}.up"] = colwise(**rows)
        last = {} if dim is None else {"output_layouts": Shard(dim), "use_local_output": i == count - 1}
        plan[f"{i}.down"] = rowwise(**last)
        if dim is not None:
            plan[f"{i}.norm"] = SequenceParallel(sequence_dim=dim)
    return plan


def plan_of_attention(use_local_output):
    rows = Shard(1)
    return {
        "0": SequenceParallel(),
        "1": PrepareModuleInput(
            input_layouts=rows, desired_input_layouts=Replicate(), use_local_output=use_local_output
        ),
        "1.w[qkv]": ColwiseParallel(),
        "1.wo": RowwiseParallel(output_layouts=rows),
    }


def data(*shape):
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(1))


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def check(net, plan, x, dim, mesh, compiled=False, unfused=None):
    """The loss and all gradients are those of one process. Returns what ran."""
    rank, size = mesh.get_local_rank(), mesh.size()
    alone = copy.deepcopy(net)
    net = parallelize_module(net, mesh, plan)
    run = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net
    since = Since()
    if unfused is not None:
        unfused.clear()
    mine = (x if dim is None else x.chunk(size, dim)[rank]).clone().requires_grad_()
    loss = run(mine).square().sum()
    loss.backward()
    ran, others = since.ran, dict(unfused or {})
    whole = x.clone().requires_grad_()
    expected = alone(whole).square().sum()
    expected.backward()
    if dim is not None:
        dist.all_reduce(loss := loss.detach().clone())
    assert_equal(loss.detach(), expected.detach())
    assert_equal(mine.grad, whole.grad if dim is None else whole.grad.chunk(size, dim)[rank])
    for (name, p), q in zip(net.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(
            full(p.grad), q.grad, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert not since.as_torch
    return ran, others


SEQUENCE = {
    "all_gather_matmul": 2,
    "all_gather_weight_gradient": 2,
    "all_gather_matmul_weight_gradient": 2,
    "matmul_reduce_scatter": 4,
}
REPLICATED = {"matmul_all_reduce": 4}
QKV = {
    "all_gather_matmul_many": 1,
    "all_gather_weight_gradient": 1,
    "all_gather_matmul_weight_gradient": 1,
    "matmul_reduce_scatter": 2,
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dim", [None, 0, 1], ids=["replicated", "rows", "columns"])
def test_blocks(installed, mesh, unfused, dim, bias):
    """LayerNorm, Linear, GELU, Linear, twice: two fused operations in each block and direction, and nothing else."""
    x = data(2 * mesh.size(), mesh.size(), 6)
    ran, others = check(blocks(bias), plan_of_blocks(dim), x, dim, mesh, unfused=unfused)
    assert ran == (REPLICATED if dim is None else SEQUENCE) and not others


@pytest.mark.parametrize("dim", [None, 0], ids=["replicated", "rows"])
def test_fewer_features_than_ranks(installed, mesh, dim):
    """The last rank has no column of the first weight, and no row of the second one."""
    hidden = max(1, mesh.size() - 1)
    net = nn.Sequential(nn.Linear(3, hidden, bias=False), nn.GELU(), nn.Linear(hidden, 3, bias=False)).to(D)
    rows = {} if dim is None else {"input_layouts": Shard(0)}, {} if dim is None else {"output_layouts": Shard(0)}
    plan = {"0": ColwiseParallel(**rows[0]), "2": RowwiseParallel(**rows[1])}
    torch.manual_seed(5)
    for weight in net.parameters():
        nn.init.normal_(weight)
    check(net, plan, data(mesh.size(), 2, 3), dim, mesh)


@pytest.mark.parametrize("hooks", [False, True], ids=["", "hooks"])
@pytest.mark.parametrize("local", [False, True], ids=["DTensor", "local"])
def test_one_gather_for_queries_keys_and_values(installed, mesh, unfused, local, hooks):
    net, x = attention(), data(2, 3 * mesh.size(), 48)
    if hooks:  # torch then wraps the input of each module anew
        for module in net.modules():
            module.register_full_backward_hook(lambda *_: None)
    ran, others = check(net, plan_of_attention(local), x, 1, mesh, unfused=unfused)
    assert ran == QKV and not others


@pytest.mark.timeout(180)  # torch imports its compiler here
def test_compiled(installed, mesh, unfused):
    """Without a graph break, and the same operations run."""
    size = mesh.size()
    both = nn.Sequential(*attention(), Block(True, 48)).to(D)
    plan = plan_of_attention(False) | {name.replace("0", "2", 1): each for name, each in plan_of_blocks(1, 1).items()}
    in_both = Counter(QKV) + Counter({name: calls // 2 for name, calls in SEQUENCE.items()})
    for net, styles, x, dim, expected in (
        (blocks(count=1), plan_of_blocks(None, 1), data(size, 2, 6), None, {"matmul_all_reduce": 2}),
        (both, plan, data(2, size, 48), 1, in_both),
    ):
        torch._dynamo.reset()
        ran, others = check(net, styles, x, dim, mesh, compiled=True, unfused=unfused)
        assert ran == expected and not others


def test_shapes_that_torch_pads_or_refuses(installed, mesh, rank, size):
    """Rows and features that do not divide evenly, inputs that are DTensors, other layouts."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(6, 2 * size + 1), nn.GELU(), nn.Linear(2 * size + 1, 6)).to(D)
    x = data(2 * size + 1, 2, 6)
    for up, down, placement, left in (
        ({"input_layouts": Shard(0)}, {"output_layouts": Shard(0)}, Shard(0), 0),
        ({}, {"output_layouts": Shard(-3)}, Replicate(), 1),
        ({"use_local_output": False}, {}, Shard(0), 0),
        ({"output_layouts": Replicate()}, {"input_layouts": Replicate()}, Replicate(), 1),
    ):
        spread, alone = copy.deepcopy(net), copy.deepcopy(net)
        plan = {"0": ColwiseParallel(**up), "2": RowwiseParallel(**down, use_local_output=False)}
        parallelize_module(spread, mesh, plan)
        mine, whole = distribute_tensor(x, mesh, [placement]).requires_grad_(), x.clone().requires_grad_()
        since = Since()
        y, z = spread(mine), alone(whole)
        y.square().sum().backward()
        z.square().sum().backward()
        assert since.as_torch == ({"ColwiseLinear: the input is a replicated DTensor": 1} if left else {})
        assert_equal(full(y), z)
        assert_equal(full(mine.grad), whole.grad)
        for p, q in zip(spread.parameters(), alone.parameters(), strict=True):
            assert_equal(full(p.grad), q.grad)


def test_what_torch_does_instead_counts_with_a_reason(installed, mesh, size):
    class Own(ColwiseParallel):
        @staticmethod
        def _prepare_output_fn(layouts, is_local, module, y, mesh):
            return ColwiseParallel._prepare_output_fn(layouts, is_local, module, y, mesh)

    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.read, self.other = nn.Linear(6, size), nn.Linear(6, size)

        def forward(self, x):
            return self.read(x).sum() + self.other(x + 1).sum()

    since = Since()
    net = nn.ModuleDict({"table": nn.Embedding(size, 6), "own": nn.Linear(6, size), "up": nn.Linear(6, 2 * size)}).to(D)
    net["cross"] = Cross().to(D)
    alone = copy.deepcopy(net)
    prepare = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    plan = {"table": ColwiseParallel(), "own": Own(), "up": ColwiseParallel(), "cross": prepare}
    parallelize_module(net, mesh, plan | {"cross.*": ColwiseParallel()})
    expected = {
        "ColwiseParallel: Embedding instead of Linear": 1,
        "ColwiseParallel: Own has methods of its own": 1,
    }
    assert since.as_torch == expected
    x = data(size, 6)
    assert_equal(full(net["up"](x[0])), alone["up"](x[0]).chunk(size)[mesh.get_local_rank()])
    expected["ColwiseLinear: an input of one dimension"] = 1
    assert since.as_torch == expected
    for ran in (1, 2):
        since = Since()
        found = net["cross"](x.chunk(size)[mesh.get_local_rank()]).detach().clone()
        dist.all_reduce(found)
        assert_equal(found, alone["cross"](x).detach())
        assert since.ran == {"all_gather_matmul_many": 1}
        unread = {"PrepareModuleInput: a child does not read the gathered input": 1} if ran == 1 else {}
        assert since.as_torch == {"ColwiseLinear: the input is a replicated DTensor": 1} | unread


@pytest.mark.parametrize("local", [False, True], ids=["DTensor", "local"])
def test_a_gathered_input_that_is_changed_in_place(installed, mesh, size, local):
    """The product for the old values is not used. torch.compile refuses the function."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, size), nn.Linear(6, size)

        def forward(self, x):
            y = self.a(x)
            x.mul_(2)
            return y + self.b(x)

    net = Pair().to(D).requires_grad_(False)
    alone = copy.deepcopy(net)
    prepare = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=local)
    parallelize_module(net, mesh, {"": prepare, "[ab]": ColwiseParallel()})
    x = data(size, 6)
    mine, since = x.chunk(size)[mesh.get_local_rank()], Since()
    assert_equal(net(mine.clone()), alone(x.clone()).chunk(size, 1)[mesh.get_local_rank()])
    assert since.ran == {"all_gather_matmul_many": 1}
    expected = {"PrepareModuleInput: a child does not read the gathered input": 1}
    assert since.as_torch == expected | ({} if local else {"ColwiseLinear: the input is a replicated DTensor": 1})
    again = parallelize_module(alone, mesh, {"": prepare, "[ab]": ColwiseParallel()})
    with pytest.raises(Exception, match="changes it in place"):
        torch.compile(again, fullgraph=True, backend="eager")(mine.clone())


def test_classes_change_nothing_of_torch(mesh, unfused):
    since = Since()
    before = ColwiseParallel._apply
    own = plan_of_blocks(0, 1, fompi.torch.ColwiseParallel, fompi.torch.RowwiseParallel)
    ran, _ = check(blocks(count=1), own, data(mesh.size(), 2, 6), 0, mesh)
    assert ran == {name: calls // 2 for name, calls in SEQUENCE.items()}
    theirs = Since()
    net = parallelize_module(blocks(count=1), mesh, plan_of_blocks(None, 1))
    net(data(1, 2, 6)).sum().backward()
    assert not theirs.ran and not since.as_torch and ColwiseParallel._apply is before
    with fompi.torch.install():
        ours = ColwiseParallel._apply
        with fompi.torch.install():
            pass
        assert ColwiseParallel._apply is ours is not before
        with fompi.torch.install():
            fompi.torch.uninstall()
            assert ColwiseParallel._apply is before
    assert ColwiseParallel._apply is before


def test_after_an_exception_in_a_forward(installed, mesh, rank, size):
    """The next forward gathers once for all readers again."""
    net, x = attention(), data(2, size, 48)
    alone = copy.deepcopy(net)
    parallelize_module(net, mesh, plan_of_attention(False))
    mine, wk = x.chunk(size, 1)[rank], net[1].wk

    def fail(*_):
        raise ArithmeticError("of the user")

    hook = wk.register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        net(mine)
    hook.remove()
    since = Since()
    assert_equal(net(mine), alone(x).chunk(size, 1)[rank])
    assert since.ran == {"all_gather_matmul_many": 1, "matmul_reduce_scatter": 1} and not since.as_torch
    assert wk.forward.reads_gathered and wk.forward.taken is None


def test_a_mesh_is_a_communicator_also_in_compiled_code(mesh, size):
    x = torch.ones(2, 2)
    for compile in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")):
        assert compile(lambda x: fompi.torch.all_reduce(x, comm=mesh))(x).sum() == 4 * size


def test_other_uses_of_a_module(installed, mesh, rank, size):
    """Copies, autocast, inference, and checkpoints of activations."""
    net, alone, x = blocks(), blocks(), data(size, 2, 6)
    parallelize_module(net, mesh, plan_of_blocks(None))
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
        assert_equal(twin(x), torch.zeros_like(x))
    assert list(net.state_dict()) == list(alone.state_dict())
    heads, tokens = parallelize_module(attention(), mesh, plan_of_attention(True)), data(1, size, 48)
    twin, mine, since = copy.deepcopy(heads), tokens.chunk(size, 1)[rank], Since()
    for p in twin.parameters():
        p.data.mul_(2)
    assert_equal(heads(mine), attention()(tokens).chunk(size, 1)[rank])
    assert not torch.allclose(twin(mine), heads(mine))
    assert since.ran["all_gather_matmul_many"] == 3 and not since.as_torch
    with torch.inference_mode():
        assert_equal(net(x), alone(x))
    checkpoint(net, x, use_reentrant=False).sum().backward()
    alone(x).sum().backward()
    assert_equal(full(net[0].up.weight.grad), alone[0].up.weight.grad)
    net, alone = net.float(), alone.float()
    with torch.autocast("cpu", torch.bfloat16):
        y, z = net(x.float()), alone(x.float())
    assert y.dtype == z.dtype == torch.bfloat16
    torch.testing.assert_close(y, z, rtol=0.05, atol=0.05)
    heads, alone, since = heads.float(), attention().float(), Since()
    with torch.autocast("cpu", torch.bfloat16):
        y, z = heads(mine.float()), alone(tokens.float())
    torch.testing.assert_close(y, z.chunk(size, 1)[rank], rtol=0.05, atol=0.05)
    assert since.as_torch == {
        "PrepareModuleInput: autocast changes the dtype of the input": 1,
        "RowwiseLinear: products of half types that are summed": 1,
    }


# ------------------------------------------------------------------------------------------------------------ training


def train(net, loss_of, steps=20):
    """The losses of 20 steps, and the parameters after them."""
    optimizer, losses = torch.optim.AdamW(net.parameters(), 1e-2), []
    for _ in range(steps):
        loss = loss_of(net)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [full(p.detach()) for p in net.parameters()]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("sharded", [False, True], ids=["", "and FSDP2"])
def test_twenty_steps_of_training(installed, rank, size, sharded):
    """Sequence parallel alone, and on a mesh with FSDP2: as in one process."""
    tensor = size if not sharded else 2 if size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (size // tensor, tensor), mesh_dim_names=("data", "tensor"))
    rows, columns = mesh["data"], mesh["tensor"]
    x, y = data(2 * rows.size(), tensor, 6), data(2 * rows.size(), tensor, 6).flip(2)
    net = parallelize_module(blocks(), columns, plan_of_blocks(1))
    if sharded:
        for block in net:
            fully_shard(block, mesh=rows)
        fompi.torch.overlap(fully_shard(net, mesh=rows))

    def loss_of(net):
        mine = [t.chunk(rows.size())[rows.get_local_rank()].chunk(tensor, 1)[columns.get_local_rank()] for t in (x, y)]
        return F.mse_loss(net(mine[0]), mine[1], reduction="sum") * rows.size() / x.numel()

    losses, weights = train(net, loss_of)
    total = torch.tensor(losses, dtype=D)
    dist.all_reduce(total)
    alone_losses, alone_weights = train(blocks(), lambda net: F.mse_loss(net(x), y))
    assert_equal(total / rows.size(), torch.tensor(alone_losses, dtype=D))
    for p, q in zip(weights, alone_weights, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)


def test_gradients_of_fsdp2_are_reduced_behind_the_backward(rank, size, mesh, monkeypatch):
    """Nothing waits for a reduce-scatter until the backward ends, unless something reads the gradients before."""
    if size == 1:
        return  # torch then communicates nothing
    events, waits = [], {kind: kind.wait for kind in (Work, Landed)}

    def waited(self, *args):
        events.append("wait")
        return waits[type(self)](self, *args)

    def queued(call):
        events.append("queued")
        at_end(call)

    at_end = private.at_end_of_backward
    monkeypatch.setattr(private, "at_end_of_backward", queued)
    x = torch.randn(2 * size, 6, generator=torch.Generator().manual_seed(1))
    results = []
    for overlapped in (False, True):
        net = blocks(count=3).float()
        for block in net:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        if not overlapped:  # it is the default
            assert fompi.torch.overlap(net, False) is net
        for step in range(2):  # the second backward adds to the gradients of the first
            loss = net(x.chunk(size)[rank]).square().mean()
            events.clear()
            with monkeypatch.context() as patch:
                for kind in waits:
                    patch.setattr(kind, "wait", waited)
                loss.backward()
            assert events.count("queued") == (3 if overlapped and step == 0 else 0)
            if overlapped and step == 0:
                assert events[-3:] == ["wait"] * 3 and events[-4] == "queued"
        results.append([full(p.grad) for p in net.parameters()])
    assert all(map(torch.equal, *results))


def test_a_module_without_a_backward_waits(mesh, size):
    """As in a pipeline of torch, which reduces gradients after its backwards."""
    called = []
    private.at_end_of_backward(lambda: called.append(1))
    assert called == [1]
    net = fully_shard(nn.Linear(2, 2), mesh=mesh)
    comm = fully_sharded.Unwaited(partial(fully_sharded.reduce_scatter, net))
    x, y = torch.ones(2 * size), torch.zeros(2)
    comm(y, x, dist.group.WORLD, dist.ReduceOp.AVG)
    assert torch.equal(y, torch.ones(2))


def test_ranks_at_other_layers_or_with_other_gradients_disagree(rank, size, mesh, installed):
    """All of them get an error, in the forward and in the backward, and the next call is right."""
    if size == 1:
        return

    n = 2 * size

    def layer(style):
        return parallelize_module(nn.Linear(n, n, bias=False, dtype=D), mesh, style)

    x, first = torch.ones(n, n, dtype=D), rank == 0
    for style in (ColwiseParallel(input_layouts=Shard(0)), RowwiseParallel(), RowwiseParallel(output_layouts=Shard(0))):
        one, other = layer(style), layer(style)
        given = x[:, :2] if isinstance(style, RowwiseParallel) else x
        with pytest.raises(fompi.MismatchError, match=r"of parallel layer \d+"):
            (one if first else other)(given)
        one.requires_grad_(first)
        with pytest.raises(fompi.MismatchError, match="for the gradient of w"):
            one(given)
        assert one.requires_grad_()(given).isfinite().all()
    ys = [each(x) for each in (layer(ColwiseParallel(input_layouts=Shard(0))) for _ in range(2))]
    with pytest.raises(fompi.MismatchError, match=r"in the backward.*of parallel layer \d+"):
        ys[first].sum().backward()
    columns = [layer(ColwiseParallel()) for _ in range(2)]
    x.requires_grad_()
    with pytest.raises(fompi.MismatchError, match=r"in the backward of replicated_matmul of parallel layer \d+"):
        columns[first](x).sum().backward()


def test_plain_rows_that_are_not_as_many_on_every_rank(rank, size, mesh, installed):
    """torch takes them for even ones. The error says what to pass, and a DTensor with these rows works."""
    if size == 1:
        return
    layer = parallelize_module(nn.Linear(4, 2 * size, dtype=D), mesh, ColwiseParallel(input_layouts=Shard(0)))
    whole = data(2 * size + 1, 4)
    with pytest.raises(fompi.ShapeError, match=r"pass a DTensor.*distribute_tensor"):
        layer(whole[: 3 if rank == 0 else 2])
    assert layer(distribute_tensor(whole, mesh, [Shard(0)])).shape == (2 * size + 1, 2)


def test_checkpoints_of_torch(mesh, folder):
    """What `parallelize_module` cut is saved by dcp and read as FSDP2 cuts it."""
    net = parallelize_module(Block(True), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    saved = net.state_dict()
    dcp.save({"model": saved}, checkpoint_id=folder)
    other = Block(True)
    for module in (other.up, other.down):
        fully_shard(module, mesh=mesh)
    found = other.state_dict()
    dcp.load({"model": found}, checkpoint_id=folder)
    for name, value in found.items():
        ours, theirs = (t.full_tensor() if isinstance(t, DTensor) else t for t in (value, saved[name]))
        assert torch.equal(ours, theirs), name
