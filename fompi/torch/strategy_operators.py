"""Strategies, and operations whose rows go to experts, as operators of torch: a call is a node of a compiled graph.

| operator                         | what it does                                                                   |
|----------------------------------|--------------------------------------------------------------------------------|
| `fompi::strategy`                | the forward; with `keeps` it remembers what the backward needs, under a number |
| `fompi::strategy_backward`       | the backward of the forward with this number: all gradients                    |

`key` is a call as far as it does not depend on tensors: the strategy, its options, which tensors there are. The
compiler must know the shapes of results before the ranks meet (`SHAPES`): where rows come from other ranks, these have
as many as this one. How many rows go to experts it need not know.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fompi.base.errors import ShapeError, StateError
from fompi.base.layout import split
from fompi.base.nested import flatten
from fompi.ops.adjoints import DIFFERENTIABLE, Call
from fompi.ops.operation import Operation
from fompi.parallel import expert, sequence, tensor
from fompi.parallel.differentiable import COMMS, Differentiable
from fompi.parallel.section import Section
from fompi.plans.meaning import MEANING
from fompi.torch import private
from fompi.torch.operators import define, name_of, name_order, named, positional, required

MOST_KEPT = 256
"""At most this many forwards of one call may wait for their backward. Of more than that the oldest are forgotten."""


def _grouped(operation: Operation[Any]) -> Differentiable:
    """An operation whose rows go to experts, as a strategy: its backward needs the counts that have arrived."""

    def forward(*args: Any, **options: Any) -> tuple[Any, Any]:
        arguments, comm, how = operation.read(args, options)
        call = Call(operation, arguments, comm, how, Operation.run)
        return call.forward(arguments.tensors), (call, arguments.tensors)

    def backward(saved: Any, dy: Any) -> tuple[Any, ...]:
        call, tensors = saved
        return tuple(call.backward(tensors, dy if isinstance(dy, tuple) else (dy,), [True] * len(tensors)))

    forward.__signature__ = operation.__signature__  # type: ignore[attr-defined]
    tensors = [name for name in ("x", "d", "w", "h") if name in operation.__signature__.parameters]
    return Differentiable(forward, backward, tensors=tensors, inputs=1, name=operation.name)


GROUPED = {name: _grouped(op) for name, op in DIFFERENTIABLE.items() if name in MEANING and MEANING[name].grouped}

STRATEGIES: dict[str, Differentiable] = GROUPED | {
    f.__name__: f
    for f in (
        *(tensor.column_parallel_linear, tensor.row_parallel_linear, tensor.attention, tensor.all_reduce_rmsnorm),
        *(tensor.vocab_parallel_embedding, tensor.vocab_parallel_cross_entropy, expert.moe),
        *(sequence.ring_attention, sequence.ulysses_attention, sequence.usp_attention),
    )
}
INTEGERS = ("tokens", "targets")
"""Tensors without a gradient."""

PARAMETERS = {name: [*f.__signature__.parameters] for name, f in STRATEGIES.items()}
POSITIONAL = {name: positional(f) for name, f in STRATEGIES.items()}
NEEDED = {name: required(f) for name, f in STRATEGIES.items()}
TENSORS = {name: [p for p in PARAMETERS[name] if p in f.tensors or p in INTEGERS] for name, f in STRATEGIES.items()}
RESULTS = {"all_reduce_rmsnorm": 2, **{name: 3 for name in GROUPED if MEANING[name].keeps}}
"""How many results a call has, if not one."""


class KeyedCall(NamedTuple):
    """A call without its tensors. `counts[i]` is how many tensors argument i has: -1 if it is one, and no tuple."""

    f: Differentiable
    counts: tuple[int, ...]
    options: dict[str, Any]

    def given(self, tensors: Sequence[Any], rows: Sequence[int] | None) -> dict[str, Any]:
        """The arguments of the call."""
        rest, given = iter(tensors), dict(self.options)
        for name, count in zip(TENSORS[self.f.__name__], self.counts, strict=True):
            given[name] = next(rest) if count < 0 else tuple(itertools.islice(rest, count)) or None
        if (runs := given.pop("runs", None)) is not None and rows is not None:
            each = iter(rows)
            given["counts"] = [list(itertools.islice(each, n)) for n in runs]
        elif rows is not None:
            given["counts"] = list(rows)
        for name in COMMS:
            if name in given:
                given[name] = named(given[name])
        return given

    def has_gradient(self) -> list[bool]:
        """Of each tensor: whether the backward gives its gradient."""
        names = zip(TENSORS[self.f.__name__], self.counts, strict=True)
        return [name not in INTEGERS for name, count in names for _ in range(abs(count))]


CALLS: dict[str, KeyedCall] = {}


@private.run_by_the_compiler
def key_of(f: Differentiable, counts: tuple[int, ...], names: tuple[str, ...], *values: Any) -> str:
    """The key of a call with these options."""
    options = dict(zip(names, values, strict=True))
    for name in COMMS:
        if name in PARAMETERS[f.__name__]:
            options[name] = name_of(options.get(name))
    key = f"{f.__name__}({options}), tensors {counts}"
    CALLS[key] = KeyedCall(f, counts, options)
    return key


# ------------------------------------------------------------------------------------------------------------ shapes


def _rows(rows: Any, given: dict[str, Any]) -> Any:
    """The rows of this rank of all `rows`."""
    comm, counts = given["comm"], given.get("counts")
    if not given.get("sequence_parallel", True):
        return rows
    return (split(rows, comm.size) if counts is None else counts)[comm.rank]


def _column(g: dict[str, Any]) -> list[Any]:
    x, n = g["x"], g["w"].shape[1]
    rows = x.shape[0] * (g["comm"].size if g.get("sequence_parallel", True) else 1)
    return [x.new_empty((rows, *x.shape[1:-1], n // 2 if g.get("activation") == "swiglu" else n))]


def _embedding(g: dict[str, Any]) -> list[Any]:
    tokens, table = g["tokens"], g["table"]
    return [table.new_empty((_rows(tokens.shape[0], g), *tokens.shape[1:], table.shape[1]))]


def _losses(g: dict[str, Any]) -> list[Any]:
    logits = g["logits"]
    dtype = torch.float32 if logits.dtype in (torch.float16, torch.bfloat16) else logits.dtype
    return [logits.new_empty(logits.shape[:-1], dtype=dtype)]


def _normed(g: dict[str, Any]) -> list[Any]:
    return [g["x"].new_empty(g["x"].shape), g["residual"].new_empty(g["residual"].shape)]


def _attended(g: dict[str, Any]) -> list[Any]:
    return [g["q"].new_empty((*g["q"].shape[:2], g["v"].shape[2]))]


def _new_rows(like: torch.Tensor, given: dict[str, Any], last: Any) -> torch.Tensor:
    """A tensor for rows that arrive. Only the other ranks know how many."""
    shape, dim = list(like.shape), given["dim"] % like.dim() if "dim" in given else 0
    del shape[dim]
    return like.new_empty((torch.library.get_ctx().new_dynamic_size(), *shape[:-1], last)).movedim(0, dim)


def _weights(given: dict[str, Any], k: Any, n: Any) -> torch.Tensor:
    comm = given["comm"]
    here = given["w"].shape[0] if "w" in given else split(given["experts"], comm.size)[comm.rank]
    like: torch.Tensor = given["h"]
    return like.new_empty((here, k, n))


def _grouped_results(name: str) -> Callable[[dict[str, Any]], list[Any]]:
    """The results of an operation whose rows go to experts: rows that arrive, the gradient of weights, or both."""
    meaning = MEANING[name]
    if meaning.operand is None:
        return lambda g: [_new_rows(g["x"], g, g["w"].shape[2])]
    if not meaning.keeps:
        return lambda g: [_weights(g, g["x"].shape[-1], g["h"].shape[-1])]
    return lambda g: [
        *(g["h"].new_empty((*g["h"].shape[:-1], n)) for n in (g["d"].shape[-1], g["w"].shape[2])),
        _weights(g, g["h"].shape[-1], g["d"].shape[-1]),
    ]


SHAPES: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    "column_parallel_linear": _column,
    "row_parallel_linear": lambda g: [
        g["x"].new_empty((_rows(g["x"].shape[0], g), *g["x"].shape[1:-1], g["w"].shape[1]))
    ],
    "attention": lambda g: [g["x"].new_empty((*g["x"].shape[:-1], g["wo"].shape[1]))],
    "all_reduce_rmsnorm": _normed,
    "vocab_parallel_embedding": _embedding,
    "vocab_parallel_cross_entropy": _losses,
    "moe": lambda g: [g["x"].new_empty((g["x"].shape[0], g["w2"].shape[2]))],
    "ring_attention": _attended,
    "ulysses_attention": _attended,
    "usp_attention": _attended,
    **{name: _grouped_results(name) for name in GROUPED},
}
"""The arguments of a strategy -> tensors of the form of its results."""


# --------------------------------------------------------------------------------------------------------- operators


class _Forwards:
    """What forwards have kept for their backwards, by number. A backward runs once: compiled code allows no more."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._saved: dict[str, dict[int, Any]] = {}

    def put(self, key: str, saved: Any) -> int:
        """The number of a forward of this call."""
        number, of_call = next(self._numbers), self._saved.setdefault(key, {})
        of_call[number] = saved
        if len(of_call) > MOST_KEPT:
            del of_call[next(iter(of_call))]
        return number

    def take(self, key: str, number: int) -> Any:
        saved = self._saved.get(key, {}).pop(number, None)
        if saved is None:
            raise StateError(
                f"the backward of {CALLS[key].f.__name__}: its forward is forgotten. In compiled code a backward runs "
                f"once, and at most {MOST_KEPT} forwards of a call wait for theirs"
            )
        return saved


KEPT = _Forwards()


def _forward(
    key: str, tensors: Sequence[torch.Tensor], counts: Sequence[int] | None, keeps: bool
) -> tuple[list[torch.Tensor], torch.Tensor]:
    call = CALLS[key]
    given, name = call.given([t.detach() for t in tensors], counts), call.f.__name__
    with Section(name), torch.no_grad():
        y, saved = call.f.forward(**given)
        results = [_rows_first(t, given) for t in flatten(y)]
        wanted = [tuple(t.shape) for t in results if name in GROUPED] or [tuple(t.shape) for t in SHAPES[name](given)]
        if [tuple(t.shape) for t in results] != wanted:
            raise ShapeError(
                f"{name} in compiled code: the result has the shape {tuple(results[0].shape)}, but the program was "
                f"compiled for {wanted[0]}: x must have as many rows on all ranks, or be padded"
            )
    return results, torch.tensor(KEPT.put(key, saved) if keeps else 0)


def _rows_first(y: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """y, whose rows lie in memory one after the other, as SHAPES has it."""
    dim = given.get("dim", 0)
    return y.movedim(dim, 0).contiguous().movedim(0, dim)


def _fake_forward(
    key: str, tensors: Sequence[torch.Tensor], counts: Sequence[int] | None, keeps: bool
) -> tuple[list[torch.Tensor], torch.Tensor]:
    call = CALLS[key]
    given = call.given(tensors, counts)
    return SHAPES[call.f.__name__](given), torch.empty((), dtype=torch.int64)


def _backward(
    key: str, number: torch.Tensor, dys: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The gradients of those of the tensors that have one."""
    f = CALLS[key].f
    saved = KEPT.take(key, int(number))
    with torch.no_grad():
        gradients = f.backward(saved, dys[0] if len(dys) == 1 else tuple(dys))
    return [g.contiguous() for g in flatten(gradients) if g is not None]


def _fake_backward(
    key: str, number: torch.Tensor, dys: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    return [t.new_empty(t.shape) for t, has in zip(tensors, CALLS[key].has_gradient(), strict=True) if has]


def _keep(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.key, tensors, _, _ = inputs
    ctx.shapes = [y.shape for y in output[0]]
    ctx.save_for_backward(output[1], *tensors)


def _differentiate(ctx: Any, dys: Sequence[Any], _: Any) -> Any:
    number, *tensors = ctx.saved_tensors
    given = zip(dys, ctx.shapes, strict=True)
    dys = [tensors[0].new_zeros(shape) if dy is None else dy.contiguous() for dy, shape in given]
    gradients = iter(torch.ops.fompi.strategy_backward(ctx.key, number, dys, tensors))
    return None, [next(gradients) if has else None for has in CALLS[ctx.key].has_gradient()], None, None


_SCHEMA = "(str key, Tensor[] tensors, SymInt[]? counts, bool keeps) -> (Tensor[], Tensor)"
_made = define("strategy", _SCHEMA, _forward, _fake_forward)
_made.register_autograd(_differentiate, setup_context=_keep)
private.keep_in_order(_made)
_SCHEMA = "(str key, Tensor number, Tensor[] dys, Tensor[] tensors) -> Tensor[]"
private.keep_in_order(define("strategy_backward", _SCHEMA, _backward, _fake_backward))
OPS = torch.ops.fompi


# ------------------------------------------------------------------------------------- what the compiler reads


def of_call(f: Differentiable, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """(the result of the node, None), or (None, why there is none). The compiler reads this function."""
    name, given = f.__name__, dict(options)
    if name not in STRATEGIES:
        return None, "unknown"
    if len(args) > len(POSITIONAL[name]):
        return None, "wrong"
    given.update(zip(POSITIONAL[name], args, strict=False))
    if any([key not in given for key in NEEDED[name]]) or any([key not in PARAMETERS[name] for key in given]):
        return None, "wrong"
    if given.pop("out", None) is not None or given.pop("certify", False):
        return None, "wrong"
    name_order(given)
    counts, tensors = taken(name, given)
    if any([not isinstance(t, torch.Tensor) for t in tensors]):
        return None, "tensor"
    if any([isinstance(value, torch.Tensor) for value in given.values()]):
        return None, "value"
    rows = given.pop("counts", None)
    if name in GROUPED and rows is not None:
        given["runs"] = tuple([len(runs) for runs in rows])
        rows = [n for runs in rows for n in runs]
    keeps = torch.is_grad_enabled() and any([t.requires_grad for t in tensors])
    key = key_of(f, tuple(counts), tuple(given), *given.values())
    ys, _ = OPS.strategy(key, tensors, None if rows is None else list(rows), keeps)
    return (tuple(ys) if name in RESULTS else ys[0]), None


def taken(name: str, given: dict[str, Any]) -> tuple[list[int], list[Any]]:
    """The tensors of a call, which are no longer in `given`, and how many each argument has (`KeyedCall`)."""
    counts: list[int] = []
    tensors: list[Any] = []
    for key in TENSORS[name]:
        value = given.pop(key, None)
        if isinstance(value, (tuple, list)):
            counts.append(len(value))
            tensors += value
        else:
            counts.append(0 if value is None else -1)
            tensors += [] if value is None else [value]
    return counts, tensors
