"""What a Proof says, on predicted traces of every schedule, on traces made by hand, and on a planted serialisation."""

from __future__ import annotations

from dataclasses import replace

import catalogue
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fompi
from fompi import Machine, Plan, Shard, Spec
from fompi.base.errors import PlanError
from fompi.plans.plan import Compute, Recv, Send
from fompi.schedules.registry import available, write
from fompi.traces.proof import Needs, Proof, Wait, prove, total
from fompi.traces.trace import Event, Trace, length, union

X, W = Spec((4096, 1024), "float32", Shard(0)), Spec((1024, 4096), "float32", Shard(1))


def gathered(schedule: str, slices: int = 1) -> Plan:
    return fompi.plan(fompi.all_gather_matmul, X, W, ranks=4, schedule=schedule, slices=slices)


def machine(ratio: float) -> Machine:
    """On which the messages of `gathered` take `ratio` times as long as its kernels."""
    flops, nbytes = 2 * 4096 * 1024 * 1024, 3 * 1024 * 1024 * 4
    return Machine("even", 0.0, nbytes / (0.1 * ratio), flops / 0.1, 1e15, 0.0)


def alone(trace: Trace, rank: int) -> float:
    return trace.summary(rank).compute


machines = st.builds(
    Machine,
    st.just("chance"),
    st.floats(0, 1e-3),
    st.floats(1e3, 1e9),
    st.floats(1e3, 1e9),
    st.floats(1e3, 1e9),
    st.floats(0, 1e-3),
)


@settings(max_examples=60)
@given(st.data())
def test_the_waits_are_the_time_without_kernels(data):
    """Of every rank, by every schedule, on any machine; all of it is explained by messages."""
    size = data.draw(st.integers(1, 4))
    problem = data.draw(st.sampled_from(list(catalogue.problems(size).values())))
    schedule = data.draw(st.sampled_from(available(problem)))
    window = data.draw(st.sampled_from([None, 1, 2]))
    plan = write(problem, schedule, data.draw(st.integers(1, 2)), None, window)
    trace = fompi.simulate(plan, data.draw(machines))
    for rank in trace.ranks:
        proof = prove(trace, Needs(plan, rank))
        mine = [e for e in trace.events if e.rank == rank]
        begin, end = min(e.start for e in mine), max(e.end for e in mine)
        busy = length(union((e.start, e.end) for e in mine if e.is_compute))
        assert proof.wall == end - begin and proof.kernels == pytest.approx(busy)
        assert proof.idle == pytest.approx(proof.wall - proof.kernels, abs=1e-12 + 1e-9 * proof.wall)
        assert proof.exposed == pytest.approx(proof.idle, abs=1e-12 + 1e-9 * proof.wall)
        assert all(wait.seconds > 0 for wait in proof.waits)
        assert sum(w.seconds for w in proof.waits if w.kind == "start") <= 1e-9 * proof.wall
        assert [w.seconds for w in proof.waits] == sorted((w.seconds for w in proof.waits), reverse=True)
        named = {(str(op.chunk), op.source) for op in plan.programs[rank].ops if isinstance(op, Recv)}
        assert {(w.what, w.peer) for w in proof.waits if w.kind == "recv"} <= named
        assert proof.tail <= proof.wall and proof.warning is None


@pytest.mark.parametrize(("ratio", "exposed"), [(0.5, 0.0), (2.0, 0.1)])
def test_overlap_hides_what_it_can(ratio, exposed):
    """Kernels of 100 ms; messages of 50 are hidden, of 200 as much as there are kernels."""
    plan = gathered("direct", 8)
    trace = fompi.simulate(plan, machine(ratio))
    for rank in range(4):
        proof = prove(trace, Needs(plan, rank), compute_alone=0.1, messages_alone=0.1 * ratio)
        assert proof.exposed == pytest.approx(exposed, abs=0.02) and proof.slowdown == pytest.approx(1.0)
        assert proof.hidden == pytest.approx(0.1 * ratio - proof.exposed) and proof.warning is None


def serialised(plan: Plan) -> Plan:
    """The same plan, but for its order: all messages first, and each kernel behind all of them."""
    programs = []
    for program in plan.programs:
        messages = [op for op in program.ops if isinstance(op, (Send, Recv))]
        arrive = tuple(op.chunk for op in messages if isinstance(op, Recv))
        kernels = [op for op in program.ops if isinstance(op, Compute)]
        first = replace(kernels[0], reads=(*kernels[0].reads, *arrive))
        writes = first.writes
        behind = [replace(op, reads=(*op.reads, *writes)) for op in kernels[1:]]
        programs.append(replace(program, ops=(*messages, first, *behind)))
    return replace(plan, programs=tuple(programs))


def test_a_planted_serialisation_is_found():
    """Kernels that wait for messages they do not need: nothing is hidden, and the proof says so."""
    plan = gathered("ring")
    late = serialised(plan)
    times = machine(1.0)
    good, bad = fompi.simulate(plan, times), simulate_any(late, plan, times)
    for rank in range(4):
        assert prove(good, Needs(plan, rank), compute_alone=0.1, messages_alone=0.1).warning is None
        proof = prove(bad, Needs(late, rank), compute_alone=0.1, messages_alone=0.1, progress="polls between kernels")
        assert proof.exposed == pytest.approx(0.1) and proof.hidden == pytest.approx(0.0, abs=1e-9)
        assert "no overlap on rank" in proof.warning and "from rank" in proof.warning
        assert proof.warning.endswith("Progress: polls between kernels")


def simulate_any(plan: Plan, like: Plan, times: Machine) -> Trace:
    """Kernels with reads that they do not use cost what they cost in `like`; the walk is that of `plan`."""
    seconds = {
        (e.rank, str(like.programs[e.rank].ops[e.op].writes[0])): e.end - e.start
        for e in fompi.simulate(like, times).events
        if e.is_compute
    }
    events, moved = [], {}
    for e in fompi.simulate(like, replace(times, flops_rate=1e30)).events:
        if not e.is_compute:
            moved[e.rank, e.name] = e
    for program in plan.programs:
        end = max(e.end for e in moved.values() if e.rank == program.rank)
        for i, op in enumerate(program.ops):
            if isinstance(op, Compute):
                start, end = end, end + seconds[program.rank, str(op.writes[0])]
                events.append(Event(program.rank, "compute", i, str(op), start, end))
            else:
                events.append(moved[program.rank, str(op)]._replace(op=i))
    return Trace("predicted", "a plan that waits", tuple(events))


def test_unfused_is_not_asked_to_overlap():
    for schedule in ("unfused", "unfused_p2p"):
        plan = gathered(schedule)
        proof = prove(fompi.simulate(plan, machine(1.0)), Needs(plan, 0), compute_alone=0.1, messages_alone=0.1)
        assert proof.hidden < 0.05 and proof.exposed > 0.05 and proof.warning is None


def proof_of(**fields):
    """A call of 200 ms: 100 of compute and 100 of messages, one after the other."""
    known = {
        "title": "all_gather_matmul by direct", "rank": 1, "schedule": "direct", "wall": 0.2, "kernels": 0.1,
        "communication": 0.15, "tail": 0.01, "nbytes": 4096, "compute_alone": 0.1, "messages_alone": 0.1,
        "waits": (Wait(0.08, "recv", "x_full[4]", 2), Wait(0.02, "send", "y[2]", 3)),
    }  # fmt: skip
    return Proof(**{**known, **fields})


@pytest.mark.parametrize(
    ("fields", "warns"),
    [
        ({}, True),
        ({"wall": 0.12}, False),  # most of it is hidden
        ({"compute_alone": None}, False),  # nobody knows
        ({"messages_alone": None}, False),
        ({"schedule": "unfused"}, False),
        ({"messages_alone": 0.004}, False),  # nothing worth hiding
        ({"compute_alone": 0.004, "wall": 0.104}, False),
        ({"messages_alone": 1.0, "wall": 1.0}, False),  # bound by messages: all compute is hidden
        ({"messages_alone": 0.5, "wall": 0.59}, True),  # as if there were no overlap
        ({"wall": 2e-4, "compute_alone": 1e-4, "messages_alone": 1e-4}, False),  # too short to say
        ({"wall": 0.3, "kernels": 0.2}, True),
    ],
)
def test_when_it_warns(fields, warns):
    assert (proof_of(**fields).warning is not None) == warns


def test_what_it_says_of_slow_kernels():
    """The call is slower than one after the other, since the messages slow the kernels down."""
    warning = proof_of(wall=0.3, kernels=0.2, progress="a helper thread").warning
    assert warning == (
        "all_gather_matmul by direct: slower than one after the other on rank 1: 300.0 ms, where compute alone takes "
        "100.0 and the messages alone 100.0 ms. the kernels took 2.00 times as long as alone; 80.000 ms for x_full[4] "
        "from rank 2; 20.000 ms for y[2] to leave to rank 3. Progress: a helper thread"
    )


def test_what_it_prints():
    assert str(proof_of(progress="polls between kernels")) == (
        "all_gather_matmul by direct, rank 1, in ms\n"
        "  wall             200.000\n"
        "  compute          100.000  alone; the kernels took 1.00 times that\n"
        "  communication    150.000 (alone 100.000), 4096 bytes\n"
        "  hidden             0.000\n"
        "  exposed          100.000  = wall - compute\n"
        "  tail              10.000  after the last kernel\n"
        "  progress: polls between kernels\n"
        "  waited 80.000 ms for x_full[4] from rank 2\n"
        "  waited 20.000 ms for y[2] to leave to rank 3\n"
        "  warning: all_gather_matmul by direct: no overlap on rank 1: 200.0 ms, where compute alone takes 100.0 and "
        "the messages alone 100.0 ms. 80.000 ms for x_full[4] from rank 2; 20.000 ms for y[2] to leave to rank 3. "
        "Progress: polls between kernels"
    )
    many = proof_of(waits=tuple(Wait(0.01, "recv", f"x[{i}]", 2) for i in range(10)), compute_alone=None)
    assert str(many).splitlines()[2] == "  compute          100.000  in this call; the kernels took 1.00 times that"
    assert str(many).splitlines()[-1] == "  waited 20.000 ms for 2 more"


# ------------------------------------------------------------------------------------------------- traces by hand


def hand_made(*ops):
    """The first rank's plan of these ops, in any order that suits."""
    plan = gathered("direct")
    program = replace(plan.programs[0], ops=ops)
    return Needs(plan.with_program(program), 0)


A, B, Y = (gathered("direct").programs[0].buffer(name) for name in ("x", "w", "y"))


def test_a_wait_goes_back_to_its_root():
    """A receive that was posted late, since its place had to be sent first, is blamed from its posting only."""
    needs = hand_made(
        Compute("matmul", (A[0], B[0]), (Y[0],)),
        Send(3, Y[0]),
        Recv(2, Y[0]),
        Compute("copy", (Y[0],), (Y[1],)),
    )
    trace = Trace(
        "measured",
        "by hand",
        (
            Event(0, "compute", 0, "", 0.0, 1.0),
            Event(0, "send to 3", 1, "", 1.0, 3.0),
            Event(0, "recv from 2", 2, "", 3.0, 4.0),
            Event(0, "merge", 3, "", 4.5, 5.0),
        ),
    )
    assert prove(trace, needs).waits == (
        Wait(2.0, "send", "y[0]", 3),
        Wait(1.0, "recv", "y[0]", 2),
        Wait(0.5, "start", "", None),
    )


def test_what_is_packed_before_the_call():
    """It is no op of the plan, and what follows it waited for nothing that we know."""
    needs = hand_made(Compute("matmul", (A[0], B[0]), (Y[0],)))
    events = (Event(0, "compute", -1, "pack(x)", 0.0, 1.0), Event(0, "compute", 0, "", 1.5, 2.0))
    proof = prove(Trace("measured", "", events), needs)
    assert proof.waits == (Wait(0.5, "start", "", None),) and (proof.wall, proof.kernels) == (2.0, 1.5)


def test_the_same_reasons_add_up():
    twice = [Wait(1.0, "recv", "x[1]", 2), Wait(3.0, "send", "x[1]", 2), Wait(2.5, "recv", "x[1]", 2)]
    assert total(twice) == (Wait(3.5, "recv", "x[1]", 2), Wait(3.0, "send", "x[1]", 2))


def test_a_rank_without_events():
    with pytest.raises(PlanError, match="no event of rank 0"):
        prove(Trace("measured", "", ()), hand_made())


def test_a_chain_of_a_thousand_waits():
    """Each message of a long ring waits for the one before."""
    plan = fompi.plan("all_gather", Spec((2000, 4), "float32", Shard(0)), ranks=2000, schedule="ring")
    trace = fompi.simulate(plan, "gigabit")
    proof = prove(trace, Needs(plan, 0))
    assert sum(wait.seconds for wait in proof.waits) == pytest.approx(proof.idle)


def started(*events, elsewhere):
    needs = hand_made(Recv(2, Y[0]), Compute("copy", (Y[0],), (A[0],)))
    return prove(Trace("measured", "by hand", events), needs, compute_alone=1.0, messages_alone=4.0, elsewhere=elsewhere)


RECEIVED = (Event(0, "recv from 2", 0, "", 0.0, 4.0), Event(0, "compute", 1, "", 4.0, 5.0))


def test_what_the_program_does_meanwhile_hides_messages():
    """It was away for three of the four seconds in which the message came, and then waited for one."""
    proof = started(*RECEIVED, elsewhere=[(-1.0, 3.0)])
    assert (proof.wall, proof.elsewhere, proof.kernels_elsewhere) == (5.0, 3.0, 0.0)
    assert proof.exposed == pytest.approx(1.0) and proof.hidden == pytest.approx(3.0) and proof.warning is None
    assert proof.waits == (Wait(1.0, "recv", "y[0]", 2),) and "did something else" in str(proof)


def test_a_call_that_nobody_waits_for_is_not_exposed():
    proof = started(*RECEIVED, elsewhere=[(0.0, 9.0)])
    assert (proof.elsewhere, proof.kernels_elsewhere, proof.exposed, proof.hidden) == (5.0, 1.0, 0.0, 4.0)
    assert proof.waits == () and proof.warning is None


def test_a_message_that_rested_meanwhile():
    """The program was away for four seconds, and waited for as long as the message takes alone."""
    late = Event(0, "recv from 2", 0, "", 0.0, 8.0), Event(0, "compute", 1, "", 8.0, 9.0)
    proof = started(*late, elsewhere=[(0.0, 4.0)])
    assert proof.exposed == pytest.approx(4.0) and proof.hidden == 0.0
    assert "no overlap on rank 0" in proof.warning and "something else for 4000.0 ms" in proof.warning
