"""A training step as one plan: parameters that are gathered, stages, products with tensor parallelism, sums, updates.

    found = plan("1f1b", mesh={"dp": 2, "tp": 2, "pp": 2}, microbatches=4, layers=[1000] * 4, shape=(16, 64))
    fompi.verify(found)

Rank (p * dp + d) * tp + t has the layers of stage p, or of several stages, and of each one the shard t of tp, of which
it keeps the part d of dp (ZeRO). A rank has `rows` rows of every activation, in two halves. A step is made of

| kernel                    | reads                                 | writes                                       |
|---------------------------|---------------------------------------|----------------------------------------------|
| `input<b, t, h>`          |                                       | x: half h of the rows of t, of batch b       |
| `forward<l, b, t, h>`     | these rows, the parameters of layer l | what this rank adds to them; what is saved   |
| `loss<b, t, h>`           | y                                     | dy                                           |
| `backward<l, b, t, h>`    | dy, x, what is saved, the parameters  | dx, as a term; the gradients, a term more    |
| `input_backward<b, t, h>` | dx                                    | the gradients of the inputs, a term more     |
| `update<l, d>`            | the sum of the gradients of part d    | part d of the parameters, a term more        |

b counts the micro-batches of all ranks of dp. The rows of the other ranks of tp are computed when they are there, and
leave at once as terms; half of the own rows is computed before them, and half after them. Their owner adds the terms.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fompi.base.errors import LayoutError, PlanError
from fompi.base.layout import Sizes, integer, itemsize, offsets, split
from fompi.model.pipeline import SCHEDULES, rank_of, stages_of
from fompi.parallel.orders import Action, Step, order, parts, placement_in
from fompi.plans.kernels import Value, opaque, total
from fompi.plans.plan import Buffer, Chunk, Compute, Op, Plan, Program, Programs, Recv, Send, UserKernel, Workspace
from fompi.plans.problems import OwnProblem

KERNELS = ("input", "forward", "loss", "backward", "input_backward", "update")

Halves = list[Chunk]
"""The two halves of the rows of a rank."""


@dataclass(frozen=True)
class StepProblem(OwnProblem):
    """Each layer gets the update of the sum of its gradients over all micro-batches of all ranks.

    `layers[l]` is the number of parameters of layer l on a rank of tp; they are dealt out to the ranks of dp, and the
    layers to the stages, as evenly as possible. `shape` is that of the rows of a rank.
    """

    axes: tuple[int, int, int]  # dp, tp, pp
    microbatches: int
    layers: tuple[int, ...]
    shape: tuple[int, int]
    chunks: int = 1
    placement: str = "loop"

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
        ends = offsets(split(len(self.layers), self.stages))
        return range(ends[stage], ends[stage + 1])

    def rank_of(self, stage: int) -> int:
        """The place on pp that has a stage."""
        return rank_of(stage, self.axes[2], self.placement)

    def held(self, rank: int) -> list[int]:
        """The layers of a rank."""
        stages = stages_of(self.place(rank)[2], self.axes[2], self.chunks, self.placement)
        return [layer for stage in stages for layer in self.layers_of(stage)]

    def shares(self, layer: int) -> Sequence[int]:
        """How many parameters each rank of dp keeps."""
        return split(self.layers[layer], self.axes[0])

    @property
    def halves(self) -> Sequence[int]:
        """The rows of each half. Without tensor parallelism nothing hides, so there is one."""
        return split(self.shape[0], 2 if self.axes[1] > 1 else 1)

    def workspace(self, rank: int, parts: int, order: Sequence[int] = ()) -> Workspace:
        work, (d, _, _) = Workspace(rank, self.size, parts, order), self.place(rank)
        for layer in self.held(rank):
            work.add(f"p{layer}", "inout", "whole", (self.shares(layer)[d],), self.dtype)
        if 0 in self.held(rank):
            work.add("inputs", "output", "whole", (0,), self.dtype)
        return work

    def before(self, program: Program) -> dict[tuple[str, int], Value]:
        return {(b.name, 0): self._parameter(program.rank, b.name) for b in program.buffers if b.role == "inout"}

    def after(self, rank: int, parts: int) -> dict[tuple[str, int], Value]:
        d, t, _ = self.place(rank)
        found = {(f"p{layer}", 0): self._updated(layer, d, t) for layer in self.held(rank)}
        if 0 in self.held(rank):
            found["inputs", 0] = total(*self._values.inputs[d, t])
        return found

    @staticmethod
    def _parameter(rank: int, name: str) -> Value:
        return ((name, rank, 0),)

    def _updated(self, layer: int, d: int, t: int) -> Value:
        p = next(p for p in range(self.axes[2]) if layer in self.held(self.rank(d, t, p)))
        before, gradient = self._parameter(self.rank(d, t, p), f"p{layer}"), total(*self._values.gradients[layer, t, d])
        return total(before, (opaque("update", (layer, d), [gradient], 0),))

    @cached_property
    def _values(self) -> _Values:
        return _Values(self)

    def __str__(self) -> str:
        dp, tp, pp = self.axes
        return (
            f"{self.operation}({self.dtype}, {len(self.layers)} layers, {self.microbatches} micro-batches of "
            f"{self.shape}, dp={dp}, tp={tp}, pp={pp})"
        )


class _Values:
    """What one process would compute, as the verifier writes it."""

    def __init__(self, problem: StepProblem):
        self.problem = problem
        self.gradients: defaultdict[tuple[int, int, int], list[Value]] = defaultdict(list)  # of a layer, t, part d
        self.inputs: defaultdict[tuple[int, int], list[Value]] = defaultdict(list)  # of d, t
        for d in range(problem.axes[0]):
            for i in range(problem.microbatches):
                self._batch(d, d * problem.microbatches + i)

    def _batch(self, d: int, b: int) -> None:
        problem = self.problem
        dp, tp, _ = problem.axes
        own = [(t, h) for t in range(tp) for h in range(len(problem.halves))]
        x: dict[Any, Value] = {(t, h): (opaque("input", (b, t, h), [], 0),) for t, h in own}
        kept: list[dict[Any, Value]] = []
        for layer in range(len(problem.layers)):
            w = [self._weights(layer, t) for t in range(tp)]
            made: dict[Any, list[Value]] = {
                (at, by): self._call("forward", (layer, b, *at), [x[at], *w[by]], 2) for at in own for by in range(tp)
            }
            kept.append(x | {key: each[1] for key, each in made.items()})
            x = {at: total(*(made[at, by][0] for by in range(tp))) for at in own}
        dy: dict[Any, Value] = {at: (opaque("loss", (b, *at), [x[at]], 0),) for at in own}
        for layer in reversed(range(len(problem.layers))):
            saved, terms = kept[layer], dict[Any, Value]()
            for by in range(tp):
                for at in own:
                    reads = [dy[at], saved[at], saved[at, by], *self._weights(layer, by)]
                    terms[at, by], *gradients = self._call("backward", (layer, b, *at), reads, 1 + dp)
                    for part, value in enumerate(gradients):
                        self.gradients[layer, by, part].append(value)
            dy = {at: total(*(terms[at, by] for by in range(tp))) for at in own}
        for t, h in own:
            self.inputs[d, t].append((opaque("input_backward", (b, t, h), [dy[t, h]], 0),))

    def _weights(self, layer: int, t: int) -> list[Value]:
        problem = self.problem
        stage = next(s for s in range(problem.stages) if layer in problem.layers_of(s))
        ranks = (problem.rank(d, t, problem.rank_of(stage)) for d in range(problem.axes[0]))
        return [problem._parameter(rank, f"p{layer}") for rank in ranks]

    @staticmethod
    def _call(name: str, args: tuple[int, ...], reads: Sequence[Value], outputs: int) -> list[Value]:
        return [(opaque(name, args, reads, k),) for k in range(outputs)]


def plan(
    schedule: str | Sequence[Sequence[Step | str]] = "1f1b",
    *,
    mesh: Mapping[str, int],
    microbatches: int,
    layers: Sequence[int],
    shape: tuple[int, int],
    chunks: int = 1,
    dtype: str = "float32",
    seconds: Mapping[str, float | Sequence[float]] | None = None,
) -> Plan:
    """The plan of a step on the ranks of a mesh, such as {"dp": 2, "tp": 2, "pp": 2}: tp innermost, pp outermost.

    `layers[l]` is the number of parameters of layer l on a rank of tp. Activations have the `shape` (rows of a rank,
    features). `schedule` is as for `pipeline.order`, with F and B; a forward and a backward side by side take turns,
    layer by layer. `seconds` maps "F", "B" and "U" to the seconds of the forward, of the backward and of the update of
    a layer, on a rank and for a micro-batch, for all layers or for each one: they are needed to simulate it.
    Raises PlanError for a wrong order, and LayoutError for sizes that do not fit.
    """
    if unknown := {*mesh} - {"dp", "tp", "pp"}:
        raise LayoutError(f"mesh={mesh!r} has the axis {min(unknown)!r}: a step has dp, tp and pp")
    axes = dp, tp, pp = tuple(mesh.get(name, 1) for name in ("dp", "tp", "pp"))
    if any((integer(n) or 0) < 1 for n in (*axes, *shape, chunks)):
        raise LayoutError(f"mesh={mesh!r}, shape={shape!r}, chunks={chunks!r}: they must be integers >= 1")
    if len(layers) < pp * chunks or any(integer(n) is None or n < 0 for n in layers):
        raise LayoutError(f"layers={layers!r}: {pp * chunks} stages need a layer each, with so many parameters")
    itemsize(dtype)  # raises DtypeError for an unknown one
    listed = order(schedule, pp, microbatches, chunks)
    if {action.kind for steps in listed for action in parts(steps)} - {"F", "B"}:
        raise PlanError("a step needs whole backwards: take an order with F and B, such as 1f1b or interleaved")
    form = tuple(map(int, layers)), tuple(map(int, shape)), chunks, placement_in(listed, chunks)
    problem = StepProblem("training step", dp * tp * pp, dtype, axes, microbatches, *form)  # type: ignore[arg-type]
    count = tp * len(problem.halves)  # calls of a layer for a micro-batch
    kernels = tuple(UserKernel(name, _seconds(name, seconds or {}, len(layers), count)) for name in KERNELS)

    def write(rank: int) -> Program:
        needed = _StepWriter(problem, listed, rank, {})
        needed.program()
        return _StepWriter(problem, listed, rank, needed.most).program()

    size, name = problem.size, schedule if isinstance(schedule, str) and schedule in SCHEDULES else "own order"
    sizes = Sizes(rows=(0,) * size)
    return Plan(problem, name, (1,), sizes, Programs(size, write), kernels=kernels, in_order=True)


def _seconds(name: str, seconds: Mapping[str, float | Sequence[float]], layers: int, count: int) -> tuple[float, ...]:
    """The seconds of a call of a kernel, by layer."""
    if not seconds:
        return ()
    kind = {"forward": "F", "backward": "B", "update": "U"}.get(name)
    given = 0.0 if kind is None else seconds.get(kind, 0.0)
    listed = [given] * layers if isinstance(given, (int, float)) else [*given]
    if kind is None:
        return (0.0,)
    if len(listed) != layers:
        raise PlanError(f"seconds[{kind!r}] must be a number, or one for each of {layers} layers")
    return tuple(float(s) / (1 if kind == "U" else count) for s in listed)


SPARE = 2
"""Slots of each kind beyond those that are needed, so that messages may come early."""


class _StepWriter:
    """Writes the program of one rank. `slots`: how many there are of each kind; none: as many as needed (`most`)."""

    def __init__(self, problem: StepProblem, orders: Sequence[Sequence[Step]], rank: int, slots: Mapping[Any, int]):
        self.problem, self.orders, self.rank = problem, orders, rank
        self.d, self.t, self.p = problem.place(rank)
        self.work = problem.workspace(rank, 1)
        self.ops: list[Op] = []
        self.most: dict[Any, int] = {}
        self.free: dict[Any, list[Buffer]] = {}
        self.kinds: dict[str, Any] = {}  # of each slot
        for key, count in slots.items():
            self.free[key] = [self._made(key, number) for number in range(count + SPARE)]
            self.most[key] = count + SPARE
        self.dropped = deque[list[Chunk]]([[], []])
        self.weights: dict[int, list[Chunk]] = {}
        self.gradients: dict[int, list[Chunk]] = {}
        self.summed: list[int] = []  # layers whose gradients are on their way
        self.kept: dict[tuple[int, int], dict[tuple[int, int], tuple[Chunk, Chunk]]] = {}
        self.held: dict[tuple[str, int, int], Halves] = {}
        self.done: defaultdict[int, int] = defaultdict(int)  # the backwards of each stage
        self.arriving = {p: self._sent(steps) for p, steps in enumerate(orders)}

    def program(self) -> Program:
        for step in self.orders[self.p]:
            running = [self._act(action) for action in parts([step])]
            while running:  # side by side: layer by layer in turns
                running = [each for each in running if next(each, self) is not self]
        self._update()
        return self.work.program(self.ops)

    # -- slots
    def _made(self, key: Any, number: int) -> Buffer:
        kind, shape = key
        name = f"{kind}{'x'.join(map(str, shape))}_{number}"
        self.kinds[name] = key
        return self.work.scratch(name, "whole", shape, self.problem.dtype)

    def _take(self, kind: str, shape: tuple[int, ...]) -> Chunk:
        key = kind, shape
        free = self.free.setdefault(key, [])
        if free:
            return free.pop(0)[:]
        number = self.most.get(key, 0)
        self.most[key] = number + 1
        return self._made(key, number)[:]

    def _rows(self, h: int) -> Chunk:
        return self._take("a", (self.problem.halves[h], self.problem.shape[1]))

    def _drop(self, *chunks: Chunk) -> None:
        """The slots are free after the next call of a layer: so no rank waits for a slot that waits for it."""
        self.dropped[-1] += chunks

    def _reuse(self) -> None:
        """A call of a layer begins."""
        for chunk in self.dropped.popleft():
            self.free[self.kinds[chunk.buffer]].append(self.work[chunk.buffer])
        self.dropped.append([])

    # -- the ranks of an axis
    def _peers(self, axis: str) -> list[tuple[int, int]]:
        """(place, rank) of the others on an axis, in the order in which they are sent to."""
        dp, tp, _ = self.problem.axes
        if axis == "dp":
            return [((self.d + k) % dp, self.problem.rank((self.d + k) % dp, self.t, self.p)) for k in range(1, dp)]
        return [((self.t + k) % tp, self.problem.rank(self.d, (self.t + k) % tp, self.p)) for k in range(1, tp)]

    # -- pipelines
    def _sent(self, steps: Sequence[Step]) -> list[tuple[str, int, int]]:
        """What a rank of pp sends to this one, in order: the input of a stage, or the gradient of its output."""
        found = []
        for stage, kind, i in parts(steps):
            to = stage + 1 if kind == "F" else stage - 1
            if 0 <= to < self.problem.stages and self.problem.rank_of(to) == self.p:
                found.append(("x" if kind == "F" else "dy", to, i))
        return found

    def _arrive(self, wanted: tuple[str, int, int]) -> Halves:
        """What another stage has handed on. It is received first, if it comes from another rank."""
        what, stage, _ = wanted
        place = self.problem.rank_of(stage - 1 if what == "x" else stage + 1)
        while wanted not in self.held:
            came = self.arriving[place].pop(0)
            self.held[came] = [self._rows(h) for h in range(len(self.problem.halves))]
            self.ops += [Recv(self.problem.rank(self.d, self.t, place), half) for half in self.held[came]]
        return self.held.pop(wanted)

    def _hand_on(self, what: str, stage: int, i: int, halves: Halves) -> None:
        place = self.problem.rank_of(stage)
        if place == self.p:
            self.held[what, stage, i] = halves
            return
        self.ops += [Send(self.problem.rank(self.d, self.t, place), half) for half in halves]
        self._drop(*halves)

    # -- actions
    def _act(self, action: Action) -> Iterator[None]:
        return self._forward(action.stage, action.microbatch) if action.kind == "F" else self._backward(*action[::2])

    def _forward(self, stage: int, i: int) -> Iterator[None]:
        problem, b = self.problem, self.d * self.problem.microbatches + i
        if stage:
            x = self._arrive(("x", stage, i))
        else:
            x = [self._rows(h) for h in range(len(problem.halves))]
            self.ops += [Compute("input", (), (half,), (b, self.t, h)) for h, half in enumerate(x)]
        for layer in problem.layers_of(stage):
            x = self._layer(layer, b, x)
            yield
        if stage + 1 < problem.stages:
            self._hand_on("x", stage + 1, i, x)
            return
        dy = [self._rows(h) for h in range(len(x))]
        self.ops += [Compute("loss", (y,), (d,), (b, self.t, h)) for h, (y, d) in enumerate(zip(x, dy, strict=True))]
        self._drop(*x)
        self.held["dy", stage, i] = dy

    def _backward(self, stage: int, i: int) -> Iterator[None]:
        problem, b = self.problem, self.d * self.problem.microbatches + i
        dy = self.held.pop(("dy", stage, i)) if stage + 1 == problem.stages else self._arrive(("dy", stage, i))
        self.done[stage] += 1
        for layer in reversed(problem.layers_of(stage)):
            dy = self._layer_back(layer, b, dy)
            self._update()  # of layers whose sums have travelled meanwhile
            if self.done[stage] == problem.microbatches:
                self._sum_gradients(layer)
            yield
        if stage:
            self._hand_on("dy", stage - 1, i, dy)
            return
        total = self.work["inputs"][:]
        for h, half in enumerate(dy):
            before = (total,) if self.done[stage] > 1 or h else ()
            self.ops.append(Compute("input_backward", (half, *before), (total,), (b, self.t, h)))
        self._drop(*dy)

    # -- layers
    def _exchange(self, x: Halves) -> Iterator[tuple[int, int, Chunk]]:
        """(place, half, rows) of all ranks of tp: half of the own rows, those of the others, the other half."""
        peers = self._peers("tp")
        self.ops += [Send(rank, half) for _, rank in peers for half in x]
        yield self.t, 0, x[0]
        for place, rank in reversed(peers):  # the one that sends to this rank first
            for h in range(len(x)):
                half = self._rows(h)
                self.ops.append(Recv(rank, half))
                yield place, h, half
        for h in range(1, len(x)):
            yield self.t, h, x[h]

    def _sum(self, terms: dict[tuple[int, int], Chunk]) -> Halves:
        """The own rows, with the terms of the others."""
        own = [terms[self.t, h] for h in range(len(self.problem.halves))]
        for _, rank in reversed(self._peers("tp")):
            for h, half in enumerate(own):
                term = self._rows(h)
                self.ops += [Recv(rank, term), Compute("add", (half, term), (half,))]
                self._drop(term)
        return own

    def _leave(self, place: int, term: Chunk) -> None:
        """A term for the rows of another rank."""
        if place != self.t:
            self.ops.append(Send(self.problem.rank(self.d, place, self.p), term))
            self._drop(term)

    def _layer(self, layer: int, b: int, x: Halves) -> Halves:
        self._reuse()
        weights, terms, kept = self._gathered(layer), dict[tuple[int, int], Chunk](), {}
        for place, h, rows in self._exchange(x):
            term, saved = self._rows(h), self._take("s", (0,))
            self.ops.append(Compute("forward", (rows, *weights), (term, saved), (layer, b, place, h)))
            kept[place, h], terms[place, h] = (rows, saved), term
            self._leave(place, term)
        self.kept[layer, b] = kept
        return self._sum(terms)

    def _layer_back(self, layer: int, b: int, dy: Halves) -> Halves:
        self._reuse()
        weights, terms, kept = self.weights[layer], dict[tuple[int, int], Chunk](), self.kept.pop((layer, b))
        for place, h, rows in self._exchange(dy):
            x, saved = kept[place, h]
            before = self.gradients.get(layer, [])
            sums = before or [
                self.work.scratch(f"g{layer}_{part}", "whole", (n,), self.problem.dtype)[:]
                for part, n in enumerate(self.problem.shares(layer))
            ]
            self.gradients[layer] = sums
            term, reads = self._rows(h), (rows, x, saved, *weights, *before)
            self.ops.append(Compute("backward", reads, (term, *sums), (layer, b, place, h)))
            self._drop(x, saved, *([] if place == self.t else [rows]))
            terms[place, h] = term
            self._leave(place, term)
        self._drop(*dy)
        return self._sum(terms)

    # -- data parallelism
    def _gathered(self, layer: int) -> list[Chunk]:
        """The parameters of a layer: the parts of all ranks of dp, gathered at the first use."""
        if layer not in self.weights:
            own, shares = self.work[f"p{layer}"][:], self.problem.shares(layer)
            self.ops += [Send(rank, own) for _, rank in self._peers("dp")]
            found = {self.d: own}
            for place, rank in reversed(self._peers("dp")):
                found[place] = self.work.scratch(f"w{layer}_{place}", "whole", (shares[place],), self.problem.dtype)[:]
                self.ops.append(Recv(rank, found[place]))
            self.weights[layer] = [found[place] for place in range(self.problem.axes[0])]
        return self.weights[layer]

    def _sum_gradients(self, layer: int) -> None:
        """The gradients leave for the ranks that keep the parameters, and those of the others come."""
        sums = self.gradients[layer]
        self.ops += [Send(rank, sums[place]) for place, rank in self._peers("dp")]
        own = sums[self.d]
        for _, rank in reversed(self._peers("dp")):
            term = self._take("r", self.work[own.buffer].row)
            self.ops += [Recv(rank, term), Compute("add", (own, term), (own,))]
            self._drop(term)
        self.summed.append(layer)

    def _update(self) -> None:
        """This rank updates its part of the layers that are summed. Kernels run in order: so not at once."""
        for layer in self.summed:
            own, kept = self.gradients[layer][self.d], self.work[f"p{layer}"][:]
            self.ops.append(Compute("update", (own, kept), (kept,), (layer, self.d)))
        self.summed.clear()
