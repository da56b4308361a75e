"""Which experts the rows of a rank choose, with which weights, and how many rows every expert gets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fompi.backends.numbers import counting, filled, wide_product
from fompi.base.errors import LayoutError, PlanError, ShapeError, quoted
from fompi.base.layout import integer, number, offsets
from fompi.engine.communicator import Communicator
from fompi.parallel.arrays import Array, arrived, borrow, start_sum
from fompi.parallel.shares import dealt
from fompi.tensors.dlpack import Tensor

POLICIES = ("probs", "position")


@dataclass
class Choice:
    """Which experts the rows of this rank have chosen."""

    probabilities: Array  # (rows, experts)
    experts: Array  # (rows, k)
    shares: Array  # (rows, k): the weights before any row is dropped
    kept: Array  # (rows, k): False where the expert is full
    normalize: bool
    held: tuple[int, ...] = ()  # how many experts each rank has

    @property
    def weights(self) -> Array:
        """(rows, k), 0 for dropped rows."""
        return np.where(self.kept, self.shares, self.shares.dtype.type(0))


def choose(logits: Array, k: int, normalize: bool, capacity: int | None, policy: str) -> Choice:
    """The k experts with the greatest logits, ties to the lower expert. Each expert keeps `capacity` rows."""
    rows, experts = logits.shape
    best = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    e = np.exp(logits - logits.max(1, keepdims=True))
    probabilities = e / e.sum(1, keepdims=True)
    shares = np.take_along_axis(probabilities, best, 1)
    if normalize:
        shares = shares / shares.sum(1, keepdims=True)
    kept = filled((rows, k), bool, True, logits)
    if capacity is not None:
        flat = best.reshape(-1)
        order = counting(rows * k, logits)
        if policy == "probs":  # the greatest weights stay, ties to the earlier row
            order = np.argsort(-shares.reshape(-1), kind="stable")
        order = order[np.argsort(flat[order], kind="stable")]  # expert by expert
        sorted_by_expert = flat[order]
        first: Any = np.searchsorted(sorted_by_expert, counting(experts, logits))
        within = np.empty_like(order)
        within[order] = counting(rows * k, logits) - first[sorted_by_expert]
        kept = (within < capacity).reshape(rows, k)
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


def experts_of(rank: int, size: int, experts: int, shares: Any = None) -> range:
    """The experts that a rank holds."""
    ends = offsets(dealt(shares, "experts", experts, size))
    return range(ends[rank], ends[rank + 1])


def check_choice(experts: int, k: Any, capacity_factor: Any, policy: Any) -> None:
    if not 0 < (integer(k) or 0) <= experts:
        raise LayoutError(f"k={k!r} must be an integer from 1 to {experts}, the number of experts")
    if policy not in POLICIES:
        raise PlanError(f"policy={quoted(policy, POLICIES)} must be one of {', '.join(POLICIES)}")
    if capacity_factor is not None and (number(capacity_factor) or 0.0) <= 0:
        raise LayoutError(f"capacity_factor={capacity_factor!r} must be a number > 0, or None to drop no row")


def check_route(
    x: Any, router: Any, k: int, normalize: bool, capacity_factor: float | None, policy: str, shares: Any, size: int
) -> tuple[Tensor, Tensor, tuple[int, ...], str]:
    """The tensors of a route, how many experts each rank has, and what must be the same on all ranks."""
    tx = borrow(x, "x", None, 2)
    tr = borrow(router, "router", tx, 2)
    h, experts = tr.array.shape
    if tx.array.shape[1] != h:
        raise ShapeError(f"x has {tx.array.shape[1]} features, but the router has {h} rows: they must be equal")
    check_choice(experts, k, capacity_factor, policy)
    held = dealt(shares, "experts", experts, size)
    text = f"{tx.dtype}, {h=}, {experts=}, k={int(k)}, normalize={bool(normalize)}, {capacity_factor=}, {policy}"
    text += "" if shares is None else f", shares={[*held]}"
    return tx, tr, held, text


def chosen(
    x: Tensor, router: Tensor, held: tuple[int, ...], k: int, normalize: bool, factor: float | None, policy: str
) -> Choice:
    """The experts that the rows of this rank choose. `held`: how many each rank has."""
    capacity = None if factor is None else math.ceil(factor * k * len(x.array) / sum(held))
    choice = choose(wide_product(x.array, router.array, x.dtype), k, normalize, capacity, policy)
    choice.held = held
    return choice


def start_count(choice: Choice, here: Array, comm: Communicator) -> Any:
    """Start to count the rows of each expert, and the dropped ones, on all ranks. `here`: those of this rank."""
    rows, k = choice.experts.shape
    counts = np.append(here, rows * k - here.sum()).astype(np.int64)
    return start_sum(counts, "int64", comm)


def counted(counting: Any) -> tuple[Array, int]:
    counts = arrived(counting)
    return counts[:-1].copy(), int(counts[-1])
