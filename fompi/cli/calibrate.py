"""`fompi calibrate`: measure the machine on the ranks of an MPI job and write it as JSON."""

from __future__ import annotations

import argparse
from time import perf_counter

import fompi
from fompi.base.errors import LaunchError
from fompi.cli.output import OUTPUT, Progress, check_writable, terminal_columns
from fompi.engine.handshake import agree

EXAMPLE = "mpirun -n 4 {} calibrate machine.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", default="machine.json", help="(machine.json)")
    parser.add_argument("--json", action="store_true", help="print the JSON too, and nothing else")


def run(options: argparse.Namespace) -> int:
    from fompi.tuning.calibrate import calibrate

    with fompi.Communicator() as comm:
        begun, refusal = perf_counter(), None
        try:
            if comm.size == 1:
                raise LaunchError("one rank has no links to measure: mpirun -n 4 python -m fompi calibrate")
            if comm.rank == 0:
                check_writable(options.file)  # before a minute is spent
        except (OSError, LaunchError) as error:
            refusal = error
        agree(comm, f"calibrate {options.file}", refusal)
        with Progress.of_rank(comm.rank, "calibrate") as progress:
            is_report = comm.rank == 0 and not options.json
            is_visible = is_report and terminal_columns(OUTPUT) is not None

            def say(step: str) -> None:
                if is_report:
                    print(step, flush=True)
                if not is_visible:
                    progress.step(step)

            machine = calibrate(comm, say)
        if comm.rank == 0:
            machine.save(options.file)
            seconds = perf_counter() - begun
            print(machine.to_json() if options.json else f"{machine}\nwritten to {options.file} in {seconds:.0f} s")
    return 0
