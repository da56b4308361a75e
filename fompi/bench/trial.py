"""`fompi try M,K,N`: what overlap gains here for one shape. One table and a verdict."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fompi
from fompi.base.errors import LaunchError
from fompi.base.tables import Table
from fompi.base.wires import wire_of
from fompi.bench import fused
from fompi.bench.fused import KERNEL, UNFUSED, cases_of
from fompi.bench.measure import DEFAULT, Bench, BenchHosts
from fompi.cli import plan, tools
from fompi.cli.output import Progress, UsageError, is_first_rank, show, show_json, unwritable
from fompi.engine.handshake import agree
from fompi.mpi import launcher, transport
from fompi.runtime.report import percentile
from fompi.tuning.rounds import UNITS, Row
from fompi.tuning.verdict import OtherLoad, others_in_words

EXAMPLE = "{} try 1024,1024,1024 --ranks 4"

Shape = tuple[int, int, int]

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}  # fmt: skip
"""Ranks start in this environment: the user chose their number. Variables that the user has set win."""

MOST_PER_CORE = 16
"""More ranks for each core of this host are not started."""

LITTLE = 1.05
"""If even perfect overlap gains less than this factor, there is little to hide."""

SHORT_SECONDS = 1e-3
"""An operation below this takes about as long as its calls and polls."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "What overlap gains here for a shape of your own, in every fused operation.\n"
        "ms: the median. spread: the middle half of the rounds.\n"
        "gain: over the time without overlap, with its 95 % interval (fewer than 6 rounds: less)."
    )
    parser.add_argument("shape", nargs="+", metavar="M,K,N", help="of x[M, K] @ w[K, N]; or both shapes, MxK KxN")
    parser.add_argument("--ranks", type=int, help="outside of mpirun: how many to start (2, or one for each host)")
    parser.add_argument("--hosts", type=int, help="make this many hosts on this machine, with links between them")
    parser.add_argument("--rate", metavar="R", help="the rate of each of these links: 500mbit, 1gbit (1gbit)")
    plan.add_wire_argument(parser)
    parser.add_argument("--rounds", type=int, default=15, help="rounds in which every contestant runs (15)")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="the table as JSON (no FILE: print it)")


def run(options: argparse.Namespace) -> int:
    if options.rounds < 1:
        raise UsageError(f"--rounds {options.rounds}: give 1 or more")
    wire = wire_of(options.wire, "float32")
    ranks = (options.hosts or 2) if options.ranks is None else options.ranks
    if ranks < 2:
        raise UsageError(f"--ranks {ranks}: give 2 or more, one rank has no messages to hide")
    if options.rate is not None and options.hosts is None:
        raise UsageError(f"--rate {options.rate}: say how many hosts, --hosts 2")
    if options.hosts is not None and not is_in_lab():
        plan.product_of(options.shape)
        return on_own_hosts(options.hosts, options.rate or "1gbit", ranks)
    return run_shape(plan.product_of(options.shape), ranks, options.rounds, options.json, wire)


def run_shape(shape: Shape, ranks: int, rounds: int, json_file: str | None, wire: str = "") -> int:
    """Measure the shape and print the table. Outside of mpirun this starts `ranks` ranks first."""
    text = ",".join(map(str, shape))
    if (status := on_own_ranks(ranks)) is not None:
        return status
    note_threads()
    with fompi.Communicator() as comm:
        agree(comm, f"try {text}", unwritable(comm.rank, json_file))
        with (
            Progress.of_rank(comm.rank, f"try {text}") as progress,
            BenchHosts(comm.link.comm) as cluster,
        ):
            load, rows, bench = OtherLoad(cluster.comm), list[Row](), Bench(comm, cluster, rounds)
            for case in progress.each(cases_of(shape, comm.size)):
                rows.append(fused.measured(bench, case, wire))
                if comm.rank == 0 and json_file != "-":
                    progress.erase()
                    show(*Trial.of(shape, comm.size, cluster, rows, (0.0, 0), wire).news())
            found = Trial.of(shape, comm.size, cluster, rows, load.cores(), wire)
        if comm.rank == 0:
            if json_file == "-":
                show_json(found.values())
            else:
                show(*found.ending())
            if json_file not in (None, "-"):
                Path(json_file).write_text(json.dumps(found.values(), indent=2) + "\n")
    return 0


def is_in_lab() -> bool:
    """True on a host of `fompi.lab`."""
    return "NETLAB_RATES" in os.environ


def on_own_hosts(hosts: int, rate: str, ranks: int) -> int:
    """Run this command on ranks on this many hosts of `fompi.lab`, one core each. Returns the exit status."""
    if launcher.detect().launcher != "none":
        raise UsageError("--hosts makes hosts on this machine and starts the ranks itself: leave out the launcher")
    lab = [sys.executable, str(tools.path("netlab.py")), "run", "--trust-slow"]
    shaped = ["--hosts", str(hosts), "--rate", rate, "--ranks", str(ranks)]
    command = [*lab, *shaped, "--", sys.executable, *sys.orig_argv[1:]]
    return subprocess.run(command, env={**ENVIRONMENT, **os.environ}).returncode


def on_own_ranks(ranks: int) -> int | None:
    """Outside of a launcher: run this command on this many ranks, and return the exit status. None: it is on ranks."""
    if launcher.detect().launcher != "none":
        return None
    mpirun = transport.library().mpirun or shutil.which("mpirun")
    if mpirun is None:
        raise LaunchError("there is no mpirun here: start this with the launcher of your cluster")
    most = MOST_PER_CORE * len(os.sched_getaffinity(0))
    if ranks > most:
        raise UsageError(f"--ranks {ranks}: more than {most} ranks would only wait for the cores of this host")
    command = [mpirun, "-n", str(ranks), sys.executable, *sys.orig_argv[1:]]
    return subprocess.run(command, env={**ENVIRONMENT, **os.environ}).returncode


def note_threads() -> None:
    """Warn once, on standard error, if BLAS would start more threads than there are cores."""
    note = launcher.thread_note()
    if note is not None and is_first_rank():
        print(f"fompi: {note}", file=sys.stderr)


# ----------------------------------------------------------------------------------------------------------- the result


@dataclass(frozen=True)
class Line:
    """One line of the table. `seconds` is the median. `gain` is over the time without overlap, with its interval."""

    what: str
    seconds: float
    lower_quartile: float | None = None
    upper_quartile: float | None = None
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    gain_level: float | None = None  # the probability of the interval: less than 0.95 if there are few rounds


@dataclass(frozen=True)
class WireGain:
    """What smaller messages gain over the faster of the default and the best schedule, and what they cost."""

    name: str
    gain: float
    gain_low: float
    gain_high: float
    error: float
    """The largest error of a result, relative to its largest element."""


@dataclass(frozen=True)
class Outcome:
    """One operation: its lines, and whether the best schedule is a "gain", "nothing" or "slower"."""

    operation: str
    lines: tuple[Line, ...]
    verdict: str
    reason: str  # why nothing is gained; empty for a gain
    wire: WireGain | None = None

    @property
    def gains(self) -> tuple[float, float]:
        """The gain of the best schedule and of the default one."""
        best, default = self.lines[2].gain, self.lines[1].gain
        assert best is not None and default is not None
        return best, default

    @classmethod
    def of(cls, row: Row, circumstance: str, wire: str = "") -> Outcome:
        """From a row of `fused.measured`. `circumstance`: a reason that holds for all operations here, or empty."""
        assert row.base is not None
        unfused = row.opponent or row.best(UNFUSED)
        gain = row.ratio(unfused, row.base).interval
        assert gain is not None
        verdict = "gain" if gain.low > 1 else "nothing" if gain.high >= 1 else "slower"
        together, kernel = row.median(unfused), row.median(KERNEL)
        perfect = min(together, max(kernel, together - kernel))
        lines: tuple[Line, ...] = (
            _line(row, f"without overlap ({unfused.removeprefix('unfused, ')})", unfused),
            _line(row, "default schedule", DEFAULT, unfused),
            _line(row, f"best schedule ({row.base.removeprefix('fompi ')})", row.base, unfused),
            Line("perfect overlap of the same", perfect, gain=together / perfect),
        )
        reason = "" if verdict == "gain" else _reason(kernel, together, circumstance)
        gained = None
        if wire:
            lines += (_line(row, f"messages in {wire}", wire, unfused),)
            least = min((DEFAULT, row.base), key=row.median)
            over = row.ratio(least, wire)
            assert over.interval is not None
            gained = WireGain(wire, over.value, over.interval.low, over.interval.high, row.errors[wire])
        return cls(row.what.partition(",")[0], lines, verdict, reason, gained)


def _line(row: Row, what: str, name: str, unfused: str | None = None) -> Line:
    samples = row.samples[name]
    low, high = percentile(samples, 0.25), percentile(samples, 0.75)
    if unfused is None:
        return Line(what, row.median(name), low, high)
    gain = row.ratio(unfused, name)
    assert gain.interval is not None
    return Line(what, row.median(name), low, high, gain.value, *gain.interval)


def _reason(kernel: float, together: float, circumstance: str) -> str:
    """Why nothing is gained. `together`: seconds of kernel and messages, one after the other."""
    if together < SHORT_SECONDS:
        return "the operation takes less than 1 ms, so the cost of a call counts more than its messages"
    if together < LITTLE * max(kernel, together - kernel):
        most = 1 / LITTLE  # the same words for all operations, so that the verdict names each reason once
        if 2 * kernel > together:
            return f"the kernel takes over {most:.0%} of the time without overlap, so there is little to hide"
        return f"the kernel takes under {1 - most:.0%} of the time without overlap, so it can hide little"
    return circumstance or "the gain is less than the spread"


@dataclass(frozen=True)
class Trial:
    """What was measured for a shape, as a table, a verdict and warnings."""

    shape: tuple[int, int, int]
    ranks: int
    setup: str
    outcomes: tuple[Outcome, ...]
    warnings: tuple[str, ...] = ()
    shared: bool = False  # True: all ranks are on one host

    @classmethod
    def of(
        cls,
        shape: tuple[int, int, int],
        size: int,
        cluster: BenchHosts,
        rows: Sequence[Row],
        others: tuple[float, int] = (0.0, 0),
        wire: str = "",
    ) -> Trial:
        """`others`: how many cores other programs used meanwhile, and of how many (`OtherLoad.cores`)."""
        cores = min(launcher.cores_per_rank(), launcher.cores_beside_other_hosts())
        circumstance, warnings = "", []
        if size == 1:
            circumstance = "there is one rank, so there are no messages to hide"
        elif cores < 1:
            circumstance = f"a rank has {cores:.2g} cores, so kernels and messages share them"
        elif cluster.shared:
            circumstance = "all ranks share a host, where a message is a copy by the cores that compute"
        if rounded := [n for n in shape if n % size]:
            sizes = ", ".join(map(str, rounded))
            warnings.append(f"{sizes}: measured as the next multiple of {size}, to be spread evenly")
        if (used := others_in_words(*others)) is not None:
            warnings.append(f"{used}: try again when the machine is idle")
        outcomes = tuple(Outcome.of(row, circumstance, wire) for row in rows)
        return cls(shape, size, rows[0].setup, outcomes, tuple(warnings), cluster.shared)

    @property
    def verdict(self) -> str:
        """One sentence."""
        parts = []
        if gaining := [outcome for outcome in self.outcomes if outcome.verdict == "gain"]:
            best, default = (_range(gains) for gains in zip(*(outcome.gains for outcome in gaining), strict=True))
            where = f"in {len(gaining)} of {len(self.outcomes)} operations"
            parts.append(f"overlap gains {best} {where} with the best schedule, {default} with the default one")
        others = [outcome for outcome in self.outcomes if outcome.verdict != "gain"]
        for reason in dict.fromkeys(outcome.reason for outcome in others):
            group = [outcome for outcome in others if outcome.reason == reason]
            where = "" if len(group) == len(self.outcomes) else f" in {_names(group)}"
            if slower := [outcome for outcome in group if outcome.verdict == "slower"]:
                where += " (slower)" if len(slower) == len(group) else f" (slower in {_names(slower)})"
            parts.append(f"nothing gained{where}: {reason}")
        return "; ".join([*parts, *self._verdict_on_wire()]) + "."

    def _verdict_on_wire(self) -> Iterator[str]:
        """What smaller messages gain beyond overlap, and how far off results are then."""
        if any(outcome.wire is None for outcome in self.outcomes):
            return
        wires = {outcome.operation: outcome.wire for outcome in self.outcomes if outcome.wire is not None}
        gaining = [wire for wire in wires.values() if wire.gain_low > 1]
        (name,), error = {wire.name for wire in wires.values()}, max(wire.error for wire in wires.values())
        if gaining:
            many, times = f"{len(gaining)} of {len(wires)} operations", _range([wire.gain for wire in gaining])
            yield f"{name} gains {times} more in {many}, and results are off by at most {error:.1%} of the largest"
        if len(gaining) < len(wires):
            where = f" in {', '.join(at for at, wire in wires.items() if wire not in gaining)}" if gaining else ""
            slower = all(wire.gain_high < 1 for wire in wires.values() if wire not in gaining)
            why = ": encoding costs more than copies in memory" if self.shared else ""
            yield f"{name} gains nothing{where}" + " (slower)" * slower + why

    def news(self) -> Iterator[str | Table]:
        """What is printed when the last one of these operations has been measured."""
        m, k, n = self.shape
        if len(self.outcomes) == 1:
            yield f"x[{m}, {k}] @ w[{k}, {n}], {self.setup}, float32"
        yield Table((self.outcomes[-1].operation, "ms", "spread", "gain"), [*self._rows()], right=("ms",))

    def ending(self) -> Iterator[str]:
        """What is printed at the end."""
        yield f"\nverdict: {self.verdict}"
        if self.shared and not any(outcome.verdict == "gain" for outcome in self.outcomes):
            shape = ",".join(map(str, self.shape))
            yield f"with a network between hosts: fompi try {shape} --hosts 2 --rate 1gbit"
        yield from (f"warning: {text}" for text in self.warnings)

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        for line in self.outcomes[-1].lines:
            quartiles = line.lower_quartile, line.upper_quartile
            spread = " to ".join(_ms(seconds) for seconds in quartiles if seconds is not None)
            gain = "" if line.gain is None else f"{line.gain:.2f}x"
            if line.gain_level is not None:
                level = f", {line.gain_level:.0%}" if line.gain_level < 0.95 else ""
                gain += f" ({line.gain_low:.2f} to {line.gain_high:.2f}{level})"
            yield f"{line.what}", _ms(line.seconds), spread, gain

    def values(self) -> dict[str, Any]:
        """For JSON. Times in seconds."""
        return {**asdict(self), "verdict": self.verdict}


def _names(outcomes: Sequence[Outcome]) -> str:
    return ", ".join(outcome.operation for outcome in outcomes)


def _range(gains: Sequence[float]) -> str:
    low, high = f"{min(gains):.2f}x", f"{max(gains):.2f}x"
    return low if low == high else f"{low} to {high}"


def _ms(seconds: float) -> str:
    """Milliseconds with about three digits."""
    ms = UNITS["ms"] * seconds
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 100 else f"{ms:.1f}"
