"""Plans as text, as JSON and as values; dependencies, which are derived from reads and writes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import catalogue
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_texts import parse, programs_from_json, with_program

from fompi.base.errors import PlanError
from fompi.base.layout import Sizes
from fompi.plans.dependencies import Frontier, constraints, dependencies, device_constraints, lane, message_numbers
from fompi.plans.plan import Chunk, Collective, Compute, Pace, Plan, Programs, Recv, Send, format_nbytes
from fompi.schedules import registry

names = st.sampled_from(["x", "y", "x_full", "w0", "inbox12"])
chunks = st.builds(
    lambda name, start, count: Chunk(name, start, start + count), names, st.integers(0, 5), st.integers(1, 3)
)
runs = st.lists(chunks, max_size=3).map(tuple)
peers = st.integers(0, 3)
ops = st.one_of(
    st.builds(Send, peers, chunks),
    st.builds(Recv, peers, chunks),
    st.builds(Compute, st.sampled_from(["copy", "matmul_bias", "gradient_add"]), runs, runs),
    st.builds(Collective, st.sampled_from(["all_gather", "all_reduce"]), runs, runs),
)
programs = st.lists(ops, max_size=25)
windows = st.none() | st.integers(1, 3)


# ------------------------------------------------------------------------------------------------ text


@given(ops)
def test_parse_inverts_str(op):
    assert parse(str(op)) == op


@pytest.mark.parametrize(
    ("text", "op"),
    [
        ("x[3]>1", Send(1, Chunk("x", 3, 4))),
        ("y[0:2]<1", Recv(1, Chunk("y", 0, 2))),
        ("matmul(x[3], w[0]) -> y[3]", Compute("matmul", (Chunk("x", 3, 4), Chunk("w", 0, 1)), (Chunk("y", 3, 4),))),
        ("all_gather{x[3] -> y[0:8]}", Collective("all_gather", (Chunk("x", 3, 4),), (Chunk("y", 0, 8),))),
        ("broadcast{ -> y[0]}", Collective("broadcast", (), (Chunk("y", 0, 1),))),
    ],
)
def test_text_of_each_op(text, op):
    assert str(op) == text and parse(text) == op


# ------------------------------------------------------------------------------------------------ JSON


@pytest.mark.parametrize("name", catalogue.problems(1))
def test_json_keeps_everything(name):
    problem = catalogue.problems(3)[name]
    sizes = catalogue.sizes(problem, "uneven")
    for schedule in registry.available(problem):
        plan = registry.write(problem, schedule, (2, 1), sizes, window=2)
        described, fields = programs_from_json(plan.to_json())
        assert json.loads(json.dumps(asdict(problem))) == described
        assert Plan(problem, **fields) == plan


# ------------------------------------------------------------------------------------------------ dependencies


def conflict(a, b):
    """True if two ops use the same block, and at least one of them writes it."""

    def blocks(chunks):
        return {block for chunk in chunks for block in chunk.blocks}

    return bool(blocks(a.writes) & (blocks(b.reads) | blocks(b.writes)) or blocks(b.writes) & blocks(a.reads))


def closure(needs):
    """All ops that each op waits for, directly or indirectly."""
    before = []
    for direct in needs:
        before.append(set(direct).union(*(before[i] for i in direct)))
    return before


@given(programs)
def test_dependencies_order_all_conflicting_pairs(program):
    """Each dependency is a conflict. Together they order every pair of ops in conflict."""
    conflicts = [[i for i in range(j) if conflict(program[i], program[j])] for j in range(len(program))]
    needs = dependencies(program)
    assert all(set(before) <= set(pairs) for before, pairs in zip(needs, conflicts, strict=True))
    assert closure(needs) == closure(conflicts)


def test_dependencies_are_the_last_writer_and_the_readers_since():
    program = [
        parse(t) for t in ("x[0]>1", "y[0:2]<1", "copy(y[0]) -> z[0]", "y[1]>1", "copy(x[0]) -> y[0]", "y[0:2]>2")
    ]
    assert dependencies(program) == [[], [], [1], [1], [1, 2], [1, 4]]


@given(programs, windows, st.booleans(), st.booleans())
def test_constraints(program, window, by_peer, in_step):
    """Receives, collectives and paced sends start in order. Collectives and paced sends also wait for the window.

    With `by_peer`, sends to different peers do not wait for each other. With `in_step`, sends also wait for receives.
    """
    needs, behind, _ = constraints(program, Pace(window, by_peer, in_step))
    recvs = [i for i, op in enumerate(program) if isinstance(op, Recv)]
    for j, op in enumerate(program):
        kind = type(op)
        shares_window = kind is Send and window is not None and not by_peer  # with sends to all peers
        same = [i for i in range(j) if type(program[i]) is kind and (shares_window or lane(program[i]) == lane(op))]
        in_order = kind is not Compute and (kind is not Send or window is not None)
        assert behind[j] == (same[-1] if same and in_order else -1)
        windowed = window is not None and kind in (Send, Collective)
        paced = {same[-window]} if windowed and len(same) >= window else set()
        number = sum(isinstance(op, Send) for op in program[:j]) - (window or 0)
        if in_step and window is not None and kind is Send and 0 <= number < len(recvs):
            paced.add(recvs[number])
        assert set(needs[j]) == set(dependencies(program)[j]) | paced


@given(programs, windows, st.randoms(use_true_random=False))
def test_every_order_of_events_completes_all_ops(program, window, random):
    """Ops start and end in random order. Each op is done once, and starts only after the ops that it needs."""
    limits = constraints(program, Pace(window))
    frontier, started, done = Frontier(limits), set(), []
    may_start, running = frontier.begin(), []
    while may_start or running:
        if may_start and (not running or random.random() < 0.5):
            op = may_start.pop(random.randrange(len(may_start)))
            assert op not in started and started >= {limits.behind[op]} - {-1} and set(done) >= set(limits.needs[op])
            started.add(op)
            running.append(op)
            may_start += frontier.started(op)
        else:
            done.append(running.pop(random.randrange(len(running))))
            may_start += frontier.done(done[-1])
    assert sorted(done) == list(range(len(program)))


@given(programs, windows)
def test_enqueued_kernels_wait_for_no_kernel(program, window):
    """Kernels follow the kernels that they need and wait only for messages. Nothing changes for messages."""
    found = constraints(program, Pace(window))
    needs, behind, follows = device_constraints(program, found)
    kernels = {i for i, op in enumerate(program) if isinstance(op, Compute)}
    assert behind == found.behind
    for i, before in enumerate(found.needs):
        assert {*needs[i], *follows[i]} == set(before) and not {*needs[i]} & {*follows[i]}
        assert follows[i] == ([j for j in before if j in kernels] if i in kernels else [])


@given(programs, windows, st.randoms(use_true_random=False))
def test_every_order_of_events_completes_all_ops_on_a_device(program, window, random):
    """A device runs its queues lane by lane, at any time, each kernel after the kernels that it follows."""
    found = constraints(program, Pace(window))
    limits = device_constraints(program, found)
    frontier, done, queues, moving = Frontier(limits), [], {}, []
    may_start = frontier.begin()

    def runnable():
        heads = [queue[0] for queue in queues.values() if queue]
        return [i for i in heads if set(done) >= set(limits.follows[i])]

    while may_start or moving or runnable():
        choices = [name for name, ops in (("start", may_start), ("arrive", moving), ("run", runnable())) if ops]
        event = random.choice(choices)
        if event == "start":
            op = may_start.pop(random.randrange(len(may_start)))
            if isinstance(program[op], Compute):
                queues.setdefault(lane(program[op]), []).append(op)
            else:
                assert set(done) >= set(found.needs[op])
                moving.append(op)
            may_start += frontier.started(op)
            continue
        if event == "arrive":
            op = moving.pop(random.randrange(len(moving)))
        else:
            op = random.choice(runnable())
            assert set(done) >= set(found.needs[op]), "a kernel ran before an op that it needs"
            queues[lane(program[op])].pop(0)
        done.append(op)
        may_start += frontier.done(op)
    assert sorted(done) == list(range(len(program)))


@given(programs)
def test_messages_are_numbered_for_each_peer(program):
    seen = {}
    for op, number in zip(program, message_numbers(program), strict=True):
        if isinstance(op, (Send, Recv)):
            key = type(op), op.dest if isinstance(op, Send) else op.source
            assert number == seen.get(key, 0)
            seen[key] = number + 1
        else:
            assert number == -1


# ------------------------------------------------------------------------------------------------ buffers, programs


def test_chunks_by_index():
    work = catalogue.problems(3)["all_gather_matmul"].workspace(1, 2)
    x, y, w = work["x"], work["y"], work["w"]
    assert [str(c) for c in (x[:], x[2], x[3:], y[:], y[0:3], y[4:], w[:])] == [
        "x[2:4]", "x[2]", "x[3]", "y[0:6]", "y[0:3]", "y[4:6]", "w[0]",
    ]  # fmt: skip
    extents = Sizes(rows=(3, 4, 5)).extents(1, (1, 1))
    assert (x.offsets(extents), x.shape(extents)) == ([0, 2, 4], (4, 3))
    assert (y.offsets(extents), y.shape(extents)) == ([0, 2, 3, 5, 7, 10, 12], (12, 4))
    assert (w.offsets(extents), w.shape(extents)) == ([0, 3], (3, 4))
    assert (x.row_nbytes, w.row_nbytes) == (24, 96)


def test_an_unknown_buffer_is_refused():
    program = registry.write(catalogue.problems(2)["all_gather"], "ring").programs[1]
    with pytest.raises(PlanError, match="rank 1 has no buffer 'z'"):
        program.buffer("z")


def test_programs_are_written_on_first_use():
    """So a rank of a cluster writes only its own program."""
    written = []
    plan = registry.write(catalogue.problems(1000)["all_gather"], "ring")

    def write(rank):
        written.append(rank)
        return plan.programs[rank]

    listed = Programs(1000, write)
    assert len(listed) == 1000 and listed[7] is listed[7] and written == [7]
    assert [p.rank for p in listed[3:5]] == [3, 4]
    with pytest.raises(IndexError):
        listed[1000]
    assert len(plan.programs[999].ops) == 2 * 999 + 1


def test_plans_are_values():
    problem = catalogue.problems(3)["matmul_reduce_scatter"]
    plan, again = (registry.write(problem, "direct", 2) for _ in range(2))
    assert plan == again and hash(plan) == hash(again)
    assert plan != registry.write(problem, "direct", 1) and plan != replace(plan, window=1)
    assert plan != with_program(plan, replace(plan.programs[1], ops=()))
    assert with_program(plan, plan.programs[1]) == plan


def test_scratch_is_counted():
    """A `direct` reduce-scatter needs `size` copies of the rank's own shard."""
    problem = catalogue.problems(4)["reduce_scatter"]
    plan = registry.write(problem, "direct", 1, Sizes(rows=(2, 3, 0, 1)))
    assert [p.scratch_nbytes(plan.extents(p.rank)) for p in plan.programs] == [4 * n * 24 for n in (2, 3, 0, 1)]
    assert "scratch 288 B per rank" in str(plan)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5120.0 GiB")]
)
def test_format_nbytes(count, text):
    assert format_nbytes(count) == text
