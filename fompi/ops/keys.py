"""The key of a call that was made before: from its tensors straight to its ticket.

A call is read, its tensors are checked, and its form is looked up. All that follows from the operation, its options and
the type, dtype, shape and layout of its tensors: its key. A call whose key is known needs the addresses of its tensors,
memory for its result, and C.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from fompi.engine.communicator import Communicator
from fompi.ops.ticket import KnownCall, Ticket
from fompi.runtime.default_device import default_device
from fompi.runtime.given import address_of

PLAIN = frozenset((str, int, float, bool, type(None)))
"""Options of these types are part of a key as they are."""

MOST_KEYS = 1024
"""The keys that an interface remembers."""


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
    if default_device() is not None:
        return None
    if options.get("counts") is not None:
        return _with_counts(name, args, options)
    tensors, addresses, out, out_at = tuple(args), (), None, 0  # type: tuple[Any, ...], tuple[int, ...], Any, int
    rest: list[Any] = []
    for x in tensors:
        place = place_of(x)
        if place is None:
            return None
        form, at = place
        rest.append(form)
        addresses = (*addresses, at) if addresses else (at,)
    for option, value in options.items():
        if type(value) in PLAIN:
            rest += [option, type(value), value]
        elif option != "comm":
            place = place_of(value)
            if place is None:
                return None
            form, at = place
            if option == "out":
                out, out_at = value, at
                rest += [option, form, bool(addresses) and at == addresses[0]]
            else:
                rest += [option, form]
                tensors, addresses = (*tensors, value), (*addresses, at)
    return KnownCall((name, compared, *rest), tensors, addresses, out, out_at)


def _with_counts(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> KnownCall | None:
    """The key of an all-to-all with counts of its first dimension, which are right."""
    counts, place = options["counts"], place_of(args[0]) if len(args) == 1 else None  # type: Any, Any
    if name != "all_to_all" or place is None or not {*options} <= {"counts", "comm"}:
        return None
    (dtype, shape, writeable), at = place
    is_plain = type(counts) in (list, tuple) and {*map(type, counts)} == {int}
    if not is_plain or not shape or min(counts) < 0 or sum(counts) != shape[0]:
        return None
    return KnownCall((name, "counts", dtype, shape[1:], writeable), tuple(args), (at,), None, 0, tuple(counts))


class Shortcuts:
    """The calls that another interface has made before, by keys of its own: a group of torch, or `fompi.mpi.Comm`.

    A call whose key is unknown is read. If an operation then works on the very tensors of it, its ticket is found by
    the key from then on. `how` is what the interface needs to describe such a call.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Ticket, Any]] = {}
        self._wanted: tuple[Hashable, int, int] | None = None  # the call that is read

    def find(self, key: Hashable, x_at: int, out_at: int) -> tuple[Ticket, Any] | None:
        """The ticket of the call with this key, and `how`. None: `learn` may find them when the call is read."""
        found = self._known.get(key)
        self._wanted = None if found is not None else (key, x_at, out_at)
        return found

    def learn(self, comm: Communicator, call: KnownCall | None, how: Any) -> None:
        """This is the call of the last key that was not found, as an operation."""
        wanted, self._wanted = self._wanted, None
        if call is None or wanted is None or wanted[1:] != (*call.addresses, call.out_at):
            return
        ticket = comm.tickets.get(call.key)
        if ticket is not None:
            ticket.work_out()
            while len(self._known) >= MOST_KEYS:
                del self._known[next(iter(self._known))]
            self._known[wanted[0]] = ticket, how

    def forget(self) -> None:
        """The next call is none that was looked for."""
        self._wanted = None
