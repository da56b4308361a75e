"""Which measured figures back which claim of docs/results.md.

A benchmark suite prints many rows. A `Pick` selects the figures of some rows by regular expressions and condenses them
to one figure: their geometric mean, with the least and the largest as the range. A pick of one row keeps that row's own
interval.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import exp, log
from typing import Any


@dataclass(frozen=True)
class Pick:
    """One line of a claim: the figures whose row matches `what` and whose name matches `name`."""

    label: str
    what: str
    name: str


@dataclass(frozen=True)
class Claim:
    """One table of docs/results.md, from one suite of benchmarks. `beside`: suites with the same figures, by column."""

    suite: str
    title: str
    text: str
    picks: tuple[Pick, ...]
    beside: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """One measured figure. `low` and `high` are the 95 % interval of one row, or the range over `rows` rows."""

    figure: str
    value: float
    low: float | None
    high: float | None
    unit: str
    rows: int
    least: float | None  # the value that was asked for, at least or at most
    most: float | None
    limit: float | None  # what physics allows

    @property
    def reached(self) -> bool | None:
        """Whether every row is as good as asked. None if nothing was asked."""
        if self.least is None and self.most is None:
            return None
        worst = self.value if self.rows == 1 else (self.low if self.least is not None else self.high)
        assert worst is not None
        return (self.least is None or worst >= self.least) and (self.most is None or worst <= self.most)


def condense(pick: Pick, rows: Iterable[Mapping[str, Any]]) -> Figure | None:
    """The figure of a pick, from the rows of a suite's JSON. None if no row matches."""
    found = [
        figure
        for row in rows
        if re.search(pick.what, row["what"])
        for figure in row["figures"]
        if re.search(pick.name, figure["name"])
    ]
    if not found:
        return None
    values = [figure["value"] for figure in found]
    least, most, limit = (_common(found, key) for key in ("least", "most", "limit"))
    if len(found) == 1:
        interval = found[0]["interval"] or {}
        low, high, value = interval.get("low"), interval.get("high"), values[0]
    else:
        low, high = min(values), max(values)
        value = exp(sum(map(log, values)) / len(values)) if low > 0 else sum(values) / len(values)
    return Figure(pick.label, value, low, high, found[0]["unit"], len(found), least, most, limit)


def _common(figures: Iterable[Mapping[str, Any]], key: str) -> float | None:
    """The value that all figures share."""
    values = {figure[key] for figure in figures}
    return values.pop() if len(values) == 1 else None


def to_line(figure: Figure) -> dict[str, Any]:
    """The figure for JSON, rounded to four digits and without empty fields."""
    plain = {key: value for key, value in asdict(figure).items() if value not in (None, "")}
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in plain.items()}


def from_line(line: Mapping[str, Any]) -> Figure:
    fields = {"low": None, "high": None, "unit": "", "rows": 1, "least": None, "most": None, "limit": None}
    return Figure(**{key: line.get(key, fields.get(key)) for key in ("figure", "value", *fields)})


_OPERATIONS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
_LIBRARY_DEFAULT = r"^library / fompi, (?!.*slice)"
_BALANCES = {"0.56": "communication 0.56 of compute", "1": "both equal", "2": "communication twice the compute"}

_STRATEGIES = {
    "ZeRO-1": ("ZeRO-1", "g / b", (0.5, 0.9)),
    "TP+SP block": ("TP\\+SP block", "T_m / T_c", (0.56, 1)),
    "attention, query split": ("attention, query split", "T_m / T_c", (0.5,)),
    "ring attention": ("ring attention", "k / a", (0.5, 1, 1.3)),
    "ring attention, backward": ("ring attention, backward", "k / a", (0.5, 1, 1.3)),
    "Ulysses": ("Ulysses attention", "T_m / T_c", (0.5, 1)),
    "Ulysses, N = 2": ("Ulysses attention, N = 2", "T_m / T_c", (0.5, 1)),
    "USP 2x2": ("USP 2x2", "T_m / T_c", (0.5,)),
    "experts": ("mixture of experts", "(Md + Mc) / G", (0.4, 0.6, 0.8, 1)),
    "experts, two micro-batches": ("mixture of experts, forward under backward", "(Md + Mc) / G", (0.6, 1)),
}
"""label -> the rows of the suite `parallel`, and the ratios of each."""

_SMALL = "(64 B|1 KiB|16 KiB|64 KiB)"
_SUMS = "(all_reduce( async| bfloat16| float16)?|reduce_scatter_single|reduce)"
_EXCHANGES = "(all_gather_single|all_to_all_single)"
_ROOTED = "(broadcast|gather|scatter)"

CLAIMS = (
    Claim(
        "fused",
        "Fused operations on real GEMMs",
        "Two hosts with one core each, links of 1 Gbit/s, four operations, four sizes, float32. A helper thread moves "
        "messages while kernels run, for the rivals too. The bound is what the core and the link allow together.",
        (
            Pick("without overlap / fompi", "M=", r"^unfused.* / fompi"),
            Pick("best slicing / fompi", "all rows", r"^best slices / fompi, geometric mean$"),
            Pick("bound / fompi", "all rows", r"^bound / time, geometric mean"),
            Pick("default schedule / best schedule", "all rows", r"^fompi, .* / the best of fompi"),
            Pick("worst fompi / without overlap (low end of the interval)", "M=", r"^low end of"),
        ),
    ),
    Claim(
        "papers",
        "The setting of the papers",
        "Four hosts, links of 1 Gbit/s, kernels on an emulated accelerator: a kernel takes its time on the clock and "
        "no core. The caller polls meanwhile. The range is over GEMM + reduce-scatter and all-gather + GEMM.",
        (
            *(Pick(f"{words}: without overlap / fompi", f"= {t}$", "^unfused") for t, words in _BALANCES.items()),
            *(Pick(f"{words}: best slicing / fompi", f"= {t}$", "^8 slices") for t, words in _BALANCES.items()),
            Pick("communication 0.56 of compute: exposed / communication", "0.56", "^exposed"),
            Pick("communication twice the compute: fompi / bare exchange", "= 2$", "bare exchange$"),
        ),
    ),
    Claim(
        "parallel",
        "The strategies of parallel training",
        "Four hosts, links of 500 Mbit/s, emulated accelerators, a helper thread moves messages. `exposed` "
        "is the time beyond the kernels alone, as a share of the time of the messages alone. Asked is the bound "
        "([what the strategies hide](concepts/strategies.md)) and 0.03. `serial`: no kernel runs while a message "
        "moves; the range is over the ratios. Pipelines: 4 stages, 8 micro-batches, the formula has the messages. "
        "`host time` is exposed on links of 8 Gbit/s too, with the same kernels: four hosts share two cores. A "
        "miss that it can explain is slanted. `two hosts` have a core each, and half the messages.",
        (
            *(
                Pick(f"{label}, {of} = {ratio:g}: exposed / messages", f"^{what}, {re.escape(of)} = {ratio:g}$", "^e")
                for label, (what, of, ratios) in _STRATEGIES.items()
                for ratio in ratios
            ),
            Pick(
                "serial / fompi, all rows above",
                f"^({'|'.join(what for what, _, _ in _STRATEGIES.values())}), ",
                "^serial",
            ),
            Pick("pipelines, eight schedules: time / formula", "^pipeline", "time / formula$"),
            Pick("a step as one plan: time beyond the bounds / time", "^a step as one plan", "^beyond"),
            Pick("a step as one plan: time / simulated", "^a step as one plan", "simulated$"),
            Pick("TP beside DP, first come: exposed / alone", "^data beside tensor", "first come / alone"),
            Pick("TP beside DP, priorities: exposed / alone", "^data beside tensor", "^exposed.*priorities / alone"),
            Pick("the same, whole steps: first come / priorities", "^data beside tensor", "^whole step, first come"),
        ),
        beside={"host time": "host", "two hosts": "parallel-2"},
    ),
    Claim(
        "step",
        "Training steps compared with PyTorch over gloo",
        "Two hosts with one core each, 1 Gbit/s, a stack of residual MLP blocks on kernels of torch. Eager "
        "1F1B lets forwards run ahead, which torch does not have.",
        (
            Pick("torch DDP / fompi", "^data parallel", "^torch DDP / "),
            Pick("one all-reduce after the backward / fompi", "^data parallel", "^all-reduce after"),
            Pick("FSDP2 / fompi, zero=3", "^parameters sharded", "^FSDP2 / "),
            Pick("torch 1F1B / fompi", "^pipeline", "^torch 1F1B / fompi 1F1B$"),
            Pick("torch 1F1B / fompi, eager", "^pipeline", "^torch 1F1B / fompi eager 1F1B$"),
            Pick("torch interleaved 1F1B / fompi", "^pipeline", "^torch interleaved / "),
        ),
    ),
    Claim(
        "ddp",
        "DistributedDataParallel, ten shapes",
        "Two hosts with one core each, 1 Gbit/s, stacks of residual MLP blocks, buckets of 1 MiB. `backend` is torch's "
        "DistributedDataParallel on the backend fompi. The bound is the larger one of link and cores "
        "(`tools/suites/ddp.py`); `hidden` is the share of what it lets a step hide. Asked of gloo / backend and "
        "gloo / fompi.torch: 1.0 in every row. gloo itself is within 13 % of the bound, so nothing can be 1.3 times "
        "as fast.",
        (
            Pick("gloo / backend", " rows$", "^gloo / fompi$"),
            Pick("gloo / fompi.torch", " rows$", r"^gloo / fompi\.torch$"),
            Pick("backend: hidden", " rows$", "^fompi: hidden$"),
            Pick("fompi.torch: hidden", " rows$", r"^fompi\.torch: hidden$"),
            Pick("fompi.torch: time / bound", " rows$", r"^fompi\.torch: time / bound$"),
        ),
    ),
    Claim(
        "programs",
        "Programs by torch's own classes",
        "Two hosts with one core each, 1 Gbit/s. A GPT of 17 million parameters, 256 tokens on a rank; a graph and a "
        "policy of small tensors. The same lines on a group of gloo and on one of the backend fompi: gloo / fompi.",
        (
            Pick("DistributedDataParallel", "^DDP$", "^gloo / fompi$"),
            Pick("the same with fp16_compress_hook", "^DDP, fp16$", "^gloo / fompi$"),
            Pick("nanoGPT's step", "^nanoGPT$", "^gloo / fompi$"),
            Pick("FSDP2", "^FSDP2$", "^gloo / fompi$"),
            Pick("1F1B", "^1F1B$", "^gloo / fompi$"),
            Pick("interleaved 1F1B", "^interleaved 1F1B$", "^gloo / fompi$"),
            Pick("a graph of small tensors", "^GNN$", "^gloo / fompi$"),
            Pick("a policy, tensor by tensor", "^RL$", "^gloo / fompi$"),
        ),
    ),
    Claim(
        "smaller",
        "Smaller messages",
        "Two hosts with one core each, 1 Gbit/s. The sum is of 16 MiB of float32. The messages of the product take "
        "twice as long as it does. The step is that of the GPT above, with error feedback.",
        (
            Pick("all_reduce: float32 / int8", "^all_reduce", "^float32 / int8$"),
            Pick("all_reduce: bfloat16 / int8", "^all_reduce", "^bfloat16 / int8$"),
            Pick("matmul_reduce_scatter: float32 / int8", "^matmul", "^float32 / int8$"),
            Pick("DistributedDataParallel: gloo / int8", "^DDP", "^gloo / int8$"),
            Pick("gloo with fp16_compress_hook / int8", "^DDP", "^gloo, fp16 / int8$"),
        ),
    ),
    Claim(
        "decode",
        "A decoder of 0.2 billion parameters",
        "Two hosts with one core each, 1 Gbit/s, float32, two sums of 4 KiB in each of 12 layers. In halves: the sum "
        "of one half of the prompt moves behind the products of the other. Programs on gloo compute it whole.",
        (
            Pick("a token: MPI's own sums / fompi", "^decode", "^MPI / fompi$"),
            Pick("a token: gloo / fompi", "^decode", "^gloo / fompi$"),
            Pick("a prompt of 512 tokens: gloo / fompi in halves", "^prefill", "^gloo / fompi in halves$"),
        ),
    ),
    Claim(
        "c10d",
        "The verbs of torch.distributed",
        "Two ranks, two cores, shared memory, 64 B to 100 MB; the range is over verbs and sizes.",
        (
            Pick("sums to 64 KiB: gloo / fompi", f"^{_SUMS} {_SMALL}$", "^gloo / fompi$"),
            Pick("sums above", f"^{_SUMS} (?!{_SMALL}$)[0-9]", "^gloo / fompi$"),
            Pick("exchanges in one tensor to 64 KiB", f"^{_EXCHANGES} {_SMALL}$", "^gloo / fompi$"),
            Pick("exchanges in one tensor above", f"^{_EXCHANGES} (?!{_SMALL}$)[0-9]", "^gloo / fompi$"),
            Pick("broadcasts, gathers, scatters to 64 KiB", f"^{_ROOTED} {_SMALL}$", "^gloo / fompi$"),
            Pick("broadcasts, gathers, scatters above", f"^{_ROOTED} (?!{_SMALL}$)[0-9]", "^gloo / fompi$"),
            Pick("send and recv", "^send, recv", "^gloo / fompi$"),
            Pick("barrier", "^barrier", "^gloo / fompi$"),
        ),
    ),
    Claim(
        "jit",
        "Calls that JAX compiles",
        "Two hosts, 500 Mbit/s. An all-reduce of 1 KiB above a bound one, and products during one of 8 MiB.",
        (
            Pick("fompi.jax.jit, 1 KiB, above the bound one", "1 KiB", "^fompi.jax.jit, above"),
            Pick("jax.jit, 1 KiB, above the bound one", "1 KiB", "^jax.jit, above"),
            Pick("start and wait / the longer of both", "8 MiB", "^start and wait /"),
            Pick("blocking / start and wait", "8 MiB", "^blocking / start"),
        ),
    ),
    Claim(
        "peers",
        "Compared with other libraries",
        "Two hosts, 1 Gbit/s, the same GEMMs. Peers: gloo, JAX (ppermute), mpi4py. The last two lines are rows in "
        "which messages take half to twice as long as the kernel.",
        (
            Pick("best slicing of any library / fompi", "all rows", "^best slices / fompi"),
            Pick("best peer as it comes / fompi", "all rows", "as it comes"),
            Pick("best peer, gloo in 2, 4, 8 slices too / fompi", "all rows", "gloo in slices"),
        ),
    ),
    Claim(
        "collectives",
        "Plain collectives",
        "Four hosts, 1 Gbit/s, 4, 16 and 64 MiB. `link` is a plain TCP stream of the same size. `library` is the MPI "
        "library's own collective. The range is over the sizes.",
        tuple(
            pick
            for operation in _OPERATIONS
            for pick in (
                Pick(f"{operation}: link / fompi, best schedule", f"^{operation} of", "^link /"),
                Pick(
                    f"{operation}: library / fompi, default schedule",
                    f"^{operation} of",
                    _LIBRARY_DEFAULT,
                ),
            )
        ),
    ),
    Claim(
        "planner",
        "The planner, 116 shapes of fused operations",
        "Two hosts, 1 Gbit/s, a calibrated machine. Most shapes were not part of the calibration.",
        (
            Pick("error of the prediction, median", "^all", "^median error of the prediction, chosen plan$"),
            Pick("error of the prediction, 95th percentile", "^all", "^95th percentile of that error, chosen plan$"),
            Pick("shapes whose plan is within 2 % of the best", "^all", "^share of shapes within 2 % of the best"),
            Pick("worst chosen / without overlap (low end of the interval)", "^all", "^worst low end"),
        ),
    ),
    *(
        Claim(
            suite,
            title,
            text,
            (
                Pick("bound / fompi", "of 8 MiB", "^bound / time$"),
                Pick("best ring or direct plan / hierarchical plan", "of 8 MiB", r" / hierarchical"),
                Pick("predicted / measured", "of 8 MiB", "^predicted"),
            ),
        )
        for suite, title, text in (
            (
                "planner-2x2",
                "Two groups of two hosts",
                "1 Gbit/s inside a group, one shared link of 100 Mbit/s between. Reduce-scatter, all-gather, "
                "all-reduce of 8 MiB; the range is over the three.",
            ),
            ("planner-2x4", "Two groups of four hosts", "The same with 400 Mbit/s inside and 40 Mbit/s between."),
        )
    ),
    Claim(
        "planner-slow",
        "One of four hosts at a quarter of the rate",
        "Reduce-scatter, all-gather, all-reduce of 8 MiB. In the all-reduce the slow host sums nothing.",
        (
            Pick("bound / fompi", "of 8 MiB", "^bound / time$"),
            Pick("all_reduce: best plan that does not know / fompi", "^all_reduce of 8 MiB", r" / direct"),
        ),
    ),
    Claim(
        "adapt",
        "A link drops to a third while a job runs",
        "Four hosts, 1 Gbit/s, operations bound with `adapt=True`; 8 MiB; the range is over three operations.",
        (
            Pick("calls until the plan changes", "drops", "^calls until"),
            Pick("adapted plan / plan made afresh", "drops", "^adapted / fresh"),
        ),
    ),
    Claim(
        "overhead",
        "What a call costs",
        "Two ranks, two cores, shared memory: nothing overlaps. The caller polls.",
        (
            Pick("all-reduce of 1 KiB, bound, above the library's own", "1 KiB", "^bound"),
            Pick("all-reduce of 1 KiB, unbound, above the library's own", "1 KiB", "^unbound"),
            Pick("one op of a bound plan", "64 slices", "^an op"),
            Pick("all-to-all, new counts at every call, above the bare messages", "^all-to-all", "above the bare"),
            Pick("bound all-gather, new counts, above the bare messages", "^all-gather, new", "above the bare"),
            Pick("a plan for 8 ranks: written, verified, compiled", "^a plan for 8", "cold"),
            Pick("a cold choice for 8 ranks", "choice by the model for 8 ranks", "cold"),
            Pick("a cold choice for 1,024 ranks", "choice by the model for 1024", "cold"),
        ),
    ),
)
