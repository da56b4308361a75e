"""The problem of an operation on global tensors, for every rank: what `fompi.plan` plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, NamedTuple

from fompi.base.errors import LayoutError, ShapeError
from fompi.base.layout import Layout, Partial, Shard, Sizes, Spec, as_integer, split
from fompi.plans.meaning import MEANING, layouts
from fompi.plans.problems import Form, Problem, in_order, on_wire, order_of, problem
from fompi.plans.tree import Canonical

MOST_RANKS = 1 << 16
"""The most ranks of a plan: a greater number is most likely a mistake."""


class Details(NamedTuple):
    """What a plan is for, besides the tensors: keywords of `fompi.plan`.

    `bias`: each weight has one. `packed`: x is strided, and is packed first. `split_dim` is the dimension of x that an
    all-to-all splits; by default it splits the rows. `experts` is how many experts a grouped weight gradient is for; a
    weight says it itself. `counts[source][dest][expert]` are the rows, where they go to experts; by default they are
    even. `wire` is that of messages (`base.wires`), `order` that of sums (`plans.tree`).
    """

    bias: bool = False
    root: int = 0
    packed: bool = False
    split_dim: int | None = None
    experts: int | None = None
    counts: Any = None
    wire: str | None = None
    order: Any = "any"


def from_specs(
    operation: str, specs: Sequence[Spec], ranks: int, **details: Any
) -> tuple[Callable[[int], Problem], Sizes]:
    """A function that returns the Problem of a rank, and the Sizes, for these global tensors. `details`: `Details`.

    The tensors are x, the weights and the operand h of a gradient, in this order. Rows and columns are distributed as
    evenly as possible. So the problems of two ranks may differ in columns that are not sent.
    """
    asked = Details(**details)
    ranks = as_integer(ranks, "ranks")
    if not 1 <= ranks <= MOST_RANKS:
        raise LayoutError(f"ranks={ranks!r} must be an integer from 1 to {MOST_RANKS}")
    for spec in specs:
        if not isinstance(spec, Spec):
            raise LayoutError(f"{operation} is planned from one fompi.Spec for each tensor, not from {spec!r}")
    splits = asked.split_dim is not None and bool(specs) and specs[0].resolved(Shard(asked.split_dim)) != Shard(0)
    operation = "all_to_all_columns" if splits and operation == "all_to_all" else operation
    expected, meaning, experts = layouts(operation, len(specs)), MEANING[operation], asked.experts
    if meaning.grouped and meaning.weight is not None:
        if len(specs[1].shape) != 3:
            raise ShapeError(f"{operation}: w needs the shape (experts, k, n), not {specs[1].shape}")
        experts = specs[1].shape[0] if experts is None else experts
    op = _reduction(operation, specs, expected)
    columns: tuple[int, ...] = ()
    if operation == "all_to_all_columns":
        columns, specs = _split_x(specs[0], asked.split_dim, ranks)
    elif meaning.deals:
        columns = split(specs[1 if meaning.family == "scatter" else 0].shape[-1], ranks)
    elif splits:
        raise LayoutError(f"{operation} splits no other dimension than that of the rows: leave out split_dim")

    has_operand = meaning.operand is not None
    traits: dict[str, Any] = {"root": as_integer(asked.root, "root"), "op": op, "columns": columns}
    traits |= {"keep": meaning.keeps, "packed": asked.packed, "flipped": has_operand and meaning.weight is not None}
    if experts is not None:
        traits["experts"] = split(as_integer(experts, "experts"), ranks)
    canonical = Canonical.of(order_of(asked.order))
    leaves = canonical.counts(ranks) if canonical and meaning.family == "scatter" and meaning.weight else ()

    def problem_of(tensors: Sequence[Spec] | Sequence[Form]) -> Problem:
        x, *others = (Form(tensor.shape, tensor.dtype) for tensor in tensors)
        weights, operands = (others[:-1], others[-1:]) if has_operand else (others, [])
        biases = [Form(w.shape[1:], w.dtype) for w in weights] if asked.bias else ()
        made = problem(operation, ranks, x, weights, biases, operands, **traits)
        return made if asked.wire is None else on_wire(made, asked.wire)

    @cache
    def at(rank: int) -> Problem:
        whole = meaning.deals and len(specs) > 1
        pieces = specs if whole else [_local_form(spec, rank, ranks, leaves) for spec in specs]
        return in_order(problem_of(pieces), asked.order, rank)

    problem_of(specs)  # pieces may fit by chance: check whole tensors
    first = at(0)
    if has_operand and specs[-1].shape[0] != specs[0].shape[0]:
        raise ShapeError(f"{operation}: x has {specs[0].shape[0]} rows, but h has {specs[-1].shape[0]}")
    return at, _sizes(first, specs[0].shape, asked.counts)


def _reduction(operation: str, specs: Sequence[Spec], expected: list[Layout]) -> str:
    """How an operation reduces: x says it. Raises LayoutError if the tensors do not have the `expected` layouts."""
    if isinstance(expected[0], Partial) and isinstance(specs[0].layout, Partial):
        expected = [specs[0].layout, *expected[1:]]
    required = [spec.resolved(wanted) for spec, wanted in zip(specs, expected, strict=True)]
    for spec, wanted in zip(specs, required, strict=True):
        if spec.layout != wanted:
            raise LayoutError(f"{operation} takes tensors with the layouts {required}, not {spec}")
    return expected[0].op if isinstance(expected[0], Partial) else "sum"


def _split_x(x: Spec, split_dim: int | None, ranks: int) -> tuple[tuple[int, ...], list[Spec]]:
    """How much of the dimension `split_dim` of x each rank gets, and x with this dimension behind the rows."""
    dim = (1 if split_dim is None else split_dim) % len(x.shape)
    turned = replace(x, shape=(x.shape[0], x.shape[dim], *x.shape[1:dim], *x.shape[dim + 1 :]))
    return split(x.shape[dim], ranks), [turned]


def _sizes(first: Problem, shape: tuple[int, ...], counts: Any) -> Sizes:
    """The sizes for an x of this shape: with the rows `counts`, or as even as possible."""
    if counts is not None:
        if not first.experts:
            raise LayoutError(f"{first.operation} is planned with even rows: only rows that go to experts take counts=")
        sizes = first.grouped(counts)
        if (rows := sum(map(sum, sizes.pairs))) != shape[0]:
            raise ShapeError(f"{first.operation}: x has {shape[0]} rows, but counts= have {rows}")
        return sizes
    if first.experts and first.multiplies_first:  # a rank without experts has no rows
        active = sum(map(bool, first.experts))
        return first.spread((*split(shape[0], active), *(0,) * (first.size - active)))
    return first.spread(split(prod(shape) if first.flat else shape[0], first.size))


def _local_form(spec: Spec, rank: int, ranks: int, leaves: Sequence[int] = ()) -> Form:
    """The piece of a global tensor that one rank has. `leaves`: of an order, cut what is sharded into equal parts."""
    shape = list(spec.shape)
    if isinstance(spec.layout, Shard):
        dim = spec.layout.dim
        if leaves and shape[dim] % sum(leaves) == 0:
            shape[dim] = shape[dim] // sum(leaves) * leaves[rank]
        else:
            shape[dim] = split(shape[dim], ranks)[rank]
    return Form(tuple(shape), spec.dtype)
