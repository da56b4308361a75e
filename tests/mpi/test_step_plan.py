"""A whole training step as one plan: parameters, losses and gradients are those of one process, step after step."""

from copy import deepcopy
from itertools import chain, product

import numpy as np
import pytest
import torch

import fompi
from fompi.base.layout import offsets, split
from fompi.parallel.actions import actions
from fompi.parallel.data import SGD, AdamW
from fompi.parallel.step import TrainingStep

pytestmark = pytest.mark.ranks(mpich=[3, 4], openmpi=[])

FEATURES, HIDDEN, ROWS = 3, 4, 5
MESHES = {
    1: [{"dp": 1}],
    2: [{"dp": 2}, {"tp": 2}, {"pp": 2}],
    3: [{"dp": 3}, {"tp": 3}, {"pp": 3}],
    4: [{"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}, {"tp": 2, "pp": 2}],
    8: [{"dp": 2, "tp": 2, "pp": 2}],
}


class Mlp:
    """tanh(x @ w1) @ w2, with some columns of w1 and rows of w2; with a residual in every second layer."""

    def __init__(self, number, w1, w2):
        self.parameters, self.residual = [w1, w2], number % 2 == 0

    def forward(self, weights, x):
        h = np.tanh(x @ weights[0])
        return h @ weights[1], (x, h)

    def backward(self, weights, saved, dy):
        x, h = saved
        dh = (dy @ weights[1].T) * (1 - h * h)
        return dh @ weights[0].T, [x.T @ dh, h.T @ dy]


def loss(y, target):
    return 0.5 * ((y - target) ** 2).sum(), y - target


class OneProcess:
    """All layers and all rows in one process."""

    def __init__(self, layers, optimizer):
        self.layers, self.optimizer = layers, optimizer  # layers[l][t]
        flat = [[np.concatenate([w.reshape(-1) for w in part.parameters]) for part in of] for of in layers]
        self.flat, self.states = flat, [[optimizer.state(w) for w in of] for of in flat]

    def weights(self, layer, t):
        w = self.flat[layer][t]
        return w[: FEATURES * HIDDEN].reshape(FEATURES, HIDDEN), w[FEATURES * HIDDEN :].reshape(HIDDEN, FEATURES)

    def __call__(self, inputs, targets):
        """Losses and gradients of the inputs, by their keys."""
        sums, losses, dxs = [np.zeros_like(of) for of in self.flat], {}, {}
        for at, x in inputs.items():
            kept = []
            for number, of in enumerate(self.layers):
                done = [part.forward(self.weights(number, t), x) for t, part in enumerate(of)]
                kept.append([saved for _, saved in done])
                x = of[0].residual * x + sum(z for z, _ in done)
            losses[at], dx = loss(x, targets[at])
            for number in reversed(range(len(self.layers))):
                of, terms = self.layers[number], []
                for t, part in enumerate(of):
                    term, dw = part.backward(self.weights(number, t), kept[number][t], dx)
                    terms.append(term)
                    sums[number][t] += np.concatenate([g.reshape(-1) for g in dw])
                dx = of[0].residual * dx + sum(terms)
            dxs[at] = dx
        for number, of in enumerate(self.flat):
            for t, w in enumerate(of):
                self.optimizer.update(w, sums[number][t], self.states[number][t])
        return losses, dxs


def steps(world, mesh, schedule, optimizer, count=3):
    """Steps of a mesh beside those of one process."""
    dp, tp, pp = axes = [mesh.get(name, 1) for name in ("dp", "tp", "pp")]
    chunks, layers = 2 if schedule == "interleaved" else 1, 2 * pp + 1
    listed = actions("eager-1f1b", pp, 4, overlap_f_b=True) if schedule == "pairs" else schedule
    random = np.random.default_rng([*axes, 1])
    model = [
        [
            Mlp(n, random.standard_normal((FEATURES, HIDDEN)), random.standard_normal((HIDDEN, FEATURES)))
            for _ in range(tp)
        ]
        for n in range(layers)
    ]
    single = OneProcess(model, optimizer)
    t, d = world.rank % tp, world.rank // tp % dp
    how = {"microbatches": 4, "shape": (ROWS, FEATURES), "chunks": chunks, "dtype": "float64", "schedule": listed}
    with TrainingStep(
        lambda n: model[n][t], layers=layers, mesh=mesh, optimizer=optimizer, loss=loss, comm=world, **how
    ) as step:
        for _ in range(count):
            every = [(b, place) for b in range(4 * dp) for place in range(tp)]
            inputs, targets = ({at: random.standard_normal((ROWS, FEATURES)) for at in every} for _ in range(2))
            mine = [(b, t) for b in range(4 * d, 4 * d + 4)]
            losses = step([inputs[at] for at in mine], [targets[at] for at in mine])
            expected, dxs = single(inputs, targets)
            if losses is not None:
                np.testing.assert_allclose(losses, [expected[at] for at in mine], rtol=1e-10)
            for got, at in zip(step.input_gradients or [], mine, strict=False):
                np.testing.assert_allclose(got, dxs[at], rtol=1e-9, atol=1e-11)
            for number, shard in step.shards.items():
                ends = offsets(split(2 * FEATURES * HIDDEN, dp))
                np.testing.assert_allclose(shard, single.flat[number][t][ends[d] : ends[d + 1]], rtol=1e-9, atol=1e-11)
        assert (losses is None) != (layers - 1 in step.layers)
        names = {event.name.partition("<")[0] for event in step.trace.events if event.is_compute}
        assert {"forward", "backward", "update"} <= names


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "pairs", "interleaved"])
def test_steps_equal_those_of_one_process(world, schedule):
    for mesh in MESHES.get(world.size, []):
        steps(world, mesh, schedule, SGD(1e-3, momentum=0.9))


def test_adamw(world):
    for mesh in MESHES.get(world.size, []):
        steps(world, mesh, "1f1b", AdamW(1e-3))


class Attn:
    """Causal attention over all tokens of a micro-batch, with one head for each rank of tp."""

    kind, residual = "attention", True

    def __init__(self, wqkv, wo, stay):
        self.parameters, self.stay = [wqkv, wo], stay

    def qkv(self, weights, x):
        return x @ weights[0], x

    def attention(self, qkv):
        q, k, v = np.split(np.concatenate(qkv), 3, axis=1)
        s = np.where(np.tri(len(q), dtype=bool), q @ k.T, -np.inf)
        p = np.exp(s - s.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        self.cuts = np.cumsum([len(each) for each in qkv])[:-1]
        return np.split(p @ v, self.cuts), (q, k, v, p)

    def output(self, weights, o):
        return o @ weights[1], o

    def output_backward(self, weights, o, dy):
        return dy @ weights[1].T, [None, o.T @ dy]

    def attention_backward(self, saved, do):
        (q, k, v, p), do = saved, np.concatenate(do)
        dp = do @ v.T
        ds = p * (dp - (dp * p).sum(1, keepdims=True))
        return np.split(np.concatenate([ds @ k, ds.T @ q, p.T @ do], axis=1), self.cuts)

    def qkv_backward(self, weights, x, dqkv):
        return dqkv @ weights[0].T, [x.T @ dqkv, None]


class Embedding:
    kind, stay = "embedding", True

    def __init__(self, table):
        self.parameters = [table]

    def forward(self, weights, ids):
        return weights[0][ids], ids

    def backward(self, weights, ids, dx):
        gradient = np.zeros_like(weights[0])
        np.add.at(gradient, ids, dx)
        return [gradient]


class Head:
    """Cross-entropy of y @ w."""

    kind = "head"

    def __init__(self, w):
        self.parameters = [w]

    def loss(self, weights, y, targets):
        z = y @ weights[0]
        z -= z.max(1, keepdims=True)
        logs, rows = z - np.log(np.exp(z).sum(1, keepdims=True)), np.arange(len(y))
        dz = np.exp(logs)
        dz[rows, targets] -= 1
        return -logs[rows, targets].sum(), dz @ weights[0].T, (y, dz)

    def backward(self, weights, saved):
        y, dz = saved
        return [y.T @ dz]


def loss_of_torch(weights, tp, ids, targets):
    """The loss of a micro-batch, by autograd: weights[l][t]."""
    x = weights[0][0][0][ids]
    for of in weights[1:-1]:
        terms = []
        for first, second in of:
            if first.shape[1] == HIDDEN:
                terms.append(torch.tanh(x @ first) @ second)
            else:
                q, k, v = (x @ first).chunk(3, 1)
                scores = (q @ k.T).masked_fill(~torch.ones(len(x), len(x)).tril().bool(), -torch.inf)
                terms.append(scores.softmax(1) @ v @ second)
        x = x + sum(terms)
    return torch.nn.functional.cross_entropy(x @ weights[-1][0][0], targets, reduction="sum")


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "gpipe"])
def test_a_language_model_in_one_plan(world, schedule):
    """Embedding, attention, MLP, head; some parameters stay. Gradients by autograd in one process."""
    for mesh in MESHES.get(world.size, []):
        dp, tp, pp = axes = [mesh.get(name, 1) for name in ("dp", "tp", "pp")]
        random, vocabulary = np.random.default_rng(axes), 7
        shapes = [(FEATURES, 3 * 2), (2, FEATURES)], [(FEATURES, HIDDEN), (HIDDEN, FEATURES)]
        middle = [[[random.standard_normal(s) / 2 for s in shapes[n % 2]] for _ in range(tp)] for n in range(2 * pp)]
        ends = [[[random.standard_normal(s)]] * tp for s in ((vocabulary, FEATURES), (FEATURES, vocabulary))]
        whole = [ends[0], *middle, ends[1]]
        t, d = world.rank % tp, world.rank // tp % dp

        def make(number, whole=whole, t=t):
            if number in (0, len(whole) - 1):
                return (Embedding if number == 0 else Head)(whole[number][t][0].copy())
            given = [w.copy() for w in whole[number][t]]
            return Attn(*given, stay=number == 1) if number % 2 else Mlp(0, *given)

        how = {"microbatches": 4, "shape": (ROWS, FEATURES), "dtype": "float64", "schedule": schedule}
        how |= {"chunks": 2} if schedule == "interleaved" else {}
        optimizer = SGD(1e-2, momentum=0.9)
        weights = [[[torch.tensor(w, requires_grad=True) for w in part] for part in of] for of in whole]
        momenta = [[[optimizer.state(w.detach().numpy()) for w in part] for part in of] for of in weights]
        with TrainingStep(make, layers=len(whole), mesh=mesh, optimizer=optimizer, comm=world, **how) as step:
            for _ in range(3):
                ids, targets = random.integers(0, vocabulary, (2, 4 * dp, tp, ROWS))
                own = slice(4 * d, 4 * d + 4)
                losses = step(ids[own, t], targets[own, t])
                expected = [
                    loss_of_torch(weights, tp, *(torch.tensor(a[b].reshape(-1)) for a in (ids, targets)))
                    for b in range(4 * dp)
                ]
                sum(expected).backward()
                mine = [0.0] * 4 if losses is None else losses
                every = np.asarray(fompi.all_gather(np.array([mine]), comm=world))
                assert every.sum() == pytest.approx(sum(each.item() for each in expected), rel=1e-10)
                for of, states in zip(weights, momenta, strict=True):
                    for w, state in zip(chain(*of), chain(*states), strict=True):
                        if w.grad is not None:
                            optimizer.update(w.detach().numpy(), w.grad.numpy(), state)
                            w.grad = None
                for number, shard in step.shards.items():
                    place = 0 if number in (0, len(whole) - 1) else t
                    flat = np.concatenate([w.detach().numpy().reshape(-1) for w in weights[number][place]])
                    cuts, part = offsets(step.problem.shares(number)), step.problem.part(number, world.rank)
                    np.testing.assert_allclose(shard, flat[cuts[part] : cuts[part + 1]], rtol=1e-8, atol=1e-11)


FUNCTIONS = (
    "forward", "backward", "loss", "qkv", "attention", "output", "output_backward", "attention_backward",
    "qkv_backward", "update",
)  # fmt: skip


class Broken:
    """A layer or an optimizer, whose function `fails` raises an error after its work."""

    def __init__(self, of):
        self.of, self.fails = of, None

    def __getattr__(self, name):
        found = getattr(self.of, name)

        def called(*args):
            result = found(*args)
            if self.fails == name:
                raise (SystemExit if name.startswith("o") else OSError)("no space left")
            return result

        return called if name in FUNCTIONS else found


def language_model(pp):
    """The kind of each layer, and make(l): embedding, attention, MLP ..., head; some parameters stay."""
    random, kinds = np.random.default_rng(3), [Embedding, *[Attn, Mlp] * pp, Head]
    shapes = {Embedding: [(7, 3)], Attn: [(3, 6), (2, 3)], Mlp: [(3, 4), (4, 3)], Head: [(3, 7)]}
    drawn = [[random.standard_normal(shape) / 2 for shape in shapes[kind]] for kind in kinds]

    def make(number):
        w, kind = [w.copy() for w in drawn[number]], kinds[number]
        return Mlp(0, *w) if kind is Mlp else Attn(*w, stay=number == 1) if kind is Attn else kind(*w)

    return kinds, make


def test_a_step_that_fails_anywhere_leaves_everything_as_it_was(world):
    """On one rank, in any function of a layer or the optimizer. The next step is as if there had been none."""
    for mesh in MESHES.get(world.size, []):
        kinds, make = language_model(mesh.get("pp", 1))
        how = {"microbatches": 2, "shape": (ROWS, FEATURES), "dtype": "float64", "mesh": mesh, "layers": len(kinds)}
        ids = np.random.default_rng(world.rank).integers(0, 7, (2, 2, ROWS))
        broken = {len(kinds): Broken(AdamW(0.1))}

        def made(number, make=make, broken=broken):
            broken[number] = Broken(make(number))
            return broken[number]

        with (
            TrainingStep(made, optimizer=broken[len(kinds)], comm=world, **how) as step,
            TrainingStep(make, optimizer=AdamW(0.1), comm=world, **how) as other,
        ):
            places = [(n, name) for n, kind in enumerate([*kinds, AdamW]) for name in FUNCTIONS if hasattr(kind, name)]
            held = [(*step.problem.held(rank), len(kinds)) for rank in range(world.size)]
            every = [(rank, *place) for rank, place in product(range(world.size), places) if place[0] in held[rank]]
            for rank, number, name in every[:: world.size - 2]:  # four ranks have three meshes, and take half for each
                before, words = deepcopy((step.shards, step.states)), f"rank {rank} failed in step"
                if rank == world.rank:
                    broken[number].fails = name
                errors = (OSError, SystemExit) if rank == world.rank else fompi.PeerError
                with pytest.raises(errors, match=f"no space|{words}"):
                    step(*ids)
                if rank == world.rank:
                    broken[number].fails = None
                np.testing.assert_equal((step.shards, step.states), before)
            for _ in range(2):
                assert step(*ids) == other(*ids)
                np.testing.assert_equal((step.shards, step.states), (other.shards, other.states))


class Unused(Mlp):
    """It reads its third parameter in the micro-batches for which `reads` is True, and returns None elsewhere."""

    def __init__(self, reads, *parameters):
        super().__init__(0, *parameters[:2])
        self.parameters, self.reads = [*parameters], reads

    def backward(self, weights, saved, dy):
        dx, gradients = super().backward(weights, saved, dy)
        return dx, [*gradients, np.ones_like(weights[2]) if self.reads() else None]


@pytest.mark.parametrize("optimizer", [SGD(0.1, momentum=0.9, weight_decay=0.5), AdamW(0.1, weight_decay=0.5)])
def test_a_parameter_without_a_gradient_is_left_alone(world, optimizer):
    """As in torch, with its moments and its count of steps. A gradient of one rank is one."""
    random, axes, reads = np.random.default_rng(0), {"dp": world.size}, [False]
    drawn = [random.standard_normal(s) for s in ((FEATURES, HIDDEN), (HIDDEN, FEATURES), (5,))]
    how = {"microbatches": 2, "shape": (ROWS, FEATURES), "dtype": "float64", "loss": loss, "mesh": axes, "comm": world}
    x, third = random.standard_normal((2, ROWS, FEATURES)), torch.tensor(drawn[2], requires_grad=True)
    kind = torch.optim.SGD if isinstance(optimizer, SGD) else torch.optim.AdamW
    single = kind([third], **vars(optimizer))
    with TrainingStep(lambda _: Unused(lambda: reads[0], *drawn), layers=1, optimizer=optimizer, **how) as step:
        for is_read in (False, True, False, True):
            reads[0] = is_read and world.rank == world.size - 1
            step(x, x)
            third.grad = torch.full((5,), 2.0, dtype=torch.float64) if is_read else None
            single.step()
            first, _, last = step.gathered()[0]
            np.testing.assert_allclose(last, third.detach(), rtol=1e-12)
            assert not np.array_equal(first, drawn[0])


class Constant:
    """Its parameter has the same gradient in each micro-batch, whatever its input."""

    residual = True

    def __init__(self, p, gradient):
        self.parameters, self.gradient = [p], gradient

    def forward(self, weights, x):
        return np.zeros_like(x), None

    def backward(self, weights, saved, dy):
        return np.zeros_like(dy), [np.full_like(weights[0], self.gradient)]


@pytest.mark.ranks(mpich=[3])
@pytest.mark.parametrize(
    ("optimizer", "gradient"),
    [
        (AdamW(1e-3), 0.0),
        (AdamW(1e-3), 1e-4),
        (AdamW(1e-4, weight_decay=0.5), 6e-8),
        (SGD(1e-5), 1.0),
        (SGD(1e-5), 3e4),
    ],
)
def test_half_types_are_updated_as_float32(world, optimizer, gradient):
    """Also what is saved in the middle, and what the program has written. Sums are in float32, too."""
    p, count = np.linspace(-2, 2, 7).astype(np.float16), 2 * world.size
    how = {"microbatches": 2, "shape": (ROWS, FEATURES), "dtype": "float16", "mesh": {"dp": world.size}, "comm": world}
    how |= {"loss": lambda y, t: (0.0, y - t), "optimizer": optimizer}
    x, single = np.zeros((2, ROWS, FEATURES), np.float16), p.astype(np.float32)
    state, g = optimizer.state(single), np.full(7, count * np.float32(np.float16(gradient)))
    saved = None
    for part in range(3):
        with TrainingStep(lambda _: Constant(p, gradient), layers=1, **how) as step:
            if saved is not None:
                step.shards[0][...], step.states = saved
            if part == 2:  # the program writes
                step.shards[0][...] = 3
                single[...] = 3
            for _ in range(10):
                step(x, x)
                optimizer.update(single, g, state)
                np.testing.assert_array_equal(step.gathered()[0][0], single.astype(np.float16))
            saved = deepcopy((step.shards[0], step.states))


def test_all_ranks_refuse(world):
    def made(mesh, make=lambda n: Mlp(n, np.ones((FEATURES, HIDDEN)), np.ones((HIDDEN, FEATURES))), **more):
        how = {"optimizer": SGD(0.1), "loss": loss, "microbatches": 2, "shape": (ROWS, FEATURES), "dtype": "float64"}
        return TrainingStep(make, layers=world.size, mesh=mesh, comm=world, **{**how, **more})

    with pytest.raises(fompi.ShapeError, match="ranks, but the communicator"):
        made({"dp": world.size + 1})
    with pytest.raises(fompi.LayoutError, match="a step has dp, tp and pp"):
        made({"cp": world.size})

    def broken(number):
        if world.rank == 0:
            raise OSError("no such file")
        return Mlp(number, np.ones((FEATURES, HIDDEN)), np.ones((HIDDEN, FEATURES)))

    with pytest.raises((OSError, fompi.MismatchError), match="no such file"):
        made({"dp": world.size}, broken)
    with pytest.raises(fompi.FompiError, match=r"make\(\d\) has returned None, which is no layer"):
        made({"dp": world.size}, lambda number: None)
    x = [np.ones((ROWS, FEATURES))] * 2
    with made({"dp": world.size}) as step, pytest.raises(fompi.FompiError):
        step(x[: 2 - (world.rank == 0)], x)

    class Narrow(Mlp):
        def forward(self, weights, x):
            y, saved = super().forward(weights, x)
            return y[:, : 1 if self.number == world.size - 1 else None], saved

    def narrow(number):
        layer = Narrow(number, np.ones((FEATURES, HIDDEN)), np.ones((HIDDEN, FEATURES)))
        layer.number = number
        return layer

    words = rf"layer {world.size - 1}.forward must have the shape \(\d, {FEATURES}\), but has \(\d, 1\)"
    with made({"dp": world.size}, narrow) as step, pytest.raises(fompi.FompiError, match=words):
        step(x, x)
