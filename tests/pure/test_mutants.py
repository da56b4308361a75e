"""Mutated plans. `verify` must refuse every mutant that gives wrong results, and name rank, op and chunk.

A mutant that `verify` accepts must give the same bits as the original plan in the twin, in several interleavings, for
even and for uneven rows. The inputs are integers, so the results are exact. No difference can hide in a rounding error.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from random import Random

import catalogue
import numpy as np
import pytest
from mutants import MUTATIONS, mutant
from twin import twin

from fompi.backends.numpy import Numpy
from fompi.base.errors import PlanError
from fompi.plans.verify import verify
from fompi.schedules import registry

BACKEND = Numpy()
MUTANTS = 300
"""Mutants per seed."""
DTYPES = ("float64", "float64", "bfloat16")
SEEDS = range(3)


@cache
def problems(size, dtype):
    return list(catalogue.problems(size, dtype).values())


def right_plan(random):
    """A random plan that is right."""
    problem = random.choice(problems(random.choice((1, 2, 3, 4, 5, 8)), random.choice(DTYPES)))
    return registry.write(problem, random.choice(registry.available(problem)), random.choice((1, 2)))


def bits(plan, inputs, sizes, seed):
    outputs = twin(plan, inputs, BACKEND, sizes=sizes, seed=seed)
    return [{name: (array.shape, array.tobytes()) for name, array in arrays.items()} for arrays in outputs]


def difference(plan, changed):
    """What is wrong with the results of a mutant in the twin, or None."""
    for distribution in ("even", "uneven"):
        sizes = catalogue.sizes(plan.problem, distribution)
        inputs = catalogue.inputs(plan.problem, sizes, fill=catalogue.integers)
        right = bits(plan, inputs, sizes, 0)
        for seed in (1, 2, 3):
            try:
                if bits(changed, inputs, sizes, seed) != right:
                    return f"other results, {distribution} rows"
            except Exception as error:
                return f"{type(error).__name__}: {error}"
    return None


def names_the_place(error, plan, changed):
    """True if rank, op and chunk of the error are also in its message."""
    text, program = str(error), changed.programs[error.rank]
    if error.op is None:  # a buffer is wrong, or there is no op
        no_op = not program.ops or program.buffers != plan.programs[error.rank].buffers
        return no_op and text.startswith(f"rank {error.rank}") and error.chunk in text
    chunks = (*program.ops[error.op].reads, *program.ops[error.op].writes)
    names_op = re.search(rf"\b(op|op,|last op,) {error.op}\b", text) is not None
    names_chunk = error.chunk in text if error.chunk else not chunks
    return text.startswith(f"rank {error.rank}") and names_op and names_chunk


@pytest.mark.parametrize("seed", SEEDS)
def test_mutants_are_refused_or_harmless(seed):
    random, counts = Random(seed), Counter()
    for number in range(MUTANTS):
        plan = right_plan(random)
        name, changed = mutant(plan, random)
        if number % 3 == 0:  # a second mutation may hide the effect of the first
            second, changed = mutant(changed, random)
            name = f"{name}, then {second}"
        try:
            verify(changed)
        except PlanError as error:
            counts["refused"] += 1
            assert names_the_place(error, plan, changed), f"{name}: {error}; {error.rank}, {error.op}, {error.chunk}"
        else:
            counts["accepted"] += 1
            fault = difference(plan, changed)
            assert fault is None, f"verify accepts a wrong plan ({name}: {fault})\n{plan}\n\n{changed}"
    assert counts["refused"] > 0.6 * MUTANTS, counts


@pytest.mark.parametrize(
    "name", ["drop", "drop both ends", "drop everywhere", "divert", "turn round", "shift", "resize"]
)
def test_mutations_that_are_almost_always_refused(name):
    """Schedules have no unnecessary op or block, so nearly every such mutant is wrong."""
    random, refused, made = Random(name), 0, 0
    while made < 60:
        plan = right_plan(random)
        try:
            changed = MUTATIONS[name](plan, random)
        except LookupError:
            continue
        if changed == plan:
            continue
        made += 1
        try:
            verify(changed)
        except PlanError:
            refused += 1
    assert refused >= 0.95 * made


def test_few_harmless_mutants_are_refused(record_property):
    """At most one in ten refused mutants gives right results in the twin: the rules of `verify` ask for little more."""
    random, counts = Random(0), Counter()
    with np.errstate(all="ignore"):
        while counts["refused"] < 100:
            plan = right_plan(random)
            _, changed = mutant(plan, random)
            try:
                verify(changed)
            except PlanError:
                counts["refused"] += 1
                counts["harmless"] += difference(plan, changed) is None
    record_property("harmless among the refused", f"{counts['harmless']} of {counts['refused']}")
    assert counts["harmless"] <= 0.1 * counts["refused"], counts
