"""A public operation: how a call begins.

Operation.__call__ or .start
  -> Arguments, LocalCall   this rank's tensors, checked                   (`fompi.ops.arguments`)
  -> Pending                the call in flight, up to its result           (`fompi.ops.pending`)
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature, signature
from typing import Any, Generic, ParamSpec

from fompi.backends.cuda import backend_of
from fompi.base.call_options import DEFAULTS, OF_CALL, CallKeywords, CallOptions, fitting
from fompi.base.doors import DOORS
from fompi.base.errors import ArgumentError, LaunchError, LayoutError, PlanError, TensorError, meant, of_signature
from fompi.engine.communicator import Carrier, Communicator
from fompi.engine.handshake import agree
from fompi.engine.tasks import DONE
from fompi.ops.arguments import Arguments, localise
from fompi.ops.keys import known_call
from fompi.ops.pending import Pending, Started, program_of
from fompi.plans.meaning import VARIANTS
from fompi.plans.tree import Canonical
from fompi.schedules.registry import as_slices
from fompi.tensors import dlpack

P = ParamSpec("P")


class Operation(Generic[P]):
    """A public operation, for example `fompi.all_gather`.

        y = operation(x, ...)              # waits for the result
        pending = operation.start(x, ...)  # returns a Pending at once
        step = operation.bind(x, ...)      # agrees once; then y = step() often
        plan = fompi.plan(operation, ...)  # the Plan of a call, without MPI and data

    All ranks of the communicator must call it.
    """

    def __init__(self, arguments: Callable[P, Arguments]):
        functools.update_wrapper(self, arguments)
        self.name = arguments.__name__
        self._arguments = arguments
        self.__signature__ = _signature(arguments)
        self._keywords = self.__signature__.parameters.keys()

    def __call__(self, *args: P.args, **options: P.kwargs) -> Any:
        if "torch._dynamo" in sys.modules and is_compiling():
            DOORS.prepare()
            return DOORS.traced(self, args, options)
        call, comm = known_call(self.name, args, options), options.get("comm")
        if call is not None and (comm is None or type(comm) is Communicator):
            known = Communicator.of(None) if comm is None else comm
            known.check()
            ticket = known.tickets.get(call.key)
            if ticket is not None:
                task, y = ticket.run(call, lambda: self.described(*self.read(args, {**options, "comm": known})))
                if task is not None:
                    return y if task is DONE else task.wait()
        elif type(comm) is Carrier:
            return self(*args, **self.with_carried(args, options))
        arguments, comm, call_options = self.read(args, options)
        arguments.known = call
        return self.run(arguments, comm, call_options)

    def described(self, arguments: Arguments, comm: Communicator, call_options: CallOptions = DEFAULTS) -> Pending:
        """A call that C has begun, with arguments that were right before. What its communicator owes comes later."""
        local = localise(self.name, arguments, comm.rank, comm.size, call_options)
        schedule, slices, *_ = call_options if call_options is DEFAULTS else _checked(call_options)
        return Pending(self.name, arguments, local, comm, schedule, slices)

    def run(self, arguments: Arguments, comm: Any, call_options: CallOptions) -> Any:
        """The result of a call, attached to autograd if a tensor requires grad."""
        if call_options.certify:
            return self._certified(arguments, comm, call_options)
        if self.is_differentiable(arguments):
            return DOORS.differentiable(self, arguments, comm, call_options)
        return self._finished(arguments, comm, call_options)

    def start(self, *args: P.args, **options: P.kwargs) -> Pending:
        """Start the operation and return at once. It progresses while the program does other work.

        The tensors must not be written before the Pending is done. Raises TensorError for a tensor that requires
        grad.
        """
        if "torch._dynamo" in sys.modules and is_compiling():
            DOORS.prepare()
            return type(self).start(self, *args, **options)  # now it is hidden from the compiler
        pending = self.begin(*self.read(args, options))
        pending.leave()
        return pending

    def bind(self, *args: P.args, **options: P.kwargs) -> Any:
        """Agree once on a call with these arguments, and call it often: `step = operation.bind(x, ...)`, `y = step()`.

            step = fompi.all_reduce.bind(x, op="mean", out=x, comm=comm)
            step()                     # x is the mean, whatever x contained
            step(x=other)              # x is the mean of another tensor of the same form

        Collective. Each call reads what the tensors contain then, and needs no agreement. A result lies in `out=`, or
        in memory that the next call writes again. Returns a BoundCall. Raises the errors of the operation on all ranks,
        TensorError for a tensor that requires grad or would be copied, and PlanError for what cannot be bound.
        """
        return DOORS.bind(self, *self.read(args, options))

    def read(self, args: tuple[Any, ...], options: Any) -> tuple[Arguments, Any, CallOptions]:
        """The Arguments of a call, its communicator and its CallOptions. The tensors are not checked yet.

        `options` is the dictionary of the keywords. Arguments that do not fit the signature are an error on all ranks.
        """
        if type(options.get("comm")) is Carrier:
            options = self.with_carried(args, options)
        comm, call_options = options.pop("comm", None), DEFAULTS
        if options and not OF_CALL.isdisjoint(options):
            how = {name: options.pop(name) for name in CallOptions._fields if name in options}
            if isinstance(order := how.get("order"), Canonical):
                how["order"] = str(order)
            call_options = CallOptions(**how)
        try:
            return self._own(args, options), comm, call_options
        except Exception as error:
            for given in args:
                if isinstance(given, Communicator):  # the other ranks meet there
                    self.refuse(error, given)
            self.refuse(error, comm)
            raise

    def with_carried(self, args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of a call on a communicator that carries some: with these, and without it."""
        carrier, x = options["comm"], args[0] if args else options.get("x")
        how = fitting(carrier.how, x, options.get("op", "sum"))
        taken = {name: value for name, value in how.items() if name in self._keywords}
        return {**taken, **options, "comm": carrier.plain}

    def _own(self, args: tuple[Any, ...], options: Any) -> Arguments:
        """The Arguments, without what every call takes. Raises ArgumentError for what does not fit the signature."""
        if any([isinstance(given, Communicator) for given in args]):
            raise ArgumentError(f"fompi.{self.name}: a communicator is given by its name: write comm=...")
        for name in options:
            if name not in self._keywords:
                hint = meant(name, self._keywords, "; did you mean {!r}?")
                if name in ("columns", "experts") and self.name in VARIANTS:
                    hint = f": call fompi.{VARIANTS[self.name][name == 'experts']}"
                raise ArgumentError(f"fompi.{self.name} has no argument {name!r}{hint}")
        try:
            return self._arguments(*args, **options)
        except TypeError as error:
            raise of_signature(f"fompi.{self.name}", error) from None

    def refuse(self, error: Exception, comm: Any) -> None:
        """Take part in the handshake of this call, so that the other ranks raise an error too. Raises `error`."""
        communicator, wrong = communicator_of(comm)
        agree(communicator, self.name, wrong or error)

    def begin(self, arguments: Arguments, comm: Any, call_options: CallOptions) -> Started:
        """Start a call that records no gradient. Its tensors must not require grad."""
        refusal = None
        if _wants_gradient(arguments):
            refusal = TensorError(
                f"fompi.{self.name}.start has no gradient: call fompi.{self.name}(...) if a tensor requires grad, "
                "or pass x.detach()"
            )
        started: Started = self._begin(arguments, comm, call_options, refusal, Started)
        return started

    def _begin(
        self,
        arguments: Arguments,
        comm: Any,
        call_options: CallOptions,
        refusal: Exception | None = None,
        kind: type[Pending] = Pending,
        waits: bool = False,
    ) -> Any:
        """A `kind` of the call, or its result if this `waits` for it."""
        wrong = None
        if type(comm) is Communicator:
            comm.check()
            communicator = comm
        else:
            communicator, wrong = communicator_of(comm)
        schedule, slices, effort = call_options[:3]
        try:
            if call_options.certify:
                why = "is for a call that waits, and for bind: not for start"
                raise PlanError(f"fompi.{self.name}: certify=True {why}")
            if wrong is not None or refusal is not None:
                raise wrong or refusal  # type: ignore[misc]
            local = localise(self.name, arguments, communicator.rank, communicator.size, call_options)
            if call_options is not DEFAULTS:
                slices = _checked(call_options).slices
            if local.device is not None:  # its streams are made before the call begins here
                backend_of(local.device), communicator.paths(local.device)
            if (schedule, slices) != ("auto", None):  # "auto" uses direct if no other schedule can have such slices
                program_of(communicator, local, "direct" if schedule == "auto" else schedule, slices)
        except Exception as error:  # this rank still takes part in the handshake, so that the other ranks do not wait
            agree(communicator, self.name, error)
            raise
        nothing_to_choose = (schedule, slices) != ("auto", None) or communicator.size == 1
        if effort == "measure" and not nothing_to_choose:
            schedule, slices = DOORS.measure(self, arguments, local, communicator)
        pending = kind(self.name, arguments, local, communicator, schedule, slices).begin(waits)
        return pending.at_once() if waits else pending

    def _finished(self, arguments: Arguments, comm: Any, call_options: CallOptions) -> Any:
        """The result of the call."""
        return self._begin(arguments, comm, call_options, waits=True)

    def _certified(self, arguments: Arguments, comm: Any, call_options: CallOptions) -> tuple[Any, float]:
        """The result of the call, and the largest error that its messages can have caused."""
        with DOORS.bind(self, arguments, comm, call_options) as step:
            y = step()
            if arguments.out is None:  # its memory is given back
                tensor = dlpack.borrow(y)
                device, array = tensor.device, tensor.array
                copied = array.copy() if device is None else device.array(array.get())
                y = dlpack.lend(copied, tensor.dtype, tensor)
            return y, step.error

    def is_differentiable(self, arguments: Arguments) -> bool:
        """True if this call must be a node of autograd."""
        return _wants_gradient(arguments)

    def __repr__(self) -> str:
        return f"fompi.{self.name}"


def _checked(call_options: CallOptions) -> CallOptions:
    """The options with `slices` as integers. Raises PlanError for options that no call can have."""
    schedule, slices, effort = call_options[:3]
    if not isinstance(schedule, str):
        raise PlanError(f"schedule={schedule!r} must be a name, for example 'auto' or 'ring'")
    if effort not in ("plan", "measure"):
        raise PlanError(f"effort={effort!r}{meant(effort, ('plan', 'measure'))}: effort must be 'plan' or 'measure'")
    if slices is not None:
        call_options = call_options._replace(slices=as_slices(slices))
    if effort == "measure" and (schedule, slices) != ("auto", None):
        raise PlanError('effort="measure" chooses schedule and slices itself: leave both out, or leave out effort')
    return call_options


def _signature(arguments: Callable[..., Arguments]) -> Signature:
    """The signature of the operation: its own parameters, and those of CallKeywords."""
    own = signature(arguments)
    common = {"comm": None, **CallOptions._field_defaults}
    types = {name: hint.__forward_arg__ for name, hint in CallKeywords.__annotations__.items()}
    parameters = [
        *(parameter for parameter in own.parameters.values() if parameter.kind != Parameter.VAR_KEYWORD),
        *(Parameter(name, Parameter.KEYWORD_ONLY, default=common[name], annotation=types[name]) for name in common),
    ]
    return Signature(parameters, return_annotation=Any)


def communicator_of(comm: Any) -> tuple[Communicator, Exception | None]:
    """The Communicator of `comm=`. If it is none: that of all ranks, on which all of them get the error."""
    try:
        return Communicator.of(comm), None
    except (LaunchError, LayoutError) as error:
        if comm is None:
            raise
        return Communicator.of(None), error


def is_compiling() -> Any:
    """True where torch.compile reads this code. Where Python runs it, False."""
    return sys.modules["torch"].compiler.is_compiling()


def _wants_gradient(arguments: Arguments) -> bool:
    return "torch" in sys.modules and any(map(dlpack.requires_grad, arguments.tensors))
