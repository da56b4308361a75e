"""Products of host memory by torch, beside those of NumPy."""

from threading import Thread

import numpy as np
import pytest
import torch

from fompi.backends.half import narrow, storage, widen
from fompi.backends.numpy import Numpy
from fompi.torch import products

DTYPES = ("float64", "float32", "bfloat16", "float16")
UNITS = {"float64": 1e-13, "float32": 1e-4, "bfloat16": 1.02 * 2.0**-8, "float16": 1.02 * 2.0**-11}


def operand(draw, shape, dtype, transposed=False):
    a = draw.normal(size=shape[::-1] if transposed else shape).astype(np.float64 if dtype == "float64" else np.float32)
    a = np.ascontiguousarray(narrow(a, dtype) if dtype in ("bfloat16", "float16") else a.astype(dtype))
    return a.T if transposed else a


def assert_product(y, wanted, dtype, depth):
    """Rounded once from a sum in float32: half a unit of the largest element, and the sum's own error."""
    error = np.abs(widen(y, dtype).astype(np.float64) - wanted).max()
    assert error <= UNITS[dtype] * np.abs(wanted).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["matmul", "matmul_bias", "gradient"])
@pytest.mark.parametrize("transposed", [False, True])
def test_products(dtype, kernel, transposed):
    draw = np.random.default_rng(7)
    m, k, n = 165, 229, 167
    x = operand(draw, (m, k), dtype)
    if kernel == "gradient":
        h = operand(draw, (m, n), dtype)
        reads, y = [x, h], np.empty((k, n), storage(dtype))
        wanted = widen(x, dtype).astype(np.float64).T @ widen(h, dtype).astype(np.float64)
    else:
        w = operand(draw, (k, n), dtype, transposed)
        bias = [operand(draw, (n,), dtype)] * (kernel == "matmul_bias")
        reads, y = [x, w, *bias], np.empty((m, n), storage(dtype))
        wanted = widen(x, dtype).astype(np.float64) @ widen(w, dtype).astype(np.float64)
        wanted = wanted + widen(bias[0], dtype) if bias else wanted
    made = products.bound(kernel, reads, [y], (dtype,) * len(reads), (dtype,))
    assert made is not None
    made()
    assert_product(y, wanted, dtype, k)
    again = np.empty_like(y)
    Numpy().bind(kernel, reads, [again], (dtype,) * len(reads), (dtype,))()
    assert again.tobytes() == y.tobytes()  # the backend takes torch's kernel


def test_several_chunks_of_rows_and_more_dimensions():
    draw = np.random.default_rng(8)
    x, w = operand(draw, (2, 90, 164), "float32"), operand(draw, (164, 196), "float32")
    ys = [np.empty((90, 196), np.float32) for _ in range(2)]
    made = products.bound("matmul", [x[0], x[1], w], ys, ("float32",) * 3, ("float32",) * 2)
    made()
    for part, y in zip(x, ys, strict=True):
        np.testing.assert_allclose(y, part @ w, rtol=1e-4, atol=1e-4)
    y = np.empty((2, 90, 196), np.float32)
    products.bound("matmul", [x, w], [y], ("float32",) * 2, ("float32",))()
    np.testing.assert_allclose(y, x @ w, rtol=1e-4, atol=1e-4)


def test_what_is_left_to_numpy():
    """Small, read-only, negative strides, other dtypes, sums in float32 of half types."""
    a = np.ones((256, 256), np.float32)
    frozen = a.copy()
    frozen.flags.writeable = False
    dtypes = ("float32",) * 2
    for x, dtype in ((a[:8, :8], "float32"), (frozen, "float32"), (a[::-1], "float32"), (a.astype(int), "int64")):
        assert (
            products.bound("matmul", [x, a.astype(x.dtype)[: x.shape[1]]], [np.empty_like(x)], (dtype,) * 2, (dtype,))
            is None
        )
    cube = np.ones((256, 2, 256), np.float32)[:, :1]
    assert products.bound("matmul", [cube, a], [np.empty((256, 1, 256), np.float32)], dtypes, ("float32",)) is None
    y = np.empty((256, 1, 256), np.float32)
    kernel = Numpy().bind("matmul", [cube, a], [y], dtypes, ("float32",))
    cube *= 2
    kernel()  # it reads the data of now
    assert (y == 512).all()
    half = a.astype(np.float16)
    assert products.bound("matmul", [half, half], [a.copy()], ("float16",) * 2, ("float32",)) is None
    assert products.bound("matmul", [a, a], [a.copy()], dtypes, ("float32",)) is not None
    y = np.empty_like(a)
    Numpy().bind("matmul", [frozen, a], [y], dtypes, ("float32",))()
    assert (y == 256).all()


def test_a_kernel_of_inference_runs_in_another_thread():
    x, w, y = (np.ones((256, 256), np.float32) for _ in range(3))
    with torch.inference_mode():
        kernel = products.bound("matmul", [x, w], [y], ("float32",) * 2, ("float32",))
    errors = []

    def run():
        try:
            kernel()
        except Exception as error:
            errors.append(error)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    kernel()
    assert not errors and (y == 256).all()
