"""Orders of pipelines: complete, without deadlock, as fast as their formulas, and with as much alive as promised."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from fompi.base.errors import PlanError
from fompi.model.pipeline import placement_of, predicted, rank_of, stages_of
from fompi.parallel.actions import SCHEDULES, Action, Both, actions, alive, check, parts, placement_in, times

SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 5, 8, 12, 16, 24)] + [(3, 40), (4, 40)]
CHUNKS = (2, 3, 4)
SECONDS = [{}, {"F": 1.0, "B": 1.5, "I": 0.9, "W": 0.6}, {"F": 2.0, "B": 3.0, "I": 2.0, "W": 1.0}]

LEAST = {"zb-h1": lambda p: p, "zb-h2": lambda p: 2 * p - 1, "zbv": lambda p: 2 * p - 1, "dualpipev": lambda p: 2 * p}
"""The least number of micro-batches for which a formula holds."""


def chunks_of(schedule):
    return CHUNKS if schedule == "interleaved" else (2,) if placement_of(schedule) == "v" else (1,)


def texts(listed):
    return [" ".join(map(str, actions)) for actions in listed]


def slowest(listed, seconds, message=0.0):
    found = times(listed, seconds, message)
    return max(found.span(actions) for actions in listed)


def test_an_action_is_written_as_in_pytorch():
    assert str(Action(2, "F", 0)) == "2F0" and Action(2, "F", 0) == (2, "F", 0)


def test_known_orders():
    assert texts(actions("gpipe", 2, 2)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert texts(actions("1f1b", 2, 3)) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    assert texts(actions("eager-1f1b", 2, 3))[0] == "0F0 0F1 0F2 0B0 0B1 0B2"
    assert texts(actions("zb-h1", 2, 2)) == ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"]
    assert texts(actions("interleaved", 2, 2, 2)) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_order_is_complete_and_ends(schedule):
    """Also with fewer micro-batches than stages, and with micro-batches that do not divide by the ranks."""
    for p in range(1, 8):
        for m in range(1, 15):
            for chunks in chunks_of(schedule):
                listed = actions(schedule, p, m, chunks)
                assert len(listed) == p
                check(listed, p, m, chunks)
                kinds = 3 if schedule.startswith("zb") else 2
                assert sum(map(len, listed)) == kinds * p * m * chunks or schedule == "dualpipev"


@pytest.mark.parametrize("seconds", SECONDS, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_formulas_without_messages(schedule, seconds):
    """Zero bubble: with equal parts. Else W cannot fill exactly what F and I leave, and the time is at least that."""
    for p, m in SIZES:
        for chunks in chunks_of(schedule):
            if m < LEAST.get(schedule, lambda p: 1)(p) or (schedule == "interleaved" and m % p):
                continue
            got = slowest(actions(schedule, p, m, chunks), seconds)
            wanted = predicted(schedule, p, m, chunks, seconds)
            if placement_of(schedule) == "v" and seconds:
                assert wanted * (1 - 1e-9) <= got <= 1.02 * wanted
            elif schedule.startswith("zb") and seconds:
                assert got >= wanted * (1 - 1e-9)
            else:
                assert got == pytest.approx(wanted, rel=0.03)


@pytest.mark.parametrize("message", [0.02, 0.1, 0.7])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_formulas_with_messages(schedule, message):
    for p, m in SIZES:
        for chunks in chunks_of(schedule):
            if m < LEAST.get(schedule, lambda p: 1)(p) or (schedule == "interleaved" and m % p):
                continue
            if message > 0.5 and placement_of(schedule) == "loop":
                continue  # no message has so much slack
            got = slowest(actions(schedule, p, m, chunks), {}, message)
            assert got == pytest.approx(predicted(schedule, p, m, chunks, {}, message), rel=0.03), (p, m, chunks)


def test_a_forward_and_a_backward_side_by_side():
    assert texts(actions("eager-1f1b", 2, 4, overlap_f_b=True)) == [
        "0F0 0F1 0F2 (0F3;0B0)OVERLAP_F_B 0B1 0B2 0B3",
        "1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B (1F3;1B2)OVERLAP_F_B 1B3",
    ]


@pytest.mark.parametrize("schedule", ["eager-1f1b", "interleaved", "dualpipev"])
def test_every_order_with_pairs_is_complete_and_ends(schedule):
    """With one forward more ahead no time is lost. DualPipeV: (p - 1) (F&B + B - 3 W) is lost, as its paper says."""
    for p in range(1, 8):
        for m in range(1, 15):
            for chunks in chunks_of(schedule):
                listed = actions(schedule, p, m, chunks, overlap_f_b=True)
                plain = actions(schedule, p, m, chunks)
                assert [sorted(map(str, parts(a))) for a in listed] == [sorted(map(str, a)) for a in plain]
                if m < 2 * p or (schedule == "interleaved" and m % p):
                    continue
                assert all(sum(isinstance(step, Both) for step in steps) >= m - 2 * p + 1 for steps in listed)
                more = (p - 1) * (schedule == "dualpipev")
                assert slowest(listed, {}) == slowest(plain, {}) + more
                held = (alive(a)[0] - alive(b)[0] for a, b in zip(listed, plain, strict=True))
                assert schedule == "dualpipev" or all(0 <= each <= 1 for each in held)


def test_the_time_of_a_pair():
    listed = actions([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]], 1, 2)
    assert times(listed).span(listed[0]) == 6 and times(listed, {"OVERLAP_F_B": 2.5}).span(listed[0]) == 5.5
    assert listed[0][1] == Both(Action(0, "F", 1), Action(0, "B", 0)) and alive(listed[0]) == (2, 0)


def test_what_is_alive():
    for p, m in SIZES:
        for r in range(p):
            found = {name: alive(actions(name, p, m)[r]) for name in SCHEDULES if chunks_of(name) == (1,)}
            assert found["gpipe"] == (m, 0)
            assert found["1f1b"] == (min(m, p - r), 0)
            assert found["eager-1f1b"] == (min(m, 2 * (p - r) - 1), 0)
            assert found["zb-h1"] == (min(m, p - r), min(m, r + 1))
            assert found["zb-h2"] == (min(m, 2 * (p - r) - 1), min(m, 2 * r + 1))
            if m >= 2 * p:
                assert alive(actions("zbv", p, m, 2)[r]) == (2 * p, 2 * r + 1)
                assert alive(actions("dualpipev", p, m, 2)[r]) == (2 * p + 1, r + 1)
            for v in CHUNKS:
                if m % p == 0:
                    wanted = min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1)
                    assert alive(actions("interleaved", p, m, v)[r])[0] == wanted


def test_zero_bubble_has_less_bubble():
    """Figures of the paper: 8 stages, 24 micro-batches of equal parts."""
    spans = {name: slowest(actions(name, 8, 24), {}) for name in ("1f1b", "zb-h1", "zb-h2")}
    assert spans == {"1f1b": 93, "zb-h1": 79, "zb-h2": 72}


def test_a_v_has_no_bubble_in_the_memory_of_1f1b():
    """Figures of the papers: ZBV with equal parts has none, with half as much alive as zb-h2; DualPipeV (p - 1) F."""
    p, m = 8, 24
    spans = {name: slowest(actions(name, p, m, 2), {}) for name in ("zbv", "dualpipev")}
    assert spans == {"zbv": 6 * m, "dualpipev": 6 * m + p - 1}
    assert max(alive(mine)[0] for mine in actions("zbv", p, m, 2)) == 2 * p  # stages of half the size
    assert max(alive(mine)[0] for mine in actions("zb-h2", p, m)) == 2 * p - 1


# ------------------------------------------------------------------------------------------------ orders of users


def test_texts_and_actions_and_a_file(tmp_path):
    wanted = actions("1f1b", 2, 2)
    listed = [[str(a) for a in actions] for actions in wanted]
    assert actions(listed, 2, 2) == actions(wanted, 2, 2) == wanted
    table = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"  # a time step without an action is an empty cell
    assert texts(actions(table, 2, 2)) == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    path = tmp_path / "order.csv"
    path.write_text(table)
    assert actions(str(path), 2, 2) == actions(table, 2, 2)


def test_stages_in_a_loop_and_in_a_v():
    assert [stages_of(r, 3, 2, "loop") for r in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [stages_of(r, 3, 3, "v") for r in range(3)] == [[0, 5, 6], [1, 4, 7], [2, 3, 8]]
    for where in ("loop", "v"):
        for p in (1, 2, 5):
            assert all(rank_of(s, p, where) == r for r in range(p) for s in stages_of(r, p, 4, where))
    listed = actions("zbv", 3, 4, 2)
    assert placement_in(listed, 2) == "v" and placement_in(actions("interleaved", 3, 4, 2), 2) == "loop"
    listed[0][0], listed[1][0] = listed[1][0], listed[0][0]
    with pytest.raises(PlanError, match="stage 1 belongs to rank 1"):
        actions(listed, 3, 4, 2)


def test_messages_and_shards_in_a_file_of_pytorch_are_left_out():
    table = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0,1RESHARD\n"
    assert texts(actions(table, 2, 1)) == ["0F0 0B0", "1F0 1B0"]


REFUSED = [
    (["0F0"], ["1F0 1B0"], "rank 0: 0B0 is missing", 0, "0B0"),
    (["0F0 0B0"], ["1B0"], "rank 1: 1F0 is missing", 1, "1F0"),
    (["0F0 0I0"], ["1F0 1B0"], "rank 0: 0W0 is missing", 0, "0W0"),
    (["0F0 0F0 0B0"], ["1F0 1B0"], "action 1, 0F0: it is there twice", 0, "0F0"),
    (["0F0 0B0 0W0"], ["1F0 1B0"], "B is I and W together", 0, "0W0"),
    (["0F0 0I0 0W0 0B0"], ["1F0 1B0"], "B is I and W together", 0, "0B0"),
    (["0F0 0B0 1F0"], ["1F0 1B0"], "stage 1 belongs to rank 1", 0, "1F0"),
    (["0F0 0B0 0F1"], ["1F0 1B0"], "1 micro-batches", 0, "0F1"),
    (["0F0 0B0"], ["3F0 1B0"], "there are 2 stages", 1, "3F0"),
    (["0B0 0F0"], ["1F0 1B0"], "0B0 of rank 0 waits for the forward of micro-batch 0 at stage 0", 0, "0B0"),
    (["0F0 0W0 0I0"], ["1F0 1B0"], "which comes later on the same rank", 0, "0W0"),
    (["0F0 Q"], ["1F0 1B0"], "'Q' is not an action", 0, "Q"),
    (["0F0 (0F1;1B0)"], ["1F0 1B0"], "is not an action", 0, "(0F1;1B0)"),
    (["0F0 (0F1;1B0)OVERLAP_F_B"], ["1F0 1B0"], "1 micro-batches", 0, "0F1"),
    (["(0F0;0B0)OVERLAP_F_B"], ["1F0 1B0"], "for the forward of micro-batch 0 at stage 0", 0, "(0F0;0B0)OVERLAP_F_B"),
    (["(0B0;0F0)OVERLAP_F_B"], ["1F0 1B0"], "is not a forward and a backward", 0, "(0B0;0F0)OVERLAP_F_B"),
]


@pytest.mark.parametrize(("first", "second", "text", "rank", "action"), REFUSED)
def test_wrong_orders(first, second, text, rank, action):
    with pytest.raises(PlanError) as caught:
        actions([first[0].split(), second[0].split()], 2, 1)
    assert text in str(caught.value)
    assert (caught.value.rank, caught.value.chunk) == (rank, action)


def test_a_deadlock_of_two_ranks_names_both():
    """Rank 0 wants the gradient of 1 first, rank 1 the one of 0."""
    with pytest.raises(PlanError, match="actions deadlock") as caught:
        actions([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]], 2, 2)
    assert "0B0 of rank 0 waits for the backward of micro-batch 0 at stage 1" in str(caught.value)
    assert "1F1 of rank 1 waits for the forward of micro-batch 1 at stage 0" in str(caught.value)
    assert (caught.value.rank, caught.value.op, caught.value.chunk) == (0, 1, "0B0")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("2f2b", 2, 2), "unknown schedule '2f2b'; known: gpipe"),
        (("1f1b", 0, 2), "ranks=0 must be"),
        (("1f1b", 2, 0.5), "microbatches=0.5 must be"),
        (("1f1b", 2, 2, 0), "chunks=0 must be"),
        (("1f1b", 2, 2, 1, True), "overlap_f_b is for eager-1f1b, interleaved, dualpipev: 1f1b leaves no room"),
        (([["0F0", "0B0"]], 1, 1, 1, True), "list what runs side by side"),
        (("1f1b", 2, 2, 2), "take 'interleaved'"),
        ((["0F0"], 1, 1), "actions are a list for each rank"),
        ((7, 1, 1), "actions are a list for each rank"),
        (([["0F0", "0B0"]], 2, 1), "actions for 1 ranks, but there are 2"),
        (("/nowhere/order.csv", 2, 1), "cannot be read"),
    ],
)
def test_wrong_arguments(given, text):
    with pytest.raises(PlanError, match=text.replace("(", r"\(")):
        actions(*given)
    with pytest.raises(PlanError, match="no formula"):
        predicted("2f2b", 2, 2)


def test_random_actions():
    """What the walk finishes is right; exchanging two actions gives some that are refused or end all the same."""
    random, refused = Random(1), 0
    for _ in range(300):
        p, m = random.randint(1, 5), random.randint(1, 6)
        schedule = random.choice([s for s in SCHEDULES if s != "interleaved"])
        listed = actions(schedule, p, m, chunks_of(schedule)[0])
        mine = random.choice(listed)
        i, j = random.randrange(len(mine)), random.randrange(len(mine))
        mine[i], mine[j] = mine[j], mine[i]
        try:
            found = times(listed)
        except PlanError as error:
            refused += 1
            rank = error.rank
            assert str(listed[rank][error.op]) == error.chunk
            continue
        assert len(found.ends) == sum(map(len, listed))
        for action, begun in found.begins.items():
            stage, kind, k = action
            before = {"F": [(stage - 1, "F", k)] if stage else [], "W": [(stage, "I", k)]}.get(kind, [(stage, "F", k)])
            assert all(found.ends[Action(*b)] <= begun for b in before)
        for mine in listed:
            assert all(found.ends[a] <= found.begins[b] for a, b in pairwise(mine))
    assert 30 < refused < 270
