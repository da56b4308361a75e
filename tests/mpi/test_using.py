"""`comm.using(...)`: calls on it have these keywords. `wire="int8"` shows in the bits of every result."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from strategies import drawn, refused, same_bits

import fompi
from fompi.base.errors import ArgumentError, LayoutError, MismatchError, PlanError
from fompi.parallel.data import SGD, DataParallel
from fompi.parallel.expert import experts_of, moe
from fompi.parallel.pipeline import Pipeline
from fompi.parallel.sequence import Sharding, ring_attention, usp_attention
from fompi.parallel.tensor import (
    all_reduce_rmsnorm,
    attention,
    column_parallel_linear,
    heads_of,
    row_parallel_linear,
    vocab_parallel_cross_entropy,
)
from fompi.torch import DistributedDataParallel
from fompi.torch.nn import ColumnParallelLinear, full_state_dict

pytestmark = pytest.mark.ranks(mpich=[2, 3], openmpi=[2])


def numbers(*shape, seed=0):
    return drawn(*shape, seed=seed).astype(np.float32)


@pytest.fixture
def tp(world):
    return world.using(wire="int8")


def test_a_communicator_with_keywords_is_the_same_communicator(world, tp):
    assert tp is world.using(wire="int8") and tp.plain is world and world.plain is world
    assert world.using() is world and tp.using(wire=None) is world and world.using(wire=None, order="any") is world
    assert (tp.rank, tp.size, tp.name, tp.link) == (world.rank, world.size, world.name, world.link)
    assert repr(tp) == f"Communicator('world', rank {world.rank} of {world.size}, wire='int8')"
    before = world.calls
    tp.barrier()
    assert world.calls == tp.calls == before + 1
    with world.split(0, world.rank, "of a pickle") as part:  # several others are called world
        carrier = part.using(wire="int8")
        assert copy.deepcopy(carrier) is carrier and pickle.loads(pickle.dumps(carrier)) is carrier
    assert fompi.Communicator.of(tp) is tp and dict(tp.how) == {"wire": "int8"} and not world.how


def test_every_form_of_a_call(world, tp):
    x, wired = numbers(999, seed=world.rank), {"comm": world, "wire": "int8"}
    right = fompi.all_reduce(x, **wired)
    exact = fompi.all_reduce(x, comm=world)
    assert not same_bits([right], [exact])
    for _ in range(4):  # an unbound call takes other ways from the second time on
        assert same_bits([fompi.all_reduce(x, comm=tp)], [right])
    assert same_bits([fompi.all_reduce(x, comm=tp, wire=None)], [exact])
    assert same_bits([fompi.all_reduce.start(x, comm=tp).wait()], [right])
    with fompi.all_reduce.bind(x, comm=tp) as step:
        assert same_bits([step()], [right])
    assert same_bits([fompi.all_reduce(x, comm=tp, schedule="ring")], [fompi.all_reduce(x, schedule="ring", **wired)])
    ring = ((world.rank + 1) % world.size, (world.rank - 1) % world.size)
    assert same_bits([fompi.sendrecv(x, *ring, comm=tp)], [fompi.sendrecv(x, *ring, **wired)])
    a, w = numbers(6, 8, seed=world.rank), numbers(8, 5, seed=3)
    assert same_bits([fompi.all_gather_matmul(a, w, comm=tp)], [fompi.all_gather_matmul(a, w, **wired)])
    y, error = fompi.all_reduce(x, comm=tp, certify=True)
    assert np.abs(y - exact).max() <= error


def test_what_takes_no_wire_travels_as_it_is(world, tp):
    assert fompi.all_reduce(np.arange(3), comm=tp).tolist() == [0, world.size, 2 * world.size]
    assert fompi.all_reduce(np.float32([world.rank]), op="max", comm=tp)[0] == world.size - 1
    assert same_bits([fompi.all_reduce(drawn(9), comm=tp)], [fompi.all_reduce(drawn(9), comm=world)])
    text = "float64 is sent as it is"
    refused(world, None, fompi.base.errors.DtypeError, lambda: fompi.all_reduce(drawn(9), comm=tp, wire="int4"), text)


def test_a_gradient(world, tp):
    x = torch.from_numpy(numbers(64, seed=world.rank)).requires_grad_()
    right = torch.autograd.grad(fompi.all_reduce(x, comm=world, wire="int8").square().sum(), x)
    found = torch.autograd.grad(fompi.all_reduce(x, comm=tp).square().sum(), x)
    assert torch.equal(found[0], right[0])


def both_ways(f, *given, **options):
    y, saved = f.forward(*given, **options)
    ys = y if isinstance(y, tuple) else (y,)
    dys = tuple(numbers(*each.shape, seed=9) for each in ys)
    flat = [*ys, *f.backward(saved, dys if len(dys) > 1 else dys[0])]
    return [t for t in flat if t is not None]


def check(world, tp, f, *given, **options):
    """The same numbers with wire= as with a communicator that carries it; others without."""
    right = both_ways(f, *given, comm=world, wire="int8", **options)
    assert same_bits(both_ways(f, *given, comm=tp, **options), right)
    assert same_bits(both_ways(f, *given, comm=tp, wire="int8", **options), right)
    exact = both_ways(f, *given, comm=world, **options)
    assert same_bits(both_ways(f, *given, comm=tp, wire=None, **options), exact)
    differs = any(not np.array_equal(a, b) for a, b in zip(exact, right, strict=True))
    assert fompi.all_reduce(np.array([differs * 1.0]), comm=world)[0] > 0


def test_strategies(world, tp):
    rank, size = world.rank, world.size
    x = numbers(6, 12, seed=rank)
    check(world, tp, column_parallel_linear, x, numbers(12, 5), numbers(5))
    check(world, tp, row_parallel_linear, numbers(6 * size, 5), numbers(5, 12), numbers(12))
    check(world, tp, all_reduce_rmsnorm, x, numbers(6, 12), numbers(12))
    mine, keys = heads_of(rank, size, 2 * size, size)
    weights = [numbers(12, 4 * len(n), seed=i) for i, n in enumerate((mine, keys, keys))]
    check(world, tp, attention, x, *weights, numbers(4 * len(mine), 12), heads=2 * size, kv_heads=size)
    qkv = [numbers(4, 2, 8, seed=rank + 10 * i) for i in range(3)]
    check(world, tp, ring_attention, *qkv, Sharding(4 * size, size))
    here = len(experts_of(rank, size, 4))
    check(world, tp, moe, x, numbers(12, 4), numbers(here, 12, 6), numbers(here, 6, 12), k=2)


def test_both_axes_of_an_attention_carry_it(world, tp):
    with fompi.Mesh(ring=world.size, ulysses=1) as mesh:
        qkv = [numbers(4, 2, 8, seed=world.rank + 10 * i) for i in range(3)]
        sharding = Sharding(4 * world.size, world.size, 1)
        axes = {name: mesh[name] for name in ("ring", "ulysses")}
        right = both_ways(usp_attention, *qkv, sharding, wire="int8", **axes)
        carrying = {name: axis.using(wire="int8") for name, axis in axes.items()}
        assert same_bits(both_ways(usp_attention, *qkv, sharding, **carrying), right)


def test_a_strategy_without_a_wire_leaves_it_out_and_one_without_an_order_refuses(world, tp):
    logits, targets = numbers(5, 7, seed=world.rank), np.arange(5)
    exact = both_ways(vocab_parallel_cross_entropy, logits, targets, comm=world)
    assert same_bits(both_ways(vocab_parallel_cross_entropy, logits, targets, comm=tp), exact)
    x, router, here = numbers(6, 12), numbers(12, 4), len(experts_of(world.rank, world.size, 4))
    call = (x, router, numbers(here, 12, 6), numbers(here, 6, 12))
    ordered = world.using(order="ranks")
    refused(world, None, PlanError, lambda: moe(*call, k=2, comm=ordered), "moe has no order=ranks")
    no_wire = lambda: vocab_parallel_cross_entropy(logits, targets, comm=world, wire="int8")  # noqa: E731
    refused(world, None, PlanError, no_wire, "vocab_parallel_cross_entropy has no wire=int8")


def test_ranks_that_carry_different_keywords(world):
    comm = world.using(wire="int8" if world.rank else "int4")
    with pytest.raises(MismatchError, match="int4"):
        column_parallel_linear(numbers(6, 12), numbers(12, 5), comm=comm)
    with pytest.raises(MismatchError, match="int4"):
        ColumnParallelLinear(4, 4, comm=comm)


def test_modules(world, tp):
    def made(**how):
        torch.manual_seed(1)
        return ColumnParallelLinear(12, 8, **how)

    x = torch.from_numpy(numbers(6, 12, seed=world.rank))
    module = made(comm=tp)
    assert torch.equal(module(x), made(comm=world, wire="int8")(x)) and "wire='int8'" in repr(module)
    plain = made(comm=world)
    assert not torch.equal(module(x), plain(x))
    whole = full_state_dict(module)  # the parameters travel as they are
    for name, value in full_state_dict(plain).items():
        assert torch.equal(whole[name], value)
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    refused(world, None, ArgumentError, lambda: made(comm=world, wir="int8"), "no argument 'wir'; did you mean 'wire'")


def test_wrappers(world, tp):
    def trained(comm, dtype=np.float32, **how):
        weights = {"w": numbers(40, seed=1).astype(dtype)}
        with DataParallel(weights, optimizer=SGD(0.1), comm=comm, zero=1, **how) as dp:
            for _ in range(3):
                dp.ready("w", numbers(40, seed=world.rank).astype(dtype))
                dp.step()
            return [np.array(dp["w"])]

    right = trained(world, wire="int8")
    assert same_bits(trained(tp), right) and not same_bits(trained(world), right)
    given_back = trained(tp.using(feedback=True))
    assert same_bits(given_back, trained(tp, feedback=True)) and not same_bits(given_back, right)
    np.testing.assert_allclose(trained(tp, np.float64), trained(world, np.float64), rtol=1e-14)  # it takes no wire
    x = numbers(9)
    assert same_bits([fompi.all_reduce(x, comm=tp.using(feedback=True))], [fompi.all_reduce(x, comm=tp)])
    refused(world, None, ArgumentError, lambda: fompi.all_reduce(x, comm=tp, feedback=True), "no argument 'feedback'")
    refused(world, None, ArgumentError, lambda: trained(tp, zerp=1), "no argument 'zerp'; did you mean 'zero'")
    refused(world, None, LayoutError, lambda: trained(world, feedback=True), "feedback=True needs a wire")

    def averaged(comm, **how):
        torch.manual_seed(1)
        module = torch.nn.Linear(12, 3)
        model = DistributedDataParallel(module, comm, **how)
        model(torch.from_numpy(numbers(4, 12, seed=world.rank))).square().sum().backward()
        model(torch.from_numpy(numbers(4, 12, seed=world.rank))).sum().backward()
        model.close()
        return [module.weight.grad.numpy()]

    assert same_bits(averaged(tp.using(feedback=True)), averaged(world, wire="int8", feedback=True))
    assert not same_bits(averaged(tp), averaged(world))
    ranks = world.using(order="ranks")
    assert same_bits(averaged(ranks), averaged(world, order="ranks"))

    def ran(comm, **how):
        class Stage:
            def forward(self, x):
                return x * np.float32(1.1), x

            def backward(self, saved, dy):
                return dy * np.float32(1.1)

        loss = lambda y, target: (float(y.sum()), np.ones_like(y))  # noqa: E731
        with Pipeline([Stage()], comm=comm, microbatches=2, activations=(3, 4), loss=loss, **how) as pipe:
            x = [numbers(3, 4, seed=i) for i in range(2)]
            last = world.rank == world.size - 1
            return pipe.step(x if world.rank == 0 else None, [None] * 2 if last else None)

    assert ran(tp) == ran(world, wire="int8")
    refused(world, None, ArgumentError, lambda: ran(world, effort="plan"), "Pipeline has no argument 'effort'")
