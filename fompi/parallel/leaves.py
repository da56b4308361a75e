"""Gradients in an order of leaves: the terms of a sum are added as they come, in one tree; and sums without any order.

    order=Canonical(8), on 2 ranks: rank 0 announces leaves 0 to 3, ((0 + 1) + (2 + 3)), rank 1 leaves 4 to 7

A rank keeps one gradient for each node of the tree that still lacks a part: at most one more than log2 of its leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import frexp, ldexp

import numpy as np

from fompi.backends.numbers import Array
from fompi.base.errors import StateError
from fompi.base.layout import offsets


class LeafSums:
    """The gradients of a bucket, whose parameters are announced once for each leaf of this rank.

    `terms` are how many leaves each subtree of the rank has. `levels[j]` is the sum of the j-th one at the end.
    """

    def __init__(self, terms: Sequence[int], make: Callable[[], Array]):
        self.terms, self._ends, self._make = terms, offsets(terms), make
        self.levels: list[Array] = []
        self._nodes: dict[str, list[int]] = {}  # of each parameter, the leaves of the nodes that levels hold

    def add(self, name: str, span: tuple[int, int], leaf: Array) -> None:
        """The next leaf of a parameter, whose elements are `span`. Raises StateError if there is none."""
        nodes = self._nodes.setdefault(name, [])
        before, here = sum(nodes), slice(*span)
        if before == self._ends[-1]:
            raise StateError(f"the gradient of {name!r} was announced more often than this rank has leaves, {before}")
        while len(self.levels) <= len(nodes):
            self.levels.append(self._make())
        self.levels[len(nodes)][here] = leaf.reshape(-1)
        nodes.append(1)
        subtree = sum(end <= before for end in self._ends[1:])
        is_whole = before + 1 == self._ends[subtree + 1]
        while len(nodes) > subtree + 1 and (nodes[-2] == nodes[-1] or is_whole):
            left, right = (self.levels[len(nodes) - k][here] for k in (2, 1))
            np.add(left, right, out=left)
            nodes[-2:] = [nodes[-2] + nodes[-1]]

    def sums(self) -> list[Array]:
        """The sum of each subtree. Raises StateError if a parameter was announced too seldom."""
        for name, nodes in self._nodes.items():
            if sum(nodes) != self._ends[-1]:
                count = self._ends[-1]
                raise StateError(
                    f"the gradient of {name!r} was announced {sum(nodes)} times; this rank has {count} leaves"
                )
        while len(self.levels) < len(self.terms):
            self.levels.append(self._make())
        return self.levels[: len(self.terms)]

    @property
    def nbytes(self) -> int:
        return sum(level.nbytes for level in self.levels)

    def forget(self, keeps_memory: bool) -> None:
        """The next step begins."""
        self._nodes.clear()
        if not keeps_memory:
            self.levels.clear()
        for level in self.levels[: len(self.terms)]:  # a parameter that is not announced adds nothing
            level.fill(0)


PARTS, BITS = 4, 36
"""A sum of at most 2**36 terms has 4 parts of 52 - 36 bits. What is below the last one is lost."""


def exact_sums(terms: Iterable[Array], greatest: float) -> Array:
    """The sums of the parts of non-negative float64 terms, none of which is over `greatest` on any rank.

    They are exact, so they do not depend on who adds which terms first. The sum of the parts is the sum of all.
    Source: the pre-rounding of Demmel and Nguyen, Fast reproducible floating-point summation (ARITH 2013).
    """
    sums = np.zeros(PARTS)
    if not 0 < greatest < np.inf:
        sums[0] = greatest
        return sums
    first = frexp(greatest)[1] + BITS
    for term in terms:
        rest = term
        for part in range(PARTS):
            sigma = ldexp(1.0, first - part * (52 - BITS))
            rounded = (rest + sigma) - sigma
            sums[part] += rounded.sum()
            rest = rest - rounded
    return sums
