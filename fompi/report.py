"""FOMPI_REPORT=1: what overlap was worth in this job, printed once at its end; FOMPI_REPORT=FILE.json writes it there.

Every call is noted on its rank. When a communicator is closed, or the program ends, its ranks measure what each
operation's kernels and messages take alone, the yardsticks of a `Proof`. After a clean end rank 0 gathers what all
ranks have noted.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from fompi.errors import OverlapWarning
from fompi.proof import Needs, Proof, Wait, prove, total
from fompi.trace import Trace
from fompi.transport import gather_last_words, library, world

if TYPE_CHECKING:
    from fompi.alone import Alone
    from fompi.backends.base import Backend
    from fompi.communicator import Communicator
    from fompi.engine import Engine
    from fompi.layout import Extents
    from fompi.run import Compiled

    Measure = Callable[["Operation"], None]

MOST_OPERATIONS = 64
"""So many operations and sizes are told apart; the calls of others count for one operation, of any sizes."""

MOST_CALLS = 1024
"""Of so many calls, the newest, the times are kept."""

GATHER_SECONDS = 10.0


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lie: the nearest of them."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Operation:
    """The calls of one operation with one set of sizes, on this rank."""

    def __init__(self, comm: Communicator, compiled: Compiled, stamp: int, extents: Extents | None):
        self.comm, self.compiled, self.stamp, self.extents = comm, compiled, stamp, extents
        self.needs = Needs(compiled.plan, comm.rank)
        self.backend: Backend | None = None
        self.kernels: Mapping[str, Callable[..., object]] | None = None
        self.calls = 0
        self.proofs: deque[Proof] = deque(maxlen=MOST_CALLS)
        self.waits: tuple[Wait, ...] = ()
        self.alone: float | None = None
        self.bare: float | None = None

    def note(self, trace: Trace) -> None:
        proof = prove(trace, self.needs)
        self.calls += 1
        self.waits = total([*self.waits, *proof.waits])
        self.proofs.append(proof._replace_waits(()))

    def proof(self) -> Proof:
        """The call in the middle: medians of all figures; of the waits the mean."""

        def middle(field: str) -> float:
            return median(getattr(proof, field) for proof in self.proofs)

        return Proof(
            title=self.compiled.title,
            rank=self.comm.rank,
            schedule=self.compiled.plan.schedule,
            wall=middle("wall"),
            kernels=middle("kernels"),
            communication=middle("communication"),
            tail=middle("tail"),
            nbytes=int(middle("nbytes")),
            waits=tuple(w._replace(seconds=w.seconds / self.calls) for w in self.waits),
            alone=self.alone,
            bare=self.bare,
            progress=self.comm.engine.progress_mode,
        )

    def record(self) -> dict[str, Any]:
        """All figures, as JSON has them."""
        proof, walls = self.proof(), [proof.wall for proof in self.proofs]
        figures = {
            name: getattr(proof, name)
            for name in (
                "wall", "kernels", "communication", "tail", "nbytes", "alone", "bare", "compute", "slowdown", "hidden",
                "exposed", "idle", "warning",
            )
        }  # fmt: skip
        return {
            "title": proof.title,
            "problem": str(self.compiled.plan.problem),
            "communicator": self.comm.name,
            "members": self.comm.link.world_ranks,
            "rank": self.comm.rank,
            "stamp": self.stamp,
            "calls": self.calls,
            "p50": percentile(walls, 0.5),
            "p99": percentile(walls, 0.99),
            **figures,
            "waits": [[wait.seconds, str(wait)] for wait in proof.waits[:8]],
        }
