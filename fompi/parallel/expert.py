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
from itertools import pairwise
from typing import Any

import numpy as np

from fompi.backends.numbers import contiguous, place, product, upload, widen
from fompi.base.errors import LayoutError, ShapeError
from fompi.base.layout import accumulator, integer, offsets, split
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
from fompi.parallel.choices import check_route, choose_backward, chosen, counted, experts_of, start_count
from fompi.parallel.differentiable import Differentiable, Gradients
from fompi.parallel.exchange import Batch, Exchange, alternate, check_experts, check_widths, halves
from fompi.parallel.route import Route, combine, dispatch, experts, route
from fompi.tensors.dlpack import Tensor

__all__ = ["LayerGradient", "MicroBatch", "Route", "combine", "dispatch", "experts", "experts_of", "moe", "route"]


Term = tuple[Batch, Array, Array]
"""One term of the gradients of w1 and w2: a batch, the gradients of its results and of its z."""


class MicroBatch:
    """One micro-batch of a layer."""

    def __init__(self, layer: Kept, rows: range):
        self.layer, self.exchange = layer, Exchange(layer.choice, rows, layer.comm, apart=True)
        self.batches: list[Batch] = []  # the first half of the own rows, the rows of each source, the other half

    def announce(self) -> None:
        """Collective: the ranks exchange the counts of rows."""
        exchange, like = self.exchange, self.layer.x.array
        exchange.announce()
        self.halves = [(upload(exchange.here.start + at, like), counts) for at, counts in halves(exchange.own)]

    def forward(self, y: Array) -> Iterator[None]:
        layer, exchange, comm = self.layer, self.exchange, self.layer.comm
        x, token, w1, w2 = layer.x.array, exchange.token, wide(layer, layer.w1), wide(layer, layer.w2)
        self.back = memory(comm, (exchange.total, w2.shape[2]), w2.dtype, w2)

        def compute(number: int, rows: Array) -> Array:
            batch, out = Batch.forward(widen(rows, layer.dtype), self._counts(number), w1, w2, layer.activation)
            self.batches.append(batch)
            return out

        pending = exchange.go(gathered(comm, x, exchange.away(token)), layer.dtype)
        yield from self._there_and_back(pending, lambda at: gathered(comm, x, token[at]), compute, self.back)
        exchange.add(self.back, y, layer.choice.weights)

    def backward(self, dy: Array, dweights: Array, dx: Array, use: Callable[[list[Term]], None]) -> Iterator[None]:
        """Adds to dx, and passes the terms of the weight gradients to `use` while the gradients go back."""
        layer, exchange, comm = self.layer, self.exchange, self.layer.comm
        w1, w2 = wide(layer, layer.w1), wide(layer, layer.w2)
        given = gathered(comm, dy, exchange.token)
        dweights[exchange.token, exchange.slot] = np.einsum("ij,ij->i", given, self.back)
        given *= layer.choice.weights[exchange.token, exchange.slot][:, None]
        drows = memory(comm, (len(given), w1.shape[1]), given.dtype, given)
        terms: list[Term] = []

        def compute(number: int, d: Array) -> Array:
            out, dz = self.batches[number].backward(d, w1, w2, layer.activation)
            terms.append((self.batches[number], d, dz))
            return out

        pending = exchange.go(exchange.away(given), accumulator(layer.dtype))
        yield from self._there_and_back(pending, given.__getitem__, compute, drows, lambda: use(terms))
        exchange.add(drows, dx)

    def _there_and_back(
        self,
        pending: Any,
        own: Callable[[Array], Array],
        compute: Callable[[int, Array], Array],
        into: Array,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """What the experts make of the rows that have left, and of the own ones, gets into `into`.

        `own(at)` are some of the own rows. `compute(number, rows)` gets the rows of a batch. `meanwhile` is called
        while the last results go back.
        """
        exchange, travels = self.exchange, accumulator(self.layer.dtype)
        yield
        (first, _), (last, _) = self.halves
        into[first] = compute(0, own(first))
        exchange.settle()
        answers = [
            exchange.answer(source, compute(number, arrived_from(pending, source)), travels)
            for number, source in enumerate(exchange.sources, 1)
        ]
        into[last] = compute(1 + len(answers), own(last))
        meanwhile()
        yield
        pending.wait()
        for answer in answers:
            exchange.answered(answer, into)

    def _counts(self, number: int) -> Any:
        """How many rows of a batch each expert computes."""
        (_, first), (_, last) = self.halves
        sources = self.exchange.sources
        if 0 < number <= len(sources):
            return self.exchange.table[sources[number - 1]]
        return last if number else first


def wide(layer: Kept, tensor: Tensor) -> Array:
    """The numbers of a tensor in the dtype of sums."""
    return widen(tensor.array, layer.dtype)


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
    shares: Any = None,
) -> tuple[Any, Kept]:
    """y[i] = sum(weight[i, e] * (activation(x[i] @ w1[e]) @ w2[e]) for e in the k best experts of x[i] @ router)

    x: (rows of this rank, h), Shard(0). router: (h, experts), Replicate. w1: (experts of this rank, h, f) and
    w2: (experts of this rank, f, n): the r-th run of the experts, of the length that `shares` says
    (`fompi.parallel.shares`), without these as even as possible. y: (rows of this rank, n).
    shared: None, or (s1, s2), Replicate: an expert for all rows, activation(x @ s1) @ s2, is added. With "swiglu", w2
    and s2 have f / 2 rows.

    The weights are the softmax over all experts. With `normalize` they are divided by the sum of the k. Ties go to the
    lower expert. With `capacity_factor`, an expert keeps ceil(capacity_factor * k * rows / experts) rows of each rank:
    those with the greatest weights (policy "probs"), or the first ones ("position"). The others are dropped: they add
    nothing to y. Without it, no row is dropped. `saved.tokens_per_expert` and `saved.dropped` count for all ranks.

    Raises ShapeError, DtypeError, LayoutError or PlanError on all ranks, or MismatchError if only other ranks refuse.
    """

    def check(comm: Communicator) -> tuple[str, int, Any]:
        tx, tr, held, text = check_route(x, router, k, normalize, capacity_factor, policy, shares, comm.size)
        weights = check_experts(w1, w2, tx, held, activation, comm)
        both = _check_shared(shared, tx, weights[1].array.shape[2], activation)
        if (integer(microbatches) or 0) < 1:
            raise LayoutError(f"microbatches={microbatches!r} must be an integer > 0")
        text += f", n={weights[1].array.shape[2]}, {activation}, microbatches={int(microbatches)}"
        text += ", no shared expert" if both is None else f", shared f={both[0].array.shape[1]}"
        return text, 0, (tx, tr, held, *weights, both)

    group, (tx, tr, held, t1, t2, both), _ = enter("moe", comm, check)
    choice = chosen(tx, tr, held, k, normalize, capacity_factor, policy)
    shape, weights = (len(tx.array), t2.array.shape[2]), {"router": tr, "w1": t1, "w2": t2, "shared": both}
    layer = Kept(tx, shape, comm=group, **weights, activation=activation, choice=choice)
    ends = offsets(split(len(tx.array), int(microbatches)))
    layer.parts = [MicroBatch(layer, range(a, b)) for a, b in pairwise(ends)]
    y = zeros(group, layer.shape, accumulator(tx.dtype), tx.array)

    def meanwhile() -> Iterator[None]:  # while the first rows travel
        if both is not None:
            layer.shared_z = product(wide(layer, tx), wide(layer, both[0]))
            y[...] = product(activate(layer.shared_z, activation), wide(layer, both[1]))
        yield

    shared_expert = meanwhile()
    if place(tx.array) is not None:  # a device computes it while the host waits for the counts
        alternate([shared_expert])
    for part in layer.parts:
        part.announce()
    counting = start_count(choice, np.sum([part.exchange.chosen for part in layer.parts], 0), group)
    alternate([*(part.forward(y) for part in layer.parts), shared_expert])
    layer.tokens_per_expert, layer.dropped = counted(counting)
    return give(y, tx), layer


def _backward_rows(layer: Kept, dy: Any, use: Callable[[list[Term]], None], meanwhile: Callable[[Any], None]) -> Any:
    """dx. `use` gets terms of the gradients of the experts, `meanwhile` gets what the replicated weights need."""
    array = enter_backward("moe", layer, dy)
    given = contiguous(widen(array, layer.dtype))  # products of strided tensors round differently
    dx, dweights = zeros(layer.comm, layer.x.array.shape, given.dtype, given), np.zeros_like(layer.choice.shares)

    def local() -> Iterator[None]:
        dlogits = choose_backward(layer.choice, dweights)
        dx[...] = dlogits @ wide(layer, layer.router).T
        dz = None
        if layer.shared is not None:
            s1, s2 = (wide(layer, w) for w in layer.shared)
            dh = product(given, s2.T)
            dz = activate_backward(layer.shared_z, dh, layer.activation)
            dx[...] += product(dz, s1.T)
        meanwhile((given, dlogits, dz))
        yield

    alternate([*(part.backward(given, dweights, dx, use) for part in layer.parts), local()])
    return give(dx, layer.x)


class LayerGradient:
    """The gradients of the weights of a layer, which are added up term by term."""

    def __init__(self, layer: Kept):
        self.layer, dtype = layer, accumulator(layer.dtype)
        self.dw1, self.dw2 = (zeros(layer.comm, w.array.shape, dtype, w.array) for w in (layer.w1, layer.w2))
        self.sums: list[Any] = []

    def add(self, terms: list[Term]) -> None:
        for batch, d, dz in terms:
            batch.add_weight_gradients(d, dz, self.layer.activation, self.dw1, self.dw2)

    def start_sums(self, local: tuple[Array, Array, Array | None]) -> None:
        """Start to sum the gradients of the replicated weights over the ranks."""
        (dy, dlogits, dz), layer = local, self.layer
        x_t = wide(layer, layer.x).T
        gradients = [product(x_t, dlogits)]
        if dz is not None:
            h = activate(layer.shared_z, layer.activation)
            gradients += [product(x_t, dz), product(h.T, dy)]
        self.sums = [start_sum(g, accumulator(layer.dtype), unrounded(layer.comm)) for g in gradients]

    def result(self) -> Gradients:
        layer = self.layer
        drouter, *sums = map(arrived, self.sums)
        experts = give(self.dw1, layer.w1), give(self.dw2, layer.w2)
        shared = None if layer.shared is None else tuple(map(give, sums, layer.shared))
        return give(drouter, layer.router), *experts, shared


def _moe_backward(saved: Kept, dy: Any) -> Gradients:
    gradient = LayerGradient(saved)
    dx = _backward_rows(saved, dy, gradient.add, gradient.start_sums)
    return dx, *gradient.result()


def _moe_backward_input(saved: Kept, dy: Any) -> tuple[Gradients, Any]:
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
)
