"""Expert parallelism: a mixture of experts that are spread over the ranks.

    y = moe(x, router, w1, w2, k=2, comm=ep)          # each row of x goes through its k best experts

    r = route(x, router, k=2, comm=ep)                # the same in parts, for experts of your own
    rows = dispatch(x, r)                             # the rows for the experts of this rank, expert by expert
    y = combine(experts(rows, w1, w2, r), r)

Rank r holds the r-th run of the experts, as even as possible. The router and the shared expert are replicated, and
their gradients are summed over the ranks. Gradients are those of the sum of the losses of all ranks.

The rows for experts of this rank do not travel. Half of them are computed while other rows arrive, and half while
results go back. Those of another rank are computed once they are there, and their results leave at once. With
`microbatches=2` the rows of one micro-batch travel while the experts compute the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from fompi.backends.numbers import contiguous, place, product, upload, widen
from fompi.base.errors import LayoutError, ShapeError
from fompi.base.layout import accumulator, offsets, split
from fompi.engine.communicator import Communicator
from fompi.parallel.activations import activate, activate_backward
from fompi.parallel.arrays import (
    Array,
    Kept,
    arrived,
    arrived_from,
    borrow,
    enter,
    enter_backward,
    gathered,
    give,
    memory,
    start_sum,
    unrounded,
    zeros,
)
from fompi.parallel.choices import (
    POLICIES,
    Choice,
    check_route,
    choose,
    choose_backward,
    chosen,
    counted,
    experts_of,
    is_positive,
    start_count,
)
from fompi.parallel.differentiable import Differentiable, Gradients
from fompi.parallel.exchange import (
    Batch,
    Exchange,
    check_experts,
    check_widths,
    grouped,
    grouped_gradient,
    halves,
    in_turns,
)
from fompi.parallel.route import Gate, Moved, Route, combine, dispatch, experts, route
from fompi.tensors.dlpack import Tensor

__all__ = [
    "POLICIES", "Batch", "Choice", "Exchange", "Gate", "LayerGradient", "MicroBatch", "Moe", "Moved", "Route", "choose",
    "choose_backward", "combine", "dispatch", "experts", "experts_of", "grouped", "grouped_gradient", "halves",
    "in_turns", "moe", "route",
]  # fmt: skip


@dataclass
class Moe(Kept):
    """What the backward needs, and the counts of all ranks together."""

    router: Tensor
    w1: Tensor
    w2: Tensor
    shared: tuple[Tensor, Tensor] | None
    comm: Communicator
    activation: str
    choice: Choice
    parts: list[MicroBatch] = field(default_factory=list)
    shared_z: Array | None = None
    shape: tuple[int, ...] = ()
    tokens_per_expert: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """How many rows of all ranks each expert has computed."""
    dropped: int = 0
    """How many choices of all ranks were dropped, because an expert was full."""

    def wide(self, tensor: Tensor) -> Array:
        return widen(tensor.array, self.dtype)


Term = tuple[Batch, Array, Array]
"""One term of the gradients of w1 and w2: a batch, the gradients of its results and of its z."""


class MicroBatch:
    """One micro-batch of a layer."""

    def __init__(self, layer: Moe, rows: range):
        self.layer, self.exchange = layer, Exchange(layer.choice, rows, layer.comm, apart=True)
        self.batches: list[Batch] = []  # the first half of the own rows, the rows of each source, the other half

    def announce(self) -> None:
        """Collective: the ranks exchange the counts of rows."""
        exchange, like = self.exchange, self.layer.x.array
        exchange.announce()
        self.halves = [(upload(exchange.here.start + at, like), counts) for at, counts in halves(exchange.own)]

    def forward(self, y: Array) -> Iterator[None]:
        layer, exchange = self.layer, self.exchange
        dtype, travels = layer.dtype, accumulator(layer.dtype)
        w1, w2 = layer.wide(layer.w1), layer.wide(layer.w2)
        back = memory(layer.comm, (exchange.total, w2.shape[2]), w2.dtype, w2)

        def compute(rows: Array, counts: Any) -> Array:
            batch, out = Batch.forward(widen(rows, dtype), counts, w1, w2, layer.activation)
            self.batches.append(batch)
            return out

        x, token, comm = layer.x.array, exchange.token, layer.comm
        pending = exchange.go(gathered(comm, x, exchange.away(token)), dtype)
        yield
        (first, first_counts), (last, last_counts) = self.halves
        back[first] = compute(gathered(comm, x, token[first]), first_counts)
        exchange.settle()
        answers = [
            exchange.answer(source, compute(arrived_from(pending, source), exchange.table[source]), travels)
            for source in exchange.sources
        ]
        back[last] = compute(gathered(comm, x, token[last]), last_counts)
        yield
        pending.wait()
        for answer in answers:
            exchange.answered(answer, back)
        self.back = back
        exchange.add(back, y, layer.choice.weights)

    def backward(self, dy: Array, dweights: Array, dx: Array, use: Callable[[list[Term]], None]) -> Iterator[None]:
        """Adds to dx, and passes the terms of the weight gradients to `use` while the gradients go back."""
        layer, exchange = self.layer, self.exchange
        travels = accumulator(layer.dtype)
        w1, w2 = layer.wide(layer.w1), layer.wide(layer.w2)
        comm, given = layer.comm, gathered(layer.comm, dy, exchange.token)
        dweights[exchange.token, exchange.slot] = np.einsum("ij,ij->i", given, self.back)
        given *= layer.choice.weights[exchange.token, exchange.slot][:, None]
        drows = memory(comm, (len(given), w1.shape[1]), given.dtype, given)
        terms = []

        def compute(batch: Batch, d: Array) -> Array:
            out, dz = batch.backward(d, w1, w2, layer.activation)
            terms.append((batch, d, dz))
            return out

        pending = exchange.go(exchange.away(given), travels)
        yield
        (first, _), (last, _) = self.halves
        own_first, *others, own_last = self.batches
        drows[first] = compute(own_first, given[first])
        answers = [
            exchange.answer(source, compute(batch, arrived_from(pending, source)), travels)
            for source, batch in zip(exchange.sources, others, strict=True)
        ]
        drows[last] = compute(own_last, given[last])
        use(terms)
        yield
        pending.wait()
        for answer in answers:
            exchange.answered(answer, drows)
        exchange.add(drows, dx)


def _moe(
    x: Any,
    router: Any,
    w1: Any,
    w2: Any,
    shared: Any = None,
    *,
    k: int,
    comm: Any = None,
    activation: str = "silu",
    normalize: bool = True,
    capacity_factor: float | None = None,
    policy: str = "probs",
    microbatches: int = 1,
) -> tuple[Any, Moe]:
    """y[i] = sum(weight[i, e] * (activation(x[i] @ w1[e]) @ w2[e]) for e in the k best experts of x[i] @ router)

    x: (rows of this rank, h), Shard(0). router: (h, experts), Replicate. w1: (experts of this rank, h, f) and
    w2: (experts of this rank, f, n): the r-th run of the experts, as even as possible. y: (rows of this rank, n).
    shared: None, or (s1, s2), Replicate: an expert for all rows, activation(x @ s1) @ s2, is added. With "swiglu", w2
    and s2 have f / 2 rows.

    The weights are the softmax over all experts. With `normalize` they are divided by the sum of the k. Ties go to the
    lower expert. With `capacity_factor`, an expert keeps ceil(capacity_factor * k * rows / experts) rows of each rank:
    those with the greatest weights (policy "probs"), or the first ones ("position"). The others are dropped: they add
    nothing to y. Without it, no row is dropped. `saved.tokens_per_expert` and `saved.dropped` count for all ranks.

    Raises ShapeError, DtypeError, LayoutError or PlanError on all ranks, or MismatchError if only other ranks refuse.
    """

    def check(comm: Communicator) -> tuple[str, int, Any]:
        tx, tr, text = check_route(x, router, k, normalize, capacity_factor, policy)
        weights = check_experts(w1, w2, tx, tr.array.shape[1], activation, comm)
        both = _check_shared(shared, tx, weights[1].array.shape[2], activation)
        if not is_positive(microbatches):
            raise LayoutError(f"microbatches={microbatches!r} must be an integer > 0")
        text += f", n={weights[1].array.shape[2]}, {activation}, microbatches={int(microbatches)}"
        text += ", no shared expert" if both is None else f", shared f={both[0].array.shape[1]}"
        return text, 0, (tx, tr, *weights, both)

    group, (tx, tr, t1, t2, both), _ = enter("moe", comm, check)
    choice = chosen(tx, tr, k, normalize, capacity_factor, policy)
    layer = Moe(tx, tr, t1, t2, both, group, activation, choice)
    ends = offsets(split(len(tx.array), int(microbatches)))
    layer.parts = [MicroBatch(layer, range(a, b)) for a, b in pairwise(ends)]
    layer.shape = (len(tx.array), t2.array.shape[2])
    y = zeros(group, layer.shape, accumulator(tx.dtype), tx.array)

    def meanwhile() -> Iterator[None]:  # while the first rows travel
        if both is not None:
            layer.shared_z = product(layer.wide(tx), layer.wide(both[0]))
            y[...] = product(activate(layer.shared_z, activation), layer.wide(both[1]))
        yield

    shared_expert = meanwhile()
    if place(tx.array) is not None:  # a device computes it while the host waits for the counts
        in_turns([shared_expert])
    for part in layer.parts:
        part.announce()
    counting = start_count(choice, np.sum([part.exchange.chosen for part in layer.parts], 0), group)
    in_turns([*(part.forward(y) for part in layer.parts), shared_expert])
    layer.tokens_per_expert, layer.dropped = counted(counting)
    return give(y, tx), layer


def _backward_rows(layer: Moe, dy: Any, use: Callable[[list[Term]], None], meanwhile: Callable[[Any], None]) -> Any:
    """dx. `use` gets terms of the gradients of the experts, `meanwhile` gets what the replicated weights need."""
    array = enter_backward("moe", layer, dy)
    given = contiguous(widen(array, layer.dtype))  # products of strided tensors round differently
    dx, dweights = zeros(layer.comm, layer.x.array.shape, given.dtype, given), np.zeros_like(layer.choice.shares)

    def local() -> Iterator[None]:
        dlogits = choose_backward(layer.choice, dweights)
        dx[...] = dlogits @ layer.wide(layer.router).T
        dz = None
        if layer.shared is not None and layer.shared_z is not None:
            s1, s2 = map(layer.wide, layer.shared)
            dh = product(given, s2.T)
            dz = activate_backward(layer.shared_z, dh, layer.activation)
            dx[...] += product(dz, s1.T)
        meanwhile((given, dlogits, dz))
        yield

    in_turns([*(part.backward(given, dweights, dx, use) for part in layer.parts), local()])
    return give(dx, layer.x)


class LayerGradient:
    """The gradients of the weights of a layer, which are added up term by term."""

    def __init__(self, layer: Moe):
        self.layer, dtype = layer, accumulator(layer.dtype)
        self.dw1, self.dw2 = (zeros(layer.comm, w.array.shape, dtype, w.array) for w in (layer.w1, layer.w2))
        self.sums: list[Any] = []

    def add(self, terms: list[Term]) -> None:
        for batch, d, dz in terms:
            batch.add_weight_gradients(d, dz, self.layer.activation, self.dw1, self.dw2)

    def start_sums(self, local: tuple[Array, Array, Array | None]) -> None:
        """Start to sum the gradients of the replicated weights over the ranks."""
        (dy, dlogits, dz), layer = local, self.layer
        x_t = layer.wide(layer.x).T
        gradients = [product(x_t, dlogits)]
        if dz is not None and layer.shared_z is not None:
            h = activate(layer.shared_z, layer.activation)
            gradients += [product(x_t, dz), product(h.T, dy)]
        self.sums = [start_sum(g, accumulator(layer.dtype), unrounded(layer.comm)) for g in gradients]

    def result(self) -> Gradients:
        layer = self.layer
        drouter, *sums = map(arrived, self.sums)
        experts = give(self.dw1, layer.w1), give(self.dw2, layer.w2)
        shared = None if layer.shared is None else tuple(map(give, sums, layer.shared))
        return give(drouter, layer.router), *experts, shared


def _moe_backward(saved: Moe, dy: Any) -> Gradients:
    gradient = LayerGradient(saved)
    dx = _backward_rows(saved, dy, gradient.add, gradient.start_sums)
    return dx, *gradient.result()


def _moe_backward_input(saved: Moe, dy: Any) -> tuple[Gradients, Any]:
    terms: list[Term] = []
    local: list[Any] = []
    dx = _backward_rows(saved, dy, terms.extend, local.append)
    return (dx,), (saved, terms, local[0])


def _moe_backward_weight(rest: Any) -> Gradients:
    saved, terms, local = rest
    gradient = LayerGradient(saved)
    gradient.start_sums(local)
    gradient.add(terms)
    return gradient.result()


def _check_shared(shared: Any, x: Tensor, n: int, activation: str) -> tuple[Tensor, Tensor] | None:
    if shared is None:
        return None
    if not isinstance(shared, (tuple, list)) or len(shared) != 2:
        raise ShapeError(f"shared must be None or (s1, s2), not {type(shared).__name__}")
    s1, s2 = borrow(shared[0], "s1", x, 2), borrow(shared[1], "s2", x, 2)
    check_widths("s1", "s2", s1.array.shape, s2.array.shape, x, activation)
    if s2.array.shape[1] != n:
        raise ShapeError(f"s2 has {s2.array.shape[1]} columns, but w2 has {n}: their results are added")
    return s1, s2


moe = Differentiable(
    _moe,
    _moe_backward,
    tensors=("x", "router", "w1", "w2", "shared"),
    inputs=1,
    backward_input=_moe_backward_input,
    backward_weight=_moe_backward_weight,
    name="moe",
)
