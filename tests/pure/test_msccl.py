"""Schedules of other systems: the verdict agrees with runs on data, and the plan that follows is right too."""

from __future__ import annotations

import re
from random import Random

import catalogue
import msccl_schedules
import numpy as np
import pytest
from reference import reference
from twin import twin

import fompi
import msccl
from algorithm import ScheduleError
from fompi.backends.numpy import Numpy
from fompi.plans.verify import verify
from proof import check
from translate import plan_of


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", msccl_schedules.ALL)
def test_a_right_schedule(name, size):
    """It is right, its plan is verified, and has the results of the operation, also with uneven rows."""
    algorithm = msccl.read(msccl_schedules.ALL[name](size))
    verdict = check(algorithm)
    assert verdict.is_right, verdict.reasons
    assert all(msccl_schedules.runs_right(algorithm, seed, verdict.slots) for seed in range(3))
    assert verdict.slots == 1 or not msccl_schedules.runs_right(algorithm, 0, verdict.slots // 2)
    made = plan_of(algorithm, verdict, 4, (3,), "float64")
    verify(made)
    for distribution in ("even", "uneven"):
        sizes = catalogue.sizes(made.problem, distribution)
        given = catalogue.inputs(made.problem, sizes, fill=catalogue.integers)
        wanted = reference(made.problem, given, sizes, np)
        for got, expected in zip(twin(made, given, Numpy(), sizes=sizes, seed=1), wanted, strict=True):
            (y,), (z,) = got.values(), expected.values()
            assert y.tobytes() == np.ascontiguousarray(z).tobytes()


def test_numbers():
    verdict = check(msccl.read(msccl_schedules.ring_all_reduce(4)))
    assert (verdict.moved, verdict.depth, verdict.slots) == ((6,) * 4, 6, 2)
    ring = fompi.plan("all_reduce", fompi.Spec((64,), "float32", fompi.Partial()), ranks=4, schedule="ring")
    made = plan_of(msccl.read(msccl_schedules.ring_all_reduce(4)), verdict, 16, (), "float32")
    assert fompi.simulate(made, "gigabit").seconds == pytest.approx(fompi.simulate(ring, "gigabit").seconds)


def spoiled(random, text):
    """The schedule with one thing changed: a kind, a place, a count, an order, what is waited for, a connection."""
    steps = [*re.finditer(r"<step [^>]*/>", text)]
    at = random.choice(steps)
    step = at[0]
    way = random.randrange(7)
    if way == 0:
        changed = re.sub(r'type="\w+"', f'type="{random.choice([*msccl.KINDS])}"', step)
    elif way in (1, 2):
        changed = re.sub(rf'{("src", "dst")[way - 1]}off="\d+"', lambda m: m[0][:8] + f'{random.randrange(9)}"', step)
    elif way == 3:
        changed = re.sub(r'depid="-?\d+" deps="-?\d+"', 'depid="-1" deps="-1"', step)
    elif way == 4:
        changed = step.replace('cnt="1"', 'cnt="2"')
    elif way == 5:
        other = random.choice(steps)[0]  # the two change places
        numbers = [re.search(r's="\d+"', each)[0] for each in (step, other)]
        moved = [re.sub(r's="\d+"', n, each, count=1) for n, each in zip(numbers, (other, step), strict=True)]
        return text.replace(step, "@", 1).replace(other, moved[1], 1).replace("@", moved[0], 1)
    else:
        return re.sub(r'send="(\d)" recv="(\d)"', r'send="\2" recv="\1"', text, count=1)
    return text[: at.start()] + changed + text[at.end() :]


@pytest.mark.parametrize("name", msccl_schedules.ALL)
def test_no_spoiled_schedule_is_accepted(name):
    """What is accepted gives the right result in every run that was tried. What a run shows to be wrong is refused."""
    random, refused = Random(name), 0
    for _ in range(150):
        text = spoiled(random, msccl_schedules.ALL[name](random.choice((2, 3, 4))))
        try:
            algorithm = msccl.read(text)
        except ScheduleError:
            refused += 1
            continue
        verdict = check(algorithm)
        if verdict.is_right:
            assert all(msccl_schedules.runs_right(algorithm, seed) for seed in range(5)), text
            verify(plan_of(algorithm, verdict, 4, (), "float32"))
        else:
            refused += 1
            assert len(verdict.reasons) >= 1 and all(verdict.reasons)
    assert refused > 60


def test_reasons():
    right = msccl_schedules.all_pairs_all_reduce(3)
    race = check(msccl.read(re.sub(r'depid="2" deps="1"', 'depid="-1" deps="-1"', right, count=1)))
    assert any(re.search(r"may (read|write) output\[\d\] while rank 0, thread block \d", why) for why in race.reasons)
    lacks = check(msccl.read(msccl_schedules.ring_all_reduce(4).replace('type="rrs"', 'type="rcs"', 1)))
    assert "lacks chunk" in lacks.reasons[0] and "wrote it last" in lacks.reasons[0]
    circle = msccl_schedules.xml(
        "allreduce", 2, 2, [[(1 - r, 1 - r, 0, [("rcs", ("i", 0), ("i", 0), 1, None)])] for r in range(2)]
    )
    (why,) = check(msccl.read(circle)).reasons
    assert why.startswith("it never ends: rank 0, thread block 0, step 0 (rcs) waits for a message from rank 1; rank 1")
    for text, words in (
        ("<algo", "it is no XML"),
        ("<plan/>", "no schedule of MSCCL"),
        (right.replace('coll="allreduce"', 'coll="custom"'), "coll='custom' is none of allreduce"),
        (right.replace('type="re"', 'type="rrz"', 1), "the type 'rrz' is none of s, r, rcs"),
        (right.replace('cnt="1"', 'cnt="x"', 1), "cnt='x' must be an integer"),
        (right.replace('srcbuf="s"', 'srcbuf="q"', 1), "srcbuf='q' is none of i, o, s"),
        (right.replace('ngpus="3"', 'ngpus="4"'), "the gpus are"),
    ):
        with pytest.raises(ScheduleError, match=re.escape(words)):
            msccl.read(text)


def test_files_that_no_memory_holds():
    """A chunk that is added to itself has 2**n terms; numbers, encodings and sizes are refused in one sentence."""
    double = '<step s="{}" type="re" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1"/>'
    text = '<algo coll="allreduce" ngpus="1" nchunksperloop="{}"><gpu id="0" i_chunks="1" o_chunks="1"><tb id="0" '
    text += 'send="-1" recv="-1">' + "".join(map(double.format, range(64))) + "</tb></gpu></algo>"
    assert "nothing writes it" in check(msccl.read(text.format(1).encode("utf-16"))).reasons[0]
    with pytest.raises(ScheduleError, match="too many to be proven"):
        check(
            msccl.read(
                text.format(1 << 20).replace('cnt="1"', 'cnt="1048576"').replace('_chunks="1"', '_chunks="1048576"')
            )
        )
    for wrong in (
        '<?xml version="1.0" encoding="klingon"?><algo/>',
        '<?xml version="1.0" encoding="shift_jis"?><algo/>',
    ):
        with pytest.raises(ScheduleError, match="no XML"):
            msccl.read(wrong.encode())
    with pytest.raises(ScheduleError, match=r"ngpus='9999\d+\.\.\.\d+' must be an integer") as found:
        msccl.read(text.replace('ngpus="1"', f'ngpus="{"9" * 5000}"').format(1))
    assert len(str(found.value)) < 100
