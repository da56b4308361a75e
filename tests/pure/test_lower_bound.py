"""The lower bound: no schedule is faster on any machine, and some schedules reach it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import catalogue
import pytest

import fompi
from fompi.base.layout import Partial, Shard, Sizes, Spec
from fompi.model.lower_bound import lower_bound
from fompi.model.machine import Level, Machine
from fompi.model.simulate import predict
from fompi.plans.specs import from_specs
from fompi.schedules import registry

NAMES = list(catalogue.problems(1))


def machines(draw):
    """Machines of each kind, with random numbers. Times are of the same order as those of the small problems."""
    plain = Machine(
        "drawn",
        draw.choice((0.0, 1.0)),
        10 ** draw.uniform(1, 3),
        10 ** draw.uniform(1, 4),
        10 ** draw.uniform(2, 4),
        draw.choice((0.0, 0.5)),
        pack_rate=10 ** draw.uniform(2, 5),
        lanes=draw.choice((1, 2)),
    )
    yield plain
    yield replace(plain, ports=2, levels=draw.choice(((), (Level(2, 2.0, plain.bandwidth / 7, True),))))
    yield replace(plain, rates=tuple(draw.choice((0.25, 0.5, 1.0)) for _ in range(4)))
    yield replace(plain, levels=(Level(2, 2.0, plain.bandwidth / 7, draw.random() < 0.5),))
    seconds = sorted(draw.uniform(plain.latency, plain.latency + 9.0) for _ in range(3))
    yield replace(plain, curve=tuple(zip((0.0, 40.0, 300.0), seconds, strict=True)))
    yield replace(plain, curve=((40.0, plain.latency + 3.0),))
    yield replace(plain, latency=1.0, curve=((0.0, 0.5), (300.0, 9.0)))
    levels = (Level(2, 2.0, plain.bandwidth / 7, draw.random() < 0.5, (), draw.choice((0.0, 1.0, 20.0))),)
    yield replace(plain, burst=10 ** draw.uniform(-2, 1), ports=2, levels=draw.choice(((), levels)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("size", "dtype"), [(1, "float64"), (2, "bfloat16"), (3, "float64"), (4, "bfloat16")])
def test_no_schedule_is_faster(name, size, dtype):
    draw = Random(f"{name} {size}")
    problem = catalogue.problems(size, dtype)[name]
    for number, machine in enumerate(machines(draw)):  # each has a third of the schedules
        sizes = catalogue.sizes(problem, ("even", "uneven")[(number + size) % 2])
        least = lower_bound(problem, sizes, machine)
        for schedule in registry.available(problem)[number % 3 :: 3]:
            if schedule == "sliced":
                continue  # the time of the library's sums behind kernels is not charged to the core
            seconds = predict(registry.write(problem, schedule, draw.choice((1, 2)), sizes), machine)
            assert seconds >= least.seconds * (1 - 1e-9), (schedule, machine, least)


@pytest.mark.parametrize("columns", [0, 3, 9])
def test_ranks_with_different_columns(columns):
    """The first ranks have more columns and multiply more. Any rank may add less than the mean."""
    for name in ("matmul_reduce_scatter", "matmul_all_reduce"):
        x, w = Spec((8, columns), "float32", Shard(1)), Spec((columns, 4), "float32", Shard(0))
        at, sizes = from_specs(name, [x, w], 4)
        for machine in machines(Random(columns)):
            least = lower_bound(at(0), sizes, machine, at)
            for schedule in ("direct", "ring", "unfused_p2p"):
                seconds = predict(registry.write(at(0), schedule, 1, sizes, None, at), machine)
                assert seconds >= least.seconds * (1 - 1e-9), (schedule, machine, least)


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_reduce"])
@pytest.mark.parametrize("rates", [(), (1.0, 0.5)])
def test_nothing_to_move(name, rates):
    """Without rows or columns, an explanation shows only latencies."""
    machine = replace(Machine.load("gigabit"), rates=rates)
    for rows, columns in ((0, 8), (64, 0), (0, 0)):
        specs = {
            "all_gather_matmul": (Spec((rows, 8), "float32", Shard(0)), Spec((8, columns), "float32", Shard(1))),
            "all_reduce": (Spec((rows, columns), "float32", Partial()),),
        }.get(name, (Spec((rows, 8), "float32", Shard(1)), Spec((8, columns), "float32", Shard(0))))
        explained = fompi.explain(name, *specs, ranks=2, machine=machine)
        assert str(explained) and explained.winner.seconds < 0.1


def plain(**more):
    return Machine("plain", 0.0, 48.0, 1e300, 1e300, 0.0, **more)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all", "all_reduce"])
def test_the_bound_is_reached_on_equal_links(name):
    """If only messages take time, direct messages take as long as the bound."""
    problem = catalogue.problems(4)[name]
    sizes = Sizes(pairs=((6,) * 4,) * 4) if name == "all_to_all" else Sizes((6,) * 4)
    least = lower_bound(problem, sizes, plain())
    assert predict(registry.write(problem, "direct", 1, sizes), plain()) == pytest.approx(least.seconds)
    assert least.what in {f"the bytes that {way}" for way in ("rank 3 receives", "rank 3 sends", "all ranks receive")}


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_the_bound_is_reached_over_a_shared_link(name):
    """2 x 2 ranks. The link between the groups is so slow that nothing else counts."""
    problem, sizes = catalogue.problems(4)[name], Sizes((6,) * 4)
    slow = plain(levels=(Level(2, 0.0, 48e-6, True),))
    least = lower_bound(problem, sizes, slow)
    assert "group" in least.what
    seconds = {s: predict(registry.write(problem, s, 1, sizes), slow) for s in ("hierarchical(2)", "direct", "ring")}
    assert seconds["hierarchical(2)"] == pytest.approx(least.seconds, rel=1e-5)
    assert seconds["direct"] == pytest.approx(2 * least.seconds, rel=1e-5)


def test_one_slow_rank():
    problem, sizes = catalogue.problems(4)["all_gather"], Sizes((6,) * 4)
    slow = plain(rates=(1.0, 1.0, 1.0, 0.25))
    least = lower_bound(problem, sizes, slow)
    assert least.what == "the bytes that rank 3 receives"
    assert predict(registry.write(problem, "direct", 1, sizes), slow) == pytest.approx(least.seconds)


def test_kernels_that_take_longer_than_messages():
    problem, sizes = catalogue.problems(4)["all_gather_matmul"], Sizes((6,) * 4)
    slow = Machine("slow", 0.0, 1e9, 100.0, 1e300, 0.0)
    least = lower_bound(problem, sizes, slow)
    assert least.what.startswith("the kernels of rank")
    assert predict(registry.write(problem, "ring", 1, sizes), slow) == pytest.approx(least.seconds)
