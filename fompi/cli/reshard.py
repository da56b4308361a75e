"""`fompi reshard`: write a checkpoint anew without MPI: other files, or those of the Hugging Face hub or of torch."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from functools import partial
from pathlib import Path
from secrets import token_hex

import numpy as np

from fompi.backends.half import storage
from fompi.cli.output import UsageError, show
from fompi.parallel.arrays import Array, tensor_of
from fompi.parallel.checkpoints import Held, file_of, finish, reads_of, write_file
from fompi.parallel.opened import open_checkpoint
from fompi.parallel.stored import Checkpoint, Part, Stored, header_bytes
from fompi.plans.boxes import whole
from fompi.plans.plan import format_nbytes

EXAMPLE = "{} reshard run model --hf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="FROM", help="what fompi.load reads, or a file of torch.save")
    parser.add_argument("target", metavar="TO", help="a directory for the new files")
    parser.add_argument("--files", type=int, default=1, metavar="N", help="how many files, as even as arrays allow (1)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--hf", action="store_true", help="model-*.safetensors and their index, for the hub")
    form.add_argument("--dcp", action="store_true", help="for torch.distributed.checkpoint.load; torch writes it")


def run(options: argparse.Namespace) -> int:
    if options.files < 1 or Path(options.target).resolve() == Path(options.source).resolve():
        raise UsageError("--files must be 1 or more, and TO another directory than FROM")
    found = open_checkpoint(options.source)
    found.check()
    if options.dcp:
        from fompi.torch.dcp import write  # only this needs torch

        write(found, partial(whole_array, found), options.target, options.files)
        show(_written(options.target, found, options.files))
        return 0
    made = Checkpoint(Path(options.target), {}, found.values, token_hex(8), found.step, options.files)
    made.directory.mkdir(parents=True, exist_ok=True)
    names_of, at = defaultdict[int, list[str]](list), 0
    for name, stored in found.arrays.items():
        names_of[min(at * options.files // max(1, found.nbytes), options.files - 1)].append(name)
        at += stored.nbytes
    for number, names in enumerate(names_of.values(), 1):
        file = f"model-{number:05}-of-{len(names_of):05}.safetensors" if options.hf else file_of(made, number)
        forms = {name: found.arrays[name][:2] for name in names}
        head, begins = header_bytes(forms, "" if options.hf else made.id)
        made.sums[file] = write_file(made.directory / file, head, (whole_array(found, name) for name in names))
        for (name, (dtype, shape)), begin in zip(forms.items(), begins, strict=False):
            made.arrays[name] = Stored(dtype, shape, [Part(file, begin, whole(shape))])
    if options.hf:
        files = {name: stored.parts[0].file for name, stored in made.arrays.items()}
        index = {"metadata": {"total_size": made.nbytes}, "weight_map": files}
        (made.directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    elif (error := finish(made)) is not None:
        raise error
    show(_written(options.target, made, len(names_of)))
    return 0


def _written(target: str, made: Checkpoint, files: int) -> str:
    return f"{target}: {len(made.arrays)} arrays of {format_nbytes(made.nbytes)} in {files} files"


def whole_array(found: Checkpoint, name: str) -> Array:
    """An array of a checkpoint, from all its parts. Half types as their bits."""
    stored = found.arrays[name]
    array = np.empty(stored.shape, storage(stored.dtype))
    held = Held(tensor_of(array, stored.dtype), arrays=[array])
    for here, there in reads_of(found, {name: held}):
        here[...] = there
    return array
