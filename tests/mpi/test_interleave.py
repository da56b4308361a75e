"""`fompi.interleave`: functions in turns have the results of one after the other, and run where they may."""

import threading

import numpy as np
import pytest
import torch
from strategies import drawn, runs, same_bits

import fompi
from fompi.base.layout import split
from fompi.parallel.expert import moe
from fompi.parallel.orders import parts
from fompi.parallel.pipeline import order
from fompi.parallel.tensor import column_parallel_linear, row_parallel_linear
from fompi.parallel.turns import MOST, give_way
from fompi.torch import nn

pytestmark = pytest.mark.ranks(mpich=[2, 4], openmpi=[3])


def layers(world):
    """Functions of a number, which return arrays: a layer of experts with its backward, and two linear layers."""
    ep = runs(split(5, world.size))[world.rank]
    router, w1, w2 = drawn(3, 5), drawn(5, 3, 2)[ep], drawn(5, 2, 3)[ep]
    wide, back = drawn(3, 2 * world.size)[:, 2 * world.rank :][:, :2], drawn(2, 3, seed=world.rank)

    def experts(seed):
        y, saved = moe.forward(drawn(4 + world.rank, 3, seed=seed), router, w1, w2, k=2, comm=world)
        return [y, *(g for g in moe.backward(saved, y) if g is not None)]

    def linear(seed):
        h = column_parallel_linear(drawn(2, 3, seed=seed), wide, activation="relu", comm=world)
        return [h, row_parallel_linear(h, back, comm=world)]

    return experts, linear


def test_the_results_are_those_of_one_after_the_other(world):
    """Bit by bit, with functions that make different numbers of calls, several times over."""
    experts, linear = layers(world)
    calls = [lambda: experts(1), lambda: linear(2), lambda: [*linear(3), *linear(4)], lambda: experts(5)]
    expected = [call() for call in calls]
    for _ in range(3):
        for got, wanted in zip(fompi.interleave(*calls), expected, strict=True):
            assert same_bits(got, wanted)


def test_one_function_runs_at_a_time_and_lets_the_others_run_where_it_waits(world):
    said, running = [], threading.Lock()

    def count(name, times):
        for number in range(times):
            assert running.acquire(blocking=False)
            said.append(f"{name}{number}")
            running.release()
            give_way()
        return name

    assert fompi.interleave(lambda: count("a", 3), lambda: count("b", 1), lambda: count("c", 2)) == ["a", "b", "c"]
    assert said == ["a0", "b0", "c0", "a1", "c1", "a2"]
    inner = fompi.interleave(
        lambda: fompi.interleave(lambda: count("d", 2), lambda: count("e", 2)), lambda: count("f", 2)
    )
    assert inner == [["d", "e"], "f"]
    assert fompi.interleave() == [] and fompi.interleave(lambda: 1) == [1]


def test_calls_have_one_order_on_all_ranks(world):
    """Operations of one form, which would be mistaken for each other, on ranks that let others run at other places."""
    experts, _ = layers(world)
    expected = experts(9)

    def sums(first, times):
        found = []
        for k in range(times):
            pending = fompi.all_reduce.start(np.full(3, first + k, float), comm=world)
            for _ in range((world.rank + k) % 3):
                give_way()
            found.append(float(pending.wait()[0]) + float(fompi.all_reduce(np.ones(3), comm=world)[0]))
            for _ in range((2 * world.rank + first) % 4):
                give_way()
        return [each / world.size - 1 for each in found]

    for _ in range(5):
        a, b, c, got = fompi.interleave(
            lambda: sums(0, 6), lambda: sums(100, 3), lambda: sums(200, 8), lambda: experts(9)
        )
        assert a == [*range(6)] and b == [*range(100, 103)] and c == [*range(200, 208)]
        assert same_bits(got, expected)


def test_wrong_functions():
    with pytest.raises(fompi.ArgumentError, match="3 is no function"):
        fompi.interleave(lambda: 1, 3)
    with pytest.raises(fompi.ArgumentError, match="at most 32 run in turns"):
        fompi.interleave(*[lambda: 1] * (MOST + 1))


def test_the_modes_of_torch_hold_in_all_functions(world):
    def seen():
        give_way()
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")

    assert fompi.interleave(seen, seen) == [(True, False, False)] * 2
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert fompi.interleave(seen, seen) == [(False, False, True)] * 2
    with torch.inference_mode():
        assert fompi.interleave(seen, seen) == [(False, True, False)] * 2


def model(comm, seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(nn.MoE(6, 4, 5, 2, comm=comm), torch.nn.Tanh(), nn.MoE(6, 4, 5, 2, comm=comm))


def test_a_forward_of_torch_under_a_backward(world):
    """Autograd runs in a thread of its own there. The gradients are those of one after the other."""
    layer, (x1, x2) = model(world, 0), torch.randn(2, 4, 6)

    def step(together):
        layer.zero_grad()
        loss = layer(x1).square().sum()
        if together:
            y, _ = fompi.interleave(lambda: layer(x2), loss.backward)
        else:
            loss.backward()
            y = layer(x2)
        y.square().sum().backward()
        return [y.detach(), *(p.grad.clone() for p in layer.parameters())]

    assert same_bits(step(True), step(False))


@pytest.mark.parametrize(("schedule", "chunks"), [("eager-1f1b", 1), ("interleaved", 2), ("dualpipev", 2)])
def test_experts_across_micro_batches_of_a_pipeline(world, schedule, chunks):
    """Layers of experts over `ep` in stages over `pp`: losses and gradients as without pairs."""
    pp = 2 if world.size % 2 == 0 else 1
    with fompi.Mesh(world, pp=pp, ep=world.size // pp) as mesh:
        held = [model(mesh["ep"], stage) for stage in range(chunks)]
        torch.manual_seed(mesh["ep"].rank)
        inputs, targets = torch.randn(2, 6, 4, 6)
        found = []
        for overlap_f_b in (False, True):
            for stage in held:
                stage.zero_grad()
            how = {"schedule": schedule, "microbatches": 6, "activations": (4, 6), "overlap_f_b": overlap_f_b}
            if schedule == "dualpipev":
                with pytest.raises(fompi.PlanError, match="has no method backward_input"):
                    fompi.torch.Pipeline(held, comm=mesh["pp"], loss=lambda y, t: (y - t).square().sum(), **how)
                how["schedule"] = whole_backwards(mesh["pp"].size, 6)
                del how["overlap_f_b"]
            with fompi.torch.Pipeline(held, comm=mesh["pp"], loss=lambda y, t: (y - t).square().sum(), **how) as pipe:
                losses = pipe.step(list(inputs), list(targets))
            found.append([*(losses or ()), *(p.grad.clone() for stage in held for p in stage.parameters())])
        for got, wanted in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted)


def whole_backwards(ranks, microbatches):
    """DualPipeV with pairs, where autograd makes both parts of a backward at once."""
    steps = order("dualpipev", ranks, microbatches, 2, overlap_f_b=True)
    return [[str(step).replace("I", "B") for step in each if parts([step])[0].kind != "W"] for each in steps]
