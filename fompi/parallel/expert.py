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

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from fompi.backends.numpy import widen
from fompi.base.errors import DtypeError, LayoutError, PlanError, ShapeError
from fompi.base.layout import accumulator, offsets, split
from fompi.engine.communicator import Communicator
from fompi.ops.operations import all_reduce, all_to_all
from fompi.parallel.activations import ACTIVATIONS, activate, activate_backward
from fompi.parallel.arrays import (
    Array,
    arrived,
    arrived_from,
    borrow,
    borrow_gradient,
    call,
    enter,
    give,
    start,
    transfer,
)
from fompi.parallel.differentiable import Differentiable, Gradients
from fompi.parallel.local import Work, local_kernel, product
from fompi.tensors import dlpack
from fompi.tensors.dlpack import Tensor

POLICIES = ("probs", "position")

# ------------------------------------------------------------------------------------------------------- choices


@dataclass
class Choice:
    """Which experts the rows of this rank have chosen."""

    probabilities: Array  # (rows, experts)
    experts: Array  # (rows, k)
    shares: Array  # (rows, k): the weights before any row is dropped
    kept: Array  # (rows, k): False where the expert is full
    normalize: bool

    @property
    def weights(self) -> Array:
        """(rows, k), 0 for dropped rows."""
        return np.where(self.kept, self.shares, self.shares.dtype.type(0))


def choose(logits: Array, k: int, normalize: bool, capacity: int | None, policy: str) -> Choice:
    """The k experts with the greatest logits, ties to the lower expert. Each expert keeps `capacity` rows."""
    rows, experts = logits.shape
    best = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    e = np.exp(logits - logits.max(1, keepdims=True, initial=-np.inf))
    probabilities = e / e.sum(1, keepdims=True)
    shares = np.take_along_axis(probabilities, best, 1)
    if normalize:
        shares = shares / shares.sum(1, keepdims=True)
    kept = np.ones((rows, k), bool)
    if capacity is not None:
        for expert in range(experts):
            token, slot = np.nonzero(best == expert)
            if policy == "probs":  # the greatest weights stay, ties to the earlier row
                order = np.argsort(-shares[token, slot], kind="stable")
                token, slot = token[order], slot[order]
            kept[token[capacity:], slot[capacity:]] = False
    return Choice(probabilities, best, shares, kept, normalize)


def choose_backward(choice: Choice, dweights: Array) -> Array:
    """The gradient of the logits, where `dweights` is that of the weights."""
    p, d = choice.probabilities, np.where(choice.kept, dweights, 0)
    if choice.normalize:
        total = np.take_along_axis(p, choice.experts, 1).sum(1, keepdims=True)
        d = (d - (d * choice.shares).sum(1, keepdims=True)) / total
    dp = np.zeros_like(p)
    np.put_along_axis(dp, choice.experts, d.astype(p.dtype, copy=False), 1)
    return p * (dp - (p * dp).sum(1, keepdims=True))


def experts_of(rank: int, size: int, experts: int) -> range:
    """The experts that a rank holds."""
    ends = offsets(split(experts, size))
    return range(ends[rank], ends[rank + 1])


# --------------------------------------------------------------------------------------------------- the experts


def _grouped_work(rows: Array, counts: Sequence[int], w: Array) -> Work:
    results = [((len(rows), w.shape[2]), rows.dtype)]
    return Work(2.0 * rows.size * w.shape[2], rows.nbytes + w.nbytes + len(rows) * w.shape[2] * w.itemsize, results)


@local_kernel(_grouped_work)
def grouped(rows: Array, counts: Sequence[int], w: Array) -> Array:
    """rows @ w[e] for each run of rows: the first counts[0] rows for expert 0, and so on."""
    out = np.empty((len(rows), w.shape[2]), rows.dtype)
    for e, (a, b) in enumerate(pairwise(offsets(counts))):
        np.matmul(rows[a:b], w[e], out=out[a:b])
    return out


@local_kernel(
    lambda rows, counts, d, into: Work(2.0 * rows.size * d.shape[1], rows.nbytes + d.nbytes + into.nbytes, ())
)
def grouped_gradient(rows: Array, counts: Sequence[int], d: Array, into: Array) -> None:
    """into[e] += rows.T @ d for each run of rows."""
    for e, (a, b) in enumerate(pairwise(offsets(counts))):
        into[e] += rows[a:b].T @ d[a:b]


@dataclass
class Batch:
    """Rows that experts have computed, expert by expert."""

    rows: Array
    counts: list[int]
    z: Array  # rows @ w1
    comm: Communicator

    @classmethod
    def forward(
        cls, rows: Array, counts: Any, w1: Array, w2: Array, activation: str, comm: Communicator
    ) -> tuple[Batch, Array]:
        """The batch, and activation(rows @ w1) @ w2."""
        numbers = [int(n) for n in counts]
        batch = cls(rows, numbers, grouped.on(comm, rows, numbers, w1), comm)
        return batch, grouped.on(comm, activate.on(comm, batch.z, activation), numbers, w2)

    def backward(self, d: Array, w1: Array, w2: Array, activation: str) -> tuple[Array, Array]:
        """The gradients of the rows and of z."""
        dh = grouped.on(self.comm, d, self.counts, w2.swapaxes(1, 2))
        dz = activate_backward.on(self.comm, self.z, dh, activation)
        return grouped.on(self.comm, dz, self.counts, w1.swapaxes(1, 2)), dz

    def add_weight_gradients(self, d: Array, dz: Array, activation: str, dw1: Array, dw2: Array) -> None:
        grouped_gradient.on(self.comm, self.rows, self.counts, dz, dw1)
        grouped_gradient.on(self.comm, activate.on(self.comm, self.z, activation), self.counts, d, dw2)


# -------------------------------------------------------------------------------------------------- the exchange


class Exchange:
    """The chosen rows of one micro-batch, expert by expert: which of them travel, and which rows arrive for them.

    With `apart`, the rows for experts of this rank do not travel. Collective: the ranks exchange the counts.
    """

    def __init__(self, choice: Choice, rows: range, comm: Communicator, apart: bool):
        experts = choice.probabilities.shape[1]
        mine = experts_of(comm.rank, comm.size, experts)
        token, slot = np.nonzero(choice.kept[rows.start : rows.stop])
        token += rows.start
        expert = choice.experts[token, slot]
        order = np.argsort(expert, kind="stable")
        self.comm, self.token, self.slot, expert = comm, token[order], slot[order], expert[order]
        stays = (expert >= mine.start) & (expert < mine.stop) if apart else np.zeros(len(expert), bool)
        self.here, self.away = np.flatnonzero(stays), np.flatnonzero(~stays)
        self.own = np.bincount(expert[self.here] - mine.start, minlength=len(mine))
        sent, shares = np.bincount(expert[self.away], minlength=experts), split(experts, comm.size)
        self.send = [int(sent[a:b].sum()) for a, b in pairwise(offsets(shares))]
        self._table = start(all_to_all, sent[:, None], counts=list(shares), dtype=str(sent.dtype), comm=comm)

    @property
    def sources(self) -> list[int]:
        """The other ranks, in the order in which their rows arrive."""
        return [(self.comm.rank - d) % self.comm.size for d in range(1, self.comm.size)]

    def settle(self) -> None:
        """Wait for the counts of the rows that arrive."""
        self.table = table = arrived(self._table).reshape(self.comm.size, len(self.own))
        self.receive = [int(n) for n in table.sum(1)]
        self.counts = [int(n) for n in table.sum(0)]
        expert = np.repeat(np.tile(np.arange(len(self.own)), self.comm.size), table.reshape(-1))
        self.order = np.argsort(expert, kind="stable")  # from the order of arrival to expert by expert

    def go(self, values: Array, dtype: str) -> Any:
        """Send the values of the rows that travel to their experts: to one rank after the other."""
        x = values[self.away]
        return start(all_to_all, x, counts=self.send, dtype=dtype, comm=self.comm, schedule="pairwise")

    def came(self, pending: Any) -> Array:
        """The values that have arrived, expert by expert."""
        values: Array = arrived(pending)[self.order]
        return values

    def go_back(self, values: Array, dtype: str) -> Any:
        """Send values, which stand expert by expert, to where their rows came from."""
        home = np.empty_like(values)
        home[self.order] = values
        return start(all_to_all, home, counts=self.receive, dtype=dtype, comm=self.comm)

    def answer(self, source: int, values: Array, dtype: str) -> Any:
        """Send the values of the rows that came from `source` back, and receive those of the opposite rank.

        `source` is d ranks before this one, and the opposite rank is d ranks behind it. Returns what `answered` takes.
        """
        behind = (2 * self.comm.rank - source) % self.comm.size
        dest = source if self.receive[source] else None
        return behind, transfer(values, dest, behind if self.send[behind] else None, dtype, self.comm)

    def answered(self, answer: Any, into: Array) -> None:
        """Wait for such values, and write them to the rows of `into` that they belong to."""
        behind, pending = answer
        values, first = arrived(pending), sum(self.send[:behind])
        if self.send[behind]:
            into[self.away[first : first + self.send[behind]]] = values

    def add(self, values: Array, y: Array) -> None:
        """Add the values of all rows to the rows of y that they belong to, slot by slot: in a fixed order."""
        for slot in range(self.slot.max(initial=-1) + 1):
            at = np.flatnonzero(self.slot == slot)
            y[self.token[at]] += values[at]  # a row of y occurs once in each slot


def halves(counts: Array) -> list[tuple[Array, Array]]:
    """The rows of each expert in two halves: for each half its rows and its counts."""
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first = (counts + 1) // 2
    is_first = within < np.repeat(first, counts)
    return [(np.flatnonzero(is_first), first), (np.flatnonzero(~is_first), counts - first)]


def in_turns(parts: Sequence[Iterator[None]]) -> None:
    """Run the generators step by step in turns: what one has sent travels while the others compute."""
    for _ in zip_longest(*parts):
        pass


# ------------------------------------------------------------------------------------------------------ the layer


@dataclass
class Moe:
    """What the backward needs, and the counts of all ranks together."""

    x: Tensor
    router: Tensor
    w1: Tensor
    w2: Tensor
    shared: tuple[Tensor, Tensor] | None
    comm: Communicator
    activation: str
    choice: Choice
    parts: list[Part] = field(default_factory=list)
    shared_z: Array | None = None
    shape: tuple[int, ...] = ()
    tokens_per_expert: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """How many rows of all ranks each expert has computed."""
    dropped: int = 0
    """How many choices of all ranks were dropped, because an expert was full."""

    @property
    def dtype(self) -> str:
        return self.x.dtype

    def wide(self, tensor: Tensor) -> Array:
        return widen(tensor.array, self.dtype)


Term = tuple[Batch, Array, Array]
"""One term of the gradients of w1 and w2: a batch, the gradients of its results and of its z."""


class Part:
    """One micro-batch of a layer."""

    def __init__(self, layer: Moe, rows: range):
        self.layer, self.exchange = layer, Exchange(layer.choice, rows, layer.comm, apart=True)
        self.halves = [(self.exchange.here[at], counts) for at, counts in halves(self.exchange.own)]
        self.batches: list[Batch] = []  # the first half of the own rows, the rows of each source, the other half

    def forward(self, y: Array) -> Iterator[None]:
        layer, exchange = self.layer, self.exchange
        dtype, travels = layer.dtype, accumulator(layer.dtype)
        w1, w2 = layer.wide(layer.w1), layer.wide(layer.w2)
        back = np.empty((len(exchange.token), w2.shape[2]), w2.dtype)

        def compute(rows: Array, counts: Any) -> Array:
            batch, out = Batch.forward(widen(rows, dtype), counts, w1, w2, layer.activation, layer.comm)
            self.batches.append(batch)
            return out

        rows = layer.x.array[exchange.token]
        pending = exchange.go(rows, dtype)
        yield
        (first, first_counts), (last, last_counts) = self.halves
        back[first] = compute(rows[first], first_counts)
        exchange.settle()
        answers = [
            exchange.answer(source, compute(arrived_from(pending, source), exchange.table[source]), travels)
            for source in exchange.sources
        ]
        back[last] = compute(rows[last], last_counts)
        yield
        pending.wait()
        for answer in answers:
            exchange.answered(answer, back)
        self.back = back
        exchange.add(layer.choice.weights[exchange.token, exchange.slot][:, None] * back, y)

    def backward(self, dy: Array, dweights: Array, dx: Array, use: Callable[[list[Term]], None]) -> Iterator[None]:
        """Adds to dx, and passes the terms of the weight gradients to `use` while the gradients go back."""
        layer, exchange = self.layer, self.exchange
        travels = accumulator(layer.dtype)
        w1, w2 = layer.wide(layer.w1), layer.wide(layer.w2)
        given = dy[exchange.token]
        dweights[exchange.token, exchange.slot] = (given * self.back).sum(1)
        given = layer.choice.weights[exchange.token, exchange.slot][:, None] * given
        drows = np.empty((len(given), w1.shape[1]), given.dtype)
        terms = []

        def compute(batch: Batch, d: Array) -> Array:
            out, dz = batch.backward(d, w1, w2, layer.activation)
            terms.append((batch, d, dz))
            return out

        pending = exchange.go(given, travels)
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
        tx, tr, text = _check_route(x, router, k, normalize, capacity_factor, policy)
        weights = _check_experts(w1, w2, tx, tr.array.shape[1], activation, comm)
        both = _check_shared(shared, tx, weights[1].array.shape[2], activation)
        if not _is_positive(microbatches):
            raise LayoutError(f"microbatches={microbatches!r} must be an integer > 0")
        text += f", n={weights[1].array.shape[2]}, {activation}, microbatches={int(microbatches)}"
        text += ", no shared expert" if both is None else f", shared f={both[0].array.shape[1]}"
        return text, 0, (tx, tr, *weights, both)

    group, (tx, tr, t1, t2, both), _ = enter("moe", comm, check)
    choice = _choice(tx, tr, k, normalize, capacity_factor, policy)
    layer = Moe(tx, tr, t1, t2, both, group, activation, choice)
    counting = _count(choice, group)
    ends = offsets(split(len(tx.array), int(microbatches)))
    layer.parts = [Part(layer, range(a, b)) for a, b in pairwise(ends)]
    layer.shape = (len(tx.array), t2.array.shape[2])
    y = np.zeros(layer.shape, accumulator(tx.dtype))

    def meanwhile() -> Iterator[None]:  # while the first rows travel
        if both is not None:
            layer.shared_z = product.on(group, layer.wide(tx), layer.wide(both[0]))
            y[...] = product.on(group, activate.on(group, layer.shared_z, activation), layer.wide(both[1]))
        yield

    in_turns([*(part.forward(y) for part in layer.parts), meanwhile()])
    layer.tokens_per_expert, layer.dropped = _counted(counting)
    return give(y, tx), layer


def _backward_rows(layer: Moe, dy: Any, use: Callable[[list[Term]], None], meanwhile: Callable[[Any], None]) -> Any:
    """dx. `use` gets terms of the gradients of the experts, `meanwhile` gets what the replicated weights need."""
    array = enter("the backward of moe", layer.comm, lambda _: ("", 0, borrow_gradient(dy, layer.dtype, layer.shape)))[
        1
    ]
    given = np.ascontiguousarray(widen(array, layer.dtype))  # products of strided tensors round differently
    dx, dweights = np.zeros(layer.x.array.shape, given.dtype), np.zeros_like(layer.choice.shares)

    def local() -> Iterator[None]:
        dlogits = choose_backward(layer.choice, dweights)
        dx[...] = dlogits @ layer.wide(layer.router).T
        dz = None
        if layer.shared is not None and layer.shared_z is not None:
            s1, s2 = map(layer.wide, layer.shared)
            dh = product.on(layer.comm, given, s2.T)
            dz = activate_backward.on(layer.comm, layer.shared_z, dh, layer.activation)
            dx[...] += product.on(layer.comm, dz, s1.T)
        meanwhile((given, dlogits, dz))
        yield

    in_turns([*(part.backward(given, dweights, dx, use) for part in layer.parts), local()])
    return give(dx, layer.x)


class Gradient:
    """The gradients of the weights of a layer, which are added up term by term."""

    def __init__(self, layer: Moe):
        self.layer, dtype = layer, accumulator(layer.dtype)
        self.dw1, self.dw2 = np.zeros(layer.w1.array.shape, dtype), np.zeros(layer.w2.array.shape, dtype)
        self.sums: list[Any] = []

    def add(self, terms: list[Term]) -> None:
        for batch, d, dz in terms:
            batch.add_weight_gradients(d, dz, self.layer.activation, self.dw1, self.dw2)

    def start_sums(self, local: tuple[Array, Array, Array | None]) -> None:
        """Start to sum the gradients of the replicated weights over the ranks."""
        (dy, dlogits, dz), layer = local, self.layer
        comm, x_t = layer.comm, layer.wide(layer.x).T
        gradients = [product.on(comm, x_t, dlogits)]
        if dz is not None and layer.shared_z is not None:
            h = activate.on(comm, layer.shared_z, layer.activation)
            gradients += [product.on(comm, x_t, dz), product.on(comm, h.T, dy)]
        self.sums = [start(all_reduce, g, dtype=accumulator(layer.dtype), comm=layer.comm) for g in gradients]

    def result(self) -> Gradients:
        layer = self.layer
        drouter, *sums = map(arrived, self.sums)
        experts = give(self.dw1, layer.w1), give(self.dw2, layer.w2)
        shared = None if layer.shared is None else tuple(map(give, sums, layer.shared))
        return give(drouter, layer.router), *experts, shared


def _moe_backward(saved: Moe, dy: Any) -> Gradients:
    gradient = Gradient(saved)
    dx = _backward_rows(saved, dy, gradient.add, gradient.start_sums)
    return dx, *gradient.result()


def _moe_backward_input(saved: Moe, dy: Any) -> tuple[Gradients, Any]:
    terms: list[Term] = []
    local: list[Any] = []
    dx = _backward_rows(saved, dy, terms.extend, local.append)
    return (dx,), (saved, terms, local[0])


def _moe_backward_weight(rest: Any) -> Gradients:
    saved, terms, local = rest
    gradient = Gradient(saved)
    gradient.start_sums(local)
    gradient.add(terms)
    return gradient.result()


moe = Differentiable(
    _moe,
    _moe_backward,
    tensors=("x", "router", "w1", "w2", "shared"),
    inputs=1,
    backward_input=_moe_backward_input,
    backward_weight=_moe_backward_weight,
    name="moe",
)

# ------------------------------------------------------------------------------------------------------ the parts


@dataclass
class Gate:
    """What the backward of a route needs."""

    x: Tensor
    router: Tensor
    choice: Choice
    comm: Communicator


@dataclass
class Route:
    """Which rows go to which experts, with which weights. Made by `route`."""

    weights: Any
    """(rows, k), 0 for dropped rows. float32 for half types. Attached to autograd if x or the router is."""
    choice: Choice
    exchange: Exchange
    comm: Communicator
    tokens_per_expert: Array
    """How many rows of all ranks each expert gets."""
    dropped: int
    """How many choices of all ranks are dropped."""

    @property
    def experts(self) -> Array:
        """(rows, k): the chosen experts of each row, the best first."""
        return self.choice.experts

    @property
    def rows_per_expert(self) -> list[int]:
        """How many rows `dispatch` gives to each expert of this rank."""
        return self.exchange.counts


def _gate(
    x: Any,
    router: Any,
    *,
    k: int,
    comm: Any = None,
    normalize: bool = True,
    capacity_factor: float | None = None,
    policy: str = "probs",
    into: list[Gate] | None = None,
) -> tuple[Any, Gate]:
    """weights = softmax(x @ router)[the k best experts]. `into` gets the Gate too."""

    def check(_: Communicator) -> tuple[str, int, tuple[Tensor, Tensor]]:
        tx, tr, text = _check_route(x, router, k, normalize, capacity_factor, policy)
        return text, 0, (tx, tr)

    group, (tx, tr), _ = enter("route", comm, check)
    gate = Gate(tx, tr, _choice(tx, tr, k, normalize, capacity_factor, policy), group)
    if into is not None:
        into.append(gate)
    return dlpack.lend(gate.choice.weights, accumulator(tx.dtype), tx), gate


def _gate_backward(saved: Gate, dweights: Any) -> Gradients:
    dtype = accumulator(saved.x.dtype)
    shape = saved.choice.shares.shape
    d = enter("the backward of route", saved.comm, lambda _: ("", 0, borrow_gradient(dweights, dtype, shape)))[1]
    dlogits = choose_backward(saved.choice, d)
    x, router = widen(saved.x.array, saved.x.dtype), widen(saved.router.array, saved.x.dtype)
    drouter = call(all_reduce, x.T @ dlogits, dtype=dtype, comm=saved.comm)
    return give(dlogits @ router.T, saved.x), give(drouter, saved.router)


class _Routing:
    """r = Route(the k best experts of each row, and their weights)

    x: (rows of this rank, h), router: (h, experts), and the keywords are those of `moe`.

        r = route(x, router, k=2, comm=ep)
        r, saved = route.forward(x, router, k=2, comm=ep)
        dx, drouter = route.backward(saved, dweights)            # the gradient of r.weights, from `combine.backward`
    """

    _weights = Differentiable(_gate, _gate_backward, tensors=("x", "router"), inputs=1, name="route")
    backward = staticmethod(_gate_backward)

    def __call__(self, x: Any, router: Any, **options: Any) -> Route:
        into: list[Gate] = []
        weights = self._weights(x, router, into=into, **options)
        return self._route(weights, into[0])

    def forward(self, x: Any, router: Any, **options: Any) -> tuple[Route, Gate]:
        weights, gate = self._weights.forward(x, router, **options)
        return self._route(weights, gate), gate

    def _route(self, weights: Any, gate: Gate) -> Route:
        counting = _count(gate.choice, gate.comm)
        exchange = Exchange(gate.choice, range(len(gate.choice.kept)), gate.comm, apart=False)
        exchange.settle()
        return Route(weights, gate.choice, exchange, gate.comm, *_counted(counting))

    def __repr__(self) -> str:
        return f"<{__name__}.route>"


route = _Routing()


@dataclass
class Moved:
    """What the backward of `dispatch`, `experts` or `combine` needs."""

    route: Route
    tensors: tuple[Tensor, ...]
    shape: tuple[int, ...]  # of the result
    batch: Batch | None = None
    back: Array | None = None
    activation: str = ""

    @property
    def dtype(self) -> str:
        return self.tensors[0].dtype

    def given(self, name: str, dy: Any) -> Array:
        """The gradient of the result, as an array."""

        def check(_: Communicator) -> tuple[str, int, Array]:
            return "", 0, borrow_gradient(dy, self.dtype, self.shape)

        array: Array = enter(f"the backward of {name}", self.route.comm, check)[1]
        return array


def _dispatch(x: Any, route: Route) -> tuple[Any, Moved]:
    """y = the rows of all ranks for expert 0 of this rank, then those for expert 1, ...

    x: (rows of this rank, n). y: (sum(route.rows_per_expert), n). Rows of an expert stand in the order of their ranks.
    """

    def check(_: Communicator) -> tuple[str, int, Tensor]:
        tensor = borrow(x, "x", None, 2)
        _check_rows("x", tensor, len(route.choice.kept))
        return f"{tensor.dtype}, n={tensor.array.shape[1]}", 0, tensor

    tensor = enter("dispatch", route.comm, check)[1]
    exchange = route.exchange
    rows = exchange.came(exchange.go(tensor.array[exchange.token], tensor.dtype))
    return dlpack.lend(rows, tensor.dtype, tensor), Moved(route, (tensor,), rows.shape)


def _dispatch_backward(saved: Moved, dy: Any) -> Gradients:
    dtype = accumulator(saved.dtype)
    given = widen(saved.given("dispatch", dy), saved.dtype)
    dx = np.zeros(saved.tensors[0].array.shape, dtype)
    saved.route.exchange.add(arrived(saved.route.exchange.go_back(given, dtype)), dx)
    return (give(dx, saved.tensors[0]),)


def _experts(x: Any, w1: Any, w2: Any, route: Route, *, activation: str = "silu") -> tuple[Any, Moved]:
    """y = activation(x @ w1[e]) @ w2[e], for the rows of each expert e of this rank

    x: the rows that `dispatch` gave. w1: (experts of this rank, h, f). w2: (experts of this rank, f, n).
    """

    def check(comm: Communicator) -> tuple[str, int, tuple[Tensor, ...]]:
        tx = borrow(x, "x", None, 2)
        _check_rows("x", tx, sum(route.rows_per_expert))
        tensors = (tx, *_check_experts(w1, w2, tx, len(route.tokens_per_expert), activation, comm))
        return f"{tx.dtype}, {activation}, n={tensors[2].array.shape[2]}", 0, tensors

    tensors = enter("experts", route.comm, check)[1]
    rows, v1, v2 = (widen(t.array, t.dtype) for t in tensors)
    batch, y = Batch.forward(rows, route.rows_per_expert, v1, v2, activation, route.comm)
    return give(y, tensors[0]), Moved(route, tensors, y.shape, batch, activation=activation)


def _experts_backward(saved: Moved, dy: Any) -> Gradients:
    d = widen(saved.given("experts", dy), saved.dtype)
    w1, w2 = (widen(t.array, t.dtype) for t in saved.tensors[1:])
    dw1, dw2, batch = np.zeros_like(w1), np.zeros_like(w2), saved.batch
    assert batch is not None
    dx, dz = batch.backward(d, w1, w2, saved.activation)
    batch.add_weight_gradients(d, dz, saved.activation, dw1, dw2)
    return tuple(map(give, (dx, dw1, dw2), saved.tensors))


def _combine(y: Any, route: Route, weights: Any = None) -> tuple[Any, Moved]:
    """x[i] = sum(route.weights[i, j] * (the row of y that expert j of row i has made) for j in range(k))

    y: (sum(route.rows_per_expert), n), in the order of `dispatch`. x: (rows of this rank, n). `weights` are those of
    the route, unless they are given. The gradients are those of y and of the weights.
    """

    def check(_: Communicator) -> tuple[str, int, tuple[Tensor, Tensor]]:
        ty, tw = borrow(y, "y", None, 2), borrow(route.weights if weights is None else weights, "weights", None, 2)
        _check_rows("y", ty, sum(route.rows_per_expert))
        if tw.dtype != accumulator(ty.dtype):
            raise DtypeError(f"weights have dtype {tw.dtype}: they must have {accumulator(ty.dtype)}")
        if tw.array.shape != route.choice.kept.shape:
            raise ShapeError(f"weights have the shape {tw.array.shape}: it must be {route.choice.kept.shape}")
        return f"{ty.dtype}, n={ty.array.shape[1]}", 0, (ty, tw)

    ty, tw = enter("combine", route.comm, check)[1]
    exchange, dtype = route.exchange, ty.dtype
    back = widen(arrived(exchange.go_back(ty.array, dtype)), dtype)
    out = np.zeros((len(route.choice.kept), ty.array.shape[1]), accumulator(dtype))
    exchange.add(tw.array[exchange.token, exchange.slot][:, None] * back, out)
    return give(out, ty), Moved(route, (ty, tw), out.shape, back=back)


def _combine_backward(saved: Moved, dy: Any) -> Gradients:
    ty, tw = saved.tensors
    exchange, dtype = saved.route.exchange, accumulator(saved.dtype)
    given = widen(saved.given("combine", dy), saved.dtype)[exchange.token]
    dweights = np.zeros(tw.array.shape, dtype)
    dweights[exchange.token, exchange.slot] = (given * saved.back).sum(1)
    weighted = tw.array[exchange.token, exchange.slot][:, None] * given
    return give(exchange.came(exchange.go(weighted, dtype)), ty), give(dweights, tw)


class _Combine(Differentiable):
    def read(self, args: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
        given = super().read(args, options)
        if given["weights"] is None:  # they have a gradient
            given["weights"] = given["route"].weights
        return given


dispatch = Differentiable(_dispatch, _dispatch_backward, tensors=("x",), inputs=1, name="dispatch")
experts = Differentiable(_experts, _experts_backward, tensors=("x", "w1", "w2"), inputs=1, name="experts")
combine = _Combine(_combine, _combine_backward, tensors=("y", "weights"), inputs=2, name="combine")

# --------------------------------------------------------------------------------------------------------- checks


def _check_route(
    x: Any, router: Any, k: int, normalize: bool, capacity_factor: float | None, policy: str
) -> tuple[Tensor, Tensor, str]:
    """The tensors of a route, and what must be the same on all ranks."""
    tx = borrow(x, "x", None, 2)
    tr = borrow(router, "router", tx, 2)
    h, experts = tr.array.shape
    if tx.array.shape[1] != h:
        raise ShapeError(f"x has {tx.array.shape[1]} features, but the router has {h} rows: they must be equal")
    if not _is_positive(k) or k > experts:
        raise LayoutError(f"k={k!r} must be an integer from 1 to {experts}, the number of experts")
    if policy not in POLICIES:
        raise PlanError(f"policy={policy!r} must be one of {', '.join(POLICIES)}")
    if capacity_factor is not None and not 0 < capacity_factor < math.inf:
        raise LayoutError(f"capacity_factor={capacity_factor!r} must be a number > 0, or None to drop no row")
    return (
        tx,
        tr,
        f"{tx.dtype}, {h=}, {experts=}, k={int(k)}, normalize={bool(normalize)}, {capacity_factor=}, {policy}",
    )


def _check_experts(
    w1: Any, w2: Any, x: Tensor, experts: int, activation: str, comm: Communicator
) -> tuple[Tensor, Tensor]:
    t1, t2 = borrow(w1, "w1", x, 3), borrow(w2, "w2", x, 3)
    mine = experts_of(comm.rank, comm.size, experts)
    for name, tensor in (("w1", t1), ("w2", t2)):
        if len(tensor.array) != len(mine):
            raise LayoutError(
                f"{name} has {len(tensor.array)} experts, but {experts} experts on {comm.size} ranks are dealt out as "
                f"{list(split(experts, comm.size))}: rank {comm.rank} has {len(mine)}"
            )
    _check_widths("w1", "w2", t1.array.shape[1:], t2.array.shape[1:], x, activation)
    return t1, t2


def _check_shared(shared: Any, x: Tensor, n: int, activation: str) -> tuple[Tensor, Tensor] | None:
    if shared is None:
        return None
    if not isinstance(shared, (tuple, list)) or len(shared) != 2:
        raise ShapeError(f"shared must be None or (s1, s2), not {type(shared).__name__}")
    s1, s2 = borrow(shared[0], "s1", x, 2), borrow(shared[1], "s2", x, 2)
    _check_widths("s1", "s2", s1.array.shape, s2.array.shape, x, activation)
    if s2.array.shape[1] != n:
        raise ShapeError(f"s2 has {s2.array.shape[1]} columns, but w2 has {n}: their results are added")
    return s1, s2


def _check_widths(first: str, second: str, a: tuple[int, ...], b: tuple[int, ...], x: Tensor, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise PlanError(f"activation={activation!r} must be one of {', '.join(ACTIVATIONS)}")
    if a[0] != x.array.shape[1]:
        raise ShapeError(f"{first} has {a[0]} rows, but x has {x.array.shape[1]} features: they must be equal")
    if activation == "swiglu" and a[1] % 2:
        raise ShapeError(f"swiglu halves the features: {first} has {a[1]} columns, an odd number")
    features = a[1] // 2 if activation == "swiglu" else a[1]
    if b[0] != features:
        raise ShapeError(f"{second} has {b[0]} rows, but {first} with {activation} gives {features} features")


def _check_rows(name: str, tensor: Tensor, rows: int) -> None:
    if len(tensor.array) != rows:
        raise ShapeError(f"{name} has {len(tensor.array)} rows, but the route has {rows} here")


def _is_positive(n: Any) -> bool:
    return isinstance(n, (int, np.integer)) and not isinstance(n, bool) and int(n) > 0


def _choice(x: Tensor, router: Tensor, k: int, normalize: bool, capacity_factor: float | None, policy: str) -> Choice:
    """The experts that the rows of this rank choose."""
    experts = router.array.shape[1]
    capacity = None if capacity_factor is None else math.ceil(capacity_factor * k * len(x.array) / experts)
    logits = widen(x.array, x.dtype) @ widen(router.array, x.dtype)
    return choose(logits, k, normalize, capacity, policy)


def _count(choice: Choice, comm: Communicator) -> Any:
    """Start to count the rows of each expert, and the dropped ones, on all ranks."""
    here = np.bincount(choice.experts[choice.kept], minlength=choice.probabilities.shape[1])
    counts = np.append(here, (~choice.kept).sum()).astype(np.int64)
    return start(all_reduce, counts, dtype="int64", comm=comm)


def _counted(counting: Any) -> tuple[Array, int]:
    counts = arrived(counting)
    return counts[:-1].copy(), int(counts[-1])
