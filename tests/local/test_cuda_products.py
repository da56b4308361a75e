"""The products of the CUDA device as calls of cuBLAS, and its other kernels, over a fake runtime."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from device_calls import random

import fompi
from fompi.backends import half
from fompi.backends.cuda import library
from fompi.backends.cuda.products import matrix
from fompi.backends.numpy import Numpy

pytestmark = pytest.mark.one_mpi  # CuPy is in the environment of one MPI library only


def launch(device, name, reads, writes, read_dtypes, write_dtypes):
    stream = device.stream("mine")
    device.kernel(name, reads, writes, read_dtypes, write_dtypes)(stream)


PRODUCTS = {
    "matmul": lambda x, w, b, h, g: ("matmul", [x, w], 1),
    "matmul of two runs": lambda x, w, b, h, g: ("matmul", [x[:2], x[3:], w], 2),
    "matmul_bias": lambda x, w, b, h, g: ("matmul_bias", [x, w, b], 1),
    "matmul_bias of two runs": lambda x, w, b, h, g: ("matmul_bias", [x[:1], x[2:], w, b], 2),
    "no rows": lambda x, w, b, h, g: ("matmul_bias", [x[:0], x[2:], w, b], 2),
    "no columns": lambda x, w, b, h, g: ("matmul_bias", [x[:, :0], w[:0], b], 1),
    "matmul_add": lambda x, w, b, h, g: ("matmul_add", [x, h, w], 1),
    "matmul_add of two runs": lambda x, w, b, h, g: ("matmul_add", [x[:1], x[2:], h[:1], h[2:], w], 2),
    "gradient": lambda x, w, b, h, g: ("gradient", [x, h], 1),
    "gradient of two runs": lambda x, w, b, h, g: ("gradient", [x[:2], x[3:], h[:2], h[3:]], 1),
    "gradient of no rows": lambda x, w, b, h, g: ("gradient", [x[:0], h[:0]], 1),
    "gradient_add": lambda x, w, b, h, g: ("gradient_add", [x, h, g], 1),
    "gradient_add of two runs": lambda x, w, b, h, g: ("gradient_add", [x[:2], x[3:], h[:2], h[3:], g], 1),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "complex64", "complex128"])
def test_products_have_the_bits_of_the_host(device, dtype):
    host, storage = Numpy(), half.storage(dtype)

    def made(*shape):
        values = np.random.default_rng(sum(shape)).standard_normal(shape).astype("f4")
        if dtype == "bfloat16":
            return values.astype(ml_dtypes.bfloat16).view(storage)
        return values.astype(storage)

    for name, order in itertools.product(PRODUCTS, ("C", "F")):
        arrays = [np.asarray(made(*shape), order=order) for shape in ((5, 6), (6, 4), (4,), (5, 4), (6, 4))]
        kernel, reads, results = PRODUCTS[name](*arrays)
        lengths = [len(x) for x in reads[:results]] if kernel.startswith("matmul") else [6]
        wanted = [np.zeros((n, 4), storage) for n in lengths]
        host.bind(kernel, reads, wanted, [dtype] * len(reads), [dtype] * len(wanted))()
        for transposed in (False, True):
            writes = [device.array(np.zeros((4, n), storage)).rows_first(1) for n in lengths]
            if not transposed:
                writes = [device.array(np.zeros((n, 4), storage)) for n in lengths]
            lent = [device.array(np.ascontiguousarray(x.T)).rows_first(1) if order == "F" and x.ndim == 2
                    else device.array(x) for x in reads]  # fmt: skip
            launch(device, kernel, lent, writes, [dtype] * len(lent), [dtype] * len(writes))
            for y, array in zip(writes, wanted, strict=True):
                if order == "C" and not transposed:
                    assert y.get().tobytes() == array.tobytes(), name
                got, right = (a.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else a for a in (y.get(), array))
                kind = np.promote_types(got.dtype, "f4") if dtype != "bfloat16" else "f4"
                np.testing.assert_allclose(got.astype(kind), right.astype(kind), rtol=1e-2, atol=1e-2, err_msg=name)


def test_a_sum_in_place_and_operands_that_cublas_cannot_address(device):
    a, h, g = random(5, 6), random(5, 4), random(6, 4)
    total = device.array(g)
    launch(device, "gradient_add", [device.array(a), device.array(h), total], [total], ["float32"] * 3, ["float32"])
    np.testing.assert_array_equal(total.get(), g + a.T @ h)
    x, w = random(3, 4, 12), random(6, 5)
    strided = device.array(x)[:, ::2, ::2]
    assert matrix(strided) is None
    y = device.empty((3, 2, 5), "f4")
    launch(device, "matmul", [strided, device.array(w)], [y], ["float32"] * 2, ["float32"])
    np.testing.assert_array_equal(y.get(), x[:, ::2, ::2] @ w)
    y = device.array(np.zeros((3, 10), "f4"))[:, ::2]
    launch(device, "matmul", [device.array(random(3, 6)), device.array(w)], [y], ["float32"] * 2, ["float32"])
    np.testing.assert_array_equal(y.get(), random(3, 6) @ w)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_each_expert_has_a_matrix(device, dtype):
    """The products of the rows of experts, with the bits of the host. One expert has no rows."""
    a, h, w, g = (random(*shape).astype(dtype) for shape in ((7, 6), (7, 4), (3, 6, 4), (3, 6, 4)))
    runs = [slice(0, 4), slice(4, 4), slice(4, 7)]
    rows, others = ([x[run] for run in runs] for x in (a, h))
    cases = (("matmul_grouped", [*rows, w], [(4, 4), (0, 4), (3, 4)]),
             ("gradient_grouped", [*rows, *others], [(3, 6, 4)]),
             ("gradient_grouped_add", [*rows, *others, g], [(3, 6, 4)]))  # fmt: skip
    for kernel, reads, shapes in cases:
        wanted, writes = ([np.zeros(shape, dtype) for shape in shapes] for _ in range(2))
        Numpy().bind(kernel, reads, wanted, [dtype] * len(reads), [dtype] * len(writes))()
        writes = [device.array(y) for y in writes]
        launch(device, kernel, [*map(device.array, reads)], writes, [dtype] * len(reads), [dtype] * len(writes))
        for y, right in zip(writes, wanted, strict=True):
            np.testing.assert_array_equal(y.get(), right)


def products(device):
    """The calls of cuBLAS without the small products that load its kernels."""
    return [call for call in device.library._cublas.calls if call[3:6] != (library.LOADED_SIZE,) * 3]


def test_kernels_are_loaded_when_a_plan_is_bound(device, fakecuda):
    """cuBLAS has run a small product of every kind before the first step, and once only."""
    plan = fompi.plan(
        fompi.all_gather_matmul, fompi.Spec((4, 6), "float32", fompi.Shard(0)),
        fompi.Spec((6, 5), "float32", fompi.Shard(1)), ranks=1
    )  # fmt: skip
    calls = device.library._cublas.calls
    x, w = fakecuda.as_cupy(device, random(4, 6)), fakecuda.as_cupy(device, random(6, 5))
    with fompi.bind(plan, x=x, w=w) as step:
        assert [call[3:6] for call in calls] == [(library.LOADED_SIZE,) * 3]
        for _ in range(2):
            step()
        assert len(calls) == 3
    with fompi.bind(plan, x=x, w=w):
        assert len(calls) == 3
    a = device.array(random(6, 4, dtype="f2"))
    launch(device, "matmul", [a, a.rows_first(1)], [device.empty((6, 6), "f2")], ["float16"] * 2, ["float16"])
    assert [call[8] for call in calls[3:]] == [2, 2] and len(products(device)) == 3, "another kind"


def test_the_calls_of_cublas(device):
    """float32 is exact unless tf32 is asked for. Half types are summed in float32; a sum of several calls stays so."""
    x, w = device.array(random(5, 6)), device.array(random(6, 4))
    y = device.empty((5, 4), "f4")
    launch(device, "matmul", [x, w], [y], ["float32"] * 2, ["float32"])
    device.tf32 = True
    launch(device, "matmul", [x, w], [y], ["float32"] * 2, ["float32"])
    calls = products(device)
    assert [call[17] for call in calls] == [68, 77]
    assert calls[0][3:6] == (4, 5, 6) and calls[0][7] == w.ptr and calls[0][10] == x.ptr and calls[0][14] == y.ptr
    a, h = device.array(random(5, 6, dtype="f2")), device.array(random(5, 4, dtype="f2"))
    g = device.empty((6, 4), "f2")
    launch(device, "gradient", [a[:2], a[2:], h[:2], h[2:]], [g], ["float16"] * 4, ["float16"])
    calls = products(device)
    assert [(call[8], call[15]) for call in calls[2:]] == [(2, 0), (2, 0)], "float16 operands, a float32 sum"
    assert device.library.used, "cuBLAS runs in the current stream of CuPy"
    with pytest.raises(fompi.DtypeError, match="cuBLAS has no product of int64"):
        device.kernel("matmul", [x.view("i8"), w.view("i8")], [y], ["int64"] * 2, ["int64"])


def test_kernels_of_the_user_get_arrays_of_cupy(device, fakecuda):
    import cupy

    x, y = device.array(random(3, 4)), device.array(random(3, 4))

    def double(reads, writes):
        assert isinstance(reads[0], cupy.ndarray) and reads[0].data.ptr == x[1:].ptr and writes[0].shape == (2, 4)
        fakecuda.view(y)[1:] = 2 * fakecuda.view(x)[1:]

    device.call(double, "double", [x[1:]], [y[1:]])(device.stream("mine"))
    np.testing.assert_array_equal(y.get()[1:], 2 * x.get()[1:])

    def fails(reads, writes):
        raise ZeroDivisionError("boom")

    with pytest.raises(ZeroDivisionError):
        device.call(fails, "fails", [], [y])(device.stream("mine"))


def test_launches_of_compiled_kernels(device, monkeypatch):
    """The arguments lie in memory as `cuLaunchKernel` takes them; the stream is the raw one."""
    import ctypes

    calls = []

    class Driver:
        @staticmethod
        def launchKernel(*arguments):
            assert len(arguments) == 11 and all(type(a) is int for a in arguments)
            addresses = (ctypes.c_void_p * 3).from_address(arguments[9])
            struct = (ctypes.c_int64 * 22).from_address(addresses[0])
            calls.append((arguments[0], arguments[1:8], arguments[8], arguments[10], struct[0],
                          *((ctypes.c_uint64).from_address(a).value for a in addresses[1:])))  # fmt: skip

    functions, loads = {}, []

    class RawModule:
        def __init__(self, code, options, backend):
            assert "KERNEL" in code and options == ("-std=c++17", "-DPART=0") and backend == "nvrtc"

        def get_function(self, name):
            loads.append(name)
            return SimpleNamespace(kernel=SimpleNamespace(ptr=functions.setdefault(name, 100 + len(functions))))

    real = library.DeviceLibraries(device, driver=Driver)
    monkeypatch.setattr(device, "cupy", SimpleNamespace(RawModule=RawModule))
    a, c = device.empty((70, 6), "f4"), device.empty((70, 6), "f2")
    stream = device.stream("mine")
    steps = real.elementwise("copy", [a[:, :5]], [c[:, :5]], ["float32"], ["float16"])
    before = [*loads]
    for step in steps:
        step(stream)
    assert [*functions] == ["cast_f16_f32"] and loads == before, "a launch loads nothing"
    assert calls == [(100, (2, 1, 1, 256, 1, 1, 0), stream.ptr, 0, 350, c.ptr, a.ptr)]


def test_the_current_stream_of_cupy_is_ours_during_a_product(device, monkeypatch):
    """CuPy sends each call of cuBLAS to its current stream of the thread."""
    order = []

    class Stream:
        @staticmethod
        def from_external(stream):
            order.append(stream.__cuda_stream__())
            return nullcontext()

    monkeypatch.setattr(device, "cupy", SimpleNamespace(cuda=SimpleNamespace(Stream=Stream)))
    real = library.DeviceLibraries(device, device.library._cublas)
    a, c = matrix(device.array(random(3, 3))), matrix(device.empty((3, 3), "f4"))
    stream = device.stream("mine")
    enqueue = real.gemm(a, a, c, "float32", "float32", False)
    order.clear()  # the small product that loads the kernel
    enqueue(stream)
    enqueue(stream)
    assert order == [(0, stream.ptr)], "made once for a stream"
    real.close()


def test_cublas_that_is_missing(device):
    lib = library.DeviceLibraries(device)
    with pytest.raises(fompi.DeviceError, match=r"cuBLAS is missing: .*\[ctk\]"):
        _ = lib.handle


SIGNATURES = """
from cupy_backends.cuda.libs import cublas

print(cublas.gemmEx.__doc__, cublas.create.__doc__, cublas.destroy.__doc__, cublas.setMathMode.__doc__, sep="\\n")
print(cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_COMPUTE_32F_FAST_TF32, cublas.CUBLAS_COMPUTE_64F)
print(cublas.CUBLAS_GEMM_DEFAULT, cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_T)
"""


def test_the_fake_cublas_has_the_signatures_of_cupy(fakecuda, tmp_path):
    """CuPy's module of cuBLAS loads with a library that has all its symbols and does nothing."""
    (module,) = Path(find_spec("cupy_backends").origin).parent.glob("cuda/libs/cublas*.so")
    listed = subprocess.run(["nm", "-D", "--undefined-only", module], capture_output=True, text=True, check=True).stdout
    symbols = {name: version for name, version in re.findall(r"U (cublas\w+)@(\S+)", listed)}
    for stub in {*symbols.values()} | {name.replace("cublas", "cublasLt") for name in symbols.values()}:
        code = "".join(f"int {name}(void) {{ return 0; }}" for name, version in symbols.items() if version == stub)
        (tmp_path / "stub.c").write_text(code + "int unused;")
        (tmp_path / "stub.map").write_text(f"{stub} {{ global: *; }};")
        flags = ["-shared", "-fPIC", f"-Wl,-soname,{stub}", "-Wl,--version-script=stub.map", "-o", stub]
        subprocess.run(["gcc", *flags, "stub.c"], cwd=tmp_path, check=True)
    done = subprocess.run(
        [sys.executable, "-c", SIGNATURES], env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        f"gemmEx({fakecuda.GEMM})", "create() -> intptr_t", "destroy(intptr_t handle)",
        "setMathMode(intptr_t handle, int mode)", "68 77 70", "-1 0 1"
    ], done.stderr  # fmt: skip
