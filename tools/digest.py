"""`fompi digest`: run a program on several numbers of ranks, and say at which call the bits of results first differ."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import reduce
from os import environ
from pathlib import Path
from typing import NamedTuple

from fompi.base.errors import FompiError
from fompi.cli.output import UsageError, show_json
from fompi.runtime.digest import VARIABLE, joined

EXAMPLE = "{} digest --ranks 1,2,4 train.py --steps 20"

MOST_SHOWN = 5


class Result(NamedTuple):
    """A result of a call, as all ranks have it together. `digest` is None if it cannot be compared."""

    comm: str
    call: int
    words_of_call: str
    operation: str
    dtype: str
    order: str
    name: str
    elements: int
    digest: str | None

    @property
    def words(self) -> str:
        order = f", order {self.order}" if self.order else ""
        name = "" if self.name == "y" else f", its {self.name}"
        return f"{self.words_of_call}, {self.operation} of {self.elements} {self.dtype}{order}{name}"

    @property
    def form(self) -> tuple[str, str, str, int]:
        return self.operation, self.dtype, self.name, self.elements


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", default="1,2,4", help="the numbers of ranks, for example 1,2,4; 4,4 compares two runs"
    )
    parser.add_argument("--launcher", default="mpirun -n {ranks}", help="what starts the ranks ('mpirun -n {ranks}')")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the digests there, a folder for each run")
    parser.add_argument("--json", action="store_true", help="what was found, as JSON")
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="PROGRAM ...", help="a Python file and its arguments"
    )


def run(options: argparse.Namespace) -> int:
    """Exit status 1 if bits differ."""
    try:
        sizes = [int(text) for text in options.ranks.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) < 2 or min(sizes) < 1:
        raise UsageError(f"--ranks {options.ranks}: give two numbers of ranks or more, for example 1,2,4")
    if not options.program:
        raise UsageError("which program? fompi digest --ranks 1,2,4 train.py")
    with tempfile.TemporaryDirectory() as scratch:
        runs = []
        for i, size in enumerate(sizes):
            folder = Path(options.keep or scratch) / f"{i}-of-{size}"
            _start(shlex.split(options.launcher.format(ranks=size)), options.program, folder, size)
            runs.append(read(folder))
    found = [compare(runs[0], other) for other in runs[1:]]
    if options.json:
        show_json([_values(sizes[0], *each) for each in zip(sizes[1:], found, strict=True)])
    else:
        print("\n".join(text(sizes[0], size, each) for size, each in zip(sizes[1:], found, strict=True)))
    return int(any(each.differing or each.other_calls for each in found))


def _values(first: int, second: int, found: Comparison) -> dict[str, object]:
    differing = [{**a._asdict(), "other": b.digest} for a, b in found.differing]
    other = None if found.other_calls is None else [r and r._asdict() for r in found.other_calls]
    return {"ranks": [first, second], **found._asdict(), "differing": differing, "other_calls": other}


def _start(launcher: Sequence[str], program: Sequence[str], folder: Path, size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank-*.jsonl"):
        old.unlink()
    command = [*launcher, sys.executable, *program]
    try:
        ended = subprocess.run(command, env={**environ, VARIABLE: str(folder)}, stdout=sys.stderr, check=False)
    except FileNotFoundError as error:
        raise UsageError(f"--launcher: {error}") from None
    if ended.returncode:
        raise FompiError(f"{shlex.join(command)} has ended with {ended.returncode}: nothing was compared")
    if len([*folder.glob("rank-*.jsonl")]) != size:
        raise FompiError(f"{shlex.join(command)} was no job of {size} ranks with fompi: nothing was compared")


def read(folder: Path) -> list[Result]:
    """The results of the communicators that rank 0 is in, in the order in which they ended there."""
    lines: dict[tuple[str, tuple[int, ...], int, str], dict[int, dict[str, object]]] = {}
    for file in sorted(folder.glob("rank-*.jsonl"), key=lambda f: int(f.stem.partition("-")[2])):
        rank = int(file.stem.partition("-")[2])
        for text in file.read_text().splitlines():
            line = json.loads(text)
            if 0 in line["members"]:
                key = line["comm"], (*line["members"],), line["call"], line["result"]
                lines.setdefault(key, {})[rank] = line
    return [_whole(key, ranks) for key, ranks in lines.items() if len(ranks) == len(key[1])]


def _whole(key: tuple[str, tuple[int, ...], int, str], ranks: Mapping[int, Mapping[str, object]]) -> Result:
    """The result from what the ranks have of it."""
    comm, members, call, name = key
    parts = [ranks[rank] for rank in members]
    numbers = [(int(str(part["digest"]), 16), int(str(part["elements"]))) for part in parts]
    held, digest, elements = parts[0]["held"], None, sum(n for _, n in numbers)
    if held == "all":
        same = {h for h, _ in numbers}
        elements, digest = numbers[0][1], f"{numbers[0][0]:016x}" if len(same) == 1 else "ranks differ"
    elif held != "rank":
        digest = f"{reduce(lambda h, part: joined(h, *part), numbers, 0):016x}"
    elif len(members) == 1:
        digest = f"{numbers[0][0]:016x}"
    words, operation, dtype, order = (str(parts[0][word]) for word in ("words", "operation", "dtype", "order"))
    return Result(comm, call, words, operation, dtype, order, name, elements, digest)


class Comparison(NamedTuple):
    """Two runs. `differing`: (one result, the other) with other bits, in the order of the calls."""

    compared: int
    not_comparable: int  # results of which each rank has something of its own
    differing: list[tuple[Result, Result]]
    other_calls: tuple[Result | None, Result | None] | None  # where one run has made another call than the other


def _by_comm(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each communicator, in the order of its calls."""
    comms: dict[str, list[Result]] = {result.comm: [] for result in results}
    for result in sorted(results, key=lambda r: (r.call, r.name)):
        comms[result.comm].append(result)
    return comms


def compare(one: Sequence[Result], other: Sequence[Result]) -> Comparison:
    """Compare the results call by call, on each communicator. Calls are compared until they are others."""
    compared, skipped, differing = 0, 0, list[tuple[Result, Result]]()
    split: tuple[Result | None, Result | None] | None = None
    here, there = _by_comm(one), _by_comm(other)
    for comm, queue in here.items():
        for a, b in zip(queue, there.get(comm, []), strict=False):
            if a.form != b.form:
                split = split or (a, b)
                break
            if a.digest is None or b.digest is None:
                skipped += 1
                continue
            compared += 1
            if a.digest != b.digest:
                differing.append((a, b))
        else:
            more, less = sorted((queue, there.get(comm, [])), key=len, reverse=True)
            if len(more) > len(less) and split is None:
                rest = more[len(less)]
                split = (rest, None) if more is queue else (None, rest)
    place = {(r.comm, r.call, r.name): i for i, r in enumerate(one)}
    differing.sort(key=lambda pair: place[pair[0].comm, pair[0].call, pair[0].name])
    return Comparison(compared, skipped, differing, split)


def text(first: int, second: int, found: Comparison) -> str:
    """What was found, for people."""
    head = f"{first} and {second} ranks: {found.compared} results of calls"
    skipped = f"; of {found.not_comparable} each rank has its own, they are not compared" * bool(found.not_comparable)
    lines = [f"{head} have the same bits{skipped}"]
    if found.differing:
        lines = [f"{head}, {len(found.differing)} have other bits{skipped}; first"]
        for a, b in found.differing[:MOST_SHOWN]:
            lines.append(f"  {a.words}: {a.digest} and {b.digest}")
    if found.other_calls is not None:
        here, there = ("none" if result is None else result.words for result in found.other_calls)
        lines.append(f"  the calls differ, and are compared up to here: {here}; {there}")
    return "\n".join(lines)
