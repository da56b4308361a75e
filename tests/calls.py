"""From a problem of the catalogue to the public operation: what a user on one rank would type, and what comes back."""

from __future__ import annotations

import catalogue
import ml_dtypes
import numpy as np

import fompi
from fompi.base.layout import Sizes, split
from fompi.plans.problems import reference
from fompi.schedules import registry

NAMES = [name for name in catalogue.problems(1) if "weight_gradient flipped" not in name]
"""Those of the catalogue that a public operation asks for."""


def spread(problem, how, seed=0):
    """Rows of every rank, or pair of ranks. An all-reduce owns its rows as evenly as can be, whoever asks."""
    sizes = catalogue.sizes(problem, how, seed)
    if problem.moves in ("all_reduce", "broadcast"):
        return Sizes(rows=split(sum(sizes.rows), problem.size))
    return sizes


def tensors(problem, given):
    """The inputs of one rank as a user has them: bfloat16 as ml_dtypes' own, a packed x with gaps."""
    found = {name: as_user(array, problem.dtype) for name, array in given.items()}
    if problem.packed:
        found["x"] = with_gaps(found["x"])
    return found


def as_user(array, dtype):
    return array.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else array


def as_stored(array):
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


def with_gaps(array):
    """The same numbers, no two of them side by side."""
    holder = np.full((*array.shape, 2), 99).astype(array.dtype)
    holder[..., 0] = array
    return holder[..., 0]


def arguments(problem, given, sizes, rank):
    """Positional and keyword arguments of the operation."""
    mine, name = tensors(problem, given), problem.name
    weights = [mine[name("w", i)] for i in range(len(problem.weights))]
    biases = [mine[name("bias", i)] if w.bias else None for i, w in enumerate(problem.weights)]
    operands = [mine[name("h", i)] for i in range(len(problem.gradients))]
    options = {}
    if problem.operation == "all_gather_matmul_many":
        return [mine["x"], weights], {"biases": biases}
    if any(b is not None for b in biases):
        options["bias"] = biases[0]
    if problem.moves == "all_to_all":
        options["counts"] = sizes.pairs[rank]
    elif problem.moves == "reduce_scatter":
        options["counts"] = sizes.rows
    elif problem.moves == "broadcast":
        options["root"] = problem.root
    return [mine["x"], *weights, *operands], options


def call(problem, given, sizes, comm, **options):
    """Call the operation on this rank: its results by the names of the outputs, in storage dtype."""
    positional, named = arguments(problem, given, sizes, comm.rank)
    result = getattr(fompi, problem.operation)(*positional, comm=comm, **named, **options)
    return by_name(problem, result)


def by_name(problem, result):
    if problem.operation == "all_gather_matmul_many":
        full, products = result
        result = (full, *products)
    names = [problem.kept] if problem.keep or not (problem.weights or problem.gradients) else []
    names += [problem.name("y", i) for i in range(len(problem.weights))]
    names += [problem.name("g", i) for i in range(len(problem.gradients))]
    results = result if isinstance(result, tuple) else (result,)
    return {name: as_stored(array) for name, array in zip(names, results, strict=True)}


def meant(problem, inputs, sizes, rank):
    """The same results by the unfused meaning."""
    return reference(problem, inputs, sizes, np)[rank]


def check_bound(world, name, seen=dict, **options):
    """A problem of the catalogue by every schedule, bound, and called three times with other numbers in the same place.

    `seen(arrays)` is the part of operands and results that counts; `options` are those of `fompi.bind`.
    """
    listed = catalogue.problems(world.size)[name]
    for number, schedule in enumerate(registry.available(listed)):
        sizes = spread(listed, "uneven", seed=number)
        plan = registry.write(listed, schedule, (1, (1, 2))[number % 2], sizes)
        mine = catalogue.inputs(listed, sizes)[world.rank]
        if listed.packed:
            mine["x"] = with_gaps(mine["x"])
        with fompi.bind(plan, comm=world, **options, **mine) as step:
            for call in range(3):
                inputs = catalogue.inputs(listed, sizes, call, catalogue.whole)
                for key, array in inputs[world.rank].items():
                    mine[key][...] = array
                results = step()
                names = [b.name for b in step.compiled.outputs]
                got = dict(zip(names, results if isinstance(results, tuple) else (results,), strict=True))
                wanted = meant(listed, [seen(given) for given in inputs], sizes, world.rank)
                assert got.keys() == wanted.keys()
                for key, array in seen(got).items():
                    np.testing.assert_array_equal(array, wanted[key], err_msg=f"{schedule} {key} call {call}")
