"""The clock of another rank: its offset and its drift, fitted to samples.

A sample is one exchange of messages. This rank sends a request at `sent`. The other rank answers with its time
`remote`. The answer arrives at `received`. The other rank read its clock between these two times, so the error of the
offset is at most half of the round trip. Of each batch of samples only the one with the shortest round trip counts.
Batches at different times show the drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fompi.base.errors import LayoutError

SHORTEST_SPAN = 1.0
"""The least time from the first to the last batch, in seconds, for a drift.

In a shorter time the clocks drift apart by less than the error of the offsets.
"""


class Sample(NamedTuple):
    """One exchange: `sent` and `received` by the clock of this rank, `remote` by the clock of the other rank."""

    sent: float
    remote: float
    received: float

    @property
    def round_trip(self) -> float:
        return self.received - self.sent

    @property
    def offset(self) -> float:
        """The clock of this rank minus the clock of the other rank."""
        return (self.sent + self.received) / 2 - self.remote


@dataclass(frozen=True)
class Clock:
    """`clock(t)` is the time of this rank when the clock of the other rank shows t.

    `offset` is the difference of both clocks when the other clock shows `at`. `drift` is the change of this difference
    per second. `error` is the largest possible error of the offset in seconds: half of the longest round trip used.
    """

    at: float
    offset: float
    drift: float
    error: float

    def __call__(self, remote: float) -> float:
        return remote + self.offset + self.drift * (remote - self.at)


SAME = Clock(0.0, 0.0, 0.0, 0.0)
"""The clock of this rank."""


def fit(batches: Sequence[Sequence[Sample]]) -> Clock:
    """The clock of the other rank. The samples of one batch are taken right after each other.

    Raises LayoutError if there is no sample.
    """
    best = [min(batch, key=lambda sample: sample.round_trip) for batch in batches if batch]
    if not best:
        raise LayoutError("no sample of the clock of another rank")
    error = max(sample.round_trip for sample in best) / 2
    if max(s.remote for s in best) - min(s.remote for s in best) < SHORTEST_SPAN:
        quickest = min(best, key=lambda sample: sample.round_trip)
        return Clock(quickest.remote, quickest.offset, 0.0, quickest.round_trip / 2)
    at = sum(s.remote for s in best) / len(best)
    offset = sum(s.offset for s in best) / len(best)
    spread = sum((s.remote - at) ** 2 for s in best)
    drift = sum((s.remote - at) * (s.offset - offset) for s in best) / spread
    return Clock(at, offset, drift, error)
