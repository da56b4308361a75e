"""Which kernels there are in C, and sums of half types by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fompi.base.wires import WIRES
from fompi.native.numbers import number
from fompi.plans.dependencies import divisor
from fompi.plans.kernels import DECODE, DECODE_ADD, ENCODE, MOVES

run: Callable[..., None] | None
"""The kernels of C. They need no MPI: calls that Python carries out use them, too. None: there was no compiler."""

try:
    from fompi.native._native import kernel as run
except ImportError:
    run = None


def _numbers(*names: str) -> dict[str, int]:
    return {name: number(name.upper()) for name in names}


COPY, MEAN, BYTE = number("COPY"), number("MEAN"), number("BYTE")

KERNELS = _numbers("add", "prod", "max", "min")

NOT_COMPLEX = {KERNELS[name] for name in ("prod", "max", "min")}

BITS = (8, 16, 32, 64)

DTYPES = {
    **_numbers("float32", "float64", "complex64", "complex128", *(f"uint{bits}" for bits in BITS)),
    **{f"int{bits}": number(f"UINT{bits}") for bits in BITS},
}
"""Integers wrap, so signed ones are added as unsigned ones."""

ORDERED = {"bool": number("UINT8"), **_numbers(*(f"int{bits}" for bits in BITS))}
"""The dtypes of maxima and minima, where they are others."""

HALF_DTYPES = _numbers("bfloat16", "float16")
"""Half types. Sums of them may be kept in float32: the flags of the kernel say which operands are."""

WIRE_KERNELS = (number("ENCODE"), ENCODE), (number("DECODE"), DECODE), (number("DECODE_ADD"), DECODE_ADD)
"""The kernels of wires. Their dtype is the number of the wire, their flags are the dtypes of operands and result."""

WIRE_NUMBERS = {name: number(f"WIRE_{name.partition('_')[0].upper()}") for name in WIRES}

WIRE_DTYPES = {"uint8": BYTE, **_numbers("float32", "bfloat16", "float16")}
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
    in_order = ORDERED.get(dtype) if name in ("max", "min") else None
    of_c = in_order or DTYPES.get(dtype)
    if len({*dtypes}) > 1 or of_c is None or known == COPY or (known in NOT_COMPLEX and "complex" in dtype):
        return None
    return None if count and "int" in dtype else KernelInC(known, of_c, count or 1, 0)


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
