"""`python -m fompi doctor`, as jobs of two ranks and of one."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

DOCTOR = ("-m", "fompi", "doctor")


def test_two_ranks(mpirun):
    """Every step is measured. Whether there are findings depends on the machine; none of them is an error."""
    done = mpirun(2, *DOCTOR, "--json", seconds=100)
    assert done.returncode == 0, done.output
    values = json.loads(done.stdout)
    measured = values["measured"]
    assert [place["versions"]["fompi"] for place in measured["places"]] == [values["info"]["versions"]["fompi"]] * 2
    assert all(place["shm"] > 0 and place["temporary_free"] > 0 for place in measured["places"])
    (link,) = measured["links"]
    assert link["where"] == "within a host" and 0 < link["latency"] < 1 and link["bytes_per_second"] > 1e6
    assert link["messages_per_second"] > 1
    assert measured["moved_while_kernels_run"] is None or 0 <= measured["moved_while_kernels_run"] <= 1
    (clock,) = measured["clocks"]
    assert clock["rank"] == 1 and abs(clock["offset"]) <= clock["error"] < 1, "both ranks read the same clock"
    (products,) = measured["products"].values()
    assert all(value > 0 for value in products.values())
    assert measured["undone"] == []
    assert all(finding["remedy"] and finding["severity"] in ("warning", "note") for finding in values["findings"])


def test_the_text_ends_with_the_findings(mpirun):
    """A misspelt variable is one. Only rank 0 prints."""
    done = mpirun(2, *DOCTOR, seconds=100, env={"FOMPI_TIMOUT": "3"})
    assert done.returncode == 0, done.output
    assert (
        done.stdout.count("launcher   ") == 1 and "within a host" in done.stdout and "clocks: known to" in done.stdout
    )
    _, _, found = done.stdout.partition("clocks: ")
    assert "warning: FOMPI_TIMOUT is no variable of fompi\n    FOMPI_TIMEOUT is one" in found
    assert done.stderr.count("pairs of ranks") == 1, "rank 0 shows the steps"


def test_an_error_makes_the_exit_status_1(mpirun):
    done = mpirun(2, *DOCTOR, seconds=100, env={"FOMPI_PROGRESS": "spin"})
    assert done.returncode == 1, done.output
    assert "1. error: FOMPI_PROGRESS=spin\n    give one of auto, helper, library, poll" in done.stdout


def test_steps_without_time_are_named(mpirun):
    done = mpirun(2, *DOCTOR, "--seconds", "1e-9", seconds=60)
    assert done.returncode == 0, done.output
    assert "no time was left for this step: pairs of ranks" in done.stdout


def test_one_rank_measures_its_host():
    done = subprocess.run([sys.executable, *DOCTOR], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "one rank has no links to measure" in done.stdout and "a product on " in done.stdout


def test_options_that_do_not_fit():
    for words in (["doctor", "--seconds", "0"], ["doctor", "--expect", "2"]):
        done = subprocess.run([sys.executable, "-m", "fompi", *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "doctor" in done.stderr.splitlines()[-1]


HANGS = """
import argparse, sys, time
from fompi.cli import doctor
from fompi.mpi import transport

doctor.GRACE_SECONDS = 6.0
transport.start_mpi()
if transport.world()[0] == 1:
    if sys.argv[1] == "MPI starts":
        time.sleep(100)
    doctor._Steps.products = lambda *arguments: time.sleep(100)
sys.exit(doctor.run(argparse.Namespace(seconds=1.0, json=False, hosts=None)))
"""


@pytest.mark.parametrize("step", ["MPI starts", "products"])
def test_a_rank_that_hangs_ends_the_test_in_time(mpirun, step):
    """Before the first communicator, and while the other rank waits for a message."""
    begun = time.monotonic()
    done = mpirun(2, "-c", HANGS, step, seconds=60)
    assert done.returncode not in (0, None) and not done.timed_out, done.output
    assert time.monotonic() - begun < 40
    assert f"doctor: not done after 7 s, in the step {step!r}: another rank or a link hangs" in done.stderr
