"""How a call is carried out: keywords that every operation takes. A communicator may carry them, too.

    tp = comm.using(effort="measure", order="ranks")
    fompi.all_reduce(x, comm=tp)                      # fompi.all_reduce(x, comm=comm, effort="measure", order="ranks")

A new keyword is a field here. It takes effect where the problem of a call is made (`ops.arguments.localise`). The
docstring of `ops.operations` says what it means.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict

from fompi.base.errors import ArgumentError, meant
from fompi.base.layout import Slices
from fompi.base.wires import WIDE, wire_of


class CallOptions(NamedTuple):
    """The keywords of a call, with their defaults."""

    schedule: str = "auto"
    slices: Slices | None = None
    effort: str = "plan"
    wire: str | None = None
    certify: bool = False
    order: Any = "any"


class CallKeywords(TypedDict, total=False):
    """The same as keywords of an operation, and its communicator: for readers and type checkers."""

    comm: Any
    schedule: str
    slices: Slices | None
    effort: str
    wire: str | None
    certify: bool
    order: Any


DEFAULTS = CallOptions()

OF_CALL = frozenset(CallOptions._fields)

OF_COMMUNICATOR = tuple(name for name in CallOptions._fields if name != "certify")
"""Those that a communicator may carry. `certify` changes what a call returns, so each call says it."""

CARRIED = {**{name: getattr(DEFAULTS, name) for name in OF_COMMUNICATOR}, "feedback": False}
"""All that a communicator may carry, with the defaults.

`feedback` is read by what sums gradients in every step (`parallel.data`, `torch.data_parallel`) and keeps what its
messages have lost. A call keeps nothing: it leaves out what is carried, and refuses it as its own keyword.
"""

NOTHING: Mapping[str, Any] = MappingProxyType({})


def carried(before: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a communicator carries that carried `before` and is given more. A default takes a keyword away.

    Raises ArgumentError for another keyword, and DtypeError for an unknown wire.
    """
    for name in given:
        if name not in CARRIED:
            hint = meant(name, CARRIED, "; did you mean {!r}?")
            known = ", ".join(CARRIED)
            raise ArgumentError(f"a communicator carries {known}, but no {name!r}{hint}")
    wire_of(given.get("wire"), "float32")
    both = {**before, **given}
    kept = {name: both[name] for name, default in CARRIED.items() if name in both and both[name] != default}
    return MappingProxyType(kept)


def fitting(how: Mapping[str, Any], x: Any, op: str) -> Mapping[str, Any]:
    """What a call on `x` takes of what its communicator carries: integers and maxima travel as they are."""
    if "wire" not in how or (op in ("sum", "mean") and wire_on(how, dtype_of(x))):
        return how
    return {name: value for name, value in how.items() if name != "wire"}


def wire_on(how: Mapping[str, Any], dtype: str) -> str:
    """The wire that elements of this dtype take of what their communicator carries: an empty name is none."""
    wire = how.get("wire", "")
    return wire if wire in WIDE.get(dtype, ()) else ""


def dtype_of(x: Any) -> str:
    """The name of the dtype of a tensor, or of the first one of a list. A tensor that does not say it: float32."""
    first = x[0] if isinstance(x, (list, tuple)) and x else x
    dtype = getattr(first, "dtype", "float32")
    return getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")


def in_words(how: Mapping[str, Any]) -> str:
    """The keywords in a text that ranks compare, or that a user reads."""
    return "".join(f", {name}={value if name == 'order' else repr(value)}" for name, value in how.items())
