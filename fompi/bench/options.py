"""How much a suite measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """How much is measured: rounds of every row, and with `quick` fewer and smaller rows."""

    rounds: int
    quick: bool
