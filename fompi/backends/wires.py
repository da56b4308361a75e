"""The kernels of wires (`fompi.base.wires`) on host memory: in C where there is a compiler, else by NumPy.

All have the same bits. Elements of a half type are widened first, and rounded when they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import pairwise, starmap
from typing import Any

import numpy as np

from fompi.backends import in_c
from fompi.backends.numbers import empty, launch, narrow, place, widen
from fompi.base.layout import HALF, offsets, split
from fompi.base.wires import LARGEST, RUN, WIRES, WireFormat
from fompi.plans.kernels import DECODE, DECODE_ADD, ENCODE

Array = np.ndarray[Any, Any]


def bound(name: str, arrays: Sequence[Array], dtypes: Sequence[str]) -> Callable[[], None]:
    """The kernel on these arrays, operands first. `dtypes` are theirs. On a device a call only enqueues it."""
    if place(arrays[0]) is not None:
        return partial(launch, name, arrays[:-1], arrays[-1:], dtypes[:-1], dtypes[-1:])
    elements = arrays[0] if name in ENCODE else arrays[-1]
    if all(a.flags.c_contiguous for a in arrays):
        compiled = in_c.of_wire(name, arrays, dtypes, elements.size)
        if compiled is not None:
            return compiled
    return partial(run, name, arrays, dtypes)


def run(name: str, arrays: Sequence[Array], dtypes: Sequence[str]) -> None:
    """Run the kernel with NumPy."""
    if name in ENCODE:
        a, m = arrays
        encode(WIRES[ENCODE[name]], widen(a.reshape(-1), dtypes[0]), m)
        return
    m, c = arrays[0], arrays[-1]
    total = decode(WIRES[DECODE.get(name) or DECODE_ADD[name]], m, c.size)
    if name in DECODE_ADD:
        total = total + widen(arrays[1].reshape(-1), dtypes[1])
    c[...] = narrow(total, dtypes[-1]).reshape(c.shape)


MOST_LOST = 2.0**102
"""What is less and is added to any float32 leaves it finite."""


def lose(name: str, x: Array, lost: Array) -> None:
    """lost = what a message of this wire loses of the float32 elements of `x`, one block. 0 for MOST_LOST or a NaN."""
    wire = WIRES[name]
    m = empty((wire.nbytes(x.size),), np.uint8, x)
    bound(f"encode_{name}", [x, m], ["float32", "uint8"])()
    bound(f"decode_{name}", [m, lost], ["uint8", "float32"])()
    with np.errstate(invalid="ignore"):
        np.subtract(x, lost, out=lost)
    scales = m[: -(-x.size // RUN) * 4].view(np.float32) if wire.top else lost
    if place(lost) is not None or not (np.abs(scales) < MOST_LOST / 32).all():
        np.copyto(lost, lost.dtype.type(0), where=~(np.abs(lost) < MOST_LOST))


def lose_parts(name: str, x: Array, lost: Array, size: int, rank: int) -> None:
    """`lose` for the parts of `x` that `size` ranks own, one block each. A rank does not send its own part."""
    for owner, part in enumerate(starmap(slice, pairwise(offsets(split(x.size, size))))):
        if owner == rank:
            lost[part] = 0
        else:
            lose(name, x[part], lost[part])


class Feedback:
    """Error feedback: what the messages of a rank lose is added to what it sums next (Seide et al., Interspeech 2014).

    It is for sums by the schedule `direct`, in one slice. A sum that fails changes nothing: what it loses counts from
    `keep()` on. `lost` is kept in float32, whatever the dtype of what is summed.
    """

    def __init__(self, wire: str, size: int, rank: int, lost: Array):
        self._wire, self.ranks = wire, (size, rank)
        self.lost = lost
        self._losing: Array | None = None
        self._spare: Array | None = None

    def give_back(self, x: Array, dtype: str = "float32", held: Sequence[slice] = ()) -> None:
        """Add to x what was lost, but for the parts `held`, and note what its messages lose."""
        total = widen(x, dtype)
        before = [total[part].copy() for part in held]
        np.add(total, self.lost, out=total)
        for part, elements in zip(held, before, strict=True):
            total[part] = elements
        if dtype == "float16":
            np.clip(total, -65504, 65504, out=total, where=np.isfinite(total))
        x[...] = narrow(total, dtype)
        losing = self._spare if self._spare is not None else np.empty_like(total)
        sent = widen(x, dtype)
        lose_parts(self._wire, sent, losing, *self.ranks)
        if sent is not total:  # x is of a half type, so it has lost something itself
            with np.errstate(invalid="ignore"):
                rounded = total - sent
            losing += np.where(np.isfinite(rounded), rounded, rounded.dtype.type(0))
        self._losing, self._spare = losing, None

    def keep(self, held: Iterable[slice] = ()) -> None:
        """The sum has come to its end. Of the parts `held` it is not used: what they had lost is still to give back."""
        if self._losing is not None:
            for part in held:
                self._losing[part] = self.lost[part]
            self.lost, self._spare, self._losing = self._losing, self.lost, None

    def forget(self) -> None:
        """The sum has failed."""
        self._losing = None


def half_unit(name: str, m: Array, size: int) -> tuple[float, float]:
    """(how far an element of a block may be off, the largest magnitude that it can have), from what was sent of it."""
    wire = WIRES[name]
    if wire.top:
        scale = float(m[: -(-size // RUN) * 4].view(np.float32).max(initial=0.0))
        largest = scale * wire.top
        off = wire.of_scale * scale + wire.of_itself * largest + wire.least
    else:
        largest = float(np.abs(decode(wire, m, size)).max(initial=0.0))
        off = wire.of_itself * largest / (1 - wire.of_itself) + wire.least
    return (off, largest) if np.isfinite(largest) else (np.inf, np.inf)


def carry(name: str, x: Array, dtype: str, edges: Sequence[int]) -> None:
    """x = what messages of this wire carry of x, one block for each part between two of the edges."""
    for part in starmap(slice, pairwise(edges)):
        m = empty((WIRES[name].nbytes(part.stop - part.start),), np.uint8, x)
        bound(f"encode_{name}", [x[part], m], [dtype, "uint8"])()
        bound(f"decode_{name}", [m, x[part]], ["uint8", dtype])()


def encode(wire: WireFormat, a: Array, m: Array) -> None:
    """m = the float32 elements of `a` (one dimension) on the wire. m: bytes."""
    with np.errstate(all="ignore"):
        if wire.name in HALF:
            bits = a.view(np.uint32)
            no_infinity = (bits & 0x7FFFFFFF) - 0x7F7F8000 < 0x8000  # finite, but nearer to that in bfloat16
            codes = narrow(np.where(no_infinity, bits & 0xFFFF0000, bits).view(np.float32), wire.name).view(np.uint8)
            m[: codes.size], m[codes.size :] = codes, 0
            return
        count = -(-a.size // RUN)
        runs = np.zeros((count, RUN), np.float32)
        runs.reshape(-1)[: a.size] = a
        top = np.abs(runs).max(1)
        most = np.minimum(top, np.float32(LARGEST))
        scales = np.where(np.isfinite(top), most / np.float32(wire.top), np.float32(np.nan))
        scaled = np.where(scales[:, None] > 0, runs / scales[:, None], np.float32(0))  # zeros for 0 and NaN
        codes = _CODES[wire.name](scaled.reshape(-1)[: a.size])
    m[: 4 * count] = scales.astype(np.float32).view(np.uint8)
    m[4 * count : 4 * count + codes.size], m[4 * count + codes.size :] = codes, 0


def decode(wire: WireFormat, m: Array, size: int) -> Array:
    """The `size` float32 elements of a block on the wire."""
    with np.errstate(all="ignore"):
        if wire.name in HALF:
            return widen(m[: 2 * size].view(np.uint16 if wire.name == "bfloat16" else np.float16), wire.name)
        count = -(-size // RUN)
        numbers = np.zeros(count * RUN, np.float32)
        numbers[:size] = _NUMBERS[wire.name](m[4 * count :], size)
        return (numbers.reshape(count, RUN) * m[: 4 * count].view(np.float32)[:, None]).reshape(-1)[:size]


def _int8_codes(x: Array) -> Array:
    return np.clip(np.rint(np.nan_to_num(x)), -127, 127).astype(np.int8).view(np.uint8)


def _int8_numbers(codes: Array, size: int) -> Array:
    return codes[:size].view(np.int8)


def _int4_codes(x: Array) -> Array:
    codes = np.zeros(-(-x.size // 2) * 2, np.uint8)
    codes[: x.size] = np.clip(np.rint(np.nan_to_num(x)), -7, 7).astype(np.int8).view(np.uint8) & 15
    return codes[::2] | codes[1::2] << 4


def _int4_numbers(codes: Array, size: int) -> Array:
    pairs = np.stack([codes << 4, codes & 0xF0], 1).reshape(-1)[:size]
    return pairs.view(np.int8) >> 4


def _fp8_codes(x: Array) -> Array:
    bits = np.nan_to_num(x).astype(np.float32).view(np.uint32)
    sign, size = (bits >> 24 & 0x80).astype(np.uint8), (bits & 0x7FFFFFFF).view(np.float32)
    small = np.rint(size * np.float32(512)).astype(np.uint32)  # below 2**-6 the steps are 2**-9
    rounded = (bits & 0x7FFFFFFF) + 0x7FFFF + (bits >> 20 & 1)
    normal = np.minimum((rounded >> 20) - (120 << 3), 0x7E)
    return sign | np.where(size < 2.0**-6, small, normal).astype(np.uint8)


@cache
def _fp8_values() -> Array:
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    size = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10.0), fraction * 2.0**-9)
    return np.where(codes & 0x80, -size, size).astype(np.float32)


def _fp8_numbers(codes: Array, size: int) -> Array:
    numbers: Array = _fp8_values()[codes[:size]]
    return numbers


_CODES: dict[str, Callable[[Array], Array]] = {"int8": _int8_codes, "int4": _int4_codes, "fp8_e4m3": _fp8_codes}
_NUMBERS: dict[str, Callable[[Array, int], Array]] = {
    "int8": _int8_numbers, "int4": _int4_numbers, "fp8_e4m3": _fp8_numbers
}  # fmt: skip
"""What is scaled to and from bytes."""
