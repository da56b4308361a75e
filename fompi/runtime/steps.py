"""The steps of a program, as it marks their ends, and what notes its calls and its steps (`Notes`)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping
from typing import Any

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


class Notes:
    """What notes the calls of this process: the report, the digests, or the record. By itself it notes nothing.

    Calls then run where Python sees their ends.
    """

    def __init__(self) -> None:
        self.steps = Steps()  # those that the program marks
        self.updates: defaultdict[int, Steps] = defaultdict(Steps)  # those that each optimizer ends, by its id

    def note(self, call: Any) -> None:
        """A call has finished on this rank: a FinishedCall."""

    def note_message(self, comm: Any, message: Any) -> None:
        """A `send` or `recv` is through."""

    def watch_library(self, comm: type, names: Mapping[str, str]) -> None:
        """`fompi.mpi.Comm`, and its collectives in words of fompi: the MPI library carries out some calls of them."""

    def awaited(self, comm: Any, stamp: int) -> None:
        """The program waits for this call, or message, from now on."""

    def mark(self, steps: Steps, tokens: float = 0.0, flops: float = 0.0) -> None:
        """A step ends now. `steps` are those to which it belongs."""

    def measured(self, compiled: Any, extents: Any, seconds: float) -> None:
        """The program has measured the kernels of this operation alone."""

    def settle(self, comm: Any) -> None:
        """This communicator is closed. Collective."""

    def settle_all(self) -> None:
        """The program ends, and all ranks still answer."""

    def finish(self) -> None:
        """The program has ended."""
