"""What the units of a model demand of the ranks of a machine: the phases that `fompi.planner.balance` deals.

The kernels of a phase are one: calls * overhead + max(flops / flops_rate, nbytes / memory_rate), times
`Machine.slowness` of the rank. Messages are fompi's best plans. In decoding nothing hides them. Else they run behind
all products but the first of as many pieces as there are ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations
from math import ceil
from typing import NamedTuple

from fompi.base.layout import Partial, Spec
from fompi.model.machine import NO_LIMIT, Machine
from fompi.planner.layers import DTYPE, Transformer, predicted_call
from fompi.planner.layout import USABLE
from fompi.planner.shares import Phase
from fompi.planner.step import GRADIENT, OPTIMIZER, UPDATE, StepParts

MOST_TRIED, MIB = 6, 1 << 20
"""Of up to so many ranks all sets are tried. A unit of the optimizer's state, in bytes."""

PASSES = 3
"""Forward and backward together take so many times as long as the forward."""


class UnitCost(NamedTuple):
    """How many units there are, and for one of them: operations, bytes that kernels move, and bytes that it keeps."""

    total: int
    flops: float
    moved: float
    stored: float


class Demands:
    """What the units of a model take on the ranks of a machine. Training passes one sequence after the other.

    `item` are the bytes of an element, `rows` the tokens of a pass, `sampled` those of the output layer, `steps` the
    passes. A parameter takes `weight` bytes, of which ZeRO deals `dealt`. `room` are the bytes that ranks may use.
    """

    def __init__(self, model: Transformer, machine: Machine, ranks: int, task: str, batch: int, item: int, zero: int):
        self.model, self.machine, self.ranks, self.batch = model, machine, ranks, batch
        self.item, self.zero = item, zero
        self.trains, self.decodes = task == "train", task == "decode"
        self.steps = batch if self.trains else 1
        self.rows = batch // self.steps * (1 if self.decodes else model.sequence)
        self.sampled = self.rows if self.trains else batch
        self.weight = item + (GRADIENT + OPTIMIZER) * self.trains
        self.dealt = OPTIMIZER * (zero >= 1) + GRADIENT * (zero >= 2) + item * (zero >= 3)
        memories = map(machine.memory_of, range(ranks))
        self.room = tuple(memory if memory >= NO_LIMIT else USABLE * memory for memory in memories)
        self.links = replace(machine, speeds=(), memories=(), disk_rates=())  # messages depend on links only
        # what training keeps of a layer for its backward, of one sequence
        self.kept = self.rows * StepParts(model, machine, 1, 1).kept(1, "none") * item / 2 * self.trains

    def subsets(self) -> Iterator[tuple[int, ...]]:
        """Sets of two ranks or more: all, or of many ranks the fastest ones."""
        ordered = sorted(range(self.ranks), key=lambda rank: self.machine.slowness(rank, self.rows))
        for count in range(2, self.ranks + 1):
            few = self.ranks <= MOST_TRIED
            yield from combinations(range(self.ranks), count) if few else [tuple(sorted(ordered[:count]))]

    def _message(self, elements: float, ranks: Sequence[int]) -> float:
        """Seconds of a sum of so many elements over these ranks."""
        spec = Spec((max(1, ceil(elements * self.item / 2)), 1), DTYPE, Partial())
        part = self.links.part(ranks, self.ranks)
        return predicted_call("all_reduce", (spec,), len(ranks), part)[1] if len(ranks) > 1 else 0.0

    def _phase(
        self,
        kinds: Mapping[str, UnitCost],
        fixed: tuple[int, float],
        rows: float,
        sums: tuple[float, float],
        repeats: int,
    ) -> Phase:
        """Products of `rows` rows. `fixed`: calls, and the bytes that they move besides those of units.

        `sums`: the seconds of messages, and the share of the kernels behind which they run.
        """
        machine, (calls, moved), (messages, hidden) = self.machine, fixed, sums
        by_rank = []
        for rank in range(self.ranks):
            slow = (PASSES if self.trains else 1) * machine.slowness(rank, rows)
            flops, nbytes = slow / machine.flops_rate, slow / machine.memory_rate
            begin = slow * calls * machine.overhead
            lines = [(begin, tuple(flops * each.flops for each in kinds.values()))]
            lines += [(begin + nbytes * moved, tuple(nbytes * each.moved for each in kinds.values()))]
            late = 1 - hidden
            behind = [(messages + late * a, tuple(late * b for b in slopes)) for a, slopes in lines]
            by_rank.append((*lines, *behind) if messages else (*lines,))
        totals, stored = tuple(each.total for each in kinds.values()), tuple(each.stored for each in kinds.values())
        return Phase(tuple(kinds), totals, tuple(by_rank), stored, repeats)

    @cached_property
    def alone(self) -> list[Phase]:
        """The phases of the way `tensor` without messages."""
        return self.tensor((0,))

    def tensor(self, ranks: Sequence[int]) -> list[Phase]:
        """The phases of the way `tensor`, if these ranks take part: attention, MLP, output. A sum ends each."""
        model, rows = self.model, self.rows
        hidden = 0.0 if self.decodes else 1 - 1 / len(ranks)
        wide = (2 if self.trains else 1) * self._message(rows * model.hidden, ranks)  # the backward has one, too
        last = wide + (0.0 if self.trains else self._message(2 * self.sampled, ranks))  # the best token of each rank
        around, count = 2.0 * self.item * model.hidden, self.steps * model.layers
        return [
            self._phase(self.attention, (5, around * rows), rows, (wide, hidden), count),
            self._phase(self.mlp, (4, around * rows), rows, (wide, hidden), count),
            self._phase(self.output, (2, around * self.sampled), self.sampled, (last, hidden), self.steps),
        ]

    @cached_property
    def attention(self) -> dict[str, UnitCost]:
        """Heads of keys and values, each with its heads of queries."""
        model, item, count = self.model, self.item, self.model.kv_heads
        head, weights = model.hidden // model.heads, model.attention_weights / count
        scores = model.attention(self.rows) / count * (2 if self.decodes else 1)
        cache = 0 if self.trains else 2 * head * item * self.batch * model.sequence
        moved = item * weights + 2 * item * self.rows * (model.hidden / count + head) + cache
        stored = model.layers * (self.weight * weights + cache + self.kept / 2 / count)
        return {"heads": UnitCost(count, 2 * self.rows * weights + scores, moved, stored)}

    @cached_property
    def mlp(self) -> dict[str, UnitCost]:
        """The experts and the columns of shared ones, or the columns of the MLP."""
        model, item, kinds = self.model, self.item, dict[str, UnitCost]()
        column, count = model.matrices * model.hidden, model.ffn * (model.shared or not model.experts)
        kept = self.kept / 2 / max(1, model.experts or count)
        if model.experts:
            rows = self.rows * model.top_k / model.experts  # of an expert, if tokens are dealt evenly
            acted = rows * (2 * model.hidden + model.matrices * model.ffn)
            moved = item * (min(1.0, rows) * model.ffn_weights + acted)
            stored = model.layers * (self.weight * model.ffn_weights + kept)
            kinds["experts"] = UnitCost(model.experts, 2 * rows * model.ffn_weights, moved, stored)
        if count:
            stored = model.layers * (self.weight * column + kept * (not model.experts))
            moved = item * (column + self.rows * model.matrices)
            kinds["columns"] = UnitCost(count, 2.0 * self.rows * column, moved, stored)
        return kinds

    @cached_property
    def output(self) -> dict[str, UnitCost]:
        """Rows of the vocabulary: of the embedding, and of the output layer."""
        model, scores = self.model, (6 if self.trains else self.item) * self.sampled
        moved = self.item * model.hidden + scores
        stored = self.weight * model.hidden * (1 if model.tied else 2) + scores
        return {"vocabulary": UnitCost(model.vocabulary, 2.0 * self.sampled * model.hidden, moved, stored)}

    def data(self, ranks: Sequence[int]) -> list[Phase]:
        """The phases of the way `data`: rows, whose gradients are summed behind the backward, and state."""
        model, weights = self.model, self.model.parameters
        layers = [(model.layers, each) for each in (*self.attention.values(), *self.mlp.values())]
        units = [*layers, (1, self.output["vocabulary"])]
        flops, moved = (sum(n * each.total * each[i] for n, each in units) for i in (1, 2))
        acted, kept = moved - self.item * weights, model.layers * self.kept + 6 * self.rows * model.vocabulary
        sums = self._message(weights * GRADIENT / self.item * (1.5 if self.zero == 3 else 1), ranks)
        hidden = 2 / 3 * (1 - 1 / model.layers)
        count = ceil(weights * self.dealt / MIB)
        rows = UnitCost(self.batch, flops, max(0.0, acted), kept)
        state = UnitCost(count, 0.0, UPDATE * weights / max(1, count) / PASSES, float(MIB))
        fixed = 9 * model.layers, float(self.item * weights)
        return [
            self._phase({"rows": rows}, fixed, self.rows, (sums, hidden), 1),
            self._phase({"state": state}, (1, 0.0), 1, (0.0, 0.0), 1),
        ]
