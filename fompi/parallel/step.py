"""Training steps that run as one plan (`step_plan`): gathers, stages, layers, sums and updates.

    mesh = {"dp": 2, "tp": 2, "pp": 2}
    how = {"optimizer": AdamW(1e-3), "loss": loss, "microbatches": 4, "shape": (rows, features)}
    with TrainingStep(make, layers=8, mesh=mesh, comm=comm, **how) as step:
        losses = step(inputs, targets)               # of the micro-batches, on the ranks of the last stage

`make(l)` is layer l of the model on this rank of tp: see `Layer`. Of its parameters a rank keeps a part between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fompi.base.errors import ShapeError, StateError
from fompi.base.layout import offsets
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree
from fompi.ops.operations import all_gather
from fompi.parallel.arrays import Array
from fompi.parallel.orders import Step
from fompi.parallel.step_plan import KERNELS, StepProblem, plan
from fompi.plans.plan import Plan
from fompi.runtime.binding import bind
from fompi.traces.trace import Trace


class Layer(Protocol):
    """y = x + sum of the terms of all ranks of tp, for each row on its own; without `residual` the sum alone.

    `weights` are as `parameters`, with the numbers of this step. A layer without tensor parallelism is one term.
    """

    parameters: Sequence[Array]
    residual: bool

    def forward(self, weights: Sequence[Array], x: Array) -> tuple[Array, Any]:
        """(the term of this rank, what the backward needs)."""

    def backward(self, weights: Sequence[Array], saved: Any, dy: Array) -> tuple[Array, Sequence[Array]]:
        """(the term of the gradient of x, the gradients of the weights)."""


class TrainingStep:
    """losses = loss of all layers; parameters -= the update of the sum of their gradients over all micro-batches

    `mesh` are the sizes of the axes dp, tp and pp, whose product is that of `comm`: tp innermost, pp outermost. The
    layers are dealt out to the stages as evenly as possible. Activations have the `shape` (rows of this rank,
    features). `schedule` is as for `step_plan.plan`, `optimizer` an SGD or AdamW of `fompi.parallel.data`.

    `loss(y, target) -> (value, dy)` gets some rows of a micro-batch at a time; the values are added. A layer gets rows
    in the same way (`Layer`): a half of those of a rank of tp.

    Collective. Raises PlanError, LayoutError, ShapeError or MismatchError on all ranks if the arguments do not fit.
    """

    def __init__(
        self,
        make: Callable[[int], Layer],
        *,
        layers: int,
        mesh: Mapping[str, int],
        optimizer: Any,
        loss: Callable[[Array, Array], tuple[Any, Array]],
        comm: Any = None,
        schedule: str | Sequence[Sequence[Step | str]] = "1f1b",
        **form: Any,
    ):
        self.comm = Communicator.of(comm)
        self.loss, self.optimizer, self.closed = loss, optimizer, False
        self.layers: dict[int, Layer] = {}
        refusal: Exception | None = None
        sizes = np.zeros(layers, np.int64)
        try:
            first = plan(schedule, mesh=mesh, layers=[0] * layers, **form)
            problem: StepProblem = first.problem
            if problem.size != self.comm.size:
                raise ShapeError(f"mesh={dict(mesh)} has {problem.size} ranks, but the communicator {self.comm.size}")
            self.layers = {number: make(number) for number in problem.held(self.comm.rank)}
            for number, layer in self.layers.items():
                sizes[number] = sum(w.size for w in layer.parameters)
        except Exception as error:  # of any kind: the other ranks wait for this one
            refusal = error
        agree(self.comm, f"a training step of {layers} layers on {dict(mesh)}, {form}", refusal)
        sizes = np.asarray(all_gather(sizes[None], comm=self.comm)).max(0)
        self.plan: Plan = plan(schedule, mesh=mesh, layers=[int(n) for n in sizes], **form)
        self.problem = self.plan.problem
        self.d, self.t, _ = self.problem.place(self.comm.rank)
        self.shards = {number: self._shard(number) for number in self.layers}
        """The part of the parameters of each layer that this rank keeps, flat. A step writes it."""
        self.states = {number: optimizer.state(shard) for number, shard in self.shards.items()}
        self._rows = offsets(self.problem.halves)
        self._forget()
        kernels = {name: getattr(self, f"_{name}") for name in KERNELS}
        given: dict[str, Any] = {f"p{number}": shard for number, shard in self.shards.items()}
        self.executor = bind(self.plan, comm=self.comm, kernels=kernels, **given)

    def _shard(self, number: int) -> Array:
        flat = np.concatenate([w.reshape(-1) for w in self.layers[number].parameters] or [np.zeros(0)])
        ends = offsets(self.problem.shares(number))
        return flat[ends[self.d] : ends[self.d + 1]].astype(self.problem.dtype)

    # -- a step
    def __call__(self, inputs: Sequence[Array] | None = None, targets: Sequence[Array] | None = None) -> Any:
        """One step. `inputs` are those of the micro-batches of this rank of dp, on the ranks of the first stage: the
        rows of this rank. `targets` belong to the same rows, on the ranks of the last stage. Returns the losses there.
        """
        if self.closed:
            raise StateError("the training step is closed")
        self._forget()
        self._inputs, self._targets = inputs, targets
        with self.comm.joint("a training step"):
            self.executor()
        self.input_gradients = self._gradients or None
        return self._losses if self._is_last() else None

    def _is_last(self) -> bool:
        return len(self.problem.layers) - 1 in self.layers

    def _forget(self) -> None:
        self._saved: dict[tuple[int, ...], Any] = {}
        self._full: dict[int, list[Array]] = {}
        self._losses = [0.0] * self.problem.microbatches
        self._gradients: list[Array] = []
        self._inputs = self._targets = None
        if 0 in self.layers:
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

    # -- the kernels of the plan
    def _input(self, args: tuple[int, ...], reads: Sequence[Array], writes: Sequence[Array]) -> None:
        batch, _, h = args
        writes[0][...] = self._part(self._inputs, "inputs", batch, h)

    def _weights(self, number: int, parts: Sequence[Array]) -> list[Array]:
        """The parameters of a layer, which have been gathered. They are put together once in a step."""
        if number not in self._full:
            flat, found, first = np.concatenate(parts), [], 0
            for w in self.layers[number].parameters:
                found.append(flat[first : first + w.size].reshape(w.shape))
                first += w.size
            self._full[number] = found
        return self._full[number]

    def _forward(self, args: tuple[int, ...], reads: Sequence[Array], writes: Sequence[Array]) -> None:
        number, _, place, _ = args
        x, *parts = reads
        layer = self.layers[number]
        z, self._saved[args] = layer.forward(self._weights(number, parts), x)
        writes[0][...] = z
        if layer.residual and place == self.t:  # the owner of the rows adds them once
            writes[0][...] += x

    def _loss(self, args: tuple[int, ...], reads: Sequence[Array], writes: Sequence[Array]) -> None:
        batch, _, h = args
        value, writes[0][...] = self.loss(reads[0], self._part(self._targets, "targets", batch, h))
        self._losses[batch - self.d * self.problem.microbatches] += value

    def _backward(self, args: tuple[int, ...], reads: Sequence[Array], writes: Sequence[Array]) -> None:
        number, _, place, _ = args
        dy, _, _, *rest = reads
        layer, dp = self.layers[number], self.problem.axes[0]
        dx, gradients = layer.backward(self._weights(number, rest[:dp]), self._saved.pop(args), dy)
        writes[0][...] = dx
        if layer.residual and place == self.t:
            writes[0][...] += dy
        flat, first = np.concatenate([g.reshape(-1) for g in gradients] or [np.zeros(0)]), 0
        for out in writes[1:]:
            term = flat[first : first + len(out)]
            first += len(out)
            if len(rest) > dp:  # there is a sum so far
                out += term
            else:
                out[...] = term

    def _input_backward(self, args: tuple[int, ...], reads: Sequence[Array], writes: Sequence[Array]) -> None:
        batch, _, h = args
        i = batch - self.d * self.problem.microbatches
        self._gradients[i][self._rows[h] : self._rows[h + 1]] = reads[0]

    def _update(self, args: tuple[int, ...], reads: Sequence[Array], writes: Sequence[Array]) -> None:
        number, _ = args
        self.optimizer.update(writes[0], reads[0], self.states[number])

    # -- after a step
    @property
    def trace(self) -> Trace:
        """The Trace of the last step on this rank: kernels and messages of all axes."""
        return self.executor.trace

    def close(self) -> None:
        """Give the memory of the plan back."""
        if not self.closed:
            self.closed = True
            self.executor.close()

    def __enter__(self) -> TrainingStep:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.close()
