"""`fompi islands replay LOG... FILE.py:FUNCTION`: a run of islands again, from the log of its epochs."""

from __future__ import annotations

import argparse
import runpy

from fompi.base.errors import ArgumentError
from fompi.islands import replay

EXAMPLE = "{} islands replay a.log train.py:island"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["replay"], help="replay: the same bits again, or the first difference")
    parser.add_argument("logs", nargs="+", metavar="LOG", help="what fompi.islands.join(log=...) has written")
    parser.add_argument("program", metavar="FILE.py:FUNCTION", help="it makes one island, from its name")


def run(options: argparse.Namespace) -> int:
    path, _, name = options.program.rpartition(":")
    try:
        make = runpy.run_path(path, run_name="replayed")[name]
    except (OSError, KeyError):
        raise ArgumentError(f"{options.program!r}: there is no such function, give FILE.py:FUNCTION") from None
    done = replay(options.logs, make)
    what = f"{done.exchanges} exchanges in {done.epochs} epochs of {', '.join(done.islands)}"
    print(f"{what}: the same bits, sha256 {done.sha256}")
    return 0
