"""Shares of a model for unequal ranks: what each rank gets, so that none waits long for another.

    print(fompi.balance("laptops", "llama-1b"))

Three ways to deal a model are compared, each by equal shares, by the best shares on two ranks or more, and by one rank
alone. The best of these is taken. So balanced shares are never slower than equal ones, or than one rank, by the model.

- `tensor`: heads (whole groups of a key head), columns, experts, the vocabulary. A sum over the ranks ends each phase
  of a layer, so a step takes the sum over the phases of the slowest rank of each.
- `layers`: contiguous runs. A token takes the sum of all stages, a step of training that of the slowest stage.
- `data` (training): rows (sequences) by speed, and the state of ZeRO by memory.

`fompi.planner.shares` finds the best integers, for the costs of `fompi.planner.demands`. A rank without units is left
out of the messages, too: of up to six ranks every set is tried, of more ranks the fastest one, two, three and so on.
Left out are the embedding's lookup, biases, and what Python itself takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from fompi.base import tables
from fompi.base.doors import DOORS
from fompi.base.errors import LayoutError, quoted
from fompi.base.layout import cut, integer, itemsize
from fompi.model.machine import Machine
from fompi.planner.demands import MIB, Demands
from fompi.planner.layers import Transformer
from fompi.planner.layout import MOST_RANKS, UNITS, USABLE, model_of
from fompi.planner.shares import Counts, Phase, Ring, cut_by_slowest, cut_layers, deal, deal_in_memory, deal_in_rounds
from fompi.traces.timeline import timelines
from fompi.traces.trace import Event, Trace

TASKS = {"decode": "token", "prefill": "prompt", "train": "step"}
"""What shares are for, and what a time is for: one token of each sequence, all their tokens, a step."""

NAMES = ("heads", "columns", "experts", "vocabulary", "layers", "rows", "state")
"""What is dealt, in the order in which it is printed."""

CANDIDATES = ("equal shares", "two ranks or more", "one rank alone")
"""The heads of the times of a way."""

MOST_BALANCED, TRAINED = 64, 32
"""The most ranks. The sequences of a training step, if none are given."""

SAME, FULL, IDLE = 1 + 1e-9, 0.97, 0.005
"""Times that differ by less than this factor are the same: then equal shares are taken. From this share of the usable
bytes on a memory is called full. A rank that waits less than this share of the time is called the slowest."""


@dataclass(frozen=True)
class Shares:
    """What each rank gets in one way, and what it takes.

    `units[name][rank]`, with a name of NAMES: heads are those of queries, state is in bytes. `seconds` are those of a
    token, prompt or step. `kernels` (seconds) and `nbytes` are those of each rank. With `rounds` > 1 the ranks take
    turns so often: each has `layers / rounds` layers in a turn.
    """

    way: str
    units: dict[str, Counts]
    seconds: float
    kernels: tuple[float, ...]
    nbytes: tuple[float, ...]
    rounds: int = 1

    @property
    def ranks(self) -> Counts:
        """Those that get something."""
        return tuple(rank for rank in range(len(self.kernels)) if any(each[rank] for each in self.units.values()))

    @property
    def messages(self) -> float:
        """The seconds of messages and waits in which the busiest rank does not compute."""
        return max(0.0, self.seconds - (sum if self.way == "layers" else max)(self.kernels))

    def trace(self) -> Trace:
        """A picture of a step: the kernels of each rank, and its messages at the end. Stages follow each other."""
        events, begun, stages = [], 0.0, self.way == "layers"
        for rank, seconds in enumerate(self.kernels):
            events.append(Event(rank, "compute", -1, self.way, begun, begun + seconds))
            if rank in self.ranks:
                begun, last = begun + seconds * stages, self.messages / (len(self.ranks) if stages else 1)
                first = begun if stages else self.seconds - last
                events.append(Event(rank, "send", -1, "messages", first, first + last))
                begun += last * stages
        return Trace("predicted", self.way, tuple(events))


@dataclass(frozen=True)
class Compared:
    """One way: equal shares, the best shares on two ranks or more, and one rank alone. None: they do not fit."""

    way: str
    equal: Shares | None
    together: Shares | None
    alone: Shares | None

    @property
    def shares(self) -> tuple[Shares | None, ...]:
        """The candidates, in the order of CANDIDATES."""
        return self.equal, self.together, self.alone

    @property
    def best(self) -> Shares:
        """The fastest one. Of those that take the same time it is the first."""
        found = [each for each in self.shares if each]
        return next(each for each in found if each.seconds <= SAME * min(each.seconds for each in found))


@dataclass(frozen=True)
class Balance:
    """The shares of a model on unequal ranks. `print(balance)` says why; `plot()` is a picture, as the text of an SVG.

    `best` are the fastest Shares. `counts` are the units of each rank by their names (NAMES), of the best shares of
    each way: `balance.counts["heads"][rank]`. `room` are the bytes that each rank may use.
    """

    title: str
    task: str
    ways: tuple[Compared, ...]
    room: tuple[float, ...]

    @property
    def best(self) -> Shares:
        return min((each.best for each in self.ways), key=lambda shares: shares.seconds)

    @property
    def counts(self) -> dict[str, Counts]:
        found = {name: each for compared in self.ways for name, each in compared.best.units.items()}
        return {name: found[name] for name in NAMES if name in found}

    @property
    def parts(self) -> list[str | tables.Table]:
        """The title, a row for each rank, a row for each way, and what follows from them."""
        best, unit = self.best, self._unit[0]
        counts = {
            f"{name} MiB" if name == "state" else name: [n // MIB for n in each] if name == "state" else each
            for name, each in self.counts.items()
        }
        busy, sizes = map(self._in, best.kernels), (f"{nbytes / 1e9:.2f}" for nbytes in best.nbytes)
        everyone = range(len(self.room))
        heads = "rank", *counts, unit, "GB", "why"
        rows = [*zip(everyone, *counts.values(), busy, sizes, map(self._why, everyone), strict=True)]
        times = [(each.way, *(self._in(x.seconds) if x else "does not fit" for x in each.shares)) for each in self.ways]
        return [
            self.title,
            tables.Table(heads, rows, heads[:-1]),
            f"{unit} and GB are those of the way {best.way}. In {unit}, a {TASKS[self.task]} takes by",
            tables.Table(("way", *CANDIDATES), times, CANDIDATES),
            self.verdict,
        ]

    @property
    def _unit(self) -> tuple[str, float]:
        return next((name, unit) for name, unit, least in UNITS if self.best.seconds >= least)

    def _in(self, seconds: float) -> str:
        return f"{seconds / self._unit[1]:.4g}"

    def _why(self, rank: int) -> str:
        """Why a rank gets what it gets in the best shares."""
        best = self.best
        if rank not in best.ranks:
            return "nothing: faster without it"
        if len(best.ranks) == 1:
            return "everything: faster alone" if len(self.room) > 1 else "everything"
        if best.nbytes[rank] > FULL * self.room[rank]:
            return "its memory is full"
        if best.way == "layers":
            return f"computes {best.kernels[rank] / best.seconds:.0%} of the time"
        idle = 1 - best.kernels[rank] / max(best.kernels)
        return f"waits {idle:.1%} of the kernels' time" if idle > IDLE else "the slowest: others wait for it"

    @property
    def verdict(self) -> str:
        """What is best, and how much longer the other candidates take."""
        best, unit, others = self.best, self._unit[0], []
        for i, name in enumerate(CANDIDATES):
            found = _fastest(each.shares[i] for each in self.ways)
            if found is None:
                others.append(f"{name}: does not fit" if len(self.room) > 1 else "")
            elif found != best:
                waits = f", {self._in(found.messages)} {unit} of it messages and waits" * (len(found.ranks) > 1)
                others.append(f"{name}: {found.seconds / best.seconds:.2f} times as long ({found.way}{waits})")
        who = best.way if len(best.ranks) > 1 else f"rank {best.ranks[0]} alone"
        rounds = f" in {best.rounds} rounds" * (best.rounds > 1)
        said = f"best is {who}{rounds}: {self._in(best.seconds)} {unit} a {TASKS[self.task]}"
        return "; ".join(filter(None, [said, *others]))

    def plot(self) -> str:
        """The text of an SVG file: equal shares, balanced shares and one rank alone, in the best way."""
        compared = next(each for each in self.ways if each.best == self.best)
        named = {"equal shares": compared.equal, "balanced": self.best, "one rank alone": compared.alone}
        return timelines({f"{name}, {each.way}": each.trace() for name, each in named.items() if each})

    def __str__(self) -> str:
        return tables.text(*self.parts)

    def _repr_html_(self) -> str:
        return tables.html(*self.parts)


def balance(
    machine: Any,
    model: str | Transformer,
    ranks: int | None = None,
    *,
    task: str = "decode",
    batch: int | None = None,
    dtype: str = "bfloat16",
    zero: int = 1,
) -> Balance:
    """balance("laptops", "llama-1b").counts["heads"]: the heads of each rank, if the ranks are not equally fast.

        print(fompi.balance("laptops.json", "llama-1b"))

    `machine` is a Machine, the name of a preset or the path of a file: `speeds`, `memories` and `disk_rates` say how
    ranks differ. Or it is a communicator, whose ranks measure it now, for some seconds: collective, with the same
    result on all of them. `model` is a name in `fompi.planner.layers.MODELS`, or a `Transformer`. `ranks` is their
    number (without it as many as these lists have). `task`: "decode" (a token of each of `batch` sequences, 1),
    "prefill" (all tokens of them) or "train" (a step of `batch` sequences, 32, with AdamW and the ZeRO stage `zero`).
    `dtype` is that of weights and activations.

    Raises LayoutError for numbers out of range, and if the model does not fit into the memory of the ranks. Raises
    PackageError if memory decides, and SciPy is missing.
    """
    if isinstance(machine, (Machine, str, Path)):
        machine = Machine.of(machine)
    else:  # then all ranks have the same arguments, and the same errors
        machine = DOORS.machine(machine, f"balance({model!r}, {ranks=}, {task=}, {batch=}, {dtype=}, {zero=})")
    name, sizes = model_of(model)
    ranks = max(map(len, (machine.speeds, machine.memories))) if ranks is None else ranks
    if ranks == 0 and not (machine.speeds or machine.memories):
        raise LayoutError(f"{machine.name} does not say how many ranks it has (`speeds`, `memories`): give `ranks`")
    if task not in TASKS:
        raise LayoutError(f"task={quoted(task, TASKS)}; choose {', '.join(TASKS)}")
    batch = (TRAINED if task == "train" else 1) if batch is None else batch
    limits = (("ranks", ranks, 1, MOST_BALANCED), ("batch", batch, 1, MOST_RANKS), ("zero", zero, 0, 3))
    for what, value, least, most in limits:
        if not least <= (-1 if integer(value) is None else value) <= most:
            raise LayoutError(f"{what}={value!r} must be an integer from {least} to {most}")
    costs = Demands(sizes, machine, ranks, task, batch, itemsize(dtype), zero)
    ways = [_by_units("tensor", costs), _by_layers(costs), *([_by_units("data", costs)] if costs.trains else [])]
    fitting = tuple(each for each in ways if any(each.shares))
    if not fitting:
        needed, usable = sum(phase.nbytes(phase.totals) for phase in costs.alone), sum(costs.room)
        raise LayoutError(
            f"{name} does not fit: a copy needs {needed / 1e9:.1f} GB, and the ranks may use {usable / 1e9:.1f} GB, "
            f"{USABLE:.0%} of their memory. Take more ranks, or fewer or shorter sequences"
        )
    what = f"{task}, {batch} sequence{'s' * (batch > 1)} of {sizes.sequence} tokens, {dtype}"
    return Balance(f"{name} on {ranks} rank{'s' * (ranks > 1)} of {machine.name}: {what}", task, fitting, costs.room)


def _fastest(found: Iterable[Shares | None]) -> Shares | None:
    return min((each for each in found if each), key=lambda shares: shares.seconds, default=None)


# ------------------------------------------------------------------------------------------------------- by units


def _by_units(way: str, costs: Demands) -> Compared:
    """The way `tensor` or `data`."""
    make, everyone = (costs.tensor if way == "tensor" else costs.data), tuple(range(costs.ranks))
    kernels = make((0,))
    base = costs.model.parameters * (costs.weight - costs.dealt) * (way == "data")  # the bytes of each rank in any case
    room = [each - base for each in costs.room]

    def shares(phases: Sequence[Phase], dealt: Sequence[Sequence[Counts]] | None) -> Shares | None:
        """The Shares of these counts. None if they do not fit."""
        pairs = [*zip(phases, dealt or [], strict=bool(dealt))]
        used = [sum(phase.nbytes(counts[rank]) for phase, counts in pairs) for rank in everyone]
        if not dealt or any(n and n > SAME * left for n, left in zip(used, room, strict=True)):
            return None
        units = {name: tuple(n[i] for n in counts) for phase, counts in pairs for i, name in enumerate(phase.names)}
        for name, unit in (("heads", costs.model.heads // costs.model.kv_heads), ("state", MIB)):
            units |= {name: tuple(n * unit for n in units[name])} if name in units else {}
        busy = [sum(one.seconds(r, counts[r]) for one, counts in zip(kernels, dealt, strict=True)) for r in everyone]
        seconds = sum(phase.slowest(counts) for phase, counts in pairs)
        return Shares(way, units, seconds, (*busy,), tuple(n + base * (n > 0) for n in used))

    even = [[*zip(*(cut(total, [1] * costs.ranks) for total in phase.totals), strict=True)] for phase in kernels]
    alone = [[[tuple(n * (r == one) for n in each.totals) for r in everyone] for each in kernels] for one in everyone]
    together, tried = None, []
    for ranks in costs.subsets():
        phases = make(ranks)
        free = [deal(phase, ranks) or [] for phase in phases]  # without limits it is always possible
        tried.append((sum(phase.slowest(each) for phase, each in zip(phases, free, strict=True)), ranks, phases, free))
    for least, ranks, phases, free in sorted(tried, key=lambda each: each[0]):
        if together and least >= together.seconds:
            break  # with less memory it takes longer still
        found = shares(phases, free)
        if not found and sum(each.nbytes(each.totals) for each in phases) <= sum(room[rank] for rank in ranks):
            found = shares(phases, deal_in_memory(phases, ranks, room))
        together = _fastest([together, found])
    return Compared(way, shares(make(everyone), even), together, _fastest(shares(kernels, each) for each in alone))


# ------------------------------------------------------------------------------------------------------- by layers


class _Stages:
    """The seconds and the bytes of runs of layers."""

    def __init__(self, costs: Demands):
        everyone = range(costs.ranks)
        self.costs, self.count, (heads, mlp, output) = costs, costs.model.layers, costs.alone
        both = [[phase.seconds(rank, phase.totals) for phase in (heads, mlp)] for rank in everyone]
        self.layer = [sum(each) / self.count / costs.steps for each in both]
        self.output = [output.seconds(rank, output.totals) / costs.steps for rank in everyone]
        self.each = (heads.nbytes(heads.totals) + mlp.nbytes(mlp.totals)) / self.count
        self.tables = output.nbytes(output.totals)
        embedding = costs.weight * costs.model.vocabulary * costs.model.hidden
        self.first, self.last = embedding, self.tables - embedding * (not costs.model.tied)
        # what a message to a rank takes, by its slowest link; the last rank samples: one integer of each row returns
        nbytes, sampled = costs.rows * costs.model.hidden * costs.item, 4 * costs.sampled
        links = [[costs.links.link(a, b) for a in everyone if a != b] for b in everyone]
        ways, returns = (2, 0) if costs.trains else (1, 1)
        self.hops = [max((ways * link.seconds(nbytes) for link in each), default=0.0) for each in links]
        self.back = returns * max((link.seconds(sampled) for each in links for link in each), default=0.0)

    def nbytes(self, rank: int, first: int, end: int) -> float:
        """The bytes of a stage. In training it keeps the activations of as many sequences as stages may follow."""
        is_first, is_last = first == 0, end == self.count
        held = max(0, min(self.costs.batch, self.costs.ranks - rank) - 1) if end - first < self.count else 0
        tables = self.tables if is_first and is_last else self.first * is_first + self.last * is_last
        return (end - first) * (self.each + held * self.costs.kept) + tables

    def kernels(self, rank: int, first: int, end: int) -> float:
        """The seconds of the kernels of a stage, of one pass."""
        return (end - first) * self.layer[rank] + self.output[rank] * (end == self.count)

    def seconds(self, rank: int, first: int, end: int) -> float:
        """The same with the messages that arrive, and that of the last stage to the first. inf: it does not fit."""
        fits = self.nbytes(rank, first, end) <= self.costs.room[rank] * SAME
        moved = self.hops[rank] * (first > 0) + self.back * (first > 0 and end == self.count)
        return self.kernels(rank, first, end) + moved if fits else inf

    def shares(self, counts: Counts) -> Shares | None:
        """The Shares of these layers. None if they do not fit."""
        ends = [sum(counts[: rank + 1]) for rank in range(len(counts))]
        used = {rank: (ends[rank] - count, ends[rank]) for rank, count in enumerate(counts) if count}
        stages = [self.seconds(rank, *run) for rank, run in used.items()]
        if not counts or max(stages) == inf:
            return None
        steps, everyone = self.costs.steps, range(len(counts))
        kernels = tuple(steps * self.kernels(rank, *used[rank]) if rank in used else 0.0 for rank in everyone)
        nbytes = tuple(self.nbytes(rank, *used[rank]) if rank in used else 0.0 for rank in everyone)
        return Shares("layers", {"layers": counts}, sum(stages) + (steps - 1) * max(stages), kernels, nbytes)

    def in_rounds(self, ranks: Sequence[int], rounds: int) -> Shares | None:
        """The best layers in so many rounds over the ranks, if disks may be read."""
        costs, rates = self.costs, [self.costs.machine.disk_rate(rank) for rank in ranks]
        reads = [self.each / rate if rate else inf for rate in rates]
        layer, output, room = ([each[rank] for rank in ranks] for each in (self.layer, self.output, costs.room))
        ring = Ring(layer, output, reads, room, self.each, self.tables, max(self.hops))
        seconds, found = deal_in_rounds(ring, self.count, rounds)
        counts = dict(zip(ranks, found, strict=False))
        if not counts:
            return None
        layers = tuple(counts.get(rank, 0) for rank in range(costs.ranks))
        kernels = tuple(count * self.layer[rank] for rank, count in enumerate(layers))
        nbytes = tuple(min(costs.room[rank], count * self.each) for rank, count in enumerate(layers))
        return Shares("layers", {"layers": layers}, seconds, kernels, nbytes, rounds)


def _by_layers(costs: Demands) -> Compared:
    """The way `layers`. In decoding, layers that do not fit may be read again from disks."""
    stages, everyone = _Stages(costs), range(costs.ranks)
    count = stages.count
    equal = stages.shares(tuple(cut(count, [1] * costs.ranks)))
    alone = _fastest(stages.shares(tuple(count * (rank == one) for rank in everyone)) for one in everyone)
    find = cut_by_slowest if costs.trains else cut_layers
    together = stages.shares(find(count, costs.ranks, stages.seconds)[1])
    if not costs.trains and any(map(costs.machine.disk_rate, everyone)):
        alone = alone or _fastest(stages.in_rounds([rank], count) for rank in everyone)
        if not together and costs.ranks > 1:
            together = _fastest(stages.in_rounds(everyone, n) for n in range(1, count) if count % n == 0)
    return Compared("layers", equal, together, alone)
