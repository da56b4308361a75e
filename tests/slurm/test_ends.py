"""Jobs that are ended in the middle. All ranks of both nodes are gone within 5 s, and the log names the cause."""

from __future__ import annotations

import re
import time

import pytest
from slurm_cluster import MPIS, PLUGINS

CAUSES = {
    "scancel": r"STEP \d+\.0 ON n1 CANCELLED AT [-\d:T]+ \*\*\*",
    "time limit": r"STEP \d+\.0 ON n1 CANCELLED AT [-\d:T]+ DUE TO TIME LIMIT",
    "kill": r"srun: error: n2: task(s 2-| )3: Killed",  # with PMIx, Slurm may kill task 2 before srun hears of task 3
}
RANKS = r"srun: error: n2: tasks? [23].*: (Terminated|Killed|Exited with exit code \d+)"
"""Slurm's words for ranks that are gone. A rank that sees its peers of n1 die first is ended by MPI, with a code."""


def start(cluster, mpi, how):
    """Submit a job of four ranks on two nodes. Returns its number and its output."""
    what, output = "kill" if how == "kill" else "run", cluster.folder / f"{how}-{mpi}-{time.monotonic_ns()}"
    line = f"srun -K --mpi={PLUGINS[mpi]} python {cluster.program} {what} 100000"
    return cluster.submit(mpi, f"#!/bin/bash\n{line}\n", output, "-N2", "--ntasks-per-node=2"), output


def end(cluster, jobs, how):
    """End running jobs. Returns how many seconds later all ranks were gone."""
    for _, output in jobs:
        cluster.wait_for(output, lambda text: text.count("hello") == 4, 60)
    for number, _ in jobs:
        if how == "scancel":
            cluster.run("mpich", "scancel", number)
        elif how == "time limit":
            cluster.run("mpich", "scontrol", "update", f"JobId={number}", "EndTime=now")
    word = {"kill": "ends", "time limit": "DUE TO TIME LIMIT"}.get(how, "")
    for _, output in jobs:
        cluster.wait_for(output, lambda text: word in text, 45)  # Slurm looks for jobs that are over every 30 s
    begun = time.monotonic()
    cluster.until_gone(5)
    seconds = time.monotonic() - begun
    cluster.until_idle()
    for _, output in jobs:
        text = output.read_text()
        assert re.search(CAUSES[how], text) and re.search(RANKS, text) and "bye" not in text, text
    return seconds


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("how", ["scancel", "kill"])
def test_a_job_is_ended(cluster, mpi, how):
    end(cluster, [start(cluster, mpi, how)], how)


@pytest.mark.timeout(150)
def test_a_time_limit(cluster):
    """Both jobs at once, because Slurm needs up to 30 s to see that their time is over."""
    end(cluster, [start(cluster, mpi, "time limit") for mpi in MPIS], "time limit")


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("how", ["scancel", "kill"])
def test_twenty_jobs_are_ended(cluster, mpi, how):
    before, seconds = cluster.shared_memory(), []
    for _ in range(20):
        seconds.append(end(cluster, [start(cluster, mpi, how)], how))
        assert not cluster.shared_memory() - before
    print(f"{how}, {mpi}: all ranks were gone after {max(seconds):.1f} s at most")


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_twenty_time_limits(cluster):
    """Of each MPI. Four at once, or this test would last 20 minutes."""
    before, seconds = cluster.shared_memory(), []
    for _ in range(10):
        jobs = [start(cluster, mpi, "time limit") for mpi in MPIS for _ in range(2)]
        seconds.append(end(cluster, jobs, "time limit"))
        assert not cluster.shared_memory() - before
    print(f"time limit: all ranks were gone after {max(seconds):.1f} s at most")
