"""The outputs of all ranks from the inputs of all ranks: the meaning of a Problem on arrays, without messages."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

from fompi.base.layout import Sizes, offsets
from fompi.plans.problems import Problem


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
