"""Advice that was followed: the step that it predicted over the step that came, in the lab.

    python tools/suites/replay.py [--hosts 2] [--rate 200mbit] [--steps 20] [--case link ...] [--plain]

Each case records a small program on hosts with shaped links, asks for advice, follows it, and records again. The
replay of each first record is compared with its measured step, too. `--plain` takes ranks on this host.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from fompi.base.tables import Table
from fompi.model.replay import Graph
from fompi.planner.advice import advise
from fompi.traces.record import load

PROGRAM = """
import sys, time
import numpy as np
import fompi

how, steps = set(sys.argv[2:]), int(sys.argv[1])
comm = fompi.Communicator()
x, w = np.ones((512, 512), np.float32), np.ones((512, 512), np.float32)
small, wire = np.ones(4, np.float32), "int8" if "int8" in how else None
for step in range(steps + 2):
    times = 6 if "late" in how and comm.rank == 1 else 2
    for layer in range(2):
        for _ in range(times - 1):
            h = x @ w
        if "fused" in how:
            y = fompi.matmul_reduce_scatter(x, w, comm=comm, wire=wire)
        else:
            h = x @ w
            begin = fompi.reduce_scatter.start if "started" in how else fompi.reduce_scatter
            y = begin(h, comm=comm, wire=wire)
        for _ in range(2):
            h = x @ w
        y = y.wait() if "started" in how else y
    fompi.all_reduce(small, comm=comm)
    fompi.mark_step()
"""


class Case(NamedTuple):
    """A program, what would help it, and the program that follows the advice. `faster`: on links twice as fast."""

    name: str
    before: tuple[str, ...]
    advice: str
    after: tuple[str, ...]
    faster: bool = False


CASES = (
    Case("link", (), "links twice as fast", (), faster=True),
    Case("wire", (), "messages of int8", ("int8",)),
    Case("started", (), "sums started", ("started",)),
    Case("fused", (), "product and sum in one call", ("fused",)),
    Case("late", ("late",), "rank 1 at the median speed", ()),
)


def run(options: argparse.Namespace, words: Sequence[str], rate: str, folder: Path) -> Graph:
    """The record of one run."""
    program = folder.with_suffix(".py")
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(options.steps), *words]
    before = ["mpirun", "-n", str(options.hosts)]
    if not options.plain:
        lab = [sys.executable, "-m", "fompi.lab", "run", "--hosts", str(options.hosts), "--rate", rate]
        before = [*lab, "--", "env", f"FOMPI_RECORD={folder}"]
    subprocess.run([*before, *command], env={**os.environ, "FOMPI_RECORD": str(folder)}, check=True, timeout=300)
    return Graph.of(load(folder))


def twice(rate: str) -> str:
    """The rate of links that are twice as fast: "200mbit" becomes "400mbit"."""
    digits = rate.rstrip("abcdefghijklmnopqrstuvwxyz")
    return f"{2 * float(digits):g}{rate[len(digits) :]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--plain", action="store_true")
    options, rows = parser.parse_args(), []
    with TemporaryDirectory() as folder:
        for case in (case for case in CASES if case.name in (options.case or [case.name])):
            before = run(options, case.before, options.rate, Path(folder, f"{case.name}-before"))
            rate = twice(options.rate) if case.faster else options.rate
            after = run(options, case.after, rate, Path(folder, f"{case.name}-after")).measured.step
            found = advise(before, [str(rank) for rank in range(options.hosts)])
            place, told = next(((i, a) for i, a in enumerate(found, 1) if a.what == case.advice), (0, None))
            predicted = before.run().step if told is None else told.seconds
            cells = (before.measured.step, before.run().step, predicted, after)
            ratio = f"{predicted / after:.2f}" if told is not None else "not advised"
            rows.append((case.name, *(f"{1e3 * seconds:.2f}" for seconds in cells), ratio, place))
    heads = ("case", "step ms", "replayed", "advice", "followed", "advice / followed", "place")
    print(Table(heads, rows, heads[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
