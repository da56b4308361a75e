"""Staged plans: messages through mirrors in host memory. They are plans as others: right, priced, printed."""

from __future__ import annotations

import re
from dataclasses import replace

import catalogue
import pytest
from twin import twin

import fompi
from fompi import Shard, Spec
from fompi.backends.numpy import Numpy
from fompi.base.errors import PlanError
from fompi.model.machine import Machine
from fompi.plans.plan import Chunk, Collective, Compute, Plan, Programs, Recv, Send
from fompi.plans.staged import for_device, is_mirror, staged
from fompi.schedules import registry


def plans(size, dtype="float32"):
    for name, problem in catalogue.problems(size, dtype).items():
        for number, schedule in enumerate(registry.available(problem)):
            yield name, registry.write(problem, schedule, (1, (1, 2))[number % 2])


@pytest.mark.parametrize(("size", "dtype"), [(1, "float32"), (2, "bfloat16"), (3, "float32"), (4, "float32")])
def test_every_staged_plan_is_right(size, dtype):
    """Also if only some pairs of ranks use host memory: those of different hosts, here of two ranks each."""
    for name, plan in plans(size, dtype):
        for pairs in (lambda a, b: True, lambda a, b: a // 2 != b // 2, lambda a, b: False):
            made = staged(plan, pairs)
            fompi.verify(made)
            for program, before in zip(made.programs, plan.programs, strict=True):
                places = {b.name: b.place for b in program.buffers}
                for op in program.ops:
                    if isinstance(op, Collective):
                        through = True
                    elif isinstance(op, (Send, Recv)):
                        through = pairs(program.rank, op.dest if isinstance(op, Send) else op.source)
                    else:
                        continue
                    assert all((places[c.buffer] == "host") == through for c in (*op.reads, *op.writes)), name
                kept = [op for op in program.ops if getattr(op, "kernel", "") not in ("download", "upload")]
                assert [type(op) for op in kept] == [type(op) for op in before.ops]


def test_a_plan_without_staged_messages_is_unchanged():
    for _, plan in plans(3):
        if not any(isinstance(op, Collective) for program in plan.programs for op in program.ops):
            assert staged(plan, lambda a, b: False) == plan


def test_what_is_forwarded_is_not_downloaded():
    """In a ring only the own block is downloaded, and each of the others is uploaded once."""
    plan = fompi.plan(fompi.all_gather, Spec((8, 2), "float32", Shard(0)), ranks=4, schedule="ring")
    for program in staged(plan).programs:
        kernels = [op.kernel for op in program.ops if isinstance(op, Compute)]
        assert kernels.count("download") == 1 and kernels.count("upload") == 3


def test_what_a_kernel_has_changed_is_downloaded_again():
    """A block arrives, a kernel overwrites it, and it is sent: not the mirror of what has arrived."""
    plan = fompi.plan(fompi.all_gather, Spec((2, 3), "float32", Shard(0)), ranks=2, schedule="direct")
    x, y = "x", "y"

    def program(rank):
        other, own = 1 - rank, rank
        ops = (
            Recv(other, Chunk(y, other, other + 1)),
            Send(other, Chunk(x, own, own + 1)),
            Compute("copy", (Chunk(x, own, own + 1),), (Chunk(y, own, own + 1),)),
            Compute("copy", (Chunk(y, other, other + 1),), (Chunk("again", other, other + 1),)),
            Compute(
                "add",
                (Chunk("again", other, other + 1), Chunk(y, other, other + 1)),
                (Chunk("again", other, other + 1),),
            ),
            Send(other, Chunk("again", other, other + 1)),
            Recv(other, Chunk("back", own, own + 1)),
        )
        base = plan.programs[rank]
        scratch = [replace(base.buffer(y), name=name, role="scratch") for name in ("again", "back")]
        return replace(base, buffers=(*base.buffers, *scratch), ops=ops)

    changed = replace(plan, programs=Programs(2, program))
    fompi.verify(changed)
    made = staged(changed)
    fompi.verify(made)
    texts = [str(op) for op in made.programs[0].ops]
    assert texts.index("download(again[1]) -> again_host[1]") > texts.index("add(again[1], y[1]) -> again[1]")


def test_mutants_of_a_staged_plan_are_refused():
    plan = staged(fompi.plan(fompi.all_gather, Spec((6, 2), "float32", Shard(0)), ranks=3, schedule="ring"))
    ops = plan.programs[1].ops
    for i, op in enumerate(ops):
        if getattr(op, "kernel", "") in ("download", "upload"):
            broken = replace(plan.programs[1], ops=(*ops[:i], *ops[i + 1 :]))
            with pytest.raises(PlanError):
                fompi.verify(Plan(**{**plan.__dict__, "programs": (plan.programs[0], broken, plan.programs[2])}))


def test_mirrors_are_scratch_in_host_memory():
    plan = staged(fompi.plan(fompi.all_gather, Spec((6, 2), "float32", Shard(0)), ranks=3, schedule="ring"))
    mirrors = [b for b in plan.programs[0].buffers if is_mirror(b)]
    assert [(b.name, b.role, b.place) for b in mirrors] == [(f"{n}_host", "scratch", "host") for n in ("x", "y")]


def test_a_staged_plan_has_a_predicted_time():
    """Downloads and uploads take time, and they have lanes of their own."""
    for name, plan in plans(4):
        machine = Machine.load("gigabit")
        direct, through = fompi.simulate(plan, machine=machine), fompi.simulate(staged(plan), machine=machine)
        assert through.seconds >= direct.seconds, name
        lanes = {event.lane for event in through.events}
        if any(isinstance(op, (Send, Recv, Collective)) for op in plan.programs[0].ops):
            assert {"download", "upload"} & lanes, name


def test_a_staged_plan_can_be_staged_again():
    for _, plan in plans(3):
        assert staged(staged(plan)) == staged(plan)


def test_what_is_no_plan():
    with pytest.raises(PlanError, match=r"staged takes a fompi.Plan, not 3"):
        staged(3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_of_half_types(dtype):
    """On a device no weight is widened, and the results have the same bits."""
    for name, problem in catalogue.problems(3, dtype).items():
        plan = registry.write(problem, registry.available(problem)[-1], 2)
        made = for_device(plan, lambda a, b: False)
        fompi.verify(made)
        for program, before in zip(made.programs, plan.programs, strict=True):
            wide, widened = (
                [b.name for b in p.buffers if re.fullmatch(r"w\d*_wide", b.name)] for p in (program, before)
            )
            assert not wide and len(program.ops) == len(before.ops) - len(widened), name
            assert bool(widened) == (bool(problem.weights) and dtype == "bfloat16"), name
        sizes = catalogue.sizes(problem, "uneven")
        inputs = catalogue.inputs(problem, sizes, 1)
        wanted, got = (twin(each, inputs, Numpy(), sizes=sizes) for each in (plan, made))
        for one, other in zip(wanted, got, strict=True):
            assert {key: a.tobytes() for key, a in one.items()} == {key: a.tobytes() for key, a in other.items()}, name
