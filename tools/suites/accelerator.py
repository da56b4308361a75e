"""An emulated accelerator for all calls of a rank, at a speed that a benchmark chooses, and kernels on it.

The results of such a kernel have the form of the true ones, and it takes the time of its work.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from emulated import Emulated
from fompi.backends.numbers import product, wide_product, widen
from fompi.engine.communicator import Communicator
from fompi.model.machine import Machine
from fompi.parallel.activations import activate, activate_backward
from fompi.parallel.arrays import add
from fompi.parallel.attention import Rule, Three, attend, attend_backward, merge
from fompi.parallel.exchange import grouped, grouped_gradient
from fompi.parallel.interleave import give_way
from fompi.tensors.arena import Arena

Array = np.ndarray[Any, Any]

INSTANT = Machine("no time", 0.0, 1.0, 1e30, 1e30, 0.0)

PILOT_ROUNDS = 3
"""Rounds by which a benchmark chooses the speed of its accelerator."""

MARK = "emulated accelerator"
"""Marks rows of kernels on an emulated accelerator, with real messages."""


class Accelerator(Emulated):
    """The emulated accelerator of this rank. `flops` counts the operations of its kernels."""

    def __init__(self) -> None:
        super().__init__(INSTANT)
        self.meanwhile = give_way  # the host is free while a kernel runs
        self.flops = 0.0

    def use(self, flops_rate: float) -> None:
        self.machine = replace(INSTANT, flops_rate=flops_rate)

    def seconds(self, flops: float, *more: Any) -> float:
        self.flops += flops
        return super().seconds(flops, *more)

    @contextmanager
    def on(self, comms: Iterable[Communicator]) -> Iterator[None]:
        """Inside, calls on these communicators compute here."""
        held = [*comms]
        for comm in held:
            comm.backend = self
        try:
            with emulated(self):
                yield
        finally:
            for comm in held:
                comm.backend = None


# ----------------------------------------------------------------------------------- the kernels of strategies on it

MEMORY = Arena(1 << 30)
"""The memory of results. An accelerator has its own, which it does not ask the system for at each call."""


KernelWork = tuple[float, float, Sequence[tuple[tuple[int, ...], Any]]]
"""What a call costs: its operations and bytes. And the form of its results: (shape, dtype) for each."""


def pairs(rule: Rule, q_at: Array, k_at: Array) -> int:
    """How many keys all queries see together."""
    if rule.cu_seqlens is not None:
        seen = ((q, k, mask) for q, runs in rule.tiles(q_at, k_at) for k, mask in runs)
        return sum(len(q_at[q]) * len(k_at[k]) if mask is None else int(mask.sum()) for q, k, mask in seen)
    if rule.causal:
        return int(np.searchsorted(np.sort(k_at), q_at, "right").sum())
    return len(q_at) * len(k_at)


def _product(a: Array, b: Array) -> KernelWork:
    rows = a.size // max(a.shape[-1], 1)
    nbytes = a.nbytes + b.nbytes + rows * b.shape[-1] * a.itemsize
    return 2.0 * rows * a.shape[-1] * b.shape[-1], nbytes, [((*a.shape[:-1], b.shape[-1]), a.dtype)]


def _wide_product(a: Array, b: Array, dtype: str) -> KernelWork:
    return _product(widen(a, dtype), widen(b, dtype))


def _activate(z: Array, activation: str) -> KernelWork:
    features = z.shape[-1] // 2 if activation == "swiglu" else z.shape[-1]
    return 0, 2 * z.nbytes, [((*z.shape[:-1], features), z.dtype)]


def _attend(q: Array, k: Array, v: Array, reads: Sequence[int], q_at: Array, k_at: Array, rule: Rule) -> KernelWork:
    (_, heads, d), e = q.shape, v.shape[2]
    flops = 2.0 * pairs(rule, q_at, k_at) * heads * (d + e)
    results = [((*q.shape[:2], e), q.dtype), (q.shape[:2], q.dtype)]
    return flops, q.nbytes + k.nbytes + 2 * v.nbytes, results


def _attend_backward(qkv: Three, results: Three, reads: Any, q_at: Array, k_at: Array, rule: Rule) -> KernelWork:
    (q, k, v), o = qkv, results[0]
    (_, heads, d), e = q.shape, v.shape[2]
    flops = 2.0 * pairs(rule, q_at, k_at) * heads * (3 * d + 2 * e)
    nbytes = 2 * (q.nbytes + k.nbytes + v.nbytes) + 2 * o.nbytes
    return flops, nbytes, [(a.shape, a.dtype) for a in (q, k, v)]


def _grouped(rows: Array, counts: Sequence[int], w: Array) -> KernelWork:
    results = [((len(rows), w.shape[2]), rows.dtype)]
    nbytes = rows.nbytes + w.nbytes + len(rows) * w.shape[2] * w.itemsize
    return 2.0 * rows.size * w.shape[2], nbytes, results


def _grouped_gradient(rows: Array, counts: Sequence[int], d: Array, into: Array) -> KernelWork:
    return 2.0 * rows.size * d.shape[1], rows.nbytes + d.nbytes + into.nbytes, []


WORK: dict[Callable[..., Any], Callable[..., KernelWork]] = {
    product: _product,
    wide_product: _wide_product,
    add: lambda into, other: (0, 2 * into.nbytes + other.nbytes, []),
    activate: _activate,
    activate_backward: lambda z, dy, _: (0, 2 * z.nbytes + dy.nbytes, [(z.shape, z.dtype)]),
    attend: _attend,
    attend_backward: _attend_backward,
    merge: lambda o, lse, more, more_lse: (0, 3 * o.nbytes + 3 * lse.nbytes, []),
    grouped: _grouped,
    grouped_gradient: _grouped_gradient,
}
"""The kernels that strategies run themselves, besides those of operations."""

TRUE = "fompi.parallel.choices"
"""Products of this module are true ones: a router's numbers say where rows go."""


def spend(accelerator: Emulated, kernel: Callable[..., Any], *args: Any) -> Any:
    """The kernel on the accelerator: its time passes, and the numbers of its results are undefined."""
    (flops, nbytes, forms), results = WORK[kernel](*args), list[Array]()
    accelerator.spend(flops, nbytes, lambda: results.extend(MEMORY.take(*form) for form in forms))
    return tuple(results) if len(results) > 1 else results[0] if results else None


@contextmanager
def emulated(accelerator: Emulated) -> Iterator[None]:
    """Inside, all strategies run their kernels on the accelerator."""
    modules = [module for name, module in sys.modules.items() if name.startswith("fompi.parallel.") and name != TRUE]
    used = [
        (module, name, kernel)
        for module in modules
        for name, kernel in vars(module).items()
        if callable(kernel) and getattr(kernel, "__hash__", None) is not None and kernel in WORK
    ]
    for module, name, kernel in used:
        setattr(module, name, functools.partial(spend, accelerator, kernel))
    try:
        yield
    finally:
        for module, name, kernel in used:
            setattr(module, name, kernel)
