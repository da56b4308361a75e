"""A training step as one plan: parameters that are gathered, stages, products with tensor parallelism, sums, updates.

    found = plan("1f1b", mesh={"dp": 2, "tp": 2, "pp": 2}, microbatches=4, layers=[1000] * 4, shape=(16, 64))
    fompi.verify(found)

Rank (p * dp + d) * tp + t has the layers of stage p, or of several stages, and of each one the shard t of tp. Ranks
with the same parameters keep a part of them each (ZeRO). A rank has `rows` rows of every activation, in two halves. A
step is made of

| kernel                    | reads                                 | writes                                       |
|---------------------------|---------------------------------------|----------------------------------------------|
| `input<b, t, h>`          |                                       | x: half h of the rows of t, of batch b       |
| `forward<l, b, t, h>`     | these rows, the parameters of layer l | what this rank adds to them; what is saved   |
| `loss<b, t, h>`           | y                                     | dy                                           |
| `backward<l, b, t, h>`    | dy, x, what is saved, the parameters  | dx, as a term; the gradients, a term more    |
| `input_backward<b, t, h>` | dx                                    | the gradients of the inputs, a term more     |
| `update<l, part>`         | the sum of the gradients of the part  | the part of the parameters, a term more      |

b counts the micro-batches of all ranks of dp. The rows of the other ranks of tp are computed when they are there, and
leave at once as terms; half of the own rows is computed before them, and half after them. Their owner adds the terms.

Attention is `qkv<l, b, t, h>` of single rows, `attention<l, b>` of all of them, and `output<l, b, t, h>` of single rows
again, so gathers hide behind the first products and sums behind the last ones. Backwards are the other way round.

An embedding is `embed<b, t, h>` instead of the inputs. A head reads its parameters in the loss; `loss_backward`, its
gradients, waits until the pipeline runs empty (Megatron's deferred weight gradients of the embedding).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fompi.base.errors import ArgumentError, LayoutError, PlanError
from fompi.base.layout import accumulator, integer, itemsize
from fompi.parallel.actions import Action, Actions, Step, actions, parts, placement_in
from fompi.parallel.shares import dealt
from fompi.parallel.stages import Passed, StageWriter, name_of, plan_of, seconds_of
from fompi.parallel.step_problem import KINDS, LayerForm, StepProblem
from fompi.plans.plan import Chunk, Compute, Plan, Program, Recv, Send, UserKernel

FORWARDS = ("forward", "qkv", "attention", "output")
"""The kernels of a layer in the middle, whose first argument is the layer. Each one has a backward."""

KERNELS = (
    "input", *FORWARDS, "embed", "loss", *(f"{name}_backward" for name in ("qkv", "attention", "output")), "backward",
    "input_backward", "embed_backward", "loss_backward", "update",
)  # fmt: skip

Halves = list[Chunk]
"""The two halves of the rows of a rank."""


def plan(
    schedule: str | Sequence[Sequence[Step | str]] = "1f1b",
    *,
    mesh: Mapping[str, int],
    microbatches: int,
    layers: Sequence[int | LayerForm],
    shape: tuple[int, int],
    dtype: str = "float32",
    seconds: Mapping[str, float | Sequence[float]] | None = None,
    **stages: Any,
) -> Plan:
    """The plan of a step on the ranks of a mesh, such as {"dp": 2, "tp": 2, "pp": 2}: tp innermost, pp outermost.

    `layers[l]` is the number of parameters of layer l on a rank of tp, or a `LayerForm`. Activations have the `shape`
    (rows of a rank, features). `schedule` is as for `pipeline.actions`, with F and B; a forward and a backward side by
    side alternate, layer by layer. `seconds` maps "F", "B" and "U" to the seconds of the forward, of the backward and
    of the update of a layer, on a rank and for a micro-batch, for all layers or for each one: they are needed to
    simulate it. Each of the three kernels of attention takes a third. A place on pp has `chunks` stages (1), and
    as many layers as `shares` say (`fompi.parallel.shares`); the first and the last stage need one.
    Raises PlanError for wrong actions, and LayoutError for sizes that do not fit.
    """
    if unknown := {*mesh} - {"dp", "tp", "pp"}:
        raise LayoutError(f"mesh={mesh!r} has the axis {min(unknown)!r}: a step has dp, tp and pp")
    chunks, shares = stages.pop("chunks", 1), stages.pop("shares", None)
    if stages:
        raise ArgumentError(f"a step has no argument {min(stages)!r}")
    axes = dp, tp, pp = tuple(mesh.get(name, 1) for name in ("dp", "tp", "pp"))
    if any((integer(n) or 0) < 1 for n in (*axes, *shape, chunks)):
        raise LayoutError(f"mesh={mesh!r}, shape={shape!r}, chunks={chunks!r}: they must be integers >= 1")
    forms = _forms(layers, pp * chunks)
    itemsize(dtype)  # raises DtypeError for an unknown one
    listed = actions(schedule, pp, microbatches, chunks)
    if {action.kind for steps in listed for action in parts(steps)} - {"F", "B"}:
        raise PlanError("a step needs whole backwards: take actions F and B, such as those of 1f1b or interleaved")
    counts = () if shares is None else dealt(shares, "layers", len(forms), pp)
    form = forms, tuple(map(int, shape)), chunks, placement_in(listed, chunks), counts
    problem = StepProblem("training step", dp * tp * pp, dtype, axes, microbatches, *form)  # type: ignore[arg-type]
    if not (problem.layers_of(0) and problem.layers_of(problem.stages - 1)):
        raise PlanError(f"shares={[*counts]} of layers: the first and the last of {problem.stages} stages need one")
    kernels = tuple(UserKernel(name, _seconds(name, seconds or {}, problem)) for name in KERNELS)

    return plan_of(problem, name_of(schedule), kernels, partial(_StepWriter, problem, listed))


def _forms(layers: Sequence[int | LayerForm], stages: int) -> tuple[LayerForm, ...]:
    found = tuple(layer if isinstance(layer, LayerForm) else LayerForm(layer) for layer in layers)
    if len(found) < stages or any(integer(form.parameters) is None or form.parameters < 0 for form in found):
        raise LayoutError(f"layers={layers!r}: {stages} stages need a layer each, and a layer its number of parameters")
    for number, form in enumerate(found):
        if form.kind not in KINDS:
            raise LayoutError(f"layer {number} is of the kind {form.kind!r}, which is none of {', '.join(KINDS)}")
        place = {"embedding": 0, "head": len(found) - 1}.get(form.kind, number)
        if number != place:
            raise LayoutError(f"layer {number} of {len(found)} is an {form.kind}".replace("an h", "a h"))
    return tuple(form._replace(parameters=int(form.parameters)) for form in found)


def _seconds(name: str, seconds: Mapping[str, float | Sequence[float]], problem: StepProblem) -> tuple[float, ...]:
    """The seconds of a call of a kernel: of each layer if its first argument is one, else of every call."""
    if not seconds:
        return ()
    layers, halves = len(problem.layers), len(problem.halves)
    kind = "U" if name == "update" else "B" if name.endswith("backward") else "F"
    found = seconds_of(seconds, kind, "FBU", layers, "layers") or (0.0,)
    listed = found * (layers // len(found))
    if name == "update":
        return listed
    if name in ("input", "input_backward"):
        return (0.0,)
    if name in ("embed", "embed_backward", "loss", "loss_backward"):
        form, each = (problem.layers[0], listed[0]) if name.startswith("embed") else (problem.layers[-1], listed[-1])
        return (each / halves if form.replicated else 0.0,)
    whole = name.partition("_")[0]
    calls = 1 if whole == "attention" else problem.axes[1] * halves
    thirds = 3 if whole in ("qkv", "attention", "output") else 1
    return tuple(s / calls / thirds for s in listed)


class _StepWriter(StageWriter):
    """Writes the program of one rank: actions layer by layer, with what travels on tp and dp."""

    problem: StepProblem

    def __init__(self, problem: StepProblem, listed: Actions, rank: int, counts: Mapping[str, int]):
        self.rank, (self.d, self.t, place) = rank, problem.place(rank)
        super().__init__(problem, listed, place, problem.workspace(rank, 1), counts)
        self.wide = accumulator(problem.dtype)
        self.dropped = deque[list[Chunk]]([[], []])
        self.weights: dict[int, list[Chunk]] = {}
        self.gradients: dict[int, list[Chunk]] = {}
        self.summed: list[int] = []  # layers whose gradients are on their way
        self.kept: dict[tuple[int, int], dict[tuple[int, int], list[Chunk]]] = {}
        self.done: defaultdict[int, int] = defaultdict(int)  # the backwards of each stage
        self.deferred = deque[tuple[int, int, Chunk, Chunk]]()  # losses whose parameters wait for their gradients
        self.head = len(problem.layers) - 1 if problem.layers[-1].kind == "head" else None

    def program(self) -> Program:
        for step in self.steps:
            running = [self._act(action) for action in parts([step])]
            while running:  # side by side: they alternate, layer by layer
                running = [each for each in running if next(each, self) is not self]
        if self.head in self.problem.held(self.rank):
            self._loss_backward(0)
            self._sum_gradients(self.head)
        self._update()
        return self.work.program(self.ops)

    def rank_at(self, place: int) -> int:
        return self.problem.rank(self.d, self.t, place)

    # -- slots
    def slots_of(self, passed: Passed) -> Halves:
        return self._own_rows()

    def _own_rows(self) -> Halves:
        """Slots for the rows of this rank."""
        return [self._rows(h) for h in range(len(self.problem.halves))]

    def _rows(self, h: int) -> Chunk:
        rows, features = self.problem.halves[h], self.problem.shape[1]
        return self.slots.take(f"a{rows}x{features}", (rows, features))

    def _token(self) -> Chunk:
        """It stands for what a kernel keeps on this rank."""
        return self.slots.take("s", (0,))

    def drop(self, *chunks: Chunk) -> None:
        """The slots are free after the next call of a layer: so no rank waits for a slot that waits for it."""
        self.dropped[-1] += chunks

    def _reuse(self) -> None:
        """A call of a layer begins."""
        for chunk in self.dropped.popleft():
            self.slots.drop(chunk)
        self.dropped.append([])

    def _call(self, name: str, args: tuple[int, ...], reads: Sequence[Chunk], writes: Sequence[Chunk]) -> None:
        self.ops.append(Compute(name, tuple(reads), tuple(writes), args))

    def _others(self, ranks: Sequence[int]) -> list[tuple[int, int]]:
        """(number, rank) of the other ranks of a group, in the order in which they are sent to."""
        own = ranks.index(self.rank)
        return [((own + k) % len(ranks), ranks[(own + k) % len(ranks)]) for k in range(1, len(ranks))]

    def _peers(self) -> list[tuple[int, int]]:
        """(place, rank) of the other ranks of tp."""
        return self._others([self.problem.rank(self.d, t, self.place) for t in range(self.problem.axes[1])])

    def _alike(self, layer: int) -> list[tuple[int, int]]:
        """(part, rank) of the other ranks that have the same parameters."""
        return self._others(self.problem.group(layer, self.t))

    # -- actions
    def _taken(self, kind: str, stage: int, i: int) -> Halves:
        """What another stage has handed on, for its only reader."""
        self.arrive((kind, stage, i))
        return self.held.pop((kind, stage, i))

    def _act(self, action: Action) -> Iterator[None]:
        return self._forward(action) if action.kind == "F" else self._backward(action)

    def _forward(self, action: Action) -> Iterator[None]:
        (stage, _, i), problem = action, self.problem
        b = self.d * problem.microbatches + i
        x = self._taken("a", stage, i) if stage else self._inputs(b)
        for layer in problem.layers_of(stage):
            if problem.layers[layer].replicated:
                continue
            self._reuse()
            attends = problem.layers[layer].kind == "attention"
            x = self._sum(self._attention(layer, b, x) if attends else self._layer(layer, b, x))
            yield
        if stage + 1 < problem.stages:
            self.hand_on(action, x)
        else:
            self.held["d", stage, i] = self._loss(b, x)

    def _backward(self, action: Action) -> Iterator[None]:
        (stage, _, i), problem = action, self.problem
        b, dy = self.d * problem.microbatches + i, self._taken("d", stage, i)
        self.done[stage] += 1
        for layer in reversed(problem.layers_of(stage)):
            if layer == self.head:
                continue
            self._reuse()
            kind = problem.layers[layer].kind
            if kind == "embedding":
                self._embed_backward(b, dy)
            else:
                terms = (self._attention_back if kind == "attention" else self._layer_back)(layer, b, dy)
                self.drop(*dy)
                dy = self._sum(terms)
            self._update()  # of layers whose sums have travelled meanwhile
            if self.done[stage] == problem.microbatches:
                self._sum_gradients(layer)
            yield
        if stage + 1 == problem.stages:
            self._loss_backward(problem.stages)  # as many as hide while the pipeline runs empty may wait
        if stage:
            self.hand_on(action, dy)
        elif problem.has_inputs(self.rank):
            total = self.work["inputs"][:]
            for h, half in enumerate(dy):
                before = (total,) if self.done[stage] > 1 or h else ()
                self._call("input_backward", (b, self.t, h), (half, *before), (total,))
            self.drop(*dy)

    # -- the first and the last layer: the own rows
    def _inputs(self, b: int) -> Halves:
        x = self._own_rows()
        if self.problem.layers[0].kind != "embedding":
            for h, half in enumerate(x):
                self._call("input", (b, self.t, h), (), (half,))
            return x
        weights = self._gathered(0)
        for h, half in enumerate(x):
            saved = self._token()
            self.kept.setdefault((0, b), {})[self.t, h] = [saved]
            self._call("embed", (b, self.t, h), weights, (half, saved))
        return x

    def _embed_backward(self, b: int, dy: Halves) -> None:
        kept = self.kept.pop((0, b))
        for h, half in enumerate(dy):
            (saved,) = kept[self.t, h]
            self._add(0, "embed_backward", (b, self.t, h), (half, saved))
            self.drop(half, saved)

    def _loss(self, b: int, y: Halves) -> Halves:
        dy = self._own_rows()
        for h, (half, d) in enumerate(zip(y, dy, strict=True)):
            if self.head is None:
                self._call("loss", (b, self.t, h), (half,), (d,))
                self.drop(half)
            else:
                saved = self._token()
                self._call("loss", (b, self.t, h), (half, *self._gathered(self.head)), (d, saved))
                self.deferred.append((b, h, half, saved))
        return dy

    def _loss_backward(self, may_wait: int) -> None:
        """The gradients of the head, of all micro-batches but the last `may_wait` ones."""
        while len(self.deferred) > may_wait * len(self.problem.halves):
            b, h, y, saved = self.deferred.popleft()
            assert self.head is not None
            self._add(self.head, "loss_backward", (b, self.t, h), (y, saved))
            self.drop(y, saved)

    # -- layers on tp
    def _exchange(self, x: Halves) -> Iterator[tuple[int, int, Chunk]]:
        """(place, half, rows) of all ranks of tp: half of the own rows, those of the others, the other half."""
        peers = self._peers()
        self.ops += [Send(rank, half) for _, rank in peers for half in x]
        yield self.t, 0, x[0]
        for place, rank in reversed(peers):  # the one that sends to this rank first
            for h in range(len(x)):
                half = self._rows(h)
                self.ops.append(Recv(rank, half))
                yield place, h, half
        for h in range(1, len(x)):
            yield self.t, h, x[h]

    def _all_places(self) -> list[tuple[int, int]]:
        """(place, half) of rows that are all there: first those whose terms must travel."""
        halves = range(len(self.problem.halves))
        return [(place, h) for place, _ in [*self._peers(), (self.t, self.rank)] for h in halves]

    def _sum(self, terms: Mapping[tuple[int, int], Chunk]) -> Halves:
        """The own rows, with the terms of the others."""
        own = [terms[self.t, h] for h in range(len(self.problem.halves))]
        for _, rank in reversed(self._peers()):
            for h, half in enumerate(own):
                term = self._rows(h)
                self.ops.append(Recv(rank, term))
                self._call("add", (), (half, term), (half,))
                self.drop(term)
        return own

    def _leave(self, place: int, term: Chunk) -> None:
        """A term for the rows of another rank."""
        if place != self.t:
            self.ops.append(Send(self.problem.rank(self.d, place, self.place), term))
            self.drop(term)

    def _layer(self, layer: int, b: int, x: Halves) -> dict[tuple[int, int], Chunk]:
        weights, terms = self._gathered(layer), dict[tuple[int, int], Chunk]()
        kept = self.kept[layer, b] = {}
        for place, h, rows in self._exchange(x):
            term, saved = self._rows(h), self._token()
            self._call("forward", (layer, b, place, h), (rows, *weights), (term, saved))
            kept[place, h], terms[place, h] = [rows, saved], term
            self._leave(place, term)
        return terms

    def _layer_back(self, layer: int, b: int, dy: Halves) -> dict[tuple[int, int], Chunk]:
        terms, kept = dict[tuple[int, int], Chunk](), self.kept.pop((layer, b))
        for place, h, rows in self._exchange(dy):
            term = terms[place, h] = self._rows(h)
            self._add(layer, "backward", (layer, b, place, h), (rows, *kept[place, h]), term)
            self.drop(*kept[place, h], *([] if place == self.t else [rows]))
            self._leave(place, term)
        return terms

    def _attention(self, layer: int, b: int, x: Halves) -> dict[tuple[int, int], Chunk]:
        weights, terms, places = self._gathered(layer), dict[tuple[int, int], Chunk](), self.problem.places
        kept = self.kept[layer, b] = {}
        for place, h, rows in self._exchange(x):
            qkv = self._token()
            self._call("qkv", (layer, b, place, h), (rows, *weights), (qkv,))
            kept[place, h] = [rows, qkv]
        o = {at: self._token() for at in places}
        self._call("attention", (layer, b), [kept[at][1] for at in places], [o[at] for at in places])
        for place, h in self._all_places():
            rows, qkv = kept[place, h]
            term, saved = self._rows(h), self._token()
            self._call("output", (layer, b, place, h), (rows, o[place, h], *weights), (term, saved))
            kept[place, h], terms[place, h] = [rows, saved, qkv, o[place, h]], term
            self._leave(place, term)
        return terms

    def _attention_back(self, layer: int, b: int, dy: Halves) -> dict[tuple[int, int], Chunk]:
        terms, kept, places = dict[tuple[int, int], Chunk](), self.kept.pop((layer, b)), self.problem.places
        given, do = dict[tuple[int, int], Chunk](), dict[tuple[int, int], Chunk]()
        for place, h, rows in self._exchange(dy):
            given[place, h], do[place, h] = rows, self._token()
            self._add(layer, "output_backward", (layer, b, place, h), (rows, kept[place, h][1]), do[place, h])
        dqkv = {at: self._token() for at in places}
        mixed = [do[at] for at in places] + [kept[at][k] for k in (2, 3) for at in places]
        self._call("attention_backward", (layer, b), mixed, [dqkv[at] for at in places])
        for place, h in self._all_places():
            term, (x, saved, qkv, o) = self._rows(h), kept[place, h]
            reads = (given[place, h], dqkv[place, h], x, qkv)
            self._add(layer, "qkv_backward", (layer, b, place, h), reads, term)
            self.drop(x, saved, qkv, o, do[place, h], dqkv[place, h])
            if place != self.t:
                self.drop(given[place, h])
            terms[place, h] = term
            self._leave(place, term)
        return terms

    # -- ranks with the same parameters
    def _gathered(self, layer: int) -> list[Chunk]:
        """The parts of the parameters of a layer. They are gathered at the first use, if they do not stay."""
        if layer not in self.weights:
            form, own = self.problem.layers[layer], self.work[f"p{layer}"][:]
            shares, others = self.problem.shares(layer), self._alike(layer)
            found = {self.problem.part(layer, self.rank): own}
            for part, _ in others:
                name = f"w{layer}_{part}"
                found[part] = (self.work[name] if form.stay else self._scratch(name, shares[part]))[:]
            self.weights[layer] = [found[part] for part in range(len(shares))]
            if not form.stay:
                self._gather(layer)
        return self.weights[layer]

    def _gather(self, layer: int) -> None:
        self.ops += [Send(rank, self.work[f"p{layer}"][:]) for _, rank in self._alike(layer)]
        self.ops += [Recv(rank, self.weights[layer][part]) for part, rank in reversed(self._alike(layer))]

    def _scratch(self, name: str, count: int, dtype: str | None = None) -> Any:
        return self.work.scratch(name, "whole", (count,), dtype or self.problem.dtype)

    def _add(self, layer: int, name: str, args: tuple[int, ...], reads: Sequence[Chunk], *writes: Chunk) -> None:
        """A kernel that adds to the gradients of a layer."""
        before = self.gradients.get(layer, [])
        counts, more = self.problem.shares(layer), self.problem.layers[layer].tensors
        sums = before or [self._scratch(f"g{layer}_{p}", n + more, self.wide)[:] for p, n in enumerate(counts)]
        self.gradients[layer] = sums
        self._call(name, args, (*reads, *self.weights[layer], *before), (*writes, *sums))

    def _sum_gradients(self, layer: int) -> None:
        """The gradients leave for the ranks that keep the parameters, and those of the others come."""
        sums, others = self.gradients[layer], self._alike(layer)
        self.ops += [Send(rank, sums[part]) for part, rank in others]
        own = sums[self.problem.part(layer, self.rank)]
        for _, rank in reversed(others):
            row = self.work[own.buffer].row
            term = self.slots.take(f"t{row[0]}", row, self.wide)
            self.ops.append(Recv(rank, term))
            self._call("add", (), (own, term), (own,))
            self.drop(term)
        self.summed.append(layer)

    def _update(self) -> None:
        """This rank updates its part of the layers that are summed. Kernels run in order: so not at once."""
        for layer in self.summed:
            part, kept = self.problem.part(layer, self.rank), self.work[f"p{layer}"][:]
            self._call("update", (layer, part), (self.gradients[layer][part], kept), (kept,))
            if self.problem.layers[layer].stay:
                self._gather(layer)
        self.summed.clear()
