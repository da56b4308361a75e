"""The strategies that suites measure, each with its messages, its kernels, and what must be exposed.

The suites `parallel`, `step` and `smaller` have the same ones: on an emulated accelerator, on a device (`--device`),
and with smaller messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np

import fompi
from accelerator import INSTANT, PILOT_ROUNDS, Accelerator, spend
from fompi.backends.numbers import for_numpy, product
from fompi.base.layout import split
from fompi.bench.measure import Bench, Call
from fompi.engine.communicator import Communicator
from fompi.engine.mesh import Mesh
from fompi.model.flow_shop import Job, makespan
from fompi.parallel.attention import Rule, attend
from fompi.parallel.data import SGD, DataParallel
from fompi.parallel.differentiable import Differentiable
from fompi.parallel.expert import experts_of, moe
from fompi.parallel.interleave import interleave
from fompi.parallel.pipeline import Pipeline
from fompi.parallel.sequence import Sharding, ring_attention, ulysses_attention, usp_attention
from fompi.parallel.tensor import attention, column_parallel_linear, row_parallel_linear
from fompi.tuning.rounds import Figure, Row, median_interval
from means import repeated

Array = np.ndarray[Any, Any]

FOMPI, SERIAL, KERNELS, MESSAGES = "fompi", "serial", "kernels alone", "messages alone"
"""The contestants of a strategy."""


class Dimensions(NamedTuple):
    """`rows` of all ranks (of experts: of a rank), `width` and `hidden` features, `tokens` of all ranks, `heads`.

    Experts have features of their own. ZeRO and pipelines have `batch` rows, and weights of `side` x `side`.
    """

    rows: int
    width: int
    hidden: int
    tokens: int
    heads: int
    head_dim: int
    expert_width: int
    expert_hidden: int
    batch: int
    side: int


EMULATED = Dimensions(1024, 2048, 1024, 2048, 8, 64, 512, 1024, 1024, 512)
GPU = Dimensions(4096, 4096, 4096, 8192, 16, 128, 4096, 4096, 4096, 4096)
QUICK_GPU = Dimensions(512, 1024, 1024, 2048, 8, 64, 1024, 1024, 512, 1024)
SOFTWARE = Dimensions(16, 32, 32, 64, 8, 8, 32, 32, 16, 32)

BUCKETS, EXPERTS, CHOSEN, MICROBATCHES, MOST_SLICES = 8, 8, 2, 8, 8


@dataclass(frozen=True)
class StrategySetting:
    """Where a strategy runs: on these ranks, at these sizes. Messages travel as `comm` says.

    With an `accelerator` arrays are zeros, and products take their time there.
    """

    bench: Bench
    comm: Communicator
    sizes: Dimensions
    accelerator: Accelerator | None = None

    @property
    def how(self) -> dict[str, Any]:
        return {"comm": self.comm}

    def drawn(self, *shape: int, seed: int | None = None) -> Any:
        """Small random numbers, where tensors are. With a `seed` all ranks have the same."""
        if self.accelerator is not None:
            return np.zeros(shape, np.float32)
        random = np.random.default_rng(self.comm.rank if seed is None else seed)
        return self.up(random.standard_normal(shape, np.float32) / np.float32(16))

    def up(self, a: Array) -> Any:
        """This array there, for NumPy's functions."""
        return for_numpy(self.bench.place.array(a))

    def product(self, x: Any, w: Any) -> Any:
        return product(x, w) if self.accelerator is None else spend(self.accelerator, product, x, w)

    def qkv(self, tokens: int, heads: int) -> list[Any]:
        return [self.drawn(tokens, heads, self.sizes.head_dim) for _ in range(3)]

    def on_axes(self, **axes: Any) -> Mesh:
        """A mesh that computes where these ranks do."""
        mesh = Mesh(self.comm, **axes)
        for axis in mesh.values():
            axis.backend = self.comm.backend
        return mesh


class Layers(NamedTuple):
    """Differentiable functions, one behind the other: each with its tensors besides the first, and its options."""

    x: Any
    parts: Sequence[tuple[Differentiable, Sequence[Any], Mapping[str, Any]]]

    def forward(self) -> Any:
        y = self.x
        for f, tensors, how in self.parts:
            y = f(y, *tensors, **how)
        return y

    def kept(self) -> tuple[Any, list[Any]]:
        """The result, and what the backward needs."""
        y, saved = self.x, []
        for f, tensors, how in self.parts:
            y, of_backward = f.forward(y, *tensors, **how)
            saved.append(of_backward)
        return y, saved

    def backward(self, dy: Any, saved: Sequence[Any]) -> Any:
        """The gradient of x."""
        for (f, _, _), of_forward in zip(reversed(self.parts), reversed(saved), strict=True):
            dy = f.backward(of_forward, dy)[0]
        return dy

    def both_ways(self) -> Any:
        """The gradient of x, with the result as that of itself."""
        return self.backward(*self.kept())


Bound = Callable[[float, float], float]
"""The seconds that must be exposed, of T_c and T_m: the kernels alone, and the messages alone."""


@dataclass(frozen=True)
class Strategy:
    """A strategy: `call` runs it once, `both_ways` with its backward.

    `messages` is what it moves and `kernels` what it launches, each without the other. On an emulated accelerator both
    are found by measuring, and the strategy runs at some `ratios` of `of`, in words. `t_m_over_t_c` translates one.
    `slack` is what may be exposed beyond the bound, as a share of T_m.
    """

    call: Call
    bound: Bound
    messages: Call | None = None
    kernels: Call | None = None
    both_ways: Call | None = None
    of: str = "T_m / T_c"
    ratios: Sequence[float] = (0.5, 1.0)
    t_m_over_t_c: Callable[[float], float] = lambda ratio: ratio
    slack: float = 0.03
    close: Call = lambda: None

    @classmethod
    def of_layers(cls, layers: Layers, bound: Bound, **more: Any) -> Strategy:
        """The forward of these layers."""
        return cls(layers.forward, bound, both_ways=layers.both_ways, **more)


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


# -------------------------------------------------------------------------------------------------------- strategies


def tensor_parallel_block(s: StrategySetting) -> Strategy:
    """An MLP: gather and product, product and reduce-scatter. Bound of each: T_m - (1 - 1/N) T_c, with whole pieces."""
    sizes, rows = s.sizes, s.sizes.rows // s.comm.size
    x, full = s.drawn(rows, sizes.width), s.drawn(rows * s.comm.size, sizes.width)
    w1, w2 = s.drawn(sizes.width, sizes.hidden), s.drawn(sizes.hidden, sizes.width)

    def messages() -> None:
        fompi.all_gather(x, comm=s.comm)
        fompi.reduce_scatter(full, comm=s.comm)

    def kernels() -> None:
        product(product(full, w1), w2)

    layers = Layers(x, [(column_parallel_linear, (w1,), s.how), (row_parallel_linear, (w2,), s.how)])
    bound = block_bound(s.comm.size, MOST_SLICES)
    return Strategy.of_layers(layers, bound, messages=messages, kernels=kernels, ratios=(0.56, 1.0))


def query_split(s: StrategySetting) -> Strategy:
    """Attention with tensor parallelism: the reduce-scatter hides behind scores, values and output projection.

    Bound: that of the gather with the projections, and max(0, M - (1 - 1/N) (A + O)).
    """
    size, tokens, heads = s.comm.size, s.sizes.tokens, s.sizes.heads
    n = heads * s.sizes.head_dim
    own = n // size
    weights = [*(s.drawn(n, own) for _ in range(3)), s.drawn(own, n)]
    projections, scores, out = 6.0 * tokens * n * own, 4.0 * tokens**2 * own, 2.0 * tokens * n * own
    total = projections + scores + out

    def bound(t_c: float, t_m: float) -> float:
        first = t_m / 2 - (1 - 1 / size) * t_c * projections / total
        last = t_m / 2 - (1 - 1 / size) * t_c * (scores + out) / total
        return max(0.0, first) + max(0.0, last)

    how = {**s.how, "heads": heads, "kv_heads": heads}
    layers = Layers(s.drawn(tokens // size, n), [(attention, weights, how)])
    return Strategy.of_layers(layers, bound, ratios=(0.5,))


def _ring_layers(s: StrategySetting) -> Layers:
    tokens = s.sizes.tokens // s.comm.size
    q, k, v = s.qkv(tokens, s.sizes.heads)
    return Layers(q, [(ring_attention, (k, v, Sharding(tokens * s.comm.size, ring=s.comm.size)), s.how)])


def ring(s: StrategySetting) -> Strategy:
    """Ring attention, forward: N blocks of keys and values. Bound: (N - 1) (k - a) where a block travels longer."""
    size, right, left = s.comm.size, (s.comm.rank + 1) % s.comm.size, (s.comm.rank - 1) % s.comm.size
    layers = _ring_layers(s)
    blocks = layers.parts[0][1][:2]

    def messages() -> None:
        for _ in range(size - 1):
            for block in blocks:
                fompi.sendrecv(block, right, left, comm=s.comm)

    kernels = partial(repeated, partial(_attend, layers.x, *blocks), size)
    share = (size - 1) / size
    ratios: dict[str, Any] = {"of": "k / a", "ratios": (0.5, 1.0, 1.3), "t_m_over_t_c": lambda r: r * share}
    return Strategy.of_layers(layers, ring_bound(size), messages=messages, kernels=kernels, **ratios)


def _attend(q: Any, k: Any, v: Any) -> None:
    """The attention of a rank over keys that it has, as the strategies compute it."""
    attend(q, k, v, range(q.shape[1]), np.arange(len(q)), np.arange(len(k)), Rule())


def ring_backward(s: StrategySetting) -> Strategy:
    """Ring attention, backward: keys and values travel N - 1 times, their gradients N times. k: both, one step.

    Bound, with whole blocks: the last gradients travel home behind nothing; before that a step takes the longer of a
    and k. fompi cuts the last ones into parts of the heads, so that less can be exposed.
    """
    size, layers = s.comm.size, _ring_layers(s)

    def bound(t_c: float, t_m: float) -> float:
        hop, a = t_m / (2 * size - 1), t_c / size
        return received([0.0, hop, *[2 * hop] * (size - 2)], [a] * size) + hop - t_c

    share = (2 * size - 1) / 2 / size
    call = partial(layers.backward, *layers.kept())
    return Strategy(call, bound, of="k / a", ratios=(0.5, 1.0, 1.3), t_m_over_t_c=lambda r: r * share)


def ulysses(s: StrategySetting) -> Strategy:
    """Ulysses: the attention begins with the tokens that are there; the results of a rank leave once they are complete.

    Bound, with all heads of a rank at once: the flow of the N x N pieces of queries and keys through the port in, the
    attention and the port out. fompi cuts the heads into slices, so that less can be exposed.
    """
    size = s.comm.size
    tokens, heads = s.sizes.tokens // size, s.sizes.heads // size * size
    x, own = s.qkv(tokens, heads), s.qkv(tokens * size, heads // size)

    def messages() -> None:
        for each in x:
            fompi.all_to_all(each, split_dim=1, concat_dim=0, comm=s.comm)
        fompi.all_to_all(own[0], split_dim=0, concat_dim=1, comm=s.comm)

    layers = Layers(x[0], [(ulysses_attention, (*x[1:], Sharding(tokens * size, ulysses=size)), s.how)])
    return Strategy.of_layers(layers, ulysses_bound(size), messages=messages, kernels=partial(_attend, *own))


def ulysses_pairs(s: StrategySetting) -> Strategy:
    """Ulysses in pairs of ranks, all at once. Bound: the same, with N = 2."""
    mesh = s.on_axes(pairs=s.comm.size // 2, ulysses=2)
    return replace(ulysses(replace(s, comm=mesh["ulysses"])), close=mesh.close)


DEALT: dict[str, Any] = {"schedule": "direct", "slices": 4}
"""How the projections of Ulysses run here: on four hosts it hides more than whole pieces do."""


def ulysses_projections(s: StrategySetting) -> Strategy:
    """The projections around Ulysses: of queries, keys and values before it, and of the results behind it.

    Bound of each: T_m - (1 - 1/(N m)) T_c, with m pieces per rank.
    """
    tokens, n, size = s.sizes.tokens, s.sizes.heads * s.sizes.head_dim, s.comm.size
    x, own = s.drawn(tokens // size, n), s.drawn(tokens, split(n, size)[s.comm.rank])
    w, wo = s.drawn(n, 3 * n), s.drawn(n, n)

    def call() -> None:
        fompi.matmul_all_to_all_columns(x, w, comm=s.comm, **DEALT)
        fompi.all_to_all_columns_matmul(own, wo, comm=s.comm, **DEALT)

    return Strategy(call, block_bound(size, DEALT["slices"]))


def usp(s: StrategySetting) -> Strategy:
    """Ulysses between two ranks, a ring round the others, whose links may be slower.

    Bound: the messages of Ulysses, measured alone, and the ring's own bound for the others.
    """
    around, tokens, heads = s.comm.size // 2, s.sizes.tokens, s.sizes.heads
    mesh = s.on_axes(ring=around, ulysses=2)
    q, k, v = s.qkv(tokens // s.comm.size, heads)
    sharding = Sharding(tokens, ring=around, ulysses=2)
    call = partial(usp_attention, q, k, v, sharding, ring=mesh["ring"], ulysses=mesh["ulysses"])
    inner = partial(ulysses_attention, q, k, v, Sharding(tokens // around, ulysses=2), comm=mesh["ulysses"])
    if s.accelerator is not None:
        s.accelerator.use(INSTANT.flops_rate)
    alone = s.bench.times({"ulysses": inner, "both": call}, PILOT_ROUNDS)
    share = min(1.0, median(alone["ulysses"]) / median(alone["both"]))

    def bound(t_c: float, t_m: float) -> float:
        across = t_m * share
        step = (t_m - across) / max(around - 1, 1)
        return across + received([0.0, *[step] * (around - 1)], [t_c / around] * around) - t_c

    return Strategy(call, bound, ratios=(0.5,), close=mesh.close)


def _expert_layers(s: StrategySetting, comm: Communicator, count: int) -> Layers:
    """`count` experts that all have the same work, and those of a rank."""
    width, hidden, own = s.sizes.expert_width, s.sizes.expert_hidden, len(experts_of(comm.rank, comm.size, count))
    rows = s.sizes.rows // count * count
    x, at = np.zeros((rows, width), np.float32), np.arange(rows)
    x[at, at % count], x[at, (at + 1) % count] = 2.0, 1.0
    router = s.up(np.eye(width, count, dtype=np.float32))
    weights = s.drawn(own, width, hidden), s.drawn(own, hidden, width)
    return Layers(s.up(x), [(moe, (router, *weights), {**s.how, "k": CHOSEN, "comm": comm})])


def mixture_of_experts(s: StrategySetting) -> Strategy:
    """A mixture of experts, evenly used: half of the own rows first, half last, those of other ranks as they arrive.

    Bound: the flow of these pieces through the port in, the experts and the port out. Alone, a rank computes as many
    rows with its own experts.
    """
    size = s.comm.size
    layers, alone = _expert_layers(s, s.comm, EXPERTS), s.comm.split(s.comm.rank, 0, "alone")
    kernels = _expert_layers(s, alone, len(experts_of(s.comm.rank, size, EXPERTS))).forward
    rows_of_peers = s.drawn(len(layers.x) * CHOSEN // size * size, s.sizes.expert_width)
    messages = partial(repeated, partial(fompi.all_to_all, rows_of_peers, comm=s.comm), 2)  # to the experts, and back
    more: dict[str, Any] = {"of": "(Md + Mc) / G", "ratios": (0.4, 0.6, 0.8, 1.0), "close": alone.close}
    return Strategy.of_layers(layers, experts_bound(size), messages=messages, kernels=kernels, **more)


def experts_side_by_side(s: StrategySetting) -> Strategy:
    """The same layer: the forward of one micro-batch under the backward of another, which is twice as long.

    Bound: nothing must be exposed while the messages of both, 2 (Md + Mc), take less than the kernels, 3 G.
    """
    layers = _expert_layers(s, s.comm, EXPERTS)
    call = partial(interleave, layers.forward, partial(layers.backward, *layers.kept()))
    ratios: dict[str, Any] = {"of": "(Md + Mc) / G", "ratios": (0.6, 1.0), "t_m_over_t_c": lambda r: 2 / 3 * r}
    return Strategy(call, lambda t_c, t_m: max(0.0, t_m - t_c), slack=0.1, **ratios)


def zero_1(s: StrategySetting) -> Strategy:
    """ZeRO-1: sums behind the backward (b a bucket), gathers behind the forward (b / 2). g: one sum, and one gather.

    Bound: max over k of (the sums from k on, less the backward after k), and the same of the gathers.
    """
    side = s.sizes.side
    weights = {f"w{i}": s.drawn(side, side, seed=i) for i in range(BUCKETS)}
    how = {"zero": 1, "bucket_nbytes": 4 * side**2, "wire_gather": s.comm.how.get("wire"), **s.how}
    dp = DataParallel(weights, optimizer=SGD(1e-6), **how)
    x, gradient, shard = s.drawn(s.sizes.batch, side), s.drawn(side**2), s.drawn(side**2 // s.comm.size)

    def layers(weight: Callable[[str], Any], ready: Callable[[str, Any], object]) -> None:
        """A forward and a backward of products. The gradient of each is ready at once."""
        y, kept = x, []
        for name in weights:
            w = for_numpy(weight(name))
            kept.append((name, y, w))
            y = s.product(y, w)
        dy = y
        for name, y, w in reversed(kept):
            dw = s.product(y.T, dy)
            dy = s.product(dy, w.T)
            ready(name, dw)

    def messages() -> None:
        repeated(partial(fompi.reduce_scatter, gradient, comm=s.comm), BUCKETS)
        repeated(partial(fompi.all_gather, shard, comm=s.comm), BUCKETS)

    def call() -> None:
        layers(dp.__getitem__, dp.ready)
        dp.step()

    kernels = partial(layers, weights.__getitem__, lambda name, dw: None)
    ratios: dict[str, Any] = {"of": "g / b", "ratios": (0.5, 0.9), "t_m_over_t_c": lambda r: 4 / 3 * r}
    return Strategy(call, zero_1_bound, messages, kernels, close=dp.close, **ratios)


class ProductStage:
    """A stage: a product. Its backward is two."""

    def __init__(self, w: Any):
        self.w = w

    def forward(self, x: Any) -> tuple[Any, Any]:
        return product(x, self.w), x

    def backward(self, saved: Any, dy: Any) -> Any:
        product(saved.T, dy)
        return product(dy, self.w.T)


def pipeline(s: StrategySetting) -> Strategy:
    """1F1B with a product in each stage. Bound: the bubble, (N - 1) / micro-batches of the kernels."""
    count, rank, shape = MICROBATCHES, s.comm.rank, (s.sizes.batch, s.sizes.side)
    stage, x, dy = ProductStage(s.drawn(s.sizes.side, s.sizes.side)), s.drawn(*shape), s.drawn(*shape)
    how = {"microbatches": count, "activations": shape, "device": s.bench.place.device, **s.how}
    pipe = Pipeline([stage], loss=lambda y, target: (0.0, target), **how)
    before, behind = rank - 1 if rank else None, rank + 1 if rank < s.comm.size - 1 else None

    def messages() -> None:
        for _ in range(count):
            fompi.sendrecv(x, behind, before, comm=s.comm)
            fompi.sendrecv(dy, before, behind, comm=s.comm)

    def kernels() -> None:
        for _ in range(count):
            stage.backward(stage.forward(x)[1], dy)

    def bound(t_c: float, t_m: float) -> float:
        return (s.comm.size - 1) / count * t_c

    call = partial(pipe.step, [x] * count if before is None else None, [dy] * count if behind is None else None)
    return Strategy(call, bound, messages, kernels, close=pipe.close)


Makers = Mapping[str, Callable[[StrategySetting], Strategy]]

ON_DEVICE: Makers = {
    "TP+SP block": tensor_parallel_block,
    "ring attention": ring,
    "Ulysses attention": ulysses,
    "mixture of experts": mixture_of_experts,
}
"""The strategies of the suite `parallel` on a device, by name."""


def on_accelerator(size: int) -> Makers:
    """The strategies on this many ranks, by name."""
    has_pairs = size % 2 == 0
    return {
        "ZeRO-1": zero_1,
        "TP+SP block": tensor_parallel_block,
        "attention, query split": query_split,
        "ring attention": ring,
        "ring attention, backward": ring_backward,
        "Ulysses attention": ulysses,
        **({"Ulysses attention, N = 2": ulysses_pairs} if has_pairs and size > 2 else {}),
        "Ulysses, projections": ulysses_projections,
        **({f"USP {size // 2}x2": usp} if has_pairs else {}),
        "mixture of experts": mixture_of_experts,
        "mixture of experts, forward under backward": experts_side_by_side,
    }
