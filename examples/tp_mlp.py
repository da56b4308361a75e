"""Tensor parallelism with sequence parallelism, trained on real data: handwritten digits.

    mpirun -n 8 python examples/tp_mlp.py [--framework numpy|torch|jax]

The rows of a batch are spread over the ranks, and so are the columns of w1 and the rows of w2:

    h = all_gather(x) @ w1 + b1            one fused operation: multiply what is here, fetch what is next
    y = reduce_scatter(relu(h) @ w2) + b2  one fused operation: send what is ready, make our own rows last

The backward is fused as well. The program trains with overlap, compares with a single process, and at the end runs the
same steps without overlap: what was hidden, what was not.

Digits are small, so there is little to send. `--width 1024` makes x and y that wide: x is random features of the
pixels, y is read as codes of the digits. `make lab` trains that on four hosts and draws both kinds of a step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # one core a rank; before NumPy is loaded

import numpy as np  # noqa: E402

import fompi  # noqa: E402
from fompi.base.layout import offsets, split  # noqa: E402
from fompi.mpi import launcher  # noqa: E402
from fompi.runtime.report import percentile  # noqa: E402

IMAGES, KEPT_BACK, PIXELS, CLASSES = 1797, 359, 64, 10
TRAINED, MOMENTUM = IMAGES - KEPT_BACK, 0.9
ROUNDS = 25
OVERLAP, WITHOUT = "with overlap", "without"

Options = Mapping[str, object]  # of an operation: comm, schedule, slices
Gradients = Callable[..., tuple[float, list]]


# --------------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class Model:
    """x[batch, features] -> h[batch, hidden] -> y[batch, outputs], and how it is trained.

    Of `width` features and outputs, or, if that is 0, of the pixels and one output for each digit.
    """

    width: int = 0
    hidden: int = 256
    batch: int = 120
    epochs: int = 15
    rate: float = 0.1

    @property
    def features(self) -> int:
        return self.width or PIXELS

    @property
    def outputs(self) -> int:
        return self.width or CLASSES

    @property
    def compared(self) -> int:
        """So many steps are compared with those of a single process: fewer where one of them takes seconds."""
        flops = 10 * self.batch * self.hidden * max(self.features, self.outputs)
        return max(2, min(50, round(1e10 / flops)))

    def inputs(self, images: np.ndarray) -> np.ndarray:
        """The pixels, or fixed random features of them: the products of two rows are near those of a Gaussian kernel.

        (Rahimi and Recht, Random features for large-scale kernel machines, 2007.)
        """
        if not self.width:
            return images
        random = np.random.default_rng(2)
        directions, phases = random.normal(0, 0.4, (PIXELS, self.width)), random.uniform(0, 2 * np.pi, self.width)
        return (np.sqrt(20 / self.width) * np.cos(images @ directions + phases)).astype(np.float32)

    def codes(self) -> np.ndarray:
        """logits = y @ codes: the outputs as they are, or a random code of signs for each digit.

        (Dietterich and Bakiri, Solving multiclass learning problems via error-correcting output codes, 1995.)
        """
        if not self.width:
            return np.eye(CLASSES, dtype=np.float32)
        signs = np.random.default_rng(3).choice([-1, 1], (self.width, CLASSES))
        return (signs / np.sqrt(self.width)).astype(np.float32)


def numpy_gradients(params, x, labels, codes, batch, options):
    """Loss of our rows and the gradients of our shards, with the backward written out."""
    w1, b1, w2, b2 = params
    rows = split(batch, options["comm"].size)
    h = fompi.all_gather_matmul(x, w1, bias=b1, **options)
    a = np.maximum(h, 0)
    logits = fompi.matmul_reduce_scatter(a, w2, bias=b2, counts=rows, **options) @ codes
    logits = logits - logits.max(1, keepdims=True)
    log_sum = np.log(np.exp(logits).sum(1))
    loss = (log_sum - logits[np.arange(len(labels)), labels]).sum() / batch
    d = np.exp(logits - log_sum[:, None])
    d[np.arange(len(labels)), labels] -= 1
    d = d @ codes.T / batch
    da, dw2 = fompi.all_gather_matmul_weight_gradient(d, w2.T, a, **options)
    dh = da * (h > 0)
    dw1 = fompi.all_gather_weight_gradient(x, dh, **options)
    return loss, [dw1, dh.sum(0), dw2, fompi.all_reduce(d.sum(0), comm=options["comm"])]


def torch_gradients(params, x, labels, codes, batch, options):
    """The same by autograd: the backward of each fused operation is a fused operation."""
    import torch

    params = [p.detach().requires_grad_() for p in params]
    w1, b1, w2, b2 = params
    rows = split(batch, options["comm"].size)
    h = fompi.all_gather_matmul(x, w1, bias=b1, **options)
    logits = fompi.matmul_reduce_scatter(torch.relu(h), w2, bias=b2, counts=rows, **options) @ codes
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels), reduction="sum") / batch
    loss.backward()
    *sharded, db2 = [p.grad for p in params]
    return loss.item(), [*sharded, fompi.all_reduce(db2, comm=options["comm"])]


def jax_gradients(params, x, labels, codes, batch, options):
    """The same by jax.grad."""
    import jax
    import jax.numpy as jnp

    import fompi.jax

    def loss_of(params):
        w1, b1, w2, b2 = params
        rows = split(batch, options["comm"].size)
        h = fompi.jax.all_gather_matmul(x, w1, bias=b1, **options)
        y = fompi.jax.matmul_reduce_scatter(jnp.maximum(h, 0), w2, bias=b2, counts=rows, **options)
        chosen = jax.nn.log_softmax(y @ codes)[np.arange(len(labels)), labels]
        return -chosen.sum() / batch

    loss, (*sharded, db2) = jax.value_and_grad(loss_of)(params)
    return float(loss), [*sharded, fompi.all_reduce(db2, comm=options["comm"])]


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


def initial(model: Model, comm) -> list[np.ndarray]:
    """Our shards of the parameters; every rank draws all of them from one seed."""
    draw = np.random.default_rng(0).standard_normal
    w1 = draw((model.features, model.hidden)) * np.sqrt(2 / model.features)
    w2 = draw((model.hidden, model.outputs)) * np.sqrt(2 / model.hidden)
    at = offsets(split(model.hidden, comm.size))
    ours = slice(at[comm.rank], at[comm.rank + 1])
    whole = (w1[:, ours], np.zeros(model.hidden)[ours], w2[ours], np.zeros(model.outputs))
    return [np.ascontiguousarray(p, np.float32) for p in whole]


# ---------------------------------------------------------------------------------------------- data and training


def digits(model: Model, comm) -> tuple[np.ndarray, np.ndarray]:
    """1,797 images of 8 x 8 pixels, as inputs of the model, and what they show. Rank 0 reads them for all."""
    images, labels = np.empty((IMAGES, PIXELS), np.float32), np.empty(IMAGES, np.int64)
    if comm.rank == 0:
        from sklearn.datasets import load_digits

        data = load_digits()
        order = np.random.default_rng(1).permutation(IMAGES)
        images, labels = (data.data[order] / 16).astype(np.float32), data.target[order].astype(np.int64)
    return model.inputs(fompi.broadcast(images, comm=comm)), fompi.broadcast(labels, comm=comm)


class Training:
    """Parameters, momentum, and the batches: the same on all ranks, of which each takes its rows."""

    def __init__(self, framework: str, model: Model, comm, images: np.ndarray, labels: np.ndarray):
        self.gradients, self.tensor = GRADIENTS[framework], converter(framework)
        self.model, self.comm, self.images, self.labels = model, comm, images, labels
        self.params = [self.tensor(p) for p in initial(model, comm)]
        self.codes = self.tensor(model.codes())
        self.momentum = [p * 0 for p in self.params]
        self.at = 0

    def batch(self) -> np.ndarray:
        """The next rows, of all ranks together."""
        size = self.model.batch
        epoch, i = divmod(self.at, len(self.images) // size)
        self.at += 1
        return np.random.default_rng(100 + epoch).permutation(len(self.images))[i * size : (i + 1) * size]

    def step(self, rows: np.ndarray, options: Options) -> tuple[float, list]:
        """One step of gradient descent on these rows; the loss of ours and our gradients."""
        comm, batch = options["comm"], self.model.batch
        at = offsets(split(batch, comm.size))
        ours = rows[at[comm.rank] : at[comm.rank + 1]]
        x = self.tensor(self.images[ours])
        loss, gradients = self.gradients(self.params, x, self.labels[ours], self.codes, batch, options)
        self.momentum = [MOMENTUM * m + g for m, g in zip(self.momentum, gradients, strict=True)]
        self.params = [p - self.model.rate * m for p, m in zip(self.params, self.momentum, strict=True)]
        return loss, gradients

    def accuracy(self, images: np.ndarray, labels: np.ndarray) -> float:
        """The share of images that are read right."""
        at = offsets(split(len(images), self.comm.size))
        ours = slice(at[self.comm.rank], at[self.comm.rank + 1])
        w1, b1, w2, b2 = (np.asarray(p) for p in self.params)
        h = fompi.all_gather_matmul(images[ours], w1, bias=b1, comm=self.comm)
        y = fompi.matmul_reduce_scatter(np.maximum(h, 0), w2, bias=b2, comm=self.comm)
        right = np.array([((y @ self.model.codes()).argmax(1) == labels[ours]).sum()])
        return float(fompi.all_reduce(right, comm=self.comm)[0]) / len(labels)


def single_process(
    model: Model, images: np.ndarray, labels: np.ndarray, batches: list[np.ndarray]
) -> tuple[list, list[float]]:
    """The same training in one process and in float64: the first gradients, and the losses."""

    class Alone:
        rank, size = 0, 1

    params, codes = [p.astype(np.float64) for p in initial(model, Alone)], model.codes().astype(np.float64)
    momentum, first, losses = [p * 0 for p in params], [], []
    for rows in batches:
        x, y = images[rows].astype(np.float64), labels[rows]
        w1, b1, w2, b2 = params
        h = x @ w1 + b1
        logits = (np.maximum(h, 0) @ w2 + b2) @ codes
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        losses.append(float(-np.log(p[np.arange(len(y)), y]).mean()))
        p[np.arange(len(y)), y] -= 1
        d = p @ codes.T / len(y)
        dh = (d @ w2.T) * (h > 0)
        gradients = [x.T @ dh, dh.sum(0), np.maximum(h, 0).T @ d, d.sum(0)]
        first = first or gradients
        momentum = [MOMENTUM * m + g for m, g in zip(momentum, gradients, strict=True)]
        params = [p - model.rate * m for p, m in zip(params, momentum, strict=True)]
    return first, losses


def deviation(model: Model, comm, ours: list, alone: list) -> float:
    """How far our shards of the gradients are from those of a single process: the largest relative norm."""
    at = offsets(split(model.hidden, comm.size))
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


def train(framework: str, model: Model, options: Options, say: Callable[[str], None]) -> tuple[bool, float]:
    """Train and report. Whether it went as it should, and the accuracy on the images that were kept back."""
    from tqdm import tqdm

    comm = options["comm"]
    images, labels = digits(model, comm)
    training = Training(framework, model, comm, images[KEPT_BACK:], labels[KEPT_BACK:])
    say(
        f"{len(training.images)} images, {comm.size} ranks, {framework}: x[{model.batch}, {model.features}] "
        f"w1[{model.features}, {model.hidden}] w2[{model.hidden}, {model.outputs}]"
    )
    per_epoch = len(training.images) // model.batch
    losses, first, batches = [], [], []
    begun = perf_counter()
    quiet = comm.rank > 0 or not on_a_terminal()
    with tqdm(total=model.epochs * per_epoch, disable=quiet, unit="step", leave=False, ncols=80) as bar:
        for epoch in range(model.epochs):
            for _ in range(per_epoch):
                batches.append(training.batch())
                loss, gradients = training.step(batches[-1], options)
                losses.append(total(comm, loss))
                first = first or gradients
                bar.update()
            accuracy = training.accuracy(images[:KEPT_BACK], labels[:KEPT_BACK])
            say(f"epoch {epoch + 1:2}  loss {np.mean(losses[-per_epoch:]):.4f}  test accuracy {accuracy:.1%}")
    say(f"trained in {perf_counter() - begun:.1f} s")

    alone, alone_losses = single_process(model, training.images, training.labels, batches[: model.compared])
    off_first = deviation(model, comm, first, alone)
    off = max(abs(a / b - 1) for a, b in zip(losses, alone_losses, strict=False))
    say(
        f"against a single process in float64: first gradients within {off_first:.1e}, "
        f"{len(alone_losses)} losses within {off:.1e}"
    )
    if accuracy < 0.95:
        say("this is less than the 95 % that the default settings reach: the exit status says so")
    if off_first > 1e-5 or off > 1e-3:
        say("this is not the run of a single process: the exit status says so")
    return accuracy >= 0.95 and off_first <= 1e-5 and off <= 1e-3, accuracy


def slowest(comm, seconds: float) -> float:
    return float(fompi.all_gather(np.array([seconds]), comm=comm).max())


def exchange(model: Model, options: Options) -> None:
    """The messages of a step, without its compute."""
    comm = options["comm"]
    rows = split(model.batch, comm.size)
    x, d = (np.zeros((rows[comm.rank], n), np.float32) for n in (model.features, model.outputs))
    fompi.all_gather(x, **options)
    fompi.reduce_scatter(np.zeros((model.batch, model.outputs), np.float32), counts=rows, **options)
    fompi.all_gather(d, **options)
    fompi.all_gather(x, **options)


def compare(
    framework: str, model: Model, ways: Mapping[str, Options], path: Path | None, say: Callable[[str], None]
) -> None:
    """The same steps with overlap and without, in turns: of both, what is exposed, that is wall time minus compute
    alone; and, where a path is given, a picture.

    Compute alone is the step of each rank on a communicator of its own: our columns, all rows, no message. (It has the
    loss of all rows too, which is next to nothing.)
    """
    comm = ways[OVERLAP]["comm"]
    images, labels = digits(model, comm)

    def step(options: Options) -> Callable[[], object]:
        training = Training(framework, model, comm, images, labels)
        return lambda: training.step(training.batch(), options)

    alone = comm.split(comm.rank, name="alone")
    acts = {name: step(options) for name, options in ways.items()}
    acts["compute"] = step({"comm": alone})
    acts |= {f"messages {name}": partial(exchange, model, options) for name, options in ways.items()}
    for act in acts.values():
        act()  # plans and memory are made here
    fompi.read_clocks(comm)
    seconds: dict[str, list[float]] = {name: [] for name in acts}
    traces: dict[str, list[list[fompi.Trace]]] = {name: [] for name in acts}
    for _ in range(ROUNDS):
        for name, act in acts.items():
            total(comm, 0.0)
            with comm.record() as recorded:
                begun = perf_counter()
                act()
                took = perf_counter() - begun
            seconds[name].append(slowest(comm, took))
            traces[name].append(recorded)
    alone.close()

    median = {name: statistics.median_low(each) for name, each in seconds.items()}
    say(f"\n{ROUNDS} steps of each kind, in turns, each on its slowest rank; medians, in ms:")
    say("                a step      p99  compute  messages  exposed  hidden")
    for name in ways:
        compute, messages = median["compute"], median[f"messages {name}"]
        exposed = max(0.0, median[name] - compute)
        row = (median[name], percentile(seconds[name], 0.99), compute, messages, exposed, max(0.0, messages - exposed))
        cells = (f"{1e3 * value:{width}.1f}" for value, width in zip(row, (8, 9, 9, 10, 9, 8), strict=True))
        say(f"  {name:12}{''.join(cells)}")
    say(f"  ratio {median[WITHOUT] / median[OVERLAP]:.2f} (above 1: overlap is faster)")
    say("Compute and messages by themselves; exposed = step - compute, hidden = messages - exposed.")
    say(f"Messages progress by {comm.engine.progress_mode}.")
    if launcher.detect().local_size == comm.size > 1:
        cores = launcher.cores()
        say(
            f"All {comm.size} ranks share the memory and {cores} cores of one host: a message is a copy by a core\n"
            "that could compute, and most of the time in a message is waiting for a turn on a core. So there is\n"
            "little to hide here, and a ratio above 1 comes from cheaper messages; a network has more to hide."
        )
    elif "NETLAB_CONTROL" in os.environ:
        say(f"All {comm.size} ranks, and what moves their messages, share {cores_used(comm)} cores of one machine.")
    if path is None:
        return
    drawn = {}
    for name in ways:
        middle = seconds[name].index(median[name])
        drawn[name] = fompi.gather_traces(traces[name][middle], comm)
    if comm.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(fompi.timelines(drawn))
    say(f"The step in the middle of each kind: {path}")


def cores_used(comm: fompi.Communicator) -> int:
    """Of this machine, by all ranks together."""
    cores = np.zeros(os.cpu_count() or 1)
    cores[list(os.sched_getaffinity(0))] = 1
    return np.count_nonzero(fompi.all_reduce(cores, comm=comm))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--framework", choices=sorted(GRADIENTS), default="numpy")
    parser.add_argument("--width", type=int, default=0, help="of x and y (0: 64 pixels, 10 digits)")
    parser.add_argument("--hidden", type=int, default=Model.hidden, help=f"width of h ({Model.hidden})")
    parser.add_argument("--batch", type=int, default=Model.batch, help=f"rows of a step ({Model.batch})")
    parser.add_argument("--epochs", type=int, default=Model.epochs, help=f"({Model.epochs})")
    parser.add_argument("--learning-rate", type=float, default=Model.rate, help=f"({Model.rate})")
    parser.add_argument("--schedule", default="auto", help="with overlap: direct, ring, ... (auto)")
    parser.add_argument("--slices", type=int, help="with overlap: pieces of a block (chosen)")
    parser.add_argument("--timelines", type=Path, metavar="FILE.svg", help="draw both kinds of step")
    asked = parser.parse_args()
    model = Model(asked.width, asked.hidden, asked.batch, asked.epochs, asked.learning_rate)
    if asked.width < 0 or asked.hidden < 1 or asked.epochs < 1:
        parser.error("--width is 0 or more, --hidden and --epochs 1 or more")
    if not 1 <= asked.batch <= TRAINED:
        parser.error(f"--batch is 1 to {TRAINED}: there are no more images")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if asked.framework != "numpy" and find_spec(asked.framework) is None:
        parser.error(f"--framework {asked.framework} is not installed here: pip install {asked.framework}")
    with fompi.Communicator() as comm:

        def say(text: str) -> None:
            if comm.rank == 0:
                from tqdm import tqdm

                tqdm.write(text)  # above the bar, where there is one
                sys.stdout.flush()

        ways = {
            OVERLAP: {"comm": comm, "schedule": asked.schedule, "slices": asked.slices},
            WITHOUT: {"comm": comm, "schedule": "unfused"},
        }
        right, accuracy = train(asked.framework, model, ways[OVERLAP], say)
        compare(asked.framework, model, ways, asked.timelines, say)
        say(f"test accuracy {accuracy:.1%}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
