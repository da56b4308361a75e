"""What a training step computes, as the verifier writes it: layers on a mesh of dp, tp and pp, and their parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from fompi.base.errors import PlanError
from fompi.base.layout import split
from fompi.model.pipeline import rank_of, stages_of
from fompi.plans.kernels import Value, opaque, total
from fompi.plans.plan import Program, Workspace
from fompi.plans.problems import OwnProblem

KINDS = {
    "rows": "tensor parallel; each row on its own",
    "attention": "tensor parallel; products of single rows before and after a kernel that has all rows",
    "embedding": "the first layer: its input comes from the program; the same parameters on all ranks of tp",
    "head": "the last layer, with the loss; the same parameters on all ranks of tp",
}


class LayerForm(NamedTuple):
    """What a plan knows of a layer.

    `parameters` is their number on a rank of tp. If they `stay`, a rank keeps all of them between steps: they are
    gathered anew as soon as they are updated, under what the step still computes. `tensors` is the number
    of tensors that they form: the sums of gradients have a number more for each, which is 0 if no rank has a gradient
    of it.
    """

    parameters: int
    kind: str = "rows"
    stay: bool = False
    tensors: int = 0

    @property
    def replicated(self) -> bool:
        """True if all ranks of tp have the same parameters. Each of them computes its own rows only."""
        return self.kind in ("embedding", "head")

    @classmethod
    def of(cls, number: int, layer: Any) -> LayerForm:
        """That of a layer of a program. Raises PlanError if it is none, or of an unknown kind."""
        kind = getattr(layer, "kind", "rows")
        if kind not in KINDS:
            raise PlanError(f"layer {number} is of the kind {kind!r}, which is none of {', '.join(KINDS)}")
        if not hasattr(layer, "parameters"):
            raise PlanError(f"make({number}) has returned {layer!r}, which is no layer: it has no `parameters`")
        sizes = [w.size for w in layer.parameters]
        return cls(sum(sizes), kind, bool(getattr(layer, "stay", False)), len(sizes))


@dataclass(frozen=True)
class StepProblem(OwnProblem):
    """Each layer gets the update of the sum of its gradients over all micro-batches of all ranks.

    The parameters of a layer are dealt out to the ranks that have the same ones (`group`), and the layers to the
    stages, as evenly as possible. `shape` is that of the rows of a rank.
    """

    axes: tuple[int, int, int]  # dp, tp, pp
    microbatches: int
    layers: tuple[LayerForm, ...]
    shape: tuple[int, int]
    chunks: int = 1
    placement: str = "loop"
    dealt: tuple[int, ...] = ()  # how many layers each place on pp has. Empty: as many as others

    @property
    def stages(self) -> int:
        return self.axes[2] * self.chunks

    def place(self, rank: int) -> tuple[int, int, int]:
        """(d, t, p): where a rank is on each axis."""
        dp, tp, _ = self.axes
        return rank // tp % dp, rank % tp, rank // (dp * tp)

    def rank(self, d: int, t: int, p: int) -> int:
        dp, tp, _ = self.axes
        return (p * dp + d) * tp + t

    def layers_of(self, stage: int) -> range:
        counts = split(len(self.layers), self.stages)
        if self.dealt:
            places = [self.rank_of(each) for each in range(self.stages)]
            counts = tuple(split(self.dealt[p], self.chunks)[places[:s].count(p)] for s, p in enumerate(places))
        return range(sum(counts[:stage]), sum(counts[: stage + 1]))

    def rank_of(self, stage: int) -> int:
        """The place on pp that has a stage."""
        return rank_of(stage, self.axes[2], self.placement)

    def held(self, rank: int) -> list[int]:
        """The layers of a rank."""
        stages = stages_of(self.place(rank)[2], self.axes[2], self.chunks, self.placement)
        return [layer for stage in stages for layer in self.layers_of(stage)]

    def group(self, layer: int, t: int) -> list[int]:
        """The ranks that have the same parameters as the rank t of tp. Each keeps the part of its number."""
        dp, tp, _ = self.axes
        p = self.rank_of(next(s for s in range(self.stages) if layer in self.layers_of(s)))
        return [self.rank(d, k, p) for d in range(dp) for k in (range(tp) if self.layers[layer].replicated else (t,))]

    def part(self, layer: int, rank: int) -> int:
        """Which part of the parameters of a layer a rank keeps."""
        return self.group(layer, self.place(rank)[1]).index(rank)

    def shares(self, layer: int) -> Sequence[int]:
        """How many parameters each rank of a group keeps."""
        return split(self.layers[layer].parameters, len(self.group(layer, 0)))

    @property
    def halves(self) -> Sequence[int]:
        """The rows of each half. Without tensor parallelism nothing hides, so there is one."""
        return split(self.shape[0], 2 if self.axes[1] > 1 else 1)

    @property
    def places(self) -> list[tuple[int, int]]:
        """(t, h) of all rows of a micro-batch, in order."""
        return [(t, h) for t in range(self.axes[1]) for h in range(len(self.halves))]

    def has_inputs(self, rank: int) -> bool:
        """True if the rank computes the gradients of inputs."""
        return 0 in self.held(rank) and self.layers[0].kind != "embedding"

    def kept(self, rank: int) -> dict[str, tuple[int, int]]:
        """What a rank keeps between steps: the layer and the part of it in each buffer."""
        found = {}
        for layer in self.held(rank):
            own = self.part(layer, rank)
            found[f"p{layer}"] = layer, own
            others = {*range(len(self.shares(layer)))} - {own} if self.layers[layer].stay else ()
            found.update({f"w{layer}_{part}": (layer, part) for part in sorted(others)})
        return found

    def workspace(self, rank: int, parts: int) -> Workspace:
        work = Workspace(rank, self.size, parts)
        for name, (layer, part) in self.kept(rank).items():
            work.add(name, "inout", "whole", (self.shares(layer)[part],), self.dtype)
        if self.has_inputs(rank):
            work.add("inputs", "output", "whole", (0,), self.dtype)
        return work

    def before(self, program: Program) -> dict[tuple[str, int], Value]:
        t = self.place(program.rank)[1]
        return {(name, 0): self.parameters(layer, t)[part] for name, (layer, part) in self.kept(program.rank).items()}

    def after(self, rank: int, parts: int) -> dict[tuple[str, int], Value]:
        d, t, _ = self.place(rank)
        found = {(name, 0): self._updated(layer, t, part) for name, (layer, part) in self.kept(rank).items()}
        if self.has_inputs(rank):
            found["inputs", 0] = total(*self._values.inputs[d, t])
        return found

    def parameters(self, layer: int, t: int) -> list[Value]:
        """The parts of the parameters before the step."""
        return [((f"p{layer}", rank, 0),) for rank in self.group(layer, t)]

    def _updated(self, layer: int, t: int, part: int) -> Value:
        gradient = total(*self._values.gradients[layer, 0 if self.layers[layer].replicated else t, part])
        return total(self.parameters(layer, t)[part], (opaque("update", (layer, part), [gradient], 0),))

    @cached_property
    def _values(self) -> _Values:
        return _Values(self)

    def __str__(self) -> str:
        dp, tp, pp = self.axes
        return (
            f"{self.operation}({self.dtype}, {len(self.layers)} layers, {self.microbatches} micro-batches of "
            f"{self.shape}, dp={dp}, tp={tp}, pp={pp})"
        )


Rows = Mapping[tuple[int, int], Value]
"""A value for the rows of each place."""


class _Values:
    """What one process would compute."""

    def __init__(self, problem: StepProblem):
        self.problem = problem
        self.gradients: defaultdict[tuple[int, int, int], list[Value]] = defaultdict(list)  # of a layer, t, part
        self.inputs: defaultdict[tuple[int, int], list[Value]] = defaultdict(list)  # of d, t
        for d in range(problem.axes[0]):
            for i in range(problem.microbatches):
                self._batch(d, d * problem.microbatches + i)

    def _batch(self, d: int, b: int) -> None:
        own, layers = self.problem.places, self.problem.layers
        middle = [layer for layer, form in enumerate(layers) if not form.replicated]
        kept: dict[int, dict[tuple[int, int, int], tuple[Value, ...]]] = {}
        if layers[0].kind == "embedding":
            embedded = {at: self._call("embed", (b, *at), self._weights(0, at[0]), 2) for at in own}
            x: Rows = {at: value for at, (value, _) in embedded.items()}
        else:
            x = {at: (opaque("input", (b, *at), [], 0),) for at in own}
        for layer in middle:
            attends = layers[layer].kind == "attention"
            made = self._attention(layer, b, x) if attends else self._rows(layer, b, x)
            kept[layer] = {key: (x[key[:2]], *values[1:]) for key, values in made.items()}
            x = self._sum(made)
        dy: Rows = {at: (opaque("loss", (b, *at), [x[at]], 0),) for at in own}
        if layers[-1].kind == "head":
            last, losses = len(layers) - 1, dict[tuple[int, int], Value]()
            for at in own:
                losses[at], saved = self._call("loss", (b, *at), [x[at], *self._weights(last, at[0])], 2)
                self._add(last, at[0], "loss_backward", (b, *at), [x[at], saved])
            dy = losses
        for layer in reversed(middle):
            attends = layers[layer].kind == "attention"
            back = self._attention_backward if attends else self._rows_backward
            dy = self._sum(back(layer, b, dy, kept[layer]))
        for t, h in own:
            if layers[0].kind == "embedding":
                self._add(0, t, "embed_backward", (b, t, h), [dy[t, h], embedded[t, h][1]])
            else:
                self.inputs[d, t].append((opaque("input_backward", (b, t, h), [dy[t, h]], 0),))

    # -- layers: a value for (place, half, rank of tp) each
    def _rows(self, layer: int, b: int, x: Rows) -> dict[tuple[int, int, int], Sequence[Value]]:
        return {
            (*at, by): self._call("forward", (layer, b, *at), [x[at], *self._weights(layer, by)], 2)
            for at in self.problem.places
            for by in self._ranks
        }

    def _rows_backward(
        self, layer: int, b: int, dy: Rows, kept: Mapping[tuple[int, int, int], Sequence[Value]]
    ) -> dict[tuple[int, int, int], Sequence[Value]]:
        return {
            (*at, by): self._add(layer, by, "backward", (layer, b, *at), [dy[at], *kept[*at, by]], 1)
            for by in self._ranks
            for at in self.problem.places
        }

    def _attention(self, layer: int, b: int, x: Rows) -> dict[tuple[int, int, int], Sequence[Value]]:
        found, places = dict[tuple[int, int, int], Sequence[Value]](), self.problem.places
        for by in self._ranks:
            w = self._weights(layer, by)
            qkv = [self._call("qkv", (layer, b, *at), [x[at], *w], 1)[0] for at in places]
            o = self._call("attention", (layer, b), qkv, len(places))
            for k, at in enumerate(places):
                found[*at, by] = [*self._call("output", (layer, b, *at), [x[at], o[k], *w], 2), qkv[k], o[k]]
        return found

    def _attention_backward(
        self, layer: int, b: int, dy: Rows, kept: Mapping[tuple[int, int, int], Sequence[Value]]
    ) -> dict[tuple[int, int, int], Sequence[Value]]:
        found, places = dict[tuple[int, int, int], Sequence[Value]](), self.problem.places
        for by in self._ranks:
            saved = [kept[*at, by] for at in places]  # x, saved, qkv, o
            do = [
                self._add(layer, by, "output_backward", (layer, b, *at), [dy[at], each[1]], 1)[0]
                for at, each in zip(places, saved, strict=True)
            ]
            mixed = [*do, *(each[2] for each in saved), *(each[3] for each in saved)]
            dqkv = self._call("attention_backward", (layer, b), mixed, len(places))
            for at, each, d in zip(places, saved, dqkv, strict=True):
                found[*at, by] = self._add(layer, by, "qkv_backward", (layer, b, *at), [dy[at], d, each[0], each[2]], 1)
        return found

    # -- what they have in common
    @property
    def _ranks(self) -> range:
        return range(self.problem.axes[1])

    def _sum(self, made: Mapping[tuple[int, int, int], Sequence[Value]]) -> Rows:
        """The terms of all ranks of tp, added."""
        return {at: total(*(made[*at, by][0] for by in self._ranks)) for at in self.problem.places}

    def _weights(self, layer: int, t: int) -> list[Value]:
        return self.problem.parameters(layer, t)

    def _add(
        self, layer: int, by: int, name: str, args: tuple[int, ...], reads: Iterable[Value], outputs: int = 0
    ) -> list[Value]:
        """A kernel that makes `outputs` values, and adds to the gradients of the layer."""
        weights, key = self._weights(layer, by), 0 if self.problem.layers[layer].replicated else by
        made = self._call(name, args, [*reads, *weights], outputs + len(weights))
        for part, value in enumerate(made[outputs:]):
            self.gradients[layer, key, part].append(value)
        return made[:outputs]

    @staticmethod
    def _call(name: str, args: tuple[int, ...], reads: Sequence[Value], outputs: int) -> list[Value]:
        return [(opaque(name, args, reads, k),) for k in range(outputs)]
