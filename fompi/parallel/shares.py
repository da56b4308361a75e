"""Shares of unequal ranks: what each rank gets of something, from `shares=` of a strategy, a module or a wrapper.

    shares = fompi.balance("laptops.json", "llama-1b")        # or a list for each rank, or {"heads": [4, 2, 2], ...}
    dealt(shares, "columns", 8192, comm.size)

Each user compares what it was dealt with the other ranks, in the agreement with which it begins anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from fompi.base.errors import LayoutError, quoted
from fompi.base.layout import integer, number, offsets, split
from fompi.planner.balance import NAMES


def listed(shares: Any, kind: str, size: int) -> list[Any]:
    """The numbers of the ranks for this kind of unit. Raises LayoutError for what are no such numbers."""
    shares = getattr(shares, "counts", shares)  # those of a Balance
    if isinstance(shares, Mapping):
        if unknown := [name for name in shares if name not in NAMES]:
            raise LayoutError(f"shares= has {quoted(unknown[0], NAMES)}: it has some of {', '.join(NAMES)}")
        if kind not in shares:
            how = "; fompi.balance(..., task='train') has them" if kind in ("rows", "state") else ""
            raise LayoutError(f"shares= has no {kind}, but {', '.join(shares)}{how}")
        shares = shares[kind]
    if not isinstance(shares, Sequence) or isinstance(shares, str):
        raise LayoutError(f"shares={shares!r} must be what fompi.balance returns, or a number of {kind} for each rank")
    if len(shares) != size:
        raise LayoutError(f"shares={[*shares]} are {len(shares)} numbers of {kind}, but there are {size} ranks")
    return [*shares]


def dealt(shares: Any, kind: str, total: int, size: int) -> tuple[int, ...]:
    """dealt([2, 1, 1], "columns", 8, 3) == (4, 2, 2): how many of `total` units each rank gets

    Without `shares` as evenly as possible. Their sum is `total`, or divides it: then they count larger units. Raises
    LayoutError for a wrong length, for numbers that are no integers >= 0, and for a sum that does not fit.
    """
    if shares is None:
        return split(total, size)
    given = listed(shares, kind, size)
    counts = [*map(integer, given)]
    if any(n is None or n < 0 for n in counts):
        raise LayoutError(f"shares={given} of {kind} must be integers >= 0")
    units = sum(n for n in counts if n is not None)
    if not units or total % units:
        raise LayoutError(
            f"shares={given} of {kind} add up to {units}, but there are {total}: it must be that, or divide it"
        )
    return tuple(total // units * n for n in counts if n is not None)


def features(shares: Any, total: int, size: int) -> tuple[int, ...]:
    """`dealt` of the features of a linear layer: those of columns, if there are `total` of these, else of heads."""
    named = getattr(shares, "counts", shares)
    is_mlp = not isinstance(named, Mapping) or sum(named.get("columns", ())) == total or "heads" not in named
    return dealt(shares, "columns" if is_mlp else "heads", total, size)


def weights(shares: Any, kind: str, size: int) -> tuple[float, ...]:
    """weights([2, 1, 1], "rows", 3) == (0.5, 0.25, 0.25): the part of each rank, where only proportions count.

    Raises LayoutError for a wrong length, and unless one number is above 0.
    """
    given = listed(shares, kind, size)
    found = [*map(number, given)]
    if any(n is None or n < 0 for n in found) or not any(found):
        raise LayoutError(f"shares={given} of {kind} must be numbers >= 0, and one of them above 0")
    total = sum(n for n in found if n is not None)
    return tuple(n / total for n in found if n is not None)


def in_proportion(total: int, parts: Sequence[float]) -> list[int]:
    """The first of `total` elements of each part, and the end. A part of 0 gets none."""
    whole = sum(parts) or 1
    return [round(total * part / whole) for part in accumulate(parts, initial=0)]


class DataShares(NamedTuple):
    """The shares of data parallelism, as proportions: of the rows, and of the state of ZeRO. Empty: all alike."""

    rows: tuple[float, ...] = ()
    state: tuple[float, ...] = ()

    @classmethod
    def of(cls, shares: Any, size: int) -> DataShares:
        """Those of `shares=`. A list for each rank is that of the rows. Raises LayoutError."""
        if shares is None:
            return cls()
        named = getattr(shares, "counts", shares)
        is_named = isinstance(named, Mapping)
        rows = () if is_named and "state" in named and "rows" not in named else weights(shares, "rows", size)
        return cls(rows, weights(shares, "state", size) if is_named and "state" in named else ())

    def factor(self, rank: int) -> float:
        """What a gradient of this rank is multiplied by, so that the mean over the ranks is that over all rows."""
        return self.rows[rank] * len(self.rows) if self.rows else 1.0

    def edges(self, total: int, size: int) -> list[int]:
        """The first of `total` elements that each rank keeps, and the end."""
        return in_proportion(total, self.state) if self.state else offsets(split(total, size))

    def __str__(self) -> str:
        """What must be the same on all ranks."""
        return f", shares of rows {[*self.rows]} and state {[*self.state]}" if any(self) else ""
