"""What a file of ours may say: each function gives the value back as it should be, or a LayoutError with its name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from fompi.base.errors import LayoutError
from fompi.base.layout import MOST_NBYTES

Points = tuple[tuple[float, float], ...]
"""A curve: (x, y) with growing x; straight lines between them, and beyond the last two."""

MOST_SECONDS, LEAST_SPEED, MOST_SPEED = 1e9, 1e-9, 1e300
"""Beyond, sums of times are no numbers any more."""

MOST_FILE_NBYTES, MOST_DIGITS, MOST_LETTERS = 16 << 20, 400, 1000
"""Of a file, of a whole number in it, and of a line: what is longer nobody has measured."""


def read(path: Path) -> bytes:
    """What is in a file, up to the first byte that is too many for `parsed`."""
    with path.open("rb") as file:
        return file.read(MOST_FILE_NBYTES + 1)


def parsed(text: str | bytes) -> Any:
    """What a text in JSON says, no field of an object twice."""
    if len(text) > MOST_FILE_NBYTES:
        raise LayoutError(f"longer than {MOST_FILE_NBYTES >> 20} MiB")
    try:
        return json.loads(text, object_pairs_hook=_each_once, parse_int=_digits)
    except LayoutError:  # a ValueError too, and says more
        raise
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"not JSON: {error}") from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise LayoutError(f"the field {shown(twice)} is there twice")
    return found


def _digits(digits: str) -> float:
    """A whole number; one that no field can have is as good as any other."""
    return int(digits) if len(digits) <= MOST_DIGITS else inf


def line(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable() or len(value) > MOST_LETTERS:
        raise LayoutError(f"{name} must be a line of at most {MOST_LETTERS} letters, not {shown(value)}")
    return value


def truth(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise LayoutError(f"{name} must be true or false, not {shown(value)}")
    return value


def whole(name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise LayoutError(f"{name} must be a whole number from {least} to {most}, not {shown(value)}")
    return value


def number(name: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise LayoutError(f"{name} must be a number, not {shown(value)}")
    try:
        found = float(value)
    except OverflowError:
        found = inf
    if not least <= found <= most:
        raise LayoutError(f"{name}={shown(value)} is out of range")
    return found


def seconds(name: str, value: Any) -> float:
    return number(name, value, 0.0, MOST_SECONDS)


def speed(name: str, value: Any, fastest: float) -> float:
    """A rate; one without end is the greatest that a file can hold."""
    return min(MOST_SPEED, number(name, value, LEAST_SPEED, fastest))


def listed(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise LayoutError(f"{name} must be a list, not {shown(value)}")
    return value


def points(name: str, value: Any) -> Points:
    """A curve of seconds, of at least one point."""
    found = []
    for i, point in enumerate(listed(name, value)):
        if not isinstance(point, (list, tuple)) or len(point) != 2:
            raise LayoutError(f"{name}[{i}] must be two numbers, x and seconds, not {shown(point)}")
        found.append((number(f"{name}[{i}][0]", point[0], 0.0, MOST_NBYTES), seconds(f"{name}[{i}][1]", point[1])))
    if not found or any(b[0] <= a[0] or b[1] < a[1] for a, b in pairwise(found)):
        raise LayoutError(f"{name} must be points with growing x and seconds that do not fall, at least one")
    if any((b[1] - a[1]) * LEAST_SPEED > b[0] - a[0] for a, b in pairwise(found)):
        raise LayoutError(f"{name} is steeper than {1 / LEAST_SPEED:g} seconds for each of x")
    return tuple(found)
