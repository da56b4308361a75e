"""Tensor parallelism with sequence parallelism, trained on real data: handwritten digits.

    mpirun -n 8 python examples/tp_mlp.py [--framework numpy|torch|jax]

The rows of a batch are spread over the ranks, and so are the columns of w1 and the rows of w2:

    h      = all_gather(x) @ w1 + b1            one fused operation: multiply what is here, fetch what is next
    logits = reduce_scatter(relu(h) @ w2) + b2  one fused operation: send what is ready, make our own rows last

The backward is fused as well. The program trains with overlap, compares with a single process, and at the end runs the
same steps without overlap: what was hidden, what was not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # one core a rank; before NumPy is loaded

import numpy as np  # noqa: E402

import fompi  # noqa: E402
from fompi.layout import offsets, split  # noqa: E402

FEATURES, HIDDEN, CLASSES = 64, 256, 10
BATCH, EPOCHS, LEARNING_RATE, MOMENTUM = 120, 15, 0.1, 0.9
COMPARED_LOSSES, TIMED_STEPS, ROUNDS = 50, 20, 5

Gradients = Callable[..., tuple[float, list]]


# --------------------------------------------------------------------------------------------------- the model


def numpy_gradients(params, x, labels, batch, comm, schedule):
    """Loss of our rows and the gradients of our shards, with the backward written out."""
    w1, b1, w2, b2 = params
    options = {"comm": comm, "schedule": schedule}
    rows = split(batch, comm.size)
    h = fompi.all_gather_matmul(x, w1, bias=b1, **options)
    a = np.maximum(h, 0)
    logits = fompi.matmul_reduce_scatter(a, w2, bias=b2, counts=rows, **options)
    logits = logits - logits.max(1, keepdims=True)
    log_sum = np.log(np.exp(logits).sum(1))
    loss = (log_sum - logits[np.arange(len(labels)), labels]).sum() / batch
    d = np.exp(logits - log_sum[:, None])
    d[np.arange(len(labels)), labels] -= 1
    d /= batch
    da, dw2 = fompi.all_gather_matmul_weight_gradient(d, w2.T, a, **options)
    dh = da * (h > 0)
    dw1 = fompi.all_gather_weight_gradient(x, dh, **options)
    return loss, [dw1, dh.sum(0), dw2, fompi.all_reduce(d.sum(0), comm=comm)]


def torch_gradients(params, x, labels, batch, comm, schedule):
    """The same by autograd: the backward of each fused operation is a fused operation."""
    import torch

    params = [p.detach().requires_grad_() for p in params]
    w1, b1, w2, b2 = params
    options = {"comm": comm, "schedule": schedule}
    h = fompi.all_gather_matmul(x, w1, bias=b1, **options)
    logits = fompi.matmul_reduce_scatter(torch.relu(h), w2, bias=b2, counts=split(batch, comm.size), **options)
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels), reduction="sum") / batch
    loss.backward()
    *sharded, db2 = [p.grad for p in params]
    return loss.item(), [*sharded, fompi.all_reduce(db2, comm=comm)]


def jax_gradients(params, x, labels, batch, comm, schedule):
    """The same by jax.grad."""
    import jax
    import jax.numpy as jnp

    import fompi.jax

    def loss_of(params):
        w1, b1, w2, b2 = params
        options = {"comm": comm, "schedule": schedule}
        h = fompi.jax.all_gather_matmul(x, w1, bias=b1, **options)
        logits = fompi.jax.matmul_reduce_scatter(
            jnp.maximum(h, 0), w2, bias=b2, counts=split(batch, comm.size), **options
        )
        chosen = jax.nn.log_softmax(logits)[np.arange(len(labels)), labels]
        return -chosen.sum() / batch

    loss, (*sharded, db2) = jax.value_and_grad(loss_of)(params)
    return float(loss), [*sharded, fompi.all_reduce(db2, comm=comm)]


GRADIENTS: dict[str, Gradients] = {"numpy": numpy_gradients, "torch": torch_gradients, "jax": jax_gradients}


def converter(framework: str) -> Callable[[np.ndarray], object]:
    """From a NumPy array to the framework's tensor."""
    if framework == "torch":
        import torch

        torch.set_num_threads(1)
        return torch.from_numpy
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray
    return np.asarray


def initial(comm) -> list[np.ndarray]:
    """Our shards of the parameters; every rank draws all of them from one seed."""
    draw = np.random.default_rng(0).standard_normal
    w1 = draw((FEATURES, HIDDEN)) * np.sqrt(2 / FEATURES)
    w2 = draw((HIDDEN, CLASSES)) * np.sqrt(2 / HIDDEN)
    at = offsets(split(HIDDEN, comm.size))
    ours = slice(at[comm.rank], at[comm.rank + 1])
    whole = (w1[:, ours], np.zeros(HIDDEN)[ours], w2[ours], np.zeros(CLASSES))
    return [np.ascontiguousarray(p, np.float32) for p in whole]


# ---------------------------------------------------------------------------------------------- data and training


def digits(comm) -> tuple[np.ndarray, np.ndarray]:
    """1,797 images of 8 x 8 pixels, and what they show. Rank 0 reads them, the others get them."""
    images, labels = np.empty((1797, FEATURES), np.float32), np.empty(1797, np.int64)
    if comm.rank == 0:
        from sklearn.datasets import load_digits

        data = load_digits()
        order = np.random.default_rng(1).permutation(1797)
        images, labels = (data.data[order] / 16).astype(np.float32), data.target[order].astype(np.int64)
    return fompi.broadcast(images, comm=comm), fompi.broadcast(labels, comm=comm)


class Training:
    """Parameters, momentum, and the batches: the same on all ranks, of which each takes its rows."""

    def __init__(self, framework: str, comm, images: np.ndarray, labels: np.ndarray):
        self.gradients, self.tensor, self.comm = GRADIENTS[framework], converter(framework), comm
        self.images, self.labels = images, labels
        self.params = [self.tensor(p) for p in initial(comm)]
        self.momentum = [p * 0 for p in self.params]
        self.at = 0

    def batch(self) -> np.ndarray:
        """The next rows, of all ranks together."""
        per_epoch = len(self.images) // BATCH
        epoch, i = divmod(self.at, per_epoch)
        self.at += 1
        return np.random.default_rng(100 + epoch).permutation(len(self.images))[i * BATCH : (i + 1) * BATCH]

    def step(self, rows: np.ndarray, schedule: str = "auto") -> tuple[float, list]:
        """One step of gradient descent on these rows; the loss of ours and our gradients."""
        at = offsets(split(BATCH, self.comm.size))
        ours = rows[at[self.comm.rank] : at[self.comm.rank + 1]]
        x = self.tensor(self.images[ours])
        loss, gradients = self.gradients(self.params, x, self.labels[ours], BATCH, self.comm, schedule)
        self.momentum = [MOMENTUM * m + g for m, g in zip(self.momentum, gradients, strict=True)]
        self.params = [p - LEARNING_RATE * m for p, m in zip(self.params, self.momentum, strict=True)]
        return loss, gradients

    def accuracy(self, images: np.ndarray, labels: np.ndarray) -> float:
        """The share of images that are read right."""
        at = offsets(split(len(images), self.comm.size))
        ours = slice(at[self.comm.rank], at[self.comm.rank + 1])
        w1, b1, w2, b2 = (np.asarray(p) for p in self.params)
        h = fompi.all_gather_matmul(images[ours], w1, bias=b1, comm=self.comm)
        logits = fompi.matmul_reduce_scatter(np.maximum(h, 0), w2, bias=b2, comm=self.comm)
        right = np.array([(logits.argmax(1) == labels[ours]).sum()])
        return float(fompi.all_reduce(right, comm=self.comm)[0]) / len(labels)


def single_process(images: np.ndarray, labels: np.ndarray, batches: list[np.ndarray]) -> tuple[list, list[float]]:
    """The same training in one process and in float64: the first gradients, and the losses."""

    class Alone:
        rank, size = 0, 1

    params = [p.astype(np.float64) for p in initial(Alone)]
    momentum, first, losses = [p * 0 for p in params], [], []
    for rows in batches:
        x, y = images[rows].astype(np.float64), labels[rows]
        w1, b1, w2, b2 = params
        h = x @ w1 + b1
        logits = np.maximum(h, 0) @ w2 + b2
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        losses.append(float(-np.log(p[np.arange(len(y)), y]).mean()))
        p[np.arange(len(y)), y] -= 1
        d = p / len(y)
        dh = (d @ w2.T) * (h > 0)
        gradients = [x.T @ dh, dh.sum(0), np.maximum(h, 0).T @ d, d.sum(0)]
        first = first or gradients
        momentum = [MOMENTUM * m + g for m, g in zip(momentum, gradients, strict=True)]
        params = [p - LEARNING_RATE * m for p, m in zip(params, momentum, strict=True)]
    return first, losses


def deviation(comm, ours: list, alone: list) -> float:
    """How far our shards of the gradients are from those of a single process: the largest relative norm."""
    at = offsets(split(HIDDEN, comm.size))
    columns = slice(at[comm.rank], at[comm.rank + 1])
    shards = [alone[0][:, columns], alone[1][columns], alone[2][columns], alone[3]]
    squares = [[np.square(np.asarray(g) - s).sum(), np.square(s).sum()] for g, s in zip(ours, shards, strict=True)]
    off, norm = fompi.all_reduce(np.array(squares, np.float64), comm=comm).T
    return float(np.sqrt(off / norm).max())


def on_a_terminal() -> bool:
    """Whether the launcher above us writes to a terminal. Our own output is a pipe to it, or the terminal itself."""
    pid = os.getpid()
    while pid > 1 and not sys.stderr.isatty():
        process = Path(f"/proc/{pid}")
        try:
            name, parent = (process / "comm").read_text().strip(), (process / "stat").read_text().rpartition(")")[2]
            if name.startswith(("mpirun", "mpiexec", "prterun", "prun", "srun")):
                return os.readlink(process / "fd" / "2").startswith(("/dev/pts/", "/dev/tty"))
        except OSError:
            return False
        pid = int(parent.split()[1])
    return pid > 1


def total(comm, value: float) -> float:
    return float(fompi.all_reduce(np.array(value, np.float64), comm=comm))


# ------------------------------------------------------------------------------------------------------ the run


def train(framework: str, comm, say: Callable[[str], None]) -> tuple[bool, float]:
    """Train and report. Whether it went as it should, and the accuracy on the images that were kept back."""
    from tqdm import tqdm

    images, labels = digits(comm)
    kept_back = len(images) // 5
    training = Training(framework, comm, images[kept_back:], labels[kept_back:])
    say(
        f"{len(training.images)} images, {comm.size} ranks, {framework}: "
        f"x[{BATCH}, {FEATURES}] w1[{FEATURES}, {HIDDEN}] w2[{HIDDEN}, {CLASSES}]"
    )
    per_epoch = len(training.images) // BATCH
    losses, first, batches = [], [], []
    begun = perf_counter()
    quiet = comm.rank > 0 or not on_a_terminal()
    with tqdm(total=EPOCHS * per_epoch, disable=quiet, unit="step", leave=False, ncols=80) as bar:
        for epoch in range(EPOCHS):
            for _ in range(per_epoch):
                batches.append(training.batch())
                loss, gradients = training.step(batches[-1])
                losses.append(total(comm, loss))
                first = first or gradients
                bar.update()
            accuracy = training.accuracy(images[:kept_back], labels[:kept_back])
            say(f"epoch {epoch + 1:2}  loss {np.mean(losses[-per_epoch:]):.4f}  test accuracy {accuracy:.1%}")
    say(f"trained in {perf_counter() - begun:.1f} s")

    alone, alone_losses = single_process(training.images, training.labels, batches[:COMPARED_LOSSES])
    off_first = deviation(comm, first, alone)
    off = max(abs(a / b - 1) for a, b in zip(losses, alone_losses, strict=False))
    say(
        f"against a single process in float64: first gradients within {off_first:.1e}, "
        f"{len(alone_losses)} losses within {off:.1e}"
    )
    return accuracy >= 0.95 and off_first <= 1e-5 and off <= 1e-3, accuracy


def compare(framework: str, comm, say: Callable[[str], None]) -> None:
    """The same steps with overlap and without, in turns: time of both, what was hidden and what was exposed."""
    images, labels = digits(comm)
    names = {"auto": "with overlap", "unfused": "without"}
    measured: dict[str, list[tuple[float, float, float]]] = {schedule: [] for schedule in names}
    for _ in range(ROUNDS):
        for schedule in names:
            training = Training(framework, comm, images, labels)
            training.step(training.batch(), schedule)  # plans and memory are made here
            total(comm, 0.0)
            with comm.record() as traces:
                begun = perf_counter()
                for _ in range(TIMED_STEPS):
                    training.step(training.batch(), schedule)
                seconds = perf_counter() - begun
            parts = [trace.summary(comm.rank) for trace in traces]
            row = (seconds, sum(part.hidden for part in parts), sum(part.exposed for part in parts))
            scale = 1e3 / comm.size / TIMED_STEPS
            measured[schedule].append(tuple(scale * total(comm, s) for s in row))
    say(f"\n{ROUNDS} rounds of {TIMED_STEPS} steps each, in turns; means over the ranks, median and range of rounds:")
    medians = {}
    for schedule, name in names.items():
        steps, hidden, exposed = zip(*measured[schedule], strict=True)
        medians[schedule] = statistics.median(steps)
        say(
            f"  {name:12} {medians[schedule]:7.2f} ms a step ({min(steps):.2f} to {max(steps):.2f}); of its "
            f"communication {statistics.median(hidden):.2f} ms hidden, {statistics.median(exposed):.2f} ms exposed"
        )
    say(f"  ratio {medians['unfused'] / medians['auto']:.2f} (above 1: overlap is faster)")
    if fompi.launch.detect().local_size == comm.size > 1:
        cores = fompi.launch.cores()
        say(
            f"All {comm.size} ranks share the memory and {cores} cores of one host: a message is a copy by a core\n"
            "that could compute, and most of the time in a message is waiting for a turn on a core. So there is\n"
            "little to hide here, and a ratio above 1 comes from cheaper messages; a network has more to hide."
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--framework", choices=sorted(GRADIENTS), default="numpy")
    framework = parser.parse_args().framework
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with fompi.Communicator() as comm:

        def say(text: str) -> None:
            if comm.rank == 0:
                from tqdm import tqdm

                tqdm.write(text)  # above the bar, where there is one
                sys.stdout.flush()

        right, accuracy = train(framework, comm, say)
        compare(framework, comm, say)
        say(f"test accuracy {accuracy:.1%}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
