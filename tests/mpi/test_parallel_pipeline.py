"""Pipelines: losses and gradients are those of one process, for every order, and errors reach all ranks."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from plan_texts import with_program
from strategies import close, slopes

import fompi
from emulated import Emulated
from fompi.base.errors import DtypeError, MismatchError, PeerError, PlanError, ShapeError, StateError, TensorError
from fompi.model.pipeline import placement_of, stages_of
from fompi.parallel.actions import parts
from fompi.parallel.pipeline import SCHEDULES, Pipeline, actions, plan

pytestmark = pytest.mark.ranks(mpich=[2, 3, 4], openmpi=[])

NAMED = [name for name in SCHEDULES if name != "interleaved"]
CHUNKS = {name: 2 if placement_of(name) == "v" else 1 for name in NAMED}


def where(world, schedule, chunks):
    """The stages of this rank, and whether it has the first and the last one."""
    held = stages_of(world.rank, world.size, chunks, placement_of(schedule if isinstance(schedule, str) else ""))
    return held, 0 in held, world.size * chunks - 1 in held


class Linear:
    """y = tanh(x @ w). The gradient of w is the sum over all micro-batches."""

    def __init__(self, w):
        self.w, self.dw, self.calls = w, np.zeros_like(w), []

    def forward(self, x):
        self.calls.append("F")
        y = np.tanh(x @ self.w)
        return y, (x, y)

    def backward_input(self, saved, dy):
        self.calls.append("I")
        x, y = saved
        dh = dy * (1 - y * y)
        return dh @ self.w.T, (x, dh)

    def backward_weight(self, rest):
        self.calls.append("W")
        x, dh = rest
        self.dw += x.T @ dh


class Whole(Linear):
    """A stage whose backward has one part."""

    def backward(self, saved, dy):
        dx, rest = self.backward_input(saved, dy)
        self.backward_weight(rest)
        return dx

    backward_weight = Linear.backward_weight


def loss(y, target):
    return 0.5 * ((y - target) ** 2).sum(), y - target


def drawn(stages, microbatches, seed=0, dtype="float64"):
    """The same numbers on all ranks: weights of different widths, inputs and targets of 2 rows, and the activations."""
    random = np.random.default_rng([seed, stages, microbatches])
    widths = [3 + (5 * s + seed) % 4 for s in range(stages + 1)]
    weights = [random.standard_normal(pair).astype(dtype) for pair in pairwise(widths)]
    inputs = [random.standard_normal((2, widths[0])).astype(dtype) for _ in range(microbatches)]
    targets = [random.standard_normal((2, widths[-1])).astype(dtype) for _ in range(microbatches)]
    return weights, inputs, targets, [(2, width) for width in widths[1:-1]]


def one_process(weights, inputs, targets):
    """Losses, gradients of the inputs, gradients of the weights."""
    stages, losses, gradients = [Linear(w) for w in weights], [], []
    for x, target in zip(inputs, targets, strict=True):
        saved, y = [], x
        for stage in stages:
            y, kept = stage.forward(y)
            saved.append(kept)
        value, dy = loss(y, target)
        losses.append(value)
        for stage, kept in zip(reversed(stages), reversed(saved), strict=True):
            dy, rest = stage.backward_input(kept, dy)
            stage.backward_weight(rest)
        gradients.append(dy)
    return losses, gradients, [stage.dw for stage in stages]


def test_the_gradients_of_one_process_are_finite_differences():
    """All pipelines are compared with them."""
    weights, inputs, targets, _ = drawn(3, 2)

    def total(*tensors):
        return sum(one_process(tensors[:3], tensors[3:], targets)[0])

    _, input_gradients, weight_gradients = one_process(weights, inputs, targets)
    expected = slopes(total, [*weights, *inputs])
    for actual, slope in zip([*weight_gradients, *input_gradients], expected, strict=True):
        close(actual, slope)


def run(world, schedule, microbatches, chunks=1, kind=Linear, seed=0, steps=2, **how):
    """Steps of a pipeline, compared with one process.

    Returns the stages of this rank, the losses, the gradients of the inputs, and the trace of the last step.
    """
    chunks = max(chunks, CHUNKS.get(schedule, 1)) if isinstance(schedule, str) else chunks
    weights, inputs, targets, activations = drawn(world.size * chunks, microbatches, seed)
    held, first, last = where(world, schedule, chunks)
    stages = [kind(weights[s]) for s in held]
    copies = [x.copy() for x in inputs]
    with Pipeline(
        stages, comm=world, microbatches=microbatches, schedule=schedule, activations=activations, loss=loss,
        dtype="float64", **how,
    ) as pipe:  # fmt: skip
        for _ in range(steps):
            for stage in stages:
                stage.dw[...] = 0
            losses = pipe.step(inputs if first else None, targets if last else None)
        gradients = pipe.input_gradients
        trace = pipe.trace
    expected, input_gradients, weight_gradients = one_process(weights, inputs, targets)
    if last:
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
    else:
        assert losses is None
    if first:
        for got, wanted in zip(gradients, input_gradients, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-13)
        np.testing.assert_array_equal(inputs, copies)
    else:
        assert gradients is None
    for number, stage in zip(held, stages, strict=True):
        np.testing.assert_allclose(stage.dw, weight_gradients[number], rtol=1e-10, atol=1e-13)
    if schedule != "dualpipev" and "overlap_f_b" not in how:  # it has B, and I with W
        kinds = 3 if schedule[0] == "z" else 2
        assert sum(event.is_compute for event in trace.events) == chunks * microbatches * kinds
    return stages, losses, gradients, trace


@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("schedule", NAMED)
def test_the_results_are_those_of_one_process(world, schedule, microbatches):
    """With 1 micro-batch and several ranks there are more stages than micro-batches."""
    run(world, schedule, microbatches, seed=microbatches)


@pytest.mark.parametrize(("schedule", "chunks"), [("eager-1f1b", 1), ("interleaved", 2), ("dualpipev", 2)])
def test_a_forward_and_a_backward_side_by_side(world, schedule, chunks):
    """A stage works in the order of the pairs, the forward of each pair first: nothing waits in these stages."""
    stages, *_, trace = run(world, schedule, 9, chunks, steps=1, overlap_f_b=True)
    assert any(event.name.startswith("forward_backward<") for event in trace.events)
    held, *_ = where(world, schedule, chunks)
    steps = parts(actions(schedule, world.size, 9, chunks, overlap_f_b=True)[world.rank])
    called = {"B": "IW"}  # B of such a stage has two parts
    assert "".join(stages[0].calls) == "".join(called.get(a.kind, a.kind) for a in steps if a.stage == held[0])


@pytest.mark.parametrize(("microbatches", "chunks"), [(1, 2), (4, 2), (5, 2), (6, 3)])
def test_interleaved_stages(world, microbatches, chunks):
    run(world, "interleaved", microbatches, chunks)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_stage_whose_backward_has_one_part(world, schedule):
    run(world, schedule, 3, kind=Whole)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_zero_bubble_gives_the_bits_of_1f1b(world, schedule):
    """Every stage adds the gradients of its micro-batches in the same order."""
    for seed in range(3):
        stages, losses, gradients, _ = run(world, schedule, 5, seed=seed)
        others, other_losses, other_gradients, _ = run(world, "1f1b", 5, seed=seed)
        assert losses == other_losses
        assert stages[0].dw.tobytes() == others[0].dw.tobytes()
        if gradients is not None:
            assert [g.tobytes() for g in gradients] == [g.tobytes() for g in other_gradients]


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-h2", 1), ("zbv", 2)])
def test_smaller_messages(world, schedule, chunks):
    """The gradients are near those without a wire, whatever the order, and an evaluation has the losses of a step."""
    weights, inputs, targets, activations = drawn(world.size * chunks, 5, dtype="float32")
    (held, first, last), found, losses = where(world, schedule, chunks), [], []
    for wire in (None, "int8", "float16"):
        stages = [Linear(weights[s]) for s in held]
        how = {"microbatches": 5, "schedule": schedule, "activations": activations, "loss": loss, "dtype": "float32"}
        with Pipeline(stages, comm=world, wire=wire, **how) as pipe:
            losses.append(pipe.step(inputs if first else None, targets if last else None))
            found.append(np.concatenate([stage.dw.reshape(-1) for stage in stages]))
            ys = pipe.forward(inputs if first else None)
            if last:
                np.testing.assert_allclose([loss(y, t)[0] for y, t in zip(ys, targets, strict=True)], losses[-1])
    norm = np.linalg.norm(found[0])
    least = 0 if world.size > 1 else -1  # one rank sends nothing
    assert least < np.linalg.norm(found[1] - found[0]) < 0.15 * norm
    assert least < np.linalg.norm(found[2] - found[0]) < 0.02 * norm
    if last:
        np.testing.assert_allclose(losses[1], losses[0], rtol=0.2)


def test_a_stage_works_in_the_order(world):
    stages, *_ = run(world, "zb-h2", 5, steps=1)
    assert stages[0].calls == [action.kind for action in actions("zb-h2", world.size, 5)[world.rank]]


def test_an_order_of_the_user(world):
    """The forwards backwards, and a file of PyTorch."""
    reverse = [[f"{r}F{i}" for i in reversed(range(4))] + [f"{r}B{i}" for i in (1, 0, 3, 2)] for r in range(world.size)]
    run(world, reverse, 4)
    run(world, "\n".join(",".join([*actions[:4], "", *actions[4:]]) for actions in reverse), 4)


def test_a_rank_that_sends_late_holds_nobody_up_for_ever(world):
    """Forwards in opposite orders on neighbours: all messages are on their way at once."""
    listed = []
    for rank in range(world.size):
        numbers = range(4) if rank % 2 else reversed(range(4))
        listed.append([f"{rank}F{i}" for i in numbers] + [f"{rank}B{i}" for i in range(4)])
    run(world, listed, 4)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_dtypes_and_frameworks(world, framework):
    """A stage gets tensors of the framework, in the dtype of the pipeline."""
    torch = pytest.importorskip("torch") if framework == "torch" else None
    seen = []

    class Double:
        def forward(self, x):
            seen.append(x)
            return x * 2, None

        def backward(self, saved, dy):
            seen.append(dy)
            return dy * 2

    make = (lambda n: torch.full((3,), n, dtype=torch.bfloat16)) if torch else lambda n: np.full(3, n, "float16")
    dtype = "bfloat16" if torch else "float16"
    with Pipeline(
        [Double()], comm=world, microbatches=2, activations=(3,), loss=lambda y, t: (float(y.sum()), y * 0 + t),
        dtype=dtype, framework=framework,
    ) as pipe:  # fmt: skip
        losses = pipe.step([make(1), make(2)], [1, 2])
    if losses is not None:
        assert losses == [3.0 * 2**world.size, 6.0 * 2**world.size]
    if world.rank == 0:
        assert [float(g.sum()) for g in pipe.input_gradients] == [3.0 * 2**world.size, 6.0 * 2**world.size]
    assert {type(x) for x in seen} == {torch.Tensor if torch else np.ndarray}
    assert {str(x.dtype).removeprefix("torch.") for x in seen} == {dtype}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_stage_may_call_operations(world, schedule):
    """A stage of a tensor-parallel model calls collectives of another communicator while it runs."""
    width = 2 if world.size % 2 == 0 else 1
    with fompi.Mesh(pp=world.size // width, tp=width) as mesh:

        class Mean(Linear):
            def forward(self, x):
                return super().forward(fompi.all_reduce(x, comm=mesh["tp"]) / width)

        run(mesh["pp"], schedule, 3, kind=Mean)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zbv", 2)])
def test_an_emulated_accelerator(world, schedule, chunks):
    """The results are right, and each kernel takes as long as declared, after the one before it."""
    seconds = {"F": 2e-3, "B": 4e-3, "I": 2e-3, "W": 2e-3}
    how = {"backend": Emulated(fompi.Machine.load("gigabit")), "seconds": seconds}
    *_, trace = run(world, schedule, 4, chunks, steps=1, **how)
    kernels = sorted((e.start, e.end, e.name[:9]) for e in trace.events if e.is_compute)
    for begun, ended, name in kernels:
        kind = {"backward<": "B", "backward_": "I"}.get(name, "F")  # I and W take equally long
        assert ended - begun == pytest.approx(seconds[kind], rel=1e-6)
    assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(kernels))


def test_an_emulated_accelerator_needs_seconds(world):
    with pytest.raises(PlanError, match="seconds of backward"):
        pipe_of(world, Linear, backend=Emulated(fompi.Machine.load("gigabit")), seconds={"F": 1.0})


# ------------------------------------------------------------------------------------------------ plans


def hand_written(world):
    """Rank 0 makes a number, every rank adds one and passes it on: what travels is a buffer without rows."""
    found = plan("gpipe", ranks=world.size, microbatches=2, activations=(2, 3), dtype="float64")
    return replace(found, programs=tuple(found.programs))


def counting(seen):
    def forward(args, reads, writes):
        seen.append(args)
        if writes[0].size:
            writes[0][...] = reads[0] + 1 if reads else args[1]

    def backward(args, reads, writes):
        seen.append((*args, reads[0].sum() if reads[0].size else 0))
        if writes[0].size:
            writes[0][...] = 1

    return {"forward": forward, "backward": backward}


def test_a_hand_written_plan_can_be_bound(world):
    seen, calls = [], []
    step = fompi.bind(hand_written(world), comm=world, kernels=counting(seen))
    for _ in range(2):
        step()
        calls.append(seen[:])
        seen.clear()
    assert calls[0] == calls[1] and [c[:2] for c in calls[0]] == [(world.rank, i) for i in (0, 1, 0, 1)]
    sums = [args[2] for args in calls[0] if len(args) == 3]
    inputs = [6.0 * (world.rank - 1 + i) for i in range(2)]  # of the last rank, whose loss has no gradient
    assert sums == ([6.0, 6.0] if world.rank < world.size - 1 else inputs if world.rank else [0, 0])
    with pytest.raises(StateError, match="cannot be run alone"):
        step.compute_seconds()
    assert step.messages_seconds(1) >= 0
    step.close()


def test_a_hand_written_plan_that_is_wrong(world):
    found = hand_written(world)
    broken = with_program(found, replace(found.programs[0], ops=found.programs[0].ops[:-1]))
    with pytest.raises(PlanError, match="rank 0"):
        fompi.bind(broken, comm=world, kernels=counting([]))


def test_a_kernel_that_is_not_given(world):
    found = hand_written(world)
    with pytest.raises(PlanError, match="declares the kernel 'backward'"):
        fompi.bind(found, comm=world, kernels={"forward": print})
    with pytest.raises(PlanError, match="unknown kernel 'sideward'"):
        fompi.bind(found, comm=world, kernels={**counting([]), "sideward": print})


# ------------------------------------------------------------------------------------------------ errors


def pipe_of(world, kind, **changes):
    schedule = changes.get("schedule", "1f1b")
    chunks = CHUNKS.get(schedule, 1) if isinstance(schedule, str) else 1
    weights, inputs, targets, activations = drawn(world.size * chunks, 4)
    held = where(world, schedule, chunks)[0]
    options = {"comm": world, "microbatches": 4, "activations": activations, "loss": loss, "dtype": "float64"}
    return Pipeline([kind(weights[s]) for s in held], **{**options, **changes}), inputs, targets


def assert_fails(world, pipe, inputs, targets, error, where, text):
    """`error` on the rank `where`, PeerError of that rank on all others; the next step runs through."""
    with pytest.raises(error if world.rank == where else PeerError) as caught:
        pipe.step(inputs, targets)
    if world.rank == where:
        assert text in str(caught.value)
    else:  # a rank that has done its part does not know why
        assert caught.value.origin == where and f"rank {where}" in str(caught.value)
        assert text in str(caught.value) or "had done its part" in str(caught.value)


@pytest.mark.parametrize("method", ["forward", "backward_input", "backward_weight"])
@pytest.mark.parametrize("schedule", NAMED)
def test_a_stage_that_raises(world, schedule, method):
    failing, broken = world.size - 1, [True]

    class Broken(Linear):
        pass

    def fail(self, *args):
        if len(self.calls) > 1 and world.rank == failing and broken[0]:
            raise ZeroDivisionError("no luck")
        return getattr(Linear, method)(self, *args)

    setattr(Broken, method, fail)
    pipe, inputs, targets = pipe_of(world, Broken, schedule=schedule)
    assert_fails(world, pipe, inputs, targets, ZeroDivisionError, failing, "no luck")
    broken[0] = False
    losses = pipe.step(inputs, targets)  # the pipeline is as good as new
    if losses is not None:
        np.testing.assert_allclose(losses, one_process(*drawn(len(pipe.problem.activations) + 1, 4)[:3])[0], rtol=1e-12)
    pipe.close()


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("error", [ZeroDivisionError("too late"), PeerError("too late", 0)], ids=["own", "of tp"])
def test_an_error_at_the_very_end(world, checked, error):
    """The other ranks have done their part. They hear of it, unless they return without asking.

    A PeerError of another communicator is one of this rank, too.
    """
    last = world.size - 1

    class Late(Linear):
        def backward_weight(self, rest):
            super().backward_weight(rest)
            if world.rank == last and self.calls.count("W") == 4:
                raise error

    pipe, inputs, targets = pipe_of(world, Late, schedule="zb-h1", checked=checked)
    if checked:
        assert_fails(world, pipe, inputs, targets, type(error), last, "failed in" if world.rank < last else "late")
    else:
        errors = type(error) if world.rank == last else PeerError
        try:
            pipe.step(inputs, targets)
            assert world.rank < last
        except errors:
            pass


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda y: y[:, :-1], ShapeError, "was declared"),
        (lambda y: y.astype("float32"), DtypeError, "float32"),
        (lambda y: [1, 2], TensorError, "list"),
    ],
)
@pytest.mark.parametrize("method", ["forward", "backward_input"])
def test_a_stage_that_returns_something_else_than_declared(world, method, change, error, text):
    where = 0 if method == "forward" else world.size - 1

    class Other(Linear):
        pass

    def changed(self, *args):
        first, second = getattr(Linear, method)(self, *args)
        return (change(first) if world.rank == where else first), second

    setattr(Other, method, changed)
    pipe, inputs, targets = pipe_of(world, Other)
    if world.size == 1:  # nothing is passed on
        pipe.close()
        return
    assert_fails(world, pipe, inputs, targets, error, where, text)


def test_a_stage_that_returns_one_value(world):
    class Bare(Linear):
        def forward(self, x):
            y, saved = super().forward(x)
            return y if world.rank == 0 else (y, saved)

    pipe, inputs, targets = pipe_of(world, Bare)
    assert_fails(world, pipe, inputs, targets, TensorError, 0, "must return (y, saved)")


def test_wrong_numbers_of_microbatches(world):
    pipe, inputs, targets = pipe_of(world, Linear)
    assert_fails(world, pipe, inputs[:3], targets, ShapeError, 0, "3 micro-batches")
    assert_fails(world, pipe, inputs, targets * 2, ShapeError, world.size - 1, "8 micro-batches")
    assert_fails(world, pipe, None, targets, ShapeError, 0, "0 micro-batches")
    assert_fails(world, pipe, 3, targets, ShapeError, 0, "must list 4 micro-batches")
    pipe.step(inputs, targets)
    pipe.close()
    with pytest.raises(StateError, match="closed"):
        pipe.step(inputs, targets)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"schedule": "1f2b"}, PlanError, "unknown schedule"),
        ({"microbatches": 0}, PlanError, "microbatches=0"),
        ({"activations": [(2,)] * 9}, ShapeError, "9 shapes"),
        ({"activations": 7}, ShapeError, "must be shapes"),
        ({"dtype": "float99"}, DtypeError, "float99"),
        ({"wire": "int8"}, DtypeError, "float64 is sent as it is"),
        ({"wire": "int3"}, DtypeError, "known are"),
        ({"loss": None}, PlanError, "loss"),
        ({"framework": "lisp"}, PlanError, "lisp"),
        ({"schedule": [["0F0"]] * 9}, PlanError, "9 ranks"),
    ],
)
def test_arguments_that_do_not_fit(world, changes, error, text):
    with pytest.raises(error, match=text):
        pipe_of(world, Linear, **changes)


def test_no_stages(world):
    with pytest.raises(PlanError, match="stages is empty"):
        Pipeline([], comm=world, microbatches=2, activations=(2, 3), loss=loss)


def test_an_argument_that_only_one_rank_refuses(world):
    class Poor:
        def __init__(self, w):
            pass

        def forward(self, x): ...

    with pytest.raises(PlanError if world.rank == 0 else MismatchError, match="no method backward"):
        pipe_of(world, Poor if world.rank == 0 else Linear)
    for wrong in ({"seconds": {"F": "x"}}, {"seconds": 3}, {"backend": 3}, {"schedule": 5}):
        with pytest.raises(PlanError if world.rank == 0 else MismatchError, match=f"{next(iter(wrong))}|action"):
            pipe_of(world, Linear, **(wrong if world.rank == 0 else {}))


def test_ranks_that_differ(world):
    if world.size > 1:
        with pytest.raises(MismatchError):
            pipe_of(world, Linear, microbatches=4 + (world.rank == 1))
        with pytest.raises(MismatchError):
            pipe_of(world, Linear, schedule="gpipe" if world.rank else "1f1b")
        orders = [actions(name, world.size, 4) for name in ("gpipe", "1f1b")]
        with pytest.raises(MismatchError, match="0F0 0F1 0F2 0F3 0B0"):
            pipe_of(world, Linear, schedule=orders[world.rank > 0])


# ------------------------------------------------------------------------------------------------ evaluation, and torch


class Forward(Whole):
    """A stage that can evaluate, and counts it."""

    def evaluate(self, x):
        self.calls.append("E")
        return np.tanh(x @ self.w)


@pytest.mark.parametrize("kind", [Whole, Forward])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_an_evaluation(world, kind, schedule, chunks):
    """The results of the last stage, between two steps, which it does not change."""
    weights, inputs, targets, activations = drawn(world.size * chunks, 3)
    held, first, last = where(world, schedule, chunks)
    stages = [kind(weights[s]) for s in held]
    how = {"microbatches": 3, "activations": activations, "loss": loss, "dtype": "float64"}
    with Pipeline(stages, comm=world, schedule=schedule, **how) as pipe:
        pipe.step(inputs if first else None, targets if last else None)
        sums = [stage.dw.copy() for stage in stages]
        for _ in range(2):
            ys = pipe.forward(inputs if first else None)
            assert [event.name[:8] for event in pipe.trace.events if event.is_compute] == ["evaluate"] * 3 * chunks
        for stage, before in zip(stages, sums, strict=True):
            np.testing.assert_array_equal(stage.dw, before)
            assert kind is Whole or stage.calls.count("E") == 6
        if last:
            for y, x in zip(ys, inputs, strict=True):
                for w in weights:
                    x = np.tanh(x @ w)
                np.testing.assert_allclose(y, x, rtol=1e-12)
        else:
            assert ys is None
        with pytest.raises(ShapeError if first else PeerError, match="inputs has 1 micro-batches"):
            pipe.forward(inputs[:1])
        losses = pipe.step(inputs if first else None, targets if last else None)
        assert (losses is None) != last


class Rescaled(torch.nn.Module):
    """A loss with a parameter of its own, a term that does not depend on y, and a weight on the target."""

    def __init__(self, weight):
        super().__init__()
        self.scale, self.weight = torch.nn.Parameter(torch.tensor(1.5)), weight

    def forward(self, y, target):
        return (self.scale * y - target).square().sum() + 0.1 * self.weight.square().sum()


def pipeline_of_torch(world):
    """(the pipe, the modules of one process, the loss of both)."""
    torch.manual_seed(5)
    modules = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.0)) for _ in range(world.size)]
    whole = copy.deepcopy(modules)
    losses = [Rescaled(m[-1][0].weight) for m in (modules, whole)]
    how = {"microbatches": 2, "activations": (3, 4), "dtype": "float64"}
    return fompi.torch.Pipeline([modules[world.rank]], comm=world, loss=losses[0], **how), modules, whole, losses


@pytest.mark.usefixtures("float64")
def test_autograd_differentiates_the_whole_loss(world):
    """Parameters of the loss, terms beside y, targets, and inputs that one module outside has computed."""
    pipe, modules, whole, losses = pipeline_of_torch(world)
    embeds = [torch.nn.Linear(4, 4) for _ in range(2)]
    embeds[1].load_state_dict(embeds[0].state_dict())
    x = torch.linspace(-1, 1, 24).view(6, 4)
    targets = [[torch.full((3, 4), 0.1 * i, requires_grad=True) for i in range(2)] for _ in range(2)]
    for _ in range(2):  # gradients add up
        found = pipe.step(embeds[0](x).chunk(2), targets[0])
        total = 0
        for h, target in zip(embeds[1](x).chunk(2), targets[1], strict=True):
            for module in whole:
                h = module(h)
            total = total + losses[1](h, target)
        total.backward()
    if world.rank == world.size - 1:
        assert sum(found).item() == pytest.approx(total.item())
        assert torch.allclose(losses[0].scale.grad, losses[1].scale.grad)
        for target, expected in zip(*targets, strict=True):
            assert torch.allclose(target.grad, expected.grad)
    for p, q in zip(modules[world.rank].parameters(), whole[world.rank].parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad), (p.grad - q.grad).abs().max()
    if world.rank == 0:
        assert torch.allclose(embeds[0].weight.grad, embeds[1].weight.grad)
    pipe.close()


@pytest.mark.usefixtures("float64")
def test_an_error_before_the_first_stage_is_one_of_the_step(world):
    """In the graph of the inputs, which autograd differentiates when the stages have done their part."""
    pipe, _, _, _ = pipeline_of_torch(world)
    x = torch.ones(3, 4, requires_grad=True)
    x.register_hook(lambda _: 1 // 0)
    for given in ([x * 1, x * 1], [torch.ones(3, 4)] * 2):
        try:
            pipe.step(given, [torch.ones(3, 4)] * 2)
            assert not given[0].requires_grad
        except (ZeroDivisionError, PeerError) as error:
            assert given[0].requires_grad and isinstance(error, ZeroDivisionError) == (world.rank == 0)
    pipe.close()


@pytest.mark.usefixtures("float64")
def test_only_inputs_that_require_grad_get_one(world):
    """The first stage saves the product of the other one. Gradients of parameters are the same."""
    pipe, modules, _, _ = pipeline_of_torch(world)
    plain, wanted = torch.ones(3, 4), torch.ones(3, 4, requires_grad=True)
    pipe.step([plain, wanted], [plain, plain])
    if world.rank == 0:
        assert pipe.input_gradients[0] is None and torch.equal(pipe.input_gradients[1], wanted.grad)
        assert wanted.grad.abs().max() > 0
    first = [p.grad.clone() for p in modules[world.rank].parameters()]
    for p in modules[world.rank].parameters():
        p.grad = None
    pipe.step([plain, plain], [plain, plain])
    for p, expected in zip(modules[world.rank].parameters(), first, strict=True):
        assert torch.equal(p.grad, expected)
    pipe.close()


@pytest.mark.usefixtures("float64")
def test_the_grad_mode_of_the_program(world):
    """Without gradients a step computes losses, and no gradient. An evaluation computes none either."""
    pipe, modules, whole, losses = pipeline_of_torch(world)
    inputs = [torch.ones(3, 4), torch.zeros(3, 4)]
    with torch.no_grad():
        found = pipe.step(inputs, inputs)
        assert pipe.input_gradients == ([None, None] if world.rank == 0 else None)
    ys = pipe.forward(inputs)
    assert all(p.grad is None for p in modules[world.rank].parameters()) and losses[0].scale.grad is None
    if world.rank == world.size - 1:
        for y, value, x in zip(ys, found, inputs, strict=True):
            h = x
            for module in whole:
                h = module(h)
            assert torch.allclose(y, h) and torch.allclose(value, losses[1](h, x)) and not y.requires_grad
    if world.size > 1:
        wrong = world.rank == 0
        with torch.set_grad_enabled(not wrong), pytest.raises(MismatchError, match="without gradients"):
            pipe.step(inputs, inputs)
    pipe.close()


@pytest.mark.usefixtures("float64")
def test_a_loss_that_does_not_depend_on_y(world):
    module = torch.nn.Linear(4, 4)
    other = torch.nn.Parameter(torch.tensor(2.0))
    how = {"microbatches": 2, "activations": (3, 4), "dtype": "float64"}
    with fompi.torch.Pipeline(
        [module], comm=world, loss=lambda y, t: other * y.detach().sum() * 0 + other, **how
    ) as pipe:
        pipe.step([torch.ones(3, 4)] * 2, [None] * 2)
    if world.rank == world.size - 1:
        assert other.grad == 2 and module.weight.grad is None
    else:
        assert module.weight.grad is None or not module.weight.grad.any()
    with fompi.torch.Pipeline([module], comm=world, loss=lambda y, t: y, **how) as pipe:
        last = world.rank == world.size - 1
        with pytest.raises(ShapeError if last else PeerError, match="it must have one element"):
            pipe.step([torch.ones(3, 4)] * 2, [None] * 2)
