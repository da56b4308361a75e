"""Plans whose result is written over x: right, with the messages of the plan that they come from."""

from __future__ import annotations

from dataclasses import replace

import catalogue
import numpy as np
import pytest
from reference import reference
from twin import twin

import fompi
from fompi import Partial, Spec
from fompi.backends.numpy import Numpy
from fompi.base.errors import PlanError
from fompi.plans.over_x import over_x
from fompi.plans.plan import Chunk, Collective, Compute, Programs, Send
from fompi.plans.problems import Problem
from fompi.schedules import registry

BACKEND = Numpy()


def made_of(plan):
    """The plan over x. None: it needs memory of its own."""
    try:
        made = over_x(plan)
        list(made.programs)
    except PlanError:
        return None
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", range(1, 7))
def test_every_schedule_over_x(size, dtype):
    """They are proven, and compute what the plan computes. Only the sums of MPI and `exchange` need memory."""
    rng = np.random.default_rng(size)
    refused = set()
    problems = [Problem("broadcast", size, dtype, (), root=size - 1)]
    problems += [Problem("all_reduce", size, dtype, (), op=op) for op in ("sum", "mean", "max")]
    for problem in problems:
        for number, schedule in enumerate(registry.available(problem)):
            slices = (1, 3)[(number + size) % 2]
            plan = registry.write(problem, schedule, slices)
            made = made_of(plan)
            if made is None:
                refused.add(schedule)
                continue
            fompi.verify(made)
            kept = [[op for op in p.ops if not isinstance(op, Compute)] for p in plan.programs]
            now = [[op for op in p.ops if not isinstance(op, Compute)] for p in made.programs]
            for before, after in zip(kept, now, strict=True):
                assert [(type(a), getattr(a, "dest", getattr(a, "source", 0))) for a in before] == [
                    (type(b), getattr(b, "dest", getattr(b, "source", 0))) for b in after
                ]
            sizes = catalogue.sizes(problem, (4, 0, 1, 3, 2, 5)[:size])
            total = sum(sizes.rows)
            if dtype == "bfloat16" or any(isinstance(op, Collective) for p in made.programs for op in p.ops):
                continue  # the twin has no half types here, and no collectives of MPI
            inputs = [{"x": rng.standard_normal(total).astype("f4")} for _ in range(size)]
            wanted = reference(problem, inputs, sizes, np)
            got = twin(made, [{"x": i["x"].copy()} for i in inputs], BACKEND, sizes=sizes, seed=number)
            for mine, theirs in zip(got, wanted, strict=True):
                np.testing.assert_allclose(mine["x"], theirs["y"], rtol=1e-5, atol=1e-5)
    assert refused <= {"unfused", "sliced", "exchange"}


def spoiled(plan, change):
    return replace(plan, programs=Programs(plan.size, lambda rank: change(plan.programs[rank])))


def test_a_block_that_is_sent_too_late_is_found():
    """Its receiver would get the sum, not the term: the transformation refuses it, and so does the proof."""
    plan = fompi.plan(fompi.all_reduce, Spec((8,), "float32", Partial()), ranks=3, schedule="direct")

    def late(program):
        terms = [op for op in program.ops if isinstance(op, Send) and op.chunk.buffer == "x"]
        return replace(program, ops=(*[op for op in program.ops if op not in terms], *terms))

    with pytest.raises(PlanError, match="it needs x, which is overwritten"):
        list(over_x(spoiled(plan, late)).programs)
    made = over_x(plan)

    def renamed_late(program):
        sends = [op for op in program.ops if isinstance(op, Send)]
        return replace(program, ops=(*[op for op in program.ops if op is not sends[0]], sends[0]))

    with pytest.raises(PlanError):
        fompi.verify(spoiled(made, renamed_late))


def test_a_term_that_is_missing_is_found():
    made = over_x(fompi.plan(fompi.all_reduce, Spec((8,), "float32", Partial()), ranks=2, schedule="direct"))

    def without_sums(program):
        return replace(program, ops=tuple(op for op in program.ops if not isinstance(op, Compute)))

    with pytest.raises(PlanError, match="never written"):
        fompi.verify(spoiled(made, without_sums))


def test_what_cannot_be_written_over_x():
    gathered = fompi.plan(fompi.all_gather, Spec((8,), "float32", fompi.Shard(0)), ranks=2)
    summed = fompi.plan(fompi.all_reduce, Spec((8,), "float32", Partial()), ranks=2, schedule="direct")
    for plan in (gathered, over_x(summed), replace(summed, problem=replace(summed.problem, packed=True))):
        with pytest.raises(PlanError, match="cannot be written over x"):
            over_x(plan)
    assert "over x" in str(over_x(summed).problem)


def test_a_kernel_that_is_no_sum_in_place():
    plan = fompi.plan(fompi.all_reduce, Spec((8,), "float32", Partial()), ranks=2, schedule="direct")

    def scaled(program):
        return replace(program, ops=(Compute("matmul", (Chunk("x", 0, 1),), (Chunk("y", 0, 1),)),))

    with pytest.raises(PlanError, match="needs x"):
        list(over_x(spoiled(plan, scaled)).programs)
