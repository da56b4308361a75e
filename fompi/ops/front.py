"""The front of a call that was made before: from its tensors straight to its ticket.

A call is read, its tensors are checked, and its form is looked up. All that follows from the operation, its options and
the type, dtype, shape and layout of its tensors. These are the key of a `Front`. A call whose key is known needs the
addresses of its tensors, memory for its result, and C.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fompi.base.layout import CARRIERS, ITEMSIZE
from fompi.engine.communicator import Communicator
from fompi.ops.arguments import Arguments
from fompi.ops.ticket import Flying, Ticket
from fompi.runtime.default_device import default_device
from fompi.runtime.given import address_of
from fompi.tensors import dlpack

if TYPE_CHECKING:
    from fompi.ops.pending import Pending

PLAIN = frozenset((str, int, float, bool, type(None)))
"""Options of these types are part of a key as they are."""

MOST_FRONTS = 1024
"""The keys that a communicator remembers."""

ORDERS: dict[tuple[str, ...], Callable[[int, int], tuple[int, ...]]] = {
    ("x", "y"): lambda x, y: (x, y),
    ("y", "x"): lambda x, y: (y, x),
    ("x",): lambda x, y: (x,),
    ("y",): lambda x, y: (y,),
}
"""The addresses of x and of the result in the order in which a ticket takes them."""

REFUSED = object()
"""What `Front.run` returns if the call must be read."""


class KnownCall(NamedTuple):
    """A call as far as its key goes. `x` and `out` are its tensors, at these addresses."""

    key: Hashable
    x: Any
    x_at: int
    out: Any
    out_at: int


def place_of(x: Any) -> tuple[Hashable, int] | None:
    """The form and the address of a tensor of NumPy or torch. None: it is not plain.

    Plain is contiguous memory of the host, without a gradient.
    """
    kind = type(x)
    if kind is np.ndarray:
        flags = x.flags
        if not (flags.c_contiguous and flags.aligned):
            return None
        return (x.dtype, x.shape, flags.writeable), address_of(x)
    torch = sys.modules.get("torch")
    if torch is None or kind is not torch.Tensor or x.requires_grad or not x.is_cpu or x.layout is not torch.strided:
        return None
    if not x.is_contiguous() or x.is_neg() or x.is_conj():
        return None
    try:
        at = x.data_ptr()
    except RuntimeError:  # it has no memory: a function of torch is traced
        return None
    return ((x.dtype, x.shape, True), at) if at else None  # else it is empty, or its storage was freed


def known_call(name: str, args: Sequence[Any], options: Mapping[str, Any], compared: Hashable = ()) -> KnownCall | None:
    """The key of `operation(*args, **options)`. None: it has arguments that a key does not hold.

    `compared` is what else the key must hold.
    """
    if len(args) != 1 or default_device() is not None:
        return None
    x, out, out_at, form = args[0], None, 0, None
    rest: list[Any] = []
    for option, value in options.items():
        if type(value) in PLAIN:
            rest += [option, type(value), value]
        elif option == "out":
            out = value
        elif option != "comm":
            return None
    place = place_of(x)
    if place is None:
        return None
    if out is not None:
        there = place_of(out)
        if there is None:
            return None
        form, out_at = there
    x_form, x_at = place
    return KnownCall((name, x_form, form, out_at == x_at, compared, *rest), x, x_at, out, out_at)


class Front:
    """A call of one key. `make` makes the memory of a new result."""

    def __init__(self, ticket: Ticket, pending: Pending):
        local, problem = pending._local, pending._local.problem
        self.ticket, self.in_place = ticket, local.in_place
        self._order = ORDERS[*ticket.given]
        shapes, dtypes = ticket.sized.shapes, {b.name: b.dtype for b in ticket.program.program.buffers}
        self._nbytes = [_nbytes(shapes[name], dtypes[name]) if name in shapes else 0 for name in ("x", "y")]
        shape = problem.result_shape(local.shape, pending._comm.rank) if problem.flat else shapes["y"]
        self.make = _maker(pending._comm, shape, problem.dtype, local.like.framework)

    def begin(self, x_at: int, y_at: int, held: tuple[Any, Any], describe: Callable[[], Pending], waits: bool) -> Any:
        """Begin a call on tensors at these addresses. None: it is finished. Else its Flying, or REFUSED.

        `held` are x and the result.
        """
        if not self.in_place:
            x_nbytes, y_nbytes = self._nbytes
            if x_at < y_at + y_nbytes and y_at < x_at + x_nbytes:
                return REFUSED
        task = self.ticket.begin(self._order(x_at, y_at), held, describe, waits)
        return None if task is None else REFUSED if task is False else Flying(task, held[1])

    def run(self, call: KnownCall, describe: Callable[[], Pending]) -> Any:
        """The result of the call. REFUSED: it must be read."""
        y, y_at = call.out, call.out_at
        if y is None:
            try:
                y = self.make()
            except Exception:  # the call fails in Python, where the other ranks hear of it
                return REFUSED
            y_at = address_of(y) if type(y) is np.ndarray else y.data_ptr()
        flight = self.begin(call.x_at, y_at, (call.x, y), describe, waits=True)
        if flight is REFUSED:
            return REFUSED
        if call.out is not None:
            dlpack.mark_written(y)
        return y if flight is None else flight.wait()


class Door:
    """The calls that another interface has made before, by keys of its own: a group of torch, or `fompi.mpi.Comm`.

    A call whose key is unknown is read. If an operation then works on the very tensors of it, its front is found by
    the key from then on. `how` is what the interface needs to describe such a call.
    """

    def __init__(self) -> None:
        self._fronts: dict[Hashable, tuple[Front, Any]] = {}
        self._wanted: tuple[Hashable, int, int] | None = None  # the call that is read

    def find(self, key: Hashable, x_at: int, out_at: int) -> tuple[Front, Any] | None:
        """The front of the call with this key, and `how`. None: `learn` may find them when the call is read."""
        found = self._fronts.get(key)
        self._wanted = None if found is not None else (key, x_at, out_at)
        return found

    def learn(self, comm: Communicator, call: KnownCall | None, how: Any) -> None:
        """This is the call of the last key that was not found, as an operation."""
        wanted, self._wanted = self._wanted, None
        if call is None:
            return
        front = front_of(comm, call)
        if front is not None and wanted is not None and wanted[1:] == (call.x_at, call.out_at):
            while len(self._fronts) >= MOST_FRONTS:
                del self._fronts[next(iter(self._fronts))]
            self._fronts[wanted[0]] = front, how

    def forget(self) -> None:
        """The next call is none that was looked for."""
        self._wanted = None


def take_front(ticket: Ticket, pending: Pending) -> None:
    """Remember the key of a call that runs by this ticket, if it says all that the call needs."""
    local, arguments, comm = pending._local, pending._arguments, pending._comm
    tensors = [local.like, *([] if local.out is None else [local.out])]
    plain = all(t.framework in ("numpy", "torch") and t.host is None for t in tensors)
    place = place_of(arguments.x)
    if place is None or "x" not in local.arrays or place[1] != address_of(local.arrays["x"]):
        return  # it works on a copy, or on parts
    names = {"x"} if local.in_place else {"x", "y"}
    whole = arguments.result is Arguments.result and not (local.dim or local.split >= 0 or local.packed)
    is_known = tuple(ticket.given) in ORDERS and names >= ticket.given.keys()
    if plain and whole and is_known and ticket.program.outputs[0].name in ("x", "y"):
        with comm.engine.lock:
            while len(comm.fronts) >= MOST_FRONTS:
                del comm.fronts[next(iter(comm.fronts))]
            comm.fronts[arguments.key] = Front(ticket, pending)


def front_of(comm: Communicator, call: KnownCall) -> Front | None:
    """The front of a call. Raises StateError if the communicator cannot be used any more."""
    comm.check()
    found: Front | None = comm.fronts.get(call.key)
    return found


def _maker(comm: Communicator, shape: tuple[int, ...], dtype: str, framework: str) -> Callable[[], Any]:
    storage, arena, nbytes = dlpack.STORAGE[dtype], comm.engine.arena, _nbytes(shape, dtype)
    if framework == "torch" and nbytes <= arena.small_nbytes:
        torch = sys.modules["torch"]
        empty, kind = torch.empty, getattr(torch, dtype)
        return lambda: empty(shape, dtype=kind)
    if framework == "numpy" and dtype not in CARRIERS:
        if nbytes <= arena.small_nbytes:
            return lambda: np.empty(shape, storage)
        return lambda: arena.take(shape, storage)
    return lambda: dlpack.lend(arena.take(shape, storage), dtype, framework)


def _nbytes(shape: Sequence[int], dtype: str) -> int:
    count = ITEMSIZE[dtype]
    for n in shape:
        count *= n
    return count
