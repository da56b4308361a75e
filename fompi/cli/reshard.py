"""`fompi reshard`: write a checkpoint anew without MPI: in other files, or as the Hugging Face hub has it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np

from fompi.backends.half import storage
from fompi.base.stored import Checkpoint, Part, Stored, header_bytes, open_checkpoint
from fompi.cli.output import UsageError, show
from fompi.parallel.checkpoints import file_of, finish, write_file
from fompi.plans.plan import format_nbytes

EXAMPLE = "{} reshard run model --hf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="FROM", help="a directory of fompi.save, or of the Hugging Face hub")
    parser.add_argument("target", metavar="TO", help="a directory for the new files")
    parser.add_argument("--files", type=int, default=1, metavar="N", help="how many files, as even as arrays allow (1)")
    parser.add_argument("--hf", action="store_true", help="model-*.safetensors and their index, for the hub")


def run(options: argparse.Namespace) -> int:
    if options.files < 1 or Path(options.target).resolve() == Path(options.source).resolve():
        raise UsageError("--files must be 1 or more, and TO another directory than FROM")
    found = open_checkpoint(options.source)
    found.check()
    made = Checkpoint(Path(options.target), {}, found.values, token_hex(8), found.step, options.files)
    made.directory.mkdir(parents=True, exist_ok=True)
    written, weights = 0, dict[str, str]()
    for number in range(options.files):
        last = number == options.files - 1
        names = []
        for name in [*found.arrays][len(weights) :]:
            if last or written < found.nbytes * (number + 1) / options.files:
                names.append(name)
                weights[name] = f"model-{number + 1:05}-of-{options.files:05}.safetensors"
                written += prod(found.arrays[name].shape) * storage(found.arrays[name].dtype).itemsize
        file = weights.get(names[0], "") if options.hf and names else file_of(made, number)
        forms = {name: (found.arrays[name].dtype, found.arrays[name].shape) for name in names}
        head, begins = header_bytes(forms, "" if options.hf else made.id)
        made.sums[file] = write_file(made.directory / file, head, whole_arrays(found, names))
        for (name, (dtype, shape)), begin in zip(forms.items(), begins, strict=False):
            made.arrays[name] = Stored(dtype, shape, [Part(file, begin, (0,) * len(shape), shape)])
    if options.hf:
        index = {"metadata": {"total_size": found.nbytes}, "weight_map": weights}
        (made.directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    elif (error := finish(made)) is not None:
        raise error
    show(f"{options.target}: {len(made.arrays)} arrays of {format_nbytes(made.nbytes)} in {options.files} files")
    return 0


def whole_arrays(found: Checkpoint, names: list[str]) -> Iterator[np.ndarray[Any, Any]]:
    """Each of these arrays, whole. One is in memory at a time."""
    for name in names:
        dtype, shape, parts = found.arrays[name]
        whole = np.empty(shape, storage(dtype))
        for file, begin, offset, lengths in parts:
            memory = found.mapped(file, [(begin, begin + prod(lengths) * whole.itemsize)])
            index = tuple(slice(a, a + n) for a, n in zip(offset, lengths, strict=True))
            whole[index] = np.frombuffer(memory, whole.dtype, prod(lengths), begin).reshape(lengths)
        yield whole
