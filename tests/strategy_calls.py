"""Calls of the strategies, forward and backward, on tensors of the host or of a device.

    for name, call in calls(comm).items():
        arrays = call(up, down)       # `up` makes a tensor of an array of NumPy, `down` an array of a tensor

Every call has the same arguments each time, so its arrays on a device must have the bits of those on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager

import ml_dtypes
import numpy as np

from fompi.parallel import expert, sequence, tensor
from fompi.parallel.data import SGD, AdamW, DataParallel
from fompi.parallel.pipeline import Pipeline
from fompi.parallel.sequence import Sharding

HALF = ml_dtypes.bfloat16


def drawn(*shape, seed=0, dtype="float32"):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def mapped(f, x):
    """f of each tensor in nested tuples, lists and dicts, in their order. None stays."""
    if isinstance(x, (tuple, list)):
        return [mapped(f, each) for each in x]
    if isinstance(x, Mapping):
        return [mapped(f, each) for each in x.values()]
    return x if x is None or isinstance(x, (int, float)) else f(x)


def flat(x):
    return [each for part in x for each in flat(part)] if isinstance(x, list) else [] if x is None else [np.asarray(x)]


def both_ways(strategy, *tensors, up, down, seed=0, **options):
    """The result, its gradients, and the gradients in two parts."""
    given = [tuple(map(up, t)) if isinstance(t, tuple) else t if t is None else up(t) for t in tensors]
    sharding = [options.pop("sharding")] if "sharding" in options else []
    y, saved = strategy.forward(*given, *sharding, **options)
    found = mapped(down, y)
    dys = found if isinstance(found, list) else [found]
    dy = [up(drawn(*a.shape, seed=seed + 50).astype(a.dtype)) for a in dys]
    dy = tuple(dy) if isinstance(found, list) else dy[0]
    gradients = mapped(down, strategy.backward(saved, dy))
    dx, rest = strategy.backward_input(saved, dy)
    return flat([found, gradients, mapped(down, dx), mapped(down, strategy.backward_weight(rest))])


def in_parts(comm, up, down):
    """Experts by route, dispatch, experts and combine."""
    x, router = drawn(6, 4, seed=comm.rank), drawn(4, 5, seed=77)
    mine = len(expert.experts_of(comm.rank, comm.size, 5))
    w1, w2 = drawn(mine, 4, 6, seed=comm.rank), drawn(mine, 6, 3, seed=comm.rank)
    route, gate = expert.route.forward(up(x), up(router), k=2, comm=comm, capacity_factor=1.0)
    rows, of_rows = expert.dispatch.forward(up(x), route)
    results, of_results = expert.experts.forward(rows, up(w1), up(w2), route)
    y, of_y = expert.combine.forward(results, route)
    dresults, dweights = expert.combine.backward(of_y, up(drawn(6, 3, seed=5)))
    drows, dw1, dw2 = expert.experts.backward(of_results, dresults)
    gradients = expert.dispatch.backward(of_rows, drows), dw1, dw2, expert.route.backward(gate, dweights)
    return flat([route.tokens_per_expert, mapped(down, [y, *gradients])])


SHAPES = {"a": (3, 4), "b": (5,), "c": (4, 4), "d": (2, 3)}


@contextmanager
def data_parallel(comm, up, *, zero, optimizer=None, dtype="float32", clip=0.5, **options):
    """(the DataParallel, a function that makes step number k, with the norm). It reads all parameters before."""
    params = {name: up(drawn(*shape, seed=i, dtype=dtype)) for i, (name, shape) in enumerate(SHAPES.items())}
    optimizer = optimizer or AdamW(0.1)

    def step(k=0, read=lambda parameter: None):
        for name in SHAPES:
            read(dp[name])
        for name, shape in reversed(SHAPES.items()):
            if zero == 3:
                dp[name]
            dp.ready(name, up(drawn(*shape, seed=100 * comm.rank + k, dtype=dtype)))
            dp.release(name)
        return dp.step(clip=clip)

    with DataParallel(params, optimizer=optimizer, comm=comm, zero=zero, bucket_nbytes=60, **options) as dp:
        yield dp, step


def trained(comm, up, down, *, steps=3, **options):
    """Some steps of data parallelism: the parameters before each, the norms, the state."""
    found = []
    with data_parallel(comm, up, **options) as (dp, step):
        for k in range(steps):
            norm = step(k, lambda parameter: found.append(np.array(down(parameter))))
            found.append(np.asarray(norm if isinstance(norm, float) else down(norm)))
        state = dp.state_dict()
        found += flat(mapped(lambda x: np.array(down(x)), state))
        dp.load_state_dict(state)
        found += [np.array(down(dp[name])) for name in SHAPES]
        found.append(np.array([*dp.nbytes.values()]))
    return found


class Stage:
    """relu(x @ w), by NumPy's functions."""

    def __init__(self, w):
        self.w, self.dw = w, np.zeros_like(w)

    def forward(self, x):
        z = x @ self.w
        return np.maximum(z, 0), (x.copy(), z)

    def backward_input(self, saved, dy):
        x, z = saved
        dz = np.where(z > 0, dy, dy.dtype.type(0))
        return dz @ self.w.T, (x, dz)

    def backward_weight(self, rest):
        x, dz = rest
        self.dw += x.T @ dz


def loss(y, target):
    return (y * target).sum(), target.copy()


@contextmanager
def pipeline(comm, up, device, *, schedule, chunks=1, microbatches=4):
    """(the pipeline, a function that makes a step: the losses, the gradients of inputs and of weights)."""
    stages = [Stage(up(drawn(6, 6, seed=comm.rank + comm.size * chunk))) for chunk in range(chunks)]
    xs, targets = ([up(drawn(3, 6, seed=100 * k + i)) for i in range(microbatches)] for k in (1, 2))
    form = {"activations": (3, 6), "loss": loss, "device": device, "schedule": schedule, "microbatches": microbatches}
    with Pipeline(stages, comm=comm, **form) as pipe:
        pipe.xs = xs if pipe._is_here(0) else None
        given = targets if pipe._is_here(pipe.problem.stages - 1) else None
        yield pipe, lambda: [pipe.step(pipe.xs, given), pipe.input_gradients, [stage.dw for stage in stages]]


def pipelined(comm, up, down, device, **options):
    found = []
    with pipeline(comm, up, device, **options) as (pipe, step):
        for _ in range(2):
            found += [np.array(a) for a in flat(mapped(down, step()))]
        found += flat(mapped(down, [pipe.forward(pipe.xs)]))
    return found


def calls(comm, device=None):
    """name -> call(up, down), for the ranks of `comm`. `device`: where the tensors of `up` are, None for the host."""
    rank, size = comm.rank, comm.size
    heads, keys = (len(mine) for mine in tensor.heads_of(rank, size, 4, 2))
    numbers = np.random.default_rng(7).integers(0, 3 * size, 9)
    mine = len(expert.experts_of(rank, size, 5))
    zigzag, ulysses = Sharding(23, ring=size, layout="zigzag"), Sharding(23, ulysses=size)

    def own(*shape, seed=0, dtype="float32"):
        return drawn(*shape, seed=1000 * (rank + 1) + seed, dtype=dtype)

    def of(strategy, *tensors, **options):
        options.setdefault("comm", comm)
        return lambda up, down: both_ways(strategy, *tensors, up=up, down=down, **options)

    def qkv(sharding, dtype="float32"):
        shapes = (4, 3), (2, 3), (2, 5)
        return [own(len(sharding.indices(rank)), *shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]

    def moe(rows, dtype, shared, **options):
        tensors = own(rows, 4, dtype=dtype), drawn(4, 5, seed=3, dtype=dtype), own(mine, 4, 6, dtype=dtype)
        width = 3 if options.get("activation") == "swiglu" else 6
        both = drawn(4, 6, seed=8, dtype=dtype), drawn(width, 5, seed=9, dtype=dtype)
        return of(expert.moe, *tensors, own(mine, width, 5, dtype=dtype), both if shared else None, **options)

    def dp(**options):
        return lambda up, down: trained(comm, up, down, **options)

    def pipe(**options):
        return lambda up, down: pipelined(comm, up, down, device, **options)

    row, column = tensor.row_parallel_linear, tensor.column_parallel_linear
    found = {
        "column, gelu": of(column, own(3 + rank, 4), own(4, 6), own(6), activation="gelu"),
        "column of all rows, swiglu": of(
            column, *(a.astype(HALF) for a in (drawn(5, 4), own(4, 6), own(6))),
            activation="swiglu", sequence_parallel=False,
        ),
        "column, half": of(column, own(3, 4, dtype=HALF), own(4, 6, dtype=HALF), activation="silu"),
        "row": of(row, own(7, 4), own(4, 5), drawn(5)),
        "row of all rows, half": of(row, own(7, 4, dtype=HALF), own(4, 5, dtype=HALF), sequence_parallel=False),
        "row, int8": of(row, own(7, 4), own(4, 5), wire="int8"),
        "embedding": lambda up, down: embedded(comm, up, down, numbers, own(3, 5)),
        "cross-entropy": lambda up, down: compared(comm, up, down, own(9, 3), numbers),
        "norm": of(tensor.all_reduce_rmsnorm, own(8, 6), drawn(8, 6), drawn(6, seed=4)),
        "norm, sharded": of(
            tensor.all_reduce_rmsnorm, own(8, 6), own(len(range(rank, 8, size)), 6), drawn(6, seed=4), sharded=True
        ),
        "attention": of(
            tensor.attention, own(4, 6), own(6, heads * 3), own(6, keys * 3, seed=1), own(6, keys * 3, seed=2),
            own(heads * 3, 6), heads=4, kv_heads=2, causal=True,
        ),
        "ring": of(sequence.ring_attention, *qkv(zigzag), sharding=zigzag, causal=True),
        "ulysses": of(sequence.ulysses_attention, *qkv(ulysses), sharding=ulysses, causal=True),
        "ulysses, half": of(sequence.ulysses_attention, *qkv(ulysses, HALF), sharding=ulysses),
        "experts": moe(5 + 3 * rank, "float32", True, k=2, microbatches=2),
        "experts, full": moe(0 if rank == 1 else 4, "float32", False, k=2, capacity_factor=0.7, activation="swiglu"),
        "experts, half": moe(6, HALF, False, k=1, capacity_factor=1.0, policy="position", microbatches=2),
        "experts in parts": lambda up, down: in_parts(comm, up, down),
        "data 0": dp(zero=0, optimizer=SGD(0.1, momentum=0.9, weight_decay=0.01)),
        "data 1": dp(zero=1, optimizer=AdamW(0.1), dtype=HALF),
        "data 2": dp(zero=2, optimizer=AdamW(0.1), clip=None),
        "data 3": dp(zero=3, optimizer=AdamW(0.1), dtype=HALF),
        "data 1, int8": dp(
            zero=1, optimizer=SGD(0.1), wire="int8", wire_gather="int8", feedback=True, check_for_nan=True
        ),
        "pipeline": pipe(schedule="1f1b"),
        "pipeline in parts": pipe(schedule="zb-h1"),
    }  # fmt: skip
    if size > 1:
        found["pipeline, interleaved"] = pipe(schedule="interleaved", chunks=2)
    return found


def embedded(comm, up, down, tokens, table):
    strategy = tensor.vocab_parallel_embedding
    y, saved = strategy.forward(up(tokens), up(table), comm=comm)
    dy = drawn(*down(y).shape, seed=comm.rank)
    return flat([down(y), mapped(down, strategy.backward(saved, up(dy)))])


def compared(comm, up, down, logits, targets):
    strategy, how = tensor.vocab_parallel_cross_entropy, {"label_smoothing": 0.1, "ignore_index": 3}
    losses, saved = strategy.forward(up(logits), up(targets), comm=comm, **how)
    return flat([down(losses), mapped(down, strategy.backward(saved, up(drawn(len(targets)))))])
