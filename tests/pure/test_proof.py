"""Proofs of predicted traces of every schedule, of traces written by hand, and of a plan that serialises on purpose."""

from __future__ import annotations

from dataclasses import replace

import catalogue
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_texts import with_program

import fompi
from fompi import Machine, Plan, Shard, Spec
from fompi.base.errors import PlanError
from fompi.plans.plan import Compute, Recv, Send
from fompi.schedules.registry import available, write
from fompi.traces.proof import Proof, RankDependencies, Wait, prove, total
from fompi.traces.trace import Event, Trace, length, union

X, W = Spec((4096, 1024), "float32", Shard(0)), Spec((1024, 4096), "float32", Shard(1))


def gathered(schedule: str, slices: int = 1) -> Plan:
    return fompi.plan(fompi.all_gather_matmul, X, W, ranks=4, schedule=schedule, slices=slices)


def machine(ratio: float) -> Machine:
    """A machine on which the messages of `gathered` take `ratio` times as long as its kernels."""
    flops, nbytes = 2 * 4096 * 1024 * 1024, 3 * 1024 * 1024 * 4
    return Machine("even", 0.0, nbytes / (0.1 * ratio), flops / 0.1, 1e15, 0.0)


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
    """For every rank and schedule, on any machine. Messages explain all of this time."""
    size = data.draw(st.integers(1, 4))
    problem = data.draw(st.sampled_from(list(catalogue.problems(size).values())))
    schedule = data.draw(st.sampled_from(available(problem)))
    window = data.draw(st.sampled_from([None, 1, 2]))
    plan = write(problem, schedule, data.draw(st.integers(1, 2)), None, window)
    trace = fompi.simulate(plan, data.draw(machines))
    for rank in trace.ranks:
        proof = prove(trace, RankDependencies(plan, rank))
        events = [e for e in trace.events if e.rank == rank]
        begin, end = min(e.start for e in events), max(e.end for e in events)
        busy = length(union((e.start, e.end) for e in events if e.is_compute))
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
    """Kernels take 100 ms. Messages of 50 ms are hidden. Of messages of 200 ms, 100 ms are hidden."""
    plan = gathered("direct", 8)
    trace = fompi.simulate(plan, machine(ratio))
    for rank in range(4):
        proof = prove(trace, RankDependencies(plan, rank), compute_alone=0.1, messages_alone=0.1 * ratio)
        assert proof.exposed == pytest.approx(exposed, abs=0.02) and proof.slowdown == pytest.approx(1.0)
        assert proof.hidden == pytest.approx(0.1 * ratio - proof.exposed) and proof.warning is None


def serialised(plan: Plan) -> Plan:
    """The same plan in another order: all messages first, and each kernel after all of them."""
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


def test_a_serialisation_is_found():
    """Kernels wait for messages that they do not need. Nothing is hidden, and the proof warns."""
    plan = gathered("ring")
    late = serialised(plan)
    on = machine(1.0)
    good, bad = fompi.simulate(plan, on), simulate_serialised(late, plan, on)
    for rank in range(4):
        assert prove(good, RankDependencies(plan, rank), compute_alone=0.1, messages_alone=0.1).warning is None
        proof = prove(
            bad, RankDependencies(late, rank), compute_alone=0.1, messages_alone=0.1, progress="polls between kernels"
        )
        assert proof.exposed == pytest.approx(0.1) and proof.hidden == pytest.approx(0.0, abs=1e-9)
        assert "no overlap on rank" in proof.warning and "from rank" in proof.warning
        assert proof.warning.endswith("Progress: polls between kernels")


def simulate_serialised(plan: Plan, original: Plan, on: Machine) -> Trace:
    """A trace of `plan` whose kernels take as long as in `original`, although they have more reads."""
    seconds = {
        (e.rank, str(original.programs[e.rank].ops[e.op].writes[0])): e.end - e.start
        for e in fompi.simulate(original, on).events
        if e.is_compute
    }
    events, moved = [], {}
    for e in fompi.simulate(original, replace(on, flops_rate=1e30)).events:
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


def test_unfused_does_not_warn():
    for schedule in ("unfused", "unfused_p2p"):
        plan = gathered(schedule)
        proof = prove(
            fompi.simulate(plan, machine(1.0)), RankDependencies(plan, 0), compute_alone=0.1, messages_alone=0.1
        )
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
        ({"compute_alone": None}, False),  # not measured
        ({"messages_alone": None}, False),
        ({"schedule": "unfused"}, False),
        ({"messages_alone": 0.004}, False),  # too little to hide
        ({"compute_alone": 0.004, "wall": 0.104}, False),
        ({"messages_alone": 1.0, "wall": 1.0}, False),  # limited by messages: all compute is used to hide them
        ({"messages_alone": 0.5, "wall": 0.59}, True),  # as slow as without overlap
        ({"wall": 2e-4, "compute_alone": 1e-4, "messages_alone": 1e-4}, False),  # too short
        ({"wall": 0.3, "kernels": 0.2}, True),
    ],
)
def test_when_it_warns(fields, warns):
    assert (proof_of(**fields).warning is not None) == warns


def test_the_warning_about_slow_kernels():
    """The call is slower than without overlap, because the messages slow the kernels down."""
    warning = proof_of(wall=0.3, kernels=0.2, progress="a helper thread").warning
    assert warning == (
        "all_gather_matmul by direct: slower than without overlap on rank 1: the call took 300.0 ms, compute alone "
        "takes 100.0 ms, messages alone take 100.0 ms. The kernels took 2.00 times as long as alone. The kernels "
        "waited 80.000 ms for x_full[4] from rank 2; 20.000 ms to send y[2] to rank 3. Progress: a helper thread"
    )


def test_a_proof_as_text():
    assert str(proof_of(progress="polls between kernels")) == (
        "all_gather_matmul by direct, rank 1, in ms\n"
        "  wall             200.000\n"
        "  compute          100.000  alone; 1.00 times as long in this call\n"
        "  communication    150.000 (alone 100.000), 4096 bytes\n"
        "  hidden             0.000\n"
        "  exposed          100.000  = wall - compute\n"
        "  tail              10.000  after the last kernel\n"
        "  progress: polls between kernels\n"
        "  waited 80.000 ms for x_full[4] from rank 2\n"
        "  waited 20.000 ms to send y[2] to rank 3\n"
        "  warning: all_gather_matmul by direct: no overlap on rank 1: the call took 200.0 ms, compute alone takes "
        "100.0 ms, messages alone take 100.0 ms. The kernels waited 80.000 ms for x_full[4] from rank 2; 20.000 ms to "
        "send y[2] to rank 3. Progress: polls between kernels"
    )
    many = proof_of(waits=tuple(Wait(0.01, "recv", f"x[{i}]", 2) for i in range(10)), compute_alone=None)
    assert str(many).splitlines()[2] == "  compute          100.000  the kernels of this call; not measured alone"
    assert str(many).splitlines()[-1] == "  waited 20.000 ms for 2 other reasons"


# ----------------------------------------------------------------------------------------- traces written by hand


def hand_made(*ops):
    """The dependencies of a rank with these ops."""
    plan = gathered("direct")
    program = replace(plan.programs[0], ops=ops)
    return RankDependencies(with_program(plan, program), 0)


A, B, Y = (gathered("direct").programs[0].buffer(name) for name in ("x", "w", "y"))


def test_a_wait_goes_back_to_its_cause():
    """A receive is posted late, because its block must be sent first. It is the reason only after its posting."""
    dependencies = hand_made(
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
    assert prove(trace, dependencies).waits == (
        Wait(2.0, "send", "y[0]", 3),
        Wait(1.0, "recv", "y[0]", 2),
        Wait(0.5, "start", "", None),
    )


def test_packing_before_the_call():
    """Packing is not an op of the plan. The kernel after it waited for no op."""
    dependencies = hand_made(Compute("matmul", (A[0], B[0]), (Y[0],)))
    events = (Event(0, "compute", -1, "pack(x)", 0.0, 1.0), Event(0, "compute", 0, "", 1.5, 2.0))
    proof = prove(Trace("measured", "", events), dependencies)
    assert proof.waits == (Wait(0.5, "start", "", None),) and (proof.wall, proof.kernels) == (2.0, 1.5)


def test_waits_for_the_same_reason_add_up():
    waits = [Wait(1.0, "recv", "x[1]", 2), Wait(3.0, "send", "x[1]", 2), Wait(2.5, "recv", "x[1]", 2)]
    assert total(waits) == (Wait(3.5, "recv", "x[1]", 2), Wait(3.0, "send", "x[1]", 2))


def test_a_rank_without_events():
    with pytest.raises(PlanError, match="no event of rank 0"):
        prove(Trace("measured", "", ()), hand_made())


def test_a_chain_of_a_thousand_waits():
    """Each message of a long ring waits for the previous one."""
    plan = fompi.plan("all_gather", Spec((2000, 4), "float32", Shard(0)), ranks=2000, schedule="ring")
    trace = fompi.simulate(plan, "gigabit")
    proof = prove(trace, RankDependencies(plan, 0))
    assert sum(wait.seconds for wait in proof.waits) == pytest.approx(proof.idle)


def started(*events, elsewhere):
    """The proof of a call that was started, while the program did something else during `elsewhere`."""
    dependencies = hand_made(Recv(2, Y[0]), Compute("copy", (Y[0],), (A[0],)))
    trace = Trace("measured", "by hand", events)
    return prove(trace, dependencies, compute_alone=1.0, messages_alone=4.0, elsewhere=elsewhere)


RECEIVED = (Event(0, "recv from 2", 0, "", 0.0, 4.0), Event(0, "compute", 1, "", 4.0, 5.0))


def test_other_work_of_the_program_hides_messages():
    """The program does something else for three of the four seconds of the message, and waits for the last one."""
    proof = started(*RECEIVED, elsewhere=[(-1.0, 3.0)])
    assert (proof.wall, proof.elsewhere, proof.kernels_elsewhere) == (5.0, 3.0, 0.0)
    assert proof.exposed == pytest.approx(1.0) and proof.hidden == pytest.approx(3.0) and proof.warning is None
    assert proof.waits == (Wait(1.0, "recv", "y[0]", 2),) and "did something else" in str(proof)


def test_a_call_is_not_exposed_if_the_program_does_not_wait():
    proof = started(*RECEIVED, elsewhere=[(0.0, 9.0)])
    assert (proof.elsewhere, proof.kernels_elsewhere, proof.exposed, proof.hidden) == (5.0, 1.0, 0.0, 4.0)
    assert proof.waits == () and proof.warning is None


def test_a_message_that_rested_during_other_work():
    """The program did something else for four seconds. Then it waited for as long as the message takes alone."""
    late = Event(0, "recv from 2", 0, "", 0.0, 8.0), Event(0, "compute", 1, "", 8.0, 9.0)
    proof = started(*late, elsewhere=[(0.0, 4.0)])
    assert proof.exposed == pytest.approx(4.0) and proof.hidden == 0.0
    assert "no overlap on rank 0" in proof.warning and "something else for 4000.0 ms" in proof.warning
