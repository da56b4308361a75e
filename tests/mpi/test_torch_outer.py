"""fompi.torch.DiLoCo and LocalSGD: islands that train modules, alone and with other kinds of parallelism inside."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fompi
from fompi.base.errors import LayoutError, MismatchError
from fompi.parallel.data import SGD
from fompi.torch import DiLoCo, DistributedDataParallel, LocalSGD, ZeroDataParallel, nn
from fompi.torch.outer import TrainedModule

pytestmark = [pytest.mark.ranks(mpich=[2, 4], openmpi=[]), pytest.mark.usefixtures("float64")]

ON_TWO = pytest.mark.ranks(mpich=[2])
ON_FOUR = pytest.mark.ranks(mpich=[4])
STEPS = 14


def made(dtype=torch.float64):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)
    ).to(dtype)


def batch(island, step, dtype=torch.float64):
    random = torch.Generator().manual_seed(100 * island + step)
    x = torch.randn(6, 5, generator=random, dtype=torch.float64).to(dtype)
    return x, (x.sum(1, keepdim=True) * (1 + island)).sin().expand(-1, 4)


def adam(model):
    """With two groups, and another learning rate for biases."""
    groups = [[p for p in model.parameters() if (p.ndim == 1) == is_bias] for is_bias in (False, True)]
    return torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "lr": 0.02}], lr=0.01)


def step(model, optimizer, island, t, dtype=torch.float64):
    """With a closure, and clipped."""

    def closure():
        optimizer.zero_grad()
        x, y = batch(island, t, dtype)
        loss = (model(x) - y).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return loss

    optimizer.step(closure)


def reference(count, steps, period, fragments, delay, alpha, eta=0.7, beta=0.9, moments=()):
    """The models of all islands, one after the other in one process. Modules are dealt round robin."""
    models = [made() for _ in range(count)]
    optimizers = [*map(adam, models)]
    outer = {name: p.detach().clone() for name, p in made().named_parameters()}
    v = {name: torch.zeros_like(p) for name, p in outer.items()}
    of = {f"{layer}.{kind}": i % fragments for i, layer in enumerate((0, 2, 4)) for kind in ("weight", "bias")}
    flying, means = {}, {}
    for t in range(1, steps + 1):
        for k, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step(model, optimizer, k, t)
        parameters = [dict(model.named_parameters()) for model in models]
        for p in range(fragments):
            if (t - (p + 1) * period // fragments) % period == 0:
                mine = [name for name, fragment in of.items() if fragment == p]
                flying[t + delay] = {n: sum(outer[n] - each[n].detach() for each in parameters) / count for n in mine}
                for key, often in moments:
                    if ((t - 1) // period + 1) % often == 0:
                        for n in mine:
                            held = [o.state[each[n]][key] for o, each in zip(optimizers, parameters, strict=True)]
                            means[t + delay, n, key] = sum(held) / count
        for name, d in flying.pop(t, {}).items():
            v[name] = d + beta * v[name]
            outer[name] = outer[name] - eta * (d + beta * v[name])
            for each in parameters:
                each[name].data.mul_(alpha).add_(outer[name], alpha=1 - alpha)
        for at, name, key in [*means]:
            if at == t:
                mean = means.pop((at, name, key))
                for optimizer, each in zip(optimizers, parameters, strict=True):
                    optimizer.state[each[name]][key].mul_(alpha).add_(mean, alpha=1 - alpha)
    return models


def close(model, expected):
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            p.detach(), q.detach(), rtol=1e-9, atol=1e-11, msg=lambda words, n=name: f"{n}: {words}"
        )


CASES = {
    "plain": ((4, 1, 0, 0.0), {}),
    "delay": ((4, 1, 3, 0.5), {}),
    "fragments": ((6, 3, 0, 0.5), {}),
    "both": ((6, 3, 1, 0.0), {}),
    "moments": ((2, 2, 0, 0.0), {"exp_avg": 2, "exp_avg_sq": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_training(world, case):
    (period, fragments, delay, alpha), moments = CASES[case]
    model = made()
    optimizer = adam(model)
    how = {"fragments": fragments, "delay": delay, "alpha": alpha, "moments": moments}
    with DiLoCo(model, optimizer, world, sync_every=period, **how) as outer:
        for t in range(1, STEPS + 1):
            step(model, optimizer, world.rank, t)
            outer.step()
    close(model, reference(world.size, STEPS, period, fragments, delay, alpha, moments=moments.items())[world.rank])


@ON_TWO
def test_local_sgd_is_the_mean(world):
    model = made()
    optimizer = adam(model)
    with LocalSGD(model, optimizer, world, sync_every=3) as outer:
        for t in range(1, 7):
            step(model, optimizer, world.rank, t)
            if t % 3 == 0:
                means = [fompi.all_reduce(p.detach(), op="mean", comm=world) for p in model.parameters()]
            outer.step()
    for p, mean in zip(model.parameters(), means, strict=True):
        torch.testing.assert_close(p.detach(), mean, rtol=1e-12, atol=1e-14)


def test_each_step_is_data_parallelism(world):
    """Inner SGD, H=1, eta=1, beta=0: as DistributedDataParallel, up to rounding."""
    models = [made(), made()]
    ddp = DistributedDataParallel(models[1], world)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in models]
    with DiLoCo(models[0], optimizers[0], world, sync_every=1, outer_lr=1.0, outer_momentum=0.0) as outer:
        for t in range(8):
            x, y = batch(world.rank, t)
            for net, optimizer in zip((models[0], ddp), optimizers, strict=True):
                optimizer.zero_grad()
                (net(x) - y).square().mean().backward()
                optimizer.step()
            outer.step()
    close(models[0], models[1])
    ddp.close()


@ON_TWO
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_resumed_run_has_the_same_bits(world, dtype, tmp_path):
    """Saved by torch.save in the middle of a delay. The state is loaded before the parameters, or after."""
    how = {"sync_every": 4, "fragments": 2, "delay": 1, "wire": "int8", "feedback": True}

    def run(saved_after, order=("outer", "model", "optimizer")):
        model = made(dtype)
        held = {"model": model, "optimizer": adam(model)}
        held["outer"] = DiLoCo(model, held["optimizer"], world, **how)
        for t in range(1, STEPS + 1):
            step(model, held["optimizer"], world.rank, t, dtype)
            held["outer"].step()
            if t == saved_after:
                torch.save({name: each.state_dict() for name, each in held.items()}, tmp_path / f"state{world.rank}")
                held["outer"].close()
                model = made(dtype)
                held = {"model": model, "optimizer": adam(model)}
                held["outer"] = DiLoCo(model, held["optimizer"], world, **how)
                state = torch.load(tmp_path / f"state{world.rank}")
                for name in order:
                    held[name].load_state_dict(state[name])
        assert held["outer"].state_dict()["outer"]["0.weight"].dtype == torch.float32
        held["outer"].close()
        return [p.detach() for p in model.parameters()]

    whole = run(None)
    for saved_after, order in ((6, ("outer", "model", "optimizer")), (7, ("model", "optimizer", "outer"))):
        assert all(map(torch.equal, run(saved_after, order), whole))


@ON_TWO
def test_what_differs_is_named_on_all_ranks(world):
    """The class and the options of the optimizer, the modules of fragments, the model."""
    last, model = world.rank == world.size - 1, made()
    one, other = [[model[0], model[2]], [model[4]]], [[model[4]], [model[0], model[2]]]
    for words, build in (
        ("optimizer: AdamW on rank", lambda: DiLoCo(model, (torch.optim.SGD if last else torch.optim.AdamW)(
            model.parameters(), 0.1), world, sync_every=4)),
        ("lr of group 0 of the optimizer: 0.1 on rank", lambda: DiLoCo(model, torch.optim.SGD(
            model.parameters(), 0.2 if last else 0.1), world, sync_every=4)),
        ("parameter '0.weight': .* in fragment 0 on rank", lambda: DiLoCo(
            model, None, world, sync_every=4, fragments=other if last else one)),
        ("parameter '6.weight': missing on rank", lambda: DiLoCo(torch.nn.Sequential(
            *model, *[torch.nn.ReLU(), torch.nn.Linear(4, 4)] * last), None, world, sync_every=4)),
        ("sync_every: 4 on rank", lambda: DiLoCo(model, None, world, sync_every=8 if last else 4)),
    ):  # fmt: skip
        with pytest.raises(MismatchError, match=words):
            build()
    with torch.no_grad():
        model[2].bias += last
    with DiLoCo(model, None, world, sync_every=4) as outer, pytest.raises(MismatchError, match=r"outer of '2.bias'"):
        outer.step()


@ON_TWO
def test_wrong_arguments(world):
    """On one rank only: all ranks have an error."""
    last, model = world.rank == world.size - 1, made()
    for words, wrong in (
        ("only 3 modules own parameters", {"fragments": 4}),
        ("'4.weight' is in none", {"fragments": [[model[0]], [model[2]]]}),
        ("moments= are those of an optimizer", {"moments": {"exp_avg": 2}}),
    ):
        with pytest.raises(LayoutError if last else MismatchError, match=words):
            DiLoCo(model, None, world, sync_every=12, **(wrong if last else {}))
    optimizer = adam(model)
    with DiLoCo(model, optimizer, world, sync_every=1, moments={"exp_av": 1}) as outer:
        step(model, optimizer, world.rank, 1)
        with pytest.raises(LayoutError, match="names 'exp_av', but the optimizer keeps step, exp_avg, exp_avg_sq"):
            outer.step()


@ON_TWO
def test_frozen_and_tied_parameters(world):
    """What is frozen stays this island's own. A tied parameter travels once."""
    model = made()
    model[2].requires_grad_(False)
    model.again = model[0]
    with torch.no_grad():
        model[2].bias += world.rank
    how = {"sync_every": 2, "fragments": 2, "outer_lr": 1.0, "outer_momentum": 0.0}
    with DiLoCo(model, None, world, **how) as outer:
        with torch.no_grad():
            model[0].weight += world.rank
            model[4].weight += world.rank
        outer.step()
        outer.step()
    mean = (world.size - 1) / 2
    torch.testing.assert_close(model[0].weight - made()[0].weight, torch.full((8, 5), mean))
    torch.testing.assert_close(model[4].weight - made()[4].weight, torch.full((4, 8), mean))
    assert torch.equal(model[2].bias - made()[2].bias, (made()[2].bias + world.rank) - made()[2].bias)


# -------------------------------------------------------------------------------- what is inside of an island


def sgd_reference(steps, how):
    """Two islands of two ranks: each trains on the whole batch of the island, by SGD."""
    models, count = [made() for _ in range(2)], 2
    outer, v = made(), [torch.zeros_like(p) for p in made().parameters()]
    for t in range(1, steps + 1):
        for k, model in enumerate(models):
            x, y = batch(k, t)
            model.zero_grad()
            (model(x) - y).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        if t % how["sync_every"] == 0:
            with torch.no_grad():
                for i, (q, *ps) in enumerate(zip(outer.parameters(), *(m.parameters() for m in models), strict=True)):
                    d = sum(q - p for p in ps) / count
                    v[i] = d + 0.9 * v[i]
                    q -= 0.7 * (d + 0.9 * v[i])
                    for p in ps:
                        p.copy_(q)
    return models


def loss_of(y, target):
    return (y - target).square().mean()


def island_of(inside, grid, mesh):
    """(the module of this rank, its optimizer, a step on the batch of the island), on the two ranks of an island."""
    inner, model = grid["inner"], made()
    mine = inner.rank
    if inside == "pipeline":
        layers = {str(i): layer for i, layer in enumerate(model) if (i > 2) == mine}
        model, options = torch.nn.ModuleDict(layers), {"microbatches": 2, "activations": (3, 8), "dtype": "float64"}
        pipe = fompi.torch.Pipeline([torch.nn.Sequential(*layers.values())], comm=inner, loss=loss_of, **options)
    elif inside == "zero":
        model = ZeroDataParallel(model, inner, optimizer=SGD(0.1), zero=2)
    elif inside == "ddp":
        model = DistributedDataParallel(model, inner)
    elif inside == "fsdp2":
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        layers = nn.ColumnParallelLinear(5, 8, comm=inner), nn.RowParallelLinear(8, 8, comm=inner)
        model = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), torch.nn.Linear(8, 4))
        nn.load_full_state_dict(model, made().state_dict())
    optimizer = None if inside == "zero" else torch.optim.SGD(model.parameters(), 0.1)

    def train(x, y):
        if optimizer is not None:
            optimizer.zero_grad()
        if inside == "pipeline":
            pipe.step([*x.chunk(2)], [*y.chunk(2)])
            for p in model.parameters():
                p.grad /= 2
        else:
            loss_of(model(x.chunk(2)[mine]), y.chunk(2)[mine]).backward()
        if inside == "tensor":  # gradients of layers that are spread are of the sum of the losses
            for p in model[4].parameters():
                p.grad = fompi.all_reduce(p.grad, comm=inner)
            for p in model.parameters():
                p.grad /= 2
        if optimizer is None:
            model.step()
        else:
            optimizer.step()

    return model, optimizer, train


@ON_FOUR
@pytest.mark.parametrize("inside", ["ddp", "zero", "fsdp2", "tensor", "pipeline"])
def test_islands_of_two_ranks(world, group, inside):
    """Each rank exchanges what it holds along the axis of islands."""
    grid = fompi.Mesh(world, priority=["inner"], islands=2, inner=2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("islands", "inner"))
    model, optimizer, train = island_of(inside, grid, mesh["inner"])
    with DiLoCo(model, optimizer, grid["islands"], sync_every=3) as outer:
        assert outer.outer.comm.urgency == 1  # its messages leave behind those of the island
        for t in range(1, 8):
            train(*batch(grid.coordinates["islands"], t))
            outer.step()
    state = nn.full_state_dict(model) if inside == "tensor" else dict(model.named_parameters())
    expected = dict(sgd_reference(7, {"sync_every": 3})[grid.coordinates["islands"]].named_parameters())
    assert len(state) == {"pipeline": 4 - 2 * grid["inner"].rank}.get(inside, 6)
    for name, p in state.items():
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        q = expected[name.removeprefix("module.")]
        torch.testing.assert_close(whole.detach(), q.detach(), rtol=1e-9, atol=1e-11)
    if inside in ("ddp", "zero"):
        model.close()
    grid.close()


@ON_TWO
@pytest.mark.parametrize("sharded", [False, True])
def test_an_optimizer_takes_over_the_state_of_another_one(group, sharded):
    """What a late island gets: as it is, of FSDP2 the uneven parts of this rank."""
    models = [made(), made()]
    for model in models if sharded else ():
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    one, other = [TrainedModule(model, adam(model)) for model in models]
    for t in (1, 2):
        step(models[0], one.optimizer, 0, t)
    assert other.is_fresh() and not one.is_fresh()
    state = iter(one.inner_state({}))
    other.take_inner(lambda like: next(state))
    other.take({name: one.get(name) for name in one.named()})
    assert next(state, None) is None and not other.is_fresh()
    for each in (one, other):
        step(each.model, each.optimizer, 0, 3)
    for name in one.named():
        assert torch.equal(one.get(name), other.get(name)), name
