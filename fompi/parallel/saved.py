"""The whole state of a `DataParallel`, from the parts that its ranks own: to save it, and to load it on other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fompi.backends.numbers import empty, filled, narrow, place, upload, widen
from fompi.base.differences import detail
from fompi.base.errors import LayoutError, ShapeError
from fompi.base.layout import offsets, split
from fompi.engine.communicator import Communicator
from fompi.engine.handshake import agree
from fompi.ops.operations import all_gather, all_reduce
from fompi.parallel import section
from fompi.parallel.arrays import borrow_any, call, check_place, lent, same_bits, tensor_of
from fompi.parallel.axes import Axes
from fompi.parallel.buckets import MOST_NAMED, detached
from fompi.parallel.checkpoints import Entry, Held, Placed, within
from fompi.parallel.gathers import Bucket
from fompi.parallel.optimizers import MASTER
from fompi.parallel.sums import Gradients
from fompi.plans.boxes import whole

Array = np.ndarray[Any, Any]
Saved = dict[str, dict[str, Any]]


class Parts(Protocol):
    """What a `DataParallel` has on this rank."""

    comm: Communicator
    zero: int
    buckets: list[Bucket]
    gradients: list[Gradients]
    feedback: bool
    weight: float
    _index: dict[str, int]
    _axes: Axes


@section.in_section("state_dict of DataParallel")
def whole_state(dp: Parts, parameters: bool, rank0_only: bool) -> Saved:
    """The state of the optimizer, and the parameters, in the shapes of the parameters."""
    kept = "".join(
        detail(f"{key!r} of {name!r}", "in parts" if _is_spread(bucket, name, key) else "whole")
        for bucket in dp.buckets
        for name in bucket.names
        for key in _kept(bucket, name)
    )
    agree(dp.comm, f"state_dict of DataParallel, {parameters=}, {rank0_only=}{kept}")
    section.begin(dp.comm)
    keeps, optimizer, values = not rank0_only or dp.comm.rank == 0, Saved(), dict[str, Any]()
    for bucket in dp.buckets:
        found: Saved = {name: {} for name in bucket.names}
        all_kept = {name: _kept(bucket, name) for name in bucket.names}
        for key in dict.fromkeys(key for kept in all_kept.values() for key in kept):
            of_key = {name: kept[key] for name, kept in all_kept.items() if key in kept}
            spread = {name: value for name, value in of_key.items() if _is_spread(bucket, name, key)}
            for name, array in _gathered(dp, bucket, spread).items():
                found[name][key] = lent(array, bucket.likes[name], str(array.dtype))
            for name in of_key.keys() - spread.keys():
                found[name][key] = of_key[name]
        optimizer |= found
        if parameters:
            shard = bucket.shard
            if bucket.arrived is not None:  # it has what messages bring of the parameters
                bucket.take_what_was_written()
                shard = narrow(bucket.master, bucket.dtype)
            own = {name: shard[bucket.own(name)] for name in bucket.names}
            for name, array in _gathered(dp, bucket, own).items():
                values[name] = lent(array, bucket.likes[name])
    whole = {"optimizer": optimizer} | ({"parameters": values} if parameters else {})
    if dp.feedback:
        whole["feedback"] = {name: array for of in dp.gradients for name, array in _all_lost(dp, of).items()}
    return whole if keeps else {}


def parts_of(dp: Parts, layouts: Mapping[str, tuple[Sequence[int], Placed]]) -> Saved:
    """What this rank has, for `fompi.save` and `fompi.load`: {"parameters": ..., "optimizer": ...}, in place.

    `layouts`: the global shape of a parameter that is a part itself, and where its boxes are.
    """
    if dp.feedback or any(bucket.arrived is not None for bucket in dp.buckets):
        raise LayoutError("fompi.save takes no feedback and no wire of gathers: save what state_dict() returns")
    found: Saved = {"parameters": {}, "optimizer": {}}
    for bucket in dp.buckets:
        bucket.take_what_was_written()
        for name in bucket.names:
            own, elements, shape = bucket.own(name), bucket.elements(name), bucket.shapes[name]
            full, placed = layouts.get(name, (shape, [(whole(shape), whole(shape))]))

            def held(array: Array, dtype: str, run: slice = elements) -> Held:
                boxes, views = within(array, shape, run, placed)  # noqa: B023
                return Held(tensor_of(array, dtype), full, boxes, views)  # noqa: B023

            if bucket.full is None:
                found["parameters"][name] = held(bucket.shard[own], bucket.dtype)
            else:
                a, b = bucket.spans[name]
                found["parameters"][name] = held(bucket.full[a:b], bucket.dtype, slice(0, b - a))
            found["optimizer"][name] = {
                key: held(value, value.dtype.name) if _is_spread(bucket, name, key) else Entry(bucket.states[name], key)
                for key, value in _kept(bucket, name).items()
            }
    return found


def load_state(dp: Parts, state: Mapping[str, Any]) -> None:
    """Take the parts of this rank. All ranks have the same state, or refuse it together."""
    taken: dict[str, dict[str, Any]] = {}
    values: dict[str, Array] = {}
    lost: dict[str, Array] = {}
    refusal: Exception | None = None
    try:
        taken, values, lost = _read(dp, state)
    except Exception as error:
        refusal = error
    agree(dp.comm, f"load_state_dict of DataParallel, with{'' if values else 'out'} parameters", refusal)
    for gradients in dp.gradients:
        if gradients.feedback is not None:
            gradients.feedback.lost = _own_lost(dp, gradients.bucket, lost)
    for bucket in dp.buckets:
        for name in bucket.names:
            own, elements = bucket.own(name), bucket.elements(name)
            if name in values:
                flat, (a, b) = values[name].reshape(-1), bucket.spans[name]
                if bucket.full is not None:
                    bucket.full[a:b] = flat
                bucket.shard[own] = flat[elements]
                bucket.master[own] = widen(flat[elements], bucket.dtype)
            for key, value in taken[name].items():
                part = value.reshape(-1)[elements] if hasattr(value, "reshape") else value
                if key == MASTER:
                    is_of_value = narrow(part, bucket.dtype) == bucket.shard[own]  # else the parameter says more
                    bucket.master[own] = np.where(is_of_value, part, bucket.master[own])
                elif hasattr(value, "reshape"):
                    bucket.states[name][key][...] = part
                else:
                    bucket.states[name][key] = value
        if values:
            bucket.carry()


def _read(dp: Parts, state: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Array], dict[str, Array]]:
    """What the optimizer keeps, the parameters and what messages have lost, by name: whole arrays that fit."""
    if not isinstance(state, Mapping) or "optimizer" not in state:
        raise LayoutError("the state must be what state_dict() has returned, with the key 'optimizer'")
    _check_names("optimizer", dp, state["optimizer"])
    places = [(bucket, name) for bucket in dp.buckets for name in bucket.names]
    taken = {name: _fitting(bucket, name, state["optimizer"][name]) for bucket, name in places}
    values, lost = {}, {}
    if dp.feedback and "feedback" in state:
        _check_names("feedback", dp, state["feedback"])
        for bucket, name in places:
            lost[name] = _array(state["feedback"][name], f"feedback of {name!r}", bucket, name, bucket.wide)
    if "parameters" in state:
        _check_names("parameters", dp, state["parameters"])
        for bucket, name in places:
            values[name] = _array(state["parameters"][name], f"parameter {name!r}", bucket, name, bucket.dtype)
    return taken, values, lost


def _all_lost(dp: Parts, gradients: Gradients) -> dict[str, Any]:
    """What the messages of all ranks have lost of the gradient with which they update: of the mean, or of the sum."""
    bucket, feedback = gradients.bucket, gradients.feedback
    total = filled(bucket.size, bucket.wide, 0, bucket.master) if feedback is None else feedback.lost
    for axis in dp._axes.shards:
        total = call(all_reduce, total, dtype=bucket.wide, comm=axis, schedule=same_bits(axis))
    total = total * dp.weight
    found = {name: total[a:b].reshape(bucket.shapes[name]).copy() for name, (a, b) in bucket.spans.items()}
    return {name: lent(array, bucket.likes[name], bucket.wide) for name, array in found.items()}


def _own_lost(dp: Parts, bucket: Bucket, whole: Mapping[str, Array]) -> Array:
    """What one rank takes of that, and adds to its next gradient: of each part the rank that does not round it."""
    mine = filled(bucket.size, bucket.wide, 0, bucket.master)
    if whole and all(axis.rank == 0 for axis in dp._axes.others):
        flat = np.concatenate([whole[name].reshape(-1) for name in bucket.names])
        first, last = offsets(split(bucket.size, dp.comm.size))[dp.comm.rank :][:2]
        mine[first:last] = flat[first:last] / dp.weight
    return mine


def _kept(bucket: Bucket, name: str) -> dict[str, Any]:
    """What the optimizer keeps for the part of this rank, and its float32 copy."""
    master = {} if bucket.master is bucket.shard else {MASTER: bucket.master[bucket.own(name)]}
    return bucket.states[name] | master


def _is_spread(bucket: Bucket, name: str, key: str) -> bool:
    """True if the ranks have parts of this value, as they have of the parameter."""
    value, own = _kept(bucket, name)[key], bucket.own(name)
    return bool(getattr(value, "shape", None) == (own.stop - own.start,))


def _gathered(dp: Parts, bucket: Bucket, own: dict[str, Array]) -> dict[str, Array]:
    """The whole values, from the parts of each rank. One message for all values of a bucket."""
    if not own:
        return {}
    if not dp.zero:
        return {name: array.reshape(bucket.shapes[name]).copy() for name, array in own.items()}
    flat = np.concatenate([*own.values()])
    bits = flat.view(f"u{flat.itemsize}")  # of any dtype
    every, at, found = call(all_gather, bits, dtype=bits.dtype.name, comm=dp.comm).view(flat.dtype), 0, {}
    ranges = [[bucket.part_of(name, rank) for name in own] for rank in range(dp.comm.size)]
    whole = {name: empty(b - a, flat.dtype, flat) for name in own for a, b in [bucket.spans[name]]}
    for of_rank in ranges:
        for name, part in zip(own, of_rank, strict=True):
            whole[name][part] = every[at : (at := at + part.stop - part.start)]
    for name, array in whole.items():
        found[name] = array.reshape(bucket.shapes[name])
    return found


def _check_names(what: str, dp: Parts, given: Any) -> None:
    if not isinstance(given, Mapping):
        raise LayoutError(f"the {what} in the state must be a mapping, not {type(given).__name__}")
    for kind, names in (
        ("missing", [name for name in dp._index if name not in given]),
        ("unknown", [name for name in given if name not in dp._index]),
    ):
        if names:
            raise LayoutError(f"the {what} in the state: {len(names)} {kind} names: {', '.join(names[:MOST_NAMED])}")


def _fitting(bucket: Bucket, name: str, given: Any) -> dict[str, Any]:
    """What the optimizer keeps for a parameter, with whole arrays."""
    own = _kept(bucket, name)
    wanted = {key for key in own if key != MASTER}
    if not isinstance(given, Mapping) or {*given} - {MASTER} != wanted:
        keys = sorted(given) if isinstance(given, Mapping) else type(given).__name__
        raise LayoutError(
            f"the state of {name!r} has {keys}, but this optimizer keeps {sorted(wanted)}: take the optimizer of the "
            "run that has saved the state"
        )
    found = {}
    for key, value in given.items():
        if key == MASTER and MASTER not in own:
            continue  # it was saved for a half type
        if _is_spread(bucket, name, key):
            value = _array(value, f"{key!r} of {name!r}", bucket, name, str(own[key].dtype))
        found[key] = value
    return found


def _array(value: Any, what: str, bucket: Bucket, name: str, dtype: str) -> Array:
    """A value as an array with the shape of the parameter."""
    tensor = borrow_any(detached(value), what)
    if place(tensor.array) is None:
        tensor.array = upload(tensor.array, bucket.master)
    check_place(what, tensor.array, bucket.master)
    if tensor.array.shape != bucket.shapes[name]:
        raise ShapeError(f"{what} has the shape {tensor.array.shape}, but the parameter has {bucket.shapes[name]}")
    wide = widen(tensor.array, tensor.dtype)
    array: Array = tensor.array if tensor.dtype == dtype else narrow(wide, dtype)
    return array
