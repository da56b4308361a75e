"""Communicator: the ranks on which an operation runs."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

from fompi.base.at_exit import at_exit
from fompi.base.call_options import NOTHING, carried
from fompi.base.call_options import in_words as options_in_words
from fompi.base.differences import detail
from fompi.base.doors import DOORS
from fompi.base.errors import LaunchError, LayoutError, StateError, in_words, text_of
from fompi.base.layout import MOST_NBYTES, integer
from fompi.base.log import log
from fompi.base.version import __version__
from fompi.engine import faults, native
from fompi.engine.control import CALL_BITS, FELL, GONE, LAST_CALL, LEFT, STOPPED, Channel
from fompi.engine.engine import SPINS, Engine
from fompi.engine.frames import called
from fompi.engine.handshake import VALUE_BITS, agree, digest
from fompi.engine.pickled import Shared, remember
from fompi.engine.port import Queued, part_nbytes
from fompi.engine.progress import HELPED, Helper, Worker, choose_mode, has_spare, pause_between_polls
from fompi.engine.tasks import Task
from fompi.model.machine import Machine
from fompi.mpi import environment, launcher
from fompi.mpi.link import (
    Link,
    attach,
    attached,
    attached_to_process,
    connect,
    free_closed,
    mpi_communicator,
    request_testsome,
)
from fompi.mpi.paths import Paths
from fompi.mpi.paths import choose as choose_path
from fompi.mpi.transport import is_alone, library, message_limit_nbytes, thread_levels, unlink_segments, world
from fompi.plans.plan import MESSAGE_BITS
from fompi.tensors.arena import Arena
from fompi.traces.trace import Trace

ARENA_NBYTES, SMALL_NBYTES = 1 << 30, 4096
"""The arena keeps at most 1 GiB of free blocks. Arrays of up to 4 KiB do not come from it (`fompi.tensors.arena`)."""


def _make_engine() -> Engine:
    """The engine of this process, set up by FOMPI_TIMEOUT, FOMPI_PROGRESS and the cores per rank.

    Raises LaunchError if the launcher started several processes, but each of them is an MPI job of one rank.
    """
    if environment.value("FOMPI_SINGLETONS") != "1" and not is_alone():
        mpi = library()
        lonely = launcher.warning(launcher.detect(), world()[1], mpi.name, mpi.mpirun)
        if lonely and world()[1] == 1:
            unlink_segments()
            raise LaunchError.everywhere(f"{lonely}. To run each process alone, set FOMPI_SINGLETONS=1")
    if world()[0] == 0:
        environment.warn_of_unknown()
    timeout = launcher.timeout()
    mode, cores = progress_mode(), launcher.cores_per_rank()
    pause = pause_between_polls(mode, cores)
    worker = Worker() if has_spare(cores) else None
    helper = (lambda engine: Helper(engine, pause, worker)) if mode in HELPED else None
    engine = Engine(request_testsome(), timeout, SPINS if cores >= 1 else 0, mode, helper)
    engine.arena = Arena(ARENA_NBYTES, SMALL_NBYTES)
    engine.report = report = DOORS.report()
    engine.recorder = report if hasattr(report, "awaited") else None
    if report is not None:
        at_exit(report.finish)  # registered first, so called last: after the ranks have left
    faults.install(engine)
    if report is not None:
        at_exit(report.settle_all)
        at_exit(engine.settle)  # called first: the report needs the ends of kernels on devices
    return engine


def engine_of_process() -> Engine:
    """The engine of this process. It is made at the first call, which is not collective."""
    return cast(Engine, attached_to_process(_make_engine))


def progress_mode(machine: Machine | None = None) -> str:
    """How messages move in this process while it computes (`fompi.engine.progress`). Raises LaunchError."""
    share = 0.0 if machine is None else machine.unaided_share
    return choose_mode(environment.value("FOMPI_PROGRESS"), thread_levels()[1], share)


def machine_of_environment() -> Machine | None:
    """The machine that FOMPI_MACHINE names. None if it is not set. Raises LayoutError if there is no such machine."""
    name = environment.value("FOMPI_MACHINE")
    try:
        return Machine.load(name) if name else None
    except LayoutError as error:
        raise LayoutError(f"FOMPI_MACHINE: {error}") from None


def _load_machine(engine: Engine) -> LayoutError | None:
    """Load the machine, once per process. Returns an error instead of raising it: all ranks must get it."""
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


def _is_of_torch(comm: Any) -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and (hasattr(comm, "mesh_dim_names") or isinstance(comm, distributed.ProcessGroup))


MARK_BITS = 10
"""The bits of a mark in a tag. Two marked calls of one bound operation never exchange data if their marks differ."""


def _tag_slots(link: Link) -> int:
    """How many unbound calls in flight can have different tags. As many bound calls can, and twice as many marked."""
    return 1 << min(link.tag_bits - MESSAGE_BITS - 2, 18)


class Communicator(Shared):
    """The ranks of an MPI communicator (None: all ranks). Creating one is collective.

    `rank` and `size` are as in mpi4py. Messages of fompi use a duplicate of the MPI communicator. `close()`, or `with`,
    frees the duplicate. Raises MismatchError on all ranks if they have different versions of fompi or different
    machines, and LayoutError if there is no machine of the name in FOMPI_MACHINE. With `seconds`, its waits last at
    most that long without progress, in place of FOMPI_TIMEOUT.
    """

    how: Mapping[str, Any] = NOTHING
    """The keywords that calls on it have, unless they have their own (`using`)."""

    def __init__(self, comm: Any = None, name: str = "world", hosts: int = 0, seconds: float | None = None):
        origin = comm if isinstance(comm, Link) else mpi_communicator(comm)
        engine = self.engine = engine_of_process()
        if engine.over:
            raise StateError(engine.over)
        from_split = isinstance(origin, Link)
        with engine.lock:
            free_closed()
        if not from_split:
            origin = connect(origin, seconds or engine.timeout, engine.progress, engine.departure, called)
        self.link: Link = origin
        # What carries out calls in C. None: they run in Python.
        self.library = native.engine().library if self.link.is_of_process else None
        self.name, self.rank, self.size = name, self.link.rank, self.link.size
        self.channel = Channel(self.link, self.engine, name)
        self.channel.timeout = seconds  # for the agreement below, too
        self.channel.comm = self
        self.plans: dict[Any, Any] = {}  # the compiled programs of unbound calls (`fompi.ops.pending`)
        self.tickets: dict[Any, Any] = {}  # unbound calls that were made before, by form and key (`fompi.ops.ticket`)
        self.agreed: dict[tuple[int, int], int] = {}  # the rows that have fit on all ranks (`fompi.engine.handshake`)
        self.choices: dict[str, Any] = {}  # the schedules that were measured as the fastest (`fompi.tuning.autotune`)
        self.machine: Machine | None = None  # the machine of FOMPI_MACHINE, restricted to these ranks
        self.turns: deque[int] = deque()  # stamps of unbound calls that may start the MPI library's collectives
        self.recording: list[Any] | None = None  # the traces of finished calls, inside `record`
        self.clock_readings: dict[int, list[Any]] = {}  # on rank 0: samples of other ranks' clocks (`alignment`)
        self.backend: Any = None  # computes unbound calls on tensors of the host; None: NumPy
        self.carriers: dict[Any, Communicator] = {}  # what `using` has returned
        self.mail: Any = None  # messages between two ranks (`fompi.ops.messages`)
        self.network = False  # True: these ranks are on several hosts
        self.crowded = False  # True: these ranks are on one host, and it has no spare core
        self.closed = False
        self._paths: dict[int, Paths] = {}  # by the identity of the device
        self._slots = _tag_slots(self.link)
        self._marks = min(1 << MARK_BITS, self._slots)
        self._marked_slots = 2 * self._slots // self._marks
        self.calls = self._bound = 0
        self.hosts = hosts if from_split else self._meet()  # a digest of the host names in rank order
        if self.size > 1:
            try:
                self.network = self.link.several_hosts()
            except StateError:
                self.close()
                raise
            self.crowded = not self.network and launcher.crowded()
        self.most_nbytes = message_limit_nbytes() if self.network else MOST_NBYTES  # more bytes go in several messages
        self.urgency: int | None = None  # 0: its messages go first (`fompi.engine.port`). None: no message waits
        if self.engine.machine is not None:
            self.machine = self.engine.machine.part(self.link.world_ranks, self.link.world_size)
        self._key = remember(self, "communicator", name, self.link.world_ranks, self.link.is_of_epoch)
        log.info("%s: rank %d of %d, messages move by %s", name, self.rank, self.size, self.engine.progress_mode)

    def _meet(self) -> int:
        """Agree with the other ranks on versions and machines. Returns the digest of the host names.

        After a split it is that of the original.
        """
        self.calls = -1  # this agreement is call 0
        refusal = environment.refusal() or native.refusal() or _load_machine(self.engine)
        machine = self.engine.machine
        text = f"Communicator of fompi {__version__}{' with FOMPI_REPORT' * (self.engine.report is not None)}"
        if machine is not None:
            text += f", FOMPI_MACHINE {machine.name}{detail('the machine', repr(machine))}"
        host = digest(os.uname().nodename) % (1 << VALUE_BITS)
        values = list(agree(self, text, refusal, value=host))
        if not self.link.hosts:
            self.engine.hosts.update(zip(self.link.world_ranks, values, strict=True))
        return digest(str(values))

    @staticmethod
    def of(comm: Any) -> Communicator:
        """`comm` itself, or the Communicator of an MPI.Comm (None: of all ranks). It is created at the first call.

        A ProcessGroup or DeviceMesh of torch has one, too (`fompi.torch.groups`).
        """
        if isinstance(comm, Communicator):
            comm.check()
            return comm
        if comm is not None and _is_of_torch(comm):
            return cast(Communicator, DOORS.communicator_of_torch(comm))
        origin = mpi_communicator(comm)
        known: Communicator | None = attached(origin)
        if known is None or known.closed:
            name = origin.Get_name()
            known = Communicator(origin, "world" if name == "MPI_COMM_WORLD" else name or "comm")
            attach(origin, known)
        known.check()
        return known

    def __dir__(self) -> list[str]:
        """What a program uses. The other attributes are for fompi."""
        return [
            *("agree", "barrier", "close", "closed", "machine", "name", "network", "rank", "record", "size", "split"),
            *("how", "plain", "using"),
        ]

    @property
    def plain(self) -> Communicator:
        """The communicator without keywords of calls."""
        return self

    def using(self, **how: Any) -> Communicator:
        """This communicator, on which calls have these keywords, unless they have their own.

            tp = comm.using(wire="int8", order="ranks")
            fompi.all_reduce(x, comm=tp)             # fompi.all_reduce(x, comm=comm, wire="int8", order="ranks")
            fompi.all_reduce(x, comm=tp, wire=None)  # fompi.all_reduce(x, comm=comm, order="ranks")
            column_parallel_linear(x, w, comm=tp)    # all that it sends, forward and backward

        The keywords are `schedule`, `slices`, `effort`, `wire` and `order` (`fompi.ops.operations`), and `feedback` for
        what sums gradients in every step (`fompi.parallel.data`). A call leaves out those that its operation does not
        have, and a wire that its elements do not take: integers travel as they are. A default takes a keyword away:
        `tp.using(wire=None)`.

        Not collective: ranks, memory and calls in flight are those of this communicator. All ranks must give the same
        keywords. What `split` makes carries none. Raises ArgumentError for another keyword, and DtypeError for a wire
        that does not exist.
        """
        wanted = carried(self.how, how)
        if not wanted:
            return self.plain
        key = tuple((name, str(value)) for name, value in wanted.items())
        return self.carriers.setdefault(key, Carrier(self.plain, wanted))

    def check(self) -> None:
        """Raise StateError if this communicator cannot be used any more. Every call begins with this."""
        if self.engine.gate is not None:
            self.engine.gate(self)
        if self.closed:
            raise StateError(f"the communicator {self.name!r} is closed")
        if self.channel.ending is not None or self.channel.owed is not None:
            self.hear()
        if self.channel.broken is not None:
            cause = self.channel.broken
            raise StateError(
                f"the communicator {self.name!r} cannot be used any more: a call on it was abandoned, and messages of "
                f"that call may still be in flight: {in_words(cause)}"
            ) from cause

    @contextmanager
    def record(self) -> Iterator[list[Trace]]:
        """A list of the traces of this rank. It grows as calls finish that were started inside the `with` block."""
        outer, self.recording = self.recording, []
        try:
            yield self.recording
            self.engine.settle()  # a trace needs the ends of kernels
        finally:
            self.recording = outer

    @contextmanager
    def joint(self, work: str) -> Iterator[None]:
        """The calls inside, on other communicators, belong to `work`, of which other ranks do their part.

        If it ends by an error here, this rank starts no more of these calls. Ranks that wait for one of them, inside
        the same work, get a PeerError at once. Those communicators cannot be used any more then.
        """
        engine = self.engine
        engine.works.append(work)
        try:
            yield
        except Exception as error:
            with engine.lock:
                for channel in engine.channels:
                    if channel is not self.channel:
                        why = f"rank {channel.link.rank} has stopped {work}: {text_of(error)}"
                        channel.send_all(STOPPED, 0, f"{work}\n{why}")
            raise
        finally:
            engine.works.remove(work)

    def agree(self, what: str, refusal: Exception | None = None, value: int = 0) -> list[int]:
        """[value of rank 0, value of rank 1, ...], once all ranks call it with the same text `what`. Collective.

        0 <= value < 2**34. A rank that cannot go on passes the error as `refusal`: it raises it, and the other ranks
        raise a MismatchError. So no rank waits for one that has given up.
        """
        return list(agree(self, what, refusal, value))

    def barrier(self) -> None:
        """Return when all ranks have come here. Raises an error if a rank fails, leaves, or calls something else."""
        agree(self, "a barrier")

    def split(self, color: int, key: int = 0, name: str = "") -> Communicator:
        """A Communicator of the ranks with the same `color`, in the order of `key`. Collective.

        Raises LayoutError if the color is no integer from 0 to 2**31 - 1, or the key is none of 32 bits.
        """
        refusal, limit = None, 1 << 31
        if (number := integer(color)) is None or not 0 <= number < limit:
            refusal = LayoutError(f"split: color={color!r} must be an integer from 0 to {limit - 1}")
        elif (number := integer(key)) is None or not -limit <= number < limit:
            refusal = LayoutError(f"split: key={key!r} must be an integer of 32 bits")
        agree(self, "a split", refusal)
        part = Communicator(self.link.split(color, key), name or f"{self.name}/{color}", self.hosts)
        part.backend = self.backend
        if self.urgency is not None:
            part.prioritize(self.urgency)
        return part

    def prioritize(self, urgency: int) -> None:
        """Messages wait for their turn from now on. All ranks do this at the same time, with no call in flight."""
        bandwidth = 0.0 if self.engine.machine is None else self.engine.machine.bandwidth
        self.urgency, self.most_nbytes = urgency, min(self.most_nbytes, part_nbytes(urgency, bandwidth))

    def send_in_turn(
        self, call: Callable[[Any, int, int], Any], data: Any, peer: int, tag: int, task: Task, key: int
    ) -> None:
        """Send bytes when nothing more urgent is on its way. A part is in flight until its receiver takes it."""
        assert self.urgency is not None
        call = self.link.issend if self.urgency else call
        parts = deque(data[at : at + self.most_nbytes] for at in range(0, data.nbytes, self.most_nbytes))
        stream = self.link, peer, tag
        self.engine.offer(Queued(self.urgency, stream, parts, lambda part: call(part, peer, tag), task, key))

    def paths(self, device: Any) -> Paths:
        """How messages between the memories of such devices move (`fompi.mpi.paths`)."""
        known = self._paths.get(id(device))
        if known is None:
            wanted, aware = environment.value("FOMPI_PATH"), device.is_known_to_mpi()
            hosts: Sequence[Any] = self.link.hosts or [self.engine.hosts.get(rank) for rank in self.link.world_ranks]
            device.on_fault = self.engine.blame
            known = Paths(device, self.link, lambda a, b: choose_path(wanted, hosts[a] == hosts[b], aware))
            self._paths[id(device)] = known
        return known

    def next_call(self) -> tuple[int, int]:
        """The stamp and the tag slot of the next unbound call. They are equal on ranks that call in the same order.

        Called with the engine's lock held. The helper thread may have told another rank since `check` how many calls
        this one has begun: then this one must not begin.
        """
        if self.channel.ending is not None or self.channel.owed is not None:
            self.hear()
        self.calls += 1
        return self.calls, self.slot(self.calls)

    def hear(self) -> None:
        """End a section with the other ranks, if one of them has ended it, and raise its error, if it is due here."""
        if self.channel.ending is not None:
            self.channel.ending.before_call(self)
        if self.channel.owed is not None:
            raise self.channel.owed.pay()

    def begun_with(self, peer: int) -> tuple[int, int, int]:
        """The last unbound call, and how many messages of strategies were sent to `peer` and awaited from it."""
        return self.calls, *(self.mail.with_rank(peer) if self.mail is not None else (0, 0))

    def slot(self, stamp: int) -> int:
        """The tag slot of an unbound call."""
        return 1 + stamp % (self._slots - 1)

    def end_turn(self, stamp: int) -> None:
        """The call `stamp` starts no more collectives of the MPI library, so the next call may start its own.

        All ranks must start these collectives in the same order.
        """
        if stamp in self.turns:
            self.turns.remove(stamp)
            if self.turns:
                self.channel.active[self.turns[0]].take_turn()

    def call_name(self, stamp: int) -> str:
        """The call `stamp` in words."""
        if stamp < 0:
            return f"message {-stamp} of {self.name}"
        if stamp >> 62:
            return f"bound {stamp >> CALL_BITS & (1 << 38) - 1}, call {stamp & LAST_CALL}"
        return f"call {stamp} of {self.name}"

    def note_start(self, name: str, stamp: int) -> None:
        """Note the last call that began on this rank. Ranks that wait for this one quote it."""
        self.engine.last_began = name, self, stamp

    def next_bound(self) -> int:
        """The number of the next bound operation."""
        self._bound += 1
        return self._bound

    def bound_call(self, instance: int, call: int, mark: int | None = None) -> tuple[int, int]:
        """The stamp and the tag slot of a call of a bound operation. All its calls share one slot: MPI keeps order.

        A call with a `mark` has a slot of its own kind, so its messages only match those of calls with the same mark.
        """
        stamp, slots = (1 << 62) | (instance << CALL_BITS) | (call & LAST_CALL), self._slots
        if mark is None:
            return stamp, slots + instance % slots
        return stamp, 2 * slots + instance % self._marked_slots * self._marks + mark % self._marks

    def _in_flight(self) -> Task | None:
        """Some call in flight. The lock is needed: when an agreement ends, the run of its call takes its place."""
        with self.engine.lock:
            return next(iter(self.channel.active.values()), None)

    def close(self) -> None:
        """Finish the calls in flight, and give up the duplicate of the MPI communicator. Collective.

        It is freed once all ranks have closed it, if none of them has abandoned a call on it. A call that waits for
        `ready()` is given up. Raises DeviceError if a kernel has failed after its call returned.
        """
        if self.engine.over:
            self.closed = True
        if not self.closed:
            while (task := self._in_flight()) is not None:
                if not task.can_finish():
                    self.channel.fail(task, StateError(f"{self!r} was closed before all parts of a call were ready"))
                self.engine.wait(task, self.channel, patient=True)
            self.engine.settle()
            if self.engine.report is not None:
                self.engine.report.settle(self)
            self.closed = True
            with suppress(Exception), self.engine.lock:
                for rank in self.channel.departed:  # it still listens
                    self.channel.send(rank, GONE, 0)
            devices = [paths.device for paths in self._paths.values()]
            self._release(self.channel.broken is None)
            for device in devices:
                device.tell()

    def abort(self, why: str) -> None:
        """End it on this rank alone. Calls in flight end with a StateError here, with a PeerError on the others."""
        if self.closed or self.engine.over:
            return
        error = StateError(f"{self!r} was ended: {why}")
        with suppress(Exception):
            self.channel.send_all(FELL, self.channel.in_library[0], f"rank {self.rank} has left {self!r}: {why}")
        with self.engine.lock:
            for task in list(self.channel.active.values()):
                task.abandon(error)
            self.closed = True
            self._release(is_clean=False)

    def _release(self, is_clean: bool) -> None:
        """Give up what a closed communicator has. `is_clean`: no call was abandoned on it here."""
        with self.engine.lock:
            self.channel.close()
            self.plans.clear()
            self.tickets.clear()
            self._paths.clear()
            self.link.close(is_clean)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None:
        """Close it. If an error leaves the `with` block, tell the other ranks: somebody may catch the error here."""
        if kind is None:
            self.close()
        elif not self.closed:  # the channel stays open: this rank reports its end on it
            self.closed = self.channel.is_left = True
            words = f"rank {self.rank} left {self!r} by an error: {in_words(error or kind())}"
            with suppress(Exception):
                self.channel.send_all(LEFT, self.channel.in_library[0], words)

    def __repr__(self) -> str:
        return f"Communicator({self.name!r}, rank {self.rank} of {self.size})"


class Carrier(Communicator):
    """A communicator with keywords for its calls (`Communicator.using`). It shares all its attributes with `plain`."""

    __slots__ = ("how", "plain")

    def __init__(self, plain: Communicator, how: Mapping[str, Any]):
        self.__dict__ = plain.__dict__
        self.plain, self.how = plain, how  # type: ignore[misc]

    def __reduce__(self) -> Any:
        return _carrier_of, (self.plain, dict(self.how))

    def __repr__(self) -> str:
        return f"{repr(self.plain)[:-1]}{options_in_words(self.how)})"


def _carrier_of(plain: Communicator, how: dict[str, Any]) -> Communicator:
    return plain.using(**how)
