"""What fompi costs above the bare messages: `mpirun -n 2 python -m fompi bench overhead`.

Every figure is the median of rounds that alternate with those of what it is compared with, in one run, with the range
of the rounds beside it. Nothing here overlaps; messages progress because the caller polls.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle, product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import fompi
from fompi import ops
from fompi.bench.measure import alternate
from fompi.layout import Partial, Shard, Spec
from fompi.link import request_testsome

ROUNDS, CALLS, WARMUP = 15, 300, 1
NBYTES = 1024
CHANGING_CALLS = 10_000
US = 1e6


@dataclass
class Row:
    """Median and range in microseconds of a call; `above` that of the yardstick, and what was to be reached."""

    what: str
    us: float
    least: float
    most: float
    yardstick: float | None = None
    allowed: float | None = None

    def __str__(self) -> str:
        text = f"{self.what:58} {self.us:9.2f} ({self.least:.2f} to {self.most:.2f})"
        if self.yardstick is not None:
            text += f"   {self.us - self.yardstick:+8.2f} above the yardstick"
        if self.allowed is not None:
            cost = self.us - (self.yardstick or 0.0)
            text += f" (at most {self.allowed:g}{'' if cost <= self.allowed else ': not reached'})"
        return text


def main(json_to: str | None) -> int:
    """Print the table on rank 0, or write JSON to a file ("-": print it)."""
    with fompi.Communicator() as comm:
        rows = [*all_reduces(comm), *per_op(comm), *changing_sizes(comm), *planning()]
        if comm.rank == 0:
            text = json.dumps([asdict(row) for row in rows], indent=1)
            if json_to == "-":
                print(text)
            else:
                if json_to is not None:
                    Path(json_to).write_text(text + "\n")
                print(f"{comm.size} ranks, us a call: median of {ROUNDS} alternating rounds (and their range)")
                print("\n".join(map(str, rows)))
                if comm.size != 2:
                    print("the figures to reach are for 2 ranks: mpirun -n 2 python -m fompi bench overhead")
    return 0


def row(what: str, seconds: list[float], yardstick: list[float] | None = None, allowed: float | None = None) -> Row:
    us = [US * s for s in seconds]
    base = None if yardstick is None else US * statistics.median(yardstick)
    return Row(what, statistics.median(us), min(us), max(us), base, allowed)


def all_reduces(comm: Any) -> list[Row]:
    x, y = np.ones(NBYTES // 4, np.float32), np.empty(NBYTES // 4, np.float32)
    plan = fompi.plan(fompi.all_reduce, Spec(x.shape, "float32", Partial()), ranks=comm.size)
    with fompi.bind(plan, comm=comm, x=x, out=y) as bound:
        measured = alternate(
            comm.link.comm,
            {
                "native": lambda: comm.link.comm.Allreduce(x, y),
                "bound": bound,
                "unbound": lambda: ops.all_reduce(x, comm=comm),
            },
            ROUNDS,
            calls=CALLS,
            warmup=WARMUP,
        )
    native = measured["native"]
    return [
        row("all-reduce of 1 KiB: the library's own", native),
        row("all-reduce of 1 KiB: bound", measured["bound"], native, 15),
        row("all-reduce of 1 KiB: unbound", measured["unbound"], native, 60),
    ]


def per_op(comm: Any) -> list[Row]:
    """A plan of many ops, against the same messages posted and tested by hand."""
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
        contestants: dict[str, Callable[[], object]] = {"bound": bound, "bare": bare}
        measured = alternate(comm.link.comm, contestants, ROUNDS, calls=CALLS // 10, warmup=WARMUP)
    each = [s / count for s in measured["bound"]]
    return [
        row(f"an op of a bound plan, {count} ops in all", each, None, 5),
        row("the same messages by mpi4py alone, by the same count", [s / count for s in measured["bare"]]),
    ]


def bare_messages(comm: Any, chunks: list[np.ndarray], into: np.ndarray) -> Callable[[], object]:
    """Every chunk to every other rank with Isend, Irecv and Testsome: what the messages cost by themselves."""
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
        left = len(requests)
        while left:
            left -= len(testsome(requests) or ())

    return exchange


def changing_sizes(comm: Any) -> list[Row]:
    """New random counts at every call, against bare messages with the same counts."""
    size, capacity = comm.size, 64
    draw = random.Random(5)
    tables = [
        tuple(tuple(draw.randrange(capacity) for _ in range(size)) for _ in range(size)) for _ in range(CHANGING_CALLS)
    ]
    data = np.ones((capacity * size, 4), np.float32)
    plan = fompi.plan(fompi.all_gather, Spec((capacity * size, 4), "float32", Shard(0)), ranks=size)
    with fompi.bind(plan, comm=comm, x=data[:capacity].copy()) as bound:

        def in_turn(call: Callable[[Any], object]) -> Callable[[], object]:
            """Every call takes the next counts, the same for every contestant."""
            following = cycle(tables)
            return lambda: call(next(following))

        contestants = {
            "a2a": in_turn(lambda table: unbound_all_to_all(comm, data, table)),
            "bare a2a": in_turn(lambda table: bare_all_to_all(comm, data, table)),
            "gather": in_turn(lambda table: bound(counts=table[0])),
            "bare gather": in_turn(lambda table: bare_all_to_all(comm, data, tuple((n,) * size for n in table[0]))),
        }
        seconds = alternate(comm.link.comm, contestants, ROUNDS, calls=CHANGING_CALLS // ROUNDS, warmup=WARMUP)
    return [
        row("bare messages of an all-to-all, new counts at every call", seconds["bare a2a"]),
        row("all_to_all (unbound), new counts at every call", seconds["a2a"], seconds["bare a2a"], 50),
        row("bare messages of an all-gather, new counts at every call", seconds["bare gather"]),
        row("bound all-gather, new counts at every call", seconds["gather"], seconds["bare gather"], 50),
    ]


def unbound_all_to_all(comm: Any, data: np.ndarray, table: Any) -> None:
    counts = table[comm.rank]
    ops.all_to_all(data[: sum(counts)], counts=counts, comm=comm)


def bare_all_to_all(comm: Any, data: np.ndarray, table: Any) -> None:
    """The same with mpi4py alone, everything known beforehand: memory for the result, messages, our own rows."""
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
    left, testsome = len(requests), request_testsome()
    while left:
        left -= len(testsome(requests) or ())


def planning() -> list[Row]:
    """A cold plan for 8 ranks, as the first call of an operation makes it: written, verified, compiled."""
    from fompi.compiled import Compiled

    seconds = []
    for _ in range(ROUNDS):
        begun = perf_counter()
        plan = fompi.plan(
            fompi.matmul_reduce_scatter,
            Spec((4096, 4096), "float32", Shard(1)),
            Spec((4096, 1024), "float32", Shard(0)),
            ranks=8,
        )
        fompi.verify(plan)
        Compiled(plan, 0)
        seconds.append(perf_counter() - begun)
    return [row("a plan for 8 ranks, cold: written, verified, compiled", seconds, None, 50_000), *choosing()]


COLD_US = {8: 50e3, 64: 500e3, 1024: 2e6}
"""Ranks, and how long the choice among their schedules may take."""


def choosing() -> list[Row]:
    """A choice by the model, as a call with FOMPI_MACHINE makes it: cold with this rank's program, then warm."""
    from fompi import choose
    from fompi.compiled import Compiled
    from fompi.machine import Machine
    from fompi.problems import Form, problem
    from fompi.schedules import write

    rows = []
    for (ranks, allowed), name in product(COLD_US.items(), ("gigabit", "h100-ndr")):
        machine = Machine.load(name)
        k = 4096 // ranks
        made = problem("matmul_reduce_scatter", ranks, Form((4096, k), "float32"), [Form((k, 1024), "float32")])
        seconds = []
        for _ in range(ROUNDS if ranks < 100 else 3):
            choose.forget()
            begun = perf_counter()
            schedule, slices = choose.choose(made, 4096, True, machine)
            Compiled(write(made, schedule, slices), 0)
            seconds.append(perf_counter() - begun)
        what = f"a choice by the model of {name} for {ranks} ranks, cold, with our program"
        rows.append(row(what, seconds, None, allowed))
    begun = perf_counter()
    for _ in range(CALLS):
        choose.choose(made, 4096, True, machine)
    return [*rows, row("the same, warm", [(perf_counter() - begun) / CALLS], None, 5)]
