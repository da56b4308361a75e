"""The order in which a sum adds its terms, where one is asked for: a fixed binary tree.

    order="ranks"        tree(5) = ((0 + 1) + (2 + 3)) + 4, of the terms of ranks 0 to 4
    order=Canonical(8)   tree(8), of 8 leaves, whatever the number of ranks

A node of n leaves is the node of its first m leaves plus the node of the others, where m is the largest power of two
that is less than n. So 2**i leaves from a multiple of 2**i on are a node, however many leaves follow them.
Floating-point addition is not associative: only the same tree gives the same bits, whatever the schedule, the slices
and the sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from fompi.base.errors import PlanError
from fompi.base.layout import offsets, split
from fompi.plans.kernels import Value, mean_of, ordered_pair

T = TypeVar("T")


def first_half(leaves: int) -> int:
    """How many of at least two leaves are in the first half of their node."""
    return 1 << (leaves - 1).bit_length() - 1


def middle_of(ends: Sequence[int], low: int, high: int) -> int:
    """Where the node of the terms from `low` to `high` is divided. Term i has the leaves ends[i] to ends[i + 1]."""
    middle = ends[low] + first_half(ends[high] - ends[low])
    return low + sum([end < middle for end in ends[low:high]])  # torch.compile does not read bisect


def folded(terms: Sequence[T], node: Callable[[T, T], T], sizes: Sequence[int] = ()) -> T:
    """The root of the tree over these terms, of which there is at least one. `sizes` are their leaves, 1 by default.

    Each term is a node of the tree.
    """
    ends = offsets(sizes or [1] * len(terms))

    def root(low: int, high: int) -> T:
        if high - low == 1:
            return terms[low]
        middle = middle_of(ends, low, high)
        return node(root(low, middle), root(middle, high))

    return root(0, len(terms))


def subtrees(leaves: int, begin: int, end: int) -> tuple[int, ...]:
    """The leaves from `begin` to `end` as few nodes of the tree over `leaves` leaves: how many leaves each has."""

    def parts(low: int, high: int) -> list[int]:
        if begin >= high or end <= low:
            return []
        if begin <= low and high <= end:
            return [high - low]
        middle = low + first_half(high - low)
        return [*parts(low, middle), *parts(middle, high)]

    return tuple(parts(0, leaves))


@dataclass(frozen=True)
class Canonical:
    """order=Canonical(k): a sum is the tree over k leaves, which do not depend on the number of ranks.

        fompi.matmul_all_reduce(h, w, order=fompi.Canonical(8))         # the contraction of all ranks in 8 equal pieces
        fompi.all_reduce([g0, g1], order=fompi.Canonical(8))            # the two leaves of this rank, of four ranks

    Rank r has the r-th run of leaves, as even as possible. Every leaf of a product, and every other product, is a chain
    of fused multiply-adds in the order of the contraction, whatever rows and columns a call has. Where k is not the
    number of ranks times 2**i, a rank has several subtrees, and each of them travels. The list may also have the sums
    of these (`subtrees`), if the caller has added the leaves as they came.

    `shares`: how many leaves each rank has, if they are not as even as possible: Canonical(8, (4, 2, 2)). The bits are
    the same.
    """

    leaves: int
    shares: tuple[int, ...] = ()
    name: str = field(init=False, repr=False, compare=False)  # kept: torch.compile makes no text of an integer

    def __post_init__(self) -> None:
        if isinstance(self.leaves, bool) or not isinstance(self.leaves, int) or self.leaves < 1:
            raise PlanError(f"Canonical({self.leaves!r}): the number of leaves must be an integer > 0")
        if self.shares and (min(self.shares) < 1 or sum(self.shares) != self.leaves):
            raise PlanError(
                f"Canonical({self.leaves}, {self.shares}): each rank needs a leaf, and all are {self.leaves}"
            )
        dealt = f":{','.join(map(str, self.shares))}" if self.shares else ""
        object.__setattr__(self, "name", f"canonical({self.leaves}{dealt})")

    def __str__(self) -> str:
        return self.name

    @classmethod
    def of(cls, order: str) -> Canonical | None:
        """The order with this name. None: it is another one."""
        found = re.fullmatch(r"canonical\((\d{1,9})(?::([\d,]+))?\)", order)
        return None if found is None else cls(int(found[1]), tuple(int(n) for n in (found[2] or "").split(",") if n))

    def counts(self, size: int) -> tuple[int, ...]:
        """How many leaves each of `size` ranks has. Raises PlanError if one has none."""
        if size > self.leaves:
            raise PlanError(f"order={self}: {size} ranks need as many leaves at least")
        if self.shares and len(self.shares) != size:
            raise PlanError(f"order={self}: there are leaves for {len(self.shares)} ranks, not for {size}")
        return self.shares or split(self.leaves, size)

    def subtrees(self, size: int) -> tuple[tuple[int, ...], ...]:
        """The leaves of each rank as few nodes of the tree, for each of `size` ranks."""
        return tuple(subtrees(self.leaves, a, b) for a, b in pairwise(offsets(self.counts(size))))


def reduced_in_order(op: str, values: Sequence[Value], sizes: Sequence[int] = ()) -> Value:
    """The reduction of all `values` by `op` (`kernels.REDUCTIONS`), in the order of the tree (`folded`)."""
    whole = folded(values, lambda a, b: ordered_pair(op, a, b), sizes)
    return mean_of(len(values), whole) if op == "mean" and len(values) > 1 else whole
