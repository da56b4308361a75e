"""Pipeline parallelism: the stages of a model on different ranks, micro-batches that go through them, and overlap.

    pipe = Pipeline([stage], comm=comm, microbatches=8, schedule="1f1b", activations=(16, 64), loss=loss)
    losses = pipe.step(inputs, targets)           # of each micro-batch on the last stage, None on other ranks
    pipe.input_gradients                          # of each micro-batch on the first stage
    ys = pipe.forward(inputs)                     # an evaluation: what the last stage has computed, on its rank

The schedule is one of `actions.SCHEDULES`, or actions of your own. A pipeline is a plan (`pipeline_plan`): its kernels
are the methods of the stages. So it is verified, simulated and traced as every other plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context
from functools import partial
from typing import Any

import numpy as np

from fompi.backends.base import Backend
from fompi.backends.cuda import backend_of
from fompi.backends.numbers import for_numpy, place
from fompi.backends.numpy import Numpy
from fompi.base.call_options import wire_on
from fompi.base.errors import DtypeError, PlanError, ShapeError, TensorError, quoted
from fompi.base.layout import offsets
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree
from fompi.parallel.actions import SCHEDULES, Action, Both, Step, actions
from fompi.parallel.arrays import borrow_any, carrying, lent
from fompi.parallel.buckets import detached
from fompi.parallel.interleave import interleave
from fompi.parallel.pipeline_plan import PipelineProblem, evaluation, plan
from fompi.parallel.planned import PlannedStep
from fompi.parallel.shares import dealt
from fompi.plans.plan import Plan
from fompi.runtime.executor import Executor
from fompi.tensors import dlpack
from fompi.tensors.dlpack import Tensor

__all__ = ["SCHEDULES", "Action", "Both", "Pipeline", "actions", "plan"]

FRAMEWORKS = ("numpy", "torch", "jax")

Key = tuple[int, int]
"""(stage, micro-batch)"""


class Layers:
    """Layers one after the other, as one stage. Without a layer it hands on what it gets."""

    def __init__(self, layers: Sequence[Any]):
        self.layers = layers

    def forward(self, x: Any) -> tuple[Any, list[Any]]:
        saved = []
        for layer in self.layers:
            x, kept = layer.forward(x)
            saved.append((layer, kept))
        return x, saved[::-1]

    def backward(self, saved: list[Any], dy: Any) -> Any:
        for layer, kept in saved:
            if hasattr(layer, "backward"):
                dy = layer.backward(kept, dy)
            else:
                dy, rest = layer.backward_input(kept, dy)
                layer.backward_weight(rest)
        return dy

    def backward_input(self, saved: list[Any], dy: Any) -> tuple[Any, list[Any]]:
        rests = []
        for layer, kept in saved:
            dy, rest = layer.backward_input(kept, dy)
            rests.append((layer, rest))
        return dy, rests

    def backward_weight(self, rests: list[Any]) -> None:
        for layer, rest in rests:
            layer.backward_weight(rest)


class Pipeline(PlannedStep):
    """losses = [loss(stages[-1](... stages[0](x)), t) for x, t in zip(inputs, targets)], and their gradients

    `stages` are those of this rank: stage rank, then stage rank + ranks, and so on. All ranks have equally many; more
    than one need the schedule "interleaved", or two "zbv" or "dualpipev": there the second one is 2 * ranks - 1 - rank,
    so that the first and the last stage are on rank 0. A stage is any object with these methods. The gradients of its
    parameters are its own business: it adds up those of all micro-batches.

    - `forward(x) -> (y, saved)`
    - `backward(saved, dy) -> dx`, or its two parts: `backward_input(saved, dy) -> (dx, rest)` and then
      `backward_weight(rest)`. The zero-bubble schedules need the parts.

    With `shares` the `stages` are all layers of the model, the same on all ranks, and this rank has a run of as many
    as the shares say (`fompi.parallel.shares`). A rank without a layer hands on what it gets.

    `activations[s]` is the shape of what stage s hands on, for all stages but the last. One shape is that of all
    stages. `dtype` is that of all of them. `loss(y, target) -> (value, dy)` is called on the last stage. `schedule` is
    a name of `actions.SCHEDULES`, or actions of your own (`actions`).

    A stage gets tensors of `framework` ("numpy", "torch" or "jax") in memory that other micro-batches use later. They
    are valid until the backward of the same micro-batch returns; with two parts, until `backward_weight` returns. The
    first stage gets `inputs[i]` itself.

    A step ends when all ranks have ended it, so that an error on one rank is an error on all. With `checked=False` it
    ends when this rank has done its part. Only then can zero bubble fill the end of a step with the begin of the next.

    `seconds` are those of F, B, I and W, so that `plan` can be simulated. With `backend` an emulated accelerator (one
    with `bind_timed`) every call takes them, whatever it takes on the host.

    With `overlap_f_b` a forward and the backward of another micro-batch run side by side, where the schedule allows it
    (`actions`): what a strategy of one of them has sent travels while the other computes (`fompi.interleave`). So a
    layer of experts hides its messages across micro-batches. Actions of your own say where: "(0F1;1B0)OVERLAP_F_B".

    With a `device` (`fompi.Device`) tensors are in its memory. Stages and loss enqueue in the caller's current stream,
    and nothing waits for them. Activations go from device to device. The `framework` "numpy" then means arrays of CuPy,
    or of the software device; "torch" and "jax" mean tensors of these on the device.

    If `comm` carries a wire (`Communicator.using`, or the keyword here), messages carry activations and their gradients
    in it. They are rounded once each. A stage gets tensors of `dtype` all the same.

    Collective. Raises PlanError, ShapeError, DtypeError or MismatchError on all ranks if the arguments do not fit.
    """

    _kind = "pipeline"

    def __init__(
        self,
        stages: Sequence[Any],
        *,
        comm: Any = None,
        microbatches: int,
        schedule: str | Sequence[Sequence[Step | str]] = "1f1b",
        activations: Sequence[Any],
        loss: Callable[[Any, Any], tuple[Any, Any]],
        dtype: str = "float32",
        framework: str = "numpy",
        checked: bool = True,
        backend: Backend | None = None,
        seconds: Mapping[str, float | Sequence[float]] | None = None,
        overlap_f_b: bool = False,
        device: Any = None,
        shares: Any = None,
        **how: Any,
    ):
        super().__init__(Communicator.of(comm).plain)
        self.loss, self.dtype, self.framework, self.microbatches = loss, dtype, framework, microbatches
        self.checked = checked
        refusal, text = None, "a pipeline"
        try:
            self.stages, dealt_in_words = self._own(_listed(stages), shares)
            if not self.stages:
                raise PlanError("stages is empty: every rank needs the same number of stages, at least one")
            size, rank = self.comm.size, self.comm.rank
            self._how: dict[str, Any] = {
                "ranks": size,
                "microbatches": microbatches,
                "chunks": len(self.stages),
                "activations": activations,
                "dtype": dtype,
                "seconds": seconds,
                "wire": wire_on(carrying("Pipeline", comm, how, [dtype], ["wire"]).how, dtype),
            }
            if overlap_f_b:
                schedule = actions(schedule, size, microbatches, len(self.stages), overlap_f_b)
            self.plan: Plan = plan(schedule, **self._how)
            self.problem: PipelineProblem = self.plan.problem
            self._by_number = dict(zip(self.problem.stages_of(rank), self.stages, strict=True))
            if backend is not None and not hasattr(backend, "asynchronous"):
                raise PlanError(f"backend={backend!r} must be a backend of fompi.backends")
            if backend is not None and (backend.device is not None or device is not None):
                raise PlanError("a backend emulates an accelerator on the host: give a device as device=")
            if device is not None and overlap_f_b:
                raise PlanError("overlap_f_b=True is for the host: on a device both are in the order of one stream")
            if backend is not None and backend.asynchronous:
                for kernel in self.plan.kernels:
                    if not kernel.seconds and not kernel.beside:
                        raise PlanError(f"seconds= lacks the seconds of {kernel.name}, which the {backend.name} needs")
            self._check_methods()
            by = self.plan.schedule
            if by not in SCHEDULES:
                by = "; ".join(" ".join(map(str, a)) for a in actions(schedule, size, microbatches, len(self.stages)))
            text = f"{self.problem} with {self.problem.activations} by {by}, checked {checked}{dealt_in_words}"
            text += "" if device is None else f", on a {device.name}"
            self._backend = backend or (Numpy() if device is None else backend_of(device).by_caller())
            if device is not None:  # its streams are made before the ranks agree
                self.comm.paths(device)
        except Exception as error:  # of any kind: the other ranks wait for this one
            refusal = error
        agree(self.comm, text, refusal)
        self.input_gradients: list[Any] | None = None
        self._inputs: Sequence[Any] = ()
        self._targets: Sequence[Any] = ()
        self._refusal: Exception | None = None
        self._forget()
        self.device = device
        if framework == "numpy" and device is not None:
            framework = "device" if device.key == "software" else "cupy"
        self._like = Tensor(None, dtype, framework, False, None)
        self.executor = self._bind_stages(self.plan)
        self._evaluation: Executor | None = None

    def _own(self, stages: list[Any], shares: Any) -> tuple[list[Any], str]:
        """The stages of this rank, and in words who has how many layers, if these are dealt."""
        if shares is None:
            return stages, ""
        counts = dealt(shares, "layers", len(stages), self.comm.size)
        first, rank = offsets(counts), self.comm.rank
        return [self._joined(stages[first[rank] : first[rank + 1]])], f", shares={[*counts]}"

    def _joined(self, layers: Sequence[Any]) -> Any:
        """These layers as a stage."""
        return Layers(layers)

    def _bind_stages(self, plan: Plan) -> Executor:
        used = {}
        for kernel in plan.kernels:
            call = getattr(self, f"_{(kernel.beside or (kernel,))[-1].name}")
            used[kernel.name] = self._in_context(partial(self._side_by_side, call) if kernel.beside else call)
        return self._bind(plan, used, backend=self._backend)

    def _in_context(self, kernel: Callable[..., None]) -> Callable[..., None]:
        """The kernel with the modes of the caller of the step: `np.errstate`, and what else Python has in a context."""
        return lambda *given: self._context.copy().run(kernel, *given)

    def _check_methods(self) -> None:
        """Raise PlanError if a stage of this rank lacks a method that its actions call."""
        kinds = {kernel.name for kernel in self.plan.kernels}
        if self.framework not in FRAMEWORKS:
            raise PlanError(f"framework={quoted(self.framework, FRAMEWORKS)} must be one of {', '.join(FRAMEWORKS)}")
        if not callable(self.loss):
            raise PlanError(f"loss={self.loss!r} must be a function of y and a target")
        layers = ((n, each) for n, stage in self._by_number.items() for each in getattr(stage, "layers", [stage]))
        for number, stage in layers:
            parts = [callable(getattr(stage, name, None)) for name in ("backward_input", "backward_weight")]
            wanted = ["forward"]
            if "backward_input" in kinds:
                wanted += ["backward_input", "backward_weight"]
            if "backward" in kinds and not all(parts):
                wanted.append("backward")
            for name in wanted:
                if not callable(getattr(stage, name, None)):
                    raise PlanError(f"stage {number}, {type(stage).__name__}, has no method {name}()", self.comm.rank)

    # -- one step
    def step(self, inputs: Sequence[Any] | None = None, targets: Sequence[Any] | None = None) -> list[Any] | None:
        """Run all micro-batches forward and backward. Collective.

        `inputs` are those of the micro-batches, on the rank of the first stage, and `targets` on that of the last
        stage. Other ranks pass None. Returns the losses of the micro-batches on the rank of the last stage, else None.

        If a stage raises an error, it is raised on this rank, and PeerError on all others. The gradients of parameters
        then have the terms of some micro-batches. Ranks of other pipelines that wait for this rank in a stage get a
        PeerError too, and cannot use the communicator of that call any more.
        """
        self._begin()
        self._refusal = self._accept("inputs", inputs, 0) or self._accept("targets", targets, self.problem.stages - 1)
        self.input_gradients = [None] * self.microbatches if self._is_here(0) else None
        return self._run(self.executor)

    def forward(self, inputs: Sequence[Any] | None = None) -> list[Any] | None:
        """Run all micro-batches forward, for an evaluation. Collective. The first call is slower: it binds its plan.

        `inputs` are those of the micro-batches, on the rank of the first stage. Returns what the last stage has
        computed for each micro-batch, on its rank, else None. Nothing is kept for a backward, and no loss is computed.
        A stage with a method `evaluate(x) -> y` is asked for that, else for `forward`. Errors are as those of `step`.
        """
        self._begin()
        if self._evaluation is None:
            self._evaluation = self._bind_stages(evaluation(**self._how, placement=self.problem.placement))
        self._refusal = self._accept("inputs", inputs, 0)
        return self._run(self._evaluation)

    def _begin(self) -> None:
        super()._begin()
        self._forget()
        self._context = copy_context()

    def _run(self, executor: Executor) -> list[Any] | None:
        """Run a plan whose arguments are accepted. The results are those of the last stage, on its rank."""
        try:
            with self._step(executor, self._mode, self.checked):
                executor()
                if executor is self.executor:
                    self._pull_inputs()
            return self._results if self._is_here(self.problem.stages - 1) else None
        finally:
            self._forget()

    def _is_here(self, stage: int) -> bool:
        return stage in self._by_number

    def _accept(self, name: str, given: Sequence[Any] | None, stage: int) -> Exception | None:
        """Take what this rank needs. Returns the error of wrong arguments: the first kernel raises it for all ranks."""
        if not self._is_here(stage):
            return None
        try:
            listed = [] if given is None else [*given]
        except TypeError:
            return ShapeError(f"{name} must list {self.microbatches} micro-batches on the rank of stage {stage}")
        if len(listed) != self.microbatches:
            return ShapeError(f"{name} has {len(listed)} micro-batches, the pipeline has {self.microbatches}")
        setattr(self, f"_{name}", listed)
        return None

    def _pull_inputs(self) -> None:
        """Go on with the gradients of the inputs, where the framework can. An error here is one of the step."""

    def _forget(self) -> None:
        """Drop what belongs to the last step."""
        self._saved: dict[Key, Any] = {}
        self._rests: dict[Key, Any] = {}
        self._loss_gradients: dict[int, Any] = {}
        self._results: list[Any] = [None] * self.microbatches
        self._inputs, self._targets, self._refusal = (), (), None
        self._context = Context()

    _mode = ""
    """How this rank runs the step, in words: all ranks must run it alike."""

    # -- the kernels of the plan
    def _input(self, args: Key, reads: Sequence[Any]) -> Any:
        """What a stage reads. Raises the error of wrong arguments."""
        if self._refusal is not None:
            raise self._refusal
        stage, i = args
        return self._lent(reads[0]) if stage else self._inputs[i]

    def _forward(self, args: Key, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        stage, i = args
        result = self._by_number[stage].forward(self._input(args, reads))
        y, self._saved[args] = _pair(result, f"forward() of stage {stage}", "(y, saved)")
        if stage == self.problem.stages - 1:
            result = self.loss(y, self._targets[i])
            self._results[i], self._loss_gradients[i] = _pair(result, "the loss", "(value, dy)")
        else:
            self._put(y, writes[0], f"y of stage {stage}, micro-batch {i},")

    def _evaluate(self, args: Key, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        number, i = args
        stage, x = self._by_number[number], self._input(args, reads)
        if hasattr(stage, "evaluate"):
            y = stage.evaluate(x)
        else:
            y, _ = _pair(stage.forward(x), f"forward() of stage {number}", "(y, saved)")
        if number < self.problem.stages - 1:
            self._put(y, writes[0], f"y of stage {number}, micro-batch {i},")
        else:
            given = dlpack.borrow(detached(y), f"y of micro-batch {i}")
            is_of_slot = number and dlpack.overlap(given.array, reads[0])
            self._results[i] = lent(for_numpy(given.array).copy(), given) if is_of_slot else y

    def _backward(self, args: Key, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        stage, saved, dy = self._by_number[args[0]], self._saved.pop(args), self._gradient(args, reads)
        if hasattr(stage, "backward"):
            dx = stage.backward(saved, dy)
        else:
            dx, rest = _pair(stage.backward_input(saved, dy), f"backward_input() of stage {args[0]}", "(dx, rest)")
            stage.backward_weight(rest)
        self._keep_gradient(args, dx, writes)

    def _side_by_side(self, backward: Callable[..., None], args: tuple[int, ...], reads: Any, writes: Any) -> None:
        """A forward and a backward: `fompi.plans.plan.UserKernel` says what belongs to which."""
        stage, i, other, j, read, written = args
        interleave(
            lambda: self._forward((stage, i), reads[:read], writes[:written]),
            lambda: backward((other, j), reads[read:], writes[written:]),
        )

    def _backward_input(self, args: Key, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        result = self._by_number[args[0]].backward_input(self._saved.pop(args), self._gradient(args, reads))
        dx, self._rests[args] = _pair(result, f"backward_input() of stage {args[0]}", "(dx, rest)")
        self._keep_gradient(args, dx, writes)

    def _backward_weight(self, args: Key, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        self._by_number[args[0]].backward_weight(self._rests.pop(args))

    def _gradient(self, args: Key, reads: Sequence[Any]) -> Any:
        """The gradient of the output of this stage."""
        stage, i = args
        return self._loss_gradients.pop(i) if stage == self.problem.stages - 1 else self._lent(reads[0])

    def _keep_gradient(self, args: Key, dx: Any, writes: Sequence[Any]) -> None:
        """Hand the gradient of the input to the stage before, or to the caller."""
        stage, i = args
        if stage:
            self._put(dx, writes[0], f"dx of stage {stage}, micro-batch {i},")
        else:
            assert self.input_gradients is not None
            self.input_gradients[i] = dx

    def _lent(self, array: Any) -> Any:
        """A slot as a tensor of the framework of the stages. JAX arrays must never change, so they are copies."""
        array = for_numpy(array)
        return lent(array.copy() if self.framework == "jax" else array, self._like)

    def _put(self, tensor: Any, slot: Any, name: str) -> None:
        """Copy what a stage has returned to the slot from which it is sent."""
        given = borrow_any(detached(tensor), name)
        if place(given.array) is not self.device:
            where, wanted = ("the host" if d is None else f"the {d.name}" for d in (place(given.array), self.device))
            raise TensorError(f"{name} is on {where}, but the pipeline passes on tensors of {wanted}: see device=")
        if given.dtype != self.dtype:
            raise DtypeError(f"{name} is {given.dtype}, the pipeline was made for {self.dtype}")
        if given.array.shape != slot.shape:
            raise ShapeError(f"{name} has the shape {given.array.shape}, but {slot.shape} was declared in activations")
        np.copyto(for_numpy(slot), given.array)


def _listed(stages: Any) -> list[Any]:
    try:
        return [*stages]
    except TypeError as error:
        raise PlanError(f"stages must be a list of stages: {error}") from None


def _pair(result: Any, who: str, form: str) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise TensorError(f"{who} must return {form}, not {type(result).__name__}")
    return result
