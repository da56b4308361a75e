"""The operations as operators of torch: `torch.ops.fompi.all_gather_matmul(x, w, comm="...")`.

torch.compile reads none of fompi's code, but it knows these operators: the shapes and strides of their results, and
their backward. So a call is a node of its graph, not the end of it. `fompi.<operation>` uses them by itself where
torch.compile reads it.

| argument                              | meaning                                                               |
|---------------------------------------|-----------------------------------------------------------------------|
| those of the operation, without `out` | as in `fompi.<operation>`. Rows that go to experts: no operator        |
| comm                                  | the name of a communicator (`name_of`) or of a group of torch; "": all ranks |
| gradient                              | "sum": of the losses of all ranks; "replicated": of one loss that all have |
| arriving                              | the rows from each rank; None: x has the same shape on all ranks      |
| words                                 | whose backward it is, for the comparison of the ranks                 |
| leaves                                | x as a list (`fompi.Canonical`), without a gradient; x is then its first |

All is derived: the schema from the signature of the operation and PARAMETERS, the results from its Arguments, the
backward from `fompi.ops.adjoints`. The compiler must know the shape of a result before the ranks meet. So the ranks
compare `arriving` with what they send. If it is something else, a rank that sees it raises a ShapeError, and the other
ranks an error too.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from itertools import count
from operator import index
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch._dynamo  # the first call of an operator would load it, for seconds, while other ranks wait

from fompi.base.call_options import CallOptions, in_words
from fompi.base.doors import DOORS
from fompi.base.errors import LayoutError, ShapeError, StateError, TensorError
from fompi.base.layout import Extents, split
from fompi.engine.communicator import Communicator
from fompi.ops.adjoints import DIFFERENTIABLE, Call, ReplicatedCall, check_convention
from fompi.ops.arguments import Arguments
from fompi.ops.operation import Operation
from fompi.plans.meaning import MEANING
from fompi.plans.rows import Rows, rows_alike
from fompi.plans.tree import Canonical
from fompi.torch import private
from fompi.torch.autograd import conjugate
from fompi.torch.groups import communicator

# ------------------------------------------------------------------------------------------------------ communicators

_NUMBERS = count()
_NAMES: WeakKeyDictionary[Communicator, str] = WeakKeyDictionary()
_NAMED: WeakValueDictionary[str, Communicator] = WeakValueDictionary()


@private.run_by_the_compiler
def name_of(comm: Any) -> str:
    """The name of a communicator as an argument of an operator. All that `communicator` takes has one."""
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


# ----------------------------------------------------------------------------------------------------------- arguments


def filled(ws: Sequence[Any], biases: Sequence[Any]) -> list[Any]:
    """The biases, with zeros in the place of None."""
    return [b if b is not None else ws[i].new_zeros(ws[i].shape[-1]) for i, b in enumerate(biases)]


PARAMETERS: dict[str, tuple[str, Callable[[Arguments], Any]]] = {
    "x": ("Tensor x", lambda a: a.x),
    "d": ("Tensor d", lambda a: a.x),
    "w": ("Tensor w", lambda a: a.weights[0]),
    "ws": ("Tensor[] ws", lambda a: list(a.weights)),
    "h": ("Tensor h", lambda a: a.operands[0]),
    "bias": ("Tensor? bias=None", lambda a: a.biases[0]),
    "biases": ("Tensor[] biases", lambda a: filled(a.weights, a.biases)),
    "dim": ("int dim=0", lambda a: a.dim),
    "split_dim": ("int? split_dim=None", lambda a: a.split_dim),
    "concat_dim": ("int? concat_dim=None", lambda a: None if a.split_dim is None else a.dim),
    "counts": ("SymInt[]? counts=None", lambda a: a.counts),
    "columns": ("SymInt[]? columns=None", lambda a: a.columns),
    "root": ("int root=0", lambda a: a.root),
    "op": ('str op="sum"', lambda a: a.op),
    "dest": ("int? dest", lambda a: a.peers.dest),  # type: ignore[union-attr]
    "source": ("int? source", lambda a: a.peers.source),  # type: ignore[union-attr]
    "tag": ("int tag=0", lambda a: a.peers.tag),  # type: ignore[union-attr]
}
"""The parameters of all operations: in the schema of an operator, and their value in Arguments."""

COMMON = 'str comm="", str gradient="sum", SymInt[]? arriving=None, str words="", Tensor[]? leaves=None'
OF_OPERATORS = ("comm", "gradient", "arriving", "words", "leaves")
TEXTS = [name for name, default in CallOptions._field_defaults.items() if isinstance(default, str)]
WIRE = "str? wire=None"
PLANNED = ", ".join(
    "int[]? slices=None" if name == "slices" else f'str {name}="{default}"' if default else f"str? {name}=None"
    for name, default in CallOptions._field_defaults.items()
    if name != "certify"
)
"""The parameters that all operators have, and those of operations that have a plan."""

TENSORS = ("x", "d", "w", "ws", "bias", "biases", "h")
"""The parameters that are tensors, in the order of `Arguments.tensors`."""

INTEGERS = ("dim", "split_dim", "concat_dim", "root", "dest", "source", "tag")
NEEDED = ("dim", "root", "tag")
"""The parameters that are integers, and those of them that cannot be None."""


def positional(f: Any) -> list[str]:
    """The parameters of an operation or a strategy that need no keyword."""
    return [p.name for p in f.__signature__.parameters.values() if p.kind != Parameter.KEYWORD_ONLY]


def required(f: Any) -> list[str]:
    """Those that every call must give."""
    return [p.name for p in f.__signature__.parameters.values() if p.default is Parameter.empty]


def wanted(given: Mapping[str, Any], gradient: str) -> str:
    """In words, whose gradients a call with these tensors wants, and by which convention. torch.compile reads this."""
    names: list[str] = []
    if torch.is_grad_enabled():
        for name in TENSORS:
            each = given.get(name)
            if isinstance(each, list):
                names += [f"{name}[{i}]" for i, t in enumerate(each) if t.requires_grad]
            elif each is not None and each.requires_grad:
                names.append(name)
    return f"for the gradient of {' and '.join(names)} ({gradient})" if names else ""


def name_order(given: dict[str, Any]) -> None:
    """Let `order` be its name: an operator takes no objects. torch.compile reads this."""
    if isinstance(order := given.get("order"), Canonical):
        given["order"] = order.name


def joined(*words: str) -> str:
    """The words that are not empty."""
    return " ".join(filter(None, words))


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """`torch.ops.fompi.<name>`, whose results have the shapes of those of `fake`."""
    made = torch.library.custom_op(f"fompi::{name}", run, mutates_args=(), schema=schema)
    made.register_fake(fake)
    return made


class OperatorCall(NamedTuple):
    """A call of an operator."""

    arguments: Arguments
    comm: Communicator
    call_options: CallOptions
    gradient: str
    arriving: Any
    leaves: Any


OF_LAYER = "of parallel layer"
"""So begin the words of a call that `fompi.torch.parallel` makes."""


class Operator:
    """The operator of an operation: `torch.ops.fompi.<name>`."""

    def __init__(self, operation: Operation[Any]):
        self.operation, self.name = operation, operation.name
        self.calls = 0  # how often it ran in this process, also in a backward and in compiled code
        self.own = [name for name in operation.__signature__.parameters if name in PARAMETERS]
        self.planned = self.name in MEANING
        self.moves = MEANING[self.name].moves if self.planned else "sendrecv"
        self.deals = self.planned and MEANING[self.name].deals
        self.multiplies_first = self.planned and MEANING[self.name].family == "scatter"
        texts = [PARAMETERS[name][0] for name in self.own] + [COMMON, PLANNED if self.planned else WIRE]
        schema = f"({', '.join(texts)}) -> {self._results()}"
        made = define(self.name, schema, self._run, self._fake)
        made.register_autograd(_backward, setup_context=self._keep)
        private.keep_in_order(made)
        self.call: Callable[..., Any] = getattr(torch.ops.fompi, self.name).default
        self.names = [argument.name for argument in self.call._schema.arguments]

    def _results(self) -> str:
        """The results, as the schema says them: the rows that arrive, a product, a weight gradient."""
        if not self.planned:
            return "Tensor"
        meaning = MEANING[self.name]
        if self.name.endswith("_many"):
            return "(Tensor, Tensor[])"
        count = meaning.keeps + (meaning.weight is not None) + (meaning.operand is not None)
        return "Tensor" if count < 2 else f"({', '.join(['Tensor'] * count)})"

    def dealt(self, a: Arguments, size: int) -> tuple[Any, ...]:
        """How many columns each rank has in a call that deals them. Empty: it deals none."""
        if not self.deals:
            return ()
        total = a.weights[0].shape[-1 if self.multiplies_first else 0]
        return split(total, size) if a.columns is None else tuple(a.columns)

    def _given(self, values: Sequence[Any]) -> OperatorCall:
        """The call with these values of all parameters."""
        options = dict(zip(self.names, values, strict=True))
        comm, gradient, arriving, words, leaves = (options.pop(name) for name in OF_OPERATORS)
        own = {name: options.pop(name) for name in self.own}
        arguments = self.operation._arguments(**own)
        arguments.words = words
        if options.get("slices"):
            slices = tuple(options["slices"])
            options["slices"] = len(slices) if slices == (1,) * len(slices) else slices
        return OperatorCall(arguments, named(comm), CallOptions(**options), gradient, arriving, leaves)

    def __call__(self, arguments: Arguments, comm: Any, call_options: CallOptions, **options: Any) -> Any:
        """Call the operator with these Arguments."""
        if call_options.certify:
            return self.operation.run(arguments, comm, call_options)
        values = self._values(arguments, call_options)
        if values is None:
            with torch.no_grad():
                return self.operation.run(arguments, comm, call_options)  # it refuses them
        words = joined(arguments.words, wanted(values, options.get("gradient", "sum")))
        return self.call(**values, comm=name_of(comm), words=words, **options)

    def _values(self, arguments: Arguments, call_options: CallOptions) -> dict[str, Any] | None:
        """The parameters of the operator. None if one has a type that is in no schema."""
        try:
            values = {name: PARAMETERS[name][1](arguments) for name in self.own}
            for name in INTEGERS:
                if values.get(name) is not None:
                    values[name] = _integer(values[name])
            for name in ("counts", "columns"):
                if values.get(name) is not None:
                    values[name] = [_integer(n) for n in values[name]]
            values["wire"] = call_options.wire
            if self.planned:
                slices = as_sizes(call_options.slices)
                values.update(call_options._asdict(), slices=slices and [_integer(n) for n in slices])
                del values["certify"]
        except (TypeError, IndexError):
            return None
        texts = [values.get(name, "") for name in ("op", *TEXTS)]
        if any(values.get(name, 0) is None for name in NEEDED) or not all(isinstance(text, str) for text in texts):
            return None
        if values.get("split_dim") is not None:
            values["dim"] = 0
        return values

    def nested(self, returned: Any) -> Any:
        """The result as the operation returns it: several products are a tuple."""
        if self.name == "all_gather_matmul_many":
            return returned[0], tuple(returned[1])
        return returned

    # -- what torch calls
    def _run(self, *values: Any, **named: Any) -> Any:
        """The operation itself, on tensors."""
        given = self._given(self._filled(values, named))
        a, comm = given.arguments, given.comm
        wrong, a.x = self._expect(given), given.leaves or a.x
        if wrong is not None:
            self.operation.refuse(wrong, comm)
        with torch.no_grad():
            try:
                result = self.operation.run(a, comm, given.call_options)
                self.calls += 1
            except ShapeError as error:
                if any(words in str(error) for words in (" rows are gathered", " rows arrive here")):
                    error.args = (f"{error}. {self._remedy(a)}", *error.args[1:])
                raise
        if not self.planned and result.shape != a.x.shape:
            raise ShapeError(
                f"fompi.sendrecv: rank {a.peers.source} has sent the shape {tuple(result.shape)}, but x has "  # type: ignore[union-attr]
                f"{tuple(a.x.shape)}. {self._remedy(a)}"
            )
        return _as_returned(result)

    def _expect(self, given: OperatorCall) -> Exception | None:
        """Let the ranks compare the rows that arrive. Returns the error of an `arriving` that cannot be right here."""
        a, comm, arriving = given.arguments, given.comm, given.arriving
        if self.moves not in ("all_gather", "all_to_all") or not self._has_rows(given):
            return None
        rows = rows_of(self, given)
        if arriving is not None:
            here = rows.extents.send[comm.rank] if not rows.extents.rows else a.x.shape[_at(a)]
            total = a.operands[0].shape[_at(a)] if a.operands else sum(arriving)
            if len(arriving) != comm.size or arriving[comm.rank] != here or sum(arriving) != total:
                return ShapeError(
                    f"fompi.torch.{self.name}: arriving={list(arriving)} must be the rows from each of {comm.size} "
                    f"ranks: {here} from this one, {total} in all"
                )
        if not a.operands:
            a.expects = sum(rows.arriving)
        elif arriving is None:
            return None  # the operand says how many rows arrive
        if not rows.extents.rows:
            a.arriving = rows.arriving
        elif len({*rows.arriving}) > 1:  # else the sum says it all
            a.words = joined(a.words, f"with arriving={list(rows.arriving)}")
        return None

    def _has_rows(self, given: OperatorCall) -> bool:
        """True if `rows_of` can read the arguments. If not, the operation refuses them."""
        a, size = given.arguments, given.comm.size
        return (
            a.x.dim() >= (2 if a.weights or a.operands else 1)
            and all(t.dim() for t in (*a.weights, *a.operands))
            and (a.counts is None or len(a.counts) == size)
            and 0 <= a.root < size
        )

    def _remedy(self, a: Arguments) -> str:
        if OF_LAYER in a.words:
            return (
                "A plain tensor must have as many rows on every rank, as in torch: pass a DTensor, which knows the "
                "rows of each rank (torch.distributed.tensor.distribute_tensor), or pad the rows"
            )
        known = f", or fompi.torch.{self.name}(..., arriving=[the rows from each rank])" if self.planned else ""
        return (
            "In compiled code and in fompi.torch, x must have the same shape on all ranks. Else call "
            f"fompi.{self.name} outside of compiled code (torch.compiler.disable){known}"
        )

    def _fake(self, *values: Any, **named: Any) -> Any:
        """Tensors with the shapes and the strides of the results. Wrong arguments are errors of `_run`, not here."""
        given = self._given(self._filled(values, named))
        a = given.arguments
        if self.moves in ("all_reduce", "broadcast", "sendrecv") and not a.weights:
            return a.x.new_empty(a.x.shape)
        if self.name == "reduce":
            return a.x.new_empty(a.x.shape if given.comm.rank == a.root else (0, *a.x.shape[1:]))
        if not self._has_rows(given):
            return _as_returned(a.result(defaultdict(lambda: a.x.new_empty(0))))
        rows = rows_of(self, given).result
        outputs = {}
        if a.keep or not (a.weights or a.operands):
            outputs["x_full" if a.keep else "y"] = _rows_first(a, rows, given.comm)
        for i, w in enumerate(a.weights):
            columns = w.shape[-1]
            if self.deals and self.multiplies_first:
                columns = self.dealt(a, given.comm.size)[given.comm.rank]
            outputs["y" if len(a.weights) == 1 else f"y{i}"] = _rows_first(a, rows, given.comm, columns)
        for h in a.operands:
            k, n = a.x.shape[-1], h.shape[-1]
            outputs["g"] = a.x.new_empty((n, k) if a.flipped else (k, n))
        return _as_returned(a.result(outputs))

    def _keep(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        """Keep what the backward needs."""
        given = self._given(inputs)
        a, kind = given.arguments, _SharedCall if given.gradient == "replicated" else Call
        if a.op == "prod":
            raise TensorError(f'fompi.{self.name}: op="prod" has no gradient: pass x.detach(), or sum logarithms')
        known = rows_of(self, given).extents
        apply = functools.partial(_apply, known, given.arguments.words)
        ctx.call = kind(self.operation, a, given.comm, given.call_options, apply)
        ctx.call._extents, ctx.names = known, self.names
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(a.tensors if ctx.call.keeps else ()))

    def _filled(self, values: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        defaults = self.call._schema.arguments[len(values) :]  # type: ignore[attr-defined]
        return [*values, *(named.get(each.name, each.default_value) for each in defaults)]


def as_sizes(slices: Any) -> list[int] | None:
    """`slices` of a call as a list of relative sizes."""
    return [1] * slices if isinstance(slices, int) else None if slices is None else list(slices)


def _integer(value: Any) -> Any:
    """The value as an integer that torch takes. Raises TypeError if it is none."""
    return value if type(value) is int or isinstance(value, torch.SymInt) else int(index(value))


def _as_returned(result: Any) -> Any:
    """The result with the types that the schema names: several products are a list."""
    return tuple(list(r) if isinstance(r, tuple) else r for r in result) if isinstance(result, tuple) else result


def _rows_first(a: Arguments, rows: Any, comm: Communicator, columns: Any = None) -> torch.Tensor:
    """A tensor for this many rows. They lie in memory one after the other, whatever `dim` is."""
    shape, dim = list(a.x.shape), _at(a)
    del shape[dim]
    if columns is not None:
        shape[-1] = columns
    at = split_at(a)
    if at is None:
        return a.x.new_empty((rows, *shape)).movedim(0, dim)
    del shape[at - (at > dim)]
    return a.x.new_empty((rows, columns_of(a, comm.size)[comm.rank], *shape)).movedim((0, 1), (dim, at))


def split_at(a: Arguments) -> int | None:
    """The dimension that an all-to-all splits, if it joins another one."""
    at = None if a.split_dim is None else a.split_dim % a.x.dim()
    return None if at == _at(a) else at


def columns_of(a: Arguments, size: int) -> tuple[Any, ...]:
    """How much of the dimension that is split each rank gets."""
    at = split_at(a)
    assert at is not None
    return split(a.x.shape[at], size) if a.counts is None else tuple(a.counts)


def _at(a: Arguments) -> int:
    """The dimension of the rows of x. A wrong one is an error of the operation."""
    return a.dim % a.x.dim() if -a.x.dim() <= a.dim < a.x.dim() else 0


def check(operation: str, arguments: Arguments, gradient: str) -> None:
    """Raise an error for what an operator cannot do, before it is called."""
    name = f"fompi.torch.{operation}"
    check_convention(name, gradient)
    if arguments.out is not None:
        raise TensorError(f"{name} takes no out=")
    for tensor in arguments.tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TensorError(f"{name}: {type(tensor).__name__} is no torch tensor")
    if arguments.op == "prod" and torch.is_grad_enabled() and arguments.x.requires_grad:
        raise TensorError(f'{name}: op="prod" has no gradient: pass x.detach(), or sum logarithms')


# ---------------------------------------------------------------------------------------------------------------- rows


def rows_of(operator: Operator, given: OperatorCall) -> Rows:
    """The rows of a call. Where only the other ranks know them: `arriving`, or those of ranks like this one."""
    a, comm = given.arguments, given.comm
    if operator.moves in ("broadcast", "sendrecv") or operator.name in ("all_reduce", "reduce"):
        return Rows(Extents(comm.rank, comm.size, (1,)))
    total, name, counts, columns = a.x.shape[_at(a)], operator.name, a.counts, operator.dealt(a, comm.size)
    if split_at(a) is not None:
        name, counts, columns = "all_to_all_columns", None, columns_of(a, comm.size)
    return rows_alike(name, comm.rank, comm.size, total, counts, given.arriving, columns, a.root)


# ------------------------------------------------------------------------------------------------------------ backward


def _backward(ctx: Any, *grads: Any) -> Any:
    """The gradient of each parameter of the operator. None for those that are no tensors."""
    call, given = ctx.call, list(zip(ctx.names, ctx.needs_input_grad, strict=False))
    is_biased = any(b is not None for b in call.arguments.biases)
    tensors = [name for name, _ in given if name in TENSORS and (name != "bias" or is_biased)]
    needs = [need for name, each in given if name in tensors for need in as_tuple(each)]
    kept = ctx.saved_tensors or [None] * len(needs)
    found = list(map(conjugate, call.backward(kept, [conjugate(g) for each in grads for g in as_tuple(each)], needs)))
    gradients: list[Any] = []
    for name, need in given:
        taken = [found.pop(0) for _ in as_tuple(need)] if name in tensors else None
        gradients.append(taken if taken is None or isinstance(need, list) else taken[0])
    return tuple(gradients)


def _apply(
    forward: Extents,
    words: str,
    operation: Operation[Any],
    arguments: Arguments,
    comm: Communicator,
    call_options: CallOptions,
) -> Any:
    """The result of an operation of the backward. The rows that arrive are those that the forward has sent.

    It belongs to a variable of each rank, also if the loss of the forward is replicated: "sum" is its convention. Its
    words are those of the forward too: so the backward of one layer never meets that of another one.
    """
    arguments.words = joined(arguments.words, words)
    operator, arriving = OPERATORS[operation.name], None
    moves = operator.moves
    if moves == "all_gather":
        arriving = forward.rows
    elif arguments.split_dim is not None:
        arriving = forward.send
    elif moves == "all_to_all":
        arriving = forward.recv if arguments.counts is forward.send else forward.send
    return operator(arguments, comm, call_options, arriving=list(arriving) if arriving else None)


class _SharedCall(ReplicatedCall):
    """A call for `gradient="replicated"`."""

    def shared(self, dy: torch.Tensor) -> torch.Tensor:
        shared: torch.Tensor = _Shared.apply(dy, name_of(self.comm)) if torch.is_grad_enabled() else dy
        return shared


class _Shared(torch.autograd.Function):
    """The identity. Its backward is the sum of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: str) -> torch.Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return torch.ops.fompi.all_reduce(dy, comm=ctx.comm, gradient="replicated"), None


def as_tuple(each: Any) -> Sequence[Any]:
    """What belongs to one parameter or result: a list has one part per tensor."""
    return each if isinstance(each, list) else (each,)


OPERATORS: dict[str, Operator] = {
    name: Operator(operation)
    for name, operation in DIFFERENTIABLE.items()
    if name not in MEANING or not MEANING[name].grouped
}
"""The operators by name: all operations that have a gradient."""


def _public(operation: Operation[Any]) -> Callable[..., Any]:
    """`fompi.torch.<operation>`: the operation, with two arguments more."""

    @functools.wraps(operation)
    def call(*args: Any, gradient: str = "sum", arriving: Sequence[int] | None = None, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            DOORS.prepare()
            return DOORS.traced(operation, args, options, gradient, arriving)
        operator = OPERATORS.get(operation.name)
        try:
            comm = communicator(options.get("comm"))
        except Exception as error:
            operation.refuse(error, None)
            raise
        arguments, comm, call_options = operation.read(args, {**options, "comm": comm})
        try:
            check(operation.name, arguments, gradient)
            if operator is None:  # its rows go to experts
                if arriving is not None:
                    raise LayoutError(f"fompi.torch.{operation.name} takes no arriving= for rows that go to experts")
                return operation.run(arguments, comm, call_options)  # no operator, but a node of autograd
            given = None if arriving is None else list(map(index, arriving))
        except Exception as error:
            operation.refuse(error, comm)
            raise
        return operator.nested(operator(arguments, comm, call_options, gradient=gradient, arriving=given))

    return call


# ------------------------------------------------------------------------------------------- a product without messages


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
        dx = torch.ops.fompi.matmul_all_reduce(dy, w.mH, comm=ctx.comm, gradient="replicated", words=words)
    dw = x.flatten(0, -2).mH @ dy.flatten(0, -2) if needs[1] else None  # reshape cannot tell -1 from no columns
    return dx, dw, dy.sum(tuple(range(dy.dim() - 1))) if ctx.is_biased else None, None, None


_SCHEMA = '(Tensor x, Tensor w, Tensor? bias=None, str comm="", str words="") -> Tensor'
_made = define("replicated_matmul", _SCHEMA, _product, _product)
_made.register_autograd(_product_backward, setup_context=_keep_product)

PUBLIC: dict[str, Callable[..., Any]] = {
    **{name: _public(operation) for name, operation in DIFFERENTIABLE.items()},
    "replicated_matmul": replicated_matmul,
    "communicator": communicator,
}
"""The names of `fompi.torch` that this file has."""
