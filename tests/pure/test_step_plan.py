"""A whole training step as one plan: right for every mesh and order, and refused when a part of it is changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_texts import with_program

import fompi
from fompi.base.errors import LayoutError, PlanError
from fompi.parallel import pipeline_plan
from fompi.parallel.actions import actions
from fompi.parallel.step_plan import plan
from fompi.parallel.step_problem import LayerForm
from fompi.plans.plan import Compute

SIZES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (3, 1, 2), (1, 3, 2), (2, 2, 2), (2, 4, 1)]


def made(axes=(2, 2, 2), schedule="1f1b", microbatches=4, layers=(7, 5, 6, 3), **more):
    how = {"mesh": dict(zip(("dp", "tp", "pp"), axes, strict=True)), "microbatches": microbatches, "layers": layers}
    return plan(schedule, **{**how, "shape": (5, 3), "dtype": "float64", **more})


def schedules(stages):
    """Every schedule with 1, 2 and 5 micro-batches, but for those that are another one there."""
    yield from (("1f1b", 1), ("1f1b", 2), ("1f1b", 5), ("gpipe", 2), ("gpipe", 5))
    if stages > 1:
        yield "eager-1f1b", 5


def test_schedules_that_are_another_one():
    def ops(*how):
        return [program.ops for program in made(*how).programs]

    for axes in ((1, 2, 1), (1, 2, 2)):
        for microbatches in (1, 2, 5):
            alike = axes[2] == 1 or microbatches < 5
            assert (ops(axes, "eager-1f1b", microbatches) == ops(axes, "1f1b", microbatches)) == alike
        assert ops(axes, "gpipe", 1) == ops(axes, "1f1b", 1)


@pytest.mark.parametrize("axes", SIZES, ids=str)
def test_every_step_is_right(axes):
    """Also with parameters and rows that do not divide, and with fewer micro-batches than stages."""
    for schedule, microbatches in schedules(axes[2]):
        fompi.verify(made(axes, schedule, microbatches))
    if axes[2] == 2:
        fompi.verify(made(axes, "interleaved", 4, (4, 0, 1, 2, 9), chunks=2))
        fompi.verify(made(axes, actions("eager-1f1b", 2, 5, overlap_f_b=True), 5))


@pytest.mark.parametrize("shares", [[3, 1], [4, 6]], ids=str)
def test_layers_by_shares(shares):
    layers = [LayerForm(7, "embedding"), *range(1, 2 * sum(shares) - 1), LayerForm(3, "head")][: sum(shares)]
    layers[-1] = LayerForm(3, "head")
    for axes in ((1, 2, 2), (2, 1, 2)):
        found = made(axes, layers=layers, shares=shares)
        fompi.verify(found)
        assert [len(found.problem.held(rank)) for rank in (0, 3)] == shares
    if sum(shares) == 4:
        fompi.verify(made((1, 1, 3), layers=layers, shares=[3, 0, 1]))
    else:
        fompi.verify(made((1, 1, 2), "interleaved", layers=layers, chunks=2, shares=shares))
    with pytest.raises(PlanError, match="the first and the last of 2 stages need one"):
        made((1, 1, 2), layers=layers, shares=[0, 1])
    with pytest.raises(LayoutError, match="add up to 7"):
        made((1, 1, 2), layers=layers, shares=[4, 3])


BESIDES = ("input", "loss", "input_backward", "update")
"""The kernels of a step that a pipeline has not: there they are the program's."""


def what_ranks_do(found):
    """Of each rank the kernels, with a layer or stage and a micro-batch, and the messages with their shapes."""

    def done(program, op):
        if isinstance(op, Compute):
            return op.kernel, *op.args[:2]
        return str(op)[-2:], program.buffer(op.chunk.buffer).row  # >1 to rank 1, <1 from it

    needed = [[op for op in program.ops if getattr(op, "kernel", "") not in BESIDES] for program in found.programs]
    return [[done(program, op) for op in ops] for program, ops in zip(found.programs, needed, strict=True)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b", "interleaved"])
def test_a_step_on_one_axis_has_the_plan_of_a_pipeline(schedule):
    """With dp = tp = 1 and a layer in each stage: the same kernels and messages in the same order, as fast."""
    link = replace(fompi.Machine.load("gigabit"), latency=0.1)
    for ranks in (1, 2, 4):
        chunks = 2 if schedule == "interleaved" else 1
        how = {"microbatches": 5, "chunks": chunks, "dtype": "float64", "seconds": {"F": 1.0, "B": 2.0}}
        step = plan(schedule, mesh={"pp": ranks}, layers=[3] * ranks * chunks, shape=(5, 3), **how)
        pipeline = pipeline_plan.plan(schedule, ranks=ranks, activations=(5, 3), **how)
        assert what_ranks_do(step) == what_ranks_do(pipeline)
        seconds = [fompi.simulate(found, link).seconds for found in (step, pipeline)]
        assert seconds[0] == pytest.approx(seconds[1], rel=1e-6) and step.schedule == pipeline.schedule


MODEL = (
    LayerForm(7, "embedding", stay=True), LayerForm(5, "attention", tensors=2), 6, LayerForm(3, "attention", stay=True),
    LayerForm(0, stay=True, tensors=1), LayerForm(4, "head", tensors=3),
)  # fmt: skip


@pytest.mark.parametrize("axes", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)], ids=str)
def test_every_kind_of_layer_is_right(axes):
    """An embedding, attention, a head whose gradients wait, and parameters that stay."""
    for schedule, microbatches in schedules(axes[2]):
        fompi.verify(made(axes, schedule, microbatches, MODEL))
    if axes[2] == 2:
        fompi.verify(made(axes, "interleaved", 4, MODEL, chunks=2))
        fompi.verify(made(axes, actions("eager-1f1b", 2, 5, overlap_f_b=True), 5, MODEL))


@pytest.mark.parametrize("layers", [(7, 5, 6, 3), MODEL], ids=["rows", "model"])
def test_a_step_that_leaves_something_out_is_refused(layers):
    found = made(layers=layers)
    for rank in (0, 3, 5):
        ops = found.programs[rank].ops
        for i in range(rank, len(ops), 23 if layers is not MODEL else 47):
            with pytest.raises(PlanError):
                fompi.verify(with_program(found, replace(found.programs[rank], ops=(*ops[:i], *ops[i + 1 :]))))


def test_gradients_are_summed_in_float32_with_who_has_them():
    found = made((2, 1, 1), layers=MODEL, dtype="float16")
    fompi.verify(found)
    rows = {b.name: (b.row, b.dtype) for b in found.programs[0].buffers}
    assert rows["g1_0"] == ((3 + 2,), "float32") and rows["g5_1"] == ((2 + 3,), "float32")
    assert rows["p1"] == ((3,), "float16")


def test_a_step_whose_update_comes_too_early_is_refused():
    """Before the sum is complete, and where another rank still needs the old parameters."""
    found = made((2, 1, 1), microbatches=2)
    ops = found.programs[0].ops
    at = next(i for i, op in enumerate(ops) if isinstance(op, Compute) and op.kernel == "update")
    adds = [i for i, op in enumerate(ops) if isinstance(op, Compute) and op.kernel == "add"]
    for before in (max(i for i in adds if i < at), 0):
        moved = (*ops[:before], ops[at], *ops[before:at], *ops[at + 1 :])
        with pytest.raises(PlanError):
            fompi.verify(with_program(found, replace(found.programs[0], ops=moved)))


def test_what_hides_in_a_step():
    """Two layers, one micro-batch: the second gather, the first sum and an update hide."""
    how = {"layers": (250, 250), "seconds": {"F": 1.0, "B": 2.0, "U": 0.5}, "dtype": "float32"}
    link = replace(fompi.Machine.load("gigabit"), latency=0.0, bandwidth=500.0, overhead=0.0)  # a part takes 1 s
    for axes, seconds in (((1, 1, 1), 7.0), ((2, 1, 1), 8.5)):
        found = made(axes, microbatches=1, **how)
        assert fompi.simulate(found, link).seconds == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"mesh": {"cp": 2}}, LayoutError, "a step has dp, tp and pp"),
        ({"mesh": {"dp": 0}}, LayoutError, "must be integers >= 1"),
        ({"layers": (3,)}, LayoutError, "2 stages need a layer each"),
        ({"layers": (3, -1)}, LayoutError, "2 stages need a layer each"),
        ({"layers": (3, LayerForm(3, "embedding"))}, LayoutError, "layer 1 of 2 is an embedding"),
        ({"layers": (LayerForm(3, "head"), 3)}, LayoutError, "layer 0 of 2 is a head"),
        ({"layers": (3, LayerForm(3, "moe"))}, LayoutError, "'moe', which is none of rows, attention"),
        ({"schedule": "zb-h1"}, PlanError, "whole backwards"),
        ({"seconds": {"F": [1.0, 2.0]}}, PlanError, "one for each of the 4 layers"),
        ({"seconds": {"I": 1.0}}, PlanError, "must map F, B, U to"),
    ],
)
def test_wrong_arguments(changes, error, words):
    with pytest.raises(error, match=words):
        made((1, 1, 2), **changes)
