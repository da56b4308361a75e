"""Expert parallelism in parts, for experts of your own: route, dispatch, experts, combine.

    r = route(x, router, k=2, comm=ep)
    rows = dispatch(x, r)                             # the rows for the experts of this rank, expert by expert
    y = combine(experts(rows, w1, w2, r), r)

`fompi.parallel.expert` has them too, and the whole layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fompi.backends.numbers import filled, widen
from fompi.base.errors import DtypeError, LayoutError, ShapeError
from fompi.base.layout import accumulator
from fompi.engine.communicator import Communicator
from fompi.parallel.arrays import Array, Kept, arrived, borrow, enter, enter_backward, give, lent, start_sum
from fompi.parallel.choices import Choice, check_route, choose_backward, chosen, counted, start_count
from fompi.parallel.differentiable import Differentiable, Gradients
from fompi.parallel.exchange import Batch, Exchange, check_experts
from fompi.parallel.section import in_section
from fompi.tensors.dlpack import Tensor


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
    shares: Any = None,
) -> tuple[Any, Kept]:
    """weights = softmax(x @ router)[the k best experts]"""

    def check(comm: Communicator) -> tuple[str, int, Any]:
        *routed, text = check_route(x, router, k, normalize, capacity_factor, policy, shares, comm.size)
        return text, 0, routed

    group, (tx, tr, held), _ = enter("route", comm, check)
    choice, dtype = chosen(tx, tr, held, k, normalize, capacity_factor, policy), accumulator(tx.dtype)
    return lent(choice.weights, tx, dtype), Kept(tx, choice.shares.shape, dtype, router=tr, choice=choice, comm=group)


def _gate_backward(saved: Kept, dweights: Any) -> Gradients:
    dlogits = choose_backward(saved.choice, enter_backward("route", saved, dweights))
    x, router = widen(saved.x.array, saved.x.dtype), widen(saved.router.array, saved.x.dtype)
    drouter = arrived(start_sum(x.T @ dlogits, saved.dtype, saved.comm))
    return give(dlogits @ router.T, saved.x), give(drouter, saved.router)


class _Routing:
    """r = Route(the k best experts of each row, and their weights)

    x: (rows of this rank, h), router: (h, experts), and the keywords are those of `moe`. A wire is that
    of the rows in `dispatch` and `combine`, forward and backward.

        r = route(x, router, k=2, comm=ep)
        r, saved = route.forward(x, router, k=2, comm=ep)
        dx, drouter = route.backward(saved, dweights)            # the gradient of r.weights, from `combine.backward`
    """

    _weights = Differentiable(_gate, _gate_backward, tensors=("x", "router"), inputs=1, name="route")
    backward = staticmethod(_weights.backward)

    @in_section("route")
    def __call__(self, x: Any, router: Any, **options: Any) -> Route:
        kept: list[Kept] = []
        weights = self._weights.watched(kept.append)(x, router, **options)
        return self._route(weights, kept[0])

    @in_section("route")
    def forward(self, x: Any, router: Any, **options: Any) -> tuple[Route, Kept]:
        weights, gate = self._weights.forward(x, router, **options)
        return self._route(weights, gate), gate

    def _route(self, weights: Any, gate: Kept) -> Route:
        exchange = Exchange(gate.choice, range(len(gate.choice.kept)), gate.comm, apart=False)
        exchange.announce()
        counting = start_count(gate.choice, exchange.chosen, gate.comm)
        exchange.settle()
        return Route(weights, gate.choice, exchange, gate.comm, *counted(counting))

    def __repr__(self) -> str:
        return "<fompi.parallel.expert.route>"


route = _Routing()


def _moved(route: Route, *tensors: Tensor, shape: tuple[int, ...], **more: Any) -> Kept:
    """What the backward of `dispatch`, `experts` or `combine` needs."""
    return Kept(tensors[0], shape, comm=route.comm, route=route, tensors=tensors, **more)


def _dispatch(x: Any, route: Route) -> tuple[Any, Kept]:
    """y = the rows of all ranks for expert 0 of this rank, then those for expert 1, ...

    x: (rows of this rank, n). y: (sum(route.rows_per_expert), n). Rows of an expert stand in the order of their ranks.
    """

    def check(_: Communicator) -> tuple[str, int, Tensor]:
        tensor = borrow(x, "x", None, 2)
        _check_rows("x", tensor, len(route.choice.kept))
        return f"{tensor.dtype}, n={tensor.array.shape[1]}", 0, tensor

    tensor = enter("dispatch", _routed(route).comm, check)[1]
    exchange = route.exchange
    rows = exchange.came(exchange.go(tensor.array[exchange.token], tensor.dtype))
    return lent(rows, tensor), _moved(route, tensor, shape=rows.shape)


def _dispatch_backward(saved: Kept, dy: Any) -> Gradients:
    dtype = accumulator(saved.dtype)
    given = widen(enter_backward("dispatch", saved, dy), saved.dtype)
    dx = filled(saved.tensors[0].array.shape, dtype, 0, given)
    saved.route.exchange.add(arrived(saved.route.exchange.go_back(given, dtype)), dx)
    return (give(dx, saved.tensors[0]),)


def _experts(x: Any, w1: Any, w2: Any, route: Route, *, activation: str = "silu") -> tuple[Any, Kept]:
    """y = activation(x @ w1[e]) @ w2[e], for the rows of each expert e of this rank

    x: the rows that `dispatch` gave. w1: (experts of this rank, h, f). w2: (experts of this rank, f, n).
    """

    def check(comm: Communicator) -> tuple[str, int, tuple[Tensor, ...]]:
        tx = borrow(x, "x", None, 2)
        _check_rows("x", tx, sum(route.rows_per_expert))
        tensors = (tx, *check_experts(w1, w2, tx, route.choice.held, activation, comm))
        return f"{tx.dtype}, {activation}, n={tensors[2].array.shape[2]}", 0, tensors

    tensors = enter("experts", _routed(route).comm, check)[1]
    rows, v1, v2 = (widen(t.array, t.dtype) for t in tensors)
    batch, y = Batch.forward(rows, route.rows_per_expert, v1, v2, activation)
    return give(y, tensors[0]), _moved(route, *tensors, shape=y.shape, batch=batch, activation=activation)


def _experts_backward(saved: Kept, dy: Any) -> Gradients:
    d = widen(enter_backward("experts", saved, dy), saved.dtype)
    w1, w2 = (widen(t.array, t.dtype) for t in saved.tensors[1:])
    dw1, dw2, batch = np.zeros_like(w1), np.zeros_like(w2), saved.batch
    dx, dz = batch.backward(d, w1, w2, saved.activation)
    batch.add_weight_gradients(d, dz, saved.activation, dw1, dw2)
    return tuple(map(give, (dx, dw1, dw2), saved.tensors))


def _combine(y: Any, route: Route, weights: Any = None) -> tuple[Any, Kept]:
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

    ty, tw = enter("combine", _routed(route).comm, check)[1]
    exchange, dtype = route.exchange, ty.dtype
    back = widen(arrived(exchange.go_back(ty.array, dtype)), dtype)
    out = filled((len(route.choice.kept), ty.array.shape[1]), accumulator(dtype), 0, back)
    exchange.add(back, out, tw.array)
    return give(out, ty), _moved(route, ty, tw, shape=out.shape, back=back)


def _combine_backward(saved: Kept, dy: Any) -> Gradients:
    ty, tw = saved.tensors
    exchange, dtype = saved.route.exchange, accumulator(saved.dtype)
    given = widen(enter_backward("combine", saved, dy), saved.dtype)[exchange.token]
    dweights = filled(tw.array.shape, dtype, 0, given)
    dweights[exchange.token, exchange.slot] = (given * saved.back).sum(1)
    weighted = tw.array[exchange.token, exchange.slot][:, None] * given
    return give(exchange.came(exchange.go(weighted, dtype)), ty), give(dweights, tw)


def _routed(route: Any) -> Route:
    if not isinstance(route, Route):
        raise LayoutError(f"route must be what fompi.parallel.expert.route has returned, not {type(route).__name__}")
    return route


def _check_rows(name: str, tensor: Tensor, rows: int) -> None:
    if len(tensor.array) != rows:
        raise ShapeError(f"{name} has {len(tensor.array)} rows, but the route has {rows} here")


class _Combine(Differentiable):
    def read(self, args: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
        given = super().read(args, options)
        if given["weights"] is None:  # they have a gradient
            given["weights"] = _routed(given["route"]).weights
        return given


dispatch = Differentiable(_dispatch, _dispatch_backward, tensors=("x",), inputs=1)
experts = Differentiable(_experts, _experts_backward, tensors=("x", "w1", "w2"), inputs=1)
combine = _Combine(_combine, _combine_backward, tensors=("y", "weights"), inputs=2)
