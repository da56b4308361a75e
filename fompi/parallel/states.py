"""What ranks have in one state, for other ranks or other layouts: `fompi.reshard_state`. A checkpoint without files.

A rank says which boxes of which arrays it has, and which it needs (`checkpoints.held_in`). Each array is resharded by a
plan of its own (`fompi.plans.resharding`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fompi.backends.half import storage
from fompi.base.errors import LayoutError
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree
from fompi.parallel.buckets import MOST_NAMED
from fompi.parallel.checkpoints import Entry, Held, held_in, told
from fompi.parallel.reshard import Moving, costs_of
from fompi.parallel.section import begin, in_section
from fompi.plans.boxes import Box, Boxes
from fompi.plans.resharding import Resharding, resharding

State = Mapping[str, Any]


@in_section("reshard_state")
def reshard_state(source: Any, target: Any, *, comm: Any = None, peak: int | None = None) -> dict[str, Any]:
    """target = source, bit by bit, whatever ranks and layouts both have: `fompi.save` and `fompi.load` without files

        fompi.reshard_state({"model": trained}, {"model": served}, comm=world)      # from 4 ranks to 2

    Both are states as those of `fompi.save`, with the same names. A rank that has nothing of one passes {}. Tensors are
    written in place; those that cannot be, as of JAX, are new in the result, which is that of `fompi.load`. Names that
    no rank has in `target` are left out. `peak` is that of `fompi.reshard`, for one array after the other. Collective.
    Raises LayoutError where the source lacks a name or elements, or ranks contradict each other, on all ranks; nothing
    is written then.
    """
    group = Communicator.of(comm)
    sides, error = (dict[str, Any](), dict[str, Any]()), None
    try:
        for side, state in zip(sides, (source, target), strict=True):
            side.update(held_in(state, group.rank))
    except Exception as refusal:
        error = refusal
    agree(group, f"reshard_state, {peak=}", error)
    begin(group)
    known = move(*sides, group, peak)
    found: dict[str, Any] = {}
    for name, each in sides[1].items():
        if isinstance(each, Held):
            found[name] = each.loaded()
        else:
            found[name] = known[name]
            if isinstance(each, Entry):
                each.of[each.key] = known[name]
    return found


def move(source: State, target: State, comm: Communicator, peak: int | None = None) -> dict[str, Any]:
    """The arrays of `target` (`Held`) get the elements of those of `source`. Returns its values. Collective."""
    mine = {}
    for side, state in (("source", source), ("target", target)):
        mine[side] = {name: each.words() for name, each in state.items() if isinstance(each, Held)}
        others = {name: each for name, each in state.items() if not isinstance(each, Held)}
        mine[f"{side} values"] = {n: v.of[v.key] if isinstance(v, Entry) else v for n, v in others.items()}
    tables = told(mine, comm)
    values: dict[str, Any] = {}
    for table in tables:
        values = table["source values"] | values
    wanted = {kind: dict.fromkeys(name for table in tables for name in table[kind]) for kind in tables[0]}
    missing = [name for name in wanted["target"] if name not in wanted["source"]]
    if missing := [*missing, *(name for name in wanted["target values"] if name not in values)]:
        raise LayoutError(f"the source lacks {len(missing)} names: {', '.join(missing[:MOST_NAMED])}")
    costs = costs_of(comm)
    plans = {name: _plan(name, tables, peak, costs) for name in wanted["target"]}
    for name, (plan, dtype) in plans.items():
        here, there = (state[name].views if name in state else () for state in (source, target))
        Moving(plan, here, there, storage(dtype), comm).wait()
    return values


def _plan(name: str, tables: list[Any], peak: int | None, costs: Any) -> tuple[Resharding, str]:
    """How an array gets from those who have it to those who need it, and its dtype. All ranks see the same."""
    boxes, known = list[Boxes](), dict[str, Any]()
    for side in ("source", "target"):
        of = list[tuple[Box, ...]]()
        for rank, table in enumerate(tables):
            each = table[side].get(name, {"form": {}, "boxes": ()})
            for what, value in each["form"].items():
                if known.setdefault(what, value) != value and (what != "sum" or side == "source"):
                    differs = f"has not the {what.replace('sum', 'bits')} of another rank"
                    hint = "where ranks have parts, pair the tensor with its Boxes"
                    raise LayoutError(f"{name!r} in the {side} of rank {rank} {differs}: {hint}")
            is_known = side == "source" and each.get("of_first") and any(of)
            of.append(() if is_known else tuple(Box(tuple(a), tuple(n)) for a, n in each["boxes"]))
        boxes.append(Boxes(tuple(known["shape"]), tuple(of)))
    try:
        return resharding(boxes[0], boxes[1], storage(known["dtype"]).itemsize, peak, costs), known["dtype"]
    except LayoutError as error:
        raise LayoutError(f"{name!r}: {error}") from None
