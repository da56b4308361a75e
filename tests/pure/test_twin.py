"""The twin runs plans with data for all ranks in one process. Every schedule must give the unfused results."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import catalogue
import numpy as np
import pytest
from catalogue import RANKS, ROWS
from plan_texts import with_program
from reference import reference
from twin import twin

import fompi
from fompi.backends.numpy import Numpy
from fompi.base.errors import PlanError
from fompi.base.layout import FLOAT8, ITEMSIZE, Sizes, Spec
from fompi.planner.candidates import Candidate
from fompi.plans.meaning import layouts
from fompi.plans.plan import Compute
from fompi.plans.verify import verify
from fompi.schedules import registry
from fompi.tuning.adaptive import sums_alike

BACKEND = Numpy()
NAMES = list(catalogue.problems(1))
SLICES = (1, 2, (1, 3, 2))
WINDOWS = (None, 1, 2)


def bits(outputs):
    """The outputs in a form in which NaN and signed zero can be compared."""
    return [{name: (array.shape, array.tobytes()) for name, array in arrays.items()} for arrays in outputs]


def assert_close(got, wanted, what):
    for rank, (local, expected) in enumerate(zip(got, wanted, strict=True)):
        assert local.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(
                local[name], array, rtol=1e-12, atol=1e-12, err_msg=f"{name} of rank {rank}, {what}"
            )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", RANKS)
def test_every_plan_is_verified_and_computes_its_operation(size, name):
    """All schedules with all slices. The distributions of rows, the windows and the interleavings take turns.

    From 3 ranks on, the slices take turns too: each number of ranks has a quarter of the pairs.
    """
    problem = catalogue.problems(size)[name]
    for call, (schedule, slices) in enumerate(product(registry.available(problem), SLICES)):
        if size > 2 and (call + call // 3) % 4 != RANKS.index(size) % 4:
            continue
        plan = registry.write(problem, schedule, slices, window=WINDOWS[(call + size) % 3])
        verify(plan)
        distribution = ROWS[(call + size) % 5]
        sizes = catalogue.sizes(problem, distribution)
        inputs = catalogue.inputs(problem, sizes, call)
        outputs = twin(plan, inputs, BACKEND, sizes=sizes, seed=call)
        what = f"{schedule} {slices} {distribution} {plan.window}"
        assert_close(outputs, reference(problem, inputs, sizes, np), what)


@pytest.mark.parametrize("name", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize(("size", "dtype"), [(2, "float32"), (3, "float16"), (5, "float32"), (8, "float16")])
def test_sums_in_the_order_of_a_ring(size, name, dtype):
    """The schedules in `IN_RING_ORDER` give the same bits. For an all-reduce this needs equal slices."""
    problem = replace(catalogue.problems(size)[name], dtype=dtype)
    sizes = Sizes(tuple(50 + 7 * rank for rank in range(size)))
    inputs = catalogue.inputs(problem, sizes, fill=lambda draw, shape, _: draw.standard_normal(shape).astype(dtype))
    results = {}
    for call, (schedule, slices) in enumerate(product((*registry.IN_RING_ORDER, "bidirectional"), SLICES)):
        plan = registry.write(problem, schedule, slices, window=WINDOWS[call % 3])
        verify(plan)
        key = "any slices" if name == "reduce_scatter" else slices
        if schedule == "bidirectional":
            key = schedule
        results.setdefault(key, set()).add(repr(bits(twin(plan, inputs, BACKEND, sizes=sizes, seed=call))))
    bidirectional = results.pop("bidirectional")
    assert all(len(equal) == 1 for equal in results.values())
    if size == 5:  # the order of the first two of three terms does not matter
        assert not bidirectional & set.union(*results.values()), "sums in another order should differ somewhere"


@pytest.mark.parametrize("name", [name for name, problem in catalogue.problems(1).items() if problem.gradients])
def test_a_weight_gradient_is_summed_in_the_order_of_its_plan(name):
    """All windows give the same bits. Other slices or another schedule sum in other pieces."""
    size = 4
    problem = replace(catalogue.problems(size)[name], dtype="float32")
    sizes = catalogue.sizes(problem, "even")
    inputs = catalogue.inputs(
        problem, sizes, fill=lambda draw, shape, _: draw.standard_normal(shape).astype(np.float32)
    )
    results = {}
    for call, (schedule, slices) in enumerate(product(registry.available(problem), (1, 2))):
        for window in WINDOWS:
            plan = registry.write(problem, schedule, slices, window=window)
            candidate = Candidate(schedule, slices, window)
            results[candidate] = repr(bits(twin(plan, inputs, BACKEND, sizes=sizes, seed=call)))
    pairs = list(product(results, repeat=2))
    assert all(results[a] == results[b] for a, b in pairs if sums_alike(problem, a, b))
    assert any(results[a] != results[b] for a, b in pairs), "sums in other pieces should differ somewhere"


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter", "all_reduce", "matmul_all_reduce bias"])
@pytest.mark.parametrize(("size", "ranks"), [(4, 2), (6, 2), (6, 3), (8, 2), (9, 3), (12, 4)])
def test_groups_of_ranks(size, ranks, name):
    """The size of a group may be any number that divides the number of ranks."""
    problem = catalogue.problems(size)[name]
    for slices, distribution in ((1, "uneven"), ((1, 2), "even")):
        plan = registry.write(problem, f"hierarchical({ranks})", slices)
        verify(plan)
        sizes = catalogue.sizes(problem, distribution)
        inputs = catalogue.inputs(problem, sizes)
        outputs = twin(plan, inputs, BACKEND, sizes=sizes, seed=size)
        assert_close(outputs, reference(problem, inputs, sizes, np), f"{slices} {distribution}")


@pytest.mark.parametrize("schedule", ["hierarchical", "hierarchical()", "hierarchical(3)", "hierarchical(1)",
                                      "hierarchical(4)", "hierarchical(0)", "hierarchical(x)", "ring(2)"])  # fmt: skip
def test_invalid_groups_are_refused(schedule):
    problem = catalogue.problems(4)["all_gather"]
    with pytest.raises(PlanError, match=r"has no schedule .*hierarchical\(2\)"):
        registry.write(problem, schedule)
    with pytest.raises(PlanError, match="no schedule"):
        registry.write(catalogue.problems(4)["all_to_all"], "hierarchical(2)")


@pytest.mark.parametrize("name", NAMES)
def test_every_interleaving_gives_the_same_bits(name):
    """The plan fixes the order of each sum. With these numbers another order would give other bits."""
    problem = catalogue.problems(5)[name]
    sizes = catalogue.sizes(problem, "uneven")
    inputs = catalogue.inputs(problem, sizes)
    for number, schedule in enumerate(registry.available(problem)):
        plan = registry.write(problem, schedule, 1 + number % 2)
        first, *others = (bits(twin(plan, inputs, BACKEND, sizes=sizes, seed=seed)) for seed in range(4))
        assert all(other == first for other in others), schedule


@pytest.mark.parametrize("dtype", [dtype for dtype in ITEMSIZE if dtype not in FLOAT8])
def test_every_dtype_is_moved_and_added(dtype):
    """Results are exact, except sums of floats, which depend on the order."""
    error = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 1e-6, "complex64": 1e-6}.get(dtype, 1e-15)
    for size in (1, 3, 4):
        for name, problem in catalogue.moves(size, dtype).items():
            sizes = catalogue.sizes(problem, "uneven")
            inputs = catalogue.inputs(problem, sizes)
            expected = reference(problem, catalogue.widened(inputs, dtype), sizes, np)
            for number, schedule in enumerate(registry.available(problem)):
                plan = registry.write(problem, schedule, 1 + (number + len(dtype)) % 2)
                verify(plan)
                got = twin(plan, inputs, BACKEND, sizes=sizes, seed=size)
                if name in catalogue.SUMS and ("float" in dtype or "complex" in dtype):
                    for local, wanted in zip(catalogue.widened(got, dtype), expected, strict=True):
                        np.testing.assert_allclose(local["y"], wanted["y"], rtol=2 * error, atol=8 * error)
                else:
                    assert bits(got) == bits([{"y": catalogue.rounded(y["y"], dtype)} for y in expected])


@pytest.mark.parametrize("dtype", ["int64", "int8", "complex64", "float32"])
@pytest.mark.parametrize(
    "name", ["all_gather_matmul 3-d", "matmul_all_reduce bias", "all_to_all_matmul_weight_gradient"]
)
def test_products_of_other_dtypes(name, dtype):
    """Integers overflow as in NumPy. Results have the dtype of the inputs."""
    problem = catalogue.problems(4, dtype)[name]
    sizes = catalogue.sizes(problem, "uneven")
    inputs = catalogue.inputs(problem, sizes)
    for schedule in registry.available(problem):
        outputs = twin(registry.write(problem, schedule, 2), inputs, BACKEND, sizes=sizes)
        for local, expected in zip(outputs, reference(problem, inputs, sizes, np), strict=True):
            for key, array in expected.items():
                assert local[key].dtype == np.dtype(dtype)
                np.testing.assert_allclose(local[key], array, rtol=1e-4, atol=0 if dtype.startswith("int") else 1e-4)


@pytest.mark.parametrize("columns", [2, 7])
@pytest.mark.parametrize("operation", ["all_gather_matmul", "all_gather_weight_gradient", "matmul_reduce_scatter"])
def test_columns_that_cannot_be_divided_evenly(operation, columns):
    """Columns that are not sent may differ in number between ranks. A rank may have none."""
    x, w = {
        "all_gather_matmul": ((10, 3), (3, columns)),
        "all_gather_weight_gradient": ((10, 3), (10, columns)),
        "matmul_reduce_scatter": ((10, columns), (columns, 3)),
    }[operation]
    specs = [Spec(shape, "float64", lay) for shape, lay in zip((x, w), layouts(operation, 2), strict=True)]
    for schedule in ("unfused", "ring", "direct"):
        plan = fompi.plan(operation, *specs, ranks=3, schedule=schedule)
        verify(plan)
        inputs = []
        for program in plan.programs:
            draw, extents = np.random.default_rng(program.rank).standard_normal, plan.extents(program.rank)
            inputs.append({b.name: draw(b.shape(extents)) for b in program.buffers if b.role == "input"})
        assert_close(twin(plan, inputs, BACKEND), reference(plan.problem, inputs, plan.sizes, np), schedule)


def test_the_numbers_of_the_catalogue_are_distinct():
    """They differ between ranks, buffers, blocks and calls. So a block in a wrong place is detected."""
    problem = catalogue.problems(4)["all_gather_matmul_weight_gradient"]
    sizes = catalogue.sizes(problem, "even")
    arrays = [a for call in range(3) for rank in catalogue.inputs(problem, sizes, call) for a in rank.values()]
    numbers = np.concatenate([a.ravel() for a in arrays])
    assert len(np.unique(numbers)) == len(numbers)


def test_a_block_that_is_never_written_is_nan():
    """An all-gather without its copy leaves NaN in the place of the rank's own block."""
    problem = catalogue.problems(2)["all_gather"]
    plan = registry.write(problem, "direct")
    messages = tuple(op for op in plan.programs[1].ops if not isinstance(op, Compute))
    incomplete = with_program(plan, replace(plan.programs[1], ops=messages))
    sizes = catalogue.sizes(problem, "even")
    outputs = twin(incomplete, catalogue.inputs(problem, sizes), BACKEND, sizes=sizes)
    assert np.isnan(outputs[1]["y"][3:]).all() and not np.isnan(outputs[1]["y"][:3]).any()
