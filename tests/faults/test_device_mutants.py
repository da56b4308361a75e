"""The checker of the software device, and the comparison with the host, find every planted bug."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from device_mutants import MUTANTS
from strategy_mutants import MUTANTS as OF_STRATEGIES

HERE = Path(__file__).parents[1]
OF_CALLS = HERE / "device_mutants.py", [*MUTANTS], 8
OF_ALL = OF_CALLS, (HERE / "strategy_mutants.py", [*OF_STRATEGIES], 16)
JOBS = [(script, names[at : at + most]) for script, names, most in OF_ALL for at in range(0, len(names), most)]

pytestmark = pytest.mark.one_mpi


def run(mpirun, script, ranks, *names):
    done = mpirun(ranks, script, *names, env={"FOMPI_TIMEOUT": "1.5"}, seconds=60)
    assert not done.timed_out, done.output
    return done, dict(re.findall(r"^(.*?): (found|not found)", done.output, re.MULTILINE))


@pytest.mark.parametrize("script", [script for script, *_ in OF_ALL], ids=lambda script: script.name)
def test_nothing_is_found_in_the_code_as_it_is(mpirun, script):
    done, found = run(mpirun, script, 2, "none")
    assert found == {"none": "not found"}, done.output


@pytest.mark.parametrize(("script", "names"), JOBS, ids=lambda value: getattr(value, "name", None))
def test_planted_bugs_are_found(mpirun, script, names):
    done, found = run(mpirun, script, 2, *names)
    assert found == dict.fromkeys(names, "found"), done.output
