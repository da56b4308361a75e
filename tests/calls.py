"""Calls of the public operations for the problems of the catalogue: arguments, results and expected results."""

from __future__ import annotations

import catalogue
import ml_dtypes
import numpy as np
from reference import reference

import fompi
from fompi.base.layout import Sizes, split
from fompi.plans.meaning import ROOTED
from fompi.schedules import registry

NAMES = [name for name in catalogue.problems(1) if "weight_gradient flipped" not in name]
"""The problems of the catalogue that belong to a public operation."""


def row_sizes(problem, distribution, seed=0):
    """The rows of every rank, or pair of ranks. An all-reduce or broadcast always has an even distribution."""
    sizes = catalogue.sizes(problem, distribution, seed)
    if problem.moves in ("all_reduce", "broadcast"):
        return Sizes(rows=split(sum(sizes.rows), problem.size))
    return sizes


def tensors(problem, given):
    """The inputs of one rank as a user has them: bfloat16 is the dtype of ml_dtypes, and a packed x has gaps."""
    arrays = {name: as_user(array, problem.dtype) for name, array in given.items()}
    if problem.packed:
        arrays["x"] = with_gaps(arrays["x"])
    return arrays


def as_user(array, dtype):
    """An array in storage dtype as an array of ml_dtypes, if it is bfloat16."""
    return array.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else array


def as_stored(array):
    """The inverse of `as_user`."""
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


def with_gaps(array):
    """The same numbers, with a gap after each of them in memory."""
    holder = np.full((*array.shape, 2), 99).astype(array.dtype)
    holder[..., 0] = array
    return holder[..., 0]


def arguments(problem, given, sizes, rank):
    """The positional and the keyword arguments of the operation on one rank."""
    arrays, name = tensors(problem, given), problem.name
    if problem.deals_product:
        first, ranks, weight = problem.multiplies_first, range(problem.size), problem.weights[0]
        w = np.concatenate([arrays[f"w{r}"] for r in ranks], int(first))
        options = {"columns": problem.columns} | ({} if first else {"counts": sizes.rows})
        if weight.bias:
            options["bias"] = np.concatenate([arrays[f"bias{r}"] for r in ranks]) if first else arrays["bias"]
        return [arrays["x"], w], options
    if problem.columns:
        x = np.concatenate([arrays[f"x{r}"] for r in range(problem.size)], 1)
        return [x], {"split_dim": 1, "concat_dim": 0, "counts": problem.columns}
    weights = [arrays[name("w", i)] for i in range(len(problem.weights))]
    biases = [arrays[name("bias", i)] if w.bias else None for i, w in enumerate(problem.weights)]
    operands = [arrays[name("h", i)] for i in range(len(problem.gradients))]
    options = {}
    if problem.operation == "all_gather_matmul_many":
        return [arrays["x"], weights], {"biases": biases}
    if any(b is not None for b in biases):
        options["bias"] = biases[0]
    if problem.operation in ROOTED:
        options["root"] = problem.root
    if problem.op != "sum":
        options["op"] = problem.op
    if problem.moves == "all_to_all" and problem.operation != "gather":
        options["counts"] = sizes.pairs[rank]
    elif problem.operation in ("reduce_scatter", "matmul_reduce_scatter"):
        options["counts"] = sizes.rows
    return [arrays["x"], *weights, *operands], options


def operation_of(problem):
    """The public operation of a problem."""
    return fompi.all_to_all if problem.deals_x else getattr(fompi, problem.operation)


def call(problem, given, sizes, comm, **options):
    """Call the operation on this rank. Returns the results by output name, in storage dtype."""
    positional, named = arguments(problem, given, sizes, comm.rank)
    result = operation_of(problem)(*positional, comm=comm, **named, **options)
    return by_name(problem, result)


def by_name(problem, result):
    """The results of a call by output name, in storage dtype."""
    if problem.operation == "all_gather_matmul_many":
        full, products = result
        result = (full, *products)
    names = [problem.kept] if problem.keep or not (problem.weights or problem.gradients) else []
    names += [problem.name("y", i) for i in range(len(problem.weights))]
    names += [problem.name("g", i) for i in range(len(problem.gradients))]
    results = result if isinstance(result, tuple) else (result,)
    return {name: as_stored(array) for name, array in zip(names, results, strict=True)}


def expected(problem, inputs, sizes, rank):
    """The results that `call` must return, computed unfused."""
    return reference(problem, inputs, sizes, np)[rank]


def check_bound(world, name, select=dict, **options):
    """Bind a problem of the catalogue by every schedule. Call it three times with new numbers in the same arrays.

    `select(arrays)` is the part of operands and results that is compared. `options` are options of `fompi.bind`.
    """
    problem = catalogue.problems(world.size)[name]
    for number, schedule in enumerate(registry.available(problem)):
        sizes = row_sizes(problem, "uneven", seed=number)
        plan = registry.write(problem, schedule, (1, (1, 2))[number % 2], sizes)
        bound = catalogue.inputs(problem, sizes)[world.rank]
        if problem.packed:
            bound["x"] = with_gaps(bound["x"])
        with fompi.bind(plan, comm=world, **options, **bound) as step:
            for call in range(3):
                inputs = catalogue.inputs(problem, sizes, call, catalogue.integers)
                for key, array in inputs[world.rank].items():
                    bound[key][...] = array
                results = step()
                names = [b.name for b in step.compiled.outputs]
                got = dict(zip(names, results if isinstance(results, tuple) else (results,), strict=True))
                wanted = expected(problem, [select(given) for given in inputs], sizes, world.rank)
                assert got.keys() == wanted.keys()
                for key, array in select(got).items():
                    np.testing.assert_array_equal(array, wanted[key], err_msg=f"{schedule} {key} call {call}")
