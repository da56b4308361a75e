"""Mutated plans: `verify` refuses them, naming rank, op and chunk, or the twin shows that they do the same.

The twin decides: a mutant that `verify` accepts must give the bits of the unmutated plan in several interleavings, for
even and for uneven rows. The numbers are whole and exact, so that no difference can hide in a rounding error.
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

from fompi.backends.numpy import Numpy
from fompi.base.errors import PlanError
from fompi.model.twin import twin
from fompi.plans.verify import verify
from fompi.schedules import registry

BACKEND = Numpy()
EACH = 300
DTYPES = ("float64", "float64", "bfloat16")
SEEDS = range(8)


@cache
def problems(size, dtype):
    return list(catalogue.problems(size, dtype).values())


def right_plan(random):
    problem = random.choice(problems(random.choice((1, 2, 3, 4, 5, 8)), random.choice(DTYPES)))
    return registry.write(problem, random.choice(registry.available(problem)), random.choice((1, 2)))


def bits(plan, inputs, sizes, seed):
    outputs = twin(plan, inputs, BACKEND, sizes=sizes, seed=seed)
    return [{name: (array.shape, array.tobytes()) for name, array in arrays.items()} for arrays in outputs]


def difference(plan, changed):
    """What the twin shows of a mutant: nothing, or in a word what is wrong with it."""
    for how in ("even", "uneven"):
        sizes = catalogue.sizes(plan.problem, how)
        inputs = catalogue.inputs(plan.problem, sizes, fill=catalogue.whole)
        right = bits(plan, inputs, sizes, 0)
        for seed in (1, 2, 3):
            try:
                if bits(changed, inputs, sizes, seed) != right:
                    return f"other results, rows {how}"
            except Exception as error:
                return f"{type(error).__name__}: {error}"
    return None


def says_where(error, plan, changed):
    """Rank, op and chunk are attributes of the error and stand in its message."""
    text, program = str(error), changed.programs[error.rank]
    if error.op is None:  # wrong memory, or no op at all
        no_op = not program.ops or program.buffers != plan.programs[error.rank].buffers
        return no_op and text.startswith(f"rank {error.rank}") and error.chunk in text
    chunks = (*program.ops[error.op].reads, *program.ops[error.op].writes)
    names_op = re.search(rf"\b(op|op,|last op,) {error.op}\b", text) is not None
    names_chunk = error.chunk in text if error.chunk else not chunks
    return text.startswith(f"rank {error.rank}") and names_op and names_chunk


@pytest.mark.parametrize("seed", SEEDS)
def test_mutants_are_refused_or_do_the_same(seed):
    random, seen = Random(seed), Counter()
    for number in range(EACH):
        plan = right_plan(random)
        name, changed = mutant(plan, random)
        if number % 3 == 0:  # two slips: what one leaves unread, the other may read
            second, changed = mutant(changed, random)
            name = f"{name}, then {second}"
        try:
            verify(changed)
        except PlanError as error:
            seen["refused"] += 1
            assert says_where(error, plan, changed), f"{name}: {error}; {error.rank}, {error.op}, {error.chunk}"
        else:
            seen["accepted"] += 1
            found = difference(plan, changed)
            assert found is None, f"verify accepts a wrong plan ({name}: {found})\n{plan}\n\n{changed}"
    assert seen["refused"] > 0.6 * EACH, seen


@pytest.mark.parametrize(
    "name", ["drop", "drop both ends", "drop everywhere", "divert", "turn round", "shift", "resize"]
)
def test_mutations_that_no_plan_survives(name):
    """Each of these is refused (nearly) every time: a schedule has no op and no block too many."""
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


def test_how_strict_verify_is(record_property):
    """Not a demand, a figure: how many refused mutants do the same in the twin (for these rows, in these runs)."""
    random, seen = Random(0), Counter()
    with np.errstate(all="ignore"):
        while seen["refused"] < 150:
            plan = right_plan(random)
            _, changed = mutant(plan, random)
            try:
                verify(changed)
            except PlanError:
                seen["refused"] += 1
                seen["harmless"] += difference(plan, changed) is None
    record_property("harmless among the refused", f"{seen['harmless']} of {seen['refused']}")
    print(f"{seen['harmless']} of {seen['refused']} refused mutants do the same in the twin")
