"""The problem of an operation on global tensors, for every rank: what `fompi.plan` plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

from fompi.base.errors import LayoutError, ShapeError
from fompi.base.layout import Partial, Shard, Sizes, Spec, as_integer, split
from fompi.plans.meaning import MEANING, layouts
from fompi.plans.problems import Form, Problem, in_order, on_wire, order_of, problem
from fompi.plans.tree import Canonical

MOST_RANKS = 1 << 16
"""The most ranks of a plan: a greater number is most likely a mistake."""


def from_specs(
    operation: str,
    specs: Sequence[Spec],
    ranks: int,
    *,
    bias: bool = False,
    root: int = 0,
    packed: bool = False,
    split_dim: int | None = None,
    experts: int | None = None,
    counts: Any = None,
    wire: str | None = None,
    order: Any = "any",
) -> tuple[Callable[[int], Problem], Sizes]:
    """A function that returns the Problem of a rank, and the Sizes, for these global tensors.

    The tensors are x, the weights and the operand h of a gradient, in this order. Rows and columns are distributed as
    evenly as possible. So the problems of two ranks may differ in columns that are not sent. `split_dim` is the
    dimension of x that an all-to-all splits; by default it splits the rows. `experts` is how many experts a grouped
    weight gradient is for; a weight says it itself.
    `counts[source][dest][expert]` are the rows, where they go to experts; by default they are even. `wire` is that of
    messages (`base.wires`), `order` that of sums (`plans.tree`).
    """
    ranks, root = as_integer(ranks, "ranks"), as_integer(root, "root")
    if not 1 <= ranks <= MOST_RANKS:
        raise LayoutError(f"ranks={ranks!r} must be an integer from 1 to {MOST_RANKS}")
    for spec in specs:
        if not isinstance(spec, Spec):
            raise LayoutError(f"{operation} is planned from one fompi.Spec for each tensor, not from {spec!r}")
    splits = split_dim is not None and bool(specs) and specs[0].resolved(Shard(split_dim)) != Shard(0)
    operation = "all_to_all_columns" if splits and operation == "all_to_all" else operation
    expected, meaning = layouts(operation, len(specs)), MEANING[operation]
    if meaning.grouped and meaning.weight is not None:
        if len(specs[1].shape) != 3:
            raise ShapeError(f"{operation}: w needs the shape (experts, k, n), not {specs[1].shape}")
        experts = specs[1].shape[0] if experts is None else experts
    op = "sum"
    if isinstance(expected[0], Partial) and isinstance(specs[0].layout, Partial):
        expected[0], op = specs[0].layout, specs[0].layout.op
    required = [spec.resolved(wanted) for spec, wanted in zip(specs, expected, strict=True)]
    for spec, wanted in zip(specs, required, strict=True):
        if spec.layout != wanted:
            raise LayoutError(f"{operation} takes tensors with the layouts {required}, not {spec}")
    columns: tuple[int, ...] = ()
    if operation == "all_to_all_columns":
        x, dim = specs[0], (1 if split_dim is None else split_dim) % len(specs[0].shape)
        columns = split(x.shape[dim], ranks)
        specs = [replace(x, shape=(x.shape[0], x.shape[dim], *x.shape[1:dim], *x.shape[dim + 1 :]))]
    elif meaning.deals:
        columns = split(specs[1 if meaning.family == "scatter" else 0].shape[-1], ranks)
    elif splits:
        raise LayoutError(f"{operation} splits no other dimension than that of the rows: leave out split_dim")
    has_operand = meaning.operand is not None
    flipped = has_operand and meaning.weight is not None

    canonical = Canonical.of(order_of(order))
    leaves = canonical.counts(ranks) if canonical and meaning.family == "scatter" and meaning.weight else ()

    def problem_of(x: Form, *others: Form) -> Problem:
        weights, operands = (others[:-1], others[-1:]) if has_operand else (others, ())
        biases = [Form(w.shape[1:], w.dtype) for w in weights] if bias else ()
        options: dict[str, Any] = {"flipped": flipped, "keep": meaning.keeps, "packed": packed, "columns": columns}
        if experts is not None:
            options["experts"] = split(as_integer(experts, "experts"), ranks)
        made = problem(operation, ranks, x, weights, biases, operands, root=root, op=op, **options)
        return made if wire is None else on_wire(made, wire)

    @cache
    def at(rank: int) -> Problem:
        whole = meaning.deals and len(specs) > 1
        pieces = specs if whole else [_local_form(spec, rank, ranks, leaves) for spec in specs]
        return in_order(problem_of(*(Form(piece.shape, piece.dtype) for piece in pieces)), order, rank)

    problem_of(*(Form(spec.shape, spec.dtype) for spec in specs))  # pieces may fit by chance: check whole tensors
    first, x = at(0), specs[0]
    if has_operand and specs[-1].shape[0] != x.shape[0]:
        raise ShapeError(f"{operation}: x has {x.shape[0]} rows, but h has {specs[-1].shape[0]}")
    if counts is not None:
        if not first.experts:
            raise LayoutError(f"{operation} is planned with even rows: only rows that go to experts take counts=")
        sizes = first.grouped(counts)
        if sum(map(sum, sizes.pairs)) != x.shape[0]:
            raise ShapeError(f"{operation}: x has {x.shape[0]} rows, but counts= have {sum(map(sum, sizes.pairs))}")
        return at, sizes
    rows = split(prod(x.shape) if first.flat else x.shape[0], ranks)
    if first.experts and first.multiplies_first:  # a rank without experts has no rows
        active = sum(map(bool, first.experts))
        rows = (*split(x.shape[0], active), *(0,) * (ranks - active))
    return at, first.spread(rows)


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
