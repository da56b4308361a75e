"""The schedule of a call: by a calibrated machine, by FOMPI_MACHINE, or by the rule. No measured time is checked."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
from explained import scatter, whole
from mpi4py import MPI

import fompi
from fompi import Partial, Spec
from fompi.model import fit
from fompi.model.machine import Machine
from fompi.ops import decide
from fompi.tuning.calibrate import slowdown
from fompi.tuning.links import LinkMeter
from fompi.tuning.rounds import meet

pytestmark = [
    pytest.mark.skipif(MPI.COMM_WORLD.size > 4, reason="eight ranks on two cores would be slow and test nothing new"),
    pytest.mark.usefixtures("few_rounds"),
]


@pytest.mark.timeout(100)
def test_calibrate(own, comm, tmp_path):
    steps = []
    machine = fompi.calibrate(own, steps.append)
    assert comm.allgather(machine) == [machine] * own.size
    assert machine.flops_rate > 1e8 and machine.memory_rate > 1e7 and 0 < machine.overhead < 1e-2
    assert len(machine.speeds) == own.size and machine.memory > 1e6
    assert all([rows for rows, _ in curve] == [1, 8, 64, 512] and curve[0][1] > 0 for curve in machine.speeds)
    if own.size > 1:
        assert machine.latency > 0 and machine.curve and len(machine.collectives) == 5
    machine.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == machine and machine.source.startswith("measured ")
    assert steps[0] == "kernels"
    explanation, *_ = scatter(own, machine=machine)
    assert explanation.winner.seconds > 0
    slower = slowdown(fit.slowed(machine, 1e-3), own)
    assert slower > 10 and comm.allgather(slower) == [slower] * own.size


@pytest.mark.parametrize("path", ["staged", "ipc"])
def test_calibrate_a_device(own, comm, monkeypatch, path):
    """Its kernels, launches and copies, and messages by the path that calls take. Times of software mean nothing."""
    monkeypatch.setenv("FOMPI_PATH", path)
    machine = fompi.calibrate(own, device=fompi.Device("software", seed=own.rank, delay=0.0))
    assert comm.allgather(machine) == [machine] * own.size and "software device" in machine.source
    assert min(machine.launch, machine.overhead, machine.copy_rate, machine.flops_rate) > 0 and machine.lanes == 2
    assert machine.staged == (1 if path == "staged" and own.size > 1 else 0)
    assert 0 < machine.announced <= 1
    explanation, *_ = scatter(own, machine=replace(machine, staged_below=0))
    copies = {event.lane for event in explanation.winner.trace.events} & {"download", "upload"}
    assert bool(copies) == bool(machine.staged)


@pytest.mark.skipif(MPI.COMM_WORLD.size > 2, reason="two ranks on different hosts show it, in a third of the time")
@pytest.mark.timeout(100)
def test_calibrate_on_different_hosts(own, comm, monkeypatch):
    """One host has more cores per rank than another. All ranks still measure the same."""
    calibrate = import_module("fompi.tuning.calibrate")
    monkeypatch.setattr(calibrate.launcher, "cores_per_rank", lambda: 2.0 if own.rank == 0 else 1.0)
    machine = fompi.calibrate(own)
    assert comm.allgather(machine) == [machine] * own.size and (own.size == 1 or machine.lanes == 1)


def test_a_shared_link_is_measured_one_way(own, comm):
    """With a message the other way, acknowledgements would wait behind data, and the link would seem slower."""
    if own.size == 1:
        return
    messages = LinkMeter(own, own.link)
    messages._one_way((0, own.size - 1), 1000)
    assert comm.allgather(int(messages.inbox.sum())) == [0] * (own.size - 1) + [1000]


def test_calibrate_must_be_called_on_all_ranks(own):
    """If one rank calls something else, all ranks raise an error instead of waiting."""
    if own.size == 1:
        return
    with pytest.raises(fompi.MismatchError, match="calibrate"):
        fompi.calibrate(own) if own.rank else fompi.all_reduce(np.ones(3), comm=own)


def test_calls_choose_by_the_machine_of_the_communicator(own, machine):
    """FOMPI_MACHINE sets it."""
    own.machine = machine
    size = own.size
    with own.record() as traces:
        x = whole((4 * size, 3), own.rank)
        assert np.array_equal(fompi.all_reduce(x, comm=own), sum(whole((4 * size, 3), r) for r in range(size)))
        fompi.all_to_all(x, comm=own)
    assert len(traces) == 2
    if size > 1:
        sums = Spec((12 * size,), "float64", Partial())
        explanation = fompi.explain(fompi.all_reduce, sums, ranks=size, machine=machine)
        assert explanation.winner.candidate.schedule in traces[0].title


def test_an_all_to_all_is_chosen_by_the_rows_of_all_ranks(own, machine, monkeypatch):
    """Each rank sends how many rows it has, to a power of two. So all ranks choose the same."""
    own.machine, chosen, choose = machine, [], decide.choose_schedule

    def recorded(problem, rows, *rest):
        chosen.append((rows, choose(problem, rows, *rest)))
        return chosen[-1][1]

    monkeypatch.setattr(decide, "choose_schedule", recorded)
    x, w = whole((3 * (own.rank + 1), 3), own.rank), whole((3, 4), 5)
    counts = [3 * (own.rank + 1) if dest == 0 else 0 for dest in range(own.size)]
    y = fompi.all_to_all_matmul(x, w, counts=counts, comm=own)
    if own.rank == 0:
        assert np.array_equal(y, np.concatenate([whole((3 * (r + 1), 3), r) for r in range(own.size)]) @ w)
    total = sum(1 << (3 * (r + 1)).bit_length() - 1 for r in range(own.size))
    if own.size > 1:
        assert [rows for rows, _ in chosen] == [total] and len(set(own.link.comm.allgather(chosen[0]))) == 1


def test_large_products_are_cut_into_slices_over_a_network(own, monkeypatch):
    """The ranks have different numbers of rows, and exchange them to a power of two."""
    own.network, own.crowded, chosen, choose = own.size > 1, False, [], decide.choose_schedule
    monkeypatch.setattr(decide, "choose_schedule", lambda *args: chosen.append(choose(*args)) or chosen[-1])
    x, w = np.ones((128 * own.size**2 + own.rank, 2)), np.ones((2, 2048))
    counts = [len(x) - 128 * (own.size - 1)] + [128] * (own.size - 1)
    y = fompi.matmul_all_to_all(x, w, counts=counts, comm=own)
    assert (y == 2).all()
    if own.size > 1:
        assert chosen == [("direct", 4)] and len(set(own.link.comm.allgather(chosen[0]))) == 1


@pytest.mark.parametrize(("more", "schedule"), [(1, "pairwise"), (300, "direct")])
def test_a_plain_all_to_all_is_cut_into_slices_over_a_network(own, more, schedule):
    """With several peers two slices are in flight at a time: by `pairwise`, or `direct` if the rows are uneven."""
    own.network, own.crowded = own.size > 1, False
    x = np.arange((512 * own.size + more * own.rank) * 256.0).reshape(-1, 256) + own.rank
    counts = [len(x) - 512 * (own.size - 1)] + [512] * (own.size - 1)
    of_all_ranks = own.link.comm.allgather((x, counts))
    y = fompi.all_to_all(x, counts=counts, comm=own)
    parts = [np.split(rows, np.cumsum(counts)[:-1])[own.rank] for rows, counts in of_all_ranks]
    assert np.array_equal(y, np.concatenate(parts))
    (plan,) = (program.plan for program in own.plans.values())
    assert (plan.schedule, plan.parts, plan.window) == ((schedule, 8, 2) if own.size > 2 else ("direct", 1, None))


def test_ranks_exchange_whether_an_all_to_all_is_even(own, machine, monkeypatch):
    own.machine, even, choose = machine, [], decide.choose_schedule
    monkeypatch.setattr(decide, "choose_schedule", lambda *args: even.append(args[-1]) or choose(*args))
    for more in (0, 3000):  # which changes the bits of the sum, too: else nothing is chosen anew
        x = np.arange((512 * own.size + more) * 4.0).reshape(-1, 4) + own.rank
        counts = [512] * (own.size - 1) + [512 + more]
        y = fompi.all_to_all(x, counts=counts, comm=own)
        assert len(y) == 512 * own.size + more * own.size * (own.rank == own.size - 1)
    if own.size > 1:
        assert even == [True, own.size == 2]


def test_ranks_with_different_columns_take_the_rule(own, machine):
    """By the model they might choose different schedules."""
    own.machine = machine
    x, w = whole((4, 5), own.rank), whole((5, 1000 if own.rank else 1), 7)
    y = fompi.all_gather_matmul(x, w, comm=own)
    assert np.array_equal(y, np.concatenate([whole((4, 5), r) for r in range(own.size)]) @ w)


def test_a_measurement_has_a_deadline(own, comm, monkeypatch):
    """If another rank does not come, a rank raises an error instead of waiting forever."""
    if own.size == 1:
        return
    monkeypatch.setenv("FOMPI_TIMEOUT", "0.3")
    private = comm.Dup()
    if own.rank == 0:
        with pytest.raises(fompi.WaitTimeout, match=r"not all ranks reached a measurement within 0\.3 s"):
            meet(private)
        monkeypatch.setattr(own.engine, "timeout", 0.3)
        messages = LinkMeter(own, own.link)
        with pytest.raises(fompi.WaitTimeout, match="to measure a link"):
            messages._complete([private.Irecv(messages.inbox[:8], 1, 7)])
        monkeypatch.undo()
        private.Send(np.zeros(1), 1, 8)
    elif own.rank == 1:
        private.Recv(np.zeros(1), 0, 8)
        private.Send(np.zeros(1), 0, 7)
    comm.Barrier()
    if own.rank:
        private.Ibarrier().Wait()  # completes the barrier that rank 0 has started
    comm.Barrier()
