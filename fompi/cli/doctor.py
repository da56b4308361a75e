"""`fompi doctor`: a self-test of a job, which ends in a list of findings, worst first, each with its remedy.

    facts = measure(collect(), seconds, say)          # collective; the measurements are those of `calibrate`
    findings(facts)                                   # pure: what is wrong with these values

It takes at most two minutes by default. A step that finds no time left is skipped, and a finding says so. A watchdog
ends the job if a rank or a link hangs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from threading import Timer
from time import perf_counter, process_time, time
from typing import Any, TypeVar

import numpy as np

from fompi.base.errors import FompiError, WaitTimeout
from fompi.base.layout import Shard, Spec
from fompi.base.tables import Table
from fompi.cli import info, up
from fompi.cli.findings import (
    BETWEEN,
    PRODUCT,
    PRODUCTS,
    WITHIN,
    Facts,
    Finding,
    HostFacts,
    Products,
    findings,
    milliseconds,
    wall_ahead,
)
from fompi.cli.info import collect
from fompi.cli.output import Progress, UsageError, show, show_json
from fompi.engine import faults
from fompi.engine.communicator import Communicator
from fompi.engine.progress import unaided_share
from fompi.hosts import start
from fompi.hosts.agent import text_of, unwritable
from fompi.model import fit
from fompi.model.fit import Pairs
from fompi.model.machine import Level
from fompi.mpi import environment, launcher, transport
from fompi.ops.operations import plan
from fompi.runtime import alignment
from fompi.runtime.binding import bind
from fompi.traces import clocks
from fompi.tuning.links import ROUNDS, LinkMeter
from fompi.tuning.rounds import alternate, meet, of_all_ranks, seconds_of
from fompi.tuning.verdict import OtherLoad

T = TypeVar("T")

SECONDS, GRACE_SECONDS = 60.0, 60.0
"""The time for the measurements. The watchdog ends the job GRACE_SECONDS later."""

GATHER_NBYTES, MOST_GATHER_NBYTES, GATHER_SECONDS, SHORTEST_SECONDS = 4 << 20, 64 << 20, 0.02, 2e-3
"""The all-gather that moves while kernels run: its bytes at first, and at most, so that it takes GATHER_SECONDS.

If it takes less than SHORTEST_SECONDS, nothing is measured: it is a copy in memory.
"""

POLL_SECONDS = 5e-3
"""The helper thread polls at least this often. Kernels run for this much longer than the all-gather takes."""


# --------------------------------------------------------------------------------------------------- the measurements


def links_of(system: Path = Path("/sys/class")) -> dict[str, float]:
    """Bytes per second of each active network link of this host, by name. Virtual devices have no true rate."""
    rates: dict[str, float] = {}
    for card in sorted(system.glob("net/*")):
        megabits = text_of(card / "speed")
        if (card / "device").exists() and text_of(card / "operstate") == "up" and megabits.isdigit():
            rates[card.name] = int(megabits) * 1e6 / 8
    for port in sorted(system.glob("infiniband/*/ports/*")):
        gigabits, state = text_of(port / "rate").split(" "), text_of(port / "state")
        if state.endswith("ACTIVE") and gigabits[0].replace(".", "", 1).isdigit():
            rates[port.parent.parent.name] = float(gigabits[0]) * 1e9 / 8
    return {name: rate for name, rate in rates.items() if rate}


def place_here(host: str, versions: Mapping[str, str]) -> HostFacts:
    """The Place of this rank."""
    temporary = tempfile.gettempdir() if "TMPDIR" not in os.environ else os.environ["TMPDIR"]
    return HostFacts(
        host,
        versions,
        _free("/dev/shm"),
        temporary,
        None if unwritable(temporary, 1) else _free(temporary),
        _cache(),
        links_of(),
        time() - perf_counter(),
    )


def _free(folder: str) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _cache() -> str:
    """Why measured choices are not kept, or "" if they are, or need not be."""
    if environment.value("FOMPI_CACHE") == "0":
        return ""
    folder = environment.cache_folder()
    if folder is None:
        return "there is no home folder"
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return str(unwritable(existing, 1))


class _OutOfTime(WaitTimeout):
    """The time for the measurements is used up. Raised on all ranks at the same point."""


class _Steps:
    """The measurements on a communicator, one after the other, until the time is used up. Collective."""

    def __init__(self, comm: Communicator, end: float, say: Callable[[str], object]):
        self.comm, self.end, self.say = comm, end, say
        self.link = comm.link.duplicate()
        self.mpi = self.link.comm
        self.undone: list[str] = []
        self.messages = LinkMeter(comm, self.link, self.proceed)

    def proceed(self) -> None:
        """Raise _OutOfTime on all ranks if one of them has used up the time."""
        if of_all_ranks(self.mpi, np.array([perf_counter() > self.end])).any():
            raise _OutOfTime("no time is left")

    def step(self, name: str, measure: Callable[[], T], otherwise: T) -> T:
        """What `measure` returns, or `otherwise` if there is no time for it."""
        self.say(name)
        try:
            self.proceed()
            return measure()
        except _OutOfTime:
            self.undone.append(name)
            return otherwise

    def levels(self, pairs: Pairs, hosts: Sequence[str]) -> list[tuple[str, Level]]:
        """The links inside the groups of ranks that the pairs show, and between them."""
        topology, found = fit.find_topology(self.comm.size, pairs), []
        for number in range(len(topology.groups) + 1):
            partners = fit.exchange_rings(topology, number)
            between = any(hosts[rank] != hosts[source] for rank, (source, _) in partners.items())
            found.append((BETWEEN if between else WITHIN, self.messages.level(topology, number)))
        return found

    def products(self, hosts: Sequence[str], local_rank: int) -> dict[str, Products]:
        """For each host: a product while one rank computes, and while all ranks do."""
        a, b, c = (np.ones((PRODUCT, PRODUCT), np.float32) for _ in range(3))

        def timed() -> float:
            return median(seconds_of(lambda: np.matmul(a, b, out=c)) for _ in range(PRODUCTS))

        timed()
        meet(self.mpi)
        alone, threads = 0.0, 0.0
        if local_rank == 0:
            begun, used = perf_counter(), process_time()
            alone = timed()
            threads = (process_time() - used) / (perf_counter() - begun)
        meet(self.mpi)
        rows = of_all_ranks(self.mpi, np.array([alone, timed(), threads]))
        of_hosts = {host: rows[[i for i, name in enumerate(hosts) if name == host]] for host in dict.fromkeys(hosts)}
        return {host: Products(*map(float, each.max(axis=0))) for host, each in of_hosts.items()}

    def moved(self) -> float | None:
        """The share of an all-gather that moves while the ranks run kernels. None: it is too short to be measured."""
        quick = self._gather(GATHER_NBYTES, 2, False)
        nbytes = min(MOST_GATHER_NBYTES, max(GATHER_NBYTES, int(GATHER_NBYTES * GATHER_SECONDS / max(quick, 1e-6))))
        polled = self._gather(nbytes, ROUNDS, False)
        if polled < SHORTEST_SECONDS:
            return None
        return unaided_share(polled, self._gather(nbytes, ROUNDS, True, 1.5 * polled + POLL_SECONDS))

    def _gather(self, nbytes: int, rounds: int, behind: bool, seconds: float = 0.0) -> float:
        """The seconds that a program waits for an all-gather of `nbytes`, on the slowest rank.

        `behind`: it runs kernels for `seconds` before it waits.
        """
        rows, size = max(1, nbytes // self.comm.size), self.comm.size
        gather = plan("all_gather", Spec((rows * size, 1), "uint8", Shard(0)), ranks=size, schedule="direct")
        a, b, c = (np.ones((128, 128), np.float32) for _ in range(3))
        with bind(gather, comm=self.comm, x=np.ones((rows, 1), np.uint8)) as call:
            if not behind:
                return median(alternate(self.mpi, {"all_gather": call}, rounds, idle=self.messages.idle)["all_gather"])
            rests = []
            for _ in range(rounds):
                self.proceed()
                meet(self.mpi)
                call.start()
                end = perf_counter() + seconds
                while perf_counter() < end:
                    np.matmul(a, b, out=c)
                rests.append(seconds_of(call.wait))
        return median(of_all_ranks(self.mpi, np.array(rests)).max(axis=0).tolist())


def measure(given: Mapping[str, Any], seconds: float, say: Callable[[str], object]) -> Facts:
    """All facts. Collective. Those of links and clocks are complete on rank 0 only."""
    end, rank = perf_counter() + seconds, given["rank"]
    row = given["ranks"][rank]
    versions = {name: given["versions"][name] for name in ("fompi", "python", "numpy")}
    if given["mpi"] is None:
        return Facts(given, [place_here(row["host"], versions)])
    versions["MPI"] = f"{given['mpi']['library']} {given['mpi']['version']}"
    say("folders and versions")
    records = transport.gather_records(place_here(row["host"], versions).pack())
    places = [HostFacts.unpack(record) for record in records]
    if given["warning"]:
        return Facts(given, places)
    try:
        comm = Communicator()
    except FompiError as error:  # on all ranks
        return Facts(given, places, failure=str(error))
    hosts = [place.host for place in places]
    with comm:
        steps = _Steps(comm, end, say)
        load = OtherLoad(steps.mpi)
        several = comm.size > 1
        if several:
            steps.step("clocks", lambda: alignment.read_clocks(comm), None)
        none: dict[str, Products] = {}
        products = steps.step("products", lambda: steps.products(hosts, row["local_rank"]), none)
        pairs: Pairs = {}
        levels: list[tuple[str, Level]] = []
        moved = None
        if several:
            pairs = steps.step("pairs of ranks", steps.messages.pairs, {})
            levels = steps.step("links while all ranks use them", lambda: steps.levels(pairs, hosts), [])
            moved = steps.step("messages while kernels run", steps.moved, None)
            steps.step("clocks again", lambda: alignment.read_clocks(comm), None)
        others = load.cores()
        offsets = {other: clocks.fit(batches) for other, batches in comm.clock_readings.items()}
        steps.link.close()
        return Facts(given, places, "", pairs, levels, moved, offsets, products, others, steps.undone)


# -------------------------------------------------------------------------------------------------------- the command


def blocks(facts: Facts, found: Sequence[Finding]) -> list[Table | str]:
    """What the doctor prints: the facts of `info`, the measurements, and the findings."""
    quiet = {**facts.info, "notes": [], "threads": None, "environment": None, "warning": None, "mpi_error": None}
    lines = []
    if facts.moved is not None:
        lines.append(f"messages while kernels run: {facts.moved:.0%} of an all-gather moves")
    for host, products in facts.products.items():
        lines.append(
            f"a product on {host}: {milliseconds(products.alone)} alone with {products.threads:.1f} threads, "
            f"{milliseconds(products.together)} while all ranks compute"
        )
    if facts.clocks:
        worst = max(facts.clocks.values(), key=lambda clock: clock.error)
        ahead = max(abs(wall_ahead(facts.places[0], facts.places[r], clock)) for r, clock in facts.clocks.items())
        lines.append(f"clocks: known to {milliseconds(worst.error)}, wall clocks differ by {milliseconds(ahead)}")
    parts: list[Table | str] = [*info.blocks(quiet)]
    if rows := _link_rows(facts):
        columns = ["link", "latency us", "1 KiB messages/s", "Gbit/s, all at once", "Gbit/s, one pair"]
        parts.append(Table(columns, rows, right=columns[1:]))
    if lines:
        parts.append("\n".join(lines))
    numbered = [f"{number}. {finding}" for number, finding in enumerate(found, 1)]
    return [*parts, *(numbered or ["no findings: nothing is wrong here"])]


def _message_rate(level: Level) -> float:
    """Messages of the smallest measured size per second, of each rank."""
    return 1 / level.curve[0][1] if level.curve else 0.0


def _link_rows(facts: Facts) -> list[list[str]]:
    """A row for each level of links. If the levels do not show the links between hosts, a row of the pairs does."""
    hosts, pairs = [place.host for place in facts.places], {}
    for between in (False, True):
        rates = [rate for (a, b), rate in facts.pairs.items() if (hosts[a] != hosts[b]) is between]
        pairs[between] = f"{8e-9 * min(rates):.3g} to {8e-9 * max(rates):.3g}" if rates else ""
    rows = [
        [
            where,
            f"{1e6 * level.latency:.1f}",
            f"{_message_rate(level):.0f}",
            f"{8e-9 * level.bandwidth:.3g}",
            pairs[where == BETWEEN],
        ]
        for where, level in facts.levels
    ]
    if pairs[True] and all(where != BETWEEN for where, _ in facts.levels):
        rows.append([BETWEEN, "", "", "", pairs[True]])
    return rows


EXAMPLE = "mpirun -n 4 {} doctor"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, metavar="S", help=f"the time for its measurements ({SECONDS:g})"
    )
    parser.add_argument(
        "--hosts", nargs="+", metavar="HOST", help="first look at these over ssh, as `up`, and start there"
    )
    parser.add_argument("--ssh", default="ssh", metavar="COMMAND", help="with --hosts: another ssh: 'ssh -p 2222'")


def run(options: argparse.Namespace) -> int:
    """Measure, and print the findings on rank 0. There the status is 1 if one of them is an error."""
    seconds = options.seconds
    if not seconds > 0:
        raise UsageError(f"--seconds {seconds:g}: give a number above 0")
    if options.hosts:
        program = (sys.executable, "-m", "fompi", "doctor", "--seconds", f"{seconds:g}", *["--json"] * options.json)
        request = up.HostsRequest(start.hosts_of(options.hosts), program, tuple(shlex.split(options.ssh)))
        return up.up(request, is_quiet=options.json)
    with _Watchdog(seconds + GRACE_SECONDS) as watchdog:
        watchdog.step = "MPI starts"
        given = collect()
        watchdog.is_running = given["mpi"] is not None
        prints = info.prints(given)
        try:
            with Progress.of_rank(0 if prints else 1, "doctor") as progress:

                def say(step: str) -> None:
                    watchdog.step = step
                    progress.step(step)

                facts = measure(given, seconds, say)
        except FompiError as error:
            if len(given["ranks"]) == 1:
                raise
            faults.end_job(f"doctor, rank {given['rank']}, in the step {watchdog.step!r}: {error}", 2)
            raise
    if not prints:
        return 0
    found = findings(facts)
    if options.json:
        show_json({"info": given, "measured": _values(facts), "findings": [asdict(finding) for finding in found]})
    else:
        show(*blocks(facts, found))
    return int(any(finding.severity == "error" for finding in found))


def _values(facts: Facts) -> dict[str, Any]:
    """The measurements as values that JSON can hold."""
    return {
        "places": [asdict(place) for place in facts.places],
        "pairs": [{"ranks": pair, "bytes_per_second": rate} for pair, rate in facts.pairs.items()],
        "links": [
            {
                "where": where,
                "ranks": level.ranks,
                "latency": level.latency,
                "messages_per_second": _message_rate(level),
                "bytes_per_second": level.bandwidth,
            }
            for where, level in facts.levels
        ],
        "moved_while_kernels_run": facts.moved,
        "clocks": [{"rank": rank, **asdict(clock)} for rank, clock in facts.clocks.items()],
        "products": {host: products._asdict() for host, products in facts.products.items()},
        "others": {"cores": facts.others[0], "of": facts.others[1]},
        "undone": list(facts.undone),
    }


class _Watchdog:
    """Ends the job after some seconds: a rank or a link hangs. Use it in a `with` statement."""

    def __init__(self, seconds: float):
        self.seconds, self.step, self.is_running = seconds, "", False
        rank = launcher.detect().rank or 0
        self._timer = Timer(seconds + min(rank, 1), self._bark)  # rank 0 says it first
        self._timer.daemon = True

    def _bark(self) -> None:
        line = (
            f"doctor: not done after {self.seconds:g} s, in the step {self.step!r}: another rank or a link hangs. "
            "Try two ranks on one host, then on two hosts"
        )
        if self.is_running:
            faults.end_job(line, 2)
        print(f"fompi: {line}", file=sys.stderr, flush=True)
        os._exit(2)

    def __enter__(self) -> _Watchdog:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
