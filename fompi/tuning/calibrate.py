"""Measure the Machine that a program has: `mpirun -n 4 python -m fompi calibrate machine.json`.

Collective, and under a minute. Every rank works while it is measured, as it will when it computes: what ranks share
(cores, links) is shared here too. The times are those of the slowest rank, medians of some rounds.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property, partial
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Any, Self

import numpy as np

from fompi.base.file_checks import Points
from fompi.base.layout import COLLECTIVES, Shard, Spec
from fompi.base.version import __version__
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree
from fompi.engine.progress import HELPED, measure_native
from fompi.model import fit
from fompi.model.machine import Machine
from fompi.mpi import launcher
from fompi.mpi.transport import library
from fompi.ops.operations import plan
from fompi.plans import problems
from fompi.plans.plan import Collective
from fompi.runtime.executor import Executor, bind
from fompi.runtime.report import quiet
from fompi.tuning.links import MOST_SECONDS, ROUNDS, SIZES, Messages
from fompi.tuning.rounds import Calm, alternate, meet, of_all_ranks, texts

BEHIND_WARMUP = 2
"""Calls behind kernels that do not count: the helper still learns how often messages come."""

LOST_SECONDS = 0.1
"""The most that an exchange may take behind kernels, when it is measured what they lose to it."""

MANY, SPENT_SECONDS = 64, 0.02
"""Messages, and one of as many bytes, which takes no longer than this: what a process spends more on them is theirs."""

SLOWER = 1.15
"""Kernels that take so many times as long, or as short, have changed."""

NATIVE_SIZES = [1 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20]
"""Bytes of the global tensor of a collective."""

PRODUCTS = (
    (1024, 1024, 1024), (256, 1024, 1024), (64, 1024, 1024), (512, 2048, 512), (512, 256, 2048), (128, 512, 2048),
    (900, 1100, 900), (300, 2000, 1300), (96, 1300, 2000), (32, 1100, 900), (900, 400, 1500), (300, 1500, 400),
    (96, 520, 260), (300, 300, 500), (32, 400, 1500), (32, 2000, 1300),
)  # fmt: skip
"""The (m, k, n) that are multiplied: many rows and few, small weights and large.

Powers of two are not all of them: a product of these takes some 4 % longer, its rows share the sets of a cache.
"""

FEW_PRODUCTS = PRODUCTS[2::3]
"""By which kernels are compared with those of before, while a program waits."""


def calibrate(comm: Any = None, say: Callable[[str], object] = lambda text: None) -> Machine:
    """The Machine of the ranks of `comm`, the same on all of them. Collective; `say` hears what is being measured.

    Kernels are products and sums in float32; messages are those of host memory.
    """
    communicator = Communicator.of(comm)
    agree(communicator, "calibrate")
    with _Calibration(communicator, say) as measured:
        return _that_of_rank_0(communicator, measured.machine())


def refit(machine: Machine, comm: Communicator, computes: bool) -> Machine:
    """The machine as it is now: pairs of ranks are measured again, and if it `computes` cores, in a second or so.

    Collective, and the same on all ranks.
    """
    with _Calibration(comm, lambda text: None) as measured:
        now = fit.refitted(machine, comm.size, measured.messages.pairs())
    slower = slowdown(machine, comm) if computes else 1.0
    return _that_of_rank_0(comm, fit.at_speed(now, slower) if max(slower, 1 / slower) > SLOWER else now)


def slowdown(machine: Machine, comm: Communicator) -> float:
    """How many times as long kernels take now as `machine` says, on the slowest rank. Collective; under a second.

    Now: it does not wait for others who use the cores.
    """
    with _Calibration(comm, lambda text: None) as measured:
        taken = measured.products(FEW_PRODUCTS, ROUNDS, None)
    said = [fit.product_seconds(machine, *shape) for shape in FEW_PRODUCTS]
    return median(seconds / expected for seconds, expected in zip(taken, said, strict=True))


class _Calibration:
    def __init__(self, comm: Communicator, say: Callable[[str], object]):
        self.comm, self.say, self.link = comm, say, comm.link.duplicate()
        self.messages = Messages(comm, self.link)
        self.mpi, self.idle = self.link.comm, self.messages.idle
        self.rank, self.size = comm.rank, comm.size

    def machine(self) -> Machine:
        here = launcher.cores_per_rank(), self.comm.engine.progress_mode in HELPED
        cores, helped = of_all_ranks(self.mpi, np.array(here, float)).min(axis=0)  # hosts may differ
        self.say("kernels")
        overhead, memory_rate, flops_rate, pack_rate = self._kernels()
        self.say(self.calm.told() if self.calm is not None else "ranks share cores: each is slowed down by the others")
        mpi = library()
        hosts = len(set(texts(self.mpi, socket.gethostname())))
        where = f"{self.size} ranks on {hosts} host{'s' * (hosts > 1)}, {mpi.name} {mpi.version}"
        what = f"{where}, fompi {__version__}, float32"
        machine = Machine(
            name=f"{socket.gethostname()}, {self.size} ranks",
            latency=0.0,
            bandwidth=1e300,
            flops_rate=flops_rate,
            memory_rate=memory_rate,
            overhead=overhead,
            pack_rate=pack_rate,
            lanes=2 if cores >= 2 and helped else 1,
            source=f"measured {datetime.now(UTC).isoformat(timespec='seconds')}: {what}",
        )
        if self.size > 1:
            machine = self._with_links(machine)
            self.say("the library's collectives")
            natives = {name: self._native(name, False) for name in COLLECTIVES}
            machine = replace(machine, natives=natives, natives_ranks=self.size)
            if helped:
                self.say("the library's collectives while nobody waits for them")
                machine = replace(machine, natives_behind={name: self._native(name, True) for name in COLLECTIVES})
            self.say("what the library moves by itself")
            machine = replace(machine, native_share=measure_native(self.link).share or 0.0)
            if machine.lanes == 1:
                self.say("what messages cost a core")
                per_message, per_byte = self._cpu(machine)
                helper = self.comm.engine.helper
                poll = helper.pause.least if helper is not None else 0.0
                machine = replace(machine, cpu_message=per_message, cpu_byte=per_byte, poll=poll)
        return machine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None and not self.link.given_up:  # else messages may still be under way
            self.link.close()
        else:
            self.comm.link.given_up.append(self.link)

    @cached_property
    def calm(self) -> Calm | None:
        """Collective when first asked for."""
        return Calm.of(self.mpi)

    # -- kernels
    def _kernels(self) -> tuple[float, float, float, float]:
        """Overhead, bytes and operations per second, and packed bytes per second."""
        tiny, large = np.ones((2, 8, 8), np.float32), np.ones((2, 1 << 20), np.float32)
        sums = {
            "overhead": lambda: np.matmul(tiny[0], tiny[1]),
            "sum": lambda: np.add(large[0], large[1], out=large[0]),
        }
        taken = alternate(self.mpi, sums, 2 * ROUNDS, idle=self.idle, calm=self.calm)
        overhead, summed = (median(taken[name]) for name in sums)
        timed = [
            fit.product(*shape, max(1e-9, seconds - overhead))
            for shape, seconds in zip(PRODUCTS, self.products(PRODUCTS, 2 * ROUNDS, self.calm), strict=True)
        ]
        flops_rate, pack_rate = fit.product_rates(timed)
        return overhead, 3 * large[0].nbytes / summed, flops_rate, pack_rate

    def products(self, shapes: Sequence[tuple[int, int, int]], rounds: int, calm: Calm | None) -> list[float]:
        """Median seconds of each, of the slowest rank; all ranks compute at once.

        Each right after other rows by the same weight, as a plan multiplies piece after piece: caches hold the weight.
        """
        others: dict[str, Callable[[], object]] = {}
        calls: dict[str, Callable[[], object]] = {}
        for m, k, n in shapes:
            x, w, y = np.ones((2, m, k), np.float32), np.ones((k, n), np.float32), np.empty((m, n), np.float32)
            others[f"{m} {k} {n}"], calls[f"{m} {k} {n}"] = (partial(np.matmul, rows, w, out=y) for rows in x)
        taken = alternate(self.mpi, calls, rounds, warmup=1, before=lambda name: others[name](), calm=calm)
        return [median(seconds) for seconds in taken.values()]

    # -- links
    def _with_links(self, machine: Machine) -> Machine:
        self.say("which ranks are near each other")
        found = fit.topology(self.size, self.messages.pairs())
        levels = []
        for number in range(len(found.groups) + 1):
            self.say(f"messages inside of groups of {([*found.groups, self.size])[number]}")
            levels.append(self.messages.level(found, number))
        inner = levels[0]
        return replace(
            machine,
            latency=inner.latency,
            bandwidth=inner.bandwidth,
            curve=inner.curve,
            burst=inner.burst,
            levels=tuple(levels[1:]),
            rates=found.rates if min(found.rates) < 1 else (),
            ports=self.messages.ports(found.groups[0] if found.groups else self.size),
        )

    def _cpu(self, machine: Machine) -> tuple[float, float]:
        """Seconds of a core for each message that a rank sends or receives, and for each byte.

        A message by what a process spends more on many than on one of as many bytes; bytes by what kernels lose while
        they move in the background, to polls, interrupts and caches too.
        """
        ends = 2 * (self.size - 1)
        per_message = self._spent(machine) / (ends * (MANY - 1))
        nbytes, lost = self._lost(machine)
        return per_message, max(0.0, (lost / ends - per_message) / nbytes)

    def _exchange_of(self, machine: Machine, most: float) -> tuple[int, float]:
        """The most bytes that a rank can send to each other one in so many seconds, of some sizes; and its seconds."""
        alone = {nbytes: (self.size - 1) * machine.link(0, self.size - 1).seconds(nbytes) for nbytes in SIZES}
        nbytes = max((n for n in SIZES if alone[n] <= most), default=SIZES[0])
        return nbytes, alone[nbytes]

    def _gather(self, nbytes: int, slices: int) -> Executor:
        """Each rank sends so many bytes to each other one, in so many messages."""
        x = Spec((nbytes * self.size, 1), "uint8", Shard(0))
        made = plan("all_gather", x, ranks=self.size, schedule="direct", slices=slices)
        return bind(made, comm=self.comm, x=np.ones((nbytes, 1), np.uint8))

    def _spent(self, machine: Machine) -> float:
        """By how much longer a core is busy with an exchange in many messages to each rank than in one, which nobody
        waits for: the mean of the ranks."""
        nbytes, alone = self._exchange_of(machine, SPENT_SECONDS)
        taken = np.zeros((2 * ROUNDS, 2))
        with self._gather(nbytes, 1) as one, self._gather(nbytes, MANY) as many:
            for i in range(-1, 2 * ROUNDS):  # once to warm up
                for j, exchange in enumerate((one, many)):
                    sleep(self.idle)
                    meet(self.mpi)
                    begun = process_time()
                    exchange.start()
                    sleep(2 * alone)
                    exchange.wait()
                    taken[i, j] = process_time() - begun
        more = np.array([max(0.0, float(np.median(taken[:, 1] - taken[:, 0])))])
        return float(of_all_ranks(self.mpi, more).mean())

    def _lost(self, machine: Machine) -> tuple[int, float]:
        """Bytes that each rank has for each other one, and by how much kernels take longer while they move."""
        nbytes, alone = self._exchange_of(machine, LOST_SECONDS)
        a, b, c = (np.ones((1024, 1024), np.float32) for _ in range(3))
        count = 2 + int(1.2 * alone / fit.product_seconds(machine, 1024, 1024, 1024))
        taken = np.zeros((2 * ROUNDS, 2))
        with self._gather(nbytes, 1) as exchange:
            for i in range(2 * ROUNDS):
                for moves in (0, 1):
                    sleep(self.idle)
                    meet(self.mpi)
                    if moves:
                        exchange.start()
                    begun = perf_counter()
                    for _ in range(count):
                        np.matmul(a, b, out=c)
                    taken[i, moves] = perf_counter() - begun
                    if moves:
                        exchange.wait()
        lost = np.array([max(0.0, float(np.median(taken[:, 1] - taken[:, 0])))])
        return nbytes, float(of_all_ranks(self.mpi, lost).mean())

    # -- the library's collectives
    def _native(self, name: str, behind: bool) -> Points:
        """Seconds by the bytes that the rank with most reads and writes, of the call that an unfused plan makes.

        `behind`: the ranks run kernels meanwhile, only the helper looks, and calls follow each other.
        """
        layout = problems.layouts(name, 1)[0]
        samples = []
        each = {-(-nbytes // (4 * 64 * self.size)): None for nbytes in NATIVE_SIZES}  # many ranks: small ones are alike
        for rows in (n * self.size for n in each):
            x = Spec((rows, 64), "float32", layout)
            made = plan(name, x, ranks=self.size, schedule="unfused")
            program, extents = made.programs[self.rank], made.extents(self.rank)
            (op,) = (op for op in program.ops if isinstance(op, Collective))
            names = {chunk.buffer for chunk in (*op.reads, *op.writes)}  # those of a walk
            moved = sum(int(np.prod(b.shape(extents))) * 4 for b in program.buffers if b.name in names)
            tensor = np.ones(next(b.shape(extents) for b in program.buffers if b.name == "x"), np.float32)
            with bind(made, comm=self.comm, x=tensor) as call:
                if behind:
                    taken = self._behind(call)
                else:
                    taken = alternate(self.mpi, {name: call}, ROUNDS, warmup=1, idle=self.idle)[name]
            most = float(of_all_ranks(self.mpi, np.array([float(moved)])).max())
            samples.append((most, quiet(taken)))
            if samples[-1][1] * 8 > MOST_SECONDS:
                break
        return fit.curve(samples)

    def _behind(self, call: Executor) -> list[float]:
        """Seconds from the end of one call to that of the next, of the slowest rank, while all of them compute.

        One after the other, as slices are: the links have had no rest, and the helper looks as often as messages come.
        """
        a, b, c = (np.ones((256, 256), np.float32) for _ in range(3))
        taken, ended = [], 0.0
        sleep(self.idle)
        meet(self.mpi)
        for _ in range(BEHIND_WARMUP + ROUNDS):
            call.start()
            late = perf_counter() + self.comm.engine.timeout
            while not call.finished and perf_counter() < late:
                np.matmul(a, b, out=c)
            call.wait()
            begun, ended = ended, perf_counter()
            taken.append(ended - begun)
        return [float(seconds) for seconds in of_all_ranks(self.mpi, np.array(taken[BEHIND_WARMUP:])).max(axis=0)]


def _that_of_rank_0(comm: Communicator, machine: Machine) -> Machine:
    """Ranks may round differently: all take what rank 0 has found."""
    text = machine.to_json().encode()
    count = np.array([len(text)])
    comm.link.blocking.Bcast(count, 0)
    data = np.frombuffer(text.ljust(int(count[0])), np.uint8)[: int(count[0])].copy()
    comm.link.blocking.Bcast(data, 0)
    return Machine.from_json(bytes(data).decode())
