"""Buckets of parameters: how they are cut, and the options of a `DataParallel`.

`buckets` finds the best cut from the bytes and the seconds of the parameters, without MPI.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from fompi.backends.cuda.failures import OutOfMemory
from fompi.backends.half import storage
from fompi.backends.numbers import place, stored
from fompi.base.differences import MOST_NAMED as MOST_NAMED
from fompi.base.differences import detail
from fompi.base.errors import DeviceError, DtypeError, LayoutError, ShapeError
from fompi.base.layout import accumulator, integer
from fompi.base.wires import wire_of
from fompi.engine.communicator import Communicator
from fompi.model.flow_shop import Job, announced_units, makespan
from fompi.model.machine import Machine
from fompi.parallel.arrays import borrow_any, check_place
from fompi.plans.problems import order_of
from fompi.plans.tree import Canonical
from fompi.tensors import dlpack
from fompi.tensors.dlpack import Tensor

Array = np.ndarray[Any, Any]

DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Buckets:
    """A cut of parameters into buckets, in the order of first use: `counts[k]` parameters are in bucket k.

    `backward[k]` are the seconds of the backward of bucket k, `sums[k]` those of its reduce-scatter. The backward
    begins with the last bucket.
    """

    counts: tuple[int, ...]
    nbytes: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()
    sums: tuple[float, ...] = ()

    @cached_property
    def seconds(self) -> float:
        """Seconds of the backward with all sums."""
        return makespan([Job(b, g) for b, g in zip(reversed(self.backward), reversed(self.sums), strict=True)])

    @property
    def exposed(self) -> float:
        """Seconds of the sums that no backward hides: max over k of sums[:k + 1] - backward[:k]."""
        return self.seconds - sum(self.backward)

    def __str__(self) -> str:
        sums = sum(self.sums)
        share = f", {1 - self.exposed / sums:.1%} hidden" if sums else ""
        lines = [
            f"{len(self.counts)} buckets of {sum(self.counts)} parameters: backward {1e3 * sum(self.backward):.3f} ms, "
            f"sums {1e3 * sums:.3f} ms, exposed {1e3 * self.exposed:.3f} ms{share}",
            "bucket  parameters          bytes     ready    leaves      done   (ms, the backward begins at 0)",
        ]
        ready = done = 0.0
        for k in reversed(range(len(self.counts))):
            ready += self.backward[k]
            leaves = max(ready, done)
            done = leaves + self.sums[k]
            times = "".join(f"{1e3 * t:10.3f}" for t in (ready, leaves, done))
            lines.append(f"{k:6}{self.counts[k]:12}{self.nbytes[k]:15,.0f}{times}")
        return "\n".join(lines)


def buckets(sizes: Sequence[float], seconds: Sequence[float], machine: Machine | str, *, ranks: int = 2) -> Buckets:
    """The cut with the least exposed time of the sums, among all cuts.

    `sizes` are the bytes of the gradient of each parameter, `seconds` the time of its backward, both in the order of
    first use. A bucket leaves when the backward of all its parameters is done and the previous bucket has left. A
    larger bucket costs fewer latencies, but leaves later. The last bucket has no backward behind it, so it is small.
    Exact, in O(parameters^2) (`fompi.model.flow_shop`). Nothing is measured or sent.

        print(buckets([4e6] * 32, [1e-3] * 32, "gigabit", ranks=8))
        DataParallel(params, ..., bucket_nbytes=buckets(sizes, seconds, machine, ranks=comm.size))
    """
    if len(sizes) != len(seconds) or not all(n >= 0 for n in (*sizes, *seconds)):
        raise LayoutError(f"{len(sizes)} sizes and {len(seconds)} seconds must be as many, and at least 0")
    model = Machine.of(machine)
    behind = list(accumulate(reversed(sizes), initial=0.0))  # the backward runs from the last parameter to the first

    def sum_seconds(nbytes: float) -> float:
        return model.library("reduce_scatter", nbytes * (1 + 1 / ranks), ranks) if nbytes else 0.0

    groups = announced_units(list(accumulate(reversed(seconds))), lambda i, j: sum_seconds(behind[j] - behind[i]))
    counts = tuple(reversed(groups.sizes))
    edges = list(accumulate(counts, initial=0))
    nbytes, backward = (tuple(float(sum(of[a:b])) for a, b in pairwise(edges)) for of in (sizes, seconds))
    return Buckets(counts, nbytes, backward, tuple(map(sum_seconds, nbytes)))


LAST_SHARE = 16
"""The last bucket of a backward is cut at 1/16 of the size of the others."""


def cut_by_bytes(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """How many parameters each bucket has, in the order of first use, if nothing is known but their bytes.

    A bucket has at most `most` bytes, or one parameter. Towards the end of the backward each bucket has half of what
    is left, because the last bucket has no backward behind it.
    """
    counts: list[int] = []
    left, begin = sum(sizes), len(sizes)
    while begin:
        cap, filled, end = min(most, max(left // 2, most // LAST_SHARE)), 0, begin
        while begin and (begin == end or filled + sizes[begin - 1] <= cap):
            begin -= 1
            filled += sizes[begin]
        counts.append(end - begin)
        left -= filled
    return tuple(reversed(counts))


def kept_nbytes(tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """The bytes of all parameters, and of all gradients."""
    listed = [(t.array.nbytes, t.array.size * storage(accumulator(t.dtype)).itemsize) for t in tensors.values()]
    return sum(n for n, _ in listed), sum(n for _, n in listed)


def in_less_memory(
    error: OutOfMemory, kept: tuple[int, int], zero: int, size: int, largest: int | None = None
) -> DeviceError:
    """The error, with what needs less of the device. `kept`: `kept_nbytes`. `largest`: the most bytes of a bucket."""
    words, (parameters, gradients) = [str(error)], kept
    fits = error.free // SUMS_IN_FLIGHT
    if largest is not None and 0 < fits < largest:
        words.append(f"the largest bucket has {largest} bytes, and bucket_nbytes={fits} would fit")
    spread = {2: gradients, 3: gradients + parameters}
    less = {level: (spread[level] - spread.get(zero, 0)) * (size - 1) // size for level in spread if level > zero}
    words += [f"zero={level} keeps {nbytes} bytes less" for level, nbytes in less.items() if nbytes]
    return DeviceError(". ".join(words))


SUMS_IN_FLIGHT = 4
"""A sum on its way needs its result and what is sent, and the next bucket begins before the last one has ended."""


def detached(x: Any) -> Any:
    return x.detach() if dlpack.requires_grad(x) else x


def borrowed(params: Mapping[str, Any]) -> dict[str, Tensor]:
    if not isinstance(params, Mapping):
        raise ShapeError(f"params must map names to tensors, not {type(params).__name__}: pass dict(name=tensor, ...)")
    tensors = {name: borrow_any(detached(x), f"the parameter {name!r}") for name, x in params.items()}
    if not tensors:
        raise ShapeError("DataParallel needs at least one parameter")
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise DtypeError(f"the parameter {name!r} is {tensor.dtype}; DataParallel takes {', '.join(DTYPES)}")
        check_place(f"the parameter {name!r}", tensor.array, next(iter(tensors.values())).array)
    return tensors


def _held(name: str, value: Any) -> int | Array:
    """How many ranks hold a parameter: one number, from a communicator, or the numbers of its elements."""
    if not hasattr(value, "__array__"):
        return Communicator.of(value).size
    try:
        counts = np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise LayoutError(f"replicated= has no numbers for {name!r}: {error}") from None
    if counts.size and counts.min() < 1:
        raise LayoutError(f"replicated= says that {counts.min():g} ranks hold an element of {name!r}: at least 1 does")
    return counts


def check_clip(clip: Any) -> None:
    try:
        fits = clip is None or bool(clip >= 0)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise LayoutError(f"clip={clip!r} must be None or a number of at least 0, the largest norm")


def clip_factor(norm: Any, most: float) -> Any:
    """What gradients of this norm are multiplied by, so that it is at most `most`. NaN stays NaN, as in torch."""
    factor = most / (norm + 1e-6)
    if place(factor) is not None:
        return np.where(factor > 1.0, factor.dtype.type(1), factor)
    return 1.0 if factor > 1.0 else factor


@dataclass(frozen=True)
class Options:
    """The keywords of a `DataParallel`, with their defaults. What it means is said there."""

    zero: int = 1
    replicas: Any = None
    bucket_nbytes: int | Buckets = 25 << 20
    average: bool = True
    replicated: Mapping[str, Any] | None = None
    microbatches: int = 1
    wire_gather: str | None = None
    ahead_nbytes: int | None = None
    check_for_nan: bool = False
    over: Any = ()
    shares: Any = None

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise the error of what does not fit these parameters."""
        if self.zero not in (0, 1, 2, 3):
            raise LayoutError(f"zero={self.zero!r} must be 0, 1, 2 or 3")
        if integer(self.microbatches) is None or self.microbatches < 1:
            raise LayoutError(f"microbatches={self.microbatches!r} must be an integer of at least 1")
        if any([wire_of(self.wire_gather, t.dtype) for t in tensors.values()]) and not self.zero:
            why = "with zero=0 no parameter is gathered"
            raise LayoutError(f"wire_gather={self.wire_gather!r} needs zero=1, 2 or 3: {why}")
        if self.ahead_nbytes is not None and (integer(self.ahead_nbytes) is None or self.ahead_nbytes < 0):
            raise LayoutError(f"ahead_nbytes={self.ahead_nbytes!r} must be an integer of at least 0")

    def holders(self, tensors: Mapping[str, Tensor]) -> dict[str, int | Array]:
        """How many ranks hold each parameter of `replicated`: one number, or the numbers of its elements in a row."""
        if not isinstance(self.replicated or {}, Mapping):
            raise LayoutError(f"replicated={self.replicated!r} must map names to communicators, or to counts")
        found = {name: _held(name, value) for name, value in (self.replicated or {}).items()}
        if unknown := [name for name in found if name not in tensors]:
            raise LayoutError(f"replicated= names {unknown[0]!r}, which is no parameter")
        for name, counts in found.items():
            if not isinstance(counts, int):
                if counts.shape != tensors[name].array.shape:
                    raise ShapeError(
                        f"replicated= counts holders of {name!r} in the shape {counts.shape}, but the parameter has "
                        f"{tensors[name].array.shape}"
                    )
                found[name] = counts.reshape(-1)
        return found

    def __str__(self) -> str:
        """What must be the same on all ranks, but for the communicators and the cut."""
        names = ("zero", "average", "microbatches", "wire_gather", "ahead_nbytes")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def check_order(how: Mapping[str, Any], options: Options, tensors: Mapping[str, Tensor], size: int) -> Canonical | None:
    """The leaves in whose order gradients are added, if it has some. Raises the error of one that cannot be kept."""
    name = order_of(how.get("order", "any"))
    if name != "any" and ("wire" in how or options.wire_gather is not None):
        raise LayoutError(f"order={name}: gradients and parameters with a wire have no order")
    if (canonical := Canonical.of(name)) is not None:
        counts = canonical.counts(size)  # it raises PlanError
        if options.zero == 3 and len({*counts}) > 1:
            why = "each leaf gathers the parameters, so all ranks must have as many"
            raise LayoutError(f"order={name}, zero=3: {why}: choose a multiple of {size} leaves, or zero=2")
        if options.replicas is not None:
            raise LayoutError(f"order={name}: leaves are those of one axis, so there are no replicas=")
        if any(place(t.array) is not None for t in tensors.values()):
            raise LayoutError(f"order={name}: leaves are added on the host: parameters of a device have order='ranks'")
    return canonical


def cut(sizes: Sequence[int], dtypes: Sequence[Any], most: int | Buckets) -> list[int]:
    """How many parameters each bucket has, from their bytes. The parameters of a bucket have the same dtype."""
    if isinstance(most, Buckets):
        counts: Sequence[int] = most.counts
        if sum(counts) != len(sizes) or min(counts, default=0) < 1:
            raise LayoutError(f"bucket_nbytes= cuts {sum(counts)} parameters, but there are {len(sizes)}")
    elif integer(most) is None or most < 1:
        raise LayoutError(f"bucket_nbytes={most!r} must be an integer of at least 1, or Buckets")
    else:
        counts = cut_by_bytes(sizes, int(most))
    changes = {i for i in range(1, len(sizes)) if dtypes[i] != dtypes[i - 1]}
    edges = sorted({0, *changes, *accumulate(counts)})
    return [b - a for a, b in pairwise(edges)]


def in_words(tensors: Mapping[str, Tensor]) -> str:
    """The parameters in their order, and a checksum of their values: what must be the same on all ranks."""
    words = ""
    for name, tensor in tensors.items():
        array = tensor.array if place(tensor.array) is None else stored(tensor.array).get()
        values = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        words += detail(f"parameter {name!r}", f"{tensor.dtype} {array.shape}", values)
    return words


def held_in_words(holders: Mapping[str, int | Array]) -> str:
    """How many ranks hold each parameter, with a checksum where the elements differ."""
    held = {
        name: (f"{n} ranks",) if isinstance(n, int) else ("", zlib.crc32(n.tobytes())) for name, n in holders.items()
    }
    return "".join(detail(f"replicated[{name!r}]", *value) for name, value in held.items())
