"""`fompi checkpoint`: what is in a directory that `fompi.load` reads, and whether every byte is as it was."""

from __future__ import annotations

import argparse

from fompi.base.errors import LayoutError
from fompi.base.tables import Table
from fompi.cli.output import show
from fompi.parallel.opened import open_checkpoint
from fompi.plans.plan import format_nbytes

EXAMPLE = "{} checkpoint run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", metavar="DIRECTORY", help="what fompi.load reads: a directory, or a file of torch.save"
    )
    parser.add_argument("--arrays", action="store_true", help="each array, its shape and in how many parts it is")


def run(options: argparse.Namespace) -> int:
    """Exit status 1 if the checkpoint is not whole."""
    found, status = open_checkpoint(options.directory), 0
    step = "" if found.step is None else f"step {found.step}, "
    ranks = f" of {found.ranks} ranks" if found.ranks else ""
    files = {part.file for stored in found.arrays.values() for part in stored.parts}
    show(
        f"{options.directory}: {step}{len(found.arrays)} arrays of {format_nbytes(found.nbytes)} in {len(files)} files"
        f"{ranks}, {len(found.values)} values"
    )
    try:
        found.check()
        show(
            "every byte is as it was written"
            if found.has_sums
            else "every file is whole; there are no sums of its bytes"
        )
    except LayoutError as error:
        show(f"not whole: {error}")
        status = 1
    if options.arrays:
        rows = [[name, each.dtype, "x".join(map(str, each.shape)), format_nbytes(each.nbytes), len(each.parts)]
                for name, each in found.arrays.items()]  # fmt: skip
        show(Table(["array", "dtype", "shape", "bytes", "parts"], rows))
    return status
