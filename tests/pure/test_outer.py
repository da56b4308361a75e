"""The schedule, the rule and the fragments of outer steps, without MPI."""

from __future__ import annotations

import numpy as np
import pytest

from fompi.base.errors import LayoutError
from fompi.members.epoch_log import EpochLog, lines_of
from fompi.parallel.outer import BEHIND, HERE, NEW, SLOW, OuterCopies, OuterRule, OuterSchedule, dealt, roles_of

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


def copies():
    return OuterCopies({"w": np.zeros(2)}, sync_every=2, outer_lr=1.0, outer_momentum=0.0)


def test_what_a_slow_island_has_trained_counts_from_the_copies_of_the_others():
    island, theta = copies(), {"w": np.array([-1.0, -2.0])}
    island.steps = 2
    np.testing.assert_array_equal(island.left(theta.get).terms, [[1.0, 2.0]])
    island.take_over([np.array([10.0, 20.0])], [1], keeps=True)
    island.take_over([np.array([30.0, 30.0])], [2], keeps=True)  # again, before the program has it
    theta |= island.received(theta.get)
    np.testing.assert_array_equal(theta["w"], [29.0, 28.0])
    island.steps = 4
    np.testing.assert_array_equal(island.left(theta.get).terms, [[1.0, 2.0]])
    island.take_over([np.array([5.0, 5.0])], [3], keeps=False)
    np.testing.assert_array_equal(island.received(theta.get)["w"], [5.0, 5.0])
    assert island.received(theta.get) == {}


def test_roles_of_islands_that_meet():
    """By how many exchanges an island has, and by whether it has added to the one that it lacks."""
    ended = np.array([0, 3, 3, 4, 4])  # the epochs of the last exchanges
    table = np.array([
        [7, 30, 0, 0, 4, 0, 0], [0, 0, 0, 0, 0, 0, 0], [6, 28, 28, 0, 4, 0, 0], [6, 28, 28, 0, 3, 0, 0],
        [4, 20, 20, 0, 3, 0, 0], [4, 20, 20, 0, 2, 0, 0], [1, 20, 20, 0, 4, 0, 0], [7, 31, 0, 0, 0, 0, 29],
    ])  # fmt: skip
    assert roles_of(table, table[0], ended) == [HERE, NEW, BEHIND, SLOW, BEHIND, SLOW, SLOW, NEW]
    assert roles_of(table[1:2], table[1], ended) == [HERE]  # all begin
    assert roles_of(table[[7, 7]], table[7], ended) == [HERE, HERE]  # nobody else is left


def test_a_log_of_epochs_goes_on_where_a_line_is_whole(tmp_path):
    path = str(tmp_path / "a.log")
    EpochLog(path, "a").write({"kind": "epoch", "epoch": 1})
    with open(path, "ab") as file:
        file.write(b"0123 {")  # it was killed here
    assert [line for _, line in lines_of(path)] == [{"island": "a", "kind": "epoch", "epoch": 1}]
    EpochLog(path, "a").write({"kind": "epoch", "epoch": 2})
    assert [line["epoch"] for _, line in lines_of(path)] == [1, 2]
    lines = (tmp_path / "a.log").read_text().splitlines()
    for changed in (lines[::-1], lines[1:], [lines[0], lines[1].replace("2", "3")]):
        (tmp_path / "a.log").write_text("".join(f"{line}\n" for line in changed))
        with pytest.raises(LayoutError, match=r"a.log, line \d: it is not as it was written"):
            list(lines_of(path))
