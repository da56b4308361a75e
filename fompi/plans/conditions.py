"""What a plan must do: the values before and after it, as terms."""

from __future__ import annotations

from collections.abc import Sequence

from fompi.plans.kernels import Value, gradient_in_order, product, reduced, total
from fompi.plans.plan import Program
from fompi.plans.problems import OwnProblem, Problem
from fompi.plans.tree import reduced_in_order


def before(problem: Problem | OwnProblem, program: Program) -> dict[tuple[str, int], Value]:
    """The values of the inputs of a rank. Each block is a term of its own. In a broadcast only the root has inputs.

    Blocks without rows hold a term too: a collective of the MPI library reads them.
    """
    if isinstance(problem, OwnProblem):
        return problem.before(program)
    if problem.moves == "broadcast" and program.rank != problem.root:
        return {}
    inputs = [b for b in program.buffers if b.is_input]
    return {(b.name, i): ((b.name, program.rank, i),) for b in inputs for i in range(b.first, b.first + b.count)}


def after(problem: Problem | OwnProblem, rank: int, parts: int) -> dict[tuple[str, int], Value]:
    """The values that the outputs of a rank must have at the end."""
    if isinstance(problem, OwnProblem):
        return problem.after(rank, parts)
    size = problem.size
    if problem.operation in ("gather", "scatter", "reduce"):
        whole = _after(problem, rank, parts)
        y = problem.workspace(rank, parts)["y"]
        return {at: value for at, value in whole.items() if not problem.is_empty(y.symbol(rank, size, parts, at[1]))}
    return _after(problem, rank, parts)


def _after(problem: Problem, rank: int, parts: int) -> dict[tuple[str, int], Value]:
    """`after`, with the blocks that never have rows."""
    if problem.deals_product:
        y = problem.workspace(rank, parts)["y"]
        return {("y", b): _dealt_product(problem, rank, parts, b) for b in range(y.first, y.first + y.count)}
    if problem.moves == "reduce_scatter":
        mine = range(rank * parts, (rank + 1) * parts)
        return {("y", b): _summed(problem, rank, b) for b in mine}
    if problem.moves == "all_reduce":
        return {(problem.result, b): _summed(problem, rank, b) for b in range(problem.size * parts)}
    return _moved(problem, rank, parts)


def _weighted(problem: Problem, x: Value, i: int, at: int, bias: bool = True, expert: int = 0) -> Value:
    """The i-th product of x on rank `at`."""
    y = product(problem.kernel("matmul"), x, ((problem.name("w", i), at, expert),))
    return total(y, ((problem.name("bias", i), at, 0),)) if bias and problem.weights[i].bias else y


def _summed(problem: Problem, rank: int, b: int) -> Value:
    """The value of block b of a sum over the ranks."""
    if problem.order:
        terms = [_term(problem, r, j, n, b) for r, mine in enumerate(problem.terms) for j, n in enumerate(mine)]
        return reduced_in_order(problem.op, terms, [n for mine in problem.terms for n in mine])
    xs: list[Value] = [(("x", r, b),) for r in range(problem.size)]
    if not problem.multiplies_first:
        return reduced(problem.op, xs)
    owner = rank if problem.moves == "reduce_scatter" else b % problem.size  # the owner of the rows adds the bias
    return total(*(_weighted(problem, x, 0, r, bias=r == owner) for r, x in enumerate(xs)))


def _term(problem: Problem, r: int, j: int, leaves: int, b: int) -> Value:
    """The j-th term that rank r has of block b, where a sum has an order. Rank 0 adds the bias to its first one."""
    number = j if problem.is_split else ""
    x: Value = ((f"x{number}", r, b),)
    if not problem.multiplies_first:
        return x
    y = product(problem.kernel("matmul", leaves), x, ((f"w{number}", r, 0),))
    return total(y, (("bias", r, 0),)) if problem.weights[0].bias and r == j == 0 else y


def _moved(problem: Problem, rank: int, parts: int) -> dict[tuple[str, int], Value]:
    """The values of the outputs where rows move, and are multiplied before or afterwards."""
    slices, everything = parts // problem.runs, range(problem.size * parts)

    def expert(b: int) -> int:
        return b % parts // slices

    def arrives(b: int) -> Value:
        if problem.moves == "broadcast":
            return (("x", problem.root, b),)
        if problem.moves == "all_gather":
            return ((f"x{rank}" if problem.columns else "x", b // parts, b),)
        source, part = divmod(b, parts)
        x: Value = (("x", source, rank * parts + part),)
        return _weighted(problem, x, 0, source, expert=part // slices) if problem.multiplies_first else x

    blocks: Sequence[int] = everything
    if problem.experts:
        many = [problem.experts[b // parts if problem.multiplies_first else rank] for b in everything]
        blocks = [b for b in everything if expert(b) < many[b]]  # the other blocks never have rows
    if problem.multiplies_first:
        return {("y", b): arrives(b) for b in blocks}
    result: dict[tuple[str, int], Value] = {}
    for b in blocks:
        if problem.keep or not (problem.weights or problem.gradients):
            result[problem.kept, b] = arrives(b)
        for i in range(len(problem.weights)):
            result[problem.name("y", i), b] = _weighted(problem, arrives(b), i, rank, expert=expert(b))
    for i, gradient in enumerate(problem.gradients):
        h, name = problem.name("h", i), problem.kernel("gradient")
        for e in range(problem.experts[rank] if problem.experts else 1):
            pairs = [(arrives(b), ((h, rank, b),)) for b in blocks if expert(b) == e]
            terms = [product(name, *((y, x) if gradient.flipped else (x, y))) for x, y in pairs]
            result[problem.name("g", i), e] = gradient_in_order(terms) if problem.order else total(*terms)
    return result


def _dealt_product(problem: Problem, rank: int, parts: int, b: int) -> Value:
    """The value of block b of the result of a product whose columns are dealt."""
    source = b // parts if problem.multiplies_first else rank  # who multiplies
    pieces = [(source, rank)] if problem.multiplies_first else [(r, r) for r in range(problem.size)]
    terms = [product("matmul", (("x", owner, b),), ((f"w{piece}", source, 0),)) for owner, piece in pieces]
    bias = [f"bias{rank}" if problem.multiplies_first else "bias"] * problem.weights[0].bias
    return total(*terms, *(((name, source, 0),) for name in bias))
