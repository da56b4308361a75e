"""Communicators and meshes in the pickle of a user's object, for example of a torch module.

The pickle has only the name and the ranks. Loading it finds what is open in this process. fompi itself never pickles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any, Self
from weakref import WeakValueDictionary

from fompi.base.errors import StateError

Key = tuple[str, str, tuple[int, ...]]
"""What the pickle of a communicator or a mesh contains: its kind, its name, and its ranks in MPI_COMM_WORLD."""

_COUNTS: Counter[Key] = Counter()
_MADE: WeakValueDictionary[tuple[Key, int], Any] = WeakValueDictionary()
_NUMBERS = count()


def remember(made: Any, kind: str, name: str, ranks: Sequence[int], is_only: bool = False) -> Key:
    """The key of `made`, under which `reopened` finds it as long as it is open. `is_only`: no other one has it."""
    key = kind, name, tuple(ranks)
    made.number = _COUNTS[key]
    if not is_only:
        _COUNTS[key] += 1
    _MADE[key, next(_NUMBERS)] = made
    return key


def reopened(kind: str, name: str, ranks: tuple[int, ...]) -> Any:
    """The communicator or mesh with this key that is open in this process, the last one if there are several.

    Raises StateError if there is none.
    """
    key = kind, name, ranks
    found = [(number, made) for (other, number), made in list(_MADE.items()) if other == key and not made.closed]
    if not found:
        raise StateError(
            f"this process has no open {kind} {name!r} of the ranks {', '.join(map(str, ranks))}: create it before you "
            "load a pickle with it. The pickle has only its name and its ranks"
        )
    return max(found, key=lambda pair: pair[0])[1]


class Shared:
    """A communicator or a mesh, of which a user's object holds one. A copy is the object itself: it has the same ranks.

    Loading its pickle gives the open one of the same name and ranks, or raises StateError.
    """

    _key: Key
    number: int
    """How many of the same name and ranks this process has made before. All its ranks have the same number."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        return reopened, self._key
