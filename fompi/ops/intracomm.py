"""`fompi.mpi.Comm`: a communicator of mpi4py whose collectives of buffers are operations of fompi.

    from fompi import mpi
    comm = mpi.Comm()                        # or mpi.Comm(MPI.COMM_WORLD)
    comm.Allreduce(x, y)                     # fompi.all_reduce
    request = comm.Iallgather(x, y)          # a request of mpi4py, for MPI.Request.Waitall too

All ranks must take the same way, so only what MPI demands to be the same on all ranks decides: the function, and in a
reduction the op and the type of the numbers. How a rank has laid out its buffer does not: what is not in one piece, or
has a type of the program, is packed on that rank.

| goes through fompi | goes through MPI |
|---|---|
| with I in front: Bcast, Gather(v), Scatter(v), Allgather(v), Alltoall(v, w) | neighbours, Barrier, persistent ones |
| Reduce, Allreduce, Reduce_scatter(_block) with SUM, PROD, MIN, MAX | other ops and types, `recvcounts=None` |
| both where they are large, blocking and with I (`by_library`) | small ones; blocking Gatherv, Scatterv, Alltoallv(w) |
| | Scan, Exscan, messages, objects (lower-case names), one-sided, files |

The import of this file loads mpi4py. It does not start MPI.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partialmethod
from inspect import signature
from os import sched_yield
from threading import Lock
from time import perf_counter, sleep
from typing import Any, NamedTuple

import numpy as np

from fompi.base.errors import LayoutError, PlanError, ShapeError, StateError, TensorError
from fompi.engine.communicator import Communicator
from fompi.engine.control import Channel
from fompi.engine.tasks import DONE
from fompi.mpi import environment
from fompi.mpi.link import PAUSE_SECONDS
from fompi.mpi.transport import gpu_awareness, load_mpi4py, start_mpi
from fompi.ops import operations
from fompi.ops.arguments import SUMS
from fompi.ops.by_library import ALWAYS, INSIDE, LIMITS, NOTED, SIZED, most_started, watch
from fompi.ops.keys import MOST_KEYS, Shortcuts, known_call, place_of
from fompi.ops.operation import Operation
from fompi.plans.problems import order_of
from fompi.tensors.capsules import code_on_host

MPI: Any = load_mpi4py()

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

OPS = ((MPI.SUM, "sum"), (MPI.PROD, "prod"), (MPI.MIN, "min"), (MPI.MAX, "max"))
"""The reductions that go through fompi."""

NUMBERS = frozenset(
    [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    + ["float32", "float64", "complex64", "complex128"]
)
"""The types of numbers that it reduces, as NumPy names them."""

KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
"""DLPack's type codes in the words of NumPy. MPI has no others."""

_PACKING = Lock()


@cache
def _self() -> Any:
    """A communicator of this rank alone, on which buffers are packed."""
    return MPI.COMM_SELF.Dup()


def is_in_place(spec: Any) -> bool:
    return spec is None or spec is MPI.IN_PLACE


class MpiBuffer:
    """A buffer argument of mpi4py: memory, a datatype, and `counts[i]` items from the item `displacements[i]` on.

    `parts` is the number of ranks, if there is something for each of them, else 0. `vector`: they may have different
    counts. The forms are those of mpi4py: an object with memory, or a list of memory, counts, displacements and type.
    """

    def __init__(self, spec: Any, parts: int = 0, vector: bool = False):
        memory, counts, displacements, datatype = _taken_apart(spec, vector)
        if isinstance(datatype, str):
            datatype = MPI.Datatype.fromcode(datatype)
        self.owner, nbytes, self.on_host = None, 0, True
        if memory is None or memory is MPI.BOTTOM:
            if datatype is None:
                raise TensorError("a buffer that is None or MPI.BOTTOM needs a datatype")
        else:
            self.owner = MPI.buffer(memory)
            nbytes, (code, self.on_host) = self.owner.nbytes, _code_and_place(memory)
            datatype = MPI.Datatype.fromcode(code) if datatype is None else datatype
        self.datatype, self.size, self.extent = datatype, datatype.Get_size(), datatype.Get_extent()[1]
        self.is_plain = self.on_host and datatype.is_predefined and self.size == self.extent
        several, first = max(1, parts), 0
        if not vector and displacements is not None:
            first = operator.index(displacements)
        if counts is None:
            items, rest = divmod(max(0, nbytes - first * self.extent), self.extent or 1)
            if rest or (not vector and items % several):
                raise ShapeError(f"a buffer of {nbytes} bytes is not {several} equal parts of {self.extent}-byte items")
            counts = [items // several + (items % several > i) for i in range(several)]
        self.counts = _numbers(counts, several)
        if not vector:
            displacements = [first + i * self.counts[0] for i in range(several)]
        elif displacements is None:
            displacements = [sum(self.counts[:i]) for i in range(parts)]
        elif np.ndim(displacements) == 0:
            displacements = [operator.index(displacements) * i for i in range(parts)]
        self.displacements = _numbers(displacements, several)
        begin, end = self._reach()
        if min(self.counts) < 0 or (self.owner is not None and (end > nbytes or (begin < 0 and self.is_plain))):
            where = f"counts {self.counts} at {self.displacements}"
            raise ShapeError(f"{where} of {self.extent}-byte items do not fit in {nbytes} bytes")

    def _reach(self) -> tuple[int, int]:
        """The first byte of all items, and the one after the last. (0, 0): there are no items.

        An item may end before its extent does, or after it.
        """
        first, span = self.datatype.Get_true_extent()
        parts = [(at, at + n - 1) for at, n in zip(self.displacements, self.counts, strict=True) if n > 0]
        if not parts or not self.size:
            return 0, 0
        places = [at * self.extent for part in parts for at in part]
        return min(places) + first, max(places) + first + span

    @property
    def nbytes(self) -> list[int]:
        """The bytes for each part."""
        return [count * self.size for count in self.counts]

    @cached_property
    def memory(self) -> Bytes | None:
        """All parts as bytes in the memory of the program. None: they are not in one piece on the host, in order.

        Raises TensorError for memory of a device that the MPI library cannot copy.
        """
        if not (self.on_host or gpu_awareness(environment.value("FOMPI_GPU_AWARE")).aware):
            raise TensorError(
                "the buffer is on a device, whose memory this MPI library does not take: "
                "give the array to the operation of fompi, for example fompi.all_reduce(x, comm=comm)"
            )
        at = self.displacements[0]
        if not self.is_plain:
            return None
        for displacement, count in zip(self.displacements, self.counts, strict=True):
            if count and displacement != at:
                return None
            at += count
        begin, nbytes = self.displacements[0] * self.size, sum(self.nbytes)
        if not nbytes:
            return np.empty(0, np.uint8)
        if self.owner is None:
            return np.frombuffer(MPI.buffer.fromaddress(begin, nbytes), np.uint8)
        return np.frombuffer(self.owner, np.uint8)[begin : begin + nbytes]

    def packed(self) -> Bytes:
        """All parts as bytes: the memory of the program, or a copy."""
        if self.memory is not None:
            return self.memory
        packed = np.empty(sum(self.nbytes), np.uint8)
        self._exchange(packed, to_program=False)
        return packed

    def part(self, i: int) -> Bytes:
        """A copy of part i."""
        begin = sum(self.nbytes[:i])
        return self.packed()[begin : begin + self.nbytes[i]].copy()

    def unpack(self, y: Bytes) -> None:
        """Write the bytes of all parts to the memory of the program."""
        if self.memory is not None:
            self.memory[...] = y
        else:
            self._exchange(y, to_program=True)

    def _exchange(self, packed: Bytes, to_program: bool) -> None:
        end = 0
        for displacement, count, nbytes in zip(self.displacements, self.counts, self.nbytes, strict=True):
            begin, end = end, end + nbytes
            if count:
                at = (0 if self.owner is None else self.owner.address) + displacement * self.extent
                place = MPI.buffer.fromaddress(at, count * self.extent) if at else MPI.BOTTOM
                ends = [[place, count, self.datatype], [packed[begin:end], nbytes, MPI.PACKED]]
                there, here = ends[::-1] if to_program else ends
                with _PACKING:
                    _self().Sendrecv(there, 0, 0, here, 0, 0)

    @property
    def number(self) -> str:
        """The NumPy name of the numbers, if fompi reduces them, else ""."""
        if self.datatype.is_predefined and self.datatype != MPI.BYTE:
            with suppress(TypeError):
                name = np.dtype(self.datatype.typestr).name
                return name if name in NUMBERS else ""
        return ""

    def array(self) -> np.ndarray[Any, Any]:
        """All parts as numbers."""
        return self.packed().view(self.number)


def _code_and_place(memory: Any) -> tuple[str, bool]:
    """The code of the type of the items, and whether NumPy can read the memory: that of a device it cannot."""
    try:
        return memoryview(memory).format, True
    except TypeError:
        known = code_on_host(memory) if hasattr(memory, "__dlpack_device__") else None
        if known is not None:
            code, bits, lanes = known
            kind = "c" if (code, lanes) == (2, 2) else KINDS[code]  # so are the longest complex numbers exported
            return np.dtype(f"{kind}{bits * lanes // 8}").char, True
        return np.dtype(memory.__cuda_array_interface__["typestr"]).char, False


def _taken_apart(spec: Any, vector: bool) -> tuple[Any, Any, Any, Any]:
    """Memory, counts, displacements and datatype of a buffer argument. None: it does not say."""
    if not isinstance(spec, (list, tuple)):
        return spec, None, None, None
    memory, *rest = spec
    datatype = rest.pop() if rest and isinstance(rest[-1], (MPI.Datatype, str)) else None
    if len(rest) > 2 or not (rest or datatype):
        raise TensorError("a buffer argument is a list of 2 to 4: memory, counts, displacements, datatype")
    counts, displacements = (*rest, None, None)[:2]
    if isinstance(counts, tuple) or (isinstance(counts, list) and not vector):
        counts, displacements = counts
    return memory, counts, displacements, datatype


def _numbers(given: Any, count: int) -> list[int]:
    numbers = [operator.index(given)] * count if np.ndim(given) == 0 else [operator.index(n) for n in given]
    if len(numbers) != count:
        raise LayoutError(f"{numbers} must be {count} numbers, one for each rank")
    return numbers


def _parts_of_types(spec: Any, size: int) -> list[MpiBuffer]:
    """The parts of a buffer argument of Alltoallw: each has a datatype of its own, and begins at a byte."""
    memory, *between, types = spec
    counts, displacements = between[0] if len(between) == 1 else between or ([1] * size, [0] * size)
    counts, displacements = _numbers(counts, size), _numbers(displacements, size)
    owner = None if memory is None or memory is MPI.BOTTOM else MPI.buffer(memory)
    parts = []
    for at, count, datatype in zip(displacements, counts, types, strict=True):
        place = MPI.BOTTOM
        if owner is not None:
            place = MPI.buffer.fromaddress(owner.address + at, owner.nbytes - at)
        elif at:
            place = MPI.buffer.fromaddress(at, count * datatype.Get_extent()[1])
        parts.append(MpiBuffer([place, count, datatype]))
    return parts


def _fit(operation: Operation[Any], arrived: list[int], room: list[int]) -> None:
    if arrived != room:
        raise ShapeError(f"{operation.name}: {arrived} bytes arrive from the ranks, but there is room for {room}")


class MpiCall(NamedTuple):
    """A call of an operation of fompi, and `finish(pending)`, which brings its result to the buffers of the program.

    `expects` is how many bytes of rows must arrive on this rank, -1: any number. The ranks compare it before they send.
    """

    operation: Operation[Any]
    x: Any
    options: dict[str, Any]
    finish: Callable[[Any], object]
    expects: int = -1

    def read(self, comm: Communicator) -> tuple[Any, Any]:
        """The Arguments of the operation, and its CallOptions."""
        arguments, _, call_options = self.operation.read((self.x,), {**self.options, "comm": comm})
        arguments.expects = self.expects
        return arguments, call_options


class Request(MPI.Grequest):
    """A collective of fompi in flight, as a request of mpi4py. Its own methods drive fompi while they wait."""

    pending: Any
    failures: list[Exception]

    @classmethod
    def of(cls, comm: Communicator, pending: Any, finish: Callable[[], object]) -> Request:
        """The helper thread ends the call. Without one it ends here: the functions of MPI drive nothing of fompi.

        `pending` None: it has ended.
        """
        failures: list[Exception] = []

        def query(status: Any) -> None:
            status.Set_elements(MPI.BYTE, 0)
            status.Set_cancelled(False)
            if failures:
                raise failures[0]

        started = MPI.Grequest.Start(query, None, None)
        request: Any = cls.__new__(cls, started)  # type: ignore[call-arg]
        request.pending, request.failures = pending, failures

        def end() -> None:
            try:
                finish()
            except Exception as error:
                failures.append(error)
            started.Complete()

        if pending is None:
            started.Complete()
        elif comm.engine.helper is None:
            with suppress(Exception):  # `finish` raises it too
                pending.wait()
            end()
        else:
            pending.leave()
            pending.then(end)
        return request

    def _ended(self, wait: bool, end: Callable[[Any], Any], status: Any) -> Any:
        if self.pending is not None:
            with suppress(Exception):  # `end` raises it
                self.pending.wait() if wait else self.pending.done()
        try:
            ended = end(status)
        except MPI.Exception as error:
            raise (self.failures or [error])[0] from None
        if self.failures and self == MPI.REQUEST_NULL:  # a function of MPI has ended it, without these words
            raise self.failures[0]
        return ended

    def Wait(self, status: Any = None) -> Any:
        return self._ended(True, super().Wait, status)

    def wait(self, status: Any = None) -> Any:
        return self._ended(True, super().wait, status)

    def Test(self, status: Any = None) -> Any:
        return self._ended(False, super().Test, status)

    def test(self, status: Any = None) -> Any:
        return self._ended(False, super().test, status)


class OfLibrary(MPI.Request):
    """A request of the MPI library for its collective `name`, the `number`th on `channel`.

    A wait for it has the deadline of `by_library.watch`. It ends with a PeerError if a rank has left before it.
    """

    name: str
    channel: Channel
    number: int
    tests: int

    @classmethod
    def of(cls, request: Any, name: str, channel: Channel) -> OfLibrary:
        made: OfLibrary = cls.__new__(cls, request)  # type: ignore[call-arg]
        made.name, made.channel, made.number, made.tests = name, channel, channel.in_library[0], 0
        return made

    def Test(self, status: Any = None) -> bool:
        if super().Test(status):
            return True
        self.tests += 1
        if self.tests % LOOK_TESTS == 0 or self.channel.left_at:
            error = self.channel.absent_from(self.name, self.number)
            if error is not None and not super().Test(status):
                raise error
        return False

    def Wait(self, status: Any = None) -> bool:
        if super().Test(status):
            return True
        INSIDE.append((self.name, self, None))
        try:
            while not self.Test(status):
                if self.tests > MOST_YIELDS:
                    sleep(PAUSE_SECONDS)
                else:
                    sched_yield()
        finally:
            INSIDE.pop()
        return True

    def wait(self, status: Any = None) -> Any:
        self.Wait(status)

    def test(self, status: Any = None) -> Any:
        return self.Test(status), None


LOOK_TESTS, MOST_YIELDS = 32, 1 << 14
"""At every LOOK_TESTS-th test a rank looks who has left; after MOST_YIELDS tests it sleeps between two."""


MOST_ARGUMENTS = 9
"""No collective has this many arguments: of one that is not in `SIZED` none says how large it is."""

BUFFERS_OF_ROOT = {"Reduce": 1, "Gather": 1, "Gatherv": 1, "Scatter": 0, "Scatterv": 0}
"""The argument that only the root has."""


def key_of(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> tuple[Hashable, int, int] | None:
    """The key of a call on arrays, with the addresses of what is sent and received. None: it must be read.

    An array may stand in a list with its datatype, an `MPI.buffer` with its count and datatype. None is no buffer.
    """
    key: list[Hashable] = [name]
    addresses = []
    for value in args:
        if type(value) is list and 1 < len(value) < 4 and type(value[-1]) is MPI.Datatype:
            key += [value[-1].handle, *value[1:-1]]
            if any([type(count) is not int for count in value[1:-1]]):
                return None
            value = value[0]
        if type(value) is np.ndarray:
            place = place_of(value)
            if place is None:
                return None
            key.append(place[0])
            addresses.append(place[1])
        elif type(value) is MPI.buffer:
            key += ["buffer", value.nbytes, value.readonly]
            addresses.append(value.address)
        elif value is None:
            key.append(None)
            addresses.append(0)
        elif type(value) is MPI.Op:
            key.append(value.handle)
        elif type(value) is int or value is MPI.IN_PLACE:
            key.append(int(value))
        else:
            return None
    for option, value in options.items():
        if type(value) not in (int, MPI.Op):
            return None
        key += [option, value if type(value) is int else value.handle]
    return ((*key,), addresses[0], addresses[-1]) if addresses else None


class Comm(MPI.Intracomm):
    """The ranks of `comm`, a communicator of mpi4py (None: all ranks), with collectives of fompi.

    Creating it is collective. It has the handle of `comm`: nothing is copied, and freeing one frees both. Everything
    else is as in mpi4py. What its own `Dup`, `Split` or `Create` return is a Comm too, but not ready: its first
    collective waits for all its ranks, also one with I. `mpi.Comm(comm.Split(...))` is ready.
    """

    order = "any"  # of the sums (`ordered`)
    channel: Channel | None = None  # None: it is not ready

    def __new__(cls, comm: Any = None) -> Comm:
        start_mpi()
        made: Comm = super().__new__(cls, MPI.COMM_WORLD if comm is None else comm)
        return made

    def __init__(self, comm: Any = None):
        if self != MPI.COMM_NULL:
            own = Communicator.of(self)
            self.channel = own.channel
            watch()
            if own.engine.recorder is not None:
                NOTED[:] = [own.engine.recorder.note_library]

    def Split(self, color: int = 0, key: int = 0) -> Comm:
        return self._of(super().Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: Any = MPI.INFO_NULL) -> Comm:
        return self._of(super().Split_type(split_type, key, info))

    def Create(self, group: Any) -> Comm:
        return self._of(super().Create(group))

    def Create_group(self, group: Any, tag: int = 0) -> Comm:
        return self._of(super().Create_group(group, tag))

    def _of(self, comm: Any) -> Comm:
        """`comm`, which mpi4py has made as an Intracomm, as one of this class. It is not ready."""
        made: Comm = MPI.Intracomm.__new__(type(self), comm)
        return made

    @property
    def communicator(self) -> Communicator:
        """The Communicator that carries out the collectives. Raises StateError if this is MPI.COMM_NULL."""
        if self == MPI.COMM_NULL:
            raise StateError("this fompi.mpi.Comm is MPI.COMM_NULL: it was freed, or this rank has no part in it")
        return Communicator.of(self)

    # -- moves: bytes
    def _bcast(self, buf: Any, root: int = 0) -> MpiCall:
        buffer = MpiBuffer(buf)
        x, is_root = buffer.packed(), self.Get_rank() == root
        in_place = buffer.memory is not None and x.flags.writeable
        if not (in_place or is_root or x.flags.writeable):
            raise TensorError("the buffer is read-only")

        def finish(pending: Any) -> None:
            y = pending.result  # in place, this writes it to the buffer
            if not (in_place or is_root):
                buffer.unpack(y)

        return MpiCall(operations.broadcast, x, {"root": root, "out": x if in_place else None}, finish)

    def _gathered(self, operation: Operation[Any], x: Bytes, target: MpiBuffer | None, **options: Any) -> MpiCall:
        """The call whose result goes to `target`: straight to its memory, where that is possible."""
        out = None if target is None else target.memory
        if out is not None and np.may_share_memory(out, x):
            out = None

        def finish(pending: Any) -> None:
            y = pending.result
            if target is None:
                return
            _fit(operation, [len(y)] if operation.name == "scatter" else list(pending.counts), target.nbytes)
            if out is None:
                target.unpack(y)

        expects = -1 if target is None else sum(target.nbytes)
        return MpiCall(operation, x, {"out": out, **options}, finish, expects)

    def _allgather(self, sendbuf: Any, recvbuf: Any, vector: bool = False) -> MpiCall:
        target = MpiBuffer(recvbuf, self.Get_size(), vector)
        x = target.part(self.Get_rank()) if is_in_place(sendbuf) else MpiBuffer(sendbuf).packed()
        return self._gathered(operations.all_gather, x, target)

    def _gather(self, sendbuf: Any, recvbuf: Any, root: int = 0, vector: bool = False) -> MpiCall:
        if self.Get_rank() != root:
            return self._gathered(operations.gather, MpiBuffer(sendbuf).packed(), None, root=root)
        target = MpiBuffer(recvbuf, self.Get_size(), vector)
        x = target.part(root) if is_in_place(sendbuf) else MpiBuffer(sendbuf).packed()
        return self._gathered(operations.gather, x, target, root=root)

    def _scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0, vector: bool = False) -> MpiCall:
        if self.Get_rank() != root:
            return self._gathered(operations.scatter, np.empty(0, np.uint8), MpiBuffer(recvbuf), root=root)
        source = MpiBuffer(sendbuf, self.Get_size(), vector)
        target = None if is_in_place(recvbuf) else MpiBuffer(recvbuf)
        return self._gathered(operations.scatter, source.packed(), target, root=root, counts=source.nbytes)

    def _alltoall(self, sendbuf: Any, recvbuf: Any, vector: bool = False) -> MpiCall:
        target = MpiBuffer(recvbuf, self.Get_size(), vector)
        source = target if is_in_place(sendbuf) else MpiBuffer(sendbuf, self.Get_size(), vector)
        x = source.packed().copy() if source is target else source.packed()
        return self._gathered(operations.all_to_all, x, target, counts=source.nbytes)

    def _alltoallw(self, sendbuf: Any, recvbuf: Any) -> MpiCall:
        targets = _parts_of_types(recvbuf, self.Get_size())
        sources = targets if is_in_place(sendbuf) else _parts_of_types(sendbuf, self.Get_size())
        sends, takes = ([sum(part.nbytes) for part in parts] for parts in (sources, targets))
        x = np.concatenate([part.packed() for part in sources])

        def finish(pending: Any) -> None:
            y, at = pending.result, 0
            _fit(operations.all_to_all, list(pending.counts), takes)
            for part, nbytes in zip(targets, takes, strict=True):
                part.unpack(y[at : at + nbytes])
                at += nbytes

        return MpiCall(operations.all_to_all, x, {"counts": sends}, finish, sum(takes))

    _allgatherv = partialmethod(_allgather, vector=True)
    _gatherv = partialmethod(_gather, vector=True)
    _scatterv = partialmethod(_scatter, vector=True)
    _alltoallv = partialmethod(_alltoall, vector=True)

    @contextmanager
    def ordered(self, order: Any) -> Iterator[None]:
        """In the `with` block, on all ranks, fompi adds all terms in this order: "ranks", or `fompi.Canonical(k)`.

            with comm.ordered("ranks"):
                comm.Allreduce(x, y)

        Then Allreduce, Reduce, Reduce_scatter, Reduce_scatter_block and their forms with I have the same bits in every
        MPI library. With leaves a buffer is the sum of those of its rank. PlanError for an op or a type of MPI alone.
        """
        before, self.order = self.order, order_of(order)
        try:
            yield
        finally:
            self.order = before

    # -- reductions: numbers. None: the op or the type is MPI's
    def _reduced(
        self, operation: Operation[Any], source: MpiBuffer, target: MpiBuffer | None, op: Any, **options: Any
    ) -> MpiCall | None:
        name, number = next((name for known, name in OPS if op == known), None), source.number
        if name is None or not number or (number.startswith("complex") and name in ("min", "max")):
            return None
        x = source.array()
        if target is not None and target.number != number:
            raise TensorError(f"{operation.name}: the numbers to send are {number}, those to receive {target.number}")
        room = None if target is None else x if target is source else target.array()
        count = options["counts"][self.Get_rank()] if "counts" in options else len(x)
        if room is not None and count > len(room):
            raise ShapeError(f"{operation.name}: {count} numbers arrive, but there is room for {len(room)}")
        in_place = target is source and operation.name in ("all_reduce", "reduce")
        out = room if in_place or (room is not None and not np.may_share_memory(room, x)) else None

        def finish(pending: Any) -> None:
            y = pending.result
            if target is None or room is None:
                return
            if out is None:
                room[: len(y)] = y
            if target.memory is None:
                target.unpack(room.view(np.uint8))

        how = {"op": name, "out": out, **options}
        return MpiCall(operation, x, how if self.order == "any" else {**how, "order": self.order}, finish)

    def _allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> MpiCall | None:
        target = MpiBuffer(recvbuf)
        source = target if is_in_place(sendbuf) else MpiBuffer(sendbuf)
        return self._reduced(operations.all_reduce, source, target, op)

    def _reduce(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM, root: int = 0) -> MpiCall | None:
        target = MpiBuffer(recvbuf) if self.Get_rank() == root else None
        source = target if target is not None and is_in_place(sendbuf) else MpiBuffer(sendbuf)
        return self._reduced(operations.reduce, source, target, op, root=root)

    def _reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any = MPI.SUM) -> MpiCall | None:
        size, in_place = self.Get_size(), is_in_place(sendbuf)
        target = MpiBuffer(recvbuf, size if in_place else 0)
        source = target if in_place else MpiBuffer(sendbuf, size)
        return self._reduced(operations.reduce_scatter, source, target, op, counts=source.counts)

    def _reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Any = MPI.SUM
    ) -> MpiCall | None:
        if recvcounts is None:
            return None
        target = MpiBuffer(recvbuf)
        source = target if is_in_place(sendbuf) else MpiBuffer(sendbuf)
        return self._reduced(
            operations.reduce_scatter, source, target, op, counts=_numbers(recvcounts, self.Get_size())
        )

    def _begin(self, operation: Operation[Any], prepare: Callable[..., MpiCall | None], args: Any, options: Any) -> Any:
        """The pending of a call and what finishes it. None: it goes to MPI."""
        try:
            call = prepare(*args, **options)
        except Exception as error:  # the other ranks must not wait for this one
            operation.refuse(error, self.communicator)
            raise
        if call is None and self.order != "any" and operation.name in SUMS:
            refusal = PlanError(
                f"{operation.name}: order={self.order}: this op on this type is MPI's, and has no order"
            )
            operation.refuse(refusal, self.communicator)
            raise refusal
        if call is None:
            return None
        comm = self.communicator
        options = {**call.options}
        counts = options.pop("counts", None)
        known = known_call(call.operation.name, (call.x,), options, (counts and (*counts,), call.expects))
        if known is not None:
            self._shortcuts.learn(comm, known, None)
        arguments, call_options = call.read(comm)
        arguments.known = known
        pending = call.operation.begin(arguments, comm, call_options)
        return pending, lambda: call.finish(pending)

    @property
    def _shortcuts(self) -> Shortcuts:
        """The calls that were made before. mpi4py makes communicators without calling `__init__`."""
        shortcuts: Shortcuts | None = self.__dict__.get("shortcuts")
        if shortcuts is None:
            shortcuts = self.__dict__["shortcuts"] = Shortcuts()
        return shortcuts

    def _own(self, name: str, args: Sequence[Any], options: Mapping[str, Any]) -> Sequence[Any]:
        """The arguments without the buffer that only the root has. Another rank may pass any."""
        root = options.get("root", next((value for value in args if type(value) is int), 0))
        at = BUFFERS_OF_ROOT[name]
        return args if root == self.Get_rank() or at >= len(args) else [*args[:at], None, *args[at + 1 :]]

    def _key(self, name: str, word: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """`key_of` the call of `name`, which mpi4py calls `word`."""
        return key_of(word, self._own(name, args, options) if name in BUFFERS_OF_ROOT else args, options)

    @property
    def _of_library(self) -> set[Hashable]:
        """The keys of calls that the library carries out."""
        known: set[Hashable] = self.__dict__.setdefault("of_library", set())
        return known

    def _is_library_s(self, key: Any, args: Sequence[Any]) -> None:
        """The library carries out calls with this key. A handle of a type of the program may be another one's later."""
        if key is not None and all(value[-1].is_predefined for value in args if type(value) is list):
            if len(self._of_library) >= MOST_KEYS:
                self._of_library.clear()
            self._of_library.add(key[0])

    def _known(
        self, key: Any, prepare: Callable[..., MpiCall | None], args: Sequence[Any], options: Any, waits: bool
    ) -> Any:
        """Begin a call that was made before (`Ticket.begin`). None: it must be read."""
        if key is None:
            self._shortcuts.forget()
            return None
        found = self._shortcuts.find(*key)
        if found is None:
            return None
        _, x_at, out_at = key
        comm = self.communicator
        comm.check()

        def describe() -> Any:
            call = prepare(*args, **options)
            assert call is not None
            return call.operation.described(call.read(comm)[0], comm)

        return found[0].begin_at((x_at,), out_at, (args, None), describe, waits)


def _is_by_library(name: str, comm: Comm, args: Sequence[Any], options: Mapping[str, Any], limit: int) -> bool:
    """True if the MPI library carries out a collective of at most `limit` bytes. All ranks get the same answer."""
    if limit in (-1, ALWAYS):
        return limit == ALWAYS
    try:
        return _nbytes_of(name, comm, args, options) <= limit
    except TensorError:
        raise
    except Exception:
        return True  # the library says what is wrong


def _nbytes_of(name: str, comm: Comm, args: Sequence[Any], options: Mapping[str, Any]) -> int:
    """The bytes of a collective, from arguments of any kind. The same on all ranks."""
    given = signature(getattr(comm, f"_{name.lower()}")).bind(*args, **options).arguments
    size, (at, is_part) = comm.Get_size(), SIZED[name]
    buffers = [given[word] for word in ("buf", "sendbuf", "recvbuf") if word in given]
    if is_in_place(buffers[at]):  # the other argument has all parts
        at, is_part = 1 - at, False
    buffer = MpiBuffer(buffers[at], *((size, True) if name == "Allgatherv" else ()))
    if not buffer.on_host:
        buffer.memory  # noqa: B018  # raises TensorError if the library does not take it
    return sum(buffer.nbytes) * (size if is_part else 1)


def _by_library(name: str, word: str) -> Callable[[Comm, Any, Any], Any]:
    """The function `word` of the MPI library. A wait in it, or for it, ends if a rank has left before it."""
    function, enter, leave = getattr(MPI.Intracomm, word), INSIDE.append, INSIDE.pop

    def by_library(self: Comm, args: Any, options: Any) -> Any:
        channel = self.channel
        if channel is not None:
            channel.in_library[0] += 1
        if word != name:
            return OfLibrary.of(function(self, *args, **options), word, channel or self.communicator.channel)
        enter((name, args, channel))
        begun = perf_counter() if NOTED else 0.0
        try:
            return function(self, *args, **options) if options else function(self, *args)
        finally:
            leave()
            if begun:
                NOTED[0](self.communicator, name, FORMS[name].name if name in FORMS else name, args, begun)

    return by_library


def _plain(name: str, word: str) -> Callable[..., Any]:
    """The same for what is never an operation. With I in front it waits for no rank, not even the first one of all."""
    function, by_library = getattr(MPI.Intracomm, word), _by_library(name, word)

    def call(self: Comm, *args: Any, **options: Any) -> Any:
        is_plain = self.channel is None and word != name
        return function(self, *args, **options) if is_plain else by_library(self, args, options)

    call.__name__, call.__doc__ = function.__name__, function.__doc__
    return call


class MpiCollective(NamedTuple):
    """A collective of mpi4py that is an operation of fompi: `word` is `name`, or with I in front.

    `by_library` is that of the MPI library.
    """

    name: str
    word: str
    operation: Operation[Any]
    by_library: Callable[[Comm, Any, Any], Any]

    def prepare(self, comm: Comm) -> Callable[..., MpiCall | None]:
        """What reads the arguments of a call on `comm`."""
        prepare: Callable[..., MpiCall | None] = getattr(comm, f"_{self.name.lower()}")
        return prepare

    def carry_out(self, comm: Comm, started_on: Communicator | None, args: Any, options: Any, most: int) -> Any:
        """A call that may be large, by the library or by fompi. `started_on`: it has I in front."""
        key = comm._key(self.name, self.word, args, options)
        if key is not None and key[0] in comm._of_library:
            return self.by_library(comm, args, options)
        if _is_by_library(self.name, comm, args, options, most):
            comm._is_library_s(key, args)
            return self.by_library(comm, args, options)
        method = self.prepare(comm)
        task = comm._known(key, method, args, options, started_on is None)
        if task is DONE:
            return _returned(started_on, None, lambda: True)
        if task is not None:
            return _returned(started_on, task, lambda: task.result)
        begun = comm._begin(self.operation, method, args, options)
        if begun is None:
            comm._is_library_s(key, args)
            return self.by_library(comm, args, options)
        return _returned(started_on, *begun)


def _returned(started_on: Communicator | None, pending: Any, finish: Callable[[], object]) -> Any:
    """What a call returns: its Request, if it was started on a communicator, or nothing once it is finished."""
    if started_on is not None:
        return Request.of(started_on, pending, finish)
    if pending is not None:
        pending.wait()
        finish()
    return None


def _form(name: str, operation: Operation[Any], immediate: bool) -> Callable[..., Any]:
    """The method of Comm for a collective, with I in front if it is `immediate`."""
    word, (at, parts) = f"I{name.lower()}" if immediate else name, SIZED.get(name, (MOST_ARGUMENTS, False))
    function, is_sum, by_library = getattr(MPI.Intracomm, word), operation.name in SUMS, _by_library(name, word)
    collective = MpiCollective(name, word, operation, by_library)

    def call(self: Comm, *args: Any, **options: Any) -> Any:
        comm = self.communicator if immediate else None
        if is_sum and self.order != "any":
            return _returned(comm, *self._begin(operation, collective.prepare(self), args, options))
        most = LIMITS.get(name, -1) if comm is None else most_started(name, comm.network)
        if (  # what most programs write, decided as by `_is_by_library`
            len(args) > at and type(args[at]) is np.ndarray and args[at].nbytes * (self.size if parts else 1) <= most
        ):
            return by_library(self, args, options)
        return collective.carry_out(self, comm, args, options, most)

    call.__name__, call.__doc__ = function.__name__, function.__doc__
    return call


FORMS: dict[str, Operation[Any]] = {
    **{"Bcast": operations.broadcast, "Gather": operations.gather, "Gatherv": operations.gather},
    **{"Scatter": operations.scatter, "Scatterv": operations.scatter},
    **{"Allgather": operations.all_gather, "Allgatherv": operations.all_gather},
    **{"Alltoall": operations.all_to_all, "Alltoallv": operations.all_to_all},
    **{"Reduce": operations.reduce, "Allreduce": operations.all_reduce},
    **{"Reduce_scatter_block": operations.reduce_scatter, "Reduce_scatter": operations.reduce_scatter},
}
"""The collectives of mpi4py that are operations of fompi."""

for _word in ("Barrier", "Scan", "Exscan", "Ibarrier", "Iscan", "Iexscan"):
    setattr(Comm, _word, _plain(_word.removeprefix("I").capitalize(), _word))
for _name, _operation in FORMS.items():
    setattr(Comm, _name, _form(_name, _operation, False))
    setattr(Comm, f"I{_name.lower()}", _form(_name, _operation, True))
setattr(Comm, "Ialltoallw", _form("Alltoallw", operations.all_to_all, True))  # noqa: B010
