"""The seconds and the bytes of a step of a model, for one layout of its parallel axes, by formulas.

    step = Step(model, machine, ranks=64, batch=512)
    layout = Layout(dp=8, tp=8)
    step.predicted(layout, step.memory(layout)).seconds

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

With a `wire` (`fompi.base.wires`) every message carries the elements in that form, if it is smaller. Each element is
encoded and decoded once at memory speed: with the messages, or exposed where kernels have the only lane.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from fompi.base.wires import WIRES, wire_of
from fompi.model import pipeline
from fompi.model.flow_shop import Job, makespan
from fompi.model.machine import Machine
from fompi.planner.axis import Axis
from fompi.planner.layers import Transformer

AXES = ("dp", "tp", "pp", "ep", "cp")
"""The axes, in the order in which a layout is printed."""

ITEM, GRADIENT, OPTIMIZER = 2, 4, 12
"""Bytes of an element, of a gradient, and of what AdamW keeps per parameter: a copy and two moments in float32."""

UPDATE = 2 * OPTIMIZER + GRADIENT + ITEM
"""Bytes that the optimizer reads and writes per parameter."""

RECOMPUTE = ("none", "selective", "full")
"""What the backward computes again: nothing; the outputs of norms and activations; or each layer."""

MOST_BUCKETS = 32
"""The most buckets of a rank's layers that are tried."""

COLUMNS = ("dp x tp x pp x ep x cp", "ms", "compute", "bubble", *AXES, "GB", "TFLOP/s", "MFU", "tokens/s", "how")
"""The heads of the table. Times are in ms, those of the axes are exposed. TFLOP/s are per rank."""


class StepLayout(NamedTuple):
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


class MemoryBytes(NamedTuple):
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

    `mfu` is the share of the machine's `flops_rate` that the operations of the model take (`Transformer.step_flops`).
    `flops_rate` are those operations per second and rank.
    """

    layout: StepLayout
    compute: float
    bubble: float
    exposed: dict[str, float]
    memory: MemoryBytes
    tokens_rate: float
    flops_rate: float
    mfu: float
    shares: str = ""  # of unequal ranks

    @property
    def seconds(self) -> float:
        return self.compute + self.bubble + sum(self.exposed.values())

    def row(self, unit: float = 1e-3) -> tuple[str, ...]:
        """The cells of a table with the heads COLUMNS. `unit`: that of the times, in seconds."""
        times = (self.seconds, self.compute, self.bubble, *(self.exposed[axis] for axis in AXES))
        rates = f"{self.flops_rate / 1e12:.3g}", f"{self.mfu:.1%}", f"{self.tokens_rate:,.0f}"
        memory = f"{self.memory.total / 1e9:.1f}"
        how = ", ".join(filter(None, (self.layout.how, self.shares)))
        return (str(self.layout), *(f"{t / unit:.1f}" for t in times), memory, *rates, how)


# -------------------------------------------------------------------------------------------------- the parts of a step


class StepWork(NamedTuple):
    """Seconds of kernels, and the exposed seconds of the messages among them, by axis."""

    compute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self)

    def plus(self, other: StepWork, times: float = 1.0) -> StepWork:
        return StepWork(*(a + times * b for a, b in zip(self, other, strict=True)))


class Passes(NamedTuple):
    """The forward, the backward that gives gradients of inputs, and the one that gives gradients of parameters.

    `cheap` is the part of the forward that "selective" computes again.
    """

    forward: StepWork = StepWork()
    inputs: StepWork = StepWork()
    weights: StepWork = StepWork()
    cheap: StepWork = StepWork()

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.inputs.seconds + self.weights.seconds

    def with_recompute(self, recompute: str) -> Passes:
        """These passes, with what the backward computes again."""
        again = {"none": StepWork(), "selective": self.cheap, "full": self.forward}[recompute]
        return self._replace(inputs=self.inputs.plus(again))

    def plus(self, other: Passes, times: float = 1.0) -> Passes:
        return Passes(*(a.plus(b, times) for a, b in zip(self, other, strict=True)))


StageLoad = tuple[Passes, int, int]
"""The mean stage of the busiest rank, the layers of a stage, those of the last one without the output layer."""


class StepParts:
    """The parts of a step of one model on one machine, kept by the sizes on which they depend."""

    def __init__(self, model: Transformer, machine: Machine, ranks: int, batch: int, wire: str | None = None):
        name = wire_of(wire, "float32")
        each = WIRES[name].each if name else float(GRADIENT)
        self.item, self.gradient = min(float(ITEM), each), each  # bytes of an element in a message
        self.model, self.machine, self.ranks, self.batch = model, machine, ranks, batch
        self.axis = lru_cache(maxsize=None)(lambda size, stride: Axis.of(machine, size, stride, ranks))
        self.layer = lru_cache(maxsize=None)(self._layer)
        self.weights = lru_cache(maxsize=None)(self._weights)
        self.bucket = lru_cache(maxsize=None)(self._bucket)
        self.output = lru_cache(maxsize=None)(self._output)
        self.stage = lru_cache(maxsize=None)(self._stage)
        self.exposed = lru_cache(maxsize=None)(self._exposed)

    def tokens(self, layout: StepLayout) -> float:
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

    def _sent(self, item: float) -> float:
        """Bytes of an element of `item` bytes in a message."""
        return self.gradient if item == GRADIENT else self.item

    def _coded(self, elements: float, item: float) -> tuple[float, float]:
        """Seconds in which `elements` of `item` bytes become messages and elements again: with them, and exposed."""
        sent = self._sent(item)
        seconds = 2 * self._touch((item + sent) * elements) if sent < item else 0.0
        return (seconds, 0.0) if self.machine.lanes > 1 else (0.0, seconds)

    def _pipelined(self, size: int, messages: float, whole: float, piece: float) -> float:
        """The exposed seconds of a product in `size` pieces during its messages, or of one in a piece after them."""
        if size == 1:
            return 0.0
        pieces = size * piece
        return min(messages, max(0.0, messages - (1 - 1 / size) * pieces) + pieces - whole)

    def _column(self, tp: int, rows: float, k: float, n: float, weights: float = 1) -> Passes:
        """A column-parallel product: all-gather and product; in the backward bulk, dx with x and dw with dx."""
        axis = self.axis(tp, 1)
        beside, coded = self._coded(rows * k * (tp > 1), ITEM)
        messages = axis.gather(self.item * rows * k) + beside
        whole, dx = self._product(rows, k, n, weights), self._product(rows, n, k, weights)
        dw = self._product(k, rows, n) + (weights - 1) * self._touch(ITEM * k * n)
        ahead = self._pipelined(axis.size, messages, whole, self._product(rows / tp, k, n, weights))
        sums = self._sums(ITEM * rows * k, tp) + coded
        return Passes(
            StepWork(whole, ahead + coded),
            StepWork(dx, max(0.0, messages - dx) + sums),
            StepWork(dw, max(0.0, messages - dw) + coded),
        )

    def _row(self, tp: int, rows: float, k: float, n: float, weights: float = 1) -> Passes:
        """A row-parallel product: product and reduce-scatter; in the backward all-gather, dx and dw."""
        beside, coded = self._coded(rows * n * (tp > 1), ITEM)
        messages = self.axis(tp, 1).gather(self.item * rows * n) + beside
        whole, dx = self._product(rows, k, n, weights), self._product(rows, n, k, weights)
        dw = self._product(k, rows, n) + (weights - 1) * self._touch(ITEM * k * n)
        behind = self._pipelined(tp, messages, whole, self._product(rows / tp, k, n, weights))
        if tp > 1:
            behind += self._touch(3 * ITEM * rows / tp * n) + self._sums(ITEM * rows * n, tp) + coded
        both = self._product(rows / tp, n, k, weights) + self._product(k, rows / tp, n)
        both += (weights - 1) * self._touch(ITEM * k * n)
        back = self._pipelined(tp, messages, dx + dw, both) + coded
        return Passes(StepWork(whole, behind), StepWork(dx, back), StepWork(dw))

    # ---------------------------------------------------------------------------------------------------------- a layer

    def _layer(self, tp: int, cp: int, ep: int, microbatch: int) -> tuple[Passes, str]:
        """A layer of one micro-batch on one rank, and how cp shares a sequence: the faster way."""
        model, rows = self.model, microbatch * self.model.sequence / cp
        h = model.hidden
        projections = self._column(tp, rows, h, h / tp + 2 * self._keys(tp))
        attention, way = min(self._attentions(tp, cp, rows, projections), key=lambda each: each[0].seconds)
        norms = StepWork(self._touch(10 * ITEM * rows / tp * h))  # two norms, and two sums with what goes around
        made = projections.plus(self._row(tp, rows, h / tp, h)).plus(attention)
        made = made.plus(Passes(norms, StepWork().plus(norms, 2), cheap=norms))
        return made.plus(self._experts(tp, ep, rows) if model.experts else self._mlp(tp, rows, model.ffn)), way

    def _mlp(self, tp: int, rows: float, ffn: int, weights: float = 1) -> Passes:
        h, matrices = self.model.hidden, self.model.matrices
        made = self._column(tp, rows, h, (matrices - 1) * ffn / tp, weights)
        made = made.plus(self._row(tp, rows, ffn / tp, h, weights))
        activation = StepWork(self._touch(ITEM * rows * matrices * ffn / tp))
        return made.plus(Passes(activation, StepWork().plus(activation, 2), cheap=activation))

    def _experts(self, tp: int, ep: int, rows: float) -> Passes:
        """The router, the experts, and those that all tokens go to. They hide dispatch and combine."""
        model, axis = self.model, self.axis(ep, tp)
        made = self._mlp(tp, rows * model.top_k, model.ffn, model.experts / ep)
        if model.shared:
            made = made.plus(self._mlp(tp, rows, model.ffn * model.shared))
        moved = rows * model.top_k * model.hidden / tp  # elements, by a rank, there or back
        beside, coded = self._coded(moved * (ep > 1), ITEM)
        messages = 2 * (axis.exchange(self.item * moved) + beside)
        hidden = made.forward.compute, made.inputs.compute + made.weights.compute
        copies = self._touch(4 * ITEM * moved)  # tokens are sorted by expert, and added
        route = self._product(rows / tp, model.hidden, model.experts)
        exposed = [max(0.0, messages - seconds) + 2 * coded for seconds in hidden]
        return made.plus(Passes(StepWork(copies + route, ep=exposed[0]), StepWork(copies + 2 * route, ep=exposed[1])))

    def _attentions(self, tp: int, cp: int, rows: float, projections: Passes) -> Iterator[tuple[Passes, str]]:
        """Attention without its projections, by ring and by Ulysses, whose messages hide behind the projections too."""
        model, axis, head = self.model, self.axis(cp, tp), self.model.hidden // self.model.heads
        flops, nbytes = model.attention(rows) / tp, 8.0 * rows * model.hidden / tp
        ahead, back = self.machine.kernel(flops, nbytes), self.machine.kernel(2.5 * flops, 2 * nbytes)
        if cp == 1:
            yield Passes(StepWork(ahead), StepWork(back)), ""
            return
        a, b = self.machine.kernel(flops / cp, nbytes / cp), self.machine.kernel(2.5 * flops / cp, 2 * nbytes / cp)
        beside, coded = self._coded(2 * rows * self._keys(tp), ITEM)
        message = axis.message(2 * self.item * rows * self._keys(tp)) + beside
        exposed = [(cp - 1) * (max(0.0, n * message - kernel) + n * coded) for n, kernel in ((1, a), (2, b))]
        yield Passes(StepWork(cp * a, cp=exposed[0]), StepWork(cp * b, cp=exposed[1])), "ring"
        if model.heads % (tp * cp):
            return
        taken, given = rows * (model.hidden / tp + 2 * max(self._keys(tp), cp * head)), rows * model.hidden / tp
        (into, first), (out, last) = (
            (axis.exchange(self.item * n) + beside, exposed)
            for n in (taken, given)
            for beside, exposed in [self._coded(n, ITEM)]
        )
        hides = 1 - 1 / cp
        outer = self._product(rows, model.hidden, model.hidden / tp)  # dx of the output projection
        forward = max(0.0, into - hides * projections.forward.compute) + max(0.0, out - hides * ahead) + first + last
        backward = max(0.0, out - hides * outer) + max(0.0, into - hides * back) + first + last
        yield Passes(StepWork(ahead, cp=forward), StepWork(back, cp=backward)), "ulysses"

    def _output(self, tp: int, cp: int, microbatch: int) -> Passes:
        """The output layer and the loss, over the vocabulary."""
        rows, columns = microbatch * self.model.sequence / cp, self.model.vocabulary / tp
        loss = self._touch(3 * 4 * rows * columns)
        return self._column(tp, rows, self.model.hidden, columns).plus(Passes(StepWork(loss), StepWork(loss)))

    # ----------------------------------------------------------------------------------------------- stages and buckets

    def _stage(self, tp: int, cp: int, ep: int, microbatch: int, pp: int, chunks: int) -> StageLoad:
        """Layers are dealt evenly, but for the last stage, which has fewer: the output layer is there."""
        layer, output = self.layer(tp, cp, ep, microbatch)[0], self.output(tp, cp, microbatch)
        total, stages = self.model.layers, pp * chunks
        if stages == 1:
            return output.plus(layer, total), total, total
        found: list[tuple[float, StageLoad]] = []
        for count in range(ceil(total / stages), ceil(total / (stages - 1)) + 1):
            last = max(0, total - (stages - 1) * count)
            first_rank = Passes().plus(layer, count)
            last_rank = output.plus(layer, (chunks - 1) * count + last)
            last_rank = Passes().plus(last_rank, 1 / chunks)
            busiest = max(first_rank, last_rank, key=lambda passes: passes.seconds)
            found.append((busiest.seconds, (busiest, count, last)))
        return min(found, key=lambda each: each[0])[1]

    def _stage_of(self, layout: StepLayout) -> StageLoad:
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
        sent, beside = self._sent(item), self._coded(dense + experts, item)[0]
        return self.axis(data, tp).gather(sent * dense) + self.axis(data // ep, tp * ep).gather(sent * experts) + beside

    def _exposed(self, layout: StepLayout) -> float:
        """The exposed seconds of the axis dp, of the first stage: its embedding has no backward behind it."""
        dp, tp, pp, ep, cp, microbatch, _, chunks, zero, recompute, _ = layout
        data, count = dp * cp, self._count(layout)
        if data == 1:
            return 0.0
        layers = self._stage_of(layout)[1] * chunks
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

        again = count - 1  # in ZeRO-2 and 3 every micro-batch has messages. What does not fit behind one, adds up.
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
        adding = self._sums(GRADIENT * every, data) + self._coded(every, GRADIENT)[1]
        return exposed + adding * (count if zero >= 2 else 1) + bool(zero) * self._coded(every, ITEM)[1]

    # --------------------------------------------------------------------------------------------------------- a layout

    def _count(self, layout: StepLayout) -> int:
        """The micro-batches of a rank."""
        return self.batch // layout.dp // layout.microbatch

    def predicted(self, layout: StepLayout, memory: MemoryBytes) -> Predicted:
        """The step of a layout."""
        _, tp, pp, ep, cp, microbatch, schedule, chunks, _, recompute, _ = layout
        model, count = self.model, self._count(layout)
        forward, inputs, weights, _ = self._stage_of(layout)[0].with_recompute(recompute)
        backward = inputs.plus(weights)
        layout = layout._replace(attention=self.layer(tp, cp, ep, microbatch)[1])
        seconds = {"F": forward.seconds, "B": backward.seconds, "I": inputs.seconds, "W": weights.seconds}
        message = self.axis(pp, self.ranks // pp).message(self.item * self.tokens(layout) * model.hidden / tp)
        message += sum(self._coded(self.tokens(layout) * model.hidden / tp, ITEM))
        work = StepWork().plus(forward.plus(backward), count * chunks)
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

    def memory(self, layout: StepLayout) -> MemoryBytes:
        """The bytes of the first or of the last stage, whichever has more."""
        return max((self._memory(layout, rank) for rank in {0, layout.pp - 1}), key=lambda memory: memory.total)

    def _memory(self, layout: StepLayout, rank: int) -> MemoryBytes:
        dp, tp, pp, ep, cp, _, schedule, chunks, zero, recompute, _ = layout
        model, tokens, (_, count, last) = self.model, self.tokens(layout), self._stage_of(layout)
        is_last = rank == pipeline.rank_of(pp * chunks - 1, pp, pipeline.placement_of(schedule))
        layers = count * chunks - (count - last if is_last and pp > 1 else 0)
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
        kept = tokens * self.kept(tp, recompute)
        held = pipeline.alive(schedule, pp, self._count(layout), rank, chunks) if pp > 1 else (1, 0)
        if recompute == "full":
            working += kept
            kept = ITEM * tokens / tp * model.hidden
        each = min(count, layers) if pp > 1 else layers
        return MemoryBytes(parameters, gradients, optimizer, sum(held) * each * kept + working)

    def kept(self, tp: int, recompute: str) -> float:
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
