"""Sums in the order of a tree over the ranks: the plans have it, the proof keeps it, and the bits follow from it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random

import catalogue
import numpy as np
import pytest
from twin import twin

import fompi
from fompi.backends import chains
from fompi.backends.half import narrow, widen
from fompi.backends.numpy import Numpy
from fompi.base.errors import PlanError
from fompi.base.layout import Sizes, offsets, split
from fompi.model.machine import Machine
from fompi.planner.choose import choose_schedule
from fompi.planner.explain import explain
from fompi.plans.plan import Compute, Program, Programs, Recv
from fompi.plans.problems import in_order
from fompi.plans.tree import Canonical, folded
from fompi.plans.verify import verify
from fompi.schedules import registry

SUMS = sorted(name for name, each in catalogue.problems(2).items() if each.sums)


def written(name, size, schedule, slices=1, dtype="float32", order="ranks", sizes=None):
    return registry.write(in_order(catalogue.problems(size, dtype)[name], order), schedule, slices, sizes)


def schedules(name, size, dtype="float32"):
    ordered = in_order(catalogue.problems(size, dtype)[name], "ranks")
    groups = ["hierarchical(2)"] if size == 8 and ordered.moves in registry.HIERARCHICAL_MOVES else []
    return [*registry.available(ordered), *groups]


def test_the_tree():
    def text(n):
        return folded([str(i) for i in range(n)], lambda a, b: f"({a}+{b})")

    assert [text(n) for n in (1, 2, 3, 4)] == ["0", "(0+1)", "((0+1)+2)", "((0+1)+(2+3))"]
    assert text(7) == "(((0+1)+(2+3))+((4+5)+6))"
    for first, inner in ((4, 2), (8, 4), (24, 8)):  # runs of 2**i leaves are nodes
        leaves = [str(i) for i in range(first + inner)]
        runs = [folded(leaves[at : at + inner], lambda a, b: f"({a}+{b})") for at in range(0, len(leaves), inner)]
        assert folded(runs, lambda a, b: f"({a}+{b})") == text(len(leaves))


@pytest.mark.parametrize(
    ("size", "dtype"),
    [*((size, "float32") for size in (1, 2, 3, 8)), *((size, "bfloat16") for size in (2, 4, 5))],
)
@pytest.mark.parametrize("name", SUMS)
def test_every_schedule_has_the_bits_of_the_tree(name, size, dtype):
    """For even and uneven rows and all slices. A product copies columns of x, so it is exact, however it is cut."""

    def fill(random, shape, dtype):
        weight = len(shape) == 2 and shape[0] in (2, 3) and shape[1] in (2, 4)
        return narrow(np.eye(*shape, dtype="f4") if weight else random.standard_normal(shape).astype("f4"), dtype)

    distinct = set()
    for distribution, (number, schedule) in zip(
        ("even", "uneven", "few", "lonely") * 3, enumerate(schedules(name, size, dtype)), strict=False
    ):
        problem = in_order(catalogue.problems(size, dtype)[name], "ranks")
        sizes = catalogue.sizes(problem, distribution)
        given = catalogue.inputs(problem, sizes, fill=fill)
        plan = registry.write(problem, schedule, (1, 2, (1, 2))[number % 3], sizes)
        verify(plan)
        terms = [widen(of["x"], dtype) for of in given]
        if problem.weights:
            terms = [x @ widen(of["w"], dtype) for x, of in zip(terms, given, strict=True)]
            terms[0] = terms[0] + (widen(given[0]["bias"], dtype) if problem.weights[0].bias else 0)
        whole = folded(terms, {"max": np.maximum, "min": np.minimum, "prod": np.multiply}.get(problem.op, np.add))
        wanted = narrow(whole / np.float32(size) if problem.op == "mean" else whole, dtype)
        ends = np.cumsum([0, *sizes.rows])
        for rank, got in enumerate(twin(plan, given, Numpy(), sizes=sizes, seed=number)):
            here = slice(ends[rank], ends[rank + 1]) if problem.moves == "reduce_scatter" else slice(None)
            (y,) = got.values()
            assert y.tobytes() == np.ascontiguousarray(wanted[here]).tobytes(), (schedule, distribution)
        distinct.add(schedule)
    assert len(distinct) >= 2 or size == 1


def test_without_an_order_schedules_differ():
    """So the test above shows something."""
    problem, sizes, found = catalogue.problems(4, "float32")["all_reduce"], Sizes((8,) * 4), set()
    given = catalogue.inputs(problem, sizes, fill=lambda random, shape, dtype: random.standard_normal(shape, "f4"))
    for schedule in ("direct", "exchange", "doubling"):
        (y,) = twin(registry.write(problem, schedule, 1, sizes), given, Numpy(), sizes=sizes)[0].values()
        found.add(y.tobytes())
    assert len(found) > 1


# ------------------------------------------------------------------------------------- leaves, and not ranks

CANONICAL = ("all_reduce", "reduce_scatter", "matmul_all_reduce", "matmul_reduce_scatter")


def canonical(name, size, leaves, rank=0, dtype="float32", piece=3):
    """The problem of a rank, whose columns of x are its leaves."""
    own = Canonical(leaves).counts(size)[rank]
    made = catalogue.problems(size, dtype)[name]
    made = replace(made, op="sum", row=(piece * own,) if made.weights else made.row)
    return in_order(made, f"canonical({leaves})", rank)


def test_runs_of_leaves_are_subtrees():
    for leaves in range(1, 20):
        for size in range(1, leaves + 1):
            order = Canonical(leaves)
            terms, ends = order.subtrees(size), offsets(order.counts(size))
            assert [sum(mine) for mine in terms] == [*order.counts(size)]
            nodes = [n for mine in terms for n in mine]
            runs = [list(range(a, b)) for a, b in pairwise(offsets(nodes))]
            inner = [folded([str(i) for i in run], lambda a, b: f"({a}+{b})") for run in runs]
            assert {*ends} <= {*offsets(nodes)}
            whole = folded([str(i) for i in range(leaves)], lambda a, b: f"({a}+{b})")
            assert folded(inner, lambda a, b: f"({a}+{b})", nodes) == whole
            if leaves % size == 0 and (leaves // size) & (leaves // size - 1) == 0:
                assert all(len(mine) == 1 for mine in terms)  # no byte more


@pytest.mark.parametrize(("size", "leaves"), [(1, 8), (2, 8), (3, 8), (4, 8), (5, 8), (7, 9), (8, 8), (6, 6), (4, 11)])
@pytest.mark.parametrize("name", CANONICAL)
def test_every_schedule_has_the_bits_of_the_leaves(name, size, leaves):
    """The reference knows neither ranks nor schedules."""
    order, rows, n = Canonical(leaves), 13, 4
    random = np.random.default_rng(leaves)
    pieces = [random.standard_normal((rows, 3)).astype("f4") for _ in range(leaves)]
    weights = [random.standard_normal((3, n)).astype("f4") for _ in range(leaves)]
    bias = random.standard_normal(n).astype("f4")
    first = catalogue.problems(size, "float32")[name]
    multiplies = bool(first.weights)
    if multiplies:
        n = first.weights[0].columns
        weights, bias = [np.resize(w, (3, n)) for w in weights], np.resize(bias, n)
    terms = [chains.product_of(x, w) for x, w in zip(pieces, weights, strict=True)] if multiplies else pieces
    if multiplies and first.weights[0].bias:
        terms[0] = np.empty_like(terms[0])
        chains.product(pieces[0], weights[0], terms[0], bias=bias)
    whole, ends = folded(terms, np.add), offsets(order.counts(size))
    for schedule in registry.available(canonical(name, size, leaves)):
        problems = [canonical(name, size, leaves, r) for r in range(size)]
        flat = problems[0].flat
        problems = [p if p.weights or flat else replace(p, row=(3,)) for p in problems]
        sizes = problems[0].spread(split(rows * 3 if flat else rows, size))
        plan = registry.write(problems[0], schedule, (1, 2)[len(schedule) % 2], sizes, at=problems.__getitem__)
        verify(plan)
        given = []
        for r, mine in enumerate(order.subtrees(size)):
            own, data = range(ends[r], ends[r + 1]), {}
            for j, run in enumerate(own[a:b] for a, b in pairwise(offsets(mine))):
                number = j if plan.problem.is_split else ""
                if multiplies:
                    data |= {f"x{number}": np.concatenate([pieces[i] for i in run], 1)}
                    data |= {f"w{number}": np.concatenate([weights[i] for i in run])}
                else:
                    data[f"x{number}"] = folded([pieces[i] for i in run], np.add).reshape((-1,) if flat else (rows, 3))
            given.append(data | ({"bias": bias} if multiplies and first.weights[0].bias else {}))
        rows_of = offsets(sizes.rows)
        for rank, got in enumerate(twin(plan, given, Numpy(), sizes=sizes, seed=size)):
            here = slice(*rows_of[rank : rank + 2]) if first.moves == "reduce_scatter" else slice(None)
            (y,) = got.values()
            assert y.tobytes() == np.ascontiguousarray(whole[here]).tobytes(), schedule


# ------------------------------------------------------------------------------------------------ spoiled plans


@cache
def plans():
    return [
        written(name, size, schedule, slices)
        for size in (3, 4, 5, 8)
        for name in SUMS
        for schedule in schedules(name, size)
        for slices in (1, 2)
    ] + [
        registry.write(canonical(name, size, leaves), schedule, slices)
        for size, leaves in ((3, 8), (4, 8), (5, 9))
        for name in CANONICAL
        for schedule in registry.available(canonical(name, size, leaves))
        for slices in (1, 2)
    ]


def other_way_round(random, program):
    """The two terms of an addition change places."""
    at = random.choice([i for i, op in enumerate(program.ops) if isinstance(op, Compute) and adds(op)])
    op, half = program.ops[at], len(program.ops[at].reads) // 2
    return exchanged(program, {at: replace(op, reads=(*op.reads[half:], *op.reads[:half]))})


def leaves_moved(random, program):
    """What two ranks send changes places."""
    arriving = [i for i, op in enumerate(program.ops) if isinstance(op, Recv) and "inbox" in op.chunk.buffer]
    one, other = random.sample(arriving, 2)
    a, b = program.ops[one], program.ops[other]
    return exchanged(program, {one: replace(a, chunk=b.chunk), other: replace(b, chunk=a.chunk)})


def begun_elsewhere(random, program):
    """((a + b) + c) becomes (a + (b + c))."""
    sums = {op.writes[0]: i for i, op in enumerate(program.ops) if isinstance(op, Compute) and adds(op)}
    pairs = [(i, sums[op.reads[0]]) for op, i in [(program.ops[i], i) for i in sums.values()] if op.reads[0] in sums]
    outer, inner = random.choice([pair for pair in pairs if pair[0] > pair[1]])
    (ab, c), (a, b) = program.ops[outer].reads, program.ops[inner].reads
    changed = replace(program.ops[inner], reads=(b, c)), replace(program.ops[outer], reads=(a, ab))
    return exchanged(program, {inner: changed[0], outer: changed[1]})


def adds(op):
    return op.kernel in ("add", "max", "min", "prod") or op.kernel.startswith("mean")


def exchanged(program, ops):
    return replace(program, ops=tuple(ops.get(i, op) for i, op in enumerate(program.ops)))


def test_no_spoiled_plan_is_accepted():
    """The same terms, added otherwise: 400 plans, of which the proof without an order accepts most."""
    random, spoiled, words, without = Random(1), 0, set(), 0
    while spoiled < 400:
        plan, spoil = random.choice(plans()), random.choice((other_way_round, leaves_moved, begun_elsewhere))
        rank = random.randrange(plan.size)
        try:
            program: Program = spoil(random, plan.programs[rank])
        except (IndexError, ValueError):  # there is nothing to spoil in this way
            continue
        if program == plan.programs[rank]:
            continue
        changed = replace(
            plan,
            programs=Programs(plan.size, lambda r, p=plan, at=rank, new=program: new if r == at else p.programs[r]),
        )
        with pytest.raises(PlanError) as error:
            verify(changed)
        words |= {order for order in ("ranks", "canonical(8)") if f" but the order {order!r} is (" in str(error.value)}
        spoiled += 1
        if spoiled % 10 == 0:
            try:
                verify(replace(changed, problem=replace(plan.problem, order="")))
                without += 1
            except PlanError:
                pass
    assert words == {"ranks", "canonical(8)"} and without > 12


# ---------------------------------------------------------------------------------------------- choice and words


@pytest.mark.parametrize("name", SUMS)
def test_the_choice_has_the_order(name):
    for size in (2, 3, 8):
        ordered = in_order(catalogue.problems(size, "float32")[name], "ranks")
        for rows in (None, 64, 1 << 12, 1 << 21)[size % 2 :: 2]:
            for network in (False, True):
                schedule, slices = choose_schedule(ordered, rows, network)
                assert registry.is_available(ordered, schedule)
                verify(registry.write(ordered, schedule, slices))
        found = explain(ordered, Sizes((64,) * size), Machine.load("gigabit"))
        assert all(registry.is_available(ordered, judged.candidate.schedule) for judged in found.judged)


def test_words():
    x = fompi.Spec((8, 3), "float32", fompi.Partial())
    with pytest.raises(
        PlanError,
        match="no schedule 'ring' for reduce_scatter: its sums do not have the order 'ranks'; choose auto, unf",
    ):
        fompi.plan("reduce_scatter", x, ranks=4, schedule="ring", order="ranks")
    with pytest.raises(PlanError, match="order='tree' must be one of 'any', 'ranks'"):
        fompi.plan("reduce_scatter", x, ranks=4, order="tree")
    with pytest.raises(PlanError, match="messages with the wire int8 have no order yet"):
        fompi.plan("reduce_scatter", x, ranks=4, wire="int8", order="ranks")
    made = fompi.plan("all_reduce", x, ranks=4, order="ranks", schedule="direct")
    assert "order ranks" in str(made.problem) and made.problem.order == "ranks"
    gathered = fompi.plan("all_gather", fompi.Spec((8, 3), "float32", fompi.Shard(0)), ranks=4, order="ranks")
    assert not gathered.problem.order  # it sums nothing
    with pytest.raises(PlanError, match="has no such order yet"):
        fompi.plan(
            "all_to_all_grouped_matmul", *catalogue.specs_of("all_to_all_grouped_matmul"), ranks=2, order="canonical(4)"
        )
