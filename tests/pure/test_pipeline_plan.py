"""Pipelines as plans: right for every order, refused when broken, and predicted within 3 % of their formulas."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from plan_texts import parse, programs_from_json, with_program
from twin import twin

import fompi
from fompi.backends.numpy import Numpy
from fompi.base.errors import DtypeError, PlanError, ShapeError
from fompi.base.wires import WIRES
from fompi.model.pipeline import placement_of, predicted
from fompi.parallel.actions import SCHEDULES, actions, alive, times
from fompi.parallel.pipeline_plan import KERNELS, evaluation, plan
from fompi.parallel.stages import SPARE
from fompi.plans.plan import Chunk, Compute, Send, UserKernel

SHAPE = (3, 2)


def made(schedule, p, m, chunks=1, dtype="float64", **more):
    return plan(schedule, ranks=p, microbatches=m, chunks=chunks, activations=SHAPE, dtype=dtype, **more)


def on_wire(schedule, p, m, wire="int8"):
    return made(schedule, p, m, chunks_of(schedule)[0], "float32", wire=wire)


def chunks_of(schedule):
    return (2, 3) if schedule == "interleaved" else (2,) if placement_of(schedule) == "v" else (1,)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_pipeline_is_right(schedule):
    for p in (1, 2, 3, 4, 6):
        for m in (1, 2, 3, 5, 9):
            for chunks in chunks_of(schedule):
                fompi.verify(made(schedule, p, m, chunks))


@pytest.mark.parametrize("schedule", ["eager-1f1b", "interleaved", "dualpipev"])
def test_pairs_of_a_forward_and_a_backward_are_right(schedule):
    for p in (1, 2, 3, 4):
        for m in (1, 2, 5, 9):
            for chunks in chunks_of(schedule):
                listed = actions(schedule, p, m, chunks, overlap_f_b=True)
                found = made(listed, p, m, chunks, seconds={"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0})
                fompi.verify(found)
                seconds = fompi.simulate(found, fompi.Machine.load("gigabit")).seconds
                assert seconds == pytest.approx(max(map(times(listed).span, listed)), rel=0.01)


def test_a_pair_whose_calls_are_mixed_up_is_refused():
    found = made(actions("eager-1f1b", 2, 3, overlap_f_b=True), 2, 3)
    ops = found.programs[1].ops
    at = next(i for i, op in enumerate(ops) if isinstance(op, Compute) and op.kernel == "forward_backward")
    *args, reads, writes = ops[at].args
    for wrong in ((*args, reads, writes - 1), (*args[2:], *args[:2], reads, writes), (*args, reads)):
        changed = replace(found.programs[1], ops=(*ops[:at], replace(ops[at], args=wrong), *ops[at + 1 :]))
        with pytest.raises(PlanError):
            fompi.verify(with_program(found, changed))


@pytest.mark.parametrize("wire", WIRES)
def test_pipelines_with_smaller_messages(wire):
    """What is handed on is rounded once. A stage gets elements of the dtype; without messages there is no wire."""
    for schedule in SCHEDULES:
        for p, m in ((1, 2), (2, 3), (4, 8)):
            found = on_wire(schedule, p, m, wire)
            fompi.verify(found)
            assert found.roundings == (p > 1)
            sent = {op.chunk.buffer for program in found.programs for op in program.ops if isinstance(op, Send)}
            assert all(name.endswith(wire) for name in sent) and bool(sent) == (p > 1)
    halves = plan("1f1b", ranks=3, microbatches=4, activations=SHAPE, dtype="bfloat16", wire="int8")
    fompi.verify(halves)
    assert {b.dtype for b in halves.programs[1].buffers if not b.wire} == {"bfloat16"}
    with pytest.raises(DtypeError, match="only float32 and half types take a wire"):
        made("1f1b", 2, 4, wire="int8")


def test_random_orders_are_right():
    """Every order without a deadlock becomes a plan without a deadlock, however ranks differ."""
    random, count = Random(2), 0
    while count < 60:
        p, m = random.randint(1, 4), random.randint(1, 5)
        listed = actions(random.choice(["gpipe", "zb-h1", "1f1b"]), p, m)
        for mine in listed:
            for _ in range(4):
                i = random.randrange(len(mine))
                mine.insert(random.randrange(len(mine)), mine.pop(i))
        try:
            times(listed)
        except PlanError:
            continue
        fompi.verify(made(listed, p, m))
        count += 1


def test_a_pipeline_in_words():
    text = str(made("1f1b", 2, 2)).splitlines()
    assert text[0].startswith(
        "pipeline(float64, 2 stages, 2 micro-batches of (3, 2)) by 1f1b: 2 ranks, 1 part, scratch"
    )
    columns = [[cell.strip() for cell in line[6:].split("  ") if cell] for line in text[2:]]
    assert columns[0] == ["rank 0", "rank 1"]
    assert columns[1] == ["forward<0, 0>() -> a1_0[0], s0_0[0]", "a1_0[0]<0"]
    assert columns[2][0] == "a1_0[0]>1"
    assert str(made([["0F0", "0B0"]], 1, 1)).startswith("pipeline(float64, 1 stages, 1 micro-batches) by own actions")


def test_text_and_json_give_the_plan_back():
    wanted = made("zb-h1", 3, 4, seconds={"F": 1, "I": 1, "W": [1, 2, 3]})
    for program in wanted.programs:
        assert all(parse(str(op)) == op for op in program.ops)
    _, fields = programs_from_json(wanted.to_json())
    assert fields.pop("programs") == tuple(wanted.programs)
    assert all(getattr(wanted, name) == value for name, value in fields.items())
    assert fields["kernels"][2] == UserKernel("backward_weight", (1.0, 2.0, 3.0)) and fields["in_order"]
    pairs = made(actions("eager-1f1b", 2, 4, overlap_f_b=True), 2, 4)
    assert programs_from_json(pairs.to_json())[1]["kernels"] == pairs.kernels


def test_slots_are_as_many_as_are_alive():
    """And SPARE for messages that arrive early."""
    for schedule in ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"):
        listed, found = actions(schedule, 4, 12), made(schedule, 4, 12)
        for r in range(1, 4):
            count = Counter(buffer.name.partition("_")[0] for buffer in found.programs[r].buffers)
            activations, pending = alive(listed[r])
            assert count[f"s{r}"] == activations
            assert count[f"r{r}"] == pending
            inputs = activations + (pending - 1 if pending else 0)  # an input is in use until W
            assert inputs <= count[f"a{r}"] <= min(inputs, 12) + SPARE


def test_activations_of_different_widths():
    shapes = [(2, 5), (7,), ()]
    found = plan("1f1b", ranks=4, microbatches=3, activations=shapes, dtype="float32")
    fompi.verify(found)
    rows = {b.name[:2]: b.row for b in found.programs[2].buffers}
    assert rows["a2"] == rows["d1"] == (7,) and rows["a3"] == rows["d2"] == ()
    same = plan("1f1b", ranks=2, microbatches=3, activations=[(2, 5), (9,)])  # the last stage hands nothing on
    assert same.problem.activations == ((2, 5),)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "bool"])
def test_every_dtype(dtype):
    fompi.verify(plan("zb-h1", ranks=3, microbatches=4, activations=SHAPE, dtype=dtype))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"activations": [(2,)]}, ShapeError, "1 shapes, but 3 stages hand on 2"),
        ({"activations": [(2,), (-1,)]}, ShapeError, r"activations\[1\]"),
        ({"activations": [(2,), ("n",)]}, ShapeError, r"activations\[1\]"),
        ({"activations": 5}, ShapeError, "must be shapes"),
        ({"activations": (1 << 40, 1 << 40)}, ShapeError, "too large"),
        ({"dtype": "float99"}, DtypeError, "float99"),
        ({"seconds": {"Q": 1}}, PlanError, "must map F, B, I, W, OVERLAP_F_B to"),
        ({"seconds": {"F": -1}}, PlanError, "must be a number"),
        ({"seconds": {"F": [1, 2]}}, PlanError, "one for each of the 3 stages"),
    ],
)
def test_wrong_arguments(changes, error, text):
    with pytest.raises(error, match=text):
        plan("1f1b", **{"ranks": 3, "microbatches": 4, "activations": SHAPE, "dtype": "float32", **changes})


# ------------------------------------------------------------------------------------------------ predictions


def kernel_span(trace, rank):
    """From the begin of the first kernel of a rank to the end of its last one."""
    events = [e for e in trace.events if e.rank == rank and e.is_compute]
    return max(e.end for e in events) - min(e.start for e in events)


@pytest.mark.parametrize("message", [0.0, 0.1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_simulator_agrees_with_the_formulas(schedule, message):
    machine = fompi.Machine("m", max(message, 1e-12), 1e18, 1.0, 1e18, 0.0)
    for p, m in ((1, 3), (2, 6), (3, 6), (4, 8), (8, 16)):
        for chunks in chunks_of(schedule):
            trace = fompi.simulate(made(schedule, p, m, chunks, seconds={"F": 1, "I": 1, "W": 1}), machine)
            span = max(kernel_span(trace, rank) for rank in range(p))
            assert span == pytest.approx(predicted(schedule, p, m, chunks, {}, message), rel=0.03)
            found = times(actions(schedule, p, m, chunks), {}, message)
            assert trace.seconds == pytest.approx(max(found.ends.values()), rel=1e-6)


def test_zero_bubble_needs_kernels_in_program_order():
    """As soon as they are ready, W would come before the next I."""
    machine = fompi.Machine("m", 1e-12, 1e18, 1.0, 1e18, 0.0)
    found = made("zb-h1", 8, 24, seconds={"F": 1, "I": 1, "W": 1})
    spans = [
        max(kernel_span(fompi.simulate(each, machine), r) for r in range(8))
        for each in (found, replace(found, in_order=False))
    ]
    assert spans[0] == pytest.approx(79) and spans[1] > 80
    fompi.verify(replace(found, in_order=False))


def test_seconds_of_each_stage():
    machine = fompi.Machine("m", 1e-12, 1e18, 1.0, 1e18, 0.0)
    trace = fompi.simulate(made("gpipe", 2, 3, seconds={"F": [1, 2], "B": (3, 4)}), machine)
    busy = {rank: sum(e.end - e.start for e in trace.events if e.rank == rank and e.is_compute) for rank in (0, 1)}
    assert busy == {0: pytest.approx(12), 1: pytest.approx(18)}
    with pytest.raises(PlanError, match="seconds of the kernel 'forward' are not known"):
        fompi.simulate(made("gpipe", 2, 3), machine)
    odd = replace(made("gpipe", 3, 3), kernels=(UserKernel("forward", (1.0, 2.0)), UserKernel("backward", (1.0,))))
    with pytest.raises(PlanError, match="for 2 first arguments"):
        fompi.simulate(odd, machine)


# ------------------------------------------------------------------------------------------------ broken plans


class Mixed(Exception):
    """A kernel has read what belongs to another micro-batch."""


def stages(found):
    """Kernels that compute with numbers, and raise Mixed if a backward gets another input than its forward."""
    random, kept, sums = Random(0), {}, Counter()
    factor = {s: random.uniform(0.5, 2) for s in range(found.problem.stages)}
    last = found.problem.stages - 1

    def forward(args, reads, writes):
        stage, i = args
        x = reads[0].copy() if stage else np.full(SHAPE, i + 1.0)
        kept[args] = x
        if stage < last:
            writes[0][...] = x * factor[stage]

    def travelled(args, reads):
        stage, i = args
        if stage not in (0,) and not np.array_equal(reads[stage < last], kept[args]):
            raise Mixed(args)
        wanted = np.prod([factor[s] for s in range(stage + 1, last + 1)]) * (i + 1)
        if stage < last and not np.allclose(reads[0], wanted):
            raise Mixed(args)
        return np.full(SHAPE, wanted)

    def both(args, reads, writes):
        if args[0]:
            writes[0][...] = travelled(args, reads) * factor[args[0]]
        else:
            travelled(args, reads)

    def backward(args, reads, writes):
        both(args, reads, writes)
        sums[args] += 1

    def weight(args, reads, writes):
        travelled(args, reads)
        sums[args] += 1

    return {"forward": forward, "backward": backward, "backward_input": both, "backward_weight": weight}, sums


def run_twin(found, seed):
    """Run the plan with data in a random interleaving. Every micro-batch must count once at each stage."""
    kernels, sums = stages(found)
    twin(found, [{}] * found.size, Numpy(), seed=seed, kernels=kernels)
    counts = {(s, i): 1 for s in range(found.problem.stages) for i in range(found.problem.microbatches)}
    if sums != counts:
        raise Mixed(f"{sums}")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_twin_agrees(schedule):
    for p, m in ((1, 2), (2, 3), (3, 5), (4, 8)):
        for seed in range(3):
            run_twin(made(schedule, p, m, chunks_of(schedule)[0]), seed)
        run_twin(on_wire(schedule, p, m), 0)


def mutant(random, found):
    """The plan with one op changed, left out, moved or doubled, and the name of the change."""
    rank = random.randrange(found.size)
    program = found.programs[rank]
    ops, i = list(program.ops), random.randrange(len(program.ops))
    change = random.choice(["slot", "drop", "swap", "double", "argument"])
    op = ops[i]
    if change == "slot":
        slots = [b.name for b in program.buffers]
        other = random.choice(slots)
        exchanged = lambda c: Chunk(other, 0, 1) if c == target else c  # noqa: E731
        target = random.choice([*op.reads, *op.writes])
        if isinstance(op, Compute):
            ops[i] = replace(op, reads=tuple(map(exchanged, op.reads)), writes=tuple(map(exchanged, op.writes)))
        else:
            ops[i] = replace(op, chunk=exchanged(op.chunk))
    elif change == "drop":
        del ops[i]
    elif change == "swap":
        j = random.randrange(len(ops))
        ops[i], ops[j] = ops[j], ops[i]
    elif change == "double":
        ops.insert(i, op)
    elif isinstance(op, Compute) and op.args:
        ops[i] = replace(op, args=(op.args[0], random.randrange(found.problem.microbatches)))
    return with_program(found, replace(program, ops=tuple(ops))), change


def test_mutants_are_refused_or_right():
    random, refused, accepted = Random(3), Counter(), Counter()
    plans = [made(s, p, m, chunks_of(s)[0]) for s in SCHEDULES for p, m in ((2, 4), (3, 5))]
    plans += [on_wire(s, 3, 4) for s in SCHEDULES]
    for _ in range(900):
        broken, change = mutant(random, random.choice(plans))
        try:
            fompi.verify(broken)
        except PlanError as error:
            assert error.rank is not None and f"rank {error.rank}" in str(error)
            refused[change] += 1
        else:
            accepted[change] += 1
            for seed in range(2):
                run_twin(broken, seed)
    assert min(refused.values()) > 10 and len(refused) == 5, refused
    assert accepted["swap"] > 10, accepted


def with_one_slot(found):
    """The plan of two ranks in which the inputs of rank 1 share one slot."""
    program = found.programs[1]

    def shared(chunk):
        return chunk._replace(buffer="a1_0") if chunk.buffer.startswith("a1_") else chunk

    ops = [
        replace(op, reads=tuple(map(shared, op.reads)))
        if isinstance(op, Compute)
        else replace(op, chunk=shared(op.chunk))
        for op in program.ops
    ]
    return with_program(found, replace(program, ops=tuple(ops)))


def test_one_slot_too_few_is_found():
    """With GPipe the input of a micro-batch is overwritten before its backward. The last rank of 1F1B needs one."""
    fompi.verify(with_one_slot(made("1f1b", 2, 4)))
    text = "backward<1, 0> that has read output 0 of forward<0, 3> instead of output 0 of forward<0, 0>"
    with pytest.raises(PlanError, match=text):
        fompi.verify(with_one_slot(made("gpipe", 2, 4)))


def test_a_call_that_is_made_twice():
    found = made("1f1b", 1, 2)
    ops = found.programs[0].ops
    with pytest.raises(PlanError, match="op 1 is the same call") as caught:
        fompi.verify(with_program(found, replace(found.programs[0], ops=(*ops[:2], ops[1], *ops[2:]))))
    assert (caught.value.rank, caught.value.op, caught.value.chunk) == (0, 2, "g0[0]")


def test_a_kernel_that_the_plan_does_not_declare():
    found = made("1f1b", 2, 2)
    with pytest.raises(PlanError, match="unknown kernel 'forward'"):
        fompi.verify(replace(found, kernels=()))
    with pytest.raises(PlanError, match="fompi has one of this name"):
        fompi.verify(replace(found, kernels=(*found.kernels, UserKernel("add"))))


def test_every_kind_of_action_has_a_kernel():
    used = {op.kernel for p in made("zb-h1", 2, 3).programs for op in p.ops if isinstance(op, Compute)}
    assert used == {KERNELS[kind] for kind in "FIW"}
    assert [k.name for k in made("1f1b", 2, 3).kernels] == ["forward", "backward"]


def test_the_seconds_of_b_follow_from_i_and_w():
    kernels = made("1f1b", 2, 3, seconds={"I": 1, "W": [1, 2]}).kernels
    assert kernels[1].seconds == (2.0, 3.0) and kernels[0].seconds == ()


def test_every_evaluation_is_right():
    for p in (1, 2, 3, 4, 6):
        for m in (1, 2, 3, 5, 9):
            for chunks in (1, 2, 3):
                how = {"ranks": p, "microbatches": m, "chunks": chunks, "activations": SHAPE, "dtype": "float64"}
                found = evaluation(**how)
                fompi.verify(found)
                assert [k.name for k in found.kernels] == ["evaluate"]
                slots = {b.name for program in found.programs for b in program.buffers if b.name[0] == "a"}
                assert len(slots) <= p * chunks * (1 + p + SPARE)
                twin(found, [{}] * p, Numpy(), seed=m, kernels={"evaluate": lambda *_: None})
    one_slower = evaluation(ranks=2, microbatches=2, activations=SHAPE, seconds={"F": [1.0, 2.0], "B": 9.0})
    assert fompi.simulate(one_slower, fompi.Machine.load("gigabit")).seconds == pytest.approx(5.0, rel=0.01)
    broken = with_program(one_slower, replace(one_slower.programs[0], ops=one_slower.programs[0].ops[:-1]))
    with pytest.raises(PlanError):
        fompi.verify(broken)
