"""Communicators, calls in flight and processes that end or are copied at an awkward moment."""

from __future__ import annotations

import gc
import os
import signal
import threading
import warnings
from time import perf_counter, sleep

import numpy as np
import pytest
from mpi4py import MPI

import fompi
from fompi import Partial, Shard, Spec
from fompi.ops import pending as module

pytestmark = pytest.mark.ranks(mpich=[2], openmpi=[2])


def sum_of(comm, nbytes=800_000):
    return fompi.all_reduce.start(np.ones(nbytes // 8), comm=comm)


def test_a_call_in_flight_when_its_communicator_is_closed(comm):
    own = fompi.Communicator(comm, "own")
    pending = [sum_of(own) for _ in range(3)]
    own.close()
    for each in pending:
        assert (each.wait() == own.size).all()
    with pytest.raises(fompi.StateError, match="closed"):
        fompi.all_reduce(np.ones(3), comm=own)


def test_a_call_in_flight_when_its_mesh_is_closed(comm):
    mesh = fompi.Mesh(comm, dp=1, tp=comm.size)
    pending = sum_of(mesh["tp"])
    mesh.close()
    assert (pending.wait() == comm.size).all()


def test_a_call_in_flight_when_its_mpi_communicator_is_freed(comm):
    duplicate = comm.Dup()
    pending = sum_of(duplicate)
    duplicate.Free()
    assert (pending.wait() == comm.size).all()


def test_a_bound_call_in_flight_when_its_communicator_is_closed(comm):
    own = fompi.Communicator(comm, "own")
    spec = Spec((100_000,), "float64", Partial())
    steps = [
        fompi.bind(fompi.plan("all_reduce", spec, ranks=own.size, schedule=schedule), comm=own, x=np.ones(100_000))
        for schedule in ("ring", "unfused")
    ]
    for step in steps:
        step.start()
    own.close()
    for step in steps:
        assert (step.wait() == own.size).all()
        with pytest.raises(fompi.StateError, match="closed"):
            step()


def test_a_bound_call_that_waits_for_a_part_when_its_communicator_is_closed(comm):
    own = fompi.Communicator(comm, "own")
    spec = Spec((own.size * 4, 3), "float64", Shard(0))
    step = fompi.bind(fompi.plan("all_gather", spec, ranks=own.size), comm=own, x=np.ones((4, 3)))
    step.start("x")
    comm.Barrier()  # else a rank that closes early refuses the start of a late one, also rightly
    own.close()
    with pytest.raises((fompi.StateError, fompi.PeerError), match="closed before all parts"):
        step.wait()


@pytest.mark.skipif(MPI.COMM_WORLD.size > 2, reason="more ranks take longer and test nothing new")
def test_more_communicators_than_mpi_has(comm):
    """MPICH has 2048, and each of ours takes two. The error says what to do, and the next call works."""
    made = []
    try:
        for number in range(1100):
            made.append(fompi.Communicator(comm, f"number {number}"))
    except fompi.StateError as error:
        assert "close" in str(error) and MPI.Get_library_version().startswith("MPICH")
    else:
        assert len(made) == 1100
    assert len(made) > 800
    for each in made:
        each.close()
    with fompi.Communicator(comm, "after") as after:
        assert fompi.all_reduce(np.ones(3), comm=after).tolist() == [comm.size] * 3


def test_programs_of_calls_are_limited(comm, monkeypatch):
    with fompi.Communicator(comm, "own") as own:
        monkeypatch.setattr(module, "MOST_PLANS", 10)
        for columns in range(1, 40):
            y = fompi.all_gather(np.full((1, columns), float(own.rank)), comm=own)
            assert y.shape == (own.size, columns) and len(own.plans) <= 10
        assert [key[0].row for key in own.plans][-1] == (39,)


def test_nobody_waits_for_a_pending(world):
    pending = sum_of(world)
    while not pending.task.finished:
        world.engine.progress()
    with pytest.warns(ResourceWarning, match=r"fompi.all_reduce.start: nobody waited"):
        del pending
        gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sum_of(world).wait()
        gc.collect()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork with threads, which is the point
@pytest.mark.parametrize("forking", ["first", "all"])
def test_a_forked_child_is_refused(world, forking):
    """It would speak in its parent's name. The parent goes on."""
    pending = sum_of(world)
    in_flight = [] if pending.done() else [pending.wait, pending.done]  # a result that is there stays there
    child = os.fork() if forking == "all" or world.rank == 0 else -1
    if child == 0:
        status = 0
        for call in (
            lambda: fompi.all_reduce(np.ones(3), comm=world),
            lambda: fompi.Communicator(),
            lambda: fompi.all_reduce.start(np.ones(3), comm=world),
            *in_flight,
        ):
            try:
                call()
                status = 1
            except fompi.StateError as error:
                status |= 0 if "forked" in str(error) else 2
            except BaseException:
                status |= 4
        os._exit(status)
    assert (pending.wait() == world.size).all()
    if child > 0:
        assert os.waitpid(child, 0)[1] == 0
    assert fompi.all_reduce(np.ones(3), comm=world).tolist() == [world.size] * 3


@pytest.mark.skipif("signal.getsignal(signal.SIGINT).__name__ != 'interrupted'", reason="a launcher ignores SIGINT")
def test_an_interrupt_in_a_wait_loses_nothing(world):
    """Whenever Ctrl-C comes, the call goes on, and later calls work."""
    caught = 0
    for number in range(30):
        pending = sum_of(world, 2_000_000)
        timer = threading.Timer(2e-4 * number, signal.raise_signal, (signal.SIGINT,))
        end = perf_counter() + 10
        try:
            timer.start()
            pending.wait()
            while perf_counter() < end:
                sleep(1e-4)
        except KeyboardInterrupt:
            caught += 1
        timer.join()
        assert (pending.wait() == world.size).all()
    assert caught == 30
    assert fompi.all_reduce(np.ones(3), comm=world).tolist() == [world.size] * 3


def test_many_operations_in_flight(world):
    """The program gets the engine's lock although the helper polls all the time."""
    begun = perf_counter()
    flying = [fompi.all_reduce.start(np.full(2000, float(number)), comm=world) for number in range(300)]
    while not all(pending.done() for pending in flying):
        pass
    for number, pending in enumerate(flying):
        assert pending.result[0] == number * world.size
    assert perf_counter() - begun < 30
