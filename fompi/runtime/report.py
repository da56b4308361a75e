"""FOMPI_REPORT: what overlap gained in this job.

FOMPI_REPORT=1 prints a table of a screen, once, at the end of the job (`fompi.runtime.report_text`). FOMPI_REPORT=short
prints three lines, and one of steps. FOMPI_REPORT=full prints all operations, with a line for each rank.
FOMPI_REPORT=FILE.json writes all figures to a file, with a trace of the newest calls (`fompi trace FILE.json`).

1. Every rank notes each call that finishes (`Report.note`).
2. When a communicator is closed, or the program ends, its ranks measure the baselines of each operation
   (`Report.settle`): the time of its kernels alone, and of its messages alone.
3. After a clean end, rank 0 gathers the notes of all ranks (`Report.finish`).

`mark_step` tells it where a step of the program ends: it then says, too, what a step of the program takes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from numbers import Real
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from fompi.backends.base import Backend
from fompi.base.at_exit import failure
from fompi.base.errors import ArgumentError, OverlapWarning, warn
from fompi.base.layout import Extents
from fompi.base.log import log
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree
from fompi.mpi import environment, launcher
from fompi.mpi.link import finalized
from fompi.mpi.transport import gather_at_exit, library, world
from fompi.plans.meaning import ROOTED
from fompi.plans.plan import Plan
from fompi.runtime.alignment import read_clocks
from fompi.runtime.baselines import compute_alone, messages_alone
from fompi.runtime.compiled import Compiled
from fompi.runtime.digest import VARIABLE, Digests, Notes
from fompi.runtime.program import Run
from fompi.runtime.recorder import Recorder
from fompi.runtime.report_text import full_text, overlap_warnings, short_text, text
from fompi.runtime.steps import Steps
from fompi.traces import clocks
from fompi.traces.proof import NOT_OVERLAPPING, Proof, RankDependencies, Wait, prove, total
from fompi.traces.trace import Interval, Trace, merge

MOST_OPERATIONS = 64
"""The report has at most this many entries, which bounds the time of the baselines at the end.

An entry is one operation with one set of rows. After that, all further rows of a plan share one entry without
baselines.
"""

MOST_CALLS = 1024
"""Each entry keeps the times of this many calls, the newest. It bounds the memory."""

MOST_TRACED = 64
"""A file has the traces of this many calls of each rank, the newest."""

GATHER_SECONDS = 10.0
"""How long rank 0 waits for the notes of ranks that end later."""

Kernels = Mapping[str, Callable[..., object]]


class Calls:
    """The calls of one operation on this rank. `extents` are their rows, or None for calls with different rows."""

    def __init__(self, run: Run, extents: Extents | None, backend: Backend, kernels: Kernels | None):
        self.comm, self.compiled, self.stamp = run.comm, run.compiled, run.stamp
        self.members = run.comm.link.world_ranks
        self.extents, self.backend, self.kernels = extents, backend, kernels
        self.dependencies = RankDependencies(run.compiled.plan, run.comm.rank)
        self.calls = 0
        self.proofs: deque[Proof] = deque(maxlen=MOST_CALLS)
        self.waits: tuple[Wait, ...] = ()
        self.compute_alone: float | None = None
        self.messages_alone: float | None = None

    def note(self, trace: Trace, elsewhere: Sequence[Interval]) -> None:
        proof = prove(trace, self.dependencies, elsewhere=elsewhere)
        self.calls += 1
        self.waits = total([*self.waits, *proof.waits])
        self.proofs.append(replace(proof, waits=()))

    def measure(self) -> None:
        """Measure the baselines. Collective. Kernels of the user are not run alone: they may do more than compute."""
        if self.extents is not None:
            if self.kernels is None and self.compute_alone is None:
                arena = self.comm.engine.arena
                self.compute_alone = compute_alone(self.compiled, self.extents, self.backend, arena)
            self.messages_alone = messages_alone(self.compiled, self.comm, self.extents, self.backend)

    def proof(self) -> Proof:
        """A Proof of the typical call: each figure is the median of the calls, each wait the mean."""

        def median_of(name: str) -> float:
            return float(median(getattr(proof, name) for proof in self.proofs))

        names = ("wall", "kernels", "communication", "tail", "elsewhere", "kernels_elsewhere")
        return Proof(
            title=self.compiled.title,
            rank=self.comm.rank,
            schedule=self.compiled.plan.schedule,
            nbytes=int(median_of("nbytes")),
            waits=tuple(wait._replace(seconds=wait.seconds / self.calls) for wait in self.waits),
            compute_alone=self.compute_alone,
            messages_alone=self.messages_alone,
            progress=self.comm.engine.progress_mode,
            **{name: median_of(name) for name in names},
        )

    def flops(self) -> int | None:
        """The floating-point operations of the products of one call on this rank. None if rows change."""
        return None if self.extents is None else self.compiled.flops(self.compiled.sized(self.extents))

    def record(self) -> dict[str, Any]:
        """All figures as JSON values."""
        proof, walls = self.proof(), [proof.wall for proof in self.proofs]
        return {
            "title": proof.title,
            "problem": str(self.compiled.plan.problem),
            "call": called(self.compiled.plan, self.extents, self.comm.rank),
            "communicator": self.comm.name,
            "number": self.comm.number,
            "members": self.members,
            "stamp": self.stamp,
            "rank": proof.rank,
            "calls": self.calls,
            "flops": self.flops(),
            "p50": percentile(walls, 0.5),
            "p99": percentile(walls, 0.99),
            **{name: getattr(proof, name) for name in FIGURES},
            "waits": [[wait.seconds, str(wait)] for wait in proof.waits[:8]],
            "not_overlapped": why_not_overlapped(self.comm, self.compiled.plan),
        }


def called(plan: Plan, extents: Extents | None, rank: int) -> str:
    """The operation with its tensors on this rank, such as "all_gather_matmul(float32 x[64, 32], w[32, 48])".

    Calls with different rows (`extents` is None) are those of the problem, without rows.
    """
    problem = plan.problem
    if extents is None:
        return str(problem)
    inputs = [buffer for buffer in plan.programs[rank].buffers if buffer.is_input]
    texts = [f"{buffer.name}[{', '.join(map(str, buffer.shape(extents)))}]" for buffer in inputs]
    options = [f"root {problem.root}"] * (problem.operation in ROOTED) + [problem.op] * (problem.op != "sum")
    return f"{problem.operation}({problem.dtype} {', '.join([*texts, *options])})"


def why_not_overlapped(comm: Communicator, plan: Plan) -> str | None:
    """Why messages do not move behind kernels in calls of this plan, however long they take. None if they do."""
    if comm.size == 1:
        return "one rank has no messages"
    if plan.schedule in NOT_OVERLAPPING:
        if comm.machine is not None:
            chosen = "the best on the machine of FOMPI_MACHINE, or asked for"
        elif comm.crowded:
            chosen = "asked for, or chosen because this host has no spare core"
        else:
            chosen = "it was asked for"
        return f"{plan.schedule} does not overlap: {chosen}"
    if not (plan.problem.weights or plan.problem.gradients):
        return "no product to hide behind: work between start() and wait() hides it"
    return None


FIGURES = (
    "wall", "kernels", "compute_alone", "compute", "slowdown", "communication", "messages_alone", "hidden",
    "exposed", "tail", "idle", "elsewhere", "nbytes", "warning",
)  # fmt: skip
"""The attributes of a Proof that the report contains."""


def percentile(values: Sequence[float] | np.ndarray, share: float) -> float:
    """The value below which this share (0 to 1) of the values lies, interpolated between two values."""
    return float(np.quantile(np.asarray(values, float), share))


def lower_quartile(values: Sequence[float] | np.ndarray) -> float:
    """The lower quartile of some times. Other work on the cores only makes times longer, so low values are typical."""
    return percentile(values, 0.25)


class Report:
    """The notes of this process. `target` is the value of FOMPI_REPORT: "1", "short", "full", or a `.json` file.

    Raises LaunchError if it is another text, or if the file cannot be written.
    """

    def __init__(self, target: str):
        environment.check("FOMPI_REPORT", target)
        self.target, self.process = target, os.getpid()
        self.rank, self.size = world()
        self.operations: dict[object, Calls] = {}
        self.steps = Steps()  # those that the program marks
        self.updates: defaultdict[int, Steps] = defaultdict(Steps)  # those that each optimizer ends, by its id
        self.waited = 0.0  # seconds in which the program has waited for calls, until the last one that was noted
        self.traces: deque[Trace] = deque(maxlen=MOST_TRACED if self.is_file else 0)
        self.clocks: dict[int, clocks.Clock] = {}  # on rank 0: the clock of each rank, if the ranks have compared them
        _OF_PROCESS[:] = [self]

    @property
    def is_file(self) -> bool:
        return self.target.endswith(".json")

    def note(
        self,
        run: Run,
        trace: Callable[[], Trace],
        extents: Extents,
        backend: Backend,
        kernels: Kernels | None = None,
        returned_at: float | None = None,
        outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """A call has finished on this rank. `returned_at` is when `start()` returned to the program, or None."""
        if run.error is not None:
            return
        plan, self.waited = run.compiled.plan, run.comm.engine.waits.total
        same = run.comm, plan.problem, plan.schedule, plan.shares, plan.window, backend.name, kernels is not None
        rows: Extents | None = extents
        if (same, extents) not in self.operations and len(self.operations) >= MOST_OPERATIONS:
            rows = None
        operation = self.operations.get((same, rows))
        if operation is None:
            operation = self.operations[same, rows] = Calls(run, rows, backend, kernels)
        taken = trace()
        operation.note(taken, run.elsewhere(returned_at))
        if self.is_file:
            self.traces.append(replace(taken, events=tuple(e._replace(rank=self.rank) for e in taken.events)))

    def mark(self, steps: Steps, tokens: float = 0.0, flops: float = 0.0) -> None:
        """A step ends now. `steps` are those of this report to which it belongs."""
        calls = {key: operation.calls for key, operation in list(self.operations.items())}
        steps.mark(perf_counter(), calls, tokens, flops)

    def _steps(self) -> dict[str, Any] | None:
        """The figures of the steps on this rank as JSON values. None without steps."""
        steps = self.steps
        if not steps.count:  # without marks: those of the optimizer that has made most of them
            steps = max(self.updates.values(), key=lambda of: of.count, default=steps)
        if not steps.count:
            return None
        names = ("count", "total", "tokens", "flops")
        p50, p99 = (percentile(steps.seconds, share) for share in (0.5, 0.99))
        calls = [steps.calls(key) for key in self.operations]
        return {**{name: getattr(steps, name) for name in names}, "p50": p50, "p99": p99, "calls": calls}

    def measured(self, compiled: Compiled, extents: Extents, seconds: float) -> None:
        """The program has measured the kernels of this operation alone (`Executor.compute_seconds`)."""
        for operation in list(self.operations.values()):  # other threads note calls meanwhile
            if operation.compiled is compiled and operation.extents == extents:
                operation.compute_alone = seconds

    def settle(self, comm: Communicator) -> None:
        """Measure the baselines of all operations of this communicator that have none yet. Collective."""
        operations = [o for o in list(self.operations.values()) if o.comm is comm and o.messages_alone is None]
        operations.sort(key=lambda operation: operation.stamp)
        if not operations or finalized() or comm.channel.broken is not None or comm.channel.departed:
            return
        try:
            agree(comm, f"the report of {[(o.stamp, o.compiled.title, o.extents is None) for o in operations]}")
            if self.is_file and comm.link.world_ranks == [*range(self.size)]:
                read_clocks(comm)
                self.clocks = {rank: clocks.fit(batches) for rank, batches in comm.clock_readings.items()}
            for operation in operations:
                operation.measure()
        except Exception as error:  # a problem of the report must not end a program that has succeeded
            log.warning("rank %d has no baselines for the report of fompi: %s", self.rank, error)

    def settle_all(self) -> None:
        """At the end of the program: measure on all open communicators, in the same order on every rank."""
        if os.getpid() == self.process and failure() is None:
            still_open = {o.comm for o in list(self.operations.values()) if not o.comm.closed}
            for comm in sorted(still_open, key=lambda comm: (comm.link.world_ranks, comm.name)):
                self.settle(comm)

    def finish(self) -> None:
        """After a clean end: gather the notes of all ranks on rank 0, and print or write the report."""
        if os.getpid() != self.process or failure() is not None:
            return
        devices = [operation.backend.device for operation in self.operations.values()]
        mine = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "operations": [operation.record() for operation in self.operations.values()],
            "steps": self._steps(),
            "device_nbytes": max((d.most_nbytes for d in devices if d is not None), default=0),
            "host_waits": self.waited,
            "trace": merge(self.traces).to_json() if self.traces else None,
        }
        gathered = gather_at_exit(json.dumps(mine).encode(), self.rank, GATHER_SECONDS)
        if self.rank != 0:
            return
        ranks = [json.loads(note) for _, note in sorted(gathered.items())]
        traces = {rank["rank"]: rank.pop("trace") for rank in ranks}
        mpi, progress = library(), sorted({o.comm.engine.progress_mode for o in self.operations.values()})
        machine = next((o.comm.machine for o in self.operations.values()), None)
        whole = {
            "threads": launcher.thread_note(),
            "mpi": f"{mpi.name} {mpi.version}",
            "size": self.size,
            "progress": ", ".join(progress),
            "flops_rate": None if machine is None else machine.flops_rate,
            "ranks": ranks,
        }
        if self.is_file:
            whole["trace"] = self._on_one_clock(traces, [rank["host"] for rank in ranks]).to_json()
            try:
                Path(self.target).write_text(json.dumps(whole, indent=1))
            except OSError as error:  # the folder was writable at the start
                log.warning("fompi cannot write %s: %s\n%s", self.target, error, text(whole))
        else:
            shown = {"full": full_text, "short": short_text}.get(self.target, text)
            print(shown(whole), file=sys.stderr, flush=True)
        for message in overlap_warnings(whole):
            warn(message, OverlapWarning)

    def _on_one_clock(self, traces: Mapping[int, str | None], hosts: Sequence[str]) -> Trace:
        """The newest calls of all ranks. Ranks of one host have one clock; those of others must have been compared."""
        read = {rank: Trace.from_json(noted) for rank, noted in traces.items() if noted}
        whole = merge([trace.shifted(self.clocks.get(rank, clocks.SAME)) for rank, trace in read.items()])
        title = f"the newest calls of {self.size} ranks"
        if len(set(hosts)) > 1 and len(self.clocks) < self.size - 1:
            title += ", each host by its own clock"
        return replace(whole, title=title, hosts=tuple(hosts) if len(hosts) == self.size else ())


_OF_PROCESS: list[Report | Recorder] = []
"""The report or the record of this process, once there is one."""


def mark_step(tokens: float | None = None, flops: float | None = None) -> None:
    """A step of the program has ended on this rank: FOMPI_REPORT says what a step takes, FOMPI_RECORD keeps its calls.

        for batch in batches:
            train(batch)
            fompi.mark_step(tokens=8192)

    The first mark begins the first step that counts, so that a warm-up does not. `tokens`: what a step computes on all
    ranks together, as tokens, rows or samples. `flops`: its floating-point operations, of all ranks together; by
    default those of the products that fompi carries out. Without marks, a `DataParallel.step`, a
    call of a `TrainingStep`, or the `step` of an optimizer of PyTorch ends a step.
    It sends nothing, and does nothing without these. Raises ArgumentError for what is no number, or negative.
    """
    for name, number in (("tokens", tokens), ("flops", flops)):
        if number is not None and not (isinstance(number, Real) and 0 <= number < inf):
            raise ArgumentError(f"mark_step: {name}={number!r} must be a number of at least 0")
    for report in _OF_PROCESS:
        report.mark(report.steps, tokens or 0.0, flops or 0.0)


def mark_update(owner: int) -> None:
    """An optimizer has updated parameters. The one with the most updates ends the steps, if no `mark_step` does."""
    for report in _OF_PROCESS:
        report.mark(report.updates[owner])


def of_environment() -> Report | Notes | None:
    """The digests of FOMPI_DIGEST, the record of FOMPI_RECORD, the report that FOMPI_REPORT asks for, or None."""
    if folder := environment.value(VARIABLE):
        return Digests(folder)
    if folder := environment.value("FOMPI_RECORD"):
        _OF_PROCESS[:] = [recorder := Recorder(folder)]
        return recorder
    target = environment.value("FOMPI_REPORT")
    return None if target == "0" else Report(target)
