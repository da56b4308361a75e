"""The order in which a sum adds its terms, where one is asked for: a fixed binary tree.

    order="ranks"   tree(5) = ((0 + 1) + (2 + 3)) + 4, of the terms of ranks 0 to 4

A node of n leaves is the node of its first m leaves plus the node of the others, where m is the largest power of two
that is less than n. So 2**i leaves from a multiple of 2**i on are a node, however many leaves follow them.
Floating-point addition is not associative: only the same tree gives the same bits, whatever the schedule, the slices
and the sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from fompi.plans.kernels import Value, in_order, mean_of

T = TypeVar("T")


def first_half(leaves: int) -> int:
    """How many of at least two leaves are in the first half of their node."""
    return 1 << (leaves - 1).bit_length() - 1


def folded(leaves: Sequence[T], node: Callable[[T, T], T]) -> T:
    """The root of the tree over these leaves, of which there is at least one."""
    if len(leaves) == 1:
        return leaves[0]
    middle = first_half(len(leaves))
    return node(folded(leaves[:middle], node), folded(leaves[middle:], node))


def reduced_in_order(op: str, values: Sequence[Value]) -> Value:
    """The reduction of all `values` by `op` (`kernels.REDUCTIONS`), in the order of the tree."""
    whole = folded(values, lambda a, b: in_order(op, a, b))
    return mean_of(len(values), whole) if op == "mean" and len(values) > 1 else whole
