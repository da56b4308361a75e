"""The kernels by name: what each one computes, on values without data, and what it costs.

| kernel                       | means                                                                |
|------------------------------|----------------------------------------------------------------------|
| `copy(a) -> c`               | c = a, in the dtype of c                                             |
| `pack(a) -> c`               | c = a, where a is strided and c is contiguous                        |
| `download(a) -> c`           | c = a, where a is on a device and c is in host memory                |
| `upload(a) -> c`             | c = a, where a is in host memory and c is on a device                |
| `add(a, b) -> c`             | c = a + b                                                            |
| `max(a, b) -> c`             | c = maximum of a and b in each element; NaN if one of them is        |
| `min(a, b) -> c`             | c = minimum of a and b in each element; NaN if one of them is        |
| `prod(a, b) -> c`            | c = a * b in each element                                            |
| `mean4(a, b) -> c`           | c = (a + b) / 4, and the same with other numbers                     |
| `matmul(x, w) -> y`          | y = x @ w, over the last dimension of x                              |
| `matmul_bias(x, w, b) -> y`  | y = x @ w + b                                                        |
| `matmul_add(x, c, w) -> y`   | y = c + x @ w                                                        |
| `gradient(a, h) -> g`        | g = a.T @ h, summed over the rows (and all but the last dimensions)  |
| `gradient_add(a, h, g) -> g` | g = g + a.T @ h                                                      |

Where a sum has an order that no cut changes (`plans.tree.Canonical`), products are chains along the contraction:

| kernel                        | means                                                               |
|-------------------------------|---------------------------------------------------------------------|
| `matmul4(x, w) -> y`          | y = x @ w: 4 equal parts of the contraction, each from its first    |
|                               | element to its last, added in a tree; the same with other numbers   |
| `matmul4_bias(x, w, b) -> y`  | the same, where the first part begins with b                        |
| `gradient1(a, h) -> g`        | g = a.T @ h, from the first row to the last                         |

Where messages carry fewer bits (`fompi.base.wires`), each wire W has kernels on one block. m is its form on the wire:

| kernel                       | means                                                                |
|------------------------------|----------------------------------------------------------------------|
| `encode_W(a) -> m`           | m = a, rounded to the wire                                           |
| `decode_W(m) -> c`           | c = m                                                                |
| `decode_add_W(m, b) -> c`    | c = m + b                                                            |

Where rows go to experts, w and g have a matrix for each expert. The i-th chunk of rows belongs to the i-th of them:

| kernel                                        | means                                               |
|-----------------------------------------------|-----------------------------------------------------|
| `matmul_grouped(x0, x1, w) -> y0, y1`         | y0 = x0 @ w[0], y1 = x1 @ w[1]                      |
| `gradient_grouped(a0, a1, h0, h1) -> g`       | g[0] = a0.T @ h0, g[1] = a1.T @ h1                  |
| `gradient_grouped_add(a0, a1, h0, h1, g) -> g`| g[0] += a0.T @ h0, g[1] += a1.T @ h1                |

A plan may declare other kernels (`plan.UserKernel`). Their results are opaque: each is one term (kernel, arguments,
operands, number of the output).

Rows may be in several chunks: `matmul(x[0], x[4], w[0]) -> y[0], y[4]` is one call on two runs of rows. Half types are
computed in float32 and rounded when the result is written.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import total_ordering
from hashlib import blake2b
from math import prod
from typing import Any, NamedTuple, TypeVar

from fompi.base.errors import PlanError, quoted
from fompi.base.wires import WIRES
from fompi.plans.dependencies import divisor
from fompi.plans.plan import Chunk, Compute

Term = tuple[Any, ...]
Value = tuple[Term, ...]
"""The content of a block, without data. A block is a sum; this is the sorted multiset of its terms."""

T = TypeVar("T")


def total(*values: Value) -> Value:
    """The sum of `values`."""
    return tuple(sorted(term for value in values for term in value))


def product(name: str, a: Value, b: Value) -> Value:
    """The product of a and b. It is linear in both operands, so it distributes over their terms."""
    return tuple(sorted((name, s, t) for s in a for t in b))


@total_ordering
class Operands:
    """The values that an opaque kernel has read. They are hashed once, because they contain the terms of all before.

    Two are equal if their hashes of 128 bits are equal.
    """

    __slots__ = ("_exact", "digest", "values")

    def __init__(self, values: Sequence[Value]):
        self.values = tuple(values)
        self.digest = blake2b(repr(self.values).encode(), digest_size=16).hexdigest()
        self._exact: tuple[Operands, int] | None = None

    def exact(self) -> tuple[Operands, int]:
        """What the values would be without rounding, and how often a term was rounded at most between two kernels.

        It is kept, because the values of many kernels contain those of one.
        """
        if self._exact is None:
            values, times = zip(*map(exact, self.values), strict=True) if self.values else ((), (0,))
            self._exact = Operands(values), max(times)
        return self._exact

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Operands) and self.digest == other.digest

    def __lt__(self, other: Operands) -> bool:
        return self.digest < other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return self.digest


def opaque(kernel: str, args: tuple[int, ...], operands: Sequence[Value], output: int) -> Term:
    """What an opaque kernel writes as its output number `output`."""
    return (kernel, args, Operands(operands), output)


def reduced(op: str, values: Sequence[Value]) -> Value:
    """The reduction of all `values` by `op` of `REDUCTIONS`. The reduction of one value is that value."""
    if op == "sum" or len(values) == 1:
        return total(*values)
    if op == "mean":
        return mean_of(len(values), total(*values))
    return functools.reduce(lambda a, b: _combined(op, a, b), values)


def _combined(op: str, a: Value, b: Value) -> Value:
    """a op b as one term: the op and the sorted multiset of the values that it combines."""
    parts = [v[0][1] if len(v) == 1 and v[0][0] == op and len(v[0]) == 2 else (v,) for v in (a, b)]
    return ((op, tuple(sorted((*parts[0], *parts[1])))),)


def mean_of(count: int, value: Value) -> Value:
    """A sum of `count` terms, divided by their number."""
    return ((f"mean{count}", (value,)),)


ORDERED_PAIRS = {"add": "+", "max": "max in order", "min": "min in order", "prod": "* in order"}
"""The names of terms that keep the order of their two operands, by the kernel that has combined these."""


def ordered_pair(op: str, a: Value, b: Value) -> Value:
    """a op b, as one term that keeps the order: where a sum must be a certain tree (`fompi.plans.tree`)."""
    return ((ORDERED_PAIRS[REDUCTIONS[op]], (a, b)),)


def is_opaque(term: Term) -> bool:
    return len(term) == 4 and isinstance(term[2], Operands)


_ROUNDED = "rounded"


def rounded(value: Value, at: tuple[int, int]) -> Value:
    """`value` as the op `at` (rank, op) has rounded it: one term, even if it was a sum of several.

    Two such values have the same bits if they are equal: one op has written them.
    """
    return ((_ROUNDED, at, value),)


def is_rounded(value: Value) -> bool:
    """True if the value is what one op has rounded, and nothing else."""
    return len(value) == 1 and value[0][0] == _ROUNDED


def exact(value: Value) -> tuple[Value, int]:
    """What the value would be without rounding, and how often a term of it was rounded at most.

    What an opaque kernel has written is a term of its own: roundings count from one such kernel to the next.
    """
    found = [each for term in value for each in _exact(term)]
    most = max((times for _, times in found), default=0)
    return tuple(sorted(term for term, _ in found)), max(most, *map(_before, value)) if value else most


def _before(term: Term) -> int:
    """How often a term was rounded at most before opaque kernels that this one comes from."""
    if term[0] == _ROUNDED:
        return max(map(_before, term[2]), default=0)
    return term[2].exact()[1] if is_opaque(term) else 0


def _exact(term: Term) -> list[tuple[Term, int]]:
    if term[0] == _ROUNDED:
        return [(inner, times + 1) for part in term[2] for inner, times in _exact(part)]
    if is_opaque(term):
        return [((term[0], term[1], term[2].exact()[0], term[3]), 0)]
    if len(term) == 2:  # a reduction of values
        values, times = zip(*map(exact, term[1]), strict=True)
        whole = ((term[0], tuple(values)),) if divisor(term[0]) else reduced(term[0], values)
        return [(inner, max(times)) for inner in whole]
    if len(term) == 3 and isinstance(term[1], tuple):  # a product
        pairs = [(a, b) for a in _exact(term[1]) for b in _exact(term[2])]
        return [((term[0], a, b), max(m, n)) for (a, m), (b, n) in pairs]
    return [(term, 0)]


def is_result(value: Value) -> bool:
    """True if the value was computed, as a sum or a product. False if it is an unchanged block of an input."""
    return len(value) != 1 or isinstance(value[0][1], tuple)


@dataclass(frozen=True)
class Kernel:
    """The operands of a kernel.

    First come `groups` lists of chunks; the lists match block by block. Then come `whole` operands without rows. The
    result has rows too, or is one whole block if the kernel `reduces`.
    """

    groups: int
    whole: int
    reduces: bool
    meaning: Callable[..., Value]

    def rows(self, reads: Sequence[T]) -> list[Sequence[T]]:
        """The operands with rows, group by group."""
        operands = reads[: len(reads) - self.whole]
        count = len(operands) // self.groups
        return [operands[i * count : (i + 1) * count] for i in range(self.groups)]

    def wholes(self, reads: Sequence[T]) -> Sequence[T]:
        """The operands without rows."""
        return reads[len(reads) - self.whole :]


MOVES = ("copy", "pack", "download", "upload")
"""Kernels that only move elements."""

KERNELS: dict[str, Kernel] = {
    **dict.fromkeys(MOVES, Kernel(1, 0, False, lambda a: a)),
    "add": Kernel(2, 0, False, total),
    **{name: Kernel(2, 0, False, functools.partial(_combined, name)) for name in ("max", "min", "prod")},
    "matmul": Kernel(1, 1, False, lambda x, w: product("matmul", x, w)),
    "matmul_bias": Kernel(1, 2, False, lambda x, w, b: total(product("matmul", x, w), b)),
    "matmul_add": Kernel(2, 1, False, lambda x, c, w: total(product("matmul", x, w), c)),
    "gradient": Kernel(2, 0, True, lambda a, h: product("gradient", a, h)),
    "gradient_add": Kernel(2, 1, True, lambda a, h: product("gradient", a, h)),
    "matmul_grouped": Kernel(1, 1, False, lambda x, w: product("matmul", x, w)),
    "gradient_grouped": Kernel(2, 0, True, lambda a, h: product("gradient", a, h)),
    "gradient_grouped_add": Kernel(2, 1, True, lambda a, h: product("gradient", a, h)),
    **{f"encode_{name}": Kernel(1, 0, False, lambda a: a) for name in WIRES},
    **{f"decode_{name}": Kernel(1, 0, False, lambda m: m) for name in WIRES},
    **{f"decode_add_{name}": Kernel(2, 0, False, total) for name in WIRES},
}

ENCODE = {f"encode_{name}": name for name in WIRES}
DECODE = {f"decode_{name}": name for name in WIRES}
DECODE_ADD = {f"decode_add_{name}": name for name in WIRES}
"""The wire of a kernel."""

OF_WIRES = {**ENCODE, **DECODE, **DECODE_ADD}
"""All kernels that read or write what is on a wire."""

GROUPED = ("matmul_grouped", "gradient_grouped", "gradient_grouped_add")
"""Kernels that take a run of rows for each expert, and the matrices of these experts."""

REDUCTIONS = {"sum": "add", "max": "max", "min": "min", "prod": "prod", "mean": "add"}
"""The reductions over the ranks, and the kernel that combines two terms. The last kernel of a mean divides too."""


def last_kernel(op: str, count: int) -> str:
    """The kernel that combines the last two of `count` terms of a reduction."""
    return f"mean{count}" if op == "mean" else REDUCTIONS[op]


@functools.lru_cache
def chains(name: str) -> int:
    """The number of parts of a product in a fixed order: 4 for `matmul4` and `matmul4_bias`. 0 for other kernels."""
    found = re.fullmatch(r"matmul([1-9]\d{0,8})(_bias)?|gradient(1)", name)
    return int(found[1] or found[3]) if found else 0


def is_known(name: str) -> bool:
    """True if fompi has a kernel of this name."""
    return name in KERNELS or divisor(name) is not None or chains(name) > 0


def find(name: str) -> Kernel:
    if name in KERNELS:
        return KERNELS[name]
    if chains(name):
        return _chain(name)
    count = divisor(name)
    if count is None:
        raise PlanError(f"unknown kernel {quoted(name, KERNELS)}; known: {', '.join(KERNELS)}, mean2, mean3, ...")
    return Kernel(2, 0, False, lambda a, b: mean_of(count, total(a, b)))


@functools.lru_cache
def _chain(name: str) -> Kernel:
    bare = name.removesuffix("_bias")
    if name == "gradient1":
        return Kernel(2, 0, True, lambda a, h: product(bare, a, h))
    if bare == name:
        return Kernel(1, 1, False, lambda x, w: product(bare, x, w))
    return Kernel(1, 2, False, lambda x, w, b: total(product(bare, x, w), b))


def gradient_in_order(terms: Sequence[Value]) -> Value:
    """The value of `gradient1`: its terms, row by row, as one term that keeps their order."""
    return (("gradient1", tuple(terms)),)


def aligned(op: Compute) -> list[Sequence[Chunk]]:
    """The lists of chunks of `op` that must have equally many rows, block by block. Empty if the op is malformed."""
    kernel = find(op.kernel)
    operands = len(op.reads) - kernel.whole
    if operands < kernel.groups or operands % kernel.groups or not op.writes:
        return []
    groups = kernel.rows(op.reads)
    return groups if kernel.reduces else [*groups, op.writes]


def fits(op: Compute, row: Callable[[Chunk], tuple[int, ...]]) -> bool:
    """True if the shapes of the operands match. `row` returns the shape of one row of a chunk."""
    kernel = find(op.kernel)
    groups = [[row(chunk) for chunk in chunks] for chunks in kernel.rows(op.reads)]
    whole = [row(chunk) for chunk in kernel.wholes(op.reads)]
    written = [row(chunk) for chunk in op.writes]
    if kernel.reduces:
        g = written[0]
        pairs = zip(*groups, strict=True)
        return all(a and h and a[:-1] == h[:-1] and g == (a[-1], h[-1]) for a, h in pairs) and whole in ([], [g])
    if not kernel.whole:
        return all(len(set(column)) == 1 for column in zip(*groups, written, strict=True))
    w, *bias = whole
    if len(w) != 2 or bias not in ([], [w[1:]]):
        return False
    pairs = zip(groups[0], written, strict=True)
    sums = groups[1:]  # what a product is added to
    return all(x and x[-1] == w[0] and y == (*x[:-1], w[1]) for x, y in pairs) and all(c == written for c in sums)


def in_place(op: Compute, read: int, write: int) -> bool:
    """True if the kernel may write its chunk number `write` over chunk number `read`. Only reductions allow this."""
    if op.kernel in REDUCTIONS.values() or divisor(op.kernel) is not None:
        return read % len(op.writes) == write
    if op.kernel == "matmul_add" or op.kernel in DECODE_ADD:
        return read == len(op.writes) + write
    return op.kernel in ("gradient_add", "gradient_grouped_add") and read == len(op.reads) - 1


def evaluate_opaque(op: Compute, read: Callable[[Chunk], list[Value]]) -> list[Value]:
    """`evaluate` for a kernel of the user. A chunk that it reads and writes is a sum, which gets one more term."""
    values = {chunk: read(chunk) for chunk in op.reads}
    operands = [value for chunk in op.reads if chunk not in op.writes for value in values[chunk]]
    read_before = Operands(operands)
    results, output = [], 0
    for chunk in op.writes:
        for before in values.get(chunk) or [()] * (chunk.stop - chunk.start):
            results.append(total(before, ((op.kernel, op.args, read_before, output),)))
            output += 1
    return results


def evaluate(
    op: Compute, read: Callable[[Chunk], list[Value]], at: tuple[int, int] = (0, 0), keeps_order: bool = False
) -> list[Value]:
    """The values of the blocks that `op` writes, in order. `read` returns the values of a chunk.

    `at` is the place of the op: (rank, op). `keeps_order`: what combines two terms keeps their order.
    """
    if keeps_order and (op.kernel in ORDERED_PAIRS or divisor(op.kernel)):
        a, b = ([value for chunk in chunks for value in read(chunk)] for chunks in find(op.kernel).rows(op.reads))
        return [_ordered_pair_of(op.kernel, *pair) for pair in zip(a, b, strict=True)]
    if op.kernel in ENCODE:
        return [rounded(value, at) for chunk in op.reads for value in read(chunk)]
    kernel = find(op.kernel)
    if op.kernel in GROUPED:
        return _evaluate_grouped(op, kernel, read)
    whole = [read(chunk)[0] for chunk in kernel.wholes(op.reads)]
    groups = [[value for chunk in chunks for value in read(chunk)] for chunks in kernel.rows(op.reads)]
    if kernel.reduces:
        terms = [kernel.meaning(*row) for row in zip(*groups, strict=True)]
        return [gradient_in_order(terms) if chains(op.kernel) else total(*terms, *whole)]
    return [kernel.meaning(*row, *whole) for row in zip(*groups, strict=True)]


def _ordered_pair_of(kernel: str, a: Value, b: Value) -> Value:
    count = divisor(kernel)
    whole: Value = ((ORDERED_PAIRS["add" if count else kernel], (a, b)),)
    return mean_of(count, whole) if count else whole


def _evaluate_grouped(op: Compute, kernel: Kernel, read: Callable[[Chunk], list[Value]]) -> list[Value]:
    """`evaluate` for a kernel that takes a chunk of rows for each expert."""
    matrices = [read(chunk) for chunk in kernel.wholes(op.reads)]
    values: list[Value] = []
    for i, chunks in enumerate(zip(*kernel.rows(op.reads), strict=True)):
        whole, blocks = [of[i] for of in matrices], zip(*map(read, chunks), strict=True)
        if kernel.reduces:
            values.append(total(*(kernel.meaning(*block) for block in blocks), *whole))
        else:
            values += [kernel.meaning(*block, *whole) for block in blocks]
    return values


Operand = tuple[tuple[int, ...], int]
"""The shape and the bytes of an operand."""


class Demand(NamedTuple):
    """The work of one call, as `Machine.kernel` takes it.

    A call computes one product for each run of rows. Each product packs the weight again.
    """

    flops: int
    nbytes: int
    packed: int = 0
    elements: int = 0
    products: int = 1


def demand(name: str, reads: Sequence[Operand], writes: Sequence[Operand]) -> Demand:
    """The work of one call on operands of these sizes."""
    kernel, packed, elements, products = find(name), 0, 0, 1
    if name.startswith(("matmul", "gradient")):
        runs, wholes = kernel.rows(reads), kernel.wholes(reads)
        factors = runs if kernel.reduces else runs[:1]
        packed = sum(nbytes for group in factors for _, nbytes in group)
        products, is_grouped = len(runs[0]), name in GROUPED
        if not kernel.reduces:  # the first whole operand is the weight; in gradient_add it is the sum so far
            packed += wholes[0][1] * (1 if is_grouped else products)
        elements = sum(prod(shape) for shape, _ in writes) * (products if kernel.reduces and not is_grouped else 1)
    operations = cost(name, [shape for shape, _ in reads], [shape for shape, _ in writes])
    return Demand(operations, sum(nbytes for _, nbytes in (*reads, *writes)), packed, elements, products)


def cost(name: str, reads: Sequence[tuple[int, ...]], writes: Sequence[tuple[int, ...]]) -> int:
    """Floating-point operations of one call on arrays of these shapes."""
    kernel = find(name)
    rows = [[prod(shape) for shape in group] for group in kernel.rows(reads)]
    if name.startswith("matmul"):
        return 2 * sum(rows[0]) * writes[0][-1]
    if name.startswith("gradient"):
        return 2 * sum(rows[0]) * reads[len(rows[0])][-1]
    return 0 if name in MOVES else sum(rows[0])
