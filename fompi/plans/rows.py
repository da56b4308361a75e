"""The rows of a call: how many each rank has, sends and gets. Pure arithmetic on shapes and counts.

`mine[r]` is a number of rows for each rank r:

| operation                   | mine[r]                                          |
|-----------------------------|--------------------------------------------------|
| all_to_all, gather, scatter | the rows that this rank sends to rank r          |
| all_gather                  | the rows of this rank, the same number for all r |
| all others                  | the rows that rank r owns                        |

Columns count as rows of an all-gather or a reduce-scatter.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from fompi.base.errors import LayoutError, ShapeError
from fompi.base.layout import Extents, as_integer, split
from fompi.plans.meaning import MEANING
from fompi.plans.problems import Problem, at_root


def counts_of(
    operation: str, counts: Sequence[int] | None, total: int, size: int, what: str, name: str = "counts"
) -> tuple[int, ...]:
    """A number for each rank, with the sum `total`: `counts`, or numbers as even as possible. Raises LayoutError."""
    if counts is None:
        return split(total, size)
    try:
        rows = tuple(map(operator.index, counts))
    except (TypeError, ValueError) as error:
        raise LayoutError(f"{operation}: {name}={counts!r}: {error}") from None
    if len(rows) != size or min(rows) < 0 or sum(rows) != total:
        raise LayoutError(
            f"{operation}: {name}={list(rows)} must be {size} numbers >= 0 that add up to {total}, {what}"
        )
    return rows


def columns_of(
    operation: str, columns: Sequence[int] | None, x: tuple[int, ...], w: tuple[int, ...], rank: int, size: int
) -> tuple[int, ...]:
    """How many columns each rank has: of the product, or of x. `x` and `w` are the shapes on this rank."""
    if len(w) != 2:
        raise ShapeError(f"{operation}: w needs two dimensions, not the shape {w}")
    if MEANING[operation].family == "scatter":
        return counts_of(operation, columns, w[1], size, "the columns of w", "columns")
    found = counts_of(operation, columns, w[0], size, "the rows of w", "columns")
    if x[-1] != found[rank]:
        here = f"{operation}: x has {x[-1]} columns on rank {rank}"
        raise ShapeError(f"{here}, but columns={list(found)} give it {found[rank]}")
    return found


def experts_of(
    operation: str, total: int | None, weights: Sequence[tuple[int, ...]], rank: int, size: int
) -> tuple[int, ...]:
    """How many experts each rank has: `total` of all, or as many on every rank. `weights` are shapes."""
    if weights and len(weights[0]) != 3:
        raise ShapeError(f"{operation}: w needs the shape (experts of this rank, k, n), not {weights[0]}")
    if total is None:
        if not weights:
            raise LayoutError(f"{operation}: experts= says how many experts all ranks have")
        total = size * weights[0][0]
    experts = split(as_integer(total, f"{operation}: experts"), size)
    if sum(experts) < 1 or min(experts) < 0:
        raise LayoutError(f"{operation}: experts={total} must be a number >= 1, of the experts of all ranks")
    for w in weights:
        if len(w) == 3 and w[0] != experts[rank]:
            raise LayoutError(
                f"{operation}: w has {w[0]} experts, but {total} experts on {size} ranks are "
                f"{list(experts)}: rank {rank} has {experts[rank]}. Pass experts= if ranks have different numbers"
            )
    return experts


def runs_of(problem: Problem, total: int, counts: Sequence[Any] | None, rank: int) -> Sequence[Sequence[int]]:
    """The rows of each run, for each rank: `counts`, or numbers as even as possible. Shorter lists get zeros."""
    experts, most = problem.experts, problem.runs
    runs: Sequence[tuple[int, ...]] = ()
    wanted = [experts[rank if problem.multiplies_first else r] for r in range(problem.size)]
    if counts is None:
        runs = problem.even_runs(rank, total)
    else:
        with suppress(TypeError, ValueError):
            runs = [tuple(map(operator.index, run)) for run in counts]
    known = [n for run in runs for n in run]
    if [*map(len, runs)] != wanted or min(known, default=0) < 0 or sum(known) != total:
        given = "" if counts is None else f"counts={counts} must be "
        raise LayoutError(
            f"{problem.operation}: {given}{problem.size} lists of {wanted} numbers >= 0 that add up to {total}, the "
            "rows of x: for each rank, the rows of each expert"
        )
    return [run + (0,) * (most - len(run)) for run in runs]


def mine_of(problem: Problem, total: int, counts: Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """`mine`, where x has `total` rows on this rank. Raises LayoutError for counts that do not fit."""
    if problem.moves == "all_gather":
        if counts is not None:
            raise LayoutError(f"{problem.operation} takes no counts: it gathers all rows of each rank")
        return (total,) * problem.size
    if problem.operation in ("gather", "reduce"):
        return at_root(problem.root, problem.size, total)
    if problem.operation == "scatter" and rank != problem.root:
        counts = None
    return counts_of(problem.operation, counts, total, problem.size, "the rows of x")


def extents_of(
    problem: Problem,
    rank: int,
    shares: tuple[int, ...],
    mine: Sequence[int],
    arriving: Sequence[int],
    runs: Sequence[Sequence[int]] = (),
    arriving_runs: Sequence[Sequence[int]] = (),
) -> Extents:
    """The Extents of a call. `arriving[source]` are the rows from each rank, where other ranks know them.

    Where rows go to experts, `runs[dest]` and `arriving_runs[source]` divide both.
    """
    size = problem.size
    if problem.experts:
        send, recv = (tuple(n for run in table for n in run) for table in (runs, arriving_runs))
        return Extents(rank, size, shares, (), send, recv, problem.experts, not problem.multiplies_first)
    if problem.moves == "all_to_all":
        return Extents(rank, size, shares, (), tuple(mine), tuple(arriving))
    return Extents(rank, size, shares, tuple(arriving if problem.moves == "all_gather" else mine))


class Rows(NamedTuple):
    """The rows of a call, as far as one rank can know them: the others are like it, or `arriving` says it."""

    extents: Extents
    arriving: Sequence[Any] = ()  # from each rank
    result: Any = 0  # how many rows the result has


def rows_alike(
    operation: str,
    rank: int,
    size: int,
    total: Any,
    counts: Sequence[Any] | None = None,
    arriving: Sequence[Any] | None = None,
    columns: tuple[Any, ...] = (),
    root: int = 0,
) -> Rows:
    """The rows of a call in which x has `total` rows on this rank, if x has as many on all ranks.

    `columns` are those of each rank, where columns travel. Numbers may be SymInts of torch.
    """
    moves = MEANING[operation].moves if operation in MEANING else operation
    if moves == "all_gather":
        rows = tuple(arriving or (total,) * size)
        return Rows(Extents(rank, size, (1,), rows, columns), rows, sum(rows))
    here = split(total, size) if counts is None else tuple(counts)
    own = here[rank] if len(here) == size else 0
    if moves in ("reduce_scatter", "all_reduce"):
        return Rows(Extents(rank, size, (1,), here, columns), here, total if moves == "all_reduce" else own)
    is_root, none = root == rank, (0,) * size
    if operation == "gather":
        send, received = at_root(root, size, total), (total,) * size if is_root else none
    elif operation == "scatter":
        send, received = here if is_root else none, at_root(root, size, own)
    else:
        send, received = here, (own,) * size
    received = tuple(arriving or received)
    return Rows(Extents(rank, size, (1,), send=send, recv=received), received, sum(received))
