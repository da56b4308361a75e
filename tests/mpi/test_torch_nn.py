"""fompi.torch.nn: a model of all modules is the unsharded torch model: numbers, gradients, training, checkpoints."""

from pathlib import Path

import numpy as np
import pytest
import torch
from whole_model import (
    TARGET,
    TOKENS,
    Parts,
    Whole,
    close,
    full_gradients,
    made,
    rows,
    same_bits,
    share_scale,
)

import fompi
from fompi.torch import nn
from fompi.torch.nn import full_state_dict, load_full_state_dict

pytestmark = [pytest.mark.ranks(mpich=[4], openmpi=[]), pytest.mark.usefixtures("float64")]


def test_the_same_seed_gives_the_unsharded_model(world):
    whole, parts = made(world)
    same_bits(full_state_dict(parts), whole.state_dict())
    held = parts.glu[0].weight.detach().chunk(2)  # a part of both halves
    gate, up = whole.glu[0].weight.detach().view(2, 7, 6)
    mine = torch.tensor_split(torch.arange(7), world.size)[world.rank]
    assert torch.equal(held[0], gate[mine]) and torch.equal(held[1], up[mine])


def test_training(world):
    """Numbers, gradients, clipping, and five steps of SGD are those of one process."""
    whole, parts = made(world)
    mine = rows(world)
    for step in range(5):
        for model in (whole, parts):
            model.zero_grad()
        expected, y = whole(TOKENS), parts(TOKENS)
        close(y.detach(), expected[mine].detach())
        (expected - TARGET).square().sum().backward()
        (y - TARGET[mine]).square().sum().backward()
        share_scale(parts, world)
        gradients = full_gradients(parts)
        for name, parameter in whole.named_parameters():
            close(gradients[name], parameter.grad)
        if step:
            norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 2.0)
            assert norm > 2
            close(nn.clip_grad_norm_(parts, 2.0), norm)
        with torch.no_grad():  # importing torch.optim takes seconds
            for parameter in (*whole.parameters(), *parts.parameters()):
                parameter.sub_(0.05 * parameter.grad)
    for name, value in full_state_dict(parts).items():
        close(value, whole.state_dict()[name])


def test_smaller_messages(world):
    """Numbers and gradients are near those of one process, and each layer says its wire."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        whole, parts = made(world, wire="float16")
    finally:
        torch.set_default_dtype(default)
    mine, target = rows(world), TARGET.float()
    expected, y = whole(TOKENS), parts(TOKENS)
    assert y.dtype == torch.float32 and 0 < (y - expected[mine]).norm() < 0.01 * expected.norm()
    (expected - target).square().sum().backward()
    (y - target[mine]).square().sum().backward()
    share_scale(parts, world)
    gradients = full_gradients(parts)
    for name, parameter in whole.named_parameters():
        assert (gradients[name] - parameter.grad).norm() < 0.02 * parameter.grad.norm(), name
    assert str(parts).count("wire='float16'") == 7 and "wire" not in str(made(world)[1])
    refused = (lambda comm: nn.MoE(4, 4, 2, 1, wire="int3", comm=comm), lambda comm: made(comm, wire="int8"))
    for make in refused:
        with pytest.raises(fompi.DtypeError, match="wire="):
            make(world)


def test_parts_in_files(world, tmp_path):
    """fompi.save writes the parts, any ranks read them; of a file of torch.save each rank maps its parts."""
    text = np.frombuffer(str(tmp_path).encode().ljust(400), np.uint8)
    folder = Path(fompi.broadcast(text, comm=world).tobytes().decode().strip())
    (whole, parts), (_, others) = made(world), made(world)
    torch.manual_seed(1)
    state = Whole().state_dict()
    load_full_state_dict(parts, state)
    fompi.save(folder / "parts", {"net": parts}, comm=world)
    fompi.load(folder / "parts", {"net": others}, comm=world)
    same_bits(full_state_dict(others), state)
    alone = world.split(world.rank)
    fompi.load(folder / "parts", {"net": whole}, comm=alone)
    alone.close()
    same_bits(whole.state_dict(), state)
    if world.rank == 0:
        torch.save({name: value + 1 for name, value in state.items()}, folder / "whole.pt")
    world.barrier()
    load_full_state_dict(others, torch.load(folder / "whole.pt", mmap=True))
    same_bits(full_state_dict(others), {name: value + 1 for name, value in state.items()})


def test_a_checkpoint_goes_to_any_number_of_ranks_and_back(world):
    """Bit by bit: one process, all ranks, and all but the last rank."""
    whole, parts = made(world)
    torch.manual_seed(1)
    state = Whole().state_dict()
    assert load_full_state_dict(parts, state).missing_keys == []
    same_bits(full_state_dict(parts), state)
    whole.load_state_dict(full_state_dict(parts))
    first = full_state_dict(parts, rank0_only=True)
    assert first.keys() == (state.keys() if world.rank == 0 else set())
    shapes = {name: tuple(value.shape) for name, value in parts.state_dict().items()}
    if world.size == 3:
        assert shapes["mlp.0.weight"] == ((4, 6), (3, 6), (3, 6))[world.rank]
        assert shapes["mlp.1.weight"] == ((6, 4), (6, 3), (6, 3))[world.rank] and shapes["mlp.1.bias"] == (6,)
        assert shapes["moe.experts.w1"] == ((2, 4, 6), (2, 4, 6), (1, 4, 6))[world.rank]
        assert shapes["attention.k_proj.weight"] == (4, 6)  # shared
    with world.split(world.rank == world.size - 1, world.rank) as fewer:
        torch.manual_seed(2)
        other = Parts(fewer)
        load_full_state_dict(other, full_state_dict(parts))
        same_bits(full_state_dict(other), state)
        with torch.device("meta"):
            empty = Parts(fewer)
        load_full_state_dict(empty, state, assign=True)
        same_bits(full_state_dict(empty), state)
    again = full_state_dict(torch.nn.ModuleDict({"a": parts, "b": parts.mlp}))  # nested, and under two names
    assert torch.equal(again["a.mlp.0.weight"], state["mlp.0.weight"])
    assert torch.equal(again["b.0.weight"], state["mlp.0.weight"])


def test_replicated_rows(world):
    """Without sequence parallelism every rank has all rows."""
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 7), torch.nn.ReLU(), torch.nn.Linear(7, 2))
    torch.manual_seed(0)
    options = {"comm": world, "sequence_parallel": False}
    parts = torch.nn.Sequential(
        nn.VocabParallelEmbedding(5, 3, **options),
        nn.ColumnParallelLinear(3, 7, activation="relu", **options),
        torch.nn.Identity(),
        nn.RowParallelLinear(7, 2, **options),
    )
    same_bits(full_state_dict(parts), whole.state_dict())
    tokens = torch.tensor([[0, 4], [2, 2], [1, 3]])
    expected, y = whole(tokens), parts(tokens)
    close(y.detach(), expected.detach())
    (expected**2).sum().backward()
    (y**2).sum().div(world.size).backward()
    gradients = full_gradients(parts)
    close(gradients["0.weight"], whole[0].weight.grad)
    close(gradients["3.bias"], whole[3].bias.grad)
    close(gradients["1.weight"], whole[1].weight.grad)


def test_uneven_rows_and_half_types(world):
    counts = [5, 0, 2, 1, 0, 3, 1, 2][: world.size]
    torch.manual_seed(0)
    up = nn.ColumnParallelLinear(4, 6, dtype=torch.bfloat16, comm=world)
    down = nn.RowParallelLinear(6, 4, dtype=torch.bfloat16, comm=world)
    y = down(up(torch.ones(counts[world.rank], 2, 4, dtype=torch.bfloat16)), counts=counts)
    assert y.shape == (counts[world.rank], 2, 4) and y.dtype == torch.bfloat16
    y.sum().backward()
    assert up.weight.grad.dtype == torch.bfloat16
    close(down.bias.grad.double(), torch.full((4,), 2.0 * sum(counts)))


def test_what_is_held_by_all_ranks(world):
    _, parts = made(world)
    held = nn.replicated(parts)
    shared = [held.pop(name) for name in [*held] if "k_proj" in name or "v_proj" in name]
    assert {*held} == {"mlp.1.bias", "moe.router.weight", "moe.shared.w1", "moe.shared.w2"}
    assert all(comm is world for comm in held.values())
    has_heads = world.rank < 3  # of three query heads, which read one key/value head
    assert len(shared) == (2 if world.size > 1 and has_heads else 0)
    assert all(torch.equal(counts, torch.full((4, 6), float(min(world.size, 3)))) for counts in shared)


def test_norms(world):
    """Uneven rows, none on some rank: numbers, and gradients that are the same bits on all ranks."""
    torch.manual_seed(0)
    counts = [3, 0, 4, 1, 0, 2, 1, 1][: world.size]
    x = torch.linspace(-1, 2, 2 * 5 * sum(counts)).view(-1, 2, 5).sin()
    mine = torch.arange(len(x)).split(counts)[world.rank]
    pairs = [
        (torch.nn.LayerNorm(5), nn.LayerNorm(5, comm=world)),
        (torch.nn.LayerNorm(5, 1e-3, bias=False), nn.LayerNorm(5, 1e-3, bias=False, comm=world)),
        (torch.nn.RMSNorm(5, 1e-6), nn.RMSNorm(5, comm=world)),
    ]
    for whole, norm in pairs:
        same_bits(full_state_dict(norm), whole.state_dict())
        assert {*nn.replicated(norm)} == {*whole.state_dict()} and "features=5" in str(norm)
        leaf = x[mine].requires_grad_()
        y = norm(leaf)
        close(y.detach(), whole(x)[mine].detach())
        whole(x).square().cumsum(2).sum().backward()
        y.square().cumsum(2).sum().backward()
        for p, q in zip(norm.parameters(), whole.parameters(), strict=True):
            close(p.grad, q.grad)
            every = fompi.all_gather(p.grad[None], comm=world)
            assert all(torch.equal(one, every[0]) for one in every)
    for frozen in norm.parameters():  # nothing is sent for it
        frozen.requires_grad_(False)
    norm(leaf).sum().backward()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_sum_with_a_norm(world, sharded):
    """The block of a decoder whose rows all ranks have: numbers and gradients of one process."""
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(6, 10, bias=False), torch.nn.Linear(10, 6, bias=False))
    scale = torch.nn.RMSNorm(6, 1e-6)
    up = nn.ColumnParallelLinear(6, 10, bias=False, sequence_parallel=False, comm=world)
    down = nn.RowParallelLinear(10, 6, bias=False, reduce=False, comm=world)
    norm = nn.AllReduceRMSNorm(6, sharded=sharded, order="ranks", comm=world)
    parts = torch.nn.Sequential(up, down)
    load_full_state_dict(parts, whole.state_dict())
    x, mine = torch.linspace(-1, 1, 42).view(7, 6).sin(), rows(world) if sharded else slice(7)
    y, r = norm(parts(x), x[mine])
    z = x + whole(x)
    close(r.detach(), z[mine].detach())
    close(y.detach(), scale(z).detach())
    y.square().sum().backward()
    (scale(z).square().sum() * world.size).backward()
    gradients = full_gradients(parts)
    for name, parameter in whole.named_parameters():
        close(gradients[name], parameter.grad)
    close(norm.weight.grad, scale.weight.grad)
    with pytest.raises(fompi.LayoutError, match="a bias would be in it"):
        nn.RowParallelLinear(10, 6, reduce=False, comm=world)
    with pytest.raises(fompi.PlanError, match="is that of torch, without leaves"):
        nn.RowParallelLinear(10, 6, bias=False, reduce=False, order=fompi.Canonical(8), comm=world)


def test_the_counts_of_experts(world):
    torch.manual_seed(0)
    layer = nn.MoE(4, 4, 3, 1, capacity_factor=1.0, comm=world)
    assert layer.tokens_per_expert is None and layer.dropped == 0
    with torch.no_grad():
        layer.router.weight.zero_()  # ties go to expert 0
    layer(torch.ones(6, 4, requires_grad=True)).sum().backward()
    assert layer.tokens_per_expert.tolist() == [2 * world.size, 0, 0] and layer.dropped == 4 * world.size


def test_the_text_of_a_module_has_both_sizes(world):
    _, parts = made(world)
    text, weight = str(parts), parts.mlp[0].weight
    assert f"weight: {tuple(weight.shape)} of (10, {weight.shape[1]})" in text
    assert f"rank {world.rank} of {world.size}" in text and "out_features=10" in text
    assert "heads=3, kv_heads=1" in text and "num_embeddings=11" in text and "experts=5" in text


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda comm: nn.ColumnParallelLinear(4, 0, comm=comm), fompi.LayoutError),
        (lambda comm: nn.ColumnParallelLinear(4, 6, activation="tanh", comm=comm), fompi.PlanError),
        (lambda comm: nn.ColumnParallelLinear(4, 7, activation="swiglu", comm=comm), fompi.ShapeError),
        (lambda comm: nn.RowParallelLinear(4, 6, dtype=torch.int64, comm=comm), fompi.DtypeError),
        (lambda comm: nn.ParallelAttention(6, 4, 3, head_dim=2, comm=comm), fompi.LayoutError),
        (lambda comm: nn.ParallelAttention(7, 2, comm=comm), fompi.LayoutError),
        (lambda comm: nn.VocabParallelEmbedding(4, 2.5, comm=comm), fompi.LayoutError),
        (lambda comm: nn.MoE(4, 4, 2, 3, comm=comm), fompi.LayoutError),
        (lambda comm: nn.MoE(4, 4, 2, 1, capacity_factor=-1.0, comm=comm), fompi.LayoutError),
        (lambda comm: nn.MoE(4, 4, 2, 1, policy="best", comm=comm), fompi.PlanError),
        (lambda comm: nn.LayerNorm(0, comm=comm), fompi.LayoutError),
    ],
)
def test_wrong_arguments(world, make, error):
    """On all ranks, or only on the last one."""
    with pytest.raises(error):
        make(world)
    wrong = world.rank == world.size - 1
    with pytest.raises(error if wrong else fompi.MismatchError):
        make(world) if wrong else nn.RowParallelLinear(4, 4, comm=world)
    nn.RowParallelLinear(4, 4, comm=world)


def test_norms_that_cannot_be_clipped(world):
    layer = nn.RowParallelLinear(4, 4, comm=world)
    wrong = world.rank == 0
    for most in (-1.0, None, float("nan")):
        with pytest.raises(fompi.LayoutError if wrong else fompi.MismatchError):
            nn.clip_grad_norm_(layer, most if wrong else 1.0)
    if world.size > 1:
        with pytest.raises(fompi.MismatchError, match="max_norm=2"):
            nn.clip_grad_norm_(layer, 2.0 if wrong else 1.0)
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, float("nan") if wrong and parameter.dim() > 1 else 1.0)
    assert nn.clip_grad_norm_(layer, 1.0).isnan()
    assert all(parameter.grad.isnan().all() for parameter in layer.parameters())


def test_other_seeds_and_other_checkpoints(world):
    whole, parts = made(world)
    if world.size > 1:
        torch.manual_seed(world.rank)
        with pytest.raises(fompi.MismatchError, match=r"torch\.manual_seed"):
            nn.RowParallelLinear(4, 4, comm=world)
    state, before = whole.state_dict(), full_state_dict(parts)
    wrong = world.rank == 0
    for change, error in (
        ({"other": torch.ones(1)}, fompi.LayoutError),
        ({"mlp.0.weight": torch.ones(10, 7)}, fompi.ShapeError),
        ({"mlp.0.weight": [1.0]}, fompi.TensorError),
    ):
        with pytest.raises(error if wrong else fompi.MismatchError):
            load_full_state_dict(parts, {**state, **change} if wrong else state)
    with pytest.raises(fompi.LayoutError, match=r"missing names: mlp\.0\.weight"):
        load_full_state_dict(parts, {name: value for name, value in state.items() if name != "mlp.0.weight"})
    loaded = load_full_state_dict(parts, {"mlp.0.weight": state["mlp.0.weight"], "other": 0}, strict=False)
    assert loaded.unexpected_keys == ["other"] and "scale" in loaded.missing_keys
    same_bits(full_state_dict(parts), before)
    if wrong:
        parts.mlp[0].weight = torch.nn.Parameter(torch.ones(3, 3))
    with pytest.raises(fompi.ShapeError if wrong else fompi.MismatchError):
        full_state_dict(parts)
    with pytest.raises(fompi.ShapeError if wrong else fompi.MismatchError):
        parts.mlp[1](torch.ones(3, 99 if wrong else parts.mlp[1].weight.shape[1]))
