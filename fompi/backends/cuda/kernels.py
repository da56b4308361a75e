"""Which function of `kernels.cu` computes a kernel on arrays of a device, and with which arguments. Pure.

| kernel                                 | means                                                                     |
|----------------------------------------|---------------------------------------------------------------------------|
| `copy(a) -> c`, `pack(a) -> c`         | c = a, in the dtype of c                                                  |
| `add(a, b) -> c`                       | c = a + b                                                                 |
| `max`, `min`, `prod`, `mean4(a, b) -> c` | those of `fompi.plans.kernels`, which combine two terms of a reduction  |
| `scale(a) -> c`                        | c = a * factor                                                            |
| `bias(x, b) -> y`                      | y = x + b, where b is one row                                             |
| `gelu(x) -> y`, `gelu_tanh(x) -> y`    | y = x * normal distribution at x; the same by the approximation with tanh |
| `silu(x) -> y`                         | y = x / (1 + exp(-x))                                                     |
| `swiglu(gate, up) -> y`                | y = silu(gate) * up                                                       |
| `merge(a, s, b, t) -> c, u`            | the attention over both sets of keys; s, t, u are log-sum-exps            |
| `gather(x, index) -> y`                | y[i] = x[index[i]]; zeros where x has no such row                         |
| `gather_add(x, index) -> y`            | y[i] = x[index[i, 0]] + x[index[i, 1]] + ..., in this order               |
| `scatter(x, index) -> y`               | y[index[i]] = x[i]; rows that y does not have are dropped                 |
| `scatter_add(x, index) -> y`           | y[index[i]] += x[i], in any order; y is float32, or float64 as x          |
| `rmsnorm(x, weight, index) -> y`       | y = gather(x, index) / sqrt(mean of its squares in a row + eps) * weight  |

Besides them, `encode_W`, `decode_W` and `decode_add_W` of each wire W (`fompi.plans.kernels`), on contiguous blocks.

`gather` and `rmsnorm` also read pieces, and `scatter` writes them: if x has the shape (pieces, high, broad), y is the
matrix that has piece number index[p] where its p-th piece of high x broad elements is, row by row. Pieces at the edge
may reach over it. So they undo the order in which a kernel of the user has stored its tiles.

Half types are computed in float32 and rounded once, to the nearest even. No result may overlap an operand, except that
the result of an elementwise kernel or of `merge` may replace one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
PIECES = np.dtype([(name, "i8") for name in ("high", "broad", "across", "count", "piece", "row")])
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
    shared: int = 0


@cache
def source() -> str:
    """The text of `kernels.cu`. NVRTC compiles it without headers, as C++17."""
    return files(__package__).joinpath("kernels.cu").read_text()


PARTS = (("copy", "cast", "add"), ("max", "min", "prod", "mean"), ("encode", "decode"), ())
"""The first words of the functions in each part of `kernels.cu`. The last part has all others."""


def part_of(function: str) -> int:
    """The part of `kernels.cu` that has this function. NVRTC compiles only the parts that are used."""
    word = function.partition("_")[0]
    return next((part for part, words in enumerate(PARTS) if word in words), len(PARTS) - 1)


def launches(
    name: str,
    reads: Arrays,
    writes: Arrays,
    read_dtypes: Dtypes,
    write_dtypes: Dtypes,
    *,
    factor: float = 1.0,
    eps: float = 1e-6,
) -> list[Launch]:
    """The launches that compute the kernel `name` on these arrays, in order. A call without elements has none.

    `factor` is that of `scale`, `eps` that of `rmsnorm`. Rows of `copy`, `pack` and `add` may be in several chunks.
    Raises DeviceError for another kernel, DtypeError or ShapeError for operands that it does not take.
    """
    if name in ("copy", "pack", *COMBINES) or divisor(name) is not None:
        kernel = find(name)
        columns = zip(*kernel.rows(reads), writes, strict=True)
        dtypes = zip(*kernel.rows(read_dtypes), write_dtypes, strict=True)
        return [
            launch
            for (*a, c), (*of_a, of_c) in zip(columns, dtypes, strict=True)
            for launch in _elementwise(name, c, a, of_c, of_a)
        ]
    if name in ELEMENTWISE:
        factors = (np.dtype("f8" if write_dtypes[0] == "float64" else "f4").type(factor),) * (name == "scale")
        return _elementwise(name, writes[0], reads, write_dtypes[0], read_dtypes, *factors)
    if name in OF_WIRES:
        return _of_wire(name, reads, writes[0], read_dtypes, write_dtypes[0])
    if name not in BY_ROWS:
        raise DeviceError(f"there is no kernel {quoted(name, NAMES)} for a device; there are {', '.join(NAMES)}")
    if name == "rmsnorm":
        return _rmsnorm(reads, writes[0], (*read_dtypes[:2], *write_dtypes), eps)
    return BY_ROWS[name](reads, writes, read_dtypes, write_dtypes)


# -------------------------------------------------------------------------------------------------------- elementwise

ELEMENTWISE = {"scale": 1, "bias": 2, "gelu": 1, "gelu_tanh": 1, "silu": 1, "swiglu": 2}
"""The number of operands."""


def _elementwise(
    name: str, c: DeviceArray, operands: Arrays, dtype: str, dtypes: Sequence[str], *scalars: Any
) -> list[Launch]:
    all_of, count = (dtype, *dtypes), divisor(name)
    if name in ("copy", "pack") and set(all_of) == {dtype}:
        return _moved(c, operands[0])
    if name in ("copy", "pack"):
        _check(name, set(all_of) <= {*FLOATS}, all_of)
        function = f"cast_{TYPES[dtype]}_{TYPES[dtypes[0]]}"
    elif name in ("add", "bias"):
        one_half = not {"float16", "bfloat16"} <= {*all_of}
        _check(name, (set(all_of) <= {*FLOATS} and one_half) or (len({*all_of}) == 1 and dtype in TYPES), all_of)
        function = "_".join(("add", *(TYPES[each] for each in all_of)))
    elif name in COMBINES or count is not None:
        kind = "mean" if count is not None else name
        types = [_type(kind, each) for each in all_of]
        _check(name, all(types) and (len({*all_of}) == 1 or all_of[-2:] in _of_half(dtype, kind)), all_of)
        function = "_".join((kind, *types))
        if count is not None:
            scalars = (np.dtype("f8" if dtype in ("float64", "complex128") else "f4").type(count),)
    else:
        _check(name, len({*all_of}) == 1 and dtype in (*FLOATS, *(["float64"] * (name == "scale"))), all_of)
        function = f"{name}_{TYPES[dtype]}"
    _same_shapes(name, c.shape, [a.shape for a in (operands[:1] if name == "bias" else operands)])
    if name == "bias":
        _same_shapes(name, c.shape[-1:], [operands[1].shape])
    strides = [_broadcast(a.strides, len(c.shape)) for a in (c, *operands)]
    shape, strides = _joined(c.shape, strides)
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


def _broadcast(strides: Sequence[int], dims: int) -> tuple[int, ...]:
    return (*([0] * (dims - len(strides))), *strides)


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


# -------------------------------------------------------------------------------------------------------------- rows


class FlatRows(NamedTuple):
    """An array as a matrix: all dimensions but the last become one."""

    ptr: int
    stride: int
    rows: int
    columns: int
    itemsize: int

    @classmethod
    def of(cls, name: str, array: DeviceArray) -> FlatRows:
        shape, strides = _joined(array.shape[:-1], [array.strides[:-1]])
        itemsize, columns = array.dtype.itemsize, array.shape[-1]
        if array.size and (len(shape) > 1 or (columns > 1 and array.strides[-1] != itemsize)):
            raise ShapeError(f"{name}: the rows of an array with shape {array.shape} are not regular: pack it before")
        return cls(array.ptr, strides[0][0] if shape else 0, prod(array.shape[:-1]), columns, itemsize)


def _check(name: str, right: bool, dtypes: Sequence[str]) -> None:
    if not right:
        raise DtypeError(f"{name}: no kernel for the dtypes {', '.join(dtypes[1:])} -> {dtypes[0]}: convert before")


def _same_shapes(name: str, shape: tuple[int, ...], others: Sequence[tuple[int, ...]]) -> None:
    if any(other != shape for other in others):
        raise ShapeError(f"{name}: operands of shape {', '.join(map(str, others))} do not give the shape {shape}")


def _index(name: str, index: DeviceArray, entries: int) -> tuple[int, np.int32]:
    """The pointer, and whether the numbers have 64 bits."""
    if str(index.dtype) not in ("int32", "int64"):
        raise DtypeError(f"{name}: the index has the dtype {index.dtype}: convert it to int32 or int64")
    if index.size != entries or not index.flags.c_contiguous:
        raise ShapeError(f"{name}: the index has {index.size} entries and needs {entries}, contiguous")
    return index.ptr, np.int32(index.dtype.itemsize == 8)


def _pieces(name: str, stored: DeviceArray, matrix: FlatRows) -> tuple[np.ndarray[Any, Any], int]:
    """How `stored` holds the matrix, and the entries of its index."""
    pieces = np.zeros((), PIECES)
    if stored.ndim == 3:
        count, high, broad = stored.shape
        if stored.strides[2] != matrix.itemsize and broad > 1:
            raise ShapeError(f"{name}: pieces of shape {stored.shape} whose rows are not contiguous: pack them before")
        if not high or not broad:
            raise ShapeError(f"{name}: pieces of shape {stored.shape} are empty")
        across = -(-matrix.columns // broad)
        pieces[()] = (high, broad, across, count, stored.strides[0], stored.strides[1])
        return pieces, -(-matrix.rows // high) * across
    rows = FlatRows.of(name, stored)
    if rows.columns != matrix.columns:
        raise ShapeError(f"{name}: rows of {rows.columns} elements do not give rows of {matrix.columns}")
    pieces[()] = (1, max(rows.columns, 1), 1, rows.rows, rows.stride, 0)
    return pieces, matrix.rows


def _gather_or_scatter(name: str) -> Callable[..., list[Launch]]:
    def launch(reads: Any, writes: Any, read_dtypes: Any, write_dtypes: Any) -> list[Launch]:
        _check(name, read_dtypes[0] == write_dtypes[0], (write_dtypes[0], read_dtypes[0]))
        stored, array = (reads[0], writes[0]) if name == "gather" else (writes[0], reads[0])
        matrix = FlatRows.of(name, array)
        pieces, entries = _pieces(name, stored, matrix)
        index, is_long = _index(name, reads[1], entries)
        runs = [int(pieces[key]) for key in ("piece", "row")] + [int(pieces["broad"]) * matrix.itemsize]
        bytes_of = (matrix.columns * matrix.itemsize, matrix.stride, matrix.ptr, stored.ptr, *runs)
        unit = next(u for u in UNITS if not any(n % u for n in bytes_of))
        pieces["broad"] = pieces["broad"] * matrix.itemsize // unit
        columns = matrix.columns * matrix.itemsize // unit
        args = (matrix.ptr, *map(np.int64, (matrix.stride, matrix.rows, columns)), stored.ptr, pieces, index, is_long)
        return _launch(f"{name}_{UNITS[unit]}", matrix.rows * columns, *args)

    return launch


def _scatter_add(reads: Any, writes: Any, read_dtypes: Any, write_dtypes: Any) -> list[Launch]:
    dtypes = write_dtypes[0], read_dtypes[0]
    _check("scatter_add", (dtypes[0] == "float32" and dtypes[1] in FLOATS) or {*dtypes} == {"float64"}, dtypes)
    x, y = FlatRows.of("scatter_add", reads[0]), FlatRows.of("scatter_add", writes[0])
    _same_shapes("scatter_add", (y.columns,), [(x.columns,)])
    index = _index("scatter_add", reads[1], x.rows)
    numbers = [np.int64(n) for n in (y.stride, y.rows, x.stride, x.rows, x.columns)]
    args = (y.ptr, *numbers[:2], x.ptr, *numbers[2:], *index)
    return _launch(f"scatter_add_{TYPES[dtypes[0]]}_{TYPES[dtypes[1]]}", x.rows * x.columns, *args)


def _gather_add(reads: Any, writes: Any, read_dtypes: Any, write_dtypes: Any) -> list[Launch]:
    dtypes = write_dtypes[0], read_dtypes[0]
    _check("gather_add", len({*dtypes}) == 1 and dtypes[0] in (*FLOATS, "float64"), dtypes)
    x, y = FlatRows.of("gather_add", reads[0]), FlatRows.of("gather_add", writes[0])
    _same_shapes("gather_add", (y.columns,), [(x.columns,)])
    terms = reads[1].shape[-1]
    index = _index("gather_add", reads[1], y.rows * terms)
    numbers = [np.int64(n) for n in (y.stride, y.rows, y.columns, x.stride, x.rows)]
    args = (y.ptr, *numbers[:3], x.ptr, *numbers[3:], *index, np.int64(terms))
    return _launch(f"gather_add_{TYPES[dtypes[0]]}", y.rows * y.columns, *args)


def _merge(reads: Any, writes: Any, read_dtypes: Any, write_dtypes: Any) -> list[Launch]:
    a, s, b, t = reads
    c, u = writes
    dtype = write_dtypes[0]
    _check("merge", dtype in FLOATS and {*read_dtypes[::2]} == {dtype}, (dtype, *read_dtypes[::2]))
    _check("merge", {*read_dtypes[1::2], write_dtypes[1]} == {"float32"}, (write_dtypes[1], *read_dtypes[1::2]))
    _same_shapes("merge", c.shape, [a.shape, b.shape])
    _same_shapes("merge", c.shape[:-1], [s.shape, t.shape, u.shape])
    if not all(array.flags.c_contiguous for array in (*reads, *writes)):
        raise ShapeError("merge: an operand or result is not contiguous: pack it before")
    rows = prod(c.shape[:-1])
    args = (c.ptr, u.ptr, np.int64(rows), np.int64(c.shape[-1]), a.ptr, s.ptr, b.ptr, t.ptr)
    return _launch(f"merge_{TYPES[dtype]}", 32 * rows, *args)


def _rmsnorm(reads: Arrays, y: DeviceArray, dtypes: Sequence[str], eps: float) -> list[Launch]:
    x, weight, index = reads
    _check("rmsnorm", len({*dtypes}) == 1 and dtypes[0] in FLOATS, (dtypes[-1], *dtypes[:-1]))
    matrix = FlatRows.of("rmsnorm", y)
    _same_shapes("rmsnorm", (matrix.columns,), [weight.shape])
    pieces, entries = _pieces("rmsnorm", x, matrix)
    pointer, is_long = _index("rmsnorm", index, entries)
    if not weight.flags.c_contiguous:
        raise ShapeError("rmsnorm: the weight is not contiguous: pack it before")
    bytes_of = (matrix.stride, matrix.ptr, x.ptr, weight.ptr, int(pieces["piece"]), int(pieces["row"]))
    many = 16 // matrix.itemsize
    is_vector = not (matrix.columns % many or int(pieces["broad"]) % many or any(n % 16 for n in bytes_of))
    args = (matrix.ptr, *map(np.int64, (matrix.stride, matrix.rows, matrix.columns)), x.ptr, weight.ptr, pieces)
    function = f"rmsnorm_{TYPES[dtypes[0]]}{'_v' if is_vector else ''}"
    threads = THREADS * matrix.rows * bool(matrix.columns)
    return _launch(function, threads, *args, pointer, is_long, np.float32(eps))


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


BY_ROWS: dict[str, Callable[..., list[Launch]]] = {
    "merge": _merge,
    "gather": _gather_or_scatter("gather"),
    "gather_add": _gather_add,
    "scatter": _gather_or_scatter("scatter"),
    "scatter_add": _scatter_add,
    "rmsnorm": _rmsnorm,
}
NAMES = ("copy", "pack", *COMBINES, *ELEMENTWISE, *BY_ROWS, *OF_WIRES)
"""The kernels that this file knows."""
