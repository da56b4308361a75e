"""Operations bound to an explanation: they go over to another plan, and say when times drift. No figure is judged."""

from __future__ import annotations

import warnings
from dataclasses import replace
from importlib import import_module
from time import sleep

import numpy as np
import pytest
from explained import scatter, whole
from mpi4py import MPI

import fompi
from fompi import Partial, Shard, Spec
from fompi.model.machine import Machine
from fompi.planner.candidates import Candidate
from fompi.traces import drift
from fompi.tuning import adaptive

pytestmark = [
    pytest.mark.skipif(MPI.COMM_WORLD.size > 4, reason="eight ranks on two cores say nothing new, slowly"),
    pytest.mark.usefixtures("few_rounds"),
]


@pytest.mark.parametrize("how", [{}, {"effort": "measure"}, {"adapt": True}, {"adapt": True, "same_bits": True}])
def test_bind_an_explanation(own, cache, how):
    explained, x, w, y = scatter(own)
    step = fompi.bind(explained, comm=own, x=x, w=w, **how)
    for _ in range(20):
        assert (step() == y).all()
    step.start()
    assert (step.wait() == y).all() and step.trace.events and step.plan.problem == explained.problem
    step.close()


def test_bind_refuses(own):
    explained, x, w, _ = scatter(own)
    with pytest.raises(fompi.PlanError, match=r"fompi\.explain"):
        fompi.bind(explained.plan, comm=own, x=x, w=w, adapt=True)
    with pytest.raises(fompi.PlanError, match="give both"):
        fompi.bind(explained, comm=own, x=x, w=w, same_bits=True)
    with pytest.raises(fompi.PlanError, match=r"not a Judged$"):
        fompi.bind(explained.winner, comm=own, x=x, w=w)
    with pytest.raises(fompi.FompiError, match="effort"):
        fompi.bind(explained, comm=own, x=x, w=w, effort="lots" if own.rank == 0 else "plan")
    more = replace(explained, problem=replace(explained.problem, size=own.size + 1))
    with pytest.raises(fompi.PlanError, match="ranks"):
        fompi.bind(more, comm=own, x=x, w=w)


def test_it_goes_over_to_another_plan(own, cache, monkeypatch):
    """When calls take longer the links are measured again; results stay right, and the change is told."""
    explained, x, w, y = scatter(own)
    if own.size == 1:
        return
    other = next(one for one in explained.judged if one.proof is not None and one != explained.winner)
    found = replace(explained, judged=(other, *(one for one in explained.judged if one is not other)))
    monkeypatch.setattr(adaptive, "refit", lambda machine, comm, computes: machine)
    monkeypatch.setattr(adaptive, "explain", lambda *given, **more: found)
    monkeypatch.setattr(adaptive, "differ", lambda *times: True)  # whatever they take
    monkeypatch.setattr(adaptive, "LOOK_SHARE", 1e9)
    with fompi.bind(explained, comm=own, x=x, w=w, adapt=True) as step:
        for _ in range(adaptive.CHECK_CALLS):
            assert (step() == y).all()
        assert [change.call for change in step.changes] == [1]
        assert (step() == y).all()
        assert [change.call for change in step.changes] == [1, adaptive.CHECK_CALLS + 1]
        assert step.changes[-1].candidate == other.candidate and step.plan.schedule == other.candidate.schedule
        assert f"from call {adaptive.CHECK_CALLS + 1} on {other.candidate}" in step.trace.title
        for _ in range(2 * adaptive.CHECK_CALLS):
            assert (step() == y).all()
        words = [change.why.partition(" ms, ")[2] for change in step.changes[1:]]
        predicted = [f"{1e3 * one.seconds:.3g} were predicted" for one in (explained.winner, other)]
        assert words[:2] == [predicted[0], f"{predicted[1]}; it stays the best"]
        assert words[2].endswith(" were usual; it stays the best")


def test_same_bits_keep_the_schedule(own, cache, monkeypatch):
    explained, x, w, y = scatter(own)
    if own.size == 1:
        return
    monkeypatch.setattr(adaptive, "differ", lambda *times: True)
    monkeypatch.setattr(adaptive, "refit", lambda machine, *_: replace(machine, bandwidth=1e3, latency=0.1))
    monkeypatch.setattr(adaptive, "LOOK_SHARE", 1e9)
    with fompi.bind(explained, comm=own, x=x, w=w, adapt=True, same_bits=True) as step:
        for _ in range(2 * adaptive.CHECK_CALLS):
            assert (step() == y).all()
        first = step.changes[0].candidate
        assert all(adaptive.sums_alike(explained.problem, change.candidate, first) for change in step.changes)


def test_same_bits_stay_where_nothing_is_alike(own, cache, monkeypatch):
    """What is best now sums in another order, and the plan at hand is no candidate any more: it stays."""
    explained, x, w, y = scatter(own)
    if own.size == 1:
        return
    monkeypatch.setattr(adaptive, "differ", lambda *times: True)
    monkeypatch.setattr(adaptive, "refit", lambda machine, *_: machine)
    monkeypatch.setattr(adaptive, "sums_alike", lambda *_: False)
    with fompi.bind(explained, comm=own, x=x, w=w, adapt=True, same_bits=True) as step:
        for _ in range(2 * adaptive.CHECK_CALLS):
            assert (step() == y).all()
        assert {change.candidate for change in step.changes} == {explained.winner.candidate}


def test_calls_with_other_rows_say_nothing_of_links(own, cache, monkeypatch):
    """Only calls with all rows of the plan are compared."""
    counts = (4,) * own.size
    x = Spec((4 * own.size, 3), "float64", Shard(0))
    explained = fompi.explain(fompi.all_gather, x, ranks=own.size, machine="gigabit")
    mine = np.ones((4, 3))
    with fompi.bind(explained, comm=own, x=mine, adapt=True) as step:
        for fewer in range(3):
            step(counts=[n - fewer for n in counts])
        assert len(step._recent) == 1
        step()
        assert len(step._recent) == 2


def test_looking_takes_no_more_than_its_share(own, cache, monkeypatch):
    """Times that differ at every look: after one, the next waits until calls have taken some times as long."""
    explained, x, w, y = scatter(own)
    looked = []
    monkeypatch.setattr(adaptive, "differ", lambda *times: True)
    monkeypatch.setattr(adaptive, "refit", lambda machine, *_: looked.append(sleep(0.1)) or machine)
    for share, most in ((1e9, 5), (1e-3, 1)):
        monkeypatch.setattr(adaptive, "LOOK_SHARE", share)
        looked.clear()
        with fompi.bind(explained, comm=own, x=x, w=w, adapt=True) as step:
            for _ in range(5 * adaptive.CHECK_CALLS + 1):
                assert (step() == y).all()
        assert len(looked) == most


def test_those_that_adapt_are_called_in_one_order(own, cache):
    """Times of one beside times of another would say nothing: an error on all ranks."""
    explained, x, w, _ = scatter(own)
    if own.size == 1:
        return
    a, b = (fompi.bind(explained, comm=own, x=x, w=w, adapt=True) for _ in range(2))
    for _ in range(adaptive.CHECK_CALLS):
        a(), b()
    first, second = (b, a) if own.rank == 0 else (a, b)
    with pytest.raises(fompi.MismatchError, match="the times of"):
        first.start()
    with pytest.raises(fompi.MismatchError, match="the times of"):
        second.start()


def test_slower_cores_are_seen(own, monkeypatch):
    """Kernels that take thrice as long as the machine says, beside links as they were."""
    calibrated = import_module("fompi.tuning.calibrate")
    explained, *_ = scatter(own)
    monkeypatch.setattr(calibrated, "slowdown", lambda machine, comm: 3.0)
    machine = replace(explained.machine, name="fast")
    assert calibrated.refit(machine, own, True).flops_rate == pytest.approx(machine.flops_rate / 3)
    assert calibrated.refit(machine, own, False).flops_rate == machine.flops_rate


def test_a_drift_is_said_once(own, machine, monkeypatch):
    monkeypatch.setattr(drift, "LEAST_SECONDS", 0.0)
    rates = dict.fromkeys(("bandwidth", "flops_rate", "memory_rate", "pack_rate"), 1e300)
    explained, x, w, y = scatter(own, machine=replace(machine, latency=0.0, overhead=0.0, **rates))
    with fompi.bind(explained, comm=own, x=x, w=w) as step, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3 * drift.WARN_CALLS):
            assert (step() == y).all()
    told = [one for one in caught if issubclass(one.category, fompi.DriftWarning)]
    assert len(told) == (own.rank == 0)
    fresh = fompi.Communicator(own.link.comm, name="with a machine")
    fresh.machine = explained.machine
    plan = explained.plan_of(Candidate("unfused_p2p"))
    for kernels in (None, {"matmul": lambda reads, writes: np.matmul(*reads, out=writes[0])}):
        with (
            fompi.bind(plan, comm=fresh, x=x, w=w, kernels=kernels) as step,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            for _ in range(3 * drift.WARN_CALLS):
                step()
        told = [str(one.message) for one in caught if issubclass(one.category, fompi.DriftWarning)]
        assert len(told) == (own.rank == 0 and kernels is None), "of kernels of the user nothing is predicted"
        assert all(f"predicted on {fresh.machine.name}: calibrate again" in words for words in told)
    fresh.close()


def test_an_all_reduce_by_rate(own):
    """The slow rank sums nothing, or less; the result is that of any other plan."""
    if own.size < 3:
        return
    slow = replace(Machine.load("gigabit"), rates=(0.25,))
    x = Spec((1000, 3), "float64", Partial())
    explained = fompi.explain(fompi.all_reduce, x, ranks=own.size, machine=slow)
    rated = [one.candidate for one in explained.judged if one.candidate.rows is not None]
    assert rated and all(one.rows[0] < min(one.rows[1:]) for one in rated)
    given = whole((1000, 3), own.rank)
    total = sum(whole((1000, 3), r) for r in range(own.size))
    for candidate in rated:
        fompi.verify(explained.plan_of(candidate))
        with fompi.bind(explained.plan_of(candidate), comm=own, x=given) as step:
            assert (step() == total).all()


def test_a_call_that_is_refused_does_not_count(own):
    """It begins nothing, on one rank alone: all come to the comparison of times before the same call."""
    explained, x, w, y = scatter(own)
    with fompi.bind(explained, comm=own, x=x, w=w, adapt=True) as step:
        for _ in range(2 * adaptive.CHECK_CALLS + 1):
            step.start()
            if own.rank == 0:
                with pytest.raises((fompi.StateError, fompi.FompiError)):
                    step.start()
                    step.start()  # a small one may be finished
            assert (step.wait() == y).all()
            if own.rank == 0:
                with pytest.raises(fompi.PlanError, match="no input"):
                    step.start("nothing")


def test_a_backend_that_is_none_is_an_error_on_all_ranks(own):
    explained, x, w, _ = scatter(own)
    with pytest.raises(fompi.FompiError, match="is none of fompi.backends" if own.rank == 0 else ""):
        fompi.bind(explained, comm=own, x=x, w=w, backend="fast" if own.rank == 0 else None)


def test_ranks_that_wait_in_different_ways(own):
    """Some ask progress() and never wait: all come to the comparison of times before the same call."""
    explained, x, w, _ = scatter(own)
    with fompi.bind(explained, comm=own, x=x, w=w, adapt=True) as step:
        for _ in range(3 * adaptive.CHECK_CALLS):
            if own.rank == 0:
                step.start()
                while not step.progress():
                    pass
            else:
                step()


def test_what_cannot_be_bound_is_an_error_on_all_ranks(own):
    explained, x, w, _ = scatter(own)
    with pytest.raises(fompi.FompiError, match=r"takes a fompi\.Plan"):
        fompi.bind("plan" if own.rank == 0 else explained.plan, comm=own, x=x, w=w)
