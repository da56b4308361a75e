"""A decoder on dp x pp x tp ranks takes the steps that one process takes: losses, norms, parameters, in float64."""

from collections import OrderedDict
from time import perf_counter

import numpy as np
import pytest
import torch
from boxes import PADDING, held

import fompi
from fompi import Boxes, Shard
from fompi.base.layout import split
from fompi.parallel.data import AdamW
from fompi.torch import nn

LENGTH, VOCABULARY, WIDTH, LAYERS = 7, 11, 8, 1  # odd lengths: tensor parallelism has uneven rows and words
HEADS, KV_HEADS, HIDDEN = 4, 1, 12  # the key head is shared by all ranks
MICROBATCHES, ROWS, RATE, CLIP = 2, 2, 0.01, 0.5
MESHES = {
    2: [(3, 2, 1, 1), (3, 1, 2, 1), (3, 1, 1, 2)],
    3: [(2, 1, 1, 3), (2, 1, 3, 1)],
    4: [(4, 2, 1, 2), (4, 1, 2, 2)],
    6: [(2, 1, 2, 3), (2, 3, 1, 2)],
    8: [(20, 2, 2, 2)],
}
"""Steps, and dp, pp, tp, for each number of ranks. Steps are slow where many ranks share a core."""

pytestmark = [pytest.mark.ranks(mpich=[4], openmpi=[]), pytest.mark.usefixtures("float64")]


class Attention(torch.nn.Module):
    """Causal attention, by its definition. x: (tokens, batch, width)."""

    def __init__(self):
        super().__init__()
        d = WIDTH // HEADS
        self.q_proj, self.k_proj = (torch.nn.Linear(WIDTH, n * d, bias=False) for n in (HEADS, KV_HEADS))
        self.v_proj, self.o_proj = (torch.nn.Linear(WIDTH, n, bias=False) for n in (KV_HEADS * d, WIDTH))

    def forward(self, x):
        q, k, v = (p(x).unflatten(2, (-1, WIDTH // HEADS)) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = torch.einsum("ibhd,jbd->bhij", q, k[:, :, 0]) / (WIDTH // HEADS) ** 0.5
        scores.masked_fill_(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), -torch.inf)
        return self.o_proj(torch.einsum("bhij,jbd->ibhd", scores.softmax(3), v[:, :, 0]).flatten(2))


class Embed(torch.nn.Module):
    def __init__(self, tp):
        super().__init__()
        made = torch.nn.Embedding if tp is None else lambda n, d: nn.VocabParallelEmbedding(n, d, comm=tp)
        self.words, self.places = made(VOCABULARY, WIDTH), made(LENGTH, WIDTH)

    def forward(self, tokens):
        return self.words(tokens) + self.places(torch.arange(LENGTH))[:, None]


class Block(torch.nn.Module):
    def __init__(self, tp):
        super().__init__()
        if tp is None:
            self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.RMSNorm(WIDTH, 1e-6)
            self.attention = Attention()
            self.up, self.down = torch.nn.Linear(WIDTH, HIDDEN), torch.nn.Linear(HIDDEN, WIDTH)
        else:
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH, comm=tp), nn.RMSNorm(WIDTH, comm=tp)
            self.attention = nn.ParallelAttention(WIDTH, HEADS, KV_HEADS, causal=True, comm=tp)
            self.up = nn.ColumnParallelLinear(WIDTH, HIDDEN, comm=tp)
            self.down = nn.RowParallelLinear(HIDDEN, WIDTH, comm=tp)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


class Head(torch.nn.Module):
    def __init__(self, tp):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH) if tp is None else nn.LayerNorm(WIDTH, comm=tp)
        linear = torch.nn.Linear if tp is None else nn.ColumnParallelLinear
        self.out = linear(WIDTH, VOCABULARY, bias=False, **({} if tp is None else {"comm": tp}))

    def forward(self, x):
        return self.out(self.norm(x))


def model(tp=None, first=0, last=LAYERS + 2):
    """Parts `first` to `last` of the decoder: the embedding, the blocks, the head. Each has a seed of its own."""
    kinds, parts = [Embed, *[Block] * LAYERS, Head], OrderedDict()
    for i in range(first, last):
        torch.manual_seed(i)
        parts[str(i)] = kinds[i](tp)
    return torch.nn.Sequential(parts)


def batch(step, dp=2):
    """(tokens, targets): (dp, micro-batches, tokens, rows), the same on all ranks."""
    torch.manual_seed(100 + step)
    text = torch.randint(0, VOCABULARY, (dp, MICROBATCHES, LENGTH + 1, ROWS)).sort(2).values
    return text[:, :, :-1], text[:, :, 1:]


def single(steps, dp):
    """The losses and norms of all steps, and the parameters at the end. AdamW is written out: torch's loads slowly."""
    whole, losses, norms = model(), [], []
    means = [(torch.zeros_like(p), torch.zeros_like(p)) for p in whole.parameters()]
    for step in range(steps):
        tokens, targets = (a.flatten(0, 1).movedim(0, 1).flatten(1) for a in batch(step, dp))
        loss = torch.nn.functional.cross_entropy(whole(tokens).flatten(0, 1), targets.flatten())
        gradients = torch.autograd.grad(loss, [*whole.parameters()])
        norm = sum(float(g.square().sum()) for g in gradients) ** 0.5
        with torch.no_grad():
            for p, g, (m, v) in zip(whole.parameters(), gradients, means, strict=True):
                g = g * min(1, CLIP / (norm + 1e-6))
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g * g)
                m_hat, v_hat = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
                p.sub_(RATE * (m_hat / (v_hat.sqrt() + 1e-8) + 0.01 * p))
        losses.append(loss.item())
        norms.append(norm)
    return torch.tensor(losses), torch.tensor(norms), whole.state_dict()


def in_parallel(world, steps, shape, zero, first=0, folder=None):
    """The same on a mesh: the parameters are those of this stage.

    With a folder, a state of before step `first` is loaded from it, and that of the end is saved there if `first` is 0.
    """
    with fompi.Mesh(world, **dict(zip(("dp", "pp", "tp"), shape, strict=True))) as mesh:
        dp, pp, tp = mesh.values()
        ends = [round((LAYERS + 2) * i / pp.size) for i in range(pp.size + 1)]
        stage = model(tp, ends[pp.rank], ends[pp.rank + 1])

        def loss(logits, targets):
            every = fompi.parallel.tensor.vocab_parallel_cross_entropy(logits, targets, comm=tp)
            return every.mean() / count / tp.size  # all ranks of tp compute it alike

        rows, count = split(LENGTH, tp.size)[tp.rank], MICROBATCHES if folder is None else 2 * MICROBATCHES // dp.size
        how = {"activations": (rows, ROWS, WIDTH), "dtype": "float64", "microbatches": count}
        pipe = fompi.torch.Pipeline([stage], comm=pp, loss=loss, **how)
        options = {"optimizer": AdamW(RATE), "zero": zero, "microbatches": count, "bucket_nbytes": 1024}
        trained = fompi.torch.ZeroDataParallel(stage, dp, **options)
        if first:
            fompi.load(folder, {"model": trained}, comm=world)
        losses, norms = [], []
        for step in range(first, steps):
            total = 2 if folder else dp.size
            tokens, targets = (
                a.flatten(0, 1).unflatten(0, (dp.size, -1))[dp.rank].unbind() for a in batch(step, total)
            )
            found = pipe.step(tokens, targets)
            assert pp.rank < pp.size - 1 or len(found) == count
            losses.append(torch.stack(found).sum() * tp.size if found else torch.zeros(()))
            norms.append(trained.step(clip=CLIP, over=mesh["pp", "tp"]))
        every = fompi.all_reduce(torch.stack(losses) / dp.size / tp.size, comm=world)
        if folder and not first:
            fompi.save(folder, {"model": trained}, step=steps, comm=world)
        state = nn.full_state_dict(stage)
        trained.close()
        pipe.close()
    return every, torch.tensor(norms), state


def close(actual, expected, within=1e-9):
    assert actual.shape == expected.shape
    assert torch.allclose(actual, expected, rtol=within, atol=within), (actual - expected).abs().max()


def test_a_training_on_three_axes(world):
    """Steps of AdamW with clipping: uneven rows, a shared key head, norms, accumulation over micro-batches."""
    for number, (steps, *shape) in enumerate(MESHES.get(world.size, ())):
        expected = single(steps, shape[0])
        losses, norms, state = in_parallel(world, steps, shape, zero=(1, 2, 0)[number])
        close(losses, expected[0])
        close(norms, expected[1])
        assert norms.max() > CLIP  # it was clipped
        for name, value in state.items():
            close(value, expected[2][name])


@pytest.mark.timeout(180)
def test_a_training_is_resumed_on_other_meshes(world, folder):
    """Trained on (dp, pp, tp) = (2, 1, 2), it goes on elsewhere as if nothing had been."""
    if world.size != 4:
        pytest.skip("a mesh of 4 ranks")
    expected = single(2, 2)
    in_parallel(world, 1, (2, 1, 2), zero=2, folder=folder)
    alone = world.split(world.rank)
    for comm, shape, zero in ((world, (1, 2, 2), 1), (world, (4, 1, 1), 0), (alone, (1, 1, 1), 2)):
        losses, norms, state = in_parallel(comm, 2, shape, zero, 1, folder)
        close(losses, expected[0][1:])
        close(norms, expected[1][1:])
        for name, value in state.items():
            close(value, expected[2][name])
    alone.close()


def test_a_pipeline_refuses_what_is_no_module_from_tensor_to_tensor(world):
    """Zero bubble needs two parts of a backward. A wrong result is an error on its rank, and on the others too."""
    how = {"comm": world, "microbatches": 1, "activations": (2,), "dtype": "float64"}
    with pytest.raises(fompi.PlanError, match="backward_input"):
        fompi.torch.Pipeline([torch.nn.Identity()], loss=lambda y, t: y.sum(), schedule="zb-h1", **how)
    with pytest.raises(fompi.PlanError, match="must be a function"):
        fompi.torch.Pipeline([torch.nn.Identity()], loss=None, **how)
    last = world.rank == world.size - 1
    pipe = fompi.torch.Pipeline([torch.nn.Identity()], loss=lambda y, t: 0.0, **how)
    with pytest.raises(fompi.TensorError if last else fompi.PeerError, match="loss" if last else "rank"):
        pipe.step([torch.ones(2)], [None])
    pipe.close()


def test_a_stage_fails_on_one_rank_of_tensor_parallelism(world):
    """Its partner waits for it in an operation, inside a kernel of the pipeline. All ranks get the error at once."""
    if world.size != 4:
        pytest.skip("a mesh of 4 ranks")
    pp, tp = fompi.Mesh(world, pp=2, tp=2).values()
    fails = pp.rank == 1 and tp.rank == 0

    class Part(torch.nn.Module):
        def forward(self, x):
            if fails:
                raise ArithmeticError("of the user, {not a field}")
            return fompi.all_reduce(x, comm=tp)

    how = {"comm": pp, "microbatches": 2, "activations": (3,), "dtype": "float64"}
    pipe = fompi.torch.Pipeline([Part()], loss=lambda y, t: y.sum(), **how)
    begun = perf_counter()
    with pytest.raises(ArithmeticError if fails else fompi.PeerError, match="of the user"):
        pipe.step([torch.ones(3)] * 2, [None] * 2)
    assert perf_counter() - begun < 10 < world.engine.timeout
    world.barrier()


def test_four_ranks_to_three_and_two_to_four(world, folder):
    """Checkpoints of plain arrays: rows, columns and padded runs, written and read by other numbers of ranks."""
    x = np.arange(7 * 12.0).reshape(7, 12)
    three, two = (world.split(int(world.rank >= count)) for count in (3, 2))
    for number, (writers, readers) in enumerate([(world, three), (two, world)]):
        for comm, call in ((writers, fompi.save), (readers, fompi.load)):
            if world.rank < comm.size:  # one of these ranks, and not of the others that were split off
                tens = [10] * (comm.size - 1)
                sharded = {"cut": Boxes.over(x.shape, Shard(number), comm.size)}
                sharded["runs"] = Boxes.flat(x.shape, [84 - sum(tens), *tens], 80)
                expected = {name: held(x, boxes)[comm.rank] for name, boxes in sharded.items()}
                arrays = {name: np.full(boxes.arrays[comm.rank], PADDING + 0.0) for name, boxes in sharded.items()}
                if call is fompi.save:
                    arrays = {name: expected[name].reshape(array.shape) for name, array in arrays.items()}
                call(folder / str(number), {name: (arrays[name], sharded[name]) for name in arrays}, comm=comm)
                for name, array in arrays.items():
                    assert np.array_equal(array.reshape(-1), expected[name])
            world.barrier()
    for comm in (three, two):
        comm.close()
