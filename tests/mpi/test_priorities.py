"""Axes with priorities: the same results, no deadlock, nothing held after an error."""

from __future__ import annotations

from random import Random
from threading import Thread
from time import perf_counter

import numpy as np
import pytest

import fompi
from fompi.base.errors import LayoutError, MismatchError, PeerError, StateError
from fompi.engine import port as ports
from fompi.engine.port import Port

pytestmark = pytest.mark.ranks(mpich=[4], openmpi=[4])

LARGE = 40_000
"""Elements of float64 that go in some parts, of 8 KiB here."""


@pytest.fixture
def small_parts(monkeypatch):
    """More parts for fewer bytes."""
    monkeypatch.setattr(ports, "PART_NBYTES", 8 << 10)
    monkeypatch.setattr(ports, "LEAST_WINDOW", 8 << 10)


@pytest.fixture
def squares(world, small_parts):
    """A 2 x 2 mesh with priorities, on four ranks."""
    if world.size != 4:
        pytest.skip("a mesh of 2 x 2 has four ranks")
    with fompi.Mesh(dp=2, tp=2, priority=("tp", "dp")) as mesh:
        yield mesh
    assert_empty(world)


def assert_empty(world):
    port = world.engine.port
    with world.engine.lock:
        assert port.held == 0 and not port._flying and not any(port._queues.values())


def test_urgencies(world):
    if world.size > 2:
        return
    with fompi.Mesh(a=1, b=world.size, c=1, priority=("c", "a")) as mesh:
        assert [mesh[name].urgency for name in "abc"] == [1, 2, 0]
        assert (mesh["a", "c"].urgency, mesh["a", "b"].urgency, mesh.world.urgency) == (1, 2, None)
        with mesh["c"].split(0) as part:
            assert (part.urgency, part.most_nbytes) == (0, mesh["c"].most_nbytes)
        assert mesh["b"].most_nbytes < mesh["c"].most_nbytes
    with fompi.Mesh(a=world.size) as mesh:
        assert mesh["a"].urgency is None and mesh["a"].most_nbytes == world.most_nbytes


@pytest.mark.parametrize("priority", [5, "ab", ("a", 1), ("a", "x"), ("a", "a"), ("a", "b", "a")])
def test_priorities_that_are_refused(world, priority):
    with pytest.raises(LayoutError, match=r"priority= names axes of the mesh \(a, b\), each once, not"):
        fompi.Mesh(a=1, b=world.size, priority=priority)


def test_ranks_with_other_priorities(world):
    if world.size > 1:
        with pytest.raises(MismatchError, match="priority="):
            fompi.Mesh(a=1, b=world.size, priority=("a", "b") if world.rank else ("b", "a"))


def steps(axis, seed, results):
    """Operations on one axis, the same on all its ranks, which wait for them in orders of their own."""
    draw, waits, pending = Random(seed), Random(7 * seed + axis.rank), []
    other = (axis.rank + 1) % axis.size
    for i in range(14):
        rows = draw.choice([3, 2000, LARGE // 2])
        x = np.arange(rows * 2.0).reshape(rows, 2) % 97 + axis.rank + i
        kind, schedule = draw.randrange(5), draw.choice(["direct", "ring", "unfused"])
        if kind == 0:
            pending.append(fompi.all_reduce.start(x, comm=axis, schedule=schedule))
        elif kind == 1:
            pending.append(fompi.all_gather.start(x, comm=axis, schedule=schedule))
        elif kind == 2:
            pending.append(fompi.sendrecv.start(x, other, other, comm=axis))
        elif kind == 3:
            pending.append(fompi.broadcast.start(x, root=i % 2, comm=axis))
        else:
            pending.append(fompi.matmul_all_reduce.start(x, np.ones((2, 5)), comm=axis, slices=2))
        while len(pending) > waits.randrange(4):
            results.append(np.array(pending.pop(waits.randrange(len(pending))).wait()))
    results.extend(np.array(each.wait()) for each in pending)


def test_the_same_results_from_several_threads(world, squares):
    """Two threads, each with the operations of one axis."""
    with fompi.Mesh(dp=2, tp=2) as plain:
        for seed in range(3):
            found = []
            for mesh in (plain, squares):
                results = {name: [] for name in ("dp", "tp")}
                threads = [
                    Thread(target=steps, args=(mesh[name], 10 * seed + (name == "tp"), results[name]), daemon=True)
                    for name in results
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(30)
                    assert not thread.is_alive()
                found.append(results)
            for name in ("dp", "tp"):
                assert len(found[0][name]) == 14
                for expected, y in zip(found[0][name], found[1][name], strict=True):
                    np.testing.assert_array_equal(y, expected, strict=True)
            world.barrier()
    assert_empty(world)


def test_the_receiver_of_an_urgent_message_first_waits_for_a_held_one(world, squares):
    """0 sends to 1 on tp, and behind that to 2 on dp. 1 receives that of 0 after a chain 0, 2, 3, 1 of the others."""
    dp, tp = squares["dp"], squares["tp"]
    x = np.arange(float(LARGE))
    begun = perf_counter()
    if world.rank == 0:
        urgent, held = fompi.send.start(x, 1, comm=tp), fompi.send.start(x + 1, 1, comm=dp)
        urgent.wait()
        held.wait()
    elif world.rank == 1:
        y = fompi.recv(1, comm=dp)
        np.testing.assert_array_equal(fompi.recv(0, comm=tp) + 3, y)
    elif world.rank == 2:
        fompi.send(fompi.recv(0, comm=dp) + 1, 1, comm=tp)
    else:
        fompi.send(fompi.recv(0, comm=tp) + 1, 0, comm=dp)
    assert perf_counter() - begun < 10


@pytest.mark.parametrize("is_released", [True, False])
def test_a_held_message_does_not_wait_for_its_receiver(world, small_parts, monkeypatch, is_released):
    """Of two pairs of one rank, too: 0 sends an urgent message, then another one, which 1 receives first."""
    if world.size == 1:
        return
    urgent, late = world.split(0, world.rank, "urgent"), world.split(0, world.rank, "late")
    urgent.prioritize(0)
    late.prioritize(1)
    x = np.arange(float(LARGE))
    with urgent, late:
        if world.rank == 0:
            if not is_released:  # nothing leaves for a while
                monkeypatch.setattr(Port, "next", lambda self, now: None)
            first, second = fompi.send.start(x, 1, comm=urgent), fompi.send.start(x + 1, 1, comm=late)
            (task,) = late.channel.active.values()
            if not is_released:
                assert task.waits_for() is None and not first.done()
                monkeypatch.undo()
            first.wait()
            second.wait()
        elif world.rank == 1:
            np.testing.assert_array_equal(fompi.recv(0, comm=late), x + 1)
            np.testing.assert_array_equal(fompi.recv(0, comm=urgent), x)
    assert_empty(world)


def failing(*arguments):
    raise ValueError("a kernel of this rank fails")


def test_an_error_on_one_axis_leaves_nothing_held(world, squares):
    """A failed call still sends every message. The other axis goes on, and so does this one."""
    dp, tp = squares["dp"], squares["tp"]
    x = np.ones((LARGE // 10, 10))
    spec = fompi.Spec(x.shape, "float64", fompi.Partial())
    plan = fompi.plan(fompi.all_reduce, spec, ranks=2, schedule="ring", slices=4)
    kernels = {"add": failing} if world.rank == 0 else None
    with fompi.bind(plan, comm=dp, x=x, kernels=kernels) as step:
        step.start()
        for _ in range(3):
            assert (fompi.all_reduce(x, comm=tp, schedule="direct") == 2).all()
        if world.rank % 2 == 0:
            with pytest.raises(ValueError if world.rank == 0 else PeerError, match="a kernel of this rank fails"):
                step.wait()
        else:
            assert (step.wait() == 2).all()
    world.barrier()
    assert_empty(world)
    assert (fompi.all_reduce(x, comm=dp) == 2).all()


def test_an_abandoned_call_leaves_nothing_held(world, small_parts):
    """It is given up while its messages wait for their turn, and for a receiver that never comes."""
    if world.size == 1:
        return
    late = world.split(0, world.rank, "late")
    late.prioritize(1)
    if world.rank == 0:
        pending = [fompi.send.start(np.ones(LARGE), 1, comm=late) for _ in range(3)]
        assert world.engine.port.held
        late.channel.fail(next(iter(late.channel.active.values())), StateError("given up"))
        with pytest.raises(StateError, match="given up"):
            pending[0].wait()
        for each in pending[1:]:
            late.channel.fail(next(iter(late.channel.active.values())), StateError("given up"))
            with pytest.raises(StateError, match="given up"):
                each.wait()
    world.barrier()
    assert_empty(world)
    late.close()


def test_a_busy_urgent_axis_lets_the_other_one_through(world, squares):
    """With the urgent axis busy all the time, the other one still gets through."""
    dp, tp = squares["dp"], squares["tp"]
    x = np.ones(LARGE)
    pending = fompi.all_reduce.start(x[:2000], comm=dp, schedule="direct")
    end = perf_counter() + 20
    while not all(world.agree("is it done", value=int(pending.done()))):
        fompi.all_reduce(x, comm=tp, schedule="direct")
        assert perf_counter() < end
    assert (pending.wait() == 2).all()
