"""The clock of another rank: its offset and drift, from samples of an exchange that tells the time.

We ask at `sent`, the other rank answers with its time `remote`, the answer is here at `received`. The answer was given
somewhere between, so the error is at most half the round trip: the quickest exchange of a batch counts, the others
had to wait somewhere. Batches at different times show the drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fompi.base.errors import LayoutError

SHORTEST_SPAN = 1.0
"""Seconds between batches below which a drift cannot be told from the error of the offsets."""


class Sample(NamedTuple):
    """One exchange: when we asked and had the answer, by our clock; what the other's clock showed."""

    sent: float
    remote: float
    received: float

    @property
    def round_trip(self) -> float:
        return self.received - self.sent

    @property
    def offset(self) -> float:
        """What to add to the other's clock to get ours."""
        return (self.sent + self.received) / 2 - self.remote


@dataclass(frozen=True)
class Clock:
    """`clock(t)` is our time when the other's clock shows t: ahead by `offset` at `at`, and by `drift` more a second.

    `error`: half the round trip of the samples that count, the most that the offset may be off.
    """

    at: float
    offset: float
    drift: float
    error: float

    def __call__(self, remote: float) -> float:
        return remote + self.offset + self.drift * (remote - self.at)


SAME = Clock(0.0, 0.0, 0.0, 0.0)
"""Our own clock."""


def fit(batches: Sequence[Sequence[Sample]]) -> Clock:
    """The other's clock, from batches of samples, each taken at once. Raises LayoutError where there is none."""
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
