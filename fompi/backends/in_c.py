"""Which kernels there are in C, by the numbers of `native/half.h`, and sums of half types by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fompi.base.wires import WIRES
from fompi.plans.dependencies import divisor
from fompi.plans.kernels import DECODE, DECODE_ADD, ENCODE, MOVES

run: Callable[..., None] | None
"""The kernels of C. They need no MPI: calls that Python carries out use them, too. None: there was no compiler."""

try:
    from fompi.native._native import kernel as run
except ImportError:
    run = None

COPY, MEAN, BYTE = 0, 3, 0

KERNELS = {"add": 1, "prod": 2, "max": 4, "min": 5}

NOT_COMPLEX = frozenset((2, 4, 5))

DTYPES = {
    "float32": 1, "float64": 2, "int8": 4, "uint8": 4, "int16": 5, "uint16": 5, "int32": 6, "uint32": 6,
    "int64": 7, "uint64": 7, "complex64": 8, "complex128": 9,
}  # fmt: skip
"""Integers wrap, so signed ones are added as unsigned ones."""

ORDERED = {"bool": 4, "int8": 11, "int16": 12, "int32": 13, "int64": 14}
"""The dtypes of maxima and minima, where they are others."""

HALF_DTYPES = {"bfloat16": 3, "float16": 10}
"""Half types. Sums of them may be kept in float32: the flags of the kernel say which operands are."""


WIRE_KERNELS = (6, ENCODE), (7, DECODE), (8, DECODE_ADD)
"""The kernels of wires. Their dtype is the number of the wire, their flags are the dtypes of operands and result."""

WIRE_NUMBERS = {name: number for number, name in enumerate(WIRES)}

WIRE_DTYPES = {"uint8": 0, "float32": 1, "bfloat16": 3, "float16": 10}
"""The dtypes of what kernels of wires work on: bytes of the wire, and elements."""


class KernelInC(NamedTuple):
    """A kernel of C: its numbers. A copy has its operand twice."""

    kernel: int
    dtype: int
    divisor: int
    flags: int


def kernel_of(name: str, reads: Sequence[str], writes: Sequence[str]) -> KernelInC | None:
    """The kernel for operands and a result of these dtypes. None: C has none."""
    for kernel, wires in WIRE_KERNELS:
        if name in wires:
            wide = [WIRE_DTYPES[d] for d in (*reads, *reads[: 2 - len(reads)], *writes)]
            return KernelInC(kernel, WIRE_NUMBERS[wires[name]], 1, wide[0] | wide[1] << 4 | wide[2] << 8)
    count, dtypes = divisor(name), [*reads, *writes]
    known = KERNELS.get(name) if count is None else MEAN
    if name in MOVES and len(reads) == 1:
        known, dtypes = COPY, [*reads, *reads, *writes]
    if known is None or len(dtypes) != 3 or len(writes) != 1:
        return None
    if known == COPY and len({*dtypes}) == 1:
        return KernelInC(COPY, BYTE, 1, 0)
    halves = {*dtypes} - {"float32"}
    if len(halves) == 1 and not halves.isdisjoint(HALF_DTYPES):
        flags = sum(1 << k for k, dtype in enumerate(dtypes) if dtype == "float32")
        return KernelInC(known, HALF_DTYPES[halves.pop()], count or 1, flags)
    dtype = dtypes[0]
    number = ORDERED.get(dtype) if name in ("max", "min") else None
    number = number or DTYPES.get(dtype)
    if len({*dtypes}) > 1 or number is None or known == COPY or (known in NOT_COMPLEX and "complex" in dtype):
        return None
    return None if count and "int" in dtype else KernelInC(known, number, count or 1, 0)


def bound(name: str, reads: Sequence[Any], writes: Sequence[Any], dtypes: Any) -> Callable[[], None] | None:
    """The kernel on these contiguous arrays. None: it must be NumPy's. `dtypes` are those of reads and of writes."""
    call, arrays = run, (*reads, *writes)
    known = None if call is None else kernel_of(name, *dtypes)
    if (
        call is None
        or known is None
        or known.dtype == BYTE
        or not all(a.flags.c_contiguous and a.size == arrays[-1].size for a in arrays)
    ):
        return None
    addresses = [a.ctypes.data for a in (*reads, *reads[: 2 - len(reads)], *writes)]
    return _at(call, known, addresses, arrays, arrays[-1].size)


def of_wire(name: str, arrays: Sequence[Any], dtypes: Sequence[str], count: int) -> Callable[[], None] | None:
    """The kernel of a wire on these contiguous arrays, operands first, for a block of `count` elements. None: no C."""
    call = run
    if call is None:
        return None
    known = kernel_of(name, dtypes[:-1], dtypes[-1:])
    assert known is not None
    addresses = [a.ctypes.data for a in (*arrays[:-1], *arrays[: 3 - len(arrays)], arrays[-1])]
    return _at(call, known, addresses, arrays, count)


def _at(
    call: Callable[..., None], known: KernelInC, addresses: Sequence[int], arrays: Sequence[Any], count: int
) -> Callable[[], None] | None:
    """The kernel at these addresses, where the arrays are. None: this compiler does not have it."""
    try:
        call(*known, 0, 0, 0, 0)
    except ValueError:  # this compiler has no float16
        return None

    def compute(arrays: Any = arrays) -> None:  # which must stay
        call(*known, *addresses, count)

    return compute
