"""`operation.bind(...)`: a call on its own tensors that is agreed once and called often.

    step = fompi.all_reduce.bind(x, op="mean", out=x, comm=tp)      # the arguments of a call; collective
    y = step()                                                      # all_reduce(x): no agreement, no choice, no plan
    y = step(x=other)                                               # of another tensor of the same form

The model is `contract_expression` of opt_einsum. `fompi.bind(plan, ...)` binds a plan of one's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from fompi.base.call_options import CallOptions
from fompi.base.errors import PlanError, StateError, TensorError
from fompi.engine.communicator import Communicator
from fompi.ops.arguments import Arguments, LocalCall, localise, names_of
from fompi.ops.certified import Certificate
from fompi.ops.decide import decide
from fompi.ops.operation import Operation, communicator_of
from fompi.ops.pending import program_of
from fompi.plans.plan import Plan
from fompi.runtime.binding import bind
from fompi.runtime.executor import Executor
from fompi.tensors import dlpack


class BoundCall:
    """An operation on tensors that stay: `y = step()`, or `step.start()`, other work, `y = step.wait()`.

    `step(x=other)` is one call on other tensors, by the names of the operation's tensors (`x`, `w`, `bias`, `h`,
    `out`; of several weights `w0`, `w1`). They have the shape, the dtype and the strides of the bound ones. Each rank
    decides for itself. What the tensors contain is read at each call. A result lies in `out=`, or in memory that the
    next call writes again. It has no gradient.

    With `certify=True`, `error` is the largest error of the last result: see `fompi.ops.certified`. Then all ranks also
    wait for bound calls in one order.

    All ranks call it equally often. Nothing compares these calls: `label=` does (`fompi.Executor`). `close()`, or
    `with`, gives the memory back.
    """

    def __init__(
        self,
        operation: Operation[Any],
        arguments: Arguments,
        comm: Any,
        call_options: CallOptions,
    ):
        communicator, wrong = communicator_of(comm)

        def localised() -> LocalCall:
            return _checked(operation, arguments, communicator, call_options)

        self._certificate: Certificate | None = None
        self._error: float | None = None
        is_certified = call_options.certify and communicator.size > 1
        if is_certified and call_options[:2] == ("auto", None):
            call_options = call_options._replace(schedule="direct")  # no message is written over
        compared = "bound", " ".join([*filter(None, [arguments.words]), *["certified"] * call_options.certify])
        local, plan = decide(operation.name, localised, communicator, call_options, *compared, refusal=wrong)
        self._arguments, self._local = arguments, local
        self._outputs = [b for b in plan.programs[communicator.rank].buffers if b.is_output]
        out = None if local.in_place else arguments.out
        self._is_empty = operation.name == "scatter" and communicator.rank != local.problem.root  # x is only a shape
        self._moved = local.dim > 0 or local.split >= 0 or self._is_empty  # the plan has other tensors
        self._out = arguments.out  # of the last call
        self._is_plain = [b.name for b in self._outputs] == ["y"] and self._out is None and not self._moved
        named = zip(names_of(local.problem, arguments), arguments.tensors, strict=True)
        given = dict(named) | ({} if out is None else {"out": out})
        self._places = dlpack.places(given)
        self._out_place = dlpack.places({} if arguments.out is None else {"out": arguments.out})
        self._versioned = dlpack.versioned([arguments.out])
        self._copied: tuple[Any, Any] | None = None  # out, and the result that is copied there, as rows of elements
        self.executor: Executor = bind(plan, comm=communicator, **self._all_rows_first(given))
        if call_options.certify:
            self._is_plain = False
            try:
                self._certificate = Certificate(self.executor)
            except Exception:  # on all ranks: it is of the plan
                self.executor.close()
                raise

    @property
    def error(self) -> float:
        """The largest error of an element of the last result. Infinite if that is not finite. Needs `certify=True`."""
        if self._error is None:
            raise StateError("no result is certified: bind with certify=True, and call")
        return self._error

    @property
    def plan(self) -> Plan:
        """The plan of the call."""
        return self.executor.plan

    def __call__(self, *, out: Any = None, label: int | str | None = None, **tensors: Any) -> Any:
        """Run one call and return its result."""
        if self._is_plain and not tensors and out is None:
            self._out = None
            return self.executor(label=label)
        return self._result(self.executor(label=label, **self._given(out, tensors)))

    def start(self, *, out: Any = None, label: int | str | None = None, **tensors: Any) -> Self:
        """Start a call and return at once. It progresses while the program does other work."""
        self.executor.start(label=label, **self._given(out, tensors))
        return self

    def refuse(self, error: Exception) -> None:
        """Take part in the next call, which ends by an error on all ranks. Here `wait` raises `error`."""
        self.executor.refuse(error)

    def wait(self, timeout: float | None = None) -> Any:
        """The result of the call that was started. Raises its error, and WaitTimeout after `timeout` s (it goes on)."""
        return self._result(self.executor.wait(timeout))

    def done(self) -> bool:
        """True once the call is finished. Progresses everything in flight."""
        return self.executor.done()

    def close(self) -> None:
        """Give the memory back. Waits for a call in flight."""
        self.executor.close()
        self._copied = None
        if self._certificate is not None:
            self._certificate.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.executor.compiled.title}, bound on {self.executor.comm.name}>"

    def _given(self, out: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of one call, as the executor takes them."""
        self._out = self._arguments.out if out is None else out
        if self._moved:  # else the executor knows the tensors, and sees what has moved
            tensors = {**dlpack.moved(self._places), **tensors}
        return self._all_rows_first(tensors if out is None else {**tensors, "out": out})

    def _all_rows_first(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._rows_first("y" if name == "out" else name, x) for name, x in tensors.items()}

    def _rows_first(self, name: str, tensor: Any) -> Any:
        """`tensor` with its rows as the first dimension, where the call has another one."""
        if name == "x" and self._is_empty:
            return dlpack.Lent(self._local.arrays["x"], self._local.problem.dtype)
        if not self._moved or name not in ("x", "h", "y"):
            return tensor
        try:
            borrowed = dlpack.borrow(tensor, name)
            moved = dlpack.rows_first(borrowed.array, self._local.dim, self._local.split)
        except Exception:
            return tensor  # the executor refuses it, and tells the other ranks
        return dlpack.Lent(moved, borrowed.dtype)

    def _result(self, results: Any) -> Any:
        """The results of a call in the form that the operation gives them."""
        local, arguments = self._local, self._arguments
        if self._certificate is not None:
            self._error = self._certificate.error(results)
        if local.in_place and self._out is arguments.out:
            if self._copied is None:
                self._copied = local.arrays["x"].reshape(-1), dlpack.borrow(results, "y").array.reshape(-1)
            x, y = self._copied
            if self._out_place and dlpack.moved(self._out_place):
                x = dlpack.borrow(arguments.out, "out").array.reshape(-1)
            np.copyto(x, y)
            dlpack.mark_all_written(self._versioned)
        if self._out is not None:
            return self._out
        named = {}
        for buffer, y in zip(self._outputs, results if len(self._outputs) > 1 else (results,), strict=True):
            named[buffer.name] = y
            if self._moved:
                array = dlpack.borrow(y, buffer.name).array
                array = array if buffer.axis == "whole" else dlpack.rows_at(array, local.dim, local.split)
                named[buffer.name] = dlpack.lend(array, buffer.dtype, local.like)
        return arguments.result(named)


def _checked(
    operation: Operation[Any], arguments: Arguments, comm: Communicator, call_options: CallOptions
) -> LocalCall:
    """This rank's part of the call. Raises for what cannot be bound."""
    name = f"fompi.{operation.name}.bind"
    if any(map(dlpack.requires_grad, arguments.tensors)):
        raise TensorError(f"{name} has no gradient: pass x.detach()")
    if call_options.effort != "plan":
        raise PlanError(f'{name}: effort="measure" chooses at the first call: bind fompi.explain(...) for it')
    local = localise(operation.name, arguments, comm.rank, comm.size, call_options)
    if local.problem.is_split:
        raise PlanError(f"{name}: order={local.problem.order}: a rank has several subtrees, which are not bound")
    if call_options.certify and not local.problem.wire:
        raise PlanError(f"fompi.{operation.name}: certify=True needs a wire: without one, messages round nothing")
    schedule, slices, *_ = call_options
    if (schedule, slices) != ("auto", None):  # if it cannot carry out this call, the others hear of it
        program_of(comm, local, "direct" if schedule == "auto" else schedule, slices)
    if local.packing is not None:
        raise TensorError(f"{name}: x is strided, and would be copied here: pass a contiguous x")
    if (local.dim or local.in_place) and local.device is not None:
        raise PlanError(f"{name}: on a device the rows come first, and out= is not x")
    return local
