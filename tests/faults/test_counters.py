"""A kernel that announces its products, in Numba's simulator: messages leave while the rest is computed."""

from __future__ import annotations

import re
from itertools import product

import pytest


@pytest.mark.one_mpi
def test_messages_leave_while_the_kernel_runs(mpirun):
    """The products of plans with unequal rows, three calls each with the same counters. The data are whole numbers."""
    done = mpirun(2, "tests/counters_twin.py", seconds=50, env={"NUMBA_ENABLE_CUDASIM": "1"})
    assert done.returncode == 0 and not done.timed_out, done.output
    said = re.findall(r"^rank (\d): (\w+) (\d) is right, (\d) messages left while the kernel ran$", done.stdout, re.M)
    wanted = product("01", ("all_reduce", "all_to_all", "reduce_scatter"), "123")
    assert sorted(each[:3] for each in said) == [*wanted]
    assert all(int(early) >= 1 for *_, early in said), done.stdout
