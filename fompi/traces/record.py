"""A run as its ranks have recorded it: calls, and between them the kernels of the program, in steps.

    ranks = load("run/")            # what a job with FOMPI_RECORD=run/ has written
    ranks[0].calls["end"]           # in seconds, by the clock of the host

Each rank writes FOLDER/rank-R.npz: its calls as an array, the rest in words (JSON).
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fompi.base.errors import LayoutError

Array = np.ndarray[Any, Any]

TIMES = ("begin", "back", "wait", "end", "inside")
CALL = np.dtype([("kind", "i4"), ("late", "i4"), ("number", "i8"), *((name, "f8") for name in TIMES)])
"""A call of a rank. `kind` is its place among the kinds of the rank, `number` the same on all ranks of the call.

It begins at `begin`; the program goes on at `back`, waits from `wait` on (NaN: nobody knows), and it is over at `end`.
If the program calls and waits in one step, `back` and `wait` are `begin`. Kernels of the call took `inside` seconds.
`late` is the rank of the job that came last, or -1.
"""

MOST_CALLS = 1 << 16
"""A rank keeps this many calls and ends of steps, the newest: 4 MB."""

STEP = -1
"""The kind of what is no call, but the end of the step `number` at `begin`. The next step begins at `end`."""


@dataclass(frozen=True)
class CallKind:
    """What a call is: calls of one kind have the same operation, ranks, shapes and options.

    `moves` is the collective, or "send" or "recv", `channel` the communicator in words, `group` the ranks of the job in
    its order. This rank brings along `nbytes`.
    """

    operation: str
    moves: str
    channel: str
    group: tuple[int, ...]
    nbytes: int
    dtype: str = ""
    shapes: str = ""
    wire: str = ""

    def __str__(self) -> str:
        return f"{self.operation}({self.shapes or f'{self.nbytes} bytes'}) on {self.channel}"


@dataclass(frozen=True)
class RankRecord:
    """What one rank has recorded: its calls, and the ends of its steps among them."""

    rank: int
    size: int
    host: str
    kinds: tuple[CallKind, ...]
    calls: Array

    def save(self, folder: str | Path) -> None:
        """Write FOLDER/rank-R.npz."""
        everyone = tuple(range(self.size))
        kinds = [vars(kind) | {"group": () if kind.group == everyone else kind.group} for kind in self.kinds]
        words = vars(self) | {"kinds": kinds, "calls": None}
        text = np.frombuffer(json.dumps(words).encode(), np.uint8)
        Path(folder).mkdir(parents=True, exist_ok=True)
        beside = Path(folder) / f"writing-{self.rank}.npz"
        np.savez(beside, calls=self.calls, words=text)
        beside.replace(Path(folder) / f"rank-{self.rank}.npz")


def load(folder: str | Path) -> tuple[RankRecord, ...]:
    """The ranks of a record, in their order. Raises LayoutError if a file is none."""
    paths = [*Path(folder).glob("rank-*.npz")]
    if not paths:
        raise LayoutError(f"{folder} has no record: FOMPI_RECORD={folder} writes rank-0.npz, rank-1.npz, ...")
    return tuple(sorted(map(_load, paths), key=lambda rank: rank.rank))


def _load(path: Path) -> RankRecord:
    try:
        with np.load(path, allow_pickle=False) as data:
            words = json.loads(data["words"].tobytes()) | {"calls": data["calls"]}
        everyone, calls = tuple(range(words["size"])), words["calls"]
        kinds = tuple(CallKind(**{**kind, "group": tuple(kind["group"]) or everyone}) for kind in words["kinds"])
        if calls.dtype != CALL or (len(calls) and not STEP <= calls["kind"].min() <= calls["kind"].max() < len(kinds)):
            raise ValueError("its calls have no kind")
        return RankRecord(**{**words, "kinds": kinds})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise LayoutError(f"{path} is no record of a rank, which FOMPI_RECORD=FOLDER writes: {error}") from None
