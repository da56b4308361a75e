"""A kernel that raises counters, in Numba's simulator: groups are sent by MPI while the rest is computed."""

from __future__ import annotations

import re

import pytest


@pytest.mark.parametrize("moves", ["reduce_scatter", "all_to_all", "all_reduce"])
def test_groups_are_sent_while_the_kernel_runs(mpirun, moves):
    """Three calls with the same counters. The data are exact, so the bits must be right."""
    done = mpirun(2, "tests/counters_twin.py", moves, seconds=50, env={"NUMBA_ENABLE_CUDASIM": "1"})
    assert done.returncode == 0 and not done.timed_out, done.output
    said = re.findall(r"^rank (\d): call (\d) is right, (\d) groups left while the kernel ran$", done.stdout, re.M)
    assert sorted((rank, call) for rank, call, _ in said) == [(rank, call) for rank in "01" for call in "123"]
    assert all(int(early) >= 1 for *_, early in said), done.stdout
