"""A whole training step as one bound plan: parameters and gradients are those of one process, step after step."""

import numpy as np
import pytest

import fompi
from fompi.base.layout import offsets, split
from fompi.parallel.orders import order
from fompi.parallel.step_plan import plan

pytestmark = pytest.mark.ranks(mpich=[2, 4], openmpi=[3])

FEATURES, HIDDEN, ROWS, RATE = 3, 4, 5, 0.001
MESHES = {
    1: [{"dp": 1}],
    2: [{"dp": 2}, {"tp": 2}, {"pp": 2}],
    3: [{"dp": 3}, {"tp": 3}, {"pp": 3}],
    4: [{"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}, {"tp": 2, "pp": 2}],
    8: [{"dp": 2, "tp": 2, "pp": 2}],
}


def forward(w, x):
    h = np.tanh(x @ w[0])
    return h @ w[1], h


def backward(w, x, h, dz):
    dh = (dz @ w[1].T) * (1 - h * h)
    return dh @ w[0].T, x.T @ dh, h.T @ dz


def matrices(flat):
    return flat[: FEATURES * HIDDEN].reshape(FEATURES, HIDDEN), flat[FEATURES * HIDDEN :].reshape(HIDDEN, FEATURES)


class Rank:
    """The kernels of one rank. A layer adds tanh(x @ w1) @ w2 to x, with the columns of w1 over tp."""

    def __init__(self, problem, rank, batches):
        self.problem, self.batches, self.saved = problem, batches, {}
        self.d, self.t, self.p = problem.place(rank)
        self.ends = offsets(problem.halves)

    def kernels(self):
        return {
            name: getattr(self, name) for name in ("input", "forward", "loss", "backward", "input_backward", "update")
        }

    def rows(self, b, t, h):
        return self.batches[b, t][self.ends[h] : self.ends[h + 1]]

    def input(self, args, reads, writes):
        writes[0][...] = self.rows(*args)

    def forward(self, args, reads, writes):
        x, *parts = reads
        z, self.saved[args] = forward(matrices(np.concatenate(parts)), x)
        writes[0][...] = z + x if args[2] == self.t else z  # its owner keeps x

    def loss(self, args, reads, writes):
        writes[0][...] = reads[0] - 1  # of half the sum of squares

    def backward(self, args, reads, writes):
        dz, x, _, *rest = reads
        parts = rest[: self.problem.axes[0]]
        dx, *dw = backward(matrices(np.concatenate(parts)), x, self.saved.pop(args), dz)
        writes[0][...] = dx + dz if args[2] == self.t else dx
        flat, first = np.concatenate([g.reshape(-1) for g in dw]), 0
        is_first = len(rest) == len(parts)
        for out in writes[1:]:
            term = flat[first : first + len(out)]
            out[...] = term if is_first else out + term
            first += len(out)

    def input_backward(self, args, reads, writes):
        self.batches["dx", *args] = reads[0].copy()

    def update(self, args, reads, writes):
        writes[0][...] -= RATE * reads[0]


def one_process(weights, batches, ranks):
    """One step on whole layers: the new weights, and the gradients of the inputs."""
    sums, dxs = [np.zeros_like(w) for w in weights], {}
    for at in ranks:
        x, kept = batches[at], []
        for of_layer in weights:
            done = [forward(matrices(w), x) for w in of_layer]
            kept.append((x, [h for _, h in done]))
            x = x + sum(z for z, _ in done)
        dx = x - 1
        for layer in reversed(range(len(weights))):
            x, hs = kept[layer]
            terms = [backward(matrices(w), x, h, dx) for w, h in zip(weights[layer], hs, strict=True)]
            for t, (_, *dw) in enumerate(terms):
                sums[layer][t] += np.concatenate([g.reshape(-1) for g in dw])
            dx = dx + sum(term for term, *_ in terms)
        dxs[at] = dx
    return [w - RATE * g for w, g in zip(weights, sums, strict=True)], dxs


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "pairs", "interleaved"])
def test_steps_equal_those_of_one_process(world, schedule):
    for mesh in MESHES.get(world.size, []):
        dp, tp, pp = axes = [mesh.get(name, 1) for name in ("dp", "tp", "pp")]
        chunks = 2 if schedule == "interleaved" else 1
        listed = order("eager-1f1b", pp, 4, overlap_f_b=True) if schedule == "pairs" else schedule
        random = np.random.default_rng([*axes, 1])
        weights = [random.standard_normal((tp, 2 * FEATURES * HIDDEN)) for _ in range(2 * pp)]
        how = {"microbatches": 4, "layers": [2 * FEATURES * HIDDEN] * 2 * pp, "shape": (ROWS, FEATURES)}
        made = plan(listed, mesh=mesh, chunks=chunks, dtype="float64", **how)
        every = [(b, t) for b in range(4 * dp) for t in range(tp)]
        batches = {at: random.standard_normal((ROWS, FEATURES)) for at in every}
        rank = Rank(made.problem, world.rank, batches)
        d, t, _ = made.problem.place(world.rank)
        run = slice(*offsets(split(2 * FEATURES * HIDDEN, dp))[d : d + 2])
        own = {f"p{layer}": weights[layer][t, run].copy() for layer in made.problem.held(world.rank)}
        with fompi.bind(made, comm=world, kernels=rank.kernels(), **own) as step:
            for _ in range(2):
                step()
                weights, dxs = one_process(weights, {at: batches[at] for at in every}, every)
                for layer in made.problem.held(world.rank):
                    np.testing.assert_allclose(own[f"p{layer}"], weights[layer][t, run], rtol=1e-11, atol=1e-12)
        for key in [key for key in batches if key[0] == "dx"]:
            _, b, place, h = key
            half = dxs[b, place][rank.ends[h] : rank.ends[h + 1]]
            np.testing.assert_allclose(batches[key], half, rtol=1e-10, atol=1e-12)
