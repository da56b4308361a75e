"""Which candidate is the best: the walk decides among the best few, and loses little by not walking them all."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import catalogue
import pytest
from catalogue import everyone

import fompi
from fompi import Partial, Replicate, Shard, Spec
from fompi.base.errors import LayoutError
from fompi.base.layout import Sizes
from fompi.model.bound import call_seconds, native_nbytes, row_nbytes
from fompi.model.flow_shop import Job, makespan
from fompi.model.machine import PRESETS, Level, Machine
from fompi.model.simulate import predict
from fompi.planner.candidates import (
    MOST_TOGETHER,
    UNFUSED,
    WINDOWS,
    Candidate,
    by_rate,
    candidates,
    exact_cuts,
    in_order,
    owned,
    paced,
)
from fompi.planner.estimate import estimate
from fompi.planner.explain import FAR, explain
from fompi.plans.plan import Compute
from fompi.plans.problems import Form, problem
from fompi.plans.verify import verify
from fompi.schedules.registry import STRAIGHT, shares_of, write

NAMES = [
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "all_gather_matmul 3-d",
    "matmul_reduce_scatter", "matmul_all_reduce bias", "matmul_all_to_all", "all_to_all_matmul",
    "all_gather_weight_gradient",
]  # fmt: skip


def large(operation, ranks, k=512):
    """On 1024 rows and columns of float32."""
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


def walked(made, sizes, machine):
    """Every candidate by the event walk."""
    return {c: predict(write(made, c.schedule, c.slices, sizes, c.window), machine) for c in candidates(made, machine)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_problem_has_an_explanation(name, ranks):
    made = catalogue.problems(ranks)[name]
    sizes = catalogue.sizes(made, "uneven")
    found = explain(made, sizes, Machine.load("laptop"))
    listed, judged = set(candidates(made, Machine.load("laptop"))), [one.candidate for one in found.judged]
    assert listed <= set(judged) and len(judged) == len(set(judged))
    assert all(one.order or one.window in WINDOWS for one in set(judged) - listed)
    by_walk = [one for one in found.judged if one.trace is not None]
    assert found.winner.seconds == min(one.seconds for one in by_walk) and found.winner is by_walk[0]
    assert found.gap >= -1e-9 and found.bound.seconds <= found.winner.seconds * (1 + 1e-9)
    assert {one.candidate for one in by_walk} >= {c for c in UNFUSED if c in candidates(made, found.machine)}
    verify(found.plan)
    assert found.plan.schedule == found.winner.candidate.schedule
    lines = str(found).splitlines()
    assert lines[3 + len(found.judged)].startswith(f"best: {found.winner.candidate}, ")
    assert all(line.startswith("hidden on rank ") for line in lines[4 + len(found.judged) :])


@pytest.mark.parametrize("operation", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_what_is_hidden_behind_what(operation):
    """Nothing is hidden for longer than it moves, or than the kernel runs; the longest come first."""
    made, sizes = large(operation, 4)
    found = explain(made, sizes, PRESETS["gigabit"])
    events = found.winner.trace.events
    assert found.covers and str(found.covers[0][1]) in str(found)
    assert found.covers == sorted(found.covers, key=lambda one: -one[1].seconds)
    for rank, cover in found.covers:
        ran = [e.end - e.start for e in events if e.rank == rank and e.name.startswith(f"{cover.kernel}(")]
        sign = "<" if "comes from" in cover.messages else ">"
        peer = f"{sign}{cover.messages.split()[-1]}"
        moved = [e.end - e.moves[0] for e in events if e.rank == rank and e.is_message and e.name.endswith(peer)]
        assert 0 < cover.seconds <= min(sum(ran), sum(moved)) * (1 + 1e-9)


@pytest.mark.parametrize("ranks", [64, 65, 100])
@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "matmul_reduce_scatter", "all_to_all"])
def test_with_many_ranks_nobody_sends_to_all_at_once(ranks, name):
    """Neither in what is listed, nor in what is walked in place of it: each walk takes a moment."""
    made = catalogue.problems(ranks)[name]
    sizes = Sizes(pairs=((64,) * ranks,) * ranks) if name == "all_to_all" else Sizes((64,) * ranks)
    for machine in (PRESETS["gigabit"], replace(PRESETS["gigabit"], rates=(0.25,))):
        given = made, sizes, machine
        listed = [*candidates(made, machine), *exact_cuts(*given), *by_rate(*given), *in_order(*given)]
        listed += [found for one in listed for found in paced(one, ranks)]
        at_once = [c for c in listed if c.schedule in (*STRAIGHT, "exchange") and c.window is None]
        assert bool(at_once) == (ranks <= MOST_TOGETHER)
        assert listed and (name != "broadcast" or ranks <= MOST_TOGETHER or {c.schedule for c in listed} == {"unfused"})


def test_an_exchange_across_groups_is_no_exchange_inside():
    """All that a rank sends to the other group goes through the link that the group shares."""
    made = catalogue.problems(8)["all_reduce"]
    flat = PRESETS["gigabit"]
    groups = replace(flat, levels=(Level(4, 1e-4, flat.bandwidth / 100, True),))
    rows = Sizes((1000,) * 8)
    near, far = (estimate(made, rows, machine, Candidate("exchange")) for machine in (flat, groups))
    assert near == pytest.approx(predict(write(made, "exchange", 1, rows), flat), rel=0.1)
    assert far == pytest.approx(predict(write(made, "exchange", 1, rows), groups), rel=0.1) and far > 100 * near


def test_a_plan_for_a_machine_is_the_winner_of_its_explanation():
    for ranks, rows in ((2, 64), (4, 4096), (3, 1000)):
        x, w = Spec((rows, 512), "float32", Shard(0)), Spec((512, 64 * ranks), "float32", Shard(1))
        for machine in ("gigabit", "laptop"):
            best = fompi.explain("all_gather_matmul", x, w, ranks=ranks, machine=machine).plan
            made = fompi.plan("all_gather_matmul", x, w, ranks=ranks, machine=machine)
            assert (made.schedule, made.shares, made.window) == (best.schedule, best.shares, best.window)


@pytest.mark.parametrize("machine", ["gigabit", "laptop", "h100-nvlink", "rtx4090-pcie"])
@pytest.mark.parametrize("operation", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize(("ranks", "k"), [(2, 512), (4, 4096)])
def test_few_walks_find_what_all_walks_would(operation, machine, ranks, k):
    """Within 3 % of the best of all candidates."""
    made, sizes = large(operation, ranks, k)
    where = PRESETS[machine]
    best = min(seconds for seconds in walked(made, sizes, where).values())
    assert explain(made, sizes, where).winner.seconds <= 1.03 * best


@pytest.mark.parametrize("machine", ["gigabit", "laptop", "h100-ndr", "rtx4090-pcie"])
@pytest.mark.parametrize("operation", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize(("ranks", "k"), [(2, 512), (4, 4096), (16, 1024)])
def test_in_a_hurry_what_cannot_win_is_not_walked(operation, machine, ranks, k):
    """The same winner of those that a call can take, or one as quick; what is left out is far behind."""
    made, sizes = large(operation, ranks, k)
    where = PRESETS[machine]
    found = explain(made, sizes, where, hurried=True)
    usable = [one for one in explain(made, sizes, where).judged if one.candidate.anywhere(made.size)]
    assert found.winner.trace is not None and found.winner.seconds <= 1.02 * usable[0].seconds
    by_walk = {one.candidate for one in usable if one.trace is not None}
    for one in found.judged:
        assert one.trace is not None or one.candidate not in by_walk or one.seconds > FAR * found.winner.seconds
    assert {one.candidate for one in found.judged} == {one.candidate for one in usable}


def test_groups_win_over_a_slow_link():
    made, sizes = problem("all_gather", 4, Form((1 << 20, 1), "uint8")), Sizes((1 << 20,) * 4)
    flat = Machine.load("gigabit")
    between = replace(flat, levels=(Level(2, 1e-4, flat.bandwidth / 10, True),))
    found = explain(made, sizes, between)
    assert found.winner.candidate.schedule == "hierarchical(2)"
    others = [s for c, s in walked(made, sizes, between).items() if c.schedule in ("direct", "ring", "bidirectional")]
    assert min(others) >= 1.3 * found.winner.seconds and found.gap < 0.08
    assert found.bound.what.endswith("of 2 ranks")


def test_a_small_first_slice_where_the_wire_is_slower():
    made, sizes = large("matmul_reduce_scatter", 2)
    shares = explain(made, sizes, Machine.load("gigabit")).plan.shares
    assert shares[0] == min(shares) < max(shares) or len(set(shares)) == 1 < len(shares) >= 8


def test_the_closed_forms_are_near():
    """Good for telling which candidates are worth a walk: within a factor of 1.5 where it matters."""
    for operation in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        made, sizes = large(operation, 4)
        machine = Machine.load("gigabit")
        for candidate, seconds in walked(made, sizes, machine).items():
            if candidate.schedule not in ("unfused", "sliced"):
                assert 1 / 1.5 < estimate(made, sizes, machine, candidate) / seconds < 1.5, candidate


def test_collectives_that_were_measured_on_other_ranks():
    """A formula takes the place of their curves: that is said."""
    natives = {name: ((1e6, 0.5),) for name in ("all_gather", "all_reduce")}
    measured = replace(Machine.load("gigabit"), natives=natives, natives_ranks=2)
    x, words = Spec((512, 256), "float32", Shard(0)), "measured on 2 ranks, not on 4: a formula"
    assert words in str(fompi.explain("all_gather", x, ranks=4, machine=measured))
    assert "a formula" not in str(fompi.explain("all_gather", x, ranks=2, machine=measured))


def test_one_rank_has_no_wire():
    x, w = Spec((512, 256), "float32", Shard(0)), Spec((256, 512), "float32", Shard(1))
    found = fompi.explain("all_gather_matmul", x, w, ranks=1, machine="gigabit")
    assert found.winner.seconds < 1.2 * found.bound.seconds


def test_what_a_user_types(tmp_path):
    x, w = Spec((512, 256), "float32", Shard(0)), Spec((256, 512), "float32", Shard(1))
    found = fompi.explain(fompi.all_gather_matmul, x, w, ranks=4, machine="gigabit")
    assert fompi.explain("all_gather_matmul", x, w, ranks=4, machine=Machine.load("gigabit")) == found
    assert "rank 0" in found.timeline() and found.plot().startswith("<svg")
    assert len(repr(found)) < 200 and repr(found.winner) in repr(found) and str(found.winner.candidate) in repr(found)
    best = found.text(2).splitlines()
    words = [line.split() for line in (*best[:4], *str(found).splitlines()[:4])]
    assert words[:4] == words[4:] and best[4] == f"... and {len(found.judged) - 2} more"
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
    yield from (op for op in everyone(problem, work) if not isinstance(op, Compute))


def for_powers_of_two(problem, work):
    if work.size & (work.size - 1):
        raise ValueError("ranks must be a power of two")
    yield from everyone(problem, work)


def test_schedules_of_users_are_candidates_if_they_are_right(forgotten):
    """A wrong one does less work, and would win; one that raises would end the explanation."""
    for made in (everyone, without_its_copy, for_powers_of_two):
        fompi.schedule(made.__name__, "all_gather")(made)
    found = explain(problem("all_gather", 3, Form((64, 4), "float32")), Sizes((64,) * 3), Machine.load("gigabit"))
    cuts = {one.candidate.slices for one in found.judged if one.candidate.schedule == "everyone"}
    assert cuts == {1, 4}
    assert {candidate.schedule for candidate, _ in found.refused} == {"without_its_copy", "for_powers_of_two"}
    assert "for_powers_of_two, 1 slice: refused: ValueError: ranks must be a power of two" in str(found)
    assert "without_its_copy, 1 slice: refused: PlanError: rank 0" in str(found)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("operation", ["broadcast", "all_gather", "all_reduce", "all_to_all"])
def test_no_candidate_is_said_to_beat_the_bound(operation, name):
    layout = {"broadcast": Replicate(), "all_reduce": Partial()}.get(operation, Shard(0))
    found = fompi.explain(operation, Spec((4096, 64), "float32", layout), ranks=4, machine=name)
    assert min(one.seconds for one in found.judged) >= found.bound.seconds * (1 - 1e-9)


@pytest.mark.parametrize("name", ["gigabit", "laptop"])
@pytest.mark.parametrize("operation", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_the_sums_of_the_library_take_their_time_from_kernels(operation, name):
    """On a core that both share nobody is quicker than kernels and sums together."""
    x, w = Spec((4096, 1024), "float32", Shard(1)), Spec((1024, 1024), "float32", Shard(0))
    found = fompi.explain(operation, x, w, ranks=4, machine=name)
    assert min(one.seconds for one in found.judged) >= found.bound.seconds * (1 - 1e-9)


@pytest.mark.parametrize("k", [0, 1, 4])
def test_rows_of_several_dimensions(k):
    """Columns are those of the last one; some ranks may have none."""
    x, w = Spec((8, 3, k), "float32", Shard(-1)), Spec((k, 6), "float32", Shard(0))
    for operation in ("matmul_reduce_scatter", "matmul_all_reduce"):
        fompi.verify(fompi.explain(operation, x, w, ranks=2, machine="laptop").plan)
    d, h = Spec((8, 3, 4), "float32", Shard(0)), Spec((8, 3, k), "float32", Shard(2))
    fompi.verify(fompi.explain("all_gather_weight_gradient", d, h, ranks=2, machine="laptop").plan)


def test_without_overlap_nothing_is_hidden():
    """A message counts from when it is under way, not from when it was posted."""
    x, w = Spec((2048, 1024), "float32", Shard(1)), Spec((1024, 2048), "float32", Shard(0))
    found = fompi.explain("matmul_reduce_scatter", x, w, ranks=4, machine="gigabit")
    for one in found.judged:
        if one.candidate in UNFUSED:
            assert one.proof.hidden < 0.02 * one.proof.communication, one.candidate
    assert found.winner.proof.hidden > 0.2 * found.winner.proof.communication


@pytest.mark.parametrize("rates", [(1.0, 1.0, 0.25, 1.0), (0.5, 0.9, 1.0), (1.0,) * 5, (0.01, 0.02, 1.0)])
def test_rows_that_leave_no_port_waiting(rates):
    """No other share of rows lets the slowest port be done earlier: moving a row to any other rank never does."""

    def seconds(rows):
        return max((sum(rows) + (len(rates) - 2) * n) / rate for n, rate in zip(rows, rates, strict=True))

    rows = owned(10_000, rates)
    assert sum(rows) == 10_000 and min(rows) >= 0
    best = seconds(rows)
    for source in range(len(rates)):
        for dest in range(len(rates)):
            moved = list(rows)
            step = min(50, moved[source])
            moved[source] -= step
            moved[dest] += step
            assert seconds(moved) >= best * (1 - 1e-3)


def test_an_all_reduce_by_rate_wins_with_a_slow_rank():
    slow = replace(PRESETS["gigabit"], rates=(1.0, 1.0, 0.25, 1.0))
    found = fompi.explain("all_reduce", Spec((1 << 21,), "float32", Partial()), ranks=4, machine=slow)
    assert found.winner.candidate.rows is not None and found.winner.candidate.rows[2] == 0 and found.gap < 0.04
    even = min(one.seconds for one in found.judged if one.candidate.rows is None)
    assert found.winner.seconds < even / 1.3
    assert fompi.plan("all_reduce", Spec((1 << 21,), "float32", Partial()), ranks=4, machine=slow).sizes.rows[2] == 0


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather"])
def test_of_rings_that_take_as_long_the_one_with_the_fewest_slices_is_the_best(operation):
    """A slow rank takes as long whatever the slices are: sixteen of them are sixteen times as many messages."""
    slow = replace(PRESETS["gigabit"], rates=(1.0, 1.0, 0.25, 1.0))
    layout = Partial() if operation == "reduce_scatter" else Shard(0)
    found = fompi.explain(operation, Spec((1 << 21,), "float32", layout), ranks=4, machine=slow)
    quickest = min(one.seconds for one in found.judged if one.trace is not None)
    assert found.winner.candidate.slices in (1, 2) and quickest <= found.winner.seconds <= 1.005 * quickest
    others = [one.seconds for one in found.judged[1:] if one.trace is not None]
    assert others == sorted(others)


@pytest.mark.parametrize("operation", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("k", [256, 1024, 4096])
def test_exact_cuts_are_no_worse_than_any_fixed_ones(operation, k):
    """Between two ranks, where they are exact: of as many pieces, in sixteenths.

    But for an all-reduce, whose messages cross twice, the second time among those of later slices: nearly.
    """
    most = 1.01 if operation == "matmul_all_reduce" else 1.005
    machine = replace(PRESETS["gigabit"], lanes=2, pack_rate=4e9)
    made, sizes = large(operation, 2, k)
    times = {c: predict(write(made, c.schedule, c.slices, sizes), machine) for c in exact_cuts(made, sizes, machine)}
    for slices in (1, 2, 4, (1, 3), (3, 1), (4, 2, 1, 1), (1, 1, 2, 4)):
        other = predict(write(made, "direct", slices, sizes), machine)
        assert min(times.values()) <= other * most, (slices, times)


def test_slices_for_the_library_are_cut_exactly():
    """By brute force: behind the product of the next no cut of the sixteen units into at most six is better, and none
    at all where one kernel announces them."""
    natives = {"all_reduce": ((0.0, 1e-3), (1e9, 1e-3 + 1e9 / 3e8))}
    machine = replace(PRESETS["gigabit"], natives=natives, overhead=2e-4)
    made, sizes = large("matmul_all_reduce", 4, 2048)
    by_calls, announced = [c for c in exact_cuts(made, sizes, machine) if c.schedule == "sliced"]

    def seconds(cut, calls=True):
        first = second = done = 0.0
        for n in cut:
            done += n
            first = first + call_seconds(made, machine, n * 64) if calls else call_seconds(made, machine, done * 64)
            second = max(first, second) + machine.native("all_reduce", native_nbytes(made, n * 64), 4, True, True)
        return second

    def cuts(units, most):
        yield (units,)
        for n in range(1, units) if most > 1 else ():
            yield from ((n, *rest) for rest in cuts(units - n, most - 1))

    def in_units(candidate):
        shares = shares_of("sliced", candidate.slices)
        return [16 * n // sum(shares) for n in shares]

    assert seconds(in_units(by_calls)) == pytest.approx(min(map(seconds, cuts(16, 6))))
    assert seconds(in_units(announced), False) == pytest.approx(min(seconds(cut, False) for cut in cuts(16, 16)))


# ------------------------------------------------------------------------------------------------- the order of peers


def test_an_order_of_peers_only_where_pieces_or_links_differ():
    for name in NAMES:
        made = catalogue.problems(4)[name]
        flat, slow = Machine.load("gigabit"), replace(Machine.load("gigabit"), rates=(1.0, 0.25))
        even = catalogue.sizes(made, "even")
        assert list(in_order(made, even, flat)) == []
        for machine, sizes in ((flat, catalogue.sizes(made, "uneven")), (slow, even)):
            for candidate in in_order(made, sizes, machine):
                verify(write(made, "direct", candidate.slices, sizes, candidate.window, None, candidate.order))
                assert candidate.order and not candidate.anywhere(4)


def test_the_order_is_the_best_for_a_rank_by_itself():
    """Of all orders of its pieces, made one after the other and sent one after the other."""
    made, machine = large("matmul_reduce_scatter", 5)[0], replace(Machine.load("gigabit"), bandwidth=2e9)
    sizes = Sizes((900, 30, 400, 1, 2000))
    order = next(in_order(made, sizes, machine)).order
    for rank, dests in enumerate(order):
        jobs = {
            dest: Job(call_seconds(made, machine, rows), machine.link(rank, dest).seconds(rows * max(row_nbytes(made))))
            for dest, rows in enumerate(sizes.rows)
        }
        least = min(makespan([jobs[d] for d in p]) for p in permutations(d for d in jobs if d != rank))
        assert makespan([jobs[dest] for dest in dests]) == pytest.approx(least)


def test_a_hot_expert_is_served_in_order():
    """Uneven rows of an all-to-all, behind products: the walk likes the order, and no other candidate is as good."""
    made = problem("all_to_all_matmul", 3, Form((0, 4096), "float32"), [Form((4096, 1024), "float32")])
    sizes = Sizes(pairs=((64, 1024, 16), (16, 0, 1024), (1024, 16, 128)))
    judged = explain(made, sizes, Machine.load("gigabit")).judged
    by_walk = [one for one in judged if one.trace is not None]
    with_order = min(one.seconds for one in by_walk if one.candidate.order)
    assert with_order <= min(one.seconds for one in by_walk if not one.candidate.order)


def test_many_sends_in_flight_or_few():
    """Of the best direct schedule all windows are walked."""
    made, sizes = large("matmul_all_to_all", 8)
    found = explain(made, sizes, replace(Machine.load("gigabit"), bandwidth=2e9))
    best = next(one.candidate for one in found.judged if one.candidate.schedule in STRAIGHT)
    walked = {one.candidate for one in found.judged if one.trace is not None}
    if found.winner.candidate == best:
        assert {best._replace(window=w) for w in WINDOWS} <= walked
    assert list(paced(Candidate("ring"), 8)) == [] and len(list(paced(Candidate("direct"), 3))) == 1


@pytest.mark.parametrize("operation", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_between_two_ranks_a_ring_is_direct(operation):
    """As long to the last digit, and so are both ways round in equal slices: they are no candidates."""
    made, sizes = large(operation, 2)
    machine = Machine.load("laptop")
    tried = set(candidates(made, machine))
    for one, other in (
        (Candidate("ring", (4, 2, 1)), Candidate("direct", (4, 2, 1))),
        (Candidate("bidirectional", 4), Candidate("direct", 8)),
    ):
        seconds, same = (predict(write(made, c.schedule, c.slices, sizes), machine) for c in (one, other))
        assert seconds == same and one not in tried and other in tried
    assert Candidate("bidirectional", (4, 2, 1)) in tried  # a cut that no other has
    assert {c.schedule for c in candidates(large(operation, 4)[0], machine)} >= {"ring", "bidirectional"}
