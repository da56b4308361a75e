"""kernels.cu, compiled for the CPU: every kernel against NumPy, on arrays between pages that no one may touch.

A read or write outside an operand ends the process. The gaps of strided results must keep their bytes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from itertools import product

import cuda_on_cpu
import numpy as np
import pytest
from cuda_on_cpu import guarded, on_device

from fompi.backends import chains, wires
from fompi.backends.cuda import kernels, products
from fompi.backends.half import narrow, storage, widen
from fompi.backends.numpy import Numpy
from fompi.base.errors import DeviceError, DtypeError, ShapeError
from fompi.base.wires import WIDE, WIRES

FLOATS = ("float32", "float16", "bfloat16")
SHAPES = [(), (0,), (1,), (7,), (16,), (5, 3), (4, 8), (3, 0, 2), (2, 3, 16), (1000,), (1024,), (9, 33)]


@pytest.fixture(scope="session")
def cpu(tmp_path_factory):
    return cuda_on_cpu.Compiled(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def rng(request):
    return np.random.default_rng(len(request.node.name))


def random(rng, shape, dtype):
    """Elements of all kinds: integers over their whole range, floats of several magnitudes."""
    kind = storage(dtype)
    if dtype in FLOATS or dtype == "float64":
        numbers = rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 4, shape)
        return narrow(np.asarray(numbers, "f8" if dtype == "float64" else "f4"), dtype).reshape(shape)
    if kind.kind == "c":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(kind)
    if kind.kind == "b":
        return np.asarray(rng.integers(0, 2, shape), kind)
    return np.asarray(rng.integers(np.iinfo(kind).min, np.iinfo(kind).max, shape, kind, endpoint=True))


def views(array, rng):
    """`array` in several ways in memory: contiguous, at an odd place, with gaps, with its dimensions exchanged."""
    whole = guarded(array, at_end=bool(rng.integers(2)))
    yield whole
    odd = guarded(np.concatenate([array.reshape(-1)[:1], array.reshape(-1)]) if array.size else array)
    yield odd[1:].reshape(array.shape) if array.size else odd
    if array.ndim:
        gaps = guarded(np.repeat(np.repeat(array, 2, -1), 2, 0))
        yield gaps[1::2, ..., ::2] if array.ndim > 1 else gaps[::4]
        wide = guarded(np.concatenate([array, array[..., :1], array], -1))
        yield wide[..., : array.shape[-1]]
    if array.ndim > 1:
        yield guarded(np.ascontiguousarray(np.moveaxis(array, -1, 0))).transpose(*range(1, array.ndim), 0)


def run(cpu, name, reads, writes, read_dtypes, write_dtypes):
    """Carry out the kernel. The results go into `writes`; what lies between their elements must not change."""
    before = [a.copy() for a in reads]
    bases = [c.base if isinstance(c.base, np.ndarray) else c for c in writes]
    saved = [base.copy() for base in bases]
    for launch in kernels.launches(
        name, [*map(on_device, reads)], [*map(on_device, writes)], read_dtypes, write_dtypes
    ):
        assert 0 < launch.grid[0] <= kernels.MOST_BLOCKS and launch.block[0] % 32 == 0
        cpu.run(launch)
    results = [c.copy() for c in writes]
    for c, base, old in zip(writes, bases, saved, strict=True):
        c[...] = 0
        between = base.copy()
        base[...] = old
        c[...] = 0
        assert between.tobytes() == base.tobytes(), "bytes between the elements of the result have changed"
    for a, old in zip(reads, before, strict=True):
        if not any(np.may_share_memory(a, c) for c in writes):
            assert a.tobytes() == old.tobytes()
    return results


def same_bits(a, b):
    assert a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


# ------------------------------------------------------------------------------------------------- kernels of plans


@pytest.mark.parametrize("name", ["copy", "pack"])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "bfloat16", "float32", "int64", "complex128"])
def test_copies_have_the_same_bits(cpu, rng, name, dtype):
    for shape in SHAPES:
        a = random(rng, shape, dtype)
        for source, to in product(views(a, rng), views(np.zeros_like(a), rng)):
            (c,) = run(cpu, name, [source], [to], [dtype], [dtype])
            same_bits(c, a)


def wide_range(rng, count):
    """Elements whose runs of 64 differ by many magnitudes; some runs have zeros, a NaN or an infinity."""
    a = rng.standard_normal(count).astype("f4") * np.repeat(2.0 ** rng.integers(-30, 20, -(-count // 64)), 64)[:count]
    for at, value in ((70, np.nan), (200, np.inf), (330, -0.0)):
        a[at : at + 1] = value
    a[384:450] = 0
    a[450:900:65] = (np.float32(-3.4028235e38) * (1 - 2.0**-24 * np.arange(7)))[: len(a[450:900:65])]
    a[460:900:65] = 3.4e38
    return a.astype("f4")


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_messages_that_carry_fewer_bits_have_the_bits_of_numpy(cpu, rng, wire, dtype):
    if wire not in WIDE[dtype]:
        with pytest.raises(DtypeError, match="no kernel for the dtypes"):
            kernels.launches(f"encode_{wire}", [on_device(np.zeros(4, storage(dtype)))], [on_device(np.zeros(8, "u1"))],
                             [dtype], ["uint8"])  # fmt: skip
        return
    for count in (0, 1, 2, 63, 64, 65, 127, 501, 1000):
        with np.errstate(all="ignore"):
            a, b = guarded(narrow(wide_range(rng, count), dtype)), guarded(rng.standard_normal(count).astype("f4"))
        m, sent = (guarded(np.zeros(WIRES[wire].nbytes(count), "u1")) for _ in range(2))
        wires.run(f"encode_{wire}", [a, sent], [dtype, "uint8"])
        same_bits(run(cpu, f"encode_{wire}", [a], [m], [dtype], ["uint8"])[0], sent)
        c, got = (guarded(np.zeros(count, storage(dtype))) for _ in range(2))
        wires.run(f"decode_{wire}", [sent, got], ["uint8", dtype])
        nans = np.isnan(widen(got, dtype))
        (found,) = run(cpu, f"decode_{wire}", [sent], [c], ["uint8"], [dtype])
        assert (np.isnan(widen(found, dtype)) == nans).all()
        same_bits(found[~nans], got[~nans])
        if dtype == "float32":
            wires.run(f"decode_add_{wire}", [sent, b, got], ["uint8", dtype, dtype])
            (found,) = run(cpu, f"decode_add_{wire}", [sent, b], [c], ["uint8", dtype], [dtype])
            same_bits(found[~nans], got[~nans])


def test_a_copy_keeps_the_bits_of_a_nan(cpu):
    bits = guarded(np.array([0x7FC1, 0x7E01, 0xFFFF, 0x0001, 0x8000], np.uint16))
    for dtype in ("float16", "bfloat16"):
        a, c = bits.view(storage(dtype)), guarded(np.zeros(5, np.uint16)).view(storage(dtype))
        same_bits(run(cpu, "copy", [a], [c], [dtype], [dtype])[0], a)


@pytest.mark.parametrize("dtypes", [d for d in product(FLOATS, repeat=2) if d[0] != d[1]])
def test_conversions_have_the_bits_of_numpy(cpu, rng, dtypes):
    for shape in SHAPES:
        a = random(rng, shape, dtypes[0])
        wanted = np.zeros(shape, storage(dtypes[1]))
        Numpy().bind("copy", [a], [wanted], [dtypes[0]], [dtypes[1]])()
        for source, to in product(views(a, rng), views(np.zeros_like(wanted), rng)):
            same_bits(run(cpu, "copy", [source], [to], [dtypes[0]], [dtypes[1]])[0], wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_number_is_rounded_to_the_nearest_even(cpu, dtype):
    """All halves between two neighbours, just beside them, and numbers too large or too small."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    all_of = widen(bits.view(storage(dtype)), dtype)
    finite = np.sort(all_of[np.isfinite(all_of)])
    middle = (finite[1:].astype("f8") + finite[:-1]) / 2
    numbers = np.concatenate([np.nextafter(middle.astype("f4"), s) for s in (np.float32(-np.inf), np.float32(np.inf))])
    edges = np.array([3.4e38, -3.4e38, 65520, 65519.9, 1e-45], "f4")
    a = guarded(np.concatenate([numbers, middle.astype("f4"), all_of, edges]))
    (c,) = run(cpu, "copy", [a], [guarded(np.zeros(a.shape, storage(dtype)))], ["float32"], [dtype])
    with np.errstate(over="ignore"):
        wanted = narrow(a, dtype)
    is_nan = np.isnan(a)
    same_bits(c[~is_nan], wanted[~is_nan])
    assert np.isnan(widen(c[is_nan], dtype)).all()
    (up,) = run(cpu, "copy", [guarded(bits).view(storage(dtype))], [guarded(np.zeros(1 << 16, "f4"))], [dtype],
                ["float32"])  # fmt: skip
    np.testing.assert_array_equal(up, all_of)


SUMS = [(d, d, d) for d in kernels.TYPES] + [
    d for half in ("float16", "bfloat16") for d in product(("float32", half), repeat=3) if len({*d}) > 1
]


@pytest.mark.parametrize("dtypes", SUMS, ids="-".join)
def test_sums_have_the_bits_of_numpy(cpu, rng, dtypes):
    a_dtype, b_dtype, dtype = dtypes
    for shape in SHAPES:
        a, b = random(rng, shape, a_dtype), random(rng, shape, b_dtype)
        wanted = np.zeros(shape, storage(dtype))
        Numpy().bind("add", [a, b], [wanted], [a_dtype, b_dtype], [dtype])()
        for x, y, to in zip(views(a, rng), [*views(b, rng)][::-1], views(np.zeros_like(wanted), rng), strict=True):
            same_bits(run(cpu, "add", [x, y], [to], dtypes[:2], [dtype])[0], wanted)


@pytest.mark.parametrize("kernel", ["max", "min", "prod", "mean3"])
def test_reductions_have_the_bits_of_numpy(cpu, rng, kernel):
    """Of all dtypes that have them, with NaN, and of the half types with results in float32. Else they are refused."""
    listed = [(d, d, d) for d in (*kernels.TYPES, "bool")]
    for half in ("float16", "bfloat16"):
        listed += [("float32", half, half), ("float32", "float32", half)]
        listed += [(half, half, "float32"), ("float32", half, "float32")]
    for a_dtype, b_dtype, dtype in listed:
        kind = "complex" if "complex" in dtype else "bool" if dtype == "bool" else "int" if "int" in dtype else "float"
        refused = {"max": ["complex"], "min": ["complex"], "prod": ["bool"], "mean3": ["bool", "int"]}[kernel]
        is_unfinished = kernel == "mean3" and dtype == "float32" != b_dtype  # a mean ends a reduction
        for shape in ((7, 24), (5,)):
            flags = [rng.integers(0, 2, shape) > 0 for _ in range(2)]
            a, b = flags if dtype == "bool" else (random(rng, shape, d) for d in (a_dtype, b_dtype))
            if a_dtype in ("float32", "float64"):
                a[..., 0] = np.nan
            to = np.zeros(shape, storage(dtype))
            dtypes = [a_dtype, b_dtype]
            if kind in refused or is_unfinished:
                with pytest.raises(DtypeError, match=f"^{kernel}: no kernel for the dtypes"):
                    kernels.launches(kernel, [on_device(a), on_device(b)], [on_device(to)], dtypes, [dtype])
                continue
            wanted = np.zeros_like(to)
            Numpy().bind(kernel, [a, b], [wanted], dtypes, [dtype])()
            (got,) = run(cpu, kernel, [guarded(a), guarded(b)], [guarded(to)], dtypes, [dtype])
            if kind == "complex":
                np.testing.assert_allclose(got, wanted, rtol=1e-5)
            else:
                np.testing.assert_array_equal(widen(got, dtype), widen(wanted, dtype), err_msg=f"{dtype} {dtypes}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_sums_in_place(cpu, rng, dtype):
    for shape in SHAPES:
        a, b = random(rng, shape, dtype), random(rng, shape, dtype)
        wanted = np.zeros_like(a)
        Numpy().bind("add", [a, b], [wanted], [dtype] * 2, [dtype])()
        for place in (0, 1):
            reads = [guarded(a), guarded(b)]
            same_bits(run(cpu, "add", reads, [reads[place]], [dtype] * 2, [dtype])[0], wanted)


def test_rows_in_several_chunks(cpu, rng):
    """One launch a chunk, and none for an empty one."""
    rows, dtype = (4, 0, 3), "bfloat16"
    a, b = ([guarded(random(rng, (n, 24), dtype)) for n in rows] for _ in range(2))
    c = [guarded(np.zeros_like(x)) for x in a]
    launches = kernels.launches("add", [*map(on_device, (*a, *b))], [*map(on_device, c)], [dtype] * 6, [dtype] * 3)
    assert [launch.function for launch in launches] == ["add_bf16_bf16_bf16_v"] * 2
    results = run(cpu, "add", [*a, *b], c, [dtype] * 6, [dtype] * 3)
    for x, y, got in zip(a, b, results, strict=True):
        same_bits(got, narrow(widen(x, dtype) + widen(y, dtype), dtype))


def test_large_units_where_the_memory_allows_it(rng):
    """16 bytes a thread if all rows begin at a multiple of 16, else the largest unit that all rows are made of."""

    def functions(a, c):
        launches = kernels.launches("copy", [on_device(a)], [on_device(c)], ["x"], ["x"])
        return [(launch.function, int(launch.args[0]["dims"]), int(launch.args[0]["count"])) for launch in launches]

    base = guarded(np.zeros((64, 64), "f4"))
    assert functions(base, base) == [("copy_u128", 1, 1024)]
    assert functions(base[:, 4:12], base[:, :8]) == [("copy_u128", 2, 128)]
    assert functions(base[:, 2:12], base[:, :10]) == [("copy_u64", 2, 320)]
    assert functions(base[:, 1:9], base[:, :8]) == [("copy_u32", 2, 512)]
    assert functions(base[:, ::2], base[:, :32]) == [("copy_u32", 2, 2048)]
    assert functions(base.view("u1")[:, 1:], base.view("u1")[:, 1:]) == [("copy_u8", 2, 64 * 255)]
    assert functions(base[:0], base[:0]) == []
    five = guarded(np.zeros((4,) * 5, "f4"))[:3, :3, :3, :3, :3]
    assert functions(five, five) == [("copy_u32", 5, 243)]


def test_an_array_of_too_many_dimensions_is_refused():
    base = np.zeros((3,) * 6, "f4")[:, :2, :2, :2, :2, :2]
    with pytest.raises(ShapeError, match="6 dimensions that do not lie together: pack"):
        kernels.launches("copy", [on_device(base)], [on_device(base)], ["float32"], ["float32"])


def test_more_elements_than_threads(cpu, rng, monkeypatch):
    monkeypatch.setattr(kernels, "MOST_BLOCKS", 2)
    for dtype in ("uint8", "float32"):
        a = guarded(random(rng, (50_001,), dtype))
        same_bits(run(cpu, "copy", [a], [guarded(np.zeros_like(a))], [dtype], [dtype])[0], a)
        doubled = run(cpu, "add", [a, a], [guarded(np.zeros_like(a))], [dtype] * 2, [dtype])[0]
        same_bits(doubled, a + a)


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("m", "k", "n", "leaves"), [(1, 8, 1, 4), (70, 33, 65, 1), (5, 60, 130, 6), (130, 0, 3, 1)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_products_in_a_fixed_order_have_the_bits_of_the_host(cpu, rng, dtype, m, k, n, leaves):
    """Also of transposed operands, with a bias, added to what is there, and with few blocks."""
    x, w, bias = (rng.standard_normal(shape).astype(dtype) for shape in ((m, k), (k, n), (n,)))
    for begin, adds in ((None, False), (bias, False), (None, leaves == 1)):
        for a in (x, np.asfortranarray(x)):
            for b in (w, np.asfortranarray(w)):
                y = guarded(rng.standard_normal((m, n)).astype(dtype))
                wanted = y.copy()
                chains.product(a, b, wanted, leaves, begin, adds)
                operands = [*map(on_device, (guarded(a.T).T if a.flags.f_contiguous else guarded(a), b, y))]
                launch = kernels.chain(
                    *map(products.matrix, operands), dtype, leaves, 0 if begin is None else begin.ctypes.data, adds
                )
                if launch.grid[0]:
                    cpu.run(launch._replace(grid=(min(launch.grid[0], 2),)))
                assert y.tobytes() == wanted.tobytes()


def test_what_is_not_there_is_refused():
    x, wide = (on_device(np.zeros((4, 4), d)) for d in ("f4", "f8"))
    with pytest.raises(DeviceError, match="no kernel 'softmax' \\(did you mean max\\?\\) for a device; there"):
        kernels.launches("softmax", [x], [x], ["float32"], ["float32"])
    for name, reads, dtypes in (
        ("copy", [wide], ["float32"]),
        ("add", [wide, x], ["float64", "float32"]),
        ("add", [x, x], ["float16", "bfloat16"]),
    ):
        with pytest.raises(DtypeError, match=f"^{name}: .*convert"):
            kernels.launches(name, reads, [x], dtypes, ["float64" if name == "copy" else "float32"])


def test_shapes_that_do_not_match_are_refused():
    x, y = (on_device(np.zeros(shape, "f4")) for shape in ((4, 4), (4, 5)))
    for name, reads, write in (("add", [x, y], x), ("copy", [y], x)):
        with pytest.raises(ShapeError, match=f"^{name}: "):
            dtypes = ["float32"] * len(reads)
            kernels.launches(name, reads, [write], dtypes, ["float32"])


BARRIERS = """
KERNEL(wrong, int* x) { if (threadIdx.x % 2) __syncthreads(); *x += 1; }
KERNEL(right, int* x) {
  __syncthreads();
  *x += __shfl_xor_sync(~0u, threadIdx.x, 1) == (threadIdx.x ^ 1);
}
"""


def test_threads_at_different_barriers_are_found(tmp_path, monkeypatch):
    """The machine of this file itself: a kernel in which some threads skip a barrier."""
    code = tmp_path / "barriers.cu"
    code.write_text(BARRIERS)
    monkeypatch.setattr(cuda_on_cpu, "SOURCE", code)
    made, x = cuda_on_cpu.Compiled(tmp_path), np.zeros(1, np.int32)
    made.run(kernels.Launch("right", (2,), (64,), (x.ctypes.data,)))
    assert x[0] == 128
    with pytest.raises(AssertionError):
        made.run(kernels.Launch("wrong", (1,), (64,), (x.ctypes.data,)))


@pytest.mark.parametrize("at_end, offset", [(True, 20), (False, -1)])
def test_a_guarded_array_ends_a_process_that_reads_beside_it(at_end, offset):
    code = (
        "import ctypes, numpy, cuda_on_cpu\n"
        f"a = cuda_on_cpu.guarded(numpy.zeros(5, 'f4'), {at_end})\n"
        "print(ctypes.string_at(a.ctypes.data, 20) == bytes(20), flush=True)\n"
        f"ctypes.string_at(a.ctypes.data + {offset}, 1)"
    )
    folder = os.path.dirname(cuda_on_cpu.__file__)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "True\n"), done.stderr


def test_the_source_is_part_of_the_package():
    """It is read as data of the package, so that an installed fompi has it, too."""
    assert kernels.source() == cuda_on_cpu.SOURCE.read_text()


def test_each_function_is_in_its_part():
    """NVRTC compiles a part at a time. All parts together are the whole source."""

    def functions(*options):
        command = ["g++", "-E", "-P", "-x", "c++", "-DKERNEL(name,...)=FUNCTION name ;void f()", *options]
        done = subprocess.run([*command, cuda_on_cpu.SOURCE], capture_output=True, text=True, timeout=50, check=True)
        return set(re.findall(r"FUNCTION (\w+)", done.stdout))

    parts = [functions(f"-DPART={part}") for part in range(len(kernels.PARTS))]
    assert set.union(*parts) == functions() and sum(map(len, parts)) == len(functions()) > 100
    assert all(kernels.part_of(name) == part for part, names in enumerate(parts) for name in names)
