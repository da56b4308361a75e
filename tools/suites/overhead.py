"""What a call costs: the rows of `fompi bench overhead`, and those of the parts of a call.

    mpirun -n 2 python -m fompi bench tools/suites/overhead.py

The parts are an op of a plan, new counts, a plan, and a choice among schedules.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
from bench.overhead import BOUND, CALLS, UNBOUND, calls_of, row_of, times_of
from bench.overhead import rows as whole

import fompi
from fompi.base.layout import COLLECTIVES, Shard, Sizes, Spec
from fompi.bench.measure import Bench, Call, plan
from fompi.mpi.link import request_testsome
from fompi.plans.problems import Form, Problem, problem
from fompi.tuning.rounds import Row, difference, seconds_of
from means import median_figure, repeated

CHANGING_CALLS = 10_000
"""Calls with new counts, in all rounds together."""

BARE = "mpi4py alone"


def rows(bench: Bench) -> list[Row]:
    parts: dict[str, Callable[[Bench], Iterable[Row]]] = {
        "one op of a bound plan": per_op,
        "new counts at every call": changing_sizes,
        "plans and choices": planning,
    }
    return [*whole(bench), *(row for name in bench.each([*parts]) for row in parts[name](bench))]


def per_op(bench: Bench) -> Iterator[Row]:
    """A plan of many ops, and the same messages posted and tested with mpi4py."""
    comm, slices, width = bench.comm, 64, 64
    x, y = (np.ones((slices * width * blocks, 1), np.float32) for blocks in (1, comm.size))
    made = plan("all_gather", x, comm.size, schedule="direct", slices=slices)
    count = len(made.programs[comm.rank].ops)
    with fompi.bind(made, comm=comm, x=x, out=y) as bound:
        bare = bare_messages(bench, [x[i * width : (i + 1) * width] for i in range(slices)], y)
        seconds = times_of(bench, {BOUND: bound, BARE: bare}, calls_of(bench) // 10)
    of_an_op = {name: [s / count for s in samples] for name, samples in seconds.items()}
    figure = median_figure("an op", of_an_op[BOUND], most=5)
    yield row_of(bench, f"all-gather in {slices} slices, by its {count} ops", of_an_op, BARE, figure)


Message = tuple[np.ndarray, int, int]
"""Rows, the other rank, and a tag."""


def exchange(
    mpi: Any, incoming: Iterable[Message], outgoing: Iterable[Message], own: Iterable[tuple[np.ndarray, np.ndarray]]
) -> None:
    """Receive and send with Irecv, Isend and Testsome only. `own`: where the rows of this rank go, and these rows."""
    requests, testsome = [mpi.Irecv(*message) for message in incoming], request_testsome()
    requests += [mpi.Isend(*message) for message in outgoing]
    for into, rows in own:
        into[...] = rows
    missing = len(requests)
    while missing:
        missing -= len(testsome(requests) or ())


def bare_messages(bench: Bench, chunks: list[np.ndarray], into: np.ndarray) -> Call:
    """Send every chunk to every other rank."""
    mpi, rank, size, width = bench.mpi.Dup(), bench.comm.rank, bench.comm.size, len(chunks[0])
    peers = [(rank + d) % size for d in range(1, size)]

    def place(owner: int, k: int) -> np.ndarray:
        at = (owner * len(chunks) + k) * width
        return into[at : at + width]

    def call() -> None:
        incoming = ((place(peer, k), peer, k) for k in range(len(chunks)) for peer in peers)
        outgoing = ((chunk, peer, k) for peer in peers for k, chunk in enumerate(chunks))
        exchange(mpi, incoming, outgoing, ((place(rank, k), chunk) for k, chunk in enumerate(chunks)))

    return call


def changing_sizes(bench: Bench) -> Iterator[Row]:
    """New random counts at every call, and bare messages with the same counts."""
    comm, rank, size, capacity = bench.comm, bench.comm.rank, bench.comm.size, 64
    calls, generator = CHANGING_CALLS // (10 if bench.quick else 1), random.Random(5)
    tables = [
        tuple(tuple(generator.randrange(capacity) for _ in range(size)) for _ in range(size)) for _ in range(calls)
    ]
    data = np.ones((capacity * size, 4), np.float32)
    with fompi.bind(plan("all_gather", data[:capacity], size), comm=comm, x=data[:capacity].copy()) as bound:

        def with_counts(call: Callable[[Any], object]) -> Call:
            """Each call uses the next counts. All contestants use the same ones."""
            following = cycle(tables)
            return lambda: call(next(following))

        contestants = {
            "a2a": with_counts(lambda table: fompi.all_to_all(data[: sum(table[rank])], counts=table[rank], comm=comm)),
            "bare a2a": with_counts(lambda table: bare_all_to_all(bench, data, table)),
            "gather": with_counts(lambda table: bound(counts=table[0])),
            "bare gather": with_counts(
                lambda table: bare_all_to_all(bench, data, tuple((n,) * size for n in table[0]))
            ),
        }
        seconds = times_of(bench, contestants, max(1, calls // bench.rounds))
    for what, name, shown in (("all-to-all", "a2a", UNBOUND), ("all-gather", "gather", BOUND)):
        samples = {shown: seconds[name], BARE: seconds[f"bare {name}"]}
        figure = difference(f"{shown}, above the bare messages", *samples.values(), most=50)
        yield row_of(bench, f"{what}, new counts at every call", samples, BARE, figure)


def bare_all_to_all(bench: Bench, data: np.ndarray, table: Sequence[Sequence[int]]) -> None:
    """The same with mpi4py alone. It knows all counts beforehand, makes the result, and copies the rank's own rows."""
    rank, tag = bench.comm.rank, 1 << 12
    arriving, leaving = [row[rank] for row in table], table[rank]
    into = np.empty((sum(arriving), 4), np.float32)
    incoming, outgoing = ([*_runs(rows, counts)] for rows, counts in ((into, arriving), (data, leaving)))
    exchange(
        bench.mpi,
        ((rows, source, tag) for source, rows in enumerate(incoming) if source != rank and len(rows)),
        ((rows, dest, tag) for dest, rows in enumerate(outgoing) if dest != rank and len(rows)),
        [(incoming[rank], outgoing[rank])],
    )


def _runs(rows: np.ndarray, counts: Sequence[int]) -> Iterator[np.ndarray]:
    """So many rows each, one run behind the other."""
    at = 0
    for count in counts:
        yield rows[at : at + count]
        at += count


# ---------------------------------------------------------------------------------------------- plans and choices


def planning(bench: Bench) -> Iterator[Row]:
    """A cold plan for 8 ranks, as the first call of an operation makes it, and the choice among candidates."""
    from fompi.runtime.compiled import Compiled

    specs = Spec((4096, 4096), "float32", Shard(1)), Spec((4096, 1024), "float32", Shard(0))

    def cold() -> None:
        made = fompi.plan(fompi.matmul_reduce_scatter, *specs, ranks=8)
        fompi.verify(made)
        Compiled(made, 0)

    seconds = [seconds_of(cold) for _ in range(bench.rounds)]
    figure = median_figure("cold", seconds, "ms", most=50)
    yield Row("a plan for 8 ranks, written, verified, compiled", "", {"cold": seconds}, figures=[figure])
    yield from choosing(bench)
    if not bench.quick:
        yield from walking(bench)


COLD_MS = {8: 50.0, 64: 500.0, 1024: 2000.0}
"""The number of ranks, and the target for the choice among their schedules, in milliseconds."""

COLD_ROUNDS = 3
"""Rounds for many ranks, where one choice takes about a second."""


def _calibrated(machine: Any) -> Any:
    """The machine with everything that `calibrate` adds: curves, and the CPU time that messages cost."""
    sampled = tuple((float(n), machine.link(0, 1).seconds(n)) for n in (0, 1 << 10, 1 << 14, 1 << 18, 1 << 22))
    collectives = {name: tuple((4.0 * n, 3 * s) for n, s in sampled) for name in COLLECTIVES}
    costs = {"cpu_message": 12e-6, "cpu_byte": 4e-10, "poll": 1e-3, "pack_rate": 8e9}
    return replace(machine, curve=sampled, collectives=collectives, collectives_behind=collectives, **costs)


def choosing(bench: Bench) -> Iterator[Row]:
    """A choice by the model, as a call with FOMPI_MACHINE makes it: cold with this rank's program, then warm."""
    from fompi.model.machine import Machine
    from fompi.planner.choose import choose_schedule, clear_choices
    from fompi.runtime.compiled import Compiled
    from fompi.schedules.registry import write

    def cold(made: Problem, machine: Any) -> None:
        schedule, slices = choose_schedule(made, 4096, True, machine)
        Compiled(write(made, schedule, slices), 0)

    def seconds_cold(made: Problem, machine: Any) -> float:
        clear_choices()
        return seconds_of(partial(cold, made, machine))

    plain, rounds = Machine.load("gigabit"), bench.rounds
    machines = {"gigabit": plain, "h100-ndr": Machine.load("h100-ndr"), "calibrated": _calibrated(plain)}
    slow = machines["calibrated, one slow rank"] = replace(machines["calibrated"], rates=(1.0, 0.25))
    for ranks in [8] if bench.quick else COLD_MS:
        k, times = 4096 // ranks, rounds if ranks < 100 else min(rounds, COLD_ROUNDS)
        made = problem("matmul_reduce_scatter", ranks, Form((4096, k), "float32"), [Form((k, 1024), "float32")])
        samples = {f"{name}, cold": [seconds_cold(made, each) for _ in range(times)] for name, each in machines.items()}
        figures = [median_figure(name, taken, "ms", most=COLD_MS[ranks]) for name, taken in samples.items()]
        yield Row(f"a choice by the model for {ranks} ranks, with this rank's program", "", samples, figures=figures)
    again = partial(repeated, partial(choose_schedule, made, 4096, True, slow), CALLS)
    warm = [seconds_of(again) / CALLS for _ in range(rounds)]
    yield Row("the same choice again", "", {"warm": warm}, figures=[median_figure("warm", warm, most=5)])


WALK_MS = 10_000.0
"""The target for a walk over 4,096 ranks with equal sizes."""


def walking(bench: Bench) -> Iterator[Row]:
    """The model's walk over the events of very many ranks."""
    from fompi.model.machine import Machine
    from fompi.model.simulate import predict
    from fompi.schedules.registry import write

    made = problem("all_gather", 4096, Form((64, 512), "float32"))

    def walk() -> None:
        predict(write(made, "ring", 1, Sizes((64,) * 4096)), Machine.load("gigabit"))

    seconds = [seconds_of(walk) for _ in range(min(bench.rounds, COLD_ROUNDS))]
    figures = [median_figure("all-gather", seconds, "ms", most=WALK_MS)]
    yield Row("the walk of an even ring of 4096 ranks", "", {"all-gather": seconds}, figures=figures)
