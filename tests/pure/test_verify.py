"""Wrong plans, written by hand, and the error that `verify` raises for each of them."""

from __future__ import annotations

from dataclasses import replace

import catalogue
import numpy as np
import pytest
from plan_texts import parse
from twin import twin

from fompi.backends.numpy import Numpy
from fompi.base.errors import PlanError
from fompi.base.layout import Sizes
from fompi.model.machine import Machine
from fompi.model.simulate import simulate
from fompi.plans.plan import Plan
from fompi.plans.problems import Form, problem
from fompi.plans.verify import verify
from fompi.schedules import registry

X, W, V = Form((0, 3), "float64"), Form((3, 4), "float64"), Form((3, 2), "float64")
GATHER = problem("all_gather", 2, X)
MAXIMUM = problem("all_reduce", 2, Form((0,), "float64"), op="max")
SCATTER = problem("reduce_scatter", 2, X)
REDUCE = problem("all_reduce", 2, Form((0,), "float64"))
HALVES = problem("all_reduce", 2, Form((0,), "bfloat16"))
MATMUL = problem("all_gather_matmul", 2, X, [W], [Form((4,), "float64")], keep=True)
MANY = problem("all_gather_matmul_many", 2, X, [W, V], keep=True)
GRADIENT = problem("all_gather_weight_gradient", 2, X, operands=[Form((0, 5), "float64")], keep=True)
BROADCAST = problem("broadcast", 2, X)

ROWS = ("s", "rows", (3,), "float64")
"""A scratch buffer for all rows."""


def made(problem, *programs, scratch=(), parts=1, window=None):
    """A plan from the text of its ops, one text per rank. A scratch buffer is (name, axis, row, dtype)."""
    written = []
    for rank, text in enumerate(programs):
        work = problem.workspace(rank, parts)
        for buffer in scratch:
            work.scratch(*buffer)
        written.append(work.program(parse(op.lstrip()) for op in text.split(";") if op.strip()))
    return Plan(problem, "by hand", (1,) * parts, Sizes(rows=(0,) * problem.size), tuple(written), window)


def assert_refused(plan, text, rank, op, chunk):
    """`verify` raises PlanError with this text and this rank, op and chunk."""
    with pytest.raises(PlanError) as caught:
        verify(plan)
    error = caught.value
    assert text in str(error)
    assert (error.rank, error.op, error.chunk) == (rank, op, chunk)
    assert f"rank {rank}" in str(error) and chunk in str(error)


RANK0, RANK1 = "x[0]>1; y[1]<1; copy(x[0]) -> y[0]", "x[1]>0; y[0]<0; copy(x[1]) -> y[1]"


def test_right_plans_are_accepted():
    verify(made(GATHER, RANK0, RANK1))
    gathered = "all_gather{x[0] -> y[0], y[1]}"
    verify(made(GATHER, gathered, gathered.replace("x[0]", "x[1]")))


# ------------------------------------------------------------------------------------------------ races


def test_a_block_may_be_overwritten_after_it_is_sent():
    """The copy waits for the send. The twin, which delays reads at random, gives the right result."""
    program = "copy(x[0]) -> y[0]; y[0]>1; y[1]<1; copy(x[0]) -> y[0]"
    plan = made(GATHER, program, RANK1)
    verify(plan)
    sizes, inputs = Sizes(rows=(2, 3)), [{"x": np.ones((2, 3))}, {"x": np.full((3, 3), 2.0)}]
    for seed in range(10):
        for out in twin(plan, inputs, Numpy(), sizes=sizes, seed=seed):
            assert out["y"][:, 0].tolist() == [1, 1, 2, 2, 2]


def test_an_exchange_in_place_is_a_deadlock():
    """Each receive waits for the send of its block. Each send waits for the receive of the other rank.

    MPI may complete the send of a small message early, so the result may be right by luck. `verify` refuses the plan.
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
        ("copy(s[0:2]) -> s[0:2]", "s[0:2] is written while the op reads s[0:2]", "s[0:2]"),
        ("copy(s[0], s[1]) -> s[1], s[0]", "s[1] is written while the op reads s[1]", "s[1]"),
        ("add(s[0], s[1], x[0], x[1]) -> s[1], s[0]", "s[1] is written while the op reads s[1]", "s[1]"),
        ("all_reduce{s[0:2] -> s[0:2]}", "s[0:2] is written while the op reads s[0:2]", "s[0:2]"),
        ("all_reduce{s[0:2] -> s[1:3]}", "s[1:3] is outside the blocks of this rank, s[0:2]", "s[1:3]"),
    ],
)
def test_an_op_must_not_write_a_block_that_it_reads(op, why, chunk):
    """Libraries and kernels read and write in any order. Only sums in place are allowed."""
    plan = made(SCATTER, f"copy(x[0:2]) -> s[0:2]; {op}", "", scratch=[ROWS])
    assert_refused(plan, why, 0, 1, chunk)


def test_sums_in_place_are_allowed():
    program = "x[{1}]>{1}; s[{0}]<{1}; add(s[{0}], x[{0}]) -> s[{0}]; copy(s[{0}]) -> y[{0}]"
    verify(made(SCATTER, program.format(0, 1), program.format(1, 0), scratch=[ROWS]))


# ------------------------------------------------------------------------------------------------ deadlocks


def test_two_ranks_that_wait_for_each_other():
    plan = made(GATHER, "y[1]<1; y[1]>1", "y[1]<0; y[1]>0")
    why = "rank 0 never completes op 0, y[1]<1: rank 1 sends it only after its op 0, which waits for rank 0."
    assert_refused(plan, why, 0, 0, "y[1]")
    with pytest.raises(PlanError, match=r"rank 0 never completes op 0, y\[1\]<1"):
        simulate(plan, Machine.load("laptop"))


def test_a_window_can_be_too_small():
    """Rank 1 receives block 0 first from rank 2, then from rank 0. Rank 2 needs the second send of rank 0 for this."""
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


def test_a_cycle_within_one_rank():
    """In step, the send of s waits for the receive that follows. This receive writes s, so it waits for the send."""
    three, scratch = problem("all_gather", 3, X), [ROWS]
    programs = (
        "copy(x[0]) -> y[0]; x[0]>1; s[0]>2; s[0]<2; y[1]<1; y[2]<1",
        "copy(x[1]) -> y[1]; y[0]<0; y[2]<2; x[1]>0; y[2]>0; x[1]>2; y[0]>2",
        "copy(x[2]) -> y[2]; x[2]>1; s[0]>0; s[0]<0; y[1]<1; y[0]<1",
    )
    plan = replace(made(three, *programs, scratch=scratch, window=1), schedule="pairwise")
    assert_refused(plan, "rank 0 never starts op 2, s[0]>2: its dependencies form a cycle", 0, 2, "s[0]")


def test_a_collective_that_a_rank_never_reaches():
    plan = made(
        REDUCE,
        "s[1]<1; copy(x[0]) -> s[0]; all_reduce{s[0:2] -> y[0:2]}",
        "copy(x[0:2]) -> s[0:2]; all_reduce{s[0:2] -> y[0:2]}; y[1]>0",
        scratch=[("s", "rows", (), "float64")],
    )
    assert_refused(plan, "rank 0 never completes op 0, s[1]<1: rank 1 sends it only after its op 1.", 0, 0, "s[1]")


# ------------------------------------------------------------------------------------------------ messages


def test_a_send_without_receive():
    plan = made(GATHER, RANK0, "x[1]>0; copy(x[1]) -> y[1]")
    assert_refused(plan, "rank 0, op 0, x[0]>1: rank 1 never receives it", 0, 0, "x[0]")


def test_a_receive_without_send():
    plan = made(GATHER, RANK0, "y[0]<0; copy(x[1]) -> y[1]")
    assert_refused(plan, "rank 0, op 1, y[1]<1: rank 1 never sends it", 0, 1, "y[1]")


@pytest.mark.parametrize("peer", [0, 2, 7])
def test_a_message_to_an_invalid_rank(peer):
    plan = made(GATHER, RANK0.replace(">1", f">{peer}"), RANK1)
    assert_refused(plan, f"rank 0, op 0, x[0]>{peer}: {peer} is not another rank of 2", 0, 0, "x[0]")


def test_a_receive_of_other_rows():
    """Blocks 0 and 1 may have different numbers of rows in some call."""
    plan = made(GATHER, RANK0, RANK1.replace("y[0]<0", "y[1]<0"))
    assert_refused(plan, "x[0] has other rows than y[1] on rank 1, op 1, y[1]<0", 0, 0, "x[0]")


def test_a_receive_of_another_shape():
    plan = made(GATHER, RANK0, RANK1.replace("y[0]<0", "s[0]<0"), scratch=[("s", "rows", (4,), "float64")])
    assert_refused(plan, "x[0] is float64[3], but s[0] on rank 1, op 1, is float64[4]", 0, 0, "x[0]")


def test_a_receive_of_another_dtype():
    plan = made(HALVES, "x[1]>1", "s[1]<0", scratch=[("s", "rows", (), "float32")])
    assert_refused(plan, "x[1] is bfloat16[], but s[1] on rank 1, op 0, is float32[]", 0, 0, "x[1]")


# ------------------------------------------------------------------------------------------------ one op


@pytest.mark.parametrize(
    ("problem", "program", "why", "op", "chunk"),
    [
        (GATHER, "y[0]>1; copy(x[0]) -> y[0]", "y[0] is read before it is written", 0, "y[0]"),
        (GATHER, "copy(x[0]) -> s[0]; copy(s[0:2]) -> y[0:2]", "s[1] is read before it is written", 1, "s[1]"),
        (GATHER, "x[0]<1", "x[0] is an input; inputs must not be written", 0, "x[0]"),
        (GATHER, "copy(y[0]) -> x[0]", "x[0] is an input; inputs must not be written", 0, "x[0]"),
        (GATHER, "copy(x[0]) -> z[0]", "unknown buffer 'z'", 0, "z[0]"),
        (GATHER, "copy(x[1]) -> y[1]", "x[1] is outside the blocks of this rank, x[0]", 0, "x[1]"),
        (GATHER, "copy(x[0]) -> y[2]", "y[2] is outside the blocks of this rank, y[0:2]", 0, "y[2]"),
        (GATHER, "copy(x[0:0]) -> y[0:0]", "x[0:0] is outside the blocks of this rank", 0, "x[0:0]"),
        (GATHER, "move(x[0]) -> y[0]", "unknown kernel 'move'", 0, "y[0]"),
        (GATHER, "gather{x[0] -> y[0]}", "unknown collective 'gather'", 0, "y[0]"),
        (GATHER, "copy(x[0]) -> y[1]", "its operands do not have equally many rows", 0, "y[1]"),
        (GATHER, "copy() -> y[0]", "the kernel does not take this number of operands", 0, "y[0]"),
        (GATHER, "copy(x[0]) -> ", "the kernel does not take this number of operands", 0, "x[0]"),
        (GATHER, "add(x[0]) -> y[0]", "the kernel does not take this number of operands", 0, "y[0]"),
        (GATHER, "copy(x[0]) -> wide[0]", "the shapes of the rows do not match: x[0] [3], wide[0] [4]", 0, "wide[0]"),
        (MATMUL, "matmul(x[0]) -> y[0]", "the kernel does not take this number of operands", 0, "y[0]"),
        (
            MATMUL,
            "matmul(x[0], x[0]) -> y[0]",
            "x[0] has rows, but the kernel takes an operand without rows",
            0,
            "x[0]",
        ),
        (MATMUL, "matmul(x[0], bias[0]) -> y[0]", "the shapes of the rows do not match", 0, "y[0]"),
        (MATMUL, "matmul(x[0], w[0]) -> x_full[0]", "the shapes of the rows do not match", 0, "x_full[0]"),
        (MATMUL, "matmul_bias(x[0], bias[0], w[0]) -> y[0]", "the shapes of the rows do not match", 0, "y[0]"),
        (MANY, "matmul(x[0], w1[0]) -> y0[0]", "the shapes of the rows do not match", 0, "y0[0]"),
        (GRADIENT, "gradient(x[0], h[0]) -> x_full[0]", "x_full[0] has rows", 0, "x_full[0]"),
        (GRADIENT, "gradient(h[0], x[0]) -> g[0]", "the shapes of the rows do not match", 0, "g[0]"),
        (GRADIENT, "gradient(x[0], h[1]) -> g[0]", "its operands do not have equally many rows", 0, "h[1]"),
        (GRADIENT, "gradient_add(x[0], h[0], g[0]) -> g[0]", "g[0] is read before it is written", 0, "g[0]"),
    ],
)
def test_an_invalid_op(problem, program, why, op, chunk):
    scratch = [ROWS, ("wide", "rows", (4,), "float64")]
    assert_refused(made(problem, program, "y[0]<0" if ">" in program[:5] else "", scratch=scratch), why, 0, op, chunk)


def test_chunks_must_match_one_by_one():
    """One chunk of two blocks does not match two chunks of one block each."""
    why = "its operands do not have equally many rows"
    assert_refused(made(REDUCE, "copy(x[0:2]) -> y[0], y[1]", ""), why, 0, 0, "y[0]")
    assert_refused(made(REDUCE, "add(x[0], x[1], x[0:2], x[1]) -> y[0], y[1]", ""), why, 0, 0, "x[0:2]")


def test_rounding_twice():
    """A result of half type has been rounded. A sum of it would be rounded a second time."""
    program = "x[0:2]>{0}; s[0:2]<{0}; add(s[0:2], x[0:2]) -> t[0:2]; add(t[0:2], u[0:2]) -> y[0:2]"
    program = "copy(x[0:2]) -> u[0:2]; " + program
    plan = made(HALVES, program.format(1), program.format(0), scratch=[(n, "rows", (), "bfloat16") for n in "stu"])
    assert_refused(plan, "t[0:2] has been rounded to bfloat16; this op would round it again", 0, 4, "t[0:2]")


# ------------------------------------------------------------------------------------------------ collectives


@pytest.mark.parametrize(
    ("problem", "programs", "why", "rank", "op", "chunk"),
    [
        (GATHER, ("all_gather{x[0] -> y[0], y[1]}", ""),
         "this is collective 0 of this rank, but collective 0 of rank 1 is none", 0, 0, "y[0]"),
        (REDUCE, ("all_reduce{x[0] -> y[0]}; broadcast{x[1] -> }", "broadcast{ -> y[1]}; all_reduce{x[0] -> y[0]}"),
         "this is collective 0 of this rank, but collective 0 of rank 0 is all_reduce", 1, 0, "y[1]"),
        (GATHER, ("all_gather{x[0] -> y[0]}", "all_gather{x[1] -> y[0], y[1]}"),
         "all_gather must read 1 and write 2 chunks on this rank", 0, 0, "y[0]"),
        (GATHER, ("all_gather{x[0] -> y[0], y[1]}", "all_gather{x[1] -> y[1], y[0]}"),
         "x[0] has other rows than y[1] on rank 1, op 0", 0, 0, "x[0]"),
        (BROADCAST, ("broadcast{ -> y[0:2]}", "broadcast{ -> y[0:2]}"),
         "broadcast must read 1 and write 0 chunks", 0, 0, "y[0:2]"),
        (BROADCAST, ("broadcast{x[0:2] -> }", "broadcast{x[0:2] -> }"),
         "broadcast must read 0 and write 1 chunks", 1, 0, "x[0:2]"),
        (SCATTER, ("reduce_scatter{x[0] -> y[0]}", "reduce_scatter{x[0] -> y[1]}"),
         "x[0] cannot be divided equally among 2 ranks", 0, 0, "x[0]"),
        (SCATTER, ("reduce_scatter{x[0:2] -> s[1]}", "reduce_scatter{x[0:2] -> y[1]}"),
         "x[0] has other rows than s[1] on rank 0", 0, 0, "x[0]"),
    ],
)  # fmt: skip
def test_collectives_that_do_not_match(problem, programs, why, rank, op, chunk):
    assert_refused(made(problem, *programs, scratch=[ROWS]), why, rank, op, chunk)


# ------------------------------------------------------------------------------------------------ the result


def test_an_output_that_is_never_written():
    plan = made(GATHER, RANK0[: RANK0.rindex(";")], RANK1)
    assert_refused(plan, "rank 0, after its last op, 1: y[0] is never written", 0, 1, "y[0]")
    assert_refused(made(REDUCE, "", ""), "rank 0 has no ops: y[0] is never written", 0, None, "y[0]")


SUM = "x[0:2]>{0}; s[0:2]<{0}; add(s[0:2], x[0:2]) -> y[0:2]"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("; add(y[0], x[0]) -> y[0]", "at the end y[0] contains x[0] of rank 0 too often"),
        ("; add(y[0], s[0]) -> y[0]", "at the end y[0] contains x[0] of rank 1 too often"),
        ("; copy(x[0]) -> y[0]", "at the end y[0] lacks x[0] of rank 1"),
    ],
)
def test_a_sum_of_wrong_terms(change, why):
    scratch = [("s", "rows", (), "float64")]
    verify(made(REDUCE, SUM.format(1), SUM.format(0), scratch=scratch))
    assert_refused(made(REDUCE, SUM.format(1) + change, SUM.format(0), scratch=scratch), why, 0, 3, "y[0]")


def test_a_bias_that_every_rank_adds():
    """The result must contain the bias once."""
    bias = problem("matmul_all_reduce", 2, X, [W], [Form((4,), "float64")])
    program = "matmul_bias(x[0:2], w[0], bias[0]) -> s[0:2]; all_reduce{s[0:2] -> y[0:2]}"
    plan = made(bias, program, program, scratch=[("s", "rows", (4,), "float64")])
    assert_refused(plan, "at the end y[0] contains bias[0] of rank 1 too often", 0, 1, "y[0]")


# ------------------------------------------------------------------------------------------------ programs, memory


def changed(plan, number, **fields):
    programs = list(plan.programs)
    programs[number] = replace(programs[number], **fields)
    return replace(plan, programs=tuple(programs))


def test_a_program_of_another_rank_or_problem():
    plan = made(GATHER, RANK0, RANK1)
    for wrong in (changed(plan, 1, rank=0), changed(plan, 1, size=3), changed(plan, 1, parts=2)):
        with pytest.raises(PlanError, match="rank 1 of 2 with 1 parts: its program is for rank"):
            verify(wrong)
    with pytest.raises(PlanError, match="rank 0 of 2 with 1 parts: the problem has 3 ranks"):
        verify(replace(plan, problem=catalogue.problems(3)["all_gather"]))


@pytest.mark.parametrize("fields", [{"dtype": "float32"}, {"role": "scratch"}, {"axis": "own"}, {"row": ()}])
def test_inputs_and_outputs_must_match_the_problem(fields):
    plan = made(GATHER, RANK0, RANK1)
    x, y = plan.programs[1].buffers
    with pytest.raises(PlanError, match=r"rank 1: the problem needs Buffer\(name='y'"):
        verify(changed(plan, 1, buffers=(x, replace(y, **fields))))
    with pytest.raises(PlanError, match="the program has None"):
        verify(changed(plan, 1, buffers=(x,)))


def test_scratch_must_have_a_valid_axis_and_dtype():
    plan = made(GATHER, RANK0, RANK1, scratch=[ROWS])
    x, y, s = plan.programs[0].buffers
    for wrong in (replace(s, count=3), replace(s, first=1), replace(s, axis="columns")):
        with pytest.raises(PlanError, match="are not the blocks of a buffer with the axis"):
            verify(changed(plan, 0, buffers=(x, y, wrong)))
    with pytest.raises(PlanError, match=r"rank 0: s\[0:2\] has the dtype float32, which a plan for float64 cannot use"):
        verify(changed(plan, 0, buffers=(x, y, replace(s, dtype="float32"))))


def test_plans_of_many_ranks():
    """A ring of 32 ranks with 2 parts per shard."""
    verify(registry.write(catalogue.problems(32)["matmul_reduce_scatter"], "ring", 2))


@pytest.mark.parametrize("schedule", ["direct", "ring", "exchange", "doubling"])
def test_a_plan_must_reduce_by_the_op_of_its_problem(schedule):
    """A plan that sums is no plan for a maximum, and the reverse. A mean must divide by the number of ranks."""
    mean = replace(REDUCE, op="mean")
    plans = [registry.write(each, schedule) for each in (REDUCE, MAXIMUM, mean)]
    for made in plans:
        verify(made)
        for other in (REDUCE, MAXIMUM, mean):
            if other is not made.problem:
                with pytest.raises(PlanError, match=r"at the end y\[\d\] lacks"):
                    verify(replace(made, problem=other))
    four = [replace(p, ops=tuple(parse(str(op).replace("mean2", "mean4")) for op in p.ops)) for p in plans[2].programs]
    with pytest.raises(PlanError, match=r"lacks mean2\(x\[0\] of rank 0 \+ x\[0\] of rank 1\)"):
        verify(replace(plans[2], programs=tuple(four)))
