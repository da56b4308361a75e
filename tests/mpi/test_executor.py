"""Bound operations: many calls, inputs in parts, several in flight, and different rows at every call."""

from __future__ import annotations

import gc
from dataclasses import replace
from random import Random

import calls
import numpy as np
import pytest
from plan_texts import with_program

import fompi
from fompi import Partial, Replicate, Shard, Spec
from fompi.base.layout import Sizes, split
from fompi.plans.problems import Form, problem
from fompi.schedules import registry

pytestmark = pytest.mark.ranks(mpich=[2], openmpi=[3])

EVERY_SCHEDULE = ("unfused", "sliced", "unfused_p2p", "sliced_p2p", "direct", "ring", "bidirectional")


def numbers(shape, *seed):
    """Whole numbers: their sums and products are exact."""
    return np.random.default_rng(seed).integers(0, 100, shape).astype(float)


def gather_matmul(world, rows=12, schedule="direct", slices=1):
    """A plan of x (rows, 4) @ w (4, 3 columns on each rank), and the rows of x on each rank."""
    x = Spec((rows, 4), "float64", Shard(0))
    w = Spec((4, 3 * world.size), "float64", Shard(1))
    plan = fompi.plan(fompi.all_gather_matmul, x, w, ranks=world.size, schedule=schedule, slices=slices)
    return plan, split(rows, world.size)


def sum_plan(world, elements=10, schedule="direct", slices=1, dtype="float64"):
    spec = Spec((elements,), dtype, Partial())
    return fompi.plan(fompi.all_reduce, spec, ranks=world.size, schedule=schedule, slices=slices)


@pytest.mark.parametrize("name", calls.NAMES)
def test_a_bound_operation_gives_the_same_as_a_call(world, name):
    calls.check_bound(world, name)


@pytest.mark.parametrize("most", [1, 24])
@pytest.mark.parametrize("name", ["matmul_all_reduce", "all_gather_matmul", "all_to_all"])
def test_data_that_is_too_large_for_one_message_is_sent_in_parts(world, monkeypatch, name, most):
    """Between hosts, Open MPI does this for data of more than 4 MiB."""
    monkeypatch.setattr(world, "most_nbytes", most)
    posted, post = [], world.engine.post_all
    monkeypatch.setattr(world.engine, "post_all", lambda parts, *rest: posted.append(len(parts)) or post(parts, *rest))
    calls.check_bound(world, name)
    assert world.size == 1 or max(posted) > 1


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_results_keep_their_address(world, schedule):
    plan = sum_plan(world, schedule=schedule)
    x, out = np.empty(10), np.empty(10)
    with fompi.bind(plan, comm=world, x=x) as step, fompi.bind(plan, comm=world, x=x, out=out) as filling:
        addresses = set()
        for i in range(3):
            x[...] = i + world.rank
            y = step()
            addresses.add(y.ctypes.data)
            total = world.size * i + sum(range(world.size))
            assert (y == total).all()
            filling()
            assert (out == total).all()
        assert len(addresses) == 1


def test_a_result_outlives_its_executor(world):
    step = fompi.bind(sum_plan(world), comm=world, x=np.ones(10))
    y = step()
    step.close()
    del step
    gc.collect()
    for _ in range(5):
        fompi.all_reduce(np.zeros(10), comm=world)
    assert (y == world.size).all()


@pytest.mark.parametrize("shape", [(), (3, 4), (2, 1, 5)])
def test_results_have_the_shape_of_the_input(world, shape):
    plan = fompi.plan(fompi.all_reduce, Spec(shape, "float64", Partial()), ranks=world.size)
    y = fompi.bind(plan, comm=world, x=np.ones(shape))()
    np.testing.assert_array_equal(y, np.full(shape, float(world.size)), strict=True)


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
@pytest.mark.parametrize("slices", [1, 3])
def test_parts_become_ready_one_by_one(world, schedule, slices):
    """The parts of x are written and announced in a different order on every rank and at every call."""
    plan, rows = gather_matmul(world, 7, schedule, slices)
    x, w = np.empty((rows[world.rank], 4)), numbers((4, 3), world.rank)
    with fompi.bind(plan, comm=world, x=x, w=w) as step:
        bounds = np.cumsum([0, *split(rows[world.rank], plan.parts)])
        for call in range(4):
            xs = [numbers((rows[rank], 4), call, rank) for rank in range(world.size)]
            x[...] = np.nan
            step.start("x")
            order = list(range(plan.parts))
            Random(10 * call + world.rank).shuffle(order)
            for part in order:
                here = slice(bounds[part], bounds[part + 1])
                x[here] = xs[world.rank][here]
                step.ready("x", part)
                step.progress()
            np.testing.assert_array_equal(step.wait(), np.concatenate(xs) @ w)


def test_parts_of_a_sum(world):
    """A gradient bucket: the backward makes the last part first, and announces each part."""
    size = world.size
    plan = sum_plan(world, 4 * size, "ring", 2)
    x = np.full(4 * size, np.nan)
    with fompi.bind(plan, comm=world, x=x) as step:
        step.start("x")
        for part in reversed(range(2 * size)):
            assert not step.arrived("y", part)
            x[2 * part : 2 * part + 2] = [part, world.rank]
            step.ready("x", part)
        for part in range(2 * size):
            np.testing.assert_array_equal(step.part("y", part), [size * part, sum(range(size))])
            assert step.arrived("y", part)
        expected = [[size * part, sum(range(size))] for part in range(2 * size)]
        np.testing.assert_array_equal(step.wait().reshape(-1, 2), expected)


def test_arrived_parts_can_be_used_before_the_end(world):
    plan = fompi.plan(fompi.all_gather, Spec((5 * world.size, 2), "float64", Shard(0)), ranks=world.size)
    x, y = np.full((5, 2), float(world.rank)), np.full((5 * world.size, 2), np.nan)
    with fompi.bind(plan, comm=world, x=x, out=y) as step:
        step.start()
        missing = set(range(world.size))
        while missing:
            for part in sorted(missing):
                if step.arrived("y", part):
                    assert (y[5 * part : 5 * part + 5] == part).all()
                    missing.discard(part)
        step.wait()
        step.start()
        for part in reversed(range(world.size)):
            view = step.part("y", part)
            assert (view == part).all() and view.shape == (5, 2) and np.shares_memory(view, y)
        step.wait()
        with pytest.raises(fompi.PlanError, match="no part"):
            step.part("y", world.size)
        with pytest.raises(fompi.PlanError, match="no output"):
            step.part("x", 0)


def test_an_input_that_is_not_ready_holds_the_call_back(world):
    """No rank of a sum can finish before x is ready on all ranks."""
    with fompi.bind(sum_plan(world, schedule="exchange"), comm=world, x=np.ones(10)) as step:
        step.start("x")
        for _ in range(50):
            assert not step.progress()
        with pytest.raises(TimeoutError):
            step.wait(timeout=0.01)
        with pytest.raises(TimeoutError):
            step.part("y", 0, timeout=0.01)
        with pytest.raises(fompi.StateError, match=r"ready\(\) was never called for x\[0\]"):
            step.wait()
        for part in range(world.size):
            step.ready("x", part)
        assert (step.wait() == world.size).all()


def test_several_in_flight_in_any_order(world):
    """Eight sums and eight gathers, ten times. Every rank starts them and waits for them in its own random order."""
    rank, size = world.rank, world.size
    steps, inputs, expected = [], [], []
    for i in range(8):
        x = np.empty(6 + i)
        steps.append(fompi.bind(sum_plan(world, 6 + i, ("direct", "ring")[i % 2]), comm=world, x=x))
        inputs.append(x)
        expected.append(lambda call, i=i: sum(numbers(6 + i, call, i, r) for r in range(size)))
    for i in range(8, 16):
        plan, rows = gather_matmul(world, i, ("direct", "bidirectional", "unfused_p2p")[i % 3])
        x, w = np.empty((rows[rank], 4)), numbers((4, 3), rank)
        steps.append(fompi.bind(plan, comm=world, x=x, w=w))
        inputs.append(x)
        expected.append(
            lambda call, i=i, rows=rows, w=w: (
                np.concatenate([numbers((rows[r], 4), call, i, r) for r in range(size)]) @ w
            )
        )
    for call in range(10):
        order = Random(100 * call + rank)
        for i in order.sample(range(16), 16):
            inputs[i][...] = numbers(inputs[i].shape, call, i, rank)
            steps[i].start()
            if order.random() < 0.3:
                steps[i].progress()
        for i in order.sample(range(16), 16):
            np.testing.assert_array_equal(steps[i].wait(), expected[i](call), err_msg=f"{i}, call {call}")
    for step in steps:
        step.close()


@pytest.mark.parametrize("slices", [1, 3])
def test_collectives_of_the_library_in_flight_together(world, slices):
    """Each executor has its own MPI communicator, so these collectives may start in any order too."""
    schedule = "unfused" if slices == 1 else "sliced"
    x = [np.empty(20) for _ in range(4)]
    steps = [fompi.bind(sum_plan(world, 20, schedule, slices), comm=world, x=x[i]) for i in range(4)]
    for call in range(5):
        order = Random(7 * call + world.rank)
        for i in order.sample(range(4), 4):
            x[i][...] = world.rank + 10 * i + call
            steps[i].start()
        for i in order.sample(range(4), 4):
            assert (steps[i].wait() == sum(range(world.size)) + world.size * (10 * i + call)).all()
    for step in steps:
        step.close()


def test_bound_and_unbound_in_flight_together(world):
    """All ranks start the unbound calls in the same order, and the bound calls at random places between them."""
    x = np.full(10, 1.0)
    steps = [fompi.bind(sum_plan(world, schedule=s), comm=world, x=x) for s in ("direct", "unfused", "ring")]
    for call in range(5):
        order = Random(call + 31 * world.rank)
        positions = sorted(order.randrange(4) for _ in steps)
        pending, waiting = [], list(steps)
        for i in range(4):
            while positions and positions[0] <= i:
                positions.pop(0)
                waiting.pop(0).start()
            pending.append(
                fompi.all_reduce.start(np.full(3, float(i)), comm=world, schedule=("auto", "unfused")[i % 2])
            )
        for step in waiting:
            step.start()
        everything = [*enumerate(pending), *((None, step) for step in steps)]
        for i, operation in order.sample(everything, len(everything)):
            assert (operation.wait() == world.size * (1 if i is None else i)).all()
    for step in steps:
        step.close()


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
def test_different_rows_at_every_call(world, schedule):
    """A call may have any rows up to those of the plan. A call without counts has the rows of the plan."""
    size, rank, capacity = world.size, world.rank, 6
    plan, _ = gather_matmul(world, capacity * size, schedule, 2 if schedule != "unfused" else 1)
    x, w = np.empty((capacity, 4)), numbers((4, 3), rank)
    draw = Random(3)
    with fompi.bind(plan, comm=world, x=x, w=w) as step:
        for call in range(12):
            counts = [draw.randrange(capacity + 1) for _ in range(size)]
            if call % 4 == 3:
                counts = [capacity] * size
            xs = [numbers((counts[r], 4), call, r) for r in range(size)]
            x[: counts[rank]] = xs[rank]
            y = step() if call % 4 == 3 else step(counts=counts)
            np.testing.assert_array_equal(y, np.concatenate(xs) @ w, err_msg=f"call {call}: {counts}")


def test_different_rows_between_every_pair_of_ranks(world):
    size, rank, capacity = world.size, world.rank, 5
    plan = fompi.plan(fompi.all_to_all, Spec((capacity * size * size, 2), "float64", Shard(0)), ranks=size)
    x = np.empty((capacity * size, 2))
    draw = Random(4)
    with fompi.bind(plan, comm=world, x=x) as step:
        for call in range(12):
            counts = [[draw.randrange(capacity + 1) for _ in range(size)] for _ in range(size)]
            xs = [numbers((sum(counts[r]), 2), call, r) for r in range(size)]
            x[: sum(counts[rank])] = xs[rank]
            expected = [np.split(xs[r], np.cumsum(counts[r])[:-1])[rank] for r in range(size)]
            np.testing.assert_array_equal(step(counts=counts), np.concatenate(expected))


def test_counts_that_do_not_fit(world):
    plan, _ = gather_matmul(world, 2 * world.size)
    with fompi.bind(plan, comm=world, x=np.ones((2, 4)), w=np.ones((4, 3))) as step:
        for counts in ([3] * world.size, [-1] * world.size, [1] * (world.size + 1), 5, ["a"] * world.size):
            with pytest.raises(fompi.ShapeError):
                step(counts=counts)
        np.testing.assert_array_equal(step(), np.full((2 * world.size, 3), 4.0))


def test_the_trace_of_a_call(world):
    plan, _ = gather_matmul(world, 3 * world.size, "ring")
    x, w = np.ones((3, 4)), np.ones((4, 3))
    with fompi.bind(plan, comm=world, x=x, w=w) as step:
        with pytest.raises(fompi.StateError, match="not started"):
            _ = step.trace
        step()
        trace = step.trace
        ops = plan.programs[world.rank].ops
        assert [event.name for event in trace.events] == [str(op) for op in ops]
        assert trace.ranks == [world.rank] and all(0 < e.start <= e.end for e in trace.events)
        sent = sum(e.nbytes for e in trace.events if e.lane.startswith("send"))
        assert sent == (world.size - 1) * x.nbytes
        assert "measured: all_gather_matmul by ring" in str(trace)
        trace.compare(trace)


def test_a_kernel_of_the_user(world):
    """It gets the arrays that the op of the plan reads and writes."""
    seen = []

    def scaled(reads, writes):
        x, w = reads
        seen.append(x.shape)
        np.multiply(x @ w, 10, out=writes[0])

    plan, _ = gather_matmul(world, 2 * world.size)
    x, w = numbers((2, 4), world.rank), numbers((4, 3), world.rank)
    everything = np.concatenate([numbers((2, 4), r) for r in range(world.size)])
    with fompi.bind(plan, comm=world, x=x, w=w, kernels={"matmul": scaled}) as step:
        np.testing.assert_array_equal(step(), 10 * (everything @ w))
    assert sum(shape[0] for shape in seen) == 2 * world.size


def test_calls_at_the_wrong_time(world):
    step = fompi.bind(sum_plan(world), comm=world, x=np.ones(10))
    with pytest.raises(fompi.StateError, match="not started"):
        step.wait()
    with pytest.raises(fompi.StateError, match="not started"):
        step.ready("x", 0)
    step.start("x")
    with pytest.raises(fompi.StateError, match="in flight"):
        step.start()
    for name, part in (("x", world.size), ("x", -1), ("nobody", 0)):
        with pytest.raises(fompi.PlanError, match="has no part"):
            step.ready(name, part)
    with pytest.raises(fompi.PlanError, match="no output"):
        step.arrived("x", 0)
    for part in range(world.size):
        step.ready("x", part)
    assert (step.wait() == world.size).all()
    assert (step.wait() == world.size).all()  # a second wait() returns the same
    with pytest.raises(fompi.PlanError, match="no input"):
        step.start("y")
    assert (step() == world.size).all()
    step.close()
    step.close()
    with pytest.raises(fompi.StateError, match="closed"):
        step()


def test_close_while_in_flight(world):
    """`close` finishes the call that was started."""
    x = np.ones(10)
    step = fompi.bind(sum_plan(world), comm=world, x=x)
    step.start()
    step.close()
    assert (fompi.all_reduce(x, comm=world) == world.size).all()
    assert (step.wait() == world.size).all()


def test_bind_succeeds_or_fails_on_all_ranks(world, comm):
    """One rank binds another plan, or tensors that do not fit: all ranks raise a typed error, and later calls work."""
    size, last = world.size, world.rank == world.size - 1
    plan = sum_plan(world)
    x, strided, frozen = np.ones(10), np.ones(20)[::2], np.ones(10)
    frozen.flags.writeable = False
    program = plan.programs[size - 1]
    broken = with_program(plan, replace(program, ops=program.ops[:-1]))  # `bind` verifies it first
    wrong = [
        (broken, {"x": x}, fompi.PlanError),
        (plan, {"x": np.ones(11)}, fompi.ShapeError),
        (plan, {"x": np.ones(10, np.float32)}, fompi.DtypeError),
        (plan, {"x": strided}, fompi.TensorError),
        (plan, {"x": x, "out": strided}, fompi.TensorError),
        (plan, {"x": x, "out": frozen}, fompi.TensorError),
        (plan, {"x": [1.0] * 10}, fompi.TensorError),
        (plan, {}, fompi.PlanError),
        (plan, {"x": x, "w": x}, fompi.PlanError),
        (fompi.plan(fompi.all_reduce, Spec((10,), "float64", Partial()), ranks=size + 1), {"x": x}, fompi.PlanError),
    ]
    for bad_plan, tensors, error in wrong:
        with pytest.raises(error if last else fompi.MismatchError):
            fompi.bind(bad_plan if last else plan, comm=world, **(tensors if last else {"x": x}))
        with pytest.raises(error):  # on all ranks
            fompi.bind(bad_plan, comm=world, **tensors)
    others = [sum_plan(world, schedule="ring"), sum_plan(world, slices=2), sum_plan(world, dtype="float32")]
    for other in others if size > 1 else []:
        with pytest.raises(fompi.MismatchError, match="the ranks disagree in call"):
            fompi.bind(other if last else plan, comm=world, x=x.astype(other.problem.dtype) if last else x)
    assert (fompi.bind(plan, comm=world, x=x)() == size).all()


def test_many_executors_come_and_go(world):
    """None of them leaves memory behind."""
    x = np.ones(1000)
    plan = sum_plan(world, 1000)
    before = world.engine.arena.lent_nbytes
    for _ in range(50):
        with fompi.bind(plan, comm=world, x=x) as step:
            assert (step() == world.size).all()
    del step
    gc.collect()
    assert world.engine.arena.lent_nbytes <= before + 8192


def test_strided_rows_are_read_again_at_every_call(world):
    """x (rows, batch, columns) is a view of a batch-first array. `bind` must not copy it."""
    holder = np.ones((3, world.size, 4))
    x = holder.swapaxes(0, 1)
    forms = Form(x.shape, "float64"), [Form((4, 2), "float64")]
    plan = registry.write(problem("matmul_all_reduce", world.size, *forms), "direct", 1, Sizes((1,) * world.size))
    with fompi.bind(plan, comm=world, x=x, w=np.ones((4, 2))) as step:
        for value in (1.0, 2.0, 3.0):
            holder[...] = value
            assert (step() == 4 * value * world.size).all()


def test_a_broadcast_is_planned_from_a_replicated_spec(world):
    plan = fompi.plan(fompi.broadcast, Spec((4, 2), "int32", Replicate()), ranks=world.size, root=world.size - 1)
    x = np.full((4, 2), world.rank, np.int32)
    np.testing.assert_array_equal(fompi.bind(plan, comm=world, x=x)(), np.full((4, 2), world.size - 1, np.int32))
