"""A call site: one operation at one place of a traced program, bound to memory of its own.

    site = site_of(TracedCall(operation, arguments, comm, call_options))   # while JAX traces; collective
    site([x, w], [y])                                                      # what the compiled program calls

The ranks agree when a call is traced: on the operation and on the rows of all ranks. So the shapes of all results are
known, and a call of the compiled program needs no agreement. A site lives as long as the trace or the program that has
it, and until that program has ended. Its memory goes back to the arena then, or when the next call is traced.

`sendrecv` has no plan. Its site sends and receives messages, and only the ranks that take part trace it.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fompi.backends.cuda import backend_of
from fompi.backends.numpy import Numpy
from fompi.base.call_options import CallOptions
from fompi.base.doors import DOORS
from fompi.base.errors import DtypeError, PlanError, TensorError
from fompi.base.layout import Extents
from fompi.base.nested import flatten
from fompi.engine.communicator import Communicator
from fompi.jax import ffi
from fompi.jax.ffi import Target, array_at
from fompi.ops.arguments import Arguments, LocalCall, localise, names_of
from fompi.ops.decide import decide
from fompi.ops.messages import sendrecv
from fompi.ops.operation import Operation, communicator_of
from fompi.plans.plan import Plan
from fompi.plans.problems import Form
from fompi.runtime.binding import check_tensors
from fompi.runtime.compiled import COLLECTIVE, Compiled
from fompi.runtime.executor import Executor
from fompi.tensors import dlpack

Apply = Callable[..., Any]
"""(operation, tensors, options, comm, call_options, words, gradient) -> the result, which JAX can differentiate."""

_NUMBERS = itertools.count()


def form_of(tensor: Any) -> Form:
    """The form of an array or a tracer. Raises DtypeError for one that has no dtype of fompi."""
    name = str(tensor.dtype)
    if name.startswith("key<"):
        raise DtypeError(f"a tensor has dtype {name}: pass jax.random.key_data(key)")
    if name not in dlpack.STORAGE:
        raise DtypeError(f"a tensor has dtype {name}; fompi supports: {', '.join(dlpack.STORAGE)}")
    return Form(tuple(tensor.shape), name)


class TracedCall(NamedTuple):
    """A call as it was read, and the convention of its gradient."""

    operation: Operation[Any]
    arguments: Arguments
    comm: Any
    call_options: CallOptions
    gradient: str = "sum"


class Site(Target):
    """One operation at one place of a traced program."""

    nested: Any
    """The result of the operation, with a name in place of each tensor."""

    extents: Extents
    """The rows of all ranks."""

    apply: Apply
    """Runs an operation of the backward (`fompi.jax.custom_vjp`)."""

    call = -1
    """Which site of its communicator this is: a number that is the same on all ranks. -1: not all ranks have it."""

    def __init__(self, call: TracedCall, comm: Communicator):
        self.operation, arguments, _, self.call_options, self.gradient = call
        self.comm = comm
        self.pending: deque[Any] = deque()  # calls on a device that have started, and not ended
        self.given = list(map(form_of, arguments.tensors))
        self.arguments = arguments.with_tensors([...] * len(self.given))
        self.number = next(_NUMBERS)
        ffi.release()
        self._lock = threading.Lock()
        ffi.SITES[self.number] = self

    def run_on_device(self, stream: int, given: Sequence[int], results: Sequence[int]) -> None:
        """By an unbound call: the ranks agree each time. The host waits for messages, not for the device."""
        with self._lock:
            self.end_on_device(stream, self.begin_on_device(stream, given), results)

    def begin_on_device(self, stream: int, given: Sequence[int]) -> Any:
        """The operation in flight, on memory of the device at these addresses."""
        device = dlpack.DEVICES["cuda"]()
        device.arrived(stream)
        tensors = [ffi.array_on(device, *each) for each in zip(given, self.given, strict=True)]
        return self.operation.begin(self.arguments.with_tensors(tensors), self.comm, self.call_options)

    def end_on_device(self, stream: int, pending: Any, results: Sequence[int]) -> None:
        """Copy its results to these addresses, and let the stream wait for them."""
        device = dlpack.DEVICES["cuda"]()
        made = flatten(pending.wait())
        targets = [ffi.array_on(device, *each) for each in zip(results, self.results, strict=True)]
        pairs = [(to, x.reshape(to.shape)) for to, x in zip(targets, made, strict=True) if to.size]
        if pairs:
            backend_of(device).copy(*pairs)
        device.lend_to(stream)


def site_of(call: TracedCall) -> Site:
    """The site of a call on tensors that have only shapes and dtypes. Collective, except for `sendrecv`.

    Raises the errors of the operation, on all ranks.
    """
    if call.operation is sendrecv:
        return MessageSite(call, Communicator.of(call.comm))
    return BoundSite(call, *communicator_of(call.comm))


class BoundSite(Site):
    """A site with a bound plan. A call runs on the memory of XLA where the plan can use it.

    Tensors whose rows are not their first dimension are copied to the memory of the plan, or from there. So is what a
    collective of the MPI library reads or writes: MPI cannot take it back, if a call is given up.
    """

    def __init__(self, call: TracedCall, comm: Communicator, refusal: Exception | None):
        operation, arguments, _, call_options, gradient = call
        found: list[tuple[Arguments, LocalCall]] = []

        def localised() -> LocalCall:
            if not found:
                ffi.register()
                _check(call)
                super(BoundSite, self).__init__(call._replace(call_options=call_options), comm)
                zeros = [dlpack.Lent(np.zeros(f.shape, dlpack.STORAGE[f.dtype]), f.dtype) for f in self.given]
                filled = arguments.with_tensors(zeros)
                found.append((filled, localise(operation.name, filled, comm.rank, comm.size, call_options)))
            return found[0][1]

        if call_options.effort == "measure" and comm.size > 1 and call_options[:2] == ("auto", None):
            with suppress(Exception):  # `decide` raises it on all ranks
                localised()
            if found:
                schedule, slices = DOORS.measure(operation, *found[0], comm)
                call_options = call_options._replace(schedule=schedule, slices=slices, effort="plan")
        words = [f"gradient={gradient}"] * (gradient != "sum") + [arguments.words] * (arguments.words != "")
        compared = "under jax.jit", " ".join(words)
        local, plan = decide(operation.name, localised, comm, call_options, *compared, refusal, packs=False)
        self.call = comm.next_bound()  # all ranks have come here
        self.extents = plan.extents(comm.rank)
        self._bind(plan, local)

    def _bind(self, plan: Plan, local: LocalCall) -> None:
        """Take memory, bind the plan to it, and see it in the shapes that the program has."""
        arena, problem, dim = self.comm.engine.arena, local.problem, local.dim
        names = names_of(problem, self.arguments)
        shapes = {name: array.shape for name, array in local.arrays.items()}
        shapes |= problem.whole_shapes
        if problem.columns and not problem.weights:
            shapes["x"] = dlpack.rows_first(np.empty(local.shape, bool), dim, local.split).shape
        tensors = dict(zip(names, (form.dtype for form in self.given), strict=True))
        memory = {name: arena.take(shapes[name], dlpack.STORAGE[dtype]) for name, dtype in tensors.items()}
        self._inputs: list[Any] = [memory[name] for name in names]
        if problem.flat:
            self._inputs = [memory["x"].reshape(local.shape)]
        else:
            moved = [name == "x" or name.startswith("h") for name in names]
            pairs = zip(self._inputs, moved, strict=True)
            self._inputs = [dlpack.rows_at(array, dim, local.split) if rows else array for array, rows in pairs]
        if problem.operation == "scatter" and self.comm.rank != problem.root:
            self._inputs = []  # x gives only its shape
        outputs = {}
        for buffer in plan.programs[self.comm.rank].buffers:
            if buffer.role == "output":
                array = memory[buffer.name] = arena.take(buffer.shape(self.extents), dlpack.STORAGE[buffer.dtype])
                tensors[buffer.name] = buffer.dtype
                if problem.flat:
                    array = array.reshape(problem.result_shape(local.shape, self.comm.rank))
                elif buffer.axis not in ("whole", "experts"):
                    array = dlpack.rows_at(array, dim, local.split)
                outputs[buffer.name] = Form(array.shape, buffer.dtype), array
        self.nested = self.arguments.result({name: name for name in outputs})
        order = flatten(self.nested)
        self.results = [outputs[name][0] for name in order]
        self._outputs = [outputs[name][1] for name in order]
        lent = {name: dlpack.Lent(memory[name], dtype) for name, dtype in tensors.items()}
        compiled, backend = Compiled(plan, self.comm.rank, ""), Numpy()
        self.step = Executor(compiled, self.comm, check_tensors(plan, self.comm, lent, backend), backend)
        fixed = compiled.touched(i for i, kind in enumerate(compiled.kinds) if kind == COLLECTIVE)
        fixed |= problem.whole_shapes.keys()  # the plan has pieces of them

        def is_free(name: str, array: Any) -> bool:
            return name not in fixed and bool(array.flags.c_contiguous)

        self._free = [
            [i for i, (name, array) in enumerate(zip(by, arrays, strict=False)) if is_free(name, array)]
            for by, arrays in ((names, self._inputs), (order, self._outputs))
        ]
        self._others = [
            [i for i in range(len(arrays)) if i not in free]
            for arrays, free in zip((self._inputs, self._outputs), self._free, strict=True)
        ]
        self._moving = self.step.moving(*(names[i] for i in self._free[0]), *(order[i] for i in self._free[1]))

    def __call__(self, given: Sequence[Any], results: Sequence[Any]) -> None:
        with self._lock:  # two programs may have this site
            self.take(given)
            self.step()
            self.put(results)

    def run(self, given: Sequence[int], results: Sequence[int]) -> None:
        (free, free_results), (others, other_results) = self._free, self._others
        with self._lock:
            if len(free) == len(given) and len(free_results) == len(results):
                self._moving((*given, *results))
                return
            for i in others:
                np.copyto(self._inputs[i], array_at(given[i], self.given[i]))
            self._moving((*[given[i] for i in free], *[results[i] for i in free_results]))
            for i in other_results:
                np.copyto(array_at(results[i], self.results[i]), self._outputs[i])

    def take(self, given: Sequence[Any]) -> None:
        """Copy the tensors of a call to the memory of the plan."""
        for mine, theirs in zip(self._inputs, given, strict=False):
            np.copyto(mine, theirs)

    def put(self, results: Sequence[Any]) -> None:
        """Copy the results from the memory of the plan."""
        for mine, theirs in zip(self._outputs, results, strict=True):
            np.copyto(theirs, mine)


class Opaque(Target):
    """A site that is no operation. It has no derivative, and no batch."""

    def __init__(self, name: str, given: list[Form], results: list[Form]):
        self.name, self.given, self.results = name, given, results
        self.number = next(_NUMBERS)
        ffi.release()
        ffi.SITES[self.number] = self


class Half(Opaque):
    """The start or the end of a bound site, as a site of its own. Between them the program does other work."""

    def __init__(self, site: BoundSite, given: list[Form], results: list[Form]):
        super().__init__(f"{site.operation.name}.start", given, results)
        self.site = site


class Start(Half):
    """Starts the operation. Its result is a number without meaning, on which the end depends."""

    def __init__(self, site: BoundSite):
        super().__init__(site, site.given, [Form((), "int32")])

    def __call__(self, given: Sequence[Any], results: Sequence[Any]) -> None:
        self.site.step.check_start()
        self.site.take(given)
        self.site.step.start()
        results[0][...] = self.site.number

    def run_on_device(self, stream: int, given: Sequence[int], results: Sequence[int]) -> None:
        self.site.pending.append(self.site.begin_on_device(stream, given))


class End(Half):
    """Waits for the operation."""

    def __init__(self, site: BoundSite):
        super().__init__(site, [Form((), "int32")], site.results)

    def __call__(self, given: Sequence[Any], results: Sequence[Any]) -> None:
        self.site.step.wait()
        self.site.put(results)

    def run_on_device(self, stream: int, given: Sequence[int], results: Sequence[int]) -> None:
        self.site.end_on_device(stream, self.site.pending.popleft(), results)


class MessageSite(Site):
    """A site that sends its tensor to one rank and receives one of the same shape."""

    def __init__(self, call: TracedCall, comm: Communicator):
        ffi.register()
        _check(call)
        super().__init__(call, comm)
        self.results, self.nested = list(self.given), "y"
        self.extents = Extents(comm.rank, comm.size, (1,))

    def __call__(self, given: Sequence[Any], results: Sequence[Any]) -> None:
        dtype = self.given[0].dtype
        x, out = dlpack.Lent(given[0], dtype), dlpack.Lent(results[0], dtype)
        with self._lock:
            sends_only = self.arguments.peers is not None and self.arguments.peers.source is None
            call = replace(self.arguments.with_tensors([x]), out=None if sends_only else out)
            self.operation.begin(call, self.comm, self.call_options).wait()
        if sends_only:
            results[0][...] = 0


def _check(call: TracedCall) -> None:
    """Raise for options that a call under jax.jit cannot have."""
    call_options, name = call.call_options, call.operation.name
    if call.arguments.out is not None:
        raise TensorError(f"fompi.{name}: out= cannot be used under jax.jit: take the result")
    if call_options.certify:
        raise PlanError(f"fompi.{name}: certify=True cannot be used under jax.jit")
    if call_options.effort not in ("plan", "measure"):
        raise PlanError(f"effort={call_options.effort!r}: effort must be 'plan' or 'measure'")
