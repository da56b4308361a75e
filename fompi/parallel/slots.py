"""Buffers of a program that are used again for what travels or is kept for a while: slots, of several kinds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from fompi.plans.plan import Chunk, Workspace


class Slots:
    """Of each kind as many as `counts` says; without an entry as many as needed, which `most` has afterwards."""

    def __init__(self, work: Workspace, dtype: str, counts: Mapping[str, int]):
        self.work, self.dtype, self.most = work, dtype, dict(counts)
        self._free = {kind: deque(range(count)) for kind, count in counts.items()}
        self._kinds: dict[str, tuple[str, int]] = {}  # of each buffer: its kind and number

    def take(self, kind: str, shape: tuple[int, ...], dtype: str | None = None) -> Chunk:
        """A free slot: the one that has been free for the longest time. Those of a kind have one dtype."""
        free = self._free.setdefault(kind, deque())
        if not free:
            number = self.most.get(kind, 0)
            self.most[kind] = number + 1
            free.append(number)
        number = free.popleft()
        buffer = self.work.scratch(f"{kind}_{number}", "whole", shape, dtype or self.dtype)
        self._kinds[buffer.name] = kind, number
        return buffer[:]

    def drop(self, chunk: Chunk) -> None:
        """The slot is free again."""
        kind, number = self._kinds[chunk.buffer]
        self._free[kind].append(number)
