"""Saving and loading beside a disk that only writes and reads: how long a step waits, and how long all of it takes.

    mpirun -n 4 python -m fompi bench checkpoints --rounds 5
    mpirun -n 4 python -m fompi bench checkpoints --rounds 3 --row "64 MB"

All ranks have parts of one array of float32, which together have as many bytes as the row says. In turns:

| contestant    | what it is                                                                                   |
|---------------|----------------------------------------------------------------------------------------------|
| `save`        | `fompi.save.start`, until all ranks have written; then `wait`. The save before is removed    |
| `save, later` | the same with `copies="later"`: a rank computes for a second, and then waits for its copy    |
| `plain write` | each rank writes as many bytes to a file of its own, 1 MiB at a time, and awaits the disk    |
| `load`        | `fompi.load` of the same parts, with the tests of their sums                                 |
| `plain read`  | each rank reads its file of `plain write` into memory                                        |

A step waits for `start`, for `copied` before it writes to the state, and for `wait` when the files are on the disk: for
the copy, and what the ranks tell each other. Its figures are the slowest rank's share of the whole `save`, medians. The
first save has new memory for its copy: it is no round, and has a figure of its own. Files are dropped from the memory
of the kernel before they are read. They are in a temporary folder of rank 0 (TMPDIR: on the disk that is meant, and
which all ranks see), and removed. Each row needs three times its bytes there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np

import fompi
from fompi import Boxes, Shard
from fompi.bench.measure import Bench
from fompi.parallel.stored import BLOCK
from fompi.tuning.rounds import Figure, Row, meet, of_all_ranks, text_of_rank_0

SAVE, LATER, WRITE, LOAD, READ = "save", "save, later", "plain write", "load", "plain read"
MOST_WAITED, MOST_OVER_DISK = 0.05, 1.15
"""Asked: the share of a save for which a step waits, and the time of all of it over that of plain writing."""

SIZES = {"2 GB": 2_000_000_000, "64 MB": 64_000_000}
QUICK = {"1 MB": 1_000_000}

STEP = 1.0
"""Seconds of a forward and a backward."""


def rows(bench: Bench) -> list[Row]:
    sizes = QUICK if bench.quick else SIZES
    return bench.rows({name: partial(_measured, name=name, nbytes=nbytes) for name, nbytes in sizes.items()})


@dataclass(frozen=True)
class Disk:
    """What a rank writes and reads in a folder that all ranks share. `waits`: its waits for each save, in seconds."""

    bench: Bench
    folder: Path
    state: dict[str, Any]
    x: np.ndarray
    waits: dict[str, list[float]]

    @property
    def plain(self) -> Path:
        return self.folder / f"plain-{self.bench.comm.rank}"

    def save(self, copies: str = "now") -> None:
        begun = perf_counter()
        saving = fompi.save.start(self.folder / "run", self.state, comm=self.bench.comm, copies=copies)
        waited = perf_counter() - begun
        if copies == "later":
            end = perf_counter() + (0 if self.bench.quick else STEP)
            while perf_counter() < end:
                self.x[: 1 << 18].sum()
            begun = perf_counter()
            saving.copied()
            waited += perf_counter() - begun
        saving._writer.join()
        meet(self.bench.mpi)  # all ranks have written
        begun = perf_counter()
        saving.wait()
        self.waits[copies].append(waited + perf_counter() - begun)

    def write(self) -> None:
        data = self.x.view(np.uint8)
        with self.plain.open("wb") as file:
            for at in range(0, data.size, BLOCK):
                file.write(data[at : at + BLOCK].data)
            file.flush()
            os.fsync(file.fileno())

    def load(self) -> None:
        fompi.load(self.folder / "run", self.state, comm=self.bench.comm)

    def read(self) -> None:
        with self.plain.open("rb", buffering=0) as file:
            data = self.x.view(np.uint8).data
            while data and (count := file.readinto(data)):
                data = data[count:]

    def forget(self, name: str) -> None:
        """Before files are read: they are on the disk only."""
        if name in (LOAD, READ) and self.bench.comm.rank == 0:
            for path in (*self.folder.glob("plain-*"), *self.folder.glob("run/*")):
                with suppress(FileNotFoundError), path.open("rb") as file:  # an old save is on its way out
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _disk(bench: Bench, nbytes: int) -> Iterator[Disk]:
    """A folder of rank 0, on all ranks, until the rows are measured. Collective."""
    boxes = Boxes.over((nbytes // 4,), Shard(0), bench.comm.size)
    x = np.random.default_rng(bench.comm.rank).random(boxes.arrays[bench.comm.rank], np.float32)
    with TemporaryDirectory(ignore_cleanup_errors=True) as own:
        yield Disk(bench, Path(text_of_rank_0(bench.comm, own)), {"x": (x, boxes)}, x, {"now": [], "later": []})
        meet(bench.mpi)  # rank 0 removes the folder


def _measured(bench: Bench, name: str, nbytes: int) -> Row:
    with _disk(bench, nbytes) as disk:
        calls: dict[str, Callable[[], None]] = {SAVE: disk.save, LATER: partial(disk.save, copies="later")}
        calls |= {WRITE: disk.write, LOAD: disk.load, READ: disk.read}
        samples = bench.times(calls, warmup=1, before=disk.forget)
    row = bench.row_of(name, samples, base=WRITE)
    now, later = (of_all_ranks(bench.mpi, np.array(disk.waits[copies])).max(axis=0) for copies in ("now", "later"))
    most_waited, most_over = (None, None) if bench.quick else (MOST_WAITED, MOST_OVER_DISK)
    whole = median(samples[SAVE])
    figures = [
        Figure("waits of a step / the whole save, later", median(later[1:]) / whole, most=most_waited),
        Figure("waits of a step / the whole save", median(now[1:]) / whole),
        Figure("waits for the first save / the whole save", float(now[0]) / whole),
        row.ratio(SAVE, WRITE, most=most_over),
        row.ratio(LOAD, READ),
    ]
    return replace(row, figures=figures)
