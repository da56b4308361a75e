"""Communicator: the ranks that an operation runs on. Mesh: named axes over all ranks, each axis a Communicator."""

from __future__ import annotations

import atexit
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

from fompi.base.errors import LayoutError, StateError
from fompi.base.layout import MOST_NBYTES
from fompi.base.version import __version__
from fompi.engine import faults
from fompi.engine.control import Channel
from fompi.engine.engine import SPINS, Engine, slots
from fompi.engine.handshake import VALUE_BITS, agree, digest
from fompi.engine.progress import HELPED, Helper, Worker, choose_mode, has_spare, pause_between_polls
from fompi.model.machine import Machine
from fompi.mpi import launcher
from fompi.mpi.link import Link, attach, attached, attached_to_process, connect, mpi_communicator, request_testsome
from fompi.mpi.transport import most_at_once, thread_levels
from fompi.tensors.arena import Arena
from fompi.traces.trace import Trace

ARENA_NBYTES, SMALL_NBYTES = 1 << 30, 4096

OBSERVERS: list[Callable[[], Any]] = []
"""Each makes what notes the finished calls of a process, or None. `fompi.runtime.report` registers itself here."""


def _make_engine() -> Engine:
    """The engine of this process, from the variables FOMPI_TIMEOUT (seconds) and what the launcher says of the host."""
    timeout = launcher.timeout()
    mode, cores = progress_mode(), launcher.cores_per_rank()
    pause = pause_between_polls(mode, cores)
    worker = Worker() if has_spare(cores) else None
    helper = (lambda engine: Helper(engine, pause, worker)) if mode in HELPED else None
    engine = Engine(request_testsome(), timeout, SPINS if cores >= 1 else 0, mode, helper)
    engine.arena = Arena(ARENA_NBYTES, SMALL_NBYTES)
    observers = [made for make in OBSERVERS if (made := make()) is not None]
    for observer in observers:
        engine.report = observer
        atexit.register(observer.finish)  # registered first, called last: after the ranks have said goodbye
    faults.install(engine)
    for observer in observers:
        atexit.register(observer.settle_all)
    return engine


def progress_mode(machine: Machine | None = None) -> str:
    """Who moves messages in this process while it computes. Raises LaunchError for an unknown mode."""
    share = 0.0 if machine is None else machine.native_share
    return choose_mode(os.environ.get("FOMPI_PROGRESS", "auto"), thread_levels()[1], share)


def machine_of_environment() -> Machine | None:
    """The one that FOMPI_MACHINE names, if it does. Raises LayoutError for none."""
    named = os.environ.get("FOMPI_MACHINE")
    try:
        return Machine.load(named) if named else None
    except LayoutError as error:
        raise LayoutError(f"FOMPI_MACHINE: {error}") from None


def _learn_machine(engine: Engine) -> LayoutError | None:
    """Load the machine, once. What is wrong with it, for the other ranks to hear too."""
    if engine.machine is not None:
        return None
    try:
        engine.machine = machine_of_environment()
    except LayoutError as error:
        return error
    if engine.machine is not None and engine.helper is not None:
        engine.progress_mode = progress_mode(engine.machine)
        engine.helper.use(pause_between_polls(engine.progress_mode, launcher.cores_per_rank()))
    return None


class Communicator:
    """The ranks of an MPI communicator (None: all), with a duplicate of it for our messages. Making one is collective.

    `rank` and `size` as in mpi4py. `close()`, or `with`, gives the duplicate back. Raises MismatchError on all ranks if
    they run other versions of fompi or have other machines, and LayoutError if FOMPI_MACHINE names none.
    """

    def __init__(self, comm: Any = None, name: str = "world", hosts: int = 0):
        origin = comm if isinstance(comm, Link) else mpi_communicator(comm)
        self.engine: Engine = attached_to_process(_make_engine)
        is_ours = isinstance(origin, Link)  # by `split`
        if is_ours:
            self.link = origin
        else:
            self.link = connect(origin, self.engine.timeout, self.engine.progress, self.engine.departure)
        self.name, self.rank, self.size = name, self.link.rank, self.link.size
        self.channel = Channel(self.link, self.engine, name)
        self.plans: dict[Any, Any] = {}  # what `ops` has compiled
        self.choices: dict[str, Any] = {}  # what was found to be the fastest (`fompi.tuning.autotune`)
        self.machine: Machine | None = None  # that of FOMPI_MACHINE, as these ranks see it
        self.turns: deque[int] = deque()  # stamps of the unbound calls that may use the library's collectives
        self.recording: list[Any] | None = None
        self.clock_readings: dict[int, list[Any]] = {}  # rank 0: samples of the clocks of the others (`alignment`)
        self.network = self.crowded = False  # whether these ranks have several hosts; or one, and no core to spare
        self.closed = False
        self._slots = slots(self.link)
        self._calls = self._bound = 0
        if not is_ours:
            self._calls = -1  # this agreement is call 0
            refusal, machine = _learn_machine(self.engine), self.engine.machine
            what = f"Communicator of fompi {__version__}{' with FOMPI_REPORT' * (self.engine.report is not None)}"
            if machine is not None:
                what += f", FOMPI_MACHINE {machine.name} ({machine.digest})"
            here = digest(socket.gethostname()) % (1 << VALUE_BITS)
            hosts = digest(str(list(agree(self, what, refusal, value=here))))
        self.hosts = hosts  # a digest of those of all ranks, in their order; after a split, of the ranks before it
        if self.size > 1:
            self.network = self.link.several_hosts()
            self.crowded = not self.network and launcher.crowded()
        self.most_nbytes = most_at_once() if self.network else MOST_NBYTES  # of a message: more go in several
        if self.engine.machine is not None:
            self.machine = self.engine.machine.part(self.link.world_ranks, self.link.world_size)

    @staticmethod
    def of(comm: Any) -> Communicator:
        """`comm` as it is, or the Communicator of an MPI.Comm (None: of all ranks), made when first asked for."""
        if isinstance(comm, Communicator):
            comm.check()
            return comm
        origin = mpi_communicator(comm)
        known: Communicator | None = attached(origin)
        if known is None or known.closed:
            known = Communicator(origin, "world" if comm is None else origin.Get_name() or "comm")
            attach(origin, known)
        known.check()
        return known

    def check(self) -> None:
        """Raise StateError if nothing can be called on this communicator any more."""
        if self.closed:
            raise StateError(f"the communicator {self.name!r} is closed")
        if self.channel.broken is not None:
            cause = self.channel.broken
            raise StateError(
                f"the communicator {self.name!r} cannot be used after a call that was given up, since its messages may "
                f"still be under way: {type(cause).__name__}: {cause}"
            ) from cause

    @contextmanager
    def record(self) -> Iterator[list[Trace]]:
        """The traces, on this rank, of the operations started on this communicator within the `with`, as they finish.

        Those of an executor are not among them: it has a `trace` of its own.
        """
        before, self.recording = self.recording, []
        try:
            yield self.recording
        finally:
            self.recording = before

    def split(self, color: int, key: int = 0, name: str = "") -> Communicator:
        """The ranks with our color, in the order of their keys. Collective."""
        agree(self, "a split")
        return Communicator(self.link.split(color, key), name or f"{self.name}/{color}", self.hosts)

    def next_call(self) -> tuple[int, int]:
        """Stamp and tag slot of the next unbound call: equal on all ranks that call in the same order."""
        self._calls += 1
        return self._calls, self.slot(self._calls)

    def slot(self, stamp: int) -> int:
        """The tag slot of an unbound call."""
        return 1 + stamp % (self._slots - 1)

    def end_turn(self, stamp: int) -> None:
        """A call will start no more collectives of the library, which all ranks must start in one order."""
        if stamp in self.turns:
            self.turns.remove(stamp)
            if self.turns:
                self.channel.active[self.turns[0]].take_turn()

    def call_name(self, stamp: int) -> str:
        """Which call it is, in words."""
        if stamp >> 62:
            return f"bound {stamp >> 24 & (1 << 38) - 1}, call {stamp & 0xFFFFFF}"
        return f"call {stamp} of {self.name}"

    def begins(self, what: str, stamp: int) -> None:
        """Note the last thing that this rank began, for those who will wait for it."""
        self.engine.last_began = what, self, stamp

    def next_bound(self) -> int:
        """The number of the next bound operation."""
        self._bound += 1
        return self._bound

    def bound_call(self, instance: int, call: int) -> tuple[int, int]:
        """Stamp and tag slot of a call of a bound operation; MPI keeps the messages of its calls in their order."""
        return (1 << 62) | (instance << 24) | (call & 0xFFFFFF), self._slots + instance % self._slots

    def close(self) -> None:
        """Collective: all ranks close a communicator together."""
        if not self.closed:
            if self.engine.report is not None:
                self.engine.report.settle(self)
            self.closed = True
            self.channel.close()
            self.plans.clear()
            self.link.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:  # else the channel is needed for last words
            self.close()

    def __repr__(self) -> str:
        return f"Communicator({self.name!r}, rank {self.rank} of {self.size})"


def _refuse_axes(axes: dict[str, int], size: int) -> LayoutError | None:
    if not axes or any(not isinstance(n, int) or n < 1 for n in axes.values()):
        return LayoutError(f"a mesh has axes with whole sizes >= 1, like Mesh(dp=2, tp=4), not {axes}")
    if prod(axes.values()) != size:
        return LayoutError(f"{' x '.join(map(str, axes.values()))} is not {size}, the number of ranks")
    return None


class Mesh(Mapping[str, Communicator]):
    """All ranks as a grid with named axes: `Mesh(dp=2, tp=4)["tp"]` is the Communicator of our four neighbours.

    The last axis is the innermost: its ranks have consecutive numbers, and lie on one host where hosts are filled in
    order. Collective. Raises LayoutError unless the sizes multiply to the number of ranks.
    """

    def __init__(self, comm: Any = None, /, **axes: int):
        self.axes = axes
        self.world = Communicator.of(comm)
        agree(self.world, f"Mesh({axes})", _refuse_axes(axes, self.world.size))
        self.coordinates = dict.fromkeys(axes, 0)
        rest = self.world.rank
        for name in reversed(axes):
            rest, self.coordinates[name] = divmod(rest, axes[name])
        self._communicators = {}
        for name in axes:
            color = 0
            for other in axes:
                if other != name:
                    color = color * axes[other] + self.coordinates[other]
            self._communicators[name] = self.world.split(color, self.coordinates[name], name)

    def __getitem__(self, axis: str) -> Communicator:
        if axis not in self._communicators:
            raise LayoutError(f"this mesh has no axis {axis!r}; it has {', '.join(self.axes)}")
        return self._communicators[axis]

    def __iter__(self) -> Any:
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)

    def close(self) -> None:
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
