"""The axes of a mesh that take part in a step of data parallelism: an error of one rank reaches the ranks of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any

from fompi.base.errors import FompiError, LayoutError, MismatchError
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree, begin_agreement

REFUSED_STEP = "a refused step"


class Axes:
    """The axes of a step besides that of the gradients: the ranks of `replicas`, and `over` for other parts of a model.

    A step may bring its own axes. Those that were not known before hear of the first steps that this rank has refused:
    their ranks wait in such a step, because this rank did not know of them then.
    """

    replicas: Communicator | None = None
    over: tuple[Communicator, ...] = ()  # of the last step
    _known: tuple[Communicator, ...] = ()  # of a step that brings none
    _has_stepped = False

    def __init__(self, comm: Communicator):
        self.comm, self.others = comm, list[Communicator]()
        self._owed: list[Exception] = []  # errors of first steps

    def learn(self, replicas: Any, over: Any) -> None:
        """What is known before the first step. Raises the error of what are no such axes."""
        if replicas is not None:
            self.replicas = Communicator.of(replicas)
            self.others = [self.replicas]
        self.over = self._known = axes_of(over)
        check_axes([self.comm, *self.others, *self._known])

    @property
    def shards(self) -> list[Communicator]:
        """Those whose ranks make the same `DataParallel`."""
        return [self.comm, *self.others]

    def __str__(self) -> str:
        """What must be the same on all ranks with the same shards."""
        replicas = "" if self.replicas is None else f", {self.replicas.size} replicas"
        return replicas + (f", over={[axis.name for axis in self._known]}" if self._known else "")

    def begin_step(self, over: Any) -> None:
        """The next step is over these axes. () is those of the constructor."""
        axes = axes_of(over) or self._known
        if axes != self.over:
            check_axes([self.comm, *self.others, *axes])
        self.over = axes
        owed, self._owed = self._owed, []
        for error in owed:
            for wait in refused(axes, error):
                with suppress(FompiError, type(error)):
                    wait()

    def agree(self, gathers: Communicator, text: str, alike: str, forwards: int) -> None:
        """All ranks of all axes come to the update, or all raise. `alike` is compared by ranks with the same shards."""
        compared = [(axis, f"{text}, {alike}") for axis in (gathers, *self.others)]
        agree_everywhere(compared + [(axis, text) for axis in self.over], None, forwards)
        self._has_stepped = True

    def refuse(self, error: Exception) -> list[Callable[[], object]]:
        """All ranks of these axes hear of a step that this rank has refused. Returns what waits for it."""
        if not self.over and not self._has_stepped:
            self._owed.append(error)
        return refused([*self.others, *self.over], error)


def refused(axes: Sequence[Communicator], error: Exception) -> list[Callable[[], object]]:
    """Begin a step that this rank refuses on these axes. Returns what waits for it."""
    waits: list[Callable[[], object]] = []
    for axis in axes:
        with suppress(FompiError, type(error)):
            waits.append(begin_agreement(axis, REFUSED_STEP, error).values)
    return waits


def axes_of(over: Any) -> tuple[Communicator, ...]:
    """One communicator or several, as a tuple; () for None."""
    listed = () if over is None else over if isinstance(over, (tuple, list)) else (over,)
    return tuple(map(Communicator.of, listed))


def check_axes(axes: Sequence[Communicator]) -> None:
    """Raise LayoutError if two axes have more ranks in common than this one."""
    for one, other in combinations(axes, 2):
        if len({*one.link.world_ranks} & {*other.link.world_ranks}) > 1:
            raise LayoutError(
                f"the axes {one.name!r} and {other.name!r} have more ranks in common than this one: comm=, replicas= "
                "and over= must be different axes of a mesh"
            )


def agree_everywhere(axes: Sequence[tuple[Communicator, str]], error: Exception | None, forwards: int = 0) -> None:
    """Raise on all ranks of all axes if one of them has an `error`, or another text than the other ranks of an axis.

    So they do if ranks have run other numbers of `forwards`; 0 is any. An error on one axis is refused on those after
    it.
    """
    for axis, text in axes:
        try:
            if len({*(counts := agree(axis, text, error, forwards))} - {0}) > 1:
                words = f"{text}: its gradients are of forward {[*counts]} since the step before, rank by rank"
                raise MismatchError(f"{words}: a rank has left out a backward and step(), or has run one forward more")
        except Exception as refusal:  # `error` itself may be of any kind
            error = error or refusal
    if error is not None:
        raise error
