"""The verdict on a measured machine, and the cores that others used."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fompi.model.machine import Machine
from fompi.tuning import verdict
from fompi.tuning.verdict import MOST_CORES, OtherLoad, judge, most_loaded

MACHINE = replace(Machine.load("gigabit"), curve=((1024.0, 1e-4),))


@pytest.mark.parametrize(
    ("found", "text", "usable"),
    [
        ({}, "plausible: nothing disturbed the measurement", True),
        ({"kernels": 1.1, "links": 0.9, "others": 0.1, "cores": 2}, "plausible", True),
        ({"others": 0.5, "cores": 2}, "disturbed, but usable: others used 0.5 of 2 cores", True),
        ({"others": 0.9, "cores": 1}, "disturbed beyond use: others used 0.9 of 1 core. Measure again", False),
        ({"kernels": 1.2}, "disturbed, but usable: kernels took 1.2 times as long at the end as before", True),
        ({"kernels": 0.5}, "disturbed beyond use: kernels took 0.5 times as long at the end", False),
        ({"links": 0.0}, "disturbed beyond use: messages took 0.0 times as long at the end", False),
        ({"kernels": 1.2, "links": 3.0}, "disturbed beyond use: messages took 3.0 times as long at the end", False),
    ],
)
def test_a_verdict(found, text, usable):
    """What ruins the figures comes first."""
    made = judge(MACHINE, **found)
    assert str(made).startswith(text) and made.is_usable is usable


@pytest.mark.parametrize(
    ("field", "figure"), [("flops_rate", 1e300), ("flops_rate", 10.0), ("bandwidth", 1e300), ("latency", 5.0)]
)
def test_absurd_figures(field, figure):
    made = judge(replace(MACHINE, **{field: figure}))
    assert not made.is_usable and str(made).startswith(f"disturbed beyond use: {field} {figure:.2g} cannot be")


def counted(own, busy, total):
    row = np.zeros(1 + 2 * MOST_CORES)
    row[0], row[1 : 1 + len(busy)], row[1 + MOST_CORES : 1 + MOST_CORES + len(total)] = own, busy, total
    return row


def test_who_used_the_cores():
    """On each kernel the busy time of the cores, without that of the ranks. The most loaded kernel counts."""
    rows = np.array([counted(9, [10, 10], [10, 10]), counted(8, [10, 10], [10, 10]), counted(1, [10], [10])])
    assert most_loaded(["a", "a", "b"], rows) == (0.9, 1)
    assert most_loaded(["a", "a", "a"], rows) == (pytest.approx(0.2), 2)
    assert most_loaded(["a"], np.array([counted(1, [], [])])) == (0.0, 0)


class Alone:
    """mpi4py's communicator of one rank."""

    def Get_size(self):
        return 1

    def Allgather(self, own, everything):
        everything[0] = own


def test_a_program_alone_is_not_another_one(monkeypatch):
    """What this process uses is taken off. Where the kernel does not count, nothing is known."""
    load = OtherLoad(Alone())
    begun = load.begun.copy()
    monkeypatch.setattr(load, "_counted", lambda: begun + counted(2.0, [2.0, 0.5], [4.0, 4.0]))
    assert load.cores() == (pytest.approx(0.125), 2)
    monkeypatch.setattr(verdict, "_stat", dict)
    assert OtherLoad(Alone()).cores() == (0.0, 0)
