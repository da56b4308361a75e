"""`fompi bench SUITE`: run a suite of benchmarks on the ranks of an MPI job."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import fompi
from bench import table
from fompi.base.errors import FompiError
from fompi.bench import trial
from fompi.bench.measure import Bench, BenchHosts, HostPlace
from fompi.cli.output import Progress, UsageError, show_markdown, unwritable
from fompi.cli.plan import product_of, run_file
from fompi.engine.handshake import agree
from fompi.tuning.rounds import Row

EXAMPLE = "{} bench overhead --quick"

SUITES = ("fused", "overhead")
"""Each is a module of this folder. A suite has `rows(bench) -> list[Row]`, and `rows_on_device(bench)` if it can."""

SUITE_FILES = Path(__file__).resolve().parents[1] / "suites"
"""The suites behind the results, by the names of their files."""

DEVICES = ("cuda", "software")
"""What `--device` may be."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "suite",
        nargs="?",
        type=suite_name,
        metavar="SUITE",
        help=f"{', '.join(SUITES)}, one of tools/suites, or a file",
    )
    parser.add_argument("--like", metavar="M,K,N", help="with --device: the shape of fused operations")
    parser.add_argument(
        "--device", choices=DEVICES, help="on buffers of a device: fused (or no suite), or the suite of a file"
    )
    parser.add_argument("--ranks", type=int, default=2, help="outside of mpirun: how many to start (2)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds in which every contestant runs (15)")
    parser.add_argument("--row", metavar="WORDS", default="", help="only the rows with these words in their name")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller rows")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="all samples as JSON (no FILE: print it)")


def run(options: argparse.Namespace) -> int:
    """Measure on all ranks. Rank 0 prints the table and writes the files that are named."""
    if options.rounds < 1 or options.ranks < 1:
        raise UsageError("bench: --rounds and --ranks are 1 or more")
    suite = options.suite or "fused"
    like = None if options.like is None else product_of([options.like])
    if like is not None and (options.device is None or suite != "fused"):
        raise UsageError("bench: --like is the shape of fused operations on a --device; `try M,K,N` is for the host")
    if options.suite is None and options.device is None:
        raise UsageError(f"bench: name a suite ({', '.join(SUITES)}, a file SUITE.py), or a --device")
    if options.ranks > 1 and (status := trial.on_own_ranks(options.ranks)) is not None:
        return status
    trial.note_threads()
    rows_of = rows_of_suite(suite, options.device is not None)
    json = options.json
    with fompi.Communicator() as comm:
        agree(comm, f"bench {suite}", unwritable(comm.rank, json))
        place = place_of(comm, options.device)
        with (
            Progress.of_rank(comm.rank, f"bench {suite}") as progress,
            BenchHosts(comm.link.comm) as cluster,
        ):
            bench = Bench(comm, cluster, options.rounds, options.quick, options.row, progress, like, place)
            rows = rows_of(bench)
        place.check()
        if not rows:
            raise FompiError(f"bench {suite}: no row has {options.row!r} in its name")
        facts = table.about(" ".join(["python -m fompi", *sys.argv[1:]]))
        if comm.rank == 0:
            if json == "-":
                print(table.to_json(rows, facts), flush=True)
            else:
                show_markdown(table.markdown(rows, facts))
            if json not in (None, "-"):
                Path(json).write_text(table.to_json(rows, facts) + "\n")
    return 0


def suite_name(text: str) -> str:
    """The name of a suite, or that of a Python file."""
    if text in SUITES or text.endswith(".py"):
        return text
    if (file := SUITE_FILES / f"{text}.py").exists():
        return str(file)
    raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {', '.join(SUITES)}, a file SUITE.py)")


def rows_of_suite(name: str, on_device: bool) -> Callable[[Bench], list[Row]]:
    """What measures the rows of a suite. Raises FompiError if its file cannot be run, or has no such rows."""
    wanted = "rows_on_device" if on_device else "rows"
    names = vars(import_module(f"bench.{name}")) if name in SUITES else run_file(name, "bench")
    rows = names.get(wanted)
    if rows is None:
        raise FompiError(f"bench {name}: the suite has no {wanted}(bench)")
    made: Callable[[Bench], list[Row]] = rows
    return made


def place_of(comm: fompi.Communicator, device: str | None) -> HostPlace:
    """Where the tensors of a benchmark are."""
    if device is None:
        return HostPlace()
    from bench.device import DevicePlace

    return DevicePlace(device, comm)
