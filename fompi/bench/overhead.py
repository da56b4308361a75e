"""What fompi costs above the bare messages: `mpirun -n 2 python -m fompi bench overhead`.

Rounds of each call alternate with rounds of the same messages without fompi. Nothing here overlaps.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from time import perf_counter
from typing import Any

import numpy as np

import fompi
from fompi.base.layout import COLLECTIVES, Partial, Shard, Sizes, Spec
from fompi.bench.options import Options
from fompi.mpi.link import request_testsome
from fompi.ops import operations
from fompi.plans.problems import Form, problem
from fompi.tuning.rounds import Figure, Row, alternate, difference, median_figure, seconds_of

CALLS, QUICK_CALLS = 300, 60
"""Calls per round."""

WARMUP = 1
"""Rounds that do not count."""

NBYTES = 1024
"""Bytes of the all-reduce."""

BUCKETS, BUCKET_NBYTES = 10, 16 << 10
"""Sums that are in flight together, as in a step of data parallelism."""

CHANGING_CALLS = 10_000
"""Calls with new counts, in all rounds together."""


def rows(comm: Any, options: Options) -> list[Row]:
    parts: dict[str, Callable[[], list[Row]]] = {
        "all-reduce of 1 KiB": lambda: [all_reduces(comm, options)],
        "the buckets of a step": lambda: [buckets(comm, options)],
        "one op of a bound plan": lambda: [per_op(comm, options)],
        "new counts at every call": lambda: changing_sizes(comm, options),
        "plans and choices": lambda: planning(options),
    }
    return [row for name in options.each([*parts]) for row in parts[name]()]


def _setup(comm: Any) -> dict[str, Any]:
    """What all rows of messages share."""
    marks = () if comm.size == 2 else ("the targets are for 2 ranks",)
    return {"setup": f"{comm.size} ranks", "progress": "progress by polling", "marks": marks}


def _calls(options: Options) -> int:
    return QUICK_CALLS if options.quick else CALLS


def all_reduces(comm: Any, options: Options) -> Row:
    x, y = np.ones(NBYTES // 4, np.float32), np.empty(NBYTES // 4, np.float32)
    plan = fompi.plan(fompi.all_reduce, Spec(x.shape, "float32", Partial()), ranks=comm.size)
    with fompi.bind(plan, comm=comm, x=x, out=y) as bound:
        contestants: dict[str, Callable[[], object]] = {
            "the library": lambda: comm.link.comm.Allreduce(x, y),
            "fompi bound": bound,
            "fompi": lambda: operations.all_reduce(x, comm=comm),
        }
        seconds = alternate(comm.link.comm, contestants, options.rounds, calls=_calls(options), warmup=WARMUP)
    native = seconds["the library"]
    figures = [
        difference("bound, above the library's", seconds["fompi bound"], native, most=15),
        difference("unbound, above the library's", seconds["fompi"], native, most=60),
    ]
    return Row("all-reduce of 1 KiB", samples=seconds, base="the library", figures=figures, **_setup(comm))


def buckets(comm: Any, options: Options) -> Row:
    """Several small sums in flight: each agrees (as buckets of a step did once), or all are bound."""
    flat = [np.ones(BUCKET_NBYTES // 4, np.float32) for _ in range(BUCKETS)]
    into = [np.empty_like(x) for x in flat]
    steps = [fompi.all_reduce.bind(x, out=y, comm=comm) for x, y in zip(flat, into, strict=True)]

    def bound() -> None:
        for step in steps:
            step.start()
        for step in steps:
            step.wait()

    def unbound() -> None:
        for pending in [fompi.all_reduce.start(x, out=y, comm=comm) for x, y in zip(flat, into, strict=True)]:
            pending.wait()

    def library() -> None:
        for request in [comm.link.comm.Iallreduce(x, y) for x, y in zip(flat, into, strict=True)]:
            request.Wait()

    contestants: dict[str, Callable[[], object]] = {"the library": library, "fompi bound": bound, "fompi": unbound}
    seconds = alternate(comm.link.comm, contestants, options.rounds, calls=_calls(options) // 10, warmup=WARMUP)
    for step in steps:
        step.close()
    what = f"{BUCKETS} all-reduces of {BUCKET_NBYTES >> 10} KiB in flight"
    return Row(what, samples=seconds, base="the library", **_setup(comm))


def per_op(comm: Any, options: Options) -> Row:
    """A plan of many ops, and the same messages posted and tested with mpi4py."""
    slices, width = 64, 64
    x = np.ones((slices * width, 1), np.float32)
    plan = fompi.plan(
        fompi.all_gather, Spec((len(x) * comm.size, 1), "float32", Shard(0)), ranks=comm.size, schedule="direct",
        slices=slices,
    )  # fmt: skip
    count = len(plan.programs[comm.rank].ops)
    y = np.empty((len(x) * comm.size, 1), np.float32)
    with fompi.bind(plan, comm=comm, x=x, out=y) as bound:
        bare = bare_messages(comm, [x[i * width : (i + 1) * width] for i in range(slices)], y)
        contestants: dict[str, Callable[[], object]] = {"fompi bound": bound, "mpi4py alone": bare}
        seconds = alternate(comm.link.comm, contestants, options.rounds, calls=_calls(options) // 10, warmup=WARMUP)
    of_an_op = {name: [s / count for s in samples] for name, samples in seconds.items()}
    figures = [median_figure("an op", of_an_op["fompi bound"], most=5)]
    what = f"all-gather in {slices} slices, by its {count} ops"
    return Row(what, samples=of_an_op, base="mpi4py alone", figures=figures, **_setup(comm))


def bare_messages(comm: Any, chunks: list[np.ndarray], into: np.ndarray) -> Callable[[], object]:
    """Send every chunk to every other rank with Isend, Irecv and Testsome only."""
    mpi, rank, size, rows = comm.link.comm.Dup(), comm.rank, comm.size, sum(map(len, chunks))
    testsome = request_testsome()
    peers = [(rank + d) % size for d in range(1, size)]

    def exchange() -> None:
        requests, own = [], into[rank * rows : (rank + 1) * rows]
        at = 0
        for k, chunk in enumerate(chunks):
            for peer in peers:
                block = into[peer * rows + at : peer * rows + at + len(chunk)]
                requests.append(mpi.Irecv(block, peer, k))
            at += len(chunk)
        for peer in peers:
            for k, chunk in enumerate(chunks):
                requests.append(mpi.Isend(chunk, peer, k))
        at = 0
        for chunk in chunks:
            own[at : at + len(chunk)] = chunk
            at += len(chunk)
        missing = len(requests)
        while missing:
            missing -= len(testsome(requests) or ())

    return exchange


def changing_sizes(comm: Any, options: Options) -> list[Row]:
    """New random counts at every call, and bare messages with the same counts."""
    rank, size, capacity, calls = comm.rank, comm.size, 64, CHANGING_CALLS // (10 if options.quick else 1)
    unbound = operations.all_to_all
    generator = random.Random(5)
    tables = [
        tuple(tuple(generator.randrange(capacity) for _ in range(size)) for _ in range(size)) for _ in range(calls)
    ]
    data = np.ones((capacity * size, 4), np.float32)
    plan = fompi.plan(fompi.all_gather, Spec((capacity * size, 4), "float32", Shard(0)), ranks=size)
    with fompi.bind(plan, comm=comm, x=data[:capacity].copy()) as bound:

        def in_turn(call: Callable[[Any], object]) -> Callable[[], object]:
            """Each call uses the next counts. All contestants use the same ones."""
            following = cycle(tables)
            return lambda: call(next(following))

        contestants = {
            "a2a": in_turn(lambda table: unbound(data[: sum(table[rank])], counts=table[rank], comm=comm)),
            "bare a2a": in_turn(lambda table: bare_all_to_all(comm, data, table)),
            "gather": in_turn(lambda table: bound(counts=table[0])),
            "bare gather": in_turn(lambda table: bare_all_to_all(comm, data, tuple((n,) * size for n in table[0]))),
        }
        per_round = max(1, calls // options.rounds)
        seconds = alternate(comm.link.comm, contestants, options.rounds, calls=per_round, warmup=WARMUP)
    made = []
    for what, name, shown in (("all-to-all", "a2a", "fompi"), ("all-gather", "gather", "fompi bound")):
        samples = {shown: seconds[name], "mpi4py alone": seconds[f"bare {name}"]}
        figure = difference(f"{shown}, above the bare messages", *samples.values(), most=50)
        what = f"{what}, new counts at every call"
        made.append(Row(what, samples=samples, base="mpi4py alone", figures=[figure], **_setup(comm)))
    return made


def bare_all_to_all(comm: Any, data: np.ndarray, table: Any) -> None:
    """The all-to-all with mpi4py alone. It knows all counts beforehand, makes the result, and copies the own rows."""
    mpi, rank = comm.link.comm, comm.rank
    arrived = [row[rank] for row in table]
    into = np.empty((sum(arrived), 4), np.float32)
    requests, at = [], 0
    for source, rows in enumerate(arrived):
        if source != rank and rows:
            requests.append(mpi.Irecv(into[at : at + rows], source, 1 << 12))
        at += rows
    at = 0
    for dest, rows in enumerate(table[rank]):
        if dest != rank and rows:
            requests.append(mpi.Isend(data[at : at + rows], dest, 1 << 12))
        elif rows:
            first = sum(arrived[:rank])
            into[first : first + rows] = data[at : at + rows]
        at += rows
    missing, testsome = len(requests), request_testsome()
    while missing:
        missing -= len(testsome(requests) or ())


def planning(options: Options) -> list[Row]:
    """A cold plan for 8 ranks, as the first call of an operation makes it, and the choice among candidates."""
    from fompi.runtime.compiled import Compiled

    specs = Spec((4096, 4096), "float32", Shard(1)), Spec((4096, 1024), "float32", Shard(0))

    def cold() -> None:
        plan = fompi.plan(fompi.matmul_reduce_scatter, *specs, ranks=8)
        fompi.verify(plan)
        Compiled(plan, 0)

    seconds = [seconds_of(cold) for _ in range(options.rounds)]
    figure = median_figure("cold", seconds, "ms", most=50)
    made = Row("a plan for 8 ranks, written, verified, compiled", "", {"cold": seconds}, figures=[figure])
    return [made, *choosing(options), *([] if options.quick else walking(options))]


COLD_MS = {8: 50.0, 64: 500.0, 1024: 2000.0}
"""The number of ranks, and the target for the choice among their schedules, in milliseconds."""

COLD_ROUNDS = 3
"""Rounds for many ranks, where one choice takes about a second."""


def _calibrated(machine: Any) -> Any:
    """The machine with everything that `calibrate` adds: curves, and the CPU time that messages cost."""
    sampled = tuple((float(n), machine.link(0, 1).seconds(n)) for n in (0, 1 << 10, 1 << 14, 1 << 18, 1 << 22))
    natives = {name: tuple((4.0 * n, 3 * s) for n, s in sampled) for name in COLLECTIVES}
    costs = {"cpu_message": 12e-6, "cpu_byte": 4e-10, "poll": 1e-3, "pack_rate": 8e9}
    return replace(machine, curve=sampled, natives=natives, natives_behind=natives, **costs)


def choosing(options: Options) -> list[Row]:
    """A choice by the model, as a call with FOMPI_MACHINE makes it: cold with this rank's program, then warm."""
    from fompi.model.machine import Machine
    from fompi.planner.choose import choose_schedule, clear_choices
    from fompi.runtime.compiled import Compiled
    from fompi.schedules.registry import write

    made_rows = []
    for ranks, most in COLD_MS.items():
        if options.quick and ranks > 8:
            continue
        samples: dict[str, list[float]] = {}
        figures: list[Figure] = []
        k = 4096 // ranks
        made = problem("matmul_reduce_scatter", ranks, Form((4096, k), "float32"), [Form((k, 1024), "float32")])
        plain = Machine.load("gigabit")
        machines = {"gigabit": plain, "h100-ndr": Machine.load("h100-ndr"), "calibrated": _calibrated(plain)}
        machines["calibrated, one slow rank"] = replace(machines["calibrated"], rates=(1.0, 0.25))
        for name, machine in machines.items():
            seconds = samples[f"{name}, cold"] = []
            for _ in range(options.rounds if ranks < 100 else min(options.rounds, COLD_ROUNDS)):
                clear_choices()
                begun = perf_counter()
                schedule, slices = choose_schedule(made, 4096, True, machine)
                Compiled(write(made, schedule, slices), 0)
                seconds.append(perf_counter() - begun)
            figures.append(median_figure(f"{name}, cold", seconds, "ms", most=most))
        what = f"a choice by the model for {ranks} ranks, with this rank's program"
        made_rows.append(Row(what, "", samples, figures=figures))
    warm = []
    for _ in range(options.rounds):
        begun = perf_counter()
        for _ in range(CALLS):
            choose_schedule(made, 4096, True, machine)
        warm.append((perf_counter() - begun) / CALLS)
    again = Row("the same choice again", "", {"warm": warm}, figures=[median_figure("warm", warm, most=5)])
    return [*made_rows, again]


WALK_MS = 10_000.0
"""The target for a walk over 1,024 ranks with different sizes, and over 4,096 ranks with equal ones."""


def walking(options: Options) -> list[Row]:
    """The model's walk over the events of very many ranks."""
    from fompi.model.machine import Machine
    from fompi.model.simulate import predict
    from fompi.schedules.registry import write

    machine, made_rows = Machine.load("gigabit"), []
    for ranks, uneven in ((1024, True), (4096, False)):
        made = problem("all_gather", ranks, Form((64, 512), "float32"))
        sizes = Sizes(tuple(64 + (r * 37 % 11) * uneven for r in range(ranks)))
        seconds = []
        for _ in range(min(options.rounds, COLD_ROUNDS)):
            begun = perf_counter()
            predict(write(made, "ring", 1, sizes), machine)
            seconds.append(perf_counter() - begun)
        what = f"the walk of {'an uneven' if uneven else 'an even'} ring of {ranks} ranks"
        figures = [median_figure("all-gather", seconds, "ms", most=WALK_MS)]
        made_rows.append(Row(what, "", {"all-gather": seconds}, figures=figures))
    return made_rows
