"""`fompi calibrate`: measure the machine on the ranks of an MPI job and write it as JSON."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import fompi
from fompi.base.errors import FompiError, LaunchError, LayoutError
from fompi.cli.output import Progress, UsageError, check_writable
from fompi.engine.handshake import agree

EXAMPLE = "mpirun -n 4 {} calibrate machine.json"

LIMIT = 300.0
"""Seconds. On a few idle ranks it takes less than a minute."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure the machine, for mpirun: writes JSON. The last line is a verdict. The exit status is 1,\n"
        "and no file is written, if others disturbed the measurement so much that it cannot be used."
    )
    parser.add_argument("file", nargs="?", default="machine.json", help="(machine.json)")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, metavar="SECONDS", help=f"end after this time ({LIMIT:g})"
    )
    parser.add_argument(
        "--force", action="store_true", help="write the file in any case, also over that of another machine"
    )
    parser.add_argument("--device", choices=("cuda", "software"), help="kernels and messages of tensors on this device")
    parser.add_argument("--json", action="store_true", help="print the JSON too, and nothing else")


def run(options: argparse.Namespace) -> int:
    from fompi.runtime.default_device import device_for
    from fompi.tuning.calibrate import calibrate_and_judge

    if not options.limit > 0:
        raise UsageError(f"--limit {options.limit:g}: give a number of seconds above 0")
    with fompi.Communicator() as comm:
        begun = perf_counter()
        agree(comm, f"calibrate {options.file}", _refusal(comm, options.file, options.force))
        device = None if options.device is None else device_for(options.device, comm, "calibrate")
        with Progress.of_rank(comm.rank, "calibrate") as progress:
            machine, verdict = calibrate_and_judge(comm, progress.step, options.limit, device)
        is_written = options.force or verdict.is_usable
        if comm.rank == 0:
            if is_written:
                machine.save(options.file)
            print(machine.to_json() if options.json else machine, flush=True)
            what = f"written to {options.file}" if is_written else f"{options.file} is not written (--force writes it)"
            lines = f"verdict: {verdict}\n{what} in {perf_counter() - begun:.0f} s"
            print(lines if is_written else lines.rpartition(" in ")[0], file=sys.stderr if options.json else sys.stdout)
    return 0 if verdict.is_usable else 1


def _refusal(comm: Any, file: str, force: bool) -> Exception | None:
    """Why nothing is measured: known before a minute is spent. Collective."""
    from fompi.tuning.calibrate import place

    here = place(comm.link.comm)
    try:
        if comm.size == 1:
            raise LaunchError("one rank has no links to measure: mpirun -n 4 python -m fompi calibrate")
        if comm.rank == 0:
            check_writable(file)
            if not force and (other := described_instead(Path(file), *here)) is not None:
                raise LaunchError(f"{file} {other}, not {here[1]} of {here[0]}: name another file, or add --force")
    except (OSError, FompiError) as error:
        return error
    return None


def described_instead(file: Path, name: str, where: str) -> str | None:
    """What an existing file describes, if it is not the machine `name` with the ranks and hosts of `where`."""
    if not file.exists() or not file.stat().st_size:
        return None
    try:
        machine = fompi.Machine.load(file)
    except LayoutError:
        return "holds no machine"
    if machine.name == name and f": {where}," in machine.source:
        return None
    return f"describes {machine.name!r}" + (f" ({machine.source})" if machine.source else "")
