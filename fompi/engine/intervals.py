"""A bounded record of time intervals: when the program has waited, and when kernels have run."""

from __future__ import annotations

from array import array

import numpy as np

from fompi.traces.trace import Interval

CAPACITY = 4096
"""Intervals that are kept. Enough for the ops of a long call; 64 KiB of memory."""


class RecentIntervals:
    """The last 4096 intervals. Its memory does not grow.

    An interval that begins at most `join_within` seconds after the end of the last one extends that one. `total` are
    the seconds of all that were ever added.
    """

    def __init__(self, join_within: float = -1.0):
        self._times, self._at, self.join_within = array("d", bytes(8 * 2 * CAPACITY)), 0, join_within
        self.total = 0.0

    def add(self, begin: float, end: float) -> None:
        """Add the interval from `begin` to `end`, or extend the last one."""
        times, at = self._times, self._at
        self.total += end - begin
        if begin - times[at + 1] <= self.join_within:
            times[at + 1] = end
            return
        self._at = at = (at + 2) % len(times)
        times[at], times[at + 1] = begin, end

    def within(self, begin: float, end: float) -> list[Interval]:
        """All intervals that overlap the time from `begin` to `end`."""
        pairs = np.array(self._times).reshape(-1, 2)
        return [(start, stop) for start, stop in pairs[(pairs[:, 0] < end) & (pairs[:, 1] > begin)].tolist()]
