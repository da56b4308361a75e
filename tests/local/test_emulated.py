"""The emulated accelerator, without ranks: what its kernels compute on corners, and when they begin and end."""

from __future__ import annotations

import time
from dataclasses import replace

import catalogue
import numpy as np
import pytest
from twin import poisoned

import emulated
from emulated import CORNER, Emulated, corner
from fompi.backends.half import storage
from fompi.base.errors import DeviceError
from fompi.model.machine import Machine
from fompi.plans.kernels import KERNELS, OF_WIRES

ROWS, BATCH, K, N = 5, 2, 6, 7
SHAPES = {
    "copy": ([(ROWS, K)], [(ROWS, K)]),
    "pack": ([(ROWS, K)], [(ROWS, K)]),
    "download": ([(ROWS, K)], [(ROWS, K)]),
    "upload": ([(ROWS, K)], [(ROWS, K)]),
    **dict.fromkeys(("add", "max", "min", "prod"), ([(ROWS, K), (ROWS, K)], [(ROWS, K)])),
    "matmul": ([(ROWS, BATCH, K), (2, BATCH, K), (K, N)], [(ROWS, BATCH, N), (2, BATCH, N)]),
    "matmul_bias": ([(ROWS, K), (K, N), (N,)], [(ROWS, N)]),
    "matmul_add": ([(ROWS, K), (2, K), (ROWS, N), (2, N), (K, N)], [(ROWS, N), (2, N)]),
    "gradient": ([(ROWS, K), (ROWS, N)], [(K, N)]),
    "gradient_add": ([(ROWS, K), (2, K), (ROWS, N), (2, N), (K, N)], [(K, N)]),
    "matmul_grouped": ([(ROWS, K), (2, K), (2, K, N)], [(ROWS, N), (2, N)]),
    "gradient_grouped": ([(ROWS, K), (2, K), (ROWS, N), (2, N)], [(2, K, N)]),
    "gradient_grouped_add": ([(ROWS, K), (2, K), (ROWS, N), (2, N), (2, K, N)], [(2, K, N)]),
}
"""The shapes of the operands and results of each kernel. Some have rows in two chunks, or a batch dimension."""


def meaning(kernel, reads):
    """The kernel in NumPy, on operands of any width."""
    if kernel in ("copy", "pack", "download", "upload"):
        return [reads[0]]
    if kernel in ("add", "max", "min", "prod"):
        return [{"add": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}[kernel](*reads)]
    if kernel == "matmul":
        return [x @ reads[-1] for x in reads[:-1]]
    if kernel == "matmul_bias":
        return [reads[0] @ reads[1] + reads[2]]
    if kernel == "matmul_add":
        return [x @ reads[-1] + c for x, c in zip(reads[:2], reads[2:4], strict=True)]
    if kernel == "matmul_grouped":
        return [x @ w for x, w in zip(reads[:2], reads[2], strict=True)]
    if kernel.startswith("gradient_grouped"):
        terms = np.stack([a.T @ h for a, h in zip(reads[:2], reads[2:4], strict=True)])
        return [sum(reads[4:], terms)]
    if kernel == "gradient":
        return [reads[0].T @ reads[1]]
    return [reads[0].T @ reads[2] + reads[1].T @ reads[3] + reads[4]]


def test_every_kernel_is_tested():
    assert {*SHAPES, *OF_WIRES} == {*KERNELS}


@pytest.mark.parametrize("kernel", sorted(OF_WIRES))
def test_kernels_of_wires_are_refused(kernel):
    """What lies outside of the corners would be in the scales."""
    backend, a = Emulated(Machine("quick", 0.0, 1.0, 1e15, 1e15, 0.0)), np.zeros(4, np.float32)
    with pytest.raises(DeviceError, match="take no wire"):
        backend.bind(kernel, [a], [a], ["float32"], ["float32"])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("kernel", SHAPES)
def test_a_kernel_works_on_corners(kernel, dtype):
    """It computes as if the operands had only corners. The rest of the result is not written."""
    backend = Emulated(Machine("quick", 0.0, 1.0, 1e15, 1e15, 0.0))
    shapes, results = SHAPES[kernel]
    random = np.random.default_rng(len(kernel))
    wide = [random.integers(-3, 4, shape).astype(float) for shape in shapes]
    reads = [catalogue.rounded(a, dtype) for a in wide]
    writes = [poisoned(shape, dtype) for shape in results]
    assert all(a.dtype == storage(dtype) for a in (*reads, *writes))
    backend.bind(kernel, reads, writes, [dtype] * len(reads), [dtype] * len(writes))(())
    count = len(reads) - KERNELS[kernel].whole
    wanted = meaning(kernel, [corner(a, whole=i >= count) for i, a in enumerate(wide)])
    for a, expected in zip(writes, wanted, strict=True):
        computed, poison = corner(a, whole=KERNELS[kernel].reduces), np.ones(a.shape, bool)
        np.testing.assert_array_equal(catalogue.wide(computed, dtype), expected)
        corner(poison, whole=KERNELS[kernel].reduces)[...] = False
        assert np.isnan(catalogue.wide(a, dtype)[poison]).all()


def test_corners():
    a = np.arange(60).reshape(6, 10)
    np.testing.assert_array_equal(corner(a), a[:, :CORNER])
    np.testing.assert_array_equal(corner(a, whole=True), a[:CORNER, :CORNER])
    np.testing.assert_array_equal(corner(a[0]), a[0])
    np.testing.assert_array_equal(corner(a[0], whole=True), a[0, :CORNER])
    assert np.shares_memory(corner(a), a)


# ------------------------------------------------------------------------------------------------------------- time


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets: clock[0] is the time."""
    now = [100.0]
    monkeypatch.setattr(emulated, "perf_counter", lambda: now[0])
    return now


MACHINE = Machine("round numbers", 0.0, 1.0, flops_rate=1000.0, memory_rate=100.0, overhead=0.5)


def bound(backend, kernel, rows):
    """A kernel on `rows` rows of 2 float64. A product with a 2 x 2 matrix takes 8 flops and 32 bytes per row."""
    x, y = np.ones((rows, 2)), np.zeros((rows, 2))
    reads = {"matmul": [x, np.eye(2)], "add": [x, x], "copy": [x]}[kernel]
    return backend.bind(kernel, reads, [y], ["float64"] * len(reads), ["float64"])


def test_a_kernel_takes_as_long_as_the_machine_says(clock):
    backend = Emulated(Machine("slow", 0.0, 1.0, flops_rate=8.0, memory_rate=1e9, overhead=0.5))
    token = bound(backend, "matmul", 3)(())
    assert (token.begun, token.due) == (100.0, 103.5) and not token.done()
    clock[0] = 103.4
    assert not token.done()
    clock[0] = 103.5
    assert token.done()
    token = bound(Emulated(MACHINE), "copy", 10)(())  # 160 bytes are read and 160 written
    assert token.due - token.begun == pytest.approx(0.5 + 3.2)


def test_kernels_of_a_stream_run_one_after_the_other(clock):
    backend = Emulated(MACHINE)
    first, second = bound(backend, "matmul", 4)(()), bound(backend, "matmul", 4)(())
    assert second.begun == first.due > first.begun == 100.0
    clock[0] = second.due + 1
    assert bound(backend, "matmul", 4)(()).begun == second.due + 1, "the stream was idle"


def test_sums_have_a_stream_of_their_own(clock):
    backend = Emulated(MACHINE)
    product, total = bound(backend, "matmul", 40)(()), bound(backend, "add", 1)(())
    assert total.begun == product.begun
    assert bound(backend, "copy", 1)(()).begun == total.due


def test_a_kernel_follows_others(clock):
    """It waits for kernels of another stream too, although its own stream is free."""
    backend = Emulated(MACHINE)
    product = bound(backend, "matmul", 40)(())
    total = bound(backend, "add", 1)([product])
    assert total.begun == product.due
    assert bound(backend, "matmul", 1)([total]).begun == total.due
    clock[0] = total.due + 100
    late = bound(backend, "add", 1)([product, total])
    assert late.begun == clock[0], "the kernels before it are done"


def test_two_devices_are_independent(clock):
    assert bound(Emulated(MACHINE), "matmul", 1)(()).begun == bound(Emulated(MACHINE), "matmul", 1)(()).begun == 100.0


def test_kernels_take_wall_time_and_no_time_of_the_program():
    """On the clock of the machine. The launch of a kernel of a minute returns at once."""
    backend = Emulated(Machine("slow", 0.0, 1.0, flops_rate=8 / 0.02, memory_rate=1e12, overhead=0.0))
    begun = time.perf_counter()
    token = bound(backend, "matmul", 5)(())
    while not token.done():
        time.sleep(1e-3)
    assert time.perf_counter() - begun >= 0.1
    token = bound(backend, "matmul", 3000)(())
    assert not token.done() and time.perf_counter() < token.due


def test_a_rank_has_a_speed(clock):
    machine = replace(MACHINE, speeds=(1.0, 0.25))
    fast, slow = (bound(Emulated(machine, rank), "copy", 10)(()) for rank in (0, 1))
    assert slow.due - slow.begun == pytest.approx(4 * (fast.due - fast.begun))
    for rank, seconds in ((None, 0.5), (0, 0.5), (1, 2.0)):
        token = Emulated(machine, rank).bind_timed(lambda: None, 0.5)(())
        assert token.due - token.begun == seconds
