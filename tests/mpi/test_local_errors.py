"""An error on one rank after all ranks have agreed: all of them raise a typed error, and the next call works."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import fompi
from fompi.backends.numpy import Numpy
from fompi.ops import operation, pending
from fompi.ops.pending import Pending
from fompi.runtime.compiled import Compiled
from fompi.tensors import dlpack

pytestmark = pytest.mark.ranks(mpich=[1, 2], openmpi=[3])


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def next_call_works(comm):
    """Several calls, because a message that was left behind may meet a later call."""
    for schedule in ("auto", "ring", "direct", "unfused"):
        y = fompi.all_gather(np.full((2, 3), float(comm.rank)), comm=comm, schedule=schedule)
        assert np.array_equal(y[::2, 0], np.arange(comm.size))
    assert fompi.all_reduce(np.ones(3), comm=comm).tolist() == [comm.size] * 3


def failing_once(function, errors):
    """`function`, which raises the one error of `errors`, once. What the rank does to end the call then works."""

    def call(*args, **options):
        if errors:
            raise errors.pop()
        return function(*args, **options)

    return call


def failing_kernels(bind, errors):
    """`bind` of a backend, which binds kernels of which one raises the error."""

    def bound(*args, **options):
        bind(*args, **options)
        return failing_once(lambda: None, errors)

    return bound


STAGES = {
    "arguments": (operation, "localise"),
    "plan": (pending, "program_of"),
    "memory": (Pending, "memory"),
    "addresses": (Compiled, "resolve"),
    "kernel": (Numpy, "bind"),
    "lending": (dlpack, "lend"),
}
CALLS = {
    "all_gather": lambda c, how: fompi.all_gather(np.ones((3, 2)), comm=c, **how),
    "all_reduce": lambda c, how: fompi.all_reduce(np.ones(30000), comm=c, **how),
    "broadcast": lambda c, how: fompi.broadcast(np.ones(30000), comm=c, **how),
    "all_gather_matmul": lambda c, how: fompi.all_gather_matmul(np.ones((3, 2)), np.ones((2, 4)), comm=c, **how),
    "matmul_reduce_scatter": lambda c, how: fompi.matmul_reduce_scatter(
        np.ones((7, 2)), np.ones((2, 4)), comm=c, **how
    ),
    "all_to_all": lambda c, how: fompi.all_to_all(np.ones((6, 2)), comm=c, **how),
}


@pytest.mark.parametrize(
    ("schedule", "kind_of_error"), [("auto", Unspeakable), ("ring", MemoryError), ("unfused", MemoryError)]
)
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_fails_on_one_rank(world, monkeypatch, stage, schedule, kind_of_error):
    owner, name = STAGES[stage]
    for (kind, call), culprit in itertools.product(CALLS.items(), {0, world.size - 1}):
        how = {} if schedule == "ring" and kind == "all_to_all" else {"schedule": schedule}
        call(world, how)  # makes the plan, so that "plan" fails before the agreement
        world.tickets.clear()  # in C there are no such stages
        errors, caught = [kind_of_error("planted")], None
        with monkeypatch.context() as patch:
            if world.rank == culprit:
                failing = failing_kernels if stage == "kernel" else failing_once
                patch.setattr(owner, name, failing(getattr(owner, name), errors))
            try:
                call(world, how)
            except Exception as error:
                caught = error
        if world.rank == culprit:
            assert isinstance(caught, kind_of_error) or (errors and stage == "kernel"), (
                kind,
                caught,
            )  # it had no kernel
        elif stage in ("lending", "kernel") or (kind == "broadcast" and culprit):  # perhaps nobody needs what failed
            assert caught is None or isinstance(caught, fompi.PeerError | fompi.MismatchError), (kind, stage, caught)
        else:
            assert isinstance(caught, fompi.PeerError | fompi.MismatchError), (kind, stage, caught)
            assert f"rank {culprit}" in str(caught)
        next_call_works(world)
