"""Variables of fompi under MPI: all ranks refuse a bad value at once, and a misspelt name is one warning."""

from __future__ import annotations

import pytest


@pytest.mark.one_mpi
@pytest.mark.parametrize(
    ("name", "text"), [("FOMPI_TIMEOUT", "abc"), ("FOMPI_PROGRESS", "x"), ("FOMPI_REPORT", "maybe")]
)
@pytest.mark.parametrize("ranks", ["all", "one"])
def test_a_bad_value_ends_all_ranks(launch, name, text, ranks):
    """Also if only one rank has it. The error names the variable, the value and what is allowed."""
    here = "True" if ranks == "all" else "rank == 1"
    code = f"""
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
if {here}:
    os.environ[{name!r}] = {text!r}
try:
    fompi.Communicator()
except fompi.FompiError as error:
    emit("CAUGHT", type(error).__name__, error)
"""
    ended = launch(3, code, world=False)
    caught = ended.lines("CAUGHT")
    assert len(caught) == 3 and all(f"{name}={text}: give " in line for line in caught), ended.output
    assert sum(line.startswith("LaunchError") for line in caught) == (3 if ranks == "all" else 1)
    assert ended.finished.seconds < 15


@pytest.mark.one_mpi
def test_a_misspelt_name_is_one_warning(launch):
    ended = launch(3, "fompi.Communicator().split(0)\nfompi.Communicator()", world=False, env={"FOMPI_TIMOUT": "3"})
    assert ended.finished.returncode == 0
    assert ended.output.count("UserWarning: FOMPI_TIMOUT is no variable of fompi: FOMPI_TIMEOUT is one") == 1, (
        ended.output
    )
