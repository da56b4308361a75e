"""Bound calls in C: the bits of the Python engine, which goes on with a call at any point, each rank at another one."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from time import perf_counter

import calls
import catalogue
import numpy as np
import pytest
from cut_short import CutShort

import fompi
from emulated import Emulated, corner
from fompi.engine.native import engine
from fompi.model.machine import Machine
from fompi.mpi import transport
from fompi.schedules import registry
from fompi.tensors import dlpack

pytestmark = [
    pytest.mark.ranks(mpich=[3], openmpi=[4]),
    pytest.mark.skipif(os.environ.get("FOMPI_ENGINE") == "python", reason="calls run in Python"),
]


def test_c_is_there():
    assert str(engine()) == "C, and Python where C does not go on"
    wanted = "libmpi_abi.so" if Path(sys.prefix).name == ".venv-abi" else "libmpi.so"
    assert Path(transport.library().path).name.startswith(wanted)


def bound(world, problem, schedule, slices, seed):
    """A bound plan on random rows, whose call has run in Python once: (executor, the bits of its results)."""
    sizes = calls.row_sizes(problem, ("uneven", "even")[seed % 2], seed=seed)
    plan = registry.write(problem, schedule, slices, sizes)
    mine = catalogue.inputs(problem, sizes, seed)[world.rank]
    step = fompi.bind(plan, comm=world, **{name: dlpack.lend(x, problem.dtype, "dlpack") for name, x in mine.items()})
    step.start()
    return step, bits(step.wait())


def bits(results):
    results = results if isinstance(results, tuple) else (results,)
    return [dlpack.borrow(y).array.tobytes() for y in results]


def forget(step):
    """Overwrite what the last call has written."""
    for array, _, _ in step._outputs:
        array.view(np.uint8)[...] = 0xAB


ONE_MPI = [pytest.param(dtype, marks=pytest.mark.one_mpi) for dtype in ("float32", "float16", "int32", "complex128")]
"""The kernels of C have more dtypes than its messages."""


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", *ONE_MPI])
def test_every_schedule_has_the_same_bits(world, dtype, without_verification):
    """With two dtypes every schedule, with the others every third one, in turns."""
    in_c, every = 0, 1 if dtype in ("float64", "bfloat16") else 3
    for number, (name, problem) in enumerate(catalogue.problems(world.size, dtype).items()):
        for schedule in registry.available(problem)[number % every :: every]:
            step, wanted = bound(world, problem, schedule, 1 + number % 2, number)
            with step:
                for _ in range(3):
                    forget(step)
                    assert bits(step()) == wanted, (name, schedule)
                in_c += step._in_c is not None
    assert in_c >= 30 // every


def test_python_goes_on_at_every_step(world, without_verification):
    """All ranks at other steps: the bits are the same, and the next call is in step."""
    draw = np.random.default_rng(world.rank)
    for number, (name, problem) in enumerate(catalogue.problems(world.size, "float32").items()):
        for schedule in registry.available(problem):
            step, wanted = bound(world, problem, schedule, 1 + number % 2, number)
            with step:
                call = step._in_c
                for _ in range(6):
                    forget(step)
                    step.__dict__["_in_c"] = call and CutShort(call, lambda: int(draw.integers(0, 12)))
                    assert bits(step()) == wanted, (name, schedule)
                    assert step.trace.seconds > 0 and not step.failed_here
                step.__dict__["_in_c"] = call
                assert bits(step()) == wanted


def test_a_late_rank_is_waited_for_in_python(world):
    """C gives up after a millisecond without progress."""
    step, wanted = bound(world, catalogue.problems(world.size)["all_reduce"], "ring", 1, 1)
    with step:
        assert step._in_c is not None
        if world.rank == world.size - 1:
            threading.Event().wait(0.05)
        assert bits(step()) == wanted
        assert bits(step()) == wanted


def test_traces_and_times(world):
    """A call in C has the trace, the proof and the time of a call."""
    step, _ = bound(world, catalogue.problems(world.size)["all_reduce"], "ring", 2, 1)
    with step:
        step()
        assert step.seconds > 0 and step.finished and step.done() and step.is_whole
        trace = step.trace
        assert len(trace.events) == len(step.plan.programs[world.rank].ops)
        assert all(event.start <= event.end for event in trace.events) and trace.seconds <= step.seconds * 1.01
        assert "exposed" in str(step.proof)
        assert step.part("y", 0) is not None and step.arrived("y", 0)
        with world.record() as traces:
            step()
        assert len(traces) == 1
    assert len(step.trace.events) == len(trace.events)  # after `close`, too


def test_calls_with_labels_and_rows_are_in_step(world):
    """Rows that are not those of the plan run in Python, between calls in C."""
    problem = catalogue.problems(world.size)["all_gather"]
    step, wanted = bound(world, problem, "ring", 1, 1)
    with step:
        for turn in range(4):
            assert bits(step()) == wanted
            assert bits(step(label=turn)) == wanted
            step([0] * world.size)
        assert bits(step()) == wanted


def test_timed_kernels(world, without_verification):
    """On an emulated accelerator Python launches kernels, and C ends them. Python takes some calls over."""
    draw, machine, in_c = np.random.default_rng(world.rank), Machine("short kernels", 0.0, 1e9, 1e12, 1e12, 3e-5), 0
    for number, (name, problem) in enumerate(catalogue.problems(world.size, "float32").items()):
        for schedule in registry.available(problem)[:3]:
            sizes = calls.row_sizes(problem, ("uneven", "even")[number % 2], seed=number)
            plan = registry.write(problem, schedule, 2, sizes)
            mine = catalogue.inputs(problem, sizes, number)[world.rank]
            tensors = {name: dlpack.lend(x, problem.dtype, "dlpack") for name, x in mine.items()}
            with fompi.bind(plan, comm=world, backend=Emulated(machine), **tensors) as step:
                call, wanted = step._in_c, None
                in_c += call is not None
                for how in (None, call, call, CutShort(call, lambda: int(draw.integers(0, 12))) if call else None):
                    forget(step)
                    step.__dict__["_in_c"] = how
                    results = step()
                    results = results if isinstance(results, tuple) else (results,)
                    corners = [np.ascontiguousarray(corner(dlpack.borrow(y).array)).tobytes() for y in results]
                    assert wanted is None or corners == wanted, (name, schedule)
                    wanted, trace = corners, step.trace
                    assert all(event.start <= event.end for event in trace.events)
                step.__dict__["_in_c"] = call
    assert in_c > 20


def test_a_timed_kernel_that_fails(world):
    """It cannot be launched on one rank. The others hear of it, and the next call works."""
    failing = [False]

    n = world.size
    specs = fompi.Spec((4 * n, 3 * n), "float64", fompi.Shard(1)), fompi.Spec((3 * n, 2), "float64", fompi.Shard(0))
    plan = fompi.plan(fompi.matmul_all_reduce, *specs, ranks=n, schedule="ring")
    tensors = {"x": np.ones((4 * n, 3)), "w": np.ones((3, 2))}
    with fompi.bind(
        plan, comm=world, backend=Emulated(Machine("short kernels", 0.0, 1e9, 1e12, 1e12, 1e-4)), **tensors
    ) as step:
        actions = step._actions
        step._actions = [failing_on(action, failing, world) if callable(action) else action for action in actions]
        for turn in range(4):
            failing[0] = turn % 2 == 1
            step.start()
            if failing[0]:
                with pytest.raises(ValueError if world.rank == n - 1 else fompi.PeerError, match="a bad launch"):
                    step.wait()
            else:
                assert (corner(step.wait()) == 3 * n).all()
        step._actions = actions


def failing_on(action, failing, world):
    def launch(after):
        if failing[0] and world.rank == world.size - 1:
            raise ValueError("a bad launch")
        return action(after)

    return launch


@pytest.mark.parametrize("seed", [1, 2])
def test_parts_of_inputs_in_c(world, seed, without_verification):
    """Inputs that become ready block by block, in any order; Python takes some of the calls over."""
    draw = np.random.default_rng(10 * seed + world.rank)
    for number, (name, problem) in enumerate(catalogue.problems(world.size, "float64").items()):
        for schedule in registry.available(problem)[:3]:
            step, wanted = bound(world, problem, schedule, 1 + number % 2, number)
            names = [n for n in step._inputs if len(step.compiled.named(n)) == 1]
            with step:
                call = step._in_c
                for turn in range(4):
                    forget(step)
                    if turn > 1 and call is not None:
                        step.__dict__["_in_c"] = CutShort(call, lambda: int(draw.integers(0, 12)))
                    blocks = [(n, block) for n in names for block in range(step.compiled.buffers[n].count)]
                    step.start(*names)
                    if blocks:
                        with pytest.raises(fompi.StateError, match="was never called"):
                            step.wait()
                    for at in draw.permutation(len(blocks)):
                        step.ready(*blocks[at])
                    assert bits(step.wait()) == wanted, (name, schedule, turn)
                step.__dict__["_in_c"] = call


def test_labels_in_c(comm):
    """Calls with other labels never exchange data: each rank hears of it."""
    own = fompi.Communicator(comm)
    step = fompi.all_reduce.bind(np.ones(8), comm=own)
    for label in ("a", 7, None):
        assert (step(label=label) == own.size).all() and step.executor._run is None  # C has finished it
    with pytest.raises(fompi.MismatchError, match="label"):
        step(label=f"rank {own.rank}")


@pytest.mark.parametrize("waits", [True, False])
def test_long_sums_and_kernels_that_fail(world, waits):
    """Sums of megabytes run in C beside the messages. A kernel of the program raises: all ranks hear of it."""
    x = np.arange(1 << 20, dtype=np.float64)
    with fompi.all_reduce.bind(x, comm=world, schedule="ring", slices=1) as step:
        assert step.executor._in_c is not None and step.executor._is_long
        for _ in range(3):
            y = step() if waits else step.start().wait()
            assert (y == world.size * x).all()
    n, failing = world.size, [False]

    def matmul(reads, writes):
        if failing[0] and world.rank == n - 1:
            raise ValueError("a bad product")
        np.matmul(*reads, out=writes[0])

    specs = fompi.Spec((4 * n, 3 * n), "float64", fompi.Shard(1)), fompi.Spec((3 * n, 2), "float64", fompi.Shard(0))
    plan = fompi.plan(fompi.matmul_all_reduce, *specs, ranks=n, schedule="ring")
    tensors = {"x": np.ones((4 * n, 3)), "w": np.ones((3, 2))}
    with fompi.bind(plan, comm=world, kernels={"matmul": matmul}, **tensors) as step:
        for turn in range(6):
            failing[0] = turn % 2 == 1
            step.start()
            assert step._in_c.has_kernels
            if not waits:
                threading.Event().wait(0.01)
            if failing[0]:
                with pytest.raises(ValueError if world.rank == n - 1 else fompi.PeerError, match="a bad product"):
                    step.wait()
            else:
                assert (step.wait() == 3 * n).all()


def test_refusals_between_calls_in_c(world):
    """An error of one rank ends that call on all, and the next one runs in C again."""
    x = np.ones(8)
    with fompi.all_reduce.bind(x, comm=world) as step:
        for turn in range(2 * world.size):
            assert (step() == world.size).all()
            if turn % world.size == world.rank:
                step.refuse(ValueError("not now"))
                with pytest.raises(ValueError, match="not now"):
                    step.wait()
            else:
                with pytest.raises(fompi.PeerError, match="not now"):
                    step()


def test_other_calls_in_flight(world):
    """They move while a bound call is waited for: then it runs in Python."""
    x = np.full(50_000, world.rank + 1.0)
    with fompi.all_reduce.bind(np.ones(8), comm=world) as step:
        for _ in range(5):
            pending = fompi.all_reduce.start(x, comm=world)
            assert (step() == world.size).all()
            assert (pending.wait() == world.size * (world.size + 1) / 2).all()
            assert (step() == world.size).all()


def test_several_threads(own):
    """Each has a bound call of its own; C holds the engine's lock for milliseconds at most."""
    steps = [fompi.all_reduce.bind(np.full(16, k + 1.0), comm=own) for k in range(3)]
    failures = []

    def run(k):
        try:
            for _ in range(50):
                assert (steps[k]() == own.size * (k + 1)).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for step in steps:
        step.close()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_million_calls(world):
    """No drift of memory or time."""
    import resource

    with fompi.all_reduce.bind(np.ones(128), comm=world) as step:
        seconds, nbytes = [], []
        for _ in range(20):
            begun = perf_counter()
            for _ in range(50_000):
                step()
            seconds.append(perf_counter() - begun)
            nbytes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert nbytes[-1] < nbytes[1] + 1024  # KiB
    assert min(seconds[10:]) < 2 * min(seconds[:10])


def test_a_closed_communicator(comm):
    with fompi.Communicator(comm) as made:
        step = fompi.all_reduce.bind(np.ones(3), comm=made)
        assert (step() == made.size).all()
    with pytest.raises(fompi.StateError, match="closed"):
        step()
