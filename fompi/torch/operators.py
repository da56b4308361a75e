"""Calls as operators of torch: `torch.ops.fompi.all_gather_matmul(key, [x, w], sizes, keeps)` -> its results.

torch.compile reads none of fompi's code, but it knows these operators: the shapes and strides of their results, and
their backward. So a call is a node of its graph, not the end of it. `fompi.<operation>` and the strategies use them by
themselves where torch.compile reads the call, `fompi.torch.<operation>` always.

| argument | meaning                                                                                             |
|----------|-----------------------------------------------------------------------------------------------------|
| key      | the call as far as it does not depend on sizes: its options, and which tensors there are (`KeyedCall`) |
| tensors  | its tensors, one behind the other                                                                   |
| sizes    | the numbers of `counts=`, `columns=` and `arriving=`, one behind the other; None: no number         |
| keeps    | there will be a backward                                                                            |

The backward of an operation is its adjoint (`fompi.ops.adjoints`): operators again. That of a strategy, and of rows
that go to experts, is one operator, `torch.ops.fompi.backward`. There the forward keeps what it needs, under a number,
which is one result more.

The compiler must know the shape of a result before the ranks meet (`fompi.torch.shapes`). So the ranks compare
`arriving` with what they send. If it is something else, a rank that sees it raises a ShapeError, and the other ranks an
error too.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from operator import index
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
import torch._dynamo  # the first call of an operator would load it, for seconds, while other ranks wait
from torch.distributed.device_mesh import DeviceMesh

from fompi.base.call_options import CallOptions, fitting, in_words
from fompi.base.doors import DOORS
from fompi.base.errors import LayoutError, ShapeError, StateError, TensorError
from fompi.base.layout import Extents
from fompi.base.nested import flatten
from fompi.engine.communicator import Communicator
from fompi.ops.adjoints import CONVENTIONS, DIFFERENTIABLE, Call, WithBackward, applied, check_convention
from fompi.ops.arguments import SUMS, Arguments
from fompi.ops.operation import Operation
from fompi.parallel import expert, sequence, tensor
from fompi.parallel.differentiable import COMMS, Differentiable, Form, Forwards, StrategyCall, filled, form_of
from fompi.parallel.section import Section
from fompi.plans.meaning import MEANING
from fompi.plans.tree import Canonical
from fompi.torch import private
from fompi.torch.autograd import attached, conjugate
from fompi.torch.groups import communicator
from fompi.torch.shapes import RESULTS, OperatorCall, expect, moves, results_of, rows_of

# ------------------------------------------------------------------------------------------------------ communicators

_NUMBERS = itertools.count()
_NAMES: WeakKeyDictionary[Communicator, str] = WeakKeyDictionary()
_NAMED: WeakValueDictionary[str, Communicator] = WeakValueDictionary()


@private.run_by_the_compiler
def name_of(comm: Any) -> str:
    """The name of a communicator in a key. All that `communicator` takes has one."""
    if comm is None or isinstance(comm, str):
        return comm or ""
    comm = comm if isinstance(comm, Communicator) else communicator(comm)
    if comm not in _NAMES:  # rank and size: a program of the compiler's cache fits no other rank
        where = f"rank {comm.rank} of {comm.size}{in_words(comm.how)}"
        name = f"fompi {comm.name} {next(_NUMBERS)}, {where}"
        _NAMES[comm], _NAMED[name] = name, comm
    return _NAMES[comm]


def named(name: str) -> Communicator:
    """The communicator with this name."""
    known = _NAMED.get(name)
    if known is None and name.startswith("fompi "):
        raise StateError(f"the communicator {name!r} does not exist any more: keep it as long as compiled code uses it")
    return communicator(name or None) if known is None else known


# ----------------------------------------------------------------------------------------------------------- functions

STRATEGIES: dict[str, Differentiable] = {
    f.__name__: f
    for f in (
        *(tensor.column_parallel_linear, tensor.row_parallel_linear, tensor.attention, tensor.all_reduce_rmsnorm),
        *(tensor.vocab_parallel_embedding, tensor.vocab_parallel_cross_entropy, expert.moe),
        *(sequence.ring_attention, sequence.ulysses_attention, sequence.usp_attention),
    )
}
FUNCTIONS: dict[str, Any] = {**DIFFERENTIABLE, **STRATEGIES}
"""What is an operator, by name: the operations that have a gradient, and strategies."""

GROUPED = [name for name, meaning in MEANING.items() if meaning.grouped]
"""The operations whose rows go to experts."""

KEPT = [*STRATEGIES, *GROUPED]
"""The functions whose backward is one operator, because it needs more than the compiler knows."""

OF_OPERATIONS = ("x", "d", "w", "ws", "bias", "biases", "h")
"""The parameters of operations that are tensors, in the order of `Arguments.tensors`."""

UNTAUGHT = ("tokens", "targets")
"""The parameters of strategies that are tensors without a gradient."""

PARAMETERS = {name: [*f.__signature__.parameters] for name, f in FUNCTIONS.items()}
POSITIONAL = {
    name: [p.name for p in f.__signature__.parameters.values() if p.kind != Parameter.KEYWORD_ONLY]
    for name, f in FUNCTIONS.items()
}
REQUIRED = {
    name: [p.name for p in f.__signature__.parameters.values() if p.default is Parameter.empty]
    for name, f in FUNCTIONS.items()
}
TENSORS = {
    name: [p for p in PARAMETERS[name] if p in (getattr(f, "tensors", OF_OPERATIONS)) or p in UNTAUGHT]
    for name, f in FUNCTIONS.items()
}
SIZES = ("counts", "columns", "arriving")
INTEGERS = ("dim", "split_dim", "concat_dim", "root", "dest", "source", "tag")
NEEDED = ("dim", "root", "tag")
"""The parameters of operations that are integers, and those of them that cannot be None."""

EXCHANGES = [name for name in DIFFERENTIABLE if moves(name) == "all_to_all" and "root" not in PARAMETERS[name]]
"""The operations of which only the other ranks know how many rows arrive, with counts=."""

OF_LAYER = "of parallel layer"
"""So begin the words of a call that `fompi.torch.parallel` makes."""


class KeyedCall(NamedTuple):
    """A call without its tensors and sizes."""

    name: str
    forms: tuple[Form, ...]
    """Of each parameter in TENSORS."""

    lengths: tuple[tuple[str, Any], ...]
    """The parameters of SIZES that are there, and how many numbers each has: for each run where rows go to experts."""

    options: dict[str, Any]
    forwards: Forwards
    """What forwards have kept. A backward runs once: compiled code allows no more."""

    def given(self, tensors: Sequence[Any], sizes: Sequence[Any] | None) -> dict[str, Any]:
        """The arguments of the call by name."""
        rest, numbers, given = iter(tensors), iter(sizes or ()), dict(self.options)
        for name, form in zip(TENSORS[self.name], self.forms, strict=True):
            given[name] = filled(form, rest)
        for name, length in self.lengths:
            if isinstance(length, tuple):
                given[name] = [list(itertools.islice(numbers, n)) for n in length]
            else:
                given[name] = list(itertools.islice(numbers, length))
        for name in COMMS:
            if name in given:
                given[name] = named(given[name])
        return given

    def has_gradient(self) -> list[bool]:
        """Of each tensor: whether the backward gives its gradient."""
        forms = zip(TENSORS[self.name], self.forms, strict=True)
        return [name not in UNTAUGHT for name, form in forms for is_there in flatten(form) if is_there]


CALLS: dict[str, KeyedCall] = {}


@private.run_by_the_compiler
def key_of(name: str, forms: tuple[Any, ...], lengths: tuple[Any, ...], names: tuple[str, ...], *values: Any) -> str:
    """The key of a call with these options."""
    options = dict(zip(names, values, strict=True))
    key = f"{name}({options}), tensors {forms}, sizes {lengths}"
    if key not in CALLS:
        CALLS[key] = KeyedCall(name, forms, lengths, options, Forwards(name))
    return key


# ------------------------------------------------------------------------------------------------- what operators run

RAN: Counter[str] = Counter()
"""How often the operator of an operation ran in this process, also in a backward and in compiled code."""


def _given(key: str, tensors: Sequence[Any], sizes: Sequence[Any] | None) -> OperatorCall:
    """A call of an operation."""
    options, operation = CALLS[key].given(tensors, sizes), DIFFERENTIABLE[CALLS[key].name]
    how = {name: options.pop(name) for name in CallOptions._fields if name in options}
    comm, gradient, words = (options.pop(name) for name in ("comm", "gradient", "words"))
    arriving, arguments = options.pop("arriving", None), operation._arguments(**options)
    arguments.words, leaves = words, None
    if isinstance(arguments.x, tuple):
        leaves, arguments.x = arguments.x, arguments.x[0]
    return OperatorCall(operation, arguments, comm, CallOptions(**how), gradient, arriving, leaves)


def _run(key: str, tensors: Sequence[Any], sizes: Sequence[Any] | None, keeps: bool) -> list[torch.Tensor]:
    """The operation itself."""
    given = _given(key, tensors, sizes)
    operation, a, comm = given.operation, given.arguments, given.comm
    wrong, a.x = expect(given), given.leaves or a.x
    if wrong is not None:
        operation.refuse(wrong, comm)
    with torch.no_grad():
        try:
            result = operation.run(a, comm, given.call_options)
            RAN[operation.name] += 1
        except ShapeError as error:
            if any(words in str(error) for words in (" rows are gathered", " rows arrive here")):
                error.args = (f"{error}. {_remedy(operation, a)}", *error.args[1:])
            raise
    if a.peers is not None and result.shape != a.x.shape:
        raise ShapeError(
            f"fompi.sendrecv: rank {a.peers.source} has sent the shape {tuple(result.shape)}, but x has "
            f"{tuple(a.x.shape)}. {_remedy(operation, a)}"
        )
    return flatten(result)


def _remedy(operation: Operation[Any], a: Arguments) -> str:
    if OF_LAYER in a.words:
        return (
            "A plain tensor must have as many rows on every rank, as in torch: pass a DTensor, which knows the "
            "rows of each rank (torch.distributed.tensor.distribute_tensor), or pad the rows"
        )
    known = f", or fompi.torch.{operation.name}(..., arriving=[the rows from each rank])" if a.peers is None else ""
    return (
        "In compiled code and in fompi.torch, x must have the same shape on all ranks. Else call "
        f"fompi.{operation.name} outside of compiled code (torch.compiler.disable){known}"
    )


def _fake(key: str, tensors: Sequence[Any], sizes: Sequence[Any] | None, keeps: bool) -> list[torch.Tensor]:
    return results_of(_given(key, tensors, sizes))


def _keep(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    """Keep what the adjoint needs."""
    given = _given(*inputs[:3])
    tensors, words, known = given.arguments.tensors, given.arguments.words, rows_of(given).extents
    apply, share = functools.partial(_applied, known, words), _shared if given.gradient == "replicated" else None
    ctx.call = Call(given.operation, given.arguments, given.comm, given.call_options, apply, share=share)
    ctx.call._extents = known
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(tensors if ctx.call.keeps else ()))


def _adjoint(ctx: Any, grads: Sequence[Any]) -> Any:
    """The gradients of the tensors of an operation."""
    needs = ctx.needs_input_grad[1]
    tensors = ctx.saved_tensors or [None] * len(needs)
    gradients = ctx.call.backward(tensors, [conjugate(g) for g in grads], needs)
    return None, [conjugate(g) for g in gradients], None, None


def _applied(
    forward: Extents,
    forward_words: str,
    operation: Operation[Any],
    tensors: Sequence[Any],
    options: dict[str, Any],
    comm: Communicator,
    call_options: CallOptions,
    words: str = "",
) -> Any:
    """The result of an operation of the backward. The rows that arrive are those that the forward has sent.

    It belongs to a variable of each rank, also if the loss of the forward is replicated: "sum" is its convention. Its
    words are those of the forward too: so the backward of one layer never meets that of another one.
    """
    arriving: Any = None
    if moves(operation.name) == "all_gather":
        arriving = forward.rows
    elif options.get("split_dim") is not None:
        arriving = forward.send
    elif moves(operation.name) == "all_to_all":
        arriving = forward.recv if options.get("counts") is forward.send else forward.send
    how = call_options._asdict() if operation.name in MEANING else {"wire": call_options.wire}
    given = {**dict(zip(POSITIONAL[operation.name], tensors, strict=False)), **options, **how, "comm": comm}
    result, reason = of_call(operation, (), given, "sum", arriving or None, joined(words, forward_words))
    return applied(operation, tensors, options, comm, call_options, words) if reason else result


def _shared(call: Call, dy: torch.Tensor) -> torch.Tensor:
    """dy, whose gradient is the sum of all ranks (`Call.share`)."""
    return attached(_Shared(call.comm), [dy]) if torch.is_grad_enabled() else dy


class _Shared:
    """The identity, whose backward is the sum of all ranks, as a call (`WithBackward`)."""

    keeps, twice = False, True

    def __init__(self, comm: Communicator):
        self.comm = comm

    def forward(self, tensors: Sequence[torch.Tensor]) -> Any:
        return tensors[0].view_as(tensors[0])

    def backward(self, tensors: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool]) -> list[Any]:
        return [PUBLIC["all_reduce"](grads[0], comm=self.comm, gradient="replicated")]


# -------------------------------------------------------------------------------------- a backward that is an operator


def _call_of(name: str, given: dict[str, Any]) -> tuple[WithBackward, list[Any]]:
    """The call of a strategy, or of an operation whose rows go to experts, and its tensors."""
    if name in STRATEGIES:
        f = STRATEGIES[name]
        return StrategyCall(f, given), [t for t in flatten([given[name] for name in f.tensors]) if t is not None]
    arguments, comm, how = DIFFERENTIABLE[name].read((), dict(given))
    return Call(DIFFERENTIABLE[name], arguments, comm, how, applied), arguments.tensors


def _forward(key: str, tensors: Sequence[Any], sizes: Sequence[int] | None, keeps: bool) -> list[torch.Tensor]:
    name, given = CALLS[key].name, CALLS[key].given([t.detach() for t in tensors], sizes)
    with Section(name), torch.no_grad():
        call, own = _call_of(name, given)
        results = [_rows_first(t, given) for t in flatten(call.forward(own))]
        wanted = [tuple(t.shape) for t in (results if name in GROUPED else RESULTS[name](given))]
        if [tuple(t.shape) for t in results] != wanted:
            raise ShapeError(
                f"{name} in compiled code: the result has the shape {tuple(results[0].shape)}, but the program was "
                f"compiled for {wanted[0]}: x must have as many rows on all ranks, or be padded"
            )
    return [*results, torch.tensor(CALLS[key].forwards.put((call, own)))] if keeps else results


def _rows_first(y: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """y, whose rows lie in memory one after the other, as RESULTS has it."""
    dim = given.get("dim", 0)
    return y.movedim(dim, 0).contiguous().movedim(0, dim)


def _fake_forward(key: str, tensors: Sequence[Any], sizes: Sequence[Any] | None, keeps: bool) -> list[torch.Tensor]:
    results = RESULTS[CALLS[key].name](CALLS[key].given(tensors, sizes))
    return [*results, torch.empty((), dtype=torch.int64)] if keeps else results


def _backward(
    key: str, number: torch.Tensor, dys: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The gradients of those of the tensors that have one."""
    call, own = CALLS[key].forwards.take(int(number))
    CALLS[key].forwards.forget(int(number))
    with torch.no_grad():
        gradients = call.backward(own, dys, [True] * len(own))
    return [g.contiguous() for g in gradients if g is not None]


def _fake_backward(
    key: str, number: torch.Tensor, dys: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    return [t.new_empty(t.shape) for t, has in zip(tensors, CALLS[key].has_gradient(), strict=True) if has]


def _keep_number(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.key, tensors = inputs[:2]
    *ys, number = output
    ctx.shapes = [y.shape for y in ys]
    ctx.save_for_backward(number, *tensors)


def _by_number(ctx: Any, grads: Sequence[Any]) -> Any:
    number, *tensors = ctx.saved_tensors
    given = zip(grads, ctx.shapes, strict=False)
    dys = [tensors[0].new_zeros(shape) if dy is None else dy.contiguous() for dy, shape in given]
    gradients = iter(torch.ops.fompi.backward(ctx.key, number, dys, tensors))
    return None, [next(gradients) if has else None for has in CALLS[ctx.key].has_gradient()], None, None


# ----------------------------------------------------------------------------------------------------------- operators


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """`torch.ops.fompi.<name>`, whose results have the shapes of those of `fake`."""
    made = torch.library.custom_op(f"fompi::{name}", run, mutates_args=(), schema=schema)
    made.register_fake(fake)
    private.keep_in_order(made)
    return made


_SCHEMA = "(str key, Tensor[] tensors, SymInt[]? sizes, bool keeps) -> Tensor[]"
for _name in FUNCTIONS:
    if _name in KEPT:
        define(_name, _SCHEMA, _forward, _fake_forward).register_autograd(_by_number, setup_context=_keep_number)
    else:
        define(_name, _SCHEMA, _run, _fake).register_autograd(_adjoint, setup_context=_keep)
define("backward", "(str key, Tensor number, Tensor[] dys, Tensor[] tensors) -> Tensor[]", _backward, _fake_backward)

NODES = {name: getattr(torch.ops.fompi, name).default for name in FUNCTIONS}
SEVERAL = ["all_reduce_rmsnorm"] + [
    name
    for name, meaning in MEANING.items()
    if name.endswith("_many") or meaning.keeps + (meaning.weight is not None) + (meaning.operand is not None) > 1
]
"""The functions that return several tensors."""


# ------------------------------------------------------------------------------------------- what the compiler reads


def joined(*words: str) -> str:
    """The words that are not empty."""
    return " ".join(filter(None, words))


def wanted(given: Mapping[str, Any], gradient: str) -> str:
    """In words, whose gradients a call with these tensors wants, and by which convention."""
    names: list[str] = []
    if torch.is_grad_enabled():
        for name in OF_OPERATIONS:
            each = given.get(name)
            if isinstance(each, (list, tuple)):
                names += [f"{name}[{i}]" for i, t in enumerate(each) if t is not None and t.requires_grad]
            elif each is not None and each.requires_grad:
                names.append(name)
    return f"for the gradient of {' and '.join(names)} ({gradient})" if names else ""


def of_call(
    f: Any,
    args: Sequence[Any],
    options: Mapping[str, Any],
    gradient: str | None = None,
    arriving: Any = None,
    words: str = "",
) -> Any:
    """(the result of the operator of a call, None), or (None, why there is none: see `fompi.torch.compile.OUTSIDE`).

    `gradient`: as for `fompi.torch.<operation>`. None: the call is one of `fompi.<operation>`, or of a strategy.
    """
    name, given = f.__name__, dict(options)
    if arriving is not None:
        given["arriving"] = arriving
    reason = _bind(f, args, given, gradient)
    if reason is None:
        reason = _carry(name, given, gradient)
    if reason is None:
        reason = _look_at_tensors(name, given)
    if reason is None and name not in KEPT:
        reason = _look_at_values(name, given)
    if reason is not None:
        return None, reason
    if name not in KEPT:
        given["gradient"] = "sum" if gradient is None else gradient
        given["words"] = joined(words, wanted(given, given["gradient"]))
    return node(name, given), None


def node(name: str, given: dict[str, Any]) -> Any:
    """The result of the operator for these arguments by name, of which communicators are names."""
    forms: list[Any] = []
    tensors: list[Any] = []
    for key in TENSORS[name]:
        value = given.pop(key, None)
        forms.append(form_of(value))
        tensors += [t for t in (value if isinstance(value, (tuple, list)) else [value]) if t is not None]
    lengths: list[Any] = []
    sizes: list[Any] = []
    for key in SIZES:
        value = given.pop(key, None)
        if value is not None and name in GROUPED:
            lengths.append((key, tuple([len(run) for run in value])))
            sizes += [n for run in value for n in run]
        elif value is not None:
            lengths.append((key, len(value)))
            sizes += list(value)
    values = [index(v) if isinstance(v, int) and not isinstance(v, bool) else v for v in given.values()]  # no SymInt
    key = key_of(name, tuple(forms), tuple(lengths), tuple(given), *values)
    keeps = torch.is_grad_enabled() and any([t.requires_grad for t in tensors])
    ys = NODES[name](key, tensors, sizes or None, keeps)
    if name == "all_gather_matmul_many":
        return ys[0], tuple(ys[1:])
    if name in SEVERAL:
        return tuple(ys[:-1] if name in KEPT and keeps else ys)
    return ys[0]


def _bind(f: Any, args: Sequence[Any], given: dict[str, Any], gradient: str | None) -> str | None:
    """Make `given` all arguments of the call by name. Returns why it can be no operator."""
    name = f.__name__
    if name not in FUNCTIONS:
        return "unknown" if isinstance(f, Operation) else "route"
    if name in KEPT and (gradient == "replicated" or "arriving" in given):
        return "experts"
    if name in KEPT and not private.COMPILES_OBJECTS:
        return "old"
    if gradient not in (None, *CONVENTIONS) or len(args) > len(POSITIONAL[name]):
        return "wrong"
    given.update(zip(POSITIONAL[name], args, strict=False))
    if any([key not in given for key in REQUIRED[name]]) or any(
        [key not in PARAMETERS[name] and key != "arriving" for key in given]
    ):
        return "wrong"
    if given.pop("out", None) is not None:
        return "out"
    return "certify" if given.pop("certify", False) else None


@private.run_by_the_compiler
def carried_by(comm: Communicator, name: str, dtype: torch.dtype, op: str) -> tuple[tuple[str, Any], ...]:
    """The keywords of a call that its communicator carries, for tensors of this dtype."""
    how = comm.how and fitting(comm.how, torch.empty(0, dtype=dtype), op)
    return tuple((key, value) for key, value in how.items() if key in PARAMETERS[name])


def _carry(name: str, given: dict[str, Any], gradient: str | None) -> str | None:
    """Put names in the place of communicators, and what they carry to the options. Returns why that cannot be."""
    comm, x = given.get("comm"), given.get("x")
    if name in DIFFERENTIABLE:
        if gradient is not None and isinstance(comm, DeviceMesh):
            if comm.ndim != 1:
                return "wrong"
            comm = comm.get_group()
        if gradient is not None and isinstance(comm, torch.distributed.ProcessGroup):
            comm = comm.group_name
        if isinstance(comm, Communicator):
            if not private.COMPILES_OBJECTS and torch.compiler.is_compiling():
                return "old"
            x = x[0] if isinstance(x, (list, tuple)) and len(x) > 0 else x
            if isinstance(x, torch.Tensor):
                for key, value in carried_by(comm, name, x.dtype, given.get("op", "sum")):
                    given.setdefault(key, value)
        elif comm is not None and (gradient is None or not isinstance(comm, str)):
            return "comm"
        given["comm"] = comm
    for key in COMMS:
        if key in PARAMETERS[name]:
            given[key] = name_of(given.get(key))
    order = given.get("order", "any")
    if isinstance(order, Canonical):
        given["order"] = order = order.name  # a key has no objects
    return None if isinstance(order, str) else "wrong"


def _look_at_tensors(name: str, given: dict[str, Any]) -> str | None:
    """Why the tensors are none of an operator."""
    for key, value in given.items():
        if key not in TENSORS[name]:
            if isinstance(value, torch.Tensor):
                return "value"
            continue
        several = isinstance(value, (list, tuple))
        if several and name in DIFFERENTIABLE and key not in ("ws", "biases") and (key, name in SUMS) != ("x", True):
            return "tensor"
        if any([t is not None and not isinstance(t, torch.Tensor) for t in (value if several else [value])]):
            return "tensor"
    return None


def _look_at_values(name: str, given: dict[str, Any]) -> str | None:
    """Why the other arguments of an operation are none of an operator. Shapes are computed from them."""
    for key in INTEGERS:
        value = given.get(key)
        if key in given and not isinstance(value, int) and (value is not None or key in NEEDED):
            return "wrong"
    if any([not isinstance(given.get(key) or [], (list, tuple)) for key in SIZES]):
        return "wrong"
    is_open = given.get("counts") is not None and "arriving" not in given and given.get("split_dim") is None
    if is_open and name in EXCHANGES and torch.compiler.is_compiling():
        return "counts"
    if len(given.get("biases") or []) > len(given.get("ws") or []):
        return "wrong"
    x = given.get("x")
    if isinstance(x, (list, tuple)):  # leaves
        is_right = len(x) > 0 and given.get("order", "any").startswith("canonical(")
        return None if is_right and not any([t.requires_grad for t in x]) else "wrong"
    return "wrong" if given.get("op") == "prod" and torch.is_grad_enabled() and given["x"].requires_grad else None


# --------------------------------------------------------------------------------------------------------- fompi.torch


def _public(operation: Operation[Any]) -> Callable[..., Any]:
    """`fompi.torch.<operation>`: the operation, with two arguments more."""
    name = f"fompi.torch.{operation.name}"

    @functools.wraps(operation)
    def call(*args: Any, gradient: str = "sum", arriving: Sequence[int] | None = None, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            DOORS.prepare()
            return DOORS.traced(operation, args, options, gradient, arriving)
        try:
            options["comm"] = communicator(options.get("comm"))
        except Exception as error:
            operation.refuse(error, None)
            raise
        arguments, comm, how = operation.read(args, dict(options))
        try:
            check_convention(name, gradient)
            if operation.name in GROUPED and arriving is not None:
                raise LayoutError(f"{name} takes no arriving= for rows that go to experts")
            rows = None if arriving is None else list(map(index, arriving))
        except Exception as error:
            operation.refuse(error, comm)
            raise
        if operation.name in GROUPED or how.certify:
            return operation.run(arguments, comm, how)  # no operator, but a node of autograd
        if "ws" in PARAMETERS[operation.name]:
            args, options = args[:1], {**options, "ws": arguments.weights, "biases": arguments.biases}
        result, reason = of_call(operation, list(map(_plain, args)), _plain(options), gradient, rows)
        if reason in REFUSED:
            operation.refuse(TensorError(f"{name}{REFUSED[reason]}"), comm)
        return result if reason is None else operation.run(arguments, comm, how)  # it refuses them

    return call


REFUSED = {"out": " takes no out=", "tensor": ": all tensors must be torch tensors"}
"""What `fompi.torch.<operation>` refuses, and the operation does not."""


def _plain(value: Any) -> Any:
    """The value with integers of Python and lists in the place of those of NumPy."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (np.ndarray, range)):
        return list(map(_plain, value))
    if isinstance(value, (list, tuple)) and not (value and isinstance(value[0], torch.Tensor)):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, np.integer) else value


def replicated_matmul(x: torch.Tensor, w: torch.Tensor, *, bias: Any = None, comm: Any = None) -> torch.Tensor:
    """y = x @ w + bias

    x: (rows, ..., k), the same on all ranks. w: (k, n), the columns of this rank, Shard(-1). bias: (n,) or None.
    y: (rows, ..., n), Shard(-1). No messages: only the backward has some. It is that of an x that all ranks share:
    dx = matmul_all_reduce(dy, w.T).

    With `fompi.torch.matmul_all_reduce(..., gradient="replicated")` behind it, it is a block of tensor parallelism
    whose input, output and loss are replicated. Under torch.compile both are nodes of the graph.
    """
    y: torch.Tensor = torch.ops.fompi.replicated_matmul(x, w, bias, name_of(comm))
    return y


def _product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, comm: str, words: str = "") -> torch.Tensor:
    return x @ w if bias is None else x @ w + bias


def _keep_product(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    x, w, bias, ctx.comm, ctx.words = inputs
    ctx.save_for_backward(x, w)
    ctx.is_biased = bias is not None


def _product_backward(ctx: Any, dy: torch.Tensor) -> Any:
    x, w = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dx = None
    if needs[0]:
        words = joined("in the backward of replicated_matmul", ctx.words)
        given = {"x": dy, "w": w.mH, "comm": ctx.comm, "gradient": "replicated", "words": words}
        dx = node("matmul_all_reduce", given)
    dw = x.flatten(0, -2).mH @ dy.flatten(0, -2) if needs[1] else None  # reshape cannot tell -1 from no columns
    return dx, dw, dy.sum(tuple(range(dy.dim() - 1))) if ctx.is_biased else None, None, None


_SCHEMA = '(Tensor x, Tensor w, Tensor? bias=None, str comm="", str words="") -> Tensor'
define("replicated_matmul", _SCHEMA, _product, _product).register_autograd(
    _product_backward, setup_context=_keep_product
)

PUBLIC: dict[str, Callable[..., Any]] = {
    **{name: _public(operation) for name, operation in DIFFERENTIABLE.items()},
    "replicated_matmul": replicated_matmul,
    "communicator": communicator,
}
"""The names of `fompi.torch` that this file has."""
