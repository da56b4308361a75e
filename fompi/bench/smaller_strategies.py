"""Strategies with smaller messages: rows of the suite `smaller`.

| row               | what is timed, in float32 and with each wire                                              |
|-------------------|-------------------------------------------------------------------------------------------|
| `tensor`          | forward and backward of a column-parallel and a row-parallel layer                        |
| `ring attention`  | forward and backward                                                                      |
| `experts`         | forward and backward of a mixture of experts                                              |
| `pipeline`        | a step of 1F1B, one layer a stage                                                         |
| `ZeRO`            | a step of `DataParallel` with zero=1: sums of gradients, gathers of parameters            |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from fompi.engine.communicator import Communicator
from fompi.parallel.data import SGD, DataParallel
from fompi.parallel.differentiable import Differentiable
from fompi.parallel.expert import experts_of, moe
from fompi.parallel.pipeline import Pipeline
from fompi.parallel.sequence import Sharding, ring_attention
from fompi.parallel.tensor import column_parallel_linear, row_parallel_linear

Array = np.ndarray[Any, Any]
Step = Callable[[], object]


def step_of(name: str, comm: Communicator, wire: str | None, quick: bool) -> Step:
    """A step of the strategy with this wire. Collective."""
    return _MAKERS[name](comm, wire, 16 if quick else 1)


def _drawn(comm: Communicator, *shape: int) -> Array:
    return np.random.default_rng([comm.rank, *shape]).standard_normal(shape, np.float32)


def _both_ways(f: Differentiable, *given: Any, **options: Any) -> Array:
    """The gradient of the first tensor, with the result as that of itself."""
    y, saved = f.forward(*given, **options)
    gradient: Array = f.backward(saved, y)[0]
    return gradient


def _tensor(comm: Communicator, wire: str | None, less: int) -> Step:
    rows, width, inner = 512 // less, 1024 // less, 128
    x, w1, w2 = _drawn(comm, rows, width), _drawn(comm, width, inner), _drawn(comm, inner, width)

    def step() -> Array:
        h, first = column_parallel_linear.forward(x, w1, activation="gelu", comm=comm, wire=wire)
        y, second = row_parallel_linear.forward(h, w2, comm=comm, wire=wire)
        dh, _, _ = row_parallel_linear.backward(second, y)
        dx: Array = column_parallel_linear.backward(first, dh)[0]
        return dx

    return step


def _attention(comm: Communicator, wire: str | None, less: int) -> Step:
    tokens = 512 // less
    q, k, v = (_drawn(comm, tokens, 8, 64) for _ in range(3))
    sharding = Sharding(comm.size * tokens, comm.size)
    return partial(_both_ways, ring_attention, q, k, v, sharding, comm=comm, wire=wire)


def _experts(comm: Communicator, wire: str | None, less: int) -> Step:
    rows, width, inner, count = 512 // less, 1024 // less, 128, 8
    mine = len(experts_of(comm.rank, comm.size, count))
    x, router = _drawn(comm, rows, width), np.random.default_rng(0).standard_normal((width, count), np.float32)
    w1, w2 = _drawn(comm, mine, width, inner), _drawn(comm, mine, inner, width)
    return partial(_both_ways, moe, x, router, w1, w2, k=2, comm=comm, wire=wire)


class _Layer:
    """A stage: x @ w."""

    def __init__(self, w: Array):
        self.w, self.gradient = w, np.zeros_like(w)

    def forward(self, x: Array) -> tuple[Array, Array]:
        return x @ self.w, x

    def backward(self, x: Array, dy: Array) -> Array:
        self.gradient += x.T @ dy
        dx: Array = dy @ self.w.T
        return dx


def _pipeline(comm: Communicator, wire: str | None, less: int) -> Step:
    shape, count = (256 // less, 512 // less), 4 * comm.size
    stage = _Layer(np.eye(shape[1], dtype=np.float32))
    how = {"microbatches": count, "activations": shape, "loss": lambda y, t: (float(y.sum()), y)}
    pipe = Pipeline([stage], comm=comm, wire=wire, **how)
    inputs = [_drawn(comm, *shape)] * count
    given = inputs if comm.rank == 0 else None, inputs if comm.rank == comm.size - 1 else None
    return partial(pipe.step, *given)


def _zero(comm: Communicator, wire: str | None, less: int) -> Step:
    names = [f"w{i}" for i in range(4)]
    gradient = _drawn(comm, 1024 // less, 1024 // less)
    params = {name: np.zeros_like(gradient) for name in names}
    dp = DataParallel(
        params, optimizer=SGD(1e-3), comm=comm, zero=1, wire=wire, wire_gather=wire, bucket_nbytes=4 << 20
    )

    def step() -> float:
        for name in names:
            _ = dp[name]
        for name in reversed(names):
            dp.ready(name, gradient)
        return dp.step()

    return step


_MAKERS: dict[str, Callable[[Communicator, str | None, int], Step]] = {
    "tensor": _tensor, "ring attention": _attention, "experts": _experts, "pipeline": _pipeline, "ZeRO": _zero
}  # fmt: skip
NAMES = tuple(_MAKERS)
