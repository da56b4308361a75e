"""Labels and counts of bound calls: calls that differ between the ranks never exchange data."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import pytest

import fompi
from fompi import Partial, Shard, Spec

pytestmark = pytest.mark.ranks(mpich=[1, 2], openmpi=[3])


@pytest.fixture
def own(comm):
    """A communicator for one test, because a mismatch of bound calls ends its communicator."""
    with fompi.Communicator(comm, "own") as made:
        yield made


def bound(comm, schedule="ring", rows=4):
    x = np.zeros((rows, 3))
    spec = Spec((rows * comm.size, 3), "float64", Shard(0))
    plan = fompi.plan(fompi.all_gather, spec, ranks=comm.size, schedule=schedule)
    return fompi.bind(plan, comm=comm, x=x), x


@pytest.mark.parametrize("schedule", ["ring", "direct", "unfused"])
def test_equal_labels_and_counts(own, schedule):
    step, x = bound(own, schedule)
    labels = (None, 0, 1, np.int64(2), "the last", 3, 3)
    for number, label in enumerate(labels):
        counts = None if number % 2 else [(number + rank) % 5 for rank in range(own.size)]
        x[...] = 10 * number + own.rank
        y = step(counts, label=label)
        rows = [4] * own.size if counts is None else counts
        assert y[:, 0].tolist() == [10 * number + rank for rank in range(own.size) for _ in range(rows[rank])]


def mismatch(step, comm, *words, **options):
    """The call raises a MismatchError on all ranks, long before FOMPI_TIMEOUT."""
    begun = perf_counter()
    with pytest.raises(fompi.MismatchError) as caught:
        step(**options)
    assert perf_counter() - begun < 10
    for word in ("the ranks disagree in call", *words):
        assert word in str(caught.value)
    with pytest.raises(fompi.StateError, match="cannot be used any more"):
        step()


@pytest.mark.parametrize("schedule", ["ring", "direct", "unfused"])
def test_a_rank_skips_a_call(own, schedule):
    """Without labels it would get the data of another step."""
    step, _ = bound(own, schedule)
    step(label=0)
    if own.size > 1:
        mismatch(step, own, "label=1", "label=2", label=2 if own.rank == own.size - 1 else 1)


@pytest.mark.parametrize("schedule", ["ring", "unfused"])
def test_only_one_rank_has_a_label(own, schedule):
    step, _ = bound(own, schedule)
    if own.size > 1:
        mismatch(step, own, "neither label nor counts", "label='b'", label="b" if own.rank == 0 else None)


@pytest.mark.parametrize("schedule", ["ring", "direct", "unfused"])
@pytest.mark.parametrize("others", [[4, 1, 2, 3, 4, 3, 2, 1], None])
def test_counts_differ(own, schedule, others):
    step, _ = bound(own, schedule)
    if own.size > 1:
        mine = [2, 1, 2, 3, 4, 3, 2, 1][: own.size]
        counts = mine if own.rank else others and others[: own.size]
        mismatch(step, own, "counts", counts=counts)


def test_a_rank_that_needs_no_message_has_other_counts(own):
    """Rank 0 expects no row, so its call ends. It learns of the mismatch at its next call."""
    step, _ = bound(own)
    if own.size > 1 and own.rank:
        mismatch(step, own, "counts", counts=[1] * own.size)
    elif own.size > 1:
        assert len(step(counts=[0] * own.size)) == 0
        with pytest.raises((fompi.MismatchError, fompi.StateError)):
            step(counts=[1] * own.size)


def test_sums_with_labels(own):
    spec = Spec((1000,), "float64", Partial())
    steps = [
        fompi.bind(fompi.plan("all_reduce", spec, ranks=own.size, schedule=schedule), comm=own, x=np.ones(1000))
        for schedule in ("ring", "exchange", "unfused")
    ]
    for number in range(20):
        for step in steps if own.rank % 2 else steps[::-1]:
            step.start(label=number)
        for step in steps:
            assert (step.wait() == own.size).all()
