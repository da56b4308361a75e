"""The steps of a program, as it marks their ends: how long they take, and which calls are in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping

MOST_STEPS = 1024
"""The times of this many steps are kept, the newest. It bounds the memory."""


class Steps:
    """The steps between the first mark and the last one. What comes before the first mark, such as a warm-up, is none.

    `count`: the steps. `total`: the seconds of all of them. `seconds`: of each of the newest. `tokens` and `flops`:
    what they computed in all, as the marks say, or 0.
    """

    def __init__(self) -> None:
        self.count, self.total, self.tokens, self.flops = 0, 0.0, 0.0, 0.0
        self.seconds: deque[float] = deque(maxlen=MOST_STEPS)
        self._end: float | None = None
        self._before: dict[Hashable, int] = {}
        self._until: dict[Hashable, int] = {}

    def mark(self, now: float, calls: Mapping[Hashable, int], tokens: float = 0.0, flops: float = 0.0) -> None:
        """A step ends at the time `now`, with its tokens and operations. `calls`: those of each operation until now."""
        if self._end is None:
            self._before = dict(calls)
        else:
            self.count += 1
            self.total += now - self._end
            self.seconds.append(now - self._end)
            self.tokens += tokens
            self.flops += flops
        self._end, self._until = now, dict(calls)

    def calls(self, operation: Hashable) -> int:
        """The calls of an operation in all these steps."""
        return self._until.get(operation, 0) - self._before.get(operation, 0)
