"""Wires: the forms in which messages carry the elements of a block in fewer bytes.

| wire       | bits of an element | an element of a run with the largest magnitude A is off by at most  |
|------------|--------------------|---------------------------------------------------------------------|
| `bfloat16` | 16                 | 2^-8 of its own magnitude                                           |
| `float16`  | 16                 | 2^-11 of its own, or 2^-25; above 65504 it is infinite              |
| `int8`     | 8.5                | A / 254                                                             |
| `fp8_e4m3` | 8.5                | 2^-4 of its own magnitude, or A * 2^-10 / 448                       |
| `int4`     | 4.5                | A / 14                                                              |

The elements of a block are cut into runs of RUN elements, the last one may be shorter. The last three wires have a
scale for each run: A / 127, A / 448 or A / 7 in float32. A block on the wire is all its scales, then all its elements,
then zeros up to a multiple of 4 bytes. Elements are rounded to the nearest, ties to even. If a run has a NaN or an
infinity, all of it is NaN (with a scale), so that an overflow stays visible. `bfloat16` rounds no finite element to an
infinity. Magnitudes below 2^-126 have no relative bound: they may be off by `least` more.
"""

from __future__ import annotations

from typing import NamedTuple

from fompi.base.errors import DtypeError, quoted

RUN = 64
"""The elements that share a scale."""

LARGEST = float.fromhex("0x1.fffffp+127")
"""A run with a larger finite element has the scale of this one: it is rounded, and times `top` it must be finite."""


class WireFormat(NamedTuple):
    """`bits` of an element. `top`: the scale of a run is its largest magnitude by this number; 0: there is no scale.

    An element that is decoded is off by at most `of_scale` times its scale plus `of_itself` times its magnitude plus
    `least`. The first has a margin for the rounding of the scale itself.
    """

    name: str
    bits: int
    top: float
    of_scale: float
    of_itself: float
    least: float

    @property
    def each(self) -> float:
        """The bytes of an element in a large block."""
        return self.bits / 8 + (4 / RUN if self.top else 0.0)

    def nbytes(self, count: int) -> int:
        """The bytes of a block of `count` elements."""
        scales = 4 * -(-count // RUN) if self.top else 0
        return scales + -(-count * self.bits // 32) * 4


WIRES = {
    wire.name: wire
    for wire in (
        WireFormat("bfloat16", 16, 0.0, 0.0, 2.0**-8, 2.0**-134),
        WireFormat("float16", 16, 0.0, 0.0, 2.0**-11, 2.0**-25),
        WireFormat("int8", 8, 127.0, 0.5001, 0.0, 2.0**-140),
        WireFormat("fp8_e4m3", 8, 448.0, 2.0**-10, 1.0001 * 2.0**-4, 2.0**-138),
        WireFormat("int4", 4, 7.0, 0.5001, 0.0, 2.0**-140),
    )
}

WIDE = {"float32": tuple(WIRES), "float16": ("int8", "fp8_e4m3", "int4"), "bfloat16": ("int8", "fp8_e4m3", "int4")}
"""The wires for elements of each dtype."""


def wire_of(name: object, dtype: str) -> str:
    """The wire of this name for elements of `dtype`. None, and the dtype itself, are no wire: an empty name.

    Raises DtypeError.
    """
    if name is None or name == "" or name == dtype:
        return ""
    if name not in WIRES:
        raise DtypeError(f"wire={quoted(name, WIRES)}: known are {', '.join(WIRES)}")
    if name not in WIDE.get(dtype, ()):
        usable = WIDE.get(dtype)
        which = f"takes {', '.join(usable)}" if usable else "is sent as it is: only float32 and half types take a wire"
        raise DtypeError(f"wire={name!r}: {dtype} {which}")
    return str(name)
