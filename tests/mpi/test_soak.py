"""Long repetitions: `make soak` runs them, `make test` does not."""

from __future__ import annotations

from random import Random

import calls
import catalogue
import numpy as np
import pytest

from fompi.schedules import registry

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

CALLS = 20_000


def test_random_calls(world):
    """All ranks draw the same operation, rows, schedule and slices. The numbers are whole, so that sums are exact."""
    draw = Random(f"soak {world.size}")
    problems = catalogue.problems(world.size)
    for number in range(CALLS):
        problem = problems[draw.choice(calls.NAMES)]
        sizes = calls.row_sizes(problem, draw.choice(catalogue.ROWS), seed=draw.randrange(1000))
        inputs = catalogue.inputs(problem, sizes, number, catalogue.integers)
        schedule = draw.choice(("auto", *registry.available(problem)))
        slices = None if schedule == "auto" else draw.choice((1, 2, (1, 2)))
        results = calls.call(problem, inputs[world.rank], sizes, world, schedule=schedule, slices=slices)
        for name, wanted in calls.expected(problem, inputs, sizes, world.rank).items():
            what = f"call {number}: {problem.operation} by {schedule}, slices {slices}, {name}"
            np.testing.assert_array_equal(results[name], wanted, err_msg=what)
