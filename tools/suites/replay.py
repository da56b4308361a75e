"""Replays and advices beside what is measured: ten programs, what a record costs, and advice that was followed.

    python -m fompi.lab run --hosts 2 --rate 1gbit -- python -m fompi bench replay [--row advice]

| row                | what it is                                                                                  |
|--------------------|---------------------------------------------------------------------------------------------|
| `replay: NAME`     | a program is recorded in this process and replayed: replayed over measured step             |
| `cost: NAME`       | its step with and without a record, in turns                                                |
| `advice: NAME`     | a small program is recorded, changed as an advice says, and measured: predicted over that   |
| `advice: order`    | all changes of one program: the share of their pairs that the advice has in the right order |

The row `advice: link` sets the rate of the hosts, so it needs `fompi.lab`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

import fompi
import fompi.jax
from c10d import beside_torch
from decode import Decoder, _summed
from fompi import mpi
from fompi.bench.measure import Bench, Call
from fompi.engine.communicator import Communicator
from fompi.model.replay import Graph
from fompi.planner.advice import advise
from fompi.runtime.recorder import Recorder
from fompi.torch import DiLoCo
from fompi.traces.record import load
from fompi.tuning.rounds import Figure, Row, meet, text_of_rank_0
from strategy import (
    Dimensions,
    Strategy,
    StrategySetting,
    mixture_of_experts,
    pipeline,
    ring,
    tensor_parallel_block,
    zero_1,
)
from training import Gpt, TorchTask, alone, data_parallel, descent, fully_sharded, pipelined

STEPS, MORE, TURNS = 10, 3, 3
"""Steps of a record, and those before it that do not count. An advice is followed in so many turns."""

WITHIN, FOLLOWED, COST = 0.04, 0.10, 1.01
"""Asked: a replay and an advice are right within these shares, and a step with a record takes at most this."""

FULL, QUICK = Gpt(4, 256, 4, 2048, 4, 64), Gpt(2, 32, 2, 64, 2, 8)
SIZES = Dimensions(1024, 512, 512, 1024, 8, 32, 256, 256, 256, 256)
QUICK_SIZES = Dimensions(64, 64, 64, 128, 8, 16, 32, 32, 64, 64)
SIDE, QUICK_SIDE = 512, 128
"""The models, the sizes of strategies, and the sides of the products of programs on arrays."""


# ----------------------------------------------------------------------------------------------------- ten programs


class Place(NamedTuple):
    """Where a program runs: the benchmark, and a group of torch with the backend "fompi"."""

    bench: Bench
    group: Any

    @property
    def task(self) -> Any:
        return (QUICK if self.bench.quick else FULL).task(self.bench.comm.rank)

    @property
    def side(self) -> int:
        return QUICK_SIDE if self.bench.quick else SIDE


def of_strategy(make: Callable[[StrategySetting], Strategy], place: Place) -> Call:
    setting = StrategySetting(place.bench, place.bench.comm, QUICK_SIZES if place.bench.quick else SIZES)
    strategy = make(setting)
    return strategy.both_ways or strategy.call


def of_ddp(place: Place) -> Call:
    return data_parallel(place.task, place.group, bucket_cap_mb=0.01 if place.bench.quick else 2)


def of_fsdp(place: Place) -> Call:
    return fully_sharded(place.task, place.group, learning_rate=1e-3)


def of_pipeline(place: Place) -> Call:
    """1F1B of torch, a stage on each rank."""
    rank, size = place.bench.comm.rank, place.bench.comm.size
    task = (QUICK if place.bench.quick else FULL)._replace(sequences=2 * size).task(0)
    cuts = [len(task.parts) * at // size for at in range(size + 1)]
    own = task._replace(parts=task.parts[cuts[rank] : cuts[rank + 1]])
    return pipelined([own.model], task, 2 * size, place.group)


def of_generate(place: Place) -> Call:
    """Four tokens of a decoder whose heads and columns are spread over the ranks."""
    size = QUICK if place.bench.quick else FULL
    decoder, at = Decoder(place.bench.comm, size, 2 * size.width), size.length

    def step() -> None:
        with torch.inference_mode():
            for _ in range(4):
                decoder.run(partial(_summed, place.group), at, at + 1, 1)

    return step


def of_jax(place: Place) -> Call:
    """A layer whose weights are spread over the ranks, and its gradients."""
    comm, side = place.bench.comm, place.side
    x, w1, w2 = (jnp.full((side, side), 1 / side, jnp.float32) for _ in range(3))

    def loss(x: Any, w1: Any, w2: Any) -> Any:
        h = fompi.jax.all_gather_matmul(x, w1, comm=comm)  # type: ignore[attr-defined]
        y = fompi.jax.matmul_reduce_scatter(jnp.maximum(h, 0), w2, comm=comm)  # type: ignore[attr-defined]
        return jnp.square(y).sum()

    gradients = fompi.jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    return lambda: jax.block_until_ready(gradients(x, w1, w2))


def of_mpi4py(place: Place) -> Call:
    """Power iterations: a product, a sum by the MPI library, and one by fompi while it goes on."""
    comm, side = mpi.Comm(place.bench.mpi), place.side
    a, x = np.full((side, side), 1 / side), np.ones((side, side))
    y, norm, sums = np.empty_like(x), np.ones(8), np.empty(8)

    def step() -> None:
        request = comm.Iallreduce(a @ x, y)
        a @ x
        request.Wait()
        comm.Allreduce(norm, sums)

    return step


def of_outer(place: Place) -> Call:
    """Each rank is an island, which exchanges a fragment in every fourth step."""
    task = place.task
    outer = DiLoCo(task.model, None, place.bench.comm, sync_every=8, fragments=2, delay=1)
    return alone(task, outer.model, lambda: (descent(outer.model, 1e-3)(), outer.step()))


PROGRAMS: Mapping[str, Callable[[Place], Call]] = {
    "DDP": of_ddp,
    "FSDP2": of_fsdp,
    "tensor parallel": partial(of_strategy, tensor_parallel_block),
    "pipeline of torch": of_pipeline,
    "pipeline": partial(of_strategy, pipeline),
    "experts": partial(of_strategy, mixture_of_experts),
    "generate": of_generate,
    "JAX": of_jax,
    "mpi4py": of_mpi4py,
    "ZeRO": partial(of_strategy, zero_1),
    "ring attention": partial(of_strategy, ring),
    "outer steps": of_outer,
}

COSTS = ("DDP", "tensor parallel", "generate")


@contextmanager
def recording(bench: Bench, recorder: Recorder | None) -> Iterator[None]:
    """The calls of this process are noted by `recorder`, as if FOMPI_RECORD were set."""
    engine = bench.comm.engine
    engine.report = engine.recorder = recorder
    try:
        yield
    finally:
        engine.report = engine.recorder = None


def recorded(bench: Bench, make: Callable[[], Call], steps: int) -> tuple[Graph, list[str]]:
    """The record of these steps, on all ranks, and the hosts. Collective: the hosts share a file system."""
    with TemporaryDirectory() as own:
        folder = text_of_rank_0(bench.comm, own)
        recorder = Recorder(folder)
        with recording(bench, recorder):
            call = make()
            for _ in range(MORE):
                call()
            meet(bench.mpi)
            recorder.mark(recorder.steps)
            for _ in range(steps):
                call()
                recorder.mark(recorder.steps)
        recorder.finish()
        meet(bench.mpi)
        records = load(folder)
        meet(bench.mpi)  # rank 0 removes the folder
    return Graph.of(records), [record.host for record in records]


def replayed(bench: Bench, group: Any, name: str) -> Row:
    graph, _ = recorded(bench, partial(PROGRAMS[name], Place(bench, group)), STEPS)
    played = graph.run()
    samples = {"measured": graph.measured.steps.tolist(), "replayed": played.steps.tolist()}
    ratio = Figure("replayed / measured", played.step / graph.measured.step, least=1 - WITHIN, most=1 + WITHIN)
    return replace(bench.row_of(f"replay: {name}", samples, base="measured"), figures=[ratio])


def cost(bench: Bench, group: Any, name: str) -> Row:
    call = PROGRAMS[name](Place(bench, group))
    with TemporaryDirectory() as folder:
        recorder = Recorder(folder)

        def with_record() -> None:
            with recording(bench, recorder):
                call()

        row = bench.row(f"cost: {name}", {"with a record": with_record, "without": call}, base="without")
    return replace(row, figures=[row.ratio("with a record", "without", most=COST)])


# ------------------------------------------------------------------------------------------- advice that is followed


@dataclass(frozen=True)
class Layers:
    """A program of three layers: a product, and a sum of its result over the ranks, which nobody needs before the next.

    The sums are large, so that the bytes which a link of the lab lets through at once do not matter.
    """

    comm: Communicator
    side: int
    wire: str | None = None
    started: bool = False
    fused: bool = False
    late: bool = False

    def __call__(self) -> None:
        x, w = np.ones((2 * self.side, self.side), np.float32), np.ones((self.side, 2 * self.side), np.float32)
        before: Any = None
        for _ in range(3):
            if self.fused:
                fompi.matmul_reduce_scatter(x, w, comm=self.comm, wire=self.wire)
                continue
            for _ in range(3 if self.late and self.comm.rank == self.comm.size - 1 else 1):
                h = x @ w
            if before is not None:
                before.wait()
            begin: Any = fompi.reduce_scatter.start if self.started else fompi.reduce_scatter
            y = begin(h, comm=self.comm, wire=self.wire)
            before = y if self.started else None
        if before is not None:
            before.wait()
        fompi.all_reduce(np.ones(4, np.float32), comm=self.comm)


@dataclass(frozen=True)
class Followed:
    """An advice, and the program before and after it. `faster`: after it links are twice as fast."""

    advice: str
    before: Callable[[Place], Call]
    after: Callable[[Place], Call]
    faster: bool = False


def layers(place: Place, **how: Any) -> Call:
    return Layers(place.bench.comm, place.side, **how)


def buckets(place: Place, width: int, depth: int, layers: int) -> Call:
    """DDP of `depth` equal layers, with buckets of so many of them. Its first bucket has 1 MB at most."""
    torch.manual_seed(0)
    width = min(width, QUICK_SIDE) if place.bench.quick else width
    parts, x = [torch.nn.Linear(width, width) for _ in range(depth)], torch.randn(256, width)
    task = TorchTask(parts, (), x, torch.zeros_like(x), torch.nn.functional.mse_loss)
    return data_parallel(task, place.group, bucket_cap_mb=layers * 4 * width * width / 2**20)


many_small, few_large = partial(buckets, width=64, depth=48), partial(buckets, width=512, depth=8)


FOLLOWED_ADVICE = {
    "link": Followed("links twice as fast", layers, layers, faster=True),
    "wire": Followed("messages of int8", layers, partial(layers, wire="int8")),
    "overlap": Followed("sums started", layers, partial(layers, started=True)),
    "fused": Followed("product and sum in one call", layers, partial(layers, fused=True)),
    "late": Followed("rank {last} at the median speed", partial(layers, late=True), layers),
    "larger buckets": Followed("buckets twice as large", partial(many_small, layers=1), partial(many_small, layers=2)),
    "smaller buckets": Followed("buckets half as large", partial(few_large, layers=8), partial(few_large, layers=4)),
}

OF_ONE_PROGRAM = ("link", "wire", "overlap", "fused")


@contextmanager
def links(bench: Bench, times: float) -> Iterator[None]:
    """The links of all hosts of the lab are this many times as fast."""
    rates = [int(rate) for rate in os.environ.get("NETLAB_RATES", "").split(",") if rate]
    try:
        _set_rates(bench, [times * rate for rate in rates])
        yield
    finally:
        _set_rates(bench, rates)


def _set_rates(bench: Bench, rates: list[Any]) -> None:
    if bench.comm.rank == 0 and "NETLAB_CONTROL" in os.environ:
        with open(os.environ["NETLAB_CONTROL"], "w") as control:
            for host, rate in enumerate(rates):
                print(f"h{host} {round(rate / 1e6)}mbit", file=control, flush=True)
    meet(bench.mpi)


@dataclass(frozen=True)
class FollowedSteps:
    """Steps before an advice, what it has predicted, if it was given, and steps after it: one of each in each turn."""

    before: list[float]
    told: list[float]
    after: list[float]

    @property
    def right(self) -> float:
        """Predicted over measured."""
        return float(np.median(np.divide(self.told, self.after)))


def follow(bench: Bench, group: Any, name: str) -> FollowedSteps:
    """Record a program before and after an advice, in turns: other programs slow down one more than the other."""
    case, place, found = FOLLOWED_ADVICE[name], Place(bench, group), FollowedSteps([], [], [])
    what = case.advice.format(last=bench.comm.size - 1)
    for _ in range(TURNS):
        before, hosts = recorded(bench, partial(case.before, place), STEPS)
        found.before.append(before.measured.step)
        found.told.extend(each.seconds for each in advise(before, hosts) if each.what == what)
        with links(bench, 2 if case.faster else 1):
            after, _ = recorded(bench, partial(case.after, place), STEPS)
        found.after.append(after.measured.step)
    return found


def advised(bench: Bench, group: Any, name: str) -> Row:
    found = follow(bench, group, name)
    samples = {"before": found.before, "after": found.after}
    if len(found.told) < TURNS:
        often = f"the change was advised in {len(found.told)} of {TURNS} turns"
        return bench.row_of(f"advice: {name}", samples, absent={"predicted": often})
    figures = [
        Figure("predicted / after", found.right, least=1 - FOLLOWED, most=1 + FOLLOWED),
        Figure("before / after", float(np.median(np.divide(found.before, found.after)))),
    ]
    row = bench.row_of(f"advice: {name}", samples, base="after")
    return replace(row, figures=figures, predicted={"after": float(np.median(found.told))})


def order(bench: Bench, group: Any) -> Row:
    """Of two changes whose steps differ by more than the error that is allowed, the advice has the faster one first.

    The steps are shares of those before the change, which differ between the turns of two changes, too.
    """
    found = {name: follow(bench, group, name) for name in OF_ONE_PROGRAM}
    found = {name: each for name, each in found.items() if len(each.told) == TURNS}
    told, took = (
        {name: float(np.median(np.divide(getattr(each, what), each.before))) for name, each in found.items()}
        for what in ("told", "after")
    )
    pairs = [(a, b) for a, b in combinations(found, 2) if abs(took[a] / took[b] - 1) > FOLLOWED]
    right = [(told[a] < told[b]) == (took[a] < took[b]) for a, b in pairs]
    row = bench.row_of("advice: order", {name: each.after for name, each in found.items()})
    share = Figure("pairs in the right order", sum(right) / len(right) if right else 1.0, least=1.0)
    return replace(row, figures=[share], predicted={name: float(np.median(each.told)) for name, each in found.items()})


def rows(bench: Bench) -> list[Row]:
    with beside_torch(bench) as (beside, group):
        named = {f"replay: {name}": partial(replayed, group=group, name=name) for name in PROGRAMS}
        named |= {f"cost: {name}": partial(cost, group=group, name=name) for name in COSTS}
        cases = [name for name, case in FOLLOWED_ADVICE.items() if "NETLAB_CONTROL" in os.environ or not case.faster]
        named |= {f"advice: {name}": partial(advised, group=group, name=name) for name in cases}
        return beside.rows(named | {"advice: order": partial(order, group=group)})
