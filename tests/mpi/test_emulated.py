"""Every operation on an emulated accelerator: messages are real; kernels are enqueued, and compute only corners."""

from __future__ import annotations

from itertools import pairwise

import calls
import numpy as np
import pytest

import emulated
import fompi
from emulated import Emulated, corner
from fompi import Machine, Shard, Spec
from fompi.plans.kernels import KERNELS

pytestmark = pytest.mark.ranks(mpich=[2], openmpi=[])

SLOW = Machine("kernels of a tenth of a millisecond", 0.0, 1e9, 1e15, 1e15, 1e-4)
WHOLE = ("w", "v", "bias", "g")
"""Buffers that kernels read or write as a whole, not in chunks of rows."""


def cornered(arrays):
    """The corners of the operands or results of one rank."""
    return {name: corner(a, whole=name.rstrip("0123456789") in WHOLE) for name, a in arrays.items()}


@pytest.mark.parametrize("name", calls.NAMES)
def test_corners_of_results(world, name, monkeypatch):
    monkeypatch.setattr(emulated, "CORNER", 2)  # the operands of the catalogue have three or four columns
    calls.check_bound(world, name, select=cornered, backend=Emulated(SLOW))


@pytest.mark.parametrize("schedule", ["unfused", "unfused_p2p", "sliced_p2p", "direct", "ring", "bidirectional"])
def test_the_trace_shows_the_device(world, schedule):
    """Kernels of a stream do not overlap. Each takes as long as the machine says."""
    n = world.size
    x, w = Spec((8 * n, 4 * n), "float32", Shard(1)), Spec((4 * n, 4), "float32", Shard(0))
    plan = fompi.plan(fompi.matmul_reduce_scatter, x, w, ranks=n, schedule=schedule, slices=2)
    tensors = {"x": np.ones((8 * n, 4), np.float32), "w": np.ones((4, 4), np.float32)}
    machine = Machine("a millisecond and more", 0.0, 1e9, 1e15, 1e15, 1e-3)
    with fompi.bind(plan, comm=world, backend=Emulated(machine), **tensors) as step:
        for _ in range(2):
            np.testing.assert_array_equal(step(), np.full((8, 4), 4.0 * n))
        kernels = sorted((e for e in step.trace.events if e.is_compute), key=lambda e: e.start)
        assert {e.name.partition("(")[0] for e in kernels} <= KERNELS.keys()
        assert all(e.end - e.start == pytest.approx(1e-3, abs=1e-6) for e in kernels)
        for lane in {e.lane for e in kernels}:
            assert all(a.end <= b.start + 1e-9 for a, b in pairwise(e for e in kernels if e.lane == lane))
        assert "on an emulated accelerator" in step.trace.title


def test_a_kernel_that_cannot_be_enqueued(world):
    """It fails on one rank. That rank gets the error, the others a PeerError, and the next call works."""
    n, last = world.size, world.rank == world.size - 1

    class Failing(Emulated):
        failing = False

        def bind(self, kernel, *operands):
            enqueue = super().bind(kernel, *operands)

            def enqueue_or_fail(after):
                if self.failing and kernel == "matmul":
                    raise ValueError("no memory on the device")
                return enqueue(after)

            return enqueue_or_fail

    x, w = Spec((8 * n, 4 * n), "float32", Shard(1)), Spec((4 * n, 4), "float32", Shard(0))
    for schedule in ("direct", "ring", "unfused"):
        plan = fompi.plan(fompi.matmul_all_reduce, x, w, ranks=n, schedule=schedule)
        tensors = {"x": np.ones((8 * n, 4), np.float32), "w": np.ones((4, 4), np.float32)}
        backend = Failing(SLOW)
        with fompi.bind(plan, comm=world, backend=backend, **tensors) as step:
            for call in range(6):
                backend.failing = last and call % 2 == 1
                if call % 2 == 0:
                    np.testing.assert_array_equal(step(), np.full((8 * n, 4), 4.0 * n))
                    continue
                with pytest.raises(ValueError if last else fompi.PeerError, match="no memory on the device"):
                    step()


def test_unbound_calls_on_the_backend_of_a_communicator(world):
    """A call runs where its communicator says at that moment, whatever ran the same call before."""
    x, w = np.full((3, 6), world.rank + 1.0), np.arange(30.0).reshape(6, 5)
    numbers = np.repeat(np.arange(world.size) + 1.0, 3)[:, None]  # of the rank of each row
    with world.split(0, world.rank, "own") as comm:
        for backend in (Emulated(SLOW), None, Emulated(SLOW)):
            comm.backend = backend
            y = fompi.all_gather_matmul(x, w, comm=comm, schedule="direct")
            if backend is None:
                np.testing.assert_array_equal(y, numbers * w.sum(0))
            else:
                np.testing.assert_array_equal(corner(y), numbers * corner(w, whole=True).sum(0))
                assert backend.busy > 0
