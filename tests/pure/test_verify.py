"""Wrong plans, written by hand: what `verify` says of each, and where it points."""

from __future__ import annotations

from dataclasses import replace

import catalogue
import numpy as np
import pytest

from fompi.backends.numpy import Numpy
from fompi.base.errors import PlanError
from fompi.base.layout import Sizes
from fompi.model.machine import Machine
from fompi.model.simulate import simulate
from fompi.model.twin import twin
from fompi.plans.plan import Plan, parse
from fompi.plans.problems import Form, problem
from fompi.plans.verify import verify
from fompi.schedules import registry

X, W, V = Form((0, 3), "float64"), Form((3, 4), "float64"), Form((3, 2), "float64")
GATHER = problem("all_gather", 2, X)
SCATTER = problem("reduce_scatter", 2, X)
REDUCE = problem("all_reduce", 2, Form((0,), "float64"))
HALVES = problem("all_reduce", 2, Form((0,), "bfloat16"))
MATMUL = problem("all_gather_matmul", 2, X, [W], [Form((4,), "float64")], keep=True)
MANY = problem("all_gather_matmul_many", 2, X, [W, V], keep=True)
GRADIENT = problem("all_gather_weight_gradient", 2, X, operands=[Form((0, 5), "float64")], keep=True)
BROADCAST = problem("broadcast", 2, X)

ROWS = ("s", "rows", (3,), "float64")
"""Scratch for all rows."""


def made(problem, *programs, scratch=(), parts=1, window=None):
    """A plan from the text of its ops, one text per rank; a scratch buffer is (name, axis, row, dtype)."""
    listed = []
    for rank, text in enumerate(programs):
        work = problem.workspace(rank, parts)
        for buffer in scratch:
            work.scratch(*buffer)
        listed.append(work.program(parse(op.lstrip()) for op in text.split(";") if op.strip()))
    return Plan(problem, "by hand", (1,) * parts, Sizes(rows=(0,) * problem.size), tuple(listed), window)


def assert_refused(plan, text, rank, op, chunk):
    with pytest.raises(PlanError) as caught:
        verify(plan)
    error = caught.value
    assert text in str(error)
    assert (error.rank, error.op, error.chunk) == (rank, op, chunk)
    assert f"rank {rank}" in str(error) and chunk in str(error)


OURS, THEIRS = "x[0]>1; y[1]<1; copy(x[0]) -> y[0]", "x[1]>0; y[0]<0; copy(x[1]) -> y[1]"


def test_right_ones():
    verify(made(GATHER, OURS, THEIRS))
    gathered = "all_gather{x[0] -> y[0], y[1]}"
    verify(made(GATHER, gathered, gathered.replace("x[0]", "x[1]")))


# ------------------------------------------------------------------------------------------------ races


def test_overwriting_what_is_sent_is_no_race():
    """The copy waits until the message has left, whenever that is: the twin, which reads late by chance, agrees."""
    again = "copy(x[0]) -> y[0]; y[0]>1; y[1]<1; copy(x[0]) -> y[0]"
    plan = made(GATHER, again, THEIRS)
    verify(plan)
    sizes, inputs = Sizes(rows=(2, 3)), [{"x": np.ones((2, 3))}, {"x": np.full((3, 3), 2.0)}]
    for seed in range(10):
        for out in twin(plan, inputs, Numpy(), sizes=sizes, seed=seed):
            assert out["y"][:, 0].tolist() == [1, 1, 2, 2, 2]


def test_an_exchange_in_place_waits_for_itself():
    """Each receive waits until its block is sent, each send for the other's receive.

    (Of a small message, sent before it is received, MPI would make a right result: by luck, which is refused.)
    """
    program = "copy(x[0]) -> s[0]; s[0]>{0}; s[0]<{0}"
    plan = made(SCATTER, program.format(1), program.format(0), scratch=[ROWS])
    why = "rank 0 never completes op 1, s[0]>1: rank 1 receives it only after its op 1, which waits for rank 0."
    assert_refused(plan, why, 0, 1, "s[0]")


@pytest.mark.parametrize(
    ("op", "why", "chunk"),
    [
        ("copy(x[0:2], x[0:2]) -> s[0:2], s[0:2]", "s[0:2] is written twice", "s[0:2]"),
        ("copy(x[0], x[0]) -> s[0], s[0]", "s[0] is written twice", "s[0]"),
        ("copy(x[0], x[1]) -> s[0:2], s[1]", "s[1] is written twice", "s[1]"),
        ("copy(s[0:2]) -> s[0:2]", "s[0:2] is written while s[0:2] is read", "s[0:2]"),
        ("copy(s[0], s[1]) -> s[1], s[0]", "s[1] is written while s[1] is read", "s[1]"),
        ("add(s[0], s[1], x[0], x[1]) -> s[1], s[0]", "s[1] is written while s[1] is read", "s[1]"),
        ("all_reduce{s[0:2] -> s[0:2]}", "s[0:2] is written while s[0:2] is read", "s[0:2]"),
        ("all_reduce{s[0:2] -> s[1:3]}", "s[1:3] is not within the blocks of this rank, s[0:2]", "s[1:3]"),
    ],
)
def test_no_op_writes_what_it_reads(op, why, chunk):
    """But for sums in place. Libraries and kernels read and write in an order of their own."""
    plan = made(SCATTER, f"copy(x[0:2]) -> s[0:2]; {op}", "", scratch=[ROWS])
    assert_refused(plan, why, 0, 1, chunk)


def test_sums_in_place_are_allowed():
    program = "x[{1}]>{1}; s[{0}]<{1}; add(s[{0}], x[{0}]) -> s[{0}]; copy(s[{0}]) -> y[{0}]"
    verify(made(SCATTER, program.format(0, 1), program.format(1, 0), scratch=[ROWS]))


# ------------------------------------------------------------------------------------------------ it does not end


def test_two_ranks_that_wait_for_each_other():
    plan = made(GATHER, "y[1]<1; y[1]>1", "y[1]<0; y[1]>0")
    why = "rank 0 never completes op 0, y[1]<1: rank 1 sends it only after its op 0, which waits for rank 0."
    assert_refused(plan, why, 0, 0, "y[1]")
    with pytest.raises(PlanError, match=r"rank 0 never completes op 0, y\[1\]<1"):
        simulate(plan, Machine.load("laptop"))


def test_a_window_can_be_too_narrow():
    """Rank 1 takes block 0 from rank 0 only after it has had it from rank 2, who has it from rank 0's second send."""
    three = problem("all_gather", 3, X)
    programs = (
        "x[0]>1; x[0]>2; y[1]<1; y[2]<2; copy(x[0]) -> y[0]",
        "y[0]<2; y[0]<0; x[1]>0; x[1]>2; y[2]<2; copy(x[1]) -> y[1]",
        "y[0]<0; y[0]>1; x[2]>1; x[2]>0; y[1]<1; copy(x[2]) -> y[2]",
    )
    verify(made(three, *programs))
    verify(made(three, *programs, window=2))
    why = "rank 0 never completes op 0, x[0]>1: rank 1 receives it only after its op 0, which waits for rank 2."
    assert_refused(made(three, *programs, window=1), why, 0, 0, "x[0]")


def test_ops_that_wait_for_each_other_in_one_rank():
    """In step, ranks 0 and 2 may send s only when they have what they receive into s after it; nobody misses it."""
    three, scratch = problem("all_gather", 3, X), [ROWS]
    programs = (
        "copy(x[0]) -> y[0]; x[0]>1; s[0]>2; s[0]<2; y[1]<1; y[2]<1",
        "copy(x[1]) -> y[1]; y[0]<0; y[2]<2; x[1]>0; y[2]>0; x[1]>2; y[0]>2",
        "copy(x[2]) -> y[2]; x[2]>1; s[0]>0; s[0]<0; y[1]<1; y[0]<1",
    )
    plan = replace(made(three, *programs, scratch=scratch, window=1), schedule="pairwise")
    assert_refused(plan, "rank 0 never begins op 2, s[0]>2: it waits in a circle", 0, 2, "s[0]")


def test_a_collective_that_a_rank_does_not_reach():
    plan = made(
        REDUCE,
        "s[1]<1; copy(x[0]) -> s[0]; all_reduce{s[0:2] -> y[0:2]}",
        "copy(x[0:2]) -> s[0:2]; all_reduce{s[0:2] -> y[0:2]}; y[1]>0",
        scratch=[("s", "rows", (), "float64")],
    )
    assert_refused(plan, "rank 0 never completes op 0, s[1]<1: rank 1 sends it only after its op 1.", 0, 0, "s[1]")


# ------------------------------------------------------------------------------------------------ messages


def test_a_send_that_nobody_receives():
    plan = made(GATHER, OURS, "x[1]>0; copy(x[1]) -> y[1]")
    assert_refused(plan, "rank 0, op 0, x[0]>1: rank 1 never receives it", 0, 0, "x[0]")


def test_a_receive_that_nobody_sends():
    plan = made(GATHER, OURS, "y[0]<0; copy(x[1]) -> y[1]")
    assert_refused(plan, "rank 0, op 1, y[1]<1: rank 1 never sends it", 0, 1, "y[1]")


@pytest.mark.parametrize("peer", [0, 2, 7])
def test_a_message_to_nobody(peer):
    plan = made(GATHER, OURS.replace(">1", f">{peer}"), THEIRS)
    assert_refused(plan, f"rank 0, op 0, x[0]>{peer}: {peer} is not another rank of 2", 0, 0, "x[0]")


def test_a_message_of_other_rows():
    """Block 0 and block 1 may have different lengths, even if they have the same in some call."""
    plan = made(GATHER, OURS, THEIRS.replace("y[0]<0", "y[1]<0"))
    assert_refused(plan, "the rows of x[0] are not those of y[1] on rank 1, op 1, y[1]<0", 0, 0, "x[0]")


def test_a_message_of_another_shape():
    plan = made(GATHER, OURS, THEIRS.replace("y[0]<0", "s[0]<0"), scratch=[("s", "rows", (4,), "float64")])
    assert_refused(plan, "x[0], float64[3], arrives as float64[4] in s[0] on rank 1, op 1", 0, 0, "x[0]")


def test_a_message_of_another_dtype():
    plan = made(HALVES, "x[1]>1", "s[1]<0", scratch=[("s", "rows", (), "float32")])
    assert_refused(plan, "x[1], bfloat16[], arrives as float32[] in s[1] on rank 1, op 0", 0, 0, "x[1]")


# ------------------------------------------------------------------------------------------------ one op


@pytest.mark.parametrize(
    ("problem", "program", "why", "op", "chunk"),
    [
        (GATHER, "y[0]>1; copy(x[0]) -> y[0]", "y[0] is read before anything is written there", 0, "y[0]"),
        (GATHER, "copy(x[0]) -> s[0]; copy(s[0:2]) -> y[0:2]", "s[1] is read before anything", 1, "s[1]"),
        (GATHER, "x[0]<1", "x[0] is an input, which nobody may write", 0, "x[0]"),
        (GATHER, "copy(y[0]) -> x[0]", "x[0] is an input, which nobody may write", 0, "x[0]"),
        (GATHER, "copy(x[0]) -> z[0]", "there is no buffer 'z'", 0, "z[0]"),
        (GATHER, "copy(x[1]) -> y[1]", "x[1] is not within the blocks of this rank, x[0]", 0, "x[1]"),
        (GATHER, "copy(x[0]) -> y[2]", "y[2] is not within the blocks of this rank, y[0:2]", 0, "y[2]"),
        (GATHER, "copy(x[0:0]) -> y[0:0]", "x[0:0] is not within the blocks of this rank", 0, "x[0:0]"),
        (GATHER, "move(x[0]) -> y[0]", "no kernel 'move'", 0, "y[0]"),
        (GATHER, "gather{x[0] -> y[0]}", "no collective 'gather'", 0, "y[0]"),
        (GATHER, "copy(x[0]) -> y[1]", "its operands have not equally many rows", 0, "y[1]"),
        (GATHER, "copy() -> y[0]", "the kernel takes other operands", 0, "y[0]"),
        (GATHER, "copy(x[0]) -> ", "the kernel takes other operands", 0, "x[0]"),
        (GATHER, "add(x[0]) -> y[0]", "the kernel takes other operands", 0, "y[0]"),
        (GATHER, "copy(x[0]) -> wide[0]", "the shapes of the rows do not fit: x[0] [3], wide[0] [4]", 0, "wide[0]"),
        (MATMUL, "matmul(x[0]) -> y[0]", "the kernel takes other operands", 0, "y[0]"),
        (MATMUL, "matmul(x[0], x[0]) -> y[0]", "x[0] comes in rows; the kernel takes a whole operand", 0, "x[0]"),
        (MATMUL, "matmul(x[0], bias[0]) -> y[0]", "the shapes of the rows do not fit", 0, "y[0]"),
        (MATMUL, "matmul(x[0], w[0]) -> x_full[0]", "the shapes of the rows do not fit", 0, "x_full[0]"),
        (MATMUL, "matmul_bias(x[0], bias[0], w[0]) -> y[0]", "the shapes of the rows do not fit", 0, "y[0]"),
        (MANY, "matmul(x[0], w1[0]) -> y0[0]", "the shapes of the rows do not fit", 0, "y0[0]"),
        (GRADIENT, "gradient(x[0], h[0]) -> x_full[0]", "x_full[0] comes in rows", 0, "x_full[0]"),
        (GRADIENT, "gradient(h[0], x[0]) -> g[0]", "the shapes of the rows do not fit", 0, "g[0]"),
        (GRADIENT, "gradient(x[0], h[1]) -> g[0]", "its operands have not equally many rows", 0, "h[1]"),
        (GRADIENT, "gradient_add(x[0], h[0], g[0]) -> g[0]", "g[0] is read before anything", 0, "g[0]"),
    ],
)
def test_an_op_that_cannot_be(problem, program, why, op, chunk):
    scratch = [ROWS, ("wide", "rows", (4,), "float64")]
    assert_refused(made(problem, program, "y[0]<0" if ">" in program[:5] else "", scratch=scratch), why, 0, op, chunk)


def test_runs_of_blocks_go_together_one_by_one():
    """Two chunks of one block each are not written as one chunk of two."""
    why = "its operands have not equally many rows"
    assert_refused(made(REDUCE, "copy(x[0:2]) -> y[0], y[1]", ""), why, 0, 0, "y[0]")
    assert_refused(made(REDUCE, "add(x[0], x[1], x[0:2], x[1]) -> y[0], y[1]", ""), why, 0, 0, "x[0:2]")


def test_rounding_twice():
    """A result of half type was rounded; to compute with it again would round it a second time."""
    program = "x[0:2]>{0}; s[0:2]<{0}; add(s[0:2], x[0:2]) -> t[0:2]; add(t[0:2], u[0:2]) -> y[0:2]"
    program = "copy(x[0:2]) -> u[0:2]; " + program
    plan = made(HALVES, program.format(1), program.format(0), scratch=[(n, "rows", (), "bfloat16") for n in "stu"])
    assert_refused(plan, "t[0:2] has been rounded to bfloat16; this would round it again", 0, 4, "t[0:2]")


# ------------------------------------------------------------------------------------------------ collectives


@pytest.mark.parametrize(
    ("problem", "programs", "why", "rank", "op", "chunk"),
    [
        (GATHER, ("all_gather{x[0] -> y[0], y[1]}", ""), "collective 0 of this rank, but that of rank 1 is none", 0, 0,
         "y[0]"),
        (REDUCE, ("all_reduce{x[0] -> y[0]}; broadcast{x[1] -> }", "broadcast{ -> y[1]}; all_reduce{x[0] -> y[0]}"),
         "collective 0 of this rank, but that of rank 0 is all_reduce", 1, 0, "y[1]"),
        (GATHER, ("all_gather{x[0] -> y[0]}", "all_gather{x[1] -> y[0], y[1]}"),
         "all_gather reads 1 and writes 2 chunks here", 0, 0, "y[0]"),
        (GATHER, ("all_gather{x[0] -> y[0], y[1]}", "all_gather{x[1] -> y[1], y[0]}"),
         "the rows of x[0] are not those of y[1] on rank 1, op 0", 0, 0, "x[0]"),
        (BROADCAST, ("broadcast{ -> y[0:2]}", "broadcast{ -> y[0:2]}"), "broadcast reads 1 and writes 0 chunks", 0, 0,
         "y[0:2]"),
        (BROADCAST, ("broadcast{x[0:2] -> }", "broadcast{x[0:2] -> }"), "broadcast reads 0 and writes 1 chunks", 1, 0,
         "x[0:2]"),
        (SCATTER, ("reduce_scatter{x[0] -> y[0]}", "reduce_scatter{x[0] -> y[1]}"),
         "x[0] has not equally many blocks for each of 2 ranks", 0, 0, "x[0]"),
        (SCATTER, ("reduce_scatter{x[0:2] -> s[1]}", "reduce_scatter{x[0:2] -> y[1]}"),
         "the rows of x[0] are not those of s[1] on rank 0", 0, 0, "x[0]"),
    ],
)  # fmt: skip
def test_collectives_that_do_not_go_together(problem, programs, why, rank, op, chunk):
    assert_refused(made(problem, *programs, scratch=[ROWS]), why, rank, op, chunk)


# ------------------------------------------------------------------------------------------------ the result


def test_an_output_that_is_never_written():
    plan = made(GATHER, OURS[: OURS.rindex(";")], THEIRS)
    assert_refused(plan, "rank 0, after its last op, 1: y[0] is never written", 0, 1, "y[0]")
    assert_refused(made(REDUCE, "", ""), "rank 0 has no ops: y[0] is never written", 0, None, "y[0]")


SUM = "x[0:2]>{0}; s[0:2]<{0}; add(s[0:2], x[0:2]) -> y[0:2]"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("; add(y[0], x[0]) -> y[0]", "at the end y[0] holds x[0] of rank 0 too often"),
        ("; add(y[0], s[0]) -> y[0]", "at the end y[0] holds x[0] of rank 1 too often"),
        ("; copy(x[0]) -> y[0]", "at the end y[0] lacks x[0] of rank 1"),
    ],
)
def test_a_sum_of_other_terms(change, why):
    scratch = [("s", "rows", (), "float64")]
    verify(made(REDUCE, SUM.format(1), SUM.format(0), scratch=scratch))
    assert_refused(made(REDUCE, SUM.format(1) + change, SUM.format(0), scratch=scratch), why, 0, 3, "y[0]")


def test_a_bias_added_by_every_rank():
    """The sum of the products has the bias once."""
    bias = problem("matmul_all_reduce", 2, X, [W], [Form((4,), "float64")])
    program = "matmul_bias(x[0:2], w[0], bias[0]) -> s[0:2]; all_reduce{s[0:2] -> y[0:2]}"
    plan = made(bias, program, program, scratch=[("s", "rows", (4,), "float64")])
    assert_refused(plan, "at the end y[0] holds bias[0] of rank 1 too often", 0, 1, "y[0]")


# ------------------------------------------------------------------------------------------------ programs, memory


def changed(plan, number, **fields):
    programs = list(plan.programs)
    programs[number] = replace(programs[number], **fields)
    return replace(plan, programs=tuple(programs))


def test_programs_of_another_rank_or_problem():
    plan = made(GATHER, OURS, THEIRS)
    for wrong in (changed(plan, 1, rank=0), changed(plan, 1, size=3), changed(plan, 1, parts=2)):
        with pytest.raises(PlanError, match="rank 1 of 2: its program is that of rank"):
            verify(wrong)
    with pytest.raises(PlanError, match="rank 0 of 2: its program is that of"):
        verify(replace(plan, problem=catalogue.problems(3)["all_gather"]))


@pytest.mark.parametrize("fields", [{"dtype": "float32"}, {"role": "scratch"}, {"axis": "own"}, {"row": ()}])
def test_inputs_and_outputs_are_those_of_the_problem(fields):
    plan = made(GATHER, OURS, THEIRS)
    x, y = plan.programs[1].buffers
    with pytest.raises(PlanError, match=r"rank 1: the problem has Buffer\(name='y'"):
        verify(changed(plan, 1, buffers=(x, replace(y, **fields))))
    with pytest.raises(PlanError, match="the program None"):
        verify(changed(plan, 1, buffers=(x,)))


def test_scratch_is_of_the_axis_and_dtype_that_it_can_have():
    plan = made(GATHER, OURS, THEIRS, scratch=[ROWS])
    x, y, s = plan.programs[0].buffers
    for wrong in (replace(s, count=3), replace(s, first=1), replace(s, axis="columns")):
        with pytest.raises(PlanError, match="are not the blocks of the axis"):
            verify(changed(plan, 0, buffers=(x, y, wrong)))
    with pytest.raises(PlanError, match=r"rank 0: s\[0:2\] is float32 in a plan of float64"):
        verify(changed(plan, 0, buffers=(x, y, replace(s, dtype="float32"))))


def test_plans_of_many_ranks():
    """A ring of 32 ranks, 2 parts each: one walk."""
    verify(registry.write(catalogue.problems(32)["matmul_reduce_scatter"], "ring", 2))
