"""Which products of a program one kernel may announce."""

from __future__ import annotations

import catalogue
import pytest

from fompi.base.layout import Sizes
from fompi.plans.dependencies import announced, constraints, lane
from fompi.plans.plan import Buffer, Chunk, Compute, Pace, Program, Recv, Send
from fompi.schedules import registry

NO_LIMIT = Pace()


def found(program, pace=NO_LIMIT):
    return announced(program, constraints(program.ops, pace).needs)


def by_catalogue(name, schedule, dtype="float32", size=3):
    problem = catalogue.problems(size, dtype)[name]
    sizes = Sizes(pairs=((8,) * size,) * size) if problem.moves == "all_to_all" else Sizes((8,) * size)
    plan = registry.write(problem, schedule, (1, 2), sizes)
    return plan.programs[1], plan.pace


def test_products_of_inputs_before_messages():
    program, pace = by_catalogue("matmul_reduce_scatter", "direct")
    ops = found(program, pace)
    assert [str(program.ops[i]) for i in ops] == [
        "matmul(x[0], w[0]) -> partial[0]",
        "matmul(x[1], w[0]) -> partial[1]",
        "matmul(x[4], w[0]) -> partial[4]",
        "matmul(x[5], w[0]) -> partial[5]",
        "matmul(x[2:4], w[0]) -> partial[2:4]",
    ]


def test_kernels_that_wait_for_no_message_come_first():
    """A half weight is widened by a copy; a bias belongs to some of the products only."""
    for name, dtype, kernels in (
        ("matmul_all_reduce", "bfloat16", ["matmul"] * 2),
        ("matmul_all_reduce bias", "float32", ["matmul", "matmul_bias"] * 2),
    ):
        program, pace = by_catalogue(name, "direct", dtype)
        assert [program.ops[i].kernel for i in found(program, pace)] == kernels


@pytest.mark.parametrize("name", ["all_gather_matmul", "all_reduce", "all_gather_weight_gradient", "all_to_all_matmul"])
def test_none_where_messages_come_before_products(name):
    for schedule in registry.available(catalogue.problems(3)[name]):
        assert found(*by_catalogue(name, schedule)) == ()


BUFFERS = (
    Buffer("x", "input", "slices", (3,), "float32", 0, 6),
    Buffer("h", "input", "slices", (3,), "float16", 0, 6),
    Buffer("w", "input", "whole", (3, 4), "float32", 0, 1),
    Buffer("v", "input", "whole", (3, 4), "float32", 0, 1),
    Buffer("t", "scratch", "slices", (4,), "float32", 0, 6),
    Buffer("inbox", "scratch", "slices", (3,), "float32", 0, 6),
)


def block(name, i=0):
    return Chunk(name, i, i + 1)


def product(i, x="x", w="w", kernel="matmul"):
    return Compute(kernel, (block(x, i), block(w)), (block("t", i),))


def program(*ops):
    return Program(0, 3, 2, BUFFERS, ops)


SENT = Send(1, block("t", 0))
COPY = Compute("copy", (block("t", 0),), (block("t", 5),))


@pytest.mark.parametrize(
    "ops, wanted",
    [
        ((product(0), SENT, product(1), product(2)), (0, 2, 3)),
        ((product(0), product(1)), ()),  # nothing takes an early one
        ((product(0), product(1), Send(1, block("t", 1))), ()),  # the last one is the end of the kernel
        ((product(0), SENT, product(1, w="v"), product(2)), ()),  # another weight ends the run
        ((product(0), SENT, product(1, x="h"), product(2)), ()),  # and so does another dtype,
        ((product(0), SENT, product(1), Compute("own", (block("x"),), (block("t", 5),)), product(2)), (0, 2)),
        ((product(0), SENT, product(1), Recv(1, block("inbox", 2)), product(2, x="inbox"), product(3)), (0, 2)),
        ((product(0), SENT, product(0)), ()),  # a product waits for the message with the one before it
        (
            (product(0), COPY, Compute("matmul", (block("t", 5), block("w")), (block("t", 1),))),
            (),
        ),  # and so does a copy
        ((product(0), SENT, product(1), COPY, product(5, x="t"), product(2)), (0, 2)),
        ((Compute("own", (block("x"),), (block("t", 5),)), product(0), SENT, product(1)), ()),
        ((Compute("copy", (block("x"),), (block("x", 1),)), product(0), SENT, product(1)), (1, 3)),
    ],
)
def test_where_a_run_ends(ops, wanted):
    made = program(*ops)
    assert found(made) == wanted
    assert all(lane(ops[i]) == ("compute", 0) for i in wanted)
