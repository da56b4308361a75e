"""Whether calls take what was predicted."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from statistics import median

from fompi.base.errors import DriftWarning

WARN_CALLS, WARN_DRIFT = 16, 1.5
"""The median of so many calls, so far from the prediction, is worth a warning."""

LEAST_SECONDS = 2e-4
"""What differs by less is not about links."""


def differ(a: float, b: float, factor: float) -> bool:
    return abs(a - b) > LEAST_SECONDS and max(a, b) > factor * min(a, b)


class Drift:
    """Of one bound operation: the seconds of its last calls, beside those that were predicted on a machine."""

    def __init__(self, title: str, machine: str, predict: Callable[[], float]):
        self.title, self.machine, self._predict = title, machine, predict
        self._predicted: float | None = None
        self._seconds: deque[float] = deque(maxlen=WARN_CALLS)
        self._warned = False

    def note(self, seconds: float) -> None:
        """A call took so long. A DriftWarning, once, when many take much longer than predicted."""
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
                f"{self.title}: {1e3 * measured:.3g} ms a call, but {1e3 * self._predicted:.3g} ms were predicted on "
                f"{self.machine}: calibrate again, or bind an explanation with adapt=True",
                DriftWarning,
                stacklevel=4,
            )
