"""The schedule of a call that names none: by facts that all ranks know, without or with a machine."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import product

import catalogue
import pytest
from catalogue import problem_of
from hypothesis import given
from hypothesis import strategies as st

from fompi.base import layout
from fompi.base.layout import Sizes
from fompi.model.machine import PRESETS, Machine
from fompi.model.simulate import representatives, symmetry
from fompi.planner import choose
from fompi.planner.candidates import candidates
from fompi.planner.choose import choose_schedule
from fompi.planner.explain import MOST_EVENTS, explain
from fompi.plans.dependencies import constraints
from fompi.plans.meaning import MEANING
from fompi.plans.plan import MOST_MESSAGES, Recv, Send
from fompi.plans.problems import Form, problem
from fompi.schedules import registry
from fompi.schedules.registry import messages_per_peer


def test_the_rule_chooses_an_available_schedule():
    """It needs only the problem and rows that all ranks know."""
    for operation in MEANING:
        for ranks in (1, 2, 8):
            made = problem_of(operation, ranks)
            for rows, network, crowded in product((None, 0, 10, 10**9), (False, True), (False, True)):
                name, slices = choose_schedule(made, rows, network, None, crowded)
                assert name in registry.available(made) and slices >= 1


def test_small_sums_take_one_step_and_large_products_two_slices():
    small, large = Sizes(rows=(100,) * 4), Sizes(rows=(10**8,) * 4)
    sums, products = problem_of("all_reduce", 4), problem_of("all_gather_matmul", 4)
    assert choose.plan_for(sums, small).schedule == "exchange" and choose.plan_for(sums, large).schedule == "direct"
    for ranks, nbytes, network, wanted in (
        *((2, 100, False, "exchange"), (3, 100, True, "exchange"), (4, 100, False, "exchange")),
        *((4, 5000, False, "doubling"), (8, 100, False, "doubling"), (4, 100, True, "doubling")),
        *((5, 5000, True, "doubling"), (4, 30_000, True, "direct"), (8, 60_000, False, "doubling")),
    ):
        made = problem_of("all_reduce", ranks)
        rows = nbytes // layout.nbytes((1, *made.sent_row), made.dtype)
        assert choose_schedule(made, rows, network=network) == (wanted, 1), (ranks, nbytes, network)
    assert choose.plan_for(products, small).parts == 1 and choose.plan_for(products, large).parts == 2
    assert choose.plan_for(products, large, slices=3).parts == 3
    assert choose.plan_for(products, large, "bidirectional").parts == 2
    assert choose_schedule(sums, 10**8, network=True) == choose_schedule(products, 10**8, network=True) == ("ring", 4)
    summed = problem_of("matmul_all_reduce", 4)
    rows = (1 << 20) // layout.nbytes((1, *summed.sent_row), summed.dtype)  # of a shard of 1 MiB
    for shards, wanted in ((8, ("ring", 8)), (1, ("ring", 8)), (0.4, ("ring", 4)), (0.2, ("direct", 1))):
        assert choose_schedule(summed, int(4 * shards * rows) + 4, network=True) == wanted
    assert choose_schedule(products, 100, network=True) == ("direct", 1)
    combine = problem_of("matmul_all_to_all", 4)
    assert choose_schedule(combine, 10**8, network=True) == ("direct", 4)
    for rows, network in ((10**8, False), (100, True), (0, True), (None, True)):
        assert choose_schedule(combine, rows, network=network) == ("direct", 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_large_sums_of_half_types_between_hosts_move_half_types(dtype, ranks):
    """A ring would pass on partial sums, which are float32. Products that are summed are float32 in every schedule."""
    for operation in ("all_reduce", "reduce_scatter", "all_gather", "matmul_reduce_scatter"):
        made = catalogue.problems(ranks, dtype)[operation]
        is_direct = operation in ("all_reduce", "reduce_scatter")
        assert choose_schedule(made, 10**8, network=True) == ("direct" if is_direct else "ring", 4), operation
        if is_direct:
            plan = registry.write(made, "direct", 4)
            for program in plan.programs:
                dtypes = {b.name: b.dtype for b in program.buffers}
                assert {dtypes[op.chunk.buffer] for op in program.ops if isinstance(op, Send)} == {dtype}


def test_a_large_all_to_all_over_a_network_is_cut_into_slices():
    made = problem("all_to_all", 4, Form((8, 256), "float32"))
    row = 4 * 256
    cuts = {0: 1, 500 << 10: 1, 512 << 10: 8, 1 << 20: 8, 7 << 20: 8, 8 << 20: 16, 16 << 20: 32, 1 << 30: 64}
    for nbytes, slices in cuts.items():
        rows = 16 * nbytes // row  # from all ranks to all ranks together
        assert choose_schedule(made, rows, network=True) == ("direct" if slices == 1 else "pairwise", slices)
        assert choose_schedule(made, rows, network=True, even=False) == ("direct", slices)
        assert choose_schedule(made, rows) == ("direct", 1)
        assert choose.window_of_call(made, "direct", slices, True, False) == (None if slices == 1 else 2)
    two = problem("all_to_all", 2, Form((8, 256), "float32"))
    assert choose_schedule(two, 1 << 30, network=True) == ("direct", 1)
    assert not choose.window_of_call(two, "direct", 4, True, False)
    assert not choose.window_of_call(problem_of("all_gather", 4), "direct", 4, True, False)


@given(st.lists(st.lists(st.integers(0, 1 << 33), min_size=4, max_size=4), min_size=4, max_size=4))
def test_hints_contain_the_number_of_rows_and_whether_they_are_even(rows):
    hints = [choose.encode_rows(own, rank) for rank, own in enumerate(rows)]
    total, even = choose.decode_rows(hints)
    assert max(hints) < 1 << 7 and (total <= sum(map(sum, rows)) < 2 * total or not total)
    others = [[n for dest, n in enumerate(own) if dest != rank] for rank, own in enumerate(rows)]
    assert even == all(2 * max(counts) <= 3 * min(counts) for counts in others)


def test_ranks_proceed_in_step_in_pairwise():
    """A message starts when the send and the receive two turns before are done."""
    made = problem_of("all_to_all", 4)
    plan = registry.write(made, "pairwise", 2)
    assert plan.window == 2 and not plan.is_paced and registry.write(made, "pairwise").window == 1
    assert registry.write(made, "pairwise", 4, window=3).window == 3
    ops = plan.programs[1].ops
    sends, recvs = ([i for i, op in enumerate(ops) if isinstance(op, kind)] for kind in (Send, Recv))
    needs = constraints(ops, plan.pace).needs
    assert not set(needs[sends[1]]) & {*sends, *recvs}
    assert all({sends[j - 2], recvs[j - 2]} <= set(needs[sends[j]]) for j in range(2, 6))
    assert "pairwise" in registry.available(made) and "pairwise" not in registry.available(problem_of("all_gather", 4))


def test_which_plans_use_synchronous_sends():
    """Those with a window of several messages over the parts of a shard: a send is done when its receiver takes it."""
    made = problem_of("all_to_all", 4)
    for slices, window, paced in ((1, None, False), (4, None, False), (1, 2, False), (4, 1, False), (4, 3, True)):
        assert registry.write(made, "direct", slices, window=window).is_paced == paced
    assert registry.write(problem_of("all_gather", 4), "hierarchical(2)").is_paced
    assert not registry.write(problem_of("all_gather", 4), "ring", 4).is_paced


def test_a_ring_of_very_many_ranks_has_fewer_slices_or_is_not_chosen():
    """The number of message tags limits the number of messages to a neighbour."""
    for ranks, expected in ((512, ("ring", 4)), (513, ("ring", 1)), (2048, ("ring", 1)), (2049, ("direct", 1))):
        made = problem("all_reduce", ranks, Form((1 << 30,), "float32"))
        assert choose_schedule(made, 1 << 34, network=True) == expected
        name, slices = expected
        assert messages_per_peer(made, name, slices) <= MOST_MESSAGES
    gigabit = Machine.load("gigabit")
    listed = {(c.schedule, c.slices) for c in candidates(problem("all_reduce", 256, Form((8,), "float32")), gigabit)}
    assert ("ring", 8) in listed and ("ring", 16) not in listed


def test_products_stay_in_one_piece_if_no_core_is_free():
    for operation in ("all_gather_matmul", "matmul_all_reduce", "all_to_all_matmul", "all_gather_weight_gradient"):
        for rows in (None, 10, 10**9):
            expected = "unfused" if operation == "matmul_all_reduce" and rows == 10 else "unfused_p2p"
            assert choose_schedule(problem_of(operation, 4), rows, crowded=True) == (expected, 1)
    assert choose_schedule(problem_of("all_reduce", 4), 10, crowded=True) == ("exchange", 1)
    assert choose_schedule(problem_of("all_gather", 4), 10, crowded=True) == ("direct", 1)
    assert choose_schedule(problem_of("all_gather_matmul", 1), 10, crowded=True) == ("direct", 1)


def test_the_model_chooses_once_for_each_power_of_two():
    """Most new sizes cost nothing. Without the number of rows, the rule chooses."""
    machine = Machine.load("gigabit")
    made = problem("matmul_reduce_scatter", 4, Form((4096, 512), "float32"), [Form((512, 1024), "float32")])
    first = choose_schedule(made, 4096, True, machine)
    assert first == choose_schedule(made, 5000, True, machine) == choose_schedule(made, 8191, True, machine)
    assert choose_schedule(made, 0, True, machine) == choose_schedule(made, 0, True)
    assert choose_schedule(made, None, True, machine) == choose_schedule(made, None, True)


def test_the_model_chooses_pairwise_only_for_even_ranks():
    """The simulation has even rows, so it may find that `pairwise` is the best."""
    for size, name in product((8, 72), PRESETS):
        made = problem("all_to_all", size, Form((8, 256), "float32"))
        assert choose_schedule(made, 1 << 20, True, Machine.load(name), even=False)[0] != "pairwise"
        if size == 72 or name == "gigabit":
            assert choose_schedule(made, 1 << 20, True, Machine.load(name))[0] == "pairwise"


def test_calls_of_many_ranks_send_direct_messages_one_after_the_other():
    """The model has no candidate that sends to more than 64 peers at once."""
    machine = Machine.load("gigabit")
    made = problem_of("matmul_all_to_all", 72)
    sizes = Sizes(pairs=((4,) * 72,) * 72)
    usable = [c for c in candidates(made, machine) if c.fits_call(72)]
    assert {"unfused", "unfused_p2p", "direct"} <= {c.schedule for c in usable}
    explanation = explain(made, sizes, machine, for_call=True)
    windows = {judged.candidate.schedule: judged.candidate.window for judged in explanation.judged}
    assert windows["direct"] == 1
    assert [choose.window_of_call(made, name, 1, True, True) for name in ("direct", "ring")] == [1, None]
    assert choose.window_of_call(problem_of("matmul_all_to_all", 64), "direct", 1, True, True) is None


def test_a_choice_with_one_slow_rank_simulates_few_ranks(monkeypatch):
    machine = replace(Machine.load("h100-ndr"), rates=(1.0,) * 7 + (0.5,))
    made = problem("all_reduce", 256, Form((8,), "float32"))
    simulated = []

    def counted(plan, on, **how):
        simulated.append(symmetry(plan, plan.sizes, on))
        return representatives(plan, on, **how)

    monkeypatch.setattr(import_module("fompi.planner.explain"), "representatives", counted)
    name, _ = choose_schedule(made, 1 << 24, machine=machine)
    assert simulated and max(simulated) <= 8 and registry.is_available(made, name)


@pytest.mark.parametrize(
    ("operation", "ranks", "name"),
    [
        *(("reduce_scatter", 4, "laptop"), ("reduce_scatter", 8, "gigabit"), ("reduce_scatter", 4, "h100-nvlink")),
        *(("all_reduce", 8, "laptop"), ("all_reduce", 4, "gigabit"), ("all_reduce", 8, "h100-nvlink")),
        *(("all_gather", 4, "laptop"), ("all_gather", 8, "gigabit"), ("all_gather", 8, "h100-nvlink")),
    ],
)
def test_the_choice_of_a_call_is_near_the_best(operation, ranks, name):
    """A call simulates few candidates, the best by estimate. Its choice takes at most 1.1 times as long as the best."""
    machine, made = Machine.load(name), problem(operation, ranks, Form((1 << 13, 1 << 12), "float32"))
    rows = 1 << (13 if made.row else 25)
    sizes = Sizes((rows // ranks,) * ranks)
    judged = explain(made, sizes, machine, events=MOST_EVENTS).judged
    best = min(trace.seconds for candidate, _, _, trace in judged if trace is not None and candidate.fits_call(ranks))
    chosen = registry.write(made, *choose_schedule(made, rows, machine=machine), sizes)
    assert representatives(chosen, machine).seconds <= 1.1 * best


@pytest.mark.parametrize("operation", ["matmul_reduce_scatter", "all_gather", "all_reduce"])
def test_a_call_of_many_ranks_is_judged_on_few(operation, monkeypatch):
    """The choice for 128 ranks, simulated on the first 32, is within 4 % of the choice simulated on all."""
    others = [Form((64, 256), "float32")] if "matmul" in operation else []
    made = problem(operation, 128, Form((4096, 64), "float32"), others)
    sizes, machine = Sizes((32,) * 128), Machine.load("gigabit")
    quick = explain(made, sizes, machine, simulated=2, most_ops=600, for_call=True).winner
    assert quick.trace is None, "its time is that of fewer ranks, scaled"
    monkeypatch.setattr("fompi.planner.explain.CALL_RANKS", 128)
    whole = explain(made, sizes, machine, simulated=2, most_ops=600, for_call=True)
    same = next(judged for judged in whole.judged if judged.candidate == quick.candidate)
    assert same.seconds <= 1.04 * whole.winner.seconds and quick.seconds == pytest.approx(same.seconds, rel=0.1)
