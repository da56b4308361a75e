"""Which function of `kernels.cu` computes a kernel on arrays of a device, and with which arguments. Pure.

| kernel                                 | means                                                                     |
|----------------------------------------|---------------------------------------------------------------------------|
| `copy(a) -> c`, `pack(a) -> c`         | c = a, in the dtype of c                                                  |
| `add(a, b) -> c`                       | c = a + b                                                                 |
| `max`, `min`, `prod`, `mean4(a, b) -> c` | those of `fompi.plans.kernels`, which combine two terms of a reduction  |

Besides them, `encode_W`, `decode_W` and `decode_add_W` of each wire W (`fompi.plans.kernels`), on contiguous blocks.

Half types are computed in float32 and rounded once, to the nearest even. No result may overlap an operand, except that
the result of an elementwise kernel may replace one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fompi.backends.base import Dtypes
from fompi.backends.cuda.device import Arrays
from fompi.backends.cuda.products import Matrix
from fompi.base.errors import DeviceError, DtypeError, ShapeError, quoted
from fompi.base.wires import RUN, WIDE, WIRES
from fompi.plans.dependencies import divisor
from fompi.plans.kernels import DECODE_ADD, ENCODE, OF_WIRES, find
from fompi.tensors.device_array import DeviceArray

THREADS = 256
"""Of a block."""

MOST_BLOCKS = 1 << 13
"""Of a launch. The threads of a larger call work on several elements each."""

MOST_DIMS = 5
"""After dimensions that lie together are joined. As in `kernels.cu`."""

UNITS = {16: "u128", 8: "u64", 4: "u32", 2: "u16", 1: "u8"}
"""The types that only move, by their bytes."""

TYPES = {
    "float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "complex64": "c64", "complex128": "c128",
    **{f"{kind}{8 * nbytes}": UNITS[nbytes] for kind in ("int", "uint") for nbytes in (1, 2, 4, 8)},
}  # fmt: skip
"""The types of `kernels.cu`, by the dtype. A sum of signed integers has the same bits as one of unsigned integers."""

FLOATS = ("float32", "float16", "bfloat16")
"""The dtypes that are computed in float32. A sum or a copy may convert between them."""

LAYOUT = np.dtype([("count", "i8"), ("dims", "i8"), ("size", "i8", MOST_DIMS), ("stride", "i8", (3, MOST_DIMS))])
CHAIN_SIZES = np.dtype(
    [(name, "i8") for name in ("m", "n", "k", "leaves", "x_step", "x_across", "w_step", "w_across", "y_step", "adds")]
)
"""The structures of `kernels.cu`."""


class Launch(NamedTuple):
    """One launch: `cupy.RawModule(...).get_function(function)(grid, block, args)`.

    Pointers are integers. Other arguments are NumPy scalars, and arrays without dimensions: structures by value.
    """

    function: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[Any, ...]


@cache
def source() -> str:
    """The text of `kernels.cu`. NVRTC compiles it without headers, as C++17."""
    return files(__package__).joinpath("kernels.cu").read_text()


PARTS = (("copy", "cast", "add"), ("max", "min", "prod", "mean"), ("encode", "decode"), ("chain",))
"""The first words of the functions in each part of `kernels.cu`."""


def part_of(function: str) -> int:
    """The part of `kernels.cu` that has this function. NVRTC compiles only the parts that are used."""
    word = function.partition("_")[0]
    return next(part for part, words in enumerate(PARTS) if word in words)


def launches(name: str, reads: Arrays, writes: Arrays, read_dtypes: Dtypes, write_dtypes: Dtypes) -> list[Launch]:
    """The launches that compute the kernel `name` on these arrays, in order. A call without elements has none.

    Rows of a kernel without a wire may be in several chunks. Raises DeviceError for another kernel, DtypeError or
    ShapeError for operands that it does not take.
    """
    if name in OF_WIRES:
        return _of_wire(name, reads, writes[0], read_dtypes, write_dtypes[0])
    if name not in NAMES and divisor(name) is None:
        raise DeviceError(f"there is no kernel {quoted(name, NAMES)} for a device; there are {', '.join(NAMES)}")
    kernel = find(name)
    columns = zip(*kernel.rows(reads), writes, strict=True)
    dtypes = zip(*kernel.rows(read_dtypes), write_dtypes, strict=True)
    return [
        launch
        for (*a, c), (*of_a, of_c) in zip(columns, dtypes, strict=True)
        for launch in _elementwise(name, c, a, of_c, of_a)
    ]


# -------------------------------------------------------------------------------------------------------- elementwise


def _elementwise(name: str, c: DeviceArray, operands: Arrays, dtype: str, dtypes: Sequence[str]) -> list[Launch]:
    all_of, count = (dtype, *dtypes), divisor(name)
    scalars: tuple[Any, ...] = ()
    if name in ("copy", "pack") and set(all_of) == {dtype}:
        return _moved(c, operands[0])
    if name in ("copy", "pack"):
        _check(name, set(all_of) <= {*FLOATS}, all_of)
        function = f"cast_{TYPES[dtype]}_{TYPES[dtypes[0]]}"
    elif name == "add":
        one_half = not {"float16", "bfloat16"} <= {*all_of}
        _check(name, (set(all_of) <= {*FLOATS} and one_half) or (len({*all_of}) == 1 and dtype in TYPES), all_of)
        function = "_".join(("add", *(TYPES[each] for each in all_of)))
    else:
        kind = "mean" if count is not None else name
        types = [_type(kind, each) for each in all_of]
        _check(name, all(types) and (len({*all_of}) == 1 or all_of[-2:] in _of_half(dtype, kind)), all_of)
        function = "_".join((kind, *types))
        if count is not None:
            scalars = (np.dtype("f8" if dtype in ("float64", "complex128") else "f4").type(count),)
    _same_shapes(name, c.shape, [a.shape for a in operands])
    shape, strides = _joined(c.shape, [a.strides for a in (c, *operands)])
    sizes = [a.dtype.itemsize for a in (c, *operands)]
    pointers = [a.ptr for a in (c, *operands)]
    many = 16 // min(sizes)
    contiguous = bool(shape) and all(s[-1] == size for s, size in zip(strides, sizes, strict=True))
    if contiguous and shape[-1] % many == 0 and _aligned(pointers, strides, [min(16, many * n) for n in sizes]):
        function, shape = f"{function}_v", (*shape[:-1], shape[-1] // many)
        strides = [(*s[:-1], many * s[-1]) for s in strides]
    return _launch(function, prod(shape), _layout(name, shape, strides), *pointers, *scalars)


COMBINES = ("add", "max", "min", "prod")
"""The kernels of two operands that combine two terms of a reduction, other than the mean."""


def _type(kind: str, dtype: str) -> str:
    """The type of `kernels.cu` with which a kernel combines terms of `dtype`. Empty: it does not."""
    is_complex, is_integer = dtype.startswith("complex"), "int" in dtype
    if kind in ("max", "min"):
        signed = f"i{8 * np.dtype(dtype).itemsize}" if dtype.startswith("int") else TYPES.get(dtype, "")
        return "" if is_complex else "u8" if dtype == "bool" else signed
    return "" if kind == "mean" and is_integer else TYPES.get(dtype, "")


def _of_half(dtype: str, kind: str) -> list[tuple[str, str]]:
    """The dtypes of the operands of which one is a half type, or the result `dtype` is."""
    wide, halves = "float32", ("float16", "bfloat16")
    if dtype in halves:
        return [(wide, dtype), (wide, wide)]
    return [(first, half) for half in halves for first in (half, wide) if dtype == wide and kind != "mean"]


def _moved(c: DeviceArray, a: DeviceArray) -> list[Launch]:
    """A copy, in the largest unit that all runs of bytes are made of."""
    _same_shapes("copy", c.shape, [a.shape])
    itemsize = c.dtype.itemsize
    shape, strides = _joined((*c.shape, itemsize), [(*c.strides, 1), (*a.strides, 1)])
    run = shape[-1] if shape and all(s[-1] == 1 for s in strides) else 1  # 1: elements of one byte with gaps
    outer = [n for s in strides for n in (s[:-1] if run > 1 else s)]
    unit = next(u for u in UNITS if not any(n % u for n in (run, c.ptr, a.ptr, *outer)))
    if run > 1:
        shape, strides = _joined((*shape[:-1], run // unit), [(*s[:-1], unit) for s in strides])
    return _launch(f"copy_{UNITS[unit]}", prod(shape), _layout("copy", shape, strides), c.ptr, a.ptr)


def _joined(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Shape and strides in fewer dimensions: those of size 1 go, and those that lie together in all operands join."""
    dims: list[tuple[int, list[int]]] = []
    for d, size in enumerate(shape):
        here = [s[d] for s in strides]
        if size == 1:
            continue
        if dims and all(outer == size * inner for outer, inner in zip(dims[-1][1], here, strict=True)):
            dims[-1] = (dims[-1][0] * size, here)
        else:
            dims.append((size, here))
    return tuple(size for size, _ in dims), [tuple(s[k] for _, s in dims) for k in range(len(strides))]


def _aligned(pointers: Sequence[int], strides: Sequence[Sequence[int]], units: Sequence[int]) -> bool:
    return not any(n % u for p, s, u in zip(pointers, strides, units, strict=True) for n in (p, *s[:-1]))


def _layout(name: str, shape: Sequence[int], strides: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
    if len(shape) > MOST_DIMS:
        raise ShapeError(f"{name}: an array with {len(shape)} dimensions that do not lie together: pack it before")
    layout = np.zeros((), LAYOUT)
    layout["count"], layout["dims"] = prod(shape), len(shape)
    layout["size"][: len(shape)] = shape
    for k, s in enumerate(strides):
        layout["stride"][k, : len(s)] = s
    return layout


def _launch(function: str, threads: int, *args: Any) -> list[Launch]:
    if not threads:
        return []
    blocks = min(-(-threads // THREADS), MOST_BLOCKS)
    return [Launch(function, (blocks,), (THREADS,), args)]


# ------------------------------------------------------------------------------------- messages that carry fewer bits


def _of_wire(name: str, reads: Arrays, c: DeviceArray, read_dtypes: Dtypes, dtype: str) -> list[Launch]:
    """A kernel of one block: `encode` reads elements, the others a message first."""
    wire, is_encode = WIRES[OF_WIRES[name]], name in ENCODE
    elements, of_elements = (reads[0], read_dtypes[0]) if is_encode else (c, dtype)
    usual = WIDE.get(of_elements, ()) if name not in DECODE_ADD else ((), WIRES)[of_elements == "float32"]
    fits = wire.name in usual and (name not in DECODE_ADD or read_dtypes[1] == "float32")
    _check(name, fits, (dtype, *read_dtypes))
    _same_shapes(name, c.shape, [b.shape for b in reads[1:]])
    if not all(array.flags.c_contiguous for array in (*reads, c)):
        raise ShapeError(f"{name}: an operand or result is not contiguous: pack it before")
    count, threads = elements.size, elements.size
    if is_encode:
        threads = -(-count // RUN) * RUN // 2 if wire.top else wire.nbytes(count) // 2
    pointers = (array.ptr for array in (c, *reads))
    return _launch(f"{name}_{TYPES[of_elements]}", threads, *pointers, np.int64(count))


def _check(name: str, right: bool, dtypes: Sequence[str]) -> None:
    if not right:
        raise DtypeError(f"{name}: no kernel for the dtypes {', '.join(dtypes[1:])} -> {dtypes[0]}: convert before")


def _same_shapes(name: str, shape: tuple[int, ...], others: Sequence[tuple[int, ...]]) -> None:
    if any(other != shape for other in others):
        raise ShapeError(f"{name}: operands of shape {', '.join(map(str, others))} do not give the shape {shape}")


CHAIN_SIDE = 64
"""The rows and columns of a tile of `chain`, as in `kernels.cu`."""


def chain(x: Matrix, w: Matrix, y: Matrix, dtype: str, leaves: int = 1, bias: int = 0, adds: bool = False) -> Launch:
    """y = x @ w (+ bias), or y += x @ w if it `adds`, as `native/chain.h` says it. `bias` is an address, or 0.

    All of them are float32, or float64. The columns of y are contiguous.
    """
    sizes, (m, k), n = np.zeros((), CHAIN_SIZES), (x.rows, x.columns), w.columns
    (x_step, x_across), (w_step, w_across) = ((1, of.stride) if of.is_transposed else (of.stride, 1) for of in (x, w))
    sizes[...] = (m, n, k, leaves, x_step, x_across, w_step, w_across, y.stride, int(adds))
    tiles = -(-m // CHAIN_SIDE) * -(-n // CHAIN_SIDE)
    args = (y.ptr, x.ptr, w.ptr, bias, sizes)
    return Launch(f"chain_{TYPES[dtype]}", (min(tiles, MOST_BLOCKS),), (THREADS,), args)


NAMES = ("copy", "pack", *COMBINES, *OF_WIRES)
"""The kernels that this file knows."""
