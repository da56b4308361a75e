"""The times of a ring with unequal sizes, for all ranks at once. They equal those of the event walk, or are None."""

from __future__ import annotations

from dataclasses import replace

import catalogue
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fompi
from fompi import Machine, Shard, Spec
from fompi.base.layout import Sizes
from fompi.model.machine import Level
from fompi.model.rotation import rotated
from fompi.model.simulate import MOST_RANKS, predict, representatives, simulate
from fompi.plans.meaning import ROOTED
from fompi.schedules import registry

GIGABIT = Machine.load("gigabit")
RINGS = [name for name, problem in catalogue.problems(3).items() if "ring" in registry.available(problem)]
ROTATED = [name for name in RINGS if catalogue.problems(3)[name].operation not in ROOTED]
"""Rings in which all ranks do the same. A rank with another task than the others is a root."""

seconds = st.floats(1e-6, 1e-3)


@st.composite
def machines(draw, size):
    """Machines on which messages of a ring share no port: slow ranks, slow links between groups, any kernels."""
    machine = Machine(
        "any",
        draw(seconds),
        draw(st.floats(1e3, 1e8)),
        draw(st.floats(1e3, 1e8)),
        draw(st.floats(1e3, 1e8)),
        draw(seconds),
        lanes=draw(st.sampled_from([1, 2])),
        pack_rate=draw(st.sampled_from([1e300, 1e5])),
        burst=draw(st.sampled_from([0.0, 1e-6, 1e-4, 1.0])),
    )
    if draw(st.booleans()):
        machine = replace(machine, rates=tuple(draw(st.lists(st.floats(0.1, 1.0), min_size=1, max_size=size))))
    if draw(st.booleans()):
        burst = draw(st.sampled_from([0.0, machine.burst, 1e-5]))
        machine = replace(machine, levels=(Level(2, draw(seconds), draw(st.floats(1e3, 1e8)), False, (), burst),))
    return machine


@pytest.mark.parametrize("name", ROTATED)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_the_times_equal_those_of_the_event_walk(name, data):
    """For the rank that ends last, op by op."""
    size = data.draw(st.integers(2, 7))
    problem = catalogue.problems(size)[name]
    sizes = Sizes(tuple(data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))))
    slices = data.draw(st.sampled_from([1, 2, 3, (1, 2)]))
    plan = registry.write(problem, "ring", slices, sizes, data.draw(st.sampled_from([None, 1, 2])))
    machine = data.draw(machines(size))
    walked, trace = simulate(plan, machine), rotated(plan, sizes, machine)
    apart = machine.lanes == 2 or not any(e.lane == "compute" for e in walked.events)
    if trace is None:
        overtakes = problem.moves == "all_reduce" and len(set(sizes.rows)) > 1  # forwarded data overtake a late sum
        assert problem.packed or not apart or slices != 1 or overtakes, "the ring was not recognised"
        return
    assert trace.seconds == pytest.approx(walked.seconds, rel=1e-9)
    (rank,) = {event.rank for event in trace.events}
    expected = sorted((e for e in walked.events if e.rank == rank), key=lambda e: e.op)
    for event, reference in zip(trace.events, expected, strict=True):
        assert event[:4] == reference[:4] and event.nbytes == reference.nbytes
        assert event[4:6] == pytest.approx(reference[4:6], rel=1e-9, abs=1e-15)
        assert event.waited == pytest.approx(reference.waited, rel=1e-6, abs=1e-12)


def ring_of(size, operation="all_gather", schedule="ring", slices=1):
    x = Spec((size * 5 + 1, 8), "float32", Shard(0))
    specs = [x] if operation == "all_gather" else [x, Spec((8, 4 * size), "float32", Shard(1))]
    return fompi.plan(operation, *specs, ranks=size, schedule=schedule, slices=slices)


def test_none_if_messages_share_ports_or_cores():
    """Other schedules, a shared link between groups, or messages that cost the core of the kernels time."""
    for schedule in ("bidirectional", "direct", "sliced", "unfused"):
        plan = ring_of(4, "all_gather_matmul", schedule)
        assert rotated(plan, plan.sizes, replace(GIGABIT, lanes=2)) is None, schedule
    plan = ring_of(4)
    assert rotated(plan, plan.sizes, GIGABIT) is not None
    assert rotated(plan, plan.sizes, replace(GIGABIT, levels=(Level(2, 1e-4, 1e7, True),))) is None
    multiplied = ring_of(4, "all_gather_matmul")
    assert rotated(multiplied, plan.sizes, GIGABIT) is not None
    assert rotated(multiplied, plan.sizes, replace(GIGABIT, cpu_message=1e-6)) is None
    assert rotated(multiplied, plan.sizes, replace(GIGABIT, cpu_message=1e-6, lanes=2)) is not None


def test_none_if_ranks_do_not_do_the_same():
    plan = ring_of(4)
    broken = plan.with_program(replace(plan.programs[1], ops=plan.programs[1].ops[:-1]))
    assert rotated(broken, plan.sizes, GIGABIT) is None
    x = Spec((24, 2), "float32")
    broadcast = fompi.plan("broadcast", x, ranks=4, schedule="ring")
    assert rotated(broadcast, broadcast.sizes, GIGABIT) is None


def test_an_uneven_ring_of_many_ranks():
    """`simulate` shows only the rank that ends last."""
    plan = ring_of(MOST_RANKS + 6, slices=2)
    trace = representatives(plan, GIGABIT)
    (rank,) = {event.rank for event in trace.events}
    assert trace.title.endswith(f"; rank {rank} of {plan.size}, the last to end")
    assert predict(plan, GIGABIT) == trace.seconds == simulate(plan, GIGABIT).seconds
