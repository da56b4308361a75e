"""A strategy is a function with a forward that keeps what its backward needs.

    y = f(x, w, comm=tp)                      # torch tensors that require grad join the graph of autograd
    y, saved = f.forward(x, w, comm=tp)       # without a framework
    dx, dw = f.backward(saved, dy)

The adapter of a framework that makes an operation differentiable takes a call of a strategy, too (`StrategyCall`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter
from itertools import count, zip_longest
from typing import Any

from fompi.base.call_options import OF_COMMUNICATOR, dtype_of
from fompi.base.doors import DOORS
from fompi.base.errors import ArgumentError, FompiError, PlanError, StateError
from fompi.base.nested import flatten
from fompi.base.wires import wire_of
from fompi.engine.communicator import Carrier, Communicator
from fompi.ops.operation import communicator_of, is_compiling
from fompi.parallel import section
from fompi.parallel.arrays import enter, follow, unrounded
from fompi.parallel.section import in_section
from fompi.tensors import dlpack

Gradients = tuple[Any, ...]

COMMS = ("comm", "ring", "ulysses")
"""The parameters of strategies that are communicators."""


class Differentiable:
    """y, saved = f.forward(...); gradients = f.backward(saved, dy); y = f(...)

    `tensors` are the names of the arguments that have gradients, in the order of the gradients. The first `inputs` of
    them are inputs, the others are weights. An argument may be None, or a tuple of tensors; its gradient has the same
    form. Integer tensors, such as tokens, have no gradient.

        dxs, rest = f.backward_input(saved, dy)      # the gradients of the inputs; a pipeline waits for these
        dws = f.backward_weight(rest)                # the gradients of the weights, when there is time for them

    Both together give what `backward` gives. All ranks must call them in the same order. `saved` may be used several
    times. It holds the tensors themselves, and `rest` holds dy: do not change these before they are used. y may be
    changed.

    A call may also have the keywords that a communicator carries (`Communicator.using`), such as `order="ranks"`: what
    it sends has them, forward and backward. `takes`: which of "wire" and "order" it takes. A carried wire that it does
    not take is left out, an order is refused: its sums would not have it.
    """

    def __init__(
        self,
        forward: Callable[..., tuple[Any, Any]],
        backward: Callable[[Any, Any], Gradients],
        *,
        tensors: Sequence[str],
        inputs: int,
        takes: Sequence[str] = ("wire",),
        backward_input: Callable[[Any, Any], tuple[Gradients, Any]] | None = None,
        backward_weight: Callable[[Any], Gradients] | None = None,
        name: str = "",
    ):
        functools.update_wrapper(self, forward)
        self.__name__ = self.__qualname__ = name = name or forward.__name__.strip("_")
        behind = f"the backward of {name}"
        self.tensors, self.inputs = tuple(tensors), inputs
        self._left_out = [name for name in ("wire", "order") if name not in takes]
        self._own = inspect.signature(forward)
        self._comms = [name for name in COMMS if name in self._own.parameters]
        self.forward, self.backward = in_section(name)(self._carried(forward)), in_section(behind)(backward)
        self._backward_input = backward_input and in_section(behind)(backward_input)
        self._backward_weight = backward_weight and in_section(behind)(_begun(backward_weight))
        known = self._own.parameters
        more = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in OF_COMMUNICATOR if name not in known]
        self.__signature__ = self._own.replace(parameters=[*known.values(), *more], return_annotation=Any)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if "torch._dynamo" in sys.modules and is_compiling():
            DOORS.prepare()
            return DOORS.traced(self, args, options)
        given = self.read(args, options)
        leaves = [t for t in flatten([given[name] for name in self.tensors]) if t is not None]
        if "torch" in sys.modules and any(map(dlpack.requires_grad, leaves)):
            return DOORS.strategy_of_torch(StrategyCall(self, given), leaves)
        if any(map(dlpack.is_tracer, leaves)):
            return DOORS.strategy_of_jax(self, given)
        return self.forward(**given)[0]

    def watched(self, note: Callable[[Any], None]) -> Differentiable:
        """This function, which calls `note(saved)` after each forward: a framework keeps `saved` to itself."""

        def forward(*args: Any, **options: Any) -> tuple[Any, Any]:
            y, saved = self.forward(*args, **options)
            note(saved)
            return y, saved

        watched = copy.copy(self)
        watched.forward = forward
        return watched

    def read(self, args: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, with the defaults."""
        how = {name: options.pop(name) for name in OF_COMMUNICATOR if name in options}
        try:
            bound = self._own.bind(*args, **options)
        except TypeError as error:
            raise ArgumentError(f"{self.__name__}: {error}") from None
        bound.apply_defaults()
        return {**bound.arguments, **how}

    def _carried(self, forward: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
        """The forward with the keywords of calls, too: its communicators carry them from then on."""

        @functools.wraps(forward)
        def run(*args: Any, **options: Any) -> tuple[Any, Any]:
            how = {name: options.pop(name) for name in OF_COMMUNICATOR if name in options}
            for name in self._comms:
                comm = options.get(name)
                if how or (type(comm) is Carrier and self._left_out):
                    x = self._own.bind_partial(*args, **options).arguments.get(self.tensors[0])
                    options[name] = self._carrier(comm, how, x)
            return forward(*args, **options)

        return run

    def _carrier(self, comm: Any, how: Mapping[str, Any], x: Any) -> Communicator:
        """The communicator that carries these keywords, and what it carried. All ranks raise the error of one."""

        def check(comm: Communicator) -> tuple[str, int, Any]:
            wire_of(how.get("wire"), dtype_of(x))
            carrier = comm.using(**how)
            for name in self._left_out:
                if name in carrier.how and (name == "order" or name in how):
                    what = f"{name}={carrier.how.get(name)}"
                    raise PlanError(
                        f"{self.__name__} has no {what}: leave it out, or give it a communicator without it"
                    )
            return "", 0, unrounded(carrier) if "wire" in self._left_out else carrier

        group, refusal = communicator_of(comm)
        try:
            if refusal is not None:
                raise refusal
            carrier: Communicator = check(group)[2]
        except FompiError:
            carrier = enter(self.__name__, comm, check)[0]  # it raises the error
        return carrier

    def backward_input(self, saved: Any, dy: Any) -> tuple[Gradients, Any]:
        """(the gradients of the inputs, what `backward_weight` needs)."""
        if self._backward_input is not None:
            return self._backward_input(saved, dy)
        gradients = self.backward(saved, dy)
        return gradients[: self.inputs], gradients[self.inputs :]

    def backward_weight(self, rest: Any) -> Gradients:
        """The gradients of the weights."""
        gradients: Gradients = rest if self._backward_weight is None else self._backward_weight(rest)
        return gradients

    def __repr__(self) -> str:
        return f"<{self.__module__}.{self.__name__}>"


class StrategyCall:
    """A call of a strategy as the adapters see it (`fompi.ops.adjoints.WithBackward`). It keeps what the forward saves.

    `given` are its arguments by name. `forward` takes the tensors of those in `f.tensors` and in `more`, one behind the
    other. Those in `more` have no gradient.
    """

    keeps, twice = True, False

    def __init__(self, f: Differentiable, given: Mapping[str, Any], more: Sequence[str] = ()):
        self.f, self._names = f, (*f.tensors, *more)
        self._forms = [form_of(given[name]) for name in self._names]
        self._others = {name: value for name, value in given.items() if name not in self._names}
        self._saved: Any = None

    def forward(self, tensors: Sequence[Any]) -> Any:
        rest = iter(tensors)
        nested = {name: filled(form, rest) for name, form in zip(self._names, self._forms, strict=True)}
        y, self._saved = self.f.forward(**self._others, **nested)
        return y

    def backward(self, tensors: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
        """All gradients, on all ranks alike."""
        gradients = flatten(self.f.backward(self._saved, grads[0] if len(grads) == 1 else tuple(grads)))
        both = zip_longest(gradients, flatten(self._forms))  # those of `more` are None
        return [gradient for gradient, is_there in both if is_there]


Form = bool | tuple[bool, ...]
"""Of an argument that is a tensor, several tensors or None: is there a tensor?"""


def form_of(argument: Any) -> Form:
    if isinstance(argument, (tuple, list)):
        return tuple([t is not None for t in argument])
    return argument is not None


def filled(form: Form, tensors: Iterator[Any]) -> Any:
    """An argument of this form."""
    if isinstance(form, tuple):
        return tuple([next(tensors) if is_there else None for is_there in form])
    return next(tensors) if form else None


MOST_KEPT = 256


class Forwards:
    """What the forwards of one call in compiled code have kept for their backwards, by number.

    At most MOST_KEPT may wait. Of more than that the oldest are forgotten.
    """

    def __init__(self, name: str):
        self.name, self.kept, self._numbers = name, dict[int, Any](), count()

    def put(self, saved: Any) -> int:
        """The number of a forward."""
        number = next(self._numbers)
        self.kept[number] = saved
        self.forget(number - MOST_KEPT)
        return number

    def take(self, number: int) -> Any:
        """What a forward has kept. Raises StateError if it is forgotten."""
        if number not in self.kept:
            raise StateError(
                f"the backward of {self.name}: its forward is forgotten. In compiled code at most {MOST_KEPT} forwards "
                f"of a call wait for their backward, which runs once under torch.compile"
            )
        return self.kept[number]

    def forget(self, number: int) -> None:
        self.kept.pop(number, None)


def _begun(backward_weight: Callable[[Any], Gradients]) -> Callable[[Any], Gradients]:
    """It begins with no agreement: all ranks call it after the same calls. `rest` of a strategy has `saved` first."""

    def run(rest: Any) -> Gradients:
        saved = rest[0] if isinstance(rest, tuple) and rest else None
        if isinstance(comm := getattr(saved, "comm", None), Communicator):
            section.begin(comm)
        follow(rest)
        return backward_weight(rest)

    return run
