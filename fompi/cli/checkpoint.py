"""`fompi checkpoint`: what is in a directory that `fompi.save` has written, and whether every byte is as it was."""

from __future__ import annotations

import argparse
from math import prod

from fompi.base.errors import LayoutError
from fompi.base.layout import itemsize
from fompi.base.stored import open_checkpoint
from fompi.base.tables import Table
from fompi.cli.output import show, show_json
from fompi.plans.plan import format_nbytes

EXAMPLE = "{} checkpoint run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIRECTORY", help="of fompi.save, or of the Hugging Face hub")
    parser.add_argument("--arrays", action="store_true", help="each array, its shape and in how many parts it is")
    parser.add_argument("--json", action="store_true", help="the same as JSON")


def run(options: argparse.Namespace) -> int:
    """Exit status 1 if the checkpoint is not whole."""
    found, flaw = open_checkpoint(options.directory), ""
    try:
        found.check()
    except LayoutError as error:
        flaw = str(error)
    files = {part.file for stored in found.arrays.values() for part in stored.parts}
    if options.json:
        arrays = {name: [each.dtype, each.shape, len(each.parts)] for name, each in found.arrays.items()}
        known = {"step": found.step, "ranks": found.ranks, "nbytes": found.nbytes, "values": found.values}
        show_json({**known, "arrays": arrays, "files": len(files), "whole": not flaw, "flaw": flaw})
        return int(bool(flaw))
    step = "" if found.step is None else f"step {found.step}, "
    sums = "every byte is as it was written" if found.sums else "every file is whole; there are no sums of its bytes"
    show(
        f"{options.directory}: {step}{len(found.arrays)} arrays of {format_nbytes(found.nbytes)} in {len(files)} files"
        f"{f' of {found.ranks} ranks' * bool(found.ranks)}, {len(found.values)} values",
        f"not whole: {flaw}" if flaw else sums,
    )
    if options.arrays:
        rows = [[name, e.dtype, "x".join(map(str, e.shape)), format_nbytes(prod(e.shape) * itemsize(e.dtype)),
                 len(e.parts)] for name, e in found.arrays.items()]  # fmt: skip
        show(Table(["array", "dtype", "shape", "bytes", "parts"], rows))
    return int(bool(flaw))
