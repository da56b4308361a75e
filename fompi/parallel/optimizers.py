"""Optimizers on runs of numbers, without MPI.

An optimizer has `state(p) -> dict` and `update(p, g, state)`, which writes p and the state in place. p and g are arrays
of one dimension, of float32 or float64: a part of a parameter, or nothing of it. An object of your own will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fompi.backends.numbers import narrow, widen
from fompi.base.errors import DtypeError, LayoutError
from fompi.base.layout import HALF, number

Array = np.ndarray[Any, Any]
State = dict[str, Any]

MASTER = "master"
"""The key of a parameter as it is, where the program has it in a half type or as messages bring it."""

_quiet = np.errstate(all="ignore")
"""A square that is too small is 0, whatever `np.seterr` of the program says."""


class Optimizer(Protocol):
    """What `DataParallel` needs from an optimizer."""

    def state(self, p: Array) -> State:
        """What the optimizer keeps for `p`, before the first update."""

    def update(self, p: Array, g: Array, state: State) -> None:
        """Write the new `p` and the new state."""


def state_of(optimizer: Optimizer, p: Array, dtype: str) -> State:
    """What is kept for p before the first update: of a half type, also its float32 copy."""
    wide = widen(p, dtype)
    state = optimizer.state(wide)
    if wide is not p:
        state[MASTER] = wide
    return state


def update(optimizer: Optimizer, p: Array, g: Array, state: State, dtype: str) -> None:
    """Write the new p and the new state. Of a half type the float32 copy is updated, and p is that, rounded."""
    if dtype not in HALF:
        optimizer.update(p, g, state)
        return
    wide = widen(p, dtype)
    master = state.pop(MASTER, wide)
    np.copyto(master, wide, where=p.view(np.uint16) != narrow(master, dtype).view(np.uint16))  # the program has written
    optimizer.update(master, g, state)
    state[MASTER], p[...] = master, narrow(master, dtype)


@dataclass
class SGD:
    """m = momentum * m + (g + weight_decay * p); p -= lr * m

    As torch.optim.SGD: the first m is the first gradient. `lr` may be changed between steps, on all ranks alike.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "lr", "momentum", "weight_decay")

    def state(self, p: Array) -> State:
        _check_dtype(p)
        return {"momentum": np.zeros_like(p)} if self.momentum else {}

    @_quiet
    def update(self, p: Array, g: Array, state: State) -> None:
        if self.weight_decay:
            g = g + self.weight_decay * p
        if self.momentum:
            m = state["momentum"]
            m *= self.momentum
            m += g
            g = m
        p -= self.lr * g


@dataclass
class AdamW:
    """m = mean of g; v = mean of g**2; p -= lr * (m / (sqrt(v) + eps) + weight_decay * p)

    As torch.optim.AdamW: the means are exponential, with `betas`, and corrected for their start at 0. `lr` may be
    changed between steps, on all ranks alike.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        _check(self, "lr", "eps", "weight_decay")
        betas = self.betas if isinstance(self.betas, (tuple, list)) else ()
        if len(betas) != 2 or not all(0 <= (-1 if (beta := number(b)) is None else beta) < 1 for b in betas):
            raise LayoutError(f"AdamW: betas={self.betas!r} must be two numbers of at least 0 and less than 1")

    def state(self, p: Array) -> State:
        _check_dtype(p)
        return {"mean": np.zeros_like(p), "square": np.zeros_like(p), "steps": 0}

    @_quiet
    def update(self, p: Array, g: Array, state: State) -> None:
        first, second = self.betas
        m, v = state["mean"], state["square"]
        state["steps"] += 1
        p *= 1 - self.lr * self.weight_decay
        m += (g - m) * (1 - first)
        v *= second
        v += g * g * (1 - second)
        root = np.sqrt(v) / float(np.sqrt(1 - second ** state["steps"]))
        p -= self.lr / (1 - first ** state["steps"]) * (m / (root + self.eps))


def _check_dtype(p: Array) -> None:
    """Raise DtypeError for a half type, in which eps is 0 and small steps are lost."""
    if p.dtype.itemsize < 4:
        raise DtypeError(f"an optimizer updates float32 or float64, not {p.dtype}: give it a float32 copy")


def _check(optimizer: Any, *names: str) -> None:
    """Raise LayoutError if one of these options is not a number of at least 0."""
    for name in names:
        value = number(getattr(optimizer, name))
        if value is None or value < 0:
            given = getattr(optimizer, name)
            raise LayoutError(f"{type(optimizer).__name__}: {name}={given!r} must be a finite number of at least 0")
