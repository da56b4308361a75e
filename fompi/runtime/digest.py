"""FOMPI_DIGEST=FOLDER: each rank writes a digest of the result of every call (`fompi digest` compares them).

    h(elements) = sum over i of mix(bits of element i) * P ** (n - 1 - i)  mod 2**64

Of two runs of elements, one behind the other, h(a + b) = h(a) * P ** len(b) + h(b). So the digest of a whole result
follows from those of its parts, however many ranks have them. What a rank has of a result is

    all   the whole result                rows     a run of its rows
    rank  something of its own            columns  a run of its columns: then h is that of the columns, one by one

`Digests` has the methods of `fompi.runtime.report.Report`, in whose place it is. Calls run in Python then.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fompi.mpi.transport import world
from fompi.plans.meaning import MEANING
from fompi.runtime.program import Run
from fompi.runtime.steps import Steps

Array = np.ndarray[Any, Any]

VARIABLE = "FOMPI_DIGEST"

MULTIPLIER = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
CHUNK = 1 << 16


def digest_of(array: Array) -> int:
    """h of the elements of an array, in C order."""
    flat, total = np.ascontiguousarray(array).reshape(-1), 0
    bits = flat.view(f"u{min(flat.itemsize, 8)}").astype(np.uint64)
    with np.errstate(over="ignore"):
        if flat.itemsize == 16:  # complex128
            bits = _mixed(bits[::2]) + bits[1::2]
        powers = np.full(min(CHUNK, len(bits)), MULTIPLIER, np.uint64)
        powers[:1] = 1
        powers = np.multiply.accumulate(powers)[::-1]
        for at in range(0, len(bits), CHUNK):
            part = _mixed(bits[at : at + CHUNK])
            mine = int((part * powers[len(powers) - len(part) :]).sum(dtype=np.uint64))
            total = joined(total, mine, len(part))
    return total


def joined(first: int, second: int, elements: int) -> int:
    """h of two runs of elements, where the second one has this many."""
    return (first * pow(MULTIPLIER, elements, 1 << 64) + second) & MASK


def _mixed(bits: Array) -> Array:
    """The finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    z = bits + np.uint64(MULTIPLIER)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def shape_of(problem: Any, name: str) -> str:
    """What a rank has of a result: "all", "rows", "columns", or "rank"."""
    meaning = MEANING.get(problem.operation)
    if meaning is None or problem.columns or problem.experts:
        return "rank"
    if problem.moves in ("all_reduce", "broadcast"):
        return "all"
    if problem.moves == "reduce_scatter":
        return "rows"
    if problem.moves != "all_gather":
        return "rows" if problem.operation in ("reduce", "gather") else "rank"
    if name.startswith("g"):
        return "rows" if problem.gradients[0].flipped else "columns"
    return "columns" if name.startswith("y") and problem.weights else "all"


class Notes:
    """What stands in the place of the report of a process, and measures nothing. `folder` gets a file of each rank."""

    def __init__(self, folder: str):
        self.folder, self.process, (self.rank, self.size) = folder, os.getpid(), world()
        self.steps, self.updates = Steps(), defaultdict[int, Steps](Steps)

    def measured(self, *_: object) -> None:
        """Times of kernels do not matter here, there are no baselines, and a step is nothing of its own."""

    mark = settle = settle_all = measured


class Digests(Notes):
    """The digests of this process, one line for each result in FOLDER/rank-R.jsonl."""

    def __init__(self, folder: str):
        super().__init__(folder)
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.file = (Path(folder) / f"rank-{self.rank}.jsonl").open("w")

    def note(self, run: Run, *_: object, outputs: Mapping[str, Any]) -> None:
        """A call has finished on this rank, with these results."""
        if run.error is not None or os.getpid() != self.process:
            return
        problem, members = run.compiled.plan.problem, run.comm.link.world_ranks
        for name, array in outputs.items():
            held, array = shape_of(problem, name), array if isinstance(array, np.ndarray) else array.get()
            if held == "columns":
                array = np.moveaxis(array, -1, 0)
            line = {
                "comm": run.comm.name,
                "members": members,
                "call": run.stamp,
                "words": run.comm.call_name(run.stamp),
                "result": name,
                "held": held,
                "operation": problem.operation,
                "dtype": problem.dtype,
                "order": problem.order,
                "elements": int(array.size),
                "digest": f"{digest_of(array):016x}",
            }
            self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def finish(self) -> None:
        """The program ends."""
        if os.getpid() == self.process:
            self.file.close()
