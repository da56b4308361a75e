"""The links between the ranks of one parallel axis, and how long a collective over them takes."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, gcd
from typing import NamedTuple

from fompi.model.machine import LinkModel, Machine


class Hop(NamedTuple):
    """The links of one level between `groups` groups, in each of which the axis has `inside` ranks.

    A group's bytes on this level are multiplied by `share`: 1 / inside if each rank has a port. All ranks of a node
    work at the same time. So a shared port also carries what the other ranks of the node send on their own axes.
    """

    link: LinkModel
    groups: int
    inside: int
    share: float


class Axis(NamedTuple):
    """Some ranks of a job at equal distances, and the links between them, the innermost first."""

    size: int
    hops: tuple[Hop, ...]

    @staticmethod
    def of(machine: Machine, size: int, stride: int, ranks: int) -> Axis:
        """The axis of `size` ranks at the distance `stride`, in a job of `ranks` ranks. Groups may straddle nodes."""
        levels = [machine.innermost, *machine.levels]
        inside = [max(1, min(size, gcd(level.ranks, size * stride) // stride)) for level in levels]
        hops = []
        for level, own, outer in zip(levels, inside, [*inside[1:], size], strict=True):
            if outer > own:
                share = (level.ranks / own) if level.shared else 1 / own
                if level.ranks == 1:
                    share = 1 / min(machine.ports, size - 1)
                hops.append(Hop(LinkModel(level, (), machine.slowest(ranks)), ceil(outer / own), own, share))
        return Axis(size, tuple(hops))

    def _seconds(self, entering: Sequence[float]) -> float:
        """Seconds until this many bytes have entered a group of each level. All levels work at the same time."""
        latency = sum(hop.link.level.latency * (hop.groups - 1) for hop in self.hops)
        return latency + max(hop.link.busy(n * hop.share) for hop, n in zip(self.hops, entering, strict=True))

    def gather(self, nbytes: float) -> float:
        """Seconds of an all-gather of `nbytes` in all, or of a reduce-scatter of as many on each rank."""
        if self.size == 1 or not nbytes:
            return 0.0
        return self._seconds([nbytes * (1 - hop.inside / self.size) for hop in self.hops])

    def exchange(self, nbytes: float) -> float:
        """Seconds of an all-to-all of `nbytes` on each rank."""
        if self.size == 1:
            return 0.0
        return self._seconds([hop.inside * nbytes * (1 - hop.inside / self.size) for hop in self.hops])

    def message(self, nbytes: float) -> float:
        """Seconds of a message to the next rank, if all ranks send one: over the slowest link."""
        return max(
            (hop.link.level.latency + hop.link.busy(nbytes * max(1.0, hop.share)) for hop in self.hops), default=0.0
        )
