"""The kernels on NumPy arrays compared with their definitions, and the cost of kernels."""

from __future__ import annotations

from itertools import product

import catalogue
import numpy as np
import pytest
from catalogue import rounded, wide
from twin import poisoned

from fompi.backends.half import storage
from fompi.backends.numpy import Numpy
from fompi.base.errors import PlanError
from fompi.plans.kernels import KERNELS, OF_WIRES, cost, demand, find

MEANING = {
    **dict.fromkeys(("copy", "pack", "download", "upload"), lambda a: a),
    "add": lambda a, b: a + b,
    "max": np.maximum,
    "min": np.minimum,
    "prod": lambda a, b: a * b,
    "matmul": lambda x, w: x @ w,
    "matmul_bias": lambda x, w, b: x @ w + b,
    "matmul_add": lambda x, c, w: c + x @ w,
    "gradient": lambda a, h: np.tensordot(a, h, (range(a.ndim - 1), range(h.ndim - 1))),
    "gradient_add": lambda a, h, g: g + np.tensordot(a, h, (range(a.ndim - 1), range(h.ndim - 1))),
    "matmul_grouped": lambda x, w: x @ w[0],
    "gradient_grouped": lambda a, h: np.tensordot(a, h, (range(a.ndim - 1), range(h.ndim - 1)))[None],
    "gradient_grouped_add": lambda a, h, g: g + np.tensordot(a, h, (range(a.ndim - 1), range(h.ndim - 1))),
}
SHAPES = {
    "copy": ["rk"], "pack": ["rk"], "download": ["rk"], "upload": ["rk"],
    **{name: ["rk", "rk"] for name in ("add", "max", "min", "prod")},
    "matmul": ["rk", "kn"], "matmul_bias": ["rk", "kn", "n"],
    "matmul_add": ["rk", "rn", "kn"],
    "gradient": ["rk", "rn"], "gradient_add": ["rk", "rn", "kn"],
    "matmul_grouped": ["rk", "ekn"], "gradient_grouped": ["rk", "rn"], "gradient_grouped_add": ["rk", "rn", "ekn"],
}  # fmt: skip
BACKEND = Numpy()


def operands(kernel, rows, between, k, n, dtype):
    sizes = {"r": (rows, *between), "k": (k,), "n": (n,), "e": (1,)}
    random = np.random.default_rng(7)
    fill = catalogue.integers if dtype in ("float16", "bfloat16") else catalogue.distinct
    shapes = [sum((sizes[letter] for letter in text), ()) for text in SHAPES[kernel]]
    return [fill(random, shape, dtype) for shape in shapes]


def run(kernel, reads, write, read_dtypes, write_dtype):
    BACKEND.bind(kernel, reads, [write], read_dtypes, [write_dtype])()
    return write


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "complex64", "float16", "bfloat16"])
@pytest.mark.parametrize("kernel", MEANING)
def test_every_kernel_computes_its_definition(kernel, dtype):
    """Some arrays have no rows or no columns, some have dimensions between them."""
    for rows, between, (k, n) in product((0, 1, 5), ((), (2,), (2, 0)), ((3, 4), (1, 1), (0, 2), (3, 0))):
        reads = operands(kernel, rows, between, k, n, dtype)
        expected = MEANING[kernel](*(wide(a, dtype) for a in reads))
        got = run(kernel, reads, poisoned(expected.shape, dtype), [dtype] * len(reads), dtype)
        np.testing.assert_allclose(wide(got, dtype), wide(rounded(expected, dtype), dtype), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "bfloat16"])
@pytest.mark.parametrize("kernel", ["add", "matmul_add", "gradient_add", "gradient_grouped_add"])
def test_sums_in_place(kernel, dtype):
    """The result replaces an operand."""
    for place in {"add": (0, 1), "matmul_add": (1,), "gradient_add": (2,), "gradient_grouped_add": (2,)}[kernel]:
        reads = operands(kernel, 5, (), 3, 4, dtype)
        expected = MEANING[kernel](*(wide(a, dtype) for a in reads))
        got = run(kernel, reads, reads[place], [dtype] * len(reads), dtype)
        np.testing.assert_allclose(wide(got, dtype), wide(rounded(expected, dtype), dtype), rtol=1e-5)


@pytest.mark.parametrize("kernel", ["copy", "add", "matmul", "matmul_bias", "matmul_add", "gradient", "gradient_add"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_rows_in_several_runs(kernel, dtype):
    """A call on three runs of rows, one of them empty, gives the same as a call on all rows."""
    reads = operands(kernel, 7, (), 3, 4, dtype)
    expected = MEANING[kernel](*(wide(a, dtype) for a in reads))
    cuts = [slice(0, 4), slice(4, 4), slice(4, 7)]
    definition = find(kernel)
    runs = [a[cut] for a in reads[: definition.groups] for cut in cuts]
    whole = reads[definition.groups :]
    result = poisoned(expected.shape, dtype)
    writes = [result] if definition.reduces else [result[cut] for cut in cuts]
    BACKEND.bind(kernel, [*runs, *whole], writes, [dtype] * (len(runs) + len(whole)), [dtype] * len(writes))()
    np.testing.assert_allclose(wide(result, dtype), wide(rounded(expected, dtype), dtype), rtol=1e-12)


def test_strided_operands():
    """A strided x and a weight stored by columns are read in place."""
    base = np.arange(48.0).reshape(6, 8)
    x, w = base[::2, ::2], base[:4, :5][::-1].T[:4, :4]
    np.testing.assert_array_equal(run("matmul", [x, w], np.empty((3, 4)), ["float64"] * 2, "float64"), x @ w)
    x3 = np.moveaxis(np.arange(24.0).reshape(2, 3, 4), 1, 0)
    np.testing.assert_array_equal(run("pack", [x3], np.empty(x3.shape), ["float64"], "float64"), x3)
    np.testing.assert_array_equal(run("gradient", [x3, x3], np.empty((4, 4)), ["float64"] * 2, "float64"),
                                  x3.reshape(6, 4).T @ x3.reshape(6, 4))  # fmt: skip


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_conversion_between_half_types_and_float32(half):
    """Widening is exact. Narrowing rounds once. A product of half operands may have a float32 result."""
    numbers = rounded(np.linspace(-3, 3, 12).reshape(4, 3), half)
    up = run("copy", [numbers], np.empty((4, 3), np.float32), [half], "float32")
    np.testing.assert_array_equal(up, wide(numbers, half))
    fine = np.linspace(0, 1, 12, dtype=np.float32).reshape(4, 3)
    down = run("copy", [fine], poisoned((4, 3), half), ["float32"], half)
    np.testing.assert_array_equal(down, rounded(fine.astype(float), half))
    w = rounded(np.eye(3) / 3, half)
    y = run("matmul", [numbers, w], np.empty((4, 3), np.float32), [half] * 2, "float32")
    np.testing.assert_array_equal(y, (up @ wide(w, half).astype(np.float32)))


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "complex64", "int8", "uint64", "bool"])
def test_poisoned_arrays(dtype):
    """They are full of NaN, or of the greatest number of the dtype."""
    array = poisoned((2, 3), dtype)
    assert array.shape == (2, 3) and array.dtype == storage(dtype)
    if dtype in ("int8", "uint64", "bool"):
        assert (array == (True if dtype == "bool" else np.iinfo(dtype).max)).all()
    else:
        assert np.isnan(wide(array, dtype)).all()


def test_cost():
    """A product has two operations per multiplication, a sum one per element, a copy none."""
    assert cost("matmul", [(5, 3), (3, 4)], [(5, 4)]) == 2 * 5 * 3 * 4
    assert cost("matmul", [(5, 3), (2, 3), (3, 4)], [(5, 4), (2, 4)]) == 2 * 7 * 3 * 4
    assert cost("matmul_add", [(5, 3), (5, 4), (3, 4)], [(5, 4)]) == 2 * 5 * 3 * 4
    assert cost("matmul_bias", [(5, 2, 3), (3, 4), (4,)], [(5, 2, 4)]) == 2 * 10 * 3 * 4
    assert cost("gradient", [(5, 3), (5, 4)], [(3, 4)]) == 2 * 5 * 3 * 4
    assert cost("gradient_add", [(5, 3), (2, 3), (5, 4), (2, 4), (3, 4)], [(3, 4)]) == 2 * 7 * 3 * 4
    assert cost("add", [(5, 3), (5, 3)], [(5, 3)]) == cost("mean4", [(5, 3), (5, 3)], [(5, 3)]) == 15
    assert cost("copy", [(5, 3)], [(5, 3)]) == cost("matmul", [(0, 3), (3, 4)], [(0, 4)]) == 0


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_a_mean_divides_the_sum_and_rounds_once(dtype):
    """In place too, and with rows in two runs."""
    a, b = (rounded(np.random.default_rng(i).integers(-120, 121, (7, 3)).astype(float), dtype) for i in (1, 2))
    wanted = rounded((wide(a, dtype) + wide(b, dtype)) / 3, dtype)
    runs = [x[cut] for x in (a, b) for cut in (slice(0, 4), slice(4, 7))]
    BACKEND.bind("mean3", runs, runs[:2], [dtype] * 4, [dtype] * 2)()
    np.testing.assert_array_equal(a, wanted)


def test_the_largest_and_smallest_are_nan_where_one_is():
    a, b = np.array([1, np.nan, 3, np.nan]), np.array([2, 1, np.nan, np.nan])
    for kernel, wanted in (("max", 2), ("min", 1)):
        got = run(kernel, [a, b], np.zeros(4), ["float64"] * 2, "float64")
        np.testing.assert_array_equal(got, [wanted, *[np.nan] * 3])
    flags = [np.array([True, True, False, False]), np.array([True, False, True, False])]
    for kernel, wanted in (("max", [1, 1, 1, 0]), ("min", [1, 0, 0, 0])):
        assert list(run(kernel, flags, np.zeros(4, bool), ["bool"] * 2, "bool")) == wanted


def test_every_kernel_is_tested():
    assert set(KERNELS) == {*MEANING, *OF_WIRES}  # test_encoded.py tests these
    with pytest.raises(PlanError, match="unknown kernel 'softmax' \\(did you mean max\\?\\); known: copy, pack"):
        find("softmax")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_copies_keep_all_bits(dtype):
    """The bits of a NaN are kept too: a copied block must equal a block that is sent."""
    bits = np.array([0x7FC1, 0x7E01, 0xFFFF, 0x0001, 0x8000], np.uint16)
    a = bits.view(storage(dtype))
    for kernel in ("copy", "pack", "download", "upload"):
        c = np.zeros_like(a)
        Numpy().bind(kernel, [a], [c], [dtype], [dtype])()
        assert np.array_equal(c.view(np.uint16), bits)


def test_strided_rows_are_read_when_the_kernel_runs():
    """They are not copied when the kernel is bound."""
    x, w = np.ones((3, 2, 4)).transpose(1, 0, 2), np.ones((4, 2))
    y = np.empty((2, 3, 2))
    call = Numpy().bind("matmul", [x, w], [y], ["float64", "float64"], ["float64"])
    x *= 2
    call()
    assert (y == 8).all()


@pytest.mark.parametrize("name", MEANING)
def test_demand_of_each_kernel(name):
    """Products pack the operands that they multiply, but no bias and no sum so far. Other kernels pack nothing."""
    sizes, multiplied = {"r": 5, "k": 4, "n": 3, "e": 1}, [0, 1] if name.startswith(("matmul", "gradient")) else []
    if name == "matmul_add":
        multiplied = [0, 2]
    reads = [(tuple(sizes[letter] for letter in text), 100 + i) for i, text in enumerate(SHAPES[name])]
    operations, nbytes, packed, elements, products = demand(name, reads, [((5, 3), 1000)])
    assert (nbytes, packed) == (1000 + sum(n for _, n in reads), sum(reads[i][1] for i in multiplied))
    assert operations == cost(name, [shape for shape, _ in reads], [(5, 3)])
    assert (elements, products) == ((15, 1) if multiplied else (0, 1))


@pytest.mark.parametrize("bias", [[], [((3,), 7)]])
def test_each_run_of_rows_packs_the_weight_again(bias):
    """The backend computes one product for each run of rows."""
    x, w = ((5, 4), 100), ((4, 3), 48)
    name, y = "matmul_bias" if bias else "matmul", ((5, 3), 60)
    assert demand(name, [((10, 4), 200), w, *bias], [((10, 3), 120)])[2] == 200 + 48
    assert demand(name, [x, x, w, *bias], [y, y])[2] == 200 + 2 * 48
    assert demand("gradient", [x, x, y, y], [w])[2] == 2 * (100 + 60)
    assert demand(name, [x, x, w, *bias], [y, y])[3:] == (30, 2)
    assert demand("gradient", [x, x, y, y], [w])[3:] == (24, 2), "each product has all elements of the sum"


def test_each_expert_has_its_own_weight():
    """A grouped product packs each weight once, and each expert has a gradient of its own."""
    x, w, y = ((5, 4), 100), ((2, 4, 3), 96), ((5, 3), 60)
    assert demand("matmul_grouped", [x, x, w], [y, y])[2:] == (200 + 96, 30, 2)
    assert demand("gradient_grouped", [x, x, y, y], [w])[2:] == (2 * (100 + 60), 24, 2)
    a, b = np.arange(12.0).reshape(3, 4), np.arange(24.0).reshape(2, 4, 3)
    c = np.empty((3, 3))
    Numpy().bind("matmul_grouped", [a[:1], a[1:], b], [c[:1], c[1:]], ["float64"] * 3, ["float64"] * 2)()
    np.testing.assert_array_equal(c, [a[0] @ b[0], *(a[1:] @ b[1])])
