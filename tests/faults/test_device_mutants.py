"""The checker of the software device, and the comparison with the host, find every planted bug."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from device_mutants import MUTANTS

SCRIPT = Path(__file__).parents[1] / "device_mutants.py"
NAMES = list(MUTANTS)
IN_A_JOB = 8

pytestmark = pytest.mark.one_mpi


def run(mpirun, ranks, *names):
    done = mpirun(ranks, SCRIPT, *names, env={"FOMPI_TIMEOUT": "1.5"}, seconds=60)
    assert not done.timed_out, done.output
    return done, dict(re.findall(r"^(.*?): (found|not found)", done.output, re.MULTILINE))


@pytest.mark.parametrize("ranks", [2, 3])
def test_nothing_is_found_in_the_code_as_it_is(mpirun, ranks):
    done, found = run(mpirun, ranks, "none")
    assert found == {"none": "not found"}, done.output


@pytest.mark.parametrize("start", range(0, len(NAMES), IN_A_JOB))
def test_planted_bugs_are_found(mpirun, start):
    names = NAMES[start : start + IN_A_JOB]
    done, found = run(mpirun, 2, *names)
    assert found == dict.fromkeys(names, "found"), done.output
