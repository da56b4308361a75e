"""Which sizes of data, tensor, pipeline, expert and context parallelism are best for a model on a machine, on paper.

    print(fompi.layouts("llama-8b", 64, "h100-ndr"))

Every layout that is possible is predicted by formulas. Those that do not fit into the memory of a rank are left out.

**Ranks.** ranks = dp * tp * pp * cp. tp is innermost, then cp, then dp, and pp is outermost, as in Megatron-Core. ep
consecutive ranks of dp * cp hold the experts of a layer together, so ep divides dp * cp and the number of experts. The
batch is cut over dp into micro-batches of whole sequences, each sequence over cp.

**Time of a step.** seconds = compute + bubble + the exposed seconds of the axes, of the busiest rank. T is the time of
a kernel, M that of its messages, N the size of the axis.

| axis | what is exposed                                                                                            |
|------|------------------------------------------------------------------------------------------------------------|
| tp   | with sequence parallelism. Forward, and backward of row-parallel: max(0, M - (1 - 1/N) T), for pieces of   |
|      | 1/N, and the time that the pieces cost more. Backward of column-parallel: max(0, M - T) for dx and for dw  |
| cp   | ring: (N - 1) max(0, k - a), kernel a and message k of a block. Ulysses: max(0, M - (1 - 1/N) T) twice     |
| ep   | max(0, dispatch + combine - T), T the products of the experts. Tokens are dealt evenly to experts          |
| pp   | what messages add to the pipeline (`fompi.model.pipeline`)                                                 |
| dp   | the flow shop of buckets: sums behind the last backward, gathers behind the first forward                  |

**Bytes.** Parameters and activations have two bytes per element, gradients four, AdamW 12 per parameter. A collective
takes one latency for each other group of a level, and the bytes that must enter a group through its ports. Axes do not
disturb each other. Left out: the embedding's lookup, biases, dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd, inf
from typing import NamedTuple

from fompi.base.errors import LayoutError
from fompi.base.layout import integer
from fompi.model import pipeline
from fompi.model.flow_shop import Job, makespan
from fompi.model.machine import Link, Machine
from fompi.model.pipeline import SCHEDULES, has_formula
from fompi.planner.layers import MODELS, Model

AXES = ("dp", "tp", "pp", "ep", "cp")
"""The axes, in the order in which a layout is printed."""

FREE = (*AXES, "microbatch", "schedule", "chunks", "zero", "recompute")
"""What is chosen, unless it is given."""

ITEM, GRADIENT, OPTIMIZER = 2, 4, 12
"""Bytes of an element, of a gradient, and of what AdamW keeps per parameter: a copy and two moments in float32."""

UPDATE = 2 * OPTIMIZER + GRADIENT + ITEM
"""Bytes that the optimizer reads and writes per parameter."""

USABLE = 0.9
"""The share of the memory that may be used. The rest is for the libraries' own buffers and for fragmentation."""

BATCH_TOKENS = 4 << 20
"""The tokens of a step, if no batch is given."""

TOP = 10
"""How many layouts are shown."""

MOST_RANKS, MOST_MICROBATCH, MOST_CHUNKS, MOST_BUCKETS = 1 << 20, 16, 8, 32
"""The most ranks. What is tried: the most sequences of a micro-batch, chunks of a rank, and buckets of its layers."""

RECOMPUTE = ("none", "selective", "full")
"""What the backward computes again: nothing; the outputs of norms and activations; or each layer."""

COLUMNS = ("dp x tp x pp x ep x cp", "ms", "compute", "bubble", *AXES, "GB", "TFLOP/s", "MFU", "tokens/s", "how")
"""The heads of the table. Times are in ms, those of the axes are exposed. TFLOP/s are per rank."""


class Layout(NamedTuple):
    """The sizes of the axes, and how a step runs.

    A micro-batch has `microbatch` sequences. `zero` is the ZeRO stage over dp * cp. `attention` is how cp shares a
    sequence: "ring", "ulysses", or "" if cp is 1.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    microbatch: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    zero: int = 0
    recompute: str = "none"
    attention: str = ""

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the axes, in the order of AXES."""
        return self[:5]

    @property
    def how(self) -> str:
        """What the sizes do not say, in words."""
        parts = [f"{self.microbatch} sequence{'s' * (self.microbatch > 1)}"]
        if self.pp > 1:
            parts.append(self.schedule + f" {self.chunks} chunks" * (self.chunks > 1))
        parts += [f"zero {self.zero}"] * (self.dp * self.cp > 1) + [self.attention] * (self.cp > 1)
        return ", ".join([*parts, *[f"recompute {self.recompute}"] * (self.recompute != "none")])

    def __str__(self) -> str:
        return " x ".join(map(str, self.sizes))


class Memory(NamedTuple):
    """Bytes of the rank with the most. `activations` has working buffers too: logits, and what is gathered."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(frozen=True)
class Predicted:
    """A layout and its step: seconds == compute + bubble + sum(exposed.values()), exposed by axis.

    `mfu` is the share of the machine's `flops_rate` that the operations of the model take (`Model.step_flops`).
    `flops_rate` are those operations per second and rank.
    """

    layout: Layout
    compute: float
    bubble: float
    exposed: dict[str, float]
    memory: Memory
    tokens_rate: float
    flops_rate: float
    mfu: float

    @property
    def seconds(self) -> float:
        return self.compute + self.bubble + sum(self.exposed.values())

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of a table with the heads COLUMNS."""
        times = (self.seconds, self.compute, self.bubble, *(self.exposed[axis] for axis in AXES))
        rates = f"{self.flops_rate / 1e12:.3g}", f"{self.mfu:.1%}", f"{self.tokens_rate:,.0f}"
        memory = f"{self.memory.total / 1e9:.1f}"
        return (str(self.layout), *(f"{1e3 * t:.1f}" for t in times), memory, *rates, self.layout.how)


@dataclass(frozen=True)
class Layouts:
    """The best layouts of a model on a machine, the fastest first. No two have the same sizes of the axes.

    `tried` layouts were predicted, `left_out` others do not fit.
    """

    title: str
    best: tuple[Predicted, ...]
    tried: int
    left_out: int

    @property
    def remark(self) -> str:
        """What the table does not show, in one line."""
        return f"{self.tried} layouts predicted by formulas, {self.left_out} left out for want of memory"

    def __str__(self) -> str:
        rows = [COLUMNS, *(each.row for each in self.best)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
        lines = ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]) for row in rows]
        return "\n".join([self.title, *lines, self.remark])


def layouts(
    model: str | Model,
    ranks: int,
    machine: Machine | str,
    *,
    batch: int | None = None,
    top: int = TOP,
    **fixed: int | str,
) -> Layouts:
    """layouts("llama-8b", 64, "h100-ndr").best[0]: the fastest layout of a model on a machine, on paper.

        print(fompi.layouts("llama-8b", 64, "h100-ndr", batch=512, tp=8))

    `model` is a name in `fompi.planner.layers.MODELS`, or a `Model` with sizes of your own. `batch` are the sequences
    of a step (without it 4 Mi tokens). `fixed` are parts of a layout that are given: dp, tp, pp, ep, cp, microbatch,
    schedule, chunks, zero, recompute. The others are chosen. `fompi/planner/layout.py` says what is counted.

    Raises LayoutError for numbers out of range, if no layout is possible, and if none fits into the memory: then it
    names the one that comes nearest, and what it needs.
    """
    name, sizes = _model_of(model)
    machine = Machine.of(machine)
    for what, value, most in (("ranks", ranks, MOST_RANKS), ("top", top, MOST_RANKS)):
        if not 1 <= (integer(value) or 0) <= most:
            raise LayoutError(f"{what}={value!r} must be an integer from 1 to {most}")
    batch = max(1, BATCH_TOKENS // sizes.sequence) if batch is None else batch
    if not 1 <= (integer(batch) or 0) <= MOST_RANKS:
        raise LayoutError(f"batch={batch!r} must be a number of sequences from 1 to {MOST_RANKS}")
    _check_fixed(fixed)
    step = _Step(sizes, machine, ranks, batch)
    best: dict[tuple[int, ...], Predicted] = {}
    nearest: tuple[float, Layout] = inf, Layout()
    tried = left_out = 0
    for leaner_and_leaner in _candidates(sizes, ranks, batch, fixed):
        for layout in leaner_and_leaner:
            memory = step.memory(layout)
            if memory.total > USABLE * machine.memory:
                left_out += 1
                nearest = min(nearest, (memory.total, layout))
                continue
            made, tried = step.predicted(layout, memory), tried + 1
            if made.seconds < best.setdefault(layout.sizes, made).seconds:
                best[layout.sizes] = made
            if layout.zero <= 1:
                break  # what follows needs less memory and takes longer
    if not tried:
        raise _refusal(name, sizes, ranks, batch, machine, fixed, nearest)
    listed = sorted(best.values(), key=_order)
    tokens = batch * sizes.sequence
    title = f"{name} on {ranks} rank{'s' * (ranks > 1)} of {machine.name}, {batch} sequences of {sizes.sequence} tokens"
    return Layouts(f"{title}, {tokens / 1e6:.1f} million tokens a step", tuple(listed[:top]), tried, left_out)


def _order(made: Predicted) -> tuple[float, int, int, int]:
    """The fastest first. Of layouts with the same time, that with the fewest ranks on the inner axes."""
    return float(f"{made.seconds:.6g}"), made.layout.cp, made.layout.pp, made.layout.tp


def _model_of(model: str | Model) -> tuple[str, Model]:
    if isinstance(model, str):
        if model not in MODELS:
            raise LayoutError(f"no model {model!r}; choose {', '.join(MODELS)}, or give the sizes of your own")
        return model, MODELS[model]
    for name, value in model._asdict().items():
        least = 0 if name in ("experts", "top_k", "shared") else 1
        if name not in ("source", "tied") and not least <= (-1 if integer(value) is None else value) <= MOST_RANKS:
            raise LayoutError(f"{name}={value!r} of the model must be an integer from {least} to {MOST_RANKS}")
    heads, kv_heads = model.heads, model.kv_heads
    if model.hidden % heads or heads % kv_heads:
        raise LayoutError(
            f"hidden={model.hidden}, heads={heads}, kv_heads={kv_heads}: each must be a multiple of the next one"
        )
    if model.experts and not 1 <= model.top_k <= model.experts:
        raise LayoutError(f"top_k={model.top_k} must be from 1 to experts={model.experts}")
    if not model.experts and (model.top_k or model.shared):
        raise LayoutError(f"top_k={model.top_k}, shared={model.shared}: a model without experts has neither")
    known = next((name for name, each in MODELS.items() if each == model), None)
    return known or f"a model of {model.parameters / 1e9:.3g} billion parameters", model


def _check_fixed(fixed: dict[str, int | str]) -> None:
    texts = {"schedule": SCHEDULES, "recompute": RECOMPUTE}
    for name, value in fixed.items():
        if name not in FREE:
            raise LayoutError(f"a layout has no {name!r}; it has {', '.join(FREE)}")
        if name in texts:
            if value not in texts[name]:
                raise LayoutError(f"{name}={value!r}; choose {', '.join(texts[name])}")
        elif integer(value) is None or not (0 if name == "zero" else 1) <= int(value) <= (
            3 if name == "zero" else MOST_RANKS
        ):
            raise LayoutError(f"{name}={value!r} must be " + ("0, 1, 2 or 3" if name == "zero" else "an integer >= 1"))


def _refusal(
    name: str,
    model: Model,
    ranks: int,
    batch: int,
    machine: Machine,
    fixed: dict[str, int | str],
    nearest: tuple[float, Layout],
) -> LayoutError:
    """Why there is no layout, and what to do."""
    given = "".join(f", {key}={value}" for key, value in fixed.items())
    where = f"no layout of {name} on {ranks} ranks of {machine.name} with {batch} sequences{given}"
    needed, layout = nearest
    if needed < inf:
        usable = f"{USABLE * machine.memory / 1e9:.1f} GB, {USABLE:.0%} of a rank's memory"
        return LayoutError(
            f"{where} fits into {usable}. Nearest is dp x tp x pp x ep x cp = {layout} ({layout.how}), which needs "
            f"{needed / 1e9:.1f} GB. Take more ranks, shorter sequences or fewer of them"
        )
    experts = f", ep divides dp x cp and the {model.experts} experts" if model.experts else ", ep is 1"
    return LayoutError(
        f"{where} is possible. The rules: dp x tp x pp x cp = {ranks}; tp divides {model.heads} heads and {model.ffn} "
        f"columns; pp x chunks is at most {model.layers} layers; 2 cp divides {model.sequence} tokens{experts}; dp x "
        f"microbatch divides {batch} sequences; zero 2 and 3 need pp = 1; interleaved needs a multiple of pp "
        "micro-batches, zb-h1 pp of them, zb-h2 2 pp - 1"
    )


# ------------------------------------------------------------------------------------------------------- the candidates


def _candidates(model: Model, ranks: int, batch: int, fixed: dict[str, int | str]) -> Iterator[list[Layout]]:
    """Lists of layouts that differ in ZeRO and recomputation only. Those that need more memory come first."""

    def among(name: str, values: Sequence[int]) -> Sequence[int]:
        return [value for value in values if fixed.get(name, value) == value]

    for tp in among("tp", [n for n in _divisors(gcd(ranks, model.heads)) if model.ffn % n == 0]):
        if model.kv_heads % tp and tp % model.kv_heads:
            continue
        for cp in among("cp", _divisors(ranks // tp)):
            if cp > 1 and model.sequence % (2 * cp):
                continue
            for pp in among("pp", _divisors(ranks // tp // cp)):
                dp = ranks // tp // cp // pp
                if pp > model.layers or batch % dp or fixed.get("dp", dp) != dp:
                    continue
                for ep in among("ep", _divisors(gcd(dp * cp, model.experts)) if model.experts else [1]):
                    for size in _microbatches(batch // dp, fixed):
                        for schedule, chunks in _orders(model, pp, batch // dp // size, fixed):
                            yield [*_leaner(Layout(dp, tp, pp, ep, cp, size, schedule, chunks), fixed)]


def _divisors(n: int) -> list[int]:
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


def _microbatches(sequences: int, fixed: dict[str, int | str]) -> list[int]:
    """The sizes of a micro-batch, if a rank has so many sequences: powers of two, or what is given."""
    given = fixed.get("microbatch")
    sizes = [1 << i for i in range(MOST_MICROBATCH.bit_length())] if given is None else [int(given)]
    return [size for size in sizes if sequences % size == 0]


def _orders(model: Model, pp: int, count: int, fixed: dict[str, int | str]) -> Iterator[tuple[str, int]]:
    """The schedules of a pipeline and their chunks. Without a pipeline the schedule means nothing."""
    if pp == 1:
        if fixed.get("chunks", 1) == 1:
            yield "1f1b", 1
        return
    for schedule in SCHEDULES:
        if fixed.get("schedule", schedule) != schedule or not has_formula(schedule, pp, count):
            continue
        for chunks in range(2, 1 + MOST_CHUNKS) if schedule == "interleaved" else (1,):
            if fixed.get("chunks", chunks) == chunks and pp * chunks <= model.layers:
                yield schedule, chunks


def _leaner(base: Layout, fixed: dict[str, int | str]) -> Iterator[Layout]:
    stages = [0] if base.dp * base.cp == 1 else [1, 2, 3] if base.pp == 1 else [1]
    if (given := fixed.get("zero")) is not None:
        stages = [int(given)] if base.pp == 1 or int(given) <= 1 else []
    for recompute in RECOMPUTE:
        if fixed.get("recompute", recompute) == recompute:
            yield from (base._replace(zero=zero, recompute=recompute) for zero in stages)


# ------------------------------------------------------------------------------------------------- the links of an axis


class Hop(NamedTuple):
    """The links of one level between `groups` groups, in each of which the axis has `inside` ranks.

    A group's bytes on this level are multiplied by `share`: 1 / inside if each rank has a port. All ranks of a node
    work at the same time. So a shared port also carries what the other ranks of the node send on their own axes.
    """

    link: Link
    groups: int
    inside: int
    share: float


class Axis(NamedTuple):
    """Some ranks of a job at equal distances, and the links between them, the innermost first."""

    size: int
    hops: tuple[Hop, ...]

    @staticmethod
    def of(machine: Machine, size: int, stride: int, ranks: int) -> Axis:
        """The axis of `size` ranks at the distance `stride`, in a job of `ranks` ranks. Groups may straddle nodes."""
        levels = [machine.innermost, *machine.levels]
        inside = [max(1, min(size, gcd(level.ranks, size * stride) // stride)) for level in levels]
        hops = []
        for level, own, outer in zip(levels, inside, [*inside[1:], size], strict=True):
            if outer > own:
                share = (level.ranks / own) if level.shared else 1 / own
                if level.ranks == 1:
                    share = 1 / min(machine.ports, size - 1)
                hops.append(Hop(Link(level, (), machine.slowest(ranks)), ceil(outer / own), own, share))
        return Axis(size, tuple(hops))

    def _seconds(self, entering: Sequence[float]) -> float:
        """Seconds until so many bytes have entered a group of each level. All levels work at the same time."""
        latency = sum(hop.link.level.latency * (hop.groups - 1) for hop in self.hops)
        return latency + max(hop.link.busy(n * hop.share) for hop, n in zip(self.hops, entering, strict=True))

    def gather(self, nbytes: float) -> float:
        """Seconds of an all-gather of `nbytes` in all, or of a reduce-scatter of as many on each rank."""
        if self.size == 1 or not nbytes:
            return 0.0
        return self._seconds([nbytes * (1 - hop.inside / self.size) for hop in self.hops])

    def exchange(self, nbytes: float) -> float:
        """Seconds of an all-to-all of `nbytes` on each rank."""
        if self.size == 1:
            return 0.0
        return self._seconds([hop.inside * nbytes * (1 - hop.inside / self.size) for hop in self.hops])

    def message(self, nbytes: float) -> float:
        """Seconds of a message to the next rank, if all ranks send one: over the slowest link."""
        return max(
            (hop.link.level.latency + hop.link.busy(nbytes * max(1.0, hop.share)) for hop in self.hops), default=0.0
        )


# -------------------------------------------------------------------------------------------------- the parts of a step


class Work(NamedTuple):
    """Seconds of kernels, and the exposed seconds of the messages among them, by axis."""

    compute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self)

    def plus(self, other: Work, times: float = 1.0) -> Work:
        return Work(*(a + times * b for a, b in zip(self, other, strict=True)))


class Passes(NamedTuple):
    """The forward, the backward that gives gradients of inputs, and the one that gives gradients of parameters.

    `cheap` is the part of the forward that "selective" computes again.
    """

    forward: Work = Work()
    inputs: Work = Work()
    weights: Work = Work()
    cheap: Work = Work()

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.inputs.seconds + self.weights.seconds

    def with_recompute(self, recompute: str) -> Passes:
        """These passes, with what the backward computes again."""
        again = {"none": Work(), "selective": self.cheap, "full": self.forward}[recompute]
        return self._replace(inputs=self.inputs.plus(again))

    def plus(self, other: Passes, times: float = 1.0) -> Passes:
        return Passes(*(a.plus(b, times) for a, b in zip(self, other, strict=True)))


class Stage(NamedTuple):
    """The mean stage of the busiest rank, the layers of a stage, and those of the last one, beside the output layer."""

    passes: Passes
    layers: int
    last: int


class _Step:
    """The parts of a step of one model on one machine, kept by the sizes on which they depend."""

    def __init__(self, model: Model, machine: Machine, ranks: int, batch: int):
        self.model, self.machine, self.ranks, self.batch = model, machine, ranks, batch
        self.axis = lru_cache(maxsize=None)(lambda size, stride: Axis.of(machine, size, stride, ranks))
        self.layer = lru_cache(maxsize=None)(self._layer)
        self.weights = lru_cache(maxsize=None)(self._weights)
        self.bucket = lru_cache(maxsize=None)(self._bucket)
        self.output = lru_cache(maxsize=None)(self._output)
        self.stage = lru_cache(maxsize=None)(self._stage)
        self.exposed = lru_cache(maxsize=None)(self._exposed)

    def tokens(self, layout: Layout) -> float:
        """The tokens of a micro-batch on the tp ranks of a group."""
        return layout.microbatch * self.model.sequence / layout.cp

    # --------------------------------------------------------------------------------------------------------- products

    def _product(self, rows: float, k: float, n: float, weights: float = 1) -> float:
        """Seconds of x[rows, k] @ w[k, n]. Of `weights` experts, each takes its share of the rows. Without waves."""
        operands = ITEM * (rows * k + weights * k * n)
        return self.machine.kernel(2 * rows * k * n, operands + ITEM * rows * n, operands)

    def _keys(self, tp: int) -> float:
        """The columns of the keys on a rank. Several ranks share a head if there are fewer heads than ranks."""
        return max(self.model.kv_width / tp, self.model.hidden // self.model.heads)

    def _touch(self, nbytes: float) -> float:
        """Seconds of a kernel that is as slow as the memory."""
        return self.machine.kernel(0, nbytes)

    def _sums(self, nbytes: float, size: int) -> float:
        """Seconds of the sums of a reduce-scatter that no kernel hides: on one lane they take the kernels' core."""
        return 3 * nbytes * (1 - 1 / size) / self.machine.memory_rate if self.machine.lanes == 1 else 0.0

    def _pipelined(self, size: int, messages: float, whole: float, piece: float) -> float:
        """The exposed seconds of a product in `size` pieces beside its messages, or of one in a piece after them."""
        if size == 1:
            return 0.0
        pieces = size * piece
        return min(messages, max(0.0, messages - (1 - 1 / size) * pieces) + pieces - whole)

    def _column(self, tp: int, rows: float, k: float, n: float, weights: float = 1) -> Passes:
        """A column-parallel product: all-gather and product; in the backward bulk, dx beside x and dw beside dx."""
        axis, messages = self.axis(tp, 1), self.axis(tp, 1).gather(ITEM * rows * k)
        whole, dx, dw = (
            self._product(rows, k, n, weights),
            self._product(rows, n, k, weights),
            self._product(k, rows, n) + (weights - 1) * self._touch(ITEM * k * n),
        )
        ahead = self._pipelined(axis.size, messages, whole, self._product(rows / tp, k, n, weights))
        sums = self._sums(ITEM * rows * k, tp)
        return Passes(Work(whole, ahead), Work(dx, max(0.0, messages - dx) + sums), Work(dw, max(0.0, messages - dw)))

    def _row(self, tp: int, rows: float, k: float, n: float, weights: float = 1) -> Passes:
        """A row-parallel product: product and reduce-scatter; in the backward all-gather, dx and dw."""
        messages = self.axis(tp, 1).gather(ITEM * rows * n)
        whole, dx, dw = (
            self._product(rows, k, n, weights),
            self._product(rows, n, k, weights),
            self._product(k, rows, n) + (weights - 1) * self._touch(ITEM * k * n),
        )
        behind = self._pipelined(tp, messages, whole, self._product(rows / tp, k, n, weights))
        if tp > 1:
            behind += self._touch(3 * ITEM * rows / tp * n) + self._sums(ITEM * rows * n, tp)
        both = self._product(rows / tp, n, k, weights) + self._product(k, rows / tp, n)
        both += (weights - 1) * self._touch(ITEM * k * n)
        return Passes(Work(whole, behind), Work(dx, self._pipelined(tp, messages, dx + dw, both)), Work(dw))

    # ---------------------------------------------------------------------------------------------------------- a layer

    def _layer(self, tp: int, cp: int, ep: int, microbatch: int) -> tuple[Passes, str]:
        """A layer of one micro-batch on one rank, and how cp shares a sequence: the faster way."""
        model, rows = self.model, microbatch * self.model.sequence / cp
        h = model.hidden
        projections = self._column(tp, rows, h, h / tp + 2 * self._keys(tp))
        attention, way = min(self._attentions(tp, cp, rows, projections), key=lambda each: each[0].seconds)
        norms = Work(self._touch(10 * ITEM * rows / tp * h))  # two norms, and two sums with what goes around
        made = projections.plus(self._row(tp, rows, h / tp, h)).plus(attention)
        made = made.plus(Passes(norms, Work().plus(norms, 2), cheap=norms))
        return made.plus(self._experts(tp, ep, rows) if model.experts else self._mlp(tp, rows, model.ffn)), way

    def _mlp(self, tp: int, rows: float, ffn: int, weights: float = 1) -> Passes:
        h, matrices = self.model.hidden, self.model.matrices
        made = self._column(tp, rows, h, (matrices - 1) * ffn / tp, weights)
        made = made.plus(self._row(tp, rows, ffn / tp, h, weights))
        activation = Work(self._touch(ITEM * rows * matrices * ffn / tp))
        return made.plus(Passes(activation, Work().plus(activation, 2), cheap=activation))

    def _experts(self, tp: int, ep: int, rows: float) -> Passes:
        """The router, the experts, and those that all tokens go to. They hide dispatch and combine."""
        model, axis = self.model, self.axis(ep, tp)
        made = self._mlp(tp, rows * model.top_k, model.ffn, model.experts / ep)
        if model.shared:
            made = made.plus(self._mlp(tp, rows, model.ffn * model.shared))
        moved = ITEM * rows * model.top_k * model.hidden / tp  # by a rank, there or back
        messages = 2 * axis.exchange(moved)
        hidden = made.forward.compute, made.inputs.compute + made.weights.compute
        copies = self._touch(4 * moved)  # tokens are sorted by expert, and added
        route = self._product(rows / tp, model.hidden, model.experts)
        exposed = [max(0.0, messages - seconds) for seconds in hidden]
        return made.plus(Passes(Work(copies + route, ep=exposed[0]), Work(copies + 2 * route, ep=exposed[1])))

    def _attentions(self, tp: int, cp: int, rows: float, projections: Passes) -> Iterator[tuple[Passes, str]]:
        """Attention beside its projections, by ring and by Ulysses, whose messages hide behind the projections too."""
        model, axis, head = self.model, self.axis(cp, tp), self.model.hidden // self.model.heads
        flops, nbytes = model.attention(rows) / tp, 8.0 * rows * model.hidden / tp
        ahead, back = self.machine.kernel(flops, nbytes), self.machine.kernel(2.5 * flops, 2 * nbytes)
        if cp == 1:
            yield Passes(Work(ahead), Work(back)), ""
            return
        a, b = self.machine.kernel(flops / cp, nbytes / cp), self.machine.kernel(2.5 * flops / cp, 2 * nbytes / cp)
        message = axis.message(2 * ITEM * rows * self._keys(tp))
        exposed = [(cp - 1) * max(0.0, k - kernel) for k, kernel in ((message, a), (2 * message, b))]
        yield Passes(Work(cp * a, cp=exposed[0]), Work(cp * b, cp=exposed[1])), "ring"
        if model.heads % (tp * cp):
            return
        into = axis.exchange(ITEM * rows * (model.hidden / tp + 2 * max(self._keys(tp), cp * head)))
        out, hides = axis.exchange(ITEM * rows * model.hidden / tp), 1 - 1 / cp
        outer = self._product(rows, model.hidden, model.hidden / tp)  # dx of the output projection
        forward = max(0.0, into - hides * projections.forward.compute) + max(0.0, out - hides * ahead)
        backward = max(0.0, out - hides * outer) + max(0.0, into - hides * back)
        yield Passes(Work(ahead, cp=forward), Work(back, cp=backward)), "ulysses"

    def _output(self, tp: int, cp: int, microbatch: int) -> Passes:
        """The output layer and the loss, over the vocabulary."""
        rows, columns = microbatch * self.model.sequence / cp, self.model.vocabulary / tp
        loss = self._touch(3 * 4 * rows * columns)
        return self._column(tp, rows, self.model.hidden, columns).plus(Passes(Work(loss), Work(loss)))

    # ----------------------------------------------------------------------------------------------- stages and buckets

    def _stage(self, tp: int, cp: int, ep: int, microbatch: int, pp: int, chunks: int) -> Stage:
        """Layers are dealt evenly, but for the last stage, which has fewer: the output layer is there."""
        layer, output = self.layer(tp, cp, ep, microbatch)[0], self.output(tp, cp, microbatch)
        total, stages = self.model.layers, pp * chunks
        if stages == 1:
            return Stage(output.plus(layer, total), total, total)
        found: list[tuple[float, Stage]] = []
        for count in range(ceil(total / stages), ceil(total / (stages - 1)) + 1):
            last = max(0, total - (stages - 1) * count)
            first_rank = Passes().plus(layer, count)
            last_rank = output.plus(layer, (chunks - 1) * count + last)
            last_rank = Passes().plus(last_rank, 1 / chunks)
            busiest = max(first_rank, last_rank, key=lambda passes: passes.seconds)
            found.append((busiest.seconds, Stage(busiest, count, last)))
        return min(found, key=lambda each: each[0])[1]

    def _stage_of(self, layout: Layout) -> Stage:
        _, tp, pp, ep, cp, microbatch, _, chunks, *_ = layout
        return self.stage(tp, cp, ep, microbatch, pp, chunks)

    def _weights(self, tp: int, ep: int, layers: float, tables: int) -> tuple[float, float]:
        """The parameters of a rank with some layers, and `tables` as large as the embedding. Those of experts apart."""
        model = self.model
        layer = 2 * model.hidden * (model.hidden / tp + self._keys(tp) + 1)
        mlp, experts = model.ffn_weights / tp, 0.0
        if model.experts:
            layer += model.shared * mlp + model.hidden * model.experts
            experts = model.experts / ep * mlp
        else:
            layer += mlp
        return layers * layer + tables * model.vocabulary * model.hidden / tp, layers * experts

    def _bucket(self, data: int, tp: int, ep: int, item: float, layers: float, tables: int) -> float:
        """Seconds of a reduce-scatter or all-gather over the `data` ranks of dp and cp, of some layers and tables."""
        dense, experts = self.weights(tp, ep, layers, tables)
        return self.axis(data, tp).gather(item * dense) + self.axis(data // ep, tp * ep).gather(item * experts)

    def _exposed(self, layout: Layout) -> float:
        """The exposed seconds of the axis dp, of the first stage: its embedding has no backward behind it."""
        dp, tp, pp, ep, cp, microbatch, _, chunks, zero, recompute, _ = layout
        data, count = dp * cp, self._count(layout)
        if data == 1:
            return 0.0
        layers = self._stage_of(layout).layers * chunks
        forward, inputs, weights, _ = self.layer(tp, cp, ep, microbatch)[0].with_recompute(recompute)
        tables = 1 if pp == 1 and not self.model.tied else 0  # of an output layer on this stage
        first = final = 0.0
        if pp == 1:
            output = self.output(tp, cp, microbatch)
            first, final = output.forward.seconds, output.inputs.seconds + output.weights.seconds
        ahead, back = layers * forward.seconds, layers * (inputs.seconds + weights.seconds)

        def moved(item: float, cut: int) -> list[float]:
            """Seconds of the messages of the output layer, of a bucket of layers, and of the embedding."""
            return [self.bucket(data, tp, ep, item, n, t) for n, t in ((0, tables), (layers / cut, 0), (0, 1))]

        def sums(cut: int) -> list[Job]:
            """The backward: the output layer, then buckets of layers, then the embedding. ZeRO-3 gathers there too."""
            taken, gathered = moved(GRADIENT, cut), moved(ITEM, cut) if zero == 3 else [0.0] * 3
            if zero == 0:  # an all-reduce
                taken = [2 * seconds for seconds in taken]
            done = (final, back / cut, 0.0)
            jobs = [Job(b, g + a) for b, g, a in zip(done, taken, gathered, strict=True)]
            return [jobs[0], *[jobs[1]] * cut, jobs[2]]

        def gathers(cut: int) -> list[Job]:
            """The forward: the embedding, then buckets of layers, then the output layer."""
            jobs = [Job(a, f) for a, f in zip(moved(ITEM, cut), (first, ahead / cut, 0.0), strict=True)]
            return [jobs[2], *[jobs[1]] * cut, jobs[0]]

        again = count - 1  # in ZeRO-2 and 3 every micro-batch has messages. What does not fit beside one, adds up.
        cuts = [1 << i for i in range(min(layers, MOST_BUCKETS).bit_length())]
        forward_seconds, backward_seconds = ahead + first, back + final
        room = backward_seconds + (0.0 if zero == 3 else forward_seconds)
        exposed = min(
            makespan(jobs) - backward_seconds + (zero >= 2) * again * max(0.0, sum(job.second for job in jobs) - room)
            for jobs in map(sums, cuts)
        )
        if zero:
            exposed += min(
                makespan(jobs)
                - forward_seconds
                + (zero == 3) * again * max(0.0, sum(job.first for job in jobs) - forward_seconds)
                for jobs in map(gathers, cuts)
            )
        every = sum(self.weights(tp, ep, layers, 1 + tables))
        return exposed + self._sums(GRADIENT * every, data) * (count if zero >= 2 else 1)

    # --------------------------------------------------------------------------------------------------------- a layout

    def _count(self, layout: Layout) -> int:
        """The micro-batches of a rank."""
        return self.batch // layout.dp // layout.microbatch

    def predicted(self, layout: Layout, memory: Memory) -> Predicted:
        """The step of a layout."""
        _, tp, pp, ep, cp, microbatch, schedule, chunks, _, recompute, _ = layout
        model, count = self.model, self._count(layout)
        forward, inputs, weights, _ = self._stage_of(layout).passes.with_recompute(recompute)
        backward = inputs.plus(weights)
        layout = layout._replace(attention=self.layer(tp, cp, ep, microbatch)[1])
        seconds = {"F": forward.seconds, "B": backward.seconds, "I": inputs.seconds, "W": weights.seconds}
        message = self.axis(pp, self.ranks // pp).message(ITEM * self.tokens(layout) * model.hidden / tp)
        work = Work().plus(forward.plus(backward), count * chunks)
        alone = pipeline.predicted(schedule, pp, count, chunks, seconds)
        bubble = max(0.0, alone - work.seconds) if pp > 1 else 0.0
        owned = memory.optimizer / OPTIMIZER
        exposed = {
            "dp": self.exposed(layout._replace(schedule="")),  # it does not depend on the order of the micro-batches
            "tp": work.tp,
            "pp": pipeline.predicted(schedule, pp, count, chunks, seconds, message) - alone,
            "ep": work.ep,
            "cp": work.cp,
        }
        compute = work.compute + self._touch(UPDATE * owned)
        total, tokens = compute + bubble + sum(exposed.values()), self.batch * model.sequence
        rate = model.step_flops(tokens) / total / self.ranks
        return Predicted(layout, compute, bubble, exposed, memory, tokens / total, rate, rate / self.machine.flops_rate)

    def memory(self, layout: Layout) -> Memory:
        """The bytes of the first or of the last stage, whichever has more."""
        return max((self._memory(layout, rank) for rank in {0, layout.pp - 1}), key=lambda memory: memory.total)

    def _memory(self, layout: Layout, rank: int) -> Memory:
        dp, tp, pp, ep, cp, _, schedule, chunks, zero, recompute, _ = layout
        model, stage, tokens, is_last = self.model, self._stage_of(layout), self.tokens(layout), rank == pp - 1
        layers = stage.layers * chunks - (stage.layers - stage.last if is_last and pp > 1 else 0)
        tables = (rank == 0) + (is_last and not (model.tied and pp == 1))
        dense, experts = self.weights(tp, ep, layers, tables)
        everything, data = dense + experts, dp * cp
        owned = dense / data + experts / (data // ep)
        parameters, gradients, optimizer = (
            bytes_each * (owned if zero >= least else everything)
            for bytes_each, least in ((ITEM, 3), (GRADIENT, 2), (OPTIMIZER, 1))
        )
        unit = max(sum(self.weights(tp, ep, 1, 0)), self.weights(tp, ep, 0, min(tables, 1))[0])
        working = 2 * ITEM * unit * (zero == 3) + GRADIENT * unit * (zero >= 2)  # buckets that are gathered or summed
        working += (2 * ITEM * tokens * model.hidden if tp > 1 else 0) + is_last * 6 * tokens * model.vocabulary / tp
        kept = tokens * self._kept(tp, recompute)
        held = pipeline.alive(schedule, pp, self._count(layout), rank, chunks) if pp > 1 else (1, 0)
        if recompute == "full":
            working += kept
            kept = ITEM * tokens / tp * model.hidden
        each = min(stage.layers, layers) if pp > 1 else layers
        return Memory(parameters, gradients, optimizer, sum(held) * each * kept + working)

    def _kept(self, tp: int, recompute: str) -> float:
        """Bytes per token that the forward of a layer keeps for its backward. Scores of attention are computed again.

        They are: the input of both norms and their outputs, queries, keys, values, the output of attention and its
        log-sum-exp, and the two sides of the activation (Korthikanti et al. 2022, without dropout and scores). The
        outputs of norms and of the activation are left out if they are computed again.
        """
        model, cheap = self.model, recompute == "selective"
        attention = (ITEM * (4 if cheap else 6) * model.hidden + 4 * model.heads) / tp + ITEM * 2 * self._keys(tp)
        mlp = ITEM * (model.matrices - cheap) * model.ffn / tp
        routed = model.top_k * (ITEM * model.hidden / tp + mlp) if model.experts else mlp
        return attention + routed + model.shared * mlp
