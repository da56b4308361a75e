"""The strategies that `fompi bench parallel` measures, each with the bound of what must be exposed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from fompi.backends.numbers import product
from fompi.base.layout import split
from fompi.bench.accelerator import INSTANT, PILOT_ROUNDS, Accelerator
from fompi.bench.cluster import IDLE_SECONDS
from fompi.bench.kernels import spend
from fompi.engine.communicator import Communicator
from fompi.engine.mesh import Mesh
from fompi.model.flow_shop import Job, makespan
from fompi.ops.operations import (
    all_gather,
    all_to_all,
    all_to_all_columns_matmul,
    matmul_all_to_all_columns,
    reduce_scatter,
)
from fompi.parallel.data import SGD, DataParallel
from fompi.parallel.expert import experts_of, moe
from fompi.parallel.sequence import Sharding, ring_attention, ulysses_attention, usp_attention
from fompi.parallel.tensor import attention, column_parallel_linear, row_parallel_linear
from fompi.parallel.turns import interleave
from fompi.tuning.rounds import Figure, Row, alternate, median_interval

Array = np.ndarray[Any, Any]

FOMPI, SERIAL, KERNELS, MESSAGES = "fompi", "serial", "kernels alone", "messages alone"
"""The contestants of a strategy."""


@dataclass
class StrategyCase:
    """A strategy: `call` runs it once. `bound(T_c, T_m)` are the seconds that must be exposed.

    `ratios` are those of `of`, in words. `t_m_over_t_c` translates such a ratio. `serial` is the call without overlap,
    if it is not `call` on an accelerator that waits for all messages.
    """

    what: str
    of: str
    ratios: Sequence[float]
    call: Callable[[], object]
    bound: Bound
    t_m_over_t_c: Callable[[float], float] = lambda ratio: ratio
    serial: Callable[[], object] | None = None
    close: Callable[[], object] = lambda: None
    slack: float = 0.03
    """What may be exposed beyond the bound, as a share of T_m."""


def with_bound(row: Row, bound: Bound, slack: float | None = None) -> Row:
    """The row of a strategy with its bound: what is exposed beyond it, at most `slack`, and the gain over `serial`."""
    t_c, t_m = row.median(KERNELS), row.median(MESSAGES)
    exposed = [(t - c) / t_m for t, c in zip(row.samples[FOMPI], row.samples[KERNELS], strict=True)]
    seconds = bound(t_c, t_m)
    limit, most = seconds / t_m, None if slack is None else seconds / t_m + slack
    figures = [
        Figure("exposed / messages", median(exposed), "", median_interval(exposed), most=most, limit=limit),
        row.ratio(SERIAL, FOMPI, limit=(t_c + t_m) / (t_c + seconds)),
    ]
    return replace(row, limits={"kernels and bound": t_c + seconds}, figures=figures)


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


Bound = Callable[[float, float], float]
"""The seconds that must be exposed, of T_c and T_m: the kernels alone, and the messages alone."""


def zero_1_bound(t_c: float, t_m: float) -> float:
    """The sums behind the backward, and the gathers behind the forward. Each bucket has its part of both."""
    forward, backward, message = t_c / 3 / BUCKETS, 2 * t_c / 3 / BUCKETS, t_m / 2 / BUCKETS
    sums = sent([backward] * BUCKETS, [message] * BUCKETS)
    gathers = received([message] * BUCKETS, [forward] * BUCKETS)
    return sums + gathers - t_c


def block_bound(size: int, slices: int) -> Bound:
    """An operation with one product, in slices: one slice of one shard is behind nothing, or before nothing."""
    return lambda t_c, t_m: max(0.0, t_m - (1 - 1 / size / slices) * t_c)


def ring_bound(size: int) -> Bound:
    """The blocks arrive behind each other, the first one is here."""
    return lambda t_c, t_m: received([0.0, *[t_m / (size - 1)] * (size - 1)], [t_c / size] * size) - t_c


def ulysses_bound(size: int) -> Bound:
    """The flow of size x size pieces of queries and keys through the port in, the attention and the port out."""

    def bound(t_c: float, t_m: float) -> float:
        piece, arrive, leave = t_c / size**2, 0.75 * t_m / (size - 1), 0.25 * t_m / (size - 1)
        receive = [0.0, *[arrive] * (size - 1), *[0.0] * (size - 1)]
        compute = [(2 * i + 1) * piece for i in range(size - 1)] + [size * piece, *[piece] * (size - 1)]
        send = [0.0] * (size - 1) + [leave] * (size - 1) + [0.0]
        return round_trip(receive, compute, send) - t_c

    return bound


def experts_bound(size: int) -> Bound:
    """Half of the own rows first, half last, those of other ranks as they arrive."""

    def bound(t_c: float, t_m: float) -> float:
        arrive = [0.0, *[t_m / 2 / (size - 1)] * (size - 1), 0.0]
        compute = [t_c / size / 2, *[t_c / size] * (size - 1), t_c / size / 2]
        return round_trip(arrive, compute, arrive) - t_c

    return bound


# ------------------------------------------------------------------------------------------------------------- cases

BUCKETS, BUCKET_NBYTES = 8, 1 << 20
UNIT = 1e10
"""Operations of a forward of one bucket: enough that sums, at this speed, take no time."""


def zero_1(comm: Communicator, accelerator: Accelerator) -> StrategyCase:
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

    accelerator.comms += [dp._sums, dp._gathers]
    return StrategyCase("ZeRO-1", "g / b", (0.5, 0.9), step, zero_1_bound, lambda r: 4 / 3 * r, close=dp.close)


ROWS, WIDTH, FEATURES = 1024, 2048, 1024
"""Rows of a rank, features that travel, and features of a rank in between."""


def tpsp_block(comm: Communicator, accelerator: Accelerator) -> StrategyCase:
    """An MLP: gather and product, product and reduce-scatter. Bound of each: T_m - (1 - 1/N) T_c, with whole pieces."""
    x = np.zeros((ROWS // comm.size, WIDTH), np.float32)
    w1, w2 = np.zeros((WIDTH, FEATURES), np.float32), np.zeros((FEATURES, WIDTH), np.float32)

    def call() -> None:
        row_parallel_linear(column_parallel_linear(x, w1, comm=comm), w2, comm=comm)

    def serial() -> None:
        h = spend(accelerator, product, all_gather(x, comm=comm), w1)
        reduce_scatter(spend(accelerator, product, h, w2), comm=comm)

    bound = block_bound(comm.size, MOST_SLICES)
    return StrategyCase("TP+SP block", "T_m / T_c", (0.56, 1.0), call, bound, serial=serial)


MOST_SLICES = 8
HEADS, HEAD_DIM, TOKENS = 8, 64, 2048


def query_split(comm: Communicator, accelerator: Accelerator) -> StrategyCase:
    """Attention with tensor parallelism: the reduce-scatter hides behind scores, values and output projection.

    Bound: that of the gather with the projections, and max(0, M - (1 - 1/N) (A + O)).
    """
    size, n = comm.size, HEADS * HEAD_DIM
    own = n // size
    x = np.zeros((TOKENS // size, n), np.float32)
    wq, wk, wv = (np.zeros((n, own), np.float32) for _ in range(3))
    wo = np.zeros((own, n), np.float32)
    projections, scores, out = 6.0 * TOKENS * n * own, 4.0 * TOKENS**2 * own, 2.0 * TOKENS * n * own
    total = projections + scores + out

    call = partial(attention, x, wq, wk, wv, wo, comm=comm, heads=HEADS, kv_heads=HEADS)

    def serial() -> None:
        accelerator.spend(0)
        full = all_gather(x, comm=comm)
        for w in (wq, wk, wv):
            spend(accelerator, product, full, w)
        accelerator.spend(scores)
        reduce_scatter(spend(accelerator, product, np.zeros((TOKENS, own), np.float32), wo), comm=comm)

    def bound(t_c: float, t_m: float) -> float:
        first = t_m / 2 - (1 - 1 / size) * t_c * projections / total
        last = t_m / 2 - (1 - 1 / size) * t_c * (scores + out) / total
        return max(0.0, first) + max(0.0, last)

    return StrategyCase("attention, query split", "T_m / T_c", (0.5,), call, bound, serial=serial)


def _qkv(comm: Communicator, tokens: int) -> list[Array]:
    return [np.zeros((tokens // comm.size, HEADS, HEAD_DIM), np.float32) for _ in range(3)]


def ring(comm: Communicator, accelerator: Accelerator) -> StrategyCase:
    """Ring attention, forward: N blocks of keys and values. Bound: (N - 1) (k - a) where a block travels longer."""
    q, k, v = _qkv(comm, TOKENS)
    sharding, size = Sharding(TOKENS, ring=comm.size), comm.size

    call = partial(ring_attention, q, k, v, sharding, comm=comm)
    return StrategyCase(
        "ring attention", "k / a", (0.5, 1.0, 1.3), call, ring_bound(size), lambda r: r * (size - 1) / size
    )


def ring_backward(comm: Communicator, accelerator: Accelerator) -> StrategyCase:
    """Ring attention, backward: keys and values travel N - 1 times, their gradients N times. k: both, one step.

    Bound, with whole blocks: the last gradients travel home behind nothing; before that a step takes the longer of a
    and k. fompi cuts the last ones into parts of the heads, so that less can be exposed.
    """
    q, k, v = _qkv(comm, TOKENS)
    sharding, size = Sharding(TOKENS, ring=comm.size), comm.size
    o, saved = ring_attention.forward(q, k, v, sharding, comm=comm)

    def bound(t_c: float, t_m: float) -> float:
        hop, a = t_m / (2 * size - 1), t_c / size
        return received([0.0, hop, *[2 * hop] * (size - 2)], [a] * size) + hop - t_c

    call = partial(ring_attention.backward, saved, o)
    return StrategyCase(
        "ring attention, backward", "k / a", (0.5, 1.0, 1.3), call, bound, lambda r: r * (2 * size - 1) / 2 / size
    )


def ulysses(comm: Communicator, accelerator: Accelerator) -> StrategyCase:
    """Ulysses: the attention begins with the tokens that are there; the results of a rank leave once they are complete.

    Bound, with all heads of a rank at once: the flow of the N x N pieces of queries and keys through the port in, the
    attention and the port out. fompi cuts the heads into slices, so that less can be exposed.
    """
    return _ulysses(comm, "Ulysses attention")


def ulysses_pairs(comm: Communicator, accelerator: Accelerator) -> StrategyCase | None:
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


def _ulysses(comm: Communicator, what: str) -> StrategyCase:
    q, k, v = _qkv(comm, TOKENS)
    sharding = Sharding(TOKENS, ulysses=comm.size)
    call = partial(ulysses_attention, q, k, v, sharding, comm=comm)
    return StrategyCase(what, "T_m / T_c", (0.5, 1.0), call, ulysses_bound(comm.size))


DEALT: dict[str, Any] = {"schedule": "direct", "slices": 4}
"""How the projections of Ulysses run here: on four hosts it hides more than whole pieces do."""


def ulysses_projections(comm: Communicator, accelerator: Accelerator) -> StrategyCase:
    """The projections around Ulysses: of queries, keys and values before it, and of the results behind it.

    Bound of each: T_m - (1 - 1/(N m)) T_c, with m pieces per rank.
    """
    rows, n = TOKENS // comm.size, HEADS * HEAD_DIM
    x, own = np.zeros((rows, n), np.float32), np.zeros((TOKENS, split(n, comm.size)[comm.rank]), np.float32)
    w, wo = np.zeros((n, 3 * n), np.float32), np.zeros((n, n), np.float32)

    def call() -> None:
        matmul_all_to_all_columns(x, w, comm=comm, **DEALT)
        all_to_all_columns_matmul(own, wo, comm=comm, **DEALT)

    def serial() -> None:
        all_to_all(spend(accelerator, product, x, w), split_dim=1, concat_dim=0, comm=comm)
        spend(accelerator, product, all_to_all(own, split_dim=0, concat_dim=1, comm=comm), wo)

    bound = block_bound(comm.size, DEALT["slices"])
    return StrategyCase("Ulysses, projections", "T_m / T_c", (0.5, 1.0), call, bound, serial=serial)


def usp(comm: Communicator, accelerator: Accelerator) -> StrategyCase | None:
    """Ulysses between two ranks, a ring round the others, whose links may be slower.

    Bound: the messages of Ulysses, measured alone, and the ring's own bound for the others.
    """
    if comm.size % 2:
        return None
    mesh = _computes_on(accelerator, Mesh(comm, ring=comm.size // 2, ulysses=2))
    q, k, v = _qkv(comm, TOKENS)
    around, sharding = comm.size // 2, Sharding(TOKENS, ring=comm.size // 2, ulysses=2)
    call = partial(usp_attention, q, k, v, sharding, ring=mesh["ring"], ulysses=mesh["ulysses"])
    inner = partial(ulysses_attention, q, k, v, Sharding(TOKENS // around, ulysses=2), comm=mesh["ulysses"])
    accelerator.use(INSTANT.flops_rate)
    alone = alternate(comm.link.comm, {"ulysses": inner, "both": call}, PILOT_ROUNDS, idle=IDLE_SECONDS)
    share = min(1.0, median(alone["ulysses"]) / median(alone["both"]))

    def bound(t_c: float, t_m: float) -> float:
        across = t_m * share
        step = (t_m - across) / max(around - 1, 1)
        return across + received([0.0, *[step] * (around - 1)], [t_c / around] * around) - t_c

    return StrategyCase(f"USP {around}x2", "T_m / T_c", (0.5,), call, bound, close=mesh.close)


EXPERTS, HIDDEN, FFN, CHOSEN = 8, 512, 1024, 2


def experts(comm: Communicator, accelerator: Accelerator) -> StrategyCase:
    """A mixture of experts, evenly used: half of the own rows first, half last, those of other ranks as they arrive.

    Bound: the flow of these pieces through the port in, the experts and the port out.
    """
    call = partial(moe, *_experts(comm), k=CHOSEN, comm=comm)
    return StrategyCase("mixture of experts", "(Md + Mc) / G", (0.4, 0.6, 0.8, 1.0), call, experts_bound(comm.size))


def _experts(comm: Communicator) -> list[Array]:
    """x, router, w1 and w2. All experts have the same work."""
    own, at = len(experts_of(comm.rank, comm.size, EXPERTS)), np.arange(ROWS)
    router, x = np.eye(HIDDEN, EXPERTS, dtype=np.float32), np.zeros((ROWS, HIDDEN), np.float32)
    x[at, at % EXPERTS], x[at, (at + 1) % EXPERTS] = 2.0, 1.0
    return [x, router, np.zeros((own, HIDDEN, FFN), np.float32), np.zeros((own, FFN, HIDDEN), np.float32)]


def experts_side_by_side(comm: Communicator, accelerator: Accelerator) -> StrategyCase:
    """The layer of `experts`: the forward of one micro-batch under the backward of another, which is twice as long.

    Bound: nothing need be exposed while the messages of both, 2 (Md + Mc), take less than the kernels, 3 G.
    """
    tensors = _experts(comm)
    y, saved = moe.forward(*tensors, k=CHOSEN, comm=comm)

    def call() -> None:
        interleave(lambda: moe(*tensors, k=CHOSEN, comm=comm), lambda: moe.backward(saved, y))

    def bound(t_c: float, t_m: float) -> float:
        return max(0.0, t_m - t_c)

    title = "mixture of experts, forward under backward"
    return StrategyCase(title, "(Md + Mc) / G", (0.6, 1.0), call, bound, lambda r: 2 / 3 * r, slack=0.1)


CASES: tuple[Callable[[Communicator, Accelerator], StrategyCase | None], ...] = (
    zero_1,
    tpsp_block,
    query_split,
    ring,
    ring_backward,
    ulysses,
    ulysses_pairs,
    ulysses_projections,
    usp,
    experts,
    experts_side_by_side,
)
