"""The names of local work: what each kernel means, on values without data, and what it costs.

| kernel                       | means                                                                |
|------------------------------|----------------------------------------------------------------------|
| `copy(a) -> c`               | c = a, in the dtype of c                                             |
| `pack(a) -> c`               | c = a, where a is strided and c is not                               |
| `add(a, b) -> c`             | c = a + b                                                            |
| `matmul(x, w) -> y`          | y = x @ w, over the last dimension of x                              |
| `matmul_bias(x, w, b) -> y`  | y = x @ w + b                                                        |
| `gradient(a, h) -> g`        | g = a.T @ h, summed over the rows (and all but the last dimensions)  |
| `gradient_add(a, h, g) -> g` | g = g + a.T @ h                                                      |

Rows may come in several chunks: `matmul(x[0], x[4], w[0]) -> y[0], y[4]` is one call on two runs of rows. Half types
are computed in float32 and rounded when they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

from fompi.base.errors import PlanError
from fompi.plans.plan import Chunk, Compute

Term = tuple[Any, ...]
Value = tuple[Term, ...]
"""What a block holds, without data: the multiset of the terms that it is the sum of, sorted."""

T = TypeVar("T")


def total(*values: Value) -> Value:
    return tuple(sorted(term for value in values for term in value))


def product(name: str, a: Value, b: Value) -> Value:
    """Linear in both operands, so it distributes over sums."""
    return tuple(sorted((name, s, t) for s in a for t in b))


def is_result(value: Value) -> bool:
    """Whether it was computed: a sum or a product, not a block of an input as it came."""
    return len(value) != 1 or isinstance(value[0][1], tuple)


@dataclass(frozen=True)
class Kernel:
    """`groups` lists of rows that go together block by block, then `whole` operands; `reduces` to one whole block."""

    groups: int
    whole: int
    reduces: bool
    meaning: Callable[..., Value]

    def rows(self, reads: Sequence[T]) -> list[Sequence[T]]:
        """The operands that come in rows, group by group."""
        operands = reads[: len(reads) - self.whole]
        each = len(operands) // self.groups
        return [operands[i * each : (i + 1) * each] for i in range(self.groups)]

    def wholes(self, reads: Sequence[T]) -> Sequence[T]:
        """The operands that are taken whole."""
        return reads[len(reads) - self.whole :]


KERNELS: dict[str, Kernel] = {
    "copy": Kernel(1, 0, False, lambda a: a),
    "pack": Kernel(1, 0, False, lambda a: a),
    "add": Kernel(2, 0, False, total),
    "matmul": Kernel(1, 1, False, lambda x, w: product("matmul", x, w)),
    "matmul_bias": Kernel(1, 2, False, lambda x, w, b: total(product("matmul", x, w), b)),
    "gradient": Kernel(2, 0, True, lambda a, h: product("gradient", a, h)),
    "gradient_add": Kernel(2, 1, True, lambda a, h: product("gradient", a, h)),
}


def find(name: str) -> Kernel:
    if name not in KERNELS:
        raise PlanError(f"no kernel {name!r}; there are {', '.join(KERNELS)}")
    return KERNELS[name]


def aligned(op: Compute) -> list[Sequence[Chunk]]:
    """The lists of chunks of `op` whose blocks must have equal lengths, one by one. Empty: the op is malformed."""
    kernel = find(op.kernel)
    operands = len(op.reads) - kernel.whole
    if operands < kernel.groups or operands % kernel.groups or not op.writes:
        return []
    groups = kernel.rows(op.reads)
    return groups if kernel.reduces else [*groups, op.writes]


def fits(op: Compute, row: Callable[[Chunk], tuple[int, ...]]) -> bool:
    """Whether the rows of the operands have shapes that go together; `row` gives that of a chunk."""
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
    return all(x and x[-1] == w[0] and y == (*x[:-1], w[1]) for x, y in zip(*groups, written, strict=True))


def in_place(op: Compute, read: int, write: int) -> bool:
    """Whether the kernel may write its chunk number `write` where it reads number `read`: sums may, in their place."""
    if op.kernel == "add":
        return read % len(op.writes) == write
    return op.kernel == "gradient_add" and read == len(op.reads) - 1


def evaluate(op: Compute, read: Callable[[Chunk], list[Value]]) -> list[Value]:
    """What the blocks written by `op` hold afterwards, in their order."""
    kernel = find(op.kernel)
    whole = [read(chunk)[0] for chunk in kernel.wholes(op.reads)]
    groups = [[value for chunk in chunks for value in read(chunk)] for chunks in kernel.rows(op.reads)]
    if kernel.reduces:
        return [total(*(kernel.meaning(*row) for row in zip(*groups, strict=True)), *whole)]
    return [kernel.meaning(*row, *whole) for row in zip(*groups, strict=True)]


Taken = tuple[tuple[int, ...], int]
"""Shape and bytes of an operand."""


def demand(name: str, reads: Sequence[Taken], writes: Sequence[Taken]) -> tuple[int, int, int]:
    """What one call asks of a `Machine.kernel`: operations, bytes touched, bytes of what products multiply.

    Each run of rows is a product of its own, which packs the weight anew.
    """
    kernel, packed = find(name), 0
    if name.startswith(("matmul", "gradient")):
        runs, wholes = kernel.rows(reads), kernel.wholes(reads)
        packed = sum(nbytes for group in runs for _, nbytes in group)
        if not kernel.reduces:  # else what is whole is the gradient so far; what comes behind a weight is a bias
            packed += len(runs[0]) * wholes[0][1]
    operations = cost(name, [shape for shape, _ in reads], [shape for shape, _ in writes])
    return operations, sum(nbytes for _, nbytes in (*reads, *writes)), packed


def cost(name: str, reads: Sequence[tuple[int, ...]], writes: Sequence[tuple[int, ...]]) -> int:
    """Floating-point operations of one call on arrays of these shapes."""
    kernel = find(name)
    rows = [[prod(shape) for shape in group] for group in kernel.rows(reads)]
    if name.startswith("matmul"):
        return 2 * sum(rows[0]) * writes[0][-1]
    if name.startswith("gradient"):
        return 2 * sum(rows[0]) * reads[len(rows[0])][-1]
    return sum(rows[0]) if name == "add" else 0
