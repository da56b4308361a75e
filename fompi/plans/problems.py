"""The Problem: an operation with the shapes and dtypes of its operands, and the buffers that each rank has for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import index
from typing import Any, ClassVar, NamedTuple

from fompi.base.errors import DtypeError, LayoutError, PlanError, ShapeError, quoted
from fompi.base.layout import HALF, MOVED_ONLY, Sizes, Symbol, accumulator, offsets, split
from fompi.base.wires import wire_of
from fompi.plans.kernels import REDUCTIONS, Value
from fompi.plans.meaning import AXES, MEANING, ROOTED, VARIANTS, is_flat
from fompi.plans.plan import Program, Workspace
from fompi.plans.tree import Canonical


class Form(NamedTuple):
    """The shape and dtype of the tensor of one rank. In a problem the first dimension counts the rows."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Weight:
    """The weight w of y = x @ w (+ b). It has `columns` columns."""

    columns: int
    bias: bool = False


@dataclass(frozen=True)
class Gradient:
    """The gradient g = gathered.T @ h, or h.T @ gathered if `flipped`. `row` is the shape of one row of h."""

    row: tuple[int, ...]
    flipped: bool = False


@dataclass(frozen=True)
class Problem:
    """An operation on `size` ranks, without the number of rows. It is the key of every cache.

    `row` is the shape of one row of x. `keep` is true if the gathered rows are a result. `packed` is true if x is
    strided and must be packed first. `moves` is the collective that moves the rows. A single weight is called w;
    several are called w0, w1, ... The names of biases, products and gradients follow the same rule. `op` is the
    reduction over the ranks (`kernels.REDUCTIONS`).

    `columns` is not empty where columns travel (`Meaning.deals`). Without weights `columns[r]` is how much of
    the first dimension of a row of x rank r gets. The inputs are the columns of x for each rank: x0, x1, ... With a
    weight it is how many columns rank r has of the product, or of x. The weight is cut to fit them: w0, w1, ... Where x
    is cut so, `row` has the columns of all ranks.

    `experts` is not empty where rows go to experts: rank r has `experts[r]` of them. Its weight and its gradient are
    tensors with a matrix for each.

    `over_x` is true if the result is written over x (`plans.over_x`). `wire` is the form in which messages carry
    elements (`base.wires`); empty: as they are. `order` is the order in which terms of several ranks are added
    (`plans.tree`); empty: that of the schedule. In an order of leaves (`Canonical`) a product that is summed has
    `piece` elements of the contraction in a leaf, and where ranks have several subtrees, each is an input of its own:
    x0, w0, x1, w1, ...
    """

    operation: str
    size: int
    dtype: str
    row: tuple[int, ...]
    weights: tuple[Weight, ...] = ()
    gradients: tuple[Gradient, ...] = ()
    keep: bool = False
    root: int = 0
    packed: bool = False
    op: str = "sum"
    columns: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    over_x: bool = False
    wire: str = ""
    order: str = ""
    piece: int = 0

    @cached_property
    def moves(self) -> str:
        return MEANING[self.operation].moves

    @property
    def sums(self) -> bool:
        """True if terms of several ranks travel and are summed."""
        return self.moves in ("reduce_scatter", "all_reduce") and not self.columns

    @property
    def exchanges(self) -> bool:
        """True if each block has one destination: no rank needs what another one gets."""
        return self.moves == "all_to_all" or bool(self.columns)

    @cached_property
    def deals_x(self) -> bool:
        """True if the columns of x are dealt to the ranks, and nothing is multiplied. They are packed in any case."""
        return bool(self.columns) and not self.weights

    @cached_property
    def deals_product(self) -> bool:
        """True if columns are dealt to the ranks before or behind a product."""
        return bool(self.columns) and bool(self.weights)

    @cached_property
    def canonical(self) -> Canonical | None:
        """The order, if it has leaves."""
        return Canonical.of(self.order)

    @cached_property
    def terms(self) -> tuple[tuple[int, ...], ...]:
        """What each rank has of a sum: how many leaves each of its subtrees has. Without leaves it has one term."""
        return ((1,),) * self.size if self.canonical is None else self.canonical.subtrees(self.size)

    @cached_property
    def is_split(self) -> bool:
        """True if a rank has several terms of a sum."""
        return self.sums and max(map(len, self.terms)) > 1

    def kernel(self, name: str, leaves: int = 1) -> str:
        """The kernel `name` of a product, in the order of the sum."""
        if self.order and name == "gradient":
            return "gradient1"
        return name.replace("matmul", f"matmul{leaves}") if self.canonical else name

    def cut(self, tensors: Mapping[str, Any], rank: int = 0) -> dict[str, Any]:
        """`tensors` by the names of the inputs: where columns are dealt, x or the weight becomes its pieces.

        So do x and w of a product where the rank has several terms.
        """
        given = dict(tensors)
        if self.is_split and self.weights and "x" in given:
            x, w = given.pop("x"), given.pop("w")
            for j, (a, b) in enumerate(pairwise(offsets(self.piece * n for n in self.terms[rank]))):
                given |= {f"x{j}": x[..., a:b], f"w{j}": w[a:b]}
        for name in [name for name in self.whole_shapes if name in given]:
            tensor, ends = given.pop(name), offsets(self.columns)
            pieces = [slice(*run) for run in pairwise(ends)]
            by_rows = name == "bias" or (name == "w" and not self.multiplies_first)
            given |= {f"{name}{r}": tensor[piece] if by_rows else tensor[:, piece] for r, piece in enumerate(pieces)}
        return given

    @cached_property
    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of which `cut` makes pieces, with their shapes. Of x it is the shape of a row."""
        if not self.columns:
            return {}
        if self.deals_x:
            return {"x": self.row}
        n = self.weights[0].columns
        biased = self.weights[0].bias and self.multiplies_first
        return {"w": (self.row[-1], n)} | ({"bias": (n,)} if biased else {})

    @cached_property
    def runs(self) -> int:
        """How many runs of rows a pair of ranks has: one for each expert, as many as a rank has at most."""
        return max(self.experts, default=1)

    @cached_property
    def multiplies_first(self) -> bool:
        return MEANING[self.operation].family == "scatter" and bool(self.weights)

    @cached_property
    def flat(self) -> bool:
        """True if the shape of x does not matter. Then each element of x is a row."""
        return is_flat(self.operation) and not self.weights

    def is_empty(self, symbol: Symbol) -> bool:
        """True for blocks that never have rows, because only the root sends or receives them."""
        if self.operation == "reduce":
            return symbol[0] == "rows" and symbol[1] != self.root
        at = {"scatter": 1, "gather": 2}.get(self.operation)  # a pair is (source, dest)
        return at is not None and symbol[0] == "pair" and symbol[at] != self.root

    def spread(self, rows: Sequence[int]) -> Sizes:
        """The sizes of a call in which rank r has `rows[r]` rows of x, or owns `rows[r]` rows of the result."""
        size, root = self.size, self.root
        if self.operation == "reduce":
            return Sizes(at_root(root, size, sum(rows)))
        if self.operation == "gather":
            return Sizes(pairs=tuple(at_root(root, size, n) for n in rows))
        if self.operation == "scatter":
            return Sizes(pairs=tuple(tuple(rows) if r == root else (0,) * size for r in range(size)))
        if self.experts:
            return Sizes.grouped(self.even_runs(r, n) for r, n in enumerate(rows))
        if self.moves == "all_to_all":
            return Sizes(pairs=tuple(split(n, size) for n in rows))
        return Sizes(rows=tuple(rows))

    def grouped(self, counts: Any) -> Sizes:
        """The sizes of a call with the rows `counts[source][dest][expert]`. Raises ShapeError if they do not fit."""
        ranks, first = range(self.size), self.multiplies_first
        wanted = [[self.experts[source if first else dest] for dest in ranks] for source in ranks]
        form = f"rows[source][dest][expert], for {self.size} ranks with {list(self.experts)} experts"
        try:
            table = [[tuple(map(index, run)) for run in row] for row in counts]
        except TypeError as error:
            raise ShapeError(f"counts must be {form}: {error}") from None
        least = min((n for row in table for run in row for n in run), default=0)
        if [[*map(len, row)] for row in table] != wanted or least < 0:
            raise ShapeError(f"counts must be {form}, not {counts}")
        return Sizes.grouped(table)

    def even_runs(self, rank: int, rows: int) -> tuple[tuple[int, ...], ...]:
        """`rows` rows of a rank, as even as possible over the runs that it has for each rank."""
        if self.multiplies_first:
            mine = self.experts[rank]
            return tuple(split(n, mine) if mine else () for n in split(rows, self.size))
        runs, ends = split(rows, sum(self.experts)), offsets(self.experts)
        return tuple(runs[a:b] for a, b in pairwise(ends))

    def result_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """The shape of the result of a flat problem, for x of this shape. Of a reduce only the root has rows."""
        return shape if self.operation != "reduce" or rank == self.root else (0, *shape[1:])

    @property
    def half(self) -> bool:
        return self.dtype in HALF

    @property
    def accumulator(self) -> str:
        return accumulator(self.dtype)

    @property
    def sent_row(self) -> tuple[int, ...]:
        """The shape of one row that is sent. Of columns, the widest one."""
        if self.columns:
            return self.columns_row(self.columns.index(max(self.columns)))
        return self.product_row(0) if self.multiplies_first else self.row

    def columns_row(self, rank: int) -> tuple[int, ...]:
        """The shape of the columns of one row that `rank` gets, or has."""
        return (*self.row[:-1], self.columns[rank]) if self.weights else (self.columns[rank], *self.row[1:])

    def result_row(self, rank: int) -> tuple[int, ...]:
        """The shape of one row of the (first) result with rows on `rank`."""
        if self.deals_x or (self.deals_product and self.multiplies_first):
            return self.columns_row(rank)
        return self.product_row(0) if self.weights else self.row

    def product_row(self, i: int) -> tuple[int, ...]:
        return (*self.row[:-1], self.weights[i].columns)

    def gradient_shape(self, i: int) -> tuple[int, int]:
        left, right = self.row[-1], self.gradients[i].row[-1]
        return (right, left) if self.gradients[i].flipped else (left, right)

    def name(self, kind: str, i: int) -> str:
        """The buffer name of the i-th weight w, bias, product y, operand h or gradient g."""
        count = len(self.gradients) if kind in "hg" else len(self.weights)
        return kind if count <= 1 else f"{kind}{i}"

    @property
    def kept(self) -> str:
        """The name of the result that holds the gathered rows: `y`, or `x_full` if there are products or gradients."""
        return "x_full" if self.weights or self.gradients else self.result

    @property
    def result(self) -> str:
        """The name of the result of a problem without products."""
        return "x" if self.over_x else "y"

    @property
    def replicated(self) -> str:
        """The name of the result that all ranks get alike. Empty: there is none."""
        if self.moves in ("all_reduce", "broadcast"):
            return self.result
        kept = self.keep or not (self.weights or self.gradients)
        return self.kept if self.moves == "all_gather" and kept and not self.columns else ""

    @property
    def axes(self) -> tuple[str, str]:
        """The axis of x and the axis of the results with rows."""
        return AXES[self.moves]

    def workspace(self, rank: int, parts: int) -> Workspace:
        """The input and output buffers of one rank."""
        work = Workspace(rank, self.size, parts, self.experts[rank] if self.experts else 0)
        here, there = self.axes
        whole = "experts" if self.experts else "whole"
        if self.columns:
            self._add_dealt(work, rank)
            work.add("y", "output", there, self.result_row(rank), self.dtype)
            return work
        if self.is_split:
            self._add_terms(work, rank)
        else:
            work.add("x", "inout" if self.over_x else "input", here, self.row, self.dtype)
        for i, weight in enumerate(self.weights):
            if not self.is_split:
                work.add(self.name("w", i), "input", whole, (self.row[-1], weight.columns), self.dtype)
            if weight.bias:
                work.add(self.name("bias", i), "input", "whole", (weight.columns,), self.dtype)
        for i, gradient in enumerate(self.gradients):
            work.add(self.name("h", i), "input", there, gradient.row, self.dtype)
        if (self.keep or not (self.weights or self.gradients)) and not self.over_x:
            work.add(self.kept, "output", there, self.row, self.dtype)
        for i in range(len(self.weights)):
            work.add(self.name("y", i), "output", there, self.product_row(i), self.dtype)
        for i in range(len(self.gradients)):
            work.add(self.name("g", i), "output", whole, self.gradient_shape(i), self.dtype)
        return work

    def _add_terms(self, work: Workspace, rank: int) -> None:
        """The inputs where a rank has several terms of a sum."""
        for j, leaves in enumerate(self.terms[rank]):
            row = (*self.row[:-1], self.piece * leaves) if self.weights else self.row
            work.add(f"x{j}", "input", self.axes[0], row, self.dtype)
            if self.weights:
                work.add(f"w{j}", "input", "whole", (row[-1], self.weights[0].columns), self.dtype)

    def _add_dealt(self, work: Workspace, rank: int) -> None:
        """The inputs where columns are dealt."""
        here, ranks = self.axes[0], range(self.size)
        if self.deals_x:
            for dest in ranks:
                work.add(f"x{dest}", "input", here, self.columns_row(dest), self.dtype)
            return
        weight, first = self.weights[0], self.multiplies_first
        work.add("x", "input", here, self.row if first else self.columns_row(rank), self.dtype)
        for r, n in enumerate(self.columns):
            work.add(f"w{r}", "input", "whole", (self.row[-1], n) if first else (n, weight.columns), self.dtype)
        for name, n in self.biases.items():
            work.add(name, "input", "whole", (n,), self.dtype)

    @cached_property
    def biases(self) -> dict[str, int]:
        """The biases where columns are dealt, and their lengths: one for each piece of the product, or one."""
        if not (self.deals_product and self.weights[0].bias):
            return {}
        if self.multiplies_first:
            return {f"bias{r}": n for r, n in enumerate(self.columns)}
        return {"bias": self.weights[0].columns}

    @cached_property
    def common(self) -> str:
        """What must be equal on all ranks: everything about the data that is sent."""
        dealt = f"{self.columns} {self.experts}"
        if not self.multiplies_first:
            return f"{self.operation} {self.dtype} {self.row} {self.root} {self.op} {dealt}{self.wire}{self.order}"
        order = f"{self.order} {self.piece}" if self.piece else self.order
        return f"{self.operation} {self.dtype} {self.sent_row} {self.weights[0].bias} {dealt}{self.wire}{order}"

    @cached_property
    def _hash(self) -> int:
        return hash(
            (self.operation, self.size, self.dtype, self.row, self.weights, self.gradients, self.keep, self.packed)
        )

    def __hash__(self) -> int:  # every call looks a Problem up, so the hash is computed once
        return self._hash

    def __str__(self) -> str:
        parts = [f"{self.dtype}[:, {', '.join(map(str, self.row))}]" if self.row else f"{self.dtype}[:]"]
        parts += [f"w[{self.row[-1]}, {w.columns}]{' + b' if w.bias else ''}" for w in self.weights]
        parts += [f"h[:, {', '.join(map(str, g.row))}]{' flipped' if g.flipped else ''}" for g in self.gradients]
        parts += ["keep"] * self.keep + [f"root {self.root}"] * (self.operation in ROOTED)
        parts += [self.op] * (self.op != "sum")
        parts += [f"columns {', '.join(map(str, self.columns))}"] * bool(self.columns)
        parts += [f"experts {', '.join(map(str, self.experts))}"] * bool(self.experts)
        parts += [f"wire {self.wire}"] * bool(self.wire)
        parts += [f"order {self.order}"] * bool(self.order)
        return f"{self.operation}({', '.join(parts)}{', packed' * self.packed}{', over x' * self.over_x})"


def keywords(problem: Problem) -> dict[str, Any]:
    """The keywords of a call that say how its messages travel and its sums add."""
    return {"wire": problem.wire or None, "order": problem.order or "any"}


def without_wire(problem: Problem) -> Problem:
    """The problem with messages as they are."""
    return replace(problem, wire="")


def on_wire(problem: Problem, name: str) -> Problem:
    """The problem with messages on this wire. Raises DtypeError if its elements, or their reduction, take none."""
    wire = wire_of(name, problem.dtype)
    if wire and problem.op not in ("sum", "mean"):
        raise DtypeError(f"wire={name!r}: op={problem.op!r} takes no wire, only sums and means do")
    return replace(problem, wire=wire) if wire else problem


ORDERS = ("any", "ranks")
"""Of the terms of a sum: that of the schedule, or the tree over the ranks (`plans.tree`). Or it is a `Canonical`."""


def order_of(order: Any) -> str:
    """The name of an order. Raises PlanError if there is no such order."""
    if isinstance(order, Canonical):
        return str(order)
    if isinstance(order, str) and (order in ORDERS or Canonical.of(order)):
        return order
    written = quoted(order, (*ORDERS, "canonical(8)"))
    raise PlanError(f"order={written} must be one of 'any', 'ranks', 'canonical(8)' or fompi.Canonical(8)")


def in_order(problem: Problem, order: str, rank: int = 0) -> Problem:
    """The problem whose sums have this order. What has no sums stays as it is. `rank` has tensors of these shapes.

    Raises PlanError for another order, and where it cannot be kept.
    """
    canonical = Canonical.of(order_of(order))
    multiplies = bool(problem.weights) and canonical is not None
    if order == "any" or not (problem.sums or problem.gradients or multiplies):
        return problem
    if problem.wire:
        raise PlanError(f"order={order!r}: messages with the wire {problem.wire} have no order yet")
    if problem.experts:
        raise PlanError(f"order={order!r}: {problem.operation} has no such order yet")
    ordered = replace(problem, order=order)
    return ordered if canonical is None else _canonical(ordered, canonical, rank)


def _canonical(problem: Problem, canonical: Canonical, rank: int) -> Problem:
    operation, order = problem.operation, problem.order
    if problem.columns:
        raise PlanError(f"order={order}: {operation} has no such order yet")
    if not (problem.weights or problem.gradients):
        if problem.op == "mean":
            raise PlanError(f"order={order}: op='mean' divides by the ranks; use op='sum', and divide by the leaves")
        if problem.half:
            raise DtypeError(f"order={order}: sums of leaves are kept in float32: {operation} takes no {problem.dtype}")
    elif problem.dtype.startswith("complex"):
        raise DtypeError(f"order={order}: {operation} has no product of {problem.dtype} in this order")
    if not problem.sums:
        return problem
    mine = canonical.counts(problem.size)[rank]
    if not problem.weights:
        return problem
    if problem.row[-1] % mine:
        raise ShapeError(
            f"order={order}: rank {rank} has {mine} of {canonical.leaves} leaves, equal parts of the contraction; "
            f"{operation} has {problem.row[-1]} columns of x there, which {mine} does not divide"
        )
    return replace(problem, piece=problem.row[-1] // mine)


@dataclass(frozen=True)
class OwnProblem:
    """A problem that states its own buffers and results: what is computed is no collective.

    A subclass says which buffers each rank must have, what the inputs are, and what the outputs must hold at the end.
    """

    operation: str
    size: int
    dtype: str

    row: ClassVar[tuple[int, ...]] = ()
    weights: ClassVar[tuple[Weight, ...]] = ()
    gradients: ClassVar[tuple[Gradient, ...]] = ()
    columns: ClassVar[tuple[int, ...]] = ()
    experts: ClassVar[tuple[int, ...]] = ()
    runs: ClassVar[int] = 1
    exchanges: ClassVar[bool] = False
    multiplies_first: ClassVar[bool] = False
    flat: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    wire: ClassVar[str] = ""
    order: ClassVar[str] = ""
    is_split: ClassVar[bool] = False
    replicated: ClassVar[str] = ""
    root: ClassVar[int] = 0
    op: ClassVar[str] = "sum"

    @property
    def moves(self) -> str:
        return self.operation

    def is_empty(self, symbol: Symbol) -> bool:
        return False

    def cut(self, tensors: Mapping[str, Any], rank: int = 0) -> dict[str, Any]:
        return dict(tensors)

    def result_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        return shape

    @property
    def half(self) -> bool:
        return self.dtype in HALF

    @property
    def accumulator(self) -> str:
        return accumulator(self.dtype)

    def workspace(self, rank: int, parts: int) -> Workspace:
        """The input and output buffers of one rank."""
        raise NotImplementedError

    def before(self, program: Program) -> dict[tuple[str, int], Value]:
        """The values of the inputs of a rank. Each block is a term of its own."""
        inputs = [b for b in program.buffers if b.role == "input"]
        return {(b.name, i): ((b.name, program.rank, i),) for b in inputs for i in range(b.first, b.first + b.count)}

    def after(self, rank: int, parts: int) -> dict[tuple[str, int], Value]:
        """The values that the outputs of a rank must have at the end."""
        raise NotImplementedError


def at_root(root: int, size: int, count: int) -> tuple[int, ...]:
    """`count` rows for the root, and none for the others."""
    return tuple(count if rank == root else 0 for rank in range(size))


def problem(
    operation: str,
    size: int,
    x: Form,
    weights: Sequence[Form] = (),
    biases: Sequence[Form | None] = (),
    operands: Sequence[Form] = (),
    *,
    experts: Sequence[int] = (),
    **traits: Any,
) -> Problem:
    """The Problem of `operation` on these local tensors. Raises ShapeError, DtypeError or LayoutError.

    `traits` are `keep`, `root`, `packed`, `op` and `columns` of the Problem, and `flipped` of its gradients. With
    `columns` rank r gets `columns[r]` of the second dimension of x, or of the columns of a product, or has `columns[r]`
    of those of x. In the last case x is that of all ranks together: it has all columns. With `experts` rank r has
    `experts[r]` of them, and a weight has a matrix for each.
    """
    if operation not in MEANING:
        raise LayoutError(f"unknown operation {quoted(operation, MEANING)}; known: {', '.join(MEANING)}")
    op, columns = traits.get("op", "sum"), tuple(traits.get("columns", ()))
    if op != "sum" and op not in tuple(REDUCTIONS):
        raise LayoutError(f"{operation}: op={quoted(op, REDUCTIONS)} must be one of {', '.join(REDUCTIONS)}")
    meaning = MEANING[operation]
    row = _row_of(operation, x, bool(weights or operands), not weights and is_flat(operation))
    for i, h in enumerate(operands):
        if len(h.shape) < 2:
            name = argument("h", i, len(operands))
            raise ShapeError(
                f"{operation}: {name} has the shape {h.shape}, but needs as many dimensions as x {x.shape}"
            )
    for name, given, taken in (("columns", columns, meaning.deals), ("experts", experts, meaning.grouped)):
        if bool(given) != taken:
            raise LayoutError(f"{operation} {'needs' if taken else 'takes no'} {name}=")
    if columns:
        traits["columns"] = columns
    if experts:
        _check_experts(operation, size, row, weights, biases, experts)
        weights, traits["experts"] = [Form(w.shape[1:], w.dtype) for w in weights], tuple(experts)
    operand_rows = operands and tuple(Form(h.shape[1:], h.dtype) for h in operands)
    return _problem(operation, size, row, x.dtype, tuple(weights), tuple(biases), tuple(operand_rows), **traits)


known_problem = lru_cache(maxsize=1024)(problem)
"""`problem` of the same arguments, all of them tuples or strings."""


def _row_of(operation: str, x: Form, multiplies: bool, flat: bool) -> tuple[int, ...]:
    """The shape of a row of x. `flat`: each element is a row."""
    if flat:
        row: tuple[int, ...] = ()
    elif x.shape:
        row = x.shape[1:]
    else:
        raise ShapeError(f"{operation}: x has no dimensions, so it has no rows to distribute")
    if multiplies and not row:
        raise ShapeError(f"{operation}: x has the shape {x.shape}, but needs two dimensions or more: (rows, ..., k)")
    return row


def argument(kind: str, i: int, count: int) -> str:
    """What messages call the i-th of `count` weights w, biases, or operands h of a call."""
    return kind if count == 1 else f"{_SEVERAL[kind]}[{i}]"


_SEVERAL = {"w": "ws", "bias": "biases", "h": "hs"}


def _check_experts(
    operation: str,
    size: int,
    row: tuple[int, ...],
    weights: Sequence[Form],
    biases: Sequence[Form | None],
    experts: Sequence[int],
) -> None:
    if len(experts) != size or min(experts) < 0 or not sum(experts):
        raise LayoutError(f"{operation} on {size} ranks takes no rows for experts {list(experts)}")
    if any(bias is not None for bias in biases):
        raise LayoutError(f"{operation}: experts have no bias; add it to the rows of each expert afterwards")
    for w in weights:
        if len(w.shape) != 3:
            raise ShapeError(f"{operation}: w needs the shape (experts of this rank, {row[-1]}, n), not {w.shape}")


@lru_cache(maxsize=4096)
def _problem(
    operation: str,
    size: int,
    row: tuple[int, ...],
    dtype: str,
    weights: tuple[Form, ...],
    biases: tuple[Form | None, ...],
    operands: tuple[Form, ...],
    flipped: bool = False,
    **traits: Any,
) -> Problem:
    """The Problem of these shapes of rows. Calls that differ only in the number of rows share one object."""
    alone, meaning = Problem(operation, size, dtype, row, **traits), MEANING[operation]  # without weights and gradients
    if bool(weights) != (meaning.weight is not None) or len(biases) > len(weights):
        raise ShapeError(f"{operation} does not take {len(weights)} weights and {len(biases)} biases")
    if meaning.moves in ("reduce_scatter", "all_reduce") and not alone.columns:
        _check_reduction(operation, alone.op, dtype)
    if dtype in MOVED_ONLY and (weights or operands):
        wider = "an integer dtype" if dtype == "bool" else "a half type"
        raise DtypeError(f"{operation}: {dtype} cannot be multiplied; convert x to {wider}")
    if not 0 <= alone.root < size:
        raise LayoutError(f"{operation}: root={alone.root} must be a rank from 0 to {size - 1}")
    for kind, forms in (("w", weights), ("bias", biases), ("h", operands)):
        for i, given in enumerate(forms):
            if given is not None and given.dtype != dtype:
                name = argument(kind, i, len(forms))
                raise DtypeError(f"{operation}: x is {dtype}, but {name} is {given.dtype}; convert one of them")
    multiplied = _weights_of(alone, weights, biases)
    for h in operands:
        if len(h.shape) != len(row) or h.shape[:-1] != row[:-1]:
            raise ShapeError(f"{operation}: rows of x {row} and of h {h.shape} may differ only in the last dimension")
    made = replace(alone, weights=multiplied, gradients=tuple(Gradient(h.shape, flipped) for h in operands))
    if made.columns:
        _check_columns(made)
    return replace(made, packed=False) if made.deals_x else made


def _weights_of(alone: Problem, weights: Sequence[Form], biases: Sequence[Form | None]) -> tuple[Weight, ...]:
    """The weights of a problem that has none yet. Raises ShapeError if they or their biases do not fit."""
    operation, row, made = alone.operation, alone.row, []
    for i, w in enumerate(weights):
        if len(w.shape) != 2 or w.shape[0] != row[-1]:
            other = (
                f". For experts: fompi.{VARIANTS[operation][1]}" if len(w.shape) == 3 and operation in VARIANTS else ""
            )
            raise ShapeError(
                f"{operation}: x has {row[-1]} columns, so {argument('w', i, len(weights))} needs the shape "
                f"({row[-1]}, n), not {w.shape}{other}"
            )
        bias = biases[i] if i < len(biases) else None
        if bias is not None and bias.shape != w.shape[1:]:
            raise ShapeError(f"{operation}: the bias of w {w.shape} needs the shape {w.shape[1:]}, not {bias.shape}")
        made.append(Weight(w.shape[1], bias is not None))
    return tuple(made)


def _check_columns(made: Problem) -> None:
    """Raise LayoutError if the columns are not those that are dealt, on all ranks together."""
    if made.multiplies_first:
        dealt: tuple[int, ...] = (made.weights[0].columns,)
    else:
        dealt = made.row[-1:] if made.weights else made.row[:1]
    if len(made.columns) != made.size or (sum(made.columns),) != dealt:
        words = f"of rows {made.row} on {made.size} ranks cannot split columns {list(made.columns)}"
        raise LayoutError(f"{made.operation} {words}")


def _check_reduction(operation: str, op: str, dtype: str) -> None:
    """Raise DtypeError if `dtype` has no reduction `op`."""
    if dtype == "bool" and op in ("max", "min"):
        return
    if dtype in MOVED_ONLY:
        wider = 'an integer dtype, or use op="max" (any) or "min" (all)' if dtype == "bool" else "a half type"
        verb = {"sum": "summed", "mean": "averaged", "prod": "multiplied"}.get(op, "compared")
        raise DtypeError(f"{operation}: {dtype} cannot be {verb}; convert x to {wider}")
    if dtype.startswith("complex") and op in ("max", "min"):
        raise DtypeError(f"{operation}: {dtype} has no order, so op={op!r} has no meaning: reduce its parts or abs(x)")
    if "int" in dtype and op == "mean":
        raise DtypeError(f'{operation}: the mean of {dtype} is not an integer: use op="sum", or convert x to a float')
