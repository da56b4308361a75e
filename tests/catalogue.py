"""The problems that the tests run: one for every operation and variant, with rows and data. Nothing here needs MPI.

`problems(size)` is the catalogue. `sizes(problem, distribution)` distributes rows over the ranks. `inputs(problem,
sizes, call)` fills the inputs; every rank, block and call has different numbers.
"""

from __future__ import annotations

import zlib
from random import Random

import numpy as np

from fompi.base.layout import Sizes, Spec, split
from fompi.plans.meaning import MEANING, layouts
from fompi.plans.plan import Compute, Recv, Send
from fompi.plans.problems import Form, problem
from fompi.plans.specs import from_specs

RANKS = (1, 2, 3, 4, 5, 7, 8)
ROWS = ("even", "uneven", "few", "lonely", "none")
"""The ways to distribute rows over ranks.

even: the same number everywhere. few: fewer rows than ranks. lonely: only the last rank has rows. none: no rows.
"""


def problems(size, dtype="float64"):
    """The problems for `size` ranks by name: every operation and its variants."""

    def form(*shape):
        return Form(shape, dtype)

    x, x3, w, v, b, h, h3 = form(0, 3), form(0, 2, 3), form(3, 4), form(3, 2), form(4), form(0, 5), form(0, 2, 5)
    listed = {
        "all_gather": problem("all_gather", size, x),
        "all_gather packed": problem("all_gather", size, x, packed=True),
        "all_gather 1-d": problem("all_gather", size, form(0)),
        "reduce_scatter": problem("reduce_scatter", size, x),
        "reduce_scatter packed": problem("reduce_scatter", size, x, packed=True),
        "all_reduce": problem("all_reduce", size, form(0, 2, 3)),
        "all_to_all": problem("all_to_all", size, x),
        "all_to_all packed 3-d": problem("all_to_all", size, x3, packed=True),
        "all_to_all_columns": problem("all_to_all_columns", size, form(0, 7), columns=split(7, size)),
        "all_to_all_columns uneven 3-d": problem(
            "all_to_all_columns", size, form(0, 2 * size, 3), columns=_uneven(size)
        ),
        "broadcast": problem("broadcast", size, x),
        "broadcast from the last": problem("broadcast", size, x, root=size - 1),
        "gather": problem("gather", size, x),
        "scatter from the last": problem("scatter", size, x3, root=size - 1),
        "reduce": problem("reduce", size, x),
        "all_gather_matmul": problem("all_gather_matmul", size, x, [w]),
        "all_gather_matmul bias packed": problem("all_gather_matmul", size, x, [w], [b], packed=True),
        "all_gather_matmul 3-d": problem("all_gather_matmul", size, x3, [w], [b]),
        "all_gather_matmul_many": problem("all_gather_matmul_many", size, x, [w, v], [b, None], keep=True),
        "all_gather_matmul_many of one": problem("all_gather_matmul_many", size, x, [w], keep=True),
        "all_gather_weight_gradient": problem("all_gather_weight_gradient", size, x, operands=[h]),
        "all_gather_weight_gradient flipped 3-d": problem(
            "all_gather_weight_gradient", size, x3, operands=[h3], flipped=True
        ),
        "all_gather_matmul_weight_gradient": problem(
            "all_gather_matmul_weight_gradient", size, x, [w], operands=[h], flipped=True
        ),
        "all_to_all_matmul": problem("all_to_all_matmul", size, x, [w]),
        "all_to_all_matmul bias 3-d": problem("all_to_all_matmul", size, x3, [w], [b]),
        "all_to_all_weight_gradient": problem("all_to_all_weight_gradient", size, x, operands=[h]),
        "all_to_all_weight_gradient packed": problem(
            "all_to_all_weight_gradient", size, x3, operands=[h3], packed=True
        ),
        "all_to_all_matmul_weight_gradient": problem(
            "all_to_all_matmul_weight_gradient", size, x, [w], operands=[h], flipped=True, keep=True
        ),
        "matmul_reduce_scatter": problem("matmul_reduce_scatter", size, x, [w]),
        "matmul_reduce_scatter bias 3-d": problem("matmul_reduce_scatter", size, x3, [w], [b]),
        "matmul_all_reduce": problem("matmul_all_reduce", size, x, [w]),
        "matmul_all_reduce bias": problem("matmul_all_reduce", size, x, [w], [b]),
        "matmul_all_to_all": problem("matmul_all_to_all", size, x, [w]),
        "matmul_all_to_all bias 3-d": problem("matmul_all_to_all", size, x3, [w], [b]),
        "matmul_all_to_all_columns uneven bias 3-d": problem(
            "matmul_all_to_all_columns", size, x3, [form(3, 2 * size)], [form(2 * size)], columns=_uneven(size)
        ),
        "all_to_all_columns_matmul packed": problem(
            "all_to_all_columns_matmul", size, x, [w], columns=split(3, size), packed=True
        ),
        "all_to_all_columns_matmul uneven bias 3-d": problem(
            "all_to_all_columns_matmul", size, form(0, 2, 2 * size), [form(2 * size, 4)], [b], columns=_uneven(size)
        ),
    }
    if dtype.startswith(("float", "bfloat")):
        listed["reduce to the last mean"] = problem("reduce", size, x, root=size - 1, op="mean")
        listed["all_reduce max"] = problem("all_reduce", size, x, op="max")
    return listed


def _uneven(size):
    """2 * size columns: the first rank has twice its part, the last one none."""
    return (4, *(2,) * (size - 2), 0) if size > 1 else (2,)


SUMS = ("reduce_scatter", "all_reduce")
MOVES = ("all_gather", "all_to_all", "broadcast", *SUMS)


def moves(size, dtype):
    """The operations that only move or add. They take any dtype, except that bool cannot be added."""
    names = [name for name in MOVES if dtype != "bool" or name not in SUMS]
    return {name: problem(name, size, Form((0, 3), dtype)) for name in names}


def sizes(problem, distribution, seed=0):
    """The rows of every rank, or of every pair of ranks, for one of the distributions in `ROWS`."""
    random, size = Random(f"{problem.operation} {problem.size} {distribution} {seed}"), problem.size

    def counts(count):
        if distribution == "even":
            return (3,) * count
        if distribution == "uneven":
            drawn = [random.randrange(0, 7) for _ in range(count)]
            drawn[random.randrange(count)] = 0 if count > 2 else 5
            return tuple(drawn)
        if distribution == "few":
            return tuple(int(i % 3 == 1) for i in range(count))
        return tuple(4 if distribution == "lonely" and i == count - 1 else 0 for i in range(count))

    if problem.operation in ("gather", "scatter", "reduce"):
        return problem.spread(counts(size))
    if problem.moves == "all_to_all":
        return Sizes(pairs=tuple(counts(size) for _ in range(size)))
    return Sizes(rows=counts(size))


def inputs(problem, sizes, call=0, fill=None):
    """The inputs of every rank, by name, in storage dtype. `fill(random, shape, dtype)` makes the numbers."""
    fill, given = fill or distinct, []
    for rank in range(problem.size):
        extents = sizes.extents(rank, (1,))
        buffers = [b for b in problem.workspace(rank, 1).program(()).buffers if b.role == "input"]
        shared = {"bias"} if problem.moves == "all_reduce" else set()  # equal on all ranks
        seeds = {b.name: [call, 0 if b.name in shared else rank, zlib.crc32(b.name.encode())] for b in buffers}
        given.append({b.name: fill(np.random.default_rng(seeds[b.name]), b.shape(extents), b.dtype) for b in buffers})
    return given


def distinct(random, shape, dtype):
    """Random numbers, all different if the dtype has enough of them."""
    if dtype in ("float16", "bfloat16"):
        return integers(random, shape, dtype)
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return random.integers(0, 2, shape).astype(bool)
    if kind.kind in "iu":
        return random.integers(np.iinfo(kind).min, np.iinfo(kind).max, shape, kind, endpoint=True)
    if kind.kind == "c":
        return (random.standard_normal(shape) + 1j * random.standard_normal(shape)).astype(kind)
    return random.standard_normal(shape).astype(kind)


def integers(random, shape, dtype="float64"):
    """Random integers. Their sums and products are exact in the accumulator, so the order of a sum does not matter."""
    if dtype == "float64":
        return random.integers(1, 1 << 20, shape).astype(float)
    return rounded(random.integers(-120, 121, shape).astype(float), dtype)


def wide(array, dtype):
    """An array in storage dtype as float64, exactly. An array of another kind than float is returned unchanged."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64) if dtype in ("float16", "float32") else array


def rounded(array, dtype):
    """A float64 array in the storage of `dtype`, rounded once, to the nearest even."""
    if dtype != "bfloat16":
        return array.astype(dtype)
    mantissa, exponent = np.frexp(array)
    nearest = np.ldexp(np.rint(np.ldexp(mantissa, 8)), exponent - 8)  # 8 bits of mantissa
    return (nearest.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def widened(given, dtype):
    """The inputs of all ranks as float64, for the reference."""
    return [{name: wide(array, dtype) for name, array in arrays.items()} for arrays in given]


def send_to_all(problem, work):
    """A user's schedule for all_gather: each rank sends its shard to all other ranks."""
    x, y = work["x"], work["y"]
    for peer in range(work.size):
        shard = y[peer * work.parts : (peer + 1) * work.parts]
        if peer == work.rank:
            yield Compute("copy", (x[:],), (shard,))
        else:
            yield Recv(peer, shard)
            yield Send(peer, x[:])


def specs_of(operation, rows=12, k=6, n=9, dtype="float32"):
    """The global tensors of an operation: x (rows, k), w (k, n) or of three experts (3, k, n), h (rows, n)."""
    meaning = MEANING[operation]
    w = (3, k, n) if meaning.grouped else (k, n)
    shapes = [(rows, k), *[w] * (meaning.weight is not None), *[(rows, n)] * (meaning.operand is not None)]
    return [Spec(s, dtype, lay) for s, lay in zip(shapes, layouts(operation, len(shapes)), strict=True)]


def options_of(operation):
    """What a plan for the tensors of `specs_of` must be told beside."""
    return {"experts": 3} if operation == "all_to_all_grouped_weight_gradient" else {}


def problem_of(operation, ranks):
    """The problem of rank 0 for the tensors of `specs_of`."""
    at, _ = from_specs(operation, specs_of(operation), ranks, **options_of(operation))
    return at(0)
