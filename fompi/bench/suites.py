"""The suites of `python -m fompi bench`, and what becomes of their rows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import fompi
from fompi.base.errors import FompiError, LaunchError
from fompi.bench import table
from fompi.bench.options import Options
from fompi.cli import picture
from fompi.engine.handshake import agree
from fompi.mpi import launcher, transport

SUITES = ("collectives", "fused", "papers", "peers", "planner", "adapt", "overhead")
"""Each is a module here, with `rows(comm, options) -> list[Row]`."""


ALONE = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}  # fmt: skip
"""In this environment `like` starts ranks, unless somebody asks for something else: the user chose their number."""


def run(suite: str, options: Options, json: str | None, markdown: str | None, plot: str | None) -> int:
    """Measure on all ranks; rank 0 prints the table, and writes the files that are named ("-": prints the JSON)."""
    _note_threads()
    with fompi.Communicator() as comm:
        agree(comm, f"bench {suite}", _refusal(comm.rank, json, markdown, plot))
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


def _refusal(rank: int, json: str | None, markdown: str | None, plot: str | None) -> Exception | None:
    """What is wrong with the files: said before it is measured."""
    try:
        if plot is not None:
            picture.check(plot)
            picture.needs_matplotlib(plot)
        for name in (json, markdown, plot) if rank == 0 else ():
            if name not in (None, "-"):
                check_writable(name)
    except (OSError, FompiError) as error:
        return error
    return None


def check_writable(path: str | Path) -> None:
    """Raise OSError if nothing can be written there; leave it as it is."""
    path = Path(path)
    new = not path.exists()
    path.open("a").close()
    if new:
        path.unlink()


def _note_threads() -> None:
    note = launcher.thread_note()
    if note is not None and not launcher.detect().rank:
        print(f"fompi: {note}", file=sys.stderr)


def like(shape: tuple[int, int, int], ranks: int, options: Options) -> int:
    """Say what overlap gains here for one shape. Outside of mpirun, this starts it."""
    library, launched = transport.library(), launcher.detect()
    if launched.launcher == "none":
        mpirun = library.mpirun or shutil.which("mpirun")
        if mpirun is None:
            raise LaunchError("there is no mpirun here: start this with the launcher of your cluster")
        command = [mpirun, "-n", str(ranks), sys.executable, *sys.orig_argv[1:]]
        return subprocess.run(command, env={**ALONE, **os.environ}).returncode
    _note_threads()
    with fompi.Communicator() as comm:
        fused = import_module("fompi.bench.fused")
        found = fused.like(comm, *shape, options)
        if comm.rank == 0:
            print(f"x[{shape[0]}, {shape[1]}] @ w[{shape[1]}, {shape[2]}], {found[0].setup}, float32")
            if rounded := [n for n in shape if n % comm.size]:
                print(
                    f"{', '.join(map(str, rounded))}: measured as the next multiple of {comm.size}, to be spread evenly"
                )
            print("\n".join(fused.in_words(row) for row in found), flush=True)
    return 0
