"""Properties of compiled programs: long kernels, small messages, forwarded blocks. No MPI is needed."""

from __future__ import annotations

import pytest

import fompi
from fompi import Partial, Shard, Spec
from fompi.base.layout import Sizes
from fompi.runtime.compiled import LONG_FLOPS, LONG_NBYTES, SMALL_NBYTES, Compiled


def gather_matmul(rows, k=64, columns=64, schedule="direct", slices=1):
    specs = Spec((rows, k), "float32", Shard(0)), Spec((k, 2 * columns), "float32", Shard(1))
    return fompi.plan(fompi.all_gather_matmul, *specs, ranks=2, schedule=schedule, slices=slices)


def is_long(plan, sizes=None):
    compiled = Compiled(plan, 0)
    return compiled.is_long(compiled.sized((sizes or plan.sizes).extents(0, plan.shares)))


def test_a_product_of_many_operations_is_long():
    """The product of a shard has 2 * rows * 64 * 64 operations."""
    rows = int(LONG_FLOPS) // (2 * 64 * 64)
    assert not is_long(gather_matmul(2 * rows)) and is_long(gather_matmul(2 * rows + 4))


def test_the_longest_kernel_decides():
    """An unfused kernel has all rows. With slices, the rank's own shard is still one call."""
    rows = int(LONG_FLOPS) // (2 * 64 * 64)
    assert is_long(gather_matmul(rows + 4, schedule="unfused")) and not is_long(gather_matmul(rows + 4))
    assert is_long(gather_matmul(2 * rows + 4, slices=4))


@pytest.mark.parametrize("schedule", ["direct", "ring"])
def test_a_sum_of_many_bytes_is_long(schedule):
    """A sum reads two blocks of a shard."""
    elements = int(LONG_NBYTES) // 8

    def plan(count):
        return fompi.plan(fompi.all_reduce, Spec((count,), "float64", Partial()), ranks=2, schedule=schedule)

    assert is_long(plan(elements + 4)) and not is_long(plan(elements - 4))


def test_the_rows_of_the_call_decide():
    """The rows that the plan was made for do not matter."""
    plan = gather_matmul(100_000)
    assert is_long(plan) and not is_long(plan, Sizes(rows=(10, 10))) and is_long(plan, Sizes(rows=(0, 50_000)))
    assert not is_long(plan, Sizes(rows=(0, 0)))


def test_a_program_without_kernels_is_never_long():
    plan = fompi.plan(fompi.all_gather, Spec((1 << 22, 8), "float64", Shard(0)), ranks=2, schedule="unfused")
    assert not any(kind == 0 for kind in Compiled(plan, 0).kinds) and not is_long(plan)


def test_small_messages():
    """The bytes of x decide, unless x is multiplied first: the product of a narrow x may be large."""

    def is_small(plan):
        compiled = Compiled(plan, 0)
        return compiled.is_small(compiled.sized(plan.extents(0)))

    rows = SMALL_NBYTES // 4
    assert is_small(fompi.plan("all_reduce", Spec((rows,), "float32", Partial()), ranks=2))
    assert not is_small(fompi.plan("all_reduce", Spec((rows + 1,), "float32", Partial()), ranks=2))
    wide = Spec((rows, 2), "float32", Shard(1)), Spec((2, 4096), "float32", Shard(0))
    assert not is_small(fompi.plan("matmul_reduce_scatter", *wide, ranks=2))


@pytest.mark.parametrize(
    ("operation", "forwards"),
    [
        ("all_gather", {"ring", "bidirectional"}),
        ("reduce_scatter", {"ring", "bidirectional"}),
        ("all_reduce", {"direct", "ring", "bidirectional", "unfused_p2p"}),
    ],
)
def test_schedules_that_forward_blocks(operation, forwards):
    x = Spec((48, 4), "float32", {"all_gather": Shard(0)}.get(operation, Partial()))
    for schedule in ("direct", "ring", "bidirectional", "unfused", "unfused_p2p"):
        plan = fompi.plan(operation, x, ranks=4, schedule=schedule)
        assert Compiled(plan, 1).forwards == (schedule in forwards), schedule
