"""What tp_mlp.py needs besides its model: options, data, progress, a single process to compare with, and a clock.

`Job` holds what all parts share. `check` compares a run with a single process in float64. `compare` times steps with
overlap and without, in turns, prints a table, and draws a picture. The end of the file is what transformer_3d.py needs:
text, a progress bar, the losses as a picture, and times by axis.
"""

import argparse
import os
import statistics
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # ranks share the cores; BLAS reads this when NumPy is loaded

import numpy as np  # noqa: E402

import fompi  # noqa: E402
from fompi.runtime.alignment import read_clocks  # noqa: E402
from fompi.traces.timeline import timelines  # noqa: E402

IMAGES, KEPT_BACK, PIXELS, CLASSES = 1797, 359, 64, 10
TRAINED = IMAGES - KEPT_BACK
ACCURACY = 0.95
"""The share of test images that a good run reads right. The default settings reach 0.967."""
DEVICE_HELP = "cuda: a GPU for each rank; software: with a checker for races"
ROUNDS = 25
"""How many steps of each kind are timed."""


# ------------------------------------------------------------------------------------------------------ options


@dataclass(frozen=True)
class Model:
    """x[batch, features] -> h[batch, hidden] -> y[batch, outputs], and how it is trained.

    There are `width` features and outputs. If `width` is 0, there are 64 pixels and 10 digits.
    """

    framework: str = "numpy"
    device: str = "host"
    width: int = 0
    hidden: int = 256
    batch: int = 120
    epochs: int = 15
    rate: float = 0.1
    momentum: float = 0.9
    schedule: str = "auto"
    slices: int | None = None
    timelines: Path | None = None

    @property
    def features(self):
        return self.width or PIXELS

    @property
    def outputs(self):
        return self.width or CLASSES

    @property
    def compared(self):
        """How many steps a single process repeats: 50, or fewer where 50 take more than some seconds."""
        flops = 10 * self.batch * self.hidden * max(self.features, self.outputs)
        return max(2, min(50, round(1e10 / flops)))


def parse(description):
    """The command line as a Model. Wrong options end the program with a message."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--framework", choices=("cupy", "jax", "numpy", "torch"), default=Model.framework)
    parser.add_argument("--device", choices=("host", "cuda", "software"), default=Model.device, help=DEVICE_HELP)
    parser.add_argument("--width", type=int, default=Model.width, help="of x and y (0: 64 pixels, 10 digits)")
    parser.add_argument("--hidden", type=int, default=Model.hidden, help=f"width of h ({Model.hidden})")
    parser.add_argument("--batch", type=int, default=Model.batch, help=f"rows of a step ({Model.batch})")
    parser.add_argument("--epochs", type=int, default=Model.epochs, help=f"({Model.epochs})")
    parser.add_argument("--learning-rate", type=float, default=Model.rate, dest="rate", help=f"({Model.rate})")
    parser.add_argument("--schedule", default=Model.schedule, help="with overlap: direct, ring, ... (auto)")
    parser.add_argument("--slices", type=int, help="with overlap: pieces of a block (chosen)")
    parser.add_argument("--timelines", type=Path, metavar="FILE.svg", help="draw both kinds of step")
    model = Model(**vars(parser.parse_args()))
    if model.width < 0 or model.hidden < 1 or model.epochs < 1:
        parser.error("--width is 0 or more, --hidden and --epochs 1 or more")
    if not 1 <= model.batch <= TRAINED:
        parser.error(f"--batch is 1 to {TRAINED}: there are no more images")
    if model.device == "software":
        os.environ["FOMPI_DEVICE"] = "software"  # operations on host tensors run there
    if (model.device == "cuda") != (model.framework == "cupy") and model.framework in ("cupy", "numpy"):
        parser.error("--device cuda takes --framework cupy, torch or jax, and --framework cupy takes --device cuda")
    if model.device != "cuda":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if model.framework != "numpy" and find_spec(model.framework) is None:
        parser.error(f"--framework {model.framework} is not installed here: pip install {model.framework}")
    if find_spec("sklearn") is None:
        parser.error('the images come with scikit-learn, which is not installed here: pip install ".[example]"')
    return model


def converter(framework, device="host"):
    """The function that makes a tensor of the framework from a NumPy array, on the GPU of this rank or on the host."""
    number = fompi.Device("cuda").number if device == "cuda" else None
    if framework == "torch":
        import torch

        torch.set_num_threads(1)
        return torch.from_numpy if number is None else lambda a: torch.from_numpy(a).to(f"cuda:{number}")
    if framework == "jax":
        import jax

        return jax.numpy.asarray if number is None else lambda a: jax.device_put(a, jax.devices("cuda")[number])
    if framework == "cupy":
        import cupy

        cupy.cuda.Device(number).use()
        return cupy.asarray
    return np.asarray


def on_host(tensor):
    """A tensor of any framework and device as a NumPy array."""
    if hasattr(tensor, "detach"):
        return tensor.detach().cpu().numpy()
    return tensor.get() if hasattr(tensor, "get") else np.asarray(tensor)


# ------------------------------------------------------------------------------------------- data and progress


class Job:
    """The model, the ranks, and the data, which are the same on all ranks.

    `images` and `labels` are the training data, `kept_back` those of the test. `steps` is the number of steps in an
    epoch. The logits of the digits are y @ codes.
    """

    def __init__(self, model, comm):
        self.model, self.comm, self.codes = model, comm, _codes(model)
        images, labels = _digits(model, comm)
        self.images, self.labels = images[KEPT_BACK:], labels[KEPT_BACK:]
        self.kept_back = images[:KEPT_BACK], labels[:KEPT_BACK]
        self.steps = TRAINED // model.batch
        self.say(
            f"{TRAINED} images, {comm.size} ranks, {model.framework}: x[{model.batch}, {model.features}] "
            f"w1[{model.features}, {model.hidden}] w2[{model.hidden}, {model.outputs}]"
        )

    def batches(self):
        """The rows of each batch, for ever: another order of the images in each epoch."""
        epoch = 0
        while True:
            order = np.random.default_rng(100 + epoch).permutation(TRAINED)
            yield from (order[i * self.model.batch : (i + 1) * self.model.batch] for i in range(self.steps))
            epoch += 1

    def total(self, value):
        """The sum of a number of each rank."""
        return float(fompi.all_reduce(np.array(value, np.float64), comm=self.comm))

    def slowest(self, seconds):
        return float(fompi.all_gather(np.array([seconds]), comm=self.comm).max())

    def say(self, text):
        """Print a line, on rank 0 only, and above the progress bar where there is one."""
        if self.comm.rank == 0:
            from tqdm import tqdm

            tqdm.write(text)
            sys.stdout.flush()

    @contextmanager
    def progress_bar(self):
        """A bar of all steps of the training, if somebody watches a terminal. At the end, the time that it took."""
        begun = perf_counter()
        with progress_bar(self.comm, self.model.epochs * self.steps) as bar:
            yield bar
        self.say(f"trained in {perf_counter() - begun:.1f} s")


def progress_bar(comm, steps, items=None):
    """A bar of tqdm on rank 0, if somebody watches a terminal. It counts `items`, or what its `update` is told."""
    from tqdm import tqdm

    quiet = comm.rank > 0 or not _is_on_terminal()
    return tqdm(items, total=steps, disable=quiet, unit="step", leave=False, ncols=80)


def _digits(model, comm):
    """1,797 images of 8 x 8 pixels, as inputs of the model, and their digits. Rank 0 reads them for all ranks."""
    images, labels = np.empty((IMAGES, PIXELS), np.float32), np.empty(IMAGES, np.int64)
    if comm.rank == 0:
        from sklearn.datasets import load_digits

        data = load_digits()
        order = np.random.default_rng(1).permutation(IMAGES)
        images, labels = (data.data[order] / 16).astype(np.float32), data.target[order].astype(np.int64)
    return _inputs(model, fompi.broadcast(images, comm=comm)), fompi.broadcast(labels, comm=comm)


def _inputs(model, images):
    """The pixels, or `width` fixed random features of them, whose products approximate a Gaussian kernel.

    (Rahimi and Recht, Random features for large-scale kernel machines, 2007.)
    """
    if not model.width:
        return images
    random = np.random.default_rng(2)
    directions, phases = random.normal(0, 0.4, (PIXELS, model.width)), random.uniform(0, 2 * np.pi, model.width)
    return (np.sqrt(20 / model.width) * np.cos(images @ directions + phases)).astype(np.float32)


def _codes(model):
    """What makes logits of y: the identity, or a random code of `width` signs for each digit.

    (Dietterich and Bakiri, Solving multiclass learning problems via error-correcting output codes, 1995.)
    """
    if not model.width:
        return np.eye(CLASSES, dtype=np.float32)
    signs = np.random.default_rng(3).choice([-1, 1], (model.width, CLASSES))
    return (signs / np.sqrt(model.width)).astype(np.float32)


def _is_on_terminal():
    """True if standard error leads to a terminal: directly, or through the launcher, whose pipe this process has."""
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


# ------------------------------------------------------------------------------------ against a single process


def check(job, initial, shards, gradients, losses, accuracy):
    """Compare a run with a single process that starts from `initial`, and say how close they are.

    `gradients` are those of this rank at the first step, `losses` those of all steps. True if both are close, and
    the accuracy is that of a good run.
    """
    comm, count = job.comm, min(job.model.compared, len(losses))
    whole, reference = [np.zeros(p.shape) for p in initial], np.zeros(count)
    if comm.rank == 0:
        whole, reference = _single_process(job, initial, count)
    whole, reference = [fompi.broadcast(g, comm=comm) for g in whole], fompi.broadcast(reference, comm=comm)
    pairs = [(on_host(g), exact) for g, exact in zip(gradients, shards(whole, comm), strict=True)]
    squares = [[np.square(g - exact).sum(), np.square(exact).sum()] for g, exact in pairs]
    off, norm = fompi.all_reduce(np.array(squares, np.float64), comm=comm).T
    off_first = float(np.sqrt(off / norm).max())
    off_losses = float(np.abs(losses[:count] / reference - 1).max())
    job.say(
        f"against a single process in float64: first gradients within {off_first:.1e}, "
        f"{count} losses within {off_losses:.1e}"
    )
    is_same, is_good = off_first <= 1e-5 and off_losses <= 1e-3, accuracy >= ACCURACY
    if not is_good and job.model.epochs < Model.epochs:
        job.say(f"The accuracy is below the {ACCURACY:.0%} of {Model.epochs} epochs, as may be after fewer.")
        is_good = True
    elif not is_good:
        job.say(f"The accuracy is below the {ACCURACY:.0%} that the default settings reach. The exit status is 1.")
    if not is_same:
        job.say("The run differs from that of a single process. The exit status is 1.")
    return is_same and is_good


def _single_process(job, initial, count):
    """The first steps of the same training in one process and in float64: the first gradients, and the losses."""
    model, batches = job.model, job.batches()
    params, codes = [p.astype(np.float64) for p in initial], job.codes.astype(np.float64)
    momentum, first, losses = [p * 0 for p in params], [], []
    for _ in range(count):
        rows = next(batches)
        x, labels = job.images[rows].astype(np.float64), job.labels[rows]
        w1, b1, w2, b2 = params
        h = x @ w1 + b1
        logits = (np.maximum(h, 0) @ w2 + b2) @ codes
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        losses.append(float(-np.log(p[np.arange(len(labels)), labels]).mean()))
        p[np.arange(len(labels)), labels] -= 1
        d = p @ codes.T / len(labels)
        dh = (d @ w2.T) * (h > 0)
        gradients = [x.T @ dh, dh.sum(0), np.maximum(h, 0).T @ d, d.sum(0)]
        first = first or gradients
        momentum = [model.momentum * m + g for m, g in zip(momentum, gradients, strict=True)]
        params = [p - model.rate * m for p, m in zip(params, momentum, strict=True)]
    return first, np.array(losses)


# --------------------------------------------------------------------------------- with overlap and without


def compare(job, training, kinds):
    """Time steps of the two kinds in turns, with overlap first: {"with overlap": options, "without": options}.

    `training(job).step(options)` is a step. Exposed is its wall time minus compute alone. Compute alone is the step of
    each rank on a communicator of its own: the rank's columns, all rows, no message. (It includes the loss of all rows,
    which takes almost no time.)
    """
    alone = job.comm.split(job.comm.rank, name="alone")
    acts = {name: partial(training(job).step, options) for name, options in kinds.items()}
    acts["compute"] = partial(training(job).step, {"comm": alone})
    acts |= {f"messages {name}": partial(_exchange, job.model, options) for name, options in kinds.items()}
    seconds, traces = _time_in_turns(job, acts)
    alone.close()

    median = {name: statistics.median_low(values) for name, values in seconds.items()}
    job.say(f"\n{ROUNDS} steps of each kind, in turns, each on its slowest rank; medians, in ms:")
    job.say("                a step      p99  compute  messages  exposed  hidden")
    for name in kinds:
        compute, messages, p99 = median["compute"], median[f"messages {name}"], np.quantile(seconds[name], 0.99)
        exposed = max(0.0, median[name] - compute)
        row = (median[name], p99, compute, messages, exposed, max(0.0, messages - exposed))
        cells = (f"{1e3 * value:{width}.1f}" for value, width in zip(row, (8, 9, 9, 10, 9, 8), strict=True))
        job.say(f"  {name:12}{''.join(cells)}")
    overlap, without = (median[name] for name in kinds)
    job.say(f"  ratio {without / overlap:.2f} (above 1: overlap is faster)")
    job.say("Compute and messages are timed by themselves; exposed = step - compute, hidden = messages - exposed.")
    job.say(f"Messages progress by {next(iter(traces.values()))[0][0].progress}.")
    _say_who_shares_cores(job)
    if job.model.timelines is not None:
        middle = {name: traces[name][seconds[name].index(median[name])] for name in kinds}
        _draw(job, middle, job.model.timelines)


def _time_in_turns(job, acts):
    """The seconds on the slowest rank, and the traces of this rank, of all calls of each act."""
    for act in acts.values():
        act()  # plans and memory are made here
    read_clocks(job.comm)
    seconds, traces = {name: [] for name in acts}, {name: [] for name in acts}
    for _ in range(ROUNDS):
        for name, act in acts.items():
            job.total(0.0)  # the ranks begin together
            with job.comm.record() as recorded:
                begun = perf_counter()
                act()
                took = perf_counter() - begun
            seconds[name].append(job.slowest(took))
            traces[name].append(recorded)
    return seconds, traces


def _exchange(model, options):
    """The messages of a step, without its compute."""
    rows = len(np.array_split(np.arange(model.batch), options["comm"].size)[options["comm"].rank])
    x, d = (np.zeros((rows, n), np.float32) for n in (model.features, model.outputs))
    fompi.all_gather(x, **options)
    fompi.reduce_scatter(np.zeros((model.batch, model.outputs), np.float32), **options)
    fompi.all_gather(d, **options)
    fompi.all_gather(x, **options)


def _say_who_shares_cores(job):
    """A note for ranks on one host, and for hosts that are made on one machine: there is little to hide."""
    comm, cores = job.comm, np.zeros(os.cpu_count() or 1)
    cores[list(os.sched_getaffinity(0))] = 1
    count = np.count_nonzero(fompi.all_reduce(cores, comm=comm))
    if comm.size > 1 and not comm.network:
        job.say(
            f"All {comm.size} ranks share the memory and {count} cores of one host. A message is a copy by a core\n"
            "that could compute, and most of its time is spent waiting for a turn on a core. So there is\n"
            "little to hide here, and a ratio above 1 comes from cheaper messages. A network has more to hide."
        )
    elif "NETLAB_CONTROL" in os.environ:
        job.say(f"All {comm.size} ranks, and what moves their messages, share {count} cores of one machine.")


def _draw(job, recorded, path):
    """Write a picture of these calls, one above the other, with all ranks on one clock."""
    drawn = {name: fompi.gather_traces(traces, job.comm) for name, traces in recorded.items()}
    if job.comm.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(timelines(drawn))
    job.say(f"The step in the middle of each kind: {path}")


# ---------------------------------------------------------------------------------------- for transformer_3d.py

SPARKS = "▁▂▃▄▅▆▇█"


def prepare(description):
    """(options, mesh, text). By default an even number of ranks has tp=2, what is left has pp=2 if it is even."""
    comm, layout = fompi.Communicator(), argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=layout)
    for axis in ("dp", "pp", "tp"):
        parser.add_argument(f"--{axis}", type=int, help=f"ranks along {axis}")
    parser.add_argument("--steps", type=int, default=40, help="(40)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses")
    parser.add_argument("--wire", help="what gradients travel in: bfloat16, int8, int4; trains three times")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps is 1 or more")
    tp = options.tp or 2 - comm.size % 2
    pp = options.pp or 2 - comm.size // tp % 2
    mesh = fompi.Mesh(comm, dp=options.dp or comm.size // (tp * pp), pp=pp, tp=tp)
    return options, mesh, python_source(comm)


def python_source(comm, nbytes=1 << 18):
    """The begin of the source of Python's standard library, as bytes. Rank 0 reads it for all ranks."""
    text = np.zeros(nbytes, np.uint8)
    if comm.rank == 0:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        text[:] = np.frombuffer(b"".join(file.read_bytes() for file in files)[:nbytes], np.uint8)
    return fompi.broadcast(text, comm=comm)


def batches(text, steps, length, comm, shape):
    """For each step inputs and targets of this rank, of the shape (micro-batches, length, rows): the next byte each.

    `shape` is (micro-batches, rows of all ranks). The ranks of `comm` deal out the rows.
    """
    import torch

    random = np.random.default_rng(0)
    for _ in range(steps):
        at = random.integers(len(text) - length, size=(shape[0], 1, shape[1]))[..., comm.rank :: comm.size]
        read = torch.from_numpy(text[at + np.arange(length + 1)[:, None]].astype(np.int64))
        yield read[:, :-1], read[:, 1:]


def seconds_by_axis(mesh, **calls):
    """{axis: (seconds of messages in flight, seconds of waiting)}, the means of all ranks.

    `calls[axis]` are the traces of the calls on this axis, and the seconds for which the program has waited for them.
    If these are None, the program was in each call from its begin to its end: it waited while no kernel ran.
    """
    own = []
    for axis, (traces, waited) in calls.items():
        rank = mesh[axis].rank
        events = tuple(event for trace in traces for event in trace.events)
        if waited is None:
            waited = sum(trace.summary(rank).exposed for trace in traces)
        own.append((fompi.Trace("measured", axis, events).summary(rank).communication, waited))
    means = fompi.all_reduce(np.array(own), comm=mesh.world, op="mean")
    return dict(zip(calls, means.tolist(), strict=True))


def report_wire(wire, losses):
    """Print losses side by side. `losses`: with messages as they are, with a wire and feedback, without feedback."""
    plain, *others = losses
    print(f"step  float32  {wire} with feedback    without")
    last = len(plain) - 1
    for step in sorted({*range(0, last, max(1, last // 8)), last}):
        print(f"{step:4}  {plain[step]:7.4f}  {others[0][step]:{len(wire) + 14}.4f}  {others[1][step]:9.4f}")
    ends = [float(np.mean(run[-10:])) for run in losses]  # of the last steps: single ones differ by their rows
    off = [abs(end / ends[0] - 1) for end in ends[1:]]
    print(f"the last 10 losses are off by {off[0]:.2%} with feedback, by {off[1]:.2%} without")


def report(losses, expected, axes, seconds, options, smaller):
    """Print the losses and what was hidden. `smaller`: the losses with a wire. `options.plot` takes Matplotlib."""
    path = options.plot
    if smaller:
        report_wire(options.wire, [losses, *smaller])
    means = [part.mean() for part in np.array_split(losses, min(len(losses), 40))]
    low, high = min(means), max(means)
    places = [round((mean - low) / (high - low or 1) * (len(SPARKS) - 1)) for mean in means]
    print(f"loss {losses[0]:.2f} {''.join(SPARKS[i] for i in places)} {losses[-1]:.2f}")
    error = np.abs(expected / losses[: len(expected)] - 1).max()
    print(f"the first {len(expected)} losses are those of a single process within {error:.0e}: {error < 1e-4}")
    print("the last step, mean of the ranks:")
    for axis, (flight, waited) in seconds.items():
        times = [f"{1e3 * value:.1f} ms" for value in (flight, waited, max(0.0, flight - waited))]
        print(f"{axis}={axes[axis]}: messages in flight {times[0]}, exposed (waited for) {times[1]}, hidden {times[2]}")
    if path is not None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 3), layout="constrained")
        figure.subplots().plot(losses)
        figure.axes[0].set(xlabel="step", ylabel="loss")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
