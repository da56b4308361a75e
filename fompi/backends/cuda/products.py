"""Products on a device, as calls of `gemm`: which operands cuBLAS can address, and in which dtype it adds up.

    y = x @ w            one call for each run of rows
    y = x @ w + b        y = b in every row, then y += x @ w
    y = c + x @ w        y += x @ w, where c is y; else y = c before
    g = (g +) a.T @ h    one call for each run of rows; each adds to g

    y = x @ w, in order  one launch of `chain` (`kernels.cu`) for each run of rows, with the bits of the host

Where rows go to experts, each run has a matrix of its own: one call for each run.

Operands of different dtypes are converted to float32. A result of a half type is rounded once: sums of several calls
are kept in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from fompi.backends.base import Dtypes
from fompi.backends.cuda.device import Arrays, Enqueue
from fompi.backends.half import storage
from fompi.base.errors import DtypeError
from fompi.base.layout import HALF
from fompi.plans.kernels import GROUPED, chains, find
from fompi.tensors.device_array import DeviceArray

TYPES = {"float32": 0, "float64": 1, "float16": 2, "complex64": 4, "complex128": 5, "bfloat16": 14}
"""cudaDataType_t by logical dtype."""


class Matrix(NamedTuple):
    """A matrix in device memory. Its rows are `stride` elements apart; if `is_transposed`, its columns are."""

    ptr: int
    rows: int
    columns: int
    stride: int
    is_transposed: bool

    @property
    def T(self) -> Matrix:
        return Matrix(self.ptr, self.columns, self.rows, self.stride, not self.is_transposed)


def matrix(array: DeviceArray) -> Matrix | None:
    """`array` as a matrix: all dimensions but the last become one. None if cuBLAS cannot address it."""
    *shape, columns = array.shape
    *strides, column_stride = array.strides
    item, rows, row_stride = array.dtype.itemsize, 1, 0
    if not array.size:
        return Matrix(array.ptr, prod(shape), columns, max(columns, 1), False)
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n == 1:
            continue
        if rows == 1:
            row_stride = stride
        elif stride != rows * row_stride:
            return None
        rows *= n
    if rows == 1:
        row_stride = columns * item
    if columns == 1:
        column_stride = item
    if column_stride == item and row_stride >= columns * item and row_stride % item == 0:
        return Matrix(array.ptr, rows, columns, row_stride // item, False)
    if (row_stride == item or rows == 1) and column_stride >= rows * item and column_stride % item == 0:
        return Matrix(array.ptr, rows, columns, column_stride // item, True)
    return None


class ProductKernels:
    """The kernels of one product, in order. `keep` is memory that they use."""

    def __init__(self, device: Any, name: str, dtype: str):
        self.device, self.name, self.dtype = device, name, dtype
        self.steps: list[Enqueue] = []
        self.keep: list[DeviceArray] = []

    def matrix(self, array: DeviceArray, dtype: str) -> Matrix:
        """An operand as a matrix. It is copied first if cuBLAS cannot address it, or if it has another dtype."""
        found = matrix(array) if dtype == self.dtype else None
        if found is None:
            packed = self.scratch(array.shape, self.dtype)
            self.copy(array, packed, dtype, self.dtype)
            found = matrix(packed)
        assert found is not None
        return found

    def scratch(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        self.keep.append(self.device.empty(shape, storage(dtype)))
        return self.keep[-1]

    def copy(self, source: DeviceArray, to: DeviceArray, source_dtype: str, dtype: str) -> None:
        self.steps += self.device.library.elementwise("copy", [source], [to], [source_dtype], [dtype])

    def multiply(self, a: Matrix, b: Matrix, to: DeviceArray, dtype: str, adds: bool) -> None:
        if to.size:
            c = matrix(to)
            assert c is not None
            self.steps.append(self.device.library.gemm(a, b, c, self.dtype, dtype, adds))

    def target(self, result: DeviceArray, dtype: str, calls: int = 1) -> tuple[DeviceArray, str]:
        """Where the product is computed, and in which dtype: `result`, or memory that is copied to it at the end."""
        is_possible = dtype == self.dtype or (self.dtype in HALF and dtype == "float32")
        if is_possible and matrix(result) is not None and not (calls > 1 and dtype in HALF):
            return result, dtype
        wide = "float32" if self.dtype in HALF else self.dtype
        return self.scratch(result.shape, wide), wide


def product(
    device: Any, name: str, reads: Arrays, writes: Arrays, read_dtypes: Dtypes, write_dtypes: Dtypes
) -> ProductKernels:
    """The product `name` of `fompi.plans.kernels` on these arrays."""
    kernel = find(name)
    if chains(name):
        return _chain(device, name, reads, writes, read_dtypes, write_dtypes)
    factors = dict.fromkeys(kernel.rows(read_dtypes)[0])
    factors |= dict.fromkeys(kernel.rows(read_dtypes)[1] if kernel.reduces else kernel.wholes(read_dtypes)[:1])
    dtype = next(iter(factors)) if len(factors) == 1 else "float32"
    if dtype not in TYPES or (len(factors) > 1 and not {*factors} <= {*HALF, "float32"}):
        raise DtypeError(f"cuBLAS has no product of {' and '.join(factors)}: it has {', '.join(TYPES)}")
    made, groups, wholes = ProductKernels(device, name, dtype), kernel.rows(reads), kernel.wholes(reads)
    of_rows, of_wholes = kernel.rows(read_dtypes), kernel.wholes(read_dtypes)
    is_grouped = name in GROUPED
    if is_grouped and kernel.reduces:
        for i in range(len(writes[0])):
            run, dtypes_of_run, so_far = [[g[i]] for g in groups], [[g[i]] for g in of_rows], [g[i] for g in wholes]
            _gradient(made, run, dtypes_of_run, so_far, writes[0][i], read_dtypes[-1], write_dtypes[0])
        return made
    if kernel.reduces:
        _gradient(made, groups, of_rows, wholes, writes[0], read_dtypes[-1], write_dtypes[0])
        return made
    matrices = [wholes[0][e] for e in range(len(wholes[0]))] if is_grouped else wholes[:1]
    weights, biases, sums = [made.matrix(w, of_wholes[0]) for w in matrices], wholes[1:], groups[1:]
    for i, (x, of_x, y, dtype) in enumerate(zip(groups[0], of_rows[0], writes, write_dtypes, strict=True)):
        target, wide = made.target(y, dtype, 1 + len(sums))
        for bias in biases:
            made.copy(bias.broadcast_to(target.shape), target, read_dtypes[-1], wide)
        for chunks, dtypes in zip(sums, of_rows[1:], strict=True):
            if target is not y or not chunks[i].same_memory(y):
                made.copy(chunks[i], target, dtypes[i], wide)
        made.multiply(made.matrix(x, of_x), weights[i if is_grouped else 0], target, wide, bool(biases or sums))
        if target is not y:
            made.copy(target, y, wide, dtype)
    return made


def _chain(
    device: Any, name: str, reads: Arrays, writes: Arrays, read_dtypes: Dtypes, write_dtypes: Dtypes
) -> ProductKernels:
    """A product in a fixed order. Half types are converted to float32 before."""
    all_of = {*read_dtypes, *write_dtypes}
    if not (all_of <= {*HALF, "float32"} or all_of == {"float64"}):
        raise DtypeError(f"{name}: there is no product of {' and '.join(sorted(all_of))} in this order")
    kernel, dtype = find(name), "float64" if "float64" in all_of else "float32"
    made, groups, wholes = ProductKernels(device, name, dtype), kernel.rows(reads), kernel.wholes(reads)
    of_rows, of_wholes = kernel.rows(read_dtypes), kernel.wholes(read_dtypes)

    def add(x: Matrix, w: Matrix, y: DeviceArray, leaves: int, bias: int, adds: bool) -> None:
        if y.size:
            to = matrix(y)
            assert to is not None
            made.steps.append(device.library.chain(x, w, to, dtype, leaves, bias, adds))

    if kernel.reduces:
        target, wide = made.target(writes[0], write_dtypes[0])
        for i, (a, h, of_a, of_h) in enumerate(zip(*groups, *of_rows, strict=True)):
            add(made.matrix(a, of_a).T, made.matrix(h, of_h), target, 1, 0, i > 0)
        if target is not writes[0]:
            made.copy(target, writes[0], wide, write_dtypes[0])
        return made
    w, begins = made.matrix(wholes[0], of_wholes[0]), 0
    if wholes[1:]:
        bias = wholes[1]
        if of_wholes[1] != dtype or not bias.flags.c_contiguous:
            bias = made.scratch(bias.shape, dtype)
            made.copy(wholes[1], bias, of_wholes[1], dtype)
        begins = bias.ptr
    for x, of_x, y, of_y in zip(groups[0], of_rows[0], writes, write_dtypes, strict=True):
        target, wide = made.target(y, of_y)
        add(made.matrix(x, of_x), w, target, chains(name), begins, False)
        if target is not y:
            made.copy(target, y, wide, of_y)
    return made


def _gradient(
    made: ProductKernels,
    groups: Sequence[Arrays],
    dtypes: Sequence[Dtypes],
    wholes: Arrays,
    g: DeviceArray,
    whole_dtype: str,
    dtype: str,
) -> None:
    target, wide = made.target(g, dtype, len(groups[0]))
    adds = bool(wholes)
    for whole in wholes:
        if target is not g or not whole.same_memory(g):
            made.copy(whole, target, whole_dtype, wide)
    for a, h, of_a, of_h in zip(*groups, *dtypes, strict=True):
        made.multiply(made.matrix(a, of_a).T, made.matrix(h, of_h), target, wide, adds)
        adds = True
    if target is not g:
        made.copy(target, g, wide, dtype)
