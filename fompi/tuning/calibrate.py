"""Measures the Machine of a job: `mpirun -n 4 python -m fompi calibrate machine.json`.

Collective. It takes less than a minute for a few ranks. All ranks work while one quantity is measured, as they do in a
program. So cores and links that ranks share are shared here too. A time is the median of some rounds, of the slowest
rank. At the end some of it is measured again, and a verdict says whether others disturbed it (`fompi.tuning.verdict`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Any, Self

import numpy as np

from fompi.base.errors import WaitTimeout
from fompi.base.file_checks import Points
from fompi.base.layout import COLLECTIVES, Shard, Spec
from fompi.base.version import __version__
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree
from fompi.engine.progress import HELPED, measure_unaided
from fompi.model import fit
from fompi.model.machine import SPEED_WIDTH, Level, Machine
from fompi.mpi import launcher
from fompi.mpi.transport import library
from fompi.ops.operations import plan
from fompi.plans.meaning import layouts
from fompi.plans.plan import Collective
from fompi.runtime.binding import bind
from fompi.runtime.executor import Executor
from fompi.runtime.report import lower_quartile
from fompi.tuning.device import DeviceMeter
from fompi.tuning.links import MOST_SECONDS, ROUNDS, SIZES, LinkMeter
from fompi.tuning.rounds import alternate, meet, of_all_ranks, text_of_rank_0, texts
from fompi.tuning.verdict import OtherLoad, Verdict, judge

BEHIND_WARMUP = 2
"""The first calls behind kernels do not count: the helper thread still learns how often messages come."""

EXCHANGE_SECONDS = 0.1
"""The longest exchange, in seconds, with which the delay of kernels by messages is measured."""

MANY, SPLIT_SECONDS = 64, 0.02
"""The CPU time per message comes from two exchanges of the same bytes: in MANY messages per peer, and in one message.

The exchange in one message takes at most SPLIT_SECONDS.
"""

CHANGED = 1.15
"""The speed of the cores has changed if the time of kernels has changed by more than this factor."""

LIBRARY_SIZES = [1 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20]
"""Bytes of the global tensor of each measured collective."""

PRODUCTS = (
    (1024, 1024, 1024), (256, 1024, 1024), (64, 1024, 1024), (512, 2048, 512), (512, 256, 2048), (128, 512, 2048),
    (900, 1100, 900), (300, 2000, 1300), (96, 1300, 2000), (32, 1100, 900), (900, 400, 1500), (300, 1500, 400),
    (96, 520, 260), (300, 300, 500), (32, 400, 1500), (32, 2000, 1300),
)  # fmt: skip
"""The shapes (m, k, n) of the products: many rows and few rows, small weights and large weights.

Not all are powers of two. With those a product takes about 4 % longer, because its rows share the sets of a cache.
"""

SPEED_ROWS, SPEED_WEIGHTS, SPEED_ROUNDS, SPEED_SECONDS = (1, 8, 64, 512), 16, 3, 0.2
"""The rows of the products of each rank; their weights, more than a cache holds; rounds, and the seconds of each.

A round is longer than a core with a quota may pause.
"""

MEMORY_LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"
"""Files with the most bytes that this container may use."""

FEW_PRODUCTS = PRODUCTS[2::3]
"""The products that are measured again while a program waits."""


def calibrate(
    comm: Any = None, say: Callable[[str], object] = lambda text: None, limit: float = inf, device: Any = None
) -> Machine:
    """The Machine of the ranks of `comm`, the same on all of them. Collective.

    Kernels are products and sums in float32. Messages are in host memory. With a `device` (`fompi.Device`) kernels run
    on it, and messages between ranks of a group move between its memory and that of the other rank. `say` is called
    with a text before each step. Raises WaitTimeout on all ranks if it is not done after `limit` seconds.
    """
    return calibrate_and_judge(comm, say, limit, device)[0]


def calibrate_and_judge(
    comm: Any, say: Callable[[str], object], limit: float, device: Any = None
) -> tuple[Machine, Verdict]:
    """The machine of `calibrate`, and whether others disturbed the measurement. The same on all ranks. Collective."""
    communicator = Communicator.of(comm)
    agree(communicator, "calibrate" if device is None else f"calibrate a {device.name}")
    with _Calibration(communicator, say, limit, device) as calibration:
        machine = _of_rank_0(communicator, calibration.machine())
        return machine, calibration.verdict(machine)


def measured(comm: Any, text: str) -> Machine:
    """The speeds, memories and links of the ranks of `comm` only, the same on all of them. Collective; some seconds.

    All ranks give the same `text`, or all raise MismatchError.
    """
    communicator = Communicator.of(comm)
    agree(communicator, text)
    with _Calibration(communicator, lambda text: None) as calibration:
        machine = calibration.kernels()
        return _of_rank_0(communicator, calibration.with_links(machine) if communicator.size > 1 else machine)


def place(comm: Any) -> tuple[str, str]:
    """The name of a machine that is measured on `comm` (mpi4py), and its ranks and hosts in words. Collective."""
    hosts = texts(comm, socket.gethostname())
    distinct = len(set(hosts))
    return f"{hosts[0]}, {len(hosts)} ranks", f"{len(hosts)} ranks on {distinct} host{'s' * (distinct > 1)}"


def refit(machine: Machine, comm: Communicator, computes: bool) -> Machine:
    """The machine as it is now, the same on all ranks. Collective. It takes about a second for 8 ranks.

    Pairs of ranks are measured again, and if the operation `computes`, the speed of the cores too.
    """
    with _Calibration(comm, lambda text: None) as calibration:
        now = fit.refitted(machine, comm.size, calibration.messages.pairs())
    slower = slowdown(machine, comm) if computes else 1.0
    return _of_rank_0(comm, fit.slowed(now, slower) if max(slower, 1 / slower) > CHANGED else now)


def slowdown(machine: Machine, comm: Communicator) -> float:
    """The time of kernels now, divided by their time on `machine`, on the slowest rank. Collective; under a second."""
    with _Calibration(comm, lambda text: None) as calibration:
        return calibration._slowdown(machine)


class _Calibration:
    """All measurements on a duplicate of a communicator. Use it in a `with` statement."""

    def __init__(self, comm: Communicator, say: Callable[[str], object], limit: float = inf, device: Any = None):
        self.comm, self.said, self.link = comm, say, comm.link.duplicate()
        self.messages = LinkMeter(comm, self.link, self.proceed)
        self.mpi, self.idle = self.link.comm, self.messages.idle
        self.rank, self.size = comm.rank, comm.size
        self.limit, self.end, self.step = limit, perf_counter() + limit, ""
        self.topology, self.inner = fit.Topology((), ()), Level(1, 0.0, inf)  # `_with_links` finds them
        self.load = OtherLoad(self.mpi)
        self.device = None if device is None else DeviceMeter(device, comm, self.proceed)

    def say(self, step: str) -> None:
        """A step begins. Collective."""
        self.step = step
        self.said(step)
        self.proceed()

    def proceed(self) -> None:
        """Raise WaitTimeout on all ranks if one of them has used up the time. Collective."""
        if self.limit == inf:
            return
        if of_all_ranks(self.mpi, np.array([perf_counter() > self.end])).any():
            raise WaitTimeout(
                f"calibrate: not done after {self.limit:g} s, in the step {self.step!r}. Others use the cores, or the "
                "links are slow: try again when the machine is idle, or give more time"
            )

    def verdict(self, machine: Machine) -> Verdict:
        """Measure some kernels and messages again, and judge the machine. Collective."""
        self.say("some kernels and messages again")
        kernels, links = self._slowdown(machine), 1.0
        if self.size > 1:
            again = self.messages.level(self.topology, 0)
            links = median(
                seconds / before for (_, before), (_, seconds) in zip(self.inner.curve, again.curve, strict=False)
            )
        others, cores = self.load.cores()
        return judge(machine, kernels, links, others, cores)

    def _slowdown(self, machine: Machine) -> float:
        """The time of kernels now, divided by their time on `machine`, even while others use the cores."""
        if self.device is not None:
            return self.device.slowdown(machine)
        measured = self.products(FEW_PRODUCTS, ROUNDS)
        predicted = [fit.product_seconds(machine, *shape) for shape in FEW_PRODUCTS]
        return median(seconds / expected for seconds, expected in zip(measured, predicted, strict=True))

    def machine(self) -> Machine:
        """Measure everything."""
        here = launcher.cores_per_rank(), self.comm.engine.progress_mode in HELPED
        cores, helped = of_all_ranks(self.mpi, np.array(here, float)).min(axis=0)  # may differ between hosts
        if self.device is not None:
            return self._of_device()
        machine = replace(self.kernels(), lanes=2 if cores >= 2 and helped else 1)
        if self.size > 1:
            machine = self.with_links(machine)
            machine = replace(machine, collectives=self._library_curves(False), collectives_ranks=self.size)
            if helped:
                machine = replace(machine, collectives_behind=self._library_curves(True))
            self.say("which share of a message the MPI library moves without calls to it")
            machine = replace(machine, unaided_share=measure_unaided(self.link).share or 0.0)
            if machine.lanes == 1:
                self.say("CPU time of messages")
                per_message, per_byte = self._cpu(machine)
                helper = self.comm.engine.helper
                poll = helper.pause.least if helper is not None else 0.0
                machine = replace(machine, cpu_message=per_message, cpu_byte=per_byte, poll=poll)
        return machine

    def kernels(self) -> Machine:
        """Measure the kernels and the memory of each rank."""
        self.say("kernels")
        overhead, memory_rate, flops_rate, pack_rate = self._kernels()
        self.say("kernels and memory of each rank")
        memories = self._memories()
        unequal = memories if min(memories) < fit.FULL_RATE * max(memories) else ()
        rates = {"flops_rate": flops_rate, "memory_rate": memory_rate, "overhead": overhead, "pack_rate": pack_rate}
        return replace(self._machine(**rates), speeds=self._speeds(), memory=min(memories), memories=unequal)

    def _machine(self, on: str = "", /, **kernels: Any) -> Machine:
        """A machine with these kernels, whose links cost nothing yet."""
        mpi, (name, where) = library(), place(self.mpi)
        what = f"{where}{on}, {mpi.name} {mpi.version}, fompi {__version__}, float32"
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return Machine(name=name, latency=0.0, bandwidth=1e300, source=f"measured {now}: {what}", **kernels)

    def _of_device(self) -> Machine:
        """The machine of tensors on the device."""
        assert self.device is not None
        self.say("kernels, launches and copies of the device")
        machine = self._machine(f", {self.device.title}", **self.device.kernels())
        if self.size == 1:
            return machine
        machine = replace(
            self.with_links(machine), collectives=self._library_curves(False), collectives_ranks=self.size
        )
        groups = (1, *self.topology.groups)
        staged = self.device.staged(groups)
        if staged != 1:
            self.say("messages between devices")
            ring = fit.exchange_rings(self.topology, 0)
            level = self.device.level(ring, machine.innermost)
            small = self.device.staged_below(ring, level)
            machine = machine.with_links(level, machine.levels, staged_below=small)
        return replace(machine, staged=staged)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None and not self.link.given_up:  # else messages may still be in flight
            self.link.close()
        else:
            self.comm.link.given_up.append(self.link)

    # -- kernels
    def _kernels(self) -> tuple[float, float, float, float]:
        """Overhead in seconds, bytes per second, operations per second, and packed bytes per second."""
        tiny, large = np.ones((2, 8, 8), np.float32), np.ones((2, 1 << 20), np.float32)
        sums = {
            "overhead": lambda: np.matmul(tiny[0], tiny[1]),
            "sum": lambda: np.add(large[0], large[1], out=large[0]),
        }
        taken = alternate(self.mpi, sums, 2 * ROUNDS, idle=self.idle)
        overhead, summed = (median(taken[name]) for name in sums)
        timed = [
            (*fit.product(*shape), max(1e-9, seconds - overhead))
            for shape, seconds in zip(PRODUCTS, self.products(PRODUCTS, 2 * ROUNDS), strict=True)
        ]
        flops_rate, pack_rate = fit.product_rates(timed)
        return overhead, 3 * large[0].nbytes / summed, flops_rate, pack_rate

    def products(self, shapes: Sequence[tuple[int, int, int]], rounds: int) -> list[float]:
        """The median seconds of each product on the slowest rank, while all ranks compute.

        Each product comes right after a product of other rows with the same weight, so that the caches hold the weight.
        A plan multiplies piece after piece in the same way.
        """
        others: dict[str, Callable[[], object]] = {}
        calls: dict[str, Callable[[], object]] = {}
        for m, k, n in shapes:
            x, w, y = np.ones((2, m, k), np.float32), np.ones((k, n), np.float32), np.empty((m, n), np.float32)
            others[f"{m} {k} {n}"], calls[f"{m} {k} {n}"] = (partial(np.matmul, rows, w, out=y) for rows in x)

        def before(name: str) -> None:
            self.proceed()
            others[name]()

        taken = alternate(self.mpi, calls, rounds, warmup=1, before=before)
        return [median(seconds) for seconds in taken.values()]

    def _speeds(self) -> tuple[Points, ...]:
        """The curve of each rank: the mean seconds of products of few and of many rows, while all ranks compute."""
        weights = np.ones((SPEED_WEIGHTS, SPEED_WIDTH, SPEED_WIDTH), np.float32)
        own = np.zeros((len(SPEED_ROWS), SPEED_ROUNDS))
        for (i, rows), j in product(enumerate(SPEED_ROWS), range(SPEED_ROUNDS)):
            x, y, count = np.ones((rows, SPEED_WIDTH), np.float32), np.empty((rows, SPEED_WIDTH), np.float32), 0
            self.proceed()
            meet(self.mpi)
            begun = perf_counter()
            while (seconds := perf_counter() - begun) < SPEED_SECONDS:
                for w in weights:
                    np.matmul(x, w, out=y)
                count += SPEED_WEIGHTS
            own[i, j] = seconds / count
        return fit.speeds(SPEED_ROWS, np.median(of_all_ranks(self.mpi, own), axis=2).tolist())

    def _memories(self) -> tuple[float, ...]:
        """The bytes of each rank: ranks of one host share its memory."""
        sizes = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
        texts_of_limits = [path.read_text().strip() for path in map(Path, MEMORY_LIMITS) if path.is_file()]
        hosts = texts(self.mpi, socket.gethostname())
        own = min([*sizes, *(float(text) for text in texts_of_limits if text.isdigit())]) / hosts.count(
            hosts[self.rank]
        )
        return tuple(of_all_ranks(self.mpi, np.array([own]))[:, 0].tolist())

    # -- links
    def with_links(self, machine: Machine) -> Machine:
        """Measure the links, too."""
        self.say("links between pairs of ranks")
        self.topology = topology = fit.find_topology(self.size, self.messages.pairs())
        levels = []
        for number, ranks in enumerate((*topology.groups, self.size)):
            self.say(f"links inside groups of {ranks} ranks")
            levels.append(self.messages.level(topology, number))
        self.inner = levels[0]
        rates = topology.rates if min(topology.rates) < 1 else ()
        ports = self.messages.ports(topology.groups[0] if topology.groups else self.size)
        return machine.with_links(levels[0], levels[1:], rates=rates, ports=ports)

    def _cpu(self, machine: Machine) -> tuple[float, float]:
        """CPU seconds per message that a rank sends or receives, and per byte.

        The time per message comes from the CPU time of two exchanges: in many messages, and in one message.
        The time per byte comes from the delay of kernels while bytes move behind them. It includes the effects of
        polls, interrupts and caches.
        """
        ends = 2 * (self.size - 1)
        per_message = self._cost_of_splitting(machine) / (ends * (MANY - 1))
        nbytes, delay = self._kernel_delay(machine)
        return per_message, max(0.0, (delay / ends - per_message) / nbytes)

    def _largest_exchange(self, machine: Machine, most: float) -> tuple[int, float]:
        """The largest of SIZES that a rank can send to each other rank in `most` seconds, and the seconds it takes."""
        seconds = {nbytes: (self.size - 1) * machine.link(0, self.size - 1).seconds(nbytes) for nbytes in SIZES}
        nbytes = max((n for n in SIZES if seconds[n] <= most), default=SIZES[0])
        return nbytes, seconds[nbytes]

    def _exchange(self, nbytes: int, slices: int) -> Executor:
        """A bound all-gather: each rank sends `nbytes` to each other rank, in `slices` messages."""
        x = Spec((nbytes * self.size, 1), "uint8", Shard(0))
        direct = plan("all_gather", x, ranks=self.size, schedule="direct", slices=slices)
        return bind(direct, comm=self.comm, x=np.ones((nbytes, 1), np.uint8))

    def _cost_of_splitting(self, machine: Machine) -> float:
        """The CPU seconds of an exchange in MANY messages per peer, minus those of one message per peer.

        The program sleeps while the messages move. The result is the mean over the ranks.
        """
        nbytes, seconds = self._largest_exchange(machine, SPLIT_SECONDS)
        taken = np.zeros((2 * ROUNDS, 2))
        with self._exchange(nbytes, 1) as single, self._exchange(nbytes, MANY) as many:
            for i in range(-1, 2 * ROUNDS):  # round -1 warms up: round 2 * ROUNDS - 1 overwrites it
                for j, exchange in enumerate((single, many)):
                    sleep(self.idle)
                    meet(self.mpi)
                    begun = process_time()
                    exchange.start()
                    sleep(2 * seconds)
                    exchange.wait()
                    taken[i, j] = process_time() - begun
        more = np.array([max(0.0, float(np.median(taken[:, 1] - taken[:, 0])))])
        return float(of_all_ranks(self.mpi, more).mean())

    def _kernel_delay(self, machine: Machine) -> tuple[int, float]:
        """The bytes from each rank to each other rank, and how much longer kernels take while they move, in seconds."""
        nbytes, seconds = self._largest_exchange(machine, EXCHANGE_SECONDS)
        a, b, c = (np.ones((1024, 1024), np.float32) for _ in range(3))
        count = 2 + int(1.2 * seconds / fit.product_seconds(machine, 1024, 1024, 1024))
        taken = np.zeros((2 * ROUNDS, 2))
        with self._exchange(nbytes, 1) as exchange:
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
        delay = np.array([max(0.0, float(np.median(taken[:, 1] - taken[:, 0])))])
        return nbytes, float(of_all_ranks(self.mpi, delay).mean())

    # -- collectives of the MPI library
    def _library_curves(self, behind: bool) -> dict[str, Points]:
        curves = {}
        for name in COLLECTIVES:
            self.say(f"{name} of the MPI library{' while kernels run' * behind}")
            curves[name] = self._library_curve(name, behind)
        return curves

    def _library_curve(self, name: str, behind: bool) -> Points:
        """The seconds of an unfused collective, by the bytes that it reads and writes on the rank with the most bytes.

        `behind`: the ranks run kernels, only the helper thread polls, and calls follow each other.
        """
        layout = layouts(name, 1)[0]
        samples = []
        units = {-(-nbytes // (4 * 64 * self.size)): None for nbytes in LIBRARY_SIZES}  # many ranks: some are equal
        for rows in (n * self.size for n in units):
            x = Spec((rows, 64), "float32", layout)
            self.proceed()
            unfused = plan(name, x, ranks=self.size, schedule="unfused")
            program, extents = unfused.programs[self.rank], unfused.extents(self.rank)
            (op,) = (op for op in program.ops if isinstance(op, Collective))
            names = {chunk.buffer for chunk in (*op.reads, *op.writes)}  # as in a simulation
            moved = sum(int(np.prod(b.shape(extents))) * 4 for b in program.buffers if b.name in names)
            tensor = np.ones(next(b.shape(extents) for b in program.buffers if b.name == "x"), np.float32)
            with bind(unfused, comm=self.comm, x=tensor) as call:
                if behind:
                    taken = self._behind(call)
                else:
                    taken = alternate(self.mpi, {name: call}, ROUNDS, warmup=1, idle=self.idle)[name]
            most = float(of_all_ranks(self.mpi, np.array([float(moved)])).max())
            samples.append((most, lower_quartile(taken)))
            if samples[-1][1] * 8 > MOST_SECONDS:
                break
        return fit.curve(samples)

    def _behind(self, call: Executor) -> list[float]:
        """Seconds from the end of one call to the end of the next, on the slowest rank, while all ranks compute.

        The calls follow each other like the slices of a plan. So the links have no rest, and the helper thread polls as
        often as messages come.
        """
        a, b, c = (np.ones((256, 256), np.float32) for _ in range(3))
        taken, ended = [], 0.0
        sleep(self.idle)
        meet(self.mpi)
        for _ in range(BEHIND_WARMUP + ROUNDS):
            call.start()
            deadline = perf_counter() + self.comm.engine.timeout
            while not call.finished and perf_counter() < deadline:
                np.matmul(a, b, out=c)
            call.wait()
            begun, ended = ended, perf_counter()
            taken.append(ended - begun)
        return [float(seconds) for seconds in of_all_ranks(self.mpi, np.array(taken[BEHIND_WARMUP:])).max(axis=0)]


def _of_rank_0(comm: Communicator, machine: Machine) -> Machine:
    """The machine of rank 0, on all ranks. The results of the ranks may be rounded differently."""
    return Machine.from_json(text_of_rank_0(comm, machine.to_json()))
