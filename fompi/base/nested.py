"""Results and arguments that are nested in tuples and lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def flatten(nested: Any) -> list[Any]:
    """The leaves, in order. None is a leaf."""
    return [leaf for part in nested for leaf in flatten(part)] if isinstance(nested, (tuple, list)) else [nested]


def unflatten(like: Any, leaves: Iterable[Any]) -> Any:
    """The inverse: `leaves` nested as in `like`, in tuples."""
    rest = iter(leaves)

    def filled(part: Any) -> Any:
        return tuple(map(filled, part)) if isinstance(part, (tuple, list)) else next(rest)

    return filled(like)
