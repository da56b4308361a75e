"""What strategies compute with: arrays of NumPy on the host, and on a device arrays that NumPy's functions take.

On a GPU these are arrays of CuPy, on the software device its own (`fompi.backends.cuda.computing`). So a strategy is
written once. What has no such function, or is faster by a kernel of fompi, is here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fompi.backends import chains, half
from fompi.base.layout import HALF, accumulator
from fompi.tensors import dlpack
from fompi.tensors.device_array import DeviceArray

Array = Any
"""An array of NumPy or of CuPy, or a SoftwareArray. Half types are held as `half.storage` says."""


def place(a: Array) -> Any:
    """The device whose memory `a` has. None: the host."""
    if isinstance(a, (np.ndarray, float)):
        return None
    return a.device if isinstance(a, DeviceArray) else dlpack.device_of(a)


def for_numpy(a: Any) -> Array:
    """The array of a tensor, for NumPy's functions: an array of the host itself, or that of a device."""
    return a.device.for_numpy(a) if isinstance(a, DeviceArray) else a


def stored(a: Array) -> Any:
    """Such an array as the rest of fompi has it: undoes `for_numpy`."""
    return a if isinstance(a, (np.ndarray, DeviceArray)) else place(a).array_of(a)


def contiguous(a: Array) -> Array:
    """`a` in C order: itself, or a copy."""
    return a if a.flags.c_contiguous else a.copy()


def widen(a: Array, dtype: str) -> Array:
    """`a` as float32 if `dtype` is a half type, else `a` itself."""
    if dtype not in HALF:
        return a
    device = place(a)
    return half.widen(a, dtype) if device is None else device.cast(a, dtype, "float32")


def narrow(a: Array, dtype: str) -> Array:
    """`a` in the storage dtype of `dtype`, rounded to the nearest even."""
    device = place(a)
    if device is None:
        return half.narrow(a, dtype)
    return device.cast(a, a.dtype.name, dtype) if dtype in HALF else a.astype(half.storage(dtype), copy=False)


def product(a: Array, b: Array) -> Array:
    """a @ b, where b is a matrix."""
    y: Array = a @ b
    return y


def wide_product(a: Array, b: Array, dtype: str) -> Array:
    """a @ b of arrays that hold `dtype`, in the dtype of sums. b is a matrix. A device does not widen half types."""
    device = place(a)
    if device is None or dtype not in HALF:
        return product(widen(a, dtype), widen(b, dtype))
    return device.multiply(a, b, dtype, accumulator(dtype))


def ordered_product(a: Array, b: Array, dtype: str, leaves: int = 1, bias: Array | None = None) -> Array:
    """a @ b (+ bias) of arrays that hold `dtype`, in the dtype of sums, as in `fompi.backends.chains`."""
    if place(a) is None:
        added = None if bias is None else widen(bias, dtype)
        return chains.product_of(widen(a, dtype), widen(b, dtype), leaves, added)
    y = empty((*a.shape[:-1], b.shape[1]), accumulator(dtype), a)
    operands = [a, b] if bias is None else [a, b, bias]
    name = f"matmul{leaves}" if bias is None else f"matmul{leaves}_bias"
    launch(name, operands, [y], [dtype] * len(operands), [accumulator(dtype)])
    return y


def ordered_sum(rows: Array) -> Array:
    """rows.sum(0) of a matrix of float32 or float64, one row after the other."""
    if place(rows) is None:
        return chains.sum_of_rows(rows)
    ones, y = filled((len(rows), 1), rows.dtype, 1, rows), empty((1, rows.shape[1]), rows.dtype, rows)
    launch("gradient1", [ones, rows], [y], [rows.dtype.name] * 2, [rows.dtype.name])
    return y[0]


def launch(name: str, reads: Any, writes: Any, read_dtypes: Any, write_dtypes: Any) -> None:
    """Enqueue a kernel of `fompi.plans.kernels` on arrays of a device, behind what the caller has enqueued."""
    device = place(writes[0])
    inside, outside = [*map(stored, reads)], [*map(stored, writes)]
    device.for_caller(device.kernel(name, inside, outside, read_dtypes, write_dtypes), *inside, *outside)


def empty(shape: Any, dtype: Any, like: Array) -> Array:
    """np.empty(shape, dtype), where `like` is."""
    return np.empty(shape, dtype, like=None if isinstance(like, np.ndarray) else like)


def filled(shape: Any, dtype: Any, value: Any, like: Array) -> Array:
    """np.full(shape, value, dtype), where `like` is."""
    if isinstance(like, np.ndarray):
        return np.full(shape, value, dtype) if value else np.zeros(shape, dtype)
    made = empty(shape, dtype, like)  # np.full(like=) passes on an argument that CuPy does not take
    made.fill(value)
    return made


def constant(values: np.ndarray[Any, Any], like: Array) -> Array:
    """Values of the host where `like` is. A device keeps them: the first call waits for the copy, later ones do not."""
    device = place(like)
    return values if device is None else device.constant(values)


def counting(stop: int, like: Array, dtype: Any = np.int64) -> Array:
    """np.arange(stop), where `like` is."""
    return np.arange(stop, dtype=dtype, like=None if isinstance(like, np.ndarray) else like)


class _AtHand:
    """Numbers that the host has already: what a device would fetch."""

    def __init__(self, values: np.ndarray[Any, Any]):
        self._values = values

    def done(self) -> bool:
        return True

    def get(self) -> np.ndarray[Any, Any]:
        return self._values


def fetch(a: Array) -> Any:
    """A copy of `a` on its way to the host, behind what computes it: `done()`, then `get()`."""
    device = place(a)
    return _AtHand(a) if device is None else device.fetch(a)


def upload(values: np.ndarray[Any, Any], like: Array) -> Array:
    """Values of the host where `like` is, in the order of what the caller enqueues. Nothing waits."""
    device = place(like)
    return values if device is None else device.upload(values)
