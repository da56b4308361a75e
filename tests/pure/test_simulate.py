"""The simulation, on machines that are so simple that a formula gives the time of a plan."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise

import catalogue
import pytest
from plan_texts import with_program

import fompi
from fompi import Shard, Spec
from fompi.base.errors import LayoutError
from fompi.base.layout import Sizes
from fompi.model.lower_bound import library_nbytes
from fompi.model.machine import Level, Machine
from fompi.model.simulate import predict, representatives, simulate, symmetry
from fompi.planner.candidates import Candidate
from fompi.planner.estimate import estimate
from fompi.planner.explain import explain
from fompi.plans.dependencies import message_numbers
from fompi.plans.meaning import ROOTED
from fompi.plans.plan import Recv, Send
from fompi.plans.problems import Form, problem
from fompi.plans.staged import is_mirror, staged
from fompi.schedules import registry

ROWS, K, N = 16, 3, 4  # rows of x on each rank, columns of x, columns of w, as in the catalogue
SHARD = ROWS * K * 8  # bytes
FLOPS = 2 * ROWS * K * N


def machine(message, matmul=0.0, latency=0.0):
    """A machine on which a message with one shard takes `message` seconds, and its product `matmul` seconds."""
    rate = FLOPS / matmul if matmul else float("inf")
    return Machine("simple", latency, SHARD / message, rate, float("inf"), 0.0)


def timed(name, schedule, machine, size, slices=1, window=None):
    """The predicted trace of a problem of the catalogue."""
    problem = catalogue.problems(size)[name]
    sizes = Sizes(pairs=((ROWS,) * size,) * size) if problem.moves == "all_to_all" else Sizes(rows=(ROWS,) * size)
    return simulate(registry.write(problem, schedule, slices, sizes, window), machine)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_a_ring_takes_one_message_after_the_other(size):
    """An all-gather takes (n - 1) (latency + bytes / bandwidth), and all ranks do the same."""
    trace = timed("all_gather", "ring", machine(3.0, latency=0.25), size)
    assert trace.seconds == pytest.approx((size - 1) * 3.25)
    assert {trace.summary(rank).nbytes for rank in range(size)} == {2 * (size - 1) * SHARD}


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_silent_port_passes_a_burst_at_once(size):
    """In a ring a port is silent before its first message, and for one latency between two messages."""
    bucket = replace(machine(3.0, latency=0.25), burst=1.0)
    assert timed("all_gather", "ring", bucket, size).seconds == pytest.approx((size - 1) * 3.0 + 0.25 - 1.0)
    deep = replace(bucket, burst=10.0)
    expected = max(0.25 * (size - 1), (size - 1) * 3.0 + 0.25 - 10.0)
    assert timed("all_gather", "ring", deep, size).seconds == pytest.approx(expected)


def test_ranks_that_share_a_port_share_its_burst():
    """Two ranks of each group send at once through one port. The burst counts once, not once per rank."""
    shared = replace(machine(1.0), levels=(Level(2, 0.0, SHARD / 10.0, True, (), 4.0),))
    assert timed("all_gather", "direct", shared, 4).seconds == pytest.approx(4 * 10.0 - 4.0)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_a_bidirectional_ring_is_no_slower_than_a_ring(size):
    """Both directions share the link, so the bytes take as long. Only waits for the neighbour can be saved."""
    one_way = timed("all_gather", "ring", machine(3.0, latency=0.25), size).seconds
    both_ways = timed("all_gather", "bidirectional", machine(3.0, latency=0.25), size).seconds
    assert (size - 1) * 3.0 + 0.25 <= both_ways + 1e-9 <= one_way + 2e-9


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "reduce_scatter"])
def test_direct_messages_take_turns_on_the_link(name, size):
    """One permutation at a time, so no message shares a port: (n - 1) (bytes / bandwidth + latency)."""
    trace = timed(name, "direct", machine(3.0, latency=0.25), size, window=1)
    assert trace.seconds == pytest.approx((size - 1) * 3.25)
    for rank in range(size):
        for lane in ("send", "recv"):
            ends = sorted(e.end for e in trace.events if e.rank == rank and e.lane.startswith(lane))
            assert [b - a for a, b in pairwise(ends)] == pytest.approx([3.25] * (size - 2))


@pytest.mark.parametrize("ports", [1, 2, 3, 8])
def test_several_ports_of_a_rank(ports):
    """With n ports, n messages to different peers go at full rate. A ring uses one port."""
    single, size = machine(3.0, latency=0.25), 5
    several = replace(single, ports=ports)
    at_once = timed("all_gather", "direct", several, size)
    assert at_once.seconds == pytest.approx(3.0 * (size - 1) / min(ports, size - 1) + 0.25)
    rings = [timed("all_gather", "ring", on, size).seconds for on in (single, several)]
    assert rings[0] == rings[1]
    problem = catalogue.problems(size)["all_gather"]
    sizes = catalogue.sizes(problem, "even")
    quick = replace(several, latency=0.0)
    estimated = [estimate(problem, sizes, quick, Candidate(name)) for name in ("direct", "ring")]
    assert estimated[0] / estimated[1] == pytest.approx(1 / min(ports, size - 1), rel=0.1)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "reduce_scatter"])
def test_direct_messages_share_the_ports(name, size):
    """Without a window all messages move at once: the same bytes, one latency, and all end together."""
    trace = timed(name, "direct", machine(3.0, latency=0.25), size)
    assert trace.seconds == pytest.approx((size - 1) * 3.0 + 0.25)
    sends = [e.end for e in trace.events if e.lane.startswith("send")]
    assert sends == pytest.approx([(size - 1) * 3.0 + 0.25] * len(sends))


@pytest.mark.parametrize("size", [3, 5])
def test_a_rank_that_receives_from_all_is_the_bottleneck(size):
    """Its port is the limit, although all other ports are free."""
    problem = catalogue.problems(size)["all_to_all"]
    to_the_last = Sizes(pairs=tuple((0,) * (size - 1) + (ROWS,) for _ in range(size)))
    trace = simulate(registry.write(problem, "direct", 1, to_the_last), machine(3.0))
    assert trace.seconds == pytest.approx((size - 1) * 3.0)


@pytest.mark.parametrize("size", [2, 4])
def test_unfused_is_the_collective_and_then_the_kernel(size):
    """Nothing is hidden: (n - 1) latency + (own + gathered bytes) / bandwidth, then n products in one call."""
    trace = timed("all_gather_matmul", "unfused", machine(3.0, matmul=5.0, latency=0.25), size)
    assert trace.seconds == pytest.approx((size - 1) * 0.25 + (1 + size) * 3.0 + size * 5.0)
    summary = trace.summary(0)
    assert summary.hidden == pytest.approx(0) and summary.compute == pytest.approx(size * 5.0)
    assert summary.exposed == pytest.approx(summary.communication)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_ring_hides_messages_behind_products(size):
    """If messages are faster, only the products count. If they are slower: all messages, then one product."""
    hidden = timed("all_gather_matmul", "ring", machine(2.0, matmul=5.0), size)
    assert hidden.seconds == pytest.approx(size * 5.0)
    assert all(hidden.summary(rank).exposed == pytest.approx(0) for rank in range(size))
    assert all(hidden.summary(rank).overlap == pytest.approx(1) for rank in range(size))
    bound_by_messages = timed("all_gather_matmul", "ring", machine(5.0, matmul=2.0), size)
    assert bound_by_messages.seconds == pytest.approx((size - 1) * 5.0 + 2.0)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("schedule", ["direct", "ring"])
def test_a_reduce_scatter_ends_with_one_sum(schedule, size):
    """Messages take almost no time: n products, n - 1 sums, and only one sum after the last product."""
    trace = timed("matmul_reduce_scatter", schedule, machine(1e-9, matmul=6.0), size)
    one_sum = ROWS * N / FLOPS * 6.0
    assert trace.seconds == pytest.approx(size * 6.0 + (size - 1) * one_sum, rel=1e-6)
    for rank in range(size):
        kernels = [e for e in trace.events if e.rank == rank and e.is_compute]
        last_product = max(e.end for e in kernels if e.name.startswith("matmul"))
        assert [e.name[:3] for e in kernels if e.start >= last_product] == ["add"]
        assert not [e for e in trace.events if e.rank == rank and e.lane.startswith("send") and e.start >= last_product]


def test_slices_let_a_native_collective_overlap():
    """With two slices, the second one moves while the first one is multiplied."""
    whole = timed("all_gather_matmul", "unfused", machine(1.0, matmul=5.0), 4)
    halves = timed("all_gather_matmul", "sliced", machine(1.0, matmul=5.0), 4, 2)
    assert whole.summary(0).hidden == 0 and halves.summary(0).hidden > 0
    assert halves.seconds < whole.seconds


def test_a_window_paces_the_sends():
    """With a window of 1, a send is posted after the previous one is done."""
    problem = catalogue.problems(5)["all_gather"]
    sizes = Sizes(rows=(ROWS,) * 5)
    paced = simulate(registry.write(problem, "direct", 1, sizes, window=1), machine(3.0))
    for rank in range(5):
        sends = sorted((e.start, e.end) for e in paced.events if e.rank == rank and e.lane.startswith("send"))
        assert all(end <= start for (_, end), (start, _) in pairwise(sends))


def test_sizes_replace_those_of_the_plan():
    problem = catalogue.problems(3)["all_gather"]
    plan = registry.write(problem, "ring", 1, Sizes(rows=(1, 1, 1)))
    assert simulate(plan, machine(3.0), Sizes(rows=(ROWS,) * 3)).seconds == pytest.approx(6.0)
    assert simulate(plan, machine(3.0, latency=0.5), Sizes(rows=(0,) * 3)).seconds == pytest.approx(1.0)


@pytest.mark.parametrize("name", catalogue.problems(1))
def test_every_op_is_in_the_trace(name, tmp_path):
    """Each op appears once. Kernels of a rank do not overlap. The saved file has one process per rank."""
    problem = catalogue.problems(3)[name]
    for schedule in registry.available(problem):
        plan = registry.write(problem, schedule, 2, catalogue.sizes(problem, "uneven"))
        trace = simulate(plan, Machine.load("laptop"))
        assert trace.kind == "predicted" and "laptop" in trace.title and schedule in trace.title
        for program in plan.programs:
            events = sorted((e for e in trace.events if e.rank == program.rank), key=lambda e: e.op)
            assert [e.name for e in events] == [str(op) for op in program.ops]
            assert all(0 <= e.start <= e.end for e in events)
            kernels = sorted((e.start, e.end) for e in events if e.lane == "compute")
            assert all(end <= start for (_, end), (start, _) in pairwise(kernels))
        trace.save(tmp_path / "step.json")
        entries = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
        assert len([e for e in entries if e["name"] == "process_name"]) == 3


def test_a_prediction_is_the_same_every_time():
    problem = catalogue.problems(4)["matmul_all_reduce bias"]
    plan = registry.write(problem, "bidirectional", 2, Sizes(rows=(5, 0, 7, 1)))
    assert simulate(plan, Machine.load("gigabit")) == simulate(plan, Machine.load("gigabit"))


@pytest.mark.parametrize(("name", "size"), [("all_gather", 3), ("all_to_all", 5), ("reduce_scatter", 8)])
@pytest.mark.parametrize("burst", [0.4, 1.0, 5.0])
def test_messages_that_begin_together_share_the_bursts(name, size, burst):
    """All ranks end together. So the prediction for the representatives is the same."""
    bucket = replace(machine(3.0, latency=0.25), burst=burst)
    trace = timed(name, "direct", bucket, size)
    ends = {max(event.end for event in trace.events if event.rank == rank) for rank in range(size)}
    assert max(ends) == pytest.approx(min(ends)) and trace.seconds == pytest.approx(max(ends))
    assert trace.seconds == pytest.approx(0.25 + max(0.0, (size - 1) * 3.0 - burst))
    plan = registry.write(catalogue.problems(size)[name], "direct", 1)
    sizes = Sizes(pairs=((ROWS,) * size,) * size) if name == "all_to_all" else Sizes(rows=(ROWS,) * size)
    assert predict(plan, bucket, sizes) == pytest.approx(trace.seconds)


def test_a_burst_that_one_message_does_not_need_is_left_for_others():
    """The burst of rank 2 is 4 seconds. Rank 0 sends it a message of 1 second, and rank 1 a message of 5 seconds."""
    rows = ((0, 0, ROWS), (0, 0, 5 * ROWS), (0, 0, 0))
    plan = registry.write(catalogue.problems(3)["all_to_all"], "direct")
    bucket = replace(machine(1.0), burst=4.0)
    assert simulate(plan, bucket, Sizes(pairs=rows)).seconds == pytest.approx(2.0)


def test_uneven_columns_are_no_symmetry():
    """explain and simulate predict the same time for one plan."""
    x, w = Spec((2, 3), "float32", Shard(1)), Spec((3, 1024), "float32", Shard(0))
    explained = fompi.explain("matmul_all_reduce", x, w, ranks=2, machine="laptop")
    for row in explained.judged:
        assert row.seconds == pytest.approx(simulate(explained.plan_of(row.candidate), "laptop").seconds), row


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("all_to_all", Sizes((4, 4)), "takes Sizes with the pairs of 2 x 2 ranks"),
        ("all_to_all", Sizes(pairs=((4, 4), (4,))), "takes Sizes with the pairs of 2 x 2 ranks"),
        ("all_gather", Sizes(pairs=((4, 4), (4, 4))), "takes Sizes with the rows of each rank"),
        ("all_gather", Sizes((4, -4)), "rows must be 0 or more"),
        ("all_to_all", Sizes(pairs=((4, 4), (4, -1))), "rows must be 0 or more"),
    ],
)
def test_sizes_of_another_kind_are_refused(name, sizes, words):
    plan = registry.write(catalogue.problems(2)[name], "direct")
    for function in (simulate, predict):
        with pytest.raises(LayoutError, match=words):
            function(plan, Machine.load("gigabit"), sizes)


def test_64_ranks():
    trace = timed("all_gather_matmul", "ring", machine(2.0, matmul=5.0), 64)
    assert trace.seconds == pytest.approx(64 * 5.0)
    assert len(trace.events) == 64 * (64 + 2 * 63)


def test_sizes_for_another_number_of_ranks_are_refused():
    plan = registry.write(catalogue.problems(2)["all_gather"], "ring")
    for function in (simulate, predict):
        with pytest.raises(LayoutError, match="sizes for 3 ranks, but the plan has 2"):
            function(plan, Machine.load("gigabit"), Sizes((1, 2, 3)))
        with pytest.raises(LayoutError, match="sizes for 1 ranks, but the plan has 2"):
            function(plan, Machine.load("gigabit"), Sizes((1,)))


def test_many_ops_in_one_lane():
    """A lane of thousands of messages needs no recursion."""
    assert timed("all_gather", "direct", machine(3.0), 2, slices=3000).seconds == pytest.approx(3.0)


# ------------------------------------------------------------------------------------------------ topology


def grouped(ranks, ratio, shared):
    """A machine with groups of `ranks` ranks. Links between groups are `ratio` times slower than inside."""
    inside = machine(1.0)
    return replace(inside, levels=(Level(ranks, 0.0, inside.bandwidth / ratio, shared),))


@pytest.mark.parametrize("schedule", ["direct", "ring", "hierarchical(2)"])
def test_a_shared_link_between_groups(schedule):
    """An all-gather on 2 x 2 ranks.

    direct: 4 shards leave each group. ring: 3 shards cross in each direction, one after the other. hierarchical: 2
    shards cross, which is the minimum, and the last one is then passed on inside the group.
    """
    crossing = {"direct": 4, "ring": 3, "hierarchical(2)": 2}[schedule]
    seconds = timed("all_gather", schedule, grouped(2, 10.0, True), 4).seconds
    assert crossing * 10.0 <= seconds <= crossing * 10.0 + 2.0


def test_separate_links_between_groups():
    """Each rank has its own slow link. direct sends 2 shards over it, hierarchical 1."""
    assert timed("all_gather", "direct", grouped(2, 10.0, False), 4).seconds == pytest.approx(20.0)
    assert timed("all_gather", "hierarchical(2)", grouped(2, 10.0, False), 4).seconds == pytest.approx(11.0)


def test_a_rank_with_a_slow_port():
    """It receives three shards at a quarter of the rate. Its senders use the rest of their ports for other peers."""
    slow = replace(machine(1.0), rates=(1.0, 1.0, 1.0, 0.25))
    assert timed("all_gather", "direct", slow, 4).seconds == pytest.approx(12.0)


def test_a_sampled_curve():
    """A shard takes 10 s, and half a shard 9 s, by the curve. 7 s of this are latency."""
    sampled = replace(machine(1.0, latency=7.0), curve=((0.0, 7.0), (SHARD / 2, 9.0), (SHARD, 10.0)))
    assert timed("all_gather", "ring", sampled, 2).seconds == pytest.approx(10.0)
    assert timed("all_gather", "direct", sampled, 2, slices=2).seconds == pytest.approx(2.0 + 2.0 + 7.0)


def test_the_cost_of_messages_beside_a_kernel():
    """One shard arrives and one leaves during the first product: 2 x (0.5 + 1) s more."""
    busy = replace(machine(2.0, matmul=5.0), cpu_message=0.5, cpu_byte=1.0 / SHARD, poll=0.5)
    assert timed("all_gather_matmul", "direct", busy, 2).seconds == pytest.approx(5.0 + 3.0 + 5.0)
    assert timed("all_gather_matmul", "direct", replace(busy, lanes=2), 2).seconds == pytest.approx(10.0)
    waiting = replace(machine(8.0, matmul=5.0), cpu_message=0.5, cpu_byte=1.0 / SHARD, poll=0.5)
    assert timed("all_gather_matmul", "direct", waiting, 2).seconds == pytest.approx(
        8.0 + 5.0
    )  # the core is idle when they end


@pytest.mark.parametrize(("poll", "seen"), [(0.0, 2.25), (0.5, 2.5), (2.0, 4.0), (6.0, 5.0)])
def test_when_a_core_that_computes_sees_a_message(poll, seen):
    """It polls every `poll` seconds after the kernel has begun, and at the end of the kernel."""
    trace = timed("all_gather_matmul", "direct", replace(machine(2.25, matmul=5.0), poll=poll), 2)
    assert [e.end for e in trace.events if e.lane.startswith("recv")] == pytest.approx([seen, seen])


def test_operands_are_packed_in_every_call():
    """The rows are packed once. The weight is packed once per call."""
    packing = replace(machine(0.001, matmul=4.0), pack_rate=K * N * 8 / 1.0)
    rows = 2 * ROWS / N
    assert timed("all_gather_matmul", "direct", packing, 2).seconds == pytest.approx(2 * 4.0 + rows + 2 * 1.0)
    assert timed("all_gather_matmul", "direct", packing, 2, slices=4).seconds == pytest.approx(2 * 4.0 + rows + 5 * 1.0)


def test_sums_beside_kernels():
    """With two lanes a sum costs the kernel nothing. On one core it delays the kernel."""
    shared = machine(1e-9, matmul=6.0)
    one_sum = ROWS * N / FLOPS * 6.0
    assert timed("matmul_reduce_scatter", "direct", shared, 4).seconds == pytest.approx(4 * 6.0 + 3 * one_sum)
    apart = timed("matmul_reduce_scatter", "direct", replace(shared, lanes=2), 4)
    assert apart.seconds == pytest.approx(4 * 6.0 + one_sum)


# ------------------------------------------------------------------------------------------------ symmetry


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", catalogue.problems(1))
def test_some_ranks_represent_all(name, size):
    """The prediction for the representatives is that for all ranks. On 4 and 8 ranks half of the schedules say so."""
    problem = catalogue.problems(size)[name]
    sizes = catalogue.sizes(problem, "even")
    flat = Machine.load("gigabit")
    groups = replace(flat, levels=(Level(2, 1e-4, 1e7, True),))
    every = registry.available(problem)
    for schedule in every[(len(name) + size // 4) % 2 :: 2] if size >= 4 else every:
        plan = registry.write(problem, schedule, 2, sizes)
        for on in (flat, groups) if size == 4 else (flat,):
            step = symmetry(plan, sizes, on)
            assert predict(plan, on) == pytest.approx(simulate(plan, on).seconds, rel=1e-9), (schedule, step)
            differs = problem.packed or problem.columns or problem.operation in ROOTED or schedule in registry.WHOLE
            if on is flat and not differs:
                assert step == plan.group_size, schedule


@pytest.mark.parametrize("root", range(8))
def test_a_broadcast_has_a_root(root):
    made = problem("broadcast", 8, Form((24, 2), "float32"), root=root)
    plan = registry.write(made, "ring", 8, Sizes((3,) * 8))
    assert symmetry(plan, plan.sizes, machine(1.0)) == 8
    assert predict(plan, machine(1.0)) == pytest.approx(simulate(plan, machine(1.0)).seconds)


def test_ranks_that_differ_are_all_simulated():
    problem = catalogue.problems(4)["all_gather_matmul"]
    even, uneven = Sizes((4,) * 4), Sizes((4, 4, 4, 5))
    plan, flat = registry.write(problem, "ring", 1, even), machine(1.0)
    assert symmetry(plan, even, flat) == 1 and symmetry(plan, uneven, flat) == 4
    assert symmetry(plan, even, replace(flat, rates=(1.0, 0.5))) == 4
    assert symmetry(plan, even, replace(flat, levels=(Level(3, 0.0, 1.0),))) == 4
    assert symmetry(plan, even, replace(flat, rates=(1.0, 0.5)).at_slowest(4)) == 1
    assert (
        symmetry(plan, even, replace(flat, levels=(Level(2, 0.0, 1.0), Level(64, 0.0, 1.0)))) == 2
    )  # 64 ranks: no effect on 4
    broken = with_program(plan, replace(plan.programs[1], ops=plan.programs[1].ops[:-1]))
    assert symmetry(broken, even, flat) == 4


def test_the_trace_of_many_ranks_shows_the_representatives():
    trace = timed("all_gather", "ring", machine(3.0, latency=0.25), 512)
    assert trace.seconds == pytest.approx(511 * 3.25) and {e.rank for e in trace.events} == {0}
    assert trace.title.endswith("; ranks 0 to 0 of 512, the other ranks do the same")


@pytest.mark.parametrize("schedule", ["direct", "bidirectional", "unfused"])
def test_many_ranks_that_differ_by_one_row(schedule, monkeypatch):
    """All ranks get the greater number of rows. The prediction is then a little too long."""
    problem, on = catalogue.problems(6)["all_gather_matmul"], replace(machine(1.0, matmul=2.0), lanes=2)
    plan = registry.write(problem, schedule, 1, Sizes((ROWS + 1, ROWS + 1, ROWS, ROWS, ROWS, ROWS)))
    seconds = simulate(plan, on).seconds
    for name in ("FEW_RANKS", "MOST_RANKS"):
        monkeypatch.setattr(sys.modules["fompi.model.simulate"], name, 5)
    assert {e.rank for e in simulate(plan, on).events} == {0}
    assert seconds * (1 - 1e-9) <= predict(plan, on) <= seconds * (ROWS + 1) / ROWS
    slow = replace(on, rates=(1.0, 0.5))
    assert {e.rank for e in simulate(plan, slow).events} == set(range(6))


@pytest.mark.parametrize(
    ("operation", "moves", "expected"),
    [("matmul_reduce_scatter", "reduce_scatter", [5.0, 1.0]), ("all_gather_matmul", "all_gather", [1.0, 5.0])],
)
def test_a_collective_behind_a_kernel_has_a_curve_of_its_own(operation, moves, expected):
    """The library moves little while a product runs. Of two slices, only one runs beside a product of the other."""
    x, w = {
        "reduce_scatter": (Spec((64, 8), "float32", Shard(1)), Spec((8, 4), "float32", Shard(0))),
        "all_gather": (Spec((64, 8), "float32", Shard(0)), Spec((8, 4), "float32", Shard(1))),
    }[moves]
    plan = fompi.plan(operation, x, w, ranks=2, schedule="sliced", slices=2)
    machine = Machine("m", 0.0, 1e9, 1e9, 1e9, 10.0, lanes=2, collectives={moves: ((0.0, 1.0),)})
    behind = replace(machine, collectives_behind={moves: ((0.0, 5.0),)})
    first, second = (
        [e.end - e.start - e.waited for e in fompi.simulate(plan, m).events if e.rank == 0 and not e.is_compute]
        for m in (machine, behind)
    )
    assert first == [1.0, 1.0] and second == expected


@pytest.mark.parametrize(
    ("name", "moves", "share"),
    [("matmul_reduce_scatter", "reduce_scatter", 3 / 5), ("all_gather_matmul", "all_gather", 3 / 5),
     ("matmul_all_reduce", "all_reduce", 3 / 4), ("matmul_all_to_all", "all_to_all", 3 / 8)],
)  # fmt: skip
def test_collectives_one_after_the_other_take_the_time_of_the_link(name, moves, share):
    """A curve holds for collectives after a rest, when buffers take in small ones at once."""
    made = catalogue.problems(4)[name]
    plan = registry.write(
        made, "sliced", 4, Sizes(pairs=((64,) * 4,) * 4) if moves == "all_to_all" else Sizes((64,) * 4)
    )
    machine = Machine("m", 0.0, 1e3, 1e15, 1e15, 1e-9, lanes=2, collectives={moves: ((0.0, 1e-3),)})
    collectives = [e for e in simulate(plan, machine).events if e.rank == 0 and not e.is_compute]
    seconds = [e.end - e.start - e.waited for e in collectives]
    moved = share * library_nbytes(made, 256 / 4)
    assert seconds == pytest.approx([1e-3, *[moved / 1e3] * 3])


def test_a_curve_behind_kernels_includes_the_polls():
    """On one core: the rank sees the end of any other collective only at its next poll."""
    x, w = Spec((64, 8), "float32", Shard(1)), Spec((8, 4), "float32", Shard(0))
    plan = fompi.plan("matmul_reduce_scatter", x, w, ranks=2, schedule="sliced", slices=2)
    curve = {"reduce_scatter": ((0.0, 1.0),)}
    machine = Machine("m", 0.0, 1.0, 1e9, 1e9, 10.0, lanes=1, collectives=curve, poll=4.0)
    polled, measured = (
        next(e.end - e.start - e.waited for e in fompi.simulate(plan, m).events if e.rank == 0 and not e.is_compute)
        for m in (machine, replace(machine, collectives_behind=curve))
    )
    assert (polled, measured) == (4.0, 1.0)


@pytest.mark.parametrize("name", ["reduce_scatter", "all_reduce"])
def test_a_sum_of_a_group_leaves_before_all_sums_have_begun(name):
    """With two sends to a peer in flight, pieces go around the group in sequence. So the slow link starts early."""
    on = replace(machine(1.0), levels=(Level(4, 0.0, SHARD / 10.0, True),))
    made = catalogue.problems(8)[name]
    sizes = Sizes((64,) * 8)
    plan = registry.write(made, "hierarchical(4)", 8, sizes)
    assert plan.window and plan.pace.by_peer and not registry.write(made, "direct", 8, sizes, 1).pace.by_peer
    first = {}
    for window in (plan.window, None):
        events = simulate(replace(plan, window=window), on).events
        first[window] = min(e.start for e in events if e.lane == f"send to {(e.rank + 4) % 8}")
    assert first[plan.window] < 0.6 * first[None]


# ------------------------------------------------------------------------------------------------------ devices


@pytest.mark.parametrize(("message", "until_sum"), [(3.0, 0.1 + 1 + 0.5 + 4.0 + 0.1), (0.15, 0.1 + 1 + 1 + 0.01)])
def test_a_device_is_launched_and_polled(message, until_sum):
    """A message leaves once the host has seen the product. The sum is launched when the message is there.

    Or the sum waits for the own product, in another stream: launches are early then. A row of y is N / K of one of x.
    """
    expected = until_sum + ROWS * N / FLOPS
    device = replace(machine(message, matmul=1.0), lanes=2, launch=0.1, event=0.01, poll=0.5)
    assert timed("matmul_reduce_scatter", "direct", device, 2).seconds == pytest.approx(expected)


def test_launches_follow_each_other():
    """More kernels than the device has work for: the last one is launched after all others."""
    device = replace(machine(1e-9, matmul=1e-9), lanes=2, launch=1.0)
    trace = timed("matmul_reduce_scatter", "direct", device, 2, slices=4)
    products = [event for event in trace.events if event.rank == 0 and event.lane == "compute"]
    assert [event.start for event in products] == pytest.approx([*range(1, len(products) + 1)])


@pytest.mark.parametrize(("slices", "first"), [(1, 2.0), (2, 1.0)])
def test_one_kernel_announces_its_products(slices, first):
    """There is one launch and one call. The product for the other rank leaves by slices, and all take twice as long."""
    device = replace(machine(3.0, matmul=1.0), lanes=2, launch=0.1, event=0.01, poll=0.5, overhead=0.2, announced=0.5)
    plan = registry.write(catalogue.problems(2)["matmul_reduce_scatter"], "direct", slices, Sizes((ROWS,) * 2))
    trace = representatives(plan, device, announces=True)
    last_sum = ROWS * N / FLOPS / slices + 0.2
    assert trace.seconds == pytest.approx(0.1 + 0.2 + first + 0.5 + 4.0 + 0.1 + last_sum)
    products = [event for event in trace.events if event.lane == "compute" and event.rank == 0]
    assert [e.end - e.start for e in products] == pytest.approx([0.2 + first, *[first] * (slices - 1), 2.0])
    assert products[0].start == 0.1 and all(a.end == b.start for a, b in pairwise(products))
    waves = replace(device, wave=3 * ROWS * N // 2)  # there is work for 4/3 of these
    products = [e for e in representatives(plan, waves, announces=True).events if e.lane == "compute" and e.rank == 0]
    assert products[-1].end == pytest.approx(0.1 + 0.2 + 6.0)


@pytest.mark.parametrize("name", ["matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all"])
def test_products_are_announced_where_calls_are_dear(name):
    """The cost decides, of calls and of the one kernel. Calls that are not bound cannot announce."""
    device = replace(machine(3.0, matmul=3.0), lanes=2, launch=0.1, poll=0.01, overhead=0.5)
    form = catalogue.problems(2)[name]
    sizes = Sizes(pairs=((ROWS,) * 2,) * 2) if form.moves == "all_to_all" else Sizes(rows=(ROWS,) * 2)

    def winner(share):
        found = explain(form, sizes, replace(device, announced=share), events=20_000)
        assert all(judged.seconds >= 0.999 * found.lower_bound.seconds for judged in found.judged)
        assert any(judged.candidate.announced for judged in found.judged) == bool(share)
        return found.winner.candidate

    assert winner(1.0).announced and "announced" in str(winner(1.0)) and winner(1.0).slices != 1
    assert not winner(0.3).announced and not winner(0.0).announced
    called = explain(form, sizes, replace(device, announced=1.0), for_call=True)
    assert not any(judged.candidate.announced for judged in called.judged)
    gather = explain(catalogue.problems(2)["all_gather_matmul"], Sizes((ROWS,) * 2), replace(device, announced=1.0))
    assert not any(judged.candidate.announced for judged in gather.judged)  # its products wait for messages


def test_messages_through_host_memory_are_copied_down_and_up():
    device = replace(machine(3.0), lanes=2, launch=0.1, poll=0.5, copy_rate=SHARD, staged=1)
    form = catalogue.problems(2)["all_gather"]
    found = explain(form, Sizes(rows=(ROWS,) * 2), device)
    assert "x_host" in {buffer.name for buffer in found.plan.programs[0].buffers}
    seconds = simulate(found.plan_of(Candidate("direct", 1, None)), device).seconds
    assert seconds == pytest.approx(0.1 + 1 + 0.5 + 3 + 0.1 + 1)
    inside = explain(form, Sizes(rows=(ROWS,) * 2), replace(device, staged=2))
    assert "x_host" not in {buffer.name for buffer in inside.plan.programs[0].buffers}


@pytest.mark.parametrize("name", sorted(catalogue.problems(3)))
def test_small_messages_go_through_host_memory_on_both_ends(name):
    """Of uneven sizes, in every schedule: the two ends of a message choose alike, and the plan is right."""
    form = catalogue.problems(3)[name]
    for schedule in registry.available(form):
        plan = registry.write(form, schedule, 1, catalogue.sizes(form, "uneven"))
        for below in (0, 60, 150, 1 << 20):
            made = staged(plan, lambda a, b: False, below)
            fompi.verify(made)
            ends = {}
            for program in made.programs:
                for op, number in zip(program.ops, message_numbers(program.ops), strict=True):
                    if isinstance(op, Send | Recv):
                        pair = (program.rank, op.dest) if isinstance(op, Send) else (op.source, program.rank)
                        ends.setdefault((*pair, number), set()).add(is_mirror(program.buffer(op.chunk.buffer)))
            assert all(len(places) == 1 for places in ends.values()), (schedule, below)


def test_which_messages_go_through_host_memory():
    groups = replace(machine(1.0), staged=4)
    assert [groups.is_staged(2, peer) for peer in (0, 3, 4, 9)] == [False, False, True, True]
    assert not machine(1.0).is_staged(0, 7)
    assert Machine.from_json(groups.to_json()) == groups and "groups of 4 ranks" in str(groups)
    with pytest.raises(LayoutError, match="staged"):
        replace(groups, staged=-1)
