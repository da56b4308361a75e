"""The text of a plan: it explains its notation, and leaves out what says nothing new."""

from __future__ import annotations

from plan_texts import parse

import fompi
from fompi import Shard, Spec
from fompi.plans.plan import NOTATION, Chunk, Collective, Compute, Recv, Send, grid

X = Spec((64, 2), "float32", Shard(0))


def plan(operation, ranks, schedule, spec=X, **options):
    return fompi.plan(operation, spec, ranks=ranks, schedule=schedule, **options)


def test_the_notation_is_what_ops_print():
    """Each example of the legend is an op, or stands for one."""
    a = Chunk("a", 0, 1)
    ops = {Send: Send(1, a), Recv: Recv(1, a)}
    assert all(
        NOTATION[kind].startswith(f"{op} ") and parse(NOTATION[kind].split()[0]) == op for kind, op in ops.items()
    )
    for kind, op in {Compute: Compute("f", (a,), (a,)), Collective: Collective("f", (a,), (a,))}.items():
        shape = str(op).replace("a[0]", "a", 1).replace("a[0]", "b")
        assert NOTATION[kind].startswith(f"{shape} ")


def test_the_second_line_explains_the_ops_of_the_plan():
    _, legend, *_ = str(plan("all_gather", 4, "ring")).splitlines()
    assert legend == "; ".join(NOTATION[kind] for kind in (Send, Recv, Compute)) and len(legend) <= 120
    assert (
        str(plan("all_reduce", 2, "unfused", Spec((8,), "float32", fompi.Partial()))).splitlines()[1]
        == NOTATION[Collective]
    )


def test_of_many_ranks_the_first_ones_are_shown():
    made = plan("all_gather", 8, "ring")
    assert "... and 4 more ranks" in str(made) and "rank 3" in str(made) and "rank 7" not in str(made)
    assert "rank 7" in grid(made, is_whole=True) and "more rank" not in grid(made, is_whole=True)


def test_a_long_plan_shows_its_start_and_its_end():
    made = plan("all_gather", 60, "ring", slices=2)
    lines, ops = str(made).splitlines(), len(made.programs[0].ops)
    assert len(lines) < 50 and f"      ... {ops - 40} more ops" in lines
    assert lines[3].startswith("   0  ") and lines[-2].startswith(f" {ops - 1}  ")
    whole = grid(made, is_whole=True).splitlines()
    assert len(whole) == 3 + ops and "rank 59" in whole[2]


def test_a_plan_of_few_ranks_is_whole():
    made = plan("all_gather", 4, "ring")
    assert str(made) == grid(made, is_whole=True)
