"""Plans whose messages have a wire: proven, with results within their bounds and the same bits on all ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import catalogue
import numpy as np
import pytest
from mutants import mutant, with_ops
from reference import reference
from twin import twin

import fompi
from fompi import Partial, Shard, Spec
from fompi.backends import in_c, wires
from fompi.backends.half import narrow, storage, widen
from fompi.backends.numpy import Numpy
from fompi.base.errors import DtypeError, PlanError
from fompi.base.wires import RUN, WIDE, WIRES, wire_of
from fompi.plans.kernels import ENCODE, exact
from fompi.plans.over_x import over_x
from fompi.plans.plan import Chunk, Compute, Send
from fompi.plans.problems import Problem, on_wire
from fompi.plans.verify import verify
from fompi.schedules import registry

BACKEND = Numpy()
ALL = [(name, dtype) for dtype, names in WIDE.items() for name in names]


def takes_wire(problem):
    return problem.op in ("sum", "mean")


# ---------------------------------------------------------------------------------------------------------- the plans


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(1, "float32"), (2, "bfloat16"), (3, "float32"), (3, "bfloat16"), (4, "float32"), (6, "bfloat16")],
)
def test_every_plan_is_right(size, dtype):
    """On 4 and 6 ranks each problem has half of the schedules."""
    random = Random(size)
    for number, (name, problem) in enumerate(catalogue.problems(size, dtype).items()):
        if not takes_wire(problem):
            continue
        problem = on_wire(problem, "int8")
        schedules = registry.available(problem)
        for schedule in schedules if size < 4 else schedules[(number + size // 2) % 2 :: 2]:
            plan = registry.write(problem, schedule, random.choice((1, 2, 3)))
            verify(plan)
            sent = {op.chunk.buffer for p in plan.programs for op in p.ops if isinstance(op, Send)}
            assert all(buffer.endswith("_int8") for buffer in sent), (name, schedule)
            assert plan.roundings == (0 if size == 1 else registry.roundings(problem, schedule))


@pytest.mark.parametrize(
    ("operation", "schedule", "size", "times"),
    [
        ("reduce_scatter", "direct", 4, 1), ("all_reduce", "direct", 4, 2), ("all_gather", "ring", 4, 1),
        ("reduce_scatter", "ring", 4, 3), ("all_reduce", "ring", 4, 4), ("broadcast", "direct", 3, 1),
        ("all_reduce", "hierarchical(2)", 4, 3), ("all_gather", "hierarchical(2)", 4, 1),
    ],
)  # fmt: skip
def test_how_often_terms_are_rounded(operation, schedule, size, times):
    """What the plan says is reached, and one less is refused."""
    plan = registry.write(Problem(operation, size, "float32", (), wire="int8"), schedule, 2)
    with pytest.raises(PlanError, match=f"was rounded {times} times, but at most {times - 1} are allowed"):
        verify(replace(plan, roundings=times - 1))
    verify(replace(plan, roundings=times))


def test_a_block_that_passes_is_not_encoded_again():
    """In a ring each rank encodes its own block, and sends on what it has got."""
    plan = registry.write(Problem("all_gather", 5, "float32", (), wire="int8"), "ring", 1)
    for program in plan.programs:
        assert sum(isinstance(op, Compute) and op.kernel in ENCODE for op in program.ops) == 1
        assert sum(isinstance(op, Send) for op in program.ops) == 4


@pytest.mark.parametrize("size", [2, 3, 5])
def test_over_x(size):
    for operation, schedule in (("all_reduce", "direct"), ("all_reduce", "ring"), ("broadcast", "direct")):
        verify(over_x(registry.write(Problem(operation, size, "float32", (), wire="int8"), schedule, 2)))


def normal(own, shape, _):
    return 3 * own.standard_normal(shape).astype("f4")


def bound(problem, inputs, roundings):
    """How far sums and moves may be off: each rounding by half a unit of the largest scale of a term or partial sum."""
    wire, largest = WIRES[problem.wire], [max(np.abs(i["x"]).max(initial=0.0), 1e-30) for i in inputs]
    total = float(sum(largest)) if problem.sums else float(max(largest))
    each = wire.of_scale * total / wire.top if wire.top else 0.0
    return 1.01 * problem.size * roundings * (each + wire.of_itself * total + wire.least) + 1e-6 * total


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_a_mean_that_fits_where_a_sum_does_not(size):
    """float16 holds 40000 and not 80000. A schedule that sends sums of some ranks is refused."""
    for collective, row in (("all_reduce", ()), ("reduce_scatter", (7,))):
        problem = on_wire(Problem(collective, size, "float32", row, op="mean"), "float16")
        for schedule in registry.available(problem):
            plan, sizes = registry.write(problem, schedule), catalogue.sizes(problem, "uneven", 1)
            inputs = catalogue.inputs(problem, sizes, 0, lambda rng, shape, dtype: np.full(shape, 40000, dtype))
            for outputs in twin(plan, inputs, BACKEND, sizes=sizes, seed=1):
                assert all((y == 40000).all() for y in outputs.values())
    if size > 2:
        with pytest.raises(PlanError, match="'ring': its messages cannot carry the wire float16: a sum of some ranks"):
            registry.write(problem, "ring")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_results_are_within_the_bound(size):
    """Random interleavings, uneven and empty shards; what all ranks get has the same bits.

    The schedules take turns: each wire has half of them.
    """
    rng = np.random.default_rng(size)
    problems = [Problem("all_reduce", size, "float32", (), op=op) for op in ("sum", "mean")]
    problems += [Problem("all_gather", size, "float32", (70,)), Problem("reduce_scatter", size, "float32", (7,))]
    problems += [Problem("broadcast", size, "float32", ()), Problem("all_to_all", size, "float32", (3,))]
    for number, (problem, wire) in enumerate(product(problems, WIRES)):
        problem = on_wire(problem, wire)
        for schedule in registry.available(problem)[(number + size) % 2 :: 2]:
            plan = registry.write(problem, schedule, int(rng.integers(1, 4)))
            sizes = catalogue.sizes(problem, str(rng.choice(catalogue.ROWS)), int(rng.integers(100)))
            inputs = catalogue.inputs(problem, sizes, 0, normal)
            got = twin(plan, inputs, BACKEND, sizes=sizes, seed=int(rng.integers(1000)))
            wanted = reference(problem, inputs, sizes, np)
            for mine, theirs in zip(got, wanted, strict=True):
                most = bound(problem, inputs, plan.roundings)
                np.testing.assert_allclose(mine["y"], theirs["y"], rtol=0, atol=most)
                if problem.replicated:
                    assert mine["y"].tobytes() == got[0]["y"].tobytes(), (str(problem), schedule)


# ------------------------------------------------------------------------------------------------------ spoiled plans


def test_mutants_are_refused_or_harmless():
    """The inputs are small integers, which a bfloat16 holds: what is accepted must give the bits of the right plan."""
    random, refused = Random(0), 0
    for _ in range(500):
        size = random.choice((2, 3, 4))
        named = [p for p in catalogue.problems(size, "float32").values() if takes_wire(p)]
        problem = on_wire(random.choice(named), "bfloat16")
        plan = registry.write(problem, random.choice(registry.available(problem)), random.choice((1, 2)))
        name, changed = mutant(plan, random)
        try:
            verify(changed)
        except PlanError:
            refused += 1
            continue
        sizes = catalogue.sizes(problem, "uneven")
        inputs = catalogue.inputs(problem, sizes, fill=catalogue.integers)
        right, wrong = (twin(p, inputs, BACKEND, sizes=sizes, seed=1) for p in (plan, changed))
        for a, b in zip(right, wrong, strict=True):
            assert all(a[k].tobytes() == b[k].tobytes() for k in a), f"{name}\n{plan}\n\n{changed}"
    assert refused > 300


def spoiled(plan, rank, change):
    return with_ops(plan, rank, change([*plan.programs[rank].ops]))


def is_(op, kernel, buffer):
    chunks = [*op.reads, *op.writes]
    return isinstance(op, Compute) and op.kernel == kernel and any(c.buffer == buffer for c in chunks)


def test_an_owner_that_keeps_the_exact_sum():
    """The classical fault: the others have its message, it has another number."""
    plan = registry.write(Problem("all_reduce", 3, "float32", (), wire="int8"), "direct", 1)
    own = Chunk("y", 1, 2)
    kept = spoiled(plan, 1, lambda ops: [o for o in ops if not (is_(o, "decode_int8", "y") and o.writes == (own,))])
    with pytest.raises(PlanError, match=r"y\[1\] is not the message that the other ranks have decoded"):
        verify(kept)


def test_a_passing_block_that_is_encoded_again():
    plan = registry.write(Problem("all_gather", 3, "float32", (), wire="int8"), "ring", 1)

    def again(ops):
        i = next(i for i, o in enumerate(ops) if isinstance(o, Send) and o.chunk.buffer == "y_int8")
        source = ops[i].chunk._replace(buffer="y")
        return [*ops[:i], Compute("encode_int8", (source,), (ops[i].chunk,)), *ops[i:]]

    with pytest.raises(PlanError, match="rounded 2 times, but at most 1"):
        verify(spoiled(plan, 0, again))


def test_the_mirror_of_another_block_or_of_another_time():
    plan = registry.write(Problem("all_reduce", 3, "float32", (), wire="int8"), "direct", 1)

    def of_another(ops):
        i = next(i for i, o in enumerate(ops) if is_(o, "decode_int8", "y"))
        other = ops[i].reads[0]._replace(start=0, stop=1)
        return [*ops[:i], replace(ops[i], reads=(other,)), *ops[i + 1 :]]

    def stale(ops):
        return [op for op in ops if not is_(op, "encode_int8", "y")]

    for change in (of_another, stale):
        with pytest.raises(PlanError):
            verify(spoiled(plan, 0, change))


def test_kernels_and_messages_without_the_wire():
    plan = registry.write(Problem("all_reduce", 2, "float32", (), wire="int8"), "direct", 1)

    def copied(ops):
        copy = Compute("copy", (Chunk("x_int8", 1, 2),), (Chunk("y", 0, 1),))
        return [copy if is_(o, "decode_add_int8", "y") else o for o in ops]

    with pytest.raises(PlanError, match="has the wire int8"):
        verify(spoiled(plan, 0, copied))
    with pytest.raises(PlanError, match="does not have the wire int8"):
        verify(spoiled(plan, 0, lambda ops: [Compute("decode_int8", (Chunk("x", 0, 1),), (Chunk("y", 0, 1),)), *ops]))


def test_the_terms_of_a_rounded_value():
    value = (("rounded", (0, 3), (("x", 0, 1), ("rounded", (1, 2), (("x", 1, 1),)))), ("x", 2, 1))
    assert exact(value) == ((("x", 0, 1), ("x", 1, 1), ("x", 2, 1)), 2)
    mean = (("mean3", (value,)),)
    assert exact(mean) == ((("mean3", (exact(value)[0],)),), 2)
    product_ = (("matmul", value[0], ("w", 0, 0)),)
    assert exact(product_) == ((("matmul", ("x", 0, 1), ("w", 0, 0)), ("matmul", ("x", 1, 1), ("w", 0, 0))), 2)


# ---------------------------------------------------------------------------------------------- through the interfaces


def test_a_plan_with_a_wire():
    plan = fompi.plan(fompi.all_reduce, Spec((8,), "float32", Partial()), ranks=4, schedule="ring", wire="int8")
    assert plan.roundings == 4 and "wire int8" in str(plan.problem)
    gathered = fompi.plan(fompi.all_gather, Spec((8, 4), "bfloat16", Shard(0)), ranks=2, wire="int4")
    assert gathered.problem.wire == "int4"


@pytest.mark.parametrize(
    ("dtype", "wire", "words"),
    [
        ("int32", "int8", "int32 is sent as it is"), ("float64", "bfloat16", "float64 is sent as it is"),
        ("bfloat16", "float16", "bfloat16 takes int8"), ("float32", "int3", "known are bfloat16"),
    ],
)  # fmt: skip
def test_wires_that_a_dtype_does_not_take(dtype, wire, words):
    with pytest.raises(DtypeError, match=words):
        wire_of(wire, dtype)
    assert wire_of(None, dtype) == wire_of(dtype, dtype) == ""


def test_what_takes_no_wire():
    with pytest.raises(DtypeError, match="only sums and means"):
        on_wire(Problem("all_reduce", 2, "float32", (), op="max"), "int8")
    for schedule in ("unfused", "sliced", "exchange", "doubling"):
        with pytest.raises(PlanError, match=r"cannot carry the wire int8; choose auto, unfused_p2p"):
            registry.write(Problem("all_reduce", 2, "float32", (), wire="int8"), schedule)


# --------------------------------------------------------------------------------------------------------- the kernels


def numbers(rng, count, kind):
    x = (rng.standard_normal(count) * 10.0 ** rng.integers(-42, 37)).astype(np.float32)
    if kind == "integers":
        x = rng.integers(-300, 300, count).astype(np.float32)
    if kind == "zeros":
        x[:] = -0.0
    if kind == "denormals":
        x = (rng.integers(-400, 400, count) * 2.0**-149).astype(np.float32)
    if kind == "largest":  # and its neighbours, on both sides of what bfloat16 and float16 hold
        bits = rng.choice([0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F7F0000, 0x477FEFFF, 0x477FF000], count)
        x = (bits - rng.integers(0, 9, count) | rng.integers(0, 2, count) << 31).astype(np.uint32).view(np.float32)
    if kind == "one largest" and count:
        x[rng.integers(count)] = -np.finfo(np.float32).max
    if kind in ("nan", "inf") and count:
        x[rng.integers(count)] = float(kind)
    return x


KINDS = ("numbers", "integers", "zeros", "denormals", "largest", "one largest", "nan", "inf")


@pytest.mark.parametrize(("name", "dtype"), ALL)
def test_kernels_in_c_have_the_bits_of_numpy(name, dtype, monkeypatch):
    monkeypatch.setattr(in_c, "run", pytest.importorskip("fompi.native._native").kernel)
    rng, wire = np.random.default_rng(0), WIRES[name]
    for count, kind in product((0, 1, 63, 64, 65, 1000), KINDS):
        with np.errstate(over="ignore", invalid="ignore"):
            a, b = (narrow(numbers(rng, count, each), dtype) for each in (kind, "integers"))
        m, n = np.full((2, wire.nbytes(count)), 7, np.uint8)
        in_c.of_wire(f"encode_{name}", [a, m], [dtype, "uint8"], count)()
        wires.run(f"encode_{name}", [a, n], [dtype, "uint8"])
        assert m.tobytes() == n.tobytes(), (count, kind)
        c, d, e, f = np.zeros((4, count), storage(dtype))
        in_c.of_wire(f"decode_{name}", [m, c], ["uint8", dtype], count)()
        wires.run(f"decode_{name}", [m, d], ["uint8", dtype])
        in_c.of_wire(f"decode_add_{name}", [m, b, e], ["uint8", dtype, dtype], count)()
        wires.run(f"decode_add_{name}", [m, b, f], ["uint8", dtype, dtype])
        for of_c, of_numpy in ((c, d), (e, f)):
            np.testing.assert_array_equal(widen(of_c, dtype), widen(of_numpy, dtype))


@pytest.mark.parametrize("name", WIRES)
def test_elements_are_off_by_no_more_than_the_wire_says(name):
    rng, wire = np.random.default_rng(1), WIRES[name]
    for count, kind, _ in product((1, 63, 200), KINDS[:-2], range(60)):
        x = numbers(rng, count, kind)
        if name == "float16":
            x = np.clip(x, -65504, 65504)
        m = np.zeros(wire.nbytes(count), np.uint8)
        wires.encode(wire, x, m)
        y = wires.decode(wire, m, count)
        assert np.isfinite(y).all()
        error = np.abs(y.astype(np.float64) - x)
        for at in range(0, count, RUN):
            run = np.abs(x[at : at + RUN].astype(np.float64))
            scale = run.max() / wire.top if wire.top else 0.0
            most = wire.of_scale * scale + wire.of_itself * run + wire.least
            assert (error[at : at + RUN] <= most).all(), (count, kind)
        told, largest = wires.half_unit(name, m, count)
        assert error.max() <= told and np.abs(y).max(initial=0.0) <= largest, (count, kind)


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "int4"])
def test_a_run_with_a_nan_is_nan_and_its_neighbour_is_not(name):
    x, wire = np.ones(2 * RUN, np.float32), WIRES[name]
    x[5] = np.inf
    m = np.zeros(wire.nbytes(x.size), np.uint8)
    wires.encode(wire, x, m)
    y = wires.decode(wire, m, x.size)
    assert np.isnan(y[:RUN]).all() and (y[RUN:] == 1).all()


@pytest.mark.parametrize(("name", "dtype"), ALL)
def test_feedback_makes_no_infinity_of_what_is_finite(name, dtype):
    """Of the largest elements there is something to give back in the second step. What is infinite stays so."""
    most = np.float32([{"float16": 65504, "bfloat16": (2 - 2**-7) * 2.0**127}.get(dtype, np.finfo(np.float32).max)])
    if name == "float16":  # above, this wire is infinite
        most = np.float32([65504])
    x = np.concatenate([most.repeat(70), -most * np.linspace(0, 1, 70, dtype=np.float32), np.ones(70, np.float32)])
    feedback = wires.Feedback(name, 2, 1, np.zeros(x.size, np.float32))
    for _ in range(3):
        given = narrow(x, dtype)
        feedback.give_back(given, dtype)
        feedback.keep()
        assert np.isfinite(widen(given, dtype)).all() and np.isfinite(feedback.lost).all()
        m, got = np.zeros(WIRES[name].nbytes(x.size), np.uint8), np.empty_like(x)
        wires.run(f"encode_{name}", [given, m], [dtype, "uint8"])
        wires.run(f"decode_{name}", [m, got], ["uint8", "float32"])
        assert np.isfinite(got).all()
    x[-1] = np.inf
    given = narrow(x, dtype)
    feedback.give_back(given, dtype)
    assert np.isinf(widen(given, dtype)[-1])
