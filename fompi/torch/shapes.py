"""The shapes of the results of operators, which a compiler must know before the ranks meet (`fompi.torch.operators`).

Where rows come from other ranks, these have as many as this one, or what `arriving` says. How many rows go to experts
need not be known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fompi.base.call_options import CallOptions
from fompi.base.errors import ShapeError
from fompi.base.layout import Extents, split
from fompi.base.nested import flatten
from fompi.engine.communicator import Communicator
from fompi.ops.arguments import Arguments
from fompi.ops.operation import Operation
from fompi.plans.meaning import MEANING
from fompi.plans.rows import Rows, rows_alike

# ---------------------------------------------------------------------------------------------------------- operations


class OperatorCall(NamedTuple):
    """A call of an operation by its operator. `leaves`: x is the first of these; None: it is a tensor."""

    operation: Operation[Any]
    arguments: Arguments
    comm: Communicator
    call_options: CallOptions
    gradient: str
    arriving: Any
    leaves: Any


def moves(name: str) -> str:
    """The operation that moves the rows."""
    return MEANING[name].moves if name in MEANING else name


def has_rows(given: OperatorCall) -> bool:
    """True if `rows_of` can read the arguments. If not, the operation refuses them."""
    a, size = given.arguments, given.comm.size
    return (
        a.x.dim() >= (2 if a.weights or a.operands else 1)
        and all(t.dim() for t in (*a.weights, *a.operands))
        and (a.counts is None or len(a.counts) == size)
        and 0 <= a.root < size
    )


def rows_of(given: OperatorCall) -> Rows:
    """The rows of a call. Where only the other ranks know them: `arriving`, or those of ranks like this one."""
    name, a, comm = given.operation.name, given.arguments, given.comm
    if moves(name) in ("broadcast", "sendrecv") or name in ("all_reduce", "reduce"):
        return Rows(Extents(comm.rank, comm.size, (1,)))
    counts, columns = a.counts, _dealt(given)
    if split_at(a) is not None:
        name, counts, columns = "all_to_all_columns", None, columns_of(a, comm.size)
    return rows_alike(name, comm.rank, comm.size, a.x.shape[row_dim(a)], counts, given.arriving, columns, a.root)


def expect(given: OperatorCall) -> Exception | None:
    """Let the ranks compare the rows that arrive. Returns the error of an `arriving` that cannot be right here."""
    a, comm, arriving = given.arguments, given.comm, given.arriving
    if moves(given.operation.name) not in ("all_gather", "all_to_all") or not has_rows(given):
        return None
    rows = rows_of(given)
    if arriving is not None:
        here = rows.extents.send[comm.rank] if not rows.extents.rows else a.x.shape[row_dim(a)]
        total = a.operands[0].shape[row_dim(a)] if a.operands else sum(arriving)
        if len(arriving) != comm.size or arriving[comm.rank] != here or sum(arriving) != total:
            return ShapeError(
                f"fompi.torch.{given.operation.name}: arriving={list(arriving)} must be the rows from each of "
                f"{comm.size} ranks: {here} from this one, {total} in all"
            )
    if not a.operands:
        a.expects = sum(rows.arriving)
    elif arriving is None:
        return None  # the operand says how many rows arrive
    if not rows.extents.rows:
        a.arriving = rows.arriving
    elif len({*rows.arriving}) > 1:  # else the sum says it all
        a.words = " ".join(filter(None, (a.words, f"with arriving={list(rows.arriving)}")))
    return None


def results_of(given: OperatorCall) -> list[torch.Tensor]:
    """Tensors with the shapes and the strides of the results. Wrong arguments are errors of the call, not here."""
    name, a, comm = given.operation.name, given.arguments, given.comm
    if moves(name) in ("all_reduce", "broadcast", "sendrecv") and not a.weights:
        return [a.x.new_empty(a.x.shape)]
    if name == "reduce":
        return [a.x.new_empty(a.x.shape if comm.rank == a.root else (0, *a.x.shape[1:]))]
    if not has_rows(given):
        return flatten(a.result(defaultdict(lambda: a.x.new_empty(0))))
    rows = rows_of(given).result
    outputs = {}
    if a.keep or not (a.weights or a.operands):
        outputs["x_full" if a.keep else "y"] = _rows_first(a, rows, comm)
    for i, w in enumerate(a.weights):
        columns = w.shape[-1]
        if MEANING[name].deals and MEANING[name].family == "scatter":
            columns = _dealt(given)[comm.rank]
        outputs["y" if len(a.weights) == 1 else f"y{i}"] = _rows_first(a, rows, comm, columns)
    for h in a.operands:
        k, n = a.x.shape[-1], h.shape[-1]
        outputs["g"] = a.x.new_empty((n, k) if a.flipped else (k, n))
    return flatten(a.result(outputs))


def _dealt(given: OperatorCall) -> tuple[Any, ...]:
    """How many columns each rank has in a call that deals them. Empty: it deals none."""
    name, a = given.operation.name, given.arguments
    if name not in MEANING or not MEANING[name].deals:
        return ()
    total = a.weights[0].shape[-1 if MEANING[name].family == "scatter" else 0]
    return split(total, given.comm.size) if a.columns is None else tuple(a.columns)


def _rows_first(a: Arguments, rows: Any, comm: Communicator, columns: Any = None) -> torch.Tensor:
    """A tensor for this many rows. They lie in memory one after the other, whatever `dim` is."""
    shape, dim = list(a.x.shape), row_dim(a)
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
    return None if at == row_dim(a) else at


def columns_of(a: Arguments, size: int) -> tuple[Any, ...]:
    """How much of the dimension that is split each rank gets."""
    at = split_at(a)
    assert at is not None
    return split(a.x.shape[at], size) if a.counts is None else tuple(a.counts)


def row_dim(a: Arguments) -> int:
    """The dimension of the rows of x. A wrong one is an error of the operation."""
    return a.dim % a.x.dim() if -a.x.dim() <= a.dim < a.x.dim() else 0


# ---------------------------------------------------------------------------- strategies, and rows that go to experts


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


def _of_experts(name: str) -> Callable[[dict[str, Any]], list[Any]]:
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


RESULTS: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
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
    **{name: _of_experts(name) for name, meaning in MEANING.items() if meaning.grouped},
}
"""The arguments of a call -> tensors of the form of its results."""
