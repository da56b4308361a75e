"""Different counts at every call need no new verification of the plan, and leave no memory behind."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

import fompi
from fompi import verify
from fompi.ops import pending as module

pytestmark = pytest.mark.ranks(mpich=[1, 2, 3], openmpi=[2])

CALLS = {1: 1000, 2: 1000}
"""Calls by number of ranks. With more ranks 300 calls are enough to see a leak."""


@pytest.fixture
def verified(monkeypatch):
    """The plans that were verified since the test began, as a list."""
    plans = []

    def recording(plan):
        plans.append(plan)
        verify(plan)

    monkeypatch.setattr(module, "verify", recording)
    return plans


class Footprint:
    """What this process holds now: Python's memory blocks, resident memory, requests, and bytes of the arena."""

    def __init__(self, world):
        world.link.comm.Barrier()
        world.tickets.clear()  # one for each set of rows, a bounded number of them
        end = perf_counter() + 1
        while world.engine._requests and perf_counter() < end:
            world.engine.progress()  # the last handshakes of this rank may still be in flight
        for _ in range(3):
            gc.collect()
        self.blocks = sys.getallocatedblocks()
        resident = Path("/proc/self/statm").read_text().split()[1]
        self.mebibytes = int(resident) * 4096 / 2**20
        self.requests = len(world.engine._requests)
        self.lent = world.engine.arena.lent_nbytes
        self.plans = len(world.plans)

    def assert_not_larger_than(self, before):
        assert self.blocks - before.blocks < 300
        assert self.mebibytes - before.mebibytes < 4
        assert self.requests <= before.requests and self.plans == before.plans
        assert self.lent <= before.lent


def run(world, one_call, calls, limit=6):
    """Call `one_call(counts)` with random counts for every pair of ranks. Calls before that warm up.

    What is kept for each set of rows, a bounded number of them, grows slower with each call.
    """
    draw, warm_up = np.random.default_rng(7), max(60, calls // 4)
    for call in range(warm_up + calls):
        if call == warm_up:
            before = Footprint(world)
        one_call(draw.integers(0, limit, (world.size, world.size)))
    world.engine.progress()
    Footprint(world).assert_not_larger_than(before)


@pytest.mark.timeout(120)
def test_all_to_all(world, verified):
    rank, size = world.rank, world.size

    def one_call(counts):
        mine = counts[rank].tolist()
        x = np.repeat(100.0 * rank + np.arange(size), mine)
        y = fompi.all_to_all(x, counts=mine, comm=world)
        np.testing.assert_array_equal(y, np.repeat(100.0 * np.arange(size) + rank, counts[:, rank]))

    fompi.all_to_all(np.ones(size), comm=world)
    verified.clear()
    run(world, one_call, CALLS.get(size, 300))
    assert not verified


@pytest.mark.timeout(120)
def test_bound_all_gather(world, verified):
    rank, size = world.rank, world.size
    plan = fompi.plan(fompi.all_gather, fompi.Spec((5 * size, 2), "float64", fompi.Shard(0)), ranks=size)
    x = np.full((5, 2), float(rank))
    with fompi.bind(plan, comm=world, x=x) as step:

        def one_call(counts):
            np.testing.assert_array_equal(step(counts=counts[0].tolist())[:, 0], np.repeat(np.arange(size), counts[0]))

        run(world, one_call, CALLS.get(size, 300))
    assert not verified


def test_every_operation_keeps_memory_constant(world, verified):
    """Gathers with different rows on every rank, sums with different counts, fused operations, and slices."""
    rank, size = world.rank, world.size
    w = np.eye(2)

    def one_call(counts):
        rows, total = counts[0], counts[0].sum()
        x = np.full((rows[rank], 2), float(rank))
        y = fompi.all_gather_matmul(x, w, comm=world, schedule="ring", slices=2)
        np.testing.assert_array_equal(y[:, 1], np.repeat(np.arange(size), rows))
        z = fompi.matmul_reduce_scatter(np.ones((total, 2)), w, counts=rows.tolist(), comm=world)
        np.testing.assert_array_equal(z, np.full((rows[rank], 2), float(size)))
        assert (fompi.all_reduce(np.ones(total), comm=world, schedule="unfused") == size).all()

    rows = np.ones((size, size), int)
    one_call(rows)
    verified.clear()
    run(world, one_call, 400 if size < 3 else 60)
    assert not verified


def test_errors_keep_memory_constant(world):
    """Calls that end with an error leave no memory and no request behind."""

    def one_call(_):
        with pytest.raises(fompi.PlanError):
            fompi.all_reduce(np.ones(2), schedule="fastest", comm=world)
        if world.size > 1:
            with pytest.raises(fompi.MismatchError):
                fompi.all_reduce(np.ones(2 + (world.rank == 0)), comm=world)

    run(world, one_call, 200 if world.size < 4 else 50)
