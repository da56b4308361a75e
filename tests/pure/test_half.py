"""Half types. Sums and products are computed in float32 and rounded once.

With these inputs all float32 arithmetic is exact. So the result must equal the exact result, rounded to the nearest
even, bit for bit. Rounding after every step would give different bits for these inputs.
"""

from __future__ import annotations

from itertools import product

import catalogue
import numpy as np
import pytest
from catalogue import rounded, wide
from hypothesis import given
from hypothesis import strategies as st
from reference import reference
from twin import twin

from fompi.backends import in_c
from fompi.backends.half import narrow, widen
from fompi.backends.numpy import Numpy
from fompi.base.layout import HALF
from fompi.schedules import registry

BACKEND = Numpy()
NAMES = list(catalogue.problems(1))
DIGITS = {"float16": 11, "bfloat16": 8}


@pytest.fixture(autouse=True, scope="module")
def kernels_of_numpy():
    """Those of C have the same bits: tests/pure/test_native.py."""
    before, in_c.run = in_c.run, None
    yield
    in_c.run = before


def all_digits(random, shape, dtype):
    """Numbers with full mantissas and six exponents. A sum of a hundred of them is exact in float32."""
    mantissas = random.integers(-(2 ** DIGITS[dtype]) + 1, 2 ** DIGITS[dtype], shape)
    return rounded(np.ldexp(mantissas.astype(float), random.integers(-8, -2, shape)), dtype)


def few_digits(random, shape, dtype):
    """Numbers whose products need more digits than the dtype has. A sum of a hundred products is exact in float32."""
    return rounded(random.integers(-100, 101, shape) / 16, dtype)


def half_problems(size, dtype):
    for name, problem in catalogue.problems(size, dtype).items():
        multiplies = problem.weights or problem.gradients
        yield name, problem, few_digits if multiplies else all_digits


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("size", (1, 3, 5))
def test_every_result_is_the_exact_result_rounded_once(size, dtype):
    for name, problem, fill in half_problems(size, dtype):
        sizes = catalogue.sizes(problem, "uneven", seed=size)
        inputs = catalogue.inputs(problem, sizes, fill=fill)
        exact = reference(problem, catalogue.widened(inputs, dtype), sizes, np)
        for schedule in registry.available(problem):
            outputs = twin(registry.write(problem, schedule, 1 + size % 2), inputs, BACKEND, sizes=sizes, seed=size)
            for got, wanted in zip(outputs, exact, strict=True):
                for key, array in wanted.items():
                    np.testing.assert_array_equal(got[key], rounded(array, dtype), err_msg=f"{name} {schedule} {key}")


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "name", ["reduce_scatter", "all_reduce", "matmul_reduce_scatter", "all_gather_weight_gradient"]
)
def test_rounding_at_every_step_would_show(name, dtype):
    """With the inputs of the test above, repeated rounding gives other results."""
    problem = catalogue.problems(8, dtype)[name]
    sizes = catalogue.sizes(problem, "uneven", seed=8)
    fill = few_digits if problem.weights or problem.gradients else all_digits
    data = catalogue.widened(catalogue.inputs(problem, sizes, fill=fill), dtype)
    if problem.gradients:
        x, h = np.concatenate([d["x"] for d in data]), data[0]["h"]
        terms = [np.outer(a, b) for a, b in zip(x, h, strict=True)]
    else:
        terms = [d["x"] @ d["w"] if problem.weights else d["x"] for d in data]
    several = terms[0]
    for term in terms[1:]:
        several = wide(rounded(several + wide(rounded(term, dtype), dtype), dtype), dtype)
    once = wide(rounded(sum(terms), dtype), dtype)
    assert np.mean(several != once) > 0.05


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "schedule", ["ring", "bidirectional", "direct", "unfused_p2p", "sliced_p2p", "exchange", "doubling"]
)
def test_a_sum_differs_from_the_exact_sum_by_half_an_ulp(schedule, dtype):
    """The error of eight float32 additions is allowed in addition."""
    problem = catalogue.problems(8, dtype)["all_reduce"]
    sizes = catalogue.sizes(problem, "even")._replace(rows=(200,) * 8)

    def fill(random, shape, dtype):
        return rounded(random.standard_normal(shape) * np.exp2(random.integers(-4, 5, shape)), dtype)

    inputs = catalogue.inputs(problem, sizes, fill=fill)
    terms = [d["x"] for d in catalogue.widened(inputs, dtype)]
    exact, most = sum(terms), sum(map(np.abs, terms))
    got = wide(twin(registry.write(problem, schedule), inputs, BACKEND, sizes=sizes)[0]["y"], dtype)
    ulp = np.exp2(np.frexp(exact)[1] - DIGITS[dtype])
    assert (np.abs(got - exact) <= ulp / 2 + 8 * 2**-24 * most).all()


def test_the_mpi_library_never_sums_half_types():
    for size, dtype in product((1, 4), HALF):
        for name in ("reduce_scatter", "all_reduce", "matmul_reduce_scatter", "matmul_all_reduce"):
            assert not {"unfused", "sliced"} & set(registry.available(catalogue.problems(size, dtype)[name]))


def test_widening_keeps_every_bfloat16():
    bits = np.arange(1 << 16, dtype=np.uint16)
    numbers = widen(bits, "bfloat16")
    back = narrow(numbers, "bfloat16")
    np.testing.assert_array_equal(back[~np.isnan(numbers)], bits[~np.isnan(numbers)])
    assert np.isnan(widen(back, "bfloat16")[np.isnan(numbers)]).all()


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_narrowing_rounds_to_the_nearest_even(numbers):
    """Compared with the rounding of the catalogue, which starts from float64."""
    array = np.array(numbers, np.float32)
    normal = array[(np.abs(array) >= 2.0**-126) & (np.abs(array) < 3.38e38)]
    np.testing.assert_array_equal(narrow(normal, "bfloat16"), rounded(normal.astype(float), "bfloat16"))


def test_ties_go_to_the_even_neighbour():
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 2**-133 * 0.5], np.float32)
    assert [hex(n) for n in narrow(ties, "bfloat16")] == ["0x3f80", "0x3f82", "0xbf80", "0x0"]
    assert narrow(np.array([3.4e38, np.inf, -np.inf], np.float32), "bfloat16").tolist() == [0x7F80, 0x7F80, 0xFF80]


def test_a_number_without_dimensions():
    for dtype in HALF:
        a, b, c = (narrow(np.array(x), dtype) for x in (1.5, 2.0, 0.0))
        assert a.shape == ()
        Numpy().bind("add", [a, b], [c], [dtype] * 2, [dtype])()
        assert widen(c, dtype) == 3.5
