"""The suites of `python -m fompi bench`, and what becomes of their rows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import fompi
from fompi import launch, transport
from fompi.bench import table
from fompi.errors import LaunchError, StateError

SUITES = ("collectives", "fused", "papers", "peers", "planner", "adapt", "overhead")
"""Each is a module here, with `rows(comm, options) -> list[Row]`."""


@dataclass(frozen=True)
class Options:
    """How much is measured: rounds of every row, and with `quick` fewer and smaller rows."""

    rounds: int
    quick: bool


def run(suite: str, options: Options, json: str | None, markdown: str | None, plot: str | None) -> int:
    """Measure on all ranks; rank 0 prints the table, and writes the files that are named ("-": prints the JSON)."""
    _note_threads()
    if plot is not None and find_spec("matplotlib") is None:  # said before it is measured
        raise StateError('--plot needs matplotlib: pip install "fompi[plot]"')
    with fompi.Communicator() as comm:
        rows = import_module(f"fompi.bench.{suite}").rows(comm, options)
        facts = table.about(" ".join(["python -m fompi", *sys.argv[1:]]))
        if comm.rank == 0:
            text = table.markdown(rows, facts)
            print(table.to_json(rows, facts) if json == "-" else text, flush=True)
            if json is not None and json != "-":
                Path(json).write_text(table.to_json(rows, facts) + "\n")
            if markdown is not None:
                Path(markdown).write_text(text)
            if plot is not None:
                table.plot(rows, plot)
    return 0


def _note_threads() -> None:
    note = launch.thread_note()
    if note is not None and not launch.detect().rank:
        print(f"fompi: {note}", file=sys.stderr)


def like(shape: tuple[int, int, int], ranks: int, options: Options) -> int:
    """Say what overlap gains here for one shape. Outside of mpirun, this starts it."""
    library, launched = transport.library(), launch.detect()
    if launched.launcher == "none":
        mpirun = library.mpirun or shutil.which("mpirun")
        if mpirun is None:
            raise LaunchError("there is no mpirun here: start this with the launcher of your cluster")
        alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # unless somebody asks for more
        command = [mpirun, "-n", str(ranks), sys.executable, *sys.orig_argv[1:]]
        return subprocess.run(command, env={**alone, **os.environ}).returncode
    _note_threads()
    with fompi.Communicator() as comm:
        fused = import_module("fompi.bench.fused")
        found = fused.like(comm, *shape, options)
        if comm.rank == 0:
            print(f"x[{shape[0]}, {shape[1]}] @ w[{shape[1]}, {shape[2]}], {found[0].setup}, float32")
            print("\n".join(fused.in_words(row) for row in found), flush=True)
    return 0
