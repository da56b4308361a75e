"""What a plan must do: the values before and after it as terms, for the proof, and a reference on arrays, for tests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

from fompi.base.layout import Sizes, offsets
from fompi.plans.kernels import Value, gradient_in_order, product, reduced, total
from fompi.plans.plan import Program
from fompi.plans.problems import OwnProblem, Problem
from fompi.plans.tree import reduced_in_order

# ------------------------------------------------------------------------------------------- before and after


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


# ------------------------------------------------------------------------------------------------- the reference


def _reduced(problem: Problem, xs: Sequence[Any], xp: Any) -> Any:
    combine = {"max": xp.maximum, "min": xp.minimum, "prod": xp.multiply}.get(problem.op, xp.add)
    y = functools.reduce(combine, xs)
    return y / problem.size if problem.op == "mean" else y


def reference(problem: Problem, inputs: Sequence[dict[str, Any]], sizes: Sizes, xp: Any) -> list[dict[str, Any]]:
    """The outputs of all ranks, computed unfused from the inputs of all ranks in the array namespace `xp`."""
    size = problem.size
    if problem.deals_x:
        return [{"y": xp.concatenate([data[f"x{rank}"] for data in inputs])} for rank in range(size)]
    if problem.columns:
        return [{"y": y} for y in _dealt_products(problem, inputs, [_rows(sizes.rows, r) for r in range(size)], xp)]
    if problem.experts:
        return _grouped_reference(problem, inputs, sizes, xp)
    if problem.moves in ("reduce_scatter", "all_reduce"):
        owners = _reference_of_sums(problem, inputs, sizes, xp)
        return [{"y": y if problem.moves == "reduce_scatter" else xp.concatenate(owners)} for y in owners]
    xs = [data["x"] for data in inputs]
    if problem.multiplies_first:
        xs = [_product(problem, x, data, 0) for x, data in zip(xs, inputs, strict=True)]
    if problem.moves == "broadcast":
        arrived = [xs[problem.root]] * size
    elif problem.moves == "all_gather":
        arrived = [xp.concatenate(xs)] * size
    else:
        arrived = [xp.concatenate([xs[s][_rows(sizes.pairs[s], r)] for s in range(size)]) for r in range(size)]
    if problem.multiplies_first:
        return [{"y": y} for y in arrived]
    return [_results(problem, data, x) for data, x in zip(inputs, arrived, strict=True)]


def _rows(counts: Sequence[int], i: int) -> slice:
    return slice(sum(counts[:i]), sum(counts[: i + 1]))


def _product(problem: Problem, x: Any, data: dict[str, Any], i: int) -> Any:
    y = x @ data[problem.name("w", i)]
    return y + data[problem.name("bias", i)] if problem.weights[i].bias else y


def _reference_of_sums(problem: Problem, inputs: Sequence[dict[str, Any]], sizes: Sizes, xp: Any) -> list[Any]:
    """The rows of the sum that each rank owns."""
    biased = problem.multiplies_first and problem.weights[0].bias
    if problem.multiplies_first:
        terms = [data["x"] @ data["w"] for data in inputs]
        summed = sum(terms[1:], terms[0])
        if biased and problem.moves == "all_reduce":  # the bias is the same on all ranks
            summed = summed + inputs[0]["bias"]
    else:
        summed = _reduced(problem, [data["x"] for data in inputs], xp)
    owners = [summed[_rows(sizes.rows, r)] for r in range(problem.size)]
    if biased and problem.moves == "reduce_scatter":
        owners = [y + data["bias"] for y, data in zip(owners, inputs, strict=True)]
    return owners


def _results(problem: Problem, data: dict[str, Any], x: Any) -> dict[str, Any]:
    """The outputs of a rank at which the rows x have arrived."""
    result = {problem.kept: x} if problem.keep or not (problem.weights or problem.gradients) else {}
    for i in range(len(problem.weights)):
        result[problem.name("y", i)] = _product(problem, x, data, i)
    for i, gradient in enumerate(problem.gradients):
        h = data[problem.name("h", i)]
        result[problem.name("g", i)] = _gradient(h, x) if gradient.flipped else _gradient(x, h)
    return result


def _gradient(left: Any, right: Any) -> Any:
    """left.T @ right, with all dimensions but the last as one."""
    left, right = (a.reshape(prod(a.shape[:-1]), a.shape[-1]) for a in (left, right))
    return left.T @ right


def _grouped_reference(
    problem: Problem, inputs: Sequence[dict[str, Any]], sizes: Sizes, xp: Any
) -> list[dict[str, Any]]:
    """The outputs of all ranks where rows go to experts, run by run."""
    size = problem.size

    def cut(x: Any, runs: Sequence[Sequence[int]]) -> list[list[Any]]:
        """x by peer and expert."""
        ends = iter(pairwise(offsets(n for run in runs for n in run)))
        return [[x[slice(*next(ends))] for _ in run] for run in runs]

    def multiplied(pieces: list[list[Any]], w: Any, n: int) -> list[list[Any]]:
        return [[x @ w[e] for e, x in enumerate(run[:n])] for run in pieces]

    def joined(pieces: list[list[Any]], row: tuple[int, ...], like: Any) -> Any:
        return xp.concatenate([like[:0, ..., :0].reshape(0, *row), *(x for run in pieces for x in run)])

    sent = [cut(data["x"], sizes.runs[rank]) for rank, data in enumerate(inputs)]
    if problem.multiplies_first:
        sent = [multiplied(p, d["w"], n) for p, d, n in zip(sent, inputs, problem.experts, strict=True)]
        return [{"y": joined([p[r] for p in sent], problem.sent_row, inputs[r]["x"])} for r in range(size)]
    results = []
    for rank, data in enumerate(inputs):
        arrived, experts, result = [pieces[rank] for pieces in sent], range(problem.experts[rank]), {}
        if problem.keep:
            result["x_full"] = joined(arrived, problem.row, data["x"])
        if problem.weights:
            products = multiplied(arrived, data["w"], len(experts))
            result["y"] = joined(products, problem.product_row(0), data["x"])
        for i, gradient in enumerate(problem.gradients):
            h = cut(data[problem.name("h", i)], [row[rank] for row in sizes.runs])
            g = result[problem.name("g", i)] = xp.zeros((len(experts), *problem.gradient_shape(i)), data["x"].dtype)
            for e in experts:
                for x, y in zip([run[e] for run in arrived], [run[e] for run in h], strict=True):
                    g[e] += _gradient(y, x) if gradient.flipped else _gradient(x, y)
        results.append(result)
    return results


def _dealt_products(problem: Problem, inputs: Sequence[dict[str, Any]], rows: Sequence[slice], xp: Any) -> list[Any]:
    """y of all ranks where the columns of a product, or those of x, are dealt. `rows[r]` are those of rank r."""
    results = []
    for r, mine in enumerate(inputs):
        if problem.multiplies_first:
            biases = [data[f"bias{r}"] if problem.weights[0].bias else 0 for data in inputs]
            results.append(xp.concatenate([d["x"] @ d[f"w{r}"] + b for d, b in zip(inputs, biases, strict=True)]))
        else:
            terms = [data["x"][rows[r]] @ mine[f"w{s}"] for s, data in enumerate(inputs)]
            results.append(sum(terms[1:], terms[0]) + (mine["bias"] if problem.weights[0].bias else 0))
    return results
