"""Products whose columns are dealt to the ranks: plans, refusals, and how much of their messages is exposed."""

from __future__ import annotations

import pytest

import fompi
from fompi import LayoutError, Replicate, Shard, Spec
from fompi.model.machine import Machine
from fompi.plans.problems import Form, problem

ROWS, K, N = 64, 12, 24
PROJECTION = Spec((ROWS, K), "float32", Shard(0)), Spec((K, N), "float32", Replicate())
REVERSE = Spec((ROWS, N), "float32", Shard(-1)), Spec((N, K), "float32", Replicate())
SPECS = {"matmul_all_to_all_columns": PROJECTION, "all_to_all_columns_matmul": REVERSE}


@pytest.mark.parametrize("operation", SPECS)
def test_the_exposed_time_is_the_bound(operation):
    """With N ranks, m slices, messages M and products P: max(0, M - (1 - 1/(N m)) P). Each message has the port alone.

    The last piece of the reverse is at the end of its messages, as the first piece of the projection is at the begin.
    """
    for ranks in (2, 4):
        for slices in (1, 2):
            for ratio in (0.3, 0.75, 1.0, 1.5):
                flops = 2.0 * ROWS / ranks * K * N
                sent = ROWS // ranks * N * 4 * (ranks - 1) / ranks
                machine = Machine("even", 0.0, sent / ratio, flops, 1e30, 0.0, lanes=2)
                how = {"schedule": "direct", "slices": slices, "window": 1}
                plan = fompi.plan(operation, *SPECS[operation], ranks=ranks, **how)
                exposed = fompi.simulate(plan, machine).seconds - 1.0
                assert exposed == pytest.approx(max(0.0, ratio - (1 - 1 / (ranks * slices))), abs=1e-9)
                unfused = fompi.plan(operation, *SPECS[operation], ranks=ranks, schedule="unfused_p2p")
                assert fompi.simulate(unfused, machine).seconds == pytest.approx(1.0 + ratio, abs=1e-9)


@pytest.mark.parametrize("operation", SPECS)
def test_the_planner_compares_all_schedules(operation):
    explanation = fompi.explain(operation, *SPECS[operation], ranks=4, machine="gigabit", bias=True)
    assert {judged.candidate.schedule for judged in explanation.judged} == {"direct", "unfused_p2p"}
    fompi.verify(explanation.plan)
    assert explanation.winner.seconds <= explanation.unfused.seconds
    assert "columns 6, 6, 6, 6" in str(explanation)


def test_a_plan_for_columns_that_do_not_divide():
    plan = fompi.plan("all_to_all_columns_matmul", *REVERSE, ranks=5)
    assert plan.problem.columns == (5, 5, 5, 5, 4) and plan.sizes.rows == (13, 13, 13, 13, 12)
    assert [p.buffer("x").row for p in plan.programs] == [(n,) for n in plan.problem.columns]
    fompi.verify(plan)


def test_plans_that_are_refused():
    with pytest.raises(LayoutError, match="takes tensors with the layouts"):
        fompi.plan("all_to_all_columns_matmul", *PROJECTION, ranks=2)
    with pytest.raises(fompi.PlanError, match=r"no schedule 'ring' for .*; choose auto, unfused_p2p, direct, pairwise"):
        fompi.plan("matmul_all_to_all_columns", *PROJECTION, ranks=2, schedule="ring")
    for operation, columns in (("matmul_all_to_all_columns", (1, 2)), ("all_to_all_columns_matmul", (3, 1, 0))):
        with pytest.raises(LayoutError, match="cannot split columns"):
            problem(operation, 2, Form((0, 4), "int32"), [Form((4, 4), "int32")], columns=columns)
