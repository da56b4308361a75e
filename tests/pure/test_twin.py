"""The digital twin: every schedule, run with data on all ranks in this process, is the unfused meaning."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import catalogue
import numpy as np
import pytest
from catalogue import RANKS, ROWS

import fompi
from fompi.backends.numpy import Numpy
from fompi.base.errors import PlanError
from fompi.base.layout import ITEMSIZE, Sizes, Spec
from fompi.model.twin import twin
from fompi.planner.candidates import Candidate
from fompi.plans.plan import Compute
from fompi.plans.problems import layouts, reference
from fompi.plans.verify import verify
from fompi.schedules import registry
from fompi.tuning.adaptive import sums_alike

BACKEND = Numpy()
NAMES = list(catalogue.problems(1))
SLICES = (1, 2, (1, 3, 2))
WINDOWS = (None, 1, 2)


def bits(outputs):
    """What can be compared for equality, NaN and signed zero included."""
    return [{name: (array.shape, array.tobytes()) for name, array in arrays.items()} for arrays in outputs]


def assert_close(got, wanted, what):
    for rank, (mine, meant) in enumerate(zip(got, wanted, strict=True)):
        assert mine.keys() == meant.keys()
        for name, array in meant.items():
            np.testing.assert_allclose(
                mine[name], array, rtol=1e-12, atol=1e-12, err_msg=f"{name} of rank {rank}, {what}"
            )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", RANKS)
def test_every_plan_is_verified_and_means_its_operation(size, name):
    """Every schedule x slices; of the ways to spread rows, the windows and the interleavings, some each in turn."""
    problem = catalogue.problems(size)[name]
    for call, (schedule, slices) in enumerate(product(registry.available(problem), SLICES)):
        plan = registry.write(problem, schedule, slices, window=WINDOWS[(call + size) % 3])
        verify(plan)
        for how in sorted({ROWS[(call + size) % 5], ROWS[(call + size + (2 if size < 7 else 0)) % 5]}):
            sizes = catalogue.sizes(problem, how)
            inputs = catalogue.inputs(problem, sizes, call)
            outputs = twin(plan, inputs, BACKEND, sizes=sizes, seed=call)
            assert_close(outputs, reference(problem, inputs, sizes, np), f"{schedule} {slices} {how} {plan.window}")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_sums_in_the_order_of_a_ring(size, name, dtype):
    """The same bits by all schedules that say so: with any slices, but of an all-reduce with the same ones."""
    problem = replace(catalogue.problems(size)[name], dtype=dtype)
    sizes = Sizes(tuple(50 + 7 * rank for rank in range(size)))
    inputs = catalogue.inputs(problem, sizes, fill=lambda draw, shape, _: draw.standard_normal(shape).astype(dtype))
    found = {}
    for call, (schedule, slices) in enumerate(product((*registry.IN_RING_ORDER, "bidirectional"), SLICES)):
        others = tuple(tuple(r for r in reversed(range(size)) if r != rank) for rank in range(size))
        for order in ((), others) if schedule in registry.STRAIGHT else [()]:
            plan = registry.write(problem, schedule, slices, window=WINDOWS[call % 3], order=order)
            verify(plan)
            same = "any" if name == "reduce_scatter" else slices
            if schedule == "bidirectional":
                same = schedule
            found.setdefault(same, set()).add(repr(bits(twin(plan, inputs, BACKEND, sizes=sizes, seed=call))))
    ways = found.pop("bidirectional")
    assert all(len(each) == 1 for each in found.values())
    if size > 3 and dtype == "float32":  # of three terms the first two may change places
        assert not ways & set.union(*found.values()), "sums in another order should differ somewhere"


@pytest.mark.parametrize("name", [name for name, one in catalogue.problems(1).items() if one.gradients])
def test_a_weight_gradient_is_summed_in_the_order_of_its_plan(name):
    """The same bits with any window; other slices, or another schedule, sum in other pieces."""
    size = 4
    problem = replace(catalogue.problems(size)[name], dtype="float32")
    sizes = catalogue.sizes(problem, "even")
    inputs = catalogue.inputs(
        problem, sizes, fill=lambda draw, shape, _: draw.standard_normal(shape).astype(np.float32)
    )
    found = {}
    for call, (schedule, slices) in enumerate(product(registry.available(problem), (1, 2))):
        for window in WINDOWS:
            plan = registry.write(problem, schedule, slices, window=window)
            candidate = Candidate(schedule, slices, window)
            found[candidate] = repr(bits(twin(plan, inputs, BACKEND, sizes=sizes, seed=call)))
    pairs = list(product(found, repeat=2))
    assert all(found[a] == found[b] for a, b in pairs if sums_alike(problem, a, b))
    assert any(found[a] != found[b] for a, b in pairs), "sums in other pieces should differ somewhere"


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter", "all_reduce", "matmul_all_reduce bias"])
@pytest.mark.parametrize(("size", "ranks"), [(4, 2), (6, 2), (6, 3), (8, 2), (9, 3), (12, 4)])
def test_groups_of_ranks(size, ranks, name):
    """A hierarchy in groups of any number that divides that of the ranks."""
    problem = catalogue.problems(size)[name]
    for slices, how in ((1, "uneven"), ((1, 2), "even")):
        plan = registry.write(problem, f"hierarchical({ranks})", slices)
        verify(plan)
        sizes = catalogue.sizes(problem, how)
        inputs = catalogue.inputs(problem, sizes)
        outputs = twin(plan, inputs, BACKEND, sizes=sizes, seed=size)
        assert_close(outputs, reference(problem, inputs, sizes, np), f"{slices} {how}")


@pytest.mark.parametrize("schedule", ["hierarchical", "hierarchical()", "hierarchical(3)", "hierarchical(1)",
                                      "hierarchical(4)", "hierarchical(0)", "hierarchical(x)", "ring(2)"])  # fmt: skip
def test_groups_that_are_none(schedule):
    problem = catalogue.problems(4)["all_gather"]
    with pytest.raises(PlanError, match=r"has no schedule .*hierarchical\(2\)"):
        registry.write(problem, schedule)
    with pytest.raises(PlanError, match="no schedule"):
        registry.write(catalogue.problems(4)["all_to_all"], "hierarchical(2)")


@pytest.mark.parametrize("name", NAMES)
def test_every_interleaving_gives_the_same_bits(name):
    """The order of each sum is part of the plan. The numbers are such that another order would give other bits."""
    problem = catalogue.problems(5)[name]
    sizes = catalogue.sizes(problem, "uneven")
    inputs = catalogue.inputs(problem, sizes)
    for schedule, slices in product(registry.available(problem), (1, 2)):
        plan = registry.write(problem, schedule, slices)
        first, *others = (bits(twin(plan, inputs, BACKEND, sizes=sizes, seed=seed)) for seed in range(4))
        assert all(other == first for other in others), schedule


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_every_dtype_is_moved_and_added(dtype):
    """Bit for bit, but for sums of floats, which depend on their order."""
    one = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 1e-6, "complex64": 1e-6}.get(dtype, 1e-15)
    for size in (1, 3, 4):
        for name, problem in catalogue.moves(size, dtype).items():
            sizes = catalogue.sizes(problem, "uneven")
            inputs = catalogue.inputs(problem, sizes)
            meant = reference(problem, catalogue.widened(inputs, dtype), sizes, np)
            for schedule, slices in product(registry.available(problem), (1, 2)):
                plan = registry.write(problem, schedule, slices)
                verify(plan)
                got = twin(plan, inputs, BACKEND, sizes=sizes, seed=size)
                if name in catalogue.SUMS and ("float" in dtype or "complex" in dtype):
                    for mine, wanted in zip(catalogue.widened(got, dtype), meant, strict=True):
                        np.testing.assert_allclose(mine["y"], wanted["y"], rtol=2 * one, atol=8 * one)
                else:
                    assert bits(got) == bits([{"y": catalogue.rounded(y["y"], dtype)} for y in meant])


@pytest.mark.parametrize("dtype", ["int64", "int8", "complex64", "float32"])
@pytest.mark.parametrize(
    "name", ["all_gather_matmul 3-d", "matmul_all_reduce bias", "all_to_all_matmul_weight_gradient"]
)
def test_products_of_other_dtypes(name, dtype):
    """Integers wrap as they do in NumPy; float32 and complex64 stay what they are."""
    problem = catalogue.problems(4, dtype)[name]
    sizes = catalogue.sizes(problem, "uneven")
    inputs = catalogue.inputs(problem, sizes)
    for schedule in registry.available(problem):
        outputs = twin(registry.write(problem, schedule, 2), inputs, BACKEND, sizes=sizes)
        for mine, meant in zip(outputs, reference(problem, inputs, sizes, np), strict=True):
            for key, array in meant.items():
                assert mine[key].dtype == np.dtype(dtype)
                np.testing.assert_allclose(mine[key], array, rtol=1e-4, atol=0 if dtype.startswith("int") else 1e-4)


@pytest.mark.parametrize("columns", [2, 7])
@pytest.mark.parametrize("operation", ["all_gather_matmul", "all_gather_weight_gradient", "matmul_reduce_scatter"])
def test_columns_that_do_not_divide(operation, columns):
    """What stays on a rank may have another number of columns there, and none where there are more ranks."""
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


def test_payloads_are_not_met_twice():
    """The catalogue's numbers differ between ranks, buffers, blocks and calls: a block in a wrong place shows."""
    problem = catalogue.problems(4)["all_gather_matmul_weight_gradient"]
    sizes = catalogue.sizes(problem, "even")
    arrays = [a for call in range(3) for rank in catalogue.inputs(problem, sizes, call) for a in rank.values()]
    numbers = np.concatenate([a.ravel() for a in arrays])
    assert len(np.unique(numbers)) == len(numbers)


def test_what_was_never_written_is_nan():
    """Without its last copy, the twin of an all-gather shows NaN where our own block belongs."""
    problem = catalogue.problems(2)["all_gather"]
    plan = registry.write(problem, "direct")
    kept = tuple(op for op in plan.programs[1].ops if not isinstance(op, Compute))
    lacking = plan.with_program(replace(plan.programs[1], ops=kept))
    sizes = catalogue.sizes(problem, "even")
    outputs = twin(lacking, catalogue.inputs(problem, sizes), BACKEND, sizes=sizes)
    assert np.isnan(outputs[1]["y"][3:]).all() and not np.isnan(outputs[1]["y"][:3]).any()
