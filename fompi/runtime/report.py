"""FOMPI_REPORT=1: what overlap was worth in this job, printed once at its end; FOMPI_REPORT=FILE.json writes it there.

Every call is noted on its rank. When a communicator is closed, or the program ends, its ranks measure what the kernels
and the messages of each operation take alone: the yardsticks of a `Proof`. After a clean end rank 0 gathers the notes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from fompi.backends.base import Backend
from fompi.base.errors import LaunchError, OverlapWarning
from fompi.base.layout import Extents
from fompi.engine.communicator import OBSERVERS, Communicator
from fompi.engine.handshake import agree
from fompi.mpi import launcher
from fompi.mpi.link import finalized
from fompi.mpi.transport import gather_last_words, library, world
from fompi.runtime.baselines import compute_alone, messages_alone
from fompi.runtime.compiled import Compiled
from fompi.runtime.program import Run
from fompi.traces.proof import Needs, Proof, Wait, prove, total
from fompi.traces.trace import Interval, Trace

MOST_OPERATIONS = 64
"""So many operations and sizes are told apart; all others of one plan count as one, of any sizes."""

MOST_CALLS = 1024
"""Of so many calls, the newest, the times are kept."""

GATHER_SECONDS = 10.0
"""For so long rank 0 waits for the notes of ranks that end later."""

Kernels = Mapping[str, Callable[..., object]]


class Calls:
    """The calls of one operation with one set of sizes, on this rank. `extents`: None for any sizes."""

    def __init__(self, run: Run, extents: Extents | None, backend: Backend, kernels: Kernels | None):
        self.comm, self.compiled, self.stamp = run.comm, run.compiled, run.stamp
        self.members = run.comm.link.world_ranks
        self.extents, self.backend, self.kernels = extents, backend, kernels
        self.needs = Needs(run.compiled.plan, run.comm.rank)
        self.calls = 0
        self.proofs: deque[Proof] = deque(maxlen=MOST_CALLS)
        self.waits: tuple[Wait, ...] = ()
        self.compute_alone: float | None = None
        self.messages_alone: float | None = None

    def note(self, trace: Trace, elsewhere: Sequence[Interval]) -> None:
        proof = prove(trace, self.needs, elsewhere=elsewhere)
        self.calls += 1
        self.waits = total([*self.waits, *proof.waits])
        self.proofs.append(replace(proof, waits=()))

    def measure(self) -> None:
        """The yardsticks. Collective. Kernels of the user's own are not run: they may do more than compute."""
        if self.extents is not None:
            if self.kernels is None and self.compute_alone is None:
                take = self.comm.engine.arena.take
                self.compute_alone = compute_alone(self.compiled, self.extents, self.backend, take).seconds
            self.messages_alone = messages_alone(self.compiled, self.comm, self.extents, self.backend)

    def proof(self) -> Proof:
        """The call in the middle: medians of the figures; of the waits the mean."""

        def middle(name: str) -> float:
            return median(getattr(proof, name) for proof in self.proofs)

        return Proof(
            title=self.compiled.title,
            rank=self.comm.rank,
            schedule=self.compiled.plan.schedule,
            wall=middle("wall"),
            kernels=middle("kernels"),
            communication=middle("communication"),
            tail=middle("tail"),
            nbytes=int(middle("nbytes")),
            waits=tuple(wait._replace(seconds=wait.seconds / self.calls) for wait in self.waits),
            compute_alone=self.compute_alone,
            messages_alone=self.messages_alone,
            progress=self.comm.engine.progress_mode,
            elsewhere=middle("elsewhere"),
            kernels_elsewhere=middle("kernels_elsewhere"),
        )

    def record(self) -> dict[str, Any]:
        """All figures, as JSON has them."""
        proof, walls = self.proof(), [proof.wall for proof in self.proofs]
        return {
            "title": proof.title,
            "problem": str(self.compiled.plan.problem),
            "communicator": self.comm.name,
            "members": self.members,
            "stamp": self.stamp,
            "rank": proof.rank,
            "calls": self.calls,
            "p50": percentile(walls, 0.5),
            "p99": percentile(walls, 0.99),
            **{name: getattr(proof, name) for name in FIGURES},
            "waits": [[wait.seconds, str(wait)] for wait in proof.waits[:8]],
        }


FIGURES = (
    "wall", "kernels", "compute_alone", "compute", "slowdown", "communication", "messages_alone", "hidden",
    "exposed", "tail", "idle", "elsewhere", "nbytes", "warning",
)  # fmt: skip


def percentile(values: Sequence[float] | np.ndarray, share: float) -> float:
    """The value below which this share of them lies, between two of them if need be."""
    return float(np.quantile(np.asarray(values, float), share))


def quiet(values: Sequence[float] | np.ndarray) -> float:
    """The lower quartile of some times: whatever else goes on only adds to them."""
    return percentile(values, 0.25)


class Report:
    """The notes of this process. `target`: what FOMPI_REPORT says, a file name or something else."""

    def __init__(self, target: str):
        if target.endswith(".json") and not os.access(Path(target).parent, os.W_OK):
            raise LaunchError(f"FOMPI_REPORT={target}: there is no folder {Path(target).parent} to write to")
        self.target, self.process = target, os.getpid()
        self.rank, self.size = world()
        self.operations: dict[object, Calls] = {}

    def note(
        self,
        run: Run,
        trace: Trace,
        extents: Extents,
        backend: Backend,
        kernels: Kernels | None = None,
        returned_at: float | None = None,
    ) -> None:
        """A call has finished on this rank. `returned_at`: since when the program did not stay with it."""
        if run.error is not None:
            return
        plan = run.compiled.plan
        same = run.comm, plan.problem, plan.schedule, plan.shares, plan.window, backend.name, kernels is not None
        known: Extents | None = extents
        if (same, extents) not in self.operations and len(self.operations) >= MOST_OPERATIONS:
            known = None
        operation = self.operations.get((same, known))
        if operation is None:
            operation = self.operations[same, known] = Calls(run, known, backend, kernels)
        operation.note(trace, run.elsewhere(returned_at))

    def measured(self, compiled: Compiled, extents: Extents, alone: float) -> None:
        """The program itself has measured the kernels of an operation that was called before."""
        for operation in self.operations.values():
            if operation.compiled is compiled and operation.extents == extents:
                operation.compute_alone = alone

    def settle(self, comm: Communicator) -> None:
        """Measure the yardsticks of all operations of this communicator. Collective; done once for each of them."""
        ours = [o for o in self.operations.values() if o.comm is comm and o.messages_alone is None]
        ours.sort(key=lambda operation: operation.stamp)
        if not ours or finalized() or comm.channel.broken is not None or comm.channel.departed:
            return
        try:
            agree(comm, f"the report of {[(o.stamp, o.compiled.title, o.extents is None) for o in ours]}")
            for operation in ours:
                operation.measure()
        except Exception as error:  # a report is not worth the end of a program that went well
            print(f"fompi: rank {self.rank} has no yardsticks for its report: {error}", file=sys.stderr)

    def settle_all(self) -> None:
        """At the end of the program, for all communicators that are open: on every rank in one order."""
        if os.getpid() == self.process:
            open_ones = {o.comm for o in self.operations.values() if not o.comm.closed}
            for comm in sorted(open_ones, key=lambda comm: (comm.link.world_ranks, comm.name)):
                self.settle(comm)

    def finish(self) -> None:
        """After a clean end: gather and print."""
        if os.getpid() != self.process:
            return
        mine = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "operations": [operation.record() for operation in self.operations.values()],
        }
        gathered = gather_last_words(json.dumps(mine).encode(), self.rank, GATHER_SECONDS)
        if self.rank != 0:
            return
        ranks = [json.loads(words) for _, words in sorted(gathered.items())]
        mpi, progress = library(), sorted({o.comm.engine.progress_mode for o in self.operations.values()})
        whole = {
            "threads": launcher.thread_note(),
            "mpi": f"{mpi.name} {mpi.version}",
            "size": self.size,
            "progress": ", ".join(progress),
            "ranks": ranks,
        }
        if self.target.endswith(".json"):
            try:
                Path(self.target).write_text(json.dumps(whole, indent=1))
            except OSError as error:  # it was there at the start
                print(f"fompi: no report in {self.target}: {error}\n{text(whole)}", file=sys.stderr, flush=True)
        else:
            print(text(whole), file=sys.stderr, flush=True)
        for warned in overlap_warnings(whole):
            warnings.warn(warned, OverlapWarning, stacklevel=1)


# ------------------------------------------------------------------------------------------------ what rank 0 prints


def _by_operation(report: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """What the ranks say of each operation, in the order of ranks."""
    found: dict[object, list[dict[str, Any]]] = {}
    for rank in report["ranks"]:
        for o in rank["operations"]:
            found.setdefault((tuple(o["members"]), o["communicator"], o["stamp"], o["title"]), []).append(o)
    return list(found.values())


def overlap_warnings(report: Mapping[str, Any]) -> list[str]:
    """For each operation the words of the rank that is exposed most, of those with a warning."""
    listed = []
    for ranks in _by_operation(report):
        if warned := [o for o in ranks if o["warning"]]:
            listed.append(max(warned, key=lambda o: o["exposed"])["warning"])
    return listed


def text(report: Mapping[str, Any]) -> str:
    """A block for each operation: a line for each rank, and why it waited."""
    lines = [f"fompi report: {report['size']} ranks, {report['mpi']}, progress: {report['progress']}"]
    if report.get("threads"):
        lines.append(f"warning: {report['threads']}")
    if missing := sorted(set(range(report["size"])) - {rank["rank"] for rank in report["ranks"]}):
        lines.append(f"nothing came from rank {', '.join(map(str, missing))}")
    for ranks in _by_operation(report):
        first = ranks[0]
        lines.append("")
        lines.append(f"{first['title']} on {first['communicator']}: {first['problem']}, {first['calls']} calls")
        lines.append(
            "rank      p50      p99  compute   slower messages    alone   hidden  exposed     tail   (ms, the median)"
        )
        for o in ranks:
            cells = [_ms(o["p50"]), _ms(o["p99"]), _ms(o["compute"]), f"{o['slowdown']:9.2f}", _ms(o["communication"])]
            cells += [_ms(o["messages_alone"]), _ms(o["hidden"]), _ms(o["exposed"]), _ms(o["tail"])]
            said = ["compute in the call"] * (o["compute_alone"] is None)
            said += [f"{1e3 * o['elsewhere']:.3f} ms elsewhere"] * (o["elsewhere"] > 0)
            lines.append("   ".join([f"{o['rank']:>4}{''.join(cells)}", *said]))
        for o in ranks:
            if o["waits"]:
                lines.append(f"  rank {o['rank']} waited {'; '.join(words for _, words in o['waits'][:3])}")
    return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return f"{'-':>9}" if seconds is None else f"{1e3 * seconds:9.3f}"


def of_environment() -> Report | None:
    """The report that FOMPI_REPORT asks for."""
    asked = os.environ.get("FOMPI_REPORT", "0")
    return None if asked in ("", "0") else Report(asked)


OBSERVERS.append(of_environment)
