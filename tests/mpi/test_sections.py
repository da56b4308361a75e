"""A strategy that fails in the middle of anything on one rank ends on all ranks, soon, and the next call is in step."""

import contextlib
import time
import warnings

import numpy as np
import pytest
import torch
from failing import Injected, Stages
from mpi4py import MPI
from strategies import drawn, runs, uneven

import fompi
from fompi.base.layout import split
from fompi.parallel import repeated
from fompi.parallel.data import SGD
from fompi.parallel.expert import combine, dispatch, experts, moe, route
from fompi.parallel.section import Section
from fompi.parallel.sequence import Sharding, ring_attention, ulysses_attention, usp_attention
from fompi.parallel.tensor import (
    attention,
    column_parallel_linear,
    heads_of,
    row_parallel_linear,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)

pytestmark = pytest.mark.ranks(mpich=[2], openmpi=[])


def forth_and_back(f, *args, **options):
    """A call of a strategy and its backward."""

    def call():
        y, saved = f.forward(*args, **options)
        gradients = f.backward(saved, np.ones_like(y))
        return [y, *(g for g in gradients if g is not None)]

    return call


def tokens(world, f, axes, times, **options):
    """An attention whose tokens are spread over the ranks."""
    sharding = Sharding(length=3 * world.size + 1, **axes)
    qkv = [times * drawn(sharding.length, heads, 4, seed=i) for i, heads in enumerate((4, 2, 2))]
    mine = [t[sharding.indices(world.rank)] for t in qkv]
    return forth_and_back(f, *mine, sharding, causal=True, **options)


def routed(comm, times):
    """The four steps of a layer of experts."""
    x, router, w1, w2 = times * drawn(4, 3, seed=comm.rank), drawn(3, 5), drawn(5, 3, 2), drawn(5, 2, 3)
    mine = runs(split(5, comm.size))[comm.rank]

    def call():
        r, gate = route.forward(x, router, k=2, comm=comm)
        rows, sent = dispatch.forward(x, r)
        z, computed = experts.forward(rows, w1[mine], w2[mine], r)
        y, back = combine.forward(z, r)
        dz, dweights = combine.backward(back, np.ones_like(y))
        drows, *dws = experts.backward(computed, dz)
        return [y, *dws, *dispatch.backward(sent, drows), *route.backward(gate, dweights)]

    return call


def in_turns(*calls):
    return lambda: [result for results in fompi.interleave(*calls) for result in results]


def strategies(world, mesh, times=1.0):
    """name -> a call with its backward, on all ranks of `world`. Inputs are multiplied by `times`."""
    size, rank = world.size, world.rank
    rows = uneven(size)
    x, w = times * drawn(sum(rows), 4), drawn(4, 2 * size)
    own, columns = runs(rows)[rank], runs([2] * size)[rank]
    shards = [w[:, columns], drawn(2 * size, 4)[columns]]
    mine, keys = heads_of(rank, size, 4, 2)
    heads, kv = ([4 * h + i for h in part for i in range(4)] for part in (mine, keys))
    wq, wk, wo = drawn(4, 16), drawn(4, 8), drawn(16, 4)
    vocabulary = runs(split(7, size))[rank]
    table, numbers = drawn(7, 3)[vocabulary], np.arange(sum(rows)) % 7
    ep = runs(split(5, size))[rank]
    weights = drawn(3, 5), drawn(5, 3, 2)[ep], drawn(5, 2, 3)[ep]
    in_heads = {"heads": 4, "kv_heads": 2, "comm": world}
    return {
        "column": forth_and_back(column_parallel_linear, x[own], shards[0], activation="silu", comm=world),
        "row": forth_and_back(row_parallel_linear, drawn(sum(rows), 2), shards[1], comm=world, counts=rows),
        "attention": forth_and_back(attention, x[own], wq[:, heads], wk[:, kv], wk[:, kv], wo[heads], **in_heads),
        "embedding": forth_and_back(vocab_parallel_embedding, numbers, table, comm=world),
        "cross entropy": forth_and_back(
            vocab_parallel_cross_entropy, times * drawn(sum(rows), 7)[:, vocabulary], numbers, comm=world
        ),
        "ring": tokens(world, ring_attention, {"ring": size}, times, comm=world),
        "ulysses": tokens(world, ulysses_attention, {"ulysses": size}, times, comm=world),
        "usp": tokens(world, usp_attention, mesh.axes, times, ring=mesh["ring"], ulysses=mesh["ulysses"]),
        "moe": forth_and_back(moe, times * drawn(4, 3, seed=rank), *weights, k=2, microbatches=2, comm=world),
        "route": routed(world, times),
        "interleave": in_turns(
            forth_and_back(moe, times * drawn(4, 3, seed=rank), *weights, k=2, comm=world),
            tokens(world, ring_attention, {"ring": size}, times, comm=world),
            forth_and_back(attention, x[own], wq[:, heads], wk[:, kv], wk[:, kv], wo[heads], **in_heads),
        ),
    }


NAMES = (
    *("column", "row", "attention", "embedding", "cross entropy", "ring", "ulysses", "usp", "moe", "route"),
    "interleave",
)


@pytest.fixture(scope="module")
def mesh():
    size = MPI.COMM_WORLD.size
    with fompi.Mesh(ring=size // 2, ulysses=2) if size % 2 == 0 else fompi.Mesh(ring=size, ulysses=1) as made:
        yield made


@pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="there is no other rank")
@pytest.mark.parametrize("name", NAMES)
def test_an_error_at_any_stage(world, comm, mesh, name):
    """The rank that fails has its own error, the others a PeerError: in the strategy, or in their next call."""
    call = strategies(world, mesh)[name]
    expected = call()
    with Stages() as stages:
        call()
    count, axes = comm.bcast(stages.count), [mesh["ulysses"], mesh["ring"]] if name == "usp" else [world]
    draw = np.random.default_rng(5)
    for _ in range(4):
        failing, at = int(draw.integers(world.size)), int(draw.integers(count))
        begun, error = time.perf_counter(), None
        try:
            with Stages(at if world.rank == failing else None) as stages:
                call()
            if world.rank != failing or stages.count <= at:
                for axis in axes:
                    axis.barrier()
        except (Injected, fompi.FompiError) as raised:
            error = raised
        assert fompi.all_reduce(np.ones(3), comm=world).tolist() == [world.size] * 3
        where = failing, at, error
        assert time.perf_counter() - begun < world.engine.timeout, where
        has_failed = comm.bcast(stages.count > at, failing)
        if world.rank == failing and has_failed:
            assert isinstance(error, Injected), where
        elif has_failed and (error is not None or axes == [world]):
            assert isinstance(error, fompi.FompiError) and "Injected: in " in str(error), where
        else:
            assert error is None, where
        for a, b in zip(call(), expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="there is no other rank")
@pytest.mark.parametrize("is_known", [True, False])
def test_an_error_that_comes_after_the_check_of_a_call(world, comm, monkeypatch, is_known):
    """The helper thread tells the rank that failed how many calls this one has begun. So this one begins no more."""
    x, new = np.ones(3), np.ones(5 + world.size + is_known)
    for _ in range(2):
        fompi.all_reduce(x, comm=world)
    check, left = fompi.Communicator.check, comm.rank > 0

    def in_the_helper(communicator):
        check(communicator)
        while left and communicator.channel.owed is None:
            communicator.engine.receive_control()

    with pytest.raises(Injected) if world.rank == 0 else contextlib.nullcontext(), Section("outer") as section:
        fompi.all_reduce(x, comm=world)
        section.begin(world)
        if world.rank == 0:
            raise Injected("of rank 0")
    if left:
        monkeypatch.setattr(fompi.Communicator, "check", in_the_helper)
        with pytest.raises(fompi.PeerError, match="Injected: of rank 0"):
            fompi.all_reduce(x if is_known else new, comm=world)
        monkeypatch.undo()
    assert fompi.all_reduce(x, comm=world).tolist() == [world.size] * 3


@pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="there is no other rank")
def test_an_error_that_all_ranks_have_after_the_last_call(world, comm):
    """Each rank raises its own, also one that hears of another's before it is there. Nobody hears of one twice."""
    for late in range(world.size):
        with pytest.raises(Injected, match=f"of rank {world.rank}"), Section("outer"):
            with Section("inner") as inner:
                fompi.all_reduce(np.ones(3), comm=world)
                inner.begin(world)
                until = time.perf_counter() + 5
                while world.rank == late and not world.channel.ended and time.perf_counter() < until:
                    world.engine.progress()
                    world.engine.receive_control()
            raise Injected(f"of rank {world.rank}")
        assert fompi.all_reduce(np.ones(3), comm=world).tolist() == [world.size] * 3


# ------------------------------------------------------------------------------------------------ wrappers


def net(comm):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)), torch.ones(3, 4)


def averaged(comm):
    """(a batch, whose result is the gradient, what closes the wrapper, whether an update has ended in the middle)."""
    module, x = net(comm)
    model = fompi.torch.DistributedDataParallel(module, comm, bucket_nbytes=60)

    def batch():
        model.zero_grad()
        model(x * (comm.rank + 1)).sum().backward()
        return [p.grad.numpy().copy() for p in model.parameters()]

    return batch, model.close, lambda: False


def averaged_unbound(comm):
    """The same with sums of a size that is not bound."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeated, "MOST_BOUND_NBYTES", 0)
        return averaged(comm)


def zero(level):
    def wrapped(comm):
        module, x = net(comm)
        model = fompi.torch.ZeroDataParallel(module, comm, optimizer=SGD(0.0), zero=level, bucket_nbytes=60)

        def batch():
            model(x * (comm.rank + 1)).sum().backward()
            return [np.array(model.step(clip=1.0))]

        return batch, model.close, lambda: model.parallel._torn is not None

    return wrapped


def stages(comm):
    module = torch.nn.Linear(4, 4)
    torch.nn.init.eye_(module.weight)
    how = {"microbatches": 2, "activations": (3, 4)}
    pipe = fompi.torch.Pipeline([module], comm=comm, loss=lambda y, t: (y - t).square().sum(), **how)

    def batch():
        module.zero_grad()
        pipe.step([torch.ones(3, 4)] * 2, [torch.zeros(3, 4)] * 2)
        return [module.weight.grad.numpy().copy()]

    return batch, pipe.close, lambda: False


def of_wrappers(path, name):
    """What a batch runs, but not the doors, in which nothing has begun, nor what ends a batch by an error.

    Nor what waits for parameters: an error there is one of the next step, for which the rank waits.
    """
    files = ("data_parallel.py", "zero.py", "data.py", "buckets.py", "sums.py", "arrays.py", "optimizers.py")
    doors = "forward _look refuse_copy step wait ready __getitem__ _finish _end_cycle _agree_on_step _check_open"
    failed = "_restart _promise _keep_promises _refuse_step refuse rest"
    ends = "_bucket_of _reset forget check_clip"
    waits = "array_of tensor_of"
    outside = *doors.split(), *ends.split(), *failed.split(), *waits.split(), "_compared", "<listcomp>"
    return path.name in files and name not in outside


def of_stages(path, name):
    kernels = (
        "_forward",
        "_backward",
        "_gradient",
        "_keep_gradient",
        "_lent",
        "_put",
        "_pair",
        "_of_module",
        "backward",
    )
    return path.name == "pipeline.py" and name in kernels


WRAPPERS = {
    "ddp": (averaged, of_wrappers),
    "ddp unbound": (averaged_unbound, of_wrappers),
    "zero 0": (zero(0), of_wrappers),
    "zero 1": (zero(1), of_wrappers),
    "zero 2": (zero(2), of_wrappers),
    "pipeline": (stages, of_stages),
}


@pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="there is no other rank")
@pytest.mark.parametrize("name", WRAPPERS)
def test_an_error_at_any_stage_of_a_wrapper(world, comm, name):
    """All ranks end the batch by an error. The next batch is right."""
    make, within = WRAPPERS[name]
    batch, close, is_torn = make(world)
    expected = batch()
    with Stages(within=within) as stages:
        batch()
    count, draw = comm.bcast(stages.count), np.random.default_rng(5)
    for k in range(6):
        # the last stages too, while all that other ranks can do without this one is done
        at = int(draw.integers(count)) if k % 2 else count - 1 - k // 2
        failing = int(draw.integers(world.size))
        begun, error = time.perf_counter(), None
        try:
            with Stages(at if world.rank == failing else None, within, late=0.02) as stages:
                batch()
        except (Injected, fompi.FompiError) as raised:
            error = raised
        where = failing, at, error
        assert time.perf_counter() - begun < world.engine.timeout, where
        if world.rank == failing and stages.count > at:
            assert isinstance(error, Injected), where
        if fompi.all_reduce(np.array([float(is_torn())]), comm=world)[0]:  # its parameters are between two steps
            with pytest.raises((fompi.StateError, fompi.MismatchError), match="ended in the middle of its update"):
                batch()
            close()
            batch, close, is_torn = make(world)
        for a, b in zip(batch(), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
    close()


@pytest.mark.parametrize("name", NAMES)
def test_errors_of_numpy_do_not_reach_a_strategy(world, mesh, name):
    """Finite numbers whose exponentials are too small or too large: by IEEE 754, as in operations."""
    call = strategies(world, mesh, 300.0)[name]
    expected = call()
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        for a, b in zip(call(), expected, strict=True):
            np.testing.assert_array_equal(a, b)
