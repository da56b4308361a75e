"""The lower bound: below every schedule on every machine, and reached where it can be."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import catalogue
import pytest

import fompi
from fompi.base.layout import Partial, Shard, Sizes, Spec
from fompi.model.bound import bound
from fompi.model.machine import Level, Machine
from fompi.model.simulate import predict
from fompi.plans.problems import from_specs
from fompi.schedules import registry

NAMES = list(catalogue.problems(1))


def machines(draw):
    """Some numbers of each kind, of the same order as the small problems of the catalogue."""
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


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_no_schedule_is_below_it(name, size, dtype):
    draw = Random(f"{name} {size}")
    problem = catalogue.problems(size, dtype)[name]
    for how in ("even", "uneven"):
        sizes = catalogue.sizes(problem, how)
        for machine in machines(draw):
            least = bound(problem, sizes, machine)
            for schedule in registry.available(problem):
                if schedule == "sliced":
                    continue  # sums of the library behind kernels are not charged to the core
                seconds = predict(registry.write(problem, schedule, draw.choice((1, 2)), sizes), machine)
                assert seconds >= least.seconds * (1 - 1e-9), (schedule, machine, least)


@pytest.mark.parametrize("columns", [0, 3, 9])
def test_ranks_with_other_columns(columns):
    """What stays is spread: the first ranks multiply more, and any rank may make fewer sums than the mean."""
    for name in ("matmul_reduce_scatter", "matmul_all_reduce"):
        x, w = Spec((8, columns), "float32", Shard(1)), Spec((columns, 4), "float32", Shard(0))
        at, sizes = from_specs(name, [x, w], 4)
        for machine in machines(Random(columns)):
            least = bound(at(0), sizes, machine, at)
            for schedule in ("direct", "ring", "unfused_p2p"):
                seconds = predict(registry.write(at(0), schedule, 1, sizes, None, at), machine)
                assert seconds >= least.seconds * (1 - 1e-9), (schedule, machine, least)


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_reduce"])
@pytest.mark.parametrize("rates", [(), (1.0, 0.5)])
def test_nothing_to_move(name, rates):
    """No rows, or no columns: an explanation all the same, of no time but latencies."""
    machine = replace(Machine.load("gigabit"), rates=rates)
    for rows, columns in ((0, 8), (64, 0), (0, 0)):
        specs = {
            "all_gather_matmul": (Spec((rows, 8), "float32", Shard(0)), Spec((8, columns), "float32", Shard(1))),
            "all_reduce": (Spec((rows, columns), "float32", Partial()),),
        }.get(name, (Spec((rows, 8), "float32", Shard(1)), Spec((8, columns), "float32", Shard(0))))
        found = fompi.explain(name, *specs, ranks=4, machine=machine)
        assert str(found) and found.winner.seconds < 0.1


def plain(**more):
    return Machine("plain", 0.0, 48.0, 1e300, 1e300, 0.0, **more)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all", "all_reduce"])
def test_it_is_reached_on_equal_links(name):
    """Where only messages count, pairwise messages take what they must."""
    problem = catalogue.problems(4)[name]
    sizes = Sizes(pairs=((6,) * 4,) * 4) if name == "all_to_all" else Sizes((6,) * 4)
    least = bound(problem, sizes, plain())
    assert predict(registry.write(problem, "direct", 1, sizes), plain()) == pytest.approx(least.seconds)
    assert least.what in ("what rank 3 receives", "what rank 3 sends", "what all ranks receive")


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_it_is_reached_over_a_shared_link(name):
    """2 x 2 ranks and a link between that is so slow that nothing else counts."""
    problem, sizes = catalogue.problems(4)[name], Sizes((6,) * 4)
    slow = plain(levels=(Level(2, 0.0, 48e-6, True),))
    least = bound(problem, sizes, slow)
    assert "group" in least.what
    found = {s: predict(registry.write(problem, s, 1, sizes), slow) for s in ("hierarchical(2)", "direct", "ring")}
    assert found["hierarchical(2)"] == pytest.approx(least.seconds, rel=1e-5)
    assert found["direct"] == pytest.approx(2 * least.seconds, rel=1e-5)


def test_one_slow_rank():
    problem, sizes = catalogue.problems(4)["all_gather"], Sizes((6,) * 4)
    slow = plain(rates=(1.0, 1.0, 1.0, 0.25))
    least = bound(problem, sizes, slow)
    assert least.what == "what rank 3 receives"
    assert predict(registry.write(problem, "direct", 1, sizes), slow) == pytest.approx(least.seconds)


def test_kernels_that_take_longer_than_messages():
    problem, sizes = catalogue.problems(4)["all_gather_matmul"], Sizes((6,) * 4)
    slow = Machine("slow", 0.0, 1e9, 100.0, 1e300, 0.0)
    least = bound(problem, sizes, slow)
    assert least.what.startswith("the kernels of rank")
    assert predict(registry.write(problem, "ring", 1, sizes), slow) == pytest.approx(least.seconds)
