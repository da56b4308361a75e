"""What each operation means: the collective that moves its rows, and the layouts of its operands and its result.

Every operation belongs to one of two families:

* *gather*: the rows of x travel first (all-gather, all-to-all, broadcast). Then each block that arrives is kept,
  multiplied by weights, or used for a weight gradient.
* *scatter*: the rows are given or are a product. Then they are summed over the ranks (reduce-scatter, all-reduce) or
  distributed to the ranks (all-to-all).

Where *columns* travel (`Meaning.deals`), an all-to-all splits another dimension than it joins. Then the rows of all
ranks travel as in an all-gather, but each rank gets only its columns of them (`Problem.columns`). With a product before
it, the columns of the product are dealt to the ranks. With a product behind it, the rows go back to their owners, and
their columns come together: the product there is the sum of the products of all pieces.

Rows of a *grouped* product (`Meaning.grouped`) go to experts. Each rank has some of them (`Problem.experts`), each with
a matrix of its own. Then the rows of a pair of ranks are in runs, one for each expert of the rank that multiplies.

Three operations are others with rows on one rank only, the root. A `gather` is an all-to-all in which only the root
receives, a `scatter` one in which only the root sends, and a `reduce` is a reduce-scatter of which the root keeps all.
`Problem.is_empty` says which blocks have no rows then. Their plans leave such blocks out.
"""

from __future__ import annotations

from typing import NamedTuple

from fompi.base import layout
from fompi.base.errors import LayoutError, quoted
from fompi.base.layout import Partial, Replicate, Shard


class Meaning(NamedTuple):
    """The family of an operation, the collective that moves its rows, and the layouts of its global tensors."""

    family: str
    moves: str
    x: layout.Layout
    y: layout.Layout
    weight: layout.Layout | None = None
    operand: layout.Layout | None = None
    keeps: bool = False  # the gathered rows are a result, in addition to products or gradients
    deals: bool = False  # columns travel. What travels is not summed: it has one owner
    grouped: bool = False  # rows go to experts


AXES = {
    "all_gather": ("own", "rows"),
    "broadcast": ("rows", "rows"),
    "reduce_scatter": ("rows", "own"),
    "all_reduce": ("slices", "slices"),
    "all_to_all": ("send", "recv"),
}
"""The axis of x and the axis of the results with rows, by the collective that moves the rows."""

_ROWS, _COLUMNS, _ALL, _TERM = Shard(0), Shard(-1), Replicate(), Partial()

MEANING: dict[str, Meaning] = {
    "all_gather": Meaning("gather", "all_gather", _ROWS, _ALL),
    "broadcast": Meaning("gather", "broadcast", _ALL, _ALL),
    "reduce_scatter": Meaning("scatter", "reduce_scatter", _TERM, _ROWS),
    "all_reduce": Meaning("scatter", "all_reduce", _TERM, _ALL),
    "all_to_all": Meaning("gather", "all_to_all", _ROWS, _ROWS),
    "gather": Meaning("gather", "all_to_all", _ROWS, _ALL),
    "scatter": Meaning("gather", "all_to_all", _ALL, _ROWS),
    "reduce": Meaning("scatter", "reduce_scatter", _TERM, _ALL),
    "all_gather_matmul": Meaning("gather", "all_gather", _ROWS, _COLUMNS, _COLUMNS),
    "all_gather_matmul_many": Meaning("gather", "all_gather", _ROWS, _COLUMNS, _COLUMNS, None, True),
    "all_gather_weight_gradient": Meaning("gather", "all_gather", _ROWS, _COLUMNS, None, _COLUMNS),
    "all_gather_matmul_weight_gradient": Meaning("gather", "all_gather", _ROWS, _COLUMNS, _COLUMNS, _COLUMNS),
    "all_to_all_matmul": Meaning("gather", "all_to_all", _ROWS, _ROWS, _ALL),
    "all_to_all_weight_gradient": Meaning("gather", "all_to_all", _ROWS, _TERM, None, _ROWS),
    "all_to_all_matmul_weight_gradient": Meaning("gather", "all_to_all", _ROWS, _ROWS, _ALL, _ROWS, True),
    "matmul_reduce_scatter": Meaning("scatter", "reduce_scatter", _COLUMNS, _ROWS, _ROWS),
    "matmul_all_reduce": Meaning("scatter", "all_reduce", _COLUMNS, _ALL, _ROWS),
    "matmul_all_to_all": Meaning("scatter", "all_to_all", _ROWS, _ROWS, _ALL),
    "all_to_all_columns": Meaning("gather", "all_gather", _ROWS, Shard(1), deals=True),
    "matmul_all_to_all_columns": Meaning("scatter", "all_gather", _ROWS, _COLUMNS, _ALL, deals=True),
    "all_to_all_columns_matmul": Meaning("gather", "reduce_scatter", _COLUMNS, _ROWS, _ALL, deals=True),
    "grouped_matmul_all_to_all": Meaning("scatter", "all_to_all", _ROWS, _ROWS, _ROWS, grouped=True),
    "all_to_all_grouped_matmul": Meaning("gather", "all_to_all", _ROWS, _ROWS, _ROWS, grouped=True),
    "all_to_all_grouped_weight_gradient": Meaning("gather", "all_to_all", _ROWS, _ROWS, None, _ROWS, grouped=True),
    "all_to_all_grouped_matmul_weight_gradient": Meaning(
        "gather", "all_to_all", _ROWS, _ROWS, _ROWS, _ROWS, True, grouped=True
    ),
}
"""Every operation. `all_to_all_columns` is `fompi.all_to_all` with two dimensions."""

VARIANTS = {
    "matmul_all_to_all": ("matmul_all_to_all_columns", "grouped_matmul_all_to_all"),
    "all_to_all_matmul": ("all_to_all_columns_matmul", "all_to_all_grouped_matmul"),
}
"""For an operation, those that deal columns, or multiply the rows of experts, in its place: errors name them."""

ROOTED = ("broadcast", "gather", "scatter", "reduce")
"""The operations with a root."""


def is_flat(operation: str) -> bool:
    """True if the shape of x does not matter to the operation, if it has no weights."""
    return MEANING[operation].moves in ("all_reduce", "broadcast") or operation == "reduce"


def layouts(operation: str, count: int) -> list[layout.Layout]:
    """The layouts of the `count` global tensors that an operation takes: x, the weights, the operand h."""
    if operation not in MEANING:
        raise LayoutError(f"unknown operation {quoted(operation, MEANING)}; known: {', '.join(MEANING)}")
    meaning = MEANING[operation]
    weights = count - 1 - (meaning.operand is not None)
    if weights != (meaning.weight is not None) and not (operation.endswith("_many") and weights > 0):
        names = ["x", *["w"] * (meaning.weight is not None), *["h"] * (meaning.operand is not None)]
        raise LayoutError(f"{operation} takes {', '.join(names)}; got {count} tensor{'s' * (count != 1)}")
    expected = [meaning.x, *[meaning.weight] * weights, meaning.operand]
    return [wanted for wanted in expected if wanted is not None]
