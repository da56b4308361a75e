"""Tensor parallelism with sequence parallelism, trained on real data: handwritten digits.

    mpirun -n 8 python examples/tp_mlp.py [--framework numpy|torch|jax|cupy] [--device host|cuda|software]

Each rank holds some rows of the batch, some columns of w1 and the rows of w2 that belong to them:

    h = all_gather(x) @ w1 + b1                one operation: multiply own rows while the other rows arrive
    y = reduce_scatter(relu(h) @ w2) + b2      one operation: send what is ready, multiply own rows last

The backward pass is fused as well. The program trains with overlap, compares the run with a single process, and times
the same steps with overlap and without. The data, the comparison and the clock are in `harness.py`, beside this file.

Digits are small, so there is little to send. `--width 1024` makes x and y that wide. `make lab` trains such a model on
four hosts and draws both kinds of step.
"""

import sys

import harness  # before NumPy: it gives each rank one BLAS thread
import numpy as np

import fompi


def initial(model):
    """w1, b1, w2 and b2 as a single process holds them. All ranks draw the same numbers."""
    draw = np.random.default_rng(0).standard_normal
    w1 = draw((model.features, model.hidden)) * np.sqrt(2 / model.features)
    w2 = draw((model.hidden, model.outputs)) * np.sqrt(2 / model.hidden)
    return [p.astype(np.float32) for p in (w1, np.zeros(model.hidden), w2, np.zeros(model.outputs))]


def own(array, comm, axis=0):
    """This rank's part of an array: the ranks split an axis as evenly as possible, in their order."""
    return np.ascontiguousarray(np.array_split(array, comm.size, axis)[comm.rank])


def shards(params, comm):
    """This rank's columns of w1 and b1, its rows of w2, and all of b2."""
    w1, b1, w2, b2 = params
    return [own(w1, comm, axis=1), own(b1, comm), own(w2, comm), b2]


def forward(params, x, options):
    """relu(h) for all rows of the batch, and y for the rows of this rank."""
    w1, b1, w2, b2 = params
    a = np.maximum(fompi.all_gather_matmul(x, w1, bias=b1, **options), 0)
    return a, fompi.matmul_reduce_scatter(a, w2, bias=b2, **options)


def numpy_gradients(params, x, labels, codes, batch, options):
    """The loss of this rank's rows and the gradients of its shards. The backward pass is written out. Also for CuPy."""
    a, y = forward(params, x, options)
    logits = y @ codes
    logits -= logits.max(1, keepdims=True)
    log_sum, chosen = np.log(np.exp(logits).sum(1)), (np.arange(len(labels), like=labels), labels)
    loss = float((log_sum - logits[chosen]).sum()) / batch
    d = np.exp(logits - log_sum[:, None])
    d[chosen] -= 1
    d = d @ codes.T / batch
    da, dw2 = fompi.all_gather_matmul_weight_gradient(d, params[2].T, a, **options)
    dh = da * (a > 0)
    dw1 = fompi.all_gather_weight_gradient(x, dh, **options)
    return loss, [dw1, dh.sum(0), dw2, fompi.all_reduce(d.sum(0), comm=options["comm"])]


def torch_gradients(params, x, labels, codes, batch, options):
    """The same by autograd: the backward of each fused operation is a fused operation."""
    import torch

    w1, b1, w2, b2 = params = [p.detach().requires_grad_() for p in params]
    a = torch.relu(fompi.all_gather_matmul(x, w1, bias=b1, **options))
    logits = fompi.matmul_reduce_scatter(a, w2, bias=b2, **options) @ codes
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / batch
    loss.backward()
    *sharded, db2 = [p.grad for p in params]
    return loss.item(), [*sharded, fompi.all_reduce(db2, comm=options["comm"])]


def jax_gradients(params, x, labels, codes, batch, options):
    """The same by jax.grad."""
    import jax

    def loss_of(params):
        w1, b1, w2, b2 = params
        a = jax.numpy.maximum(fompi.jax.all_gather_matmul(x, w1, bias=b1, **options), 0)
        y = fompi.jax.matmul_reduce_scatter(a, w2, bias=b2, **options)
        return -jax.nn.log_softmax(y @ codes)[jax.numpy.arange(len(labels)), labels].sum() / batch

    loss, (*sharded, db2) = jax.value_and_grad(loss_of)(params)
    return float(loss), [*sharded, fompi.all_reduce(db2, comm=options["comm"])]


GRADIENTS = {"torch": torch_gradients, "jax": jax_gradients}  # of the other frameworks: numpy_gradients


class Training:
    """This rank's shards of the parameters, and gradient descent with momentum."""

    def __init__(self, job):
        self.job, self.batches = job, job.batches()
        self.gradients = GRADIENTS.get(job.model.framework, numpy_gradients)
        self.tensor = harness.converter(job.model.framework, job.model.device)
        self.params = [self.tensor(p) for p in shards(initial(job.model), job.comm)]
        self.momentum, self.codes = [p * 0 for p in self.params], self.tensor(job.codes)

    def step(self, options):
        """One step on the next batch: the loss of this rank's rows and its gradients."""
        model, rows = self.job.model, own(next(self.batches), options["comm"])
        x, labels = self.tensor(self.job.images[rows]), self.tensor(self.job.labels[rows])
        loss, gradients = self.gradients(self.params, x, labels, self.codes, model.batch, options)
        self.momentum = [model.momentum * m + g for m, g in zip(self.momentum, gradients, strict=True)]
        self.params = [p - model.rate * m for p, m in zip(self.params, self.momentum, strict=True)]
        return loss, gradients

    def accuracy(self, images, labels):
        """The share of images that are read right."""
        _, y = forward([harness.on_host(p) for p in self.params], own(images, self.job.comm), {"comm": self.job.comm})
        right = (y @ self.job.codes).argmax(1) == own(labels, self.job.comm)
        return self.job.total(right.sum()) / len(labels)


def train(job, options):
    """Train and report. Returns the last accuracy, and whether the run reached it and follows a single process."""
    training, losses, first = Training(job), [], None
    with job.progress_bar() as bar:
        for epoch in range(job.model.epochs):
            for _ in range(job.steps):
                loss, gradients = training.step(options)
                losses.append(job.total(loss))
                first = first or gradients
                bar.update()
            accuracy = training.accuracy(*job.kept_back)
            job.say(f"epoch {epoch + 1:2}  loss {np.mean(losses[-job.steps :]):.4f}  test accuracy {accuracy:.1%}")
    return accuracy, harness.check(job, initial(job.model), shards, first, losses, accuracy)


def main():
    model = harness.parse(__doc__.partition("\n")[0])
    with fompi.Communicator() as comm:
        job = harness.Job(model, comm)
        overlap = {"comm": comm, "schedule": model.schedule, "slices": model.slices}
        accuracy, right = train(job, overlap)
        harness.compare(job, Training, {"with overlap": overlap, "without": {"comm": comm, "schedule": "unfused"}})
        job.say(f"test accuracy {accuracy:.1%}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
