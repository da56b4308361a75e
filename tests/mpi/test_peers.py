"""The rivals compute correct results, on every number of ranks and in several calls."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from time import perf_counter, sleep

import numpy as np
import pytest

import collectives
import fompi
import peers
import plain_mpi
from fompi.base.errors import LayoutError
from fompi.bench.fused import OPERATIONS, FusedCase, blocking
from fompi.bench.measure import DEFAULT, Bench, BenchHosts
from fompi.tuning.rounds import relative_error
from gloo import Gloo
from links import rendezvous, ring
from messages import Requests

MAKERS = {
    "blocking": lambda operation, comm, x, w, held: blocking(operation, comm, x, w),
    "pairwise": plain_mpi.pairwise,
    **{f"pairwise {s}": partial(plain_mpi.pairwise, slices=s) for s in (2, 4)},
    "pairwise 4, window 1": partial(plain_mpi.pairwise, slices=4, window=1),
    **{f"library {s}": partial(plain_mpi.library_slices, slices=s) for s in (1, 2, 4)},
    "library 4, window 1": partial(plain_mpi.library_slices, slices=4, window=1),
}


def case(operation, size):
    return FusedCase(operation, m=8 * size * size, n=5, k=7)


def operands_and_reference(operation, comm):
    """The operands of this rank, and its result as the benchmark computes it."""
    benchmark = case(operation, comm.size)
    return benchmark.operands(comm.rank, comm.size), benchmark.reference(comm.rank, comm.size)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_reference_is_the_result_of_fompi(world, operation):
    (x, w), reference = operands_and_reference(operation, world)
    y = getattr(fompi, operation)(x, w, comm=world)
    assert relative_error(y, reference) < 1e-6


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", MAKERS)
def test_rivals_are_right(comm, operation, name):
    """Each call uses the current content of x."""
    (x, w), reference = operands_and_reference(operation, comm)
    with ExitStack() as held:
        call = MAKERS[name](operation, comm, x, w, held)
        for factor in (1.0, 2.0, -3.0):
            x *= factor
            reference *= factor
            assert relative_error(call(), reference) < 1e-6


@pytest.mark.parametrize("operation", OPERATIONS)
def test_rivals_refuse_rows_that_do_not_divide(comm, operation):
    x, w = np.ones((3, 2), np.float32), np.ones((2, 2), np.float32)
    with pytest.raises(LayoutError, match=f"{operation}: 3 rows do not divide by"), ExitStack() as held:
        plain_mpi.pairwise(operation, comm, x, w, held, 2 * comm.size)


def test_a_rival_s_helper_polls_only_for_messages(comm):
    """The helper of fompi does the same, because each poll takes the core from the kernel."""
    messages = Requests(comm, 2)
    sent, into, sums = np.ones(3), np.zeros(3), []
    with messages.kernel():
        sleep(0.05)
    assert messages.polls == 0
    messages.receive(into, (comm.rank - 1) % comm.size, 0, lambda: sums.append(into.sum()))
    messages.send(sent, (comm.rank + 1) % comm.size, 0)
    comm.Barrier()
    with messages.kernel():
        end = perf_counter() + 10
        while not sums and perf_counter() < end:
            sleep(1e-3)
    assert sums == [3.0]
    messages.finish()
    messages.close()


def test_gloo_is_right(comm, monkeypatch):
    """The blocking form, and the form in slices."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with BenchHosts(comm) as cluster:
        gloo = Gloo(comm, rendezvous(cluster))
        for operation in OPERATIONS:
            (x, w), reference = operands_and_reference(operation, comm)
            for make in (gloo.blocking, partial(gloo.slices, 2), partial(gloo.slices, 4)):
                call = make(operation, x, w)
                for _ in range(2):
                    assert relative_error(call(), reference) < 1e-6
        gloo.close()


def test_a_peer_that_one_rank_cannot_start_is_skipped_on_all(comm):
    def start():
        if comm.rank == comm.size - 1:
            raise RuntimeError("no such interface\nand more")

    assert peers.failure(comm, start) == "RuntimeError: no such interface"
    assert peers.failure(comm, lambda: None) == ""


def test_a_cluster_of_one_host(comm):
    with BenchHosts(comm) as cluster:
        assert cluster.shared and cluster.idle == 0 and "shared memory: no link" in str(cluster)
        address = rendezvous(cluster)
        assert comm.allgather(address) == [address] * comm.size
        with ring(cluster) as streams:
            assert streams.exchange(1) > 0


@pytest.mark.parametrize("operation", collectives.OPERATIONS)
def test_collectives_are_compared_with_those_of_the_library(world, operation):
    """One small row of the suite. Every candidate has the same bits as the reference."""
    with BenchHosts(world.link.comm) as cluster:
        bench = Bench(world, cluster, 2)
        row = collectives.measured(bench, operation, 4 * collectives.COLUMNS * 16 * world.size)
    assert row.base == "library" and set(row.errors.values()) == {0.0} and row.errors.keys() == row.samples.keys()
    left_out = "ring" if operation == "all_to_all" else "pairwise"
    candidates = {name for name, how in collectives.CANDIDATES.items() if how["schedule"] != left_out}
    assert len(candidates) >= 7
    assert row.samples.keys() == {"library", DEFAULT} | candidates
    (figure,) = row.figures
    assert figure.reached is None and figure.name.startswith("library / fompi")
