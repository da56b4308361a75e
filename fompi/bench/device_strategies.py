"""Strategies and whole steps on a device: mpirun -n 2 python -m fompi bench parallel --device cuda

Every row compares a strategy with its own kernels alone, with its messages alone, and with both one after the other
(`serial`), in interleaved rounds. A time lasts from the call to the end of the last kernel of the slowest rank. The
bound of what must be exposed is that of the same strategy on the host (`fompi.bench.strategies`), of the T_c and T_m
that were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import fompi
from fompi.backends.numbers import for_numpy, product
from fompi.bench.cluster import TcpHosts
from fompi.bench.collectives import progress
from fompi.bench.device import Bench, finished
from fompi.bench.options import Options
from fompi.bench.strategies import (
    BUCKETS,
    CHOSEN,
    FOMPI,
    KERNELS,
    MESSAGES,
    MOST_SLICES,
    SERIAL,
    Bound,
    block_bound,
    experts_bound,
    ring_bound,
    ulysses_bound,
    with_bound,
    zero_1_bound,
)
from fompi.engine.communicator import Communicator
from fompi.parallel.attention import Rule, attend
from fompi.parallel.data import SGD, DataParallel
from fompi.parallel.expert import experts_of, moe
from fompi.parallel.pipeline import Pipeline
from fompi.parallel.sequence import Sharding, ring_attention, ulysses_attention
from fompi.parallel.tensor import column_parallel_linear, row_parallel_linear
from fompi.tuning.rounds import Row, alternate

Call = Callable[[], object]


class Dimensions(NamedTuple):
    """`rows` of a rank, `width` and `hidden` features, `tokens` of all ranks, `heads` of `head_dim`."""

    rows: int
    width: int
    hidden: int
    tokens: int
    heads: int
    head_dim: int
    microbatches: int = 8


SIZES = {False: Dimensions(4096, 4096, 4096, 8192, 16, 128), True: Dimensions(512, 1024, 1024, 2048, 8, 64)}
"""Those of a GPU, by `--quick`."""

SOFTWARE_SIZES = Dimensions(16, 32, 32, 64, 8, 8)


@dataclass
class DeviceStrategy:
    """A strategy on a device. `kernels` are those that it launches, `messages` what it moves, each without the other.

    `bound(T_c, T_m)` are the seconds that must be exposed.
    """

    what: str
    call: Call
    kernels: Call
    messages: Call
    bound: Bound
    held: AbstractContextManager[Any] = field(default_factory=nullcontext)


def rows(comm: Communicator, options: Options, bench: Bench, suite: str) -> list[Row]:
    """The rows of `parallel` or `step`."""
    sizes = SOFTWARE_SIZES if bench.is_software else SIZES[options.quick]
    found = []
    with TcpHosts(comm.link.comm) as cluster:
        for make in options.each(CASES[suite], lambda f: f.__name__.replace("_", " ")):
            case = make(comm, bench, sizes)
            with case.held:
                found.append(measured(comm, cluster, bench, case, options.rounds))
    return found


def measured(comm: Communicator, cluster: TcpHosts, bench: Bench, case: DeviceStrategy, rounds: int) -> Row:
    def serial() -> None:
        finished(bench.device, case.messages, comm.engine.timeout)()
        case.kernels()

    calls: dict[str, Call] = {FOMPI: case.call, SERIAL: serial, KERNELS: case.kernels, MESSAGES: case.messages}
    timed = {name: finished(bench.device, call, comm.engine.timeout) for name, call in calls.items()}
    for call in timed.values():  # what is compiled and bound stays
        call()
    samples = alternate(comm.link.comm, timed, rounds, idle=cluster.idle)
    row = Row(case.what, bench.setup(comm, cluster), samples, base=FOMPI, progress=progress(comm), marks=bench.marks)
    return with_bound(row, case.bound)


# ------------------------------------------------------------------------------------------------------- parallel


def _attention(q: Any, k: Any, v: Any) -> None:
    """The attention of a rank over keys that it has, as the strategies compute it."""
    attend(q, k, v, range(q.shape[1]), np.arange(len(q)), np.arange(len(k)), Rule())


def tensor_parallel_block(comm: Communicator, bench: Bench, sizes: Dimensions) -> DeviceStrategy:
    """An MLP: gather and product, product and reduce-scatter."""
    own = sizes.rows // comm.size * comm.size  # of all ranks
    x, full = bench.drawn(own // comm.size, sizes.width), bench.drawn(own, sizes.width)
    w1, w2 = bench.drawn(sizes.width, sizes.hidden), bench.drawn(sizes.hidden, sizes.width)

    def call() -> None:
        row_parallel_linear(column_parallel_linear(x, w1, comm=comm), w2, comm=comm)

    def messages() -> None:
        fompi.all_gather(x, comm=comm)
        fompi.reduce_scatter(full, comm=comm)

    def kernels() -> None:
        product(product(full, w1), w2)

    return DeviceStrategy("TP+SP block", call, kernels, messages, block_bound(comm.size, MOST_SLICES))


def ring(comm: Communicator, bench: Bench, sizes: Dimensions) -> DeviceStrategy:
    """Ring attention, forward: the blocks of keys and values go round."""
    tokens = sizes.tokens // comm.size
    q, k, v = (bench.drawn(tokens, sizes.heads, sizes.head_dim) for _ in range(3))
    sharding, right, left = Sharding(tokens * comm.size, ring=comm.size), comm.rank + 1, comm.rank - 1

    def messages() -> None:
        for _ in range(comm.size - 1):
            for block in (k, v):
                fompi.sendrecv(block, right % comm.size, left % comm.size, comm=comm)

    def kernels() -> None:
        for _ in range(comm.size):
            _attention(q, k, v)

    call = partial(ring_attention, q, k, v, sharding, comm=comm)
    return DeviceStrategy("ring attention", call, kernels, messages, ring_bound(comm.size))


def ulysses(comm: Communicator, bench: Bench, sizes: Dimensions) -> DeviceStrategy:
    """Ulysses: all tokens of some heads, and back."""
    size, heads = comm.size, sizes.heads // comm.size * comm.size
    tokens = sizes.tokens // size
    q, k, v = (bench.drawn(tokens, heads, sizes.head_dim) for _ in range(3))
    own = [bench.drawn(tokens * size, heads // size, sizes.head_dim) for _ in range(3)]

    def messages() -> None:
        for x in (q, k, v):
            fompi.all_to_all(x, split_dim=1, concat_dim=0, comm=comm)
        fompi.all_to_all(own[0], split_dim=0, concat_dim=1, comm=comm)

    call = partial(ulysses_attention, q, k, v, Sharding(tokens * size, ulysses=size), comm=comm)
    return DeviceStrategy("Ulysses attention", call, partial(_attention, *own), messages, ulysses_bound(size))


def mixture_of_experts(comm: Communicator, bench: Bench, sizes: Dimensions) -> DeviceStrategy:
    """Experts that all get equally many rows. Alone, a rank computes as many rows with its own experts."""
    size, count = comm.size, 4 * comm.size
    own = len(experts_of(comm.rank, size, count))
    number = sizes.rows // count * count
    x, router = np.zeros((number, sizes.width), np.float32), np.eye(sizes.width, count, dtype=np.float32)
    at = np.arange(number)
    x[at, at % count] = x[at, (at + 1) % count] = 2.0
    tensors = [bench.up(x), bench.up(router)]
    weights = [bench.drawn(own, sizes.width, sizes.hidden), bench.drawn(own, sizes.hidden, sizes.width)]
    alone, rows_of_peers = comm.split(comm.rank, 0, "alone"), bench.drawn(number * CHOSEN // size * size, sizes.width)
    x[:] = 0.0
    x[at, at % own] = x[at, (at + 1) % own] = 2.0
    local = [bench.up(x), bench.up(np.ascontiguousarray(np.eye(sizes.width, own, dtype=np.float32)))]

    def messages() -> None:
        for _ in range(2):  # to the experts, and back
            fompi.all_to_all(rows_of_peers, comm=comm)

    call = partial(moe, *tensors, *weights, k=CHOSEN, comm=comm)
    kernels = partial(moe, *local, *weights, k=CHOSEN, comm=alone)
    return DeviceStrategy("mixture of experts", call, kernels, messages, experts_bound(size), alone)


# ----------------------------------------------------------------------------------------------------------- step


def data_parallel(comm: Communicator, bench: Bench, sizes: Dimensions) -> DeviceStrategy:
    """A forward, a backward and an update with ZeRO-1: a bucket for each layer."""
    weights = {f"w{i}": bench.drawn(sizes.width, sizes.width, seed=i) for i in range(BUCKETS)}
    nbytes = 4 * sizes.width**2
    dp = DataParallel(weights, optimizer=SGD(1e-6), comm=comm, zero=1, bucket_nbytes=nbytes)
    x = bench.drawn(sizes.rows, sizes.width)
    gradient, shard = bench.drawn(nbytes // 4), bench.drawn(nbytes // 4 // comm.size)

    def messages() -> None:
        for _ in range(BUCKETS):
            fompi.reduce_scatter(gradient, comm=comm)
        for _ in range(BUCKETS):
            fompi.all_gather(shard, comm=comm)

    def call() -> None:
        _layers(x, dp.__getitem__, dp.ready)
        dp.step()

    def kernels() -> None:
        _layers(x, weights.__getitem__, lambda name, dw: None)

    return DeviceStrategy("a step with ZeRO-1", call, kernels, messages, zero_1_bound, dp)


def _layers(x: Any, weight: Callable[[str], Any], ready: Callable[[str, Any], object]) -> None:
    """A forward and a backward of products. The gradient of each is ready at once."""
    kept = []
    for i in range(BUCKETS):
        w = for_numpy(weight(f"w{i}"))
        kept.append((x, w))
        x = product(x, w)
    dy = x
    for i in reversed(range(BUCKETS)):
        x, w = kept.pop()
        dw = product(x.T, dy)
        dy = product(dy, w.T)
        ready(f"w{i}", dw)


class ProductStage:
    """A stage: a product. Its backward is two."""

    def __init__(self, w: Any):
        self.w = w

    def forward(self, x: Any) -> tuple[Any, Any]:
        return product(x, self.w), x

    def backward(self, saved: Any, dy: Any) -> Any:
        product(saved.T, dy)
        return product(dy, self.w.T)


def pipeline(comm: Communicator, bench: Bench, sizes: Dimensions) -> DeviceStrategy:
    """1F1B with a product in each stage. Bound: the bubble, (N - 1) / microbatches of the kernels."""
    count, shape = sizes.microbatches, (sizes.rows, sizes.width)
    stage = ProductStage(bench.drawn(sizes.width, sizes.width))
    x, dy = bench.drawn(*shape), bench.drawn(*shape)
    pipe = Pipeline(
        [stage],
        comm=comm,
        microbatches=count,
        activations=shape,
        loss=lambda y, target: (0.0, target),
        device=bench.device,
    )
    first, last = comm.rank == 0, comm.rank == comm.size - 1

    def messages() -> None:
        for _ in range(count):
            fompi.sendrecv(x, None if last else comm.rank + 1, None if first else comm.rank - 1, comm=comm)
            fompi.sendrecv(dy, None if first else comm.rank - 1, None if last else comm.rank + 1, comm=comm)

    def kernels() -> None:
        for _ in range(count):
            stage.backward(stage.forward(x)[1], dy)

    def bound(t_c: float, t_m: float) -> float:
        return (comm.size - 1) / count * t_c

    call = partial(pipe.step, [x] * count if first else None, [dy] * count if last else None)
    return DeviceStrategy(f"a step of a pipeline, {count} micro-batches", call, kernels, messages, bound, pipe)


CASES: dict[str, Sequence[Callable[[Communicator, Bench, Dimensions], DeviceStrategy]]] = {
    "parallel": (tensor_parallel_block, ring, ulysses, mixture_of_experts),
    "step": (data_parallel, pipeline),
}
