"""The strategies on emulated accelerators with real messages: mpirun -n 4 python -m fompi bench parallel

Every row is one strategy with one ratio of messages to kernels. First its kernels take no time: what the call takes
then is T_m, its messages alone. Then the emulated accelerator gets such a speed that the kernels take T_c, and the row
compares

- fompi: the strategy of `fompi.parallel`, through its public interface;
- serial: the same kernels and messages, but no kernel runs while a message moves;
- kernels alone and messages alone.

`exposed` is the time beyond the kernels alone. `bound` is what must be exposed: no order of these pieces does better on
links that carry one message at a time. Both are shares of T_m. The bound of a row is in the docstring of its function,
and in docs/concepts/strategies.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from fompi.backends.emulated import Emulated
from fompi.bench.cluster import IDLE_SECONDS, Cluster
from fompi.bench.collectives import progress
from fompi.bench.options import Options
from fompi.engine.communicator import Communicator, Mesh
from fompi.model.flow_shop import Job, makespan
from fompi.model.machine import Machine
from fompi.ops.operations import all_gather, reduce_scatter
from fompi.parallel.data import SGD, DataParallel
from fompi.parallel.expert import experts_of, moe
from fompi.parallel.local import product
from fompi.parallel.pipeline import SCHEDULES, Pipeline
from fompi.parallel.sequence import Sharding, ring_attention, ulysses_attention, usp_attention
from fompi.parallel.tensor import attention, column_parallel_linear, row_parallel_linear
from fompi.tuning.rounds import Figure, Row, alternate, median_interval, of_all_ranks

Array = np.ndarray[Any, Any]

FOMPI, SERIAL, KERNELS, MESSAGES = "fompi", "serial", "kernels alone", "messages alone"
PILOT_ROUNDS = 3

SLACK = 0.03
"""What may be exposed beyond the bound, as a share of T_m."""

INSTANT = Machine("no time", 0.0, 1.0, 1e30, 1e30, 0.0)


class Accelerator(Emulated):
    """The emulated accelerator of this rank, for all calls on `comms`. `serial`: a kernel waits for all messages."""

    def __init__(self, comms: Iterable[Communicator]):
        super().__init__(INSTANT)
        self.comms, self.serial, self.flops = [*comms], False, 0.0

    def use(self, flops_rate: float, serial: bool = False) -> None:
        self.machine = replace(INSTANT, flops_rate=flops_rate)
        self.serial = serial

    def spend(self, flops: float, nbytes: float = 0.0) -> None:
        self.flops += flops
        if self.serial:
            for comm in self.comms:
                while busy := [task for task in [*comm.channel.active.values()] if not task.finished]:
                    comm.engine.wait(busy[0], comm.channel)
        super().spend(flops, nbytes)

    def bind(self, kernel: str, reads: Any, writes: Any, read_dtypes: Any, write_dtypes: Any) -> Any:
        if kernel.startswith(("matmul", "gradient")):
            rows, columns = reads[0].shape[0], reads[1].shape[-1]
            self.flops += 2.0 * rows * columns * reads[0].shape[-1]
        return super().bind(kernel, reads, writes, read_dtypes, write_dtypes)

    @contextmanager
    def on(self) -> Iterator[None]:
        for comm in self.comms:
            comm.backend = self
        try:
            yield
        finally:
            for comm in self.comms:
                comm.backend = None


@dataclass
class Case:
    """A strategy: `call` runs it once. `bound(T_c, T_m)` are the seconds that must be exposed.

    `ratios` are those of `of`, in words. `t_m_over_t_c` translates such a ratio. `serial` is the call without overlap,
    if it is not `call` on an accelerator that waits for all messages.
    """

    what: str
    of: str
    ratios: Sequence[float]
    call: Callable[[], object]
    bound: Callable[[float, float], float]
    t_m_over_t_c: Callable[[float], float] = lambda ratio: ratio
    serial: Callable[[], object] | None = None
    close: Callable[[], object] = lambda: None


def rows(comm: Communicator, options: Options) -> list[Row]:
    measured_rows: list[Row] = []
    with Cluster(comm.link.comm) as cluster:
        accelerator = Accelerator([comm])
        with accelerator.on():
            for make in CASES:
                case = make(comm, accelerator)
                if case is not None:
                    ratios = case.ratios[:1] if options.quick else case.ratios
                    for ratio in options.each(ratios, partial(_title, case)):
                        measured_rows.append(measured(comm, cluster, accelerator, case, ratio, options.rounds))
                    case.close()
        more = {"pipelines": pipelines}
        if comm.size > 2 and comm.size % 2 == 0:
            more["data beside tensor parallelism"] = data_beside_tensor
        measured_rows += [more[name](comm, cluster, options.rounds) for name in options.each([*more])]
    return measured_rows


def _title(case: Case, ratio: float) -> str:
    return f"{case.what}, {case.of} = {ratio:g}"


def measured(
    comm: Communicator, cluster: Cluster, accelerator: Accelerator, case: Case, ratio: float, rounds: int
) -> Row:
    mpi = comm.link.comm

    def on(flops_rate: float, serial: bool, call: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            accelerator.use(flops_rate, serial)
            return call()

        return run

    def kernels() -> None:
        accelerator.spend(flops)

    instant = on(INSTANT.flops_rate, False, case.call)
    before = accelerator.flops
    instant()
    flops = accelerator.flops - before
    pilot = alternate(mpi, {MESSAGES: instant}, PILOT_ROUNDS, idle=cluster.idle)
    rate = flops * case.t_m_over_t_c(ratio) / median(pilot[MESSAGES])
    contestants = {
        FOMPI: on(rate, False, case.call),
        SERIAL: on(rate, True, case.serial or case.call),
        KERNELS: on(rate, False, kernels),
        MESSAGES: instant,
    }
    samples = alternate(mpi, contestants, rounds, idle=cluster.idle)
    row = Row(_title(case, ratio), str(cluster), samples, base=FOMPI)
    t_c, t_m = row.median(KERNELS), row.median(MESSAGES)
    bound = case.bound(t_c, t_m) / t_m
    exposed = [(t - c) / t_m for t, c in zip(samples[FOMPI], samples[KERNELS], strict=True)]
    figures = [
        Figure("exposed / messages", median(exposed), "", median_interval(exposed), most=bound + SLACK, limit=bound),
        row.ratio(SERIAL, FOMPI, limit=(t_c + t_m) / (t_c + bound * t_m)),
    ]
    if cluster.shared:
        figures = [replace(figure, most=None) for figure in figures]
    limits = {"kernels and bound": t_c + bound * t_m}
    return replace(row, limits=limits, figures=figures, progress=progress(comm), marks=["emulated accelerator"])


# ------------------------------------------------------------------------------------------------------------ bounds


def sent(compute: Sequence[float], send: Sequence[float]) -> float:
    """When all pieces are computed and then sent, in this order."""
    return makespan([Job(c, s) for c, s in zip(compute, send, strict=True)])


def received(receive: Sequence[float], compute: Sequence[float]) -> float:
    """When all pieces have been received and then used, in this order."""
    return makespan([Job(r, c) for r, c in zip(receive, compute, strict=True)])


def round_trip(receive: Sequence[float], compute: Sequence[float], send: Sequence[float]) -> float:
    """When all pieces are received, computed and sent back. All ranks do the same.

    The port out carries what the others receive first, and then what is sent back. A piece may need no message.
    """
    port_in = done = 0.0
    port_out = sum(receive)
    for r, c, s in zip(receive, compute, send, strict=True):
        port_in += r
        done = max(done, port_in if r else 0.0) + c
        port_out = max(port_out, done) + s if s else port_out
    return max(done, port_out)


# ------------------------------------------------------------------------------------------------------------- cases

BUCKETS, BUCKET_NBYTES = 8, 1 << 20
UNIT = 1e10
"""Operations of a forward of one bucket: so many that sums, at this speed, take no time."""


def zero_1(comm: Communicator, accelerator: Accelerator) -> Case:
    """ZeRO-1: sums behind the backward (b a bucket), gathers behind the forward (b / 2). g: one sum, and one gather.

    Bound: max over k of (the sums from k on, less the backward after k), and the same of the gathers.
    """
    names = [f"w{i}" for i in range(BUCKETS)]
    gradients = {name: np.ones(BUCKET_NBYTES // 4, np.float32) for name in names}
    dp = DataParallel(gradients, optimizer=SGD(1e-3), comm=comm, zero=1, bucket_nbytes=BUCKET_NBYTES)

    def step() -> None:
        for name in names:
            _ = dp[name]
            accelerator.spend(UNIT)
        for name in reversed(names):
            accelerator.spend(2 * UNIT)
            dp.ready(name, gradients[name])
        dp.step()

    def bound(t_c: float, t_m: float) -> float:
        forward, backward, message = t_c / 3 / BUCKETS, 2 * t_c / 3 / BUCKETS, t_m / 2 / BUCKETS
        sums = sent([backward] * BUCKETS, [message] * BUCKETS)
        gathers = received([message] * BUCKETS, [forward] * BUCKETS)
        return sums + gathers - t_c

    accelerator.comms += [dp._sums, dp._gathers]
    return Case("ZeRO-1", "g / b", (0.5, 0.9), step, bound, lambda r: 4 / 3 * r, close=dp.close)


ROWS, WIDTH, FEATURES = 1024, 2048, 1024
"""Rows of a rank, features that travel, and features of a rank in between."""


def tpsp_block(comm: Communicator, accelerator: Accelerator) -> Case:
    """An MLP: gather and product, product and reduce-scatter. Bound of each: T_m - (1 - 1/N) T_c, with whole pieces."""
    x = np.zeros((ROWS // comm.size, WIDTH), np.float32)
    w1, w2 = np.zeros((WIDTH, FEATURES), np.float32), np.zeros((FEATURES, WIDTH), np.float32)

    def call() -> None:
        row_parallel_linear(column_parallel_linear(x, w1, comm=comm), w2, comm=comm)

    def serial() -> None:
        h = product.on(comm, all_gather(x, comm=comm), w1)
        reduce_scatter(product.on(comm, h, w2), comm=comm)

    def bound(t_c: float, t_m: float) -> float:
        return max(0.0, t_m - (1 - 1 / comm.size / MOST_SLICES) * t_c)

    return Case("TP+SP block", "T_m / T_c", (0.56, 1.0), call, bound, serial=serial)


MOST_SLICES = 8
HEADS, HEAD_DIM, TOKENS = 8, 64, 2048


def query_split(comm: Communicator, accelerator: Accelerator) -> Case:
    """Attention with tensor parallelism: the reduce-scatter hides behind scores, values and output projection.

    Bound: that of the gather with the projections, and max(0, M - (1 - 1/N) (A + O)).
    """
    size, n = comm.size, HEADS * HEAD_DIM
    own = n // size
    x = np.zeros((TOKENS // size, n), np.float32)
    wq, wk, wv = (np.zeros((n, own), np.float32) for _ in range(3))
    wo = np.zeros((own, n), np.float32)
    options: dict[str, Any] = {"heads": HEADS, "kv_heads": HEADS}
    projections, scores, out = 6.0 * TOKENS * n * own, 4.0 * TOKENS**2 * own, 2.0 * TOKENS * n * own
    total = projections + scores + out

    def call() -> None:
        attention(x, wq, wk, wv, wo, comm=comm, **options)

    def serial() -> None:
        accelerator.spend(0)
        full = all_gather(x, comm=comm)
        for w in (wq, wk, wv):
            product.on(comm, full, w)
        accelerator.spend(scores)
        reduce_scatter(product.on(comm, np.zeros((TOKENS, own), np.float32), wo), comm=comm)

    def bound(t_c: float, t_m: float) -> float:
        first = t_m / 2 - (1 - 1 / size) * t_c * projections / total
        last = t_m / 2 - (1 - 1 / size) * t_c * (scores + out) / total
        return max(0.0, first) + max(0.0, last)

    return Case("attention, query split", "T_m / T_c", (0.5,), call, bound, serial=serial)


def _qkv(comm: Communicator, tokens: int) -> list[Array]:
    return [np.zeros((tokens // comm.size, HEADS, HEAD_DIM), np.float32) for _ in range(3)]


def ring(comm: Communicator, accelerator: Accelerator) -> Case:
    """Ring attention, forward: N blocks of keys and values. Bound: (N - 1) (k - a) where a block travels longer."""
    q, k, v = _qkv(comm, TOKENS)
    sharding, size = Sharding(TOKENS, ring=comm.size), comm.size

    def call() -> None:
        ring_attention(q, k, v, sharding, comm=comm)

    def bound(t_c: float, t_m: float) -> float:
        block = t_m / (size - 1)
        return received([0.0, *[block] * (size - 1)], [t_c / size] * size) - t_c

    return Case("ring attention", "k / a", (0.5, 1.0, 1.3), call, bound, lambda r: r * (size - 1) / size)


def ring_backward(comm: Communicator, accelerator: Accelerator) -> Case:
    """Ring attention, backward: keys and values travel N - 1 times, their gradients N times. k: both, one step.

    Bound: the last gradients travel home behind nothing; before that a step takes the longer of a and k.
    """
    q, k, v = _qkv(comm, TOKENS)
    sharding, size = Sharding(TOKENS, ring=comm.size), comm.size
    o, saved = ring_attention.forward(q, k, v, sharding, comm=comm)

    def call() -> None:
        ring_attention.backward(saved, o)

    def bound(t_c: float, t_m: float) -> float:
        hop, a = t_m / (2 * size - 1), t_c / size
        return received([0.0, hop, *[2 * hop] * (size - 2)], [a] * size) + hop - t_c

    return Case(
        "ring attention, backward", "k / a", (0.5, 1.0, 1.3), call, bound, lambda r: r * (2 * size - 1) / 2 / size
    )


def ulysses(comm: Communicator, accelerator: Accelerator) -> Case:
    """Ulysses: the attention begins with the tokens that are there; the results of a rank leave once they are complete.

    Bound: the flow of the N x N pieces of queries and keys through the port in, the attention and the port out.
    """
    return _ulysses(comm, "Ulysses attention")


def ulysses_pairs(comm: Communicator, accelerator: Accelerator) -> Case | None:
    """Ulysses in pairs of ranks, all at once. Bound: the same, with N = 2."""
    if comm.size == 2 or comm.size % 2:
        return None
    mesh = _computes_on(accelerator, Mesh(comm, pairs=comm.size // 2, ulysses=2))
    return replace(_ulysses(mesh["ulysses"], "Ulysses attention, N = 2"), close=mesh.close)


def _computes_on(accelerator: Accelerator, mesh: Mesh) -> Mesh:
    """The mesh, whose axes compute on the accelerator."""
    accelerator.comms += mesh.values()
    for axis in mesh.values():
        axis.backend = accelerator
    return mesh


def _ulysses(comm: Communicator, what: str) -> Case:
    q, k, v = _qkv(comm, TOKENS)
    sharding, size = Sharding(TOKENS, ulysses=comm.size), comm.size

    def call() -> None:
        ulysses_attention(q, k, v, sharding, comm=comm)

    def bound(t_c: float, t_m: float) -> float:
        piece, arrive, leave = t_c / size**2, 0.75 * t_m / (size - 1), 0.25 * t_m / (size - 1)
        receive = [0.0, *[arrive] * (size - 1), *[0.0] * (size - 1)]
        compute = [(2 * i + 1) * piece for i in range(size - 1)] + [size * piece, *[piece] * (size - 1)]
        send = [0.0] * (size - 1) + [leave] * (size - 1) + [0.0]
        return round_trip(receive, compute, send) - t_c

    return Case(what, "T_m / T_c", (0.5, 1.0), call, bound)


def usp(comm: Communicator, accelerator: Accelerator) -> Case | None:
    """Ulysses between two ranks, a ring round the others, whose links may be slower.

    Bound: the messages of Ulysses, measured alone, and the ring's own bound for the others.
    """
    if comm.size % 2:
        return None
    mesh = _computes_on(accelerator, Mesh(comm, ring=comm.size // 2, ulysses=2))
    q, k, v = _qkv(comm, TOKENS)
    around, sharding = comm.size // 2, Sharding(TOKENS, ring=comm.size // 2, ulysses=2)

    def call() -> None:
        usp_attention(q, k, v, sharding, ring=mesh["ring"], ulysses=mesh["ulysses"])

    def inner() -> None:
        ulysses_attention(q, k, v, Sharding(TOKENS // around, ulysses=2), comm=mesh["ulysses"])

    accelerator.use(INSTANT.flops_rate)
    alone = alternate(comm.link.comm, {"ulysses": inner, "both": call}, PILOT_ROUNDS, idle=IDLE_SECONDS)
    share = min(1.0, median(alone["ulysses"]) / median(alone["both"]))

    def bound(t_c: float, t_m: float) -> float:
        across = t_m * share
        step = (t_m - across) / max(around - 1, 1)
        return across + received([0.0, *[step] * (around - 1)], [t_c / around] * around) - t_c

    return Case(f"USP {around}x2", "T_m / T_c", (0.5,), call, bound, close=mesh.close)


EXPERTS, HIDDEN, FFN, CHOSEN = 8, 512, 1024, 2


def experts(comm: Communicator, accelerator: Accelerator) -> Case:
    """A mixture of experts, evenly used: half of the own rows first, half last, those of other ranks as they arrive.

    Bound: the flow of these pieces through the port in, the experts and the port out.
    """
    size, own = comm.size, len(experts_of(comm.rank, comm.size, EXPERTS))
    router, at = np.eye(HIDDEN, EXPERTS, dtype=np.float32), np.arange(ROWS)
    x = np.zeros((ROWS, HIDDEN), np.float32)
    x[at, at % EXPERTS], x[at, (at + 1) % EXPERTS] = 2.0, 1.0  # the same work for all experts
    w1, w2 = np.zeros((own, HIDDEN, FFN), np.float32), np.zeros((own, FFN, HIDDEN), np.float32)

    def call() -> None:
        moe(x, router, w1, w2, k=CHOSEN, comm=comm)

    def bound(t_c: float, t_m: float) -> float:
        arrive = [0.0, *[t_m / 2 / (size - 1)] * (size - 1), 0.0]
        compute = [t_c / size / 2, *[t_c / size] * (size - 1), t_c / size / 2]
        return round_trip(arrive, compute, arrive) - t_c

    return Case("mixture of experts", "(Md + Mc) / G", (0.4, 0.6, 0.8, 1.0), call, bound)


CASES: tuple[Callable[[Communicator, Accelerator], Case | None], ...] = (
    zero_1,
    tpsp_block,
    query_split,
    ring,
    ring_backward,
    ulysses,
    ulysses_pairs,
    usp,
    experts,
)


# ---------------------------------------------------------------------------------------------------- two axes at once

LAYERS, GRADIENT_NBYTES = 8, 2 << 20
ALONE, FIRST_COME, IN_ORDER = "tensor alone", "with data, first come", "with data, priorities"
MOST_BEYOND_ALONE = 1.05


def data_beside_tensor(comm: Communicator, cluster: Cluster, rounds: int) -> Row:
    """A backward of TP+SP blocks, T_m = T_c. After each block data parallelism sums the gradients of its layer.

    The time is that of the blocks. What data parallelism exposes after the last of them does not count. Exposed is what
    is beyond the kernels. Alone is the same step with data parallelism of one rank, which moves nothing.
    """
    plain = Mesh(comm, dp=comm.size // 2, tp=2)
    ordered = Mesh(comm, priority=("tp", "dp"), dp=comm.size // 2, tp=2)
    own = comm.split(comm.rank, 0, "own")
    accelerator = Accelerator([own, *plain.values(), *ordered.values()])
    names = [f"w{i}" for i in range(LAYERS)]
    gradients = {name: np.ones(GRADIENT_NBYTES // 4, np.float32) for name in names}
    x = np.zeros((ROWS // 2, WIDTH), np.float32)
    w1, w2 = np.zeros((WIDTH, FEATURES), np.float32), np.zeros((FEATURES, WIDTH), np.float32)

    def step(tp: Communicator, dp: DataParallel) -> float:
        seconds = 0.0
        for name in reversed(names):
            begun = perf_counter()
            row_parallel_linear(column_parallel_linear(x, w1, comm=tp), w2, comm=tp)
            seconds += perf_counter() - begun
            dp.ready(name, gradients[name])
        dp.step()
        for name in names:
            _ = dp[name]
        return seconds

    with accelerator.on():
        dps = [
            DataParallel(gradients, optimizer=SGD(1e-3), comm=axis, zero=1, bucket_nbytes=GRADIENT_NBYTES)
            for axis in (own, plain["dp"], ordered["dp"])
        ]
        contestants = {
            ALONE: partial(step, plain["tp"], dps[0]),
            FIRST_COME: partial(step, plain["tp"], dps[1]),
            IN_ORDER: partial(step, ordered["tp"], dps[2]),
        }
        samples: dict[str, list[float]] = {name: [] for name in contestants}

        def note(name: str, seconds: float) -> None:
            samples[name].append(float(of_all_ranks(comm.link.comm, np.array([seconds])).max()))

        mpi, before = comm.link.comm, accelerator.flops
        contestants[ALONE]()
        flops = accelerator.flops - before
        alternate(mpi, {ALONE: contestants[ALONE]}, PILOT_ROUNDS, idle=cluster.idle, after=note)
        t_m = median(samples.pop(ALONE)[-PILOT_ROUNDS:])
        samples[ALONE] = []
        accelerator.use(flops / t_m)
        alternate(mpi, contestants, rounds, idle=cluster.idle, after=note)
    for dp in dps:
        dp.close()
    for communicator in (own, plain, ordered):
        communicator.close()
    samples = {name: samples[name][-rounds:] for name in contestants}
    exposed = {name: median(taken) - t_m for name, taken in samples.items()}
    figures = [
        Figure(f"exposed, {FIRST_COME} / alone", exposed[FIRST_COME] / exposed[ALONE]),
        Figure(f"exposed, {IN_ORDER} / alone", exposed[IN_ORDER] / exposed[ALONE], most=MOST_BEYOND_ALONE, limit=1.0),
    ]
    if cluster.shared:
        figures = [replace(figure, most=None) for figure in figures]
    return Row(
        f"data beside tensor parallelism, {comm.size // 2} x 2, T_m / T_c = 1",
        str(cluster),
        samples,
        base=ALONE,
        limits={"kernels": t_m},
        figures=figures,
        progress=progress(comm),
        marks=["emulated accelerator"],
    )


# --------------------------------------------------------------------------------------------------------- pipelines

STAGE_SECONDS = {"F": 0.010, "B": 0.020, "I": 0.010, "W": 0.010}
MICROBATCHES, CHUNKS = 8, 2
ACTIVATION = (256, 256)
MOST_BEYOND_FORMULA = 1.03


class _Stage:
    """A stage whose kernels only take time. It hands on what it was given."""

    def __init__(self, width: int):
        self.array = np.zeros((ACTIVATION[0], width), np.float32)

    def forward(self, x: Array) -> tuple[Array, None]:
        return self.array, None

    def backward(self, saved: None, dy: Array) -> Array:
        return self.array

    def backward_input(self, saved: None, dy: Array) -> tuple[Array, None]:
        return self.array, None

    def backward_weight(self, rest: None) -> None:
        pass


def formula(schedule: str, p: int, m: int, c: float, chunks: int = 1) -> float:
    """Seconds of a step on the busiest rank, with messages of c seconds (docs/concepts/strategies.md)."""
    f, b, i, w = (STAGE_SECONDS[kind] for kind in "FBIW")
    if schedule == "interleaved":  # a chunk has 1 / chunks of the work
        return m * (f + b) + (p - 1) * (f + b) / chunks + 2 * (p * chunks - 1) * c
    bubble = {"zb-h1": f + i - w, "zb-h2": f + i - 2 * w}.get(schedule, f + b)
    messages = {"1f1b": 2 * (p - 1) * m / p + 2 * (p - 2), "zb-h1": 4 * (p - 1)}.get(schedule, 2 * (p - 1))
    return m * (f + b) + (p - 1) * bubble + messages * c


def pipelines(comm: Communicator, cluster: Cluster, rounds: int) -> Row:
    """All schedules of a pipeline, each with what its formula says. The time is that of the busiest rank's kernels."""
    mpi, size = comm.link.comm, comm.size
    spans: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    inputs = [np.zeros(ACTIVATION, np.float32)] * MICROBATCHES
    pipes = {}
    for name in SCHEDULES:
        chunks = CHUNKS if name == "interleaved" else 1
        pipes[name] = Pipeline(
            [_Stage(ACTIVATION[1]) for _ in range(chunks)],
            comm=comm,
            microbatches=MICROBATCHES,
            schedule=name,
            activations=ACTIVATION,
            loss=lambda y, target: (0.0, y),
            seconds={kind: s / chunks for kind, s in STAGE_SECONDS.items()},
            backend=Emulated(INSTANT),
        )

    def note(name: str, _: object) -> None:
        kernels = [e for e in pipes[name].trace.events if e.is_compute and e.rank == comm.rank]
        span = np.array([max(e.end for e in kernels) - min(e.start for e in kernels)])
        spans[name].append(float(of_all_ranks(mpi, span).max()))

    def hop() -> None:
        cluster.exchange(int(np.prod(ACTIVATION)) * 4)

    calls: dict[str, Callable[[], object]] = {name: partial(pipe.step, inputs, inputs) for name, pipe in pipes.items()}
    alternate(mpi, calls, rounds, idle=cluster.idle, after=note)
    c = 0.0 if cluster.shared else median(alternate(mpi, {"hop": hop}, PILOT_ROUNDS, idle=cluster.idle)["hop"])
    samples = {name: spans[name][-rounds:] for name in SCHEDULES}
    figures, predicted = [], {}
    for name, pipe in pipes.items():
        predicted[name] = formula(name, size, MICROBATCHES, c, CHUNKS if name == "interleaved" else 1)
        most = None if cluster.shared else MOST_BEYOND_FORMULA
        figures.append(Figure(f"{name}: time / formula", median(samples[name]) / predicted[name], most=most, limit=1.0))
        pipe.close()
    what = f"pipeline, {size} stages, {MICROBATCHES} micro-batches, a message {1e3 * c:.1f} ms"
    return Row(
        what,
        str(cluster),
        samples,
        predicted=predicted,
        figures=figures,
        progress=progress(comm),
        marks=["emulated accelerator"],
    )
