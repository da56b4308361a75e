"""Mesh: a grid of all ranks with named axes, each a Communicator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from fompi.base.errors import LayoutError, quoted
from fompi.base.layout import integer
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree
from fompi.engine.pickled import Shared, remember


def _refuse_axes(axes: dict[str, int], priority: Any, size: int) -> LayoutError | None:
    """The error for axes that do not fit `size` ranks. It is returned, because all ranks must get it."""
    if not axes or any((integer(n) or 0) < 1 for n in axes.values()):
        return LayoutError(f"a mesh needs axes with integer sizes >= 1, such as Mesh(dp=2, tp=4), not {axes}")
    if prod(axes.values()) != size:
        return LayoutError(f"{' x '.join(map(str, axes.values()))} is not {size}, the number of ranks")
    names = priority if isinstance(priority, tuple | list) else ("",)  # "" is no axis
    if priority is not None and any(name not in axes or names.count(name) > 1 for name in map(str, names)):
        return LayoutError(f"priority= names axes of the mesh ({', '.join(axes)}), each once, not {priority!r}")
    return None


class Mesh(Shared, Mapping[str, Communicator]):
    """A grid of all ranks with named axes. `Mesh(dp=2, tp=4)["tp"]` is the Communicator of the 4 ranks along axis tp.

    `mesh["dp", "tp"]` is that of the ranks along both. The last axis is the innermost: its ranks have consecutive
    numbers, so they are on one host if hosts are filled in order. Collective. Raises LayoutError if the product of the
    sizes is not the number of ranks.

    `priority=("tp", "pp", "dp")` says whose messages go first where axes share the links of a rank: those of tp, then
    those of pp. Axes that are not named come last, all alike. While messages of a more urgent axis move, and 10 ms
    longer, the others wait. They leave in parts of 64 KiB, few at a time, so that an urgent message waits for little.
    They also leave while urgent ones wait for their receivers, and each axis sends at least one part every 0.5 s. A
    communicator of several axes is as urgent as the least urgent of them, and a split of one as the one that was split.
    Small messages, collectives of the MPI library (the schedules `unfused` and `sliced`) and copies between devices of
    one host do not wait. Without `priority` messages go when they are ready.
    """

    def __init__(self, comm: Any = None, /, *, priority: Sequence[str] | None = None, **axes: int):
        self.axes = axes = {name: n if integer(n) is None else int(n) for name, n in axes.items()}
        self.world, self.priority = Communicator.of(comm), priority
        which = "" if priority is None else f", priority={priority!r}"
        agree(self.world, f"Mesh({axes}{which})", _refuse_axes(axes, priority, self.world.size))
        self.coordinates = dict.fromkeys(axes, 0)
        remaining = self.world.rank
        for name in reversed(axes):
            remaining, self.coordinates[name] = divmod(remaining, axes[name])
        self._communicators: dict[tuple[str, ...], Communicator] = {(name,): self._along(name) for name in axes}
        named = ", ".join(f"{name}={n}" for name, n in axes.items())
        self._key = remember(self, "mesh", named, self.world.link.world_ranks)

    @property
    def closed(self) -> bool:
        """True if the Communicator of some axis is closed."""
        return any(communicator.closed for communicator in self._communicators.values())

    def _along(self, *names: str) -> Communicator:
        """The ranks that differ from this one only along these axes. Collective."""
        color = key = 0
        for name, size in self.axes.items():
            if name in names:
                key = key * size + self.coordinates[name]
            else:
                color = color * size + self.coordinates[name]
        along = self.world.split(color, key, "x".join(names))
        if self.priority is not None:
            order = [*self.priority]
            along.prioritize(max(order.index(name) if name in order else len(order) for name in names))
        return along

    def __getitem__(self, axis: str | tuple[str, ...]) -> Communicator:
        """The ranks along an axis, or along several: mesh["dp", "tp"], in the order of the mesh.

        The first use of several axes is collective over all ranks of the mesh.
        """
        wanted = axis if isinstance(axis, tuple) else (axis,)
        for name in wanted:
            if name not in self.axes:
                raise LayoutError(f"this mesh has no axis {quoted(name, self.axes)}; it has {', '.join(self.axes)}")
        names = tuple(name for name in self.axes if name in wanted)
        if not names:
            raise LayoutError(f"name one or more of the axes {', '.join(self.axes)}")
        if names not in self._communicators:
            self._communicators[names] = self._along(*names)
        return self._communicators[names]

    def __iter__(self) -> Any:
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)

    def close(self) -> None:
        """Close the Communicators of all axes. Collective."""
        for communicator in self._communicators.values():
            communicator.close()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        at = ", ".join(f"{name}={self.coordinates[name]} of {n}" for name, n in self.axes.items())
        return f"Mesh({at})"
