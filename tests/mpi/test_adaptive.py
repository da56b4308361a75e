"""Operations bound to an explanation: they change their plan, and warn if times drift. No measured time is checked."""

from __future__ import annotations

import re
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
from fompi.tuning import adaptive, calibrate

pytestmark = [
    pytest.mark.ranks(mpich=[2], openmpi=[]),
    pytest.mark.skipif(MPI.COMM_WORLD.size > 4, reason="eight ranks on two cores would be slow and test nothing new"),
    pytest.mark.usefixtures("few_rounds"),
]


@pytest.mark.parametrize("options", [{}, {"effort": "measure"}, {"adapt": True}, {"adapt": True, "same_bits": True}])
def test_bind_an_explanation(own, cache, options):
    explanation, x, w, y = scatter(own)
    step = fompi.bind(explanation, comm=own, x=x, w=w, **options)
    for _ in range(20):
        assert (step() == y).all()
    step.start()
    assert (step.wait() == y).all() and step.trace.events and step.plan.problem == explanation.problem
    step.close()


def test_bind_refuses(own):
    explanation, x, w, _ = scatter(own)
    with pytest.raises(fompi.PlanError, match=r"fompi\.explain"):
        fompi.bind(explanation.plan, comm=own, x=x, w=w, adapt=True)
    with pytest.raises(fompi.PlanError, match="set both, or neither"):
        fompi.bind(explanation, comm=own, x=x, w=w, same_bits=True)
    with pytest.raises(fompi.PlanError, match=r"not a Judged$"):
        fompi.bind(explanation.winner, comm=own, x=x, w=w)
    with pytest.raises(fompi.FompiError, match="effort"):
        fompi.bind(explanation, comm=own, x=x, w=w, effort="lots" if own.rank == 0 else "plan")
    more = replace(explanation, problem=replace(explanation.problem, size=own.size + 1))
    with pytest.raises(fompi.PlanError, match="ranks"):
        fompi.bind(more, comm=own, x=x, w=w)


def test_the_plan_changes_if_calls_take_longer(own, cache, monkeypatch):
    """The links are measured again. Results stay right, and `changes` lists the change."""
    explanation, x, w, y = scatter(own)
    if own.size == 1:
        return
    winner, others = explanation.winner, explanation.judged[1:]
    other = next(judged for judged in others if judged.proof is not None)
    rest = (judged for judged in explanation.judged if judged is not other)
    changed = replace(explanation, judged=(other, *rest))
    monkeypatch.setattr(calibrate, "refit", lambda machine, comm, computes: machine)
    monkeypatch.setattr(adaptive, "explain", lambda *args, **options: changed)
    monkeypatch.setattr(adaptive, "differ", lambda *times: True)  # times always differ
    monkeypatch.setattr(adaptive, "REFIT_SHARE", 1e9)
    with fompi.bind(explanation, comm=own, x=x, w=w, adapt=True) as step:
        for _ in range(adaptive.CHECK_CALLS):
            assert (step() == y).all()
        assert [change.call for change in step.changes] == [1]
        assert (step() == y).all()
        assert [change.call for change in step.changes] == [1, adaptive.CHECK_CALLS + 1]
        assert step.changes[-1].candidate == other.candidate and step.plan.schedule == other.candidate.schedule
        assert f"from call {adaptive.CHECK_CALLS + 1}: {other.candidate} (calls took " in step.trace.title
        for _ in range(2 * adaptive.CHECK_CALLS):
            assert (step() == y).all()
        reasons = [change.why.partition(" ms instead of ")[2] for change in step.changes[1:]]
        predicted = [f"the predicted {1e3 * judged.seconds:.3g} ms" for judged in (winner, other)]
        assert reasons[:2] == [predicted[0], f"{predicted[1]}; it is still the best"]
        assert reasons[2].startswith("the usual ") and reasons[2].endswith(" ms; it is still the best")


def test_same_bits_keeps_the_order_of_sums(own, cache, monkeypatch):
    explanation, x, w, y = scatter(own)
    if own.size == 1:
        return
    monkeypatch.setattr(adaptive, "differ", lambda *times: True)
    monkeypatch.setattr(calibrate, "refit", lambda machine, *_: replace(machine, bandwidth=1e3, latency=0.1))
    monkeypatch.setattr(adaptive, "REFIT_SHARE", 1e9)
    with fompi.bind(explanation, comm=own, x=x, w=w, adapt=True, same_bits=True) as step:
        for _ in range(2 * adaptive.CHECK_CALLS):
            assert (step() == y).all()
        first = step.changes[0].candidate
        assert all(adaptive.sums_alike(explanation.problem, change.candidate, first) for change in step.changes)


def test_same_bits_keeps_the_plan_if_no_candidate_sums_alike(own, cache, monkeypatch):
    """The best candidate now sums in another order, and the current plan is not a candidate any more."""
    explanation, x, w, y = scatter(own)
    if own.size == 1:
        return
    monkeypatch.setattr(adaptive, "differ", lambda *times: True)
    monkeypatch.setattr(calibrate, "refit", lambda machine, *_: machine)
    monkeypatch.setattr(adaptive, "sums_alike", lambda *_: False)
    with fompi.bind(explanation, comm=own, x=x, w=w, adapt=True, same_bits=True) as step:
        for _ in range(2 * adaptive.CHECK_CALLS):
            assert (step() == y).all()
        assert {change.candidate for change in step.changes} == {explanation.winner.candidate}


def test_only_calls_with_all_rows_are_compared(own, cache, monkeypatch):
    """Calls with other counts say nothing about the links."""
    counts = (4,) * own.size
    x = Spec((4 * own.size, 3), "float64", Shard(0))
    explanation = fompi.explain(fompi.all_gather, x, ranks=own.size, machine="gigabit")
    with fompi.bind(explanation, comm=own, x=np.ones((4, 3)), adapt=True) as step:
        for fewer in range(3):
            step(counts=[n - fewer for n in counts])
        assert len(step._recent) == 1
        step()
        assert len(step._recent) == 2


def test_measuring_links_again_takes_no_more_than_its_share(own, cache, monkeypatch):
    """Times differ at every comparison. After a measurement the next one waits, some times as long as it took."""
    explanation, x, w, y = scatter(own)
    refits = []
    monkeypatch.setattr(adaptive, "differ", lambda *times: True)
    monkeypatch.setattr(calibrate, "refit", lambda machine, *_: refits.append(sleep(0.1)) or machine)
    for share, most in ((1e9, 5), (1e-3, 1)):
        monkeypatch.setattr(adaptive, "REFIT_SHARE", share)
        refits.clear()
        with fompi.bind(explanation, comm=own, x=x, w=w, adapt=True) as step:
            for _ in range(5 * adaptive.CHECK_CALLS + 1):
                assert (step() == y).all()
        assert len(refits) == most


def test_operations_that_adapt_are_called_in_one_order(own, cache):
    """Times of different operations cannot be compared, so all ranks raise an error."""
    explanation, x, w, _ = scatter(own)
    if own.size == 1:
        return
    a, b = (fompi.bind(explanation, comm=own, x=x, w=w, adapt=True) for _ in range(2))
    for _ in range(adaptive.CHECK_CALLS):
        a(), b()
    first, second = (b, a) if own.rank == 0 else (a, b)
    with pytest.raises(fompi.MismatchError, match="a comparison of times"):
        first.start()
    with pytest.raises(fompi.MismatchError, match="a comparison of times"):
        second.start()


def test_refit_detects_slower_cores(own, monkeypatch):
    """Kernels take three times as long as on the machine. The links have not changed."""
    calibrate = import_module("fompi.tuning.calibrate")
    explanation, *_ = scatter(own)
    monkeypatch.setattr(calibrate, "slowdown", lambda machine, comm: 3.0)
    machine = replace(explanation.machine, name="fast")
    assert calibrate.refit(machine, own, True).flops_rate == pytest.approx(machine.flops_rate / 3)
    assert calibrate.refit(machine, own, False).flops_rate == machine.flops_rate


def test_one_warning_of_drift(own, machine, monkeypatch):
    """Rank 0 warns once. There is no warning with kernels of the user, because their time is not predicted."""
    monkeypatch.setattr(drift, "LEAST_SECONDS", 0.0)
    rates = dict.fromkeys(("bandwidth", "flops_rate", "memory_rate", "pack_rate"), 1e300)
    explanation, x, w, y = scatter(own, machine=replace(machine, latency=0.0, overhead=0.0, **rates))
    with fompi.bind(explanation, comm=own, x=x, w=w) as step, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3 * drift.WARN_CALLS):
            assert (step() == y).all()
    drifts = [warning for warning in caught if issubclass(warning.category, fompi.DriftWarning)]
    assert len(drifts) == (own.rank == 0)
    fresh = fompi.Communicator(own.link.comm, name="with a machine")
    fresh.machine = explanation.machine
    plan = explanation.plan_of(Candidate("unfused_p2p"))
    for kernels in (None, {"matmul": lambda reads, writes: np.matmul(*reads, out=writes[0])}):
        with (
            fompi.bind(plan, comm=fresh, x=x, w=w, kernels=kernels) as step,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            for _ in range(3 * drift.WARN_CALLS):
                step()
        drifts = [str(warning.message) for warning in caught if issubclass(warning.category, fompi.DriftWarning)]
        assert len(drifts) == (own.rank == 0 and kernels is None)
        assert all(f"predicted on {fresh.machine.name}. Calibrate again" in text for text in drifts)
    fresh.close()


def test_an_all_reduce_by_rate(own):
    """The slow rank sums fewer rows than the others. The result is the same."""
    if own.size < 3:
        return
    slow = replace(Machine.load("gigabit"), rates=(0.25,))
    x = Spec((1000, 3), "float64", Partial())
    explanation = fompi.explain(fompi.all_reduce, x, ranks=own.size, machine=slow)
    by_rate = [judged.candidate for judged in explanation.judged if judged.candidate.rows is not None]
    assert by_rate and all(candidate.rows[0] < min(candidate.rows[1:]) for candidate in by_rate)
    term = whole((1000, 3), own.rank)
    total = sum(whole((1000, 3), r) for r in range(own.size))
    for candidate in by_rate:
        fompi.verify(explanation.plan_of(candidate))
        with fompi.bind(explanation.plan_of(candidate), comm=own, x=term) as step:
            assert (step() == total).all()


def test_a_refused_call_does_not_count(own):
    """One rank refuses a start. All ranks still compare their times before the same call."""
    explanation, x, w, y = scatter(own)
    with fompi.bind(explanation, comm=own, x=x, w=w, adapt=True) as step:
        for _ in range(2 * adaptive.CHECK_CALLS + 1):
            step.start()
            if own.rank == 0:
                with pytest.raises((fompi.StateError, fompi.FompiError)):
                    step.start()
                    step.start()  # a small call may be finished already
            assert (step.wait() == y).all()
            if own.rank == 0:
                with pytest.raises(fompi.PlanError, match="no input"):
                    step.start("nothing")


def test_something_that_is_not_a_backend_is_an_error_on_all_ranks(own):
    explanation, x, w, _ = scatter(own)
    with pytest.raises(fompi.FompiError, match="is not a backend of fompi.backends" if own.rank == 0 else ""):
        fompi.bind(explanation, comm=own, x=x, w=w, backend="fast" if own.rank == 0 else None)


def test_ranks_that_wait_in_different_ways(own, monkeypatch):
    """One rank calls only progress(), never wait(). All ranks still compare their times before the same call."""
    explanation, x, w, y = scatter(own)
    compared, agree = [], adaptive.agree

    def noted(comm, words, *more, **options):
        compared.append(words)
        return agree(comm, words, *more, **options)

    monkeypatch.setattr(adaptive, "agree", noted)
    with fompi.bind(explanation, comm=own, x=x, w=w, adapt=True) as step:
        for _ in range(3 * adaptive.CHECK_CALLS):
            if own.rank == 0:
                step.start()
                while not step.progress():
                    pass
            else:
                assert (step() == y).all()
    numbers = [int(re.search(r"before call (\d+) of", words)[1]) for words in compared if "comparison" in words]
    assert numbers == [adaptive.CHECK_CALLS + 1, 2 * adaptive.CHECK_CALLS + 1]


def test_something_that_is_not_a_plan_is_an_error_on_all_ranks(own):
    explanation, x, w, _ = scatter(own)
    with pytest.raises(fompi.FompiError, match=r"takes a fompi\.Plan"):
        fompi.bind("plan" if own.rank == 0 else explanation.plan, comm=own, x=x, w=w)
