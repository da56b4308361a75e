"""A run as its ranks have recorded it: calls, and between them the kernels of the program, in steps.

    record = Record.load("run/")        # what a job with FOMPI_RECORD=run/ has written
    record.ranks[0].calls["end"]        # in seconds, on the clock of rank 0

Each rank writes FOLDER/rank-R.npz: its calls and the ends of its steps as arrays, the rest in words (JSON).
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fompi.base.errors import LayoutError

Array = np.ndarray[Any, Any]

TIMES = ("begin", "back", "wait", "end")
CALL = np.dtype([("kind", "<i4"), ("late", "<i4"), ("number", "<i8"), *((name, "<f8") for name in (*TIMES, "inside"))])
"""A call of a rank. `kind` is its place among the kinds of the rank, `number` the same on all ranks of the call.

It begins at `begin`; the program goes on at `back`, waits from `wait` on (NaN: nobody knows), and it is over at `end`.
If the program calls and waits in one step, `back` and `wait` are `begin`. Kernels of the call took `inside` seconds.
`late` is the rank of the job that came last, or -1.
"""

MOST_CALLS = 1 << 16
"""A rank keeps this many calls, the newest: 4 MB."""


@dataclass(frozen=True)
class CallKind:
    """What a call is: calls of one kind have the same operation, ranks, shapes and options.

    `moves` is the collective, or "send" or "recv", `channel` the communicator in words, `group` the ranks of the job in
    its order. This rank brings along `nbytes`. `heard` are (rank, seconds, bytes) of what came from each rank in all.
    """

    operation: str
    moves: str
    channel: str
    group: tuple[int, ...]
    nbytes: int
    dtype: str = ""
    shapes: str = ""
    wire: str = ""
    schedule: str = ""
    heard: tuple[tuple[int, float, float], ...] = ()

    def __str__(self) -> str:
        return f"{self.operation}({self.shapes or f'{self.nbytes} bytes'}) on {self.channel}"


@dataclass(frozen=True)
class RankRecord:
    """What one rank has recorded. `marks` are the times at which steps ended; the first of them has the number `first`.

    `dropped` calls were older than those that are kept. `wall`: the wall clock minus the clock of the times. `clocks`,
    where rank 0 has compared them: the seconds from the clock of each other rank to its own.
    """

    rank: int
    size: int
    host: str
    kinds: tuple[CallKind, ...]
    calls: Array
    marks: Array
    first: int = 0
    dropped: int = 0
    wall: float = 0.0
    clocks: Mapping[int, float] = field(default_factory=dict)

    def save(self, folder: str | Path) -> None:
        """Write FOLDER/rank-R.npz."""
        everyone = tuple(range(self.size))
        kinds = [vars(kind) | {"group": () if kind.group == everyone else kind.group} for kind in self.kinds]
        words = vars(self) | {"kinds": kinds, "clocks": [*self.clocks.items()], "calls": None, "marks": None}
        text = np.frombuffer(json.dumps(words).encode(), np.uint8)
        Path(folder).mkdir(parents=True, exist_ok=True)
        np.savez(Path(folder) / f"rank-{self.rank}.npz", calls=self.calls, marks=self.marks, words=text)

    @classmethod
    def load(cls, path: Path) -> RankRecord:
        """Raises LayoutError for what is no such file."""
        try:
            with np.load(path, allow_pickle=False) as data:
                words = json.loads(data["words"].tobytes()) | {"calls": data["calls"], "marks": data["marks"]}
            everyone, calls = tuple(range(words["size"])), words["calls"]
            kinds = tuple(CallKind(**{**kind, "group": tuple(kind["group"]) or everyone}) for kind in words["kinds"])
            if calls.dtype != CALL or (len(calls) and not 0 <= calls["kind"].min() <= calls["kind"].max() < len(kinds)):
                raise ValueError("its calls have no kind")
            return cls(**{**words, "kinds": kinds, "clocks": dict(words["clocks"])})
        except (OSError, ValueError, LookupError, TypeError, AttributeError, zipfile.BadZipFile) as error:
            raise LayoutError(f"{path} is no record of a rank, which FOMPI_RECORD=FOLDER writes: {error}") from None


@dataclass(frozen=True)
class Record:
    """The ranks of a run, in their order, on one clock. `remarks` say what is missing."""

    ranks: tuple[RankRecord, ...]
    remarks: tuple[str, ...] = ()

    @classmethod
    def load(cls, folder: str | Path) -> Record:
        """The record in a folder. Raises LayoutError if there is none."""
        paths = [*Path(folder).glob("rank-*.npz")]
        if not paths:
            raise LayoutError(f"{folder} has no record: FOMPI_RECORD={folder} writes rank-0.npz, rank-1.npz, ...")
        return cls.of(map(RankRecord.load, paths))

    @classmethod
    def of(cls, given: Iterable[RankRecord]) -> Record:
        """These ranks, put on one clock."""
        ranks, remarks = sorted(given, key=lambda rank: rank.rank), []
        if missing := sorted(set(range(ranks[0].size)) - {rank.rank for rank in ranks}):
            remarks.append(f"missing: the record of rank {', '.join(map(str, missing[:8]))}")
        clocks = ranks[0].clocks
        if len({rank.host for rank in ranks}) > 1 and len(clocks) < len(ranks) - 1:
            remarks.append("hosts have no common clock: their wall clocks take its place")
            clocks = {rank.rank: rank.wall - ranks[0].wall for rank in ranks}
        if dropped := max(rank.dropped for rank in ranks):
            remarks.append(f"the oldest {dropped} calls of a rank are not kept")
        return cls(tuple(_shifted(rank, clocks.get(rank.rank, 0.0)) for rank in ranks), tuple(remarks))


def _shifted(rank: RankRecord, seconds: float) -> RankRecord:
    if not seconds:
        return rank
    calls = rank.calls.copy()
    for name in TIMES:
        calls[name] += seconds
    return replace(rank, calls=calls, marks=rank.marks + seconds)
