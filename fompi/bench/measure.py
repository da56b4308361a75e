"""What all suites share: how much is measured, where, and how calls become a row."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np

import fompi
from fompi.base.layout import Shard, Spec, slices_in_words
from fompi.cli.output import Progress
from fompi.engine.communicator import Communicator
from fompi.mpi.transport import beside_ucx
from fompi.plans.meaning import layouts
from fompi.plans.plan import Plan
from fompi.tuning.rounds import TOLERANCE, Row, alternate, checked, relative_error, texts

T = TypeVar("T")

Call = Callable[[], Any]

Calls = Mapping[str, Call]

DEFAULT = "fompi, default schedule"
"""The contestant that is called as a user calls it: without binding, without naming a schedule."""

IDLE_SECONDS = 0.05
"""Silence between two calls over a network. Token buckets are full again by then, and queues are empty."""


class BenchHosts:
    """The hosts of the ranks of `comm` (mpi4py). Collective."""

    def __init__(self, comm: Any):
        self.comm, self.size = comm, comm.Get_size()
        self.own = comm.Dup()  # for messages that do not belong to fompi
        self.hosts = texts(comm, socket.gethostname())

    @property
    def shared(self) -> bool:
        """True if all ranks are on one host. Then messages are copies by its cores, and there is no link."""
        return len(set(self.hosts)) == 1

    @property
    def idle(self) -> float:
        """Seconds of silence before each call."""
        return 0.0 if self.shared else IDLE_SECONDS

    def __str__(self) -> str:
        where = "shared memory: no link" if self.shared else f"{len(set(self.hosts))} hosts"
        return f"{self.size} rank{'s' * (self.size > 1)}, {where}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.own.Free()


class HostPlace:
    """Where tensors are: in the memory of the host. A call is finished when it returns."""

    device: Any = None
    backend: Any = None
    marks: Sequence[str] = ()
    is_software = False

    def array(self, a: np.ndarray) -> Any:
        """This array there."""
        return a

    def read(self, y: Any) -> np.ndarray:
        """A result, on the host."""
        return np.asarray(y)

    def finished(self, call: Call) -> Call:
        """The call with a wait for all that it has begun."""
        return call

    def setup(self, comm: Communicator, cluster: BenchHosts) -> str:
        """Where a row ran, in words."""
        return str(cluster)

    def check(self) -> None:
        """Raise what was wrong with the calls so far."""


@dataclass(frozen=True)
class Bench:
    """The ranks and hosts of a benchmark, how much is measured, and where its tensors are.

    Every row has these `rounds`. With `quick` there are fewer and smaller rows. With `wanted` only the rows run whose
    name has it, in small or capital letters. `shown` says which row runs. `like` is the shape of the rows, if it is the
    user's. `moves` says in words how the messages of rivals progress. `timed` is that of `alternate`, for kernels.
    """

    comm: Communicator
    cluster: BenchHosts
    rounds: int
    quick: bool = False
    wanted: str = ""
    shown: Progress = field(default_factory=Progress)
    like: tuple[int, int, int] | None = None
    place: HostPlace = field(default_factory=HostPlace)
    moves: str = ""
    timed: Callable[[Callable[[], float]], float] | None = None

    @property
    def mpi(self) -> Any:
        """The communicator of mpi4py. With FOMPI_CARRIER=ucx it is the one by which the ranks have met."""
        return self.comm.link.comm if self.comm.size == 1 else beside_ucx(self.comm.link.comm)

    def each(self, items: Sequence[T], name: Callable[[T], str] = str) -> Iterator[T]:
        """The items with a name that is wanted. The progress shows each when it is taken."""
        wanted = self.wanted.lower()
        return self.shown.each([item for item in items if wanted in name(item).lower()], name)

    def rows(self, makers: Mapping[str, Callable[[Bench], Row]]) -> list[Row]:
        """The rows with a name that is wanted."""
        return [makers[name](self) for name in self.each([*makers])]

    def asked(self, target: float) -> float | None:
        """A target that needs links between hosts. None if the ranks share one."""
        return None if self.cluster.shared else target

    def times(self, contestants: Calls, rounds: int = 0, **how: Any) -> dict[str, list[float]]:
        """`alternate` with the rounds and the silence of this benchmark, or others."""
        return alternate(self.mpi, contestants, rounds or self.rounds, **{"idle": self.cluster.idle, **how})

    def row(self, what: str, calls: Calls, **fields: Any) -> Row:
        """The calls, timed in rounds."""
        return self.row_of(what, self.times(calls), **fields)

    def row_of(self, what: str, samples: Mapping[str, Sequence[float]], **fields: Any) -> Row:
        """A row of times that were taken here."""
        fields = {"progress": self.progress, "marks": self.place.marks, **fields}
        return Row(what, self.place.setup(self.comm, self.cluster), samples, **fields)

    @property
    def progress(self) -> str:
        """How messages progress here, in words."""
        return "; ".join(filter(None, [f"progress of fompi: {self.comm.engine.progress_mode}", self.moves]))

    def checked(self, calls: Calls, reference: np.ndarray, tolerance: float = TOLERANCE) -> dict[str, float]:
        """The error of each result. Raises WrongResult on all ranks if one is wrong."""

        def error(y: Any) -> float:
            return relative_error(self.place.read(y), reference)

        return checked(self.mpi, calls, error, tolerance)

    def bound(self, held: ExitStack, made: Plan, **given: Any) -> Any:
        """The plan bound to these tensors, until `held` closes it."""
        return held.enter_context(fompi.bind(made, comm=self.comm, **given))

    def by_schedules(
        self, held: ExitStack, operation: str, schedules: Mapping[str, Mapping[str, Any]], **given: Any
    ) -> dict[str, Call]:
        """The operation on these shards by each of these schedules, bound until `held` closes them."""
        made = partial(plan, operation, *given.values(), self.comm.size)
        return {name: self.bound(held, made(**how), **given) for name, how in schedules.items()}


def schedules(cuts: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """Schedules with these numbers of slices, or sizes of slices, by the names of contestants."""
    return {
        f"fompi {schedule}, {slices_in_words(slices)}": {"schedule": schedule, "slices": slices}
        for schedule, each in cuts.items()
        for slices in each
    }


def plan(operation: str, *tensors: Any, **how: Any) -> Plan:
    """plan(operation, x, ..., size): a plan for these shards. Every rank's shards have the same shapes."""
    *operands, size = tensors
    return fompi.plan(operation, *specs(operation, size, *operands), ranks=size, **how)


def specs(operation: str, size: int, *tensors: np.ndarray) -> Iterator[Spec]:
    """The global tensors of these shards. Every rank's shards have the same shapes."""
    for tensor, layout in zip(tensors, layouts(operation, len(tensors)), strict=True):
        shape = list(tensor.shape)
        if isinstance(layout, Shard):
            shape[layout.dim] *= size
        yield Spec(tuple(shape), str(tensor.dtype), layout)
