"""`fompi.interleave`: functions that alternate have the results of one after the other, and run where they may."""

import functools
import itertools
import sys
import threading
import time
from contextvars import ContextVar
from decimal import getcontext, localcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from mpi4py import MPI
from strategies import drawn, runs, same_bits
from torch.distributed.tensor._utils import ExplicitRedistributionContext as EXPLICIT
from torch.distributed.tensor.experimental import implicit_replication
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fompi
from fompi.base.layout import split
from fompi.parallel.actions import parts
from fompi.parallel.expert import moe
from fompi.parallel.interleave import MOST, give_way
from fompi.parallel.pipeline import Pipeline, actions
from fompi.parallel.tensor import column_parallel_linear, row_parallel_linear
from fompi.torch import nn

pytestmark = pytest.mark.ranks(mpich=[3, 4], openmpi=[])


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
    with pytest.raises(fompi.ArgumentError, match="at most 32 alternate"):
        fompi.interleave(*[lambda: 1] * (MOST + 1))


class Functions(TorchFunctionMode):
    def __torch_function__(self, f, types, args=(), kwargs=None):
        SEEN.append("function")
        return f(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        SEEN.append("dispatch")
        return f(*args, **(kwargs or {}))


SEEN, CHOSEN = [], ContextVar("chosen", default=0)


def modes():
    """What a function sees of the modes of its caller."""
    give_way()
    SEEN.clear()
    x = torch.ones(2, requires_grad=True)
    y = x * x
    autograd, here = torch._C._autograd, torch._C
    return (
        *(str(y.device), str(torch.get_default_device()), y.requires_grad, torch.is_inference_mode_enabled(), [*SEEN]),
        [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        *(torch.is_autocast_cache_enabled(), torch.is_anomaly_enabled(), torch.get_num_threads(), MIN / 2),
        *(here._is_fwd_grad_enabled(), here._is_multithreading_enabled(), here._is_torch_function_enabled()),
        autograd._saved_tensors_hooks_get_disabled_error_message(),
        *(str(here._dispatch_tls_local_exclude_set()), str(here._dispatch_tls_local_include_set())),
        *(here._get_graph_executor_optimize(), getattr(EXPLICIT._local, "_active", None)),
        getattr(here, "_get_dtensor_allow_implicit_replication", bool)(),
        *(np.geterr(), np.geterrcall(), np.get_printoptions()["precision"], getcontext().prec, CHOSEN.get()),
        *(jax.config.jax_enable_x64, jnp.ones(1).dtype.name, jax.config.jax_default_matmul_precision),
    )


def in_turns_are_alike():
    alone = modes()
    got = fompi.interleave(modes, modes, lambda: fompi.interleave(modes, modes)[1])
    assert got == [alone] * 3
    return alone


MIN, AUTOGRAD = sys.float_info.min, torch.autograd.graph
MODES = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "device": lambda: torch.device("meta"),
    "saved tensors": lambda: AUTOGRAD.saved_tensors_hooks(lambda t: SEEN.append("saved") or t, lambda t: t),
    "no saved tensors": lambda: AUTOGRAD.disable_saved_tensors_hooks("none here"),
    "functions": Functions,
    "dispatched": Dispatched,
    "no functions": torch._C.DisableTorchFunction,
    "below autograd": torch._C._AutoDispatchBelowAutograd,
    "threads of autograd": lambda: torch.autograd.grad_mode.set_multithreading_enabled(False),
    "scripts as they are": lambda: torch.jit.optimized_execution(False),
    "tensors that count as replicated": implicit_replication,
    "no hidden messages": EXPLICIT,
    "error state": lambda: np.errstate(all="call", call=print),
    "digits": lambda: np.printoptions(precision=3),
    "decimals": lambda: localcontext(prec=5),
    "x64": lambda: jax.experimental.enable_x64() if not hasattr(jax, "enable_x64") else jax.enable_x64(True),
    "products of JAX": lambda: jax.default_matmul_precision("highest"),
}


def test_the_modes_of_the_caller_hold_in_all_functions(world):
    none = in_turns_are_alike()
    for name, mode in MODES.items():
        with mode():
            assert in_turns_are_alike() != none, name
    with torch.device("meta"), Dispatched(), Functions(), torch.no_grad(), np.errstate(over="raise"):
        assert in_turns_are_alike() != none
    for setting, value in ((torch.set_num_threads, torch.get_num_threads() + 1), (torch.set_default_device, "meta")):
        before = torch.get_num_threads() if isinstance(value, int) else None
        setting(value)
        assert in_turns_are_alike() != none
        setting(before)
    CHOSEN.set(7)
    assert in_turns_are_alike() != none
    CHOSEN.set(0)
    assert in_turns_are_alike() == none


def test_what_a_function_leaves_behind_in_its_thread_is_not_in_the_next_one(world):
    none = in_turns_are_alike()
    fompi.interleave(int, lambda: (torch.set_default_device("meta"), torch.set_grad_enabled(False)))
    assert in_turns_are_alike() == none


@pytest.mark.ranks(mpich=[3])
def test_modes_of_one_thread_are_refused_by_name(world):
    def both(x):
        return fompi.interleave(lambda: x + 1, lambda: x * 2)[0].sum()

    refused = (
        ("torch.func", lambda: torch.func.grad(both)(torch.ones(3))),
        ("torch.func", lambda: torch.func.vmap(both)(torch.ones(3, 2))),
        ("torch.jit.trace", lambda: torch.jit.trace(both, torch.ones(3))),
        ("JAX traces", lambda: jax.jit(both)(jnp.ones(3))),
        ("JAX traces", lambda: jax.grad(both)(jnp.ones(3))),
    )
    for name, call in refused:
        with pytest.raises(fompi.StateError, match=name):
            call()
    with torch.profiler.profile(), pytest.raises(fompi.StateError, match=r"torch\.profiler, without .*all_threads"):
        both(torch.ones(3))
    compiled = torch.compile(lambda x: both(x) + 1, backend="aot_eager")  # the functions are a graph break
    assert float(compiled(torch.ones(3))) == 7


def test_stages_of_a_pipeline_have_the_modes_of_the_step(world):
    seen = []

    class Stage:
        def forward(self, x):
            seen.append((np.geterr(), CHOSEN.get()))
            return x, None

        def backward(self, saved, dy):
            seen.append((np.geterr(), CHOSEN.get()))
            return dy

    how = {"microbatches": 6, "activations": (3,), "schedule": "eager-1f1b", "comm": world}
    x = [np.ones(3, np.float32)] * 6
    for overlap_f_b in (False, True):
        with Pipeline([Stage()], loss=lambda y, t: (0.0, y), overlap_f_b=overlap_f_b, **how) as pipe:
            CHOSEN.set(3)
            with np.errstate(over="raise", under="warn"):
                expected = np.geterr(), 3
                pipe.step(x, x)
            CHOSEN.set(0)
    assert seen == [expected] * 24


class Injected(Exception):
    pass


def ends_alike(world, comm, failing, kind, call):
    """`call` ends soon on all ranks by the error of one of them, there or in the next call. Then all is in step."""
    begun, error = time.perf_counter(), None
    try:
        call()
        world.barrier()  # a rank that has done its part hears of it here
    except (kind, fompi.FompiError) as raised:
        error = raised
    where = failing, kind, error
    if world.rank == failing:
        assert type(error) is kind, where
    else:
        assert isinstance(error, fompi.PeerError) and f"{kind.__name__}: here" in str(error), where
    comm.barrier()
    assert time.perf_counter() - begun < world.engine.timeout, where
    for k in range(2):
        assert float(fompi.all_reduce(np.full(3, k), comm=world)[0]) == k * world.size, where


def failing_calls(at, fails, kind, *comms):
    """Operations on these communicators, and an error before number `at` of them."""
    for k in range(4):
        if fails and k == at:
            raise kind("here")
        if k < 3:
            fompi.all_reduce(np.full(3, k), comm=comms[k % len(comms)])
            pending = fompi.all_gather.start(np.full((2, 3), k), comm=comms[-1])
            give_way()
            pending.wait()


@pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="there is no other rank")
def test_an_error_of_a_function_ends_all_functions_on_all_ranks(world, comm):
    """Before the first call, between calls and after the last one; of any kind, in any function, on any rank."""
    with world.split(0, name="other") as other:
        cases = [*itertools.product(range(4), range(3), [Injected]), (1, 0, KeyboardInterrupt), (2, 1, SystemExit)]
        for at, place, kind in cases:
            failing, f = (at + place) % world.size, functools.partial(failing_calls, at)
            one, two, three = (world.rank == failing and place == number for number in range(3))
            functions = (
                functools.partial(f, one, kind, world, other),
                functools.partial(f, two, kind, world),
                lambda f=f, three=three, kind=kind: fompi.interleave(
                    lambda: f(False, kind, world), lambda: f(three, kind, world)
                ),
            )
            ends_alike(world, comm, failing, kind, functools.partial(fompi.interleave, *functions))
            assert float(fompi.all_reduce(np.ones(1), comm=other)[0]) == world.size


@pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="there is no other rank")
def test_an_error_before_the_first_call_is_not_one_of_a_later_interleave(world, comm):
    """The functions of the second one are the first to use the other communicator."""
    with world.split(0, name="other") as other:

        def local():
            if world.rank == 0:
                raise Injected("here")

        ends_alike(world, comm, 0, Injected, lambda: fompi.interleave(local, lambda: world.barrier()))
        assert fompi.interleave(lambda: other.barrier(), lambda: other.barrier()) == [None, None]


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


@pytest.mark.ranks(mpich=[4])
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
    steps = actions("dualpipev", ranks, microbatches, 2, overlap_f_b=True)
    return [[str(step).replace("I", "B") for step in each if parts([step])[0].kind != "W"] for each in steps]
