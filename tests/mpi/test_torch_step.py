"""A whole step as one plan from modules: parameters and losses are those of torch in one process."""

import copy

import numpy as np
import pytest
import torch

import fompi
import fompi.torch

pytestmark = pytest.mark.ranks(mpich=[3, 4], openmpi=[])

FEATURES, HIDDEN, ROWS, VOCABULARY = 3, 4, 5, 7
MESHES = {
    1: [{"dp": 1}],
    2: [{"dp": 2}, {"tp": 2}, {"pp": 2}],
    3: [{"dp": 3}, {"tp": 3}],
    4: [{"dp": 2, "tp": 2}, {"tp": 2, "pp": 2}],
    8: [{"dp": 2, "tp": 2, "pp": 2}],
}


class Mlp(torch.nn.Module):
    residual = True

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(FEATURES, HIDDEN), torch.nn.Linear(HIDDEN, FEATURES, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Attention(torch.nn.Module):
    kind, residual = "attention", True

    def __init__(self):
        super().__init__()
        self.into, self.out = torch.nn.Linear(FEATURES, 6), torch.nn.Linear(2, FEATURES, bias=False)

    def qkv(self, x):
        return self.into(x)

    def attention(self, qkv):
        q, k, v = torch.cat(qkv).chunk(3, 1)
        o = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        return o.split([len(each) for each in qkv])

    def output(self, o):
        return self.out(o)


class Embedding(torch.nn.Embedding):
    kind, stay = "embedding", True


class Head(torch.nn.Linear):
    kind = "head"

    def forward(self, y, targets):
        return torch.nn.functional.cross_entropy(super().forward(y), targets, reduction="sum")


def loss_of(model, ids, targets):
    """Of a micro-batch, in one process: the terms of all ranks of tp are added."""
    x = model[0][0](ids)
    for of in model[1:-1]:
        terms = [m.output(m.attention([m.qkv(x)])[0]) if hasattr(m, "qkv") else m(x) for m in of]
        x = x + sum(terms)
    return model[-1][0](x, targets)


@pytest.mark.usefixtures("float64")
def test_a_language_model_of_modules(world):
    for mesh in MESHES.get(world.size, []):
        dp, tp, pp = (mesh.get(name, 1) for name in ("dp", "tp", "pp"))
        torch.manual_seed(dp + 10 * tp + 100 * pp)
        middle = [[(Mlp if n % 2 else Attention)() for _ in range(tp)] for n in range(2 * pp)]
        ends = [[Embedding(VOCABULARY, FEATURES)] * tp, [Head(FEATURES, VOCABULARY, bias=False)] * tp]
        model = [ends[0], *middle, ends[1]]
        whole = copy.deepcopy(model)
        optimizer = torch.optim.SGD([p for of in whole for m in {*of} for p in m.parameters()], 1e-2, momentum=0.9)
        t, d = world.rank % tp, world.rank // tp % dp
        how = {"microbatches": 2, "shape": (ROWS, FEATURES), "dtype": "float64", "comm": world, "layers": len(model)}
        how["optimizer"] = fompi.parallel.data.SGD(1e-2, momentum=0.9)
        if pp > 1:  # the last stage has the head only
            how["shares"] = [len(model) - pp + 1, *[1] * (pp - 1)]
        with fompi.torch.TrainingStep(lambda n, model=model, t=t: model[n][t], mesh=mesh, **how) as step:
            for _ in range(3):
                ids, targets = torch.randint(VOCABULARY, (2, 2 * dp, tp, ROWS))
                own = slice(2 * d, 2 * d + 2)
                losses = step(ids[own, t], targets[own, t])
                optimizer.zero_grad()
                expected = sum(loss_of(whole, a.flatten(), b.flatten()) for a, b in zip(ids, targets, strict=True))
                expected.backward()
                optimizer.step()
                every = fompi.all_gather(np.array([[0.0] * 2 if losses is None else losses]), comm=world)
                assert every.sum() == pytest.approx(expected.item(), rel=1e-10)
            step.write_back()
            assert sorted(step.modules) == step.problem.held(world.rank)
            for number, module in step.modules.items():
                for p, q in zip(module.parameters(), whole[number][t].parameters(), strict=True):
                    torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


def test_a_loss_beside_modules(world):
    """Without a head, and without a residual: one product of all ranks of dp."""
    torch.manual_seed(1)
    net, x, y = torch.nn.Linear(FEATURES, FEATURES), torch.randn(2, ROWS, FEATURES), torch.randn(2, ROWS, FEATURES)
    loss, alone = torch.nn.MSELoss(reduction="sum"), copy.deepcopy(net)
    how = {"microbatches": 2, "shape": (ROWS, FEATURES), "comm": world, "layers": 1, "mesh": {"dp": world.size}}
    how["dtype"] = str(x.dtype).removeprefix("torch.")
    with fompi.torch.TrainingStep(lambda _: net, loss=loss, optimizer=fompi.parallel.data.SGD(0.01), **how) as step:
        losses = step(x, y)
        step.write_back()
    expected = [loss(alone(a), b) for a, b in zip(x, y, strict=True)]
    assert losses == pytest.approx([each.item() for each in expected], rel=1e-5)
    sum(expected).backward()
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.data, q.data - 0.01 * world.size * q.grad)


def test_a_parameter_that_is_not_used_and_a_step_that_fails(world):
    """As torch leaves alone what has grad=None. A step that fails in the backward of one rank changes nothing."""
    torch.manual_seed(1)
    net, x, broken = Mlp(), torch.randn(2, ROWS, FEATURES), False
    net.unused = torch.nn.Parameter(torch.ones(3))

    def hook(_):
        if broken and world.rank == world.size - 1:
            raise OSError("no space left")

    net.up.bias.register_hook(hook)
    alone, options = copy.deepcopy(net), {"lr": 0.1, "weight_decay": 0.5}
    optimizer = torch.optim.AdamW(alone.parameters(), **options)
    how = {"microbatches": 2, "shape": (ROWS, FEATURES), "comm": world, "layers": 1, "mesh": {"dp": world.size}}
    how |= {"loss": lambda y, t: (y - t).square().sum(), "optimizer": fompi.parallel.data.AdamW(**options)}
    how["dtype"] = str(x.dtype).removeprefix("torch.")
    with fompi.torch.TrainingStep(lambda _: net, **how) as step:
        for broken in (False, True, False):
            if broken:
                with pytest.raises((OSError, fompi.PeerError)):
                    step(x, x)
                continue
            step(x, x)
            optimizer.zero_grad()
            sum(alone(a).square().sum() for a in x).mul(world.size).backward()
            optimizer.step()
        step.write_back()
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert torch.equal(net.unused, torch.ones(3))


class Unread(torch.nn.Module):
    """It reads its input only in a product by which nothing is differentiated."""

    def __init__(self, kind="rows", residual=False):
        super().__init__()
        self.kind, self.residual = kind, residual
        self.into, self.out = torch.nn.Linear(FEATURES, FEATURES), torch.nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        return self.out(x.detach())

    qkv = property(lambda self: self.into)
    output = property(lambda self: self.out)

    def attention(self, qkv):
        return [torch.ones_like(each) for each in qkv]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("kind", ["rows", "attention"])
def test_a_layer_without_a_gradient_of_its_input(world, kind, residual):
    """Right for the first one, and with a residual. Else those before it would get zeros, where torch has None."""
    torch.manual_seed(7)
    x, made, options = torch.randn(1, ROWS, FEATURES), {}, {"lr": 0.1, "weight_decay": 0.5, "eps": 1.0}  # no signs
    how = {"microbatches": 1, "shape": (ROWS, FEATURES), "comm": world, "layers": 2, "mesh": {"dp": world.size}}
    how |= {"loss": lambda y, t: (y - t).square().sum(), "optimizer": fompi.parallel.data.AdamW(**options)}
    how["dtype"] = str(x.dtype).removeprefix("torch.")

    def make(number):
        torch.manual_seed(number)
        made[number] = Unread(kind, residual) if number == first else Mlp()
        return made[number]

    for first in (0, 1):
        with fompi.torch.TrainingStep(make, **how) as step:
            alone = copy.deepcopy([made[0], made[1]])
            if first == 1 and not residual:
                with pytest.raises((fompi.PlanError, fompi.PeerError), match="layer 1 does not read its input"):
                    step(x, x)
                continue
            step(x, x)
            step.write_back()
        y = x[0]
        for layer in alone:
            z = layer.out(torch.ones_like(y)) if isinstance(layer, Unread) and kind == "attention" else layer(y)
            y = y + z if layer.residual else z
        (y - x[0]).square().sum().mul(world.size).backward()
        torch.optim.AdamW([p for layer in alone for p in layer.parameters()], **options).step()
        for number in (0, 1):
            for p, q in zip(made[number].parameters(), alone[number].parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spoil", [lambda p: p.requires_grad_(False), lambda p: setattr(p, "data", p.data.bfloat16())])
def test_parameters_that_a_step_cannot_have(world, spoil):
    def make(_):
        net = torch.nn.Linear(FEATURES, FEATURES)
        spoil(net.weight)
        return net

    how = {"microbatches": 1, "shape": (ROWS, FEATURES), "comm": world, "layers": 1, "mesh": {"dp": world.size}}
    with pytest.raises(fompi.TensorError, match="the parameter weight is"):
        fompi.torch.TrainingStep(make, loss=lambda y, _: y.sum(), optimizer=fompi.parallel.data.SGD(0.1), **how)
