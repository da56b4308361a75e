"""The schedule, the rule and the fragments of outer steps, without MPI."""

from __future__ import annotations

import numpy as np
import pytest

from fompi.base.errors import LayoutError
from fompi.parallel.outer import OuterRule, OuterSchedule, dealt

SCHEDULES = [(h, p, tau) for h in range(1, 13) for p in range(1, h + 1) if h % p == 0 for tau in range(h // p)]


@pytest.mark.parametrize(("period", "fragments", "delay"), SCHEDULES)
def test_a_schedule_is_the_formula(period, fragments, delay):
    """Each fragment once in a period, and at most one on its way."""
    schedule, flying = OuterSchedule(period, fragments, delay), []
    for t in range(1, 4 * period + 1):
        wanted = [p for p in range(fragments) if (t - (p + 1) * period // fragments) % period == 0]
        begun, applied = schedule.begins(t), schedule.applies(t)
        assert [p for p in (begun,) if p is not None] == wanted
        flying += [(t, begun)] if begun is not None else []
        assert len(flying) <= 1
        if applied is None:
            assert not flying or t < flying[0][0] + delay
        else:
            assert flying.pop(0) == (t - delay, applied)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((0,), "sync_every=0"),
        ((4, 3), "multiple of the 3 fragments"),
        ((4, 2, 2), "delay=2 must be less than 2"),
        ((4, 1, -1), "delay=-1"),
        ((4.5,), "sync_every=4.5"),
    ],
)
def test_a_schedule_that_cannot_be(given, words):
    with pytest.raises(LayoutError, match=words):
        OuterSchedule(*given)


def test_the_rule_is_the_optimizer_of_the_papers():
    """D is a gradient of outer: a step against it. torch's SGD(nesterov=True) with momentum 0.9 does the same."""
    outer, v = np.array([1.0, 2.0]), np.zeros(2)
    rule = OuterRule(outer_lr=0.5, outer_momentum=0.9, alpha=0.25)
    rule.update(outer, v, np.array([1.0, -2.0]))
    np.testing.assert_allclose(outer, [1 - 0.5 * 1.9, 2 + 0.5 * 3.8])
    rule.update(outer, v, np.zeros(2))
    np.testing.assert_allclose(v, [0.9, -1.8])
    np.testing.assert_allclose(outer, [0.05 - 0.5 * 0.81, 3.9 + 0.5 * 1.62])
    np.testing.assert_array_equal(rule.blend(np.array([4.0]), np.array([8.0])), [7.0])  # a quarter of its own


def test_what_counts_nothing_may_be_infinite():
    one = np.ones(1)
    np.testing.assert_array_equal(OuterRule(alpha=0).blend(np.array([np.inf]), one), one)


def test_numbers_of_numpy_do_not_widen():
    rule, outer, v = OuterRule(np.float64(0.7), np.float64(0.9), np.float64(0.5)), np.ones(2, "f4"), np.ones(2, "f4")
    other = OuterRule(0.7, 0.9, 0.5), outer.copy(), v.copy()
    rule.update(outer, v, np.full(2, 0.1, "f4"))
    other[0].update(*other[1:], np.full(2, 0.1, "f4"))
    assert outer.tobytes() == other[1].tobytes() and rule.blend(outer, v).dtype == np.float32


@pytest.mark.parametrize(
    "wrong", [{"outer_lr": -1}, {"outer_momentum": 1}, {"alpha": 1.5}, {"alpha": "half"}, {"outer_lr": np.nan}]
)
def test_a_rule_that_cannot_be(wrong):
    with pytest.raises(LayoutError, match=str(*wrong.values())):
        OuterRule(**wrong)


def test_names_are_dealt():
    names = ["a", "b", "c"]
    assert dealt(names, 2) == {"a": 0, "b": 1, "c": 0}
    assert dealt(names, [["c"], ["b", "a"]]) == {"a": 1, "b": 1, "c": 0}
    for fragments, words in [
        ([["a", "b"]], "'c' is in none"),
        ([["a", "b", "c", "d"]], "'d' is no parameter"),
        ([["a", "b"], ["b", "c"]], "'b' is in two"),
        ([["a", "b", "c"], []], "number 1 of 2 has no parameter"),
        (4, "number 3 of 4 has no parameter"),
    ]:
        with pytest.raises(LayoutError, match=words):
            dealt(names, fragments)
