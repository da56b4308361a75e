"""Training steps that run as one plan (`step_plan`): gathers, stages, layers, sums and updates.

    mesh = {"dp": 2, "tp": 2, "pp": 2}
    how = {"optimizer": AdamW(1e-3), "loss": loss, "microbatches": 4, "shape": (rows, features)}
    with TrainingStep(make, layers=8, mesh=mesh, comm=comm, **how) as step:
        losses = step(inputs, targets)               # of the micro-batches, on the ranks of the last stage

`make(l)` is layer l of the model on this rank of tp: an object with `parameters`, a list of arrays, and the methods of
its `kind`. `weights` are as `parameters`, with the numbers of this step, and `gradients` those of them: None for one
that a method does not read. `saved` is what a backward needs. A term is that of this rank of tp.

    "rows", the default: y = x + sum over tp of the terms, for each row on its own
        forward(weights, x) -> (term, saved)
        backward(weights, saved, dy) -> (term of dx, gradients)

    "attention": y = x + sum over tp of output(attention(qkv(x))), with the heads of this rank
        qkv(weights, x) -> (qkv, saved)                                     # some rows
        attention([qkv, ...]) -> ([o, ...], saved)                          # all rows of a micro-batch, in order
        output(weights, o) -> (term, saved)
        output_backward(weights, saved, dy) -> (do, gradients)
        attention_backward(saved, [do, ...]) -> [dqkv, ...]
        qkv_backward(weights, saved, dqkv) -> (term of dx, gradients)

    "embedding", the first layer: rows from inputs of any form
        forward(weights, inputs) -> (x, saved)
        backward(weights, saved, dx) -> gradients

    "head", the last layer: the loss of the rows of this rank
        loss(weights, y, targets) -> (value, dy, saved)
        backward(weights, saved) -> gradients                               # later, when the pipeline runs empty

Without `residual` y is the sum alone. A layer without tensor parallelism is one term. The first layer may return None
as dx. An embedding and a head have the same parameters on all ranks of tp. With `stay = True` parameters stay on this
rank between steps, and are gathered as soon as they are updated, instead of at the next use; of others it keeps a
part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import numpy as np

from fompi.base.errors import DtypeError, PlanError, ShapeError
from fompi.base.layout import in_common, offsets
from fompi.engine.handshake import agree
from fompi.ops.operations import all_gather
from fompi.parallel.actions import Step
from fompi.parallel.arrays import Array
from fompi.parallel.optimizers import State, state_of, update
from fompi.parallel.planned import PlannedStep
from fompi.parallel.step_plan import KERNELS, plan
from fompi.parallel.step_problem import KINDS, LayerForm, StepProblem
from fompi.plans.plan import Plan

Args = tuple[int, ...]

Gradients = Sequence[Array | None]
"""Of each of the weights. One that no method of any rank reads in a step is left alone by the optimizer."""


def _write(out: Array, value: Array, what: str) -> None:
    """Write what a function of the program has returned. Raises ShapeError if it has another shape."""
    if np.shape(value) != out.shape:
        raise ShapeError(f"{what} must have the shape {out.shape}, but has {np.shape(value)}")
    out[...] = value


class TrainingStep(PlannedStep):
    """losses = loss of all layers; parameters -= the update of the sum of their gradients over all micro-batches

    `mesh` are the sizes of the axes dp, tp and pp, whose product is that of `comm`: tp innermost, pp outermost. The
    layers are dealt out to the stages as evenly as possible, or by `shares` to the places on pp. Activations have the
    `shape` (rows of this rank, features). `schedule` is as for `step_plan.plan`, `optimizer` an SGD or AdamW of
    `fompi.parallel.data`.

    `loss(y, target) -> (value, dy)` gets some rows of a micro-batch at a time; the values are added. A layer gets rows
    in the same way: a half of those of a rank of tp. A head has the loss.

    A step that fails on one rank raises PeerError on the others, and changes neither parameters nor `states`. A
    parameter without a gradient is left alone. float16 has a float32 copy in `states`, and float32 sums of gradients.

    Collective. Raises PlanError, LayoutError, ShapeError or MismatchError on all ranks if the arguments do not fit.
    """

    _kind = "training step"

    def __init__(
        self,
        make: Callable[[int], Any],
        *,
        layers: int,
        mesh: Mapping[str, int],
        optimizer: Any,
        loss: Callable[[Array, Array], tuple[Any, Array]] | None = None,
        comm: Any = None,
        schedule: str | Sequence[Sequence[Step | str]] = "1f1b",
        **form: Any,
    ):
        super().__init__(comm)
        self.loss, self.optimizer = loss, optimizer
        self.layers: dict[int, Any] = {}
        refusal: Exception | None = None
        known, kinds = np.zeros((layers, 4), np.int64), [*KINDS]  # of each layer here: what its form says
        try:
            first = plan(schedule, mesh=mesh, layers=[0] * layers, **form)
            problem: StepProblem = first.problem
            if problem.dtype == "bfloat16":
                raise DtypeError("a step computes with arrays of NumPy, which has no bfloat16: take float16 or float32")
            if problem.size != self.comm.size:
                raise ShapeError(f"mesh={dict(mesh)} has {problem.size} ranks, but the communicator {self.comm.size}")
            self.layers = {number: make(number) for number in problem.held(self.comm.rank)}
            for number, layer in self.layers.items():
                found = LayerForm.of(number, layer)
                known[number] = found.parameters, kinds.index(found.kind), found.stay, found.tensors
            if loss is None and layers - 1 in self.layers and found.kind != "head":
                raise PlanError(f"layer {layers - 1} is no head, so a step needs loss=")
        except Exception as error:  # of any kind: the other ranks wait for this one
            refusal = error
        agree(self.comm, f"a training step of {layers} layers on {dict(mesh)}, {form}", refusal)
        known = np.asarray(all_gather(known[None], comm=self.comm)).max(0)
        forms = [LayerForm(int(n), kinds[kind], bool(stay), int(count)) for n, kind, stay, count in known]
        self.plan: Plan = plan(schedule, mesh=mesh, layers=forms, **form)
        self.problem = self.plan.problem
        self.d, self.t, _ = self.problem.place(self.comm.rank)
        self._pieces = {number: self._cut_up(number) for number in self.layers}
        self.shards = {number: self._shard(number) for number in self.layers}
        """The part of the parameters of each layer that this rank keeps, flat. A step writes it."""
        dtype, own = self.problem.dtype, {number: self._own(number) for number in self.shards}
        self.states = {n: [state_of(optimizer, shard[at], dtype) for at in own[n]] for n, shard in self.shards.items()}
        """What the optimizer keeps for the part of each parameter of each layer. A step writes it."""
        self._before: dict[int, tuple[Array, list[State]]] = {}  # of layers that this step has updated
        self._is_undone = False
        self._rows = offsets(self.problem.halves)
        self._forget()
        kernels = {name: getattr(self, f"_{name}") for name in KERNELS}
        self._others = {
            name: np.empty(self.problem.shares(number)[part], self.problem.dtype)
            for name, (number, part) in self.problem.kept(self.comm.rank).items()
            if not name.startswith("p")
        }
        self.gather()
        given: dict[str, Any] = {f"p{number}": shard for number, shard in self.shards.items()} | self._others
        self.executor = self._bind(self.plan, kernels, **given)

    def gathered(self) -> dict[int, list[Array]]:
        """The parameters of the layers of this rank, whole, as they are after the last step. Collective."""
        return {number: self._cut(number, flat) for number, flat in self._flat([*self.layers]).items()}

    def gather(self) -> None:
        """Take over what the program has written to `shards`. Only layers that stay need it. Collective."""
        full = self._flat([number for number in self.layers if self.problem.layers[number].stay])
        for name, (number, part) in self.problem.kept(self.comm.rank).items():
            if name in self._others:
                first = offsets(self.problem.shares(number))[part]
                self._others[name][...] = full[number][first : first + len(self._others[name])]

    def _flat(self, wanted: Sequence[int]) -> dict[int, Array]:
        """These parameters in one row each, gathered from the ranks that have the same ones."""
        found, (_, t, p) = dict[int, Array](), self.problem.place(self.comm.rank)
        if not any(form.stay for form in self.problem.layers) and not wanted:
            return found  # on no rank
        for color, replicated in ((p * self.problem.axes[1] + t, False), (p, True)):
            with self.comm.split(color, self.comm.rank, "alike") as alike:
                for number in wanted:
                    if self.problem.layers[number].replicated == replicated:
                        found[number] = np.asarray(all_gather(self.shards[number], comm=alike))
        return found

    def _shard(self, number: int) -> Array:
        flat = np.concatenate([w.reshape(-1) for w in self.layers[number].parameters] or [np.zeros(0)])
        ends, part = offsets(self.problem.shares(number)), self.problem.part(number, self.comm.rank)
        return flat[ends[part] : ends[part + 1]].astype(self.problem.dtype)

    def _cut_up(self, number: int) -> list[list[tuple[slice, slice]]]:
        """For each part of the parameters of a layer, and each parameter: where it is there, and what of it."""
        spans = [*pairwise(offsets(w.size for w in self.layers[number].parameters))]
        parts = pairwise(offsets(self.problem.shares(number)))
        return [[in_common(part, span) for span in spans] for part in parts]

    def _own(self, number: int) -> list[slice]:
        """The part of each parameter of a layer that this rank keeps: slices of its shard."""
        return [at for at, _ in self._pieces[number][self.problem.part(number, self.comm.rank)]]

    # -- a step
    def __call__(self, inputs: Sequence[Array] | None = None, targets: Sequence[Array] | None = None) -> Any:
        """One step. `inputs` are those of the micro-batches of this rank of dp, on the ranks of the first stage: the
        rows of this rank. `targets` belong to the same rows, on the ranks of the last stage. Returns the losses there.
        """
        self._begin()
        if self._is_undone:
            self.gather()  # others may have what was undone
        self._forget()
        self._inputs, self._targets, self._is_undone = inputs, targets, True
        try:
            with self._step(self.executor):
                self.executor()
        except BaseException:
            for number, (shard, states) in self._before.items():
                self.shards[number][...], self.states[number] = shard, states
            raise
        finally:
            self._before.clear()
        self.input_gradients, self._is_undone = self._gradients or None, False
        if (report := self.comm.engine.report) is not None:
            report.mark(report.updates[id(self)])
        return self._losses if len(self.problem.layers) - 1 in self.layers else None

    def _forget(self) -> None:
        self._saved: dict[tuple[Any, ...], Any] = {}
        self._local: dict[tuple[Any, ...], Any] = {}
        self._full: dict[int, list[Array]] = {}
        self._losses = [0.0] * self.problem.microbatches
        self._gradients: list[Array] = []
        self._inputs = self._targets = None
        if self.problem.has_inputs(self.comm.rank):
            rows = self.problem.shape
            self._gradients = [np.zeros(rows, self.problem.dtype) for _ in range(self.problem.microbatches)]

    def _part(self, arrays: Sequence[Array] | None, name: str, batch: int, h: int) -> Array:
        """Half h of the rows of a micro-batch."""
        i = batch - self.d * self.problem.microbatches
        if arrays is None or len(arrays) != self.problem.microbatches:
            raise ShapeError(f"{name} must list {self.problem.microbatches} micro-batches on this rank")
        if len(arrays[i]) != self.problem.shape[0]:
            raise ShapeError(f"{name}[{i}] has {len(arrays[i])} rows, but a rank has {self.problem.shape[0]}")
        return arrays[i][self._rows[h] : self._rows[h + 1]]

    def _weights(self, number: int, parts: Sequence[Array]) -> list[Array]:
        """The parameters of a layer, which have been gathered. They are put together once in a step."""
        if number not in self._full:
            self._full[number] = self._cut(number, np.concatenate(parts))
        return self._full[number]

    def _cut(self, number: int, flat: Array) -> list[Array]:
        """The parameters of a layer from those in one row."""
        found, first = [], 0
        for w in self.layers[number].parameters:
            found.append(flat[first : first + w.size].reshape(w.shape))
            first += w.size
        return found

    def _add(self, number: int, gradients: Gradients, sums: Sequence[Array], has_terms: bool) -> None:
        """Add the gradients of the weights to the sums so far, of each part of the parameters."""
        parameters = self.layers[number].parameters
        if len(gradients) != len(parameters):
            raise ShapeError(
                f"layer {number} has {len(parameters)} parameters, but returned {len(gradients)} gradients"
            )
        used = [gradient is not None for gradient in gradients]
        for out, count, pieces in zip(sums, self.problem.shares(number), self._pieces[number], strict=True):
            out[count:] = out[count:] + used if has_terms else used
            for w, gradient, (at, elements) in zip(parameters, gradients, pieces, strict=True):
                into = out[at]
                if gradient is None:
                    if not has_terms:
                        into[...] = 0
                    continue
                if gradient.size != w.size:
                    raise ShapeError(
                        f"layer {number}: a gradient is of the shape {gradient.shape}, its parameter {w.shape}"
                    )
                term = gradient.reshape(-1)[elements]
                into[...] = into + term if has_terms else term

    def _given(self, number: int, rest: Sequence[Array]) -> tuple[list[Array], bool]:
        """The parameters of a layer, whose parts come first in `rest`, and whether sums of gradients follow there."""
        parts = len(self.problem.shares(number))
        return self._weights(number, rest[:parts]), len(rest) > parts

    # -- the kernels of the plan: the first and the last layer
    def _input(self, args: Args, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        batch, _, h = args
        writes[0][...] = self._part(self._inputs, "inputs", batch, h)

    def _embed(self, args: Args, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        batch, _, h = args
        inputs = self._part(self._inputs, "inputs", batch, h)
        x, self._saved["embed", *args] = self.layers[0].forward(self._weights(0, reads), inputs)
        _write(writes[0], x, "layer 0.forward")

    def _loss(self, args: Args, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        batch, _, h = args
        y, *parts = reads
        targets = self._part(self._targets, "targets", batch, h)
        if parts:
            last = len(self.problem.layers) - 1
            weights = self._weights(last, parts)
            value, dy, self._saved["loss", *args] = self.layers[last].loss(weights, y, targets)
            _write(writes[0], dy, f"layer {last}.loss: dy")
        else:
            assert self.loss is not None
            value, dy = self.loss(y, targets)
            _write(writes[0], dy, "loss: dy")
        self._losses[batch - self.d * self.problem.microbatches] += value

    def _loss_backward(self, args: Args, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        last, (_, _, *rest) = len(self.problem.layers) - 1, reads
        weights, has_terms = self._given(last, rest)
        self._add(last, self.layers[last].backward(weights, self._saved.pop(("loss", *args))), writes, has_terms)

    def _embed_backward(self, args: Args, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        dx, _, *rest = reads
        weights, has_terms = self._given(0, rest)
        self._add(0, self.layers[0].backward(weights, self._saved.pop(("embed", *args)), dx), writes, has_terms)

    def _input_backward(self, args: Args, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        batch, _, h = args
        i = batch - self.d * self.problem.microbatches
        self._gradients[i][self._rows[h] : self._rows[h + 1]] = reads[0]

    # -- layers in the middle
    def _put(self, args: Args, what: str, out: Array, term: Array, around: Array) -> None:
        """Write the term of this rank for some rows. Their owner adds what goes around the layer, once."""
        number, _, place, _ = args
        _write(out, term, f"layer {number}{what}")
        if self.layers[number].residual and place == self.t:
            out[...] += around

    def _put_gradient(self, args: Args, out: Array, dx: Array | None, dy: Array) -> None:
        """The same for the gradient of the input. None: the layer does not read it, as the first one may do."""
        if dx is None and args[0] and not self.layers[args[0]].residual:
            words = "so those before it have no gradients, but a step would give them zeros, with which weights decay"
            raise PlanError(
                f"layer {args[0]} does not read its input, {words}: add 0 * x to its output if that is right"
            )
        self._put(args, ": the gradient of its input", out, np.zeros_like(out) if dx is None else dx, dy)

    def _pull(self, args: Args, name: str, given: Sequence[Any], rest: Sequence[Array], sums: Sequence[Array]) -> Any:
        """The gradient that a function of a layer returns. Those of the weights are added to the sums.

        `rest` are the parts of the parameters, and then the sums so far.
        """
        weights, has_terms = self._given(args[0], rest)
        found, gradients = getattr(self.layers[args[0]], name)(weights, *given)
        self._add(args[0], gradients, sums, has_terms)
        return found

    def _forward(self, args: Args, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        x, *parts = reads
        y, self._saved[args] = self.layers[args[0]].forward(self._weights(args[0], parts), x)
        self._put(args, ".forward", writes[0], y, x)

    def _backward(self, args: Args, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        dy, _, _, *rest = reads
        dx = self._pull(args, "backward", (self._saved.pop(args), dy), rest, writes[1:])
        self._put_gradient(args, writes[0], dx, dy)

    # -- attention: what stays on this rank is in `_local`
    def _places(self, number: int, batch: int) -> list[Args]:
        return [(number, batch, *at) for at in self.problem.places]

    def _qkv(self, args: Args, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        x, *parts = reads
        weights = self._weights(args[0], parts)
        self._local["qkv", *args], self._saved["qkv", *args] = self.layers[args[0]].qkv(weights, x)

    def _attention(self, args: Args, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        places = self._places(*args)
        qkv = [self._local.pop(("qkv", *at)) for at in places]
        found, self._saved["attention", *args] = self.layers[args[0]].attention(qkv)
        self._local.update({("o", *at): o for at, o in zip(places, found, strict=True)})

    def _output(self, args: Args, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        x, _, *parts = reads
        weights, o = self._weights(args[0], parts), self._local.pop(("o", *args))
        y, self._saved["output", *args] = self.layers[args[0]].output(weights, o)
        self._put(args, ".output", writes[0], y, x)

    def _output_backward(self, args: Args, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        dy, _, *rest = reads
        given = self._saved.pop(("output", *args)), dy
        self._local["do", *args] = self._pull(args, "output_backward", given, rest, writes[1:])

    def _attention_backward(self, args: Args, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        places = self._places(*args)
        do = [self._local.pop(("do", *at)) for at in places]
        found = self.layers[args[0]].attention_backward(self._saved.pop(("attention", *args)), do)
        self._local.update({("dqkv", *at): d for at, d in zip(places, found, strict=True)})

    def _qkv_backward(self, args: Args, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        dy, _, _, _, *rest = reads
        given = self._saved.pop(("qkv", *args)), self._local.pop(("dqkv", *args))
        dx = self._pull(args, "qkv_backward", given, rest, writes[1:])
        self._put_gradient(args, writes[0], dx, dy)

    # -- parameters
    def _update(self, args: Args, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        """Until all ranks have ended the step, it can be undone."""
        number, (p,) = args[0], writes
        self._before[number] = p.copy(), deepcopy(self.states[number])
        used = reads[0][len(p) :]
        for own, state, is_used in zip(self._own(number), self.states[number], used, strict=True):
            if is_used:
                update(self.optimizer, p[own], reads[0][own], state, self.problem.dtype)
