"""Compares the times of calls with the prediction, and warns if they differ."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from statistics import median

from fompi.base.errors import DriftWarning

WARN_CALLS, WARN_DRIFT = 16, 1.5
"""A warning needs the median of this many calls, and a ratio of measured to predicted time above this factor.

One slow call is noise. A prediction by the model may be wrong by some tens of per cent.
"""

LEAST_SECONDS = 2e-4
"""Differences of up to this many seconds are noise of the host. They say nothing about links."""


def differ(a: float, b: float, factor: float) -> bool:
    """True if two times in seconds differ by more than LEAST_SECONDS and by more than `factor`."""
    return abs(a - b) > LEAST_SECONDS and max(a, b) > factor * min(a, b)


class Drift:
    """The times of the last calls of one bound operation, and the time that was predicted on a machine."""

    def __init__(self, title: str, machine: str, predict: Callable[[], float]):
        self.title, self.machine, self._predict = title, machine, predict
        self._predicted: float | None = None
        self._seconds: deque[float] = deque(maxlen=WARN_CALLS)
        self._warned = False

    def note(self, seconds: float) -> None:
        """Record the time of one call. Issue one DriftWarning if calls take much longer than predicted."""
        if self._warned:
            return
        self._seconds.append(seconds)
        if len(self._seconds) < WARN_CALLS:
            return
        if self._predicted is None:
            self._predicted = self._predict()
        measured = median(self._seconds)
        if measured > self._predicted and differ(measured, self._predicted, WARN_DRIFT):
            self._warned = True
            warnings.warn(
                f"{self.title}: a call takes {1e3 * measured:.3g} ms, but {1e3 * self._predicted:.3g} ms were "
                f"predicted on {self.machine}. Calibrate again, or bind an explanation with adapt=True",
                DriftWarning,
                stacklevel=4,
            )
