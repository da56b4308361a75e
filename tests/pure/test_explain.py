"""Candidates and explanations: the best candidate is found, although not all candidates are simulated."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import catalogue
import pytest
from catalogue import send_to_all

import fompi
from fompi import Partial, Replicate, Shard, Spec
from fompi.base.errors import LayoutError
from fompi.base.layout import Sizes, cut
from fompi.model.lower_bound import call_seconds, library_nbytes
from fompi.model.machine import PRESETS, Level, Machine
from fompi.model.simulate import predict
from fompi.planner.candidates import (
    MOST_PEERS_AT_ONCE,
    UNFUSED,
    WINDOWS,
    Candidate,
    all_reduces_by_rate,
    candidates,
    exact_cuts,
    other_windows,
    rows_by_rate,
)
from fompi.planner.estimate import estimate
from fompi.planner.explain import ESTIMATE_FACTOR, explain
from fompi.plans.plan import Compute
from fompi.plans.problems import Form, problem
from fompi.plans.verify import verify
from fompi.schedules.registry import DIRECT_FAMILY, shares_of, write

NAMES = [
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "all_gather_matmul 3-d",
    "matmul_reduce_scatter", "matmul_all_reduce bias", "matmul_all_to_all", "all_to_all_matmul",
    "all_gather_weight_gradient",
]  # fmt: skip


def large(operation, ranks, k=512):
    """A problem with 1024 rows and columns of float32, and its sizes."""
    n = 1024
    x, w = {
        "all_gather_matmul": (Form((n // ranks, k), "float32"), Form((k, n // ranks), "float32")),
        "matmul_reduce_scatter": (Form((n, k // ranks), "float32"), Form((k // ranks, n), "float32")),
        "matmul_all_to_all": (Form((n // ranks, k), "float32"), Form((k, n), "float32")),
        "matmul_all_reduce": (Form((n, k // ranks), "float32"), Form((k // ranks, n), "float32")),
    }[operation]
    made = problem(operation, ranks, x, [w])
    if operation == "matmul_all_to_all":
        return made, Sizes(pairs=((n // ranks // ranks,) * ranks,) * ranks)
    return made, Sizes((n // ranks,) * ranks)


def simulated(made, sizes, machine):
    """The simulated seconds of every candidate."""
    return {c: predict(write(made, c.schedule, c.slices, sizes, c.window), machine) for c in candidates(made, machine)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_problem_has_an_explanation(name, ranks):
    made = catalogue.problems(ranks)[name]
    sizes = catalogue.sizes(made, "uneven")
    explanation = explain(made, sizes, Machine.load("laptop"))
    winner, bound, machine = explanation.winner, explanation.lower_bound, explanation.machine
    listed, judged = set(candidates(made, machine)), [judged.candidate for judged in explanation.judged]
    assert listed <= set(judged) and len(judged) == len(set(judged))
    assert all(candidate.window in WINDOWS for candidate in set(judged) - listed)
    traced = [judged for judged in explanation.judged if judged.trace is not None]
    assert winner.seconds == min(judged.seconds for judged in traced) and winner is traced[0]
    assert explanation.gap >= -1e-9 and bound.seconds <= winner.seconds * (1 + 1e-9)
    assert {judged.candidate for judged in traced} >= {c for c in UNFUSED if c in candidates(made, machine)}
    verify(explanation.plan)
    assert explanation.plan.schedule == winner.candidate.schedule
    lines = explanation.text(None).splitlines()
    assert lines[1].startswith(f"best: {winner.candidate}, {1e3 * winner.seconds:.3f} ms, ")
    assert lines[2].startswith("lower bound ") and lines[3].startswith("candidate ")
    end = 4 + len({one.shown for one in explanation.judged})
    folded = re.findall(r"(\d+) more with the same time$", "\n".join(lines[4:end]), re.MULTILINE)
    assert len(lines[4:end]) + sum(map(int, folded)) == len(judged)
    assert all(line.startswith("hidden on rank ") for line in lines[end:])


@pytest.mark.parametrize("operation", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_overlaps(operation):
    """An overlap is no longer than its messages and its kernels. The longest overlap comes first."""
    made, sizes = large(operation, 4)
    explanation = explain(made, sizes, PRESETS["gigabit"])
    events = explanation.winner.trace.events
    overlaps = explanation.overlaps
    assert overlaps and str(overlaps[0][1]) in str(explanation)
    assert overlaps == sorted(overlaps, key=lambda pair: -pair[1].seconds)
    for rank, overlap in overlaps:
        ran = [e.end - e.start for e in events if e.rank == rank and e.name.startswith(f"{overlap.kernel}(")]
        sign = "<" if "messages from" in overlap.messages else ">"
        peer = f"{sign}{overlap.messages.split()[-1]}"
        moved = [e.end - e.moves[0] for e in events if e.rank == rank and e.is_message and e.name.endswith(peer)]
        assert 0 < overlap.seconds <= min(sum(ran), sum(moved)) * (1 + 1e-9)


@pytest.mark.parametrize("ranks", [64, 65, 100])
@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "matmul_reduce_scatter", "all_to_all"])
def test_with_many_ranks_no_rank_sends_to_all_at_once(ranks, name):
    """No candidate does, and none with another window."""
    made = catalogue.problems(ranks)[name]
    sizes = Sizes(pairs=((64,) * ranks,) * ranks) if name == "all_to_all" else Sizes((64,) * ranks)
    for machine in (PRESETS["gigabit"], replace(PRESETS["gigabit"], rates=(0.25,))):
        given = made, sizes, machine
        listed = [*candidates(made, machine), *exact_cuts(*given), *all_reduces_by_rate(*given)]
        listed += [other for candidate in listed for other in other_windows(candidate, ranks)]
        at_once = [c for c in listed if c.schedule in (*DIRECT_FAMILY, "exchange") and c.window is None]
        few = ranks <= MOST_PEERS_AT_ONCE
        assert bool(at_once) == few
        assert listed and (name != "broadcast" or few or {c.schedule for c in listed} == {"unfused"})


def test_the_estimate_of_an_exchange_counts_the_link_between_groups():
    """Messages to the other group pass the slow link that the ranks of a group share."""
    made = catalogue.problems(8)["all_reduce"]
    flat = PRESETS["gigabit"]
    groups = replace(flat, levels=(Level(4, 1e-4, flat.bandwidth / 100, True),))
    rows = Sizes((1000,) * 8)
    for schedule, times in (("exchange", 100), ("doubling", 10)):
        near, far = (estimate(made, rows, machine, Candidate(schedule)) for machine in (flat, groups))
        assert near == pytest.approx(predict(write(made, schedule, 1, rows), flat), rel=0.1)
        assert far == pytest.approx(predict(write(made, schedule, 1, rows), groups), rel=0.1) and far > times * near


def in_turns(machines, shapes):
    """Every pair of a machine with an operation and with a shape (its ranks and k), and not every triple."""
    operations = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
    pairs = product(enumerate(operations), enumerate(machines))
    return [(operation, machine, *shapes[(i + j) % len(shapes)]) for (i, operation), (j, machine) in pairs]


def test_a_plan_for_a_machine_is_the_winner_of_its_explanation():
    for ranks, rows in ((2, 64), (4, 4096), (3, 1000)):
        x, w = Spec((rows, 512), "float32", Shard(0)), Spec((512, 64 * ranks), "float32", Shard(1))
        for machine in ("gigabit", "laptop"):
            best = fompi.explain("all_gather_matmul", x, w, ranks=ranks, machine=machine).plan
            made = fompi.plan("all_gather_matmul", x, w, ranks=ranks, machine=machine)
            assert (made.schedule, made.shares, made.window) == (best.schedule, best.shares, best.window)


@pytest.mark.parametrize(
    ("operation", "machine", "ranks", "k"),
    in_turns(["gigabit", "laptop", "h100-nvlink", "rtx4090-pcie"], [(2, 512), (4, 4096)]),
)
def test_a_few_simulations_find_a_good_candidate(operation, machine, ranks, k):
    """It is within 3 % of the best of all candidates."""
    made, sizes = large(operation, ranks, k)
    where = PRESETS[machine]
    best = min(seconds for seconds in simulated(made, sizes, where).values())
    assert explain(made, sizes, where).winner.seconds <= 1.03 * best


@pytest.mark.parametrize(
    ("operation", "machine", "ranks", "k"),
    in_turns(["gigabit", "laptop", "h100-ndr", "rtx4090-pcie"], [(2, 512), (4, 4096), (16, 1024)]),
)
def test_the_candidates_of_a_call(operation, machine, ranks, k):
    """While a call waits, fewer candidates are simulated. The winner is within 2 % of the best that a call can take."""
    made, sizes = large(operation, ranks, k)
    where = PRESETS[machine]
    explanation = explain(made, sizes, where, for_call=True)
    winner = explanation.winner
    usable = [judged for judged in explain(made, sizes, where).judged if judged.candidate.fits_call(made.size)]
    assert winner.trace is not None and winner.seconds <= 1.02 * usable[0].seconds
    traced = {judged.candidate for judged in usable if judged.trace is not None}
    skipped = [judged for judged in explanation.judged if judged.trace is None and judged.candidate in traced]
    assert all(judged.seconds > ESTIMATE_FACTOR * winner.seconds for judged in skipped)
    assert {judged.candidate for judged in explanation.judged} == {judged.candidate for judged in usable}


def test_hierarchical_is_the_best_over_a_slow_link():
    made, sizes = problem("all_gather", 4, Form((1 << 20, 1), "uint8")), Sizes((1 << 20,) * 4)
    flat = Machine.load("gigabit")
    between = replace(flat, levels=(Level(2, 1e-4, flat.bandwidth / 10, True),))
    explanation = explain(made, sizes, between)
    assert explanation.winner.candidate.schedule == "hierarchical(2)"
    seconds = simulated(made, sizes, between)
    others = [seconds[c] for c in seconds if c.schedule in ("direct", "ring", "bidirectional")]
    assert min(others) >= 1.3 * explanation.winner.seconds and explanation.gap < 0.08
    assert "group" in explanation.lower_bound.what


def test_the_first_slice_is_small_if_messages_take_longer_than_kernels():
    made, sizes = large("matmul_reduce_scatter", 2)
    shares = explain(made, sizes, Machine.load("gigabit")).plan.shares
    assert shares[0] == min(shares) < max(shares) or len(set(shares)) == 1 < len(shares) >= 8


def test_estimates_are_near_simulated_times():
    """They are within a factor of 1.5, for candidates that may be the best."""
    for operation in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        made, sizes = large(operation, 4)
        machine = Machine.load("gigabit")
        for candidate, seconds in simulated(made, sizes, machine).items():
            if candidate.schedule not in ("unfused", "sliced"):
                ratio = estimate(made, sizes, machine, candidate) / seconds
                assert 1 / 1.5 < ratio < 1.5, candidate


def test_collectives_that_were_measured_on_another_number_of_ranks():
    """A formula replaces their curves, and the text says so."""
    collectives = {name: ((1e6, 0.5),) for name in ("all_gather", "all_reduce")}
    measured = replace(Machine.load("gigabit"), collectives=collectives, collectives_ranks=2)
    x, words = Spec((512, 256), "float32", Shard(0)), "measured on 2 ranks, not on 4: a formula gives their times here"
    assert words in str(fompi.explain("all_gather", x, ranks=4, machine=measured))
    assert "a formula" not in str(fompi.explain("all_gather", x, ranks=2, machine=measured))


def test_one_rank_has_no_messages():
    x, w = Spec((512, 256), "float32", Shard(0)), Spec((256, 512), "float32", Shard(1))
    explanation = fompi.explain("all_gather_matmul", x, w, ranks=1, machine="gigabit")
    assert explanation.winner.seconds < 1.2 * explanation.lower_bound.seconds


def test_an_explanation_prints_itself():
    x, w = Spec((512, 256), "float32", Shard(0)), Spec((256, 512), "float32", Shard(1))
    explanation = fompi.explain(fompi.all_gather_matmul, x, w, ranks=4, machine="gigabit")
    winner = explanation.winner
    assert fompi.explain("all_gather_matmul", x, w, ranks=4, machine=Machine.load("gigabit")) == explanation
    assert "rank 0" in explanation.timeline() and explanation.plot().startswith("<svg")
    assert len(repr(explanation)) < 200 and repr(winner) in repr(explanation)
    assert str(winner.candidate) in repr(explanation)
    best = explanation.text(2).splitlines()
    words = [line.split() for line in (*best[:4], *str(explanation).splitlines()[:4])]
    assert words[:4] == words[4:] and re.fullmatch(r"\.\.\. and \d+ more candidates", best[6])


def test_an_explanation_is_short_and_its_verdict_comes_first():
    """At most ten times. Candidates with the same time share a line."""
    x = Spec((4 << 20, 1), "uint8", Shard(0))
    machine = replace(Machine.load("gigabit"), levels=(Level(2, 1e-4, 11.8e6, True),))
    explanation = fompi.explain("all_gather", x, ranks=4, machine=machine)
    _, best, _, _, *rows = explanation.text(None).splitlines()
    assert best.startswith("best: hierarchical(2), 16 slices, 178.430 ms, 0.3 % above the bound, 1.99x")
    assert (
        sum("ring, " in row or "bidirectional" in row for row in rows) == 1 and "9 more with the same time" in rows[5]
    )
    assert len(explanation.rows()) <= 10 and len(str(explanation).splitlines()) < 20
    nothing = fompi.explain("all_gather", x, ranks=1, machine=machine)
    assert "no candidate with overlap is faster" in str(nothing) or nothing.winner.candidate not in UNFUSED


def test_explain_refuses_unknown_machines_and_no_ranks():
    x, w = Spec((512, 256), "float32", Shard(0)), Spec((256, 512), "float32", Shard(1))
    with pytest.raises(LayoutError, match="no machine 'cray'"):
        fompi.explain("all_gather_matmul", x, w, ranks=4, machine="cray")
    with pytest.raises(LayoutError, match="ranks=0"):
        fompi.explain("broadcast", Spec((8,), "float32", Replicate()), ranks=0, machine="laptop")


def test_a_plan_for_a_machine():
    x, w = Spec((512, 256), "float32", Shard(0)), Spec((256, 512), "float32", Shard(1))
    for name in PRESETS:
        best = fompi.explain("all_gather_matmul", x, w, ranks=4, machine=name).winner.candidate
        plan = fompi.plan("all_gather_matmul", x, w, ranks=4, machine=name)
        assert plan == fompi.plan(
            "all_gather_matmul", x, w, ranks=4, schedule=best.schedule, slices=best.slices, window=best.window
        )
    assert fompi.plan("all_gather_matmul", x, w, ranks=4, machine="gigabit", window=2, slices=3).shares in (
        (1,) * 3, (1,) * 6,
    )  # fmt: skip
    assert fompi.plan("all_gather_matmul", x, w, ranks=4, machine="gigabit", schedule="ring").schedule == "ring"


# ------------------------------------------------------------------------------------------------ schedules of users


def without_its_copy(problem, work):
    """A wrong schedule: the own block of the result is missing."""
    yield from (op for op in send_to_all(problem, work) if not isinstance(op, Compute))


def for_powers_of_two(problem, work):
    if work.size & (work.size - 1):
        raise ValueError("ranks must be a power of two")
    yield from send_to_all(problem, work)


def test_right_schedules_of_users_are_candidates(forgotten):
    """A wrong one is refused, although it does less work. One that raises an error is refused too."""
    for schedule in (send_to_all, without_its_copy, for_powers_of_two):
        fompi.schedule(schedule.__name__, "all_gather")(schedule)
    made = problem("all_gather", 3, Form((64, 4), "float32"))
    explanation = explain(made, Sizes((64,) * 3), Machine.load("gigabit"))
    listed = [judged.candidate for judged in explanation.judged]
    assert {candidate.slices for candidate in listed if candidate.schedule == "send_to_all"} == {1, 4}
    assert {candidate.schedule for candidate, _ in explanation.refused} == {"without_its_copy", "for_powers_of_two"}
    text = str(explanation)
    assert "for_powers_of_two, 1 slice: refused: ValueError: ranks must be a power of two" in text
    assert "without_its_copy, 1 slice: refused: PlanError: rank 0" in text


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("operation", ["broadcast", "all_gather", "all_reduce", "all_to_all"])
def test_no_candidate_beats_the_bound(operation, name):
    layout = {"broadcast": Replicate(), "all_reduce": Partial()}.get(operation, Shard(0))
    explanation = fompi.explain(operation, Spec((4096, 64), "float32", layout), ranks=4, machine=name)
    assert min(judged.seconds for judged in explanation.judged) >= explanation.lower_bound.seconds * (1 - 1e-9)


@pytest.mark.parametrize("name", ["gigabit", "laptop"])
@pytest.mark.parametrize("operation", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_sums_of_the_library_take_core_time_from_kernels(operation, name):
    """If kernels and sums share a core, no candidate is faster than both together."""
    x, w = Spec((4096, 1024), "float32", Shard(1)), Spec((1024, 1024), "float32", Shard(0))
    explanation = fompi.explain(operation, x, w, ranks=4, machine=name)
    assert min(judged.seconds for judged in explanation.judged) >= explanation.lower_bound.seconds * (1 - 1e-9)


@pytest.mark.parametrize("k", [0, 1, 4])
def test_rows_of_several_dimensions(k):
    """The columns are in the last dimension. Some ranks may have no columns."""
    x, w = Spec((8, 3, k), "float32", Shard(-1)), Spec((k, 6), "float32", Shard(0))
    for operation in ("matmul_reduce_scatter", "matmul_all_reduce"):
        fompi.verify(fompi.explain(operation, x, w, ranks=2, machine="laptop").plan)
    d, h = Spec((8, 3, 4), "float32", Shard(0)), Spec((8, 3, k), "float32", Shard(2))
    fompi.verify(fompi.explain("all_gather_weight_gradient", d, h, ranks=2, machine="laptop").plan)


def test_without_overlap_nothing_is_hidden():
    """A message counts from the time at which it begins to move, not from its posting."""
    x, w = Spec((2048, 1024), "float32", Shard(1)), Spec((1024, 2048), "float32", Shard(0))
    explanation = fompi.explain("matmul_reduce_scatter", x, w, ranks=4, machine="gigabit")
    for judged in explanation.judged:
        if judged.candidate in UNFUSED:
            assert judged.proof.hidden < 0.02 * judged.proof.communication, judged.candidate
    proof = explanation.winner.proof
    assert proof.hidden > 0.2 * proof.communication


@pytest.mark.parametrize("rates", [(1.0, 1.0, 0.25, 1.0), (0.5, 0.9, 1.0), (1.0,) * 5, (0.01, 0.02, 1.0)])
def test_rows_by_rate_are_the_best_distribution(rates):
    """The slowest port does not finish earlier if rows move from one rank to another."""

    def seconds(rows):
        return max((sum(rows) + (len(rates) - 2) * n) / rate for n, rate in zip(rows, rates, strict=True))

    rows = rows_by_rate(10_000, rates)
    assert sum(rows) == 10_000 and min(rows) >= 0
    best = seconds(rows)
    for source in range(len(rates)):
        for dest in range(len(rates)):
            moved = list(rows)
            step = min(50, moved[source])
            moved[source] -= step
            moved[dest] += step
            assert seconds(moved) >= best * (1 - 1e-3)


def test_an_all_reduce_by_rate_is_the_best_with_a_slow_rank():
    slow, x = replace(PRESETS["gigabit"], rates=(1.0, 1.0, 0.25, 1.0)), Spec((1 << 21,), "float32", Partial())
    explanation = fompi.explain("all_reduce", x, ranks=4, machine=slow)
    rows = explanation.winner.candidate.rows
    assert rows is not None and rows[2] == 0 and explanation.gap < 0.04
    even = min(judged.seconds for judged in explanation.judged if judged.candidate.rows is None)
    assert explanation.winner.seconds < even / 1.3
    assert fompi.plan("all_reduce", x, ranks=4, machine=slow).sizes.rows[2] == 0


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather"])
def test_among_equal_rings_the_one_with_the_fewest_slices_is_the_best(operation):
    """By the model, slices do not change the time with a slow rank. But more slices are more messages."""
    slow = replace(PRESETS["gigabit"], rates=(1.0, 1.0, 0.25, 1.0))
    layout = Partial() if operation == "reduce_scatter" else Shard(0)
    explanation = fompi.explain(operation, Spec((1 << 21,), "float32", layout), ranks=4, machine=slow)
    winner, traced = explanation.winner, [judged for judged in explanation.judged if judged.trace is not None]
    fastest = min(judged.seconds for judged in traced)
    assert winner.candidate.slices in (1, 2) and fastest <= winner.seconds <= 1.005 * fastest
    others = [judged.seconds for judged in traced[1:]]
    assert others == sorted(others)


@pytest.mark.parametrize("operation", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("k", [256, 1024, 4096])
def test_exact_cuts_are_at_least_as_good_as_fixed_cuts(operation, k):
    """They are exact between two ranks, among cuts into sixteenths of a shard.

    They are almost exact for an all-reduce: its messages cross twice, the second time among those of later slices.
    """
    most = 1.01 if operation == "matmul_all_reduce" else 1.005
    machine = replace(PRESETS["gigabit"], lanes=2, pack_rate=4e9)
    made, sizes = large(operation, 2, k)
    times = {c: predict(write(made, c.schedule, c.slices, sizes), machine) for c in exact_cuts(made, sizes, machine)}
    for slices in (1, 2, 4, (1, 3), (3, 1), (4, 2, 1, 1), (1, 1, 2, 4)):
        other = predict(write(made, "direct", slices, sizes), machine)
        assert min(times.values()) <= other * most, (slices, times)


@pytest.mark.parametrize("operation", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_slices_end_where_a_wave_ends(operation):
    """A shard of 512 rows is 4.97 waves. Sixteenths of a shard are no whole waves; slices of 103 rows are."""
    made, sizes = large(operation, 2, 1024)
    machine = replace(PRESETS["gigabit"], lanes=2, wave=103 * made.weights[0].columns)

    def times(machine):
        found = [c for c in exact_cuts(made, sizes, machine) if c.schedule == "direct"]
        return {c.slices: predict(write(made, "direct", c.slices, sizes), machine) for c in found}

    in_sixteenths, in_waves = times(replace(machine, wave=0)), times(machine)
    best = min(in_waves, key=in_waves.__getitem__)
    rows = cut(512, shares_of("direct", best))
    assert sum(n % 103 != 0 for n in rows) <= 1 < len(rows), rows
    for slices in (*in_sixteenths, 1, 2, 4, 8, (1, 2, 4), (4, 2, 1)):
        other = predict(write(made, "direct", slices, sizes), machine)
        assert in_waves[best] < other or slices == best, (slices, other, in_waves)


def test_a_shard_that_is_hardly_more_than_some_waves():
    """No slice is empty."""
    for rows in (1585, 1057 * 3, 1056 * 3 + 2):
        specs = Spec((rows, 12288), "bfloat16", Shard(1)), Spec((12288, 8192), "bfloat16", Shard(0))
        verify(fompi.explain("matmul_all_reduce", *specs, ranks=3, machine="h100-nvlink").plan)


def test_the_slices_of_library_collectives_are_exact():
    """A brute-force search finds no better cut.

    With a kernel call for each slice: among cuts of sixteen units into at most six slices. With one kernel that
    announces the slices: among all cuts.
    """
    collectives = {"all_reduce": ((0.0, 1e-3), (1e9, 1e-3 + 1e9 / 3e8))}
    machine = replace(PRESETS["gigabit"], collectives=collectives, overhead=2e-4)
    made, sizes = large("matmul_all_reduce", 4, 2048)
    call_per_slice, announced = [c for c in exact_cuts(made, sizes, machine) if c.schedule == "sliced"]

    def seconds(cut, calls=True):
        first = second = done = 0.0
        for n in cut:
            done += n
            first = first + call_seconds(made, machine, n * 64) if calls else call_seconds(made, machine, done * 64)
            second = max(first, second) + machine.library("all_reduce", library_nbytes(made, n * 64), 4, True, True)
        return second

    def cuts(units, most):
        yield (units,)
        for n in range(1, units) if most > 1 else ():
            yield from ((n, *rest) for rest in cuts(units - n, most - 1))

    def in_units(candidate):
        shares = shares_of("sliced", candidate.slices)
        return [16 * n // sum(shares) for n in shares]

    assert seconds(in_units(call_per_slice)) == pytest.approx(min(map(seconds, cuts(16, 6))))
    assert seconds(in_units(announced), False) == pytest.approx(min(seconds(cut, False) for cut in cuts(16, 16)))


def test_the_best_direct_schedule_is_simulated_with_all_windows():
    made, sizes = large("matmul_all_to_all", 8)
    explanation = explain(made, sizes, replace(Machine.load("gigabit"), bandwidth=2e9))
    best = next(judged.candidate for judged in explanation.judged if judged.candidate.schedule in DIRECT_FAMILY)
    traced = {judged.candidate for judged in explanation.judged if judged.trace is not None}
    if explanation.winner.candidate == best:
        assert {best._replace(window=w) for w in WINDOWS} <= traced
    assert list(other_windows(Candidate("ring"), 8)) == [] and len(list(other_windows(Candidate("direct"), 3))) == 1


@pytest.mark.parametrize("operation", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_between_two_ranks_a_ring_is_the_same_as_direct(operation):
    """Its time is the same to the last digit, so it is not a candidate. `bidirectional` with equal slices neither."""
    made, sizes = large(operation, 2)
    machine = Machine.load("laptop")
    listed = set(candidates(made, machine))
    for repeated, other in (
        (Candidate("ring", (4, 2, 1)), Candidate("direct", (4, 2, 1))),
        (Candidate("bidirectional", 4), Candidate("direct", 8)),
    ):
        seconds, same = (predict(write(made, c.schedule, c.slices, sizes), machine) for c in (repeated, other))
        assert seconds == same and repeated not in listed and other in listed
    assert Candidate("bidirectional", (4, 2, 1)) in listed  # no other candidate has this cut
    assert {c.schedule for c in candidates(large(operation, 4)[0], machine)} >= {"ring", "bidirectional"}
