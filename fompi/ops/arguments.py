"""What one rank was given for a call, checked and put in the order of rows; nothing here asks another rank."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from fompi.base.errors import DtypeError, LayoutError, ShapeError, TensorError
from fompi.base.layout import split
from fompi.engine.handshake import VALUE_BITS
from fompi.plans import problems
from fompi.plans.problems import Form, Problem
from fompi.tensors import dlpack
from fompi.tensors.dlpack import Tensor

Array = np.ndarray[Any, Any]

MOST_ROWS = (1 << VALUE_BITS) - 1
"""Of a rank: ranks tell each other how many they have."""


@dataclass
class Arguments:
    """What an operation was called with, in the terms of `fompi.plans.problems`."""

    x: Any
    weights: Sequence[Any] = ()
    biases: Sequence[Any] = ()
    operands: Sequence[Any] = ()
    dim: int = 0
    counts: Sequence[int] | None = None
    root: int = 0
    out: Any = None
    flipped: bool = False
    keep: bool = False
    gradient: bool = False  # whether somebody wants one: then all ranks will run the backward, so all must want it
    result: Callable[[dict[str, Any]], Any] = field(default=lambda outputs: outputs["y"])

    @property
    def tensors(self) -> list[Any]:
        """x, the weights, the biases that there are, the operands."""
        return [self.x, *self.weights, *(b for b in self.biases if b is not None), *self.operands]

    def with_tensors(self, tensors: Sequence[Any]) -> Arguments:
        """The same call on other tensors, in the order of `tensors`."""
        given = iter(tensors)
        return replace(
            self,
            x=next(given),
            weights=[next(given) for _ in self.weights],
            biases=[None if b is None else next(given) for b in self.biases],
            operands=[next(given) for _ in self.operands],
        )


class LocalCall(NamedTuple):
    """One rank's part of a call, checked: the problem, our arrays by name, and how many rows go to whom."""

    problem: Problem
    packed: bool
    arrays: dict[str, Array]
    like: Tensor
    shape: tuple[int, ...]
    rows: tuple[int, ...]  # to each rank, or of each rank where all know them
    expects: int
    out: Tensor | None
    packing: tuple[float, float] | None


def localise(operation: str, arguments: Arguments, rank: int, size: int) -> LocalCall:
    """Check our tensors and put them in the order of rows; nothing here asks another rank."""
    x = dlpack.borrow(arguments.x, "x")
    weights: Sequence[Tensor] = ()
    biases: Sequence[Tensor | None] = ()
    operands: Sequence[Tensor] = ()
    if arguments.weights or arguments.operands:
        weights = [dlpack.borrow(w, "w") for w in arguments.weights]
        biases = [None if b is None else dlpack.borrow(b, "bias") for b in arguments.biases]
        operands = [dlpack.borrow(h, "operand") for h in arguments.operands]
    out = None if arguments.out is None else dlpack.borrow(arguments.out, "out")
    flat = not weights and problems.MEANING[operation].moves in ("all_reduce", "broadcast")
    shape, packing, dim = x.array.shape, None, 0
    if flat:
        if not x.array.flags.c_contiguous:
            begun = perf_counter()
            x.array = np.ascontiguousarray(x.array)
            packing = (begun, perf_counter())
        x.array = x.array.reshape(-1)
    else:
        dim = _dimension(operation, arguments.dim, x.array, bool(weights or operands))
        if dim:
            for tensor in (x, *operands):
                tensor.array = np.moveaxis(tensor.array, dim, 0)
    problem = problems.problem(
        operation,
        size,
        _form(x),
        [_form(w) for w in weights] if weights else (),
        [None if b is None else _form(b) for b in biases] if biases else (),
        [_form(h) for h in operands] if operands else (),
        flipped=arguments.flipped,
        keep=arguments.keep,
        root=arguments.root,
    )
    rows = _rows(problem, len(x.array), arguments.counts)
    packed = not problem.multiplies_first and not x.array.flags.c_contiguous
    arrays = {"x": x.array}
    for i, w in enumerate(weights):
        arrays[problem.name("w", i)] = w.array
        bias = biases[i] if i < len(biases) else None
        if bias is not None:
            arrays[problem.name("bias", i)] = bias.array
    for i, h in enumerate(operands):
        arrays[problem.name("h", i)] = h.array
    expects = len(operands[0].array) if operands else -1
    if out is not None:
        if any(np.may_share_memory(out.array, array) for array in arrays.values()):
            raise TensorError(f"{operation}: out= shares memory with another operand")
        expects = _check_out(problem, out, shape, dim, rank, rows, expects)
    return LocalCall(problem, packed, arrays, x, shape, rows, expects, out, packing)


def _form(tensor: Tensor) -> Form:
    return Form(tensor.array.shape, tensor.dtype)


def _dimension(operation: str, dim: int, x: Array, multiplied: bool) -> int:
    count = x.ndim
    if not isinstance(dim, int) or not -count <= dim < count:
        raise ShapeError(f"{operation}: dim={dim!r} is no dimension of x with the shape {x.shape}")
    dim %= count
    if multiplied and dim == count - 1:
        raise ShapeError(f"{operation}: dim={dim} is the last dimension of x, which is multiplied; rows are before it")
    return dim


def _rows(problem: Problem, total: int, counts: Sequence[int] | None) -> tuple[int, ...]:
    """Rows to each rank (all-to-all), of each rank where all know it, or our own, once for each rank."""
    if total > MOST_ROWS:
        raise LayoutError(
            f"{problem.operation}: {total} rows on a rank, {MOST_ROWS} can be agreed upon: give x fewer, wider rows"
        )
    if problem.moves == "all_gather":
        if counts is not None:
            raise LayoutError(f"{problem.operation} gathers what each rank has; it takes no counts")
        return (total,) * problem.size
    if counts is None:
        return split(total, problem.size)
    try:
        rows = tuple(map(operator.index, counts))
    except (TypeError, ValueError) as error:
        raise LayoutError(f"{problem.operation}: counts={counts!r}: {error}") from None
    if len(rows) != problem.size or min(rows) < 0 or sum(rows) != total:
        raise LayoutError(
            f"{problem.operation}: counts={list(rows)} must be {problem.size} numbers >= 0 that add up to {total}, "
            "the rows of x"
        )
    return rows


def _check_out(
    problem: Problem,
    out: Tensor,
    shape: tuple[int, ...],
    dim: int,
    rank: int,
    rows: tuple[int, ...],
    expects: int,
) -> int:
    """Raise unless `out` can be written; the number of rows that it stands for, if others must agree to it."""
    if out.readonly:
        raise TensorError(f"{problem.operation}: out= is read-only")
    if not out.array.flags.c_contiguous:
        raise TensorError(f"{problem.operation}: out= is strided; give a contiguous tensor")
    if out.dtype != problem.dtype:
        raise DtypeError(f"{problem.operation}: out= is {out.dtype}, the result is {problem.dtype}")
    if dim and any(n != 1 for n in out.array.shape[:dim]):
        raise TensorError(f"{problem.operation}: out= cannot be filled along dim={dim}: its rows do not lie together")
    array = np.moveaxis(out.array, dim, 0) if dim else out.array
    if problem.flat:
        if array.shape != shape:
            raise ShapeError(f"{problem.operation}: out= has the shape {array.shape}, the result {shape}")
        return expects
    if problem.gradients:
        wanted: tuple[int, ...] = problem.gradient_shape(0)
        if array.shape != wanted:
            raise ShapeError(f"{problem.operation}: out= has the shape {array.shape}, the result {wanted}")
        return expects
    row = problem.product_row(0) if problem.weights else problem.row
    if array.ndim != 1 + len(row) or array.shape[1:] != row:
        raise ShapeError(f"{problem.operation}: out= has rows of the shape {array.shape[1:]}, the result {row}")
    if problem.moves in ("all_gather", "all_to_all"):
        return len(array)
    known = sum(rows) if problem.moves == "all_reduce" else rows[rank]
    if len(array) != known:
        raise ShapeError(f"{problem.operation}: out= has {len(array)} rows, the result {known}")
    return expects
