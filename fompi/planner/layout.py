"""Which sizes of data, tensor, pipeline, expert and context parallelism are best for a model on a machine, on paper.

    print(fompi.layouts("llama-8b", 64, "h100-ndr"))

Every layout that is possible is predicted by the formulas of `fompi.planner.step`. Those that do not fit into the
memory of a rank are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, inf
from statistics import fmean

from fompi.base import tables
from fompi.base.errors import LayoutError, quoted
from fompi.base.layout import integer
from fompi.model.machine import NO_LIMIT, Machine
from fompi.model.pipeline import SCHEDULES, has_chunks, has_formula
from fompi.planner.layers import MODELS, Transformer
from fompi.planner.step import AXES, COLUMNS, RECOMPUTE, Predicted, StepLayout, StepParts

FREE = (*AXES, "microbatch", "schedule", "chunks", "zero", "recompute")
"""What is chosen, unless it is given."""

USABLE = 0.9
"""The share of the memory that may be used. The rest is for the libraries' own buffers and for fragmentation."""

BATCH_TOKENS = 4 << 20
"""The tokens of a step, if no batch is given."""

UNITS = (("days", 86400.0, 4e5), ("h", 3600.0, 1e4), ("s", 1.0, 1e2), ("ms", 1e-3, 0.0))
"""The units of times: their seconds, and from how many seconds of a step on they are taken."""

TOP = 10
"""How many layouts are shown."""

MOST_RANKS, MOST_MICROBATCH, MOST_CHUNKS = 1 << 20, 16, 8
"""The most ranks. What is tried: the most sequences of a micro-batch, and chunks of a rank."""


@dataclass(frozen=True)
class Layouts:
    """The best layouts of a model on a machine, the fastest first. No two have the same sizes of the axes.

    `tried` layouts were predicted, `left_out` others do not fit. `warning`: what the machine does not say.
    """

    title: str
    best: tuple[Predicted, ...]
    tried: int
    left_out: int
    warning: str = ""

    @property
    def remark(self) -> str:
        """What the table does not show, in one line."""
        return f"{self.tried} layouts predicted by formulas, {self.left_out} left out for want of memory{self.warning}"

    @property
    def parts(self) -> list[str | tables.Table]:
        """The title, a row for each layout, and the remark. The unit of the times fits the fastest one."""
        name, unit = next((name, unit) for name, unit, least in UNITS if self.best[0].seconds >= least)
        heads = COLUMNS[0], name, *COLUMNS[2:]
        return [self.title, tables.Table(heads, [each.row(unit) for each in self.best], heads[:-1]), self.remark]

    def __str__(self) -> str:
        return tables.text(*self.parts)


def layouts(
    model: str | Transformer,
    ranks: int,
    machine: Machine | str,
    *,
    batch: int | None = None,
    top: int = TOP,
    wire: str | None = None,
    **fixed: int | str,
) -> Layouts:
    """layouts("llama-8b", 64, "h100-ndr").best[0]: the fastest layout of a model on a machine, on paper.

        print(fompi.layouts("llama-8b", 64, "h100-ndr", batch=512, tp=8))

    `model` is a name in `fompi.planner.layers.MODELS`, or a `Transformer` with sizes of your own. `batch` are the
    sequences of a step (without it 4 Mi tokens). `fixed` are parts of a layout that are given: dp, tp, pp, ep, cp,
    microbatch, schedule, chunks, zero, recompute. The others are chosen. `wire` is the form in which messages carry
    elements (`fompi.base.wires`). `fompi/planner/step.py` says what is counted. Where ranks are unequal (`speeds`,
    `memories`) there are layouts with equal shares, for which the slowest rank counts, and with shares that fit.

    Raises LayoutError for numbers out of range, if no layout is possible, and if none fits into the memory: then it
    names the one that comes nearest, and what it needs.
    """
    name, sizes = model_of(model)
    machine = Machine.of(machine)
    for what, value, most in (("ranks", ranks, MOST_RANKS), ("top", top, MOST_RANKS)):
        if not 1 <= (integer(value) or 0) <= most:
            raise LayoutError(f"{what}={value!r} must be an integer from 1 to {most}")
    batch = max(1, BATCH_TOKENS // sizes.sequence) if batch is None else batch
    if not 1 <= (integer(batch) or 0) <= MOST_RANKS:
        raise LayoutError(f"batch={batch!r} must be a number of sequences from 1 to {MOST_RANKS}")
    _check_fixed(fixed)
    best: dict[tuple[int, ...], Predicted] = {}
    nearest: tuple[float, StepLayout] = inf, StepLayout()
    tried = left_out = 0
    machines = [*_by_shares(machine, ranks, sizes.sequence)]
    steps = [(shares, StepParts(sizes, each, ranks, batch, wire)) for shares, each in machines]
    for (shares, step), leaner_and_leaner in product(steps, _candidates(sizes, ranks, batch, fixed)):
        for layout in leaner_and_leaner:
            memory = step.memory(layout)
            if memory.total > USABLE * step.machine.memory:
                left_out += 1
                nearest = min(nearest, (memory.total, layout))
                continue
            made, tried = replace(step.predicted(layout, memory), shares=shares), tried + 1
            if made.seconds < best.setdefault(layout.sizes, made).seconds:
                best[layout.sizes] = made
            if layout.zero <= 1:
                break  # what follows needs less memory and takes longer
    if not tried:
        raise _refusal(name, sizes, ranks, batch, machines[-1][1], fixed, nearest)
    listed = sorted(best.values(), key=_order)
    tokens = batch * sizes.sequence
    title = f"{name} on {ranks} rank{'s' * (ranks > 1)} of {machine.name}, {batch} sequences of {sizes.sequence} tokens"
    title += f", {tokens / 1e6:.1f} million tokens a step" + (f", messages in {wire}" if wire else "")
    unknown = f"; warning: {machine.name} does not say how much memory a rank has (`memory`), so all of them fit"
    return Layouts(title, tuple(listed[:top]), tried, left_out, unknown * (machines[-1][1].memory >= NO_LIMIT))


def _by_shares(machine: Machine, ranks: int, rows: int) -> Iterator[tuple[str, Machine]]:
    """A rank as it counts by equal shares, and by shares of speed and memory. Only one where ranks are equal."""
    everyone = range(ranks if machine.speeds or machine.memories else 1)
    speeds, memories = [1 / machine.slowness(r, rows) for r in everyone], [*map(machine.memory_of, everyone)]
    for name, of in (("equal shares", min), ("shares by speed", fmean)):
        flops, moved = (rate * of(speeds) for rate in (machine.flops_rate, machine.memory_rate))
        each = replace(machine, flops_rate=flops, memory_rate=moved, memory=of(memories), speeds=(), memories=())
        if len({*zip(speeds, memories, strict=True)}) == 1:
            return (yield "", each)
        yield name, each


def _order(made: Predicted) -> tuple[float, int, int, int]:
    """The fastest first. Of layouts with the same time, that with the fewest ranks on the inner axes."""
    return float(f"{made.seconds:.6g}"), made.layout.cp, made.layout.pp, made.layout.tp


def model_of(model: str | Transformer) -> tuple[str, Transformer]:
    """The name and the sizes of a model. Raises LayoutError for what no model has."""
    if isinstance(model, str):
        if model not in MODELS:
            raise LayoutError(f"no model {quoted(model, MODELS)}; choose {', '.join(MODELS)}, or sizes of your own")
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
            raise LayoutError(f"a layout has no {quoted(name, FREE)}; it has {', '.join(FREE)}")
        if name in texts:
            if value not in texts[name]:
                raise LayoutError(f"{name}={quoted(value, texts[name])}; choose {', '.join(texts[name])}")
        elif integer(value) is None or not (0 if name == "zero" else 1) <= int(value) <= (
            3 if name == "zero" else MOST_RANKS
        ):
            raise LayoutError(f"{name}={value!r} must be " + ("0, 1, 2 or 3" if name == "zero" else "an integer >= 1"))


def _refusal(
    name: str,
    model: Transformer,
    ranks: int,
    batch: int,
    machine: Machine,
    fixed: dict[str, int | str],
    nearest: tuple[float, StepLayout],
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


def _candidates(model: Transformer, ranks: int, batch: int, fixed: dict[str, int | str]) -> Iterator[list[StepLayout]]:
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
                            yield [*_leaner(StepLayout(dp, tp, pp, ep, cp, size, schedule, chunks), fixed)]


def _divisors(n: int) -> list[int]:
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


def _microbatches(sequences: int, fixed: dict[str, int | str]) -> list[int]:
    """The sizes of a micro-batch, if a rank has this many sequences: powers of two, or what is given."""
    given = fixed.get("microbatch")
    sizes = [1 << i for i in range(MOST_MICROBATCH.bit_length())] if given is None else [int(given)]
    return [size for size in sizes if sequences % size == 0]


def _orders(model: Transformer, pp: int, count: int, fixed: dict[str, int | str]) -> Iterator[tuple[str, int]]:
    """The schedules of a pipeline and their chunks. Without a pipeline the schedule means nothing."""
    if pp == 1:
        if fixed.get("chunks", 1) == 1:
            yield "1f1b", 1
        return
    for schedule in SCHEDULES:
        if fixed.get("schedule", schedule) != schedule or not has_formula(schedule, pp, count):
            continue
        if schedule == "dualpipev" and "schedule" not in fixed:
            continue  # zbv takes at most as long, in less memory: nothing runs side by side here
        for chunks in range(1 + (schedule == "interleaved"), 1 + MOST_CHUNKS):
            if not has_chunks(schedule, chunks):
                continue
            if fixed.get("chunks", chunks) == chunks and pp * chunks <= model.layers:
                yield schedule, chunks


def _leaner(base: StepLayout, fixed: dict[str, int | str]) -> Iterator[StepLayout]:
    stages = [0] if base.dp * base.cp == 1 else [1, 2, 3] if base.pp == 1 else [1]
    if (given := fixed.get("zero")) is not None:
        stages = [int(given)] if base.pp == 1 or int(given) <= 1 else []
    for recompute in RECOMPUTE:
        if fixed.get("recompute", recompute) == recompute:
            yield from (base._replace(zero=zero, recompute=recompute) for zero in stages)
