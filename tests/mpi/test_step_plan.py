"""A whole training step as one plan: parameters, losses and gradients are those of one process, step after step."""

import numpy as np
import pytest

import fompi
from fompi.base.layout import offsets, split
from fompi.parallel.data import SGD, AdamW
from fompi.parallel.orders import order
from fompi.parallel.step import TrainingStep

pytestmark = pytest.mark.ranks(mpich=[2, 4], openmpi=[3])

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
    listed = order("eager-1f1b", pp, 4, overlap_f_b=True) if schedule == "pairs" else schedule
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
    x = [np.ones((ROWS, FEATURES))] * 2
    with made({"dp": world.size}) as step, pytest.raises(fompi.FompiError):
        step(x[: 2 - (world.rank == 0)], x)
