"""The text of a plan: it explains its notation, and leaves out what says nothing new."""

from __future__ import annotations

import catalogue
import pytest
from plan_texts import parse, with_program

import fompi
from fompi import Replicate, Shard, Spec
from fompi.plans.plan import NOTATION, Chunk, Collective, Compute, Recv, Send, are_alike, grid
from fompi.schedules.registry import write

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


@pytest.mark.parametrize(
    ("operation", "schedule", "spec", "alike"),
    [
        ("all_gather", "ring", X, True),
        ("all_gather", "unfused", X, True),
        ("all_to_all", "pairwise", X, True),
        ("all_to_all", "unfused", X, True),
        ("broadcast", "ring", Spec((64, 2), "float32", Replicate()), False),
        ("all_gather", "hierarchical(4)", X, False),
    ],
)
def test_ranks_that_do_the_same_are_left_out(operation, schedule, spec, alike):
    made = plan(operation, 8, schedule, spec)
    text = str(made)
    assert are_alike(made) is alike
    assert ("... and 5 more ranks, which do the same" in text) is alike and ("rank 7" in text) is not alike
    assert "rank 7" in grid(made, is_whole=True) and "more rank" not in grid(made, is_whole=True)


@pytest.mark.parametrize("ranks", [5, 6])
def test_alike_means_that_moving_ranks_and_blocks_gives_the_program(ranks):
    """A plan in which one rank does something else is not folded."""
    for name in ("all_gather", "matmul_reduce_scatter", "all_reduce"):
        problem = catalogue.problems(ranks)[name]
        made = write(problem, "ring", 2, catalogue.sizes(problem, "even"))
        assert are_alike(made)
        last = made.programs[ranks - 1]
        odd = type(last)(last.rank, last.size, last.parts, last.buffers, last.ops[:-1])
        assert not are_alike(with_program(made, odd))


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
